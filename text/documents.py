"""Documents out of files: reading them, saying what is wrong with them, telling their split.

Three kinds of document, recognised by the keys of a JSONL file's first good line:

    text         str                    {"text": "..."}, and what a .txt file holds
    chat         list of messages       {"conversations": [{"role", "content"}, ...]} or "messages"
    preference   (chosen, rejected)     {"chosen": [...], "rejected": [...]}, equal but for the end
"""

import codecs
import json
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from stat import S_ISREG
from typing import TypeAlias

from tqdm import tqdm

from common import UserError
from text import template

Messages: TypeAlias = list[dict[str, str]]
Document: TypeAlias = str | Messages | tuple[Messages, Messages]
Found: TypeAlias = tuple[str, Document]  # kind, document
Numbered: TypeAlias = Iterator[tuple[int, bytes | None]]

# Bytes after which a .txt document ends at the next blank line.
TXT_DOCUMENT = 2000
# Bytes of a document that is taken for damage. Whole novels have 1 to 4 MB; a file that lost its
# line breaks has gigabytes, and to look at those one needs them in memory.
HUGE = 16 << 20
NAMED = 3  # bad documents named of each reason


class Bad(ValueError):
    """A document that cannot be used: the reason, which is counted, and what is special here."""

    def __init__(self, reason: str, detail: object = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason


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

    def skip(self, path: Path, number: int, bad: Bad) -> None:
        self.bad[bad.reason] += 1
        if self.bad[bad.reason] <= NAMED:
            self.named.append(f"{path}:{number}: {bad}")
        # How many lines are to come is not known, so a file is given up early only when it is as
        # good as lost: a hundred bad ones, at ten times the share that is allowed.
        if self.bad.total() >= 100:
            self.judge(10 * self.max_bad)

    def judge(self, allowed: float) -> None:
        """Raises UserError if more than a share `allowed` of the documents so far is bad."""
        if self.bad.total() > allowed * self.documents:
            more = "" if self.max_bad == 1 else f" or allow more than --max_bad {self.max_bad:g}"
            raise UserError(
                f"{self.bad.total():,} of {self.documents:,} documents cannot be used: "
                f"{'; '.join(self.named)}: mend them{more}"
            )

    def lines(self) -> list[str]:
        """What to tell the user; nothing if all was used."""
        lines = [f"skipped {name}" for name in self.named]
        if self.bad:
            reasons = ", ".join(f"{n:,} {reason}" for reason, n in self.bad.most_common())
            lines.append(f"skipped {self.bad.total():,} of {self.documents:,} documents: {reasons}")
        if self.tools:
            lines.append(f"left out {self.tools:,} conversations: the template writes no tools")
        for key, n in self.unwritten.most_common():
            lines.append(f'{n:,} conversations have "{key}", which the template does not write')
        return lines


def read(
    paths: list[Path], report: Report, kind: str | None = None, desc: str = "reading"
) -> Iterator[Found]:
    """The documents of .txt and .jsonl files with their kinds. Those that are bad or of another
    kind than `kind` are left to the report.

    Raises:
        UserError: a file is missing or of another kind, or more is bad than the report allows.
    """
    try:
        for path in paths:  # a pipe would be waited for, and could be read only once
            if path.suffix not in (".txt", ".jsonl") or not S_ISREG(path.stat().st_mode):
                raise UserError(f"--input {path}: only regular .txt and .jsonl files can be read")
        size = sum(path.stat().st_size for path in paths)
        with tqdm(total=size, desc=desc, unit="B", unit_scale=True, delay=3) as bar:
            for path in paths:
                is_json = path.suffix == ".jsonl"
                numbered = lines(path, bar)
                for number, raw in numbered if is_json else txt_documents(numbered):
                    if raw is not None and not raw.strip():
                        continue  # blank lines are nobody's mistake
                    report.documents += 1
                    try:
                        found, document = parse(raw, is_json, report)
                        if found != (kind or found):
                            raise Bad(f"of kind {found} in a file of kind {kind}")
                        yield found, document
                    except Bad as bad:
                        report.skip(path, number, bad)
                    except UsesTools:
                        report.tools += 1
    except OSError as error:
        raise UserError(f"--input {error.filename or path}: {error.strerror}") from None
    report.judge(report.max_bad)


def kind_of(paths: list[Path]) -> str:
    """The kind of the documents in files, from the first good line of each.

    Raises:
        UserError: they are of different kinds, or nothing in them can be used.
    """
    kinds = {}
    for path in paths:
        report = Report(max_bad=1)
        kind, _ = next(read([path], report), ("chat", None))  # as nothing else uses tools
        if not report.documents:
            raise UserError(f"--input {path}: nothing is in it, leave it out")
        if report.bad.total() == report.documents:
            report.judge(0)
        kinds.setdefault(kind, path)
    if len(kinds) > 1:
        found = ", ".join(f"{path} is {kind}" for kind, path in kinds.items())
        raise UserError(f"--input: files of different kinds ({found}): prepare them separately")
    return next(iter(kinds))


def lines(path: Path, bar: tqdm) -> Numbered:
    """Numbers and bytes of lines; None for one of HUGE bytes or more, which is never in memory."""
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(HUGE), b""), 1):
            bar.update(len(line))
            if len(line) == HUGE and not line.endswith(b"\n"):
                while (rest := file.readline(HUGE)) and not rest.endswith(b"\n"):
                    bar.update(len(rest))
                line = None
            elif number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            yield number, line


