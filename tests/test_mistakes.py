"""Who modifies the code makes mistakes: each ends in Python's traceback, which names the mistaken
line. What a user does wrong, such as a file that is damaged, is one line without a traceback."""

import os
import sys
import traceback
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from conftest import EDIT, ROOT, command, small_run

import common
import model
import train
from training import batches
from training.records import read_run

# What somebody adds to the project. A mistake is a line that is put in at its `place`.
SOURCE = """
import torch
from torch import nn
from tables.tables import ResidentTables
from training.batches import Windows
from training.records import Log

class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        {build}
        self.row_width = 8
        self.up = nn.Linear(config.n_embd, 8)
        self.down = nn.Linear(8, config.n_embd)
        self.register_buffer("flip", -torch.ones(8), persistent=False)
        self.scale = torch.tensor(0.5)

    def forward(self, x, rows):
        {forward}
        return self.down(self.up(x) * rows * self.flip * self.scale)

class Rows(ResidentTables):
    def __init__(self, n_table, vocab_size, width):
        super().__init__(n_table, vocab_size, width)
        {tables}

    def lookup(self, ids):
        {lookup}
        return super().lookup(ids)

    def gradients(self):
        {gradients}
        return super().gradients()

class MyLog(Log):
    def write(self, **record):
        super().write(**record)
        {log}

class MyWindows(Windows):
    def sequence(self, index):
        ids, targets = super().sequence(index)
        {row}
        return ids, targets
"""

# Place, the mistaken line, what it raises.
MISTAKES = [
    ("build", "nn.Linear(config.n_embed, 8)", AttributeError),
    ("build", "raise ValueError('width of my own layer')", ValueError),
    ("build", "assert config.n_embd % 7 == 0, 'my layer needs sevenths'", AssertionError),
    ("build", "{'silu': 1}[config.embformer_act + '2']", KeyError),
    ("build", "type(config)(n_embedding=8)", TypeError),
    ("build", "open('my-weights.bin')", FileNotFoundError),
    ("build", "import my_kernels", ModuleNotFoundError),
    ("forward", "x = x @ torch.ones(3, 3)", RuntimeError),
    ("forward", "x = x + self.bias", AttributeError),
    ("forward", "x = rows[0, 0, 99]", IndexError),
    ("forward", "x = x + undefined", NameError),
    ("forward", "raise RuntimeError('my layer cannot allocate this')", RuntimeError),
    ("forward", "raise OSError('my cache is cold')", OSError),
    ("forward", "raise BrokenPipeError(32, 'my socket')", BrokenPipeError),
    ("forward", "assert rows.shape[-1] == 9, rows.shape", AssertionError),
    ("tables", "self.weight = self.weights", AttributeError),
    ("lookup", "raise NotImplementedError", NotImplementedError),
    ("gradients", "self.reads[9]", IndexError),
    ("log", "raise ConnectionError('my server is down')", ConnectionError),
    ("log", "raise ConnectionResetError(104, 'Connection reset by peer')", ConnectionResetError),
    ("log", "record['loss']", KeyError),
    ("row", "record = {'text': 1}['txt']", KeyError),
    ("row", "ids = ids.astype('int63')", TypeError),
    ("row", "raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'my text')", UnicodeDecodeError),
]


