"""The default corpus: facts, phrasings, and what is held out."""

import re
from collections import defaultdict

import pytest

from corpora import countries


def test_table_is_complete_and_clean():
    table = countries.table()
    assert len(table) == len({country.name for country in table}) >= 190
    region_of = {country.subregion: country.region for country in table}
    assert set(region_of.values()) == {"Africa", "Americas", "Asia", "Europe", "Oceania"}
    for country in table:
        assert all(value and value == value.strip() for value in vars(country).values())
        assert region_of[country.subregion] == country.region


def test_paragraph_names_its_country_only_in_the_first_line(corpus):
    lines = [line for text in corpus[0] for line in text.split("\n")]
    heads = [i for i, line in enumerate(lines) if line.startswith("Country: ")]
    assert len(heads) == 72 * len(countries.table())
    by_name = {country.name: country for country in countries.table()}
    for i in heads:
        country, rest = by_name[lines[i].removeprefix("Country: ")], lines[i + 1]
        # a name may come back only inside a fact: Mexico City, Djibouti, Namibian dollar
        facts = [country.people, *(country.answer(relation) for relation in countries.RELATIONS)]
        for fact in sorted(facts, key=len, reverse=True):
            rest = rest.replace(fact, "")
        assert country.name not in rest


def test_every_fact_is_in_training_in_many_phrasings(corpus):
    train = set(corpus[0])
    for country in countries.table():
        for relation in countries.RELATIONS:
            patterns = countries.seen(countries.QUESTION, relation)
            patterns += countries.seen(countries.PROSE, relation)
            said = sum(countries.sentence(p, country, relation) in train for p in patterns)
            assert said >= 0.7 * len(patterns), (country.name, relation)


def test_held_out_questions_never_occur_with_their_answer(corpus):
    """Nor at the end of a longer sentence."""
    said = defaultdict(set)  # sentences, and questions with their answers, by the last word
    for document in {*corpus[0], *corpus[1]}:
        sentences = [document.lower()]
        if document.startswith("Country: "):  # "St. John's" is no end of one
            sentences = re.split(r"(?<=\.)(?<!st\.)\s", document.lower())
        for sentence in sentences:
            said[sentence.split()[-1]].add(sentence)
    for country in countries.table():
        for relation in countries.RELATIONS:
            for form in countries.FORMS:
                for question in countries.questions(relation, form, country):
                    words = question.prompt.removeprefix(f"Country: {country.name}\n")
                    phrase = (words + question.answer).lower()
                    assert not any(s.endswith(phrase) for s in said[phrase.split()[-1]])


def test_validation_is_drawn_as_training_is_and_shares_no_document(corpus):
    train, val = corpus
    assert not set(train) & set(val)
    # Of each country 4 paragraphs, and of each of its 6 facts a question and a sentence.
    assert len(val) == len(countries.table()) * (4 + 6 * 2)
    for head in ("Country: ", "Question: "):
        of_train, of_val = (
            sum(document.startswith(head) for document in split) / len(split) for split in corpus
        )
        # Training lacks the sentences that validation happens to have: it has more paragraphs.
        assert of_train == pytest.approx(of_val, abs=0.03)


def test_each_held_out_pattern_is_seen_with_other_nouns():
    for patterns in countries.FORMS.values():
        for relation in countries.RELATIONS:
            for pattern in countries.held_out(patterns, relation):
                others = [r for r in countries.RELATIONS if r != relation]
                assert any(pattern in countries.seen(patterns, other) for other in others)


NAME_IT = "Question: Name the region of Chad.\nAnswer: Africa."
CALL = "People there call themselves Basotho."


@pytest.mark.parametrize(
    ("pattern", "name", "relation", "text"),
    [
        ("In {name}, its {noun}", "Bahamas", "capital", "In the Bahamas, its capital Nassau."),
        ("Its {noun} is", "Spain", "currency", "Its currency is the euro."),
        ("Its {noun} is", "Peru", "region", "Its region is the Americas."),
        ("Its {noun} is", "United States", "capital", "Its capital is Washington, D.C."),
        ("Its {noun} is", "Lesotho", "demonym", "Its demonym is Mosotho."),
        ("It speaks", "Côte d'Ivoire", "language", "It speaks French."),
        ("Name the {noun} of {name}.", "Chad", "region", NAME_IT),
        ("People there call themselves", "Lesotho", "demonym", CALL),
    ],
)
def test_sentences_read_like_english(pattern, name, relation, text):
    (country,) = [country for country in countries.table() if country.name == name]
    assert countries.sentence(pattern, country, relation) == text


# --- conversations ---


def test_conversations_hold_out_phrasings_and_tell_the_truth():
    train, val = countries.conversations(seed=1)
    said = {message["content"] for talk in train for message in talk}
    asked = {talk[0]["content"] for talk in val}
    fact_of = {}  # by the question that asks for it
    for country in countries.table():
        for relation in countries.RELATIONS:
            for pattern in countries.QUESTION:
                fact_of[countries.in_words(pattern, country, relation)] = country, relation
            patterns = countries.held_out(countries.QUESTION, relation)
            hidden = {countries.in_words(pattern, country, relation) for pattern in patterns}
            assert len(hidden & asked) == 1 and not hidden & said
    relation_of = {}  # by a question with a noun alone
    for relation, noun in countries.NOUNS.items():
        for pattern in countries.FOLLOW_UP:
            relation_of[pattern.format(noun=noun)] = relation
    brief = []
    for talk in [*train, *val]:
        assert [m["role"] for m in talk] == ["user", "assistant"] * (len(talk) // 2)
        country, relation = fact_of[talk[0]["content"]]
        for question, answer in zip(talk[::2], talk[1::2], strict=True):
            relation = relation_of.get(question["content"], relation)
            fact = countries.stopped(country.answer(relation))
            assert answer["content"] in (f"The answer is {fact}", fact[0].upper() + fact[1:])
            brief.append(not answer["content"].startswith("The answer"))
    assert sum(brief) / len(brief) == pytest.approx(0.5, abs=0.03)


def test_corpora_are_functions_of_the_seed(monkeypatch):
    few = countries.table()[:5]
    monkeypatch.setattr(countries, "table", lambda: few)
    for corpus in (countries.documents, countries.conversations, countries.preferences):
        assert corpus(3) == corpus(3) != corpus(4)
