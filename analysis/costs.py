"""What a model costs: FLOPs by length, parameters read by batch size, return on compute.

Counted, not timed, on models without numbers: `Decoder.sizes` says what a token multiplies, and
attention is counted for the n (n + 1) / 2 pairs of tokens that see each other (PyTorch's FLOP
counter takes all n^2). A training step counts as three forward passes. Batches are independent
draws of tokens by their frequency, in the training text, or by Zipf's law for the published shape;
moe's router spreads its load evenly.
"""

import numpy as np
import torch

from analysis.experiment import MAIN, Experiment, Run, best_learning_rates, pick
from analysis.pictures import markdown, plt, spread
from config import ModelConfig
from model import Decoder
from text.dataset import open_tokens, read_meta
from training.settings import PRESETS, Settings

COUNTED = (*MAIN, "moe", "hash_moe")
LENGTHS = [2**n for n in range(7, 18)]
BATCHES = [2**n for n in range(10)]
SMALL = {name: PRESETS["countries"][name] for name in ("n_layer", "n_head", "n_embd")}
# Llama 3.2 1B's (Meta, 2024), and its vocabulary.
PUBLISHED = {
    "n_layer": 16,
    "n_embd": 2048,
    "d_ff": 8192,
    "n_head": 32,
    "n_kv_head": 8,
    "tie_head": True,
}
VOCAB = 128_256
PAPER = {"dense": "1.00", "STEM, third": "1.08", "STEM, half": "1.20", "STEM, all": "1.33"}


