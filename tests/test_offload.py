"""Offloaded tables against resident ones, to the bit, and the ring against what can go wrong in it.

What needs a GPU runs on a simulated one (simulated_gpu.py), and on a real one if there is one.
"""

import inspect
import random
import threading
import time
import types
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from simulated_gpu import SimulatedGpu

import offload
from offload import OffloadedTables
from tables.rowadam import RowAdam
from tables.storage import DiskStorage, RamStorage
from tables.tables import ResidentTables, send

V, L, W = 128, 4, 1024  # rows of 256 KB in a lookup: too much for a driver to stage aside
SMALL = (V, 3, 4)
IDS = torch.arange(64)[None]


class RealGpu:
    device = torch.device("cuda")

    def busy(self, stream: torch.cuda.Stream) -> None:
        """Keep a stream from getting on for about a tenth of a second."""
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # clock cycles

    def synchronize(self) -> None:
        torch.cuda.synchronize()


has_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=[pytest.mark.gpu, has_gpu])])
def gpu(request):
    if request.param == "cuda":
        yield RealGpu()
    else:
        with SimulatedGpu() as simulated:
            yield simulated


def filled(tables):
    torch.manual_seed(0)
    tables.init_rows(1.0)
    return tables


def resident(shape=(V, L, W)) -> ResidentTables:
    return filled(ResidentTables(shape[1], shape[0], shape[2]))


def batch(number: int, shape=(2, 4)) -> torch.Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(number))


def train(tables, adam: RowAdam, ids: torch.Tensor) -> None:
    """A training step in which every number of every table matters."""
    rows = tables.train().lookup(ids)
    sum((row.sin() * (i + 1)).sum() for i, row in enumerate(rows)).backward()
    adam.step(lr=0.1)


def all_equal(gpu, tables, ids=IDS) -> bool:
    """Whether a lookup gives the rows that are stored."""
    with torch.no_grad():
        rows = list(tables.eval().lookup(ids))
    gpu.synchronize()
    pairs = zip(rows, tables.weight, strict=True)
    return all(torch.equal(row.cpu(), F.embedding(ids, weight)) for row, weight in pairs)


# --- equal to resident tables ---


def work(make) -> list[torch.Tensor]:
    """What steps of training, evaluation and decoding see, then what is stored after them.

    Batches overlap partly, fully (5 and 6) or not at all (8), some are announced, wrongly, too;
    some are accumulated; a lookup is left half-way, the tables are saved between steps.
    """

    def ids(number: int) -> torch.Tensor:
        if number == 8:
            return torch.arange(V - 6, V)[None].expand(2, 6)
        made = batch(5 if number == 6 else number, (2, 4 + 12 * (number % 7)))  # slots grow
        return made % (V - 6)

    tables, seen = make(), []
    adam, device = RowAdam(tables), torch.device(getattr(tables, "device", "cpu"))
    for number in range(9):
        if number in (2, 4):  # lookups that are left: half-way, and after all was read
            rows = tables.lookup(ids(11))
            seen += [row.detach() * 2 for row in (rows if number == 4 else [next(rows)])]
            tables.reads.clear()
        parts = ids(number).chunk(1 + number % 2)
        for part in parts:
            rows = tables.lookup(part)
            loss = sum((row.sin() * (table + 1)).sum() for table, row in enumerate(rows))
            if part is parts[-1] and number not in (3, 6, 7):
                tables.prefetch(ids(number + 1 if number != 4 else 12))
            loss.backward()
            seen.append(loss.detach())
        adam.step(lr=0.1)
        if number > 2:
            with torch.no_grad():
                tables.eval()
                there = send(ids(number), device)
                tables.lookup(there[:, :1].clone())  # is left before it is read
                for part in (*there[:, :3].split(1, dim=1), ids(number)):
                    seen += [row * 2 for row in tables.lookup(part)]
            tables.train()
        if number in (1, 3, 6):
            tables.flush()
            seen += [weight.detach().to("cpu", copy=True) for weight in tables.weight]
    tables.flush()
    stored = [*tables.weight, *adam.m, *adam.v, adam.count, adam.last]
    return [x.detach().to("cpu", copy=True) for x in [*stored, *seen]]


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    return work(partial(resident, SMALL))


def test_work_on_the_gpu_equals_resident_tables_there_to_the_bit(gpu, storage):
    def offloaded():
        return filled(OffloadedTables(storage(SMALL), gpu.device))

    there = work(lambda: resident(SMALL).to(gpu.device))
    for a, b in zip(work(offloaded), there, strict=True):
        assert torch.equal(a, b.detach().cpu())


SCHEDULES = 16


