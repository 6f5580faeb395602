"""Token tables: the interface that the decoder sees, and the home where they are resident.

A token table is a V x W matrix owned by one layer. A forward pass reads only the rows of the
tokens in its input, and it knows which ones before the first layer runs. Everything else follows
from that: rows are fetched each once (deduplicated), only they get a gradient, an optimizer step
costs what the batch costs (rowadam.py), and rows in slow memory are fetched while earlier layers
compute (offload.py). Wherever tables live, the decoder asks for their rows in the same way:

    for rows in tables.lookup(ids): ...        # rows of table 0, 1, ... [B, T, W], in layer order

This file knows rows, ids and devices, nothing about transformers.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tablefile import TableFile

STREAMS = {"cuda"}  # kinds of devices whose copies can run beside compute


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device for which the host does not wait: a GPU that is still busy fetches from
    pinned memory when it gets there, from any other the host would have to hand the data over."""
    if device.type in STREAMS and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Tables(nn.Module):
    """What all homes have in common: rows read where they are, and their gradients.

    Args:
        vocab_size: rows of each table, V.
        width: numbers in a row, W.
    """

    weight: nn.ParameterList | list[Tensor]  # a [V, W] tensor for each table
    file: TableFile | None = None  # that holds what a checkpoint would hold otherwise

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.vocab_size, self.width = vocab_size, width
        # What training lookups read since the last optimizer step: the distinct ids [n], still on
        # the device they came from, and a leaf [n, W] per table, whose .grad autograd fills.
        self.reads: list[tuple[Tensor, list[Tensor]]] = []

    @torch.no_grad()
    def init_rows(self, std: float) -> None:
        """Rows ~ Normal(0, std), in parts: no home needs room for a second table. Parts of whole
        multiples of 16 numbers draw what PyTorch would draw in one go."""
        for weight in self.weight:
            for part in weight.split(1 << 16):
                part.copy_(torch.empty(part.shape, device=part.device).normal_(0, std))

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the rows of each table in turn, [B, T, W] on the compute device.

        In training the rows are remembered for `gradients`. `ids` [B, T] may stay on the CPU
        while the tables are on a GPU: finding the distinct ids there would make the host wait.
        """
        if not self.weight:
            return
        device = self.weight[0].device
        whole = self.weight[0].requires_grad
        if whole or not (self.training and torch.is_grad_enabled()):
            ids = send(ids, device)
            for weight in self.weight:
                yield F.embedding(ids, weight)
            return
        distinct, position = torch.unique(ids, return_inverse=True)  # [n], [B, T]
        position, on_device = send(position, device), send(distinct, device)
        leaves = [
            weight.detach().index_select(0, on_device).float().requires_grad_()  # [n, W]
            for weight in self.weight
        ]
        self.reads.append((distinct, leaves))
        for leaf in leaves:
            # Expanding [n, W] -> [B, T, W] sums the gradients of equal tokens on the way back.
            yield F.embedding(position, leaf)

    def gradients(self) -> tuple[Tensor, list[Tensor]]:
        """The gradients of all rows read since the last call, micro-batches merged.

        Returns:
            ids [n] distinct and sorted, beside the rows, and for each table the summed gradient
            [n, W] on the compute device.

        Raises:
            ValueError: nothing was read and differentiated.
        """
        reads = [read for read in self.reads if read[1] and read[1][0].grad is not None]
        self.reads = []
        if not reads:
            raise ValueError("no rows were read and differentiated since the last step")
        home, device = self.weight[0].device, reads[0][1][0].device
        if len(reads) == 1:
            ids, leaves = reads[0]
            return send(ids, home), [leaf.grad for leaf in leaves]
        ids, position = torch.unique(torch.cat([ids for ids, _ in reads]), return_inverse=True)
        position = send(position, device)
        merged = []
        for parts in zip(*(leaves for _, leaves in reads), strict=True):
            grad = torch.cat([leaf.grad for leaf in parts])  # [sum n, W]
            merged.append(grad.new_zeros(len(ids), self.width).index_add_(0, position, grad))
        return send(ids, home), merged

    def moments(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        """What Adam remembers, beside the rows: m and v [V, W] per table, count and last [V]."""
        m, v = (
            [torch.zeros_like(w, dtype=torch.float32, requires_grad=False) for w in self.weight]
            for _ in range(2)
        )
        device = self.weight[0].device if m else None
        count = torch.zeros(self.vocab_size, dtype=torch.int64, device=device)
        return m, v, count, torch.zeros_like(count)

    def write(self, ids: Tensor, updates: list[Callable[..., None]], grads: list[Tensor]) -> None:
        """Run the update of each table, of rows `ids` [n], on its gradient."""
        for update, grad in zip(updates, grads, strict=True):
            update(grad)

    def flush(self) -> None:
        """Run the updates that still wait."""


class ResidentTables(Tables):
    """All tables of a model in the memory of the compute device.

    Args:
        n_table: number of tables, one per layer that has one.
        vocab_size, width: as in `Tables`.
        dtype: of the rows; they are trained in float32 steps either way.
    """

    def __init__(
        self, n_table: int, vocab_size: int, width: int, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(vocab_size, width)
        # No requires_grad: autograd would fill a V x W gradient, nearly all of it zeros, each step.
        # Setting it (train.py --table_optimizer adamw) makes them ordinary parameters again.
        self.weight = nn.ParameterList(
            nn.Parameter(torch.zeros(vocab_size, width, dtype=dtype), requires_grad=False)
            for _ in range(n_table)
        )
