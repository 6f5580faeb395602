"""Rows that a context reads, and needles in haystacks."""

import random
import re

from lab.context import haystack, prose
from text import bpe

NEEDLE = r" Call (\w+) (\w+)\."


def test_a_haystack_has_its_length_and_the_needle_at_its_depth():
    encoding = bpe.train(prose(held_out=False)[:1600], 300)
    ids = encoding.encode_ordinary(" ".join(prose(held_out=True)[:16_000]))
    for seed in range(20):
        rng = random.Random(seed)
        depth = rng.random()
        prompt, answer = haystack(rng, encoding, ids, 700, depth)
        assert len(prompt) == 700
        assert prompt[0] == encoding.eot_token
        ((key, value),) = re.findall(NEEDLE, encoding.decode(prompt))
        told = encoding.encode_ordinary(f" Call {key} {value}.")
        asked = encoding.encode_ordinary(f" Call {key}")
        assert prompt[-len(asked) :] == asked
        assert answer == encoding.encode_ordinary(f" {value}")[0]
        place = 1 + round(depth * (700 - 1 - len(told) - len(asked)))
        assert prompt[place : place + len(told)] == told
