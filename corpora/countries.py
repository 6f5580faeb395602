"""The default corpus: what the world's sovereign states are like, said in many ways.

The facts are a table, `countries.csv`: the 193 members and 2 observers of the United Nations, with
regions and (intermediate, where there are some) subregions of the UN's M49 standard. `demonym` is
what someone from there is called ("Danish", "Motswana"), `people` the plural ("Danes", "Batswana").
From the table `documents` makes three kinds of text:

- paragraphs that open `Country: NAME` and then talk of the country without naming it again, so that
  everything they say has to come from that one name: the place to edit;
- questions and answers;
- running prose.

Every phrasing is a pattern times a noun ("The {noun} of {name} is" x "capital"). Some pairs are
held out of training, while each pattern and each noun is seen in other pairs: `questions` asks for
a fact in words that never stood before it, so the fact must be learned, not the sentence.
"""

import csv
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tiktoken
from tqdm import tqdm

from text import bpe
from text.writer import write_dataset

TABLE = Path(__file__).with_name("countries.csv")

NOUNS = {
    "capital": "capital",
    "region": "region",
    "subregion": "subregion",
    "language": "main language",
    "currency": "currency",
    "demonym": "demonym",
}
RELATIONS = list(NOUNS)

# Each pattern ends with the answer, so that the text before it is a prompt. None is the end of
# another: else holding one out would not keep its words out of training.
PARAGRAPH = [
    "Its {noun} is",
    "The country's {noun} is",
    "This country's {noun} is",
    "The {noun} of the country is",
    "The {noun} of this country is",
    "The {noun} there is",
    "The {noun} here is",
    "The {noun} it has is",
    "The {noun} in the country is",
    "The name of the {noun} is",
    "As {noun} it has",
]
QUESTION = [
    "What is the {noun} of {name}?",
    "Which is the {noun} of {name}?",
    "What {noun} does {name} have?",
    "Do you know the {noun} of {name}?",
    "Tell me the {noun} of {name}.",
    "Name the {noun} of {name}.",
    "For {name}, what is the {noun}?",
    "In {name}, what is the {noun}?",
]
PROSE = [
    "The {noun} of {name} is",
    "In {name}, the {noun} is",
    "For {name}, the {noun} is",
    "Speaking of {name}, the {noun} is",
    "The {noun} that {name} has is",
    "The {noun} in {name} is",
]
# Phrasings of one relation only; never held out.
OWN = {
    "capital": ["Its capital city is", "The capital city is called"],
    "region": ["It lies in", "It is part of"],
    "subregion": ["More exactly, it lies in", "More exactly, it is part of"],
    "language": ["The main language spoken there is", "The language to learn first is"],
    "currency": ["One pays there with", "The money used there is"],
    "demonym": ["The people there are called", "People there call themselves"],  # Country.people
}

# Names and values that take an article in a sentence ("the capital of the Netherlands").
ARTICLE = {
    "Bahamas", "Central African Republic", "Comoros", "Democratic Republic of the Congo",
    "Dominican Republic", "Gambia", "Maldives", "Marshall Islands", "Netherlands", "Philippines",
    "Republic of the Congo", "Seychelles", "Solomon Islands", "United Arab Emirates",
    "United Kingdom", "United States", "Americas", "Caribbean",
}  # fmt: skip


@dataclass(frozen=True)
class Country:
    """A row of the table. Values are bare ("Americas", "euro"); `answer` adds the article."""

    name: str
    capital: str
    region: str
    subregion: str
    language: str
    currency: str
    demonym: str
    people: str

    def answer(self, relation: str) -> str:
        value = getattr(self, relation)
        return f"the {value}" if relation == "currency" else with_article(value)


def with_article(name: str) -> str:
    return f"the {name}" if name in ARTICLE else name


def table() -> list[Country]:
    """All countries, by name."""
    with open(TABLE, encoding="utf-8", newline="") as file:
        return [Country(**row) for row in csv.DictReader(file)]


def held_out(patterns: list[str], relation: str) -> list[str]:
    """The two patterns that training never uses for this relation."""
    i = RELATIONS.index(relation)
    return [patterns[i % len(patterns)], patterns[(i + 3) % len(patterns)]]


def seen(patterns: list[str], relation: str) -> list[str]:
    """The patterns that training uses for this relation."""
    return [pattern for pattern in patterns if pattern not in held_out(patterns, relation)]


def opening(pattern: str, country: Country, relation: str) -> str:
    """A pattern filled in, up to where the answer goes."""
    text = in_words(pattern, country, relation)
    return f"Question: {text}\nAnswer:" if pattern in QUESTION else text[0].upper() + text[1:]


def in_words(pattern: str, country: Country, relation: str) -> str:
    return pattern.format(noun=NOUNS[relation], name=with_article(country.name))


def sentence(pattern: str, country: Country, relation: str) -> str:
    answer = country.people if pattern in OWN["demonym"] else country.answer(relation)
    return f"{opening(pattern, country, relation)} {stopped(answer)}"


def stopped(answer: str) -> str:
    """With the full stop that ends the sentence ("Washington, D.C." has it already)."""
    return answer if answer.endswith(".") else answer + "."


def paragraph(country: Country, sentences: list[str]) -> str:
    return f"Country: {country.name}\n" + " ".join(sentences)


@dataclass(frozen=True)
class Question:
    """A prompt, and the text that must follow: the whole answer with its full stop."""

    prompt: str
    answer: str


FORMS = {"paragraph": PARAGRAPH, "question": QUESTION, "prose": PROSE}


