"""Tables on disk: what is written is there when reopened, damage is noticed, room is checked."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import assert_same, user_error

from tables import storage as storages
from tables.storage import DiskStorage

SHAPE = (7, 3, 5)  # V, n_table, W
NAMES = ("rows", "state")


def made(tmp_path, dtype=torch.float32) -> DiskStorage:
    """Tables in which no number is like its neighbor."""
    storage = DiskStorage.create(tmp_path / "new" / "live", SHAPE, dtype)
    storage.add("state", torch.float32)
    for array in storage.arrays.values():
        assert storage.fresh and not array.any()
        array.copy_(torch.arange(array.numel()).view(SHAPE))
    return storage


def reopened(folder: Path, dtype=torch.float32) -> DiskStorage:
    storage = DiskStorage(folder, SHAPE, dtype, NAMES)
    assert not storage.fresh
    return storage


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_are_in_files_of_the_raw_numbers(tmp_path, dtype):
    storage = made(tmp_path, dtype)
    assert_same(reopened(storage.folder, dtype).arrays, storage.arrays)
    assert sorted(path.name for path in storage.folder.iterdir()) == sorted(NAMES)
    raw = bytearray((storage.folder / "rows").read_bytes())
    expected = torch.arange(7 * 3 * 5).to(dtype)  # a token's rows of all tables side by side
    assert torch.equal(torch.frombuffer(raw, dtype=dtype), expected)


def test_who_only_reads_changes_no_file_but_copies_what_it_changed(tmp_path):
    storage = made(tmp_path)
    before = storage.checksums()
    reader = reopened(storage.folder)
    reader.arrays["rows"].fill_(9.0)
    reader.add("state", torch.float32).fill_(8.0)  # as a new optimizer does
    assert reopened(storage.folder).checksums() == before
    reader.copy(tmp_path / "changed")
    assert_same(reopened(tmp_path / "changed").arrays, reader.arrays)
    bare = DiskStorage(storage.folder, SHAPE, torch.float32)
    bare.add("state", torch.float32)
    bare.read_ahead(torch.tensor([3]), NAMES)


def test_a_copy_is_a_moment_of_tables_that_go_on(tmp_path):
    storage = made(tmp_path)
    storage.gather_columns = lambda array: array.split(2)  # in parts, as of several ranks
    described = storage.copy(tmp_path / "copy")
    crc32 = described.pop("crc32")
    assert crc32 == storage.checksums()
    storage.arrays["state"][6, 2, 4] += 1
    copy = DiskStorage(tmp_path / "copy", **described, names=crc32)
    assert copy.checksums() == crc32 != storage.checksums()
    storage.arrays["state"][6, 2, 4] -= 1
    assert_same(copy.arrays, storage.arrays)


def test_a_file_of_another_size_or_none_is_noticed(tmp_path):
    storage = made(tmp_path)
    path = storage.folder / "state"
    path.write_bytes(path.read_bytes() + b"\0")
    with user_error("live/state is damaged"):
        reopened(storage.folder)
    path.unlink()
    with user_error(r"no .*live/state: copy the whole folder"):
        reopened(storage.folder)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs posix_fadvise")
def test_pages_are_asked_for_ahead(tmp_path, monkeypatch):
    storage = DiskStorage.create(tmp_path / "t", (400, 3, 512), torch.float32)  # 6 KB a token
    storage.read_ahead(torch.tensor([0, 1, 2, 5]))  # the system takes them as they are
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *wanted: asked.append(wanted))
    storage.read_ahead(torch.tensor([[5, 0, 2, 1], [8, 7, 399, 5]]))
    file = storage.files["rows"].fileno()
    tokens = (0, 1, 2, 5, 7, 8, 399)
    assert asked == [(file, 6144 * t, 6144, os.POSIX_FADV_WILLNEED) for t in tokens]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="needs posix_fallocate")
def test_new_tables_take_all_of_their_room_at_once(tmp_path, monkeypatch):
    """A disk that fills up later would kill the process. There must be room for copies, too."""
    n_byte = 400 * 3 * 512 * 4
    free = shutil.disk_usage(tmp_path)._replace(free=3 * n_byte)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    create = partial(DiskStorage.create, shape=(400, 3, 512), dtype=torch.float32)
    storage = create(tmp_path / "three", copies=3)
    assert (storage.folder / "rows").stat().st_blocks * 512 >= n_byte
    with user_error("disk"):
        create(tmp_path / "four", copies=4)


def test_sparse_tables_take_no_room_and_may_be_larger_than_memory(tmp_path):
    shape = (1 << 22, 2, 4096)  # 128 GiB of rows
    path = tmp_path / "rows"
    path.touch()
    os.truncate(path, shape[0] * shape[1] * shape[2] * 4)
    storage = DiskStorage(tmp_path, shape, torch.float32, writable=True)
    storage.arrays["rows"][4_000_000, 1] = 2.0
    reader = DiskStorage(tmp_path, shape, torch.float32)
    assert reader.arrays["rows"][4_000_000].sum() == 2 * 4096 and not storage.fresh
    assert path.stat().st_blocks * 512 < 1e6


def test_a_container_may_have_less_memory_than_its_machine(tmp_path, monkeypatch):
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   4096 kB\n"}
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    # What is mapped without a file and shared, as RamStorage has it, is shmem, which file includes.
    files["/sys/fs/cgroup/memory.stat"] = "anon 1000\nfile 70000\nshmem 500\n"
    monkeypatch.setattr(Path, "exists", lambda path: str(path) in files)
    monkeypatch.setattr(Path, "read_text", lambda path: files[str(path)])
    assert storages.free_ram() == 4096 * 1024
    files["/sys/fs/cgroup/memory.max"] = "5000\n"
    assert storages.free_ram() == 3500
    files.clear()  # another system
    assert storages.free_ram() == float("inf")


def test_processes_of_a_machine_need_room_together(tmp_path, monkeypatch):
    """... which all of them measure before one takes its share."""
    done = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda _: done.append("met"))
    monkeypatch.setattr(storages, "free_ram", lambda: done.append("measured") or 299)
    storages.check_room(99)
    with user_error("RAM"):
        storages.check_room(100)
    assert done == ["measured", "met"] * 2
