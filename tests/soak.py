"""Kill runs, damage files, give odd flags, start two at once: docs/promises.md, put to the test.

    python tests/soak.py                # 500 command lines, 500 files, 300 kills, ...: hours
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
from tqdm import tqdm

import common
from config import ModelConfig
from training.checkpoints import load_checkpoint, tables_folder
from training.records import archive_previous_run
from training.settings import Settings

NUMBERS = dict(commands=500, files=500, pairs=50, edits=100, limits=100, kills=300)
QUICK = dict(commands=8, files=6, pairs=1, edits=2, limits=1, kills=2)
NAMES = ("train", "sample", "edit", "prepare", "convert")
COMMANDS = {name: importlib.import_module(name) for name in NAMES}
OFFLOAD = ("none", "cpu", "disk")
STAGES = ("pretrain", "midtrain", "mixture", "sft")  # mixture: midtrain on two folders
TIMEOUT = 120  # seconds after which a command counts as hung: they take one or two
MEMORY = 4 << 30  # bytes that a command may have beside what is mapped already
SIZES = dict(n_layer=2, n_head=2, n_embd=16, block_size=16)
RUN = dict(
    device="cpu", dtype="float32", batch_size=4, max_iters=6, eval_interval=2, eval_tokens=64
)
ENDED = (0, 1, 2)  # exit codes
KILLED = -signal.SIGKILL
FORK = multiprocessing.get_context("fork")


class Broken(Exception):
    """A promise was not kept."""


# --- commands ---


class Command:
    """A command in a fork of this process, in a folder. `before` is called there first."""

    def __init__(self, folder: Path, *args, before: Callable[[], object] = lambda: None):
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.argv = [str(part) for part in args]
        self.process = FORK.Process(target=self.run, args=(folder, before))
        self.process.start()

    def run(self, folder: Path, before: Callable[[], object]) -> None:
        """In the fork."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(self.stderr.fileno(), 2)
        sys.stdout = open(1, "w")  # noqa: SIM115
        sys.stderr = open(2, "w", errors="backslashreplace")  # noqa: SIM115
        os.chdir(folder)
        tqdm.set_lock(threading.RLock())  # whoever is killed must not hold the parent's
        mapped = int(Path("/proc/self/statm").read_text().split()[0])
        limit = mapped * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        sys.argv = self.argv
        before()
        common.run(COMMANDS[self.argv[0]].main)

    def wait(self, seconds: float = TIMEOUT, ok: tuple[int, ...] = ENDED) -> int:
        """Wait for its end, and kill it after so many seconds. Returns its exit code, as of a
        shell. Broken: one that is not `ok`, or 1 or 2 without the one line that is promised."""
        self.process.join(seconds)
        self.process.kill()
        self.process.join()
        code = self.process.exitcode
        with self.stderr:
            self.stderr.seek(0)
            error = self.stderr.read()
        kept = code in ok
        if code == 1:
            errors = [line for line in error.splitlines() if line.startswith("error: ")]
            kept = kept and len(errors) == 1 and "Traceback" not in error
        if code == 2:
            kept = kept and "usage: " in error
        if not kept:
            raise Broken(f"{self.argv!r:.900} exit code {code}: {error[-2000:]}")
        return code


def at_operations(folder: Path, do: Callable[[int], object]) -> None:
    """From now on, before each operation on a file in a folder: `do` is given its number."""
    events = ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate")
    numbers = itertools.count(1)

    def hook(event: str, args: tuple) -> None:
        if event in events and str(args[0]).startswith(str(folder)):
            do(next(numbers))

    sys.addaudithook(hook)


def kill_before(folder: Path, last: int) -> None:
    """Die before operation number `last` on a file in a folder."""

    def die(number: int) -> None:
        if number == last:
            os.kill(os.getpid(), signal.SIGKILL)

    at_operations(folder, die)


def limit_files(size: int) -> None:
    """Let no file grow beyond so many bytes: a full disk, but for messages."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def disturbance(run: Path, rng: random.Random, folder: Path, most: int, limited: bool) -> Callable:
    """What disturbs a command that writes to a folder: a kill before one of its first `most`
    operations, or a limit of file sizes, a part of the size of the run's ckpt.pt."""
    if limited:
        size = int((run / "ckpt.pt").stat().st_size * rng.uniform(0, 1.05))
        return partial(limit_files, max(4096, size))
    return partial(kill_before, folder, rng.randint(1, most))


# --- what undisturbed runs come to ---


def state(ckpt: Path) -> str:
    """All that training goes on from, wherever tables are, to the bit."""

    def digest(tensor: torch.Tensor) -> str:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(raw.numpy()).hexdigest()

    checkpoint = load_checkpoint(ckpt)
    parts = [checkpoint[part] for part in ("model", "optimizer", "step", "config")]
    return json.dumps(parts, sort_keys=True, default=digest)


