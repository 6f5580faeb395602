"""Kill runs, damage files, give odd flags, start two at once: do promises hold?

They are those of docs/data-and-stages.md.

    python tests/soak.py                # 500 command lines, 500 files, 400 kills, ...: hours
    python tests/soak.py --quick        # a few of each
    python tests/soak.py --only files --n 50 --seed 7
    python tests/soak.py --only kills --first 17 --n 1          # one of them again

A trial fails if it ends in a traceback, a hang, or a signal that nobody sent, if it prints more or
less than one line, loses work, or exits with 0 and another result than an undisturbed run, to the
bit. Every command runs in a fork of this process, which imports PyTorch once and has one thread.
"""

import importlib
import itertools
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
import torch._dynamo  # which every optimizer would import anew
from conftest import EDIT, cut_in_step, flags, leaves, losses, write_story

import common
from model import ModelConfig
from training.checkpoints import load_checkpoint, tables_folder

NAMES = ("train", "sample", "edit", "prepare", "convert")
COMMANDS = {name: importlib.import_module(name) for name in NAMES}
OFFLOAD = ("none", "cpu", "disk")
STAGES = ("pretrain", "midtrain", "mixture")  # mixture: midtrain on two folders
SIZES = flags(n_layer=2, n_head=2, n_embd=16, block_size=16)
RUN = flags(device="cpu", batch_size=4, max_iters=6, eval_interval=2, eval_tokens=64)
TIMEOUT = 120  # seconds after which a command counts as hung: they take one or two
MEMORY = 4 << 30  # bytes that a command may have
OPERATIONS = 400  # on files, about what a run makes
ENDED = (0, 1, 2)  # exit codes
KILLED = -signal.SIGKILL
FORK = multiprocessing.get_context("fork")


class Broken(Exception):
    """A promise was not kept."""


# --- commands ---


class Command:
    """A command in a fork of this process. There, `disturb` is called first."""

    def __init__(self, *args, disturb: Callable[[], object] = lambda: None) -> None:
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.argv = [str(part) for part in args]
        self.process = FORK.Process(target=self.run, args=[disturb])
        self.process.start()

    def run(self, disturb: Callable[[], object]) -> None:
        """In the fork."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(self.stderr.fileno(), 2)
        sys.stdout = open(1, "w")  # noqa: SIM115
        sys.stderr = open(2, "w", errors="backslashreplace")  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        sys.argv = self.argv
        disturb()
        common.run(COMMANDS[self.argv[0]].main)

    def wait(self, *ok: int) -> int:
        """Wait for its end. Returns its exit code, as of a shell. Broken: one that is not `ok`, or
        1 or 2 without the one line that is promised."""
        self.process.join(TIMEOUT)
        self.process.kill()
        self.process.join()
        code = self.process.exitcode
        with self.stderr:
            self.stderr.seek(0)
            error = self.stderr.read()
        kept = code in ok
        if code == 1:
            kept = kept and error.count("error: ") == 1 and "Traceback" not in error
        if code == 2:
            kept = kept and "usage: " in error
        if not kept:
            raise Broken(f"{self.argv!r:.900} exit code {code}: {error[-2000:]}")
        return code


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_before(folder: Path, last: int) -> None:
    """Die before operation number `last` on a file in a folder."""
    events = ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate")
    numbers = itertools.count(1)

    def hook(event: str, args: tuple) -> None:
        if event in events and str(args[0]).startswith(str(folder)) and next(numbers) == last:
            die()

    sys.addaudithook(hook)


def kill_in_step(number: int) -> None:
    cut_in_step(pytest.MonkeyPatch(), number, do=die)


def limit_files(size: int) -> None:
    """Let no file grow beyond so many bytes: a full disk, but for messages."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def disturbance(rng: random.Random, out: Path, like: Path) -> Callable:
    """What disturbs a run that writes to `out`: a kill before an operation on files, or in a step
    of training, or a limit of file sizes."""
    size = (like / "ckpt.pt").stat().st_size
    kill = partial(kill_before, out, rng.randint(1, OPERATIONS))
    limit = partial(limit_files, max(4096, int(size * rng.uniform(0, 1.05))))
    return rng.choice((kill, kill, partial(kill_in_step, rng.randint(1, 6)), limit))


# --- what undisturbed runs come to ---


def state(out: Path, name: str = "ckpt.pt") -> dict:
    """All that training goes on from, wherever tables are, to the bit."""
    checkpoint = load_checkpoint(out / name)
    found = leaves([checkpoint[part] for part in ("model", "optimizer", "step", "config")])
    for place, leaf in found.items():
        if isinstance(leaf, torch.Tensor):
            raw = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
            found[place] = raw.numpy().tobytes()
    return found


def check_equal(out: Path, like: Path) -> None:
    """Broken: a finished run is not equal to the undisturbed one, or left something."""
    if state(out) != state(like) or losses(out) != losses(like):
        raise Broken("another result than that of an undisturbed run")
    snapshots = list(tables_folder(out / "ckpt.pt").glob("*"))
    left = [*out.glob("*.tmp"), *out.glob("*live*"), *snapshots[1:]]
    if left:
        raise Broken(f"left behind: {left}")


