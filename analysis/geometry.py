"""Which way do the rows of a table point, beside what they replace?

Layer by layer, the cosines of all pairs of tokens in the training text: of the rows of STEM's
tables, and of Embformer's (keys, values, FFN scales); of a dense model's `W_u x`, for each token
its mean over the text; of the input embeddings; and as "untrained" of models as they begin, mean of
the layers.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.experiment import Experiment, pick, spread
from model import Decoder
from training.batches import open_tokens, read_meta
from training.checkpoints import load_model
from training.records import markdown, mean_and_band, plt

BINS = np.linspace(-1, 1, 81)
TOKENS = (" Spain", " euro")  # whose neighbours are shown


def cosines(vectors: Tensor) -> Tensor:
    """Of all pairs of n vectors [n, W]: [n (n - 1) / 2]."""
    unit = F.normalize(vectors.float(), dim=-1)
    return (unit @ unit.T)[unit.new_ones(len(unit), len(unit)).triu(1).bool()]


def measure(vectors: Tensor) -> dict[str, float | list[float]]:
    cosine = cosines(vectors)
    return {
        "mean size of cosines": float(cosine.abs().mean()),
        "share above 0.5": float((cosine.abs() > 0.5).float().mean()),
        "histogram": np.histogram(cosine.cpu().numpy(), BINS, density=True)[0].tolist(),
    }


@torch.inference_mode()
def up_outputs(model: Decoder, windows: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """W_u x in each layer of a dense model that reads windows [N, T]: the mean for each token."""
    n, outputs = model.config.vocab_size, {}  # of the last batch, by layer
    for layer, block in enumerate(model.blocks):
        block.ffn.up.register_forward_hook(lambda _, x, y, at=layer: outputs.update({at: y}))
    sums = torch.zeros(len(model.blocks), n, block.ffn.up.out_features, device=model.device)
    for ids in windows.split(16):
        model.hidden(ids)
        for layer, y in outputs.items():
            sums[layer].index_add_(0, ids.flatten().to(y.device), y.flatten(0, 1))  # [16 T, d_ff]
    counts = windows.flatten().bincount(minlength=n)
    tokens = tokens[counts[tokens] > 0]  # not all, if the text is not read to its end
    means = sums[:, tokens] / counts[tokens, None].to(sums.device)
    return {str(layer): mean for layer, mean in enumerate(means)}


@torch.no_grad()
def vectors(model: Decoder, windows: Tensor, tokens: Tensor) -> dict[str, dict[str, Tensor]]:
    """All that is compared of a model: of the tokens [n, ..], by column and layer."""
    config = model.config
    rows = [each[0] for each in model.tables.lookup(tokens[None])]  # [n, W] of each table
    layers = [str(n) for n, block in enumerate(model.blocks) if block.row_width]
    if config.ffn == "dense":
        columns = {"dense W_u x": up_outputs(model, windows, tokens)}
    elif config.ffn == "stem":
        columns = {"STEM rows": dict(zip(layers, rows, strict=True))}
    else:
        kv = config.n_kv_head * config.head_dim
        parts = zip(*(row.split((kv, kv, config.n_embd), -1) for row in rows), strict=True)
        parts = [dict(zip(layers, part, strict=True)) for part in parts]
        columns = {f"Embformer {name}": part for name, part in zip("KVF", parts, strict=True)}
    first = next(iter(columns))  # the embedding is shown beside it
    columns[first] = {"embedding": model.embed(tokens[None])[0], **columns[first]}
    return columns


def measure_run(folder: Path, experiment: Experiment, ids: Tensor, tokens: Tensor) -> dict:
    """The measures of a run by column and layer; "untrained": of the model as it began."""
    model, _, checkpoint = load_model(folder / "ckpt.pt", experiment.on)
    windows = ids.unfold(0, model.config.block_size, model.config.block_size)  # [N, T]
    windows = windows[:64] if experiment.quick else windows
    torch.manual_seed(checkpoint["args"]["seed"])
    fresh = vectors(Decoder(model.config).to(experiment.on).eval(), windows, tokens)
    found = {}
    for column, layers in vectors(model, windows, tokens).items():
        found[column] = {layer: measure(each) for layer, each in layers.items()}
        each = [measure(rows) for layer, rows in fresh[column].items() if layer != "embedding"]
        found[column]["untrained"] = {k: np.mean([m[k] for m in each], 0).tolist() for k in each[0]}
    return found


def geometry(experiment: Experiment) -> None:
    ids = open_tokens(experiment.data_dir, "train", read_meta(experiment.data_dir)).astype(np.int64)
    more = (experiment, torch.from_numpy(ids), torch.from_numpy(np.unique(ids)))
    groups = experiment.train(pick("STEM, all", "dense", "Embformer"))
    found: dict[str, list[dict]] = {}  # by column, of each run
    for folders in groups.values():
        runs = experiment.measure("geometry", lambda folder: measure_run(folder, *more), folders)
        found |= {column: [run[column] for run in runs] for column in runs[0]}
    lines = list(found["dense W_u x"][0])  # embedding, all layers, untrained
    for what, form in (("mean size of cosines", ".3f"), ("share above 0.5", ".1%")):
        table = []
        for line in lines:
            row = {f"{what}: layer": line}
            for column, runs in found.items():
                row[column] = spread(form, (run.get(line, {}).get(what) for run in runs))
            table.append(row)
        print(markdown(table) + "\n")
    print(neighbours(groups["STEM, all"][0], experiment, more[-1]))
    draw(experiment, found, lines[2:-1])


def neighbours(folder: Path, experiment: Experiment, tokens: Tensor) -> str:
    """The tokens of these whose rows in a STEM model have the largest cosine with some token's."""
    model, encoding, _ = load_model(folder / "ckpt.pt", experiment.on)
    every, table = torch.arange(encoding.n_vocab), []
    for layer, rows in vectors(model, every[None], every)["STEM rows"].items():
        unit, row = F.normalize(rows, dim=-1), {"nearest rows": layer}
        for text in TOKENS:
            token = encoding.encode_ordinary(text)[0]  # with another tokenizer a part of it
            best = (unit[tokens] @ unit[token]).topk(4)
            near = zip(tokens[best.indices.cpu()].tolist(), best.values.tolist(), strict=True)
            near = [f"{encoding.decode([other])!r} {cosine:.2f}" for other, cosine in near]
            row[repr(encoding.decode([token]))] = ", ".join(near[1:])  # the first is itself
        table.append(row)
    return markdown(table)


def draw(experiment: Experiment, found: dict[str, list[dict]], layers: list[str]) -> None:
    """Histograms of the cosines, a panel for each layer with STEM rows."""
    centre, size = (BINS[1:] + BINS[:-1]) / 2, dict(figsize=(13, 3), squeeze=False)
    figure, panels = plt.subplots(1, len(layers), **size, sharex=True, sharey=True)
    for axes, layer in zip(panels[0], layers, strict=True):
        for column in ("STEM rows", "dense W_u x"):
            runs = np.array([run[layer]["histogram"] for run in found[column]])
            mean_and_band(axes, centre, runs, label=column)
        runs = np.array([run["untrained"]["histogram"] for run in found["STEM rows"]])
        mean_and_band(axes, centre, runs, label="untrained rows", color="grey", linestyle=":")
        axes.set(title=f"layer {layer}", xlabel="cosine of two tokens", yscale="log")
    panels[0, 0].set_ylabel("density")
    handles = panels[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=3)
    experiment.picture("geometry", figure)
