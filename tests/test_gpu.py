"""What only a CUDA device can show: the same results there, and no needless wait for it."""

import copy
import gc
import threading

import pytest
import torch
import torch.nn.functional as F

from homes import RamHome
from model import LAYERS, Decoder, ModelConfig
from offload import OffloadedTables, ResidentTables
from ring import CudaSlot
from rowadam import RowAdam

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def exact():
    """No TF32, which training switches on."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def decoder(ffn: str) -> Decoder:
    torch.manual_seed(0)
    return Decoder(ModelConfig(60, 32, 3, 4, 64, n_kv_head=2, ffn=ffn, table_std=0.5))


def train(model: Decoder, device: str, steps: int = 3) -> tuple[list[float], Decoder]:
    """A few steps of plain SGD on the backbone and row-wise Adam on the tables."""
    model = copy.deepcopy(model).to(device)
    rows = RowAdam(model.tables)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        ids = torch.randint(60, (4, 32), generator=generator)
        loss = model(ids.to(device), ids.to(device), table_ids=ids)[1]  # table ids on the CPU
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
        model.zero_grad()
        if len(model.tables.weight):
            rows.step(*model.tables.gradients(), lr=0.01)
    return losses, model


@pytest.mark.parametrize("ffn", LAYERS)
def test_training_on_the_gpu_equals_the_cpu(ffn):
    on_cpu, cpu_model = train(decoder(ffn), "cpu")
    on_gpu, gpu_model = train(decoder(ffn), "cuda")
    assert on_gpu == pytest.approx(on_cpu, rel=1e-4)
    for a, b in zip(cpu_model.parameters(), gpu_model.parameters(), strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("ffn", LAYERS)
def test_decoding_on_the_gpu_equals_the_cpu(ffn):
    model, ids = decoder(ffn).eval(), torch.randint(60, (2, 9))
    expected = model(ids)[0]
    greedy = model.generate(ids, 8, temperature=0)
    model = model.cuda()
    torch.testing.assert_close(model(ids.cuda())[0].cpu(), expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(model.generate(ids.cuda(), 8, temperature=0, table_ids=ids).cpu(), greedy)


@pytest.mark.parametrize("training", [True, False])
def test_reading_rows_by_ids_on_the_cpu_does_not_wait_for_the_gpu(training):
    tables = decoder("stem").cuda().tables.train(training)
    ids = torch.randint(60, (16, 1024))
    list(tables.lookup(ids))  # allocations out of the way
    torch.cuda.synchronize()
    busy(torch.cuda.current_stream())
    rows = list(tables.lookup(ids))
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    expected = F.embedding(ids, tables.weight[0].cpu())
    assert torch.equal(rows[0].detach().cpu(), expected)


def test_bfloat16_rows_take_small_steps_on_the_gpu():
    tables = ResidentTables(1, 4096, 64, dtype=torch.bfloat16).cuda()
    tables.weight[0].fill_(1.0)
    adam, ids = RowAdam(tables), torch.arange(4096)
    for _ in range(20):  # each of 2^-12, where neighbours of 1.0 are 2^-8 and 2^-7 away
        adam.step(ids.cuda(), [torch.ones(4096, 64, device="cuda")], lr=2**-12)
    assert tables.weight[0].float().mean().item() == pytest.approx(1 - 20 * 2**-12, abs=2e-4)


# --- offloaded tables ---

V, L, W = 128, 4, 1024  # rows of 256 KB in a lookup: too much for a driver to stage aside
IDS = torch.arange(64)[None]


def offloaded(vocab_size: int = V, width: int = W, **options) -> OffloadedTables:
    """Small tables, each a job of its own for the worker all the same."""
    home = RamHome((vocab_size, L, width), torch.float32)
    made = OffloadedTables(home, "cuda", **{"group_bytes": 0, **options})
    torch.manual_seed(0)
    made.init_rows(1.0)
    return made


def all_equal(tables) -> bool:
    """Whether a lookup gives the rows that are on the host."""
    rows = list(tables.lookup(IDS))
    torch.cuda.synchronize()
    pairs = zip(rows, tables.weight, strict=True)
    return all(torch.equal(row.cpu(), F.embedding(IDS, weight)) for row, weight in pairs)


def busy(stream: torch.cuda.Stream) -> None:
    """Keep a stream from getting on for about a tenth of a second."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # clock cycles


@pytest.mark.parametrize("guarded", [True, False])
def test_h1_a_host_buffer_is_not_refilled_while_it_is_copied(guarded, monkeypatch):
    tables = offloaded(ring_slots=1).eval()
    assert all_equal(tables)  # and allocations out of the way
    if not guarded:
        monkeypatch.setattr(CudaSlot, "reclaim", lambda slot: None)
    busy(tables.stream)  # the first copy starts late
    assert all_equal(tables) == guarded


@pytest.mark.parametrize("guarded", [True, False])
def test_h2_a_gpu_buffer_is_not_overwritten_while_it_is_read(guarded, monkeypatch):
    tables = offloaded(ring_slots=1).eval()
    assert all_equal(tables)
    if not guarded:
        monkeypatch.setattr(CudaSlot, "guard", lambda slot: None)
    busy(torch.cuda.current_stream())  # the first rows are expanded late
    assert all_equal(tables) == guarded


