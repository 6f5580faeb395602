"""How often does an edit succeed, which layers hold a fact, and what else does an edit change?

One name reads another's rows, as `edit.py --source Spain --target Germany` does it, and the model
is asked for a fact in held-out words. Success: the greedy answer is the other's fact. Pairs that
share the fact (Spanish for Peru and Chile) could not fail and are left out.

    python analyze.py edits               # by layers, and by names: models trained for it
    python analyze.py edits out/ckpt.pt   # all pairs of countries, for a checkpoint

By layers: rows are swapped in one layer alone, in the first k and in the last k layers that have a
table, for random pairs whose names are one token. Own fact kept: the answer still is the source's
capital. Leaks, in a second document behind a paragraph about the source: a third country's fact,
or the next tokens, that were right before the edit and are not after it.
"""

import json
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from tiktoken import Encoding
from torch import Tensor
from tqdm import tqdm

from analysis.experiment import Experiment, pick
from analysis.pictures import markdown, plt, spread
from common import UserError, atomic
from edit import ALIGN, MeanRows, edited_ids
from model import Decoder
from tables.tables import Tables
from text import countries
from text.tokenizer import encode
from training.checkpoints import load_model
from training.questions import groups, score_answers

RELATIONS = ("capital", "language", "region")
MEASURES = ("success", "own fact kept", "leaks: another's fact", "leaks: next tokens")
# Names that no country has, of one to seven tokens of the countries corpus.
INVENTED = ("Atlantis", "Narnia", "Wakanda", "Genovia", "Ruritania", "Gondor", "Mordor", "Oz")
INVENTED += ("Utopia", "Lilliput", "Krakozhia", "Sokovia", "Panem", "Oceania", "Eurasia")


class Asked(NamedTuple):
    """A question about a country, as token ids."""

    name: str
    length: int  # of the name, in tokens
    prompt: list[int]
    answer: list[int]


# --- questions and pairs ---


def openings(encoding: Encoding, relation: str, table: list | None = None) -> list[Asked]:
    """About each country a held-out opening of a paragraph: "Country: Spain\\nIts capital is"."""
    asked = []
    for country in table or countries.table():
        question = countries.questions(relation, "paragraph", country)[0]
        length = len(encoding.encode_ordinary(f" {country.name}"))
        answer = encoding.encode_ordinary(question.answer)
        asked.append(Asked(country.name, length, encode(encoding, question.prompt), answer))
    return asked


def single_tokens(encoding: Encoding, relation: str) -> list[Asked]:
    """Those of `openings` named by one token. UserError: fewer than 3 have other answers."""
    single = [asked for asked in openings(encoding, relation) if asked.length == 1]
    if len({tuple(asked.answer) for asked in single}) < 3:
        raise UserError("too few countries are one token: take a model of data/countries")
    return single


def differing(sources: list[Asked], targets: list[Asked]) -> list[tuple[Asked, Asked]]:
    return [(a, b) for a in sources for b in targets if a.answer != b.answer]


def successes(
    model: Decoder,
    encoding: Encoding,
    pairs: list[tuple[Asked, Asked]],
    most: int | None = None,
    align: str = "last",
) -> list[bool]:
    """For each pair of source and target, or for `most` random ones, always the same: does the
    model, whose tables are MeanRows, asked about the source, greedily answer with the target's fact
    after the edit?"""
    if most and most < len(pairs):
        pairs = random.Random(0).sample(pairs, most)
    hits = []
    batches = list(groups(encoding, pairs))
    for sources, targets in tqdm(batches, f"edits, {align}", leave=False, disable=None):
        prompts = [source.prompt for source in sources]
        answers = [target.answer for target in targets]
        edited = []
        for source, target in zip(sources, targets, strict=True):
            names = (source.name, target.name)
            edited.append(edited_ids(encoding, source.prompt, *names, align, model.tables))
        hits += score_answers(model, prompts, answers, edited)[0].tolist()
    return hits


# --- reports by names, of a model whose tables are MeanRows ---


