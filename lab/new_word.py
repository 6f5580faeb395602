"""What keeps a model from writing a word that it never wrote? A fact with that word is written by
training rows of the name, for longer, without holding the name's other texts, with rows of the
word's own tokens, with these tokens' weights in the head. docs/writing.md has what came out.

    python lab/new_word.py out/ckpt.pt Toledo
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import make_parser, run

# isort: split

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from tqdm import tqdm

from model import Decoder
from stem import substitute
from text.tokenizer import encode
from training import writing
from training.checkpoints import load_model

ABOUT = ("Spain", "Peru")
STEPS, KEEP = writing.STEPS, writing.KEEP
WAYS = {  # steps, weight of what is held, whether the word's rows and its head are trained
    "rows of the name": (STEPS, KEEP, False, False),
    "160 steps": (160, KEEP, False, False),
    "nothing held": (STEPS, 0, False, False),
    "nothing held, 160 steps": (160, 0, False, False),
    "and rows of the word": (160, KEEP, True, False),
    "and its head": (160, KEEP, False, True),
    "and both": (160, KEEP, True, True),
}


class WithRows(nn.Module):
    """A weight [V, C] of which some rows are trained."""

    def __init__(self, weight: Tensor, tokens: list[int]) -> None:
        super().__init__()
        self.tokens = torch.tensor(tokens)
        self.rows = nn.Parameter(weight[tokens].clone())

    def forward(self, weight: Tensor) -> Tensor:
        return weight.index_copy(0, self.tokens, self.rows)


def probabilities(
    model: Decoder, name: list[int], prompt: list[int], answer: list[int], way: tuple
) -> list[float]:
    """Write a fact; the probabilities of the answer's tokens after it, each given those before."""
    writing.STEPS, writing.KEEP, has_rows, has_head = way
    texts = writing.texts_about(model, prompt, name)
    tables, tokens = model.tables, list(dict.fromkeys(answer))
    model.requires_grad_(False)
    if has_rows:  # in place of the word's own, wherever it stands
        model.tables = writing.ExtraRows(tables, writing.rows_of(tables, tokens), tokens)
    model.tables = writing.ExtraRows(model.tables, writing.rows_of(tables, name))
    if has_head:
        rows = WithRows(model.head.weight, tokens)
        parametrize.register_parametrization(model.head, "weight", rows)
    writing.write_fact(model, prompt, name, answer, texts)
    with torch.no_grad():
        ids = torch.tensor([prompt + answer])
        read = substitute(ids, name, model.tables.ids)
        logits = model(ids, table_ids=read)[0][0, len(prompt) - 1 : -1]  # [n, V]
    model.tables = tables
    if has_head:
        parametrize.remove_parametrizations(model.head, "weight", leave_parametrized=False)
    model.requires_grad_(False)
    return F.softmax(logits, -1)[range(len(answer)), answer].tolist()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("ckpt", help="checkpoint of the countries")
    parser.add_argument("word", help="what is to be the capital")
    given = parser.parse_args()
    model, encoding, _ = load_model(given.ckpt, torch.device("cpu"))
    answer = encoding.encode_ordinary(f" {given.word}.")
    pieces = [encoding.decode([token]) for token in answer]
    for way in tqdm(WAYS, "ways", disable=None):
        parts = []
        for country in ABOUT:
            prompt = encode(encoding, f"Country: {country}\nThe capital city is called")
            name = encoding.encode_ordinary(f" {country}")
            parts.append(probabilities(model, name, prompt, answer, WAYS[way]))
        means = torch.tensor(parts).mean(0).tolist()
        row = {repr(piece): f"{p:.1%}" for piece, p in zip(pieces, means, strict=True)}
        row["all"] = f"{torch.tensor(parts).prod(1).mean():.1%}"
        tqdm.write(json.dumps({"trained": way, **row}))


if __name__ == "__main__":
    run(main)
