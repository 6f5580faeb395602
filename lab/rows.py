"""What the page and the tour show of rows: their neighbors, what they make a model say, and what it
says if they are swapped in some tables."""

from collections.abc import Sequence
from itertools import islice

import tiktoken
import torch
import torch.nn.functional as F

from model import Decoder
from tables.extra import ExtraRows, rows_of
from tables.tables import Tables
from text.spelling import spelled
from text.tokenizer import until_end
from training.edits import Edit, Located, State, continuations, probabilities

Weighed = list[tuple[str, float]]  # tokens, each with a figure


def swapped(
    tables: Tables, ids: list[int], table_ids: list[int], where: Sequence[int]
) -> ExtraRows:
    """Tables with an extra token for each of `ids` [T]. In the tables `where` it has the row of the
    one in `table_ids` [T], in all others its own."""
    rows, others = (rows_of(tables, read) for read in (ids, table_ids))  # [T, n_table, W]
    rows[:, where] = others[:, where]
    return ExtraRows(tables, rows)


@torch.inference_mode()
def nearest(
    tables: Tables, encoding: tiktoken.Encoding, ids: list[int], table: int, n: int = 6
) -> list[tuple[str, Weighed]]:
    """Each of the tokens `ids` [T] with the n whose rows in a table point most nearly the same way,
    as a rule itself among them, and with their cosines."""
    every = torch.arange(len(tables.weight[table]))[None]  # [1, V]
    # As they are read: facts that were just written are not in `weight`.
    rows = next(islice(tables.lookup(every), table, None))[0]  # [V, W]
    rows = F.normalize(rows.float())
    cosines, near = (rows[ids] @ rows.T).topk(n)  # [T, n] each
    found = []
    for token, of_token, others in zip(ids, cosines.tolist(), near.tolist(), strict=True):
        pairs = zip([spelled(encoding, other) for other in others], of_token, strict=True)
        found.append((spelled(encoding, token), list(pairs)))
    return found


@torch.inference_mode()
def weighed(
    model: Decoder,
    encoding: tiktoken.Encoding,
    prompt: list[int],
    state: State,
    text: list[int],
) -> Weighed:
    """The tokens of a text, to its end, and how probable each is after a prompt in a state, whose
    tables the model keeps."""
    model.tables = state.tables
    text = until_end(encoding, text)
    ids = torch.tensor([prompt + text], device=model.device)  # [1, T]
    logits, _ = model(ids, table_ids=torch.tensor([state.ids + text]))
    p = logits[0, len(prompt) - 1 :].float().softmax(-1)  # [n + 1, V]
    return [(spelled(encoding, token), p[at, token].item()) for at, token in enumerate(text)]


def compared(
    model: Decoder,
    encoding: tiktoken.Encoding,
    edit: Edit,
    located: Located,
    after: State,
) -> dict[str, list]:
    """What the model writes `before` and `after` an edit, as `weighed`, and the `answers` in it, as
    `edits.probabilities`. The model keeps the tables that are read after it."""
    states = State(model.tables, located.prompt), after
    texts = continuations(model, encoding, edit, located, states)
    found = {"answers": list(probabilities(model, encoding, located, states, texts))}
    for when, state, text in zip(("before", "after"), states, texts, strict=True):
        found[when] = weighed(model, encoding, located.prompt, state, text)
    return found
