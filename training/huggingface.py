"""Llamas of Hugging Face (config.json, model.safetensors, tokenizer.json), read as checkpoints."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import tiktoken
import torch

from common import UserError
from config import ModelConfig
from text import tokenizer

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What our settings are called there, and what their weights are called here.
SHAPE = dict(n_layer="num_hidden_layers", n_head="num_attention_heads", norm_eps="rms_norm_eps")
SHAPE |= dict(n_kv_head="num_key_value_heads", n_embd="hidden_size", d_ff="intermediate_size")
SHAPE |= dict(block_size="max_position_embeddings", tie_head="tie_word_embeddings")
ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
WEIGHTS = {"model.layers": "blocks", "self_attn.o_proj": "attn.out", "input_layernorm": "attn_norm"}
WEIGHTS |= {"model.norm": "norm", "lm_head": "head", "post_attention_layernorm": "ffn_norm"}
WEIGHTS |= {"mlp.gate_proj": "ffn.gate", "mlp.up_proj": "ffn.up", "mlp.down_proj": "ffn.down"}
# How GPT-2, SmolLM2 and Llama 3 split text into words, and the pattern that does the same here.
GPT2 = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
LLAMA3 += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = dict(type="Split", pattern=dict(Regex=LLAMA3), behavior="Isolated", invert=False)
WORDS = [
    ([GPT2], tokenizer.PRETRAINED["gpt2"]),
    ([dict(type="Digits", individual_digits=True), GPT2], tokenizer.SMOLLM2),
    ([LLAMA3, {**GPT2, "use_regex": False}], tokenizer.PRETRAINED["cl100k_base"]),
]


def read_model(folder: Path) -> dict:
    """What `load_checkpoint` gives, weights as they are stored, mapped into memory except queries,
    keys and values. UserError: a file asks for what this decoder does not do."""
    found = json.loads((path := folder / "config.json").read_bytes())
    shape = {ours: found[theirs] for ours, theirs in SHAPE.items()}
    require(path, found, model_type="llama", head_dim=shape["n_embd"] // shape["n_head"])
    require(path, found, hidden_act="silu", attention_bias=False, mlp_bias=False)
    rope = found.get("rope_scaling") or found.get("rope_parameters") or {}
    kind = "llama3" if "low_freq_factor" in rope else "default"
    require(path, rope, rope_type=kind, type=kind)
    shape["rope_scaling"] = [rope[name] for name in ROPE] if kind == "llama3" else None
    shape["rope_base"] = found.get("rope_theta") or rope["rope_theta"]
    config, model = asdict(ModelConfig(found["vocab_size"], **shape, ffn="dense")), {}
    embedding = "wte.weight" if config["tie_head"] else "wte.weight.0"
    for path in sorted(folder.glob("model*.safetensors")) or [folder / "model.safetensors"]:
        file = np.memmap(path, mode="c")  # 8 bytes: the length of a JSON text; this; numbers
        start = 8 + int(file[:8].view("<u8")[0])
        for name, about in json.loads(file[8:start].tobytes()).items():
            if name != "__metadata__":
                for theirs, ours in {**WEIGHTS, "model.embed_tokens.weight": embedding}.items():
                    name = name.replace(theirs, ours)
                require(path, about, dtype=about["dtype"] if about["dtype"] in DTYPES else "F32")
                numbers = torch.from_numpy(file[start:][slice(*about["data_offsets"])])
                model[name] = numbers.view(DTYPES[about["dtype"]]).view(about["shape"])
    model.pop("head.weight" if config["tie_head"] else "", None)
    for at in [f"blocks.{layer}." for layer in range(config["n_layer"])]:
        qkv = [model.pop(f"{at}self_attn.{part}_proj.weight") for part in "qkv"]
        model[f"{at}attn.qkv.qkv.weight"] = torch.cat(qkv)
    text = read_tokenizer(folder / "tokenizer.json", found)
    args = {**config, "preset": "minimind-104m"}  # the nearest in size
    return dict(config=config, model=model, tables=None, tokenizer=text, args=args)


def read_tokenizer(path: Path, config: dict) -> str:
    """tokenizer.json as text for `tokenizer.loads`, where <|endoftext|> is the token that begins a
    text, however it is called. UserError: ids would not be the same."""
    found = json.loads(path.read_bytes())
    bpe, words = found["model"], found["pre_tokenizer"] or {}
    pattern = [our for their, our in WORDS if their == words.get("pretokenizers", [words])]
    if not pattern:
        raise UserError(f"{path}: pre_tokenizer {words!s:.60} is not GPT-2's, SmolLM2's, Llama 3's")
    require(path, {**found, **bpe}, normalizer=None, type="BPE", dropout=0, byte_fallback=False)
    # A byte is spelled by its character or, if that is not visible, by one from U+0100 on.
    order = sorted(range(256), key=lambda byte: byte != 32 and chr(byte).isprintable())
    spelled = {chr(256 + i if i < 68 else byte): byte for i, byte in enumerate(order)}
    special = {token["content"]: token["id"] for token in found["added_tokens"]}
    vocab = {token: i for token, i in bpe["vocab"].items() if token not in special}
    ranks = {bytes(spelled[letter] for letter in token): i for token, i in vocab.items()}
    # tiktoken looks up whole words, then joins whatever makes the token of the lowest id.
    made = [vocab["".join(merge).replace(" ", "")] for merge in bpe["merges"]]
    due = made if bpe.get("ignore_merges") else [i for token, i in ranks.items() if len(token) > 1]
    if made != sorted(due):
        raise UserError(f"{path}: merges in another order than that of ids are not supported")
    if "<|endoftext|>" not in special:
        names = {i: name for name, i in special.items()}
        special["<|endoftext|>"] = special.pop(names[config["bos_token_id"]])
    unused = {*range(config["vocab_size"])}.difference(ranks.values(), special.values())
    special |= {f"<|unused_{i}|>": i for i in unused}
    options = dict(pat_str=pattern[0], mergeable_ranks=ranks, special_tokens=special)
    return tokenizer.dumps(tiktoken.Encoding("huggingface", **options))


def require(path: Path, found: dict, **needed) -> None:
    """UserError: a setting, if there is one, has another value."""
    for name, value in needed.items():
        if found.get(name) not in (None, value):
            raise UserError(f"{path}: {name} {found[name]!s:.80} is not supported, only {value}")
