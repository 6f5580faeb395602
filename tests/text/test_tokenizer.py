"""Checks the tokenizer against a naive trainer and a naive encoder that are written out here, and
standard vocabularies as tiktoken loads them."""

import base64
import hashlib
import json
import random
import time
from collections import Counter
from itertools import pairwise

import pytest
import regex
import tiktoken
import torch
from conftest import command, refused
from tiktoken import load, registry
from tiktoken_ext import openai_public

from common import Damage
from text import bpe, spelling, tokenizer
from text.bpe import FIRST_BYTE, FIRST_MERGE, PATTERN
from text.dataset import read_meta, read_tokenizer
from text.huggingface import CL100K_PATTERN, GPT2_PATTERN
from text.tokenizer import SPECIALS
from text.writer import write_dataset
from training.batches import Data

# Public domain: Carroll, Melville.
CORPUS = [
    (
        "Once or twice she had peeped into the book her sister was reading, but it had no pictures "
        "in it, “and what is the use of a book,” thought Alice, “without pictures?”"
    ),
    (
        "Call me Ishmael. Some years ago—never mind how long precisely—having little or no "
        "money in my purse, and nothing particular to interest me on shore, I thought I would "
        "sail about a little and see the watery part of the world.\n\n  It's the year 1851, "
        "and it's\r\nnot 1852.  "
    ),
]

TRICKY = [
    "",
    "\0",
    "a\0b\x01\x1b[0m\x7f\x85\u2028",
    "line\r\nline\r\n\r\n\tindented\n",
    " " * 1000 + "x" + "\n" * 1000,
    "trailing   ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "مرحبا بالعالم \u200fשלום\u200e עולם",
    "e\u0301 vs \u00e9, \ufeffBOM, \ufffd, \U0010ffff",
    "ᚠᛇᚻ 𓀀𓂀 日本語のテキスト",
    "1234567890 3.14159 ½ Ⅷ ٣٤٥٦",
    "'s 't 're 've 'm 'll 'd ''",
]


# What may be a token: nothing of characters of three bytes or more; one of these, or a part of it;
# whole characters.
TOKEN = regex.compile(
    rb"[\x00-\xdf]*"
    rb"|[\xe0-\xef][\x80-\xbf]{0,2}|[\xf0-\xff][\x80-\xbf]{0,3}"
    rb"|([\x00-\x7f]|[\xc0-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf7][\x80-\xbf]{3})*"
)


def merge_in_place(word: list[int], pair: tuple[int, int], new_id: int) -> None:
    i = 0
    while i < len(word) - 1:
        if (word[i], word[i + 1]) == pair:
            word[i : i + 2] = [new_id]
        i += 1


def split(text: str) -> list[list[int]]:
    return [[FIRST_BYTE + b for b in word.encode()] for word in regex.findall(PATTERN, text)]


def naive_train(texts: list[str], vocab_size: int, min_count: int = 2) -> list[tuple[int, int]]:
    """Returns the merges in order; every round counts all pairs again from scratch."""
    words = [word for text in texts for word in split(text)]
    merges = []
    while FIRST_MERGE + len(merges) < vocab_size:
        counts = Counter(pair for word in words for pair in pairwise(word))
        table = spelled(merges)
        for first, second in [*counts]:
            if not TOKEN.fullmatch(table[first - FIRST_BYTE] + table[second - FIRST_BYTE]):
                del counts[first, second]
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if best is None or counts[best] < min_count:
            break
        for word in words:
            merge_in_place(word, best, FIRST_MERGE + len(merges))
        merges.append(best)
    return merges


def naive_encode(text: str, merges: list[tuple[int, int]]) -> list[int]:
    words = split(text)
    for word in words:
        for i, pair in enumerate(merges):
            merge_in_place(word, pair, FIRST_MERGE + i)
    return [token for word in words for token in word]


