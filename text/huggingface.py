"""tokenizer.json of Hugging Face as a tiktoken encoding with the same ids.

That file describes many kinds of tokenizer. Read is byte-level BPE that splits text into words as
GPT-2, SmolLM2 or Llama 3 do and merges in the order of ids, as tiktoken does.
"""

import json
from pathlib import Path
from typing import Any

import tiktoken

from common import UserError, reading
from text import tokenizer
from text.dataset import check_fields

# How the three split text into words, and the pattern that does the same here.
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
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
WORDS: list[tuple[list[dict], str]] = [
    ([GPT2], tokenizer.PRETRAINED["gpt2"]),
    ([SMOLLM2, GPT2], tokenizer.SMOLLM2),
    ([LLAMA3, {**GPT2, "use_regex": False}], tokenizer.PRETRAINED["cl100k_base"]),
]


def read_tokenizer(path: Path, vocab_size: int, bos_id: int | None) -> tiktoken.Encoding:
    """The tokenizer of a model with `vocab_size` ids, in which <|endoftext|> is the token that
    begins a text, whatever its name. UserError: the file is damaged, or ids would differ."""
    with reading(path, "download it again"):
        record = json.loads(path.read_text(encoding="utf-8"))
        check_fields(record, {"model": dict, "added_tokens": list})
        bpe = record["model"]
        check_fields(bpe, {"vocab": dict, "merges": list})
        check_fields(bpe["vocab"], dict.fromkeys(bpe["vocab"], int))
        for token in record["added_tokens"]:
            check_fields(token, {"content": str, "id": int})

        require(path, record, "normalizer", None)
        require(path, bpe, "type", "BPE")
        require(path, bpe, "dropout", 0)
        require(path, bpe, "byte_fallback", False)
        pattern = word_pattern(path, record.get("pre_tokenizer"))

        special_tokens = {token["content"]: token["id"] for token in record["added_tokens"]}
        vocab = {}
        for token, i in bpe["vocab"].items():
            if token not in special_tokens:
                vocab[token] = i
        letters = byte_letters()
        ranks = {}
        for token, i in vocab.items():
            ranks[bytes(letters[letter] for letter in token)] = i
        check_order(path, bpe, vocab, ranks)

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
        encoding = tokenizer.make_encoding("huggingface", pattern, ranks, special_tokens)
    if encoding.n_vocab != vocab_size:
        raise UserError(f"{path} has {encoding.n_vocab} ids, its model {vocab_size}")
    return encoding


def word_pattern(path: Path, pre_tokenizer: Any) -> str:
    """The pattern that splits text into words as a pre_tokenizer does."""
    steps = [pre_tokenizer]
    if isinstance(pre_tokenizer, dict) and "pretokenizers" in pre_tokenizer:
        steps = pre_tokenizer["pretokenizers"]
    for theirs, pattern in WORDS:
        if steps == theirs:
            return pattern
    raise UserError(
        f"{path}: pre_tokenizer {pre_tokenizer!s:.60} is not GPT-2's, SmolLM2's, Llama 3's"
    )


def byte_letters() -> dict[str, int]:
    """The bytes by the letters that GPT-2 spells them with: a visible character spells itself, the
    n-th of the others is U+0100 + n."""
    letters = {}
    n_hidden = 0
    for byte in range(256):
        if chr(byte).isprintable() and byte != ord(" "):
            letters[chr(byte)] = byte
        else:
            letters[chr(0x100 + n_hidden)] = byte
            n_hidden += 1
    return letters


def check_order(path: Path, bpe: dict, vocab: dict[str, int], ranks: dict[bytes, int]) -> None:
    """UserError: tiktoken, which joins whatever makes the token of the lowest id, would not merge
    in the order of the file's list."""
    merged = []  # the id of what each merge makes
    for merge in bpe["merges"]:
        pair = merge.split(" ") if isinstance(merge, str) else merge  # "a b" or ["a", "b"]
        if not isinstance(pair, list) or not all(isinstance(part, str) for part in pair):
            raise ValueError(f"merge {merge!s:.40}")
        merged.append(vocab["".join(pair)])
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
