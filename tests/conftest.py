"""What the tests of the commands share: a small prepared text, and commands run as users do."""

import json
import os
import random
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from tables.storage import DiskStorage, RamStorage

torch.set_num_threads(1)  # threads only slow down tensors of this size

ROOT = Path(__file__).parent.parent
SMALL = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=4, max_iters=12)
SMALL |= dict(eval_interval=6, device="cpu")
SMALL = [str(part) for name, value in SMALL.items() for part in (f"--{name}", value)]


def command(*args, cwd: Path, fails: bool = False, stdin: str = "") -> subprocess.CompletedProcess:
    """Run `python args...` in a folder, but in this process, where all is imported already: an
    exception is one here. A failure must be one line without a traceback."""
    args, code, before = [str(ROOT / args[0]), *map(str, args[1:])], 0, os.getcwd()
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as given,
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as err,
        pytest.MonkeyPatch.context() as patch,
    ):
        given.write(stdin), given.seek(0)
        for name, value in dict(argv=args, stdin=given, stdout=out, stderr=err).items():
            patch.setattr(sys, name, value)
        os.chdir(cwd)
        try:
            runpy.run_path(args[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
            if isinstance(ended.code, str):
                print(ended.code, file=err)
        finally:
            os.chdir(before)
        out.flush(), out.seek(0), err.seek(0)
        said = "" if code else out.read()  # may be gone: `common.run` closes a full output
        done = subprocess.CompletedProcess(args, code, said, err.read())
    assert (code != 0) == fails, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == fails, done.stderr
    return done


@pytest.fixture(autouse=True)
def no_loss_png(monkeypatch):
    """Runs within a test do not draw their loss.png, which takes a fifth of a second each: those of
    `trained`, and those in processes of their own, do."""
    draw = Figure.savefig

    def draw_others(figure, path, **how):
        loss = Path(path).name.startswith("loss.png")
        Path(path).write_bytes(b"") if loss else draw(figure, path, **how)

    monkeypatch.setattr(Figure, "savefig", draw_others)


@pytest.fixture(scope="session")
def story(tmp_path_factory) -> Path:
    """A .jsonl file of 300 made-up documents."""
    rng = random.Random(0)
    names, verbs = ["Anna", "Björn", "Chloë"], ["sees", "follows", "meets"]
    path = tmp_path_factory.mktemp("story") / "story.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(300):
            said = [
                f"{rng.choice(names)} {rng.choice(verbs)} {rng.choice(names)} at the river."
                for _ in range(rng.randint(3, 9))
            ]
            file.write(json.dumps({"text": " ".join(said)}, ensure_ascii=False) + "\n")
    return path


@pytest.fixture(scope="session")
def data(story) -> Path:
    """The prepared story."""
    out = story.parent / "data"
    command(
        *("prepare.py", "--input", story, "--out_dir", out, "--vocab_size", 300),
        *("--val_fraction", 0.1),
        cwd=story.parent,
    )
    return out


@pytest.fixture(scope="session")
def trained(data) -> dict[str, Path]:
    """Output folders of small runs, by kind of FFN."""
    runs = {}
    for ffn in ("dense", "stem", "embformer"):
        runs[ffn] = data.parent / ffn
        command(
            *("train.py", "--data_dir", data, "--out_dir", runs[ffn], "--ffn", ffn, *SMALL),
            cwd=data.parent,
        )
    return runs


@pytest.fixture(params=["direct", "staged"])
def storage(request, tmp_path):
    """What makes homes: RAM that a GPU reads over the bus, or a file, from which a worker reads."""

    def made(shape=(128, 4, 1024), dtype=torch.float32):
        if request.param == "direct":
            return RamStorage(shape, dtype)
        return DiskStorage.create(tmp_path / str(len(list(tmp_path.iterdir()))), shape, dtype)

    return made
