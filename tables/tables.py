"""Token tables: the interface that the decoder sees, and tables in the memory of their device.

A token table is a V x W matrix owned by one layer. A forward pass reads only the rows of the tokens
in its input, known before the first layer runs. So each row is fetched once, only these rows get a
gradient (rmsprop.py), and slow memory is read in advance (offload.py). Wherever tables live, the
decoder asks for their rows in the same way:

    for rows in tables.lookup(ids): ...        # rows of table 0, 1, ... [B, T, W], in layer order

Four kinds of integers say which row is meant:

    ids        [B, T]   the token ids of a batch, or what a relative has in their place
    distinct   [n]      the same ids, each once, in ascending order
    position   [B, T]   where in `distinct` each token of the batch is: distinct[position] == ids
    slots      [n]      where each of these tokens lies in `rows(table)`: the slot is the id itself
                        if the device has the whole table, but not in a working set (offload.py)
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tables.storage import TableStorage
from tables.watch import Watch

STREAM_DEVICES = {"cuda"}  # kinds of devices whose copies can run beside compute


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device. The host does not wait for a GPU that reads pinned memory by itself.
    It waits for the GPU of a Mac, which (up to PyTorch 2.13 at least) might read the memory of the
    tensor when this has been freed."""
    by_itself = device.type in STREAM_DEVICES
    if by_itself and tensor.device.type == "cpu":
        tensor = tensor.contiguous().pin_memory()  # a strided tensor's copy would not be pinned
    return tensor.to(device, non_blocking=by_itself)


