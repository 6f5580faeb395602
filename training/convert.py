"""From a trained dense model to STEM: tables whose rows stand in for `W_u x`.

    dense   y = W_d (SiLU(W_g x) * (W_u x))          g = SiLU(W_g x),  u = W_u x
    STEM    y = W_d (SiLU(W_g x) * U_l[t])           t: the token id at this position

A row is the least-squares fit to what `W_d` reads, over all places where its token stands:

    U_l[t] = E[g^2 u | t] / E[g^2 | t]

The lowest layer comes first: the next one's statistics are of a model in which it is converted.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from model import Decoder
from training.batches import Data, Source
from training.objectives import NextToken, validation_rows
from training.settings import Settings


class Reached(Exception):
    """A forward pass has come to the FFN where it should end: `args` are what that is given."""


def load_dense(model: Decoder, weights: dict[str, Tensor]) -> dict[int, Tensor]:
    """Load a dense model's weights into a STEM model whose rows stay as they are. Returns what they
    are to replace: by layer, W_u [d_ff, n_embd] on the model's device."""
    kinds = [model.config.layer_kind(layer) for layer in range(model.config.n_layer)]
    names = {n: f"blocks.{n}.ffn.up.weight" for n, kind in enumerate(kinds) if kind == "stem"}
    kept = {name: weight for name, weight in weights.items() if name not in names.values()}
    model.load_state_dict({**model.state_dict(), **kept})
    return {layer: weights[name].to(model.device, torch.float32) for layer, name in names.items()}


def batches(sources: list[Source], weights: list[float], n_token: int, size: int) -> list[tuple]:
    """About n_token tokens of sources, mixed by weight: of each batch the source and its rows."""
    found = []
    for source, weight in zip(sources, weights, strict=True):
        n_row = validation_rows(source, int(weight * n_token))
        found += [(source, range(at, min(n_row, at + size))) for at in range(0, n_row, size)]
    return found


def ffn_inputs(objective: NextToken, layer: int, up: Tensor, read: list, bar: tqdm) -> Iterator:
    """For each batch: token ids [B * T], and g, u and rows [B * T, d_ff] of a layer's FFN."""

    def stop(_, given: tuple) -> None:
        raise Reached(*given)

    ffn = objective.model.blocks[layer].ffn
    hook = ffn.register_forward_pre_hook(stop)
    for source, indices in read:
        ids, targets = source.rows(indices)
        try:
            objective(ids, targets)
        except Reached as reached:
            x, rows = (tensor.flatten(0, 1).float() for tensor in reached.args)
        yield ids.flatten().to(x.device), F.silu(ffn.gate(x)), F.linear(x, up), rows
        bar.update()
    hook.remove()


@torch.no_grad()
def convert(
    objective: NextToken, replaced: dict[int, Tensor], data: Data, settings: Settings
) -> None:
    """Fill the tables of a model, given what `load_dense` returned, from the training text. Prints
    what they explain of the variance of `g * u` in the validation text."""
    model, size = objective.model.eval(), settings.device_batch_size
    sources = getattr(data.train, "sources", [data.train])  # of a mixture
    train = batches(sources, data.weights, settings.convert_tokens, size)
    val = batches(list(data.val.values()), data.weights, settings.eval_tokens, size)
    n_batch = len(replaced) * (len(train) + len(val))
    with tqdm(total=n_batch, desc="converting", unit="batch", disable=None) as bar:
        for table, (layer, up) in enumerate(replaced.items()):
            # 1) g^2 and g^2 u, summed over the places where a token stands
            gg, ggu = up.new_zeros(2, model.config.vocab_size, len(up))  # [V, d_ff] each
            for ids, g, u, _ in ffn_inputs(objective, layer, up, train, bar):
                gg.index_add_(0, ids, g**2)
                ggu.index_add_(0, ids, g**2 * u)

            # 2) rows. The mean over all tokens counts as some more places of mean g^2, so that a
            # rare token's row stays near it, and one that never occurs has it.
            n_token = sum(len(indices) * source.block_size for source, indices in train)
            total = gg.sum(0).clamp_min(1e-20)  # [d_ff]
            prior = settings.convert_prior / n_token * total
            rows = (ggu + prior * ggu.sum(0) / total) / (gg + prior)
            model.tables.fill(table, rows)

            # 3) how good they are on other text
            n, sums, squares, errors = 0, 0, 0, 0
            for _, g, u, rows in ffn_inputs(objective, layer, up, val, bar):
                n, sums = n + len(u), sums + (g * u).sum(0)
                squares += (g * u).square().sum()
                errors += (g * (u - rows)).square().sum()
            explained = 1 - errors / (squares - sums.square().sum() / n)
            bar.write(f"layer {layer}: the token explains {explained:.1%} of the variance")
    model.train()
