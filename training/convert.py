"""From a trained dense model to STEM: a row of a table per token stands in for `W_u x`.

    dense   y = W_d (g * u)          g = SiLU(W_g x),  u = W_u x
    STEM    y = W_d (g * U_l[t])     t: the token id at this position
    U_l[t] = E[g^2 u | t] / E[g^2 | t]

the least-squares fit to what `W_d` reads, over all places of the training text where t stands. The
lowest layer comes first: the next one's statistics are of a model in which it is converted.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from tables.sharded import my_columns
from training import ranks
from training.batches import Data, Source
from training.objectives import NextToken, validation_rows
from training.settings import Settings


class Reached(Exception):
    """A forward pass has come to the FFN where it should end: `args` are what that is given."""


def stop(_, given: tuple) -> None:
    raise Reached(*given)


@torch.no_grad()
def convert(
    objective: NextToken, weights: dict[str, Tensor], data: Data, settings: Settings
) -> None:
    """Fill the tables of a STEM model that has the other weights of a dense one already. Prints how
    much of the variance of `g * u` rows explain on the validation text."""
    model, size = objective.model.eval(), settings.device_batch_size
    n_token = min(settings.convert_tokens, sum(meta["train"]["tokens"] for meta in data.metas))
    val = next(iter(data.val.values()))  # of a mixture the first part
    n_train = max(1, n_token // (size * val.block_size))
    n_val = max(1, validation_rows(val, settings.eval_tokens) // size)

    def read(layer: int, source: Source, n_batch: int) -> Iterator[tuple[Tensor, ...]]:
        """Of each batch ids [B * T], and g, u and rows [B * T, d_ff] of a layer."""
        ffn, w_u = model.blocks[layer].ffn, weights[f"blocks.{layer}.ffn.up.weight"]
        hook, w_u = ffn.register_forward_pre_hook(stop), w_u.to(model.device, torch.float32)
        for ids, targets in (source.batch(number, size) for number in range(n_batch)):
            try:
                objective(ids, targets)
            except Reached as reached:
                x, rows = (tensor.flatten(0, 1).float() for tensor in reached.args)
            yield ids.flatten().to(x.device), F.silu(ffn.gate(x)), F.linear(x, w_u), rows
        hook.remove()

    for table, layer in enumerate(n for n, block in enumerate(model.blocks) if block.row_width):
        # 1) g^2 and g^2 u, summed over the places where a token stands
        gg, ggu = torch.zeros(2, model.config.vocab_size, model.config.d_ff, device=model.device)
        batches = read(layer, data.train, n_train)
        for ids, g, u, _ in tqdm(batches, f"layer {layer}", n_train, leave=False, disable=None):
            gg.index_add_(0, ids, g**2)
            ggu.index_add_(0, ids, g**2 * u)  # [V, d_ff]

        # 2) rows; of tokens that do not occur there, the mean over all
        mean = ggu.sum(0) / gg.sum(0).clamp_min(1e-20)  # [d_ff]
        prior = settings.convert_prior * gg.sum(0) / n_token
        rows = torch.where(gg + prior > 0, (ggu + prior * mean) / (gg + prior), mean)
        rows = my_columns(rows) if ranks.size > 1 else rows
        model.tables.load_state_dict({**model.tables.state_dict(), f"weight.{table}": rows})

        # 3) how good they are on other text
        sums = squares = errors = n = 0
        for ids, g, u, rows in read(layer, val, n_val):
            n, sums = n + len(ids), sums + (g * u).sum(0)
            squares += (g * u).square().sum()
            errors += (g * (u - rows)).square().sum()
        explained = 1 - errors / (squares - sums.square().sum() / n)
        print(f"layer {layer}: the token explains {explained:.1%} of the variance")
    model.train()
