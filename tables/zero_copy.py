"""Zero-copy: kernels that read and write the host's memory where it is, over the bus.

Tables in RAM are pinned in place, and a small kernel on a side stream copies their records from and
to the device (offload.py). The host only launches it.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from subprocess import CalledProcessError
from types import SimpleNamespace

import torch
from torch import Tensor

from tables.tables import send

try:  # comes with PyTorch for CUDA
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# Programs that copy rows, and numbers that each has on its way: enough to fill the bus, and few
# enough that most processors of a GPU (an H200 has 132) stay with the layers.
PROGRAMS, BLOCK = 8, 8192

if triton:

    @triton.jit(do_not_specialize=["n"])  # else Triton compiles anew in the middle of a run
    def copy_kernel(
        source, rows, target, at, n, stride: tl.constexpr, width: tl.constexpr, block: tl.constexpr
    ):
        for i in range(tl.program_id(0), n, tl.num_programs(0)):
            read = source + tl.load(rows + i * stride) * width
            written = target + tl.load(at + i * stride) * width
            for start in range(0, width, block):
                column = start + tl.arange(0, block)
                numbers = tl.load(read + column, mask=column < width)
                tl.store(written + column, numbers, mask=column < width)


@cache
def triton_works(device: torch.device) -> bool:
    """Whether Triton compiles here: it takes a C compiler, and Python's headers."""
    if triton is None or device.type != "cuda":
        return False
    numbers = torch.zeros(1, 1, device=device)
    rows = torch.zeros(0, dtype=torch.int64, device=device)
    try:
        copy_kernel[(1,)](numbers, rows, numbers, rows, 0, 1, 1, 1)
    except (RuntimeError, OSError, CalledProcessError):
        return False
    return True


def copy_rows(source: Tensor, rows: Tensor, target: Tensor, at: Tensor) -> None:
    """target[at] = source[rows], for matrices of equal width and row numbers [n] of equal stride.
    One of the matrices may be memory of the host, see `seen_by_gpu`."""
    if triton_works(source.device):
        width = source.shape[1]
        block = min(BLOCK, triton.next_power_of_2(width))
        stride = rows.stride(0)
        where = (source, rows, target, at, len(rows), stride, width, block)
        copy_kernel[(PROGRAMS,)](*where, num_warps=8)
    else:
        target.index_copy_(0, at, source.index_select(0, rows))


class ZeroCopy:
    """Moves records by kernels of a side stream that read and write arrays of the host, see
    `seen_by_gpu`."""

    def __init__(self, stream: torch.cuda.Stream, arrays: dict[str, Tensor]) -> None:
        self.stream = stream
        self.arrays = arrays
        self.last: torch.cuda.Event | None = None  # the end of transfers nobody waited for

    def run(self, job: Callable, *args) -> Future:
        """As `TransferRing.run`, done at once. The result is the event of the job's end."""
        done: Future = Future()
        with torch.cuda.stream(self.stream):
            job(*args)
            self.last = self.stream.record_event()
        done.set_result(self.last)
        return done

    def fetch(self, *records) -> None:
        """Job: bring records, said as in `places`, to the device."""
        for stored, rows, on_device, at in self.matrices(*records):
            copy_rows(stored, rows, on_device, at)

    def write_back(self, *records) -> None:
        """Job: store records, said as in `places`, that are on the device."""
        for stored, rows, on_device, at in self.matrices(*records):
            copy_rows(on_device, at, stored, rows)

    def matrices(self, *records) -> Iterator[tuple]:
        """`places`, with stored arrays as matrices, too, and rows [n * n_table] on the device."""
        for stored, ids, tables, on_device, at in places(self.stream, *records):
            numbers = torch.arange(stored.shape[1])[tables]
            rows = stored.shape[1] * ids[:, None] + numbers  # [n, n_table]
            moves = send(torch.stack((rows, at), dim=-1), self.stream.device)  # [n, n_table, 2]
            rows, at = moves.flatten(0, 1).unbind(1)  # 16 and 8 bytes aligned, whatever n is
            yield stored.flatten(0, 1), rows, on_device, at

    def read(self, ids: Tensor) -> Tensor:
        """The records [n, n_table, W] of tokens `ids` [n], by the calling stream."""
        return self.arrays["rows"].index_select(0, send(ids, self.stream.device))

    def finish(self) -> None:
        """Let the host wait until all that was changed is stored."""
        if self.last:
            self.last.synchronize()
            self.last = None


def places(
    stream: torch.cuda.Stream,
    ids: Tensor,
    slots: Tensor,
    tables: slice,
    arrays: list[tuple],
    free: torch.cuda.Event,
) -> Iterator[tuple]:
    """Where the records of tokens `ids` [n] are, once the event `free` has come.

    Args:
        slots: [n], of the tokens on the device.
        tables: those that travel.
        arrays: pairs of a stored array [V, n_table, W] and of slots on the device,
            [n_table, n_slot, W].

    Yields:
        A stored array, the tokens, the tables; all rows on the device as one matrix, and which of
        them are the tokens' [n, n_table].
    """
    stream.wait_event(free)  # H2
    for stored, on_device in arrays:
        n_table, n_slot, _ = on_device.shape
        at = slots[:, None] + n_slot * torch.arange(n_table)[tables]  # [n, n_table]
        yield stored, ids, tables, on_device.flatten(0, 1), at


def seen_by_gpu(array: Tensor, device: torch.device, owner: object) -> Tensor:
    """The same memory as a CUDA tensor, which kernels read and write over the bus, as long as its
    owner lives. It is pinned in place: what is allocated pinned takes a power of two. OSError: it
    cannot be pinned."""
    address = array.data_ptr()
    with torch.cuda.device(device):
        # Windows' GPUs see memory of the host at other addresses.
        error = sys.platform == "win32" or int(
            torch.cuda.cudart().cudaHostRegister(address, array.nbytes, 0)
        )
        if error:
            with suppress(RuntimeError):  # the error is kept, and raised by the next kernel
                torch.zeros(1, device=device)
            raise OSError(f"CUDA error {int(error)}")
        weakref.finalize(owner, unpin, address, device)
        number = {2: "<i2", 4: "<f4"}[array.itemsize]  # the protocol has no bfloat16
        shown = {"shape": (array.numel(),), "typestr": number, "data": (address, False)}
        memory = SimpleNamespace(__cuda_array_interface__={**shown, "version": 2})
        return torch.as_tensor(memory, device=device).view(array.dtype).view(array.shape)


def unpin(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # kernels may still be reading
    torch.cuda.cudart().cudaHostUnregister(address)
