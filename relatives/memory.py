"""memory: values of attention are the keys plus a normed row, and the linear layer for values is
gone (Memory Attention, arXiv 2609.28399). FFNs are dense.

    v = k + norm(E_l[t])
"""

import torch.nn.functional as F
from torch import Tensor

import model
from relatives import bank


class MemoryQKV(bank.BankQKV):
    """Keys before they are rotated; the norm is of each head.

    Differs from the author's code (repository memory-attention): the norm has no learned scale,
    and its epsilon is that of the others, not 1e-5; the first layer keeps its W_v."""

    def values(self, rows: Tensor, k: Tensor) -> Tensor:
        return k + F.rms_norm(rows, rows.shape[-1:], eps=self.norm_eps)


class Decoder(bank.Decoder):
    config_class = model.ModelConfig
    qkv = MemoryQKV
