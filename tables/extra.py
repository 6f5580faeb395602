"""Rows that are read in place of others, in memory: for edits, before any are saved."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tables.tables import Tables


class ExtraRows(Tables):
    """Tables in which some tokens, `ids`, read extra rows in place of their own. If no ids are
    given, the extra rows get new ones, beyond those of the tables below, which do not change,
    wherever they are stored. A checkpoint does not hold such tables: `edit.save` writes the rows
    into one."""

    can_be_saved = False

    def __init__(self, tables: Tables, rows: Tensor, ids: Sequence[int] = ()) -> None:
        """rows: [n, n_table, W], one for each of the ids. AssertionError: of another shape."""
        shape = [len(rows), len(tables.weight), tables.width]
        assert [*rows.shape] == shape, f"rows are {[*rows.shape]}, not {shape}"
        super().__init__(tables.n_row if ids else tables.n_row + len(rows), tables.width)
        self.tables = tables
        self.weight = tables.weight
        self.extra = nn.Parameter(rows.float(), requires_grad=False)
        self.which = torch.full((self.n_row,), -1)  # which extra row an id reads; -1: none
        self.ids = list(ids or range(tables.n_row, self.n_row))
        self.check_range(torch.tensor(self.ids))
        self.which[self.ids] = torch.arange(len(self.ids))

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        self.check_range(ids)  # -1 would be the last id
        which = self.which.to(ids.device)[ids]  # [B, T]
        is_extra = which >= 0
        places = is_extra.nonzero(as_tuple=True)  # [n] each
        which = which[places]  # [n]
        for table, rows in enumerate(self.tables.lookup(ids.masked_fill(is_extra, 0))):
            if len(which):  # in decoding, there are rarely some
                own = self.extra[which, table].to(rows.dtype)  # [n, W]
                rows = rows.index_put(places, own)
            yield rows  # [B, T, W]


@torch.no_grad()
def rows_of(tables: Tables, tokens: list[int]) -> Tensor:
    """A copy of the rows of tokens, [n, n_table, W]."""
    return torch.stack([rows[0] for rows in tables.lookup(torch.tensor([tokens]))], dim=1)


def with_rows(tables: Tables, rows: dict[int, Tensor]) -> ExtraRows:
    """Tables in which tokens have other rows, [n_table, W] each."""
    return ExtraRows(tables, torch.stack(list(rows.values())), list(rows))


def mean_rows(tables: Tables, names: list[list[int]]) -> ExtraRows:
    """Tables with an extra token for each name: the mean of the rows of its tokens."""
    means = [rows_of(tables, name).mean(0) for name in names]
    return ExtraRows(tables, torch.stack(means))
