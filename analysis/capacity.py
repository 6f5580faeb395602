"""How many facts fit into a model?

Facts `name, relation -> value` are made up, ever more of them, and learned with equally many passes
and equally many steps. A name is two syllables of 200 each, none of which belongs to an entity. The
head looks at values alone, as other tokens are never answers, and no weight decays, as that would
be a loss of memory.
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
VOCAB = VALUES + RELATIONS + 2 * SYLLABLES
KINDS_COMPARED = (*MAIN, "hash_moe")
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
    n_fact: int
    passes: int
    rate: float
    seed: int


def make_facts(n_fact: int, seed: int) -> tuple[Tensor, Tensor]:
    """Prompts [n_fact, 3], two syllables and a relation, and values [n_fact], which are token ids,
    too. Ids are those of values, then relations, then syllables."""
    rng = np.random.default_rng(seed)
    n_entity = n_fact // RELATIONS
    names = rng.permutation(SYLLABLES**2)[:n_entity]  # no two are the same
    first = VALUES + RELATIONS + names // SYLLABLES
    second = VALUES + RELATIONS + SYLLABLES + names % SYLLABLES
    relation = VALUES + np.tile(np.arange(RELATIONS), n_entity)  # [n_fact]
    prompts = np.stack((first.repeat(RELATIONS), second.repeat(RELATIONS), relation), axis=1)
    values = rng.integers(VALUES, size=len(prompts))
    return torch.from_numpy(prompts), torch.from_numpy(values)


def make_model(kind: Flags) -> Decoder:
    flags = {**SHAPE, **kind}
    if kind["ffn"] != "embformer":  # whose rows are n_embd wide
        flags["d_ff"] = D_FF
    return Decoder(ModelConfig(vocab_size=VOCAB, block_size=3, **flags))


def logits(model: Decoder, prompts: Tensor) -> Tensor:
    """Of each value behind the prompts [B, T]: [B, VALUES]."""
    return F.linear(model.hidden(prompts)[:, -1], model.head_weight[:VALUES])


def learn(cell: Cell, device: torch.device) -> dict[str, float]:
    """Train a new model on made-up facts. Returns its recall, the share of facts whose value is its
    most probable answer, and its loss over all facts, in nats."""
    prompts, values = make_facts(cell.n_fact, cell.seed)
    values = values.to(device)
    steps = STEPS * cell.passes // PASSES
    torch.manual_seed(cell.seed)
    model = make_model(KINDS[cell.kind]).to(device)
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


def find_rates(experiment: Experiment, passes: int, n_fact: int) -> dict[str, float]:
    """The learning rate of each kind's lowest loss, with the first seed."""
    rates = RATES[:1] if experiment.quick else RATES
    seed = experiment.numbers[0]

    def losses(pairs: list[tuple[str, float]]) -> list[float]:
        cells = [Cell(kind, n_fact, passes, rate, seed) for kind, rate in pairs]
        results = experiment.measure("capacity", learn, cells, experiment.on)
        return [result["loss"] for result in results]

    tried = search_learning_rates(KINDS_COMPARED, rates, losses)
    return {kind: min(by_rate, key=by_rate.get) for kind, by_rate in tried.items()}


def capacity(experiment: Experiment) -> None:
    sizes, compared, passes = SIZES, COMPARED, PASSES
    if experiment.quick:
        sizes, compared, passes = (40,), 40, 1

    def recalls(kind: str, n_fact: int, passes: int, rate: float) -> list[float]:
        cells = [Cell(kind, n_fact, passes, rate, seed) for seed in experiment.numbers]
        results = experiment.measure("capacity", learn, cells, experiment.on)
        return [result["recall"] for result in results]

    figure, axes = plt.subplots()
    rows = []
    for kind, rate in find_rates(experiment, passes, compared).items():
        shares = np.array([recalls(kind, n_fact, passes, rate) for n_fact in sizes])
        parameters = make_model(KINDS[kind]).sizes()["total"]
        row = {"layers": kind, "parameters": f"{parameters / 1e3:,.0f} k", "rate": f"{rate:g}"}
        for n_fact, by_seed in zip(sizes, shares, strict=True):
            row[f"{n_fact:,} facts"] = spread(".1%", by_seed)
        kbit = shares * np.array(sizes)[:, None] * log2(VALUES) / 1e3  # [sizes, seeds]
        row["most kbit recalled"] = spread(".1f", kbit[kbit.mean(1).argmax()])
        longer = recalls(kind, compared, LONGER * passes, rate) if kind in SLOW else []
        row[f"{compared:,} facts, {LONGER} times the passes"] = spread(".1%", longer)
        rows.append(row)
        mean_and_band(axes, np.array(sizes), shares.T, marker=".", label=kind)
    print(markdown(rows))
    axes.set_xscale("log", base=2)
    axes.set(xlabel="facts", ylabel="share recalled", ylim=(0, 1.02))
    axes.legend()
    experiment.picture("capacity", figure)
