"""What only a CUDA device can show: the same results there, and no needless wait for it."""

import copy

import pytest
import torch

from model import LAYERS, Decoder, ModelConfig
from rowadam import RowAdam

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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


def test_reading_rows_by_ids_on_the_cpu_does_not_wait_for_the_gpu():
    tables = decoder("stem").cuda().tables.train()
    ids = torch.randint(60, (4, 32)).pin_memory()
    list(tables.lookup(ids))  # allocations out of the way
    torch.cuda.set_sync_debug_mode("error")
    try:
        list(tables.lookup(ids))
    finally:
        torch.cuda.set_sync_debug_mode("default")
