"""What only a CUDA device can show: the same results there, and no needless wait for it."""

import gc

import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, losses, small_run
from naive import LAYERS, decoder, tokens
from test_offload import RealGpu, batch, train

from offload import OffloadedTables
from tables.rmsprop import RowRMSprop
from tables.storage import RamStorage
from training.checkpoints import load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = RealGpu()


@pytest.mark.parametrize("ffn", LAYERS)
def test_training_and_decoding_on_the_gpu_equal_the_cpu(ffn, data, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)  # no TF32
    on_cpu = small_run(data, tmp_path / "cpu", ffn=ffn)
    on_gpu = small_run(data, tmp_path / "gpu", ffn=ffn, device="cuda")
    assert losses(on_gpu) == pytest.approx(losses(on_cpu), rel=1e-3)
    texts = []
    for device in (CPU, GPU.device):
        model, _, _ = load_model(on_cpu / "ckpt.pt", device)
        texts.append(model.generate(torch.arange(9, device=device)[None], 20, temperature=0).cpu())
    assert torch.equal(*texts)


@pytest.mark.parametrize("training", [True, False])
def test_reading_rows_by_ids_on_the_cpu_does_not_wait_for_the_gpu(training):
    tables = decoder().cuda().tables.train(training)
    ids = tokens(16, 1024)
    list(tables.lookup(ids))  # allocations out of the way
    torch.cuda.synchronize()
    GPU.busy(torch.cuda.current_stream())
    rows = list(tables.lookup(ids))
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    expected = F.embedding(ids, tables.weight[0].cpu())
    assert torch.equal(rows[0].detach().cpu(), expected)


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
            train(tables, optimizer, batch(number, (4, 512)))
        tables.flush()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del tables, optimizer
    small, large = peaks
    assert small > 4 * 128 * 256 * 4  # at least the rows that were read
    assert large == pytest.approx(small, rel=0.01)
