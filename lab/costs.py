"""What a model costs: FLOPs by length, parameters read by batch size, return on compute.

Counted, not timed, on models without numbers: `model_sizes` says what a token multiplies, and
attention is counted for the n (n + 1) / 2 pairs of tokens that see each other (PyTorch's FLOP
counter takes all n^2). Batches are independent draws of tokens by their frequency, in the training
text, or by Zipf's law for the published shape.
"""

import numpy as np
import torch

from lab.experiment import MAIN, Experiment, best_learning_rates, last_eval, last_start
from lab.pictures import interval, markdown
from model import Decoder, ModelConfig
from text.dataset import open_tokens, read_meta
from training.records import read_run
from training.report import model_sizes

LENGTHS = (128, 8192, 131_072)
BATCHES = (1, 32, 512)
SMALL = {"n_layer": 6, "n_head": 4, "n_embd": 128}
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


class Costs:
    """What a model of some shape costs."""

    def __init__(self, config: ModelConfig) -> None:
        with torch.device("meta"):  # shapes, but no numbers
            model = Decoder(config)
        self.sizes = model_sizes(model)
        # FLOPs for one token: of attention to another one (q k, and its weight times v), of the
        # head, and of all else.
        self.key = 4 * config.n_head * config.head_dim * config.n_layer
        self.head = 2 * model.head_weight.numel()
        self.layers = self.sizes["flops_per_token"] - self.key * config.block_size // 2 - self.head
        # What one more distinct token reads: its rows, and its embedding unless all is read anyway.
        self.rows = len(model.tables.weight) * model.tables.width
        if not config.tie_head:
            self.rows += config.n_embd
        self.ffn = 0  # parameters that FFNs multiply
        for block in model.blocks:
            self.ffn += sum(p.numel() for p in block.ffn.parameters())

    def flops(self, n: int, logits: int) -> int:
        """Of a forward pass of n tokens, where the head gives so many of them logits."""
        return self.layers * n + self.head * logits + self.key * n * (n + 1) // 2

    def params_read(self, distinct: float) -> float:
        """Parameters that a step reads for a batch with so many distinct tokens."""
        return self.sizes["active"] + self.rows * (distinct - 1)


def expected_distinct(p: np.ndarray, batch: int) -> float:
    """How many distinct tokens a batch of independent ones has on average; p [V] sums up to 1."""
    return float(-np.expm1(batch * np.log1p(-np.minimum(p, 1 - 1e-12))).sum())


def compare(title: str, shape: dict[str, int], frequency: np.ndarray) -> str:
    """A table of what kinds of one shape cost, in brackets over the dense model's. Batches are
    drawn by the frequency [V] of tokens."""
    rows = []
    dense = None
    for name, flags in MAIN.items():
        costs = Costs(ModelConfig(vocab_size=len(frequency), **shape, **flags))
        figures = {"million multiplied in FFN": costs.ffn / 1e6}
        for n in LENGTHS:
            figures[f"GFLOP of {n:,} tokens"] = costs.flops(n, logits=1) / 1e9
        for batch in BATCHES:
            read = costs.params_read(expected_distinct(frequency, batch))
            figures[f"million read, batch {batch}"] = read / 1e6
        dense = dense or figures
        row = {title: name, "million parameters": f"{costs.sizes['total'] / 1e6:,.1f}"}
        for column, figure in figures.items():
            row[column] = f"{figure:,.2f} ({figure / dense[column]:.2f})"
        rows.append(row)
    return markdown(rows)


def relative(values: np.ndarray, dense: np.ndarray) -> np.ndarray:
    """Figures of which the mean is that of values over that of dense, [seeds] each. They spread as
    this ratio does between seeds, of which both vary (Cochran, Sampling Techniques)."""
    ratio = values.mean() / dense.mean()
    return ratio + (values - ratio * dense) / dense.mean()


def returns(experiment: Experiment) -> str:
    """Accuracy over training FLOPs of trained runs, relative to dense ones of the same seeds."""
    groups = experiment.train(best_learning_rates(experiment, MAIN))
    rows = []
    dense = None
    for name, folders in groups.items():
        runs = [read_run(folder) for folder in folders]
        flops = last_start(runs[0])["sizes"]["flops_per_token"]  # all runs read equally many
        recalls = []
        if all(run["recall"] for run in runs):
            recalls = [run["recall"][-1]["recall"] for run in runs]
        losses = [last_eval(run)["val_loss"] for run in runs]
        accuracies = {"recall": np.array(recalls), "exp(-val loss)": np.exp(-np.array(losses))}
        if dense is None:
            dense = accuracies
            dense_flops = flops
        row = {"trained": name, "FLOPs of dense": f"{flops / dense_flops:.3f}"}
        for measure, values in accuracies.items():
            row[measure] = interval(".3f", values)
            row[f"return by {measure}"] = ""
            # Not of text without questions, nor over a model without facts.
            if len(values) and dense[measure].any():
                over_dense = relative(values, dense[measure])
                row[f"return by {measure}"] = interval(".2f", over_dense * dense_flops / flops)
        rows.append(row)
    return markdown(rows)


def costs(experiment: Experiment) -> None:
    meta = read_meta(experiment.data_dir)
    ids = open_tokens(experiment.data_dir, "train", meta)
    frequency = np.bincount(ids, minlength=meta["vocab_size"]) / len(ids)
    print(compare("6 x 128, as trained", SMALL, frequency) + "\n")
    zipf = 1 / np.arange(1, VOCAB + 1)
    print(compare("16 x 2,048, as Llama 3.2 1B", PUBLISHED, zipf / zipf.sum()) + "\n")
    print(returns(experiment))