def report_pairs(model: Decoder, encoding: Encoding, most: int | None = None) -> dict:
    """Edit every country into every other, for names of a single token (`most`: random pairs of a
    relation). Returns the number of `countries`, and overall and under `relations` the number of
    `pairs`, `recall` (share of greedy answers that are right before any edit) and `success`."""
    relations, all_recalls, all_edits = {}, [], []
    for relation in RELATIONS:
        single = single_tokens(encoding, relation)
        recalls = successes(model, encoding, [(asked, asked) for asked in single])
        edits = successes(model, encoding, differing(single, single), most)
        relations[relation] = shares(recalls, edits)
        all_recalls += recalls
        all_edits += edits
    overall = shares(all_recalls, all_edits)
    return {"countries": len(single), **overall, "relations": relations}


def shares(recalls: list[bool], edits: list[bool]) -> dict[str, float]:
    return {"pairs": len(edits), "recall": fmean(recalls), "success": fmean(edits)}


def report_lengths(model: Decoder, encoding: Encoding, most: int | None = None) -> dict:
    """Edits where a name has several tokens, asked for the capital: the number of pairs, and for
    each way of ALIGN the share of them that succeed."""
    asked = openings(encoding, "capital")
    several = [(a, b) for a, b in differing(asked, asked) if a.length + b.length > 2]
    comparisons = {
        "equal length": operator.eq,
        "longer source": operator.gt,
        "longer target": operator.lt,
    }
    report = {}
    for kind, compare in comparisons.items():
        pairs = [(a, b) for a, b in several if compare(a.length, b.length)]
        report[kind] = {"pairs": min(len(pairs), most or len(pairs))}
        for align in ALIGN:
            hits = successes(model, encoding, pairs, most, align)
            report[kind][align] = fmean(hits) if hits else None
    return report


def report_injected(model: Decoder, encoding: Encoding, most: int | None = None) -> dict:
    """Made-up names read every country's rows: for each relation the share of successes."""
    invented = [replace(countries.table()[0], name=name) for name in INVENTED]
    report = {}
    for relation in RELATIONS:
        sources = [asked._replace(answer=[]) for asked in openings(encoding, relation, invented)]
        pairs = differing(sources, openings(encoding, relation))
        report[relation] = fmean(successes(model, encoding, pairs, most))
    return report


def measure_checkpoint(ckpt: Path, device: torch.device) -> None:
    """Measure all pairs, print a table, and write edit_report.json beside the checkpoint."""
    model, encoding, _ = load_model(ckpt, device)
    model.tables = MeanRows(model.tables)
    single = single_tokens(encoding, "capital")
    if not any(successes(model, encoding, [(asked, asked) for asked in single])):
        raise UserError(f"{ckpt} knows no capital, so there is nothing to edit: train it longer")
    print(f"measuring edits of {ckpt}: 3 minutes for the default run\n", flush=True)
    report = report_pairs(model, encoding)
    report["lengths"] = report_lengths(model, encoding)
    report["injected"] = report_injected(model, encoding)

    rows = []
    for relation, part in report["relations"].items():
        rows.append(edits_row("one token", relation, {**part, "last": part["success"]}))
    rows.append(edits_row("one token", "all three", {**report, "last": report["success"]}))
    for names, part in report["lengths"].items():
        rows.append(edits_row(names, "capital", part))
    for relation, share in report["injected"].items():
        rows.append(edits_row("made up", relation, {"last": share}))
    print(markdown(rows))
    path = ckpt.with_name("edit_report.json")
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nwrote {path}")


def edits_row(names: str, relation: str, part: dict) -> dict[str, str]:
    pairs = str(part.get("pairs", ""))
    return {"names": names, "asked for": relation, "pairs": pairs, **shares_cells([part])}


def shares_cells(parts: list[dict]) -> dict[str, str]:
    """Of reports about runs, what is recalled, and which edits succeed by the way of ALIGN."""
    columns = ("recall", *ALIGN)
    return {column: spread(".1%", [part.get(column) for part in parts]) for column in columns}


# --- a report by layers ---