def differs(number: int, expected: list[torch.Tensor], module=offload) -> bool:
    """Whether work under a schedule of this number gives other results than resident tables."""
    rng = random.Random(number)
    how = dict(pace=rng.choice([0.0, 0.5, 1.0]), pins=rng.random() < 0.5)
    with SimulatedGpu(number, **how) as gpu:

        def make(late: float = 0.0):
            storage = RamStorage(SMALL, torch.float32)
            made = module.OffloadedTables(storage, gpu.device, n_buffer=rng.choice([1, 2, 9]))
            if late:  # for each job of the worker
                attempt = made.ring.attempt
                made.ring.attempt = lambda *job: (time.sleep(late), attempt(*job))[1]
            for stream in gpu.streams:
                gpu.paces[stream] = rng.choice([0.0, 0.2, 1.0])
            if rng.random() < 0.5:  # slots will not grow any more: who takes a new one waits, too
                list(filled(made).eval().lookup(torch.arange(V)[None]))
            return filled(made).train()

        ones = []
        for training in (False, True):  # tables that go while rows are coming
            early = make().train(training)
            gpu.busy(early.ring.stream)
            rows = early.lookup(IDS)
            if early.ring.worker:
                early.ring.worker.shutdown()
            memory = [buffer.memory for buffer in early.ring.buffers] + [
                t for kind in early.device_rows for t in kind
            ]
            kinds = [(buffer.shape, buffer.dtype) for buffer in memory]
            del early, rows, memory
            # In their memory, if it is free.
            ones += [torch.full(size, 1, dtype=kind, device=gpu.device) for size, kind in kinds]
        try:
            got = work(partial(make, rng.choice([0.0, 0.0, 0.001])))
        except (RuntimeError, IndexError, AssertionError):
            return True
        gpu.synchronize()
        whole = all((one.cpu() == 1).all() for one in ones)
    return not (whole and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)))


def test_no_schedule_changes_results(expected):
    assert not any(differs(number, expected) for number in range(SCHEDULES))


GUARDS = (".synchronize()", ".wait_event(", ".record(", ".record_stream(", ".after_compute()")
GUARDS += (".wait_staging()", "self.write_back(", "self.wait(", "result_of(self.wait")


def guards() -> list[int]:
    """The lines of offload.py that make one side wait for another."""
    lines = inspect.getsource(offload).splitlines()
    code = [line.split("#")[0] for line in lines]
    calls = [any(guard in line for guard in GUARDS) and "def " not in line for line in code]
    return [number for number, call in enumerate(calls) if call]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "number", guards(), ids=lambda n: inspect.getsource(offload).splitlines()[n].strip()
)
def test_every_guard_is_needed(number, expected):
    """Without it there is a schedule that gives other results."""
    lines = inspect.getsource(offload).splitlines()
    indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
    lines[number] = f"{indent}pass"
    without = types.ModuleType("offload_without_a_guard")
    exec("\n".join(lines), without.__dict__)
    schedules = range(40 * SCHEDULES)
    assert new_slots_harm(without) or any(differs(n, expected, without) for n in schedules)


# --- hazards, each with its guard and without ---


def new_slots_harm(module=offload) -> bool:
    """Whether a buffer in memory that was just freed is filled while a kernel still reads that."""
    with SimulatedGpu() as gpu:
        storage = RamStorage(SMALL, torch.float32)
        tables = filled(module.OffloadedTables(storage, gpu.device)).eval()
        before = torch.ones(IDS.numel() * SMALL[2] * 4, dtype=torch.uint8, device=gpu.device)
        gpu.synchronize()
        gpu.busy(gpu.default)
        late = before + 1
        del before
        list(tables.lookup(IDS))
        return not (late.cpu() == 2).all()


def test_h2_memory_of_a_new_slot_is_not_filled_while_a_kernel_reads_it():
    assert not new_slots_harm()


def deaf(ring: offload.TransferRing) -> None:
    """Let the side stream wait for nothing."""
    kind = type("Deaf", (torch.cuda.Stream,), {"wait_event": lambda stream, event: None})
    ring.stream = kind(ring.device)


@pytest.mark.parametrize("guarded", [True, False])
def test_h1_staging_memory_is_not_refilled_while_it_is_copied(gpu, guarded, tmp_path, monkeypatch):
    file = DiskStorage.create(tmp_path / "tables", (V, L, W), torch.float32)
    tables = filled(OffloadedTables(file, gpu.device, n_buffer=1))
    assert all_equal(gpu, tables)  # and allocations out of the way
    if not guarded:
        monkeypatch.setattr(offload.Buffer, "wait_staging", lambda buffer: None)
    gpu.busy(tables.ring.stream)  # the first copy starts late
    assert all_equal(gpu, tables) == guarded


