"""The loss scaler against PyTorch's."""

import random

import torch
from torch import nn

from training.optimizer import LossScaler


def test_the_scale_follows_that_of_pytorch(monkeypatch):
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
        assert mine.factor == theirs.get_scale()
