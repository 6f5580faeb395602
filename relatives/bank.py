"""bank: values of attention are rows, and the linear layer for values is gone (Bank of Values,
arXiv 2606.02780). They would need no cache but the token ids. FFNs are dense.

    v = V_l[t]         in the last third of the layers

Differs: no learned coefficient of each layer, g_l V_l[t], which begins at 1; rows begin as noise,
the paper's as W_V norm(wte[t]), with the W_V that they replace; a third of the layers is rounded
down, in its code up.
"""

from dataclasses import dataclass

from torch import Tensor, nn

import model
from common import flag


@dataclass
class Config(model.ModelConfig):
    stem_layers: str | None = flag(
        None, "layers with a table, as for STEM: third, half, all, 0,2,5", shown="the last third"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stem_layers is None:
            first = self.n_layer - max(1, self.n_layer // 3)
            self.stem_layers = ",".join(map(str, range(first, self.n_layer)))


class BankQKV(nn.Module):
    """Queries and keys by one linear layer, values from the row."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_eps = config.norm_eps
        self.heads = (config.n_head, config.n_kv_head)
        self.row_width = config.n_kv_head * config.head_dim
        self.qk = nn.Linear(config.n_embd, sum(self.heads) * config.head_dim, bias=False)

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, n_embd], rows V_l[t] [B, T, n_kv_head * head_dim] -> as `LinearQKV`."""
        heads = self.qk(x).unflatten(-1, (sum(self.heads), -1))  # [B, T, heads, head_dim]
        q, k = heads.split(self.heads, dim=-2)
        return q, k, self.values(rows.view_as(k).to(k.dtype), k)

    def values(self, rows: Tensor, k: Tensor) -> Tensor:
        """rows and keys [B, T, n_kv_head, head_dim] -> values."""
        return rows


class Decoder(model.Decoder):
    config_class = Config
    qkv = BankQKV

    def make_block(self, layer: int) -> model.Block:
        config = self.config
        if layer not in config.row_layers:
            return super().make_block(layer)
        ffn = model.SwiGLU(config.n_embd, config.d_ff)
        return model.Block(config, layer, self.qkv(config), ffn)
