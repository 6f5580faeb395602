"""The parts of the prefetch ring: a worker thread, slots, and gradients on their way back.

Three hazards lurk wherever copies overlap compute. Their guards are in this file and offload.py:

    H1  the worker refills a host buffer that is still being copied to the GPU  (CudaSlot.reclaim)
    H2  a copy overwrites a GPU buffer that a kernel is still reading           (CudaSlot.guard)
    H3  rows are read ahead of the update that changes them                (OffloadedTables.settle)

What CUDA promises and this file relies on: work in one stream runs in order; an event that was
recorded in a stream is reached when all work before it is done; waiting for an event that was never
recorded returns at once. So an event must be recorded before anybody is sent to wait for it, which
is why the main thread first waits for the worker's job, and only then lets its stream wait.
"""

import queue
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import torch
from torch import Tensor

from tablefile import TableError, gib

PATIENCE = 600.0  # seconds after which a job that has not ended counts as hung


class Worker:
    """A background thread that runs jobs one after another. PyTorch lets other threads run while an
    operation computes or copies, so gathers overlap with what the main thread does."""

    def __init__(self) -> None:
        self.jobs, self.thread = queue.SimpleQueue(), None

    def submit(self, job: Callable, *args) -> Future:
        if self.thread is None:
            # A daemon, so that a disk that hangs does not keep the program from ending.
            self.thread = threading.Thread(target=work, args=(self.jobs,), daemon=True)
            self.thread.start()
            weakref.finalize(self, stop, self.jobs, self.thread)
        future = Future()
        self.jobs.put((future, job, args))
        return future


def at_once(job: Callable, *args) -> None:
    """What `Worker.submit` is where nothing could go on meanwhile."""
    job(*args)


def stop(jobs: queue.SimpleQueue, thread: threading.Thread) -> None:
    """End a worker whose tables go, or when the program ends: the interpreter aborts if it shuts
    down while a thread is inside PyTorch."""
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(10.0)


def work(jobs: queue.SimpleQueue) -> None:
    for future, job, args in iter(jobs.get, None):
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(job(*args))
        except BaseException as error:  # whatever ends a job, the main thread hears of it
            future.set_exception(error)
        del future, job, args  # else an idle worker would keep the tables alive


def outcome(future: Future, what: str) -> None:
    """Wait for a job.

    Raises:
        RuntimeError: it failed, or takes longer than PATIENCE.
    """
    try:
        error = future.exception(PATIENCE)
    except FutureTimeout:
        raise RuntimeError(
            f"{what} has not ended after {PATIENCE:.0f} s: does the disk hang?"
        ) from None
    if error is not None:
        raise RuntimeError(f"{what} failed: {error!r}") from error


