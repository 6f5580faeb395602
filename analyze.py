"""Do the claims about token-indexed models hold? Each question is a subcommand, which ends in a
table and a picture. What came out, claim by claim, is in docs/claims.md.

    python analyze.py runs out/dense-* out/stem-* --plot loss.png   # runs side by side
    python analyze.py kinds                  # STEM, Embformer and other layers, each at its best
    python analyze.py settings               # which initialisation and learning rate suit a kind
    python analyze.py stability              # loss spikes and gradients at rising learning rates
    python analyze.py capacity               # how many facts fit
    python analyze.py context                # rows read by length, and a needle in a haystack
    python analyze.py geometry               # angles between rows, neighbours of a token
    python analyze.py costs                  # FLOPs, parameters read, cache, return on compute
    python analyze.py edits                  # which layers' rows hold a fact
    python analyze.py all --quick            # every question, with tiny models: does it run?

The runs of train.py that a question needs are trained once, into --out_dir, and shared by all
questions: start it again, and it goes on where it was stopped. `runs` takes the folders of any
runs; those that differ in nothing but the seed are one row and one curve.
"""

from pathlib import Path

from analysis.capacity import capacity
from analysis.context import context
from analysis.costs import costs
from analysis.edits import edits
from analysis.experiment import Experiment
from analysis.geometry import geometry
from analysis.runs import kinds, runs, settings, stability
from common import UserError, add_flags, make_parser, run

QUESTIONS = (kinds, settings, stability, capacity, context, geometry, costs, edits)


def main() -> None:
    parser = make_parser(__doc__)
    questions = {question.__name__: question for question in QUESTIONS}
    parser.add_argument("what", choices=("runs", *questions, "all"), metavar="QUESTION")
    parser.add_argument("folders", nargs="*", type=Path, help="of runs: output folders of train.py")
    parser.add_argument("--plot", type=Path, help="of runs: picture of the loss (loss.png)")
    add_flags(parser, Experiment)
    given = vars(parser.parse_intermixed_args())  # folders before and behind flags
    what, folders, plot = (given.pop(name) for name in ("what", "folders", "plot"))
    if what == "runs":
        if not folders or given:
            raise UserError("analyze.py runs takes folders and --plot, nothing else")
        return runs(folders, plot or Path("loss.png"))
    if folders or plot:
        raise UserError(f"analyze.py {what} takes no folders and no --plot: its --out_dir has all")
    experiment = Experiment(**given)
    for name in questions if what == "all" else [what]:
        if what == "all":
            print(f"\n## {name}\n")
        questions[name](experiment)


if __name__ == "__main__":
    run(main)
