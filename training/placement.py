"""Where the tables of a run or a command are: --offload, on a device, in one process or several;
and how weights lie for decoding."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from common import has_bfloat16
from model import Decoder
from offload import OffloadedTables
from tables.storage import DiskStorage, RamStorage, check_room
from tables.tables import STREAMS, ResidentTables, StoredTables, Tables
from training import ranks


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
        saved: of a checkpoint. In training that of the run that goes on, else it is read in place.
        fresh: whether rows are yet to be drawn, not loaded.
    """
    training = live is not None
    far = offload != "none" and device.type in STREAMS
    on_disk = offload == "disk" and (training or saved is not None)

    def make(n_table: int, n_row: int, width: int) -> Tables:
        kind = ResidentTables
        is_stored = n_table > 0 and (on_disk or far)
        if is_stored:  # a GPU reads them through the ring, others in place
            kind = OffloadedTables if far else StoredTables
        kind, width = ranks.tables_of_rank(kind, width)
        shape = (n_row, n_table, width)

        # 1) in the memory of the device
        if not is_stored:
            if device.type == "cpu" and offload != "disk":
                check_room(math.prod(shape) * dtype.itemsize)
            return kind(n_table, n_row, width, dtype)

        # 2) in files or in RAM
        if on_disk and training:
            # Room for the live tables, a snapshot (a resumed run has it), and the next one.
            storage = DiskStorage.create(live, shape, dtype, copies=2 if saved else 3)
        elif on_disk:
            storage = saved
        else:
            storage = RamStorage(shape, dtype)
        storage.fresh = fresh
        return kind(storage, device)

    return make


def cast_backbone(model: Decoder, dtype: torch.dtype) -> None:
    """Cast all but the tables, whose rows are few in a step, and may be saved again."""
    for name, module in model.named_children():
        if name != "tables":
            module.to(dtype)


@torch.no_grad()
def use_column_major_weights(model: Decoder) -> None:
    """Store linear layers with more outputs than inputs column by column: on a CPU, multiplying a
    single row by them is twice as fast. So lies a head that is the input embedding, too, where
    the lookups of a long prompt take milliseconds more."""
    matrices = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if model.head is None:
        matrices.append(model.wte)
    for module in matrices:
        n_out, n_in = module.weight.shape
        if n_out > n_in:
            module.weight.data = module.weight.T.contiguous().T


@torch.no_grad()
def norm_keys(model: Decoder) -> None:
    """Norm Embformer's keys in resident tables, once for all steps of decoding from ids. Only where
    tables have the backbone's dtype: else keys would be rounded at another point."""
    tables = model.tables
    if isinstance(tables, ResidentTables) and tables.weight[0].dtype == model.head_weight.dtype:
        for block, rows in zip(model.blocks, tables.weight, strict=True):
            block.attn.qkv.norm_keys(rows)


def training_dtype(dtype: str, device: torch.device) -> str:
    """What --dtype auto means on a device: what it multiplies fastest."""
    if dtype != "auto":
        return dtype
    if has_bfloat16(device):
        return "bfloat16"
    return "float16" if device.type == "cuda" else "float32"
