"""What all questions share: runs are trained once, figures measured once, and both kept. A question
is a function of an `Experiment`, which prints tables and draws <out_dir>/<question>.png.
"""

import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import zlib
from collections.abc import Callable, Container, Hashable, Iterable
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # each run would import it anew
from tqdm import tqdm

import prepare
from common import UserError, atomic, check_ranges, flag, locked, pick_device, run
from train import train
from training.batches import read_meta
from training.checkpoints import device_flag
from training.records import markdown, plt, read_run, save_figure
from training.settings import RESUMABLE_FLAGS, resolve_settings

plt.rcParams.update({"axes.grid": True, "grid.alpha": 0.3, "figure.constrained_layout.use": True})
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
QUICK = dict(n_layer=3, n_head=2, n_embd=16, batch_size=2)
QUICK |= dict(max_iters=4, eval_interval=4, eval_tokens=512)


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
        if not all(map(str.isdecimal, numbers)):
            raise UserError(f"--seeds {self.seeds}: give numbers, as 1337,1,2")
        self.numbers, self.on = list(map(int, numbers)), pick_device(self.device)
        self.jobs = self.jobs or (self.on.type == "cpu" and os.cpu_count()) or 1
        if self.quick:
            self.out_dir, self.numbers = self.out_dir / "quick", self.numbers[:1]
        self.ensure_prepared(self.data_dir)

    def ensure_prepared(self, folder: Path) -> None:
        """Prepare the corpus that a folder is named after, if it is missing and is one of ours."""
        settings = prepare.Settings(dataset=folder.name, out_dir=folder)
        with locked(self.out_dir, wait=True):
            missing = not (folder / "meta.json").exists()
            if missing and folder.name == "moby-dick":
                prepare.prepare_files(settings, [prepare.MOBY_DICK], "text")
            elif missing and folder.name == "countries":
                prepare.prepare_corpus(settings)

    def full(self, flags: Flags) -> Flags:
        """All flags of a run. One that goes on with another one's model keeps its shape."""
        shape = ("n_layer", "n_head", "n_embd") if "init_from" in flags else ()
        small = {k: v for k, v in QUICK.items() if self.quick and k not in shape}
        return {"data_dir": str(self.data_dir), "device": self.device, **flags, **small}

    def folder(self, flags: Flags) -> Path:
        """The folder of a run, a new one if need be, found by a hash of all settings and of the
        data. Its name, which legends show, begins with the data and the values of `flags`."""
        full, runs = self.full(flags), self.out_dir / "runs"
        settings = resolve_settings(**full).flat().items()
        data = Path(full["data_dir"])
        distinct = [{k: v for k, v in settings if k not in RESUMABLE_FLAGS}, read_meta(data)]
        digest = hashlib.sha256(json.dumps(distinct, sort_keys=True).encode()).hexdigest()[:12]
        shown = (str(v) for k, v in flags.items() if k not in ("data_dir", "init_from"))
        name = "-".join([data.name, *shown])[:47]
        folder = next(runs.glob(f"*-{digest}"), runs / f"{name}-{digest}")
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
                train_all(jobs, self.jobs)
        return folders

    def measure(self, name: str, function: Callable, subjects: Iterable[Path | tuple]) -> list[Any]:
        """What a function returns about runs' folders or tuples of arguments. It is kept, in a file
        of the folder `name` for each of them, for the next time."""
        figures = []
        for each in tqdm(subjects, name):
            key = each.name if isinstance(each, Path) else ", ".join(map(str, each))
            path = self.out_dir / name / f"{key}.json"
            figure, _, crc = (path.read_bytes() if path.exists() else b"").rpartition(b"\n")
            if crc != b"%d" % zlib.crc32(figure):  # measured never, or damaged
                figure = json.dumps(function(each)).encode()
                with locked(self.out_dir, wait=True), atomic(path) as temporary:
                    temporary.write_bytes(b"%b\n%d" % (figure, zlib.crc32(figure)))
            figures.append(json.loads(figure))
        return figures

    def picture(self, name: str, figure: plt.Figure) -> None:
        with locked(self.out_dir, wait=True):
            save_figure(figure, path := self.out_dir / f"{name}.png")
        print(f"\nwrote {path}")


