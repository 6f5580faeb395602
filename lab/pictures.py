"""Tables and pictures of several runs."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # files only; must come before pyplot
from matplotlib import pyplot as plt

from common import atomic

plt.rcParams.update({"axes.grid": True, "grid.alpha": 0.3, "figure.constrained_layout.use": True})


def markdown(rows: list[dict[str, str]]) -> str:
    """A Markdown table of rows with the same titles, without columns in which nothing stands."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        cells = [row[title] for title in titles]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(form: str, figures: Sequence[float | None]) -> str:
    """A figure of some runs: mean ± standard deviation; one run's own, nothing if none has it."""
    known = [figure for figure in figures if figure is not None]
    if not known:
        return ""
    mean = format(np.mean(known), form)
    if len(known) == 1:
        return mean
    deviation = format(np.std(known, ddof=1), form)
    return f"{mean} ± {deviation}"


def save_figure(figure: plt.Figure, path: Path) -> None:
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=130, format=path.suffix.lstrip("."))
    plt.close(figure)
