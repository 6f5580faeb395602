"""A cache of the rows that are read most, on the compute device."""

import torch
from torch import Tensor

from tables import send


class HotRows:
    """Rows of the most frequent tokens, all their tables; the least frequently used leaves first.

    Language is Zipfian: in one measurement the 10 % most frequent tokens made up 78 % of a text. A
    hit costs no transfer. For evaluation and decoding: training changes rows, which empties it.

    Args:
        size: tokens that fit.
        weight: the tables, [V, W] each.
        device: of the copies.
    """

    def __init__(self, size: int, weight: list[Tensor], device: torch.device) -> None:
        (vocab_size, width), dtype = weight[0].shape, weight[0].dtype
        self.rows = torch.empty(len(weight), size, width, dtype=dtype, device=device)
        self.token = torch.full((size,), -1)  # whose rows lie in each place; -1: nobody's
        self.place = torch.full((vocab_size,), -1)  # the inverse
        self.uses = torch.zeros(vocab_size, dtype=torch.int64)
        self.tokens, self.hits = 0, 0  # looked up so far, and found here

    def visit(self, ids: Tensor, position: Tensor, times: Tensor) -> tuple[Tensor, Tensor, "Visit"]:
        """What of a lookup is here, and what has to be fetched.

        Args:
            ids: [n] distinct tokens, each read `times` [n].
            position: [B, T] into `ids`.

        Returns:
            the tokens that are not here, `position` into them and those that are here behind, and
            what brings the two together.
        """
        place = self.find(ids, times)
        hit = place >= 0
        order = torch.cat([(~hit).nonzero()[:, 0], hit.nonzero()[:, 0]])
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        missed = ids[~hit]
        return missed, rank[position], Visit(self, missed, place[hit])

    def find(self, ids: Tensor, times: Tensor) -> Tensor:
        """Places of tokens `ids` [n], -1 where absent; counts that each was read `times` [n]."""
        place = self.place[ids]
        self.uses[ids] += times
        self.tokens += int(times.sum())
        self.hits += int(times[place >= 0].sum())
        return place

    def admit(self, missed: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the tokens `missed` [n] shall be kept, and where.

        Returns:
            index into `missed` [k], the most used first, and places [k]. Who was there is gone at
            once; who comes is found only after `enter`, when the rows of all tables are there.
        """
        best = self.uses[missed].argsort(descending=True)[: len(self.token)]
        uses = self.uses[self.token].masked_fill_(self.token < 0, -1)
        places = uses.topk(len(best), largest=False, sorted=True).indices
        better = self.uses[missed[best]] > uses[places]
        best, places = best[better], places[better]
        leaving = self.token[places]
        self.place[leaving[leaving >= 0]] = -1
        self.token[places] = -1
        return best, places

    def enter(self, ids: Tensor, places: Tensor) -> None:
        self.token[places], self.place[ids] = ids, places

    def clear(self) -> None:
        here = self.token[self.token >= 0]
        if len(here):
            self.place[here] = -1
            self.token.fill_(-1)


class Visit:
    """One lookup's dealings with the cache: it takes rows of tokens that are here, and leaves rows
    of those that are worth keeping."""

    def __init__(self, cache: HotRows, missed: Tensor, hot: Tensor) -> None:
        """missed: [n] tokens that are fetched; hot: [h] places of those that are here."""
        best, places = cache.admit(missed)
        self.cache, self.enters = cache, (missed[best], places)
        device = cache.rows.device
        self.hot, self.best, self.places = (send(t, device) for t in (hot, best, places))

    def join(self, table: int, rows: Tensor) -> Tensor:
        """rows [n, W] of the missed tokens -> [n + h, W], those that were here behind."""
        kept = self.cache.rows[table]
        rows = torch.cat([rows, kept.index_select(0, self.hot)])
        kept[self.places] = rows[self.best]
        return rows

    def end(self) -> None:
        """All tables have been joined."""
        self.cache.enter(*self.enters)
