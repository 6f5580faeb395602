"""How many facts fit into a model?

Facts `name, relation -> value` are made up, ever more of them, and learned with equally many passes
and equally many steps. A name is two syllables of 200 each, none of which belongs to an entity, or
one token, whose row can hold all that is known about the entity. The head looks at values alone, as
other tokens are never answers, and no weight decays, as that would be a loss of memory.
"""

from math import inf, log2

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.experiment import KINDS, MAIN, Experiment, Flags, search_learning_rates, spread
from config import ModelConfig
from model import Decoder
from training.optimizer import Optimizer, schedule
from training.records import markdown, mean_and_band, plt
from training.settings import Settings

SHAPE = dict(n_layer=4, n_head=2, n_embd=16, tie_head=True)
D_FF = 64
VALUES, RELATIONS, SYLLABLES = 256, 4, 200  # tokens of each sort; a name has two syllables
# Names of facts, and the kinds of layers that learn them.
NAMES = {
    "two syllables": (*MAIN, "hash_moe"),
    "one token": ("dense", "STEM, all", "Embformer", "hash_moe"),
}
RATES = (0.01, 0.02, 0.04)  # and further ones while the best is at an end
PASSES, STEPS = 48, 1000
# Is it capacity that is missing, or only time? These kinds also get so many times the passes.
LONGER, SLOW = 4, ("dense", "STEM, all")


