"""Checks Embformer's layers against loops over their formulas (the whole model: test_attention.py),
and the note's claim about linear layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from embformer import EmbformerFFN, linear_as_attention, mix
from model import Decoder, ModelConfig

TINY = dict(ffn="embformer", vocab_size=23, block_size=16, n_layer=3, n_head=4, n_embd=32)


def silu(x):
    return x / (1 + torch.exp(-x))


ACTIVATIONS = {"silu": silu, "identity": lambda x: x}


def naive_norm(x, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def naive_mix(x, n_head):
    """x [n_embd]: output [i, j] takes input [(i + j) mod n_head, j]."""
    x = x.view(n_head, -1)
    y = torch.empty_like(x)
    for i in range(n_head):
        for j in range(x.shape[1]):
            y[i, j] = x[(i + j) % n_head, j]
    return y.flatten()


# --- the layers ---


@pytest.mark.parametrize(("n_head", "head_dim"), [(4, 8), (3, 2), (2, 7), (6, 6), (1, 9)])
def test_mix_equals_the_double_loop_and_is_a_permutation(n_head, head_dim):
    x = torch.arange(n_head * head_dim)
    mixed = x[mix(n_head, head_dim)]
    assert torch.equal(mixed, naive_mix(x, n_head))
    assert torch.equal(mixed.sort().values, x)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_ffn_equals_its_formula_per_token(act):
    torch.manual_seed(0)
    ffn = EmbformerFFN(ModelConfig(**TINY, embformer_act=act))
    x, rows = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    y = ffn(x, rows)
    for b in range(2):
        for t in range(5):
            expected = naive_mix(ACTIVATIONS[act](x[b, t]) * rows[b, t], 4)
            torch.testing.assert_close(y[b, t], expected)


# --- the model ---


def test_every_parameter_is_the_input_embedding_or_a_table():
    model = Decoder(ModelConfig(**TINY))
    parameters = dict(model.named_parameters())
    assert set(parameters) == {"wte.weight", *(f"tables.weight.{layer}" for layer in range(3))}
    assert parameters["wte.weight"].shape == (23, 32)
    assert parameters["tables.weight.0"].shape == (23, 3 * 32)  # K | V | F
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert not set(model.state_dict()) - set(parameters)


# --- a linear layer as attention, in the note's four steps ---

INPUTS = {
    "mixed": torch.randn(4, 5, generator=torch.Generator().manual_seed(1)),
    "positive": torch.tensor([[0.1, 2.0, 3.0, 0.5, 1.0]]),
    "negative": torch.tensor([[-0.1, -2.0, -3.0, -0.5, -1.0]]),
    "zeros": torch.tensor([[0.0, -2.0, 0.0, 0.5, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]]),
    "huge": torch.tensor([[0.0, 1e9, -2.0, 0.0, 1.0]]),
}


@pytest.mark.parametrize("name", INPUTS)
def test_a_linear_layer_as_attention_step_by_step(name):
    x, weight = INPUTS[name], torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    # 1: the linear layer, written out
    linear = torch.stack([sum(row[i] * weight[:, i] for i in range(5)) for row in x])
    # 2: |x| / sum|x| is a distribution (zeros, whose values are all zero, may spread evenly)
    total = x.abs().sum(-1, keepdim=True)
    attention = torch.where(total > 0, x.abs() / total, torch.full_like(x, 1 / 5))
    q, k, v = linear_as_attention(x, weight)
    assert (q.shape, k.shape, v.shape) == ((len(x), 1, 5), (len(x), 5, 5), (len(x), 5, 3))
    close = dict(rtol=1e-5, atol=1e-6 * max(1.0, linear.abs().max().item()))
    torch.testing.assert_close((attention[:, None] @ v)[:, 0], linear, **close)
    # 3: the softmax of the scores gives it back
    torch.testing.assert_close(((q @ k.transpose(1, 2))[:, 0] / 5**0.5).softmax(-1), attention)
    # 4: so that attention equals the linear layer
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v)[:, 0], linear, **close)
