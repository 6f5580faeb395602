"""Tables whose columns are split over the P ranks of a process group (training/ranks.py).

Rank r owns columns r W/P to (r + 1) W/P of every table and its moments: ranks own, read and send
alike. A lookup, of all at once, gathers ids, on CPUs, and columns of their rows come back. Autograd
sends gradients the other way, and sums them in the order of ranks.
"""

from collections import Counter
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common import UserError
from tables.tables import Tables, send

sent = Counter()  # bytes that left this rank


def gather(mine: Tensor) -> list[Tensor]:
    """A tensor of one shape from each rank. Bytes: not all backends know all types."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    sent["ids"] += (len(every) - 1) * mine.nbytes
    dist.all_gather([each.view(torch.uint8) for each in every], mine.view(torch.uint8))
    return every


class Exchange(torch.autograd.Function):
    """[P, ..], part p of which goes to rank p -> [P, ..], what came from each rank."""

    @staticmethod
    def forward(ctx, parts: Tensor) -> Tensor:
        received = torch.empty_like(parts := parts.contiguous())
        sent["rows"] += parts[1:].nbytes
        dist.all_to_all_single(received.view(torch.uint8), parts.view(torch.uint8))
        return received

    backward = forward


class ShardedTables(Tables):
    """Tables that store, read and update columns of this rank, and give the decoder whole rows."""

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        distinct, position = torch.unique(ids.cpu(), return_inverse=True)  # [n], [B, T]
        most = int(max(gather(torch.tensor([len(distinct)]))))
        padded = torch.cat([distinct, distinct[-1:].expand(most - len(distinct))])
        for columns in super().lookup(torch.stack(gather(padded))):  # [P, most, W/P]
            rows = Exchange.apply(columns).transpose(0, 1).flatten(1)  # [most, W]
            yield F.embedding(send(position, rows.device), rows)  # [B, T, W]


def shard(tables: Tables, width: int) -> Tables:
    """Let tables of my columns, or whole ones, be those of all ranks. UserError: they cannot."""
    if not (dist.is_initialized() and isinstance(tables, Tables)):
        return tables
    tables.rank, tables.n_rank = dist.get_rank(), (n := dist.get_world_size())
    if width % n:
        raise UserError(f"--nproc_per_node: {n} processes do not divide rows of {width} numbers")
    for weight in [weight for weight in tables.weight if tables.width == width]:
        weight.data = my_columns(weight.data).clone()
    tables.width, kind = width // n, type(tables)
    tables.__class__ = type(f"Sharded{kind.__name__}", (ShardedTables, kind), {})
    if tables.on_disk:
        tables.storage.shape, tables.storage.parts = (*tables.storage.shape[:2], width), parts
    return tables


def my_columns(whole: Tensor) -> Tensor:
    return whole.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()]


def parts(columns: Tensor) -> Iterator[Tensor]:
    """On rank 0, yield columns [V, .., W/P] of all ranks as parts of the whole [k, .., W]."""
    for part in columns.split(max(1, (1 << 26) // columns[0].nbytes)):
        every = gather(part.contiguous()) if part.dim() > 1 else [part]
        if dist.get_rank() == 0:
            yield torch.cat([each.cpu() for each in every], dim=-1)
