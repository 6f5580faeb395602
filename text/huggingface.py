"""tokenizer.json of Hugging Face as a tiktoken encoding with the same ids, and the other way.

That file describes many kinds of tokenizer. Read is byte-level BPE that splits text into words as
GPT-2 or SmolLM2 do, or by one pattern, as Llama 3 and Qwen do, and merges in the order of ids, as
tiktoken does.
"""

import json
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex
import tiktoken

from common import UserError, parse_json, progress, reading, require_fields
from text import chat, tokenizer
from text.vocabularies import complete, name_unused

ADDED = dict(content=str, id=int)  # what is read of an added token
# What the settings of its "model" must be, where there are some.
PLAIN = {
    "dropout": 0,
    "byte_fallback": False,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
}
# Steps that split text into words, or spell its bytes.
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LETTERS = {**GPT2, "use_regex": False}  # GPT-2's spelling of bytes, after another split
SMOLLM2 = {"type": "Digits", "individual_digits": True}


def split(pattern: str) -> dict:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


# The patterns that do the same here: tiktoken's, of gpt2 and of cl100k_base, and one for SmolLM2,
# with each digit alone, which leaves out the characters whose bytes it has no token for.
GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
CL100K_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"""
    r"""| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
SMOLLM2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}\x04\x06\x13\x14\x16\x1D"""
    r"""\x{40000}-\x{BFFFF}]++|\s++$|\s+(?![^\s\p{N}])|\s"""
)
# What Oniguruma, by which tokenizers splits a text, and tiktoken read in the same way. They differ
# about \w and \b, for instance, and {1,3}+ repeats there, but is possessive here.
ONE = r"\\[pP]\{[A-Z][a-z]?\} | \\[sSdDrnt] | \\[\]\[\\^$.|?*+(){}/-]"
SAME = regex.compile(
    rf"""(
        {ONE}                               # letters of a category, blanks, digits, escaped ones
        | \[\^? ( {ONE} | (?!--) [^\]\[\\&~] )+ \]      # a set, not made of others by --, && or ~~
        | \( (?!\?) | \(\?i: | \(\?: | \(\?! | \) | \|
        | [?*+]
        | (?<!(?<!\\)\)) \{{ \d{{1,3}} (,\d{{0,3}})? \}} (?![?*+{{])   # more would take memory
        | \\s\+\+\$
        | [^\]\[\\^$.|?*+(){{}}]            # any other character
    )*""",
    regex.VERBOSE,
)
NO_TOKEN = bytes.fromhex("04 06 13 14 16 1D C0 C1 F1 F2") + bytes(range(0xF5, 0x100))
WORDS: dict[str, list[dict]] = {
    GPT2_PATTERN: [GPT2],
    SMOLLM2_PATTERN: [SMOLLM2, GPT2],
    # Not Llama 3's pattern, which divides the blanks at the end of a text after a line break. Where
    # tokenizers reads a pattern, {1,3}+ would repeat: 123456 would be one word.
    CL100K_PATTERN: [split(CL100K_PATTERN.replace("{1,3}+", "{1,3}")), LETTERS],
}


def check_pattern(path: Path, pattern: str) -> None:
    """UserError: a pattern may split texts otherwise in tokenizers than in tiktoken."""
    if pattern in WORDS:
        return
    if not SAME.fullmatch(pattern) or regex.match(pattern, ""):  # tiktoken wants no empty words
        raise UserError(f"{path}: the pattern {pattern!r:.80} is not supported")


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


LETTER_OF = byte_letters()
BYTE_OF = {letter: byte for byte, letter in LETTER_OF.items()}

# `chat.prompt` after <|endoftext|>, for transformers' apply_chat_template.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    r"{{ '<|im_start|>' + message['role'] + '\n' + ' ' + message['content'] + '<|im_end|>\n' }}"
    r"{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def read_tokenizer(
    path: Path, vocab_size: int | None = None, bos_id: int | None = None
) -> tokenizer.Encoding:
    """The tokenizer of a model with `vocab_size` ids, in which <|endoftext|> is the token that
    begins a text, whatever its name; without a model, whatever it lacks is added (`complete`).
    UserError: the file is missing or damaged, or ids would differ."""
    fix = "download it again"
    if not path.exists():
        fix = (
            "it is all that is read (no vocab.json; SentencePiece's tokenizer.model is not "
            "supported); transformers writes it: "
            f"AutoTokenizer.from_pretrained({str(path.parent)!r}).save_pretrained(FOLDER)"
        )
    with reading(path, fix):
        record = parse_json(path.read_bytes(), model={}, added_tokens=list[ADDED])
        bpe = record["model"]
        require(path, bpe, "type", "BPE")  # before what others, such as BERT's, do not have
        require_fields(bpe, vocab=dict[str, int], merges=list[str | list[str]])
    if record.get("normalizer") == {"type": "NFC"}:  # as Qwen's
        note = "texts are left as they are: not in Unicode's NFC, they get other ids than there"
        print(f"note: {path} has a normalizer: {note}", file=sys.stderr)
    else:
        require(path, record, "normalizer", None)
    for name, value in PLAIN.items():
        require(path, bpe, name, value)
    pattern = word_pattern(path, record.get("pre_tokenizer"))

    special_tokens = {token["content"]: token["id"] for token in record["added_tokens"]}
    check_added_ids(path, bpe["vocab"], special_tokens)
    ranks = read_ranks(path, bpe, special_tokens, pattern)
    names = {i: name for name, i in special_tokens.items()}
    # The token that begins a text there must be called <|endoftext|> here. MiniMind's and
    # SmolLM2's is <|im_start|>, which begins a message.
    if bos_id in names and names[bos_id] not in tokenizer.SPECIALS:
        del special_tokens[names[bos_id]]
        special_tokens["<|endoftext|>"] = bos_id
    can_be_text = special_tokens.keys() - tokenizer.CONTROL
    for token in record["added_tokens"]:
        if token.get("special") is False and token["content"] in can_be_text:
            check_added(path, token, special_tokens)
            # In the ranks, too: so texts spell it.
            ranks[token["content"].encode(errors="replace")] = token["id"]
    if vocab_size is not None:
        if "<|endoftext|>" not in special_tokens:
            raise UserError(f"{path}: no <|endoftext|> and no token with bos_token_id {bos_id}")
        name_unused(ranks, special_tokens, vocab_size)
    name = "huggingface" if has_our_template(path.parent) else chat.CHATML
    with reading(path, "download it again"):
        encoding = tokenizer.make_encoding(name, pattern, ranks, special_tokens)
    if pattern not in WORDS and not keeps_all(encoding):
        raise UserError(f"{path}: its pattern leaves out parts of a text, which is not supported")
    if vocab_size is None:
        n_token = len(ranks) + len(special_tokens)
        if encoding.n_vocab > 2 * n_token:  # each id without a token gets one
            ids = f"ids up to {encoding.n_vocab - 1:,}, but {n_token:,} tokens"
            raise UserError(f"{path} has {ids}: download it again")
        return complete(encoding)
    if encoding.n_vocab != vocab_size:
        raise UserError(f"{path} has {encoding.n_vocab} ids, its model {vocab_size}")
    return encoding


def read_ranks(
    path: Path, bpe: dict, special_tokens: dict[str, int], pattern: str
) -> dict[bytes, int]:
    """The ids of a vocabulary's tokens, but for special ones. UserError: one is not spelled in
    bytes, or bytes are missing, or merges would give other tokens (`check_merges`)."""
    ranks = {}
    for token, i in bpe["vocab"].items():
        if token in special_tokens:
            continue
        if not set(token) <= BYTE_OF.keys():
            raise UserError(f"{path}: the token {token!r:.40} is not spelled in GPT-2's bytes")
        if len(token) > 1000:  # `is_reached` takes the square of it
            raise UserError(f"{path}: a token of {len(token):,} bytes is not supported")
        ranks[bytes(map(BYTE_OF.get, token))] = i
    check_merges(path, bpe, ranks)
    lacking = bytes(byte for byte in range(256) if bytes([byte]) not in ranks)
    if lacking != (NO_TOKEN if pattern == SMOLLM2_PATTERN else b""):
        fix = "train it with initial_alphabet=pre_tokenizers.ByteLevel.alphabet()"
        if not lacking:
            fix = "with Digits, only SmolLM2's is read, which lacks some"
        raise UserError(f"{path}: {len(lacking)} of the 256 single bytes are missing: {fix}")
    return ranks


def keeps_all(encoding: tiktoken.Encoding) -> bool:
    """Whether a text of all characters, above U+DFFF each 16th, is the same once encoded."""
    letters = "".join(map(chr, [*range(0xD800), *range(0xE000, sys.maxunicode, 16)]))
    # In parts: a pattern may look ahead to the end from each place.
    parts = (letters[at : at + 1000] for at in range(0, len(letters), 1000))
    return all(encoding.decode(encoding.encode_ordinary(part)) == part for part in parts)


def has_our_template(folder: Path) -> bool:
    """Whether the chat template of a folder is the one that `write_tokenizer` writes, also where
    transformers has written it again."""
    jinja, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if jinja.exists():
        with reading(jinja, "download it again"):
            return jinja.read_bytes() == CHAT_TEMPLATE.encode()
    if config.exists():
        with reading(config, "download it again"):
            return parse_json(config.read_bytes()).get("chat_template") == CHAT_TEMPLATE
    return False


def write_tokenizer(folder: Path, encoding: tokenizer.Encoding, block_size: int) -> None:
    """Write tokenizer.json, and tokenizer_config.json for transformers: text gets the ids of
    `tokenizer.encode`, so with <|endoftext|> in front, but spelled special tokens become such."""
    added = {name.encode() for name in encoding.added}
    ranks = {token: i for token, i in encoding._mergeable_ranks.items() if token not in added}
    vocab = dict(encoding._special_tokens)
    merges = []
    for token, i in sorted(ranks.items(), key=lambda item: item[1]):
        spelled = "".join(map(LETTER_OF.get, token))
        vocab[spelled] = i
        # As tiktoken does, merge whatever two tokens make this one.
        for at in range(1, len(token)):
            if token[:at] in ranks and token[at:] in ranks:
                merges.append(f"{spelled[:at]} {spelled[at:]}")
    words = WORDS.get(encoding._pat_str, [split(encoding._pat_str), LETTERS])
    eot = "<|endoftext|>"
    plain = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    first = {"SpecialToken": {"id": eot, "type_id": 0}}
    record = {
        "added_tokens": [
            {"id": i, "content": name, "special": name not in encoding.added, **plain}
            for name, i in encoding._special_tokens.items()
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": words},
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
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size}
    config["clean_up_tokenization_spaces"] = False  # which makes "x!= y" of "x != y"
    config |= dict.fromkeys(["bos_token", "eos_token", "pad_token"], eot)
    if tokenizer.START in encoding.special_tokens_set:
        config["chat_template"] = CHAT_TEMPLATE
        if encoding.name == chat.CHATML:
            config["chat_template"] = CHAT_TEMPLATE.replace(" + ' '", "")
    (folder / "tokenizer.json").write_text(json.dumps(record))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def word_pattern(path: Path, pre_tokenizer: Any) -> str:
    """The pattern that splits text into words as a pre_tokenizer does."""
    steps = [pre_tokenizer]
    if isinstance(pre_tokenizer, dict):
        steps = pre_tokenizer.get("pretokenizers", steps)
    if isinstance(steps, list):
        steps = [
            # use_regex may be left out; trim_offsets is about places in a text, not ids.
            {"use_regex": True, **step, "trim_offsets": True}
            if isinstance(step, dict) and step.get("type") == "ByteLevel"
            else step
            for step in steps
        ]
    for pattern, theirs in WORDS.items():
        if steps == theirs:
            return pattern
    match steps:
        case [{"pattern": {"Regex": str(pattern)}}, _] if steps == [split(pattern), LETTERS]:
            check_pattern(path, pattern)
            return pattern
    raise UserError(
        f"{path}: pre_tokenizer {pre_tokenizer!s:.60} is not GPT-2's, SmolLM2's, Llama 3's, or a "
        "pattern and ByteLevel"
    )


def check_merges(path: Path, bpe: dict, ranks: dict[bytes, int]) -> None:
    """UserError: tiktoken, which joins whatever makes the token of the lowest id, and looks up a
    whole word first, would find other tokens than the merges of a file."""
    merged = []  # the id of what each merge makes
    pairs = {}  # what is merged, and when
    for number, merge in enumerate(bpe["merges"]):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        token = "".join(parts)
        if token not in bpe["vocab"] or not set(token) <= BYTE_OF.keys():
            raise UserError(f"{path}: a merge makes {token!r:.40}, which is no token of a text")
        merged.append(bpe["vocab"][token])
        pair = tuple(bytes(map(BYTE_OF.get, part)) for part in parts)
        pairs.setdefault(pair, number)
    whole = bpe.get("ignore_merges")  # there, too, a whole word is looked up first
    for token in progress(ranks, "checking merges"):
        if len(token) == 1 or is_reached(token, pairs):
            continue
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = {pair for pair in splits if {*pair} <= ranks.keys()}
        if not (whole and pairs.keys() >= known):
            raise UserError(f"{path}: its merges do not make the token {token!r:.40}")
    wanted = merged if whole else [i for token, i in ranks.items() if len(token) > 1]
    if merged != sorted(wanted):
        raise UserError(f"{path}: merges in another order than that of ids are not supported")


def is_reached(token: bytes, pairs: dict[tuple[bytes, ...], int]) -> bool:
    """Whether merges make a token of its bytes, each time the earliest one that can be done. So
    they do within any text, as long as no other merge takes a byte of it."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 1:
        pair = min(pairwise(parts), key=lambda pair: pairs.get(pair, len(pairs)))
        if pair not in pairs:
            return False
        at = list(pairwise(parts)).index(pair)
        parts[at : at + 2] = [b"".join(pair)]
    return True


def check_added_ids(path: Path, vocab: dict[str, int], special_tokens: dict[str, int]) -> None:
    """UserError: tokenizers, which gives an added token the id that it has in the vocabulary, or
    else the next one, would not give those that the file says."""
    n = len(vocab)
    for name, i in special_tokens.items():
        expected = vocab.get(name, n)
        if i != expected:
            raise UserError(f"{path}: the added token {name!r:.40} has the id {i}, not {expected}")
        n = max(n, i + 1)


def check_added(path: Path, token: dict, special_tokens: Iterable[str]) -> None:
    """UserError: tokenizers would find an added token in other places of a text than tiktoken."""
    name = token["content"]
    for flag in ("single_word", "lstrip", "rstrip"):
        if token.get(flag):
            raise UserError(f"{path}: {flag} of the added token {name!r:.40} is not supported")
    for other in special_tokens:
        if name != other and (name.startswith(other) or other.startswith(name)):
            both = f"{name!r:.40} and {other!r:.40}"
            raise UserError(f"{path}: of the added tokens {both}, one begins with the other")


def require(path: Path, record: dict, name: str, value: Any) -> None:
    """UserError: a setting in a file, if there is one, has another value."""
    found = record.get(name)
    if found is not None and found != value:
        raise UserError(f"{path}: {name} {found!s:.80} is not supported, only {value}")
