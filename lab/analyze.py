"""Do the claims about token-indexed models hold? Each question is a subcommand, which prints
tables; some draw a picture, too. What came out, claim by claim, is in docs/claims.md.

    python lab/analyze.py runs out/dense-* out/stem-* --plot loss.png   # compares; seeds averaged
    python lab/analyze.py ladder           # all kinds of layers, with controls, five seeds
    python lab/analyze.py ladder scaled    # relatives/scaled.py beside dense and STEM alone
    python lab/analyze.py scale --data_dir data/classics    # after 0.5 to 113 million tokens
    python lab/analyze.py settings         # which initialization and learning rate suit a kind
    python lab/analyze.py stability        # loss spikes and gradients at rising learning rates
    python lab/analyze.py context          # parameters read by length, a needle in a haystack
    python lab/analyze.py attention        # windows: worse? keys of the token before?
    python lab/analyze.py geometry         # angles between rows
    python lab/analyze.py costs            # FLOPs, parameters read, return on compute
    python lab/analyze.py edits            # how often swapped rows succeed
    python lab/analyze.py edits out/ckpt.pt    # swapped rows of this checkpoint
    python lab/analyze.py counterfact      # facts written in sequence, beside ROME, MEMIT, LoRA
    python lab/analyze.py convert          # a dense model turned into tables, against controls
    python lab/analyze.py token_share out/dense/ckpt.pt     # what of a dense FFN the token explains
    python lab/analyze.py all --quick      # all that train, with tiny models: a smoke test

The runs of train.py that a question needs are trained once, into --out_dir, and shared by all
questions: run the command again to go on where it stopped. A kind whose file in relatives/ has
changed is trained anew, and all kinds after a setting was added to train.py; after any other change
of the code, --fresh trains all anew. One analysis at a time works in a folder.
"""

import signal
import sys
from argparse import SUPPRESS
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import UserError, add_flags, locked, make_parser, pick_device, run_command
from lab.attention import attention
from lab.context import context
from lab.convert import convert
from lab.costs import costs
from lab.counterfact import counterfact
from lab.edits import edits, measure_checkpoint
from lab.experiment import Experiment
from lab.geometry import geometry
from lab.ladder import ladder
from lab.pictures import MEANING
from lab.runs import runs
from lab.scale import scale
from lab.settings import settings
from lab.stability import stability
from lab.token_share import token_share

QUESTIONS = {
    "ladder": ladder,
    "settings": settings,
    "stability": stability,
    "context": context,
    "attention": attention,
    "geometry": geometry,
    "costs": costs,
    "edits": edits,
    "counterfact": counterfact,
    "convert": convert,
    "scale": scale,  # last, as it refuses short texts
}
# The flags of questions about runs or checkpoints that are given; all others have `Experiment`'s.
OF_GIVEN = {
    "runs": ("plot",),
    "token_share": ("plot", "tokens", "block_size", "data_dir", "device"),
    "edits": ("device",),
}
SMOKE = "; --quick is a smoke test: after two steps of training, no figure means anything"


def main() -> None:
    parser = make_parser(__doc__)
    names = ("runs", "token_share", *QUESTIONS, "all")
    parser.add_argument("question", nargs="?", choices=names, metavar="QUESTION")
    about = (
        "for runs: folders of train.py; for token_share: checkpoints; for edits: checkpoints, or "
        "none; for ladder: kinds"
    )
    parser.add_argument("given", nargs="*", metavar="GIVEN", help=about)
    own = {"default": SUPPRESS}  # so that what was given can be told
    about = "picture of runs (out/runs.png), of token_share (out/token_share.png)"
    parser.add_argument("--plot", type=Path, help=about, **own)
    about = "for token_share: training tokens to read (1000000)"
    parser.add_argument("--tokens", type=int, help=about, **own)
    about = "for token_share: length of windows (the model's context)"
    parser.add_argument("--block_size", type=int, help=about, **own)
    add_flags(parser, Experiment)
    flags = vars(parser.parse_intermixed_args())  # those given stand before and after flags
    question, given = flags.pop("question"), flags.pop("given")
    if question is None:
        parser.error(f"which question? {', '.join(names)}")
    takes = (*OF_GIVEN, "ladder")
    if (given and question not in takes) or (not given and question in ("runs", "token_share")):
        raise UserError(
            "analyze.py: runs takes folders, token_share and edits checkpoints, ladder kinds of "
            "--ffn"
        )
    known = [field.name for field in fields(Experiment)]
    if given and question in OF_GIVEN:
        known = OF_GIVEN[question]
    others = [f"--{name}" for name in flags if name not in known]
    if others:
        parser.error(f"{question} has no {' '.join(others)}")
    if question not in OF_GIVEN or not given:
        answer(Experiment(**flags), question, given)
        return

    paths = [Path(path) for path in given]
    device = pick_device(flags.get("device", Experiment.device))
    plot = flags.get("plot", Path("out", f"{question}.png"))
    if plot.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {plot}: name a .png, .svg or .pdf file")
    if question == "runs":
        runs(paths, plot)
    elif question == "token_share":
        n_token, block_size = flags.get("tokens", 10**6), flags.get("block_size")
        if n_token < 1:
            raise UserError(f"--tokens {n_token}: give 1 or more")
        data_dir = str(flags.get("data_dir", Experiment.data_dir))
        token_share(paths, data_dir, n_token, block_size, device, plot)
    else:
        for path in paths:
            measure_checkpoint(path, device)


def answer(experiment: Experiment, question: str, given: list[str]) -> None:
    """Answer a question, or all, from runs that are trained where they are missing."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with locked(experiment.out_dir):
        if experiment.fresh:
            experiment.clear()
        for name in QUESTIONS if question == "all" else [question]:
            print(f"\n## {name}\n")
            QUESTIONS[name](experiment, *given)
            print(f"\n{MEANING}{SMOKE if experiment.quick else ''}")


if __name__ == "__main__":
    run_command(main)
