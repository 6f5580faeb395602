"""ple: the dense FFN, and beside it a narrow row, gated and projected (per-layer embeddings, of
Gemma 3n: Google, 2025; as in transformers' Gemma3nTextDecoderLayer).

    y = W_d (SiLU(W_g x) * (W_u x)) + P (GELU(G x) * E_l[t])

GELU is its approximation by tanh. The FFN is narrower by 2/3 of a row, rounded, so that a token
costs the FLOPs of the dense one.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

import model
from common import UserError, flag


@dataclass
class Config(model.ModelConfig):
    stem_layers: str = "all"  # hides the flag: every layer has a table, also the first
    ple_width: int | None = flag(None, "width of rows", shown="n_embd / 8", must="at least 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ple_width is None:
            self.ple_width = max(1, self.n_embd // 8)


class PerLayerEmbeddingFFN(model.SwiGLU):
    """Differs: Gemma gates after the FFN, by the residual stream, here both read one x; its rows
    have a part computed from the input embedding, and a norm at the end, which would begin as noise
    11 times as large as our embeddings (n_embd 128). Gemma 3n gates by one of four residual streams
    and adds to the three others; Gemma 4 has one."""

    def __init__(self, config: Config) -> None:
        self.row_width = config.ple_width
        d_ff = config.d_ff - round(2 * self.row_width / 3)
        if d_ff < 1:
            width = f"--ple_width {self.row_width}"
            raise UserError(f"{width} leaves nothing of --d_ff {config.d_ff}")
        super().__init__(config.n_embd, d_ff)
        self.row_gate = nn.Linear(config.n_embd, self.row_width, bias=False)
        self.row_out = nn.Linear(self.row_width, config.n_embd, bias=False)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [B, T, n_embd], rows E_l[t] [B, T, ple_width] -> [B, T, n_embd]."""
        gate = F.gelu(self.row_gate(x), approximate="tanh")
        from_row = self.row_out(gate * rows.to(gate.dtype))
        return self.down(self.hidden(x)) + from_row


class Decoder(model.Decoder):
    config_class = Config

    def make_block(self, layer: int) -> model.Block:
        ffn = PerLayerEmbeddingFFN(self.config)
        return model.Block(self.config, layer, model.LinearQKV(self.config), ffn)
