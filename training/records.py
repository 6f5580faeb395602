"""What a run leaves in its folder beside the checkpoint: metrics and a picture.

metrics.jsonl holds one JSON object a line. JSON cannot express numbers that are not finite: they
are written as null, and read as NaN.

    {"type": "run", "args": {...}, "sizes": {...}, "data": [...]}       at each start, and resume
    {"type": "step", "step": 1, "train_loss": 8.4, "grad_norm": 2.1, "lr": 3e-5, "tok_per_s": 6800}
    {"type": "eval", "step": 250, "val_loss": 1.2, "val_loss_per_byte": 0.28}
    {"type": "recall", "step": 1000, "recall": 0.99}                    of all questions, at the end

On the countries, an evaluation has `recall`, too, of 64 of the questions, and `answer_nats`, see
`corpora.recall.quick_recall`. Records of other types are a reader's own. They stay when a run
resumes, but for those whose `step` is later.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from common import UserError, atomic, parse_json, progress, reading, require_fields, writing
from training import ranks

# What readers need of a record, by its type.
FIELDS = {
    "run": dict(
        args=dict(ffn=str, stem_layers=str, learning_rate=float, batch_size=int, block_size=int),
        sizes=dict(total=int, active=int, flops_per_token=float),
        data=list,
        relatives=dict[str, str] | None,
    ),
    "step": dict(step=int, train_loss=float, grad_norm=float, tok_per_s=float),
    "eval": dict(step=int, val_loss=float),
    "recall": dict(recall=float),
}


class Log:
    """Writes metrics.jsonl on rank 0. The record of the `run` comes first, but is written only with
    the next one: a run that fails before its first evaluation replaces no file. A run that resumes
    keeps the lines up to its step, and adds to them."""

    def __init__(self, path: Path, resume_step: int, **run) -> None:
        """UserError: an earlier line is damaged."""
        self.path = path
        # Lines that are yet to be written; not records, which take four times the memory.
        self.pending: list[str] = []
        self.evaluated: int | None = None  # the last step of which they have an evaluation
        if resume_step and path.exists():
            for record in read_metrics(path):
                # What is asked at the end of a run is asked again.
                if (record.get("step") or 0) <= resume_step and record["type"] != "recall":
                    self.pending.append(to_line(record))
                    if record["type"] == "eval":
                        self.evaluated = record["step"]
        # Runs of which nothing is left.
        while self.pending and from_line(self.pending[-1])["type"] == "run":
            self.pending.pop()
        self.pending.append(to_line({"type": "run", **run}))
        if ranks.rank:  # rank 0 writes
            self.pending = []

    def write(self, **record) -> None:
        if ranks.rank == 0:
            if self.pending:
                with atomic(self.path) as temporary:
                    temporary.write_text("".join(self.pending), encoding="utf-8")
                self.pending = []
            with writing(self.path), open(self.path, "a", encoding="utf-8") as file:
                file.write(to_line(record))


class Meter:
    """The figures of training steps. They are read and logged READ_EVERY steps at a time, as to
    read them the host waits for the device."""

    READ_EVERY = 10

    def __init__(self, log: Log, check: Callable[[float, int], None]) -> None:
        """check: called with the loss of each step and its number, ends a run that is lost."""
        self.log = log
        self.check = check
        self.latest: dict[str, float] = {}  # figures of the last step that was read
        # Numbers of steps, the first of which began at `started`, and their figures.
        self.waiting: list[tuple[int, dict[str, Tensor | float]]] = []

    def start(self, n_token: int) -> None:
        """A step of `n_token` tokens begins."""
        if not self.waiting:
            self.started = time.perf_counter()
            self.n_token = 0
        self.n_token += n_token

    def end(self, step: int, **figures: Tensor | float) -> None:
        """Step number `step` has ended."""
        self.waiting.append((step, figures))
        if len(self.waiting) == self.READ_EVERY:
            self.read()

    def read(self) -> None:
        """Log all steps so far."""
        if not self.waiting:
            return
        for _, figures in self.waiting:
            for name, value in figures.items():
                figures[name] = float(value)  # of a tensor, the host waits
        tok_per_s = self.n_token / (time.perf_counter() - self.started)
        for step, figures in self.waiting:
            self.latest = {**figures, "tok_per_s": tok_per_s}
            self.log.write(type="step", step=step, **self.latest)
            self.check(figures["train_loss"], step)
        self.waiting = []


def to_line(record: dict[str, Any]) -> str:
    finite = dict(record)
    for name, value in record.items():
        if isinstance(value, float) and not math.isfinite(value):
            finite[name] = None
    return json.dumps(finite, allow_nan=False) + "\n"


def from_line(line: str | bytes) -> dict[str, Any]:
    """Parse a line. Raises Damage if it is no record."""
    record = parse_json(line, type=str)
    if record["type"] not in FIELDS:  # a reader's own
        require_fields(record, step=int | None)
        return record
    record = {name: math.nan if value is None else value for name, value in record.items()}
    # All that is not named above is a figure, too.
    types = dict.fromkeys(record, float) | FIELDS[record["type"]]
    require_fields(record, **types | {"type": str})
    return record


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl, of which there may be millions, without a last line
    that a crash has cut off. UserError: another line is damaged."""
    with reading(path, "name the output folder of a run"), open(path, "rb") as file:
        bar = progress(file, f"reading {path}")
        for number, line in enumerate(bar, 1):
            if line.endswith(b"\n"):
                with reading(f"{path}, line {number},", "delete the line"):
                    record = from_line(line[:-1])
                yield record


def read_run(folder: Path) -> dict[str, list[dict]]:
    """The records of a run by type. UserError: a line is damaged, or nothing was trained."""
    run: dict[str, list[dict]] = {name: [] for name in FIELDS}
    for record in read_metrics(folder / "metrics.jsonl"):
        run.setdefault(record["type"], []).append(record)
    if not run["run"] or not run["eval"]:
        raise UserError(f"{folder}/metrics.jsonl has no evaluation in it")
    return run


def draw_loss(folder: Path) -> None:
    """Draw a run's losses over its steps and, where it was asked for facts, the share it knows, as
    loss.png."""
    from matplotlib.figure import Figure

    run = read_run(folder)
    figure = Figure(figsize=(7, 4.2))
    axes = figure.subplots()
    steps, losses = curve(run["step"], "train_loss")
    axes.plot(steps, losses, label="training", alpha=0.3, linewidth=0.8)
    steps, losses = curve(run["eval"], "val_loss")
    axes.plot(steps, losses, marker=".", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats)")  # of a token, or a pair
    # Without the loss of a random model: it would flatten all that comes after.
    later = [loss for loss in losses[1:] if math.isfinite(loss)]
    if later:
        axes.set_ylim(0.9 * min(later), 1.05 * max(later))
    steps, recalls = curve(run["eval"], "recall")
    if recalls:
        right = axes.twinx()
        percent = [100 * recall for recall in recalls]
        right.plot(steps, percent, marker=".", color="C2", label="facts recalled")
        right.set(ylabel="held-out questions answered (%)", ylim=(0, 102))
    figure.legend(loc="upper center", ncols=3)
    with atomic(folder / "loss.png") as temporary:
        figure.savefig(temporary, dpi=130, format="png")


def curve(records: list[dict], name: str) -> tuple[list, list]:
    """Steps and values of a figure, in the records that have it."""
    found = [record for record in records if name in record]
    return [record["step"] for record in found], [record[name] for record in found]
