"""Ask a model what it knows: does greedy decoding write the whole answer, word for word?"""

from collections.abc import Iterator
from functools import partial

import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common import UserError
from model import Decoder
from text import countries, tokenizer
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
    """Does greedy decoding continue prompts (token ids) with these answers? One forward pass tells:
    if each token of the answer is the most probable one after the prompt and those before.

    Args:
        table_prompts: the ids under which the prompts' rows are looked up; None: their own.
        temperature: of the sampling whose probabilities are wanted.
        barred: a token that no answer may begin with; the others share its probability.

    Returns greedy [N] bool, probability of the whole answer [N], and the logits [N, T, V].
    """
    last = [len(prompt) - 1 for prompt in prompts]  # the position that predicts an answer

    def padded(before: list[list[int]], after: list[list[int]], filler: int) -> Tensor:  # [N, T]
        rows = [torch.tensor([*a, *b]) for a, b in zip(before, after, strict=True)]
        return pad_sequence(rows, batch_first=True, padding_value=filler).to(model.device)

    ids = padded(prompts, answers, 0)
    if ids.shape[1] > (block_size := model.config.block_size):
        raise UserError(f"prompt and answer have {ids.shape[1]} tokens, block_size is {block_size}")
    # The model is causal, so no answer sees the padding.
    logits, _ = model(ids, table_ids=padded(table_prompts or prompts, answers, 0))  # [N, T, V]
    if barred is not None:
        logits[range(len(prompts)), last, barred] = -torch.inf
    targets = padded([[-1] * n for n in last], [[*answer, -1] for answer in answers], -1)
    wanted = targets >= 0  # where the next token is one of an answer's
    predicted = logits[wanted].float() / temperature  # [n, V]
    wrong, losses = torch.zeros(2, *targets.shape, device=ids.device)  # [N, T]
    wrong[wanted] = (predicted.argmax(-1) != targets[wanted]).float()
    losses[wanted] = F.cross_entropy(predicted, targets[wanted], reduction="none")
    return wrong.sum(1) == 0, losses.sum(1).neg().exp(), logits


def groups(encoding: tiktoken.Encoding, asked: list[tuple]) -> Iterator[list[list]]:
    """The columns of `asked`, so many rows at a time that logits [N, T, V] take about a GB."""
    size = max(1, min(256, 2**22 // encoding.n_vocab))
    for start in range(0, len(asked), size):
        yield [list(column) for column in zip(*asked[start : start + size], strict=True)]


def fact_recall(model: Decoder, encoding: tiktoken.Encoding, relation: str) -> float:
    """Share of held-out questions that greedy decoding answers in full: about a relation of every
    country, two phrasings in each of three forms."""
    asked = [
        (encode(encoding, question.prompt), encoding.encode_ordinary(question.answer))
        for country in countries.table()
        for form in countries.FORMS
        for question in countries.questions(relation, form, country)
    ]
    right = sum(score_answers(model, *group)[0].sum().item() for group in groups(encoding, asked))
    return right / len(asked)


def chat_questions(encoding: tiktoken.Encoding, relation: str) -> list[tuple[list[int], ...]]:
    """Held-out questions of a conversation: prompt, brief answer and sentence as token ids."""
    asked = []
    for country in countries.table():
        for pattern in countries.held_out(countries.QUESTION, relation):
            fact = (pattern, country, relation)
            talks = [countries.exchange(*fact, brief) for brief in (True, False)]
            prompt = tokenizer.prompt(encoding, talks[0][:1])
            # What follows it, without the line break at the end.
            answers = [tokenizer.render(encoding, talk)[len(prompt) : -1] for talk in talks]
            asked.append(([encoding.eot_token, *prompt], *answers))
    return asked


def chat_recall(model: Decoder, encoding: tiktoken.Encoding, relation: str) -> dict[str, float]:
    """Ask in a conversation for a fact of every country, in held-out words, and judge each style
    of answer by itself: brief ("Lima.") and a sentence ("The answer is Lima."). No brief answer
    about the relation may begin with " The". Returns:

        recall, recall_brief, recall_sentence: share of the questions that greedy decoding answers
            rightly: left to itself, kept from beginning with " The", made to begin with it.
        sampled, sampled_brief, sampled_sentence: probability that a sample at temperature 0.8 is
            right: of all, of brief ones, of sentences (0 where there are none).
        sentences: probability that a sample is a sentence.
    """
    asked = chat_questions(encoding, relation)
    score, the, sums = partial(score_answers, model, temperature=0.8), asked[0][2][0], 0
    for prompts, briefs, sentences in groups(encoding, asked):
        begins, p_the, _ = score(prompts, [[the]] * len(prompts))
        brief, p_brief, _ = score(prompts, briefs, barred=the)
        sentence, p_sentence, _ = score([[*p, the] for p in prompts], [s[1:] for s in sentences])
        right = [torch.where(begins, sentence, brief), brief, sentence]
        right += [(1 - p_the) * p_brief, p_the * p_sentence]  # in one style, and right
        sums += torch.stack([*right, p_the]).cpu().double().sum(1)
    recall, recall_brief, recall_sentence, brief, sentence, p_the = (sums / len(asked)).tolist()
    return dict(
        recall=recall,
        recall_brief=recall_brief,
        recall_sentence=recall_sentence,
        sampled=brief + sentence,
        sampled_brief=brief / max(1 - p_the, 1e-9),
        sampled_sentence=sentence / max(p_the, 1e-9),
        sentences=p_the,
    )
