"""Public data sets by name: where they are, and fetching them so that nothing half-done is ever
taken for whole.

    path = fetch("shakespeare", "data/raw")    # data/raw/input.txt, downloaded once

A download grows in `<file>.part` and gets its name only when its size and checksum are right. What
breaks off, by the network or by Ctrl-C, is continued by the next try or the next run. `<file>.note`
remembers which version of the file a part belongs to (the server's ETag or date) and, for a file
without a published checksum, the checksum of what came down.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from email.message import Message
from http.client import HTTPException, HTTPResponse, InvalidURL
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tqdm import tqdm

from common import UserError, atomic

TRIES = 5  # in a row without a new byte
TIMEOUT = 30  # seconds of silence
CHUNK = 1 << 18  # bytes
OTHERWISE = "use --input with files of your own, or --base_url with a mirror"


@dataclass(frozen=True)
class Dataset:
    base: str  # URL of the folder
    file: str
    size: int | None  # bytes; None: not published
    sha256: str | None
    licence: str
    about: str
    kind: str = "text"  # of documents (documents.py)

    @property
    def url(self) -> str:
        return f"{self.base.rstrip('/')}/{self.file}"


# All addresses are pinned to a commit: the files of a branch are renamed and replaced (MiniMind's
# pretrain_hq.jsonl and sft_mini_512.jsonl are gone from it), and a checksum needs one that is not.
GITHUB = "https://raw.githubusercontent.com"
HUB = "https://huggingface.co/datasets"
CHAR_RNN = f"{GITHUB}/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e"
TINYSTORIES = f"{HUB}/roneneldan/TinyStories/resolve/f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
MINIMIND = f"{HUB}/jingyaogong/minimind_dataset/resolve/312afb4f76391145c6902f765bb51691c09a12f5"
MINIMIND_LICENCE = "Apache-2.0 and CC-BY-NC-2.0, by source"

DATASETS: dict[str, Dataset] = {
    "shakespeare": Dataset(
        f"{CHAR_RNN}/data/tinyshakespeare",
        "input.txt",
        1_115_394,
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        "public domain (the repository: MIT)",
        "scenes of Shakespeare, 1.1 MB of English",
    ),
    "tinystories": Dataset(
        TINYSTORIES,
        "TinyStoriesV2-GPT4-train.txt",
        2_227_753_162,
        "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443",
        "CDLA-Sharing-1.0",
        "2.7 million short stories in simple English, separated by <|endoftext|> lines",
    ),
    "minimind-pretrain": Dataset(
        MINIMIND,
        "pretrain_t2t_mini.jsonl",
        1_241_043_656,
        "6dd6716c84ab36897bdbfc7f88e04f4441c48c1ab7ecee88ce0b0e7d4685560c",
        MINIMIND_LICENCE,
        '1.3 million texts, mostly Chinese: {"text": ...}',
    ),
    "minimind-sft": Dataset(
        MINIMIND,
        "sft_t2t_mini.jsonl",
        1_739_201_170,
        "abb1e76b2056e14728beb78db96b7b3c491a0bef1ed3e34a9b381b28f29fa518",
        MINIMIND_LICENCE,
        'conversations, mostly Chinese: {"conversations": ...}',
        "chat",
    ),
    "minimind-dpo": Dataset(
        MINIMIND,
        "dpo.jsonl",
        53_653_322,
        "ee934a8a455ccc99d1334d63e1254dd1d64f497fd067cfcbb71e3043f5b46768",
        MINIMIND_LICENCE,
        'preferred and rejected answers: {"chosen": ..., "rejected": ...}',
        "preference",
    ),
}


class Broken(Exception):
    """The network or the server failed in a way that may pass."""


def fetch(
    name: str,
    folder: str | Path,
    base_url: str | None = None,
    progress: bool = True,
    sleep: Callable[[float], object] = time.sleep,
) -> Path:
    """The file of a data set in `folder`, downloaded unless it is there whole.

    Args:
        base_url: a mirror; the file is looked for at base_url + "/" + file name.
        sleep: waits between tries.

    Raises:
        UserError: no such data set, no network, no room, or the file is not the published one.
    """
    if name not in DATASETS:
        raise UserError(f"no data set {name!r}: choose one of {', '.join(DATASETS)}")
    dataset = DATASETS[name]
    if base_url is not None:
        dataset = replace(dataset, base=base_url)
    if not dataset.url.startswith(("http://", "https://")):
        raise UserError(f"--base_url {base_url}: must begin with http:// or https://")
    path = Path(folder) / dataset.file
    part, note = (path.with_name(path.name + end) for end in (".part", ".note"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = dataset.sha256 or read_note(note).get("sha256")
        if known and path.is_file() and sha256(path) == known:
            return path
        missing = (dataset.size or 0) - length(part)
        if missing > (free := shutil.disk_usage(path.parent).free):
            raise UserError(f"no room for {path}: {missing:,} bytes to come, {free:,} are free")
        for _ in range(2):
            download(dataset, part, note, progress, sleep)
            got = sha256(part)
            if got == (dataset.sha256 or got):
                break
            part.unlink()  # it may have begun as another version: once more, from nothing
        else:
            raise UserError(
                f"{dataset.url} is not the published {dataset.file}: "
                f"expected sha256 {dataset.sha256}, got {got}: {OTHERWISE}"
            )
        os.replace(part, path)
        # Last: until the note says so, a file without a published checksum does not count as whole.
        if dataset.sha256:
            note.unlink(missing_ok=True)
        else:
            write_note(note, sha256=got)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def download(dataset: Dataset, part: Path, note: Path, progress: bool, sleep: Callable) -> None:
    """Bring `part` to its full length, with as many requests as that takes."""
    failures, furthest = 0, length(part)
    shown = {"desc": dataset.file, "initial": furthest, "disable": not progress}
    with tqdm(**shown, unit="B", unit_scale=True) as bar:
        while True:
            try:
                return request(dataset, part, note, bar)
            except Broken as error:
                # Progress is new ground only: a server that begins anew each time makes none.
                failures = 1 if length(part) > furthest else failures + 1
                furthest = max(furthest, length(part))
                if failures == TRIES:
                    raise UserError(
                        f"cannot fetch {dataset.url}: {error}: check the network and run again "
                        f"(what came is kept), or {OTHERWISE}"
                    ) from error
            sleep(2 ** (failures - 1))


def request(dataset: Dataset, part: Path, note: Path, bar: tqdm) -> None:
    """One request, for what is missing. Returns when `part` has its full length."""
    url, start = dataset.url, length(part)
    if start and start == dataset.size:
        return  # stopped between the last byte and the renaming
    headers = {"User-Agent": "token-tables"}
    known = read_note(note).get("version")
    if start and (known or dataset.sha256):  # else two versions could be mixed unnoticed
        headers["Range"] = f"bytes={start}-"
        if known:
            headers["If-Range"] = known  # of another version the server sends everything
    try:
        response = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        reason = f"HTTP {error.code} {error.reason}"
        if error.code == 416:  # nothing from `start` on: the part is whole, or of something else
            if error.headers.get("Content-Range") == f"bytes */{start}":
                return
            part.unlink(missing_ok=True)
        elif error.code not in (408, 429) and error.code < 500:
            raise UserError(f"cannot fetch {url}: {reason}: {OTHERWISE}") from None
        raise Broken(reason) from None
    except (InvalidURL, ValueError) as error:
        raise UserError(f"--base_url: cannot use {url}: {error}") from None
    except (OSError, HTTPException) as error:
        raise Broken(str(getattr(error, "reason", error)) or type(error).__name__) from error

    with response:
        offered = version(response.headers)
        if response.status == 206:
            span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers["Content-Range"] or "")
            if not span or int(span[1]) != start or (known and offered not in (None, known)):
                part.unlink(missing_ok=True)  # so that the next request asks for everything
                raise Broken(f"asked for the bytes from {start:,} on, got others")
            promised = int(span[2])
        elif response.status == 200:
            start, promised = 0, response.length
        else:
            raise Broken(f"HTTP {response.status}")
        size = dataset.size if promised is None else promised
        if size is None:  # the end of the file and a broken connection would look the same
            raise UserError(f"{url}: the server does not say how long it is: {OTHERWISE}")
        if dataset.size not in (None, size):
            raise UserError(f"{url}: expected {dataset.size:,} bytes, it has {size:,}: {OTHERWISE}")
        if response.status == 200:  # in this order, so that the note never vouches for older bytes
            part.unlink(missing_ok=True)
            write_note(note, version=offered)
        bar.total, bar.n = size, start
        with open(part, "ab") as file:
            position = start
            while position < size and (data := receive(response, size - position)):
                file.write(data)
                position += len(data)
                bar.update(len(data))
        if position < size:
            raise Broken(f"broke off after {position:,} of {size:,} bytes")
        if promised is None and receive(response, 1):
            raise UserError(f"{url}: expected {size:,} bytes, it has more: {OTHERWISE}")


def receive(response: HTTPResponse, most: int) -> bytes:
    """What has arrived, b"" at the end. Only here a failure is the network's, not the disk's."""
    try:
        return response.read1(min(most, CHUNK))
    except (OSError, HTTPException) as error:
        raise Broken(str(error) or type(error).__name__) from error


def version(headers: Message) -> str | None:
    """What names a file's version. A weak ETag, W/..., may stand for different bytes."""
    etag = headers["ETag"]
    return etag if etag and not etag.startswith("W/") else headers["Last-Modified"]


def length(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def read_note(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing or damaged: nothing is known
        return {}
    return content if isinstance(content, dict) else {}


def write_note(path: Path, **content: str | None) -> None:
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
