"""What training minimizes: next-token prediction, or preferring one answer to another (DPO).

An objective turns a batch on the CPU into its mean loss over `count` tokens or pairs, and figures.
"""

from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from model import Decoder
from tables.tables import send
from training import ranks
from training.batches import Data, Pairs, Source


@dataclass
class Objective:
    """A model, where it is, and the precision it runs in: float32, or by autocast 16 bits."""

    model: Decoder
    device: torch.device
    dtype: str

    def precision(self) -> torch.autocast:
        dtype = getattr(torch, self.dtype)
        return torch.autocast(self.device.type, dtype, enabled=self.dtype != "float32")

    def add_auxiliary_losses(self, loss: Tensor, **figures: Tensor) -> tuple[Tensor, dict]:
        """A loss and its figures with what moe's routers add in training (baselines.py)."""
        layers = [block.ffn for block in self.model.blocks if hasattr(block.ffn, "auxiliary_loss")]
        if layers and self.model.training:
            figures["balance"] = torch.stack([layer.auxiliary_loss for layer in layers]).sum()
            loss = loss + figures["balance"]
        return loss, {name: figure.detach() for name, figure in figures.items()}


@dataclass
class NextToken(Objective):
    """Cross-entropy of the targets."""

    document: int | None = None  # the token that begins documents, which attention won't cross

    def count(self, ids: Tensor, targets: Tensor) -> int:
        return int((targets >= 0).sum())  # on the CPU: nothing waits for the device

    def __call__(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, dict]:
        """ids, targets [B, T] -> the loss in nats per token, on the device."""
        documents = None
        if self.document is not None:
            documents = send((ids == self.document).cumsum(1), self.device)
        with self.precision():
            _, loss = self.model(ids, targets, documents=documents)
        return self.add_auxiliary_losses(loss)


@dataclass
class Preference(Objective):
    """Direct preference optimization (Rafailov et al., 2023, equation 7):

        loss = -log sigmoid(margin)
        margin = beta * (log p(chosen) - log q(chosen) - log p(rejected) + log q(rejected))

    p is the model in training, q the frozen reference it starts from, over the answer's tokens."""

    beta: float

    def count(self, ids: Tensor, targets: Tensor, reference: Tensor) -> int:
        return len(ids)

    def log_probability(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids, targets [B, 2, T] -> log-probability of the targets that are not -1, [B, 2]."""
        with self.precision():
            logits = self.model(ids.flatten(0, 1))[0].flatten(0, 1).float()  # [2 B * T, V]
        y = send(targets, self.device)
        nats = F.cross_entropy(logits, y.flatten(), ignore_index=-1, reduction="none")  # [2 B * T]
        return -nats.view(y.shape).sum(-1)

    def __call__(self, ids: Tensor, targets: Tensor, reference: Tensor) -> tuple[Tensor, dict]:
        """ids, targets [B, 2, T], chosen first; reference [B, 2] -> the loss, margin, accuracy."""
        gain = self.log_probability(ids, targets) - send(reference, self.device)  # [B, 2]
        margin = self.beta * (gain[:, 0] - gain[:, 1])
        figures = dict(margin=margin.mean(), accuracy=(margin > 0).float().mean())
        return self.add_auxiliary_losses(-F.logsigmoid(margin).mean(), **figures)

    @torch.no_grad()
    def compute_reference_logprobs(self, pairs: Pairs, n_row: int, size: int) -> None:
        """Take the model as it is for the reference of the first `n_row` pairs."""
        self.model.eval()
        for at in tqdm(range(0, n_row, size), "reference", unit="batch", delay=3):
            batch = range(at, min(n_row, at + size))
            ids, targets, _ = pairs.rows(batch)
            rows = [pairs.row_index(index) for index in batch]
            pairs.reference[rows] = self.log_probability(ids, targets).float().cpu().numpy()
        self.model.train()


def validation_rows(source: Source, n_token: int) -> int:
    """How many rows `validate` reads: about `n_token` tokens, rows being counted as full."""
    return max(1, min(source.n_row, n_token // source.block_size))


@torch.no_grad()
def validate(objective: Objective, data: Data, n_token: int, size: int) -> dict[str, float]:
    """Means over the first `validation_rows` of each folder, mixed by weight: val_loss (nats per
    token or pair), for tokens val_loss_per_byte, the objective's figures as val_..., and of a
    mixture the loss of each part as val_loss/<folder>."""
    figures = Counter()
    objective.model.eval()
    for (name, source), weight in zip(data.val.items(), data.weights, strict=True):
        sums, count, n_byte, n_row = Counter(), 0, 0, validation_rows(source, n_token)
        for at in range(0, n_row, size * ranks.size):
            rows = range(at, min(n_row, at + size * ranks.size))
            mine = rows[ranks.rank :: ranks.size]  # one rank has none: it only looks up with all
            batch = source.rows(mine or rows[:1])
            loss, more = objective(*batch)
            n, targets = objective.count(*batch) if mine else 0, batch[1]
            count += n
            n_byte += bool(mine) * int(data.token_lengths[targets[targets >= 0]].sum())
            for key, value in {"loss": loss, **more}.items():
                sums[key] += value.item() * n  # a host-device sync
        total = torch.tensor([*sums.values(), count, n_byte], dtype=torch.float64)
        ranks.add_up(total)
        *values, count, n_byte = total.tolist()
        sums = dict(zip(sums, values, strict=True))
        for key, value in sums.items():
            figures[f"val_{key}"] += weight * (value / count)
        if isinstance(objective, NextToken):
            figures["val_loss_per_byte"] += weight * (sums["loss"] / max(1, n_byte))
        if len(data.val) > 1:
            figures[f"val_loss/{name}"] = sums["loss"] / count
    objective.model.train()
    return figures
