"""Commands on Windows, which neither replaces nor deletes what is mapped into memory."""

import errno
import math
import os
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT, SMALL, command, resume
from test_trust import EDIT, snapshots

import common
import train
from common import command_line
from tables import storage
from training.checkpoints import load_checkpoint
from training.folders import live_tables, run_folder

ON_DISK = ("--offload", "disk")
MAPS = Path("/proc/self/maps")  # what is mapped here
needs_maps = pytest.mark.skipif(not MAPS.exists(), reason="needs Linux's list of what is mapped")


def is_mapped(path: Path | str) -> bool:
    """Whether a file is, or one in a folder."""
    name = f" {os.path.realpath(path)}"
    return any(f"{name}{end}" in MAPS.read_text() for end in ("\n", "/"))


@pytest.fixture
def windows(monkeypatch):
    def careful(do: Callable) -> Callable:
        def unless_mapped(*paths, **options):
            if any(map(is_mapped, paths)):
                raise PermissionError(errno.EACCES, "Access is denied")
            do(*paths, **options)

        return unless_mapped

    for module, name in ((os, "replace"), (os, "unlink"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, careful(getattr(module, name)))
    monkeypatch.setattr(sys, "platform", "win32")


@needs_maps
def test_a_checkpoint_is_replaced_by_whoever_read_it(out, windows):
    for line in (
        "train.py --resume --out_dir . --max_iters 14",
        f"edit.py {EDIT} --ckpt . --save ckpt.pt",
        "edit.py --undo --ckpt ckpt.pt",
        "train.py --resume --out_dir . --max_iters 16",
    ):
        command(line, cwd=out)
        load_checkpoint(out / "ckpt.pt", verify=True)
    assert len(snapshots(out)) == 1  # of those that edits replaced, none is left


@needs_maps
def test_tables_that_trained_go_with_their_run(data, trained, tmp_path, windows):
    command("train.py", "--data_dir", data, "--out_dir", tmp_path / "run", *SMALL, *ON_DISK)
    converted = tmp_path / "new/ckpt.pt"
    ways = ("--ffn", "stem", "--stem_layers", "1", "--tokens", "500", "--out", converted, *ON_DISK)
    command("convert.py", trained["dense"] / "ckpt.pt", *ways)
    for folder in (tmp_path / "run", converted.parent):
        assert not live_tables(folder).exists()


@needs_maps
def test_tables_go_even_if_they_are_in_a_circle_of_references(tmp_path, windows):
    """As that of a module which knows the one it is part of."""
    with run_folder(tmp_path):
        circle = [storage.DiskStorage.create(live_tables(tmp_path), (2, 3, 4), torch.float32)]
        circle.append(circle)
        del circle
    assert not live_tables(tmp_path).exists()


@needs_maps
def test_a_run_that_resumes_lets_go_of_the_file(out, monkeypatch):
    """On any system: what is replaced takes room as long as it is mapped."""
    fit = train.fit

    def checked(run: train.Run) -> None:
        assert not is_mapped(out / "ckpt.pt")
        fit(run)

    monkeypatch.setattr(train, "fit", checked)
    resume(out, max_iters=13)


def test_tables_for_which_there_is_no_memory_are_one_line(monkeypatch):
    no_room = OSError(errno.EINVAL, "The paging file is too small for this operation to complete")
    monkeypatch.setattr(storage, "free_ram", lambda: math.inf)  # nobody knows
    monkeypatch.setattr(storage.mmap, "mmap", Mock(side_effect=no_room))
    with pytest.raises(SystemExit, match="error: out of memory"):
        common.run_command(lambda: storage.RamStorage((2, 3, 4), torch.float32))


def test_the_page_does_not_share_its_port_with_another_program(monkeypatch):
    """As there all do that may reuse an address (cpython issue 85307)."""
    for platform, may_reuse in (("linux", True), ("win32", False)):
        monkeypatch.setattr(sys, "platform", platform)
        page = runpy.run_path(str(ROOT / "lab/page.py"))
        assert page["Page"].allow_reuse_address == may_reuse


def test_printed_commands_are_in_quotes_that_its_shells_know(monkeypatch):
    """From another drive, too, from which no relative path leads here."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os.path, "relpath", Mock(side_effect=ValueError("path is on mount 'C:'")))
    line = command_line("train.py", "--data_dir", r"D:\my data", "--out_dir", r"out\mine")
    assert line == rf'python {ROOT / "train.py"} --data_dir "D:\my data" --out_dir out\mine'
