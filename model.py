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

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from attention import Attention, KVCache, LinearQKV, document_mask, rotary
from baselines import DeepEmbedFFN, HashMoEFFN, MoEFFN, PerLayerEmbeddingFFN, ProductKeyMemory
from config import ModelConfig
from embformer import EmbformerFFN, RowQKV
from stem import StemFFN
from tables.tables import ResidentTables, Tables, send


class SwiGLU(nn.Module):
    """The dense FFN, `W_d (SiLU(W_g x) * (W_u x))` (Shazeer, 2020)."""

    row_width = 0

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.d_ff, bias=False)
        self.up = nn.Linear(config.n_embd, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.n_embd, bias=False)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # [B, T, d_ff] -> [B, T, n_embd]


# What a layer is made of: where queries, keys and values come from, and the FFN. A class is built
# as Class(config), says how much of the token's row it reads (`row_width`, 0: none), and is called
# as (x, rows) with rows [B, T, row_width]. In a block without a table `rows` are instead the ids
# [B, T] under which it would have been read.
LAYERS = {
    "dense": (LinearQKV, SwiGLU),
    "stem": (LinearQKV, StemFFN),
    "embformer": (RowQKV, EmbformerFFN),
    "moe": (LinearQKV, MoEFFN),
    "hash_moe": (LinearQKV, HashMoEFFN),
    "pkm": (LinearQKV, ProductKeyMemory),
    "deepembed": (LinearQKV, DeepEmbedFFN),
    "ple": (LinearQKV, PerLayerEmbeddingFFN),
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

    def forward(self, x: Tensor, rows: Tensor, *context) -> Tensor:
        """x [B, T, n_embd], rows as LAYERS says -> [B, T, n_embd]; `context` is what `Attention` is
        given besides: cos, sin, mask, cache."""
        attn_rows, ffn_rows = rows.split(self.row_split, -1) if self.row_width else (rows, rows)
        x = x + self.dropout(self.attn(self.attn_norm(x), attn_rows, *context))
        return x + self.dropout(self.ffn(self.ffn_norm(x), ffn_rows))


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
        """Normal(0, init_std), with the layers that write to the residual stream scaled down by
        sqrt(2 n_layer), as in GPT-2; table rows Normal(0, table_std).

        Rows start small, as noise of size 1 would have to be unlearned first: facts then settle
        where swapping rows does not move them (docs/results.md)."""
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
        """What the head reads, [B, T, n_embd].

        Args:
            ids: [B, T] token ids. In training they should be on the CPU, where finding the distinct
                ones does not make the host wait for a GPU.
            table_ids: [B, T] ids under which tables are looked up, `ids` if None. Other tokens' ids
                edit what the model knows.
            documents: [B, T] number of the document that a token belongs to. Attention then stays
                inside documents, as if each ran alone: rotary positions being relative, theirs
                need not restart.
            cache: continue the sequence in this cache and add `ids` to it.

        Raises:
            ValueError: more tokens than `block_size`, or `documents` with a cache.
        """
        if documents is not None and cache is not None:
            raise ValueError("documents are parts of one sequence: not for use with a cache")
        n, config = ids.shape[1], self.config
        end, room = (n + cache.length, cache.room) if cache else (n, config.block_size)
        if end > room:
            raise ValueError(f"{end} tokens do not fit into block_size={room}")
        table_ids = ids if table_ids is None else table_ids
        rows = self.tables.lookup(table_ids)
        x = F.dropout(self.embed(ids), config.dropout, self.training)
        layers = self.layers
        if cache is not None:
            static = self.compiled is not None and n == 1 < end
            layers, rows = (self.compiled, list(rows)) if static else (layers, rows)
            context = (*cache.begin(n, static), cache)
        else:
            mask = None if documents is None else document_mask(documents, x.dtype)
            context = (*rotary(n, config, x.device), mask, None)
        return layers(x, rows, table_ids, *context)

    def embed(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, n_embd]."""
        return self.wte(send(ids, self.device)) if self.head is None else next(self.wte.lookup(ids))

    def layers(self, x: Tensor, rows: Iterable[Tensor], ids: Tensor, *context) -> Tensor:
        """From the embedding [B, T, n_embd] and the rows of each table to what the head reads;
        `ids` [B, T] are those that rows are looked up under."""
        rows = iter(rows)
        for block in self.blocks:
            x = block(x, next(rows) if block.row_width else ids, *context)
        return self.norm(x)

    def forward(
        self, ids: Tensor, targets: Tensor | None = None, *, last_only: bool = False, **more
    ) -> tuple[Tensor, Tensor | None]:
        """Next-token logits, and their loss if there are targets.

        Args:
            ids: [B, T] token ids.
            targets: [B, T] ids to predict, -1 where the loss should not look.
            last_only: compute logits of the last position alone, as decoding needs.
            more: what else `hidden` takes.

        Returns:
            logits [B, T, V] (or [B, 1, V]) and the mean cross-entropy in nats, or None. Training
            finds that without making all logits (training/loss.py).
        """
        x = self.hidden(ids, **more)
        logits = F.linear(x[:, -1:] if last_only else x, self.head_weight)
        if targets is None:
            return logits, None
        flat = logits.flatten(0, 1).float()  # [B * T, V]
        return logits, F.cross_entropy(flat, targets.flatten(), ignore_index=-1)

    @property
    def head_weight(self) -> Tensor:  # [V, n_embd]
        return self.wte.weight if self.head is None else self.head.weight

    def compile_steps(self) -> None:
        """Compile what a token goes through in decoding: slow start, fast steps. On a GPU that is
        one CUDA graph, which gets rows from tables wherever they are."""
        mode = "reduce-overhead" if self.device.type == "cuda" else None
        self.compiled = torch.compile(self.layers, mode=mode, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def use_column_major_weights(self) -> "Decoder":
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
                (all of it where it is the head too), without what is `idle` in a layer, as experts
                not chosen (baselines.py), and one row of each table.
            flops_per_token: of a forward pass, 2 per multiplied weight, plus attention over
                block_size / 2 tokens, the mean under a causal mask.
            flops_per_key: of that, attention to one token, in all layers.
        """
        config = self.config
        table = sum(weight.numel() for weight in self.tables.weight)
        dense = [p for name, p in self.named_parameters() if not name.startswith("tables.")]
        backbone = sum(p.numel() for p in dense)
        wte = 0 if config.tie_head else config.vocab_size * config.n_embd  # is only looked up
        idle = sum(getattr(block.ffn, "idle", 0) for block in self.blocks)
        multiplied = sum(p.numel() for p in dense if p.dim() == 2) - wte - idle
        rows = len(self.tables.weight) * self.tables.width
        attention = 4 * config.n_layer * config.n_embd  # q k, and its weight times v
        return {
            "total": backbone + table,
            "table": table,
            "backbone": backbone,
            "active": backbone - idle + rows - (wte - config.n_embd if wte else 0),
            "flops_per_token": 2 * multiplied + attention * config.block_size // 2,
            "flops_per_key": attention,
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


class NoDraws(TorchFunctionMode):
    """Leaves out random numbers: on the meta device PyTorch would import its compiler for them,
    which takes a second."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        if func.__name__ == "normal_":  # a tensor's method, or torch.nn.init's function
            return args[0] if args else given["tensor"]
        return func(*args, **given)


@contextlib.contextmanager
def outline() -> Iterator[None]:
    """Models that are made here have shapes, but no numbers."""
    with NoDraws(), torch.device("meta"):
        yield
