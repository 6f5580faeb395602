"""Prepared text as batches of token windows (made by prepare.py, read by train.py)."""

import json
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch import Tensor

import tokenizer
from common import UserError


class Tokens:
    """A split of a prepared folder as windows of `block_size` + 1 tokens, one epoch after another.

    Batch number n is a function of (seed, n) alone: a resumed run reads what an uninterrupted one
    would have read, and the step is all that a checkpoint needs to know about the data.
    """

    def __init__(self, folder: Path, split: str, meta: dict, block_size: int, seed: int) -> None:
        path = folder / f"{split}.bin"
        try:
            self.ids = np.memmap(path, dtype=meta["dtype"], mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {path} ({error}): run prepare.py again") from None
        if len(self.ids) != meta[split]["tokens"]:
            raise UserError(
                f"{path} has {len(self.ids)} tokens where meta.json says {meta[split]['tokens']}: "
                "run prepare.py again"
            )
        self.block_size, self.seed = block_size, seed
        self.n_window = (len(self.ids) - 1) // block_size
        if self.n_window < 1:
            raise UserError(
                f"{path} has {len(self.ids)} tokens, too few for --block_size {block_size}: "
                "use a smaller one or more text"
            )
        self.epoch, self.order = -1, np.empty(0, dtype=np.int64)

    def windows(self, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, block_size] for windows that begin at these tokens, on the CPU."""
        span = np.arange(self.block_size + 1)
        ids = torch.from_numpy(self.ids[starts[:, None] + span].astype(np.int64))  # [B, T + 1]
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def batch(self, number: int, size: int) -> tuple[Tensor, Tensor]:
        """Training batch `number` of `size` windows: every epoch shuffles them anew, and moves the
        cuts as far as the text that no window holds leaves room."""
        starts = [self.start(index) for index in range(number * size, (number + 1) * size)]
        return self.windows(np.array(starts))

    def start(self, index: int) -> int:
        epoch, window = divmod(index, self.n_window)
        if epoch != self.epoch:
            rng = np.random.default_rng((self.seed, epoch))
            self.offset = int(rng.integers(len(self.ids) - self.n_window * self.block_size))
            self.order, self.epoch = rng.permutation(self.n_window), epoch
        return int(self.order[window]) * self.block_size + self.offset


def read_meta(folder: Path) -> dict:
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        if meta["format"] != 2:
            raise ValueError(f"format {meta['format']} instead of 2")
        for key in ("kind", "corpus", "vocab_size", "dtype", "tokenizer", "train", "val"):
            meta[key]
        for split in ("train", "val"):
            meta[split]["tokens"] + meta[split]["bytes"]
        return meta
    except FileNotFoundError:
        raise UserError(
            f"no data in {folder}: make it with prepare.py --out_dir {folder}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}): run prepare.py again") from None


def read_tokenizer(folder: Path, meta: dict) -> tiktoken.Encoding:
    """The tokenizer that the folder's token files were made with.

    Raises:
        UserError: it is missing, damaged or another one.
    """
    path = folder / "tokenizer.json"
    try:
        encoding = tokenizer.loads(path.read_text(encoding="utf-8"))
        if tokenizer.fingerprint(encoding) != meta["tokenizer"]:
            raise ValueError("not the tokenizer that the token files were made with")
        return encoding
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}): run prepare.py again") from None
