"""Tables and pictures of several runs."""

from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # files only; must come before pyplot
from matplotlib import pyplot as plt

from common import UserError, atomic

plt.rcParams.update({"axes.grid": True, "grid.alpha": 0.3, "figure.constrained_layout.use": True})


def markdown(rows: list[dict[str, str]]) -> str:
    """A Markdown table of rows with the same titles, without columns in which nothing stands."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        cells = [row[title] for title in titles]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(form: str, figures: Iterable[float | None]) -> str:
    """A figure of some runs: mean ± standard deviation; one run's own, nothing if none has it."""
    known = [figure for figure in figures if figure is not None]
    if not known:
        return ""
    mean = format(np.mean(known), form)
    if len(known) == 1:
        return mean
    deviation = np.std(known, ddof=1)
    return f"{mean} ± {deviation:{form}}"


def losses_of(runs: list[dict], kind: str, loss: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps [n] of which all runs have a record of this kind (one may have stopped earlier),
    and their losses there [runs, n]."""
    by_step = []
    for run in runs:
        by_step.append({record["step"]: record[loss] for record in run[kind]})
    common = set(by_step[0]).intersection(*by_step[1:])
    steps = sorted(common)
    losses = [[of_run[step] for step in steps] for of_run in by_step]
    return np.array(steps), np.array(losses)


def mean_and_band(axes: plt.Axes, x: np.ndarray, ys: np.ndarray, **look) -> None:
    """Draw the mean of curves `ys` [runs, n] over `x` [n], with a band from lowest to highest."""
    (line,) = axes.plot(x, ys.mean(0), **look)
    if len(ys) > 1:
        color = line.get_color()
        axes.fill_between(x, ys.min(0), ys.max(0), color=color, alpha=0.2, linewidth=0)


def check_picture(path: Path | None) -> None:
    """UserError: --plot names no file of a kind that can be drawn."""
    if path and path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {path}: name a .png, .svg or .pdf file")


def save_figure(figure: plt.Figure, path: Path) -> None:
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=130, format=path.suffix.lstrip("."))
    plt.close(figure)
