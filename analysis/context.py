"""What does a longer context give a model with token tables?

The parameters that contexts of real text read, rows of their distinct tokens included: nothing is
trained. And a needle in a haystack: a sentence as " Call Anna tiger." stands in the prose of a
novel, and models learn to complete it when it comes again, first in short documents, where that
happens often, then (`--stage context`) in longer ones.
"""

import itertools
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
from analysis.experiment import MAIN, Experiment, best_learning_rates, pick, resolve_settings
from analysis.pictures import markdown, plt, spread
from common import locked
from config import ModelConfig
from text.dataset import open_tokens, read_meta, read_tokenizer
from text.download import MOBY_DICK
from training.checkpoints import load_model

CONTEXTS = [2**power for power in range(10, 16)]
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
LENGTHS = (128, 512, 1024, 2048)  # tokens of haystacks
DEPTHS = 5  # parts of a haystack, in each of which needles are asked for


def context(experiment: Experiment) -> None:
    figure = plt.figure(figsize=(11, 6.4))
    above, below = figure.subfigures(2, 1)
    parameters_read(experiment, above.subplots())
    print()
    needles(experiment, below.subplots(1, 4, sharey=True))
    experiment.picture("context", figure)


# --- parameters read ---


def distinct_tokens(ids: np.ndarray, length: int, most: int = 8) -> list[int]:
    """How many tokens differ in each of up to `most` contexts, spread evenly over ids [T]."""
    starts = np.unique(np.linspace(0, len(ids) - length, most, dtype=int))
    return [len(np.unique(ids[start : start + length])) for start in starts]


def parameters_read(experiment: Experiment, axes: plt.Axes) -> None:
    """Table and curves of the first measurement: on the novel; with --quick on --data_dir."""
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
        read = [costs.params_read_per_step(1, round(count)) / 1e6 for count in counts]
        for row, million in zip(rows, read, strict=True):
            row[name] = f"{million:.2f} M ({million / read[0]:.2f})"
        axes.plot(contexts, read, marker=".", label=name)
    print(f"Parameters read in a context of {folder.name} (over those of the shortest):\n")
    print(markdown(rows))
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{length:,}" for length in contexts])
    axes.set(xlabel="tokens in the context", ylabel="million parameters read", ylim=0)
    axes.legend(ncols=len(MAIN))


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
def needles_found(folder: Path, count: int, device: torch.device) -> dict[str, list[list[float]]]:
    """Shares of `count` needles that a run's model names at each of LENGTHS and, from the beginning
    on, DEPTHS: with positions "as trained", and "slowed down" for lengths beyond the trained."""
    model, encoding, checkpoint = load_model(folder / "ckpt.pt", device)
    ids = encoding.encode_ordinary("".join(prose(held_out=True)))
    trained = model.config.rope_base
    shares: dict[str, list[list[float]]] = {"as trained": [], "slowed down": []}
    for positions, length in itertools.product(shares, LENGTHS):
        model.config.rope_base = trained
        if positions == "slowed down" and length > LONG["block_size"]:
            settings = resolve_settings(
                stage="context",
                block_size=length,
                data_dir=checkpoint["args"]["data_dir"],
                init_from=folder / "ckpt.pt",
            )
            model.config.rope_base = settings.model.rope_base
        model.config.block_size = length
        rng = random.Random(length)  # all models are asked the same
        by_depth = []
        for part in range(DEPTHS):
            prompts, answers = [], []
            depths = [(part + rng.random()) / DEPTHS for _ in range(count)]
            for depth in depths:
                prompt, answer = haystack(rng, encoding, ids, length, depth)
                prompts.append(prompt)
                answers.append(answer)
            guesses = []
            for batch in torch.tensor(prompts).split(16_384 // length):
                logits, _ = model(batch, last_only=True)  # [B, 1, V]
                guesses += logits[:, 0].argmax(-1).tolist()
            right = [guess == answer for guess, answer in zip(guesses, answers, strict=True)]
            by_depth.append(sum(right) / count)
        shares[positions].append(by_depth)
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
    first = experiment.train(best_learning_rates(experiment, first))
    second = {}
    for name, folders in first.items():
        for seed, folder in zip(experiment.numbers, folders, strict=True):
            flags = {**LONG, "data_dir": str(long), "init_from": folder / "ckpt.pt", "seed": seed}
            second[name, seed] = flags
    second = experiment.train(second, experiment.numbers[:1])  # flags name the seed
    found = {}
    for name in kinds:
        found[name] = [second[name, seed][0] for seed in experiment.numbers]
    return found


def needles(experiment: Experiment, panels: np.ndarray) -> None:
    """Train both stages, and show the needles found: a table, and a heat map of depths and lengths
    for each kind and for both sorts of positions."""
    kinds, count = ("dense", "STEM, all"), 40
    if experiment.quick:
        kinds, count = ("STEM, all",), 1
    groups = train_both_stages(experiment, pick(*kinds))
    panels = iter(panels)
    rows = []
    for name, folders in groups.items():
        found = experiment.measure("needles", needles_found, folders, count, experiment.on)
        for positions in found[0]:
            shares = np.array([run[positions] for run in found])  # [runs, lengths, depths]
            rows += needle_rows(name, positions, shares)
            draw_needles(next(panels), f"{name}, positions {positions}", shares.mean(0).T)
    print(f"Needles found; choosing any of the {len(VALUES)} values finds {1 / len(VALUES):.1%}:\n")
    print(markdown(rows))


def needle_rows(name: str, positions: str, shares: np.ndarray) -> list[dict[str, str]]:
    """Rows of a table, from shares of needles found [runs, lengths, depths]."""
    rows = []
    trained = LONG["block_size"]
    for number, length in enumerate(LENGTHS):
        beyond = length > trained
        if positions == "slowed down" and not beyond:
            continue  # nothing is slowed down
        row = {"layers": name, "tokens": f"{length:,}", "positions": positions if beyond else ""}
        row["over trained"] = f"{length / trained:g}"
        row["needles found"] = spread(".1%", shares[:, number].mean(1))
        row["at the worst depth"] = spread(".1%", shares[:, number].min(1))
        rows.append(row)
    return rows


def draw_needles(axes: plt.Axes, title: str, means: np.ndarray) -> None:
    """A heat map of shares of needles found [depths, lengths]."""
    axes.imshow(means, vmin=0, vmax=1.5, cmap="Greens", aspect="auto")  # text is black
    for (depth, length), share in np.ndenumerate(means):
        axes.text(length, depth, f"{share:.0%}", ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(LENGTHS)), [f"{length:,}" for length in LENGTHS])
    depths = [(number + 0.5) / DEPTHS for number in range(DEPTHS)]
    axes.set_yticks(range(DEPTHS), [f"{depth:.0%}" for depth in depths])
    axes.set_title(title, fontsize=9)
    axes.set(xlabel="tokens", ylabel="depth of the needle")
    axes.label_outer()
    axes.grid(False)
