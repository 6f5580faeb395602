"""engram: a memory of n-grams beside attention and FFN (Engram: DeepSeek, arXiv 2601.07372).

    x + sigmoid(s) W_V e

e are rows of the n-grams that end here (ngrams.py), s tells how well W_K e fits x (see `Engram`).
FFNs are dense.

--engram_table one: all layers read the rows of one table (repository nano-scalemb, 2026).
--engram_place ffn: the memory is added in the FFN instead, W_d (SiLU(W_g x) * (W_u x + memory)), as
the study of places in FactorEngram has it (arXiv 2609.35578, section 4.4.2).
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

import model
from common import flag
from relatives import ngrams


@dataclass
class Config(ngrams.Config):
    stem_layers: str = flag("1", "layers with rows, as for STEM: third, half, all or 0,2,5")
    engram_table: str = flag("own", "own: a table for each layer", choices=("own", "one"))
    engram_place: str = flag(
        "before",
        "where the memory is added: before attention, or in the FFN",
        choices=("before", "ffn"),
    )


class Engram(nn.Module):
    """Section 2.3, and the root of its code (engram_demo_v1.py), where the paper has sigmoid(r):

        r = norm(x) . norm(W_K e) / sqrt(n_embd)
        y = sigmoid(s) W_V e,   s = sign(r) sqrt(|r|)

    Differs: one residual stream, not four with a W_K each (section 2.4); no short convolution after
    it and no biases (nor has DeepSeek-V4.1)."""

    def __init__(self, config: Config, d_out: int) -> None:
        super().__init__()
        width = config.n_embd
        self.query_norm = nn.RMSNorm(width, config.norm_eps)
        self.key_norm = nn.RMSNorm(width, config.norm_eps)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, d_out, bias=False)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [B, T, n_embd], rows e [B, T, n_embd] -> [B, T, d_out]."""
        key = self.key_norm(self.key(rows).to(x.dtype))  # [B, T, n_embd]
        score = (self.query_norm(x) * key).sum(-1, keepdim=True)  # [B, T, 1]
        score = score / x.shape[-1] ** 0.5
        score = score.sign() * score.abs().clamp_min(1e-6).sqrt()
        return score.sigmoid() * self.value(rows)


class MemoryFFN(model.SwiGLU):
    """A dense FFN with the memory in its up-branch."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.n_embd, config.d_ff)
        self.memory = Engram(config, config.d_ff)
        self.row_width = config.n_embd

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [B, T, n_embd], rows e [B, T, n_embd] -> [B, T, n_embd]."""
        return self.down(F.silu(self.gate(x)) * (self.up(x) + self.memory(x, rows)))


class Block(model.Block):
    """A dense block, with a memory before attention."""

    def __init__(self, config: Config, layer: int) -> None:
        ffn = model.SwiGLU(config.n_embd, config.d_ff)
        super().__init__(config, layer, model.LinearQKV(config), ffn)
        self.memory = Engram(config, config.n_embd)
        self.row_width = config.n_embd  # rows of all orders and heads, side by side

    def forward(self, x: Tensor, rows: Tensor, *context) -> Tensor:
        x = x + self.dropout(self.memory(x, rows))
        return super().forward(x, None, *context)


class Decoder(ngrams.NgramDecoder):
    config_class = Config

    @property
    def one_table(self) -> bool:
        return self.config.engram_table == "one"

    def make_block(self, layer: int) -> model.Block:
        config = self.config
        if layer not in config.row_layers:
            return super().make_block(layer)
        if config.engram_place == "before":
            return Block(config, layer)
        return model.Block(config, layer, model.LinearQKV(config), MemoryFFN(config))
