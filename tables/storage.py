"""Where what tokens own is stored: in RAM, or in a folder of raw arrays on disk.

    rows     [V, n_table, W] in the tables' dtype
    state    [V, n_table, W] float32, if the optimizer keeps one number for each (rmsprop.py)

What a token owns in all tables lies side by side, so it costs one read, not one per table.
"""

import math
import mmap
import os
import re
import shutil
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from common import Damage, UserError, reading, writing

Shape: TypeAlias = tuple[int, int, int]  # of all tables: V, n_table, W
ARRAYS = ("rows", "state")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of rows


class TableStorage:
    """What tokens own: arrays of one shape, by name."""

    shape: Shape
    arrays: dict[str, Tensor]
    fresh = True  # rows are yet to be drawn
    on_disk = False  # saved apart from ckpt.pt, by `copy`

    def add(self, name: str, dtype: torch.dtype) -> Tensor:
        """A new array of zeros, in RAM. UserError: there is no room."""
        n_byte = math.prod(self.shape) * dtype.itemsize
        check_room(n_byte)
        # Pages of its own: one that holds other things, too, cannot be pinned twice (offload.py).
        try:
            pages = mmap.mmap(-1, n_byte)
        except OSError as error:  # where `check_room` knows nothing
            raise MemoryError(error) from None
        self.arrays[name] = torch.frombuffer(pages, dtype=dtype).view(self.shape)
        return self.arrays[name]

    def read_ahead(self, ids: Tensor, names: Iterable[str] = ("rows",)) -> None:
        """Begin to read what tokens `ids` own of these arrays, without waiting for it."""


class RamStorage(TableStorage):
    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape = shape
        self.arrays = {}
        self.add("rows", dtype)


