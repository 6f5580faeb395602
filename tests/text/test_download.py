"""download.py against a server that misbehaves on cue, and everything that can go wrong on disk."""

import contextlib
import errno
import hashlib
import http.server
import random
import re
import socket
import threading
from dataclasses import replace

import pytest

from common import UserError
from text import download
from text.download import DATASETS, Dataset, File, fetch

CONTENT = random.Random(0).randbytes(300_000)
OTHER = random.Random(1).randbytes(300_000)
HALF = 150_000


class Server(http.server.ThreadingHTTPServer):
    """Serves `content`. Each request takes the next `script` entry, a function of the handler, or
    is answered as it should be."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/files"
        self.content, self.script = CONTENT, []
        self.requests, self.sent = [], []  # paths and headers; spans of content
        self.closing = threading.Event()


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.server.requests.append((self.path, dict(self.headers)))
        with contextlib.suppress(ConnectionError):
            (self.server.script.pop(0) if self.server.script else fine)(self)

    def start(self) -> int | None:
        """Where the client wants to begin; None: no range."""
        span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        return int(span[1]) if span else None

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        headers = {"Content_Length": len(body), **headers}
        for key, value in headers.items():
            if value is not None:
                self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)


def fine(handler, stop=None, **headers):
    """The file or the range of it that was asked for; with `stop` it breaks off there."""
    content, start = handler.server.content, handler.start()
    size = len(content)
    if start is not None and start >= size:
        return handler.answer(416, Content_Range=f"bytes */{size}")
    if start is not None:
        headers = {"Content_Range": f"bytes {start}-{size - 1}/{size}", **headers}
    begin = start or 0
    body = content[begin:stop]
    handler.server.sent.append((begin, begin + len(body)))
    headers = {"Content_Length": size - begin, **headers}
    handler.answer(200 if start is None else 206, body, **headers)


def breaks(stop):
    return lambda handler: fine(handler, stop)


def whole(handler):
    """As a server that does not know ranges."""
    del handler.headers["Range"]
    fine(handler)


def status(code, **headers):
    return lambda handler: handler.answer(code, **headers)


def silent(handler):
    handler.server.closing.wait(10)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def get(server, tmp_path, monkeypatch):
    """fetch() of a data set that the server has."""
    digest = hashlib.sha256(CONTENT).hexdigest()
    entry = Dataset(f"{server.url}/data.bin", len(CONTENT), digest, "none", "noise")
    monkeypatch.setitem(DATASETS, "noise", entry)

    def get(**options):
        get.waits = []
        monkeypatch.setattr(download, "sleep", get.waits.append)
        (path,) = fetch("noise", tmp_path / "raw", **options)
        return path

    get.folder = tmp_path / "raw"
    get.part = get.folder / "data.bin.part"
    return get


def spans_are_disjoint(server):
    assert server.sent[0][0] == 0 and server.sent[-1][1] == len(CONTENT)
    assert all(a[1] == b[0] for a, b in zip(server.sent, server.sent[1:], strict=False))


def test_a_file_lands_whole_and_is_fetched_once(server, get, capsys):
    path = get()
    assert path == get.folder / "data.bin"
    assert path.read_bytes() == CONTENT
    assert "data.bin" in capsys.readouterr().err  # the bar
    assert get.waits == []
    assert list(get.folder.iterdir()) == [path]
    assert get() == path
    assert [path for path, _ in server.requests] == ["/files/data.bin"]


def test_what_breaks_off_is_continued_and_no_byte_comes_twice(server, get):
    server.script = [breaks(HALF), breaks(200_000)]
    assert get().read_bytes() == CONTENT
    spans_are_disjoint(server)
    assert server.requests[1][1]["Range"] == f"bytes={HALF}-"
    assert get.waits == [1, 1]  # there was progress in between


def test_a_run_that_gave_up_is_continued_by_the_next(server, get):
    server.script = [breaks(HALF)] + [status(503)] * (download.TRIES - 1)
    with pytest.raises(UserError, match="HTTP Error 503"):
        get()
    assert get.part.read_bytes() == CONTENT[:HALF]
    assert not (get.folder / "data.bin").exists()
    assert get().read_bytes() == CONTENT
    spans_are_disjoint(server)


def test_interrupting_leaves_the_part_for_the_next_run(server, get, monkeypatch):
    class Interrupted(download.tqdm):
        def update(self, n=1):
            super().update(n)
            if self.n > 100_000:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(download, "tqdm", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            get()
    kept = get.part.read_bytes()
    assert 100_000 < len(kept) < 200_000 and kept == CONTENT[: len(kept)]
    assert get().read_bytes() == CONTENT
    assert server.requests[1][1]["Range"] == f"bytes={len(kept)}-"


def test_a_whole_part_needs_no_request(server, get):
    get.folder.mkdir()
    get.part.write_bytes(CONTENT)
    assert get().read_bytes() == CONTENT
    assert server.requests == []


@pytest.mark.parametrize("part", [CONTENT + b"more", OTHER, OTHER[:HALF]])
def test_a_damaged_part_is_begun_anew(server, get, part):
    get.folder.mkdir()
    get.part.write_bytes(part)
    assert get().read_bytes() == CONTENT
    assert server.requests[-1][1]["Range"] == "bytes=0-"
    assert get.waits == []


def test_servers_without_ranges(server, get):
    server.script = [breaks(HALF), whole]
    assert get().read_bytes() == CONTENT


def test_a_server_that_always_begins_anew_is_given_up(server, get):
    def half(handler):
        del handler.headers["Range"]
        fine(handler, HALF)

    server.script = [half] * 20
    with pytest.raises(UserError, match="broke off after 150,000 of 300,000"):
        get()
    assert len(server.requests) == download.TRIES


def test_a_range_nobody_asked_for_is_noticed_by_the_checksum(server, get):
    server.script = [breaks(HALF), lambda handler: handler.answer(206, CONTENT)]
    assert get().read_bytes() == CONTENT
    assert [headers["Range"] for _, headers in server.requests] == [
        *("bytes=0-", f"bytes={HALF}-", "bytes=0-")
    ]


def test_a_file_that_changed_between_tries_is_begun_anew(server, get):
    def changed(handler):
        server.content = CONTENT
        fine(handler)

    server.content = OTHER
    server.script = [breaks(HALF), changed]
    assert get().read_bytes() == CONTENT
    asked = [headers["Range"] for _, headers in server.requests]
    assert asked == ["bytes=0-", f"bytes={HALF}-", "bytes=0-"]


def test_lengths_that_are_not_the_published_one(server, get):
    server.content = CONTENT + b"x"
    with pytest.raises(UserError, match="is not the published"):
        get()
    server.content = CONTENT[:-1]
    with pytest.raises(UserError, match="HTTP Error 416"):  # nothing comes after its end
        get()
    assert not (get.folder / "data.bin").exists()


def test_bodies_shorter_and_longer_than_promised(server, get):
    def long(handler):
        server.content = CONTENT + b"more"
        fine(handler, Content_Length=len(CONTENT))
        server.content = CONTENT

    server.script = [breaks(len(CONTENT) - 1)]
    assert get().read_bytes() == CONTENT
    assert len(server.requests) == 2
    (get.folder / "data.bin").unlink()
    server.script = [long]
    assert get().read_bytes() == CONTENT


def test_servers_that_promise_no_length(server, get):
    def unsaid(handler):
        fine(handler, Content_Length=None)

    server.script = [unsaid]
    assert get().read_bytes() == CONTENT
    (get.folder / "data.bin").unlink()
    server.script = [lambda handler: fine(handler, HALF, Content_Length=None)]
    assert get().read_bytes() == CONTENT
    assert server.requests[-1][1]["Range"] == f"bytes={HALF}-"


def test_wrong_bytes_are_fetched_once_more(server, get):
    def wrong(handler):
        server.content = OTHER
        fine(handler)
        server.content = CONTENT

    server.script = [wrong]
    assert get().read_bytes() == CONTENT
    assert [headers["Range"] for _, headers in server.requests] == ["bytes=0-"] * 2


def test_wrong_bytes_twice_are_an_error(server, get):
    server.content = OTHER
    with pytest.raises(UserError) as error:
        get()
    for part in ("data.bin", hashlib.sha256(CONTENT), hashlib.sha256(OTHER)):
        assert (part if isinstance(part, str) else part.hexdigest()) in str(error.value)
    assert len(server.requests) == 2
    assert not get.part.exists() and not (get.folder / "data.bin").exists()


def test_passing_failures_are_waited_for(server, get):
    server.script = [status(503), status(429), status(500)]
    assert get().read_bytes() == CONTENT
    assert get.waits == [1, 2, 4]


def test_lasting_failures_are_not(server, get):
    for code in (403, 404):
        server.script = [status(code)]
        with pytest.raises(UserError, match=rf"data\.bin: HTTP Error {code}: .*--base_url"):
            get()
        assert get.waits == []


def test_silence_is_a_failure_that_may_pass(server, get, monkeypatch):
    def falls_silent(handler):
        fine(handler, HALF)
        silent(handler)

    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    monkeypatch.setattr(download, "TRIES", 2)
    server.script = [silent, falls_silent, silent]
    with pytest.raises(UserError, match="timed out"):
        get()
    assert get().read_bytes() == CONTENT


@pytest.mark.parametrize("damage", [CONTENT[:-1], OTHER, b""])
def test_damaged_files_are_fetched_again(server, get, damage):
    path = get()
    path.write_bytes(damage)
    assert get().read_bytes() == CONTENT
    assert len(server.requests) == 2


def test_without_a_server_the_error_says_what_to_do(get):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        with pytest.raises(UserError) as error:
            get(base_url=f"http://127.0.0.1:{unused.getsockname()[1]}")
    message = str(error.value)
    assert "refused" in message and "\n" not in message
    assert "--input" in message and "--base_url" in message
    assert get.waits == [1, 2, 4, 8]


def test_base_url_is_where_the_file_is_looked_for(server, get):
    get(base_url=server.url.replace("files", "mirror/")).unlink()
    assert server.requests[0][0] == "/mirror/data.bin"
    for wrong in ("mirror.example", "", "http://a b", "http://x:y"):
        with pytest.raises(UserError, match=rf"^cannot fetch {wrong}/data.bin: .*--base_url"):
            get(base_url=wrong)
        assert get.waits == []


def test_a_data_set_of_several_files(server, get, monkeypatch):
    one = DATASETS["noise"]
    other = File(f"{server.url}/other.bin", HALF, hashlib.sha256(OTHER[:HALF]).hexdigest())
    monkeypatch.setitem(DATASETS, "noise", replace(one, more=(other,)))

    def second(handler):
        server.content = OTHER[:HALF]
        fine(handler)

    server.script = [fine, second]
    paths = fetch("noise", get.folder)
    assert [path.name for path in paths] == ["data.bin", "other.bin"]
    assert [path.read_bytes() for path in paths] == [CONTENT, OTHER[:HALF]]
    assert fetch("noise", get.folder) == paths and len(server.requests) == 2


def test_no_room_is_found_out_first(server, get, monkeypatch):
    class Usage:
        free = 100_000

    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(UserError, match=r"no room for .*data\.bin: 300,000 bytes .* 100,000"):
        get()
    assert server.requests == []
    get.part.write_bytes(CONTENT[:250_000])  # then it is enough
    assert get().read_bytes() == CONTENT


def test_disks_that_fail(server, get, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(download, "open", full, raising=False)
        with pytest.raises(UserError, match=r"cannot write .*data\.bin: No space left"):
            get()
    assert len(server.requests) == 1  # no use trying again
    get.folder.rename(get.folder.with_name("other"))
    get.folder.write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write .*data\.bin"):
        get()


def test_the_list_is_well_formed():
    for name, dataset in DATASETS.items():
        for file in (dataset, *dataset.more):
            assert re.fullmatch(r"https://[^ ]+/[0-9a-f]{40}(/[^ ]+)?/[^/ ]+", file.url), name
            assert file.size > 0 and re.fullmatch("[0-9a-f]{64}", file.sha256), name
        assert dataset.licence and dataset.about
