"""Encoding speed, side by side with Hugging Face's tokenizers, which is no dependency of this
project: pip install tokenizers first.

    python bench_tokenizer.py --data_dir data/books --input books.jsonl

Both get the vocabulary of --data_dir, the merges that follow from it and the same split into words,
and encode all documents in turn, --rounds times. The ids must be equal.
"""

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path

import tiktoken

import documents
from common import UserError, run
from data import read_meta, read_tokenizer


def merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair that each token was merged from, in order: its bytes, merged by the lower ranks."""
    result = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [a + b for a, b in pairwise(parts)]
            best = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], 2**32))
            parts[best : best + 2] = [pairs[best]]
        if len(parts) == 2:
            result.append(tuple(parts))
    return result


def hugging_face(encoding: tiktoken.Encoding):
    """The same tokenizer as an object of that library."""
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    except ImportError:
        raise UserError("the tokenizers package is not here: pip install tokenizers") from None
    # That library spells bytes as printable characters (GPT-2's table).
    kept = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    spell = {byte: chr(byte) for byte in kept}
    spell |= {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in spell)}

    def spelled(token: bytes) -> str:
        return "".join(spell[byte] for byte in token)

    ranks = encoding._mergeable_ranks
    made = Tokenizer(
        models.BPE(
            vocab={spelled(token): i for token, i in ranks.items()},
            merges=[(spelled(a), spelled(b)) for a, b in merges(ranks)],
        )
    )
    pattern = encoding._pat_str.replace("++", "+")  # possessive: faster in one engine, same split
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data_dir", type=Path, required=True, help="prepared folder, for its tokenizer")
    add("--input", nargs="+", type=Path, required=True, help="text to encode, .txt or .jsonl")
    add("--rounds", type=int, default=5, help="%(default)s")
    args = parser.parse_args()
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds} must be at least 1")
    encoding = read_tokenizer(args.data_dir, read_meta(args.data_dir))
    texts = [text for _, text in documents.read(args.input, documents.Report(1.0), "text")]
    other = hugging_face(encoding)
    kinds = {
        "1 thread": (
            lambda: [encoding.encode_ordinary(text) for text in texts],
            lambda: [other.encode(text).ids for text in texts],
        ),
        "2 threads": (
            lambda: encoding.encode_ordinary_batch(texts, num_threads=2),
            lambda: [done.ids for done in other.encode_batch_fast(texts)],  # on all cores
        ),
    }
    size = sum(len(text.encode()) for text in texts)
    for name, functions in kinds.items():
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.rounds):
            ids = []
            for function, spent in zip(functions, seconds, strict=True):
                start = time.perf_counter()
                ids.append(function())
                spent.append(time.perf_counter() - start)
            if ids[0] != ids[1]:
                raise UserError("the two disagree: the merges or the split differ")
        ours, theirs = map(statistics.median, seconds)
        ratio = statistics.median(b / a for a, b in zip(*seconds, strict=True))
        print(
            f"{name}: {sum(map(len, ids[0])):,} equal ids; tiktoken {size / ours / 1e6:.1f} MB/s, "
            f"tokenizers {size / theirs / 1e6:.1f} MB/s; ratio {ratio:.2f}"
        )


if __name__ == "__main__":
    run(main)
