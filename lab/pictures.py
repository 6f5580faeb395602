"""Tables and pictures of several runs."""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only; must come before pyplot
from matplotlib import pyplot as plt
from matplotlib.container import ErrorbarContainer

from common import atomic

plt.rcParams.update({"axes.grid": True, "grid.alpha": 0.3, "figure.constrained_layout.use": True})

# Of the kinds that most pictures have, in all of them; other kinds take the others in turn.
COLORS = {"dense": "black", "STEM, all": "C0", "STEM, third": "C9", "Embformer": "C3"}
OTHER_COLORS = ("C1", "C2", "C4", "C5", "C6", "C7", "C8", "tan")


def colors(names: Iterable[str]) -> dict[str, str]:
    """A color for each kind."""
    others = itertools.cycle(OTHER_COLORS)
    return {name: COLORS.get(name) or next(others) for name in names}


def markdown(rows: list[dict[str, str]]) -> str:
    """A Markdown table of rows with the same titles, without columns in which nothing stands."""
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        cells = [" ".join(row[title].split()).replace("|", r"\|") for title in titles]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# Student's t for 95 %, of 2 to 10 figures. Intervals of more take the last, a little too wide.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
MEANING = "± is the 95 % interval of the mean over seeds (Student's t)"


def interval(form: str, figures: Sequence[float | None]) -> str:
    """A figure of some runs: its mean and what that may be off, with 95 % confidence; one run's
    own, nothing if none has it."""
    known = [figure for figure in figures if figure is not None]
    if not known:
        return ""
    mean = format(statistics.fmean(known), form)
    if len(known) == 1:
        return mean
    return f"{mean} ± {format(off(known), form.lstrip('+'))}"


def off(figures: Sequence[float]) -> float:
    """Half the interval in which the mean of figures lies, with 95 % confidence; NaN of one, and of
    those that are not all finite."""
    if len(figures) < 2 or not all(map(math.isfinite, figures)):
        return math.nan
    t = T95[min(len(figures) - 2, len(T95) - 1)]
    return t * statistics.stdev(figures) / math.sqrt(len(figures))


def draw_means(
    axes: plt.Axes, x: Sequence[float], points: Sequence[list[float]], **how
) -> ErrorbarContainer:
    """Draw the means of the figures at each point over x, with their 95 % intervals."""
    means = [statistics.fmean(figures) for figures in points]
    errors = [off(figures) for figures in points]
    return axes.errorbar(x, means, errors, capsize=2, **how)


def save_figure(figure: plt.Figure, path: Path) -> None:
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=130, format=path.suffix.lstrip("."))
    plt.close(figure)
