"""A decoder with a dense backbone and token tables.

    from model import Decoder, ModelConfig
    model = Decoder(ModelConfig(vocab_size=6400, ffn="stem", stem_layers="third"))
    _, loss = model(ids, targets)                           # ids, targets [B, T]
    ids = model.generate(ids, max_new_tokens=64, temperature=0.8, top_k=50)  # [B, T + 64]

    token ids [B, T]
       +--> tables.lookup(ids) ------ rows of table 0 | table 1 | ... -----+
       |                                                                   |
       +--> wte --> block 0 (x, rows) --> block 1 (x, rows) --> ... --> norm --> head --> logits

A layer never indexes a table: it is given rows, no matter where they are stored (tables/tables.py).

`AdamW(model.parameters())` trains neither the tables nor an untied embedding: use
training.optimizer.Optimizer, or beside your own optimizer the one in tables/ for their rows.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import baselines
from attention import Attention, KVCache, LayerCache, LinearQKV, additive, rotary
from common import UserError
from config import NGRAMS, ModelConfig
from embformer import EmbformerFFN, RowQKV
from local_attention import WindowAttention
from ngram import Bigram, Engram, Ngrams, ValueQKV
from stem import StemFFN
from tables.tables import ResidentTables, Tables, send

# For each --ffn where a layer's queries, keys and values come from, and its FFN. A layer of your
# own is a line here. Both classes
#   are built as Class(config), also on the meta device, and called as (x, rows), x [B, T, n_embd],
#   rows [B, T, row_width], of one dtype;
#   have `row_width`, how many numbers of the token's row they read. With 0, rows are None or have
#   width 0. All layers with a table must read the same total width.
# Decoder.init_weights draws every weight of two or more dimensions, whatever the class did, with a
# smaller std for a layer `down` of an FFN, which writes to the residual stream.
# An FFN may also have
#   needs_ids = True   it is called as (x, rows, ids=ids), ids [B, T];
#   auxiliary_loss     after a forward pass in training, a term that is added to the loss;
#   idle               the number of its parameters that one token does not use.
LAYERS = {
    "dense": (LinearQKV, baselines.SwiGLU),
    "stem": (LinearQKV, StemFFN),
    "embformer": (RowQKV, EmbformerFFN),
    "moe": (LinearQKV, baselines.MoEFFN),
    "hash_moe": (LinearQKV, baselines.HashMoEFFN),
    "pkm": (LinearQKV, baselines.ProductKeyMemory),
    "deepembed": (LinearQKV, baselines.DeepEmbedFFN),
    "ple": (LinearQKV, baselines.PerLayerEmbeddingFFN),
    "engram": (LinearQKV, baselines.SwiGLU),
    "bigram": (LinearQKV, baselines.SwiGLU),
    "value": (ValueQKV, baselines.SwiGLU),
}

# What some kinds add to the residual stream before attention; built and called as above.
MEMORIES = {
    "engram": Engram,
    "bigram": Bigram,
}

# Kinds of --attention.
ATTENTION = {
    "full": Attention,
    "window": WindowAttention,
}


def make_norm(config: ModelConfig) -> nn.RMSNorm:
    scale = not config.embedding_only
    return nn.RMSNorm(config.n_embd, config.norm_eps, elementwise_affine=scale)


class Block(nn.Module):
    """Pre-norm residual block: x + memory(x), if the layer has one, then x + attention(norm(x)),
    then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        kind = config.layer_kind(layer)
        qkv_class, ffn_class = LAYERS[kind]
        self.memory = MEMORIES[kind](config) if kind in MEMORIES else None
        self.attention_kind = config.attention_kinds[layer]
        self.attn_norm = make_norm(config)
        self.attn = ATTENTION[self.attention_kind](config, qkv_class(config))
        self.ffn_norm = make_norm(config)
        self.ffn = ffn_class(config)
        memory_width = 0 if self.memory is None else self.memory.row_width
        self.row_split = [memory_width, self.attn.qkv.row_width, self.ffn.row_width]
        self.row_width = sum(self.row_split)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rows: Tensor | None,
        ids: Tensor,
        angles: Tensor,
        mask: Tensor | None,
        cache: LayerCache | None,
        slots: slice | Tensor | None,
    ) -> Tensor:
        """x [B, T, n_embd], rows of ids [B, T], [B, T, row_width] (None without a table) ->
        [B, T, n_embd]. All else is for `Attention.forward`."""
        attn_rows, ffn_rows = None, None
        if rows is not None:
            memory_rows, attn_rows, ffn_rows = rows.split(self.row_split, dim=-1)
        if self.memory is not None:
            x = x + self.dropout(self.memory(x, memory_rows))
        attended = self.attn(self.attn_norm(x), attn_rows, angles, mask, cache, slots)
        x = x + self.dropout(attended)
        normed = self.ffn_norm(x)
        if getattr(self.ffn, "needs_ids", False):
            y = self.ffn(normed, ffn_rows, ids=ids)
        else:
            y = self.ffn(normed, ffn_rows)
        return x + self.dropout(y)


