"""bigram: the row of the last two tokens, added in every layer with a weight of its own (bigram
hash embedding: K. Jordan et al., repository modded-nanogpt, 2026). FFNs are dense.

    x + w_l e,  e: the row of the last two tokens, the same in every layer

As there at first (93f0e6b), rows begin at zero and w_l at 0.1. Differs: Engram's hash (ngrams.py);
of later versions, no gates for w_l, and no random signs that tell apart pairs which share a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import model
from common import flag
from relatives import ngrams


@dataclass
class Config(ngrams.Config):
    stem_layers: str = "0"  # hides the flag: all layers add the row; ngrams.py seeds hashes by it
    ngram_orders: str = "2"
    ngram_heads: int = 1
    table_std: float = flag(0.0, "std of new table rows", must="0 or more")


class Block(model.Block):
    """A dense block, to whose input the row is added."""

    def __init__(self, config: Config, layer: int) -> None:
        ffn = model.SwiGLU(config.n_embd, config.d_ff)
        super().__init__(config, layer, model.LinearQKV(config), ffn)
        self.row_width = config.n_embd
        self.weight = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, x: Tensor, rows: Tensor, *context) -> Tensor:
        x = x + self.dropout(self.weight * rows)
        return super().forward(x, None, *context)


class Decoder(ngrams.NgramDecoder):
    config_class = Config
    one_table = True

    def make_block(self, layer: int) -> model.Block:
        return Block(self.config, layer)
