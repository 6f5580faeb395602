"""Causal self-attention: rotary positions, the KV cache, masks, grouped queries."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import ModelConfig


def rotary(n: int, config: ModelConfig, device) -> Tensor:
    """[2, n, 1, head_dim], what `rotate` needs for positions 0 to n - 1 (Su et al., 2021)."""
    half = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
    speed = config.rope_base**-half  # radians per token
    if config.rope_scaling:  # Llama 3.1 slows what turns less often than `high` times in a context
        factor, low, high, context = config.rope_scaling
        kept = ((context * speed / (2 * torch.pi) - low) / (high - low)).clamp(0, 1)
        speed = speed * (kept + (1 - kept) / factor)
    angle = torch.arange(n, device=device)[:, None, None] * speed
    cos, sin = angle.cos(), angle.sin()  # [n, 1, head_dim/2]
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Channels i and i + head_dim/2 of x [B, T, H, head_dim]: (a cos - b sin, b cos + a sin)."""
    wide, (cos, sin) = x.float(), angles
    return (wide * cos + wide.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class KVCache:
    """Keys and values of the tokens seen so far; `room` for block_size tokens (0), or fewer."""

    def __init__(self, config: ModelConfig, batch: int, device, dtype, room: int = 0) -> None:
        self.room = min(room or config.block_size, config.block_size)
        shape = (batch, config.n_kv_head, self.room, config.head_dim)
        # Zeros: where memory holds NaN, a weight of zero would not hide it.
        layers, options = range(config.n_layer), dict(device=device, dtype=dtype)
        self.k = [torch.zeros(shape, **options) for _ in layers]
        self.v = [torch.zeros(shape, **options) for _ in layers]
        self.angles = rotary(self.room, config, device)
        self.slots = torch.arange(self.room, device=device)
        self.length = 0  # tokens in the cache

    def begin(self, n: int, static: bool) -> tuple[Tensor, Tensor | None]:
        """Make room for the next n tokens; returns their angles and mask for `Attention`. `static`:
        layers attend to the whole buffer, behind a mask, so one compiled graph serves all steps."""
        start, self.length = self.length, self.length + n
        new = slice(start, self.length)
        slots, angles = self.slots[new], self.angles[:, new]
        # Where the new tokens go, and the end of what they attend to.
        self.new, self.end = (slots, None) if static else (new, self.length)
        if static:
            for buffer in (*self.k, *self.v):  # CUDA graphs need not copy them
                torch._dynamo.mark_static_address(buffer, guard=False)
        elif start == 0 or n == 1:
            return angles, None  # plainly causal
        seen = self.slots[: self.end] <= slots[:, None]  # [n, S]
        return angles, torch.where(seen, 0.0, -torch.inf).to(self.k[0].dtype)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, n_kv_head, T, head_dim], return all [B, n_kv_head, S, head_dim]."""
        self.k[layer][:, :, self.new] = k
        self.v[layer][:, :, self.new] = v
        return self.k[layer][:, :, : self.end], self.v[layer][:, :, : self.end]


def document_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """Causal attention inside documents, numbered [B, T]: [B, 1, T, T], 0 or -inf in the dtype of
    queries. Of a mask of booleans each layer would make this, and keep it in training."""
    same = (documents[:, None, :, None] == documents[:, None, None]).tril_()  # [B, 1, T, T]
    kind = documents.device.type
    if kind != "cpu" and torch.is_autocast_enabled(kind):  # on a CPU attention is in float32
        dtype = torch.get_autocast_dtype(kind)
    return torch.zeros_like(same, dtype=dtype).masked_fill_(~same, -torch.inf)


class LinearQKV(nn.Module):
    """Queries, keys and values by one linear layer."""

    row_width = 0

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = (config.n_head, config.n_kv_head, config.n_kv_head)
        self.qkv = nn.Linear(config.n_embd, sum(self.heads) * config.head_dim, bias=False)

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, n_embd] -> q [B, T, n_head, head_dim], k and v [B, T, n_kv_head, head_dim]."""
        heads = self.qkv(x).unflatten(-1, (sum(self.heads), -1))  # [B, T, heads, head_dim]
        return heads.split(self.heads, dim=-2)


class Attention(nn.Module):
    """Causal self-attention with rotary positions, grouped queries and a KV cache."""

    def __init__(self, config: ModelConfig, layer: int, qkv: nn.Module) -> None:
        super().__init__()
        self.layer, self.qkv, self.dropout = layer, qkv, config.dropout
        width = config.n_embd
        self.out = nn.Identity() if config.embedding_only else nn.Linear(width, width, bias=False)

    def forward(
        self, x: Tensor, rows: Tensor, angles: Tensor, mask: Tensor | None, cache: KVCache | None
    ) -> Tensor:
        """x [B, T, n_embd] -> [B, T, n_embd]; with a cache, x continues the S - T tokens in it.

        mask [.., T, S] is added to the logits, -inf hides a key; None hides those that follow."""
        q, k, v = self.qkv(x, rows)
        q, k = rotate(q, angles), rotate(k, angles)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [B, heads, T, head_dim]
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # [B, n_kv_head, S, head_dim]
        groups = q.shape[1] // k.shape[1]
        # CUDA's one fast kernel for grouped queries takes neither masks nor float32; MPS has none.
        flash = q.is_cuda and mask is None and q.dtype != torch.float32
        if groups > 1 and not (flash or q.is_cpu):
            k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
        options = dict(is_causal=mask is None and q.shape[2] > 1, enable_gqa=groups > 1)
        options["dropout_p"] = self.dropout if self.training else 0.0
        cast = torch.is_autocast_enabled("cpu")
        if cast:  # in 16 bits a CPU's backward pass takes 4 times as long
            q, k, v = q.float(), k.float(), v.float()
        with torch.autocast("cpu", enabled=False) if cast else nullcontext():
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        return self.out(y.transpose(1, 2).flatten(-2))  # [B, T, n_head * head_dim] = [B, T, n_embd]
