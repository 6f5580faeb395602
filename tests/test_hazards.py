"""What goes wrong where copies overlap compute, on a simulated GPU, and on a real one if there is.

Each hazard is shown with its guard and without. Only the simulated GPU can be as unlucky as CUDA
allows (simulated_gpu.py); that the real one behaves alike is what the other half is for.
"""

import inspect
import random
import threading
import types
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from simulated_gpu import SimulatedGpu

import offload
import ring
from homes import RamHome
from offload import OffloadedTables
from ring import CudaGradients, CudaSlot
from rowadam import RowAdam
from tables import ResidentTables

V, L, W = 128, 4, 1024  # rows of 256 KB in a lookup: too much for a driver to stage aside
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


def offloaded(gpu, shape=(V, L, W), **options) -> OffloadedTables:
    """Small tables, each a job of its own for the worker all the same."""
    home = RamHome(shape, torch.float32)
    made = OffloadedTables(home, gpu.device, **{"group_bytes": 0, **options})
    torch.manual_seed(0)
    made.init_rows(1.0)
    return made


def all_equal(gpu, tables) -> bool:
    """Whether a lookup gives the rows that are on the host."""
    rows = list(tables.lookup(IDS))
    gpu.synchronize()
    pairs = zip(rows, tables.weight, strict=True)
    return all(torch.equal(row.cpu(), F.embedding(IDS, weight)) for row, weight in pairs)


@pytest.mark.parametrize("guarded", [True, False])
def test_h1_a_host_buffer_is_not_refilled_while_it_is_copied(gpu, guarded, monkeypatch):
    tables = offloaded(gpu, ring_slots=1).eval()
    assert all_equal(gpu, tables)  # and allocations out of the way
    if not guarded:
        monkeypatch.setattr(CudaSlot, "reclaim", lambda slot: None)
    gpu.busy(tables.stream)  # the first copy starts late
    assert all_equal(gpu, tables) == guarded


@pytest.mark.parametrize("guarded", [True, False])
def test_h2_a_gpu_buffer_is_not_overwritten_while_it_is_read(gpu, guarded, monkeypatch):
    tables = offloaded(gpu, ring_slots=1).eval()
    assert all_equal(gpu, tables)
    if not guarded:
        monkeypatch.setattr(CudaSlot, "guard", lambda slot: None)
    gpu.busy(torch.cuda.current_stream())  # the first rows are expanded late
    assert all_equal(gpu, tables) == guarded


@pytest.mark.parametrize("guarded", [True, False])
def test_h3_a_row_is_updated_before_it_is_read_again(gpu, guarded, monkeypatch):
    tables = offloaded(gpu, ring_slots=2)
    adam, settle = RowAdam(tables), tables.settle
    if not guarded:  # only `flush`, on the main thread, still settles
        main = threading.main_thread()
        monkeypatch.setattr(
            tables, "settle", lambda *t: threading.current_thread() is main and settle(*t)
        )
    sum((rows * rows).sum() for rows in tables.lookup(IDS)).backward()
    adam.step(*tables.gradients(), lr=0.1)
    read = [row.detach().cpu() for row in tables.lookup(IDS)]
    tables.flush()
    pairs = zip(read, tables.weight, strict=True)
    assert all(torch.equal(row, F.embedding(IDS, w)) for row, w in pairs) == guarded


def test_ordering_rows_does_not_wait_for_the_gpu(gpu):
    """A lookup by ids on the CPU is over long before a busy GPU is."""
    tables = offloaded(gpu, ring_slots=L).eval()
    assert all_equal(gpu, tables)
    gpu.busy(torch.cuda.current_stream())
    rows = list(tables.lookup(IDS))
    assert not torch.cuda.current_stream().query()
    gpu.synchronize()
    assert torch.equal(rows[-1].cpu(), F.embedding(IDS, tables.weight[-1]))


def test_rows_are_read_in_place_after_the_update_that_changes_them(gpu):
    tables = offloaded(gpu, gather="inplace")
    adam = RowAdam(tables)
    for number in range(3):
        gpu.busy(torch.cuda.current_stream())
        sum((rows.sin() * (number + 1)).sum() for rows in tables.train().lookup(IDS)).backward()
        adam.step(*tables.gradients(), lr=0.1)
        with torch.no_grad():
            assert all_equal(gpu, tables.eval())


def test_of_long_inputs_each_row_is_brought_once_not_read_in_place(gpu):
    tables = offloaded(gpu, gather="inplace").eval()
    with torch.no_grad():
        for repeats, moved in ((4, 256), (5, 64)):  # 256 tokens are read, of 320 the distinct ones
            before, ids = tables.moved, IDS.repeat(1, repeats)
            for row, weight in zip(tables.lookup(ids), tables.weight, strict=True):
                assert torch.equal(row.cpu(), F.embedding(ids, weight))
            assert tables.moved - before == moved * L * W * 4