class SwappedRows(Tables):
    """Tables with made-up tokens behind the vocabulary: each has another token's row in the tables
    numbered in `swapped`, and its own token's in the others."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables.vocab_size, tables.width)
        self.tables = tables
        self.weight = tables.weight
        self.swapped: set[int] = set()
        self.made_up: dict[tuple[int, int], int] = {}  # (own, other): made-up token

    def edited(self, own_ids: list[int], other_ids: list[int]) -> list[int]:
        """The ids of a text that reads, in the swapped tables, the rows of the others."""
        ids = []
        for own, other in zip(own_ids, other_ids, strict=True):
            new = self.vocab_size + len(self.made_up)
            ids.append(own if own == other else self.made_up.setdefault((own, other), new))
        return ids

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        pairs = [(token, token) for token in range(self.vocab_size)]
        own, other = torch.tensor([*pairs, *self.made_up]).T  # [V + made up] each
        ids = ids.cpu()
        own_rows = self.tables.lookup(own[ids])
        other_rows = self.tables.lookup(other[ids])
        for table, rows in enumerate(zip(own_rows, other_rows, strict=True)):
            yield rows[1] if table in self.swapped else rows[0]  # [B, T, W]


class Edit(NamedTuple):
    """An edit whose effects are measured, in two texts."""

    prompt: list[int]  # about the source
    edited: list[int]  # the ids to look up tables under
    target: list[int]  # the answer if the edit succeeds
    source: list[int]  # ... and if it changes nothing
    behind: list[int]  # a paragraph about the source, and a question about a third country
    edited_behind: list[int]
    third: Asked


def layer_choices(layers: list[int]) -> dict[str, set[int]]:
    """The numbers of the tables to swap, by the name of the choice; table n is of layers[n]."""
    n = len(layers)
    choices = {"none": set()}
    for number, layer in enumerate(layers):
        choices[f"layer {layer}"] = {number}
    for k in range(2, n):
        choices[f"first {k}"] = set(range(k))
    for k in range(2, n):
        choices[f"last {k}"] = set(range(n - k, n))
    choices["all"] = set(range(n))
    return choices


def triples(encoding: Encoding, number: int) -> list[list[Asked]]:
    """Random sources, targets and third countries whose capitals all differ, always the same."""
    single = single_tokens(encoding, "capital")
    rng = random.Random(0)
    chosen = []
    while len(chosen) < number:
        three = rng.sample(single, 3)
        if len({tuple(asked.answer) for asked in three}) == 3:
            chosen.append(three)
    return chosen


def follow(encoding: Encoding, source: Asked, third: Asked) -> list[int]:
    """A paragraph with the source's language, and a document that asks about the third country."""
    country = next(country for country in countries.table() if country.name == source.name)
    pattern = countries.seen(countries.PARAGRAPH, "language")[0]
    sentence = countries.sentence(pattern, country, "language")
    return [*encode(encoding, countries.paragraph(country, [sentence])), *third.prompt]


def report_layers(model: Decoder, encoding: Encoding, most: int) -> dict[str, dict]:
    """What an edit changes, by the layers it is made in. Leaks of what a model never knew: NaN."""
    tables = SwappedRows(model.tables)
    model.tables = tables
    edits = []
    for source, target, third in triples(encoding, most):
        behind = follow(encoding, source, third)
        edited = []
        for ids in (source.prompt, behind):
            others = edited_ids(encoding, ids, source.name, target.name)
            edited.append(tables.edited(ids, others))
        edits.append(
            Edit(source.prompt, edited[0], target.answer, source.answer, behind, edited[1], third)
        )
    report = {}
    choices = layer_choices([n for n, block in enumerate(model.blocks) if block.row_width])
    for name in tqdm(choices, "editing", leave=False, delay=3):
        tables.swapped = choices[name]
        success, kept, fact, tokens = effects(model, encoding, edits)
        if name == "none":
            known, predicted = fact, tokens
        hits = (success, kept, ~fact[known], ~tokens[predicted])
        means = [hit.float().mean().item() for hit in hits]
        report[name] = dict(zip(MEASURES, means, strict=True))
    return report


