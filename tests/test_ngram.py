"""N-gram tables and value embeddings against loops over their formulas."""

import math

import numpy as np
import pytest
import torch
from conftest import checkpoint, small_run
from naive import TINY, decoder, norm, tokens
from torch import nn

from config import ModelConfig
from ngram import Bigram, Ngrams, primes


def naive_addresses(config, ids, documents, layer):
    """As in the paper's code: ids [T] -> one list of addresses for each token."""
    longest = max(map(int, config.ngram_orders.split(",")))
    rng = np.random.default_rng(10007 * layer)
    half = max(1, np.iinfo(np.int64).max // config.vocab_size // 2)
    m = rng.integers(0, half, size=longest, dtype=np.int64) * 2 + 1
    found = []
    for t in range(len(ids)):
        row = []
        offset = 0
        prime = config.ngram_rows - 1
        for n in range(2, longest + 1):
            mix = 0
            for k in range(n):
                if t - k >= 0 and documents[t - k] == documents[t]:
                    mix ^= int(ids[t - k]) * int(m[k])
            for _ in range(config.ngram_heads):
                prime += 1
                while any(prime % d == 0 for d in range(2, prime)):
                    prime += 1
                row.append(mix % prime + offset)
                offset += prime
        found.append(row)
    return found


@pytest.mark.parametrize("masked", [False, True])
def test_addresses_equal_those_of_a_loop(masked):
    config = ModelConfig(**TINY, ffn="engram", ngram_rows=50)
    ids = tokens(2, 29)
    documents = (ids == 5).cumsum(1) if masked else None
    found = Ngrams(config).addresses(ids, None, documents)
    for row in range(2):
        numbers = documents[row] if masked else torch.zeros(29)
        assert naive_addresses(config, ids[row], numbers, layer=1) == found[row].tolist()


def test_sizes_of_heads_are_those_of_the_published_code():
    """Its largest table: five times the vocabulary of DeepSeek-V3."""
    of_pairs = [646403, 646411, 646421, 646423, 646433, 646453, 646519, 646523]
    of_triples = [646537, 646543, 646549, 646571, 646573, 646577, 646609, 646619]
    assert primes(5 * 129280, 16) == of_pairs + of_triples
    assert primes(1, 3) == [1, 1, 1]  # the control: one row a head


class Formula(nn.Module):
    """A layer's memory, token by token, from e [T, n_embd]."""

    def __init__(self, memory: nn.Module, e: torch.Tensor) -> None:
        super().__init__()
        self.memory = memory
        self.e = e

    def forward(self, x, rows):
        memory = self.memory
        if isinstance(memory, Bigram):
            return memory.weight * self.e[None]
        added = []
        for token, e in zip(x[0], self.e, strict=True):
            query = norm(token, memory.query_norm.weight)
            key = norm(memory.key.weight @ e, memory.key_norm.weight)
            s = query.dot(key).item() / 32**0.5
            gate = 1 / (1 + math.exp(-math.copysign(abs(s) ** 0.5, s)))
            added.append(gate * (memory.value.weight @ e))
        return torch.stack(added)[None]


@pytest.mark.parametrize(("ffn", "layers"), [("engram", [1]), ("bigram", [0, 1, 2])])
@torch.no_grad()
def test_logits_equal_the_formulas(ffn, layers):
    model = decoder(ffn=ffn, ngram_rows=50)
    ids = tokens(1, 20)
    logits, _ = model(ids)
    addresses = naive_addresses(model.config, ids[0], [0] * 20, layers[0])
    e = model.tables.weight[0][torch.tensor(addresses)].flatten(1)  # [T, n_embd]
    for layer in layers:
        model.blocks[layer].memory = Formula(model.blocks[layer].memory, e)
    torch.testing.assert_close(logits, model(ids)[0], rtol=1e-4, atol=1e-4)


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
