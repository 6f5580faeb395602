"""Files that prepare.py reads: which they are, and their lines of text or records.

    .txt, .md                    text, cut into documents; of Markdown without its marks
    .jsonl, .json, .csv, .tsv    records (documents.py): a line, an element of an array, a row

Each may be compressed (.gz, .bz2). What is left out of a text is counted in `notes`.
"""

import bz2
import csv
import gzip
import html
import io
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

from tqdm import tqdm

from common import UserError, python_line, refuse_lfs_pointer

TEXTS = {".txt", ".md", ".markdown"}
TABLES = {".csv", ".tsv"}
RECORDS = {".jsonl", ".ndjson", ".json", *TABLES}
PACKED = {".gz": gzip.open, ".bz2": bz2.open}
UNPACKED = 4  # times as large as the packed file, about, is English text
KNOWN = (
    ".txt, .md, .jsonl, .json, .csv and .tsv files, also .gz or .bz2: unpack other archives; to "
    "read other plain text, such as .py, add .txt to its name"
)
# What most data sets of the Hugging Face Hub consist of.
FROM_PARQUET = (
    "import glob, pandas; pandas.concat(map(pandas.read_parquet, sorted(glob.glob({}))))"
    '.to_json({}, orient="records", lines=True)'
)

# A document of a text ends at the first blank line after so many characters or, as some text has
# none, at the first line break after so many; a longer line is cut.
DOCUMENT = 2000
LONGEST = 10_000
RECORD = 1 << 28  # characters of a line of records: a small packed file may have one without end

# How Project Gutenberg's header and its license begin and end.
NOTICES = {
    r"(?i)\ufeff?\**(the )?project gutenberg(['’]s| e-?(book|text))": (
        r"(?i)(\*\*\* ?)?start of th(e|is) project gutenberg|\*end\*? ?the small print"
    ),
    r"(?i)(\*\*\* ?)?end of (the |this )?project gutenberg": r"(?i).*hear about new ebooks\.$",
}
NOTICE = 1000  # lines; what does not end within so many is text
FRONT = 100  # likewise of a Markdown file's front matter
RULE, FIELD = r"-{3,}|\+{3}", r"[\w\"'.-]+ *[:=]"

# Most lines have none of these characters, so none of the marks of Markdown below.
ANY = re.compile(r"[`\\<>\[*_#=|&]|^[\s:]*-")
ENTITY = re.compile(r"&#?\w+;")  # without the semicolon, it is of an address: ?a=1&copy=2
ADDRESS = r"\((?:[^()]|\([^()]*\))*\)"  # it may have parentheses itself
IMAGE = re.compile(rf"!\[[^\[\]]*\]({ADDRESS}|\[[^\[\]]*\])")
# What follows a letter is code, such as a[0][1]; but in Chinese, a link follows a letter, too.
LINK = re.compile(rf"(?<![a-zA-Z0-9_\\])\[([^\[\]^][^\[\]]*|)\]({ADDRESS}|\[[^\[\]]*\])")
MARKS = re.compile(
    r"(?<!`)(`+)(?P<code>[^`]+)\1|\\(?P<kept>[!-/:-@\[-`{-~])"  # what they have stays
    r"|<!--.*?-->|</?[a-zA-Z][^<>]*>"  # HTML
    r"|\[\^[^\]]+\]:?"  # a footnote's mark
    r"|^\[[^\]]+\]: *(<[^<>]*>|(?=\S*[/#.:]\S)\S+)( +[\"'(].*)?\s*$"  # a link's address
    r"|^ {0,3}(#{1,6}(?=\s)|(> ?)+)\s*|\s#+\s*$"  # headings, quotations
    r"|^\s*(=+\s*|([-*_]\s*){3,})$|^(?=.*---)\s*[|:-][|:\s-]*$"  # rules, also of tables
    r"|(?<![\d*])\*+(?=\S)|(?<=\S)\*+(?![\d*])|(?<!\w)_+(?=\S)|(?<=\S)_+(?!\w)"  # emphasis, not 2*3
)

NO_NOTICES = "characters left out: Project Gutenberg's headers and licenses"
NO_MARKS = "characters left out: Markdown's marks and front matter"
NOWHERE = "links in folders lead nowhere"
ELSEWHERE = "files are read that lie elsewhere: links in folders lead to them"
CARDS = "README.md are left out: they describe records"
OTHERS = "files in folders are left out ({}): unpack archives, add .txt to the names of plain text"


def ending_of(path: Path) -> str:
    """The ending of a file's name, without that of its compression."""
    if path.suffix.lower() in PACKED:
        path = path.with_suffix("")
    return path.suffix.lower()


