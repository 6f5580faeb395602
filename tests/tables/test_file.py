"""Table files: what is written is there when reopened, and what is not one is refused."""

import json
import os

import pytest
import torch

from common import UserError
from tables import file as tablefile
from tables.file import PAGE, TableFile, regions

SHAPE = (7, 3, 5)  # V, n_table, W


def made(tmp_path, dtype=torch.float32) -> TableFile:
    return TableFile.create(tmp_path / "new" / "live.bin", SHAPE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reopened_file_shows_the_writes(tmp_path, dtype):
    file = made(tmp_path, dtype)
    assert file.fresh and not any(weight.any() for weight in file.weight)
    m, v, count, last = file.moments()
    for number, table in enumerate([*file.weight, *m, *v, count, last]):
        table.copy_(torch.arange(table.numel()).view(table.shape) + 10 * number)
    again = TableFile(file.path)
    assert (again.shape, again.dtype, again.id, again.fresh) == (SHAPE, dtype, file.id, False)
    m, v, *per_token = again.moments()
    tensors = [*again.weight, *m, *v, *per_token]
    for number, table in enumerate(tensors):
        assert torch.equal(
            table, (torch.arange(table.numel()).view(table.shape) + 10 * number).to(table.dtype)
        )


def test_the_layout_is_what_the_header_says(tmp_path):
    """Read with nothing but the header, as another program would."""
    file = made(tmp_path)
    for number, weight in enumerate(file.weight):
        weight.fill_(number)
    raw = file.path.read_bytes()
    magic, header = raw.split(b"\n")[:2]
    header = json.loads(header)
    assert magic == b"token-tables" and header["layout"] == "token-major"
    assert (header["vocab_size"], header["n_table"], header["width"]) == SHAPE
    rows = torch.frombuffer(bytearray(raw[PAGE:]), dtype=torch.float32, count=7 * 3 * 5)
    for token in rows.view(7, 3, 5):  # a token's rows of all tables, side by side
        assert token.tolist() == [[0.0] * 5, [1.0] * 5, [2.0] * 5]
    assert all(at % PAGE == 0 for at, _ in regions(SHAPE, torch.float32).values())
    assert len(raw) == regions(SHAPE, torch.float32)["end"][0]


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda raw: b"PK\x03\x04" + raw, "is not a table file"),
        (lambda raw: b"", "is not a table file"),
        (lambda raw: raw[:-1], "was cut short"),
        (lambda raw: raw[: PAGE // 2], "was cut short"),
        (lambda raw: raw + b"\0", "was cut short or changed"),
        (lambda raw: raw.replace(b'"version": 1', b'"version": 9'), "of version 9"),
        (lambda raw: raw.replace(b"token-major", b"table-major"), "layout 'table-major'"),
        (lambda raw: raw.replace(b'"float32"', b'"float31"'), "damaged header"),
        (lambda raw: raw.replace(b'"width"', b'"w!dth"'), "damaged header"),
        (lambda raw: raw.replace(b'{"version"', b'["version"'), "damaged header"),
    ],
)
def test_wrong_short_and_foreign_files_are_refused(tmp_path, harm, says):
    path = made(tmp_path).path
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(UserError, match=says) as refused:
        TableFile(path)
    assert str(path) in str(refused.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="no table file at"):
        TableFile(tmp_path / "gone.bin")
    with pytest.raises(UserError, match="cannot read"):
        TableFile(tmp_path)


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(UserError, match="No space left on device"):
            made(tmp_path)
        assert not list((tmp_path / "new").iterdir())
    file = made(tmp_path)
    monkeypatch.setattr(tablefile.zlib, "crc32", full)
    with pytest.raises(UserError, match="No space left on device"):
        file.copy(lambda name: tmp_path / "copy.bin")
    assert not list(tmp_path.glob("copy*"))


@pytest.mark.parametrize("how", ["by the system", "no such call", "it fails half way"])
def test_a_copy_is_a_moment_of_a_file_that_goes_on(tmp_path, monkeypatch, how):
    asked = []

    def half(origin, copy, size):
        if asked:
            raise OSError(22, "Invalid argument")
        asked.append(size)
        return os.write(copy, b"x" * (size // 2))

    if how == "no such call":
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    elif how == "it fails half way":
        monkeypatch.setattr(os, "copy_file_range", half, raising=False)

    def path_of(name):
        return tmp_path / f"tables-{name}.bin"

    file = made(tmp_path)
    file.weight[1].fill_(4.0)
    first = file.copy(path_of)
    file.weight[1].fill_(5.0)
    second = file.copy(path_of)
    assert len({file.id, first, second}) == 3
    values = [TableFile(path_of(name)).weight[1].unique() for name in (first, second)]
    assert values == [4.0, 5.0]
    assert TableFile(path_of(first)).id == first
    behind = [path.read_bytes()[tablefile.PAGE :] for path in (file.path, path_of(second))]
    assert behind[0] == behind[1]
    TableFile(path_of(second)).verify()


def test_reading_ahead_changes_nothing(tmp_path):
    file = made(tmp_path)
    file.weight[2].fill_(1.0)
    for ids in ([0, 1, 2, 5], [6], [], [0, 2, 4, 5, 6]):
        file.read_ahead(torch.tensor(ids, dtype=torch.int64), ("rows", "m", "v"))
    assert torch.equal(file.weight[2], torch.ones(7, 5))


def test_neighbours_are_asked_for_as_one(tmp_path, monkeypatch):
    file = TableFile.create(tmp_path / "t.bin", (400, 3, 512), torch.float32)  # 6 KB a token
    asked = []

    class Map:
        def madvise(self, advice, start, length):
            asked.append((start, start + length))

    monkeypatch.setattr(file, "map", Map())
    file.read_ahead(torch.tensor([0, 1, 2, 5, 7, 8, 399]), ("rows", "v"))
    expected = []
    for name in ("rows", "v"):
        offset, _ = file.regions[name]
        for first, last in ((0, 2), (5, 5), (7, 8), (399, 399)):
            start, end = (offset + token * 3 * 512 * 4 for token in (first, last + 1))
            expected.append((start - start % PAGE, end))
    assert asked == expected


def test_a_sparse_file_takes_no_room(tmp_path):
    file = TableFile.create(tmp_path / "big.bin", (1 << 20, 2, 64), torch.float32, sparse=True)
    stat = file.path.stat()
    assert stat.st_size > 1.5e9 and stat.st_blocks * 512 < 1e6
    file.weight[1][1_000_000] = 2.0
    assert file.weight[1][1_000_000].sum() == 128 and file.path.stat().st_blocks * 512 < 1e6
