"""Which way do the rows of a table point, beside what they replace?

Layer by layer, the cosines of all pairs of tokens in the training text: of the rows of STEM's
tables, and of a dense model's `W_u x`, for each token its mean over the text; and as "untrained" of
models as they begin, mean of the layers.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.experiment import Experiment, pick
from analysis.pictures import markdown, mean_and_band, plt, spread
from model import Decoder
from text.dataset import open_tokens, read_meta
from training.checkpoints import load_model

KINDS = {"STEM rows": "STEM, all", "dense W_u x": "dense"}
MEASURES = ("mean size of cosines", "share above 0.5")


def geometry(experiment: Experiment) -> None:
    ids = open_tokens(experiment.data_dir, "train", read_meta(experiment.data_dir))
    text = torch.from_numpy(ids.astype(np.int64))
    if experiment.quick:
        text = text[:4096]
    figure, axes = plt.subplots()
    groups = experiment.train(pick(*KINDS.values()))
    rows = []
    for title, kind in KINDS.items():
        runs = experiment.measure("geometry", measure_run, groups[kind], text, experiment.on)
        for layer in runs[0]:
            row = {"cosines of": title, "layer": layer}
            for number, name in enumerate(MEASURES):
                row[name] = spread(".3f", [run[layer][number] for run in runs])
            rows.append(row)
        layers = list(runs[0])[:-1]  # without "untrained"
        sizes = [[run[layer][0] for layer in layers] for run in runs]
        mean_and_band(axes, np.array(layers, int), np.array(sizes), marker=".", label=title)
    print(markdown(rows))
    axes.set(xlabel="layer", ylabel=MEASURES[0], ylim=0)
    axes.legend()
    experiment.picture("geometry", figure)


def measure_run(folder: Path, text: Tensor, device: torch.device) -> dict[str, list[float]]:
    """The measures of a run by layer; "untrained": of the model as it began."""
    model, _, checkpoint = load_model(folder / "ckpt.pt", device)
    torch.manual_seed(checkpoint["args"]["seed"])
    untrained = vectors(Decoder(model.config).to(device).eval(), text)
    begun = [measure(of_layer) for of_layer in untrained.values()]
    found = {str(layer): measure(of_layer) for layer, of_layer in vectors(model, text).items()}
    found["untrained"] = np.mean(begun, axis=0).tolist()
    return found


@torch.inference_mode()
def vectors(model: Decoder, text: Tensor) -> dict[int, Tensor]:
    """What is compared of a model, for the tokens of a text [T]: [n, ..] by layer."""
    if model.config.ffn == "dense":
        return dict(enumerate(up_outputs(model, text)))
    rows = model.tables.lookup(text.unique()[None])  # of each table [1, n, W]
    found = {}
    for layer, block in enumerate(model.blocks):
        if block.row_width:
            found[layer] = next(rows)[0]
    return found


def up_outputs(model: Decoder, text: Tensor) -> Tensor:
    """W_u x in each layer of a dense model that reads a text [T] in parts of block_size: for each
    of its tokens the mean, [n_layer, n, d_ff]."""
    config = model.config
    outputs: list[Tensor] = []  # of the last batch, [B, T, d_ff] of each layer

    def keep(module, inputs, output: Tensor) -> None:
        outputs.append(output)

    for block in model.blocks:
        block.ffn.up.register_forward_hook(keep)
    whole = len(text) // config.block_size * config.block_size
    text = text[:whole]
    sums = torch.zeros(config.n_layer, config.vocab_size, config.d_ff, device=model.device)
    for ids in text.view(-1, config.block_size).split(16):  # [B, T]
        outputs.clear()
        model.hidden(ids)
        of_layers = torch.stack(outputs).flatten(1, 2)  # [n_layer, B * T, d_ff]
        sums.index_add_(1, ids.flatten().to(model.device), of_layers)
    tokens, counts = text.unique(return_counts=True)
    return sums[:, tokens] / counts[:, None].to(model.device)


def measure(vectors: Tensor) -> list[float]:
    """MEASURES of vectors [n, W]."""
    size = cosines(vectors).abs()
    return [size.mean().item(), (size > 0.5).float().mean().item()]


def cosines(vectors: Tensor) -> Tensor:
    """Of all pairs of n vectors [n, W]: [n (n - 1) / 2]."""
    unit = F.normalize(vectors.float(), dim=-1)
    products = unit @ unit.T  # [n, n]
    above_diagonal = torch.ones_like(products).triu(1).bool()
    return products[above_diagonal]
