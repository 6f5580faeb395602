"""Documents in files: reading them, counting those that cannot be used, choosing their split.

Three kinds of documents, recognized by the keys of a JSONL line:

    text    str                 {"text": "..."}, and what a .txt file holds
    chat    list of messages    {"conversations": [{"role", "content"}, ...]} or "messages"
    preference    two of them   {"chosen": [...], "rejected": [...]}: they differ in the last answer

Of conversations, other programs' forms are read, too: ShareGPT's ("from", "value"), content as a
list of parts, a "system" beside the messages, a single question and its answer (Alpaca's
"instruction", "input", "output"; "prompt", "completion"). Any of these may ask what two answers
alone, "chosen" and "rejected", answer.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from common import UserError

Messages = list[dict[str, Any]]  # role, content, and weight 0 if it is not to be learned
Document = str | Messages | tuple[Messages, Messages]  # chosen and rejected

# A document of a .txt file ends at the first blank line after so many characters or, as some text
# has none, at the first line break after so many; a longer line is cut.
TXT_DOCUMENT = 2000
TXT_LONGEST = 10_000
# What no text may have. A million blanks would end the program inside of tiktoken.
BAD = {
    "not UTF-8": "[\ud800-\udfff]",
    "it has NUL characters: if it is UTF-16, convert it to UTF-8": "\0",
    "more than 100,000 blanks in a row": r"(?<!\s)\s{100000}",
}
MAX_BAD = 0.01  # a larger share of bad documents, and files are not what they were taken for

# How Project Gutenberg's header and its license begin and end. What does not end within so many
# lines is text.
NOTICES = {
    r"(?i)\ufeff?\**(the )?project gutenberg(['’]s| e-?(book|text))": (
        r"(?i)\*\*\* ?start of th(e|is) project gutenberg|\*end\*? ?the small print"
    ),
    r"(?i)(\*\*\* ?)?end of (the |this )?project gutenberg": r"(?i).*hear about new ebooks\.$",
}
NOTICE = 1000

LEFT_OUT = "characters left out: Project Gutenberg's headers and licenses"
SPELLED = "times <|endoftext|> stays text: as a line of a .txt file, it ends documents"

# In records of one question and its answer: their keys.
QUESTIONS = ("instruction", "prompt", "question", "query", "input")
ANSWERS = ("output", "completion", "response", "answer")
# In messages: other names of roles, and the keys that have a meaning here.
ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "model"), "assistant")
KNOWN = {"role", "content", "from", "value", "weight"}


@dataclass
class Report:
    """How many documents were read, and which of them could not be used."""

    max_bad: float  # share of the documents that may be bad
    kind: str | None = None  # of all documents; if None, that of the first good one
    documents: int = 0
    bad: int = 0
    named: list[str] = field(default_factory=list)  # the first three bad ones: "file:line: reason"
    notes: Counter[str] = field(default_factory=Counter)  # what else happened, and how often

    def __str__(self) -> str:
        return f"{self.bad:,} of {self.documents:,} documents ({'; '.join(self.named) or 'empty'})"


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
    suffix = path.suffix.lower()
    if suffix not in (".txt", ".jsonl"):
        raise UserError(f"--input {path}: only .txt and .jsonl files can be read")
    is_json = suffix == ".jsonl"
    # As text, lines end as they do anywhere. What is not UTF-8 becomes half surrogate pairs.
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        parts = enumerate(file, 1) if is_json else txt_documents(file, report)
        for number, raw in parts:
            bar.update(len(raw))
            if not raw.strip():
                continue
            try:
                kind, document = parse_json(raw, report) if is_json else ("text", checked(raw))
                if kind == "text" and not document.strip():
                    continue
                report.kind = report.kind or kind
                if kind != report.kind:
                    raise ValueError(f"{kind}, while the first document is {report.kind}")
            except ValueError as error:
                report.documents += 1
                report.bad += 1
                if len(report.named) < 3:
                    report.named.append(f"{path}:{number}: {error}")
                continue
            report.documents += 1
            if kind == "text":
                report.notes[SPELLED] += document.count("<|endoftext|>")
            yield document


def kind_of(paths: list[Path]) -> str:
    """The kind of the first good document. UserError: there is none."""
    report = Report(max_bad=1)
    if next(read(paths, report), None) is None:
        raise UserError(f"--input: cannot use {report}: see prepare.py -h for what can be read")
    return report.kind


def txt_documents(file: TextIO, report: Report) -> Iterator[tuple[int, str]]:
    """Yield documents with the numbers of their first lines, cut at <|endoftext|> lines and at
    blank lines. Project Gutenberg's header and license are left out."""
    document = ""
    start = 0  # number of the document's first line; 0: it has none yet
    for number, line in without_notices(file, report):
        bare = line.strip()
        ends = bare == "<|endoftext|>"
        if not ends:
            start = start or number
            document += line
        if ends or len(document) >= (TXT_LONGEST if bare else TXT_DOCUMENT):
            yield start, document
            document = ""
            start = 0
    yield start, document


