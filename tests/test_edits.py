"""analysis/edits.py against tables whose rows are overwritten, and answers made to be known."""

import copy
import json

import numpy as np
import pytest
import torch

from analysis import edits
from analysis.edits import (
    INVENTED,
    Asked,
    all_pairs,
    follow,
    layer_choices,
    report_layers,
    report_names,
    share_edited,
    swap_rows,
    swapped_ids,
)
from common import UserError
from config import ModelConfig
from edit import MeanRows, edited_ids
from model import Decoder
from text import countries, tokenizer
from text.tokenizer import encode

COUNTRIES = {country.name: country for country in countries.table()}
PAIR = tuple(Asked(COUNTRIES[name], 1, [], []) for name in ("Spain", "Peru"))


@pytest.fixture(scope="module")
def encoding():
    """The tokenizer of some paragraphs, in which names of countries are tokens."""
    names = ("Spain", "Peru", "Japan", "Fiji", "Cuba", "Oman")
    return tokenizer.train([f" {name}" for name in names] * 20, 300)


def made(encoding, ffn: str) -> Decoder:
    torch.manual_seed(0)
    shape = dict(vocab_size=encoding.n_vocab, block_size=128, n_layer=4, n_head=2, n_embd=16)
    more = dict(ffn=ffn, stem_layers="all") if ffn == "stem" else dict(ffn=ffn)
    return Decoder(ModelConfig(**shape, **more, table_std=3.0, init_std=0.5)).eval()


@pytest.mark.parametrize("ffn", ["stem", "embformer"])
@pytest.mark.parametrize("swapped", [set(), {0}, {1, 2}, {0, 1, 2}])
def test_an_edit_in_some_layers_is_other_rows_in_these_tables(encoding, ffn, swapped):
    model = made(encoding, ffn)
    spain, peru = (encoding.encode_ordinary(f" {name}") for name in ("Spain", "Peru"))
    assert len(spain) == len(peru) == 1
    ids = encode(encoding, "Country: Spain\nNot Peru.")
    overwritten = copy.deepcopy(model)
    for table in swapped:
        overwritten.tables.weight[table][spain] = overwritten.tables.weight[table][peru]
    expected = overwritten(torch.tensor([ids]))[0]

    model.tables = MeanRows(model.tables)
    mixed = swapped_ids(model, encoding, ids, PAIR)
    swap_rows(model.tables, swapped)
    assert torch.equal(model(torch.tensor([ids]), table_ids=torch.tensor([mixed]))[0], expected)


def test_choices_name_layers_and_number_tables():
    assert layer_choices([1, 2, 3]) == {
        "none": set(),
        **{"layer 1": {0}, "layer 2": {1}, "layer 3": {2}},
        **{"first 2": {0, 1}, "last 2": {1, 2}, "all": {0, 1, 2}},
    }


def test_the_edited_paragraph_stands_before_another_document(encoding):
    third = Asked(COUNTRIES["Fiji"], 1, encode(encoding, "Country: Fiji\nIts capital is"), [])
    first, second = encoding.decode(follow(encoding, PAIR[0], third)).split("<|endoftext|>")[1:]
    assert first.startswith("Country: Spain\n") and first.endswith(f"{PAIR[0].country.language}.")
    assert second == "Country: Fiji\nIts capital is"


def test_measures_are_those_of_answers_that_are_known(encoding, monkeypatch):
    """Answers are what the model says before or after the edit, so what must come out is known."""
    model = made(encoding, "stem")
    prompt = encode(encoding, "Country: Spain")
    others = edited_ids(encoding, prompt, "Spain", "Peru")

    def says(ids, table_ids):
        logits, _ = model(torch.tensor([ids]), table_ids=torch.tensor([table_ids]))
        return logits[0, -1:].argmax(-1).tolist()

    source = Asked(COUNTRIES["Spain"], 1, prompt, says(prompt, prompt))
    target = Asked(COUNTRIES["Peru"], 1, prompt, says(prompt, others))
    assert source.answer != target.answer
    begun = follow(encoding, source, Asked(None, 1, [encoding.eot_token], []))
    third = Asked(COUNTRIES["Fiji"], 1, [encoding.eot_token], says(begun, begun))
    leaks = says(begun, edited_ids(encoding, begun, "Spain", "Peru")) != third.answer

    monkeypatch.setattr(edits, "openings", lambda *_: [source, target, third])
    monkeypatch.setattr("random.Random.sample", lambda rng, asked, n: asked)
    model.tables = MeanRows(model.tables)
    found = report_layers(model, encoding, 1)
    assert list(found["none"].values()) == [0, 1, 0]
    assert list(found["all"].values()) == [1, 0, leaks]


def test_pairs_are_sorted_by_their_names_and_differ_in_their_fact(encoding):
    pairs = all_pairs(encoding, "language")
    assert len(pairs) == 6
    assert len(pairs["no edit"]) == len(COUNTRIES)
    assert len(pairs["made up"]) == len(INVENTED) * len(COUNTRIES)
    for sort, sign in (("one token", 0), ("longer source", 1), ("longer target", -1)):
        for source, target in pairs[sort]:
            assert source.answer != target.answer and source.country != target.country
            assert np.sign(source.length - target.length) == sign
            assert (source.length + target.length == 2) == (sort == "one token")


def test_a_report_counts_the_answers_that_an_edit_changes(encoding):
    """Where every row is the same, no edit changes anything; pairs ask for another's fact."""
    model = made(encoding, "stem")
    for weight in model.tables.weight:
        weight.copy_(weight[:1].expand_as(weight))
    model.tables = MeanRows(model.tables)
    prompt = encode(encoding, "Country: Spain")
    answer = model(torch.tensor([prompt]))[0][0, -1:].argmax(-1).tolist()
    right, wrong = (PAIR[0]._replace(prompt=prompt, answer=found) for found in (answer, [0, 0]))
    for targets, share in (([right], 1), ([wrong], 0), ([right, wrong, wrong, wrong], 0.25)):
        pairs = [(right, target) for target in targets]
        assert share_edited(model, encoding, pairs, "last") == share


def test_a_model_of_other_text_is_refused():
    other = tokenizer.train([" Call me Ishmael."] * 20, 300)
    model = made(other, "stem")
    model.tables = MeanRows(model.tables)
    with pytest.raises(UserError, match="no country is one token"):
        report_names(model, other, most=1)


def test_a_checkpoint_has_a_table_and_a_report(tmp_path, monkeypatch, capsys):
    parts = [
        {"names": "one token", "asked for": "capital", "last": 0.75},
        {"names": "longer source", "asked for": "capital", "last": 0.5, "average": 0.25},
    ]
    report = {"success": 0.75, "parts": parts}
    monkeypatch.setattr(edits, "report_checkpoint", lambda *_: report)
    edits.measure_checkpoint(tmp_path / "ckpt.pt", torch.device("cpu"))
    assert json.loads((tmp_path / "edit_report.json").read_text()) == report
    rows = capsys.readouterr().out.splitlines()
    assert "| one token | capital | 75.0% |  |" in rows
    assert "| longer source | capital | 50.0% | 25.0% |" in rows
