"""What does a longer context give a model with token tables?

The parameters that contexts of real text read, rows of their distinct tokens included: nothing is
trained. And a needle in a haystack: a sentence as " Call Anna tiger." stands in the prose of a
novel, and models learn to complete it when it comes again, first in short documents, where that
happens often, then (`--stage context`) in longer ones.
"""

import itertools
import json
import random
from functools import cache, partial
from pathlib import Path

import numpy as np
import tiktoken
import torch

import prepare
from analysis.costs import SMALL, Costs
from analysis.experiment import MAIN, Experiment, best_learning_rates, pick, spread
from common import locked
from config import ModelConfig
from training.batches import open_tokens, read_meta, read_tokenizer
from training.checkpoints import load_model
from training.records import markdown, plt
from training.settings import resolve_settings

CONTEXTS = [2**power for power in range(10, 16)]
KEYS = "Anna Boris Clara David Elena Felix Greta Henry Irene James Karen Louis Maria Nina Oscar"
VALUES = (
    "tiger apple silver river candle hammer violin desert butter mirror basket anchor garden "
    "pepper window rocket carpet ladder monkey orange pillow rabbit saddle ticket velvet walnut "
    "yellow zipper bridge castle dragon engine"
)
KEYS, VALUES = KEYS.split(), VALUES.split()
# Of each corpus: documents, pieces of prose in one, and how often the needle comes again in it.
CORPORA = {"needles-short": (30_000, 6, 8), "needles-long": (7000, 36, 2)}
SHORT = dict(
    n_layer=3, n_head=4, n_embd=64, block_size=128, doc_mask=True,
    batch_size=16, max_iters=1500, eval_interval=750,
)  # fmt: skip
LONG = dict(block_size=512, batch_size=8, max_iters=800, eval_interval=400, learning_rate=1e-3)
LENGTHS = (128, 512, 1024, 2048)  # tokens of haystacks
DEPTHS = 5  # parts of a haystack, in each of which needles are asked for


def context(experiment: Experiment) -> None:
    figure = plt.figure(figsize=(11, 6.4))
    above, below = figure.subfigures(2, 1)
    parameters_read(experiment, above.subplots())
    print()
    needles(experiment, below.subplots(1, 4, sharey=True))
    experiment.picture("context", figure)


def distinct_tokens(ids: np.ndarray, length: int, most: int = 8) -> list[int]:
    """How many tokens differ in each of up to `most` contexts, spread evenly over ids [T]."""
    starts = np.unique(np.linspace(0, len(ids) - length, most, dtype=int))
    return [len(np.unique(ids[start : start + length])) for start in starts]


def parameters_read(experiment: Experiment, axes: plt.Axes) -> None:
    """Table and curves of the first measurement: on the novel; with --quick on --data_dir."""
    quick = experiment.quick
    folder = experiment.data_dir if quick else experiment.data_dir.with_name("moby-dick")
    experiment.ensure_prepared(folder)
    meta, contexts = read_meta(folder), (64, 256) if quick else CONTEXTS
    ids = open_tokens(folder, "train", meta)
    counts = [float(np.mean(distinct_tokens(ids, n))) for n in contexts]
    rows = [
        {"context": f"{n:,}", "distinct tokens": f"{count:,.0f}"}
        for n, count in zip(contexts, counts, strict=True)
    ]
    for name, flags in pick(*MAIN).items():
        costs = Costs(ModelConfig(vocab_size=meta["vocab_size"], **SMALL, **flags))
        read = [costs.params_read_per_step(1, round(count)) / 1e6 for count in counts]
        for row, million in zip(rows, read, strict=True):
            row[name] = f"{million:.2f} M ({million / read[0]:.2f})"
        axes.plot(contexts, read, marker=".", label=name)
    print(f"Parameters read in a context of {folder.name} (over those of the shortest):\n")
    print(markdown(rows))
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{n:,}" for n in contexts])
    axes.set(xlabel="tokens in the context", ylabel="million parameters read", ylim=0)
    axes.legend(ncols=len(MAIN))


@cache
def prose(held_out: bool) -> list[str]:
    """The novel in pieces of eight words: its first nine tenths, or what is held out."""
    lines = prepare.MOBY_DICK.read_text(encoding="utf-8").splitlines()
    words = " ".join(json.loads(line)["text"] for line in lines).split()
    cut = len(words) * 9 // 10
    words = words[cut:] if held_out else words[:cut]
    return ["".join(f" {word}" for word in words[at : at + 8]) for at in range(0, len(words), 8)]


def document(rng: random.Random, n_piece: int, repeats: int) -> str:
    """Pieces of prose, a needle among them, and `repeats` times behind it the same sentence."""
    pieces, told = prose(held_out=False), rng.random()
    sentence = f" Call {rng.choice(KEYS)} {rng.choice(VALUES)}."
    start = rng.randrange(len(pieces) - n_piece)
    parts = [(rng.random(), piece) for piece in pieces[start : start + n_piece]]
    again = [rng.uniform(told, 1) for _ in range(repeats)]
    parts += [(place, sentence) for place in (told, *again)]
    return "".join(text for _, text in sorted(parts))


