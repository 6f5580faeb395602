"""Tables far from the GPU that calculates with them: in RAM, or in a file larger than RAM.

Host memory stores, the GPU calculates, the optimizer's part included. What a batch needs comes to
the device and goes back through a ring of slots, on a side stream, beside the compute stream.

**Reading.** Ids are known before the first layer runs, so the distinct rows of table after table
are on their way while earlier layers compute. A step of decoding reads all its tokens own at once.

    side stream     |fetch 0|fetch 1|fetch 2|       |fetch 3|       |fetch 4|
    compute         | embedding |layer with 0 |layer with 1 |layer with 2 |layer with 3 ...
                                 ^ slot 0 is free as soon as its rows are expanded to [B, T, W],
                                   so table 3 can follow in it (here: 3 slots)

**Training.** Rows and moments of the last batch are on the device, in places of a working set. Of
the next batch those that *stay* are left there, those that *come* are fetched to free places while
this batch still computes, and what *leaves* is stored when its update is done. To layers and
optimizer the working set is a resident table with places for ids: the same kernels run on it.

**How a slot is filled.** From RAM that can be pinned, by a kernel that reads it over the bus
(*direct*). If not, a worker thread gathers rows in pinned staging memory, from where the side
stream copies them (*staged*). The way back likewise. What can go wrong:

    H1  staging memory is filled anew while the side stream still copies it    (Slot.settle)
    H2  a slot or a place is filled anew while the compute stream still reads it
                                                       (Slot.free, OffloadedTables.after_compute)
    H3  rows are fetched before what they became is stored: those that come are others than those
        that leave, and all that crosses the bus does so in one order  (Ring.run, Ring.settle)

Waiting for an event that was never recorded returns at once (CUDA). So whoever waits for an event
of the worker's first waits for its job.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tables import memory
from tables.file import TableFile
from tables.memory import TableStorage
from tables.tables import StoredTables, send

PATIENCE = 600.0  # seconds after which a job that has not ended counts as hung


class Slot:
    """A device buffer for rows on their way and, if a worker fills it, pinned memory beside it."""

    def __init__(self, size: int, ring: "TransferRing") -> None:
        """size: bytes."""
        with torch.inference_mode(False):  # what decoding allocates, training may use
            self.buffer = torch.empty(size, dtype=torch.uint8, device=ring.device)
            self.staging = (
                torch.empty(size, dtype=torch.uint8, pin_memory=True) if ring.worker else None
            )
        # Not to be handed out anew before the last copy has ended. (Pinned memory never is.)
        self.buffer.record_stream(ring.stream)
        # ready: the side stream is done with it; free: the compute stream is.
        self.ready, self.free = torch.cuda.Event(blocking=True), torch.cuda.Event()
        # The allocator hands out memory that kernels queued earlier may still use.
        self.free.record(torch.cuda.current_stream(ring.device))
        self.landing: Callable[[], object] = lambda: None  # what is to be done with staged rows

    def settle(self) -> None:
        """Worker: before `staging` is used again (H1), and before what went out comes in (H3)."""
        self.ready.synchronize()
        self.landing()
        self.landing = lambda: None


def rows_in(memory: Tensor, n: int, like: Tensor) -> Tensor:
    """Bytes of a slot as rows [n, ..] like those of a table."""
    size = n * like.shape[1] * like.element_size()
    return memory[:size].view(like.dtype).view(n, like.shape[1])


class TransferRing:
    """Slots, and the side stream on which rows go through them, all in one order.
    With `staged` a worker thread gathers rows, and scatters those that come back."""

    def __init__(self, device: torch.device, n_slot: int, staged: bool) -> None:
        self.device, self.n_slot = device, n_slot
        self.stream = torch.cuda.Stream(device)
        self.worker = ThreadPoolExecutor(1) if staged else None
        self.failure: BaseException | None = None  # of a job: rows are half-way between steps
        self.slots: deque[Slot] = deque()
        self.turn = 0  # counts the users of the slots, of whom each takes them from the last
        self.moved = 0  # bytes brought and taken back so far

    def run(self, job: Callable, *args) -> Future | None:
        """Queue what a job does on the side stream: at once, or when it is the worker's turn."""
        if self.worker:
            return self.worker.submit(self.attempt, job, *args)
        job(*args)

    def attempt(self, job: Callable, *args) -> None:
        """Worker: run a job, unless one before it failed."""
        try:
            if self.failure is None:
                job(*args)
        except BaseException as error:  # whatever ends a job, the main thread hears of it
            self.failure = error
        if self.failure:
            raise self.failure

    def slot(self, size: int) -> Slot:
        """The next slot. Addresses stay, unless rows need more bytes than any before."""
        if not self.slots or len(self.slots[0].buffer) < size:
            self.slots = deque(Slot(size, self) for _ in range(self.n_slot))
        self.slots.rotate(-1)
        return self.slots[-1]

    def local(self, ids: Tensor) -> Tensor:
        """Ids of stored rows, where `fetch` and `store` want them."""
        return ids if self.worker else self.there(ids)

    def there(self, index: Tensor) -> Tensor:
        """An index on the device, for the side stream."""
        if index.device.type == self.device.type:
            index.record_stream(self.stream)  # its owner may let go of it before it is read
            return index
        with torch.cuda.stream(self.stream):
            return send(index, self.device)

    @torch.no_grad()
    def fetch(
        self, slot: Slot, stored: Tensor, ids: Tensor, near=None, places=None, arrived=None
    ) -> None:
        """Job: bring rows `ids` [n] of `stored` [V, ..] to a slot and, if it is named, on to
        `places` [n] of `near`; then record that they have arrived."""
        rows = rows_in(slot.buffer, len(ids), stored)
        if self.worker:
            slot.settle()
            staged = rows_in(slot.staging, len(ids), stored)
            torch.index_select(stored, 0, ids, out=staged)
        with torch.cuda.stream(self.stream):  # the current stream is each thread's own
            self.stream.wait_event(slot.free)  # H2
            if self.worker:
                rows.copy_(staged, non_blocking=True)
            else:
                torch.index_select(stored, 0, ids, out=rows)
            if near is not None:
                near.index_copy_(0, places, rows)
                arrived.record(self.stream)
            slot.ready.record(self.stream)

    @torch.no_grad()
    def store(self, slot: Slot, stored: Tensor, ids: Tensor, near: Tensor, places: Tensor) -> None:
        """Job: take rows from `places` [n] of `near` back to rows `ids` [n] of `stored` [V, ..]."""
        rows = rows_in(slot.buffer, len(ids), stored)
        if self.worker:
            slot.settle()
        with torch.cuda.stream(self.stream):
            torch.index_select(near, 0, places, out=rows)
            if self.worker:
                staged = rows_in(slot.staging, len(ids), stored)
                staged.copy_(rows, non_blocking=True)
                slot.landing = partial(stored.index_copy_, 0, ids, staged)
            else:
                stored.index_copy_(0, ids, rows)
            slot.ready.record(self.stream)

    def settle(self) -> Future | None:
        """See to it that what was stored is there before anything more is fetched (H3)."""
        if self.worker:
            return self.run(lambda slots: [slot.settle() for slot in slots], list(self.slots))

    def drain(self) -> None:
        """Wait until all that was queued is done."""
        wait_for(self.settle(), "storing rows")
        self.stream.synchronize()


