"""What does a longer context give a model with token tables?

The parameters that contexts of real text read, rows of their distinct tokens included: nothing is
trained. And a needle in a haystack: a sentence as " Call Anna tiger." stands in the prose of a
novel, and models learn to complete it when it comes again, first in short documents, where that
happens often, then (`--stage context`) in longer ones.
"""

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import numpy as np
import tiktoken
import torch

from lab.costs import SMALL, Costs
from lab.experiment import (
    MAIN,
    Experiment,
    Kinds,
    best_learning_rates,
    last_checkpoint,
    pick,
)
from lab.pictures import interval, markdown
from model import Decoder, ModelConfig
from text import bpe
from text.dataset import open_tokens, read_meta, read_tokenizer
from text.download import MOBY_DICK
from text.writer import write_dataset
from training.settings import inherited_shape

CONTEXTS = [1024, 4096, 32_768]
NAMES = "Anna Boris Clara David Elena Felix Greta Henry Irene James Karen Louis Maria Nina Oscar"
WORDS = (
    "tiger apple silver river candle hammer violin desert butter mirror basket anchor garden "
    "pepper window rocket carpet ladder monkey orange pillow rabbit saddle ticket velvet walnut "
    "yellow zipper bridge castle dragon engine"
)
KEYS = NAMES.split()
VALUES = WORDS.split()
# The first stage, on 30,000 documents of 48 words in which a needle comes 8 times again, and the
# second, on 7,000 of 288 words in which it comes twice again.
SHORT = {
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 64,
    "block_size": 128,
    "doc_mask": True,
    "batch_size": 16,
    "max_iters": 1500,
    "eval_interval": 750,
}
LONG = {
    "stage": "context",
    "block_size": 512,
    "batch_size": 8,
    "max_iters": 800,
    "eval_interval": 400,
    "learning_rate": 1e-3,
}
HAYSTACKS = (128, 512, 1024, 2048)  # tokens
DEPTHS = 5  # parts of a haystack, in each of which needles are asked for


def context(experiment: Experiment) -> None:
    parameters_read(experiment)
    needles(experiment)


# --- parameters read ---


def distinct_tokens(ids: np.ndarray, length: int) -> list[int]:
    """How many tokens differ in each of the contexts that follow each other in ids [T]."""
    starts = range(0, len(ids) - length + 1, length)
    return [len(np.unique(ids[start : start + length])) for start in starts]


def parameters_read(experiment: Experiment) -> None:
    """Table of the first measurement: on the novel; with --quick on --data_dir."""
    folder, contexts = experiment.data_dir, [64, 256]
    if not experiment.quick:
        folder, contexts = experiment.novel, CONTEXTS
    meta = read_meta(folder)
    ids = open_tokens(folder, "train", meta)
    costs = {}
    for name, flags in MAIN.items():
        costs[name] = Costs(ModelConfig(vocab_size=meta["vocab_size"], **SMALL, **flags))
    shortest = {}
    rows = []
    for length in contexts:
        count = float(np.mean(distinct_tokens(ids, length)))
        row = {"context": f"{length:,}", "distinct tokens": f"{count:,.0f}"}
        for name in costs:
            read = costs[name].params_read(count)
            shortest.setdefault(name, read)
            row[name] = f"{read / 1e6:.2f} M ({read / shortest[name]:.2f})"
        rows.append(row)
    print(f"Parameters read in a context of {folder.name} (over those of the shortest):\n")
    print(markdown(rows))


# --- texts with needles ---


@cache
def prose(held_out: bool) -> list[str]:
    """The words of the novel: of its first nine tenths, or of what is held out."""
    words = []
    for line in MOBY_DICK.read_text(encoding="utf-8").splitlines():
        words += json.loads(line)["text"].split()
    cut = len(words) * 9 // 10
    return words[cut:] if held_out else words[:cut]


def document(rng: random.Random, n_word: int, repeats: int) -> str:
    """Words of prose, a needle among them, and `repeats` times after it the same sentence."""
    words = prose(held_out=False)
    start = rng.randrange(len(words) - n_word)
    parts = words[start : start + n_word]
    sentence = f"Call {rng.choice(KEYS)} {rng.choice(VALUES)}."
    told = rng.randint(0, n_word)
    parts.insert(told, sentence)
    for _ in range(repeats):
        parts.insert(rng.randint(told + 1, len(parts)), sentence)
    return " " + " ".join(parts)


