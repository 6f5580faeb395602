"""Checks Embformer's layers against loops over their formulas (the whole model: test_attention.py),
and the note's claim about linear layers."""

import pytest
import torch
import torch.nn.functional as F

from embformer import EmbformerFFN, mix
from model import Decoder, ModelConfig

TINY = dict(ffn="embformer", vocab_size=23, block_size=16, n_layer=3, n_head=4, n_embd=32)


def silu(x):
    return x / (1 + torch.exp(-x))


ACTIVATIONS = {"silu": silu, "identity": lambda x: x}


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
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    tables = {f"tables.weight.{layer}": (23, 3 * 32) for layer in range(3)}  # K | V | F
    assert shapes == {"wte.weight": (23, 32), **tables}


# --- a linear layer as attention, in the note's steps ---


def linear_as_attention(x, weight):
    """The note's argument for dropping linear layers (section 2.1): `x W^T` is an attention output.

    The sequence runs over the input features. |x| / sum|x| is a probability distribution, so it can
    be the attention weights; sign and magnitude go into the values; and keys chosen at will give
    queries that produce these weights after a softmax.

    Args:
        x: [B, n_in]. Exact zeros have weight 0, which no finite logit gives: they get the smallest
            positive number instead, and their value is zero anyway.
        weight: [n_out, n_in], as in `nn.Linear`.

    Returns:
        q [B, 1, n_in], k [B, n_in, n_in], v [B, n_in, n_out] such that
        `F.scaled_dot_product_attention(q, k, v)[:, 0]` equals `x @ weight.T`.
    """
    n_in = x.shape[-1]
    tiny = torch.finfo(x.dtype).tiny
    size = x.abs()
    total = size.sum(-1, keepdim=True).clamp_min(tiny)  # [B, 1]
    attention = (size / total).clamp_min(tiny)  # sums to one
    attention = attention[:, None]  # [B, 1, n_in]
    signed = total * x.sign()
    v = weight.T * signed[..., None]  # [B, n_in, n_out]
    # softmax(q k^T / sqrt(n_in)) = attention  <=  q = sqrt(n_in) log(attention) k^-T. Any
    # invertible k will do; the identity is the one whose inverse loses no digits.
    k = torch.eye(n_in, dtype=x.dtype, device=x.device)
    k = k.expand(len(x), n_in, n_in)
    q = attention.log() * n_in**0.5  # [B, 1, n_in]
    return q, k, v


def inputs() -> torch.Tensor:
    """Numbers of both signs, of one, and zeros, even none but zeros."""
    x = torch.randn(7, 5)
    x[0] = x[0].abs()
    x[1] = -x[1].abs()
    x[2, ::2] = 0
    x[3] = 0
    x[4, 1] = 1e9
    return x


def test_a_linear_layer_as_attention_step_by_step():
    torch.manual_seed(0)
    x, weight = inputs(), torch.randn(3, 5)
    q, k, v = linear_as_attention(x, weight)
    assert (q.shape, k.shape, v.shape) == ((7, 1, 5), (7, 5, 5), (7, 5, 3))
    # 1: |x| / sum|x| is a distribution (zeros, whose values are all zero, may spread evenly)
    total = x.abs().sum(-1, keepdim=True)
    weights = torch.where(total > 0, x.abs() / total, torch.full_like(x, 1 / 5))
    # 2: the softmax of the scores is that
    torch.testing.assert_close(((q @ k.transpose(1, 2))[:, 0] / 5**0.5).softmax(-1), weights)
    # 3: which makes attention equal the linear layer
    y = F.scaled_dot_product_attention(q, k, v)[:, 0]
    for row, expected in zip(y, x @ weight.T, strict=True):
        size = max(1.0, expected.abs().max().item())
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-6 * size)
