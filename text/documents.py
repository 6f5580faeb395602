"""Documents in files: reading them, and counting those that cannot be used.

Three kinds of documents, recognized by the keys of a record (files.py):

    text    str                 {"text": "..."}, and what a file of text holds
    chat    list of messages    {"conversations": [{"role", "content"}, ...]} or "messages"
    preference    two of them   {"chosen": [...], "rejected": [...]}: they differ in the last answer

Of conversations, other programs' forms are read, too: ShareGPT's ("from", "value"), content as a
list of parts, a "system" beside the messages, a single question and its answer (Alpaca's
"instruction", "input", "output"; "prompt", "completion"). Any of these may be the question to
which "chosen" and "rejected" are two answers.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from common import UserError, refuse_lfs_pointer
from text import files
from text.tokenizer import START

Messages = list[dict[str, Any]]  # role, content, and weight 0 if it is not to be learned
Document = str | Messages | tuple[Messages, Messages]  # chosen and rejected

# What no text may have. A million blanks would end the program inside of tiktoken.
BAD = {
    "not UTF-8: convert it to UTF-8": "[\ud800-\udfff]",
    "it has NUL characters: if it is UTF-16, convert it to UTF-8": "\0",
    "100,000 blanks or more in a row": r"(?<!\s)\s{100000}",
}
MAX_BAD = 0.01  # a larger share of bad documents, and files are not what they were taken for

EMPTY = "empty documents are left out"
TOOLS = "conversations that call tools are left out"
# Special tokens that a text spells, as MiniMind's older text for pretraining does.
SPELLED = {
    "<|endoftext|>": "times <|endoftext|> stays text: as a line of a .txt file, it ends documents",
    START: f"times {START} stays text: it becomes a token only around messages with roles",
}

# The keys of a record that hold messages, or one message; `prepare.py -h` names them.
TALKS = ("conversations", "messages", "conversation")
SYSTEMS = ("system", "system_prompt")
QUESTIONS = ("instruction", "prompt", "question", "query", "input")
ANSWERS = ("output", "completion", "response", "answer")
PAIR = {"chosen", "rejected"}
CONTENTS = {*TALKS, *SYSTEMS, *QUESTIONS, *ANSWERS, *PAIR}
ALPACA = {"instruction", "output"}  # a record of these has the text of both, too
# Other names of roles, and the keys of a message that have a meaning here.
ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "model"), "assistant")
MESSAGE = {"role", "content", "from", "value", "weight"}
TOOL_CALLS = {"tool_calls", "function_call"}


class CallsTools(Exception):
    """A conversation calls tools. The chat template has no place for that, but the file is not
    wrong."""


@dataclass
class Report:
    """How many documents were read, and which of them could not be used."""

    max_bad: float  # share of the documents that may be bad
    kind: str | None = None  # of all documents; if None, that of the first good one
    first: str = ""  # the first good one, "file:line"
    documents: int = 0
    bad: int = 0
    named: list[str] = field(default_factory=list)  # the first three bad ones: "file:line: reason"
    notes: Counter[str] = field(default_factory=Counter)  # what else happened, and how often

    def __str__(self) -> str:
        reasons = "; ".join(self.named or +self.notes) or "empty"
        return f"{self.bad:,} of {self.documents:,} documents ({reasons})"


def read(
    paths: list[Path], report: Report, desc: str = "reading", columns: Sequence[str] = ()
) -> Iterator[Document]:
    """Yield the documents of files, all of one kind; others are skipped and counted. Of records,
    only `columns`, if there are some. UserError: a file cannot be read, or more is bad than the
    report allows."""
    try:
        size = sum(path.stat().st_size for path in paths)
        with tqdm(total=size, desc=desc, unit="B", unit_scale=True, delay=3, disable=None) as bar:
            for path in paths:
                start = bar.n
                refuse_lfs_pointer(path)
                with open(path, "rb") as raw, files.opened(path, raw) as file:
                    for document in read_file(path, file, report, columns):
                        bar.update(start + raw.tell() - bar.n)
                        yield document
    except (OSError, EOFError, zlib.error) as error:  # the last two: what was packed is cut off
        name = getattr(error, "filename", None) or path
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--input {name}: {reason}") from None
    if report.bad > report.max_bad * report.documents:
        raise UserError(f"cannot use {report}: more than {report.max_bad:.0%}: correct them")


def read_file(
    path: Path, file: TextIO, report: Report, columns: Sequence[str]
) -> Iterator[Document]:
    is_text = files.ending_of(path) in files.TEXTS
    parts = files.documents_of(path, file, report.notes) if is_text else files.records(path, file)
    for number, part in parts:
        try:
            if is_text:
                kind, document = "text", plain_text(part)
            else:
                kind, document = parse_record(part, columns, report)
            if kind == "text" and not document.strip():
                report.notes[EMPTY] += not is_text  # a text's are blank lines
                continue
            report.kind = report.kind or kind
            report.first = report.first or f"{path}:{number}"
            if kind != report.kind:
                raise ValueError(
                    f"{kind}, but {report.first} is {report.kind}: name files of one kind"
                )
        except CallsTools:
            report.notes[TOOLS] += 1
            continue
        except (ValueError, RecursionError) as error:
            report.documents += 1
            report.bad += 1
            if len(report.named) < 3:
                report.named.append(f"{path}:{number}: {error}")
            continue
        report.documents += 1
        if kind == "text":
            for special, note in SPELLED.items():
                report.notes[note] += document.count(special)
        yield document


def kind_of(paths: list[Path], columns: Sequence[str] = ()) -> str:
    """The kind of the first good document. UserError: there is none."""
    report = Report(max_bad=1)
    if next(read(paths, report, columns=columns), None) is None:
        raise UserError(f"--input: cannot use {report}: see prepare.py -h for what can be read")
    return report.kind


def parse_record(record: object, columns: Sequence[str], report: Report) -> tuple[str, Document]:
    """Kind and document of a record. What is empty or null does not decide; the report notes which
    keys are ignored, and roles that are not known. ValueError: why it is bad; or CallsTools."""
    if isinstance(record, ValueError):
        raise record
    if not isinstance(record, dict):
        raise ValueError(f"{record!r:.40} where a record should be")
    notes: Counter[str] = Counter()
    try:
        chosen = named(record, columns) if columns else record
        left = {key: value for key, value in chosen.items() if is_filled(value)}
        if not left:
            kind, document = "text", ""
        elif "text" in left and not left.keys() & {*TALKS} and not left.keys() >= ALPACA:
            kind, document = "text", plain_text(left.pop("text"))
            left = {key: left[key] for key in left.keys() & CONTENTS}  # others are about the text
        elif left.keys() >= PAIR:
            kind, document = "preference", take_pair(left, notes)
        elif left.keys() & PAIR and record.keys() >= PAIR:
            raise ValueError(f'"{(PAIR - left.keys()).pop()}" is empty')
        elif left.keys() & {*TALKS, *QUESTIONS, *ANSWERS}:
            kind, document = "chat", take_talk(left, notes)
        elif "text" in record:
            kind, document, left = "text", "", {}
        else:
            raise ValueError('no "text", messages, or question with answer (--columns names them)')
    except ValueError as error:
        keys = plain_text(", ".join(record))  # if the file is not UTF-8, this says so
        raise ValueError(f"{error}: its keys are {keys:.80}") from None
    report.notes.update(notes)  # += would go through all notes so far
    report.notes.update(f"documents have {key!r:.40}, which is ignored" for key in left)
    return kind, document


def named(record: dict, columns: Sequence[str]) -> dict:
    """A record of the text that a column has, or of the question and the answer that two have."""
    keys = {key.strip().lower(): key for key in record}
    missing = [name for name in columns if name.lower() not in keys]
    if missing:
        raise ValueError(f"no column {missing[0]!r}")
    values = [record[keys[name.lower()]] for name in columns]
    return dict(
        zip(("prompt", "completion") if len(columns) > 1 else ("text",), values, strict=True)
    )


def is_filled(value: object) -> bool:
    """Whether a record's value is not empty. A false or a zero says something."""
    return bool(value.strip()) if isinstance(value, str) else value not in (None, [], {})


