"""Byte-level BPE: a vocabulary is trained here, in plain Python, once per data set. Its merges go
into a `tiktoken.Encoding`, whose merge loop is compiled."""

import heapq
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

import regex
import tiktoken
from tqdm import tqdm

from common import UserError
from text import tokenizer

# Ids 0..2 are special, 3..258 are the 256 single bytes, and from 259 on every id is a merge.
FIRST_BYTE = len(tokenizer.SPECIALS)
FIRST_MERGE = FIRST_BYTE + 256

# GPT-2's split into words, but marks stay with the letter before them: most vowels of Hindi are
# marks, at which GPT-2 ends a word, and no token is more than a word. Digits are in groups of at
# most 3, so that no vocabulary is spent on long numbers. Possessive quantifiers (`++`) keep it fast
# on long runs.
PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}[\p{L}\p{M}]*+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]++"""
    r"""|\s++$|\s+(?!\S)|\s"""
)

# Training cuts words into pieces of so many characters: a merge rewrites every word that has the
# pair, so words without an end (base64, a book without spaces) would cost their length squared.
PIECE = 256


def train(texts: Iterable[str], vocab_size: int, min_count: int = 2) -> tiktoken.Encoding:
    """Trains a byte-level BPE vocabulary: each step merges the most frequent pair of neighboring
    tokens into a new token; among equals, that of the smallest first id, then second id. Pairs that
    would cut a character such as a Chinese one are left alone (`cuts_character`). It ends with
    `vocab_size` ids, or when no other pair is left that occurs `min_count` times."""
    if vocab_size < FIRST_MERGE:
        raise UserError(f"--vocab_size {vocab_size} must be at least {FIRST_MERGE}")
    word_counts: Counter[str] = Counter()
    split = regex.compile(PATTERN)
    for text in texts:
        word_counts.update(split.findall(text))

    table = [bytes([b]) for b in range(256)]  # table[i] is the token with id FIRST_BYTE + i
    merges = vocab_size - FIRST_MERGE
    merged = _merges(word_counts, merges, min_count)
    # tiktoken merges neighbors by their joined bytes, whichever pair these were learned from. That
    # is the same: equal bytes are always merged from the same pair.
    table += tqdm(merged, "merging pairs", merges, unit=" merges", disable=None)

    return tiktoken.Encoding(
        name=tokenizer.FORMAT,
        pat_str=PATTERN,
        mergeable_ranks={token: FIRST_BYTE + i for i, token in enumerate(table)},
        special_tokens=tokenizer.SPECIALS,
        explicit_n_vocab=FIRST_BYTE + len(table),  # tiktoken checks that no token is there twice
    )


def cuts_character(token: bytes) -> bool:
    """Whether a token begins a character of three or four bytes, as in Chinese, beside something
    else, and is not whole characters: it would join words that no blank divides, and no prompt
    could end between them."""
    has_none = max(token) < 0xE0
    is_one = max(token[1:]) < 0xC0  # or a part of it: no second one begins
    is_whole = token.decode(errors="ignore").encode() == token
    return not (has_none or is_one or is_whole)


def _merges(word_counts: Counter[str], limit: int, min_count: int) -> Iterator[bytes]:
    """Yields up to `limit` new tokens in the order of merging, from the id FIRST_MERGE on. Words
    are strings whose characters stand for ids, `chr(id)`, so merging is `split` and `join`."""
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

    token_of = {chr(FIRST_BYTE + b): bytes([b]) for b in range(256)}
    while heap and len(token_of) < 256 + limit:
        negative, pair = heapq.heappop(heap)
        count = pair_counts[pair]
        if count != -negative:  # the entry is out of date
            if count >= min_count:
                heapq.heappush(heap, (-count, pair))
            continue
        first, second = pair
        token = token_of[first] + token_of[second]
        if cuts_character(token):
            continue
        new = chr(FIRST_BYTE + len(token_of))
        token_of[new] = token
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
        yield token
