"""Rows of n-grams: a decoder whose tables are addressed by hashes of the last n token ids.

Rows are still known before the first layer runs, and everything about tables (offloading, the
optimizer, several ranks) works unchanged, with addresses in place of ids. Which layers read the
rows, and how, is up to those who use this.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import model
from common import UserError, flag
from tables.tables import ResidentTables, Tables

PAD = 0  # stands for tokens before the beginning of a text or document


@dataclass
class Config(model.ModelConfig):
    ngram_orders: str = flag("2,3", "lengths of n-grams that have rows")
    ngram_heads: int = flag(4, "rows that an n-gram of each length reads", must="at least 1")
    ngram_rows: int = flag(
        2**15, "rows of each head, up to the next prime; 1: one for all", must="at least 1"
    )


class NgramDecoder(model.Decoder):
    """Addresses of n-grams (Engram: DeepSeek, arXiv 2601.07372, section 2.2, and its code).

    With a prime p for each order n and head k, and odd multipliers m = 2 r + 1, where NumPy's
    generator draws r below (2^63 - 1) / V / 2, seeded by 10007 times the number of the first layer
    with rows, from 0:

        mix_n = t m_0 xor (the token before) m_1 xor ... (n - 1 tokens before) m_(n-1)
        address_(n, k) = mix_n mod p_(n, k) + the sum of all primes before

    The multipliers depend on `vocab_size`, as there: in a model made anew with more tokens, n-grams
    have other rows. Give it the `multipliers` of the old one.

    Differs: token ids are not compressed first (to one id for ` Apple` and `apple`); all layers
    share their addresses, so that rows of all layers lie side by side."""

    config_class = Config
    one_table = False  # which serves all layers

    def __init__(self, config: Config, tables: Callable[..., Tables] = ResidentTables) -> None:
        orders = config.ngram_orders
        if not re.fullmatch(r"[2-9](,[2-9])*", orders):
            raise UserError(f"--ngram_orders {orders} must be numbers from 2 to 9, as 2,3")
        self.orders = sorted({int(order) for order in orders.split(",")})
        self.n_before = max(self.orders) - 1  # tokens before this one that an n-gram can have
        self.n_address = len(self.orders) * config.ngram_heads
        # Products with odd multipliers below 2^63 / V do not overflow.
        half = max(1, (2**63 - 1) // config.vocab_size // 2)
        rng = np.random.default_rng(10007 * config.row_layers[0])
        drawn = rng.integers(0, half, size=self.n_before + 1)
        self.multipliers = [2 * int(number) + 1 for number in drawn]
        self.n_rows = primes(config.ngram_rows, self.n_address)  # of each head
        super().__init__(config, tables)

    def make_tables(self, tables: Callable[..., Tables], widths: list[int]) -> Tables:
        """A token reads n_address rows: each is so much narrower."""
        if self.one_table:
            widths = widths[:1]
        if widths[0] % self.n_address:
            flag = "--n_embd" if widths[0] == self.config.n_embd else "--d_ff"
            rows = f"{len(self.orders)} orders x {self.config.ngram_heads} --ngram_heads"
            raise UserError(f"{flag} {widths[0]} must be a multiple of {rows}")
        return tables(len(widths), sum(self.n_rows), widths[0] // self.n_address)

    def addresses(self, ids: Tensor, n: int, documents: Tensor | None = None) -> Tensor:
        """Of the n-grams that end at the last n tokens of ids [B, S]: [B, n, n_address]. They do
        not cross the beginnings of documents [B, S]."""
        text = F.pad(ids[:, -n - self.n_before :], (self.n_before, 0), value=PAD)
        mix = ids[:, -n:] * self.multipliers[0]  # [B, n]
        parts = []
        offset = 0
        for distance in range(1, self.n_before + 1):
            earlier = text[:, -n - distance : -distance]
            if documents is not None:
                same = F.pad(documents, (distance, 0), value=-1)[:, :n] == documents
                earlier = earlier.where(same, PAD)
            mix = mix ^ (earlier * self.multipliers[distance])
            if distance + 1 not in self.orders:
                continue
            for _ in range(self.config.ngram_heads):
                n_row = self.n_rows[len(parts)]
                parts.append(mix % n_row + offset)
                offset += n_row
        return torch.stack(parts, dim=-1)

    def layer_rows(self, addresses: Tensor) -> Iterator[Tensor]:
        """A token's rows side by side: [B, T, n_address, W] -> [B, T, row_width]."""
        layers = (rows.flatten(2) for rows in super().layer_rows(addresses))
        return repeat(next(layers)) if self.one_table else layers


def primes(least: int, n: int) -> list[int]:
    """The first n primes from `least` on; with `least` 1, n ones: every n-gram has the same row."""
    if least == 1:
        return [1] * n
    found: list[int] = []
    number = max(2, least)
    while len(found) < n:
        if all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            found.append(number)
        number += 1
    return found
