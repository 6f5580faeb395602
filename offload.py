"""Tables outside the memory of the compute device: in RAM, or in a file larger than RAM.

The ids of a batch are known before its first layer runs. So a worker thread gathers their distinct
rows, table after table, and a ring of slots brings them while earlier layers compute. Time goes to
the right, tables are numbered. In training the worker also takes the step before: it updates the
rows that this batch reads before it gathers them (u), the others in the backward pass (U):

    worker thread   |u0 g0|u1 g1|u2 g2|     |u3 g3|     |u4 g4|U0 U1 U2 U3 U4|
    side stream           |copy0|copy1|copy2|     |copy3|     |copy4|
    compute         | embedding |layer with 0 |layer with 1 |layer with 2 |layer with 3 ...
                                 ^ slot 0 is free as soon as its rows are expanded to [B, T, W],
                                   so table 3 can follow in it (here: 3 slots)

Without a GPU there is no side stream, and layers read what the worker gathered. What can go wrong,
hazards H1 to H3, is told in ring.py.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrows import HotRows, Visit
from ring import CudaGradients, CudaSlot, Slot, Worker, at_once, outcome, seen_by_gpu
from tablefile import TableFile
from tables import STREAMS, Tables, send

GROUP_BYTES = 1 << 20  # up to so much several tables are fetched as one: a hand-off costs more
IN_PLACE = 256  # tokens; a GPU has the rows of longer inputs fetched each once, not read in place


class Home(Protocol):
    """What holds rows and optimizer states: homes.RamHome, or TableFile."""

    weight: list[Tensor]  # a [V, W] view for each table
    rows: Tensor  # all of them, [V, n_table, W], if a GPU shall read them in place
    fresh: bool  # rows are to be drawn, not loaded

    def moments(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        """As `Tables.moments`."""

    def read_ahead(self, ids: Tensor, names: tuple[str, ...]) -> None:
        """Begin to read what tokens `ids` [n] own of `rows`, `m` or `v`, without waiting for it."""


@dataclass
class Flight:
    """A lookup whose rows are on their way."""

    ids: Tensor  # [n] distinct
    submit: Callable  # to the worker, or at once
    waiting: deque[range]  # tables that are fetched together, and nobody has ordered yet
    ordered: deque[tuple] = field(default_factory=deque)  # (slot, tables, job), nobody has read yet
    # Of the rows that wait for an update, those that it reads, and the others, which can wait on:
    # index into OffloadedTables.updated. None: all are updated before any is read.
    soon: Tensor | None = None
    later: Tensor | None = None
    rest: list[Future] = field(default_factory=list)  # jobs that update the others


@dataclass
class Update:
    """A table's part of an optimizer step that waits."""

    run: Callable[[Tensor, Tensor | None], None]  # with a gradient, and of which rows
    grad: Tensor | None  # None: it is on its way from the GPU
    some: Tensor | None = None  # index of the rows [k], None: all


