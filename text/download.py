"""Public data sets by name: where they are, and fetching them so that nothing half-done is ever
taken for whole.

    (path,) = fetch("shakespeare", "data/raw")    # data/raw/input.txt, downloaded once

A download grows in `<file>.part` and gets its name only when its size and checksum are right. What
breaks off, by the network or by Ctrl-C, is continued by the next try or the next run.
"""

import hashlib
import os
import shutil
from dataclasses import dataclass
from http.client import HTTPException, InvalidURL
from pathlib import Path
from ssl import SSLError
from time import sleep
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tqdm import tqdm

from common import UserError

TRIES = 5  # in a row without a new byte
TIMEOUT = 30  # seconds of silence
OTHERWISE = "use --input with files of your own, or --base_url with a mirror"
# What the network and servers fail with, which may pass; any other OSError is the disk's.
NETWORK = (URLError, ConnectionError, TimeoutError, SSLError, HTTPException)


@dataclass(frozen=True)
class File:
    url: str
    size: int  # bytes
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Dataset(File):
    licence: str
    about: str
    kind: str = "text"  # of documents (documents.py)
    more: tuple[File, ...] = ()  # that belong to it, of the same kind


# All addresses are pinned to a commit: the files of a branch are renamed and replaced (MiniMind's
# pretrain_hq.jsonl and sft_mini_512.jsonl are gone from it), and a checksum needs one that is not.
GITHUB = "https://raw.githubusercontent.com"
HUB = "https://huggingface.co/datasets"
CHAR_RNN = f"{GITHUB}/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e"
NOVELS = f"{GITHUB}/GITenberg"
TINYSTORIES = f"{HUB}/roneneldan/TinyStories/resolve/f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
MINIMIND = f"{HUB}/jingyaogong/minimind_dataset/resolve/312afb4f76391145c6902f765bb51691c09a12f5"
MINIMIND_LICENCE = "Apache-2.0 and CC-BY-NC-2.0, by source"

DATASETS: dict[str, Dataset] = {
    "shakespeare": Dataset(
        f"{CHAR_RNN}/data/tinyshakespeare/input.txt",
        1_115_394,
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        "public domain (the repository: MIT)",
        "scenes of Shakespeare, 1.1 MB of English",
    ),
    "novels": Dataset(
        f"{NOVELS}/War-and-Peace_2600/fa22ab90f00f627e83d14acabe32d91602d2365d/2600-0.txt",
        3_359_542,
        "6cbcc5ca5e590fb9ace161a5b93e4ecf280d7118104be0d63b686c004cfa70ae",
        "public domain",
        "War and Peace, Les Misérables, Moby-Dick and Don Quixote, 10 MB of English",
        more=(
            File(
                f"{NOVELS}/Les-Mis-rables_135/913d26c4e33bc23cc91d79104ad0e939b4cd91ea/135-0.txt",
                3_324_334,
                "a878fd45f6d14808624d71154c1c1c75f64cb71ca5537f79bed1454255329004",
            ),
            File(
                f"{NOVELS}/Moby-Dick--Or-The-Whale_2701/bdf1948e6cd00963730971e5624e764a35f238c3/"
                "2701-0.txt",
                1_276_201,
                "baf9b04fcf6e0008f30eaaa6697277751448c1070b20175e0082f28cbb161fd3",
            ),
            File(
                f"{NOVELS}/Don-Quixote_996/9d5a482d065513226b76275851de05ff41b7e2f4/996.txt",
                2_347_853,
                "69ef241e632ef4fba882bde06ad31ecb395d865b11028cc046c4d253f4cf118e",
            ),
        ),
    ),
    "tinystories": Dataset(
        f"{TINYSTORIES}/TinyStoriesV2-GPT4-train.txt",
        2_227_753_162,
        "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443",
        "CDLA-Sharing-1.0",
        "2.7 million short stories in simple English, separated by <|endoftext|> lines",
    ),
    "minimind-pretrain": Dataset(
        f"{MINIMIND}/pretrain_t2t_mini.jsonl",
        1_241_043_656,
        "6dd6716c84ab36897bdbfc7f88e04f4441c48c1ab7ecee88ce0b0e7d4685560c",
        MINIMIND_LICENCE,
        '1.3 million texts, mostly Chinese: {"text": ...}',
    ),
    "minimind-sft": Dataset(
        f"{MINIMIND}/sft_t2t_mini.jsonl",
        1_739_201_170,
        "abb1e76b2056e14728beb78db96b7b3c491a0bef1ed3e34a9b381b28f29fa518",
        MINIMIND_LICENCE,
        'conversations, mostly Chinese: {"conversations": ...}',
        "chat",
    ),
    "minimind-dpo": Dataset(
        f"{MINIMIND}/dpo.jsonl",
        53_653_322,
        "ee934a8a455ccc99d1334d63e1254dd1d64f497fd067cfcbb71e3043f5b46768",
        MINIMIND_LICENCE,
        'preferred and rejected answers: {"chosen": ..., "rejected": ...}',
        "preference",
    ),
}


