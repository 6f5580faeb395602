"""count: what followed the last two tokens so far, counted, in place of learned rows (after COUNT,
arXiv 2610.20456): a control for rows of n-grams. FFNs are dense.

    x + w_l e,  e: the mean of the head's rows of the tokens that followed (t', t) most often

As in bigram, w_l begins at 0.1 and pairs are hashed (ngrams.py). Training counts every batch after
its step has read the counts, so in a first pass no text has seen its own continuation.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

import model
from common import flag
from relatives import bigram
from tables.tables import Tables, send


@dataclass
class Config(bigram.Config):
    table_std: float = 0.0  # hides the flag: there are no tables
    n_next: int = flag(8, "next tokens that are counted for a pair", must="at least 1")


class Decoder(bigram.Decoder):
    """Differs: COUNT counts a corpus before training, looks up the longest n-grams that it knows,
    and adds the mean once, to the token's embedding. Here the mean is weighted by the counts, there
    by scores of them. A pair keeps `n_next` tokens, the rarest of which gives its place and its
    count to a new one (Space-Saving: Metwally et al., 2005); of several new ones in a step, one
    gets in. Of several GPUs, each counts what it reads."""

    config_class = Config

    def __init__(self, config: Config, *tables: Callable[..., Tables]) -> None:
        super().__init__(config, *tables)
        shape = (self.n_rows[0], config.n_next)
        self.register_buffer("next", torch.full(shape, -1))
        self.register_buffer("counts", torch.zeros(shape, dtype=torch.int64))

    def make_tables(self, tables: Callable[..., Tables], widths: list[int]) -> Tables:
        return model.Decoder.make_tables(self, tables, [])

    def layer_rows(self, addresses: Tensor) -> Iterator[Tensor]:
        """addresses [B, T, 1] -> for each layer the same e [B, T, n_embd]."""
        address = send(addresses, self.device).flatten()  # [B * T]
        counts = self.counts[address]  # [B * T, n_next]
        share = counts / counts.sum(1, keepdim=True).clamp_min(1)
        head = self.head_weight
        e = F.embedding_bag(
            self.next[address].clamp_min(0), head, per_sample_weights=share.to(head), mode="sum"
        )
        return repeat(e.view(*addresses.shape[:2], -1))

    def forward(self, ids: Tensor, targets: Tensor | None = None, **options) -> tuple:
        outputs = super().forward(ids, targets, **options)
        if self.training and targets is not None:
            self.count(ids, options.get("documents"))
        return outputs

    def count(self, ids: Tensor, documents: Tensor | None) -> None:
        """Count what follows pairs of tokens in texts [B, T]."""
        pairs = self.addresses(ids, ids.shape[1], documents)[:, :-1, 0]
        address = send(pairs, self.device).flatten()  # [N]
        token = send(ids[:, 1:], self.device).flatten()
        known = self.next[address] == token[:, None]  # [N, n_next]
        number, place = known.nonzero(as_tuple=True)
        one = torch.ones_like(place)
        self.counts.index_put_((address[number], place), one, accumulate=True)
        # Of new tokens at one address, the last: which of several writes stays is chance on a GPU.
        places = torch.arange(len(address), device=address.device)
        latest = torch.full_like(self.next[:, 0], -1)  # of each address
        latest.scatter_reduce_(0, address, places.masked_fill(known.any(1), -1), "amax")
        new = latest[address] == places
        address = address[new]
        place = self.counts[address].argmin(1)
        self.next[address, place] = token[new]
        self.counts[address, place] += 1
