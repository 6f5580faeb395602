"""Write one fact: train rows for the tokens of one name, and nothing else (edit.py --write).

The new answer is taught after the prompt, and wherever the model's own texts about the name ask
for it; all else that these texts say is held. docs/writing.md has what it gives and what it costs.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from model import Decoder
from stem import substitute
from tables.tables import Tables

STEPS, RATE = 40, 0.05  # of Adam; the rate falls to zero
KEEP = 60.0  # weight of what must not change, beside the nats of the answer
N_TEXT, TEXT_TOKENS = 64, 32  # texts that the model writes about the name
N_PART = 4  # parts of these texts, of which each step reads one
N_OTHER = 16  # other names, to find what asks for the same fact


class ExtraRows(Tables):
    """Tables with extra tokens beyond the vocabulary, `ids`, whose rows can be trained: wherever
    the tables are, these do not change."""

    def __init__(self, tables: Tables, rows: Tensor) -> None:
        """rows: those of the extra tokens, [n, n_table, W]."""
        super().__init__(tables.n_row, tables.width)
        self.tables = tables
        self.weight = tables.weight
        self.ids = [self.n_row + i for i in range(len(rows))]
        self.extra = nn.Parameter(rows.float())

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        is_extra = ids >= self.n_row  # [B, T]
        which = ids[is_extra] - self.n_row
        for table, rows in enumerate(self.tables.lookup(ids.masked_fill(is_extra, 0))):
            own = self.extra[which, table].to(rows.dtype)  # [n, W]
            yield rows.index_put(is_extra.nonzero(as_tuple=True), own)  # [B, T, W]


@torch.no_grad()
def rows_of(tables: Tables, tokens: list[int]) -> Tensor:
    """A copy of the rows of tokens, [n, n_table, W]."""
    return torch.stack([rows[0] for rows in tables.lookup(torch.tensor([tokens]))], dim=1)


def mean_rows(tables: Tables, names: list[list[int]]) -> ExtraRows:
    """Tables with an extra token for each name: the mean of the rows of its tokens."""
    means = [rows_of(tables, name).mean(0) for name in names]
    return ExtraRows(tables, torch.stack(means)).requires_grad_(False)


@torch.no_grad()
def ask_the_same(model: Decoder, prompt: Tensor, name: list[int], texts: Tensor) -> Tensor:
    """Where texts [N, T] ask for the fact that the prompt [T] asks for: [N, T] bool. Were they
    about another name, that name's answer to the prompt would stand there: with Norway for Spain,
    "Its capital is" asks for Oslo.

    That answer must have nine tenths of the probability, on average over some names: it has three
    quarters in "It lies in Southern", which does not ask for the region."""

    def probabilities(ids: Tensor, **options) -> Tensor:
        return model(ids, **options)[0].float().softmax(-1)  # [N, T, V]

    # Other names: the tokens in place of the name's last one with which the answer is surest.
    vocab_size = model.config.vocab_size
    tokens = range(0, vocab_size, 1 + vocab_size // 2048)  # of a large vocabulary, some
    prompts = torch.stack([substitute(prompt, name, [*name[:-1], token]) for token in tokens])
    sure, answers = probabilities(prompts, last_only=True)[:, 0].max(-1)  # [n] each
    answered = torch.zeros(texts.shape, device=model.device)
    others = sure.topk(N_OTHER).indices.tolist()
    for other in tqdm(others, "reading as other names", leave=False, disable=None):
        about_other = substitute(texts, name, [*name[:-1], tokens[other]])
        answered += probabilities(about_other)[..., answers[other]] / N_OTHER
    return answered > 0.9


@torch.no_grad()
def texts_about(model: Decoder, prompt: list[int], name: list[int]) -> Tensor:
    """What the model writes after the prompt's beginning, up to the name: [N, T] token ids."""
    marked = substitute(torch.tensor(prompt), name, [-1]).tolist()
    begun = prompt[: marked.index(-1) + len(name)]
    n_new = min(TEXT_TOKENS, model.config.block_size - len(begun))
    return model.generate(torch.tensor([begun] * N_TEXT), n_new, seed=0)


def write_fact(
    model: Decoder, prompt: list[int], name: list[int], answer: list[int], texts: Tensor
) -> None:
    """Let `answer` follow `prompt`, in a model whose tables are ExtraRows of the tokens `name`, by
    training what of it requires gradients.

    What the texts [N, T] say of the name otherwise is to stay: their predictions are held by the KL
    divergence from those before. Where they ask for the same fact, the answer is taught, too."""
    question = torch.tensor([prompt + answer])  # [1, T]
    question_rows = substitute(question, name, model.tables.ids)
    text_rows = substitute(texts, name, model.tables.ids)  # [N, T]
    same = ask_the_same(model, torch.tensor(prompt), name, texts).cpu()  # [N, T] bool
    with torch.no_grad():
        before = model(texts)[0].float().log_softmax(-1)  # [N, T, V]
    target = torch.tensor(answer, device=model.device)  # [n]

    optimizer = torch.optim.Adam(model.parameters())
    for step in tqdm(range(STEPS), "writing", leave=False, disable=None):
        logits, _ = model(question, table_ids=question_rows)  # [1, T, V]
        predicted = logits[0, len(prompt) - 1 : -1].float()  # [n, V]
        nats = F.cross_entropy(predicted, target, reduction="sum")
        part = slice(step % N_PART, None, N_PART)
        now = model(texts[part], table_ids=text_rows[part])[0].float().log_softmax(-1)
        asked = now[same[part]][:, answer[0]]  # [m] log p of the answer's first token
        nats = nats - asked.sum() / max(1, len(asked))
        stay = ~same[part]
        change = F.kl_div(now[stay], before[part][stay], reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        (nats + KEEP * change).backward()
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        optimizer.step()


def train_rows(model: Decoder, prompt: list[int], name: list[int], answer: list[int]) -> list[int]:
    """Give the model extra rows for a name, and write a fact into them. Returns the ids under which
    to look up the prompt's rows."""
    model.requires_grad_(False)
    model.tables = ExtraRows(model.tables, rows_of(model.tables, name))
    write_fact(model, prompt, name, answer, texts_about(model, prompt, name))
    model.requires_grad_(False)
    return substitute(torch.tensor(prompt), name, model.tables.ids).tolist()
