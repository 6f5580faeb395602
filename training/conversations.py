"""Conversations as batches, for the stages sft and dpo: only answers are learned."""

from collections.abc import Iterable

import numpy as np
from tiktoken import Encoding
from torch import Tensor

from common import UserError, progress
from text import chat
from text.dataset import is_unmarked
from training.sources import Source, stacked


class Conversations(Source):
    """One conversation per sequence; its targets are the assistant's tokens (`chat.answers`).
    If it is too long (`n_cut` are), its beginning is kept or, if no answer begins there, its end.
    With `only_last`, its targets are the last answer, and its end is kept."""

    def __init__(
        self,
        ids: np.ndarray,
        encoding: Encoding,
        block_size: int,
        seed: int | None,
        *,
        only_last: bool = False,
    ) -> None:
        self.only_last = only_last
        self.ids = ids
        self.encoding = encoding
        self.starts = np.append(np.flatnonzero(ids == encoding.eot_token), len(ids))
        lengths = np.diff(self.starts)
        self.n_cut = int((lengths > block_size + 1).sum())
        super().__init__(len(lengths), block_size, seed)
        self.n_token = int(lengths.clip(max=block_size).sum())  # few are full

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        number, _ = self.place(index)
        ids = self.ids[self.starts[number] : self.starts[number + 1]].astype(np.int64)
        # What is marked (text/dataset.py) is not found to be an answer. The marks are taken out.
        kept = is_unmarked(self.encoding, ids)
        moved = np.append(0, kept.cumsum())  # where each token is then
        answers = [(moved[start], moved[stop]) for start, stop in chat.answers(self.encoding, ids)]
        ids = ids[kept]
        end = self.block_size + 1
        if answers and (self.only_last or answers[0][0] >= end):
            end = answers[-1][1]
        targets = np.full_like(ids, -1)
        for start, stop in answers[-1:] if self.only_last else answers:
            targets[start:stop] = ids[start:stop]
        window = slice(max(0, end - self.block_size - 1), end)
        return ids[window][:-1], targets[window][1:]

    def sequences(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, T] on the CPU. Those that are short are padded on the right."""
        found = [self.sequence(index) for index in indices]
        lengths = {len(ids) for ids, _ in found}
        if len(lengths) > 1:
            longest = min(-(-max(lengths) // 32) * 32, self.block_size)  # few shapes to compile
            found = [padded(*sequence, longest) for sequence in found]
        return stacked(found)

    def question(self) -> list[int]:
        """Token ids of the first conversation up to its first answer."""
        ids, targets = self.sequence(0)
        return ids[: (targets >= 0).argmax() + 1].tolist()


def padded(ids: np.ndarray, targets: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """A sequence of n tokens. A causal model never sees the padding; it repeats the last token, so
    that no row of another token is read for it."""
    room = (0, n - len(ids))
    return np.pad(ids, room, mode="edge"), np.pad(targets, room, constant_values=-1)


class Pairs(Source):
    """Pairs of conversations, chosen and rejected, which follow each other in the file. Those whose
    answers are the same once they are cut, `n_same`, teach nothing and are left out. UserError: no
    pair is left."""

    def __init__(
        self, ids: np.ndarray, encoding: Encoding, block_size: int, seed: int | None
    ) -> None:
        self.conversations = Conversations(ids, encoding, block_size, None, only_last=True)
        self.n_cut = self.conversations.n_cut
        n_pair = self.conversations.n_sequence // 2
        numbers = progress(range(n_pair), "comparing", unit="pair")
        self.numbers = [number for number in numbers if self.differ(number)]  # in the file
        self.n_same = n_pair - len(self.numbers)
        if not self.numbers:
            raise UserError(
                f"--block_size {block_size}: the answers of all {n_pair:,} pairs differ only "
                "before their ends, which are kept: raise it"
            )
        super().__init__(len(self.numbers), block_size, seed)

    def differ(self, number: int) -> bool:
        """Whether what is kept of a pair's answers is not the same."""
        starts = self.conversations.starts[2 * number :]
        if max(np.diff(starts[:3])) <= self.conversations.block_size + 1:
            return True  # nothing is cut
        (_, chosen), (_, rejected) = map(self.conversations.sequence, (2 * number, 2 * number + 1))
        return not np.array_equal(chosen, rejected)

    def pairs(self, numbers: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, 2, T] of pairs by their numbers among those that differ."""
        both = [2 * self.numbers[number] + k for number in numbers for k in (0, 1)]
        inputs, targets = self.conversations.sequences(both)  # [2 B, T]
        return inputs.unflatten(0, (-1, 2)), targets.unflatten(0, (-1, 2))

    def sequences(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        return self.pairs([self.place(index)[0] for index in indices])

    def question(self) -> list[int]:
        return self.conversations.question()
