"""Where the tables of a run live: the flags, and whether there is room."""

import argparse
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from offload import OffloadedTables
from tablefile import DTYPES, LIVE, TableError, TableFile, gib, regions, snapshots
from tables import ResidentTables, Tables


class RamHome:
    """Rows in ordinary memory, laid out as in a file: [V, n_table, W]."""

    fresh = True  # rows are to be drawn; False: they will be loaded

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        self.shape, self.rows, self.states = shape, torch.zeros(shape, dtype=dtype), None
        self.weight = list(self.rows.unbind(1))  # [V, W] each

    def moments(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        if self.states is None:  # sampling never asks
            m, v = (list(torch.zeros(self.shape).unbind(1)) for _ in range(2))
            count, last = torch.zeros(2, self.shape[0], dtype=torch.int64)
            self.states = (m, v, count, last)
        return self.states

    def read_ahead(self, ids: Tensor, names: tuple[str, ...]) -> None:
        """Nothing to do."""


class CheckpointHome(RamHome):
    """Rows of a ckpt.pt that is mapped into memory, read in place."""

    fresh = False

    def __init__(self, weight: list[Tensor]) -> None:
        self.weight = weight


def add_flags(parser: argparse.ArgumentParser, *, training: bool = False) -> None:
    """The flags that say where tables live, the same for all commands."""
    group = parser.add_argument_group("tables")
    add = group.add_argument
    add(
        "--offload",
        choices=("none", "cpu", "disk"),
        default="none",
        help="where tables and their optimizer states are: on the device, in RAM, on disk (none)",
    )
    add("--ring_slots", type=int, default=3, help="tables on their way at once (%(default)s)")
    add(
        "--gather",
        choices=("ring", "inplace"),
        help="fetch rows ahead through a ring, or read them where they lie; a GPU can do so in RAM "
        "(inplace for RAM without a GPU, where nothing would be hidden; else ring, though a CPU "
        "reads what a step of decoding needs in place either way)",
    )
    add(
        "--cache_rows",
        type=int,
        default=0,
        help="tokens whose rows stay on the device in evaluation and sampling (%(default)s)",
    )
    if training:
        add(
            "--table_dtype",
            choices=DTYPES,
            default="float32",
            help="of rows; bfloat16 halves them, and rounds stochastically (float32)",
        )


def check_flags(args: argparse.Namespace) -> None:
    """Refuse combinations that cannot be.

    Raises:
        TableError: naming flag and value.
    """
    if args.ring_slots < 1:
        raise TableError(f"--ring_slots {args.ring_slots} must be at least 1")
    if args.cache_rows < 0:
        raise TableError(f"--cache_rows {args.cache_rows} must be 0 or more")
    for flag in ("cache_rows", "gather"):
        if getattr(args, flag) and args.offload == "none":
            raise TableError(f"--{flag} {getattr(args, flag)} needs --offload cpu or disk")
    if args.cache_rows and args.gather == "inplace":
        raise TableError(f"--cache_rows {args.cache_rows} needs --gather ring: nothing is fetched")
    if getattr(args, "table_optimizer", "rowwise") == "adamw":
        for flag, plain in (("offload", "none"), ("table_dtype", "float32")):
            if getattr(args, flag) != plain:
                raise TableError(
                    f"--{flag} {getattr(args, flag)} needs --table_optimizer rowwise: adamw moves "
                    "all rows of a table in every step"
                )


def placed(
    args: argparse.Namespace | None,
    device: torch.device,
    *,
    checkpoint: dict | None = None,
    out_dir: Path | None = None,
) -> Callable[[int, int, int], Tables]:
    """What makes the tables of a `Decoder` where the flags want them.

    Args:
        args: with the flags of `add_flags`; None: resident.
        device: where the model computes.
        checkpoint: will be loaded into the model, so no rows are drawn. On `disk` they are read
            from it in place.
        out_dir: of a training run, which needs room for optimizer states, and on `disk` a file.

    Returns:
        a function of (n_table, V, W), which raises TableError where there is no room.
    """
    dtype = DTYPES[getattr(args, "table_dtype", "float32")]
    if out_dir is None and checkpoint and "tables.weight.0" in checkpoint["model"]:
        dtype = checkpoint["model"]["tables.weight.0"].dtype
    if args is None or args.offload == "none":
        return partial(ResidentTables, dtype=dtype)

    def make(n_table: int, vocab_size: int, width: int) -> Tables:
        if not n_table:
            return ResidentTables(n_table, vocab_size, width)
        shape = (vocab_size, n_table, width)
        gather = args.gather or default_gather(args.offload, device, args.cache_rows)
        in_reach = device.type == "cpu" or (device.type, args.offload) == ("cuda", "cpu")
        if gather == "inplace" and not in_reach:
            raise TableError(
                f"--gather inplace: {device.type} cannot read rows from --offload {args.offload} "
                "in place, use --gather ring"
            )
        if args.offload == "cpu":
            check_ram(shape, dtype, training=out_dir is not None)
            home = RamHome(shape, dtype)
        elif out_dir is not None:
            check_disk(shape, dtype, out_dir, args.resume)
            home = TableFile.create(out_dir / LIVE, shape, dtype)
        else:
            home = checkpoint.get("table_file") or CheckpointHome(
                [checkpoint["model"][f"tables.weight.{table}"] for table in range(n_table)]
            )
        home.fresh = home.fresh and checkpoint is None
        return OffloadedTables(
            home,
            device,
            ring_slots=args.ring_slots,
            gather=gather,
            cache_rows=min(args.cache_rows, vocab_size),
        )

    return make


def default_gather(offload: str, device: torch.device, cache_rows: int = 0) -> str:
    """In place where nothing would be hidden: no bus to cross, no disk to wait for."""
    return "inplace" if (offload, device.type, cache_rows) == ("cpu", "cpu", 0) else "ring"


def check_ram(shape: tuple[int, int, int], dtype: torch.dtype, training: bool) -> None:
    """Refuse tables that the memory which is free cannot hold, before the system kills the run."""
    sizes = regions(shape, dtype)
    need = sum(size for name, (_, size) in sizes.items() if training or name == "rows")
    free = available_ram()
    if free is not None and need > free:
        states = ", with optimizer states," if training else ""
        raise TableError(
            f"--offload cpu: the tables{states} need {gib(need)} of RAM and {gib(free)} are "
            "available: use --offload disk" + (" or --table_dtype bfloat16" if training else "")
        )


def available_ram() -> int | None:
    """Bytes that programs can still have, where the system tells (Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":") for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def check_disk(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    out_dir: Path,
    resume: bool = False,
    copies: int = 3,
) -> None:
    """Refuse a run whose files will not fit: the live one, a snapshot (there already if the run
    resumes), and the next snapshot, which is written before the last one goes: three `copies`."""
    size = regions(shape, dtype)["end"][0]
    need = (copies - (resume and len(snapshots(out_dir)) > 0)) * size
    here = next(p for p in (out_dir, *out_dir.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(here).free
    live = out_dir / LIVE
    free += live.stat().st_size if live.exists() else 0  # of a run that crashed: will be replaced
    if need > free:
        raise TableError(
            f"--offload disk: up to {copies} x {size / 2**30:.2f} GiB of tables and optimizer "
            f"states, {gib(need)} more, and {here} has {gib(free)} free: choose another --out_dir "
            "or --table_dtype bfloat16"
        )
