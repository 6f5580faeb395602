"""lab/analyze.py: every question with tiny models, runs that are trained once, spikes."""

import collections
import json
import math
import os
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
import torch
from conftest import (
    CPU,
    RUN,
    change_json,
    command,
    edit_core,
    losses,
    refused,
    small_run,
    user_error,
    write_briefly,
)
from naive import decoder, tokens

from common import locked, run_command
from corpora import countries
from lab import analyze, context, counterfact, editors, geometry, ladder, scale
from lab import experiment as shared
from lab.experiment import Experiment, best_learning_rates, last_eval
from lab.ladder import verdicts
from lab.pictures import interval
from lab.runs import learned_at
from lab.stability import REACH, spike_rate, spikes
from text.dataset import read_meta
from train import resolve_settings as train_settings
from training import writing
from training.batches import Data
from training.checkpoints import load_model
from training.records import read_run, to_line

SMALL = dict(n_layer=1, n_head=1, n_embd=8, block_size=16, ffn="dense")
SMALL.update(eval_tokens=64, batch_size=2, eval_interval=2, max_iters=4)
PNG = b"\x89PNG"


def test_runs_side_by_side_are_a_table_and_a_picture(trained, data, tmp_path):
    """Flags of their own have a column. Runs of a row: test_records.py."""

    def ask(*args, **options):
        return command("lab/analyze.py", "runs", *args, **options)

    first, *others = trained.values()
    done = ask(first, "--plot", "all.png", *others)
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[1] for row in rows[1:]] == ["dense", "stem, all", "embformer"]
    assert "note:" not in done.stdout and "own flags" not in done.stdout
    assert "± is the 95 % interval" in done.stdout
    gated = small_run(data, tmp_path / "gated", ffn="value", value_gate=True)
    assert " | value_gate=True | " in ask(first, gated).stdout
    final = read_run(trained["stem"])["eval"][-1]["val_loss"]
    assert f"| {final:.3f} |" in rows[2]
    assert (tmp_path / "all.png").read_bytes().startswith(PNG)
    metrics = (trained["dense"] / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(metrics.replace('"tokenizer": "', '"tokenizer": "x'))
    assert "note: not all have the same text" in ask(".", trained["stem"]).stdout
    shutil.copytree(trained["stem"], tmp_path / "dense")  # one of the same name
    assert ask(trained["dense"], "dense").stdout.count("\n| ") == 2
    for wrong in (["nothing"], ["--plot", "x.txt", "."], []):
        ask(*wrong, fails=True)


def test_runs_are_told_apart_by_when_they_recall_facts():
    def run(*shares):
        return {"eval": [{"step": 700 * n, "recall": share} for n, share in enumerate(shares)]}

    early, late, never = run(0, 0.95, 0.9), run(0, 0.94, 1.0), run(0, math.nan, 0.94)
    expected = {"700": [early], "700 to 1,400": [late, early], "1,400 to never": [never, late]}
    expected.update({"never": [never, never], "": [early, {"eval": [{"step": 0}]}]})
    for shown, group in expected.items():
        assert learned_at(group) == shown


def test_a_kind_of_ones_own_is_laddered_beside_controls_at_rates_found_for_all(
    data, tmp_path, monkeypatch, capsys, add_relative
):
    source = "import model\n\n\nclass Decoder(model.Decoder):\n    pass\n"
    add_relative("mine", source)
    kinds = ("dense", "STEM, third", "STEM, all", "mine")
    searched = []

    def search(experiment, wanted, seeds):
        assert len(seeds) == 3 and not {*seeds} & {*experiment.numbers}
        searched.extend(wanted)
        rates = {"mine": 0.01}
        return {name: {**wanted[name], "learning_rate": rates.get(name, 3e-3)} for name in wanted}

    monkeypatch.setattr(ladder, "best_learning_rates", search)
    given = dict(out_dir=tmp_path, data_dir=data, device="cpu", quick=True, seeds="2,4")
    experiment = Experiment(**given)
    ladder.ladder(experiment, "mine")
    assert tuple(searched) == kinds
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    mine, *others = [row for row in rows if row[0] == "| mine"][:4]
    assert "0.01" in mine and [row[1] for row in others] == [*kinds[:3]]
    with user_error("ladder mein: relatives/ has mine"):
        ladder.ladder(experiment, "mein")
    runs = experiment.out_dir.glob("runs/*")
    assert {read_run(run)["run"][0]["args"]["seed"] for run in runs} == {2, 4}


def test_every_question_has_a_table_of_figures_that_are_measured_once(tmp_path, monkeypatch):
    """On fewer countries, whose corpus takes less time, and with fewer steps and tokens."""
    some = countries.table()[::16]
    monkeypatch.setattr(countries, "table", lambda: some)
    monkeypatch.setattr(counterfact, "APART", 5)
    for module, steps in ((editors, "STEPS"), (editors, "VALUE_STEPS"), (writing, "STEPS")):
        monkeypatch.setattr(module, steps, 2)
    monkeypatch.setitem(shared.QUICK_RUN, "eval_tokens", 64)
    write_briefly(monkeypatch, 4)
    (tmp_path / "lab").mkdir()  # in the working folder: not the package
    folders = ("--out_dir", tmp_path, "--data_dir", tmp_path / "countries")

    def ask(*args) -> str:
        return command("lab/analyze.py --quick --device cpu", *folders, *args).stdout

    said = ask("all")
    parts = said.split("\n## ")[1:]
    assert [part.split()[0] for part in parts] == list(analyze.QUESTIONS)
    assert all("|---|" in part for part in parts)
    for name in ("ladder", "stability"):
        picture = tmp_path / f"quick/{name}.png"
        assert picture.read_bytes().startswith(PNG)
        assert f"wrote {picture}" in said
    first = ask("geometry")
    assert first in said
    for figure in (tmp_path / "quick/figures/geometry").iterdir():
        figure.write_text('{"1": [77.0, 78.0]}')
    assert "| 77.000 | 78.000 |" in ask("geometry")
    # A note comes once in a process, and other tests have that of stem.py.
    edit_core(monkeypatch, tmp_path, "embformer.py")
    note = "note: embformer.py changed since kept runs were trained: --fresh"
    kept = command("lab/analyze.py --quick --device cpu", *folders, "geometry")
    assert note in kept.stderr and kept.stdout != first
    assert ask("geometry", "--fresh") == first
    assert picture.exists() and not (tmp_path / "quick/figures/edits-32").exists()


def test_what_an_analysis_refuses(data, tmp_path):
    line = ("lab/analyze.py costs", "--quick", "--data_dir", data, "--out_dir", tmp_path)
    for seeds in ("1,x", "1,01"):
        assert "give different numbers, as 1337" in refused(*line, "--seeds", seeds)
    assert "7 finds learning rates" in refused(*line, "--seeds", "1,2,3,4,7")
    assert "runs takes folders" in refused("lab/analyze.py costs a.pt")
    for asked, flag in (
        ("ladder", "--plot x.png"),
        ("costs", "--tokens 9"),
        ("runs .", "--jobs 1"),
        ("edits a.pt", "--fresh"),
    ):
        said = refused(f"lab/analyze.py {asked} {flag}")
        assert f"{asked.split()[0]} has no {flag.split()[0]}" in said
    with locked(tmp_path / "quick"):
        assert "in use by another process" in refused(*line)
    for question in ("edits", "counterfact"):
        assert f"{data} is not of the countries" in refused("lab/analyze.py", question, *line[1:])
    assert not (tmp_path / "quick/runs").exists()


@pytest.fixture
def experiment(data, tmp_path):
    return Experiment(out_dir=tmp_path, data_dir=data, seeds="1,2", device="cpu", jobs=2)


def test_models_are_measured_as_their_last_step_left_them(experiment, rising, tmp_path):
    assert load_model(rising, CPU)[2]["step"] < 13

    def step(model, encoding, made):
        return made["step"]

    assert experiment.measure("steps", step, [rising]) == [13]
    # A run that ended after it had saved something has no last step.
    lost = shutil.copytree(rising, tmp_path / "lost")
    with open(lost / "metrics.jsonl", "a") as file:
        file.write(to_line({**read_run(lost)["step"][-1], "train_loss": math.nan}))
    with user_error("the loss of .*lost diverged"):
        experiment.measure("steps", step, [lost])


def test_runs_are_trained_once_and_go_on_where_they_were_stopped(experiment, monkeypatch):
    trained = []

    def train_all(waiting, *_):
        trained.extend(waiting)
        shared.train_here(waiting)

    monkeypatch.setattr(shared, "train_all", train_all)
    first, second = experiment.train({"": SMALL})[""]
    assert [record["step"] for record in read_run(first)["eval"]] == [0, 2, 4]
    before = losses(first)
    (first / "loss.png").unlink()  # the last thing that a run writes
    for _ in range(2):
        experiment.train({"": SMALL})
        assert trained == [first, second, first]
    assert losses(first) == before and len(read_run(first)["run"]) == 1  # nothing was trained
    # A second stage is another run for each model that it goes on with.
    origins = [run / "ckpt.pt" for run in (first, second)]
    further = {"stage": "context", "block_size": 32, "init_from": origins}

    def copy_all(waiting, *_):
        trained.extend(shutil.copytree(first, run, dirs_exist_ok=True) for run in waiting)

    monkeypatch.setattr(shared, "train_all", copy_all)
    assert experiment.train({"": further})[""] == trained[3:]
    assert len(set(trained)) == 4


def test_texts_are_made_once_and_by_fresh_anew(experiment, data):
    def bytes_of(text: str) -> int:
        made = context.write_documents(experiment, "short", 40, lambda rng: text, tokenizer_of=data)
        return read_meta(made)["train"]["bytes"]

    first = bytes_of("Call Anna tiger.")
    assert bytes_of("Call Boris.") == first
    experiment.clear()
    assert bytes_of("Call Boris.") < first


def test_other_settings_or_data_are_another_folder(experiment, data, tmp_path):
    def folder(**flags):
        return experiment.folder({"ffn": "embformer", "seed": 1, **flags})

    same = folder()
    assert same.name.startswith(f"{data.name}-embformer-1-")
    # Flags that say the defaults, and those that change no result, are the same run.
    assert same == folder(learning_rate=6e-3, device_batch_size=1)
    others = [{"init_std": 0.088}, {"learning_rate": 3e-3}, {"seed": 2}, {"dtype": "bfloat16"}]
    assert len({same, *(folder(**other) for other in others)}) == 5
    assert ":" not in folder(attention="window:4").name  # Windows has no such files
    copy = tmp_path / "x" / data.name
    shutil.copytree(data, copy)
    assert folder(data_dir=str(copy)) == same
    change_json(copy / "meta.json", corpus="countries")
    assert folder(data_dir=str(copy)) != same
    for given, steps in (({}, 1000), ({"max_iters": 9}, 9)):
        assert experiment.all_flags({"data_dir": copy, **given})["max_iters"] == steps


def test_a_changed_file_of_relatives_makes_the_runs_of_its_kind_new(
    experiment, tmp_path, add_relative
):
    """Also one that it imports, by whatever statement."""
    begun = "import model\n\n\nclass {0}(model.{0}):\n    pass\n"
    files = {
        "inner": begun.format("Decoder"),
        "first": "from relatives import inner\n" + begun.format("Decoder"),
        "second": "from relatives.first import model\n" + begun.format("Decoder"),
        "third": "import relatives.inner\n" + begun.format("Decoder"),
        "near": begun.format("Attention"),
    }
    for name, source in files.items():
        add_relative(name, source)

    def folders() -> dict[str, Path]:
        kinds = {name: {"ffn": name} for name in ("dense", "inner", "first", "second", "third")}
        kinds["near"] = {"ffn": "dense", "attention": "full,near:3"}
        return {name: experiment.folder({"seed": 1, **flags}) for name, flags in kinds.items()}

    for name, expected in (
        ("inner", {"inner", "first", "second", "third"}),
        ("second", {"second"}),
        ("near", {"near"}),
    ):
        before = folders()
        assert before == folders()
        with open(tmp_path / f"{name}.py", "a") as file:
            file.write("# changed\n")
        after = folders()
        assert {kind for kind in before if before[kind] != after[kind]} == expected


def test_a_file_of_relatives_that_changes_during_an_analysis_is_named(
    experiment, tmp_path, add_relative, monkeypatch, capsys
):
    """A later seed's process imports the new one, in the folder that has the digest of the old."""
    path = add_relative("edited", "import model\n\n\nclass Decoder(model.Decoder):\n    pass\n")
    began = path.read_text()

    def train_all(waiting, at_once):
        for number, (folder, given) in enumerate(waiting.items()):
            path.write_text(began + number * "# changed\n")
            sys.modules.pop("relatives.edited", None)
            shared.train_here({folder: given})

    monkeypatch.setattr(shared, "train_all", train_all)
    kinds = {"": {**SMALL, "n_layer": 2, "ffn": "edited"}}
    experiment.train(kinds)
    assert "note: relatives/edited.py changed since" in capsys.readouterr().err


ENDS = """
import shutil, sys
print(sys.argv[1:])
shutil.copy({!r}, sys.argv[2])
sys.exit("error: ckpt.pt is damaged")
"""


def test_a_loss_that_is_no_number_is_a_finding_and_another_failure_is_not(
    experiment, data, trained, tmp_path, monkeypatch
):
    """The records that train.py leaves then, another program leaves in its place."""
    diverging = {**SMALL, "learning_rate": 1e8, "warmup": 0.0}
    for which, more in (("training", {"max_iters": 20, "eval_interval": 20}), ("validation", {})):
        with user_error(f"the {which} loss became"):
            small_run(data, tmp_path / which, **{**diverging, **more})
        assert math.isnan(last_eval(read_run(tmp_path / which))["val_loss"])
        assert shared.diverged(tmp_path / which)
    monkeypatch.setattr(shared, "ROOT", tmp_path)
    (tmp_path / "train.py").write_text(ENDS.format(str(tmp_path / "training/metrics.jsonl")))
    (ended,) = experiment.train({"": diverging}, [1])[""]
    assert shared.final_loss(ended) == math.inf
    log = (ended / "log.txt").read_text()
    assert experiment.train({"": diverging}, [1])[""] == [ended]  # nothing is left to train
    assert (ended / "log.txt").read_text() == log
    broken = experiment.folder({"seed": 1, **SMALL})
    (broken / "ckpt.pt").write_text("x")
    (tmp_path / "train.py").write_text(ENDS.format(str(trained["dense"] / "metrics.jsonl")))
    with user_error(rf"{broken.name}: exit code 1, see its log"):
        experiment.train({"": SMALL}, [1])
    given, error = (broken / "log.txt").read_text().splitlines()
    assert given == str(["--out_dir", str(broken), "--resume"])
    assert error == "error: ckpt.pt is damaged"
    monkeypatch.setattr(shared, "train_all", lambda waiting, *_: shared.train_here(waiting))
    other = {**SMALL, "seed": 2}  # a kind with a seed of its own
    assert experiment.train({"": other}, [1])[""] == [experiment.folder(other)]


STANDS_IN = """
import signal, sys, time
from pathlib import Path

def stop(*_):
    print("continue with ...")
    sys.exit(128 + signal.SIGTERM)

signal.signal(signal.SIGTERM, stop)
Path(sys.argv[2], "begun").touch()
time.sleep(10)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM would end the tests")
def test_runs_are_told_when_an_analysis_is_stopped(data, tmp_path, monkeypatch):
    """... alone, as a scheduler does; of Ctrl-C, all processes of a terminal know. Another program
    stands in for train.py, which then saves (test_train.py)."""
    (tmp_path / "train.py").write_text(STANDS_IN)
    monkeypatch.setattr(shared, "ROOT", tmp_path)
    ended = Event()

    def stop() -> None:
        while not ended.wait(0.05):
            if list(tmp_path.glob("runs/*/begun")):
                os.kill(os.getpid(), signal.SIGTERM)
                break

    line = ["--out_dir", tmp_path, "--data_dir", data, "--jobs", 1, "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["analyze.py", "stability", *map(str, line)])
    stopper = Thread(target=stop)
    stopper.start()
    with pytest.raises(SystemExit) as stopped:
        run_command(analyze.main)
    ended.set()
    stopper.join()
    assert stopped.value.code == 128 + signal.SIGTERM
    (log,) = tmp_path.glob("runs/*/log.txt")  # no other run has begun
    assert "continue with" in log.read_text()  # its process has ended


def test_after_ctrl_c_runs_end_and_no_others_begin(monkeypatch, capsys):
    begun = Event()
    ended = []

    def train_apart(folder, *_) -> None:
        begun.set()
        time.sleep(0.1)
        ended.append(folder)

    def interrupted(runs) -> None:
        begun.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(shared, "train_apart", train_apart)
    monkeypatch.setattr(shared, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shared.train_all({"first": {}, "second": {}}, at_once=1)
    assert ended == ["first"]
    assert "the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize("lowest", [3e-3, 2.2e-2, 2e-4])  # 2e-4: all that are tried first diverge
def test_the_best_learning_rate_is_not_the_end_of_those_tried(experiment, monkeypatch, lowest):
    asked = []

    def train(kinds, seeds):  # not at all: the name of a folder is its rate
        assert seeds == [5] and not {*seeds} & {*experiment.numbers}  # no seed that is counted
        rates = {name: flags["learning_rate"] for name, flags in kinds.items()}
        asked.extend(rates.values())
        return {name: [rate] for name, rate in rates.items()}

    def read(rate):  # the last loss counts, not the best one
        last = abs(math.log(rate / lowest)) if rate <= 4 * lowest else math.nan
        return {"step": [], "eval": [{"val_loss": -rate}, {"val_loss": last}]}

    monkeypatch.setattr(experiment, "train", train)
    monkeypatch.setattr(shared, "read_run", read)
    found = best_learning_rates(experiment, {"one": {"ffn": "dense"}})["one"]
    assert asked[:3] == [6e-3, 3e-3, 12e-3]  # the default for text of one's own, and around it
    assert abs(math.log2(found["learning_rate"] / lowest)) <= 0.5
    assert min(asked) < found["learning_rate"] < max(asked)
    assert len(set(asked)) == len(asked)


def test_several_seeds_find_the_rate_of_the_lowest_mean(experiment, monkeypatch):
    losses = {  # by rate and seed: the first alone would take the middle rate
        (0.003, 5): 2.0, (0.003, 6): 2.0, (0.003, 7): 2.0,
        (0.006, 5): 1.0, (0.006, 6): 3.0, (0.006, 7): 3.0,
        (0.012, 5): 4.0, (0.012, 6): 4.0, (0.012, 7): 4.0,
        (0.0015, 5): 5.0, (0.0015, 6): 5.0, (0.0015, 7): 5.0,
    }  # fmt: skip

    def train(kinds, seeds):
        rates = {name: flags["learning_rate"] for name, flags in kinds.items()}
        return {name: [(rate, seed) for seed in seeds] for name, rate in rates.items()}

    monkeypatch.setattr(experiment, "train", train)
    monkeypatch.setattr(shared, "final_loss", losses.get)
    kinds = {"one": {"ffn": "dense"}}
    for seeds, rate in ((5,), 0.006), ((5, 6, 7), 0.003):
        assert best_learning_rates(experiment, kinds, seeds)["one"]["learning_rate"] == rate


def test_verdicts_are_those_of_students_t():
    """Losses of five seeds, compared in pairs. With four degrees of freedom, Student's t of 95 % is
    2.7764 (any table of it)."""
    dense = [0.80, 0.83, 0.79, 0.84, 0.81]
    gains = [0.04, 0.01, 0.03, 0.02, 0.05]  # of a mean, 0.03, that is larger than it may be off
    error = 2.7764 * statistics.stdev(gains) / math.sqrt(5)
    assert interval(".4f", gains) == f"0.0300 ± {error:.4f}"
    for own, verdict in (
        (gains, "same sign"),
        ([-gain for gain in gains], "opposite sign"),
        ([0.04, -0.01, 0.03, -0.02, 0.05], "undecided"),
    ):
        losses = [loss - gain for loss, gain in zip(dense, own, strict=True)]
        (row,) = verdicts({"STEM, third": losses, "dense": dense})
        assert row["verdict"] == verdict
    assert interval(".4f", []) == ""


# --- scale ---


def test_the_lead_at_each_size_is_read_off_runs_at_rates_found_at_that_size_or_the_one_before(
    experiment, monkeypatch, capsys
):
    """Dense loses 6 - log10(tokens / 1 M), as others do after 10^0.1 times fewer tokens. Runs are
    missing that have diverged: one, and all of dense at a size."""
    with user_error("tokens: give the folder of classics"):
        scale.scale(experiment)
    monkeypatch.setattr(scale, "read_meta", lambda folder: {"train": {"tokens": 6e7}})
    asked = {}

    def search(experiment, kinds):
        return {name: {**kinds[name], "learning_rate": kinds[name]["max_iters"]} for name in kinds}

    def train(kinds):
        for (_, million, seed), flags in kinds.items():
            if flags["preset"] == "prose":
                asked[million] = flags["max_iters"], flags["learning_rate"]
            assert seed == flags["seed"]
        return {run: [Path(json.dumps(run))] for run in kinds}

    def measure(name, function, folders):
        found = []
        for folder in folders:
            kind, million, seed = json.loads(folder.name)
            loss = 6 - math.log10(million) - 0.1 * (kind != "dense") + seed
            found.append({"losses": [loss, loss + 1, loss, loss - 1], "few": 7})
        return found

    monkeypatch.setattr(scale, "best_learning_rates", search)
    missing = ('["Embformer", 15, 2]', '["dense", 112.8, 1]')
    monkeypatch.setattr(scale, "diverged", lambda folder: folder.name in missing)
    monkeypatch.setattr(experiment, "train", train)
    monkeypatch.setattr(experiment, "measure", measure)
    pictures = []  # one after each stage, of which the last one is drawn
    monkeypatch.setattr(experiment, "picture", lambda *picture: pictures.append(picture))
    with torch.device("meta"):  # models of which the sizes alone are asked for
        scale.scale(experiment)
    Experiment.picture(experiment, *pictures[-1])
    settings = train_settings(data_dir=str(experiment.data_dir), max_iters=1)
    step = settings.batch_size * settings.model.block_size
    steps = {million: round(1e6 * million / step) for million in scale.SIZES}
    assert asked == {size: (steps[size], steps[scale.SIZES[size]]) for size in steps}
    *_, last = capsys.readouterr().out.split("| M tokens |")
    rows = [line.split(" | ") for line in last.splitlines() if line[:2] == "| "]
    at = {row[0]: [row[2], *row[4:9]] for row in rows if row[1] == "Embformer"}
    assert at["| 1.5"] == ["2", *["-0.100 ± 0.000"] * 4, f"{10**0.1:.2f} x"]
    assert at["| 15"][:2] == ["1", "-0.100"]
    assert at["| 112.8"] == ["1", *[""] * 4, "> 0.50 x"]
    assert (experiment.out_dir / "scale-prose.png").read_bytes().startswith(PNG)


def test_losses_by_frequency_are_those_of_the_run(trained, data):
    run = trained["embformer"]
    model, encoding, checkpoint = opened = load_model(run, CPU)
    found = scale.measure_model(*opened)
    assert "books" not in found
    assert found["losses"][0] == pytest.approx(read_run(run)["eval"][-1]["val_loss"], rel=1e-5)
    n_id = encoding.n_vocab
    text = np.fromfile(data / "train.bin", dtype=np.uint16)
    rank = np.bincount(text[::16], minlength=n_id).argsort(kind="stable").tolist()
    source = Data(str(data), "text", 32, 0, total=0).val[str(data)]
    losses = [[], [], []]
    ids, targets = source.sequences(source.spread(RUN["eval_tokens"]))  # [N, T]
    log_p = model(ids)[0].log_softmax(-1).flatten(0, 1)  # [N T, V]
    for token, target, of in zip(ids.flatten().tolist(), targets.flatten(), log_p, strict=True):
        losses[rank.index(token) * 3 // n_id].append(-of[target].item())
    for loss, of_third in zip(found["losses"][1:], losses, strict=True):
        expected = statistics.fmean(of_third) if of_third else math.nan
        assert loss == pytest.approx(expected, rel=1e-5, nan_ok=True)
    reads = collections.Counter()
    args = checkpoint["args"]
    train = Data(str(data), "text", 32, args["seed"], total=1).train
    for index in range(args["max_iters"] * args["batch_size"]):
        reads.update(train.sequence(index)[0].tolist())
    assert found["few"] == sum(reads[token] < 10 for token in range(n_id))
    shutil.copytree(data, data / "held_out")  # of the same text, the loss is the same
    assert scale.measure_model(*opened)["books"] == found["losses"][0]
    shutil.rmtree(data / "held_out")


def test_spikes_stand_out_of_the_steps_around():
    high = 2.1 + 6 * 1.4826 * 0.1  # median and median deviation of the following
    losses = [2.0, 2.1, 2.2] * 40
    losses[40] = high - 0.01
    losses[60] = high + 0.02
    losses[61] = high + 0.01  # the tail of 60
    losses[80] = math.nan
    assert (spikes(losses).nonzero()[0] + REACH).tolist() == [60, 80]
    assert spike_rate({"step": [{"train_loss": loss} for loss in losses]}) == 2 * 1000 / 100
    falling = [8 * 0.97**step + 0.02 * (step % 3) for step in range(120)]
    for smooth in (falling, [*falling[:50], *[9.0] * 50]):  # or without a return
        assert not spikes(smooth).any()
    assert spike_rate({"step": [{"train_loss": 1.0}] * 20}) is None  # too few to tell


@pytest.mark.parametrize("ffn", ["dense", "stem"])
def test_vectors_are_means_of_what_projections_compute_and_read(ffn):
    model = decoder(ffn=ffn, n_layer=2, block_size=4)
    text = tokens(43)  # the last three are left out
    windows = text[:40].view(10, 4)
    with torch.no_grad():
        vectors = dict(geometry.vectors_of(model, text))
        seen = {}
        layer_1 = model.blocks[1].ffn
        layer_1.down.register_forward_pre_hook(lambda _, given: seen.update(read=given[0]))
        if ffn == "dense":
            layer_1.up.register_forward_hook(lambda _, given, made: seen.update(rows=made))
        model(windows)
    for number, token in enumerate(windows.unique()):
        here = windows == token
        row = seen["rows"][here].mean(0) if ffn == "dense" else model.tables.weight[0][token]
        name = "W_u x, layer 1" if ffn == "dense" else "rows, layer 1"
        torch.testing.assert_close(vectors[name][number], row)
        read = seen["read"][here].mean(0)
        torch.testing.assert_close(vectors["what W_d reads, layer 1"][number], read)
