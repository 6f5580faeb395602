"""What the processes that torchrun started, the ranks, do together: a single process does none of
it, several as several.py says. Each rank has the backbone, columns of all tables and every P-th
micro-batch. Rank 0 writes."""

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from model import Decoder
from tables.tables import Tables

rank = 0  # of this process
size = 1  # how many there are
several: ModuleType  # several.py, if torchrun started this process


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Join the other processes if torchrun started this one, and leave together with them. Only the
    first rank to fail prints its error."""
    global rank, size, several
    if not dist.is_torchelastic_launched():
        yield
        return
    several = importlib.import_module("training.several")
    with several.joined() as (rank, size):
        yield


def add_up(*tensors: Tensor) -> None:
    """Sum tensors over the ranks, in place, in one message."""
    if size > 1:
        several.add_up(tensors)


def wait(number: int = 0) -> int:
    """Wait for all ranks. Returns the sum of their numbers."""
    total = torch.tensor(number)
    add_up(total)
    return int(total)


def micro_batches(ids: Tensor, targets: Tensor, n_part: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's parts of a batch [B, T]: part k of n is sequences k, k + n, k + 2n, ..."""
    numbers = range(rank, n_part, size)
    return [(ids[number::n_part], targets[number::n_part]) for number in numbers]


# --- tables, of which each rank has columns (tables/sharded.py) ---


def split(kind: type[Tables], width: int) -> tuple[type[Tables], int]:
    """The kind of tables that has this rank's columns, and how many of `width` these are.
    UserError: the ranks do not divide them."""
    return several.split(kind, width) if size > 1 else (kind, width)


def shard(model: Decoder) -> None:
    """Leave a decoder this rank's columns of tables that it still has as a whole."""
    if size > 1:
        several.shard(model)


def change_columns(checkpoint: dict, name: str, whole: bool) -> None:
    """In a checkpoint, change rows and state of the tables `name` from whole ones, as files have
    them, to this rank's columns; or back to `whole` ones, in the RAM of rank 0."""
    if size > 1:
        several.change_columns(checkpoint, name, whole)
