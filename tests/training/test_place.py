"""--offload as a user meets it: the same results everywhere, checkpoints that open everywhere, and
refusals that come before the work."""

import shutil

import pytest
import torch
from conftest import (
    CPU,
    OWN_TABLES,
    SMALL,
    assert_same_run,
    checkpoint,
    contents,
    losses,
    refused,
    resume,
    small_run,
    user_error,
)
from simulated_gpu import SimulatedGpu

from offload import OffloadedTables
from tables import storage as storages
from tables.storage import DiskStorage, RamStorage
from tables.tables import ResidentTables, StoredTables
from text.tokenizer import encode
from training.checkpoints import load_model, save_checkpoint, tables_folder
from training.decoding import cast_backbone, load_to_decode
from training.placement import make_tables


def test_tables_on_disk_train_and_open_like_others(trained, on_disk):
    assert_same_run(on_disk, trained["stem"])
    assert len(list(tables_folder(on_disk / "ckpt.pt").iterdir())) == 1
    assert not any(name.startswith("tables.") for name in checkpoint(on_disk)["model"])
    written = set()
    for saved_on_disk, folder in ((False, trained["stem"]), (True, on_disk)):
        for kind in ("none", "cpu", "disk"):
            model, encoding, saved = load_model(folder / "ckpt.pt", CPU, kind)
            in_place = saved_on_disk and kind == "disk"
            assert type(model.tables) is (StoredTables if in_place else ResidentTables)
            # Weights are read in place from disk, or are all in memory.
            mapped = {weight.data_ptr() for weight in saved["model"].values()}
            assert (model.tables.weight[0].data_ptr() in mapped) == (kind == "disk")
            assert kind == "disk" or not mapped & {p.data_ptr() for p in model.parameters()}
            ids = torch.tensor([encode(encoding, "Anna")])
            written.add(tuple(model.generate(ids, 40, seed=0)[0].tolist()))
    assert len(written) == 1


RUNS = [
    dict(stem_layers="0,1", table_dtype="bfloat16", table_state="number", device_batch_size=2),
    dict(ffn="engram", doc_mask=True, table_dtype="bfloat16", dropout=0.2),
    dict(ffn="dense"),  # which has no tables
]


@pytest.mark.parametrize("more", RUNS, ids=str)
def test_a_run_resumes_to_the_bit_in_another_place(data, tmp_path, more):
    whole = small_run(data, tmp_path / "whole", **more, max_iters=3)
    cut = small_run(data, tmp_path / "cut", **more, max_iters=3, offload="disk")
    assert losses(whole) == losses(cut)
    if "table_state" in more:  # it is beside the rows
        assert checkpoint(cut)["optimizer"]["rows"]["tables"]["state"] is None
    for max_iters, place in ((4, "none"), (5, "disk")):
        resume(whole, max_iters=max_iters)
        resume(cut, max_iters=max_iters, offload=place)
    assert_same_run(cut, whole)


@pytest.mark.parametrize("flags", [dict(offload="disk"), dict(table_dtype="bfloat16")], ids=str)
def test_flags_that_tables_of_ones_own_do_not_obey_are_refused(data, tmp_path, add_relative, flags):
    add_relative("mine", OWN_TABLES)
    (name,) = flags
    with user_error(f"--{name}"):
        small_run(data, tmp_path / "out", ffn="mine", max_iters=1, **flags)
    small_run(data, tmp_path / "out", ffn="mine", max_iters=1, offload="cpu")
    small_run(data, tmp_path / "like", ffn="stem", max_iters=1, **flags)


def test_room_is_checked_before_training_replaces_a_run(out, data, tmp_path, monkeypatch):
    before = contents(out)
    args = ("train.py", "--data_dir", data, "--out_dir", out, *SMALL, "--overwrite", "--offload")
    monkeypatch.setattr(storages, "free_ram", lambda: 100)
    for kind in ("none", "cpu"):
        assert "--offload disk" in refused(*args, kind)
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(storages.shutil, "disk_usage", lambda path: usage)
    assert "another folder" in refused(*args, "disk")
    assert contents(out) == before


def test_a_gpu_gets_tables_through_the_ring(tmp_path, monkeypatch):
    with SimulatedGpu() as gpu:
        for offload, kind in (("cpu", RamStorage), ("disk", DiskStorage)):
            make = make_tables(offload, gpu.device, torch.float32, live=tmp_path / "live")
            tables = make(2, 10, 4)
            assert type(tables) is OffloadedTables and type(tables.storage) is kind
        sampled = make_tables("disk", gpu.device, torch.float32)(2, 10, 4)
        assert type(sampled.storage) is RamStorage
        monkeypatch.setattr(storages, "free_ram", lambda: 2 * 10 * 4 * 4 - 1)
        with user_error("RAM"):
            make_tables("cpu", gpu.device, torch.float32)(2, 10, 4)


def test_a_model_that_was_saved_in_16_bits_computes_in_the_dtype_that_is_asked_for(
    trained, tmp_path
):
    """Its rows stay as they are."""
    model, encoding, _ = load_model(trained["stem"] / "ckpt.pt", CPU)
    save_checkpoint(tmp_path / "half.pt", model.bfloat16(), encoding)
    model.blocks[0].register_buffer("turn", torch.ones(2, dtype=torch.complex64))
    cast_backbone(model, torch.float32)
    assert model.blocks[0].turn.is_complex()
    for given, dtype in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        half, _, _ = load_to_decode(tmp_path / "half.pt", CPU, dtype=given)
        assert half.head_weight.dtype == half.blocks[0].attn.qkv.qkv.weight.dtype == dtype
        assert half.tables.weight[0].dtype == torch.bfloat16


@pytest.mark.parametrize("ffn", ["stem", "embformer"])
def test_a_head_that_decodes_on_a_cpu_lies_by_columns(trained, ffn):
    """Also one that is the input embedding: single rows are multiplied twice as fast."""
    model, _, _ = load_to_decode(trained[ffn] / "ckpt.pt", CPU)
    assert model.head_weight.stride() == (1, model.config.vocab_size)
