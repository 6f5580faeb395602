"""What a model is asked (training/questions.py), and how often edits of it succeed
(analysis/edit_success.py)."""

import copy
import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from analysis import edit_success
from common import UserError
from edit import ALIGN, MeanRows
from model import Decoder, ModelConfig
from text import countries, tokenizer
from text.tokenizer import encode
from training import questions
from training.checkpoints import load_model, save_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def untrained():
    """A STEM model on six countries' names that has learned nothing."""
    names = ["Spain", "Peru", "Japan", "Chad", "Fiji", "Oman"]
    six = [country for country in countries.table() if country.name in names]
    texts = [countries.sentence(p, c, "capital") for c in six for p in countries.PROSE]
    encoding = tokenizer.train(texts * 9, 600)
    torch.manual_seed(0)
    config = ModelConfig(encoding.n_vocab, 64, 2, 2, 32, stem_layers="all", table_std=1.0)
    return six, Decoder(config).eval(), encoding


def test_score_agrees_with_generating(trained):
    """Teacher forcing in one pass finds what greedy decoding, token by token, would write."""
    model, encoding, _ = load_model(trained["stem"] / "ckpt.pt", CPU)
    prompts, answers, written = [], [], []
    for i, text in enumerate(["Anna", "Björn sees", "Chloë meets Anna at", "the river"]):
        prompt = encode(encoding, text)
        new = model.generate(torch.tensor([prompt]), 4, temperature=0)[0, len(prompt) :].tolist()
        written.append(i % 2 == 0)
        prompts.append(prompt)
        answers.append(new if i % 2 == 0 else [*new[:-1], (new[-1] + 1) % encoding.n_vocab])
    greedy, probability, _ = questions.score_answers(model, prompts, answers)
    assert greedy.tolist() == written
    for prompt, answer, p in zip(prompts, answers, probability, strict=True):
        expected = 1.0
        for n, token in enumerate(answer):
            logits, _ = model(torch.tensor([prompt + answer[:n]]))
            expected *= logits[0, -1].softmax(-1)[token].item()
        assert p.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("n_vocab", "most"), [(300, 256), (2**22 // 7, 7), (2**23, 1)])
def test_groups_hold_every_question_once_and_in_order(n_vocab, most):
    asked = [([i], [-i], str(i)) for i in range(600)]
    groups = list(questions.groups(SimpleNamespace(n_vocab=n_vocab), asked))
    assert [len(prompts) for prompts, _, _ in groups[:-1]] == [most] * (len(groups) - 1)
    assert all(isinstance(column, list) for group in groups for column in group)
    assert [question for group in groups for question in zip(*group, strict=True)] == asked


def test_recall_asks_every_form_of_every_country(untrained, monkeypatch):
    six, model, encoding = untrained
    monkeypatch.setattr(countries, "table", lambda: six)
    seen = []

    def all_right(model, prompts, answers, table_prompts=None):
        seen.extend(encoding.decode(prompt) for prompt in prompts)
        return torch.ones(len(prompts), dtype=torch.bool), None, None

    monkeypatch.setattr(questions, "score_answers", all_right)
    assert questions.fact_recall(model, encoding, "capital") == 1.0
    assert len(set(seen)) == 6 * 3 * 2
    assert any(text.endswith("Country: Peru\nIts capital is") for text in seen)


def test_a_chat_is_asked_in_words_it_never_saw(untrained, monkeypatch):
    six, _, encoding = untrained
    monkeypatch.setattr(countries, "table", lambda: six)
    asked = questions.chat_questions(encoding, "capital")
    assert len(asked) == 6 * 2
    prompt, brief, sentence = map(encoding.decode, asked[-1])
    assert prompt.startswith("<|endoftext|><|im_start|>user\n ")
    assert prompt.endswith(" Spain?<|im_end|>\n<|im_start|>assistant\n")
    assert (brief, sentence) == (" Madrid.<|im_end|>", " The answer is Madrid.<|im_end|>")


def test_styles_are_told_apart_as_counting_samples_does(untrained, monkeypatch):
    encoding = untrained[2]
    torch.manual_seed(29)
    model = Decoder(ModelConfig(5, 8, 1, 2, 8, ffn="dense", init_std=0.4)).eval()
    # Answers of two tokens, of five in all; 0 begins the sentences.
    asked = [([1 + n % 4, 1 + n // 4], [1 + n % 3, 4], [0, 2 + n % 2]) for n in range(16)]
    monkeypatch.setattr(questions, "chat_questions", lambda *_: asked)
    found = questions.chat_recall(model, encoding, "capital")
    expected, samples, right = dict.fromkeys(found, 0.0), Counter(), Counter()
    for prompt, brief, sentence in asked:
        prompts = torch.tensor([prompt]).expand(8192, -1)
        said = model.generate(prompts, 2, temperature=0.8, seed=0)[:, 2:].tolist()
        styles = {"_sentence": [], "_brief": []}
        for pair in said:
            styles["_sentence" if pair[0] == 0 else "_brief"].append(pair)
        for style, pairs in {"": said, **styles}.items():
            first = Counter(pair[0] for pair in pairs).most_common(1)[0][0]
            second = Counter(pair[1] for pair in pairs if pair[0] == first).most_common(1)[0][0]
            expected["recall" + style] += ([first, second] in (brief, sentence)) / len(asked)
            samples[style] += len(pairs)
            right[style] += sum(pair in (brief, sentence) for pair in pairs)
    expected |= {"sampled" + style: right[style] / samples[style] for style in samples}
    expected["sentences"] = samples["_sentence"] / samples[""]
    assert found == pytest.approx(expected, abs=0.005)
    assert all(0 < value < 1 for value in found.values())


# --- edits ---


@pytest.fixture
def judged(untrained, monkeypatch):
    """The model, its tokenizer, and a function that takes a list of countries to be all there are.
    The model is one that answers with the fact of every country all of whose name's tokens it
    reads rows of."""
    model, encoding = copy.deepcopy(untrained[1]), untrained[2]
    model.tables = MeanRows(model.tables)
    plain, names = encoding.encode_ordinary, {}

    def judge(model, prompts, answers, edited):
        hits = [
            any(name <= set(ids) for name in names[tuple(answer)])
            for answer, ids in zip(answers, edited, strict=True)
        ]
        return torch.tensor(hits), None, None

    def only(table):
        monkeypatch.setattr(countries, "table", lambda: table)
        for country in table:
            for relation in edit_success.RELATIONS:
                answer = plain(countries.questions(relation, "paragraph", country)[0].answer)
                names.setdefault(tuple(answer), []).append(set(plain(f" {country.name}")))

    monkeypatch.setattr(edit_success, "score_answers", judge)
    return model, encoding, only


def test_edits_that_work_succeed_and_others_do_not(judged, untrained, monkeypatch):
    model, encoding, only = judged
    only(untrained[0])
    result = edit_success.report_pairs(model, encoding)
    assert result["recall"] == result["success"] == 1.0 and result["countries"] == 6
    pairs = {relation: part["pairs"] for relation, part in result["relations"].items()}
    assert pairs == {"capital": 30, "language": 26, "region": 28}
    assert result["pairs"] == 84  # Japan and Oman share Asia, Spanish and Arabic are shared, too
    assert edit_success.report_pairs(model, encoding, most=7)["pairs"] == 21
    injected = edit_success.report_injected(model, encoding)
    assert injected == dict(capital=1.0, language=1.0, region=1.0)

    monkeypatch.setattr(edit_success, "edited_ids", lambda encoding, ids, *names: ids)
    result = edit_success.report_pairs(model, encoding)
    assert (result["recall"], result["success"]) == (1.0, 0.0)
    assert set(edit_success.report_injected(model, encoding).values()) == {0.0}


def test_longer_sources_are_told_from_longer_targets(judged, untrained):
    model, encoding, only = judged
    only([c for c in countries.table() if c.name in ("Saudi Arabia", "New Zealand")] + untrained[0])
    result = edit_success.report_lengths(model, encoding)
    assert [row.pop("pairs") for row in result.values()] == [0, 13, 13]
    assert result["longer source"] == dict(last=1.0, first=1.0, pad=1.0, average=0.0)
    assert result["longer target"] == dict.fromkeys(ALIGN, 0.0)
    assert result["equal length"] == dict.fromkeys(ALIGN)


def test_a_checkpoint_is_measured_into_a_table_and_a_report(judged, untrained, tmp_path, capsys):
    judged[2](untrained[0])
    save_checkpoint(tmp_path / "ckpt.pt", *untrained[1:])
    edit_success.measure_checkpoint(tmp_path / "ckpt.pt", CPU)
    report = json.loads((tmp_path / "edit_report.json").read_text())
    assert report["recall"] == report["success"] == 1.0
    out = capsys.readouterr().out
    assert "| names | asked for | pairs | recall | last |" in out
    assert "| one token | region | 28 | 100.0% | 100.0% |" in out


def test_a_model_that_cannot_be_measured_is_refused(untrained, trained, tmp_path, monkeypatch):
    six, model, encoding = untrained
    save_checkpoint(tmp_path / "ckpt.pt", model, encoding)
    for ckpt, table, says in (
        (trained["dense"] / "ckpt.pt", six, "has no tables to edit"),
        (trained["stem"] / "ckpt.pt", six, "too few countries are one token"),
        (tmp_path / "ckpt.pt", six[:1], "too few countries are one token"),
        (tmp_path / "ckpt.pt", six, "knows no capital"),
    ):
        monkeypatch.setattr(countries, "table", lambda table=table: table)
        with pytest.raises(UserError, match=says):
            edit_success.measure_checkpoint(ckpt, CPU)
        assert not (ckpt.parent / "edit_report.json").exists()
