"""Relatives of STEM that attach rows elsewhere, and address them by n-grams of tokens.

    engram   x + sigmoid(s) W_V e,  e: rows of the n-grams that end here, s: how well W_K e fits x
    bigram   x + w_l e,             e: the row of the last two tokens, the same in every layer
    value    v + w_l V_l[t]         on the values of attention, V_l[t]: a row of the token

An n-gram's row has an *address*, a hash of its n token ids. So rows are still known before the
first layer runs, and everything about tables (offloading, the optimizer, several ranks) works
unchanged, with addresses in place of ids.
"""

import re

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import LinearQKV
from common import UserError
from config import ModelConfig

PAD = 0  # stands for tokens before the beginning of a text or document


class Ngrams:
    """Addresses of n-grams (Engram: DeepSeek, arXiv 2601.07372, section 2.2, and its code).

    With odd random multipliers m and a prime p for each order n and head k:

        mix_n = t m_0 xor (the token before) m_1 xor ... (n - 1 tokens before) m_(n-1)
        address_(n, k) = mix_n mod p_(n, k) + the sum of all primes before

    Differs: token ids are not compressed first (to one id for ` Apple` and `apple`); all layers
    share their addresses, so that rows of all layers lie side by side."""

    def __init__(self, config: ModelConfig) -> None:
        orders = config.ngram_orders
        if not re.fullmatch(r"[2-9](,[2-9])*", orders):
            raise UserError(f"--ngram_orders {orders} must be numbers from 2 to 9, as 2,3")
        self.orders = sorted({int(order) for order in orders.split(",")})
        self.n_head = config.ngram_heads
        self.n_before = max(self.orders) - 1  # tokens before this one that an n-gram can have
        self.n_address = len(self.orders) * self.n_head  # rows that a token reads
        if config.n_embd % self.n_address:
            rows = f"{len(self.orders)} orders x {self.n_head} --ngram_heads"
            raise UserError(f"--n_embd {config.n_embd} must be a multiple of {rows}")
        # Products with odd multipliers below 2^63 / V do not overflow.
        half = max(1, (2**63 - 1) // config.vocab_size // 2)
        rng = np.random.default_rng(10007 * config.row_layers[0])
        drawn = rng.integers(0, half, size=self.n_before + 1)
        self.multipliers = [2 * int(number) + 1 for number in drawn]
        self.sizes = primes(config.ngram_rows, self.n_address)  # rows of each head
        self.n_row = sum(self.sizes)

    def addresses(self, ids: Tensor, before: Tensor | None, documents: Tensor | None) -> Tensor:
        """Of the n-grams that end at ids [B, T]: [B, T, R].

        Args:
            before: [B, n_before], the tokens before these; None: there are none.
            documents: [B, T], numbers of documents, whose beginnings n-grams do not cross.
        """
        n = ids.shape[1]
        text = self.text(ids, before)  # [B, n_before + T]
        mix = ids * self.multipliers[0]  # [B, T]
        parts = []
        offset = 0
        for distance in range(1, self.n_before + 1):
            start = self.n_before - distance
            earlier = text[:, start : start + n]
            if documents is not None:
                same = F.pad(documents, (distance, 0), value=-1)[:, :n] == documents
                earlier = earlier.where(same, PAD)
            mix = mix ^ (earlier * self.multipliers[distance])
            if distance + 1 not in self.orders:
                continue
            for _ in range(self.n_head):
                size = self.sizes[len(parts)]
                parts.append(mix % size + offset)
                offset += size
        return torch.stack(parts, dim=-1)

    def text(self, ids: Tensor, before: Tensor | None) -> Tensor:
        """ids [B, T] and the tokens before them, [B, n_before + T]."""
        if before is None:
            before = ids.new_full((len(ids), self.n_before), PAD)
        return torch.cat((before, ids), dim=1)

    def last(self, ids: Tensor, before: Tensor | None) -> Tensor:
        """What is `before` the tokens that follow ids: [B, n_before]."""
        return self.text(ids, before)[:, -self.n_before :]


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


class Engram(nn.Module):
    """A memory of n-grams beside attention and FFN (Engram, section 2.3):

        s = norm(x) . norm(W_K e) / sqrt(n_embd)
        y = sigmoid(sign(s) sqrt(|s|)) W_V e

    Differs: no short convolution behind it (nor has DeepSeek-V4.1); no biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.row_width = width  # rows of all orders and heads, side by side
        self.query_norm = nn.RMSNorm(width, config.norm_eps)
        self.key_norm = nn.RMSNorm(width, config.norm_eps)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [B, T, n_embd], rows e [B, T, n_embd] -> [B, T, n_embd]."""
        key = self.key_norm(self.key(rows).to(x.dtype))  # [B, T, n_embd]
        score = (self.query_norm(x) * key).sum(-1, keepdim=True)  # [B, T, 1]
        score = score / x.shape[-1] ** 0.5
        score = score.sign() * score.abs().clamp_min(1e-6).sqrt()
        return score.sigmoid() * self.value(rows)


class Bigram(nn.Module):
    """The row of the last two tokens, added in every layer with a weight of its own (bigram hash
    embedding: K. Jordan et al., repository modded-nanogpt, 2026). Differs: Engram's hash."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.row_width = config.n_embd
        self.weight = nn.Parameter(torch.full((1,), 0.05))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x, rows [B, T, n_embd] -> [B, T, n_embd]."""
        return self.weight * rows


class ValueQKV(LinearQKV):
    """Value embeddings: a row of the token on the values of attention, with a learned weight
    (repositories modded-nanogpt, 2024, and nanochat). Differs: one weight a layer; nanochat's
    depends on x."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.row_width = config.n_kv_head * config.head_dim
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().forward(x, rows)
        row = rows.view_as(v)  # [B, T, n_kv_head, head_dim]
        return q, k, v + (self.weight * row).to(v.dtype)
