"""What a run leaves in its folder beside the checkpoint: metrics, a picture, earlier runs."""

import itertools
import json
import os
import shutil
import sys
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


def markdown(rows: list[dict[str, str]]) -> str:
    """A Markdown table of rows with the same titles, without columns in which nothing stands."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    cells = [titles, *([row[title] for title in titles] for row in rows)]
    head, *lines = (f"| {' | '.join(line)} |" for line in cells)
    return "\n".join([head, "|---" * len(titles) + "|", *lines])


def archive_previous_run(out_dir: Path) -> Path:
    """Move the files of an earlier run into the first free folder run1, run2, ... beside them. They
    are linked into one that gets its name when all are there: whenever a kill comes, the run is
    whole, at the old place or at the new one. UserError: there is no room."""
    tables = [path.name for path in snapshots(out_dir)]
    names = ["ckpt.pt", "best.pt", "metrics.jsonl", "loss.png", "edit_report.json", *tables]
    names = [name for name in names if (out_dir / name).exists()]
    folders = (out_dir / f"run{number}" for number in itertools.count(1))
    folder = next(folder for folder in folders if not folder.exists())
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        temporary.mkdir()
        for name in names:
            if (out_dir / name).is_dir():
                shutil.copytree(out_dir / name, temporary / name, copy_function=link)
            else:
                link(out_dir / name, temporary / name)
        os.rename(temporary, folder)
        for name in names:  # ckpt.pt first: without it, nobody looks for the others
            path = out_dir / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from None
    return folder


def link(origin: Path, path: Path) -> None:
    try:
        os.link(origin, path)
    except OSError:  # a file system without links
        shutil.copy2(origin, path)


class Log:
    """metrics.jsonl: a line for the run, one for each step, one for each evaluation."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """A resumed run keeps the lines up to `resume_step`, at which it evaluates anew, and says
        how many others it cannot read."""
        self.path, kept, bad = path, [], 0
        try:
            lines = path.read_bytes().splitlines() if resume_step else []
        except OSError as error:
            lines = []
            print(f"note: {path} begins anew ({error.strerror})", file=sys.stderr)
        for line in lines:
            try:
                record = parse(line)
                last = resume_step if record["type"] == "step" else resume_step - 1
                if record.get("step", 0) <= last:
                    kept.append(line + b"\n")
            except (ValueError, KeyError, TypeError, RecursionError):  # cut off by a crash
                bad += 1
        if bad:
            said = f"note: {bad} of {len(lines)} lines of {path} were damaged and are left out"
            print(said, file=sys.stderr)
        with atomic(path) as temporary:
            temporary.write_bytes(b"".join(kept))

    def write(self, **record) -> None:
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None


def parse(line: bytes) -> dict:
    """A record of metrics.jsonl. ValueError, KeyError, RecursionError: it is none."""
    record = json.loads(line.decode())
    check_form(record, dict(type=str), "record")
    check_form(record, RECORDS[record["type"]], record["type"])
    return record


def read_run(folder: Path) -> dict[str, list[dict]]:
    """The records of a run's metrics.jsonl by type, and as `edits` what its edit_report.json says,
    if there is one. UserError: a file is damaged."""
    path = folder / "metrics.jsonl"
    records: dict[str, list[dict]] = {kind: [] for kind in RECORDS}
    try:
        for line in path.read_bytes().splitlines():
            record = parse(line)
            records[record["type"]].append(record)
        if (report := folder / "edit_report.json").exists():
            path, record = report, json.loads(report.read_bytes())
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


def losses_of(runs: list[dict], kind: str, loss: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps [n] of which all runs have a record of this kind (one may have stopped earlier),
    and their losses there [runs, n]."""
    every = [{record["step"]: record[loss] for record in run[kind]} for run in runs]
    steps = sorted(set.intersection(*map(set, every)))
    return np.array(steps), np.array([[each[step] for step in steps] for each in every])


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
        label = "\n".join(label[i : i + 64] for i in range(0, len(label), 64))
        thin, thick = dict(alpha=0.3, linewidth=0.8), dict(marker=".", label=label)
        for kind, loss, look in (("step", "train_loss", thin), ("eval", "val_loss", thick)):
            steps, points = losses_of(runs, kind, loss)
            axes.plot(steps * unit, points.mean(0), color=f"C{number}", **look)
            if kind == "eval" and len(runs) > 1:
                band = points.min(0), points.max(0)
                axes.fill_between(steps * unit, *band, color=f"C{number}", alpha=0.2)
    axes.set_xlabel("steps" if by_step else "million tokens")
    what = "pair" if "dpo" in stages else "token"
    axes.set_ylabel(f"loss (nats per {what}); thin: training, thick: validation")
    axes.set_yscale("log")  # the first steps fall by as much as all others
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    for text in axes.legend().get_texts():
        text.set_parse_math(False)  # a $ in a name is no formula
    save_figure(figure, out)


def check_picture(path: Path | None) -> None:
    """UserError: --plot names no file of a kind that can be drawn."""
    if path and path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {path}: name a .png, .svg or .pdf file")


def save_figure(figure: plt.Figure, path: Path) -> None:
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=130, format=path.suffix.lstrip("."))
    plt.close(figure)