def wait_for(job: Future | None, what: str) -> None:
    """Wait until the worker has done a job. RuntimeError if it or one before failed, or hangs."""
    try:
        if job:
            job.result(PATIENCE)
    except BaseException as error:
        late = isinstance(error, FutureTimeout)
        why = (
            f"{PATIENCE:.0f} s, does the disk hang?"
            if late
            else f"{error!r}: go on from a checkpoint"
        )
        raise RuntimeError(
            f"{what} {'has not ended after' if late else 'failed:'} {why}"
        ) from error


class OffloadedTables(StoredTables):
    """All tables of a model in host memory or in a file, used by a GPU; `ring_slots` of them can
    be on their way at once."""

    def __init__(
        self, storage: TableStorage, device: torch.device | str, *, ring_slots: int = 3
    ) -> None:
        super().__init__(storage, device)
        in_ram = not isinstance(storage, TableFile)
        seen = [memory.seen_by_gpu(array, self.device) for array in storage.arrays if in_ram]
        direct = bool(seen) and all(array is not None for array in seen)
        self.ring = TransferRing(self.device, ring_slots, staged=not direct)
        # What is stored: rows, and for training m and v, n_table times [V, W] each; and the rows of
        # all tables as one matrix [V, n_table * W].
        arrays = seen if direct else storage.arrays
        self.stored, self.whole = [array.unbind(1) for array in arrays], arrays[0].flatten(1)
        self.step_slot: Slot | None = None  # of a step of decoding
        # The working set: the same [places, W] for each table, none before the first step.
        self.near = [[t[:0].to(self.device) for t in tables] for tables in self.stored]
        self.place = torch.full((self.vocab_size,), -1)  # of each token; -1: it is not there
        self.changed = torch.zeros(self.vocab_size, dtype=torch.bool)  # and not stored since
        self.held = self.vacant = torch.empty(0, dtype=torch.int64)  # tokens; places without one
        self.next: Tensor | None = None  # tokens that were announced by `prefetch`
        # What brings rows of each table, and behind them moments: a job, and what it records.
        self.jobs: list[Future | None] = [None] * (len(self.weight) + 1)
        self.arrived = [torch.cuda.Event() for _ in self.jobs]

    # --- reading ---

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        """As `Tables.lookup`. What can be fetched ahead is under way when this returns. `ids`
        should be on the CPU, except in a step of decoding, [B, 1]: else the host waits for them.
        The iterator raises RuntimeError if the worker failed, or if another lookup has begun."""
        if self.in_training():
            distinct, position = self.distinct(ids)
            if not self.reads and self.next is None:  # the first of a step that nobody announced
                self.keep(distinct)
            self.next = None
            self.bring(distinct)
            return self.read_once(distinct, position)
        self.store(self.held)
        self.ring.turn += 1
        return self.read(ids)

    def distinct(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct ids [n] on the CPU, and the position among them of each of ids."""
        distinct, position = torch.unique(ids.cpu(), return_inverse=True)
        if len(distinct) and not 0 <= distinct[0] <= distinct[-1] < self.vocab_size:
            raise IndexError(
                f"ids {distinct[0]} to {distinct[-1]}: the tables have rows 0 to "
                f"{self.vocab_size - 1}"
            )
        return distinct, position

    def read(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the rows of tokens [B, T], fetched each once, table after table. Of tokens [B, 1]
        one kernel fetches all that they own, as it lies side by side, and nobody looks whether they
        are distinct: in direct mode the host does not wait to know them."""
        step, sources, ordered = ids.shape[-1] == 1, self.stored[0], deque()
        if self.ring.worker:
            ids = ids.cpu()
        if step:
            if ids.device.type == "cpu":
                self.distinct(ids)  # are they in range?
            wanted, sources = ids.reshape(-1), [self.whole]
        else:
            wanted, position = self.distinct(ids)
            position = send(position, self.device)
        if self.ring.worker:
            self.storage.read_ahead(wanted)
        n, wanted = len(wanted), self.ring.local(wanted)

        def order(number: int) -> None:
            if number < len(sources):
                size = n * sources[number].shape[1] * self.whole.element_size()
                slot = self.slot_of_steps(size) if step else self.ring.slot(size)
                job = self.ring.run(self.ring.fetch, slot, sources[number], wanted)
                ordered.append((slot, job))
                self.ring.moved += size

        def arrive(turn: int) -> Iterator[Tensor]:
            for number, source in enumerate(sources):
                self.check(turn)
                slot, job = ordered.popleft()
                self.wait(job, slot.ready)
                rows = rows_in(slot.buffer, n, source)
                if not step:
                    rows = F.embedding(position, rows)  # [n, W] -> [B, T, W]
                    slot.free.record(torch.cuda.current_stream(self.device))
                    order(number + self.ring.n_slot)
                for part in rows.view(*ids.shape, -1, self.width).unbind(-2):
                    self.check(turn)
                    yield part  # [B, T, W]

        for number in range(self.ring.n_slot):
            order(number)
        return arrive(self.ring.turn)

    def slot_of_steps(self, size: int) -> Slot:
        """The slot of steps of decoding. Layers read it after it was yielded; all that read it the
        last time is queued by now, and so is what makes the ids: transfers wait for both."""
        if self.step_slot is None or len(self.step_slot.buffer) < size:
            self.step_slot = Slot(size, self.ring)
        self.step_slot.free.record(torch.cuda.current_stream(self.device))
        return self.step_slot

    def check(self, turn: int) -> None:
        if self.ring.turn != turn:
            raise RuntimeError("this lookup lost its slots: another one has begun")

    def wait(self, job: Future | None, event: torch.cuda.Event) -> None:
        """Have the compute stream wait for a transfer, and the host until the worker queued it."""
        wait_for(job, "reading rows")
        torch.cuda.current_stream(self.device).wait_event(event)

    # --- training ---

    def prefetch(self, ids: Tensor) -> None:
        self.next, _ = self.distinct(ids)
        self.bring(self.next)

    def index(self, ids: Tensor) -> Tensor:
        self.bring(ids)
        return send(self.place[ids], self.device)

    def at_hand(self, table: int, kind: int = 0) -> Tensor:
        number = -1 if kind else table
        self.wait(self.jobs[number], self.arrived[number])
        return self.near[kind][table]

    def updated(self, ids: Tensor) -> None:
        self.changed[ids] = True
        if self.next is not None:
            self.keep(self.next)

    def bring(self, ids: Tensor) -> None:
        """Have those of tokens `ids` [n] come that are not in the working set."""
        coming = ids[self.place[ids] < 0]
        if not len(coming):
            return
        if len(coming) > len(self.vacant):
            self.grow(len(self.held) + len(coming))
        places, self.vacant = self.vacant.tensor_split([len(coming)])
        self.place[coming], self.held = places, torch.cat([self.held, coming])
        if self.ring.worker:
            self.ring.run(self.storage.read_ahead, coming, ("rows", "m", "v"))
        there, local = self.ring.there(places), self.ring.local(coming)
        for stored, near, slot, number in self.transfers(len(coming)):
            job = (slot, stored, local, near, there, self.arrived[number])
            self.jobs[number] = self.ring.run(self.ring.fetch, *job)

    def keep(self, ids: Tensor) -> None:
        """Store what has changed of other tokens than `ids`, and free their places."""
        stays = torch.isin(self.held, ids, assume_unique=True)
        leaving, self.held = self.held[~stays], self.held[stays]
        self.store(leaving)
        self.after_compute()
        self.vacant = torch.cat([self.vacant, self.place[leaving]])
        self.place[leaving] = -1

    def after_compute(self) -> None:
        """Let transfers wait until the compute stream has done what is queued so far (H2)."""
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        self.ring.run(self.ring.stream.wait_event, done)

    def store(self, ids: Tensor) -> None:
        """Take what has changed of tokens `ids` [n] in the working set to where it is stored."""
        ids = ids[self.changed[ids]]
        if len(ids):
            moves = list(self.transfers(len(ids)))
            self.after_compute()  # of what reads the slots, too
            self.changed[ids] = False
            there, local = self.ring.there(self.place[ids]), self.ring.local(ids)
            for stored, near, slot, _ in moves:
                self.ring.run(self.ring.store, slot, stored, local, near, there)
            self.ring.settle()

    def transfers(self, n: int) -> Iterator[tuple[Tensor, Tensor, Slot, int]]:
        """What goes one way for n tokens, rows of all tables, then m and v: where it is stored, its
        place nearby, a slot, and the number of what brings it."""
        self.ring.turn += 1
        for kind, (stored, near) in enumerate(zip(self.stored, self.near, strict=True)):
            for table, (far, close) in enumerate(zip(stored, near, strict=True)):
                self.ring.moved += n * self.width * far.element_size()
                slot = self.ring.slot(n * self.width * 4)  # at most: rows may be bfloat16
                yield far, close, slot, -1 if kind else table

    def grow(self, need: int) -> None:
        """Make room for so many tokens, and some more. Here the host waits."""
        places = min(self.vocab_size, need + need // 4)
        self.ring.drain()
        for tables in self.near:
            for table, old in enumerate(tables):
                tables[table] = old.new_empty(places, self.width)
                tables[table][: len(old)] = old
                tables[table].record_stream(self.ring.stream)
        self.vacant = torch.cat([self.vacant, torch.arange(len(old), places)])
        self.after_compute()  # it may still use what this memory was

    def flush(self) -> None:
        """Store all that has changed, wait for it, and empty the working set."""
        self.keep(self.held[:0])
        self.ring.drain()
        self.next = None
