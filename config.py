"""The shape of a decoder: what the modules of model.py and the layers are built from.

A setting of your own is a field here, with a default, which older checkpoints then have. `flag`
makes it a flag of train.py, too.
"""

from dataclasses import dataclass, field

from common import check_ranges, flag

SHARE, POSITIVE = dict(must="0 or more and below 1"), dict(must="a positive number")
SIZE = dict(must="at least 1", most=2**20)  # above it is absurd, and would only fill the memory
TABLES = "stem embformer deepembed ple"  # the kinds that have some


@dataclass
class ModelConfig:
    """Shape of a decoder. Fields left at None get the default named beside them.

    Raises:
        ValueError: naming the field, its value and what would be valid.
    """

    vocab_size: int = field(default=6400, metadata=dict(must="at least 1"))
    block_size: int = flag(256, "context length in tokens", shown="the preset's", **SIZE)
    n_layer: int = flag(6, "number of layers", shown="the preset's", must="at least 1", most=1024)
    n_head: int = flag(6, "number of attention heads", shown="the preset's", **SIZE)
    n_embd: int = flag(192, "width of the residual stream", shown="the preset's", **SIZE)
    n_kv_head: int | None = flag(
        None, "key-value heads; fewer than n_head groups queries", shown="n_head", **SIZE
    )
    d_ff: int | None = flag(
        None, "width of the FFN", shown="8/3 n_embd, rounded up to 64s", **SIZE,
        only="dense stem moe hash_moe pkm deepembed ple",
    )  # fmt: skip
    ffn: str = flag(
        "stem",
        "what layers are made of: dense, stem, embformer, moe, hash_moe, pkm, deepembed or ple",
    )
    stem_layers: str = flag(
        "third", "third, half, all (but layer 0) or 0,2,5", shown="all; third for prose",
        only="stem",
    )  # fmt: skip
    embformer_act: str = flag(
        "silu", "activation of its FFN: silu (the authors' code) or identity (the note)",
        choices=("silu", "identity"), only="embformer",
    )  # fmt: skip
    n_expert: int = flag(16, "experts of moe and hash_moe in a layer", only="moe hash_moe", **SIZE)
    top_k: int | None = flag(
        None, "experts that a token passes through, values of pkm for a head",
        shown="4; pkm: 16", only="moe hash_moe pkm", **SIZE,
    )  # fmt: skip
    balance: float = flag(
        0.01, "weight of the loss that spreads moe's load", must="0 or more", only="moe"
    )
    n_key: int = flag(64, "keys in each half of pkm; squared: its values", only="pkm", **SIZE)
    ple_width: int | None = flag(
        None, "numbers in ple rows", shown="n_embd / 8", only="ple", **SIZE
    )
    tie_head: bool | None = flag(None, "head = input embedding", shown="embformer, and by preset")
    dropout: float = flag(0.0, "share of activations left out", shown="0", **SHARE)
    rope_base: float = flag(10000.0, "base of the rotary positions", **POSITIVE)
    norm_eps: float = flag(1e-6, "epsilon of the norms", **POSITIVE)
    # See Decoder.init_weights for both.
    init_std: float | None = flag(
        None, "standard deviation of new dense weights and embeddings",
        shown="1 / sqrt(n_embd), embformer 0.02", **POSITIVE,
    )  # fmt: skip
    table_std: float = flag(0.02, "standard deviation of new table rows", only=TABLES, **POSITIVE)

    def __post_init__(self) -> None:
        check_ranges(self, ValueError, "{}={}")
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.d_ff is None:
            self.d_ff = -(-8 * self.n_embd // 3 // 64) * 64
        if self.top_k is None:
            self.top_k = 16 if self.ffn == "pkm" else 4
        if self.ple_width is None:
            self.ple_width = max(1, self.n_embd // 8)
        if self.init_std is None:
            # As docs/results.md measures. Of two digits, which one can type: 0.072 for 192.
            root = float(f"{self.n_embd**-0.5:.2g}")
            self.init_std = 0.02 if self.embedding_only else root
        if self.tie_head is None:
            self.tie_head = self.embedding_only
        if self.n_embd % (2 * self.n_head):
            raise ValueError(
                f"n_embd={self.n_embd} must be a multiple of 2 * n_head={2 * self.n_head}: "
                "heads share the channels, and rotary positions need an even head size"
            )
        if self.n_head % self.n_kv_head:
            raise ValueError(
                f"n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}"
            )
        if self.embedding_only and not self.tie_head:
            raise ValueError(
                "tie_head=False: a separate head is a linear layer, Embformer has none"
            )
        if self.embformer_act not in ("silu", "identity"):
            raise ValueError(f"embformer_act={self.embformer_act!r} is not silu or identity")
        if self.ffn == "stem":
            stem_layers(self.stem_layers, self.n_layer)

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
    """Which layers of a STEM model have a table.

    Args:
        spec: `third` (every third layer: 1, 4, 7, ...), `half` (1, 3, 5, ...), `all` (every layer
            but the first, as in the authors' code), or layer numbers such as `0,2,5`.
        n_layer: layers of the model.

    Raises:
        ValueError: the text is none of these, or names a layer that does not exist.
    """
    named = {"third": range(1, n_layer, 3), "half": range(1, n_layer, 2), "all": range(1, n_layer)}
    try:
        layers = named[spec] if spec in named else sorted({int(part) for part in spec.split(",")})
    except ValueError:
        raise ValueError(
            f"stem_layers={spec!r} is not third, half, all or layer numbers such as 0,2,5"
        ) from None
    if not layers:
        raise ValueError(f"stem_layers={spec!r} selects no layer of {n_layer}: use stem_layers=0")
    if layers[0] < 0 or layers[-1] >= n_layer:
        raise ValueError(f"stem_layers={spec!r}: the model has layers 0 to {n_layer - 1}")
    return list(layers)
