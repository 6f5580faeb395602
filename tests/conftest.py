"""What the tests of the commands share: a small prepared text, runs on it, commands as users run
them, and ways to compare what runs leave."""

import contextlib
import gc
import importlib
import io
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

import model
import relatives
import train
from common import UserError
from corpora import countries
from model import Decoder
from text.dataset import read_meta, read_tokenizer
from training import digests, report, writing
from training.checkpoints import load_checkpoint
from training.records import read_run

torch.set_num_threads(1)  # threads only slow down tensors of this size

# A shell that starts the tests behind its back ignores Ctrl-C for them, and for what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
# For a GPU that it has seen, PyTorch starts threads with the first backward pass. After that, forks
# of this process can make none.
needs_forks = pytest.mark.skipif(
    not hasattr(os, "fork") or torch.cuda.is_available(),
    reason="needs forks, and that PyTorch sees no GPU: set CUDA_VISIBLE_DEVICES=",
)
SHAPE = dict(n_layer=2, n_head=2, n_embd=32, block_size=32)
INHERITED = dict.fromkeys(SHAPE)  # the shape comes from --init_from
RUN = dict(
    batch_size=4, max_iters=12, eval_interval=6, eval_tokens=256, device="cpu", dtype="float32"
)


def pytest_collection_finish():
    """What is imported is never garbage: collections, which look for some, need not look there."""
    gc.freeze()


def flags(**settings) -> list[str]:
    return [str(part) for name, value in settings.items() for part in (f"--{name}", value)]


SMALL = flags(**SHAPE, **RUN)
EDIT = flags(source="Anna", target="Björn", prompt="Anna sees", max_new_tokens=1)


def command(
    *args, cwd: Path | str = ".", fails: bool = False, stdin: str = ""
) -> subprocess.CompletedProcess:
    """Run `python args...` in a folder, but in this process, where all is imported already: an
    exception is one here. A failure must be one line without a traceback. The first argument may be
    a line of several words."""
    words = [*str(args[0]).split(), *map(str, args[1:])]
    words[0] = str(ROOT / words[0])
    code = 0
    out = io.StringIO()
    err = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", words)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code
            if isinstance(code, str):
                print(code, file=err)
    done = subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
    assert bool(code) == fails, done.stderr
    assert len(errors_of(done)) == fails, done.stderr
    return done


def errors_of(done: subprocess.CompletedProcess) -> list[str]:
    lines = done.stderr.splitlines()
    return [line for line in lines if line.startswith("error: ")]


def refused(*args, cwd: Path | str = ".") -> str:
    """The one line in which a command refuses."""
    return errors_of(command(*args, cwd=cwd, fails=True))[0]


def user_error(match: str | None = None):
    """Within it, a UserError that says so must come."""
    return pytest.raises(UserError, match=match)


def put_relative(patch: pytest.MonkeyPatch, folder: Path, name: str, source: str) -> Path:
    """Have a file relatives/NAME.py, which is written to a folder."""
    path = folder / f"{name}.py"
    path.write_text(source)
    patch.setattr(model, "RELATIVES", folder)
    patch.setattr(relatives, "__path__", [str(folder)])
    sys.modules.pop(f"relatives.{name}", None)
    importlib.invalidate_caches()
    return path


def config_source(*fields: str) -> str:
    """A file of relatives/ whose kind has settings of its own: lines of a dataclass."""
    body = "\n    ".join(fields)
    return f"""
from __future__ import annotations
from dataclasses import dataclass
from typing import Optional
import model
from common import flag

@dataclass
class Config(model.ModelConfig):
    {body}

class Decoder(model.Decoder):
    config_class = Config
"""


# Of tables that it makes itself, each of several processes would have whole ones.
OWN_TABLES = """
import model

class Decoder(model.Decoder):
    def make_tables(self, tables, widths):
        return model.ResidentTables(len(widths), self.config.vocab_size, widths[0])
"""


def edit_core(patch: pytest.MonkeyPatch, folder: Path, name: str) -> None:
    """Change a file of all models, in a copy of them that digests are taken of."""
    for core in digests.CORE:
        shutil.copy(ROOT / core, folder)
    with open(folder / name, "a") as file:
        file.write("# changed\n")
    patch.setattr(model, "__file__", str(folder / "model.py"))
    patch.setattr(digests, "imported", {})


def small_run(data: Path | str, out: Path, **more) -> Path:
    """Train a small model in this process; the folder it wrote. What is None is not set."""
    given = {**SHAPE, **RUN, "data_dir": str(data), "out_dir": out, **more}
    given = {name: value for name, value in given.items() if value is not None}
    train.train(train.resolve_settings(**given))
    return out


def resume(out: Path, **more) -> Path:
    train.train(train.resolve_settings(resume=True, out_dir=out, **more))
    return out


class PowerCut(Exception):
    pass


