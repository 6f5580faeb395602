"""Whether a GPU reads and writes memory of the host where it is, and by which kernel; GPUs are made
up."""

import ctypes
import sys
from contextlib import nullcontext
from inspect import unwrap
from unittest.mock import Mock

import pytest
import torch

from tables import zero_copy
from tables.storage import RamStorage


class PTXASError(Exception):
    """As Triton's, a class of its own."""


@pytest.fixture
def pinned(monkeypatch):
    """A made-up GPU, which pins nothing (CUDA error 2). Returns what was to be pinned."""
    cudart = Mock()
    cudart.cudaHostRegister.return_value = 2
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return cudart.cudaHostRegister


@pytest.mark.parametrize(
    ("same_addresses", "platform", "hip", "why"),
    [
        (1, "linux", None, "CUDA error 2"),
        (0, "linux", None, "other addresses"),  # WSL2: sglang issue 40232
        (1, "win32", None, "other addresses"),
        (1, "linux", "6.4", "other addresses"),  # AMD: see hipHostRegister
    ],
)
def test_memory_is_pinned_only_if_the_gpu_sees_it_at_the_same_addresses(
    same_addresses, platform, hip, why, pinned, monkeypatch
):
    def answer(pointer, attribute, device):
        assert (attribute, device) == (91, 1)
        pointer._obj.value = same_addresses

    driver = Mock()
    driver.cuDeviceGetAttribute = answer
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(torch.version, "hip", hip)
    with pytest.raises(OSError, match=why):
        zero_copy.seen_by_gpu(torch.zeros(2, 3), torch.device("cpu"), owner=Mock())
    assert pinned.called == (why == "CUDA error 2")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        AssertionError("libcuda.so cannot found!"),
        PTXASError("Value 'sm_121a' is not defined for option 'gpu-name'"),  # triton issue 8539
    ],
)
def test_where_triton_does_not_compile_pytorch_copies(error, monkeypatch):
    kernel = {(1,): Mock(side_effect=error)}
    monkeypatch.setattr(zero_copy, "triton", Mock())
    monkeypatch.setattr(zero_copy, "copy_kernel", kernel, raising=False)
    monkeypatch.setattr(torch, "zeros", Mock())
    assert not unwrap(zero_copy.triton_works)(torch.device("cuda", 0))
    assert kernel[(1,)].called


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 3, 8193])  # the last in two blocks
def test_rows_of_some_tables_are_copied_both_ways(width, dtype):
    device = torch.device("cuda", 0)
    storage = RamStorage((29, 3, width), dtype)
    rows = storage.arrays["rows"].normal_()  # [V, n_table, W]
    stored = zero_copy.seen_by_gpu(rows, device, owner=storage)
    slots = torch.zeros(3, 21, width, dtype=dtype, device=device)
    ids, at = torch.randperm(29)[:13], torch.randperm(21)[:13]
    moves = torch.stack((ids, at), dim=1).to(device)

    expected = slots.cpu()
    expected[1:, at] = rows[ids, 1:].transpose(0, 1)
    zero_copy.copy_records(stored, slots, moves, slice(1, 3), to_device=True)
    assert torch.equal(slots.cpu(), expected)

    slots.neg_()
    expected = rows.clone()
    expected[ids, 1:] *= -1
    zero_copy.copy_records(stored, slots, moves, slice(1, 3), to_device=False)
    torch.cuda.synchronize()
    assert torch.equal(rows, expected)
