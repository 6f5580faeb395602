"""What a model costs: FLOPs by length, parameters read by batch size, cache, return on compute.

The claims (STEM, arXiv 2601.10639): a looked-up up-projection takes about a third of the FFN's
parameters out of compute, so prefill and training take fewer FLOPs, and a step of decoding reads
fewer parameters, in large batches, too, whose tokens repeat. And training pays more,

    return on compute = accuracy / training FLOPs

over the dense model's: 1.08, 1.20 and 1.33 with tables in a third, half and all layers.

Costs are counted, not timed, on outlines of models that hold no numbers: `Decoder.sizes` says what
a token multiplies, and attention is counted for the pairs of tokens that see each other. PyTorch's
FLOP counter takes all n^2 pairs of a sequence, a kernel that skips what is masked computes the
n (n + 1) / 2 counted here. A training step counts as three forward passes: a gradient for what is
multiplied, and one for what by (fused attention computes its weights once more, which is not
counted). In decoding a batch reads less of a table than of its up-projection if it has fewer than
n_embd distinct tokens. Returns are those of trained runs, each kind at its best learning rate.

Deliberately simple: batches are independent draws of tokens by their frequency, in the training
text, or by Zipf's law for the published shape; moe's router spreads its load evenly; what is read
is counted once a step, and the cache's keys and values not as parameters.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis.experiment import BASELINES, STEM, Experiment, Flags, spread
from analysis.runs import searched
from config import ModelConfig
from model import Decoder, outline
from training.batches import open_tokens, read_meta
from training.records import markdown, plt, read_run
from training.settings import Settings

KINDS = STEM | {name: BASELINES[name] for name in ("moe", "hash_moe")}
LENGTHS = [2**n for n in range(7, 18)]
BATCHES = [2**n for n in range(10)]
SHOWN = (1, 32, 512)  # of these batches in tables
# Llama 3.2 1B's (Meta, 2024).
PUBLISHED = dict(
    vocab_size=128_256, n_layer=16, n_embd=2048, d_ff=8192, n_head=32, n_kv_head=8, tie_head=True
)
PAPER = {"dense": 1.0, "STEM, third": 1.08, "STEM, half": 1.20, "STEM, all": 1.33}


class Costs:
    """What a model of this shape costs."""

    def __init__(self, config: ModelConfig) -> None:
        with outline():
            model = Decoder(config)
        self.config, self.sizes = config, model.sizes()
        self.key = self.sizes["flops_per_key"]
        self.linear = self.sizes["flops_per_token"] - self.key * config.block_size // 2
        self.head = 2 * model.head_weight.numel()
        # What one more distinct token reads: its rows, and its embedding unless all is read anyway.
        self.rows = len(model.tables.weight) * model.tables.width
        self.rows += 0 if config.tie_head else config.n_embd
        self.idle = sum(getattr(block.ffn, "idle", 0) for block in model.blocks)
        weights = [p.numel() for b in model.blocks for p in b.ffn.parameters() if p.dim() == 2]
        self.ffn = sum(weights) - self.idle

    def flops(self, tokens: int, pairs: int, logits: int) -> int:
        """Of a forward pass in which so many pairs of tokens see each other, and the head gives
        logits for so many tokens."""
        return (self.linear - self.head) * tokens + self.head * logits + self.key * pairs

    def prefill(self, n: int) -> int:
        """FLOPs of reading a prompt of n tokens."""
        return self.flops(n, n * (n + 1) // 2, logits=1)

    def training(self, n: int) -> int:
        """FLOPs of learning from a sequence of n tokens."""
        return 3 * self.flops(n, n * (n + 1) // 2, logits=n)

    def read(self, batch: int, distinct: float, experts: float | None = None) -> float:
        """Parameters that a step of decoding reads for a batch with so many distinct tokens.
        experts: so many of a layer's are wanted; None: as many as may be expected."""
        config = self.config
        first = self.sizes["active"] + (distinct - 1) * self.rows
        if config.ffn not in ("moe", "hash_moe"):
            return first
        if experts is None:
            experts = expected_experts(config, batch, distinct)
        return first + self.idle * (experts - config.top_k) / (config.n_expert - config.top_k)

    def cache(self, n: int, size: int = 2) -> int:
        """Bytes of the keys and values of n tokens, in numbers of `size` bytes."""
        config = self.config
        return 2 * config.n_layer * config.n_kv_head * config.head_dim * n * size


def expected_distinct(p: np.ndarray, batch: int) -> float:
    """How many distinct tokens a batch of independent ones has on average; p [V] sums up to 1."""
    return float(-np.expm1(batch * np.log1p(-np.minimum(p, 1 - 1e-12))).sum())


def expected_experts(config: ModelConfig, batch: int, distinct: float) -> float:
    """How many experts of a layer a batch wants on average. moe: each token top_k at random;
    hash_moe: each distinct token one of each segment's."""
    n, k = config.n_expert, config.top_k
    if config.ffn == "moe":
        return n * (1 - (1 - k / n) ** batch)
    return n * (1 - (1 - k / n) ** distinct)  # a segment has n / k