def make_facts(n_fact: int, names: str, seed: int) -> tuple[Tensor, Tensor, int]:
    """Prompts [n_fact, T], name tokens and a relation; their values [n_fact], which are token ids,
    too; and the size of the vocabulary: values, relations, and what names are made of."""
    rng, n_entity = np.random.default_rng(seed), n_fact // RELATIONS
    begin = VALUES + RELATIONS
    if names == "one token":
        name, vocab_size = begin + np.arange(n_entity)[:, None], begin + n_entity  # [n_entity, 1]
    else:
        pairs = rng.permutation(SYLLABLES**2)[:n_entity]  # no two names are the same
        name = begin + np.stack((pairs // SYLLABLES, SYLLABLES + pairs % SYLLABLES), axis=1)
        vocab_size = begin + 2 * SYLLABLES
    relation = VALUES + np.tile(np.arange(RELATIONS), n_entity)[:, None]  # [n_fact, 1]
    prompts = np.concatenate((name.repeat(RELATIONS, axis=0), relation), axis=1)
    values = rng.integers(VALUES, size=len(prompts))
    return torch.from_numpy(prompts), torch.from_numpy(values), vocab_size


def make_model(kind: Flags, vocab_size: int, block_size: int) -> Decoder:
    d_ff = {} if kind["ffn"] == "embformer" else dict(d_ff=D_FF)  # its rows are n_embd wide
    return Decoder(ModelConfig(vocab_size, block_size, **SHAPE, **d_ff, **kind))


def logits(model: Decoder, prompts: Tensor) -> Tensor:
    """Of each value behind the prompts [B, T]: [B, VALUES]."""
    return F.linear(model.hidden(prompts)[:, -1], model.head_weight[:VALUES])


def learn(
    kind: str, names: str, n_fact: int, passes: int, rate: float, seed: int, on: torch.device
) -> dict[str, float]:
    """Train a new model on made-up facts. Returns its recall, the share of facts whose value is its
    most probable answer, and its loss over all facts, in nats."""
    prompts, values, vocab_size = make_facts(n_fact, names, seed)
    values, steps = values.to(on), STEPS * passes // PASSES
    torch.manual_seed(seed)
    model = make_model(KINDS[kind], vocab_size, prompts.shape[1]).to(on)
    settings = Settings(max_iters=steps, learning_rate=rate, weight_decay=0.0, seed=seed)
    optimizer = Optimizer(model, settings)
    # All facts in a random order, then all in another one, ...; a step reads its share of them.
    orders = torch.cat([torch.randperm(len(values)) for _ in range(passes)])
    for step, batch in enumerate(orders.chunk(steps)):
        F.cross_entropy(logits(model, prompts[batch]), values[batch.to(on)]).backward()
        optimizer.step(schedule(step, settings))
    with torch.no_grad():
        answers = torch.cat([logits(model, part) for part in prompts.split(4096)])
    right = (answers.argmax(-1) == values).float().mean().item()
    return dict(recall=right, loss=F.cross_entropy(answers, values).nan_to_num(nan=inf).item())


def capacity(experiment: Experiment) -> None:
    quick, seeds = experiment.quick, experiment.numbers
    sizes = (40,) if quick else (1000, 2000, 4000, 8000, 16_000)  # facts
    compared = 40 if quick else 8000  # facts at which learning rates are compared
    passes = 1 if quick else PASSES
    models = [(kind, names) for names, kinds in NAMES.items() for kind in kinds]
    perfect = set()  # the models that recall all facts at some rate

    def learn_all(cells: list[tuple]) -> list[dict[str, float]]:
        return experiment.measure("capacity", lambda cell: learn(*cell, experiment.on), cells)

    def losses(todo: list[tuple]) -> list[float]:
        results = learn_all([(*model, compared, passes, rate, seeds[0]) for model, rate in todo])
        perfect.update(todo[i][0] for i, each in enumerate(results) if each["recall"] == 1)
        return [each["loss"] for each in results]

    tried = search_learning_rates(models, RATES[:1] if quick else RATES, losses, perfect)
    figure, panels = plt.subplots(1, len(NAMES), figsize=(10, 4), sharey=True)
    rows, panels = [], dict(zip(NAMES, panels, strict=True))
    for (kind, names), by_rate in tried.items():
        rate = min(by_rate, key=by_rate.get)
        settings = [(n, passes) for n in sizes] + [(compared, LONGER * passes)] * (kind in SLOW)
        cells = [(kind, names, *each, rate, seed) for each in settings for seed in seeds]
        recalls = [each["recall"] for each in learn_all(cells)]
        recalls, longer = np.split(np.array(recalls), [len(sizes) * len(seeds)])
        shares = recalls.reshape(-1, len(seeds))  # [sizes, seeds]
        number = NAMES["two syllables"].index(kind)
        # What comes later is thinner, so that equal lines all show.
        look = dict(color=f"C{number}", marker=".", label=kind, linewidth=6 - number)
        mean_and_band(panels[names], sizes, shares.T, **look)

        prompts, _, vocab_size = make_facts(sizes[-1], names, 0)
        model = make_model(KINDS[kind], vocab_size, prompts.shape[1]).sizes()
        flops = model["flops_per_token"] - 2 * vocab_size * SHAPE["n_embd"]  # without the head
        bits = shares * np.array(sizes)[:, None] * log2(VALUES)  # [sizes, seeds]
        row = {"names": names, "layers": kind, "kFLOP of a token": f"{flops / 1e3:.1f}"}
        row[f"parameters for {sizes[-1]:,}"] = f"{model['total'] / 1e3:,.0f} k"
        row["rate"] = f"{rate:g}"
        row |= {f"{n:,} facts": spread(".1%", r) for n, r in zip(sizes, shares, strict=True)}
        row["most kbit recalled"] = spread(".1f", bits[bits.mean(1).argmax()] / 1e3)
        row[f"bits per parameter, {sizes[-1]:,}"] = f"{bits[-1].mean() / model['total']:.2f}"
        row[f"{compared:,} facts, {LONGER} times the passes"] = spread(".1%", longer)
        rows.append(row)
    print(markdown(rows))

    for names, axes in panels.items():
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
        axes.set(title=f"names: {names}", xlabel="facts", ylim=(0, 1.02))
        axes.yaxis.set_major_formatter("{x:.0%}")
    panels["two syllables"].set_ylabel("facts recalled")
    panels["two syllables"].legend(loc="lower left")
    experiment.picture("capacity", figure)
