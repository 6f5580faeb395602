"""ladder: what was published about layers indexed by tokens, side by side at equal tokens, with the
controls that such claims need. Five seeds, intervals of 95 %, each kind at its best learning rate,
which three other seeds have found."""

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from common import UserError
from lab.edits import row_with_edits
from lab.experiment import (
    HASH_LAYERS,
    KINDS,
    SEARCHED_THREE,
    Experiment,
    Flags,
    best_learning_rates,
    last_eval,
    last_start,
    pick,
)
from lab.pictures import COLORS, draw_means, interval, markdown, off, plt
from model import Decoder, ModelConfig, relatives
from text.dataset import read_meta
from training.records import read_run
from training.report import model_sizes

SEEDS = [1337, 1, 2, 3, 4]
BYTES = 4  # of a number in float32

# These take the learning rate of the kind with the same --ffn, as a search for each would take an
# hour.
ENGRAM = {"ffn": "engram", "stem_layers": "half"}
VARIANTS = {
    **pick("STEM, third", "STEM, half"),  # that of STEM in all layers
    **HASH_LAYERS,
    "value, all layers": {"ffn": "value", "stem_layers": "all"},
    "value, gate of x": {"ffn": "value", "value_gate": True},
    "bigram, rows from noise": {"ffn": "bigram", "table_std": 0.02},
    "engram, one row": {"ffn": "engram", "ngram_rows": 1},  # every n-gram has the same
    "engram, random rows": {"ffn": "engram", "table_rate": 0.0},  # as they were drawn
    "engram, half": ENGRAM,
    "engram, half, one table": {**ENGRAM, "engram_table": "one", "ngram_rows": 3 * 2**15},
    "engram, half, in the FFN": {**ENGRAM, "engram_place": "ffn"},
}
# In the picture, and of these, whose names stand to the left of the points.
NAMED = (
    "dense",
    "dense, as many parameters",
    "hash_moe",
    "pkm",
    "ple",
    "engram",
    "bigram",
    "bank",
    "memory",
    "STEM, third",
    "STEM, all",
    "stem_additive",
    "Embformer",
    "deepembed",
    "stem_ngrams",
)
LEFT = ("memory", "stem_additive")
CONTROLS = pick("dense", "STEM, third", "STEM, all")  # of one's own kinds


class Direction(NamedTuple):
    """Something published: one kind has a lower loss, or answers better, than another."""

    better: str
    worse: str
    source: str


DIRECTIONS = (
    Direction("STEM, third", "dense", "STEM, 350 M: 50.90 of 100 points, 49.72"),
    Direction("STEM, half", "STEM, third", "STEM: 54.20, 50.90"),
    Direction("STEM, half", "STEM, all", "STEM: 54.20, 53.43"),
    Direction("dense", "stem_gate", "STEM: 49.72, 49.10"),
    Direction("STEM, third", "stem_additive", "STEM: 50.90, 50.60"),
    Direction("STEM, third", "hash_moe, one expert", "STEM: 50.90, 50.58"),
    Direction("STEM, third", "hash_moe", ""),
    Direction("dense", "Embformer", "Embformer, section 3"),
    Direction("value", "dense", "modded-nanogpt, nanochat"),
    Direction("value", "value, all layers", "nanochat: alternate layers are best"),
    Direction("value, gate of x", "value", "nanochat"),
    Direction("bank", "dense", "Bank of Values: at least as good"),
    Direction("memory", "dense", "Memory Attention"),
    Direction("bigram", "dense", "modded-nanogpt"),
    Direction("bigram", "bigram, rows from noise", "modded-nanogpt: rows begin at zero"),
    Direction("stem_ngrams", "STEM, all", "LongCat: slightly"),
    Direction("bigram", "STEM, all", "LongCat, 300 G tokens: n-grams at the input"),
    Direction("engram", "dense", "Engram; nano-scalemb, 1 G: 0.7048 bits a byte, 0.7107"),
    Direction("engram", "engram, one row", "nano-scalemb: 0.7048, 0.7127"),
    Direction("engram", "engram, random rows", "nano-scalemb: 0.7048, 0.7237"),
    Direction("engram", "dense, as many parameters", "nano-scalemb: 0.7048, 0.7170"),
    Direction("engram, half, one table", "engram, half", "nano-scalemb, 2 G: 0.7638, 0.7676"),
    Direction("engram, half", "engram, half, in the FFN", "FactorEngram, table 4"),
    Direction("STEM, all", "dense, as many parameters", ""),
    Direction("STEM, all", "dense, as many FLOPs", ""),
)


