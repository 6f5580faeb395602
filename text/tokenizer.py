"""Byte-level BPE, trained here, saved as JSON text and run by tiktoken; and the chat template.

Training is plain Python and happens once per data set; its merges go into a `tiktoken.Encoding`,
whose merge loop is compiled. As one line of JSON (`dumps`, `loads`) it is stored with the data and
inside the checkpoint, so neither can be read with the wrong tokenizer; `fingerprint` is the short
form that is compared.

A conversation is a list of messages, {"role": ..., "content": ...}, and as tokens

    <|endoftext|><|im_start|>user\\n What is the capital of Peru?<|im_end|>\\n
    <|im_start|>assistant\\n Lima.<|im_end|>\\n

The markers are special tokens, which no text encodes to: nobody can end a message and go on in
another role. The space before each content, as Llama's tokenizer puts it before any text, is
removed when an answer is shown. Without it "Lima." would be `L|im|a|.`, but the facts were learned
with the token ` Lima`.
"""

import base64
import codecs
import hashlib
import heapq
import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter

import numpy as np
import regex
import tiktoken
from tqdm import tqdm

from common import UserError

# Ids 0..2 are special, 3..258 are the 256 single bytes, and from 259 on every id is a merge.
START, END = "<|im_start|>", "<|im_end|>"
SPECIALS = {"<|endoftext|>": 0, START: 1, END: 2}
FIRST_BYTE = len(SPECIALS)
FIRST_MERGE = FIRST_BYTE + 256

# GPT-2's split into words, with digits in groups of at most 3, so that no vocabulary is spent on
# long numbers. Possessive quantifiers (`++`) keep it fast on long runs.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

