"""Captured steps of decoding against ordinary ones. To capture takes a GPU (test_gpu.py): here,
what would be replayed is run again."""

import copy
import gc
import weakref
from itertools import islice
from types import SimpleNamespace

import naive
import pytest
import torch
from conftest import command

from model import BUILT_IN, Attention, Decoder, LayerCache
from training import captured
from training.captured import CapturedSteps, capture_steps


@pytest.fixture
def captures(monkeypatch) -> list:
    """A mark for each capture. Memory for keys and values holds anything, as on a GPU."""
    made = []
    make = LayerCache.__init__

    def make_with_nans(cache, *args):
        make(cache, *args)
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)

    monkeypatch.setattr(LayerCache, "__init__", make_with_nans)
    monkeypatch.setattr(captured, "capture", lambda run, _: made.append(1) or run)
    monkeypatch.setattr(captured, "PATIENCE", 8)
    return made


def decoder(ffn: str, **options) -> Decoder:
    return naive.decoder(ffn=ffn, block_size=40, n_kv_head=2, **options)


@pytest.mark.parametrize("ffn", BUILT_IN)
def test_captured_steps_write_what_ordinary_ones_do(ffn, captures):
    model = decoder(ffn)
    prompts = naive.tokens(2, 9)
    edited = prompts.flip(1)  # other rows
    ordinary = model.generate(prompts, 60, temperature=0, table_ids=edited)  # reads half of it anew
    model.captured = CapturedSteps()
    assert torch.equal(model.generate(prompts, 60, temperature=0, table_ids=edited), ordinary)
    assert len(captures) == 1
    assert not model.captured.steps  # a graph goes with its text

    cache = model.make_cache(2, 9 + 16)
    model(prompts, cache=cache)
    rows = prompts
    for number in range(16):
        token = torch.full((2, 1), number, dtype=torch.int32)
        prompts, rows = torch.cat((prompts, token), dim=1), torch.cat((rows, token + 7), dim=1)
        logits = model.step(token, token + 7, cache)
        whole = model(prompts, table_ids=rows)[0]
        torch.testing.assert_close(logits, whole[:, -1], rtol=1e-4, atol=1e-5)
        assert len(captures) == 1 + (number >= captured.PATIENCE)
    with pytest.raises(AssertionError, match="room for 25 tokens"):
        model.step(token, token, cache)


class OwnCache(LayerCache):
    """From which no tokens are taken back."""


def test_what_a_changed_model_does_beside_its_layers_is_decoded_without_a_graph(
    captures, monkeypatch, capsys
):
    forward = Decoder.forward
    monkeypatch.setattr(
        Decoder, "forward", lambda self, *args, **more: (-forward(self, *args, **more)[0], None)
    )
    monkeypatch.setattr(Attention, "make_cache", lambda self, *args: OwnCache(self.config, *args))
    model = decoder("stem")
    prompts = naive.tokens(2, 9)
    ordinary = model.generate(prompts, 60, temperature=0)
    model.captured = CapturedSteps()
    assert torch.equal(model.generate(prompts, 60, temperature=0), ordinary)
    assert len(captures) == 1
    assert "captured.py does not repeat what model.py does" in capsys.readouterr().err


def test_texts_that_are_decoded_by_turns_have_a_graph_each(captures):
    model = decoder("stem")
    prompts = naive.tokens(2, 1, 5)
    ordinary = [model.generate(prompt, 30, temperature=0) for prompt in prompts]
    model.captured = CapturedSteps()
    streams = [model.stream(prompt, 30, temperature=0) for prompt in prompts]
    by_turns = zip(*streams, strict=True)
    for number, tokens in enumerate(by_turns, 5):
        assert [*map(int, tokens)] == [int(text[0, number]) for text in ordinary]
    assert len(captures) == 2


def test_short_texts_models_in_training_and_caches_of_ids_are_not_captured(captures):
    model = decoder("embformer")
    model.captured = CapturedSteps()
    prompt = naive.tokens(1, 5)
    list(islice(model.stream(prompt, 30), captured.PATIENCE))
    model.generate(prompt, 30, cache="ids")
    model.train().generate(prompt, 30)
    assert not captures


def test_a_model_and_its_copy_have_steps_of_their_own_and_go_when_they_are_given_up(monkeypatch):
    def frozen(run, _):  # like a graph, it does not hold what it was made of
        result = run()
        return lambda: result

    monkeypatch.setattr(captured, "capture", frozen)
    monkeypatch.setattr(captured, "PATIENCE", 8)
    model = decoder("stem")
    model.captured = CapturedSteps()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    prompt = naive.tokens(1, 5)
    assert not other.generate(prompt, 30, temperature=0)[0, 5:].any()
    assert model.generate(prompt, 30, temperature=0)[0, 5:].any()
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None  # with its memory, and tables that are pinned
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("ffn", "settings", "device", "does"),
    [
        ("stem", {}, "cuda", True),
        ("stem", {}, "cpu", False),
        ("stem", {"attention": "window:8"}, "cuda", False),
        ("moe", {}, "cuda", False),
    ],
)
def test_what_is_captured(ffn, settings, device, does, monkeypatch):
    model = decoder(ffn, **settings)
    monkeypatch.setattr(Decoder, "device", SimpleNamespace(type=device))
    capture_steps(model)
    assert (model.captured is not None) == does


def test_sample_captures(stem_ckpt, monkeypatch):
    models = []
    monkeypatch.setattr(captured, "capture_steps", models.append)
    command("sample.py --max_new_tokens 2 --ckpt", stem_ckpt)
    assert len(models) == 1
