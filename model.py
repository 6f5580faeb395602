"""A decoder with a dense backbone and token tables.

    from model import Decoder, ModelConfig
    model = Decoder(ModelConfig(vocab_size=6400, ffn="stem", stem_layers="third"))
    _, loss = model(ids, targets)                           # ids, targets [B, T]
    ids = model.generate(ids, max_new_tokens=64, temperature=0.8, top_k=50)  # [B, T + 64]

    token ids [B, T]
       +--> tables.lookup(ids) ------ rows of table 0 | table 1 | ... -----+
       |                                                                   |
       +--> wte --> block 0 (x) --> block 1 (x, rows) --> ... --> norm --> head --> logits

A layer never indexes a table: it is given rows, no matter where they are stored (tables/tables.py).
A layer, an attention or a whole decoder of your own is a file in relatives/ (see its README).
"""

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common import UserError, check_settings, flag
from embformer import EmbformerFFN, RowQKV
from stem import StemFFN
from tables.tables import ResidentTables, Tables, send

# --- what a model is ---

BUILT_IN = ("dense", "stem", "embformer")  # kinds of --ffn; all others are in relatives/


@dataclass
class ModelConfig:
    """Shape of a decoder. Most fields are flags, too (`common.flag` explains their metadata). None
    means the default that is `shown`. UserError: names a field as a flag, its value, and what would
    be valid."""

    vocab_size: int = field(default=6400, metadata=dict(must="at least 1"))
    block_size: int = flag(128, "context length in tokens; prose: 256", must="at least 1")
    n_layer: int = flag(6, "number of layers", must="from 1 to 10,000")
    n_head: int = flag(4, "number of attention heads", must="at least 1")
    n_embd: int = flag(128, "width of the residual stream", must="at least 1")
    n_kv_head: int | None = flag(
        None, "key-value heads; fewer: grouped queries", shown="n_head", must="at least 1"
    )
    d_ff: int | None = flag(
        None,
        "hidden units of an FFN",
        shown="8/3 n_embd, rounded up to 64s",
        must="at least 1",
        of=lambda ffn: ffn != "embformer",
    )
    ffn: str = flag("stem", "kind of layers: dense, stem, embformer")  # train.py adds relatives
    stem_layers: str = flag(
        "all",
        "layers with a table: third, half, all (never the first), or numbers, 0,2,5",
        of=lambda ffn: ffn not in ("dense", "embformer"),
    )
    embformer_act: str = flag(
        "silu",
        "activation; identity: as in Wu's note",
        choices=("silu", "identity"),
        of=lambda ffn: ffn == "embformer",
    )
    attention: str = flag("full", "full, window:64, or by layer, repeated: window:64,full")
    tie_head: bool | None = flag(None, "head = input embedding", shown="off; embformer: on")
    dropout: float = flag(0.0, "dropout probability", must="0 or more and below 1")
    # Channels of a head; None: the heads share n_embd channels.
    head_dim: int | None = field(default=None, metadata=dict(must="at least 1"))
    rope_base: float = field(default=10000.0, metadata=dict(must="a positive number"))
    rope_scaling: list[float] | None = None  # see `rotary`
    norm_eps: float = field(default=1e-6, metadata=dict(must="a positive number"))
    # See Decoder.init_weights for both.
    init_std: float | None = flag(
        None,
        "std of new dense weights",
        shown="1 / sqrt(n_embd), two digits; embformer 0.02",
        must="a positive number",
    )
    table_std: float = flag(
        0.02, "std of new table rows", must="0 or more", of=lambda ffn: ffn != "dense"
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.d_ff is None:
            self.d_ff = math.ceil(8 * self.n_embd / (3 * 64)) * 64
        if self.tie_head is None:
            self.tie_head = self.embedding_only
        if self.init_std is None:  # docs/results.md measures both values
            root = float(f"{self.n_embd**-0.5:.2g}")  # 0.088 for 128: short enough to type
            self.init_std = 0.02 if self.embedding_only else root
        if self.rope_scaling is not None:
            fits = len(self.rope_scaling) == 4 and all(map(math.isfinite, self.rope_scaling))
            if not fits or min(self.rope_scaling) <= 0:
                raise UserError(f"rope_scaling {self.rope_scaling} is not four positive numbers")
        n_embd, n_head, n_kv_head = self.n_embd, self.n_head, self.n_kv_head
        if self.head_dim is None:
            if n_embd % (2 * n_head) != 0:  # positions rotate pairs of channels
                raise UserError(f"--n_embd {n_embd} must be a multiple of 2 * n_head, {2 * n_head}")
            self.head_dim = n_embd // n_head
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd: positions rotate pairs of channels")
        if n_head % n_kv_head != 0:
            raise UserError(f"--n_head {n_head} must be a multiple of --n_kv_head {n_kv_head}")
        if self.embedding_only and not self.tie_head:
            raise UserError("--no-tie_head: Embformer has no linear layers, such as a head")
        if self.embedding_only and self.head_dim * n_head != n_embd:
            raise UserError(f"head_dim {self.head_dim}: Embformer's heads share its channels")
        kinds = self.attention.split(",")
        self.attention_kinds = [kinds[layer % len(kinds)] for layer in range(self.n_layer)]

    @property
    def embedding_only(self) -> bool:
        """Every parameter sits in an embedding: no output projection, no learned norm scale."""
        return self.ffn == "embformer"

    @property
    def row_layers(self) -> list[int]:
        """The layers that --stem_layers selects: `third` (1, 4, 7, ...), `half` (1, 3, 5, ...),
        `all` (but the first, as in the code of STEM's authors), or numbers. UserError: the text is
        none of these, or selects no layer or one that does not exist."""
        steps = {"third": 3, "half": 2, "all": 1}
        if self.stem_layers in steps:
            layers = list(range(1, self.n_layer, steps[self.stem_layers]))
        else:
            try:
                layers = sorted({int(number) for number in self.stem_layers.split(",")})
            except ValueError:
                layers = []
        if not layers or layers[0] < 0 or layers[-1] >= self.n_layer:
            allowed = f"third, half, all or numbers of layers from 0 to {self.n_layer - 1}"
            wrong = f"--stem_layers {self.stem_layers} must be {allowed}"
            raise UserError(f"{wrong} (words leave out the first layer: --n_layer 2 at least)")
        return layers


# --- attention ---


def rotary(n: int, config: ModelConfig, like: Tensor) -> Tensor:
    """Cosines and sines for `rotate` at positions 0 to n - 1, [2, n, head_dim] (RoPE: Su et al.,
    2021, section 3.2). The channels of a pair lie head_dim / 2 apart: both halves have the same
    cosines, and the sines of the first half have a minus. They have the device of `like` and its
    dtype, but 32 bits at least: 16 have no position 257."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    pair = torch.arange(0, config.head_dim, 2, dtype=dtype, device=like.device)
    frequency = config.rope_base ** -(pair / config.head_dim)  # radians per token, [head_dim / 2]
    if config.rope_scaling is not None:
        # Llama 3.1 keeps frequencies that make at least `high` turns within its original context,
        # divides those below `low` turns by `factor`, and interpolates in between.
        factor, low, high, context = config.rope_scaling
        turns = context * frequency / (2 * torch.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / factor)
    position = torch.arange(n, device=like.device)[:, None]
    angle = position * frequency  # [n, head_dim / 2]
    cos = angle.cos()
    sin = angle.sin()
    cos = torch.cat((cos, cos), dim=-1)
    sin = torch.cat((-sin, sin), dim=-1)
    return torch.stack((cos, sin))


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Turn channels (a, b) = (i, i + head_dim / 2) of x [B, heads, T, head_dim] by an angle that
    depends on the position: (a cos - b sin, b cos + a sin). `cos_sin` [2, S, head_dim], from
    `rotary`, is that of the S tokens so far, of which x has the last T."""
    cos, sin = cos_sin[:, -x.shape[2] :]
    dtype = torch.promote_types(x.dtype, torch.float32)  # 16 bits would round angles away
    wide = x.to(dtype, memory_format=torch.contiguous_format)
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return (wide * cos).add_(swapped.mul_(sin)).to(x.dtype)


def rotate_both(q: Tensor, k: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotate` queries [B, n_head, T, head_dim] and keys [B, n_kv_head, S, head_dim]. If they
    belong to the same tokens, they go as one tensor: half the kernels."""
    if q.shape[2] < k.shape[2]:  # earlier keys are made again, see `Decoder.rows_of_text`
        return rotate(q, cos_sin), rotate(k, cos_sin)
    both = rotate(torch.cat((q, k), dim=1), cos_sin)
    return both.split((q.shape[1], k.shape[1]), dim=1)


def additive(seen: Tensor, x: Tensor) -> Tensor:
    """Turn a boolean mask into one of 0 and -inf, in the dtype of x. SDPA would convert a boolean
    mask by itself, but anew in every layer, and would keep each for the backward pass."""
    return torch.zeros_like(seen, dtype=x.dtype).masked_fill_(~seen, -torch.inf)


class LinearQKV(nn.Module):
    """Queries, keys and values by one linear layer."""

    row_width = 0

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = (config.n_head, config.n_kv_head, config.n_kv_head)
        self.qkv = nn.Linear(config.n_embd, sum(self.heads) * config.head_dim, bias=False)

    def forward(self, x: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, n_embd] -> q [B, T, n_head, head_dim], k and v [B, T, n_kv_head, head_dim]."""
        heads = self.qkv(x).unflatten(-1, (sum(self.heads), -1))  # [B, T, heads, head_dim]
        return heads.split(self.heads, dim=-2)


class LayerCache:
    """Keys and values of the tokens so far, in one layer."""

    def __init__(self, config: ModelConfig, batch: int, room: int, like: Tensor) -> None:
        """Of the dtype and on the device of `like`, for `batch` times `room` tokens."""
        self.k = like.new_empty(batch, config.n_kv_head, room, config.head_dim)
        self.v = torch.empty_like(self.k)

    def update(self, start: int | Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v [B, n_kv_head, T, head_dim] of new tokens from position `start` on. Returns
        those of all tokens so far, [B, n_kv_head, S, head_dim].

        In a captured step (training/captured.py), sizes are fixed and positions are tensors: there
        is one new token, `start` is [1], and what is returned is the whole cache, S = room. The
        mask of that step hides what is not yet filled."""
        if isinstance(start, Tensor):
            return self.k.index_copy_(2, start, k), self.v.index_copy_(2, start, v)
        end = start + k.shape[2]
        self.k[:, :, start:end] = k
        self.v[:, :, start:end] = v
        return self.k[:, :, :end], self.v[:, :, :end]


class Cache:
    """What decoding keeps of the tokens so far. `Decoder.make_cache` makes it."""

    def __init__(self, layers: list[LayerCache | None], cos_sin: Tensor) -> None:
        """layers: the cache of each layer; None: its keys and values are not kept, as they can be
        made of rows again (Embformer), or as no token will follow. cos_sin: from `rotary`, of all
        tokens it has room for, [2, room, head_dim]."""
        self.layers = layers
        self.cos_sin = cos_sin
        self.room = cos_sin.shape[1]
        # Tokens so far. Set it to 0 to start over. A lower number takes the last tokens back: an
        # error unless attention is full, as other kinds may have overwritten what they kept, or
        # nothing is kept but ids.
        self.length = 0
        self.ids: Tensor | None = None  # [B, length], table_ids of the text so far

    def continue_text(self, ids: Tensor) -> Tensor:
        """Add table_ids [B, T] of new tokens. Returns those of the text so far, [B, S]."""
        text = ids.clone()  # the caller may write the next token into the same tensor
        if self.length > 0:
            n = self.ids.shape[1]
            assert self.length <= n, f"length {self.length}: the cache has {n} tokens"
            can_go_back = all(type(kept) in (LayerCache, type(None)) for kept in self.layers)
            assert can_go_back or self.length == n, (
                f"{n - self.length} tokens were taken back from a cache that has overwritten what "
                "it kept of earlier ones: begin again with length 0"
            )
            text = torch.cat((self.ids[:, : self.length], ids), dim=1)
        self.ids = text
        return text


class Attention(nn.Module):
    """Attention to all tokens so far. Other kinds are subclasses in relatives/, built as (config,
    qkv, argument), the argument being 64 of --attention window:64. `make_mask` is called once per
    forward pass for all layers of a kind, `make_cache` once per layer."""

    def __init__(self, config: ModelConfig, qkv: nn.Module, argument: str = "") -> None:
        """qkv: makes queries, keys and values of (x, rows), as `LinearQKV`."""
        super().__init__()
        if argument:
            raise UserError(f"--attention {config.attention}: leave out :{argument}")
        self.config = config
        self.span = config.block_size  # what attention costs, as twice the mean number of keys
        self.qkv = qkv
        self.out = nn.Identity()
        if not config.embedding_only:
            self.out = nn.Linear(config.n_head * config.head_dim, config.n_embd, bias=False)

    def make_cache(self, batch: int, room: int, like: Tensor) -> LayerCache:
        """What this layer keeps while decoding."""
        return LayerCache(self.config, batch, room, like)

    def n_past(self, start: int) -> int:
        """How many of `start` earlier tokens the next token can see: always the last ones."""
        return start

    def make_mask(self, x: Tensor, start: int, documents: Tensor | None) -> Tensor | None:
        """The mask for `attend` of tokens x [B, T, n_embd] after `start` tokens in the cache.
        documents: the number of each token's document, [B, T]. Attention does not leave it."""
        n = x.shape[1]
        if documents is not None:
            same = documents[:, None, :, None] == documents[:, None, None, :]
            return additive(same.tril_(), x)  # [B, 1, T, T]
        if start == 0 or n == 1:
            return None
        seen = torch.ones(n, start + n, dtype=torch.bool, device=x.device)
        return additive(seen.tril_(start), x)  # [T, start + T]

    def forward(
        self,
        x: Tensor,
        rows: Tensor | None,
        cos_sin: Tensor,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
        start: int | Tensor = 0,
    ) -> Tensor:
        """x [B, T, n_embd] -> [B, T, n_embd].

        Args:
            rows: what `qkv` reads, [B, T, row_width]; where only token ids are kept (Embformer's
                cache "ids"), [B, S, row_width] of all tokens so far.
            cos_sin: from `rotary`, of the tokens so far, [2, S, head_dim].
            mask: from `make_mask`.
            cache: of this layer; x continues the `start` tokens in it.
        """
        q, k, v = self.qkv(x, rows)  # [B, T, n_head, head_dim], [B, T, n_kv_head, head_dim] twice
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # [B, heads, T, head_dim]
        q, k = rotate_both(q, k, cos_sin)
        if cache is not None:
            k, v = cache.update(start, k, v)  # [B, n_kv_head, S, head_dim]
        y = self.attend(q, k, v, mask)  # [B, T, n_head, head_dim]
        return self.out(y.flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Weigh v by softmax(q k^T / sqrt(head_dim) + mask).

        Args:
            q: [B, n_head, T, head_dim].
            k, v: [B, n_kv_head, S, head_dim].
            mask: what is added to the logits, [.., T, S]; -inf hides a key. None hides the keys of
                later tokens, where T is S, and nothing where T is 1.

        Returns:
            [B, T, n_head, head_dim].
        """
        groups = q.shape[1] // k.shape[1]
        if groups > 1:  # not enable_gqa: on a GPU, most kernels do not have it
            k = k.repeat_interleave(groups, dim=1)
            v = v.repeat_interleave(groups, dim=1)
        if q.device.type == "mps":  # until PyTorch 2.12, its kernels misread strided batches
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        causal = False
        # By an `if`: the value of the condition itself would be a symbol under torch.compile.
        if mask is None and q.shape[2] > 1:
            causal = True
        options = {
            "attn_mask": mask,
            "dropout_p": self.config.dropout if self.training else 0.0,
            "is_causal": causal,
        }
        if torch.is_autocast_enabled("cpu"):  # in 16 bits, SDPA's backward can take 3 times as long
            with torch.autocast("cpu", enabled=False):
                q, k, v = q.float(), k.float(), v.float()
                y = F.scaled_dot_product_attention(q, k, v, **options)
        else:
            y = F.scaled_dot_product_attention(q, k, v, **options)
        return y.transpose(1, 2)


# --- layers ---


class SwiGLU(nn.Module):
    """The dense FFN, `W_d (SiLU(W_g x) * (W_u x))` (Shazeer, 2020)."""

    row_width = 0

    def __init__(self, n_embd: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(n_embd, d_ff, bias=False)
        self.up = nn.Linear(n_embd, d_ff, bias=False)
        self.down = nn.Linear(d_ff, n_embd, bias=False)

    def hidden(self, x: Tensor) -> Tensor:
        """x [B, T, n_embd] -> [B, T, d_ff]."""
        return F.silu(self.gate(x)) * self.up(x)

    def forward(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """x [B, T, n_embd] -> [B, T, n_embd]. It reads no rows."""
        return self.down(self.hidden(x))


def make_norm(config: ModelConfig) -> nn.RMSNorm:
    scale = not config.embedding_only
    return nn.RMSNorm(config.n_embd, config.norm_eps, elementwise_affine=scale)


class Block(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + ffn(norm(x)).

    `qkv` and `ffn` are called as (x, rows), x [B, T, n_embd], rows [B, T, row_width], of one dtype;
    their `row_width` is how many numbers of the token's row they read. With 0, rows are None or
    have width 0. All layers with a table must read the same total width."""

    def __init__(self, config: ModelConfig, layer: int, qkv: nn.Module, ffn: nn.Module) -> None:
        """UserError: --attention names an unknown kind."""
        super().__init__()
        self.attn_norm = make_norm(config)
        name, _, argument = config.attention_kinds[layer].partition(":")
        kind = find("Attention", name, {"full": Attention}, f"--attention {config.attention}")
        self.attn = kind(config, qkv, argument)
        self.ffn_norm = make_norm(config)
        self.ffn = ffn
        self.row_split = [qkv.row_width, ffn.row_width]
        self.row_width = sum(self.row_split)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rows: Tensor | None,
        cos_sin: Tensor,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
        start: int | Tensor = 0,
    ) -> Tensor:
        """x [B, T, n_embd], rows [B, T, row_width] (None without a table) -> [B, T, n_embd]. All
        others are those of `Attention.forward`, which may get rows of earlier tokens, too."""
        attn_rows, ffn_rows = None, None
        if rows is not None:
            attn_rows, ffn_rows = rows.split(self.row_split, dim=-1)
            if rows.shape[1] > x.shape[1]:  # those of earlier tokens are for attention
                ffn_rows = ffn_rows[:, -x.shape[1] :]
        y = self.attn(self.attn_norm(x), attn_rows, cos_sin, mask, cache, start)
        x = x + self.dropout(y)
        y = self.ffn(self.ffn_norm(x), ffn_rows)
        assert y.shape == x.shape, f"{type(self.ffn).__name__} gives {[*y.shape]}, not {[*x.shape]}"
        return x + self.dropout(y)


# --- the decoder ---

# How many logits `Decoder.loss` computes at a time; on a CPU, so few that they stay in its caches.
CHUNK, CHUNK_ON_GPU = 1 << 22, 1 << 26
# How many logits are kept for the backward pass at most, 256 MiB. If there are more, it computes
# them again.
KEPT = 1 << 26


class Decoder(nn.Module):
    """The whole model: embedding, blocks, norm, head, and the tables the blocks read."""

    config_class: type[ModelConfig] = ModelConfig
    # A decoding step as a CUDA graph, called as `ordinary_step` is, after the model; None: there is
    # none (training/captured.py).
    captured: Callable[..., Tensor] | None = None

    def __init__(self, config: ModelConfig, tables: Callable[..., Tables] = ResidentTables) -> None:
        """tables: called as (n_table, n_row, width), makes the tables. UserError: the config is of
        another kind of decoder, or selects layers or an attention that do not exist."""
        super().__init__()
        self.check_kind(config)
        self.config = config
        if config.tie_head:
            self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        else:  # an embedding that is only looked up is a token table, too
            self.wte = ResidentTables(1, config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(self.make_block(layer) for layer in range(config.n_layer))
        self.norm = make_norm(config)
        self.head = None
        if not config.tie_head:
            self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        widths = [block.row_width for block in self.blocks if block.row_width]
        assert len(set(widths)) < 2, f"layers with a table must read rows of one width: {widths}"
        self.tables = self.make_tables(tables, widths)
        if self.tables.fresh:  # last: what is made later begins as PyTorch's modules do
            self.init_weights()

    def check_kind(self, config: ModelConfig) -> None:
        """UserError: class and config are of two kinds, as in Decoder(ModelConfig(ffn="moe"))."""
        relative = type(self).__module__.partition("relatives.")[2]  # its file, "moe", else ""
        is_kind = relative in ("", config.ffn) and isinstance(self, decoder_class(config.ffn))
        if not (is_kind and isinstance(config, self.config_class)):
            kind = relative or config.ffn
            made = f"Decoder = decoder_class({kind!r}); Decoder(Decoder.config_class(ffn={kind!r}))"
            given = f"{type(config).__name__}(ffn={config.ffn!r})"
            raise UserError(f"{given} is not of this decoder: {made}")
        assert hasattr(config, "attention_kinds"), (
            f"{type(config).__name__}.__post_init__ does not call super().__post_init__()"
        )

    def make_block(self, layer: int) -> Block:
        """Layer number `layer`."""
        config = self.config
        if config.ffn == "embformer":
            qkv = RowQKV(config.n_kv_head, config.head_dim, config.norm_eps)
            ffn = EmbformerFFN(config.n_head, config.head_dim, config.embformer_act)
            return Block(config, layer, qkv, ffn)
        if config.ffn != "dense" and layer in config.row_layers:
            ffn = self.row_ffn(config)
        else:
            ffn = SwiGLU(config.n_embd, config.d_ff)
        return Block(config, layer, LinearQKV(config), ffn)

    def row_ffn(self, config: ModelConfig) -> nn.Module:
        """The FFN of a layer that has a table. A relative may name a class in its place."""
        return StemFFN(config.n_embd, config.d_ff)

    def make_tables(self, tables: Callable[..., Tables], widths: list[int]) -> Tables:
        """The tables of the layers that have one; `widths` are those of their rows."""
        return tables(len(widths), self.config.vocab_size, widths[0] if widths else 0)

    @torch.no_grad()
    def init_weights(self) -> None:
        """How each weight begins (called again, it leaves norms as they are):

            norms                                              1
            rows of tables                                     Normal(0, table_std)
            attn.out, down: write to the residual stream       Normal(0, init_std / sqrt(2 n_layer))
            all others, the embedding included                 Normal(0, init_std)

        The third is GPT-2's (Radford et al., 2019, section 2.3). Rows start small because facts
        settle in small rows (docs/results.md)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2 or name.startswith("tables."):
                continue
            std = self.config.init_std
            if name.endswith(("attn.out.weight", ".down.weight")):
                std /= (2 * self.config.n_layer) ** 0.5
            nn.init.normal_(parameter, std=std)
        self.tables.init_rows(self.config.table_std)

    @property
    def all_tables(self) -> dict[str, Tables]:
        """By name: `tables`, an embedding `wte` that is not the head, and those that a decoder of
        your own adds."""
        return {name: child for name, child in self.named_children() if isinstance(child, Tables)}

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for tables in self.all_tables.values():
            tables.zero_grad()  # they have gradients that are no parameter's

    # --- the forward pass ---

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        *,
        last_only: bool = False,
        table_ids: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns (logits, None): [B, T, V] or, if `last_only`, of the last token alone, [B, 1, V].
        With targets [B, T], the tokens that follow ids (below 0: nothing to predict), it returns
        (None, loss), the mean cross-entropy in nats. For all else see `hidden`."""
        check_ids(ids, targets=targets)
        x = self.hidden(ids, table_ids=table_ids, documents=documents, cache=cache)
        if targets is not None:
            # PyTorch marks what is not predicted by -100, `loss` by -1: both will do.
            targets = send(targets.long(), x.device).clamp(min=-1)
            return None, self.loss(x.flatten(0, 1), targets.flatten())
        if last_only:
            x = x[:, -1:]
        return self.unembed(x), None

    def hidden(
        self,
        ids: Tensor,
        *,
        table_ids: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """What the head reads, [B, T, n_embd].

        Args:
            ids: [B, T], in training on the CPU (see `Tables.lookup`).
            table_ids: [B, T], under which tables are looked up instead: knowledge editing.
            documents: [B, T], the number of each token's document, which attention does not
                leave. Rotary positions are relative, so they need not begin again.
            cache: what is kept of earlier tokens, which `ids` continue. They are added to it. It
                does not know documents.
        """
        check_ids(ids, table_ids=table_ids, documents=documents)
        ids = ids.long()  # addresses of n-grams need 64 bits
        n = ids.shape[1]
        assert documents is None or cache is None, "documents are known to no cache"
        room = self.config.block_size if cache is None else cache.room
        if cache is None:  # an empty one, so that below there is only one case
            cache = Cache([None] * len(self.blocks), rotary(n, self.config, self.like))
        start = cache.length
        assert start + n <= room, f"{start + n} tokens: there is room for {room}"

        # 1) What layers read beside x: rows, positions, masks.
        row_ids = ids if table_ids is None else table_ids.long()
        layer_rows = self.rows_of_text(row_ids, documents, cache)
        x = F.dropout(self.embed(ids), self.config.dropout, self.training)
        if documents is not None:
            documents = send(documents, x.device)
        masks = {}
        for kind, block in zip(self.config.attention_kinds, self.blocks, strict=True):
            if kind not in masks:
                masks[kind] = block.attn.make_mask(x, start, documents)

        # 2) The layers. They put keys and values into their caches, if they have any.
        cos_sin = cache.cos_sin[:, : start + n]
        x = self.through_layers(x, layer_rows, cos_sin, masks, cache.layers, start)
        cache.length = start + n
        # A head with gradients (also one in a wrapper such as LoRA's) means training: warn if rows
        # get none.
        head = self.wte if self.head is None else self.head
        if torch.is_grad_enabled() and any(p.requires_grad for p in head.parameters()):
            for tables in self.all_tables.values():
                tables.check_mode()
        return x

    def through_layers(
        self,
        x: Tensor,
        layer_rows: Iterator[Tensor],
        cos_sin: Tensor,
        masks: dict[str, Tensor | None],
        caches: list[LayerCache | None],
        start: int | Tensor,
    ) -> Tensor:
        """x [B, T, n_embd] after all layers and the last norm. layer_rows: of each layer that has a
        table; masks: by kind of attention; caches: of each layer; all else: `Attention.forward`."""
        for layer, block in enumerate(self.blocks):
            rows = None
            if block.row_width:
                rows = next(layer_rows)  # [B, T, row_width]
                if rows.is_floating_point():
                    rows = rows.to(x.dtype)
            mask = masks[self.config.attention_kinds[layer]]
            x = block(x, rows, cos_sin, mask, caches[layer], start)
        return self.norm(x)

    def rows_of_text(self, ids: Tensor, documents: Tensor | None, cache: Cache) -> Iterator[Tensor]:
        """Continue the text in the cache by tokens ids [B, T], and look up their rows: for each
        layer with a table in turn, [B, T, row_width].

        With a cache of kind "ids", earlier keys and values are made again. So the rows of all S
        tokens that a layer sees are returned: [B, S, row_width]."""
        n = ids.shape[1]
        start = cache.length
        text = cache.continue_text(ids)  # [B, S]
        # There are no earlier tokens, or the cache has their keys and values.
        if start == 0 or cache.layers[0] is not None:
            return self.layer_rows(self.addresses(text, n, documents))
        n_seen = [block.attn.n_past(start) + n for block in self.blocks]
        layer_rows = self.layer_rows(self.addresses(text, max(n_seen), documents))
        return (rows[:, -seen:] for rows, seen in zip(layer_rows, n_seen, strict=True))

    def addresses(self, ids: Tensor, n: int, documents: Tensor | None = None) -> Tensor:
        """Where the rows of the last n tokens of a text, ids [B, S], are in the tables: [B, n].
        Here a token's id is the address of its row. A relative may derive it from earlier tokens,
        too, which is why it gets the whole text. documents: see `hidden`."""
        return ids[:, -n:]

    def layer_rows(self, addresses: Tensor) -> Iterator[Tensor]:
        """The rows [B, T, row_width] at addresses [B, T] for each layer with a table in turn."""
        return self.tables.lookup(addresses)

    def embed(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, n_embd]."""
        if self.head is None:
            return self.wte(send(ids, self.device))
        return self.wte(ids).to(self.like.dtype)

    def unembed(self, x: Tensor) -> Tensor:
        """Logits: [..., n_embd] -> [..., V]."""
        if self.head is None:
            return F.linear(x, self.wte.weight)
        return self.head(x)

    @property
    def head_weight(self) -> Tensor:  # [V, n_embd]
        return self.wte.weight if self.head is None else self.head.weight

    @property
    def like(self) -> Tensor:
        """The embedding [V, n_embd], for its dtype and device, the backbone's: a head may be
        quantized, or inside a wrapper such as LoRA's. (`weight[0]`: the only table of `wte`.)"""
        return self.wte.weight if self.head is None else self.wte.weight[0]

    @property
    def device(self) -> torch.device:
        return self.like.device

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of x [N, n_embd] in nats []. targets [N], -1: nothing to predict.
        NaN if all are -1."""
        chunk = CHUNK_ON_GPU if x.is_cuda else CHUNK
        size = max(1, chunk // self.config.vocab_size)  # tokens
        kept = len(x) * self.config.vocab_size <= KEPT
        total = 0.0
        for part in zip(x.split(size), targets.split(size), strict=True):
            if kept:
                total = total + self.summed_loss(*part)
            else:
                total = total + checkpoint(self.summed_loss, *part, use_reentrant=False)
        return total / (targets >= 0).sum()

    def summed_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.unembed(x)  # [N, V]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")

    # --- decoding ---

    def make_cache(self, batch: int, room: int | None = None, kind: str = "kv") -> Cache:
        """A cache for `batch` sequences of up to `room` tokens (block_size). It keeps keys and
        values; kind "ids", for Embformer: nothing but token ids, as keys and values are rows."""
        room = min(room or self.config.block_size, self.config.block_size)
        assert kind in ("kv", "ids"), f"cache={kind!r} is neither 'kv' nor 'ids'"
        if kind == "ids":
            # Values of a relative may depend on x, too, of which nothing is kept.
            assert self.config.ffn == "embformer", "keys and values are rows in Embformer alone"
            layers = [None for _ in self.blocks]
        else:
            layers = [block.attn.make_cache(batch, room, self.like) for block in self.blocks]
        return Cache(layers, rotary(room, self.config, self.like))

    def step(self, ids: Tensor, table_ids: Tensor, cache: Cache) -> Tensor:
        """The logits [B, V] of the token after ids [B, T], which continue the text in the cache."""
        if self.captured is not None:
            return self.captured(self, ids, table_ids, cache)
        return self.ordinary_step(ids, table_ids, cache)

    def ordinary_step(self, ids: Tensor, table_ids: Tensor, cache: Cache) -> Tensor:
        """As `step`, by a forward pass that is not captured as a CUDA graph."""
        return self(ids, table_ids=table_ids, cache=cache, last_only=True)[0][:, -1]

    @torch.inference_mode()
    def stream(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        stop: int | None = None,
        seed: int | None = None,
        table_ids: Tensor | None = None,
        cache: str = "kv",
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> Iterator[Tensor]:
        """Yield new tokens [B] on the CPU, one step at a time.

        Args:
            ids: prompts [B, T], of one length: padding would be read as text. Of long ones, the
                last block_size tokens are read. When the context is full, its last half is kept.
            stop: a sequence repeats it once it emits it; generation ends when all have.
            seed: of the draws. None: PyTorch's global generator.
            table_ids: [B, T], under which the prompt's rows are looked up.
            cache: kind of `make_cache`.
            temperature, top_k, top_p: see `sample`.
        """
        check_ids(ids, table_ids=table_ids)
        assert ids.shape[1], "the prompt is empty: begin with the end-of-text token"
        block_size = self.config.block_size
        generator = None
        if seed is not None:
            generator = torch.Generator(self.device).manual_seed(seed)
        # Ids stay on the CPU, where tables in RAM look them up and the caller reads them. So the
        # host waits for the GPU once per token.
        ids = ids.cpu()[:, -block_size:]
        table_ids = ids if table_ids is None else table_ids.cpu()[:, -block_size:]
        kept = self.make_cache(len(ids), ids.shape[1] + max_new_tokens, cache)
        done = torch.zeros(len(ids), dtype=torch.bool)
        n_unread = ids.shape[1]  # tokens that the model has not read: at first, the whole prompt
        for _ in range(max_new_tokens):
            if kept.length == block_size:  # full: read the last half again
                kept.length = 0
                n_unread = max(1, block_size // 2)
            logits = self.step(ids[:, -n_unread:], table_ids[:, -n_unread:], kept)
            token = sample(logits, temperature, top_k, top_p, generator).cpu()  # [B]
            if stop is not None:
                token = token.masked_fill(done, stop)
                done |= token == stop
            yield token
            if done.all():
                return
            # Only what may be read again: to copy the whole text takes time as its length squared.
            ids = torch.cat((ids, token[:, None]), dim=1)[:, -block_size:]
            table_ids = torch.cat((table_ids, token[:, None]), dim=1)[:, -block_size:]
            n_unread = 1

    def generate(self, ids: Tensor, max_new_tokens: int, **options) -> Tensor:
        """The prompt followed by the tokens of `stream`, to which options go: [B, T + new]."""
        tokens = [token[:, None] for token in self.stream(ids, max_new_tokens, **options)]
        return torch.cat([ids, *(send(token, ids.device) for token in tokens)], dim=1)


def check_ids(ids: Tensor, **others: Tensor | None) -> None:
    """AssertionError: ids, or tensors with a number for each of them, are not integers, or not all
    of one shape [B, T]. Without this check, fractions would be cut off, and another shape would be
    broadcast or be aligned with the wrong tokens."""
    assert ids.dim() == 2, f"ids {[*ids.shape]} are not [B, T]"
    for name, tensor in {"ids": ids, **others}.items():
        if tensor is not None:
            assert not tensor.is_floating_point(), f"{name} are {tensor.dtype}, no integers"
            shapes = f"{name} {[*tensor.shape]} are not of the shape of ids, {[*ids.shape]}"
            assert tensor.shape == ids.shape, shapes


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw a token from logits [B, V] -> [B]: the most probable one at temperature 0, else from the
    top_k most probable ones (None or 0: all), and of these from the most probable that together
    reach top_p. RuntimeError: a logit or a probability is NaN."""
    assert temperature >= 0, f"temperature={temperature} is below 0"
    assert top_p is None or 0 < top_p <= 1, f"top_p={top_p} is not above 0 and at most 1"
    if temperature == 0:
        best, token = logits.max(-1)
        if best.isnan().any():  # it would count as the largest
            raise RuntimeError("a logit is nan")
        return token
    # Subtract the largest logit, so that low temperatures do not overflow.
    logits = (logits.float() - logits.amax(-1, keepdim=True)) / temperature
    if top_k and top_k < logits.shape[-1]:
        best, token = logits.topk(top_k)  # [B, k]
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, token, best)
    probability = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, token = probability.sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # what the more probable tokens sum up to
        kept = ordered.masked_fill(before >= top_p, 0.0)
        probability.scatter_(-1, token, kept)
    return torch.multinomial(probability, 1, generator=generator)[:, 0]


# --- kinds of layers and attention in relatives/ ---

RELATIVES = Path(__file__).parent / "relatives"


def relatives(class_name: str) -> list[str]:
    """The files in relatives/ that have a class of this name, `Decoder` or `Attention`."""
    line = f"\nclass {class_name}(".encode()
    # As bytes: a file that is not UTF-8 is listed, too. If it is asked for, Python names it.
    return sorted(path.stem for path in RELATIVES.glob("*.py") if line in path.read_bytes())


def find(class_name: str, name: str, built_in: dict[str, type], given: str) -> type:
    """The class `Decoder` or `Attention` in relatives/NAME.py or, if its name is built in, that of
    `built_in`. `given` is the flag with its value that asks for it. UserError: there is no such
    class, or a file has the name of one that is built in."""
    if name in built_in:
        if (RELATIVES / f"{name}.py").exists():
            raise UserError(f"relatives/{name}.py: {name} is built in: give the file another name")
        return built_in[name]
    known = relatives(class_name)
    if name not in known:
        kinds = f"{', '.join(built_in)}, nor of relatives/: {', '.join(known)}"
        if (RELATIVES / f"{name}.py").exists():
            kinds += f"; relatives/{name}.py has no line that begins with class {class_name}("
        raise UserError(f"{given} is not one of {kinds}")
    return getattr(importlib.import_module(f"relatives.{name}"), class_name)


def decoder_class(ffn: str) -> type["Decoder"]:
    """The decoder of a kind of --ffn. Its `config_class` is its kind of ModelConfig."""
    kind = find("Decoder", ffn, dict.fromkeys(BUILT_IN, Decoder), f"--ffn {ffn}")
    if "__dataclass_fields__" not in vars(kind.config_class):  # else its fields are the parent's
        config = kind.config_class.__name__
        raise UserError(f"relatives/{ffn}.py: class {config} needs @dataclass above it")
    own = [name for name in vars(kind) if name == "__init__" or name[:2] != "__"]
    if own and kind.__bases__ == (Decoder,) and not any(hasattr(Decoder, name) for name in own):
        raise UserError(  # as with a row_fnn, in whose place StemFFN would be trained
            f"relatives/{ffn}.py: {', '.join(own)} of its Decoder replace nothing of model.Decoder"
        )
    return kind
