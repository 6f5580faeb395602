"""Which way do the rows of a table point, beside what they replace?

Layer by layer, the cosines of all pairs of tokens in the training text: of the rows of STEM's
tables, trained and as drawn, and of a dense model's `W_u x`; and of what the down-projection then
reads, `SiLU(W_g x) * U[t]` and `SiLU(W_g x) * (W_u x)`. What depends on x is a token's mean over
the text.
"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.experiment import KINDS, Experiment
from lab.pictures import interval, markdown
from model import Decoder
from text.dataset import open_tokens, read_meta
from training.dense_to_stem import Fit, Stream

COMPARED = {
    "STEM": KINDS["STEM, all"],
    "dense": KINDS["dense"],
    "STEM, untrained": {**KINDS["STEM, all"], "max_iters": 0},
}


def geometry(experiment: Experiment) -> None:
    ids = open_tokens(experiment.data_dir, "train", read_meta(experiment.data_dir))
    text = torch.from_numpy(ids.astype(np.int64))
    if experiment.quick:
        text = text[:4096]
    table = []
    for title, folders in experiment.train(COMPARED).items():
        runs = experiment.measure("geometry", measure_model, folders, text)
        for name in runs[0]:
            means, percentiles = zip(*(run[name] for run in runs), strict=True)
            row = {"kind": title, "cosines of": name, "mean size": interval(".3f", means)}
            table.append({**row, "95 % are below": interval(".3f", percentiles)})
    print(markdown(table))


@torch.inference_mode()
def measure_model(model: Decoder, _, __, text: Tensor) -> dict[str, tuple]:
    """Of the sizes of the cosines of a model's vectors for the tokens of a text [T], by what they
    are and the layer: the mean, and the 95th percentile, of which the STEM paper speaks."""
    sizes = {}
    for name, vectors in vectors_of(model, text):
        size = cosines(vectors).abs()
        percentile = size.kthvalue(max(1, int(0.95 * len(size)))).values
        sizes[name] = (size.mean().item(), percentile.item())
    return sizes


def vectors_of(model: Decoder, text: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Of each layer of a model that reads a text [T] in parts of block_size, vectors [n, d_ff] of
    its n distinct tokens: rows or, without a table, W_u x; and what the down-projection reads."""
    config = model.config
    size = config.block_size
    windows = text[: len(text) // size * size].view(-1, size)
    tokens = windows.unique()
    stream = Stream(model, windows, 16)
    tables = iter(model.tables.weight)
    for layer, block in enumerate(model.blocks):
        table = next(tables) if block.row_width else None
        # Of a factor 1, a fit is the mean.
        shape = (config.vocab_size, config.d_ff, model.device)
        up = Fit(*shape)
        read = Fit(*shape)
        for ids, z, kept in stream.attend(layer):
            rows = None if table is None else F.embedding(ids, table)
            u = block.ffn.up(z) if rows is None else rows  # [B, T, d_ff]
            one = torch.ones_like(u)
            up.add(ids, one, u)
            read.add(ids, one, F.silu(block.ffn.gate(z)) * u)
            kept += block.ffn(z, rows).to("cpu")
        kind = "W_u x" if table is None else "rows"
        yield f"{kind}, layer {layer}", up.rows()[tokens]
        yield f"what W_d reads, layer {layer}", read.rows()[tokens]


def cosines(vectors: Tensor) -> Tensor:
    """Of all pairs of n vectors [n, W]: [n (n - 1) / 2]."""
    unit = F.normalize(vectors.float(), dim=-1)
    products = unit @ unit.T  # [n, n]
    above_diagonal = torch.ones_like(products).triu(1).bool()
    return products[above_diagonal]
