"""Kill runs, damage files, give odd flags, start two at once: docs/promises.md, put to the test.

    python tests/soak.py                # 500 command lines, 500 files, 400 kills, ...: hours
    python tests/soak.py --quick        # a few of each
    python tests/soak.py --only files --n 50 --seed 7
    python tests/soak.py --only kills --first 17 --n 1          # one of them again

A trial fails if it ends in a traceback, a hang, or a signal that nobody sent, if it prints more or
less than one line, loses work, or exits with 0 and another result than an undisturbed run, to the
bit. Every command runs in a fork of this process, which imports PyTorch once and has one thread.
"""

import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch._dynamo  # which every optimizer would import anew
from conftest import EDIT, flags, losses, write_story
from tqdm import tqdm

import common
from config import ModelConfig
from training.checkpoints import load_checkpoint, tables_folder
from training.records import archive_previous_run
from training.settings import Settings

NUMBERS = dict(commands=500, files=500, pairs=50, edits=100, kills=400)
QUICK = dict(commands=8, files=6, pairs=1, edits=2, kills=3)
NAMES = ("train", "sample", "edit", "prepare", "convert")
COMMANDS = {name: importlib.import_module(name) for name in NAMES}
OFFLOAD = ("none", "cpu", "disk")
STAGES = ("pretrain", "midtrain", "mixture")  # mixture: midtrain on two folders
SIZES = flags(n_layer=2, n_head=2, n_embd=16, block_size=16)
RUN = flags(device="cpu", batch_size=4, max_iters=6, eval_interval=2, eval_tokens=64)
TIMEOUT = 120  # seconds after which a command counts as hung: they take one or two
MEMORY = 4 << 30  # bytes that a command may have beside what is mapped already
OPERATIONS = 400  # on files, about what a run makes
ENDED = (0, 1, 2)  # exit codes
KILLED = -signal.SIGKILL
FORK = multiprocessing.get_context("fork")


class Broken(Exception):
    """A promise was not kept."""


# --- commands ---


class Command:
    """A command in a fork of this process. There, `disturb` is called first."""

    def __init__(self, *args, disturb: Callable[[], object] | None = None) -> None:
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.argv = [str(part) for part in args]
        self.process = FORK.Process(target=self.run, args=[disturb])
        self.process.start()

    def run(self, disturb: Callable[[], object] | None) -> None:
        """In the fork."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(self.stderr.fileno(), 2)
        sys.stdout = open(1, "w")  # noqa: SIM115
        sys.stderr = open(2, "w", errors="backslashreplace")  # noqa: SIM115
        tqdm.set_lock(threading.RLock())  # whoever is killed must not hold the parent's
        mapped = int(Path("/proc/self/statm").read_text().split()[0])
        limit = mapped * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        sys.argv = self.argv
        if disturb:
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


def kill_before(folder: Path, last: int) -> None:
    """Die before operation number `last` on a file in a folder."""
    events = ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate")
    numbers = itertools.count(1)

    def hook(event: str, args: tuple) -> None:
        if event in events and str(args[0]).startswith(str(folder)) and next(numbers) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill_in_step(last: int) -> None:
    schedule = COMMANDS["train"].schedule

    def killing(step: int, settings: Settings) -> float:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return schedule(step, settings)

    COMMANDS["train"].schedule = killing


def limit_files(size: int) -> None:
    """Let no file grow beyond so many bytes: a full disk, but for messages."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def disturbance(rng: random.Random, out: Path, like: Path, most: int) -> Callable:
    """What disturbs a command that writes to `out`: a kill before one of its first `most`
    operations on files, or in a step of training, or a limit of file sizes."""
    size = (like / "ckpt.pt").stat().st_size
    kill = partial(kill_before, out, rng.randint(1, most))
    limit = partial(limit_files, max(4096, int(size * rng.uniform(0, 1.05))))
    return rng.choice((kill, kill, partial(kill_in_step, rng.randrange(6)), limit))


# --- what undisturbed runs come to ---


def state(out: Path, name: str = "ckpt.pt") -> str:
    """All that training goes on from, wherever tables are, to the bit."""

    def digest(tensor: torch.Tensor) -> str:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(raw.numpy()).hexdigest()

    checkpoint = load_checkpoint(out / name)
    parts = [checkpoint[part] for part in ("model", "optimizer", "step", "config")]
    return json.dumps(parts, sort_keys=True, default=digest)


def leftovers(out: Path) -> list[Path]:
    snapshots = list(tables_folder(out / "ckpt.pt").glob("*"))
    return [*out.glob("*.tmp"), *out.glob("*live*"), *snapshots[1:]]


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

    def flags(self, stage: str, out: Path, data: Path | None = None, init: Path | None = None):
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
    def run(self, stage: str, *more, until: int | None = None, init: Path | None = None) -> Path:
        """The folder of an undisturbed run, trained when it is first asked for, or of one that was
        killed in step `until`."""
        out = Path(tempfile.mkdtemp(dir=self.folder)) / "out"
        command = [*self.flags(stage, out, init=init), *more]
        if until is None:
            Command(*command).wait(0)
        else:
            Command(*command, disturb=partial(kill_in_step, until)).wait(KILLED)
        return out

    def half(self, offload: str) -> Path:
        return self.run("pretrain", "--offload", offload, until=5)

    def check(self, out: Path, like: Path) -> None:
        """Broken: a finished run is not equal to the undisturbed one, or left something."""
        if state(out) != state(like) or losses(out) != losses(like):
            raise Broken("another result than that of an undisturbed run")
        if leftovers(out):
            raise Broken(f"left behind: {leftovers(out)}")


