"""Who modifies the code makes mistakes: each ends in Python's traceback, which names the mistaken
line. What a user does wrong, such as a file that is damaged, is one line without a traceback."""

import errno
import importlib
import io
import os
import re
import sys
import traceback
import unicodedata
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    CPU,
    EDIT,
    ROOT,
    SMALL,
    command,
    config_source,
    edit_core,
    flags,
    put_relative,
    refused,
    small_run,
    user_error,
)

import common
import train
from lab.experiment import note_changes
from lab.runs import runs
from training import batches
from training.checkpoints import load_model
from training.digests import digests
from training.records import read_run
from training.settings import Settings

# What somebody adds to the project. A mistake is a line that is put in at its `place`.
SOURCE = """
import torch
from torch import nn
import model
{top}
from tables.tables import ResidentTables
from training.sources import Windows
from training.records import Log

class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        {build}
        self.row_width = 8
        self.up = nn.Linear(config.n_embd, 8)
        self.down = nn.Linear(8, config.n_embd)

    def forward(self, x, rows):
        {forward}
        return self.down(self.up(x) * rows)

class Rows(ResidentTables):
    def lookup(self, ids):
        {lookup}
        return super().lookup(ids)

class Decoder(model.Decoder):
    def make_block(self, layer):
        {block}
        config = self.config
        return model.Block(config, layer, model.LinearQKV(config), Layer(config))

    def make_tables(self, tables, widths):
        return Rows(len(widths), self.config.vocab_size, widths[0])

class MyLog(Log):
    def write(self, **record):
        super().write(**record)
        {log}

class MyWindows(Windows):
    def sequence(self, index):
        ids, targets = super().sequence(index)
        {row}
        return ids, targets
"""

# Place, the mistaken line, what it raises.
MISTAKES = [
    ("top", "import my_kernels", ModuleNotFoundError),
    ("block", "self.config.n_layers", AttributeError),
    ("build", "open('my-weights.bin')", FileNotFoundError),
    ("forward", "x = x @ torch.ones(3, 3)", RuntimeError),
    ("forward", "raise BrokenPipeError(32, 'my socket')", BrokenPipeError),
    ("forward", "raise OSError(28, 'no room for my file')", OSError),
    ("lookup", "raise NotImplementedError", NotImplementedError),
    ("log", "raise ConnectionResetError(104, 'Connection reset by peer')", ConnectionResetError),
    ("row", "record = {'text': 1}['txt']", KeyError),
]


def add_mine(patch: pytest.MonkeyPatch, folder: Path, place="top", line: str = "pass") -> Path:
    """Have SOURCE in relatives/mine.py."""
    lines = {**dict.fromkeys(re.findall("{(.*)}", SOURCE), "pass"), place: line}
    return put_relative(patch, folder, "mine", SOURCE.format(**lines))


@pytest.fixture(scope="module")
def right(data, tmp_path_factory) -> Path:
    """A checkpoint of the layer without a mistake."""
    folder = tmp_path_factory.mktemp("right")
    with pytest.MonkeyPatch.context() as patch:
        add_mine(patch, folder)
        return small_run(data, folder / "out", ffn="mine", max_iters=1)


@pytest.mark.parametrize(("place", "line", "kind"), MISTAKES)
def test_a_mistake_of_ones_own_is_a_traceback_that_ends_there(
    right, data, tmp_path, monkeypatch, place, line, kind
):
    path = add_mine(monkeypatch, tmp_path, place, line)
    commands = ["train", "sample", "edit"]
    if place in ("log", "row"):
        mine = importlib.import_module("relatives.mine")
        monkeypatch.setattr(train, "Log", mine.MyLog)
        monkeypatch.setattr(batches, "Windows", mine.MyWindows)
        commands = ["train"]

    for name in commands:
        with pytest.raises(kind) as caught:
            if name == "train":
                given = dict(ffn="mine", max_iters=2, eval_tokens=64)
                common.run_command(lambda given=given: small_run(data, tmp_path / "out", **given))
            elif name == "sample":
                command("sample.py", "--ckpt", right / "ckpt.pt")
            else:
                command("edit.py", "--ckpt", right / "ckpt.pt", *EDIT)
        frames = traceback.extract_tb(caught.value.__traceback__)
        files = [Path(frame.filename) for frame in frames]
        ours = [
            frame
            for frame, file in zip(frames, files, strict=True)
            if file == path or (ROOT in file.parents and "site-packages" not in file.parts)
        ]
        assert ours[-1].filename == str(path) and ours[-1].line == line
        assert caught.value.__cause__ is None


