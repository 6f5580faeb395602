"""What does a longer context give a model with token tables?

The parameters that contexts of real text read, rows of their distinct tokens included: nothing is
trained. And a needle in a haystack: a sentence as " Call Anna tiger." stands in the prose of a
novel, and models learn to complete it when it comes again, first in short documents, where that
happens often, then (`--stage context`) in longer ones.
"""

import json
import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import tiktoken
import torch

import prepare
from analysis.costs import SMALL, Costs
from analysis.experiment import MAIN, Experiment, best_learning_rates, pick
from analysis.pictures import markdown, spread
from common import locked
from config import ModelConfig
from text.dataset import open_tokens, read_meta, read_tokenizer
from text.download import MOBY_DICK
from train import resolve_settings
from training.checkpoints import load_model

CONTEXTS = [1024, 4096, 32_768]
NAMES = "Anna Boris Clara David Elena Felix Greta Henry Irene James Karen Louis Maria Nina Oscar"
WORDS = (
    "tiger apple silver river candle hammer violin desert butter mirror basket anchor garden "
    "pepper window rocket carpet ladder monkey orange pillow rabbit saddle ticket velvet walnut "
    "yellow zipper bridge castle dragon engine"
)
KEYS = NAMES.split()
VALUES = WORDS.split()
# The first stage, on 30,000 documents of 6 pieces of prose in which a needle comes 8 times again,
# and the second, on 7,000 of 36 pieces in which it comes twice again.
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
# Tokens of haystacks, and whether positions are slowed down for a length beyond the trained one.
HAYSTACKS = ((128, False), (512, False), (1024, False), (1024, True), (2048, False), (2048, True))
DEPTHS = 5  # parts of a haystack, in each of which needles are asked for


def context(experiment: Experiment) -> None:
    parameters_read(experiment)
    needles(experiment)


# --- parameters read ---


def distinct_tokens(ids: np.ndarray, length: int) -> list[int]:
    """How many tokens differ in each of up to 8 contexts, spread evenly over ids [T]."""
    starts = np.unique(np.linspace(0, len(ids) - length, 8, dtype=int))
    return [len(np.unique(ids[start : start + length])) for start in starts]


def parameters_read(experiment: Experiment) -> None:
    """Table of the first measurement: on the novel; with --quick on --data_dir."""
    folder, contexts = experiment.data_dir.with_name("moby-dick"), CONTEXTS
    if experiment.quick:
        folder, contexts = experiment.data_dir, [64, 256]
    experiment.ensure_prepared(folder)
    meta = read_meta(folder)
    ids = open_tokens(folder, "train", meta)
    counts = [float(np.mean(distinct_tokens(ids, length))) for length in contexts]
    rows = []
    for length, count in zip(contexts, counts, strict=True):
        rows.append({"context": f"{length:,}", "distinct tokens": f"{count:,.0f}"})
    for name, flags in pick(*MAIN).items():
        costs = Costs(ModelConfig(vocab_size=meta["vocab_size"], **SMALL, **flags))
        read = [costs.params_read(count) / 1e6 for count in counts]
        for row, million in zip(rows, read, strict=True):
            row[name] = f"{million:.2f} M ({million / read[0]:.2f})"
    print(f"Parameters read in a context of {folder.name} (over those of the shortest):\n")
    print(markdown(rows))


# --- texts with needles ---


@cache
def prose(held_out: bool) -> list[str]:
    """The novel in pieces of eight words: its first nine tenths, or what is held out."""
    lines = MOBY_DICK.read_text(encoding="utf-8").splitlines()
    words = " ".join(json.loads(line)["text"] for line in lines).split()
    cut = len(words) * 9 // 10
    words = words[cut:] if held_out else words[:cut]
    pieces = []
    for start in range(0, len(words), 8):
        pieces.append("".join(f" {word}" for word in words[start : start + 8]))
    return pieces


def document(rng: random.Random, n_piece: int, repeats: int) -> str:
    """Pieces of prose, a needle among them, and `repeats` times behind it the same sentence."""
    pieces = prose(held_out=False)
    told = rng.random()  # its place, from 0 to 1
    sentence = f" Call {rng.choice(KEYS)} {rng.choice(VALUES)}."
    start = rng.randrange(len(pieces) - n_piece)
    parts = [(rng.random(), piece) for piece in pieces[start : start + n_piece]]
    again = [rng.uniform(told, 1) for _ in range(repeats)]
    parts += [(place, sentence) for place in (told, *again)]
    return "".join(text for _, text in sorted(parts))


