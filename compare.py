"""Put training runs side by side: loss curves in one picture, results in one table.

    python compare.py out/dense out/stem out/embformer --out loss.png
    python compare.py out/dense-1 out/dense-2 out/dense-3 out/stem-*    # two rows: mean ± spread

Runs whose settings differ in nothing but the seed are one row and one curve. Reads metrics.jsonl,
which train.py writes, and edit.py's edit_report.json if there is one. Prints a Markdown table.
"""

import statistics
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from common import UserError, make_parser, run
from training.records import grouped, plot


def spread(form: str, figures: Iterable[float | None]) -> str:
    """A figure of some runs: mean ± standard deviation; one run's own, nothing if none has it."""
    found = [figure for figure in figures if isinstance(figure, float)]
    if len(found) < 2:
        return "".join(format(figure, form) for figure in found)
    return f"{np.mean(found):{form}} ± {np.std(found, ddof=1):{form}}"


def table(folders: list[Path]) -> str:
    """The results as a Markdown table without empty columns; tok/s is the median over a run's
    steps."""
    rows = []
    for name, runs in grouped(folders):
        last, sizes = [run["eval"][-1] for run in runs], runs[0]["run"][0]["sizes"]
        best = [np.nanmin([record["val_loss"] for record in run["eval"]]) for run in runs]
        speeds = [statistics.median(step["tok_per_s"] for step in run["step"]) for run in runs]
        edits = [report for run in runs for report in run["edits"]]
        recalls = [record["recall"] for run in runs for record in run["recall"][-1:]]
        rows.append(
            {
                "run": name,
                "runs": str(len(runs)) if len(runs) > 1 else "",
                "FFN": runs[0]["run"][0]["args"]["ffn"],
                "val loss, last": spread(".3f", (record["val_loss"] for record in last)),
                "best": spread(".3f", best),
                # none for preferences, whose loss is per pair
                "per byte": spread(".3f", (record.get("val_loss_per_byte") for record in last)),
                "capitals recalled": spread(".1%", recalls),
                "recall before edits": spread(".1%", (report["recall"] for report in edits)),
                "edits that succeed": spread(".1%", (report["success"] for report in edits)),
                "parameters": f"{sizes['total'] / 1e6:.2f} M",
                "active": f"{sizes['active'] / 1e6:.2f} M",
                "tok/s": spread(",.0f", speeds),
            }
        )
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    cells = [titles, *([row[title] for title in titles] for row in rows)]
    head, *lines = (f"| {' | '.join(line)} |" for line in cells)
    return "\n".join([head, "|---" * len(titles) + "|", *lines])


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
