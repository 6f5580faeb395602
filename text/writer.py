"""Writes the token folders that dataset.py describes."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tiktoken

from common import UserError, atomic, locked, unfinished, writing
from text import chat, tokenizer
from text.dataset import FORMAT
from text.splitting import as_one_text

FILES = ("meta.json", "tokenizer.json", "train.bin", "val.bin")
BLOCK = 256  # documents that are encoded at a time, on several cores; less if they are long
LONG = 4 << 20  # characters: their ids, as Python's integers, take ten bytes for each


@dataclass
class SplitWriter:
    """A token file that is being written, with its sizes and its checksum so far."""

    file: BinaryIO
    dtype: str
    documents: int = 0
    tokens: int = 0
    bytes: int = 0  # of the text, special tokens of conversations included
    sha256: Any = field(default_factory=hashlib.sha256)

    def write(self, encoding: tiktoken.Encoding, ids: list[int]) -> None:
        """Add a document's token ids, after the <|endoftext|> that precedes every document."""
        tokens = np.array([encoding.eot_token, *ids], self.dtype)
        self.file.write(tokens)
        self.sha256.update(tokens)
        self.documents += 1
        self.tokens += len(tokens)
        self.bytes += len(encoding.decode_bytes(ids))

    def meta(self) -> dict:
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "sha256": self.sha256.hexdigest(),
        }


def check_free(out_dir: Path) -> None:
    """UserError: a folder has another data set, or files of these names. What a command left that
    was killed while it replaced them is neither: there is no meta.json, but an unfinished one."""
    found = [name for name in FILES if os.path.lexists(out_dir / name)]
    if "meta.json" in found or (found and not unfinished(out_dir / "meta.json")):
        ways = "prepare.py --overwrite replaces it, or choose another folder"
        raise UserError(f"{out_dir} has a {found[0]} already: {ways}")


def write_dataset(
    out_dir: Path,
    documents: Iterable[tuple[str, Any]],
    encoding: tiktoken.Encoding,
    kind: str = "text",
    *,
    overwrite: bool = False,
    **origin,
) -> dict:
    """Write a token folder. What was there is replaced once all of it is complete.

    Args:
        documents: splits ("train" or "val") and documents: str, messages (chat) or two of them
            (preference).
        overwrite: replace another data set.
        origin: further entries of meta.json; `corpus` is needed to train on the folder.

    Returns:
        meta.json.

    Raises:
        UserError: a split has no document, or the folder cannot be written or is not free.
    """
    dtype = "uint16" if encoding.n_vocab <= 2**16 else "uint32"
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(out_dir))
        if not overwrite:
            check_free(out_dir)
        # These are left in reverse order: meta.json is replaced last.
        paths = [stack.enter_context(atomic(out_dir / name)) for name in FILES]
        meta_path, tokenizer_path, train_path, val_path = paths
        stack.enter_context(writing(out_dir))  # whichever of these files has no room
        with open(train_path, "wb") as train_file, open(val_path, "wb") as val_file:
            splits = {"train": SplitWriter(train_file, dtype), "val": SplitWriter(val_file, dtype)}
            for block in blocks(documents):
                encoded = encode_documents(encoding, kind, [document for _, document in block])
                for (split, _), ids in zip(block, encoded, strict=True):
                    splits[split].write(encoding, ids)
        for name, split in splits.items():
            if not split.documents:
                raise UserError(f"no document for {name}.bin: there must be more than one")
        meta = {
            "format": FORMAT,
            "kind": kind,
            "vocab_size": encoding.n_vocab,
            "dtype": dtype,
            **origin,
            "tokenizer": tokenizer.fingerprint(encoding),
            "train": splits["train"].meta(),
            "val": splits["val"].meta(),
        }
        tokenizer_path.write_text(tokenizer.dumps(encoding), encoding="utf-8")
        meta_path.write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        # While old files are replaced by new ones, the folder has no meta.json: it is not complete.
        (out_dir / "meta.json").unlink(missing_ok=True)
    return meta


def blocks(documents: Iterable[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    """Yield documents with their splits in lists of BLOCK, or of less if they are long."""
    block, size = [], 0
    for split, document in documents:
        block.append((split, document))
        size += len(as_one_text(document))
        if len(block) == BLOCK or size >= LONG:
            yield block
            block, size = [], 0
    yield block


def encode_documents(encoding: tiktoken.Encoding, kind: str, documents: list) -> list[list[int]]:
    """Token ids of each document, without the <|endoftext|> that precedes it."""
    if kind == "text":
        return encoding.encode_ordinary_batch(documents)
    if kind == "chat":
        return [marked(encoding, messages) for messages in documents]
    # Two conversations, each preceded by <|endoftext|>.
    pairs = [[chat.render(encoding, talk) for talk in pair] for pair in documents]
    return [[*chosen, encoding.eot_token, *rejected] for chosen, rejected in pairs]


def marked(encoding: tiktoken.Encoding, messages: list[dict]) -> list[int]:
    """Token ids of a conversation, with marks in messages that are not to be learned."""
    ids = []
    for message in messages:
        turn = chat.render(encoding, [message])
        if "weight" in message:
            turn.insert(1, encoding.encode_single_token(tokenizer.END))
        ids += turn
    return ids
