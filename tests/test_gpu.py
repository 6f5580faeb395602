"""What only a CUDA device can show: the same results there, and no needless wait for it."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from conftest import ROOT, assert_same_run, flags
from naive import LAYERS
from test_offload import batch

from model import BUILT_IN, Decoder, decoder_class
from offload import OffloadedTables
from tables.rmsprop import RowRMSprop
from tables.storage import DiskStorage, RamStorage
from tables.tables import ResidentTables, Tables
from training.captured import capture_steps

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def exact():
    """No TF32, which training switches on."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def decoder(ffn: str, device: str, tables: Callable = ResidentTables) -> Decoder:
    torch.manual_seed(0)
    kind = decoder_class(ffn)
    config = kind.config_class(60, 32, 3, 4, 64, n_kv_head=2, ffn=ffn, table_std=0.5)
    return kind(config, tables).to(device)


def offloaded(n_table: int, n_row: int, width: int) -> OffloadedTables:
    storage = RamStorage((n_row, n_table, width), torch.float32)
    return OffloadedTables(storage, "cuda", chunk_bytes=1 << 14)


def train(model: Decoder, steps: int = 3) -> list[float]:
    """A few steps of plain SGD on the backbone and RMSprop on the tables."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    rmsprops = []
    for tables in (model.tables, model.wte):
        if isinstance(tables, Tables) and len(tables.weight):
            # eps: a gradient that is zero but for rounding must not become a step.
            rmsprops.append(RowRMSprop(tables, eps=1e-4))
    losses = []
    for number in range(steps):
        ids = batch(number, (4, 32)) % 60
        on_device = ids.to(model.device)
        loss = model(on_device, on_device, table_ids=ids)[1]  # table ids on the CPU
        model.tables.prefetch(batch(number + 1, (4, 32)) % 60)
        loss.backward()
        losses.append(loss.item())
        sgd.step()
        sgd.zero_grad()
        for rows in rmsprops:
            rows.step(lr=0.01)
    model.tables.flush()
    return losses


@pytest.mark.parametrize(
    ("ffn", "tables"), [*((ffn, ResidentTables) for ffn in LAYERS), ("stem", offloaded)]
)
def test_training_and_decoding_on_the_gpu_equal_the_cpu(ffn, tables):
    cpu = decoder(ffn, "cpu")
    gpu = decoder(ffn, "cuda", tables)
    ids = torch.randint(60, (2, 9))
    greedy = cpu.eval().generate(ids, 8, temperature=0)
    on_gpu = gpu.eval().generate(ids.cuda(), 8, temperature=0, table_ids=ids)
    assert torch.equal(on_gpu.cpu(), greedy)
    assert train(gpu.train()) == pytest.approx(train(cpu.train()), rel=1e-4)
    close = dict(rtol=1e-3, atol=1e-4)
    trained = gpu.state_dict()
    for name, weight in cpu.state_dict().items():
        torch.testing.assert_close(trained[name].cpu(), weight, **close)
    with torch.no_grad():
        torch.testing.assert_close(gpu.eval()(ids.cuda())[0].cpu(), cpu.eval()(ids)[0], **close)


@pytest.mark.parametrize(
    ("ffn", "tables"), [*((ffn, ResidentTables) for ffn in BUILT_IN), ("stem", offloaded)]
)
def test_captured_steps_write_what_ordinary_ones_do(ffn, tables):
    model = decoder(ffn, "cuda", tables).eval()
    ids = torch.randint(60, (2, 9))
    ordinary = model.generate(ids.cuda(), 50, temperature=0, table_ids=ids)  # more than fit
    capture_steps(model)
    for _ in range(2):
        replayed = model.generate(ids.cuda(), 50, temperature=0, table_ids=ids)
        assert torch.equal(replayed, ordinary)


def test_deterministic_runs_are_equal_to_the_bit_wherever_tables_are(data, tmp_path):
    """In 16 bits and with contexts so long that attention's backward pass adds up in any order, and
    each in a process, as cuBLAS is told once."""
    shape = flags(n_layer=2, n_head=2, n_embd=128, block_size=512, batch_size=16)
    line = ["--data_dir", data, "--deterministic", *shape, *flags(max_iters=12, eval_interval=6)]
    for offload in ("none", "cpu", "disk"):
        out = tmp_path / offload
        words = [ROOT / "train.py", *line, "--offload", offload, "--out_dir", out]
        subprocess.run([sys.executable, *words], check=True)
        assert_same_run(tmp_path / "none", out)


def test_copies_overlap_compute(tmp_path):
    """In a profile, most of the time that rows are on their way, a kernel is running: those of the
    next batch come during this one."""
    storage = DiskStorage.create(tmp_path / "tables", (2048, 8, 4096), torch.float32)
    tables = OffloadedTables(storage, "cuda").train()  # 16 MB of rows for each table and batch
    square = torch.randn(4096, 4096, device="cuda")
    even, odd = torch.arange(2048)[None].chunk(2, dim=1)

    def step(ids: torch.Tensor, later: torch.Tensor) -> None:
        found = [rows.detach() for rows in tables.lookup(ids)]
        tables.prefetch(later)
        for rows in found:
            for _ in range(60):  # longer than it takes to gather the next rows
                rows = rows @ square
        tables.zero_grad()
        tables.updated()  # writes them back, and keeps the next ones
        tables.transfers.finish()
        torch.cuda.synchronize()

    step(even, odd)  # slots grow here, which makes transfers wait
    step(odd, even)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step(even, odd)
    on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = [e.time_range for e in on_gpu if "HtoD" in e.name]
    kernels = [e.time_range for e in on_gpu if not e.name.startswith("Mem")]
    hidden = 0.0
    for moved in copies:
        for kernel in kernels:
            hidden += max(0, min(moved.end, kernel.end) - max(moved.start, kernel.start))
    assert hidden > 0.5 * sum(moved.elapsed_us() for moved in copies) > 0
