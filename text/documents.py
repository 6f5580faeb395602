"""Documents in files: reading them, counting those that cannot be used, choosing their split.

Three kinds of document, recognised by the keys of a JSONL line:

    text         str                    {"text": "..."}, and what a .txt file holds
    chat         list of messages       {"conversations": [{"role", "content"}, ...]} or "messages"
    preference   (chosen, rejected)     {"chosen": [...], "rejected": [...]}, equal but for the end
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from tqdm import tqdm

from common import UserError

Messages = list[dict[str, str]]
Document = str | Messages | tuple[Messages, Messages]

# A document of a .txt file ends at the first blank line after so many bytes, or at the first line
# break of any kind after so many: text without blank lines must not fill the memory.
TXT_DOCUMENT, TXT_LONGEST = 2000, 1 << 20
GUTENBERG = re.compile(rb"(?:\*\*\* ?)?(start|end) of (?:th(?:e|is) )?project gutenberg", re.I)


@dataclass
class Report:
    """How many documents were read, and which of them could not be used."""

    max_bad: float  # share of the documents that may be bad
    kind: str | None = None  # of all documents; if None, that of the first good one
    documents: int = 0
    bad: int = 0
    named: list[str] = field(default_factory=list)  # three of the bad: "file:line: reason"

    def __str__(self) -> str:
        return f"{self.bad:,} of {self.documents:,} documents ({'; '.join(self.named)})"


def read(paths: list[Path], report: Report, desc: str = "reading") -> Iterator[Document]:
    """The documents of .txt and .jsonl files, all of one kind; others are skipped and counted.
    UserError: a file cannot be read, or more is bad than the report allows."""
    try:
        size = sum(path.stat().st_size for path in paths)
        with tqdm(total=size, desc=desc, unit="B", unit_scale=True, delay=3, disable=None) as bar:
            for path in paths:
                yield from read_file(path, report, bar)
    except OSError as error:
        raise UserError(f"--input {error.filename or path}: {error.strerror}") from None
    if report.bad > report.max_bad * report.documents:
        raise UserError(f"cannot use {report}: correct them or raise --max_bad {report.max_bad:g}")


def read_file(path: Path, report: Report, bar: tqdm) -> Iterator[Document]:
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"--input {path}: only .txt and .jsonl files can be read")
    is_json = path.suffix == ".jsonl"
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1) if is_json else txt_documents(file):
            bar.update(len(raw))
            if not raw.strip():
                continue
            report.documents += 1
            try:
                kind, document = parse(raw, is_json)
                report.kind = report.kind or kind
                if kind != report.kind:
                    raise ValueError(f"{kind}, while the first document is {report.kind}")
            except ValueError as error:
                report.bad += 1
                if len(report.named) < 3:
                    report.named.append(f"{path}:{number}: {error}")
            else:
                yield document


def kind_of(paths: list[Path]) -> str:
    """The kind of the first good document. UserError: there is none."""
    report = Report(max_bad=1)
    if next(read(paths, report), None) is None:
        raise UserError(f"--input: cannot use {report}: see prepare.py -h for what can be read")
    return report.kind


def txt_documents(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Documents with the numbers of their first lines, cut at <|endoftext|> lines and at blank
    lines. Project Gutenberg's header and licence are left out."""
    document, start, in_licence = bytearray(), 0, False
    for number, line in enumerate(lines, 1):
        bare = line.strip()
        end = bare == b"<|endoftext|>"
        if marker := GUTENBERG.match(bare):
            end, in_licence = True, marker[1].lower() == b"end"
            if not in_licence:
                document.clear()  # it is the header
        elif not in_licence and not end:
            start = start or number
            document += line
        if end or len(document) >= (TXT_LONGEST if bare else TXT_DOCUMENT):
            yield start, bytes(document)
            document, start = bytearray(), 0
    yield start, bytes(document)


def parse(raw: bytes, is_json: bool) -> tuple[str, Document]:
    """Kind and document of a JSONL line or of a part of a .txt file. ValueError: why it is bad."""
    try:
        text = raw.decode("utf-8-sig")
        if not is_json:
            return "text", text.replace("\r\n", "\n").replace("\r", "\n")
        record = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode()  # JSON can spell half a surrogate pair
    except (ValueError, RecursionError):
        raise ValueError("not JSON in UTF-8" if is_json else "not UTF-8") from None
    match record:
        case {"chosen": chosen, "rejected": rejected}:
            chosen, rejected = conversation(chosen), conversation(rejected)
            last = [message["role"] for message in (*chosen[-1:], *rejected[-1:])]
            if chosen[:-1] != rejected[:-1] or chosen == rejected or last != ["assistant"] * 2:
                raise ValueError("chosen and rejected must differ in the last answer only")
            return "preference", (chosen, rejected)
        case {"conversations": messages} | {"messages": messages}:
            messages = conversation(messages)
            if not any(message["role"] == "assistant" for message in messages):
                raise ValueError("no assistant message")
            return "chat", messages
        case {"text": str(text)} if text.strip():
            return "text", text
    raise ValueError('no "text", "conversations", or "chosen" and "rejected"')


def conversation(messages: object) -> Messages:
    """Role and content of messages, which is what the chat template writes."""
    talk = []
    for message in messages if isinstance(messages, list) else [messages]:
        match message:
            case {"role": str(role), "content": str(content)} if not message.get("tool_calls"):
                talk.append({"role": role, "content": content})
            case _:
                raise ValueError('messages need "role" and "content", and must not call tools')
    return talk


def hashed(document: Document) -> int:  # 64 bits
    text = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def is_validation(document: Document, fraction: float) -> bool:
    """Whether a document is for validation. Its hash decides, so adding files moves no document."""
    return hashed(document) < fraction * 2**64
