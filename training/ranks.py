"""What the processes that torchrun started, the ranks, do together; a single process does none of
it. Each rank has the backbone, columns of all tables (tables/sharded.py) and every P-th
micro-batch. Rank 0 writes."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from model import Decoder
from tables import sharded

rank = 0  # of this process
size = 1  # how many there are


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Join the other processes if torchrun started this one, and leave together with them. Only the
    first rank to fail prints its error."""
    global rank, size
    # Builds for Jetson may lack all of torch.distributed but the first.
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        yield
        return
    # Ids are exchanged on CPUs, so that no GPU waits for them.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        yield
        leave(0)
    except SystemExit as stop:  # all were asked to stop
        leave(stop.code)
    except BaseException:
        # torchrun sends SIGTERM to all once one dies: let this one finish its message.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.stderr = sys.__stderr__
        if store.add("failed", 1) > 1:
            raise SystemExit(1) from None
        raise


def leave(code: int) -> None:
    """End this process, with the others."""
    dist.all_reduce(torch.zeros(1))  # others may still communicate
    dist.destroy_process_group()
    sys.stdout.flush()
    # Not as Python ends: then, in one run of ten, a thread of PyTorch's aborts the process.
    os._exit(code)


def add_up(*tensors: Tensor) -> None:
    """Sum tensors over the ranks, in place, in one message."""
    if size > 1 and tensors:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, total in zip(tensors, parts, strict=True):
            tensor.copy_(total.view(tensor.shape))


def wait(number: int = 0) -> int:
    """Wait for all ranks. Returns the sum of their numbers."""
    return int(sums(number)[0])


def sums(*numbers: float) -> list[float]:
    """The sum of each number over the ranks."""
    total = torch.tensor(numbers, dtype=torch.float64)  # on CPUs, so that no GPU waits
    add_up(total)
    return total.tolist()


def add_up_gradients(parameters: list[Tensor]) -> None:
    """Sum the gradients of parameters over the ranks. Some may have one in a few ranks alone, as
    those of an expert that no token of the others has chosen: there, it is zero."""
    if size == 1:
        return
    n_rank = sums(*(p.grad is not None for p in parameters))
    used = [p for p, n in zip(parameters, n_rank, strict=True) if n]
    for p in used:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    add_up(*(p.grad for p in used))


# --- tables, of which each rank has columns ---


def keep_columns(model: Decoder) -> None:
    """Leave a decoder this rank's columns of an embedding that is a table, which it has whole."""
    if size > 1 and model.head is not None:
        model.wte = sharded.shard(model.wte)


def change_columns(checkpoint: dict, names: list[str], whole: bool) -> None:
    """In a checkpoint, change rows and state of the tables `names` from whole ones, as files have
    them, to this rank's columns; or back to `whole` ones, in the RAM of rank 0."""
    if size == 1:
        return

    def changed(tensor: Tensor) -> Tensor:
        if not whole:
            return sharded.my_columns(tensor)
        received = list(sharded.gather_columns(tensor))
        return torch.cat(received) if received else tensor  # rank 0 receives

    rows = checkpoint["optimizer"]["rows"] if "optimizer" in checkpoint else {}
    for name in names:
        for key in checkpoint["model"]:
            if key.startswith(f"{name}.weight."):
                checkpoint["model"][key] = changed(checkpoint["model"][key])
        if name in rows:
            by_number = checkpoint["args"].get("table_state") == "number"
            rows[name]["state"] = [
                # Else one moment a row, which all ranks have.
                changed(tensor) if by_number or tensor.shape[1] > 1 else tensor
                for tensor in rows[name]["state"]
            ]