class Decoder(nn.Module):
    """The whole model: embedding, blocks, norm, head, and the tables the blocks read.

    Built under `torch.device("meta")` it has shapes but no values, which is enough for `sizes`.
    """

    def __init__(self, config: ModelConfig, tables: Callable[..., Tables] = ResidentTables) -> None:
        """tables: called as (n_table, n_row, width), makes the tables; n_row is the vocabulary size
        or, of n-grams, more. UserError: unknown `ffn`, or sizes that do not fit together."""
        super().__init__()
        if config.ffn not in LAYERS:
            raise UserError(f"--ffn {config.ffn} is not one of {', '.join(LAYERS)}")
        if not set(config.attention_kinds) <= set(ATTENTION):
            kinds = " and ".join(ATTENTION)
            raise UserError(f"--attention {config.attention} must be a list of {kinds}")
        self.config = config
        if config.tie_head:
            self.wte = baselines.make_embedding(config.vocab_size, config.n_embd)
        else:  # an embedding that is only looked up is a token table, too
            self.wte = ResidentTables(1, config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = make_norm(config)
        self.head = None
        if not config.tie_head:
            self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        widths = [block.row_width for block in self.blocks if block.row_width]
        assert len(set(widths)) < 2, f"layers with a table must read rows of one width: {widths}"
        n_table = len(widths)
        n_row = config.vocab_size
        width = widths[0] if widths else 0
        # Rows have addresses: token ids or, if they belong to n-grams, hashes.
        self.ngrams = None
        if config.ffn in NGRAMS.split():
            self.ngrams = Ngrams(config)
            n_row = self.ngrams.n_row
            width //= self.ngrams.n_address  # a token reads several, side by side
        self.shares_rows = config.ffn == "bigram"  # all layers read one table
        if self.shares_rows:
            n_table = 1
        self.tables = tables(n_table, n_row, width)
        self.compiled = None  # `layers`, see `compile_steps`
        # On meta, normal_ would import torch's compiler, which takes a second.
        if not self.head_weight.is_meta:
            self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """How each weight begins:

            norms                                              1
            rows of tables                                     Normal(0, table_std)
            attn.out, ffn.down: write to the residual stream   Normal(0, init_std / sqrt(2 n_layer))
            all others, the embedding included                 Normal(0, init_std)

        The third is GPT-2's (Radford et al., 2019, section 2.3). Rows start small because facts
        settle in small rows (docs/results.md)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2 or name.startswith("tables."):
                continue
            std = self.config.init_std
            if name.endswith(("attn.out.weight", "ffn.down.weight")):
                std /= (2 * self.config.n_layer) ** 0.5
            nn.init.normal_(parameter, std=std)
        self.tables.init_rows(self.config.table_std)

    # --- the forward pass ---

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        *,
        last_only: bool = False,
        table_ids: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Without targets: logits [B, T, V], of the last token alone [B, 1, V] if `last_only`, and
        None. With targets [B, T] (-1: nothing to predict): None and the mean cross-entropy in nats.
        For all else see `hidden`."""
        x = self.hidden(ids, table_ids=table_ids, documents=documents, cache=cache)
        if targets is None:
            if last_only:
                x = x[:, -1:]
            return F.linear(x, self.head_weight), None
        targets = send(targets, x.device).flatten()
        differentiate = torch.is_grad_enabled()
        return None, HeadLoss.apply(x.flatten(0, 1), self.head_weight, targets, differentiate)

    def hidden(
        self,
        ids: Tensor,
        *,
        table_ids: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """What the head reads, [B, T, n_embd].

        Args:
            ids: [B, T], in training on the CPU (see `Tables.lookup`).
            table_ids: [B, T], under which tables are looked up instead: knowledge editing.
            documents: [B, T], the number of each token's document, in which attention stays (but
                see `use_previous_keys`). Rotary positions are relative: they need not begin again.
            cache: of earlier tokens, which ids continue; they are added to it. Without documents.
        """
        config = self.config
        n = ids.shape[1]
        start = 0 if cache is None else cache.length
        room = config.block_size if cache is None else cache.room
        assert start + n <= room, f"{start + n} tokens do not fit into block_size={room}"
        if table_ids is None:
            table_ids = ids

        # 1) Look up rows.
        before = None
        if start > 0:
            before = cache.last_ids
        addresses = self.addresses(table_ids, documents, before)
        rows = self.tables.lookup(addresses)  # one table after the other, as layers ask for them
        x = F.dropout(self.embed(ids), config.dropout, self.training)

        # 2) What layers share: positions and masks.
        if documents is not None:
            documents = send(documents, x.device)
        if cache is None:
            slots = None
            angles = rotary(n, config, x.device)
        else:
            slots = slice(start, start + n)
            angles = cache.angles[:, slots]
        layers = self.layers
        masks = {}
        if self.compiled is not None and start > 0 and n == 1:
            # One graph for all steps: the slot is a tensor, and a mask hides the slots after it.
            layers = self.compiled
            rows = list(rows)
            slots = torch.arange(start, start + 1, device=x.device)
            seen = torch.arange(cache.room, device=x.device) <= start
            masks["full"] = additive(seen[None], x)  # [1, room]
        else:
            for block in self.blocks:
                if block.attention_kind not in masks:
                    masks[block.attention_kind] = block.attn.make_mask(x, start, documents)

        # 3) The layers, which put keys and values into the cache.
        x = layers(x, rows, table_ids, angles, masks, cache, slots)
        if cache is not None:
            cache.length = start + n
            if self.ngrams is not None:
                cache.last_ids = self.ngrams.last(table_ids, before)
        return x

    def addresses(
        self, ids: Tensor, documents: Tensor | None = None, before: Tensor | None = None
    ) -> Tensor:
        """Where the rows of ids [B, T] are in the tables: the ids themselves or, of n-grams,
        [B, T, R]. documents and before: see `Ngrams.addresses`."""
        if self.ngrams is None:
            return ids
        return self.ngrams.addresses(ids, before, documents)

    def embed(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, n_embd]."""
        if self.head is None:
            return self.wte(send(ids, self.device))
        return next(self.wte.lookup(ids))

    def layers(
        self,
        x: Tensor,
        rows: Iterable[Tensor],
        ids: Tensor,
        angles: Tensor,
        masks: dict[str, Tensor | None],
        cache: KVCache | None,
        slots: slice | Tensor | None,
    ) -> Tensor:
        """From the embedding [B, T, n_embd] and the rows of each table to what the head reads.
        masks: by kind of attention; all else as for `Block.forward`."""
        rows = iter(rows)
        if self.shares_rows:
            rows = itertools.repeat(next(rows))
        for number, block in enumerate(self.blocks):
            block_rows = None
            if block.row_width:
                # [B, T, row_width]; of n-grams from [B, T, R, W]
                block_rows = next(rows).flatten(2).to(x.dtype)
            layer_cache = None if cache is None else cache.layers[number]
            mask = masks[block.attention_kind]
            x = block(x, block_rows, ids, angles, mask, layer_cache, slots)
        return self.norm(x)

    @property
    def head_weight(self) -> Tensor:  # [V, n_embd]
        return self.wte.weight if self.head is None else self.head.weight

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    # --- decoding ---

    def make_cache(self, batch: int, room: int | None = None) -> KVCache:
        """A cache for `batch` sequences of up to `room` tokens (block_size)."""
        room = min(room or self.config.block_size, self.config.block_size)
        layers = [block.attn.make_cache(batch, room, self.head_weight) for block in self.blocks]
        if self.compiled is not None:  # CUDA graphs need not copy what stays where it is
            for layer in layers:
                for tensor in (layer.k, layer.v, layer.last_key):
                    torch._dynamo.mark_static_address(tensor, guard=False)
        return KVCache(layers, rotary(room, self.config, self.device))

    def compile_steps(self) -> None:
        """Compile the decoding step of a token; on a GPU it becomes one CUDA graph."""
        config = self.config
        if config.attention != "full":
            raise UserError(
                f"--compile does not work with --attention {config.attention}: leave it out"
            )
        if config.ffn in ("moe", "hash_moe"):
            raise UserError(f"--compile does not work with --ffn {config.ffn}: leave it out")
        mode = "reduce-overhead" if self.device.type == "cuda" else None
        self.compiled = torch.compile(self.layers, mode=mode, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def use_column_major_weights(self) -> None:
        """Store weights with more outputs than inputs column by column: on a CPU, multiplying a
        single row by them is twice as fast."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and weight.shape[0] > weight.shape[1] and "tables." not in name:
                weight.data = weight.T.contiguous().T

    @torch.inference_mode()
    def stream(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        stop: int | None = None,
        seed: int | None = None,
        table_ids: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> Iterator[Tensor]:
        """Yield new tokens [B], one step at a time.

        Args:
            ids: prompts [B, T]. When the context is full, its last half is kept.
            stop: a sequence repeats it once it emits it; generation ends when all have.
            seed: of the draws. None: PyTorch's global generator.
            table_ids: [B, T], under which the prompt's rows are looked up.
            temperature, top_k, top_p: see `sample`.
        """
        assert ids.shape[1], "the prompt is empty: begin with the end-of-text token"
        config = self.config
        generator = None if seed is None else torch.Generator(self.device).manual_seed(seed)
        # On the CPU, where tables in RAM and the caller need them: one wait for the GPU a token.
        ids = ids.cpu()
        table_ids = ids if table_ids is None else table_ids.cpu()
        ids = ids[:, -config.block_size :]
        table_ids = table_ids[:, -config.block_size :]
        room = 128  # doubled, so that there are few sizes: each of them would be compiled anew
        while room < ids.shape[1] + max_new_tokens:
            room *= 2
        cache = self.make_cache(len(ids), room)
        done = torch.zeros(len(ids), dtype=torch.bool)
        n_new = ids.shape[1]  # how many tokens the model has not read: first, the whole prompt
        for _ in range(max_new_tokens):
            if cache.length == cache.room:  # full: read the last half again
                cache.length = 0
                n_new = max(1, cache.room // 2)
            new_ids, new_table_ids = ids[:, -n_new:], table_ids[:, -n_new:]
            logits, _ = self(new_ids, table_ids=new_table_ids, cache=cache, last_only=True)
            token = sample(logits[:, -1], temperature, top_k, top_p, generator).cpu()  # [B]
            if stop is not None:
                token = token.masked_fill(done, stop)
                done |= token == stop
            yield token
            if done.all():
                return
            ids = torch.cat((ids, token[:, None]), dim=1)
            table_ids = torch.cat((table_ids, token[:, None]), dim=1)
            n_new = 1

    def generate(self, ids: Tensor, max_new_tokens: int, **options) -> Tensor:
        """The prompt followed by the tokens of `stream`, to which options go: [B, T + new]."""
        tokens = [token[:, None] for token in self.stream(ids, max_new_tokens, **options)]
        return torch.cat([ids, *(send(token, ids.device) for token in tokens)], dim=1)

    # --- costs ---

    def sizes(self) -> dict[str, int]:
        """Numbers of parameters (a tied head counts once) and FLOPs of a forward pass:

        total, table, backbone   in all, in tables, elsewhere
        active                   that one token touches: of each table, and of an embedding that
                                 is not the head, one row, and not what is `idle` in FFNs
        flops_per_token          2 per multiplied weight, and attention to block_size / 2 tokens
                                 (the mean under a causal mask) or to a window
        flops_per_key            of these, attention to one token, in all layers
        """
        config = self.config
        table = sum(weight.numel() for weight in self.tables.weight)
        dense = [p for name, p in self.named_parameters() if not name.startswith("tables.")]
        backbone = sum(p.numel() for p in dense)
        matrices = sum(p.numel() for p in dense if p.dim() == 2)
        idle = sum(getattr(block.ffn, "idle", 0) for block in self.blocks)
        row_width = self.tables.width * (1 if self.ngrams is None else self.ngrams.n_address)
        row = 0 if config.tie_head else config.n_embd  # of an embedding that is only looked up
        multiplied = matrices - config.vocab_size * row - idle
        touched = backbone - (config.vocab_size - 1) * row - idle
        per_key = 4 * config.n_embd  # q k, and its weight times v
        attention = 0
        for kind in config.attention_kinds:
            seen = config.block_size
            if kind == "window":
                seen = min(seen, 2 * config.window)
            attention += per_key * seen
        return {
            "total": backbone + table,
            "table": table,
            "backbone": backbone,
            "active": touched + len(self.tables.weight) * row_width,
            "flops_per_token": 2 * multiplied + attention // 2,
            "flops_per_key": per_key * config.n_layer,
        }


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
    # Subtract the largest logit, so that no temperature, however low, overflows.
    logits = (logits.float() - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        best, token = logits.topk(top_k)  # [B, k]
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, token, best)
    probability = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, token = probability.sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # what the more probable tokens sum up to
        kept = ordered.masked_fill(before >= max(top_p, 1e-30), 0.0)
        probability.scatter_(-1, token, kept)
    # An exponential race: of exponential variables with rates p, the i-th is the smallest with
    # probability p_i. The draws of torch.multinomial, in a quarter of its kernels.
    noise = torch.empty_like(probability).exponential_(generator=generator)
    return (probability / noise).argmax(-1)


# Logits computed at a time: 8 MB fit a CPU's caches; a GPU needs more to be busy.
CHUNK = {"cpu": 1 << 21, "cuda": 1 << 26}


class HeadLoss(torch.autograd.Function):
    """`F.cross_entropy(x @ weight.T, targets, ignore_index=-1)` without holding all logits at once.

    `forward` takes the tokens in chunks and computes their gradients at once: that of a token's
    logits is `softmax(logits) - onehot(target)`. Only the gradients of x and weight are kept, as
    sums over tokens. `backward` divides them by the number of tokens; dividing earlier would
    underflow in float16."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, differentiate: bool) -> Tensor:
        """x [N, n_embd], weight [V, n_embd], targets [N] -> the mean in nats [], NaN of none."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = x.to(dtype), weight.to(dtype)
        known = (targets >= 0).float()  # [N]
        size = max(1, CHUNK.get(kind, 1 << 24) // len(weight))  # tokens in a chunk
        loss = torch.zeros((), device=x.device)
        x_grad = torch.empty_like(x)
        weight_grad = None
        if differentiate:
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(x), size):
            chunk = slice(start, start + size)
            part = x[chunk]  # [k, n_embd]
            target = targets[chunk].clamp(min=0)[:, None]  # [k, 1]
            log_p = F.log_softmax((part @ weight.T).float(), dim=-1)  # [k, V]
            loss -= (log_p.gather(1, target)[:, 0] * known[chunk]).sum()
            if not differentiate:
                continue
            # The gradient of the logits: softmax(logits) - onehot(target), 0 where unknown.
            grad = log_p.exp_()
            grad.scatter_add_(1, target, torch.full_like(target, -1, dtype=grad.dtype))
            grad = grad.mul_(known[chunk, None]).to(x.dtype)
            torch.mm(grad, weight, out=x_grad[chunk])
            if weight.dtype == torch.float32:
                weight_grad.addmm_(grad.T, part)
            else:
                weight_grad += grad.T @ part
        n = known.sum()
        ctx.save_for_backward(x_grad, weight_grad, n)
        return loss / n

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_grad, weight_grad, n = ctx.saved_tensors
        grad = grad / n
        # In float32: a sum over tokens may be too large for float16.
        return x_grad * grad, weight_grad * grad, None, None
