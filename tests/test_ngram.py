"""Sizes of n-gram tables. What models do with them: test_attention.py."""

from ngram import primes


def test_sizes_of_heads_are_those_of_the_published_code():
    """Its largest table: five times the vocabulary of DeepSeek-V3."""
    of_pairs = [646403, 646411, 646421, 646423, 646433, 646453, 646519, 646523]
    of_triples = [646537, 646543, 646549, 646571, 646573, 646577, 646609, 646619]
    assert primes(5 * 129280, 16) == of_pairs + of_triples
    assert primes(1, 3) == [1, 1, 1]  # the control: one row a head
