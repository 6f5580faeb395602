"""Zero-copy: kernels that read and write the host's memory where it is, over the bus.

Tables in RAM are pinned in place, and a small kernel on a side stream copies their records from and
to the device (offload.py). The host only launches it.
"""

import ctypes
import sys
import weakref
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

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
# CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM in cuda.h.
CAN_USE_HOST_POINTER = 91

if triton:
    # The kernel of `copy_records`. It gets pointers to stored [V, n_table, W], to on_device
    # [n_table, n_slot, W] and to moves [n, 2]. It copies the rows of n tokens in n_moved tables,
    # from table `first` on: of P programs, number p copies rows p, p + P, p + 2 P, ... of these.
    # Sizes are not specialized: else Triton compiles anew in the middle of a run.
    @triton.jit(do_not_specialize=["n", "first", "n_moved", "n_slot"])
    def copy_kernel(
        stored,
        on_device,
        moves,
        n,
        first,
        n_moved,
        n_slot,
        n_table: tl.constexpr,
        width: tl.constexpr,
        block: tl.constexpr,
        to_device: tl.constexpr,
    ):
        for i in range(tl.program_id(0), n * n_moved, tl.num_programs(0)):
            move = moves + 2 * (i // n_moved)
            table = first + i % n_moved
            far = stored + (tl.load(move) * n_table + table) * width
            near = on_device + (tl.load(move + 1) + table * n_slot) * width
            for start in range(0, width, block):
                column = start + tl.arange(0, block)
                if to_device:
                    numbers = tl.load(far + column, mask=column < width)
                    tl.store(near + column, numbers, mask=column < width)
                else:
                    numbers = tl.load(near + column, mask=column < width)
                    tl.store(far + column, numbers, mask=column < width)


@cache
def triton_works(device: torch.device) -> bool:
    """Whether Triton compiles here: it takes a C compiler, and Python's headers, finds the driver
    where it looks for it, and must know the GPU. What it lacks, it says by all kinds of errors."""
    if triton is None or device.type != "cuda":
        return False
    numbers = torch.zeros(1, 1, device=device)
    moves = torch.zeros(0, 2, dtype=torch.int64, device=device)
    try:
        copy_kernel[(1,)](numbers, numbers, moves, 0, 0, 1, 1, 1, 1, 1, True)
    except Exception:
        return False
    return True


def copy_records(
    stored: Tensor, on_device: Tensor, moves: Tensor, tables: slice, to_device: bool
) -> None:
    """Copy rows of some tables between an array of the host [V, n_table, W], see `seen_by_gpu`, and
    slots [n_table, n_slot, W]. moves [n, 2], on the device: tokens, and their slots."""
    _, n_table, width = stored.shape
    n_slot = on_device.shape[1]
    if triton_works(moves.device):
        block = min(BLOCK, triton.next_power_of_2(width))
        sizes = len(moves), tables.start, tables.stop - tables.start, n_slot
        fixed = n_table, width, block, to_device
        copy_kernel[(PROGRAMS,)](stored, on_device, moves, *sizes, *fixed, num_warps=8)
        return
    numbers = torch.arange(tables.start, tables.stop, device=moves.device)
    rows = (n_table * moves[:, :1] + numbers).flatten()  # [n * tables]
    at = places(moves[:, 1], n_slot, numbers).flatten()
    stored, on_device = stored.flatten(0, 1), on_device.flatten(0, 1)
    if to_device:
        on_device.index_copy_(0, at, stored.index_select(0, rows))
    else:
        stored.index_copy_(0, rows, on_device.index_select(0, at))


def places(slots: Tensor, n_slot: int, tables: Tensor) -> Tensor:
    """Where `slots` [n] of some tables [tables] are in [n_table, n_slot, W], seen as a matrix
    [n_table * n_slot, W]: [n, tables]."""
    return slots[:, None] + n_slot * tables


class Records(NamedTuple):
    """What tokens own, on its way between an array of the host and the device."""

    ids: Tensor  # [n], the tokens
    slots: Tensor  # [n], where they are on the device
    on_device: dict[str, Tensor]  # slots [n_table, n_slot, W] of arrays, by name
    free: torch.cuda.Event  # after it, these slots may be written, or read


class ZeroCopy:
    """Moves records by kernels of a side stream that read and write arrays of the host, see
    `seen_by_gpu`."""

    few_bytes = 32 << 20  # of rows that `OffloadedTables.lookup` reads by `read_few`

    def __init__(self, stream: torch.cuda.Stream, arrays: dict[str, Tensor]) -> None:
        self.stream = stream
        self.arrays = arrays
        self.last: torch.cuda.Event | None = None  # the end of transfers nobody waited for

    def fetch(self, parts: list[slice], records: Records) -> list[Future]:
        """Bring records to the device, one part of the tables after the other. Returns the event of
        each part's arrival, as the result of a job."""
        return [done(event) for event in self.copy(parts, records, to_device=True)]

    def write_back(self, records: Records) -> None:
        """Store records that are on the device."""
        n_table = self.arrays["rows"].shape[1]
        self.copy([slice(0, n_table)], records, to_device=False)

    def copy(self, parts: list[slice], records: Records, to_device: bool) -> list[torch.cuda.Event]:
        ids, slots, on_device, free = records
        ends = []
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(free)  # H2
            moves = send(torch.stack((ids, slots), dim=1), self.stream.device)  # [n, 2]
            for tables in parts:
                for name, numbers in on_device.items():
                    copy_records(self.arrays[name], numbers, moves, tables, to_device)
                self.last = self.stream.record_event()
                ends.append(self.last)
        return ends

    def read(self, ids: Tensor) -> Tensor:
        """The records [n, n_table, W] of tokens `ids` [n], by the calling stream."""
        return self.arrays["rows"].index_select(0, send(ids, self.stream.device))

    def finish(self) -> None:
        """Let the host wait until all that was changed is stored."""
        if self.last:
            self.last.synchronize()
            self.last = None


def done(result: object) -> Future:
    """A job that has ended: for callers who also get those of a worker (offload.py)."""
    future: Future = Future()
    future.set_result(result)
    return future


def seen_by_gpu(array: Tensor, device: torch.device, owner: object) -> Tensor:
    """The same memory as a CUDA tensor, which kernels read and write over the bus, as long as its
    owner lives. It is pinned in place: what is allocated pinned takes a power of two. OSError: it
    cannot be pinned."""
    address = array.data_ptr()
    with torch.cuda.device(device):
        if not uses_host_addresses():
            raise OSError("this GPU sees RAM at other addresses")
        error = int(torch.cuda.cudart().cudaHostRegister(address, array.nbytes, 0))
        if error:
            with suppress(RuntimeError):  # the error is kept, and raised by the next kernel
                torch.zeros(1, device=device)
            raise OSError(f"CUDA error {error}")
        weakref.finalize(owner, unpin, address, device)
        number = {2: "<i2", 4: "<f4"}[array.itemsize]  # the protocol has no bfloat16
        shown = {"shape": (array.numel(),), "typestr": number, "data": (address, False)}
        memory = SimpleNamespace(__cuda_array_interface__={**shown, "version": 2})
        return torch.as_tensor(memory, device=device).view(array.dtype).view(array.shape)


def uses_host_addresses() -> bool:
    """Whether the current GPU sees memory that is pinned in place at the host's own addresses. In
    Windows, and so in WSL2, it does not; AMD's need not. A kernel would read what is not there."""
    if sys.platform != "linux" or torch.version.hip:
        return False
    answer = ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")  # PyTorch has no such question
    device = torch.cuda.current_device()
    driver.cuDeviceGetAttribute(ctypes.byref(answer), CAN_USE_HOST_POINTER, device)
    return answer.value == 1


def unpin(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # kernels may still be reading
    torch.cuda.cudart().cudaHostUnregister(address)
