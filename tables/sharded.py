"""Tables whose columns are split over the P ranks of a process group (training/ranks.py).

Rank r owns columns r W/P to (r + 1) W/P of every table and of its moments. A lookup costs two
exchanges: ids go to all ranks, columns of their rows come back.

    ids        every rank's distinct ids [n], padded to the largest n     all_gather, on CPUs
    columns    [P, n, W/P]: mine, of everybody's rows                     all_to_all_single
    rows       [n, W]: of my ids, columns from all ranks side by side

Autograd sends gradients the same way back. There they meet in the order of ranks, so the owner
has what one process would have, W/P wide, and updates it by the same code. Columns, not rows by
their ids: all ranks own, read and send alike, however often a token occurs.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common import UserError
from tables.tables import Tables, send

PART = 1 << 26  # bytes of a table that are gathered at a time
sent: Counter[str] = Counter()  # bytes that left this rank: of ids, columns, gradients


def gather(mine: Tensor) -> list[Tensor]:
    """A tensor of one shape from each rank."""
    mine = mine.contiguous()
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather([each.view(torch.uint8) for each in every], mine.view(torch.uint8))
    return every


def gather_ids(ids: Tensor) -> Tensor:
    """Ids [n] of each rank -> those of all ranks [P, most], padded by repeating the last one."""
    most = max(torch.cat(gather(torch.tensor([len(ids)]))).tolist())
    ids = torch.cat([ids, ids[-1:].expand(most - len(ids))])
    sent["ids"] += (ids.nbytes + 8) * (dist.get_world_size() - 1)
    return torch.stack(gather(ids))


class Exchange(torch.autograd.Function):
    """[P, n, W/P], part p of which goes to rank p -> what came from each rank. Gradients return."""

    @staticmethod
    def forward(ctx, parts: Tensor, kind: str = "columns") -> Tensor:
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received.view(torch.uint8), parts.view(torch.uint8))
        sent[kind] += parts[1:].nbytes
        return received

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return Exchange.forward(ctx, grad, "gradients")


class ShardedTables(Tables):
    """What a class of tables is given by `shard`: it stores, reads and updates columns of this
    rank, `width` of them, and decoders get whole rows. All ranks look up at the same time."""

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        if not len(self.weight):
            return iter(())
        distinct, position = torch.unique(ids.cpu(), return_inverse=True)  # [n], [B, T]
        return self.receive(super().lookup(gather_ids(distinct)), position)

    def receive(self, tables: Iterator[Tensor], position: Tensor) -> Iterator[Tensor]:
        for columns in tables:  # [P, n, W/P]
            rows = Exchange.apply(columns).transpose(0, 1).flatten(1)  # [n, W]
            position = send(position, rows.device)
            yield F.embedding(position, rows)  # [B, T, W]

    def draw(self, n: int, width: int, *more) -> Tensor:  # the same model, however many ranks
        return my_columns(super().draw(n, width * dist.get_world_size(), *more))


def shard(tables: Tables) -> Tables:
    """Tables of this rank's columns, whatever their class, as those of all ranks together."""
    kind = type(tables)
    tables.__class__ = type(f"Sharded{kind.__name__}", (ShardedTables, kind), {})
    if tables.on_disk:
        tables.storage.parts, tables.storage.width = (
            whole_parts,
            tables.width * dist.get_world_size(),
        )
    return tables


def shard_whole(tables: Tables) -> Tables:
    """The same of tables that every rank has as a whole."""
    for weight in tables.weight:
        weight.data = my_columns(weight.data).clone()
        tables.width = weight.shape[1]
    return shard(tables)


def sharded(make: Callable[..., Tables]) -> Callable[..., Tables]:
    """Of what makes tables (n_table, V, W): what makes this rank's part of them. UserError: P does
    not divide W."""
    return lambda n_table, vocab_size, width: shard(make(n_table, vocab_size, share(width)))


def share(width: int) -> int:
    """How many columns of a row each rank owns."""
    if width % (n := dist.get_world_size()):
        raise UserError(f"{n} processes cannot share rows of {width} numbers: take a divisor of it")
    return width // n


def my_columns(whole: Tensor) -> Tensor:
    """[.., W] -> [.., W/P], a view."""
    n = share(whole.shape[-1])
    return whole.narrow(-1, dist.get_rank() * n, n)


def whole_parts(columns: Tensor) -> Iterator[Tensor]:
    """Yield columns [V, .., W/P] of all ranks as parts of the whole [k, .., W], on the CPU, so that
    it need not fit into memory. What is not split, [V], comes as it is."""
    if columns.dim() == 1:
        yield columns
        return
    for part in columns.split(max(1, PART // columns[0].nbytes)):
        yield torch.cat([each.cpu() for each in gather(part)], dim=-1)
