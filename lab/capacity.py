"""How many facts fit into a model?

Facts `name, relation -> value` are made up, ever more of them, and learned with equally many passes
and equally many steps. A name is two syllables of 200 each, none of which belongs to an entity. The
head looks at values alone, as other tokens are never answers, and no weight decays, as that would
be a loss of memory.
"""

from math import log2

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.experiment import KINDS, Experiment, Flags
from lab.pictures import markdown, spread
from model import Decoder, decoder_class
from training.optimizer import Optimizer, schedule
from training.report import model_sizes
from training.settings import Settings

SHAPE = {"n_layer": 4, "n_head": 2, "n_embd": 16, "tie_head": True}
D_FF = 64
# Tokens of each sort; a name has two syllables.
VALUES = 256
RELATIONS = 4
SYLLABLES = 200
VOCAB = VALUES + RELATIONS + 2 * SYLLABLES
SIZES = (1000, 2000, 4000, 8000, 16_000)  # facts
# The best learning rates of 0.01, 0.02, 0.04 and 0.08 for 8,000 facts, seed 1337.
RATES = {
    "dense": 0.02,
    "STEM, third": 0.02,
    "STEM, half": 0.02,
    "STEM, all": 0.02,
    "Embformer": 0.08,
    "hash_moe": 0.02,
}
PASSES = 48
STEPS = 1000
# Is it capacity that is missing, or only time? These kinds also get more passes over some facts.
LONGER = 4  # times the passes
COMPARED = 8000
SLOW = ("dense", "STEM, all")


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
    decoder = decoder_class(kind["ffn"])
    return decoder(decoder.config_class(vocab_size=VOCAB, block_size=3, **flags))


def logits(model: Decoder, prompts: Tensor) -> Tensor:
    """Of each value behind the prompts [B, T]: [B, VALUES]."""
    return F.linear(model.hidden(prompts)[:, -1], model.head_weight[:VALUES])


def learn(cell: tuple[str, int, int, int], device: torch.device) -> float:
    """Train a new model on made-up facts.

    Args:
        cell: the kind of layers, the number of facts, how often each is read, the seed.

    Returns:
        Its recall, the share of facts whose value is its most probable answer.
    """
    kind, n_fact, passes, seed = cell
    prompts, values = make_facts(n_fact, seed)
    values = values.to(device)
    steps = STEPS * passes // PASSES
    torch.manual_seed(seed)
    model = make_model(KINDS[kind]).to(device)
    settings = Settings(max_iters=steps, learning_rate=RATES[kind], weight_decay=0.0, seed=seed)
    optimizer = Optimizer(model, settings)
    # All facts in a random order, then all in another one, ...; a step reads its share of them.
    orders = torch.cat([torch.randperm(n_fact) for _ in range(passes)])
    for step, batch in enumerate(orders.chunk(steps)):
        loss = F.cross_entropy(logits(model, prompts[batch]), values[batch.to(device)])
        loss.backward()
        optimizer.step(schedule(step, settings))
    with torch.no_grad():
        answers = torch.cat([logits(model, part) for part in prompts.split(4096)])
    return (answers.argmax(-1) == values).float().mean().item()


def capacity(experiment: Experiment) -> None:
    sizes, compared, passes = SIZES, COMPARED, PASSES
    if experiment.quick:
        sizes, compared, passes = (40,), 40, 1

    def recalls(kind: str, n_fact: int, passes: int) -> list[float]:
        cells = [(kind, n_fact, passes, seed) for seed in experiment.numbers]
        return experiment.measure("capacity", learn, cells, experiment.on)

    rows = []
    for kind in RATES:
        parameters = model_sizes(make_model(KINDS[kind]))["total"]
        row = {"layers": kind, "parameters": f"{parameters / 1e3:,.0f} k"}
        most = np.zeros(1)
        for n_fact in sizes:
            shares = np.array(recalls(kind, n_fact, passes))
            row[f"{n_fact:,} facts"] = spread(".1%", shares)
            kbit = shares * n_fact * log2(VALUES) / 1e3
            most = max(most, kbit, key=np.mean)
        row["most kbit recalled"] = spread(".1f", most)
        longer = recalls(kind, compared, LONGER * passes) if kind in SLOW else []
        row[f"{compared:,} facts, {LONGER} times the passes"] = spread(".1%", longer)
        rows.append(row)
    print(markdown(rows))
