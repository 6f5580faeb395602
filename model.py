"""A decoder with a dense backbone and token tables.

    from model import Decoder, ModelConfig
    model = Decoder(ModelConfig(vocab_size=6400, ffn="stem", stem_layers="third"))
    _, loss = model(ids, targets)                           # ids, targets [B, T]
    text = model.generate(ids, max_new_tokens=64, temperature=0.8, top_k=50)

    token ids [B, T]
       +--> tables.lookup(ids) ------ rows of table 0 | table 1 | ... -----+
       |                                                                   |
       +--> wte --> block 0 (x, rows) --> block 1 (x, rows) --> ... --> norm --> head --> logits

A layer never indexes a table: it is given rows, wherever they are stored (tables/tables.py). To try
a layer of your own, add a line to `LAYERS` below.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import baselines
from attention import Attention, KVCache, LinearQKV, additive, count_keys, rotary, window_mask
from common import UserError
from config import ModelConfig
from embformer import EmbformerFFN, RowQKV
from stem import StemFFN
from tables.tables import ResidentTables, Tables, send

# Where a layer's queries, keys and values come from, and its FFN. Each class is built as
# Class(config), says how much of the token's row it reads (`row_width`, 0: none), and is called as
# (x, rows) with rows [B, T, row_width]. An FFN that `needs_ids` is given the token ids, too.
LAYERS = {
    "dense": (LinearQKV, baselines.SwiGLU),
    "stem": (LinearQKV, StemFFN),
    "embformer": (RowQKV, EmbformerFFN),
    "moe": (LinearQKV, baselines.MoEFFN),
    "hash_moe": (LinearQKV, baselines.HashMoEFFN),
    "pkm": (LinearQKV, baselines.ProductKeyMemory),
    "deepembed": (LinearQKV, baselines.DeepEmbedFFN),
    "ple": (LinearQKV, baselines.PerLayerEmbeddingFFN),
}


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
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rows: Tensor | None, ids: Tensor, *context) -> Tensor:
        """x [B, T, n_embd], rows [B, S, row_width] (None without a table): last those of `ids`
        [B, T] -> [B, T, n_embd]; `context` is for `Attention`: angles, masks, cache."""
        attn_rows, ffn_rows = rows.split(self.row_split, -1) if self.row_width else (None, None)
        x = x + self.dropout(self.attn(self.attn_norm(x), attn_rows, *context))
        ffn_rows = ffn_rows if ffn_rows is None else ffn_rows[:, -x.shape[1] :]
        more = {"ids": ids} if getattr(self.ffn, "needs_ids", False) else {}
        return x + self.dropout(self.ffn(self.ffn_norm(x), ffn_rows, **more))


class Decoder(nn.Module):
    """The whole model: embedding, blocks, norm, head, and the tables the blocks read."""

    def __init__(self, config: ModelConfig, tables: Callable[..., Tables] = ResidentTables) -> None:
        """tables: makes the tables when called as (n_table, V, W). ValueError: no such `ffn`, or
        numbers that do not fit together."""
        super().__init__()
        if config.ffn not in LAYERS:
            raise ValueError(f"ffn={config.ffn!r} is not one of {', '.join(LAYERS)}")
        self.config = config
        # The embedding is a token table, too, unless it is the head, which reads all of it.
        tied, size = config.tie_head, (config.vocab_size, config.n_embd)
        self.wte = nn.Embedding(*size) if tied else ResidentTables(1, *size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        scale = not config.embedding_only
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps, elementwise_affine=scale)
        self.head = None if tied else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        widths = [block.row_width for block in self.blocks if block.row_width]
        assert len(set(widths)) < 2, f"layers with a table must read rows of one width: {widths}"
        self.tables = tables(len(widths), config.vocab_size, widths[0] if widths else 0)
        self.compiled = None  # `layers`, see `compile_steps`
        if not self.head_weight.is_meta:  # see `outline`
            self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal(0, init_std), for layers that write to the residual stream over sqrt(2 n_layer),
        as in GPT-2; rows Normal(0, table_std), small: facts settle in them (docs/results.md)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2 or name.startswith("tables."):
                continue  # norms stay at one
            std = self.config.init_std
            if name.endswith(("attn.out.weight", "ffn.down.weight")):
                std /= (2 * self.config.n_layer) ** 0.5
            nn.init.normal_(parameter, std=std)
        self.tables.init_rows(self.config.table_std)

    def hidden(
        self,
        ids: Tensor,
        *,
        table_ids: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """ids [B, T] (in training on the CPU, see `Tables.lookup`) -> what the head reads,
        [B, T, n_embd]. Tables are looked up under `table_ids` [B, T], if given: knowledge editing.
        Attention stays inside `documents`, numbered [B, T]; rotary positions are relative, so they
        need not restart. A cache, without documents, is continued and gets the ids."""
        n, config = ids.shape[1], self.config
        end, room = (n + cache.length, cache.room) if cache else (n, config.block_size)
        assert end <= room, f"{end} tokens do not fit into block_size={room}"
        table_ids = ids if table_ids is None else table_ids
        read = table_ids if cache is None else cache.read_again(table_ids)
        rows = self.tables.lookup(read)
        x = F.dropout(self.embed(ids), config.dropout, self.training)
        static = self.compiled is not None and n == 1 < end
        layers, rows = (self.compiled, list(rows)) if static else (self.layers, rows)
        angles, mask = cache.begin(n, static) if cache else (rotary(n, config, x.device), None)
        masks = {kind: mask for kind in config.attention_kinds}  # for all layers of a kind
        if "full" in masks and documents is not None:
            same = documents[:, None, :, None] == documents[:, None, None]
            masks["full"] = additive(same.tril_(), x)  # [B, 1, T, T]
        if "window" in masks:
            masks["window"] = window_mask(config.window, documents, cache, x)
        if "count" in masks:
            masks["count"] = count_keys(read, documents, cache, x)
        return layers(x, rows, table_ids, angles, masks, cache)

    def embed(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, n_embd]."""
        return self.wte(send(ids, self.device)) if self.head is None else next(self.wte.lookup(ids))

    def layers(self, x: Tensor, rows: Iterable[Tensor], ids: Tensor, *context) -> Tensor:
        """From the embedding [B, T, n_embd] and the rows of each table to what the head reads."""
        rows = iter(rows)
        for block in self.blocks:
            x = block(x, next(rows) if block.row_width else None, ids, *context)
        return self.norm(x)

    def forward(
        self, ids: Tensor, targets: Tensor | None = None, *, last_only: bool = False, **more
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits [B, T, V], of the last token alone [B, 1, V] if `last_only`, and None. With
        targets [B, T] (-1: nothing to predict) None and the mean cross-entropy in nats. `more` is
        what `hidden` takes besides."""
        x = self.hidden(ids, **more)
        if targets is None:
            return F.linear(x[:, -1:] if last_only else x, self.head_weight), None
        given = x.flatten(0, 1), self.head_weight, send(targets, x.device).flatten()
        return None, HeadLoss.apply(*given, torch.is_grad_enabled())

    @property
    def head_weight(self) -> Tensor:  # [V, n_embd]
        return self.wte.weight if self.head is None else self.head.weight

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    def compile_steps(self) -> None:
        """Compile what a token goes through in decoding; on a GPU that is one CUDA graph."""
        if (kind := self.config.attention) != "full":
            raise UserError(
                f"--compile: caches of --attention {kind} change their size: leave it out"
            )
        mode = "reduce-overhead" if self.device.type == "cuda" else None
        self.compiled = torch.compile(self.layers, mode=mode, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def use_column_major_weights(self) -> "Decoder":
        """Store weights that widen by columns: one row times these, on a CPU, is twice as fast."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and weight.shape[0] > weight.shape[1] and "tables." not in name:
                weight.data = weight.T.contiguous().T
        return self

    @torch.inference_mode()
    def stream(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        stop: int | None = None,
        seed: int | None = None,
        table_ids: Tensor | None = None,
        **sampling,
    ) -> Iterator[Tensor]:
        """Yield a new token [B] per step for prompts `ids` [B, T], whose rows are looked up under
        `table_ids` [B, T]. A sequence that has produced `stop` repeats it; when all have, it ends.
        A context that is full goes on with its last half. `sampling` is for `sample`, and without a
        `seed` PyTorch's global generator draws."""
        assert ids.shape[1], "the prompt is empty: begin with the end-of-text token"
        generator = None if seed is None else torch.Generator(ids.device).manual_seed(seed)
        text = torch.stack((ids, ids if table_ids is None else table_ids.to(ids.device)))
        text = new = text[..., -self.config.block_size :]  # [2, B, T]: all is new, the prefill
        # Of few sizes, each of which would be compiled anew.
        room = -(-(text.shape[-1] + max_new_tokens) // 128) * 128
        cache = KVCache(self.config, len(ids), ids.device, self.head_weight.dtype, room)
        done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for _ in range(max_new_tokens):
            if cache.length == cache.room:
                text = new = text[..., -max(1, cache.room // 2) :]
                cache.length = 0
            logits, _ = self(new[0], table_ids=new[1], cache=cache, last_only=True)
            token = sample(logits[:, -1], generator=generator, **sampling)  # [B]
            if stop is not None:
                token = token.masked_fill(done, stop)
                done |= token == stop
            yield token
            if stop is not None and done.all():  # a host-device sync per token
                return
            new = token.expand(2, -1)[..., None]  # [2, B, 1]
            text = torch.cat((text, new), dim=-1)

    def generate(self, ids: Tensor, max_new_tokens: int, **options) -> Tensor:
        """The prompt with all tokens of `stream`: [B, T] -> [B, T + new]."""
        new = self.stream(ids, max_new_tokens, **options)
        return torch.cat([ids, *(token[:, None] for token in new)], dim=1)

    def sizes(self) -> dict[str, int]:
        """Parameters, in all, in tables and elsewhere (the tied head once); `active`: those that a
        token touches, so not what is `idle` (baselines.py), and one row of each table and of an
        embedding that is not the head. FLOPs of a forward pass: 2 per multiplied weight and token,
        plus attention over block_size / 2 tokens, the mean under a causal mask, or a window;
        `flops_per_key`: of that, attention to one token, in all layers."""
        config, tables, kinds = self.config, self.tables, self.config.attention_kinds
        table = sum(weight.numel() for weight in tables.weight)
        dense = [p for name, p in self.named_parameters() if not name.startswith("tables.")]
        backbone = sum(p.numel() for p in dense)
        idle = sum(getattr(block.ffn, "idle", 0) for block in self.blocks)
        row = 0 if config.tie_head else config.n_embd  # of an embedding that is only looked up
        multiplied = sum(p.numel() for p in dense if p.dim() == 2) - config.vocab_size * row - idle
        touched = backbone - (config.vocab_size - 1) * row - idle
        size, key = config.block_size, 4 * config.n_embd  # q k, and its weight times v
        seen = [min(size, 2 * config.window) if kind == "window" else size for kind in kinds]
        return {
            "total": backbone + table,
            "table": table,
            "backbone": backbone,
            "active": touched + len(tables.weight) * tables.width,
            "flops_per_token": 2 * multiplied + key * sum(seen) // 2,
            "flops_per_key": key * config.n_layer,
        }


@contextlib.contextmanager
def outline() -> Iterator[None]:
    """Models that are built here have shapes, but no numbers."""
    # To draw random numbers on the meta device, PyTorch would import its compiler for a second.
    with mock.patch.object(nn.init, "normal_"), torch.device("meta"):
        yield


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a token from logits [B, V] -> [B]: the most probable one at temperature 0, else from the
    top_k most probable ones, and from the most probable ones that together reach top_p."""
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


# Logits in memory at a time: a CPU's caches hold 8 MB of them, a GPU's kernels want more to do.
CHUNK = {"cpu": 1 << 21, "cuda": 1 << 26}


class HeadLoss(torch.autograd.Function):
    """`F.cross_entropy(x @ weight.T, targets, ignore_index=-1)` without all of its logits at once.

    Tokens take their turn chunk by chunk, forward and backward at once: the gradient of a token's
    logits is `softmax(logits) - onehot(target)`. Only the gradients of x and weight are kept."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, differentiate: bool) -> Tensor:
        """x [N, n_embd], weight [V, n_embd], targets [N] -> the mean in nats [], NaN of none."""
        if torch.is_autocast_enabled(kind := x.device.type):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = x.to(dtype), weight.to(dtype)
        known = (targets >= 0).float()  # [N]
        n = known.sum()
        size = max(1, CHUNK.get(kind, 1 << 24) // len(weight))
        loss = torch.zeros((), device=x.device)
        x_grad = torch.empty_like(x)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if differentiate else None
        for at in range(0, len(x), size):
            chunk = slice(at, at + size)
            here, target = x[chunk], targets[chunk].clamp(min=0)[:, None]  # [k, n_embd], [k, 1]
            log_p = F.log_softmax((here @ weight.T).float(), dim=-1)  # [k, V]
            loss -= (log_p.gather(1, target)[:, 0] * known[chunk]).sum()
            if differentiate:
                grad = log_p.exp_()
                grad.scatter_add_(1, target, torch.full_like(target, -1, dtype=grad.dtype))
                grad = grad.mul_(known[chunk, None]).to(x.dtype)  # over n, float16 would lose it
                torch.mm(grad, weight, out=x_grad[chunk])
                if weight.dtype == torch.float32:
                    weight_grad.addmm_(grad.T, here)
                else:
                    weight_grad += grad.T @ here
        ctx.save_for_backward(x_grad, weight_grad, n)
        return loss / n

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_grad, weight_grad, n = ctx.saved_tensors
        grad = grad / n
        return x_grad * grad, weight_grad.to(x_grad.dtype) * grad, None, None
