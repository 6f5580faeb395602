"""What docs/promises.md promises, shortened: tests/soak.py tries it at length."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SMALL
from test_train import arguments, checkpoint, losses

import prepare
import sample
import train as train_module
from common import UserError, locked, run
from config import ModelConfig
from model import sample as draw
from tables.file import TableFile
from training import checkpoints
from training.checkpoints import (
    check_memory,
    load_checkpoint,
    load_model,
    remove_leftovers,
    snapshots,
)
from training.records import Log, archive_previous_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def disk(data, tmp_path_factory):
    """A finished run whose tables are in a file."""
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
    with (
        locked(tmp_path),
        pytest.raises(UserError, match="another run is writing"),
        locked(tmp_path),
    ):
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
    before = {path.name: path.read_bytes() for path in disk.iterdir()}
    with locked(disk), locked(tmp_path):
        assert "another run is writing" in resume(monkeypatch, disk)
        more = ("--data_dir", data, "--out_dir", disk, *SMALL, "--offload", "disk")
        assert "another run is writing" in says(monkeypatch, train_module, *more)
        with pytest.raises(UserError, match="another run is writing"):
            prepare.write_dataset(tmp_path, [], train_module.prepare.ready_tokenizer(data, "text"))
    assert {path.name: path.read_bytes() for path in disk.iterdir()} == before


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
    kept = {path.name for path in out.iterdir()} | {"notes.tmp", "run1"}
    (out / "run1").mkdir()
    (out / "notes.tmp").touch()
    (out / "run2.tmp").mkdir()
    shutil.copy(snapshots(out)[0], out / "tables-0.bin")
    names = (
        "tables-1.bin.tmp",
        "ckpt.pt.tmp",
        "best.pt.tmp",
        "metrics.jsonl.tmp",
        "live-tables.bin",
    )
    for name in (*names, "run2.tmp/ckpt.pt"):
        (out / name).touch()
    remove_leftovers(out)
    assert {path.name for path in out.iterdir()} == kept
    (out / "ckpt.pt").write_bytes(b"damaged")  # names nothing: so nothing may go
    remove_leftovers(out)
    assert {path.name for path in out.iterdir()} == kept


def test_a_model_is_opened_while_its_training_saves(disk, tmp_path, monkeypatch):
    """Between the reading of ckpt.pt and that of its tables, both are replaced."""
    out = shutil.copytree(disk, tmp_path / "out")
    new, opened = torch.load(disk / "ckpt.pt", weights_only=True), []

    def replaced(path):
        opened.append(path.name)
        if len(opened) == 1:
            (old,) = snapshots(out)
            new["tables"] = TableFile(old).copy(lambda name: out / f"tables-{name}.bin")
            torch.save(new, out / "new")
            os.replace(out / "new", out / "ckpt.pt")
            old.unlink()
        return TableFile(path)

    monkeypatch.setattr(checkpoints, "TableFile", replaced)
    assert load_checkpoint(out / "ckpt.pt")["tables"] == new["tables"]
    assert len(opened) == 2
    snapshots(out)[0].unlink()
    with pytest.raises(UserError, match="no table file at"):  # and does not try forever
        load_checkpoint(out / "ckpt.pt")


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
    (path,) = snapshots(out)
    for offset, size in TableFile(path).regions.values():
        if size:
            flipped(path, offset + size - 1)
            assert "its checksums differ" in resume(monkeypatch, out)
            load_checkpoint(out / "ckpt.pt")
            flipped(path, offset + size - 1)
    load_checkpoint(out / "ckpt.pt", verify=True)
    head, rest = path.read_bytes().split(b', "crc32": {', 1)  # as older snapshots were written
    path.write_bytes((head + b"}\n").ljust(4096, b"\0") + (head + b', "crc32": {' + rest)[4096:])
    load_checkpoint(out / "ckpt.pt", verify=True)


@pytest.mark.parametrize("name", ["ckpt.pt", "metrics.jsonl", "tables", "meta.json", "train.bin"])
def test_pipes_and_devices_are_refused_not_waited_for(disk, data, tmp_path, monkeypatch, name):
    out, folder = shutil.copytree(disk, tmp_path / "out"), shutil.copytree(data, tmp_path / "data")
    path = {"tables": snapshots(out)[0]}.get(name, out / name)
    if not path.exists():
        path = folder / name
    path.unlink()
    os.mkfifo(path)
    if name == "metrics.jsonl":
        Log(path, 12)  # which begins anew
        assert path.is_file()
    else:
        assert "a pipe or a device" in resume(monkeypatch, out, "--data_dir", folder)


def test_named_pipes_and_devices_are_refused(data, story, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.txt")
    os.symlink("/dev/zero", tmp_path / "zero.jsonl")
    out = ("--out_dir", tmp_path / "out")
    for path in (tmp_path / "pipe.txt", tmp_path / "zero.jsonl"):
        for module, *args in (
            (prepare, "--input", path, *out),
            (prepare, "--input", story, "--tokenizer", path, *out),
            (sample, "--ckpt", path),
            (train_module, "--stage", "sft", "--init_from", path, "--data_dir", data, *out),
        ):
            assert "a pipe or a device" in says(monkeypatch, module, *args)


def test_a_checkpoint_that_would_run_code_is_called_so(tmp_path, monkeypatch):
    class Malicious:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    torch.save({"format": 1, "x": Malicious()}, tmp_path / "bad.pt")
    line = says(monkeypatch, sample, "--ckpt", tmp_path / "bad.pt")
    assert "would run code (posix.mkdir)" in line and "damaged or not" not in line
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changed", "says_"),
    [
        (dict(step=13), "step 13 of 12"),
        (dict(step=-1), "step -1 of 12"),
        (dict(step="x"), "does not hold a whole model"),
        (dict(args=None), "does not hold a whole model"),
        (dict(args=dict(n_layer=10**8)), "n_layer=100000000 must be at most 1,024"),
        (dict(args=dict(batch_size="8")), "does not hold a whole model"),
        (dict(model=None), "does not hold a whole model"),
        (dict(tables="gone"), "no table file at"),
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


def test_a_checkpoint_of_an_absurd_size_is_refused_before_it_is_built(trained, tmp_path):
    saved = checkpoint(trained["dense"])
    for name, value in dict(n_layer=10**8, d_ff=2**27, vocab_size=2**28).items():
        saved["config"] = {**checkpoint(trained["dense"])["config"], name: value}
        torch.save(saved, tmp_path / "ckpt.pt")
        with pytest.raises(UserError, match=r"must be at most|the model needs .* of RAM"):
            load_model(tmp_path / "ckpt.pt", CPU)


# --- memory, and odd values ---


def no_room(*args, **kwargs):
    return torch.empty(10**13)  # of 4 bytes each


def test_no_memory_is_said_so_and_no_file_is_blamed(trained, monkeypatch):
    for error in (MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), None):

        def fails(*args, error=error, **kwargs):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(torch, "load", fails if error else no_room)
            line = says(patch, sample, "--ckpt", trained["stem"] / "ckpt.pt")
        assert "out of memory" in line and "--device_batch_size" in line and "damaged" not in line
    assert f"({4 * 10**13 / 2**30:.2f} GiB more at once)" in line
    with monkeypatch.context() as patch:
        patch.setattr(train_module.Decoder, "load_state_dict", no_room)
        line = says(patch, sample, "--ckpt", trained["stem"] / "ckpt.pt")
    assert "out of memory" in line


def test_the_memory_of_a_model_is_that_of_its_numbers(monkeypatch):
    config = ModelConfig(100, 16, 2, 2, 16, stem_layers="all")
    sizes = train_module.Decoder(config).sizes()
    need = 16 * sizes["backbone"] + 12 * sizes["table"] + 5
    monkeypatch.setattr(checkpoints, "free_ram", lambda: need)
    check_memory(config, 16, 12, 5)
    monkeypatch.setattr(checkpoints, "free_ram", lambda: need - 1)
    with pytest.raises(UserError, match="the model needs"):
        check_memory(config, 16, 12, 5)


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
    assert name.strip("-") in line or value in line or "the model needs" in line


def test_numbers_that_float32_has_not_are_the_most_probable_token():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 1.0, 0.0]])
    for options in ((1e-320, None, None), (1e-40, None, None), (1.0, None, 1e-320)):
        assert draw(logits, *options).tolist() == [1, 0]


def test_the_table_of_a_bench_is_one_that_can_be(monkeypatch):
    import bench

    assert "--table_gib inf" in says(monkeypatch, bench, "offload", "--table_gib", "inf")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks")
def test_a_short_soak_breaks_no_promise():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "soak.py"), "--quick"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken promises" in done.stdout
