"""Models in folders of Hugging Face: Llamas, Qwen2s and Qwen3s, there and back, and Embformers of
their author. text/huggingface.py has the tokenizer.

A folder has config.json, model*.safetensors (or pytorch_model*.bin) and tokenizer.json.
docs/data-and-stages.md says which models can be read.
"""

import json
import math
import sys
import zipfile
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch import Tensor

from common import (
    Damage,
    UserError,
    all_finite,
    atomic,
    parse_json,
    printable,
    reading,
    require_fields,
)
from model import Decoder, ModelConfig
from text import tokenizer
from text.huggingface import check_pattern, read_tokenizer, require, write_tokenizer

# Fields of ModelConfig, and what config.json calls them.
SIZES = {
    "vocab_size": "vocab_size",
    "block_size": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "d_ff": "intermediate_size",  # not in an Embformer
    "head_dim": "head_dim",  # may be missing, except in a Qwen3
}
# Settings of config.json that may be missing, as transformers reads a Llama's.
OPTIONAL = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
# And what others must be, if they are there.
REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "is_causal": True,
    "per_layer_config": None,
    "transformers_weights": None,  # a file of another name
    "quantization_config": None,
}
# Or, by the kind of model.
KINDS = {
    "llama": {"auto_map": None},  # code in the folder
    "qwen2": {"auto_map": None},
    "qwen3": {"auto_map": None},
    "embformer": {"tie_word_embeddings": True, "use_channel_shift": True},
}
ATTENTION = {"llama": "full", "qwen2": "qkvbias", "qwen3": "qknorm"}  # of dense models
# The types of all that may be there.
OF_TYPES = dict(
    rope_scaling=dict | None,
    rope_parameters=dict | None,
    bos_token_id=int | None,
    eos_token_id=int | list[int] | None,
    rms_norm_eps=float,
    tie_word_embeddings=bool,
    rope_theta=float | None,
)
AGAIN = "correct it, or download it again"
# What changes no logits of a dense model, or is compared by itself.
NO_LOGITS = {"attention", "attention_kinds", "dropout", "init_std", "table_std"}
NO_LOGITS |= {"stem_layers", "embformer_act"}
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# The weights of a layer there and here.
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn.out",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn.gate",
    "mlp.up_proj": "ffn.up",
    "mlp.down_proj": "ffn.down",
}
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def named_weights(model: Decoder) -> dict[str, Tensor]:
    """The weights of a dense model by the names that they have in a Llama, Qwen2 or Qwen3; those of
    an Embformer by its author's. They share the model's memory, so this is the way in and the way
    out."""
    config = model.config
    ours = model.state_dict()
    n_q = config.n_head * config.head_dim
    n_kv = config.n_kv_head * config.head_dim
    if config.embedding_only:
        weights = {"model.embed_tokens.weight": ours["wte.weight"]}
        for layer in range(config.n_layer):
            # K | V | F are three tables there and one here.
            tables = ours[f"tables.weight.{layer}"].split([n_kv, n_kv, config.n_embd], dim=1)
            names = ("self_attn.k_embed", "self_attn.v_embed", "ffn.gate_embed")
            for name, table in zip(names, tables, strict=True):
                weights[f"model.layers.{layer}.{name}.weight"] = table
        return weights
    weights = {"model.norm.weight": ours["norm.weight"]}
    if config.tie_head:
        weights["model.embed_tokens.weight"] = ours["wte.weight"]
    else:
        weights["model.embed_tokens.weight"] = ours["wte.weight.0"]
        weights["lm_head.weight"] = ours["head.weight"]
    for layer in range(config.n_layer):
        for theirs, name in NAMES.items():
            weights[f"model.layers.{layer}.{theirs}.weight"] = ours[f"blocks.{layer}.{name}.weight"]
        qkv, attention = f"blocks.{layer}.attn.qkv", f"model.layers.{layer}.self_attn"
        # Queries, keys and values are three matrices there and one here, and so are biases.
        parts = {}
        if config.attention_kinds[layer] == "qknorm":
            for name in ("q_norm", "k_norm"):
                weights[f"{attention}.{name}.weight"] = ours[f"{qkv}.{name}.weight"]
            qkv += ".qkv"
        if config.attention_kinds[layer] == "qkvbias":
            parts["bias"] = ours[f"{qkv}.bias"]
            qkv += ".qkv"
        parts["weight"] = ours[f"{qkv}.qkv.weight"]
        for name, three in parts.items():
            for part, weight in zip("qkv", three.split([n_q, n_kv, n_kv]), strict=True):
                weights[f"{attention}.{part}_proj.{name}"] = weight
    return weights


