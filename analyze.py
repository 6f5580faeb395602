"""Do the claims about token-indexed models hold? Each question is a subcommand, which ends in a
table and a picture. What came out, claim by claim, is in docs/claims.md.

    python analyze.py runs out/dense-* out/stem-* --plot loss.png   # compares runs; seeds averaged
    python analyze.py kinds                  # STEM, Embformer and other layers, each at its best
    python analyze.py settings               # which initialisation and learning rate suit a kind
    python analyze.py stability              # loss spikes and gradients at rising learning rates
    python analyze.py capacity               # how many facts fit
    python analyze.py context                # parameters read by length, a needle in a haystack
    python analyze.py attention              # windows, counts: worse? keys of the token before?
    python analyze.py geometry               # angles between rows, neighbours of a token
    python analyze.py costs                  # FLOPs, parameters read, return on compute
    python analyze.py edits                  # which layers' rows hold a fact
    python analyze.py edits out/ckpt.pt      # how often edits of this checkpoint succeed
    python analyze.py convert                # a dense model turned into tables, against controls
    python analyze.py all --quick            # every question, with tiny models: does it run?

The runs of train.py that a question needs are trained once, into --out_dir, and shared by all
questions: start it again, and it goes on where it was stopped.
"""

from pathlib import Path

from analysis.attention import attention
from analysis.capacity import capacity
from analysis.context import context
from analysis.convert import convert
from analysis.costs import costs
from analysis.edit_success import measure_checkpoint
from analysis.edits import edits
from analysis.experiment import Experiment
from analysis.geometry import geometry
from analysis.runs import kinds, runs, settings, stability
from common import UserError, add_flags, make_parser, pick_device, run

QUESTIONS = (kinds, settings, stability, capacity, context)
QUESTIONS += (attention, geometry, costs, edits, convert)


def main() -> None:
    parser = make_parser(__doc__)
    questions = {question.__name__: question for question in QUESTIONS}
    parser.add_argument("question", choices=("runs", *questions, "all"), metavar="QUESTION")
    about = "for runs: output folders of train.py; for edits: checkpoints, or none"
    parser.add_argument("paths", nargs="*", type=Path, help=about)
    about = "for runs: picture of the loss (loss.png)"
    parser.add_argument("--plot", type=Path, default=Path("loss.png"), help=about)
    add_flags(parser, Experiment)
    given = vars(parser.parse_intermixed_args())  # paths before and behind flags
    name, paths, plot = (given.pop(key) for key in ("question", "paths", "plot"))
    if name == "runs" and paths:
        return runs(paths, plot)
    if name == "edits" and paths:
        device = pick_device(given.get("device", Experiment.device))
        return [measure_checkpoint(path, device) for path in paths]
    if name == "runs" or paths:
        raise UserError("analyze.py: runs takes folders, edits checkpoints, all others no paths")
    experiment = Experiment(**given)
    for each in questions if name == "all" else [name]:
        print(f"\n## {each}\n")
        questions[each](experiment)


if __name__ == "__main__":
    run(main)