def cut_in_step(monkeypatch: pytest.MonkeyPatch, number: int, do: Callable | None = None) -> None:
    """The power fails in training step `number`, when its gradients are there; or `do` is done."""
    schedule = train.schedule

    def cut(step: int, settings) -> float:
        if step + 1 == number:
            if do is None:
                raise PowerCut
            do()
        return schedule(step, settings)

    monkeypatch.setattr(train, "schedule", cut)


def interrupted(data: Path | str, out: Path, number: int, **more) -> Path:
    """A small run that ends in training step `number`."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(PowerCut):
        cut_in_step(patch, number)
        small_run(data, out, **more)
    return out


def losses(folder: Path) -> list[float]:
    return [record["train_loss"] for record in read_run(folder)["step"]]


def checkpoint(folder: Path, name: str = "ckpt.pt") -> dict:
    return torch.load(folder / name, weights_only=True)


def contents(folder: Path) -> dict[Path, bytes]:
    """All files of a folder, but for locks, which mean nothing."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder): path.read_bytes() for path in found}


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def leaves(tree) -> dict:
    """The tensors and numbers of a nested checkpoint, by where they are in it."""
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(tree)[0]}


def assert_same(a, b) -> None:
    """Nested checkpoints are equal to the bit."""
    ours = leaves(a)
    others = leaves(b)
    assert ours.keys() == others.keys()
    for name, one in ours.items():
        other = others[name]
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other), name
        else:
            assert one == other, name


def assert_same_run(a: Path, b: Path) -> None:
    """Two runs have the same losses, and checkpoints that go on in the same way, wherever their
    tables are."""
    assert losses(a) == losses(b)
    one = load_checkpoint(a / "ckpt.pt", verify=True)
    other = load_checkpoint(b / "ckpt.pt", verify=True)
    for part in ("model", "optimizer", "step", "config", "tokenizer"):
        assert_same(one[part], other[part])


@pytest.fixture(autouse=True)
def no_gpu(request, monkeypatch):
    """Tests that are not marked `gpu` run on the CPU, on a machine with a GPU, too; the others are
    skipped without one."""
    if "gpu" not in request.keywords:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for processes that a test starts
    elif not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def where_tests_work(request, monkeypatch):
    """In the folder of their own, if they ask for one."""
    has_folder = "tmp_path" in request.fixturenames
    monkeypatch.chdir(request.getfixturevalue("tmp_path") if has_folder else ROOT)


@pytest.fixture
def add_relative(monkeypatch, tmp_path):
    """Have a file relatives/NAME.py until the test ends."""
    return partial(put_relative, monkeypatch, tmp_path)


@pytest.fixture(autouse=True)
def sigterm_ends_the_tests():
    """... also after a command that does something else then."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True, scope="session")
def no_power_cuts():
    """Tests do not wait until a disk has what is written, which takes milliseconds each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