# The patterns of others' tokenizers that can be used (huggingface.py), by tiktoken's names; GPT-2's
# differs from ours in digits.
PRETRAINED = {
    "gpt2": PATTERN.replace(r"\p{N}{1,3}", r"\p{N}++"),
    "cl100k_base": r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s""",
}
# SmolLM2's: each digit alone. Characters with bytes that it has no token for are left out.
NO_TOKEN = bytes.fromhex("04 06 13 14 16 1D C0 C1 F1 F2") + bytes(range(0xF5, 0x100))
SMOLLM2 = PRETRAINED["gpt2"].replace(r" ?\p{N}++", r"\p{N}").replace(r"(?!\S)", r"(?![^\s\p{N}])")
SMOLLM2 = SMOLLM2.replace("N}]++", r"N}\x04\x06\x13\x14\x16\x1D\x{40000}-\x{BFFFF}]++")

# Training cuts words into pieces of so many characters: a merge rewrites every word that has the
# pair, so words without an end (base64, a book without spaces) would cost their length squared.
PIECE = 256

FORMAT, VERSION = "byte-bpe", 1


def train(texts: Iterable[str], vocab_size: int, min_count: int = 2) -> tiktoken.Encoding:
    """Trains a byte-level BPE vocabulary: each step merges the most frequent pair of neighbouring
    tokens into a new token; among equals, that of the smallest first id, then second id. It ends
    with `vocab_size` ids, or when no pair is left that occurs `min_count` times."""
    if vocab_size < FIRST_MERGE:
        raise UserError(f"--vocab_size {vocab_size} must be at least {FIRST_MERGE}")
    word_counts: Counter[str] = Counter()
    split = regex.compile(PATTERN)
    for text in texts:
        word_counts.update(split.findall(text))

    table = [bytes([b]) for b in range(256)]  # table[i] is the token with id FIRST_BYTE + i
    merges = vocab_size - FIRST_MERGE
    with tqdm(total=merges, desc="merging pairs", unit=" merges", disable=None) as bar:
        for first, second in _merges(word_counts, merges, min_count):
            # tiktoken merges neighbours by their joined bytes, whichever pair these were learned
            # from. That is the same: equal bytes are always merged from the same pair.
            table.append(table[first - FIRST_BYTE] + table[second - FIRST_BYTE])
            bar.update()

    return tiktoken.Encoding(
        name=FORMAT,
        pat_str=PATTERN,
        mergeable_ranks={token: FIRST_BYTE + i for i, token in enumerate(table)},
        special_tokens=SPECIALS,
        explicit_n_vocab=FIRST_BYTE + len(table),  # tiktoken checks that no token is there twice
    )


def _merges(word_counts: Counter[str], limit: int, min_count: int) -> Iterator[tuple[int, int]]:
    """Yields up to `limit` pairs in the order of merging; the i-th makes the id FIRST_MERGE + i.
    Words are strings whose characters stand for ids, `chr(id)`, so merging is `split` and `join`.
    """
    piece_counts: Counter[str] = Counter()
    for word, count in word_counts.items():
        for start in range(0, len(word), PIECE):
            piece_counts[word[start : start + PIECE]] += count
    words = ["".join(chr(FIRST_BYTE + b) for b in piece.encode()) for piece in piece_counts]
    counts = list(piece_counts.values())

    pair_counts: Counter[str] = Counter()
    for word, count in zip(words, counts, strict=True):
        for first, second in pairwise(word):
            pair_counts[first + second] += count
    # Numbers of the words that have a pair, or had it. An array takes a tenth of a set's memory,
    # which is what grows where words hardly repeat, as in Chinese.
    pair_words: defaultdict[str, array] = defaultdict(lambda: array("I"))
    for i, word in enumerate(words):
        for pair in {first + second for first, second in pairwise(word)}:
            if pair_counts[pair] >= min_count:
                pair_words[pair].append(i)

    # One entry per pair. Once its newer token exists, a pair's count can only fall, so it is enough
    # to correct an entry when it is at the top.
    heap = [(-count, pair) for pair, count in pair_counts.items() if count >= min_count]
    heapq.heapify(heap)

    new_id = FIRST_MERGE
    while heap and new_id < FIRST_MERGE + limit:
        negative, pair = heapq.heappop(heap)
        count = pair_counts[pair]
        if count != -negative:  # the entry is out of date
            if count >= min_count:
                heapq.heappush(heap, (-count, pair))
            continue
        first, second = pair
        new = chr(new_id)
        new_words: defaultdict[str, array] = defaultdict(lambda: array("I"))
        for i in pair_words.pop(pair):
            between = words[i].split(pair)
            for k, (before, after) in enumerate(pairwise(between)):
                changes = []
                if before:
                    changes.append((before[-1] + first, before[-1] + new))
                elif k:  # the pair twice in a row
                    changes.append((second + first, new + new))
                if after:
                    changes.append((second + after[0], new + after[0]))
                for old_pair, new_pair in changes:
                    pair_counts[old_pair] -= counts[i]
                    pair_counts[new_pair] += counts[i]
                    new_words[new_pair].append(i)
            words[i] = new.join(between)
        del pair_counts[pair]
        for pair, numbers in new_words.items():
            if pair_counts[pair] >= min_count:
                heapq.heappush(heap, (-pair_counts[pair], pair))
                pair_words[pair] = numbers
        yield ord(first), ord(second)
        new_id += 1


def dumps(encoding: tiktoken.Encoding) -> str:
    """Returns any tiktoken encoding, trained here or not, as one line of JSON for `loads`."""
    # tiktoken has no public access to what begins with an underscore; its own guide to extending an
    # encoding reads it, too. Sorted by id, equal encodings are equal texts.
    special_tokens = sorted(encoding._special_tokens.items(), key=itemgetter(1))
    ranks = sorted(encoding._mergeable_ranks.items(), key=itemgetter(1))
    data = {
        "format": FORMAT,
        "version": VERSION,
        "name": encoding.name,
        "pattern": encoding._pat_str,
        "special_tokens": dict(special_tokens),
        "ranks": [[base64.b64encode(token).decode(), i] for token, i in ranks],
    }
    return json.dumps(data)


def loads(text: str) -> tiktoken.Encoding:
    """Returns the encoding that `dumps` wrote. Raises one of common.DAMAGE if the text is damaged,
    or no such one."""
    data = json.loads(text)
    if (data["format"], data["version"]) != (FORMAT, VERSION):
        raise ValueError(f"its format is not {FORMAT}, version {VERSION}")
    ranks = {base64.b64decode(token, validate=True): i for token, i in data["ranks"]}
    if len(ranks) < len(data["ranks"]):
        raise ValueError("a token is there twice")
    return make_encoding(data["name"], data["pattern"], ranks, {**data["special_tokens"]})


def make_encoding(
    name: str, pattern: str, ranks: dict[bytes, int], special_tokens: dict[str, int]
) -> tiktoken.Encoding:
    """Returns an encoding of what a file says. Its pattern must be a known one: with some, like
    `(a*)*\\1b|.`, a short text takes forever. ValueError: it cannot be."""
    if pattern not in (PATTERN, SMOLLM2, *PRETRAINED.values()):
        raise ValueError(f"it splits text by the unknown pattern {pattern!r:.60}")
    # What follows would end the program inside of tiktoken.
    ids = [*ranks.values(), *special_tokens.values()]
    if not all(isinstance(i, int) and 0 <= i < 2**32 for i in ids):
        raise ValueError("an id is not an integer from 0 to 2^32 - 1")
    if len(set(ids)) < len(ids):
        raise ValueError("an id is there twice")
    lacking = bytes(byte for byte in range(256) if bytes([byte]) not in ranks)
    if lacking != (NO_TOKEN if pattern == SMOLLM2 else b""):
        raise ValueError("some of the 256 single bytes are missing, or should be")
    return tiktoken.Encoding(
        name=name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
    )


def encode(encoding: tiktoken.Encoding, text: str) -> list[int]:
    """Token ids of a document's text, after the <|endoftext|> that precedes every document."""
    return [encoding.eot_token, *encoding.encode_ordinary(text)]


def fingerprint(encoding: tiktoken.Encoding) -> str:
    """Returns 16 hex digits of all that `dumps` writes except the name: equal for encodings that
    encode and decode alike."""
    data = json.loads(dumps(encoding))
    del data["name"]
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def stream(encoding: tiktoken.Encoding, ids: Iterable[int]) -> Iterator[str]:
    """Yields the text of token ids as they come. A character that several tokens spell comes with
    the last of them; one that stays incomplete becomes U+FFFD at the end."""
    spelled = map(encoding.decode_single_token_bytes, ids)
    return codecs.iterdecode(spelled, "utf-8", errors="replace")


def heading(encoding: tiktoken.Encoding, role: str) -> list[int]:
    """Token ids of what opens a message."""
    return [encoding.encode_single_token(START), *encoding.encode_ordinary(f"{role}\n")]


def render(encoding: tiktoken.Encoding, messages: Sequence[dict]) -> list[int]:
    """Token ids of a conversation, without the <|endoftext|> that precedes a document. Headings are
    encoded apart from contents, so that they are always the same tokens."""
    end = [encoding.encode_single_token(END), *encoding.encode_ordinary("\n")]
    ids = []
    for message in messages:
        ids += heading(encoding, message["role"])
        ids += encoding.encode_ordinary(f" {message['content']}")
        ids += end
    return ids


def prompt(encoding: tiktoken.Encoding, messages: Sequence[dict]) -> list[int]:
    """Token ids of messages and of the heading under which the assistant answers."""
    return render(encoding, messages) + heading(encoding, "assistant")


def answers(encoding: tiktoken.Encoding, ids: np.ndarray) -> np.ndarray:
    """Which tokens of a conversation [T] the assistant has to produce: [T] bool. They are the
    contents of its messages, each with the <|im_end|> that ends it; the last may be cut off."""
    opening = heading(encoding, "assistant")
    end = encoding.encode_single_token(END)
    answer = np.zeros(len(ids), dtype=bool)
    for start in np.flatnonzero(ids == opening[0]):
        content = start + len(opening)
        if ids[start:content].tolist() == opening:
            ends = np.flatnonzero(ids[content:] == end)
            n = ends[0] + 1 if len(ends) else len(ids)
            answer[content : content + n] = True
    return answer
