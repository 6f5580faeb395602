"""The optimizer of a run: AdamW for the backbone, row-wise Adam for the tables, one schedule."""

import copy
import math

import torch

from model import Decoder
from tables.rowadam import RowAdam
from training.settings import Settings


def schedule(step: int, settings: Settings) -> float:
    """Learning rate of a step as a fraction of the peak: linear warm-up, then decay to `min_lr`
    (STEM paper: cosine, warm-up 0.1, floor 0.1)."""
    steps, floor = settings.max_iters, settings.min_lr
    warm = max(1, round(settings.warmup * steps)) if settings.warmup else 0
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    fall = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return floor + (1 - floor) * fall


class Optimizer:
    """AdamW for the backbone and row-wise Adam for the tables, clipped together."""

    def __init__(self, model: Decoder, settings: Settings) -> None:
        self.tables, self.grad_clip = model.tables, settings.grad_clip
        peak, betas = settings.learning_rate, (settings.beta1, settings.beta2)
        self.table_peak = peak * settings.table_lr_scale
        whole = settings.table_optimizer == "adamw"
        model.tables.requires_grad_(whole)
        named = [(n, p) for n, p in model.named_parameters() if not n.startswith("tables.")]
        decayed = [p for n, p in named if p.dim() == 2 and n != "wte.weight"]
        plain = [p for n, p in named if p.dim() != 2 or n == "wte.weight"]
        rows = list(model.tables.parameters()) if whole else []
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay, "peak": peak},
            {"params": plain, "weight_decay": 0.0, "peak": peak},
            {"params": rows, "weight_decay": 0.0, "peak": self.table_peak},
        ]
        groups = [group for group in groups if group["params"]]
        fused = next(model.parameters()).device.type == "cuda"
        self.adamw = torch.optim.AdamW(groups, lr=peak, betas=betas, fused=fused or None)
        rowwise = len(model.tables.weight) and not whole
        self.rows = RowAdam(model.tables, betas, seed=settings.seed) if rowwise else None

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update with learning rate `lr`, a fraction of the peaks."""
        params = [p for group in self.adamw.param_groups for p in group["params"]]
        grads = [p.grad for p in params if p.grad is not None]
        row_ids, row_grads = self.tables.gradients() if self.rows else (None, [])
        if self.grad_clip:
            norm = torch.nn.utils.get_total_norm(grads + row_grads)
            scale = (self.grad_clip / (norm + 1e-6)).clamp(max=1.0)  # stays on the device: no sync
            torch._foreach_mul_(grads + row_grads, scale)
        for group in self.adamw.param_groups:
            group["lr"] = lr * group["peak"]
        self.adamw.step()
        self.adamw.zero_grad()
        if self.rows:
            self.rows.step(row_ids, row_grads, lr * self.table_peak)

    def state_dict(self) -> dict:
        rows = self.rows.state_dict() if self.rows else None
        return {"adamw": self.adamw.state_dict(), "rows": rows}

    def load_state_dict(self, state: dict) -> None:
        self.adamw.load_state_dict(copy.deepcopy(state["adamw"]))  # else the file stays mapped
        if self.rows:
            self.rows.load_state_dict(state["rows"])