def take_talk(left: dict, notes: Counter[str]) -> Messages:
    """The conversation of a record, or its question with the answer. Like those below, it takes
    from the record what it reads."""
    is_talk = bool(left.keys() & {*TALKS})
    talk = take(left, SYSTEMS, "system", notes) + take_question(left, notes)
    if not is_talk:
        if all(message["role"] != "user" for message in talk):
            raise ValueError("no question (--columns names it and its answer)")
        if talk[-1]["role"] == "user" and not left.keys() & {*ANSWERS}:
            raise ValueError("no answer, or an empty one (--columns names it and its question)")
        talk += take(left, ANSWERS, "assistant", notes)
    check_systems(talk)
    answers = [m["content"] for m in talk if m["role"] == "assistant" and "weight" not in m]
    if not all(map(str.strip, answers)):
        raise ValueError('an answer is empty: "weight": 0 leaves it out')
    if not answers:
        roles = ", ".join(message["role"] for message in talk)
        fix = 'answers have the role "assistant", or --columns names questions and answers'
        raise ValueError(f'no answers to learn among "{roles:.60}": {fix}')
    return talk


def take_pair(left: dict, notes: Counter[str]) -> tuple[Messages, Messages]:
    """Two conversations, given as a whole or as two answers to the record's question."""
    talk = take(left, SYSTEMS, "system", notes)
    chosen, rejected = (take(left, [key], "assistant", notes) for key in ("chosen", "rejected"))
    if chosen[0]["role"] == "assistant":  # the answers alone, or what follows the question
        talk += take_question(left, notes)
        if talk and talk[-1]["role"] == "assistant":
            raise ValueError("messages must end with the question that chosen and rejected answer")
    for message in chosen + rejected:
        message.pop("weight", None)  # the last answers are compared, nothing else is learned
    if chosen[:-1] != rejected[:-1] or chosen == rejected:
        raise ValueError("chosen and rejected must differ in their last answer alone")
    pair = talk + chosen, talk + rejected
    if any(len(both) < 2 or both[-1]["role"] != "assistant" for both in pair):
        raise ValueError("chosen and rejected must end with an answer to a question")
    check_systems(pair[0])
    return pair


