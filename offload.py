"""Token tables: where they live, and how their rows get to the layers.

A token table is a V x W matrix owned by one layer. A forward pass reads only the rows of the
tokens in its input, and it knows which ones before the first layer runs. Everything in this file
follows from that: rows are fetched each once (deduplicated), only they get a gradient, an optimizer
step costs what the batch costs (rowadam.py), and rows in slow memory are fetched while earlier
layers compute. The decoder sees one interface, whatever is behind it:

    for rows in tables.lookup(ids): ...        # rows of table 0, 1, ... [B, T, W], in layer order

`ResidentTables` live on the compute device. `OffloadedTables` live in RAM or in a file, and a ring
of slots brings their rows. Time goes to the right, tables are numbered, and in training each is
updated with the step before (u) just before its rows are gathered (g):

    worker thread   |u0 g0|u1 g1|u2 g2|     |u3 g3|     |u4 g4|
    side stream           |copy0|copy1|copy2|     |copy3|     |copy4|
    compute         | embedding |layer with 0 |layer with 1 |layer with 2 |layer with 3 ...
                                 ^ slot 0 is free as soon as its rows are expanded to [B, T, W],
                                   so table 3 can follow in it (here: 3 slots)

This file knows rows, ids and devices, nothing about transformers.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotrows import HotRows
from ring import STREAMS, CudaGradients, CudaSlot, Slot, Worker, outcome, seen_by_gpu
from tablefile import TableFile

GROUP_BYTES = 1 << 20  # up to so much several tables are fetched as one: a hand-off costs more


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device for which the host does not wait: a GPU that is still busy fetches from
    pinned memory when it gets there, from any other the host would have to hand the data over."""
    if device.type in STREAMS and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Tables(nn.Module):
    """What all homes have in common: rows read where they are, and their gradients.

    Args:
        vocab_size: rows of each table, V.
        width: numbers in a row, W.
    """

    weight: nn.ParameterList | list[Tensor]  # a [V, W] tensor for each table
    file: TableFile | None = None  # that holds what a checkpoint would hold otherwise

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.vocab_size, self.width = vocab_size, width
        # What training lookups read since the last optimizer step: the distinct ids [n], still on
        # the device they came from, and a leaf [n, W] per table, whose .grad autograd fills.
        self.reads: list[tuple[Tensor, list[Tensor]]] = []

    @torch.no_grad()
    def init_rows(self, std: float) -> None:
        """Rows ~ Normal(0, std), in parts: no home needs room for a second table. Parts of whole
        multiples of 16 numbers draw what PyTorch would draw in one go."""
        for weight in self.weight:
            for part in weight.split(1 << 16):
                part.copy_(torch.empty(part.shape, device=part.device).normal_(0, std))

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the rows of each table in turn, [B, T, W] on the compute device.

        In training the rows are remembered for `gradients`. `ids` [B, T] may stay on the CPU
        while the tables are on a GPU: finding the distinct ids there would make the host wait.
        """
        if not self.weight:
            return
        device = self.weight[0].device
        whole = self.weight[0].requires_grad
        if whole or not (self.training and torch.is_grad_enabled()):
            ids = send(ids, device)
            for weight in self.weight:
                yield F.embedding(ids, weight)
            return
        distinct, position = torch.unique(ids, return_inverse=True)  # [n], [B, T]
        position, on_device = send(position, device), send(distinct, device)
        leaves = [
            weight.detach().index_select(0, on_device).float().requires_grad_()  # [n, W]
            for weight in self.weight
        ]
        self.reads.append((distinct, leaves))
        for leaf in leaves:
            # Expanding [n, W] -> [B, T, W] sums the gradients of equal tokens on the way back.
            yield F.embedding(position, leaf)

    def gradients(self) -> tuple[Tensor, list[Tensor]]:
        """The gradients of all rows read since the last call, micro-batches merged.

        Returns:
            ids [n] distinct and sorted, beside the rows, and for each table the summed gradient
            [n, W] on the compute device.

        Raises:
            ValueError: nothing was read and differentiated.
        """
        reads = [read for read in self.reads if read[1] and read[1][0].grad is not None]
        self.reads = []
        if not reads:
            raise ValueError("no rows were read and differentiated since the last step")
        home, device = self.weight[0].device, reads[0][1][0].device
        if len(reads) == 1:
            ids, leaves = reads[0]
            return send(ids, home), [leaf.grad for leaf in leaves]
        ids, position = torch.unique(torch.cat([ids for ids, _ in reads]), return_inverse=True)
        position = send(position, device)
        merged = []
        for parts in zip(*(leaves for _, leaves in reads), strict=True):
            grad = torch.cat([leaf.grad for leaf in parts])  # [sum n, W]
            merged.append(grad.new_zeros(len(ids), self.width).index_add_(0, position, grad))
        return send(ids, home), merged

    def moments(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        """What Adam remembers, beside the rows: m and v [V, W] per table, count and last [V]."""
        m, v = (
            [torch.zeros_like(w, dtype=torch.float32, requires_grad=False) for w in self.weight]
            for _ in range(2)
        )
        device = self.weight[0].device if m else None
        count = torch.zeros(self.vocab_size, dtype=torch.int64, device=device)
        return m, v, count, torch.zeros_like(count)

    def write(self, updates: list[Callable[[Tensor], None]], grads: list[Tensor]) -> None:
        """Run the update of each table on its gradient."""
        for update, grad in zip(updates, grads, strict=True):
            update(grad)

    def flush(self) -> None:
        """Run the updates that still wait."""


class ResidentTables(Tables):
    """All tables of a model in the memory of the compute device.

    Args:
        n_table: number of tables, one per layer that has one.
        vocab_size, width: as in `Tables`.
        dtype: of the rows; they are trained in float32 steps either way.
    """

    def __init__(
        self, n_table: int, vocab_size: int, width: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(vocab_size, width)
        # No requires_grad: autograd would fill a V x W gradient, nearly all of it zeros, each step.
        # Setting it (train.py --table_optimizer adamw) makes them ordinary parameters again.
        self.weight = nn.ParameterList(
            nn.Parameter(torch.zeros(vocab_size, width, dtype=dtype), requires_grad=False)
            for _ in range(n_table)
        )


class OffloadedTables(Tables):
    """All tables of a model outside the memory of the compute device.

    Nothing here is a parameter: `model.to(device)` does not move it, autograd does not see it.

    Updates are not run at once. Each waits until just before its table is next read, on the worker
    thread, so that they overlap with the forward pass and no row can be read stale: strict order by
    construction. `flush` runs what still waits.

    Args:
        home: where rows are: a TableFile, or homes.RamHome.
        device: where layers compute.
        ring_slots: tables that can be on their way at once.
        gather: `ring`, or `inplace`: rows are read where they lie, by the CPU, or by GPU kernels
            from RAM, which is then pinned; training on a GPU uses the ring either way.
        max_rows: distinct tokens that a slot can hold; None: as many as the largest batch has.
        cache_rows: tokens whose rows are kept on the device in evaluation, see `HotRows`.
        group_bytes: see GROUP_BYTES.
    """

    def __init__(
        self,
        home,
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
        self.flight = deque()  # slots whose rows have been ordered and not read, with their jobs
        self.pending: dict[int, tuple[Callable, Tensor | None]] = {}  # updates by table
        self.failure: BaseException | None = None  # of an update: rows are half-way between steps
        self.cache = HotRows(cache_rows, self.weight, self.device) if cache_rows else None
        self.row_bytes = self.width * self.weight[0].element_size()
        self.moved = 0  # bytes of rows brought so far
        if self.cuda:
            self.stream, self.returning = torch.cuda.Stream(self.device), CudaGradients(self.device)
            if gather == "inplace":
                self.views = list(seen_by_gpu(home.rows, self.device).unbind(1))

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
            RuntimeError: (from the iterator) the worker failed or hangs; or another lookup has
                begun, which takes the slots from this one.
        """
        training = self.training and torch.is_grad_enabled()
        if self.gather == "inplace" and not (self.cuda and training):
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
        hot = None
        if self.cache and not training:
            place = self.cache.find(distinct, times)
            hit = place >= 0
            # What has to be fetched comes first, then what is here.
            order = torch.cat([(~hit).nonzero()[:, 0], hit.nonzero()[:, 0]])
            rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
            position = rank[position]
            distinct, hot = distinct[~hit], place[hit]
        rows = self.read_ring(distinct, position, hot, training, ids.numel())
        next(rows)  # up to where everything that has room is ordered
        return rows

    def read_in_place(self, ids: Tensor) -> Iterator[Tensor]:
        ids = send(ids, self.device)
        for view in self.views:
            yield F.embedding(ids, view)

    def read_ring(
        self, distinct: Tensor, position: Tensor, hot: Tensor | None, training: bool, most: int
    ) -> Iterator[Tensor]:
        """Order the rows of tokens `distinct` [n], yield once, then all tables' rows at `position`
        [B, T] of these and of the tokens at places `hot` [h] of the cache. `most`: limits n + h."""
        n, n_table = len(distinct), len(self.weight)
        if self.max_rows and n > self.max_rows:
            raise ValueError(f"{n} distinct tokens do not fit into slots of {self.max_rows} rows")
        size = min(max(1, self.group_bytes // max(1, n * self.row_bytes)), n_table)
        groups = [range(at, min(at + size, n_table)) for at in range(0, n_table, size)]
        self.make_slots(max(size * n, min(most, self.vocab_size)) * self.width)
        waiting = deque(groups)
        alone = len(groups) == 1  # no later group could be fetched meanwhile

        def order(slot: Slot) -> None:
            """Have the next group of tables brought into a slot that is free."""
            if waiting:
                tables = waiting.popleft()
                if alone:
                    self.fetch(slot, distinct, tables)
                job = None if alone else self.worker.submit(self.fetch, slot, distinct, tables)
                self.flight.append((slot, job))

        flight = self.flight
        ahead = self.home.read_ahead if alone else partial(self.worker.submit, self.home.read_ahead)
        ahead(distinct, ("rows",))
        for slot in self.slots:
            order(slot)
        leaves: list[Tensor] = []
        if training:
            self.reads.append((distinct, leaves))
            ahead(distinct, ("m", "v"))  # the update will want them
        self.moved += n_table * n * self.row_bytes
        position = send(position, self.device)
        if hot is not None:
            hot = send(hot, self.device)
            best, places = self.cache.admit(distinct)
            best_there, places_there = (send(t, self.device) for t in (best, places))
        yield  # to `lookup`

        for tables in groups:
            if self.flight is not flight:
                raise RuntimeError("this lookup lost its slots: another one has begun")
            slot, job = flight[0]
            if job:
                outcome(job, f"reading tables {tables[0]} to {tables[-1]}")
            flight.popleft()
            fetched = slot.receive(len(tables) * n * self.width)
            expanded = []
            for i, table in enumerate(tables):
                rows = fetched.view(len(tables), n, self.width)[i]
                if hot is not None:
                    kept = self.cache.rows[table]
                    rows = torch.cat([rows, kept.index_select(0, hot)])  # [n + h, W]
                    kept[places_there] = rows[best_there]
                if training:
                    # The slot itself is the leaf: nothing of it is needed on the way back.
                    rows = rows.detach().float().requires_grad_()
                    leaves.append(rows)
                expanded.append(F.embedding(position, rows))  # [B, T, W]
            slot.release()
            order(slot)
            if hot is not None and tables is groups[-1]:  # nobody asks for more than the last rows
                self.cache.enter(distinct[best], places)
            yield from expanded

    @torch.no_grad()
    def fetch(self, slot: Slot, ids: Tensor, tables: range) -> None:
        """Worker: bring tables up to date, gather rows `ids` [n] of each, and send them off."""
        for table in tables:
            self.settle(table)  # H3
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
        flight, self.flight = self.flight, deque()
        for _, job in reversed(flight):  # newest first: what has run are the first tables
            if job and not job.cancel():
                try:
                    outcome(job, "an abandoned lookup")
                except RuntimeError:
                    if not job.done():
                        raise  # else nobody waits for these rows any more

    # --- writing ---

    def moments(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        return self.home.moments()

    def write(self, updates: list[Callable[[Tensor], None]], grads: list[Tensor]) -> None:
        """Note the updates; each runs just before its table is next read, or in `flush`."""
        self.flush()
        if self.cache:
            self.cache.clear()
        if self.gather == "inplace" and not self.cuda:
            return super().write(updates, grads)  # nothing would be hidden
        if self.cuda:
            self.returning.take(grads)
            grads = [None] * len(grads)
        elif self.device.type != "cpu":
            grads = [grad.cpu() for grad in grads]  # MPS is not for two threads at once
        self.pending = dict(enumerate(zip(updates, grads, strict=True)))

    def settle(self, table: int) -> None:
        """Run the update that waits for a table, if one does (H3)."""
        self.check()
        if table in self.pending:
            update, grad = self.pending.pop(table)
            try:
                update(self.returning.get(table) if self.cuda else grad)
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
        for table, weight in enumerate(self.weight):
            saved = state_dict.get(f"{prefix}weight.{table}")
            if saved is None:
                missing.append(f"{prefix}weight.{table}")
            elif saved.shape != weight.shape:
                errors.append(f"table {table}: {tuple(saved.shape)} is not {tuple(weight.shape)}")
            elif saved.data_ptr() != weight.data_ptr():  # else it is that very file, read in place
                weight.copy_(saved)
