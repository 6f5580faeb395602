"""Tables kept away from the GPU that uses them: in RAM, or in files larger than RAM.

The host stores, the GPU computes. What a token owns, its rows of all tables side by side (and
likewise what the optimizer keeps for them), travels as a record. The records of a batch are on the
device, in the slots of a *working set*. What the next batch needs and the device lacks is fetched
during the backward pass; after the update, what the next batch does not need is written back:

    compute stream  | forward | backward          | update | forward ...
    side stream               |fetch|                      |write back|

How they travel depends on where they are stored:

    RAM      pinned arrays <--a kernel of the side stream, over the bus--> slots
    files    mapped files <--worker thread--> pinned staging <--copies of the side stream--> slots

A kernel reads and writes the host's memory where it is (*zero-copy*): the host only launches it.
Files cannot be pinned, so their records go in chunks through a ring of a few buffers. No earlier
step announces a prompt, so the first layer has to wait for its rows. To keep this short, the first
table comes alone, then two come together, then four.

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

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tables.storage import TableStorage
from tables.tables import StoredTables, send
from tables.zero_copy import Records, ZeroCopy, done, places, seen_by_gpu

NO_TOKENS = np.empty(0, np.int64)


class TransferRing:
    """A thread with a side stream that moves records through a few buffers in turn."""

    few_bytes = 8 << 20  # of rows that `OffloadedTables.lookup` reads by `read_few`
    n_buffer = 3  # at least two: while one is stored, another is filled

    def __init__(self, stream: torch.cuda.Stream, storage: TableStorage, chunk_bytes: int) -> None:
        self.stream = stream
        self.storage = storage
        self.chunk_bytes = chunk_bytes
        memory = torch.empty(self.n_buffer, chunk_bytes, dtype=torch.uint8, pin_memory=True)
        buffers = [(part, torch.cuda.Event(blocking=True)) for part in memory]
        self.next_buffer = cycle(buffers)
        # All that the worker does on the GPU, it does on this stream.
        self.worker = ThreadPoolExecutor(
            1, initializer=torch.cuda.set_stream, initargs=(self.stream,)
        )
        self.last = done(None)  # the last job

    def run(self, job: Callable, *args) -> Future:
        """Have the worker do a job after those before it. What ended an earlier one is raised
        again, as records may now belong to different steps."""
        previous = self.last

        def do() -> object:
            previous.result()
            return job(*args)

        self.last = self.worker.submit(do)
        return self.last

    def fetch(self, parts: list[slice], records: Records) -> list[Future]:
        """As `ZeroCopy.fetch`, by jobs of the worker."""
        self.run(self.storage.read_ahead, records.ids, list(records.on_device))
        return [self.run(self.do_fetch, tables, records) for tables in parts]

    def write_back(self, records: Records) -> None:
        """As `ZeroCopy.write_back`, by a job of the worker."""
        self.run(self.do_write_back, records)

    def do_fetch(self, tables: slice, records: Records) -> torch.cuda.Event:
        """Job: bring records of one part to the device. Returns the event of arrival."""
        for stored, part, on_device, at in self.chunks(tables, records):
            staging, copied = self.next_staging(stored, len(part))
            copied.synchronize()  # H1
            torch.index_select(stored, 0, part, out=staging)
            rows = staging.flatten(0, 1).to(self.stream.device, non_blocking=True)
            on_device.index_copy_(0, at, rows)
            copied.record()
        return self.stream.record_event()

    def do_write_back(self, records: Records) -> None:
        """Job: store records that are on the device."""
        before = None
        all_tables = slice(0, self.storage.shape[1])
        for stored, part, on_device, at in self.chunks(all_tables, records):
            staging, copied = self.next_staging(stored, len(part))
            staging.flatten(0, 1).copy_(on_device.index_select(0, at), non_blocking=True)
            copied.record()
            if before:
                store(*before)  # while this chunk is being copied, to another buffer
            before = (stored, part, staging, copied)
        store(*before)  # before anything more is fetched (H3)

    def chunks(self, tables: slice, records: Records) -> Iterator[tuple]:
        """Yield the records of one array after the other, as many tokens at a time as a buffer
        takes: the stored array [V, tables, W], the tokens [n], the array's slots on the device as a
        matrix [n_table * n_slot, W], and the places of these tokens in it [n * tables]."""
        ids, slots, on_device, free = records
        self.stream.wait_event(free)  # H2
        for name, numbers in on_device.items():
            stored = self.storage.arrays[name][:, tables]
            at = places(slots, numbers.shape[1], torch.arange(tables.start, tables.stop))
            at = send(at, self.stream.device)
            n = self.chunk_bytes // stored[0].nbytes
            for part, part_at in zip(ids.split(n), at.split(n), strict=True):
                yield stored, part, numbers.flatten(0, 1), part_at.flatten()

    def next_staging(self, stored: Tensor, n: int) -> tuple[Tensor, torch.cuda.Event]:
        """Pinned memory for n records [n, n_table, W] of an array, and the event of the last copy
        from or to it."""
        memory, copied = next(self.next_buffer)
        numbers = memory[: n * stored[0].nbytes].view(stored.dtype)
        return numbers.view(n, *stored.shape[1:]), copied

    def read(self, ids: Tensor) -> Tensor:
        """As `ZeroCopy.read`. So few records are sent directly, bypassing the ring."""
        return send(self.storage.arrays["rows"].index_select(0, ids), self.stream.device)

    def finish(self) -> None:
        """As `ZeroCopy.finish`. Raises what ended a job."""
        self.last.result()


def store(stored: Tensor, ids: Tensor, staging: Tensor, copied: torch.cuda.Event) -> None:
    """Put the records of tokens `ids`, once they are copied to staging, where they are stored."""
    copied.synchronize()  # H3
    stored.index_copy_(0, ids, staging)


class OffloadedTables(StoredTables):
    """All tables of a model in RAM or on disk, used by a GPU. In training, a token's record goes
    through these states again and again:

        absent       `fetch_missing` begins to fetch it
        coming       `wait_for` waits until it is there
        in its slot  `evict_except` writes it back and frees its slot

    chunk_bytes: of a buffer of the ring that moves files, and RAM that cannot be pinned."""

    def __init__(
        self, storage: TableStorage, device: torch.device | str, chunk_bytes: int = 8 << 20
    ) -> None:
        super().__init__(storage, device)
        self.record_bytes = 4 * len(self.weight) * self.width  # in bfloat16 it takes half of this
        self.chunk_bytes = max(chunk_bytes, self.record_bytes)  # a buffer must hold a record
        self.stream = torch.cuda.Stream(self.device)  # the side stream
        self.seen: dict[str, Tensor] = {}  # arrays in RAM, as the device sees them
        self.open_transfers()
        # The working set on the device: [n_table, n_slot, W] of rows and, if the optimizer keeps
        # one, of state. Tables come first: with --deterministic, PyTorch would write a table that
        # is strided back as a whole. `new_slots` also records the first `free` (H2).
        self.working_set = {"rows": self.new_slots("rows", 0)}
        # NumPy's: PyTorch takes several times as long for so few numbers, while the GPU waits.
        self.token_in = NO_TOKENS  # of each slot, -1: it is free
        self.slot_of = np.full(self.n_row, -1, np.int64)  # of each token, -1: it has none
        self.announced = NO_TOKENS  # of the next batch, which have slots already
        # Tokens whose arrival nobody has waited for. (Those of a step may be among them: evicted by
        # an evaluation or a save, they are announced again before their update.)
        self.coming = np.zeros(self.n_row, bool)
        self.fetched = done(torch.cuda.Event())  # arrival of the latest fetch; so far, none

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
            self.transfers = TransferRing(self.stream, self.storage, self.chunk_bytes)

    def add_state(self) -> list[Tensor]:
        self.flush()  # no slot has a row without its state
        if "state" in self.seen:  # of an earlier optimizer: the device goes on seeing this memory
            self.storage.arrays["state"].zero_()
        else:
            super().add_state()
            if isinstance(self.transfers, ZeroCopy):  # a ring moves any array
                self.open_transfers()
        self.working_set["state"] = self.new_slots("state", len(self.token_in))
        return self.state

    # --- reading ---

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        """As `Tables.lookup`. It, or its iterator, raises what went wrong in the worker."""
        ids = ids.cpu()
        if self.in_training():
            return self.read_once(ids)
        self.settle()  # what is stored must have the latest values
        if ids.numel() * self.record_bytes <= self.transfers.few_bytes:
            return self.read_few(ids)
        return self.read_many(ids)

    def read_few(self, ids: Tensor) -> Iterator[Tensor]:
        """Rows of a step of decoding, or of a short prompt, tokens [B, T], by the compute stream.
        To send equal rows twice takes less time than to find out which are equal."""
        self.check_range(ids)
        self.storage.read_ahead(ids)
        records = self.transfers.read(ids.flatten()).unflatten(0, ids.shape)  # [B, T, n_table, W]
        return iter(records.unbind(-2))  # [B, T, W] each

    def read_many(self, ids: Tensor) -> Iterator[Tensor]:
        """Rows of a prompt, or of evaluation, tokens [B, T]. They come a few tables at a time, so
        that a layer waits for its own."""
        distinct, position = self.distinct(ids)  # [n], [B, T]
        rows = self.new_slots("rows", len(distinct))
        parts = list(growing(len(self.weight)))
        slots = torch.arange(len(distinct))
        records = Records(distinct, slots, {"rows": rows}, self.free)
        arrivals = self.transfers.fetch(parts, records)
        return self.arrived(rows, parts, arrivals, send(position, self.device))

    def arrived(
        self, rows: Tensor, parts: list[slice], arrivals: list[Future], position: Tensor
    ) -> Iterator[Tensor]:
        """Yield the rows [B, T, W] of each table, once they are there."""
        for tables, arrival in zip(parts, arrivals, strict=True):
            self.wait_for(arrival)
            for table in rows[tables]:
                yield F.embedding(position, table)

    # --- training ---

    def prefetch(self, ids: Tensor) -> None:
        self.announced = self.distinct(ids)[0].numpy()
        self.fetch_missing(self.announced)

    def slots(self, ids: Tensor) -> Tensor:
        tokens = ids.numpy()
        self.fetch_missing(tokens)
        if self.coming[tokens].any():
            self.wait_for(self.fetched)
            self.coming[:] = False
        return send(torch.from_numpy(self.slot_of[tokens]), self.device)

    def rows(self, table: int) -> Tensor:
        return self.working_set["rows"][table]

    def states(self, table: int) -> Tensor:
        return self.working_set["state"][table]

    def updated(self) -> None:
        self.evict_except(self.announced)

    # --- the working set ---

    def fetch_missing(self, ids: np.ndarray) -> None:
        """Begin to fetch those of distinct tokens `ids` [n] that are not on the device."""
        missing = ids[self.slot_of[ids] < 0]
        if len(missing) == 0:
            return
        n_free = np.count_nonzero(self.token_in < 0)
        if n_free < len(missing):
            self.grow(len(missing) - n_free)
        slots = np.flatnonzero(self.token_in < 0)[: len(missing)]
        whole = slice(0, len(self.weight))  # all tables at once
        (self.fetched,) = self.transfers.fetch([whole], self.records(missing, slots))
        self.token_in[slots] = missing  # not before: to fetch may fail
        self.slot_of[missing] = slots
        self.coming[missing] = True

    def records(self, ids: np.ndarray, slots: np.ndarray) -> Records:
        """Those of tokens `ids` [n] in slots of the working set."""
        return Records(torch.from_numpy(ids), torch.from_numpy(slots), self.working_set, self.free)

    def wait_for(self, arrival: Future) -> None:
        """Let the compute stream wait for a fetch and those before, and the host for the worker."""
        torch.cuda.current_stream(self.device).wait_event(arrival.result())

    def evict_except(self, ids: np.ndarray) -> None:
        """Evict all tokens but `ids`: write them back, and free their slots. Nearly all of them
        have changed: the optimizer has just updated those of its batch."""
        self.record_free()
        leaving = self.token_in >= 0  # [n_slot]
        leaving[self.slot_of[ids]] = False
        slots = np.flatnonzero(leaving)
        tokens = self.token_in[slots]
        if len(tokens):
            self.transfers.write_back(self.records(tokens, slots))
        self.token_in[slots] = -1
        self.slot_of[tokens] = -1
        self.announced = NO_TOKENS  # they may have no slots by the next call

    def record_free(self) -> None:
        """Make later transfers wait for all work queued on the compute stream so far (H2)."""
        self.free = torch.cuda.current_stream(self.device).record_event()

    @torch.inference_mode(False)  # the worker is never in that mode
    def new_slots(self, name: str, n: int) -> Tensor:
        """Room for n records of an array."""
        shape = len(self.weight), n, self.width
        slots = torch.empty(shape, dtype=self.storage.arrays[name].dtype, device=self.device)
        slots.record_stream(self.stream)  # no other owner before the last transfer's end
        self.record_free()  # kernels before now may still use this memory
        return slots

    def grow(self, n: int) -> None:
        """Add n slots, and a quarter of all. The host waits for the worker."""
        n_old = len(self.token_in)
        n_slot = min(self.n_row, (n_old + n) * 5 // 4)
        self.wait_for(self.fetched)
        grown = {}
        for name, old in self.working_set.items():
            grown[name] = self.new_slots(name, n_slot)
            grown[name][:, :n_old] = old
        token_in = np.pad(self.token_in, (0, n_slot - n_old), constant_values=-1)
        self.record_free()
        self.working_set, self.token_in = grown, token_in  # jobs under way have the old slots

    def flush(self) -> None:
        self.settle()
        torch.cuda.current_stream(self.device).synchronize()  # decoding may still read

    def settle(self) -> None:
        """Evict all, and let the host wait until it is stored."""
        if (self.token_in >= 0).any():
            self.evict_except(NO_TOKENS)
        self.transfers.finish()


def growing(n_table: int) -> Iterator[slice]:
    """One table, two, four, ... of all."""
    start = 0
    while start < n_table:
        stop = min(2 * start + 1, n_table)
        yield slice(start, stop)
        start = stop
