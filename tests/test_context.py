"""Rows that a context reads, and needles in haystacks."""

import random
import re

import numpy as np

from analysis.context import KEYS, VALUES, distinct_tokens, document, haystack, prose
from text import tokenizer


def test_distinct_tokens_are_counted_one_by_one():
    ids = np.random.default_rng(0).integers(50, size=320).astype(np.uint16)
    assert distinct_tokens(ids, 320) == [len(set(ids.tolist()))]
    counts = distinct_tokens(ids, 40)
    assert counts == [len(set(ids[start : start + 40].tolist())) for start in range(0, 281, 40)]


def test_a_document_repeats_its_needle():
    text = document(random.Random(0), n_piece=5, repeats=3)
    told = re.findall(r" Call (\w+) (\w+)\.", text)
    assert len(told) == 1 + 3 and len(set(told)) == 1
    assert told[0][0] in KEYS and told[0][1] in VALUES
    assert len(text.split()) == 5 * 8 + 4 * 3
    assert not set(prose(held_out=True)[100:200]) & set(prose(held_out=False))


def test_a_haystack_has_its_length_and_the_needle_at_its_depth():
    encoding = tokenizer.train(prose(held_out=False)[:200], 300)
    ids = encoding.encode_ordinary("".join(prose(held_out=True)[:2000]))
    for seed in range(20):
        rng = random.Random(seed)
        depth = rng.random()
        prompt, answer = haystack(rng, encoding, ids, 700, depth)
        assert len(prompt) == 700 and prompt[0] == encoding.eot_token
        ((key, value),) = re.findall(r" Call (\w+) (\w+)\.", encoding.decode(prompt))
        told = encoding.encode_ordinary(f" Call {key} {value}.")
        asked = encoding.encode_ordinary(f" Call {key}")
        assert prompt[-len(asked) :] == asked
        assert answer == encoding.encode_ordinary(f" {value}")[0]
        (place,) = (at for at in range(700) if prompt[at : at + len(told)] == told)
        assert place == 1 + round(depth * (700 - 1 - len(told) - len(asked)))
