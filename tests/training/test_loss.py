"""The loss in parts against PyTorch's in one piece."""

import pytest
import torch
import torch.nn.functional as F

from training import loss
from training.loss import head_loss


def case(n=23, width=8, vocab=31, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(n, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab, (n,))
    targets[::5] = -1
    return x, weight, targets


@pytest.mark.parametrize("part", [1, 31 * 4, 31 * 100])  # tokens at a time: 1, 4, all
def test_loss_and_gradients_equal_cross_entropy(monkeypatch, part):
    monkeypatch.setitem(loss.PART, "cpu", part)
    x, weight, targets = case(dtype=torch.float32)
    plain = F.cross_entropy(x @ weight.T, targets, ignore_index=-1)
    mine = head_loss(x, weight, targets)
    torch.testing.assert_close(mine, plain)
    for a, b in zip(
        torch.autograd.grad(3 * mine, (x, weight)),
        torch.autograd.grad(3 * plain, (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_bfloat16_by_autocast_is_as_near_as_in_one_piece():
    x, weight, targets = case(n=200, width=64, vocab=500, dtype=torch.float32)
    exact = torch.autograd.grad(F.cross_entropy(x @ weight.T, targets, ignore_index=-1), weight)[0]
    with torch.autocast("cpu", torch.bfloat16):
        plain = F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=-1)
        mine = head_loss(x, weight, targets)
    grads = [torch.autograd.grad(each, weight)[0] for each in (plain, mine)]
    errors = [(grad - exact).norm() / exact.norm() for grad in grads]
    assert grads[1].dtype == torch.float32
    assert errors[1] < 1.5 * errors[0] < 0.05
    assert mine.item() == pytest.approx(plain.item(), rel=1e-2)


def test_never_more_logits_at_once_than_a_part(monkeypatch):
    seen = []
    real = F.log_softmax
    monkeypatch.setattr(F, "log_softmax", lambda x, dim: seen.append(x.shape) or real(x, dim))
    monkeypatch.setitem(loss.PART, "cpu", 31 * 4)
    head_loss(*case(dtype=torch.float32))
    assert [tuple(shape) for shape in seen] == 5 * [(4, 31)] + [(3, 31)]


def test_evaluation_looks_for_no_gradients():
    x, weight, targets = case(dtype=torch.float32)
    with torch.no_grad():
        value = head_loss(x, weight, targets)
    assert not value.requires_grad
    assert value.item() == pytest.approx(head_loss(x, weight, targets).item())


def test_without_a_target_the_mean_is_not_a_number():
    x, weight, targets = case(dtype=torch.float32)
    assert head_loss(x, weight, targets.fill_(-1)).isnan()
