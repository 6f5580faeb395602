"""Who modifies the code makes mistakes: each ends in Python's traceback, which names the mistaken
line. What a user does wrong, such as a file that is damaged, is one line without a traceback."""

import importlib
import os
import re
import sys
import traceback
from multiprocessing import get_context
from pathlib import Path

import pytest
from conftest import EDIT, ROOT, add_relative, command, small_run

import common
import train
from training import batches

# What somebody adds to the project. A mistake is a line that is put in at its `place`.
SOURCE = """
import torch
from torch import nn
import model
{top}
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

    def forward(self, x, rows):
        {forward}
        return self.down(self.up(x) * rows)

class Decoder(model.Decoder):
    def make_block(self, layer):
        {block}
        config = self.config
        return model.Block(config, layer, model.LinearQKV(config), Layer(config))

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
    ("top", "import my_kernels", ModuleNotFoundError),
    ("top", "model.Attenzione", AttributeError),
    ("block", "self.config.n_layers", AttributeError),
    ("build", "nn.Linear(config.n_embed, 8)", AttributeError),
    ("build", "raise ValueError('width of my own layer')", ValueError),
    ("build", "type(config)(n_embedding=8)", TypeError),
    ("build", "open('my-weights.bin')", FileNotFoundError),
    ("forward", "x = x @ torch.ones(3, 3)", RuntimeError),
    ("forward", "x = rows[0, 0, 99]", IndexError),
    ("forward", "x = x + undefined", NameError),
    ("forward", "raise OSError('my cache is cold')", OSError),
    ("forward", "raise BrokenPipeError(32, 'my socket')", BrokenPipeError),
    ("forward", "assert rows.shape[-1] == 9, rows.shape", AssertionError),
    ("tables", "self.weight = self.weights", AttributeError),
    ("lookup", "raise NotImplementedError", NotImplementedError),
    ("gradients", "self.reads[9]", IndexError),
    ("log", "raise ConnectionResetError(104, 'Connection reset by peer')", ConnectionResetError),
    ("log", "record['loss']", KeyError),
    ("row", "record = {'text': 1}['txt']", KeyError),
    ("row", "ids = ids.astype('int63')", TypeError),
    ("row", "raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'my text')", UnicodeDecodeError),
]


def add_mine(patch: pytest.MonkeyPatch, folder: Path, place="top", line: str = "pass") -> Path:
    """Have SOURCE in relatives/mine.py."""
    lines = {**dict.fromkeys(re.findall("{(.*)}", SOURCE), "pass"), place: line}
    return add_relative(patch, folder, "mine", SOURCE.format(**lines))


@pytest.fixture(scope="module")
def right(data, tmp_path_factory) -> Path:
    """A checkpoint of the layer without a mistake."""
    folder = tmp_path_factory.mktemp("right")
    with pytest.MonkeyPatch.context() as patch:
        add_mine(patch, folder)
        return small_run(data, folder / "out", ffn="mine", max_iters=1)


@pytest.mark.parametrize(("place", "line", "kind"), MISTAKES)
def test_a_mistake_of_ones_own_is_a_traceback_that_ends_there(
    right, data, tmp_path, monkeypatch, place, line, kind
):
    path = add_mine(monkeypatch, tmp_path, place, line)
    tables = None
    commands = ["train", "sample", "edit"]
    if place not in ("top", "build", "forward", "block"):
        mine = importlib.import_module("relatives.mine")
        monkeypatch.setattr(train, "Log", mine.MyLog)
        monkeypatch.setattr(batches, "Windows", mine.MyWindows)
        tables = mine.Rows
        commands = ["train"]

    for name in commands:
        with pytest.raises(kind) as caught:
            if name == "train":
                given = dict(ffn="mine", max_iters=2, eval_tokens=64, tables=tables)
                common.run(lambda given=given: small_run(data, tmp_path / "out", **given))
            elif name == "sample":
                command("sample.py", "--ckpt", right / "ckpt.pt")
            else:
                command("edit.py", "--ckpt", right / "ckpt.pt", *EDIT)
        frames = traceback.extract_tb(caught.value.__traceback__)
        below = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT)]
        ours = [frame for frame in below if "site-packages" not in frame.filename]
        mistaken = [frame for frame in frames if frame.filename == str(path)]
        assert mistaken, caught.value
        last = mistaken[-1]
        assert last.line == line
        assert frames.index(last) > frames.index(ours[-1])  # nothing of ours is behind it
        assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("line", "code", "last"),
    [
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("raise common.UserError('--x 1 must be 2')", 1, "error: --x 1 must be 2"),
        ("common.torch.empty(10**13)", 1, "error: out of memory: lower --device_batch_size"),
        ("raise KeyboardInterrupt", 130, ""),
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
