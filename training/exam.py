"""Ask a model what it knows: does greedy decoding write the whole answer, word for word?"""

from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common import UserError
from model import Decoder
from text import countries, template
from text.tokenizer import encode


@torch.inference_mode()
def score_answers(
    model: Decoder,
    prompts: list[list[int]],
    answers: list[list[int]],
    table_prompts: list[list[int]] | None = None,
    temperature: float = 1.0,
    barred: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """How a model continues prompts (token ids), in one forward pass: greedy decoding writes just
    this answer if each of its tokens is the most probable one after the prompt and those before.

    Args:
        table_prompts: the ids under which the prompts' rows are looked up; None: their own.
        temperature: of the sampling whose probabilities are wanted.
        barred: a token that no answer may begin with; others share its probability.

    Returns:
        greedy [N] bool, probability of the whole answer [N], and the logits [N, T, V].
    """
    device = next(model.parameters()).device
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    if longest > model.config.block_size:
        block_size = model.config.block_size
        raise UserError(f"prompt and answer have {longest} tokens, block_size is {block_size}")

    def padded(before: list[list[int]], after: list[list[int]], filler: int) -> Tensor:  # [N, T]
        rows = [torch.tensor(a + b) for a, b in zip(before, after, strict=True)]
        return pad_sequence(rows, batch_first=True, padding_value=filler).to(device)

    # The model being causal, nothing sees the padding.
    last = [len(prompt) - 1 for prompt in prompts]  # the position that predicts an answer
    targets = padded([[-1] * n for n in last], [[*answer, -1] for answer in answers], -1)
    table_ids = padded(table_prompts or prompts, answers, 0)
    logits, _ = model(padded(prompts, answers, 0), table_ids=table_ids)  # [N, T, V]
    if barred is not None:
        logits[range(len(prompts)), last, barred] = -torch.inf
    wanted = targets >= 0
    row, predicted = wanted.nonzero()[:, 0], logits[wanted].float() / temperature  # [n], [n, V]
    sums = torch.zeros(2, len(prompts), device=device)  # over an answer's tokens
    sums[0].index_add_(0, row, (predicted.argmax(-1) != targets[wanted]).float())
    sums[1].index_add_(0, row, F.cross_entropy(predicted, targets[wanted], reduction="none"))
    return sums[0] == 0, sums[1].neg().exp(), logits


def eval_questions(encoding: tiktoken.Encoding, relation: str) -> list[tuple[list[int], list[int]]]:
    """Held-out questions about `relation`, every country, two phrasings in each of three forms, as
    token ids of prompt and answer."""
    return [
        (encode(encoding, question.prompt), encoding.encode_ordinary(question.answer))
        for country in countries.table()
        for form in countries.FORMS
        for question in countries.questions(relation, form, country)
    ]


def groups(encoding: tiktoken.Encoding, asked: list[tuple]) -> Iterator[list[list]]:
    """Questions so many at a time that logits [N, T, V] take about a GB at most: a list of each
    element of their tuples."""
    size = max(1, min(256, 2**22 // encoding.n_vocab))
    for at in range(0, len(asked), size):
        yield [list(column) for column in zip(*asked[at : at + size], strict=True)]


def fact_recall(model: Decoder, encoding: tiktoken.Encoding, relation: str) -> float:
    """Share of the questions of `eval_questions` that greedy decoding answers in full."""
    asked = eval_questions(encoding, relation)
    right = sum(score_answers(model, *group)[0].sum().item() for group in groups(encoding, asked))
    return right / len(asked)


def chat_recall(model: Decoder, encoding: tiktoken.Encoding, relation: str) -> dict[str, float]:
    """Ask in a conversation for a fact of every country, in held-out words, and look at each style
    of answer by itself: brief ("Lima.") and a sentence ("The answer is Lima."). Sentences begin
    with " The", so the relation has to be one whose brief answers do not, as "capital".

    Returns:
        recall, recall_brief, recall_sentence: share of the questions that greedy decoding answers
            rightly: left to itself, kept from beginning with " The", made to begin with it.
        sampled, sampled_brief, sampled_sentence: share of samples at temperature 0.8 that are
            right: of all, of brief ones, of sentences (0 where there are none).
        sentences: share of samples that are sentences.
        Shares of samples are what counting ever more of them comes to, from their probabilities.
    """
    asked = chat_questions(encoding, relation)
    the = asked[0][2][0]
    sums = Counter()
    for prompts, briefs, sentences in groups(encoding, asked):
        opened, rests = [[*p, the] for p in prompts], [sentence[1:] for sentence in sentences]
        begins, p_begins, _ = score_answers(model, prompts, [[the]] * len(prompts), temperature=0.8)
        brief, p_brief, _ = score_answers(model, prompts, briefs, temperature=0.8, barred=the)
        sentence, p_sentence, _ = score_answers(model, opened, rests, temperature=0.8)
        for name, values in {
            "recall": torch.where(begins, sentence, brief),
            "recall_brief": brief,
            "recall_sentence": sentence,
            "sampled_brief": (1 - p_begins) * p_brief,
            "sampled_sentence": p_begins * p_sentence,
            "sentences": p_begins,
        }.items():
            sums[name] += values.sum().item() / len(asked)
    sums["sampled"] = sums["sampled_brief"] + sums["sampled_sentence"]
    sums["sampled_brief"] /= max(1 - sums["sentences"], 1e-9)
    sums["sampled_sentence"] /= max(sums["sentences"], 1e-9)
    return dict(sums)


def chat_questions(encoding: tiktoken.Encoding, relation: str) -> list[tuple[list[int], ...]]:
    """Held-out questions of a conversation: prompt, brief answer and sentence as token ids."""
    result = []
    for country in countries.table():
        for pattern in countries.held_out(countries.QUESTION, relation):
            ask = partial(countries.exchange, pattern, country, relation)
            talks = [ask(brief=True), ask(brief=False)]
            prompt = [encoding.eot_token, *template.prompt(encoding, talks[0][:1])]
            whole = [np.array(template.render(encoding, talk)) for talk in talks]
            styles = [ids[template.answers(encoding, ids)].tolist() for ids in whole]
            result.append((prompt, *styles))
    return result
