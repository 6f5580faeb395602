"""Runs of train.py side by side: a table, runs that differ in the seed alone in one row, and a
picture of their validation losses."""

import json
import math
from collections import Counter
from dataclasses import fields
from pathlib import Path

from common import progress
from lab.experiment import Run, last_eval, last_start
from lab.pictures import MEANING, draw_means, interval, markdown, plt, save_figure
from lab.stability import spike_rate
from model import ModelConfig
from training.digests import path_of
from training.records import read_run
from training.settings import STAGES, Settings

# Settings that may differ among the runs of a row.
NOT_COMPARED = ("seed", "out_dir", "resume", "overwrite")
SHARED = {setting.name for kind in (Settings, ModelConfig) for setting in fields(kind)}


def runs(folders: list[Path], out: Path) -> None:
    """Print a table of runs that exist, and draw their validation losses."""
    groups = grouped(folders)
    print(markdown([row(name, group) for name, group in groups.items()]))
    starts = [last_start(run) for group in groups.values() for run in group]
    if len({json.dumps(judged_on(start)) for start in starts}) > 1:
        same = "text, tokenizer, --block_size, --eval_tokens, --doc_mask and objective"
        print(f"\nnote: not all have the same {same}: their losses may not be compared")
    every = [start for group in groups.values() for run in group for start in run["run"]]
    files = {pair for start in every for pair in (start.get("relatives") or {}).items()}
    for name, n in Counter(name for name, _ in files).items():
        if n > 1:
            print(f"\nnote: {path_of(name)} changed between these runs")
    draw(groups, out)
    print(f"\n{MEANING}, as are the bars in the picture\n\nwrote {out}")


def grouped(folders: list[Path]) -> dict[str, list[Run]]:
    """The records of runs, those together whose settings differ in nothing but the seed, by the
    name of the first one's folder. A run that repeats another's seed, too, is no second sample: it
    goes to another group."""
    groups: dict[str, list[Run]] = {}
    for folder in progress(folders, "reading", unit="run"):
        run = read_run(folder)
        for group in groups.values():
            if compared(group[0]) == compared(run) and seed(run) not in map(seed, group):
                group.append(run)
                break
        else:
            name = folder.absolute().name  # of ".", too
            if name in groups:
                name = str(folder.resolve())
            groups[name] = [run]
    return groups


def seed(run: Run) -> int | None:
    return last_start(run)["args"].get("seed")


def judged_on(start: dict) -> list:
    """What decides which tokens a validation loss is of, what the model sees before them, and how
    it is computed."""
    args = start["args"]
    objective = STAGES.get(args.get("stage"), STAGES["pretrain"]).objective.__name__
    tokens = [start["data"], args["block_size"], args.get("eval_tokens")]
    return [*tokens, objective, bool(args.get("doc_mask"))]


def compared(run: Run) -> list:
    """What the runs of a group have in common. Settings and files are those of all starts: a run
    that was made longer has had another schedule than one that was as long from the beginning."""
    settings = []
    for start in run["run"]:
        args = {name: value for name, value in start["args"].items() if name not in NOT_COMPARED}
        here = [args, start.get("relatives")]
        if here not in settings[-1:]:  # else it was only interrupted
            settings.append(here)
    return [settings, last_start(run)["data"]]


def row(name: str, group: list[Run]) -> dict[str, str]:
    """What came out of runs that differ in the seed alone: the cells of a table by title."""
    start = last_start(group[0])
    args = start["args"]
    sizes = start["sizes"]
    last = list(map(last_eval, group))
    steps = sorted({record["step"] for record in last})  # runs may have been stopped
    recalls = []
    if all(run["recall"] for run in group):
        recalls = [run["recall"][-1]["recall"] for run in group]
    kind = args["ffn"]
    has_rows = sizes.get("rows", kind != "dense")  # earlier runs do not say
    if has_rows and kind not in ("embformer", "bigram"):  # all their layers read rows
        kind += f", {args['stem_layers']}"
    return {
        "run": name,
        "runs": str(len(group)) if len(group) > 1 else "",
        "FFN": kind,
        "own flags": ", ".join(f"{name}={args[name]}" for name in args if name not in SHARED),
        "learning rate": f"{args['learning_rate']:g}",
        "steps": " and ".join(f"{step:,}" for step in steps),
        "MFLOP a token": f"{sizes['flops_per_token'] / 1e6:.2f}",
        "val loss": interval(".3f", [record["val_loss"] for record in last]),
        "per byte": interval(".3f", [record.get("val_loss_per_byte") for record in last]),
        "recalled": interval(".1%", recalls),
        "95 % recalled at step": learned_at(group),
        "spikes in 1,000 steps": interval(".1f", [spike_rate(run) for run in group]),
        "parameters": f"{sizes['total'] / 1e6:.2f} M",
        "active": f"{sizes['active'] / 1e6:.2f} M",
    }


def learned_at(group: list[Run]) -> str:
    """The steps at which runs first recall 95 % of the few facts that they ask for on their way,
    from the earliest to the latest; nothing if they do not ask."""
    steps = []
    for run in group:
        shares = {record["step"]: record["recall"] for record in run["eval"] if "recall" in record}
        if not shares:
            return ""
        steps.append(min((step for step in shares if shares[step] >= 0.95), default=math.inf))
    ends = [f"{step:,}" if step < math.inf else "never" for step in (min(steps), max(steps))]
    return " to ".join(dict.fromkeys(ends))


def draw(groups: dict[str, list[Run]], out: Path) -> None:
    """Draw the means of validation losses of groups of runs over tokens, all rows counted as full.
    That of the random model, which comes first, would flatten all others."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for number, (name, group) in enumerate(groups.items()):
        by_step = []
        for run in group:
            by_step.append({record["step"]: record["val_loss"] for record in run["eval"]})
        common = set(by_step[0]).intersection(*by_step[1:])  # one may have stopped earlier
        steps = sorted(common)[1:]
        losses = [[of_run[step] for of_run in by_step] for step in steps]
        args = last_start(group[0])["args"]
        tokens = [step * args["batch_size"] * args["block_size"] / 1e6 for step in steps]
        style = ("-", "--", ":", "-.")[number // 10 % 4]  # there are ten colors
        label = name.replace("$", r"\$")
        draw_means(axes, tokens, losses, marker=".", linestyle=style, label=label)
    axes.set(xlabel="million tokens", ylabel="validation loss (nats per token)")
    # Beside the curves, which keep their room, however many and long the names are.
    legend = figure.legend(title="mean, 95 % interval", loc="outside right upper")
    figure.draw_without_rendering()
    width, height = legend.get_window_extent().size / figure.dpi  # inches
    figure.set_size_inches(7 + width, max(4.2, height + 0.2))
    save_figure(figure, out)
