"""Runs of train.py side by side: those that exist, and those that a question wants.

**kinds.** Better at equal tokens, and at equal FLOPs? STEM (which the paper compares with a dense
model and with hash layers), Embformer and the layers of `baselines.py`, each at the learning rate
with the lowest validation loss of one seed, then with all seeds. A kind whose tokens cost less than
the dense model's gets more of them, until as much was computed.

**settings.** Which initialisation and learning rate suit a kind: two initialisations at several
rates with one seed, and the best rate of each with all. Where there are facts, then what tables are
trained with: rows that begin large, attention inside documents, AdamW over whole tables. The edits
that succeed decide, too: where facts settle in dense weights, swapping rows does not move them.

**stability.** The paper's claim: no loss spikes, where fine-grained mixtures of experts have some.
Steps whose loss stands out (`spikes`) and the norm of gradients, at rising learning rates.
"""

import itertools
import statistics
from functools import partial
from math import inf
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view as windows

from analysis.edit_success import report_pairs
from analysis.experiment import BASELINES, STEM, Experiment, Flags, diverged, spread
from edit import MeanRows
from training.batches import read_meta
from training.checkpoints import load_model
from training.records import check_picture, grouped, losses_of, markdown, plot, plt, read_run

RATES = (1.5e-3, 3e-3, 6e-3)
REACH = 10  # steps before and behind that a spike stands out of
INITS = (0.088, 0.02)  # 1 / sqrt(n_embd) of what is trained here, and GPT-2's
MAIN = ("dense", "STEM, third", "STEM, all", "Embformer")
Run = dict[str, list[dict]]  # the records of a run by type


def runs(folders: list[Path], out: Path) -> None:
    """Print a table of runs that exist, and draw their losses."""
    check_picture(out)
    print(markdown([row(name, group) for name, group in grouped(folders)]))
    plot(folders, out)
    print(f"\nwrote {out}")


def row(name: str, group: list[Run]) -> dict[str, str]:
    """What came out of runs that differ in the seed alone: the cells of a table by title."""
    last, sizes = [run["eval"][-1] for run in group], group[0]["run"][0]["sizes"]
    speeds = [statistics.median(step["tok_per_s"] for step in run["step"]) for run in group]
    edits = [report for run in group for report in run["edits"]]
    recalls = [record["recall"] for run in group for record in run["recall"][-1:]]
    return {
        "run": name,
        "runs": str(len(group)) if len(group) > 1 else "",
        "FFN": group[0]["run"][0]["args"]["ffn"],
        "val loss, last": spread(".3f", (record["val_loss"] for record in last)),
        "best": spread(".3f", map(best, group)),
        # none for preferences, whose loss is per pair
        "per byte": spread(".3f", (record.get("val_loss_per_byte") for record in last)),
        "capitals recalled": spread(".1%", recalls),
        "recall before edits": spread(".1%", (report["recall"] for report in edits)),
        "edits that succeed": spread(".1%", (report["success"] for report in edits)),
        "spikes in 1,000 steps": spread(".1f", map(spike_rate, map(losses, group))),
        "parameters": f"{sizes['total'] / 1e6:.2f} M",
        "active": f"{sizes['active'] / 1e6:.2f} M",
        "tok/s": spread(",.0f", speeds),
    }


def best(run: Run) -> float:
    """The lowest validation loss of a run."""
    return float(np.nanmin([record["val_loss"] for record in run["eval"]]))


def read(groups: dict[str, list[Path]]) -> dict[str, list[Run]]:
    return {name: [read_run(folder) for folder in folders] for name, folders in groups.items()}


def searched(experiment: Experiment, kinds: dict[str, Flags]) -> dict[str, Flags]:
    """The kinds, each with the learning rate at which it has its lowest validation loss with the
    first seed: of RATES, and of twice the highest and half the lowest while one of these is best.
    """
    seed, todo = experiment.numbers[:1], list(itertools.product(kinds, experiment.few(RATES)))
    losses: dict[str, dict[float, float]] = {name: {} for name in kinds}
    while todo:
        wanted = {(name, rate): {**kinds[name], "learning_rate": rate} for name, rate in todo}
        for (name, rate), [folder] in experiment.groups(wanted, seed=seed).items():
            losses[name][rate] = inf if diverged(folder) else best(read_run(folder))
        todo = [(name, rate) for name, tried in losses.items() for rate in beyond(tried)]
        todo = [] if experiment.quick else todo
    rates = sorted(set().union(*losses.values()))
    rows = [
        {"best val loss": name}
        | {f"{rate:g}": f"{tried[rate]:.3f}" if rate in tried else "" for rate in rates}
        for name, tried in losses.items()
    ]
    print(f"Learning rates, seed {seed[0]}:\n\n{markdown(rows)}\n")
    best_rate = {name: min(tried, key=tried.get) for name, tried in losses.items()}
    return {name: {**kind, "learning_rate": best_rate[name]} for name, kind in kinds.items()}


