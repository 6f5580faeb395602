"""Row-wise Adam: an optimizer step that costs what the batch costs, not what the vocabulary costs.

It works on the rows and moments that tables (tables.py) have on the device, wherever they are
stored: one piece of arithmetic, `adam_rows`, serves all of them, with results equal to the bit.
"""

import math
from functools import partial

import torch
from torch import Tensor

from tables.tables import Tables, send

PART = 1 << 17  # numbers that a CPU updates at once: what an update needs of them fits its caches


def expected_update_scale(betas: tuple[float, float], p: Tensor | float) -> Tensor | float:
    """How far AdamW over a whole table moves a row, in units of its step at a gradient, until the
    row is read again, if every later step reads it with probability `p`.

    Without a gradient the moments decay, m by b1 and sqrt(v) by sqrt(b2), so step number k after
    the gradient is r^k times the first one, r = b1 / sqrt(b2). It happens before the next reading
    with probability (1 - p)^k. Altogether

        sum_k (r (1 - p))^k = 1 / (1 - r (1 - p))

    `RowAdam` estimates p from the readings so far and takes today's bias correction for all steps
    ahead: within 3.4 % of the exact mean from about step 50 on, but up to 2.0 times too far in
    steps 1 to 5, 1.4 times in 6 to 20.
    """
    b1, b2 = betas
    return 1 / (1 - b1 / math.sqrt(b2) * (1 - p))


def adam_rows(rows: Tensor, m: Tensor, v: Tensor, grad: Tensor, columns: list, betas, eps) -> None:
    """Take rows of a table one step on, in place: rows, m, v, grad [k, W] float32. Columns [k, 1]:
    what is left of m and v since the row was read last, and of the row after weight decay; the step
    size; and what corrects the bias of v."""
    keep_m, keep_v, keep_row, step_size, scale_v = columns
    m.mul_(keep_m).add_(grad, alpha=1 - betas[0])
    v.mul_(keep_v).addcmul_(grad, grad, value=1 - betas[1])
    rows.mul_(keep_row)
    rows -= step_size * m / (v * scale_v).sqrt_().add_(eps)


def round_stochastically(rows: Tensor, generator: torch.Generator) -> Tensor:
    """float32 -> bfloat16, up or down with probabilities that make the mean exact: a random number
    added to the lower 16 bits carries into the upper ones, which are kept, just so often. Rounding
    to nearest would lose every step smaller than a 512th of the weight, which most are."""
    how = dict(generator=generator, dtype=torch.int32, device=rows.device)
    noise = torch.randint(1 << 16, rows.shape, **how)
    return (rows.view(torch.int32) + noise).bitwise_and_(-1 << 16).view(torch.float32).bfloat16()


class RowAdam:
    """Adam on the rows that the batch read, and only on them.

    AdamW moves and decays every row in every step, at a cost of V x W. Here that is done when a row
    is read: its moments decay by the steps since the last reading, which makes them AdamW's, and
    the updates until the next one are made at once, in expectation (`expected_update_scale`).

    If every row is in every batch this is AdamW. Moments are float32, `weight_decay` is decoupled.
    bfloat16 rows are rounded stochastically; the random bits depend on `seed`, step and table, so a
    resumed run draws those of an uninterrupted one."""

    def __init__(self, tables: Tables, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, seed=0):
        self.tables, self.betas, self.eps, self.weight_decay = tables, betas, eps, weight_decay
        self.seed, self.steps = seed, 0
        # m and v [V, W] of each table, where they are stored. count and last [V] are per token, not
        # per row, as all tables are read under the same ids, and on the CPU, where ids are known.
        if tables.m is None:
            zeros = partial(torch.zeros_like, dtype=torch.float32)
            tables.m, tables.v = list(map(zeros, tables.weight)), list(map(zeros, tables.weight))
            tables.count, tables.last = torch.zeros(2, tables.vocab_size, dtype=torch.int64)
        self.m, self.v, self.count, self.last = tables.m, tables.v, tables.count, tables.last

    @torch.no_grad()
    def step(self, lr: float, read: tuple[Tensor, list[Tensor]] | None = None) -> None:
        """Update the rows that were read since the last step. Whoever clips their gradients fetches
        them before: `read` is what `Tables.gradients` gave, ids [n] and of each table [n, W]."""
        ids, grads = read or self.tables.gradients()
        (b1, b2), before, ids = self.betas, self.steps, ids.cpu()
        self.steps += 1
        count = self.count[ids]  # before this reading, which would bias the rate
        gap = (self.steps - self.last[ids]).float()[:, None]  # [n, 1]
        self.count[ids], self.last[ids] = count + 1, self.steps
        rate = count.float()[:, None] / before if before else torch.ones_like(gap)
        size = lr * expected_update_scale(self.betas, rate) / (1 - b1**self.steps)
        scale_v = torch.full_like(gap, 1 / (1 - b2**self.steps))
        index = self.tables.index(ids)
        columns = [b1**gap, b2**gap, (1 - lr * self.weight_decay) ** gap, size, scale_v]
        columns = [send(column, index.device) for column in columns]
        for table, grad in enumerate(grads):
            self.update(table, index, columns, grad.to(index.device))
        self.tables.mark_dirty(ids)

    def update(self, table: int, index: Tensor, columns: list[Tensor], grad: Tensor) -> None:
        """One table's part of a step, on slots `index` [n] of what is on the device. On a CPU part
        by part: whole batches would go through memory, not caches, several times as slowly."""
        weight, (m, v) = self.tables.rows(table), self.tables.moments(table)
        size = len(index) if index.device.type != "cpu" else max(1, PART // weight.shape[1])
        generator = None
        if weight.dtype == torch.bfloat16:
            generator = torch.Generator(weight.device)
            # Steps of a run and tables of a model number less than these, so no seed comes twice.
            generator.manual_seed((self.seed * 2**40 + self.steps * 2**12 + table) % 2**63)
        for at in range(0, len(index), size):
            part = slice(at, at + size)
            here = index[part]  # [k]
            m_here, v_here = m.index_select(0, here), v.index_select(0, here)  # [k, W]
            rows = weight.index_select(0, here).float()
            here_columns = [column[part] for column in columns]
            adam_rows(rows, m_here, v_here, grad[part].float(), here_columns, self.betas, self.eps)
            if generator:
                rows = round_stochastically(rows, generator)
            m[here], v[here], weight[here] = m_here, v_here, rows

    def state_dict(self) -> dict:
        self.tables.flush()
        return dict(m=self.m, v=self.v, count=self.count, last=self.last, steps=self.steps)

    def load_state_dict(self, state: dict) -> None:
        self.tables.flush()
        mine = [*self.m, *self.v, self.count, self.last]
        saved = [*state["m"], *state["v"], state["count"], state["last"]]
        for own, other in zip(mine, saved, strict=True):
            own.copy_(other)
        self.steps = state["steps"]
