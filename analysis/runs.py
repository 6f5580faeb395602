"""Runs of train.py side by side: those that exist (`runs`), and those that three questions want.

kinds: ten kinds of layers at equal tokens, and at equal training FLOPs, each at its best learning
rate. settings: two initialisations, each at its best rate, and what tables are trained with.
stability: spikes of the loss and gradient norms at rising learning rates.
"""

import itertools
import json
import statistics
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view as windows

from analysis.edits import success_of_edits
from analysis.experiment import (
    KINDS,
    MAIN,
    RATES,
    Experiment,
    Flags,
    Run,
    best_learning_rates,
    best_loss,
    diverged,
    pick,
    spread,
)
from training.batches import read_meta
from training.records import (
    check_picture,
    grouped,
    losses_of,
    markdown,
    mean_and_band,
    plot,
    plt,
    read_run,
)

REACH = 10  # steps before and behind that a spike stands out of
INITS = (0.088, 0.02)  # 1 / sqrt(n_embd) of what is trained here, and GPT-2's


def runs(folders: list[Path], out: Path) -> None:
    """Print a table of runs that exist, and draw their losses."""
    check_picture(out)
    found = grouped(folders)
    print(markdown([row(name, group) for name, group in found]))
    texts = {json.dumps(run["run"][0]["data"]) for _, group in found for run in group}
    if len(texts) > 1:
        print("\nnote: not all have the same text and tokenizer, so losses are of different tokens")
    plot(folders, out)
    print(f"\nwrote {out}")


def row(name: str, group: list[Run]) -> dict[str, str]:
    """What came out of runs that differ in the seed alone: the cells of a table by title."""
    last, args = [run["eval"][-1] for run in group], group[0]["run"][0]["args"]
    sizes = group[0]["run"][0]["sizes"]
    speeds = [[step["tok_per_s"] for step in run["step"]] for run in group]
    edits = [report for run in group for report in run["edits"]]
    recalls = [record["recall"] for run in group for record in run["recall"][-1:]]
    return {
        "run": name,
        "runs": str(len(group)) if len(group) > 1 else "",
        "FFN": args["ffn"] + f", {args['stem_layers']}" * (args["ffn"] == "stem"),
        "learning rate": f"{args['learning_rate']:g}",
        "steps": f"{args['max_iters']:,}",
        "MFLOP a token": f"{sizes['flops_per_token'] / 1e6:.2f}",
        "val loss, last": spread(".3f", (record["val_loss"] for record in last)),
        "best": spread(".3f", map(best_loss, group)),
        # none for preferences, whose loss is per pair
        "per byte": spread(".3f", (record.get("val_loss_per_byte") for record in last)),
        "capitals recalled": spread(".1%", recalls),
        "edits that succeed": spread(".1%", (report["success"] for report in edits)),
        "spikes in 1,000 steps": spread(".1f", map(spike_rate, map(losses, group))),
        "parameters": f"{sizes['total'] / 1e6:.2f} M",
        "active": f"{sizes['active'] / 1e6:.2f} M",
        "tok/s": spread(",.0f", (statistics.median(each) for each in speeds if each)),
    }


def train_and_read(experiment: Experiment, kinds: dict[str, Flags]) -> dict[str, list[Run]]:
    folders = experiment.train(kinds)
    return {name: list(map(read_run, group)) for name, group in folders.items()}


def kinds(experiment: Experiment) -> None:
    at_best = best_learning_rates(experiment, pick(*MAIN) if experiment.quick else KINDS)
    equal = train_and_read(experiment, at_best)
    # A kind whose tokens cost less gets more of them, until as much was computed.
    cost = {name: group[0]["run"][0]["sizes"]["flops_per_token"] for name, group in equal.items()}
    total = equal["dense"][0]["run"][0]["args"]["max_iters"] * cost["dense"]
    longer = {
        name: {**at_best[name], "max_iters": round(total / cost[name])}
        for name in equal
        if cost[name] < 0.97 * cost["dense"]
    }
    more = train_and_read(experiment, longer)
    for title, groups in (("tokens", equal), ("training FLOPs", {"dense": equal["dense"], **more})):
        rows = [row(name, group) for name, group in groups.items()]
        print(f"Equal {title}:\n\n{markdown(rows)}\n")

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True)
    best = {k: statistics.fmean(map(best_loss, equal[k])) for k in equal if k != "dense"}
    for name in ("dense", *sorted(best, key=best.get)[:5]):  # bands of more cannot be told apart
        curve(panels[0], equal[name], 1e-6, label=name)
        curve(panels[1], equal[name], 3 * cost[name] / 1e12)
    panels[0].set(xlabel="million tokens", ylabel="validation loss (nats per token)")
    panels[1].set_xlabel("training TFLOP of the same runs")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    experiment.picture("kinds", figure)


def curve(axes: plt.Axes, group: list[Run], per_token: float, **look) -> None:
    """The validation loss of runs after their first step."""
    args = group[0]["run"][0]["args"]
    steps, losses = losses_of(group, "eval", "val_loss")
    x = steps[1:] * args["batch_size"] * args["block_size"] * per_token
    mean_and_band(axes, x, losses[:, 1:], marker=".", **look)