def write_module(folder: Path, place: str | None = None, line: str = "pass") -> dict:
    """The names of SOURCE, run from a file."""
    places = ("build", "forward", "tables", "lookup", "gradients", "log", "row")
    lines = dict.fromkeys(places, "pass")
    lines[place] = line
    path = folder / "mine.py"
    path.write_text(SOURCE.format(**lines))
    names = {"__name__": "mine"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names


@pytest.fixture(scope="module")
def right(data, tmp_path_factory) -> Path:
    """A checkpoint of the layer without a mistake."""
    folder = tmp_path_factory.mktemp("right")
    with pytest.MonkeyPatch.context() as patch:
        names = write_module(folder)
        patch.setitem(model.LAYERS, "mine", (model.LinearQKV, names["Layer"]))
        return small_run(data, folder / "out", ffn="mine", max_iters=1)


@pytest.mark.parametrize(("place", "line", "kind"), MISTAKES)
def test_a_mistake_of_ones_own_is_a_traceback_that_ends_there(
    right, data, tmp_path, monkeypatch, place, line, kind
):
    names = write_module(tmp_path, place, line)
    monkeypatch.setitem(model.LAYERS, "mine", (model.LinearQKV, names["Layer"]))
    of_layer = place in ("build", "forward")
    commands = ["train", "sample", "edit"] if of_layer else ["train"]
    if place == "log":
        monkeypatch.setattr(train, "Log", names["MyLog"])
    if place == "row":
        monkeypatch.setattr(batches, "Windows", names["MyWindows"])

    for name in commands:
        with pytest.raises(kind) as caught:
            if name == "train":
                tables = None if of_layer else names["Rows"]
                given = dict(ffn="mine", max_iters=2, eval_tokens=64, tables=tables)
                common.run(lambda given=given: small_run(data, tmp_path / "out", **given))
            elif name == "sample":
                command("sample.py", "--ckpt", right / "ckpt.pt")
            else:
                command("edit.py", "--ckpt", right / "ckpt.pt", *EDIT)
        frames = traceback.extract_tb(caught.value.__traceback__)
        below = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT)]
        ours = [frame for frame in below if "site-packages" not in frame.filename]
        mine = [frame for frame in frames if frame.filename == str(tmp_path / "mine.py")]
        assert mine, caught.value
        last = mine[-1]
        assert last.line == line
        assert frames.index(last) > frames.index(ours[-1])  # nothing of ours is behind it
        assert caught.value.__cause__ is None


@pytest.mark.parametrize("offload", ["none", "disk"])
def test_tensors_that_are_not_saved_are_made_anew(right, tmp_path, monkeypatch, offload):
    names = write_module(tmp_path)
    monkeypatch.setitem(model.LAYERS, "mine", (model.LinearQKV, names["Layer"]))
    loss = read_run(right)["eval"][-1]["val_loss"]
    said = command("train.py --eval_only --out_dir", right, "--offload", offload).stdout
    assert f"val loss {loss:.5g}," in said


class NoTables(torch.nn.Module):
    """Tables of one's own that lack all that the project asks for."""

    def __init__(self, n_table: int, vocab_size: int, width: int) -> None:
        super().__init__()


def test_tables_without_a_method_fail_where_it_is_missed(data, tmp_path):
    with pytest.raises(AttributeError, match="'NoTables' object has no attribute"):
        common.run(lambda: small_run(data, tmp_path, NoTables))


@pytest.mark.parametrize(
    ("line", "code", "last"),
    [
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("raise common.UserError('--x 1 must be 2')", 1, "error: --x 1 must be 2"),
        ("torch.empty(10**13)", 1, "error: out of memory: lower --device_batch_size"),
        ("raise KeyboardInterrupt", 130, "interrupted in <string>, line 1"),
        ("print('x' * 10**6)", 1, ""),  # to a reader that has gone: | head
    ],
)
def test_how_a_command_ends(tmp_path, line, code, last):
    """In a fork, whose standard output is a pipe that nobody reads."""

    def main() -> None:
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 1)
        os.dup2(os.open(tmp_path / "stderr", os.O_WRONLY | os.O_CREAT), 2)
        sys.stdout = open(1, "w")  # noqa: SIM115
        sys.stderr = open(2, "w")  # noqa: SIM115
        common.run(lambda: exec(line))

    process = get_context("fork").Process(target=main)
    process.start()
    process.join()
    lines = (tmp_path / "stderr").read_text().splitlines() or [""]
    assert process.exitcode == code and lines[-1].startswith(last)
    assert ("Traceback (most recent call last):" in lines) == last.startswith("ValueError")
    if last.startswith("error"):
        assert len(lines) == 1
