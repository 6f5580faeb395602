"""scale: does the lead of rows hold when text is plenty? Kinds after more and more tokens, each at
the learning rate that one more seed has found after 0.5 or 5 million. The table and the picture of
what is there are made anew after each stage."""

from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import UserError
from lab.experiment import KINDS, Experiment, Flags, best_learning_rates, diverged
from lab.ladder import SEARCHED, dense_of_equal_costs
from lab.pictures import interval, markdown, off, plt
from model import Decoder
from text.dataset import read_meta
from train import resolve_settings
from training.batches import Data
from training.checkpoints import load_model

FIRST = ("dense", "STEM, third", "STEM, all", "Embformer")
EQUAL = ("dense, as many parameters",)  # as STEM in all layers
DRAWN = "STEM, all, rows as drawn"
OTHERS = ("memory", "bank", "engram", "ple", "count", "bigram", DRAWN)
# Millions of tokens (two passes at most), and after how many rates are compared.
SIZES = {0.5: 0.5, 1.5: 0.5, 5: 5, 15: 5, 56.4: 5, 112.8: 5}
# A stage: a preset, and kinds with how many seeds at each size, which train together and begin in
# this order. 0 seeds: rates are compared there, to see whether they have moved. What decides most
# comes first.
STAGES = [
    ("prose", [(FIRST, {56.4: 1, 5: 3, 1.5: 3, 0.5: 3, 15: 3})]),
    ("prose", [(EQUAL, {15: 1, 5: 3}), (OTHERS, {5: 3, 1.5: 3, 0.5: 3})]),
    ("prose", [(EQUAL, {56.4: 1}), (FIRST, {56.4: 3})]),
    ("prose", [(("dense", "STEM, all"), {15: 0})]),
    ("minimind-26m", [(FIRST, {56.4: 1, 5: 1})]),
    ("prose", [(FIRST, {112.8: 1})]),
]
QUICK = [("prose", [(("dense", "count"), {0.5: 1, 1.5: 1})])]
GAPS = ("minus dense", "rare", "middle", "frequent")
FEW = 10  # reads of a row
BATCH = 8  # windows that are read at once
# Figures of runs, by millions of tokens, kind and seed.
Found = dict[float, dict[str, dict[int, dict]]]


def scale(experiment: Experiment) -> None:
    n_token = read_meta(experiment.data_dir)["train"]["tokens"]
    if n_token < 1e6 * max(SIZES) / 2 and not experiment.quick:
        fix = "give the folder of classics (docs/data-and-stages.md)"
        raise UserError(f"--data_dir {experiment.data_dir} has {n_token:,} tokens: {fix}")
    kinds = {**KINDS, **dense_of_equal_costs(experiment)}
    kinds[DRAWN] = {**KINDS["STEM, all"], "table_rate": 0.0}
    found: dict[str, Found] = {}  # by preset

    def measure(folder: Path) -> list[dict]:
        if diverged(folder):
            return []
        return experiment.measure("scale", measure_run, [folder], experiment.on)

    for preset, groups in QUICK if experiment.quick else STAGES:
        asked = []
        for names, sizes in groups:
            asked += [(million, name, n) for million, n in sizes.items() for name in names]
        searched = {}
        for million, name, n_seed in asked:
            size = SIZES[million] if n_seed else million
            flags = {**kinds[name], "preset": preset}
            searched[f"{name}, {size} M"] = with_size(experiment, flags, size)
        best = best_learning_rates(experiment, searched, SEARCHED)
        wanted = {}
        for million, name, n_seed in asked:
            for seed in experiment.numbers[:n_seed]:
                flags = with_size(experiment, best[f"{name}, {SIZES[million]} M"], million)
                wanted[million, name, seed] = {**flags, "seed": seed}
        of_preset = found.setdefault(preset, {size: {} for size in SIZES})
        for (million, name, seed), folders in experiment.train(wanted, then=measure).items():
            for figures in measure(folders[0]):
                of_preset[million].setdefault(name, {})[seed] = figures
        report(experiment, preset, of_preset)


