"""Offloaded tables against resident ones, to the bit, and the ring against what can go wrong in it.

What needs a GPU runs on a simulated one (simulated_gpu.py), and on a real one if there is one.
"""

import copy
import importlib.util
import inspect
import re
import sys
from contextlib import suppress
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from simulated_gpu import SimulatedGpu, Worker
from torch import nn

import offload
from offload import OffloadedTables, TransferRing
from tables import zero_copy
from tables.rmsprop import RowRMSprop
from tables.storage import DiskStorage, RamStorage
from tables.tables import ResidentTables
from tables.zero_copy import ZeroCopy
from training.checks import check_trained

V, L, W = 128, 3, 4  # vocabulary, tables, width
ROWS = V, L, W
CHUNK = 13 * L * W * 8  # bytes: transfers of a few tokens, so that one takes several of them
FEW = 3 * L * W * 4  # bytes


@pytest.fixture(autouse=True)
def three_are_few(monkeypatch):
    """Of more rows than three tokens have, the distinct ones are sent, table by table."""
    for transfers in (ZeroCopy, TransferRing):
        monkeypatch.setattr(transfers, "few_bytes", FEW)


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request):
    if request.param == "cuda":
        yield SimpleNamespace(device=torch.device("cuda"), synchronize=torch.cuda.synchronize)
    else:
        with SimulatedGpu() as simulated:
            yield simulated


def filled(tables):
    torch.manual_seed(0)
    tables.init_rows(1.0)
    return tables


def resident() -> ResidentTables:
    return filled(ResidentTables(L, V, W))


def offloaded(gpu) -> OffloadedTables:
    storage = RamStorage(ROWS, torch.float32)
    return filled(OffloadedTables(storage, gpu.device, chunk_bytes=CHUNK))


def batch(number: int, shape=(2, 4)) -> torch.Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(number))


def loss_of(rows) -> torch.Tensor:
    """A loss in which every number of every table matters."""
    return sum((row.sin() * (table + 1)).sum() for table, row in enumerate(rows))


def train(tables, optimizer: RowRMSprop, ids: torch.Tensor, later=None) -> None:
    """A training step. `later` is announced."""
    loss = loss_of(tables.train().lookup(ids))
    if later is not None:
        tables.prefetch(later)
    loss.backward()
    optimizer.step(lr=0.1)


def all_equal(gpu, tables, ids) -> bool:
    """Whether a lookup gives the rows that are stored."""
    with torch.no_grad():
        rows = list(tables.eval().lookup(ids))
    gpu.synchronize()
    pairs = zip(rows, tables.weight, strict=True)
    return all(torch.equal(row.cpu(), F.embedding(ids, weight.cpu())) for row, weight in pairs)


# --- equal to resident tables, whatever the schedule ---


