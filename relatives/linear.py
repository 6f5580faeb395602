"""--attention linear: attention without a softmax, whose cost and cache do not grow with the length
(Katharopoulos et al., arXiv 2006.16236; positions as in RoFormer, arXiv 2104.09864, equation 19).
The Embformer note names it as future work: keys and values are rows there as well.

    f(x) = elu(x) + 1,   R_i: the rotation at position i
    y_i  = sum_j (R_i f(q_i) . R_j f(k_j)) v_j / sum_j f(q_i) . f(k_j)        over j <= i

Sums over earlier tokens are a state: that of R_j f(k_j) v_j^T, and that of f(k_j). Differs: the
denominator is at least 1e-6; the authors' code (repository fast-transformers) adds as much.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model
from model import ModelConfig, rotate

CHUNK = 64  # tokens whose pairs are weighed; what was before them is in the state


class State:
    """Sums over the tokens so far, in place of their keys and values."""

    outer: Tensor  # of R f(k) v^T, [B, n_head, head_dim, head_dim]
    total: Tensor  # of f(k), [B, n_head, head_dim, 1]


class Attention(model.Attention):
    def __init__(self, config: ModelConfig, qkv: nn.Module, argument: str) -> None:
        super().__init__(config, qkv, argument)
        # A pair costs three products, not two: those of the denominator are not rotated. Reading a
        # state, and adding to it, cost as much as head_dim keys.
        self.span = min(CHUNK, config.block_size) * 3 // 2 + 2 * config.head_dim

    def make_cache(self, batch: int, room: int, like: Tensor) -> State:
        return State()

    def make_mask(self, x: Tensor, start: int, documents: Tensor | None) -> Tensor:
        """The numbers of documents [B, T]."""
        return x.new_zeros(x.shape[:2]) if documents is None else documents

    def forward(
        self,
        x: Tensor,
        rows: Tensor | None,
        cos_sin: Tensor,
        mask: Tensor,
        cache: State | None = None,
        start: int = 0,
    ) -> Tensor:
        q, k, v = (heads.transpose(1, 2) for heads in self.qkv(x, rows))  # [B, heads, T, head_dim]
        groups = q.shape[1] // k.shape[1]
        with torch.autocast(x.device.type, enabled=False):  # long sums, in 32 bits
            q = F.elu(q.float()) + 1
            k = F.elu(k.float()).repeat_interleave(groups, dim=1) + 1
            v = v.float().repeat_interleave(groups, dim=1)
            y = self.sum_up(q, k, v, cos_sin, mask, cache, start)  # [B, n_head, T, head_dim]
        return self.out(y.transpose(1, 2).flatten(2).to(x.dtype))

    def sum_up(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        documents: Tensor,
        cache: State | None,
        start: int,
    ) -> Tensor:
        """The formula above, of features q and k. The state is of the last token's document."""
        past = k.shape[2] - q.shape[2]  # earlier tokens, whose rows stand in for a cache
        turned_q = rotate(q, cos_sin)
        turned_k = rotate(k, cos_sin)
        if cache is None or start == 0:
            outer = turned_k[:, :, :past].mT @ v[:, :, :past]  # [B, n_head, head_dim, head_dim]
            total = k[:, :, :past].sum(2).unsqueeze(-1)  # [B, n_head, head_dim, 1]
        else:
            outer, total = cache.outer, cache.total
        ys = []
        new = (k[:, :, past:], turned_k[:, :, past:], v[:, :, past:])
        documents = documents[:, None, :, None]  # [B, 1, T, 1]
        last = documents[:, :, :1]
        chunks = [part.split(CHUNK, dim=2) for part in (q, turned_q, *new, documents)]
        # q, k, v [B, n_head, chunk, head_dim], of documents [B, 1, chunk, 1]
        for q, turned_q, k, turned_k, v, document in zip(*chunks, strict=True):
            seen = (document == document.mT).tril()  # [B, 1, chunk, chunk]
            same = document == last  # as the state
            y = (turned_q @ turned_k.mT * seen) @ v + turned_q @ outer * same
            weights = (q @ k.mT * seen).sum(-1, keepdim=True) + q @ total * same
            # In float32, features of inputs below -17.3 are 0.
            ys.append(y / weights.clamp_min(1e-6))
            last = document[:, :, -1:]
            stays = document == last
            outer = outer * same[:, :, -1:] + (turned_k * stays).mT @ v
            total = total * same[:, :, -1:] + (k * stays).sum(2).unsqueeze(-1)
        if cache is not None:
            cache.outer, cache.total = outer, total
        return torch.cat(ys, dim=2)
