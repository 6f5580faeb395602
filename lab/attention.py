"""Kinds of attention: is one that does not grow with the length worse, on prose or facts? And can
Embformer, whose keys do not know what came before, name the value of a key (pairs)?
"""

import random
from pathlib import Path

import tiktoken

from corpora.questions import mean, score_answers
from lab.context import KEYS, SHORT, VALUES, write_documents
from lab.edits import row_with_edits
from lab.experiment import Experiment
from lab.pictures import interval, markdown
from model import Decoder
from text.tokenizer import encode

# The flags and kinds of attention of each part.
PROSE = {"learning_rate": 0.012}
LONG_PROSE = {**PROSE, "block_size": 1024, "batch_size": 2}
BEFORE = "previous:2"
PARTS = {
    "prose, 256 tokens": (
        PROSE,
        ("full", "window:64", "window:64,window:64,full", BEFORE, "linear"),
    ),
    "prose, 1,024 tokens": (LONG_PROSE, ("full", "window:64", "window:64,window:64,full")),
    "facts": ({}, ("full", "window:32", "window:32,window:32,full", BEFORE, "linear")),
    "pairs": (SHORT, ("dense", "full", "window:32,window:32,full", BEFORE, "linear")),
}


def pairs(rng: random.Random) -> str:
    """Four keys with their values, and a dozen times one of them again."""
    told = [f" Call {key} {rng.choice(VALUES)}." for key in rng.sample(KEYS, 4)]
    return "".join(told + rng.choices(told, k=12))


def values_found(model: Decoder, encoding: tiktoken.Encoding, _, count: int) -> float:
    """The share of values that a model names after the last key of so many new texts."""
    asked = []
    for seed in range(count):
        before, last = pairs(random.Random(seed)).rsplit(" Call ", 1)
        key, value = last.split(".")[0].split()
        prompt = encode(encoding, f"{before} Call {key}")[-SHORT["block_size"] + 8 :]
        asked.append((prompt, encoding.encode_ordinary(f" {value}")))
    prompts, answers = zip(*asked, strict=True)
    return mean(score_answers(model, prompts, answers).greedy)


def folder_of(experiment: Experiment, part: str) -> Path:
    """The data of a part, prepared if need be."""
    if part == "pairs":
        return write_documents(experiment, part, 30_000, pairs)
    if part == "facts":
        return experiment.data_dir
    return experiment.novel


def attention(experiment: Experiment) -> None:
    for part in ("pairs",) if experiment.quick else PARTS:
        flags, names = PARTS[part]
        if experiment.quick:
            names = names[2:3]
        data_dir = str(folder_of(experiment, part))
        kinds = {}
        for name in names:
            kind = {"ffn": "embformer", "attention": name}
            if name == "dense":
                kind = {"ffn": "dense"}
            kinds[name] = {**flags, "data_dir": data_dir, **kind}
        rows = []
        for name, folders in experiment.train(kinds).items():
            row = row_with_edits(experiment, name, folders)
            if part == "pairs":
                count = 4 if experiment.quick else 400
                shares = experiment.measure(part, values_found, folders, count)
                row["pairs found"] = interval(".1%", shares)
            rows.append(row)
        print(f"{part}:\n\n{markdown(rows)}\n")
