"""What training minimizes: the cross-entropy of the next token."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common import progress
from model import Decoder
from training import ranks
from training.batches import Data


def documents_of(ids: Tensor, boundary: int | None) -> Tensor | None:
    """The number of each token's document [B, T]; None if attention may cross documents. boundary:
    the token that begins them."""
    return None if boundary is None else (ids == boundary).cumsum(1)


@dataclass
class NextToken:
    """The loss of a model, in float32 or, by autocast, in 16 bits.

    `boundary` is the token that begins documents, if attention is not to cross them; `settings` are
    those of the run (training/settings.py, which imports this file)."""

    model: Decoder
    dtype: str
    boundary: int | None = None
    settings: Any = None

    @property
    def per_byte(self) -> bool:
        """Whether the loss can be divided by the bytes of the source's targets. It can if it is the
        mean over all of them: a subclass may leave some out."""
        return type(self) is NextToken

    def begin(self, data: Data, saved: dict[bytes, float] | None) -> None:
        """Called before the first step of a run. `saved`: what `state_dict` returned when the
        checkpoint was written that the run resumes; None if it does not resume."""

    def state_dict(self) -> dict[bytes, float]:
        return {}

    def figures(self) -> dict[str, float]:
        """Further figures of an evaluation, to be logged beside its losses."""
        return {}

    def count(self, targets: Tensor) -> int:
        """Of how many tokens (of a subclass, maybe pairs) the loss is the mean."""
        return int((targets >= 0).sum())

    def autocast(self) -> AbstractContextManager:
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.model.device.type, getattr(torch, self.dtype))

    def prefetch(self, ids: Tensor) -> None:
        """Begin to fetch the rows of the next batch [B, T]."""
        documents = documents_of(ids, self.boundary)
        self.model.tables.prefetch(self.model.addresses(ids, ids.shape[1], documents))

    def __call__(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids, targets [B, T] on the CPU -> the mean loss in nats per token, on the device."""
        with self.autocast():
            _, loss = self.model(ids, targets, documents=documents_of(ids, self.boundary))
        return loss


@torch.no_grad()
def validate(objective: NextToken, data: Data, n_token: int, size: int) -> dict[str, float]:
    """Mean losses over about `n_token` held-out tokens of each folder, `size` sequences at a time:
    val_loss (nats per token) and val_loss_per_byte, of a mixture by weight, and val_loss/<folder>
    of its parts. Every evaluation reads the same sequences. They are spread over all of val.bin,
    in which one file follows the other. It leaves the model in train() mode."""
    figures = {"val_loss": 0.0}
    if objective.per_byte:
        figures["val_loss_per_byte"] = 0.0
    objective.model.eval()
    for (name, source), weight in zip(data.val.items(), data.weights, strict=True):
        total, n_target, n_byte = 0.0, 0, 0
        numbers = source.spread(n_token)
        starts = range(0, len(numbers), size * ranks.size)
        for start in progress(starts, "evaluating"):
            mine = numbers[start : start + size * ranks.size][ranks.rank :: ranks.size]
            # Batches are always full, as another size would be compiled anew, and ranks look up
            # together: what is missing repeats the last sequence and is not counted.
            padding = [numbers[-1]] * (size - len(mine))
            ids, targets = source.sequences([*mine, *padding])
            targets[len(mine) :] = -1
            loss = objective(ids, targets)
            n = objective.count(targets)
            if n:
                total += loss.item() * n  # a host-device sync
                n_target += n
                n_byte += int(data.token_lengths[targets[targets >= 0]].sum())
        total, n_target, n_byte = ranks.sums(total, n_target, n_byte)
        figures["val_loss"] += weight * (total / n_target)
        if objective.per_byte:
            figures["val_loss_per_byte"] += weight * (total / max(1, n_byte))
        if len(data.val) > 1:
            figures[f"val_loss/{name}"] = total / n_target
    objective.model.train()
    return {**figures, **objective.figures()}
