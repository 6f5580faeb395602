"""bench.py measures what it says, on a model small enough to take seconds."""

import json
import math

import pytest
import torch
from conftest import command

import bench
from common import run

TINY = [
    *("offload", "--device", "cpu", "--n_layer", "3", "--n_head", "2", "--n_embd", "24"),
    *("--vocab_size", "50", "--block_size", "16", "--batch_size", "2", "--rounds", "1"),
]


def result(monkeypatch, tmp_path, *more) -> dict:
    path = tmp_path / "bench.json"
    argv = ["bench.py", *TINY, "--dir", str(tmp_path), "--json", str(path), *more]
    monkeypatch.setattr("sys.argv", argv)
    bench.main()
    assert [p.name for p in tmp_path.iterdir()] == ["bench.json"]  # nothing else is left
    return json.loads(path.read_text())


def test_every_home_is_in_the_table_and_in_the_json(monkeypatch, tmp_path, capsys):
    figures = result(monkeypatch, tmp_path)
    homes = figures["homes"]
    assert list(homes) == ["resident", "cpu", "disk, warm", "disk, cold"]
    for name, row in homes.items():
        for task in ("decode 1", "decode 8", "prefill", "train"):
            assert row[f"{task} tok/s"] > 0 and row[f"{task} ratio"] > 0
            assert name != "resident" or row[f"{task} ratio"] == 1.0
    out = capsys.readouterr().out
    assert all(f"| {name} |" in out for name in homes)


def test_tables_larger_than_the_models_vocabulary(monkeypatch, tmp_path):
    figures = result(monkeypatch, tmp_path, "--table_gib", "0.25")
    (_, big) = figures["tables"].values()
    assert big * 4 == pytest.approx(0.25 * 2**30, rel=1e-3)
    assert figures["max RSS bytes"] > 1e7


def test_all_of_it_in_a_quick_run(monkeypatch, tmp_path, capsys):
    argv = [
        "bench.py",
        "all",
        "--quick",
        "--rounds",
        "1",
        "--device",
        "cpu",
        "--json",
        str(tmp_path / "all.json"),
    ]
    monkeypatch.setattr("sys.argv", [*argv, "--plot", str(tmp_path / "vocab.png")])
    bench.main()
    figures = json.loads((tmp_path / "all.json").read_text())
    assert list(figures) == ["train", "decode", "vocab", "offload"]
    printed = capsys.readouterr().out
    for name, row in {**figures["train"], **figures["decode"]}.items():
        assert row["tok/s"] > 0 and f"| {name} |" in printed
        assert row["over dense"] == 1.0 or not name.startswith("dense")
    memory = {name: row["GiB"] for name, row in figures["vocab"].items()}
    # Nearly all of it is rows and their moments.
    for way in ("rows", "whole tables"):
        assert memory[f"{way}, V = 10,000"] / memory[f"{way}, V = 500"] == pytest.approx(
            20, rel=0.3
        )
    assert (tmp_path / "vocab.png").read_bytes().startswith(b"\x89PNG")


def test_vocabularies_differ_in_nothing_but_their_size(monkeypatch):
    """Every contender reads the same tokens, whatever its head predicts."""
    seen, real = [], bench.step

    def noted(bench, model, optimizer, ids, targets):
        seen.append((ids, int(targets.max()), len(model.head.weight)))
        return real(bench, model, optimizer, ids, targets)

    monkeypatch.setattr(bench, "step", noted)
    bench.bench_vocab(bench.Bench("vocab", device="cpu", quick=True, rounds=1))
    assert all(torch.equal(ids, seen[0][0]) for ids, *_ in seen) and len(seen[0][0].unique()) > 64
    assert {(classes, most < classes) for _, most, classes in seen} == {
        (classes, True) for classes in (64, 500, 2500, 10000)
    }


def test_ids_follow_zipf():
    ids = bench.zipf((100_000,), 6400, 0)
    assert ids.min() >= 0 and ids.max() < 6400
    for k in (0, 1, 10, 100):
        share = (ids == k).double().mean().item()
        assert share == pytest.approx(math.log((k + 2) / (k + 1)) / math.log(6401), abs=0.003)
    assert torch.equal(ids, bench.zipf((100_000,), 6400, 0))


@pytest.mark.parametrize("flags", ["--rounds 0", "--table_gib -1", "--n_head 5"])
def test_bad_flags_are_one_clear_line(monkeypatch, tmp_path, flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["bench.py", *TINY, *flags.split()])
    with pytest.raises(SystemExit) as stopped:
        run(bench.main)
    assert str(stopped.value).startswith("error: --") and flags.split()[0][2:] in str(stopped.value)


def test_a_folder_that_is_not_there_is_one_clear_line(tmp_path):
    assert "gone" in command("bench.py", *TINY, "--dir", "gone", cwd=tmp_path, fails=True).stderr