class OffloadedTables(Tables):
    """All tables of a model outside the memory of the compute device.

    Nothing here is a parameter: `model.to(device)` does not move it, autograd does not see it.

    Updates are not run at once. A row's waits until just before the row is next gathered, on the
    worker thread, so that it overlaps with the forward pass and no row can be read stale: strict
    order by construction. Rows that the next batch does not read follow when all of that is done,
    and overlap with the backward pass; but what a lookup finds still waiting from before the last
    one, bfloat16 rows, and tables fetched in a single group are updated as a whole before they are
    gathered. `flush` runs what still waits.

    Args:
        home: where rows are: a TableFile, or homes.RamHome.
        device: where layers compute.
        ring_slots: tables that can be on their way at once.
        gather: `ring`, or `inplace`: rows are read where they lie, by the CPU, or by GPU kernels
            from RAM, which is then pinned. A GPU uses the ring in training, and for more tokens
            than IN_PLACE, either way.
        max_rows: distinct tokens that a slot can hold; None: as many as the largest batch has.
        cache_rows: tokens whose rows are kept on the device in evaluation, see `HotRows`.
        group_bytes: see GROUP_BYTES.
    """

    def __init__(
        self,
        home: Home,
        device: torch.device | str = "cpu",
        *,
        ring_slots: int = 3,
        gather: str = "ring",
        max_rows: int | None = None,
        cache_rows: int = 0,
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        super().__init__(*home.weight[0].shape)
        self.home, self.weight, self.device = home, home.weight, torch.device(device)
        self.file = home if isinstance(home, TableFile) and home.writable else None
        self.ring_slots, self.gather, self.group_bytes = ring_slots, gather, group_bytes
        self.max_rows = max_rows
        self.cuda = self.device.type in STREAMS
        self.worker, self.slots = Worker(), []
        self.flight: Flight | None = None  # the last lookup's
        self.pending: dict[int, Update] = {}  # by table
        self.updated: Tensor | None = None  # the tokens [n] whose rows they change
        self.failure: BaseException | None = None  # of an update: rows are half-way between steps
        self.cache = HotRows(cache_rows, self.weight, self.device) if cache_rows else None
        self.row_bytes = self.width * self.weight[0].element_size()
        self.moved = 0  # bytes of rows brought so far
        if self.cuda:
            self.stream, self.returning = torch.cuda.Stream(self.device), CudaGradients(self.device)
            if gather == "inplace":
                self.view = seen_by_gpu(home.rows, self.device).flatten(1)  # [V, n_table * W]

    def init_rows(self, std: float) -> None:
        if self.home.fresh:
            super().init_rows(std)

    # --- reading ---

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        """As `Tables.lookup`. What can be fetched ahead is under way when this returns. On a GPU
        `ids` should be on the CPU; if not, the host waits for them here.

        Raises:
            IndexError: an id is out of range.
            ValueError: more distinct tokens than `max_rows`.
            RuntimeError: an update failed before; or, from the iterator, the worker failed or
                hangs, or another lookup has begun, which takes the slots from this one.
        """
        training = self.training and torch.is_grad_enabled()
        if self.gather == "inplace" and not (self.cuda and (training or ids.numel() > IN_PLACE)):
            self.flush()
            return self.read_in_place(ids) if self.cuda else super().lookup(ids)
        self.abandon()
        # [n], [B, T], [n]
        distinct, position, times = torch.unique(ids.cpu(), return_inverse=True, return_counts=True)
        if len(distinct) and not 0 <= distinct[0] <= distinct[-1] < self.vocab_size:
            raise IndexError(
                f"ids {distinct[0]} to {distinct[-1]}: the tables have rows 0 to "
                f"{self.vocab_size - 1}"
            )
        size = len(self.weight) * len(distinct) * self.row_bytes
        if self.device.type == "cpu" and not (training or self.cache) and size <= self.group_bytes:
            # All tables at once and no bus to cross: a slot would be no more than another copy.
            self.home.read_ahead(distinct, ("rows",))
            self.moved += size
            self.flush()
            return super().lookup(ids)
        visit = None
        if self.cache and not training:
            distinct, position, visit = self.cache.visit(distinct, position, times)
        self.depart(distinct, ids.numel(), training)
        return self.arrive(self.flight, position, visit, training)

    def read_in_place(self, ids: Tensor) -> Iterator[Tensor]:
        """One kernel reads all that a token owns: it lies side by side, and a bus answers late."""
        rows = F.embedding(send(ids, self.device), self.view)  # [B, T, n_table * W]
        self.moved += ids.numel() * len(self.weight) * self.row_bytes
        yield from rows.unflatten(-1, (-1, self.width)).unbind(-2)  # n_table of [B, T, W]

    def depart(self, ids: Tensor, most: int, training: bool) -> None:
        """Order the rows of tokens `ids` [n] from as many tables as there are slots.

        Slots get room for `most` rows, what a batch like this one can have at most, so that they
        need not grow, and move, with every other batch.
        """
        n, n_table = len(ids), len(self.weight)
        if self.max_rows and n > self.max_rows:
            raise ValueError(f"{n} distinct tokens do not fit into slots of {self.max_rows} rows")
        size = min(max(1, self.group_bytes // max(1, n * self.row_bytes)), n_table)
        groups = [range(at, min(at + size, n_table)) for at in range(0, n_table, size)]
        self.make_slots(max(size * n, min(most, self.vocab_size)) * self.width)
        # One group alone is fetched at once: no later one could be fetched meanwhile.
        submit = self.worker.submit if len(groups) > 1 else at_once
        self.flight = Flight(ids, submit, deque(groups))
        # The random bits that bfloat16 rows are rounded with come in one piece.
        if self.pending and len(groups) > 1 and self.weight[0].dtype == torch.float32:
            soon = torch.isin(self.updated, ids)  # [rows that wait for an update]
            self.flight.soon, self.flight.later = soon.nonzero()[:, 0], (~soon).nonzero()[:, 0]
        submit(self.home.read_ahead, ids, ("rows",))
        for slot in self.slots:
            self.order(slot)
        if training:
            submit(self.home.read_ahead, ids, ("m", "v"))  # the update will want them
        self.moved += n_table * n * self.row_bytes

    def order(self, slot: Slot) -> None:
        """Have the next tables brought into a slot that is free."""
        flight = self.flight
        if flight.waiting:
            tables = flight.waiting.popleft()
            job = flight.submit(self.fetch, slot, flight, tables)
            flight.ordered.append((slot, tables, job))
            if not flight.waiting and flight.later is not None:  # behind the last rows
                flight.rest = [self.worker.submit(self.settle, t) for t in range(len(self.weight))]

    def arrive(
        self, flight: Flight, position: Tensor, visit: Visit | None, training: bool
    ) -> Iterator[Tensor]:
        """Yield the rows of all tables, expanded from the tokens of the flight, and those that a
        visit to the cache adds, to `position` [B, T]."""
        n, position = len(flight.ids), send(position, self.device)
        leaves: list[Tensor] = []
        if training:
            self.reads.append((flight.ids, leaves))
        while flight.ordered:
            if self.flight is not flight:
                raise RuntimeError("this lookup lost its slots: another one has begun")
            slot, tables, job = flight.ordered[0]
            if job:
                outcome(job, f"reading tables {tables[0]} to {tables[-1]}")
            flight.ordered.popleft()
            fetched = slot.receive(len(tables) * n * self.width)
            expanded = []
            for table, rows in zip(tables, fetched.view(len(tables), n, self.width), strict=True):
                if visit:
                    rows = visit.join(table, rows)  # [n + hits, W]
                if training:
                    # The slot itself is the leaf: nothing of it is needed on the way back.
                    rows = rows.detach().float().requires_grad_()
                    leaves.append(rows)
                expanded.append(F.embedding(position, rows))  # [B, T, W]
            slot.release()
            self.order(slot)
            if visit and not flight.ordered:  # nobody asks for more than the last rows
                visit.end()
            yield from expanded

    @torch.no_grad()
    def fetch(self, slot: Slot, flight: Flight, tables: range) -> None:
        """Worker: bring rows up to date, gather those of tokens `ids` [n], and send them off."""
        ids = flight.ids
        for table in tables:
            self.settle(table, flight)  # H3
        slot.reclaim()  # H1
        numbers = len(tables) * len(ids) * self.width
        rows = slot.host[:numbers].view(len(tables), len(ids), self.width)
        for i, table in enumerate(tables):
            self.gather_rows(table, ids, rows[i])
        slot.send(numbers)  # H2

    def gather_rows(self, table: int, ids: Tensor, out: Tensor) -> None:
        address = out.data_ptr()
        torch.index_select(self.weight[table], 0, ids, out=out)
        assert out.data_ptr() == address, "the rows went to new memory, not to the slot"

    def make_slots(self, numbers: int) -> None:
        """Slots for so many numbers. Addresses stay, unless a batch needs more than any before."""
        if self.slots and self.slots[0].host.numel() >= numbers:
            return
        self.slots.clear()  # their memory goes when the last copies have ended
        dtype = self.weight[0].dtype
        with torch.inference_mode(False):  # what decoding allocates, training may use
            for _ in range(self.ring_slots):
                self.slots.append(
                    CudaSlot(numbers, dtype, self.device, self.stream)
                    if self.cuda
                    else Slot(numbers, dtype, self.device)
                )

    def abandon(self) -> None:
        """Wait for what a lookup ordered that was left half-way, if one was."""
        flight = self.flight
        # Newest first, or the worker would begin with one while another is waited for.
        jobs = [*(job for _, _, job in flight.ordered), *flight.rest] if flight else []
        for job in reversed(jobs):
            if job and not job.cancel():
                try:
                    outcome(job, "an abandoned lookup")
                except RuntimeError:
                    if not job.done():
                        raise  # else nobody waits for these rows any more
        self.flight = None  # not before: as long as the worker is at it, it is nobody else's turn

    # --- writing ---

    def moments(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        return self.home.moments()

    def write(self, ids: Tensor, updates: list[Callable[..., None]], grads: list[Tensor]) -> None:
        """Note the updates; they run just before rows are next read, behind that, or in `flush`."""
        self.flush()
        if self.cache:
            self.cache.clear()
        if self.cuda:
            self.returning.take(grads)
            grads = [None] * len(grads)
        elif self.device.type != "cpu":
            grads = [grad.cpu() for grad in grads]  # MPS is not for two threads at once
        self.updated = ids
        self.pending = dict(enumerate(map(Update, updates, grads)))
        if self.gather == "inplace" and not self.cuda:
            self.flush()  # nothing would be hidden

    def settle(self, table: int, flight: Flight | None = None) -> None:
        """Run the update that waits for a table, if one does (H3); for a flight, once, only of the
        rows that it reads."""
        self.check()
        update = self.pending.get(table)
        if update is None:
            return
        some = update.some
        if some is None and flight and flight.later is not None:
            some, update.some = flight.soon, flight.later
        else:
            del self.pending[table]
        try:
            update.run(self.returning.get(table) if self.cuda else update.grad, some)
        except BaseException as error:
            self.failure = error
            raise

    def check(self) -> None:
        """Rows of which only some took a step are never read or saved."""
        if self.failure:
            raise RuntimeError("an update failed: go on from a checkpoint") from self.failure

    def flush(self) -> None:
        self.abandon()
        self.check()
        for table in sorted(self.pending):
            self.settle(table)

    # --- checkpoints: the keys of ResidentTables, so that each opens what the other saved ---

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        self.flush()
        if not self.file:
            for table, weight in enumerate(self.weight):
                destination[f"{prefix}weight.{table}"] = weight

    def _load_from_state_dict(
        self, state_dict, prefix, metadata, strict, missing, _, errors
    ) -> None:
        self.abandon()
        self.pending.clear()  # what was to be done to the rows that are replaced
        self.failure = None
        if self.cache:
            self.cache.clear()
        if self.cuda and self.gather == "inplace":
            torch.cuda.synchronize(self.device)  # kernels may still be reading
        for table, weight in enumerate(self.weight):
            saved = state_dict.get(f"{prefix}weight.{table}")
            if saved is None:
                missing.append(f"{prefix}weight.{table}")
            elif saved.shape != weight.shape:
                errors.append(f"table {table}: {tuple(saved.shape)} is not {tuple(weight.shape)}")
            elif saved.data_ptr() != weight.data_ptr():  # else it is that very file, read in place
                weight.copy_(saved)
