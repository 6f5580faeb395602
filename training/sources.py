"""Sequences of token ids to train on: what each kind of source has in common, windows of text, and
a mixture of several sources.

Which sequence comes as number n is a function of n, the seed and, in a mixture, its weights: a
resumed run reads what an uninterrupted one would have read, and of the data's order, a checkpoint
needs to know the step alone.
"""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def shuffled(seed: int, epoch: int, n_sequence: int, n_offset: int) -> tuple[np.ndarray, int]:
    """The order of all sequences in an epoch [n_sequence], and an offset below `n_offset`."""
    rng = np.random.default_rng((seed, epoch))
    offset = int(rng.integers(n_offset))
    return rng.permutation(n_sequence), offset


class Source:
    """Sequences of token ids, in the order of the file or, with a seed, shuffled anew every epoch.

    Each kind of source has a method `sequence(index)`: inputs [T], targets [T] (-1: not predicted).
    What is not text has `question()`, too, the prompt that is answered at the end of a run.
    """

    n_cut = 0  # conversations that are cut to block_size
    n_same = 0  # pairs that are left out, as their answers are the same then

    def __init__(
        self, n_sequence: int, block_size: int, seed: int | None, n_offset: int = 1
    ) -> None:
        assert n_sequence > 0, f"not one sequence of {block_size} tokens, and the one that follows"
        self.n_sequence = n_sequence
        self.n_token = n_sequence * block_size  # in all sequences, if they are full
        self.block_size = block_size
        self.seed = seed
        self.n_offset = n_offset
        self.shuffled = lru_cache(maxsize=1)(shuffled)  # of the latest epoch

    def place(self, index: int) -> tuple[int, int]:
        """Which sequence of the file comes as number `index`, counted over all epochs, and the
        offset of its epoch."""
        epoch, position = divmod(index, self.n_sequence)
        if self.seed is None:
            return position, 0
        order, offset = self.shuffled(self.seed, epoch, self.n_sequence, self.n_offset)
        return int(order[position]), offset

    def sequences(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, T] on the CPU."""
        return stacked([self.sequence(index) for index in indices])

    def batch(self, number: int, size: int) -> tuple[Tensor, Tensor]:
        return self.sequences(range(number * size, (number + 1) * size))

    def spread(self, n_token: int) -> list[int]:
        """The numbers of sequences that have about `n_token` tokens, spread evenly over the whole
        source."""
        n = max(1, min(self.n_sequence, n_token * self.n_sequence // self.n_token))
        return [number * self.n_sequence // n for number in range(n)]


def stacked(sequences: list[tuple[np.ndarray, np.ndarray]]) -> tuple[Tensor, Tensor]:
    """Inputs and targets [T] of equal length as [B, T]."""
    inputs, targets = zip(*sequences, strict=True)
    return torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets))


class Windows(Source):
    """Text as windows of `block_size` + 1 tokens. Every epoch shifts the cuts by its offset."""

    def __init__(self, ids: np.ndarray, block_size: int, seed: int | None) -> None:
        n_sequence = (len(ids) - 1) // block_size
        super().__init__(n_sequence, block_size, seed, len(ids) - n_sequence * block_size)
        self.ids = ids

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        number, offset = self.place(index)
        start = number * self.block_size + offset
        ids = self.ids[start : start + self.block_size + 1].astype(np.int64)
        return ids[:-1], ids[1:]


class Mixture(Source):
    """Sequences of several sources, drawn by weight: for all `total` of the run beforehand, so that
    the source of each depends on its number alone."""

    def __init__(self, sources: list[Source], weights: list[float], total: int, seed: int) -> None:
        super().__init__(total, sources[0].block_size, seed)
        self.sources = sources
        self.which = np.random.default_rng(seed).choice(len(sources), size=total, p=weights)
        self.nth = np.empty(total, dtype=np.int64)  # number of the sequence within its source
        for number in range(len(sources)):
            drawn = self.which == number
            self.nth[drawn] = np.arange(drawn.sum())

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.sources[self.which[index]].sequence(int(self.nth[index]))
