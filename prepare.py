"""Turn text into token files that train.py reads.

    python prepare.py                                           # the default corpus, countries
    python prepare.py --input book.txt --out_dir data/book      # text of your own
    python prepare.py --input a.jsonl b.jsonl --out_dir data/mine --vocab_size 6400
    python prepare.py --dataset tinystories                     # a public data set (download.py)

`.jsonl` files hold one document a line, {"text": "..."}. A `.txt` file is cut into documents at
lines that say <|endoftext|>, and at blank lines after 2,000 characters. Written to the output
folder:

    tokenizer.json          the byte-level BPE trained on the training documents (tokenizer.py)
    train.bin, val.bin      token ids, uint16 or uint32, every document preceded by <|endoftext|>
    meta.json               sizes, type and origin; written last: a folder with it is complete
"""

import argparse
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

import countries
import tokenizer
from common import UserError, atomic, run
from download import DATASETS, fetch

TXT_DOCUMENT = 2000  # characters


def read_documents(path: Path) -> Iterator[str]:
    """The documents of a .txt or .jsonl file, empty ones left out.

    Raises:
        UserError: the file is missing, of another kind, or a line of it is damaged.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"--input {path}: only .txt and .jsonl files can be read")
    try:
        with open(path, encoding="utf-8-sig") as file:  # with or without a byte order mark
            yield from (
                jsonl_documents(path, file) if path.suffix == ".jsonl" else txt_documents(file)
            )
    except OSError as error:
        raise UserError(f"--input {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--input {path}: not UTF-8 ({error.reason}): convert it first") from None


def jsonl_documents(path: Path, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            text.encode()  # JSON can name half a surrogate pair, which is no text
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f'{path}:{number}: not a {{"text": "..."}} line ({error})') from None
        if text:
            yield text


def txt_documents(lines: Iterable[str]) -> Iterator[str]:
    document: list[str] = []
    size = 0
    for line in lines:
        ends = line.strip() == "<|endoftext|>"
        if not ends:
            document.append(line)
            size += len(line)
        if ends or (size >= TXT_DOCUMENT and not line.strip()):
            if any(line.strip() for line in document):
                yield "".join(document)
            document, size = [], 0
    if any(line.strip() for line in document):
        yield "".join(document)


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document is for validation. Its hash decides, so adding files moves no document."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def write_tokens(
    path: Path, documents: Iterable[str], encoding: tiktoken.Encoding, dtype: str
) -> dict[str, int]:
    """Encode documents into a file of token ids.

    Returns:
        documents, tokens (with one <|endoftext|> a document), bytes (of the text), and the file's
        sha256.
    """
    counts = {"documents": 0, "tokens": 0, "bytes": 0}
    digest = hashlib.sha256()
    progress = tqdm(desc=f"encoding {path.name}", unit="B", unit_scale=True, delay=3)
    documents = iter(documents)
    with atomic(path) as temporary, open(temporary, "wb") as file, progress:
        while batch := list(islice(documents, 512)):
            size = sum(len(text.encode()) for text in batch)
            for ids in encoding.encode_ordinary_batch(batch, num_threads=os.cpu_count() or 1):
                tokens = np.array([encoding.eot_token, *ids], dtype=dtype).tobytes()
                file.write(tokens)
                digest.update(tokens)
                counts["tokens"] += 1 + len(ids)
            counts["documents"] += len(batch)
            counts["bytes"] += size
            progress.update(size)
    return {**counts, "sha256": digest.hexdigest()}


def write_dataset(
    out_dir: Path,
    train: Iterable[str],
    val: Iterable[str],
    encoding: tiktoken.Encoding,
    **origin,
) -> dict:
    """Write train.bin, val.bin, tokenizer.json and, when all is there, meta.json."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        (out_dir / "meta.json").unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {out_dir}: {error.strerror}") from None
    dtype = "uint16" if encoding.n_vocab <= 2**16 else "uint32"
    meta = {"format": 2, "kind": "text", "vocab_size": encoding.n_vocab, "dtype": dtype, **origin}
    meta["tokenizer"] = tokenizer.fingerprint(encoding)
    with atomic(out_dir / "tokenizer.json") as temporary:
        temporary.write_text(tokenizer.dumps(encoding), encoding="utf-8")
    for split, documents in (("train", train), ("val", val)):
        meta[split] = write_tokens(out_dir / f"{split}.bin", documents, encoding, dtype)
    with atomic(out_dir / "meta.json") as temporary:
        temporary.write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    return meta