def without_notices(file: TextIO, report: Report) -> Iterator[tuple[int, str]]:
    """Yield numbered lines, with an <|endoftext|> in place of Project Gutenberg's header and
    license. Lines of what may be one are held back until it ends."""
    held = []
    last = None  # how it ends
    for number, line in enumerate(iter(lambda: file.readline(TXT_LONGEST), ""), 1):
        bare = line.strip()
        begun = next((last for first, last in NOTICES.items() if re.match(first, bare)), None)
        # "End of Project Gutenberg's ..." and "*** END OF ..." may be neighbors.
        is_new = begun and any(text.strip() for _, text in held[1:])
        if not last or is_new or len(held) > NOTICE:
            yield from held
            held = []
            last = None
        last = begun or last
        held.append((number, line))
        if last and re.match(last, bare):
            report.notes[LEFT_OUT] += sum(len(text) for _, text in held)
            held = [(number, "<|endoftext|>")]
            last = None
    yield from held


def checked(text: str) -> str:
    """The text. ValueError: why it is bad."""
    for reason, pattern in BAD.items():
        if re.search(pattern, text):
            raise ValueError(reason)
    return text


def parse_json(raw: str, report: Report) -> tuple[str, Document]:
    """Kind and document of a JSONL line; the report notes keys of conversations that are ignored.
    ValueError: why it is bad."""
    try:
        record = json.loads(raw.removeprefix("\ufeff"))
        json.dumps(record, ensure_ascii=False).encode()  # JSON can spell half a surrogate pair
    except (ValueError, RecursionError):
        raise ValueError("not JSON in UTF-8") from None
    if not isinstance(record, dict):
        raise ValueError(f"{record!r:.40} where a record should be")
    found = filled(record)
    is_talk = found & {"conversations", "messages"}
    is_answered = found >= {"instruction", "output"}  # Alpaca's have the text of both, too
    if "text" in record and not is_talk and not is_answered:
        return "text", checked(joined(record["text"]))

    keys = ", ".join(record)
    ignored: set[str] = set()

    def take(role: str, *keys: str) -> Messages:
        """The messages of the first of these keys that the record has, or its text as a role's."""
        key = next((key for key in keys if record.get(key)), "")
        value = record.pop(key, [])
        if isinstance(value, str):
            value = [{"role": role, "content": value}]
        return conversation(value, ignored)

    kind = "chat"
    talk = take("system", "system", "system_prompt")
    document = talk
    chosen = []
    if "chosen" in record and "rejected" in record:
        kind = "preference"
        chosen, rejected = take("assistant", "chosen"), take("assistant", "rejected")
    if len(chosen) < 2:  # the answers alone, or none
        talk += take("user", "conversations", "messages", *QUESTIONS)
        if not is_talk and record.get("input"):  # Alpaca's: what its instruction is about
            talk[-1]["content"] += "\n" + checked(joined(record.pop("input")))
    if kind == "preference":
        document = talk + chosen, talk + rejected
        if chosen[:-1] != rejected[:-1] or chosen == rejected:
            raise ValueError("chosen and rejected must differ in their last answer alone")
        if any(len(both) < 2 or both[-1]["role"] != "assistant" for both in document):
            raise ValueError(
                f"chosen and rejected must end with an answer to a question: its keys are {keys}"
            )
    elif not is_talk:
        talk += take("assistant", *ANSWERS)
    answers = [m["content"] for m in talk if m["role"] == "assistant" and "weight" not in m]
    if kind == "chat" and not all(map(str.strip, answers or [""])):
        roles = ", ".join(message["role"] for message in talk)
        raise ValueError(f'no "text", no answers to learn among "{roles:.60}": its keys are {keys}')
    ignored |= filled(record)
    report.notes.update(f"documents have {key!r}, which is ignored" for key in ignored)
    return kind, document


def conversation(messages: object, ignored: set[str]) -> Messages:
    """What the chat template writes of messages, and weight 0. ValueError: why they are bad."""
    talk = []
    for message in messages if isinstance(messages, list) else [messages]:
        match message:
            case {"role": str(role), "content": content} | {"from": str(role), "value": content}:
                given = filled(message)
            case _:
                raise ValueError(f'messages need "role" and "content", not {message!r:.60}')
        if given & {"tool_calls", "function_call"} or role == "function_call":
            raise ValueError("messages must not call tools")
        role = role.lower()
        turn = {"role": ROLES.get(role, role), "content": checked(joined(content))}
        weight = message.get("weight")
        if weight not in (None, 0, 1):
            raise ValueError(f"the weight of a message must be 0 or 1, not {weight!r}")
        if weight == 0:
            turn["weight"] = 0
        ignored |= given - KNOWN
        talk.append(turn)
    return talk


def filled(record: dict) -> set[str]:
    """The keys whose values are not empty. A false or a zero says something."""
    return {key for key, value in record.items() if value not in (None, "", [], {})}


def joined(content: object) -> str:
    """The content of a message, of which some programs make a list of parts."""
    match content:
        case str(text) | {"text": str(text)}:
            return text
        case list(parts):
            return "".join(map(joined, parts))
    raise ValueError(f"content that is not text: {content!r:.60}")


def spelled(document: Document) -> str:
    """A text that tells documents apart."""
    return document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)


def hashed(document: Document) -> int:
    """A hash of 64 bits, the same in all versions and on all machines."""
    return int.from_bytes(blake2b(spelled(document).encode(), digest_size=8).digest(), "big")


def is_validation(digest: int, fraction: float) -> bool:
    """Whether the document with this hash is for validation: adding files moves no document."""
    return digest < fraction * 2**64
