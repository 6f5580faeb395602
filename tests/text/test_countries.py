"""The default corpus: facts, phrasings, and what is held out."""

import pytest

from text import countries


@pytest.fixture(scope="module")
def corpus() -> tuple[list[str], list[str]]:
    return countries.documents(seed=0)


def test_table_is_complete_and_clean():
    table = countries.table()
    assert len(table) >= 190
    assert len({country.name for country in table}) == len(table)
    for country in table:
        for field in ("name", *countries.RELATIONS, "people"):
            value = getattr(country, field)
            assert value and value == value.strip(), (country.name, field)
    regions = {country.region for country in table}
    assert regions == {"Africa", "Americas", "Asia", "Europe", "Oceania"}
    region_of = {country.subregion: country.region for country in table}
    assert all(region_of[country.subregion] == country.region for country in table)


def test_well_known_facts():
    """Typed here independently of the table."""
    by_name = {country.name: country for country in countries.table()}
    for name, *facts in (
        ("France", "Paris", "Europe", "French", "euro"),
        ("Japan", "Tokyo", "Asia", "Japanese", "Japanese yen"),
        ("Brazil", "Brasília", "Americas", "Portuguese", "Brazilian real"),
        ("Switzerland", "Bern", "Europe", "German", "Swiss franc"),
        ("Côte d'Ivoire", "Yamoussoukro", "Africa", "French", "West African CFA franc"),
    ):
        row = by_name[name]
        assert [row.capital, row.region, row.language, row.currency] == facts


def test_paragraph_names_its_country_only_in_the_first_line(corpus):
    own = [pattern for patterns in countries.OWN.values() for pattern in patterns]
    assert not any("{name}" in pattern for pattern in countries.PARAGRAPH + own)
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
            patterns = [
                pattern
                for form in (countries.QUESTION, countries.PROSE)
                for pattern in countries.seen(form, relation)
            ]
            said = sum(countries.sentence(p, country, relation) in train for p in patterns)
            assert said >= 0.7 * len(patterns), (country.name, relation)


def test_held_out_questions_never_occur_with_their_answer(corpus):
    text = "\n".join(document for split in corpus for document in split).lower()
    for country in countries.table():
        for relation in countries.RELATIONS:
            for form in countries.FORMS:
                for question in countries.questions(relation, form, country):
                    words = question.prompt.removeprefix(f"Country: {country.name}\n")
                    assert (words + question.answer).lower() not in text


def test_validation_is_drawn_as_training_is_and_shares_no_document(corpus):
    train, val = corpus
    assert not set(train) & set(val)
    # Of each country 4 paragraphs, and of each of its 6 facts a question and a sentence.
    assert len(val) == len(countries.table()) * (4 + 6 * 2)

    def shape(documents: list[str]) -> list[float]:
        """The shares of paragraphs and of questions among documents, and their mean length."""
        paragraphs = sum(document.startswith("Country: ") for document in documents)
        questions = sum(document.startswith("Question: ") for document in documents)
        length = sum(map(len, documents)) / len(documents)
        return [paragraphs / len(documents), questions / len(documents), length / 1000]

    # Training lacks the sentences that validation happens to have, so it has more paragraphs.
    assert shape(train) == pytest.approx(shape(val), abs=0.03)


def test_each_held_out_pattern_is_seen_with_other_nouns():
    for patterns in countries.FORMS.values():
        for relation in countries.RELATIONS:
            for pattern in countries.held_out(patterns, relation):
                others = [r for r in countries.RELATIONS if r != relation]
                assert any(pattern in countries.seen(patterns, other) for other in others)


@pytest.mark.parametrize(
    ("pattern", "name", "relation", "text"),
    [
        ("In {name}, its {noun}", "Bahamas", "capital", "In the Bahamas, its capital Nassau."),
        ("Its {noun} is", "Spain", "currency", "Its currency is the euro."),
        ("Its {noun} is", "Peru", "region", "Its region is the Americas."),
        ("Its {noun} is", "United States", "capital", "Its capital is Washington, D.C."),
        ("Its {noun} is", "Lesotho", "demonym", "Its demonym is Mosotho."),
        (
            "Name the {noun} of {name}.",
            "Chad",
            "region",
            "Question: Name the region of Chad.\nAnswer: Africa.",
        ),
        (
            "People there call themselves",
            "Lesotho",
            "demonym",
            "People there call themselves Basotho.",
        ),
    ],
)
def test_sentences_read_like_english(pattern, name, relation, text):
    (country,) = [country for country in countries.table() if country.name == name]
    assert countries.sentence(pattern, country, relation) == text


# --- conversations ---


def test_conversations_hold_out_phrasings_and_tell_the_truth():
    by_name = {country.name: country for country in countries.table()}
    train, val = countries.conversations(seed=1)
    assert len(val) == len(by_name) * len(countries.RELATIONS)
    said = {message["content"] for talk in train for message in talk}
    asked = {talk[0]["content"] for talk in val}
    for relation in countries.RELATIONS:
        patterns = countries.held_out(countries.QUESTION, relation)
        for country in by_name.values():
            hidden = {countries.ask(pattern, country, relation) for pattern in patterns}
            assert len(hidden & asked) == 1 and not hidden & said
    facts = [(country, r) for country in by_name.values() for r in countries.RELATIONS]
    first = {countries.ask(p, c, r): (c, r) for p in countries.QUESTION for c, r in facts}
    follow_up = {
        p.format(noun=n): r for p in countries.FOLLOW_UP for r, n in countries.NOUNS.items()
    }
    for talk in [*train, *val]:
        assert [m["role"] for m in talk] == ["user", "assistant"] * (len(talk) // 2)
        country, relation = first[talk[0]["content"]]
        for question, answer in zip(talk[::2], talk[1::2], strict=True):
            relation = follow_up.get(question["content"], relation)
            fact = countries.stopped(country.answer(relation))
            assert answer["content"] in (f"The answer is {fact}", fact[0].upper() + fact[1:])
    brief = sum(not m["content"].startswith("The answer") for talk in train for m in talk[1::2])
    assert brief / sum(len(talk) // 2 for talk in train) == pytest.approx(0.5, abs=0.03)


def test_corpora_are_functions_of_the_seed():
    for corpus in (countries.documents, countries.conversations):
        assert corpus(3) == corpus(3) != corpus(4)
