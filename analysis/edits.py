"""Which layers' rows hold a fact, and what else does an edit change?

Rows are swapped in one layer alone, in the first k and in the last k layers that have a table, for
random pairs of countries whose names are one token. Success: asked in held-out words, the greedy
answer is the target's capital; own fact kept: it is the source's still. Leaks, in a second document
behind a paragraph about the source: a third country's fact, or the next tokens, that were right
before the edit and are not after it. Then names of other lengths and made-up names.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

from analysis.edit_success import (
    Asked,
    report_injected,
    report_lengths,
    report_pairs,
    single_tokens,
)
from analysis.experiment import Experiment, pick, spread
from edit import ALIGN, MeanRows, edited_ids
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
    """Tables of which only those numbered in `swapped` see an edit. An edited id is the token's own
    plus V times how far behind it, modulo V, the token is whose row these tables read instead."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables.vocab_size, tables.width)
        self.tables, self.weight = tables, tables.weight
        self.swapped: set[int] = set()

    def edited(self, ids: list[int], others: list[int]) -> list[int]:
        """The ids of a text that reads, in some tables, the rows of the others."""
        n = self.vocab_size
        return [own + (other - own) % n * n for own, other in zip(ids, others, strict=True)]

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        own, distance = ids % self.vocab_size, ids // self.vocab_size
        both = (self.tables.lookup(own), self.tables.lookup((own + distance) % self.vocab_size))
        for table, rows in enumerate(zip(*both, strict=True)):
            yield rows[table in self.swapped]  # [B, T, W]


def choices(layers: list[int]) -> dict[str, set[int]]:
    """The numbers of the tables to swap, by the name of the choice; table n is of layers[n]."""
    n = len(layers)
    return {
        "none": set(),
        **{f"layer {layer}": {number} for number, layer in enumerate(layers)},
        **{f"first {k}": set(range(k)) for k in range(2, n)},
        **{f"last {k}": set(range(n - k, n)) for k in range(2, n)},
        "all": set(range(n)),
    }


def triples(encoding: tiktoken.Encoding, number: int) -> list[Triple]:
    """Random sources, targets and third countries, whose facts all differ."""
    single = single_tokens(encoding, RELATION)
    rng, chosen = random.Random(0), []  # the same for all models
    while len(chosen) < number:
        three = rng.sample(single, 3)
        if len({tuple(one.answer) for one in three}) == 3:
            chosen.append(tuple(three))
    return chosen


def follow(encoding: tiktoken.Encoding, source: Asked, third: Asked) -> list[int]:
    """A paragraph about the source, and the document that asks about the third country."""
    country = next(each for each in countries.table() if each.name == source.name)
    pattern = countries.seen(countries.PARAGRAPH, BEFORE)[0]
    text = countries.paragraph(country, [countries.sentence(pattern, country, BEFORE)])
    return [*encode(encoding, text), *third.prompt]


def report_layers(model: Decoder, encoding: tiktoken.Encoding, most: int) -> dict[str, dict]:
    """What an edit changes, by the layers it is made in. Leaks of what a model never knew: NaN."""
    model.tables = tables = SomeTables(model.tables)
    swaps = choices([n for n, block in enumerate(model.blocks) if block.row_width])
    rows, result = [], {}
    for source, target, third in triples(encoding, most):
        texts = (source.prompt, follow(encoding, source, third))
        others = (edited_ids(encoding, ids, source.name, target.name) for ids in texts)
        edited = map(tables.edited, texts, others)
        rows.append((*texts, *edited, target.answer, source.answer, third))
    for name, tables.swapped in tqdm(swaps.items(), "editing", leave=False, delay=3):
        parts = []
        for prompts, behind, edited, edited_behind, theirs, own, thirds in groups(encoding, rows):
            success = score_answers(model, prompts, theirs, edited)[0]
            kept = score_answers(model, prompts, own, edited)[0]
            answers = [one.answer for one in thirds]
            fact, _, logits = score_answers(model, behind, answers, edited_behind)
            # The other document's tokens behind its <|endoftext|>, each predicted one place before.
            tokens = [
                guess[len(ids) - len(one.prompt) : len(ids) - 1] == torch.tensor(one.prompt[1:])
                for guess, ids, one in zip(logits.argmax(-1).cpu(), behind, thirds, strict=True)
            ]
            parts.append((success, kept, fact, torch.cat(tokens)))
        success, kept, fact, tokens = map(torch.cat, zip(*parts, strict=True))
        if name == "none":
            known, predicted = fact, tokens
        every = zip(MEASURES, (success, kept, ~fact[known], ~tokens[predicted]), strict=True)
        result[name] = {what: hits.float().mean().item() for what, hits in every}
    return result


def success_of_edits(
    experiment: Experiment, folders: list[Path], how: Callable = report_pairs, most: int = 2000
) -> list[dict]:
    """A report about each run on at most so many random pairs: one of edit_success.py, or here."""

    def measure_run(folder: Path) -> dict:
        model, encoding, _ = load_model(folder / "ckpt.pt", experiment.on)
        model.tables = MeanRows(model.tables)
        return how(model, encoding, 32 if experiment.quick else most)

    return experiment.measure(how.__name__, measure_run, folders)


def edits(experiment: Experiment) -> None:
    figure, panels = plt.subplots(2, 1, figsize=(11, 6.8))
    kinds = experiment.train(pick("STEM, all", "Embformer"))
    for axes, (kind, folders) in zip(panels, kinds.items(), strict=True):
        runs = success_of_edits(experiment, folders, report_layers, 1000)
        title, swaps = f"{kind}: rows swapped in", list(runs[0])
        table = [{title: swap} for swap in swaps]
        for number, what in enumerate(MEASURES):  # means, with lines from the lowest to the highest
            shares = np.array([[run[swap][what] for swap in swaps] for run in runs])
            for row, by_run in zip(table, shares.T, strict=True):
                row[what] = spread(".1%", by_run)
            x, mean = np.arange(len(swaps)) + 0.2 * number, shares.mean(0)
            error = [mean - shares.min(0), shares.max(0) - mean]
            axes.bar(x, mean, 0.2, yerr=error, label=what, error_kw=dict(elinewidth=0.8))
        print(markdown(table) + "\n")
        axes.set_xticks(np.arange(len(swaps)) + 0.3, swaps, rotation=30)
        axes.set(ylabel="share", title=title, ylim=(0, 1.05))
    print(edits_by_names(experiment))
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=len(MEASURES))
    experiment.picture("edits", figure)


def edits_by_names(experiment: Experiment) -> str:
    """A table of edits that succeed with names of one token, of other lengths, and made-up ones."""
    table = []
    for kind, folders in experiment.train(pick("STEM, third", "STEM, all")).items():
        pairs, lengths, injected = (
            success_of_edits(experiment, folders, report)
            for report in (report_pairs, report_lengths, report_injected)
        )
        runs = {"one token": [{**run, "last": run["success"]} for run in pairs]}
        runs |= {length: [run[length] for run in lengths] for length in lengths[0]}
        runs["made up"] = [{"last": np.mean(list(run.values()))} for run in injected]
        for names, each in runs.items():
            row = {"tables in": kind, "names": names}
            for what in ("recall", *ALIGN):
                row[what] = spread(".1%", (run.get(what) for run in each))
            table.append(row)
    return markdown(table) + "\n"
