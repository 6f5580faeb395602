"""Do the claims about token-indexed models hold? Each question is a subcommand, which prints
tables; some draw a picture, too. What came out, claim by claim, is in docs/claims.md.

    python analyze.py runs out/dense-* out/stem-* --plot loss.png   # compares runs; seeds averaged
    python analyze.py kinds                  # STEM, Embformer and other layers, each at its best
    python analyze.py settings               # which initialisation and learning rate suit a kind
    python analyze.py stability              # loss spikes and gradients at rising learning rates
    python analyze.py capacity               # how many facts fit
    python analyze.py context                # parameters read by length, a needle in a haystack
    python analyze.py attention              # windows: worse? keys of the token before?
    python analyze.py geometry               # angles between rows
    python analyze.py costs                  # FLOPs, parameters read, return on compute
    python analyze.py edits                  # how often swapped rows, and written facts, succeed
    python analyze.py edits out/ckpt.pt      # swapped rows of this checkpoint
    python analyze.py convert                # a dense model turned into tables, against controls
    python analyze.py all --quick            # every question, with tiny models: a smoke test

The runs of train.py that a question needs are trained once, into --out_dir, and shared by all
questions: run the command again to go on where it stopped. After a change of the code that trains,
runs are trained anew. One analysis at a time works in a folder.
"""

from pathlib import Path

from analysis.attention import attention
from analysis.capacity import capacity
from analysis.context import context
from analysis.convert import convert
from analysis.costs import costs
from analysis.edits import edits, measure_checkpoint
from analysis.experiment import Experiment
from analysis.geometry import geometry
from analysis.kinds import kinds, settings
from analysis.runs import runs
from analysis.stability import stability
from common import UserError, add_flags, locked, make_parser, pick_device, run

QUESTIONS = {
    "kinds": kinds,
    "settings": settings,
    "stability": stability,
    "capacity": capacity,
    "context": context,
    "attention": attention,
    "geometry": geometry,
    "costs": costs,
    "edits": edits,
    "convert": convert,
}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("question", choices=("runs", *QUESTIONS, "all"), metavar="QUESTION")
    about = "for runs: folders of train.py; for edits: checkpoints, or none"
    parser.add_argument("paths", nargs="*", type=Path, help=about)
    about = "for runs: picture of the loss (loss.png)"
    parser.add_argument("--plot", type=Path, default=Path("loss.png"), help=about)
    add_flags(parser, Experiment)
    flags = vars(parser.parse_intermixed_args())  # paths before and behind flags
    question = flags.pop("question")
    paths = flags.pop("paths")
    plot = flags.pop("plot")

    if question == "runs" and paths:
        runs(paths, plot)
    elif question == "edits" and paths:
        device = pick_device(flags.get("device", Experiment.device))
        for path in paths:
            measure_checkpoint(path, device)
    elif question == "runs" or paths:
        raise UserError("analyze.py: runs takes folders, edits checkpoints, all others no paths")
    else:
        experiment = Experiment(**flags)
        with locked(experiment.out_dir):
            for name in QUESTIONS if question == "all" else [question]:
                print(f"\n## {name}\n")
                QUESTIONS[name](experiment)


if __name__ == "__main__":
    run(main)
