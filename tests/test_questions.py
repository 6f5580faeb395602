"""What a model is asked (training/questions.py), beside asking it token by token."""

from collections import Counter
from statistics import mode

import pytest
import torch
from conftest import CPU

from model import Decoder, ModelConfig
from text import countries, tokenizer
from text.tokenizer import encode
from training import questions
from training.checkpoints import load_model


@pytest.fixture(scope="module")
def encoding():
    texts = []
    for country in countries.table()[::40]:
        texts += [countries.sentence(p, country, "capital") for p in countries.PROSE]
    return tokenizer.train(texts * 9, 600)


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
    greedy, probability = questions.score_answers(model, prompts, answers)
    assert greedy.tolist() == [True, False, True, False]
    for prompt, answer, p in zip(prompts, answers, probability, strict=True):
        expected = 1.0
        for n, token in enumerate(answer):
            logits, _ = model(torch.tensor([prompt + answer[:n]]))
            expected *= logits[0, -1].softmax(-1)[token].item()
        assert p.item() == pytest.approx(expected, rel=1e-4)


def test_every_country_is_asked_in_all_forms_and_in_words_it_never_saw(encoding):
    n_country = len(countries.table())
    asked = questions.fact_questions(encoding, countries.table(), ["capital"])
    texts = {encoding.decode(prompt + answer) for prompt, answer in asked}
    assert len(texts) == len(asked) == n_country * 3 * 2
    assert any("Country: Peru\nIts capital is Lima" in text for text in texts)
    conversations, _ = countries.conversations(0)
    learned = {message["content"] for messages in conversations for message in messages}
    chats = questions.chat_questions(encoding, "capital")
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
    monkeypatch.setattr(questions, "chat_questions", lambda *_: asked)
    found = questions.chat_recall(model, encoding, "capital")
    expected = dict.fromkeys(found, 0.0)
    n_sample = Counter()
    n_right = Counter()
    for prompt, *right in asked:
        prompts = torch.tensor([prompt]).expand(8192, -1)
        said = model.generate(prompts, 2, temperature=0.8, seed=0)[:, 2:].tolist()
        styles = {
            "": said,
            "_sentence": [pair for pair in said if pair[0] == 0],
            "_brief": [pair for pair in said if pair[0] != 0],
        }
        for style, pairs in styles.items():
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
