"""The optimizer of a run and its schedule."""

import copy
import math

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from common import UserError
from model import Decoder
from tables.rmsprop import RowRMSprop
from tables.tables import Tables
from training import ranks
from training.settings import Settings


def schedule(step: int, settings: Settings) -> float:
    """Learning rate, as a fraction of the peak (STEM paper: cosine, warm-up and floor 0.1)."""
    steps, floor = settings.max_iters, settings.min_lr
    warm = 0
    if settings.warmup:
        warm = max(1, round(settings.warmup * steps))
    # 1) linear warm-up
    if step < warm:
        return (step + 1) / warm
    # 2) decay to min_lr
    done = (step - warm) / max(1, steps - warm)
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done}
    return floor + (1 - floor) * left[settings.schedule]


class LossScaler:
    """Scales the loss so that small gradients do not become zero in float16.

    A step whose gradients overflow is skipped and halves the factor; 2,000 clean steps in a row
    double it, as torch.amp.GradScaler does, which knows no gradients of rows. In other precisions
    the factor stays 1."""

    CLEAN_STEPS_TO_GROW = 2000

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.factor = 65536.0 if enabled else 1.0
        self.clean_steps = 0

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.factor if self.enabled else loss

    def update(self, finite: bool) -> None:
        """After a step: were its gradients finite?"""
        if not self.enabled:
            return
        if not finite:
            self.factor /= 2
            self.clean_steps = 0
            return
        self.clean_steps += 1
        if self.clean_steps == self.CLEAN_STEPS_TO_GROW:
            self.factor *= 2
            self.clean_steps = 0

    def state_dict(self) -> dict:
        if not self.enabled:
            return {}
        return {"scale": self.factor, "clean_steps": self.clean_steps}

    def load_state_dict(self, state: dict) -> None:
        """A checkpoint of another precision has nothing to load."""
        if self.enabled:
            self.factor = state.get("scale", self.factor)
            self.clean_steps = state.get("clean_steps", self.clean_steps)


