"""kinds: kinds of layers at equal tokens, each at its best learning rate, with controls.
settings: two initialisations, each at its best rate, how tables are trained, in which layer."""

from pathlib import Path

import torch

from lab.edits import success_of_edits
from lab.experiment import KINDS, MAIN, Experiment, Flags, Run, best_learning_rates, pick
from lab.pictures import markdown, plt
from lab.runs import draw_validation, last_start, row
from model import Decoder, ModelConfig
from text.dataset import read_meta
from training.records import read_run
from training.report import model_sizes

# Do n-grams matter, or would any rows do? Engram at its best rate, but:
CONTROLS = {
    "engram, one row": {"ngram_rows": 1},  # every n-gram has the same
    "engram, random rows": {"table_rate": 0.0},  # as they were drawn; what reads them learns
}
INITS = (0.088, 0.02)  # 1 / sqrt(n_embd) of what is trained here, and GPT-2's


def kinds(experiment: Experiment) -> None:
    if experiment.quick:
        wanted = pick("dense", "STEM, all", "Embformer")
    else:
        wanted = {**KINDS, **dense_of_equal_costs(experiment)}
    at_best = best_learning_rates(experiment, wanted)
    if "engram" in at_best:
        for name, flags in CONTROLS.items():
            at_best[name] = {**at_best["engram"], **flags}
    print(table_with_edits(experiment, at_best) + "\n")
    draw(experiment, experiment.train_and_read(at_best))


def dense_of_equal_costs(experiment: Experiment) -> dict[str, Flags]:
    """What the tables of STEM in all layers might be spent on: the dense model that comes nearest
    to it in parameters, by its width, and in FLOPs, by its hidden units."""
    vocab_size = read_meta(experiment.data_dir)["vocab_size"]

    def size(flags: Flags, figure: str) -> int:
        with torch.device("meta"):  # shapes, but no numbers
            return model_sizes(Decoder(ModelConfig(vocab_size=vocab_size, **flags)))[figure]

    widths = [{"ffn": "dense", "n_head": n, "n_embd": 32 * n} for n in range(4, 33)]
    hidden = [{"ffn": "dense", "d_ff": 8 * n} for n in range(1, 65)]
    kinds = {}
    for name, figure, tried in (
        ("dense, as many parameters", "total", widths),
        ("dense, as many FLOPs", "flops_per_token", hidden),
    ):
        wanted = size(KINDS["STEM, all"], figure)
        kinds[name] = min(tried, key=lambda flags: abs(size(flags, figure) - wanted))
    return kinds


def draw(experiment: Experiment, groups: dict[str, list[Run]]) -> None:
    """Validation losses of the kinds of MAIN: bands of more cannot be told apart."""
    figure, axes = plt.subplots()
    for name in MAIN:
        if name in groups:
            draw_validation(axes, groups[name], label=name)
    axes.set(xlabel="million tokens", ylabel="validation loss (nats per token)")
    axes.legend()
    experiment.picture("kinds", figure)


def settings(experiment: Experiment) -> None:
    names = ("dense", "STEM, third", "STEM, all", "Embformer")
    stds = INITS
    if experiment.quick:
        names, stds = ("STEM, all",), (0.25,)  # 1 / sqrt(n_embd), the run of other questions
    inits = {}
    for name in names:
        for std in stds:
            inits[f"{name}, {std}"] = {**KINDS[name], "init_std": std}
    inits = best_learning_rates(experiment, inits)
    print(f"How dense weights begin:\n\n{table_with_edits(experiment, inits)}\n")
    if experiment.quick or read_meta(experiment.data_dir)["corpus"] != "countries":
        return  # only facts that are edited tell the following apart
    third = KINDS["STEM, third"]
    trained = {
        "the defaults": third,
        "--table_optimizer adamw": {**third, "table_optimizer": "adamw"},
        "--doc_mask": {**third, "doc_mask": True},
        "--table_std 1": {**third, "table_std": 1.0},
    }
    print("Tables of STEM in a third of the layers:\n")
    print(table_with_edits(experiment, trained) + "\n")
    layers = {f"layer {n}": {"ffn": "stem", "stem_layers": str(n)} for n in range(6)}
    print("In one layer:\n")
    print(table_with_edits(experiment, layers))


def table_with_edits(experiment: Experiment, kinds: dict[str, Flags]) -> str:
    """A table of trained kinds, and of the edits that succeed in them."""
    groups = experiment.train(kinds)
    return markdown([row_with_edits(experiment, name, group) for name, group in groups.items()])


def row_with_edits(experiment: Experiment, name: str, folders: list[Path]) -> dict[str, str]:
    group = [read_run(folder) for folder in folders]
    cells = row(name, group)
    edits = ""
    if cells["capitals recalled"] and last_start(group[0])["args"]["ffn"] in ("stem", "embformer"):
        edits = success_of_edits(experiment, folders)
    return {**cells, "edits that succeed": edits}
