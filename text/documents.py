"""Documents in files: reading them, counting those that cannot be used, choosing their split.

Three kinds of documents, recognized by the keys of a JSONL line:

    text    str                 {"text": "..."}, and what a .txt file holds
    chat    list of messages    {"conversations": [{"role", "content"}, ...]} or "messages"
    preference    two of them   {"chosen": [...], "rejected": [...]}: they differ in the last answer
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
Document = str | Messages | tuple[Messages, Messages]  # chosen and rejected

# A document of a .txt file ends at the first blank line after so many bytes, or at the first line
# break of any kind after so many: text without blank lines must not fill the memory.
TXT_DOCUMENT = 2000
TXT_LONGEST = 1 << 20
MAX_BAD = 0.01  # a larger share of bad documents, and files are not what they were taken for
GUTENBERG = re.compile(rb"(?:\*\*\* ?)?(start|end) of (?:th(?:e|is) )?project gutenberg", re.I)


@dataclass
class Report:
    """How many documents were read, and which of them could not be used."""

    max_bad: float  # share of the documents that may be bad
    kind: str | None = None  # of all documents; if None, that of the first good one
    documents: int = 0
    bad: int = 0
    named: list[str] = field(default_factory=list)  # the first three bad ones: "file:line: reason"

    def __str__(self) -> str:
        return f"{self.bad:,} of {self.documents:,} documents ({'; '.join(self.named)})"


def read(paths: list[Path], report: Report, desc: str = "reading") -> Iterator[Document]:
    """Yield the documents of .txt and .jsonl files, all of one kind; others are skipped and
    counted. UserError: a file cannot be read, or more is bad than the report allows."""
    try:
        size = sum(path.stat().st_size for path in paths)
        with tqdm(total=size, desc=desc, unit="B", unit_scale=True, delay=3, disable=None) as bar:
            for path in paths:
                yield from read_file(path, report, bar)
    except OSError as error:
        raise UserError(f"--input {error.filename or path}: {error.strerror}") from None
    if report.bad > report.max_bad * report.documents:
        raise UserError(f"cannot use {report}: more than {report.max_bad:.0%}: correct them")


def read_file(path: Path, report: Report, bar: tqdm) -> Iterator[Document]:
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"--input {path}: only .txt and .jsonl files can be read")
    is_json = path.suffix == ".jsonl"
    with open(path, "rb") as file:
        parts = enumerate(file, 1) if is_json else txt_documents(file)
        for number, raw in parts:
            bar.update(len(raw))
            if not raw.strip():
                continue
            report.documents += 1
            try:
                kind, document = parse_json(raw) if is_json else ("text", parse_txt(raw))
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
    """Yield documents with the numbers of their first lines, cut at <|endoftext|> lines and at
    blank lines. Project Gutenberg's header and license are left out."""
    document = bytearray()
    start = 0  # number of the document's first line; 0: it has none yet
    in_license = False
    for number, line in enumerate(lines, 1):
        bare = line.strip()
        ends = bare == b"<|endoftext|>"
        marker = GUTENBERG.match(bare)
        if marker:
            ends = True
            in_license = marker[1].lower() == b"end"
            if not in_license:
                document.clear()  # all before the start of the book is the header
        elif not in_license and not ends:
            start = start or number
            document += line
        if ends or len(document) >= (TXT_LONGEST if bare else TXT_DOCUMENT):
            yield start, bytes(document)
            document.clear()
            start = 0
    yield start, bytes(document)


def parse_txt(raw: bytes) -> str:
    """A part of a .txt file as text. ValueError: why it is bad."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_json(raw: bytes) -> tuple[str, Document]:
    """Kind and document of a JSONL line. ValueError: why it is bad."""
    try:
        record = json.loads(raw.decode("utf-8-sig"))
        json.dumps(record, ensure_ascii=False).encode()  # JSON can spell half a surrogate pair
    except (ValueError, RecursionError):
        raise ValueError("not JSON in UTF-8") from None
    match record:
        case {"conversations": list(messages)} | {"messages": list(messages)}:
            messages = conversation(messages)
            if not any(message["role"] == "assistant" for message in messages):
                raise ValueError("no assistant message")
            return "chat", messages
        case {"chosen": list(chosen), "rejected": list(rejected)}:
            chosen, rejected = conversation(chosen), conversation(rejected)
            answers = [talk[-1:] for talk in (chosen, rejected)]
            if chosen[:-1] != rejected[:-1] or answers[0] == answers[1]:
                raise ValueError("chosen and rejected must differ in their last answer alone")
            if any(talk[0]["role"] != "assistant" for talk in answers if talk) or [] in answers:
                raise ValueError("chosen and rejected must end with an answer")
            return "preference", (chosen, rejected)
        case {"text": str(text)} if text.strip():
            return "text", text
    raise ValueError('no "text" and no "conversations"')


def conversation(messages: list) -> Messages:
    """Role and content of messages, which is what the chat template writes."""
    talk = []
    for message in messages:
        match message:
            case {"role": str(role), "content": str(content)} if not message.get("tool_calls"):
                talk.append({"role": role, "content": content})
            case _:
                raise ValueError('messages need "role" and "content", and must not call tools')
    return talk


def hashed(document: Document) -> int:
    """A hash of 64 bits, the same in all versions and on all machines."""
    text = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def is_validation(document: Document, fraction: float) -> bool:
    """Whether a document is for validation. Its hash decides, so adding files moves no document."""
    return hashed(document) < fraction * 2**64
