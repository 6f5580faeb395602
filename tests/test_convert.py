"""convert.py: folders of Hugging Face, written by hand, by transformers and by itself, and rows of
tables against the formula written out. What an Embformer's author writes: originals.py."""

import copy
import json
import random
import re
import shutil
import time
import zipfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    CPU,
    assert_same,
    by_turns,
    command,
    flip,
    peak,
    refused,
    says,
    small_run,
    user_error,
)
from originals import HUGGING_FACE, named

import convert
import prepare
from common import locked
from lab.token_share import token_share
from model import Block, Decoder, ModelConfig
from text import chat, tokenizer, writer
from text.huggingface import (
    CL100K_PATTERN,
    GPT2,
    LETTERS,
    NO_TOKEN,
    SMOLLM2,
    read_tokenizer,
    split,
    write_tokenizer,
)
from training import huggingface
from training.checkpoints import load_checkpoint, load_model, save_checkpoint, write_checkpoint
from training.dense_to_stem import dense_to_stem, read_text

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
EMBFORMER = CONFIG | {"model_type": "embformer", "head_dim": 8, "use_channel_shift": True}
EMBFORMER["intermediate_size"] = None  # it has none
QWEN2 = CONFIG | {"model_type": "qwen2"}
QWEN3 = CONFIG | {"model_type": "qwen3", "head_dim": 12}
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
LETTER = {b: chr(b) for b in VISIBLE} | {b: chr(256 + i) for i, b in enumerate(HIDDEN)}
MERGES = ["l l", "h e", "he ll", "hell o", "Ġ hello", "Ċ Ċ", "1 2", "b c", "a bc"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SIZES = [name for name in huggingface.SIZES.values() if name != "max_position_embeddings"]
LLAMA3 = split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = [[GPT2], [SMOLLM2, GPT2], [LLAMA3, LETTERS]]


def bpe(split=0, special=SPECIAL, lacking=b"", **more) -> dict:
    """A tokenizer.json: special tokens, then single bytes, then merges."""
    letters = [LETTER[b] for b in range(256) if b not in lacking]
    tokens = [*special, *letters, *(merge.replace(" ", "") for merge in MERGES)]
    steps = SPLITS[split]
    return {
        "added_tokens": [{"id": i, "content": token} for i, token in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if split else steps[0],
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": MERGES}
        | more,
    }


def with_added(*names, **flags) -> dict:
    """The same with added tokens that are not special, after the vocabulary."""
    words = bpe()
    for i, name in enumerate(names, len(words["model"]["vocab"])):
        words["added_tokens"].append({"id": i, "content": name, "special": False, **flags})
    return words


def save(folder, config=CONFIG, words=None, dtype="F32", parts=1) -> Decoder:
    """Write a folder by hand, with the weights of the model that is returned."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(words or bpe()))
    torch.manual_seed(0)
    ffn = "embformer" if config["model_type"] == "embformer" else "dense"
    more = dict(rope_base=5e4, norm_eps=1e-5)
    if config["model_type"] in ("qwen2", "qwen3"):
        more["attention"] = {"qwen2": "qkvbias", "qwen3": "qknorm"}[config["model_type"]]
    if config.get("head_dim") in (6, 12):
        more["head_dim"] = config["head_dim"]
    shape = ModelConfig(300, 64, 2, 4, 32, 2, 48, ffn, **more)
    shape.tie_head = config["tie_word_embeddings"]
    if config.get("rope_scaling") == SLOW:
        shape.rope_scaling = [8.0, 1.0, 4.0, 32.0]
    model = Decoder(shape)
    for weight in model.parameters():
        rounded = huggingface.DTYPES.get(dtype, torch.float32)
        weight.data = (torch.randn(weight.shape) * 0.3).to(rounded).float()
    ours = {name: weight.detach() for name, weight in model.named_parameters()}
    weights = named(ours, shape, HUGGING_FACE)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])  # if it is tied
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # of older files
    if dtype == "pickled":
        pickled = {name: torch.nn.Parameter(w) for name, w in weights.items()}  # some have them
        torch.save(pickled, folder / "pytorch_model.bin")
        return model
    for part in range(parts):
        names = list(weights)[part::parts]
        write_safetensors(folder / f"model-{part}-of-{parts}.safetensors", dtype, weights, names)
    return model


def refuses(folder, reason) -> None:
    """The folder is not read, for a reason that matches."""
    with user_error(reason):
        convert.read_folder(folder)


def write_safetensors(path, dtype, weights, names) -> None:
    header, numbers = {"__metadata__": {"format": "pt"}}, b""
    for name in names:
        start = len(numbers)
        weight = weights[name].to(huggingface.DTYPES[dtype])
        numbers += weight.view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(weight.shape),
            "data_offsets": [start, len(numbers)],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + numbers)


@pytest.mark.parametrize(
    ("change", "dtype", "parts"),
    [
        ({"tie_word_embeddings": False}, "BF16", 3),
        ({"rope_scaling": SLOW}, "F16", 2),
        ({"rope_scaling": {"rope_type": "default"}}, "F32", 1),
        ({"head_dim": None, "rope_scaling": None}, "pickled", 1),
        ({"head_dim": 6}, "F32", 1),
        (EMBFORMER, "F32", 2),
        (QWEN2, "BF16", 2),
        (QWEN3, "BF16", 1),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e4}}, "F32", 1),
    ],
)
def test_logits_are_those_of_the_weights_in_the_files(tmp_path, change, dtype, parts):
    """Of a decoder that test_model.py compares with a naive one."""
    model = save(tmp_path / "llama", CONFIG | change, dtype=dtype, parts=parts)
    command("convert.py llama --out new/ckpt.pt")
    converted, encoding, _ = load_model(tmp_path / "new/ckpt.pt", CPU)
    assert converted.config.ffn == model.config.ffn
    ids = torch.randint(300, (2, 60))
    torch.testing.assert_close(converted(ids)[0], model(ids)[0])
    opened, _ = convert.read_folder(tmp_path / "llama")
    assert torch.equal(opened(ids)[0], converted(ids)[0])  # also without a checkpoint
    assert encoding.n_vocab == 300 and encoding.decode([299]) == "<|unused_299|>"


def listed(*merges, extra=(), **more) -> dict:
    """A tokenizer.json that has these merges and, beside what they make, more tokens."""
    tokens = [*SPECIAL, *LETTER.values(), *(merge.replace(" ", "") for merge in merges), *extra]
    return bpe(2, vocab={token: i for i, token in enumerate(tokens)}, merges=merges, **more)


def named_steps(*steps) -> dict:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps]}}


LOW = {**LLAMA3, "pattern": {"Regex": r"[\p{L}\p{M}\p{N}\s]"}}  # leaves out what emoji are
OTHER = {**LLAMA3, "pattern": {"Regex": r" ?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s"}}
OLD = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
END = "< | i m _ e n d | > d Ċ Ġ"  # special tokens that a text spells stay text
PLAIN = f"hello Ġhello , Ġ hell Ġ abc Ġ 12 1 Ġ Ċ Ċ abc d Ą {END}"
PARTS = f"h e l l o Ġ h e l l o , Ġ h e l l Ġ a bc Ġ 1 2 1 Ġ Ċ Ċ abcd Ą {END}"
SMOL = f"hello Ġhello , Ġ hell Ġ abc Ġ 1 2 1 Ġ Ċ Ċ abc d {END}"


@pytest.mark.parametrize(
    ("words", "spelled"),
    [
        (bpe(0, merges=[merge.split() for merge in MERGES]), PLAIN),
        (bpe(1, lacking=NO_TOKEN), SMOL),
        (bpe(2, ["<s>", "<|endoftext|>"], ignore_merges=True), PLAIN.replace("Ċ Ċ", "ĊĊ")),
        (bpe() | {"pre_tokenizer": OLD}, PLAIN),
        (bpe() | named_steps(OTHER, LETTERS), PLAIN.replace("12", "1 2")),
        # A whole word that its merges do not make, and never within another one. Unlike in
        # cl100k_base, blanks after the last line break are a word: as in "def f():\n    ".
        (listed("b c", "a b", "c d", "ab cd", "Ċ Ġ", ignore_merges=True), PARTS),
    ],
)
def test_ids_are_those_of_the_merges(tmp_path, words, spelled):
    save(tmp_path, CONFIG | {"bos_token_id": 0}, words)
    _, encoding = convert.read_folder(tmp_path)
    names = {i: token for token, i in words["model"]["vocab"].items()}
    ids = encoding.encode_ordinary("hello hello, hell abc 121 \n\nabcd\x04<|im_end|>d\n ")
    assert encoding.eot_token == 0 and " ".join(names[i] for i in ids) == spelled


def test_texts_spell_added_tokens_that_are_not_special(tmp_path):
    """The text between two of them is encoded alone. What ends a message stays text, whatever a
    file says."""
    names = ("<think>", "</think>", "思考", " hello abc")
    words = with_added(*names)
    for token in words["added_tokens"]:
        token["special"] = False
    save(tmp_path / "added", words=words)
    save(tmp_path / "plain")
    _, encoding = convert.read_folder(tmp_path / "added")
    _, plain = convert.read_folder(tmp_path / "plain")
    again = copy.copy(tokenizer.loads(tokenizer.dumps(encoding)))
    rng = random.Random(0)
    parts = [*names, *SPECIAL, "<", "思", " ", "\n", "hello", " hello", "12", "ab", "c", "."]
    for _ in range(1000):
        text = "".join(rng.choices(parts, k=rng.randint(0, 12)))
        ids = []
        for part in re.split(f"({'|'.join(names)})", text):
            ids += [268 + names.index(part)] if part in names else plain.encode_ordinary(part)
        assert encoding.encode_ordinary(text) == ids == again.encode_ordinary(text)
        assert encoding.decode(ids) == text


def test_what_is_done_otherwise_is_named(tmp_path, capsys):
    """A normalizer is left out, and texts end otherwise."""
    words = bpe(special=[*SPECIAL, "<|eot|>"]) | {"normalizer": {"type": "NFC"}}
    for ends, other in ((3, True), ([0, 3], False), (None, False)):
        save(tmp_path, CONFIG | {"bos_token_id": 0, "eos_token_id": ends}, words)
        _, encoding = convert.read_folder(tmp_path)
        said = capsys.readouterr().err
        assert "tokenizer.json has a normalizer" in said
        assert ("texts with <|eot|>: sampling" in said) == ("sampling" in said) == other
    assert encoding.decode(encoding.encode_ordinary("e\u0301")) == "e\u0301"


def test_the_command_that_is_printed_makes_a_model_that_goes_on(tmp_path, story):
    save(tmp_path / "hub")
    line = f"prepare.py --input {story} --out_dir data --val_fraction 0.1 --tokenizer"
    printed = refused(line, "hub").split("first: python ")[1].split()
    sample = command("convert.py", *printed[1:]).stdout.split("next: python ")[1].split()
    sampled = command("sample.py --prompt Anna", *sample[1:])
    assert sampled.stdout.startswith("Anna")
    train = command(line, printed[-1]).stdout.split("next: python ")[1].split()
    command("train.py --eval_only --data_dir data --init_from", printed[-1])
    command("train.py --batch_size 2 --device cpu --eval_tokens 600 --max_iters 2", *train[1:])
    saved = load_checkpoint(tmp_path / "out/data/ckpt.pt")
    assert saved["args"]["ffn"] == "dense" and saved["config"].rope_base == 5e4


@pytest.mark.parametrize("end", [1, 2])
def test_what_a_llama_3_writes_ends_where_that_ends_texts_and_messages(tmp_path, monkeypatch, end):
    words = bpe(2, special=["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    save(tmp_path / "hub", CONFIG | {"bos_token_id": 0, "eos_token_id": [1, 2]}, words)
    assert not command("convert.py hub --out dense.pt").stderr
    command("convert.py dense.pt --ffn stem --tokens 0 --out ckpt.pt")
    vocab = words["model"]["vocab"]
    written = torch.tensor([vocab["hello"], end, vocab["abc"]])

    def stream(self, ids, max_new_tokens, **_):
        yield from written[:max_new_tokens, None].expand(-1, len(ids))

    monkeypatch.setattr(Decoder, "stream", stream)
    for n in (1, 2):
        sampled = command(f"sample.py --ckpt ckpt.pt --prompt ab --num_samples {n}")
        assert re.findall("ab.*", sampled.stdout) == ["abhello"] * n
    line = "edit.py --ckpt ckpt.pt --source hell --target abc --prompt hell"
    shown = command(line).stdout
    assert re.search(r"^hello +hello$", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gemma"}, "gemma is not supported, only llama or qwen2 or qwen3"),
        ({"model_type": None}, "model_type None is not supported"),
        (QWEN3 | {"head_dim": None}, "config.json is damaged (head_dim"),
        (QWEN3 | {"head_dim": 11}, "config.json: head_dim 11 is odd"),
        (EMBFORMER | {"head_dim": 4}, "config.json: head_dim 4: Embformer's heads share"),
        (EMBFORMER | {"tie_word_embeddings": False}, "tie_word_embeddings False"),
        (EMBFORMER | {"use_sliding_window": True}, "use_sliding_window True"),
        ({"quantization_config": {"quant_method": "bitnet"}}, "quantization_config {"),
        ({"is_causal": False}, "is_causal False"),
        ({"auto_map": {"AutoModelForCausalLM": "own.Bidirectional"}}, "auto_map {"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights other"),
        ({"per_layer_config": {"1": {"hidden_act": "gelu"}}}, "per_layer_config {"),
        (QWEN3 | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types ["),
        ({"rope_theta": 5e4, "rope_parameters": {"rope_theta": 7e4}}, "rope_theta 70000.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 7e4}}}, "of full_attention alone"),
        (
            {"rope_scaling": {"type": "default"}, "rope_parameters": {"type": "yarn"}},
            "rope_parameters {",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type yarn"),
        ({"rope_scaling": {"type": "yarn"}}, "type yarn"),
        ({"rope_scaling": {"factor": 4.0}}, "factor 4.0"),
        ({"rope_scaling": SLOW | {"type": "linear"}}, "type linear"),
        ({"rope_scaling": {name: SLOW[name] for name in huggingface.LLAMA3_ROPE}}, "factor 8.0"),
        ({"rope_scaling": SLOW, "original_max_position_embeddings": 64}, "embeddings 64 is"),
        ({"rope_scaling": SLOW | {"factor": 0}}, "config.json is damaged (rope_scaling {"),
        ({"rope_scaling": SLOW | {"high_freq_factor": 1.0}}, "config.json is damaged (rope_"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"vocab_size": 299}, "embed_tokens.weight has shape [300, 32], not [299, 32]"),
        ({"num_hidden_layers": 3}, "lacks the weight model.layers.2."),
        *(({name: 10**9}, f"{name} 1000000000 is more than") for name in SIZES),
    ],
)
def test_a_config_of_something_else_is_refused(tmp_path, change, reason):
    save(tmp_path, CONFIG | change)
    refuses(tmp_path, re.escape(reason))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (named_steps(LOW, LETTERS), "leaves out parts of a text"),
        # Oniguruma repeats the first, knows no joiner as \w, and ends lines at $.
        *(
            (named_steps({**LLAMA3, "pattern": {"Regex": pattern}}, LETTERS), "the pattern")
            for pattern in (
                r"\p{N}{1,3}+|\P{N}",
                r"\w+|\W",
                r".+$|\s",
                r"\d*|\D",
                r"(?i)a|\P{L}|\p{L}",
                # What would take memory without bounds.
                r"\S{4000}|\S|\s",
                r"\S{9}{9}|\S|\s",
                r"(\S{9}){9}|\S|\s",
            )
        ),
        (named_steps(LLAMA3, GPT2), "pre_tokenizer {"),
        (
            listed("‹ |") | {"added_tokens": [{"id": 259, "content": "‹|"}]},
            "a merge makes '‹|', which is no token of a text",
        ),
        (listed("a b", "b c", "a bc"), "merges do not make the token b'abc'"),
        (listed("b c", "a b", "ab c"), "merges do not make the token b'abc'"),
        (listed("b c", "a b", extra=["abc"], ignore_merges=True), "not make the token b'abc'"),
        (with_added("<x>", lstrip=True), "lstrip of the added token '<x>' is not supported"),
        (with_added("<x>", rstrip=True), "rstrip of the added token '<x>' is not supported"),
        (with_added("<x>", single_word=True), "single_word of the added token '<x>'"),
        (with_added("<x>", "<x>y"), "'<x>' and '<x>y', one begins with the other"),
        (with_added("<|im_end|>s"), "'<|im_end|>s' and '<|im_end|>', one begins with"),
        ({"normalizer": {"type": "NFKC"}}, "normalizer {'type': 'NFKC'}"),
        (bpe(byte_fallback=True), "byte_fallback True"),
        (bpe(merges=MERGES[::-1]), "merges in another order"),
        (bpe(lacking=b"x"), "1 of the 256 single bytes are missing: train it with initial_alph"),
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}}}, "type WordPiece is not supported"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0]]}}, "type Unigram is not supported"),
        (bpe(special=["<s>"]), "no token with bos_token_id 1"),
        (with_added(*(f"<{number}>" for number in range(33))), "301 ids"),
        ({"added_tokens": [*bpe()["added_tokens"], {"id": 270, "content": "<x>"}]}, "270, not 268"),
        ({"added_tokens": [*bpe()["added_tokens"], {"id": 268, "content": "hello"}]}, "268, not"),
    ],
)
def test_a_tokenizer_that_would_give_other_ids_is_refused(tmp_path, change, reason):
    save(tmp_path, words=bpe() | change)
    refuses(tmp_path, re.escape(reason))


def test_a_head_of_its_own_is_not_left_out(tmp_path):
    """Some programs forget to say that it is no longer the embedding."""
    save(tmp_path, CONFIG | {"tie_word_embeddings": False})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refuses(tmp_path, "lm_head.weight is not the embedding")


def test_numbers_are_those_that_the_file_says_and_all_of_them(tmp_path):
    """Which safetensors' own reader checks, too, except that they are finite."""
    save(tmp_path)
    path = tmp_path / "model-0-of-1.safetensors"
    raw = path.read_bytes()
    start = raw.index(b"}}") + 2  # of the numbers, after the header
    nan = b"\0\0\xc0\x7f"
    deep = raw[8:start].replace(b"[32]", b"[32" + b",1" * 70 + b"]", 1)  # too much for NumPy
    for changed, reason in (
        (len(deep).to_bytes(8, "little") + deep + raw[start:], "1, 1, 1"),
        (raw[:-4], "damaged"),
        (raw.replace(b'"data_offsets":[0,', b'"data_offsets":[1,'), "damaged"),
        (raw.replace(b'"format"', b'"for"').replace(b"[32]", b"[-4,-8]", 1), "damaged"),
        (raw.replace(b"[32]", b'"32"'), "damaged"),
        (raw + b"more", "damaged"),
        (raw[:start] + nan + raw[start + 4 :], "not finite"),
        (raw[:start] + b"\0\0\x80\xff" + raw[start + 4 :], "not finite"),  # -inf
    ):
        path.write_bytes(changed)
        refuses(tmp_path, reason)


def test_a_file_that_is_missing_or_too_many_is_named(tmp_path):
    save(tmp_path)
    adapter = tmp_path / "adapter_config.json"
    adapter.write_text('{"peft_type": "LORA"}')
    refuses(tmp_path, "adapter_config.json, a LoRA, which is not read")
    adapter.unlink()
    weights = tmp_path / "model-0-of-1.safetensors"
    copy = shutil.copy(weights, tmp_path / "model_old.safetensors")
    refuses(tmp_path, "model_old.* is in another file, too")
    copy.unlink()
    (tmp_path / "tokenizer.json").unlink()
    refuses(tmp_path, "AutoTokenizer.from_pretrained")
    weights.unlink()
    refuses(tmp_path, "model.safetensors or pytorch_model.bin")


def test_a_pickled_file_holds_tensors_alone(tmp_path):
    save(tmp_path, dtype="pickled")
    for weight in (print, [1.0], torch.ones(32, dtype=torch.int8)):
        torch.save({"model.norm.weight": weight}, tmp_path / "pytorch_model.bin")
        refuses(tmp_path, "pytorch_model.bin is damaged .*: download it again")
    save(tmp_path, dtype="pickled")
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin") as archive:
        parts = {part.filename: archive.read(part) for part in archive.infolist()}
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in parts.items():
            archive.writestr(name, part)  # which may unpack to more than memory has room for
    refuses(tmp_path, "pytorch_model.bin is damaged .*: download it again")


@pytest.mark.parametrize("special", [SPECIAL, ["<s>", "<|im_end|>"]])
def test_a_tokenizer_without_a_model_gets_what_it_lacks_after_it(tmp_path, special):
    words = bpe(special=special)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(words))
    encoding = prepare.ready_tokenizer(str(path), "chat")
    ids = words["model"]["vocab"]
    added = [name for name in SPECIAL if name not in special]
    wanted = ids | {name: len(ids) + i for i, name in enumerate(added)}
    for name in (*special, *SPECIAL):
        assert encoding.encode_single_token(name) == wanted[name]
    assert encoding.encode_ordinary(" hello") == [ids["Ġhello"]]
    (tmp_path / "merges.txt").write_text("")  # beside a tokenizer in its own folder
    writer.write_dataset(tmp_path / "data", [("train", "a"), ("val", "b")], encoding, corpus="x")
    for place in (tmp_path, tmp_path / "merges.txt", tmp_path / "data/tokenizer.json"):
        again = prepare.ready_tokenizer(str(place), "chat")
        assert tokenizer.dumps(again) == tokenizer.dumps(encoding)


def test_a_small_tokenizer_takes_little_memory(tmp_path):
    path = tmp_path / "tokenizer.json"
    ids = bpe()["model"]["vocab"]
    last = MERGES[-1].replace(" ", "")

    def refuse(added: dict[str, int], said: str) -> None:
        path.write_text(json.dumps(bpe(vocab=ids | added)))
        with user_error(said):
            read_tokenizer(path)

    # Each id below would get a token, and all splits of a long one would be kept.
    refuse({last: 10**5}, f"^{path} has ids up to 100,000, but 268 tokens")
    long = {"a" * 1000: 268}
    assert peak(lambda: refuse(long, "its merges do not make the token")) < 1 << 20
    refuse({"a" * 1001: 268}, "a token of 1,001 bytes is not supported")


def test_a_pattern_that_looks_far_ahead_takes_no_quadratic_time(tmp_path):
    pattern = {**LLAMA3, "pattern": {"Regex": r"\S+b|\S|\s"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(bpe() | named_steps(pattern, LETTERS)))
    start = time.process_time()
    read_tokenizer(tmp_path / "tokenizer.json")
    assert time.process_time() - start < 5  # 0.3 s; over the whole text, minutes


def test_a_file_of_few_numbers_fills_no_memory(tmp_path):
    save(tmp_path, dtype="pickled")
    path = tmp_path / "pytorch_model.bin"
    weights = torch.load(path)
    name = "model.layers.0.mlp.up_proj.weight"
    shape = weights[name].shape
    for few in (torch.ones(1).expand(shape), torch.ones(shape).to_sparse()):
        torch.save({**weights, name: few}, path)
        refuses(tmp_path, f"{name} has not all of its numbers")


FILES = ("config.json", "tokenizer.json", "model-0-of-1.safetensors", "pytorch_model.bin")


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_one_line(tmp_path, name):
    save(tmp_path, dtype="pickled" if name == FILES[-1] else "F32")
    raw = (tmp_path / name).read_bytes()
    for damaged in (b"", raw[:6], raw[: len(raw) - 60], b"[1, 2]", b"\xff" * 99):
        (tmp_path / name).write_bytes(damaged)
        refuses(tmp_path, f"{name} is damaged")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\n")
    refuses(tmp_path, f"{name} is only a pointer of Git LFS.*git lfs pull")


def test_settings_that_are_not_in_a_config_are_those_of_transformers(tmp_path):
    save(tmp_path)
    gone = ("max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    lacking = {name: value for name, value in CONFIG.items() if name not in gone}
    (tmp_path / "config.json").write_text(json.dumps(lacking))
    config = convert.read_folder(tmp_path)[0].config
    assert (config.block_size, config.norm_eps, config.rope_base) == (2048, 1e-6, 10000)
    assert not config.tie_head


# --- and back ---


def test_the_pattern_of_cl100k_base_comes_back(tmp_path):
    """In Oniguruma, which tokenizers uses, {1,3}+ is no possessive {1,3}: it repeats."""
    theirs = split(CL100K_PATTERN.replace("{1,3}+", "{1,3}"))
    save(tmp_path, words=bpe() | named_steps(theirs, LETTERS))
    _, encoding = convert.read_folder(tmp_path)
    assert json.loads(tokenizer.dumps(encoding))["pattern"] == CL100K_PATTERN
    write_tokenizer(tmp_path, encoding, 64)
    assert "{1,3}+" not in (tmp_path / "tokenizer.json").read_text()


@pytest.fixture(scope="module", params=["ours", 0, 1, 2])
def exported(request, trained, tmp_path_factory):
    """A dense checkpoint, one a Qwen3 and one a Qwen2, and the folder to which it is exported: with
    a tokenizer of ours, or one that splits as SPLITS do."""
    folder = tmp_path_factory.mktemp("exported")
    path = trained["dense"] / "ckpt.pt"
    split = request.param
    if split != "ours":
        change = {"tie_word_embeddings": split == 0, "rope_scaling": SLOW if split == 2 else None}
        lacking = NO_TOKEN if split == 1 else b""
        words = bpe(split, lacking=lacking)
        think = with_added("<think>")["added_tokens"][-1]
        words["added_tokens"].append(think | {"id": len(words["model"]["vocab"])})
        save(folder / "first", (CONFIG, QWEN3, QWEN2)[split] | change, words)
        path = folder / "ckpt.pt"
        command("convert.py first --out ckpt.pt", cwd=folder)
    (folder / "llama.tmp").mkdir()  # somebody's own
    command("convert.py", path, "--export", "llama", cwd=folder)
    assert {path.name for path in folder.glob("llama*")} == {"llama", "llama.tmp"}
    return path, folder / "llama"


def test_an_exported_model_ends_its_answers_and_has_our_template(exported):
    path, folder = exported
    encoding = load_model(path, CPU)[1]
    generation = json.loads((folder / "generation_config.json").read_text())
    words = json.loads((folder / "tokenizer_config.json").read_text())
    ends = sorted(encoding.encode_single_token(name) for name in ("<|endoftext|>", "<|im_end|>"))
    assert generation["eos_token_id"] == ends
    assert generation["pad_token_id"] == encoding.eot_token
    assert words["pad_token"] == "<|endoftext|>"
    assert words["model_max_length"] == load_checkpoint(path)["config"].block_size
    jinja = pytest.importorskip("jinja2").Environment(trim_blocks=True, lstrip_blocks=True)
    template = jinja.from_string(words["chat_template"])
    talk = [says("system", "Be brief."), *by_turns("Who\n\nsees?", "")]
    ours = path.parent.name == "dense"  # a folder without a template has no spaces
    assert (" Be brief." in encoding.decode(chat.render(encoding, talk))) == ours
    for more, wanted in ((True, chat.prompt), (False, chat.render)):
        text = template.render(
            messages=talk, add_generation_prompt=more, bos_token=words["bos_token"]
        )
        ids = [encoding.eot_token, *wanted(encoding, talk)]
        assert encoding.encode(text, allowed_special="all") == ids


def assert_same_model(path, folder):
    """A checkpoint and a folder hold the same model."""
    command("convert.py", folder, "--out", f"{folder}.pt")
    before, after = load_checkpoint(path), load_checkpoint(f"{folder}.pt")
    assert_same(before["model"], after["model"])
    first, second = (tokenizer.loads(saved["tokenizer"]) for saved in (before, after))
    assert tokenizer.fingerprint(first) == tokenizer.fingerprint(second)
    talk = by_turns("Who?")
    assert chat.render(first, talk) == chat.render(second, talk)
    others = ("attention", "tie_head", "norm_eps", "rope_base", "rope_scaling")
    for name in (*huggingface.SIZES, *others):
        assert getattr(before["config"], name) == getattr(after["config"], name), name


def test_attention_of_one_kind_in_16_bits_is_exported_however_it_is_named(trained, tmp_path):
    model, encoding, _ = load_model(trained["dense"], CPU)
    there = Decoder(replace(model.config, attention="qknorm,qknorm")).bfloat16()
    convert.write_folder(tmp_path / "all", there, encoding)
    back, _ = convert.read_folder(tmp_path / "all")
    assert back.config.attention_kinds == there.config.attention_kinds
    assert_same(back.state_dict(), {n: weight.float() for n, weight in there.state_dict().items()})
    mixed = Decoder(replace(model.config, attention="qknorm,full"))
    more = copy.deepcopy(model)
    more.norm.register_parameter("bias", torch.nn.Parameter(torch.zeros(32)))
    other = copy.copy(encoding)
    other._pat_str = r"\w+|\W"  # which tokenizers reads otherwise
    for refused_model, words, said in (
        (mixed, encoding, "cannot be --attention qknorm,full"),
        (more, encoding, "32 numbers of the model have no place"),
        (model, other, "the pattern"),
    ):
        with user_error(said):
            convert.write_folder(tmp_path / "llama", refused_model, words)


def test_a_setting_that_a_llama_does_not_have_is_not_lost_in_an_export(
    trained, tmp_path, monkeypatch
):
    @dataclass
    class Capped(ModelConfig):
        logit_cap: float = 0.0

    monkeypatch.setattr(huggingface, "ModelConfig", Capped)
    model, encoding, _ = load_model(trained["dense"], CPU)
    shape = {**asdict(model.config), "dropout": 0.1}
    with user_error("no Llama or Qwen has --logit_cap 5"):
        capped = Decoder(Capped(**shape, logit_cap=5.0))
        convert.write_folder(tmp_path / "capped", capped, encoding)
    assert not (tmp_path / "capped").exists()
    convert.write_folder(tmp_path / "plain", Decoder(Capped(**shape)), encoding)


def test_what_was_exported_comes_back(exported):
    assert_same_model(*exported)


def test_transformers_reads_and_writes_the_same(exported, tmp_path):
    hf = pytest.importorskip("transformers")
    path, folder = exported
    model, encoding, _ = load_model(path, CPU)
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(encoding.n_vocab, (2, 30))
    torch.testing.assert_close(theirs(ids).logits, model(ids)[0], rtol=1e-4, atol=1e-4)
    words = hf.AutoTokenizer.from_pretrained(folder)
    talk = by_turns("Who sees Anna?")
    asked = words.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    assert asked == [encoding.eot_token, *chat.prompt(encoding, talk)]
    rng = random.Random(0)
    parts = [*" abehlosn't\n\t\r12½٣é你👍,.!  ", "<think>"]
    for _ in range(1000):
        text = "".join(rng.choices(parts, k=rng.randint(0, 60)))
        ids = tokenizer.encode(encoding, f"{text} Anna sees")
        assert words(f"{text} Anna sees").input_ids == ids
        assert words.decode(ids) == encoding.decode(ids)
    theirs.save_pretrained(tmp_path / "again", max_shard_size="40KB")
    words.save_pretrained(tmp_path / "again")
    assert_same_model(path, tmp_path / "again")


# --- dense to STEM ---


@torch.no_grad()
@pytest.mark.parametrize(
    ("layers", "length", "more", "rounding"),
    [
        ([0, 1, 3], None, "", 1e-3),
        ([1], None, "--doc_mask", 1e-3),  # of the dense run
        ([1, 2], 9, "--block_size 9 --offload disk --table_dtype bfloat16", 2**-8),
    ],
)
def test_rows_are_the_weighted_means_of_what_they_replace(
    data, tmp_path, layers, length, more, rounding
):
    """Layer by layer and token by token, after the layers below as they are in the end: dense, or
    converted."""
    doc_mask = more == "--doc_mask"
    options = dict(ffn="dense", n_layer=4, max_iters=0, doc_mask=doc_mask)
    path = small_run(data, tmp_path / "run", **options) / "ckpt.pt"
    more = more.removeprefix("--doc_mask")
    line = f"convert.py --ffn stem --out new.pt --tokens 2000 --batch_size 4 {more} --stem_layers"
    said = command(line, ",".join(map(str, layers)), path).stdout
    assert f"--data_dir {data} " in said and "--stage" not in said  # that it was trained on
    made = {path.name for path in tmp_path.iterdir()} - {".lock"}
    assert made == {"run", "new.pt"} | ({"new.pt.tables"} if "disk" in more else set())
    dense, encoding, checkpoint = load_model(path, CPU)
    converted, _, saved = load_model(tmp_path / "new.pt", CPU)
    assert saved["data"] == checkpoint["data"]  # by which edit.py knows whose text it is
    (ids, _), _ = read_text(path, dense, encoding, str(data), 2000, length)  # [N, T]
    assert 1900 < ids.numel() <= 2000 and ids.shape[1] == (length or 32)
    tokens = ids.flatten()
    inputs = []
    for layer in layers:
        norm = converted.blocks[layer].ffn_norm
        norm.register_forward_hook(lambda module, given, x: inputs.append(x.flatten(0, 1)))
    converted(ids, documents=(ids == encoding.eot_token).cumsum(1) if doc_mask else None)
    for rows, layer, x in zip(converted.tables.weight, layers, inputs, strict=True):
        ffn = dense.blocks[layer].ffn
        g, u = F.silu(ffn.gate(x)), ffn.up(x)
        best = []
        for token in range(converted.config.vocab_size):
            here = tokens == token
            if not here.any():
                here[:] = True  # the mean over all tokens
            best.append((g**2 * u)[here].sum(0) / (g**2)[here].sum(0))
        torch.testing.assert_close(rows.float(), torch.stack(best), rtol=rounding, atol=1e-4)
    assert len(tokens.unique()) < converted.config.vocab_size
    after = converted.state_dict()
    replaced = {f"blocks.{layer}.ffn.up.weight" for layer in layers}
    for name in checkpoint["model"].keys() - replaced:  # the dense model's
        assert torch.equal(checkpoint["model"][name], after[name])


def test_a_dense_model_in_16_bits_is_converted(trained, data, tmp_path):
    model, encoding, checkpoint = load_model(trained["dense"], CPU)
    save_checkpoint(tmp_path / "16.pt", model.bfloat16(), encoding, args=checkpoint["args"])
    made, _, _ = dense_to_stem(tmp_path / "16.pt", "1", str(data), 2000, device=CPU)
    assert made.tables.weight[0].any()


def test_a_model_whose_layers_were_changed_is_not_converted_as_if_they_were_not(
    trained, data, monkeypatch
):
    def parallel(self, x, rows, *more):
        z = self.attn_norm(x)
        return x + self.attn(z, rows, *more) + self.ffn(z, rows)

    monkeypatch.setattr(Block, "forward", parallel)
    with pytest.raises(AssertionError, match=r"change Stream as model\.py"):
        dense_to_stem(trained["dense"] / "ckpt.pt", "1", str(data), 2000, device=CPU)
    with pytest.raises(AssertionError, match=r"change Stream as model\.py"):
        token_share([trained["dense"] / "ckpt.pt"], str(data), 500, 16, CPU, Path("x.png"))


def test_what_cannot_be_converted_is_one_line(trained, data, tmp_path):
    save(tmp_path / "llama")
    dense = trained["dense"] / "ckpt.pt"
    (tmp_path / "other.txt").write_text("another text\n\n" * 900)
    command("prepare.py --input other.txt --vocab_size 270 --out_dir other")
    shutil.copy(dense, tmp_path / "damaged.pt")
    flip(tmp_path / "damaged.pt", dense.stat().st_size // 2)
    command("convert.py llama --out hub/ckpt.pt")
    stem = f"--ffn stem --data_dir {data} --out new.pt"
    for line, reason in (
        (f"{dense} --ffn stem", "give --out FILE"),
        (f"{dense} --out new.pt", "or give --ffn stem"),
        (f"{dense} --out new.pt --tokens 5", "--tokens 5 needs --ffn stem"),
        (f"gone.pt {stem}", "gone.pt"),
        (". --out new.pt", "no config.json: name a folder of Hugging Face"),
        ("hub/ckpt.pt --ffn stem --out new.pt", "--data_dir: name a text"),
        (f"llama {stem}", "llama is a model of Hugging Face: convert it with"),
        (f"{dense} {stem} --out {dense}", "exists"),
        (f"{trained['stem']}/ckpt.pt {stem}", "only dense can be converted"),
        (f"{dense} {stem} --export llama", "give --out FILE"),
        (f"{trained['stem']}/ckpt.pt --export no", "cannot be --ffn stem"),
        (f"{dense} --export no --ffn stem", "FOLDER without --ffn"),
        (f"damaged.pt {stem}", "checksum"),
        ("damaged.pt --export no", "checksum"),
        (f"{dense} {stem} --batch_size 0", "--batch_size 0"),
        (f"{dense} {stem} --data_dir other", "a different tokenizer"),
        (f"{dense} {stem} --block_size 33", "--block_size 33: "),
        (f"{dense} --out new.pt --block_size 8", "--block_size 8 needs --ffn stem"),
    ):
        assert reason in refused(f"convert.py {line}")
    resumed = refused(f"train.py --resume --out_dir hub --data_dir {data}")
    assert "no optimizer state: use --init_from" in resumed
    with locked(tmp_path):
        assert "in use" in refused(f"convert.py {dense} {stem}")
    assert not (tmp_path / "new.pt").exists() and not (tmp_path / "no").exists()


def test_a_converted_model_that_chats_is_trained_on_in_its_stage(trained, data, tmp_path):
    """Else it would learn all that its conversations say."""
    saved = load_checkpoint(trained["dense"] / "ckpt.pt")
    saved["args"]["stage"] = "dpo"
    write_checkpoint(tmp_path / "chats.pt", saved)
    line = "convert.py chats.pt --ffn stem --tokens 0 --out"
    assert command(f"{line} a.pt").stdout.rstrip().endswith("--stage dpo")
    assert "--stage" not in command(f"{line} b.pt --data_dir", data).stdout
