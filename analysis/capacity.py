"""How many facts fit into a model?

The claim (STEM, arXiv 2601.10639, abstract and section 1): tables give a larger knowledge capacity
than a dense model has at the FLOPs of a token. Entities with random attributes are made up, ever
more of them, and learned with equally many passes over each fact and equally many steps, whatever
the number of facts. Greedy answers are then compared with what was learned; nothing generalizes,
so there is no other text to ask about.

A fact is `name, relation -> value`. There are two kinds of names, as the difference is a finding:
two syllables of 200 each, none of which belongs to an entity, and one token, whose row can own all
that is known about the entity. Each kind of layer has its best learning rate.

Deliberately simple: a model this small is full at these numbers of facts; the head looks at values
alone (the other tokens are never answers), and no weight decays, as that would be a loss of memory.
FLOPs of a token are equal but for STEM, which saves the up-projection, and Embformer, which has no
weights: they are in the table.
"""

from math import inf, log2

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from analysis.experiment import BASELINES, STEM, Experiment, Flags, spread
from analysis.runs import beyond
from config import ModelConfig
from model import Decoder
from training.optimizer import Optimizer, schedule
from training.records import markdown, plt
from training.settings import Settings

KINDS = {**STEM, "hash_moe": BASELINES["hash_moe"]}
SHAPE = dict(n_layer=4, n_head=2, n_embd=16, tie_head=True)
D_FF = 64
VALUES, RELATIONS, SYLLABLES = 256, 4, 200  # tokens of each sort; a name has two syllables
# Names of facts, and the layers that learn them.
NAMES = {
    "two syllables": list(KINDS),
    "one token": ["dense", "STEM, all", "Embformer", "hash_moe"],
}
SIZES, COMPARED = (1000, 2000, 4000, 8000, 16_000), 8000  # facts; rates are compared at one size
RATES = (0.01, 0.02, 0.04)  # and further ones while the best is at an end
PASSES, STEPS = 48, 1000
LONGER = 4  # times the passes: is it capacity that is missing, or only time?
QUICK = dict(SIZES=(40, 80), COMPARED=80, RATES=(0.01,), PASSES=2, STEPS=2)


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
    kind: Flags, names: str, n_fact: int, seed: int, rate: float, passes: int, steps: int, on: str
) -> dict[str, float]:
    """Train a new model on made-up facts. Returns its recall, the share of facts whose value is its
    most probable answer, and its loss over all facts, in nats."""
    prompts, values, vocab_size = make_facts(n_fact, names, seed)
    values = values.to(on)
    torch.manual_seed(seed)
    model = make_model(kind, vocab_size, prompts.shape[1]).to(on)
    settings = Settings(max_iters=steps, learning_rate=rate, weight_decay=0.0, seed=seed)
    optimizer = Optimizer(model, settings)
    # All facts in a random order, then all in another one, ...; a step reads its share of them.
    orders = torch.cat([torch.randperm(len(values)) for _ in range(passes)])
    for step, batch in enumerate(tqdm(orders.chunk(steps), "facts", leave=False, disable=None)):
        F.cross_entropy(logits(model, prompts[batch]), values[batch.to(on)]).backward()
        optimizer.step(schedule(step, settings))
    with torch.no_grad():
        asked = torch.cat([logits(model, part) for part in prompts.split(4096)])
    right = (asked.argmax(-1) == values).float().mean().item()
    return dict(recall=right, loss=F.cross_entropy(asked, values).nan_to_num(nan=inf).item())


def capacity(experiment: Experiment) -> None:
    scale = dict(SIZES=SIZES, COMPARED=COMPARED, RATES=RATES, PASSES=PASSES, STEPS=STEPS)
    sizes, compared, rates, passes, steps = {
        **scale,
        **(QUICK if experiment.quick else {}),
    }.values()
    kept, seeds = experiment.keep("capacity"), experiment.numbers

    def cell(kind: str, names: str, n_fact: int, seed: int, rate: float, longer: int = 1) -> dict:
        told = (kind, names, n_fact, passes * longer, rate, seed)
        more = (n_fact, seed, rate, passes * longer, steps * longer, experiment.on)
        return kept(", ".join(map(str, told)), lambda: learn(KINDS[kind], names, *more))

    rows, curves = [], {}
    which = [(names, kind) for names, kinds in NAMES.items() for kind in kinds]
    for names, kind in tqdm(which, "capacity", unit="curve", delay=3):
        tried, more = {}, list(rates)
        while more:
            tried |= {rate: cell(kind, names, compared, seeds[0], rate) for rate in more}
            losses = {rate: found["loss"] for rate, found in tried.items()}
            full = any(found["recall"] == 1 for found in tried.values())  # no rate can be better
            more = [] if full or experiment.quick else beyond(losses)
        rate = min(losses, key=losses.get)
        recalls = np.array(  # [sizes, seeds]
            [[cell(kind, names, n, seed, rate)["recall"] for seed in seeds] for n in sizes]
        )
        curves[names, kind] = recalls
        prompts, _, vocab_size = make_facts(sizes[-1], names, 0)
        model_sizes = make_model(KINDS[kind], vocab_size, prompts.shape[1]).sizes()
        flops = model_sizes["flops_per_token"] - 2 * vocab_size * SHAPE["n_embd"]  # of the head
        bits = recalls * np.array(sizes)[:, None] * log2(VALUES)  # [sizes, seeds]
        best = bits[bits.mean(1).argmax()]
        row = {"names": names, "layers": kind, "kFLOP of a token": f"{flops / 1e3:.1f}"}
        row |= {
            f"parameters for {sizes[-1]:,}": f"{model_sizes['total'] / 1e3:,.0f} k",
            "rate": f"{rate:g}",
        }
        row |= {f"{n:,} facts": spread(".1%", each) for n, each in zip(sizes, recalls, strict=True)}
        row |= {"most kbit recalled": spread(".1f", best / 1e3)}
        row |= {
            f"bits per parameter, {sizes[-1]:,}": f"{bits[-1].mean() / model_sizes['total']:.2f}"
        }
        longer = f"{compared:,} facts, {LONGER} times the passes"
        row[longer] = ""
        if kind in ("dense", "STEM, all"):
            found = [cell(kind, names, compared, seed, rate, LONGER)["recall"] for seed in seeds]
            row[longer] = spread(".1%", found)
        rows.append(row)
    print(markdown(rows))
    experiment.picture("capacity", drawn(sizes, curves))


def drawn(sizes: tuple[int, ...], curves: dict[tuple[str, str], np.ndarray]) -> plt.Figure:
    """Recall over the number of facts, a panel for each sort of names."""
    figure, panels = plt.subplots(1, len(NAMES), figsize=(10, 4), sharey=True, layout="constrained")
    for panel, (names, kinds) in zip(panels, NAMES.items(), strict=True):
        for kind in kinds:
            recalls, color = curves[names, kind], f"C{list(KINDS).index(kind)}"  # [sizes, seeds]
            panel.plot(sizes, recalls.mean(1), color=color, marker=".", label=kind)
            band = recalls.min(1), recalls.max(1)
            panel.fill_between(sizes, *band, color=color, alpha=0.2, linewidth=0)
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{n:,}" for n in sizes])
        panel.set(title=f"names: {names}", xlabel="facts", ylim=(0, 1.02))
        panel.yaxis.set_major_formatter("{x:.0%}")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("facts recalled")
    panels[0].legend()
    return figure
