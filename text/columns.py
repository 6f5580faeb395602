"""Text in the columns of a terminal, where a Chinese character takes two."""

import re
import textwrap
import unicodedata

FILLER = "\0"  # the second column of a wide character, while a text is wrapped


def width(text: str) -> int:
    """How many columns a text takes: two for each wide character, as of Chinese, none for marks
    that combine with the character before them."""
    n = 0
    for letter in unicodedata.normalize("NFC", text):
        if unicodedata.category(letter) not in ("Mn", "Me", "Cf"):
            n += 2 if unicodedata.east_asian_width(letter) in "WF" else 1
    return n


def padded(text: str, n: int) -> str:
    """A text with blanks after it, n columns in all."""
    return text + " " * (n - width(text))


def wrapped(text: str, n: int) -> list[str]:
    """A text as lines of at most n columns."""
    return _Wrapper(width=n).wrap(text)


def shortened(text: str, n: int) -> str:
    """A text, or its beginning and "[...]", in one line of at most n columns."""
    text = " ".join(text.split())
    if len(wrapped(text, n)) < 2:
        return text
    cut = " [...]"
    return wrapped(text, n - len(cut))[0].rstrip() + cut


class _Wrapper(textwrap.TextWrapper):
    """Breaks lines as textwrap does and, as Chinese has no blanks, beside any wide character."""

    def wrap(self, text: str) -> list[str]:
        filled = ""
        for letter in unicodedata.normalize("NFC", text).replace(FILLER, ""):
            filled += letter + FILLER * (width(letter) - 1)
        return [line.replace(FILLER, "") for line in super().wrap(filled)]

    def _split(self, text: str) -> list[str]:  # into what a line may end with
        parts = []
        for chunk in super()._split(text):
            parts += re.findall(rf".{FILLER}|(?:.(?!{FILLER}))+", chunk, re.DOTALL)
        return parts
