"""analyze.py: every question with tiny models, runs that are trained once, spikes."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import command

import analyze
from analysis import experiment as shared
from analysis.experiment import Experiment, best_learning_rates
from analysis.runs import REACH, spike_rate, spikes
from common import UserError, locked
from training.records import read_run

SMALL = dict(
    n_layer=1, n_head=1, n_embd=8, block_size=16, ffn="dense", eval_tokens=64, batch_size=2,
    eval_interval=2, max_iters=4,
)  # fmt: skip


def test_runs_side_by_side_are_a_table_and_a_picture(trained, tmp_path):
    def ask(*more, **how):
        return command("analyze.py", "runs", *more, cwd=tmp_path, **how)

    done = ask(*trained.values(), "--plot", "all.png")
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[1] for row in rows[1:]] == ["dense", "stem, third", "embformer"]
    assert "note:" not in done.stdout
    final = read_run(trained["stem"])["eval"][-1]["val_loss"]
    assert f"| {final:.3f} |" in rows[2]
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert "No such file" in ask("nothing", fails=True).stderr
    metrics = (trained["dense"] / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(metrics.replace('"tokenizer": "', '"tokenizer": "x', 1))
    assert "note: not all have the same text" in ask(".", trained["stem"]).stdout
    (tmp_path / "metrics.jsonl").write_text('{"type": "st\n')
    assert "damaged" in ask(".", fails=True).stderr
    for wrong in (["--plot", "x.txt", "."], []):
        ask(*wrong, fails=True)


def test_every_question_has_a_table(tmp_path):
    where = ("--out_dir", tmp_path, "--data_dir", tmp_path / "countries")
    (tmp_path / "analysis").mkdir()  # in the working folder: not the package
    done = command("analyze.py", "all", "--quick", "--device", "cpu", *where, cwd=tmp_path)
    parts = done.stdout.split("\n## ")[1:]
    assert [part.split()[0] for part in parts] == [each.__name__ for each in analyze.QUESTIONS]
    for part in parts:
        name = part.split()[0]
        assert "|---|" in part
        if name != "settings":
            picture = tmp_path / f"quick/{name}.png"
            assert picture.read_bytes().startswith(b"\x89PNG")
            assert f"wrote {picture}" in part


def test_edits_of_checkpoints(tmp_path, monkeypatch):
    measured = []
    told = "analysis.edit_success.measure_checkpoint"
    monkeypatch.setattr(told, lambda ckpt, device: measured.append((str(ckpt), str(device))))
    command("analyze.py", "edits", "a.pt", "--device", "cpu", "b.pt", cwd=tmp_path)
    assert measured == [("a.pt", "cpu"), ("b.pt", "cpu")]
    command("analyze.py", "kinds", "a.pt", cwd=tmp_path, fails=True)


@pytest.fixture
def experiment(data, tmp_path):
    return Experiment(out_dir=tmp_path, data_dir=data, seeds="1,2", device="cpu", jobs=1)


def folders(experiment, **flags):
    return experiment.train({"": {**SMALL, **flags}})[""]


def test_a_run_is_trained_once_and_goes_on_where_it_was_stopped(experiment, monkeypatch):
    first, second = folders(experiment)
    for run in (first, second):
        assert [each["step"] for each in read_run(run)["eval"]] == [0, 2, 4]
    losses = [step["train_loss"] for step in read_run(first)["step"]]
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(shared, "train_all", lambda jobs, at_once: asked.append(jobs))
        assert folders(experiment) == [first, second] and not asked
        (first / "loss.png").unlink()  # the last thing that a run writes
        folders(experiment)
    assert asked == [{first: {"resume": True}}]
    folders(experiment)
    assert [step["train_loss"] for step in read_run(first)["step"]] == losses
    assert (first / "loss.png").exists()


def test_other_settings_and_other_data_are_another_folder(experiment, data, tmp_path):
    def folder(**flags):
        return experiment.folder({"ffn": "embformer", "seed": 1} | flags)

    assert folder().name.startswith(f"{data.name}-embformer-1-")
    assert len(folder(learning_rate=1 / 3, doc_mask=True, table_std=1 / 7).name) == 60
    # Flags that say the defaults, and those that change no result, are the same run.
    assert folder() == folder(learning_rate=6e-3, init_std=0.02) == folder(device_batch_size=1)
    others = [dict(init_std=0.088), dict(learning_rate=3e-3), dict(seed=2), dict(eval_interval=9)]
    others += [dict(max_iters=9)]
    assert len({folder(), *(folder(**other) for other in others)}) == 6
    copy = tmp_path / "x" / data.name
    shutil.copytree(data, copy)
    assert folder(data_dir=str(copy)) == folder()
    meta = json.loads((copy / "meta.json").read_text())
    (copy / "meta.json").write_text(json.dumps(meta | {"seed": 5}))
    assert folder(data_dir=str(copy)) != folder()


def test_a_second_stage_is_another_run_for_each_model_that_it_goes_on_with(experiment):
    further = dict(stage="context", block_size=32, max_iters=2, eval_tokens=64)
    second = {
        seed: {**further, "init_from": folder / "ckpt.pt", "seed": 1}
        for seed, folder in zip(experiment.numbers, folders(experiment), strict=True)
    }
    found = experiment.train(second, [1])
    assert found[1] != found[2]
    assert all((folder / "loss.png").exists() for (folder,) in found.values())


def test_a_loss_that_is_no_number_is_a_finding_and_other_errors_are_one_line(experiment):
    flags = dict(learning_rate=1e9, warmup=0.0)
    ended = folders(experiment, **flags)
    assert all(map(shared.diverged, ended))
    logs = [(folder / "log.txt").read_text() for folder in ended]
    assert folders(experiment, **flags) == ended  # nothing is left to train
    assert [(folder / "log.txt").read_text() for folder in ended] == logs
    with pytest.raises(UserError, match="n_head"):
        folders(experiment, n_head=3)


def test_of_runs_at_once_one_that_fails_or_is_killed_ends_all(experiment):
    experiment.jobs = 2
    endless = {**SMALL, "max_iters": 10**6, "eval_interval": 10**6}
    first, broken = (experiment.folder({**endless, "seed": seed}) for seed in (1, 2))
    (broken / "ckpt.pt").write_text("x")
    short = {**SMALL, "doc_mask": True}
    with pytest.raises(UserError, match=rf"{broken.name}: exit code 1, see its log"):
        experiment.train({"short": short, "endless": endless})
    assert "is damaged" in (broken / "log.txt").read_text()
    assert not multiprocessing.active_children()
    for folder in experiment.train({"short": short})["short"]:  # nothing is left to train
        assert read_run(folder)["eval"][-1]["step"] == 4

    def stop(how):
        while not (first / "metrics.jsonl").exists():
            time.sleep(0.01)
        how()

    killed = (lambda: multiprocessing.active_children()[0].kill(), rf"{first.name}: exit code -9")
    for how, why in (killed, (lambda: os.kill(os.getpid(), signal.SIGTERM), "143")):
        (first / "metrics.jsonl").unlink(missing_ok=True)
        threading.Thread(target=stop, args=(how,)).start()
        with pytest.raises((UserError, SystemExit), match=why):
            experiment.train({"endless": endless}, [1])
        assert not multiprocessing.active_children()


def test_figures_are_measured_once(experiment):
    asked = []

    def figure(subject):
        asked.append(subject)
        return [len(asked)]

    first, second = Path("some/folder"), ("a", 1)
    assert experiment.measure("x", figure, [first]) == [[1]]
    assert experiment.measure("x", figure, [first, second]) == [[1], [2]]
    assert asked == [first, second]
    whole = (experiment.out_dir / "x" / "folder.json").read_bytes()
    for harm in (b"", b"{}", b"[2]", whole[:-1], whole.replace(b"[1]", b"[2]"), b"\xff"):
        (experiment.out_dir / "x" / "folder.json").write_bytes(harm)
        assert experiment.measure("x", figure, [first]) == [[len(asked)]] and asked[-1] == first
    two_at_once = locked(experiment.out_dir)
    with pytest.raises(UserError, match="another run is writing"):
        experiment.picture("x", SimpleNamespace(savefig=lambda *_, **__: two_at_once.__enter__()))


@pytest.mark.parametrize("lowest", [3e-3, 2.2e-2, 2e-4])  # 2e-4: all that are tried first diverge
def test_the_best_learning_rate_is_not_the_end_of_those_tried(experiment, monkeypatch, lowest):
    asked = []

    def train(kinds, seeds):  # not at all: the name of a folder is its rate
        assert seeds == [1]
        asked.extend(flags["learning_rate"] for flags in kinds.values())
        return {name: [flags["learning_rate"]] for name, flags in kinds.items()}

    def breaks(rate):
        return rate > 4 * lowest

    def read(rate):  # one that breaks was the best before
        loss = -1.0 if breaks(rate) else abs(math.log(rate / lowest))
        return {"eval": [{"val_loss": 9.0}, {"val_loss": loss}]}

    monkeypatch.setattr(experiment, "train", train)
    monkeypatch.setattr(shared, "read_run", read)
    monkeypatch.setattr(shared, "diverged", breaks)
    found = best_learning_rates(experiment, {"one": dict(ffn="dense")})["one"]
    assert found["ffn"] == "dense" and abs(math.log2(found["learning_rate"] / lowest)) <= 0.5
    assert min(asked) < found["learning_rate"] < max(asked) and len(set(asked)) == len(asked)


def test_spikes_stand_out_of_the_steps_around():
    def found(losses):
        return (spikes(losses).nonzero()[0] + REACH).tolist()

    band, high = [2.0, 2.1, 2.2] * 40, 2.1 + 6 * 1.4826 * 0.1  # median and median deviation
    spiked = {40: high - 0.01, 60: high + 0.02, 61: high + 0.01, 80: float("nan")}
    spiked = [spiked.get(step, loss) for step, loss in enumerate(band)]
    assert found(spiked) == [60, 80]  # 61 is the tail of 60
    assert spike_rate(spiked) == 2 * 1000 / 100
    falling = [8 * 0.97**step + 0.02 * (step % 3) for step in range(120)]
    assert not found(falling) and not found([*falling[:50], *[9.0] * 50])  # no return
    falling[20] += 1  # less than what it had 10 steps before
    falling[70] += 1
    assert found(falling) == [70]
    assert spike_rate([1.0] * 19 + [9.0]) is None  # too few to tell


@pytest.mark.parametrize("seeds", ["", "1,x", "1,,2", "-1"])
def test_seeds_that_are_no_numbers_are_one_clear_line(seeds, tmp_path):
    with pytest.raises(UserError, match="give numbers, as 1337"):
        Experiment(out_dir=tmp_path, seeds=seeds)
