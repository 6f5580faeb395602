"""A decoder with a dense backbone and token tables.

    from model import Decoder, ModelConfig
    model = Decoder(ModelConfig(vocab_size=6400, ffn="stem", stem_layers="third"))
    logits, loss = model(ids, targets)                      # ids, targets [B, T]
    text = model.generate(ids, max_new_tokens=64, temperature=0.8, top_k=50)

The picture this file draws:

    token ids [B, T]
       |
       +--> tables.lookup(ids) ------ rows of table 0 | table 1 | ... -----+
       |                                                                   |
       +--> wte --> block 0 (x, rows) --> block 1 (x, rows) --> ... --> norm --> head --> logits

A layer never indexes a table. It declares how wide its row is (`row_width`) and receives rows;
where they come from is the business of `tables/tables.py`. `LAYERS` below says what a layer is made
of: to try an idea of your own, add a line there.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import ModelConfig
from embformer import EmbformerFFN, RowQKV
from stem import StemFFN
from tables.tables import ResidentTables, Tables


def rotary(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary positions (Su et al., 2021): [T] -> two of [T, head_dim/2]."""
    frequency = base ** (-torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angle = positions.float()[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel i and i + head_dim/2 of x [B, T, H, head_dim] by the angle of their position."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, head_dim/2]: the same for all heads
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class KVCache:
    """Keys and values of the tokens seen so far, in buffers allocated once."""

    def __init__(self, config: ModelConfig, batch: int, device, dtype: torch.dtype) -> None:
        shape = (config.n_layer, batch, config.n_kv_head, config.block_size, config.head_dim)
        self.k, self.v = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))
        self.length = 0  # tokens in the cache; the decoder advances it after its last layer

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, n_kv_head, T, head_dim], return all [B, n_kv_head, S, head_dim]."""
        end = self.length + k.shape[2]
        self.k[layer, :, :, self.length : end] = k
        self.v[layer, :, :, self.length : end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


class LinearQKV(nn.Module):
    """Queries, keys and values by one linear layer."""

    row_width = 0

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = (config.n_head, config.n_kv_head, config.n_kv_head)
        self.qkv = nn.Linear(config.n_embd, sum(self.heads) * config.head_dim, bias=False)

    def forward(self, x: Tensor, rows: None) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, n_embd] -> q [B, T, n_head, head_dim], k and v [B, T, n_kv_head, head_dim]."""
        heads = self.qkv(x).unflatten(-1, (sum(self.heads), -1))  # [B, T, heads, head_dim]
        return heads.split(self.heads, dim=-2)


class SwiGLU(nn.Module):
    """The dense FFN, `W_d (SiLU(W_g x) * (W_u x))` (Shazeer, 2020)."""

    row_width = 0

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.d_ff, bias=False)
        self.up = nn.Linear(config.n_embd, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.n_embd, bias=False)

    def forward(self, x: Tensor, rows: None) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # [B, T, d_ff] -> [B, T, n_embd]


# What a layer is made of: where queries, keys and values come from, and the FFN. A class is built
# as Class(config), says how much of the token's row it reads (`row_width`, 0: none), and is called
# as (x, rows) with rows [B, T, row_width], or None in a block without a table.
LAYERS = {
    "dense": (LinearQKV, SwiGLU),
    "stem": (LinearQKV, StemFFN),
    "embformer": (RowQKV, EmbformerFFN),
}


class Attention(nn.Module):
    """Causal self-attention with rotary positions, grouped queries and a KV cache."""

    def __init__(self, config: ModelConfig, layer: int, qkv: nn.Module) -> None:
        super().__init__()
        self.layer, self.qkv = layer, qkv
        self.out = nn.Identity()
        if not config.embedding_only:
            self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(
        self,
        x: Tensor,
        rows: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cache: KVCache | None,
    ) -> Tensor:
        """x [B, T, n_embd] -> [B, T, n_embd]; with a cache, x continues the S - T tokens in it.

        mask [.., T, S] is added to the logits, -inf hides a key; None hides those that follow."""
        q, k, v = self.qkv(x, rows)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, heads, T, head_dim]
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # [B, n_kv_head, S, head_dim]
        groups = q.shape[1] // k.shape[1]
        # Kernels of MPS do not know grouped queries; nor do CUDA's fast ones that take a mask.
        if groups > 1 and (mask is not None or q.device.type == "mps"):
            k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
        causal = mask is None and q.shape[2] > 1
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=groups > 1
        )
        return self.out(y.transpose(1, 2).flatten(-2))  # [B, T, n_head * head_dim] = [B, T, n_embd]


