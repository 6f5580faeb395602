"""What a model costs: FLOPs by length, parameters read by batch size, return on compute.

Counted, not timed, on outlines of models that hold no numbers: `Decoder.sizes` says what a token
multiplies, and attention is counted for the n (n + 1) / 2 pairs of tokens that see each other
(PyTorch's FLOP counter takes all n^2, a kernel that skips what is masked does not). A training step
counts as three forward passes. Return on compute is the accuracy of trained runs over their
training FLOPs, each kind at its best learning rate, over the dense model's.

Deliberately simple: batches are independent draws of tokens by their frequency, in the training
text, or by Zipf's law for the published shape; moe's router spreads its load evenly.
"""

import numpy as np

from analysis.experiment import MAIN, Experiment, best_learning_rates, pick, spread
from config import ModelConfig
from model import Decoder, outline
from training.batches import open_tokens, read_meta
from training.records import markdown, plt, read_run
from training.settings import Settings

COUNTED = (*MAIN, "moe", "hash_moe")
LENGTHS = [2**n for n in range(7, 18)]
BATCHES = [2**n for n in range(10)]
SHOWN = (1, 32, 512)  # of these batches in tables
# Llama 3.2 1B's (Meta, 2024).
PUBLISHED = dict(
    vocab_size=128_256, n_layer=16, n_embd=2048, d_ff=8192, n_head=32, n_kv_head=8, tie_head=True
)
PAPER = {"dense": "1.00", "STEM, third": "1.08", "STEM, half": "1.20", "STEM, all": "1.33"}


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

    def params_read_per_step(
        self, batch: int, distinct: float, experts: float | None = None
    ) -> float:
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
    hash_moe: each distinct token one of each segment's, of which there are top_k."""
    choices = batch if config.ffn == "moe" else distinct
    return config.n_expert * (1 - (1 - config.top_k / config.n_expert) ** choices)


def compare(
    title: str, shape: dict[str, int], p: np.ndarray, lengths: tuple[int, ...]
) -> tuple[dict[str, Costs], dict[int, float]]:
    """Print what kinds of one shape cost, in brackets over the dense model's. p [V]: how often
    tokens occur. Returns the costs, and how many distinct tokens a batch of each size has."""
    kinds = {k: Costs(ModelConfig(**shape, **flags)) for k, flags in pick(*COUNTED).items()}
    distinct = {batch: expected_distinct(p, batch) for batch in BATCHES}
    columns = {"million multiplied in FFN": {name: it.ffn / 1e6 for name, it in kinds.items()}}
    for n in lengths:
        columns[f"GFLOP of {n:,} tokens"] = {k: it.prefill(n) / 1e9 for k, it in kinds.items()}
    for batch in SHOWN:
        read = {k: it.params_read_per_step(batch, distinct[batch]) for k, it in kinds.items()}
        columns[f"million read, batch {batch}"] = {k: count / 1e6 for k, count in read.items()}
    rows = []
    for name, it in kinds.items():
        row = {title: name, "million parameters": f"{it.sizes['total'] / 1e6:,.1f}"}
        for what, by_kind in columns.items():
            row[what] = f"{by_kind[name]:,.2f} ({by_kind[name] / by_kind['dense']:.2f})"
        rows.append(row | {"cache, KiB a token": f"{it.cache(1) / 1024:g}"})
    print(markdown(rows) + "\n")
    return kinds, distinct


def returns(experiment: Experiment) -> str:
    """Accuracy over training FLOPs of trained runs, and that over the mean of dense ones."""
    measured: dict[str, list[dict[str, float]]] = {}
    groups = experiment.train(best_learning_rates(experiment, pick(*MAIN)))
    for name, folders in groups.items():
        for run in map(read_run, folders):
            settings = Settings.of(run["run"][-1]["args"])
            sequences = settings.max_iters * settings.batch_size
            flops = sequences * Costs(settings.model).training(settings.model.block_size)
            figures = {"exp(-val loss)": float(np.exp(-run["eval"][-1]["val_loss"]))}
            if run["recall"]:  # else another corpus
                figures = {"capitals recalled": run["recall"][-1]["recall"], **figures}
            measured.setdefault(name, []).append({"flops": flops, **figures})
    rows, dense = [], measured["dense"]
    for name, runs in measured.items():
        row = {"trained": name, "FLOPs of dense": f"{runs[0]['flops'] / dense[0]['flops']:.3f}"}
        for what in list(dense[0])[1:]:
            base = np.mean([run[what] / run["flops"] for run in dense])
            row[what] = spread(".3f", (run[what] for run in runs))
            paid = (float(run[what] / run["flops"] / base) if base else None for run in runs)
            row[f"return by {what}"] = spread(".2f", paid)
        rows.append(row | {"return in the paper": PAPER.get(name, "")})
    return markdown(rows)


def costs(experiment: Experiment) -> None:
    ((folder,),) = experiment.train(pick("dense"), experiment.numbers[:1]).values()
    config = Settings.of(read_run(folder)["run"][-1]["args"]).model
    names = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_kv_head", "d_ff")
    small = {name: getattr(config, name) for name in names}
    ids = open_tokens(experiment.data_dir, "train", read_meta(experiment.data_dir))
    p = np.bincount(ids, minlength=config.vocab_size) / len(ids)
    lengths = (config.block_size // 8, config.block_size)
    compare(f"{config.n_layer} x {config.n_embd}, as trained", small, p, lengths)
    zipf = 1 / np.arange(1, PUBLISHED["vocab_size"] + 1)
    title, lengths = "16 x 2,048, as Llama 3.2 1B", (128, 8192, 131072)
    kinds, distinct = compare(title, PUBLISHED, zipf / zipf.sum(), lengths)
    print(returns(experiment))

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    dense = kinds["dense"]
    for name, it in kinds.items():
        look = dict(marker=".", label=name, linestyle="--" if name == "hash_moe" else "-")
        left.plot(LENGTHS, [it.prefill(n) / dense.prefill(n) for n in LENGTHS], **look)
        read, whole = (
            np.array([each.params_read_per_step(batch, distinct[batch]) for batch in BATCHES])
            for each in (it, dense)
        )
        right.plot(BATCHES, read / whole, **look)
    left.set(xlabel="tokens of the prompt", ylabel="FLOPs of prefill, over the dense model's")
    right.set(xlabel="sequences in the batch", ylabel="parameters read in a step, over the dense's")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, None)
        axes.grid(alpha=0.3)
    right.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    experiment.picture("costs", figure)
