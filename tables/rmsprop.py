"""RMSprop on rows: an optimizer step that costs what the batch costs, not what V costs.

For the gradient g of a row, or of each of its numbers:

    v   <- beta2 v + (1 - beta2) g^2
    row <- row - lr g / (sqrt(v / (1 - beta2^step)) + eps)

Where g is zero the row does not move, and v only decays. So it is exact to leave alone what the
batch did not read, and to let v decay by beta2^gap, the steps since the last reading, in one go.

v is one number a row, of the mean of g^2 over the row, or one number a number.
"""

import torch
from torch import Tensor

from tables.tables import Tables, send

PART = 1 << 17  # numbers that a CPU updates at once: what an update needs of them fits its caches


def round_stochastically(rows: Tensor, generator: torch.Generator) -> Tensor:
    """float32 -> bfloat16, up or down with probabilities that make the mean exact: a random number
    added to the lower 16 bits carries into the upper ones, which are kept, just so often. Rounding
    to nearest would lose every step smaller than a 512th of the weight, which most are."""
    noise = torch.randint(
        1 << 16, rows.shape, generator=generator, dtype=torch.int32, device=rows.device
    )
    bits = (rows.view(torch.int32) + noise).bitwise_and_(-1 << 16)
    return bits.view(torch.float32).bfloat16()


class RowRMSprop:
    """RMSprop on the rows that the batch read, wherever tables are stored (tables.py).

    Args:
        state: "row": one second moment a row, which this object keeps on the device that computes;
            "number": one a number, which the tables keep beside the number.
        seed: of the rounding of bfloat16 rows. Random bits depend on seed, step and table alone, so
            a run that resumes draws those of an uninterrupted one.
    """

    def __init__(
        self,
        tables: Tables,
        beta2: float = 0.95,
        eps: float = 1e-8,
        state: str = "row",
        seed: int = 0,
    ) -> None:
        assert state in ("row", "number"), f"state={state!r} is neither 'row' nor 'number'"
        self.tables = tables
        self.beta2 = beta2
        self.eps = eps
        self.seed = seed
        self.by_row = state == "row"
        self.steps = 0
        # The step that read a token last: on the CPU, where ids are known.
        self.last = torch.zeros(tables.vocab_size, dtype=torch.int64)
        if self.by_row:
            device = tables.rows(0).device
            moments = torch.zeros(tables.vocab_size, len(tables.weight), device=device)
            self.state = list(moments.split(1, dim=1))  # [V, 1] of each table
        else:
            self.state = tables.add_state()  # [V, W] of each table

    @torch.no_grad()
    def step(self, lr: float, read: tuple[Tensor, list[Tensor]] | None = None) -> None:
        """Update the rows that were read since the last step. Whoever clips their gradients fetches
        them before: `read` is what `Tables.gradients` gave, ids [n] and of each table [n, W]."""
        ids, grads = read or self.tables.gradients()
        ids = ids.cpu()
        self.steps += 1
        gap = (self.steps - self.last[ids]).float()[:, None]  # [n, 1]
        self.last[ids] = self.steps

        slots = self.tables.index(ids)
        tokens = send(ids, slots.device)
        keep = send(self.beta2**gap, slots.device)
        for table, grad in enumerate(grads):
            self.update(table, tokens, slots, keep, grad.to(slots.device), lr)
        self.tables.mark_dirty(ids)

    def update(
        self, table: int, tokens: Tensor, slots: Tensor, keep: Tensor, grad: Tensor, lr: float
    ) -> None:
        """One table's part of a step, on tokens [n], whose rows are in `slots` [n] of those on the
        device, with what is left of v, `keep` [n, 1], and the gradient [n, W]."""
        rows = self.tables.rows(table)
        if self.by_row:
            moments = self.state[table]
            places = tokens
            mean_square = self.tables.mean_square(grad)  # [n, 1]
        else:
            moments = self.tables.states(table)
            places = slots
        generator = None
        if rows.dtype == torch.bfloat16:
            generator = torch.Generator(rows.device)
            # Steps of a run and tables of a model number less than these, so no seed comes twice.
            generator.manual_seed((self.seed * 2**40 + self.steps * 2**12 + table) % 2**63)

        scale = 1 / (1 - self.beta2**self.steps)  # v began at zero
        # On a CPU part by part: whole batches would go through memory, several times as slowly.
        size = len(slots) if slots.device.type != "cpu" else max(1, PART // rows.shape[1])
        for start in range(0, len(slots), size):
            part = slice(start, start + size)
            g = grad[part].float()
            square = mean_square[part] if self.by_row else g.square()
            v = moments.index_select(0, places[part])
            v.mul_(keep[part]).add_(square, alpha=1 - self.beta2)
            new = rows.index_select(0, slots[part]).float()
            new -= lr * g / (v * scale).sqrt_().add_(self.eps)
            if generator is not None:
                new = round_stochastically(new, generator)
            moments[places[part]] = v
            rows[slots[part]] = new

    def state_dict(self) -> dict:
        self.tables.flush()
        return {"state": self.state, "last": self.last, "steps": self.steps}

    def load_state_dict(self, saved: dict) -> None:
        self.tables.flush()
        for mine, other in zip(self.state, saved["state"], strict=True):
            mine.copy_(other)
        self.last.copy_(saved["last"])
        self.steps = saved["steps"]
