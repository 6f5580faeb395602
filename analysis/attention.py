"""Is attention that does not grow with the length worse, and does Embformer need keys that say what
came before? Loss on prose and on facts, a needle in prose, and values of keys that were told.
"""

import random
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from analysis.context import KEYS, SHORT, VALUES, document, prepare_corpora
from analysis.experiment import Experiment, spread
from analysis.runs import curve, with_edits
from common import locked
from training.checkpoints import load_model
from training.records import plt, read_run

PATTERN, BEFORE = "window,window,count", "full, keys of the token before"
EVERY = ("full", "window", "count", "window,window,full", PATTERN)
KINDS = {name: dict(ffn="embformer", attention=name) for name in EVERY}
KINDS |= {BEFORE: dict(KINDS["full"], previous_heads=2), "dense": dict(ffn="dense")}
PROSE, INDUCTION = dict(learning_rate=0.012, window=64), SHORT | dict(window=32)
PARTS = {
    "prose, 256 tokens": (PROSE, ("full", "window", PATTERN, BEFORE)),
    "prose, 1,024 tokens": (PROSE | dict(block_size=1024, batch_size=2), EVERY),
    "facts": (dict(window=32), ("full", "window", PATTERN, BEFORE)),
    "needles": (INDUCTION, ("dense", "full", PATTERN, BEFORE)),
    "pairs": (INDUCTION, ("dense", "full", PATTERN, BEFORE)),
}


def pairs(rng: random.Random) -> str:
    """Four keys with their values, and a dozen times one of them again."""
    told = [f" Call {key} {rng.choice(VALUES)}." for key in rng.sample(KEYS, 4)]
    return "".join(told + rng.choices(told, k=12))


TEXTS = {"needles": partial(document, n_piece=6, repeats=8), "pairs": pairs}


@torch.inference_mode()
def found(write, count: int, device: torch.device, folder: Path) -> float:
    """The share of values that a run's model names, behind the last key of so many new texts."""
    (model, encoding, _), hits = load_model(folder / "ckpt.pt", device), []
    for seed in range(count):
        before, last = write(random.Random(seed)).rsplit(" Call ", 1)
        key, value = last.split(".")[0].split()
        ids = [encoding.eot_token, *encoding.encode_ordinary(f"{before} Call {key}")]
        logits, _ = model(torch.tensor([ids], device=device)[:, -SHORT["block_size"] :])
        hits.append(logits[0, -1].argmax().item() == encoding.encode_ordinary(f" {value}")[0])
    return fmean(hits)


def attention(experiment: Experiment) -> None:
    quick, where = experiment.quick, {"facts": experiment.data_dir}
    with locked(experiment.out_dir, wait=True):
        for name, write in TEXTS.items():
            sizes = {name: (30_000,)}
            (where[name],) = prepare_corpora(experiment.out_dir, quick, sizes, write)
    parts = {name: PARTS[name] for name in (where if quick else PARTS)}
    prose = experiment.data_dir.with_name("moby-dick")
    if not quick:
        experiment.ensure_prepared(prose)
    figure, panels = plt.subplots(1, len(parts), figsize=(4 * len(parts), 3.8))
    for axes, (part, (flags, names)) in zip(panels, parts.items(), strict=True):
        flags = flags | dict(data_dir=str(where.get(part, prose)))
        kinds = {name: flags | KINDS[name] for name in (names[2:3] if quick else names)}
        print(f"{part}:\n\n{with_edits(experiment, kinds)}\n")
        for name, folders in experiment.train(kinds).items():
            curve(axes, list(map(read_run, folders)), 1e-6, label=name)
            if part in TEXTS:
                shares = partial(found, TEXTS[part], 1 if quick else 400, experiment.on)
                shares = experiment.measure(part, shares, folders)
                print(f"values of {part} found, {name}: {spread('.1%', shares)}\n")
        axes.set(title=part, xlabel="million tokens")
        axes.legend(fontsize="small")
    panels[0].set_ylabel("validation loss (nats per token)")
    experiment.picture("attention", figure)
