"""How often does an edit succeed, and which layers hold a fact?

One name reads another's rows, as `edit.py --source Spain --target Germany` does it, and the model
is asked for a fact in held-out words. Success: the greedy answer is the other's fact. Pairs that
share the fact (Spanish for Peru and Chile) could not fail and are left out. Where names have
another number of tokens, `last` and `average` are ways of `edit.py --align`.

    python analyze.py edits               # by layers, and by names: models trained for it
    python analyze.py edits out/ckpt.pt   # by names, for a checkpoint

By layers: rows are swapped in one layer alone, in the first k and in the last k layers that have a
table, for random pairs whose names are one token. Own fact kept: the answer still is the source's
capital. Leaks: a third country's fact that was known behind a paragraph about the source, before
the edit and not after it.
"""

import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from tiktoken import Encoding
from torch import Tensor
from tqdm import tqdm

from analysis.experiment import Experiment, pick
from analysis.pictures import markdown, spread
from common import UserError, atomic
from edit import MeanRows, edited_ids, make_editable
from model import Decoder
from text import countries
from text.tokenizer import encode
from training.checkpoints import load_model
from training.questions import score_answers

RELATIONS = ("capital", "language", "region")
MOST = 500  # random pairs of each sort, for each relation
WAYS = ("last", "average")  # of edit.ALIGN; of names of one length all are the same
MEASURES = ("success", "own fact kept", "leaks")
# Names that no country has, of one to seven tokens of the countries corpus.
INVENTED = ("Atlantis", "Narnia", "Wakanda", "Genovia", "Ruritania", "Gondor", "Mordor", "Oz")
INVENTED += ("Utopia", "Lilliput", "Krakozhia", "Sokovia", "Panem", "Oceania", "Eurasia")


class Asked(NamedTuple):
    """A question about a country, as token ids."""

    country: countries.Country
    length: int  # of the name, in tokens
    prompt: list[int]
    answer: list[int]


Pair = tuple[Asked, Asked]  # source and target


def openings(encoding: Encoding, relation: str, about: list[countries.Country]) -> list[Asked]:
    """About each country a held-out opening of a paragraph: "Country: Spain\\nIts capital is"."""
    asked = []
    for country in about:
        question = countries.questions(relation, "paragraph", country)[0]
        length = len(encoding.encode_ordinary(f" {country.name}"))
        answer = encoding.encode_ordinary(question.answer)
        asked.append(Asked(country, length, encode(encoding, question.prompt), answer))
    return asked


# A prompt, an answer, and the ids under which rows of the prompt are looked up.
Probe = tuple[list[int], list[int], list[int]]


def answered(model: Decoder, encoding: Encoding, probes: list[Probe]) -> Tensor:
    """Whether the greedy answer to each prompt is this one: [N] of booleans."""
    return score_answers(model, *zip(*probes, strict=True)).greedy


# --- by names ---


def sort_of_names(source: Asked, target: Asked) -> str:
    if source is target:
        return "no edit"
    if source.country.name in INVENTED:
        return "made up"
    if source.length == target.length == 1:
        return "one token"
    if source.length == target.length:
        return "equal length"
    return "longer source" if source.length > target.length else "longer target"


def all_pairs(encoding: Encoding, relation: str) -> dict[str, list[Pair]]:
    """Pairs of countries, and of made-up names and countries, by the sort of their names."""
    asked = openings(encoding, relation, countries.table())
    nothing = replace(countries.table()[0], capital="?", language="?", region="?")
    invented = openings(encoding, relation, [replace(nothing, name=name) for name in INVENTED])
    pairs = defaultdict(list)
    for source in [*asked, *invented]:
        for target in asked:
            if source is target or source.answer != target.answer:
                pairs[sort_of_names(source, target)].append((source, target))
    return pairs


def share_edited(model: Decoder, encoding: Encoding, pairs: list[Pair], align: str) -> float:
    """The share of pairs that answer with the target's fact after the edit, of a model whose tables
    are MeanRows."""
    probes = []
    for source, target in pairs:
        names = (source.country.name, target.country.name)
        edited = edited_ids(encoding, source.prompt, *names, align, model.tables)
        probes.append((source.prompt, target.answer, edited))
    return answered(model, encoding, probes).float().mean().item()


def report_names(model: Decoder, encoding: Encoding, most: int) -> dict:
    """The share of edits that succeed, of `most` pairs of each sort, always the same: in `parts` by
    the sort of names and what is asked for, and in `success` the mean of names of one token."""
    parts = []
    for relation in tqdm(RELATIONS, "editing", leave=False, disable=None):
        for sort, pairs in all_pairs(encoding, relation).items():
            chosen = random.Random(0).sample(pairs, min(most, len(pairs)))
            part = {"names": sort, "asked for": relation}
            for align in WAYS if sort.startswith("longer") else WAYS[:1]:
                part[align] = share_edited(model, encoding, chosen, align)
            parts.append(part)
    successes = [part["last"] for part in parts if part["names"] == "one token"]
    if not successes:
        raise UserError("no country is one token: edits are measured of models of data/countries")
    return {"success": fmean(successes), "parts": parts}


