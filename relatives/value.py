"""value: value embeddings, a row of the token on the values of attention, with a learned weight
(repositories modded-nanogpt, 2024, and nanochat): `v + w_l V_l[t]`. FFNs are dense."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import model
from common import flag
from relatives import bank


@dataclass
class Config(model.ModelConfig):
    stem_layers: str = flag("half", "layers with a table, as for STEM: third, half, all or 0,2,5")


class ValueQKV(model.LinearQKV):
    """Differs: one weight a layer; nanochat's depends on x."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.row_width = config.n_kv_head * config.head_dim
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, n_embd], rows V_l[t] [B, T, n_kv_head * head_dim] -> as `LinearQKV`."""
        q, k, v = super().forward(x, rows)
        row = rows.view_as(v)  # [B, T, n_kv_head, head_dim]
        return q, k, v + (self.weight * row).to(v.dtype)


class Decoder(bank.Decoder):
    config_class = Config
    qkv = ValueQKV
