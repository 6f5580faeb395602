"""What all questions share: runs are trained once, figures measured once, and both kept. A question
is a function of an `Experiment`, which prints tables and draws <out_dir>/<question>.png.
"""

import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import prepare
from common import UserError, atomic, check_ranges, flag, locked, pick_device
from train import train
from training.batches import read_meta
from training.checkpoints import device_flag
from training.records import markdown, plt, read_run, save_figure
from training.settings import RESUMABLE_FLAGS, resolve_settings

Flags = dict[str, Any]  # of train.py, by name
Run = dict[str, list[dict]]  # the records of a run by type

MAIN = ("dense", "STEM, third", "STEM, half", "STEM, all", "Embformer")
KINDS = {
    "dense": dict(ffn="dense"),
    "STEM, third": dict(ffn="stem", stem_layers="third"),
    "STEM, half": dict(ffn="stem", stem_layers="half"),
    "STEM, all": dict(ffn="stem", stem_layers="all"),
    "Embformer": dict(ffn="embformer"),
    **{name: dict(ffn=name) for name in ("moe", "hash_moe", "pkm", "deepembed", "ple")},
}
RATES = (1.5e-3, 3e-3, 6e-3)  # learning rates, and further ones while the best is at an end
QUICK = dict(n_layer=3, n_head=2, n_embd=16, max_iters=4, eval_interval=4, eval_tokens=2048)


def pick(*names: str) -> dict[str, Flags]:
    return {name: KINDS[name] for name in names}


@dataclass
class Experiment:
    out_dir: Path = flag(Path("out/analysis"), "runs, figures and pictures; kept for the next time")
    data_dir: Path = flag(Path("data/countries"), "prepared folder to train on")
    seeds: str = flag("1337,1,2", "of each figure that is a mean")
    jobs: int | None = flag(None, "runs at a time", must="at least 1", shown="cores; on a GPU 1")
    quick: bool = flag(False, "tiny models and one seed: does it run?")
    device: str = device_flag()

    def __post_init__(self) -> None:
        check_ranges(self)
        numbers = self.seeds.split(",")
        if not all(map(str.isdecimal, numbers)) or len(set(map(int, numbers))) < len(numbers):
            raise UserError(f"--seeds {self.seeds}: give different numbers, as 1337,1,2")
        self.numbers = [int(seed) for seed in numbers]
        self.on = pick_device(self.device)
        alone = self.quick or self.on.type != "cpu"
        self.jobs = self.jobs or (1 if alone else os.cpu_count() or 1)
        if self.quick:
            self.out_dir, self.numbers = self.out_dir / "quick", self.numbers[:1]
        self.ensure_prepared(self.data_dir)

    def ensure_prepared(self, folder: Path) -> None:
        """Prepare the corpus that a folder is named after, if it is missing and is one of ours."""
        settings = prepare.Settings(dataset=folder.name, out_dir=folder)
        with locked(self.out_dir, wait=True):
            if (folder / "meta.json").exists():
                return
            if folder.name == "moby-dick":
                prepare.prepare_files(settings, [prepare.MOBY_DICK], "text")
            elif folder.name == "countries":
                prepare.prepare_corpus(settings)

    def full(self, flags: Flags) -> Flags:
        """All flags of a run: those of every run, and small ones for --quick. A model that goes on
        with another keeps its shape."""
        shape = ("n_layer", "n_head", "n_embd") if "init_from" in flags else ()
        small = {k: v for k, v in QUICK.items() if self.quick and k not in shape}
        return {"data_dir": str(self.data_dir), "device": self.device, **flags, **small}

    def folder(self, flags: Flags) -> Path:
        """The folder of a run, a new one if need be. It is named by `flags`, and found by a hash of
        all settings and of the data: runs with other settings have another folder."""
        given, runs = self.full(flags), self.out_dir / "runs"
        settings = resolve_settings(**given).flat()
        settings = {k: v for k, v in settings.items() if k not in RESUMABLE_FLAGS}
        if "init_from" in given:  # its folder's name says what it is, wherever --out_dir is
            settings["init_from"] = Path(given["init_from"]).parent.name
        data = Path(given["data_dir"])
        told = json.dumps([settings, read_meta(data)], sort_keys=True)
        digest = hashlib.sha256(told.encode()).hexdigest()[:12]
        shown = (f"{k}={v}" for k, v in sorted(flags.items()) if k not in ("data_dir", "init_from"))
        folder = next(runs.glob(f"*-{digest}"), runs / f"{','.join([data.name, *shown])}-{digest}")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def train(
        self, kinds: dict[Hashable, Flags], seeds: list[int] | None = None
    ) -> dict[Hashable, list[Path]]:
        """The folders of each kind's runs, one for each seed. What is not trained yet is trained,
        `jobs` runs at a time; a run whose loss diverged is done, too."""
        folders, jobs = {}, {}
        with locked(self.out_dir / "runs", wait=True):  # another analysis may want the same ones
            for name, seed in itertools.product(kinds, seeds or self.numbers):
                flags = {"seed": seed, **kinds[name]}
                folder = self.folder(flags)
                folders.setdefault(name, []).append(folder)
                if not (folder / "loss.png").exists() and not diverged(folder):
                    begun = (folder / "ckpt.pt").exists()
                    jobs[folder] = {"resume": True} if begun else self.full(flags)
            if jobs:
                print(f"training {len(jobs)} runs, {self.jobs} at a time", file=sys.stderr)
                train_all(jobs, self.jobs)
        return folders

    def measure(
        self, name: str, todo: dict[str, Callable[[], Any]], what: str = "runs to measure"
    ) -> list[Any]:
        """What the functions return: JSON, kept in <name>.json by their keys for the next time."""
        cache = JsonCache(self.out_dir / f"{name}.json")
        if new := [key for key in todo if key not in cache.figures]:
            print(f"{name}: {len(new)} {what}", file=sys.stderr)
        for key in tqdm(new, name, delay=3):
            cache.add(key, todo[key]())
        return [cache.figures[key] for key in todo]

    def picture(self, name: str, figure: plt.Figure) -> None:
        path = self.out_dir / f"{name}.png"
        save_figure(figure, path)
        print(f"\nwrote {path}")