@pytest.mark.parametrize("guarded", [True, False])
def test_h2_a_slot_is_not_refilled_while_it_is_read(gpu, guarded, storage):
    tables = filled(OffloadedTables(storage(), gpu.device, n_buffer=1))
    assert all_equal(gpu, tables)
    if not guarded:
        deaf(tables.ring)
    gpu.busy(torch.cuda.current_stream())  # the first rows are expanded late
    assert all_equal(gpu, tables) == guarded


@pytest.mark.parametrize("guarded", [True, False])
def test_h2_a_place_of_the_working_set_is_not_refilled_while_it_is_read(gpu, guarded, storage):
    tables = filled(OffloadedTables(storage(), gpu.device))
    train(tables, RowAdam(tables), IDS)  # makes room for so many tokens
    tables.flush()
    expected = [F.embedding(IDS, weight).clone() for weight in tables.weight]
    list(tables.lookup(IDS))
    tables.reads.clear()
    gpu.synchronize()
    if not guarded:
        deaf(tables.ring)
    gpu.busy(torch.cuda.current_stream())
    late = list(tables.lookup(IDS))  # is forgotten, as if a layer had failed
    tables.reads.clear()
    list(tables.lookup(IDS + 64))
    gpu.synchronize()
    same = [torch.equal(row.detach().cpu(), old) for row, old in zip(late, expected, strict=True)]
    assert all(same) if guarded else not all(same)


@pytest.mark.parametrize("guarded", [True, False])
def test_h3_rows_that_left_are_stored_before_they_come_again(gpu, guarded, tmp_path, monkeypatch):
    file = DiskStorage.create(tmp_path / "tables", (V, L, W), torch.float32)
    plain = resident().to(gpu.device)
    # With few slots rows that went out are settled when their slot is used again, just in time.
    tables = filled(OffloadedTables(file, gpu.device, n_buffer=64))
    if not guarded:
        monkeypatch.setattr(tables.ring, "wait_staging", lambda: None)
    adams = RowAdam(tables), RowAdam(plain)
    same = []
    for ids in (IDS, IDS + 64, IDS, IDS + 64):
        for side, adam in zip((tables, plain), adams, strict=True):
            train(side, adam, ids)
        rows = zip(tables.lookup(ids[:, ::3]), plain.lookup(ids[:, ::3]), strict=True)
        same += [torch.equal(a.detach().cpu(), b.detach().cpu()) for a, b in rows]
        tables.reads.clear(), plain.reads.clear()
    assert all(same) == guarded


@pytest.mark.parametrize("guarded", [True, False])
def test_h3_evaluation_sees_the_rows_of_the_last_step(gpu, guarded, storage, monkeypatch):
    tables, plain = filled(OffloadedTables(storage(), gpu.device)), resident().to(gpu.device)
    if not guarded:
        monkeypatch.setattr(tables, "write_back", lambda ids: None)
    for side in (tables, plain):
        train(side, RowAdam(side), IDS)
    with torch.no_grad():
        rows = zip(tables.eval().lookup(IDS), plain.eval().lookup(IDS), strict=True)
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in rows) == guarded


# --- what it costs ---


def test_the_host_waits_neither_in_a_training_step_nor_in_decoding(monkeypatch):
    with SimulatedGpu(pace=0.0) as gpu:
        tables = filled(OffloadedTables(RamStorage(SMALL, torch.float32), gpu.device))
        adam = RowAdam(tables)
        for number in (1, 1, 2):
            train(tables, adam, batch(number, (2, 30)))
        tokens = [torch.full((4, 1), 5, device=gpu.device) for _ in range(3)]
        all_equal(gpu, tables, batch(1, (4, 1)))
        before = gpu.waits[threading.main_thread()]
        for number in (3, 4):
            rows = tables.train().lookup(batch(number, (2, 20)))
            loss = sum(row.sum() for row in rows)
            tables.prefetch(batch(number + 1, (2, 20)))
            loss.backward()
            adam.step(lr=0.1)
        with torch.no_grad():
            tables.eval().write_back(tables.resident_ids)  # what training left: once
            monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: pytest.fail("pinned anew"))
            for ids in tokens:
                list(tables.eval().lookup(ids))
        assert gpu.waits[threading.main_thread()] == before


def test_what_crosses_the_bus_is_what_comes_and_what_leaves(storage):
    with SimulatedGpu() as gpu:
        tables = filled(OffloadedTables(storage(SMALL), gpu.device))
        adam, crossed = RowAdam(tables), []
        for name in ("fetch", "write_back"):
            real = getattr(tables.ring, name)

            def counted(slot, stored, ids, *rest, real=real):
                crossed.append(len(ids) * stored.shape[1] * stored.element_size())
                return real(slot, stored, ids, *rest)

            setattr(tables.ring, name, counted)
        batches = [{1, 2, 3}, {2, 3, 4, 5}, {2, 3, 4, 5}, {7}, {1, 7}]
        sets = [set(), *batches]
        for number, wanted in enumerate(batches):
            crossed.clear()
            train(tables, adam, torch.tensor([sorted(wanted)]))
            if tables.ring.worker:
                offload.result_of(tables.ring.wait_staging())
            # Unannounced: what leaves does so when the next batch is looked up.
            coming, leaving = wanted - sets[number], sets[number] - wanted
            bytes_a_token = SMALL[1] * SMALL[2] * 4 * 3  # rows, m and v
            assert sum(crossed) == (len(coming) + len(leaving)) * bytes_a_token