@dataclass
class Shape:
    """A shape in all kinds, how often tokens occur [V], and lengths to show."""

    name: str
    flags: Flags
    frequencies: np.ndarray
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        kinds = KINDS.items()
        self.kinds = {name: Costs(ModelConfig(**self.flags, **kind)) for name, kind in kinds}
        self.distinct = {batch: expected_distinct(self.frequencies, batch) for batch in BATCHES}

    def read(self, kind: str, batch: int) -> float:
        return self.kinds[kind].read(batch, self.distinct[batch])

    def table(self) -> str:
        rows, dense = [], self.kinds["dense"]
        for name, it in self.kinds.items():
            row = {
                self.name: name,
                "parameters": f"{it.sizes['total'] / 1e6:,.1f} M",
                "in tables": f"{it.sizes['table'] / 1e6:,.1f} M" if it.sizes["table"] else "",
                "FFN, multiplied": f"{it.ffn / 1e6:,.2f} M ({it.ffn / dense.ffn:.2f})",
            }
            for n in self.lengths:
                flops = it.prefill(n)
                row[f"GFLOP of {n:,} tokens"] = (
                    f"{flops / 1e9:,.2f} ({flops / dense.prefill(n):.2f})"
                )
            for batch in SHOWN:
                read = self.read(name, batch)
                title = f"read, batch {batch}"
                row[title] = f"{read / 1e6:,.2f} M ({read / self.read('dense', batch):.2f})"
            row["cache, KiB a token"] = f"{it.cache(1) / 1024:g}"
            rows.append(row)
        return markdown(rows)


def returns(experiment: Experiment) -> str:
    """Accuracy over training FLOPs of trained runs, and that over the mean of dense ones."""

    def figures(folder: Path) -> dict[str, float]:
        records = read_run(folder)
        settings = Settings.of(records["run"][-1]["args"])
        steps = settings.max_iters * settings.batch_size
        found = {"flops": steps * Costs(settings.model).training(settings.model.block_size)}
        if records["recall"]:  # else another corpus
            found["capitals recalled"] = records["recall"][-1]["recall"]
        return found | {"exp(-val loss)": float(np.exp(-records["eval"][-1]["val_loss"]))}

    groups = experiment.groups(searched(experiment, STEM))
    measured = {name: list(map(figures, folders)) for name, folders in groups.items()}
    rows, dense = [], measured["dense"]
    for name, runs in measured.items():
        flops = runs[0]["flops"]
        row = {"trained": name, "runs": str(len(runs)), "training TFLOP": f"{flops / 1e12:.3g}"}
        row["of dense"] = f"{flops / dense[0]['flops']:.3f}"
        for what in list(dense[0])[1:]:
            base = np.mean([run[what] / run["flops"] for run in dense])
            row[what] = spread(".3f", (run[what] for run in runs))
            paid = (float(run[what] / run["flops"] / base) if base else None for run in runs)
            row[f"return by {what}"] = spread(".2f", paid)
        row["return in the paper"] = f"{PAPER[name]:.2f}" if name in PAPER else ""
        rows.append(row)
    return markdown(rows)


def costs(experiment: Experiment) -> None:
    flags = experiment.grid({"dense": STEM["dense"]}, seed=experiment.numbers[:1])
    config = Settings.of(read_run(experiment.trained(flags)[0])["run"][-1]["args"]).model
    names = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_kv_head", "d_ff")
    ids = open_tokens(experiment.data_dir, "train", read_meta(experiment.data_dir))
    zipf = 1 / np.arange(1, PUBLISHED["vocab_size"] + 1)
    shapes = [
        Shape(
            f"{config.n_layer} x {config.n_embd}, as trained",
            {name: getattr(config, name) for name in names},
            np.bincount(ids, minlength=config.vocab_size) / len(ids),
            (config.block_size // 8, config.block_size),
        ),
        Shape("16 x 2,048, as Llama 3.2 1B", PUBLISHED, zipf / zipf.sum(), (128, 8192, 131072)),
    ]
    for shape in shapes:
        print(shape.table() + "\n")
    print(returns(experiment))
    experiment.picture("costs", draw(shapes[-1]))


def draw(shape: Shape) -> plt.Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    dense = shape.kinds["dense"]
    for name, it in shape.kinds.items():
        look = dict(marker=".", label=name, linestyle="--" if name == "hash_moe" else "-")
        left.plot(LENGTHS, [it.prefill(n) / dense.prefill(n) for n in LENGTHS], **look)
        read = [shape.read(name, batch) / shape.read("dense", batch) for batch in BATCHES]
        right.plot(BATCHES, read, **look)
    left.set(xlabel="tokens of the prompt", ylabel="FLOPs of prefill, over the dense model's")
    right.set(xlabel="sequences in the batch", ylabel="parameters read in a step, over the dense's")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, None)
        axes.grid(alpha=0.3)
    right.legend(fontsize="small")
    figure.suptitle(shape.name, fontsize="medium")
    return figure
