"""Causal self-attention: rotary positions, caches, masks, grouped queries; of three kinds.

    full     a token attends to itself and all before it
    window   to itself and the `window` - 1 before it
    count    as full, but without positions, so only how often each token has occurred matters

In Embformer keys and values are functions k(t), v(t) of the token id. Without positions, its softmax
over all tokens t_j up to token i is one over those that are distinct; n_i(t): occurrences so far,

    sum_j exp(q k(t_j)) v(t_j) / sum_j exp(q k(t_j))  =  sum_t softmax_t(q k(t) + log n_i(t)) v(t)
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import ModelConfig
from tables.tables import send


def rotary(n: int, config: ModelConfig, device) -> Tensor:
    """[2, n, 1, head_dim], what `rotate` needs for positions 0 to n - 1 (Su et al., 2021)."""
    half = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
    angle = torch.arange(n, device=device)[:, None, None] * config.rope_base**-half
    cos, sin = angle.cos(), angle.sin()  # [n, 1, head_dim/2]
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Channels i and i + head_dim/2 of x [B, T, H, head_dim]: (a cos - b sin, b cos + a sin)."""
    wide, (cos, sin) = x.float(), angles
    return (wide * cos + wide.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class KVCache:
    """What is kept of the tokens seen so far. Full attention: their keys and values, with `room` for
    block_size tokens (0), or fewer. Windows: those that the next token sees. Count attention, of all
    layers together: how often each token has occurred."""

    def __init__(self, config: ModelConfig, batch: int, device, dtype, room: int = 0) -> None:
        self.config, self.room = config, min(room or config.block_size, config.block_size)
        shape = (batch, config.n_kv_head, self.room, config.head_dim)
        # Zeros: where memory holds NaN, a weight of zero would not hide it.
        kinds, options = config.attention_kinds, dict(device=device, dtype=dtype)
        self.k = [torch.zeros(shape if kind == "full" else 0, **options) for kind in kinds]
        self.v = [torch.zeros(shape if kind == "full" else 0, **options) for kind in kinds]
        size = (batch, config.vocab_size if "count" in kinds else 0)
        self.counts = torch.zeros(size, dtype=torch.int32, device=device)
        self.last: Tensor | None = None  # id [B, 1], read by previous_heads
        self.angles = rotary(self.room, config, device)
        self.slots = torch.arange(self.room, device=device)
        self.length = 0  # tokens in the cache

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self.k, *self.v, self.counts))

    def read_again(self, ids: Tensor) -> Tensor:
        """New ids [B, T] behind those of earlier tokens whose rows attention needs, too: [B, S]."""
        before, self.last = self.last, ids[:, -1:]
        if self.length and "count" in self.config.attention_kinds:
            before = self.counts.any(0).nonzero()[:, 0]  # in any sequence; a host-device sync
        elif not self.length or not self.config.previous_heads:
            return ids
        return torch.cat((before.to(ids.device).expand(len(ids), -1), ids), dim=1)

    def begin(self, n: int, static: bool) -> tuple[Tensor, Tensor | None]:
        """Make room for the next n tokens; returns their angles and the mask of full attention.
        `static`: layers attend to the whole buffer, behind a mask, so one compiled graph serves all
        steps."""
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
        """Store k, v [B, n_kv_head, T, head_dim], return all [B, n_kv_head, S, head_dim], of windows
        those that the first of the new tokens sees, and the new ones."""
        if self.config.attention_kinds[layer] == "window":
            if self.length > k.shape[2]:
                k = torch.cat((self.k[layer], k), dim=2)
                v = torch.cat((self.v[layer], v), dim=2)
            first = max(0, k.shape[2] - self.config.window + 1)
            self.k[layer], self.v[layer] = k[:, :, first:].clone(), v[:, :, first:].clone()
            return k, v
        self.k[layer][:, :, self.new] = k
        self.v[layer][:, :, self.new] = v
        return self.k[layer][:, :, : self.end], self.v[layer][:, :, : self.end]


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 or -inf in the dtype of queries. Of a mask of booleans each layer would make this, and keep
    it in training."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


def window_mask(documents: Tensor, n: int, w: int, dtype: torch.dtype) -> Tensor:
    """For the last n of tokens in documents, numbered [B, S] from 0 on, and what `into_blocks` makes
    of them: [B * blocks, 1, w, 2w]."""
    front = w + n - documents.shape[1]
    keys = F.pad(documents, (front, -n % w), value=-1).unfold(1, 2 * w, w)  # [B, blocks, 2w]
    j = torch.arange(2 * w, device=documents.device)
    i = j[w:, None]  # queries are the second half of the keys
    seen = (i - w < j) & (j <= i) & (keys[..., w:, None] == keys[..., None, :])
    return additive(seen.flatten(0, 1)[:, None], dtype)


