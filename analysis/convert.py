"""Is it worth converting a dense model to tables (training/convert.py), and for which layers?

Dense models are converted and trained on, beside what one could do instead: train them as they are,
begin with random rows, or train STEM from scratch for as many tokens in all.
"""

from itertools import product

from analysis.edits import success_of_edits
from analysis.experiment import KINDS, Experiment, best_loss, spread
from training.records import markdown, plt, read_run
from training.settings import resolve_settings

STEM, DECAY = KINDS["STEM, all"], {"weight_decay": 3.0}  # what weights forget, rows have to learn
# Whose model a run goes on from, its flags, and its tokens in all over those of the dense model.
RUNS = {
    "dense": ("", KINDS["dense"], (1,)),
    "converted": ("dense", STEM, (1,)),
    "dense, trained on": ("dense", {}, (1.1, 1.3, 2)),
    "converted, trained on": ("converted", {}, (1.1, 1.3, 2)),
    "random rows, trained on": ("dense", {**STEM, "convert_tokens": 0}, (1.1, 1.3)),
    "STEM from scratch": ("", STEM, (1.3,)),
}
MORE = {  # without --quick
    **{f"layers {n}": ("dense", {**STEM, "stem_layers": n}, (1,)) for n in ("1", "1,2", "1,2,3")},
    "a third": ("dense", KINDS["STEM, third"], (1,)),
    "mean of all tokens": ("dense", {**STEM, "convert_prior": 1e9}, (1,)),
    "dense, weight decay": ("dense", DECAY, (1.3,)),
    "converted, weight decay": ("converted", DECAY, (1.3,)),
    "a third, weight decay": ("a third", DECAY, (1.3,)),
}


def convert(experiment: Experiment) -> None:
    corpora = [experiment.data_dir, experiment.data_dir.with_name("moby-dick")]
    corpora, wanted = (corpora[:1], RUNS) if experiment.quick else (corpora, RUNS | MORE)
    folders = {}  # by corpus, name and tokens: of each seed
    for name, (origin, flags, totals) in wanted.items():
        runs = {}
        for data, total in product(corpora, totals):
            experiment.ensure_prepared(data)
            steps = round(resolve_settings(data_dir=str(data)).max_iters * (total - bool(origin)))
            for n, seed in enumerate(experiment.numbers):
                more = {"init_from": folders[data, origin, 1][n] / "ckpt.pt"} if origin else {}
                more |= {"data_dir": str(data), "max_iters": steps, "seed": seed}
                if experiment.quick and origin and flags:  # to tables: from less text
                    more = {"convert_tokens": 4096} | more
                runs[data, name, total, n] = {**more, **flags}
        for key, trained in experiment.train(runs, experiment.numbers[:1]).items():
            folders.setdefault(key[:3], []).extend(trained)

    figure, panels = plt.subplots(1, len(corpora), figsize=(11, 5), squeeze=False, sharey=True)
    for axes, data in zip(panels[0], corpora, strict=True):
        rows, title = [], f"loss on {data.name}, last"
        for (_, name, total), group in [item for item in folders.items() if item[0][0] == data]:
            runs = list(map(read_run, group))
            last = [run["eval"][-1]["val_loss"] for run in runs]
            recall = [record["recall"] for run in runs for record in run["recall"]]
            rows.append({"model": name, "tokens": f"{total:g}", title: spread(".3f", last)})
            rows[-1] |= {"best": spread(".3f", map(best_loss, runs))}
            rows[-1] |= {"capitals recalled": spread(".1%", recall), "edits that succeed": ""}
            if recall and not name.startswith("dense"):
                edits = success_of_edits(experiment, group, most=300)
                rows[-1]["edits that succeed"] = spread(".1%", (each["success"] for each in edits))
            axes.plot(last, [f"{name}, {total:g}"] * len(last), ".", color="C0")
        print(markdown(rows) + "\n")
        axes.set_xlabel(title)
    experiment.picture("convert", figure)
