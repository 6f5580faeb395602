"""analyze.py: every question with tiny models, runs that are trained once, spikes."""

import json
import math
import shutil

import pytest
import torch
from conftest import command

from analysis.experiment import Experiment, JsonCache
from analysis.runs import searched, spikes
from common import UserError
from training.records import read_run
from training.settings import PRESETS


def test_runs_side_by_side_are_a_table_and_a_picture(trained, tmp_path):
    def ask(*more, **how):
        return command("analyze.py", "runs", *more, cwd=tmp_path, **how)

    done = ask(*trained.values(), "--plot", "all.png")
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[1] for row in rows[1:]] == ["dense", "stem", "embformer"]
    final = read_run(trained["stem"])["eval"][-1]["val_loss"]
    assert f"| {final:.3f} |" in rows[2]
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert "No such file" in ask("nothing", fails=True).stderr
    (tmp_path / "metrics.jsonl").write_text('{"type": "st\n')
    assert "damaged" in ask(".", fails=True).stderr
    for wrong in (["--plot", "x.txt", "."], [], [".", "--quick"]):
        ask(*wrong, fails=True)


def test_every_question_has_a_table_and_a_picture(tmp_path):
    done = command("analyze.py", "all", "--quick", "--device", "cpu", cwd=tmp_path).stdout
    out = tmp_path / "out/analysis/quick"
    parts = done.split("\n## ")[1:]
    assert len(parts) == 8
    for part in parts:
        name = part.split()[0]
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "|---|" in part and f"wrote out/analysis/quick/{name}.png" in part


def test_a_run_is_trained_once_and_goes_on_where_it_was_stopped(data, tmp_path):
    experiment = Experiment(out_dir=tmp_path, data_dir=data, seeds="1", device="cpu", jobs=1)
    small = dict(n_layer=1, n_head=1, n_embd=8, block_size=16, ffn="dense", eval_tokens=64)
    flags = {**small, "batch_size": 2, "eval_interval": 2, "max_iters": 4, "seed": 1}
    (folder,) = experiment.trained([flags])
    assert [each["step"] for each in read_run(folder)["eval"]] == [0, 2, 4]
    metrics = folder / "metrics.jsonl"
    changed = metrics.stat().st_mtime_ns
    experiment.trained([flags])
    assert metrics.stat().st_mtime_ns == changed
    # A longer run, as a kill behind step 4 leaves it.
    saved = torch.load(folder / "ckpt.pt")
    saved["args"]["max_iters"] = 6
    torch.save(saved, folder / "ckpt.pt")
    metrics.write_text(metrics.read_text().replace('"max_iters": 4', '"max_iters": 6'))
    with pytest.raises(UserError, match="--max_iters 6, which would be 4 today"):
        experiment.trained([flags])
    flags["max_iters"] = 6
    folder = folder.rename(experiment.folder(flags))
    experiment.trained([flags])
    assert [each["step"] for each in read_run(folder)["eval"]] == [0, 2, 4, 6]
    wrong = experiment.trained([{**flags, "seed": 2, "learning_rate": 1e9, "warmup": 0.0}])[0]
    said = (wrong / "failed.txt").read_text()
    assert "loss became" in said  # a finding, not an error
    with pytest.raises(UserError, match="n_head"):
        experiment.trained([{**flags, "n_head": 3}])


def test_a_run_is_named_after_what_is_not_its_default(data, tmp_path):
    experiment = Experiment(out_dir=tmp_path, data_dir=data, seeds="1", device="cpu")
    every = [dict(init_std=0.02), dict(init_std=0.088), dict(learning_rate=0.006), {}]
    kinds = {ffn: dict(ffn=ffn) for ffn in ("dense", "embformer")}
    named = {
        ffn: [experiment.grid({"": kind | more})[0] for more in every]
        for ffn, kind in kinds.items()
    }
    tried = {ffn: [bool(flags.keys() - {"ffn"}) for flags in each] for ffn, each in named.items()}
    assert tried == dict(dense=[True, False, False, False], embformer=[False, True, False, False])


def test_kept_figures_are_found_once(tmp_path):
    kept = JsonCache(tmp_path / "figures.json")
    assert kept("a", lambda: 1.5) == 1.5
    assert JsonCache(tmp_path / "figures.json")("a", lambda: pytest.fail("asked again")) == 1.5
    (tmp_path / "figures.json").write_text("[")
    with pytest.raises(UserError, match=r"figures\.json is damaged"):
        JsonCache(tmp_path / "figures.json")


