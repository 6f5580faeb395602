"""Runs of train.py side by side: a table, runs that differ in the seed alone in one row, and a
picture of their losses."""

import json
import statistics
from pathlib import Path

import numpy as np

from analysis.experiment import Run
from analysis.pictures import (
    check_picture,
    losses_of,
    markdown,
    mean_and_band,
    plt,
    save_figure,
    spread,
)
from analysis.stability import spike_rate
from training.records import read_run

# Settings that may differ among the runs of a row.
NOT_COMPARED = ("seed", "out_dir", "resume", "verify")


def last_start(run: Run) -> dict:
    """The args, sizes and data of a run: a resume may have changed them, as --max_iters."""
    return run["run"][-1]


def runs(folders: list[Path], out: Path) -> None:
    """Print a table of runs that exist, and draw their losses."""
    check_picture(out)
    groups = grouped(folders)
    print(markdown([row(name, group) for name, group in groups.items()]))
    texts = set()
    for group in groups.values():
        texts.update(json.dumps(last_start(run)["data"]) for run in group)
    if len(texts) > 1:
        print("\nnote: not all have the same text and tokenizer, so losses are of different tokens")
    draw(groups, out)
    print(f"\nwrote {out}")


def grouped(folders: list[Path]) -> dict[str, list[Run]]:
    """The records of runs, those together whose settings differ in nothing but the seed, by the
    name of the first one's folder."""
    groups: dict[str, list[Run]] = {}
    names: dict[str, str] = {}  # of groups, by their settings
    for folder in dict.fromkeys(folders):
        run = read_run(folder)
        args = dict(last_start(run)["args"])
        for name in NOT_COMPARED:
            args.pop(name, None)
        settings = json.dumps(args, sort_keys=True)
        if settings not in names:
            names[settings] = str(folder) if folder.name in groups else folder.name
        groups.setdefault(names[settings], []).append(run)
    return groups


def row(name: str, group: list[Run]) -> dict[str, str]:
    """What came out of runs that differ in the seed alone: the cells of a table by title."""
    start = last_start(group[0])
    args = start["args"]
    sizes = start["sizes"]
    last = [run["eval"][-1] for run in group]
    recalls = [run["recall"][-1]["recall"] for run in group if run["recall"]]
    edits = [report["success"] for run in group for report in run["edits"]]
    speeds = []
    for run in group:
        if run["step"]:
            speeds.append(statistics.median(step["tok_per_s"] for step in run["step"]))
    kind = args["ffn"]
    if kind == "stem":
        kind = f"stem, {args['stem_layers']}"
    return {
        "run": name,
        "runs": str(len(group)) if len(group) > 1 else "",
        "FFN": kind,
        "learning rate": f"{args['learning_rate']:g}",
        "steps": f"{args['max_iters']:,}",
        "MFLOP a token": f"{sizes['flops_per_token'] / 1e6:.2f}",
        "val loss": spread(".3f", [record["val_loss"] for record in last]),
        "per byte": spread(".3f", [record.get("val_loss_per_byte") for record in last]),
        "capitals recalled": spread(".1%", recalls),
        "edits that succeed": spread(".1%", edits),
        "spikes in 1,000 steps": spread(".1f", [spike_rate(run) for run in group]),
        "parameters": f"{sizes['total'] / 1e6:.2f} M",
        "active": f"{sizes['active'] / 1e6:.2f} M",
        "tok/s": spread(",.0f", speeds),
    }


def draw(groups: dict[str, list[Run]], out: Path) -> None:
    """Draw the training loss (thin) and validation loss (thick) of groups of runs."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    highest = 0.0
    for number, (name, group) in enumerate(groups.items()):
        color = f"C{number}"
        steps, losses = losses_of(group, "step", "train_loss")
        x = million_tokens(group[0], steps)
        axes.plot(x, losses.mean(0), color=color, alpha=0.3, linewidth=0.8)
        label = f"{name}: {last_start(group[0])['args']['ffn']}"
        losses = draw_validation(axes, group, color=color, label=label.replace("$", r"\$"))
        highest = np.nanmax([highest, *losses[:, 1:].flat])
    axes.margins(y=0.01)
    if 0 < highest < np.inf:
        # Without the loss of a random model: it would flatten all that comes after.
        axes.set_ylim(top=1.05 * highest)
    axes.set(xlabel="million tokens", ylabel="loss (nats); thin: training")
    axes.legend()
    save_figure(figure, out)


def draw_validation(axes: plt.Axes, group: list[Run], first: int = 0, **look) -> np.ndarray:
    """Draw the validation losses of runs from an evaluation on. Returns all of them [runs, n]."""
    steps, losses = losses_of(group, "eval", "val_loss")
    x = million_tokens(group[0], steps)
    mean_and_band(axes, x[first:], losses[:, first:], marker=".", **look)
    return losses


def million_tokens(run: Run, steps: np.ndarray) -> np.ndarray:
    """The tokens of the first steps of a run, all rows counted as full."""
    args = last_start(run)["args"]
    return steps * args["batch_size"] * args["block_size"] / 1e6