def work(make, state: str = "number") -> list[torch.Tensor]:
    """What steps of training, evaluation and decoding see, then what is stored after them.

    Batches overlap partly, fully (5 and 6) or not at all (8), some are announced, wrongly, too;
    some are accumulated; lookups are left half-way, the tables are saved between steps.
    """

    def ids(number):
        if number == 8:
            return torch.arange(V - 6, V)[None].expand(2, 6)
        made = batch(5 if number == 6 else number, (2, 4 + 12 * (number % 7)))  # slots grow
        return made % (V - 6)

    tables = make()
    optimizer = RowRMSprop(tables, state=state)
    seen = []
    tables.prefetch(ids(1)[:, :2])
    tables.prefetch(ids(1))  # slots grow while records are on their way
    for number in range(11):
        if number in (2, 4):  # lookups that are left: half-way, and after all was read
            rows = tables.lookup(ids(11))
            seen += [row.detach() * 2 for row in (rows if number == 4 else [next(rows)])]
            tables.zero_grad()
        parts = ids(number).chunk(1 + number % 2)
        for part in parts:
            loss = loss_of(islice(tables.lookup(part), 1 if number == 7 else L))
            if number == 2:  # more comes while some is on its way
                tables.prefetch(ids(3)[:, :4])
            if part is parts[-1] and number not in (3, 6, 7):
                tables.prefetch(ids(number + 1 if number != 4 else 12))
            loss.backward()
        if number == 4:  # saved between the passes and the update
            tables.flush()
        optimizer.step(lr=0.1)
        if number % 3 == 2:
            tables.eval()
            with torch.no_grad():
                if number == 5:
                    next(tables.lookup(ids(11)))  # is left
                few = ids(number)[:, :4].split(1, dim=1)
                for part in (ids(number), *few[:3], ids(number + 1), few[3]):
                    seen += [row * 2 for row in tables.lookup(part)]
            tables.train()
        if number in (1, 3, 5, 6):
            tables.flush()
            with torch.no_grad():
                tables.weight[0].add_(1)  # by hand, where they are stored
            seen += [weight.detach().to("cpu", copy=True) for weight in tables.weight]
    tables.flush()
    stored = [*tables.weight, *optimizer.state, optimizer.last]
    return [x.detach().to("cpu", copy=True) for x in [*stored, *seen]]


@cache
def work_of_resident(device: torch.device, state: str = "number") -> list[torch.Tensor]:
    return work(lambda: resident().to(device), state)


def check(
    gpu, expected, n_buffer: int, full: bool, state="number", storage=None, module=offload
) -> None:
    """Work is the same as with resident tables, without a hazard. full: slots do not grow."""

    def make():
        stored = storage or RamStorage(ROWS, torch.float32)
        made = filled(module.OffloadedTables(stored, gpu.device, chunk_bytes=CHUNK))
        if full:
            made.prefetch(torch.arange(V)[None])
        return made.train()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.TransferRing, "n_buffer", n_buffer)
        found = work(make, state)
    for mine, there in zip(found, expected, strict=True):
        assert torch.equal(mine, there)


@pytest.mark.parametrize(
    ("n_buffer", "full", "state", "on_disk"),
    [(2, False, "number", False), (2, False, "number", True), (3, True, "row", True)],
)
def test_work_on_the_gpu_equals_resident_tables_there_to_the_bit(
    gpu, tmp_path, n_buffer, full, state, on_disk
):
    there = work_of_resident(gpu.device, state)
    storage = DiskStorage.create(tmp_path / "tables", ROWS, torch.float32) if on_disk else None
    check(gpu, there, n_buffer, full, state, storage)


WAYS = [(True, 3, True), (False, 2, False)]  # by kernels; and by a ring, of so many buffers
LINES = [
    (module, n, line.strip())
    for module in (zero_copy, offload)
    for n, line in enumerate(inspect.getsource(module).splitlines())
]
GUARDS = (".synchronize()", ".wait_event(", ".record(", ".record_event(", ".record_stream(")
GUARDS += (".record_free()", ".wait_for(", "self.flush()", "store(*", ".last.result()")
GUARDED = [found for found in LINES if any(g in found[2].split("#")[0] for g in GUARDS)]


def test_no_guard_is_overlooked():
    """They are found by what they call: under another name one would not be tested."""
    assert len(GUARDED) == 23


@pytest.mark.parametrize("guard", GUARDED, ids=lambda guard: guard[2])
def test_every_guard_is_needed(guard, monkeypatch, tmp_path):
    """Without a line that makes one side wait for another there is a hazard, or a wrong result."""
    of_module, number, line = guard
    expected = work_of_resident(torch.device("cpu"))
    nothing = re.sub(r"[\w.()]+\.record_event\(\)", "torch.cuda.Event()", line)
    for module in (zero_copy, offload):  # which imports the other
        lines = inspect.getsource(module).splitlines()
        if module is of_module:
            lines[number] = lines[number].replace(line, nothing if nothing != line else "pass")
        path = tmp_path / Path(module.__file__).name  # Triton reads the source of its kernels
        path.write_text("\n".join(lines))
        spec = importlib.util.spec_from_file_location(module.__name__, path)
        without = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(without)
        monkeypatch.setitem(sys.modules, module.__name__, without)
    without.ThreadPoolExecutor = Worker
    without.ZeroCopy.few_bytes = without.TransferRing.few_bytes = FEW
    with pytest.raises((AssertionError, RuntimeError)):
        for pins, *way in WAYS if of_module is zero_copy else WAYS[::-1]:
            with SimulatedGpu(pins) as gpu:
                without.seen_by_gpu = gpu.seen_by_gpu
                check(gpu, expected, *way, module=without)