def write_documents(
    experiment: Experiment,
    name: str,
    n_document: int,
    write: Callable[[random.Random], str],
    tokenizer_of: Path | None = None,
) -> Path:
    """Prepare a folder of so many documents, unless it is there. They are made by `write`, and
    encoded by the tokenizer of another folder, or one of their own."""
    folder = experiment.out_dir / name
    if experiment.quick:
        n_document //= 100
    with locked(experiment.out_dir, wait=True):
        if not (folder / "meta.json").exists():
            rng = random.Random(name)
            written = folder.with_suffix(".jsonl")
            with open(written, "w", encoding="utf-8") as file:
                for _ in range(n_document):
                    file.write(json.dumps({"text": write(rng)}) + "\n")
            encoding = None
            if tokenizer_of:
                encoding = read_tokenizer(tokenizer_of, read_meta(tokenizer_of))
            settings = prepare.Settings(
                input=[written], out_dir=folder, vocab_size=1024, val_fraction=0.05
            )
            prepare.prepare_files(settings, [written], "text", encoding)
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
    before, behind = ids[start:place], ids[place : start + n_prose]
    prompt = [encoding.eot_token, *before, *told, *behind, *question]
    return prompt, encoding.encode_ordinary(f" {value}")[0]


# --- needles found ---


@torch.inference_mode()
def needles_found(folder: Path, count: int, device: torch.device) -> list[list[float]]:
    """Shares of `count` needles that a run's model names in each of HAYSTACKS and, from the
    beginning on, DEPTHS."""
    model, encoding, checkpoint = load_model(folder / "ckpt.pt", device)
    ids = encoding.encode_ordinary("".join(prose(held_out=True)))
    trained = model.config.rope_base
    shares = []
    for length, slowed in HAYSTACKS:
        model.config.block_size = length
        model.config.rope_base = trained
        if slowed:
            settings = resolve_settings(
                stage="context",
                block_size=length,
                data_dir=checkpoint["args"]["data_dir"],
                init_from=folder / "ckpt.pt",
            )
            model.config.rope_base = settings.model.rope_base
        rng = random.Random(length)  # all models are asked the same
        by_depth = []
        for part in range(DEPTHS):
            right = 0
            for _ in range(count):
                depth = (part + rng.random()) / DEPTHS
                prompt, answer = haystack(rng, encoding, ids, length, depth)
                logits, _ = model(torch.tensor([prompt]), last_only=True)  # [1, 1, V]
                right += int(logits.argmax()) == answer
            by_depth.append(right / count)
        shares.append(by_depth)
    return shares


def train_both_stages(experiment: Experiment, kinds: dict) -> dict[str, list[Path]]:
    """The runs of the second stage of each kind, one for each seed."""
    short = write_documents(
        experiment, "needles-short", 30_000, partial(document, n_piece=6, repeats=8)
    )
    long = write_documents(
        experiment, "needles-long", 7000, partial(document, n_piece=36, repeats=2), short
    )
    first = {name: {**kind, **SHORT, "data_dir": str(short)} for name, kind in kinds.items()}
    second = {}
    for name, folders in experiment.train(best_learning_rates(experiment, first)).items():
        origins = [folder / "ckpt.pt" for folder in folders]
        second[name] = {**LONG, "data_dir": str(long), "init_from": origins}
    return experiment.train(second)


def needles(experiment: Experiment) -> None:
    """Train both stages, and print a table of the needles found."""
    kinds, count = ("dense", "STEM, all"), 40
    if experiment.quick:
        kinds, count = ("STEM, all",), 1
    rows = []
    for name, folders in train_both_stages(experiment, pick(*kinds)).items():
        found = experiment.measure("needles", needles_found, folders, count, experiment.on)
        shares = np.array(found)  # [runs, haystacks, depths]
        for number, (length, slowed) in enumerate(HAYSTACKS):
            row = {"layers": name, "tokens": f"{length:,}"}
            row["positions"] = "slowed down" if slowed else "as trained"
            row["needles found"] = spread(".1%", shares[:, number].mean(1))
            row["at the worst depth"] = spread(".1%", shares[:, number].min(1))
            rows.append(row)
    print(f"\nNeedles found (by chance {1 / len(VALUES):.1%}):\n")
    print(markdown(rows))