class Slot:
    """A buffer that the worker fills and a layer reads. Without a GPU that is all: the two take
    turns anyway, since a refill is ordered only after the rows were expanded."""

    def __init__(self, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.host, self.device = torch.empty(numbers, dtype=dtype), device

    def reclaim(self) -> None:
        """Before the worker writes to `host`."""

    def send(self, numbers: int) -> None:
        """After the worker wrote to `host`."""

    def receive(self, numbers: int) -> Tensor:
        """Before the rows are read, which is then possible on the compute device."""
        return self.host[:numbers].to(self.device)

    def release(self) -> None:
        """After the last read has been queued."""


class CudaSlot(Slot):
    """A pinned host buffer and a GPU buffer, with an event for each way of waiting."""

    def __init__(
        self, numbers: int, dtype: torch.dtype, device: torch.device, stream: torch.cuda.Stream
    ) -> None:
        self.host = pinned(numbers, dtype)
        self.buffer = torch.empty(numbers, dtype=dtype, device=device)
        # Not to be handed out anew before the last copy has ended. (Pinned memory never is.)
        self.buffer.record_stream(stream)
        self.stream, self.device = stream, device
        self.copied, self.freed = torch.cuda.Event(), torch.cuda.Event()
        # The allocator hands out memory that kernels queued earlier may still use: the side stream
        # has to wait for them, too.
        self.release()

    def reclaim(self) -> None:
        self.copied.synchronize()  # H1: the host waits

    def guard(self) -> None:
        self.stream.wait_event(self.freed)  # H2: the side stream waits, the host does not

    def send(self, numbers: int) -> None:
        with torch.cuda.stream(self.stream):  # the current stream is each thread's own
            self.guard()
            self.buffer[:numbers].copy_(self.host[:numbers], non_blocking=True)
            self.copied.record(self.stream)

    def receive(self, numbers: int) -> Tensor:
        torch.cuda.current_stream(self.device).wait_event(self.copied)
        return self.buffer[:numbers]

    def release(self) -> None:
        self.freed.record(torch.cuda.current_stream(self.device))


class CudaGradients:
    """Brings the gradients of a step to the host in a stream of their own. Nobody waits here."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.host, self.copies, self.arrived = torch.empty(0), torch.empty(0), []

    def take(self, grads: list[Tensor]) -> None:
        """Main thread: order the copies of these gradients [n, W], one per table, which what is
        queued so far computes. Nobody may need those of the step before any more."""
        ready, need = torch.cuda.Event(), sum(grad.numel() for grad in grads)
        ready.record(torch.cuda.current_stream(self.device))
        if need > self.host.numel():
            room = need + need // 8  # other batches have a few rows more
            self.host = pinned(room, torch.float32, "--batch_size or --block_size")
        self.copies = self.host[:need].view(len(grads), *grads[0].shape)  # [n_table, n, W]
        self.arrived = [torch.cuda.Event() for _ in grads]
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            for grad, copy, arrived in zip(grads, self.copies, self.arrived, strict=True):
                copy.copy_(grad, non_blocking=True)
                grad.record_stream(self.stream)  # not to be handed out anew before
                arrived.record(self.stream)

    def get(self, table: int) -> Tensor:
        """Worker: the gradient of a table on the host, valid until the next `take`."""
        self.arrived[table].synchronize()
        return self.copies[table]


def pinned(
    numbers: int, dtype: torch.dtype, lower: str = "--ring_slots or --device_batch_size"
) -> Tensor:
    """Host memory that the GPU can copy from and to while both go on working."""
    try:
        return torch.empty(numbers, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        raise TableError(
            f"no {gib(numbers * dtype.itemsize)} of pinned memory: lower {lower}, or raise "
            f"`ulimit -l` ({str(error).splitlines()[0]})"
        ) from None


class Pointer:
    """What `torch.as_tensor` needs to make a CUDA tensor of memory it did not allocate."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # kept alive by whoever holds the view
        kind = {2: "<i2", 4: "<f4"}[tensor.element_size()]  # the protocol has no bfloat16
        self.__cuda_array_interface__ = dict(
            shape=(tensor.numel(),), typestr=kind, data=(tensor.data_ptr(), False), version=2
        )


def seen_by_gpu(rows: Tensor, device: torch.device) -> Tensor:
    """The same host memory as a CUDA tensor: kernels read it over the bus, row by row.

    The memory is page-locked where it is (cudaHostRegister): allocating it pinned would round its
    size up to a power of two. Under unified addressing host and device then share the address.

    Raises:
        TableError: the system does not let it be pinned.
    """
    if sys.platform == "win32":
        raise TableError(
            "--gather inplace: not on Windows, whose GPUs see other addresses: use ring"
        )
    runtime, size = torch.cuda.cudart(), rows.numel() * rows.element_size()
    with torch.cuda.device(device):
        error = int(runtime.cudaHostRegister(rows.data_ptr(), size, 0))
        if error:
            raise TableError(
                f"--gather inplace: {gib(size)} of tables cannot be pinned (CUDA error {error}): "
                "use --gather ring, or raise `ulimit -l`"
            )
        weakref.finalize(rows, unpin, rows.data_ptr(), device)
        view = torch.as_tensor(Pointer(rows), device=device)
    assert view.data_ptr() == rows.data_ptr(), "a copy was made instead of a view"
    view = view.view(rows.dtype).view(rows.shape)
    probe, there = rows.view(-1)[:1], view.view(-1)[:1]
    before = probe.clone()
    for value in (1.0, 2.0):
        probe.fill_(value)
        assert there.item() == value, "the GPU sees other memory at this address"
    probe.copy_(before)
    return view


def unpin(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # kernels may still be reading
    torch.cuda.cudart().cudaHostUnregister(address)