def announce_before_rows_are_read(tables, optimizer) -> None:
    rows = tables.lookup(batch(0))
    tables.prefetch(batch(0))
    loss_of(rows).backward()
    optimizer.step(0.1)


def differentiate_again_after_a_step(tables, optimizer) -> None:
    one = loss_of(tables.lookup(batch(0)))
    one.backward(retain_graph=True)
    optimizer.step(0.1)
    two = loss_of(tables.lookup(batch(1)))
    tables.prefetch(batch(0))
    (one + two).backward()
    optimizer.step(0.1)


def save_before_the_backward_pass(tables, optimizer) -> None:
    loss = loss_of(tables.lookup(batch(0)))
    tables.zero_grad()
    tables.flush()
    tables.prefetch(batch(0))
    loss.backward()
    optimizer.step(0.1)


def draw_rows_anew(tables, optimizer) -> None:
    train(tables, optimizer, batch(0), batch(1))
    filled(tables)


def fail_to_fetch(tables, optimizer) -> None:
    train(tables, optimizer, batch(0))
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(tables, OffloadedTables):
            patch.setattr(tables.transfers, "fetch", Mock(side_effect=torch.OutOfMemoryError))
        with suppress(torch.OutOfMemoryError):  # as a user may, or end a cell by Ctrl-C there
            tables.prefetch(batch(1))
    train(tables, optimizer, batch(1))


def announce_rows_of_an_earlier_micro_batch_after_an_evaluation(tables, optimizer) -> None:
    """They are on their way when the optimizer updates them."""
    loss_of(tables.lookup(batch(0))).backward()
    with torch.no_grad():
        list(tables.eval().lookup(batch(1)))
    rows = list(tables.train().lookup(batch(1)))
    tables.prefetch(batch(0))
    loss_of(rows).backward()
    optimizer.step(0.1)


def go_on_with_a_second_optimizer(tables, optimizer) -> None:
    """It begins with moments of its own."""
    train(tables, optimizer, batch(0))
    train(tables, RowRMSprop(tables, state="number"), batch(1))


def load_what_was_saved(*order: int):
    """Tables (0) and their optimizer (1): what is on the device is replaced."""

    def act(tables, optimizer) -> None:
        parts = (tables, optimizer)
        saved = copy.deepcopy([part.state_dict() for part in parts])
        train(tables, optimizer, batch(0))
        for number in order:
            parts[number].load_state_dict(saved[number])
        train(tables, optimizer, batch(0))

    return act


@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize(
    "act",
    [
        announce_before_rows_are_read,
        differentiate_again_after_a_step,
        save_before_the_backward_pass,
        draw_rows_anew,
        fail_to_fetch,
        announce_rows_of_an_earlier_micro_batch_after_an_evaluation,
        go_on_with_a_second_optimizer,
        load_what_was_saved(0, 1),
        load_what_was_saved(1, 0),
    ],
)
def test_what_own_loops_do_equals_resident_tables(act, pins):
    def stored(tables) -> torch.Tensor:
        optimizer = RowRMSprop(tables, state="number")
        act(tables.train(), optimizer)
        tables.flush()
        return torch.stack([*tables.weight, *tables.state])

    with SimulatedGpu(pins) as gpu:
        mine = stored(offloaded(gpu))
    assert torch.equal(mine, stored(resident()))