def into_blocks(q: Tensor, k: Tensor, v: Tensor, w: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, heads, T, head_dim] in blocks of w [B * blocks, heads, w, head_dim]; keys and
    values [B, .., up to w more, ..] likewise, each behind the block before [B * blocks, .., 2w, ..].
    """
    n = q.shape[2]

    def blocks(x: Tensor, front: int) -> Tensor:
        return F.pad(x, (0, 0, front, -n % w)).unflatten(2, (-1, w)).transpose(1, 2)

    pairs = [blocks(x, w + n - x.shape[2]) for x in (k, v)]
    k, v = (torch.cat((x[:, :-1], x[:, 1:]), dim=3).flatten(0, 1) for x in pairs)
    return blocks(q, 0).flatten(0, 1), k, v


def count_keys(
    ids: Tensor, n: int, documents: Tensor | None, cache: KVCache | None, dtype, device
) -> tuple[Tensor, Tensor] | None:
    """Where in B * S rows of ids [B, S] those of each sequence's distinct tokens are [B, D], and the
    logarithm of how often each has occurred up to each of the last n tokens [B, 1, n, D]. None if
    there are more than n / 2: then plain attention is faster."""
    ordered, order = ids.sort(dim=1)
    rank = F.pad(ordered.diff(dim=1) != 0, (1, 0)).cumsum(1)  # among the distinct ones
    key = torch.empty_like(ids).scatter_(1, order, rank)  # [B, S]
    row = torch.arange(ids.numel(), device=ids.device).view_as(ids)
    where = row[:, :1].repeat(1, int(rank.max()) + 1).scatter_(1, key, row)  # any of equal ones
    ids, key, where = (send(each, device) for each in (ids, key, where))
    (earlier, ids), (old, key) = (each.tensor_split([-n], dim=1) for each in (ids, key))
    counts = torch.zeros(len(ids), n, where.shape[1], device=device)
    counts = counts.to(torch.promote_types(dtype, torch.float32))
    if cache is not None:
        cache.counts *= cache.length > 0
        counts[:, 0].scatter_(1, old, cache.counts.gather(1, earlier).to(counts))
        cache.counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.int32))
    if documents is None and not old.numel() and 2 * where.shape[1] > n:
        return None
    counts.scatter_add_(2, key[..., None], torch.ones_like(key, dtype=counts.dtype)[..., None])
    for b, each in enumerate(counts):
        ends = [n] if documents is None else documents[b].unique_consecutive(return_counts=True)[1]
        for part in each.split(list(map(int, ends))):  # [tokens, D] of each document
            part.cumsum_(0)
    return where, counts.log_().to(dtype)[:, None]


def what_layers_share(
    config: ModelConfig, ids: Tensor, x: Tensor, documents: Tensor | None, cache, static: bool
) -> tuple[Tensor, dict]:
    """The angles, and the keys or mask of each kind of attention, for x [B, T, n_embd] and the ids
    [B, S] of `KVCache.read_again`; `static`: see `KVCache.begin`."""
    (batch, n), kinds, keys = x.shape[:2], {*config.attention_kinds}, {}
    auto = torch.is_autocast_enabled(kind := x.device.type)
    dtype = torch.get_autocast_dtype(kind) if auto else x.dtype
    if "count" in kinds:
        keys["count"] = count_keys(ids, n, documents, cache, dtype, x.device)
    if "window" in kinds:
        before = min(cache.length, config.window - 1) if cache else 0
        plain = documents is None and (n == 1 or before + n <= config.window and not before)
        numbers = x.new_zeros(batch, before + n) if documents is None else documents
        keys["window"] = None if plain else window_mask(numbers, n, config.window, dtype)
    angles, keys["full"] = cache.begin(n, static) if cache else (rotary(n, config, x.device), None)
    if documents is not None and "full" in kinds:
        same = documents[:, None, :, None] == documents[:, None, None]
        keys["full"] = additive(same.tril_(), dtype)  # [B, 1, T, T]
    return angles, keys


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
        self, x: Tensor, rows: Tensor, angles: Tensor, keys: dict, cache: KVCache | None
    ) -> Tensor:
        """x [B, T, n_embd] -> [B, T, n_embd]; with a cache, x continues the S - T tokens in it.

        A mask [.., T, S] is added to the logits, -inf hides a key; None hides those that follow."""
        n, mask = x.shape[1], keys[self.kind]
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
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, **options)
        return self.out(y.transpose(1, 2).reshape(len(x), -1, x.shape[-1])[:, :n])
