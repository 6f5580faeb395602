"""Mixing, parameters, the note's claim about linear layers. The whole model: test_attention.py."""

import torch
import torch.nn.functional as F
from naive import decoder


def test_every_parameter_is_the_input_embedding_or_a_table():
    model = decoder(ffn="embformer")
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    assert shapes.pop("wte.weight") == (23, 32)
    assert sorted(shapes) == ["tables.weight.0", "tables.weight.1", "tables.weight.2"]
    assert set(shapes.values()) == {(23, 3 * 32)}  # K | V | F


def test_a_linear_layer_as_attention_step_by_step():
    """The note's argument for dropping linear layers (section 2.1): `x W^T` is an attention output.

    The sequence runs over the input features. |x| / sum|x| is a probability distribution, so it can
    be the attention weights; sign and magnitude go into the values; and keys chosen at will give
    queries that produce these weights after a softmax."""
    torch.manual_seed(0)
    x = torch.randn(7, 5)
    weight = torch.randn(3, 5)  # [n_out, n_in]
    total = x.abs().sum(-1, keepdim=True)  # [B, 1]
    attention = x.abs() / total
    # softmax(q k^T / sqrt(n_in)) = attention  <=  q = sqrt(n_in) log(attention) k^-T. Any
    # invertible k will do.
    k = torch.randn(5, 5)
    q = attention.log()[:, None] * 5**0.5 @ k.inverse().T  # [B, 1, n_in]
    v = weight.T * (total * x.sign())[..., None]  # [B, n_in, n_out]
    y = F.scaled_dot_product_attention(q, k.expand(7, 5, 5), v)
    torch.testing.assert_close(y[:, 0], x @ weight.T, rtol=1e-4, atol=1e-4)