# --- reading ---


def read_folder(folder: Path) -> tuple[Decoder, tiktoken.Encoding]:
    """The model in a folder of Hugging Face and its tokenizer. UserError: see `read_model`."""
    model, bos_id, eos_ids = read_model(folder)
    encoding = read_tokenizer(folder / "tokenizer.json", model.config.vocab_size, bos_id)
    ends = {encoding.decode([i]) for i in eos_ids if 0 <= i < encoding.n_vocab}
    if ends and ends.isdisjoint(tokenizer.ENDS):
        note = f"note: {folder} ends texts with {', '.join(sorted(ends))}: sampling goes on there"
        print(printable(note), file=sys.stderr)
    return model, encoding


def read_model(folder: Path) -> tuple[Decoder, int | None, list[int]]:
    """A Llama, Qwen2, Qwen3 or Embformer in a folder of Hugging Face, its weights in float32, the
    id that begins a text and those that end one. UserError: a file is missing or damaged, or asks
    for what this decoder does not do."""
    path = folder / "config.json"
    record = read_config(path)
    weights = read_weights(folder)
    with reading(path, AGAIN):
        config = their_config(path, record, weights)
    head = weights.pop("lm_head.weight", None) if config.tie_head else None
    with torch.device("meta"):  # nothing is allocated before all shapes are right
        model = Decoder(config)
    check_weights(folder, weights, named_weights(model))
    # Room for what files have. What they lack, Embformer's `mix`, is there and stays.
    room = {name: torch.empty_like(w, device="cpu") for name, w in model.state_dict().items()}
    model.load_state_dict(room, assign=True)
    for name, weight in named_weights(model).items():
        weight.copy_(weights[name].detach())  # somebody pickles parameters
        if not all_finite(weight):
            raise UserError(f"{folder}: {name} has numbers that are not finite: download it again")
    if head is not None and not torch.equal(head, weights["model.embed_tokens.weight"]):
        differs = "but lm_head.weight is not the embedding: if it is the head, set it to false"
        raise UserError(f"{path}: tie_word_embeddings is true, {differs}")
    ends = record.get("eos_token_id", [])
    return model, record.get("bos_token_id"), ends if isinstance(ends, list) else [ends]


def check_weights(
    path: str | Path, weights: dict[str, Tensor], expected: dict[str, Tensor]
) -> None:
    """UserError: the names or shapes of weights are not the expected ones."""
    for name in [*expected, *weights]:
        if name not in weights:
            raise UserError(f"{path} lacks the weight {name}: is a file missing?")
        if name not in expected:
            raise UserError(f"{path} has a weight {name} that its config does not call for")
        if weights[name].shape != expected[name].shape:
            raise UserError(
                f"{path}: the weight {name} has shape {list(weights[name].shape)}, "
                f"not {list(expected[name].shape)}"
            )


