"""Documents out of files: reading them, saying what is wrong with them, telling their split.

Three kinds of document, recognised by the keys of a JSONL file's first good line:

    text         str                    {"text": "..."}, and what a .txt file holds
    chat         list of messages       {"conversations": [{"role", "content"}, ...]} or "messages"
    preference   (chosen, rejected)     {"chosen": [...], "rejected": [...]}, equal but for the end
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

from tqdm import tqdm

from common import UserError

Messages: TypeAlias = list[dict[str, str]]
Document: TypeAlias = str | Messages | tuple[Messages, Messages]
Found: TypeAlias = tuple[str, Document]  # kind, document
Numbered: TypeAlias = Iterator[tuple[int, bytes | bytearray]]

# Bytes after which a .txt document ends at the next blank line.
TXT_DOCUMENT = 2000
# Bytes of a document that is taken for damage. Whole novels have 1 to 4 MB; a file that lost its
# line breaks has gigabytes, and to look at those one needs them in memory.
HUGE = 16 << 20
GUTENBERG = re.compile(rb"(?:\*\*\* ?)?(start|end) of (?:th(?:e|is) )?project gutenberg", re.I)
NAMED = 3  # bad documents named of each reason


class Bad(Exception):
    """A document that cannot be used: the reason, which is counted, and maybe what is special."""


class UsesTools(Exception):
    """A conversation with tools, for which the chat template has no form."""


class Report:
    """What of the input was left out. Nothing is dropped without being counted here."""

    def __init__(self, max_bad: float) -> None:
        self.max_bad = max_bad  # share of the documents that may be bad
        self.documents = self.tools = 0  # conversations with tools are not bad, but left out
        self.bad: Counter[str] = Counter()  # by reason
        self.named: list[str] = []  # the first few of each reason
        self.unwritten: Counter[str] = Counter()  # conversations, by a key that is not written

    def show(self) -> None:
        for name in self.named:
            print(f"skipped {name}")
        if self.bad:
            reasons = ", ".join(f"{n:,} {reason}" for reason, n in self.bad.most_common())
            print(f"skipped {self.bad.total():,} of {self.documents:,} documents: {reasons}")
        if self.tools:
            print(f"left out {self.tools:,} conversations: the template writes no tools")
        for key, n in self.unwritten.most_common():
            print(f'{n:,} conversations have "{key}", which the template does not write')


def read(
    paths: list[Path], report: Report, kind: str | None = None, desc: str = "reading"
) -> Iterator[Found]:
    """The documents of .txt and .jsonl files with their kinds. Those that are bad or of another
    kind than `kind` are left to the report.

    Raises:
        UserError: a file is missing or of another kind, or more is bad than the report allows.
    """
    try:
        size = sum(path.stat().st_size for path in paths)
        with tqdm(total=size, desc=desc, unit="B", unit_scale=True, delay=3) as bar:
            for path in paths:
                if path.suffix not in (".txt", ".jsonl"):
                    raise UserError(f"--input {path}: only .txt and .jsonl files can be read")
                numbered = lines(path, bar)
                if not (is_json := path.suffix == ".jsonl"):
                    numbered = txt_documents(numbered)
                for number, raw in numbered:
                    if not raw.strip():
                        continue  # blank lines are nobody's mistake
                    report.documents += 1
                    try:
                        found, document = parse(raw, is_json, report)
                        if found != (kind or found):
                            raise Bad(f"of kind {found} in a file of kind {kind}")
                        yield found, document
                    except UsesTools:
                        report.tools += 1
                    except Bad as bad:
                        reason, *detail = bad.args
                        report.bad[reason] += 1
                        if report.bad[reason] <= NAMED:
                            report.named.append(": ".join([f"{path}:{number}", reason, *detail]))
    except OSError as error:
        raise UserError(f"--input {error.filename or path}: {error.strerror}") from None
    if report.bad.total() > report.max_bad * report.documents:
        raise UserError(
            f"{report.bad.total():,} of {report.documents:,} documents cannot be used: "
            f"{'; '.join(report.named)}: mend them or allow more than --max_bad {report.max_bad:g}"
        )


def kind_of(paths: list[Path]) -> str:
    """The kind of the documents in files, from the first good line of each.

    Raises:
        UserError: they are of different kinds, or nothing in them can be used.
    """
    kinds = {}
    for path in paths:
        report = Report(max_bad=1)
        kind, _ = next(read([path], report), ("chat", None))  # as nothing else uses tools
        if report.bad.total() == report.documents:
            why = "; ".join(report.named) or "nothing is in it"
            raise UserError(
                f"--input {path}: no document can be used: {why}: mend it or leave it out"
            )
        kinds[kind] = path
    if len(kinds) > 1:
        found = ", ".join(f"{path} is {kind}" for kind, path in kinds.items())
        raise UserError(f"--input: files of different kinds ({found}): prepare them separately")
    return kind


def lines(path: Path, bar: tqdm) -> Numbered:
    """Numbers and bytes of lines. Of a longer one, only its first HUGE bytes are ever in memory."""
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(HUGE), b""), 1):
            bar.update(len(line))
            rest = line
            while len(rest) == HUGE and not rest.endswith(b"\n"):
                rest = file.readline(HUGE)
            yield number, line


def txt_documents(numbered: Numbered) -> Numbered:
    """Documents cut at <|endoftext|> lines and at blank lines, with their first lines' numbers. One
    that is HUGE lacks its end. What Project Gutenberg puts around a book is left out."""
    document, start, licence = bytearray(), 0, False
    for number, line in numbered:
        bare = line.strip()
        if edge := GUTENBERG.match(bare):
            licence = edge[1].lower() == b"end"
            if not licence:
                document.clear()  # of the header
        elif not licence and bare != b"<|endoftext|>":
            start = start or number
            if len(document) < HUGE:
                document += line
        if edge or bare == b"<|endoftext|>" or (bare == b"" and len(document) >= TXT_DOCUMENT):
            yield start, document
            document, start = bytearray(), 0
    yield start, document


def parse(raw: bytes | bytearray, is_json: bool, report: Report) -> Found:
    """Kind and document of a JSONL line or of a .txt file's document; raises Bad or UsesTools."""
    if len(raw) >= HUGE:
        raise Bad("huge", f"{HUGE >> 20} MiB or more")
    try:
        text = raw.decode("utf-8-sig")
        if not is_json:
            return "text", text.replace("\r\n", "\n").replace("\r", "\n")
        record = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode()  # JSON can name half a surrogate pair
    except UnicodeError as error:
        raise Bad("not UTF-8", f"{error}") from None
    except (ValueError, RecursionError) as error:
        raise Bad("not JSON", f"{error}") from None
    if not isinstance(record, dict):
        raise Bad("not a JSON object")
    if "chosen" in record or "rejected" in record:
        return "preference", preference(record, report)
    for key in ("conversations", "messages"):
        if key in record:
            document = conversation(record, key, report)
            if not any(message["role"] == "assistant" for message in document):
                raise Bad("a conversation without an assistant message")
            return "chat", document
    if not isinstance(record.get("text"), str):
        raise Bad('no "text", "conversations" or "chosen" and "rejected"')
    if not record["text"].strip():
        raise Bad("empty text")
    return "text", record["text"]


