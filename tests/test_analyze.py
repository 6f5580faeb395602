"""analyze.py: every question with tiny models, runs that are trained once, spikes."""

import json
import math
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, command

import analyze
from analysis import experiment as shared
from analysis.experiment import Experiment, best_learning_rates, code_digest
from analysis.stability import REACH, spike_rate, spikes
from common import UserError
from training.records import read_run

SMALL = {
    "n_layer": 1,
    "n_head": 1,
    "n_embd": 8,
    "block_size": 16,
    "ffn": "dense",
    "eval_tokens": 64,
    "batch_size": 2,
    "eval_interval": 2,
    "max_iters": 4,
}
ENDLESS = {**SMALL, "max_iters": 10**6, "eval_interval": 10**6}


def test_runs_side_by_side_are_a_table_and_a_picture(trained, tmp_path):
    def ask(*args, **options):
        return command("analyze.py", "runs", *args, cwd=tmp_path, **options)

    done = ask(*trained.values(), "--plot", "all.png")
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[1] for row in rows[1:]] == ["dense", "stem, third", "embformer"]
    assert "note:" not in done.stdout
    final = read_run(trained["stem"])["eval"][-1]["val_loss"]
    assert f"| {final:.3f} |" in rows[2]
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    metrics = (trained["dense"] / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(metrics.replace('"tokenizer": "', '"tokenizer": "x'))
    assert "note: not all have the same text" in ask(".", trained["stem"]).stdout
    for wrong in (["nothing"], ["--plot", "x.txt", "."], []):
        ask(*wrong, fails=True)


def test_every_question_has_a_table(tmp_path):
    (tmp_path / "analysis").mkdir()  # in the working folder: not the package
    folders = ("--out_dir", tmp_path, "--data_dir", tmp_path / "countries")
    done = command("analyze.py", "all", "--quick", "--device", "cpu", *folders, cwd=tmp_path)
    parts = done.stdout.split("\n## ")[1:]
    assert [part.split()[0] for part in parts] == list(analyze.QUESTIONS)
    for part in parts:
        assert "|---|" in part
        name = part.split()[0]
        if name in ("kinds", "stability", "capacity", "attention", "geometry"):
            picture = tmp_path / f"quick/{name}.png"
            assert picture.read_bytes().startswith(b"\x89PNG")
            assert f"wrote {picture}" in part


def test_edits_of_checkpoints(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(
        "analysis.edits.measure_checkpoint",
        lambda ckpt, device: measured.append((str(ckpt), str(device))),
    )
    command("analyze.py", "edits", "a.pt", "--device", "cpu", "b.pt", cwd=tmp_path)
    assert measured == [("a.pt", "cpu"), ("b.pt", "cpu")]
    command("analyze.py", "kinds", "a.pt", cwd=tmp_path, fails=True)


@pytest.fixture
def experiment(data, tmp_path):
    return Experiment(out_dir=tmp_path, data_dir=data, seeds="1,2", device="cpu", jobs=2)


def test_runs_are_trained_once_and_go_on_where_they_were_stopped(experiment, monkeypatch):
    (first, second) = experiment.train({"": SMALL})[""]
    for run in (first, second):
        assert [record["step"] for record in read_run(run)["eval"]] == [0, 2, 4]
    losses = [step["train_loss"] for step in read_run(first)["step"]]
    with monkeypatch.context() as patch:
        patch.setattr(shared, "train_all", None)  # nothing is left to train
        assert experiment.train({"": SMALL})[""] == [first, second]
    (first / "loss.png").unlink()  # the last thing that a run writes
    experiment.train({"": SMALL})
    assert [step["train_loss"] for step in read_run(first)["step"]] == losses
    assert len(read_run(first)["run"]) == 2 and (first / "loss.png").exists()
    # A second stage is another run for each model that it goes on with.
    further = {"stage": "context", "block_size": 32, "max_iters": 2, "eval_tokens": 64}
    origins = [run / "ckpt.pt" for run in (first, second)]
    further = experiment.train({"": {**further, "init_from": origins}})[""]
    for folder, origin in zip(further, origins, strict=True):
        assert read_run(folder)["run"][0]["args"]["init_from"] == str(origin)
        assert (folder / "loss.png").exists()


def test_other_settings_data_or_code_are_another_folder(experiment, data, tmp_path, monkeypatch):
    def folder(**flags):
        return experiment.folder({"ffn": "embformer", "seed": 1, **flags})

    same = folder()
    assert same.name.startswith(f"{data.name}-embformer-1-")
    assert len(folder(learning_rate=1 / 3, doc_mask=True, table_std=1 / 7).name) == 60
    # Flags that say the defaults, and those that change no result, are the same run.
    assert same == folder(learning_rate=6e-3, init_std=0.02) == folder(device_batch_size=1)
    others = [{"init_std": 0.088}, {"learning_rate": 3e-3}, {"seed": 2}, {"max_iters": 9}]
    assert len({same, *(folder(**other) for other in others)}) == 5
    copy = tmp_path / "x" / data.name
    shutil.copytree(data, copy)
    assert folder(data_dir=str(copy)) == same
    meta = json.loads((copy / "meta.json").read_text())
    (copy / "meta.json").write_text(json.dumps({**meta, "seed": 5}))
    assert folder(data_dir=str(copy)) != same
    monkeypatch.setattr(shared, "code_digest", lambda: "changed")
    assert folder() != same


def test_the_digest_of_code_is_that_of_all_that_is_imported_below_the_laboratory(
    tmp_path, monkeypatch
):
    files = ["model.py", "tables/tables.py", "analysis/costs.py", "venv/lib/torch.py", "other.py"]
    modules = {"__main__": SimpleNamespace(__file__=str(tmp_path / "analyze.py"))}
    for name in files[:-1]:
        modules[name] = SimpleNamespace(__file__=str(tmp_path / name))
    monkeypatch.setattr(shared, "ROOT", tmp_path)
    monkeypatch.setattr(shared, "__file__", str(tmp_path / "analysis/experiment.py"))

    def digest(changed="", *further):
        for name in (*files, "analyze.py"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("x = 2" if name == changed else "x = 1")
        code_digest.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "modules", modules)
            return code_digest(*further)

    same = digest()
    counted = [name for name in (*files, "analyze.py") if digest(name) != same]
    assert counted == ["model.py", "tables/tables.py"]
    assert digest("other.py", str(tmp_path / "other.py")) != same
    code_digest.cache_clear()


def test_runs_on_the_countries_take_1000_steps_unless_told_otherwise(experiment, data):
    meta = json.loads((data / "meta.json").read_text())
    folder = experiment.out_dir / "countries"
    folder.mkdir()
    (folder / "meta.json").write_text(json.dumps({**meta, "corpus": "countries"}))
    assert experiment.all_flags({"data_dir": folder})["max_iters"] == 1000
    assert experiment.all_flags({"data_dir": folder, "max_iters": 9})["max_iters"] == 9
    assert "max_iters" not in experiment.all_flags({})


def test_a_loss_that_is_no_number_is_a_finding_and_other_errors_are_one_line(experiment):
    flags = {**SMALL, "learning_rate": 1e9, "warmup": 0.0}
    ended = experiment.train({"": flags})[""]
    assert all(shared.diverged(folder) for folder in ended)
    logs = [(folder / "log.txt").read_text() for folder in ended]
    assert experiment.train({"": flags})[""] == ended  # nothing is left to train
    assert [(folder / "log.txt").read_text() for folder in ended] == logs


def test_of_runs_at_once_one_that_fails_or_is_killed_ends_all(experiment, monkeypatch):
    started = []
    start = shared.start

    def noted(*args):
        started.append(start(*args))
        return started[-1]

    monkeypatch.setattr(shared, "start", noted)
    first, broken = (experiment.folder({**ENDLESS, "seed": seed}) for seed in (1, 2))
    (broken / "ckpt.pt").write_text("x")
    with pytest.raises(UserError, match=rf"{broken.name}: exit code 1, see its log"):
        experiment.train({"": ENDLESS})
    assert "is damaged" in (broken / "log.txt").read_text()

    def kill():
        while not (first / "metrics.jsonl").exists():
            time.sleep(0.01)
        started[-1].kill()

    (first / "metrics.jsonl").unlink(missing_ok=True)
    threading.Thread(target=kill).start()
    with pytest.raises(UserError, match=rf"{first.name}: exit code -9"):
        experiment.train({"": ENDLESS}, [1])
    assert all(process.poll() is not None for process in started)


STOPPED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from analysis.experiment import Experiment
from common import run
run(lambda: Experiment(Path(sys.argv[2]), Path(sys.argv[3]), jobs=2).train({"": FLAGS}, [1]))
"""


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_whoever_stops_an_analysis_is_told_that_it_goes_on(data, tmp_path, number, code):
    script = STOPPED.replace("FLAGS", repr({**ENDLESS, "device": "cpu"}))
    args = [sys.executable, "-c", script, ROOT, tmp_path, data]
    process = subprocess.Popen(args, stderr=subprocess.PIPE, text=True)
    while not any("step" in log.read_text() for log in tmp_path.glob("runs/*/metrics.jsonl")):
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(number)
    assert "the same command goes on" in process.communicate(timeout=60)[1]
    assert process.returncode == code
    (log,) = tmp_path.glob("runs/*/log.txt")
    assert "continue with" in log.read_text() and log.with_name("ckpt.pt").exists()


def test_figures_are_measured_once_by_the_same_code(experiment, monkeypatch):
    asked = []

    def figure(subject, more):
        asked.append(subject)
        return [len(asked), more]

    first, second = Path("some/folder"), ("a", 1)
    assert experiment.measure("x", figure, [first], "y") == [[1, "y"]]
    assert experiment.measure("x", figure, [first, second], "y") == [[1, "y"], [2, "y"]]
    assert asked == [first, second]
    (kept,) = experiment.out_dir.glob("x/folder, *.json")
    whole = kept.read_bytes()
    for harm in (b"", b"{}", b"[2]", whole[:-1], whole.replace(b"[1", b"[2"), b"\xff"):
        kept.write_bytes(harm)
        assert experiment.measure("x", figure, [first], "y") == [[len(asked), "y"]]
        assert asked[-1] == first
    monkeypatch.setattr(shared, "code_digest", lambda *further: "changed")
    assert experiment.measure("x", figure, [first], "y") == [[len(asked), "y"]]
    assert len(asked) == 9


@pytest.mark.parametrize("lowest", [3e-3, 2.2e-2, 2e-4])  # 2e-4: all that are tried first diverge
def test_the_best_learning_rate_is_not_the_end_of_those_tried(experiment, monkeypatch, lowest):
    asked = []

    def train(kinds, seeds):  # not at all: the name of a folder is its rate
        assert seeds == [1]
        asked.extend(flags["learning_rate"] for flags in kinds.values())
        return {name: [flags["learning_rate"]] for name, flags in kinds.items()}

    def breaks(rate):
        return rate > 4 * lowest

    def read(rate):  # the last loss counts, not the best one
        assert not breaks(rate)
        return {"eval": [{"val_loss": -rate}, {"val_loss": abs(math.log(rate / lowest))}]}

    monkeypatch.setattr(experiment, "train", train)
    monkeypatch.setattr(shared, "read_run", read)
    monkeypatch.setattr(shared, "diverged", breaks)
    found = best_learning_rates(experiment, {"one": {"ffn": "dense"}})["one"]
    assert found["ffn"] == "dense" and abs(math.log2(found["learning_rate"] / lowest)) <= 0.5
    assert min(asked) < found["learning_rate"] < max(asked) and len(set(asked)) == len(asked)


def test_spikes_stand_out_of_the_steps_around():
    def found(losses):
        return (spikes(losses).nonzero()[0] + REACH).tolist()

    band, high = [2.0, 2.1, 2.2] * 40, 2.1 + 6 * 1.4826 * 0.1  # median and median deviation
    spiked = {40: high - 0.01, 60: high + 0.02, 61: high + 0.01, 80: float("nan")}
    spiked = [spiked.get(step, loss) for step, loss in enumerate(band)]
    assert found(spiked) == [60, 80]  # 61 is the tail of 60
    assert spike_rate({"step": [{"train_loss": loss} for loss in spiked]}) == 2 * 1000 / 100
    falling = [8 * 0.97**step + 0.02 * (step % 3) for step in range(120)]
    assert not found(falling) and not found([*falling[:50], *[9.0] * 50])  # no return
    falling[20] += 1  # less than what it had 10 steps before
    falling[70] += 1
    assert found(falling) == [70]
    assert spike_rate({"step": [{"train_loss": 1.0}] * 20}) is None  # too few to tell


@pytest.mark.parametrize("seeds", ["", "1,x", "-1"])
def test_seeds_that_are_no_numbers_are_one_clear_line(seeds, tmp_path):
    with pytest.raises(UserError, match="give numbers, as 1337"):
        Experiment(out_dir=tmp_path, seeds=seeds)
