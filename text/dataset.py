"""Token folders: what prepare.py writes, and training reads.

    tokenizer.json          the tokenizer, as one line of JSON (tokenizer.py)
    train.bin, val.bin      token ids, uint16 or uint32, every document preceded by <|endoftext|>
    meta.json               kind of the documents, sizes, checksums, and where they come from

meta.json is written last: a folder that has one is complete. In a message of weight 0, which is not
to be learned, <|im_end|> follows <|im_start|>: `unmarked` finds it, to be taken out.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tiktoken

from common import Damage, UserError, atomic, command_line, locked, parse_json, reading
from text import tokenizer

FORMAT = 2
BLOCK = 256  # documents that are encoded at a time, on several cores

# What readers rely on in what meta.json says of each split.
OF_SPLIT = dict(documents=int, tokens=int, sha256=str)


# --- reading ---


def again(folder: Path) -> str:
    """What to do where a file of a folder is missing or damaged."""
    return f"run {command_line('prepare.py', '--out_dir', folder)}, with --input or --dataset"


def read_meta(folder: Path) -> dict:
    """What `write_dataset` wrote about a folder. UserError: it is missing or damaged."""
    path = folder / "meta.json"
    with reading(path, again(folder)):
        meta = parse_json(
            path.read_bytes(),
            format=int,
            corpus=str,
            kind=str,
            vocab_size=int,
            dtype=str,
            tokenizer=str,
            train=OF_SPLIT,
            val=OF_SPLIT,
        )
        if meta["format"] != FORMAT:
            raise Damage(f"format {meta['format']}, not {FORMAT}")
        if meta["dtype"] not in ("uint16", "uint32"):
            raise Damage(f"dtype {meta['dtype']!r:.40}")
    return meta


def read_tokenizer(folder: Path, meta: dict) -> tiktoken.Encoding:
    """The tokenizer that the folder's token files were made with. UserError: it is missing,
    damaged, or another one."""
    path = folder / "tokenizer.json"
    with reading(path, again(folder)):
        encoding = tokenizer.loads(path.read_bytes())
        if tokenizer.fingerprint(encoding) != meta["tokenizer"]:
            raise Damage("not the tokenizer of the token files")
        if encoding.n_vocab != meta["vocab_size"]:
            raise Damage(f"{encoding.n_vocab} tokens, not {meta['vocab_size']}")
    return encoding


def open_tokens(folder: Path, split: str, meta: dict) -> np.ndarray:
    """The token ids of a split [tokens], memory-mapped. UserError: the file is missing or damaged;
    to check its sha256 takes 0.06 s for 100 MB."""
    path = folder / f"{split}.bin"
    with reading(path, again(folder)):
        expected = meta[split]["tokens"] * np.dtype(meta["dtype"]).itemsize
        if path.stat().st_size != expected:
            raise Damage(f"{path.stat().st_size:,} bytes, not {expected:,}")
        ids = np.memmap(path, dtype=meta["dtype"], mode="r")
        if hashlib.sha256(ids).hexdigest() != meta[split]["sha256"]:
            raise Damage("its sha256 differs from meta.json")
    return ids


def unmarked(encoding: tiktoken.Encoding, ids: np.ndarray) -> np.ndarray:
    """Which tokens of conversations [T] are none of the marks above: [T] bool."""
    start, stop = map(encoding.encode_single_token, (tokenizer.START, tokenizer.END))
    return (ids != stop) | (np.roll(ids, 1) != start)


# --- writing ---


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
        """Add a document's token ids, behind the <|endoftext|> that precedes every document."""
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


def write_dataset(
    out_dir: Path,
    documents: Iterable[tuple[str, Any]],
    encoding: tiktoken.Encoding,
    kind: str = "text",
    **origin,
) -> dict:
    """Write a token folder. It replaces what was there once all of it is complete.

    Args:
        documents: splits ("train" or "val") and documents: str, messages (chat) or two of them
            (preference).
        origin: further entries of meta.json; `corpus` is needed to train on the folder.

    Returns:
        meta.json.

    Raises:
        UserError: a split has no document, or the folder cannot be written.
    """
    dtype = "uint16" if encoding.n_vocab <= 2**16 else "uint32"
    with (
        locked(out_dir),
        # These are left in reverse order: meta.json is replaced last.
        atomic(out_dir / "meta.json") as meta_path,
        atomic(out_dir / "tokenizer.json") as tokenizer_path,
        atomic(out_dir / "train.bin") as train_path,
        atomic(out_dir / "val.bin") as val_path,
    ):
        with open(train_path, "wb") as train_file, open(val_path, "wb") as val_file:
            splits = {"train": SplitWriter(train_file, dtype), "val": SplitWriter(val_file, dtype)}
            documents = iter(documents)
            while block := list(islice(documents, BLOCK)):
                encoded = encode(encoding, kind, [document for _, document in block])
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


def encode(encoding: tiktoken.Encoding, kind: str, documents: list) -> list[list[int]]:
    """Token ids of each document, without the <|endoftext|> that precedes it."""
    if kind == "text":
        return encoding.encode_ordinary_batch(documents)
    if kind == "chat":
        return [render(encoding, messages) for messages in documents]
    # Two conversations, each preceded by <|endoftext|>.
    pairs = [[tokenizer.render(encoding, talk) for talk in pair] for pair in documents]
    return [[*chosen, encoding.eot_token, *rejected] for chosen, rejected in pairs]


def render(encoding: tiktoken.Encoding, messages: list[dict]) -> list[int]:
    """Token ids of a conversation, with marks in messages that are not to be learned."""
    ids = []
    for message in messages:
        turn = tokenizer.render(encoding, [message])
        if "weight" in message:
            turn.insert(1, encoding.encode_single_token(tokenizer.END))
        ids += turn
    return ids
