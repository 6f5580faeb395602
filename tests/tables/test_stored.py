"""Tables whose rows are views of a file, read and updated in place: equal to resident ones."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from model import Decoder, ModelConfig
from tables.rmsprop import RowRMSprop
from tables.storage import DiskStorage, RamStorage
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


def filled(tables):
    torch.manual_seed(0)
    tables.init_rows(1.0)
    return tables


def resident() -> ResidentTables:
    return filled(ResidentTables(L, V, W))


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


def assert_same_training(a, b):
    """Losses, backbones, rows and what their optimizer keeps are equal to the bit."""
    assert a[0] == b[0]
    sides = []
    for _, model, rows in (a, b):
        dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
        sides.append([*dense, *model.tables.weight, *rows.state, rows.last])
    for x, y in zip(*sides, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.mark.parametrize("state", ["row", "number"])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_equals_resident_bit_for_bit(made, micro, state, dtype):
    stored = train(partial(made, dtype=dtype), micro, state=state)
    assert_same_training(stored, train(partial(ResidentTables, dtype=dtype), micro, state=state))
    assert stored[1].tables.weight[0].dtype == dtype
    assert list(stored[1].tables.storage.arrays) == ["rows", "state"][: 1 + (state == "number")]


@pytest.mark.parametrize("training", [False, True])
def test_rows_equal_those_of_an_embedding(made, training):
    tables = filled(made()).train(training)
    for number, shape in enumerate([(2, 4), (1, 1), (3, 9), (1, 40)]):
        ids = batch(number, shape)
        for row, weight in zip(tables.lookup(ids), resident().weight, strict=True):
            assert torch.equal(row, F.embedding(ids, weight))


def test_a_model_moves_its_tables_nowhere_and_counts_them(made):
    with torch.device("meta"):
        plain = Decoder(CONFIG).sizes()
    model = train(made, steps=1)[1]
    assert model.sizes() == plain
    before = model.tables.weight[0]
    model.to(torch.float64)
    assert model.tables.weight[0] is before and before.dtype == torch.float32
    assert not [name for name, _ in model.named_parameters() if name.startswith("tables.")]


@pytest.mark.parametrize("saved_as", ["resident", "stored"])
def test_state_of_one_home_opens_in_the_other(saved_as):
    def made(n_table, vocab_size, width):
        return StoredTables(RamStorage((vocab_size, n_table, width), torch.float32))

    kinds = [ResidentTables, made] if saved_as == "resident" else [made, ResidentTables]
    _, model, rows = train(kinds[0], steps=3, state="number")
    with torch.random.fork_rng():
        torch.manual_seed(9)
        other = Decoder(CONFIG, tables=kinds[1])
    other.load_state_dict(model.state_dict())
    other_rows = RowRMSprop(other.tables, state="number")
    other_rows.load_state_dict(rows.state_dict())
    assert other_rows.steps == 3
    assert_same_training(([], model, rows), ([], other, other_rows))
    broken = model.state_dict()
    broken["tables.weight.1"] = broken["tables.weight.1"][:1]
    with pytest.raises(RuntimeError, match=r"tables\.weight\.1"):
        other.load_state_dict(broken)
    del broken["tables.weight.1"]
    with pytest.raises(RuntimeError, match=r"tables\.weight\.1"):
        other.load_state_dict(broken)


class Largest(TorchDispatchMode):
    """The most numbers that any operation allocated."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                self.numbers = max(self.numbers, made.numel())
        return result


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
