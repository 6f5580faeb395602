"""Tables far from the GPU that calculates with them: in RAM, or in files larger than RAM.

Rows go through a ring of buffers on a side stream, beside the compute stream (docs/offloading.md):

    side stream     |fetch 0|fetch 1|fetch 2|       |fetch 3|       |fetch 4|
    compute         | embedding |layer with 0 |layer with 1 |layer with 2 |layer with 3 ...
                                 ^ buffer 0 is free as soon as its rows are expanded to [B, T, W],
                                   so table 3 can follow in it (here: 3 buffers)

In training, rows and moments of the last batch stay on the device, in slots of a working set, and
only what enters or leaves it is transferred. A buffer is filled by a kernel that reads pinned RAM
over the bus (*direct*), or else by a worker thread with pinned staging memory (*staged*). Hazards:

    H1  staging memory is refilled while the side stream still copies it: Buffer.wait_staging
    H2  a buffer or a slot is refilled while the compute stream still reads it: Buffer.free,
        OffloadedTables.after_compute
    H3  rows are fetched before their update is written back: other rows come than leave, and all
        transfers happen in one order, TransferRing.run and wait_staging
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from tables.sharded import ShardedResident, ShardedStored, ShardedTables, columns_per_rank
from tables.storage import DiskStorage, RamStorage, TableStorage, check_room
from tables.tables import STREAMS, ResidentTables, StoredTables, Tables, send


class Buffer:
    """Device memory for rows on their way and, if a worker fills it, pinned memory beside it."""

    def __init__(self, n_byte: int, ring: "TransferRing") -> None:
        with torch.inference_mode(False):  # what decoding allocates, training may use
            self.memory = torch.empty(n_byte, dtype=torch.uint8, device=ring.device)
            if ring.worker:
                self.staging = torch.empty(n_byte, dtype=torch.uint8, pin_memory=True)
        # Not to be handed out again before the last copy has ended. (Pinned memory never is.)
        self.memory.record_stream(ring.stream)
        # ready: the side stream is done with it; free: the compute stream is.
        self.ready, self.free = torch.cuda.Event(), torch.cuda.Event()
        # The allocator hands out memory that kernels queued earlier may still use.
        self.free.record(torch.cuda.current_stream(ring.device))
        self.scatter: Callable[[], object] = lambda: None  # staged rows to where they are stored

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """A new event each time: whoever has the one before does not wait for this, too."""
        self.ready = torch.cuda.Event(blocking=True)
        self.ready.record(stream)
        return self.ready

    def wait_staging(self) -> None:
        self.ready.synchronize()  # before staging memory is used again (H1)
        self.scatter()  # before what went out comes in (H3)
        self.scatter = lambda: None


def rows_in(memory: Tensor, n: int, like: Tensor) -> Tensor:
    """Bytes of a buffer as rows [n, ..] like those of a table."""
    size = n * like.shape[1] * like.element_size()
    return memory[:size].view(like.dtype).view(n, like.shape[1])


class TransferRing:
    """Buffers, and the side stream on which rows go through them, all in one order."""

    def __init__(self, device: torch.device, n_buffer: int, staged: bool) -> None:
        self.device, self.n_buffer = device, n_buffer
        self.stream = torch.cuda.Stream(device)
        self.worker = ThreadPoolExecutor(1) if staged else None
        self.failure: BaseException | None = None  # of a job: rows are half-way between steps
        self.buffers: deque[Buffer] = deque()
        self.turn = 0  # counts the users of the buffers, of whom each takes them from the last

    def run(self, job: Callable, *args) -> object:
        return self.worker.submit(self.attempt, job, *args) if self.worker else job(*args)

    def attempt(self, job: Callable, *args) -> object:
        """Worker: do a job. RuntimeError: it failed, or one before it."""
        try:
            if self.failure is None:
                return job(*args)
        except BaseException as error:  # whatever ends a job, the main thread hears of it
            self.failure = error
        raise RuntimeError(f"a transfer failed: {self.failure!r}: go on from a checkpoint")

    def next_buffer(self, n_byte: int) -> Buffer:
        """Addresses stay, unless rows need more bytes than any before."""
        if not self.buffers or len(self.buffers[0].memory) < n_byte:
            self.buffers = deque(Buffer(n_byte, self) for _ in range(self.n_buffer))
        self.buffers.rotate(-1)
        return self.buffers[-1]

    def host_index(self, ids: Tensor) -> Tensor:
        """Ids of stored rows, where `fetch` and `write_back` want them."""
        return ids if self.worker else self.device_index(ids)

    def device_index(self, index: Tensor) -> Tensor:
        """An index on the device, for the side stream."""
        if index.device.type == self.device.type:
            index.record_stream(self.stream)  # its owner may let go of it before it is read
            return index
        with torch.cuda.stream(self.stream):
            return send(index, self.device)

    @torch.no_grad()
    def fetch(self, buffer: Buffer, host: Tensor, ids: Tensor, device=None, slots=None):
        """Job: bring rows `ids` [n] of `host` [V, ..] to a buffer and maybe on to `slots` [n] of
        `device`. Returns the event of their arrival."""
        rows = rows_in(buffer.memory, len(ids), host)
        if self.worker:
            buffer.wait_staging()
            staged = rows_in(buffer.staging, len(ids), host)
            torch.index_select(host, 0, ids, out=staged)
        with torch.cuda.stream(self.stream):  # the current stream is each thread's own
            self.stream.wait_event(buffer.free)  # H2
            if self.worker:
                rows.copy_(staged, non_blocking=True)
            else:
                torch.index_select(host, 0, ids, out=rows)
            if device is not None:
                device.index_copy_(0, slots, rows)
            return buffer.record(self.stream)

    @torch.no_grad()
    def write_back(self, buffer: Buffer, host: Tensor, ids: Tensor, device: Tensor, slots: Tensor):
        """Job: take rows from `slots` [n] of `device` to rows `ids` [n] of `host` [V, ..]."""
        rows = rows_in(buffer.memory, len(ids), host)
        if self.worker:
            buffer.wait_staging()
        with torch.cuda.stream(self.stream):
            torch.index_select(device, 0, slots, out=rows)
            if self.worker:
                staged = rows_in(buffer.staging, len(ids), host)
                staged.copy_(rows, non_blocking=True)
                buffer.scatter = partial(host.index_copy_, 0, ids, staged)
            else:
                host.index_copy_(0, ids, rows)
            buffer.record(self.stream)

    def wait_staging(self) -> object:
        """See that what was written back is there before anything more is fetched (H3)."""
        waits = [buffer.wait_staging for buffer in self.buffers if self.worker]
        return self.run(lambda: [wait() for wait in waits])

    def synchronize(self) -> None:
        """Wait until all that was queued is done."""
        result_of(self.wait_staging())
        self.stream.synchronize()


def result_of(job: object) -> object:
    """What a job returned, once the worker has done it."""
    return job.result() if isinstance(job, Future) else job


class OffloadedTables(StoredTables):
    """All tables of a model in RAM or on disk, used by a GPU through a ring of `n_buffer`."""

    def __init__(self, storage: TableStorage, device: torch.device | str, n_buffer: int = 3):
        super().__init__(storage, device)
        seen = None if self.on_disk else storage.on_gpu(self.device)
        self.ring = TransferRing(self.device, n_buffer, staged=seen is None)
        arrays = seen or [array for array in storage.arrays.values() if array.dim() == 3]
        # Rows, m and v, each [V, W] for every table; and all rows as one matrix [V, n_table * W].
        self.host_rows, self.whole = [array.unbind(1) for array in arrays], arrays[0].flatten(1)
        self.for_decoding: Buffer | None = None
        # The working set: the same [slots, W] for each table, none before the first step.
        self.device_rows = [[t[:0].to(self.device) for t in tables] for tables in self.host_rows]
        self.slot_of = torch.full((self.vocab_size,), -1)  # of each token; -1: it is not there
        self.dirty = torch.zeros(self.vocab_size, dtype=torch.bool)  # changed, not written back
        self.resident_ids = self.free_slots = torch.empty(0, dtype=torch.int64)
        self.announced: Tensor | None = None  # tokens of the next batch, by `prefetch`
        # The jobs that fetch rows of each table, and at last the moments of all.
        self.jobs: list[object] = [None] * (len(self.weight) + 1)

    # --- reading ---

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        """As `Tables.lookup`. What can be fetched ahead is under way when this returns. `ids` of a
        decoding step, [B, 1], may be on the device. The iterator raises RuntimeError if the worker
        failed."""
        if self.in_training():
            distinct, position = self.distinct(ids)
            if not self.reads and self.announced is None:  # the first of a step, unannounced
                self.evict_except(distinct)
            self.announced = None
            self.prefetch_missing(distinct)
            return self.read_once(distinct, position)
        self.write_back(self.resident_ids)
        self.ring.turn += 1
        return self.read(ids)

    def distinct(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct ids [n] on the CPU, and the position among them of each of ids."""
        distinct, position = torch.unique(ids.cpu(), return_inverse=True)
        if len(distinct) and not 0 <= distinct[0] <= distinct[-1] < self.vocab_size:
            raise IndexError(f"an id is not one of the tables' rows 0 to {self.vocab_size - 1}")
        return distinct, position

    def read(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the rows of tokens [B, T], fetched each once, table after table. Of tokens [B, 1]
        one kernel fetches all that they own, as it lies side by side, and nobody looks whether they
        are distinct: in direct mode the host does not wait to know them."""
        if self.ring.worker:
            ids = ids.cpu()
        if ids.shape[-1] == 1:
            if ids.device.type == "cpu":
                self.distinct(ids)  # are they in range?
            wanted, sources, buffer_of = ids.reshape(-1), [self.whole], self.decoding_buffer
            position = torch.arange(len(wanted), device=self.device).view(ids.shape)
        else:
            wanted, position = self.distinct(ids)
            sources, buffer_of = self.host_rows[0], self.ring.next_buffer
            position = send(position, self.device)
        self.storage.read_ahead(wanted)
        n, turn, wanted = len(wanted), self.ring.turn, self.ring.host_index(wanted)

        def request(source: Tensor) -> tuple[Tensor, Buffer, object]:
            buffer = buffer_of(n * source.shape[1] * source.element_size())
            return source, buffer, self.ring.run(self.ring.fetch, buffer, source, wanted)

        def receive() -> Iterator[Tensor]:
            while requested:
                assert self.ring.turn == turn, "this lookup lost its buffers to another one"
                source, buffer, job = requested.popleft()
                self.wait(job)
                rows = rows_in(buffer.memory, n, source)  # [n, W], or [n, n_table * W]
                rows = F.embedding(position, rows)  # [B, T, W], ...
                buffer.free.record(torch.cuda.current_stream(self.device))
                requested.extend(islice(requests, 1))
                yield from rows.unflatten(-1, (-1, self.width)).unbind(-2)  # [B, T, W] each

        requests = map(request, sources)  # each is made when it is asked for
        requested = deque(islice(requests, self.ring.n_buffer))
        return receive()

    def decoding_buffer(self, n_byte: int) -> Buffer:
        """One for itself, as a CUDA graph keeps its address. Transfers wait for its readers."""
        if self.for_decoding is None or len(self.for_decoding.memory) < n_byte:
            self.for_decoding = Buffer(n_byte, self.ring)
        self.for_decoding.free.record(torch.cuda.current_stream(self.device))
        return self.for_decoding

    def wait(self, job: object) -> None:
        if arrival := result_of(job):
            torch.cuda.current_stream(self.device).wait_event(arrival)

    # --- training ---

    def prefetch(self, ids: Tensor) -> None:
        self.announced, _ = self.distinct(ids)
        self.prefetch_missing(self.announced)

    def index(self, ids: Tensor) -> Tensor:
        self.prefetch_missing(ids)
        return send(self.slot_of[ids], self.device)

    def rows(self, table: int) -> Tensor:
        self.wait(self.jobs[table])
        return self.device_rows[0][table]

    def moments(self, table: int) -> tuple[Tensor, Tensor]:
        self.wait(self.jobs[-1])
        return self.device_rows[1][table], self.device_rows[2][table]

    def mark_dirty(self, ids: Tensor) -> None:
        self.dirty[ids] = True
        if self.announced is not None:
            self.evict_except(self.announced)

    def prefetch_missing(self, ids: Tensor) -> None:
        missing = ids[self.slot_of[ids] < 0]
        if not len(missing):
            return
        if len(missing) > len(self.free_slots):
            self.grow(len(self.resident_ids) + len(missing))
        slots, self.free_slots = self.free_slots.tensor_split([len(missing)])
        self.slot_of[missing], self.resident_ids = slots, torch.cat([self.resident_ids, missing])
        self.ring.run(self.storage.read_ahead, missing, ("rows", "m", "v"))
        slots, missing = self.ring.device_index(slots), self.ring.host_index(missing)
        for buffer, host, device, number in self.transfers(len(missing)):
            job = (self.ring.fetch, buffer, host, missing, device, slots)
            self.jobs[number] = self.ring.run(*job)

    def evict_except(self, ids: Tensor) -> None:
        """Write back what has changed of other tokens than `ids`, and free their slots."""
        stays = torch.isin(self.resident_ids, ids, assume_unique=True)
        leaving, self.resident_ids = self.resident_ids[~stays], self.resident_ids[stays]
        self.write_back(leaving)
        self.after_compute()
        self.free_slots = torch.cat([self.free_slots, self.slot_of[leaving]])
        self.slot_of[leaving] = -1

    def after_compute(self) -> None:
        """Let transfers wait until the compute stream has done what is queued so far (H2)."""
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        self.ring.run(self.ring.stream.wait_event, done)

    def write_back(self, ids: Tensor) -> None:
        ids = ids[self.dirty[ids]]  # [n]
        if len(ids):
            transfers = list(self.transfers(len(ids)))
            self.after_compute()  # of what reads the buffers, too
            self.dirty[ids] = False
            slots, ids = self.ring.device_index(self.slot_of[ids]), self.ring.host_index(ids)
            for buffer, host, device, _ in transfers:
                self.ring.run(self.ring.write_back, buffer, host, ids, device, slots)
            self.ring.wait_staging()

    def transfers(self, n: int) -> Iterator[tuple[Buffer, Tensor, Tensor, int]]:
        """For rows, m and v of n tokens: a buffer, where they are, and the number of the job."""
        self.ring.turn += 1
        for kind, pairs in enumerate(zip(self.host_rows, self.device_rows, strict=True)):
            for table, (host, device) in enumerate(zip(*pairs, strict=True)):
                buffer = self.ring.next_buffer(n * self.width * 4)  # at most: rows may be bfloat16
                yield buffer, host, device, -1 if kind else table

    def grow(self, need: int) -> None:
        """Make room for so many tokens, and some more. Here the host waits."""
        n_slot = min(self.vocab_size, need + need // 4)
        self.ring.synchronize()
        for tables in self.device_rows:
            for table, old in enumerate(tables):
                tables[table] = torch.cat([old, old.new_empty(n_slot - len(old), self.width)])
                tables[table].record_stream(self.ring.stream)
        self.free_slots = torch.cat([self.free_slots, torch.arange(len(old), n_slot)])
        self.after_compute()  # it may still use what this memory was

    def flush(self) -> None:
        self.evict_except(self.resident_ids[:0])
        self.ring.synchronize()
        self.announced = None


class ShardedOffloaded(ShardedTables, OffloadedTables):
    """This rank's columns of offloaded tables."""


def make_tables(offload: str, device, dtype, *, live=None, saved=None, fresh=False) -> Callable:
    """What makes the tables of a `Decoder`, used on `device` and stored where `offload` says: a
    function of (n_table, V, W), which raises UserError where there is no room. With several ranks
    they are this rank's columns.

    Args:
        live: for training, the path of a new folder, for tables on disk.
        saved: DiskStorage of a checkpoint, which is read in place without training.
        fresh: whether rows are to be drawn, not loaded.
    """
    training, far = live is not None, offload != "none" and device.type in STREAMS
    on_disk = offload == "disk" and (training or saved is not None)

    def make(n_table: int, vocab_size: int, width: int) -> Tables:
        width = columns_per_rank(width)
        shape = (vocab_size, n_table, width)
        sharded = torch.distributed.is_initialized()
        if n_table and on_disk and training:
            # The live one, a snapshot (a run that resumes has it), and the next one before it goes.
            check_room(shape, dtype, training, live.parent, copies=2 if saved else 3)
        elif not on_disk and (far or (offload != "disk" and device.type == "cpu")):
            check_room(shape, dtype, training)
        if not n_table or not (on_disk or far):
            kind = ShardedResident if sharded else ResidentTables
            return kind(n_table, vocab_size, width, dtype)
        with torch.device("cpu"):  # whatever device the rest of the model is made on
            if on_disk:
                storage = DiskStorage.create(live, shape, dtype) if training else saved
            else:
                storage = RamStorage(shape, dtype, training=training)
            storage.fresh = fresh
            if far:
                kind = ShardedOffloaded if sharded else OffloadedTables
            else:
                kind = ShardedStored if sharded else StoredTables
            return kind(storage, device)

    return make
