"""From a dense model to STEM: in some layers, a table row per token replaces `W_u x` (stem.py).

    dense   y = W_d (g * u)          g = SiLU(W_g x),  u = W_u x
    STEM    y = W_d (g * U_l[t])     t: the token id at this position
    U_l[t] = E[g^2 u | t] / E[g^2 | t]

This is the least-squares fit to what `W_d` reads, over all places of the training text where t
stands. Layers are converted from the bottom up, each with the statistics of a model whose lower
layers are converted. All other weights are copied.

The text goes through the model layer by layer, so that each layer runs once, not once for every
layer above it: between two layers, the residual stream of all tokens is in a file.
"""

import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from common import UserError, writing
from model import Block, Decoder, rotary
from tables.tables import send
from text import tokenizer
from training.batches import Data, check_tokenizer
from training.checkpoints import load_model

SEED = 1337  # of random rows and of the order of the text


# --- a text between two layers ---


class Stream:
    """The residual stream of a text: what comes out of a layer and goes into the next one, in
    float32, 4 * n_embd bytes a token."""

    def __init__(self, model: Decoder, ids: Tensor, size: int, bar: tqdm) -> None:
        """ids: windows [N, T], of which `size` go through a layer at a time. UserError: there is no
        room for the file."""
        self.model = model
        self.bar = bar
        self.n_batch = -(-len(ids) // size)
        kept = mapped((*ids.shape, model.config.n_embd))
        self.batches = list(zip(ids.split(size), kept.split(size), strict=True))
        for batch, x in self.batches:
            x.copy_(model.embed(batch))

    def attend(self, block: Block) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Add the attention of a layer without rows. Yields for each batch its ids [B, T], what the
        FFN reads [B, T, n_embd], and the stream, to which the caller adds what the FFN gives."""
        for ids, kept in self.batches:
            x = kept.to(self.model.device)
            x = run_attention(self.model, block, x)
            kept.copy_(x)
            self.bar.update()
            yield send(ids, x.device), block.ffn_norm(x), kept

    def feed(self, block: Block, table: Tensor) -> None:
        """Add what a STEM layer's FFN gives with the rows of a table [V, d_ff], after `attend`."""
        for ids, kept in self.batches:
            z = block.ffn_norm(kept.to(self.model.device))
            kept += block.ffn(z, F.embedding(send(ids, z.device), table)).to(kept.device)


def run_attention(model: Decoder, block: Block, x: Tensor) -> Tensor:
    """x [B, T, n_embd] with the attention of a block added."""
    angles = rotary(x.shape[1], model.config, x.device)
    return x + block.attn(block.attn_norm(x), None, angles, block.attn.make_mask(x, 0, None))


def mapped(shape: tuple[int, ...]) -> Tensor:
    """A float32 tensor in a file without a name, which is gone when the process ends, however it
    does. UserError: there is no room for it."""
    n_byte = 4 * math.prod(shape)
    place = f"{n_byte:,} bytes to {tempfile.gettempdir()} (TMPDIR names another folder)"
    with writing(place), tempfile.TemporaryFile() as file:
        file.truncate(n_byte)
        if hasattr(os, "posix_fallocate"):  # a disk that fills up later would kill the process
            os.posix_fallocate(file.fileno(), 0, n_byte)
        return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=shape))


