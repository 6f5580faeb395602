"""What only a CUDA device can show: the same results there, and no needless wait for it."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from naive import LAYERS
from test_offload import RealGpu, batch
from test_offload import train as train_rows

from model import Decoder, decoder_class
from offload import OffloadedTables
from tables.rmsprop import RowRMSprop
from tables.storage import RamStorage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = RealGpu()


@pytest.fixture(autouse=True)
def exact():
    """No TF32, which training switches on."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def decoder(ffn: str) -> Decoder:
    torch.manual_seed(0)
    kind = decoder_class(ffn)
    return kind(kind.config_class(60, 32, 3, 4, 64, n_kv_head=2, ffn=ffn, table_std=0.5))


def train(model: Decoder, device: str, steps: int = 3) -> tuple[list[float], Decoder]:
    """A few steps of plain SGD on the backbone and RMSprop on the tables."""
    model = copy.deepcopy(model).to(device)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = None
    if len(model.tables.weight):
        # eps: a gradient that is zero but for rounding must not become a step.
        rows = RowRMSprop(model.tables, eps=1e-4)
    losses = []
    for number in range(steps):
        ids = batch(number, (4, 32)) % 60
        loss = model(ids.to(device), ids.to(device), table_ids=ids)[1]  # table ids on the CPU
        loss.backward()
        losses.append(loss.item())
        sgd.step()
        sgd.zero_grad()
        if rows is not None:
            rows.step(lr=0.01)
    return losses, model


@pytest.mark.parametrize("ffn", LAYERS)
def test_training_and_decoding_on_the_gpu_equal_the_cpu(ffn):
    on_cpu, cpu_model = train(decoder(ffn), "cpu")
    on_gpu, gpu_model = train(decoder(ffn), "cuda")
    assert on_gpu == pytest.approx(on_cpu, rel=1e-4)
    for a, b in zip(cpu_model.parameters(), gpu_model.parameters(), strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-3, atol=1e-4)
    ids = torch.randint(60, (2, 9))
    greedy = cpu_model.eval().generate(ids, 8, temperature=0)
    decoded = gpu_model.eval().generate(ids.cuda(), 8, temperature=0, table_ids=ids)
    assert torch.equal(decoded.cpu(), greedy)


@pytest.mark.parametrize("training", [True, False])
def test_reading_rows_by_ids_on_the_cpu_does_not_wait_for_the_gpu(training):
    tables = decoder("stem").cuda().tables.train(training)
    ids = torch.randint(60, (16, 1024))
    list(tables.lookup(ids))  # allocations out of the way
    torch.cuda.synchronize()
    GPU.busy(torch.cuda.current_stream())
    rows = list(tables.lookup(ids))
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    expected = F.embedding(ids, tables.weight[0].cpu())
    assert torch.equal(rows[0].detach().cpu(), expected)


# --- offloaded tables (and see test_offload.py) ---


def test_device_memory_does_not_grow_with_the_vocabulary():
    peaks = []
    for vocab_size in (6_400, 131_072):
        gc.collect()
        before = torch.cuda.memory_allocated()
        tables = OffloadedTables(RamStorage((vocab_size, 4, 256), torch.float32), "cuda")
        optimizer = RowRMSprop(tables, state="number")
        for number in range(3):
            if number == 1:
                tables.flush()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            train_rows(tables, optimizer, batch(number, (4, 512)))
        tables.flush()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del tables, optimizer
    small, large = peaks
    assert small > 4 * 128 * 256 * 4  # at least the rows that were read
    assert large == pytest.approx(small, rel=0.01)