def write_briefly(patch: pytest.MonkeyPatch, most: int = 2) -> None:
    """Let models write so many tokens at most."""
    generate = Decoder.generate
    patch.setattr(
        Decoder, "generate", lambda self, ids, n, **how: generate(self, ids, min(n, most), **how)
    )


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Let runs end without what takes two fifths of their time: a picture of the losses, which
    `trained` and commands in processes of their own draw, and most of what the model writes."""
    show = report.show

    def show_briefly(*shown):
        with pytest.MonkeyPatch.context() as briefly:
            write_briefly(briefly)
            return show(*shown)

    patch.setattr(report, "draw_loss", lambda folder: (folder / "loss.png").write_bytes(b""))
    patch.setattr(report, "show", show_briefly)


@pytest.fixture(autouse=True)
def brief_ends(monkeypatch):
    shorten(monkeypatch)


@pytest.fixture
def brief_facts(monkeypatch):
    """Beside a fact, less text of its name is held, which takes less time."""
    monkeypatch.setattr(writing, "N_TEXT", 8)
    monkeypatch.setattr(writing, "TEXT_TOKENS", 8)


def write_jsonl(path: Path, records: list) -> Path:
    """What is bytes already is written as it is."""
    with open(path, "wb") as file:
        for record in records:
            if not isinstance(record, bytes):
                record = json.dumps(record, ensure_ascii=False).encode()
            file.write(record + b"\n")
    return path


def says(role: str, content, **more) -> dict:
    """A message."""
    return {"role": role, "content": content, **more}


def by_turns(*contents) -> list[dict]:
    """Messages of a user and of an assistant, who answers."""
    roles = ("user", "assistant")
    return [says(roles[n % 2], content) for n, content in enumerate(contents)]


@pytest.fixture(scope="session")
def corpus() -> tuple[list[str], list[str]]:
    """The documents about the countries, which take half a second."""
    return countries.documents(seed=0)


def write_story(path: Path, n_document: int) -> None:
    """A .jsonl file of made-up documents."""
    rng = random.Random(0)
    names = ["Anna", "Björn", "Chloë"]
    verbs = ["sees", "follows", "meets"]
    documents = []
    for _ in range(n_document):
        sentences = []
        for _ in range(rng.randint(3, 9)):
            sentence = rng.choice(names), rng.choice(verbs), rng.choice(names)
            sentences.append(" ".join(sentence) + " at the river.")
        documents.append({"text": " ".join(sentences)})
    write_jsonl(path, documents)


@pytest.fixture(scope="session")
def story(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("story") / "story.jsonl"
    write_story(path, 300)
    return path


@pytest.fixture(scope="session")
def data(story) -> Path:
    """The prepared story."""
    out = story.parent / "data"
    sizes = flags(vocab_size=300, val_fraction=0.1)
    command("prepare.py", "--input", story, "--out_dir", out, *sizes)
    return out


@pytest.fixture
def encoding(data):
    """The tokenizer of the story."""
    return read_tokenizer(data, read_meta(data))


@pytest.fixture(scope="session")
def trained(data) -> dict[str, Path]:
    """Output folders of small runs, by kind of FFN."""
    kinds = ("dense", "stem", "embformer")
    return {ffn: small_run(data, data.parent / ffn, ffn=ffn) for ffn in kinds}


@pytest.fixture(scope="session")
def stem_ckpt(trained) -> Path:
    return trained["stem"] / "ckpt.pt"


@pytest.fixture(scope="session")
def chat(stem_ckpt, tmp_path_factory) -> Path:
    """A prepared folder of conversations."""
    folder = tmp_path_factory.mktemp("chat")
    rng = random.Random(0)
    chats = []
    for number in range(60):
        who = f"{rng.choice(('Anna', 'Björn', 'Chloë'))} {number}"
        turn = by_turns(f"Who sees {who}?", f"{who}.")
        chats.append({"conversations": rng.choice((1, 1, 2)) * turn})
    path = write_jsonl(folder / "chat.jsonl", chats)
    line = f"prepare.py --input {path} --out_dir {folder}/data --val_fraction 0.2 --tokenizer"
    for given in (stem_ckpt, stem_ckpt.parent):
        assert f"--init_from {given} " in command(line, given, "--overwrite").stdout
    return folder / "data"


@pytest.fixture(scope="session")
def pairs(data, tmp_path_factory) -> Path:
    """A prepared folder of preferred answers: yes is preferred to no."""
    folder = tmp_path_factory.mktemp("pairs")
    rng = random.Random(0)
    records = []
    for _ in range(80):
        name = rng.choice(["Anna", "Björn", "Chloë"])
        question = says("user", f"Who sees {name}?")
        before = [question, *[says("assistant", "Anna"), question] * rng.choice([0, 0, 1, 12])]
        chosen = [*before, says("assistant", f"{name} sees.")]
        rejected = [*before, says("assistant", "Björn follows")]
        records.append({"chosen": chosen, "rejected": rejected})
    path = write_jsonl(folder / "pairs.jsonl", records)
    made = flags(tokenizer=data, val_fraction=0.2)
    said = command("prepare.py", "--input", path, "--out_dir", folder / "data", *made).stdout
    assert "--stage dpo" in said
    return folder / "data"


@pytest.fixture(scope="session")
def stage(stem_ckpt, data, chat, pairs):
    """What a small run of a stage is given, from the STEM model on."""
    given = {
        "midtrain": dict(data=f"{data}=0.75,{chat}=0.25"),
        "context": dict(data=data, block_size=48, batch_size=2),
        "sft": dict(data=chat),
        "dpo": dict(data=pairs, learning_rate=1e-3),
    }

    def stage(name: str, **more) -> dict:
        return {**INHERITED, "stage": name, "init_from": stem_ckpt, **given[name], **more}

    return stage


@pytest.fixture(scope="session")
def staged(stage, tmp_path_factory):
    """The folder of a small run of a stage, which is trained when it is first asked for."""

    @cache
    def staged(name: str) -> Path:
        return small_run(**stage(name), out=tmp_path_factory.mktemp(name) / "out")

    return staged


@pytest.fixture(scope="session")
def on_disk(data) -> Path:
    """The folder of a run whose tables are in files."""
    return small_run(data, data.parent / "on_disk", offload="disk")


@pytest.fixture
def rising(data, tmp_path) -> Path:
    """The folder of a run whose loss rises, as its learning rate does: best.pt is of an earlier
    step than ckpt.pt."""
    schedule = dict(learning_rate=0.01, min_lr=300.0, warmup=0.0)
    return small_run(data, tmp_path / "rising", max_iters=13, eval_interval=3, **schedule)


@pytest.fixture
def out(on_disk, tmp_path) -> Path:
    """A copy of it."""
    return shutil.copytree(on_disk, tmp_path / "out")


def peak(work: Callable[[], None]) -> int:
    """The most memory that Python has while it works, in bytes."""
    tracemalloc.start()
    work()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


class Largest(TorchDispatchMode):
    """Within it, the most numbers that any operation makes, and the shapes of all in memory."""

    numbers = 0

    def __init__(self) -> None:
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        old = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in old:
                self.numbers = max(self.numbers, x.numel())
                self.shapes += [] if x.is_meta else [x.shape]
        return made
