"""Which way do the rows of a table point, beside what they replace?

The claim (STEM, arXiv 2601.10639): the learned rows have a large angular spread, pairs of tokens
have a low cosine, so that more of them can be told apart than among the outputs of a dense
up-projection.

Measured layer by layer, for the tokens that occur in the training text: the cosines of all pairs,
the share of them above 0.5 in size, and the effective rank of the unit vectors, exp of the entropy
of their singular values over the sum of these (Roy and Vetterli, 2007). Compared are

- the rows of STEM's tables, and of Embformer's, whose row is made of keys, values and FFN scales;
- a dense model's `W_u x`: for each token its mean over the text, and one that it had somewhere,
  as `x` depends on the context;
- the input embeddings, and as "untrained" the same of models as they begin, mean of the layers.

Two things to read with care. Random rows are nearly orthogonal to begin with: what training does
can only be to turn them towards each other. And `W_u x` has at most as many dimensions as x,
n_embd, a row has its whole width: the last line says how many dimensions there could be.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from analysis.experiment import STEM, Experiment, spread
from model import Decoder
from training.batches import open_tokens, read_meta
from training.checkpoints import load_model
from training.records import markdown, plt, read_run

KINDS = {name: STEM[name] for name in ("STEM, all", "dense", "Embformer")}
BINS = np.linspace(-1, 1, 81)
MEASURES = {"mean size of cosines": ".3f", "share above 0.5": ".1%", "effective rank": ".0f"}
TOKENS = (" Spain", " Madrid", " euro", " capital")  # whose neighbours are shown
Vectors = dict[str, dict[str, Tensor]]  # of the tokens [n, ..], by column and layer


def cosines(vectors: Tensor) -> Tensor:
    """Of all pairs of n vectors [n, W]: [n (n - 1) / 2]."""
    unit = F.normalize(vectors.float(), dim=-1)
    upper = torch.ones(len(unit), len(unit), dtype=torch.bool, device=unit.device).triu(1)
    return (unit @ unit.T)[upper]


def effective_rank(vectors: Tensor) -> float:
    """exp(H(p)) with p the singular values [min(n, W)] of unit vectors over their sum."""
    singular = torch.linalg.svdvals(F.normalize(vectors.cpu().double(), dim=-1))
    p = singular / singular.sum()
    return float(torch.special.entr(p).sum().exp())


def measure(vectors: Tensor) -> dict:
    cosine = cosines(vectors)
    return {
        "mean size of cosines": float(cosine.abs().mean()),
        "share above 0.5": float((cosine.abs() > 0.5).float().mean()),
        "effective rank": effective_rank(vectors),
        "histogram": np.histogram(cosine.cpu().numpy(), BINS, density=True)[0].tolist(),
    }


@torch.inference_mode()
def up_outputs(model: Decoder, windows: Tensor, tokens: Tensor) -> Vectors:
    """W_u x in each layer of a dense model that reads windows [N, T]: the mean for each token, and
    what it was where the token came first."""
    ups, n = [block.ffn.up for block in model.blocks], model.config.vocab_size
    sums = [torch.zeros(n, up.out_features, device=model.device) for up in ups]
    firsts = [torch.zeros_like(each) for each in sums]
    counts = torch.zeros(n, dtype=torch.int64)
    made: list[Tensor] = []
    hooks = [up.register_forward_hook(lambda module, x, y: made.append(y)) for up in ups]
    for ids in tqdm(windows.split(16), "reading", leave=False, delay=3):
        made.clear()
        model.hidden(ids)
        flat = ids.flatten()  # [16 T]
        distinct, place = map(torch.from_numpy, np.unique(flat.numpy(), return_index=True))
        new = counts[distinct] == 0
        counts += flat.bincount(minlength=n)
        for total, first, y in zip(sums, firsts, made, strict=True):
            y = y.flatten(0, 1)  # [16 T, d_ff]
            total.index_add_(0, flat.to(y.device), y)
            first[distinct[new]] = y[place[new]]
    for hook in hooks:
        hook.remove()
    tokens = tokens[counts[tokens] > 0]  # not all, if the text is not read to its end
    means = [total[tokens] / counts[tokens, None].to(total.device) for total in sums]
    ones = [first[tokens] for first in firsts]
    columns = {"dense W_u x, mean": means, "dense W_u x, one": ones}
    return {name: {str(n): y for n, y in enumerate(each)} for name, each in columns.items()}


def vectors(model: Decoder, windows: Tensor, tokens: Tensor) -> Vectors:
    """All that is compared of a model."""
    config = model.config
    with torch.no_grad():
        embedding = {"embedding": model.embed(tokens[None])[0]}
        rows = [each[0] for each in model.tables.lookup(tokens[None])]  # [n, W] of each table
    layers = [str(n) for n, block in enumerate(model.blocks) if block.row_width]
    if config.ffn == "dense":
        columns = up_outputs(model, windows, tokens)
    elif config.ffn == "stem":
        columns = {"STEM rows": dict(zip(layers, rows, strict=True))}
    else:  # K | V | F
        kv = config.n_kv_head * config.head_dim
        parts = zip(*(row.split((kv, kv, config.n_embd), -1) for row in rows), strict=True)
        names = ("Embformer K", "Embformer V", "Embformer F")
        columns = {k: dict(zip(layers, p, strict=True)) for k, p in zip(names, parts, strict=True)}
    first = next(iter(columns))  # the embedding is shown beside it
    return {name: {**(embedding if name == first else {}), **columns[name]} for name in columns}


def measure_run(folder: Path, experiment: Experiment, windows: Tensor, tokens: Tensor) -> dict:
    """The measures of a run by column and layer; "untrained": of the model as it began."""
    model, _, checkpoint = load_model(folder / "ckpt.pt", experiment.on)
    found = {
        column: {layer: measure(each) for layer, each in layers.items()}
        for column, layers in vectors(model, windows, tokens).items()
    }
    torch.manual_seed(checkpoint["args"]["seed"])
    fresh = Decoder(model.config).to(experiment.on).eval()
    for column, layers in vectors(fresh, windows, tokens).items():
        each = [measure(rows) for layer, rows in layers.items() if layer != "embedding"]
        found[column]["untrained"] = {k: np.mean([m[k] for m in each], 0).tolist() for k in each[0]}
        width = min(next(reversed(layers.values())).shape)
        width = min(width, model.config.n_embd) if model.config.ffn == "dense" else width
        found[column]["at most"] = {"effective rank": float(width)}
    return found


def geometry(experiment: Experiment) -> None:
    ids = open_tokens(experiment.data_dir, "train", read_meta(experiment.data_dir)).astype(np.int64)
    tokens = torch.from_numpy(np.unique(ids))
    kept, runs = experiment.keep("geometry"), experiment.grid(KINDS, seed=experiment.numbers)
    found: dict[str, list[dict]] = {}  # by column, of each run
    folders = experiment.trained(runs)
    block_size = read_run(folders[0])["run"][-1]["args"]["block_size"]
    whole = torch.from_numpy(ids[: len(ids) // block_size * block_size]).view(-1, block_size)
    windows = whole[:64] if experiment.quick else whole
    for folder in tqdm(folders, "measuring", unit="run", delay=3):
        find = lambda folder=folder: measure_run(folder, experiment, windows, tokens)  # noqa: E731
        for column, layers in kept(folder.name, find).items():
            found.setdefault(column, []).append(layers)
    layers = sorted({layer for (run, *_) in found.values() for layer in run if layer.isdigit()})
    lines = ["embedding", *sorted(layers, key=int), "untrained", "at most"]
    for what, form in MEASURES.items():
        table = []
        for line in lines:
            row = {f"{what}: layer": line}
            for column, runs in found.items():
                row[column] = spread(form, (run.get(line, {}).get(what) for run in runs))
            table.append(row)
        print(markdown([row for row in table if any(list(row.values())[1:])]) + "\n")
    print(verdict(found) + "\n")
    print(neighbours(folders[0], experiment, tokens))
    experiment.picture("geometry", draw(found))


def verdict(found: dict[str, list[dict]]) -> str:
    """In how many layers, means of the runs, the rows' cosines are the smaller ones."""

    def size(column: str, line: str) -> float:
        return float(np.mean([run[line]["mean size of cosines"] for run in found[column]]))

    rows, said = "STEM rows", []
    layers = [line for line in found[rows][0] if line.isdigit()]
    for other in ("dense W_u x, mean", "dense W_u x, one"):
        less = sum(size(rows, layer) < size(other, layer) for layer in layers)
        said.append(f"in {less} of {len(layers)} layers than of {other.replace('dense ', '')}")
    more = sum(size(rows, layer) > size(rows, "untrained") for layer in layers)
    said = f"Cosines of STEM's rows are smaller {', '.join(said)}"
    return f"{said}; larger than before training in {more} of {len(layers)}."


