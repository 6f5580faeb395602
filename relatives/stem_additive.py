"""stem_additive: STEM's ablation that keeps the up-projection and adds the row to it (arXiv
2601.10639, section on ablations). A token costs the FLOPs of the dense FFN.

    y = W_d (SiLU(W_g x) * (W_u x + U_l[t]))
"""

import torch.nn.functional as F
from torch import Tensor

import model


class AdditiveFFN(model.SwiGLU):
    def __init__(self, config: model.ModelConfig) -> None:
        super().__init__(config.n_embd, config.d_ff)
        self.row_width = config.d_ff

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [B, T, n_embd], rows U_l[t] [B, T, d_ff] -> [B, T, n_embd]."""
        up = self.up(x)
        return self.down(F.silu(self.gate(x)) * (up + rows.to(up.dtype)))


class Decoder(model.Decoder):
    row_ffn = AdditiveFFN
