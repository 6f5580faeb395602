"""What a model is asked (corpora/questions.py), beside asking it token by token, and what it is
asked about the countries (corpora/recall.py)."""

import math
from collections import Counter
from contextlib import nullcontext
from inspect import unwrap

import pytest
import torch
from conftest import Largest, user_error
from naive import LAYERS, TINY, TwoRows, decoder
from simulated_gpu import SimulatedGpu

from corpora import countries, questions
from corpora.questions import score_answers
from corpora.recall import ask, chat_questions, chat_recall, check_names, demo, fact_questions
from model import Decoder, ModelConfig, decoder_class
from tables.tables import ResidentTables
from text import bpe
from training import writing
from training.edits import check_editable
from training.writing import as_others


@pytest.fixture(scope="module")
def encoding():
    texts = []
    for country in countries.table()[::40]:
        texts += [countries.sentence(p, country, "capital") for p in countries.PROSE]
    return bpe.train(texts * 9, 600)


def test_score_agrees_with_generating():
    """Teacher forcing in one pass finds what greedy decoding, token by token, would write."""
    model = decoder()
    prompts = [[3, 4, 5], [1, 2], [7]]
    answers = []
    for prompt in prompts:
        written = model.generate(torch.tensor([prompt]), 1 + len(prompt), temperature=0)
        answers.append(written[0, len(prompt) :].tolist())
    answers[1][-1] = (answers[1][-1] + 1) % model.config.vocab_size
    prompts.insert(0, [9])
    answers.insert(0, [])  # nothing is asked
    greedy, probability = score_answers(model, prompts, answers)
    assert greedy.tolist() == [True, True, False, True]
    for prompt, answer, found in zip(prompts, answers, probability, strict=True):
        p = model(torch.tensor([prompt + answer]))[0][0, len(prompt) - 1 :].softmax(-1)
        expected = math.prod(p[n, token].item() for n, token in enumerate(answer))
        assert found.item() == pytest.approx(expected, rel=1e-4)
    # ... as on a device without double precision, such as the GPUs of Macs.
    with SimulatedGpu() as gpu, torch.no_grad():  # of inference mode, it knows nothing
        scores = unwrap(score_answers)(model.to(gpu.device), prompts, answers)
    assert torch.equal(scores.greedy, greedy)
    torch.testing.assert_close(scores.probability, probability)


def test_of_long_prompts_fewer_are_read_at_a_time(monkeypatch):
    """To be scored, or with other names in them."""
    model = decoder(vocab_size=512)
    n, vocab_size = model.config.block_size - 1, model.config.vocab_size
    prompts, answers = [[3] * n, [4]] * 8, [[5], [6]] * 8
    whole = score_answers(model, prompts, answers).probability
    names = as_others(model, torch.tensor(prompts[0]), [[3]], 64)
    monkeypatch.setattr(questions, "LOGITS", 3 * n * vocab_size)
    monkeypatch.setattr(writing, "MOST_TOKENS", 3 * n)
    with Largest() as largest:
        torch.testing.assert_close(score_answers(model, prompts, answers).probability, whole)
    assert largest.numbers <= 3 * n * vocab_size
    with Largest() as largest:
        torch.testing.assert_close(as_others(model, torch.tensor(prompts[0]), [[3]], 64), names)
    assert largest.numbers < 32 * n * model.config.n_embd


@pytest.mark.parametrize(
    ("prompts", "table_prompts"), [([[], [1, 2, 3]], None), ([[1, 2, 3], [4, 5]], [[1, 2, 3], [4]])]
)
def test_what_would_be_scored_at_other_places_is_refused(prompts, table_prompts):
    with pytest.raises(AssertionError, match="prompt"):
        score_answers(decoder(), prompts, [[5, 6], [7]], table_prompts)


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
        assert encoding.decode(prompt).split("\n ")[1].split("<")[0] not in learned
        assert encoding.decode(sentence) == f" The answer is{encoding.decode(brief)}"


