"""Tokenizers, saved as JSON text and run by tiktoken.

A tokenizer is a `tiktoken.Encoding`, trained by bpe.py or by another program. As one line of JSON
(`dumps`, `loads`) it is stored with the data and inside the checkpoint, so neither can be read with
the wrong tokenizer; `fingerprint` is the short form that is compared.
"""

import base64
import hashlib
import json
from collections.abc import Iterable
from itertools import takewhile
from operator import itemgetter
from typing import Any

import tiktoken

from common import Damage, parse_json

START, END = "<|im_start|>", "<|im_end|>"
SPECIALS = {"<|endoftext|>": 0, START: 1, END: 2}
# What a model writes when it has come to an end: of a text or a message, here and in Llama 3.
ENDS = ("<|endoftext|>", END, "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")
CONTROL = {*SPECIALS, *ENDS}  # no text can spell these, whatever a file says

FORMAT, VERSION = "byte-bpe", 1


class Encoding(tiktoken.Encoding):
    """tiktoken's, with special tokens that a text may spell, `added`: in tokenizers of Hugging Face
    the added tokens that are not special, such as <think>."""

    def __init__(self, **parts: Any) -> None:  # as tiktoken's: copies and pickles call it, too
        super().__init__(**parts)
        self.added = added_tokens(self._mergeable_ranks, self._special_tokens)

    def encode_ordinary(self, text: str) -> list[int]:
        return self.encode(text, allowed_special=self.added, disallowed_special=())


def added_tokens(ranks: dict[bytes, int], special_tokens: dict[str, int]) -> set[str]:
    """The special tokens that are among the ranks, too, with the same id: a text may spell them.
    None of them begins or ends a document or a message, or is empty, which a text would spell
    without end."""
    found = set()
    for name, i in special_tokens.items():
        # tiktoken refuses half a surrogate pair, later.
        if name and name not in CONTROL and ranks.get(name.encode(errors="replace")) == i:
            found.add(name)
    return found


def dumps(encoding: tiktoken.Encoding) -> str:
    """Returns any tiktoken encoding, trained here or not, as one line of JSON for `loads`."""
    # tiktoken has no public access to what begins with an underscore; its own guide to extending an
    # encoding reads it, too. Sorted by id, equal encodings are equal texts.
    special_tokens = sorted(encoding._special_tokens.items(), key=itemgetter(1))
    ranks = sorted(encoding._mergeable_ranks.items(), key=itemgetter(1))
    data = {
        "format": FORMAT,
        "version": VERSION,
        "name": encoding.name,
        "pattern": encoding._pat_str,
        "special_tokens": dict(special_tokens),
        "ranks": [[base64.b64encode(token).decode(), i] for token, i in ranks],
    }
    return json.dumps(data)


def loads(text: str | bytes) -> Encoding:
    """Returns the encoding that `dumps` wrote. Raises Damage if the text is damaged, or no such
    one."""
    data = parse_json(
        text, format=str, version=int, name=str, pattern=str, ranks=list, special_tokens=dict
    )
    if (data["format"], data["version"]) != (FORMAT, VERSION):
        raise Damage(f"its format is not {FORMAT}, version {VERSION}")
    try:
        ranks = {base64.b64decode(token, validate=True): i for token, i in data["ranks"]}
    except (TypeError, ValueError) as error:  # of Base64, or not pairs
        raise Damage(f"its ranks: {error}") from None
    if len(ranks) < len(data["ranks"]):
        raise Damage("a token is there twice")
    return make_encoding(data["name"], data["pattern"], ranks, data["special_tokens"])


def make_encoding(
    name: str, pattern: str, ranks: dict[bytes, int], special_tokens: dict[str, int]
) -> Encoding:
    """Returns an encoding of what a file says. Damage: it cannot be."""
    # tiktoken would end the program at an id that is there twice, and has 32 bits for one.
    ids = [*ranks.values(), *special_tokens.values()]
    if not all(isinstance(i, int) and 0 <= i < 2**32 for i in ids):
        raise Damage("an id is not an integer from 0 to 2^32 - 1")
    if len(set(ids)) < len(ids) - len(added_tokens(ranks, special_tokens)):
        raise Damage("an id is there twice")
    try:
        return Encoding(
            name=name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
        )
    except ValueError as error:
        raise Damage(f"its pattern: {error}") from None


def encode(encoding: tiktoken.Encoding, text: str) -> list[int]:
    """Token ids of a document's text, after the <|endoftext|> that precedes every document."""
    return [encoding.eot_token, *encoding.encode_ordinary(text)]


def ends(encoding: tiktoken.Encoding) -> tuple[int, ...]:
    """The token ids that end a text or a message, <|endoftext|> first."""
    names = [name for name in ENDS if name in encoding.special_tokens_set]
    return tuple(map(encoding.encode_single_token, names))


def until_end(encoding: tiktoken.Encoding, tokens: Iterable[int]) -> list[int]:
    """The tokens up to the end of a text or of a message."""
    last = ends(encoding)
    return list(takewhile(lambda token: token not in last, tokens))


def fingerprint(encoding: tiktoken.Encoding) -> str:
    """Returns 16 hex digits of all that `dumps` writes except the name: encodings of equal ones
    encode and decode alike."""
    data = json.loads(dumps(encoding))
    del data["name"]
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]
