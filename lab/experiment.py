"""What all questions share: runs are trained once, figures measured once, and both kept. A question
is a function of an `Experiment`, which prints tables and may draw <out_dir>/<question>.png.

A run is found again by its settings, its data and its kind's files in relatives/, a figure by its
run. After any other change of the code, --fresh begins anew. A note says so if it is one of the
files that all models are made of.

A question of one's own names kinds, as flags of train.py. It takes what `train` leaves of each, a
folder for each seed, to a row of a table:

    def heads(experiment: Experiment) -> None:
        kinds = {f"{n} heads": {**KINDS["STEM, all"], "n_head": n} for n in (1, 2, 4)}
        rows = []
        for name, folders in experiment.train(best_learning_rates(experiment, kinds)).items():
            losses = [last_eval(read_run(folder))["val_loss"] for folder in folders]
            rows.append({"kind": name, "val loss": interval(".3f", losses)})
        print(markdown(rows))

`lab.edits.table_with_edits` makes such a table with all that is known of runs. What the records of
a run do not say, a function that `measure` calls with each model finds out.
"""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

import model
import prepare
from common import UserError, atomic, check_settings, flag, pick_device
from corpora.countries import write_corpus
from lab.pictures import markdown, plt, save_figure
from text.dataset import read_meta
from text.download import MOBY_DICK
from train import resolve_settings, train
from training.checkpoints import load_model
from training.digests import CORE, changed, digests
from training.records import read_run
from training.settings import RESUMABLE_FLAGS, device_flag

Flags = dict[str, Any]  # of train.py, by name
Kinds = dict[Hashable, Flags]
Run = dict[str, list[dict]]  # the records of a run by type

ROOT = Path(__file__).parent.parent
children: list[subprocess.Popen] = []  # of train.py
MAIN = {
    "dense": {"ffn": "dense"},
    "STEM, third": {"ffn": "stem", "stem_layers": "third"},
    "STEM, half": {"ffn": "stem", "stem_layers": "half"},
    "STEM, all": {"ffn": "stem", "stem_layers": "all"},
    "Embformer": {"ffn": "embformer"},
}
KINDS = {**MAIN, **{name: {"ffn": name} for name in model.relatives("Decoder")}}
# The baseline of STEM's paper: a token has one expert, and the model about as many parameters as
# STEM, on prose as that in a third of the layers.
HASH_LAYERS = {"hash_moe, one expert": {"ffn": "hash_moe", "n_expert": 6, "top_k": 1}}
SEARCHED = 5  # the seed that finds learning rates and settings, and counts for nothing else
# In the ladder, three: of some kinds, one seed learns the facts early, another one late.
SEARCHED_THREE = (SEARCHED, 6, 7)
# Steps on the countries: more than the default run takes, as kinds learn facts at different times.
COUNTRIES_STEPS = 1000
# With --quick all runs are tiny, and last two steps.
QUICK_SHAPE = {"n_layer": 3, "n_head": 2, "n_embd": 16}
QUICK_RUN = {"batch_size": 2, "max_iters": 2, "eval_interval": 2, "eval_tokens": 512}


def pick(*names: str) -> dict[str, Flags]:
    return {name: KINDS[name] for name in names}


