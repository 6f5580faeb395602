"""--attention qknorm: queries and keys are normed by head, with a learned scale for each channel.
This keeps the logits of attention small (Dehghani et al., arXiv 2302.05442, section 2). Qwen3
(2505.09388) and MiniMind-3 have it, which convert.py reads."""

from torch import Tensor, nn

import model
from common import UserError
from model import ModelConfig


class NormedQKV(nn.Module):
    """What `qkv` makes, with normed queries and keys."""

    def __init__(self, config: ModelConfig, qkv: nn.Module) -> None:
        super().__init__()
        self.row_width = qkv.row_width
        self.qkv = qkv
        self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """As `model.LinearQKV`."""
        q, k, v = self.qkv(x, rows)
        return normed(self.q_norm, q), normed(self.k_norm, k), v


def normed(norm: nn.RMSNorm, heads: Tensor) -> Tensor:
    """[B, T, heads, head_dim]: under autocast, heads have 16 bits and the norm's weights 32."""
    return norm(heads.to(norm.weight.dtype)).to(heads.dtype)


class Attention(model.Attention):
    def __init__(self, config: ModelConfig, qkv: nn.Module, argument: str) -> None:
        if config.embedding_only:
            raise UserError("--attention qknorm: Embformer norms queries and keys anyway")
        super().__init__(config, NormedQKV(config, qkv), argument)