class World:
    """Small data, and the runs that all trials are compared with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = folder / "text"
        self.story = folder / "story.jsonl"
        write_story(self.story, 60)
        self.prepare = ["prepare", "--input", self.story, "--vocab_size", 280, "--out_dir"]
        Command(*self.prepare, self.text).wait(0)
        shutil.copytree(self.text, folder / "more")

    def train(self, stage: str, out: Path, data: Path | None = None, init: Path | None = None):
        """A command that trains."""
        data = data or self.text
        if stage == "mixture":
            data = f"{self.text}=0.7,{self.folder / 'more'}=0.3"
        command = ["train", *RUN, "--data_dir", data, "--out_dir", out]
        if stage == "pretrain":
            return [*command, *SIZES]
        init = init or self.run("pretrain")
        return [*command, "--stage", "midtrain", "--init_from", init / "ckpt.pt"]

    @cache  # noqa: B019
    def run(self, stage: str, *more, killed: bool = False, init: Path | None = None) -> Path:
        """The folder of an undisturbed run, trained when it is first asked for, or of one that was
        `killed` in its last step."""
        out = Path(tempfile.mkdtemp(dir=self.folder)) / "out"
        command = [*self.train(stage, out, init=init), *more]
        if killed:
            Command(*command, disturb=partial(kill_in_step, 6)).wait(KILLED)
        else:
            Command(*command).wait(0)
        return out

    def half(self, offload: str) -> Path:
        return self.run("pretrain", "--offload", offload, killed=True)


# --- the kinds of trials: each gets a world, chance and a folder, and returns its outcome ---


def kills(world: World, rng: random.Random, folder: Path) -> str:
    """A run is killed or has no room, maybe while it replaces another one, beside which an edit is
    saved, or once more when it has been resumed, and is then brought to its end."""
    out = folder / "out"
    stage = rng.choice(STAGES)
    command = [*world.train(stage, out), "--offload", rng.choice(OFFLOAD)]
    replaces = rng.random() < 0.7
    before = None  # the state of the run that is replaced
    if replaces:
        old = world.run("pretrain", "--offload", rng.choice(OFFLOAD), "--seed", 1)
        shutil.copytree(old, out)
        Command("edit", "--ckpt", out / "ckpt.pt", *EDIT, "--save", out / "edited.pt").wait(0)
        edited = state(out, "edited.pt")
        before = state(old)
        command.append("--overwrite")
    like = world.run(stage)
    for _ in range(rng.choice((1, 1, 2))):
        Command(*command, disturb=disturbance(rng, out, like)).wait(*ENDED, KILLED)
        if (out / "ckpt.pt").exists() and state(out) != before:
            command = ["train", "--resume", "--out_dir", out]
    Command(*command).wait(0)
    check_equal(out, like)
    if not replaces:
        return f"{stage}: equal to the bit"
    if state(out, "edited.pt") != edited:
        raise Broken("the edit beside the runs is another model")
    return f"{stage}: equal to the bit, in place of another run"


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file in one of many ways."""
    way = rng.choice(("flip", "flip", "flip", "cut", "other", "folder", "gone"))
    raw = bytearray(path.read_bytes())
    at = rng.randrange(len(raw))
    path.unlink()
    if way == "folder":
        path.mkdir()
        return way
    if way == "flip":
        raw[at] ^= 1 << rng.randrange(8)
    elif way == "cut":
        del raw[at:]
    elif way == "other":
        raw = rng.choice((b"", b"[" * 100_000, b"{}", b"null", b"\xff\xfe", b"PK\x03\x04", b"\n"))
    if way != "gone":
        path.write_bytes(raw)
    return way


def files(world: World, rng: random.Random, folder: Path) -> str:
    """One file is damaged, then a command reads it. If training takes it without a word, its result
    must be what it is without the damage."""
    out = folder / "out"
    half = shutil.copytree(world.half(rng.choice(("none", "disk"))), folder / "half")
    data = shutil.copytree(world.text, folder / "text")
    story = Path(shutil.copy(world.story, folder))
    ckpt = half / "ckpt.pt"
    prepare = ["prepare", "--input", story, "--out_dir", out]
    # What is damaged, and the command that reads it.
    readers = [
        (half, ["train", "--resume", "--out_dir", half]),
        (half, world.train("midtrain", out, init=half)),
        (half, ["train", "--eval_only", "--out_dir", half]),
        (half, ["sample", "--ckpt", ckpt, "--offload", rng.choice(OFFLOAD)]),
        (half, ["edit", "--ckpt", ckpt, *EDIT]),
        (data, world.train("pretrain", out, data)),
        (data, [*prepare, "--tokenizer", data]),
        (story, [*prepare, "--vocab_size", 280]),
    ]
    damaged, command = rng.choice(readers)
    found = [path for path in (damaged, *damaged.rglob("*")) if path.is_file()]
    path = rng.choice(sorted(path for path in found if path.stat().st_size))
    way = damage(path, rng)
    if Command(*command).wait(*ENDED):
        return f"{way}: refused in one line"
    if command[0] == "train" and "--eval_only" not in command:
        like = world.run("pretrain")
        if "--init_from" in command:
            like = world.run("midtrain", init=world.half("none"))
        if state(half if "--resume" in command else out) != state(like):
            raise Broken(f"{way} in {path.name}: another result than without the damage")
    return f"{way}: nothing lost"


