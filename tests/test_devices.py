"""Which device a process takes, and how it is set up; GPUs are made up."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import CPU, Largest, small_run, user_error

import common
from common import pick_device, training_dtype
from training import ranks


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two GPUs. Returns what was called on it."""
    called = []

    def zeros(*size, device):
        device = torch.device(device)
        if device.type == "cuda" and (device.index or 0) > 1:
            raise RuntimeError("CUDA error: invalid device ordinal")
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)  # as tensors have it
        return SimpleNamespace(device=device, item=lambda: 0.0)

    def set_device(device):
        assert device.index is not None
        called.append(str(device))

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(
        torch.backends.cuda, "enable_cudnn_sdp", lambda on: called.append(f"cudnn {on}")
    )
    return called


def test_a_gpu_is_made_the_current_one_and_decodes_without_cudnn_attention(two_gpus):
    assert str(pick_device("cuda:1")) == "cuda:1"
    assert two_gpus == ["cuda:1", "cudnn False"]
    assert str(pick_device("auto")) == str(pick_device("cuda")) == "cuda:0"


def test_processes_of_torchrun_take_the_gpu_of_their_rank(two_gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert str(pick_device("auto")) == str(pick_device("cuda")) == "cuda:1"
    assert str(pick_device("cpu")) == "cpu"
    with user_error("cuda:0"):
        pick_device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "2")  # more processes than GPUs
    with user_error("cuda:2"):
        pick_device("auto")


def test_without_a_gpu_auto_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert str(pick_device("auto")) == "cpu"

    def no_cuda(*size, device):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch, "zeros", no_cuda)  # on a machine with a GPU, too
    with user_error("--device cuda"):
        pick_device("cuda")


def test_a_gpu_that_is_there_but_does_not_compute_is_one_line_with_its_reason(monkeypatch):
    """As one that is too old for this PyTorch, or has no memory left."""
    reason = "CUDA error: no kernel image is available for execution on the device"

    def no_kernel(*size, device):
        raise RuntimeError(f"{reason}\nCUDA kernel errors might be asynchronously reported")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", no_kernel)
    with user_error() as refused:
        pick_device("auto")  # which another --device auto would not help
    assert str(refused.value) == f"--device cuda does not work here ({reason}): try --device cpu"
    reason = (  # of the build for CUDA, where there is no GPU
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and "
        "installed a driver from http://www.nvidia.com/Download/index.aspx"
    )
    with user_error(r"an NVIDIA GPU and \.\.\.\): try"):
        pick_device("cuda")  # no word is cut


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("fpu avx512f avx512_bf16", "bfloat16"),
        ("fpu amx_tile amx_bf16", "bfloat16"),
        ("fpu avx2 avx512f", "float32"),  # it would only emulate bfloat16
    ],
)
def test_a_cpu_trains_in_bfloat16_if_it_multiplies_it(flags, dtype, tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    file.write_text(f"model name : made up\nflags : {flags}\n")
    monkeypatch.setattr(common, "CPU_INFO", file)
    assert training_dtype("auto", CPU) == dtype
    assert training_dtype("float32", CPU) == "float32"


@pytest.mark.parametrize(("native", "dtype"), [(True, "bfloat16"), (False, "float16")])
def test_a_gpu_trains_in_what_it_multiplies_itself(native, dtype, monkeypatch):
    def supported(including_emulation=True):
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert training_dtype("auto", torch.device("cuda")) == dtype


def test_a_build_without_distributed_trains(data, tmp_path, monkeypatch):
    """As wheels for Jetson may be. torch.distributed then has no other function."""
    monkeypatch.setattr(dist, "is_available", lambda: False)
    for name in ("is_initialized", "is_torchelastic_launched", "get_world_size"):
        monkeypatch.delattr(dist, name)
    with ranks.joined():
        small_run(data, tmp_path / "out", offload="disk", max_iters=1)


def test_whether_all_numbers_are_finite_takes_no_memory():
    numbers = torch.zeros(1).expand(1 << 25)
    with Largest() as largest:
        assert common.all_finite(numbers)
    assert largest.numbers == 2  # the least and the largest
    for finite in (torch.zeros(0), torch.ones(2).bool(), torch.zeros(2).to(torch.uint16)):
        assert common.all_finite(finite)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2):
        for number in (1.0, torch.inf, -torch.inf, torch.nan):
            numbers = torch.tensor([[0.0, number], [1.0, 2.0]])
            assert common.all_finite(numbers.to(dtype)) == math.isfinite(number)
