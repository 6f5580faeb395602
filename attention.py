"""Causal self-attention of three kinds: rotary positions, caches, masks, grouped queries.

    full     a token sees all tokens before it, and itself
    window   it sees the last `window` of them
    count    it sees how often each token has occurred, and no positions (Embformer alone)

Where keys and values are functions of the token id, k(t) and v(t), and have no positions, softmax
over all tokens up to i is one over the distinct ones among them, n_i(t) the occurrences of each:

    sum_j exp(q k(t_j)) v(t_j) / sum_j exp(q k(t_j))  =  softmax_t(q k(t) + log n_i(t)) v(t)
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
    """What is kept of the tokens seen so far. Full attention: keys and values, with `room` for
    block_size tokens (0), or fewer; windows: those of the last `window` tokens; count attention, of
    all layers together: how often each token has occurred."""

    def __init__(self, config: ModelConfig, batch: int, device, dtype, room: int = 0) -> None:
        self.config, self.room = config, min(room or config.block_size, config.block_size)
        shape = (batch, config.n_kv_head, self.room, config.head_dim)
        kinds, options = config.attention_kinds, dict(device=device, dtype=dtype)
        # Zeros: where memory holds NaN, a weight of zero would not hide it.
        self.k, self.v = (
            [torch.zeros(shape if kind == "full" else 0, **options) for kind in kinds] for _ in "kv"
        )
        size = (batch, config.vocab_size if "count" in kinds else 0)
        self.counts = torch.zeros(size, dtype=torch.int32, device=device)
        self.last: Tensor | None = None  # token [B, 1]
        self.angles = rotary(self.room, config, device)
        self.slots = torch.arange(self.room, device=device)
        self.length = 0  # tokens in the cache

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self.k, *self.v, self.counts))

    def begin(self, n: int, static: bool) -> tuple[Tensor, Tensor | None]:
        """Make room for the next n tokens; returns their angles and, for full attention, mask.
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
        """Store k, v [B, n_kv_head, T, head_dim], return all [B, n_kv_head, S, head_dim]."""
        self.k[layer][:, :, self.new] = k
        self.v[layer][:, :, self.new] = v
        return self.k[layer][:, :, : self.end], self.v[layer][:, :, : self.end]

    def slide(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a window's layer, the new ones [B, T, n_kv_head, head_dim] behind
        those that the first of them sees [B, S, n_kv_head, head_dim]; the last ones are kept."""
        n, w, both = k.shape[1], self.config.window, []
        for kept, new in ((self.k, k), (self.v, v)):
            if self.length > n:
                new = torch.cat((kept[layer], new), dim=1)[:, -(w + n - 1) :]
            kept[layer] = new[:, -w:].clone()
            both.append(new)
        return tuple(both)


def ids_to_read(config: ModelConfig, table_ids: Tensor, cache: KVCache | None) -> Tensor:
    """Under which ids attention reads rows, [B, S]: those of the tokens [B, T], and behind them for
    count attention all that the cache has counted, for previous_heads the token before."""
    parts, begun = [table_ids], cache is not None and cache.length > 0
    if begun and "count" in config.attention_kinds:
        seen = cache.counts.any(0).nonzero()[:, 0]  # in any sequence; a host-device sync
        parts.append(seen.to(table_ids.device).expand(len(table_ids), -1))
    if config.previous_heads:
        parts.append(cache.last if begun else table_ids[:, :1])
        if cache is not None:
            cache.last = table_ids[:, -1:]
    return torch.cat(parts, dim=1) if len(parts) > 1 else table_ids


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 or -inf in the dtype of queries. Of a mask of booleans each layer would make this, and keep
    it in training."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


def window_mask(documents: Tensor, w: int, before: int, dtype: torch.dtype) -> Tensor:
    """Of blocks of w tokens, each of which sees its last w up to itself, in its document, numbered
    [B, T] from 0 on: [B * blocks, 1, w, 2w]. `before`: keys in front of the first block."""
    front = F.pad(documents[:, :1].expand(-1, before), (w - before, 0), value=-1)  # -1: no token
    back = documents.new_full((len(documents), -documents.shape[1] % w), -1)
    keys = torch.cat((front, documents, back), dim=1).unfold(1, 2 * w, w)  # [B, blocks, 2w]
    i, j = (torch.arange(n, device=documents.device) for n in (w, 2 * w))
    near = (i[:, None] < j) & (j <= i[:, None] + w)  # [w, 2w]
    same = keys[..., w:, None] == keys[..., None, :]  # [B, blocks, w, 2w]
    return additive((same & near).flatten(0, 1)[:, None], dtype)


def into_blocks(q: Tensor, k: Tensor, v: Tensor, w: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, T, heads, head_dim] in blocks of w [B * blocks, w, heads, head_dim], keys and
    values [B, up to w more than T, ..] in blocks and the ones before [B * blocks, 2w, ..]."""
    n = q.shape[1]
    front, back = w - (k.shape[1] - n), -n % w

    def pairs(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, 0, front, back)).unflatten(1, (-1, w))  # [B, blocks + 1, w, ..]
        return torch.cat((x[:, :-1], x[:, 1:]), dim=2).flatten(0, 1)

    q = F.pad(q, (0, 0, 0, 0, 0, back)).unflatten(1, (-1, w)).flatten(0, 1)
    return q, pairs(k), pairs(v)