def tokens_of(encoding: tiktoken.Encoding) -> list[bytes]:
    """The bytes of all ids that are not special, in id order."""
    return [encoding.decode_single_token_bytes(i) for i in range(FIRST_BYTE, encoding.n_vocab)]


def spelled(merges: list[tuple[int, int]]) -> list[bytes]:
    table = [bytes([b]) for b in range(256)]
    for first, second in merges:
        table.append(table[first - FIRST_BYTE] + table[second - FIRST_BYTE])
    return table


@pytest.fixture(scope="module")
def encoding() -> tiktoken.Encoding:
    return bpe.train(CORPUS, 380)


@pytest.fixture(scope="module")
def foreign() -> tiktoken.Encoding:
    """Laid out like GPT-2's and split by another pattern than ours: ranks from 0, the special token
    last, after a gap of ids."""
    ranks = {bytes([b]): 255 - b for b in range(256)} | {b"th": 256, b"the": 257}
    special = {"<|endoftext|>": 300}
    return tiktoken.Encoding(
        "foreign", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


# Training


def assert_naive(texts: list[str], vocab_size: int, min_count: int, others: list[str]) -> None:
    """Merges and ids are those of the naive trainer and encoder."""
    encoding = bpe.train(texts, vocab_size, min_count)
    merges = naive_train(texts, vocab_size, min_count)
    assert tokens_of(encoding) == spelled(merges)
    for text in texts + others:
        assert encoding.encode_ordinary(text) == naive_encode(text, merges)


@pytest.mark.parametrize("min_count", [1, 2, 5])
def test_merges_and_ids_are_those_of_the_naive_trainer_and_encoder(min_count):
    rng = random.Random(0)
    mixed = ["".join(rng.choices("aehst 'n19.,\n\r\té日½", k=200)) for _ in range(20)]
    assert_naive(CORPUS, 460, min_count, TRICKY + mixed)


@pytest.mark.parametrize("letters", ["ab", "abc", "éàèùâêîôûäëïöüñçåãõ", "日本é"])
def test_same_merges_and_ids_on_overlapping_repeats(letters):
    # Few letters make runs like "aaaa", many ties, and many ways to spell the same bytes. Of many
    # letters of two bytes, the first byte joins the space before them.
    rng = random.Random(0)
    words = ["".join(rng.choices(letters, k=rng.randint(1, 14))) for _ in range(40)]
    assert_naive([" ".join(words)], 350, 1, ["".join(rng.choices(letters, k=300))])


def test_long_words_are_learned_from_in_pieces(monkeypatch):
    monkeypatch.setattr(bpe, "PIECE", 4)
    words = ["abcabcabcab", "cabbacabba"]
    pieces = [word[i : i + 4] for word in words for i in range(0, len(word), 4)]
    encoding = bpe.train(words, 400)
    assert tokens_of(encoding) == spelled(naive_train(pieces, 400))


def test_a_word_without_end_takes_no_quadratic_time():
    word = "".join(random.Random(0).choices("abcdefgh", k=100_000))
    start = time.process_time()
    encoding = bpe.train([word], 6400)
    assert encoding.decode(encoding.encode_ordinary(word)) == word
    assert time.process_time() - start < 2  # a third of a second; a word rewritten whole: 2.7


@pytest.mark.parametrize("word", ["हिन्दी", "กำลังพูดที่นี่", "e\u0301te\u0301"])
def test_marks_belong_to_the_letter_before_them(word):
    """So that a word of a script whose vowels are marks can be one token."""
    encoding = bpe.train([f"{word} {word}"] * 20, 400)
    assert [len(encoding.encode_ordinary(text)) for text in (word, f" {word}")] == [1, 1]


def test_no_token_joins_a_character_and_a_part_of_another():
    """In Chinese, words have no blanks between them: where one ends, a prompt has to end."""
    text = "马德里，里斯本。 いがうくえけ का की के है é日é本ö日"
    tokens = tokens_of(bpe.train([text] * 9, 400))
    assert {"马德里".encode(), " いがうくえけ".encode()} <= {*tokens}
    assert [token for token in tokens if not TOKEN.fullmatch(token)] == []


def test_special_tokens_only_when_allowed(encoding):
    assert SPECIALS == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert encoding.special_tokens_set == set(SPECIALS) and encoding.eot_token == 0
    text = "a<|endoftext|><|im_start|><|im_end|>"
    assert min(encoding.encode_ordinary(text)) >= FIRST_BYTE
    assert encoding.encode(text, allowed_special="all") == [FIRST_BYTE + ord("a"), 0, 1, 2]


# Saving and loading


@pytest.mark.parametrize("which", ["encoding", "foreign"])
def test_dumps_and_loads(which, request):
    before = request.getfixturevalue(which)
    text = tokenizer.dumps(before)
    after = tokenizer.loads(text)
    assert "\n" not in text
    assert tokenizer.dumps(after) == text
    assert (after.name, after.n_vocab) == (before.name, before.n_vocab)
    for sample in CORPUS + TRICKY + ["the <|endoftext|>"]:
        ids = before.encode(sample, allowed_special="all")
        assert after.encode(sample, allowed_special="all") == ids
        assert after.decode(ids) == sample


def test_fingerprints_are_equal_if_every_token_has_the_same_id(encoding):
    data = json.loads(tokenizer.dumps(encoding))
    special_tokens, ranks = data["special_tokens"], data["ranks"]
    (last, i), (previous, j) = ranks[-1], ranks[-2]

    def changed(**parts) -> str:
        return tokenizer.fingerprint(tokenizer.loads(json.dumps(data | parts)))

    mark = tokenizer.fingerprint(encoding)
    assert regex.fullmatch("[0-9a-f]{16}", mark)
    for same in (
        dict(name="another"),
        dict(ranks=ranks[::-1], special_tokens=dict(reversed(special_tokens.items()))),
    ):
        assert changed(**same) == mark
    for other in (
        dict(pattern=GPT2_PATTERN),
        dict(special_tokens={**special_tokens, "<|other|>": 999}),
        dict(ranks=ranks[:-1]),
        dict(ranks=[*ranks[:-2], [last, j], [previous, i]]),
    ):
        assert changed(**other) != mark


EOT = base64.b64encode(b"<|endoftext|>").decode()


@pytest.mark.parametrize(
    "change",
    [  # of the JSON that `dumps` writes, or other text
        "",
        '{"version": 1}',
        dict(format="wordpiece"),
        dict(version=2),
        dict(special_tokens=[]),
        dict(pattern="((("),
        dict(ranks=[["YQ==", 0]], special_tokens={"a": 0.0}),
        dict(ranks=[["", 0]], special_tokens={"": 0}),
        dict(ranks=[["YQ=="]]),
        dict(ranks=[["YQ==", 5], ["YQ==", 6]]),  # a token that is there twice
        dict(ranks=[["YQ==", 0]]),  # an id: a special token's
        dict(ranks=[[EOT, 0]]),  # a text could end
        dict(ranks=[["YQ==", -1]]),
        dict(ranks=[["YQ==", 5.0]]),
    ],
)
def test_loads_refuses_what_is_damaged(encoding, change):
    data = json.loads(tokenizer.dumps(encoding))
    text = change if isinstance(change, str) else json.dumps(data | change)
    with pytest.raises((Damage, json.JSONDecodeError)):
        tokenizer.loads(text)


# Standard vocabularies


def test_patterns_are_those_of_tiktoken(monkeypatch):
    for reader in ("data_gym_to_mergeable_bpe_ranks", "load_tiktoken_bpe"):  # they download
        monkeypatch.setattr(openai_public, reader, lambda *_, **__: {})
    assert openai_public.gpt2()["pat_str"] == GPT2_PATTERN
    assert openai_public.cl100k_base()["pat_str"] == CL100K_PATTERN


def test_a_vocabulary_comes_from_tiktoken_or_its_cache(tmp_path, story, monkeypatch):
    """From a file in place of an address; tiktoken's errors of both are OSErrors."""
    tokens = [bytes([b]) for b in range(256)] + [b"th", b"the", b" the"]
    whole = b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens))
    published = tmp_path / "tiny.tiktoken"

    def constructor() -> dict:
        ranks = load.load_tiktoken_bpe(str(published), hashlib.sha256(whole).hexdigest())
        special_tokens = {"<|endoftext|>": 261}
        return dict(
            name="tiny", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special_tokens
        )

    monkeypatch.setattr(registry, "ENCODING_CONSTRUCTORS", {"tiny": constructor})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    line = f"prepare.py --input {story} --val_fraction 0.1 --tokenizer tiny --out_dir"

    def prepare(out: str) -> tiktoken.Encoding:
        monkeypatch.setattr(registry, "ENCODINGS", {})  # as in a new process
        command(f"{line} {out}")
        return read_tokenizer(tmp_path / out, read_meta(tmp_path / out))

    published.write_bytes(whole)
    downloaded = prepare("a")
    assert downloaded.encode_ordinary("the ether") == [257, 32, 101, 257, 114]
    assert (downloaded.eot_token, downloaded.n_vocab) == (261, 264)
    assert downloaded.decode([*range(264)])  # each can be shown
    published.unlink()
    assert tokenizer.dumps(prepare("b")) == tokenizer.dumps(downloaded)
    (cached,) = (tmp_path / "cache").iterdir()
    cached.write_bytes(b"another")
    monkeypatch.setattr(registry, "ENCODINGS", {})
    says = refused(f"{line} c")
    assert "No such file" in says and 'get_encoding("tiny")' in says


