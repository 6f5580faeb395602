"""--offload as a user meets it: the same results everywhere, checkpoints that any home opens, and
refusals that come before the work."""

import contextlib
import shutil

import pytest
import torch
from simulated_gpu import SimulatedGpu
from test_train import arguments, assert_same, checkpoint, losses

import edit
import sample
import train as train_module
from common import UserError, run
from offload import OffloadedTables
from tables import memory
from tables.file import TableFile
from tables.memory import RamStorage
from tables.tables import ResidentTables, StoredTables
from text.tokenizer import encode
from training import checkpoints
from training.checkpoints import load_checkpoint, load_model, make_tables, snapshots

KINDS = ("none", "cpu", "disk")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """The same training run with its tables in each home."""
    folder = tmp_path_factory.mktemp("homes")
    with pytest.MonkeyPatch.context() as patch:
        for kind in KINDS:
            train_module.train(arguments(patch, data, folder / kind, "--offload", kind))
    return {kind: folder / kind for kind in KINDS}


def test_training_runs_and_checkpoints_are_equal_to_the_bit(runs):
    saved = {kind: load_checkpoint(folder / "ckpt.pt") for kind, folder in runs.items()}
    for kind in ("cpu", "disk"):
        assert losses(runs[kind]) == losses(runs["none"])
        for part in ("model", "optimizer", "step"):
            assert_same(saved[kind][part], saved["none"][part])
    assert len(snapshots(runs["disk"])) == 1 and not snapshots(runs["cpu"])
    assert not (runs["disk"] / checkpoints.LIVE).exists()
    assert not any(name.startswith("tables.") for name in checkpoint(runs["disk"])["model"])


@pytest.mark.parametrize("saved_as", KINDS)
def test_any_home_opens_any_checkpoint(runs, saved_as):
    written, kinds = set(), []
    for kind in KINDS:
        model, encoding, _ = load_model(runs[saved_as] / "ckpt.pt", CPU, kind)
        kinds.append(type(model.tables))
        ids = torch.tensor([encode(encoding, "Anna")])
        written.add(tuple(model.generate(ids, 40, seed=0)[0].tolist()))
    assert len(written) == 1
    assert kinds == [ResidentTables] * 2 + [StoredTables if saved_as == "disk" else ResidentTables]


def test_tables_in_a_checkpoint_are_read_in_place(runs):
    """With --offload disk they are the mapped file, which would be copied by default."""
    ckpt = runs["none"] / "ckpt.pt"
    for kind, copied in (("disk", False), ("none", True)):
        model, _, checkpoint = load_model(ckpt, CPU, kind)
        mapped = checkpoint["model"]["tables.weight.0"].data_ptr()
        assert (model.tables.weight[0].data_ptr() != mapped) == copied


def called(monkeypatch, module, *argv) -> None:
    """A command, in this process."""
    monkeypatch.setattr("sys.argv", [module.__file__, *map(str, argv)])
    module.main()


def test_the_commands_take_the_flags(runs, monkeypatch, capsys):
    ckpt = ("--ckpt", runs["disk"] / "ckpt.pt", "--max_new_tokens", 20)
    texts = []
    for flags in ((), ("--offload", "disk"), ("--offload", "cpu")):
        called(monkeypatch, sample, *ckpt, *flags)
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    names = ("--source", "Anna", "--target", "Chloë", "--prompt", "Anna sees Björn. Anna meets")
    called(monkeypatch, edit, *ckpt, *names, "--offload", "disk")
    assert "undone: logits equal the first ones bit for bit" in capsys.readouterr().out


@pytest.fixture(scope="module")
def crashed(data, tmp_path_factory):
    """A run on disk. The power fails at step 12, when the new table file is there and the new
    ckpt.pt is not."""
    folder, real = tmp_path_factory.mktemp("crashed"), torch.save

    def cut(state, path):
        if state["step"] == 12:
            raise KeyError("power cut")
        real(state, path)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError, match="power cut"):
        patch.setattr(checkpoints.torch, "save", cut)
        train_module.train(arguments(patch, data, folder, "--offload", "disk"))
    assert checkpoint(folder)["step"] == 6
    assert len(snapshots(folder)) == 2
    return folder


@pytest.mark.parametrize("then", KINDS)
def test_a_crash_while_saving_leaves_a_pair_that_resumes_anywhere(
    crashed, runs, tmp_path, monkeypatch, then
):
    shutil.copytree(crashed, tmp_path / "out")
    called(monkeypatch, train_module, "--resume", "--out_dir", tmp_path / "out", "--offload", then)
    assert losses(tmp_path / "out") == losses(runs["none"])
    mine, other = (load_checkpoint(f / "ckpt.pt") for f in (tmp_path / "out", runs["none"]))
    for part in ("model", "optimizer"):
        assert_same(mine[part], other[part])
    assert len(snapshots(tmp_path / "out")) == (then == "disk")  # what is not named any more goes


