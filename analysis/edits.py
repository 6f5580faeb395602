"""Which layers' rows hold a fact, and what else does an edit change?

Measured with countries whose name is one token, on random pairs whose capitals differ. Rows are
swapped in one layer alone, in the first k and in the last k layers that have a table:

- success: asked in a phrasing held out of training, the greedy answer is the target's capital;
- own fact kept: it is the source's still. What is left of 100 % is neither.

And leaks, in a context that goes on with another document after a paragraph about the source:

- another's fact: of those about a third country that were answered rightly before the edit, how
  many are not after it;
- next tokens: of that document's tokens that were predicted rightly before it, how many are not.

Deliberately simple: one relation, names of one token, one document behind the edited one. All
relations of the source change with its rows, as they should, and are no leak. Then names of other
lengths and made-up names, with random pairs: see edit_success.py.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

from analysis.edit_success import Asked, openings, report_injected, report_lengths, report_pairs
from analysis.experiment import Experiment, pick, spread
from common import UserError
from edit import ALIGN, edited_ids, load_editable
from model import Decoder
from tables.tables import Tables
from text import countries
from text.tokenizer import encode
from training.checkpoints import load_model
from training.questions import groups, score_answers
from training.records import markdown, plt

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
    n, named = len(layers), {"none": set()}
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
    text = countries.paragraph(country, [countries.sentence(pattern, country, BEFORE)])
    return [*encode(encoding, text), *third.prompt]


def measure(
    model: Decoder, encoding: tiktoken.Encoding, asked: list[Triple]
) -> dict[str, dict[str, float | None]]:
    """What an edit changes, by the layers it is made in."""
    model.tables = tables = SomeTables(model.tables)
    swaps = choices([n for n, block in enumerate(model.blocks) if block.row_width])
    counts = {name: np.zeros(6) for name in swaps}
    parts = list(groups(encoding, asked))
    for sources, targets, thirds in tqdm(parts, "editing", unit="group", leave=False, delay=3):
        prompts = [source.prompt for source in sources]
        behind = [follow(encoding, *two) for two in zip(sources, thirds, strict=True)]
        pairs = list(zip(sources, targets, strict=True))
        edited, edited_behind = (
            [tables.edited(encoding, *each) for each in zip(ids, pairs, strict=True)]
            for ids in (prompts, behind)
        )
        theirs, own, third = ([one.answer for one in side] for side in (targets, sources, thirds))
        # The other document's tokens behind its <|endoftext|>, each predicted one place before it.
        others = [one.prompt[1:] for one in thirds]
        rows = [row for row, tokens in enumerate(others) for _ in tokens]
        places = [len(ids) - n - 1 for ids, tokens in zip(behind, others, strict=True)
                  for n in range(len(tokens), 0, -1)]  # fmt: skip
        wanted = torch.tensor(list(itertools.chain(*others)))
        for name, tables.swapped in swaps.items():
            success = score_answers(model, prompts, theirs, edited)[0]
            kept = score_answers(model, prompts, own, edited)[0]
            facts, _, logits = score_answers(model, behind, third, edited_behind)
            tokens = logits[rows, places].argmax(-1).cpu() == wanted
            if name == "none":
                known, predicted = facts, tokens
            lost = (known & ~facts, known, predicted & ~tokens, predicted)
            counts[name] += [hits.sum().item() for hits in (success, kept, *lost)]
    return {
        name: {
            "success": success / len(asked),
            "own fact kept": kept / len(asked),
            "leaks: another's fact": lost / known if known else None,
            "leaks: next tokens": gone / predicted if predicted else None,
        }
        for name, (success, kept, lost, known, gone, predicted) in counts.items()
    }


def edits(experiment: Experiment) -> None:
    kinds = pick("STEM, all", "Embformer")
    size = dict(figsize=(11, 3.4 * len(kinds)), layout="constrained")
    figure, panels = plt.subplots(len(kinds), 1, **size)

    def measure_run(folder: Path) -> dict:
        model, encoding, _ = load_model(folder / "ckpt.pt", experiment.on)
        return measure(model, encoding, triples(encoding, 32 if experiment.quick else 1000))

    for axes, (kind, folders) in zip(panels, experiment.train(kinds).items(), strict=True):
        todo = {folder.name: partial(measure_run, folder) for folder in folders}
        runs = experiment.measure("edits", todo)
        table = []
        for name in runs[0]:
            row = {f"{kind}: rows swapped in": name}
            row |= {what: spread(".1%", (run[name][what] for run in runs)) for what in MEASURES}
            table.append(row)
        print(markdown(table) + "\n")
        for number, what in enumerate(MEASURES):  # means, with lines from the lowest to the highest
            bars = np.array([[run[name][what] or 0.0 for name in runs[0]] for run in runs])
            x, mean = np.arange(bars.shape[1]) + 0.2 * number, bars.mean(0)
            error = [mean - bars.min(0), bars.max(0) - mean]
            axes.bar(x, mean, 0.2, yerr=error, label=what, error_kw=dict(elinewidth=0.8))
        axes.set_xticks(np.arange(len(runs[0])) + 0.3, list(runs[0]), rotation=30)
        axes.set(ylabel="share", title=f"{kind}: rows swapped in", ylim=(0, 1))
        axes.grid(alpha=0.3, axis="y")
    print(edits_by_names(experiment))
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=len(MEASURES))
    experiment.picture("edits", figure)


def success_of_edits(
    experiment: Experiment, folders: list[Path], report: Callable = report_pairs
) -> list[dict]:
    """A report of edit_success.py about each run, on random pairs."""

    def measure_run(folder: Path) -> dict:
        model, encoding, _ = load_editable(folder / "ckpt.pt", experiment.on)
        return report(model, encoding, 32 if experiment.quick else 2000)

    todo = {folder.name: partial(measure_run, folder) for folder in folders}
    return experiment.measure(report.__name__, todo)


def edits_by_names(experiment: Experiment) -> str:
    """A table of edits that succeed with names of one token, of other lengths, and made-up ones."""
    table = []
    for kind, folders in experiment.train(pick("STEM, third", "STEM, all")).items():
        pairs, lengths, injected = (
            success_of_edits(experiment, folders, report)
            for report in (report_pairs, report_lengths, report_injected)
        )
        empty = {"tables in": kind} | dict.fromkeys(("names", "recall", "success", *ALIGN), "")
        shares = {
            what: spread(".1%", (run[what] for run in pairs)) for what in ("recall", "success")
        }
        table.append({**empty, "names": "one token", **shares})
        for length in lengths[0]:
            shares = {how: spread(".1%", (run[length][how] for run in lengths)) for how in ALIGN}
            table.append({**empty, "names": length, **shares})
        share = spread(".1%", (float(np.mean(list(run.values()))) for run in injected))
        table.append({**empty, "names": "made up", "success": share})
    return markdown(table) + "\n"