def diverged(folder: Path) -> bool:
    """Whether a run ended because its loss was not finite."""
    log = folder / "log.txt"
    return log.exists() and "loss became" in log.read_text(encoding="utf-8")


def train_run(folder: Path, flags: Flags, threads: int) -> None:
    """`python train.py` with these flags, in a process of its own. It prints to log.txt."""
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C reaches it through train_all alone, and once
    torch.set_num_threads(threads)
    sys.stdout = sys.stderr = open(folder / "log.txt", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    run(lambda: train(resolve_settings(**flags, out_dir=folder)))


def train_all(jobs: dict[Path, Flags], at_once: int) -> None:
    """Train runs, by folder. Where one fails, or on Ctrl-C, SIGTERM or SIGHUP, those that run at
    the same time save and end. UserError: one failed, other than by a loss that diverged."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP, and nohup ignores it
        if number and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    # Forks of a server that has imported all, but has neither threads nor a GPU in use.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # it would look in the working folder
    processes = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
    processes.set_forkserver_preload([__name__])
    threads = max(1, torch.get_num_threads() // at_once)
    begun = [job for job in jobs.values() if "resume" in job]
    steps = sum(resolve_settings(**job).max_iters for job in jobs.values() if job not in begun)
    todo = f"{len(begun)} runs to end, {len(jobs) - len(begun)} to train, {steps:,} steps in all"
    print(f"{todo} (the default run's 1,000: 2 minutes on 2 cores)", file=sys.stderr)
    waiting, running = iter(jobs.items()), {}
    try:
        for _ in tqdm(jobs, f"training, {at_once} at a time", unit="run"):
            for folder, flags in itertools.islice(waiting, at_once - len(running)):
                process = processes.Process(target=train_run, args=(folder, flags, threads))
                process.start()
                running[process.sentinel] = folder, process
            folder, process = running.pop(wait(running)[0])
            process.join()
            if process.exitcode and not diverged(folder):
                raise UserError(f"{folder}: exit code {process.exitcode}, see its log.txt")
    finally:
        for process in multiprocessing.active_children():
            process.terminate()
        for process in multiprocessing.active_children():
            process.join()


def search_learning_rates(
    names: Iterable[Hashable],
    rates: tuple[float, ...],
    losses: Callable[[list[tuple[Hashable, float]]], list[float]],
    perfect: Container[Hashable] = (),
) -> dict[Hashable, dict[float, float]]:
    """The losses of pairs of name and learning rate, by name and rate: at `rates` and, while the
    best is at an end of them, at half the lowest or twice the highest, unless `perfect` has it."""
    tried, todo = {name: {} for name in names}, list(itertools.product(names, rates))
    while todo:
        for (name, rate), loss in zip(todo, losses(todo), strict=True):
            tried[name][rate] = loss
        todo = []
        for name, by_rate in tried.items():
            best = min(by_rate, key=by_rate.get)
            if len(rates) > 1 and name not in perfect:
                todo += [(name, best / 2)] * (best == min(by_rate))
                todo += [(name, best * 2)] * (best == max(by_rate))
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
    return float(np.nanmin([record["val_loss"] for record in run["eval"]]))


def spread(form: str, figures: Iterable[float | None]) -> str:
    """A figure of some runs: mean ± standard deviation; one run's own, nothing if none has it."""
    known = [figure for figure in figures if isinstance(figure, float)]
    if len(known) < 2:
        return "".join(format(figure, form) for figure in known)
    return f"{np.mean(known):{form}} ± {np.std(known, ddof=1):{form}}"