def check_systems(talk: Messages) -> None:
    """ValueError: a conversation begins with two system messages."""
    if [message["role"] for message in talk[:2]] == ["system", "system"]:
        raise ValueError("a system message beside messages that begin with one")


def take_question(left: dict, notes: Counter[str]) -> Messages:
    """The messages of a record, or its question."""
    if left.keys() & {*TALKS}:
        return take(left, TALKS, "user", notes)
    question = take(left, QUESTIONS, "user", notes)
    if "input" in left:  # Alpaca's: what its instruction is about
        question[-1]["content"] += "\n" + plain_text(left.pop("input"))
    return question


def take(left: dict, keys: Iterable[str], role: str, notes: Counter[str]) -> Messages:
    """The messages of the first of these keys that the record has, or its text as a role's."""
    key = next((key for key in keys if key in left), None)
    value = left.pop(key, [])
    if isinstance(value, str):
        if value.startswith("[{") and re.search("['\"](role|from)['\"]:", value):
            raise ValueError("messages as one text, as in a CSV: take the data set's Parquet")
        value = {"role": role, "content": value}
    messages = value if isinstance(value, list) else [value]
    return [message_of(message, notes) for message in messages]


def message_of(given: object, notes: Counter[str]) -> dict[str, Any]:
    """What the chat template writes of a message, and weight 0."""
    is_record = isinstance(given, dict) and given.keys() & {"content", "value", *TOOL_CALLS}
    role = first_of(given, "role", "from") if is_record else None
    if not isinstance(role, str):
        raise ValueError(f'messages need "role" and "content", texts need quotes: {given!r:.60}')
    role = role.strip().lower()
    role = ROLES.get(role, role)
    if "\n" in role:  # by which `assistant` would open a message
        raise ValueError(f"roles must have one line, not {role!r:.40}")
    left = {key for key, value in given.items() if is_filled(value)}
    if left & TOOL_CALLS or role == "function_call":  # without content or not
        raise CallsTools
    message = {"role": role, "content": plain_text(first_of(given, "content", "value"))}
    weight = given.get("weight")
    if weight not in (None, 0, 1):
        raise ValueError(f"the weight of a message must be 0 or 1, not {weight!r}")
    if weight == 0:
        message["weight"] = 0
    if role not in ("system", "user", "assistant"):
        notes[f"messages have the role {role!r:.40}, which is not learned"] += 1
    for key in left - MESSAGE:
        notes[f"documents have {key!r:.40}, which is ignored"] = 1
    return message


def first_of(record: dict, *keys: str) -> object:
    """The value of the first of these keys that is filled, or else that is there."""
    values = [record[key] for key in keys if key in record]
    return next(filter(is_filled, values), values[0] if values else None)


def plain_text(content: object) -> str:
    """The text of a content, which may be a list of parts, and lists of them: a line break is
    between parts that no blank divides. ValueError: it has something else, or what no text may."""
    match content:
        case str(text) | {"text": str(text)}:
            for reason, pattern in BAD.items():
                if re.search(pattern, text):
                    raise ValueError(reason)
            return text
        case list(parts):
            text = ""
            for part in map(plain_text, parts):
                is_apart = not text or not part or text[-1].isspace() or part[0].isspace()
                text += part if is_apart else f"\n{part}"
            return text
    raise ValueError(f"content that is not text: {content!r:.60}")
