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


def datasets() -> dict[str, list[File]]:
    """The files of each data set."""
    files = {}
    with open(HERE / "datasets.csv", encoding="utf-8", newline="") as table:
        for row in csv.DictReader(table):
            files.setdefault(row["name"], []).append(File(**row | dict(size=int(row["size"]))))
    return files


DATASETS = datasets()


def fetch(name: str, folder: str | Path, base_url: str | None = None) -> list[Path]:
    """The files of a data set (a key of DATASETS) in `folder`, downloaded unless they are there;
    from a mirror they come as base_url + "/" + name. UserError: that failed, or a file is not the
    published one."""
    return [fetch_file(file, Path(folder), base_url) for file in DATASETS[name]]


def fetch_file(file: File, folder: Path, base_url: str | None) -> Path:
    """One file of `fetch`."""
    if "://" not in file.url:
        return HERE / file.url
    name = file.url.rpartition("/")[2]
    url = f"{base_url.rstrip('/')}/{name}" if base_url else file.url
    path, part = folder / name, folder / f"{name}.part"
    try:
        if path.exists() and sha256(path) == file.sha256:
            return path
        if not part.exists() or part.stat().st_size < file.size:
            download(url, file.size, part)
        if (digest := sha256(part)) != file.sha256:
            part.unlink()  # so that the next run begins anew
            raise ValueError(f"its sha256 is {digest}, the published {file.sha256}")
        os.replace(part, path)
    except (OSError, HTTPException, ValueError) as error:
        raise UserError(
            f"cannot download {url} to {path} ({error or type(error).__name__}): "
            "--base_url can name a mirror; run it again to go on"
        ) from error
    return path


def download(url: str, size: int, part: Path) -> None:
    """Bring `part` to its full size, from where it ends. OSError, HTTPException, ValueError: this
    failed; what has arrived stays in `part`."""
    start = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": "token-tables", "Range": f"bytes={start}-"}
    with urlopen(Request(url, headers=headers), timeout=TIMEOUT) as response:
        if response.status != 206:
            start = 0  # this server knows no ranges and sends the file from its beginning
        if response.length is not None and start + response.length != size:
            raise ValueError(f"it has {start + response.length:,} bytes, the published {size:,}")
        part.parent.mkdir(parents=True, exist_ok=True)
        progress = dict(total=size, initial=start, desc=part.stem, unit="B", unit_scale=True)
        with (
            open(part, "ab" if start else "wb") as file,
            tqdm.wrapattr(file, "write", **progress, disable=None) as writer,
        ):
            shutil.copyfileobj(response, writer)
    if (got := part.stat().st_size) < size:
        raise ConnectionError(f"broke off after {got:,} of {size:,} bytes")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()
