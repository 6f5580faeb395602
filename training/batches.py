"""Prepared folders (prepare.py) as batches: windows of text, conversations, preference pairs.

Which rows are in batch number n is a function of (seed, n) alone: a resumed run reads what an
uninterrupted one would have read, and the step is all that a checkpoint needs to know about data.
"""

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from tiktoken import Encoding
from torch import Tensor

from common import UserError, reading
from text import tokenizer


def padded(ids: np.ndarray, targets: np.ndarray, length: int) -> tuple[np.ndarray, ...]:
    """Inputs and targets [.., T], filled up to [.., length]. A causal model never sees the padding,
    which repeats the last token, so that no other row of a table counts as read."""
    room = [(0, 0)] * (ids.ndim - 1) + [(0, length - ids.shape[-1])]
    return np.pad(ids, room, mode="edge"), np.pad(targets, room, constant_values=-1)


class Source:
    """Rows of token ids in the order of the file or, with a seed, shuffled anew every epoch. Each
    kind of source has a method `row`: inputs [.., T], targets [.., T] (-1: not predicted), and what
    else belongs to row number n."""

    epoch, offset, room = -1, 0, 1  # every epoch draws an offset below `room`

    def __init__(self, n_row: int, block_size: int, seed: int | None) -> None:
        self.n_row, self.block_size, self.seed = n_row, block_size, seed

    def row_index(self, index: int) -> int:
        """Which of the n_row rows comes as number `index`, counted over all epochs."""
        if self.seed is None:
            return index % self.n_row
        epoch, at = divmod(index, self.n_row)
        if epoch != self.epoch:
            rng = np.random.default_rng((self.seed, epoch))
            self.offset = int(rng.integers(self.room))
            self.order, self.epoch = rng.permutation(self.n_row), epoch
        return int(self.order[at])

    def rows(self, indices: Iterable[int]) -> tuple[Tensor, ...]:
        """Rows as tensors [B, .., T] on the CPU, the short ones `padded` on the right."""
        rows = [self.row(index) for index in indices]
        longest = max(row[0].shape[-1] for row in rows)
        if any(row[0].shape[-1] < longest for row in rows):
            longest = min(-(-longest // 32) * 32, self.block_size)  # few shapes, to be compiled
        rows = [(*padded(*row[:2], longest), *row[2:]) for row in rows]
        return tuple(torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))

    def batch(self, number: int, size: int) -> tuple[Tensor, ...]:
        return self.rows(range(number * size, (number + 1) * size))


class Windows(Source):
    """Text as windows of `block_size` + 1 tokens. Every epoch shifts the cuts by its offset."""

    def __init__(self, ids: np.ndarray, block_size: int, seed: int | None) -> None:
        super().__init__((len(ids) - 1) // block_size, block_size, seed)
        self.ids, self.room = ids, len(ids) - self.n_row * block_size

    def row(self, index: int) -> tuple[np.ndarray, ...]:
        row_index = self.row_index(index)  # draws the offset of a new epoch
        start = row_index * self.block_size + self.offset
        ids = self.ids[start : start + self.block_size + 1].astype(np.int64)
        return ids[:-1], ids[1:]


class Conversations(Source):
    """A conversation in a row, its targets the assistant's tokens (`tokenizer.answers`). One
    that is too long (`n_cut` are) is cut to its head or, if no answer begins there, to its end."""

    per_row = 1

    def __init__(self, ids: np.ndarray, encoding: Encoding, block_size: int, seed: int | None):
        self.ids, self.encoding = ids, encoding
        self.starts = np.append(np.flatnonzero(ids == encoding.eot_token), len(ids))
        self.n_cut = int((np.diff(self.starts) > block_size + 1).sum())
        super().__init__((len(self.starts) - 1) // self.per_row, block_size, seed)

    def conversation(self, number: int) -> tuple[np.ndarray, ...]:
        ids = self.ids[self.starts[number] : self.starts[number + 1]].astype(np.int64)
        answer = tokenizer.answers(self.encoding, ids)
        answer[0] = False  # nothing predicts the first token
        end = self.block_size + 1
        if answer.any() and (self.per_row == 2 or not answer[:end].any()):
            end = max(end, np.flatnonzero(answer)[-1] + 1)
        ids, answer = (array[max(0, end - self.block_size - 1) : end] for array in (ids, answer))
        return ids[:-1], np.where(answer, ids, -1)[1:]

    def row(self, index: int) -> tuple[np.ndarray, ...]:
        return self.conversation(self.row_index(index))


class Pairs(Conversations):
    """Two conversations in a row, chosen and rejected: [2, T], cut to their ends, as the last
    answers differ. With them comes their row of `reference` [n_row, 2], both log-probabilities."""

    per_row = 2

    @cached_property
    def reference(self) -> np.ndarray:  # NaN until `compute_reference_logprobs` has written it
        return np.full((self.n_row, 2), np.nan, dtype=np.float32)

    def row(self, index: int) -> tuple[np.ndarray, ...]:
        pair = self.row_index(index)
        two = [self.conversation(2 * pair + n) for n in (0, 1)]
        longest = max(len(ids) for ids, _ in two)
        ids, targets = zip(*(padded(*one, longest) for one in two), strict=True)
        return np.stack(ids), np.stack(targets), self.reference[pair]


class Mixture(Source):
    """Rows of several sources, drawn by weight: for all `total` rows of the run beforehand, so that
    a row's source depends on its number alone."""

    def __init__(self, sources: list[Source], weights: list[float], total: int, seed: int) -> None:
        self.sources, self.block_size = sources, sources[0].block_size
        self.which = np.random.default_rng(seed).choice(len(sources), size=total, p=weights)
        drawn = self.which[:, None] == np.arange(len(sources))  # [total, sources]
        self.nth = (drawn.cumsum(0) - 1)[drawn]  # number of the row within its source

    def row(self, index: int) -> tuple[np.ndarray, ...]:
        return self.sources[self.which[index]].row(int(self.nth[index]))


def read_meta(folder: Path) -> dict:
    """What prepare.py wrote about a folder."""
    with reading(folder / "meta.json", f"run prepare.py --out_dir {folder}") as path:
        meta = json.loads(path.read_text(encoding="utf-8"))
        required = {"corpus", "kind", "vocab_size", "dtype", "tokenizer"}
        required |= {"documents", "tokens", "sha256"}  # of each split
        missing = required - (meta.keys() | meta["train"].keys() & meta["val"].keys())
        if meta["format"] != 2 or missing:
            raise ValueError(f"another format, or it lacks {', '.join(missing)}")
    return meta


def read_tokenizer(folder: Path, meta: dict) -> Encoding:
    """The tokenizer that the folder's token files were made with."""
    with reading(folder / "tokenizer.json", f"run prepare.py --out_dir {folder}") as path:
        encoding = tokenizer.loads(path.read_text(encoding="utf-8"))
        found = (tokenizer.fingerprint(encoding), encoding.n_vocab)
        if found != (meta["tokenizer"], meta["vocab_size"]):
            raise ValueError("not the tokenizer of the token files")
    return encoding


def open_tokens(folder: Path, split: str, meta: dict) -> np.ndarray:
    """The token ids of a split [tokens], memory-mapped. Their sha256 takes 0.06 s for 100 MB."""
    with reading(folder / f"{split}.bin", f"run prepare.py --out_dir {folder}") as path:
        ids = np.memmap(path, dtype=meta["dtype"], mode="r")
        if hashlib.sha256(ids).hexdigest() != meta[split]["sha256"]:
            raise ValueError("another sha256 than in meta.json")
    return ids


class Data:
    """What a run reads from `data_dir`, a folder or a mixture: `total` rows of a kind, text, chat
    or preference, to train on and, by folder, to validate with. `pairs` are the sources that need
    a reference model. UserError: a file is missing, damaged or too small, or tokenizers differ."""

    def __init__(self, data_dir: str, kind: str, block_size: int, seed: int, total: int) -> None:
        mixture = parse_mixture(data_dir)
        folders = [(folder, read_meta(folder)) for folder in mixture]
        self.weights, self.metas = list(mixture.values()), [meta for _, meta in folders]
        if kind != "text" and len(folders) > 1:
            raise UserError(f"--data_dir {data_dir}: name one folder, {kind} data is not mixed")
        for folder, meta in folders:
            if meta["kind"] != kind and (meta["kind"], kind) != ("chat", "text"):
                raise UserError(f"{folder} holds {meta['kind']} data, this stage reads {kind} data")
            check_tokenizer(meta["tokenizer"], folder, self.metas[0]["tokenizer"], folders[0][0])
        self.encoding = read_tokenizer(*folders[0])

        def source(folder: Path, meta: dict, split: str, seed: int | None) -> Source:
            ids = open_tokens(folder, split, meta)
            if kind != "text":
                conversations = Conversations if kind == "chat" else Pairs
                return conversations(ids, self.encoding, block_size, seed)
            if len(ids) <= block_size:
                n, lower = len(ids), f"lower --block_size {block_size}"
                raise UserError(f"{folder}/{split}.bin has {n} tokens: {lower}")
            return Windows(ids, block_size, seed)

        train = [source(folder, meta, "train", seed) for folder, meta in folders]
        self.train = train[0] if len(train) == 1 else Mixture(train, self.weights, total, seed)
        self.val = {str(folder): source(folder, meta, "val", None) for folder, meta in folders}
        self.pairs = [s for s in (self.train, *self.val.values()) if isinstance(s, Pairs)]

    @cached_property
    def token_lengths(self) -> Tensor:
        """Bytes of text in each token [V], 0 in special tokens and in ids that no token has."""
        lengths = torch.zeros(self.encoding.n_vocab, dtype=torch.int64)
        for text in self.encoding.token_byte_values():
            lengths[self.encoding.encode_single_token(text)] = len(text)
        return lengths


def check_tokenizer(mine: str, folder: object, other: str, of: object) -> None:
    """Refuse data whose token ids mean something else; tokenizers by their fingerprints."""
    if mine != other:
        made = f"--data_dir {folder} was made with another tokenizer than {of}"
        raise UserError(f"{made}: make it again with prepare.py --tokenizer {of}")


def parse_mixture(data_dir: str) -> dict[Path, float]:
    """Folders and their weights, which sum up to one: `data/a` or `data/a=0.65,data/b=0.35`."""
    if "=" not in data_dir or Path(data_dir).is_dir():
        return {Path(data_dir): 1.0}
    parts = [part.rpartition("=") for part in data_dir.split(",")]
    try:
        weights = {Path(folder): float(weight) for folder, _, weight in parts if folder}
    except ValueError:
        weights = {}
    if len(weights) < len(parts) or not all(0 < weight < 1e9 for weight in weights.values()):
        raise UserError(f"--data_dir {data_dir} is not folder=weight,folder=weight, each once")
    return {folder: weight / sum(weights.values()) for folder, weight in weights.items()}
