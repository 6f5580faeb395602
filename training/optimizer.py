"""The optimizer of a run and its schedule."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from model import Decoder
from tables.rowadam import RowAdam
from tables.tables import Tables
from training import ranks
from training.settings import Settings


def schedule(step: int, settings: Settings) -> float:
    """Learning rate, as a fraction of the peak (STEM paper: cosine, warm-up and floor 0.1)."""
    steps, floor = settings.max_iters, settings.min_lr
    warm = max(1, round(settings.warmup * steps)) if settings.warmup else 0
    if step < warm:  # 1) linear warm-up
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)  # 2) decay to min_lr
    fall = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return floor + (1 - floor) * fall


class Optimizer:
    """AdamW for the backbone and row-wise Adam for the tables, clipped together. In float16 a
    `scaler` keeps small gradients from becoming zero, and leaves out steps where one overflows."""

    def __init__(self, model: Decoder, settings: Settings, dtype: str = "float32") -> None:
        betas, whole = (settings.beta1, settings.beta2), settings.table_optimizer == "adamw"
        self.grad_clip, self.peak = settings.grad_clip, settings.learning_rate
        self.rows: dict[str, RowAdam] = {}  # embeddings train by rows, unless by AdamW as a whole
        for name in ("tables", "wte"):
            tables = getattr(model, name)
            if isinstance(tables, Tables) and len(tables.weight):
                tables.requires_grad_(whole)
                if not whole:
                    self.rows[name] = RowAdam(tables, betas, seed=settings.seed)
        groups = {settings.weight_decay: [], 0.0: []}  # parameters by weight decay
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                linear = parameter.dim() == 2 and name.split(".")[0] not in ("tables", "wte")
                groups[settings.weight_decay if linear else 0.0].append(parameter)
        groups = [dict(params=params, weight_decay=decay) for decay, params in groups.items()]
        self.adamw = torch.optim.AdamW(groups, lr=self.peak, betas=betas, fused=True)
        self.scaler = torch.amp.GradScaler(model.device.type, enabled=dtype == "float16")

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor:
        """Update at `lr`, a fraction of the peak. -> the norm of all gradients before clipping."""
        params = [p for group in self.adamw.param_groups for p in group["params"]]
        grads = [p.grad for p in params if p.grad is not None]
        read = {name: adam.tables.gradients() for name, adam in self.rows.items()}
        row_grads = [grad for _, each in read.values() for grad in each]
        ranks.add_up(*grads)
        norm = torch.nn.utils.get_total_norm(grads + row_grads)
        if ranks.size > 1:  # each has columns of the rows
            ranks.add_up(square := torch.nn.utils.get_total_norm(row_grads) ** 2)
            norm = (torch.nn.utils.get_total_norm(grads) ** 2 + square).sqrt()
        grads += row_grads
        # What a scaler takes for an optimizer: rows have no place in `adamw`. The norm is the same
        # on all ranks, so all of them leave out a step or none.
        params = list(map(with_itself_as_grad, [*grads, norm]))
        whole = SimpleNamespace(param_groups=[dict(params=params)])
        whole.step = partial(self.update, lr * self.peak, read)
        self.scaler.unscale_(whole)
        if self.grad_clip:
            scale = (self.grad_clip / (norm + 1e-6)).clamp(max=1.0)  # stays on the device: no sync
            torch._foreach_mul_(grads, scale)
        self.scaler.step(whole)
        self.scaler.update()
        self.adamw.zero_grad()
        return norm

    def update(self, lr: float, read: dict[str, tuple[Tensor, list[Tensor]]]) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        for name, adam in self.rows.items():
            adam.step(lr, read[name])

    def state_dict(self) -> dict:
        rows = {name: adam.state_dict() for name, adam in self.rows.items()}
        return {"adamw": self.adamw.state_dict(), "rows": rows, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.scaler.load_state_dict(state["scaler"])
        self.adamw.load_state_dict(copy.deepcopy(state["adamw"]))  # else the file stays mapped
        for name, adam in self.rows.items():
            adam.load_state_dict(state["rows"][name])


def with_itself_as_grad(grad: Tensor) -> Tensor:
    parameter = grad.detach()
    parameter.grad = grad
    return parameter