# --- what it costs ---


@pytest.mark.parametrize("make", [offloaded, lambda gpu: resident().to(gpu.device)])
def test_the_host_waits_in_no_step_of_training_and_of_decoding(make, monkeypatch):
    with SimulatedGpu() as gpu:
        tables = make(gpu)
        optimizer = RowRMSprop(tables)
        for number in (1, 1, 2):
            train(tables, optimizer, batch(number, (2, 30)))
        before = gpu.host.waits
        for number in (3, 4):
            train(tables, optimizer, batch(number, (2, 20)), batch(number + 1, (2, 20)))
        assert gpu.host.waits == before
        assert all_equal(gpu, tables, torch.tensor([[9], [3], [9]]))  # stores what training left
        before = gpu.host.waits
        for transfer in ("fetch", "write_back"):
            monkeypatch.setattr(ZeroCopy, transfer, lambda *_: pytest.fail("one"))
        with torch.no_grad():
            list(tables.eval().lookup(torch.tensor([[5], [5]])))
        assert gpu.host.waits == before


def test_what_crosses_the_bus_is_what_comes_and_what_leaves(monkeypatch):
    crossed = []
    copy_records = zero_copy.copy_records

    def counted(stored, on_device, moves, tables, to_device):
        crossed.append(len(moves) * len(range(L)[tables]) / L)
        copy_records(stored, on_device, moves, tables, to_device)

    monkeypatch.setattr(zero_copy, "copy_records", counted)
    with SimulatedGpu() as gpu:
        tables = offloaded(gpu)
        optimizer = RowRMSprop(tables)
        batches = [{*range(20)}, {2, 3, 4, 5}, {2, 3, 4, 5}, {7}, {1, 7}]
        tables.prefetch(torch.arange(20)[None])
        assert sum(crossed) == 20
        for now, later in pairwise(batches):
            crossed.clear()
            train(tables, optimizer, *(torch.tensor([sorted(ids)]) for ids in (now, later)))
            assert sum(crossed) == len(later - now) + len(now - later)
        crossed.clear()
        tables.flush()
        assert sum(crossed) == 2  # 7, and 1, which came for the next batch
        assert all_equal(gpu, tables, torch.tensor([[1, 2, 7, 9]]))
        tables.flush()
        assert sum(crossed) == 2 + 4  # what is read to decode is not written back


@pytest.mark.parametrize("pins", [False, True])
def test_a_layer_of_a_prompt_waits_for_its_table_not_for_later_ones(pins):
    with SimulatedGpu(pins) as gpu:
        tables = offloaded(gpu).eval()
        side = tables.stream.number
        worker = side if pins else tables.transfers.worker.agent.number

        def waited(ids):
            """How far the ring was when the compute stream, and the host, waited for each row."""
            seen = [(gpu.stream.seen[side], gpu.host.seen[worker]) for _ in tables.lookup(ids)]
            return [tuple(a < b for a, b in zip(*pair, strict=True)) for pair in pairwise(seen)]

        with torch.no_grad():
            # One table, then two. The host waits for a worker alone.
            assert waited(batch(0)) == [(True, not pins), (False, False)]


def test_device_memory_does_not_grow_with_the_vocabulary():
    allocated = []
    for vocab_size in (V, 10 * V):
        with SimulatedGpu() as gpu:
            tables = OffloadedTables(RamStorage((vocab_size, L, W), torch.float32), gpu.device)
            optimizer = RowRMSprop(tables, state="number")
            for number in range(3):
                train(tables, optimizer, batch(number), batch(number + 1))
            all_equal(gpu, tables, batch(3))
            allocated.append(gpu.allocated)
    assert allocated[0] == allocated[1]


# --- what goes wrong ---


