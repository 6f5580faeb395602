"""bigram: the row of the last two tokens, added in every layer with a weight of its own (bigram
hash embedding: K. Jordan et al., repository modded-nanogpt, 2026). FFNs are dense.

    x + w_l e,  e: the row of the last two tokens, the same in every layer

Differs: Engram's hash (ngrams.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor, nn

import model
from relatives import ngrams
from tables.tables import Tables


@dataclass
class Config(ngrams.Config):
    stem_layers: str = "0"  # hides the flag: all layers add the row; ngrams.py seeds hashes by it
    ngram_orders: str = "2"
    ngram_heads: int = 1


class Block(model.Block):
    """A dense block, to whose input the row is added."""

    def __init__(self, config: Config, layer: int) -> None:
        ffn = model.SwiGLU(config.n_embd, config.d_ff)
        super().__init__(config, layer, model.LinearQKV(config), ffn)
        self.row_width = config.n_embd
        self.weight = nn.Parameter(torch.full((1,), 0.05))

    def forward(self, x: Tensor, rows: Tensor, *context) -> Tensor:
        x = x + self.dropout(self.weight * rows)
        return super().forward(x, None, *context)


class Decoder(ngrams.NgramDecoder):
    """One table serves all layers."""

    config_class = Config

    def make_block(self, layer: int) -> model.Block:
        return Block(self.config, layer)

    def make_tables(self, tables: Callable[..., Tables], widths: list[int]) -> Tables:
        return super().make_tables(tables, widths[:1])

    def layer_rows(self, addresses: Tensor) -> Iterator[Tensor]:
        return repeat(next(super().layer_rows(addresses)))
