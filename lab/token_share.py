"""How much of a dense model's FFN is a function of the current token alone?

For each layer and each part of its FFN, `y = W_d (g * u)` with `g = SiLU(W_g x)` and `u = W_u x`:

    up      u = W_u x replaced by a row of the token, as in STEM
    gate    g replaced by a row of the token
    whole   y replaced by a row of the token

Rows are least-squares fits on training text (training/dense_to_stem.py). On validation text, which
they have not seen, two figures: the share of the variance of `g * u`, or of y, that they explain,
and how much the loss rises if this part of this layer alone is replaced.

A row estimated from n places has an error of its own: where u spreads around the best row by s^2,
the row of n places misses by s^2 (1 + 1/n). So the error at each place is multiplied by
n / (n + 1), and the share is that of the best rows. It is taken over the places whose token
occurred; the loss over all, with the mean over all tokens as the row of others.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from common import UserError
from lab.pictures import markdown, plt, save_figure
from model import Decoder
from training.checkpoints import load_model
from training.dense_to_stem import Explained, Fit, Stream, read_text, run_attention
from training.placement import training_dtype

PARTS = ("up", "gate", "whole")
SIZE = 4  # windows of training text in a forward pass


def token_share(
    paths: list[Path],
    data_dir: str,
    n_token: int,
    block_size: int | None,
    device: torch.device,
    picture: Path,
) -> None:
    """Print a table for each checkpoint, and draw all of them. UserError: one is not dense, or as
    `read_text`."""
    figure, axes = plt.subplots(2, len(paths), figsize=(5.5 * len(paths), 6), squeeze=False)
    dtype = training_dtype("auto", device)
    for path, (above, below) in zip(paths, axes.T, strict=True):
        model, encoding, _ = load_model(path, device)
        if model.config.ffn != "dense":
            raise UserError(f"{path} is of --ffn {model.config.ffn}: token_share asks dense models")
        train, val = read_text(path, model, encoding, data_dir, n_token, block_size)
        with torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32"):
            loss, shares, losses = measure(model, train[0], *val)
        print(
            f"\n{path}: rows from {train[0].numel():,} tokens, judged on {val[0].numel():,} others "
            f"in windows of {val[0].shape[1]}, in {dtype}; loss {loss:.3f} (±: 95 % intervals)\n"
        )
        print(markdown([row(*figures) for figures in enumerate(zip(shares, losses, strict=True))]))
        for part in PARTS:
            above.plot([share[part] for share in shares], marker=".", label=part)
            below.plot([more[part].mean() for more in losses], marker=".", label=part)
        above.set(title=str(path), ylabel="share that the token explains", ylim=(0, 1))
        below.set(xlabel="layer", ylabel="rise of the loss, nats", yscale="symlog")
        above.legend()
    save_figure(figure, picture)
    print(f"\nwrote {picture}")


def row(layer: int, figures: tuple[dict, dict]) -> dict[str, str]:
    shares, losses = figures
    cells = {"layer": str(layer)}
    for part in PARTS:
        more = losses[part]  # of each window
        cells[part] = f"{shares[part]:.2f}"
        cells[f"{part}: loss"] = f"{more.mean():+.3f}"
        if len(more) > 1:
            cells[f"{part}: loss"] += f" ± {1.96 * more.std() / len(more) ** 0.5:.3f}"
    return cells


@torch.no_grad()
def measure(
    model: Decoder, train: Tensor, val: Tensor, targets: Tensor
) -> tuple[float, list[dict[str, float]], list[dict[str, Tensor]]]:
    """Rows from windows `train` [N, T], judged on others, val and targets [M, T]: the loss as it
    is, and for each layer by part the share that rows explain and the rise of the loss of each
    window [M]."""
    bar = tqdm(desc="measuring", unit="batch", disable=None)
    text, other = Stream(model, train, SIZE, bar), Stream(model, val, 1, bar)
    bar.total = len(model.blocks) * (text.n_batch + other.n_batch)
    tokens, counts = train.unique(return_counts=True)
    counts = F.pad(counts, (0, 1)).to(model.device)  # a row more, the mean, is that of all others
    place = torch.full((model.config.vocab_size,), len(tokens))
    place[tokens] = torch.arange(len(tokens))
    place = place.to(model.device)
    shares, losses = [], []
    for layer, block in enumerate(model.blocks):
        fits = {}
        for ids, z, kept in text.attend(block):
            for part, (b, p, _) in factors(block.ffn, z).items():
                if part not in fits:
                    fits[part] = Fit(len(counts), p.shape[-1], model.device)
                fits[part].add(place[ids], b, p)
            kept += p.to(kept.device)  # of the last part, the whole
        rows = {part: fit.rows() for part, fit in fits.items()}
        del fits
        explained = {part: Explained() for part in PARTS}
        of_windows = {part: [] for part in PARTS}
        for (ids, z, kept), target in zip(other.attend(block), targets, strict=True):
            x = kept.to(model.device)
            at = place[ids]  # [1, T]
            n = counts[at[0]]
            for part, (b, p, out) in factors(block.ffn, z).items():
                fit = b * rows[part][at]
                explained[part].add(p[0][n > 0], fit[0][n > 0], (n / (n + 1))[n > 0])
                loss = loss_above(model, layer, x + out(fit), target)
                of_windows[part].append(loss)
            kept += p.to(kept.device)
        shares.append({part: explained[part].share for part in PARTS})
        losses.append({part: torch.tensor(of_windows[part]) for part in PARTS})
    bar.close()
    before = [
        loss_above(model, len(model.blocks), kept.to(model.device), target)
        for (_, kept), target in zip(other.batches, targets, strict=True)
    ]
    before = torch.tensor(before)
    losses = [{part: of[part] - before for part in PARTS} for of in losses]
    return float(before.mean()), shares, losses


def factors(ffn: nn.Module, z: Tensor) -> dict[str, tuple]:
    """What rows can replace in a dense FFN that reads z [B, T, n_embd], by part: b and p, where
    b * row replaces p, and what then leads to the residual stream."""
    g = F.silu(ffn.gate(z))  # [B, T, d_ff]
    u = ffn.up(z)
    y = ffn.down(g * u)  # [B, T, n_embd]
    return {
        "up": (g, g * u, ffn.down),
        "gate": (u, g * u, ffn.down),
        "whole": (torch.ones_like(y), y, nn.Identity()),
    }


def loss_above(model: Decoder, layer: int, x: Tensor, targets: Tensor) -> float:
    """The loss in nats of a window whose stream above a layer is x [1, T, n_embd]."""
    for block in model.blocks[layer + 1 :]:
        x = run_attention(model, block, x)
        x = x + block.ffn(block.ffn_norm(x), None)
    return model.loss(model.norm(x)[0], targets.to(model.device)).item()