def fetch(name: str, folder: str | Path, base_url: str | None = None) -> list[Path]:
    """The files of a data set (a key of DATASETS) in `folder`, downloaded unless they are there
    whole.

    Args:
        base_url: a mirror; a file is looked for at base_url + "/" + its name.

    Raises:
        UserError: no network, no room, or a file is not the published one.
    """
    dataset = DATASETS[name]
    return [fetch_file(file, Path(folder), base_url) for file in (dataset, *dataset.more)]


def fetch_file(file: File, folder: Path, base_url: str | None) -> Path:
    """One file of `fetch`."""
    url = file.url if base_url is None else f"{base_url.rstrip('/')}/{file.name}"
    path = folder / file.name
    part = path.with_name(path.name + ".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.is_file() and sha256(path) == file.sha256:
            return path
        missing = file.size - length(part)
        if missing > (free := shutil.disk_usage(folder).free):
            raise UserError(f"no room for {path}: {missing:,} bytes to come, {free:,} are free")
        for _ in range(2):
            download(url, file.size, part)
            if (got := sha256(part)) == file.sha256:
                os.replace(part, path)
                return path
            part.unlink()  # it may have begun as something else: once more, from nothing
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    raise UserError(
        f"{url} is not the published {file.name}: "
        f"expected sha256 {file.sha256}, got {got}: {OTHERWISE}"
    )


def download(url: str, size: int, part: Path) -> None:
    """Bring `part` to its full size, with as many requests as that takes."""
    failures, furthest = 0, length(part)
    while (start := length(part)) < size:
        headers = {"User-Agent": "token-tables", "Range": f"bytes={start}-"}
        try:
            with urlopen(Request(url, headers=headers), timeout=TIMEOUT) as response:
                start = start if response.status == 206 else 0  # else it comes from its beginning
                options = dict(total=size, initial=start, desc=part.stem, unit="B", unit_scale=True)
                with (
                    open(part, "ab" if start else "wb") as file,
                    tqdm.wrapattr(file, "write", **options) as writer,
                ):
                    shutil.copyfileobj(response, writer)
            if (got := length(part)) < size:
                raise ConnectionError(f"broke off after {got:,} of {size:,} bytes")
        except (*NETWORK, ValueError) as error:
            # Progress is new ground only: a server that begins anew each time makes none.
            failures = 1 if length(part) > furthest else failures + 1
            furthest = max(furthest, length(part))
            if isinstance(error, HTTPError):
                passing = error.code in (408, 429) or error.code >= 500
            else:
                passing = not isinstance(error, (ValueError, InvalidURL))
            if not passing or failures == TRIES:
                raise UserError(
                    f"cannot fetch {url}: {error or type(error).__name__}: check the network and "
                    f"run again (what came is kept), or {OTHERWISE}"
                ) from error
            sleep(2 ** (failures - 1))


def length(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()
