"""stem_gate: STEM's ablation that looks up the gate in place of the up-projection (arXiv
2601.10639, section on ablations). Which units open no longer depends on the context.

    y = W_d (SiLU(U_l[t]) * (W_u x))
"""

import torch.nn.functional as F
from torch import Tensor, nn

import model


class GateFFN(nn.Module):
    def __init__(self, config: model.ModelConfig) -> None:
        super().__init__()
        self.row_width = config.d_ff
        self.up = nn.Linear(config.n_embd, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.n_embd, bias=False)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [B, T, n_embd], rows U_l[t] [B, T, d_ff] -> [B, T, n_embd]."""
        up = self.up(x)
        return self.down(F.silu(rows).to(up.dtype) * up)


class Decoder(model.Decoder):
    row_ffn = GateFFN
