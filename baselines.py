"""The dense FFN, and the baselines: other ways to own more parameters than a token pays for.

`W_g, W_u, W_d` are those of the dense FFN, t is the token id.

    dense      W_d (SiLU(W_g x) * (W_u x))
    moe        sum of the k experts that a router finds best for x, each d_ff / k wide
    hash_moe   sum of the k experts that belong to t
    pkm        sum of the values whose keys are nearest to queries made of x
    deepembed  W_d (SiLU(W_g x) * (W_u x) * (1 + E_l[t]))
    ple        W_d (SiLU(W_g x) * (W_u x)) + P (GELU(G x) * E_l[t])

By default a token costs the FLOPs of the dense FFN; each docstring says why. `E_l` is layer l's
token table. For `idle`, `needs_ids` and `auxiliary_loss` see model.LAYERS.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import UserError
from config import ModelConfig
from tables.tables import send


def make_embedding(n: int, width: int) -> nn.Embedding:
    """nn.Embedding, but not initialized on the meta device, where PyTorch would import its compiler
    for it (a second). Elsewhere it is: random numbers drawn after it stay the same."""
    weight = torch.empty(n, width)
    if not weight.is_meta:
        nn.init.normal_(weight)
    return nn.Embedding(n, width, _weight=weight)


class SwiGLU(nn.Module):
    """The dense FFN (Shazeer, 2020)."""

    row_width = 0

    def __init__(self, config: ModelConfig, d_ff: int | None = None) -> None:
        """d_ff: hidden units, if not as many as the config says."""
        super().__init__()
        d_ff = d_ff or config.d_ff
        self.gate = nn.Linear(config.n_embd, d_ff, bias=False)
        self.up = nn.Linear(config.n_embd, d_ff, bias=False)
        self.down = nn.Linear(d_ff, config.n_embd, bias=False)

    def hidden(self, x: Tensor) -> Tensor:
        """x [B, T, n_embd] -> [B, T, d_ff]."""
        return F.silu(self.gate(x)) * self.up(x)

    def forward(self, x: Tensor, rows: None) -> Tensor:
        """x [B, T, n_embd] -> [B, T, n_embd]."""
        return self.down(self.hidden(x))


class Experts(SwiGLU):
    """`n_expert` FFNs, each `d_ff / top_k` wide ("fine-grained": DeepSeekMoE, Dai et al., 2024,
    section 3.1), side by side as one wide FFN. A token passes through `top_k` of them."""

    def __init__(self, config: ModelConfig) -> None:
        n_expert, top_k, d_ff = config.n_expert, config.top_k, config.d_ff
        if d_ff % top_k != 0 or n_expert % top_k != 0:
            sizes = f"--d_ff {d_ff} and --n_expert {n_expert}"
            raise UserError(f"--top_k {top_k} must divide {sizes}")
        width = d_ff // top_k  # hidden units of an expert
        super().__init__(config, n_expert * width)
        self.n_expert = n_expert
        self.top_k = top_k
        self.idle = 3 * config.n_embd * width * (n_expert - top_k)

    def experts(self, x: Tensor, chosen: Tensor) -> Tensor:
        """x [B, T, n_embd], numbers of the chosen experts [B, T, top_k] -> their outputs
        [B, T, top_k, n_embd]. Sorted by expert, the tokens of each are one matrix product."""
        experts = chosen.flatten()  # [B * T * top_k]
        order = experts.argsort()
        counts = experts.bincount(minlength=self.n_expert).tolist()  # a host-device sync
        tokens = x.flatten(0, 1).index_select(0, order // self.top_k)  # [B * T * top_k, n_embd]
        parts = tokens.split(counts)
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
    """Mixture of experts: p = softmax(W_r x), and the sum of the top_k experts by p, weighted with
    their p over their sum (Shazeer et al., 2017, section 2.1). Training evens out their load by

        auxiliary_loss = balance * n_expert * sum_i f_i mean(p_i)

    with f_i the share of choices that fell on expert i (Switch Transformers, Fedus et al., 2021,
    equations 4 to 6). Even load gives `balance`.

    Differs: no capacity per expert, so no token is dropped (as in MegaBlocks, Gale et al., 2022);
    no noise in the router, no shared expert. FLOPs: the dense FFN's, and 1 % of the router."""

    auxiliary_loss: Tensor | None = None  # of the last forward pass in training

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.router = nn.Linear(config.n_embd, self.n_expert, bias=False)
        self.balance = config.balance

    def forward(self, x: Tensor, rows: None) -> Tensor:
        """x [B, T, n_embd] -> [B, T, n_embd]."""
        p = self.router(x).softmax(-1, dtype=torch.float32)  # [B, T, n_expert]
        weight, chosen = p.topk(self.top_k)  # [B, T, top_k]
        if self.training:
            share = F.one_hot(chosen, self.n_expert).float().mean((0, 1, 2))  # f, [n_expert]
            mean_p = p.mean((0, 1))  # [n_expert]
            self.auxiliary_loss = self.balance * self.n_expert * (share * mean_p).sum()
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
        y = self.experts(x, chosen)  # [B, T, top_k, n_embd]
        return (y * weight[..., None]).sum(-2)


