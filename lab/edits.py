"""How often does an edit succeed?

One name reads another's rows, as `edit.py --source Spain --target Germany` does it (which spares a
name's everyday words, such as " of"; here all its tokens are swapped), and the model is asked for a
fact in held-out words. Success: the greedy answer is the other's fact. Pairs that share the fact
(Spanish for Peru and Chile) could not fail and are left out. Names of unequal length are aligned in
each way of `edit.py --align`; where they are equal, all but averages are the same.

The control: the name keeps its rows, and its input embedding is the other's (`embedding`), which a
dense model has, too. Or does the answer remain the name's own (`own fact`)?

    python lab/analyze.py edits               # models trained for it
    python lab/analyze.py edits out/ckpt.pt   # this checkpoint
"""

import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from tiktoken import Encoding
from torch import Tensor
from tqdm import tqdm

from common import UserError
from corpora import countries
from corpora.questions import mean, score_answers
from corpora.recall import has_own_rows
from lab.experiment import Experiment, Kinds, last_start, pick
from lab.pictures import interval, markdown
from lab.runs import row
from model import Decoder
from tables.extra import mean_rows
from text.tokenizer import encode
from training.checkpoints import load_model
from training.edits import ALIGNMENTS, check_editable, edited_ids, spellings
from training.records import read_run

RELATIONS = ("capital", "language", "region")
CONTROLS = ("embedding", "own fact")
MOST = 500  # random pairs of each sort, for each relation
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


def answered_after_edit(
    model: Decoder, encoding: Encoding, pairs: list[Pair], how: str = "copy"
) -> Tensor:
    """Which pairs answer with the target's fact after an edit that aligns names as `--align how`:
    [N] bool. With CONTROLS, the prompt has the target's name, and rows are the source's."""
    tables = model.tables
    targets = [spellings(encoding, target.country.name) for _, target in pairs]
    if how == "average":
        model.tables = mean_rows(tables, [tokens for both in targets for tokens in both])
        means = [[mean] for mean in model.tables.ids]
        targets = list(zip(means[::2], means[1::2], strict=True))
    prompts = [source.prompt for source, _ in pairs]
    answers = [(source if how == "own fact" else target).answer for source, target in pairs]
    table_prompts = [
        edited_ids(encoding, source.prompt, source.country.name, both, how)
        for (source, _), both in zip(pairs, targets, strict=True)
    ]
    if how in CONTROLS:
        prompts, table_prompts = table_prompts, prompts
    greedy = score_answers(model, prompts, answers, table_prompts).greedy
    model.tables = tables
    return greedy


def report_edits(model: Decoder, encoding: Encoding, _, most: int) -> dict:
    """The share of edits that succeed in a model, of `most` pairs of each sort, always the same: in
    `parts` by the sort of names, what is asked for and, of unequal lengths, their alignment, and in
    `success` the mean of names of one token; None where rows do not belong to names."""
    parts = []
    if not has_own_rows(model):
        return {"success": None, "parts": parts}
    for relation in tqdm(RELATIONS, "editing", leave=False, disable=None):
        for sort, pairs in all_pairs(encoding, relation).items():
            part = {"names": sort, "asked for": relation}
            some = random.Random(0).sample(pairs, min(most, len(pairs)))
            for how in (*ALIGNMENTS, *CONTROLS):
                part[how] = None
                if how in ("copy", *CONTROLS) or sort.startswith("longer"):
                    part[how] = mean(answered_after_edit(model, encoding, some, how))
            parts.append(part)
    successes = [part["copy"] for part in parts if part["names"] == "one token"]
    if not successes:
        raise UserError("no country is one token: edits are measured of models of data/countries")
    return {"success": fmean(successes), "parts": parts}


def measure_edits(experiment: Experiment, folders: list[Path]) -> list[dict]:
    """A report about each run."""
    most = 32 if experiment.quick else MOST
    return experiment.measure(f"edits-{most}", report_edits, folders, most)


def table_with_edits(experiment: Experiment, kinds: Kinds) -> str:
    """A table of trained kinds, and of the edits that succeed in them."""
    groups = experiment.train(kinds)
    return markdown([row_with_edits(experiment, name, groups[name]) for name in groups])


def row_with_edits(experiment: Experiment, name: str, folders: list[Path]) -> dict[str, str]:
    """A row about runs of a kind; where rows belong to names of countries, with the share of edits
    that succeed, for names of one token."""
    runs = [read_run(folder) for folder in folders]
    cells = row(name, runs)
    corpora = {meta["corpus"] for meta in last_start(runs[0])["data"]}
    successes = []
    if cells["recalled"] and "countries" in corpora:
        successes = [report["success"] for report in measure_edits(experiment, folders)]
    return {**cells, "edits that succeed": interval(".1%", successes)}


def table(reports: list[list[dict]]) -> str:
    """A table of the parts that runs, which differ in the seed, have in common."""
    rows = []
    for parts in zip(*reports, strict=True):
        row = parts[0].copy()
        for title, value in row.items():
            if not isinstance(value, str):
                row[title] = interval(".1%", [part[title] for part in parts])
        rows.append(row)
    return markdown(rows)


def measure_checkpoint(ckpt: Path, device: torch.device) -> None:
    model, encoding, checkpoint = load_model(ckpt, device)
    check_editable(model)
    corpora = {meta["corpus"] for meta in checkpoint["data"]}
    if corpora and not corpora & countries.ABOUT_COUNTRIES:
        print(f"note: {ckpt} is of other text, but asked for facts about the countries\n")
    print(table([report_edits(model, encoding, checkpoint, MOST)["parts"]]))


def edits(experiment: Experiment) -> None:
    experiment.need_countries()
    kinds = pick("STEM, all") if experiment.quick else pick("STEM, third", "STEM, all", "Embformer")
    groups = experiment.train(kinds)
    for name, folders in groups.items():
        reports = measure_edits(experiment, folders)
        print(f"{name}:\n\n{table([report['parts'] for report in reports])}\n")
