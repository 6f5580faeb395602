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
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from tiktoken import Encoding
from tqdm import tqdm

from analysis.experiment import Experiment, pick
from analysis.pictures import markdown, spread
from common import UserError, atomic
from edit import check_editable, edited_ids
from model import Decoder
from text import countries
from text.tokenizer import encode
from training.checkpoints import load_model
from training.questions import score_answers

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
    prompts = []
    answers = []
    table_prompts = []
    for source, target in pairs:
        names = (source.country.name, target.country.name)
        prompts.append(source.prompt)
        answers.append(target.answer)
        table_prompts.append(edited_ids(encoding, source.prompt, *names))
    scores = score_answers(model, prompts, answers, table_prompts)
    return scores.greedy.float().mean().item()


def report_edits(path: Path, most: int, device: torch.device) -> dict:
    """The share of edits that succeed in a checkpoint, or in that of a run's folder, of `most`
    pairs of each sort, always the same: in `parts` by the sort of names and what is asked for, and
    in `success` the mean of names of one token."""
    model, encoding, _ = load_model(path / "ckpt.pt" if path.is_dir() else path, device)
    check_editable(model)
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


def measure_edits(experiment: Experiment, folders: list[Path]) -> list[dict]:
    """A report about each run."""
    most = 32 if experiment.quick else MOST
    return experiment.measure(f"edits-{most}", report_edits, folders, most, experiment.on)


def success_of_edits(experiment: Experiment, folders: list[Path]) -> str:
    """The share of edits that succeed in runs, for names of one token."""
    return spread(".1%", [report["success"] for report in measure_edits(experiment, folders)])


def table_by_names(title: str, reports: list[dict]) -> str:
    """What `report_edits` says of runs that differ in the seed."""
    rows = []
    for parts in zip(*[report["parts"] for report in reports], strict=True):
        success = spread(".1%", [part["success"] for part in parts])
        names, asked_for = parts[0]["names"], parts[0]["asked for"]
        rows.append({title: names, "asked for": asked_for, "success": success})
    return markdown(rows)


def measure_checkpoint(ckpt: Path, device: torch.device) -> None:
    """Print a table, and write edit_report.json beside the checkpoint."""
    print(f"measuring edits of {ckpt}: 15 seconds for the default run\n", flush=True)
    report = report_edits(ckpt, MOST, device)
    print(table_by_names("names", [report]))
    path = ckpt.with_name("edit_report.json")
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nwrote {path}")


def edits(experiment: Experiment) -> None:
    kinds = pick("STEM, all") if experiment.quick else pick("STEM, third", "STEM, all", "Embformer")
    for name, folders in experiment.train(kinds).items():
        print(table_by_names(f"{name}: names", measure_edits(experiment, folders)) + "\n")