# --- the kinds of trials: each gets a world, chance and a folder, and returns its outcome ---


def kills(world: World, rng: random.Random, folder: Path) -> str:
    """A run is killed or has no room, maybe while it replaces another one, beside which an edit is
    saved, or once more when it has been resumed, and is then brought to its end."""
    out = folder / "out"
    stage = rng.choice(STAGES)
    replaces = rng.random() < 0.7
    if replaces:
        old = world.run("pretrain", "--offload", rng.choice(OFFLOAD), "--seed", 1)
        shutil.copytree(old, out)
        Command("edit", "--ckpt", out / "ckpt.pt", *EDIT, "--save", out / "edited.pt").wait(0)
        edited = state(out, "edited.pt")
    command = [*world.flags(stage, out), "--offload", rng.choice(OFFLOAD)]
    like = world.run(stage)
    for _ in range(rng.choice((1, 1, 2))):
        disturb = disturbance(rng, out, like, OPERATIONS)
        Command(*command, disturb=disturb).wait(*ENDED, KILLED)
        if (out / "run1").exists() and not (out / "run1" / "ckpt.pt").exists():
            archive_previous_run(out)  # what the next new run would do
        found = [path.parent for path in (*out.glob("ckpt.pt"), *out.glob("run[0-9]/ckpt.pt"))]
        if replaces and state(old) not in [state(path) for path in found]:
            raise Broken("the run that was to be replaced is whole nowhere")
        if out in found and not (replaces and state(out) == state(old)):
            command = ["train", "--resume", "--out_dir", out]
    Command(*command).wait(0)
    world.check(out, like)
    if replaces and state(out, "edited.pt") != edited:
        raise Broken("the edit beside the runs is another model")
    return f"{stage}: equal to the bit" + (", the replaced run whole" if replaces else "")


