"""What a run leaves in its folder beside the checkpoint: metrics, a picture, earlier runs."""

import itertools
import json
import os
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # files only; must come before pyplot
from matplotlib import pyplot as plt

from common import UserError, atomic, reading, writing

# The types of records, and what they are read for.
RECORDS = {
    "run": {"args", "sizes"},
    "step": {"step", "train_loss", "tok_per_s"},
    "eval": {"step", "val_loss"},
    "recall": {"recall"},
}


def markdown(rows: list[dict[str, str]]) -> str:
    """A Markdown table of rows with the same titles, without columns in which nothing stands."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    cells = [titles, *([row[title] for title in titles] for row in rows)]
    head, *lines = (f"| {' | '.join(line)} |" for line in cells)
    return "\n".join([head, "|---" * len(titles) + "|", *lines])


def archive_previous_run(out_dir: Path) -> Path:
    """Move the files of an earlier run into a folder run1, run2, ... beside them, ckpt.pt last: a
    folder without it is where the next call goes on if this one is killed."""
    folders = (out_dir / f"run{number}" for number in itertools.count(1))
    folder = next(folder for folder in folders if not (folder / "ckpt.pt").exists())
    folder.mkdir(exist_ok=True)
    names = ["best.pt", "metrics.jsonl", "loss.png", "edit_report.json"]
    for name in [*names, "ckpt.tables", "ckpt.pt"]:
        if (out_dir / name).exists():
            os.replace(out_dir / name, folder / name)
    return folder


def read_metrics(path: Path) -> list[dict]:
    """The records of a metrics.jsonl, without a last line that a crash has cut off. UserError:
    another line is damaged."""
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        with reading(f"{path}, line {number},", "delete it"):
            record = json.loads(line)
            if missing := RECORDS[record["type"]] - record.keys():
                raise ValueError(f"without {', '.join(missing)}")
            records.append(record)
    return records


def read_run(folder: Path) -> dict[str, list[dict]]:
    """The records of a run by type, `edits` being its edit_report.json if there is one. UserError:
    a line is damaged, or nothing was trained."""
    records: dict[str, list[dict]] = {kind: [] for kind in (*RECORDS, "edits")}
    for record in read_metrics(folder / "metrics.jsonl"):
        records[record["type"]].append(record)
    if (report := folder / "edit_report.json").exists():
        with reading(report, "delete it"):
            records["edits"].append({"success": float(json.loads(report.read_bytes())["success"])})
    if not records["eval"]:
        raise UserError(f"{folder}/metrics.jsonl has no evaluation in it")
    return records


class Log:
    """metrics.jsonl: a line for the run, one for each step, one for each evaluation."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """A run that resumes keeps the lines up to `resume_step`, where it evaluates again."""
        self.path = path
        records = read_metrics(path) if resume_step and path.exists() else []
        kept = [r for r in records if r.get("step", 0) < resume_step + (r["type"] == "step")]
        with atomic(path) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))

    def write(self, **record) -> None:
        with writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def grouped(folders: list[Path]) -> list[tuple[str, list[dict]]]:
    """The records of runs, those together whose settings differ in nothing but the seed, after the
    name of the first one's folder."""
    groups: dict[str, dict[Path, dict]] = {}
    for folder in folders:
        records = read_run(folder)
        same = {**records["run"][0]["args"], "seed": None, "out_dir": None}
        groups.setdefault(json.dumps(same, sort_keys=True), {})[folder] = records
    return [(next(iter(group)).name, list(group.values())) for group in groups.values()]


def losses_of(runs: list[dict], kind: str, loss: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps [n] of which all runs have a record of this kind (one may have stopped earlier),
    and their losses there [runs, n]."""
    every = [{record["step"]: record[loss] for record in run[kind]} for run in runs]
    steps = sorted(set.intersection(*map(set, every)))
    return np.array(steps), np.array([[each[step] for step in steps] for each in every])


def mean_and_band(axes: plt.Axes, x: np.ndarray, ys: np.ndarray, **look) -> None:
    """Draw the mean of curves `ys` [runs, n] over `x` [n], with a band from lowest to highest."""
    (line,) = axes.plot(x, ys.mean(0), **look)
    if len(ys) > 1:
        axes.fill_between(x, ys.min(0), ys.max(0), color=line.get_color(), alpha=0.2, linewidth=0)


def plot(folders: list[Path], out: Path) -> None:
    """Draw the training loss (thin) and validation loss (thick) of groups of runs over their
    tokens, all rows counted as full."""
    (figure, axes), top = plt.subplots(figsize=(7, 4.2), layout="constrained"), 0.0
    for number, (name, runs) in enumerate(grouped(folders)):
        args, look = runs[0]["run"][0]["args"], dict(color=f"C{number}")
        a_step = args["batch_size"] * args["block_size"] * (2 if args["stage"] == "dpo" else 1)
        steps, losses = losses_of(runs, "step", "train_loss")
        axes.plot(steps * a_step / 1e6, losses.mean(0), alpha=0.3, linewidth=0.8, **look)
        steps, losses = losses_of(runs, "eval", "val_loss")
        look |= dict(marker=".", label=f"{name}: {args['ffn']}".replace("$", r"\$"))  # no formula
        mean_and_band(axes, steps * a_step / 1e6, losses, **look)
        top = np.nanmax([top, *losses[:, 1:].flat])
    # Without what a random model has: it would flatten all that comes after.
    axes.margins(y=0.01)
    axes.set_ylim(top=1.05 * top if 0 < top < np.inf else None)
    axes.set(xlabel="million tokens", ylabel="loss (nats); thin: training")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, out)


def check_picture(path: Path | None) -> None:
    """UserError: --plot names no file of a kind that can be drawn."""
    if path and path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {path}: name a .png, .svg or .pdf file")


def save_figure(figure: plt.Figure, path: Path) -> None:
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=130, format=path.suffix.lstrip("."))
    plt.close(figure)


def draw_loss(metrics: Path, out: Path) -> None:
    plot([metrics.parent], out)
