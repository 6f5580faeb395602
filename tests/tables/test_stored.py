"""Tables whose rows are views of a file, read and updated in place. That training equals that of
resident ones: training/test_place.py."""

import pytest
import torch
from conftest import Largest
from naive import tokens

from model import Decoder, ModelConfig
from tables.rmsprop import RowRMSprop
from tables.storage import DiskStorage
from tables.tables import StoredTables
from training.report import model_sizes

V, L, W = 23, 5, 6


@pytest.fixture
def made(tmp_path):
    """What makes tables when called as (n_table, V, W)."""

    def make(n_table=L, n_row=V, width=W):
        shape = (n_row, n_table, width)
        return StoredTables(DiskStorage.create(tmp_path / "tables", shape, torch.float32))

    return make


def test_a_model_moves_its_tables_nowhere_and_counts_them(made):
    config = ModelConfig(V, 16, 4, 2, 16, stem_layers="all")
    with torch.device("meta"):
        plain = model_sizes(Decoder(config))
    model = Decoder(config, tables=made)
    assert model_sizes(model) == plain
    before = model.tables.weight[0]
    model.to(torch.float64)
    assert model.tables.weight[0] is before and before.dtype == torch.float32
    assert not list(model.tables.parameters())


@pytest.mark.parametrize("rows", [{}, {"weight.1": torch.zeros(1, W)}])
def test_rows_of_another_shape_are_not_loaded(made, rows):
    tables = made()
    saved = tables.state_dict()
    del saved["weight.1"]
    with pytest.raises(RuntimeError, match=r"weight\.1 is not"):
        tables.load_state_dict({**saved, **rows})


def test_no_step_allocates_anything_of_the_size_of_the_vocabulary(made):
    tables = made(2, 50_000)
    rows = RowRMSprop(tables, state="number")
    with Largest() as mode:
        sum(row.sin().sum() for row in tables.lookup(tokens(2, 4))).backward()
        rows.step(lr=0.1)
        with torch.no_grad():
            list(tables.eval().lookup(tokens(2, 4, seed=2)))
    assert 0 < mode.numbers <= 2 * 8 * W


def test_copies_of_the_rows_go_to_a_device_that_cannot_read_them_and_gradients_are_there(made):
    """There they are scaled together with those of the layers."""
    tables = StoredTables(made().storage, "meta")  # a second device on any machine
    for mode in (tables.eval(), tables.train()):
        rows = list(mode.lookup(tokens(2, 4)))
        assert [each.device.type for each in rows] == ["meta"] * L
    sum(each.sum() for each in rows).backward()
    assert [grad.device.type for grad in tables.gradients()[1]] == ["meta"] * L
