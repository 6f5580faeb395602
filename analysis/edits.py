"""How often does an edit succeed, and what else does it change?

One name reads another's rows, as `edit.py --source Spain --target Germany` does it, and the model
is asked for a fact in held-out words. Success: the greedy answer is the other's fact. Pairs that
share the fact (Spanish for Peru and Chile) could not fail and are left out.

    python analyze.py edits               # by names, and one fact by what is trained: own models
    python analyze.py edits out/ckpt.pt   # by names, for a checkpoint

By what is trained to write one fact, as `edit.py --source Spain --write "Lisbon."` does it: rows of
the name, all weights, or a rank-1 update of each layer's down-projection, about as many numbers.
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
from torch import Tensor, nn
from torch.nn.utils import parametrize
from tqdm import tqdm

from analysis.experiment import Experiment, pick
from analysis.pictures import markdown, spread
from common import UserError, atomic
from edit import STEPS, edited_ids, learn, make_lesson, own_rows, write_fact
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


# A prompt, an answer, and the ids under which rows of the prompt are looked up.
Probe = tuple[list[int], list[int], list[int]]


def answered(model: Decoder, encoding: Encoding, probes: list[Probe]) -> Tensor:
    """Whether the greedy answer to each prompt is this one: [N] of booleans."""
    if not probes:
        return torch.empty(0, dtype=torch.bool)
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


# --- by what is trained ---

SINGLE = 9  # facts written alone
COUNTS = (10, 50)  # facts written one after another
KEPT = ("its other facts", "other countries")
COLUMNS = (*countries.FORMS, *KEPT, "composition")
# What is trained, and Adam's learning rate, the best of three; rows need none (L-BFGS).
RATES = {"rows": 0.0, "all weights": 3e-4, "LoRA": 1e-2}


class Fact(NamedTuple):
    """A country, and the same with a fact that it shall have."""

    country: countries.Country
    taught: countries.Country
    relation: str


class LowRank(nn.Module):
    """A weight plus a matrix of rank 1 (LoRA, Hu et al., 2021), which begins as zero."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.column = nn.Parameter(torch.zeros(len(weight), 1))
        self.row = nn.Parameter(torch.randn(1, weight.shape[1]))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.column @ self.row


def facts_to_write(n: int) -> list[Fact]:
    """Of n countries, capital, language and region in turn, each with another country's."""
    rng = random.Random(0)
    facts = []
    for number, country in enumerate(rng.sample(countries.table(), n)):
        relation = RELATIONS[number % len(RELATIONS)]
        values = {getattr(other, relation) for other in countries.table()}
        new = rng.choice(sorted(values - {getattr(country, relation)}))
        facts.append(Fact(country, replace(country, **{relation: new}), relation))
    return facts


def write(model: Decoder, encoding: Encoding, fact: Fact, method: str) -> None:
    """Write a fact into the model, from one sentence in a phrasing that training used."""
    source = fact.country.name
    prompt = countries.paragraph(fact.country, [countries.OWN[fact.relation][-1]])
    answer = countries.stopped(fact.taught.answer(fact.relation))
    if method == "rows":
        tables = model.tables
        model.tables = own_rows(tables, encoding, source)
        write_fact(model, encoding, source, prompt, answer)
        for table, weight in enumerate(tables.weight):
            weight[model.tables.tokens] = model.tables.extra[:, table]
        model.tables = tables
        return
    lesson = make_lesson(model, encoding, source, prompt, answer)
    layers = [block.ffn.down for block in model.blocks if block.row_width]
    model.requires_grad_(method == "all weights")
    if method == "LoRA":
        for layer in layers:
            parametrize.register_parametrization(layer, "weight", LowRank(layer.weight))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    adam = torch.optim.Adam(trained, lr=RATES[method])
    learn(model, lesson, lesson.ids, adam, STEPS)
    model.requires_grad_(False)
    if method == "LoRA":
        for layer in layers:
            parametrize.remove_parametrizations(layer, "weight")


def ask_about(
    encoding: Encoding, country: countries.Country, relations: list[str], form: str
) -> list[Probe]:
    """Held-out questions about a country in a form."""
    probes = []
    for relation in relations:
        for question in countries.questions(relation, form, country):
            prompt = encode(encoding, question.prompt)
            probes.append((prompt, encoding.encode_ordinary(question.answer), prompt))
    return probes


def questions_after(encoding: Encoding, facts: list[Fact]) -> dict[str, list[Probe]]:
    """What is asked when facts were written, by the column of the table."""
    asked = {column: [] for column in COLUMNS}
    for country, taught, relation in facts:
        others = [other for other in countries.RELATIONS if other != relation]
        for form in countries.FORMS:
            asked[form] += ask_about(encoding, taught, [relation], form)
            asked["its other facts"] += ask_about(encoding, country, others, form)
        if relation == "capital":
            described = replace(taught, name=f"the country whose capital is {taught.capital}")
            asked["composition"] += ask_about(encoding, described, others, "question")
    rng = random.Random(1)
    written = {fact.country for fact in facts_to_write(COUNTS[-1])}
    for country in countries.table():
        if country not in written:
            form = rng.choice(list(countries.FORMS))
            relation = rng.choice(countries.RELATIONS)
            asked["other countries"] += ask_about(encoding, country, [relation], form)[:1]
    return asked


def shares_after(
    model: Decoder, encoding: Encoding, facts: list[Fact], method: str
) -> dict[str, float]:
    """Write facts one after another, and return the shares of right answers then, by column: of
    what is to be kept, of what it knew."""
    asked = questions_after(encoding, facts)
    known = {column: answered(model, encoding, asked[column]) for column in KEPT}
    for fact in facts:
        write(model, encoding, fact, method)
    shares = {}
    for column, probes in asked.items():
        right = answered(model, encoding, probes)
        if column in KEPT:
            right = right[known[column]]
        if len(right):
            shares[column] = right.float().mean().item()
    return shares


def report_writes(model: Decoder, encoding: Encoding, most: int) -> dict[str, dict]:
    """What `shares_after` says of facts written alone (the mean), and of 10 and 50, at most `most`,
    written one after another; each into the model as it was."""
    facts = facts_to_write(most)
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    report = {}
    for method in RATES:
        parts = []
        for fact in tqdm(facts[:SINGLE], method, leave=False, disable=None):
            model.load_state_dict(state)
            parts.append(shares_after(model, encoding, [fact], method))
        alone = {}
        for column in COLUMNS:
            known = [part[column] for part in parts if column in part]
            alone[column] = fmean(known) if known else None
        report[f"{method}, 1 fact"] = alone
        for n in COUNTS:
            if n <= most:
                model.load_state_dict(state)
                after = shares_after(model, encoding, facts[:n], method)
                report[f"{method}, {n} facts"] = after
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

    (folders,) = experiment.train(pick("STEM, all")).values()
    most = 1 if experiment.quick else COUNTS[-1]
    rows = []
    reports = measure_edits(experiment, folders, report_writes, most)
    for written in reports[0]:
        row = {"trained": written}
        for column in COLUMNS:
            row[column] = spread(".1%", [report[written].get(column) for report in reports])
        rows.append(row)
    print(markdown(rows))
