"""lab/harness.py against log-probabilities and texts computed token by token."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import CPU, command

from text.tokenizer import encode
from training.checkpoints import load_model

LONG = "Anna sees Björn at the river. " * 6  # two contexts
PAIRS = [
    ("Anna sees", " Björn"),
    ("", "Chloë follows Anna."),
    ("Björn ", "meets"),  # the space belongs to the next word
    ("Anna s", "ees Björn"),  # and so do letters
    ("A", "nna"),  # a text of one token, not that of its context
    ("Anna sees", ""),  # the last token is scored
    ("Anna", f" {LONG}"),
]


def requests(*arguments):
    return [SimpleNamespace(args=args) for args in arguments]


@pytest.fixture(scope="module")
def harness():
    """lab/harness.py, on a stand-in for lm_eval."""
    stand_in = SimpleNamespace(
        LM=object,
        simple_evaluate=lambda model, tasks: [type(model).__name__, *tasks],
        make_table=" ".join,
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in ("lm_eval", "lm_eval.api.model", "lm_eval.utils"):
            patch.setitem(sys.modules, name, stand_in)
        yield importlib.import_module("lab.harness")


@pytest.fixture
def opened(stem_ckpt, harness):
    model, encoding, _ = load_model(stem_ckpt, CPU)
    return harness.HarnessModel(model, encoding)


def test_the_command_passes_a_model_and_tasks_on(stem_ckpt, harness):
    done = command("lab/harness.py", stem_ckpt, "hellaswag,arc_easy")
    assert done.stdout == "HarnessModel hellaswag arc_easy\n"


@torch.no_grad()
def naive(opened, ids, first):
    """Each token from as many before it as its window gives it, one forward pass a token."""
    size = opened.model.config.block_size
    total, greedy = 0.0, True
    for at in range(first, len(ids)):
        start = first + (at - first) // size * size
        begin = max(0, min(start + size, len(ids)) - size - 1)
        logits, _ = opened.model(torch.tensor([ids[begin:at][-size:]]))
        log_p = logits[0, -1].log_softmax(0)
        total += log_p[ids[at]].item()
        greedy = greedy and log_p.argmax().item() == ids[at]
    return total, greedy


def test_scores_are_sums_over_tokens(opened):
    found = opened.loglikelihood(requests(*PAIRS))
    for (context, continuation), (log_p, greedy) in zip(PAIRS, found, strict=True):
        ids = encode(opened.encoding, context + continuation)
        alone = encode(opened.encoding, context)
        differs = [end for end in range(len(ids)) if alone[: end + 1] != ids[: end + 1]]
        first = min([*differs, len(ids) - 1])
        expected, is_greedy = naive(opened, ids, first)
        assert (log_p, greedy) == (pytest.approx(expected, rel=1e-4), is_greedy)
        (whole,) = opened.loglikelihood_rolling(requests((context + continuation,)))
        assert whole == pytest.approx(naive(opened, ids, 1)[0], rel=1e-4)


def test_generated_text_ends_before_until(opened):
    ids = encode(opened.encoding, "Anna sees")
    written = opened.model.generate(torch.tensor([ids]), 20, temperature=0)[0, len(ids) :]
    text = opened.encoding.decode(written.tolist())
    for until, expected in (("no such text", text), (text[7:9], text[: text.index(text[7:9])])):
        for stops in (until, [until, "nor this"]):
            options = {"until": stops, "max_gen_toks": 20}
            assert opened.generate_until(requests(("Anna sees", options))) == [expected]


def test_of_a_long_context_so_much_is_read_that_what_is_generated_has_room(opened, monkeypatch):
    context, read = "Anna sees Emil. " * 40, []
    monkeypatch.setattr("lab.harness.write", lambda *given, **_: read.append(given[2]) or iter([]))
    options = {"until": "no such text", "max_gen_toks": 5}
    opened.generate_until(requests((context, options)))
    assert read == [encode(opened.encoding, context)[4 - opened.model.config.block_size :]]
