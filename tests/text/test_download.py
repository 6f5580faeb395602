"""download.py against a server that misbehaves on cue, and everything that can go wrong on disk."""

import contextlib
import hashlib
import http.server
import random
import re
import socket
import threading
from dataclasses import replace

import pytest
from conftest import user_error

from text import download
from text.download import DATASETS, File, fetch

CONTENT = random.Random(0).randbytes(300_000)
OTHER = random.Random(1).randbytes(300_000)
HALF = 150_000


class Server(http.server.ThreadingHTTPServer):
    """Serves `content`. Each request takes the next entry of `script`, which are the options of
    `Handler.send`, or is answered as it should be."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/files"
        self.content, self.script = CONTENT, []
        self.requests = []  # path and where the client wants to begin


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        start = int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"])[1])
        self.server.requests.append((self.path, start))
        with contextlib.suppress(ConnectionError):
            options = self.server.script.pop(0) if self.server.script else {}
            self.send(**{"start": start, **options})

    def send(self, start, stop=None, status=206, length=True):
        """Breaks off at `stop`."""
        self.send_response(status)
        if length:
            self.send_header("Content-Length", str(len(self.server.content) - start))
        self.end_headers()
        self.wfile.write(self.server.content[start:stop])


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def get(server, tmp_path, monkeypatch):
    """fetch() of a data set that the server has."""
    digest = hashlib.sha256(CONTENT).hexdigest()
    file = File("noise", "text", "noise", "none", len(CONTENT), digest, f"{server.url}/data.bin")
    monkeypatch.setitem(DATASETS, "noise", [file])

    def get():
        (path,) = fetch("noise", tmp_path / "raw")
        return path

    get.folder = tmp_path / "raw"
    get.part = get.folder / "data.bin.part"
    return get


def fails(get, match):
    with user_error(rf"cannot download .*{match}.*run it again to go on"):
        get()
    assert not (get.folder / "data.bin").exists()


def test_a_file_is_downloaded_once(server, get, capsys):
    path = get()
    assert path == get.folder / "data.bin" and path.read_bytes() == CONTENT
    assert list(get.folder.iterdir()) == [path]
    assert get() == path
    assert server.requests == [("/files/data.bin", 0)]
    assert capsys.readouterr().err == ""  # no bar where there is no terminal


@pytest.mark.parametrize("length", [True, False])
def test_what_broke_off_goes_on_where_it_stopped(server, get, length):
    server.script = [dict(stop=HALF, length=length), dict(stop=200_000, length=length)]
    fails(get, "broke off after 150,000 of 300,000 bytes")
    assert get.part.read_bytes() == CONTENT[:HALF]
    fails(get, "broke off after 200,000")
    assert get().read_bytes() == CONTENT
    assert [start for _, start in server.requests] == [0, HALF, 200_000]


@pytest.mark.parametrize("part", [CONTENT + b"more", OTHER[:HALF]])
def test_wrong_bytes_are_deleted_and_the_next_run_begins_anew(server, get, part):
    get.folder.mkdir()
    get.part.write_bytes(part)
    fails(get, f"the published {hashlib.sha256(CONTENT).hexdigest()}")
    assert not get.part.exists()
    assert get().read_bytes() == CONTENT
    assert server.requests[-1][1] == 0


def test_a_server_that_sends_all_again_loses_nothing(server, get):
    server.script = [dict(stop=HALF), dict(start=0, status=200)]
    fails(get, "broke off")
    assert get().read_bytes() == CONTENT
    assert len(server.requests) == 2


def test_a_server_that_never_ends_is_left(server, get, monkeypatch):
    server.content = CONTENT + bytes(4 << 20)  # a beginning of that
    server.script = [dict(length=False)]
    sizes = []
    monkeypatch.setattr(download, "sha256", lambda path: sizes.append(path.stat().st_size))
    fails(get, "its sha256 is")
    assert sizes[0] < len(CONTENT) + 100_000


def test_errors_of_the_server_are_one_line(server, get):
    server.script = [dict(status=503)]
    fails(get, "data.bin .*HTTP Error 503")
    assert len(server.requests) == 1 and get().read_bytes() == CONTENT


def test_a_server_that_falls_silent_is_given_up(get, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    (file,) = DATASETS["noise"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/data.bin"
        monkeypatch.setitem(DATASETS, "noise", [replace(file, url=url)])
        fails(get, "timed out")


@pytest.mark.parametrize("other", [OTHER, CONTENT[:-1], b""])
def test_another_file_of_that_name_is_not_replaced(server, get, other):
    path = get()
    path.write_bytes(other)
    with user_error("not the published file"):
        get()
    assert path.read_bytes() == other and len(server.requests) == 1


def test_folders_that_cannot_be_are_one_line(get):
    get.folder.write_text("in the way")
    fails(get, "data.bin")


def test_every_file_is_one_version_of_it():
    kinds = {files[0].kind for files in DATASETS.values()}
    assert kinds == {"text", "chat", "preference"}
    for name, files in DATASETS.items():
        if name != "moby-dick":
            for file in files:  # by a commit in its address, and by its sum
                assert re.fullmatch(r"https://[^ ]+/[0-9a-f]{40}(/[^ ]+)?/[^/ ]+", file.url), name
                assert re.fullmatch("[0-9a-f]{64}", file.sha256), name
    (path,) = fetch("moby-dick", "nowhere")  # kept here: no network, no folder
    assert download.sha256(path) == DATASETS["moby-dick"][0].sha256
