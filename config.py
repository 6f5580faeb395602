"""The shape of a decoder: what the modules of model.py, stem.py and embformer.py are built from.

A setting of your own is a field here, with a default, which older checkpoints then have.
"""

from dataclasses import dataclass


@dataclass
class ModelConfig:
    """Shape of a decoder. Fields left at None get the default named beside them.

    Raises:
        ValueError: naming the field, its value and what would be valid.
    """

    vocab_size: int = 6400
    block_size: int = 256  # context length
    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 192
    n_kv_head: int | None = None  # n_head; fewer: grouped-query attention
    d_ff: int | None = None  # 8/3 n_embd, rounded up to a multiple of 64
    ffn: str = "stem"  # dense, stem, embformer: a key of model.LAYERS
    stem_layers: str = "third"  # third, half, all or 0,2,5
    embformer_act: str = "silu"  # silu (the authors' code) or identity (the note)
    tie_head: bool | None = None  # True for embformer, False otherwise
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    init_std: float = 0.02  # of dense weights and the embedding
    table_std: float = 0.02  # of table rows; see Decoder.init_weights for both

    def __post_init__(self) -> None:
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.d_ff is None:
            self.d_ff = -(-8 * self.n_embd // 3 // 64) * 64
        if self.tie_head is None:
            self.tie_head = self.embedding_only
        for name in (
            "vocab_size",
            "block_size",
            "n_layer",
            "n_head",
            "n_embd",
            "n_kv_head",
            "d_ff",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
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
        for name in ("rope_base", "norm_eps", "init_std", "table_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
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
    if spec in named:
        layers = list(named[spec])
        if not layers:
            raise ValueError(
                f"stem_layers={spec!r} selects no layer of {n_layer}: use stem_layers=0"
            )
        return layers
    try:
        layers = sorted({int(part) for part in spec.split(",")})
    except ValueError:
        raise ValueError(
            f"stem_layers={spec!r} is not third, half, all or layer numbers such as 0,2,5"
        ) from None
    if layers[0] < 0 or layers[-1] >= n_layer:
        raise ValueError(f"stem_layers={spec!r}: the model has layers 0 to {n_layer - 1}")
    return layers
