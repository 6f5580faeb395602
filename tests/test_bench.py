"""bench.py measures what it says, on a model small enough to take seconds."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import command

import bench
from bench import Bench
from model import Decoder

SIZES = dict(n_layer=3, n_head=2, n_embd=24, vocab_size=50, block_size=16, batch_size=2, rounds=1)
TINY = ["--device", "cpu", *(part for n, value in SIZES.items() for part in (f"--{n}", value))]


@pytest.mark.parametrize("gib", [None, 0.25])
def test_tables_in_all_places(tmp_path, gib, capsys):
    rows = bench.bench_offload(Bench(device="cpu", dir=tmp_path, table_gib=gib, **SIZES))
    printed = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    places = ["cpu", "disk, warm", "disk, cold"] if not gib else ["disk, 0.25 GiB of rows"]
    assert list(rows) == ["resident", *places]
    for place, row in rows.items():
        assert f"| {place} |" in printed
        assert list(row) == ["decode 1", "decode 8", "prefill", "train"]
        assert all(task["tok/s"] > 0 and task["ratio"] > 0 for task in row.values())
        assert place != "resident" or {task["ratio"] for task in row.values()} == {1.0}


def test_all_of_it_in_a_quick_run(tmp_path):
    plot = ("--plot", tmp_path / "vocab.png")
    args = ("bench.py", "all", "--quick", "--rounds", 1, "--device", "cpu", *plot)
    printed = command(*args, cwd=tmp_path).stdout
    by_length, printed = printed.split("| attention |")[1].split("\n\n")[0], printed
    printed = printed.replace(by_length, "")
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if "|" in line]
    parts = [row[0] for row in rows if row[0] in bench.TABLES]
    assert parts == ["train", "decode", "attention", "vocab"]
    for kind in bench.KINDS:
        assert sum(row[0].startswith(kind) for row in rows) == 4  # train, decode 1 and 8, no cache
    assert {row[2] for row in rows if row[0].startswith("dense")} == {"1.00"}
    assert by_length.count("count, T = 128") == 2  # in all layers, and in a pattern
    assert (tmp_path / "vocab.png").read_bytes().startswith(b"\x89PNG")
    shortest = Bench(device="cpu", quick=True, **bench.QUICK | dict(rounds=1, block_size=1))
    assert all(math.inf > row["tok/s"] > 0 for row in bench.bench_decode(shortest).values())


def test_kinds_of_attention_by_length(tmp_path):
    """Only full attention's cache grows beyond a window of 128 tokens."""
    sizes = dict(quick=True, plot=tmp_path / "lengths.png", **SIZES | dict(block_size=80))
    rows = bench.bench_attention(Bench(device="cpu", **sizes))
    assert len(rows) == 2 * 6 and (tmp_path / "lengths.png").exists()
    per_token = 3 * 2 * 24 * 4  # layers, keys and values, channels, bytes
    for n in (80, 160):
        for name in ("full", "dense", "STEM, all"):
            assert rows[f"{name}, T = {n}"]["KiB of cache"] * 1024 == n * per_token
        row = rows[f"window, T = {n}"]
        assert row["KiB of cache"] * 1024 == min(n, 127) * per_token
        assert rows[f"count, T = {n}"]["KiB of cache"] * 1024 <= n * 2 * 8  # an id and a count
        assert all(row[task]["tok/s"] > 0 for task in ("train", "prefill", "decode"))
        assert rows[f"full, T = {n}"]["train"]["ratio"] == 1


def test_vocabularies_differ_in_nothing_but_their_size(monkeypatch):
    """Every contender reads the same tokens, whatever its head predicts. Memory is that of the
    tensors that are there: weights, optimizer states, and gradients of what AdamW trains."""
    seen, contenders, forward, timing = [], {}, Decoder.forward, bench.interleaved_timing

    def noted(model, ids, targets, *, table_ids):
        assert torch.equal(ids, table_ids)
        seen.append((ids, int(targets.max()), len(model.head.weight)))
        return forward(model, ids, targets, table_ids=table_ids)

    def recorded(group, rounds):
        contenders.update(group)
        return timing(group, rounds)

    monkeypatch.setattr(Decoder, "forward", noted)
    monkeypatch.setattr(bench, "interleaved_timing", recorded)
    rows = bench.bench_vocab(Bench(device="cpu", **bench.QUICK | dict(rounds=1)))
    batches = {tuple(ids.flatten().tolist()): len(ids.unique()) for ids, *_ in seen}
    assert len(batches) == 2 and min(batches.values()) > 50  # of the warm-up and of the round
    assert all(most < classes for _, most, classes in seen)
    assert {classes for *_, classes in seen} == {64, 500, 2500, 10000}
    for name, row in rows.items():
        model, state = contenders[name].model, contenders[name].optimizer.state_dict()
        tensors = [*model.parameters(), *(p for p in model.parameters() if p.requires_grad)]
        for moments in state["adamw"]["state"].values():
            tensors += [moments["exp_avg"], moments["exp_avg_sq"]]
        for moments in state["rows"].values():
            tensors += [*moments["m"], *moments["v"]]
        assert row["GiB"] * 2**30 == pytest.approx(sum(t.nbytes for t in tensors))


def test_a_ratio_is_the_median_of_those_within_a_turn():
    """Where some turns were slow for both, a ratio of medians would be another one."""
    rates = {"a": [9.0, 1.0, 4.0, 6.0], "b": [9.0, 2.0, 8.0, 3.0]}  # the first turn warms up
    contenders = {
        name: SimpleNamespace(turn=iter(each).__next__, over={"over b": "b"})
        for name, each in rates.items()
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
    line = command("bench.py", "offload", *TINY, *flags.split(), cwd=tmp_path, fails=True).stderr
    assert flags.split()[0][2:] in line or "gone" in line
