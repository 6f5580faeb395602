"""bench.py measures what it says, on a model small enough to take seconds."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import command

import bench
from bench import Bench, Contender
from model import Decoder, outline

SIZES = dict(n_layer=3, n_head=2, n_embd=24, vocab_size=50, block_size=16, batch_size=2, rounds=1)
TINY = ["--device", "cpu", *(part for n, value in SIZES.items() for part in (f"--{n}", value))]


def figures(tmp_path, *args) -> tuple[dict, str]:
    """What a run writes to its --json, and what it prints. It leaves nothing else."""
    done = command("bench.py", *args, "--dir", tmp_path, "--json", "new.json", cwd=tmp_path)
    (path,) = tmp_path.glob("*[!g]")  # but a picture
    return json.loads(path.read_text()), done.stdout


@pytest.mark.parametrize("flags", [(), ("--table_gib", 0.25)])
def test_tables_in_all_places(tmp_path, flags):
    written, printed = figures(tmp_path, "offload", *TINY, *flags)
    places = ["cpu", "disk, warm", "disk, cold"] if not flags else ["disk, 0.25 GiB of rows"]
    assert list(written["offload"]) == ["resident", *places]
    for place, row in written["offload"].items():
        assert f"| {place} |" in printed
        assert list(row) == ["decode 1", "decode 8", "prefill", "train"]
        assert all(task["tok/s"] > 0 and task["ratio"] > 0 for task in row.values())
        assert place != "resident" or {task["ratio"] for task in row.values()} == {1.0}
    numbers = 0.25 * 2**30 / 4 if flags else 2 * 50 * 64
    assert f"{numbers / 1e6:.1f} M in 2 tables" in printed


def test_all_of_it_in_a_quick_run(tmp_path):
    plot = ("--plot", tmp_path / "vocab.png")
    written, printed = figures(tmp_path, "all", "--quick", "--rounds", 1, "--device", "cpu", *plot)
    assert list(written) == ["train", "decode", "vocab", "offload"]
    for name, row in {**written["train"], **written["decode"]}.items():
        assert row["tok/s"] > 0 and f"| {name} |" in printed
        assert row["over dense"] == 1.0 or not name.startswith("dense")
    assert (tmp_path / "vocab.png").read_bytes().startswith(b"\x89PNG")


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


@pytest.mark.parametrize("what", bench.TABLES)
def test_the_models_that_take_turns_fit_one_gpu(monkeypatch, what):
    """Weights, in training also m and v and the gradients of one, of the default sizes there."""
    needs = []

    class Outline(Contender):
        def __post_init__(self):
            self.optimizer = SimpleNamespace(adamw=SimpleNamespace(param_groups=[]))
            with outline():
                self.model = Decoder(self.config)

    def need(contenders, rounds):
        numbers = []
        for name, it in contenders.items():
            far = name == "cpu" or "disk" in name
            numbers.append(it.model.sizes()["backbone" if far else "total"])
        moments, gradients = (0, 0) if what == "decode" else (2, max(numbers))
        needs.append(4 * ((1 + moments) * sum(numbers) + gradients))
        return {n: dict.fromkeys(("tok/s", *it.over), 1.0) for n, it in contenders.items()}

    monkeypatch.setattr(bench, "Contender", Outline)
    monkeypatch.setattr(bench, "interleaved_timing", need)
    monkeypatch.setattr(bench, "calls_per_second", lambda *_: 1.0)
    bench.TABLES[what](Bench(device="cpu", **bench.GPU | bench.GPU_SPECIAL.get(what, {})))
    assert 4 * 2**30 < max(needs) < 40 * 2**30


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
