"""Checks row lookups against nn.Embedding and row-wise Adam against torch.optim.AdamW."""

import math
import random
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tables import rowadam
from tables import tables as tables_module
from tables.rowadam import RowAdam, expected_update_scale
from tables.tables import ResidentTables

V, W = 11, 6


def tables(n_table: int = 2, seed: int = 0) -> ResidentTables:
    torch.manual_seed(seed)
    made = ResidentTables(n_table, V, W)
    for weight in made.weight:
        nn.init.normal_(weight)
    return made


def ordinary(made: ResidentTables) -> list[nn.Embedding]:
    """The same tables as PyTorch's own embeddings."""
    return [nn.Embedding.from_pretrained(w.detach().clone(), freeze=False) for w in made.weight]


def backward(rows, seed: int = 0) -> None:
    """A loss in which every number of every table matters, nonlinearly."""
    generator = torch.Generator().manual_seed(seed)
    loss = sum((r.sin() * torch.randn(r.shape, generator=generator)).sum() for r in rows)
    loss.backward()


def test_only_what_is_contiguous_is_pinned(monkeypatch):
    pinned = []

    def pin_memory(tensor):
        assert tensor.is_contiguous(), "some element of the tensor refers to memory of another"
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(tables_module, "STREAMS", {"meta"})
    for tensor in (torch.ones(3, 1).expand(3, 4), torch.arange(12).view(3, 4)[:, ::2]):
        assert tables_module.send(tensor, torch.device("meta")).shape == tensor.shape
        assert torch.equal(pinned[-1], tensor)


BATCH = torch.tensor([[3, 1, 3, 7], [7, 3, 0, 1]])  # 3 is there three times


# --- lookup and gradients ---


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_rows_equal_those_of_an_embedding_in_table_order(training, requires_grad):
    made = tables(3).train(training).requires_grad_(requires_grad)
    rows = list(made.lookup(BATCH))
    assert len(rows) == 3
    for row, weight in zip(rows, made.weight, strict=True):
        assert torch.equal(row, F.embedding(BATCH, weight))


def test_no_tables_have_no_rows():
    made = ResidentTables(0, V, 0)
    assert list(made.lookup(BATCH)) == []
    assert made.reads == []


@pytest.mark.parametrize("n_part", [1, 2])
def test_gradients_equal_the_touched_rows_of_a_dense_gradient(n_part):
    made, embeddings = tables(), ordinary(tables())
    for seed, part in enumerate(BATCH.chunk(n_part)):  # 1, 3 and 7 are in both
        backward(made.lookup(part), seed)
        backward([embedding(part) for embedding in embeddings], seed)  # autograd accumulates
    ids, grads = made.gradients()
    assert ids.tolist() == [0, 1, 3, 7]  # distinct and sorted
    for grad, embedding in zip(grads, embeddings, strict=True):
        dense = torch.zeros(V, W).index_copy(0, ids, grad)
        torch.testing.assert_close(dense, embedding.weight.grad)
    assert all(weight.grad is None for weight in made.weight)  # nothing V x W was allocated


def test_tables_with_requires_grad_are_ordinary_parameters():
    made, embeddings = tables().requires_grad_(True), ordinary(tables())
    backward(made.lookup(BATCH))
    backward([embedding(BATCH) for embedding in embeddings])
    for weight, embedding in zip(made.weight, embeddings, strict=True):
        torch.testing.assert_close(weight.grad, embedding.weight.grad)
    assert made.reads == []


def test_only_training_remembers_reads():
    made = tables()
    list(made.eval().lookup(BATCH))
    with torch.no_grad():
        list(made.train().lookup(BATCH))
    with torch.inference_mode():
        list(made.lookup(BATCH))
    assert made.reads == []
    list(made.lookup(BATCH))
    assert len(made.reads) == 1


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of two devices, as a GPU does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        devices = {x.device for x in args if isinstance(x, torch.Tensor)}
        assert len(devices) < 2, f"{func} on {devices}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("training", [False, True])
def test_ids_may_stay_on_the_cpu_while_the_tables_do_not(training):
    made = ResidentTables(2, V, W).to("meta").train(training)  # a second device on any machine
    with OneDevice():
        rows = list(made.lookup(BATCH))
    assert [(r.device.type, r.shape) for r in rows] == [("meta", (2, 4, W))] * 2


# --- row-wise Adam ---


def noise(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + step))


@pytest.fixture(params=[None, 3], ids=["at once", "3 rows at a time"])
def parts(request, monkeypatch):
    """A CPU updates large batches in parts, which are smaller here."""
    if request.param:
        monkeypatch.setattr(rowadam, "PART", request.param * W)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.8, 0.999)])
def test_row_adam_is_adamw_when_every_row_is_in_every_batch(weight_decay, betas, parts):
    made, lr = tables(), 0.01
    reference = [nn.Parameter(weight.detach().double()) for weight in made.weight]
    adamw = torch.optim.AdamW(reference, lr, betas, eps=1e-3, weight_decay=weight_decay)
    adam = RowAdam(made, betas, eps=1e-3, weight_decay=weight_decay)
    for step in range(20):
        lr = adamw.param_groups[0]["lr"] = 0.01 * (1 + step % 3)  # a schedule
        grads = [noise(2 * step + n, V, W) for n in range(2)]
        for parameter, grad in zip(reference, grads, strict=True):
            parameter.grad = grad.double()
        adamw.step()
        adam.step(lr, (torch.arange(V), grads))
    for weight, parameter, start in zip(made.weight, reference, tables().weight, strict=True):
        torch.testing.assert_close(weight.double(), parameter.data, rtol=1e-6, atol=1e-6)
        assert (weight - start).abs().min() > 0


