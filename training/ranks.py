"""Several processes that train one model, started by torchrun. In one process nothing here does
anything.

Each rank (process) has the whole backbone and columns of every table (tables/sharded.py). It takes
every P-th micro-batch; gradients are summed once per step. Rank 0 alone prints and writes.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from common import UserError
from tables.sharded import my_columns, sent, whole_parts


def size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if size() > 1 else 0


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Be one of the processes of torchrun, if it started this one. Ids and decisions are exchanged
    on the CPU, so that no GPU waits for them. The first rank that fails says why, in its words."""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        yield
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    store, number, n = next(dist.rendezvous("env://"))
    # A rank that dies is noticed at once; to wait for one that saves or prepares data is no error.
    group = dict(store=store, rank=number, world_size=n, timeout=timedelta(hours=6))
    dist.init_process_group(backend, **group)
    try:
        with contextlib.ExitStack() as silent:
            if number:
                nowhere = silent.enter_context(open(os.devnull, "w"))
                silent.enter_context(contextlib.redirect_stdout(nowhere))
                silent.enter_context(contextlib.redirect_stderr(nowhere))
            yield
            largest(0)  # nobody leaves while others still receive
    except Exception as error:
        if store.add("failed", 1) > 1:
            raise SystemExit(1) from None
        if re.search("gloo|nccl|onnection", f"{type(error)} {error}", re.IGNORECASE):
            lost = "a process of this run has ended: go on from its last checkpoint with --resume"
            raise UserError(lost) from None
        raise
    dist.destroy_process_group()


def largest(number: int) -> int:
    """The largest number of all ranks; they wait for each other."""
    if size() > 1:
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        number = int(tensor)
    return number


def total(numbers: list[float]) -> list[float]:
    """Each number summed over the ranks."""
    if size() > 1:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(tensor)
        numbers = tensor.tolist()
    return numbers


def add_up(tensors: list[Tensor]) -> None:
    """Sum tensors over the ranks, in place, as one message."""
    if size() > 1:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        sent["sums"] += 2 * flat.nbytes * (size() - 1) // size()  # by the usual ring
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def total_norm(grads: list[Tensor], of_columns: list[Tensor]) -> Tensor:
    """The norm of gradients that all ranks have, and of those that each has its columns of."""
    norm = torch.nn.utils.get_total_norm
    if size() == 1 or not of_columns:
        return norm(grads + of_columns)
    square = norm(of_columns) ** 2
    add_up([square])
    return (norm(grads) ** 2 + square).sqrt()


def change_columns(checkpoint: dict, change: Callable[[Tensor], Tensor]) -> None:
    """Replace what is split over the ranks, rows and moments, in the dictionary of a checkpoint."""
    weights = checkpoint["model"]
    for name in [name for name in weights if name.startswith(("tables.weight.", "wte.weight."))]:
        weights[name] = change(weights[name])
    for rows in checkpoint.get("optimizer", {}).get("rows", {}).values():
        rows |= {name: [change(each) for each in rows[name]] for name in ("m", "v")}


def take_columns(checkpoint: dict) -> None:
    """From a checkpoint's rows and moments keep the columns of this rank."""
    if size() > 1:
        change_columns(checkpoint, my_columns)


def gather_columns(checkpoint: dict) -> None:
    """The inverse: rank 0 gets whole rows and moments, in RAM."""

    def whole(columns: Tensor) -> Tensor:
        parts = [part for part in whole_parts(columns) if rank() == 0]
        return torch.cat(parts) if parts else columns

    if size() > 1:
        change_columns(checkpoint, whole)