def with_size(experiment: Experiment, flags: Flags, million: float) -> Flags:
    """Flags, with the steps of so many tokens."""
    if experiment.quick:  # two steps
        return {**flags, "block_size": int(16 * million)}
    settings = resolve_settings(**experiment.all_flags({**flags, "max_iters": 1}))
    steps = round(1e6 * million / (settings.batch_size * settings.model.block_size))
    return {**flags, "max_iters": steps, "eval_interval": -(-steps // 4)}


def measure_run(folder: Path, device: torch.device) -> dict:
    """The losses of a run: of all tokens, and where the token that is read, whose row it is,
    belongs to the rare, middle and frequent third of the vocabulary in the training text; of whole
    books held out, if there are some. And how many ids it has read fewer than FEW times."""
    model, _, checkpoint = load_model(folder / "ckpt.pt", device)
    args, n_id = checkpoint["args"], model.config.vocab_size
    data = Data(args["data_dir"], "text", model.config.block_size, args["seed"], total=1)
    reads = torch.zeros(n_id, dtype=torch.int64)
    for step in range(args["max_iters"]):
        ids, _ = data.train.batch(step, args["batch_size"])
        reads += ids.flatten().bincount(minlength=n_id)
    rank = np.bincount(data.train.ids[::16], minlength=n_id).argsort(kind="stable").argsort()
    third = torch.from_numpy(rank * 3 // n_id)  # 0, 1, 2: of each id
    loss, ids = token_losses(model, data, args["eval_tokens"])
    by_third = [loss[third[ids] == number].mean().item() for number in range(3)]
    figures = {"losses": [loss.mean().item(), *by_third], "few": int((reads < FEW).sum())}
    books = Path(args["data_dir"], "held_out")  # of prepare.py --hold_out_files
    if books.exists():
        data = Data(str(books), "text", model.config.block_size, 0, total=0)
        figures["books"] = token_losses(model, data, args["eval_tokens"])[0].mean().item()
    return figures


@torch.inference_mode()
def token_losses(model: Decoder, data: Data, n_token: int) -> tuple[Tensor, Tensor]:
    """The losses [N] in nats of predictions in held-out text, and the ids [N] they are made at."""
    losses, read = [], []
    (source,) = data.val.values()
    numbers = source.spread(n_token)
    for first in range(0, len(numbers), BATCH):
        ids, targets = source.sequences(numbers[first : first + BATCH])  # [B, T]
        logits = model(ids)[0].flatten(0, 1).float()  # [B * T, V]
        targets = targets.flatten().to(logits.device)
        losses.append(F.cross_entropy(logits, targets, reduction="none").cpu())
        read.append(ids.flatten())
    return torch.cat(losses), torch.cat(read)


def report(experiment: Experiment, preset: str, found: Found) -> None:
    """Print a table of what is there, and draw it."""
    rows = []
    figure, both = plt.subplots(1, 2, figsize=(10, 4.5))
    for name in {name: None for kinds in found.values() for name in kinds}:
        points = []  # millions of tokens, losses, gaps to dense
        for million, kinds in found.items():
            if name not in kinds:
                continue
            runs, dense = kinds[name], kinds["dense"]
            losses = [run["losses"][0] for run in runs.values()]
            pairs = [
                (runs[seed]["losses"], dense[seed]["losses"]) for seed in runs if seed in dense
            ]
            gaps = np.array([np.subtract(*pair) for pair in pairs]).T  # [4, seeds]
            points.append((million, losses, gaps[0]))
            row = {
                "kind": name,
                "M tokens": str(million),
                "val loss": interval(".3f", losses),
                "of other books": interval(".3f", [run.get("books") for run in runs.values()]),
            }
            for title, of_runs in zip(GAPS, gaps, strict=True):
                row[title] = "" if name == "dense" else interval("+.3f", of_runs)
            row["dense needs"] = tokens_of_dense(fmean(losses), million, found)
            row[f"ids read < {FEW} times"] = f"{next(iter(runs.values()))['few']:,}"
            rows.append(row)
        millions, *figures = zip(*points, strict=True)
        for axes, at_sizes in zip(both, figures, strict=True):
            means, errors = [fmean(x) for x in at_sizes], [off(x) for x in at_sizes]
            axes.errorbar(millions, means, errors, capsize=2, marker=".", label=name)
    print(f"--preset {preset}:\n\n{markdown(rows)}")
    for axes, title in zip(both, ("validation loss", "minus that of dense"), strict=True):
        axes.set(xscale="log", xlabel="million tokens", ylabel=f"{title} (nats, 95 % intervals)")
    both[0].legend(fontsize=8)
    experiment.picture(f"scale-{preset}", figure)


def tokens_of_dense(loss: float, million: float, found: Found) -> str:
    """How many times as many tokens dense takes to this loss, between sizes by a straight line over
    the logarithm of tokens."""
    known = {}  # millions of tokens, by dense's loss
    for size, kinds in found.items():
        if kinds:
            known[fmean(run["losses"][0] for run in kinds["dense"].values())] = size
    losses = sorted(known)
    times = np.exp(np.interp(loss, losses, np.log([known[x] for x in losses]))) / million
    sign = "> " if loss < losses[0] else "< " if loss > losses[-1] else ""
    return f"{sign}{times:.2f} x"
