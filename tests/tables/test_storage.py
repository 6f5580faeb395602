"""Tables on disk: what is written is there when reopened, damage is noticed, room is checked."""

import mmap
import shutil
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist
from conftest import flip

from common import UserError
from tables import storage as storages
from tables.storage import DiskStorage

SHAPE = (7, 3, 5)  # V, n_table, W
NAMES = ("rows", "state")


def made(tmp_path, dtype=torch.float32) -> DiskStorage:
    """Tables in which no number is like its neighbour."""
    storage = DiskStorage.create(tmp_path / "new" / "live", SHAPE, dtype)
    storage.add("state", torch.float32)
    assert storage.fresh and not any(array.any() for array in storage.arrays.values())
    for number, array in enumerate(storage.arrays.values()):
        array.copy_(torch.arange(array.numel()).view(array.shape) + 10 * number)
    return storage


def same(a: DiskStorage, b: DiskStorage) -> bool:
    return all(torch.equal(array, b.arrays[name]) for name, array in a.arrays.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_are_in_files_of_the_raw_numbers(tmp_path, dtype):
    storage = made(tmp_path, dtype)
    again = DiskStorage(storage.folder, SHAPE, dtype, NAMES)
    assert same(again, storage) and not again.fresh
    assert sorted(path.name for path in storage.folder.iterdir()) == sorted(NAMES)
    raw = bytearray((storage.folder / "rows").read_bytes())
    expected = torch.arange(7 * 3 * 5).to(dtype)  # a token's rows of all tables side by side
    assert torch.equal(torch.frombuffer(raw, dtype=dtype), expected)


def test_who_only_reads_can_not_change_the_files(tmp_path):
    storage = made(tmp_path)
    before = (storage.folder / "rows").read_bytes()
    reader = DiskStorage(storage.folder, SHAPE, torch.float32, NAMES)
    reader.arrays["rows"].fill_(9.0)
    assert (storage.folder / "rows").read_bytes() == before
    assert DiskStorage(storage.folder, SHAPE, torch.float32, NAMES).arrays["rows"][0, 0, 1] == 1.0
    reader.copy(tmp_path / "changed")  # but a copy has the change, and all else
    changed = DiskStorage(tmp_path / "changed", SHAPE, torch.float32, NAMES)
    assert (changed.arrays["rows"] == 9.0).all()
    assert torch.equal(changed.arrays["state"], storage.arrays["state"])


def test_a_copy_is_a_moment_of_tables_that_go_on(tmp_path):
    storage = made(tmp_path)
    described = storage.copy(tmp_path / "copy")
    crc32 = described.pop("crc32")
    assert list(crc32) == [*NAMES]
    storage.arrays["state"][6, 2, 4] += 1
    copy = DiskStorage(tmp_path / "copy", **described, names=crc32)
    assert not same(copy, storage)
    storage.arrays["state"][6, 2, 4] -= 1
    assert same(copy, storage) and copy.checksums() == storage.checksums() == crc32


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_noticed(tmp_path, name):
    storage = made(tmp_path)
    path, before = storage.folder / name, storage.checksums()

    def opened() -> DiskStorage:
        return DiskStorage(storage.folder, SHAPE, torch.float32, NAMES)

    flip(path, -1)
    after = opened().checksums()
    assert [key for key in before if before[key] != after[key]] == [name]
    raw = path.read_bytes()
    for harm in (raw[:-1], raw + b"\0", b""):
        path.write_bytes(harm)
        with pytest.raises(UserError, match=rf"live/{name} (is damaged|.*bytes)"):
            opened()
    path.unlink()
    with pytest.raises(UserError, match=f"no .*live/{name}: put it beside ckpt.pt"):
        opened()


def test_pages_are_asked_for_ahead_neighbours_as_one(tmp_path):
    storage = DiskStorage.create(tmp_path / "t", (400, 3, 512), torch.float32)  # 6 KB a token
    storage.add("state", torch.float32)
    for ids in ([0, 1, 2, 5], [399], []):  # the system takes them as they are
        storage.read_ahead(torch.tensor(ids, dtype=torch.int64), NAMES)
    pages = Mock()
    storage.maps = dict.fromkeys(NAMES, pages)
    storage.read_ahead(torch.tensor([[5, 0, 2, 1], [8, 7, 399, 5]]), NAMES)
    expected = []
    for first, last in [(0, 2), (5, 5), (7, 8), (399, 399)] * 2:
        start = first * 6144 // mmap.PAGESIZE * mmap.PAGESIZE
        expected.append(call(mmap.MADV_WILLNEED, start, (last + 1) * 6144 - start))
    assert pages.madvise.call_args_list == expected


def test_sparse_tables_take_no_room_and_may_be_larger_than_memory(tmp_path):
    shape = (1 << 22, 2, 4096)  # 128 GiB of rows
    storage = DiskStorage.create(tmp_path / "big", shape, torch.float32, sparse=True)
    storage.arrays["rows"][4_000_000, 1] = 2.0
    reader = DiskStorage(storage.folder, shape, torch.float32)
    assert reader.arrays["rows"][4_000_000].sum() == 2 * 4096 and not storage.fresh
    assert sum(path.stat().st_blocks * 512 for path in storage.folder.iterdir()) < 1e6


def test_a_container_may_have_less_memory_than_its_machine(tmp_path, monkeypatch):
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   4096 kB\n"}
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    files["/sys/fs/cgroup/memory.stat"] = "anon 1000\nfile 70000\n"
    monkeypatch.setattr(Path, "exists", lambda path: str(path) in files)
    monkeypatch.setattr(Path, "read_text", lambda path: files[str(path)])
    assert storages.free_ram() == 4096 * 1024
    files["/sys/fs/cgroup/memory.max"] = "5000\n"
    assert storages.free_ram() == 4000
    files.clear()  # another system
    assert storages.free_ram() == float("inf")


@pytest.mark.parametrize("place", ["RAM", "disk"])
def test_processes_of_a_machine_need_room_together(place, tmp_path, monkeypatch):
    """... which all of them measure before one takes its share."""
    done = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda _: done.append("met"))
    monkeypatch.setattr(storages, "free_ram", lambda: done.append("measured") or 299)
    usage = shutil.disk_usage(tmp_path)._replace(free=299)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: done.append("measured") or usage)
    folder = tmp_path if place == "disk" else None
    storages.check_room(99, folder)
    with pytest.raises(UserError, match=place):
        storages.check_room(100, folder)
    assert done == ["measured", "met"] * 2
