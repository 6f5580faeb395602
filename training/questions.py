"""Ask a model what it knows: does greedy decoding write the whole answer, word for word? And what a
finished run shows beside its loss."""

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common import UserError
from model import Decoder
from text import countries, tokenizer
from text.tokenizer import encode
from training.batches import Conversations, Data


class Scores(NamedTuple):
    """Of N answers to N prompts."""

    greedy: Tensor  # [N] bool: greedy decoding continues the prompt with the whole answer
    probability: Tensor  # [N]: of sampling the whole answer


@torch.inference_mode()
def score_answers(
    model: Decoder,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    table_prompts: Sequence[list[int]] | None = None,
    temperature: float = 1.0,
    barred: int | None = None,
) -> Scores:
    """Score answers to prompts, both as token ids: each token of an answer is predicted from the
    prompt and the answer's tokens before it.

    Args:
        table_prompts: the ids under which rows of the prompts are looked up, if others.
        temperature: at which `probability` samples.
        barred: a token that no answer may begin with; the others share its probability.

    Raises:
        UserError: a prompt and its answer are longer than block_size.
    """
    ids = pad_together(prompts, answers).to(model.device)  # [N, T]
    table_ids = pad_together(table_prompts or prompts, answers)  # [N, T]
    block_size = model.config.block_size
    if ids.shape[1] > block_size:
        raise UserError(f"prompt and answer have {ids.shape[1]} tokens, block_size is {block_size}")
    # Position t predicts token t + 1: a token of the answer, or nothing (-1).
    nothing = [[-1] * (len(prompt) - 1) for prompt in prompts]
    targets = pad_together(nothing, answers, filler=-1).to(model.device)  # [N, T - 1]
    targets = F.pad(targets, (0, 1), value=-1)  # [N, T]

    size = max(1, min(256, 2**22 // model.config.vocab_size))  # so many logits take about a GB
    parts = zip(ids.split(size), table_ids.split(size), targets.split(size), strict=True)
    greedy = []
    losses = []
    for part_ids, part_table_ids, part_targets in parts:
        # The model is causal, so no answer sees the padding.
        logits, _ = model(part_ids, table_ids=part_table_ids)  # [n, T, V]
        is_answer = part_targets >= 0
        if barred is not None:
            first = is_answer.int().argmax(1)  # the position that predicts an answer's first token
            logits[range(len(part_ids)), first, barred] = -torch.inf
        greedy.append(((logits.argmax(-1) == part_targets) | ~is_answer).all(1))
        loss = torch.zeros(part_targets.shape, device=model.device)
        loss[is_answer] = F.cross_entropy(
            logits[is_answer].float() / temperature, part_targets[is_answer], reduction="none"
        )
        losses.append(loss.sum(1))
    return Scores(torch.cat(greedy), torch.cat(losses).neg().exp())


def pad_together(
    first: Sequence[list[int]], second: Sequence[list[int]], filler: int = 0
) -> Tensor:
    """Join the rows of first and second, padded on the right: [N, T]."""
    rows = [torch.tensor([*a, *b]) for a, b in zip(first, second, strict=True)]
    return pad_sequence(rows, batch_first=True, padding_value=filler)


# --- questions about countries ---


def fact_questions(
    encoding: tiktoken.Encoding, about: list[countries.Country], relations: Sequence[str]
) -> list[tuple[list[int], list[int]]]:
    """Held-out questions about relations of countries, two phrasings in each of three forms:
    prompts and answers as token ids."""
    asked = []
    for country in about:
        for relation, form in product(relations, countries.FORMS):
            for question in countries.questions(relation, form, country):
                prompt = encode(encoding, question.prompt)
                asked.append((prompt, encoding.encode_ordinary(question.answer)))
    return asked


@torch.no_grad()
def quick_recall(model: Decoder, encoding: tiktoken.Encoding, n: int = 64) -> dict[str, float]:
    """On the way, of a model in training: of n held-out questions for capitals, always the same,
    `recall`, the share that greedy decoding answers in full, and `answer_nats`, the mean of -log p
    of the right answers; {} if they do not fit the model."""
    asked = random.Random(0).sample(fact_questions(encoding, countries.table(), ["capital"]), n)
    prompts, answers = zip(*asked, strict=True)
    model.eval()
    try:
        scores = score_answers(model, prompts, answers)
    except UserError:  # --block_size is less than a question needs
        return {}
    finally:
        model.train()
    return {
        "recall": mean(scores.greedy),
        "answer_nats": -mean(scores.probability.clamp_min(1e-30).log()),
    }


def fact_recall(model: Decoder, encoding: tiktoken.Encoding, relation: str) -> float:
    """Share of held-out questions about a relation that greedy decoding answers in full."""
    prompts, answers = zip(*fact_questions(encoding, countries.table(), [relation]), strict=True)
    return mean(score_answers(model, prompts, answers).greedy)


def chat_questions(encoding: tiktoken.Encoding, relation: str) -> list[tuple[list[int], ...]]:
    """Held-out questions of a conversation: prompt, brief answer and sentence as token ids."""
    asked = []
    for country in countries.table():
        for pattern in countries.held_out(countries.QUESTION, relation):
            brief = countries.exchange(pattern, country, relation, brief=True)
            sentence = countries.exchange(pattern, country, relation, brief=False)
            prompt = tokenizer.prompt(encoding, brief[:1])
            # What follows the prompt, without the line break at the end.
            brief_answer = tokenizer.render(encoding, brief)[len(prompt) : -1]
            sentence_answer = tokenizer.render(encoding, sentence)[len(prompt) : -1]
            asked.append(([encoding.eot_token, *prompt], brief_answer, sentence_answer))
    return asked


def chat_recall(model: Decoder, encoding: tiktoken.Encoding, relation: str) -> dict[str, float]:
    """Ask in a conversation for a fact of every country, in held-out words, and judge each style
    of answer by itself: brief ("Lima.", never with " The") and a sentence ("The answer is Lima."):

        recall, recall_brief, recall_sentence: share of the questions that greedy decoding answers
            rightly: left to itself, kept from beginning with " The", made to begin with it.
        sampled, sampled_brief, sampled_sentence: probability that a sample at temperature 0.8 is
            right: of all, of brief ones, of sentences.
        sentences: probability that a sample is a sentence.
    """
    prompts, briefs, sentences = zip(*chat_questions(encoding, relation), strict=True)
    the = sentences[0][0]  # the token " The"
    begins = score_answers(model, prompts, [[the]] * len(prompts), temperature=0.8)
    brief = score_answers(model, prompts, briefs, temperature=0.8, barred=the)
    begun = [[*prompt, the] for prompt in prompts]
    rest = [sentence[1:] for sentence in sentences]
    sentence = score_answers(model, begun, rest, temperature=0.8)
    is_sentence = begins.probability
    is_brief = 1 - is_sentence
    right_brief = mean(is_brief * brief.probability)  # a sample is brief, and right
    right_sentence = mean(is_sentence * sentence.probability)
    return {
        "recall": mean(torch.where(begins.greedy, sentence.greedy, brief.greedy)),
        "recall_brief": mean(brief.greedy),
        "recall_sentence": mean(sentence.greedy),
        "sampled": right_brief + right_sentence,
        "sampled_brief": right_brief / max(mean(is_brief), 1e-9),
        "sampled_sentence": right_sentence / max(mean(is_sentence), 1e-9),
        "sentences": mean(is_sentence),
    }


def mean(values: Tensor) -> float:
    return values.double().mean().item()


# --- at the end of a run ---


def ask(model: Decoder, data: Data) -> dict[str, float]:
    """Ask for what the corpus teaches. Prints and returns the shares that are right, with `recall`:
    {} if the corpus has no questions, or they do not fit the model."""
    corpus = data.metas[0]["corpus"]
    model.eval()
    try:
        if corpus == "countries":
            shares = {"recall": fact_recall(model, data.encoding, "capital")}
        elif corpus == "countries-sft":
            shares = chat_recall(model, data.encoding, "capital")
        else:
            return {}
    except UserError as error:  # --block_size is less than a question needs
        print(f"skipped the questions about capitals: {error}")
        return {}
    text = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in shares.items())
    print(f"recall of capitals, held-out phrasings: {text}")
    return shares


def show(model: Decoder, data: Data, ckpt: Path, seed: int) -> None:
    """Print what the model adds to the prompt of the corpus, or to a question from the validation
    conversations, and what to try next."""
    encoding = data.encoding
    is_countries = data.metas[0]["corpus"] == "countries"
    source = next(iter(data.val.values()))
    is_chat = isinstance(source, Conversations)
    if is_chat:
        ids, targets = source.sequence(0)
        prompt = ids[: (targets >= 0).argmax() + 1].tolist()  # up to the first answer
        temperature = 0.0
        stop = encoding.encode_single_token(tokenizer.END)
    else:
        text = "Country: Spain\nThe capital city is called" if is_countries else ""
        prompt = encode(encoding, text)
        temperature = 0.8
        stop = encoding.eot_token
    ids = torch.tensor([prompt], device=model.device)  # [1, T]
    # Without `stop`, as ranks that do not end together would wait for each other forever.
    written = model.generate(ids, 60, temperature=temperature, seed=seed)[0].tolist()
    new = written[len(prompt) :]
    if stop in new:
        new = new[: new.index(stop)]
    print(encoding.decode(prompt[1:] + new))  # without the leading <|endoftext|>
    print(f"\nnext:\n  python sample.py --ckpt {ckpt}{' --chat' if is_chat else ''}")
    if is_countries and len(model.tables.weight) and model.ngrams is None:
        print(f"  python edit.py --ckpt {ckpt} --source Spain --target Germany")
