"""Write one fact: train rows for the tokens of one name, and nothing else (edit.py --write).

The new answer is taught after the prompt, and wherever the model's own texts about the name ask
for it; all else that these texts say is held. docs/writing.md has what it gives and what it costs.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from common import progress
from corpora.questions import with_answers
from model import Decoder
from stem import substitute
from tables.extra import ExtraRows, rows_of

STEPS, RATE = 40, 0.05  # of Adam; the rate falls to zero
KEEP = 60.0  # weight of what must not change, beside the nats of the answer
N_TEXT, TEXT_TOKENS = 64, 32  # texts that the model writes about the name
N_NAME = 256  # names that the model writes, to find those that share tokens with the name
N_PART = 4  # parts of these texts, of which each step reads one
N_OTHER = 16  # other names, to find what asks for the same fact
MOST_TOKENS = 1 << 18  # of prompts about other names, in a forward pass
COMMON = 0.25  # share of the model's texts in which a token of everyday words stands

Fact: TypeAlias = tuple[list[int], list[int]]  # a prompt and its answer, as token ids


# --- a fact ---


def train_rows(
    model: Decoder,
    prompt: list[int],
    name: list[int],
    answer: list[int],
    beginnings: Sequence[list[int]],
    stop: int = -1,
    spellings: Sequence[list[int]] = (),
    earlier: list[Fact] | None = None,
    keep: float | None = None,
    rate: float | None = None,
    place: str = "tables",
) -> dict[int, Tensor]:
    """Write a fact into new rows for a name. The model keeps its own: `with_rows` has the new ones.
    Its weights are frozen, and it is in eval() mode, from here on. Until this returns, it reads
    rows that are being trained: other threads would, too.

    Args:
        beginnings, stop: of texts about the name, as of `texts_about`.
        spellings: of the name in other tokens, as where no space is before it. These tokens keep
            their rows, but texts that have them are about the name, too.
        earlier: facts that were written before, the oldest first. Those whose prompts read the same
            rows are taught again: else they are lost to the next ones about their name. Those that
            this one corrects are taken out of the list.
        keep: weight of what must not change; None: KEEP.
        rate: Adam's at the first step; None: RATE.
        place: whose rows: the model's `tables`, or `wte`, its input embedding, where that is not
            the head. (A dense model has one, too: lab/counterfact.py compares the two.)

    Returns:
        The new rows of the name's tokens, [n_table, W] each.
    """
    assert name and answer, "name and answer are token ids, one at least"
    assert find(name, prompt) >= 0, f"no {name} in {prompt}: with a space, names are other ids"
    for begun in beginnings:  # else nothing about the name is held
        about = [spelled for spelled in (name, *spellings) if find(spelled, begun) >= 0]
        assert about, f"no {name} in {begun}, which begins texts about it"
    model.eval().requires_grad_(False)
    own = own_tokens(model, prompt[0], name)
    texts = texts_about(model, beginnings, stop)
    others = texts_about_namesakes(model, prompt, name, own, stop)
    earlier = [] if earlier is None else earlier
    assert isinstance(earlier, list), "earlier is a list: what is corrected is taken out of it"
    kept = {tuple(asked): said for asked, said in earlier if {*asked} & {*own}}
    kept.pop(tuple(prompt), None)
    facts = [(prompt, answer), *((list(asked), said) for asked, said in kept.items())]
    tables = getattr(model, place)
    extra = ExtraRows(tables, rows_of(tables, own), own)
    setattr(model, place, extra)
    try:
        keep = KEEP if keep is None else keep
        rate = RATE if rate is None else rate
        names = [name, *spellings]
        taught = write_fact(model, [extra.extra], facts, names, texts, keep, rate, stop, others)
    finally:  # also where it is interrupted, as in a notebook
        setattr(model, place, tables)
    corrected = [asked for asked, said in facts if (asked, said) not in taught]
    earlier[:] = [fact for fact in earlier if fact[0] not in corrected]
    return dict(zip(own, extra.extra.detach(), strict=True))


def find(name: list[int], text: list[int]) -> int:
    """Where a name begins in a text; -1: nowhere."""
    n = len(name)
    return next((i for i in range(len(text)) if text[i : i + n] == name), -1)


def own_tokens(model: Decoder, start: int, name: list[int]) -> list[int]:
    """The tokens of a name but for everyday words (" of" and " the" in the Republic of the Congo),
    which stand in many of the texts that the model writes from a token `start`: a row that is
    trained for one name would hurt them all. Of a name of such words alone, all tokens."""
    if len(name) == 1:
        return name
    texts = continued(model, torch.full((N_TEXT, 1), start))  # [N, T]
    tokens = list(dict.fromkeys(name))
    own = [token for token in tokens if (texts == token).any(1).float().mean() <= COMMON]
    return own or tokens


@torch.no_grad()
def texts_about(model: Decoder, beginnings: Sequence[list[int]], stop: int = -1) -> Tensor:
    """Texts that the model writes after some beginnings: [N, T] token ids. Those that end with a
    token `stop` repeat it."""
    texts = []
    for begun in beginnings:
        texts += continued(model, torch.tensor([begun] * (N_TEXT // len(beginnings))), stop)
    return pad_sequence(texts, batch_first=True, padding_value=stop)


@torch.no_grad()
def texts_about_namesakes(
    model: Decoder, prompt: list[int], name: list[int], own: Sequence[int], stop: int = -1
) -> Tensor | None:
    """Texts that the model writes about names that share a token with this one, such as Anna Silva
    and Peter Hansen with Anna Hansen: [N, T] token ids, after what stands before the name in the
    prompt; None if the model knows no such names."""
    n = len(name)
    start = find(name, prompt)
    if n == 1 or start < 1:
        return None
    # The model writes other names there. A token that is likely to begin or continue one is shared.
    names = model.generate(torch.tensor([prompt[:start]] * N_NAME), n - 1, seed=0)
    begun = []
    for n_before in range(n):  # tokens of a name before the shared one
        before = names[:, : start + n_before]
        follows = model(before, last_only=True)[0][:, 0].float().softmax(-1)  # [N_NAME, V]
        for token in own:
            likely = before[follows[:, token].cpu() > 1 / N_NAME]
            if len(likely):
                begun.append(F.pad(likely, (0, 1), value=token))
    if not begun:
        return None
    begun = begun[:N_TEXT]  # of a name of many letters, there may be more
    each = torch.arange(N_TEXT // len(begun))
    texts = []
    for ids in begun:
        texts += continued(model, ids[each % len(ids)], stop)[:, : start + 1 + TEXT_TOKENS]
    texts = pad_sequence(texts, batch_first=True, padding_value=stop)  # only chats have ends
    texts = texts[(substitute(texts, name, [-1] * n) == texts).all(1)]  # not about it
    return texts if len(texts) else None


def continued(model: Decoder, ids: Tensor, stop: int = -1) -> Tensor:
    """Beginnings [N, T] with what the model writes after them, as many of TEXT_TOKENS as there is
    room for."""
    n_new = min(TEXT_TOKENS, model.config.block_size - ids.shape[1])
    tokens = model.stream(ids, n_new, seed=0, stop=stop)
    bar = tqdm(tokens, "reading the model's texts", n_new, leave=False, disable=None)
    return torch.cat((ids, *(token[:, None] for token in bar)), dim=1)


def write_fact(
    model: Decoder,
    weights: Sequence[nn.Parameter],
    facts: Sequence[Fact],
    names: Sequence[list[int]],
    texts: Tensor,
    keep: float,
    rate: float,
    stop: int = -1,
    namesakes: Tensor | None = None,
) -> list[Fact]:
    """Let the answer of the first of `facts` follow its prompt, by training some weights of the
    model: here, the extra rows of a name. The other facts were written earlier: they are taught
    again.

    What the texts [N, T] say of the name otherwise is to stay: their predictions are held by the KL
    divergence from those before. Where they ask for the same fact, the answer is taught, too: what
    it says, however it is opened. An earlier fact that asks for the same in other words, and has
    another answer, is corrected by that. Returns the facts that were taught: all but those.

    `names`: of `renamed`. `keep`: weight of what is to stay. `rate`: Adam's at the first step.
    `stop`: the token that texts repeat where they have ended. `namesakes`: texts about other names
    [N, T], which are held everywhere."""
    # 1) where the fact is asked for
    prompt, answer = facts[0]
    n_open, first = opening_of(model, prompt, names, answer)
    begun = answer[:n_open]
    same = ask_the_same(model, torch.tensor(prompt), names, texts, begun, first)  # [N, T] bool
    same = same.cpu()
    taught = [facts[0]]
    if len(facts) > 1:
        earlier = [torch.tensor(asked) for asked, _ in facts[1:]]
        earlier = pad_sequence(earlier, batch_first=True)  # [n - 1, T]
        # A smaller share than in the model's own texts, as it may know these words less well.
        asks = ask_the_same(model, torch.tensor(prompt), names, earlier, begun, first, 0.7)
        for asks_there, (asked, said) in zip(asks, facts[1:], strict=True):
            if asks_there[len(asked) - 1] and said != answer:
                tqdm.write("note: this corrects an earlier fact, which was in other words")
            else:
                taught.append((asked, said))

    # 2) what is to stay
    held = [(texts, ~same & (texts != stop), keep)]  # [N, T] each, and a weight
    if namesakes is not None:
        held.append((namesakes, namesakes != stop, keep * len(namesakes) / N_TEXT))
    with torch.no_grad():
        before = [model(ids)[0].float().log_softmax(-1) for ids, *_ in held]  # [N, T, V] each

    # 3) train
    questions, targets = with_answers(*zip(*taught, strict=True))  # [n, T] each
    is_answer = targets >= 0
    targets = targets[is_answer].to(model.device)  # [k]
    optimizer = torch.optim.Adam([weight.requires_grad_() for weight in weights])
    for step in tqdm(range(STEPS), "writing", leave=False, disable=None):
        logits, _ = model(questions)  # [n, T, V]
        nats = F.cross_entropy(logits[is_answer].float(), targets, reduction="sum")
        part = slice(step % N_PART, None, N_PART)
        now = [model(ids[part])[0].float().log_softmax(-1) for ids, *_ in held]
        asked = now[0][same[part]]  # [m, V]
        if first:  # log p of what is not opened
            left_out = torch.tensor(first, device=model.device)
            asked = asked.index_fill(1, left_out, -torch.inf).log_softmax(-1)
        nats = nats - asked[:, answer[n_open]].sum() / max(1, len(asked))
        for i, (_, stay, weight) in enumerate(held):
            there = stay[part]
            changed = now[i][there], before[i][part][there]  # [m, V] each
            nats = nats + weight * F.kl_div(*changed, reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        nats.backward()
        optimizer.param_groups[0]["lr"] = rate * (1 - step / STEPS)
        optimizer.step()
    return taught


# --- what asks for the same fact ---


@torch.no_grad()
def opening_of(
    model: Decoder, prompt: list[int], names: Sequence[list[int]], answer: list[int]
) -> tuple[int, list[int]]:
    """How answers to a prompt open whatever the name is, such as "The answer is" in "The answer is
    Lima.".

    Returns how many tokens of `answer` are such an opening, 3 here and 0 if the answer is "Lima.",
    and the first tokens of such openings, here "The"."""
    for n in range(len(answer)):
        _, follows = as_others(model, torch.tensor(prompt + answer[:n]), names, 256)
        of_all = (follows > 0.05).float().mean(0) > 0.9  # [V]: likely after nearly all names
        if n == 0:
            first = of_all.nonzero()[:, 0].tolist()
        if not of_all[answer[n]]:
            return n, [token for token in first if token != answer[n]]
    return 0, []  # all of it


@torch.no_grad()
def ask_the_same(
    model: Decoder,
    prompt: Tensor,
    names: Sequence[list[int]],
    texts: Tensor,
    begun: Sequence[int] = (),
    first: Sequence[int] = (),
    share: float = 0.9,
) -> Tensor:
    """Where texts [N, T] ask for the fact that the prompt [T] asks for: [N, T] bool.

    To find out, another name is put in place of the text's: with Norway for Spain, "Its capital is"
    is followed by Oslo, which is also Norway's answer to the prompt. On average over some names,
    this answer must have a `share` of the probability, nine tenths. (In "It lies in Southern",
    which does not ask for the region, it has three quarters.)

    names: of `renamed`.
    begun, first: of `opening_of`. Answers may begin with the tokens `begun`, and what comes first
        in other openings is left out of the account."""

    def shares(follows: Tensor) -> Tensor:  # [..., V]
        others = 1 - follows[..., first].sum(-1, keepdim=True)
        return follows.index_fill(-1, left_out, 0) / others.clamp_min(0.02)

    # Other names: those with which the answer is surest, opened and not.
    left_out = torch.tensor(first, dtype=torch.int64, device=model.device)
    opened = torch.cat((prompt, torch.tensor(begun, dtype=prompt.dtype)))
    tokens, follows = as_others(model, opened, names, 2048)  # of a large vocabulary, some
    sure, answers = shares(follows).max(-1)  # [n] each
    if begun:
        follows = as_others(model, prompt, names, 2048)[1]
        sure = sure + shares(follows).gather(1, answers[:, None])[:, 0]
    answered = torch.zeros(texts.shape, device=model.device)
    others = sure.topk(N_OTHER).indices.tolist()
    may_ask = torch.ones_like(answered, dtype=torch.bool)  # which few places are after two names
    for n, other in enumerate(tqdm(others, "reading as other names", leave=False, disable=None), 1):
        left = may_ask.any(1).cpu()  # [N] bool: texts that have such places
        x = model.hidden(renamed(texts[left], names, tokens[other]))[may_ask[left]]  # [k, n_embd]
        follows = model.unembed(x).float().softmax(-1)  # [k, V]
        answered[may_ask] += shares(follows)[:, answers[other]] / N_OTHER
        may_ask &= answered + 1 - n / N_OTHER > share
        if not may_ask.any():
            break
    return answered > share


def as_others(
    model: Decoder, ids: Tensor, names: Sequence[list[int]], n: int
) -> tuple[list[int], Tensor]:
    """About n other names: tokens of the vocabulary, as of `renamed`. Returns them, and the
    probabilities of what follows `ids` [T] then, [n, V]."""
    vocab_size = model.config.vocab_size
    tokens = list(range(0, vocab_size, 1 + vocab_size // n))
    prompts = torch.stack([renamed(ids, names, token) for token in tokens])  # [n, T]
    follows = []
    parts = prompts.split(max(1, MOST_TOKENS // len(ids)))
    for part in progress(parts, "reading as other names"):
        follows.append(model(part, last_only=True)[0][:, 0].float().softmax(-1))
    return tokens, torch.cat(follows)


def renamed(ids: Tensor, names: Sequence[list[int]], token: int) -> Tensor:
    """ids [..., T] about another name: a token in place of the last one of a name, however it is
    spelled, `names`."""
    for name in names:
        ids = substitute(ids, name, [*name[:-1], token])
    return ids