def test_a_file_that_changes_while_a_run_goes_on_is_not_the_runs(
    data, tmp_path, monkeypatch, capsys
):
    """Python has imported the old one, so that this is what was trained, to the end."""
    path = add_mine(monkeypatch, tmp_path)
    began = path.read_text()

    def edit(step, settings):
        path.write_text(began + "# changed\n")
        return 1.0

    with monkeypatch.context() as patch:
        patch.setattr(train, "schedule", edit)
        out = small_run(data, tmp_path / "out", ffn="mine", max_iters=2, eval_interval=1)
    capsys.readouterr()
    load_model(out, CPU)
    assert f"relatives/mine.py has changed since {out}" in capsys.readouterr().err
    path.write_text(began)
    load_model(out, CPU)
    assert not capsys.readouterr().err
    (start,) = read_run(out)["run"]
    assert start["relatives"] == digests("mine", "full")

    path.write_text(began + "# changed\n")  # before another run in the same process
    small_run(data, tmp_path / "again", ffn="mine", max_iters=1)
    assert "mine.py changed after Python read it" in capsys.readouterr().out
    (again,) = read_run(tmp_path / "again")["run"]
    assert again["relatives"] == start["relatives"]
    importlib.reload(sys.modules["relatives.mine"])
    small_run(data, tmp_path / "reloaded", ffn="mine", max_iters=1)
    (reloaded,) = read_run(tmp_path / "reloaded")["run"]
    assert reloaded["relatives"] == digests("mine", "full") != start["relatives"]


def test_a_file_of_all_models_that_changed_is_named_too(data, tmp_path, monkeypatch, capsys):
    """Runs before and after are no samples of one model, though they differ in the seed alone."""
    first = small_run(data, tmp_path / "first", max_iters=1, seed=1)
    edit_core(monkeypatch, tmp_path, "stem.py")
    second = small_run(data, tmp_path / "second", max_iters=1, seed=2)
    capsys.readouterr()
    load_model(second, CPU)
    assert not capsys.readouterr().err
    load_model(first, CPU)
    assert capsys.readouterr().err == (
        f"note: stem.py has changed since {first}/ckpt.pt was written\n"
    )
    third = small_run(data, tmp_path / "third", max_iters=1, seed=3)
    metrics = third / "metrics.jsonl"
    before = (first / "metrics.jsonl").read_text().splitlines()[0]
    metrics.write_text(before + "\n" + metrics.read_text())  # it was interrupted
    capsys.readouterr()
    note_changes(third)
    assert "note: stem.py changed since kept runs" in capsys.readouterr().err
    runs([second, third], tmp_path / "runs.png")
    said = capsys.readouterr().out
    assert "note: stem.py changed between these runs" in said
    assert "| second" in said and "| third" in said


FIELDS = (
    'rank: Optional[int] = flag(None, "rank", must="at least 1")',
    'shape: str = flag("flat", "shape", choices=("flat", "deep"))',
    'depth: Optional[int] = flag(None, "depth", choices=(1, 2))',
    "sizes: tuple[int, ...] = (1, 2)",
    "rates: Optional[dict[str, float]] = None",
)


def test_a_config_may_have_types_as_python_writes_them(data, tmp_path, add_relative):
    add_relative("typed", config_source(*FIELDS))
    more = flags(data_dir=data, out_dir=tmp_path / "out", ffn="typed", max_iters=1)
    assert "--rank" in refused("train.py", *SMALL, *more, "--rank", "0")
    assert "--depth: invalid choice" in refused("train.py", *SMALL, *more, "--depth", "3")
    command("train.py", *SMALL, *more, "--rank", "3", "--shape", "deep", "--depth", "2")
    config = load_model(tmp_path / "out", CPU)[0].config
    assert (config.shape, config.depth) == ("deep", 2)
    Config = importlib.import_module("relatives.typed").Config
    right = dict(rank=2, shape="deep", sizes=(3,), rates={"a": 1})
    assert Config(**right).rank == 2
    for wrong in ("x", True, 1.5, ["a"], {"a": "b"}, {1: 1.0}, ("a",)):
        for name in right:
            with user_error(f"--{name} "):
                Config(**{**right, name: wrong})


