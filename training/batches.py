"""Prepared folders (text/dataset.py) as what a run reads: windows of text (sources.py) or, for the
stages that learn answers, conversations (conversations.py)."""

import os
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from common import UserError, command_line
from text.dataset import is_unmarked, open_tokens, read_meta, read_tokenizer
from training.conversations import Conversations, Pairs
from training.sources import Mixture, Source, Windows

# What a stage reads of the documents of a folder, beside text.
SOURCES = {"chat": Conversations, "preference": Pairs}


class Data:
    """What a run reads.

    train: a source of sequences, if a run reads them. After `n_sequence` of them, one is read again
        (of a mixture, in the folder that is the first to end).
    val: a source for each folder.
    weights, metas: the share of each folder in a mixture, and its meta.json.
    encoding, corpora: their tokenizer, and the names of the corpora they hold.
    """

    def __init__(self, data_dir: str, reads: str, block_size: int, seed: int, total: int) -> None:
        """Open a folder, or a mixture of folders.

        Args:
            reads: what the stage reads, text, chat or preference (`Stage.reads`).
            block_size: tokens in a sequence, at most.
            total: sequences that the run will read; 0: open only what validation reads.

        Raises:
            UserError: a file is missing, damaged or too small, or tokenizers differ.
        """
        mixture = parse_mixture(data_dir)
        folders = list(mixture)
        self.weights = list(mixture.values())
        self.metas = [read_meta(folder) for folder in folders]
        if reads != "text" and len(folders) > 1:
            raise UserError(f"--data_dir {data_dir}: name one folder, conversations are not mixed")
        self.encoding = read_tokenizer(folders[0], self.metas[0])
        self.corpora = {meta["corpus"] for meta in self.metas}
        self.splits = ("train", "val") if total else ("val",)  # that are opened

        train = []
        self.val: dict[str, Source] = {}
        for folder, meta in zip(folders, self.metas, strict=True):
            if reads not in ("text", meta["kind"]):
                holds = f"--data_dir {folder} holds {meta['kind']}, this --stage reads {reads}"
                raise UserError(f"{holds}: change one of them")
            check_tokenizer(meta["tokenizer"], folder, self.metas[0]["tokenizer"], folders[0])
            if total and meta.get("val_fraction") == 1:
                raise UserError(f"--data_dir {folder} is held out, for --eval_only: leave it out")
            if total:
                train.append(self.open(folder, "train", meta, reads, block_size, seed))
            self.val[str(folder)] = self.open(folder, "val", meta, reads, block_size, None)
        if total:
            pairs = zip(train, self.weights, strict=True)
            self.n_sequence = min(source.n_sequence / weight for source, weight in pairs)
            self.train = train[0]
            if len(train) > 1:
                self.train = Mixture(train, self.weights, total, seed)

    def open(
        self, folder: Path, split: str, meta: dict, reads: str, block_size: int, seed: int | None
    ) -> Source:
        ids = open_tokens(folder, split, meta)
        if reads in SOURCES:
            return SOURCES[reads](ids, self.encoding, block_size, seed)
        if meta["kind"] == "chat":  # as text, in memory
            ids = ids[is_unmarked(self.encoding, ids)]
        if len(ids) <= block_size:
            least = min(meta[name]["tokens"] for name in self.splits)
            fix = f"lower --block_size {block_size} to {least - 1} or less"
            if len(self.metas) > 1:
                fix += ", or leave this folder out"
            if meta["kind"] == "chat":
                fix = "--stage sft reads its conversations as they are"
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
        flags = ("--tokenizer", owner, "--out_dir", folder, "--overwrite")
        again = f"make it again with {command_line('prepare.py', *flags)}"
        raise UserError(f"{made}: {again} and its --input or --dataset, or name another folder")


def parse_mixture(data_dir: str | Path) -> dict[Path, float]:
    """Folders and their weights, which sum up to one: `data/a`, `data/a=0.65,data/b=0.35`, or
    `data/a,data/b` by equal weights."""
    data_dir = str(data_dir)
    if os.path.isdir(data_dir):  # whatever its name
        return {Path(data_dir): 1.0}
    parts = data_dir.split(",")
    if "=" not in data_dir:
        parts = [f"{folder}=1" for folder in parts]
    wrong = UserError(
        f"--data_dir {data_dir} is not folder=weight,folder=weight or folder,folder, each once"
    )
    weights: dict[Path, float] = {}
    for part in parts:
        folder, _, number = map(str.strip, part.rpartition("="))
        try:
            weight = float(number)
        except ValueError:
            raise wrong from None
        if not folder or Path(folder) in weights or not 0 < weight < 1e9:
            raise wrong
        weights[Path(folder)] = weight
    total = sum(weights.values())
    return {folder: weight / total for folder, weight in weights.items()}