def prepare_corpora(out_dir: Path, quick: bool, corpora=CORPORA, write=document) -> list[Path]:
    """Folders of short and long documents, or others that are written, prepared if they are not."""
    encoding, folders = None, [out_dir / name for name in corpora]
    for folder, (n_document, *parts) in zip(folders, corpora.values(), strict=True):
        if not (folder / "meta.json").exists():
            rng, written = random.Random(folder.name), folder.with_suffix(".jsonl")
            with open(written, "w", encoding="utf-8") as file:
                for _ in range(n_document // 100 if quick else n_document):
                    file.write(json.dumps(dict(text=write(rng, *parts))) + "\n")
            given = dict(input=[written], out_dir=folder, vocab_size=1024, val_fraction=0.05)
            prepare.prepare_files(prepare.Settings(**given), [written], "text", encoding)
        encoding = read_tokenizer(folder, read_meta(folder))  # of the short ones for both
    return folders


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
    at = start + round(depth * n_prose)
    prompt = [encoding.eot_token, *ids[start:at], *told, *ids[at : start + n_prose], *question]
    return prompt, encoding.encode_ordinary(f" {value}")[0]


@torch.inference_mode()
def needles_found(folder: Path, count: int, device: torch.device) -> list[float]:
    """Shares of `count` needles that a run's model names, at each of DEPTHS from the beginning on:
    for each of LENGTHS with positions as trained, then for each of them slowed down."""
    model, encoding, checkpoint = load_model(folder / "ckpt.pt", device)
    longer = dict(data_dir=checkpoint["args"]["data_dir"], init_from=folder / "ckpt.pt")
    ids, shares = encoding.encode_ordinary("".join(prose(held_out=True))), []
    for slower, length in itertools.product((False, True), LENGTHS):
        if slower and length > LONG["block_size"]:
            settings = resolve_settings(stage="context", block_size=length, **longer)
            model.config.rope_base = settings.model.rope_base
        model.config.block_size = length
        rng = random.Random(length)  # all models are asked the same
        for part in range(DEPTHS):
            depths = [(part + rng.random()) / DEPTHS for _ in range(count)]
            questions = [haystack(rng, encoding, ids, length, depth) for depth in depths]
            prompts, answers = map(torch.tensor, zip(*questions, strict=True))
            batches = prompts.split(16_384 // length)
            logits = torch.cat([model(ids, last_only=True)[0] for ids in batches])  # [count, 1, V]
            shares.append((logits[:, 0].argmax(-1).cpu() == answers).float().mean().item())
    return shares


def needles(experiment: Experiment, panels: np.ndarray) -> None:
    """Train both stages, and show the needles found: a table, and a heat map of depths and lengths
    for each kind and for both sorts of positions."""
    with locked(experiment.out_dir, wait=True):
        short, long = prepare_corpora(experiment.out_dir, experiment.quick)
    kinds = pick("dense", "STEM, all")
    first = {name: {**kind, **SHORT, "data_dir": str(short)} for name, kind in kinds.items()}
    first = experiment.train(best_learning_rates(experiment, first))
    further = {**LONG, "stage": "context", "data_dir": str(long)}
    second = {
        folder: {**further, "init_from": folder / "ckpt.pt", "seed": seed}
        for folders in first.values()
        for seed, folder in zip(experiment.numbers, folders, strict=True)
    }
    second = experiment.train(second, experiment.numbers[:1])  # its seeds are its own
    found = partial(needles_found, count=1 if experiment.quick else 40, device=experiment.on)
    shares = experiment.measure("needles", found, itertools.chain(*second.values()))
    shares = np.reshape(shares, (len(kinds), -1, 2, len(LENGTHS), DEPTHS))  # 1: seeds, 2: positions

    rows, trained = [], LONG["block_size"]
    every = itertools.product(enumerate(kinds), enumerate(("as trained", "slowed down")))
    for axes, ((kind, name), (slower, positions)) in zip(panels, every, strict=True):
        by_run = shares[kind, :, slower]  # [seeds, lengths, depths]
        for i, n in enumerate(LENGTHS):
            if n > trained or not slower:
                row = {"layers": name, "tokens": f"{n:,}"}
                row["positions"] = positions if n > trained else ""
                row["over trained"] = f"{n / trained:g}"
                row["needles found"] = spread(".1%", by_run[:, i].mean(1))
                row["at the worst depth"] = spread(".1%", by_run[:, i].min(1))
                rows.append(row)
        means = by_run.mean(0).T  # [depths, lengths]
        axes.imshow(means, vmin=0, vmax=1.5, cmap="Greens", aspect="auto")  # text is black
        for (depth, i), share in np.ndenumerate(means):
            axes.text(i, depth, f"{share:.0%}", ha="center", va="center", fontsize=7)
        axes.set_xticks(range(len(LENGTHS)), [f"{n:,}" for n in LENGTHS])
        axes.set_title(name + ", positions slowed down" * slower, fontsize=9)
        axes.set_xlabel("tokens")
        axes.grid(False)
    print(f"Needles found; choosing any of the {len(VALUES)} values finds {1 / len(VALUES):.1%}:\n")
    print(markdown(rows))
    panels[0].set_yticks(range(DEPTHS), [f"{(k + 0.5) / DEPTHS:.0%}" for k in range(DEPTHS)])
    panels[0].set_ylabel("depth of the needle")