class HashMoEFFN(Experts):
    """Experts chosen by the token id, by a fixed random table (Hash Layers, Roller et al., 2021,
    section 3.1, "random hash"), the sparse baseline of the STEM paper. `ids` [B, T] are those of
    table rows. With top_k above 1 the hidden units come in top_k segments, each by a hash of its
    own out of n_expert / top_k (section 3.2, "MultiHash").

    Differs: SwiGLU for the ReLU FFN; every expert has equally many ids. FLOPs: the dense FFN's."""

    needs_ids = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        size = self.n_expert // self.top_k  # experts for a segment
        hashes = []
        for segment in range(self.top_k):
            expert = torch.randperm(config.vocab_size) % size  # equally many ids for each
            hashes.append(segment * size + expert)
        self.register_buffer("hashes", torch.stack(hashes, dim=-1))  # [V, top_k]

    def forward(self, x: Tensor, rows: None, ids: Tensor) -> Tensor:
        """x [B, T, n_embd], ids [B, T] -> [B, T, n_embd]."""
        chosen = self.hashes[send(ids, x.device)]  # [B, T, top_k]
        return self.experts(x, chosen).sum(-2)


class ProductKeyMemory(nn.Module):
    """Product-key memory (Lample et al., 2019, section 3): each of n_head queries q = (q1, q2)
    finds among n_key^2 values the top_k with the largest scores, and the layer gives

        sum over heads and their top_k of softmax(score)_ij V_ij,   score_ij = k1_i q1 + k2_j q2

    The best sums are made of the best halves: n_key scores of each half and top_k^2 sums find them.
    Every head has its keys, all share the values.

    Differs: RMS norm of queries, as the paper's batch norm would let a token see others; values
    learn at the rate of all the rest; it is the FFN of every layer, not of one or two. FLOPs:
    queries are as wide as makes them the dense FFN's."""

    row_width = 0

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        n_embd, n_head = config.n_embd, config.n_head
        n_key, top_k = config.n_key, config.top_k
        # Half a query is as wide as makes the layer cost what the dense FFN costs: 3 d_ff n_embd
        # products, of which the values take n_head top_k n_embd.
        spare = (3 * config.d_ff - n_head * top_k) * n_embd
        half = spare // (2 * n_head * (n_embd + n_key))
        if top_k > n_key:
            raise UserError(f"--top_k {top_k} is more than --n_key {n_key}")
        if half < 1:
            raise UserError(f"--top_k {top_k} is too much for --d_ff {config.d_ff}")
        self.n_head = n_head
        self.n_key = n_key
        self.top_k = top_k
        self.norm_eps = config.norm_eps
        self.query = nn.Linear(n_embd, n_head * 2 * half, bias=False)
        self.keys = nn.Parameter(torch.empty(n_head * 2 * n_key, half))
        self.values = make_embedding(n_key**2, n_embd)
        self.idle = (n_key**2 - n_head * top_k) * n_embd

    def forward(self, x: Tensor, rows: None) -> Tensor:
        """x [B, T, n_embd] -> [B, T, n_embd]."""
        q = self.query(x).unflatten(-1, (self.n_head, 2, -1))  # [B, T, n_head, 2, half]
        q = F.rms_norm(q, q.shape[-1:], eps=self.norm_eps)
        keys = self.keys.unflatten(0, (self.n_head, 2, self.n_key))  # [n_head, 2, n_key, half]
        scores = torch.einsum("bthsd,hskd->bthsk", q, keys).float()  # [B, T, n_head, 2, n_key]
        # The best keys of each half, and all pairs of these.
        best, key = scores.topk(self.top_k)  # [B, T, n_head, 2, top_k]
        sums = best[..., 0, :, None] + best[..., 1, None, :]  # [B, T, n_head, top_k, top_k]
        values = key[..., 0, :, None] * self.n_key + key[..., 1, None, :]  # numbers of values
        # The best pairs.
        score, pair = sums.flatten(-2).topk(self.top_k)  # [B, T, n_head, top_k]
        chosen = values.flatten(-2).gather(-1, pair)
        weight = score.softmax(-1).to(x.dtype)
        y = F.embedding_bag(
            chosen.flatten(0, 1).flatten(1),  # [B * T, n_head * top_k]
            self.values.weight,
            per_sample_weights=weight.flatten(0, 1).flatten(1),
            mode="sum",
        )
        return y.view_as(x)


class DeepEmbedFFN(SwiGLU):
    """The dense FFN, its hidden units scaled by the token's row (DeepEmbed, of RWKV-8: B. Peng,
    repository RWKV-LM, 2025). Differs: SwiGLU for RWKV's squared ReLU and its token shift; rows are
    stored minus one, so that they begin small as all tables do. FLOPs: the dense FFN's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.row_width = config.d_ff

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [B, T, n_embd], rows E_l[t] [B, T, d_ff] -> [B, T, n_embd]."""
        hidden = self.hidden(x)
        return self.down(hidden * (1 + rows).to(hidden.dtype))


class PerLayerEmbeddingFFN(SwiGLU):
    """The dense FFN, and beside it a narrow row, gated and projected (PLE, of Gemma 3n: Google,
    2025; as in transformers' Gemma3nTextDecoderLayer).

    Differs: Gemma gates after the FFN, by the residual stream, here both read one x; its rows have
    a part computed from the input embedding, and a norm at the end, which would begin as noise 50
    times as large as our embeddings. FLOPs: the FFN is narrower by 2/3 of a row, for G and P."""

    def __init__(self, config: ModelConfig) -> None:
        self.row_width = config.ple_width
        d_ff = config.d_ff - round(2 * self.row_width / 3)
        if d_ff < 1:
            width = f"--ple_width {self.row_width}"
            raise UserError(f"{width} leaves nothing of --d_ff {config.d_ff}")
        super().__init__(config, d_ff)
        self.row_gate = nn.Linear(config.n_embd, self.row_width, bias=False)
        self.row_out = nn.Linear(self.row_width, config.n_embd, bias=False)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [B, T, n_embd], rows E_l[t] [B, T, ple_width] -> [B, T, n_embd]."""
        gate = F.gelu(self.row_gate(x), approximate="tanh")
        from_row = self.row_out(gate * rows.to(gate.dtype))
        return self.down(self.hidden(x)) + from_row
