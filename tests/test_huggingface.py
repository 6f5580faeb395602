"""Folders of Hugging Face: with files written by hand, and beside transformers and tokenizers."""

import json
import math
import random
import re

import pytest
import torch
from conftest import command

from common import UserError
from text import tokenizer
from training.checkpoints import load_checkpoint, load_model
from training.huggingface import DTYPES, GPT2, LLAMA3, WORDS

CONFIG = dict(model_type="llama", vocab_size=300, hidden_size=32, intermediate_size=48)
CONFIG |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5)
CONFIG |= dict(max_position_embeddings=64, rope_theta=5e4, rope_scaling=None, hidden_act="silu")
CONFIG |= dict(tie_word_embeddings=True, attention_bias=False, mlp_bias=False, bos_token_id=0)
SLOW = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
SLOW |= dict(original_max_position_embeddings=32)
# Bytes as GPT-2 spells them: the space as Ġ, the line break as Ċ.
VISIBLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
LETTERS = {b: chr(b) for b in VISIBLE} | {b: chr(256 + i) for i, b in enumerate(HIDDEN)}
MERGES = ["l l", "h e", "he ll", "hell o", "Ġ hello", "Ċ Ċ", "1 2", "b c", "a bc"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def bpe(words: list[dict], special=SPECIAL, lacking=b"", **more) -> dict:
    """A tokenizer.json: special tokens, then single bytes, then merges."""
    letters = [LETTERS[b] for b in range(256) if b not in lacking]
    tokens = [*special, *letters, *(merge.replace(" ", "") for merge in MERGES)]
    model = dict(type="BPE", vocab={t: i for i, t in enumerate(tokens)}, merges=MERGES) | more
    words = dict(type="Sequence", pretokenizers=words) if len(words) > 1 else words[0]
    added = [dict(id=i, content=token, special=True) for i, token in enumerate(special)]
    return dict(added_tokens=added, normalizer=None, pre_tokenizer=words, model=model)


def save(folder, config=CONFIG, words=None, dtype="F32", parts=1) -> dict[str, torch.Tensor]:
    """Write a folder by hand. Returns its weights in float32."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(words or bpe([GPT2])))
    n, d_ff, kv = config["hidden_size"], config["intermediate_size"], config["hidden_size"] // 2
    block = {"input_layernorm": (n,), "post_attention_layernorm": (n,), "self_attn.q_proj": (n, n)}
    block |= {"self_attn.k_proj": (kv, n), "self_attn.v_proj": (kv, n), "self_attn.o_proj": (n, n)}
    block |= {"mlp.gate_proj": (d_ff, n), "mlp.up_proj": (d_ff, n), "mlp.down_proj": (n, d_ff)}
    shapes = {"model.embed_tokens": (config["vocab_size"], n), "model.norm": (n,)}
    if parts == 2 or not config["tie_word_embeddings"]:  # else it may be there, unused
        shapes["lm_head"] = (config["vocab_size"], n)
    shapes |= {f"model.layers.{i}.{name}": s for i in range(2) for name, s in block.items()}
    torch.manual_seed(0)
    weights = {f"{name}.weight": torch.randn(s) * 0.3 for name, s in shapes.items()}
    weights = {name: weight.to(DTYPES[dtype]) for name, weight in weights.items()}
    index = {name: f"model-{i % parts}-of-{parts}.safetensors" for i, name in enumerate(weights)}
    for file in set(index.values()):
        header, numbers = {"__metadata__": {"format": "pt"}}, b""
        for name in [name for name, where in index.items() if where == file]:
            raw = bytes(weights[name].view(torch.uint8).flatten().tolist())
            at = [len(numbers), len(numbers) + len(raw)]
            header[name] = dict(dtype=dtype, shape=list(weights[name].shape), data_offsets=at)
            numbers += raw
        text = json.dumps(header).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + numbers)
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=index)))
    return {name: weight.float() for name, weight in weights.items()}


def speed(i: int, config: dict) -> float:
    """Radians per token of the i-th pair of channels; slowed down as in Meta's Llama 3.1."""
    plain, slow = config["rope_theta"] ** (-2 * i / 8), config["rope_scaling"]
    if "factor" not in (slow or {}) or (turns := 32 * plain / (2 * math.pi)) > 4:
        return plain
    smooth = (turns - 1) / (4 - 1)
    return plain / 8 if turns < 1 else (1 - smooth) * plain / 8 + smooth * plain


def llama(w: dict, config: dict, ids: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of ids [T], written out."""

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]

    def rotated(x):  # [T, 8], channels i and i + 4 as a complex number
        angle = torch.tensor([[t * speed(i, config) for i in range(4)] for t in range(len(x))])
        turned = torch.complex(x[:, :4], x[:, 4:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real, turned.imag), dim=1)

    x = w["model.embed_tokens.weight"][ids]
    future = torch.ones(len(ids), len(ids)).triu(1).bool()
    for layer in ("model.layers.0.", "model.layers.1."):
        h, heads = norm(x, layer + "input_layernorm"), []
        q, k, v = (h @ w[f"{layer}self_attn.{part}_proj.weight"].T for part in "qkv")
        for head in range(4):  # two share a key and a value
            mine, shared = (
                slice(8 * head, 8 * head + 8),
                slice(8 * (head // 2), 8 * (head // 2) + 8),
            )
            score = rotated(q[:, mine]) @ rotated(k[:, shared]).T / 8**0.5
            heads.append(score.masked_fill(future, -math.inf).softmax(-1) @ v[:, shared])
        x = x + torch.cat(heads, dim=1) @ w[layer + "self_attn.o_proj.weight"].T
        h = norm(x, layer + "post_attention_layernorm")
        gate, up = (h @ w[f"{layer}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[layer + "mlp.down_proj.weight"].T
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return norm(x, "model.norm") @ w[f"{head}.weight"].T


@pytest.mark.parametrize(
    ("change", "dtype", "parts"),
    [
        ({}, "F32", 1),
        (dict(tie_word_embeddings=False), "BF16", 3),
        (dict(rope_scaling=SLOW), "F16", 2),
        (dict(rope_scaling=dict(rope_type="default", rope_theta=5e4)), "F32", 1),
    ],
)
def test_logits_are_a_llamas(tmp_path, change, dtype, parts):
    config = CONFIG | change
    weights = save(tmp_path / "llama", config, dtype=dtype, parts=parts)
    model, encoding, _ = load_model(tmp_path / "llama", torch.device("cpu"))
    ids = torch.randint(300, (60,))
    expected = llama(weights, config, ids)
    torch.testing.assert_close(model(ids[None])[0][0], expected, rtol=1e-4, atol=1e-4)
    assert encoding.n_vocab == 300 and encoding.decode([299]) == "<|unused_299|>"


def test_ids_are_those_of_the_merges(tmp_path):
    """Special tokens that a text spells stay text."""

    def spelled(words: dict) -> str:
        save(tmp_path, words=words)
        encoding = load_model(tmp_path, torch.device("cpu"))[1]
        names = {i: token for token, i in words["model"]["vocab"].items()}
        text = "hello hello, hell abc 121 \n\nabcd\x04<|im_end|>"
        assert encoding.eot_token == 0
        return " ".join(names[i] for i in encoding.encode_ordinary(text))

    end = "< | i m _ e n d | >"
    plain = f"hello Ġhello , Ġ hell Ġ abc Ġ 12 1 Ġ Ċ Ċ abc d Ą {end}"
    assert spelled(bpe([GPT2])) == plain
    smol = bpe([dict(type="Digits", individual_digits=True), GPT2], lacking=tokenizer.NO_TOKEN)
    assert spelled(smol) == f"hello Ġhello , Ġ hell Ġ abc Ġ 1 2 1 Ġ Ċ Ċ abc d {end}"
    llama3 = bpe([LLAMA3, {**GPT2, "use_regex": False}], ["<|begin_of_text|>"], ignore_merges=True)
    assert spelled(llama3) == plain.replace("Ċ Ċ", "ĊĊ")


@pytest.mark.parametrize(
    ("config", "words", "says"),
    [
        (
            dict(model_type="qwen3"),
            {},
            "config.json: model_type qwen3 is not supported, only llama",
        ),
        (dict(hidden_act="gelu"), {}, "hidden_act gelu"),
        (dict(attention_bias=True), {}, "attention_bias True"),
        (dict(head_dim=16), {}, "head_dim 16 is not supported, only 8"),
        (dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), {}, "rope_type yarn"),
        (dict(rope_scaling=dict(type="linear", factor=4.0)), {}, "type linear"),
        (dict(vocab_size=256), {}, "llama is damaged"),
        (dict(num_hidden_layers=3), {}, "'blocks.2.self_attn.q_proj.weight'"),
        (dict(num_hidden_layers=1), {}, "blocks.1."),
        ({}, dict(pre_tokenizer=None), "tokenizer.json: pre_tokenizer {} is not GPT-2's"),
        ({}, dict(normalizer=dict(type="NFC")), "normalizer {'type': 'NFC'}"),
        ({}, dict(model=dict(byte_fallback=True)), "byte_fallback True"),
        ({}, dict(model=dict(merges=MERGES[::-1])), "merges in another order than that of ids"),
        ({}, dict(model=dict(merges=MERGES[1:])), "merges in another order than that of ids"),
        ({}, bpe([GPT2], lacking=b"x"), "bytes are missing"),
        ({}, bpe([GPT2], ["<s>"]), "is damaged (1)"),
    ],
)
def test_what_would_be_something_else_is_refused(tmp_path, config, words, says):
    whole = bpe([GPT2])
    words = {**whole, **words, "model": {**whole["model"], **words.get("model", {})}}
    save(tmp_path / "llama", CONFIG | dict(bos_token_id=1), words)
    (tmp_path / "llama" / "config.json").write_text(
        json.dumps(CONFIG | dict(bos_token_id=1) | config)
    )
    with pytest.raises(UserError, match=re.escape(says)) as error:
        load_model(tmp_path / "llama", torch.device("cpu"))
    assert "\n" not in " ".join(str(error.value).split())


@pytest.mark.parametrize("name", ["model-0-of-2.safetensors", "tokenizer.json", "config.json"])
def test_damaged_files_are_refused(tmp_path, name):
    save(tmp_path, parts=2)
    raw = (tmp_path / name).read_bytes()
    for damaged in (b"", raw[:6], raw[: len(raw) - 60], b"[1, 2]", b"version https://git-lfs"):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(UserError, match="is damaged"):
            load_model(tmp_path, torch.device("cpu"))
    (tmp_path / name).unlink()
    with pytest.raises(UserError):
        load_model(tmp_path, torch.device("cpu"))


def test_commands_read_a_folder(tmp_path, story):
    save(tmp_path / "llama")
    files = ("--input", story, "--out_dir", "data", "--val_fraction", 0.1)
    command("prepare.py", *files, "--tokenizer", "llama", cwd=tmp_path)
    given = ("--data_dir", "data", "--eval_interval", 2, "--batch_size", 2, "--device", "cpu")
    given += ("--eval_tokens", 600)
    begun = ("--init_from", "llama", "--max_iters", 3, "--out_dir", "out")
    command("train.py", *given, *begun, cwd=tmp_path)
    for ckpt in ("llama", "out/ckpt.pt"):
        done = command("sample.py", "--ckpt", ckpt, "--prompt", "Anna", cwd=tmp_path)
        assert done.stdout.startswith("Anna")
    saved = load_checkpoint(tmp_path / "out" / "ckpt.pt")
    assert saved["args"]["ffn"] == "dense" and saved["config"]["rope_base"] == 5e4
    done = command(
        "train.py", "--eval_only", "--init_from", "llama", *given[:2], *given[-2:], cwd=tmp_path
    )
    at_first = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[1])
    assert f"val loss {at_first['val_loss']:.5g}" in done.stdout
    # To tables on disk, with brief fine-tuning, which can be edited.
    tables = ("--ffn", "stem", "--stem_layers", "0,1", "--offload", "disk", "--out_dir", "stem")
    done = command("train.py", *given, *begun[:4], *tables, cwd=tmp_path)
    assert "layer 1: the token explains" in done.stdout
    edit = ("--ckpt", "stem/ckpt.pt", "--source", "Anna", "--target", "Björn", "--prompt", "Anna")
    assert "bit for bit" in command("edit.py", *edit, cwd=tmp_path).stdout
    save(tmp_path / "three", words=bpe([GPT2], ["<s>"]))
    command("sample.py", "--ckpt", "three", "--chat", cwd=tmp_path, fails=True)


@pytest.mark.parametrize("split", [0, 1, 2])
def test_ids_and_logits_are_those_of_the_originals(tmp_path, split):
    hf, tk = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    text = " abehlosn't\n\t\r12½٣é你👍,.!  "
    rng = random.Random(split)
    texts = ["".join(rng.choices(text, k=rng.randint(1, 60))) for _ in range(2000)]
    words = bpe(WORDS[split][0]) | dict(
        added_tokens=[], model=dict(type="BPE", vocab={}, merges=[])
    )
    theirs = tk.Tokenizer.from_str(json.dumps(words))
    lacking = tokenizer.NO_TOKEN if split == 1 else b""
    options = dict(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    options |= dict(initial_alphabet=[LETTERS[b] for b in range(256) if b not in lacking])
    theirs.train_from_iterator(texts, tk.trainers.BpeTrainer(**options))
    shape = {k: v for k, v in CONFIG.items() if k not in ("model_type", "rope_scaling")}
    shape |= dict(tie_word_embeddings=split == 0, rope_scaling=SLOW if split == 2 else None)
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**shape, initializer_range=0.3)).eval()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours, encoding, _ = load_model(tmp_path, torch.device("cpu"))
    assert all(encoding.encode_ordinary(each) == theirs.encode(each).ids for each in texts)
    ids = torch.randint(300, (2, 60))
    torch.testing.assert_close(ours(ids)[0], model(ids).logits, rtol=1e-4, atol=1e-4)