def effects(model: Decoder, encoding: Encoding, edits: list[Edit]) -> list[Tensor]:
    """Of each edit, as booleans, whether the answer is the target's fact, and the source's, and the
    third country's fact is known behind it [N each], and which of all next tokens behind it are."""
    parts = []
    for columns in groups(encoding, edits):
        batch = Edit(*columns)  # of lists
        success = score_answers(model, batch.prompt, batch.target, batch.edited)[0]
        kept = score_answers(model, batch.prompt, batch.source, batch.edited)[0]
        answers = [asked.answer for asked in batch.third]
        fact, _, logits = score_answers(model, batch.behind, answers, batch.edited_behind)
        guesses = logits.argmax(-1).cpu()  # [N, T], each of the next token
        right = []
        for guess, ids, asked in zip(guesses, batch.behind, batch.third, strict=True):
            # The other document's tokens behind its <|endoftext|>, predicted one place before.
            begin = len(ids) - len(asked.prompt)
            right.append(guess[begin : len(ids) - 1] == torch.tensor(asked.prompt[1:]))
        parts.append((success, kept, fact, torch.cat(right)))
    return [torch.cat(column) for column in zip(*parts, strict=True)]


# --- the question ---


def success_of_edits(
    experiment: Experiment, folders: list[Path], report: Callable = report_pairs, most: int = 2000
) -> list[dict]:
    """A report, one of the above, about each run on at most so many random pairs."""
    if experiment.quick:
        most = 32
    name = f"{report.__name__}-{most}"
    return experiment.measure(name, report_run, folders, report, most, experiment.on)


def report_run(folder: Path, report: Callable, most: int, device: torch.device) -> dict:
    model, encoding, _ = load_model(folder / "ckpt.pt", device)
    model.tables = MeanRows(model.tables)
    return report(model, encoding, most)


def edits(experiment: Experiment) -> None:
    figure, panels = plt.subplots(2, 1, figsize=(11, 6.8))
    groups = experiment.train(pick("STEM, all", "Embformer"))
    for axes, (kind, folders) in zip(panels, groups.items(), strict=True):
        reports = success_of_edits(experiment, folders, report_layers, 1000)
        swaps = list(reports[0])
        rows = [{f"{kind}: rows swapped in": swap} for swap in swaps]
        for number, measure in enumerate(MEASURES):
            found = [[report[swap][measure] for swap in swaps] for report in reports]
            found = np.array(found)  # [runs, swaps]
            for row, by_run in zip(rows, found.T, strict=True):
                row[measure] = spread(".1%", by_run)
            draw_bars(axes, number, measure, found)
        print(markdown(rows) + "\n")
        axes.set_xticks(np.arange(len(swaps)) + 0.3, swaps, rotation=30)
        axes.set(ylabel="share", title=f"{kind}: rows swapped in", ylim=(0, 1.05))
    print(edits_by_names(experiment))
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=len(MEASURES))
    experiment.picture("edits", figure)


def draw_bars(axes: plt.Axes, number: int, measure: str, found: np.ndarray) -> None:
    """Bars of the means of a measure [runs, swaps], with lines from the lowest to the highest."""
    mean = found.mean(0)
    error = [mean - found.min(0), found.max(0) - mean]
    x = np.arange(len(mean)) + 0.2 * number
    axes.bar(x, mean, 0.2, yerr=error, label=measure, error_kw={"elinewidth": 0.8})


def edits_by_names(experiment: Experiment) -> str:
    """A table of edits that succeed with names of one token, of other lengths, and made-up ones."""
    rows = []
    kinds = ("STEM, all",) if experiment.quick else ("STEM, third", "STEM, all")
    for kind, folders in experiment.train(pick(*kinds)).items():
        pairs = success_of_edits(experiment, folders, report_pairs)
        lengths = success_of_edits(experiment, folders, report_lengths)
        injected = success_of_edits(experiment, folders, report_injected)
        by_names = {"one token": [{**report, "last": report["success"]} for report in pairs]}
        for length in lengths[0]:
            by_names[length] = [report[length] for report in lengths]
        by_names["made up"] = [{"last": fmean(report.values())} for report in injected]
        for names, parts in by_names.items():
            rows.append({"tables in": kind, "names": names, **shares_cells(parts)})
    return markdown(rows) + "\n"