def table_by_names(title: str, reports: list[dict]) -> str:
    """What `report_names` says of runs that differ in the seed."""
    rows = []
    for parts in zip(*[report["parts"] for report in reports], strict=True):
        row = {title: parts[0]["names"], "asked for": parts[0]["asked for"]}
        for column in WAYS:
            row[column] = spread(".1%", [part.get(column) for part in parts])
        rows.append(row)
    return markdown(rows)


def measure_checkpoint(ckpt: Path, device: torch.device) -> None:
    """Print a table, and write edit_report.json beside the checkpoint."""
    print(f"measuring edits of {ckpt}: a minute for the default run\n", flush=True)
    report = report_checkpoint(ckpt, report_names, MOST, device)
    print(table_by_names("names", [report]))
    path = ckpt.with_name("edit_report.json")
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nwrote {path}")


# --- by layers ---


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


def swapped_ids(model: Decoder, encoding: Encoding, ids: list[int], pair: Pair) -> list[int]:
    """A text about the source with made-up tokens, one for each pair of a token and another one
    whose rows it reads after the edit."""
    source, target = pair
    others = edited_ids(encoding, ids, source.country.name, target.country.name)
    new = []
    for own, other in zip(ids, others, strict=True):
        new.append(own if own == other else model.tables.token([own, other]))
    return new


def swap_rows(tables: MeanRows, swapped: set[int]) -> None:
    """Give made-up tokens, each of a pair of tokens, the second one's rows in the tables numbered
    in `swapped`, and the first one's in all others."""
    rows = tables.tables.lookup(torch.tensor(tables.names))  # of each table [n, 2, W]
    chosen = [of_table[:, int(number in swapped)] for number, of_table in enumerate(rows)]
    tables.means = list(torch.stack(chosen, dim=1))  # of each pair [n_table, W]


def follow(encoding: Encoding, source: Asked, third: Asked) -> list[int]:
    """A paragraph with the source's language, and a document that asks about the third country."""
    pattern = countries.seen(countries.PARAGRAPH, "language")[0]
    sentence = countries.sentence(pattern, source.country, "language")
    return [*encode(encoding, countries.paragraph(source.country, [sentence])), *third.prompt]


def report_layers(model: Decoder, encoding: Encoding, most: int) -> dict[str, dict]:
    """What `most` random edits change, always the same, by the layers they are made in. Leaks of
    what a model never knew: NaN."""
    asked = openings(encoding, "capital", countries.table())
    single = [one for one in asked if one.length == 1]
    rng = random.Random(0)
    probes = {measure: [] for measure in MEASURES}
    for _ in range(most):
        source, target, third = rng.sample(single, 3)
        prompt = source.prompt
        edited = swapped_ids(model, encoding, prompt, (source, target))
        probes["success"].append((prompt, target.answer, edited))
        probes["own fact kept"].append((prompt, source.answer, edited))
        behind = follow(encoding, source, third)
        edited = swapped_ids(model, encoding, behind, (source, target))
        probes["leaks"].append((behind, third.answer, edited))
    report = {}
    choices = layer_choices([n for n, block in enumerate(model.blocks) if block.row_width])
    for name in tqdm(choices, "editing", leave=False, delay=3):
        swap_rows(model.tables, choices[name])
        hits = {measure: answered(model, encoding, probes[measure]) for measure in MEASURES}
        if name == "none":
            known = hits["leaks"]
        hits["leaks"] = ~hits["leaks"][known]
        report[name] = {measure: hits[measure].float().mean().item() for measure in MEASURES}
    return report


# --- the question ---


def success_of_edits(experiment: Experiment, folders: list[Path]) -> str:
    """The share of edits that succeed in runs, for names of one token."""
    reports = measure_edits(experiment, folders, report_names, MOST)
    return spread(".1%", [report["success"] for report in reports])


def measure_edits(
    experiment: Experiment, folders: list[Path], report: Callable, most: int
) -> list[dict]:
    """A report, one of the above, about each run on at most so many random pairs of each sort."""
    if experiment.quick:
        most = 32
    name = f"{report.__name__}-{most}"
    return experiment.measure(name, report_checkpoint, folders, report, most, experiment.on)


def report_checkpoint(path: Path, report: Callable, most: int, device: torch.device) -> dict:
    """A report about a checkpoint, or that of a run's folder."""
    model, encoding, _ = load_model(path / "ckpt.pt" if path.is_dir() else path, device)
    make_editable(model)
    return report(model, encoding, most)


def edits(experiment: Experiment) -> None:
    kinds = ("STEM, all",) if experiment.quick else ("STEM, third", "STEM, all")
    for kind, folders in experiment.train(pick(*kinds)).items():
        reports = measure_edits(experiment, folders, report_names, MOST)
        print(table_by_names(f"{kind}: names", reports) + "\n")

    for kind, folders in experiment.train(pick("STEM, all", "Embformer")).items():
        reports = measure_edits(experiment, folders, report_layers, 1000)
        rows = []
        for swap in reports[0]:
            row = {f"{kind}: rows swapped in": swap}
            for measure in MEASURES:
                row[measure] = spread(".1%", [report[swap][measure] for report in reports])
            rows.append(row)
        print(markdown(rows) + "\n")
