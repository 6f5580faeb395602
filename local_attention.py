"""Attention that does not grow with the square of the length (docs/attention.md).

    window   a token sees the last w tokens, itself included
    count    a token sees all distinct tokens before it, weighed by how often each came (Embformer)

And `--previous_heads` of Embformer: key heads that use the previous token's key.

Keys of `count` and of the token before come from rows of tokens that may be far back. Decoding
keeps ids of these tokens, not their keys, and reads their rows again: their `context`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import Attention, KVCache, additive, compute_dtype
from config import ModelConfig
from tables.tables import send

# --- windows ---


class WindowCache:
    """Keys and values of the last window - 1 tokens: what the next token sees besides itself."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.k = self.v = None  # [B, n_kv_head, at most window - 1, head_dim]

    def update(self, slots: slice, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k and v [B, n_kv_head, T, head_dim] of new tokens. Returns those of all tokens that
        one of the new tokens sees, [B, n_kv_head, S, head_dim]."""
        if slots.start > 0:
            k = torch.cat((self.k, k), dim=2)
            v = torch.cat((self.v, v), dim=2)
        first = max(0, k.shape[2] - (self.window - 1))
        # Copies: a view would keep all of k and v in memory.
        self.k = k[:, :, first:].clone()
        self.v = v[:, :, first:].clone()
        return k, v


class WindowAttention(Attention):
    """Attention to the last w tokens. Tokens are cut into blocks of w, and queries of a block see
    their block and the one before it, through a mask [w, 2w]."""

    def make_cache(self, batch: int, room: int, like: Tensor) -> WindowCache:
        return WindowCache(self.config.window)

    def make_mask(self, x: Tensor, start: int, documents: Tensor | None, context) -> Tensor | None:
        """[B * blocks, 1, w, 2w], or None where one window has all that is seen."""
        w = self.config.window
        n = x.shape[1]
        past = min(start, w - 1)  # keys in front of x's
        if documents is None:
            if past + n <= w and (n == 1 or past == 0):
                return None
            documents = x.new_zeros(len(x), past + n)
        # The documents of each block's keys, -1 where there is no key.
        padded = F.pad(documents, (w - past, -n % w), value=-1)
        keys = padded.unfold(1, 2 * w, w)  # [B, blocks, 2w]
        queries = keys[..., w:]  # the second half of them
        j = torch.arange(2 * w, device=x.device)
        i = j[w:, None]
        in_window = (i - w < j) & (j <= i)  # [w, 2w]
        same = queries[..., :, None] == keys[..., None, :]  # [B, blocks, w, 2w]
        seen = (in_window & same).flatten(0, 1)
        return additive(seen[:, None], x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return super().attend(q, k, v, mask)
        w = self.config.window
        batch, _, n, _ = q.shape
        q = F.pad(q, (0, 0, 0, -n % w))
        q = q.unflatten(2, (-1, w))  # [B, n_head, blocks, w, head_dim]
        q = q.transpose(1, 2).flatten(0, 1)  # [B * blocks, n_head, w, head_dim]
        k = blocks_of_keys(k, n, w)
        v = blocks_of_keys(v, n, w)
        y = super().attend(q, k, v, mask)  # [B * blocks, w, n_head, head_dim]
        y = y.unflatten(0, (batch, -1)).flatten(1, 2)
        return y[:, :n]  # [B, T, n_head, head_dim]


def blocks_of_keys(k: Tensor, n: int, w: int) -> Tensor:
    """Keys or values [B, heads, S, head_dim], of which the last n are of new tokens: for each block
    of w new tokens those of the block before it and its own, [B * blocks, heads, 2w, head_dim]."""
    past = k.shape[2] - n
    k = F.pad(k, (0, 0, w - past, -n % w))
    k = k.unflatten(2, (-1, w)).transpose(1, 2)  # [B, 1 + blocks, heads, w, head_dim]
    before = k[:, :-1]
    own = k[:, 1:]
    return torch.cat((before, own), dim=3).flatten(0, 1)


# --- counts ---


class TokenCounts:
    """The distinct tokens of each sequence, whose keys `CountAttention` sees, and how often each of
    them came. It is made of ids on the CPU, where they are known: a GPU would be waited for."""

    def __init__(
        self, ids: Tensor, documents: Tensor | None, earlier: "TokenCounts | None"
    ) -> None:
        """ids [B, T]; documents: their numbers [B, T] (without `earlier`), for each of which counts
        begin again; earlier: of the tokens before these."""
        ids = ids.cpu().contiguous()
        n = ids.shape[1]
        if earlier is not None:
            ids = torch.cat((earlier.distinct, ids), dim=1)
        found = [sequence.unique() for sequence in ids]  # sorted
        most = max(len(distinct) for distinct in found)
        padded = []
        for distinct in found:  # who has fewer repeats the last one, with a count of 0
            last = distinct[-1:].expand(most - len(distinct))
            padded.append(torch.cat((distinct, last)))
        self.distinct = torch.stack(padded)  # [B, D]
        place = torch.searchsorted(self.distinct, ids)  # the first among equal ones
        self.place = place[:, -n:]  # of each new token among the distinct ones, [B, T]
        self.before = torch.zeros_like(self.distinct)  # [B, D]
        if earlier is not None:
            self.before.scatter_add_(1, place[:, :-n], earlier.after)
        ones = torch.ones_like(self.place)
        self.after = self.before.scatter_add(1, self.place, ones)
        self.lengths = [[n]] * len(ids)  # of the documents in each sequence
        if documents is not None:
            self.lengths = []
            for numbers in documents.cpu():
                _, lengths = numbers.unique_consecutive(return_counts=True)
                self.lengths.append(lengths.tolist())
        # With more distinct tokens than that, plain attention without positions is faster.
        worth = documents is not None or earlier is not None or 2 * most <= n
        self.ids = self.distinct if worth else None  # [B, D]

    def logarithms(self, x: Tensor) -> Tensor:
        """For tokens x [B, T, n_embd] the mask log n, [B, 1, T, D], where n is how often a distinct
        token came up to each of them (-inf: not yet)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        place = send(self.place, x.device)
        before = send(self.before, x.device)
        counts = torch.zeros(*place.shape, before.shape[1], dtype=dtype, device=x.device)
        counts.scatter_(2, place[..., None], 1.0)  # [B, T, D]
        counts[:, 0] += before
        for sequence, lengths in zip(counts, self.lengths, strict=True):
            for document in sequence.split(lengths):  # [tokens, D]
                document.cumsum_(0)
        return counts.log_().to(compute_dtype(x))[:, None]


class CountAttention(Attention):
    """Attention without positions to all tokens so far: equal tokens have equal keys, so attention
    to the distinct ones, with log(count so far) added to the logits, gives the same."""

    def make_cache(self, batch: int, room: int, like: Tensor) -> None:
        """None: `KVCache.context` has the counts, for all layers."""

    def make_mask(self, x: Tensor, start: int, documents: Tensor | None, context) -> Tensor | None:
        """[B, 1, T, D] for the distinct tokens, or None for the tokens themselves."""
        return None if context.ids is None else context.logarithms(x)

    def forward(
        self,
        x: Tensor,
        rows: Tensor,
        angles: Tensor,
        mask: Tensor | None = None,
        cache: None = None,
        slots: slice | None = None,
    ) -> Tensor:
        n = x.shape[1]
        rows = rows[:, -n:] if mask is None else rows[:, :-n]  # those of the distinct tokens
        q, k, v = self.qkv(x, rows)  # [B, T, n_head, head_dim], [B, D, n_kv_head, head_dim]
        q = q.transpose(1, 2)  # [B, n_head, T, head_dim]
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        y = self.attend(q, k, v, mask)  # [B, T, n_head, head_dim]
        return self.out(y.flatten(2))


# --- keys of the token before ---


def use_previous_keys(k: Tensor, n_head: int) -> Tensor:
    """k [B, S, n_kv_head, head_dim], the first n_head heads of each token replaced by those of the
    token before it, also across documents. The first token keeps its own."""
    moved = k.clone()
    moved[:, 1:, :n_head] = k[:, :-1, :n_head]
    return moved


class PreviousToken:
    """The token before the new ones, whose key the first of them uses."""

    def __init__(self, ids: Tensor, earlier: "PreviousToken | None") -> None:
        self.ids = None if earlier is None else earlier.last  # [B, 1]
        self.last = ids[:, -1:]


# --- the context of a forward pass ---


def make_context(
    config: ModelConfig, ids: Tensor, documents: Tensor | None, cache: KVCache | None
) -> TokenCounts | PreviousToken | None:
    """What attention needs to know of tokens before the new ids [B, T], or None, as in most models.
    The rows of its `ids` [B, C] are read, too, in front of those of the new ones."""
    earlier = None
    if cache is not None and cache.length > 0:
        earlier = cache.context
    if "count" in config.attention_kinds:
        return TokenCounts(ids, documents, earlier)
    if config.previous_heads > 0:
        return PreviousToken(ids, earlier)
    return None