def read_config(path: Path) -> dict:
    """What config.json says, with what transformers reads where it says nothing."""
    fix = "name a folder of Hugging Face, or give --ffn stem with a dense ckpt.pt"
    with reading(path, AGAIN if path.exists() else fix):
        record = parse_json(path.read_bytes())
        given = {name: value for name, value in record.items() if value is not None}
        record = {**OPTIONAL, **given}
        record.setdefault("num_key_value_heads", record.get("num_attention_heads"))
        require_fields(record, **OF_TYPES)
    kind = record.get("model_type")
    if kind not in [*KINDS]:
        known = " or ".join(KINDS)
        raise UserError(f"{path}: model_type {kind!s:.40} is not supported, only {known}")
    for name, value in {**REQUIRED, **KINDS[kind]}.items():
        require(path, record, name, value)
    return record


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder by name, mapped into memory. The files are those that lie in it: no
    name that an index or a config says is opened."""
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{folder} has adapter_config.json, a LoRA, which is not read: write what peft's "
            "merge_and_unload() returns to another folder"
        )
    paths = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not paths:
        raise UserError(f"{folder} has no weights: model.safetensors or pytorch_model.bin is read")
    weights = {}
    for path in paths:
        read = read_pickled if path.suffix == ".bin" else read_safetensors
        for name, tensor in read(path).items():
            if name in weights:
                raise UserError(f"{path}: {name} is in another file, too: remove one of the files")
            if not name.endswith("rotary_emb.inv_freq"):  # which older files have
                weights[name] = tensor
    return weights


def their_config(path: Path, record: dict, weights: dict[str, Tensor]) -> ModelConfig:
    """The shape that config.json describes. UserError: it is not that of a decoder here, or larger
    than the weights are. Damage: a size is missing, or no number."""
    kind = record["model_type"]
    sizes = dict(SIZES)
    if kind == "embformer":
        del sizes["d_ff"]
    if kind != "qwen3" and "head_dim" not in record:
        del sizes["head_dim"]
    require_fields(record, **dict.fromkeys(sizes.values(), int))
    # Before anything of that size is built.
    largest = max((n for weight in weights.values() for n in weight.shape), default=0)
    most = {"max_position_embeddings": 2**31, "num_hidden_layers": len(weights)}
    for name in sizes.values():
        if record[name] > most.get(name, largest):
            raise UserError(f"{path}: {name} {record[name]} is more than its weights have")
    require(path, record, "layer_types", ["full_attention"] * record["num_hidden_layers"])
    theta, scaling = rotations(path, record)
    try:
        return ModelConfig(
            **{ours: record[theirs] for ours, theirs in sizes.items()},
            ffn="embformer" if kind == "embformer" else "dense",
            attention=ATTENTION.get(kind, "full"),
            tie_head=record["tie_word_embeddings"],
            norm_eps=record["rms_norm_eps"],
            rope_base=theta,
            rope_scaling=scaling,
        )
    except UserError as error:  # it speaks of flags
        raise UserError(f"{path}: {error}") from None


def rotations(path: Path, record: dict) -> tuple[float, list[float] | None]:
    """The base of the rotations of config.json, and how they are slowed down, if they are, as Llama
    3.1's (model.rotary). UserError: in another way. Damage: by no number."""
    rope = record.get("rope_scaling") or record.get("rope_parameters") or {}
    require(path, record, "rope_parameters", rope)  # the same, if it is said twice
    for name, value in rope.items():
        if isinstance(value, dict):
            raise UserError(f"{path}: rotations of {name} alone are not supported")
    theta = record.get("rope_theta", rope.get("rope_theta", 10000.0))
    require(path, rope, "rope_theta", theta)
    for settings in (record, rope):
        require(path, settings, "partial_rotary_factor", 1)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ["default", "llama3"]:
        raise UserError(f"{path}: rope_type {kind!s:.40} is not supported, only default or llama3")
    require(path, rope, "type", kind)
    if kind == "default":
        require(path, rope, "factor", 1)
        return theta, None
    require_fields(rope, **dict.fromkeys(LLAMA3_ROPE, float))
    factor, low, high, context = scaling = [rope[name] for name in LLAMA3_ROPE]
    if factor < 1 or low >= high:  # ModelConfig refuses what is not above 0, or not finite
        raise Damage(f"rope_scaling {rope}")
    require(path, record, "original_max_position_embeddings", context)
    return theta, scaling


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory. It begins with 8 bytes, the length of a header;
    the header is JSON, with dtype, shape and place of each tensor; then come all numbers, tensor
    after tensor, to the end of the file."""
    tensors = {}
    with reading(path, "download it again"):
        if path.stat().st_size < 8:
            raise Damage("it is too short")
        file = np.memmap(path, mode="c")  # copy on write: PyTorch wants arrays it may write to
        start = 8 + int(file[:8].view("<u8")[0])
        header = parse_json(file[8:start].tobytes())
        header.pop("__metadata__", None)
        for about in header.values():
            require_fields(about, dtype=str, shape=list[int], data_offsets=list[int])
        at = 0
        for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if about["dtype"] not in DTYPES:
                raise UserError(f"{path}: dtype {about['dtype']} of {name} is not supported")
            dtype, shape = DTYPES[about["dtype"]], about["shape"]
            end = at + math.prod(shape) * dtype.itemsize
            is_there = about["data_offsets"] == [at, end] and start + end <= len(file)
            if not is_there or min(shape, default=1) < 1:
                raise Damage(f"{name} is {about}, where {at} to {end} should be its bytes")
            numbers = torch.from_numpy(file[start + at : start + end])
            tensors[name] = numbers.view(dtype).reshape(shape)
            at = end
        if start + at != len(file):
            raise Damage(f"{len(file):,} bytes, not {start + at:,}")
    return tensors


def read_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a pytorch_model.bin, mapped into memory."""
    with reading(path, "download it again"):
        try:
            with zipfile.ZipFile(path) as archive:
                if any(part.compress_type for part in archive.infolist()):  # to more than memory
                    raise Damage
            weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, MemoryError):
            raise
        except Exception:  # of all kinds
            raise Damage("not tensors and nothing else") from None
        require_fields(weights)
        for name, weight in weights.items():
            if not isinstance(weight, Tensor) or weight.dtype not in DTYPES.values():
                raise Damage(f"{name} is not a tensor of floating-point numbers")
            is_dense = weight.layout == torch.strided
            if not is_dense or weight.untyped_storage().nbytes() < weight.nbytes:
                raise Damage(f"{name} has not all of its numbers")  # but would fill memory
    return weights


