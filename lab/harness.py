"""Score a checkpoint on the tasks of EleutherAI's lm-evaluation-harness (`pip install lm_eval`).

    python lab/harness.py out/ckpt.pt hellaswag,arc_easy

Those tasks need models trained on billions of tokens; models trained for minutes score at chance.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from tiktoken import Encoding
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import UserError, make_parser, run_command

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.utils import make_table
except ModuleNotFoundError as error:
    if error.name != "lm_eval":
        raise
    LM = object
    simple_evaluate = None

# isort: split

from model import Decoder
from sample import with_room, write
from text.tokenizer import encode
from training.checkpoints import load_model


class HarnessModel(LM):
    """What the harness calls, with lists of requests, whose `args` are texts and options. As in
    training, <|endoftext|> comes before every text."""

    def __init__(self, model: Decoder, encoding: Encoding) -> None:
        super().__init__()
        self.model = model
        self.encoding = encoding

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """For each (context, continuation) the log-probability of the continuation in nats, and
        whether greedy decoding gives it."""
        scores = []
        for request in tqdm(requests, "scoring", disable=None):
            context, continuation = request.args
            scores.append(self.score(*self.split(context, continuation)))
        return scores

    def split(self, context: str, continuation: str) -> tuple[list[int], int]:
        """The tokens of a text, and the first that is scored: where it begins to differ from its
        context alone. The continuation may be merged with the context's last token ("Country: Sp"
        and "ain"): that token is scored as a whole."""
        before = encode(self.encoding, context)
        ids = encode(self.encoding, context + continuation)
        first = 0
        while first < min(len(before), len(ids) - 1) and before[first] == ids[first]:
            first += 1
        return ids, max(1, first)

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """For each (text,) its log-probability in nats."""
        return [self.score(encode(self.encoding, request.args[0]), 1)[0] for request in requests]

    @torch.inference_mode()
    def score(self, ids: list[int], first: int) -> tuple[float, bool]:
        """The log-probability of ids[first:], and whether each is the most probable token. More
        than fit into the context are predicted window by window; the last window is a full one."""
        size = self.model.config.block_size
        total = 0.0
        greedy = True
        for start in range(first, len(ids), size):
            window = torch.tensor([ids[: start + size][-size - 1 :]])  # [1, T + 1]
            n = min(size, len(ids) - start)  # tokens to predict
            target = window[0, -n:, None]  # [n, 1]
            logits, _ = self.model(window[:, :-1])  # [1, T, V]
            log_p = logits[0, -n:].float().log_softmax(-1).cpu()  # [n, V]
            total += log_p.gather(1, target).sum().item()
            greedy = greedy and torch.equal(log_p.argmax(1, keepdim=True), target)
        return total, greedy

    def generate_until(self, requests: list[Any]) -> list[str]:
        """For each (context, options) the text that greedy decoding adds, up to one of `until`."""
        texts = []
        for request in tqdm(requests, "generating", disable=None):
            context, options = request.args
            until = options["until"]
            if isinstance(until, str):
                until = [until]
            n_token = options.get("max_gen_toks", 256)
            ids = encode(self.encoding, context)
            ids = with_room(ids, self.model.config.block_size, n_token)
            options = {"max_new_tokens": n_token, "temperature": 0}
            pieces = write(self.model, self.encoding, ids, [], **options)
            text = ""
            for piece in pieces:
                text += piece
                for end in until:
                    if end in text:
                        pieces.close()
                        text = text[: text.index(end)]
            texts.append(text)
        return texts


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("ckpt", type=Path, help="checkpoint of train.py")
    parser.add_argument("tasks", help="of the harness, hellaswag,arc_easy")
    given = parser.parse_args()
    if simple_evaluate is None:
        raise UserError("lab/harness.py needs EleutherAI's harness: pip install lm_eval")
    model, encoding, _ = load_model(given.ckpt, torch.device("cpu"))
    results = simple_evaluate(HarnessModel(model, encoding), tasks=given.tasks.split(","))
    print(make_table(results))


if __name__ == "__main__":
    run_command(main)