def find_files(paths: Iterable[Path], notes: Counter[str]) -> list[Path]:
    """These files, and those in these folders, each sorted by path, so that the order is the same
    everywhere; what is hidden is passed by. UserError: none can be read, or a file cannot."""
    found = []
    others: Counter[str] = Counter()
    for path in paths:
        if not path.exists():
            raise UserError(f"--input {path}: No such file or folder")
        inside = [path]
        if path.is_dir():
            bar = tqdm(files_in(path, notes), "finding files", unit=" files", delay=3, disable=None)
            inside = list(bar)
        known, has_records = [], False
        for file in inside:
            refuse_parquet(file, path if file == path else file.parent)
            ending = ending_of(file)
            has_records |= ending in RECORDS
            if ending in TEXTS | RECORDS:
                known.append(file)
            else:
                others[ending or file.name] += 1
        if not known:
            what = "the folder has" if path.is_dir() else "it is"
            raise UserError(f"--input {path}: {what} none of {KNOWN}")
        if has_records:
            not_cards = [file for file in known if file.name != "README.md"]
            notes[CARDS] += len(known) - len(not_cards)
            known = not_cards
        top = path.resolve()
        homes = {folder: folder.resolve() for folder in {file.parent for file in known}}
        real = (f.resolve() if f.is_symlink() else homes[f.parent] / f.name for f in known)
        notes[ELSEWHERE] += sum(not file.is_relative_to(top) for file in real)
        found += sorted(known, key=lambda file: unicodedata.normalize("NFC", file.as_posix()))
    names = ", ".join(f"{name:.20}" for name, _ in others.most_common(4))
    notes[OTHERS.format(names)] += others.total()
    return found


def refuse_parquet(file: Path, source: Path) -> None:
    """UserError: a file is Parquet. Beside such files, a clone from the Hub has little but its
    README, which alone would be read. source: what pandas is to read, the file or its folder, of
    which it gets the Parquet files alone: it cannot open a folder that has others."""
    if file.suffix.lower() == ".parquet":
        refuse_lfs_pointer(file)
        out = f"{source.resolve().stem}.jsonl"
        if source.is_dir():
            source = source / "*.parquet"
        names = [json.dumps(name, ensure_ascii=False) for name in (str(source), out)]
        command = python_line("-c", FROM_PARQUET.format(*names))
        needs = "pip install pandas pyarrow"
        splits = " (of several splits, put one's name before *)" if source != file else ""
        raise UserError(
            f"--input {file} is Parquet: run {needs} && {command}, then take {out}{splits}"
        )


def files_in(path: Path, notes: Counter[str]) -> Iterator[Path]:
    """Yield all files of a folder but hidden ones. Links are followed, to each folder once.
    UserError: a folder in it cannot be read."""

    def refuse(error: OSError) -> NoReturn:
        raise UserError(f"--input {error.filename}: {error.strerror}")

    seen = set()
    for folder, folders, names in os.walk(path, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in (Path(folder, name) for name in sorted(names) if not name.startswith(".")):
            if file.is_file():
                yield file
            elif not file.exists():
                notes[NOWHERE] += 1


def text_size(paths: Iterable[Path]) -> int:
    """About how many bytes of text there are in files."""
    return sum(
        path.stat().st_size * (UNPACKED if path.suffix.lower() in PACKED else 1) for path in paths
    )


def opened(path: Path, raw: BinaryIO) -> TextIO:
    """A file as text, whose lines end as they do anywhere. What is not UTF-8 becomes half surrogate
    pairs."""
    unpacked = PACKED.get(path.suffix.lower(), lambda file: file)(raw)
    return io.TextIOWrapper(unpacked, encoding="utf-8-sig", errors="surrogateescape")


# --- records ---


def records(path: Path, file: TextIO) -> Iterator[tuple[int, Any]]:
    """Yield the records of a file, or ValueErrors where there is none, each with its number: of its
    line, or of the element."""
    ending = ending_of(path)
    lines = iter(partial(file.readline, RECORD), "")
    if ending in TABLES:
        yield from rows(path, lines)
        return
    start = next((line for line in lines if line.strip()), "") if ending == ".json" else ""
    # An array, or a record over several lines, is not streamed.
    is_array = start.lstrip().startswith("[")
    if is_array or (start and isinstance(record_of(start), ValueError)):
        text = start + file.read()
        whole = record_of(text)
        if is_array or not isinstance(whole, ValueError):
            yield from enumerate(whole if isinstance(whole, list) else [whole], 1)
            return
        start, lines = "", io.StringIO(text)  # of which the first is bad
    for number, line in enumerate(chain([start], lines), int(bool(start))):
        if line.strip():
            yield number, record_of(line)


def record_of(text: str) -> Any:
    """What JSON says, or a ValueError."""
    try:
        record = json.loads(text.removeprefix("\ufeff"))
        json.dumps(record, ensure_ascii=False).encode()  # JSON can spell half a surrogate pair
    except (ValueError, RecursionError):
        return ValueError("not JSON in UTF-8")
    return record


def rows(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, str] | ValueError]]:
    """Yield a table's rows with the numbers of their last lines, or ValueErrors for rows with more
    cells than names. Tabs divide the cells of a .tsv, else of comma, semicolon and tab the one that
    the first line has most often. UserError: quotes do not match, or two columns have one name."""
    csv.field_size_limit(2**31 - 1)
    head = next(lines, "")
    delimiter = "\t" if ending_of(path) == ".tsv" else max(",;\t", key=head.count)
    reader = csv.reader(chain([head], lines), delimiter=delimiter, strict=True)
    try:
        names = [name.strip().lower() for name in next(reader, [])]
        for name, n in Counter(filter(None, names)).items():
            if n > 1:
                raise UserError(f"--input {path}: {n} columns are called {name}: rename or delete")
        for cells in reader:
            row = dict(zip_longest(names, cells, fillvalue=""))
            if any(cells[len(names) :]):
                row = ValueError("more cells than columns: quote what has a separator in it")
            yield reader.line_num, row
    except csv.Error as error:
        fix = "in a cell that begins with a quotation mark, each mark of the text is written twice"
        raise UserError(f"--input {path}:{reader.line_num}: {error}: {fix}") from None