def settings(experiment: Experiment) -> None:
    names = ("dense", "STEM, third", "STEM, all", "Embformer")[: 2 if experiment.quick else 4]
    every = {f"{name}, {std}": {**KINDS[name], "init_std": std} for name in names for std in INITS}
    every = best_learning_rates(experiment, every)
    print(f"How dense weights begin:\n\n{with_edits(experiment, every)}\n")
    if read_meta(experiment.data_dir)["corpus"] == "countries":  # facts, and edits that tell where
        third = KINDS["STEM, third"]
        tables = {
            "the defaults": third,
            "--table_optimizer adamw": third | dict(table_optimizer="adamw"),
            "--doc_mask": third | dict(doc_mask=True),
            "--table_std 1": third | dict(table_std=1.0),
        }
        print(f"Tables of STEM in a third of the layers:\n\n{with_edits(experiment, tables)}")


def with_edits(experiment: Experiment, kinds: dict[str, Flags]) -> str:
    """A table of trained kinds, and of the edits that succeed in them."""
    rows = []
    for name, folders in experiment.train(kinds).items():
        cells = row(name, list(map(read_run, folders)))
        if kinds[name]["ffn"] != "dense" and cells["capitals recalled"]:
            found = success_of_edits(experiment, folders)
            cells["edits that succeed"] = spread(".1%", (pairs["success"] for pairs in found))
        rows.append(cells)
    return markdown(rows)


def stability(experiment: Experiment) -> None:
    rates = RATES[1:2] if experiment.quick else (3e-3, 1e-2, 3e-2)
    names, rows = ("dense", "STEM, all", "moe"), []
    trained = experiment.train({
        (name, rate): {**KINDS[name], "max_iters": 250, "learning_rate": rate}
        for name, rate in itertools.product(names, rates)
    })  # fmt: skip
    figure, panels = plt.subplots(2, len(rates), figsize=(11, 6), sharey="row", squeeze=False)
    for (name, rate), folders in trained.items():
        group = list(map(read_run, folders))
        curves = list(map(losses, group))
        norms = [[step["grad_norm"] for step in run["step"]] for run in group]
        # moe's: what its router's loss is over that of an even load, of each layer, at the end.
        args, last = group[0]["run"][0]["args"], [run["step"][-50:] for run in group]
        even = args["balance"] * args["n_layer"]
        loads = [statistics.fmean(s.get("train_balance", 0.0) for s in steps) for steps in last]
        rows.append({
            "kind": name,
            "learning rate": f"{rate:g}",
            "spikes in 1,000 steps": spread(".1f", map(spike_rate, curves)),
            "gradient norm, median": spread(".2f", map(statistics.median, norms)),
            "largest after warm-up": spread(".1f", (max(norm[25:] or norm) for norm in norms)),
            "last training loss": spread(".3f", (statistics.fmean(loss[-25:]) for loss in curves)),
            "diverged": str(sum(map(diverged, folders)) or ""),
            "load of experts over even": spread(".2f", (load / even for load in loads if load)),
        })  # fmt: skip
        look = dict(color=f"C{names.index(name)}", linewidth=0.7, alpha=0.8)
        above, below = panels[:, rates.index(rate)]
        for number, (loss, norm) in enumerate(zip(curves, norms, strict=True)):
            above.plot(loss, label=None if number else name, **look)
            below.plot(norm, **look)
        above.set_title(f"learning rate {rate:g}")
    print(markdown(rows))
    for axes, label in zip(panels[:, 0], ("training loss", "gradient norm"), strict=True):
        axes.set(ylabel=label, yscale="log")
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    panels[0, -1].legend()
    figure.supxlabel("step", fontsize="medium")
    experiment.picture("stability", figure)


def losses(run: Run) -> list[float]:
    """The training loss of each step, without what moe's router adds to it."""
    return [step["train_loss"] - step.get("train_balance", 0.0) for step in run["step"]]


def spike_rate(losses: list[float]) -> float | None:
    """Spikes in 1,000 steps of those that have a band, if there are any."""
    inner = len(losses) - 2 * REACH
    return 1000 * float(spikes(losses).sum()) / inner if inner > 0 else None


def spikes(losses: list[float]) -> np.ndarray:
    """Which steps, but the first and the last REACH, have a loss higher than in all REACH steps
    before, and more than six robust deviations above the median of those before and behind."""
    loss = np.nan_to_num(losses, nan=np.inf).clip(max=1e30)
    inner = loss[REACH:-REACH]
    above = inner - np.median(windows(loss, 2 * REACH + 1), axis=1)
    around = np.pad(np.abs(above), 2 * REACH, mode="symmetric")
    # 1.4826: of normal noise this is the standard deviation.
    band = 6 * 1.4826 * np.median(windows(around, 4 * REACH + 1), axis=1)
    highest = windows(loss, REACH)[: len(inner)].max(axis=1)  # of the steps before
    return (above > band) & (inner > highest)
