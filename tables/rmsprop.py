"""RMSprop on rows: the cost of an optimizer step depends on the batch, not on V.

For the gradient g of a row, or of each of its numbers:

    v   <- beta2 v + (1 - beta2) g^2
    row <- row - lr g / (sqrt(v / (1 - beta2^step)) + eps)

v is one number per row, fed with the mean of g^2 over the row, or one per number. Where g is zero,
the row does not move and v only decays. So rows that the batch did not read can be left alone: when
a row is read again, v decays by beta2^gap at once, where gap is the number of steps since it was
last read. This is exact.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from common import UserError, mixed_seed
from tables.storage import DTYPES
from tables.tables import Tables, send

PART = 1 << 17  # numbers that a CPU updates at a time, so that all operands fit its caches


def round_stochastically(rows: Tensor, generator: torch.Generator) -> Tensor:
    """float32 -> bfloat16, rounded up or down at random so that the mean is exact: a random number
    added to the lower 16 bits carries into the upper 16, which are kept, with the right
    probability. Rounding to nearest would lose every step below 1/512 of the weight, which most
    are."""
    noise = torch.randint(
        1 << 16, rows.shape, generator=generator, dtype=torch.int32, device=rows.device
    )
    bits = (rows.view(torch.int32) + noise).bitwise_and_(-1 << 16)
    return bits.view(torch.float32).bfloat16()


class RowRMSprop:
    """RMSprop on the rows that the batch read, wherever tables are stored (tables.py): those of
    layers, and those of an input embedding that is not the head.

    Args:
        state: "row": one second moment per row, kept here, on the device that computes; "number":
            one per number, kept by the tables beside it.
        seed: for rounding bfloat16 rows. Random bits depend only on seed, step and table, so a
            resumed run draws the same ones as an uninterrupted run.
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
        check_tables(tables)
        # Nobody collects gradients of parameters, which rows may have become, as by the last
        # optimizer, or by `from_pretrained` of transformers. (tables.requires_grad_ would freeze.)
        for weight in tables.weight:
            weight.requires_grad_(False)
        tables.watch.has_optimizer = True
        self.tables = tables
        self.beta2 = beta2
        self.eps = eps
        self.seed = seed
        self.by_row = state == "row"
        self.steps = 0
        # The step that last read each token; on the CPU, like the ids.
        self.last = torch.zeros(tables.n_row, dtype=torch.int64)
        if self.by_row:
            device = tables.rows(0).device
            moments = torch.zeros(tables.n_row, len(tables.weight), device=device)
            self.state = list(moments.split(1, dim=1))  # [V, 1] of each table
        else:
            self.state = tables.add_state()  # [V, W] of each table

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the rows read since the last step, by `Tables.gradients`, which are then gone."""
        check_processes(self.tables)
        ids, grads = self.tables.gradients()
        self.steps += 1
        gap = (self.steps - self.last[ids]).float()[:, None]  # [n, 1]
        self.last[ids] = self.steps

        slots = self.tables.slots(ids)
        tokens = send(ids, slots.device)
        keep = send(self.beta2**gap, slots.device)
        for table, grad in enumerate(grads):
            self.update(table, tokens, slots, keep, grad.to(slots.device), lr)
        self.tables.zero_grad()
        self.tables.updated()

    def update(
        self, table: int, tokens: Tensor, slots: Tensor, keep: Tensor, grad: Tensor, lr: float
    ) -> None:
        """Update one table.

        Args:
            tokens: [n], the distinct ids whose rows were read.
            slots: [n], where their rows lie (tables.py).
            keep: [n, 1], beta2^gap, by which v decays.
            grad: [n, W].
        """
        rows = self.tables.rows(table)
        if self.by_row:  # v is kept here, for each token
            moments = self.state[table]
            at = tokens
            mean_square = self.tables.mean_square(grad)  # [n, 1]
        else:  # v lies beside the row, in the same slot
            moments = self.tables.states(table)
            at = slots
        generator = None
        if rows.dtype == torch.bfloat16:
            generator = torch.Generator(rows.device)
            generator.manual_seed(mixed_seed(self.seed, self.steps, table))

        scale = 1 / (1 - self.beta2**self.steps)  # bias correction: v began at zero
        # On a CPU, in parts that fit its caches: large batches would be several times slower.
        n = PART // rows.shape[1] if slots.device.type == "cpu" else len(slots)
        size = max(1, n)  # rows may be wide, and a batch empty
        for start in range(0, len(slots), size):
            part = slice(start, start + size)
            g = grad[part].float()
            square = mean_square[part] if self.by_row else g.square()
            v = moments.index_select(0, at[part])
            v.mul_(keep[part]).add_(square, alpha=1 - self.beta2)
            new = rows.index_select(0, slots[part]).float()
            new -= lr * g / (v * scale).sqrt_().add_(self.eps)
            if generator is not None:
                new = round_stochastically(new, generator)
            moments[at[part]] = v
            rows[slots[part]] = new

    def state_dict(self) -> dict:
        self.tables.flush()
        # `last` is copied, as `steps` is: they belong together when somebody goes back to this.
        return {"state": self.state, "last": self.last.clone(), "steps": self.steps}

    def load_state_dict(self, saved: dict) -> None:
        """UserError: its moments are of other tables, or of another kind."""
        theirs, ours = ([[*moment.shape] for moment in m] for m in (saved["state"], self.state))
        if theirs != ours:  # copy_ would broadcast one moment a row
            wrong = f"moments of {len(theirs)} tables {theirs[:1]}, not of {len(ours)} {ours[:1]}"
            raise UserError(f"{wrong}: --resume cannot go on: use --init_from")
        self.tables.flush()
        for mine, other in zip(self.state, saved["state"], strict=True):
            mine.copy_(other)
        self.last.copy_(saved["last"])
        self.steps = saved["steps"]


def check_tables(tables: Tables) -> None:
    """AssertionError: this optimizer cannot train their rows."""
    is_table = isinstance(tables, Tables) and len(tables.weight) > 0
    assert is_table, f"{type(tables).__name__} has no rows for this optimizer: AdamW trains it"
    n_own = len({id(weight) for weight in tables.weight})
    assert n_own == len(tables.weight), (
        "two layers have one table, whose rows would be updated twice: see relatives/engram.py"
    )
    dtype = tables.rows(0).dtype
    assert dtype in DTYPES.values(), f"rows are {dtype}: train them in float32 or bfloat16"


def check_processes(tables: Tables) -> None:
    """AssertionError: several processes have the same rows. Asked at each step: a process group may
    begin after the optimizer was made (lightning, transformers)."""
    n_rank = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    assert tables.n_rank == n_rank, (
        f"{n_rank} processes would each train rows of their own, as nobody sums the gradients "
        "of rows. In DDP, make rows parameters before AdamW and DDP are made: "
        "requires_grad_(True) of each of tables.weight, without RowRMSprop. (Our train.py "
        "splits tables by columns. For models that are not to be the same, set their "
        f"tables.n_rank = {n_rank}.)"
    )
