"""analysis/edits.py against tables whose rows are overwritten, and answers made to be known."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis import edits
from analysis.edits import INVENTED, Asked, all_pairs, report_names, share_edited
from common import UserError
from config import ModelConfig
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


def made(encoding) -> Decoder:
    torch.manual_seed(0)
    shape = dict(vocab_size=encoding.n_vocab, block_size=128, n_layer=4, n_head=2, n_embd=16)
    return Decoder(ModelConfig(**shape, stem_layers="all", table_std=3.0, init_std=0.5)).eval()


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
    model = made(encoding)
    for weight in model.tables.weight:
        weight.copy_(weight[:1].expand_as(weight))
    prompt = encode(encoding, "Country: Spain")
    answer = model(torch.tensor([prompt]))[0][0, -1:].argmax(-1).tolist()
    right, wrong = (PAIR[0]._replace(prompt=prompt, answer=found) for found in (answer, [0, 0]))
    for targets, share in (([right], 1), ([wrong], 0), ([right, wrong, wrong, wrong], 0.25)):
        pairs = [(right, target) for target in targets]
        assert share_edited(model, encoding, pairs) == share


def test_a_model_of_other_text_is_refused():
    other = tokenizer.train([" Call me Ishmael."] * 20, 300)
    model = made(other)
    with pytest.raises(UserError, match="no country is one token"):
        report_names(model, other, most=1)


def test_a_checkpoint_has_a_table_and_a_report(tmp_path, monkeypatch, capsys):
    parts = [
        {"names": "one token", "asked for": "capital", "success": 0.75},
        {"names": "longer source", "asked for": "capital", "success": 0.5},
    ]
    report = {"success": 0.75, "parts": parts}
    monkeypatch.setattr(edits, "report_checkpoint", lambda *_: report)
    edits.measure_checkpoint(tmp_path / "ckpt.pt", torch.device("cpu"))
    assert json.loads((tmp_path / "edit_report.json").read_text()) == report
    rows = capsys.readouterr().out.splitlines()
    assert "| one token | capital | 75.0% |" in rows
    assert "| longer source | capital | 50.0% |" in rows


@pytest.mark.parametrize("method", edits.RATES)
def test_each_method_trains_what_it_says(encoding, monkeypatch, method):
    monkeypatch.setattr(edits, "STEPS", 2)
    monkeypatch.setattr("edit.STEPS", 5)
    model = made(encoding)
    before = copy.deepcopy(model.state_dict())
    spain = COUNTRIES["Spain"]
    fact = edits.Fact(spain, replace(spain, capital="Peru"), "capital")
    edits.write(model, encoding, fact, method)
    changed = {}
    for name, weight in model.state_dict().items():
        if not torch.equal(weight, before[name]):
            changed[name] = weight - before[name]
    if method == "rows":
        (row,) = encoding.encode_ordinary(" Spain")
        assert set(changed) == {f"tables.weight.{n}" for n in range(3)}
        assert all(part.any(1).nonzero().tolist() == [[row]] for part in changed.values())
    elif method == "LoRA":
        assert set(changed) == {f"blocks.{n}.ffn.down.weight" for n in (1, 2, 3)}
        assert all(torch.linalg.matrix_rank(part, rtol=1e-4) == 1 for part in changed.values())
    else:
        assert set(changed) == set(before)


def test_shares_are_those_of_a_model_that_knows_one_answer(encoding, monkeypatch):
    """After writing, one other answer comes to every question: all other facts are lost."""
    model = made(encoding)
    says = {"now": "Peru"}
    monkeypatch.setattr(edits, "write", lambda *_: says.update(now="Lima"))
    monkeypatch.setattr(
        edits,
        "answered",
        lambda _, encoding, probes: torch.tensor(
            [says["now"] in encoding.decode(answer) for _, answer, _ in probes], dtype=torch.bool
        ),
    )
    fact = edits.Fact(COUNTRIES["Spain"], replace(COUNTRIES["Spain"], capital="Lima"), "capital")
    found = edits.shares_after(model, encoding, [fact], "rows")
    assert [found[form] for form in countries.FORMS] == [1, 1, 1]
    assert found["composition"] == 0 and "its other facts" not in found  # it knew none
