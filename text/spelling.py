"""Text as people type it, and tokens as they are shown."""

import codecs
import re
import unicodedata
from collections.abc import Iterable, Iterator

import tiktoken


def typed(encoding: tiktoken.Encoding, text: str) -> str:
    """A text from a command line as the model knows it: `familiar`, and without a space at the end,
    as this belongs to the next word. A shell passes "\\n" on as two characters, here a line break;
    "\\\\" is a backslash."""
    text = re.sub(r"\\([n\\])", lambda pair: "\n" if pair[1] == "n" else "\\", text)
    return familiar(encoding, text).removesuffix(" ")


def familiar(encoding: tiktoken.Encoding, text: str) -> str:
    """Of the two ways to write "é", as one character or two, the one with fewer tokens: keyboards
    and file names of some systems have another than the text that was learned."""
    forms = (text, *(unicodedata.normalize(form, text) for form in ("NFC", "NFD")))
    return min(forms, key=lambda form: len(encoding.encode_ordinary(form)))


def spelled(encoding: tiktoken.Encoding, *tokens: int) -> str:
    """The text of some tokens, to be shown. Bytes of it that are no whole character become such as
    \\xe5: tokens that differ look different."""
    return encoding.decode_bytes(tokens).decode(errors="backslashreplace")


def stream(encoding: tiktoken.Encoding, ids: Iterable[int]) -> Iterator[str]:
    """Yields the text of token ids as they come. A character that several tokens spell comes with
    the last of them; one that stays incomplete becomes U+FFFD at the end."""
    spelled = map(encoding.decode_single_token_bytes, ids)
    return codecs.iterdecode(spelled, "utf-8", errors="replace")
