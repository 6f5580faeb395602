"""scale: does the lead of rows hold when text is plenty? Kinds after more and more tokens, each at
the learning rate that one more seed has found after 0.5 or 5 million. The table and the picture of
what is there are made anew after each stage."""

import math
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import UserError
from lab.experiment import KINDS, Experiment, Flags, Kinds, best_learning_rates, diverged
from lab.ladder import dense_of_equal_costs
from lab.pictures import colors, draw_means, interval, markdown, plt
from model import Decoder
from text.dataset import read_meta
from train import resolve_settings
from training.batches import Data

FIRST = ("dense", "STEM, third", "STEM, all", "Embformer")
EQUAL = ("dense, as many parameters",)  # as STEM in all layers
DRAWN = "STEM, all, rows as drawn"
OTHERS = ("memory", "bank", "engram", "ple", "count", "bigram", DRAWN)
# Millions of tokens (two passes at most), and after how many rates are compared.
SIZES = {0.5: 0.5, 1.5: 0.5, 5: 5, 15: 5, 56.4: 5, 112.8: 5}
# A stage: a preset, and kinds with how many seeds at each size, which train together and begin in
# this order. What decides most comes first.
STAGES = [
    ("prose", FIRST, {56.4: 1, 5: 3, 1.5: 3, 0.5: 3, 15: 3}),
    ("prose", EQUAL, {15: 1, 5: 3}),
    ("prose", OTHERS, {5: 3, 1.5: 3, 0.5: 3}),
    ("prose", EQUAL, {56.4: 1}),
    ("prose", FIRST, {56.4: 3}),
    ("minimind-26m", FIRST, {56.4: 1, 5: 3}),
    ("prose", FIRST, {112.8: 1}),
]
QUICK = [("prose", ("dense", "count"), {0.5: 1, 1.5: 1})]
GAPS = ("minus dense", "rare", "middle", "frequent")
FEW = 10  # reads of a row
BATCH = 8  # windows that are read at once
# Figures of runs by kind and millions of tokens, then by seed.
Found = dict[tuple[str, float], dict[int, dict]]


def scale(experiment: Experiment) -> None:
    n_token = read_meta(experiment.data_dir)["train"]["tokens"]
    if n_token < 1e6 * max(SIZES) / 2 and not experiment.quick:
        fix = "give the folder of classics (docs/data-and-stages.md)"
        raise UserError(f"--data_dir {experiment.data_dir} has {n_token:,} tokens: {fix}")
    kinds = {**KINDS, **dense_of_equal_costs(experiment)}
    kinds[DRAWN] = {**KINDS["STEM, all"], "table_rate": 0.0}
    found: dict[str, Found] = {}  # by preset
    for preset, names, sizes in QUICK if experiment.quick else STAGES:
        of_preset = {name: {**kinds[name], "preset": preset} for name in names}
        trained = experiment.train(at_best_rates(experiment, of_preset, sizes)).items()
        folders = {run: folder for run, (folder,) in trained if not diverged(folder)}
        measured = experiment.measure("scale", measure_model, folders.values())
        runs = found.setdefault(preset, {})
        for (name, million, seed), figures in zip(folders, measured, strict=True):
            runs.setdefault((name, million), {})[seed] = figures
        report(experiment, preset, runs)


def at_best_rates(experiment: Experiment, kinds: Kinds, sizes: dict[float, int]) -> Kinds:
    """The runs of a stage by kind, millions of tokens and seed, as flags."""
    searched = {}
    for million, name in product(sizes, kinds):
        size = SIZES[million]
        searched[f"{name}, {size} M"] = with_size(experiment, kinds[name], size)
    best = best_learning_rates(experiment, searched)
    wanted = {}
    for million, name in product(sizes, kinds):
        flags = with_size(experiment, best[f"{name}, {SIZES[million]} M"], million)
        for seed in experiment.numbers[: sizes[million]]:
            wanted[name, million, seed] = {**flags, "seed": seed}
    return wanted