@pytest.mark.parametrize("lowest", [3e-3, 2.2e-2, 2e-4])  # 2e-4: all that are tried first diverge
def test_the_best_learning_rate_is_not_the_end_of_those_tried(data, tmp_path, monkeypatch, lowest):
    experiment, asked = Experiment(tmp_path, data, seeds="5", device="cpu"), []

    def trained(flags):  # not at all: the name of a folder is its rate
        asked.extend(flags)
        return [str(each.get("learning_rate", PRESETS["prose"]["learning_rate"])) for each in flags]

    def breaks(rate):
        return float(rate) > 4 * lowest

    def read(rate):  # one that breaks was the best before
        loss = -1.0 if breaks(rate) else abs(math.log(float(rate) / lowest))
        return {"eval": [{"val_loss": 9.0}, {"val_loss": loss}]}

    monkeypatch.setattr(experiment, "trained", trained)
    monkeypatch.setattr("analysis.runs.read_run", read)
    monkeypatch.setattr("analysis.runs.diverged", breaks)
    found = searched(experiment, {"one": dict(ffn="dense")})["one"]
    assert found["ffn"] == "dense" and abs(math.log2(found["learning_rate"] / lowest)) <= 0.5
    tried = {flags.get("learning_rate") for flags in asked}
    assert None in tried  # the default is a run of other questions, too
    tried = {rate or PRESETS["prose"]["learning_rate"] for rate in tried}
    assert min(tried) < found["learning_rate"] < max(tried)
    assert len(tried) == len(asked) and all(flags["seed"] == 5 for flags in asked)


def test_spikes_stand_out_of_the_steps_around():
    band, high = [2.0, 2.1, 2.2] * 40, 2.1 + 6 * 1.4826 * 0.1  # median and median deviation
    spiked = {40: high - 0.01, 60: high + 0.02, 61: high + 0.01, 80: float("nan")}
    found = spikes([spiked.get(step, loss) for step, loss in enumerate(band)])
    assert [step for step, is_spike in enumerate(found) if is_spike] == [60, 80]  # 61 is its tail
    falling = [8 * 0.97**step + 0.02 * (step % 3) for step in range(120)]
    assert not any(spikes(falling)) and not any(spikes([*falling[:50], *[9.0] * 50]))  # no return
    falling[20] += 1  # less than what it had 10 steps before
    falling[70] += 1
    assert [step for step, is_spike in enumerate(spikes(falling)) if is_spike] == [70]
    assert spikes([1.0] * 9 + [9.0]) == [False] * 10  # too few to tell


def test_runs_at_once_are_processes_of_which_one_that_fails_ends_all(data, tmp_path):
    experiment = Experiment(out_dir=tmp_path, data_dir=data, seeds="1", device="cpu", jobs=2)
    small = dict(n_layer=1, n_head=1, n_embd=8, block_size=16, ffn="dense", eval_tokens=64)
    flags = {**small, "batch_size": 2, "eval_interval": 2, "max_iters": 2}
    folders = experiment.trained([{**flags, "seed": 1}, {**flags, "seed": 2, "doc_mask": True}])
    assert [read_run(folder)["eval"][-1]["step"] for folder in folders] == [2, 2]
    assert read_run(folders[1])["run"][0]["args"]["doc_mask"]
    endless = {**flags, "max_iters": 10**6, "eval_interval": 10**6}
    with pytest.raises(UserError, match="n_head"):
        experiment.trained([{**endless, "seed": 3}, {**flags, "n_head": 3}, {**endless, "seed": 4}])
    other = Experiment(
        out_dir=tmp_path, data_dir=tmp_path / "x" / data.name, seeds="1", device="cpu"
    )
    shutil.copytree(data, other.data_dir)
    meta = json.loads((other.data_dir / "meta.json").read_text())
    (other.data_dir / "meta.json").write_text(json.dumps(meta | {"seed": 5}))
    with pytest.raises(UserError, match="was trained on another"):
        other.trained([{**flags, "seed": 1}])


@pytest.mark.parametrize("seeds", ["", "1,x", "1,,2", "-1", "1,1", "9" * 20])
def test_seeds_that_are_no_numbers_are_one_clear_line(seeds, tmp_path):
    with pytest.raises(UserError, match="give different numbers"):
        Experiment(out_dir=tmp_path, seeds=seeds)
