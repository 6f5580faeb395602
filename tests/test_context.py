"""Rows that a context reads, and needles in haystacks."""

import random
import re

import numpy as np
import pytest
import torch

from analysis.context import active, distinct_tokens
from analysis.experiment import STEM, Experiment
from analysis.needles import KEYS, VALUES, document, haystack, prose
from config import ModelConfig
from model import Decoder
from text import tokenizer


def test_distinct_tokens_are_counted_one_by_one():
    ids = np.random.default_rng(0).integers(50, size=300).astype(np.uint16)
    assert distinct_tokens(ids, 300) == [len(set(ids.tolist()))]
    counts = distinct_tokens(ids, 40, most=14)
    assert counts == [len(set(ids[start : start + 40].tolist())) for start in range(0, 261, 20)]


@pytest.mark.parametrize("kind", STEM)
def test_parameters_of_a_context_are_those_that_get_a_gradient(kind):
    config = ModelConfig(64, 16, n_layer=4, n_head=2, n_embd=8, d_ff=16, **STEM[kind])
    model = Decoder(config)
    ids = torch.tensor([[3, 9, 3, 60, 9, 9, 1, 2]])  # 5 distinct ones
    model(ids, torch.tensor([[9, 3, 60, 9, 9, 1, 2, 5]]))[1].backward()
    read = 0
    for name, parameter in model.named_parameters():
        by_row = name.startswith("tables.") or (name.startswith("wte.") and not config.tie_head)
        read += 0 if by_row else parameter.numel()
    for tables in {model.tables, model.wte} if not config.tie_head else {model.tables}:
        if len(tables.weight):
            rows, gradients = tables.gradients()
            assert rows.tolist() == [1, 2, 3, 9, 60]
            read += sum(gradient.numel() for gradient in gradients)
    assert active(config, 5) == read


def test_a_document_repeats_its_needle():
    text = document(random.Random(0), n_piece=5, asked=3)
    told = re.findall(r" Call (\w+) (\w+)\.", text)
    assert len(told) == 1 + 3 and len(set(told)) == 1
    assert told[0][0] in KEYS and told[0][1] in VALUES
    assert len(text.split()) == 5 * 8 + 4 * 3
    assert not set(prose(held_out=True)[100:200]) & set(prose(held_out=False))


def test_a_haystack_has_its_length_and_the_needle_at_its_depth():
    encoding = tokenizer.train(prose(held_out=False)[:200], 300)
    ids = encoding.encode_ordinary("".join(prose(held_out=True)[:2000]))
    for seed in range(20):
        rng = random.Random(seed)
        depth = rng.random()
        prompt, answer = haystack(rng, encoding, ids, 700, depth)
        assert len(prompt) == 700 and prompt[0] == encoding.eot_token
        ((key, value),) = re.findall(r" Call (\w+) (\w+)\.", encoding.decode(prompt))
        told = encoding.encode_ordinary(f" Call {key} {value}.")
        asked = encoding.encode_ordinary(f" Call {key}")
        assert prompt[-len(asked) :] == asked
        assert answer == encoding.encode_ordinary(f" {value}")[0]
        (place,) = (at for at in range(700) if prompt[at : at + len(told)] == told)
        assert place == 1 + round(depth * (700 - 1 - len(told) - len(asked)))


def test_a_run_that_goes_on_is_in_the_folder_of_the_first(tmp_path):
    experiment = Experiment(out_dir=tmp_path, data_dir=tmp_path)
    flags = [dict(stage="context", init_from=tmp_path / of / "ckpt.pt", seed=1) for of in "ab"]
    first, second = map(experiment.folder, flags)
    assert first.parent == tmp_path / "a" and second.parent == tmp_path / "b"
    assert first.name == second.name
