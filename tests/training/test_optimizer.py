"""The loss scaler against PyTorch's, and parameters that another optimizer trains."""

import copy
import random
from unittest.mock import Mock

import pytest
import torch
from conftest import user_error
from torch import nn

from model import Decoder, ModelConfig
from training.optimizer import LossScaler, Optimizer
from training.settings import Settings

IDS = torch.arange(10).view(2, 5) % 9


def small() -> Decoder:
    torch.manual_seed(0)
    return Decoder(ModelConfig(9, n_layer=2, n_head=1, n_embd=8))


def optimizer_of(model: Decoder, dtype: str = "float32", **settings) -> Optimizer:
    return Optimizer(model, Settings(model=model.config, **settings), dtype)


def test_the_scale_follows_that_of_pytorch(monkeypatch):
    """Also in a run that resumes after each step."""
    monkeypatch.setattr(LossScaler, "CLEAN_STEPS_TO_GROW", 5)
    theirs = torch.amp.GradScaler("cpu", growth_interval=5)
    mine = LossScaler(enabled=True)
    weight = nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], lr=0.1)
    rng = random.Random(0)
    for _ in range(60):
        finite = rng.random() < 0.9
        loss = (weight * (1.0 if finite else float("inf"))).sum()
        assert mine.scale(torch.tensor(3.0)) == theirs.scale(torch.tensor(3.0))
        sgd.zero_grad()
        theirs.scale(loss).backward()
        theirs.step(sgd)
        theirs.update()
        mine.update(finite)
        saved = mine.state_dict()
        mine = LossScaler(enabled=True)
        mine.load_state_dict(saved)
        assert mine.factor == theirs.get_scale()


def test_other_precisions_have_no_scale(monkeypatch):
    """Nor after many clean steps. A run that resumes in float16 begins with that of a new one."""
    monkeypatch.setattr(LossScaler, "CLEAN_STEPS_TO_GROW", 5)
    other = LossScaler(enabled=False)
    for _ in range(12):
        other.update(finite=True)
        assert other.factor == 1.0
    resumed = LossScaler(enabled=True)
    resumed.load_state_dict(other.state_dict())
    assert resumed.factor == LossScaler(enabled=True).factor


