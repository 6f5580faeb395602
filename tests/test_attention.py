"""Kinds of attention against one that weighs all T x T pairs of tokens, in float64."""

import pytest
import torch
from conftest import Largest
from torch import nn

from common import UserError
from config import ModelConfig
from edit import MeanRows
from embformer import mix
from model import Decoder

TINY = dict(ffn="embformer", vocab_size=11, block_size=32, n_layer=3, n_head=4, n_embd=32, window=4)
PATTERNS = ("window", "window,full", "window,window,full")


def decoder(**options) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(ModelConfig(**{**TINY, **options})).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    return model.eval()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def naive_norm(x):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(x, base=10000.0):
    """x [T, H, head_dim]: channels i and i + head_dim/2 as complex numbers, turned by position."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x)).double()[:, None] / base ** (torch.arange(half).double() / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)[:, None]
    return torch.cat((z.real, z.imag), dim=-1)


def naive(config, weights, ids, table_ids, documents=None):
    """Logits [T, V] of Embformer for ids [T]: each layer weighs all pairs of tokens."""
    n, d = len(ids), config.head_dim
    documents = torch.zeros(n) if documents is None else documents
    i, j = torch.arange(n)[:, None], torch.arange(n)
    same = (j <= i) & (documents[:, None] == documents)
    shared = torch.arange(config.n_head) // (config.n_head // config.n_kv_head)
    x = weights["wte.weight"][ids]
    for layer in range(config.n_layer):
        kind = config.attention.split(",")[layer % len(config.attention.split(","))]
        rows = weights[f"tables.weight.{layer}"][table_ids]
        k, v, f = rows.split([config.n_kv_head * d] * 2 + [config.n_embd], -1)
        k, v = k.unflatten(-1, (-1, d)), v.unflatten(-1, (-1, d))
        before = torch.arange(n).sub(1).clamp(min=0)  # keys of the token before
        heads = config.previous_heads
        k = torch.cat((k[before][:, :heads], k[:, heads:]), dim=1)
        q, k = naive_norm(naive_norm(x).unflatten(-1, (-1, d))), naive_norm(k)[:, shared]
        q, k = turned(q), turned(k)
        logits = torch.einsum("ihd,jhd->hij", q, k) / d**0.5
        seen = same & (i - j < config.window) if kind == "window" else same
        weight = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + torch.einsum("hij,jhd->ihd", weight, v[:, shared]).flatten(1)
        h = naive_norm(x)
        x = x + (h * h.sigmoid() * f)[:, mix(config.n_head, d)]
    return naive_norm(x) @ weights["wte.weight"].T


@pytest.mark.parametrize("attention", PATTERNS)
@pytest.mark.parametrize(
    "options", [{}, dict(n_kv_head=2, previous_heads=1, window=5)], ids=["plain", "grouped"]
)
@pytest.mark.parametrize("n", [3, 16, 29])
@pytest.mark.parametrize("masked", [False, True])
def test_logits_and_gradients_equal_those_of_all_pairs(attention, options, n, masked):
    model, ids, table_ids = decoder(attention=attention, **options), tokens(2, n), tokens(2, n)
    table_ids[:, 1::3] = 7  # an edit: other rows than the ids'
    documents = (tokens(2, n, seed=3) == 0).cumsum(1) if masked else None
    model.tables.requires_grad_()  # ordinary parameters, not rounded to float32
    weights = {k: v.detach().clone().requires_grad_() for k, v in model.state_dict().items()}
    expected = torch.stack([
        naive(model.config, weights, ids[b], table_ids[b], documents[b] if masked else None)
        for b in range(2)
    ])  # fmt: skip
    logits, _ = model(ids, table_ids=table_ids, documents=documents)
    close = dict(rtol=1e-4, atol=1e-4)  # angles are float32
    torch.testing.assert_close(logits, expected, **close)
    (logits.sin().sum() + expected.sin().sum()).backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, weights[name].grad, **close)


@pytest.mark.parametrize("attention", [*PATTERNS, "full"])
@pytest.mark.parametrize("chunks", [[1] * 29, [5, 1, 9, 14], [29]], ids=str)
@pytest.mark.parametrize("edited", [False, True])
def test_cached_logits_equal_those_without_a_cache(attention, chunks, edited):
    model = decoder(attention=attention, n_kv_head=2, previous_heads=2)
    ids, table_ids = tokens(2, 29), tokens(2, 29, seed=4)
    if edited:  # to a mean of rows: a token of its own behind the vocabulary
        model.tables = MeanRows(model.tables)
        table_ids[ids == 3] = model.tables.token([1, 2])
    whole, _ = model(ids, table_ids=table_ids)
    cache = model.make_cache(2)
    for _ in range(2):  # what is full begins again
        cache.length = 0
        parts = zip(ids.split(chunks, 1), table_ids.split(chunks, 1), strict=True)
        logits = [model(part, table_ids=under, cache=cache)[0] for part, under in parts]
        torch.testing.assert_close(torch.cat(logits, dim=1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["window", "full"])
def test_no_tensor_of_a_step_grows_with_the_square_of_the_length(attention):
    """Of full attention inside documents some do, so that the test can see them."""
    most = []
    for n in (64, 128, 256):
        options = dict(block_size=256, n_layer=1, n_embd=8)  # heads of one pair of channels
        model, ids = decoder(attention=attention, **options), tokens(1, n)
        with Largest() as largest:
            model(ids, ids, documents=(ids == 0).cumsum(1))[1].backward()
        most.append(largest.numbers)
    growth = 2 if attention == "window" else 4
    assert most[1] / most[0] == pytest.approx(growth, rel=0.1)
    assert most[2] / most[1] == pytest.approx(growth, rel=0.1)


def test_a_window_layer_caches_one_window():
    model, ids = decoder(attention="window,full", block_size=64), tokens(2, 59)
    cache = model.make_cache(2)
    model(ids, cache=cache)
    assert [layer.k.shape[-2:] for layer in cache.layers] == [(3, 8), (64, 8), (3, 8)]


@pytest.mark.parametrize("attention", [*PATTERNS, "full"])
def test_no_pass_waits_for_the_device(attention):
    """Ids and documents are on the CPU, all else on the meta device, whose numbers nobody can ask
    for. n = 24: more than twice the distinct tokens."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(**TINY, attention=attention))
    ids = tokens(2, 24)
    logits, _ = model(ids, documents=(ids == 0).cumsum(1))
    assert logits.is_meta and logits.shape == (2, 24, 11)
    logits.sum().backward()


@pytest.mark.parametrize("masked", [False, True])
def test_repeated_keys_give_what_grouped_ones_give(masked, monkeypatch):
    model, ids = decoder(attention="window,full", n_kv_head=2), tokens(2, 29)
    documents = (ids == 0).cumsum(1) if masked else None
    grouped, _ = model(ids, documents=documents)
    monkeypatch.setattr("attention.has_grouped_kernel", lambda *_: False)
    torch.testing.assert_close(model(ids, documents=documents)[0], grouped)


def test_only_full_attention_can_be_compiled():
    with pytest.raises(UserError, match="--compile: caches of --attention window change"):
        decoder(attention="window").compile_steps()
