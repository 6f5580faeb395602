"""analysis/costs.py against PyTorch's FLOP counter, gradients, and sums over all cases."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from analysis import costs
from analysis.costs import COUNTED, Costs, expected_distinct, expected_experts
from analysis.experiment import KINDS
from config import ModelConfig
from model import Decoder

N = 12  # tokens
SHAPE = dict(vocab_size=50, block_size=32, n_layer=4, n_head=4, n_kv_head=2, n_embd=32, d_ff=48)


def made(kind: str) -> Decoder:
    torch.manual_seed(0)
    return Decoder(ModelConfig(**SHAPE, **KINDS[kind]))


def counted(run) -> int:
    """FLOPs as PyTorch counts them, of attention as plain products, which it knows everywhere."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", COUNTED)
def test_flops_equal_those_that_pytorch_counts(kind):
    model = made(kind).eval()
    it, ids = Costs(model.config), torch.randint(50, (2, N))
    cache = model.make_cache(2)
    with torch.no_grad():
        read = counted(lambda: model(ids[:, :-1], cache=cache, last_only=True))
        step = counted(lambda: model(ids[:, -1:], cache=cache))
    assert step == it.flops(2, 2 * N, logits=2)
    # Plain products take every pair of tokens, those behind the mask, too, which we leave out.
    assert read == it.flops(2 * (N - 1), 2 * (N - 1) ** 2, logits=2)
    n_layer, n_embd, pair = 4, 32, 2 * 2  # q k, and its weight times v: 2 FLOPs per channel each
    assert read == 2 * (it.prefill(N - 1) + pair * n_layer * n_embd * sum(range(N - 1)))
    trained = counted(lambda: model.train()(ids)[0].sum().backward())  # `HeadLoss` adds in place
    assert trained == 3 * it.flops(2 * N, 2 * N * N, logits=2 * N)
    assert trained == 2 * (it.training(N) + 3 * pair * n_layer * n_embd * sum(range(N)))


@pytest.mark.parametrize("kind", COUNTED)
def test_parameters_read_are_those_that_have_a_gradient(kind, monkeypatch):
    model = made(kind)
    ids = torch.randint(9, (3, N))  # which repeat
    used = [set() for _ in model.blocks]
    for block, experts in zip(model.blocks, used, strict=True):
        if hasattr(block.ffn, "experts"):
            inner = block.ffn.experts

            def experts_of(x, chosen, inner=inner, experts=experts):
                experts.update(chosen.flatten().tolist())
                return inner(x, chosen)

            block.ffn.experts = experts_of
    model(ids)[0].square().sum().backward()
    read = 0
    for name, p in model.named_parameters():
        if "tables." not in name and not (name.startswith("wte") and model.head):
            read += int((p.grad != 0).sum()) if "ffn" in name else p.numel()
    for tables in [model.tables] + ([model.wte] if model.head else []):
        if len(tables.weight):
            rows, gradients = tables.gradients()
            assert all((g != 0).any(-1).all() for g in gradients)
            read += len(rows) * tables.width * len(gradients)
    if used[0]:  # as many as were wanted, not as may be expected
        experts = np.mean([len(each) for each in used])
        monkeypatch.setattr(costs, "expected_experts", lambda *_: experts)
    distinct = len(set(ids.flatten().tolist()))
    assert Costs(model.config).params_read_per_step(3 * N, distinct) == read


def test_expected_distinct_tokens_are_the_mean_over_all_batches():
    p = np.array([0.5, 0.3, 0.15, 0.05, 0.0])
    for batch in (1, 4):
        all_batches = itertools.product(range(5), repeat=batch)
        mean = sum(np.prod(p[list(each)]) * len(set(each)) for each in all_batches)
        assert expected_distinct(p, batch) == pytest.approx(mean)
    assert expected_distinct(np.array([1.0, 0.0]), 100) == pytest.approx(1)


def test_expected_experts_are_the_mean_over_all_choices():
    config = ModelConfig(**SHAPE, ffn="moe", n_expert=6, top_k=2)
    choices = list(itertools.combinations(range(6), 2))
    three = [len({*a, *b, *c}) for a, b, c in itertools.product(choices, repeat=3)]
    assert expected_experts(config, 3, 2) == pytest.approx(np.mean(three))
    config.ffn = "hash_moe"  # one of experts 0 to 2, and one of 3 to 5
    choices = list(itertools.product(range(3), range(3, 6)))
    two = [len({*a, *b}) for a, b in itertools.product(choices, repeat=2)]
    assert expected_experts(config, 3, 2) == pytest.approx(np.mean(two))