@pytest.mark.parametrize("guarded", [True, False])
def test_h3_a_row_is_updated_before_it_is_read_again(guarded, monkeypatch):
    tables = offloaded(ring_slots=2)
    adam, settle = RowAdam(tables), tables.settle
    if not guarded:  # only `flush`, on the main thread, still settles
        main = threading.main_thread()
        monkeypatch.setattr(
            tables, "settle", lambda t: threading.current_thread() is main and settle(t)
        )
    sum((rows * rows).sum() for rows in tables.lookup(IDS)).backward()
    adam.step(*tables.gradients(), lr=0.1)
    read = [row.detach().cpu() for row in tables.lookup(IDS)]
    tables.flush()
    pairs = zip(read, tables.weight, strict=True)
    assert all(torch.equal(row, F.embedding(IDS, w)) for row, w in pairs) == guarded


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("group_bytes", [0, 1 << 20])
def test_training_with_offloaded_tables_equals_resident(slots, group_bytes):
    def made(n_table, vocab_size, width):
        home = RamHome((vocab_size, n_table, width), torch.float32)
        return OffloadedTables(home, "cuda", ring_slots=slots, group_bytes=group_bytes)

    config = ModelConfig(60, 32, 5, 4, 64, stem_layers="all", table_std=0.5)
    runs = []
    for tables in (ResidentTables, made):
        torch.manual_seed(0)
        model = Decoder(config, tables=tables).cuda()
        rows, losses = RowAdam(model.tables), []
        for number in range(8):
            generator = torch.Generator().manual_seed(number)
            for part in torch.randint(60, (4, 32), generator=generator).chunk(1 + number % 2):
                loss = model(part.cuda(), part.cuda(), table_ids=part)[1]
                loss.backward()
                losses.append(loss.detach())
            rows.step(*model.tables.gradients(), lr=0.05)
        model.tables.flush()
        runs.append((torch.stack(losses).cpu(), [*model.tables.weight, *rows.m, *rows.v]))
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=1e-4, atol=1e-5)
    for a, b in zip(*(tensors for _, tensors in runs), strict=True):
        torch.testing.assert_close(b, a.cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{}, dict(cache_rows=5), dict(gather="inplace")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_with_offloaded_tables_equals_resident(options, dtype):
    def made(n_table, vocab_size, width):
        home = RamHome((vocab_size, n_table, width), dtype)
        return OffloadedTables(home, "cuda", **options)

    def resident(*shape):
        return ResidentTables(*shape, dtype=dtype)

    texts = []
    for tables in (resident, made):
        torch.manual_seed(0)
        config = ModelConfig(60, 64, 4, 4, 64, stem_layers="all", table_std=0.5)
        model = Decoder(config, tables=tables).cuda().eval()
        texts.append(model.generate(torch.arange(9)[None].cuda(), 40, temperature=1.0, seed=0))
    assert torch.equal(*texts)


def test_gradients_find_their_tables_after_an_abandoned_lookup():
    results = []
    for abandoned in (False, True):
        tables = offloaded(ring_slots=3)
        adam = RowAdam(tables)
        for _ in range(4):
            if abandoned:
                next(iter(tables.lookup(IDS)))
                tables.reads.clear()
            loss = sum((r.sin() * (t + 1)).sum() for t, r in enumerate(tables.lookup(IDS)))
            loss.backward()
            adam.step(*tables.gradients(), lr=0.1)
        tables.flush()
        results.append([weight.clone() for weight in tables.weight])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_rows_are_read_in_place_after_the_update_that_changes_them():
    tables = offloaded(gather="inplace")
    adam = RowAdam(tables)
    for number in range(3):
        sum((rows.sin() * (number + 1)).sum() for rows in tables.train().lookup(IDS)).backward()
        adam.step(*tables.gradients(), lr=0.1)
        with torch.no_grad():
            assert all_equal(tables.eval())
    assert [view.data_ptr() for view in tables.views] == [w.data_ptr() for w in tables.weight]
    assert all(view.is_cuda for view in tables.views)


def test_device_memory_does_not_grow_with_the_vocabulary():
    def peak(vocab_size: int) -> int:
        tables = offloaded(vocab_size, width=256)
        adam = RowAdam(tables)
        for number in range(3):
            if number == 1:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            ids = torch.randint(6400, (4, 512), generator=torch.Generator().manual_seed(number))
            sum((rows * rows).sum() for rows in tables.lookup(ids)).backward()
            adam.step(*tables.gradients(), lr=0.1)
        tables.flush()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    sizes = []
    for vocab_size in (6_400, 131_072):
        gc.collect()
        before = torch.cuda.memory_allocated()
        sizes.append(peak(vocab_size))
    small, large = sizes
    assert small > 4 * 512 * 256 * 4  # at least the rows of one table
    assert large == pytest.approx(small, rel=0.01)


def test_ordering_rows_does_not_wait_for_the_gpu():
    """A lookup by ids on the CPU is over long before a busy GPU is."""
    tables = offloaded(ring_slots=L).eval()
    assert all_equal(tables)
    busy(torch.cuda.current_stream())
    rows = list(tables.lookup(IDS))
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert torch.equal(rows[-1].cpu(), F.embedding(IDS, tables.weight[-1]))
