"""A decoder with a dense backbone and token tables.

    from model import Decoder, ModelConfig
    model = Decoder(ModelConfig(vocab_size=6400, ffn="stem", stem_layers="third"))
    logits, _ = model(ids)                                  # [B, T] -> [B, T, V]
    _, loss = model(ids, targets)                           # without ever making all logits
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

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from config import ModelConfig
from embformer import EmbformerFFN, RowQKV
from loss import head_loss
from stem import StemFFN
from tables.tables import ResidentTables, Tables, send


def rotary(n: int, config: ModelConfig, device) -> tuple[Tensor, Tensor]:
    """What `rotate` needs for positions 0 to n - 1 (Su et al., 2021): two of [n, 1, head_dim]."""
    half = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
    angle = torch.arange(n, device=device)[:, None, None] * config.rope_base**-half
    cos, sin = angle.cos(), angle.sin()  # [n, 1, head_dim/2]: the same for all heads
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channels i and i + head_dim/2 of x [B, T, H, head_dim], as the point (a, b) of a plane,
    by the angle of their position: (a cos - b sin, b cos + a sin)."""
    turned = x.float()
    return (turned * cos + turned.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class KVCache:
    """Keys and values of the tokens seen so far, in buffers allocated once, with `room` for so
    many tokens (block_size, if None).

    `padding` [B]: how many tokens at the left of each sequence are none, nobody attends to them.
    That is all there is to prompts of different length in one batch: rotary positions being
    relative, they need not begin at 0."""

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        device,
        dtype: torch.dtype,
        *,
        room: int | None = None,
        padding: Tensor | None = None,
    ) -> None:
        self.room = min(room or config.block_size, config.block_size)
        shape = (batch, config.n_kv_head, self.room, config.head_dim)
        # Of each layer. Zeros: where memory holds NaN, a weight of zero would not hide it.
        self.k, self.v = (
            [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layer)]
            for _ in range(2)
        )
        self.cos, self.sin = rotary(self.room, config, device)
        self.slots = torch.arange(self.room, device=device)
        self.padding = None if padding is None else padding.to(device)
        self.length = 0  # tokens in the cache

    def begin(self, n: int, static: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Make room for the next n tokens, and say what attention needs to know: cos, sin, mask.

        With `static` nothing that layers see tells how many tokens there are: they attend to the
        whole buffer, behind a mask. So one compiled graph serves all steps."""
        start, self.length = self.length, self.length + n
        self.new: slice | Tensor = slice(start, self.length)  # where the tokens go
        self.end: int | None = self.length  # of what they attend to
        cos, sin, at = self.cos[self.new], self.sin[self.new], self.slots[self.new, None]  # [n, ..]
        if static:
            self.new, self.end = at[:, 0], None
            for buffer in (*self.k, *self.v):  # CUDA graphs need not copy them
                torch._dynamo.mark_static_address(buffer)
        if not static and self.padding is None and (start == 0 or n == 1):
            return cos, sin, None  # plainly causal
        slots = self.slots[: self.end]  # [S]
        seen = slots <= at  # [n, S]
        if self.padding is not None:  # padding sees itself: a mask must not hide everything
            seen = seen & (slots >= self.padding[:, None, None, None]) | (slots == at)
        return cos, sin, additive(seen, self.k[0].dtype)  # [n, S] or [B, 1, n, S]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, n_kv_head, T, head_dim], return all [B, n_kv_head, S, head_dim]."""
        self.k[layer][:, :, self.new] = k
        self.v[layer][:, :, self.new] = v
        return self.k[layer][:, :, : self.end], self.v[layer][:, :, : self.end]


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What a mask adds to attention's logits, once for all layers: from booleans each layer would
    make that by itself, and keep it in training."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


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
        if groups > 1 and q.device.type in (("mps",) if mask is None else ("mps", "cuda")):
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
        # The embedding is a token table, too, unless it is the head as well, which reads all of it.
        tied, size = config.tie_head, (config.vocab_size, config.n_embd)
        self.wte = nn.Embedding(*size) if tied else ResidentTables(1, *size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        scale = not config.embedding_only
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps, elementwise_affine=scale)
        self.head = None if tied else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        widths = [block.row_width for block in self.blocks if block.row_width]
        if len(set(widths)) > 1:
            raise ValueError(f"all layers with a table must read rows of one width, got {widths}")
        self.tables = tables(len(widths), config.vocab_size, widths[0] if widths else 0)
        self.compiled = None  # `layers`, see `compile_steps`
        self.register_load_state_dict_pre_hook(rename_wte)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal(0, init_std), GPT-2's 0.02, with the layers that write to the residual stream
        scaled down by sqrt(2 n_layer); table rows Normal(0, table_std).

        Small dense weights pass little on at first: so facts settle in the tables, where swapping
        rows moves them. In trials 1 / sqrt(fan-in) reached the same loss, but left the facts in
        the dense weights. Rows of 0.02 let 99.7 % of edits succeed, rows of 1 let 67 % (README)."""
        if self.device.type == "meta":
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
        """Next-token logits or, if there are targets, their loss.

        Args:
            ids: [B, T] token ids. In training they should be on the CPU, where finding the distinct
                ones does not make the host wait for a GPU.
            targets: [B, T] ids to predict, -1 where the loss should not look.
            table_ids: [B, T] ids under which tables are looked up, `ids` if None. Other tokens' ids
                edit what the model knows.
            documents: [B, T] number of the document that a token belongs to. Attention then stays
                inside documents, as if each ran alone: rotary positions being relative, theirs
                need not restart.
            cache: continue the sequence in this cache and add `ids` to it.
            last_only: compute logits of the last position alone, as decoding needs.

        Returns:
            logits [B, T, V] (or [B, 1, V]) and None; or None and the mean cross-entropy in nats.

        Raises:
            ValueError: more tokens than `block_size`, or `documents` with a cache.
        """
        if documents is not None and cache is not None:
            raise ValueError("documents are parts of one sequence: not for use with a cache")
        n = ids.shape[1]
        end, room = (n + cache.length, cache.room) if cache else (n, self.config.block_size)
        if end > room:
            raise ValueError(f"{end} tokens do not fit into block_size={room}")
        rows = self.tables.lookup(ids if table_ids is None else table_ids)
        x = self.wte(send(ids, self.device)) if self.head is None else next(self.wte.lookup(ids))
        layers = self.layers
        if cache is not None:
            static = self.compiled is not None and n == 1 < end
            layers, rows = (self.compiled, list(rows)) if static else (layers, rows)
            context = (*cache.begin(n, static), cache)
        else:
            mask = None  # causal
            if documents is not None:
                same = documents[:, None, :, None] == documents[:, None, None]  # [B, 1, T, T]
                kind, dtype = x.device.type, x.dtype
                if torch.is_autocast_enabled(kind):
                    dtype = torch.get_autocast_dtype(kind)
                mask = additive(same.tril_(), dtype)
            context = (*rotary(n, self.config, x.device), mask, None)
        x = layers(x, rows, *context)
        x = x[:, -1:] if last_only else x
        head = self.wte.weight if self.head is None else self.head.weight
        if targets is None:
            return F.linear(x, head), None
        return None, head_loss(x.flatten(0, 1), head, send(targets, x.device).flatten())

    def layers(self, x: Tensor, rows: Iterable[Tensor], *context) -> Tensor:
        """From the embedding [B, T, n_embd] and the rows of each table to what the head reads."""
        rows = iter(rows)
        for block in self.blocks:
            x = block(x, next(rows) if block.row_width else None, *context)
        return self.norm(x)

    def compile_steps(self) -> None:
        """Compile what a token goes through in decoding: slow start, fast steps. On a GPU that is
        one CUDA graph, which gets rows from tables wherever they are."""
        mode = "reduce-overhead" if self.device.type == "cuda" else None
        self.compiled = torch.compile(self.layers, mode=mode, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def by_columns(self) -> "Decoder":
        """Let weights that widen lie in memory by columns. On a CPU a step of decoding, one row
        times all weights, then reads them twice as fast; nothing else changes."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and weight.shape[0] > weight.shape[1] and "tables." not in name:
                weight.data = weight.T.contiguous().T
        return self

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

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
        padding: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield one new token [B] per step, for prompts `ids` [B, T].

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
            padding: [B] how many ids at the left of each prompt are none, where their lengths
                differ (`left_padded`).

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
            if cache is None or cache.length == cache.room:
                keep = block_size if cache is None else max(1, block_size // 2)
                if padding is not None:
                    padding = (padding - max(0, ids.shape[1] - keep)).clamp(min=0)
                ids, table_ids = ids[:, -keep:], table_ids[:, -keep:]
                # Of few sizes, each of which would be compiled anew.
                room = -(-(ids.shape[1] + max_new_tokens) // 128) * 128
                dtype = next(self.parameters()).dtype
                more = dict(room=room, padding=padding)
                cache = KVCache(self.config, len(ids), ids.device, dtype, **more)
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
        wte = 0 if config.tie_head else config.vocab_size * config.n_embd  # is only looked up
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


def left_padded(prompts: Sequence[Sequence[int]], filler: int) -> tuple[Tensor, Tensor]:
    """Prompts of different length as one batch: ids [B, T], and `padding` [B] for `stream`."""
    ids = [torch.tensor(prompt) for prompt in prompts]
    padded = pad_sequence(ids, batch_first=True, padding_value=filler, padding_side="left")
    return padded, padded.shape[1] - torch.tensor([len(prompt) for prompt in ids])


def rename_wte(model: Decoder, state: dict, prefix: str, *_) -> None:
    """Older checkpoints have the embedding as a plain one, even where it is not the head."""
    old = f"{prefix}wte.weight"
    if model.head is not None and old in state:
        state[f"{old}.0"] = state.pop(old)


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