class Optimizer:
    """AdamW for the backbone and RMSprop for rows of the tables, clipped together: all gradients
    are multiplied by grad_clip / (norm + 1e-6), if that is below 1. The rate of an embedding that
    is not the head is not multiplied by `table_rate`."""

    def __init__(self, model: Decoder, settings: Settings, dtype: str = "float32") -> None:
        assert settings.model == model.config, (
            "settings of another model: Settings(model=model.config)"  # they depend on it
        )
        betas = (settings.beta1, settings.beta2)
        self.table_rate = settings.table_rate
        self.grad_clip = settings.grad_clip
        self.scaler = LossScaler(enabled=dtype == "float16")

        # Tables, and an embedding that is not the head, are trained row by row, by RowRMSprop. With
        # --table_optimizer adamw, they become ordinary parameters, of which AdamW trains all rows.
        self.rmsprops: dict[str, RowRMSprop] = {}
        rows = set()
        for name, tables in sorted(model.all_tables.items()):
            tables.watch.has_optimizer = False  # an earlier one, which this replaces
            if len(tables.weight) and not tables.frozen:
                if settings.table_optimizer == "adamw":
                    for weight in tables.weight:  # tables.requires_grad_(True) would only unfreeze
                        weight.requires_grad_(True)
                else:
                    self.rmsprops[name] = RowRMSprop(
                        tables, settings.beta2, state=settings.table_state, seed=settings.seed
                    )
            rows.update(weight for weight in tables.parameters() if not weight.requires_grad)
        # A head that was tied by hand, head.weight = wte.weight[0], would be left out below.
        head = [] if model.head is None else model.head.parameters()
        assert rows.isdisjoint(head), "head and embedding are one: set tie_head=True"

        # Weight decay is for matrices, several in one parameter, too, but not for rows that are
        # looked up: those of tables and of embeddings (the tied one, pkm's values), which it would
        # shrink when they are not read.
        looked_up = set()
        for module in model.modules():
            if isinstance(module, (Tables, torch.nn.Embedding)):
                looked_up.update(module.parameters())
        linear, other = {}, {}  # their names, by parameter
        for name, parameter in model.named_parameters():
            # Those that are frozen are there, too: they may be released later, and AdamW leaves
            # alone what has no gradient.
            if parameter in rows:
                continue
            if parameter.dim() >= 2 and parameter not in looked_up:
                linear[parameter] = name
            else:
                other[parameter] = name
        self.names = linear | other
        # The rate of the first group is that of rows, too (`step`).
        groups = [
            {"params": list(linear), "weight_decay": settings.weight_decay},
            {"params": list(other), "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, settings.learning_rate, betas, fused=True)

    @property
    def in_adamw(self) -> list[Tensor]:
        """What AdamW trains, in its order: those in `names`, but for those that somebody has added
        to it, or taken out of it for another optimizer."""
        return [p for group in self.adamw.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, *, fraction: float) -> Tensor:
        """Update at this fraction of the peak learning rate, as `schedule` says. -> the norm of all
        gradients before clipping."""
        # 1) the gradients: of parameters, summed over the ranks, and of the rows that were read
        params = list(dict.fromkeys([*self.names, *self.in_adamw]))  # each once
        ranks.add_up_gradients(params)
        grads = [p.grad for p in params if p.grad is not None]
        row_grads = []
        for rmsprop in self.rmsprops.values():
            row_grads += rmsprop.tables.gradients()[1]

        # 2) their norm, still scaled; it is the same on all ranks, so all skip a step or none
        if ranks.size == 1:
            norm = get_total_norm(grads + row_grads)
        else:
            square = get_total_norm(row_grads) ** 2
            ranks.add_up(square)  # each rank has columns of the rows
            norm = (get_total_norm(grads) ** 2 + square).sqrt()
        finite = not self.scaler.enabled or bool(norm.isfinite())  # float16: the host waits here
        norm = norm / self.scaler.factor

        # 3) clip and update
        if finite:
            shrink = torch.full_like(norm, 1 / self.scaler.factor)
            if self.grad_clip:  # on the device: the host does not wait
                shrink *= (self.grad_clip / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(grads + row_grads, shrink)
            # A group's rate is its peak, or what a scheduler of PyTorch's has made of it.
            groups = self.adamw.param_groups
            peaks = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] = fraction * group["lr"]
            try:
                self.adamw.step()
            finally:  # also where somebody stops a loop in a notebook
                for group, peak in zip(groups, peaks, strict=True):
                    group["lr"] = peak
            for name, rmsprop in self.rmsprops.items():
                rate = 1.0 if name == "wte" else self.table_rate
                rmsprop.step(fraction * peaks[0] * rate)
        else:
            for rmsprop in self.rmsprops.values():
                rmsprop.tables.zero_grad()
        self.scaler.update(finite)
        for parameter in params:
            parameter.grad = None
        return norm

    def owners(self) -> dict[str | int, Tensor]:
        """AdamW's parameters in their order, by name: their order may change, when lines of a model
        do. Those that are not the model's, but were added to AdamW, by number."""
        return {self.names.get(p, n): p for n, p in enumerate(self.in_adamw)}

    def state_dict(self) -> dict:
        # Of AdamW's groups the rates, from which a scheduler goes on: all else is in the settings.
        rates = [group["lr"] for group in self.adamw.param_groups]
        moments = self.adamw.state_dict()["state"]  # by number
        return {
            "adamw": {"state": moments, "names": list(self.owners()), "rates": rates},
            "rows": {name: rmsprop.state_dict() for name, rmsprop in self.rmsprops.items()},
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """UserError: moments are not of the shape of their parameter."""
        self.scaler.load_state_dict(state["scaler"])
        saved = copy.deepcopy(state["adamw"]["state"])  # else the file stays mapped
        owners = self.owners()
        names = state["adamw"].get("names", owners)  # which earlier checkpoints do not have
        numbers = {name: number for number, name in enumerate(names)}
        moments = {}
        for n, (name, parameter) in enumerate(owners.items()):
            of_one = saved.get(numbers.get(name))
            if of_one is None:  # it had no gradient yet, is new, or was another optimizer's
                continue
            moments[n] = of_one
            # AdamW writes to both as if they lay in memory as the parameter does.
            for key in of_one.keys() & {"exp_avg", "exp_avg_sq"}:
                moment = of_one[key]
                if moment.shape != parameter.shape:
                    wrong = f"moments of {name} are {[*moment.shape]}, not {[*parameter.shape]}"
                    raise UserError(f"{wrong}: --resume cannot go on: use --init_from")
                of_one[key] = torch.empty_like(parameter).copy_(moment)
        self.adamw.load_state_dict({**self.adamw.state_dict(), "state": moments})
        # Rates go on as they were, whatever the code says now. Earlier checkpoints have none.
        rates = state["adamw"].get("rates", [])
        for group, rate in zip(self.adamw.param_groups, rates, strict=False):
            group["lr"] = rate
        for name, rmsprop in self.rmsprops.items():
            if name in state["rows"]:  # else it was frozen
                rmsprop.load_state_dict(state["rows"][name])
