"""Embformer: a transformer without linear layers (Wu, 2025, "Embformer: An Embedding-Weight-Only
Transformer Architecture").

    q = norm(x)                    the normed residual stream is the query; it starts as wte[t]
    k = norm(K_l[t]), v = V_l[t]   keys and values are rows of layer l's tables
    y = mix(act(x) * F_l[t])       the FFN scales channels by a row and mixes them across heads

The three tables of a layer lie side by side in one row, K | V | F, so that one lookup serves the
layer. No module here has a parameter: everything learned sits in the tables and in the input
embedding, to which the head is tied.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import ModelConfig


class RowQKV(nn.Module):
    """Queries from the residual stream, keys and values from the row (note, section 2.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.norm_eps, self.previous = config.norm_eps, config.previous_heads
        self.row_width = 2 * config.n_kv_head * config.head_dim

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, n_embd], rows K_l[t] | V_l[t] [B, S, 2 * n_kv_head * head_dim], S: T, or what
        attention reads -> q [B, T, n_head, head_dim], k and v [B, S, n_kv_head, head_dim]."""
        q = x.unflatten(-1, (-1, self.head_dim))  # [B, T, n_head, head_dim]
        k, v = rows.to(x.dtype).unflatten(-1, (2, -1, self.head_dim)).unbind(-3)
        if self.previous:  # these heads' keys are those of the token before, across documents, too
            before = torch.cat((k[:, :1], k[:, :-1]), dim=1)
            k = torch.cat((before[:, :, : self.previous], k[:, :, self.previous :]), dim=2)
        norm = (self.head_dim,)
        return F.rms_norm(q, norm, eps=self.norm_eps), F.rms_norm(k, norm, eps=self.norm_eps), v


def mix(n_head: int, head_dim: int) -> Tensor:
    """The parameter-free mixing of channels [n_embd] as an index: seen as [n_head, head_dim],
    output [i, j] takes input [(i + j) mod n_head, j], so that each head's output draws on every
    head's input."""
    i, j = torch.arange(n_head, device="cpu")[:, None], torch.arange(head_dim, device="cpu")
    return ((i + j) % n_head * head_dim + j).flatten()


class EmbformerFFN(nn.Module):
    """FFN without weights: `mix(act(x) * F_l[t])` (note, section 2.2).

    The note writes it without activation (`identity`); the authors' code, our default, uses SiLU.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.register_buffer("mix", mix(config.n_head, config.head_dim), persistent=False)
        self.act = {"silu": F.silu, "identity": lambda x: x}[config.embformer_act]
        self.row_width = config.n_embd

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [B, T, n_embd], rows F_l[t] [B, T, n_embd] -> [B, T, n_embd]."""
        return (self.act(x) * rows.to(x.dtype))[..., self.mix]


def linear_as_attention(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    total = x.abs().sum(-1, keepdim=True).clamp_min(tiny)  # [B, 1]
    attention = (x.abs() / total).clamp_min(tiny)[:, None]  # [B, 1, n_in], sums to one
    v = weight.T * (total * x.sign())[..., None]  # [B, n_in, n_out]
    # softmax(q k^T / sqrt(n_in)) = attention  <=  q = sqrt(n_in) log(attention) k^-T. Any
    # invertible k will do; the identity is the one whose inverse loses no digits.
    k = torch.eye(n_in, dtype=x.dtype, device=x.device).expand(len(x), n_in, n_in)
    q = attention.log() * n_in**0.5  # [B, 1, n_in]
    return q, k, v
