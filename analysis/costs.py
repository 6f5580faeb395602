"""What a model costs: FLOPs by length, parameters read by batch size, return on compute.

Counted, not timed, on outlines of models that hold no numbers: `Decoder.sizes` says what a token
multiplies, and attention is counted for the n (n + 1) / 2 pairs of tokens that see each other
(PyTorch's FLOP counter takes all n^2). A training step counts as three forward passes. Batches are
independent draws of tokens by their frequency, in the training text, or by Zipf's law for the
published shape; moe's router spreads its load evenly.
"""

import numpy as np

from analysis.experiment import MAIN, Experiment, best_learning_rates, pick, spread
from config import ModelConfig
from model import Decoder, outline
from training.batches import open_tokens, read_meta
from training.records import markdown, plt, read_run
from training.settings import PRESETS, Settings

COUNTED = (*MAIN, "moe", "hash_moe")
LENGTHS = [2**n for n in range(7, 18)]
BATCHES = [2**n for n in range(10)]
SMALL = {name: PRESETS["countries"][name] for name in ("n_layer", "n_head", "n_embd")}
# Llama 3.2 1B's (Meta, 2024), and its vocabulary.
PUBLISHED = dict(n_layer=16, n_embd=2048, d_ff=8192, n_head=32, n_kv_head=8, tie_head=True)
VOCAB = 128_256
PAPER = {"dense": "1.00", "STEM, third": "1.08", "STEM, half": "1.20", "STEM, all": "1.33"}


class Costs:
    def __init__(self, config: ModelConfig) -> None:
        with outline():
            model = Decoder(config)
        self.config, self.sizes = config, model.sizes()
        self.key, self.head = self.sizes["flops_per_key"], 2 * model.head_weight.numel()
        self.layers = self.sizes["flops_per_token"] - self.key * config.block_size // 2 - self.head
        # What one more distinct token reads: its rows, and its embedding unless all is read anyway.
        self.rows = len(model.tables.weight) * model.tables.width
        self.rows += 0 if config.tie_head else config.n_embd
        self.idle = sum(getattr(block.ffn, "idle", 0) for block in model.blocks)
        weights = [p.numel() for b in model.blocks for p in b.ffn.parameters() if p.dim() == 2]
        self.ffn = sum(weights) - self.idle

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
        n, top_k = self.config.n_expert, self.config.top_k
        experts = expected_experts(self.config, batch, distinct)
        more = self.rows * (distinct - 1) + self.idle * (experts - top_k) / (n - top_k)
        return self.sizes["active"] + more


def expected_distinct(p: np.ndarray, batch: int) -> float:
    """How many distinct tokens a batch of independent ones has on average; p [V] sums up to 1."""
    return float(-np.expm1(batch * np.log1p(-np.minimum(p, 1 - 1e-12))).sum())


def expected_experts(config: ModelConfig, batch: int, distinct: float) -> float:
    """How many experts of a layer a batch wants on average. moe: each token top_k at random;
    hash_moe: each distinct token one of each segment's, of which there are top_k."""
    choices = batch if config.ffn == "moe" else distinct
    return config.n_expert * (1 - (1 - config.top_k / config.n_expert) ** choices)


def compare(title: str, shape: dict[str, int], p: np.ndarray) -> dict[str, tuple]:
    """Print what kinds of one shape cost, in brackets over dense. p [V]: how often tokens occur.
    Returns the costs, and the parameters that a batch of each size of BATCHES reads."""
    shape = dict(shape, vocab_size=len(p))
    kinds = {k: Costs(ModelConfig(**shape, **flags)) for k, flags in pick(*COUNTED).items()}
    distinct = [expected_distinct(p, batch) for batch in BATCHES]
    rows, dense, result = [], None, {}
    for name, it in kinds.items():
        figures = {"million multiplied in FFN": it.ffn / 1e6}
        figures |= {f"GFLOP of {n:,} tokens": it.prefill(n) / 1e9 for n in (128, 8192, 131_072)}
        read = [it.params_read_per_step(*each) for each in zip(BATCHES, distinct, strict=True)]
        figures |= {f"million read, batch {n}": read[BATCHES.index(n)] / 1e6 for n in (1, 32, 512)}
        result[name] = it, np.array(read)
        dense = dense or figures
        row = {title: name, "million parameters": f"{it.sizes['total'] / 1e6:,.1f}"}
        row |= {what: f"{x:,.2f} ({x / dense[what]:.2f})" for what, x in figures.items()}
        rows.append(row)
    print(markdown(rows) + "\n")
    return result


def returns(experiment: Experiment) -> str:
    """Accuracy over training FLOPs of trained runs, and that over the mean of dense ones."""
    rows, dense = [], None
    groups = experiment.train(best_learning_rates(experiment, pick(*MAIN)))
    for name, runs in groups.items():
        runs = [read_run(folder) for folder in runs]
        settings = Settings.of(runs[0]["run"][-1]["args"])
        sequences = settings.max_iters * settings.batch_size
        flops = sequences * Costs(settings.model).training(settings.model.block_size)
        accuracies = {  # no recall: another corpus
            "capitals recalled": [each["recall"] for run in runs for each in run["recall"][-1:]],
            "exp(-val loss)": [np.exp(-run["eval"][-1]["val_loss"]) for run in runs],
        }
        dense = dense or {"flops": flops} | {k: np.mean(x or 0) for k, x in accuracies.items()}
        row = {"trained": name, "FLOPs of dense": f"{flops / dense['flops']:.3f}"}
        for what, shares in accuracies.items():
            base = dense[what] * flops / dense["flops"]
            row[what] = spread(".3f", shares)
            row[f"return by {what}"] = spread(".2f", (x / base for x in shares if base))
        rows.append(row | {"return in the paper": PAPER.get(name, "")})
    return markdown(rows)


def costs(experiment: Experiment) -> None:
    meta = read_meta(experiment.data_dir)
    ids = open_tokens(experiment.data_dir, "train", meta)
    p = np.bincount(ids, minlength=meta["vocab_size"]) / len(ids)
    compare("6 x 128, as trained", SMALL, p)
    zipf, title = 1 / np.arange(1, VOCAB + 1), "16 x 2,048, as Llama 3.2 1B"
    kinds = compare(title, PUBLISHED, zipf / zipf.sum())
    print(returns(experiment))

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))
    dense, dense_read = kinds["dense"]
    for name, (it, read) in kinds.items():
        look = dict(marker=".", label=name, linestyle="--" if name == "hash_moe" else "-")
        left.plot(LENGTHS, [it.prefill(n) / dense.prefill(n) for n in LENGTHS], **look)
        right.plot(BATCHES, read / dense_read, **look)
    left.set(xlabel="tokens of the prompt", ylabel="FLOPs of prefill, over the dense model's")
    right.set(xlabel="sequences in the batch", ylabel="parameters read in a step, over the dense's")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_ylim(0)
    right.legend(fontsize="small")
    figure.suptitle(title)
    experiment.picture("costs", figure)