class DiskStorage(TableStorage):
    """Tables in a folder of raw arrays, a file for each, mapped into memory. What is written to a
    tensor goes to its file if that is `writable`, and else stays in this process. UserError: a file
    is missing or has another size."""

    on_disk = True

    def __init__(
        self,
        folder: Path,
        shape: Shape,
        dtype: torch.dtype,
        names: Iterable[str] = ("rows",),
        *,
        writable: bool = False,
    ) -> None:
        self.folder = folder
        self.shape = shape
        self.writable = writable
        self.fresh = False
        self.copies = 1  # how many copies of the arrays the disk must have room for
        self.arrays = {}
        self.files: dict[str, BinaryIO] = {}
        # With several ranks, each has some columns of the arrays (sharded.py). `copy` writes whole
        # ones, and `gather_columns` yields them part by part.
        self.n_rank = 1
        self.gather_columns: Callable[[Tensor], Iterable[Tensor]] = lambda array: [array]
        for name in names:
            self.map(name, dtype if name == "rows" else torch.float32)

    def map(self, name: str, dtype: torch.dtype) -> None:
        path = self.folder / name
        expected = math.prod(self.shape) * dtype.itemsize
        if self.writable:
            access = {"access": mmap.ACCESS_WRITE}
        elif sys.platform == "linux":
            # 0x4000 is MAP_NORESERVE: without it Linux refuses to map a file larger than RAM.
            access = {"flags": mmap.MAP_PRIVATE | 0x4000}
        else:
            access = {"access": mmap.ACCESS_COPY}
        whole = self.folder.parent.name  # ckpt.pt.tables
        with reading(path, f"copy the whole folder {whole} again, beside the checkpoint"):
            file = open(path, "r+b" if self.writable else "rb")  # noqa: SIM115
            found = os.fstat(file.fileno()).st_size
            if found != expected:
                raise Damage(f"{found:,} bytes, not {expected:,}")
            pages = mmap.mmap(file.fileno(), 0, **access)
        self.files[name] = file
        weakref.finalize(self, file.close)
        self.arrays[name] = torch.frombuffer(pages, dtype=dtype).view(self.shape)

    @classmethod
    def create(
        cls, folder: Path, shape: Shape, dtype: torch.dtype, *, copies: int = 1
    ) -> "DiskStorage":
        """Writable tables of zeros in a new folder. They take all of their room at once (but on
        macOS, where it is only looked for): a disk that fills up under a map would kill the
        process. UserError: there is no room for so many copies."""
        with writing(folder):
            folder.mkdir(parents=True)
        storage = cls(folder, shape, dtype, names=(), writable=True)
        storage.copies = copies
        storage.add("rows", dtype)
        storage.fresh = True
        return storage

    def add(self, name: str, dtype: torch.dtype) -> Tensor:
        if not self.writable:  # the files are a checkpoint's
            return super().add(name, dtype)
        n_byte = math.prod(self.shape) * dtype.itemsize
        check_room(self.copies * n_byte, self.folder)
        with writing(self.folder), open(self.folder / name, "wb") as file:
            file.truncate(n_byte)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, n_byte)
        self.map(name, dtype)
        return self.arrays[name]

    def read_ahead(self, ids: Tensor, names: Iterable[str] = ("rows",)) -> None:
        """Ask the disk for all pages at once. Page faults would ask for one after the other, which
        takes ten times as long. (mmap.madvise would do the same, but lets no other thread run
        meanwhile: a GPU would wait for launches.)"""
        if not hasattr(os, "posix_fadvise"):  # macOS, Windows
            return
        tokens = torch.unique(ids).tolist()
        for name in self.files.keys() & set(names):
            file = self.files[name].fileno()
            n_byte = self.arrays[name][0].nbytes  # of a token
            for token in tokens:
                os.posix_fadvise(file, token * n_byte, n_byte, os.POSIX_FADV_WILLNEED)

    def copy(self, folder: Path, **others: Tensor) -> dict:
        """Write what the arrays hold now, or `others` in their place, to a new folder. Returns what
        a checkpoint needs to open and to verify it: `shape` of whole arrays, `dtype` of rows, and
        `crc32` by array."""
        crc32: dict[str, int] = {}
        arrays = {**self.arrays, **others}
        with writing(folder):
            folder.mkdir(parents=True)
            for name, array in arrays.items():
                crc32[name] = 0
                with open(folder / name, "wb") as file:
                    for part in self.gather_columns(array):
                        numbers = part.view(torch.uint8).numpy()
                        crc32[name] = zlib.crc32(numbers, crc32[name])
                        file.write(numbers)  # numpy's tofile would hide why it failed
                    os.fsync(file.fileno())
        n_row, n_table, width = self.shape
        shape = (n_row, n_table, width * self.n_rank)
        return {"shape": shape, "dtype": self.arrays["rows"].dtype, "crc32": crc32}

    def checksums(self) -> dict[str, int]:
        arrays = self.arrays.items()
        return {name: zlib.crc32(array.view(torch.uint8).numpy()) for name, array in arrays}


def check_room(n_byte: int, folder: Path | None = None) -> None:
    """UserError: so many bytes, for each process on this machine, have no room in RAM, or on the
    disk of a folder."""
    free = shutil.disk_usage(folder).free if folder else free_ram()
    if dist.is_available() and dist.is_initialized():
        n_byte *= int(os.environ["LOCAL_WORLD_SIZE"])  # set by torchrun
        dist.all_reduce(torch.zeros(1))  # nobody takes its share before all have looked
    if n_byte > free:
        place, fix = "RAM", "use --offload disk"
        if folder:
            place, fix = "disk", "make room there, or choose another folder"
        sizes = f"{n_byte / 2**20:,.1f} MiB of {place}, but {free / 2**20:,.1f} MiB is free"
        raise UserError(f"the tables need {sizes}: {fix}")


def free_ram() -> float:
    """Bytes that programs can still have, where the system tells (Linux)."""
    free = math.inf
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        free = 1024 * int(re.search(r"MemAvailable: +(\d+)", meminfo.read_text())[1])
    # A container may be limited to less (cgroup v2). Of what it uses, only anonymous memory counts:
    # the system drops cached files when programs need the room. `RamStorage` has the shared kind.
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip() != "max":
        stat = limit.with_name("memory.stat").read_text()
        used = re.findall(r"^(?:anon|shmem) (\d+)", stat, re.MULTILINE)
        free = min(free, int(limit.read_text()) - sum(map(int, used)))
    return free