def beyond(losses: dict[float, float]) -> list[float]:
    """What to try next, given the loss at each learning rate tried: half the best if that is the
    lowest of them, twice the best if it is the highest, else nothing."""
    rate = min(losses, key=losses.get)
    return [rate / 2] * (rate == min(losses)) + [rate * 2] * (rate == max(losses))


def kinds(experiment: Experiment) -> None:
    at_best = searched(experiment, STEM | BASELINES)
    equal, longer, budget = read(experiment.groups(at_best)), {}, 0.0
    for name, (run, *_) in equal.items():
        first = run["run"][0]
        cost = first["sizes"]["flops_per_token"] * first["args"]["max_iters"]
        budget = budget or cost  # the first kind is the dense one
        if cost < 0.97 * budget:
            steps = round(first["args"]["max_iters"] * budget / cost)
            longer[name] = {**at_best[name], "max_iters": steps}
    more = read(experiment.groups(longer))

    for title, groups in (("tokens", equal), ("training FLOPs", {"dense": equal["dense"], **more})):
        rows = []
        for name, group in groups.items():
            cells = row(name, group)
            del cells["FFN"]
            cells["learning rate"] = f"{at_best[name]['learning_rate']:g}"
            args, sizes = group[0]["run"][0]["args"], group[0]["run"][0]["sizes"]
            cells["steps"] = f"{args['max_iters']:,}"
            cells["MFLOP a token"] = f"{sizes['flops_per_token'] / 1e6:.2f}"
            rows.append(cells)
        print(f"Equal {title}:\n\n{markdown(rows)}\n")

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for number, (name, group) in enumerate(equal.items()):
        look = dict(color=f"C{number}", label=name)
        curve(panels[0], group, "million tokens", **look)
        curve(panels[1], more.get(name, group), "training TFLOP", **look)
    panels[0].set_ylabel("validation loss (nats per token)")
    panels[1].set_ylim(panels[0].get_ylim())  # what overfits with more steps leaves the picture
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    experiment.picture("kinds", figure)


def curve(axes: plt.Axes, group: list[Run], unit: str, **look) -> None:
    """The mean validation loss of runs after their first step, with a band from the lowest to the
    highest."""
    first = group[0]["run"][0]
    args, sizes = first["args"], first["sizes"]
    step = args["batch_size"] * args["block_size"] / 1e6  # million tokens
    step *= 1 if unit == "million tokens" else 3 * sizes["flops_per_token"] / 1e6
    steps, losses = losses_of(group, "eval", "val_loss")
    x, losses = steps[steps > 0] * step, losses[:, steps > 0]
    axes.plot(x, losses.mean(0), marker=".", **look)
    axes.fill_between(x, losses.min(0), losses.max(0), color=look["color"], alpha=0.15)
    axes.set_xlabel(unit)
    axes.grid(alpha=0.3)


def settings(experiment: Experiment) -> None:
    every = {
        f"{name}, {std}": {**STEM[name], "init_std": std}
        for name, std in itertools.product(MAIN, INITS)
    }
    folders = experiment.groups(searched(experiment, every))
    groups = read(folders)
    print(f"How dense weights begin:\n\n{with_edits(experiment, folders, groups)}\n")
    if read_meta(experiment.data_dir)["corpus"] == "countries":  # facts, and edits that tell where
        third = STEM["STEM, third"]
        others = {"STEM, third": third} | {
            f"STEM, third, {' '.join(f'--{k} {v}' for k, v in flag.items())}": {**third, **flag}
            for flag in (dict(table_std=1.0), dict(doc_mask=True), dict(table_optimizer="adamw"))
        }
        folders = experiment.groups(others)
        table = with_edits(experiment, folders, read(folders))
        print(f"Tables, at the default learning rate:\n\n{table}")
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for number, (name, group) in enumerate(groups.items()):
        look = dict(color=f"C{number // 2}", linestyle="--" if "0.02" in name else "-")
        curve(axes, group, "million tokens", label=name, **look)
    axes.set_ylabel("validation loss (nats per token)")
    axes.legend()
    experiment.picture("settings", figure)


