"""scale: does the lead of rows hold when text is plenty? Kinds after more and more tokens, each at
the learning rate that one more seed has found at that size or, at 1.5 and 15 million tokens, at the
size before. The table and the picture of what is there are made anew after each group of runs."""

from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F

from common import UserError
from lab.experiment import KINDS, Experiment, Flags, best_learning_rates, pick
from lab.ladder import SEARCHED
from lab.pictures import interval, markdown, off, plt
from text.dataset import read_meta
from train import resolve_settings
from training.batches import Data
from training.checkpoints import load_model

FIRST = pick("dense", "STEM, third", "STEM, all", "Embformer")
FROZEN = {"STEM, all, rows as drawn": {**KINDS["STEM, all"], "table_rate": 0.0}}
OTHERS = {**pick("memory", "bank", "engram", "ple", "count", "bigram"), **FROZEN}
SIZES = {0.5: 0.5, 1.5: 0.5, 5: 5, 15: 5}  # millions of tokens, and at how many rates are searched
# Kinds, millions of tokens, and how many seeds: what decides most comes first.
STAGES = (
    (FIRST, 0.5, 3),
    (FIRST, 1.5, 3),
    (FIRST, 5, 3),
    (OTHERS, 0.5, 3),
    (OTHERS, 1.5, 3),
    (FIRST, 15, 1),
    (OTHERS, 5, 3),
)
QUICK = tuple((pick("dense", "STEM, third", "count"), million, 1) for million in SIZES)
FEW = 10  # reads of a row
GAPS = ("minus dense", "of rare tokens", "middle", "frequent")  # of losses

Found = dict[float, dict[str, list[dict]]]  # figures of runs, by millions of tokens and kind


def scale(experiment: Experiment) -> None:
    stages = QUICK if experiment.quick else STAGES
    rates = {}
    found: Found = {}
    for number, (kinds, million, n_seed) in enumerate(stages, 1):
        flags = flags_of_size(experiment, million)
        wanted = {name: {**kinds[name], **flags} for name in kinds}
        if SIZES[million] == million:
            for name, best in best_learning_rates(experiment, wanted, SEARCHED).items():
                rates[name, million] = best["learning_rate"]
        for name in wanted:
            wanted[name]["learning_rate"] = rates[name, SIZES[million]]
        for name, folders in experiment.train(wanted, experiment.numbers[:n_seed]).items():
            runs = experiment.measure("scale", measure_run, folders, experiment.on)
            found.setdefault(million, {})[name] = runs
        report(experiment, found)
        for others, size, _ in stages[number:]:
            print(f"missing: {', '.join(others)} at {size} million tokens")


def flags_of_size(experiment: Experiment, million: float) -> Flags:
    """UserError: the text is shorter."""
    if experiment.quick:  # which takes two steps in any case
        return {"block_size": int(16 * million)}
    n_token = read_meta(experiment.data_dir)["train"]["tokens"]
    if n_token < 1e6 * million:
        short = f"--data_dir {experiment.data_dir} has {n_token:,} tokens, not {million} million"
        raise UserError(f"{short}: give the folder of prepare.py --dataset classics")
    settings = resolve_settings(**experiment.all_flags({}))
    steps = round(1e6 * million / (settings.batch_size * settings.model.block_size))
    return {"max_iters": steps, "eval_interval": -(-steps // 4)}


@torch.inference_mode()
def measure_run(folder: Path, device: torch.device) -> dict:
    """The rate of a run; its losses, of all tokens, and of those in the rare, middle and frequent
    third of the vocabulary (as the token that is read, whose row it is, occurs in the training
    text); how many ids it has read fewer than FEW times."""
    model, _, checkpoint = load_model(folder / "ckpt.pt", device)
    args = checkpoint["args"]
    n_id = model.config.vocab_size
    data = Data(args["data_dir"], "text", model.config.block_size, args["seed"], total=1)
    reads = np.zeros(n_id, dtype=np.int64)
    for step in range(args["max_iters"]):
        ids, _ = data.train.batch(step, args["batch_size"])  # [B, T]
        reads += np.bincount(ids.flatten(), minlength=n_id)
    third = np.empty(n_id, dtype=np.int64)  # 0, 1, 2: of each id
    rarest_first = np.bincount(data.train.ids[::16], minlength=n_id).argsort(kind="stable")
    third[rarest_first] = np.arange(n_id) * 3 // n_id
    sums, counts = np.zeros(4), np.zeros(4)
    (held_out,) = data.val.values()
    for number in held_out.spread(args["eval_tokens"]):
        ids, targets = held_out.sequences([number])  # [1, T]
        logits, _ = model(ids)  # [1, T, V]
        loss = F.cross_entropy(logits[0].float(), targets[0].to(device), reduction="none").cpu()
        group = 1 + third[ids[0]]
        sums += np.bincount(group, loss, 4)
        counts += np.bincount(group, minlength=4)
    sums[0], counts[0] = sums.sum(), counts.sum()
    losses = [float(n) and float(total / n) for total, n in zip(sums, counts, strict=True)]
    return {"rate": args["learning_rate"], "losses": losses, "few": int((reads < FEW).sum())}


def report(experiment: Experiment, found: Found) -> None:
    """Print a table of what is there, and draw it."""
    rows = []
    curves: dict[str, list[tuple]] = {}  # of a kind: millions of tokens, losses, gaps to dense
    for million, kinds in found.items():
        for name, runs in kinds.items():
            losses = np.array([run["losses"] for run in runs])  # [seeds, 4]
            gaps = losses - [run["losses"] for run in kinds["dense"]]
            row = {
                "M tokens": str(million),
                f"ids read < {FEW} times": f"{runs[0]['few']:,}",
                "kind": name,
                "rate": f"{runs[0]['rate']:g}",
                "val loss": interval(".3f", losses[:, 0]),
            }
            for title, of_runs in zip(GAPS, gaps.T, strict=True):
                row[title] = interval("+.3f", of_runs) if gaps.any() else ""
            row["dense needs"] = tokens_of_dense(losses[:, 0].mean(), million, found)
            rows.append(row)
            curves.setdefault(name, []).append((million, losses[:, 0], gaps[:, 0]))
    print(markdown(rows))
    figure, both = plt.subplots(1, 2, figsize=(10, 4.5))
    for name, points in curves.items():
        millions, *figures = zip(*points, strict=True)
        for axes, at_sizes in zip(both, figures, strict=True):
            means, errors = [fmean(x) for x in at_sizes], [off(x) for x in at_sizes]
            axes.errorbar(millions, means, errors, capsize=2, marker=".", label=name)
    for axes, title in zip(both, ("validation loss", "minus that of dense"), strict=True):
        axes.set(xscale="log", xlabel="million tokens", ylabel=f"{title} (nats, 95 % intervals)")
    both[0].legend(fontsize=8)
    experiment.picture("scale", figure)


def tokens_of_dense(loss: float, million: float, found: Found) -> str:
    """How many times as many tokens dense takes to this loss, between sizes by a straight line over
    the logarithm of tokens."""
    known = {fmean(run["losses"][0] for run in found[size]["dense"]): size for size in found}
    losses = sorted(known)
    times = np.exp(np.interp(loss, losses, np.log([known[x] for x in losses]))) / million
    sign = "> " if loss < losses[0] else "< " if loss > losses[-1] else ""
    return f"{sign}{times:.2f} x"
