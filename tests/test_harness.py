"""The class of docs/harness.md against log-probabilities and texts computed token by token."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import CPU, ROOT

from text.tokenizer import encode
from training.checkpoints import load_model

LONG = "Anna sees Björn at the river. " * 6  # two contexts
PAIRS = [
    ("Anna sees", " Björn"),
    ("", "Chloë follows Anna."),
    ("Björn ", "meets"),  # the space belongs to the next word
    (LONG, "Chloë"),
    ("Anna", f" {LONG}"),
]


def requests(*arguments):
    return [SimpleNamespace(args=args) for args in arguments]


@pytest.fixture(scope="module")
def harness_model():
    """The class, as the page has it, on a stand-in for the harness's own."""
    page = (ROOT / "docs/harness.md").read_text(encoding="utf-8")
    stand_in = ModuleType("lm_eval.api.model")
    stand_in.LM = object
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
        patch.setitem(sys.modules, "lm_eval.api", ModuleType("lm_eval.api"))
        patch.setitem(sys.modules, "lm_eval.api.model", stand_in)
        script = {}
        exec(page.split("```python\n")[1].split("```")[0], script)
    return script["HarnessModel"]


@pytest.fixture(params=["dense", "stem", "embformer", "disk"])
def opened(request, trained, on_disk, harness_model):
    folder = on_disk if request.param == "disk" else trained[request.param]
    offload = "disk" if request.param == "disk" else "none"
    model, encoding, _ = load_model(folder / "ckpt.pt", CPU, offload)
    return harness_model(model, encoding)


@torch.no_grad()
def next_log_p(opened, ids):
    logits, _ = opened.model(torch.tensor([ids[-opened.model.config.block_size :]]))
    return logits[0, -1].log_softmax(0)


def naive(opened, ids, first):
    """Each token from as many before it as its window gives it, one forward pass a token."""
    size = opened.model.config.block_size
    total, greedy = 0.0, True
    for at in range(first, len(ids)):
        start = first + (at - first) // size * size
        begin = max(0, min(start + size, len(ids)) - size - 1)
        log_p = next_log_p(opened, ids[begin:at])
        total += log_p[ids[at]].item()
        greedy = greedy and log_p.argmax().item() == ids[at]
    return total, greedy


def test_scores_are_sums_over_tokens(opened):
    found = opened.loglikelihood(requests(*PAIRS))
    for (context, continuation), (log_p, greedy) in zip(PAIRS, found, strict=True):
        ids = encode(opened.encoding, context + continuation)
        first = len(encode(opened.encoding, context.rstrip()))
        expected, is_greedy = naive(opened, ids, first)
        assert (log_p, greedy) == (pytest.approx(expected, rel=1e-4), is_greedy)
        (whole,) = opened.loglikelihood_rolling(requests((context + continuation,)))
        assert whole == pytest.approx(naive(opened, ids, 1)[0], rel=1e-4)


def test_generated_text_ends_before_until(opened):
    ids = encode(opened.encoding, "Anna sees")
    n_prompt = len(ids)
    for _ in range(20):
        ids.append(next_log_p(opened, ids).argmax().item())
    text = opened.encoding.decode(ids[n_prompt:])
    for until, expected in (("no such text", text), (text[7:9], text[: text.index(text[7:9])])):
        for stops in (until, [until, "nor this"]):
            options = {"until": stops, "max_gen_toks": 20}
            assert opened.generate_until(requests(("Anna sees", options))) == [expected]
    assert opened.score(ids, n_prompt)[1]
    ids[-1] -= 1
    assert not opened.score(ids, n_prompt)[1]
