"""Prepared folders (text/dataset.py) as batches: windows of text or, for the stages that learn
answers, conversations (conversations.py).

Which sequences are in batch number n is a function of (seed, n) alone: a resumed run reads what an
uninterrupted one would have read, and the step is all that a checkpoint needs to know about data.
"""

import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common import UserError
from text.dataset import open_tokens, read_meta, read_tokenizer, unmarked
from training import find

# What a stage may read beside text, by kind of a folder's documents.
SOURCES = {"chat": "conversations.Conversations", "preference": "conversations.Pairs"}


class Source:
    """Sequences of token ids, in the order of the file or, with a seed, shuffled anew every epoch.

    Each kind of source has a method `sequence(index)`: inputs [T], targets [T] (-1: not predicted).
    What is not text has `question()`, too, the prompt that is answered at the end of a run, and is
    made of (ids, encoding, block_size, seed), see SOURCES.
    """

    def __init__(self, n_sequence: int, block_size: int, seed: int | None) -> None:
        self.n_sequence = n_sequence
        self.block_size = block_size
        self.seed = seed
        self.n_offset = 1  # every epoch draws an offset below this
        self.epoch = -1
        self.offset = 0
        self.order = np.arange(n_sequence)

    def begin_epoch(self, epoch: int) -> None:
        """Draw the order of an epoch and its offset: functions of the seed and the epoch alone."""
        self.epoch = epoch
        if self.seed is not None:
            rng = np.random.default_rng((self.seed, epoch))
            self.offset = int(rng.integers(self.n_offset))
            self.order = rng.permutation(self.n_sequence)

    def position_in_file(self, index: int) -> int:
        """Which sequence of the file comes as number `index`, counted over all epochs."""
        epoch, position = divmod(index, self.n_sequence)
        if epoch != self.epoch:
            self.begin_epoch(epoch)
        return int(self.order[position])

    def sequences(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, T] on the CPU."""
        return stacked([self.sequence(index) for index in indices])

    def batch(self, number: int, size: int) -> tuple[Tensor, Tensor]:
        return self.sequences(range(number * size, (number + 1) * size))


def stacked(sequences: list[tuple[np.ndarray, np.ndarray]]) -> tuple[Tensor, Tensor]:
    """Inputs and targets [T] of equal length as [B, T]."""
    inputs, targets = zip(*sequences, strict=True)
    return torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets))


class Windows(Source):
    """Text as windows of `block_size` + 1 tokens. Every epoch shifts the cuts by its offset."""

    def __init__(self, ids: np.ndarray, block_size: int, seed: int | None) -> None:
        super().__init__((len(ids) - 1) // block_size, block_size, seed)
        self.ids = ids
        self.n_offset = len(ids) - self.n_sequence * block_size

    def sequence(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        start = self.position_in_file(index) * self.block_size
        start += self.offset  # of this epoch
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


class Data:
    """What a run reads: `train`, a source of sequences, of which `n_sequence` are different;
    `val`, a source for each folder; `weights` and `metas` of the folders; their `encoding` and
    `corpora`."""

    def __init__(self, data_dir: str, kind: str, block_size: int, seed: int, total: int) -> None:
        """Open a folder, or a mixture of folders, of `kind` text, chat or preference; with `total`
        0 only what validation reads. UserError: a file is missing, damaged or too small, or
        tokenizers differ."""
        mixture = parse_mixture(data_dir)
        folders = list(mixture)
        self.weights = list(mixture.values())
        self.metas = [read_meta(folder) for folder in folders]
        if kind != "text" and len(folders) > 1:
            raise UserError(f"--data_dir {data_dir}: name one folder, conversations are not mixed")
        for folder, meta in zip(folders, self.metas, strict=True):
            if kind not in ("text", meta["kind"]):
                raise UserError(f"{folder} holds {meta['kind']}, this stage reads {kind}")
            check_tokenizer(meta["tokenizer"], folder, self.metas[0]["tokenizer"], folders[0])
        self.encoding = read_tokenizer(folders[0], self.metas[0])
        self.corpora = {meta["corpus"] for meta in self.metas}

        train = []
        self.val: dict[str, Source] = {}
        for folder, meta in zip(folders, self.metas, strict=True):
            if total:
                train.append(self.open(folder, "train", meta, kind, block_size, seed))
            self.val[str(folder)] = self.open(folder, "val", meta, kind, block_size, None)
        self.n_sequence = sum(source.n_sequence for source in train)
        if len(train) > 1:
            self.train = Mixture(train, self.weights, total, seed)
        elif train:
            self.train = train[0]

    def open(
        self, folder: Path, split: str, meta: dict, kind: str, block_size: int, seed: int | None
    ) -> Source:
        ids = open_tokens(folder, split, meta)
        if kind in SOURCES:
            return find(SOURCES[kind])(ids, self.encoding, block_size, seed)
        if meta["kind"] == "chat":  # as text, in memory
            ids = ids[unmarked(self.encoding, ids)]
        if len(ids) <= block_size:
            fix = f"lower --block_size {block_size} to {len(ids) - 1} or less"
            raise UserError(f"{folder}/{split}.bin has only {len(ids)} tokens: {fix}")
        return Windows(ids, block_size, seed)

    @cached_property
    def token_lengths(self) -> Tensor:
        """Bytes of text in each token [V], 0 in special tokens and in ids that no token has."""
        lengths = torch.zeros(self.encoding.n_vocab, dtype=torch.int64)
        for text in self.encoding.token_byte_values():
            lengths[self.encoding.encode_single_token(text)] = len(text)
        return lengths


def check_tokenizer(fingerprint: str, folder: object, expected: str, owner: object) -> None:
    """Refuse data whose token ids mean something else; tokenizers by their fingerprints."""
    if fingerprint != expected:
        made = f"--data_dir {folder} was made with a different tokenizer than {owner}"
        raise UserError(f"{made}: make it again with prepare.py --tokenizer {owner}")


def parse_mixture(data_dir: str) -> dict[Path, float]:
    """Folders and their weights, which sum up to one: `data/a` or `data/a=0.65,data/b=0.35`."""
    is_folder = os.path.isdir(data_dir)
    if "," in data_dir and "=" not in data_dir and not is_folder:
        raise UserError(f"--data_dir {data_dir}: to mix folders, give weights: a=0.5,b=0.5")
    if "=" not in data_dir or is_folder:
        return {Path(data_dir): 1.0}
    wrong = UserError(f"--data_dir {data_dir} is not folder=weight,folder=weight, each once")
    weights: dict[Path, float] = {}
    for part in data_dir.split(","):
        folder, _, number = part.strip().rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            raise wrong from None
        if not folder or Path(folder) in weights or not 0 < weight < 1e9:
            raise wrong
        weights[Path(folder)] = weight
    total = sum(weights.values())
    return {folder: weight / total for folder, weight in weights.items()}
