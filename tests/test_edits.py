"""analysis/edits.py against tables whose rows are overwritten, and answers made to be known."""

import copy
from types import SimpleNamespace

import pytest
import torch

from analysis import edits
from analysis.edits import MEASURES, Asked, SwappedRows, follow, layer_choices, report_layers
from config import ModelConfig
from edit import edited_ids
from model import Decoder
from text import countries, tokenizer
from text.tokenizer import encode


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

    model.tables = tables = SwappedRows(model.tables)
    tables.swapped = swapped
    mixed = torch.tensor([tables.edited(ids, edited_ids(encoding, ids, "Spain", "Peru"))])
    assert torch.equal(model(torch.tensor([ids]), table_ids=mixed)[0], expected)


def test_choices_name_layers_and_number_tables():
    assert layer_choices([1, 2, 3]) == {
        "none": set(),
        **{"layer 1": {0}, "layer 2": {1}, "layer 3": {2}},
        **{"first 2": {0, 1}, "last 2": {1, 2}, "all": {0, 1, 2}},
    }


def test_the_edited_paragraph_stands_before_another_document(encoding):
    third = Asked("Fiji", 1, encode(encoding, "Country: Fiji\nIts capital is"), [])
    ids = follow(encoding, Asked("Spain", 1, [], []), third)
    first, second = encoding.decode(ids).split("<|endoftext|>")[1:]
    spain = next(country for country in countries.table() if country.name == "Spain")
    assert first.startswith("Country: Spain\n") and first.endswith(f"{spain.language}.")
    assert second == "Country: Fiji\nIts capital is"


def test_measures_are_those_of_answers_that_are_known(encoding, monkeypatch):
    """Prompt and answers are what the model says, so what must come out is known."""
    model, prompt = made(encoding, "stem"), encode(encoding, "Country: Spain")

    def says(ids, table_ids=None):
        logits, _ = model(torch.tensor([ids]), table_ids=torch.tensor([table_ids or ids]))
        return logits[0].argmax(-1)

    edited = edited_ids(encoding, prompt, "Spain", "Peru")
    source = Asked("Spain", 1, prompt, says(prompt)[-1:].tolist())
    target = Asked("Peru", 1, [], says(prompt, edited)[-1:].tolist())
    assert source.answer != target.answer
    begun = follow(encoding, source, Asked("Fiji", 1, [encoding.eot_token], []))
    whole = model.generate(torch.tensor([begun]), 20, temperature=0)[0].tolist()
    third = Asked("Fiji", 1, whole[len(begun) - 1 : -1], whole[-1:])

    monkeypatch.setattr(edits, "triples", lambda *_: [(source, target, third)])
    found = report_layers(model, encoding, 1)
    assert list(found["none"].values()) == [0, 1, 0, 0]
    after = says(whole, edited_ids(encoding, whole, "Spain", "Peru"))[:-1]
    gone = after[len(begun) - 1 :] != torch.tensor(whole[len(begun) :])
    expected = [1, 0, gone[-1].float().item(), gone[:-1].float().mean().item()]
    assert 0 < expected[3] < 1  # or the test shows nothing
    assert [found["all"][what] for what in MEASURES] == pytest.approx(expected)


def test_names_of_different_length_have_a_figure_for_each_way(tmp_path, monkeypatch):
    reports = {
        edits.report_pairs: {"recall": 1.0, "success": 0.75},
        edits.report_lengths: {"longer": {"last": 0.5, "first": 0.25, "pad": 0.125, "average": 1}},
        edits.report_injected: {"capital": 0.5, "region": 1.0},
    }
    monkeypatch.setattr(edits, "success_of_edits", lambda _, folders, report: [reports[report]])
    experiment = SimpleNamespace(
        quick=False, train=lambda kinds: {kind: [tmp_path] for kind in kinds}
    )
    _, _, *rows = edits.edits_by_names(experiment).splitlines()
    assert rows[:3] == [
        "| STEM, third | one token | 100.0% | 75.0% |  |  |  |",
        "| STEM, third | longer |  | 50.0% | 25.0% | 12.5% | 100.0% |",
        "| STEM, third | made up |  | 75.0% |  |  |  |",
    ]
