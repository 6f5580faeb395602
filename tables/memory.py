"""Rows and moments in RAM: how they lie there, if there is room, and how a GPU gets at them."""

import mmap
import sys
import weakref
from types import SimpleNamespace
from typing import TypeAlias

import torch
from torch import Tensor

from common import UserError, free_ram, gib

# What Adam remembers: m and v [V, W] float32 of each table; count and last [V] int64 of each token,
# how often it was read in training, and in which step for the last time.
Moments: TypeAlias = tuple[list[Tensor], list[Tensor], Tensor, Tensor]
Shape: TypeAlias = tuple[int, int, int]  # of all tables: V, n_table, W


class TableStorage:
    """What stores rows and moments. What a token owns in all tables lies side by side.

    Attributes:
        arrays: rows and, for training, m and v: [V, n_table, W] each.
        weight: a [V, W] view of the rows for each table.
        count, last: [V] each, see `Moments`.
        fresh: rows are to be drawn, not loaded.
    """

    fresh = True

    def open(self, arrays: list[Tensor]) -> None:
        self.arrays, self.tables = arrays, [list(array.unbind(1)) for array in arrays]
        self.weight = self.tables[0]

    def moments(self) -> Moments:
        return (*self.tables[1:], self.count, self.last)

    def read_ahead(self, ids: Tensor, names: tuple[str, ...] = ("rows",)) -> None:
        """Begin to read what tokens `ids` own of `rows`, `m` or `v`, without waiting for it."""


class RamStorage(TableStorage):
    """Rows in ordinary memory, for training with moments."""

    def __init__(self, shape: Shape, dtype: torch.dtype, *, training: bool = True) -> None:
        kinds = [dtype, torch.float32, torch.float32] if training else [dtype]
        self.open([zeros(shape, kind) for kind in kinds])
        self.count, self.last = torch.zeros(2, shape[0], dtype=torch.int64)


def zeros(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Zeros in pages of their own: a page on which others are, too, cannot be pinned twice."""
    numbers = torch.Size(shape).numel()
    memory = mmap.mmap(-1, numbers * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=numbers).view(shape)


def check_ram(shape: Shape, dtype: torch.dtype, training: bool) -> None:
    """Refuse tables that free memory cannot hold, before the system kills the run."""
    need = torch.Size(shape).numel() * (dtype.itemsize + 8 * training)  # m and v: float32 each
    free = free_ram()
    if free is not None and need > free:
        states = ", with optimizer states," if training else ""
        raise UserError(
            f"--offload cpu: the tables{states} need {gib(need)} of RAM and {gib(free)} are "
            "available: use --offload disk" + (" or --table_dtype bfloat16" if training else "")
        )


def seen_by_gpu(array: Tensor, device: torch.device) -> Tensor | None:
    """The same memory as a CUDA tensor, which kernels read and write over the bus; None where the
    system does not let it be pinned. It is page-locked where it is: to allocate it pinned would
    round its size up to a power of two. Under unified addressing both sides share the address."""
    runtime, at, size = torch.cuda.cudart(), array.data_ptr(), array.nbytes
    with torch.cuda.device(device):
        # Windows' GPUs see other addresses.
        error = sys.platform == "win32" or int(runtime.cudaHostRegister(at, size, 0))
        if error:
            print(
                f"note: {gib(size)} of tables cannot be pinned (CUDA error {error}, see `ulimit "
                "-l`): a worker thread stages their rows, which is slower",
                file=sys.stderr,
            )
            return None
        weakref.finalize(array, unpin, at, device)
        kind = {2: "<i2", 4: "<f4"}[array.element_size()]  # the protocol has no bfloat16
        where = dict(shape=(array.numel(),), typestr=kind, data=(at, False), version=2)
        owned = SimpleNamespace(__cuda_array_interface__=where, owner=array)
        view = torch.as_tensor(owned, device=device)
    assert view.data_ptr() == at, "a copy was made instead of a view"
    return view.view(array.dtype).view(array.shape)


def unpin(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # kernels may still be reading
    torch.cuda.cudart().cudaHostUnregister(address)