def read_text(
    path: Path,
    model: Decoder,
    encoding: tiktoken.Encoding,
    data_dir: str,
    n_token: int,
    length: int | None,
) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets [N, T] of about `n_token` tokens of training text and, to judge rows by,
    a thirty-second as many of validation text. UserError: it is of another tokenizer than
    the checkpoint at `path`, or windows of this length (None: the model's) are too long.
    """
    longest = model.config.block_size
    length = length or longest
    if not 0 < length <= longest:
        raise UserError(f"--block_size {length}: {path} reads 1 to {longest} tokens")
    data = Data(data_dir, "text", length, SEED, total=n_token // length + 1)
    check_tokenizer(data.metas[0]["tokenizer"], data_dir, tokenizer.fingerprint(encoding), path)
    n_val = n_token // 32
    wanted = [(data.train, n_token)]
    wanted += [(val, n_val * w) for val, w in zip(data.val.values(), data.weights, strict=True)]
    texts = []
    for source, n in wanted:
        n_window = min(source.n_sequence, max(1, int(n) // length))
        # Spread over all of it.
        texts.append(source.sequences([i * source.n_sequence // n_window for i in range(n_window)]))
    train, *val = texts
    return [train, tuple(map(torch.cat, zip(*val, strict=True)))]


# --- rows ---


class Fit:
    """The rows r[t] that bring b * r[t] nearest to p, channel by channel, over all places where t
    stands: the sum of b * p over the sum of b^2."""

    def __init__(self, n_row: int, width: int, device: torch.device) -> None:
        self.bp = torch.zeros(n_row, width, device=device)
        self.bb = torch.zeros(n_row, width, device=device)

    def add(self, ids: Tensor, b: Tensor, p: Tensor) -> None:
        """ids [B, T], b and p [B, T, width]."""
        self.bp.index_add_(0, ids.flatten(), (b * p).float().flatten(0, 1))
        self.bb.index_add_(0, ids.flatten(), (b * b).float().flatten(0, 1))

    def rows(self) -> Tensor:
        """[n_row, width]; of tokens that do not occur, for which the fit says nothing, the mean
        over all tokens."""
        mean = self.bp.sum(0) / self.bb.sum(0).clamp_min(1e-20)
        return torch.where(self.bb > 0, self.bp / self.bb, mean)


class Explained:
    """1 - (squared error of a fit to p) / (variance of p), both summed over channels."""

    def __init__(self) -> None:
        self.n = self.error = self.squares = self.sums = 0.0

    def add(self, p: Tensor, fit: Tensor, weight: Tensor | float = 1.0) -> None:
        """p and its fit [n, width], weight [n] of the errors."""
        self.n += len(p)
        self.error += float(((p - fit).float().square().sum(1) * weight).sum())
        self.squares += float(p.float().square().sum())
        self.sums += p.double().sum(0)

    @property
    def share(self) -> float:
        return 1 - self.error / (self.squares - float(self.sums.square().sum()) / self.n)


def fill_tables(
    model: Decoder, up: dict[int, nn.Parameter], texts: list[Tensor], size: int
) -> None:
    """Fill the tables of a STEM model in place of up-projections [d_ff, n_embd] by layer, the
    lowest first, and print how much of the variance of `g * u` the rows of each layer explain.

    Args:
        texts: windows [N, T] to fill rows from, and others to judge them.
        size: windows in a forward pass.
    """
    config = model.config
    table = 0
    last = max(up)  # the layers above need not run
    with tqdm(desc="converting", unit="batch", disable=None) as bar:
        train, val = (Stream(model, ids, size, bar) for ids in texts)
        bar.total = (last + 1) * (train.n_batch + val.n_batch)
        for layer, block in enumerate(model.blocks[: last + 1]):
            ffn = block.ffn
            if layer not in up:
                for text in (train, val):
                    for _, z, kept in text.attend(block):
                        kept += ffn(z, None).to(kept.device)
                continue
            w_u = up[layer].to(model.device, torch.float32)
            fit = Fit(config.vocab_size, config.d_ff, model.device)
            for ids, z, _ in train.attend(block):
                g = F.silu(ffn.gate(z))  # [B, T, d_ff]
                fit.add(ids, g, g * F.linear(z, w_u))
            rows = fit.rows()
            explained = Explained()
            for ids, z, _ in val.attend(block):
                g = F.silu(ffn.gate(z))
                p = g * F.linear(z, w_u)
                explained.add(p.flatten(0, 1), (g * F.embedding(ids, rows)).flatten(0, 1))
            bar.write(f"layer {layer}: the token explains {explained.share:.1%} of the variance")
            model.tables.weight[table].copy_(rows)
            table += 1
            if layer < last:
                for text in (train, val):
                    text.feed(block, rows)


@torch.no_grad()
def dense_to_stem(
    path: Path,
    stem_layers: str,
    data_dir: str,
    n_token: int,
    *,
    block_size: int | None = None,
    batch_size: int = 8,
    device: torch.device,
) -> tuple[Decoder, tiktoken.Encoding, dict]:
    """The model of a checkpoint with tables in some layers, its tokenizer, and the settings of its
    training run.

    Args:
        n_token: of the training text of `data_dir`, to fill rows from; 0: rows stay random.
        block_size: length of the windows of text; None: the model's.
        batch_size: windows in a forward pass.

    Raises:
        UserError: the model is not dense, or as `read_text`.
    """
    torch.manual_seed(SEED)  # of random rows
    dense, encoding, checkpoint = load_model(path, torch.device("cpu"), verify=True)
    ffn = dense.config.ffn
    if ffn != "dense":
        raise UserError(f"{path} is of --ffn {ffn}: only dense can be converted")
    model = Decoder(replace(dense.config, ffn="stem", stem_layers=stem_layers))
    weights = {**model.state_dict(), **dense.state_dict()}  # the rows are new, all else is not
    up = {}  # the up-projections that the rows replace, by layer
    for layer, block in enumerate(model.blocks):
        if block.row_width:
            up[layer] = weights.pop(f"blocks.{layer}.ffn.up.weight")
    model.load_state_dict(weights)
    if n_token:
        texts = read_text(path, model, encoding, data_dir, n_token, block_size)
        fill_tables(model.to(device).eval(), up, [ids for ids, _ in texts], batch_size)
    return model, encoding, checkpoint["args"]
