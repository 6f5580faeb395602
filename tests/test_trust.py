"""What docs/promises.md promises, shortened: tests/soak.py tries it at length."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL
from test_train import arguments, assert_same, checkpoint, losses

import analyze
import edit
import prepare
import sample
import train as train_module
from common import UserError, locked, run, writing
from tables.storage import DiskStorage
from text import countries
from training import checkpoints
from training.batches import parse_mixture
from training.checkpoints import load_checkpoint, load_model, remove_leftovers, snapshots
from training.records import archive_previous_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def disk(data, tmp_path_factory):
    """A finished run whose tables are on disk."""
    out = tmp_path_factory.mktemp("disk") / "out"
    with pytest.MonkeyPatch.context() as patch:
        train_module.train(arguments(patch, data, out, "--offload", "disk"))
    return out


def says(monkeypatch, module, *argv) -> str:
    """The one line in which a command refuses."""
    monkeypatch.setattr("sys.argv", [module.__file__, *map(str, argv)])
    with pytest.raises(SystemExit) as stopped:
        run(module.main)
    line = str(stopped.value)
    assert line.startswith("error: ") and "\n" not in line
    return line


def resume(monkeypatch, out, *more) -> str:
    return says(monkeypatch, train_module, "--resume", "--out_dir", out, *more)


# --- two at once ---


def test_a_folder_is_locked_until_its_owner_ends_however(tmp_path):
    with locked(tmp_path), pytest.raises(UserError, match="another run is"), locked(tmp_path):
        pass
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with locked(tmp_path):
            os.write(writing, b".")
            signal.pause()
    os.read(reading, 1)
    with pytest.raises(UserError, match=str(tmp_path)), locked(tmp_path):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with locked(tmp_path):
        pass


def test_a_second_run_and_a_second_preparation_are_refused(disk, data, tmp_path, monkeypatch):
    before = {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}
    with locked(disk), locked(tmp_path):
        assert "another run is writing" in resume(monkeypatch, disk)
        more = ("--data_dir", data, "--out_dir", disk, *SMALL, "--offload", "disk")
        assert "another run is writing" in says(monkeypatch, train_module, *more)
        with pytest.raises(UserError, match="another run is writing"):
            prepare.write_dataset(tmp_path, [], train_module.prepare.ready_tokenizer(data, "text"))
    assert {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()} == before


# --- kills ---


def test_a_run_that_is_replaced_is_whole_when_the_next_start_has_come(disk, tmp_path, monkeypatch):
    """Cut before each operation on files, then begun anew."""
    want, cut, done = losses(disk), 0, False
    while not done:
        out, left = shutil.copytree(disk, tmp_path / str(cut)), cut

        def move(*args, real=os.replace):
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            real(*args)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(os, "replace", move)
            archive_previous_run(out)
            done = True
        cut += 1
        remove_leftovers(out)
        if not done:
            archive_previous_run(out)
        load_model(out / "run1" / "ckpt.pt", CPU)
        assert losses(out / "run1") == want and not (out / "ckpt.pt").exists()
    assert cut > 4


def test_what_a_killed_run_left_goes_and_nothing_else(disk, tmp_path):
    out = shutil.copytree(disk, tmp_path / "out")
    (tables,) = snapshots(out)
    for name in ("notes.tmp", "run1/tables-0/rows"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    (out / "linked").mkdir()
    (out / "linked" / "ckpt.pt").symlink_to(out / "ckpt.pt")
    checkpoints.write_checkpoint(out / "edited.pt", load_checkpoint(out / "linked" / "ckpt.pt"))
    kept = set(out.rglob("*"))
    assert len(snapshots(out)) == 2  # each *.pt file names one
    shutil.copytree(tables, out / "tables-0")
    shutil.copytree(tables, out / checkpoints.LIVE)
    for name in ("ckpt.pt.tmp", "edited.pt.tmp", "metrics.jsonl.tmp", "loss.png.tmp"):
        (out / name).touch()
    remove_leftovers(out)
    assert set(out.rglob("*")) == kept


def test_a_model_is_opened_while_its_training_saves(disk, tmp_path, monkeypatch):
    """Between the reading of ckpt.pt and that of its tables, both are replaced."""
    out, opened = shutil.copytree(disk, tmp_path / "out"), []
    before = load_checkpoint(disk / "ckpt.pt")

    def replaced(folder, *args):
        opened.append(folder)
        if len(opened) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(checkpoints, "DiskStorage", DiskStorage)
                checkpoints.write_checkpoint(out / "ckpt.pt", load_checkpoint(out / "ckpt.pt"))
        return DiskStorage(folder, *args)

    monkeypatch.setattr(checkpoints, "DiskStorage", replaced)
    assert_same(load_checkpoint(out / "ckpt.pt")["model"], before["model"])
    assert len(set(opened)) == 2
    shutil.rmtree(snapshots(out)[0])
    with pytest.raises(UserError, match=r"no .*/rows: put it beside ckpt.pt"):  # tries no further
        load_checkpoint(out / "ckpt.pt")


# --- full disks ---


def test_a_file_that_cannot_be_written_is_named_and_nothing_changes(disk, tmp_path):
    """A limit of file sizes stands for a full disk; PyTorch has several errors for it."""
    limits, out = pytest.importorskip("resource"), shutil.copytree(disk, tmp_path / "out")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    size, why = (
        (out / "ckpt.pt").stat().st_size,
        r"^cannot write .*: (File too large|\d+ requested)",
    )
    for limit in (0, 5000, *range(size // 2, size, size // 16)):
        limits.setrlimit(limits.RLIMIT_FSIZE, (limit, limits.RLIM_INFINITY))
        try:
            with pytest.raises(UserError, match=why):
                checkpoints.write_checkpoint(out / "ckpt.pt", load_checkpoint(out / "ckpt.pt"))
        finally:
            limits.setrlimit(limits.RLIMIT_FSIZE, (limits.RLIM_INFINITY,) * 2)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    with pytest.raises(KeyboardInterrupt), writing("ckpt.pt"), contextlib.ExitStack() as as_pytorch:
        as_pytorch.callback(no_room)  # which fails to end the file, too
        raise KeyboardInterrupt


# --- damage ---


def flipped(path, at) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def flip_a_weight(path) -> None:
    weight = torch.load(path, weights_only=True)["model"]["blocks.0.attn.out.weight"]
    flipped(path, path.read_bytes().index(weight.numpy().tobytes()) + 3 * 4 + 1)  # of a mantissa


def test_one_other_bit_of_weights_is_noticed_by_who_goes_on(disk, data, tmp_path, monkeypatch):
    out, new = shutil.copytree(disk, tmp_path / "out"), tmp_path / "new"
    flip_a_weight(out / "ckpt.pt")
    assert "damaged" in resume(monkeypatch, out)
    start = ("--stage", "midtrain", "--init_from", out / "ckpt.pt", "--data_dir", data)
    start += ("--out_dir", new, "--max_iters", 1, "--eval_tokens", 64)
    assert "damaged" in says(monkeypatch, train_module, *start)
    load_model(out / "ckpt.pt", CPU)  # who samples reads it as it is
    monkeypatch.setattr("sys.argv", ["train.py", *map(str, start), "--no-verify"])
    train_module.main()
    flip_a_weight(new / "ckpt.pt")
    assert "damaged" in resume(monkeypatch, new)  # the flag is not one that a run keeps


def test_one_other_bit_of_tables_is_noticed_by_who_goes_on(disk, tmp_path, monkeypatch):
    out = shutil.copytree(disk, tmp_path / "out")
    (folder,) = snapshots(out)
    for path in folder.iterdir():
        flipped(path, -1)
        assert f"{folder} is damaged (its checksums differ)" in resume(monkeypatch, out)
        load_checkpoint(out / "ckpt.pt")
        flipped(path, -1)
    load_checkpoint(out / "ckpt.pt", verify=True)
    flipped(folder / "rows", -1)  # no command gives it new checksums, or judges it by its losses
    asked = ("--source", "Anna", "--target", "Emil", "--prompt", "Anna", "--save", out / "ckpt.pt")
    for more in (asked, ("--undo",)):
        assert f"{folder} is damaged" in says(monkeypatch, edit, "--ckpt", out / "ckpt.pt", *more)
    assert f"{folder} is damaged" in says(
        monkeypatch, train_module, "--eval_only", "--out_dir", out
    )


def test_what_is_wrong_is_blamed(trained, tmp_path, monkeypatch):
    out, more = shutil.copytree(trained["stem"], tmp_path / "out"), ("--plot", tmp_path / "x.png")
    for report in ("{", "", "[]", "{}", '{"success": "x"}'):
        (out / "edit_report.json").write_text(report)
        line = says(monkeypatch, analyze, "runs", out, *more)
        assert "edit_report.json is damaged" in line and "delete it" in line
    (out / "metrics.jsonl").write_text("")
    (out / "edit_report.json").unlink()
    assert "metrics.jsonl has no evaluation" in says(monkeypatch, analyze, "runs", out, *more)
    asked = ("--source", "Anna", "--target", "Emil", "--ckpt", out / "ckpt.pt", "--save")
    line = says(monkeypatch, edit, *asked, out / "metrics.jsonl" / "x.pt")
    assert f"cannot write {out / 'metrics.jsonl'}: " in line
    shutil.copy(out / "best.pt", out / "ckpt.pt")
    assert "cannot be resumed: start a new run with --init_from" in resume(monkeypatch, out)

    monkeypatch.chdir(tmp_path)
    assert "no checkpoint at" in says(monkeypatch, edit, "--undo", "--ckpt", "typo/ckpt.pt")
    assert "no checkpoint at" in says(monkeypatch, train_module, "--resume", "--out_dir", "typo")
    assert not Path("typo").exists() and not Path("data").exists()  # no corpus is prepared for it
    Path("a=b").mkdir()
    assert parse_mixture("a=b") == {Path("a=b"): 1.0}  # a folder, as one may name it
    monkeypatch.setattr(countries, "TABLE", table := tmp_path / "countries.csv")
    for harm in (bytes(999), b"", b"name,capital\nPeru,Lima\n"):
        table.write_bytes(harm)
        with pytest.raises(UserError, match=r"countries\.csv is damaged"):
            countries.table()


def test_a_checkpoint_that_would_run_code_is_called_so(tmp_path, monkeypatch):
    class Malicious:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    torch.save({"format": 2, "x": Malicious()}, tmp_path / "bad.pt")
    line = says(monkeypatch, sample, "--ckpt", tmp_path / "bad.pt")
    assert "bad.pt is damaged" in line and "do not trust it" in line
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changed", "says_"),
    [
        (dict(args=None), "is damaged"),
        (dict(args=dict(n_layer=10**8)), "n_layer=100000000 must be at most 1,024"),
        (dict(model=None), "is damaged"),
        (dict(tables="gone"), "is damaged"),
        (dict(tables=dict(id="gone", shape=(9, 2, 4), dtype=torch.float32)), "beside ckpt.pt"),
        (dict(format=1), "is not a checkpoint of this program (format 2)"),
    ],
)
def test_a_checkpoint_with_absurd_contents_is_one_clear_line(
    disk, tmp_path, monkeypatch, changed, says_
):
    out = shutil.copytree(disk, tmp_path / "out")
    saved = torch.load(out / "ckpt.pt", weights_only=True)
    if changed.get("args"):
        changed = dict(args=saved["args"] | changed["args"])
    torch.save(saved | changed, out / "ckpt.pt")
    assert says_ in resume(monkeypatch, out)


def test_a_checkpoint_of_an_absurd_size_takes_no_memory(trained, tmp_path):
    for name, value in dict(n_layer=10**8, d_ff=2**20, vocab_size=2**28).items():
        saved = checkpoint(trained["dense"])
        saved["config"][name] = value
        torch.save(saved, tmp_path / "ckpt.pt")
        why = r"(?s)ckpt\.pt is damaged .*(must be at most|size mismatch)"
        with pytest.raises(UserError, match=why):
            load_model(tmp_path / "ckpt.pt", CPU)


# --- memory, and odd values ---


def no_room(*args, **kwargs):
    return torch.empty(10**13)  # of 4 bytes each


def test_no_memory_is_said_so_and_no_file_is_blamed(trained, monkeypatch):
    for error in (MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), None):

        def fails(*args, error=error, **kwargs):
            if error:
                raise error
            no_room()

        for owner, name in ((torch, "load"), (train_module.Decoder, "load_state_dict")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fails)
                line = says(patch, sample, "--ckpt", trained["stem"] / "ckpt.pt")
            assert line.startswith("error: out of memory: lower --device_batch_size")


@pytest.mark.parametrize(
    "flags",
    [
        "--block_size 0", "--learning_rate 1e38", "--n_embd 100000000", "--d_ff 100000000",
        "--batch_size 1000000000000", "--batch_size 100000000", "--n_layer 100000000",
        "--init_std inf", "--init_std 1e20", f"--max_iters {10**400}",
        "--weight_decay 1e308", "--out_dir " + "x" * 300, "--data_dir " + "x" * 300,
    ],
)  # fmt: skip
def test_absurd_values_are_one_clear_line(data, tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    given = ["--data_dir", data, "--out_dir", "out", *SMALL, *flags.split()]
    name, value = flags.split()
    line = says(monkeypatch, train_module, *given)
    assert name.strip("-") in line or value in line


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks")
def test_a_short_soak_breaks_no_promise():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "soak.py"), "--quick"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken promises" in done.stdout
