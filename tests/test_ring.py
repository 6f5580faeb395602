"""Checks offloaded tables against resident ones, bit for bit, and the ring against what can go
wrong in it: hazards, errors, lookups left half-way."""

import contextlib
import copy
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ring
from homes import RamHome
from hotrows import HotRows
from model import Decoder, ModelConfig
from offload import OffloadedTables
from rowadam import RowAdam, round_stochastically
from tablefile import TableFile
from tables import ResidentTables

V, L, W = 23, 5, 6
# group_bytes=0: every table is a job of its own for the worker, however small.
RING = {f"{n} slots": dict(ring_slots=n, group_bytes=0) for n in (1, 2, 3, 8)}
RING |= {"groups of two": dict(group_bytes=2 * 8 * W * 4), "one group": {}}
RING |= {"in place": dict(gather="inplace")}
every_ring = pytest.mark.parametrize("options", RING.values(), ids=RING)


def home(kind: str, tmp_path, shape=(V, L, W), dtype=torch.float32):
    if kind == "ram":
        return RamHome(shape, dtype)
    return TableFile.create(tmp_path / f"{len(list(tmp_path.iterdir()))}.bin", shape, dtype)


def filled(tables):
    torch.manual_seed(0)
    tables.init_rows(1.0)
    return tables


def offloaded(options: dict | None = None, **more) -> OffloadedTables:
    return filled(OffloadedTables(RamHome((V, L, W), torch.float32), **(options or {}), **more))


def resident() -> ResidentTables:
    return filled(ResidentTables(L, V, W))


def batch(step: int, shape=(2, 4)) -> torch.Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(step))


def assert_rows(rows, ids, tables=None):
    """They are those of the resident tables."""
    for row, weight in zip(rows, (tables or resident()).weight, strict=True):
        assert torch.equal(row, F.embedding(ids, weight))


def step(tables, adam: RowAdam, number: int) -> None:
    """One training step in which every number of every table matters."""
    ids = batch(number)
    sum((rows.sin() * (i + 1)).sum() for i, rows in enumerate(tables.lookup(ids))).backward()
    adam.step(*tables.gradients(), lr=0.1)


# --- offloaded equals resident ---


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
        ids, grads = model.tables.gradients()
        adamw.step()
        adamw.zero_grad()
        rows.step(ids, grads, 0.05)
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


@pytest.mark.parametrize("kind", ["ram", "file"])
@pytest.mark.parametrize("micro", [1, 2])
@every_ring
def test_training_equals_resident_bit_for_bit(kind, options, micro, tmp_path):
    def made(n_table, vocab_size, width):
        return OffloadedTables(home(kind, tmp_path, (vocab_size, n_table, width)), **options)

    assert_same_training(train(made, micro), train(ResidentTables, micro))


@every_ring
def test_generated_text_equals_resident(options):
    def made(n_table, vocab_size, width):
        return OffloadedTables(RamHome((vocab_size, n_table, width), torch.float32), **options)

    texts = []
    for tables in (ResidentTables, made):
        torch.manual_seed(0)
        model = Decoder(CONFIG, tables=tables).eval()
        texts.append(model.generate(batch(0), 30, temperature=1.0, seed=1))  # past block_size
    assert torch.equal(*texts)


@every_ring
@pytest.mark.parametrize("training", [False, True])
def test_rows_equal_those_of_an_embedding(options, training):
    tables = offloaded(options).train(training)
    for number, shape in enumerate([(2, 4), (1, 1), (3, 9), (1, 40)]):  # slots grow
        assert_rows(tables.lookup(batch(number, shape)), batch(number, shape))


def test_a_model_moves_its_tables_nowhere_and_counts_them():
    with torch.device("meta"):
        plain = Decoder(CONFIG).sizes()
    model = train(lambda n, v, w: OffloadedTables(RamHome((v, n, w), torch.float32)), steps=1)[1]
    assert model.sizes() == plain
    before = model.tables.weight[0].data_ptr()
    model.to(torch.float64)
    assert (model.tables.weight[0].data_ptr(), model.tables.weight[0].dtype) == (
        before,
        torch.float32,
    )
    assert not [name for name, _ in model.named_parameters() if name.startswith("tables.")]


