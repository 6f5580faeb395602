"""The loss scaler against PyTorch's, and the schedule at its corners."""

import random

import pytest
import torch
from torch import nn

from training.optimizer import LossScaler, schedule
from training.settings import Settings


def test_the_scale_follows_that_of_pytorch(monkeypatch):
    monkeypatch.setattr(LossScaler, "CLEAN_STEPS_TO_GROW", 5)
    theirs = torch.amp.GradScaler("cpu", growth_interval=5)
    mine = LossScaler(enabled=True)
    weight = nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], lr=0.1)
    rng = random.Random(0)
    for number in range(60):
        finite = rng.random() < 0.9
        loss = (weight * (1.0 if finite else float("inf"))).sum()
        assert mine.scale(torch.tensor(3.0)) == theirs.scale(torch.tensor(3.0))
        sgd.zero_grad()
        theirs.scale(loss).backward()
        theirs.step(sgd)
        theirs.update()
        mine.update(finite)
        if number == 30:  # resumed
            saved = mine.state_dict()
            mine = LossScaler(enabled=True)
            mine.load_state_dict(saved)
        assert mine.factor == theirs.get_scale()


@pytest.mark.parametrize(("before", "now"), [(False, True), (True, False), (False, False)])
def test_a_run_may_resume_in_another_precision(before, now):
    scaler = LossScaler(now)
    scaler.load_state_dict(LossScaler(before).state_dict())
    assert scaler.scale(torch.tensor(1.0)) == (65536 if now else 1)


def test_the_rate_warms_up_and_falls_to_its_floor():
    settings = Settings(max_iters=100, warmup=0.1, min_lr=0.1)
    rates = [schedule(step, settings) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10] == 1 and rates[55] == pytest.approx(0.55)
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))
    linear = Settings(max_iters=100, warmup=0.0, min_lr=0.0, schedule="linear")
    assert [schedule(step, linear) for step in (0, 25, 99)] == pytest.approx([1, 0.75, 0.01])
