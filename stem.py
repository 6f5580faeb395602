"""STEM: the FFN whose up-projection is a token table (Sadhukhan et al., arXiv 2601.10639).

    dense   y = W_d (SiLU(W_g x) * (W_u x))
    STEM    y = W_d (SiLU(W_g x) * U_l[t])        t: the token id at this position

`U_l` is layer l's own table, V x d_ff. Replacing `W_u x` by a row removes a third of the FFN's
weights from the compute path, and since the row depends on nothing but the token id it can be
fetched before the first layer runs (offload.py). Swapping it for another token's row edits what the
model knows. (training/dense_to_stem.py fits rows to this formula.)
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StemFFN(nn.Module):
    """Gated FFN whose up-projection is looked up (STEM paper, section 3)."""

    def __init__(self, n_embd: int, d_ff: int) -> None:
        super().__init__()
        self.row_width = d_ff  # how many numbers of the token's row this module reads
        self.gate = nn.Linear(n_embd, d_ff, bias=False)
        self.down = nn.Linear(d_ff, n_embd, bias=False)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [B, T, n_embd], rows U_l[t] [B, T, d_ff] -> [B, T, n_embd]."""
        gate = F.silu(self.gate(x))  # 16 bits under autocast; x and rows have 32
        return self.down(gate * rows.to(gate.dtype))


def substitute(ids: Tensor, source: list[int], target: list[int]) -> Tensor:
    """Knowledge editing: ids [..., T] under which to look up tables, with every occurrence of the
    tokens `source` replaced by those of `target` (STEM paper, section on knowledge editing).
    Occurrences must not overlap; those of names do not. The result [..., T] goes to the decoder as
    `table_ids`: embeddings and positions stay those of `ids`. ValueError: source and target are
    empty, or not of one length, to which `training.edits.align` brings them."""
    n = len(source)
    if n == 0 or n != len(target):
        raise ValueError(f"source {source} and target {target} are not of one length above 0")
    table_ids = ids.clone()
    if n > ids.shape[-1]:
        return table_ids
    windows = ids.unfold(-1, n, 1)  # [..., T - n + 1, n]
    found = (windows == torch.tensor(source, device=ids.device)).all(-1)  # [..., T - n + 1]
    for i, token in enumerate(target):
        place = table_ids[..., i : i + found.shape[-1]]  # a view: position i of each window
        place[found] = token
    return table_ids
