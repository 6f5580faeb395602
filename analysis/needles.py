"""A needle in a haystack: a sentence as " Call Anna tiger." stands in prose, a novel's, and models
learn to complete it when it comes again: first in short documents, where that happens often, then
(`--stage context`) in longer ones. They are asked at the end of prose that they never saw, in
contexts up to four times as long as those of the second stage, by how deep the sentence stands.

Beyond the length that was trained, positions are once as they were, and once slowed down as
`--stage context` does it (rope_base by the growth in length): both are shown. Deliberately simple,
as models are that learn this in minutes: one needle, whose value is one of 32 words, so to find the
one that was told is enough. Of several needles with different keys, models of this size learn in
that time to name one that was told, but not which.
"""

import json
import random
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path

import numpy as np
import tiktoken
import torch
from tqdm import tqdm

import prepare
from analysis.experiment import STEM, Experiment, Flags, spread
from analysis.runs import searched
from training.batches import read_meta, read_tokenizer
from training.checkpoints import load_model
from training.records import markdown
from training.settings import inherited

KINDS = {name: STEM[name] for name in ("dense", "STEM, all")}
KEYS = "Anna Boris Clara David Elena Felix Greta Henry Irene James Karen Louis Maria Nina Oscar"
VALUES = (
    "tiger apple silver river candle hammer violin desert butter mirror basket anchor garden "
    "pepper window rocket carpet ladder monkey orange pillow rabbit saddle ticket velvet walnut "
    "yellow zipper bridge castle dragon engine"
)
KEYS, VALUES = KEYS.split(), VALUES.split()
DEPTHS = 5  # parts of a haystack, in each of which needles are asked for


@dataclass
class Scale:
    documents: tuple[int, int]  # to learn from: short ones, long ones
    pieces: tuple[int, int]  # of prose, in a short and in a long one
    asked: tuple[int, int]  # how often the needle comes again in it
    short: Flags  # training on short documents
    long: Flags  # the second stage
    haystacks: int  # of each depth and length


FULL = Scale(
    documents=(30_000, 7000),
    pieces=(6, 36),
    asked=(8, 2),
    short=dict(
        n_layer=3, n_head=4, n_embd=64, block_size=128, doc_mask=True,
        batch_size=16, max_iters=1500, eval_interval=750,
    ),
    long=dict(block_size=512, batch_size=8, max_iters=800, eval_interval=400, learning_rate=1e-3),
    haystacks=40,
)  # fmt: skip
QUICK = Scale(
    documents=(100, 50),
    pieces=(2, 8),
    asked=(4, 2),
    short=dict(block_size=64, batch_size=2),
    long=dict(block_size=256, batch_size=2),
    haystacks=1,
)


def needle(key: str, value: str) -> str:
    return f" Call {key} {value}."


@cache
def prose(held_out: bool) -> list[str]:
    """The novel in pieces of eight words: its first nine tenths, or what is held out."""
    lines = prepare.MOBY_DICK.read_text(encoding="utf-8").splitlines()
    words = " ".join(json.loads(line)["text"] for line in lines).split()
    cut = len(words) * 9 // 10
    words = words[cut:] if held_out else words[:cut]
    return ["".join(f" {word}" for word in words[at : at + 8]) for at in range(0, len(words), 8)]


def document(rng: random.Random, n_piece: int, asked: int) -> str:
    """Pieces of prose, a needle among them, and `asked` times behind it the same sentence."""
    pieces, told = prose(held_out=False), rng.random()
    sentence = needle(rng.choice(KEYS), rng.choice(VALUES))
    start = rng.randrange(len(pieces) - n_piece)
    parts = [(rng.random(), piece) for piece in pieces[start : start + n_piece]]
    parts += [(place, sentence) for place in (told, *(rng.uniform(told, 1) for _ in range(asked)))]
    return "".join(text for _, text in sorted(parts))


def corpora(out_dir: Path, scale: Scale) -> list[str]:
    """Folders of short and long documents, prepared if they are not yet."""
    folders, encoding = [out_dir / "needles-short", out_dir / "needles-long"], None
    stages = zip(folders, scale.documents, scale.pieces, scale.asked, strict=True)
    for folder, n_document, *parts in stages:
        if not (folder / "meta.json").exists():
            rng, written = random.Random(folder.name), folder.with_suffix(".jsonl")
            with open(written, "w", encoding="utf-8") as file:
                for _ in range(n_document):
                    file.write(json.dumps(dict(text=document(rng, *parts))) + "\n")
            given = dict(input=[written], out_dir=folder, vocab_size=1024, val_fraction=0.05)
            prepare.prepare_files(prepare.Settings(**given), [written], "text", encoding)
        encoding = read_tokenizer(folder, read_meta(folder))  # of the short ones for both
    return [str(folder) for folder in folders]