def test_each_distinct_row_is_fetched_once_and_a_step_reads_what_lies_side_by_side(storage):
    with SimulatedGpu() as gpu:
        tables, fetched = filled(OffloadedTables(storage(SMALL), gpu.device)).eval(), []
        real = tables.ring.fetch

        def fetch(slot, stored, ids, *rest):
            fetched.append((tuple(stored.shape), ids.cpu().tolist()))
            return real(slot, stored, ids, *rest)

        tables.ring.fetch = fetch
        list(tables.lookup(torch.tensor([[5, 2, 5, 5], [2, 2, 5, 7]])))
        assert fetched == [((V, SMALL[2]), [2, 5, 7])] * SMALL[1]
        fetched.clear()
        assert all_equal(gpu, tables, torch.tensor([[9], [3], [9]]))
        assert fetched == [((V, SMALL[1] * SMALL[2]), [9, 3, 9])]


def test_slots_stay_where_they_are(storage):
    with SimulatedGpu() as gpu:
        tables = filled(OffloadedTables(storage(SMALL), gpu.device))
        list(tables.eval().lookup(IDS))
        slots = set(tables.ring.buffers)
        adam = RowAdam(tables)
        for number in range(20):
            ids = batch(number, (1, 2 + number % 12))
            train(tables, adam, ids)
            list(tables.eval().lookup(ids))
        assert set(tables.ring.buffers) == slots and len(slots) == 3


# --- what goes wrong ---


def test_ids_out_of_range_are_refused(storage):
    with SimulatedGpu() as gpu:
        tables = filled(OffloadedTables(storage(SMALL), gpu.device))
        for bad in (V, -1):
            for ids in (torch.tensor([[1, bad]]), torch.tensor([[bad]])):
                for mode in (tables.train, tables.eval):
                    with pytest.raises(IndexError, match=rf"rows 0 to {V - 1}"):
                        mode().lookup(ids)
        assert all_equal(gpu, tables)


def test_a_lookup_whose_buffers_another_took_says_so(storage):
    with SimulatedGpu() as gpu:
        tables = filled(OffloadedTables(storage(SMALL), gpu.device)).eval()
        first = tables.lookup(batch(0))
        next(first)
        assert all_equal(gpu, tables)
        with pytest.raises(AssertionError, match="lost its buffers"):
            next(first)


def staged(tmp_path, gpu) -> OffloadedTables:
    file = DiskStorage.create(tmp_path / "tables", SMALL, torch.float32)
    return filled(OffloadedTables(file, gpu.device))


@pytest.mark.parametrize("error", [OSError("bad sector"), SystemExit("killed")])
def test_rows_half_way_between_steps_are_never_read_or_saved(error, tmp_path, monkeypatch):
    with SimulatedGpu() as gpu:
        tables = staged(tmp_path, gpu)
        adam = RowAdam(tables)
        train(tables, adam, batch(0))

        def fails(*_):
            raise error

        monkeypatch.setattr(tables.ring, "write_back", fails)
        with pytest.raises(RuntimeError, match=rf"failed: .*{error}.*: go on from a checkpoint"):
            train(tables, adam, batch(1))
        for use in (tables.state_dict, adam.state_dict, lambda: list(tables.lookup(batch(2)))):
            with pytest.raises(RuntimeError, match=f"failed: .*{error}"):
                use()


def test_what_is_loaded_replaces_what_is_on_the_device(gpu, storage):
    tables = filled(OffloadedTables(storage(SMALL), gpu.device))
    saved = {f"weight.{t}": weight.clone() for t, weight in enumerate(tables.weight)}
    adam = RowAdam(tables)
    fresh = {name: [x.clone() for x in getattr(adam, name)] for name in ("m", "v")}
    fresh |= {"count": adam.count.clone(), "last": adam.last.clone(), "steps": 0}
    train(tables, adam, batch(0))
    tables.load_state_dict(saved)
    adam.load_state_dict(fresh)
    assert all_equal(gpu, tables)
    again = resident(SMALL).to(gpu.device)
    train(tables, adam, batch(0))
    train(again, RowAdam(again), batch(0))
    tables.flush()
    for a, b in zip(tables.weight, again.weight, strict=True):
        assert torch.equal(a, b.cpu())