class Block(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        qkv_class, ffn_class = LAYERS[config.layer_kind(layer)]
        scale = not config.embedding_only
        self.attn_norm = nn.RMSNorm(config.n_embd, config.norm_eps, elementwise_affine=scale)
        self.attn = Attention(config, layer, qkv_class(config))
        self.ffn_norm = nn.RMSNorm(config.n_embd, config.norm_eps, elementwise_affine=scale)
        self.ffn = ffn_class(config)
        self.row_split = (self.attn.qkv.row_width, self.ffn.row_width)
        self.row_width = sum(self.row_split)

    def forward(self, x: Tensor, rows: Tensor | None, *context) -> Tensor:
        """x [B, T, n_embd], rows [B, T, row_width] or None -> [B, T, n_embd]; `context` is what
        `Attention` is given besides: cos, sin, mask, cache."""
        attn_rows, ffn_rows = (None, None) if rows is None else rows.split(self.row_split, dim=-1)
        x = x + self.attn(self.attn_norm(x), attn_rows, *context)
        return x + self.ffn(self.ffn_norm(x), ffn_rows)


class Decoder(nn.Module):
    """The whole model: embedding, blocks, norm, head, and the tables the blocks read."""

    def __init__(self, config: ModelConfig, tables: Callable[..., Tables] = ResidentTables) -> None:
        """tables: makes the tables' home when called as (n_table, V, W), see tables/tables.py."""
        super().__init__()
        if config.ffn not in LAYERS:
            raise ValueError(f"ffn={config.ffn!r} is not one of {', '.join(LAYERS)}")
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        scale = not config.embedding_only
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps, elementwise_affine=scale)
        self.head = (
            None if config.tie_head else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        )
        widths = [block.row_width for block in self.blocks if block.row_width]
        if len(set(widths)) > 1:
            raise ValueError(f"all layers with a table must read rows of one width, got {widths}")
        self.tables = tables(len(widths), config.vocab_size, widths[0] if widths else 0)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal(0, init_std), GPT-2's 0.02, with the layers that write to the residual stream
        scaled down by sqrt(2 n_layer); table rows Normal(0, table_std).

        Small dense weights pass little on at first: so facts settle in the tables, where swapping
        rows moves them. In trials 1 / sqrt(fan-in) reached the same loss, but left the facts in
        the dense weights. Rows of 0.02 let 99.7 % of edits succeed, rows of 1 let 67 % (README)."""
        if self.wte.weight.is_meta:
            return  # there is nothing to draw
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2 or name.startswith("tables."):
                continue  # norms stay at one
            std = self.config.init_std
            if name.endswith(("attn.out.weight", "ffn.down.weight")):
                std /= (2 * self.config.n_layer) ** 0.5
            nn.init.normal_(parameter, std=std)
        self.tables.init_rows(self.config.table_std)

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        *,
        table_ids: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Next-token logits, and their loss if there are targets.

        Args:
            ids: [B, T] token ids on the model's device.
            targets: [B, T] ids to predict, -1 where the loss should not look.
            table_ids: [B, T] ids under which tables are looked up, `ids` if None. Other tokens' ids
                edit what the model knows. May be on the CPU, where finding the distinct ones does
                not make the host wait for the GPU.
            documents: [B, T] number of the document that a token belongs to. Attention then stays
                inside documents, as if each ran alone: rotary positions being relative, theirs
                need not restart.
            cache: continue the sequence in this cache and add `ids` to it.
            last_only: compute logits of the last position alone, as decoding needs.

        Returns:
            logits [B, T, V] (or [B, 1, V]) and the mean cross-entropy in nats, or None.

        Raises:
            ValueError: more tokens than `block_size`, or `documents` with a cache.
        """
        if documents is not None and cache is not None:
            raise ValueError("documents are parts of one sequence: not for use with a cache")
        start = cache.length if cache is not None else 0
        end = start + ids.shape[1]
        if end > self.config.block_size:
            raise ValueError(f"{end} tokens do not fit into block_size={self.config.block_size}")
        rows = iter(self.tables.lookup(ids if table_ids is None else table_ids))
        positions = torch.arange(start, end, device=ids.device)
        cos, sin = rotary(positions, self.config.head_dim, self.config.rope_base)
        mask = None  # causal
        if documents is not None:
            same = documents[:, None, :, None] == documents[:, None, None]  # [B, 1, T, T]
            mask = self.additive(same.tril_())
        elif 0 < start < end - 1:  # several tokens after a filled cache
            seen = torch.ones((end - start, end), dtype=torch.bool, device=ids.device)
            mask = self.additive(seen.tril_(start))
        x = self.wte(ids)  # [B, T, n_embd]
        for block in self.blocks:
            x = block(x, next(rows) if block.row_width else None, cos, sin, mask, cache)
        if cache is not None:
            cache.length = end
        x = self.norm(x[:, -1:] if last_only else x)
        logits = F.linear(x, self.wte.weight) if self.head is None else self.head(x)
        if targets is None:
            return logits, None
        flat = logits.flatten(0, 1).float()  # [B * T, V]
        return logits, F.cross_entropy(flat, targets.flatten(), ignore_index=-1)

    def additive(self, seen: Tensor) -> Tensor:
        """What a mask adds to attention's logits, once for all layers: from booleans each layer
        would make that by itself, and keep it in training."""
        device, dtype = seen.device.type, self.wte.weight.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(seen.logical_not_(), -torch.inf)

    @torch.inference_mode()
    def stream(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | None = None,
        seed: int | None = None,
        table_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Iterator[Tensor]:
        """Yield one new token [B] per step, for prompts `ids` [B, T] of equal length.

        Args:
            temperature: 0 is greedy decoding.
            top_k: keep the k most probable tokens.
            top_p: keep the most probable tokens that together reach this probability.
            stop: a sequence that has produced this token goes on with it; when all have, the
                iteration ends.
            seed: makes sampling reproducible; None draws from PyTorch's global generator.
            table_ids: [B, T], see `forward`. New tokens are looked up under their own ids.
            cache: one that holds the first tokens of `ids` already; only the others are read. The
                new tokens are added to it, except the last.

        When the context is full it goes on with its last half.

        Raises:
            ValueError: an option is out of its range, or there is no prompt.
        """
        if not temperature >= 0:
            raise ValueError(f"temperature={temperature} must be 0 or more")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k={top_k} must be at least 1")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p} must be above 0 and at most 1")
        if ids.shape[1] == 0:
            raise ValueError("the prompt is empty: begin with the end-of-text token")
        block_size = self.config.block_size
        generator = None if seed is None else torch.Generator(ids.device).manual_seed(seed)
        table_ids = ids if table_ids is None else table_ids.to(ids.device)
        done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for _ in range(max_new_tokens):
            if cache is None or cache.length == block_size:
                keep = block_size if cache is None else max(1, block_size // 2)
                ids, table_ids = ids[:, -keep:], table_ids[:, -keep:]
                cache = KVCache(self.config, len(ids), ids.device, self.wte.weight.dtype)
            new = slice(cache.length, None)  # what the cache has not seen: the prompt, then a token
            logits, _ = self(ids[:, new], table_ids=table_ids[:, new], cache=cache, last_only=True)
            token = sample(logits[:, -1], temperature, top_k, top_p, generator)  # [B]
            if stop is not None:
                token = token.masked_fill(done, stop)
                done |= token == stop
            yield token
            if stop is not None and done.all():  # a host-device sync per token
                return
            ids = torch.cat((ids, token[:, None]), dim=1)
            table_ids = torch.cat((table_ids, token[:, None]), dim=1)

    def generate(self, ids: Tensor, max_new_tokens: int, **options) -> Tensor:
        """All tokens of `stream` behind the prompt: [B, T] -> [B, T + new]."""
        new = list(self.stream(ids, max_new_tokens, **options))
        return torch.cat([ids, *(token[:, None] for token in new)], dim=1)

    def sizes(self) -> dict[str, int]:
        """Parameters and FLOPs.

        Returns:
            total, table, backbone: parameters in all, in tables, elsewhere (the tied head once).
            active: parameters that one token touches: the backbone with one row of its embedding
                (all of it where it is the head too), and one row of each table.
            flops_per_token: of a forward pass, 2 per multiplied weight, plus attention over
                block_size / 2 tokens, the mean under a causal mask.
        """
        config = self.config
        table = sum(weight.numel() for weight in self.tables.weight)
        dense = [p for name, p in self.named_parameters() if not name.startswith("tables.")]
        backbone = sum(p.numel() for p in dense)
        wte = 0 if config.tie_head else self.wte.weight.numel()  # where it is only looked up
        multiplied = sum(p.numel() for p in dense if p.dim() == 2) - wte
        rows = len(self.tables.weight) * self.tables.width
        attention = 4 * config.n_layer * config.n_embd * config.block_size // 2
        return {
            "total": backbone + table,
            "table": table,
            "backbone": backbone,
            "active": backbone + rows - (wte - config.n_embd if wte else 0),
            "flops_per_token": 2 * multiplied + attention,
        }


def sample(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a token from logits [B, V] -> [B]; see `Decoder.stream`."""
    if temperature < 1e-30:  # in float32, what is much less is zero
        return logits.argmax(-1)
    # The largest logit becomes 0, so that no temperature, however low, makes an infinity of it.
    logits = (logits.float() - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        best, token = logits.topk(top_k)  # [B, k]
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, token, best)
    probability = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, token = probability.sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # what the more probable tokens sum up to
        probability.scatter_(-1, token, ordered.masked_fill(before >= max(top_p, 1e-30), 0.0))
    return torch.multinomial(probability, 1, generator=generator)[:, 0]
