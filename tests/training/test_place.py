"""--offload as a user meets it: the same results everywhere, checkpoints that open everywhere, and
refusals that come before the work."""

import shutil

import pytest
import torch
from simulated_gpu import SimulatedGpu
from test_train import arguments, assert_same, checkpoint, losses

import edit
import sample
import train as train_module
from common import UserError, run
from offload import OffloadedTables, make_tables
from tables import storage as storages
from tables.storage import DiskStorage, RamStorage
from tables.tables import ResidentTables, StoredTables
from text.tokenizer import encode
from training import checkpoints
from training.checkpoints import load_checkpoint, load_model, snapshots

KINDS = ("none", "cpu", "disk")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """The same training run with its tables in each place."""
    folder = tmp_path_factory.mktemp("places")
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
def test_any_place_opens_any_checkpoint(runs, saved_as):
    written, kinds = set(), []
    for kind in KINDS:
        model, encoding, _ = load_model(runs[saved_as] / "ckpt.pt", CPU, kind)
        kinds.append(type(model.tables))
        ids = torch.tensor([encode(encoding, "Anna")])
        written.add(tuple(model.generate(ids, 40, seed=0)[0].tolist()))
    assert len(written) == 1
    assert kinds == [ResidentTables] * 2 + [StoredTables if saved_as == "disk" else ResidentTables]


@pytest.mark.parametrize("saved_as", ["none", "disk"])
def test_weights_are_read_in_place_from_disk_or_are_all_in_memory(runs, saved_as):
    for kind in ("disk", "none"):
        model, _, saved = load_model(runs[saved_as] / "ckpt.pt", CPU, kind)
        mapped = {weight.data_ptr() for weight in saved["model"].values()}
        assert (model.tables.weight[0].data_ptr() in mapped) == (kind == "disk")
        assert kind == "disk" or not mapped & {p.data_ptr() for p in model.parameters()}


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
    """A run on disk. The power fails at step 12, when the new tables are there and the new ckpt.pt
    is not."""
    folder, real = tmp_path_factory.mktemp("crashed"), torch.save

    def cut(state, path):
        if state["step"] == 12:
            patch.setattr(checkpoints.shutil, "rmtree", lambda *args, **more: None)
            raise KeyError("power cut")
        real(state, path)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError, match="power cut"):
        patch.setattr(checkpoints.torch, "save", cut)
        train_module.train(arguments(patch, data, folder, "--offload", "disk"))
    assert checkpoint(folder)["step"] == 6
    assert len(snapshots(folder)) == 2 and (folder / checkpoints.LIVE).exists()
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


def test_only_tables_that_no_checkpoint_names_are_deleted(runs, data, tmp_path, monkeypatch):
    """A copy of ckpt.pt goes on naming its tables, whatever the run does."""
    out = shutil.copytree(runs["disk"], tmp_path / "out")
    shutil.copy(out / "ckpt.pt", out / "earlier.pt")
    before = load_checkpoint(out / "earlier.pt")
    model, encoding, _ = load_model(out / "ckpt.pt", CPU, "disk")
    for _ in range(2):
        checkpoints.save_checkpoint(out / "ckpt.pt", model, encoding)
    assert len(snapshots(out)) == 2
    assert_same(load_checkpoint(out / "earlier.pt", verify=True)["model"], before["model"])
    (out / "earlier.pt").unlink()
    checkpoints.remove_unused_tables(out)
    (left,) = snapshots(out)
    assert left.name == f"tables-{checkpoint(out)['tables']['id']}"
    (out / "ckpt.pt").write_bytes(b"damaged")  # nobody knows what it named
    checkpoints.remove_unused_tables(out)
    assert snapshots(out) == [left]


def test_room_is_checked_before_training_starts(data, tmp_path, monkeypatch):
    def refused(*more):
        with pytest.raises(SystemExit) as stopped:
            run(lambda: train_module.train(arguments(monkeypatch, data, tmp_path / "out", *more)))
        assert "\n" not in str(stopped.value)
        return str(stopped.value)

    monkeypatch.setattr(storages, "free_ram", lambda: 100_000)
    for kind in ("none", "cpu"):
        says = refused("--offload", kind)
        assert "of RAM, 0.00 GiB are free" in says and "--offload disk" in says
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(storages.shutil, "disk_usage", lambda path: usage)
    says = refused("--offload", "disk")
    assert "of disk, 0.00 GiB are free" in says and "another --out_dir" in says
    assert not (tmp_path / "out").exists()


def test_room_on_disk_is_for_three_copies_one_of_which_a_resumed_run_has(tmp_path):
    saved = DiskStorage.create(tmp_path / "tables-0", (10, 2, 4), torch.float32)
    for name, start, copies in (("new", None, 3), ("resumed", saved, 2)):
        make = make_tables("disk", CPU, torch.float32, live=tmp_path / name, saved=start)
        assert make(2, 10, 4).storage.copies == copies


@pytest.mark.parametrize("flags", ["--offload disk", "--table_dtype bfloat16"])
def test_adamw_over_whole_tables_needs_them_resident(data, tmp_path, monkeypatch, flags):
    flags = [*flags.split(), "--table_optimizer", "adamw"]
    with pytest.raises(SystemExit, match=r"^error: --table_optimizer adamw needs --offload none"):
        run(lambda: train_module.train(arguments(monkeypatch, data, tmp_path, *flags)))


def test_a_dense_model_has_no_tables_to_offload(tmp_path):
    for kind in ("cpu", "disk"):
        made = make_tables(kind, CPU, torch.float32, live=tmp_path / "live")(0, 10, 0)
        assert len(made.weight) == 0 and not (tmp_path / "live").exists()


@pytest.mark.parametrize(("offload", "kind"), [("cpu", RamStorage), ("disk", DiskStorage)])
def test_a_gpu_gets_tables_through_the_ring(offload, kind, tmp_path):
    with SimulatedGpu() as gpu:
        tables = make_tables(offload, gpu.device, torch.float32, live=tmp_path / "live")(2, 10, 4)
        assert type(tables) is OffloadedTables and type(tables.storage) is kind
        # A ckpt.pt that holds its tables itself is read into memory.
        with torch.device("meta"):  # where models are made whose weights are mapped
            sampled = make_tables(offload, gpu.device, torch.float32)(2, 10, 4)
        assert type(sampled.storage) is RamStorage and len(sampled.storage.arrays) == 1
        assert sampled.slot_of.device.type == "cpu"
