"""How often does an edit succeed? Of one checkpoint: `python analyze.py edits out/ckpt.pt`.

One name reads another's rows, as `edit.py --source Spain --target Germany` does it, and the model
is asked for a fact in held-out words. Success: the greedy answer is the other's fact. Pairs that
share the fact (Spanish for Peru and Chile) could not fail and are left out.
"""

import json
import random
from collections import namedtuple
from dataclasses import replace
from operator import eq, gt, lt
from pathlib import Path
from statistics import fmean

import torch
from tiktoken import Encoding
from tqdm import tqdm

from common import UserError, atomic
from edit import ALIGN, MeanRows, edited_ids
from model import Decoder
from text import countries
from text.tokenizer import encode
from training.checkpoints import load_model
from training.questions import groups, score_answers
from training.records import markdown

RELATIONS = ("capital", "language", "region")
# Names that no country has, of one to seven tokens of the countries corpus.
INVENTED = ("Atlantis", "Narnia", "Wakanda", "Genovia", "Ruritania", "Gondor", "Mordor", "Oz")
INVENTED += ("Utopia", "Lilliput", "Krakozhia", "Sokovia", "Panem", "Oceania", "Eurasia")
# A country's name, its length in tokens, and as token ids a question about it with its answer.
Asked = namedtuple("Asked", ("name", "length", "prompt", "answer"))
Pairs = list[tuple[Asked, Asked]]  # source and target of each edit


def openings(encoding: Encoding, relation: str, table: list | None = None) -> list[Asked]:
    """About each Country a held-out opening of a paragraph: "Country: Spain\\nIts capital is"."""
    asked, plain = [], encoding.encode_ordinary
    for country in table or countries.table():
        question = countries.questions(relation, "paragraph", country)[0]
        ids = (encode(encoding, question.prompt), plain(question.answer))
        asked.append(Asked(country.name, len(plain(f" {country.name}")), *ids))
    return asked


def single_tokens(encoding: Encoding, relation: str) -> list[Asked]:
    """Those of `openings` named by one token. UserError: fewer than 3 have other answers."""
    single = [one for one in openings(encoding, relation) if one.length == 1]
    if len({tuple(one.answer) for one in single}) < 3:
        raise UserError("too few countries are one token: take a model of data/countries")
    return single


def differing(sources: list[Asked], targets: list[Asked]) -> Pairs:
    return [(a, b) for a in sources for b in targets if a.answer != b.answer]


def successes(
    model: Decoder, encoding: Encoding, pairs: Pairs, most: int | None = None, align: str = "last"
) -> list[bool]:
    """For each pair, or for `most` random ones, always the same: does the model, whose tables are
    MeanRows, asked about the source, greedily answer with the target's fact after the edit?"""
    if most and most < len(pairs):
        pairs = random.Random(0).sample(pairs, most)
    hits, parts = [], list(groups(encoding, pairs))
    for sources, targets in tqdm(parts, f"edits, {align}", leave=False, disable=None):
        edited = [
            edited_ids(encoding, source.prompt, source.name, target.name, align, model.tables)
            for source, target in zip(sources, targets, strict=True)
        ]
        prompts, answers = [one.prompt for one in sources], [one.answer for one in targets]
        hits += score_answers(model, prompts, answers, edited)[0].tolist()
    return hits


def report_pairs(model: Decoder, encoding: Encoding, most: int | None = None) -> dict:
    """Edit every country into every other, for names of a single token (`most`: random pairs of a
    relation). Returns the number of `countries`, and overall and under `relations` the number of
    `pairs`, `recall` (share of greedy answers that are right before any edit) and `success`."""

    def shares(recall: list[bool], success: list[bool]) -> dict[str, float]:
        return {"pairs": len(success), "recall": fmean(recall), "success": fmean(success)}

    relations, recalls, edits = {}, [], []
    for relation in RELATIONS:
        single = single_tokens(encoding, relation)
        recall = successes(model, encoding, [(one, one) for one in single])
        success = successes(model, encoding, differing(single, single), most)
        relations[relation] = shares(recall, success)
        recalls, edits = recalls + recall, edits + success
    return {"countries": len(single), **shares(recalls, edits), "relations": relations}


def report_lengths(model: Decoder, encoding: Encoding, most: int | None = None) -> dict:
    """Edits where a name has several tokens, asked for the capital: the number of pairs, and for
    each way of ALIGN the share of them that succeed."""
    asked, result = openings(encoding, "capital"), {}
    every = [(a, b) for a, b in differing(asked, asked) if a.length + b.length > 2]
    for kind, compare in {"equal length": eq, "longer source": gt, "longer target": lt}.items():
        pairs, part = [(a, b) for a, b in every if compare(a.length, b.length)], {}
        for align in ALIGN:
            hits = successes(model, encoding, pairs, most, align)
            part |= {"pairs": len(hits), align: fmean(hits) if hits else None}
        result[kind] = part
    return result


def report_injected(model: Decoder, encoding: Encoding, most: int | None = None) -> dict:
    """Made-up names read every country's rows: for each relation the share of successes."""
    invented, shares = [replace(countries.table()[0], name=name) for name in INVENTED], {}
    for relation in RELATIONS:
        names = [one._replace(answer=None) for one in openings(encoding, relation, invented)]
        pairs = differing(names, openings(encoding, relation))
        shares[relation] = fmean(successes(model, encoding, pairs, most))
    return shares


def measure_checkpoint(ckpt: Path, device: torch.device) -> None:
    """Measure all pairs, print a table, and write edit_report.json beside the checkpoint."""
    model, encoding, _ = load_model(ckpt, device)
    model.tables = MeanRows(model.tables)
    single = single_tokens(encoding, "capital")
    if not any(successes(model, encoding, [(one, one) for one in single])):
        raise UserError(f"{ckpt} knows no capital, so there is nothing to edit: train it longer")
    print(f"measuring edits of {ckpt}: 3 minutes for the default run\n", flush=True)
    result, rows = report_pairs(model, encoding), []
    result["lengths"] = report_lengths(model, encoding)
    result["injected"] = report_injected(model, encoding)
    parts = [("one token", *part) for part in result["relations"].items()]
    parts += [("one token", "all three", result)]
    parts += [(names, "capital", part) for names, part in result["lengths"].items()]
    parts += [("made up", relation, {"last": x}) for relation, x in result["injected"].items()]
    for names, relation, part in parts:
        part = {"last": part.get("success"), **part}
        row = {"names": names, "asked for": relation, "pairs": str(part.get("pairs", ""))}
        for what in ("recall", *ALIGN):
            row[what] = "" if part.get(what) is None else f"{part[what]:.1%}"
        rows.append(row)
    print(markdown(rows))
    path = ckpt.with_name("edit_report.json")
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\nwrote {path}")
