"""Embformer: a transformer without linear layers (Wu, 2025, "Embformer: An Embedding-Weight-Only
Transformer Architecture"; below: the note).

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
from local_attention import use_previous_keys


class RowQKV(nn.Module):
    """Queries from the residual stream, keys and values from the row (note, section 2.2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.norm_eps = config.norm_eps
        self.previous_heads = config.previous_heads
        self.row_width = 2 * config.n_kv_head * config.head_dim

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, n_embd], rows K_l[t] | V_l[t] [B, S, 2 * n_kv_head * head_dim], S: T, or what
        attention reads -> q [B, T, n_head, head_dim], k and v [B, S, n_kv_head, head_dim]."""
        q = x.unflatten(-1, (-1, self.head_dim))  # [B, T, n_head, head_dim]
        rows = rows.to(x.dtype)
        heads = rows.unflatten(-1, (2, -1, self.head_dim))
        k, v = heads.unbind(-3)  # [B, S, n_kv_head, head_dim] each
        if self.previous_heads:
            k = use_previous_keys(k, self.previous_heads)
        q = F.rms_norm(q, (self.head_dim,), eps=self.norm_eps)
        k = F.rms_norm(k, (self.head_dim,), eps=self.norm_eps)
        return q, k, v


def mix(n_head: int, head_dim: int) -> Tensor:
    """The parameter-free mixing of channels [n_embd] as an index: seen as [n_head, head_dim],
    output [i, j] takes input [(i + j) mod n_head, j], so that each head's output draws on every
    head's input."""
    i = torch.arange(n_head, device="cpu")[:, None]
    j = torch.arange(head_dim, device="cpu")
    head = (i + j) % n_head  # [n_head, head_dim]
    return (head * head_dim + j).flatten()


class EmbformerFFN(nn.Module):
    """FFN without weights: `mix(act(x) * F_l[t])` (note, section 2.2).

    The note writes it without activation (`identity`); the authors' code, our default, uses SiLU.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.register_buffer("mix", mix(config.n_head, config.head_dim), persistent=False)
        acts = {"silu": F.silu, "identity": nn.Identity()}
        self.act = acts[config.embformer_act]
        self.row_width = config.n_embd

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [B, T, n_embd], rows F_l[t] [B, T, n_embd] -> [B, T, n_embd]."""
        scaled = self.act(x) * rows.to(x.dtype)
        return scaled[..., self.mix]


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
