"""value: value embeddings, a row of the token on the values of attention, with a learned weight
(repositories modded-nanogpt, 2024, and nanochat): `v + w_l V_l[t]`. FFNs are dense.

With --value_gate the weight depends on x, by head, and begins at 1: `v + 2 sigmoid(G x) * V_l[t]`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import model
from common import flag
from relatives import bank


@dataclass
class Config(model.ModelConfig):
    stem_layers: str = flag("half", "layers with a table, as for STEM: third, half, all or 0,2,5")
    value_gate: bool = flag(False, "rows are weighted by x, not by a number a layer")


class ValueQKV(model.LinearQKV):
    """Differs: modded-nanogpt began with `(1 - w_l) v + w_l V_l[t]` and 0.5, here w_l begins at 1.
    nanochat's gate reads 12 channels of x and begins near 1.5, as `3 sigmoid` (`2 sigmoid` until
    March 2026); that of modded-nanogpt today reads 6 of x and 6 of the row. nanochat's tables are
    in the last layer, and in every second one before it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.row_width = config.n_kv_head * config.head_dim
        self.gate = None
        if config.value_gate:
            self.gate = nn.Linear(config.n_embd, config.n_kv_head, bias=False)
        else:
            self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, n_embd], rows V_l[t] [B, T, n_kv_head * head_dim] -> as `LinearQKV`."""
        q, k, v = super().forward(x, rows)
        row = rows.view_as(v)  # [B, T, n_kv_head, head_dim]
        if self.gate is None:
            weight = self.weight
        else:
            weight = 2 * self.gate(x).sigmoid()[..., None]  # [B, T, n_kv_head, 1]
        return q, k, v + (weight * row).to(v.dtype)


class Decoder(bank.Decoder):
    config_class = Config
    qkv = ValueQKV

    def init_weights(self) -> None:
        super().init_weights()
        for module in self.modules():  # --attention qknorm wraps them
            if isinstance(module, ValueQKV) and module.gate is not None:
                nn.init.zeros_(module.gate.weight)
