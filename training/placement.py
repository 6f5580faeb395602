"""Where the tables of a run or a command are: --offload, on a device, in one process or more."""

import math
from collections.abc import Callable
from pathlib import Path

import torch

from common import UserError
from model import Decoder
from offload import OffloadedTables
from tables import sharded
from tables.storage import DTYPES, DiskStorage, RamStorage, check_room
from tables.tables import STREAM_DEVICES, ResidentTables, StoredTables, Tables
from training import ranks
from training.settings import Settings


def make_tables(
    offload: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    live: Path | None = None,
    saved: DiskStorage | None = None,
    fresh: bool = False,
) -> Callable[[int, int, int], Tables]:
    """Returns a function of (n_table, n_row, width) that makes the tables of a `Decoder`, used
    on `device`, stored where `offload` says; with several ranks, this rank's columns. It raises
    UserError if there is no room.

        offload    in training                   else
        none       the device                    the device
        cpu        RAM                           RAM
        disk       new files, in `live`          the files of `saved`; without any, as cpu

    Without a GPU, RAM and the device are one.

    Args:
        live: None except in training: then the folder for tables on disk, a new one.
        saved: the tables of a checkpoint, if they are on disk. In training, it is given only by a
            run that resumes, and only tells how much room is needed. Else it is read in place.
        fresh: whether rows are yet to be drawn, not loaded.
    """
    assert offload in ("none", "cpu", "disk"), f"offload={offload!r} is not none, cpu or disk"
    training = live is not None
    far = offload != "none" and device.type in STREAM_DEVICES
    on_disk = offload == "disk" and (training or saved is not None)

    def make(n_table: int, n_row: int, width: int) -> Tables:
        tables_class = ResidentTables
        is_stored = n_table > 0 and (on_disk or far)
        if is_stored:  # a GPU fetches them, others read them in place
            tables_class = OffloadedTables if far else StoredTables
        if ranks.size > 1:
            tables_class = sharded.sharded(tables_class)
            width = sharded.columns_per_rank(width)
        shape = (n_row, n_table, width)

        # 1) in the memory of the device
        if not is_stored:
            if device.type == "cpu" and offload != "disk":
                check_room(math.prod(shape) * dtype.itemsize)
            with torch.device("cpu" if training else "meta"):  # loaded rows take their place
                return tables_class(n_table, n_row, width, dtype)

        # 2) in files or in RAM
        if on_disk and training:
            # Room for the live tables, a snapshot (a resumed run has it), and the next one.
            storage = DiskStorage.create(live, shape, dtype, copies=2 if saved else 3)
        elif on_disk:
            storage = saved
        else:
            storage = RamStorage(shape, dtype)
        storage.fresh = fresh
        return tables_class(storage, device)

    return make


def check_own(model: Decoder, settings: Settings, device: torch.device) -> None:
    """UserError: settings ask for what tables of a relative's own kind do not do."""
    dtype = DTYPES[settings.table_dtype]
    far = settings.offload != "none"
    if settings.offload == "cpu":  # without a GPU, RAM is where they are
        far = device.type in STREAM_DEVICES
    for name, tables in model.all_tables.items():
        if name == "wte" or not len(tables.weight):
            continue
        own = f"the relative's own tables, `{name}`"
        if far and tables.storage is None:
            raise UserError(f"--offload {settings.offload} does not reach {own}: leave it out")
        if dtype not in (torch.float32, tables.weight[0].dtype):
            raise UserError(f"--table_dtype does not reach {own}: leave it out")
        if tables.n_rank != ranks.size or (ranks.size > 1 and name != "tables"):
            raise UserError(f"{own}, train in one process only")