def with_size(experiment: Experiment, flags: Flags, million: float) -> Flags:
    """Flags, with the steps of so many tokens."""
    if experiment.quick:  # two steps
        return {**flags, "block_size": int(16 * million)}
    settings = resolve_settings(**experiment.all_flags({**flags, "max_iters": 1}))
    steps = round(1e6 * million / (settings.batch_size * settings.model.block_size))
    return {**flags, "max_iters": steps, "eval_interval": -(-steps // 4)}


def measure_model(model: Decoder, _, checkpoint: dict) -> dict:
    """The losses of a model: of all tokens, and where the token that is read, whose row it is,
    belongs to the rare, middle and frequent third of the vocabulary in the training text; of whole
    books held out, if there are some. And how many ids it has read fewer than FEW times."""
    args, n_id = checkpoint["args"], model.config.vocab_size
    length, n_token = model.config.block_size, args["eval_tokens"]
    data = Data(args["data_dir"], "text", length, args["seed"], total=1)
    reads = torch.zeros(n_id, dtype=torch.int64)
    for step in range(args["max_iters"]):
        ids, _ = data.train.batch(step, args["batch_size"])
        reads += ids.flatten().bincount(minlength=n_id)
    rank = np.bincount(data.train.ids[::16], minlength=n_id).argsort(kind="stable").argsort()
    third = torch.from_numpy(rank * 3 // n_id)  # 0, 1, 2: of each id
    loss, ids = token_losses(model, data, n_token)
    by_third = [loss[third[ids] == number].mean().item() for number in range(3)]
    figures = {"losses": [loss.mean().item(), *by_third], "few": int((reads < FEW).sum())}
    books = Path(args["data_dir"], "held_out")  # of prepare.py --hold_out_files
    if books.exists():
        loss, _ = token_losses(model, Data(str(books), "text", length, 0, total=0), n_token)
        figures["books"] = loss.mean().item()
    return figures


@torch.inference_mode()
def token_losses(model: Decoder, data: Data, n_token: int) -> tuple[Tensor, Tensor]:
    """The losses [N, T] in nats of predictions in held-out text, and the ids they are made at."""
    (source,) = data.val.values()
    ids, targets = source.sequences(source.spread(n_token))  # [N, T]
    losses = []
    for part, target in zip(ids.split(BATCH), targets.to(model.device).split(BATCH), strict=True):
        logits = model(part)[0].float()  # [B, T, V]
        losses.append(F.cross_entropy(logits.mT, target, reduction="none").cpu())
    return torch.cat(losses), ids


def report(experiment: Experiment, preset: str, found: Found) -> None:
    """Print a table of what is there, and draw it."""
    by_size = sorted(found, key=lambda run: run[1])
    rows = [row(found, name, million) for name, million in by_size]
    print(f"--preset {preset}:\n\n{markdown(rows)}")
    figure, both = plt.subplots(1, 2, figsize=(10, 4.5))
    drawn = {"validation loss": losses, "minus that of dense": gaps}
    ticks = dict.fromkeys(million for _, million in by_size)
    for axes, (title, figures) in zip(both, drawn.items(), strict=True):
        for name, color in colors(dict.fromkeys(name for name, _ in by_size)).items():
            sizes = [million for other, million in by_size if other == name]
            points = [figures(found, name, million) or [math.nan] for million in sizes]
            draw_means(axes, sizes, points, marker=".", label=name, color=color)
        axes.set(xscale="log", xlabel="million tokens", ylabel=f"{title} (nats, 95 % intervals)")
        axes.set_xticks(list(ticks), [f"{million:g}" for million in ticks])
        axes.minorticks_off()
    both[0].legend(fontsize=8)
    experiment.picture(f"scale-{preset}", figure)


def row(found: Found, name: str, million: float) -> dict[str, str]:
    """The cells about the runs of a kind after so many tokens."""
    runs = found[name, million].values()
    cells = {
        "M tokens": str(million),
        "kind": name,
        "seeds": str(len(runs)),
        "val loss": interval(".3f", losses(found, name, million)),
        "of other books": interval(".3f", [run.get("books") for run in runs]),
    }
    for at, title in enumerate(GAPS):
        of_kind = [] if name == "dense" else gaps(found, name, million, at)
        cells[title] = interval("+.3f", of_kind)
    cells["dense needs"] = tokens_of_dense(found, name, million)
    cells[f"ids read < {FEW} times"] = f"{next(iter(runs))['few']:,}"
    return cells


def losses(found: Found, name: str, million: float) -> list[float]:
    return [run["losses"][0] for run in found[name, million].values()]


def gaps(found: Found, name: str, million: float, at: int = 0) -> list[float]:
    """By how much losses, all or of a third of the tokens, are above dense's with the same seed."""
    runs, dense = found[name, million], found.get(("dense", million), {})
    return [runs[seed]["losses"][at] - dense[seed]["losses"][at] for seed in runs if seed in dense]


def tokens_of_dense(found: Found, name: str, million: float) -> str:
    """How many times as many tokens dense takes to the loss of a kind, between sizes by a straight
    line over the logarithm of tokens."""
    loss = fmean(losses(found, name, million))
    sizes = {fmean(losses(found, *run)): run[1] for run in found if run[0] == "dense"}
    if not sizes:
        return ""
    known = sorted(sizes)
    times = np.exp(np.interp(loss, known, np.log([sizes[x] for x in known]))) / million
    sign = "> " if loss < known[0] else "< " if loss > known[-1] else ""
    return f"{sign}{times:.2f} x"
