"""Sizes of n-gram tables, and random rows. The whole models: test_attention.py."""

import torch
from conftest import checkpoint, small_run

from ngram import primes


def test_sizes_of_heads_are_those_of_the_published_code():
    """Its largest table: five times the vocabulary of DeepSeek-V3."""
    of_pairs = [646403, 646411, 646421, 646423, 646433, 646453, 646519, 646523]
    of_triples = [646537, 646543, 646549, 646571, 646573, 646577, 646609, 646619]
    assert primes(5 * 129280, 16) == of_pairs + of_triples
    assert primes(1, 3) == [1, 1, 1]  # the control: one row a head


def test_at_rate_zero_rows_stay_as_drawn(data, tmp_path):
    """The control: random rows. All else learns."""
    weights = []
    for steps in (1, 6):
        out = tmp_path / str(steps)
        small_run(data, out, ffn="engram", table_rate=0.0, max_iters=steps)
        weights.append(checkpoint(out)["model"])
    first, last = weights
    assert torch.equal(first["tables.weight.0"], last["tables.weight.0"])
    name = "blocks.1.memory.value.weight"
    assert not torch.equal(first[name], last[name])
