"""stem_ngrams: STEM whose rows are of n-grams (LongCat-Flash-Lite, arXiv 2601.21204, calls it
per-layer n-gram embedding, and finds it slightly better than rows of tokens).

    y = W_d (SiLU(W_g x) * e_l),   e_l: the rows of the n-grams that end here, side by side
"""

import model
from relatives import ngrams
from stem import StemFFN


class Decoder(ngrams.NgramDecoder):
    def make_block(self, layer: int) -> model.Block:
        config = self.config
        if layer not in config.row_layers:
            return super().make_block(layer)
        ffn = StemFFN(config.n_embd, config.d_ff)
        return model.Block(config, layer, model.LinearQKV(config), ffn)