# --- lines ---


def documents_of(path: Path, file: TextIO, notes: Counter[str]) -> Iterator[tuple[int, str]]:
    """Yield a text's documents with the numbers of their first lines (each LONGEST characters of a
    line count as one), cut at <|endoftext|> lines and at blank lines."""
    lines = enumerate(iter(lambda: file.readline(LONGEST), ""), 1)
    if ending_of(path) != ".txt":
        lines = without_marks(without_front(lines, notes), notes)
    document = ""
    start = 0  # number of the document's first line; 0: it has none yet
    for number, line in without_notices(lines, notes):
        bare = line.strip()
        ends = bare == "<|endoftext|>"
        if not ends:
            start = start or number
            document += line
        if ends or len(document) >= (LONGEST if bare else DOCUMENT):
            yield start, document
            document = ""
            start = 0
    yield start, document


def without_notices(
    lines: Iterable[tuple[int, str]], notes: Counter[str]
) -> Iterator[tuple[int, str]]:
    """Yield numbered lines, with an <|endoftext|> in place of Project Gutenberg's header and
    license. Lines of what may be one are held back until it ends."""
    held = []
    ending = None  # of the notice that we may be in
    for number, line in lines:
        bare = line.strip()
        begun = next((end for start, end in NOTICES.items() if re.match(start, bare)), None)
        # "End of Project Gutenberg's ..." and "*** END OF ..." may be neighbors.
        is_new = begun and any(text.strip() for _, text in held[1:])
        if not ending or is_new or len(held) > NOTICE:
            yield from held
            held = []
            ending = None
        ending = begun or ending
        held.append((number, line))
        if ending and re.match(ending, bare):
            notes[NO_NOTICES] += sum(len(text) for _, text in held)
            held = [(number, "<|endoftext|>")]
            ending = None
    yield from held


def without_front(
    lines: Iterable[tuple[int, str]], notes: Counter[str]
) -> Iterator[tuple[int, str]]:
    """Yield numbered lines of Markdown without front matter: fields between two rules, or headings
    above the first rule."""
    lines = iter(lines)
    held = list(islice(lines, FRONT + 1))
    texts = [line.strip() for _, line in held]
    rules = [at for at, text in enumerate(texts) if re.fullmatch(RULE, text)]
    end = 0
    if rules[:1] == [0]:
        if len(rules) > 1 and (rules[1] == 1 or re.match(FIELD, texts[1])):
            end = rules[1] + 1
    elif rules and all(re.match("#|$", text) for text in texts[: rules[0]]):
        end = rules[0] + 1
    notes[NO_MARKS] += sum(len(line) for _, line in held[:end])
    yield from chain(held[end:], lines)


def without_marks(
    lines: Iterable[tuple[int, str]], notes: Counter[str]
) -> Iterator[tuple[int, str]]:
    """Yield numbered lines of Markdown as plain text. Code between fences stays as it is."""
    fence = ""
    for number, line in lines:
        marker = re.match(r"\s*(```+(?!.*`)|~~~+)", line)
        if marker and marker[1].startswith(fence):
            fence = "" if fence else marker[1]
            plain = ""
        elif fence:
            plain = line
        else:
            plain = plain_line(line.removesuffix("\n")) + "\n" * line.endswith("\n")
        notes[NO_MARKS] += max(0, len(line) - len(plain))
        yield number, plain


def plain_line(line: str) -> str:
    if not ANY.search(line):
        return line
    line = LINK.sub(r"\1", IMAGE.sub("", line))
    line = MARKS.sub(lambda mark: mark["code"] or mark["kept"] or "", line)
    return ENTITY.sub(lambda entity: html.unescape(entity[0]), line)