def edits(world: World, rng: random.Random, folder: Path) -> str:
    """An edit in place is disturbed, and made again, or two are made at once. Then all
    are undone."""
    way = rng.choice(("disturbed", "disturbed", "two at once"))
    run = world.run("pretrain", "--offload", rng.choice(OFFLOAD), "--seed", 1)
    out = shutil.copytree(run, folder / "out")
    edit = ["edit", "--ckpt", out / "ckpt.pt", *EDIT, "--save", out / "ckpt.pt"]
    if way == "two at once":
        both = [Command(*edit), Command(*edit)]
        n_done = [each.wait(*ENDED) for each in both].count(0)
    else:
        disturb = disturbance(rng, out, run, 40)
        Command(*edit, disturb=disturb).wait(*ENDED, KILLED)
        n_done = 1 if state(out) == state(run) else 2
        Command(*edit).wait(0)
    for _ in range(n_done):
        Command("edit", "--undo", "--ckpt", out / "ckpt.pt").wait(0)
    world.check(out, run)
    return f"{way}: {n_done} made and undone"


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file in one of many ways."""
    way = rng.choice(("flip", "flip", "flip", "cut", "other", "folder", "gone"))
    raw = bytearray(path.read_bytes())
    at = rng.randrange(len(raw))
    path.unlink()
    if way == "flip":
        raw[at] ^= 1 << rng.randrange(8)
    elif way == "cut":
        del raw[at:]
    elif way == "other":
        raw = rng.choice((b"", b"[" * 100_000, b"{}", b"null", b"\xff\xfe", b"PK\x03\x04", b"\n"))
    if way == "folder":
        path.mkdir()
    elif way != "gone":
        path.write_bytes(raw)
    return way


def files(world: World, rng: random.Random, folder: Path) -> str:
    """One file is damaged, then a command reads it. If training takes it without a word, its result
    must be what it is without the damage."""
    half, data, out = folder / "half", folder / "text", folder / "out"
    shutil.copytree(world.half(rng.choice(("none", "disk"))), half)
    shutil.copytree(world.text, data)
    story = Path(shutil.copy(world.story, folder))
    resumed, whole = ["train", "--resume", "--out_dir", half], world.run("pretrain")
    midtrain = world.flags("midtrain", out, init=half)
    # What is damaged, the command that reads it and, if it trains, the undisturbed run.
    readers = [
        (half, resumed, whole),
        (half, resumed, whole),
        (half, midtrain, world.run("midtrain", init=world.half("none"))),
        (half, ["train", "--eval_only", "--out_dir", half], None),
        (half, ["sample", "--ckpt", half / "ckpt.pt", "--offload", rng.choice(OFFLOAD)], None),
        (half, ["edit", "--ckpt", half / "ckpt.pt", *EDIT], None),
        (data, world.flags("pretrain", out, data), whole),
        (data, world.flags("pretrain", out, data), whole),
        (data, ["prepare", "--input", story, "--out_dir", out, "--tokenizer", data], None),
        (story, ["prepare", "--input", story, "--out_dir", out, "--vocab_size", 280], None),
    ]
    damaged, command, like = rng.choice(readers)
    found = [path for path in (damaged, *damaged.rglob("*")) if path.is_file()]
    path = rng.choice(sorted(path for path in found if path.stat().st_size))
    way = damage(path, rng)
    if Command(*command).wait(*ENDED):
        return f"{way}: refused in one line"
    if like and state(half if command == resumed else out) != state(like):
        raise Broken(f"{way} in {path.name}: another result than without the damage")
    return f"{way}: nothing lost"


ODD = {
    int: (0, -1, 1, 3, 7, 10**9, 10**12, 2**63, -(2**70), 10**400, "1e3", "nan", "", "x", "0x10"),
    float: (0, -1, 0.5, 1e-9, 1e9, "nan", "inf", "-inf", 1e-320, 1e38, 1e308, "-0.0", "", "x"),
    str: ("", "x" * 300, "a$\\frac$", "\udcff", ".", "gone", "-", "a=b,c=d", "0,1", "-1", "9" * 30,
          "\n", "%s%n", "a=nan,b=1", "text=1,text=1", "=1", "../trial/x"),
}  # fmt: skip


def commands(world: World, rng: random.Random, folder: Path) -> str:
    """A command with a few odd values."""
    out = folder / "out"
    ckpt = world.run("pretrain") / "ckpt.pt"
    dense = world.run("pretrain", "--ffn", "dense") / "ckpt.pt"
    half = shutil.copytree(world.half("disk"), folder / "half")
    given = rng.choice(
        [
            *(world.flags(stage, out) for stage in STAGES),
            ["train", "--resume", "--out_dir", half],
            ["sample", "--ckpt", ckpt, "--max_new_tokens", 8],
            ["edit", "--ckpt", ckpt, *EDIT],
            [*world.prepare, out],
            ["convert", dense, "--ffn", "stem", "--data_dir", world.text, "--out", out],
        ]
    )
    kinds = [Settings, ModelConfig]
    if given[0] != "train":
        kinds = [kind for kind in vars(COMMANDS[given[0]]).values() if is_dataclass(kind)]
        kinds = [kind for kind in kinds if kind.__module__ == given[0]]
    settings = [each for kind in kinds for each in fields(kind) if "about" in each.metadata]
    for setting in rng.sample(settings, min(len(settings), rng.choice((1, 1, 2, 3)))):
        given.append(f"--{setting.name}")
        if "bool" not in str(setting.type):
            types = [kind for kind in (int, float) if kind.__name__ in str(setting.type)]
            given[-1] += f"={rng.choice(ODD[types[0] if types else str])}"
    return given[0] + (" ran", ": one line", ": usage")[Command(*given).wait(*ENDED)]


def pairs(world: World, rng: random.Random, folder: Path) -> str:
    """Two commands at once."""
    out = folder / "out"
    like = world.run("pretrain")
    new = [*world.flags("pretrain", out), "--offload", rng.choice(OFFLOAD)]
    kind = rng.choice(("train", "resume", "prepare", "sample"))
    if kind == "prepare":
        both = [Command(*world.prepare, out), Command(*world.prepare, out)]
        codes = [each.wait(0, 1) for each in both]
        Command(*world.flags("pretrain", folder / "run", data=out)).wait(0)
        return f"{kind}: {codes.count(1)} refused"
    first = Command(*new)
    codes = [0]
    if kind == "sample":
        while first.process.is_alive():
            if (out / "ckpt.pt").exists():
                Command("sample", "--ckpt", out / "ckpt.pt", "--max_new_tokens", 8).wait(0)
    else:
        time.sleep(2 * rng.random())
        again = ["train", "--resume", "--out_dir", out] if kind == "resume" else new
        codes = [Command(*again).wait(*ENDED)]
    codes.append(first.wait(*ENDED))
    world.check(out, like)
    return f"{kind}: {codes.count(1)} refused"


TRIALS = dict(commands=commands, files=files, pairs=pairs, edits=edits, kills=kills)


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a few of each")
    parser.add_argument("--only", choices=NUMBERS, help="one kind of trials")
    parser.add_argument("--n", type=int, help="how many of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of all chance (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # no thread: a fork would take over what it holds
    n_broken = 0
    print("| trials | tried | held | what it came to |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for name in [args.only] if args.only else NUMBERS:
            outcomes: Counter[str] = Counter()
            n = args.n or (QUICK if args.quick else NUMBERS)[name]
            for number in tqdm(range(args.first, args.first + n), desc=name, disable=None):
                here = Path(folder) / "trial"
                here.mkdir()
                os.chdir(here)
                rng = random.Random(f"{args.seed} {name} {number}")
                try:
                    outcomes[TRIALS[name](world, rng, here)] += 1
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
