"""The shape of a decoder: what the modules of model.py and the layers are built from.

A setting of your own is a field here, with a default, which older checkpoints then have. `flag`
makes it a flag of train.py, too.
"""

from dataclasses import dataclass, field

from common import check_ranges, flag

SHARE, POSITIVE = dict(must="0 or more and below 1"), dict(must="a positive number")
SIZE = dict(must="at least 1", most=2**20)  # above it is absurd, and would only fill the memory
KINDS = "dense stem embformer moe hash_moe pkm deepembed ple"  # of model.LAYERS
TABLES = "stem embformer deepembed ple"  # those that have tables
ACTS = ("silu", "identity")


@dataclass
class ModelConfig:
    """Shape of a decoder. Fields left at None get the default named beside them. ValueError: names
    a field, its value and what would be valid."""

    vocab_size: int = field(default=6400, metadata=dict(must="at least 1"))
    block_size: int = flag(256, "context length in tokens", shown="the preset's", **SIZE)
    n_layer: int = flag(6, "number of layers", shown="the preset's", must="at least 1", most=1024)
    n_head: int = flag(6, "number of attention heads", shown="the preset's", **SIZE)
    n_embd: int = flag(192, "width of the residual stream", shown="the preset's", **SIZE)
    n_kv_head: int | None = flag(None, "key-value heads, fewer for groups", shown="n_head", **SIZE)
    d_ff: int | None = flag(
        None, "FFN width", shown="8/3 n_embd, in 64s", only=KINDS.replace("embformer", ""), **SIZE
    )
    ffn: str = flag("stem", f"what layers are made of: {KINDS}")
    stem_layers: str = flag("third", "third, half, all or 0,2,5", shown="by preset", only="stem")
    attention: str = flag("full", "full, window, count, or in turn: window,window,count")
    window: int = flag(128, "tokens that a token sees in a window, itself included", **SIZE)
    previous_heads: int = flag(0, "read the token before", must="0 or more", only="embformer")
    embformer_act: str = flag("silu", "identity: as in the note", choices=ACTS, only="embformer")
    n_expert: int = flag(16, "experts of moe and hash_moe in a layer", only="moe hash_moe", **SIZE)
    top_k: int | None = flag(None, "experts or values (4; pkm 16)", only="moe hash_moe pkm", **SIZE)
    balance: float = flag(0.01, "weight of moe's load-balancing loss", must="0 or more", only="moe")
    n_key: int = flag(64, "keys in each half of pkm; squared: its values", only="pkm", **SIZE)
    ple_width: int | None = flag(None, "width of rows", shown="n_embd / 8", only="ple", **SIZE)
    tie_head: bool | None = flag(None, "head = input embedding", shown="embformer, and by preset")
    dropout: float = flag(0.0, "share of activations left out", shown="0", **SHARE)
    rope_base: float = flag(10000.0, "base of the rotary positions", **POSITIVE)
    rope_scaling: list[float] | None = None  # see attention.rotary
    norm_eps: float = flag(1e-6, "epsilon of the norms", **POSITIVE)
    # See Decoder.init_weights for both.
    init_std: float | None = flag(
        None, "std of new dense weights", shown="1 / sqrt(n_embd), embformer 0.02", **POSITIVE
    )
    table_std: float = flag(0.02, "std of new table rows", only=TABLES, **POSITIVE)

    def __post_init__(self) -> None:
        check_ranges(self, ValueError, "{}={}")
        n_embd, n_head = self.n_embd, self.n_head
        self.n_kv_head = self.n_kv_head or n_head
        self.d_ff = self.d_ff or -(-8 * n_embd // 3 // 64) * 64
        self.top_k = self.top_k or (16 if self.ffn == "pkm" else 4)
        self.ple_width = self.ple_width or max(1, n_embd // 8)
        # As docs/results.md measures. Of two digits, which one can type: 0.072 for 192.
        root = float(f"{n_embd**-0.5:.2g}")
        self.init_std = self.init_std or (0.02 if self.embedding_only else root)
        if self.tie_head is None:
            self.tie_head = self.embedding_only
        if n_embd % (2 * n_head):  # heads share channels, positions rotate pairs of them
            raise ValueError(f"{n_embd=} must be a multiple of 2 * n_head={2 * n_head}")
        if n_head % self.n_kv_head:
            raise ValueError(f"{n_head=} must be a multiple of n_kv_head={self.n_kv_head}")
        if self.embedding_only and not self.tie_head:
            raise ValueError("tie_head=False: Embformer has no linear layers, such as a head")
        if self.ffn == "stem":
            stem_layers(self.stem_layers, self.n_layer)
        kinds = self.attention.split(",")
        self.attention_kinds = [kinds[layer % len(kinds)] for layer in range(self.n_layer)]
        if {*kinds} - {"full", "window", "count"}:
            raise ValueError(f"attention={self.attention!r} must be of full, window and count")
        if "count" in kinds and (self.previous_heads or not self.embedding_only):
            raise ValueError("attention: count needs ffn='embformer' and previous_heads=0")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def embedding_only(self) -> bool:
        """Every parameter sits in an embedding: no output projection, no learned norm scale."""
        return self.ffn == "embformer"

    def layer_kind(self, layer: int) -> str:
        """The key of model.LAYERS that layer number `layer` is built from."""
        if self.ffn == "stem" and layer not in stem_layers(self.stem_layers, self.n_layer):
            return "dense"
        return self.ffn


def stem_layers(spec: str, n_layer: int) -> list[int]:
    """Which layers of a STEM model have a table: `third` (1, 4, 7, ...), `half` (1, 3, 5, ...),
    `all` (but the first, as in the authors' code), or numbers such as `0,2,5`. ValueError: the text
    is none of these, or selects no layer or one that does not exist."""
    named = {"third": range(1, n_layer, 3), "half": range(1, n_layer, 2), "all": range(1, n_layer)}
    try:
        layers = named[spec] if spec in named else sorted({int(part) for part in spec.split(",")})
    except ValueError:
        layers = []
    if not layers or layers[0] < 0 or layers[-1] >= n_layer:
        allowed = f"third, half, all or numbers of layers from 0 to {n_layer - 1}"
        raise ValueError(f"stem_layers={spec!r} must be {allowed}")
    return list(layers)
