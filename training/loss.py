"""The loss of next-token prediction, without the logits of all tokens at once.

Logits [N, V] are by far the largest tensor of a small model: 6,400 numbers a token, 131,072 with a
large vocabulary, where the residual stream has 192. `F.cross_entropy` fills, keeps and reads them
several times. Here some tokens after the other take their turn, forward and backward at once: the
gradient of a token's logits is `softmax(logits) - onehot(target)`, so nothing has to be kept for
later but the gradients of the head and of its input. Memory does not depend on N times V, and what
one part needs stays in a CPU's caches.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits in memory at a time: a CPU's caches hold 8 MB of them, a GPU's kernels want more to do.
PART = {"cpu": 1 << 21, "cuda": 1 << 26}


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of a linear head, which finds its gradients on the way."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, differentiate: bool) -> Tensor:
        """x [N, n_embd], weight [V, n_embd], targets [N] -> loss []; differentiate: whether
        gradients will be asked for."""
        known = targets >= 0
        share = known.float() / known.sum()  # [N], of each token in the mean
        size = max(1, PART.get(x.device.type, 1 << 24) // len(weight))
        loss = torch.zeros((), device=x.device)
        x_grad = torch.empty_like(x)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if differentiate else None
        for at in range(0, len(x), size):
            part = slice(at, at + size)
            here, target = x[part], targets[part].clamp(min=0)[:, None]  # [k, n_embd], [k, 1]
            log_p = F.log_softmax((here @ weight.T).float(), dim=-1)  # [k, V]
            loss -= (log_p.gather(1, target)[:, 0] * share[part]).sum()
            if differentiate:
                grad = log_p.exp_()
                grad.scatter_add_(1, target, torch.full_like(target, -1, dtype=grad.dtype))
                grad = grad.mul_(share[part, None]).to(x.dtype)
                torch.mm(grad, weight, out=x_grad[part])
                if weight.dtype == torch.float32:
                    weight_grad.addmm_(grad.T, here)
                else:
                    weight_grad += grad.T @ here
        ctx.save_for_backward(x_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad * grad, weight_grad.to(x_grad.dtype) * grad, None, None


def head_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`F.cross_entropy(x @ weight.T, targets, ignore_index=-1)`.

    Args:
        x: [N, n_embd], what the head reads.
        weight: [V, n_embd] of the head.
        targets: [N] token ids, -1: not to be predicted.

    Returns:
        the mean in nats of the targets that are to be predicted; NaN if there is none.
    """
    kind, dtype = x.device.type, x.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        return HeadLoss.apply(x.to(dtype), weight.to(dtype), targets, torch.is_grad_enabled())
