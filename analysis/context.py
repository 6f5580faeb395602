"""What does a longer context give a model with token tables?

The claim (STEM, arXiv 2601.10639, "test-time capacity scaling"): the parameters that a context
activates grow with its distinct tokens, where those of a dense model do not, and retrieval from
long contexts gains from that. Two measurements:

**Rows of distinct tokens.** Real text is cut into contexts of 1k to 32k tokens. Rows of the
distinct tokens in each, times width and number of tables, add to the backbone, as do their
embeddings where these are only looked up. Nothing is trained: what is read need not be of use.

**A needle in a haystack** (`needles.py`): so is it of use in finding what stands far back? Dense
beside STEM, asked for sentences planted in prose, by depth and length.
"""

import numpy as np

from analysis.experiment import STEM, Experiment, ensure_prepared
from analysis.needles import KINDS, haystacks
from config import ModelConfig
from model import Decoder, outline
from training.batches import open_tokens, read_meta
from training.records import markdown, plt
from training.settings import PRESETS

CONTEXTS = tuple(2**power for power in range(10, 16))
QUICK = (64, 256)


def context(experiment: Experiment) -> None:
    figure = plt.figure(figsize=(11, 6.4), layout="constrained")
    above, below = figure.subfigures(2, 1)
    distinct_rows(experiment, above.subplots())
    print()
    haystacks(experiment, below.subplots(1, 2 * len(KINDS), sharey=True))
    experiment.picture("context", figure)


def distinct_tokens(ids: np.ndarray, length: int, most: int = 8) -> list[int]:
    """How many tokens differ in each of up to `most` contexts, spread evenly over ids [T]."""
    starts = np.unique(np.linspace(0, len(ids) - length, most, dtype=int))
    return [len(np.unique(ids[start : start + length])) for start in starts]


def active(config: ModelConfig, n_token: int) -> int:
    """Parameters that a context with so many distinct tokens reads."""
    with outline():
        model = Decoder(config)
        sizes, row = model.sizes(), len(model.tables.weight) * model.tables.width
    row += 0 if config.tie_head else config.n_embd
    return sizes["active"] + (n_token - 1) * row  # what one token reads, and the rows of others


def distinct_rows(experiment: Experiment, axes: plt.Axes) -> None:
    """Table and curves of the first measurement: on the novel; where it should be quick, on
    --data_dir."""
    folder = experiment.data_dir if experiment.quick else experiment.data_dir.with_name("moby-dick")
    ensure_prepared(folder)
    meta = read_meta(folder)
    ids = open_tokens(folder, "train", meta)
    contexts = [n for n in (QUICK if experiment.quick else CONTEXTS) if n <= len(ids)]
    counts = {n: float(np.mean(distinct_tokens(ids, n))) for n in contexts}
    rows = [{"context": f"{n:,}", "distinct tokens": f"{counts[n]:,.0f}"} for n in contexts]
    shape = {name: PRESETS["prose"][name] for name in ("n_layer", "n_head", "n_embd")}
    for name, kind in STEM.items():
        config = ModelConfig(vocab_size=meta["vocab_size"], **shape, **kind)
        read = [active(config, round(count)) / 1e6 for count in counts.values()]
        for cells, million in zip(rows, read, strict=True):
            cells[name] = f"{million:.2f} M ({million / read[0]:.2f})"
        axes.plot(contexts, read, marker=".", label=name)
    print(f"Parameters read in a context of {folder.name} (over those of the shortest):\n")
    print(markdown(rows))
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{n:,}" for n in contexts])
    axes.set(xlabel="tokens in the context", ylabel="million parameters read", ylim=0)
    axes.grid(alpha=0.3)
    axes.legend(ncols=len(STEM), fontsize=8)
