"""Tables whose rows are views of a file, read and updated in place: equal to resident ones."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from model import Decoder, ModelConfig
from tables.rowadam import RowAdam, round_stochastically
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


def step(tables, adam: RowAdam, number: int) -> None:
    """One training step in which every number of every table matters."""
    ids = batch(number)
    sum((rows.sin() * (i + 1)).sum() for i, rows in enumerate(tables.lookup(ids))).backward()
    adam.step(lr=0.1)


CONFIG = ModelConfig(V, 16, 4, 2, 16, stem_layers="all", table_std=0.5)


def train(tables, micro: int = 1, steps: int = 20):
    """Losses, model and optimizer after some steps."""
    torch.manual_seed(0)
    model = Decoder(CONFIG, tables=tables)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    rows, losses = RowAdam(model.tables, weight_decay=0.01, seed=3), []
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
    """Losses, backbones, rows, moments and counts are equal to the bit."""
    assert a[0] == b[0]
    sides = []
    for _, model, rows in (a, b):
        dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
        sides.append([*dense, *model.tables.weight, *rows.m, *rows.v, rows.count, rows.last])
    for x, y in zip(*sides, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.mark.parametrize("micro", [1, 2])
def test_training_equals_resident_bit_for_bit(made, micro):
    assert_same_training(train(made, micro), train(ResidentTables, micro))


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
    _, model, rows = train(kinds[0], steps=3)
    with torch.random.fork_rng():
        torch.manual_seed(9)
        other = Decoder(CONFIG, tables=kinds[1])
    other.load_state_dict(model.state_dict())
    other_rows = RowAdam(other.tables)
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
    adam = RowAdam(tables)
    with Largest() as mode:
        step(tables, adam, 0)
        with torch.no_grad():
            list(tables.eval().lookup(batch(1)))
    assert 0 < mode.numbers <= 2 * batch(0).numel() * W


def test_rows_are_asked_of_the_disk_at_once_before_they_are_read(made, monkeypatch):
    tables, asked = made(), []
    monkeypatch.setattr(tables.storage, "read_ahead", lambda ids, names: asked.append((ids, names)))
    ids = torch.tensor([[5, 2, 5]])
    next(tables.lookup(ids))
    next(tables.eval().lookup(ids))
    assert [names for _, names in asked] == [("rows", "m", "v"), ("rows",)]
    assert all(torch.equal(wanted, ids) for wanted, _ in asked)


def test_copies_of_the_rows_go_to_a_device_that_cannot_read_them(made):
    tables = StoredTables(made().storage, "meta")  # a second device on any machine
    for mode in (tables.train(), tables.eval()):
        assert [rows.device.type for rows in mode.lookup(batch(0))] == ["meta"] * L


# --- bfloat16 ---


def test_stochastic_rounding_hits_neighbours_with_the_right_mean():
    x = torch.tensor([1.0, 1.0 + 1 / 512, -3.3, 1e-30, 0.0]).expand(40_000, 5).contiguous()
    rounded = round_stochastically(x, torch.Generator().manual_seed(0))
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded[:, [0, 4]].float(), x[:, [0, 4]])  # what is exact stays
    for column in (1, 2, 3):
        values = rounded[:, column].float().unique()
        assert len(values) == 2 and values[0] < x[0, column] < values[1]
        off = rounded[:, column].double().mean() - x[0, column]
        assert abs(off) < (values[1] - values[0]) / 50


def test_bfloat16_trains_alike_in_every_home_and_resumes(made):
    def bfloat16(*shape):
        return ResidentTables(*shape, dtype=torch.bfloat16)

    whole = train(bfloat16)
    assert whole[1].tables.weight[0].dtype == torch.bfloat16
    assert_same_training(train(lambda *shape: made(*shape, torch.bfloat16)), whole)
    # The random bits of a step do not depend on what was drawn before.
    tables = [filled(ResidentTables(1, V, W, dtype=torch.bfloat16)) for _ in range(2)]
    adams = [RowAdam(t, seed=1) for t in tables]
    step(tables[0], adams[0], 0)
    tables[1].load_state_dict(tables[0].state_dict())
    adams[1].load_state_dict(adams[0].state_dict())
    torch.manual_seed(99)
    for t, adam in zip(tables, adams, strict=True):
        step(t, adam, 1)
    assert torch.equal(tables[0].weight[0], tables[1].weight[0])


def test_small_steps_are_not_lost_in_bfloat16():
    tables = ResidentTables(1, 512, 64, dtype=torch.bfloat16)
    tables.init_rows(1e-9)
    tables.weight[0].fill_(1.0)
    adam, ids = RowAdam(tables), torch.arange(512)
    for _ in range(40):
        adam.step(1e-4, (ids, [torch.ones(512, 64)]))  # a 78th of the spacing below 1
    moved = 1 - tables.weight[0].double().mean().item()
    assert moved == pytest.approx(40 * 1e-4, rel=0.05)