# --- writing ---


def write_folder(folder: Path, model: Decoder, encoding: tiktoken.Encoding) -> None:
    """The inverse of `read_folder`. UserError: no Llama, Qwen2 or Qwen3 is like this model."""
    config = model.config
    kinds = {attention: kind for kind, attention in ATTENTION.items()}
    kind = kinds.get(config.attention_kinds[0])
    wrong = ""
    if config.ffn != "dense":
        wrong = f"--ffn {config.ffn}"
    elif kind is None or len({*config.attention_kinds}) > 1:
        wrong = f"--attention {config.attention}"
    if wrong:
        raise UserError(
            f"--export: a Llama or Qwen is dense, with full attention: it cannot be {wrong}; "
            "train one with --ffn dense on the same text"
        )
    weights = named_weights(model)
    n_all = sum(weight.numel() for weight in model.state_dict().values())
    n_left = n_all - sum(weight.numel() for weight in weights.values())
    if n_left:
        raise UserError(
            f"--export: {n_left:,} numbers of the model have no place in a Llama or Qwen: they "
            "come from a changed model.py"
        )
    check_pattern(folder, encoding._pat_str)
    record = {
        "architectures": [f"{kind.title()}ForCausalLM"],
        "model_type": kind,
        "tie_word_embeddings": config.tie_head,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "bos_token_id": encoding.eot_token,
        "eos_token_id": encoding.eot_token,
    }
    for ours, theirs in SIZES.items():
        record[theirs] = getattr(config, ours)
    if config.rope_scaling is not None:
        scaling = dict(zip(LLAMA3_ROPE, config.rope_scaling, strict=True))
        record["rope_scaling"] = {"rope_type": "llama3", **scaling}
    # What ends a text and an answer, for `generate`.
    generation = {name: encoding.eot_token for name in ("bos_token_id", "pad_token_id")}
    generation["eos_token_id"] = sorted(tokenizer.ends(encoding))
    with atomic(folder) as unfinished:
        unfinished.mkdir()
        write_tokenizer(unfinished, encoding, config.block_size)
        write_safetensors(unfinished / "model.safetensors", weights)
        path = unfinished / "config.json"
        path.write_text(json.dumps(record))
        with reading(path, AGAIN):
            theirs = their_config(path, read_config(path), weights)
        for name in sorted(set(vars(theirs)) - NO_LOGITS):
            if getattr(theirs, name) != getattr(config, name):
                raise UserError(f"--export: no Llama or Qwen has --{name} {getattr(config, name)}")
        (unfinished / "generation_config.json").write_text(json.dumps(generation))


def write_safetensors(path: Path, weights: dict[str, Tensor]) -> None:
    header = {"__metadata__": {"format": "pt"}}  # transformers insists on it
    end = 0
    for name, weight in weights.items():
        begin = end
        end = begin + 4 * weight.numel()
        header[name] = {"dtype": "F32", "shape": weight.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # numbers begin at a multiple of 8 bytes
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for weight in weights.values():
            file.write(weight.float().contiguous().numpy())  # also of a model in 16 bits
