"""How much of a dense model's FFN is a function of the current token alone?

For each layer and each part of its FFN, `y = W_d (g * u)` with `g = SiLU(W_g x)` and `u = W_u x`:

    up      u = W_u x replaced by a row of the token, as in STEM
    gate    g replaced by a row of the token
    whole   y replaced by a row of the token

Rows are least-squares fits on training text (training/dense_to_stem.py). On validation text, which
they have not seen, two figures: the share of the variance of `g * u`, or of y, that they explain,
and how much the loss rises if this part of this layer alone is replaced.

A row estimated from some places has an error of its own: where what it replaces spreads around the
best row by s^2, it misses by s^2 (1 + q). If b multiplies the row, q is the sum of b^4 over the
square of the sum of b^2: 1 / n of n places where b is equal. So the squared error at each place is
divided by 1 + q, and the share is that of the best rows. Tokens that did not occur have no row: the
share is taken over the places of others, and these are replaced.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import UserError, training_dtype
from lab.pictures import interval, markdown, plt, save_figure
from model import Decoder
from training.checkpoints import load_model
from training.dense_to_stem import Fit, Stream, check_stream, cos_sin_and_mask, read_text

PARTS = ("up", "gate", "whole")
SIZE = 4  # windows of training text in a forward pass


def token_share(
    paths: list[Path], data_dir: str, n_token: int, block_size: int | None, device, picture: Path
) -> None:
    """Print a table for each checkpoint, and draw all of them. UserError: one is not dense, or as
    `read_text`."""
    figure, axes = plt.subplots(2, len(paths), figsize=(5.5 * len(paths), 6), squeeze=False)
    dtype = training_dtype("auto", device)
    for path, (above, below) in zip(paths, axes.T, strict=True):
        model, encoding, _ = load_model(path, device)
        model.float()  # as the stream
        if model.config.ffn != "dense":
            raise UserError(f"{path} is of --ffn {model.config.ffn}: token_share asks dense models")
        (train, _), (val, targets) = read_text(path, model, encoding, data_dir, n_token, block_size)
        with torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32"):
            loss, shares, losses = measure(model, train, val, targets)
        print(
            f"\n{path}: rows from {train.numel():,} tokens, judged on {val.numel():,} others in "
            f"windows of {val.shape[1]}, in {dtype}; loss {loss:.3f}\n"
            "share that the token explains, and rise of the loss where rows replace this part of "
            "this layer (±: 95 % intervals over windows, Student's t)\n"
        )
        rows = []
        for layer, figures in enumerate(zip(shares, losses.tolist(), strict=True)):
            row = {"layer": str(layer)}
            for part, share, rises in zip(PARTS, *figures, strict=True):
                row[part] = f"{share:.2f}, {interval('+.3f', rises)}"
            rows.append(row)
        print(markdown(rows))
        above.plot(shares, marker=".")
        below.plot(losses.mean(-1), marker=".")  # [n_layer, parts]
        title = str(path).replace("$", r"\$")  # which would begin a formula
        above.set(title=title, ylabel="share that the token explains", ylim=(0, 1))
        below.set(xlabel="layer", ylabel="rise of the loss, nats")
        below.set_yscale("symlog", linthresh=0.01)
        above.legend(PARTS)
    save_figure(figure, picture)
    print(f"\nwrote {picture}")


@torch.no_grad()
def measure(
    model: Decoder, train: Tensor, val: Tensor, targets: Tensor
) -> tuple[float, Tensor, Tensor]:
    """Rows from windows `train` [N, T], judged on others, val and targets [M, T]: the loss as it
    is, the shares that rows explain [n_layer, parts], and the rise of the loss of each window
    [n_layer, parts, M]."""
    check_stream(model, val[:1])
    config = model.config
    text, other = Stream(model, train, SIZE), Stream(model, val, 1)
    tokens, counts = train.unique(return_counts=True)
    counts = F.pad(counts, (0, 1)).to(model.device)  # the last row is that of all other tokens
    place = torch.full((config.vocab_size,), len(tokens), device=model.device)
    place[tokens.to(model.device)] = torch.arange(len(tokens), device=model.device)
    shares, losses = [], []
    for layer, block in enumerate(model.blocks):
        widths = (config.d_ff, config.d_ff, config.n_embd)
        fits = [JudgedFit(len(counts), width, model.device) for width in widths]
        for ids, z, kept in text.attend(layer):
            for fit, (b, p, _) in zip(fits, factors(block.ffn, z), strict=True):
                fit.add(place[ids], b, p)
            kept += p.to("cpu")  # of the last part, the whole
        rows = [fit.rows() for fit in fits]
        weights = [fit.weights() for fit in fits]
        explained = [Explained() for _ in PARTS]
        for (ids, z, kept), target in zip(other.attend(layer), targets, strict=True):
            at = place[ids]
            n = counts[at]  # [1, T]
            for number, (b, p, out) in enumerate(factors(block.ffn, z)):
                fit = torch.where(n[..., None] > 0, b * rows[number][at], p)
                explained[number].add(p[n > 0], fit[n > 0], weights[number][at][n > 0])
                x = kept.to(model.device) + out(fit)
                losses.append(loss_above(model, layer + 1, x, target))
            kept += p.to("cpu")
        shares.append([part.share for part in explained])
    ends = zip(other.batches, targets, strict=True)
    loss = torch.tensor(
        [loss_above(model, config.n_layer, kept, target) for (_, kept), target in ends]
    )
    losses = torch.tensor(losses).view(config.n_layer, len(val), len(PARTS)).transpose(1, 2)
    return loss.mean().item(), torch.tensor(shares), losses - loss


class JudgedFit(Fit):
    """Rows, and how much of a squared error at another place is not their own."""

    def __init__(self, n_row: int, width: int, device: torch.device) -> None:
        super().__init__(n_row, width, device)
        self.fourth = torch.zeros_like(self.bb)  # sums of b^4

    def add(self, ids: Tensor, b: Tensor, p: Tensor) -> None:
        super().add(ids, b, p)
        self.fourth.index_add_(0, ids.flatten(), b.float().pow(4).flatten(0, 1))

    def weights(self) -> Tensor:
        """1 / (1 + q), see above: [n_row, width]. Where sums are too small for float32, q is that
        of one place."""
        q = (self.fourth / self.bb.square()).nan_to_num(1.0, posinf=1.0)
        return 1 / (1 + q)


class Explained:
    """1 - (squared error of a fit to p) / (variance of p), both summed over channels."""

    def __init__(self) -> None:
        self.n = self.errors = self.squares = self.sums = 0.0

    def add(self, p: Tensor, fit: Tensor, weight: Tensor) -> None:
        """p, its fit, and the weight of the errors, [.., T, width] each."""
        # In double precision, which the GPUs of Macs do not have.
        p, fit, weight = (given.cpu().double() for given in (p, fit, weight))
        self.n += p[..., 0].numel()
        self.errors += ((p - fit).square() * weight).sum()
        self.squares += p.square().sum()
        self.sums += p.flatten(0, -2).sum(0)

    @property
    def share(self) -> float:
        return float(1 - self.errors / (self.squares - self.sums.square().sum() / self.n))


def factors(ffn: nn.Module, z: Tensor) -> tuple:
    """What rows can replace in a dense FFN that reads z [B, T, n_embd], for each of PARTS: b and p,
    where b * row replaces p, and what then leads to the residual stream."""
    g = F.silu(ffn.gate(z))  # [B, T, d_ff]
    u = ffn.up(z)
    y = ffn.down(g * u)  # [B, T, n_embd]
    return (g, g * u, ffn.down), (u, g * u, ffn.down), (torch.ones_like(y), y, nn.Identity())


def loss_above(model: Decoder, layer: int, x: Tensor, targets: Tensor) -> float:
    """The loss in nats of a window whose stream x [1, T, n_embd] goes into a layer."""
    x = x.to(model.device)
    for block in model.blocks[layer:]:
        x = block(x, None, *cos_sin_and_mask(block, x))
    return model.loss(model.norm(x)[0], targets.to(x.device)).item()
