"""Whether a GPU reads and writes memory of the host where it is; GPUs are made up."""

import ctypes
import sys
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from tables import zero_copy


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