@torch.no_grad()
def neighbours(folder: Path, experiment: Experiment, tokens: Tensor) -> str:
    """The tokens whose rows in a STEM model have the largest cosine with some token's."""
    model, encoding, _ = load_model(folder / "ckpt.pt", experiment.on)
    asked = [encoding.encode_ordinary(text) for text in TOKENS]
    table = []
    for layer, rows in vectors(model, tokens[None], tokens)["STEM rows"].items():
        unit, row = F.normalize(rows, dim=-1), {"nearest rows": layer}
        for (token, *more), text in zip(asked, TOKENS, strict=True):
            if more or not (tokens == token).any():
                continue  # this tokenizer has other pieces
            cosine = unit @ unit[tokens.tolist().index(token)]
            best = cosine.topk(4)
            near = zip(
                best.values[1:].tolist(), tokens[best.indices[1:].cpu()].tolist(), strict=True
            )
            row[repr(text)] = ", ".join(f"{encoding.decode([t])!r} {c:.2f}" for c, t in near)
        table.append(row)
    return markdown(table)


def draw(found: dict[str, list[dict]]) -> plt.Figure:
    layers = [line for line in found["STEM rows"][0] if line.isdigit()]
    columns = -(-len(layers) // 2)
    figure, axes = plt.subplots(
        2, columns, figsize=(3.4 * columns, 5), layout="constrained", sharex=True, squeeze=False
    )
    centre, shown = (BINS[1:] + BINS[:-1]) / 2, ["STEM rows", *(c for c in found if "dense" in c)]
    for place, layer in zip(axes.flat, layers, strict=False):
        for color, column in enumerate(shown):
            heights = [run[layer]["histogram"] for run in found[column] if layer in run]
            place.plot(centre, np.mean(heights, 0), color=f"C{color}", label=column)
        start = np.mean([run["untrained"]["histogram"] for run in found["STEM rows"]], 0)
        place.plot(centre, start, color="grey", linestyle=":", label="untrained rows")
        place.set_title(f"layer {layer}", fontsize="medium")
        place.set_yscale("log")
        place.grid(alpha=0.3)
    for place in list(axes.flat)[len(layers) :]:
        place.axis("off")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.supxlabel("cosine of two tokens")
    figure.supylabel("density")
    return figure
