"""Put training runs side by side: loss curves in one picture, results in one table.

    python compare.py out/dense out/stem out/embformer --out loss.png

Reads the metrics.jsonl that train.py writes and prints a Markdown table.
"""

import statistics
from pathlib import Path

from common import UserError, make_parser, run
from training.records import plot, read_run


def table(folders: list[Path]) -> str:
    """The results as a Markdown table; tok/s is the median over a run's steps."""
    lines = [
        "| run | FFN | val loss, last | best | per byte | capitals recalled | parameters | active "
        "| tok/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for folder in folders:
        records = read_run(folder)
        last, sizes = records["eval"][-1], records["run"][0]["sizes"]
        best = min((record["val_loss"] for record in records["eval"]), key=lambda x: (x != x, x))
        recall = f"{records['recall'][-1]['recall']:.1%}" if records["recall"] else ""
        per_byte = last.get("val_loss_per_byte")  # none for preferences, whose loss is per pair
        per_byte = f"{per_byte:.3f}" if isinstance(per_byte, float) else ""
        speed = statistics.median(record["tok_per_s"] for record in records["step"])
        lines.append(
            f"| {folder.name} | {records['run'][0]['args']['ffn']} | {last['val_loss']:.3f} "
            f"| {best:.3f} | {per_byte} | {recall} | {sizes['total'] / 1e6:.2f} M "
            f"| {sizes['active'] / 1e6:.2f} M | {speed:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
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