def count_keys(
    ids: Tensor, n: int, documents: Tensor | None, cache: KVCache | None, dtype, device
) -> tuple[Tensor, Tensor] | None:
    """What count attention reads for the first n of ids [B, S]: where in B * S rows those of each
    sequence's distinct tokens stand [B, D], and the logarithm of how often each has occurred up to
    each of the n [B, 1, n, D]. None: these are more than half of n, and plain attention is faster."""
    batch, begun = len(ids), cache is not None and cache.length > 0
    ordered, order = ids.sort(dim=1)
    rank = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0)).cumsum(1)  # among the distinct ones
    slot = torch.empty_like(ids).scatter_(1, order, rank)  # [B, S]
    n_key = int(rank.max()) + 1
    rows = torch.arange(ids.numel(), device=ids.device).view_as(ids)
    where = rows[:, :1].repeat(1, n_key).scatter_(1, slot, rows)  # any of equal tokens will do
    ids, slot, where = (send(each, device) for each in (ids, slot, where))
    wide = dict(dtype=torch.promote_types(dtype, torch.float32), device=device)
    start = torch.zeros(batch, n_key, **wide)
    if cache is not None:
        cache.counts *= begun
        start.scatter_(1, slot[:, n:], cache.counts.gather(1, ids[:, n:]).to(start))
        cache.counts.scatter_add_(1, ids[:, :n], torch.ones_like(ids[:, :n], dtype=torch.int32))
    if documents is None and not begun and 2 * n_key > n:
        return None
    counts = torch.zeros(batch, n, n_key, **wide).scatter_(2, slot[:, :n, None], 1.0)
    counts[:, 0] += start
    for b in range(batch):
        ends = [n] if documents is None else documents[b].unique_consecutive(return_counts=True)[1]
        for part in counts[b].split(list(map(int, ends))):  # [tokens, D] of each document
            part.cumsum_(0)
    return where, counts.log_().to(dtype)[:, None]


def make_context(
    config: ModelConfig,
    ids: Tensor,
    x: Tensor,
    documents: Tensor | None,
    cache: KVCache | None,
    static: bool = False,
) -> tuple[Tensor, dict]:
    """What layers share besides x [B, T, n_embd]: angles, and what each kind of attention needs,
    made once for all. ids [B, S] are those of `ids_to_read`; `static`: see `KVCache.begin`."""
    (batch, n), w, needs = x.shape[:2], config.window, {}
    kinds, before = {*config.attention_kinds}, cache.length if cache else 0
    auto = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if auto else x.dtype
    if "count" in kinds:
        needs["count"] = count_keys(ids, n, documents, cache, dtype, x.device)
    angles, mask = cache.begin(n, static) if cache else (rotary(n, config, x.device), None)
    if documents is not None and "full" in kinds:
        same = documents[:, None, :, None] == documents[:, None, None]
        mask = additive(same.tril_(), dtype)  # [B, 1, T, T]
    needs["full"] = mask
    if "window" in kinds:
        plain = n == 1 or (before == 0 and n <= w and documents is None)
        numbers = x.new_zeros(batch, n) if documents is None else documents
        needs["window"] = None if plain else window_mask(numbers, w, min(before, w - 1), dtype)
    if config.previous_heads:
        rows = torch.arange(ids.numel(), device=x.device).view_as(ids)
        previous = rows.roll(1, dims=1)[:, :n]  # of the first one the last of ids
        if documents is not None:  # no token is before the first one of a document
            first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
            previous = torch.where(first, rows[:, :n], previous)
        needs["previous"] = previous  # [B, T], in B * S rows
    return angles, needs


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
        self.previous = config.previous_heads * config.head_dim  # numbers of a row
        width = config.n_embd
        self.out = nn.Identity() if config.embedding_only else nn.Linear(width, width, bias=False)

    def forward(
        self, x: Tensor, rows: Tensor, angles: Tensor, needs: dict, cache: KVCache | None
    ) -> Tensor:
        """x [B, T, n_embd] -> [B, T, n_embd]; with a cache, x continues the S - T tokens in it.

        `needs` of `make_context`: a mask [.., T, S] is added to the logits, -inf hides a key; None
        hides those that follow."""
        n, mask = x.shape[1], needs[self.kind]
        if self.kind == "count" and mask is not None:
            where, mask = mask
            rows = F.embedding(where, rows.flatten(0, 1))  # [B, D, row_width]
        elif self.previous and self.kind != "count":
            keys = F.embedding(needs["previous"], rows[..., : self.previous].flatten(0, 1))
            rows = torch.cat((keys, rows[:, :n, self.previous :]), dim=-1)
        elif rows is not None:
            rows = rows[:, :n]
        q, k, v = self.qkv(x, rows)
        if self.kind != "count":
            q, k = rotate(q, angles), rotate(k, angles)
        if self.kind == "window":
            if cache is not None:
                k, v = cache.slide(self.layer, k, v)  # [B, S, n_kv_head, head_dim]
            if mask is not None:
                q, k, v = into_blocks(q, k, v, self.window)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [B, heads, T, head_dim]
        if cache is not None and self.kind == "full":
            k, v = cache.append(self.layer, k, v)  # [B, n_kv_head, S, head_dim]
        groups = q.shape[1] // k.shape[1]
        # CUDA's one fast kernel for grouped queries takes neither masks nor float32; MPS has none.
        flash = q.is_cuda and mask is None and q.dtype != torch.float32
        if groups > 1 and not (flash or q.is_cpu):
            k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
        options = dict(is_causal=mask is None and q.shape[2] > 1, enable_gqa=groups > 1)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, **options)
        y = y.transpose(1, 2).flatten(-2)  # [B, T, n_head * head_dim] = [B, T, n_embd]
        if self.kind == "window":
            y = y.unflatten(0, (len(x), -1)).flatten(1, 2)[:, :n]  # blocks in a row again
        return self.out(y)