@pytest.mark.parametrize("saved_as", [ResidentTables, "offloaded"])
def test_state_of_one_home_opens_in_the_other(saved_as):
    def made(n_table, vocab_size, width):
        return OffloadedTables(
            RamHome((vocab_size, n_table, width), torch.float32), **RING["2 slots"]
        )

    kinds = [ResidentTables, made] if saved_as is ResidentTables else [made, ResidentTables]
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
    with pytest.raises(RuntimeError, match=r"tables.weight.1|table 1"):
        other.load_state_dict(broken)
    del broken["tables.weight.1"]
    with pytest.raises(RuntimeError, match=r"tables\.weight\.1"):
        other.load_state_dict(broken)


# --- what costs must not grow with ---


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


@pytest.mark.parametrize("options", [{}, dict(gather="inplace"), dict(cache_rows=4)])
def test_no_step_allocates_anything_of_the_size_of_the_vocabulary(options):
    vocab_size = 50_000
    tables = OffloadedTables(RamHome((vocab_size, 2, W), torch.float32), **options)
    adam = RowAdam(tables)
    for mode in (contextlib.nullcontext(), Largest()):  # the first step makes the slots
        with mode:
            step(tables, adam, 0)
            with torch.no_grad():
                list(tables.eval().lookup(batch(1)))
            tables.train()
    assert 0 < mode.numbers <= 2 * batch(0).numel() * W


def test_slots_stay_where_they_are():
    tables = offloaded(RING["3 slots"])
    list(tables.lookup(torch.arange(12)[None]))
    addresses = [slot.host.data_ptr() for slot in tables.slots]
    for number in range(20):
        list(tables.lookup(batch(number, (1, 1 + number % 12))))
    assert [slot.host.data_ptr() for slot in tables.slots] == addresses
    assert len(addresses) == 3


def test_each_distinct_row_is_gathered_once(monkeypatch):
    tables, gathered = offloaded(RING["2 slots"]), []
    gather = tables.gather_rows
    monkeypatch.setattr(
        tables,
        "gather_rows",
        lambda t, ids, out: (gathered.append((t, ids.tolist())), gather(t, ids, out)),
    )
    list(tables.lookup(torch.tensor([[5, 2, 5, 5], [2, 2, 5, 7]])))
    assert gathered == [(table, [2, 5, 7]) for table in range(L)]
    assert tables.moved == L * 3 * W * 4


def test_few_rows_are_read_where_they_are_and_as_they_are_now(tmp_path, monkeypatch):
    """A step of decoding on the CPU: asked of the disk at once, then no slot in between."""
    tables = filled(OffloadedTables(home("file", tmp_path)))
    asked, adam = [], RowAdam(tables)
    step(tables, adam, 0)
    monkeypatch.setattr(tables.home, "read_ahead", lambda *what: asked.append(what))
    monkeypatch.setattr(tables, "fetch", lambda *_: pytest.fail("brought through a slot"))
    moved, ids = tables.moved, torch.tensor([[5, 2, 5]])
    rows = list(tables.eval().lookup(ids))
    assert [(ids.tolist(), names) for ids, names in asked] == [([2, 5], ("rows",))]
    assert tables.moved - moved == L * 2 * W * 4
    plain = resident()
    step(plain, RowAdam(plain), 0)
    assert_rows(rows, ids, plain)
    with pytest.raises(IndexError, match=f"rows 0 to {V - 1}"):
        tables.lookup(torch.tensor([[V]]))


# --- what goes wrong ---


def test_ids_out_of_range_and_too_many_are_refused():
    tables = offloaded(RING["2 slots"], max_rows=3)
    for bad in (V, -1):
        with pytest.raises(IndexError, match=rf"rows 0 to {V - 1}"):
            tables.lookup(torch.tensor([[1, bad]]))
    with pytest.raises(ValueError, match="4 distinct tokens do not fit into slots of 3 rows"):
        tables.lookup(torch.tensor([[1, 2, 3, 4]]))
    ids = torch.tensor([[1, 2, 3, 3, 2]])
    assert_rows(tables.lookup(ids), ids)


@pytest.mark.parametrize("options", [RING["1 slots"], RING["3 slots"]])
def test_a_lookup_whose_slots_another_took_says_so(options):
    tables = offloaded(options)
    first = tables.lookup(batch(0))
    next(first)
    assert_rows(tables.lookup(batch(1)), batch(1))
    with pytest.raises(RuntimeError, match="lost its slots"):
        next(first)


