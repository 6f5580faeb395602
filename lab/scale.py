"""scale: does the lead of rows hold when text is plenty? Kinds after more and more tokens, each at
the learning rate that one more seed has found at that size or, at 1.5 and 15 million tokens, at the
size before. The table and the picture of what is there are made anew after each group of runs."""

from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import UserError
from lab.experiment import KINDS, Experiment, Kinds, best_learning_rates, pick
from lab.ladder import SEARCHED
from lab.pictures import interval, markdown, off, plt
from model import Decoder
from text.dataset import read_meta
from train import resolve_settings
from training.batches import Data
from training.checkpoints import load_model

FIRST = pick("dense", "STEM, third", "STEM, all", "Embformer")
OTHERS = pick("memory", "bank", "engram", "ple", "count", "bigram")
OTHERS["STEM, all, rows as drawn"] = {**KINDS["STEM, all"], "table_rate": 0.0}
SIZES = {0.5: 0.5, 1.5: 0.5, 5: 5, 15: 5}  # millions of tokens, and at how many rates are searched
# Kinds, millions of tokens, and how many seeds: what decides most comes first.
STAGES = [(FIRST, 0.5, 3), (FIRST, 1.5, 3), (FIRST, 5, 3), (OTHERS, 0.5, 3), (OTHERS, 1.5, 3)]
STAGES += [(FIRST, 15, 1), (OTHERS, 5, 3)]
QUICK = [(pick("dense", "count"), million, 1) for million in (0.5, 1.5)]
GAPS = ("minus dense", "rare", "middle", "frequent")
FEW = 10  # reads of a row
Found = dict[float, dict[str, list[dict]]]  # figures of runs, by millions of tokens and kind


def scale(experiment: Experiment) -> None:
    stages = QUICK if experiment.quick else STAGES
    n_token = read_meta(experiment.data_dir)["train"]["tokens"]
    if n_token < 1e6 * max(SIZES) and not experiment.quick:
        fix = "give the folder of prepare.py --dataset classics"
        raise UserError(f"--data_dir {experiment.data_dir} has {n_token:,} tokens: {fix}")
    found: Found = {million: {} for million in SIZES}
    for number, (kinds, million, n_seed) in enumerate(stages, 1):
        searched = with_size(experiment, kinds, SIZES[million])
        best = best_learning_rates(experiment, searched, SEARCHED)
        wanted = with_size(experiment, best, million)
        for name, folders in experiment.train(wanted, experiment.numbers[:n_seed]).items():
            found[million][name] = experiment.measure("scale", measure_run, folders, experiment.on)
        report(experiment, found)
        for others, size, _ in stages[number:]:
            print(f"missing: {', '.join(others)} at {size} million tokens")


def with_size(experiment: Experiment, kinds: Kinds, million: float) -> Kinds:
    """Kinds, with the steps of so many tokens."""
    size = {"block_size": int(16 * million)}  # of quick runs, which take two steps
    if not experiment.quick:
        settings = resolve_settings(**experiment.all_flags({}))
        steps = round(1e6 * million / (settings.batch_size * settings.model.block_size))
        size = {"max_iters": steps, "eval_interval": -(-steps // 4)}
    return {name: {**kinds[name], **size} for name in kinds}


def measure_run(folder: Path, device: torch.device) -> dict:
    """The losses of a run: of all tokens, and where the token that is read, whose row it is,
    belongs to the rare, middle and frequent third of the vocabulary in the training text; of whole
    books held out, if there are some. And how many ids it has read fewer than FEW times."""
    model, _, checkpoint = load_model(folder / "ckpt.pt", device)
    args, n_id = checkpoint["args"], model.config.vocab_size
    data = Data(args["data_dir"], "text", model.config.block_size, args["seed"], total=1)
    batches = [data.train.batch(step, args["batch_size"])[0] for step in range(args["max_iters"])]
    reads = torch.cat(batches).flatten().bincount(minlength=n_id)
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
    for number in source.spread(n_token):
        ids, targets = source.sequences([number])  # [1, T]
        logits = model(ids)[0][0].float().cpu()  # [T, V]
        losses.append(F.cross_entropy(logits, targets[0], reduction="none"))
        read.append(ids[0])
    return torch.cat(losses), torch.cat(read)


def report(experiment: Experiment, found: Found) -> None:
    """Print a table of what is there, and draw it."""
    rows = []
    figure, both = plt.subplots(1, 2, figsize=(10, 4.5))
    for name in {name: None for kinds in found.values() for name in kinds}:
        points = []  # millions of tokens, losses and their gaps to dense [seeds, 4]
        for million, kinds in found.items():
            if name not in kinds:
                continue
            losses, dense = ([run["losses"] for run in kinds[n]] for n in (name, "dense"))
            gaps = np.subtract(losses, dense)
            points.append((million, np.array(losses)[:, 0], gaps[:, 0]))
            row = {
                "kind": name,
                "M tokens": str(million),
                "val loss": interval(".3f", points[-1][1]),
                "of other books": interval(".3f", [run.get("books") for run in kinds[name]]),
            }
            for title, of_runs in zip(GAPS, gaps.T, strict=True):
                row[title] = "" if name == "dense" else interval("+.3f", of_runs)
            row["dense needs"] = tokens_of_dense(fmean(points[-1][1]), million, found)
            row[f"ids read < {FEW} times"] = f"{kinds[name][0]['few']:,}"
            rows.append(row)
        millions, *figures = zip(*points, strict=True)
        for axes, at_sizes in zip(both, figures, strict=True):
            means, errors = [fmean(x) for x in at_sizes], [off(x) for x in at_sizes]
            axes.errorbar(millions, means, errors, capsize=2, marker=".", label=name)
    print(markdown(rows))
    for axes, title in zip(both, ("validation loss", "minus that of dense"), strict=True):
        axes.set(xscale="log", xlabel="million tokens", ylabel=f"{title} (nats, 95 % intervals)")
    both[0].legend(fontsize=8)
    experiment.picture("scale", figure)


def tokens_of_dense(loss: float, million: float, found: Found) -> str:
    """How many times as many tokens dense takes to this loss, between sizes by a straight line over
    the logarithm of tokens."""
    known = {}  # millions of tokens, by dense's loss
    for size, kinds in found.items():
        if kinds:
            known[fmean(run["losses"][0] for run in kinds["dense"])] = size
    losses = sorted(known)
    times = np.exp(np.interp(loss, losses, np.log([known[x] for x in losses]))) / million
    sign = "> " if loss < losses[0] else "< " if loss > losses[-1] else ""
    return f"{sign}{times:.2f} x"