def diverged(folder: Path) -> bool:
    """Whether a run ended because its loss was not finite."""
    return (folder / "failed.txt").exists()


def train_here(folder: Path, flags: Flags) -> None:
    """`python train.py` with these flags. What it prints goes to log.txt in its folder."""
    log = open(folder / "log.txt", "a", encoding="utf-8")  # noqa: SIM115
    with log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            train(resolve_settings(**flags, out_dir=folder))
        except UserError as error:
            note_failure(folder, str(error))


def start(folder: Path, flags: Flags, threads: int) -> subprocess.Popen:
    """The same in a process of its own, with so many threads."""
    given = [f"--{k}" if v is True else f"--{k}={v}" for k, v in flags.items()]
    command = [sys.executable, Path(__file__).parent.parent / "train.py", *given]
    options = dict(stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    with open(folder / "log.txt", "a", encoding="utf-8") as log:
        # In a session of its own: Ctrl-C reaches it through us alone, and once.
        options |= dict(stdout=log, stderr=log, start_new_session=True)
        return subprocess.Popen([*command, f"--out_dir={folder}"], **options)


def note_failure(folder: Path, error: str) -> None:
    """A loss that became infinite is a finding, noted in failed.txt. All else: UserError."""
    if "loss became" not in error:
        raise UserError(f"{folder}: {error.removeprefix('error: ')}")
    (folder / "failed.txt").write_text(f"{error}\n", encoding="utf-8")


def train_all(jobs: dict[Path, Flags], at_once: int) -> None:
    """Train runs, by folder. Where one fails, or on Ctrl-C, SIGTERM or SIGHUP, those that run at
    the same time save and end."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP, and nohup ignores it
        if number and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    waiting, running = list(jobs.items()), {}
    threads = max(1, (os.cpu_count() or 1) // at_once)
    bar = tqdm(total=len(jobs), desc="training", unit="run")
    try:
        while waiting or running:
            if waiting and at_once == 1:
                train_here(*waiting.pop(0))
                bar.update()
            elif waiting and len(running) < at_once:
                folder, flags = waiting.pop(0)
                running[folder] = start(folder, flags, threads)
            else:
                time.sleep(0.1)
                for folder in [f for f, process in running.items() if process.poll() is not None]:
                    if code := running.pop(folder).returncode:
                        log = (folder / "log.txt").read_text(encoding="utf-8")
                        killed = f"killed by signal {-code}: start again to go on"
                        note_failure(folder, killed if code < 0 else log.splitlines()[-1])
                    bar.update()
    finally:
        bar.close()
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


class JsonCache:
    """Figures by name in a JSON file. Several programs may add to it at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.figures = self.read()

    def read(self) -> dict[str, Any]:
        try:
            return {**json.loads(self.path.read_bytes())} if self.path.exists() else {}
        except (ValueError, TypeError, RecursionError):
            raise UserError(f"{self.path} is damaged or not of analyze.py: delete it") from None

    def add(self, name: str, figure: Any) -> None:
        with locked(self.path.parent, wait=True), atomic(self.path) as temporary:
            self.figures = {**self.read(), name: figure}  # with what others added
            temporary.write_text(json.dumps(self.figures, indent=1) + "\n", encoding="utf-8")


def search_learning_rates(
    names: Iterable[Hashable],
    rates: tuple[float, ...],
    losses: Callable[[list[tuple[Hashable, float]]], list[float]],
    enough: Callable[[Hashable], bool] = lambda name: False,
) -> dict[Hashable, dict[float, float]]:
    """The loss at each learning rate that was tried, by name: at `rates` and, while the best is at
    an end of them, at half the lowest or twice the highest.

    Args:
        losses: gives those of pairs of name and rate.
        enough: says that no rate can be better than those tried.
    """
    tried, todo = {name: {} for name in names}, list(itertools.product(names, rates))
    while todo:
        for (name, rate), loss in zip(todo, losses(todo), strict=True):
            tried[name][rate] = loss
        todo = []
        for name, found in tried.items():
            if len(rates) > 1 and not enough(name):
                best = min(found, key=found.get)
                todo += [(name, best / 2)] * (best == min(found))
                todo += [(name, best * 2)] * (best == max(found))
    return tried


def best_learning_rates(experiment: Experiment, kinds: dict[str, Flags]) -> dict[str, Flags]:
    """The kinds, each with the learning rate of its lowest validation loss with the first seed."""
    rates, seed = RATES[1:2] if experiment.quick else RATES, experiment.numbers[:1]

    def losses(todo: list[tuple[str, float]]) -> list[float]:
        wanted = {(name, rate): {**kinds[name], "learning_rate": rate} for name, rate in todo}
        folders = itertools.chain(*experiment.train(wanted, seed).values())
        return [inf if diverged(folder) else best_loss(read_run(folder)) for folder in folders]

    found = search_learning_rates(kinds, rates, losses)
    shown = sorted(set().union(*found.values()))
    rows = [
        {"best val loss": name} | {f"{r:g}": f"{by[r]:.3f}" if r in by else "" for r in shown}
        for name, by in found.items()
    ]
    print(f"Learning rates, seed {seed[0]}:\n\n{markdown(rows)}\n")
    return {k: {**kinds[k], "learning_rate": min(by, key=by.get)} for k, by in found.items()}


def best_loss(run: Run) -> float:
    """The lowest validation loss of a run."""
    return float(np.nanmin([record["val_loss"] for record in run["eval"]]))


def spread(form: str, figures: Iterable[float | None]) -> str:
    """A figure of some runs: mean ± standard deviation; one run's own, nothing if none has it."""
    known = [figure for figure in figures if isinstance(figure, float)]
    if len(known) < 2:
        return "".join(format(figure, form) for figure in known)
    return f"{np.mean(known):{form}} ± {np.std(known, ddof=1):{form}}"