def write_documents(
    experiment: Experiment,
    name: str,
    n_document: int,
    write: Callable[[random.Random], str],
    tokenizer_of: Path | None = None,
) -> Path:
    """Prepare a folder of so many documents, unless it is there. They are made by `write`, and
    encoded by the tokenizer of another folder, or one of their own. One in 20 is for validation."""
    folder = experiment.out_dir / "texts" / name
    if (folder / "meta.json").exists():
        return folder
    if experiment.quick:
        n_document //= 100
    rng = random.Random(name)
    texts = [write(rng) for _ in range(n_document)]
    if tokenizer_of:
        encoding = read_tokenizer(tokenizer_of, read_meta(tokenizer_of))
    else:
        encoding = bpe.train(texts, vocab_size=1024)
    n_val = n_document // 20
    documents = [("val", text) for text in texts[:n_val]]
    documents += [("train", text) for text in texts[n_val:]]
    write_dataset(folder, documents, encoding, corpus=name)
    return folder


def haystack(
    rng: random.Random, encoding: tiktoken.Encoding, ids: list[int], length: int, depth: float
) -> tuple[list[int], int]:
    """A prompt of `length` tokens, the question at its end, and the first token of the answer. The
    prose is from `ids`, with a needle at `depth` (0: the beginning, 1: the end)."""
    key, value = rng.choice(KEYS), rng.choice(VALUES)
    told = encoding.encode_ordinary(f" Call {key} {value}.")
    question = encoding.encode_ordinary(f" Call {key}")
    n_prose = length - 1 - len(told) - len(question)
    start = rng.randrange(len(ids) - n_prose)
    place = start + round(depth * n_prose)
    before, after = ids[start:place], ids[place : start + n_prose]
    prompt = [encoding.eot_token, *before, *told, *after, *question]
    return prompt, encoding.encode_ordinary(f" {value}")[0]


# --- needles found ---


@torch.inference_mode()
def needles_found(model: Decoder, encoding: tiktoken.Encoding, _, count: int) -> list[list[bool]]:
    """Which of `count` needles, from the beginning of the haystack to its end, a model names in
    each of HAYSTACKS. For those longer than it was trained on, positions are slowed down as
    `--stage context` does it."""
    ids = encoding.encode_ordinary(" ".join(prose(held_out=True)))
    trained = asdict(model.config)
    found = []
    for length in HAYSTACKS:
        shape = trained
        if length > trained["block_size"]:
            shape = inherited_shape({"stage": "context", "block_size": length}, trained)
        model.config = ModelConfig(**{**shape, "block_size": length})
        rng = random.Random(length)  # all models are asked the same
        hits = []
        for number in range(count):
            depth = (number + rng.random()) / count
            prompt, answer = haystack(rng, encoding, ids, length, depth)
            logits, _ = model(torch.tensor([prompt]), last_only=True)  # [1, 1, V]
            hits.append(int(logits.argmax()) == answer)
        found.append(hits)
    return found


def train_both_stages(experiment: Experiment, kinds: Kinds) -> dict[str, list[Path]]:
    """The runs of the second stage of each kind, one for each seed."""
    write = partial(document, n_word=48, repeats=8)
    short = write_documents(experiment, "needles-short", 30_000, write)
    write = partial(document, n_word=288, repeats=2)
    long = write_documents(experiment, "needles-long", 7000, write, tokenizer_of=short)
    first = {name: {**kind, **SHORT, "data_dir": str(short)} for name, kind in kinds.items()}
    second = {}
    for name, folders in experiment.train(best_learning_rates(experiment, first)).items():
        origins = list(map(last_checkpoint, folders))
        second[name] = {**LONG, "data_dir": str(long), "init_from": origins}
    return experiment.train(second)


def needles(experiment: Experiment) -> None:
    """Train both stages, and print a table of the needles found."""
    count = DEPTHS if experiment.quick else 200
    rows = []
    for name, folders in train_both_stages(experiment, pick("dense", "STEM, all")).items():
        runs = experiment.measure("needles", needles_found, folders, count)
        for number, length in enumerate(HAYSTACKS):
            found = np.array([run[number] for run in runs])  # [runs, count]
            by_depth = found.reshape(len(runs), DEPTHS, -1).mean(-1)
            row = {"layers": name, "tokens": f"{length:,}"}
            row["needles found"] = interval(".1%", found.mean(1))
            row["at the worst depth"] = interval(".1%", by_depth.min(1))
            rows.append(row)
    print(f"\nNeedles found (by chance {1 / len(VALUES):.1%}):\n")
    print(markdown(rows))
