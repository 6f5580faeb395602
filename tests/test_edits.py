"""analysis/edits.py against tables whose rows are overwritten, and answers made to be known."""

import json

import numpy as np
import pytest
import torch
from conftest import ROOT

from analysis import edits
from analysis.edits import INVENTED, Asked, all_pairs, report_edits, share_edited
from common import UserError
from config import ModelConfig
from model import Decoder
from text import countries, tokenizer
from text.tokenizer import encode
from training.checkpoints import save_checkpoint
from training.questions import score_answers

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


def test_a_model_of_other_text_is_refused(tmp_path):
    other = tokenizer.train([" Call me Ishmael."] * 20, 300)
    save_checkpoint(tmp_path / "ckpt.pt", made(other), other)
    with pytest.raises(UserError, match="no country is one token"):
        report_edits(tmp_path / "ckpt.pt", 1, torch.device("cpu"))


def test_a_checkpoint_has_a_table_and_a_report(tmp_path, monkeypatch, capsys):
    parts = [
        {"names": "one token", "asked for": "capital", "success": 0.75},
        {"names": "longer source", "asked for": "capital", "success": 0.5},
    ]
    report = {"success": 0.75, "parts": parts}
    monkeypatch.setattr(edits, "report_edits", lambda *_: report)
    edits.measure_checkpoint(tmp_path / "ckpt.pt", torch.device("cpu"))
    assert json.loads((tmp_path / "edit_report.json").read_text()) == report
    rows = capsys.readouterr().out.splitlines()
    assert "| one token | capital | 75.0% |" in rows
    assert "| longer source | capital | 50.0% |" in rows


def test_the_documented_script_writes_a_fact_into_the_rows_of_one_name(encoding):
    page = (ROOT / "docs/writing.md").read_text(encoding="utf-8")
    script = {}
    exec(page.split("```python\n")[1].split("```")[0], script)
    model = made(encoding)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    prompt = "Country: Spain"
    asked = [encode(encoding, prompt)], [encoding.encode_ordinary(" Peru")]
    was = score_answers(model, *asked).probability
    script["write_fact"](model, encoding, "Spain", prompt, "Peru", rate=2.0, keep=0.0)
    assert score_answers(model, *asked).probability > 10 * was
    others = torch.arange(encoding.n_vocab) != encoding.encode_single_token(" Spain")
    for name, weight in model.state_dict().items():
        is_table = name.startswith("tables.")
        rows = others if is_table else slice(None)
        assert torch.equal(weight[rows], before[name][rows])
        assert is_table != torch.equal(weight, before[name])
