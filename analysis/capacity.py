"""How many facts fit into a model?

Facts `name, relation -> value` are made up, ever more of them, and learned with equally many passes
and equally many steps. A name is two syllables of 200 each, none of which belongs to an entity, or
one token, whose row can hold all that is known about the entity. The head looks at values alone, as
other tokens are never answers, and no weight decays, as that would be a loss of memory.
"""

from math import inf, log2
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.experiment import KINDS, MAIN, Experiment, Flags, search_learning_rates
from analysis.pictures import markdown, mean_and_band, plt, spread
from config import ModelConfig
from model import Decoder
from training.optimizer import Optimizer, schedule
from training.settings import Settings

SHAPE = {"n_layer": 4, "n_head": 2, "n_embd": 16, "tie_head": True}
D_FF = 64
# Tokens of each sort; a name has two syllables.
VALUES = 256
RELATIONS = 4
SYLLABLES = 200
# Names of facts, and the kinds of layers that learn them.
NAMES = {
    "two syllables": (*MAIN, "hash_moe"),
    "one token": ("dense", "STEM, all", "Embformer", "hash_moe"),
}
SIZES = (1000, 2000, 4000, 8000, 16_000)  # facts
COMPARED = 8000  # facts at which learning rates are compared
RATES = (0.01, 0.02, 0.04)  # and further ones while the best is at an end
PASSES = 48
STEPS = 1000
# Is it capacity that is missing, or only time? These kinds also get so many times the passes.
LONGER = 4
SLOW = ("dense", "STEM, all")


class Cell(NamedTuple):
    """A model to be trained, and what on."""

    kind: str
    names: str
    n_fact: int
    passes: int
    rate: float
    seed: int


def make_facts(n_fact: int, names: str, seed: int) -> tuple[Tensor, Tensor, int]:
    """Prompts [n_fact, T], name tokens and a relation; their values [n_fact], which are token ids,
    too; and the size of the vocabulary: values, relations, and what names are made of."""
    rng = np.random.default_rng(seed)
    n_entity = n_fact // RELATIONS
    begin = VALUES + RELATIONS
    if names == "one token":
        name = begin + np.arange(n_entity)[:, None]  # [n_entity, 1]
        vocab_size = begin + n_entity
    else:
        pairs = rng.permutation(SYLLABLES**2)[:n_entity]  # no two names are the same
        first = begin + pairs // SYLLABLES
        second = begin + SYLLABLES + pairs % SYLLABLES
        name = np.stack((first, second), axis=1)  # [n_entity, 2]
        vocab_size = begin + 2 * SYLLABLES
    relation = VALUES + np.tile(np.arange(RELATIONS), n_entity)[:, None]  # [n_fact, 1]
    prompts = np.concatenate((name.repeat(RELATIONS, axis=0), relation), axis=1)
    values = rng.integers(VALUES, size=len(prompts))
    return torch.from_numpy(prompts), torch.from_numpy(values), vocab_size


def make_model(kind: Flags, vocab_size: int, block_size: int) -> Decoder:
    flags = {**SHAPE, **kind}
    if kind["ffn"] != "embformer":  # whose rows are n_embd wide
        flags["d_ff"] = D_FF
    return Decoder(ModelConfig(vocab_size=vocab_size, block_size=block_size, **flags))


def logits(model: Decoder, prompts: Tensor) -> Tensor:
    """Of each value behind the prompts [B, T]: [B, VALUES]."""
    return F.linear(model.hidden(prompts)[:, -1], model.head_weight[:VALUES])


def learn(cell: Cell, device: torch.device) -> dict[str, float]:
    """Train a new model on made-up facts. Returns its recall, the share of facts whose value is its
    most probable answer, and its loss over all facts, in nats."""
    prompts, values, vocab_size = make_facts(cell.n_fact, cell.names, cell.seed)
    values = values.to(device)
    steps = STEPS * cell.passes // PASSES
    torch.manual_seed(cell.seed)
    model = make_model(KINDS[cell.kind], vocab_size, prompts.shape[1]).to(device)
    settings = Settings(max_iters=steps, learning_rate=cell.rate, weight_decay=0.0, seed=cell.seed)
    optimizer = Optimizer(model, settings)
    # All facts in a random order, then all in another one, ...; a step reads its share of them.
    orders = torch.cat([torch.randperm(len(values)) for _ in range(cell.passes)])
    for step, batch in enumerate(orders.chunk(steps)):
        loss = F.cross_entropy(logits(model, prompts[batch]), values[batch.to(device)])
        loss.backward()
        optimizer.step(schedule(step, settings))
    with torch.no_grad():
        answers = torch.cat([logits(model, part) for part in prompts.split(4096)])
        loss = F.cross_entropy(answers, values).nan_to_num(nan=inf)
    recall = (answers.argmax(-1) == values).float().mean()
    return {"recall": recall.item(), "loss": loss.item()}


