"""Token tables: where they live, how rows are read, and the row-wise Adam that trains them.

A token table is a V x W matrix owned by one layer. A forward pass reads only the rows of the
tokens in its input, and it knows which ones before the first layer runs. Everything in this file
follows from that: rows are fetched each once (deduplicated), only they get a gradient, and an
optimizer step costs what the batch costs, not what the vocabulary costs.

The decoder sees one interface, whatever is behind it:

    for rows in tables.lookup(ids): ...        # rows of table 0, 1, ... [B, T, W], in layer order

This file knows rows, ids and devices, nothing about transformers.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidentTables(nn.Module):
    """All tables of a model in the memory of the compute device.

    Args:
        n_table: number of tables, one per layer that has one.
        vocab_size: rows of each table, V.
        width: numbers in a row, W.
    """

    def __init__(self, n_table: int, vocab_size: int, width: int) -> None:
        super().__init__()
        self.vocab_size, self.width = vocab_size, width
        # No requires_grad: autograd would fill a V x W gradient, nearly all of it zeros, each step.
        # Setting it (train.py --table_optimizer adamw) makes them ordinary parameters again.
        self.weight = nn.ParameterList(
            nn.Parameter(torch.zeros(vocab_size, width), requires_grad=False)
            for _ in range(n_table)
        )
        # What training lookups read since the last optimizer step: the distinct ids [n], still on
        # the device they came from, and a leaf [n, W] per table, whose .grad autograd fills.
        self.reads: list[tuple[Tensor, list[Tensor]]] = []

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the rows of each table in turn, [B, T, W] on the tables' device.

        In training the rows are remembered for `gradients`. `ids` [B, T] may stay on the CPU
        while the tables are on a GPU: finding the distinct ids there would make the host wait.
        """
        if not self.weight:
            return
        device = self.weight[0].device
        whole = self.weight[0].requires_grad
        if whole or not (self.training and torch.is_grad_enabled()):
            ids = ids.to(device, non_blocking=True)
            for weight in self.weight:
                yield F.embedding(ids, weight)
            return
        distinct, position = torch.unique(ids, return_inverse=True)  # [n], [B, T]
        position = position.to(device, non_blocking=True)
        on_device = distinct.to(device, non_blocking=True)
        leaves = [
            weight.detach().index_select(0, on_device).requires_grad_()  # [n, W]
            for weight in self.weight
        ]
        self.reads.append((distinct, leaves))
        for leaf in leaves:
            # Expanding [n, W] -> [B, T, W] sums the gradients of equal tokens on the way back.
            yield F.embedding(position, leaf)

    def gradients(self) -> tuple[Tensor, list[Tensor]]:
        """The gradients of all rows read since the last call, micro-batches merged.

        Returns:
            ids [n] distinct and sorted, and for each table the summed gradient [n, W].

        Raises:
            ValueError: nothing was read and differentiated.
        """
        reads = [read for read in self.reads if read[1][0].grad is not None]
        self.reads = []
        if not reads:
            raise ValueError("no rows were read and differentiated since the last step")
        device = self.weight[0].device
        if len(reads) == 1:
            ids, leaves = reads[0]
            return ids.to(device, non_blocking=True), [leaf.grad for leaf in leaves]
        ids, position = torch.unique(torch.cat([ids for ids, _ in reads]), return_inverse=True)
        ids, position = (t.to(device, non_blocking=True) for t in (ids, position))
        merged = []
        for parts in zip(*(leaves for _, leaves in reads), strict=True):
            grad = torch.cat([leaf.grad for leaf in parts])  # [sum n, W]
            merged.append(grad.new_zeros(len(ids), self.width).index_add_(0, position, grad))
        return ids, merged


