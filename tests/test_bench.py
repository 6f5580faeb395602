"""lab/bench.py measures what it says, on a model small enough to take seconds."""

import re

import pytest
from conftest import command, refused

from lab import bench
from lab.bench import Bench

SIZES = dict(n_layer=3, n_head=2, n_embd=24, vocab_size=50, block_size=16, batch_size=2, rounds=1)


def test_tables_in_a_file(tmp_path):
    rows = bench.bench_offload(Bench(device="cpu", dir=tmp_path, table_gib=0.25, **SIZES))
    assert not list(tmp_path.iterdir())
    assert [row["tables"] for row in rows] == ["resident", "disk, 0.25 GiB of rows"]
    for row in rows:
        _, *cells = row.values()
        assert list(row) == ["tables", "decode 1", "decode 8", "prefill", "train"]
        assert all(re.fullmatch(r"[1-9][\d,]* \(\d+\.\d\d\)", cell) for cell in cells)
        assert row["tables"] != "resident" or all(cell.endswith(" (1.00)") for cell in cells)


@pytest.mark.parametrize("task", [bench.train, bench.prefill])
def test_what_is_timed_begins_when_ids_are_drawn(monkeypatch, task):
    """To draw takes 9 seconds here, a look-up of rows one."""
    clock = [0.0]

    def takes(seconds, function):
        def later(*args):
            clock[0] += seconds
            return function(*args)

        return later

    monkeypatch.setattr(bench, "timer", lambda: clock[0])
    monkeypatch.setattr(bench, "zipf", takes(9, bench.zipf))
    small = Bench(device="cpu", **SIZES)
    contender = bench.Contender(small, small.model(ffn="stem"))
    contender.model.tables.lookup = takes(1, contender.model.tables.lookup)
    assert task(contender) == 2 * 16


def test_all_of_it_in_a_quick_run(tmp_path):
    flags = "--quick --rounds 1 --block_size 1 --device cpu"  # the shortest context
    printed = command(f"lab/bench.py all {flags}").stdout
    titles = re.findall(r"^\| (\w+) .*\n\|-", printed, re.MULTILINE)
    assert titles == ["train", "decode", "cache", "tables"]
    assert re.findall(r"\n\| (resident|RAM|disk) ", printed) == [
        "resident",
        "RAM",
        "disk",
    ]
    assert not re.search("inf|nan", printed)


def test_all_that_a_gpu_measures(tmp_path):
    assert "no CUDA device" in refused("lab/bench.py gpu --device cpu")
    flags = "gpu --quick --rounds 1 --block_size 4 --device cpu"
    printed = command(f"lab/bench.py {flags}").stdout
    titles = ["tables", "tables", "tables", "train", "train", "decode"]
    assert re.findall(r"^\| (\w+) .*\n\|-", printed, re.MULTILINE) == titles
    one = command(f"lab/bench.py {flags} --part 6").stdout
    assert re.findall(r"^\| (\w+) .*\n\|-", one, re.MULTILINE) == titles[5:]


@pytest.mark.parametrize(
    "flag",
    [
        "--rounds 0",
        "--n_head 5",
        "--dir gone",
        "--part 1",
        "--n_embd 64 --preset prose",
        "--table_gib 1e-9",
    ],
)
def test_bad_flags_are_one_clear_line(tmp_path, flag):
    assert flag.split()[0][2:] in refused(f"lab/bench.py offload --device cpu {flag}")