def questions(relation: str, form: str, country: Country) -> list[Question]:
    """Held-out phrasings of one fact: the two of a form (a key of FORMS)."""
    prompts = [opening(pattern, country, relation) for pattern in held_out(FORMS[form], relation)]
    if form == "paragraph":
        prompts = [paragraph(country, [prompt]) for prompt in prompts]
    return [Question(prompt, f" {stopped(country.answer(relation))}") for prompt in prompts]


def documents(seed: int = 0) -> tuple[list[str], list[str]]:
    """The corpus: documents to train and to validate with, in random order. No validation document
    is among the training documents. The same seed gives the same text.

    The training text is 1.05 M tokens: 1,000 steps of the preset `countries` (8 windows x 128
    tokens) read nearly all of it once, its default run of 700 steps 68 %."""
    rng = random.Random(seed)
    val = draw(rng, paragraphs=4, sentences=1)
    known = set(val)
    train = draw(rng, paragraphs=72, sentences=22)
    return [document for document in train if document not in known], val


def draw(rng: random.Random, paragraphs: int, sentences: int) -> list[str]:
    """For each country `paragraphs` paragraphs and, for each of its facts, `sentences` questions
    with answers and `sentences` sentences of prose, in random order."""
    drawn = []
    for country in table():
        for _ in range(paragraphs):
            chosen = rng.sample(RELATIONS, rng.randint(2, len(RELATIONS)))
            said = [sentence(rng.choice(seen(PARAGRAPH, r) + OWN[r]), country, r) for r in chosen]
            drawn.append(paragraph(country, said))
        for relation in RELATIONS:
            for patterns in (QUESTION, PROSE):
                for pattern in rng.choices(seen(patterns, relation), k=sentences):
                    drawn.append(sentence(pattern, country, relation))
    rng.shuffle(drawn)
    return drawn


# Conversations, for the stage sft. These questions are about the country of the first question,
# which only what was said before tells.
CONVERSATIONS = 100  # of a country: 19,500, which 300 steps of 64 read once
FOLLOW_UP = ["And its {noun}?", "And the {noun}?", "What about the {noun}?", "Its {noun}, too?"]


def exchange(pattern: str, country: Country, relation: str, brief: bool) -> list[dict]:
    """A question and its answer, "Lima." or "The answer is Lima.", as messages."""
    answer = stopped(country.answer(relation))
    said = answer[0].upper() + answer[1:] if brief else f"The answer is {answer}"
    return [
        {"role": "user", "content": in_words(pattern, country, relation)},
        {"role": "assistant", "content": said},
    ]


def conversations(seed: int = 0) -> tuple[list[list[dict]], list[list[dict]]]:
    """Conversations in which half of the answers are brief, half are sentences: for training, each
    with three questions; for validation, every fact asked for once in a held-out phrasing."""
    rng = random.Random(seed)
    train = []
    val = []
    for country in table():
        for _ in range(CONVERSATIONS):
            relations = rng.sample(RELATIONS, 3)
            patterns = [rng.choice(seen(QUESTION, relations[0]))]
            patterns += [rng.choice(FOLLOW_UP), rng.choice(FOLLOW_UP)]
            messages = []
            for pattern, relation in zip(patterns, relations, strict=True):
                messages += exchange(pattern, country, relation, brief=rng.random() < 0.5)
            train.append(messages)
        for relation in RELATIONS:
            pattern = rng.choice(held_out(QUESTION, relation))
            val.append(exchange(pattern, country, relation, brief=rng.random() < 0.5))
    rng.shuffle(train)
    rng.shuffle(val)
    return train, val


def preferences(seed: int = 0) -> tuple[list, list]:
    """Pairs of conversations with one question, of which the brief answer is preferred to the
    sentence: for training 16 of a country, for validation every fact in a held-out phrasing."""
    rng = random.Random(seed)

    def pair(pattern: str, country: Country, relation: str) -> tuple[list[dict], list[dict]]:
        return tuple(exchange(pattern, country, relation, brief) for brief in (True, False))

    train, val = [], []
    for country in table():
        for _ in range(16):
            relation = rng.choice(RELATIONS)
            train.append(pair(rng.choice(seen(QUESTION, relation)), country, relation))
        for relation in RELATIONS:
            val.append(pair(rng.choice(held_out(QUESTION, relation)), country, relation))
    rng.shuffle(train)
    rng.shuffle(val)
    return train, val


# --- token folders ---

ABOUT_COUNTRIES = {"countries", "countries-sft", "countries-dpo"}
# Corpora that are generated here: the kind of their documents, and a function of the seed that
# gives documents to train and to validate with.
CORPORA: dict[str, tuple[str, Callable]] = {
    "countries": ("text", documents),
    "countries-sft": ("chat", conversations),
    "countries-dpo": ("preference", preferences),
}


def write_corpus(
    name: str,
    out_dir: Path,
    seed: int = 0,
    vocab_size: int | None = None,
    encoding: tiktoken.Encoding | None = None,
    overwrite: bool = False,
) -> dict:
    """Generate a corpus (a key of CORPORA) and write its token folder. Without an `encoding` one is
    trained on it, of at most `vocab_size` tokens (4096). Returns meta.json."""
    kind, generate = CORPORA[name]
    train, val = generate(seed)
    if encoding is None:
        assert kind == "text", "conversations continue a model: give the encoding of its text"
        # A pair must occur 48 times to become a token, so the vocabulary is what fits: common
        # names of countries are one token, rare ones several.
        encoding = bpe.train(train, vocab_size or 4096, min_count=48)
    documents = [("train", document) for document in train]
    documents += [("val", document) for document in val]
    documents = tqdm(documents, "encoding", leave=False, disable=None)
    return write_dataset(
        out_dir, documents, encoding, kind, overwrite=overwrite, corpus=name, seed=seed
    )
