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
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common import UserError, writing
from model import Block, Decoder, rotary
from tables.tables import ResidentTables, Tables, send
from text import tokenizer
from training.batches import Data, check_tokenizer
from training.checkpoints import load_model
from training.objectives import documents_of

SEED = 1337  # of random rows and of the order of the text


# --- a text between two layers ---


class Stream:
    """The residual stream of a text, windows [N, T]: what comes out of a layer and goes into the
    next one, in float32, 4 * n_embd bytes a token, in a file without a name, which is gone when the
    process ends, however it does. UserError: there is no room for it."""

    def __init__(self, model: Decoder, ids: Tensor, size: int, boundary: int | None = None) -> None:
        """size: windows that go through a layer at a time. boundary: as of `documents_of`."""
        self.model = model
        self.boundary = boundary
        shape = (*ids.shape, model.config.n_embd)
        n_byte = 4 * math.prod(shape)
        with (
            writing(f"{n_byte:,} bytes to {tempfile.gettempdir()} (TMPDIR names another folder)"),
            tempfile.TemporaryFile() as file,
        ):
            file.truncate(n_byte)
            if hasattr(os, "posix_fallocate"):  # a disk that fills up later would kill the process
                os.posix_fallocate(file.fileno(), 0, n_byte)
            kept = torch.from_numpy(np.memmap(file, np.float32, "r+", shape=shape))
        self.batches = list(zip(ids.split(size), kept.split(size), strict=True))
        for batch, x in self.batches:
            x.copy_(model.embed(batch))

    def attend(self, layer: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Add a layer's attention, which reads no rows. Yields for each batch its ids [B, T], what
        the FFN reads [B, T, n_embd], and the stream, to which the caller adds the FFN's output."""
        block, device = self.model.blocks[layer], self.model.device
        about = f"layer {layer} of {len(self.model.blocks)}"
        for ids, kept in tqdm(self.batches, about, leave=False, disable=None):
            ids = send(ids, device)
            x = kept.to(device)
            beside = cos_sin_and_mask(block, x, documents_of(ids, self.boundary))
            kept += block.attn(block.attn_norm(x), None, *beside).to("cpu")
            yield ids, block.ffn_norm(kept.to(device)), kept

    def pass_layer(self, layer: int) -> None:
        """Add all that a layer without a table adds."""
        for _, z, kept in self.attend(layer):
            kept += self.model.blocks[layer].ffn(z, None).to("cpu")


def check_stream(model: Decoder, ids: Tensor) -> None:
    """AssertionError: through a stream, a dense model computes something else of windows [N, T]
    than by itself, as it does after model.py was changed."""
    stream = Stream(model, ids, len(ids))
    for layer in range(len(model.blocks)):
        stream.pass_layer(layer)
    ((_, x),) = stream.batches  # [N, T, n_embd]
    expected = model.hidden(ids)
    off = (model.norm(x.to(model.device)) - expected).norm() / expected.norm()
    # Rounding is less.
    assert off < 0.03, f"change Stream as model.py was changed: it is off by {off:.0%}"


def cos_sin_and_mask(
    block: Block, x: Tensor, documents: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """What the attention of a block needs to know about windows x [B, T, n_embd]."""
    return rotary(x.shape[1], block.attn.config, x), block.attn.make_mask(x, 0, documents)


def read_text(
    path: Path,
    model: Decoder,
    encoding: tiktoken.Encoding,
    data_dir: str,
    n: int,
    length: int | None,
) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets [N, T] of about n tokens of training text and, to judge rows by, a 32nd
    as many of validation text, of a mixture that of its first folder. UserError: it is of another
    tokenizer than the checkpoint at `path`, or windows of this length (None: the model's) are too
    long."""
    longest = model.config.block_size
    length = length or longest
    if not 0 < length <= longest:
        raise UserError(f"--block_size {length}: {path} reads 1 to {longest} tokens")
    data = Data(data_dir, "text", length, SEED, total=n // length + 1)
    folder = next(iter(data.val))
    check_tokenizer(data.metas[0]["tokenizer"], folder, tokenizer.fingerprint(encoding), path)
    texts = []
    for source, part in ((data.train, n), (next(iter(data.val.values())), n // 32)):
        texts.append(source.sequences(source.spread(part)))
    return texts


# --- rows ---


class Fit:
    """The rows r[t] that bring b * r[t] nearest to p, channel by channel, over all places where t
    stands: the sum of b * p over the sum of b^2."""

    def __init__(self, n_row: int, width: int, device: torch.device) -> None:
        self.bp = torch.zeros(n_row, width, device=device)
        self.bb = torch.zeros(n_row, width, device=device)

    def add(self, ids: Tensor, b: Tensor, p: Tensor) -> None:
        """ids [B, T], b and p [B, T, width]."""
        for sums, values in ((self.bp, b * p), (self.bb, b * b)):
            sums.index_add_(0, ids.flatten(), values.float().flatten(0, 1))

    def rows(self) -> Tensor:
        """[n_row, width]; of tokens that do not occur, for which the fit says nothing, the fit to
        all tokens together."""
        of_all = self.bp.sum(0) / self.bb.sum(0).clamp_min(1e-20)
        return torch.where(self.bb > 0, self.bp / self.bb, of_all)


def fill_tables(model: Decoder, up: dict[int, Tensor], stream: Stream) -> None:
    """Fill the tables of a STEM model in place of up-projections [d_ff, n_embd] by layer, the
    lowest first, from a text before its first layer."""
    tables = iter(model.tables.weight)
    for layer in range(max(up) + 1):  # the layers above need not run
        block = model.blocks[layer]
        if layer not in up:
            stream.pass_layer(layer)
            continue
        table = next(tables)
        w_u = up[layer].to(model.device, torch.float32)
        fit = Fit(*table.shape, model.device)
        for part, z, _ in stream.attend(layer):
            g = F.silu(block.ffn.gate(z))  # [B, T, d_ff]
            fit.add(part, g, g * F.linear(z, w_u))
        table.copy_(fit.rows())
        for part, kept in stream.batches:
            z = block.ffn_norm(kept.to(model.device))
            rows = table[part.to(table.device)].to(model.device)
            kept += block.ffn(z, rows).to("cpu")


@torch.no_grad()
def dense_to_stem(
    path: Path,
    stem_layers: str,
    data_dir: str | None,
    n_token: int,
    *,
    block_size: int | None = None,
    batch_size: int = 8,
    device: torch.device,
    tables: Callable[..., Tables] = ResidentTables,
) -> tuple[Decoder, tiktoken.Encoding, dict]:
    """The model of a checkpoint with tables in some layers, its tokenizer, and what is known of its
    training: the settings `args`, and `data`, what it has read.

    Args:
        data_dir: None: what the model was trained on.
        n_token: of its training text, to fill rows from; 0: rows stay random.
        block_size: length of the windows of text; None: the model's.
        batch_size: windows in a forward pass.
        tables: makes the tables, see training/placement.make_tables.

    Raises:
        UserError: the model is not dense, or does not say what it has read, or as `read_text`.
    """
    torch.manual_seed(SEED)  # of random rows
    dense, encoding, checkpoint = load_model(path, torch.device("cpu"), verify=True)
    ffn = dense.config.ffn
    if ffn != "dense":
        raise UserError(f"{path} is of --ffn {ffn}: only dense can be converted")
    model = Decoder(replace(dense.config, ffn="stem", stem_layers=stem_layers), tables)
    weights = {**model.state_dict(), **dense.state_dict()}  # the rows are new, all else is not
    # The up-projections that the rows replace, by layer.
    up = {layer: weights.pop(f"blocks.{layer}.ffn.up.weight") for layer in model.config.row_layers}
    model.load_state_dict(weights)
    if n_token:
        data_dir = data_dir or checkpoint["args"].get("data_dir")
        if data_dir is None:  # others have trained it
            raise UserError(f"--data_dir: name a text, as {path} does not say what it has read")
        (ids, _), _ = read_text(path, model, encoding, data_dir, n_token, block_size)
        check_stream(dense.float().eval(), ids[:1])
        boundary = encoding.eot_token if checkpoint["args"].get("doc_mask") else None
        fill_tables(model, up, Stream(model.to(device).eval(), ids, batch_size, boundary))
    return model, encoding, {"args": checkpoint["args"], "data": checkpoint["data"]}
