"""What a run asks a model about the countries (corpora/countries.py), on its way and at its end."""

import random
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import product

import tiktoken
import torch

from common import UserError
from corpora import countries
from corpora.questions import mean, of_chat, score_answers
from model import Decoder
from text.tokenizer import encode


def ask(
    model: Decoder, encoding: tiktoken.Encoding, corpora: set[str], *, briefly: bool = False
) -> dict[str, float]:
    """What a model knows of its corpora, as shares that are right, with `recall`: {} if none is
    about countries, or questions do not fit the model.

    Args:
        corpora: from meta.json; countries, countries-sft and countries-dpo have questions.
        briefly: few questions, on the way of a run.
    """
    training = model.training
    model.eval()
    try:
        if "countries" in corpora:
            if briefly:
                return quick_recall(model, encoding)
            return {"recall": fact_recall(model, encoding, "capital")}
        if {"countries-sft", "countries-dpo"} & corpora and not briefly:
            return chat_recall(model, encoding, "capital")
        return {}
    except UserError as error:  # --block_size is less than a question needs
        if not briefly:
            print(f"skipped the questions about capitals: {error}")
        return {}
    finally:
        model.train(training)


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


def quick_recall(model: Decoder, encoding: tiktoken.Encoding) -> dict[str, float]:
    """Of 64 held-out questions for capitals, always the same, `recall`, the share that greedy
    decoding answers in full, and `answer_nats`, the mean of -log p of the right answers."""
    asked = random.Random(0).sample(fact_questions(encoding, countries.table(), ["capital"]), 64)
    prompts, answers = zip(*asked, strict=True)
    scores = score_answers(model, prompts, answers)
    return {
        "recall": mean(scores.greedy),
        "answer_nats": -mean(scores.probability.clamp_min(1e-300).log()),
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
            prompt, brief_answer = of_chat(encoding, brief)
            _, sentence_answer = of_chat(encoding, sentence)
            asked.append((prompt, brief_answer, sentence_answer))
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
    if the in {brief[0] for brief in briefs}:  # as where tokens are single bytes
        raise UserError("no token tells brief answers from sentences: take a larger vocabulary")
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


def reaches_ahead(model: Decoder) -> bool:
    """Whether what follows a token depends on its rows. Those of an FFN in the last layer change
    the next token alone."""
    *earlier, last = model.blocks
    return any(block.row_width for block in earlier) or last.row_split[0] > 0


def has_own_rows(model: Decoder) -> bool:
    """Whether each token reads the row at its id, which an edit changes. It may read those of other
    tokens, too, but not rows of n-grams or of hashes."""
    if not len(model.tables.weight) or model.tables.n_row != model.config.vocab_size:
        return False
    ids = torch.arange(model.tables.n_row)[None]  # a text of all tokens, [1, V]
    addresses = model.addresses(ids, ids.shape[1]).cpu()  # a relative may keep them on a GPU
    addresses = addresses.view(*ids.shape, -1)  # [1, V, n_address]
    return bool((addresses == ids[..., None]).any(-1).all())


def demo(model: Decoder, corpora: set[str]) -> tuple[str, list[str]]:
    """A text to continue at the end of a run on corpora, and commands to try."""
    if corpora != {"countries"}:
        return "", ["sample.py"]
    commands = ["sample.py"]
    if has_own_rows(model) and reaches_ahead(model):
        commands.append("edit.py --source Spain --target Germany")
    return "Country: Spain\nThe capital city is called", commands


def check_names(**names: str) -> None:
    """Names by flag, `source` and `target`. UserError: the target is not a country, or the source
    is one in other capitals: any other source may be a made-up name."""
    known = [country.name for country in countries.table()]
    for flag, name in names.items():
        if not name or name in known:
            continue
        near = get_close_matches(name.title(), known, 3)
        in_other_case = name.casefold() in (other.casefold() for other in near)
        if flag == "target" or in_other_case:
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise UserError(f"--{flag} {name} is not one of the countries{hint}")


def readers(encoding: tiktoken.Encoding, ids: list[int]) -> list[str]:
    """The countries whose names have one of the tokens ids."""
    tokens = {c.name: encoding.encode_ordinary(f" {c.name}") for c in countries.table()}
    return [name for name in tokens if set(ids) & set(tokens[name])]
