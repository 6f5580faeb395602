"""Tables kept away from the GPU that uses them: in RAM, or in files larger than RAM.

The host stores, the GPU computes. What a token owns, its rows of all tables side by side (and
likewise what the optimizer keeps for them), travels as a record. The records of the last batch stay
on the device, in the slots of a *working set*. Records that the next batch needs and the device
lacks are fetched during this batch's backward pass; only those that leave are written back:

    compute stream  | forward | backward          | update | forward ...
    side stream               |copy|copy|                  |copy| write back
    worker thread          gather|gather|                       scatter|

    fetch:       stored arrays --worker--> pinned staging --side stream--> passage --> slots
    write back:  slots --> passage --side stream--> pinned staging --worker--> stored arrays

Records go in chunks through a ring of a few buffers. Three things could go wrong:

    H1  staging memory is refilled while a copy still reads it: Buffer.settle waits for the copy
    H2  slots are refilled while the compute stream still reads or updates them: each transfer waits
        for the event `free`, recorded on the compute stream when slots were last given back
    H3  records are fetched before their update is stored: one worker does one job after the other,
        and a write-back ends when all is stored
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tables.sharded import ShardedResident, ShardedStored, ShardedTables, columns_per_rank
from tables.storage import DiskStorage, RamStorage, TableStorage, check_room
from tables.tables import STREAMS, ResidentTables, StoredTables, Tables, send

# Pairs of a stored array [V, n_table, W] and its part of the working set, [n_slot, n_table, W].
Arrays: TypeAlias = list[tuple[Tensor, Tensor]]


class Buffer:
    """Room for a chunk of records on their way: pinned host memory (staging), and device memory
    (passage)."""

    def __init__(self, n_byte: int, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.staging = torch.empty(n_byte, dtype=torch.uint8, pin_memory=True)
        # Allocated and used on the side stream only, so stream order protects it.
        with torch.cuda.stream(stream):
            self.passage = torch.empty(n_byte, dtype=torch.uint8, device=stream.device)
        self.copied = torch.cuda.Event()
        # What came from the device and is not stored yet: the array, its tokens, their records.
        self.leaving: tuple[Tensor, Tensor, Tensor] | None = None

    def settle(self) -> None:
        """Prepare for reuse: wait for the last copy, and store what it brought back."""
        self.copied.synchronize()  # H1
        if self.leaving is not None:
            stored, ids, staging = self.leaving
            stored.index_copy_(0, ids, staging)
            self.leaving = None

    def fetch(self, stored: Tensor, ids: Tensor, device_array: Tensor, slots: Tensor) -> None:
        """Copy records `ids` [n] of a stored array to `slots` [n] of the device's."""
        self.settle()
        staging = records_in(self.staging, len(ids), stored)
        passage = records_in(self.passage, len(ids), stored)
        torch.index_select(stored, 0, ids, out=staging)
        with torch.cuda.stream(self.stream):  # the current stream is each thread's own
            passage.copy_(staging, non_blocking=True)
            device_array.index_copy_(0, slots, passage)
        self.record()

    def write_back(self, stored: Tensor, ids: Tensor, device_array: Tensor, slots: Tensor) -> None:
        """Copy records from the device to staging; `settle` stores them."""
        self.settle()
        staging = records_in(self.staging, len(ids), stored)
        passage = records_in(self.passage, len(ids), stored)
        with torch.cuda.stream(self.stream):
            torch.index_select(device_array, 0, slots, out=passage)
            staging.copy_(passage, non_blocking=True)
        self.record()
        self.leaving = (stored, ids, staging)

    def record(self) -> None:
        self.copied = torch.cuda.Event(
            blocking=True
        )  # a new event: whoever waits for the last one is not affected
        self.copied.record(self.stream)


def records_in(memory: Tensor, n: int, stored: Tensor) -> Tensor:
    """The first bytes of a buffer as n records like the stored ones: [n, n_table, W]."""
    n_byte = n * stored[0].nbytes
    return memory[:n_byte].view(stored.dtype).view(n, *stored.shape[1:])


