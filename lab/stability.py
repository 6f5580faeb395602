"""Does the loss spike? Training losses and gradient norms at rising learning rates.

A spike is a step whose loss is higher than in the ten steps before, and far above the median of the
21 steps around it: by six robust deviations from such medians.
"""

import statistics

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from lab.experiment import HASH_LAYERS, Experiment, Run, pick
from lab.pictures import colors, interval, markdown, plt
from training.records import read_run

REACH = 10  # steps before and after that a spike stands out of
COMPARED = {**pick("dense", "STEM, all"), "moe": {"ffn": "moe"}, **HASH_LAYERS}
RATES = (3e-3, 1e-2, 3e-2)
STEPS = 250


def stability(experiment: Experiment) -> None:
    rates = RATES[:1] if experiment.quick else RATES
    wanted = {}
    for name, flags in COMPARED.items():
        for rate in rates:
            wanted[name, rate] = {**flags, "max_iters": STEPS, "learning_rate": rate}
    figure, panels = plt.subplots(1, len(rates), figsize=(11, 4), sharey=True, squeeze=False)
    rows = []
    for (name, rate), folders in experiment.train(wanted).items():
        runs = [read_run(folder) for folder in folders]
        row = {"kind": name, "learning rate": f"{rate:g}"}
        rows.append({**row, **measures(runs)})
        axes = panels[0, rates.index(rate)]
        axes.set(title=f"learning rate {rate:g}", xlabel="step", yscale="log")
        color = colors(COMPARED)[name]
        for run in runs:
            axes.plot(losses(run), color=color, linewidth=0.7)
        axes.lines[-1].set_label(name)
        axes.yaxis.set_major_formatter("{x:g}")  # 2, not 2 x 10^0
        axes.yaxis.set_minor_formatter("{x:g}")
    print(markdown(rows))
    panels[0, 0].set_ylabel("training loss")
    panels[0, -1].legend()
    experiment.picture("stability", figure)


def measures(runs: list[Run]) -> dict[str, str]:
    """The cells of a table about runs of one kind and learning rate."""
    largest = []
    last_losses = []
    for run in runs:
        norms = [step["grad_norm"] for step in run["step"]]
        warmup = len(norms) // 10
        largest.append(float(np.max(norms[warmup:])))  # NaN if one is
        last_losses.append(statistics.fmean(losses(run)[-25:]))
    return {
        "spikes in 1,000 steps": interval(".1f", [spike_rate(run) for run in runs]),
        "largest gradient norm after warm-up": interval(".1f", largest),
        "last training loss": interval(".3f", last_losses),
    }


def losses(run: Run) -> list[float]:
    """The training loss of each step."""
    return [step["train_loss"] for step in run["step"]]


def spike_rate(run: Run) -> float | None:
    """Spikes in 1,000 steps; None if the run is too short to tell."""
    found = spikes(losses(run))
    return 1000 * float(found.mean()) if len(found) else None


def spikes(losses: list[float]) -> np.ndarray:
    """Whether each step is a spike (above), the first and the last REACH steps left out."""
    if len(losses) <= 2 * REACH:
        return np.zeros(0, dtype=bool)
    loss = np.nan_to_num(losses, nan=1e30, posinf=1e30)
    inner = loss[REACH:-REACH]
    windows = sliding_window_view(loss, 2 * REACH + 1)
    above = inner - np.median(windows, axis=1)
    padded = np.pad(np.abs(above), 2 * REACH, mode="symmetric")
    windows = sliding_window_view(padded, 4 * REACH + 1)
    # 1.4826: of normal noise this is the standard deviation.
    band = 6 * 1.4826 * np.median(windows, axis=1)
    before = sliding_window_view(loss, REACH)[: len(inner)]
    return (above > band) & (inner > before.max(axis=1))
