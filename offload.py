"""Tables kept away from the GPU that uses them: in RAM, or in files larger than RAM.

The host stores, the GPU computes. What a token owns, its rows of all tables side by side (and
likewise what the optimizer keeps for them), travels as a record. The records of the last batch stay
on the device, in the slots of a *working set*. Records that the next batch needs and the device
lacks are fetched during this batch's backward pass; only those that leave are written back:

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

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tables.storage import TableStorage
from tables.tables import StoredTables, send

# Pairs of a stored array [V, n_table, W] and its part of the working set, [n_slot, n_table, W].
Arrays: TypeAlias = list[tuple[Tensor, Tensor]]


class TransferRing:
    """A thread with a stream of its own that moves records through a few buffers in turn."""

    def __init__(self, device: torch.device, n_buffer: int, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.stream = torch.cuda.Stream(device)
        self.n_buffer = n_buffer
        buffers = []
        for _ in range(n_buffer):
            memory = torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=True)
            buffers.append((memory, torch.cuda.Event(blocking=True)))
        self.next_buffer = cycle(buffers)
        # All that the worker does on the GPU, it does on this stream.
        self.worker = ThreadPoolExecutor(
            1, initializer=torch.cuda.set_stream, initargs=(self.stream,)
        )
        self.last: Future = Future()  # of the last job
        self.last.set_result(None)

    def run(self, job: Callable, *args) -> Future:
        """Have the worker do a job after those before it. What ended an earlier one is raised
        again, as records may now belong to different steps."""
        previous = self.last

        def do() -> object:
            previous.result()
            return job(*args)

        self.last = self.worker.submit(do)
        return self.last

    def fetch(
        self, ids: Tensor, slots: Tensor, arrays: Arrays, free: torch.cuda.Event
    ) -> torch.cuda.Event:
        """Job: bring the records of tokens `ids` [n] to their slots [n] on the device, once the
        event `free` has come. Returns the event of their arrival."""
        self.stream.wait_event(free)  # H2
        slots = send(slots, self.stream.device)
        for stored, on_device in arrays:
            n = self.records_per_chunk(stored)
            for part, part_slots in zip(ids.split(n), slots.split(n), strict=True):
                staging, copied = self.next_staging(stored, len(part))
                copied.synchronize()  # H1
                torch.index_select(stored, 0, part, out=staging)
                records = staging.to(self.stream.device, non_blocking=True)
                on_device.index_copy_(0, part_slots, records)
                copied.record()
        arrived = torch.cuda.Event()
        arrived.record()
        return arrived

    def write_back(
        self, ids: Tensor, slots: Tensor, arrays: Arrays, free: torch.cuda.Event
    ) -> None:
        """Job: store the records of tokens `ids` [n] that are in slots [n] of the device."""
        self.stream.wait_event(free)  # H2
        slots = send(slots, self.stream.device)
        leaving: deque[tuple] = deque()  # what is being copied, at most a buffer each
        for stored, on_device in arrays:
            n = self.records_per_chunk(stored)
            for part, part_slots in zip(ids.split(n), slots.split(n), strict=True):
                if len(leaving) == self.n_buffer:
                    store(*leaving.popleft())  # it is in the memory of this chunk
                staging, copied = self.next_staging(stored, len(part))
                records = on_device.index_select(0, part_slots)
                staging.copy_(records, non_blocking=True)
                copied.record()
                leaving.append((stored, part, staging, copied))
        for chunk in leaving:
            store(*chunk)  # before anything more is fetched (H3)

    def records_per_chunk(self, stored: Tensor) -> int:
        return self.chunk_bytes // stored[0].nbytes

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
    of `chunk_bytes`, pinned. A token's record: absent -fetch_missing-> coming -wait_for_arrival->
    in its slot -updated-> dirty -evict_except-> absent."""

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
        # The working set: on the device [n_slot, n_table, W] of rows and, in training, maybe state.
        self.working_set = {"rows": self.new_slots(0, storage.arrays["rows"])}
        self.token_in = torch.empty(0, dtype=torch.int64)  # of each slot, -1: it is free
        self.slot_of = torch.full((self.n_row,), -1)  # of each token, -1: it has none
        self.n_used = 0  # slots that are not free
        self.coming = torch.zeros(self.n_row, dtype=torch.bool)  # fetched, not waited for
        self.dirty = torch.zeros(self.n_row, dtype=torch.bool)  # changed, not written back
        self.announced = torch.empty(0, dtype=torch.int64)  # tokens of the next batch
        self.arrival: Future = self.ring.run(torch.cuda.Event)  # of the latest fetch: none yet
        self.free = torch.cuda.Event()  # the compute stream is done with the free slots

    def add_state(self) -> list[Tensor]:
        self.flush()  # the slots of rows and state are the same: begin again without any
        super().add_state()
        for name, stored in self.storage.arrays.items():
            self.working_set[name] = self.new_slots(0, stored)
        self.token_in = self.token_in[:0]
        return self.state

    # --- reading ---

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        """As `Tables.lookup`. Rows are on their way when this returns. The iterator raises what
        went wrong in the worker."""
        ids = ids.cpu()
        training = self.in_training()
        if not training and ids.shape[1] == 1:
            return self.decode(ids)
        distinct, position = torch.unique(ids, return_inverse=True)  # [n], [B, T]
        # Evaluation keeps one batch. Rows that training read stay until they are updated.
        if not training and not self.n_read:
            self.evict_except(distinct)
        self.fetch_missing(distinct)
        if training:
            return self.read_once(distinct, position)
        return self.read(ids)

    def read(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the rows [B, T, W] of tokens [B, T]."""
        for table in range(len(self.weight)):
            slots = self.slots(ids)  # each time, as another lookup may have evicted some
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
        self.announced = torch.unique(ids.cpu())
        self.fetch_missing(self.announced)

    def slots(self, ids: Tensor) -> Tensor:
        self.fetch_missing(ids)
        if self.coming[ids].any():
            self.wait_for_arrival()
        return send(self.slot_of[ids], self.device)

    def rows(self, table: int) -> Tensor:
        return self.working_set["rows"][:, table]

    def states(self, table: int) -> Tensor:
        return self.working_set["state"][:, table]

    def updated(self, ids: Tensor) -> None:
        self.dirty[ids] = True
        self.evict_except(self.announced)
        self.announced = self.announced[:0]

    # --- the working set ---

    def fetch_missing(self, ids: Tensor) -> None:
        """Begin to fetch those of tokens `ids` that are not on the device."""
        if (ids < 0).any():
            raise IndexError("an id is negative")
        missing = torch.unique(ids[self.slot_of[ids] < 0])
        if len(missing) == 0:
            return
        self.n_used += len(missing)
        if self.n_used > len(self.token_in):
            self.grow()
        slots = (self.token_in < 0).nonzero()[: len(missing), 0]
        self.token_in[slots] = missing
        self.slot_of[missing] = slots
        self.coming[missing] = True
        self.ring.run(self.storage.read_ahead, missing, list(self.working_set))
        self.arrival = self.transfer(self.ring.fetch, missing)

    def transfer(self, job: Callable, ids: Tensor) -> Future:
        """Have the ring fetch or write back tokens `ids` [n]."""
        arrays = [(self.storage.arrays[name], part) for name, part in self.working_set.items()]
        return self.ring.run(job, ids, self.slot_of[ids], arrays, self.free)

    def wait_for_arrival(self) -> None:
        """Let the compute stream wait for all that was fetched, and the host for the worker."""
        torch.cuda.current_stream(self.device).wait_event(self.arrival.result())
        self.coming.fill_(False)

    def evict_except(self, ids: Tensor) -> None:
        """Evict all tokens but `ids`: write back those that changed, and free their slots."""
        self.record_free()
        leaving = self.token_in[~torch.isin(self.token_in, ids)]
        leaving = leaving[leaving >= 0]
        self.n_used -= len(leaving)
        changed = leaving[self.dirty[leaving]]
        if len(changed):
            self.dirty[changed] = False
            self.transfer(self.ring.write_back, changed)
        self.token_in[self.slot_of[leaving]] = -1
        self.slot_of[leaving] = -1

    def record_free(self) -> None:
        """Make later transfers wait for all work queued on the compute stream so far (H2)."""
        self.free = torch.cuda.Event()
        self.free.record(torch.cuda.current_stream(self.device))

    def new_slots(self, n_slot: int, like: Tensor) -> Tensor:
        """Room for records like those of an array. Earlier kernels may still use this memory."""
        slots = torch.empty(n_slot, *like.shape[1:], dtype=like.dtype, device=self.device)
        slots.record_stream(self.ring.stream)  # no other owner before the last transfer's end
        return slots

    @torch.inference_mode(False)  # training may use what evaluation made
    def grow(self) -> None:
        """Make room for the tokens in use, and a quarter more. The host waits for the worker."""
        n_old = len(self.token_in)
        n_slot = min(self.n_row, self.n_used + self.n_used // 4)
        self.wait_for_arrival()
        for name, old in self.working_set.items():
            new = self.new_slots(n_slot, old)
            new[:n_old] = old
            self.working_set[name] = new  # jobs under way have the old one
        self.token_in = F.pad(self.token_in, (0, n_slot - n_old), value=-1)
        self.record_free()

    def flush(self) -> None:
        if self.n_used:
            self.evict_except(self.announced[:0])
        self.ring.last.result()
