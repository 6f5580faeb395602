"""convert.py: folders of Hugging Face, written by hand and by transformers and tokenizers, and rows
of tables against the formula written out."""

import json
import math
import random
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import command

import convert
from common import UserError
from model import Decoder, ModelConfig
from text import tokenizer
from text.huggingface import GPT2, LLAMA3, SMOLLM2
from training.batches import Data
from training.checkpoints import load_checkpoint, load_model

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 5e4,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 1,
}
SLOW = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Bytes as GPT-2 spells them: the space as Ġ, the line break as Ċ.
VISIBLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
LETTERS = {b: chr(b) for b in VISIBLE} | {b: chr(256 + i) for i, b in enumerate(HIDDEN)}
MERGES = ["l l", "h e", "he ll", "hell o", "Ġ hello", "Ċ Ċ", "1 2", "b c", "a bc"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPLITS = [[GPT2], [SMOLLM2, GPT2], [LLAMA3, {**GPT2, "use_regex": False}]]


def bpe(split=0, special=SPECIAL, lacking=b"", **more) -> dict:
    """A tokenizer.json: special tokens, then single bytes, then merges."""
    letters = [LETTERS[b] for b in range(256) if b not in lacking]
    tokens = [*special, *letters, *(merge.replace(" ", "") for merge in MERGES)]
    steps = SPLITS[split]
    return {
        "added_tokens": [{"id": i, "content": token} for i, token in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if split else steps[0],
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": MERGES}
        | more,
    }


def save(folder, config=CONFIG, words=None, dtype="F32", parts=1) -> dict[str, torch.Tensor]:
    """Write a folder by hand. Returns its weights in float32."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(words or bpe()))
    n, d_ff, kv = 32, 48, 16
    shapes = {"model.embed_tokens": (300, n), "model.norm": (n,), "lm_head": (300, n)}
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= {f"{layer}{x}": (n,) for x in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}self_attn.{x}_proj": (n, n) for x in "qo"}
        shapes |= {f"{layer}self_attn.{x}_proj": (kv, n) for x in "kv"}
        shapes |= {f"{layer}mlp.{x}_proj": (d_ff, n) for x in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj"] = (n, d_ff)
    torch.manual_seed(0)
    weights = {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    weights = {name: weight.to(convert.DTYPES[dtype]) for name, weight in weights.items()}
    for part in range(parts):
        names = list(weights)[part::parts]
        write_safetensors(folder / f"model-{part}-of-{parts}.safetensors", dtype, weights, names)
    return {name: weight.float() for name, weight in weights.items()}


def write_safetensors(path, dtype, weights, names) -> None:
    header, numbers = {"__metadata__": {"format": "pt"}}, b""
    for name in names:
        raw = bytes(weights[name].view(torch.uint8).flatten().tolist())
        place = [len(numbers), len(numbers) + len(raw)]
        shape = list(weights[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": place}
        numbers += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + numbers)


def speed(i: int, config: dict) -> float:
    """Radians per token of the i-th pair of channels; slowed down as in Meta's Llama 3.1."""
    plain = 5e4 ** (-2 * i / 8)
    turns = 32 * plain / (2 * math.pi)
    if "factor" not in config.get("rope_scaling", {}) or turns > 4:
        return plain
    smooth = max(0.0, (turns - 1) / (4 - 1))
    return (1 - smooth) * plain / 8 + smooth * plain


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
        h = norm(x, layer + "input_layernorm")
        q, k, v = (h @ w[f"{layer}self_attn.{part}_proj.weight"].T for part in "qkv")
        heads = []
        for head in range(4):  # two share a key and a value
            mine, shared = (slice(8 * n, 8 * n + 8) for n in (head, head // 2))
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
        ({"tie_word_embeddings": False}, "BF16", 3),
        ({"rope_scaling": SLOW}, "F16", 2),
        ({"rope_scaling": {"rope_type": "default"}}, "F32", 1),
    ],
)
def test_logits_are_a_llamas(tmp_path, change, dtype, parts):
    config = CONFIG | change
    weights = save(tmp_path / "llama", config, dtype=dtype, parts=parts)
    command("convert.py", "llama", "--out", "new/ckpt.pt", cwd=tmp_path)
    model, encoding, _ = load_model(tmp_path / "new/ckpt.pt", CPU)
    ids = torch.randint(300, (60,))
    logits, _ = model(ids[None])
    torch.testing.assert_close(logits[0], llama(weights, config, ids), rtol=1e-4, atol=1e-4)
    assert encoding.n_vocab == 300 and encoding.decode([299]) == "<|unused_299|>"


def test_ids_are_those_of_the_merges(tmp_path):
    """Special tokens that a text spells stay text."""

    def spelled(words: dict) -> str:
        save(tmp_path, CONFIG | {"bos_token_id": 0}, words)
        _, encoding = convert.read_llama(tmp_path)
        names = {i: token for token, i in words["model"]["vocab"].items()}
        text = "hello hello, hell abc 121 \n\nabcd\x04<|im_end|>"
        assert encoding.eot_token == 0
        return " ".join(names[i] for i in encoding.encode_ordinary(text))

    end = "< | i m _ e n d | >"
    plain = f"hello Ġhello , Ġ hell Ġ abc Ġ 12 1 Ġ Ċ Ċ abc d Ą {end}"
    assert spelled(bpe(0)) == plain
    assert spelled(bpe(0, merges=[merge.split() for merge in MERGES])) == plain
    smol = f"hello Ġhello , Ġ hell Ġ abc Ġ 1 2 1 Ġ Ċ Ċ abc d {end}"
    assert spelled(bpe(1, lacking=tokenizer.NO_TOKEN)) == smol
    llama3 = bpe(2, ["<|begin_of_text|>"], ignore_merges=True)
    assert spelled(llama3) == plain.replace("Ċ Ċ", "ĊĊ")


@pytest.mark.parametrize(
    ("config", "words", "says"),
    [
        ({"model_type": "qwen3"}, {}, "model_type qwen3 is not supported, only llama"),
        ({"hidden_act": "gelu"}, {}, "hidden_act gelu"),
        ({"head_dim": 16}, {}, "head_dim 16 is not supported, only 8"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {}, "rope_type yarn"),
        ({"hidden_size": "32"}, {}, "hidden_size is missing or of another type"),
        ({"vocab_size": 10**7}, {}, "wte.weight has shape [300, 32], not [10000000, 32]"),
        ({"num_key_value_heads": 4}, {}, "k_proj.weight has shape [16, 32], not [32, 32]"),
        ({"num_hidden_layers": 3}, {}, "lacks the weight blocks.2."),
        ({"num_hidden_layers": 1}, {}, "blocks.1."),
        ({}, {"pre_tokenizer": None}, "pre_tokenizer None is not GPT-2's"),
        ({}, {"normalizer": {"type": "NFC"}}, "normalizer {'type': 'NFC'}"),
        ({}, {"model": bpe(byte_fallback=True)["model"]}, "byte_fallback True"),
        ({}, {"model": bpe(merges=MERGES[::-1])["model"]}, "merges in another order"),
        ({}, bpe(lacking=b"x"), "bytes are missing"),
        ({}, bpe(special=["<s>"]), "no token with bos_token_id 1"),
        ({}, {"added_tokens": [*bpe()["added_tokens"], {"id": 300, "content": "<x>"}]}, "301 ids"),
    ],
)
def test_what_would_be_something_else_is_refused(tmp_path, config, words, says):
    save(tmp_path / "llama", CONFIG | config, bpe() | words)
    done = command("convert.py", "llama", "--out", "ckpt.pt", cwd=tmp_path, fails=True)
    assert says in done.stderr and not (tmp_path / "ckpt.pt").exists()


def test_a_tensor_that_comes_twice_and_one_that_is_missing_are_refused(tmp_path):
    save(tmp_path, parts=2)
    part = tmp_path / "model-0-of-2.safetensors"
    (tmp_path / "model_old.safetensors").write_bytes(part.read_bytes())
    with pytest.raises(UserError, match=r"model_old.* is in another file, too"):
        convert.read_llama(tmp_path)
    (tmp_path / "model_old.safetensors").unlink()
    part.unlink()
    with pytest.raises(UserError, match="lacks the weight"):
        convert.read_llama(tmp_path)


@pytest.mark.parametrize("name", ["model-0-of-1.safetensors", "tokenizer.json", "config.json"])
def test_damaged_files_are_one_line(tmp_path, name):
    save(tmp_path)
    raw = (tmp_path / name).read_bytes()
    for damaged in (b"", raw[:6], raw[: len(raw) - 60], b"[1, 2]", b"\xff" * 99):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(UserError, match=f"{name} is damaged"):
            convert.read_llama(tmp_path)
    # A flipped bit may give another file that can be read: then it is read.
    rng, n_refused = random.Random(0), 0
    for _ in range(150):
        damaged = bytearray(raw)
        damaged[rng.randrange(min(len(raw), 4000))] ^= 1 << rng.randrange(8)
        (tmp_path / name).write_bytes(damaged)
        try:
            convert.read_llama(tmp_path)
        except UserError:
            n_refused += 1
    assert n_refused > 50


def test_commands_go_on_with_a_converted_llama(tmp_path, story):
    save(tmp_path / "llama")

    def run(line: str, *args) -> str:
        return command(*line.split(), *args, cwd=tmp_path).stdout

    run("convert.py llama --out smol/ckpt.pt")
    assert run("sample.py --ckpt smol/ckpt.pt --prompt Anna").startswith("Anna")
    run("prepare.py --out_dir data --val_fraction 0.1 --tokenizer smol/ckpt.pt --input", story)
    train = "train.py --data_dir data --batch_size 2 --device cpu --eval_tokens 600 --max_iters 2"
    run(f"{train} --init_from smol/ckpt.pt --out_dir tuned --eval_interval 2")
    saved = load_checkpoint(tmp_path / "tuned/ckpt.pt")
    assert saved["args"]["ffn"] == "dense" and saved["config"]["rope_base"] == 5e4
    stem = "convert.py tuned/ckpt.pt --ffn stem --stem_layers 0,1 --data_dir data --tokens 2000"
    assert "layer 1: the token explains" in run(f"{stem} --block_size 32 --out stem/ckpt.pt")
    run(f"{train} --init_from stem/ckpt.pt --out_dir out --eval_interval 2 --offload disk")
    edit = "edit.py --ckpt out/ckpt.pt --source Anna --prompt Anna --target"
    assert "probability of" in run(edit, "Björn")


@pytest.mark.parametrize("split", [0, 1, 2])
def test_ids_and_logits_are_those_of_the_originals(tmp_path, split):
    hf, tk = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    text = " abehlosn't\n\t\r12½٣é你👍,.!  "
    rng = random.Random(split)
    texts = ["".join(rng.choices(text, k=rng.randint(1, 60))) for _ in range(2000)]
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    words = bpe(split) | {"added_tokens": [], "model": empty}
    theirs = tk.Tokenizer.from_str(json.dumps(words))
    lacking = tokenizer.NO_TOKEN if split == 1 else b""
    trainer = tk.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=[LETTERS[b] for b in range(256) if b not in lacking],
    )
    theirs.train_from_iterator(texts, trainer)
    shape = {name: value for name, value in CONFIG.items() if name != "model_type"}
    shape["tie_word_embeddings"] = split == 0
    shape["rope_scaling"] = SLOW if split == 2 else None
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**shape, initializer_range=0.3)).eval()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours, encoding = convert.read_llama(tmp_path)
    assert all(encoding.encode_ordinary(text) == theirs.encode(text).ids for text in texts)
    ids = torch.randint(300, (2, 60))
    torch.testing.assert_close(ours(ids)[0], model(ids).logits, rtol=1e-4, atol=1e-4)


