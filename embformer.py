"""Embformer: a transformer without linear layers (Wu, 2025, "Embformer: An Embedding-Weight-Only
Transformer Architecture"; below: the note).

    q = norm(x)                    queries are the normed residual stream, normed again by head
    k = norm(K_l[t]), v = V_l[t]   keys and values are rows of layer l's tables
    y = mix(act(x) * F_l[t])       the FFN scales channels by a row and mixes them across heads

The three tables of a layer lie side by side in one row, K | V | F, so that one lookup serves the
layer. No module here has a parameter: everything learned sits in the tables and in the input
embedding, to which the head is tied.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RowQKV(nn.Module):
    """Queries from the residual stream, keys and values from the row (note, section 2.2)."""

    def __init__(self, n_kv_head: int, head_dim: int, norm_eps: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm_eps = norm_eps
        self.row_width = 2 * n_kv_head * head_dim
        self.keys_are_normed = False  # in the table, once training/decoding.norm_keys did it

    def norm(self, heads: Tensor) -> Tensor:
        """[..., head_dim] -> [..., head_dim]."""
        return F.rms_norm(heads, (self.head_dim,), eps=self.norm_eps)

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, n_embd], rows K_l[t] | V_l[t] [B, T, 2 * n_kv_head * head_dim] ->
        q [B, T, n_head, head_dim], k and v [B, T, n_kv_head, head_dim]."""
        q = x.unflatten(-1, (-1, self.head_dim))  # [B, T, n_head, head_dim]
        heads = rows.unflatten(-1, (2, -1, self.head_dim))
        k, v = heads.unbind(-3)  # [B, T, n_kv_head, head_dim] each
        if not self.keys_are_normed:
            k = self.norm(k)
        return self.norm(q), k, v


def mix(n_head: int, head_dim: int) -> Tensor:
    """The parameter-free mixing of channels [n_embd] as an index: seen as [n_head, head_dim],
    output [i, j] takes input [(i + j) mod n_head, j], so that each head's output draws on every
    head's input, if a head has at least as many channels as there are heads."""
    # Also under torch.device("meta"): no checkpoint holds this index.
    i = torch.arange(n_head, device="cpu")[:, None]
    j = torch.arange(head_dim, device="cpu")
    head = (i + j) % n_head  # [n_head, head_dim]
    return (head * head_dim + j).flatten()


class EmbformerFFN(nn.Module):
    """FFN without weights: `mix(act(x) * F_l[t])` (note, section 2.2).

    In the note, x is attention's output, and there is no activation (`identity`). In its author's
    code, as here, x is the normed residual stream, and the activation is SiLU by default.
    """

    def __init__(self, n_head: int, head_dim: int, act: str = "silu") -> None:
        super().__init__()
        self.register_buffer("mix", mix(n_head, head_dim), persistent=False)
        self.act = {"silu": F.silu, "identity": nn.Identity()}[act]
        self.row_width = n_head * head_dim

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [B, T, n_embd], rows F_l[t] [B, T, n_embd] -> [B, T, n_embd]."""
        return (self.act(x) * rows)[..., self.mix]
