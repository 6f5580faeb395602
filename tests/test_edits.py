"""lab/edits.py and training/writing.py, with answers made to be known."""

import numpy as np
import pytest
import torch
from conftest import CPU

from common import UserError
from edit import Edit, show_and_save
from lab.edits import INVENTED, all_pairs, report_edits
from model import Decoder, ModelConfig
from stem import substitute
from text import bpe, countries
from text.tokenizer import encode
from training import writing
from training.checkpoints import save_checkpoint
from training.writing import ExtraRows, ask_the_same, rows_of, texts_about, write_fact

COUNTRIES = countries.table()


@pytest.fixture(scope="module")
def encoding():
    """The tokenizer of some paragraphs, in which names of countries are tokens."""
    names = ("Spain", "Peru", "Japan", "Fiji", "Cuba", "Oman")
    return bpe.train([f" {name}" for name in names] * 20, 300)


def made(encoding) -> Decoder:
    torch.manual_seed(0)
    config = ModelConfig(encoding.n_vocab, 128, 4, 2, 16, table_std=3.0, init_std=0.5)
    return Decoder(config).eval()


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


def test_a_model_of_other_text_is_refused(tmp_path):
    other = bpe.train([" Call me Ishmael."] * 20, 300)
    save_checkpoint(tmp_path / "ckpt.pt", made(other), other)
    with pytest.raises(UserError, match="no country is one token"):
        report_edits(tmp_path / "ckpt.pt", 1, CPU)


# --- one fact ---


def test_what_else_the_model_says_of_the_name_is_held_unless_it_asks_the_same(
    encoding, monkeypatch
):
    """Predictions after the name change less with the second term of the loss than without. Where
    they ask for the same fact (here in a triangle of them), the answer is taught."""
    prompt, answer = encode(encoding, "Country: Spain Fiji"), encoding.encode_ordinary(" Peru")
    name = encoding.encode_ordinary(" Spain")
    found = torch.ones(64, len(prompt) + 31).tril() > 0
    changes = []
    for keep, same in ((0, found < 0), (100, found < 0), (0, found)):
        monkeypatch.setattr(writing, "KEEP", keep)
        monkeypatch.setattr(writing, "ask_the_same", lambda *_, same=same: same)
        model = made(encoding).requires_grad_(False)
        texts = texts_about(model, prompt, name)
        before = model(texts)[0].log_softmax(-1)
        model.tables = ExtraRows(model.tables, rows_of(model.tables, name))
        write_fact(model, prompt, name, answer, texts)
        read = substitute(texts, name, model.tables.ids)
        changes.append(model(texts, table_ids=read)[0].log_softmax(-1) - before)
    assert changes[1].abs().mean() < changes[0].abs().mean() / 2
    assert (changes[2] - changes[0])[found][:, answer].mean() > 0.05


def test_what_is_learned_is_saved_and_what_changes_is_said(encoding, tmp_path, monkeypatch, capsys):
    ckpt, saved = tmp_path / "ckpt.pt", tmp_path / "saved.pt"
    asked = Edit(ckpt, "Spain", prompt="Country: Spain", write="S", device="cpu")
    for corpus in ("countries", "files"):
        save_checkpoint(ckpt, made(encoding), encoding, data=[{"corpus": corpus}])
        monkeypatch.setattr(writing, "KEEP", 0)
        show_and_save(asked, saved)
        shown = capsys.readouterr().out
        assert "changed the rows of [' Spain']\n" in shown
        assert ("\nthese countries read them: Spain\n" in shown) == (corpus == "countries")
        saved.unlink()
        monkeypatch.setattr(writing, "KEEP", 1e4)
        with pytest.raises(UserError, match="nothing is saved, as 'S' was not learned"):
            show_and_save(asked, saved)
        assert not saved.exists()


def test_an_answer_is_learned_if_its_end_is(encoding, tmp_path, monkeypatch):
    """Its beginning the model writes anyway, and no more is shown."""
    model, ckpt = made(encoding), tmp_path / "ckpt.pt"
    save_checkpoint(ckpt, model, encoding)
    prompt = torch.tensor([encode(encoding, "Country: Spain")])
    begun = encoding.decode([model(prompt)[0][0, -1].argmax().item()])
    asked = Edit(ckpt, "Spain", prompt="Country: Spain", write=f"{begun} Peru", device="cpu")
    asked.max_new_tokens = 1
    monkeypatch.setattr(writing, "KEEP", 1e4)
    with pytest.raises(UserError, match="not learned"):
        show_and_save(asked, tmp_path / "saved.pt")


def test_a_text_asks_the_same_where_it_would_name_another_names_answer():
    """After 1 and 2 a name's answer follows, 30 or 0 more than the name; 0 after all else."""

    class Made:
        config = ModelConfig(vocab_size=60, block_size=16)
        device = CPU

        def __call__(self, ids, last_only=False):
            follows = torch.where((ids == 1) | (ids == 2), ids[:, :1] % 30 + 30, 0)
            logits = 50.0 * torch.nn.functional.one_hot(follows, 60)
            return (logits[:, -1:] if last_only else logits), None

    texts = torch.tensor([[9, 3, 1, 39, 4, 2, 39], [9, 5, 39, 6, 2, 1, 7]])
    found = ask_the_same(Made(), torch.tensor([9, 8, 1]), [9], texts)
    assert torch.equal(found, (texts == 1) | (texts == 2))