@pytest.mark.parametrize("n_row", [V, 1000])  # of so many, few ids are sorted, not marked
def test_ids_out_of_range_are_refused_and_leave_the_books_as_they_are(n_row):
    with SimulatedGpu() as gpu:
        tables = filled(OffloadedTables(RamStorage((n_row, L, W), torch.float32), gpu.device))
        for bad in (n_row, -1):
            ids = torch.tensor([[1, bad]])
            with pytest.raises(IndexError, match=f"there are {n_row} rows"):
                list(tables.eval().lookup(ids))
            for use in (tables.train().prefetch, tables.lookup):
                with pytest.raises(IndexError):
                    list(use(ids) or ())
                assert (tables.slot_of < 0).all() and not len(tables.token_in)
        assert all_equal(gpu, tables, batch(0))
        empty = tables.lookup(torch.empty(0, 3, dtype=torch.int64))
        assert [len(rows) for rows in empty] == [0] * L


def test_a_step_without_tokens_changes_nothing(gpu):
    tables = offloaded(gpu)
    before = torch.stack(list(tables.weight))
    train(tables, RowRMSprop(tables), torch.empty(0, 3, dtype=torch.int64))
    assert torch.equal(torch.stack(list(tables.weight)), before)


@pytest.mark.parametrize("shape", [(2, 5), (2, 1), (2, 5, 1), (2, 1, 3), (1, 1, 2)])
def test_tokens_may_have_one_address_or_several(gpu, shape):
    assert all_equal(gpu, offloaded(gpu), batch(0, shape))


def test_memory_that_cannot_be_pinned_is_said_once_and_moved_by_one_ring(capsys):
    with SimulatedGpu(pins=False) as gpu:
        tables = offloaded(gpu)
        ring = tables.transfers
        optimizer = RowRMSprop(tables, state="number")
        train(tables, optimizer, batch(0))
        assert tables.transfers is ring
        assert capsys.readouterr().err.count("cannot be pinned") == 1


def test_pages_of_a_prompt_are_requested_by_the_worker_few_by_the_host(monkeypatch, tmp_path):
    asked = []

    def noted(storage, ids, names=("rows",)):
        asked.append((SimulatedGpu.current.host, ids.tolist()))

    monkeypatch.setattr(DiskStorage, "read_ahead", noted)
    with SimulatedGpu() as gpu, torch.no_grad():
        storage = DiskStorage.create(tmp_path / "tables", ROWS, torch.float32)
        tables = filled(OffloadedTables(storage, gpu.device, chunk_bytes=CHUNK)).eval()
        list(tables.lookup(torch.tensor([[7, 3, 7, 9]])))
        assert asked == [(tables.transfers.worker.agent, [3, 7, 9])]
        list(tables.lookup(torch.tensor([[7, 3]])))
        assert asked[1:] == [(gpu.host, [[7, 3]])]


def test_records_half_way_between_steps_are_never_read_or_saved(monkeypatch):
    with SimulatedGpu(pins=False) as gpu:
        tables = offloaded(gpu)
        optimizer = RowRMSprop(tables)
        monkeypatch.setattr(offload, "store", Mock(side_effect=OSError("bad sector")))
        train(tables, optimizer, batch(0))
        for use in (
            lambda: train(tables, optimizer, batch(1)),
            tables.state_dict,
            optimizer.state_dict,
            lambda: list(tables.lookup(batch(2))),
            lambda: tables.eval().lookup(batch(2, (2, 1))),
        ):
            with pytest.raises(OSError, match="bad sector"):
                use()


def test_rows_whose_records_never_left_the_device_are_known_to_train(gpu, capsys):
    tables = offloaded(gpu)
    optimizer = RowRMSprop(tables, state="number")
    for _ in range(3):
        train(tables, optimizer, batch(0), later=batch(0))
    whole = SimpleNamespace(
        rmsprops={"tables": optimizer},
        scaler=SimpleNamespace(enabled=False),
        in_adamw=[],
    )
    check_trained(nn.Identity(), whole)
    assert "not trained" not in capsys.readouterr().out