def with_edits(
    experiment: Experiment, folders: dict[str, list[Path]], groups: dict[str, list[Run]]
) -> str:
    """A table of runs, and of the edits that succeed in them."""
    kept, rows, most = experiment.keep("settings"), [], 32 if experiment.quick else 2000
    for name, group in groups.items():
        cells = row(name, group)
        if cells["FFN"] != "dense" and cells["capitals recalled"]:
            found = [
                kept(folder.name, partial(edits_that_succeed, folder, experiment.on, most))
                for folder in folders[name]
            ]
            cells["edits that succeed"] = spread(".1%", found)
        rate = group[0]["run"][0]["args"]["learning_rate"]
        rows.append({"run": name, "learning rate": f"{rate:g}", **cells, "FFN": ""})
    return markdown(rows)


def edits_that_succeed(folder: Path, device: torch.device, most: int) -> float:
    """Share of so many random pairs of countries, for each relation, in which the fact is the
    target's after the edit."""
    model, encoding, _ = load_model(folder / "ckpt.pt", device)
    model.tables = MeanRows(model.tables)
    return report_pairs(model, encoding, most)["success"]


def stability(experiment: Experiment) -> None:
    rates, kinds = experiment.few((3e-3, 1e-2, 3e-2)), STEM | BASELINES
    kinds = {name: {**kinds[name], "max_iters": 250} for name in ("dense", "STEM, all", "moe")}
    figure, panels = plt.subplots(
        2, len(rates), figsize=(11, 6), layout="constrained", sharey="row", squeeze=False
    )
    every, rows = experiment.groups(kinds, learning_rate=rates, seed=experiment.numbers), []
    n = len(experiment.numbers)  # runs of a kind at a rate
    for (number, name), (column, rate) in itertools.product(enumerate(kinds), enumerate(rates)):
        folders = every[name][column * n : (column + 1) * n]
        group = [read_run(folder) for folder in folders]
        curves = list(map(losses, group))
        norms = [[step["grad_norm"] for step in run["step"]] for run in group]
        # What the router's loss is over that of an even load, of each layer's, in the last steps.
        loads = [
            statistics.fmean(step["train_balance"] for step in run["step"][-50:])
            / (run["run"][0]["args"]["balance"] * run["run"][0]["args"]["n_layer"])
            for run in group
            if "train_balance" in run["step"][0]
        ]
        rows.append(
            {
                "kind": name,
                "learning rate": f"{rate:g}",
                "spikes in 1,000 steps": spread(".1f", map(spike_rate, curves)),
                "gradient norm, median": spread(".2f", map(statistics.median, norms)),
                "largest after warm-up": spread(".1f", (max(norm[25:] or norm) for norm in norms)),
                "last training loss": spread(
                    ".3f", (statistics.fmean(loss[-25:]) for loss in curves)
                ),
                "no number any more": str(sum(map(diverged, folders)) or ""),
                "load of experts over even": spread(".2f", loads),
            }
        )
        for loss, norm in zip(curves, norms, strict=True):
            look = dict(color=f"C{number}", linewidth=0.7, alpha=0.8)
            panels[0, column].plot(loss, label=name if loss is curves[0] else None, **look)
            panels[1, column].plot(norm, **look)
        panels[0, column].set_title(f"learning rate {rate:g}")
    print(markdown(rows))
    for axes, label in zip(panels[:, 0], ("training loss", "gradient norm"), strict=True):
        axes.set_ylabel(label)
        axes.set_yscale("log")
    panels[0, -1].legend()
    experiment.picture("stability", figure)


def losses(run: Run) -> list[float]:
    """The training loss of each step, without what moe's router adds to it."""
    return [step["train_loss"] - step.get("train_balance", 0.0) for step in run["step"]]


def spike_rate(losses: list[float]) -> float | None:
    """Spikes in 1,000 steps of those that have a band, if there are any."""
    inner = len(losses) - 2 * REACH
    return 1000 * sum(spikes(losses)) / inner if inner > 0 else None


def spikes(losses: list[float]) -> list[bool]:
    """Which steps have a loss higher than that of all REACH steps before, and above the robust
    running band. Its middle is the median of the steps up to REACH before and behind, which follows
    a loss that falls; its height is six times the spread around that of the steps up to twice as
    far (1.4826 of the median deviation, for normal noise the standard deviation). The first and the
    last REACH steps have no band.
    """
    loss, found = np.array(losses, float), np.zeros(len(losses), bool)
    loss[~np.isfinite(loss)] = np.finfo(loss.dtype).max
    if len(loss) > 2 * REACH:
        inner = slice(REACH, len(loss) - REACH)
        above = loss[inner] - np.median(windows(loss, 2 * REACH + 1), axis=1)
        around = np.pad(np.abs(above), 2 * REACH, mode="symmetric")
        band = 6 * 1.4826 * np.median(windows(around, 4 * REACH + 1), axis=1)
        highest = windows(loss, REACH).max(axis=1)[: len(above)]  # of the steps before
        found[inner] = (above > band) & (loss[inner] > highest)
    return found.tolist()
