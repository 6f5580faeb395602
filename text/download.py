"""Public data sets by name, and downloading them.

    (path,) = fetch("shakespeare", "data/raw")    # data/raw/input.txt, downloaded once

`datasets.csv` lists their files. Its addresses are pinned to a commit: the files of a branch are
renamed and replaced (MiniMind's pretrain_hq.jsonl and sft_mini_512.jsonl are gone from it), and a
checksum needs one that is not. `moby-dick.jsonl` needs no network: the whole novel, Project
Gutenberg's number 2701, in 347 documents cut between paragraphs.

A download grows in `<file>.part` and gets its name when its checksum is right.
"""

import csv
import hashlib
import os
import shutil
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.request import Request, urlopen

from tqdm import tqdm

from common import UserError

HERE = Path(__file__).parent
MOBY_DICK = HERE / "moby-dick.jsonl"
TIMEOUT = 30  # seconds of silence


@dataclass(frozen=True)
class File:
    """A row of the table. Of a data set of several files each row says kind, about and licence."""

    name: str  # of the data set
    kind: str  # of its documents (documents.py)
    about: str
    licence: str
    size: int  # bytes
    sha256: str
    url: str  # without "://" a file in this folder


DATASETS: dict[str, list[File]] = {}
with open(HERE / "datasets.csv", encoding="utf-8", newline="") as table:
    for row in csv.DictReader(table):
        DATASETS.setdefault(row["name"], []).append(File(**row | dict(size=int(row["size"]))))


def fetch(name: str, folder: str | Path) -> list[Path]:
    """The files of a data set (a key of DATASETS) in `folder`, downloaded unless they are there.
    UserError: that failed, or a file is not the published one."""
    return [fetch_file(file, Path(folder)) for file in DATASETS[name]]


def fetch_file(file: File, folder: Path) -> Path:
    if "://" not in file.url:
        return HERE / file.url
    path = folder / file.url.rpartition("/")[2]
    part = path.with_name(f"{path.name}.part")
    try:
        if path.exists() and sha256(path) == file.sha256:
            return path
        folder.mkdir(parents=True, exist_ok=True)
        options = dict(desc=path.name, total=file.size, unit="B", unit_scale=True, disable=None)
        request = Request(file.url, headers={"User-Agent": "token-tables"})
        with (
            open(part, "wb") as output,
            urlopen(request, timeout=TIMEOUT) as response,
            tqdm.wrapattr(response, "read", **options) as reader,
        ):
            shutil.copyfileobj(reader, output)
        if (digest := sha256(part)) != file.sha256:
            raise ValueError(f"its sha256 is {digest}, the published {file.sha256}")
        os.replace(part, path)
    except (OSError, HTTPException, ValueError) as error:
        failed = f"cannot download {file.url} to {path} ({error or type(error).__name__})"
        raise UserError(f"{failed}: run it again, or put the file there yourself") from error
    return path


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()