class Tables(nn.Module):
    """Base class: looks up rows and collects their gradients. `weight[i]` is the table of the i-th
    layer that has one (`Block.row_width` above 0).

    A kind of tables sets `weight` and may override lookup, read, rows, states, slots, updated,
    prefetch, add_state, draw, mean_square and flush."""

    weight: nn.ParameterList | list[Tensor]  # a [V, W] tensor for each table, where it is stored
    state: list[Tensor]  # likewise what the optimizer keeps for each number, see `add_state`
    storage: TableStorage | None = None  # where they are stored, if they are not parameters
    on_disk = False
    can_be_saved = True  # in a checkpoint, see `ExtraRows`
    frozen = False  # rows stay as they are, see `requires_grad_`
    n_rank = 1  # processes, each of which has columns of its own (sharded.py)

    def __init__(self, n_row: int, width: int) -> None:
        super().__init__()
        self.n_row = n_row
        self.width = width
        # The way of a gradient: a lookup in training makes leaves of autograd, a backward pass that
        # reaches one calls `collect`, `merge` adds up, and the optimizer takes the sums.
        # 1) Lookups with gradients since the last `merge`. Of each, the distinct ids [n], on the
        # CPU, and gradients [n, W] by table.
        self.reads: list[tuple[Tensor, dict[int, Tensor]]] = []
        # 2) The sums: distinct sorted ids [n], and gradients [n, W] for each table.
        self.merged: tuple[Tensor, list[Tensor]] | None = None
        self.watch = Watch()  # notices that nobody takes them

    @property
    def fresh(self) -> bool:
        """Whether rows are yet to be drawn. Else those of a checkpoint are there, or will be."""
        if self.storage is not None:
            return self.storage.fresh
        return not any(weight.is_meta for weight in self.weight)

    def __getstate__(self) -> dict:
        """A copy has no gradients, as those of parameters have none."""
        return {**vars(self), "reads": [], "merged": None}

    @torch.no_grad()
    def init_rows(self, std: float) -> None:
        """Draw rows from Normal(0, std), in parts, as a second table may not fit. As parts are
        multiples of 16 numbers, a CPU draws the same as in one go (but for a last part of less than
        16)."""
        self.flush()  # else rows that are elsewhere would come back
        for weight in self.weight:
            for part in weight.split(1 << 16):
                part.copy_(self.draw(len(part), std, part.device))

    def draw(self, n: int, std: float, device: torch.device) -> Tensor:
        """n rows of a table from Normal(0, std), [n, W]."""
        return torch.empty(n, self.width, device=device).normal_(0, std)

    # --- for the decoder ---

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the rows of each table in turn, [B, T, W] on the compute device; in training in
        float32, and they are remembered for `gradients`. `ids` [B, T] (or [B, T, R]: rows are
        [B, T, R, W]) should be on the CPU: to find the distinct ones on a GPU makes the host wait.
        An id out of range is an IndexError (on a GPU that reads resident tables, CUDA's
        assertion)."""
        if not len(self.weight):
            return
        # Ordinary parameters (--table_optimizer adamw), or nothing to differentiate.
        if self.weight[0].requires_grad or not self.in_training():
            ids = send(ids, self.weight[0].device)
            for weight in self.weight:
                yield F.embedding(ids, weight)
        else:
            yield from self.read_once(ids)

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of the only table, as of an `nn.Embedding`: hooks see them."""
        (rows,) = self.lookup(ids)
        return rows

    def in_training(self) -> bool:
        return self.training and torch.is_grad_enabled() and not self.frozen

    def read_once(self, ids: Tensor) -> Iterator[Tensor]:
        """Yield the rows of each table [B, T, W], of tokens [B, T], each of which is read once.
        The distinct rows of a table are one leaf of autograd [n, W]: it sums the gradients of all
        places of a token. `collect` takes them."""
        # Merge before each micro-batch: beside the sum, only the gradients of one are kept.
        self.merge()
        self.watch.lookup(waiting=self.merged is not None)
        distinct, position = self.distinct(ids)  # [n], [B, T]
        slots = self.slots(distinct)
        leaves = [self.read(table, slots).requires_grad_() for table in range(len(self.weight))]
        grads: dict[int, Tensor] = {}
        for table, leaf in enumerate(leaves):
            hook = partial(self.collect, distinct, grads, table)
            leaf.register_post_accumulate_grad_hook(hook)
        position = send(position, leaves[0].device)
        for leaf in leaves:
            # Expanding [n, W] -> [B, T, W] sums the gradients of equal tokens on the way back, in
            # float32: whoever computes in 16 bits casts the result.
            yield F.embedding(position, leaf)

    def read(self, table: int, slots: Tensor) -> Tensor:
        """A copy of the rows in these slots [n] of a table, in float32 or more, on the compute
        device: [n, W]."""
        rows = self.rows(table).detach().index_select(0, slots)
        return rows.to(torch.promote_types(rows.dtype, torch.float32))

    def distinct(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids of any shape -> distinct ids [n] in ascending order, and the position of each id in
        them, on the CPU: as `torch.unique` with the inverse. That sorts; of many ids, to mark those
        that occur is several times as fast. IndexError: an id is out of range."""
        ids = ids.cpu()
        if self.n_row > 64 * ids.numel():
            self.check_range(ids)
            return torch.unique(ids, return_inverse=True)
        present = np.zeros(self.n_row, bool)
        present[ids.numpy()] = True
        distinct = np.flatnonzero(present)  # [n]
        position = np.empty(self.n_row, np.int64)
        position[distinct] = np.arange(len(distinct))
        position = torch.from_numpy(position).index_select(0, ids.flatten())
        return torch.from_numpy(distinct), position.view(ids.shape)

    def check_range(self, ids: Tensor) -> None:
        """IndexError: an id is out of range. Neither a GPU nor `torch.unique` would say so."""
        if ids.numel() and not 0 <= ids.min() <= ids.max() < self.n_row:
            raise IndexError(f"ids from {ids.min()} to {ids.max()}: there are {self.n_row} rows")

    # --- gradients, from the leaves of `read_once` to the optimizer ---

    def collect(self, ids: Tensor, grads: dict[int, Tensor], table: int, leaf: Tensor) -> None:
        """A backward pass has reached the leaf of a table. It may not be the only one, as of two
        losses of a text; and others, such as an earlier layer's, may never be reached."""
        if not grads:
            self.reads.append((ids, grads))
        grads[table] = leaf.grad if table not in grads else grads[table] + leaf.grad
        leaf.grad = None

    def merge(self) -> None:
        """Add what backward passes have brought to the merged gradients."""
        for ids, grads in self.reads:
            some = next(iter(grads.values()))
            every = [grads.pop(table, None) for table in range(len(self.weight))]
            one = (ids, [torch.zeros_like(some) if grad is None else grad for grad in every])
            self.merged = one if self.merged is None else added(self.merged, one)
        self.reads = []

    def gradients(self) -> tuple[Tensor, list[Tensor]]:
        """The gradients of all rows read since the last `zero_grad`, micro-batches merged: distinct
        sorted ids [n], and for each table [n, W] on the compute device. They are valid until the
        next lookup, and may be clipped in place. AssertionError: there are none."""
        self.merge()
        self.watch.taken()
        assert self.merged, (
            "no rows were differentiated since the last step: are they used? Is the model in "
            "train() mode, and the optimizer's own (copy both at once)? Have tables become "
            "parameters, by its requires_grad_(True) (then call requires_grad_(False) of each of "
            'tables.weight), or been frozen after that was made (del optimizer.rmsprops["tables"])?'
        )
        return self.merged

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients. AssertionError, or a warning: nobody takes them, see `Watch`."""
        self.merge()  # so that `collect` knows what comes later, as by a second backward pass
        self.watch.forgotten(waiting=self.merged is not None)
        super().zero_grad(set_to_none)
        self.merged = None

    # --- rows that are not trained: frozen, or in eval() mode ---

    def requires_grad_(self, requires_grad: bool = True) -> "Tables":
        """False freezes the rows, before an `Optimizer` is made, or later if they are taken out of
        it (`del optimizer.rmsprops["tables"]`). True undoes it, but does not make them parameters.

        `model.requires_grad_(False)` does not call this method: PyTorch goes through the parameters
        instead. So it freezes the backbone, and the rows are still trained."""
        self.frozen = not requires_grad
        if self.frozen:
            super().requires_grad_(False)
        return self

    def check_mode(self) -> None:
        """Called by each forward pass of a model that is trained: warns if its rows are not, since
        it is in eval() mode."""
        is_constant = self.frozen or not len(self.weight)
        if not (self.training or is_constant or self.weight[0].requires_grad):
            self.watch.forward_in_eval_mode()

    # --- for the optimizer ---

    def prefetch(self, ids: Tensor) -> None:
        """A hint: the next training step looks up `ids`, so slow tables may start to fetch them."""

    def add_state(self) -> list[Tensor]:
        """Add a float32 zero beside each number. Returns a [V, W] tensor for each table, stored
        where its rows are. A second call replaces what the first has added. UserError: there is no
        room."""
        self.state = [torch.zeros_like(weight, dtype=torch.float32) for weight in self.weight]
        return self.state

    def slots(self, ids: Tensor) -> Tensor:
        """Where tokens `ids` [n] are in what `rows` and `states` return; on their device."""
        return send(ids, self.weight[0].device)

    def rows(self, table: int) -> Tensor:
        """A table as the compute device has it: all of it [V, W], or slots [n_slot, W]."""
        weight = self.weight[table]
        assert isinstance(weight, nn.Parameter) or isinstance(self.weight, list), (
            "rows are computed (prune, parametrize, torch.func), which nobody would train: prune "
            "them by a mask on tables.weight after each step; for torch.func, call eval()"
        )
        return weight

    def states(self, table: int) -> Tensor:
        """The state of a table as the compute device has it, like `rows`."""
        return self.state[table]

    def mean_square(self, grad: Tensor) -> Tensor:
        """The mean of the squares of each row: [n, W] -> [n, 1]."""
        return grad.float().square().mean(1, keepdim=True)

    def updated(self) -> None:
        """Called by the optimizer when it has changed `rows` and `states`."""

    def flush(self) -> None:
        """Write changed rows back to where they are stored, and forget any copies."""

    # --- state_dict: a plain list of weights gets the names of a ParameterList ---

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(self.weight, list):
            self.flush()
            destination.update({f"{prefix}weight.{t}": w for t, w in enumerate(self.weight)})

    def _load_from_state_dict(
        self, state, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        rest = dict(state)
        if isinstance(self.weight, list):
            self.flush()
            for table, weight in enumerate(self.weight):
                saved = rest.pop(f"{prefix}weight.{table}", None)
                if saved is None or saved.shape != weight.shape:
                    error_msgs.append(f"{prefix}weight.{table} is not {tuple(weight.shape)}")
                elif saved.is_floating_point() and not weight.is_floating_point():
                    lost = f"{weight.dtype} would truncate {saved.dtype}"
                    fix = "make such tables from those of a loaded model"
                    error_msgs.append(f"{prefix}weight.{table}: {lost}: {fix}")
                elif saved.data_ptr() != weight.data_ptr():  # else it is read in place
                    weight.copy_(saved)
        lists = (missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(rest, prefix, metadata, strict, *lists)


def added(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> tuple:
    """The sum of two `Tables.merged`: distinct ids [n], gradients [n, W] of each table."""
    distinct, position = torch.unique(torch.cat((one[0], other[0])), return_inverse=True)
    position = send(position, one[1][0].device)
    mine, others = position.split((len(one[0]), len(other[0])))
    sums = []
    for first, second in zip(one[1], other[1], strict=True):
        total = first.new_zeros(len(distinct), first.shape[1])
        # Each row once: the order of sums is fixed.
        sums.append(total.index_add_(0, mine, first).index_add_(0, others, second))
    return distinct, sums


class ResidentTables(Tables):
    """All `n_table` tables of a model in the memory of the compute device, zeros until
    `init_rows`."""

    def __init__(self, n_table: int, n_row: int, width: int, dtype=None) -> None:
        super().__init__(n_row, width)
        # No requires_grad: autograd would fill a V x W gradient, nearly all of it zeros, each step.
        # Setting it (train.py --table_optimizer adamw) makes them ordinary parameters again.
        tables = [torch.zeros(n_row, width, dtype=dtype) for _ in range(n_table)]
        self.weight = nn.ParameterList(nn.Parameter(t, requires_grad=False) for t in tables)


class StoredTables(Tables):
    """Tables in a storage, read and updated in place by the CPU; of mapped files, all needed pages
    are requested at once beforehand. Layers on another device (MPS) get copies. They are not
    parameters: `model.to(device)` does not move them, and autograd does not see them."""

    def __init__(self, storage: TableStorage, device: torch.device | str = "cpu") -> None:
        n_row, _, width = storage.shape
        super().__init__(n_row, width)
        self.storage = storage
        self.device = torch.device(device)
        self.on_disk = storage.on_disk
        self.weight = list(storage.arrays["rows"].unbind(1))
        if "state" in storage.arrays:
            self.state = list(storage.arrays["state"].unbind(1))

    def add_state(self) -> list[Tensor]:
        self.state = list(self.storage.add("state", torch.float32).unbind(1))
        return self.state

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        ids = ids.cpu()
        self.storage.read_ahead(ids, self.storage.arrays if self.in_training() else ["rows"])
        for rows in super().lookup(ids):
            yield rows.to(self.device)

    def read(self, table: int, slots: Tensor) -> Tensor:
        return super().read(table, slots).to(self.device)
