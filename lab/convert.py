"""Is it worth converting a dense model to tables (convert.py)?

Dense models are converted and trained on, and compared with the alternatives: training them as they
are, beginning with random rows, or training STEM from scratch for as many tokens in all.
"""

from pathlib import Path
from typing import NamedTuple

from lab.edits import row_with_edits
from lab.experiment import KINDS, Experiment, Flags, last_checkpoint
from lab.pictures import markdown
from train import resolve_settings
from training.checkpoints import save_checkpoint
from training.dense_to_stem import dense_to_stem

TOKENS = 10**6  # of the training text, to fill rows from


class Model(NamedTuple):
    """Models to be trained, one for each seed."""

    origin: str = ""  # the name of the model to go on with
    tokens: int | None = None  # to fill rows from, as it is converted before; 0: rows are random
    flags: Flags = {}  # noqa: RUF012
    totals: tuple[float, ...] = (1,)  # tokens in all over those of the dense model


MODELS = {
    "dense": Model(flags=KINDS["dense"]),
    "converted": Model("dense", TOKENS),
    "dense, trained on": Model("dense", totals=(1.3, 2)),
    "converted, trained on": Model("converted", totals=(1.3, 2)),
    "random rows, trained on": Model("dense", tokens=0, totals=(1.3,)),
    "STEM from scratch": Model(flags=KINDS["STEM, all"], totals=(1.3,)),
    # What weights forget, rows have to learn.
    "converted, weight decay": Model("converted", flags={"weight_decay": 3.0}, totals=(1.3,)),
}


def convert(experiment: Experiment) -> None:
    corpora, names = [experiment.data_dir], ("dense", "converted")
    if not experiment.quick:
        corpora.append(experiment.novel)
        names = tuple(MODELS)
    for data_dir in corpora:
        rows = []
        for (name, total), folders in train_models(experiment, data_dir, names).items():
            cells = row_with_edits(experiment, name, folders)
            rows.append({"tokens in all": f"{total:g}", **cells})
        print(f"On {data_dir.name}:\n\n{markdown(rows)}\n")


def train_models(
    experiment: Experiment, data_dir: Path, names: tuple[str, ...]
) -> dict[tuple[str, float], list[Path]]:
    """The runs of MODELS, one for each seed, by name and tokens in all."""
    dense = experiment.all_flags({"data_dir": str(data_dir)})
    steps = resolve_settings(**dense).max_iters
    folders = {}
    for name in names:
        model = MODELS[name]
        flags = {**model.flags, "data_dir": str(data_dir)}
        trained = 0
        if model.origin:
            trained = 1
            origins = list(map(last_checkpoint, folders[model.origin, 1]))
            if model.tokens is not None:
                origins = [converted(experiment, path, data_dir, model.tokens) for path in origins]
            flags["init_from"] = origins
        wanted = {}
        for total in model.totals:
            wanted[name, total] = {**flags, "max_iters": round(steps * (total - trained))}
        folders |= experiment.train(wanted)
    return folders


def converted(experiment: Experiment, dense: Path, data_dir: Path, tokens: int) -> Path:
    """A dense checkpoint with all layers but the first converted to tables, as by convert.py,
    unless it is there."""
    if experiment.quick:
        tokens = 4096
    out = experiment.out_dir / "converted" / f"{dense.parent.name}-{tokens}" / "ckpt.pt"
    if not out.exists():
        tables, encoding, training = dense_to_stem(
            dense, "all", str(data_dir), tokens, device=experiment.on
        )
        save_checkpoint(out, tables, encoding, **training)
    return out
