"""Ask a model what it knows: does greedy decoding write the whole answer, word for word?"""

from collections.abc import Sequence
from typing import NamedTuple

import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common import UserError
from model import Decoder
from text import chat

LOGITS = 1 << 28  # at a time: 1 GiB


class Scores(NamedTuple):
    """Of N answers to N prompts, on the CPU."""

    greedy: Tensor  # [N] bool: greedy decoding continues the prompt with the whole answer
    probability: Tensor  # [N]: of sampling the whole answer


@torch.inference_mode()
def score_answers(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    table_prompts: Sequence[Sequence[int]] | None = None,
    temperature: float = 1.0,
    barred: int | None = None,
) -> Scores:
    """Score answers to prompts, both as token ids: each token of an answer is predicted from the
    prompt and the answer's tokens before it.

    Args:
        table_prompts: the ids under which rows of the prompts are looked up, if others: as many.
        temperature: at which `probability` samples.
        barred: a token that no answer may begin with; the others share its probability.

    Raises:
        UserError: a prompt and its answer are longer than block_size.
    """
    ids, targets = (tensor.to(model.device) for tensor in with_answers(prompts, answers))  # [N, T]
    table_prompts = table_prompts or prompts
    assert [*map(len, table_prompts)] == [*map(len, prompts)], "table_prompts have other lengths"
    table_ids = pad_together(table_prompts, answers)  # [N, T]
    block_size = model.config.block_size
    if ids.shape[1] > block_size:
        raise UserError(f"prompt and answer have {ids.shape[1]} tokens, block_size is {block_size}")

    numbers = ids.shape[1] * model.config.vocab_size  # logits of a prompt with its answer, at most
    size = max(1, min(256, LOGITS // numbers))
    parts = zip(ids.split(size), table_ids.split(size), targets.split(size), strict=True)
    greedy = []
    losses = []
    for part_ids, part_table_ids, part_targets in parts:
        # The model is causal, so no answer sees the padding.
        x = model.hidden(part_ids, table_ids=part_table_ids)  # [n, T, n_embd]
        is_answer = part_targets >= 0
        logits = model.unembed(x[is_answer]).float()  # [k, V], of the tokens of answers alone
        if barred is not None:
            is_first = is_answer & (is_answer.cumsum(1) == 1)
            logits[is_first[is_answer], barred] = -torch.inf
        wanted = part_targets[is_answer]  # [k]
        is_other = torch.zeros_like(is_answer)
        is_other[is_answer] = logits.argmax(-1) != wanted
        greedy.append(~is_other.any(1))
        loss = torch.zeros(part_targets.shape, device=model.device)
        loss[is_answer] = F.cross_entropy(logits / temperature, wanted, reduction="none")
        losses.append(loss.sum(1))
    # In double precision, where less than 1e-38 is not zero. The GPUs of Macs have none.
    return Scores(torch.cat(greedy).cpu(), torch.cat(losses).cpu().double().neg().exp())


def of_chat(encoding: tiktoken.Encoding, messages: Sequence[dict]) -> tuple[list[int], list[int]]:
    """Prompt and answer of a conversation, whose last message is the assistant's answer, as token
    ids; the mark that ends it belongs to it."""
    question = chat.prompt(encoding, messages[:-1])
    answer = chat.render(encoding, messages)[len(question) : -1]  # without the line break
    return [encoding.eot_token, *question], answer


def with_answers(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Prompts with their answers, and what each position predicts, a token of the answer or nothing
    (-1): [N, T] each."""
    assert all(map(len, prompts)), "a prompt is empty: begin with the end-of-text token"
    nothing = [[-1] * (len(prompt) - 1) for prompt in prompts]
    targets = pad_together(nothing, answers, filler=-1)  # [N, T - 1]
    return pad_together(prompts, answers), F.pad(targets, (0, 1), value=-1)


def pad_together(
    first: Sequence[Sequence[int]], second: Sequence[Sequence[int]], filler: int = 0
) -> Tensor:
    """Join the rows of first and second, padded on the right: [N, T]."""
    rows = [torch.tensor([*a, *b]).long() for a, b in zip(first, second, strict=True)]
    return pad_sequence(rows, batch_first=True, padding_value=filler)


def mean(values: Tensor) -> float:
    return values.double().mean().item()
