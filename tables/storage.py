"""Where rows and their optimizer states are stored: in RAM, or in a folder of raw arrays on disk.

    rows          [V, n_table, W] in the tables' dtype
    m, v          [V, n_table, W] float32: Adam's moments
    count, last   [V] int64: how often training read a token, and in which step for the last time

What a token owns in all tables lies side by side, so it costs one read, not one per table.
"""

import math
import mmap
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from common import UserError, reading, writing

Shape: TypeAlias = tuple[int, int, int]  # of all tables: V, n_table, W
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of rows
# To map a file without changing it. Without 0x4000, MAP_NORESERVE, Linux refuses one above RAM.
LINUX = sys.platform == "linux"
PRIVATE = dict(flags=mmap.MAP_PRIVATE | 0x4000) if LINUX else dict(access=mmap.ACCESS_COPY)


def layout(shape: Shape, dtype: torch.dtype) -> dict[str, tuple]:
    """Shape, dtype and bytes of each array, for tables of a shape (V, n_table, W)."""
    moment, per_token = (shape, torch.float32), (shape[:1], torch.int64)
    kinds = dict(rows=(shape, dtype), m=moment, v=moment, count=per_token, last=per_token)
    return {name: (*kind, math.prod(kind[0]) * kind[1].itemsize) for name, kind in kinds.items()}


class TableStorage:
    arrays: dict[str, Tensor]  # by name, see above; of tables that are not trained, maybe only rows
    fresh = True  # rows are yet to be drawn

    def read_ahead(self, ids: Tensor, names: tuple[str, ...] = ("rows",)) -> None:
        """Begin to read what tokens `ids` own of these arrays, without waiting for it."""


class RamStorage(TableStorage):
    """Tables in ordinary memory, for training with moments."""

    def __init__(self, shape: Shape, dtype: torch.dtype, *, training: bool = True) -> None:
        self.arrays = {}
        for name, (size, kind, n_byte) in layout(shape, dtype).items():
            if training or name == "rows":
                # Pages of its own: a page that holds other things, too, cannot be pinned twice.
                self.arrays[name] = torch.frombuffer(mmap.mmap(-1, n_byte), dtype=kind).view(size)


class DiskStorage(TableStorage):
    """Tables in a folder of raw arrays, a file for each, mapped into memory. What is written to a
    tensor goes to its file if that is `writable`, and else stays in this process. UserError: a file
    is missing or has another size."""

    def __init__(self, folder: Path, shape: Shape, dtype: torch.dtype, *, writable=False) -> None:
        self.folder, self.shape, self.fresh, self.arrays, self.maps = folder, shape, False, {}, {}
        self.parts: Callable[[Tensor], Iterable[Tensor]] = lambda array: [array]  # that are copied
        mode, how = ("r+b", dict(access=mmap.ACCESS_WRITE)) if writable else ("rb", PRIVATE)
        for name, (size, kind, n_byte) in layout(shape, dtype).items():
            with reading(folder / name, "put it beside ckpt.pt") as path, open(path, mode) as file:
                if (found := os.fstat(file.fileno()).st_size) != n_byte:
                    raise ValueError(f"{found:,} bytes, not {n_byte:,}")
                self.maps[name] = mmap.mmap(file.fileno(), 0, **how)
            self.arrays[name] = torch.frombuffer(self.maps[name], dtype=kind).view(size)

    @classmethod
    def create(cls, folder: Path, shape: Shape, dtype: torch.dtype, *, sparse=False):
        """Writable tables of zeros in a new folder. They take all of their room at once unless
        `sparse`: a disk that fills up under a map would kill the process. UserError: it is full."""
        with writing(folder):
            folder.mkdir(parents=True)
            for name, (_, _, n_byte) in layout(shape, dtype).items():
                with open(folder / name, "wb") as file:
                    file.truncate(n_byte)
                    if not sparse and hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(file.fileno(), 0, n_byte)
        storage = cls(folder, shape, dtype, writable=True)
        storage.fresh = not sparse  # to draw rows would fill the files
        return storage

    def read_ahead(self, ids: Tensor, names: tuple[str, ...] = ("rows",)) -> None:
        """Page faults would ask the disk for one page after the other: ten times as long."""
        ids = torch.unique(ids)  # neighbours are asked for as one: their id minus index is the same
        _, sizes = torch.unique_consecutive(ids - torch.arange(len(ids)), return_counts=True)
        runs = list(zip(ids[sizes.cumsum(0) - sizes].tolist(), sizes.tolist(), strict=True))
        for name in names if hasattr(mmap, "MADV_WILLNEED") else ():
            n_byte = self.arrays[name][0].nbytes  # of a token
            for first, size in runs:
                start = first * n_byte // mmap.PAGESIZE * mmap.PAGESIZE
                end = (first + size) * n_byte
                self.maps[name].madvise(mmap.MADV_WILLNEED, start, end - start)

    def save_columns_of_all_ranks(self, n_rank: int, parts: Callable) -> None:
        """Let `copy` write whole rows, of which this storage has columns (tables/sharded.py)."""
        vocab_size, n_table, width = self.shape
        self.shape = (vocab_size, n_table, width * n_rank)
        self.parts = parts

    def copy(self, folder: Path) -> dict:
        """Write what the arrays hold now to a new folder. Returns what opens and verifies it."""
        with writing(folder):
            folder.mkdir(parents=True)
            for name, array in self.arrays.items():
                with open(folder / name, "wb") as file:
                    for part in self.parts(array):
                        part.view(torch.uint8).numpy().tofile(file)
                    os.fsync(file.fileno())
        how = dict(shape=tuple(self.shape), dtype=self.arrays["rows"].dtype)
        return dict(**how, crc32=DiskStorage(folder, **how).checksums())

    def checksums(self) -> dict[str, int]:
        arrays = self.arrays.items()
        return {name: zlib.crc32(array.view(torch.uint8).numpy()) for name, array in arrays}


def check_room(shape: Shape, dtype: torch.dtype, training: bool, folder=None, copies=1) -> None:
    """UserError: tables, or so many copies, have no room in RAM, or on the disk of a folder."""
    sizes = {name: n_byte for name, (_, _, n_byte) in layout(shape, dtype).items()}
    need = copies * (sum(sizes.values()) if training else sizes["rows"])
    free = shutil.disk_usage(folder).free if folder else free_ram()
    if need > free:
        where, instead = ("disk", "another --out_dir") if folder else ("RAM", "--offload disk")
        sizes = f"{need / 2**30:.2f} GiB of {where}, {free / 2**30:.2f} GiB are free"
        raise UserError(f"the tables need {sizes}: take {instead}")


def free_ram() -> float:
    """Bytes that programs can still have, where the system tells (Linux)."""
    info = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: +(\d+)", info.read_text()) if info.exists() else None
    return int(found[1]) * 1024 if found else math.inf
