"""Tables kept away from the GPU that uses them: in RAM, or in files larger than RAM.

The host stores, the GPU computes. What a token owns, its rows of all tables side by side (and
likewise what the optimizer keeps for them), travels as a record. The records of the last batch stay
on the device, in the slots of a *working set*. Records that the next batch needs and the device
lacks are fetched during this batch's backward pass; only those that leave are written back:

    compute stream  | forward | backward          | update | forward ...
    side stream               |fetch|                      |write back|

How they travel depends on where they are stored:

    RAM      pinned arrays <--a kernel of the side stream, over the bus--> slots
    files    mapped files <--worker thread--> pinned staging <--copies of the side stream--> slots

A kernel reads and writes the host's memory where it is (*zero-copy*): the host only launches it.
Files cannot be pinned, so their records go in chunks through a ring of a few buffers. Of a prompt,
which nobody announced, the first table comes first, then two, then four.

Three things could go wrong:

    H1  staging memory is refilled while a copy still reads it: `fetch` waits for the copy
    H2  slots are refilled while the compute stream still reads or updates them: each transfer waits
        for the event `free`, recorded on the compute stream when slots were last given back
    H3  records are fetched before their update is stored: the side stream keeps its order, and so
        does the one worker, where a write-back waits for its copies and ends when all is stored
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from tables.storage import TableStorage
from tables.tables import StoredTables, send
from tables.zero_copy import ZeroCopy, places, seen_by_gpu


class TransferRing:
    """A thread with a side stream that moves records through a few buffers in turn."""

    def __init__(
        self, stream: torch.cuda.Stream, arrays: dict[str, Tensor], n_buffer: int, chunk_bytes: int
    ) -> None:
        self.stream = stream
        self.arrays = arrays
        self.chunk_bytes = chunk_bytes
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
        """As `ZeroCopy.fetch`. Returns the event of arrival."""
        for stored, part, on_device, at in self.chunks(*records):
            staging, copied = self.next_staging(stored, len(part))
            copied.synchronize()  # H1
            torch.index_select(stored, 0, part, out=staging)
            rows = staging.flatten(0, 1).to(self.stream.device, non_blocking=True)
            on_device.index_copy_(0, at, rows)
            copied.record()
        return self.stream.record_event()

    def write_back(self, *records) -> None:
        """As `ZeroCopy.write_back`."""
        before = None
        for stored, part, on_device, at in self.chunks(*records):
            staging, copied = self.next_staging(stored, len(part))
            staging.flatten(0, 1).copy_(on_device.index_select(0, at), non_blocking=True)
            copied.record()
            if before:
                store(*before)  # while this chunk is being copied, to another buffer
            before = (stored, part, staging, copied)
        store(*before)  # before anything more is fetched (H3)

    def chunks(self, *records) -> Iterator[tuple]:
        """`places` in as many parts as buffers need, the last on the device."""
        for stored, ids, tables, on_device, at in places(self.stream, *records):
            stored = stored[:, tables]
            at = send(at, self.stream.device)
            n = self.chunk_bytes // stored[0].nbytes
            for part, part_at in zip(ids.split(n), at.split(n), strict=True):
                yield stored, part, on_device, part_at.flatten()

    def next_staging(self, stored: Tensor, n: int) -> tuple[Tensor, torch.cuda.Event]:
        """Pinned memory for n records [n, n_table, W] of an array, and the event of the last copy
        from or to it."""
        memory, copied = next(self.next_buffer)
        numbers = memory[: n * stored[0].nbytes].view(stored.dtype)
        return numbers.view(n, *stored.shape[1:]), copied

    def read(self, ids: Tensor) -> Tensor:
        """As `ZeroCopy.read`. So few records are sent directly, bypassing the ring."""
        return send(self.arrays["rows"].index_select(0, ids), self.stream.device)

    def finish(self) -> None:
        """As `ZeroCopy.finish`. Raises what ended a job."""
        self.last.result()


def store(stored: Tensor, ids: Tensor, staging: Tensor, copied: torch.cuda.Event) -> None:
    """Put the records of tokens `ids`, once they are copied to staging, where they are stored."""
    copied.synchronize()  # H3
    stored.index_copy_(0, ids, staging)


class OffloadedTables(StoredTables):
    """All tables of a model in RAM or on disk, used by a GPU: files, and RAM that cannot be pinned,
    through a ring of `n_buffer` buffers of `chunk_bytes`. A token's record: absent -fetch_missing->
    coming -wait_for-> in its slot -updated-> dirty -evict_except-> absent. On the device each table
    lies by itself: with --deterministic, PyTorch would write a strided one back as a whole."""

    def __init__(
        self,
        storage: TableStorage,
        device: torch.device | str,
        n_buffer: int = 3,
        chunk_bytes: int = 8 << 20,
    ) -> None:
        super().__init__(storage, device)
        record_bytes = 4 * len(self.weight) * self.width  # or half of it: at least one must fit
        self.buffers = n_buffer, max(chunk_bytes, record_bytes)
        self.stream = torch.cuda.Stream(self.device)  # the side stream
        self.seen: dict[str, Tensor] = {}  # arrays in RAM, as the device sees them
        self.open_transfers()
        # The working set: on the device [n_table, n_slot, W] of rows and, in training, maybe state.
        self.working_set = {"rows": self.new_slots("rows", 0)}
        self.token_in = torch.empty(0, dtype=torch.int64)  # of each slot, -1: it is free
        self.slot_of = torch.full((self.n_row,), -1)  # of each token, -1: it has none
        self.dirty = torch.zeros(self.n_row, dtype=torch.bool)  # changed, not written back
        self.announced = self.token_in  # tokens of the next batch: none
        self.fetched = self.transfers.run(torch.cuda.Event)  # the latest fetch: none

    def open_transfers(self) -> None:
        """Choose what moves the records of all arrays, while nothing is under way."""
        arrays = self.storage.arrays
        if not self.on_disk:
            try:
                for name in arrays.keys() - self.seen.keys():
                    self.seen[name] = seen_by_gpu(arrays[name], self.device, owner=self)
            except OSError as error:
                print(f"note: tables in RAM cannot be pinned ({error}): slower", file=sys.stderr)
        if self.seen.keys() == arrays.keys():
            self.transfers = ZeroCopy(self.stream, self.seen)
        else:
            self.transfers = TransferRing(self.stream, arrays, *self.buffers)

    def add_state(self) -> list[Tensor]:
        self.flush()  # no slot has a row without its state
        super().add_state()
        if isinstance(self.transfers, ZeroCopy):  # a ring moves any array
            self.open_transfers()
        self.working_set["state"] = self.new_slots("state", len(self.token_in))
        return self.state

    # --- reading ---

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        """As `Tables.lookup`. The iterator raises what went wrong in the worker."""
        ids = ids.cpu()
        if self.in_training():
            self.wait_for(self.fetched)  # what was announced
            return self.read_once(ids)
        self.slot_of.index_select(0, ids.flatten())  # on a GPU a wrong id would be no IndexError
        self.settle()  # what is stored must have the latest values
        return self.decode(ids) if ids.shape[1] == 1 else self.read(ids)

    def decode(self, ids: Tensor) -> Iterator[Tensor]:
        """Rows of one step, tokens [B, 1], by the compute stream."""
        self.storage.read_ahead(ids)
        records = self.transfers.read(ids.flatten()).unflatten(0, ids.shape)  # [B, 1, n_table, W]
        return iter(records.unbind(-2))  # [B, 1, W] each

    def read(self, ids: Tensor) -> Iterator[Tensor]:
        """Rows of a prompt, or of evaluation, tokens [B, T]. They come a few tables at a time, so
        that a layer waits for its own."""
        distinct, position = self.distinct(ids)  # [n], [B, T]
        slots = torch.arange(len(distinct))
        rows = self.new_slots("rows", len(distinct))
        self.transfers.run(self.storage.read_ahead, distinct)
        arrivals: list[Future] = []
        while len(arrivals) < len(self.weight):
            n = len(arrivals) + 1  # 1, 2, 4, ...
            tables = slice(len(arrivals), len(arrivals) + n)
            coming = self.transfer(self.transfers.fetch, distinct, slots, {"rows": rows}, tables)
            arrivals += n * [coming]
        return self.arrived(rows, arrivals, send(position, self.device))

    def arrived(self, rows: Tensor, arrivals: list[Future], position: Tensor) -> Iterator[Tensor]:
        """Yield the rows [B, T, W] of each table, once they are there."""
        for table in range(len(self.weight)):
            self.wait_for(arrivals[table])
            yield F.embedding(position, rows[table])

    # --- training ---

    def prefetch(self, ids: Tensor) -> None:
        self.announced, _ = self.distinct(ids.cpu())
        self.fetch_missing(self.announced)

    def slots(self, ids: Tensor) -> Tensor:
        if self.fetch_missing(ids):
            self.wait_for(self.fetched)
        return send(self.slot_of[ids], self.device)

    def rows(self, table: int) -> Tensor:
        return self.working_set["rows"][table]

    def states(self, table: int) -> Tensor:
        return self.working_set["state"][table]

    def updated(self, ids: Tensor) -> None:
        self.dirty[ids] = True
        self.evict_except(self.announced)
        self.announced = self.announced[:0]

    # --- the working set ---

    def fetch_missing(self, ids: Tensor) -> bool:
        """Begin to fetch those of distinct tokens `ids` [n] that are not on the device. Returns
        whether there are any. IndexError: an id out of range."""
        missing = ids[self.slot_of.index_select(0, ids) < 0]
        if len(missing) == 0:
            return False
        lacking = len(missing) - int((self.token_in < 0).sum())
        if lacking > 0:
            self.grow(lacking)
        slots = (self.token_in < 0).nonzero()[: len(missing), 0]
        self.token_in[slots] = missing
        self.slot_of[missing] = slots
        self.transfers.run(self.storage.read_ahead, missing, list(self.working_set))
        self.fetched = self.transfer(self.transfers.fetch, missing, slots, self.working_set)
        return True

    def transfer(
        self,
        job: Callable,
        ids: Tensor,
        slots: Tensor,
        on_device: dict[str, Tensor],
        tables: slice = slice(None),
    ) -> Future:
        """Fetch or write back tokens `ids` [n], in these slots of arrays on the device."""
        arrays = [(self.transfers.arrays[name], part) for name, part in on_device.items()]
        return self.transfers.run(job, ids, slots, tables, arrays, self.free)

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
            at = self.slot_of[changed]
            self.transfer(self.transfers.write_back, changed, at, self.working_set)
        self.token_in[leaves] = -1
        self.slot_of[leaving] = -1

    def record_free(self) -> None:
        """Make later transfers wait for all work queued on the compute stream so far (H2)."""
        self.free = torch.cuda.current_stream(self.device).record_event()

    @torch.inference_mode(False)  # the worker is never in that mode
    def new_slots(self, name: str, n: int) -> Tensor:
        """Room for n records of an array. Earlier kernels may still use this memory."""
        shape = len(self.weight), n, self.width
        slots = torch.empty(shape, dtype=self.storage.arrays[name].dtype, device=self.device)
        slots.record_stream(self.stream)  # no other owner before the last transfer's end
        self.record_free()
        return slots

    def grow(self, n: int) -> None:
        """Add n slots, and a quarter of all. The host waits for the worker."""
        n_old = len(self.token_in)
        n_slot = min(self.n_row, (n_old + n) * 5 // 4)
        self.wait_for(self.fetched)
        for name, old in self.working_set.items():
            new = self.new_slots(name, n_slot)
            new[:, :n_old] = old
            self.working_set[name] = new  # jobs under way have the old one
        self.token_in = F.pad(self.token_in, (0, n_slot - n_old), value=-1)
        self.record_free()

    def flush(self) -> None:
        self.settle()
        torch.cuda.current_stream(self.device).synchronize()  # decoding may still read

    def settle(self) -> None:
        """Evict all, and let the host wait until it is stored."""
        if (self.token_in >= 0).any():
            self.evict_except(self.announced[:0])
        self.transfers.finish()
