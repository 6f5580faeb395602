"""What a run leaves in its folder beside the checkpoint: metrics, a picture, earlier runs."""

import contextlib
import itertools
import json
import os
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # files only; must come before pyplot
from matplotlib import pyplot as plt

from common import UserError, atomic
from text.tokenizer import check_form
from training.checkpoints import snapshots

# What the records of each type must have, as far as it is shown.
ARGS = dict(ffn=str, batch_size=int, block_size=int)
RECORDS = {
    "run": dict(args=ARGS, sizes=dict(total=int, active=int)),
    "step": dict(step=int, train_loss=float, tok_per_s=float),
    "eval": dict(step=int, val_loss=float),
    "recall": dict(recall=float),
    "edits": dict(recall=float, success=float),  # a file of its own
}


def put_aside(out_dir: Path) -> Path:
    """Move the files of an earlier run into the first free folder run1, run2, ... beside them."""
    folders = (out_dir / f"run{number}" for number in itertools.count(1))
    folder = next(folder for folder in folders if not folder.exists())
    folder.mkdir()
    tables = [path.name for path in snapshots(out_dir)]
    for name in ("ckpt.pt", "best.pt", "metrics.jsonl", "loss.png", "edit_report.json", *tables):
        if (out_dir / name).exists():
            os.replace(out_dir / name, folder / name)
    return folder


class Log:
    """metrics.jsonl: a line for the run, one for each step, one for each evaluation."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """A resumed run keeps the lines up to `resume_step`, at which it evaluates anew."""
        self.path, kept = path, []
        if resume_step and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                with contextlib.suppress(ValueError, KeyError, TypeError):  # cut off by a crash
                    record = json.loads(line)
                    last = resume_step if record["type"] == "step" else resume_step - 1
                    if record.get("step", 0) <= last:
                        kept.append(line)
        with atomic(path) as temporary:
            temporary.write_text("".join(kept), encoding="utf-8")

    def write(self, **record) -> None:
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None


def read_run(folder: Path) -> dict[str, list[dict]]:
    """The records of a run's metrics.jsonl by type, and as `edits` what its edit_report.json says,
    if there is one. UserError: a file is damaged."""
    path = folder / "metrics.jsonl"
    records: dict[str, list[dict]] = {kind: [] for kind in RECORDS}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            check_form(record, dict(type=str), "record")
            check_form(record, RECORDS[record["type"]], record["type"])
            records[record["type"]].append(record)
        if (report := folder / "edit_report.json").exists():
            path, record = report, json.loads(report.read_text(encoding="utf-8"))
            check_form(record, RECORDS["edits"], "edits")
            records["edits"].append(record)
    except (ValueError, KeyError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}): leave it out") from None
    if not all(records[kind] for kind in ("run", "step", "eval")):
        raise UserError(f"{path} has no run with a step and an evaluation in it")
    return records


def grouped(folders: list[Path]) -> list[tuple[str, list[dict]]]:
    """The records of runs, those together whose settings differ in nothing but the seed, after the
    name of the first one's folder, of several without its number."""
    groups: dict[str, list[tuple[str, dict]]] = {}
    for folder in folders:
        records = read_run(folder)
        same = {**records["run"][0]["args"], "seed": None, "out_dir": None}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append((folder.name, records))
    result = []
    for group in groups.values():
        names, runs = zip(*group, strict=True)
        shared = names[0].rstrip("0123456789").rstrip("-_.") if len(names) > 1 else ""
        result.append((shared or names[0], list(runs)))
    return result


def plot(folders: list[Path], out: Path) -> None:
    """Draw the training loss (thin) and validation loss (thick) of runs over their tokens, or over
    their steps, if one of them read conversations, which are not equally long. A group of runs is
    the mean of their losses, with a band from the lowest to the highest validation loss."""
    groups = grouped(folders)
    stages = [runs[0]["run"][0]["args"].get("stage") for _, runs in groups]
    by_step = "sft" in stages or "dpo" in stages
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for number, (name, runs) in enumerate(groups):
        args = runs[0]["run"][0]["args"]
        unit = 1 if by_step else args["batch_size"] * args["block_size"] / 1e6
        named = name if name == args["ffn"] else f"{name}: {args['ffn']}"
        label = named.encode(errors="replace").decode()  # a name may be bytes that are no text
        thin, thick = dict(alpha=0.3, linewidth=0.8), dict(marker=".", label=label)
        for kind, loss, look in (("step", "train_loss", thin), ("eval", "val_loss", thick)):
            losses = [{record["step"]: record[loss] for record in run[kind]} for run in runs]
            steps = sorted(set.intersection(*map(set, losses)))  # a run may have stopped earlier
            points = np.array([[each[step] for step in steps] for each in losses])  # [runs, steps]
            x = [step * unit for step in steps]
            axes.plot(x, points.mean(0), color=f"C{number}", **look)
            if kind == "eval" and len(runs) > 1:
                axes.fill_between(x, points.min(0), points.max(0), color=f"C{number}", alpha=0.2)
    axes.set_xlabel("steps" if by_step else "million tokens")
    what = "pair" if "dpo" in stages else "token"
    axes.set_ylabel(f"loss (nats per {what}); thin: training, thick: validation")
    axes.set_yscale("log")  # the first steps fall by as much as all others
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    for text in axes.legend().get_texts():
        text.set_parse_math(False)  # a $ in a name is no formula
    with atomic(out) as temporary:
        figure.savefig(temporary, dpi=130, format=out.suffix.lstrip("."))
    plt.close(figure)
