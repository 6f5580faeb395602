"""Which layers' rows hold a fact, and what else does an edit change?

The claim (STEM, arXiv 2601.10639, knowledge editing): where a name reads the rows of another, in
all layers, the model tells the other's facts, without any change of the text.

Measured with countries whose name is one token, on random pairs whose capitals differ. The rows
are swapped in one layer alone, in the first k and in the last k layers that have a table:

- success: asked in a phrasing held out of training, the greedy answer is the target's capital;
- own fact kept: it is the source's still. What is left of 100 % is neither.

And leaks, in a context that goes on with another document after a paragraph about the source:

- another's fact: of those about a third country that were answered rightly before the edit, how
  many are not after it;
- next tokens: of that document's tokens that were predicted rightly before it, how many are not.

Deliberately simple: one relation, names of one token, one document behind the edited one. All
relations of the source change with its rows, as they should, and are no leak.

Then `edit.py --report`, with random pairs for all: names of different length in each way of
`--align`, and made-up names that read a country's rows ("knowledge injection").
"""

import itertools
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

from analysis.edit_success import Asked, openings, report
from analysis.experiment import STEM, Experiment, spread
from common import UserError
from edit import ALIGN, MeanRows, edited_ids
from model import Decoder
from tables.tables import Tables
from text import countries
from text.tokenizer import encode
from training.checkpoints import load_model
from training.questions import groups, score_answers
from training.records import markdown, plt

KINDS = {name: STEM[name] for name in ("STEM, all", "Embformer")}
RELATION, BEFORE = "capital", "language"  # what is asked; what the source's paragraph says
MEASURES = ("success", "own fact kept", "leaks: another's fact", "leaks: next tokens")
Triple = tuple[Asked, Asked, Asked]  # source, target, and a third country


