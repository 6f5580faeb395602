"""engram: a memory of n-grams beside attention and FFN (Engram: DeepSeek, arXiv 2601.07372).

    x + sigmoid(s) W_V e

e are rows of the n-grams that end here (ngrams.py), s is how well W_K e fits x. FFNs are dense.
"""

from dataclasses import dataclass

from torch import Tensor, nn

import model
from common import flag
from relatives import ngrams


@dataclass
class Config(ngrams.Config):
    stem_layers: str = flag("1", "layers with rows, as for STEM: third, half, all or 0,2,5")


class Engram(nn.Module):
    """Section 2.3:

        s = norm(x) . norm(W_K e) / sqrt(n_embd)
        y = sigmoid(sign(s) sqrt(|s|)) W_V e

    Differs: no short convolution behind it (nor has DeepSeek-V4.1); no biases."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.n_embd
        self.query_norm = nn.RMSNorm(width, config.norm_eps)
        self.key_norm = nn.RMSNorm(width, config.norm_eps)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [B, T, n_embd], rows e [B, T, n_embd] -> [B, T, n_embd]."""
        key = self.key_norm(self.key(rows).to(x.dtype))  # [B, T, n_embd]
        score = (self.query_norm(x) * key).sum(-1, keepdim=True)  # [B, T, 1]
        score = score / x.shape[-1] ** 0.5
        score = score.sign() * score.abs().clamp_min(1e-6).sqrt()
        return score.sigmoid() * self.value(rows)


class Block(model.Block):
    """A dense block, with a memory before attention."""

    def __init__(self, config: Config, layer: int) -> None:
        ffn = model.SwiGLU(config.n_embd, config.d_ff)
        super().__init__(config, layer, model.LinearQKV(config), ffn)
        self.memory = Engram(config)
        self.row_width = config.n_embd  # rows of all orders and heads, side by side

    def forward(self, x: Tensor, rows: Tensor, *context) -> Tensor:
        x = x + self.dropout(self.memory(x, rows))
        return super().forward(x, None, *context)


class Decoder(ngrams.NgramDecoder):
    config_class = Config

    def make_block(self, layer: int) -> model.Block:
        if layer in self.config.row_layers:
            return Block(self.config, layer)
        return super().make_block(layer)
