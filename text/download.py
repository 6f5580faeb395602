"""Public data sets by name, and downloading them.

    (path,) = fetch("shakespeare", "data/raw")    # data/raw/input.txt, downloaded once

`datasets.csv` lists their files. Its addresses are pinned to a commit: the files of a branch are
renamed and replaced (MiniMind's pretrain_hq.jsonl and sft_mini_512.jsonl are gone from it), and a
checksum needs one that is not. `moby-dick.jsonl` needs no network: the whole novel, Project
Gutenberg's number 2701, in 347 documents cut between paragraphs.

A download grows in `<file>.part` and gets its name when its size and checksum are right. If it
breaks off, by the network or by Ctrl-C, the next run goes on where it stopped.
"""

import csv
import hashlib
import os
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
from tqdm import tqdm

from common import UserError

HERE = Path(__file__).parent
MOBY_DICK = HERE / "moby-dick.jsonl"
TIMEOUT = 30  # seconds of silence
PIECE = 1 << 16  # bytes to read at a time


@dataclass(frozen=True)
class File:
    """A row of the table. Of a data set of several files each row says kind, about, and license."""

    name: str  # of the data set
    kind: str  # of its documents (documents.py)
    about: str
    license: str
    size: int  # bytes
    sha256: str
    url: str  # without "://" a file in this folder


def read_table() -> dict[str, list[File]]:
    """The files of each data set, by its name."""
    datasets = {}
    with open(HERE / "datasets.csv", encoding="utf-8", newline="") as table:
        for row in csv.DictReader(table):
            row["size"] = int(row["size"])
            datasets.setdefault(row["name"], []).append(File(**row))
    return datasets


DATASETS = read_table()


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
        if path.exists():
            if path.stat().st_size == file.size and sha256(path) == file.sha256:
                return path
            raise UserError(f"{path} is not the published file: rename it, or delete it")
        download(file, part)
        digest = sha256(part)
        if digest != file.sha256:
            part.unlink()  # so that the next run begins anew
            raise ValueError(f"its sha256 is {digest}, the published {file.sha256}")
        os.replace(part, path)
    except (OSError, HTTPException, ValueError) as error:
        raise UserError(
            f"cannot download {file.url} to {path} ({error or type(error).__name__}): "
            "run it again to go on, or put the file there yourself"
        ) from error
    return path


def download(file: File, part: Path) -> None:
    """Append to `part` what it lacks of the file. OSError, HTTPException: this failed."""
    part.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "ab") as output:
        size = output.tell()
        if size >= file.size:
            return
        headers = {"User-Agent": "token-tables", "Range": f"bytes={size}-"}
        with urlopen(Request(file.url, headers=headers), timeout=TIMEOUT) as response:
            if response.status == 200:  # all of the file, as from a proxy that knows no ranges
                output.truncate(0)
                size = 0
            with tqdm.wrapattr(
                output, "write", total=file.size, initial=size, desc=part.stem, disable=None
            ) as counted:
                for _ in range(size, file.size, PIECE):  # a server may go on without end
                    counted.write(response.read(PIECE))
    size = part.stat().st_size
    if size < file.size:
        raise ConnectionError(f"broke off after {size:,} of {file.size:,} bytes")


def sha256(path: Path) -> str:
    return hashlib.sha256(np.memmap(path, mode="r")).hexdigest()
