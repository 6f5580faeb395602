"""Which way do the rows of a table point, beside what they replace?

Layer by layer, the cosines of all pairs of tokens in the training text: of the rows of STEM's
tables, and of Embformer's (keys, values, FFN scales); of a dense model's `W_u x`, for each token
its mean over the text; of the input embeddings; and as "untrained" of models as they begin, mean of
the layers.
"""

from collections.abc import Callable
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

BINS = np.linspace(-1, 1, 81)
MEASURES = {"mean size of cosines": ".3f", "share above 0.5": ".1%"}  # and their formats


def geometry(experiment: Experiment) -> None:
    ids = open_tokens(experiment.data_dir, "train", read_meta(experiment.data_dir))
    text = torch.from_numpy(ids.astype(np.int64))
    if experiment.quick:
        text = text[:4096]
    runs_by_column: dict[str, list[dict]] = {}
    for folders in experiment.train(pick("STEM, all", "dense", "Embformer")).values():
        runs = experiment.measure("geometry", measure_run, folders, text, experiment.on)
        for column in runs[0]:
            runs_by_column[column] = [run[column] for run in runs]
    lines = list(runs_by_column["dense W_u x"][0])  # embedding, all layers, untrained
    for name, form in MEASURES.items():
        rows = []
        for line in lines:
            row = {f"{name}: layer": line}
            for column, runs in runs_by_column.items():
                row[column] = spread(form, [run[line][name] for run in runs if line in run])
            rows.append(row)
        print(markdown(rows) + "\n")
    draw(experiment, runs_by_column, layers=lines[2:-1])


def measure_run(folder: Path, text: Tensor, device: torch.device) -> dict[str, dict[str, dict]]:
    """The measures of a run by column and layer; "untrained": of the model as it began."""
    model, _, checkpoint = load_model(folder / "ckpt.pt", device)
    torch.manual_seed(checkpoint["args"]["seed"])
    untrained = vectors(Decoder(model.config).to(device).eval(), text)
    measures = {}
    for column, layers in vectors(model, text).items():
        measures[column] = {layer: measure(rows) for layer, rows in layers.items()}
        layers = untrained[column]
        layers.pop("embedding", None)
        first = [measure(rows) for rows in layers.values()]
        means = {}
        for name in first[0]:
            mean = np.mean([layer[name] for layer in first], axis=0)
            means[name] = mean.tolist()
        measures[column]["untrained"] = means
    return measures


@torch.no_grad()
def vectors(model: Decoder, text: Tensor) -> dict[str, dict[str, Tensor]]:
    """What is compared of a model, for the tokens of a text [T]: [n, ..] by column and layer."""
    config = model.config
    tokens = text.unique()
    layers = [str(number) for number, block in enumerate(model.blocks) if block.row_width]
    rows = [of_table[0] for of_table in model.tables.lookup(tokens[None])]  # [n, W] of each table
    embedding = {"embedding": model.embed(tokens[None])[0]}  # beside the first column
    if config.ffn == "dense":
        return {"dense W_u x": embedding | up_outputs(model, text)}
    if config.ffn == "stem":
        return {"STEM rows": embedding | dict(zip(layers, rows, strict=True))}
    kv_width = config.n_kv_head * config.head_dim
    columns = {"Embformer K": embedding, "Embformer V": {}, "Embformer F": {}}
    for layer, row in zip(layers, rows, strict=True):
        parts = row.split((kv_width, kv_width, config.n_embd), -1)
        for column, part in zip(columns.values(), parts, strict=True):
            column[layer] = part
    return columns


@torch.inference_mode()
def up_outputs(model: Decoder, text: Tensor) -> dict[str, Tensor]:
    """W_u x in each layer of a dense model that reads a text [T] in parts of block_size: for each
    of its tokens the mean [n, d_ff]."""
    config = model.config
    outputs: dict[int, Tensor] = {}  # [B, T, d_ff] of the last batch, by layer

    def keep(layer: int) -> Callable:
        def hook(module, inputs, output) -> None:
            outputs[layer] = output

        return hook

    for layer, block in enumerate(model.blocks):
        block.ffn.up.register_forward_hook(keep(layer))
    size = config.block_size
    whole = len(text) // size * size
    windows = text[:whole].view(-1, size)  # [N, T]
    sums = torch.zeros(config.n_layer, config.vocab_size, config.d_ff, device=model.device)
    for ids in windows.split(16):
        model.hidden(ids)
        tokens = ids.flatten().to(model.device)  # [B * T]
        for layer, output in outputs.items():
            sums[layer].index_add_(0, tokens, output.flatten(0, 1))
    counts = windows.flatten().bincount(minlength=config.vocab_size)
    tokens = counts.nonzero()[:, 0]
    means = sums[:, tokens] / counts[tokens, None].to(sums.device)  # [n_layer, n, d_ff]
    return {str(layer): mean for layer, mean in enumerate(means)}


def measure(vectors: Tensor) -> dict[str, float | list[float]]:
    cosine = cosines(vectors)
    size = cosine.abs()
    large = (size > 0.5).float()
    histogram, _ = np.histogram(cosine.cpu().numpy(), BINS, density=True)
    return {
        "mean size of cosines": float(size.mean()),
        "share above 0.5": float(large.mean()),
        "histogram": histogram.tolist(),
    }


def cosines(vectors: Tensor) -> Tensor:
    """Of all pairs of n vectors [n, W]: [n (n - 1) / 2]."""
    unit = F.normalize(vectors.float(), dim=-1)
    products = unit @ unit.T  # [n, n]
    above_diagonal = torch.ones_like(products).triu(1).bool()
    return products[above_diagonal]


def draw(experiment: Experiment, runs_by_column: dict[str, list], layers: list[str]) -> None:
    """Histograms of the cosines, a panel for each layer with STEM rows."""
    figure, panels = plt.subplots(1, len(layers), figsize=(13, 3), sharex=True, sharey=True)
    left, right = BINS[:-1], BINS[1:]
    centre = (left + right) / 2

    def curve(axes: plt.Axes, column: str, line: str, label: str, **look) -> None:
        histograms = [run[line]["histogram"] for run in runs_by_column[column]]
        mean_and_band(axes, centre, np.array(histograms), label=label, **look)

    for axes, layer in zip(panels, layers, strict=True):
        curve(axes, "STEM rows", layer, "STEM rows")
        curve(axes, "dense W_u x", layer, "dense W_u x")
        look = {"color": "grey", "linestyle": ":"}
        curve(axes, "STEM rows", "untrained", "untrained rows", **look)
        axes.set(title=f"layer {layer}", xlabel="cosine of two tokens", yscale="log")
    panels[0].set_ylabel("density")
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=3)
    experiment.picture("geometry", figure)
