"""bench.py measures what it says, on a model small enough to take seconds."""

import math

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
    places = ["disk, 0.25 GiB of rows"] if gib else ["RAM", "disk"]
    assert list(rows) == ["resident", *places]
    for place, row in rows.items():
        assert f"| {place} |" in printed
        assert list(row) == ["decode 1", "decode 8", "prefill", "train"]
        assert all(speed > 0 and ratio > 0 for speed, ratio in row.values())
    assert {ratio for _, ratio in rows["resident"].values()} == {1.0}


def test_all_of_it_in_a_quick_run(tmp_path):
    args = ("all", "--quick", "--rounds", 1, "--device", "cpu")
    printed = command("bench.py", *args, cwd=tmp_path).stdout
    titles = [table.split(" | ")[0] for table in printed.split("\n\n")]
    titles = [title.strip("| \n") for title in titles]
    assert titles == ["train", "decode", "attention", "vocab", "tables"]
    shortest = Bench(device="cpu", quick=True, **{**QUICK, "rounds": 1, "block_size": 1})
    for row in bench.bench_decode(shortest).values():
        assert all(math.inf > speed > 0 for speed, _ in row.values())


def test_kinds_of_attention_by_length():
    """Only full attention's cache grows beyond a window of 128 tokens."""
    rows = bench.bench_attention(Bench(device="cpu", **{**SIZES, "block_size": 50, "quick": True}))
    assert len(rows) == 2 * 2
    per_token = 3 * 2 * 24 * 4  # layers, keys and values, channels, bytes
    for n in (50, 200):
        for kind, kept in (("full", n), ("window", min(n, 127))):
            assert rows[f"{kind}, T = {n}"]["KiB of cache"] * 1024 == kept * per_token
        assert rows[f"full, T = {n}"]["decode"][1] == 1


def test_vocabularies_differ_in_nothing_but_their_size(monkeypatch):
    """Every contender reads the same tokens and predicts as few. Memory of AdamW over whole tables
    is weights and two moments; rows have one moment each."""
    seen = []
    forward = Decoder.forward

    def noted(model, ids, targets, *, table_ids):
        assert torch.equal(ids, table_ids) and targets.max() < len(model.head.weight) == 64
        seen.append((model, ids))
        return forward(model, ids, targets, table_ids=table_ids)

    monkeypatch.setattr(Decoder, "forward", noted)
    rows = bench.bench_vocab(Bench(device="cpu", **{**QUICK, "rounds": 1}))
    smallest = {tuple(ids.flatten().tolist()) for _, ids in seen if ids.max() < 500}
    assert len(smallest) >= 2  # warm-up and round
    models = {model.tables.vocab_size: model for model, _ in seen}
    for vocab_size in (500, 2500, 10_000):
        sizes = models[vocab_size].sizes()
        whole, by_row = (
            rows[f"{way}, V = {vocab_size:,}"]["GiB"] * 2**30 / 4
            for way in ("whole tables", "rows")
        )
        assert whole == pytest.approx(3 * sizes["total"], rel=1e-3)
        rows_alone = sizes["table"] + vocab_size * 32
        moments = vocab_size * (2 + 1)  # of two tables and the embedding
        expected = rows_alone + moments + 3 * (sizes["total"] - rows_alone)
        assert by_row == pytest.approx(expected, rel=1e-3)


def test_a_ratio_is_the_median_of_those_within_a_turn():
    """Where some turns were slow for both, a ratio of medians would be another one."""
    rates = {"a": [9.0, 1.0, 4.0, 6.0], "b": [9.0, 2.0, 8.0, 3.0]}  # the first turn warms up
    turns = {name: iter(of_name) for name, of_name in rates.items()}
    contenders = {name: name for name in rates}
    rows = bench.compare({"x": lambda name: next(turns[name])}, contenders, 3, "b")
    assert rows == {"a": {"x": (4.0, 0.5)}, "b": {"x": (3.0, 1.0)}}


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