def expected_travel(betas: tuple[float, float], p: Tensor | float) -> Tensor | float:
    """How far AdamW over a whole table moves a row, in units of its step at a gradient, until the
    row is read again, if every later step reads it with probability `p`.

    Without a gradient the moments decay, m by b1 and sqrt(v) by sqrt(b2), so step number k after
    the gradient is r^k times the first one, r = b1 / sqrt(b2). It happens before the next reading
    with probability (1 - p)^k. Altogether

        sum_k (r (1 - p))^k = 1 / (1 - r (1 - p))

    which is 1 for a row that is in every batch, and 13 for a rare one with betas (0.9, 0.95): whose
    first step, (1 - b1) / sqrt(1 - b2) = 0.45 learning rates, thus grows to 5.8.
    """
    b1, b2 = betas
    return 1 / (1 - b1 / math.sqrt(b2) * (1 - p))


class RowAdam:
    """Adam on the rows that the batch read, and only on them, that takes a row where AdamW over the
    whole table would have it by the time it is read again.

    AdamW goes on moving and decaying every row in every step, at a cost of V x W. Between two
    readings of a row nobody sees where it is, so all of that can be done when it is read:

    - The moments decay by the steps since the last reading: they equal AdamW's.
    - The steps that AdamW would take until the next reading are taken at once, as many as are to be
      expected at the rate at which the token came so far (`expected_travel`).

    A row that is not in the batch stays bit-identical, moments and all; if every row is in every
    batch this is AdamW. Moments are float32.

    Args:
        tables: the tables to train.
        betas, eps: as in Adam.
        weight_decay: decoupled decay, off by default.
    """

    def __init__(
        self,
        tables: ResidentTables,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.tables, self.betas, self.eps, self.weight_decay = tables, betas, eps, weight_decay
        self.m = [torch.zeros_like(w, dtype=torch.float32) for w in tables.weight]
        self.v = [torch.zeros_like(w, dtype=torch.float32) for w in tables.weight]
        # One number per token, not per row: all tables are read under the same ids.
        device = tables.weight[0].device if self.m else None
        self.count = torch.zeros(tables.vocab_size, dtype=torch.int64, device=device)  # readings
        self.last = torch.zeros_like(self.count)  # the step of the last one
        self.steps = 0

    @torch.no_grad()
    def step(self, ids: Tensor, grads: list[Tensor], lr: float) -> None:
        """Update rows `ids` [n] (distinct) of each table with its gradient [n, W]."""
        (b1, b2), before = self.betas, self.steps
        self.steps += 1
        count = self.count[ids]  # before this reading, which would bias the rate
        gap = (self.steps - self.last[ids]).float()[:, None]  # [n, 1]
        self.count[ids], self.last[ids] = count + 1, self.steps
        rate = (count.float() / before)[:, None] if before else 1.0  # [n, 1]
        step_size = lr * expected_travel(self.betas, rate) / (1 - b1**self.steps)
        scale_v = 1 / (1 - b2**self.steps)
        decay = (1 - lr * self.weight_decay) ** gap
        for weight, m, v, grad in zip(self.tables.weight, self.m, self.v, grads, strict=True):
            grad = grad.float()
            m_rows = m[ids].mul_(b1**gap).add_(grad, alpha=1 - b1)
            v_rows = v[ids].mul_(b2**gap).addcmul_(grad, grad, value=1 - b2)
            rows = weight[ids].mul_(decay)
            rows -= step_size * m_rows / (v_rows * scale_v).sqrt_().add_(self.eps)
            m[ids], v[ids], weight[ids] = m_rows, v_rows, rows

    def state_dict(self) -> dict:
        """Moments, counts and steps, for the checkpoint."""
        state = {"m": self.m, "v": self.v, "count": self.count, "last": self.last}
        return {**state, "steps": self.steps}

    def load_state_dict(self, state: dict) -> None:
        """Copy in what `state_dict` gave; the tables' device and shapes stay."""
        mine = [*self.m, *self.v, self.count, self.last]
        saved = [*state["m"], *state["v"], state["count"], state["last"]]
        for own, other in zip(mine, saved, strict=True):
            own.copy_(other)
        self.steps = state["steps"]
