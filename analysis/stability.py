"""Does the loss spike? Training losses and gradient norms at rising learning rates.

A spike is a step whose loss is higher than in the ten steps before, and more than six robust
deviations above the median of the ten steps before and behind.
"""

import statistics

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from analysis.experiment import KINDS, Experiment, Run, diverged
from analysis.pictures import markdown, plt, spread
from training.records import read_run

REACH = 10  # steps before and behind that a spike stands out of
NAMES = ("dense", "STEM, all", "moe")
RATES = (3e-3, 1e-2, 3e-2)
STEPS = 250


def stability(experiment: Experiment) -> None:
    rates = RATES[:1] if experiment.quick else RATES
    wanted = {}
    for name in NAMES:
        for rate in rates:
            wanted[name, rate] = {**KINDS[name], "max_iters": STEPS, "learning_rate": rate}
    groups = experiment.train(wanted)

    figure, panels = plt.subplots(2, len(rates), figsize=(11, 6), sharey="row", squeeze=False)
    rows = []
    for (name, rate), folders in groups.items():
        group = [read_run(folder) for folder in folders]
        row = measures(group)
        row["diverged"] = str(sum(diverged(folder) for folder in folders) or "")
        rows.append({"kind": name, "learning rate": f"{rate:g}", **row})
        above, below = panels[:, rates.index(rate)]
        above.set_title(f"learning rate {rate:g}")
        color = f"C{NAMES.index(name)}"
        for run in group:
            label = name if run is group[0] else None
            above.plot(losses(run), color=color, linewidth=0.7, alpha=0.8, label=label)
            below.plot(gradient_norms(run), color=color, linewidth=0.7, alpha=0.8)
    print(markdown(rows))

    for axes, label in zip(panels[:, 0], ("training loss", "gradient norm"), strict=True):
        axes.set(ylabel=label, yscale="log")
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    panels[0, -1].legend()
    figure.supxlabel("step", fontsize="medium")
    experiment.picture("stability", figure)


def measures(group: list[Run]) -> dict[str, str]:
    """The cells of a table about runs of one kind and learning rate."""
    norms = [gradient_norms(run) for run in group]
    final_losses = [statistics.fmean(losses(run)[-25:]) for run in group]
    loads = [load_of_experts(run) for run in group]
    return {
        "spikes in 1,000 steps": spread(".1f", [spike_rate(run) for run in group]),
        "gradient norm, median": spread(".2f", [statistics.median(norm) for norm in norms]),
        "largest after warm-up": spread(".1f", [max(norm[25:] or norm) for norm in norms]),
        "last training loss": spread(".3f", final_losses),
        "load of experts over even": spread(".2f", loads),
    }


def gradient_norms(run: Run) -> list[float]:
    return [step["grad_norm"] for step in run["step"]]


def losses(run: Run) -> list[float]:
    """The training loss of each step, without what moe's router adds to it."""
    return [step["train_loss"] - step.get("train_balance", 0.0) for step in run["step"]]


def load_of_experts(run: Run) -> float | None:
    """The loss of moe's routers at the end, over that of an even load; None: there are none."""
    args = run["run"][-1]["args"]
    if args["ffn"] != "moe":
        return None
    balance = statistics.fmean(step["train_balance"] for step in run["step"][-50:])
    return balance / (args["balance"] * args["n_layer"])


def spike_rate(run: Run) -> float | None:
    """Spikes in 1,000 steps; None if the run is too short to tell."""
    found = spikes(losses(run))
    return 1000 * float(found.mean()) if len(found) else None


def spikes(losses: list[float]) -> np.ndarray:
    """Whether each step is a spike (above), the first and the last REACH steps left out."""
    loss = np.nan_to_num(losses, nan=np.inf).clip(max=1e30)
    inner = loss[REACH:-REACH]
    if not len(inner):
        return np.zeros(0, dtype=bool)
    above = inner - np.median(sliding_window_view(loss, 2 * REACH + 1), axis=1)
    around = np.pad(np.abs(above), 2 * REACH, mode="symmetric")
    # 1.4826: of normal noise this is the standard deviation.
    band = 6 * 1.4826 * np.median(sliding_window_view(around, 4 * REACH + 1), axis=1)
    before = sliding_window_view(loss, REACH)[: len(inner)].max(axis=1)
    return (above > band) & (inner > before)
