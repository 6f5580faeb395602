"""Put training runs side by side: loss curves in one picture, results in one table.

    python compare.py out/dense out/stem out/embformer --out loss.png

Reads the metrics.jsonl that train.py writes and prints a Markdown table.
"""

import argparse
import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only; must come before pyplot
from matplotlib import pyplot as plt

from common import UserError, atomic, run
from tokenizer import check_form

# What the records of each type must have, as far as it is shown.
RECORDS = {
    "run": dict(
        args=dict(ffn=str, batch_size=int, block_size=int), sizes=dict(total=int, active=int)
    ),
    "step": dict(step=int, train_loss=float, tok_per_s=float),
    "eval": dict(step=int, val_loss=float),
    "recall": dict(recall=float),
}


def read_run(folder: Path) -> dict[str, list[dict]]:
    """The records of a run's metrics.jsonl by type.

    Raises:
        UserError: the file is missing or a line of it is damaged.
    """
    path = folder / "metrics.jsonl"
    records: dict[str, list[dict]] = {kind: [] for kind in RECORDS}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            check_form(record, dict(type=str), "record")
            check_form(record, RECORDS[record["type"]], record["type"])
            records[record["type"]].append(record)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}): leave it out") from None
    if not all(records[kind] for kind in ("run", "step", "eval")):
        raise UserError(f"{path} has no run with a step and an evaluation in it")
    return records


def plot(folders: list[Path], out: Path) -> None:
    """Draw the training loss (thin) and validation loss (thick) of runs over their tokens, or over
    their steps, if one of them read conversations, which are not equally long."""
    runs = {folder: read_run(folder) for folder in folders}
    stages = [records["run"][0]["args"].get("stage", "pretrain") for records in runs.values()]
    by_step = any(stage in ("sft", "dpo") for stage in stages)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for number, (folder, records) in enumerate(runs.items()):
        settings = records["run"][0]["args"]
        step = 1 if by_step else settings["batch_size"] * settings["block_size"] / 1e6
        label = f"{folder.name}: {settings['ffn']}"
        label = label.encode(errors="replace").decode()  # a name may be bytes that are no text
        for kind, loss, look in (
            ("step", "train_loss", dict(alpha=0.3, linewidth=0.8)),
            ("eval", "val_loss", dict(marker=".", label=label)),
        ):
            steps = [record["step"] * step for record in records[kind]]
            axes.plot(steps, [record[loss] for record in records[kind]], color=f"C{number}", **look)
    axes.set_xlabel("steps" if by_step else "million tokens")
    unit = "per pair" if "dpo" in stages else "per token"
    axes.set_ylabel(f"loss (nats {unit}); thin: training, thick: validation")
    axes.set_yscale("log")  # the first steps fall by as much as all others
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    for text in axes.legend().get_texts():
        text.set_parse_math(False)  # a $ in a name is no formula
    with atomic(out) as temporary:
        figure.savefig(temporary, dpi=130, format=out.suffix.lstrip("."))
    plt.close(figure)


def table(folders: list[Path]) -> str:
    """The results as a Markdown table; tok/s is the median over a run's steps."""
    lines = [
        "| run | FFN | val loss | per byte | capitals recalled | parameters | active | tok/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for folder in folders:
        records = read_run(folder)
        last, sizes = records["eval"][-1], records["run"][0]["sizes"]
        recall = f"{records['recall'][-1]['recall']:.1%}" if records["recall"] else ""
        per_byte = last.get("val_loss_per_byte")  # none for preferences, whose loss is per pair
        per_byte = f"{per_byte:.3f}" if isinstance(per_byte, float) else ""
        speed = statistics.median(record["tok_per_s"] for record in records["step"])
        lines.append(
            f"| {folder.name} | {records['run'][0]['args']['ffn']} | {last['val_loss']:.3f} "
            f"| {per_byte} | {recall} | {sizes['total'] / 1e6:.2f} M "
            f"| {sizes['active'] / 1e6:.2f} M | {speed:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="output folders of train.py")
    parser.add_argument("--out", type=Path, default=Path("loss.png"), help="picture (%(default)s)")
    args = parser.parse_args()
    if args.out.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--out {args.out}: name a .png, .svg or .pdf file")
    print(table(args.runs))
    plot(args.runs, args.out)
    print(f"\nwrote {args.out}")


if __name__ == "__main__":
    run(main)