@dataclass
class Experiment:
    out_dir: Path = flag(Path("out/analysis"), "texts, runs, figures, pictures: kept")
    data_dir: Path = flag(Path("data/countries"), "prepared folder to train on")
    seeds: str | None = flag(
        None,
        "seeds of each figure that is a mean",
        shown="1337,1,2; ladder: 1337,1,2,3,4; counterfact: 11,12,13",
    )
    jobs: int | None = flag(None, "runs at a time", must="at least 1", shown="cores; on a GPU 1")
    quick: bool = flag(False, "tiny models and few seeds: a smoke test")
    fresh: bool = flag(False, "delete the texts, runs and figures in --out_dir first")
    device: str = device_flag()

    def __post_init__(self) -> None:
        check_settings(self)
        numbers = (self.seeds or ("1337" if self.quick else "1337,1,2")).split(",")
        self.numbers = [int(number) for number in numbers if number.isdecimal()]
        if len(set(self.numbers)) < len(numbers):  # a run counts once
            raise UserError(f"--seeds {self.seeds}: give different numbers, as 1337,1,2")
        searching = {*SEARCHED_THREE} & {*self.numbers}
        if searching:
            raise UserError(
                f"--seeds {self.seeds}: {min(searching)} finds learning rates, give others"
            )
        self.on = pick_device(self.device)
        if self.jobs is None:
            self.jobs = (os.cpu_count() or 1) if self.on.type == "cpu" else 1
        if self.quick:
            self.out_dir = self.out_dir / "quick"
        self.prepared(self.data_dir)

    def clear(self) -> None:
        """Delete what was kept, for --fresh."""
        for name in ("texts", "runs", "converted", "figures"):
            shutil.rmtree(self.out_dir / name, ignore_errors=True)

    def prepared(self, folder: Path) -> Path:
        """A folder with the corpus it is named after, made if it is missing and is one of ours."""
        is_missing = not (folder / "meta.json").exists()
        if is_missing and folder.name == "countries":
            write_corpus("countries", folder)
        elif is_missing and folder.name == "moby-dick":
            settings = prepare.Preparation(dataset="moby-dick", out_dir=folder)
            prepare.prepare_files(settings, [MOBY_DICK], "text")
        return folder

    @property
    def novel(self) -> Path:
        """The folder of Moby-Dick, beside --data_dir."""
        return self.prepared(self.data_dir.with_name("moby-dick"))

    def need_countries(self) -> None:
        """UserError: a question is about facts of the countries, and --data_dir is not."""
        if read_meta(self.data_dir)["corpus"] != "countries":
            raise UserError(
                f"--data_dir {self.data_dir} is not of the countries, whose facts are asked for: "
                "leave it out"
            )

    def all_flags(self, flags: Flags) -> Flags:
        """The flags of a run: the experiment's own, those given, and with --quick small sizes."""
        every = {"data_dir": str(self.data_dir), "device": self.device, **flags}
        corpus = read_meta(Path(every["data_dir"]))["corpus"]
        if corpus == "countries":
            every.setdefault("max_iters", COUNTRIES_STEPS)
        if self.quick:
            every.update(QUICK_RUN)
            if "init_from" not in flags:  # else the shape is that of the model it goes on with
                every.update(QUICK_SHAPE)
        return every

    def folder(self, flags: Flags) -> Path:
        """The folder of a run, made if need be. Its name, which legends show, begins with the data
        and the values of `flags`, and ends with the digest that finds it again."""
        every = self.all_flags(flags)
        data_dir = Path(every["data_dir"])
        settings = resolve_settings(**every).flat()
        for name in set(RESUMABLE_FLAGS) - {"dtype"}:
            settings.pop(name)  # changes no result
        files = digests(settings["ffn"], settings["attention"])
        settings["relatives"] = {name: files[name] for name in files if name not in CORE}
        distinct = json.dumps([settings, read_meta(data_dir)], sort_keys=True)
        digest = hashlib.sha256(distinct.encode()).hexdigest()[:12]
        shown = [str(flags[name]) for name in flags if name not in ("data_dir", "init_from")]
        name = "-".join([data_dir.name, *shown]).replace(":", "=")  # which Windows does not take
        runs = self.out_dir / "runs"
        folder = next(runs.glob(f"*-{digest}"), runs / f"{name}-{digest}")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def train(self, kinds: Kinds, seeds: list[int] | None = None) -> dict[Hashable, list[Path]]:
        """The folders of each kind's runs, one for each seed or for its own `seed`; `init_from` is
        a list with a checkpoint for each of them. What is not trained yet is trained, `jobs` runs
        at a time, in the order of `kinds`; a run whose loss diverged is done, too."""
        folders = {}
        waiting = {}
        for name, flags in kinds.items():
            folders[name] = []
            own = [flags["seed"]] if "seed" in flags else None
            for number, seed in enumerate(own or seeds or self.numbers):
                with_seed = {"seed": seed, **flags}
                if "init_from" in flags:
                    with_seed["init_from"] = flags["init_from"][number]
                folder = self.folder(with_seed)
                folders[name].append(folder)
                if (folder / "loss.png").exists() or diverged(folder):
                    note_changes(folder)
                    continue
                if (folder / "ckpt.pt").exists():
                    waiting[folder] = {"resume": True}
                else:
                    waiting[folder] = self.all_flags(with_seed)
        if waiting and self.quick:
            train_here(waiting)
        elif waiting:
            train_all(waiting, self.jobs)
        for folder in waiting:
            note_changes(folder)
        return folders

    def measure(self, name: str, function: Callable, folders: Iterable[Path], *arguments) -> list:
        """What `function(model, encoding, checkpoint, *arguments)` returns about each run's model,
        as its last step left it. It is kept in a file of <out_dir>/figures/<name>, for the next
        time: give other arguments another name."""
        figures = []
        for folder in tqdm(folders, name, leave=None):
            path = self.out_dir / "figures" / name / f"{folder.name}.json"
            if not path.exists():
                loaded = load_model(last_checkpoint(folder), self.on)
                figure = function(*loaded, *arguments)
                with atomic(path) as temporary:
                    temporary.write_text(json.dumps(figure))
            figures.append(json.loads(path.read_text()))
        return figures

    def picture(self, name: str, figure: plt.Figure) -> None:
        path = self.out_dir / f"{name}.png"
        save_figure(figure, path)
        print(f"\nwrote {path}")


