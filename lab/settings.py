"""settings: two initializations, each at its best rate; how tables are trained; in which layer."""

from lab.edits import table_with_edits
from lab.experiment import KINDS, Experiment, best_learning_rates
from text.dataset import read_meta

INITS = (0.088, 0.02)  # 1 / sqrt(n_embd) of what is trained here, and GPT-2's


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