# --- dense to STEM ---


@pytest.fixture
def to_stem(trained, data, tmp_path):
    """convert.py on the dense model, with further flags; the checkpoint."""

    def run(name="new", **flags):
        flags = {"stem_layers": "0,1", "data_dir": data, "tokens": 2000, "batch_size": 4, **flags}
        out = tmp_path / name / "ckpt.pt"
        args = [part for flag, value in flags.items() for part in (f"--{flag}", value)]
        dense = trained["dense"] / "ckpt.pt"
        command("convert.py", dense, "--ffn", "stem", "--out", out, *args, cwd=tmp_path)
        return load_checkpoint(out)

    return run


def decoder(checkpoint: dict) -> Decoder:
    model = Decoder(ModelConfig(**checkpoint["config"])).eval()
    model.load_state_dict(checkpoint["model"])
    return model


@torch.no_grad()
def test_rows_are_the_weighted_means_of_what_they_replace(trained, data, to_stem):
    """Layer 0 token by token, from the dense model as it is; layer 1 behind a converted layer 0."""
    converted = to_stem()
    dense = load_checkpoint(trained["dense"] / "ckpt.pt")
    weights = dense["model"]
    text = Data(str(data), "text", 32, 1337, 100)
    ids = torch.cat([text.train.batch(number, 4)[0] for number in range(2000 // 128)])  # [N, T]
    for layer, model in ((0, decoder(dense)), (1, decoder(converted))):
        norm = model.blocks[layer].ffn_norm
        seen = []
        norm.register_forward_hook(lambda module, inputs, x, seen=seen: seen.append(x))
        model(ids)
        x, tokens = seen[0].flatten(0, 1), ids.flatten()
        g = F.silu(x @ weights[f"blocks.{layer}.ffn.gate.weight"].T)
        u = x @ weights[f"blocks.{layer}.ffn.up.weight"].T
        rows = converted["model"][f"tables.weight.{layer}"]
        for token in range(len(rows)):
            here = tokens == token
            if not here.any():
                here[:] = True  # the mean over all tokens
            best = (g[here] ** 2 * u[here]).sum(0) / (g[here] ** 2).sum(0)
            torch.testing.assert_close(rows[token], best, rtol=1e-3, atol=1e-4)
        assert len(tokens.unique()) < len(rows)
    for name, weight in weights.items():  # all else is the dense model's
        assert name.endswith("ffn.up.weight") or torch.equal(weight, converted["model"][name])


@torch.no_grad()
def test_a_converted_model_loses_little_and_random_rows_lose_more(trained, data, to_stem):
    val = Data(str(data), "text", 32, 1337, 100).val[str(data)]
    ids, targets = val.batch(0, 8)
    again = shutil.copytree(data, data.parent / "again")
    mixture = f"{data}=1,{again}=2"
    losses = []
    for checkpoint in (
        load_checkpoint(trained["dense"] / "ckpt.pt"),
        to_stem("rows", data_dir=mixture),
        to_stem("random", tokens=0),
    ):
        _, loss = decoder(checkpoint)(ids, targets)
        losses.append(float(loss))
    dense, rows, random_rows = losses
    assert abs(rows - dense) < 0.3 * abs(random_rows - dense)


def test_what_cannot_be_converted_is_one_line(trained, data, tmp_path):
    save(tmp_path / "llama")
    dense = trained["dense"] / "ckpt.pt"
    saved = load_checkpoint(dense)
    changed = {"cut": dict(saved["model"]), "renamed": dict(saved["model"])}
    weight = changed["cut"].pop("blocks.1.ffn.gate.weight")
    changed["renamed"]["blocks.1.ffn.door.weight"] = weight
    for name, weights in changed.items():
        torch.save({**saved, "model": weights}, tmp_path / f"{name}.pt")
    other = tmp_path / "other"
    tokens = ("--dataset", "moby-dick", "--vocab_size", 300)
    command("prepare.py", *tokens, "--out_dir", other, cwd=tmp_path)
    stem = ("--ffn", "stem", "--data_dir", data, "--out", "new.pt")
    for args, says in (
        ((dense, "--ffn", "stem"), "--out is required"),
        ((dense, "--out", "new.pt"), "give --ffn stem"),
        ((tmp_path / "gone.pt", *stem), "gone.pt"),
        ((tmp_path, *stem), "has no config.json"),
        ((tmp_path / "llama", *stem), "needs a ckpt.pt"),
        ((dense, *stem[:4], "--out", dense), "exists"),
        ((trained["stem"] / "ckpt.pt", *stem), "only dense can be converted"),
        ((tmp_path / "cut.pt", *stem), "lacks the weight blocks.1.ffn.gate.weight"),
        ((tmp_path / "renamed.pt", *stem), "a weight blocks.1.ffn.door.weight that its config"),
        ((dense, *stem, "--tokens", -1), "--tokens -1"),
        ((dense, *stem, "--block_size", 64), "--block_size 64"),
        ((dense, *stem, "--data_dir", other), "another tokenizer"),
    ):
        assert says in command("convert.py", *args, cwd=tmp_path, fails=True).stderr
    assert not (tmp_path / "new.pt").exists()