def conversation(record: dict, key: str, report: Report) -> Messages:
    """The messages under a key, with what the chat template writes of them."""
    messages = record.get(key)
    if not (isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)):
        raise Bad(f'"{key}" is no conversation', "it has to be a list of messages")
    for part in (record, *messages):
        if part.get("tools") or part.get("tool_calls") or part.get("role") == "tool":
            raise UsesTools
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if not (isinstance(role, str) and role.isidentifier() and isinstance(content, str)):
            raise Bad(f'"{key}" is no conversation', 'a message needs "role" and "content"')
    report.unwritten.update(
        {k for message in messages for k, v in message.items() if v} - {"role", "content"}
    )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def preference(record: dict, report: Report) -> tuple[Messages, Messages]:
    chosen, rejected = (conversation(record, key, report) for key in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise Bad("chosen and rejected do not answer the same prompt")
    if chosen == rejected:
        raise Bad("chosen and rejected are equal")
    if not chosen[-1]["role"] == rejected[-1]["role"] == "assistant":
        raise Bad("a preference that does not end with assistant messages")
    return chosen, rejected


def hashed(document: Document) -> int:
    """64 bits that depend on a document alone."""
    text = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def is_validation(document: Document, fraction: float) -> bool:
    """Whether a document is for validation. Its hash decides, so adding files moves no document,
    and a preference pair stays together."""
    return hashed(document) < fraction * 2**64


def in_sample(document: Document, fraction: float) -> bool:
    """As `is_validation`, but from the other end of the hash: the two choices are independent."""
    return hashed(document) % 2**32 < fraction * 2**32