def txt_documents(numbered: Numbered) -> Numbered:
    """Documents cut at <|endoftext|> lines and at blank lines, with their first lines' numbers."""
    document: list[bytes] = []
    size = start = 0
    for number, line in numbered:
        bare = None if line is None else line.strip()
        if bare != b"<|endoftext|>":
            start = start or number
            size += HUGE if line is None else len(line)
            document.append(line or b"")
            if size >= HUGE:
                document.clear()
        if bare == b"<|endoftext|>" or (bare == b"" and size >= TXT_DOCUMENT):
            yield start, None if size >= HUGE else b"".join(document)
            document, size, start = [], 0, 0
    yield start, None if size >= HUGE else b"".join(document)


def parse(raw: bytes | None, is_json: bool, report: Report) -> Found:
    """Kind and document of a JSONL line or of a .txt file's document; raises Bad or UsesTools."""
    if raw is None:
        raise Bad("huge", f"{HUGE >> 20} MiB or more")
    try:
        text = raw.decode()
        if not is_json:
            return "text", text.replace("\r\n", "\n").replace("\r", "\n")
        record = json.loads(text)
    except UnicodeDecodeError as error:
        raise Bad("not UTF-8", f"byte 0x{raw[error.start]:02x}: convert it first") from None
    except (ValueError, RecursionError) as error:
        raise Bad("not JSON", error) from None
    if not isinstance(record, dict):
        raise Bad("not a JSON object")
    if "chosen" in record or "rejected" in record:
        kind, document = "preference", preference(record, report)
    elif "conversations" in record or "messages" in record:
        key = "conversations" if "conversations" in record else "messages"
        kind, document = "chat", conversation(record, key, report)
        if not any(message["role"] == "assistant" for message in document):
            raise Bad("a conversation without an assistant message")
    else:
        kind, document = "text", record.get("text")
        if not isinstance(document, str):
            raise Bad('no "text", "conversations" or "chosen" and "rejected"')
        if not document.strip():
            raise Bad("empty text")
    try:
        canonical(document).encode()
    except UnicodeEncodeError as error:  # JSON can name half a surrogate pair, which is no text
        raise Bad("half a surrogate pair", ascii(error.object[error.start])) from None
    return kind, document


def conversation(record: dict, key: str, report: Report) -> Messages:
    """The messages under a key, with what the chat template writes of them."""
    messages = record.get(key)
    if isinstance(messages, list):
        for holder in (record, *(m for m in messages if isinstance(m, dict))):
            if holder.get("tools") or holder.get("tool_calls") or holder.get("role") == "tool":
                raise UsesTools
    try:
        template.check(messages)
    except ValueError as error:
        raise Bad(f'"{key}" is no conversation', error) from None
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


def canonical(document: Document) -> str:
    """What stands for a document when it is hashed: a text itself, anything else as JSON."""
    return document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)


def hashed(document: Document) -> int:
    """64 bits that depend on a document alone."""
    return int.from_bytes(blake2b(canonical(document).encode(), digest_size=8).digest(), "big")


def is_validation(document: Document, fraction: float) -> bool:
    """Whether a document is for validation. Its hash decides, so adding files moves no document,
    and a preference pair stays together."""
    return hashed(document) < fraction * 2**64


def in_sample(document: Document, fraction: float) -> bool:
    """As `is_validation`, but from the other end of the hash: the two choices are independent."""
    return hashed(document) % 2**32 < fraction * 2**32
