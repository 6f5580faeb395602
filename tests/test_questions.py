"""What a model is asked (training/questions.py), beside asking it token by token, and what it is
asked about the countries (training/countries.py)."""

from collections import Counter
from contextlib import nullcontext
from statistics import mode

import pytest
import torch
from conftest import CPU

from common import UserError
from edit import check_editable
from model import Decoder, ModelConfig, decoder_class, relatives
from text import bpe, countries
from text.tokenizer import encode
from training.checkpoints import load_model
from training.countries import ask, chat_questions, chat_recall, check_names, demo, fact_questions
from training.questions import score_answers


@pytest.fixture(scope="module")
def encoding():
    texts = []
    for country in countries.table()[::40]:
        texts += [countries.sentence(p, country, "capital") for p in countries.PROSE]
    return bpe.train(texts * 9, 600)


def test_score_agrees_with_generating(trained):
    """Teacher forcing in one pass finds what greedy decoding, token by token, would write."""
    model, encoding, _ = load_model(trained["stem"] / "ckpt.pt", CPU)
    texts = ["Anna", "Björn sees", "Chloë meets Anna at", "the river"]
    prompts = [encode(encoding, text) for text in texts]
    answers = []
    for prompt in prompts:
        written = model.generate(torch.tensor([prompt]), 4, temperature=0)
        answers.append(written[0, len(prompt) :].tolist())
    for answer in answers[1::2]:
        answer[-1] = (answer[-1] + 1) % encoding.n_vocab
    greedy, probability = score_answers(model, prompts, answers)
    assert greedy.tolist() == [True, False, True, False]
    for prompt, answer, p in zip(prompts, answers, probability, strict=True):
        expected = 1.0
        for n, token in enumerate(answer):
            logits, _ = model(torch.tensor([prompt + answer[:n]]))
            expected *= logits[0, -1].softmax(-1)[token].item()
        assert p.item() == pytest.approx(expected, rel=1e-4)


def test_every_country_is_asked_in_all_forms_and_in_words_it_never_saw(encoding):
    n_country = len(countries.table())
    asked = fact_questions(encoding, countries.table(), ["capital"])
    texts = {encoding.decode(prompt + answer) for prompt, answer in asked}
    assert len(texts) == len(asked) == n_country * 3 * 2
    assert any("Country: Peru\nIts capital is Lima" in text for text in texts)
    conversations, _ = countries.conversations(0)
    learned = {message["content"] for messages in conversations for message in messages}
    chats = chat_questions(encoding, "capital")
    assert len(chats) == n_country * 2
    for prompt, brief, sentence in chats:
        question = encoding.decode(prompt).split("\n ")[1].split("<")[0]
        assert question.endswith("?") and question not in learned
        answer = encoding.decode(brief)
        assert answer.endswith(".<|im_end|>")
        assert encoding.decode(sentence) == f" The answer is{answer}"


def test_styles_are_told_apart_as_counting_samples_does(encoding, monkeypatch):
    torch.manual_seed(29)
    model = Decoder(ModelConfig(5, 8, 1, 2, 8, ffn="dense", init_std=0.4)).eval()
    # Answers of two tokens, of five in all; 0 begins the sentences.
    asked = []
    for n in range(16):
        brief = [1 + n % 3, 4]
        sentence = [0, 2 + n % 2]
        asked.append(([1 + n % 4, 1 + n // 4], brief, sentence))
    monkeypatch.setattr("training.countries.chat_questions", lambda *_: asked)
    found = chat_recall(model, encoding, "capital")
    expected = dict.fromkeys(found, 0.0)
    n_sample = Counter()
    n_right = Counter()
    for prompt, *right in asked:
        prompts = torch.tensor([prompt]).expand(8192, -1)
        said = model.generate(prompts, 2, temperature=0.8, seed=0)[:, 2:].tolist()
        for style, begins in {"": range(5), "_sentence": [0], "_brief": [1, 2, 3, 4]}.items():
            pairs = [pair for pair in said if pair[0] in begins]
            first = mode([pair[0] for pair in pairs])
            second = mode([pair[1] for pair in pairs if pair[0] == first])
            if [first, second] in right:
                expected["recall" + style] += 1 / len(asked)
            n_sample[style] += len(pairs)
            n_right[style] += sum(pair in right for pair in pairs)
    for style in n_sample:
        expected["sampled" + style] = n_right[style] / n_sample[style]
    expected["sentences"] = n_sample["_sentence"] / n_sample[""]
    assert found == pytest.approx(expected, abs=0.005)
    assert all(0 < value < 1 for value in found.values())


def test_a_run_asks_what_its_corpus_has_and_its_model_has_room_for(encoding, capsys):
    shapes = [ModelConfig(encoding.n_vocab, size, 1, 2, 8, ffn="dense") for size in (128, 9)]
    model, small = (Decoder(shape).train() for shape in shapes)
    for corpus, briefly, known in (
        ("countries", True, {"recall", "answer_nats"}),
        ("countries", False, {"recall"}),
        ("countries-sft", True, set()),
        ("files", False, set()),
    ):
        assert ask(model, encoding, corpus, briefly=briefly).keys() == known
        assert ask(small, encoding, corpus, briefly=briefly) == {}
        assert ("skipped" in capsys.readouterr().out) == (known == {"recall"})
    assert model.training and small.training


@pytest.mark.parametrize("ffn", ["dense", "stem", "embformer", *relatives("Decoder")])
def test_edits_are_proposed_where_they_can_be_made(ffn):
    kind = decoder_class(ffn)
    model = kind(kind.config_class(n_layer=2, n_embd=32, ffn=ffn))
    proposed = any("edit.py" in line for line in demo(model, "countries")[1])
    with nullcontext() if proposed else pytest.raises(UserError):
        check_editable(model)


def test_names_that_the_countries_do_not_have_are_refused():
    for name, named in (
        ({"source": "spain"}, "Spain"),
        ({"target": "Germny"}, "Germany"),
        ({"target": "Xqzw"}, "Xqzw"),
    ):
        with pytest.raises(UserError, match=named):
            check_names(**name)
    check_names(source="Spain", target=None)
    check_names(source="Atlantis", target="Germany")  # a made-up name may read a country's rows