class SomeTables(Tables):
    """Tables of which only those numbered in `swapped` see an edit. For them an edited id is one
    that tells both: whose rows these read, and whose the others."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables.vocab_size, tables.width)
        self.tables, self.weight = tables, tables.weight
        self.swapped: set[int] = set()

    def edited(
        self, encoding: tiktoken.Encoding, ids: list[int], pair: tuple[Asked, Asked]
    ) -> list[int]:
        """The ids of a text in which `pair[0]` reads the rows of `pair[1]`, as an id of both."""
        both = zip(ids, edited_ids(encoding, ids, pair[0].name, pair[1].name), strict=True)
        return [a if a == b else (a + 1) * self.vocab_size + b for a, b in both]

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        n = self.vocab_size
        own = torch.where(ids < n, ids, ids // n - 1)
        both = zip(self.tables.lookup(own), self.tables.lookup(ids % n), strict=True)
        for table, (rows, edited) in enumerate(both):
            yield edited if table in self.swapped else rows  # [B, T, W]


def choices(layers: list[int]) -> dict[str, set[int]]:
    """The numbers of the tables to swap, by the name of the choice; table n is of layers[n]."""
    n, named = len(layers), {}
    named |= {f"layer {layer}": {number} for number, layer in enumerate(layers)}
    named |= {f"first {k}": set(range(k)) for k in range(2, n)}
    named |= {f"last {k}": set(range(n - k, n)) for k in range(2, n)}
    return named | {"all": set(range(n))}


def triples(encoding: tiktoken.Encoding, number: int) -> list[Triple]:
    """Random sources and targets whose facts differ, and third countries whose differs from both.
    UserError: there are no such names."""
    single = [one for one in openings(encoding, RELATION) if one.length == 1]
    if len({tuple(one.answer) for one in single}) < 3:
        raise UserError("edits needs --data_dir data/countries: its tokenizer knows the countries")
    rng, found = random.Random(0), []  # the same for all models
    while len(found) < number:
        three = rng.sample(single, 3)
        if len({tuple(one.answer) for one in three}) == 3:
            found.append(tuple(three))
    return found


def follow(encoding: tiktoken.Encoding, source: Asked, third: Asked) -> list[int]:
    """A paragraph about the source, and the document that asks about the third country."""
    country = next(each for each in countries.table() if each.name == source.name)
    pattern = countries.seen(countries.PARAGRAPH, BEFORE)[0]
    said = countries.paragraph(country, [countries.sentence(pattern, country, BEFORE)])
    return [*encode(encoding, said), *third.prompt]


def measure(
    model: Decoder, encoding: tiktoken.Encoding, asked: list[Triple]
) -> dict[str, dict[str, float | None]]:
    """What an edit changes, by the layers it is made in."""
    model.tables = tables = SomeTables(model.tables)
    layers = [n for n, block in enumerate(model.blocks) if block.row_width]
    found = {name: np.zeros(6) for name in ("none", *choices(layers))}
    parts = list(groups(encoding, asked))
    for sources, targets, thirds in tqdm(parts, "editing", unit="group", leave=False, delay=3):
        prompts = [source.prompt for source in sources]
        behind = [follow(encoding, *two) for two in zip(sources, thirds, strict=True)]
        pairs = list(zip(sources, targets, strict=True))
        near, far = ([tables.edited(encoding, *each) for each in zip(ids, pairs, strict=True)]
                     for ids in (prompts, behind))  # fmt: skip
        theirs, own, third = ([one.answer for one in side] for side in (targets, sources, thirds))
        # The other document's tokens behind its <|endoftext|>, which those before them predict.
        said = [one.prompt[1:] for one in thirds]
        places = [
            (row, at) for row, ids in enumerate(behind) for at in range(len(ids))[-len(said[row]) :]
        ]
        places = torch.tensor([(row, at - 1) for row, at in places]).T  # [2, tokens]
        wanted = torch.tensor(list(itertools.chain(*said)))
        known = None  # before the edit: facts and tokens
        for name in found:
            tables.swapped = choices(layers).get(name, set())
            success = score_answers(model, prompts, theirs, near)[0]
            kept = score_answers(model, prompts, own, near)[0]
            right, _, logits = score_answers(model, behind, third, far)
            hits = logits[tuple(places.to(logits.device))].argmax(-1).cpu() == wanted
            known = known or (right, hits)
            leaks = [side for was, now in zip(known, (right, hits), strict=True)
                     for side in ((was & ~now), was)]  # fmt: skip
            found[name] += [side.sum().item() for side in (success, kept, *leaks)]
    return {
        name: {
            "success": success / len(asked),
            "own fact kept": kept / len(asked),
            "leaks: another's fact": lost / facts if facts else None,
            "leaks: next tokens": gone / seen if seen else None,
        }
        for name, (success, kept, lost, facts, gone, seen) in found.items()
    }


def edits(experiment: Experiment) -> None:
    kept, number, found = experiment.keep("edits"), 32 if experiment.quick else 1000, {}

    def find(folder: Path) -> dict:
        model, encoding, _ = load_model(folder / "ckpt.pt", experiment.on)
        return measure(model, encoding, triples(encoding, number))

    for kind, folders in experiment.groups(KINDS).items():
        bar = tqdm(folders, f"edits, {kind}", unit="run", delay=3)
        found[kind] = [kept(folder.name, partial(find, folder)) for folder in bar]
    for kind, runs in found.items():
        table = []
        for name in runs[0]:
            row = {f"{kind}: rows swapped in": name}
            row |= {what: spread(".1%", (run[name][what] for run in runs)) for what in MEASURES}
            table.append(row)
        print(markdown(table) + "\n")
    print(names(experiment, 32 if experiment.quick else 2000))
    experiment.picture("edits", draw(found))


def names(experiment: Experiment, most: int) -> str:
    """What `edit.py --report` finds in at most so many pairs of each sort."""
    kept, table = experiment.keep("edits"), []

    def find(folder: Path) -> dict:
        model, encoding, _ = load_model(folder / "ckpt.pt", experiment.on)
        model.tables = MeanRows(model.tables)
        return report(model, encoding, most)

    kinds = {kind: STEM[kind] for kind in ("STEM, third", "STEM, all")}
    for kind, folders in experiment.groups(kinds).items():
        bar = tqdm(folders, f"reports, {kind}", unit="run", delay=3)
        runs = [kept(f"report {folder.name}", partial(find, folder)) for folder in bar]
        row = {"tables in": kind, "names": "one token"}
        row |= {
            title: spread(".1%", (run[title] for run in runs)) for title in ("recall", "success")
        }
        row |= dict.fromkeys(ALIGN, "")
        table.append(row)
        for length in runs[0]["lengths"]:
            row = {"tables in": kind, "names": length, "recall": "", "success": ""}
            for how in ALIGN:
                row[how] = spread(".1%", (run["lengths"][length][how] for run in runs))
            table.append(row)
        injected = [float(np.mean(list(run["injected"].values()))) for run in runs]
        row = dict.fromkeys(table[0], "") | {"tables in": kind, "names": "made up"}
        table.append(row | {"success": spread(".1%", injected)})
    return markdown(table) + "\n"


def draw(found: dict[str, list[dict]]) -> plt.Figure:
    """Bars: means of the runs, the lines in them from the lowest to the highest."""
    size = dict(figsize=(11, 3.4 * len(found)), layout="constrained", squeeze=False)
    figure, axes = plt.subplots(len(found), 1, **size)
    for place, (kind, runs) in zip(axes.flat, found.items(), strict=True):
        for number, what in enumerate(MEASURES):
            bars = np.array([[run[name][what] or 0.0 for name in runs[0]] for run in runs])
            x, mean = np.arange(bars.shape[1]) + 0.2 * number, bars.mean(0)
            error = [mean - bars.min(0), bars.max(0) - mean]
            place.bar(x, mean, 0.2, yerr=error, label=what, error_kw=dict(elinewidth=0.8))
        place.set_xticks(np.arange(len(runs[0])) + 0.3, list(runs[0]), rotation=30)
        place.set(ylabel="share", title=f"{kind}: rows swapped in", ylim=(0, 1))
        place.grid(alpha=0.3, axis="y")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure
