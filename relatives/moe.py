"""moe: a mixture of experts. A router picks, for each token, the k experts that suit x best.

    y = sum over the k experts of p_i / (p_1 + ... + p_k) FFN_i(x),   p = softmax(W_r x)

Experts are `d_ff / k` wide, so a token costs the FLOPs of the dense FFN, and 1 % for the router.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model
from common import UserError, flag


@dataclass
class ExpertConfig(model.ModelConfig):
    """Also of hash_moe.py."""

    stem_layers: str = "all"  # hides the flag: every layer has experts
    table_std: float = 0.02  # hides the flag: there are no tables
    n_expert: int = flag(16, "experts in a layer", must="at least 1")
    top_k: int = flag(4, "experts per token", must="at least 1")


@dataclass
class Config(ExpertConfig):
    balance: float = flag(0.01, "weight of the load-balancing loss", must="0 or more")


class Experts(model.SwiGLU):
    """`n_expert` FFNs, each `d_ff / top_k` wide ("fine-grained": DeepSeekMoE, Dai et al., 2024,
    section 3.1), side by side as one wide FFN. A token passes through `top_k` of them."""

    def __init__(self, config: ExpertConfig) -> None:
        n_expert, top_k, d_ff = config.n_expert, config.top_k, config.d_ff
        if d_ff % top_k != 0 or n_expert % top_k != 0:
            sizes = f"--d_ff {d_ff} and --n_expert {n_expert}"
            raise UserError(f"--top_k {top_k} must divide {sizes}")
        width = d_ff // top_k  # hidden units of an expert
        super().__init__(config.n_embd, n_expert * width)
        self.n_expert = n_expert
        self.top_k = top_k
        self.idle = 3 * config.n_embd * width * (n_expert - top_k)  # what one token does not use

    @torch.compiler.disable  # the shapes of its products depend on the data
    def experts(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x [B, T, n_embd], numbers of the chosen experts [B, T, top_k] -> their outputs
        [B, T, top_k, n_embd]. Sorted by expert, the tokens of each are one matrix product."""
        experts = chosen.flatten()  # [B * T * top_k]
        order = experts.argsort()
        counts = experts.bincount(minlength=self.n_expert).tolist()  # a host-device sync
        tokens = x.flatten(0, 1).index_select(0, order // self.top_k)  # [B * T * top_k, n_embd]
        parts = tokens.split(counts)
        for module in (self.gate, self.up, self.down):
            assert type(module).forward is nn.Linear.forward, (
                f"experts read weights of gate, up and down: they call no {type(module).__name__}"
            )
        gates = self.gate.weight.chunk(self.n_expert)  # [d_ff / top_k, n_embd] each
        ups = self.up.weight.chunk(self.n_expert)
        downs = self.down.weight.chunk(self.n_expert, dim=1)  # [n_embd, d_ff / top_k] each
        outputs = []
        # A CPU would compile a product in 16 bits for every new number of tokens: it takes 32.
        with torch.autocast("cpu", enabled=False):
            for part, gate, up, down in zip(parts, gates, ups, downs, strict=True):
                hidden = F.silu(F.linear(part, gate))
                hidden = hidden * F.linear(part, up)
                outputs.append(F.linear(hidden, down))
        y = torch.cat(outputs).index_select(0, order.argsort())  # back in the order of tokens
        return y.unflatten(0, chosen.shape)


class MoEFFN(Experts):
    """The sum of the top_k experts by p, weighted with their p over their sum (Shazeer et al.,
    2017, section 2.1). Training evens out their load by

        auxiliary_loss = balance * n_expert * sum_i f_i mean(p_i)

    with f_i the share of choices that fell on expert i (Switch Transformers, Fedus et al., 2021,
    equations 4 to 6). Even load gives `balance`; in transformers' Mixtral top_k times as much, once
    for all layers.

    Differs: no capacity per expert, so no token is dropped (as in MegaBlocks, Gale et al., 2022);
    no noise in the router, no shared expert. With top_k 1 the weight is 1, so that the router
    learns from the auxiliary loss alone: Switch Transformers weights by p_i."""

    auxiliary_loss: Tensor | None = None  # of the last forward pass in training

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.router = nn.Linear(config.n_embd, self.n_expert, bias=False)
        self.balance = config.balance

    def __getstate__(self) -> dict:
        """A copy cannot have the graph of the last forward pass."""
        return {**vars(self), "auxiliary_loss": None}

    def forward(self, x: Tensor, rows: None) -> Tensor:
        """x [B, T, n_embd] -> [B, T, n_embd]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        p = self.router(x).softmax(-1, dtype=wide)  # [B, T, n_expert]
        weight, chosen = p.topk(self.top_k)  # [B, T, top_k]
        if self.training:
            share = F.one_hot(chosen, self.n_expert).to(wide).mean((0, 1, 2))  # f, [n_expert]
            mean_p = p.mean((0, 1))  # [n_expert]
            self.auxiliary_loss = self.balance * self.n_expert * (share * mean_p).sum()
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
        y = self.experts(x, chosen)  # [B, T, top_k, n_embd]
        return (y * weight[..., None]).sum(-2)


class Decoder(model.Decoder):
    """In training on next tokens, the loss includes the auxiliary losses of all layers."""

    config_class = Config

    def make_block(self, layer: int) -> model.Block:
        return model.Block(self.config, layer, model.LinearQKV(self.config), MoEFFN(self.config))

    def forward(self, ids: Tensor, targets: Tensor | None = None, **options) -> tuple:
        logits, loss = super().forward(ids, targets, **options)
        if loss is not None and self.training:
            balance = torch.stack([block.ffn.auxiliary_loss for block in self.blocks]).sum()
            routers = [p for block in self.blocks for p in block.ffn.router.parameters()]
            is_trained = loss.requires_grad and any(p.requires_grad for p in routers)
            assert balance.requires_grad or not is_trained, (
                "the routers' losses have lost their graph: checkpoint with use_reentrant=False"
            )
            loss = loss + balance
        return logits, loss
