"""Notices that nobody trains rows.

Rows are no parameters: an optimizer that does not know them leaves them as they are, in silence. So
we count the steps of all optimizers of PyTorch. If one has stepped while gradients of rows wait,
nobody seems to take these.
"""

import sys
import warnings

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

# No step has so many micro-batches: after more lookups than this, nobody takes the gradients.
MOST_READS = 4096
ADVICE = (
    "rows are no parameters, neither those of tables nor those of an embedding that is not the "
    "head: AdamW(model.parameters()) leaves them as they are. Take training.optimizer.Optimizer, "
    "or give model.tables and model.wte a tables.rmsprop.RowRMSprop each, and call its step(lr) "
    "after each step. (What is to stay as it is: call its requires_grad_(False).)"
)
optimizer_steps = 0


def count_step(optimizer: Optimizer, *_) -> None:
    global optimizer_steps
    # A fused optimizer is called for steps that a GradScaler skips, too, and told so.
    if not getattr(optimizer, "found_inf", False):
        optimizer_steps += 1


register_optimizer_step_post_hook(count_step)


class Watch:
    """Of one `Tables`: whether the gradients of its rows are taken."""

    def __init__(self) -> None:
        self.has_optimizer = False  # an optimizer of rows was made, or has taken gradients
        self.n_read = 0  # lookups since gradients began to wait
        # The count of `optimizer_steps` when gradients began to wait (or, in eval() mode, when a
        # loss was first computed). Once they are taken, this is beyond any count.
        self.waiting_since = sys.maxsize

    def __getstate__(self) -> dict:  # a copy of the tables has no optimizer
        return {**vars(self), "has_optimizer": False}

    def lookup(self, waiting: bool) -> None:
        """Before a lookup in training; `waiting`: gradients of earlier ones wait. AssertionError:
        nobody takes them. An optimizer of rows will take them later: then a step was another
        model's, such as a critic's, between two micro-batches."""
        self.check(waiting, may_wait=self.has_optimizer)
        self.n_read += 1

    def taken(self) -> None:
        """Somebody has asked for the gradients."""
        self.has_optimizer = True
        self.waiting_since = sys.maxsize

    def forgotten(self, waiting: bool) -> None:
        """Before gradients that wait are forgotten. AssertionError: as in `lookup`. Warns if no
        optimizer takes any, as in a loop that changes weights by hand."""
        self.check(waiting)
        if waiting and not self.has_optimizer:
            warnings.warn(f"gradients of rows are dropped: {ADVICE}", stacklevel=4)
        self.n_read = 0

    def check(self, waiting: bool, may_wait: bool = False) -> None:
        if not waiting:
            self.waiting_since = optimizer_steps
            self.n_read = 0
        is_fine = may_wait or optimizer_steps <= self.waiting_since
        assert is_fine and self.n_read <= MOST_READS, (
            f"the gradients of {self.n_read} lookups were not taken: {ADVICE} (More micro-batches "
            "in a step, on purpose: raise tables.watch.MOST_READS.)"
        )

    def forward_in_eval_mode(self) -> None:
        """A forward pass of a model that is trained, but is in eval() mode, in which rows get no
        gradients. Warns once an optimizer has stepped."""
        if self.has_optimizer:
            return
        self.waiting_since = min(self.waiting_since, optimizer_steps)
        if self.waiting_since < optimizer_steps:
            warnings.warn(
                "an optimizer steps, but rows stay in eval() mode: call model.train() or, if this "
                f"model is not what is trained, its requires_grad_(False). {ADVICE}",
                stacklevel=7,
            )
