"""Tables whose columns are split over the P ranks of a process group (training/ranks.py).

Rank r owns columns r W/P to (r + 1) W/P of every table, so all ranks own, read and send equally
much. All ranks look up together: ids are gathered, on CPUs, and columns of their rows come back.
Autograd sends gradients the other way, and sums them in the order of ranks.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common import UserError
from tables.tables import ResidentTables, Tables, send


def gather(mine: Tensor) -> list[Tensor]:
    """A tensor of one shape from each rank. As bytes: not all backends know all types."""
    received = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather([tensor.view(torch.uint8) for tensor in received], mine.view(torch.uint8))
    return received


class Exchange(torch.autograd.Function):
    """[P, ..], part p of which goes to rank p -> [P, ..], what came from each rank."""

    @staticmethod
    def forward(ctx, parts: Tensor) -> Tensor:
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received.view(torch.uint8), parts.view(torch.uint8))
        return received

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return Exchange.forward(ctx, grad)


class ShardedTables(Tables):
    """Tables that store, read and update columns of this rank, and give the decoder whole rows."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.n_rank = dist.get_world_size()
        if self.on_disk:
            self.storage.n_rank = self.n_rank
            self.storage.gather_columns = gather_columns

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        distinct, position = self.distinct(ids)  # [n], [B, T]
        # Ranks send messages of one size: the last id is repeated up to the largest n.
        size = int(max(gather(torch.tensor([len(distinct)]))))
        padding = distinct[-1:].expand(size - len(distinct))
        everybodys_ids = torch.stack(gather(torch.cat([distinct, padding])))  # [P, size]
        for columns in super().lookup(everybodys_ids):  # [P, size, W/P]
            rows = Exchange.apply(columns).transpose(0, 1).flatten(1)  # [size, W]
            yield F.embedding(send(position, rows.device), rows)  # [B, T, W]

    def draw(self, n: int, std: float, device: torch.device) -> Tensor:
        whole = torch.empty(n, self.width * self.n_rank, device=device)  # the same in all ranks
        return my_columns(whole.normal_(0, std))

    def mean_square(self, grad: Tensor) -> Tensor:
        mean = super().mean_square(grad)  # over my columns
        dist.all_reduce(mean)
        return mean / self.n_rank


def sharded(kind: type[Tables]) -> type[Tables]:
    """The kind of tables that has columns of this rank."""
    return type(f"Sharded{kind.__name__}", (ShardedTables, kind), {})


def columns_per_rank(width: int) -> int:
    """W/P. UserError: P does not divide W."""
    n_rank = dist.get_world_size()
    if width % n_rank:
        sizes = f"{n_rank} processes in all must divide the width of rows, {width}"
        raise UserError(f"--nproc_per_node: {sizes}")
    return width // n_rank


def shard(tables: ResidentTables) -> Tables:
    """This rank's columns of an embedding, which it has as a whole."""
    mine = sharded(ResidentTables)(1, tables.n_row, columns_per_rank(tables.width))
    mine.weight[0].data = my_columns(tables.weight[0].data).clone()
    mine.requires_grad_(not tables.frozen)
    return mine


def my_columns(whole: Tensor) -> Tensor:
    return whole.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()]


def gather_columns(columns: Tensor) -> Iterator[Tensor]:
    """Each rank has columns [V, .., W/P] of its own. Rank 0 yields whole rows, some at a time
    [k, .., W]; the others yield nothing. All ranks call it."""
    part_size = max(1, (1 << 26) // columns[0].nbytes)
    for part in columns.split(part_size):
        every = gather(part.contiguous())
        if dist.get_rank() == 0:
            yield torch.cat([columns.cpu() for columns in every], dim=-1)