ODD_NUMBERS = (0, -1, 1, 3, 7, 0.5, 10**9, 10**12, 2**63, -(2**70), 10**400, 1e-9, 1e38, 1e308,
               1e-320, "-0.0", "nan", "inf", "-inf", "1e3", "0x10", "", "x")  # fmt: skip
ODD_TEXTS = ("", "x" * 300, "a$\\frac$", "\udcff", ".", "gone", "-", "a=b,c=d", "0,1", "-1",
             "9" * 30, "\n", "%s%n", "a=nan,b=1", "text=1,text=1", "=1", "../trial/x")  # fmt: skip


def commands(world: World, rng: random.Random, folder: Path) -> str:
    """A command with a few odd values."""
    out = folder / "out"
    kind = rng.choice((*STAGES, "resume", "sample", "edit", "prepare", "convert"))
    if kind in STAGES:
        given = world.train(kind, out)
    elif kind == "resume":
        half = shutil.copytree(world.half("disk"), folder / "half")
        given = ["train", "--resume", "--out_dir", half]
    elif kind == "prepare":
        given = [*world.prepare, out]
    elif kind == "convert":
        dense = world.run("pretrain", "--ffn", "dense") / "ckpt.pt"
        given = ["convert", dense, "--ffn", "stem", "--data_dir", world.text, "--out", out]
    else:
        given = [kind, "--ckpt", world.run("pretrain") / "ckpt.pt", "--max_new_tokens", 8]
        if kind == "edit":
            given += EDIT
    kinds = [each for each in vars(COMMANDS[given[0]]).values() if is_dataclass(each)]
    if given[0] == "train":
        kinds.append(ModelConfig)
    settings = [each for kind in kinds for each in fields(kind) if "about" in each.metadata]
    settings = [each for each in settings if each.default is not MISSING]  # else it has no flag
    for setting in rng.sample(settings, min(len(settings), rng.choice((1, 1, 2, 3)))):
        of_number = "int" in str(setting.type) or "float" in str(setting.type)
        value = rng.choice(ODD_NUMBERS if of_number else ODD_TEXTS)
        is_switch = "bool" in str(setting.type)
        given.append(f"--{setting.name}" if is_switch else f"--{setting.name}={value}")
    return given[0] + (" ran", ": one line", ": usage")[Command(*given).wait(*ENDED)]


def pairs(world: World, rng: random.Random, folder: Path) -> str:
    """A run, and beside it another, one that resumes it, or samples from it."""
    out = folder / "out"
    kind = rng.choice(("train", "resume", "sample"))
    command = [*world.train("pretrain", out), "--offload", rng.choice(OFFLOAD)]
    first = Command(*command)
    codes = []
    if kind == "sample":
        while first.process.is_alive():
            if (out / "ckpt.pt").exists():
                Command("sample", "--ckpt", out / "ckpt.pt", "--max_new_tokens", 8).wait(0)
    else:
        if kind == "resume":
            command = ["train", "--resume", "--out_dir", out]
        time.sleep(2 * rng.random())
        codes.append(Command(*command).wait(*ENDED))
    codes.append(first.wait(*ENDED))
    check_equal(out, world.run("pretrain"))
    return f"{kind}: {codes.count(1)} refused"


# How many there are of each, and with --quick.
TRIALS = {
    "commands": (commands, 500, 4),
    "files": (files, 500, 3),
    "pairs": (pairs, 50, 1),
    "kills": (kills, 400, 1),
}


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a few of each")
    parser.add_argument("--only", choices=TRIALS, help="one kind of trials")
    parser.add_argument("--n", type=int, help="how many of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of all chance (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    args = parser.parse_args()
    torch.set_num_threads(1)
    n_broken = 0
    print("| trials | tried | held | what it came to |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        here = Path(folder) / "trial"
        for name in [args.only] if args.only else TRIALS:
            trial, n, n_quick = TRIALS[name]
            n = args.n or (n_quick if args.quick else n)
            outcomes: Counter[str] = Counter()
            for number in range(args.first, args.first + n):
                print(f"{name} {number}", end="\r", file=sys.stderr, flush=True)
                here.mkdir()
                os.chdir(here)
                try:
                    rng = random.Random(f"{args.seed} {name} {number}")
                    outcomes[trial(world, rng, here)] += 1
                except Exception as error:
                    why = error if isinstance(error, Broken) else traceback.format_exc()
                    print(f"--only {name} --seed {args.seed} --first {number} --n 1: {why}")
                    n_broken += 1
                shutil.rmtree(here)
            text = "; ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            print(f"| {name} | {n} | {outcomes.total()} | {text} |", flush=True)
    print(f"\nseed {args.seed}: {n_broken} broken promises")
    sys.exit(bool(n_broken))


if __name__ == "__main__":
    main()
