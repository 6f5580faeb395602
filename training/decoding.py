"""A model that is loaded to decode: threads, the dtype of its weights, and how they lie."""

import os
import sys
from pathlib import Path
from typing import Any

import tiktoken
import torch
from torch import nn

from common import UserError, flag, has_bfloat16
from model import Decoder
from tables.tables import ResidentTables
from text.tokenizer import START
from training.checkpoints import load_model
from training.settings import STAGES


def decoding_dtype_flag() -> Any:
    about = "dtype of the backbone and cache; auto: bfloat16 on GPUs that support it"
    return flag("auto", about, choices=("auto", "float32", "bfloat16"))


def load_to_decode(
    path: str | Path,
    device: torch.device,
    offload: str = "none",
    dtype: str = "float32",
    verify: bool = False,
) -> tuple[Decoder, tiktoken.Encoding, dict]:
    """As `load_model`, for commands that decode a token or two at a time. On a CPU, more than one
    thread is no faster for these, and slower beside other programs (docs/results.md): from here on,
    there is one, unless OMP_NUM_THREADS says otherwise.

    dtype: of the backbone; auto is bfloat16 on GPUs that multiply it."""
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    model, encoding, checkpoint = load_model(path, device, offload, verify=verify)
    on_gpu = device.type == "cuda" and has_bfloat16(device)
    in_16_bits = dtype == "bfloat16" or (dtype == "auto" and on_gpu)
    cast_backbone(model, torch.bfloat16 if in_16_bits else torch.float32)
    if device.type == "cpu":
        use_column_major_weights(model)
    return model, encoding, checkpoint


def chats(checkpoint: dict) -> bool:
    """Whether a model was trained to chat here; what others did, a checkpoint does not say."""
    return STAGES[checkpoint["args"].get("stage", "pretrain")].reads != "text"


def check_chat(path: str | Path, encoding: tiktoken.Encoding, checkpoint: dict) -> None:
    """For --chat: say so if the model was not trained to chat here. UserError: it cannot."""
    if START not in encoding.special_tokens_set:
        raise UserError(f"--chat: {path} has no token {START}")
    if not chats(checkpoint):
        print(f"{path} was not trained to chat by train.py --stage sft", file=sys.stderr)


def cast_backbone(model: Decoder, dtype: torch.dtype) -> None:
    """Cast all but the tables, whose rows are few in a step, and may be saved again."""
    for name, module in model.named_children():
        if name != "tables":
            # As module.float() does. Its to(dtype) casts complex numbers to real ones, too.
            module._apply(lambda weight: weight.to(dtype) if weight.is_floating_point() else weight)


@torch.no_grad()
def use_column_major_weights(model: Decoder) -> None:
    """Store linear layers with more outputs than inputs column by column: on a CPU, multiplying a
    single row by them is up to twice as fast. The same goes for a head that is the input embedding.
    Its lookups then take longer, by milliseconds for a long prompt."""
    matrices = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if model.head is None:
        matrices.append(model.wte)
    for module in matrices:
        n_out, n_in = module.weight.shape
        if n_out > n_in:
            module.weight.data = module.weight.T.contiguous().T


@torch.no_grad()
def norm_keys(model: Decoder) -> None:
    """Norm Embformer's keys in resident tables. A key depends on its token alone, so one norm will
    do for all steps of decoding from ids. Tables of another dtype than the backbone's are left
    alone: their keys would be rounded at another point of the computation."""
    tables = model.tables
    if isinstance(tables, ResidentTables) and tables.weight[0].dtype == model.head_weight.dtype:
        for block, rows in zip(model.blocks, tables.weight, strict=True):  # [V, W], K | V | F
            qkv = block.attn.qkv
            keys = rows[:, : qkv.row_width // 2].unflatten(-1, (-1, qkv.head_dim))
            keys.copy_(qkv.norm(keys))
            qkv.keys_are_normed = True
