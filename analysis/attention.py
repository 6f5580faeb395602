"""Kinds of attention: is one that does not grow with the length worse, on prose or facts? And are
keys that do not know what came before (Embformer's) found again by their values (needles, pairs)?
"""

import random
from functools import partial
from pathlib import Path

from analysis.context import KEYS, SHORT, VALUES, document, prepare_corpora
from analysis.experiment import Experiment, spread
from analysis.runs import curve, with_edits
from common import locked
from text.tokenizer import encode
from training.checkpoints import load_model
from training.questions import groups, score_answers
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
}
PARTS |= dict.fromkeys(("needles", "pairs"), (INDUCTION, ("dense", "full", PATTERN, BEFORE)))


def pairs(rng: random.Random) -> str:
    """Four keys with their values, and a dozen times one of them again."""
    told = [f" Call {key} {rng.choice(VALUES)}." for key in rng.sample(KEYS, 4)]
    return "".join(told + rng.choices(told, k=12))


def found(write, count: int, device, folder: Path) -> float:
    """The share of values that a run's model names behind the last key of so many new texts."""
    (model, encoding, _), asked = load_model(folder / "ckpt.pt", device), []
    for seed in range(count):
        before, last = write(random.Random(seed)).rsplit(" Call ", 1)
        key, value = last.split(".")[0].split()
        prompt = encode(encoding, f"{before} Call {key}")[-SHORT["block_size"] + 8 :]
        asked.append((prompt, encoding.encode_ordinary(f" {value}")))
    right = (score_answers(model, *group)[0].sum().item() for group in groups(encoding, asked))
    return sum(right) / count


def attention(experiment: Experiment) -> None:
    quick, where = experiment.quick, {"facts": experiment.data_dir}
    texts = {"needles": partial(document, n_piece=6, repeats=8), "pairs": pairs}
    with locked(experiment.out_dir, wait=True):
        for part, write in texts.items():
            (where[part],) = prepare_corpora(experiment.out_dir, quick, {part: (30_000,)}, write)
    if not quick:
        prose = experiment.data_dir.with_name("moby-dick")
        experiment.ensure_prepared(prose)
        where = dict.fromkeys(PARTS, prose) | where
    figure, panels = plt.subplots(1, len(where), figsize=(4 * len(where), 3.8))
    for axes, (part, folder) in zip(panels, where.items(), strict=True):
        flags, names = PARTS[part][0] | dict(data_dir=str(folder)), PARTS[part][1]
        kinds = {name: flags | KINDS[name] for name in (names[2:3] if quick else names)}
        print(f"{part}:\n\n{with_edits(experiment, kinds)}\n")
        for name, folders in experiment.train(kinds).items():
            curve(axes, list(map(read_run, folders)), 1e-6, label=name)
            if part in texts:
                measure = partial(found, texts[part], 4 if quick else 400, experiment.on)
                shares = spread(".1%", experiment.measure(part, measure, folders))
                print(f"values of {part} found, {name}: {shares}\n")
        axes.set(title=part, xlabel="million tokens")
        axes.legend(fontsize="small")
    experiment.picture("attention", figure)