def find_rates(experiment: Experiment, passes: int, n_fact: int) -> dict[tuple[str, str], float]:
    """The learning rate of the lowest loss, by kind and names, with the first seed. No further ones
    are tried of a model that recalls everything."""
    rates = RATES[:1] if experiment.quick else RATES
    models = [(kind, names) for names, kinds in NAMES.items() for kind in kinds]
    perfect = set()

    def losses(pairs: list[tuple[tuple[str, str], float]]) -> list[float]:
        seed = experiment.numbers[0]
        cells = [Cell(*model, n_fact, passes, rate, seed) for model, rate in pairs]
        results = experiment.measure("capacity", learn, cells, experiment.on)
        for (model, _), result in zip(pairs, results, strict=True):
            if result["recall"] == 1:
                perfect.add(model)
        return [result["loss"] for result in results]

    tried = search_learning_rates(models, rates, losses, perfect)
    return {model: min(by_rate, key=by_rate.get) for model, by_rate in tried.items()}


def capacity(experiment: Experiment) -> None:
    sizes, compared, passes = SIZES, COMPARED, PASSES
    if experiment.quick:
        sizes, compared, passes = (40,), 40, 1

    def recalls(kind: str, names: str, n_fact: int, passes: int, rate: float) -> list[float]:
        cells = [Cell(kind, names, n_fact, passes, rate, seed) for seed in experiment.numbers]
        results = experiment.measure("capacity", learn, cells, experiment.on)
        return [result["recall"] for result in results]

    figure, panels = plt.subplots(1, len(NAMES), figsize=(10, 4), sharey=True)
    panels = dict(zip(NAMES, panels, strict=True))
    rows = []
    for (kind, names), rate in find_rates(experiment, passes, compared).items():
        shares = [recalls(kind, names, n_fact, passes, rate) for n_fact in sizes]
        longer = []
        if kind in SLOW:
            longer = recalls(kind, names, compared, LONGER * passes, rate)
        row = {"names": names, "layers": kind, **table_cells(kind, names, sizes, shares)}
        row["rate"] = f"{rate:g}"
        row[f"{compared:,} facts, {LONGER} times the passes"] = spread(".1%", longer)
        rows.append(row)
        # What comes later is thinner, so that equal lines all show.
        number = NAMES["two syllables"].index(kind)
        look = {"color": f"C{number}", "marker": ".", "label": kind, "linewidth": 6 - number}
        mean_and_band(panels[names], np.array(sizes), np.array(shares).T, **look)
    print(markdown(rows))

    for names, axes in panels.items():
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
        axes.set(title=f"names: {names}", xlabel="facts", ylim=(0, 1.02))
        axes.yaxis.set_major_formatter("{x:.0%}")
    panels["two syllables"].set_ylabel("facts recalled")
    panels["two syllables"].legend(loc="lower left")
    experiment.picture("capacity", figure)


def table_cells(kind: str, names: str, sizes: tuple[int, ...], shares: list) -> dict[str, str]:
    """What a model costs and recalls; shares are those of facts recalled, by size and seed."""
    most = sizes[-1]
    prompts, _, vocab_size = make_facts(most, names, seed=0)
    model = make_model(KINDS[kind], vocab_size, prompts.shape[1]).sizes()
    flops = model["flops_per_token"] - 2 * vocab_size * SHAPE["n_embd"]  # without the head
    recalled = np.array(shares) * np.array(sizes)[:, None]  # facts [sizes, seeds]
    bits = recalled * log2(VALUES)
    best = bits.mean(1).argmax()
    cells = {
        "kFLOP of a token": f"{flops / 1e3:.1f}",
        f"parameters for {most:,}": f"{model['total'] / 1e3:,.0f} k",
    }
    for n_fact, by_seed in zip(sizes, shares, strict=True):
        cells[f"{n_fact:,} facts"] = spread(".1%", by_seed)
    cells["most kbit recalled"] = spread(".1f", bits[best] / 1e3)
    cells[f"bits per parameter, {most:,}"] = f"{bits[-1].mean() / model['total']:.2f}"
    return cells