def test_bfloat16_tables_resume_to_the_bit(data, tmp_path, monkeypatch):
    more = ("--table_dtype", "bfloat16")
    train_module.train(arguments(monkeypatch, data, tmp_path / "whole", *more))
    real = train_module.save_checkpoint

    def stopped(*args, **state):
        real(*args, **state)
        raise UserError("stopped")

    with monkeypatch.context() as patch, pytest.raises(UserError, match="stopped"):
        patch.setattr(train_module, "save_checkpoint", stopped)
        train_module.train(arguments(patch, data, tmp_path / "cut", *more, "--offload", "cpu"))
    called(
        monkeypatch, train_module, "--resume", "--out_dir", tmp_path / "cut", "--offload", "disk"
    )
    whole, cut = (load_checkpoint(tmp_path / name / "ckpt.pt") for name in ("whole", "cut"))
    assert whole["model"]["tables.weight.0"].dtype == torch.bfloat16
    for part in ("model", "optimizer"):
        assert_same(whole[part], cut[part])


def test_an_earlier_run_is_moved_with_its_tables(runs, data, tmp_path, monkeypatch):
    shutil.copytree(runs["disk"], tmp_path / "out")
    (name,) = [path.name for path in snapshots(tmp_path / "out")]
    more = ("--offload", "disk", "--max_iters", 1)
    train_module.train(arguments(monkeypatch, data, tmp_path / "out", *more))
    assert [path.name for path in snapshots(tmp_path / "out" / "run1")] == [name]
    load_model(tmp_path / "out" / "run1" / "ckpt.pt", CPU)
    assert len(snapshots(tmp_path / "out")) == 1
    load_model(tmp_path / "out" / "ckpt.pt", CPU)


def test_a_missing_or_foreign_table_file_is_one_clear_line(runs, tmp_path):
    (file,) = snapshots(runs["disk"])
    ckpt = tmp_path / "ckpt.pt"
    ckpt.write_bytes((runs["disk"] / "ckpt.pt").read_bytes())
    with pytest.raises(UserError, match="no table file at") as refused:
        load_model(ckpt, CPU)
    assert str(tmp_path / file.name) in str(refused.value)
    other = TableFile.create(tmp_path / "other.bin", TableFile(file).shape, torch.float32)
    shutil.copy(other.path, tmp_path / file.name)
    with pytest.raises(UserError, match="is not the table file of"):
        load_model(ckpt, CPU)


def test_room_is_checked_before_training_starts(data, tmp_path, monkeypatch):
    def refused(*more):
        with pytest.raises(SystemExit) as stopped:
            run(lambda: train_module.train(arguments(monkeypatch, data, tmp_path / "out", *more)))
        assert "\n" not in str(stopped.value)
        return str(stopped.value)

    monkeypatch.setattr(memory, "free_ram", lambda: 100_000)
    says = refused("--offload", "cpu")
    assert "0.1 MiB are available" in says and "--offload disk" in says
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: usage)
    says = refused("--offload", "disk")
    assert "0.1 MiB free" in says and "another --out_dir" in says
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


@pytest.mark.parametrize(("resume", "need"), [(False, 3), (True, 2)])
def test_room_on_disk_is_counted_in_copies_of_the_file(resume, need, tmp_path, monkeypatch):
    (tmp_path / "tables-0.bin").touch()  # a run that resumes has one already
    for size, fits in ((100 // need, True), (100 // need + 1, False)):
        usage = shutil.disk_usage(tmp_path)._replace(free=100)
        monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path, usage=usage: usage)
        with contextlib.nullcontext() if fits else pytest.raises(UserError, match="needs"):
            checkpoints.check_disk(size, tmp_path, resume)


def test_room_counts_states_only_in_training(monkeypatch):
    shape, rows = (1000, 2, 8), 1000 * 2 * 8 * 4
    monkeypatch.setattr(memory, "free_ram", lambda: rows)
    memory.check_ram(shape, torch.float32, training=False)
    with pytest.raises(UserError, match="with optimizer states"):
        memory.check_ram(shape, torch.float32, training=True)
    monkeypatch.setattr(memory, "free_ram", lambda: 3 * rows)
    memory.check_ram(shape, torch.float32, training=True)
    monkeypatch.setattr(memory, "free_ram", lambda: None)  # a system that does not tell
    memory.check_ram(shape, torch.float32, training=True)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            "--offload disk --table_optimizer adamw",
            "--table_optimizer adamw needs --offload none",
        ),
        (
            "--table_dtype bfloat16 --table_optimizer adamw",
            "needs --offload none, --table_dtype",
        ),
    ],
)
def test_flags_that_cannot_be_are_one_clear_line(data, tmp_path, monkeypatch, flags, says):
    with pytest.raises(SystemExit) as stopped:
        run(lambda: train_module.train(arguments(monkeypatch, data, tmp_path, *flags.split())))
    assert str(stopped.value).startswith("error: ") and says in str(stopped.value)


def test_a_dense_model_has_no_tables_to_offload():
    assert len(make_tables("cpu", CPU, {"model": {}})(0, 10, 0).weight) == 0


@pytest.mark.parametrize(("offload", "kind"), [("cpu", RamStorage), ("disk", TableFile)])
def test_a_gpu_gets_tables_through_the_ring(offload, kind, tmp_path):
    with SimulatedGpu() as gpu:
        tables = make_tables(offload, gpu.device, out_dir=tmp_path)(2, 10, 4)
        assert type(tables) is OffloadedTables and type(tables.storage) is kind
        # A ckpt.pt that holds its tables itself is read into memory.
        with torch.device("meta"):  # where models are made whose weights are mapped
            sampled = make_tables(offload, gpu.device, checkpoint={"model": {}})(2, 10, 4)
        assert type(sampled.storage) is RamStorage and len(sampled.storage.arrays) == 1
        assert sampled.place.device.type == "cpu"
