"""How often does an edit succeed?

One name reads another's rows, as `edit.py --source Spain --target Germany` does it, and the model
is asked for a fact in held-out words. Success: the greedy answer is the other's fact. Pairs that
share the fact (Spanish for Peru and Chile) could not fail and are left out.

    python analyze.py edits               # models trained for it
    python analyze.py edits out/ckpt.pt   # this checkpoint
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
from edit import edited_ids
from model import Decoder
from text import countries
from text.tokenizer import encode
from training.checkpoints import load_model
from training.questions import groups, score_answers

RELATIONS = ("capital", "language", "region")
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


# A prompt, an answer, and the ids under which rows of the prompt are looked up.
Probe = tuple[list[int], list[int], list[int]]


def answered(model: Decoder, encoding: Encoding, probes: list[Probe]) -> Tensor:
    """Whether the greedy answer to each prompt is this one: [N] of booleans."""
    hits = [score_answers(model, *columns).greedy for columns in groups(encoding, probes)]
    return torch.cat([torch.empty(0, dtype=torch.bool), *hits])


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


def share_edited(model: Decoder, encoding: Encoding, pairs: list[Pair]) -> float:
    """The share of pairs that answer with the target's fact after the edit."""
    probes = []
    for source, target in pairs:
        names = (source.country.name, target.country.name)
        edited = edited_ids(encoding, source.prompt, *names)
        probes.append((source.prompt, target.answer, edited))
    return answered(model, encoding, probes).float().mean().item()


def report_names(model: Decoder, encoding: Encoding, most: int) -> dict:
    """The share of edits that succeed, of `most` pairs of each sort, always the same: in `parts` by
    the sort of names and what is asked for, and in `success` the mean of names of one token."""
    parts = []
    for relation in tqdm(RELATIONS, "editing", leave=False, disable=None):
        for sort, pairs in all_pairs(encoding, relation).items():
            chosen = random.Random(0).sample(pairs, min(most, len(pairs)))
            share = share_edited(model, encoding, chosen)
            parts.append({"names": sort, "asked for": relation, "success": share})
    successes = [part["success"] for part in parts if part["names"] == "one token"]
    if not successes:
        raise UserError("no country is one token: edits are measured of models of data/countries")
    return {"success": fmean(successes), "parts": parts}


def table_by_names(title: str, reports: list[dict]) -> str:
    """What `report_names` says of runs that differ in the seed."""
    rows = []
    for parts in zip(*[report["parts"] for report in reports], strict=True):
        row = {title: parts[0]["names"], "asked for": parts[0]["asked for"]}
        row["success"] = spread(".1%", [part["success"] for part in parts])
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
        most = min(most, 32)
    name = f"{report.__name__}-{most}"
    return experiment.measure(name, report_checkpoint, folders, report, most, experiment.on)


def report_checkpoint(path: Path, report: Callable, most: int, device: torch.device) -> dict:
    """A report about a checkpoint, or that of a run's folder."""
    model, encoding, _ = load_model(path / "ckpt.pt" if path.is_dir() else path, device)
    return report(model, encoding, most)


def edits(experiment: Experiment) -> None:
    kinds = ("STEM, all",) if experiment.quick else ("STEM, third", "STEM, all")
    for kind, folders in experiment.train(pick(*kinds)).items():
        reports = measure_edits(experiment, folders, report_names, MOST)
        print(table_by_names(f"{kind}: names", reports) + "\n")
