"""What all questions share: runs of train.py that are trained once, figures that are kept, tables
and pictures.

A question is a function of a `Study` in the file of its name. It prints tables and draws
`<out_dir>/<question>.png`; what it trains and measures is kept, so that asking again, or asking
another question about the same runs, goes on where the last one stopped.
"""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import prepare
from common import UserError, atomic, check_ranges, flag, pick_device
from train import train
from training.batches import read_meta
from training.checkpoints import device_flag
from training.records import plt, read_run, save_figure
from training.settings import RESUMABLE_FLAGS, Settings, resolve_settings

# The kinds that are compared most often: flags of train.py.
STEM = {
    "dense": dict(ffn="dense"),
    "STEM, third": dict(ffn="stem", stem_layers="third"),
    "STEM, half": dict(ffn="stem", stem_layers="half"),
    "STEM, all": dict(ffn="stem", stem_layers="all"),
    "Embformer": dict(ffn="embformer"),
}
BASELINES = {name: dict(ffn=name) for name in ("moe", "hash_moe", "pkm", "deepembed", "ple")}
QUICK = dict(n_layer=3, n_head=2, n_embd=16, max_iters=4, eval_interval=4, eval_tokens=2048)
TRIED = ("learning_rate", "init_std")  # whose defaults depend on the corpus and the kind
Flags = dict[str, Any]


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
        numbers = [seed for seed in self.seeds.split(",") if re.fullmatch("[0-9]{1,18}", seed)]
        if len({int(seed) for seed in numbers}) < self.seeds.count(",") + 1:
            raise UserError(f"--seeds {self.seeds}: give different numbers, as 1337,1,2")
        self.numbers = [int(seed) for seed in numbers]
        self.on = pick_device(self.device)
        cores = os.cpu_count() or 1
        self.jobs = self.jobs or (1 if self.quick or self.on.type != "cpu" else cores)
        self.threads = max(1, cores // self.jobs)
        if self.quick:
            self.out_dir, self.numbers = self.out_dir / "quick", self.numbers[:1]
        self.out_dir.mkdir(parents=True, exist_ok=True)
        ensure_prepared(self.data_dir)

    def grid(self, kinds: dict[str, Flags], **more: Iterable) -> list[Flags]:
        """All combinations of kinds and of the values of other flags. What is the default for such
        a run is not named, so that it belongs to all questions that want it."""
        values = itertools.product(kinds.values(), *more.values())
        combined = [{**kind, **dict(zip(more, rest, strict=True))} for kind, *rest in values]
        for flags in combined:
            tried = {name: flags.pop(name) for name in TRIED if name in flags}
            default = resolve_settings(**self.full(flags)).flat()
            flags |= {name: value for name, value in tried.items() if value != default[name]}
        return combined

    def full(self, flags: Flags) -> Flags:
        """All flags of a run: those of every run, and small ones where all should be quick. A model
        that goes on with another keeps its shape."""
        shape = ("n_layer", "n_head", "n_embd") if "init_from" in flags else ()
        small = {k: v for k, v in QUICK.items() if self.quick and k not in shape}
        return {"data_dir": str(self.data_dir), "device": self.device, **flags, **small}

    def few(self, values: tuple) -> tuple:
        """Values to try; where all should be quick, the middle one."""
        return values[len(values) // 2 :][:1] if self.quick else values

    def folder(self, flags: Flags) -> Path:
        """Where a run with these flags is, on --data_dir if they do not say otherwise: one that
        goes on with the model of another, in that one's folder."""
        data = Path(flags.get("data_dir", self.data_dir)).name
        named = (f"{k}={v}" for k, v in sorted(flags.items()) if k not in ("data_dir", "init_from"))
        origin = flags.get("init_from")
        above = Path(origin).parent if origin else self.out_dir / "runs"
        return above / ",".join([data, *named])

    def trained(self, runs: list[Flags]) -> list[Path]:
        """Their folders, once all are trained: those that are not yet, `jobs` at a time. A run
        whose loss is no number any more has come to its end, too."""
        every = {self.folder(flags): self.full(flags) for flags in runs}
        todo = {folder: flags for folder, flags in every.items() if not finished(folder, flags)}
        jobs = [
            (dict(resume=True) if (folder / "ckpt.pt").exists() else flags) | {"out_dir": folder}
            for folder, flags in todo.items()
        ]
        if self.jobs == 1:
            for job in tqdm(jobs, "training", unit="run", disable=not jobs):
                in_this_process(job)
        elif jobs:
            in_processes(jobs, self.jobs, self.threads)
        return [self.folder(flags) for flags in runs]

    def groups(self, kinds: dict[str, Flags], **more: Iterable) -> dict[str, list[Path]]:
        """The folders of each kind's runs, of all seeds if nothing else is said; what is missing is
        trained for all kinds at once."""
        grids = {name: self.grid({name: kind}, **more or dict(seed=self.numbers))
                 for name, kind in kinds.items()}  # fmt: skip
        folders = iter(self.trained(list(itertools.chain(*grids.values()))))
        return {name: list(itertools.islice(folders, len(grid))) for name, grid in grids.items()}

    def keep(self, name: str) -> "JsonCache":
        return JsonCache(self.out_dir / f"{name}.json")

    def picture(self, name: str, figure: plt.Figure) -> None:
        path = self.out_dir / f"{name}.png"
        save_figure(figure, path)
        print(f"\nwrote {path}")


def ensure_prepared(folder: Path) -> None:
    """Prepare the corpus that a folder is named after, if it is not there and needs no network."""
    if (folder / "meta.json").exists():
        return
    settings = prepare.Settings(dataset=folder.name, out_dir=folder)
    if folder.name == "moby-dick":
        prepare.prepare_files(settings, [prepare.MOBY_DICK], "text")
    elif folder.name == "countries":
        prepare.prepare_corpus(settings)


def finished(folder: Path, flags: Flags) -> bool:
    """Whether a run has come to its end, of which loss.png is the last thing, or to a loss that is
    no number. UserError: it is another one, trained on other data of that name, or when the
    defaults were others."""
    try:
        records = read_run(folder)
    except (OSError, UserError):
        return diverged(folder)
    run = records["run"][-1]
    if run.get("data") != [read_meta(Path(flags["data_dir"]))]:
        raise UserError(
            f"{folder} was trained on another {flags['data_dir']}: choose another --out_dir"
        )
    before, now = Settings.of(run["args"]).flat(), resolve_settings(**flags).flat()
    for name, value in now.items():
        if name not in (*RESUMABLE_FLAGS, "init_from", "vocab_size") and value != before[name]:
            raise UserError(
                f"{folder} was trained with --{name} {before[name]}, which would be {value} "
                "today: delete it, or choose another --out_dir"
            )
    last = records["eval"][-1]["step"] == run["args"]["max_iters"]
    return (last and (folder / "loss.png").exists()) or diverged(folder)


def diverged(folder: Path) -> bool:
    """Whether a run ended as its loss was no number any more."""
    return (folder / "failed.txt").exists()


def in_this_process(flags: Flags) -> None:
    """`python train.py` with these flags, what it prints in the log.txt of its folder."""
    folder = flags["out_dir"]
    folder.mkdir(parents=True, exist_ok=True)
    log = open(folder / "log.txt", "a", encoding="utf-8")  # noqa: SIM115
    with log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        try:
            train(resolve_settings(**flags))
        except UserError as error:
            note_failure(folder, str(error))


def in_processes(jobs: list[Flags], at_once: int, threads: int) -> None:
    """The same, so many at once, each a process with so many threads. Where one fails, or Ctrl-C
    comes, the others save what they have and end."""
    running, stopped = set(), threading.Event()
    train_py = Path(__file__).parent.parent / "train.py"

    def one(flags: Flags) -> None:
        folder = flags["out_dir"]
        folder.mkdir(parents=True, exist_ok=True)
        given = [f"--{k}" if v is True else f"--{k}={v}" for k, v in flags.items()]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        with open(folder / "log.txt", "a", encoding="utf-8") as log:
            options = dict(stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
            # A session of its own: Ctrl-C reaches it once, from here, not from the terminal, too.
            options["start_new_session"] = True
            process = subprocess.Popen([sys.executable, train_py, *given], **options)
            running.add(process)
            if stopped.is_set():  # it began too late to be among those that were told
                process.terminate()
            code = process.wait()
            running.discard(process)
        if code:
            note_failure(folder, (folder / "log.txt").read_text(encoding="utf-8").splitlines()[-1])

    with ThreadPoolExecutor(at_once) as pool:
        try:
            done = [pool.submit(one, job) for job in jobs]
            for each in tqdm(as_completed(done), "training", len(done), unit="run"):
                each.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.terminate()
            raise


def note_failure(folder: Path, error: str) -> None:
    """That the loss became infinite is a finding, which the folder keeps. All else: UserError."""
    if "loss became" not in error:
        raise UserError(f"{folder}: {error.removeprefix('error: ')}")
    (folder / "failed.txt").write_text(f"{error}\n", encoding="utf-8")


class JsonCache:
    """Figures that take long to find, by name, in a JSON file: found once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.figures = json.loads(path.read_bytes()) if path.exists() else {}
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path} is damaged ({error}): delete it") from None

    def __call__(self, name: str, find: Callable[[], Any]) -> Any:
        if name not in self.figures:
            self.figures[name] = find()
            with atomic(self.path) as temporary:
                temporary.write_text(json.dumps(self.figures, indent=1) + "\n", encoding="utf-8")
        return self.figures[name]


def spread(form: str, figures: Iterable[float | None]) -> str:
    """A figure of some runs: mean ± standard deviation; one run's own, nothing if none has it."""
    found = [figure for figure in figures if isinstance(figure, float)]
    if len(found) < 2:
        return "".join(format(figure, form) for figure in found)
    return f"{np.mean(found):{form}} ± {np.std(found, ddof=1):{form}}"
