"""--attention window:64: attention to the last 64 tokens, the token itself included, as in Mistral
7B (Jiang et al., arXiv 2310.06825, section 2), whose cost does not grow with the square of the
length. By layer, and repeated: window:64,window:64,full."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model
from common import UserError
from model import LayerCache, ModelConfig, additive


class WindowCache(LayerCache):
    """Keys and values of the last window - 1 tokens: what the next token sees besides itself."""

    def __init__(self, config: ModelConfig, batch: int, window: int, like: Tensor) -> None:
        super().__init__(config, batch, 0, like)
        self.window = window

    def update(self, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k and v [B, n_kv_head, T, head_dim] of new tokens. Returns those of all tokens that
        one of the new tokens sees, [B, n_kv_head, S, head_dim]."""
        if start > 0:
            k = torch.cat((self.k, k), dim=2)
            v = torch.cat((self.v, v), dim=2)
        first = max(0, k.shape[2] - (self.window - 1))
        # Copies: a view would keep all of k and v in memory.
        self.k = k[:, :, first:].clone()
        self.v = v[:, :, first:].clone()
        return k, v


class Attention(model.Attention):
    """Attention to the last w tokens. Tokens are cut into blocks of w, and queries of a block see
    their block and the one before it, through a mask [w, 2w]."""

    def __init__(self, config: ModelConfig, qkv: nn.Module, argument: str) -> None:
        super().__init__(config, qkv)
        if not argument.isdecimal() or int(argument) < 1:
            raise UserError(f"--attention {config.attention}: give a number of tokens, window:64")
        self.window = int(argument)
        self.span = min(config.block_size, 2 * self.window)

    def make_cache(self, batch: int, room: int, like: Tensor) -> WindowCache:
        return WindowCache(self.config, batch, self.window, like)

    def n_past(self, start: int) -> int:
        return min(start, self.window - 1)

    def make_mask(self, x: Tensor, start: int, documents: Tensor | None) -> Tensor | None:
        """[B * blocks, 1, w, 2w], or None where one window has all that is seen. With w = 3, seven
        tokens are three blocks, whose queries see (x) keys of the block before and their own:

            keys        . . . 0 1 2       0 1 2 3 4 5       3 4 5 6 . .
            query 0           x     3       x x x     6       x x x
                  1           x x   4         x x x
                  2           x x x 5           x x x
        """
        w = self.window
        n = x.shape[1]
        past = self.n_past(start)  # keys in front of x's
        if past + n <= w:  # one window has them all
            return super().make_mask(x, past, documents)
        if documents is None:
            documents = x.new_zeros(len(x), past + n)  # all in one
        # The documents of each block's keys, the lowest number where there is no key.
        nowhere = torch.iinfo(torch.int64).min
        padded = F.pad(documents.long(), (w - past, -n % w), value=nowhere)
        keys = padded.unfold(1, 2 * w, w)  # [B, blocks, 2w]
        queries = keys[..., w:]  # the second half of them
        key_place = torch.arange(2 * w, device=x.device)  # in the block before and its own
        query_place = key_place[w:, None]
        in_window = (query_place - w < key_place) & (key_place <= query_place)  # [w, 2w]
        same = queries[..., :, None] == keys[..., None, :]  # [B, blocks, w, 2w]
        seen = (in_window & same).flatten(0, 1)
        return additive(seen[:, None], x)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        w = self.window
        if k.shape[2] <= w:  # one window has them all
            return super().attend(q, k, v, mask)
        batch, _, n, _ = q.shape
        q = F.pad(q, (0, 0, 0, -n % w))
        q = q.unflatten(2, (-1, w))  # [B, n_head, blocks, w, head_dim]
        q = q.transpose(1, 2).flatten(0, 1)  # [B * blocks, n_head, w, head_dim]
        k = blocks_of_keys(k, n, w)
        v = blocks_of_keys(v, n, w)
        y = super().attend(q, k, v, mask)  # [B * blocks, w, n_head, head_dim]
        y = y.unflatten(0, (batch, -1)).flatten(1, 2)
        return y[:, :n]  # [B, T, n_head, head_dim]


def blocks_of_keys(k: Tensor, n: int, w: int) -> Tensor:
    """Keys or values [B, heads, S, head_dim], of which the last n are of new tokens: for each block
    of w new tokens those of the block before it and its own, [B * blocks, heads, 2w, head_dim]."""
    past = k.shape[2] - n
    k = F.pad(k, (0, 0, w - past, -n % w))
    k = k.unflatten(2, (-1, w)).transpose(1, 2)  # [B, 1 + blocks, heads, w, head_dim]
    before = k[:, :-1]
    own = k[:, 1:]
    return torch.cat((before, own), dim=3).flatten(0, 1)
