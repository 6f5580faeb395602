"""deepembed: the dense FFN, its hidden units scaled by the token's row (after DeepEmbed: B. Peng,
RWKV-8, 2025). A token costs the FLOPs of the dense FFN.

    y = W_d (SiLU(W_g x) * (W_u x) * (1 + E_l[t]))
"""

from dataclasses import dataclass

from torch import Tensor

import model


@dataclass
class Config(model.ModelConfig):
    stem_layers: str = "all"  # hides the flag: every layer has a table, also the first


class DeepEmbedFFN(model.SwiGLU):
    """Differs: the row of RWKV-8 (repository RWKV-LM, rwkv_v8_rc00_demo.py) scales what the FFN
    gives, [n_embd], ours its hidden units; SwiGLU for a squared ReLU and a token shift; rows are
    stored minus one, so that they begin small as all tables do. RWKV-7a (rwkv_v7a_demo.py) scales
    hidden units by s0 + S2 M_l[t] S1 x, with a matrix [32, 32] as a row, a part of which is
    computed from the input embedding."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.n_embd, config.d_ff)
        self.row_width = config.d_ff

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [B, T, n_embd], rows E_l[t] [B, T, d_ff] -> [B, T, n_embd]."""
        hidden = self.hidden(x)
        return self.down(hidden * (1 + rows).to(hidden.dtype))


class Decoder(model.Decoder):
    config_class = Config

    def make_block(self, layer: int) -> model.Block:
        ffn = DeepEmbedFFN(self.config)
        return model.Block(self.config, layer, model.LinearQKV(self.config), ffn)
