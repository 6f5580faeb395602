"""--attention previous:2: in the first two key heads, each token has the key of the one before it.

Keys of Embformer are rows of their own tokens, which do not know what came before: it cannot find
`B` after an earlier `A` from `A` alone. With a key of the token before, a query for `A` finds `B`.
It is our own. Repository modded-nanogpt (2025) moves half of the channels of all heads, those that
positions do not rotate, in some layers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model
from common import UserError
from model import LayerCache, ModelConfig, rotate_both


class PreviousCache(LayerCache):
    """Keeps the keys of the last token, not rotated, too."""

    last_key: Tensor  # [B, 1, n, head_dim]


class Attention(model.Attention):
    """Full attention. The first token of a text, or of a document in it, keeps its own key."""

    def __init__(self, config: ModelConfig, qkv: nn.Module, argument: str) -> None:
        super().__init__(config, qkv)
        if not argument.isdecimal() or not 1 <= int(argument) <= config.n_kv_head:
            heads = f"a number of heads from 1 to {config.n_kv_head}, as previous:1"
            raise UserError(f"--attention {config.attention}: give {heads}")
        self.n = int(argument)

    def make_cache(self, batch: int, room: int, like: Tensor) -> PreviousCache:
        return PreviousCache(self.config, batch, room, like)

    def make_mask(self, x: Tensor, start: int, documents: Tensor | None) -> tuple:
        """That of full attention, and where documents begin [B, T, 1, 1], if there are some."""
        begins = None
        if documents is not None:
            begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))[:, :, None, None]
        return super().make_mask(x, start, documents), begins

    def forward(
        self,
        x: Tensor,
        rows: Tensor | None,
        cos_sin: Tensor,
        mask: tuple[Tensor | None, Tensor | None],
        cache: PreviousCache | None = None,
        start: int = 0,
    ) -> Tensor:
        mask, begins = mask
        q, k, v = self.qkv(x, rows)  # [B, T, n_head, head_dim], [B, T, n_kv_head, head_dim] twice
        own = k[:, :, : self.n]
        before = own[:, :1] if cache is None or start == 0 else cache.last_key
        moved = torch.cat((before, own[:, :-1]), dim=1)
        if begins is not None:
            moved = own.where(begins, moved)
        k = torch.cat((moved, k[:, :, self.n :]), dim=2)
        if cache is not None:
            cache.last_key = own[:, -1:].clone()
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # [B, heads, T, head_dim]
        q, k = rotate_both(q, k, cos_sin)
        if cache is not None:
            k, v = cache.update(start, k, v)  # [B, n_kv_head, S, head_dim]
        y = self.attend(q, k, v, mask)  # [B, T, n_head, head_dim]
        return self.out(y.flatten(2))