class Costs:
    """What a model of some shape costs."""

    def __init__(self, config: ModelConfig) -> None:
        with torch.device("meta"):  # shapes, but no numbers
            model = Decoder(config)
        self.config = config
        self.sizes = model.sizes()
        # FLOPs for one token: of attention to another one, of the head, and of all else.
        self.key = self.sizes["flops_per_key"]
        self.head = 2 * model.head_weight.numel()
        self.layers = self.sizes["flops_per_token"] - self.key * config.block_size // 2 - self.head
        # What one more distinct token reads: its rows, and its embedding unless all is read anyway.
        self.rows = len(model.tables.weight) * model.tables.width
        if not config.tie_head:
            self.rows += config.n_embd
        # Parameters of experts that a token does not choose, and of FFNs that it multiplies.
        self.idle = sum(getattr(block.ffn, "idle", 0) for block in model.blocks)
        self.ffn = -self.idle
        for block in model.blocks:
            self.ffn += sum(p.numel() for p in block.ffn.parameters() if p.dim() == 2)

    def flops(self, tokens: int, pairs: int, logits: int) -> int:
        """Of a forward pass in which so many pairs of tokens see each other, and the head gives
        logits for so many tokens."""
        return self.layers * tokens + self.head * logits + self.key * pairs

    def prefill(self, n: int) -> int:
        """FLOPs of reading a prompt of n tokens."""
        return self.flops(n, n * (n + 1) // 2, logits=1)

    def training(self, n: int) -> int:
        """FLOPs of learning from a sequence of n tokens."""
        return 3 * self.flops(n, n * (n + 1) // 2, logits=n)

    def params_read_per_step(self, batch: int, distinct: float) -> float:
        """Parameters that a step of decoding reads for a batch with so many distinct tokens."""
        read = self.sizes["active"] + self.rows * (distinct - 1)
        if self.idle:
            n_expert, top_k = self.config.n_expert, self.config.top_k
            more = expected_experts(self.config, batch, distinct) - top_k
            read += self.idle * more / (n_expert - top_k)
        return read


def expected_distinct(p: np.ndarray, batch: int) -> float:
    """How many distinct tokens a batch of independent ones has on average; p [V] sums up to 1."""
    return float(-np.expm1(batch * np.log1p(-np.minimum(p, 1 - 1e-12))).sum())


def expected_experts(config: ModelConfig, batch: int, distinct: float) -> float:
    """How many experts of a layer a batch wants on average. moe: each token top_k at random;
    hash_moe: each distinct token one of each segment's, of which there are top_k."""
    choices = batch if config.ffn == "moe" else distinct
    return config.n_expert * (1 - (1 - config.top_k / config.n_expert) ** choices)


def compare(title: str, kinds: dict[str, Costs], distinct: list[float]) -> str:
    """A table of what kinds of one shape cost, in brackets over the first one's; `distinct` is the
    number of distinct tokens in a batch of each size of BATCHES."""
    rows = []
    first = None
    for name, costs in kinds.items():
        figures = {"million multiplied in FFN": costs.ffn / 1e6}
        for n in (128, 8192, 131_072):
            figures[f"GFLOP of {n:,} tokens"] = costs.prefill(n) / 1e9
        for batch in (1, 32, 512):
            read = costs.params_read_per_step(batch, distinct[BATCHES.index(batch)])
            figures[f"million read, batch {batch}"] = read / 1e6
        first = first or figures
        row = {title: name, "million parameters": f"{costs.sizes['total'] / 1e6:,.1f}"}
        for column, figure in figures.items():
            row[column] = f"{figure:,.2f} ({figure / first[column]:.2f})"
        rows.append(row)
    return markdown(rows)


def costs_of_kinds(shape: dict[str, int], vocab_size: int) -> dict[str, Costs]:
    configs = {}
    for name, flags in pick(*COUNTED).items():
        configs[name] = ModelConfig(vocab_size=vocab_size, **shape, **flags)
    return {name: Costs(config) for name, config in configs.items()}


def returns(experiment: Experiment) -> str:
    """Accuracy over training FLOPs of trained runs, and that over the mean of dense ones."""
    names = ("dense", "STEM, all") if experiment.quick else MAIN
    groups = experiment.train_and_read(best_learning_rates(experiment, pick(*names)))
    dense_flops = training_flops(groups["dense"][0])
    dense_accuracy = {name: np.mean(found) for name, found in accuracies(groups["dense"]).items()}
    rows = []
    for name, runs in groups.items():
        flops = training_flops(runs[0]) / dense_flops
        row = {"trained": name, "FLOPs of dense": f"{flops:.3f}"}
        for measure, found in accuracies(runs).items():
            base = dense_accuracy[measure] * flops
            row[measure] = spread(".3f", found)
            row[f"return by {measure}"] = spread(".2f", [x / base for x in found if base])
        row["return in the paper"] = PAPER.get(name, "")
        rows.append(row)
    return markdown(rows)


def training_flops(run: Run) -> int:
    settings = Settings.from_flat(run["run"][-1]["args"])
    sequences = settings.max_iters * settings.batch_size
    return sequences * Costs(settings.model).training(settings.model.block_size)


def accuracies(runs: list[Run]) -> dict[str, list[float]]:
    found = {"exp(-val loss)": [np.exp(-run["eval"][-1]["val_loss"]) for run in runs]}
    recalls = [run["recall"][-1]["recall"] for run in runs if run["recall"]]
    if recalls:  # on another corpus nothing is asked
        found = {"capitals recalled": recalls, **found}
    return found


def costs(experiment: Experiment) -> None:
    meta = read_meta(experiment.data_dir)
    ids = open_tokens(experiment.data_dir, "train", meta)
    frequency = np.bincount(ids, minlength=meta["vocab_size"]) / len(ids)
    distinct = [expected_distinct(frequency, batch) for batch in BATCHES]
    small = costs_of_kinds(SMALL, meta["vocab_size"])
    print(compare("6 x 128, as trained", small, distinct) + "\n")

    title = "16 x 2,048, as Llama 3.2 1B"
    zipf = 1 / np.arange(1, VOCAB + 1)
    distinct = [expected_distinct(zipf / zipf.sum(), batch) for batch in BATCHES]
    kinds = costs_of_kinds(PUBLISHED, VOCAB)
    print(compare(title, kinds, distinct) + "\n")
    print(returns(experiment))
    draw(experiment, title, kinds, distinct)


def draw(experiment: Experiment, title: str, kinds: dict[str, Costs], distinct: list) -> None:
    """FLOPs by length and parameters read by batch size, over the dense model's."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))
    dense = kinds["dense"]
    for name, costs in kinds.items():
        line = "--" if name == "hash_moe" else "-"
        flops = [costs.prefill(n) / dense.prefill(n) for n in LENGTHS]
        left.plot(LENGTHS, flops, line, marker=".", label=name)
        read = []
        for batch in zip(BATCHES, distinct, strict=True):
            read.append(costs.params_read_per_step(*batch) / dense.params_read_per_step(*batch))
        right.plot(BATCHES, read, line, marker=".", label=name)
    left.set(xlabel="tokens of the prompt", ylabel="FLOPs of prefill, over the dense model's")
    right.set(xlabel="sequences in the batch", ylabel="parameters read in a step, over the dense's")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_ylim(0)
    right.legend(fontsize="small")
    figure.suptitle(title)
    experiment.picture("costs", figure)