def ladder(experiment: Experiment, *own: str) -> None:
    """All kinds or, given kinds of relatives/, these beside dense and STEM."""
    known = relatives("Decoder")
    for name in own:
        if name not in known:
            raise UserError(f"ladder {name}: relatives/ has {', '.join(known)}")
    seeds = experiment.numbers
    if experiment.seeds is None:
        seeds = [1, 2] if experiment.quick else SEEDS
    if len(seeds) < 2:
        raise UserError(f"--seeds {experiment.seeds}: an interval needs 2 seeds or more")
    variants = {}
    directions = DIRECTIONS
    if own:
        wanted = {**CONTROLS, **{name: {"ffn": name} for name in own}}
        directions = [Direction(name, other, "") for name in own for other in CONTROLS]
    elif experiment.quick:
        wanted = pick("dense", "STEM, third")
    else:
        variants = VARIANTS
        kinds = {**KINDS, **dense_of_equal_costs(experiment)}
        wanted = {name: kinds[name] for name in kinds if name not in variants}
    kinds = best_learning_rates(experiment, wanted, SEARCHED_THREE)
    rates = {flags["ffn"]: flags["learning_rate"] for flags in kinds.values()}
    for name, flags in variants.items():
        kinds[name] = {**flags, "learning_rate": rates[flags["ffn"]]}
    table, losses, read = [], {}, {}
    for name, folders in experiment.train(kinds, seeds).items():
        runs = [read_run(folder) for folder in folders]
        losses[name] = [last_eval(run)["val_loss"] for run in runs]
        read[name] = BYTES * last_start(runs[0])["sizes"]["rows"]
        cells = row_with_edits(experiment, name, folders)
        table.append({**cells, "bytes of rows": f"{read[name]:,}"})
    print(markdown(table) + "\n")
    print(markdown(list(verdicts(losses, directions))))
    draw(experiment, losses, read)


def dense_of_equal_costs(experiment: Experiment) -> dict[str, Flags]:
    """What the tables of STEM in all layers might be spent on: the dense model that comes nearest
    to it in parameters, by its width, and in FLOPs, by its hidden units."""
    vocab_size = read_meta(experiment.data_dir)["vocab_size"]

    def size(flags: Flags, figure: str) -> int:
        with torch.device("meta"):  # shapes, but no numbers
            return model_sizes(Decoder(ModelConfig(vocab_size=vocab_size, **flags)))[figure]

    widths = [{"ffn": "dense", "n_head": n, "n_embd": 32 * n} for n in range(4, 33)]
    hidden = [{"ffn": "dense", "d_ff": 8 * n} for n in range(1, 65)]
    kinds = {}
    for name, figure, tried in (
        ("dense, as many parameters", "total", widths),
        ("dense, as many FLOPs", "flops_per_token", hidden),
    ):
        wanted = size(KINDS["STEM, all"], figure)
        larger = bisect_left(tried, wanted, key=lambda flags: size(flags, figure))
        nearest = tried[max(0, larger - 1) : larger + 1]
        kinds[name] = min(nearest, key=lambda flags: abs(size(flags, figure) - wanted))
    return kinds


def verdicts(
    losses: dict[str, list[float]], directions: Iterable[Direction] = DIRECTIONS
) -> Iterator[dict[str, str]]:
    """A row for each direction: losses of the same seeds are compared in pairs."""
    for better, worse, source in directions:
        if better not in losses or worse not in losses:
            continue
        pairs = zip(losses[better], losses[worse], strict=True)
        gains = [other - loss for loss, other in pairs]
        gain, error = statistics.fmean(gains), off(gains)
        signs = ("same sign", "opposite sign") if source else ("yes", "no")
        verdict = "undecided"
        if abs(gain) > error:
            verdict = signs[0] if gain > 0 else signs[1]
        yield {
            "lower loss": better,
            "than": worse,
            "published": source,
            "ours, nats": interval("+.3f", gains),
            "verdict": verdict,
        }


def draw(experiment: Experiment, losses: dict[str, list[float]], read: dict[str, int]) -> None:
    """Losses over the bytes that a token reads of tables. Of many kinds, most are gray and without
    a name."""
    figure, axes = plt.subplots(figsize=(9, 5))
    for name in sorted(losses, key=lambda name: name in NAMED):  # these above the others
        named = name in NAMED or len(losses) <= len(NAMED)
        x, y = read[name] / 1024, statistics.fmean(losses[name])
        side = "right" if name in LEFT else "left"  # of its name, where there is room
        color = COLORS.get(name, "0.4") if named else "0.8"
        draw_means(axes, [x], [losses[name]], fmt="o", color=color)
        if named:
            place = {"xytext": (6 if side == "left" else -6, 0), "textcoords": "offset points"}
            axes.annotate(name, (x, y), ha=side, va="center", color=color, **place)
    axes.set_xscale("symlog", linthresh=0.25, base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.16)  # for names
    axes.set_xlabel("KiB of rows that a token reads")
    axes.set_ylabel("validation loss (nats per token), 95 % intervals")
    experiment.picture("ladder", figure)
