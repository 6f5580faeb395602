"""Table files: rows and optimizer states of all tables in one memory-mapped file.

    page 0      a line of magic, then a line of JSON: version, shape, dtype, layout, id; and in
                snapshots crc32, of each region (older ones have none)
    rows        [V, n_table, W] in the tables' dtype
    m, v        [V, n_table, W] float32 each
    count, last [V] int64 each: readings of a token in training, the step of the last one

Every region begins on a page. The layout is token-major: what one token owns in all tables lies
side by side, so a token costs one read, not one per table.
"""

import json
import mmap
import os
import secrets
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from common import UserError, atomic, gib
from tables.memory import Shape, TableStorage

MAGIC = b"token-tables\n"
VERSION, LAYOUT, PAGE = 1, "token-major", 4096
PART = 1 << 20  # bytes to copy at a time
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def regions(shape: Shape, dtype: torch.dtype) -> dict[str, tuple[int, int]]:
    """Offset and size in bytes of each region, and of the `end`, for tables (V, n_table, W)."""
    vocab_size, n_table, width = shape
    numbers = vocab_size * n_table * width
    sizes = dict(rows=numbers * dtype.itemsize, m=numbers * 4, v=numbers * 4, count=vocab_size * 8)
    sizes["last"] = sizes["count"]
    result, at = {}, PAGE
    for name, size in sizes.items():
        result[name] = (at, size)
        at = -(-(at + size) // PAGE) * PAGE
    return {**result, "end": (at, 0)}


def shared(origin: Path, file: BinaryIO, size: int) -> bool:
    """Let the system fill a new file with `size` bytes of another: where a file system can (Btrfs,
    XFS), both share their blocks until one is written to. False: it cannot (not Linux)."""
    try:
        with open(origin, "rb") as opened:
            while size:
                n = os.copy_file_range(opened.fileno(), file.fileno(), size)
                if not n:
                    raise OSError("it is shorter")
                size -= n
        return True
    except (OSError, AttributeError):
        file.seek(0)
        return False


class TableFile(TableStorage):
    """An open table file. Tensors are views of the mapping: reading them reads the file, writing
    them writes it. `id` is what the checkpoint that belongs to it says, too. A file that is
    missing, foreign, damaged or short is a UserError."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path, self.writable, self.fresh = Path(path), writable, False
        try:
            with open(path, "r+b" if writable else "rb") as file:
                self.read_header(file.read(PAGE))
                self.regions = regions(self.shape, self.dtype)
                size, end = os.fstat(file.fileno()).st_size, self.regions["end"][0]
                if size != end:
                    raise UserError(
                        f"{path} has {size:,} bytes where its header says {end:,}: it was cut "
                        "short or changed; train again, or restore the file"
                    )
                access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
                self.map = mmap.mmap(file.fileno(), 0, access=access)
        except FileNotFoundError:
            raise UserError(f"no table file at {path}: it belongs beside its ckpt.pt") from None
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None
        kinds = {"rows": self.dtype, "m": torch.float32, "v": torch.float32}
        self.open([self.region(name, kind).view(self.shape) for name, kind in kinds.items()])
        self.count, self.last = (self.region(name, torch.int64) for name in ("count", "last"))

    def read_header(self, page: bytes) -> None:
        if not page.startswith(MAGIC):
            raise UserError(f"{self.path} is not a table file")
        try:
            header = json.loads(page[len(MAGIC) :].split(b"\n")[0])
            version, layout = header["version"], header["layout"]
            self.shape = tuple(int(header[name]) for name in ("vocab_size", "n_table", "width"))
            self.dtype, self.id = DTYPES[header["dtype"]], str(header["id"])
            self.crc32 = dict(header.get("crc32", {}))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{self.path} has a damaged header ({error!r})") from None
        if (version, layout) != (VERSION, LAYOUT) or min(self.shape) < 1:
            raise UserError(
                f"{self.path} is of version {version}, layout {layout!r}, shape {self.shape}; "
                f"this program reads version {VERSION}, {LAYOUT!r}"
            )

    @classmethod
    def create(
        cls, path: Path, shape: Shape, dtype: torch.dtype, *, sparse: bool = False
    ) -> "TableFile":
        """A new writable file of zeros, all of its room taken at once unless `sparse`: a disk that
        fills up under a memory map would kill the process. UserError if there is none."""
        end = regions(shape, dtype)["end"][0]
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).unlink(missing_ok=True)  # who has the old one open keeps it whole
            with open(path, "wb") as file:
                file.write(header(shape, dtype, secrets.token_hex(4)))
                file.truncate(end)
                if not sparse and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, end)
        except OSError as error:
            Path(path).unlink(missing_ok=True)
            raise UserError(
                f"cannot write {path} ({gib(end)}): {error.strerror or error}"
            ) from None
        made = cls(path, writable=True)
        made.fresh = True
        return made

    def region(self, name: str, dtype: torch.dtype) -> Tensor:
        offset, size = self.regions[name]
        with warnings.catch_warnings():  # that a read-only mapping cannot be written is as meant
            warnings.filterwarnings("ignore", message=".*not writable.*")
            return torch.frombuffer(
                self.map, dtype=dtype, count=size // dtype.itemsize, offset=offset
            )

    def read_ahead(self, ids: Tensor, names: tuple[str, ...] = ("rows",)) -> None:
        """As `Home.read_ahead`. Page faults ask the disk for one page after the other: that took
        ten times as long."""
        if not hasattr(mmap, "MADV_WILLNEED"):
            return
        runs = []  # first and last of neighbours, which are asked for as one
        for token in sorted(set(ids.flatten().tolist())):
            if runs and token == runs[-1][1] + 1:
                runs[-1][1] = token
            else:
                runs.append([token, token])
        for name in names:
            offset, size = self.regions[name]
            per_token = size // self.shape[0]
            for first, last in runs:
                start = (offset + first * per_token) // PAGE * PAGE  # a range begins on a page
                self.map.madvise(mmap.MADV_WILLNEED, start, offset + (last + 1) * per_token - start)

    def copy(self, path_of: Callable[[str], Path]) -> str:
        """Copy the file as it is now under a new id, which is returned, to the path of that id."""
        name, end = secrets.token_hex(4), self.regions["end"][0]
        with atomic(path_of(name)) as temporary, open(temporary, "wb") as file:
            if not shared(self.path, file, end):
                for at in range(0, end, PART):
                    file.write(memoryview(self.map)[at : min(at + PART, end)])
            file.seek(0)
            file.write(header(self.shape, self.dtype, name, crc32=self.checksums()))
        return name

    def checksums(self) -> dict[str, int]:
        """Of what the regions hold now, read in parts that fit a cache."""
        found = dict.fromkeys(self.regions, 0)
        for region, (offset, size) in self.regions.items():
            for at in range(offset, offset + size, PART):
                part = memoryview(self.map)[at : min(at + PART, offset + size)]
                found[region] = zlib.crc32(part, found[region])
        return found

    def seal(self) -> None:
        """Put the checksums of what was written into page 0."""
        self.crc32 = self.checksums()
        self.map[:PAGE] = header(self.shape, self.dtype, self.id, crc32=self.crc32)
        self.map.flush()

    def verify(self) -> None:
        """UserError: the file is not what was written, as far as it says what that was."""
        if self.crc32 and self.crc32.items() - self.checksums().items():
            raise UserError(f"{self.path} is damaged (its checksums differ): restore the file")


def header(shape: Shape, dtype: torch.dtype, name: str, **more: object) -> bytes:
    """Page 0 of a file."""
    kind = next(key for key, value in DTYPES.items() if value == dtype)
    sizes = dict(zip(("vocab_size", "n_table", "width"), shape, strict=True))
    fields = dict(version=VERSION, **sizes, dtype=kind, layout=LAYOUT, id=name, **more)
    return (MAGIC + json.dumps(fields).encode() + b"\n").ljust(PAGE, b"\0")
