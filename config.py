"""The shape of a decoder: what model.py and the layers are built from.

To add a setting, add a field with a default; older checkpoints then get the default. `flag`
makes it a flag of train.py, too.
"""

import math
from dataclasses import dataclass, field

from common import UserError, check_ranges, flag

# Ranges of values (common.RANGES).
SHARE = dict(must="0 or more and below 1")
POSITIVE = dict(must="a positive number")
SIZE = dict(must="at least 1", most=2**20)  # above it is absurd, and would only fill the memory

KINDS = "dense stem embformer moe hash_moe pkm deepembed ple engram bigram value"  # model.LAYERS
TABLES = "stem embformer deepembed ple engram bigram value"  # those that have tables
NGRAMS = "engram bigram"  # those whose rows belong to n-grams
HIDDEN = KINDS.replace("embformer", "")  # those whose FFN has hidden units
ACTS = ("silu", "identity")


@dataclass
class ModelConfig:
    """Shape of a decoder. Fields left at None get the default named beside them. UserError: names
    a field as a flag, its value and what would be valid."""

    vocab_size: int = field(default=6400, metadata=dict(must="at least 1"))
    block_size: int = flag(256, "context length in tokens", shown="the preset's", **SIZE)
    n_layer: int = flag(6, "number of layers", shown="the preset's", must="at least 1", most=1024)
    n_head: int = flag(6, "number of attention heads", shown="the preset's", **SIZE)
    n_embd: int = flag(192, "width of the residual stream", shown="the preset's", **SIZE)
    n_kv_head: int | None = flag(
        None,
        "number of key-value heads; fewer than n_head: grouped queries",
        shown="n_head",
        **SIZE,
    )
    d_ff: int | None = flag(
        None, "hidden units of an FFN", shown="8/3 n_embd, rounded up to 64s", only=HIDDEN, **SIZE
    )
    ffn: str = flag("stem", f"kind of layers: {KINDS}")
    stem_layers: str = flag(
        "third", "layers with a table: third, half, all or 0,2,5", shown="by preset", only="stem"
    )
    attention: str = flag("full", "full or window; window,window,full: layer by layer, repeated")
    window: int = flag(128, "tokens that a token in a window sees, itself included", **SIZE)
    previous_heads: int = flag(
        0, "key heads that use the previous token's key", must="0 or more", only="embformer"
    )
    embformer_act: str = flag(
        "silu", "activation; identity: as in Wu's note", choices=ACTS, only="embformer"
    )
    n_expert: int = flag(16, "experts in a layer", only="moe hash_moe", **SIZE)
    top_k: int | None = flag(
        None,
        "experts or values per token",
        shown="4, pkm 16 per head",
        only="moe hash_moe pkm",
        **SIZE,
    )
    balance: float = flag(0.01, "weight of moe's load-balancing loss", must="0 or more", only="moe")
    n_key: int = flag(64, "keys per half; pkm has n_key^2 values", only="pkm", **SIZE)
    ple_width: int | None = flag(None, "width of rows", shown="n_embd / 8", only="ple", **SIZE)
    ngram_orders: str | None = flag(
        None, "lengths of n-grams that have rows", shown="2,3; bigram: 2", only=NGRAMS
    )
    ngram_heads: int | None = flag(
        None, "rows that an n-gram of each length reads", shown="4; bigram: 1", only=NGRAMS, **SIZE
    )
    ngram_rows: int = flag(
        2**15, "rows of each head, up to the next prime; 1: one for all", only=NGRAMS, **SIZE
    )
    ngram_layers: str | None = flag(
        None, "layers with rows, as in --stem_layers", shown="1; value: half", only="engram value"
    )
    tie_head: bool | None = flag(
        None, "head = input embedding", shown="true for embformer, else by preset"
    )
    dropout: float = flag(0.0, "dropout probability", shown="0", **SHARE)
    rope_base: float = flag(10000.0, "base of the rotary positions", **POSITIVE)
    rope_scaling: list[float] | None = None  # see attention.rotary
    norm_eps: float = flag(1e-6, "epsilon of the norms", **POSITIVE)
    # See Decoder.init_weights for both.
    init_std: float | None = flag(
        None, "std of new dense weights", shown="1 / sqrt(n_embd), embformer 0.02", **POSITIVE
    )
    table_std: float = flag(0.02, "std of new table rows", only=TABLES, **POSITIVE)

    def __post_init__(self) -> None:
        check_ranges(self)
        self.fill_in_defaults()
        n_embd, n_head, n_kv_head = self.n_embd, self.n_head, self.n_kv_head
        if n_embd % (2 * n_head) != 0:  # heads share channels, positions rotate pairs of them
            raise UserError(f"--n_embd {n_embd} must be a multiple of 2 * n_head, {2 * n_head}")
        if n_head % n_kv_head != 0:
            raise UserError(f"--n_head {n_head} must be a multiple of --n_kv_head {n_kv_head}")
        if self.previous_heads > n_kv_head:
            wrong = f"--previous_heads {self.previous_heads}"
            raise UserError(f"{wrong} is more than the model's {n_kv_head} key heads")
        if self.embedding_only and not self.tie_head:
            raise UserError("--no-tie_head: Embformer has no linear layers, such as a head")
        # The layers that have rows; the others are dense.
        self.row_layers = list(range(self.n_layer))
        if self.ffn == "stem":
            self.row_layers = chosen_layers("stem_layers", self.stem_layers, self.n_layer)
        elif self.ffn in ("engram", "value"):
            self.row_layers = chosen_layers("ngram_layers", self.ngram_layers, self.n_layer)
        kinds = self.attention.split(",")
        # The kind of each layer (model.ATTENTION).
        self.attention_kinds = [kinds[layer % len(kinds)] for layer in range(self.n_layer)]

    def fill_in_defaults(self) -> None:
        root = float(f"{self.n_embd**-0.5:.2g}")  # two digits, to be typed: 0.072 for 192
        defaults = {
            "n_kv_head": self.n_head,
            "d_ff": math.ceil(8 * self.n_embd / (3 * 64)) * 64,  # rounded up to a multiple of 64
            "top_k": 16 if self.ffn == "pkm" else 4,
            "ple_width": max(1, self.n_embd // 8),
            "ngram_orders": "2" if self.ffn == "bigram" else "2,3",
            "ngram_heads": 1 if self.ffn == "bigram" else 4,
            "ngram_layers": "half" if self.ffn == "value" else "1",
            "tie_head": self.embedding_only,
            "init_std": 0.02 if self.embedding_only else root,  # as docs/results.md measures
        }
        for name, default in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, default)

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def embedding_only(self) -> bool:
        """Every parameter sits in an embedding: no output projection, no learned norm scale."""
        return self.ffn == "embformer"

    def layer_kind(self, layer: int) -> str:
        """The key of model.LAYERS that layer number `layer` is built from."""
        return self.ffn if layer in self.row_layers else "dense"


def chosen_layers(name: str, spec: str, n_layer: int) -> list[int]:
    """The layers that the flag `name` selects: `third` (1, 4, 7, ...), `half` (1, 3, 5, ...), `all`
    (but the first, as in the code of STEM's authors), or numbers such as `0,2,5`. UserError: the
    text is none of these, or selects no layer or one that does not exist."""
    steps = {"third": 3, "half": 2, "all": 1}
    if spec in steps:
        layers = list(range(1, n_layer, steps[spec]))
    else:
        try:
            layers = sorted({int(number) for number in spec.split(",")})
        except ValueError:
            layers = []
    if not layers or layers[0] < 0 or layers[-1] >= n_layer:
        allowed = f"third, half, all or numbers of layers from 0 to {n_layer - 1}"
        raise UserError(f"--{name} {spec} must be {allowed} (words leave out the first layer)")
    return layers
