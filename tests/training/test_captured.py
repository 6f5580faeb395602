"""Captured steps of decoding against ordinary ones. To capture takes a GPU (test_gpu.py): here,
what would be replayed is run again."""

from itertools import islice

import pytest
import torch

from model import BUILT_IN, Decoder, LayerCache, ModelConfig
from training import captured
from training.captured import CapturedSteps, capture_steps


@pytest.fixture
def captures(monkeypatch) -> list:
    """What was captured. Memory for keys and values holds anything, as on a GPU."""
    made = []
    make = LayerCache.__init__

    def make_with_nans(cache, *args):
        make(cache, *args)
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)

    monkeypatch.setattr(LayerCache, "__init__", make_with_nans)
    monkeypatch.setattr(captured, "captured", lambda run: made.append(run) or run)
    return made


def decoder(ffn: str) -> Decoder:
    torch.manual_seed(0)
    config = ModelConfig(60, 40, 3, 4, 32, n_kv_head=2, ffn=ffn, table_std=0.5)
    return Decoder(config).eval()


@pytest.mark.parametrize("ffn", BUILT_IN)
def test_captured_steps_write_what_ordinary_ones_do(ffn, captures):
    model = decoder(ffn)
    prompts = torch.randint(60, (2, 9))
    edited = prompts.flip(1)  # other rows
    ordinary = model.generate(prompts, 60, temperature=0, table_ids=edited)  # reads half of it anew
    model.step = CapturedSteps(model)
    assert torch.equal(model.generate(prompts, 60, temperature=0, table_ids=edited), ordinary)
    assert len(captures) == 1
    assert not model.step.steps  # a graph goes with its text

    cache = model.make_cache(2)
    model(prompts, cache=cache)
    for number in range(2 * captured.PATIENCE):
        token = torch.full((2, 1), number)
        prompts = torch.cat((prompts, token), dim=1)
        logits = model.step(token, token, cache)
        torch.testing.assert_close(logits, model(prompts)[0][:, -1], rtol=1e-4, atol=1e-5)


def test_texts_that_are_decoded_by_turns_have_a_graph_each(captures):
    model = decoder("stem")
    prompts = torch.randint(60, (2, 1, 5))
    ordinary = [model.generate(prompt, 30, temperature=0) for prompt in prompts]
    model.step = CapturedSteps(model)
    streams = [model.stream(prompt, 30, temperature=0) for prompt in prompts]
    by_turns = zip(*streams, strict=True)
    for number, tokens in enumerate(by_turns, 5):
        assert [*map(int, tokens)] == [int(text[0, number]) for text in ordinary]
    assert len(captures) == 2


def test_a_short_text_is_not_captured(captures):
    model = decoder("stem")
    model.step = CapturedSteps(model)
    list(islice(model.stream(torch.randint(60, (1, 5)), 30), captured.PATIENCE))
    assert not captures


def test_without_a_gpu_nothing_changes():
    model = decoder("stem")
    capture_steps(model)
    assert "step" not in vars(model)
