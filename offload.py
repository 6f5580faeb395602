"""Tables kept away from the GPU that uses them: in RAM, or in files larger than RAM.

The host stores, the GPU computes. What a token owns, its rows of all tables side by side (and
likewise what the optimizer keeps for them), travels as a record. The records of the last batch stay
on the device, in the slots of a *working set*. Records that the next batch needs and the device
lacks are fetched during this batch's backward pass; only those that leave are written back. Where
nobody announced a batch, as with a prompt, the first table comes first, then two, then four:

    compute stream  | forward | backward          | update | forward ...
    side stream               |copy|copy|                  |copy| write back
    worker thread          gather|gather|                       scatter|

    fetch:       stored arrays --worker--> pinned staging --side stream--> slots
    write back:  slots --side stream--> pinned staging --worker--> stored arrays

Records go in chunks through a ring of a few buffers. Three things could go wrong:

    H1  staging memory is refilled while a copy still reads it: `fetch` waits for the copy
    H2  slots are refilled while the compute stream still reads or updates them: each transfer waits
        for the event `free`, recorded on the compute stream when slots were last given back
    H3  records are fetched before their update is stored: one worker does one job after the other,
        and a write-back waits for its copies and ends when all is stored
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from tables.storage import TableStorage
from tables.tables import StoredTables, send


class TransferRing:
    """A thread with a stream of its own that moves records through a few buffers in turn."""

    def __init__(self, device: torch.device, n_buffer: int, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.stream = torch.cuda.Stream(device)
        memory = torch.empty(n_buffer, chunk_bytes, dtype=torch.uint8, pin_memory=True)
        buffers = [(part, torch.cuda.Event(blocking=True)) for part in memory]
        self.next_buffer = cycle(buffers)
        # All that the worker does on the GPU, it does on this stream.
        self.worker = ThreadPoolExecutor(
            1, initializer=torch.cuda.set_stream, initargs=(self.stream,)
        )
        self.last: Future = self.worker.submit(torch.cuda.Event)  # of the last job

    def run(self, job: Callable, *args) -> Future:
        """Have the worker do a job after those before it. What ended an earlier one is raised
        again, as records may now belong to different steps."""
        previous = self.last

        def do() -> object:
            previous.result()
            return job(*args)

        self.last = self.worker.submit(do)
        return self.last

    def fetch(self, *records) -> torch.cuda.Event:
        """Job: bring records, said as in `chunks`, to the device. Returns the event of arrival."""
        for stored, part, on_device, at in self.chunks(*records):
            staging, copied = self.next_staging(stored, len(part))
            copied.synchronize()  # H1
            torch.index_select(stored, 0, part, out=staging)
            rows = staging.flatten(0, 1).to(self.stream.device, non_blocking=True)
            on_device.index_copy_(0, at, rows)
            copied.record()
        return self.stream.record_event()

    def write_back(self, *records) -> None:
        """Job: store records, said as in `chunks`, that are on the device."""
        before = None
        for stored, part, on_device, at in self.chunks(*records):
            staging, copied = self.next_staging(stored, len(part))
            staging.flatten(0, 1).copy_(on_device.index_select(0, at), non_blocking=True)
            copied.record()
            if before:
                store(*before)  # while this chunk is being copied, to another buffer
            before = (stored, part, staging, copied)
        store(*before)  # before anything more is fetched (H3)

    def chunks(
        self, ids: Tensor, slots: Tensor, arrays: list[tuple], free: torch.cuda.Event
    ) -> Iterator[tuple]:
        """Once the event `free` has come, yield the records of tokens `ids` [n] in as many parts as
        buffers need.

        Args:
            slots: [n], of the tokens in the working set.
            arrays: pairs of a stored array [V, n_table, W] and of these tables in the working set,
                [n_table, n_slot, W].

        Yields:
            A stored array, a part of the tokens; all rows on the device as one matrix, and which
            of them are the tokens'.
        """
        self.stream.wait_event(free)  # H2
        for stored, on_device in arrays:
            n_table, n_slot, _ = on_device.shape
            at = slots[:, None] + n_slot * torch.arange(n_table)  # [n, n_table]
            at = send(at, self.stream.device)
            n = self.chunk_bytes // stored[0].nbytes
            for part, part_at in zip(ids.split(n), at.split(n), strict=True):
                yield stored, part, on_device.flatten(0, 1), part_at.flatten()

    def next_staging(self, stored: Tensor, n: int) -> tuple[Tensor, torch.cuda.Event]:
        """Pinned memory for n records [n, n_table, W] of an array, and the event of the last copy
        from or to it."""
        memory, copied = next(self.next_buffer)
        numbers = memory[: n * stored[0].nbytes].view(stored.dtype)
        return numbers.view(n, *stored.shape[1:]), copied


def store(stored: Tensor, ids: Tensor, staging: Tensor, copied: torch.cuda.Event) -> None:
    """Put the records of tokens `ids`, once they are copied to staging, where they are stored."""
    copied.synchronize()  # H3
    stored.index_copy_(0, ids, staging)


class OffloadedTables(StoredTables):
    """All tables of a model in RAM or on disk, used by a GPU through a ring of `n_buffer` buffers
    of `chunk_bytes`, pinned. A token's record: absent -fetch_missing-> coming -wait_for-> in its
    slot -updated-> dirty -evict_except-> absent. On the device each table lies by itself: with
    --deterministic, PyTorch would write a strided one back as a whole."""

    def __init__(
        self,
        storage: TableStorage,
        device: torch.device | str,
        n_buffer: int = 3,
        chunk_bytes: int = 8 << 20,
    ) -> None:
        super().__init__(storage, device)
        record_bytes = 4 * len(self.weight) * self.width  # or half of it: at least one must fit
        self.ring = TransferRing(self.device, n_buffer, max(chunk_bytes, record_bytes))
        # The working set: on the device [n_table, n_slot, W] of rows and, in training, maybe state.
        self.working_set = {"rows": self.new_slots(0, storage.arrays["rows"])}
        self.token_in = torch.empty(0, dtype=torch.int64)  # of each slot, -1: it is free
        self.slot_of = torch.full((self.n_row,), -1)  # of each token, -1: it has none
        self.dirty = torch.zeros(self.n_row, dtype=torch.bool)  # changed, not written back
        self.announced = self.token_in  # tokens of the next batch: none
        # Of each table, the latest fetch; and the latest of what was looked up.
        self.fetched = self.looked_up = [self.ring.last] * len(self.weight)

    def add_state(self) -> list[Tensor]:
        self.flush()  # no slot has a row without its state
        super().add_state()
        stored = self.storage.arrays["state"]
        self.working_set["state"] = self.new_slots(len(self.token_in), stored)
        return self.state

    # --- reading ---

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        """As `Tables.lookup`. Rows are on their way when this returns. The iterator raises what
        went wrong in the worker."""
        ids = ids.cpu()
        if self.in_training():
            rows = self.read_once(ids)
        elif ids.shape[1] == 1:
            return self.decode(ids)
        else:
            rows = self.read(ids)
            if not self.n_read:  # what training read stays until it is updated
                self.evict_except(ids)  # so evaluation keeps one batch
        self.fetch_missing(ids)
        self.looked_up = self.fetched
        return rows

    def read(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the rows [B, T, W] of tokens [B, T]."""
        free = None
        for table in range(len(self.weight)):
            if free is not self.free:  # at first, and when another lookup may have evicted some
                slots = self.slots(ids)
                free = self.free
            yield F.embedding(slots, self.rows(table))

    def decode(self, ids: Tensor) -> Iterator[Tensor]:
        """Rows of one step, tokens [B, 1]. So few records are sent directly, bypassing the ring."""
        self.flush()  # the storage must have their latest values
        self.storage.read_ahead(ids)
        records = self.storage.arrays["rows"].index_select(0, ids.flatten())
        records = send(records, self.device).unflatten(0, ids.shape)  # [B, 1, n_table, W]
        return iter(records.unbind(-2))  # [B, 1, W] each

    # --- training ---

    def prefetch(self, ids: Tensor) -> None:
        self.announced = ids.cpu()
        self.fetch_missing(self.announced, len(self.weight))

    def slots(self, ids: Tensor) -> Tensor:
        if self.fetch_missing(ids):
            self.looked_up = self.fetched
        return send(self.slot_of[ids], self.device)

    def rows(self, table: int) -> Tensor:
        self.wait_for(self.looked_up[table])
        return self.working_set["rows"][table]

    def states(self, table: int) -> Tensor:
        return self.working_set["state"][table]

    def updated(self, ids: Tensor) -> None:
        self.dirty[ids] = True
        self.evict_except(self.announced)
        self.announced = self.announced[:0]

    # --- the working set ---

    def fetch_missing(self, ids: Tensor, n: int = 1) -> bool:
        """Begin to fetch those of tokens `ids` that are not on the device: the first n tables, then
        twice as many, and so on. Returns whether there are any. IndexError: an id out of range."""
        ids = ids.flatten()
        missing = torch.unique(ids[self.slot_of.index_select(0, ids) < 0])
        if len(missing) == 0:
            return False
        lacking = len(missing) - int((self.token_in < 0).sum())
        if lacking > 0:
            self.grow(lacking)
        slots = (self.token_in < 0).nonzero()[: len(missing), 0]
        self.token_in[slots] = missing
        self.slot_of[missing] = slots
        self.ring.run(self.storage.read_ahead, missing, list(self.working_set))
        self.fetched = []
        while len(self.fetched) < len(self.weight):
            tables = slice(len(self.fetched), len(self.fetched) + n)
            self.fetched += n * [self.transfer(self.ring.fetch, missing, tables)]
            n *= 2
        return True

    def transfer(self, job: Callable, ids: Tensor, tables: slice) -> Future:
        """Have the ring fetch or write back tokens `ids` [n] of these tables."""
        arrays = []
        for name, part in self.working_set.items():
            arrays.append((self.storage.arrays[name][:, tables], part[tables]))
        return self.ring.run(job, ids, self.slot_of[ids], arrays, self.free)

    def wait_for(self, arrival: Future) -> None:
        """Let the compute stream wait for a fetch and those before, and the host for the worker."""
        torch.cuda.current_stream(self.device).wait_event(arrival.result())

    def evict_except(self, ids: Tensor) -> None:
        """Evict all tokens but `ids`: write back those that changed, and free their slots."""
        self.record_free()
        slots = self.slot_of[ids]
        leaves = self.token_in >= 0  # [n_slot]
        leaves[slots[slots >= 0]] = False
        leaving = self.token_in[leaves]
        changed = leaving[self.dirty[leaving]]
        if len(changed):
            self.dirty[changed] = False
            self.transfer(self.ring.write_back, changed, slice(None))
        self.token_in[leaves] = -1
        self.slot_of[leaving] = -1

    def record_free(self) -> None:
        """Make later transfers wait for all work queued on the compute stream so far (H2)."""
        self.free = torch.cuda.current_stream(self.device).record_event()

    def new_slots(self, n_slot: int, like: Tensor) -> Tensor:
        """Room for records like those of an array. Earlier kernels may still use this memory."""
        shape = len(self.weight), n_slot, self.width
        slots = torch.empty(shape, dtype=like.dtype, device=self.device)
        slots.record_stream(self.ring.stream)  # no other owner before the last transfer's end
        self.record_free()
        return slots

    @torch.inference_mode(False)  # training may use what evaluation made
    def grow(self, n: int) -> None:
        """Add n slots, and a quarter of all. The host waits for the worker."""
        n_old = len(self.token_in)
        n_slot = min(self.n_row, (n_old + n) * 5 // 4)
        self.wait_for(self.fetched[-1])
        for name, old in self.working_set.items():
            new = self.new_slots(n_slot, old)
            new[:, :n_old] = old
            self.working_set[name] = new  # jobs under way have the old one
        self.token_in = F.pad(self.token_in, (0, n_slot - n_old), value=-1)
        self.record_free()

    def flush(self) -> None:
        if (self.token_in >= 0).any():
            self.evict_except(self.announced[:0])
        self.ring.last.result()
