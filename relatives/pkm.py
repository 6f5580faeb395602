"""pkm: a product-key memory (Lample et al., 2019) in place of the FFN: the hidden state, not the
token, chooses among many values, so nothing can be fetched ahead. A token costs the FLOPs of the
dense FFN."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model
from common import UserError, flag


@dataclass
class Config(model.ModelConfig):
    stem_layers: str = "all"  # hides the flag: every layer is a memory
    table_std: float = 0.02  # hides the flag: there are no tables
    n_key: int = flag(64, "keys per half; a layer has n_key^2 values", must="at least 1")
    top_k: int = flag(16, "values per head", must="at least 1")


class ProductKeyMemory(nn.Module):
    """Product-key memory (Lample et al., 2019, section 3): each of n_head queries q = (q1, q2)
    finds among n_key^2 values the top_k with the largest scores, and the layer gives

        sum over heads and their top_k of softmax(score)_ij V_ij,   score_ij = k1_i q1 + k2_j q2

    The best sums are made of the best halves: n_key scores of each half and top_k^2 sums find them.
    Every head has its keys, all share the values.

    Differs: RMS norm of each half of a query, as the paper's batch norm would let a token see
    others; no biases; values learn at the rate of all the rest; it is the FFN of every layer, not
    of one or two. FLOPs: queries are as wide as makes them the dense FFN's."""

    row_width = 0

    def __init__(self, config: Config) -> None:
        super().__init__()
        n_embd, n_head = config.n_embd, config.n_head
        n_key, top_k = config.n_key, config.top_k
        # Half a query is as wide as makes the layer cost what the dense FFN costs: 3 d_ff n_embd
        # products, of which the values take n_head top_k n_embd.
        spare = (3 * config.d_ff - n_head * top_k) * n_embd
        half = spare // (2 * n_head * (n_embd + n_key))
        if top_k > n_key:
            raise UserError(f"--top_k {top_k} is more than --n_key {n_key}")
        if half < 1:
            raise UserError(f"--top_k {top_k} is too much for --d_ff {config.d_ff}")
        self.n_head = n_head
        self.n_key = n_key
        self.top_k = top_k
        self.norm_eps = config.norm_eps
        self.query = nn.Linear(n_embd, n_head * 2 * half, bias=False)
        self.keys = nn.Parameter(torch.empty(n_head * 2 * n_key, half))
        self.values = nn.Embedding(n_key**2, n_embd)
        self.idle = (n_key**2 - n_head * top_k) * n_embd  # what one token does not use

    def forward(self, x: Tensor, rows: None) -> Tensor:
        """x [B, T, n_embd] -> [B, T, n_embd]."""
        q = self.query(x).unflatten(-1, (self.n_head, 2, -1))  # [B, T, n_head, 2, half]
        q = F.rms_norm(q, q.shape[-1:], eps=self.norm_eps)
        keys = self.keys.unflatten(0, (self.n_head, 2, self.n_key))  # [n_head, 2, n_key, half]
        scores = torch.einsum("bthsd,hskd->bthsk", q, keys).float()  # [B, T, n_head, 2, n_key]
        # The best keys of each half, and all pairs of these.
        best, key = scores.topk(self.top_k)  # [B, T, n_head, 2, top_k]
        sums = best[..., 0, :, None] + best[..., 1, None, :]  # [B, T, n_head, top_k, top_k]
        values = key[..., 0, :, None] * self.n_key + key[..., 1, None, :]  # numbers of values
        # The best pairs.
        score, pair = sums.flatten(-2).topk(self.top_k)  # [B, T, n_head, top_k]
        chosen = values.flatten(-2).gather(-1, pair)
        weight = score.softmax(-1).to(x.dtype)
        y = F.embedding_bag(
            chosen.flatten(0, 1).flatten(1),  # [B * T, n_head * top_k]
            self.values.weight,
            per_sample_weights=weight.flatten(0, 1).flatten(1),
            mode="sum",
        )
        return y.view_as(x)


class Decoder(model.Decoder):
    config_class = Config

    def make_block(self, layer: int) -> model.Block:
        memory = ProductKeyMemory(self.config)
        return model.Block(self.config, layer, model.LinearQKV(self.config), memory)
