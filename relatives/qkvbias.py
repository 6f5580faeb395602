"""--attention qkvbias: queries, keys and values have biases, which begin at zero. Qwen2 and Qwen2.5
(arXiv 2407.10671, section 2.2.1) have them, which convert.py reads."""

import torch
from torch import Tensor, nn

import model
from common import UserError
from model import ModelConfig


class BiasedQKV(nn.Module):
    """What `qkv` makes, plus biases."""

    def __init__(self, config: ModelConfig, qkv: nn.Module) -> None:
        super().__init__()
        self.row_width = qkv.row_width
        self.qkv = qkv
        self.heads = (config.n_head, config.n_kv_head, config.n_kv_head)
        self.bias = nn.Parameter(torch.zeros(sum(self.heads) * config.head_dim))

    def forward(self, x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """As `model.LinearQKV`."""
        q, k, v = self.qkv(x, rows)
        bias = self.bias.to(q.dtype).unflatten(0, (sum(self.heads), -1))  # [heads, head_dim]
        of_q, of_k, of_v = bias.split(self.heads)
        return q + of_q, k + of_k, v + of_v


class Attention(model.Attention):
    def __init__(self, config: ModelConfig, qkv: nn.Module, argument: str) -> None:
        if config.embedding_only:
            raise UserError("--attention qkvbias: all weights of Embformer are in embeddings")
        super().__init__(config, BiasedQKV(config, qkv), argument)