class TransferRing:
    """A worker thread and a side stream that move records through a few buffers in turn."""

    def __init__(self, device: torch.device, n_buffer: int, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.stream = torch.cuda.Stream(device)
        self.buffers = [Buffer(chunk_bytes, self.stream) for _ in range(n_buffer)]
        self.next_buffer = cycle(self.buffers)
        # Each thread has a current device of its own, which is the first GPU unless it is set.
        gpu = self.stream.device
        self.worker = ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(gpu,))
        self.failure: BaseException | None = (
            None  # of a job; records may then belong to different steps
        )

    def run(self, job: Callable, *args) -> Future:
        """Have the worker do a job, after those before it."""
        return self.worker.submit(self.attempt, job, *args)

    def attempt(self, job: Callable, *args) -> object:
        """Worker: do a job. RuntimeError: it failed, or one before it."""
        try:
            if self.failure is None:
                return job(*args)
        except BaseException as error:  # whatever ends a job is reported to the main thread
            self.failure = error
        raise RuntimeError(f"a transfer failed: {self.failure!r}: continue from a checkpoint")

    def fetch(
        self, ids: Tensor, slots: Tensor, arrays: Arrays, free: torch.cuda.Event
    ) -> torch.cuda.Event:
        """Job: bring the records of tokens `ids` [n] to `slots` [n] of the working set, once the
        event `free` has come. Returns the event of their arrival."""
        self.stream.wait_event(free)  # H2
        for stored, device_array in arrays:
            for part, part_slots in self.chunks(ids, slots, stored):
                buffer = next(self.next_buffer)
                buffer.fetch(stored, part, device_array, part_slots)
        return buffer.copied

    def write_back(
        self, ids: Tensor, slots: Tensor, arrays: Arrays, free: torch.cuda.Event
    ) -> None:
        """Job: write records back, once the event `free` says that they were updated."""
        self.stream.wait_event(free)  # H2
        for stored, device_array in arrays:
            for part, part_slots in self.chunks(ids, slots, stored):
                next(self.next_buffer).write_back(stored, part, device_array, part_slots)
        for buffer in self.buffers:
            buffer.settle()  # all is stored before anything more is fetched (H3)

    def chunks(self, ids: Tensor, slots: Tensor, stored: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tokens and their slots, as many at a time as a buffer has room for."""
        n_token = self.chunk_bytes // stored[0].nbytes
        return zip(ids.split(n_token), slots.split(n_token), strict=True)

    def synchronize(self) -> None:
        """Wait until all transfers are done. RuntimeError: one failed."""
        self.run(self.stream.synchronize).result()


class OffloadedTables(StoredTables):
    """All tables of a model in RAM or on disk, used by a GPU through a ring of `n_buffer` buffers
    of `chunk_bytes` (pinned, and as much on the device)."""

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
        self.announced: Tensor | None = None  # tokens of the next batch, by `prefetch`
        self.arrival: Future | None = None  # of the latest fetch
        self.turn = 0  # counts evictions: rows that were looked up before may be gone
        # The working set: on the device [n_slot, n_table, W] of rows and, in training, maybe state.
        self.working_set = {"rows": self.new_slots(0, storage.arrays["rows"])}
        self.resident_ids = torch.empty(0, dtype=torch.int64)  # tokens in it
        self.free_slots = torch.empty(0, dtype=torch.int64)
        self.free = torch.cuda.Event()  # the compute stream is done with the free slots
        # Of each token:
        self.slot_of = torch.full((self.vocab_size,), -1)  # -1: it is not in the working set
        self.coming = torch.zeros(self.vocab_size, dtype=torch.bool)  # fetched, not waited for
        self.dirty = torch.zeros(self.vocab_size, dtype=torch.bool)  # changed, not written back

    def add_state(self) -> list[Tensor]:
        self.flush()  # the slots of rows and state are the same
        super().add_state()
        n_slot = len(self.working_set["rows"])
        self.working_set["state"] = self.new_slots(n_slot, self.storage.arrays["state"])
        return self.state

    # --- reading ---

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        """As `Tables.lookup`. Rows are on their way when this returns. The iterator raises
        RuntimeError if the worker failed."""
        ids = ids.cpu()
        training = self.in_training()
        if not training and ids.shape[-1] == 1:
            return self.decode(ids)
        distinct, position = self.distinct(ids)
        # Rows that were read stay until they are updated, and announced ones until they are read.
        if not self.reads and self.announced is None:
            self.evict_except(distinct)
        self.announced = None
        self.fetch_missing(distinct)
        if training:
            return self.read_once(distinct, position)
        return self.read(ids, self.turn)

    def distinct(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct ids [n] on the CPU, and the position among them of each of ids."""
        distinct, position = torch.unique(ids.cpu(), return_inverse=True)
        if len(distinct) and not 0 <= distinct[0] <= distinct[-1] < self.vocab_size:
            raise IndexError(f"an id is not one of the tables' rows 0 to {self.vocab_size - 1}")
        return distinct, position

    def read(self, ids: Tensor, turn: int) -> Iterator[Tensor]:
        """Yield the rows [B, T, W] of tokens [B, T] that are in the working set."""
        lost = "another lookup evicted these rows: read all rows of a lookup before the next one"
        assert turn == self.turn, lost
        index = self.index(ids)
        for table in range(len(self.weight)):
            assert turn == self.turn, lost
            yield F.embedding(index, self.rows(table))

    def decode(self, ids: Tensor) -> Iterator[Tensor]:
        """Rows of tokens [B, 1]. So few records are sent directly, bypassing ring and worker."""
        if len(self.resident_ids) or self.ring.failure:
            self.flush()  # the storage must have their latest values
        ids = ids.flatten()
        self.storage.read_ahead(ids)
        rows = send(self.storage.arrays["rows"].index_select(0, ids), self.device)
        return iter(rows[:, None].unbind(2))  # [B, 1, n_table, W] -> [B, 1, W] each

    # --- training ---

    def prefetch(self, ids: Tensor) -> None:
        self.announced, _ = self.distinct(ids)
        self.fetch_missing(self.announced)

    def index(self, ids: Tensor) -> Tensor:
        self.fetch_missing(ids)
        if self.coming[ids].any():
            self.wait_for_arrival()
        return send(self.slot_of[ids], self.device)

    def rows(self, table: int) -> Tensor:
        return self.working_set["rows"][:, table]

    def states(self, table: int) -> Tensor:
        return self.working_set["state"][:, table]

    def mark_dirty(self, ids: Tensor) -> None:
        self.dirty[ids] = True
        if self.announced is not None:
            self.evict_except(self.announced)

    # --- the working set ---

    def fetch_missing(self, ids: Tensor) -> None:
        """Begin to fetch those of distinct tokens `ids` [n] that are not on the device."""
        missing = ids[self.slot_of[ids] < 0]
        n = len(missing)
        if n == 0:
            return
        if n > len(self.free_slots):
            self.grow(len(self.resident_ids) + n)
        self.slot_of[missing] = self.free_slots[:n]
        self.free_slots = self.free_slots[n:]
        self.coming[missing] = True
        self.resident_ids = torch.cat([self.resident_ids, missing])
        self.ring.run(self.storage.read_ahead, missing, list(self.working_set))
        self.arrival = self.transfer(self.ring.fetch, missing)

    def transfer(self, job: Callable, ids: Tensor) -> Future:
        """Have the ring fetch or write back tokens `ids` [n]."""
        with torch.cuda.stream(self.ring.stream):  # which alone will read it
            slots = send(self.slot_of[ids], self.device)
        arrays = [(self.storage.arrays[name], part) for name, part in self.working_set.items()]
        return self.ring.run(job, ids, slots, arrays, self.free)

    def wait_for_arrival(self) -> None:
        """Let the compute stream wait for all that was fetched, and the host for the worker."""
        if self.arrival is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrival.result())
        self.coming.fill_(False)

    def evict_except(self, ids: Tensor) -> None:
        """Evict all tokens but `ids`: write back those that changed, and free their slots."""
        stays = torch.isin(self.resident_ids, ids, assume_unique=True)
        leaving = self.resident_ids[~stays]
        self.resident_ids = self.resident_ids[stays]
        self.turn += 1
        self.record_free()
        changed = leaving[self.dirty[leaving]]
        if len(changed):
            self.dirty[changed] = False
            self.transfer(self.ring.write_back, changed)
        self.free_slots = torch.cat([self.free_slots, self.slot_of[leaving]])
        self.slot_of[leaving] = -1

    def record_free(self) -> None:
        """Make later transfers wait for all work queued on the compute stream so far (H2)."""
        self.free = torch.cuda.Event()
        self.free.record(torch.cuda.current_stream(self.device))

    def new_slots(self, n_slot: int, like: Tensor) -> Tensor:
        """Room for records like those of an array. Earlier kernels may still use this memory."""
        with torch.inference_mode(False):  # training may use what evaluation made
            slots = torch.empty(n_slot, *like.shape[1:], dtype=like.dtype, device=self.device)
        slots.record_stream(self.ring.stream)  # no other owner before the last transfer's end
        return slots

    def grow(self, need: int) -> None:
        """Make room for so many tokens, and a quarter more. The host waits for the worker."""
        n_slot = min(self.vocab_size, need + need // 4)
        n_old = len(self.working_set["rows"])
        self.wait_for_arrival()
        for name, old in self.working_set.items():
            new = self.new_slots(n_slot, old)
            new[:n_old] = old
            self.working_set[name] = new  # jobs under way have the old one
        self.free_slots = torch.cat([self.free_slots, torch.arange(n_old, n_slot)])
        self.record_free()

    def flush(self) -> None:
        self.evict_except(self.resident_ids[:0])
        self.announced = None
        self.ring.synchronize()


class ShardedOffloaded(ShardedTables, OffloadedTables):
    """This rank's columns of offloaded tables."""


def make_tables(offload: str, device, dtype, *, live=None, saved=None, fresh=False) -> Callable:
    """Returns a function of (n_table, vocab_size, width) that makes the tables of a `Decoder`, used
    on `device`, stored where `offload` says; with several ranks, this rank's columns. It raises
    UserError if there is no room.

    Args:
        live: None except in training: then the folder for tables on disk, a new one.
        saved: the DiskStorage of a checkpoint; without training it is read in place.
        fresh: whether rows are yet to be drawn, not loaded.
    """
    training = live is not None
    far = offload != "none" and device.type in STREAMS
    on_disk = offload == "disk" and (training or saved is not None)
    sharded = torch.distributed.is_initialized()

    def make(n_table: int, vocab_size: int, width: int) -> Tables:
        width = columns_per_rank(width)
        shape = (vocab_size, n_table, width)
        if n_table == 0 or not (on_disk or far):
            if device.type == "cpu" and offload != "disk":
                check_room(math.prod(shape) * dtype.itemsize)
            kind = ShardedResident if sharded else ResidentTables
            tables = kind(n_table, vocab_size, width, dtype)
        else:
            with torch.device("cpu"):  # whatever device the rest of the model is made on
                if on_disk and training:
                    # Room for the live tables, a snapshot (a resumed run has it), and the next one.
                    storage = DiskStorage.create(live, shape, dtype, copies=2 if saved else 3)
                elif on_disk:
                    storage = saved
                else:
                    storage = RamStorage(shape, dtype)
                storage.fresh = fresh
                if far:
                    kind = ShardedOffloaded if sharded else OffloadedTables
                else:
                    kind = ShardedStored if sharded else StoredTables
                tables = kind(storage, device)
        tables.autocast = True
        return tables

    return make
