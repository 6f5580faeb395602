"""model_sizes and lab/costs.py against PyTorch's FLOP counter, gradients, sums over all cases."""

from types import SimpleNamespace

import pytest
import torch
from naive import TINY, TwoRows, decoder, tokens
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lab import costs
from lab.costs import Costs
from lab.experiment import KINDS, MAIN
from tables.tables import Tables
from training.optimizer import Optimizer
from training.report import model_sizes
from training.settings import Settings

N = 12  # tokens
SHAPE = dict(n_layer=4, n_kv_head=2)


def counted(run) -> int:
    """FLOPs as PyTorch counts them, of attention as plain products, which it knows everywhere."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("kind", "more"), [*((kind, {}) for kind in KINDS), ("dense", {"head_dim": 12})]
)
def test_flops_equal_those_that_pytorch_counts(kind, more):
    model = decoder(**SHAPE, **KINDS[kind], **more)
    per_key = 4 * 4 * model.config.n_head * model.config.head_dim
    ids = tokens(1, N)
    sizes = model_sizes(model)
    with torch.no_grad():
        read = counted(lambda: model(ids))
        last = counted(lambda: model(ids, last_only=True))
    if kind == "pkm":  # the weighted sum of 16 values a head, which it does not count
        read += 2 * N * 4 * 4 * 16 * TINY["n_embd"]
    # Plain products take every pair of tokens. By `sizes` a token sees half a context.
    of_a_token = sizes["flops_per_token"] - per_key * TINY["block_size"] // 2
    assert read == N * of_a_token + N * N * per_key
    if kind in MAIN:
        costs = Costs(model.config)
        hidden = per_key * sum(range(N))  # pairs behind the mask
        assert last == costs.flops(N, logits=1) + hidden
        trained = counted(lambda: model.train()(ids)[0].sum().backward())
        assert trained == 3 * (costs.flops(N, logits=N) + hidden)


def test_flops_of_linear_attention_equal_those_that_pytorch_counts():
    model = decoder(**SHAPE, ffn="dense", attention="linear")
    head_dim, size = model.config.head_dim, TINY["block_size"]
    with torch.no_grad():
        read = counted(lambda: model(tokens(1, N)))
    # Of a pair three products, half of the pairs by `sizes`; of a token, two of a matrix, and, not
    # in `sizes`, one of a vector.
    per_width = SHAPE["n_layer"] * model.config.n_head * head_dim
    others = model_sizes(model)["flops_per_token"] - per_width * (3 * size + 4 * head_dim)
    assert read == N * (others + per_width * (6 * N + 4 * head_dim + 2))


@pytest.mark.parametrize("kind", MAIN)
def test_parameters_read_are_those_that_have_a_gradient(kind):
    model = decoder(**SHAPE, **KINDS[kind]).train()
    ids = tokens(3, N) % 9  # which repeat
    model(ids)[0].square().sum().backward()
    read = sum(p.numel() for p in model.parameters() if p.grad is not None)
    for tables in (model.tables, model.wte):
        if isinstance(tables, Tables) and len(tables.weight):
            rows, gradients = tables.gradients()
            assert all((gradient != 0).any(-1).all() for gradient in gradients)
            read += len(rows) * tables.width * len(gradients)
    assert Costs(model.config).params_read(len(ids.unique())) == read


def test_all_rows_that_a_token_reads_are_counted():
    model = decoder(TwoRows).train()
    model(tokens(1, 1))[0].square().sum().backward()
    rows, gradients = model.tables.gradients()
    assert len(rows) == 2
    assert model_sizes(model)["rows"] == sum(gradient.numel() for gradient in gradients)


def test_what_a_token_does_not_use_is_left_out_wherever_it_is():
    model = decoder()
    before = model_sizes(model)
    model.bigrams = torch.nn.Embedding(99, 8)
    model.bigrams.idle = 99 * 8
    after = model_sizes(model)
    assert after["total"] == before["total"] + 99 * 8
    assert all(after[name] == before[name] for name in ("active", "flops_per_token"))


def test_matrices_in_one_parameter_count_as_those_that_stand_alone():
    """Experts are often one parameter: [n, 32, 8] is n matrices, which decay and cost FLOPs."""
    stacked, alone = decoder(), decoder()
    stacked.experts = torch.nn.Parameter(torch.ones(3, 32, 8))
    alone.experts = torch.nn.ParameterList(torch.ones(32, 8) for _ in range(3))
    assert model_sizes(stacked) == model_sizes(alone)
    decayed = []
    for model in (stacked, alone):
        groups = Optimizer(model, Settings(model=model.config)).adamw.param_groups
        decayed.append(sum(p.numel() for g in groups if g["weight_decay"] for p in g["params"]))
    assert decayed[0] == decayed[1]


def test_returns_are_as_uncertain_as_dense_is(monkeypatch):
    """By hand: dense recalls 0.6 on average, STEM 0.9, which is 1.5 times as much. STEM's runs are
    0.3 above and below 1.5 times dense's, half of dense's mean, so the ratio is off by 12.706 times
    0.5, and with half the FLOPs by twice that. A kind has no return by recall if a run has none."""

    def run(flops: float, recall: float | None) -> dict:
        start = {"sizes": {"flops_per_token": flops}}
        evaluation = {"val_loss": 1.0, "step": 1}
        recalls = [] if recall is None else [{"recall": recall}]
        return {"run": [start], "eval": [evaluation], "step": [], "recall": recalls}

    kinds = {
        "dense": [run(2, 0.4), run(2, 0.8)],
        "STEM": [run(1, 0.9), run(1, 0.9)],
        "lost": [run(1, 0.9), run(1, None)],
    }
    monkeypatch.setattr(costs, "best_learning_rates", lambda experiment, kinds: kinds)
    monkeypatch.setattr(costs, "read_run", lambda run: run)
    _, _, dense, stem, lost = costs.returns(SimpleNamespace(train=lambda _: kinds)).splitlines()
    assert "| 1.00 ± 0.00 | " in dense
    assert "| 3.00 ± 12.71 | " in stem
    assert lost == "| lost | 0.500 |  |  | 0.368 ± 0.000 | 2.00 ± 0.00 |"
