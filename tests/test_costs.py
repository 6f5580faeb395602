"""analysis/costs.py against PyTorch's FLOP counter, gradients, and sums over all cases."""

import itertools

import numpy as np
import pytest
import torch
from analysis.costs import Costs, expected_distinct
from analysis.experiment import KINDS, MAIN
from config import ModelConfig
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model import Decoder
from tables.tables import Tables

N = 12  # tokens
SHAPE = {
    "vocab_size": 50,
    "block_size": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 32,
    "d_ff": 48,
}
# Plain products take every pair of tokens, those behind the mask, too, which we leave out.
HIDDEN = 2 * 2 * SHAPE["n_layer"] * SHAPE["n_embd"] * sum(range(N))


def counted(run) -> int:
    """FLOPs as PyTorch counts them, of attention as plain products, which it knows everywhere."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", KINDS)
def test_flops_equal_those_that_pytorch_counts(kind):
    model = Decoder(ModelConfig(**SHAPE, **KINDS[kind]))
    costs = Costs(model.config)
    ids = torch.randint(50, (1, N))
    with torch.no_grad():
        read = counted(lambda: model.eval()(ids, last_only=True))
    if kind == "pkm":  # the weighted sum of 16 values a head, which it does not count
        read += N * 2 * 4 * SHAPE["n_layer"] * 16 * SHAPE["n_embd"]
    assert read == costs.flops(N, logits=1) + HIDDEN
    if kind in MAIN:
        trained = counted(lambda: model.train()(ids)[0].sum().backward())
        assert trained == 3 * (costs.flops(N, logits=N) + HIDDEN)


@pytest.mark.parametrize("kind", MAIN)
def test_parameters_read_are_those_that_have_a_gradient(kind):
    model = Decoder(ModelConfig(**SHAPE, **KINDS[kind]))
    ids = torch.randint(9, (3, N))  # which repeat
    model(ids)[0].square().sum().backward()
    read = sum(p.numel() for p in model.parameters() if p.grad is not None)
    for tables in (model.tables, model.wte):
        if isinstance(tables, Tables) and len(tables.weight):
            rows, gradients = tables.gradients()
            assert all((gradient != 0).any(-1).all() for gradient in gradients)
            read += len(rows) * tables.width * len(gradients)
    assert Costs(model.config).params_read(len(ids.unique())) == read


def test_expected_distinct_tokens_are_the_mean_over_all_batches():
    p = np.array([0.5, 0.3, 0.15, 0.05, 0.0])
    mean = 0
    for batch in itertools.product(range(5), repeat=4):
        mean += np.prod(p[list(batch)]) * len(set(batch))
    assert expected_distinct(p, 4) == pytest.approx(mean)
    assert expected_distinct(np.array([1.0, 0.0]), 100) == pytest.approx(1)