def train_tokenizer(texts: Iterable[str], vocab_size: int, min_count: int = 2) -> tiktoken.Encoding:
    try:
        return tokenizer.train(texts, vocab_size, min_count)
    except ValueError as error:
        raise UserError(f"--vocab_size {vocab_size}: {error}") from error


def prepare_countries(out_dir: Path, vocab_size: int = 4096, seed: int = 0) -> dict:
    """The default corpus. A pair must occur 8 times to become a token, so the vocabulary is what
    fits: common names are one token, rare ones several."""
    train, val = countries.documents(seed)
    encoding = train_tokenizer(train, vocab_size, min_count=8)
    return write_dataset(out_dir, train, val, encoding, corpus="countries", seed=seed)


def prepare_files(out_dir: Path, paths: list[Path], vocab_size: int, val_fraction: float) -> dict:
    """Text of one's own. The files are read three times, never held in memory."""

    def documents(validation: bool) -> Iterator[str]:
        for path in paths:
            for text in read_documents(path):
                if is_validation(text, val_fraction) == validation:
                    yield text

    for validation, split in ((False, "training"), (True, "validation")):
        if next(documents(validation), None) is None:
            raise UserError(
                f"--input {' '.join(map(str, paths))}: no document for {split} at --val_fraction "
                f"{val_fraction}: give more text (a .txt needs blank lines) or change the fraction"
            )
    encoding = train_tokenizer(documents(False), vocab_size)
    return write_dataset(
        out_dir,
        documents(False),
        documents(True),
        encoding,
        corpus="files",
        sources=[path.name for path in paths],
        val_fraction=val_fraction,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--input", nargs="+", type=Path, metavar="FILE", help=".txt or .jsonl files of your own"
    )
    parser.add_argument(
        "--dataset",
        choices=("countries", *DATASETS),
        default="countries",
        help="; ".join(f"{name}: {data.about}, {data.licence}" for name, data in DATASETS.items()),
    )
    parser.add_argument("--base_url", help="a mirror to download --dataset from")
    parser.add_argument(
        "--out_dir", type=Path, help="default: data/ and the data set's name; needed with --input"
    )
    parser.add_argument(
        "--vocab_size",
        type=int,
        help="most tokens to have, from 259; default 6400 for --input, 4096 for countries",
    )
    parser.add_argument(
        "--val_fraction", type=float, help="share of documents of --input held out (0.02)"
    )
    parser.add_argument("--seed", type=int, help="of the countries corpus (0)")
    args = parser.parse_args()
    if args.vocab_size is None:
        made = args.input is None and args.dataset == "countries"
        args.vocab_size = 4096 if made else 6400
    if args.input is None and args.dataset != "countries":
        args.out_dir = args.out_dir or Path("data") / args.dataset
        args.input = [fetch(args.dataset, Path("data/raw"), args.base_url)]
    if args.input is None:
        if args.val_fraction is not None:
            raise UserError("--val_fraction goes with --input: countries holds out phrasings")
        out_dir = args.out_dir or Path("data/countries")
        meta = prepare_countries(out_dir, args.vocab_size, args.seed or 0)
    else:
        out_dir = args.out_dir
        if out_dir is None:
            raise UserError("--input needs --out_dir: say where the token files go")
        if args.seed is not None:
            raise UserError("--seed goes with the countries corpus: with --input nothing is random")
        fraction = 0.02 if args.val_fraction is None else args.val_fraction
        if not 0 < fraction < 1:
            raise UserError(f"--val_fraction {fraction} must be between 0 and 1")
        meta = prepare_files(out_dir, args.input, args.vocab_size, fraction)
    for split in ("train", "val"):
        counts = meta[split]
        print(
            f"{out_dir / split}.bin: {counts['documents']:,} documents, "
            f"{counts['tokens']:,} tokens, {counts['bytes'] / counts['tokens']:.2f} bytes per token"
        )
    print(
        f"vocabulary of {meta['vocab_size']:,} tokens. Next: python train.py --data_dir {out_dir}"
    )


if __name__ == "__main__":
    run(main)
