"""stem_ngrams: STEM whose rows are of n-grams (LongCat-Flash-Lite, arXiv 2601.21204, calls it
per-layer n-gram embedding, and finds it slightly better than rows of tokens).

    y = W_d (SiLU(W_g x) * e_l),   e_l: the rows of the n-grams that end here, side by side

Differs: LongCat projects n-gram rows, and takes the mean of these and of the token's own row (as
its code does at the input); another hash (ngrams.py).
"""

from relatives import ngrams


class Decoder(ngrams.NgramDecoder):
    """STEM's layers with other addresses, and nothing else."""
