"""N-gram tables and value embeddings against loops over their formulas."""

import math

import numpy as np
import pytest
import torch
from conftest import checkpoint, losses, resume, small_run
from torch import nn

from common import UserError
from config import ModelConfig
from model import Decoder
from ngram import Bigram, Ngrams, primes

KINDS = ("engram", "bigram", "value")
TINY = dict(vocab_size=23, block_size=32, n_layer=3, n_head=4, n_embd=32, ngram_rows=50)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


def decoder(ffn: str, **options) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(ModelConfig(ffn=ffn, **{**TINY, **options}))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def naive_addresses(config, ids, documents, layer=1):
    """As in the paper's code: ids [T] -> one list of addresses for each token."""
    vocab_size, longest = config.vocab_size, max(map(int, config.ngram_orders.split(",")))
    rng = np.random.default_rng(10007 * layer)
    half = max(1, np.iinfo(np.int64).max // vocab_size // 2)
    m = rng.integers(0, half, size=longest, dtype=np.int64) * 2 + 1
    found = []
    for t in range(len(ids)):
        row, offset, prime = [], 0, config.ngram_rows - 1
        for n in range(2, longest + 1):
            mix = 0
            for k in range(n):
                inside = t - k >= 0 and documents[t - k] == documents[t]
                mix ^= (int(ids[t - k]) if inside else 0) * int(m[k])
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
    config = ModelConfig(ffn="engram", **TINY)
    ids = tokens(2, 29)
    documents = (ids == 5).cumsum(1)
    found = Ngrams(config).addresses(ids, None, documents if masked else None)
    for sequence, numbers, expected in zip(ids, documents, found, strict=True):
        numbers = numbers if masked else torch.zeros(29)
        assert naive_addresses(config, sequence, numbers) == expected.tolist()


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
            query = token / (token.square().mean() + 1e-6).sqrt() * memory.query_norm.weight
            key = memory.key.weight @ e
            key = key / (key.square().mean() + 1e-6).sqrt() * memory.key_norm.weight
            s = query.dot(key).item() / 32**0.5
            gate = 1 / (1 + math.exp(-math.copysign(abs(s) ** 0.5, s)))
            added.append(gate * (memory.value.weight @ e))
        return torch.stack(added)[None]


@pytest.mark.parametrize(("ffn", "layers"), [("engram", [1]), ("bigram", [0, 1, 2])])
@torch.no_grad()
def test_logits_equal_the_formulas(ffn, layers):
    model, ids = decoder(ffn), tokens(1, 20)
    logits, _ = model(ids)
    addresses = naive_addresses(model.config, ids[0], [0] * 20, layers[0])
    e = model.tables.weight[0][torch.tensor(addresses)].flatten(1)  # [T, n_embd]
    for layer in layers:
        model.blocks[layer].memory = Formula(model.blocks[layer].memory, e)
    torch.testing.assert_close(logits, model(ids)[0], rtol=1e-4, atol=1e-4)


def test_value_rows_are_added_to_values():
    model = decoder("value")
    x, ids = torch.randn(1, 20, 32), tokens(1, 20)
    qkv = model.blocks[1].attn.qkv
    rows = next(model.tables.lookup(ids))
    q, k, v = (x @ qkv.qkv.weight.T).unflatten(-1, (12, 8)).chunk(3, dim=-2)
    expected = (q, k, v + qkv.weight * rows.unflatten(-1, (4, 8)))
    for found, wanted in zip(qkv(x, rows), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert [block.row_width for block in model.blocks] == [0, 32, 0]


@pytest.mark.parametrize("ffn", KINDS)
def test_cached_logits_equal_those_without_a_cache(ffn):
    model, ids = decoder(ffn), tokens(2, 29)
    whole, _ = model(ids)
    cache = model.make_cache(2)
    for sizes in ([1] * 29, [5, 1, 9, 14]):
        cache.length = 0  # what is full begins again
        logits = [model(part, cache=cache)[0] for part in ids.split(sizes, 1)]
        torch.testing.assert_close(torch.cat(logits, dim=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ffn", KINDS)
def test_where_rows_are_stored_changes_nothing(ffn, data, tmp_path):
    """Losses of training, with n-grams that stop at documents, and after a resume."""
    for offload in ("none", "disk"):
        options = dict(ffn=ffn, offload=offload, doc_mask=True, table_rate=3.0)
        small_run(data, tmp_path / offload, **options)
        resume(tmp_path / offload, max_iters=16)
    assert losses(tmp_path / "none") == losses(tmp_path / "disk")


def test_at_rate_zero_rows_stay_as_drawn(data, tmp_path):
    """The control: random rows. All else learns."""
    for steps in (1, 6):
        small_run(data, tmp_path / str(steps), ffn="engram", table_rate=0.0, max_iters=steps)
    first, last = (checkpoint(tmp_path / str(steps))["model"] for steps in (1, 6))
    assert torch.equal(first["tables.weight.0"], last["tables.weight.0"])
    assert not torch.equal(
        first["blocks.1.memory.value.weight"], last["blocks.1.memory.value.weight"]
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (dict(ngram_orders="1,2"), "--ngram_orders 1,2 must be numbers from 2 to 9"),
        (dict(ngram_orders="two"), "--ngram_orders two must"),
        (dict(ngram_heads=3), "--n_embd 32 must be a multiple of 2 orders x 3"),
        (dict(ngram_layers="7"), "--ngram_layers 7 must be"),
    ],
)
def test_wrong_flags_are_named(flags, named):
    with pytest.raises(UserError, match=named):
        decoder("engram", **flags)
