"""Causal self-attention, full, in windows or by counts: rotary positions, caches, masks, groups."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import ModelConfig
from tables.tables import send


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
    """What is kept of tokens seen so far: keys and values, with `room` for block_size tokens (0) or
    fewer, in windows those that the next token sees; for all layers that count, their counts."""

    def __init__(self, config: ModelConfig, batch: int, device, dtype, room: int = 0) -> None:
        self.config, self.room = config, min(room or config.block_size, config.block_size)
        shape = (batch, config.n_kv_head, self.room, config.head_dim)
        # Zeros: where memory holds NaN, a weight of zero would not hide it.
        shapes = [shape if kind == "full" else 0 for kind in config.attention_kinds]
        self.k = [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]
        self.v = [torch.zeros(shape, device=device, dtype=dtype) for shape in shapes]
        self.angles = rotary(self.room, config, device)
        self.slots = torch.arange(self.room, device=device)
        # Earlier ids whose rows are read again [B, D]: distinct ones and their counts, or the last.
        self.seen = self.counts = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        self.length = 0  # tokens in the cache

    def read_again(self, ids: Tensor) -> Tensor:
        """New ids [B, T] behind those of earlier tokens whose rows attention needs, too: [B, S]."""
        seen, self.seen = self.seen, ids[:, -1:] if self.config.previous_heads else self.seen
        return torch.cat((seen.to(ids.device), ids), dim=1) if self.length else ids

    def begin(self, n: int, static: bool) -> tuple[Tensor, Tensor | None]:
        """Make room for the next n tokens; returns their angles and mask, if all is full. `static`:
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
        return angles, additive(seen, self.k[0])

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, n_kv_head, T, head_dim], return all [B, n_kv_head, S, head_dim], in
        windows those that one of the new tokens sees."""
        if self.config.attention_kinds[layer] == "window":
            if self.length > k.shape[2]:
                k, v = torch.cat((self.k[layer], k), 2), torch.cat((self.v[layer], v), 2)
            first = max(0, k.shape[2] - self.config.window + 1)
            self.k[layer], self.v[layer] = k[:, :, first:].clone(), v[:, :, first:].clone()
            return k, v
        self.k[layer][:, :, self.new] = k
        self.v[layer][:, :, self.new] = v
        return self.k[layer][:, :, : self.end], self.v[layer][:, :, : self.end]


def additive(seen: Tensor, x: Tensor) -> Tensor:
    """0 or -inf, as queries from x. Each layer would make and keep this of a mask of booleans."""
    kind, dtype = x.device.type, x.dtype
    if kind != "cpu" and torch.is_autocast_enabled(kind):  # on a CPU attention is in float32
        dtype = torch.get_autocast_dtype(kind)
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


def window_mask(w: int, documents: Tensor | None, cache, x: Tensor) -> Tensor | None:
    """For x [B, T, n_embd] in blocks of w (see `into_blocks`) that stay inside documents, numbered
    [B, T] from 0 on: [B * blocks, 1, w, 2w]. None: one window has all of it."""
    n, before = x.shape[1], min(cache.length - x.shape[1], w - 1) if cache else 0
    if documents is None:
        if before + n <= w and 1 in (n, before + 1):
            return None
        documents = x.new_zeros(len(x), before + n)
    keys = F.pad(documents, (w - before, -n % w), value=-1).unfold(1, 2 * w, w)  # [B, blocks, 2w]
    j = torch.arange(2 * w, device=x.device)
    i = j[w:, None]  # queries are the second half of the keys
    seen = (i - w < j) & (j <= i) & (keys[..., w:, None] == keys[..., None, :])
    return additive(seen.flatten(0, 1)[:, None], x)


def into_blocks(q: Tensor, k: Tensor, v: Tensor, w: int) -> tuple[Tensor, ...]:
    """q [B, heads, T, head_dim] in blocks [B * blocks, heads, w, head_dim]; k and v, of S tokens,
    likewise, each behind the one before it [B * blocks, heads, 2w, head_dim]."""
    n, front = q.shape[2], w + q.shape[2] - k.shape[2]
    q, k, v = (
        F.pad(each, (0, 0, pad, -n % w)).unflatten(2, (-1, w)).transpose(1, 2)
        for each, pad in ((q, 0), (k, front), (v, front))
    )
    k, v = (torch.cat((each[:, :-1], each[:, 1:]), dim=3) for each in (k, v))
    return tuple(each.flatten(0, 1) for each in (q, k, v))


def count_keys(ids: Tensor, documents: Tensor | None, cache, x: Tensor) -> tuple | None:
    """Without positions, attention to all tokens so far is attention to the distinct ones t with
    log n(t) added to q k(t) where t has come n(t) times. Returns where in the B * S rows of ids
    [B, S] each sequence's distinct ones are [B, D], and as a mask log n(t) up to each token of x
    [B, T, n_embd], [B, 1, T, D]. None: D is above T / 2, and plain attention faster."""
    (batch, n, _), row = x.shape, torch.arange(ids.numel(), device=ids.device).view_as(ids)
    ordered, order = ids.sort(dim=1)
    rank = F.pad(ordered.diff(dim=1) != 0, (1, 0)).cumsum(1)  # among the distinct ones
    key = torch.empty_like(ids).scatter_(1, order, rank)  # [B, S]
    where = row[:, :1].repeat(1, int(rank.max()) + 1).scatter_(1, key, row)  # any of equal ones
    start = torch.zeros_like(where)  # what the cache has counted
    if cache is not None:
        start.scatter_add_(1, key[:, :-n], cache.counts[:, : key.shape[1] - n])  # if any
        cache.seen = ids.flatten()[where]
        cache.counts = start.scatter_add(1, key[:, -n:], torch.ones_like(key[:, -n:]))
    if documents is None and key.shape[1] == n < 2 * where.shape[1]:
        return None
    key, where, start = (send(each, x.device) for each in (key, where, start))
    counts = x.new_zeros(batch, n, where.shape[1], dtype=torch.promote_types(x.dtype, torch.float))
    counts.scatter_(2, key[:, -n:, None], 1.0, reduce="add")[:, 0] += start
    for b in range(batch):
        ends = [n] if documents is None else documents[b].unique_consecutive(return_counts=True)[1]
        for part in counts[b].split(list(map(int, ends))):  # [tokens, D] of each document
            part.cumsum_(0)
    return where, counts.log_().to(x.dtype)[:, None]


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
    """Causal self-attention of a layer's kind, with grouped queries and a cache."""

    def __init__(self, config: ModelConfig, layer: int, qkv: nn.Module) -> None:
        super().__init__()
        self.layer, self.qkv, self.dropout = layer, qkv, config.dropout
        self.kind, self.window = config.attention_kinds[layer], config.window
        width = config.n_embd
        self.out = nn.Identity() if config.embedding_only else nn.Linear(width, width, bias=False)

    def forward(
        self, x: Tensor, rows: Tensor, angles: Tensor, masks: dict, cache: KVCache | None
    ) -> Tensor:
        """x [B, T, n_embd] -> [B, T, n_embd]; with a cache, x continues the S - T tokens in it.

        A mask [.., T, S] is added to the logits, -inf hides a key; None hides those that follow."""
        n, mask = x.shape[1], masks[self.kind]
        if self.kind == "count" and mask is not None:
            where, mask = mask
            rows = F.embedding(where, rows.flatten(0, 1))  # [B, D, row_width]
        q, k, v = self.qkv(x, rows)
        if self.kind != "count":
            k, v = k[:, -n:], v[:, -n:]
            q, k = rotate(q, angles), rotate(k, angles)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [B, heads, T, head_dim]
        if cache is not None and self.kind != "count":
            k, v = cache.append(self.layer, k, v)  # [B, n_kv_head, S, head_dim]
        if self.kind == "window" and mask is not None:
            q, k, v = into_blocks(q, k, v, self.window)
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
        return self.out(y.transpose(1, 2).reshape(len(x), -1, x.shape[-1])[:, :n])
