"""Which device a process takes, and how it is set up; GPUs are made up."""

from dataclasses import replace

import pytest
import torch
from conftest import CPU

import common
from common import UserError, pick_device
from model import CHUNK, Decoder, ModelConfig
from train import training_dtype
from training.report import model_sizes
from training.settings import PRESETS, Settings

REAL_ZEROS = torch.zeros


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two GPUs. Returns what was called on it."""
    called = []

    def zeros(*size, device):
        device = torch.device(device)
        if device.type == "cuda" and (device.index or 0) > 1:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return REAL_ZEROS(*size)

    def set_device(device):
        if device.index is None:
            raise ValueError("Expected a torch.device with a specified index")
        called.append(str(device))

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
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
    with pytest.raises(UserError, match="cuda:0"):
        pick_device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "2")  # more processes than GPUs
    with pytest.raises(UserError, match="cuda:2"):
        pick_device("auto")


def test_without_a_gpu_auto_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert str(pick_device("auto")) == "cpu"
    with pytest.raises(UserError, match="--device cuda"):
        pick_device("cuda")


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


def kept_for_backward(config: ModelConfig, n_token: int) -> int:
    """Bytes that a forward pass of one sequence keeps, weights included."""
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # alive, so that no other has this address
        return tensor

    ids = torch.randint(config.vocab_size, (1, n_token))
    saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with saving, torch.autocast("cpu", torch.bfloat16):
        Decoder(config)(ids, ids)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_train_on_a_gpu_of_16_gb(name, monkeypatch):
    """Its 15 GiB hold activations, float32 weights, gradients and AdamW's two moments, and a chunk
    of logits in five forms: in 16 bits and in 32, their softmax, and the gradients of both."""
    monkeypatch.setitem(CHUNK, "cpu", 1)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # a CPU attends in 32 bits
    settings = Settings.from_flat({**PRESETS[name], "vocab_size": 6400})
    config = settings.model
    thin = replace(config, n_layer=2)
    of_a_token = (kept_for_backward(thin, 64) - kept_for_backward(thin, 32)) / 32
    of_a_sequence = of_a_token * config.block_size * config.n_layer / 2
    with torch.device("meta"):
        n_parameter = model_sizes(Decoder(config))["total"]
    need = settings.device_batch_size * of_a_sequence + 16 * n_parameter + 16 * CHUNK["cuda"]
    assert of_a_sequence > 0 and need < 15 * 2**30
