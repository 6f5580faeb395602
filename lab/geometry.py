"""Which way do the rows of a table point, beside what they replace?

Layer by layer, the cosines of all pairs of tokens in the training text: of the rows of STEM's
tables, trained and as drawn, and of a dense model's `W_u x`, for each token its mean over the text.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.experiment import KINDS, Experiment
from lab.pictures import interval, markdown
from model import Decoder
from text.dataset import open_tokens, read_meta
from training.checkpoints import load_model
from training.dense_to_stem import Fit, Stream

COMPARED = {
    "STEM rows": KINDS["STEM, all"],
    "dense W_u x": KINDS["dense"],
    "STEM rows, untrained": {**KINDS["STEM, all"], "max_iters": 0},
}


def geometry(experiment: Experiment) -> None:
    ids = open_tokens(experiment.data_dir, "train", read_meta(experiment.data_dir))
    text = torch.from_numpy(ids.astype(np.int64))
    if experiment.quick:
        text = text[:4096]
    table = []
    for title, folders in experiment.train(COMPARED).items():
        runs = experiment.measure("geometry", measure_run, folders, text, experiment.on)
        for layer in runs[0]:
            means, percentiles = zip(*(run[layer] for run in runs), strict=True)
            row = {"cosines of": title, "layer": layer, "mean size": interval(".3f", means)}
            table.append({**row, "95 % are below": interval(".3f", percentiles)})
    print(markdown(table))


@torch.inference_mode()
def measure_run(folder: Path, text: Tensor, device: torch.device) -> dict[str, tuple]:
    """Of the sizes of the cosines of a run's vectors for the tokens of a text [T], by layer: the
    mean, and the 95th percentile, of which the STEM paper speaks."""
    model, _, _ = load_model(folder / "ckpt.pt", device)
    if model.config.ffn == "dense":
        vectors = enumerate(up_outputs(model, text))
    else:
        vectors = zip(model.config.row_layers, rows(model, text), strict=True)
    sizes = {}
    for layer, of_layer in vectors:
        size = cosines(of_layer).abs()
        percentile = size.kthvalue(max(1, int(0.95 * len(size)))).values
        sizes[str(layer)] = (size.mean().item(), percentile.item())
    return sizes


def rows(model: Decoder, text: Tensor) -> Iterator[Tensor]:
    """The rows [n, W] of the tokens of a text [T], of each table."""
    for of_table in model.tables.lookup(text.unique()[None]):  # [1, n, W]
        yield of_table[0]


def up_outputs(model: Decoder, text: Tensor) -> Iterator[Tensor]:
    """W_u x in each layer of a dense model that reads a text [T] in parts of block_size: for each
    of its tokens the mean, [n, d_ff]."""
    config = model.config
    size = config.block_size
    text = text[: len(text) // size * size]
    stream = Stream(model, text.view(-1, size), 16)
    for layer, block in enumerate(model.blocks):
        fit = Fit(config.vocab_size, config.d_ff, model.device)  # of a factor 1, the mean
        for ids, z, kept in stream.attend(layer):
            u = block.ffn.up(z)  # [B, T, d_ff]
            fit.add(ids, torch.ones_like(u), u)
            kept += block.ffn(z, None).to("cpu")
        yield fit.rows()[text.unique()]


def cosines(vectors: Tensor) -> Tensor:
    """Of all pairs of n vectors [n, W]: [n (n - 1) / 2]."""
    unit = F.normalize(vectors.float(), dim=-1)
    products = unit @ unit.T  # [n, n]
    above_diagonal = torch.ones_like(products).triu(1).bool()
    return products[above_diagonal]
