"""How several processes do what ranks.py names. It is imported where torchrun started them."""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from common import UserError
from model import Decoder
from tables import sharded
from tables.tables import Tables


@contextlib.contextmanager
def joined() -> Iterator[tuple[int, int]]:
    """Join the other processes, and leave together with them. Yields the rank of this one, and how
    many there are."""
    # Ids are exchanged on CPUs, so that no GPU waits for them.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        yield rank, size
        leave(0)
    except SystemExit as stop:  # all were asked to stop
        leave(stop.code)
    except BaseException as error:
        # torchrun sends SIGTERM to all once one dies: let this one finish its message.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.stderr = sys.__stderr__
        if store.add("failed", 1) > 1:
            raise SystemExit(1) from None
        text = str(error)
        # gloo writes "Connection" or "connection".
        if re.search("connection (closed|reset) by peer", text, re.IGNORECASE):
            raise UserError(
                f"another process of this run died: continue with --resume ({text.splitlines()[0]})"
            ) from None
        raise


def leave(code: int) -> None:
    """End this process, with the others."""
    dist.all_reduce(torch.zeros(1))  # others may still communicate
    dist.destroy_process_group()
    sys.stdout.flush()
    # Not as Python ends: then, in one run of ten, a thread of PyTorch's aborts the process.
    os._exit(code)


def add_up(tensors: Sequence[Tensor]) -> None:
    flat = parameters_to_vector(tensors)
    dist.all_reduce(flat)
    vector_to_parameters(flat, tensors)


def split(kind: type[Tables], width: int) -> tuple[type[Tables], int]:
    return sharded.sharded(kind), sharded.columns_per_rank(width)


def shard(model: Decoder) -> None:
    model.tables = sharded.shard(model.tables)
    if isinstance(model.wte, Tables):
        model.wte = sharded.shard(model.wte)


def change_columns(checkpoint: dict, name: str, whole: bool) -> None:
    def changed(tensor: Tensor) -> Tensor:
        if not whole:
            return sharded.my_columns(tensor)
        received = list(sharded.gather_columns(tensor))
        return torch.cat(received) if received else tensor  # rank 0 receives

    for key in checkpoint["model"]:
        if key.startswith(f"{name}.weight."):
            checkpoint["model"][key] = changed(checkpoint["model"][key])
    rows = checkpoint["optimizer"]["rows"] if "optimizer" in checkpoint else {}
    if name in rows and rows[name]["state"][0].shape[1] > 1:  # else it is of whole rows
        rows[name]["state"] = [changed(tensor) for tensor in rows[name]["state"]]