CHOSEN = ("table_optimizer", "schedule", "offload", "table_state", "stage", "preset", "dtype")
WRONG = [
    ("max_iters", "x", "'x' is not of type int$"),
    ("d_ff", "x", r"'x' is not of type int \| None$"),
    # No checkpoint holds numbers of NumPy.
    ("learning_rate", np.float64(1e-3), ".*give a plain value"),
    ("ffn", np.str_("stem"), ".*give a plain value"),
    *((name, wrong, "") for name in CHOSEN for wrong in ("linaer", "", 3)),
]


def test_settings_from_python_are_checked_as_flags_are(data):
    for name, wrong, said in WRONG:
        with user_error(f"--{name} {said}"):
            train.resolve_settings(data_dir=data, **{name: wrong})
    with user_error("--schedule "):
        Settings(schedule="linaer")
    with user_error("with --ffn engram: ngram_row; did you mean ngram_rows?"):
        train.resolve_settings(data_dir=data, ffn="engram", ngram_row=3)
    assert train.resolve_settings(data_dir=data, out_dir="x").data_dir == str(data)


@pytest.mark.parametrize("field", ["seed: int = 7", "seed: int = flag(7, 'seed')"])
def test_a_setting_of_a_relative_is_none_of_every_run(field, data, add_relative):
    """Else it would take the value that the run was given."""
    add_relative("clash", config_source(field))
    assert "clash.py: the setting seed" in refused("train.py --ffn clash --seed 3 --data_dir", data)
    with user_error(r"clash\.py: the setting seed"):
        train.resolve_settings(ffn="clash", seed=3, data_dir=data)


def fail(said: str) -> None:
    raise RuntimeError(said)


@pytest.mark.parametrize(
    "work",
    [
        partial(torch.empty, 10**15),  # more than there are addresses
        partial(
            fail,
            "MPS backend out of memory (MPS allocated: 5.56 GB, other allocations: 1.10 GB, max "
            "allowed: 6.80 GB). Tried to allocate 768.00 MB on private pool.",
        ),
        partial(fail, "Invalid buffer size: 24.00 GB"),
        partial(fail, "CUDA error: out of memory\nCUDA kernel errors might be reported later."),
        partial(fail, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_no_memory_is_one_line(work):
    with pytest.raises(SystemExit, match=r"error: out of memory in .*, line \d+ \(.*\): lower"):
        common.run_command(work)


def test_text_of_a_model_or_a_file_does_nothing_to_a_terminal(monkeypatch):
    class Terminal(io.TextIOWrapper):
        def isatty(self):
            return True

    text = "".join(map(chr, range(0x250)))
    terminal = Terminal(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", terminal)

    def main():
        print(text, flush=True)
        raise common.UserError(f"run it with 'a  b': {text}")

    with pytest.raises(SystemExit) as ended:
        common.run_command(main)
    visible = {letter for letter in text if unicodedata.category(letter) != "Cc"}
    for got in (terminal.buffer.getvalue().decode(), ended.value.code):
        assert visible <= {*got} <= visible | {*"\ufffd\n\t"}
    assert "'a  b'" in ended.value.code


def test_help_has_no_control_characters():
    """Python 3.14 would write colors on a terminal."""
    assert common.make_parser("").color is False


def test_a_command_without_standard_output_ends_well(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    common.run_command(lambda: print("unheard"))


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EINVAL, errno.ENOSPC])
def test_what_is_left_to_write_goes_nowhere(number, monkeypatch):
    """The second error is that of Windows. Only no room is told."""
    reason = os.strerror(number)
    file = os.dup(1)

    class Gone(io.StringIO):
        def flush(self):
            raise OSError(number, reason)

        def fileno(self):
            return file

    with pytest.raises(SystemExit) as ended:
        monkeypatch.setattr(sys, "stdout", Gone())
        common.run_command(lambda: print("x"))
    assert ended.value.code == (f"error: stdout: {reason}" if number == errno.ENOSPC else 1)
    assert os.path.samestat(os.fstat(file), os.stat(os.devnull))  # takes what is left to write
