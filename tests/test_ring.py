"""Checks offloaded tables against resident ones, bit for bit, and the ring against what can go
wrong in it: hazards, errors, lookups left half-way."""

import pytest
import torch

from model import Decoder, ModelConfig
from offload import OffloadedTables, RamHome, ResidentTables
from rowadam import RowAdam
from tablefile import TableFile

V, L, W = 23, 5, 6
# group_bytes=0: every table is a job of its own for the worker, however small.
RING = {f"{n} slots": dict(ring_slots=n, group_bytes=0) for n in (1, 2, 3, 8)}
RING |= {
    "groups of two": dict(group_bytes=2 * 8 * W * 4),
    "one group": {},
    "in place": dict(gather="inplace"),
}


def home(kind: str, tmp_path, dtype=torch.float32, shape=(V, L, W)):
    if kind == "ram":
        return RamHome(shape, dtype)
    return TableFile.create(tmp_path / f"{len(list(tmp_path.iterdir()))}.bin", shape, dtype)


def filled(kind: str, tmp_path, **options) -> OffloadedTables:
    made = OffloadedTables(home(kind, tmp_path), **options)
    torch.manual_seed(0)
    made.init_rows(1.0)
    return made


def resident() -> ResidentTables:
    made = ResidentTables(L, V, W)
    torch.manual_seed(0)
    made.init_rows(1.0)
    return made


def batch(step: int, shape=(2, 4)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(V, shape, generator=generator)


# --- offloaded equals resident ---


CONFIG = ModelConfig(V, 16, 4, 2, 16, stem_layers="all", table_std=0.5)


def train(
    tables, steps: int = 20, micro: int = 1, dtype=torch.float32
) -> tuple[list, Decoder, RowAdam]:
    torch.manual_seed(0)
    model = Decoder(CONFIG, tables=tables)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    rows, losses = RowAdam(model.tables, weight_decay=0.01), []
    for step in range(steps):
        for part in batch(step, (4, 8)).chunk(micro):
            loss = model(part, part)[1]
            loss.backward()
            losses.append(loss.item())
        ids, grads = model.tables.gradients()
        adamw.step()
        adamw.zero_grad()
        rows.step(ids, grads, 0.05)
        if step == 7:  # reading between steps changes nothing
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
        sides.append([*dense, *model.tables.weight, *rows.m, *rows.v, rows.count])
    for x, y in zip(*sides, strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("kind", ["ram", "file"])
@pytest.mark.parametrize("options", RING.values(), ids=RING)
def test_training_equals_resident_bit_for_bit(kind, options, micro, tmp_path):
    def offloaded(n_table, vocab_size, width):
        return OffloadedTables(home(kind, tmp_path, shape=(vocab_size, n_table, width)), **options)

    assert_same_training(train(offloaded, micro=micro), train(ResidentTables, micro=micro))
