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
