"""Token folders, as training reads them; writer.py writes them.

    tokenizer.json          the tokenizer, as one line of JSON (tokenizer.py)
    train.bin, val.bin      token ids, uint16 or uint32, every document preceded by <|endoftext|>
    meta.json               kind of the documents, sizes, checksums, and where they come from

meta.json is written last: a folder that has one is complete. In a message of weight 0, which is not
to be learned, <|im_end|> follows <|im_start|>: `is_unmarked` finds these marks.
"""

import hashlib
from pathlib import Path

import numpy as np
import tiktoken

from common import Damage, command_line, parse_json, progress, reading
from text import tokenizer

FORMAT = 2
# What readers rely on in what meta.json says of each split.
OF_SPLIT = dict(documents=int, tokens=int, sha256=str)
PART = 1 << 26  # bytes that are checked at a time


def again(folder: Path) -> str:
    """What to do where a file of a folder is missing or damaged."""
    if folder.name in ("train.bin", "val.bin"):
        return f"name its folder, {folder.parent}"
    if folder.is_file():  # a text
        prepare = command_line("prepare.py", "--input", folder, "--out_dir", f"data/{folder.stem}")
        evaluate = "to evaluate a model on it, add --val_fraction 1 --tokenizer ITS_CKPT"
        return f"run {prepare}, and name that folder ({evaluate})"
    prepare = command_line("prepare.py", "--out_dir", folder)
    more = ", and --overwrite"
    if not (folder / "meta.json").exists():
        more = ", or name another folder (--resume: the same, by its new name) with --data_dir"
    return f"run {prepare}, with --input or --dataset{more}"


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
        found = tokenizer.fingerprint(encoding), encoding.n_vocab
        if found != (meta["tokenizer"], meta["vocab_size"]):
            raise Damage("not the tokenizer of the token files")
    return encoding


def open_tokens(folder: Path, split: str, meta: dict) -> np.ndarray:
    """The token ids of a split [tokens], memory-mapped. UserError: the file is missing or damaged;
    to check its sha256 takes 0.06 s for 100 MB, or as long as the disk takes to read it."""
    path = folder / f"{split}.bin"
    with reading(path, again(folder)):
        expected = meta[split]["tokens"] * np.dtype(meta["dtype"]).itemsize
        if path.stat().st_size != expected:
            raise Damage(f"{path.stat().st_size:,} bytes, not {expected:,}")
        ids = np.memmap(path, dtype=meta["dtype"], mode="r")
        sha256, largest = hashlib.sha256(), 0
        parts = np.array_split(ids, 1 + expected // PART)
        for part in progress(parts, f"checking {path}"):
            sha256.update(part)
            largest = max(largest, part.max(initial=0))
        if sha256.hexdigest() != meta[split]["sha256"]:
            raise Damage("its sha256 differs from meta.json")
        if largest >= meta["vocab_size"]:
            raise Damage(f"an id of {largest}, where there are {meta['vocab_size']}")
    return ids


def is_unmarked(encoding: tiktoken.Encoding, ids: np.ndarray) -> np.ndarray:
    """Which tokens of conversations [T] are not marks: [T] bool."""
    start, stop = map(encoding.encode_single_token, (tokenizer.START, tokenizer.END))
    return (ids != stop) | (np.roll(ids, 1) != start)
