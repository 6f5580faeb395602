"""bench.py measures what it says, on a model small enough to take seconds."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import command

import bench
from bench import QUICK, Bench
from model import Decoder

SIZES = {
    "n_layer": 3,
    "n_head": 2,
    "n_embd": 24,
    "vocab_size": 50,
    "block_size": 16,
    "batch_size": 2,
    "rounds": 1,
}


@pytest.mark.parametrize("gib", [None, 0.25])
def test_tables_in_all_places(tmp_path, gib, capsys):
    rows = bench.bench_offload(Bench(device="cpu", dir=tmp_path, table_gib=gib, **SIZES))
    printed = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    places = ["disk, 0.25 GiB of rows"] if gib else ["RAM", "disk, warm", "disk, cold"]
    assert list(rows) == ["resident", *places]
    for place, row in rows.items():
        assert f"| {place} |" in printed
        assert list(row) == ["decode 1", "decode 8", "prefill", "train"]
        assert all(task["tok/s"] > 0 and task["ratio"] > 0 for task in row.values())
    assert {task["ratio"] for task in rows["resident"].values()} == {1.0}


def test_all_of_it_in_a_quick_run(tmp_path):
    plot = tmp_path / "vocab.png"
    args = ("all", "--quick", "--rounds", 1, "--device", "cpu", "--plot", plot)
    printed = command("bench.py", *args, cwd=tmp_path).stdout
    titles = [table.split(" | ")[0] for table in printed.split("\n\n")]
    titles = [title.strip("| \n") for title in titles]
    assert titles == ["train", "decode", "attention", "vocab", "tables"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    shortest = Bench(device="cpu", quick=True, **{**QUICK, "rounds": 1, "block_size": 1})
    assert all(math.inf > row["tok/s"] > 0 for row in bench.bench_decode(shortest).values())


def test_kinds_of_attention_by_length(tmp_path):
    """Only full attention's cache grows beyond a window of 128 tokens."""
    sizes = {**SIZES, "block_size": 80, "quick": True, "plot": tmp_path / "lengths.png"}
    rows = bench.bench_attention(Bench(device="cpu", **sizes))
    assert len(rows) == 2 * 6 and (tmp_path / "lengths.png").exists()
    per_token = 3 * 2 * 24 * 4  # layers, keys and values, channels, bytes
    for n in (80, 160):
        for kind, least, most in (
            ("full", n * per_token, n * per_token),
            ("dense", n * per_token, n * per_token),
            ("window", min(n, 127) * per_token, min(n, 127) * per_token),
            ("count", 16, n * 2 * 8),  # an id and a count
        ):
            assert least <= rows[f"{kind}, T = {n}"]["KiB of cache"] * 1024 <= most
        assert rows[f"full, T = {n}"]["decode"]["ratio"] == 1
    assert all(row[task]["tok/s"] > 0 for row in rows.values() for task in ("train", "decode"))


def test_vocabularies_differ_in_nothing_but_their_size(monkeypatch):
    """Every contender reads the same tokens, whatever its head predicts. Memory of AdamW over whole
    tables is weights, gradients and two moments; rows have no gradients to keep."""
    seen, contenders = [], {}
    forward, timing = Decoder.forward, bench.interleaved_timing

    def noted(model, ids, targets, *, table_ids):
        assert torch.equal(ids, table_ids)
        seen.append((ids, int(targets.max()), len(model.head.weight)))
        return forward(model, ids, targets, table_ids=table_ids)

    def recorded(group, rounds):
        contenders.update(group)
        return timing(group, rounds)

    monkeypatch.setattr(Decoder, "forward", noted)
    monkeypatch.setattr(bench, "interleaved_timing", recorded)
    rows = bench.bench_vocab(Bench(device="cpu", **{**QUICK, "rounds": 1}))
    smallest = [ids for ids, _, _ in seen if ids.max() < 500]
    assert len({tuple(ids.flatten().tolist()) for ids in smallest}) >= 2  # warm-up and round
    assert all(most < classes for _, most, classes in seen)
    assert {classes for *_, classes in seen} == {64, 500, 2500, 10000}
    for name, row in rows.items():
        sizes = contenders[name].model.sizes()
        numbers = row["GiB"] * 2**30 / 4
        if "whole tables" in name:
            assert numbers == pytest.approx(4 * sizes["total"], rel=1e-3)
        else:
            dense = sizes["backbone"] - sum(w.numel() for w in contenders[name].model.wte.weight)
            least = sizes["total"] + 3 * dense
            assert least <= numbers <= 1.1 * (3 * sizes["total"] + dense)


def test_a_gpu_multiplies_what_it_can(monkeypatch):
    """bfloat16 where it is native, float16 on a T4; never on a CPU."""
    monkeypatch.setattr(bench, "pick_device", torch.device)
    for native, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(bench, "has_bfloat16", lambda device, native=native: native)
        assert Bench(device="cuda").dtype == dtype
        assert Bench(device="cpu").dtype == torch.float32


def test_a_ratio_is_the_median_of_those_within_a_turn():
    """Where some turns were slow for both, a ratio of medians would be another one."""
    rates = {"a": [9.0, 1.0, 4.0, 6.0], "b": [9.0, 2.0, 8.0, 3.0]}  # the first turn warms up
    contenders = {
        name: SimpleNamespace(turn=iter(turns).__next__, over={"over b": "b"}, task=None)
        for name, turns in rates.items()
    }
    rows = bench.interleaved_timing(contenders, rounds=3)
    assert rows == {"a": {"tok/s": 4.0, "over b": 0.5}, "b": {"tok/s": 3.0, "over b": 1.0}}


def test_ids_follow_zipf():
    ids = bench.zipf((100_000,), 6400, 0)
    assert ids.min() >= 0 and ids.max() < 6400
    for k in (0, 1, 10, 100):
        share = (ids == k).double().mean().item()
        assert share == pytest.approx(math.log((k + 2) / (k + 1)) / math.log(6401), abs=0.003)


@pytest.mark.parametrize("flags", ["--rounds 0", "--table_gib -1", "--n_head 5", "--dir gone"])
def test_bad_flags_are_one_clear_line(tmp_path, flags):
    args = ("bench.py", "offload", "--device", "cpu", *flags.split())
    name = flags.split()[0][2:]
    line = command(*args, cwd=tmp_path, fails=True).stderr
    assert name in line or "gone" in line