def note_changes(folder: Path) -> None:
    """Say if a file of its code has changed since a run began, or part of it before a resume: one
    of CORE, or one of relatives/ that was edited while an analysis went on."""
    starts = read_run(folder)["run"]
    args = starts[-1]["args"]
    now = digests(args["ffn"], args["attention"])
    files = {file for start in starts for file in changed(start.get("relatives") or {}, now)}
    if files:
        names = ", ".join(sorted(files))
        say_once(f"{names} changed since kept runs were trained: --fresh begins anew")


@cache
def say_once(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)


def last_start(run: Run) -> dict:
    """The args, sizes and data of a run: a resume may have changed them, as --max_iters."""
    return run["run"][-1]


def last_eval(run: Run) -> dict:
    """The evaluation at the end of a run; of a run that ended because its training loss was not
    finite, that step, and NaN for all figures."""
    record = run["eval"][-1]
    if run["step"] and not math.isfinite(run["step"][-1]["train_loss"]):
        return {**dict.fromkeys(record, math.nan), "step": run["step"][-1]["step"]}
    return record


def final_loss(folder: Path) -> float:
    """The validation loss at the end of a run; infinite if a loss was not finite."""
    loss = last_eval(read_run(folder))["val_loss"]
    return loss if math.isfinite(loss) else math.inf


def diverged(folder: Path) -> bool:
    """Whether a run ended because its loss was not finite."""
    return (folder / "metrics.jsonl").exists() and final_loss(folder) == math.inf


def last_checkpoint(folder: Path) -> Path:
    """The model that the last step of a run left, which its best.pt need not be. UserError: there
    is none, as its loss diverged: what it saved before then is of a run that had not ended."""
    if diverged(folder):
        raise UserError(f"the loss of {folder} diverged: give --seeds without its own")
    return folder / "ckpt.pt"


def train_here(waiting: dict[Path, Flags]) -> None:
    """Train in this process: runs of --quick take less time than Python takes to start."""
    for folder, flags in waiting.items():
        with open(folder / "log.txt", "a", encoding="utf-8") as log, redirect_stdout(log):
            train(resolve_settings(**flags, out_dir=folder))


def train_apart(folder: Path, flags: Flags, threads: int) -> None:
    """Run train.py in a process of its own. UserError: it failed, other than by a loss that
    diverged."""
    command = [sys.executable, ROOT / "train.py", "--out_dir", folder]
    for name, value in flags.items():
        command.append(f"--{name}")
        if value is not True:  # {"doc_mask": True, "seed": 1} -> --doc_mask --seed 1
            command.append(str(value))
    with open(folder / "log.txt", "a", encoding="utf-8") as log:
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        children.append(child)
        code = child.wait()
    if code and not diverged(folder):
        raise UserError(f"{folder}: exit code {code}, see its log.txt")


def train_all(waiting: dict[Path, Flags], at_once: int) -> None:
    """Run train.py with flags by output folder, so many at a time. After an error no more begin;
    nor after Ctrl-C, which reaches every process of a terminal: those that run save and end."""
    threads = max(1, torch.get_num_threads() // at_once)
    bar = tqdm(desc=f"training, {at_once} at a time", total=len(waiting), unit="run")
    pool = ThreadPoolExecutor(at_once)
    runs = [pool.submit(train_apart, *run, threads) for run in waiting.items()]
    try:
        for run in as_completed(runs):
            run.result()
            bar.update()
    except KeyboardInterrupt:
        print("stopping: runs save, and the same command goes on with them", file=sys.stderr)
        raise
    except SystemExit:  # SIGTERM, of this process alone
        for child in children:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        bar.close()


def best_learning_rates(
    experiment: Experiment, kinds: Kinds, seeds: Sequence[int] = (SEARCHED,)
) -> Kinds:
    """The kinds, each with the learning rate of its lowest validation loss, a mean over seeds: of
    the default and, until those are tried, of half and of twice the best one."""
    losses = {name: {} for name in kinds}  # by rate
    wanted = []
    for name, flags in kinds.items():
        default = resolve_settings(**experiment.all_flags(flags)).learning_rate
        wanted.append((name, default))
    while wanted:
        runs = {(name, rate): {**kinds[name], "learning_rate": rate} for name, rate in wanted}
        for (name, rate), folders in experiment.train(runs, [*seeds]).items():
            losses[name][rate] = fmean(map(final_loss, folders))
        wanted = []
        for name, tried in losses.items():
            best = min(sorted(tried), key=tried.get)  # the lowest, while all diverge
            for rate in (best / 2, best * 2):
                if rate not in tried and not experiment.quick:
                    wanted.append((name, rate))

    rows = []
    at_best = {}
    title = f"val loss by learning rate, seed {', '.join(map(str, seeds))}"
    for name, tried in losses.items():
        shown = [f"{rate:g}: {tried[rate]:.3f}" for rate in sorted(tried)]
        rows.append({"kind": name, title: ", ".join(shown)})
        at_best[name] = {**kinds[name], "learning_rate": min(tried, key=tried.get)}
    print(markdown(rows) + "\n")
    return at_best