def sparse_steps(n_step: int, rate: torch.Tensor, seed: int = 0):
    """Batches in which row i is with probability rate[i]: ids and their gradients, of which the
    rows of a token have a mean and as much noise."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(len(rate), W, generator=generator)
    for _ in range(n_step):
        ids = (torch.rand(len(rate), generator=generator) < rate).nonzero()[:, 0]
        yield ids, mean[ids] + torch.randn(len(ids), W, generator=generator)


def adamw_over_whole_tables(n_row: int, batches, lr: float, weight_decay: float = 0.0):
    """PyTorch's AdamW with zero gradients where a row is not in the batch: weight, m, v."""
    weight = nn.Parameter(torch.zeros(n_row, W))
    adamw = torch.optim.AdamW([weight], lr, (0.9, 0.95), weight_decay=weight_decay)
    for ids, grad in batches:
        weight.grad = torch.zeros(n_row, W).index_copy(0, ids, grad)
        adamw.step()
    state = adamw.state[weight]
    return weight.data, state["exp_avg"], state["exp_avg_sq"]


def test_moments_are_those_of_adamw_over_the_whole_table(parts):
    made = ResidentTables(1, 200, W)
    adam = RowAdam(made)
    rate = torch.logspace(0, -2, 200)
    for ids, grad in sparse_steps(150, rate):
        adam.step(1e-3, (ids, [grad]))
    _, m, v = adamw_over_whole_tables(200, sparse_steps(150, rate), lr=1e-3)
    idle = (adam.steps - adam.last)[:, None]  # since the last reading, they have decayed there
    torch.testing.assert_close(adam.m[0] * 0.9**idle, m, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(adam.v[0] * 0.95**idle, v, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("at_once", [10_000, 300])
def test_rows_move_as_far_as_under_adamw_however_rare(weight_decay, at_once, monkeypatch):
    monkeypatch.setattr(rowadam, "PART", at_once * W)
    rate = torch.logspace(0, -2.5, 1000)
    made = ResidentTables(1, len(rate), W)
    adam = RowAdam(made, weight_decay=weight_decay)
    for ids, grad in sparse_steps(500, rate):
        adam.step(1e-2, (ids, [grad]))
    expected, _, _ = adamw_over_whole_tables(1000, sparse_steps(500, rate), 1e-2, weight_decay)
    idle = (adam.steps - adam.last)[:, None]  # AdamW has decayed the rows since, RowAdam will
    rows = made.weight[0] * (1 - 1e-2 * weight_decay) ** idle
    for mine, whole in zip(rows.chunk(5), expected.chunk(5), strict=True):
        slope = (mine * whole).sum() / (whole * whole).sum()  # 1: as far, and the same way
        assert slope == pytest.approx(1.0, abs=0.05)
        assert (mine - whole).std() < 0.25 * whole.std()


def test_rows_outside_the_batch_stay_bit_identical():
    made = tables()
    adam = RowAdam(made, weight_decay=0.1)
    everything = torch.arange(V)
    adam.step(0.1, (everything, [noise(n, V, W) for n in range(2)]))  # moments are not zero
    state = [*made.weight, *adam.m, *adam.v, adam.count, adam.last]
    before = [tensor.clone() for tensor in state]
    touched = torch.tensor([2, 5, 6])
    adam.step(0.1, (touched, [noise(n, 3, W) for n in range(2, 4)]))
    rest = everything[~torch.isin(everything, touched)]
    for old, new in zip(before, state, strict=True):
        assert torch.equal(new[rest], old[rest])
        assert (new[touched] != old[touched]).all()


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.8, 0.9), (0.9, 0.99)])
def test_a_rare_rows_one_step_is_the_whole_way_of_adamw_after_one_gradient(betas):
    before = 2500  # steps, in which bias correction fades
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    adamw = torch.optim.AdamW([parameter], lr=0.01, betas=betas, eps=1e-12, weight_decay=0.0)
    for grad in [0.0] * before + [1.0] + [0.0] * 500:
        parameter.grad = torch.tensor([grad], dtype=torch.float64)
        adamw.step()

    made = ResidentTables(1, V, W)
    adam = RowAdam(made, betas)
    adam.steps = before
    adam.step(0.01, (torch.tensor([1]), [torch.ones(1, W)]))
    moved = made.weight[0][1]
    torch.testing.assert_close(moved, parameter.data.float().expand(W), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("p", [1.0, 0.5, 0.1, 0.01])
def test_expected_travel_is_the_mean_over_the_waits(p):
    r = 0.9 / math.sqrt(0.95)
    rng = random.Random(0)

    def wait() -> int:  # steps until the row is read again, each reading it with probability p
        k = 1
        while rng.random() >= p:
            k += 1
        return k

    travels = [sum(r**j for j in range(min(wait(), 300))) for _ in range(4000)]
    expected = statistics.mean(travels)
    assert expected_update_scale((0.9, 0.95), p) == pytest.approx(expected, rel=0.03)


def test_gradients_count_only_what_was_differentiated():
    tables = ResidentTables(2, 10, 3)
    with pytest.raises(AssertionError, match="no rows were read"):
        tables.gradients()
    list(tables.lookup(torch.tensor([[1, 2]])))  # a forward pass without a backward one
    first, second = tables.lookup(torch.tensor([[5, 5, 7]]))
    (first.sum() + second.sum()).backward()
    with pytest.raises(IndexError):
        next(tables.lookup(torch.tensor([[10]])))  # out of range, leaves nothing behind
    ids, (grad, _) = tables.gradients()
    assert ids.tolist() == [5, 7]
    assert grad.tolist() == [[2.0] * 3, [1.0] * 3]
    assert tables.reads == []  # what was returned is forgotten
