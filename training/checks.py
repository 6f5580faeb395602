"""Checks of a model that somebody has changed: whether it learns, looks ahead, decodes as it was
trained, and is kept by ckpt.pt. A check that fails prints one line, and the run goes on."""

from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from model import Decoder
from training.checkpoints import load_model
from training.optimizer import Optimizer

MOST_NUMBERS = 1 << 28  # in the weights of a model that is loaded beside itself, tables included


@torch.no_grad()
def check_trained(model: Decoder, optimizer: Optimizer) -> None:
    """Whether each parameter of AdamW and each table got a gradient in the steps so far. Its
    moments, which begin at zero, tell. (Not only AdamW's second: Lion has none.)"""
    if optimizer.scaler.enabled and not optimizer.adamw.state:
        tqdm.write("note: no step was taken so far, as gradients overflow float16: take float32?")
        return
    names = []
    mine = set(optimizer.in_adamw)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or parameter not in mine:
            continue
        state = optimizer.adamw.state.get(parameter)  # None: it never had one
        if state is None or not state["exp_avg"].any():
            names.append(name)
    for name, rmsprop in optimizer.rmsprops.items():
        rmsprop.tables.flush()  # tables that are offloaded keep those of the last batch on the GPU
        some = rmsprop.last.nonzero()[:1000, 0]  # of the tokens that were read
        for table, moments in enumerate(rmsprop.state):
            if not moments[some].any():
                names.append(f"{name}.weight.{table}")
    if names:
        shown = ", ".join(sorted(names))
        tqdm.write(f"note: no gradient so far, so not trained: {shown}: does a layer use them?")


@torch.no_grad()
def check_logits(model: Decoder, ids: Tensor) -> None:
    """Whether token ids [1, T] have the same logits in the first half when the second half is
    another, and the texts before and after it in the batch are, and in its first tokens when these
    come one by one, as in decoding. Of long ones the beginning will do."""
    ids = ids[:, :64]
    n = ids.shape[1]
    half = (n + 1) // 2
    texts = ids.repeat(3, 1)
    others = (texts + 1) % model.config.vocab_size
    others[1, :half] = ids[0, :half]
    cache = model.make_cache(1, n)
    model.eval()
    before, after = (model(each)[0][1:2].float() for each in (texts, others))  # [1, T, V]
    decoded = [model(ids[:, :half], cache=cache, last_only=True)[0]]
    for place in range(half, min(n, half + 4)):
        decoded.append(model(ids[:, place : place + 1], cache=cache)[0])
    decoded = torch.cat(decoded, dim=1).float()  # [1, up to 5, V]
    expected = before[:, half - 1 :][:, : decoded.shape[1]]
    model.train()
    if (before - after)[:, :half].abs().max() > 1e-3 * before[:, :half].abs().max():
        tqdm.write(
            "note: what is predicted changes with tokens that follow or with other texts of the "
            "batch: a layer looks ahead or aside, so the loss means nothing (or it draws at random "
            "in eval() mode)"
        )
    # Other shapes are rounded otherwise, on a GPU to TF32: a router may choose another expert.
    elif (expected - decoded).norm() > 0.03 * expected.norm():
        tqdm.write(
            "note: sample.py predicts something else: it brings new tokens one at a time, and a "
            "layer finds none of the earlier ones in `x` or `ids`: only `addresses` and the cache "
            "of attention know them"
        )


@torch.no_grad()
def check_saved(path: Path, model: Decoder, ids: Tensor) -> None:
    """Whether the checkpoint at `path` gives the model's loss on token ids [1, T] when it is
    loaded."""
    if sum(weight.numel() for weight in model.state_dict().values()) > MOST_NUMBERS:
        return
    other, _, _ = load_model(path, model.device)
    model.eval()
    targets = ids.roll(-1, dims=1)  # of a single token, too
    losses = [float(each(ids, targets)[1]) for each in (model, other)]
    model.train()
    if abs(losses[0] - losses[1]) > 1e-5 * losses[0]:
        tqdm.write(
            f"note: {path} does not keep the whole model: its loss is {losses[0]:.6f}, loaded "
            f"{losses[1]:.6f}: make what it learns or draws an nn.Parameter, nn.Module, or buffer"
        )