def test_rows_are_loaded_after_the_kernels_that_read_the_old_ones_in_place(gpu):
    tables = offloaded(gpu, gather="inplace").eval()
    new = {name: rows + 1 for name, rows in tables.state_dict().items()}
    expected = [F.embedding(IDS, weight) for weight in tables.weight]
    gpu.busy(torch.cuda.current_stream())
    with torch.no_grad():
        rows = list(tables.lookup(IDS))
    tables.load_state_dict(new)
    assert all(torch.equal(row.cpu(), old) for row, old in zip(rows, expected, strict=True))
    assert all_equal(gpu, tables)


def test_gradients_come_back_as_they_were(gpu):
    returning = CudaGradients(gpu.device)
    for n in (2, 5, 4):  # the buffer grows, once
        grads = [torch.full((n, 4), float(table), device=gpu.device) for table in range(3)]
        gpu.busy(returning.stream)
        returning.take(grads)
        if n == 4:  # to allocate pinned memory a driver may wait
            assert not returning.stream.query()  # else nobody does
        del grads
        torch.zeros(n, 4, device=gpu.device)  # in whose memory, if it is free too early
        assert [returning.get(t).unique().item() for t in range(3)] == [0.0, 1.0, 2.0]


def work(make) -> list[torch.Tensor]:
    """What some steps of training and evaluation see, then what is in the tables after them."""
    tables, seen = make(), []
    adam = RowAdam(tables)
    for number in range(5):
        generator = torch.Generator().manual_seed(number)
        batch = torch.randint(V, (2, 4 + 12 * number), generator=generator)  # slots grow
        if number == 2:
            next(iter(tables.lookup(batch)))  # and is left half-way
            tables.reads.clear()
        for part in batch.chunk(1 + number % 2):
            rows = tables.lookup(part)
            loss = sum((row.sin() * (table + 1)).sum() for table, row in enumerate(rows))
            loss.backward()
            seen.append(loss.detach())
        adam.step(*tables.gradients(), lr=0.1)
        if number > 2:
            with torch.no_grad():
                for part in batch.split(1):
                    seen += [row * 2 for row in tables.eval().lookup(part)]
            tables.train()
    tables.flush()
    return [*(x.cpu() for x in seen), *tables.weight, *adam.m, *adam.v, adam.count, adam.last]


def resident(width: int = W) -> ResidentTables:
    tables = ResidentTables(L, V, width)
    torch.manual_seed(0)
    tables.init_rows(1.0)
    return tables


@pytest.mark.parametrize("options", [{}, dict(cache_rows=9), dict(gather="inplace")])
def test_work_on_the_gpu_equals_work_on_the_cpu(gpu, options):
    results, expected = work(partial(offloaded, gpu, **options)), work(resident)
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-3, atol=1e-3)


# --- on the simulated GPU only: every order of events that CUDA allows ---

SCHEDULES = 24
SMALL = (V, L, 4)


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    return work(partial(resident, SMALL[2]))


def differs(number: int, expected: list[torch.Tensor]) -> bool:
    """Whether work under a schedule of this number gives other results than resident tables."""
    rng = random.Random(number)
    options = dict(ring_slots=rng.choice([1, 2, 3]), group_bytes=rng.choice([0, 500, 1 << 20]))
    options |= rng.choice([{}, dict(cache_rows=9), dict(gather="inplace")])
    with SimulatedGpu(number, pace=rng.choice([0.0, 0.5, 1.0])) as gpu:

        def make() -> OffloadedTables:
            tables = offloaded(gpu, SMALL, **options)
            for stream in gpu.streams:
                gpu.paces[stream] = rng.choice([0.0, 0.2, 1.0])
            return tables

        early = make()  # tables that go while rows are coming
        gpu.busy(early.stream)
        rows = early.lookup(IDS)
        for _, _, job in early.flight.ordered:
            if job:
                job.result()
        size = early.slots[0].buffer.shape
        del early, rows, job
        ones = torch.ones(size, device=gpu.device)  # where a slot was, if that is free
        got = work(make)
        gpu.synchronize()
        whole = torch.equal(ones.cpu(), torch.ones(size))
    return not (whole and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)))


def test_no_schedule_changes_results(expected):
    assert not any(differs(number, expected) for number in range(SCHEDULES))


def guards() -> list[str]:
    """The lines of ring.py that make one side wait for another."""
    source = inspect.getsource(ring.CudaSlot) + inspect.getsource(ring.CudaGradients)
    calls = (".synchronize()", ".wait_event(", ".record(", ".record_stream(", "self.release()")
    return [line for line in source.splitlines() if any(call in line for call in calls)]


@pytest.mark.parametrize("line", guards(), ids=lambda line: line.split("#")[0].strip())
def test_every_guard_is_needed(line, expected, monkeypatch):
    """Without it there is a schedule that gives other results."""
    source = Path(ring.__file__).read_text()
    assert source.count(line + "\n") == 1
    indent = line[: len(line) - len(line.lstrip())]
    without = types.ModuleType("ring_without_a_guard")
    exec(source.replace(line + "\n", f"{indent}pass\n"), without.__dict__)
    for name in ("CudaSlot", "CudaGradients"):
        monkeypatch.setattr(offload, name, getattr(without, name))
    without.pinned = lambda *shape: ring.pinned(*shape)  # the simulated one
    assert any(differs(number, expected) for number in range(10 * SCHEDULES))