@every_ring
@pytest.mark.parametrize("read", [0, 1, 3])
def test_a_lookup_left_half_way_leaves_everything_usable(options, read):
    plain, tables = resident(), offloaded(options)
    adams = RowAdam(plain), RowAdam(tables)
    for number in range(4):
        for side, adam in zip((plain, tables), adams, strict=True):
            left = side.lookup(batch(number + 50))  # a layer failed here
            for _ in range(read):
                next(left)
            step(side, adam, number)
    tables.flush()
    for a, b in zip(plain.weight, tables.weight, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_slow_gather_is_waited_for(slots, monkeypatch):
    tables = offloaded(RING[f"{slots} slots"])
    gather = tables.gather_rows
    monkeypatch.setattr(tables, "gather_rows", lambda *args: (time.sleep(0.02), gather(*args)))
    assert_rows(tables.lookup(batch(0)), batch(0))


def test_a_gather_that_hangs_becomes_an_error(monkeypatch):
    tables, go_on = offloaded(RING["2 slots"]), threading.Event()
    monkeypatch.setattr(ring, "PATIENCE", 0.05)
    gather = tables.gather_rows
    monkeypatch.setattr(tables, "gather_rows", lambda *args: (go_on.wait(30), gather(*args)))
    with pytest.raises(RuntimeError, match=r"reading tables 0 to 0 has not ended after"):
        next(tables.lookup(batch(0)))
    for _ in range(2):  # its slot is still in use
        with pytest.raises(RuntimeError, match="has not ended after"):
            tables.lookup(batch(1))
    with pytest.raises(RuntimeError, match="has not ended after"):
        tables.state_dict()
    go_on.set()


@pytest.mark.parametrize("error", [OSError("bad sector"), SystemExit("killed")])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_worker_that_dies_becomes_an_error(error, at, monkeypatch):
    tables = offloaded(RING["2 slots"])

    def dies(table, ids, out):
        if table == at:
            raise error
        OffloadedTables.gather_rows(tables, table, ids, out)

    with monkeypatch.context() as patch:
        patch.setattr(tables, "gather_rows", dies)
        rows = tables.lookup(batch(0))
        for weight in resident().weight[:at]:
            assert torch.equal(next(rows), F.embedding(batch(0), weight))
        with pytest.raises(RuntimeError, match=f"reading tables {at} to {at} failed: .*{error}"):
            next(rows)
    assert_rows(tables.lookup(batch(1)), batch(1))


def test_rows_half_way_between_steps_are_never_saved_either_if_they_are_updated_in_place():
    tables = offloaded(RING["in place"])
    adam = RowAdam(tables)
    grads = [torch.ones(1, W)] * (L - 1) + [torch.ones(1, W + 1)]  # that does not fit
    with pytest.raises(RuntimeError):
        adam.step(torch.tensor([1]), grads, lr=0.1)
    with pytest.raises(RuntimeError, match="an update failed"):
        tables.state_dict()


def test_loading_moments_comes_after_the_updates_that_wait():
    tables = offloaded(RING["2 slots"])
    adam = RowAdam(tables)
    fresh = {
        name: [x.clone() for x in value] if isinstance(value, list) else copy.copy(value)
        for name, value in adam.state_dict().items()
    }
    fresh["count"], fresh["last"] = fresh["count"].clone(), fresh["last"].clone()
    step(tables, adam, 0)
    assert tables.pending
    adam.load_state_dict(fresh)
    tables.flush()
    assert all(not x.any() for x in [*adam.m, *adam.v, adam.count, adam.last])


def test_rows_half_way_between_steps_are_never_read_or_saved():
    tables = offloaded(RING["2 slots"])
    adam = RowAdam(tables)
    step(tables, adam, 0)
    ids, (*grads, _) = batch(1).unique(), [torch.ones(len(batch(1).unique()), W)] * L
    adam.step(ids, [*grads, torch.ones(1, W + 1)], lr=0.1)  # a gradient that does not fit
    with pytest.raises(RuntimeError, match=f"reading tables {L - 1} to {L - 1} failed"):
        list(tables.lookup(batch(1)))
    with pytest.raises(RuntimeError, match="an update failed"):
        list(tables.lookup(batch(1)))
    with pytest.raises(RuntimeError, match="an update failed"):
        tables.state_dict()


# --- hazards ---


@pytest.mark.parametrize("guarded", [True, False])
def test_h3_a_row_is_updated_before_it_is_read_again(guarded, monkeypatch):
    """The guard is to settle a table before its rows are gathered; without it they are stale."""
    plain, tables = resident(), offloaded(RING["2 slots"])
    if not guarded:
        settle = tables.settle
        monkeypatch.setattr(
            tables,
            "settle",
            lambda *t: (
                settle(*t) if threading.current_thread() is threading.main_thread() else None
            ),
        )
    adams = RowAdam(plain), RowAdam(tables)
    step(plain, adams[0], 0)
    step(tables, adams[1], 0)
    same = [
        torch.equal(*rows)
        for rows in zip(*(t.lookup(batch(0)) for t in (plain, tables)), strict=True)
    ]
    assert all(same) if guarded else not any(same)


# --- the cache of hot rows ---


@pytest.mark.parametrize("size", [1, 4, V])
@pytest.mark.parametrize("options", [RING["2 slots"], {}, RING["groups of two"]])
def test_cached_rows_are_those_of_the_tables(size, options):
    tables = offloaded(options, cache_rows=size).eval()
    for number in range(30):
        ids = batch(number % 7, (1, 1 + number % 9))
        assert_rows(tables.lookup(ids), ids)
    assert 0 < tables.cache.hits <= tables.cache.tokens
    before = tables.moved
    ids = tables.cache.token[tables.cache.token >= 0][None]
    assert_rows(tables.lookup(ids), ids)
    assert tables.moved == before  # a hit moves nothing


def test_the_least_frequently_used_leaves_first():
    cache = HotRows(2, [torch.zeros(V, W)], torch.device("cpu"))

    def read(*ids):
        ids, times = torch.tensor(ids).unique(return_counts=True)
        place = cache.find(ids, times)
        missed = ids[place < 0]
        best, places = cache.admit(missed)
        cache.enter(missed[best], places)

    read(1, 1, 1, 2)
    assert sorted(cache.token.tolist()) == [1, 2]
    read(3)  # as often as 2: no reason to change
    assert sorted(cache.token.tolist()) == [1, 2]
    read(3)
    assert sorted(cache.token.tolist()) == [1, 3]
    read(4, 4, 4, 4, 5, 5, 5)
    assert sorted(cache.token.tolist()) in ([4, 5], [1, 4])  # 1 and 5: three times each
    assert cache.place[cache.token].tolist() == [0, 1]
    assert (cache.hits, cache.tokens) == (0, 13)


def test_a_model_that_writes_hits_the_cache():
    """A decoder asks for the rows of all tables, and never for what would follow them."""
    torch.manual_seed(0)
    config = ModelConfig(V, 40, 3, 2, 16, stem_layers="all", table_std=1.0)
    model = Decoder(
        config,
        tables=lambda n, v, w: OffloadedTables(
            RamHome((v, n, w), torch.float32), cache_rows=V, gather="ring"
        ),
    ).eval()
    model.generate(torch.tensor([[1, 2, 3]]), 36, temperature=1.0, seed=0)
    assert model.tables.cache.tokens == 38
    seen = int((model.tables.cache.token >= 0).sum())  # every token is missed just once
    assert model.tables.cache.hits >= 38 - seen - 1 > 0


def test_loading_rows_drops_the_updates_that_wait_for_the_old_ones():
    tables = offloaded(dict(group_bytes=0))
    saved = {name: rows.clone() for name, rows in tables.state_dict().items()}
    step(tables, RowAdam(tables), 0)
    assert tables.pending
    tables.load_state_dict(saved)
    tables.flush()
    assert_rows(tables.eval().lookup(batch(1)), batch(1))


@pytest.mark.parametrize("options", [dict(ring_slots=2, group_bytes=0), RING["groups of two"]])
def test_rows_that_are_read_next_are_updated_first_and_the_others_behind(options, monkeypatch):
    tables, log = offloaded(options), []
    adam = RowAdam(tables)
    update, gather = adam.update, tables.gather_rows

    def updated(table, ids, step, number, grad, some=None):
        log.append(("update", table, (ids if some is None else ids[some]).tolist()))
        update(table, ids, step, number, grad, some)

    monkeypatch.setattr(adam, "update", updated)
    monkeypatch.setattr(
        tables, "gather_rows", lambda t, *args: (log.append(("gather", t)), gather(t, *args))
    )
    plain = resident()
    for table in (plain, tables):
        optimizer = adam if table is tables else RowAdam(plain)
        sum((rows * rows).sum() for rows in table.lookup(torch.tensor([[1, 3, 5, 7]]))).backward()
        optimizer.step(*table.gradients(), lr=0.1)
    log.clear()
    ids = torch.tensor([[3, 4, 7, 9]])
    assert_rows(tables.lookup(ids), ids, plain)
    for job in tables.flight.rest:
        job.result()
    assert [entry for entry in log if entry[0] == "gather"] == [("gather", t) for t in range(L)]
    for table in range(L):
        first = log.index(("update", table, [3, 7]))
        assert first < log.index(("gather", table)) < log.index(("update", table, [1, 5]))
        assert log.index(("update", table, [1, 5])) > log.index(("gather", L - 1))
    assert len(log) == 3 * L and not tables.pending
    assert all(torch.equal(a, b) for a, b in zip(tables.weight, plain.weight, strict=True))


def test_a_step_does_not_forget_what_waits_of_the_one_before():
    plain, tables = resident(), offloaded(RING["2 slots"])
    for table in (plain, tables):
        adam = RowAdam(table)
        for number in range(3):  # nothing is read between them
            ids = torch.tensor([number, number + 2])
            adam.step(ids, [torch.full((2, W), t + 1.0) for t in range(L)], lr=0.1)
        table.flush()
    assert all(torch.equal(a, b) for a, b in zip(tables.weight, plain.weight, strict=True))


def test_an_update_that_fails_behind_a_lookup_is_not_forgotten():
    tables = offloaded(RING["2 slots"])
    adam = RowAdam(tables)
    step(tables, adam, 0)
    adam.step(torch.tensor([1, 3]), [torch.ones(1, W)] * L, lr=0.1)  # without a gradient for 3
    ids = torch.tensor([[1, 1]])
    assert all(row.isfinite().all() for row in tables.lookup(ids))
    with pytest.raises((RuntimeError, IndexError)):
        for job in tables.flight.rest:
            job.result()
    with pytest.raises(RuntimeError, match="an update failed"):
        tables.state_dict()


def test_training_empties_the_cache_and_a_lookup_left_half_way_enters_nothing():
    plain, tables = resident(), offloaded(RING["1 slots"], cache_rows=8)
    adams = RowAdam(plain), RowAdam(tables)
    for number in range(6):
        with torch.no_grad():
            left = tables.eval().lookup(batch(number + 7))
            next(left)
            assert_rows(tables.lookup(batch(number)), batch(number), plain)
        assert (tables.cache.token >= 0).any()
        step(plain.train(), adams[0], number)
        step(tables.train(), adams[1], number)
        assert (tables.cache.token < 0).all() and (tables.cache.place < 0).all()


# --- bfloat16 ---


def test_stochastic_rounding_hits_neighbours_with_the_right_mean():
    x = torch.tensor([1.0, 1.0 + 1 / 512, -3.3, 1e-30, 0.0]).expand(40_000, 5).contiguous()
    rounded = round_stochastically(x, torch.Generator().manual_seed(0))
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded[:, [0, 4]].float(), x[:, [0, 4]])  # what is exact stays
    for column in (1, 2, 3):
        values = rounded[:, column].float().unique()
        assert len(values) == 2 and values[0] < x[0, column] < values[1]
        gap = (values[1] - values[0]).item()
        assert rounded[:, column].double().mean().item() == pytest.approx(
            x[0, column].item(), abs=gap / 50
        )


@pytest.mark.parametrize("kind", ["ram", "file"])
def test_bfloat16_trains_alike_in_every_home_and_resumes(kind, tmp_path):
    def made(n_table, vocab_size, width):
        return OffloadedTables(
            home(kind, tmp_path, (vocab_size, n_table, width), torch.bfloat16), **RING["2 slots"]
        )

    def bfloat16(*shape):
        return ResidentTables(*shape, dtype=torch.bfloat16)

    whole = train(bfloat16)
    assert whole[1].tables.weight[0].dtype == torch.bfloat16
    assert_same_training(train(made), whole)
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
        adam.step(ids, [torch.ones(512, 64)], lr=1e-4)  # a 78th of the spacing below 1
    moved = 1 - tables.weight[0].double().mean().item()
    assert moved == pytest.approx(40 * 1e-4, rel=0.05)
