"""Learn which of two answers people prefer: direct preference optimization (DPO; Rafailov et al.,
2023, equation 7), the stage after fine-tuning in MiniMind and in Embformer's note.

    loss = -log sigmoid(beta * margin)
    margin = (log p(chosen) - log q(chosen)) - (log p(rejected) - log q(rejected))

p is the model, q the model of --init_from, and log p of an answer sums over its tokens. The log q
are computed once, before the first step, and kept in checkpoints: who resumes has another p.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from tables.tables import send
from training import ranks
from training.batches import Data
from training.objectives import NextToken

BETA = 0.15  # MiniMind's today


@dataclass
class Preference(NextToken):
    """The loss of pairs of conversations, ids and targets [B, 2, T], chosen and rejected."""

    reference: dict[bytes, float] = field(default_factory=dict)  # log q, see `keys_of`
    margins: list[Tensor] = field(default_factory=list)  # of pairs that were evaluated

    @torch.no_grad()
    def begin(self, data: Data, saved: dict[bytes, float] | None) -> None:
        """Compute log q of all pairs by the model as it is, or take them from `saved`."""
        if saved is not None:
            self.reference = saved
            return
        self.model.eval()
        for source in (data.train, *data.val.values()):
            numbers = torch.arange(source.n_sequence).split(32)
            for some in tqdm(numbers, "reference", leave=False, disable=None):
                ids, targets = source.pairs(some.tolist())  # [32, 2, T]
                ids, targets = ids.flatten(0, 1), targets.flatten(0, 1)  # [64, T]
                log_q = self.log_p(ids, targets).tolist()
                self.reference.update(zip(keys_of(ids, targets), log_q, strict=True))
        self.model.train()

    def state_dict(self) -> dict[bytes, float]:
        return self.reference

    def prefetch(self, ids: Tensor) -> None:
        super().prefetch(ids.flatten(0, 1))

    def count(self, targets: Tensor) -> int:
        """Of how many pairs the loss is the mean: those with an answer."""
        return int((targets >= 0).flatten(1).any(1).sum())

    def __call__(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids, targets [B, 2, T] on the CPU -> the mean loss of the pairs, on the device."""
        ids, targets = ids.flatten(0, 1), targets.flatten(0, 1)  # [2 B, T]
        answered = (targets >= 0).any(1).nonzero()[:, 0]  # what fills a batch has no answer
        keys = keys_of(ids[answered], targets[answered])
        log_q = torch.tensor([self.reference[key] for key in keys])
        log_p = self.log_p(ids, targets)
        gain = log_p[send(answered, log_p.device)] - send(log_q, log_p.device)
        margin = gain[::2] - gain[1::2]
        if not self.model.training:
            self.margins.append(margin.detach())
        return -F.logsigmoid(BETA * margin).mean()

    def log_p(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The log-probability of the targets of each row, [N, T] -> [N]."""
        row, column = (targets >= 0).nonzero(as_tuple=True)
        device = self.model.device
        row_there = send(row, device)
        with self.autocast():
            x = self.model.hidden(ids)[row_there, send(column, device)]  # [n, n_embd]
            logits = self.model.unembed(x)
        wanted = send(targets[row, column], device)
        nats = F.cross_entropy(logits.float(), wanted, reduction="none")  # [n]
        return torch.zeros(len(ids), device=device).index_add(0, row_there, -nats)

    def figures(self) -> dict[str, float]:
        """Of the pairs of all ranks since the last call: the mean margin, and the share of positive
        ones."""
        margins = torch.cat(self.margins).cpu().double()
        self.margins = []
        mine = margins.sum(), (margins > 0).sum(), len(margins)
        margin, n_positive, n = ranks.sums(*mine)
        return {"margin": margin / n, "accuracy": n_positive / n}


def keys_of(ids: Tensor, targets: Tensor) -> Iterable[bytes]:
    """What tells conversations [N, T] apart: a hash of the tokens up to the last target, without
    padding."""
    for row, target in zip(ids, targets, strict=True):
        n = int((target >= 0).nonzero().max()) + 1
        both = torch.stack((row[:n], target[:n])).numpy().tobytes()
        yield blake2b(both, digest_size=16).digest()