def runs(experiment: Experiment, scale: Scale) -> dict[str, list[Path]]:
    """Runs of the second stage of each kind, one for each seed. The first stage has its
    best learning rate."""
    short, long = corpora(experiment.out_dir, scale)
    flags = {name: {**kind, **scale.short, "data_dir": short} for name, kind in KINDS.items()}
    first = experiment.groups(searched(experiment, flags))
    further = {**scale.long, "stage": "context", "data_dir": long}
    second = {
        name: [
            {**further, "init_from": folder / "ckpt.pt", "seed": seed}
            for seed, folder in zip(experiment.numbers, folders, strict=True)
        ]
        for name, folders in first.items()
    }
    experiment.trained(list(chain(*second.values())))  # at once: many at a time
    return {name: experiment.trained(group) for name, group in second.items()}


def haystack(
    rng: random.Random, encoding: tiktoken.Encoding, ids: list[int], length: int, depth: float
) -> tuple[list[int], int]:
    """A prompt of `length` tokens, the question at its end, and the first token of the answer. The
    prose is from `ids`, with a needle at `depth` (0: the beginning, 1: the end)."""
    key, value = rng.choice(KEYS), rng.choice(VALUES)
    told = encoding.encode_ordinary(needle(key, value))
    question = encoding.encode_ordinary(f" Call {key}")
    n_prose = length - 1 - len(told) - len(question)
    start = rng.randrange(len(ids) - n_prose)
    at = start + round(depth * n_prose)
    prompt = [encoding.eot_token, *ids[start:at], *told, *ids[at : start + n_prose], *question]
    return prompt, encoding.encode_ordinary(f" {value}")[0]


@torch.inference_mode()
def found(folder: Path, length: int, slower: bool, count: int, on: torch.device) -> list[float]:
    """Share of `count` needles that a run's model names, at each depth from the beginning on."""
    model, encoding, _ = load_model(folder / "ckpt.pt", on)
    if slower:
        given = dict(stage="context", init_from=folder / "ckpt.pt", block_size=length)
        model.config.rope_base = inherited(given, asdict(model.config))["rope_base"]
    model.config.block_size = length
    ids = encoding.encode_ordinary("".join(prose(held_out=True)))
    rng, shares = random.Random(length), []  # all models are asked the same
    for part in range(DEPTHS):
        depths = [(part + rng.random()) / DEPTHS for _ in range(count)]
        asked = [haystack(rng, encoding, ids, length, depth) for depth in depths]
        right = 0
        for at in range(0, count, size := max(1, 16_384 // length)):
            prompts, answers = zip(*asked[at : at + size], strict=True)
            logits, _ = model(torch.tensor(prompts), last_only=True)  # [B, 1, V]
            right += int((logits[:, 0].argmax(-1).cpu() == torch.tensor(answers)).sum())
        shares.append(right / count)
    return shares


def haystacks(experiment: Experiment, panels: np.ndarray) -> None:
    """Table of the needles found, and a heat map of depths and lengths for each kind and for both
    sorts of positions."""
    scale = QUICK if experiment.quick else FULL
    kept, trained, rows = experiment.keep("needles"), scale.long["block_size"], []
    lengths = [trained // 4, trained, 2 * trained, 4 * trained]
    cells = [(name, slower) for name in KINDS for slower in (False, True)]
    folders = runs(experiment, scale)
    for axes, (name, slower) in zip(panels, tqdm(cells, "haystacks", delay=3), strict=True):
        shares = np.zeros((DEPTHS, len(lengths), len(experiment.numbers)))
        for i, length in enumerate(lengths):
            further = length > trained
            for j, folder in enumerate(folders[name]):
                slow = slower and further  # up to the trained length there is one sort
                measure = partial(found, folder, length, slow, scale.haystacks, experiment.on)
                cell = f"{folder.parent.name}, {length}" + ", slower" * slow
                shares[:, i, j] = kept(cell, measure)
            if further or not slower:
                row = {"layers": name, "tokens": f"{length:,}", "positions": ""}
                if further:
                    row["positions"] = "slowed down" if slower else "as trained"
                row["over trained"] = f"{length / trained:g}"
                row["needles found"] = spread(".1%", shares[:, i].mean(0).tolist())
                row["at the worst depth"] = spread(".1%", shares[:, i].min(0).tolist())
                rows.append(row)
        means = shares.mean(-1)  # [depths, lengths]
        axes.imshow(means, vmin=0, vmax=1, cmap="Greens", aspect="auto")
        for (depth, i), share in np.ndenumerate(means):
            color = "white" if share > 0.6 else "black"
            axes.text(i, depth, f"{share:.0%}", color=color, ha="center", va="center", fontsize=7)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_title(name + ", positions slowed down" * slower, fontsize=9)
        axes.set_xlabel("tokens")
    panels[0].set_yticks(range(DEPTHS), [f"{(k + 0.5) / DEPTHS:.0%}" for k in range(DEPTHS)])
    panels[0].set_ylabel("depth of the needle")
    print(f"Needles found; choosing any of the {len(VALUES)} values finds {1 / len(VALUES):.1%}:\n")
    print(markdown(rows))