def test_what_an_optimizer_beside_adamw_trains_is_clipped_and_begins_each_step_at_zero(monkeypatch):
    """As does what is added to AdamW beside the model."""
    model = small()
    optimizer = optimizer_of(model, grad_clip=1e-3)
    mine = optimizer.adamw.param_groups[0]["params"].pop()
    probe = nn.Parameter(torch.ones(8))
    optimizer.adamw.add_param_group({"params": probe})
    norms = []

    def step():
        norms.extend([mine.grad.norm(), probe.grad.norm()])

    monkeypatch.setattr(optimizer.adamw, "step", step)
    (model(IDS, IDS)[1] + (model.hidden(IDS) @ probe).sum()).backward()
    optimizer.step(fraction=1.0)
    assert all(0 < norm < 1e-3 for norm in norms)
    assert mine.grad is probe.grad is None


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_gradients_of_a_scaled_loss_are_clipped_and_taken_as_those_of_the_loss(clip):
    """Steps would not tell: their length hardly depends on the scale. Moments do."""
    states = []
    for dtype in ("float32", "float16"):
        model = small()
        optimizer = optimizer_of(model, dtype, grad_clip=clip)
        optimizer.scaler.scale(model(IDS, IDS)[1]).backward()
        norm = optimizer.step(fraction=1.0)
        moments = [state["exp_avg"] for state in optimizer.adamw.state.values()]
        assert all(moment.any() for moment in moments)
        rows = [of_rows.state for of_rows in optimizer.rmsprops.values()]
        states.append([norm, moments, rows])
    torch.testing.assert_close(*states, atol=0, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
def test_a_compiled_model_has_the_tables_of_the_model_in_it():
    optimizer = optimizer_of(torch.compile(small()))
    assert [*optimizer.rmsprops] == ["tables", "wte"]


def test_what_is_released_after_the_optimizer_was_made_is_trained():
    """Also by an optimizer that takes over its moments, each for its own parameter."""
    model = small()
    block = model.blocks[0]
    model.blocks[1].scales = nn.Parameter(torch.ones(8, dtype=torch.int8), requires_grad=False)
    block.requires_grad_(False)
    optimizer = optimizer_of(model)
    for is_free in (False, True, False):
        block.requires_grad_(is_free)
        before = [weight.clone() for weight in block.parameters()]
        model(IDS, IDS)[1].backward()
        optimizer.step(fraction=1.0)
        for weight, old in zip(block.parameters(), before, strict=True):
            assert torch.equal(weight, old) != is_free
    block.requires_grad_(True)
    other = optimizer_of(model)
    other.load_state_dict(optimizer.state_dict())
    assert optimizer.adamw.state
    for weight, state in optimizer.adamw.state.items():
        assert torch.equal(other.adamw.state[weight]["exp_avg"], state["exp_avg"])


def test_moments_find_their_weights_when_a_model_makes_these_in_another_order():
    """As when lines of a relative change places. Earlier checkpoints have numbers, which cannot
    tell: AdamW would read beyond the end of smaller moments."""

    def trained(model, state=None):
        optimizer = optimizer_of(model)
        if state is not None:
            optimizer.load_state_dict(state)
        model(IDS, IDS)[1].backward()
        optimizer.step(fraction=1.0)
        return optimizer.state_dict()

    model, other = small(), small()
    state = trained(model)
    other.load_state_dict(model.state_dict())
    norm = other._modules.pop("norm")
    qkv = other.blocks[0].attn._modules.pop("qkv")
    other.norm, other.blocks[0].attn.qkv = norm, qkv
    of_earlier = {**state, "adamw": {"state": state["adamw"]["state"]}}
    with user_error(r"moments of .* are \[.*\], not"):
        optimizer_of(other).load_state_dict(of_earlier)
    every = copy.deepcopy(state)
    for moments in every["adamw"]["state"].values():
        moments["exp_avg_sq"] = torch.zeros(1)
    with user_error(r"moments of .* are \[1\], not"):
        optimizer_of(small()).load_state_dict(every)
    for moments in every["adamw"]["state"].values():  # of the right shape, but one number
        for name in ("exp_avg", "exp_avg_sq"):
            moments[name] = torch.ones(()).expand_as(moments["exp_avg"])
    optimizer = optimizer_of(small())
    optimizer.load_state_dict(every)
    for weight, moments in optimizer.adamw.state.items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert moments[name].stride() == weight.stride() and (moments[name] == 1).all()
    same = small()
    same.load_state_dict(model.state_dict())
    trained(model, state)
    trained(other, state)
    trained(same, of_earlier)
    for each in (other, same):
        torch.testing.assert_close(each.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(("n_layer", "more"), [(2, {"table_state": "number"}), (3, {})])
def test_moments_of_other_tables_are_refused(n_layer, more):
    """One moment a row would be broadcast into those of its numbers."""
    state = optimizer_of(small()).state_dict()
    other = Decoder(ModelConfig(9, n_layer=n_layer, n_head=1, n_embd=8))
    with user_error(r"moments of 1 tables \[\[9, 1\]\], not of .*: use --init_from"):
        optimizer_of(other, **more).load_state_dict(state)


def test_a_scheduler_of_pytorch_sets_the_rates_of_adamw_and_of_rows():
    """As a fraction of the peak does, and where it goes on after three steps were saved. A group of
    one's own has a rate of its own."""
    models = []
    for way in ("fraction", "scheduler", "resumed"):
        model, probe = small(), nn.Linear(8, 1)

        def made(model=model, probe=probe):
            optimizer = optimizer_of(model)
            optimizer.adamw.add_param_group({"params": probe.parameters(), "lr": 1.0})
            return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer.adamw, 0.5)

        optimizer, scheduler = made()
        for step in range(6):
            if way == "resumed" and step == 3:
                old = optimizer, scheduler
                optimizer, scheduler = made()
                optimizer.load_state_dict(old[0].state_dict())
                scheduler.load_state_dict(old[1].state_dict())
            (model(IDS, IDS)[1] + probe(model.hidden(IDS)).sum()).backward()
            optimizer.step(fraction=0.5**step if way == "fraction" else 1.0)
            if way != "fraction":
                scheduler.step()
        models.append({**model.state_dict(), **probe.state_dict()})
    for scheduled in models[1:]:
        torch.testing.assert_close(models[0], scheduled, rtol=0, atol=0)


def test_a_step_that_is_interrupted_leaves_the_rates(monkeypatch):
    model = small()
    optimizer = optimizer_of(model, learning_rate=0.3)
    monkeypatch.setattr(optimizer.adamw, "step", Mock(side_effect=KeyboardInterrupt))
    model(IDS, IDS)[1].backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(fraction=0.1)
    assert optimizer.state_dict()["adamw"]["rates"] == [0.3, 0.3]


def test_a_head_that_is_tied_by_hand_is_refused():
    """As a table of rows, it would be trained as an embedding alone."""
    one, other, wrapped = small(), small(), small()
    one.head.weight = one.wte.weight[0]
    other.wte.weight[0] = other.head.weight
    wrapped.wte.weight[0] = wrapped.head.weight
    wrapped.head = nn.Sequential(wrapped.head)
    for model in (one, other, wrapped):
        with pytest.raises(AssertionError, match="tie_head"):
            optimizer_of(model)


def test_what_adamw_cannot_train_is_not_left_out():
    """Complex numbers."""
    model = small()
    model.turn = nn.Parameter(torch.ones(8, dtype=torch.complex64))
    with pytest.raises(RuntimeError, match="floating point"):
        optimizer = optimizer_of(model)
        (model(IDS, IDS)[1] + model.turn.abs().sum()).backward()
        optimizer.step(fraction=1.0)


def test_state_is_loaded_without_that_of_tables_that_were_frozen():
    model = small()
    model.tables.requires_grad_(False)
    state = optimizer_of(model).state_dict()
    model.tables.requires_grad_(True)
    optimizer = optimizer_of(model)
    optimizer.load_state_dict(state)
    assert not optimizer.rmsprops["tables"].last.any()


def test_who_goes_back_in_memory_goes_on_from_there():
    model = small()
    optimizer = optimizer_of(model)

    def train(n: int) -> None:
        for _ in range(n):
            model(IDS, IDS)[1].backward()
            optimizer.step(fraction=1.0)

    train(3)
    weights, state = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    last = state["rows"]["tables"]["last"].tolist()
    train(5)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert optimizer.rmsprops["tables"].last.tolist() == last
