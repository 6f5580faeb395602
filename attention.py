"""Causal self-attention with rotary positions and grouped queries, and its cache for decoding.

A token attends to itself and to all tokens before it. Windows are in local_attention.py.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import ModelConfig


def rotary(n: int, config: ModelConfig, device: torch.device | str | None) -> Tensor:
    """Cosines and sines for `rotate` at positions 0 to n - 1, [2, n, 1, head_dim] (RoPE: Su et al.,
    2021, section 3.2)."""
    pair = torch.arange(0, config.head_dim, 2, device=device)
    frequency = config.rope_base ** -(pair / config.head_dim)  # radians per token, [head_dim / 2]
    if config.rope_scaling is not None:
        # Llama 3.1 keeps frequencies that make at least `high` turns within its original context,
        # divides those below `low` turns by `factor`, and interpolates in between.
        factor, low, high, context = config.rope_scaling
        turns = context * frequency / (2 * torch.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / factor)
    position = torch.arange(n, device=device)[:, None, None]
    angle = position * frequency  # [n, 1, head_dim / 2]
    cos = angle.cos()
    sin = angle.sin()
    cos = torch.cat((cos, cos), dim=-1)
    sin = torch.cat((-sin, sin), dim=-1)
    return torch.stack((cos, sin))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn channels (a, b) = (i, i + head_dim / 2) of x [B, T, heads, head_dim] by an angle:
    (a cos - b sin, b cos + a sin). angles [2, T, 1, head_dim] are from `rotary`."""
    cos, sin = angles
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return (wide * cos + swapped * sin).to(x.dtype)


