"""tokenizer.json of Hugging Face as a tiktoken encoding with the same ids, and the other way.

That file describes many kinds of tokenizer. Read is byte-level BPE that splits text into words as
GPT-2, SmolLM2 or Llama 3 do and merges in the order of ids, as tiktoken does.
"""

import json
from pathlib import Path
from typing import Any

import tiktoken

from common import UserError, parse_json, reading
from text import tokenizer

ADDED = dict(content=str, id=int)  # what is read of a special token
# How the three split text into words, and we do; by the pattern that does the same here.
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LETTERS = {**GPT2, "use_regex": False}  # GPT-2's spelling of bytes, after another split
SMOLLM2 = {"type": "Digits", "individual_digits": True}
LLAMA3 = {
    "type": "Split",
    "pattern": {
        "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    },
    "behavior": "Isolated",
    "invert": False,
}
WORDS: dict[str, list[dict]] = {
    tokenizer.PRETRAINED["gpt2"]: [GPT2],
    tokenizer.SMOLLM2: [SMOLLM2, GPT2],
    tokenizer.PRETRAINED["cl100k_base"]: [LLAMA3, LETTERS],
    tokenizer.PATTERN: [{**LLAMA3, "pattern": {"Regex": tokenizer.PATTERN}}, LETTERS],
}


def read_tokenizer(path: Path, vocab_size: int, bos_id: int | None) -> tiktoken.Encoding:
    """The tokenizer of a model with `vocab_size` ids, in which <|endoftext|> is the token that
    begins a text, whatever its name. UserError: the file is damaged, or ids would differ."""
    with reading(path, "download it again"):
        record = parse_json(
            path.read_bytes(),
            model={"vocab": dict[str, int], "merges": list[str | list[str]]},
            added_tokens=list[ADDED],
        )
    bpe = record["model"]
    require(path, record, "normalizer", None)
    require(path, bpe, "type", "BPE")
    require(path, bpe, "dropout", 0)
    require(path, bpe, "byte_fallback", False)
    pattern = word_pattern(path, record.get("pre_tokenizer"))

    special_tokens = {token["content"]: token["id"] for token in record["added_tokens"]}
    byte_of = {letter: byte for byte, letter in byte_letters().items()}
    ranks = {}
    for token, i in bpe["vocab"].items():
        if token in special_tokens:
            continue
        if not set(token) <= set(byte_of):
            raise UserError(f"{path}: the token {token!r:.40} is not spelled in GPT-2's bytes")
        ranks[bytes(byte_of[letter] for letter in token)] = i
    check_order(path, bpe, ranks)

    if "<|endoftext|>" not in special_tokens:
        names = {i: name for name, i in special_tokens.items()}
        if bos_id not in names:
            raise UserError(f"{path}: no <|endoftext|> and no token with bos_token_id {bos_id}")
        del special_tokens[names[bos_id]]
        special_tokens["<|endoftext|>"] = bos_id
    # Ids without a token get one, so that whatever a model samples can be shown.
    used = {*ranks.values(), *special_tokens.values()}
    for i in range(vocab_size):
        if i not in used:
            special_tokens[f"<|unused_{i}|>"] = i
    with reading(path, "download it again"):
        encoding = tokenizer.make_encoding("huggingface", pattern, ranks, special_tokens)
    if encoding.n_vocab != vocab_size:
        raise UserError(f"{path} has {encoding.n_vocab} ids, its model {vocab_size}")
    return encoding


def write_tokenizer(folder: Path, encoding: tiktoken.Encoding) -> None:
    """Write tokenizer.json, and tokenizer_config.json for transformers: text gets the ids of
    `tokenizer.encode`, so with <|endoftext|> in front, but spelled special tokens become such."""
    letters = byte_letters()
    ranks = encoding._mergeable_ranks
    vocab = dict(encoding._special_tokens)
    merges = []
    for token, i in sorted(ranks.items(), key=lambda item: item[1]):
        spelled = "".join(letters[byte] for byte in token)
        vocab[spelled] = i
        # As tiktoken does, merge whatever two tokens make this one.
        for at in range(1, len(token)):
            if token[:at] in ranks and token[at:] in ranks:
                merges.append(f"{spelled[:at]} {spelled[at:]}")
    eot = "<|endoftext|>"
    plain = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    first = {"SpecialToken": {"id": eot, "type_id": 0}}
    record = {
        "added_tokens": [
            {"id": i, "content": name, "special": True, **plain}
            for name, i in encoding._special_tokens.items()
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": WORDS[encoding._pat_str]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {eot: {"id": eot, "ids": [encoding.eot_token], "tokens": [eot]}},
        },
        "decoder": GPT2,
        # tiktoken, too, looks up a whole word before it merges.
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": True},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": eot, "eos_token": eot}
    (folder / "tokenizer.json").write_text(json.dumps(record))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def word_pattern(path: Path, pre_tokenizer: Any) -> str:
    """The pattern that splits text into words as a pre_tokenizer does."""
    steps = [pre_tokenizer]
    if isinstance(pre_tokenizer, dict):
        steps = pre_tokenizer.get("pretokenizers", steps)
    for pattern, theirs in WORDS.items():
        if steps == theirs:
            return pattern
    raise UserError(
        f"{path}: pre_tokenizer {pre_tokenizer!s:.60} is not GPT-2's, SmolLM2's, Llama 3's"
    )


def byte_letters() -> dict[int, str]:
    """The letters that GPT-2 spells bytes with: a visible character spells itself, the n-th of the
    others is U+0100 + n."""
    letters = {}
    n_hidden = 0
    for byte in range(256):
        if chr(byte).isprintable() and byte != ord(" "):
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(0x100 + n_hidden)
            n_hidden += 1
    return letters


def check_order(path: Path, bpe: dict, ranks: dict[bytes, int]) -> None:
    """UserError: tiktoken, which joins whatever makes the token of the lowest id, would not merge
    in the order of the file's list."""
    merged = []  # the id of what each merge makes
    for merge in bpe["merges"]:
        token = "".join(merge).replace(" ", "")  # of "a b" or ["a", "b"]
        if token not in bpe["vocab"]:
            raise UserError(f"{path}: a merge makes {token!r:.40}, which has no id")
        merged.append(bpe["vocab"][token])
    if bpe.get("ignore_merges"):  # whole words are looked up first, as tiktoken does
        wanted = sorted(merged)
    else:
        wanted = sorted(i for token, i in ranks.items() if len(token) > 1)
    if merged != wanted:
        raise UserError(f"{path}: merges in another order than that of ids are not supported")


def require(path: Path, record: dict, name: str, value: Any) -> None:
    """UserError: a setting in a file, if there is one, has another value."""
    found = record.get(name)
    if found is not None and found != value:
        raise UserError(f"{path}: {name} {found!s:.80} is not supported, only {value}")