def losses(folder: Path) -> list[tuple]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(r["step"], r["train_loss"]) for r in records if r["type"] == "step"]


def as_flags(**settings) -> list:
    return [part for name, value in settings.items() for part in (f"--{name}", value)]


def sampling(run: Path) -> list:
    return ["sample", *as_flags(ckpt=run / "ckpt.pt", device="cpu", max_new_tokens=8)]


def editing(run: Path) -> list:
    names = as_flags(source="Anna", target="Björn", prompt="Anna sees")
    return ["edit", *as_flags(ckpt=run / "ckpt.pt", device="cpu"), *names]


class World:
    """Small data, and the runs that all trials are compared with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.operations: dict[str, int] = {}  # of files, by run
        self.seconds: dict[str, float] = {}
        rng = random.Random(0)
        names = ("Anna", "Björn", "Chloë")
        for kind in ("text", "chat"):
            path = folder / f"{kind}.jsonl"
            with open(path, "w") as file:
                for _ in range(60):
                    sentence = f"{rng.choice(names)} sees {rng.choice(names)} at the river."
                    document = dict(text=6 * f"{sentence} ")
                    if kind == "chat":
                        messages = [("user", "Who?"), ("assistant", sentence)]
                        document = dict(messages=[dict(role=r, content=c) for r, c in messages])
                    file.write(json.dumps(document) + "\n")
            args = as_flags(input=path, out_dir=folder / kind, val_fraction=0.2)
            args += ["--vocab_size", 280] if kind == "text" else ["--tokenizer", folder / "text"]
            Command(folder, "prepare", *args).wait(ok=(0,))

    @cache  # noqa: B019
    def run(self, name: str) -> Path:
        """The folder of an undisturbed run, which is trained when it is first asked for: of a
        stage; half-OFFLOAD, which stopped half-way; old-OFFLOAD, to be replaced; dense; init, which
        goes on from a half one."""
        out = self.folder / name
        kind, _, offload = name.partition("-")
        command = self.flags(kind if kind in STAGES else "pretrain", out, offload or "none")
        if kind == "init":
            command = self.flags("midtrain", out, init=self.run("half-none"))
        elif kind == "old":
            command += ["--seed", 1]
        elif kind == "dense":
            command = [*self.flags("pretrain", out, None), "--ffn", "dense"]

        count = FORK.Value("i")
        schedule = COMMANDS["train"].schedule

        def stop_half_way(step: int, settings: Settings) -> float:
            if (kind, step) == ("half", 4):
                os.kill(os.getpid(), signal.SIGKILL)
            return schedule(step, settings)

        def before() -> None:
            COMMANDS["train"].schedule = stop_half_way
            at_operations(out, partial(setattr, count, "value"))

        start = time.monotonic()
        run = Command(self.folder, *command, before=before)
        run.wait(ok=(KILLED if kind == "half" else 0,))
        self.operations[name] = count.value
        self.seconds[name] = time.monotonic() - start
        return out

    @cache  # noqa: B019
    def state(self, name: str) -> str:
        return state(self.run(name) / "ckpt.pt")

    def flags(
        self,
        stage: str,
        out: Path,
        offload: str | None = "none",
        data: Path | None = None,
        init: Path | None = None,
    ) -> list:
        text, chat = self.folder / "text", self.folder / "chat"
        folders = dict(sft=chat, mixture=f"{text}=0.7,{chat}=0.3")
        flags = as_flags(data_dir=data or folders.get(stage, text), out_dir=out, **RUN)
        if offload is not None:
            flags += ["--offload", offload]
        if stage == "pretrain":
            return ["train", *flags, *as_flags(**SIZES)]
        stage = "midtrain" if stage == "mixture" else stage
        init = init or self.run("pretrain")
        return ["train", *flags, "--stage", stage, "--init_from", init / "ckpt.pt"]

    def check(self, out: Path, stage: str, offload: str | None = None) -> None:
        """Broken: a finished run is not equal to the undisturbed one, or left something."""
        if state(out / "ckpt.pt") != self.state(stage):
            raise Broken("another result than that of an undisturbed run")
        if losses(out) != losses(self.run(stage)):
            raise Broken("other losses than those of an undisturbed run")
        left = [path.name for pattern in ("*.tmp", "*live*") for path in out.glob(pattern)]
        snapshots = list(tables_folder(out / "ckpt.pt").glob("*"))
        if left or (offload and len(snapshots) != (offload == "disk")):
            raise Broken(f"left behind: {left}, {snapshots}")


# --- the kinds of trials: each gets a world, chance and a folder, and returns its outcome ---


def kills(world: World, rng: random.Random, folder: Path, limited: bool = False) -> str:
    """A run is killed or has no room, maybe while it replaces another one, beside which an edit is
    saved, or once more when it has been resumed, and is then brought to its end."""
    out = folder / "out"
    stage, offload = rng.choice(STAGES), rng.choice(OFFLOAD)
    old = rng.choice([None, *OFFLOAD])
    if old:
        shutil.copytree(world.run(f"old-{old}"), out)
        old_state = world.state(f"old-{old}")
        Command(folder, *editing(out), "--save", out / "edited.pt").wait(ok=(0,))
        edited_state = state(out / "edited.pt")
    command = world.flags(stage, out, offload)
    world.run(stage)
    for _ in range(rng.choice((1, 1, 2))):
        most = int(1.3 * world.operations[stage])
        before = disturbance(world.run(stage), rng, out, most, limited)
        seconds = TIMEOUT
        if not limited and rng.random() < 0.5:
            before = lambda: None  # noqa: E731
            seconds = rng.random() * world.seconds[stage]
        Command(folder, *command, before=before).wait(seconds, (*ENDED, KILLED))
        if (out / "run1").exists() and not (out / "run1" / "ckpt.pt").exists():
            archive_previous_run(out)  # what the next new run would do
        found = [path for path in (out, *out.glob("run[0-9]")) if (path / "ckpt.pt").exists()]
        if old and old_state not in [state(path / "ckpt.pt") for path in found]:
            raise Broken("the run that was to be replaced is whole nowhere")
        if out in found and not (old and state(out / "ckpt.pt") == old_state):
            command = ["train", "--resume", "--out_dir", out]
    Command(folder, *command).wait(ok=(0,))
    world.check(out, stage, offload)
    for path in out.glob("run[0-9]/ckpt.pt"):
        if state(path) != old_state:
            raise Broken(f"{path} is another run than the one that was replaced")
    if old and state(out / "edited.pt") != edited_state:
        raise Broken("an edit that was saved beside the run is another model")
    kind = "mixture, equal" if stage == "mixture" else "equal"
    return f"{kind} to the bit" + (", the replaced run whole" if old else "")


def edits(world: World, rng: random.Random, folder: Path) -> str:
    """An edit in place is killed or has no room, and made again, or two are made at once. Then all
    are undone."""
    offload = rng.choice(OFFLOAD)
    way = rng.choice(("killed", "no room", "two at once"))
    out = shutil.copytree(world.run(f"old-{offload}"), folder / "out")
    ckpt = out / "ckpt.pt"
    want = state(ckpt)
    edit = [*editing(out), "--save", ckpt]
    if way == "two at once":
        first = Command(folder, *edit)
        time.sleep(0.3 * rng.random())
        n_done = [each.wait() for each in (Command(folder, *edit), first)].count(0)
    else:
        before = disturbance(out, rng, out, 40, way == "no room")
        Command(folder, *edit, before=before).wait(ok=(*ENDED, KILLED))
        n_done = 1 if state(ckpt) == want else 2
        Command(folder, *edit).wait(ok=(0,))
    for _ in range(n_done):
        Command(folder, "edit", "--undo", "--ckpt", ckpt).wait(ok=(0,))
    snapshots = list(tables_folder(ckpt).glob("*"))
    left = [*load_checkpoint(ckpt)["edits"], *out.glob("*.tmp"), *snapshots[1:]]
    if left or state(ckpt) != want:
        raise Broken(f"{way}: {n_done} edits were undone, {left} is left, or the model is another")
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
    text = folder / "text.jsonl"
    shutil.copytree(world.run(f"half-{rng.choice(('none', 'disk'))}"), half)
    shutil.copytree(world.folder / "text", data)
    shutil.copy(world.folder / "text.jsonl", text)
    # What is damaged, the command that reads it and, if it trains, the undisturbed run.
    readers = [
        (half, ["train", "--resume", "--out_dir", half], "pretrain"),
        (half, ["train", "--resume", "--out_dir", half], "pretrain"),
        (half, world.flags("midtrain", out, init=half), "init"),
        (half, ["train", "--eval_only", "--out_dir", half], None),
        (half, sampling(half), None),
        (half, [*sampling(half), "--offload", "disk"], None),
        (half, editing(half), None),
        (data, world.flags("pretrain", out, rng.choice(OFFLOAD), data), "pretrain"),
        (data, world.flags("pretrain", out, "none", data), "pretrain"),
        (data, ["prepare", "--input", text, "--out_dir", out, "--tokenizer", data], None),
        (text, ["prepare", "--input", text, "--out_dir", out, "--vocab_size", 280], None),
    ]
    damaged, command, result = rng.choice(readers)
    found = [path for path in (damaged, *damaged.rglob("*")) if path.is_file()]
    path = rng.choice(sorted(path for path in found if path.stat().st_size))
    way = damage(path, rng)
    if Command(folder, *command).wait():
        return f"{way}: refused in one line"
    trained = half if "--resume" in command else out
    if result and state(trained / "ckpt.pt") != world.state(result):
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
    name = rng.choice(["train"] * 4 + ["sample"] * 2 + ["edit", "prepare", "convert"])
    out = folder / "out"
    given = {
        "train": world.flags(rng.choice(STAGES), out, rng.choice(OFFLOAD)),
        "sample": [*sampling(world.run("pretrain")), "--prompt", "Anna"],
        "edit": editing(world.run("pretrain")),
        "prepare": ["prepare", "--input", world.folder / "text.jsonl", "--out_dir", out],
        "convert": ["convert", world.run("dense") / "ckpt.pt", "--ffn", "stem", "--out", out],
    }[name]
    if name == "train" and rng.random() < 0.3:
        shutil.copytree(world.run("half-disk"), out)
        given = ["train", "--resume", "--out_dir", out]
    kinds = [Settings, ModelConfig]
    if name != "train":
        found = vars(COMMANDS[name]).values()
        kinds = [kind for kind in found if is_dataclass(kind) and kind.__module__ == name]
    settings = [each for kind in kinds for each in fields(kind) if "about" in each.metadata]
    for setting in rng.sample(settings, min(len(settings), rng.choice((1, 1, 2, 3)))):
        if "bool" in str(setting.type):
            given.append(f"--{setting.name}")
            continue
        types = [kind for kind in (int, float) if kind.__name__ in str(setting.type)]
        given.append(f"--{setting.name}={rng.choice(ODD[types[0] if types else str])}")
    return ("it ran", "one line", "usage")[Command(folder, *given).wait()]


def pairs(world: World, rng: random.Random, folder: Path) -> str:
    """Two commands at once."""
    out = folder / "out"
    kind = rng.choice(("train", "resume", "prepare", "sample"))
    offload = "disk" if kind == "sample" else rng.choice(OFFLOAD)
    new = world.flags("pretrain", out, offload)
    world.run("pretrain")
    if kind == "prepare":
        prepare = ["prepare", "--input", world.folder / "text.jsonl", "--out_dir", out]
        both = [Command(folder, *prepare, "--vocab_size", size) for size in (270, 280)]
        codes = [each.wait() for each in both]
        more = world.flags("pretrain", folder / "run", data=out)
        Command(folder, *more).wait(ok=(0,) if 0 in codes else ENDED)
        return f"{kind}: {codes.count(1)} refused"
    first = Command(folder, *new)
    codes = []
    if kind == "sample":
        while first.process.is_alive():
            if (out / "ckpt.pt").exists():
                Command(folder, *sampling(out)).wait(ok=(0,))
    else:
        time.sleep(rng.random() * world.seconds["pretrain"])
        again = ["train", "--resume", "--out_dir", out] if kind == "resume" else new
        codes = [Command(folder, *again).wait()]
    first.wait(ok=(0,) if 0 not in codes else ENDED)
    world.check(out, "pretrain")
    return f"{kind}: {codes.count(1)} refused"


TRIALS = dict(commands=commands, files=files, pairs=pairs, edits=edits, kills=kills)
TRIALS["limits"] = partial(kills, limited=True)


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
    start = time.monotonic()
    n_broken = 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "world").mkdir()
        world = World(Path(folder) / "world")
        for name in [args.only] if args.only else NUMBERS:
            outcomes: Counter[str] = Counter()
            n = args.n or (QUICK if args.quick else NUMBERS)[name]
            for number in tqdm(range(args.first, args.first + n), desc=name, unit="trial"):
                here = Path(folder) / "trial"
                here.mkdir()
                rng = random.Random(f"{args.seed} {name} {number}")
                try:
                    outcomes[TRIALS[name](world, rng, here)] += 1
                except Exception as error:
                    why = error if isinstance(error, Broken) else traceback.format_exc()
                    tqdm.write(f"--only {name} --seed {args.seed} --first {number} --n 1: {why}")
                    n_broken += 1
                shutil.rmtree(here)
            text = "; ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            rows.append(f"| {name} | {n} | {outcomes.total()} | {text} |")
    print("\n| trials | tried | held | what it came to |", "|---|---|---|---|", *rows, sep="\n")
    print(f"\nseed {args.seed}, {time.monotonic() - start:.0f} s, {n_broken} broken promises")
    sys.exit(bool(n_broken))


if __name__ == "__main__":
    main()
