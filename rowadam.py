"""Row-wise Adam: an optimizer step that costs what the batch costs, not what the vocabulary costs.

It works wherever the rows live (offload.py), on tables that give it

    tables.weight       a [V, W] tensor per table
    tables.moments()    what Adam remembers of them, in the same place
    tables.write(...)   runs the updates at once, or just before a table is next read

so that one piece of arithmetic, `adam_rows`, serves every home, and results are equal to the bit.
"""

import math
from functools import partial

import torch
from torch import Tensor


def adamw_travel(betas: tuple[float, float]) -> float:
    """How far AdamW over a whole table moves a row after one isolated gradient, in learning rates.

    The moments decay on while the row is not read, m = (1 - b1) b1^k g and v = (1 - b2) b2^k g^2,
    so the steps m / sqrt(v) sum up to

        (1 - b1) / sqrt(1 - b2) * sum_k (b1 / sqrt(b2))^k

    which is 5.8 for (0.9, 0.95). A row-wise step moves a row only when it is read, by one learning
    rate in the same case. Training tables with this multiple of the backbone's learning rate
    therefore restores the travel of AdamW; it is the default of `train.py --table_lr_scale`.
    """
    b1, b2 = betas
    return (1 - b1) / math.sqrt(1 - b2) / (1 - b1 / math.sqrt(b2))


def warmed_up(beta: float, count: Tensor) -> Tensor:
    """1 - beta^count, Adam's bias correction, without the digits that cancel in float32."""
    return -torch.expm1(count * math.log(beta)) if beta else torch.ones_like(count)


def adam_rows(
    rows: Tensor,
    m: Tensor,
    v: Tensor,
    count: Tensor,
    grad: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of Adam on rows of a table, in place (Kingma and Ba, 2015; decay as in AdamW).

    Args:
        rows, m, v, grad: [n, W] float32.
        count: [n] steps that each row has taken, this one included.
    """
    b1, b2 = betas
    count = count.float()[:, None]  # [n, 1]
    m.lerp_(grad, 1 - b1)
    v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
    rows.mul_(1 - lr * weight_decay)
    step_size, scale_v = lr / warmed_up(b1, count), 1 / warmed_up(b2, count)
    rows -= step_size * m / (v * scale_v).sqrt_().add_(eps)


def round_stochastically(rows: Tensor, generator: torch.Generator) -> Tensor:
    """float32 -> bfloat16, up or down with probabilities that make the mean exact.

    bfloat16 keeps the upper 16 bits of a float32. Adding a random number to the lower ones carries
    into the upper ones with just the right probability. Rounding to nearest would lose every step
    smaller than half a unit in the last place: a 512th of the weight, more than most steps.
    """
    noise = torch.randint(
        1 << 16, rows.shape, generator=generator, dtype=torch.int32, device=rows.device
    )
    return (rows.view(torch.int32) + noise).bitwise_and_(-1 << 16).view(torch.float32).bfloat16()


class RowAdam:
    """Adam on the rows that the batch read, and only on them (PyTorch's SparseAdam, but with a step
    count per row).

    - Moments are float32 and belong to a row, as does the step count: with one global count, bias
      correction would let a row first seen at step 1000 move 2.5 times too far.
    - A row that is not in the batch stays bit-identical, moments and all.
    - If every row is in every batch this is AdamW.
    - bfloat16 rows are rounded stochastically. The random bits are a function of the seed, the step
      and the table: a resumed run draws those of an uninterrupted one.

    Args:
        tables: the tables to train.
        betas, eps: as in Adam.
        weight_decay: decoupled decay of the rows that are read, off by default.
        seed: of the rounding.
    """

    def __init__(
        self,
        tables,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.tables, self.betas, self.eps, self.weight_decay = tables, betas, eps, weight_decay
        self.seed, self.steps = seed, 0
        # m and v [V, W] for each table; one count per token [V]: all tables are read under the
        # same ids.
        self.m, self.v, self.count = tables.moments()

    @torch.no_grad()
    def step(self, ids: Tensor, grads: list[Tensor], lr: float) -> None:
        """Update rows `ids` [n] (distinct) of each table with its gradient [n, W]."""
        self.steps += 1
        self.count[ids] += 1
        count = self.count[ids]
        updates = [
            partial(self.update, table, ids, count, self.steps, lr) for table in range(len(self.m))
        ]
        self.tables.write(updates, grads)

    @torch.no_grad()  # once more: a worker thread starts out with gradients
    def update(
        self, table: int, ids: Tensor, count: Tensor, step: int, lr: float, grad: Tensor
    ) -> None:
        """One table's part of a step, where its rows live."""
        weight = self.tables.weight[table]
        m, v = self.m[table].index_select(0, ids), self.v[table].index_select(0, ids)  # [n, W]
        rows = weight.index_select(0, ids).float()
        adam_rows(rows, m, v, count, grad.to(m), lr, self.betas, self.eps, self.weight_decay)
        if weight.dtype == torch.bfloat16:
            generator = torch.Generator(rows.device)
            # Steps of a run and tables of a model number less than these, so no seed comes twice.
            generator.manual_seed((self.seed * 2**40 + step * 2**12 + table) % 2**63)
            rows = round_stochastically(rows, generator)
        self.m[table][ids], self.v[table][ids], weight[ids] = m, v, rows

    def state_dict(self) -> dict:
        """Moments and counts, for the checkpoint; those of a table file stay in the file."""
        self.tables.flush()
        if self.tables.file:
            return {"steps": self.steps}
        return {"m": self.m, "v": self.v, "count": self.count, "steps": self.steps}

    def load_state_dict(self, state: dict) -> None:
        """Copy in what `state_dict` gave; the tables' device and shapes stay."""
        self.steps = state.get("steps", 0)
        for mine, saved in zip(
            [*self.m, *self.v, self.count], [*state["m"], *state["v"], state["count"]], strict=True
        ):
            mine.copy_(saved)