def test_styles_are_told_apart_as_the_probabilities_of_all_answers_do(encoding, monkeypatch):
    torch.manual_seed(29)
    model = Decoder(ModelConfig(5, 8, 1, 2, 8, ffn="dense", init_std=0.4)).eval()
    # Answers of two tokens, of five in all; 0 begins the sentences.
    asked = []
    for n in range(16):
        asked.append(([1 + n % 4, 1 + n // 4], [1 + n % 3, 4], [0, 2 + n % 2]))
    monkeypatch.setattr("corpora.recall.chat_questions", lambda *_: asked)
    found = chat_recall(model, encoding, "capital")
    expected = dict.fromkeys(found, 0.0)
    begins = {"": [0, 1, 2, 3, 4], "_sentence": [0], "_brief": [1, 2, 3, 4]}
    said = Counter()
    for prompt, *right in asked:
        logits, _ = model(torch.tensor([[*prompt, first] for first in range(5)]))
        p = (logits / 0.8).softmax(-1)  # of the first token [0, 1], of the second [first, 2]
        both = p[0, 1, :, None] * p[:, 2]
        for style, firsts in begins.items():
            of_style = torch.zeros(5, 5)
            of_style[firsts] = both[firsts]
            said[style] += of_style.sum().item()
            expected["sampled" + style] += sum(of_style[a, b].item() for a, b in right)
            first = of_style.sum(1).argmax().item()
            second = both[first].argmax().item()
            expected["recall" + style] += ([first, second] in right) / len(asked)
    for style in begins:
        expected["sampled" + style] /= said[style]
    expected["sentences"] = said["_sentence"] / said[""]
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_run_asks_what_its_corpus_has_and_its_model_has_room_for(encoding, capsys):
    for size in (128, 9):
        model = decoder(ffn="dense", vocab_size=encoding.n_vocab, block_size=size).train()
        for corpus, briefly, known in (
            ("countries", True, {"recall", "answer_nats"}),
            ("countries", False, {"recall"}),
            ("countries-sft", True, set()),
            ("files", False, set()),
        ):
            found = ask(model, encoding, {corpus, "files"}, briefly=briefly)
            assert found.keys() == (known if size == 128 else set())
            skipped = size == 9 and known == {"recall"}
            assert ("skipped" in capsys.readouterr().out) == skipped
        assert model.training


def test_without_a_target_none_is_checked():
    check_names(source="Spain", target="")  # as of edit.py --write
    with user_error("--target Spian is not one of the countries; did you mean Spain"):
        check_names(source="Spain", target="Spian")


def test_styles_that_begin_with_the_same_byte_are_not_told_apart(capsys):
    encoding = bpe.train([], 259)
    assert ask(decoder(ffn="dense", vocab_size=259), encoding, {"countries-sft"}) == {}
    assert "no token tells brief answers from sentences" in capsys.readouterr().out


def is_editable(model) -> bool:
    """Whether an edit is proposed. It can be made then, and else is refused."""
    proposed = any("edit.py" in line for line in demo(model, {"countries"})[1])
    with nullcontext() if proposed else user_error():
        check_editable(model)
    return proposed


@pytest.mark.parametrize("ffn", LAYERS)
def test_edits_are_proposed_where_they_can_be_made(ffn):
    is_editable(decoder(ffn=ffn))


def test_rows_are_edited_where_each_token_reads_its_own():
    """A bigram model may have as many rows as there are tokens, by chance."""
    assert is_editable(decoder(TwoRows))
    assert not is_editable(decoder(ffn="bigram", ngram_rows=TINY["vocab_size"]))


class Scaled(ResidentTables):
    def lookup(self, ids):
        return (2 * rows for rows in super().lookup(ids))


@pytest.mark.parametrize("kind", [ResidentTables, Scaled])
def test_rows_are_edited_where_a_lookup_returns_what_is_stored(kind):
    """Else a saved edit would not read as it was shown."""
    model = decoder(ffn="stem")
    rows = model.tables
    model.tables = kind(len(rows.weight), rows.n_row, rows.width)
    model.tables.init_rows(1.0)
    with nullcontext() if kind is ResidentTables else user_error(f"{kind.__name__}.lookup"):
        check_editable(model)


def test_no_edit_is_proposed_of_rows_that_no_later_token_reads():
    """Those of values in the last layer are read by later ones."""
    for ffn, proposed in (("stem", False), ("bank", True)):
        kind = decoder_class(ffn)
        model = kind(kind.config_class(n_layer=2, n_embd=32, ffn=ffn))
        assert len(model.tables.weight) == 1
        _, commands = demo(model, {"countries"})
        assert ("edit.py --source Spain --target Germany" in commands) == proposed
        ids, other = torch.tensor([[7, 5, 6], [8, 5, 6]]).split(1)
        with torch.no_grad():
            for rows in model.tables.weight:
                rows.normal_()
            for gate in [p for p in model.parameters() if not p.any()]:
                gate.fill_(1.0)
            before, after = (model(ids, table_ids=read)[0] for read in (ids, other))
        assert torch.equal(before[:, 1:], after[:, 1:]) != proposed