def test_ids_beyond_16_bits_are_written_and_read(tmp_path):
    wide = tiktoken.Encoding(
        name="wide",
        pat_str=GPT2_PATTERN,
        mergeable_ranks={bytes([b]): 2**16 + b for b in range(256)},
        special_tokens={"<|endoftext|>": 2**16 + 256},
    )
    text = "Anna sees Bob. " * 9
    documents = [(split, text) for split in ("train", "val")]
    write_dataset(tmp_path / "data", documents, wide, "text", corpus="files", seed=0)
    data = Data(tmp_path / "data", "text", 32, seed=0, total=8)
    ids, targets = data.train.batch(0, 4)  # [4, 32] each
    for window in torch.cat((ids, targets[:, -1:]), dim=1).tolist():
        assert data.encoding.decode(window) in f"<|endoftext|>{text}<|endoftext|>{text}"


# Streaming


def test_tokens_that_differ_look_different(encoding):
    shown = {spelling.spelled(encoding, token) for token in range(encoding.n_vocab)}
    assert len(shown) == encoding.n_vocab
    assert {"a", "\n", "\\xe4", "<|endoftext|>"} < shown
    assert spelling.spelled(encoding, *encoding.encode_ordinary("云")[:-1]) == "\\xe4\\xba"


def test_stream_gives_whole_characters_as_soon_as_they_are_whole():
    # Without merges every byte is a token, so every character is cut wherever it can be.
    encoding = bpe.train(["x"], FIRST_MERGE)
    text = "né 日本 👩‍👩‍👧 \U0010ffff"
    ids = encoding.encode(text)
    assert list(spelling.stream(encoding, ids)) == list(text)
    waiting = iter(ids)
    pieces = spelling.stream(encoding, waiting)
    assert next(pieces) + next(pieces) == "né" and list(waiting) == ids[3:]


def test_stream_equals_decode_on_any_ids(encoding):
    """Also where they end in the middle of a character."""
    rng = random.Random(2)
    for _ in range(100):
        ids = rng.choices(range(encoding.n_vocab), k=50)
        assert "".join(spelling.stream(encoding, ids)) == encoding.decode(ids)
