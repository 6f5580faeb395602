"""scale: does the lead of rows hold when text is plenty? Kinds after more and more tokens, each at
the learning rate that one more seed has found, at the size itself or the searched one below it.
Figures are printed when all runs of a size are there; those that follow add to them."""

import statistics
from pathlib import Path

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
OTHERS = {
    **pick("memory", "bank", "engram", "ple", "count", "bigram"),
    "STEM, all, rows as drawn": {**KINDS["STEM, all"], "table_rate": 0.0},
}
# Millions of tokens, and at which of them the learning rate was searched.
SIZES = {0.5: 0.5, 1.5: 0.5, 5: 5, 15: 5}
# Kinds, millions of tokens, and of how many seeds: what decides most comes first.
STAGES = (
    (FIRST, 0.5, 3),
    (FIRST, 1.5, 3),
    (FIRST, 5, 3),
    (OTHERS, 0.5, 3),
    (OTHERS, 1.5, 3),
    (FIRST, 15, 1),
    (OTHERS, 5, 3),
)
FEW = 10  # reads of a row
GAPS = ("minus dense", "rare tokens", "middle", "frequent")
Found = dict[float, dict[str, list[dict]]]  # figures of runs by size and kind


def scale(experiment: Experiment) -> None:
    n_token = read_meta(experiment.data_dir)["train"]["tokens"]
    stages = STAGES
    if experiment.quick:
        some = pick("dense", "STEM, third", "count")
        stages = [(some, million, 3) for million in SIZES]
    elif n_token < 1e6 * max(SIZES):
        raise UserError(
            f"{experiment.data_dir} has {n_token:,} tokens, scale needs {max(SIZES)} million: "
            "python prepare.py --dataset classics"
        )
    rates = {}
    found: Found = {}
    for number, (kinds, million, n_seed) in enumerate(stages):
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
        for others, size, _ in stages[number + 1 :]:
            print(f"missing: {size} M tokens, {', '.join(others)}")


def flags_of_size(experiment: Experiment, million: float) -> Flags:
    if experiment.quick:  # which takes two steps in any case
        return {"block_size": int(16 * million)}
    settings = resolve_settings(**experiment.all_flags({}))
    steps = round(million * 1e6 / (settings.batch_size * settings.model.block_size))
    return {"max_iters": steps, "eval_interval": -(-steps // 4)}


@torch.inference_mode()
def measure_run(folder: Path, device: torch.device) -> dict:
    """The tokens and rate of a run; its losses, of all tokens, and of those in the rare, middle and
    frequent third of the vocabulary (as the token that is read, whose row it is, occurs in the
    training text); how many ids it has read fewer than FEW times."""
    model, _, checkpoint = load_model(folder / "ckpt.pt", device)
    args, vocab_size = checkpoint["args"], model.config.vocab_size
    data = Data(args["data_dir"], "text", model.config.block_size, args["seed"], total=1)
    (held_out,) = data.val.values()
    reads = np.zeros(vocab_size, dtype=np.int64)
    for step in range(args["max_iters"]):
        ids, _ = data.train.batch(step, args["batch_size"])  # [B, T]
        reads += np.bincount(ids.flatten(), minlength=vocab_size)
    frequency = np.bincount(data.train.ids[::16], minlength=vocab_size)
    third = np.empty(vocab_size, dtype=np.int64)  # 0, 1, 2: of each id
    third[frequency.argsort(kind="stable")] = np.arange(vocab_size) * 3 // vocab_size
    losses, thirds = [], []
    for number in held_out.spread(args["eval_tokens"]):
        ids, targets = held_out.sequences([number])  # [1, T]
        logits, _ = model(ids)  # [1, T, V]
        loss = F.cross_entropy(logits[0].float(), targets[0].to(device), reduction="none")
        losses.append(loss.cpu().numpy())
        thirds.append(third[ids[0]])
    loss, group = np.concatenate(losses), np.concatenate(thirds)
    with np.errstate(invalid="ignore"):  # none may occur
        by_third = np.bincount(group, loss, 3) / np.bincount(group, minlength=3)
    return {
        "tokens": args["max_iters"] * args["batch_size"] * model.config.block_size,
        "rate": args["learning_rate"],
        "losses": [float(loss.mean()), *by_third.tolist()],
        "few": int((reads < FEW).sum()),
    }


def report(experiment: Experiment, found: Found) -> None:
    """Print a table of what is there, and draw it."""
    dense = [kinds["dense"] for kinds in found.values()]
    rows = []
    points: dict[str, list[tuple]] = {}  # of a kind: tokens, losses, gaps to dense
    for kinds in found.values():
        for name, runs in kinds.items():
            pairs = zip(runs, kinds["dense"], strict=True)  # of the same seed
            gaps = [np.subtract(run["losses"], other["losses"]) for run, other in pairs]
            gaps = list(zip(*gaps, strict=True))  # of all tokens, rare, middle, frequent ones
            losses = [run["losses"][0] for run in runs]
            shown = [interval("+.3f", of_runs) for of_runs in gaps] if name != "dense" else [""] * 4
            row = {
                "M tokens": f"{runs[0]['tokens'] / 1e6:.3g}",
                f"ids read < {FEW} times": f"{runs[0]['few']:,}",
                "kind": name,
                "rate": f"{runs[0]['rate']:g}",
                "val loss": interval(".3f", losses),
                **dict(zip(GAPS, shown, strict=True)),
                "dense needs": tokens_of_dense(runs, dense),
            }
            rows.append(row)
            points.setdefault(name, []).append((runs[0]["tokens"], losses, gaps[0]))
    print(f"{markdown(rows)}\n")
    figure, both = plt.subplots(1, 2, figsize=(10, 4.5))
    for name, of_kind in points.items():
        n_token, *figures = zip(*of_kind, strict=True)
        for axes, of_sizes in zip(both, figures, strict=True):
            means = [statistics.fmean(of_runs) for of_runs in of_sizes]
            errors = [off(of_runs) if len(of_runs) > 1 else 0 for of_runs in of_sizes]
            axes.errorbar(n_token, means, errors, capsize=2, marker=".", label=name)
    for axes, title in zip(both, ("validation loss", "its gap to dense"), strict=True):
        axes.set(xscale="log", xlabel="tokens", ylabel=f"{title}, nats a token, 95 % intervals")
    both[0].legend(fontsize=8)
    experiment.picture("scale", figure)


def tokens_of_dense(runs: list[dict], dense: list[list[dict]]) -> str:
    """How many times as many tokens dense takes to the loss of these runs, its own losses drawn
    as straight lines over the logarithm of tokens."""
    loss = statistics.fmean(run["losses"][0] for run in runs)
    known = [statistics.fmean(run["losses"][0] for run in at_size) for at_size in dense]
    tokens = np.log([at_size[0]["tokens"] for at_size in dense])
    sign = "> " if loss < min(known) else "< " if loss > max(known) else ""
    times = np.exp(np.interp(-loss, -np.array(known), tokens)) / runs[0]["tokens"]
    return f"{sign}{times:.2f} x"
