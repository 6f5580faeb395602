"""Which documents are for training and which for validation: their hashes decide.

So adding files to a large input moves no document. A small one is cut and topped up, to have enough
to validate with; whole files can be held out.
"""

import json
import os
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path

from common import UserError
from text.documents import Document

MANY = 4096  # documents whose hashes are compared, or fewer
MOST = 64 << 20  # characters: all of these documents are in memory
LEAST_VAL = 8000  # characters to validate with, or a twentieth of what there is
HELD_OUT = "held_out"  # the folder of files that are held out
# Notes. Each is printed after the number of documents that it is about.
COPIES = "copies of documents of val.bin are trained on"
HELD_COPIES = f"copies of documents of {HELD_OUT}/val.bin are trained on: leave out their files"
CUT = "long documents were cut, at line breaks or blanks if they have some, to validate with pieces"


# --- hashes ---


def as_one_text(document: Document) -> str:
    """A text that tells documents apart."""
    return document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)


def hashed(document: Document) -> int:
    """A hash of 64 bits, the same in all versions and on all machines."""
    # Documents are UTF-8, but not all names of files.
    text = as_one_text(document).encode(errors="surrogateescape")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


def is_validation(digest: int, fraction: float) -> bool:
    """Whether the document with this hash is for validation, whatever the others are."""
    return digest < fraction * 2**64


# --- files that are held out ---


def held_out(paths: list[Path], share: float) -> tuple[list[Path], list[Path]]:
    """The files of the lowest hashes of names, this share, but at least one, and not all; and the
    other files. Files of one name in several folders are told apart by their paths."""
    if len(paths) < 2:
        raise UserError("--hold_out_files needs two files or more, as it leaves one for training")

    times = Counter(path.name for path in paths)
    same = [path.absolute() for path in paths if times[path.name] > 1]
    top = os.path.commonpath(same) if same else ""

    def digest(path: Path) -> int:
        name = path.name
        if times[name] > 1:
            name = path.absolute().relative_to(top).as_posix()
        return hashed(unicodedata.normalize("NFC", name))

    n = sum(is_validation(digest(path), share) for path in paths)
    chosen = {*sorted(paths, key=digest)[: min(max(n, 1), len(paths) - 1)]}
    books = [path for path in paths if path in chosen]
    return books, [path for path in paths if path not in chosen]


def all_for_validation(
    documents: Iterable[Document], held: set[int]
) -> Iterator[tuple[str, Document]]:
    """Yield documents for validation, the first one for training, too: a folder needs both. Their
    hashes go to `held`."""
    for number, document in enumerate(documents):
        held.add(hashed(document))
        if number == 0:
            yield "train", document
        yield "val", document


# --- documents of the other files ---


def labelled(
    documents: Iterable[Document],
    fraction: float,
    notes: Counter[str],
    held: Collection[int] = (),
) -> Iterator[tuple[str, Document]]:
    """Yield each document with its split, `train` or `val`, which its hash decides.

    A copy of a document that is for validation goes to training: whoever repeats something wants it
    to be learned. Copies of documents of the files that are held out, whose hashes are `held`, are
    split like all others. `notes` count the copies of both kinds that are trained on.

    The first documents come in one go, so that a small input has enough to validate with, too: a
    long document among them is cut, and if too few have low hashes, others are taken."""
    documents = iter(documents)
    first, total = [], 0
    for document in islice(documents, MANY):
        first.append(document)
        total += len(as_one_text(document))
        if total >= MOST:
            break
    least = min(LEAST_VAL, max(1, total // 20))
    pieces = []
    for document in first:
        parts = cut(document, total // 5, least)
        pieces += parts
        if len(parts) > 1:
            notes[CUT] += 1
            notes[HELD_COPIES] += hashed(document) in held  # its pieces have other hashes
    chosen = chosen_for_validation(pieces, least, fraction)
    seen = {hashed(pieces[number]) for number in chosen}
    for number, document in enumerate(chain(pieces, documents)):
        digest = hashed(document)
        is_val = number in chosen
        if number >= len(pieces) and digest not in seen:
            is_val = is_validation(digest, fraction)
        if is_val:
            seen.add(digest)
        else:
            for note, known in ((COPIES, seen), (HELD_COPIES, held)):
                if digest in known:
                    notes[note] += 1
        yield "val" if is_val else "train", document


def chosen_for_validation(documents: list[Document], least: int, fraction: float) -> set[int]:
    """The numbers of the documents that are for validation: those with low hashes and, if these
    have less than `least` characters, those with the next lowest. Copies come last. At least one
    document is left for training."""
    copies: Counter[int] = Counter()
    order = []
    for number, document in enumerate(documents):
        digest = hashed(document)
        order.append((copies[digest], digest, number))
        copies[digest] += 1
    chosen = set()
    for copy, digest, number in sorted(order)[:-1]:
        if least > 0 or (not copy and is_validation(digest, fraction)):
            chosen.add(number)
            least -= len(as_one_text(documents[number]))
    return chosen


def cut(document: Document, longest: int, size: int) -> list[Document]:
    """Cut a text that is longer than `longest` into pieces of at most `size` characters, each after
    its last line break or, without one, its last blank; where there is neither, as in Chinese,
    anywhere. Together, they are the whole text."""
    if not isinstance(document, str) or len(document) <= longest:
        return [document]
    pieces = []
    start = 0
    while len(document) - start > size:
        last = start + size
        end = document.rfind("\n", start, last) + 1 or document.rfind(" ", start, last) + 1 or last
        pieces.append(document[start:end])
        start = end
    return [*pieces, document[start:]]
