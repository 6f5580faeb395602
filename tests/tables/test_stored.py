"""Tables whose rows are views of a file, read and updated in place: equal to resident ones."""

from functools import partial

import pytest
import torch
from conftest import Largest, assert_same

from model import Decoder, ModelConfig
from tables.rmsprop import RowRMSprop
from tables.storage import DiskStorage
from tables.tables import ResidentTables, StoredTables

V, L, W = 23, 5, 6


@pytest.fixture
def made(tmp_path):
    """What makes tables when called as (n_table, V, W), optionally of another dtype."""

    def make(n_table=L, vocab_size=V, width=W, dtype=torch.float32):
        shape = (vocab_size, n_table, width)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return StoredTables(DiskStorage.create(folder, shape, dtype))

    return make


def batch(step: int, shape=(2, 4)) -> torch.Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(step))


CONFIG = ModelConfig(V, 16, 4, 2, 16, stem_layers="all", table_std=0.5)


def train(tables, micro: int = 1, steps: int = 20, state: str = "row"):
    """Losses, model and optimizer of its tables after some steps."""
    torch.manual_seed(0)
    model = Decoder(CONFIG, tables=tables)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    rows = RowRMSprop(model.tables, state=state, seed=3)
    losses = []
    for number in range(steps):
        for part in batch(number, (4, 8)).chunk(micro):
            loss = model(part, part)[1]
            loss.backward()
            losses.append(loss.item())
        adamw.step()
        adamw.zero_grad()
        rows.step(0.05)
        if number == 7:  # reading between steps changes nothing
            with torch.no_grad():
                losses.append(model.eval()(part, part)[1].item())
            model.train()
    model.tables.flush()
    return losses, model, rows


@pytest.mark.parametrize("state", ["row", "number"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_equals_resident_bit_for_bit(made, micro, state, dtype):
    runs = []
    for tables in (made, ResidentTables):
        losses, model, rows = train(partial(tables, dtype=dtype), micro, state=state)
        assert model.tables.weight[0].dtype == dtype
        dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
        kept = [*dense, *model.tables.weight, *rows.state, rows.last]
        runs.append([losses, [tensor.data for tensor in kept]])
        if tables is made:
            names = ["rows", "state"] if state == "number" else ["rows"]
            assert list(model.tables.storage.arrays) == names
    assert_same(*runs)


def test_a_model_moves_its_tables_nowhere_and_counts_them(made):
    with torch.device("meta"):
        plain = Decoder(CONFIG).sizes()
    model = train(made, steps=1)[1]
    assert model.sizes() == plain
    before = model.tables.weight[0]
    model.to(torch.float64)
    assert model.tables.weight[0] is before and before.dtype == torch.float32
    assert not [name for name, _ in model.named_parameters() if name.startswith("tables.")]


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
        sum(row.sin().sum() for row in tables.lookup(batch(0))).backward()
        rows.step(lr=0.1)
        with torch.no_grad():
            list(tables.eval().lookup(batch(1)))
    assert 0 < mode.numbers <= 2 * batch(0).numel() * W


def test_rows_are_asked_of_the_disk_at_once_before_they_are_read(made, monkeypatch):
    tables = made()
    tables.add_state()
    asked = []
    monkeypatch.setattr(tables.storage, "read_ahead", lambda _, names: asked.append(list(names)))
    ids = torch.tensor([[5, 2, 5]])
    next(tables.lookup(ids))
    next(tables.eval().lookup(ids))
    assert asked == [["rows", "state"], ["rows"]]


def test_copies_of_the_rows_go_to_a_device_that_cannot_read_them(made):
    tables = StoredTables(made().storage, "meta")  # a second device on any machine
    for mode in (tables.train(), tables.eval()):
        assert [rows.device.type for rows in mode.lookup(batch(0))] == ["meta"] * L