class LayerCache:
    """Keys and values of the tokens so far, in one layer."""

    def __init__(self, config: ModelConfig, batch: int, room: int, like: Tensor) -> None:
        """A cache of the dtype and on the device of `like`, for `batch` times `room` tokens."""
        # Zeros, not empty: masked slots are multiplied by 0, and 0 times NaN is NaN.
        self.k = like.new_zeros(batch, config.n_kv_head, room, config.head_dim)
        self.v = torch.zeros_like(self.k)
        # With --previous_heads: keys of the last token, not rotated yet.
        self.last_key = like.new_zeros(batch, 1, config.previous_heads, config.head_dim)

    def update(self, slots: slice | Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v [B, n_kv_head, T, head_dim] of new tokens. Returns those of all tokens,
        [B, n_kv_head, S, head_dim]."""
        self.k[:, :, slots] = k
        self.v[:, :, slots] = v
        if isinstance(slots, Tensor):  # compiled: shapes must not change, so a mask hides the rest
            return self.k, self.v
        return self.k[:, :, : slots.stop], self.v[:, :, : slots.stop]


class KVCache:
    """What decoding keeps of the tokens so far, for all layers. `Decoder.make_cache` makes it."""

    def __init__(self, layers: list, angles: Tensor) -> None:
        """layers: the cache of each layer; angles: of all tokens it has room for."""
        self.layers = layers
        self.angles = angles  # [2, room, 1, head_dim]
        self.room = angles.shape[1]
        self.length = 0  # tokens so far; set it to 0 to start over
        self.last_ids = None  # of n-grams, see ngram.py


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which attention to x computes: that of autocast, if it is on."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x.dtype
    if kind == "cpu":  # in 16 bits its backward pass takes 4 times as long
        return torch.float32
    return torch.get_autocast_dtype(kind)


def additive(seen: Tensor, x: Tensor) -> Tensor:
    """A boolean mask as one of 0 and -inf, in attention's dtype for x. Made once: SDPA would
    convert a boolean mask in every layer, and keep it."""
    mask = torch.zeros_like(seen, dtype=compute_dtype(x))
    return mask.masked_fill_(~seen, -torch.inf)


def has_grouped_kernel(device: torch.device, dtype: torch.dtype, masked: bool) -> bool:
    """Whether SDPA has a fast kernel for fewer key heads than query heads. Where it has none, it
    takes its math kernel, which needs T x T numbers for each head."""
    if device.type == "cpu":
        return True
    if device.type != "cuda" or masked or dtype == torch.float32:
        return False
    # Flash attention. (`get_device_capability` would break a compiled graph.)
    return torch.cuda.get_device_properties(device).major >= 8


class LinearQKV(nn.Module):
    """Queries, keys and values by one linear layer."""

    row_width = 0

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = (config.n_head, config.n_kv_head, config.n_kv_head)
        self.qkv = nn.Linear(config.n_embd, sum(self.heads) * config.head_dim, bias=False)

    def forward(self, x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, n_embd] -> q [B, T, n_head, head_dim], k and v [B, T, n_kv_head, head_dim]."""
        heads = self.qkv(x).unflatten(-1, (sum(self.heads), -1))  # [B, T, heads, head_dim]
        q, k, v = heads.split(self.heads, dim=-2)
        return q, k, v


def use_previous_keys(
    k: Tensor, n_head: int, cache: LayerCache | None, slots: slice | Tensor | None
) -> Tensor:
    """The keys k [B, T, n_kv_head, head_dim] of new tokens, in whose first n_head heads each token
    has the key of the token before it (--previous_heads), also across documents. A text's first
    token keeps its own."""
    moving = k[:, :, :n_head]
    before = moving[:, :1]
    if cache is not None and (isinstance(slots, Tensor) or slots.start > 0):
        before = cache.last_key
    moved = torch.cat((before, moving[:, :-1]), dim=1)
    if cache is not None:
        cache.last_key.copy_(moving[:, -1:])
    return torch.cat((moved, k[:, :, n_head:]), dim=2)


class Attention(nn.Module):
    """Attention to all tokens so far.

    Other kinds of attention (model.ATTENTION) are subclasses. `make_mask` is called once per
    forward pass for all layers of a kind, `make_cache` once per layer.
    """

    def __init__(self, config: ModelConfig, qkv: nn.Module) -> None:
        """qkv: makes queries, keys and values of (x, rows), as `LinearQKV`."""
        super().__init__()
        width = config.n_embd
        self.config = config
        self.qkv = qkv
        self.out = nn.Identity() if config.embedding_only else nn.Linear(width, width, bias=False)

    def make_cache(self, batch: int, room: int, like: Tensor) -> LayerCache:
        """What this layer keeps while decoding."""
        return LayerCache(self.config, batch, room, like)

    def make_mask(self, x: Tensor, start: int, documents: Tensor | None) -> Tensor | None:
        """The mask for `attend` of tokens x [B, T, n_embd] behind `start` tokens in the cache.
        documents: their numbers [B, T], in which attention stays."""
        n = x.shape[1]
        if documents is not None:
            same = documents[:, None, :, None] == documents[:, None, None, :]
            return additive(same.tril_(), x)  # [B, 1, T, T]
        if start == 0 or n == 1:
            return None
        seen = torch.ones(n, start + n, dtype=torch.bool, device=x.device)
        return additive(seen.tril_(start), x)  # [T, start + T]

    def forward(
        self,
        x: Tensor,
        rows: Tensor | None,
        angles: Tensor,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
        slots: slice | Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            x: [B, T, n_embd].
            rows: what `qkv` reads, [B, T, row_width].
            angles: of the positions of x, [2, T, 1, head_dim].
            mask: from `make_mask`.
            cache: of this layer; x continues the tokens in it.
            slots: the positions of x in the cache: a slice or, in a compiled step, a tensor.

        Returns:
            [B, T, n_embd].
        """
        q, k, v = self.qkv(x, rows)  # [B, T, n_head, head_dim], [B, T, n_kv_head, head_dim] twice
        if self.config.previous_heads > 0:
            k = use_previous_keys(k, self.config.previous_heads, cache, slots)
        q = rotate(q, angles).transpose(1, 2)  # [B, n_head, T, head_dim]
        k = rotate(k, angles).transpose(1, 2)
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(slots, k, v)  # [B, n_kv_head, S, head_dim]
        y = self.attend(q, k, v, mask)  # [B, T, n_head, head_dim]
        return self.out(y.flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Weigh v by softmax(q k^T / sqrt(head_dim) + mask).

        Args:
            q: [B, n_head, T, head_dim].
            k, v: [B, n_kv_head, S, head_dim].
            mask: what is added to the logits, [.., T, S]; -inf hides a key. None hides the keys of
                later tokens, where T is S, and nothing where T is 1.

        Returns:
            [B, T, n_head, head_dim].
        """
        # Cast here, not by autocast within SDPA: the choice of a kernel depends on the dtype.
        dtype = compute_dtype(q)
        q = q.to(dtype)
        k = k.to(dtype)
        v = v.to(dtype)
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and not has_grouped_kernel(q.device, dtype, mask is not None):
            k = k.repeat_interleave(groups, dim=1)
            v = v.repeat_interleave(groups, dim=1)
        context = nullcontext()
        if torch.is_autocast_enabled("cpu"):
            context = torch.autocast("cpu", enabled=False)  # it would cast to 16 bits again
        with context:
            y = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=self.config.dropout if self.training else 0.0,
                is_causal=mask is None and q.shape[2] > 1,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return y.transpose(1, 2)
