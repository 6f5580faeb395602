"""What processes do together that torchrun started; one alone does nothing here. Each rank has the
backbone, columns of all tables (tables/sharded.py) and every P-th micro-batch. Rank 0 writes."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from common import UserError
from config import ModelConfig
from model import Decoder
from tables.sharded import my_columns, parts, sent, shard

rank, size = 0, 1  # of this process, and how many there are


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Join the others if torchrun started this process. Of those that fail, the first says why."""
    global rank, size
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"  # no GPU waits for ids
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    # torchrun ends all when one has died: who is about to say so may finish that.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exc_info()[1] or sys.exit(128 + number))
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        yield
        wait()  # nobody leaves while others receive
        dist.destroy_process_group()
    except Exception as error:
        sys.stderr = sys.__stderr__
        if store.add("failed", 1) > 1:
            raise SystemExit(1) from None
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise UserError("another process of this run died: go on with --resume") from None
        raise


def add_up(*tensors: Tensor) -> None:
    """Sum tensors over the ranks, in place, in one message."""
    if size > 1:
        flat = parameters_to_vector(tensors)
        sent["backbone"] += 2 * flat.nbytes * (size - 1) // size  # as a ring: adds up, then tells
        dist.all_reduce(flat)
        vector_to_parameters(flat, tensors)


def wait(number: int = 0) -> int:
    """Wait for all ranks. Returns the sum of their numbers."""
    add_up(total := torch.tensor(number))
    return int(total)


def make_model(config: ModelConfig, tables: Callable) -> Decoder:
    """A decoder of which this rank has columns of what `tables` makes, of (n_table, V, columns)."""
    model = Decoder(config, lambda n, v, w: shard(tables(n, v, w // size), w))
    shard(model.wte, config.n_embd)
    return model


def bytes_per_step(model: Decoder, n: int) -> float:
    """What a rank sends in a step whose micro-batches have up to n distinct tokens each, one on
    each rank: ids, columns and their gradients, the backbone's gradients and a norm, float32."""
    tables = [t for t in (model.tables, model.wte) if getattr(t, "n_rank", 1) > 1 and len(t.weight)]
    width = sum(size * weight.shape[1] for each in tables for weight in each.weight)
    backbone = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return (size - 1) * (8 * (n + 1) * len(tables) + 2 / size * 4 * (n * width + backbone + 1))


def change_columns(checkpoint: dict, *names: str, whole: bool) -> None:
    """In a checkpoint change rows and moments of these tables from whole ones, as files have them,
    to columns, or back to `whole` ones, in the RAM of rank 0."""
    rows = checkpoint.get("optimizer", {}).get("rows", {})
    change = (lambda columns: torch.cat([*parts(columns)] or [columns])) if whole else my_columns
    for name in names if size > 1 else ():
        for key in [key for key in checkpoint["model"] if key.startswith(f"{name}.weight.")]:
            checkpoint["model"][key] = change(checkpoint["model"][key])
        if name in rows:
            rows[name] |= {key: [change(each) for each in rows[name][key]] for key in ("m", "v")}
