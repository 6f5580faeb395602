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
from training.checkpoints import load_checkpoint, save_checkpoint, snapshots
from training.records import archive_previous_run
from training.settings import Settings

NUMBERS = dict(commands=500, files=500, pairs=50, edits=100, limits=100, kills=300, analyses=50)
QUICK = dict(commands=10, files=6, pairs=1, edits=2, limits=1, kills=1, analyses=0)
NAMES = ("train", "sample", "edit", "prepare", "analyze", "bench")
COMMANDS = {name: importlib.import_module(name) for name in NAMES}
OFFLOAD = ("none", "cpu", "disk")
STAGES = ("pretrain", "midtrain", "mixture", "sft", "dpo")  # mixture: midtrain on two folders
TIMEOUT = 120  # seconds after which a command counts as hung: they take one or two
MEMORY = 4 << 30  # bytes that a command may have beside what is mapped already
SIZES = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, stem_layers="all")
RUN = dict(device="cpu", batch_size=4, max_iters=6, eval_interval=2, eval_tokens=64)
ENDED, KILLED = (0, 1, 2), -signal.SIGKILL  # exit codes
FORK = multiprocessing.get_context("fork")


class Broken(Exception):
    """A promise was not kept."""


class Command:
    """A command in a fork of this process, in a folder."""

    def __init__(self, folder: Path, name: str, *args, before: Callable[[], object] = lambda: 0):
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.argv = [f"{name}.py", *map(str, args)]
        self.process = FORK.Process(target=self.run, args=(folder, before))
        self.process.start()

    def run(self, folder: Path, before: Callable[[], object]) -> None:
        """In the fork."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(self.stderr.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w", errors="backslashreplace")  # noqa: SIM115
        os.chdir(folder)
        tqdm.set_lock(threading.RLock())  # whoever is killed must not hold the parent's
        mapped = int(Path("/proc/self/statm").read_text().split()[0])
        limit = mapped * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        sys.argv = self.argv
        before()
        common.run(COMMANDS[Path(self.argv[0]).stem].main)

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
        errors = [line for line in error.splitlines() if line.startswith("error: ")]
        promised = {1: len(errors) == 1 and "Traceback" not in error, 2: "usage: " in error}
        if code not in ok or not promised.get(code, True):
            raise Broken(f"{self.argv!r:.900} exit code {code}: {error[-2000:]}")
        return code


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_operations(folder: Path, do: Callable[[int], object]) -> None:
    """From now on, before each operation on a file in a folder: `do` is given its number."""
    events = ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate")
    numbers = itertools.count(1)

    def hook(event: str, args: tuple) -> None:
        if event in events and str(args[0]).startswith(str(folder)):
            do(next(numbers))

    sys.addaudithook(hook)


def killing(folder: Path, last: int | None) -> Callable:
    """What makes a command die before this operation on a file in a folder."""
    return partial(at_operations, folder, lambda n: n == last and die())


def limiting(run: Path, rng: random.Random) -> Callable:
    """What lets no file grow beyond a part of ckpt.pt's size: a full disk, but for messages."""
    size = max(4096, int((run / "ckpt.pt").stat().st_size * rng.uniform(0, 1.05)))
    return partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))


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
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
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
        self.folder, self.operations, self.seconds = folder, {}, {}
        rng, names = random.Random(0), ("Anna", "Björn", "Chloë")

        def sentence() -> str:
            verb = rng.choice(("sees", "follows", "meets"))
            return f"{rng.choice(names)} {verb} {rng.choice(names)} at the river."

        def talk(answer: str) -> list[dict]:
            return [dict(role="user", content="Who?"), dict(role="assistant", content=answer)]

        kinds = {
            "text": lambda: dict(text=" ".join(sentence() for _ in range(6))),
            "chat": lambda: dict(messages=talk(sentence())),
            "pairs": lambda: dict(chosen=talk(sentence()), rejected=talk("No.")),
        }
        for kind, make in kinds.items():
            path = folder / f"{kind}.jsonl"
            path.write_text("".join(json.dumps(make()) + "\n" for _ in range(60)))
            args = as_flags(input=path, out_dir=folder / kind, val_fraction=0.2)
            args += ["--vocab_size", 280] if kind == "text" else ["--tokenizer", folder / "text"]
            Command(folder, "prepare", *args).wait(ok=(0,))

    @cache  # noqa: B019
    def run(self, name: str) -> Path:
        """The folder of an undisturbed run, which is trained when it is first asked for: of a
        stage; half-OFFLOAD, which stopped half-way; old-OFFLOAD, to be replaced; init, which goes
        on from a half one."""
        out, (kind, _, offload) = self.folder / name, name.partition("-")
        if kind == "init":
            command = [*self.flags("midtrain", out)[:-1], self.run("half-none") / "ckpt.pt"]
        else:
            command = self.flags(kind if kind in STAGES else "pretrain", out, offload or "none")
            command += ["--seed", 1] * (kind == "old")

        count, start = FORK.Value("i"), time.monotonic()

        def saved(*parts, step: int, **more) -> None:
            save_checkpoint(*parts, step=step, **more)
            if (kind, step) == ("half", 4):
                die()

        def before() -> None:
            COMMANDS["train"].save_checkpoint = saved
            at_operations(out, partial(setattr, count, "value"))

        run = Command(self.folder, "train", *command, before=before)
        run.wait(ok=(KILLED if kind == "half" else 0,))
        self.operations[name], self.seconds[name] = count.value, time.monotonic() - start
        return out

    @cache  # noqa: B019
    def state(self, name: str) -> str:
        return state(self.run(name) / "ckpt.pt")

    def ask(self, out: Path) -> list:
        """A question for which runs are trained."""
        where = as_flags(out_dir=out, data_dir=self.folder / "text", device="cpu", jobs=2)
        return ["analyze", "geometry", "--quick", *where]

    @cache  # noqa: B019
    def analysis(self) -> Path:
        Command(self.folder, *self.ask(self.folder / "analysis")).wait(ok=(0,))
        return self.folder / "analysis"

    def flags(self, stage: str, out: Path, offload: str = "none", data: Path | None = None) -> list:
        text, chat, pairs = (self.folder / name for name in ("text", "chat", "pairs"))
        data = data or dict(sft=chat, dpo=pairs, mixture=f"{text}=0.7,{chat}=0.3").get(stage, text)
        flags = as_flags(data_dir=data, out_dir=out, offload=offload, **RUN)
        if stage == "pretrain":
            return [*flags, *as_flags(**SIZES)]
        stage = "midtrain" if stage == "mixture" else stage
        return [*flags, "--stage", stage, "--init_from", self.run("pretrain") / "ckpt.pt"]

    def check(self, out: Path, stage: str, offload: str | None = None) -> None:
        """Broken: a finished run is not equal to the undisturbed one, or left something."""
        if state(out / "ckpt.pt") != self.state(stage):
            raise Broken("another result than that of an undisturbed run")
        if losses(out) != losses(self.run(stage)):
            raise Broken("other losses than those of an undisturbed run")
        left = [path.name for pattern in ("*.tmp", "live*") for path in out.glob(pattern)]
        left += [path.name for path in snapshots(out)[offload == "disk" :]] if offload else []
        if left:
            raise Broken(f"left behind: {', '.join(left)}")


# --- the kinds of trials: each gets a world, chance and a folder, and returns its outcome ---


def kills(world: World, rng: random.Random, folder: Path, limited: bool = False) -> str:
    """A run is killed or has no room, maybe while it replaces another one or once more when it has
    been resumed, and is then brought to its end."""
    stage, offload, old = rng.choice(STAGES), rng.choice(OFFLOAD), rng.choice([None, *OFFLOAD])
    out, old_state = folder / "out", old and world.state(f"old-{old}")
    if old:
        shutil.copytree(world.run(f"old-{old}"), out)
    command = world.flags(stage, out, offload)
    world.run(stage)
    for _ in range(rng.choice((1, 1, 2))):
        last, seconds = rng.randint(1, int(1.3 * world.operations[stage])), TIMEOUT
        if rng.random() < 0.5:
            last, seconds = None, rng.random() * world.seconds[stage]
        before = limiting(world.run(stage), rng) if limited else killing(out, last)
        Command(folder, "train", *command, before=before).wait(seconds, (*ENDED, KILLED))
        if (out / "run1").exists() and not (out / "run1" / "ckpt.pt").exists():
            archive_previous_run(out)  # what the next new run would do
        where = [path for path in (out, *out.glob("run[0-9]")) if (path / "ckpt.pt").exists()]
        if old and old_state not in [state(path / "ckpt.pt") for path in where]:
            raise Broken("the run that was to be replaced is whole nowhere")
        if out in where and state(out / "ckpt.pt") != old_state:
            command = ["--resume", "--out_dir", out]
    Command(folder, "train", *command).wait(ok=(0,))
    world.check(out, stage, offload)
    for path in out.glob("run[0-9]/ckpt.pt"):
        if state(path) != old_state:
            raise Broken(f"{path} is another run than the one that was replaced")
    kind = "mixture, " * (stage == "mixture")
    return f"{kind}equal to the bit" + (", the replaced run whole" if old else "")


def edits(world: World, rng: random.Random, folder: Path) -> str:
    """An edit in place is killed or has no room, and made again, or two are made at once. Then all
    are undone."""
    offload, how = rng.choice(OFFLOAD), rng.choice(("killed", "no room", "two at once"))
    out = shutil.copytree(world.run(f"old-{offload}"), folder / "out")
    want, edit = state(out / "ckpt.pt"), [*editing(out), "--save", out / "ckpt.pt"]
    if how == "two at once":
        both = [Command(folder, *edit), time.sleep(0.3 * rng.random()) or Command(folder, *edit)]
        done = [each.wait() for each in both].count(0)
    else:
        before = limiting(out, rng) if how == "no room" else killing(out, rng.randint(1, 40))
        Command(folder, *edit, before=before).wait(ok=(*ENDED, KILLED))
        done = (state(out / "ckpt.pt") != want) + 1
        Command(folder, *edit).wait(ok=(0,))
    for _ in range(done):
        Command(folder, "edit", "--undo", *as_flags(ckpt=out / "ckpt.pt")).wait(ok=(0,))
    left = load_checkpoint(out / "ckpt.pt")["edits"] + [*out.glob("*.tmp"), *snapshots(out)[1:]]
    if left or state(out / "ckpt.pt") != want:
        raise Broken(f"{how}: {done} edits were undone, {left} is left, or the model is another")
    return f"{how}: {done} made and undone"


def analyses(world: World, rng: random.Random, folder: Path) -> str:
    """A figure is damaged, or an analysis is stopped, or a run that it trains is killed, or two are
    asked at once. No run goes on, and asked again it comes to the same."""
    stops = ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL", "two at once")
    out, how, first = folder / "out", rng.choice((*stops, *["damage"] * len(stops))), None
    if how == "damage":
        shutil.copytree(world.analysis(), out)
        how = damage(rng.choice(sorted(out.glob("quick/geometry/*"))), rng)
    else:
        first = Command(folder, *world.ask(out))
        while first.process.is_alive() and not list(out.glob("quick/runs/*/log.txt")):
            time.sleep(0.02)
        time.sleep(rng.random())
        if how != "two at once":
            pid = first.process.pid
            for _ in range(2 * (how == "SIGKILL")):  # of a child of the server of children
                pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[-1])
            os.kill(pid, signal.Signals[how])
            how += f" ({first.wait(ok=(0, 1, 129, 130, 143))})"
            for run in out.glob("quick/runs/text*"):
                with common.locked(run):  # refused if it is in training still
                    pass
    if Command(folder, *world.ask(out)).wait(ok=(0,) if first else ENDED):
        return f"{how}: refused in one line"
    if how == "two at once":
        first.wait(ok=(0,))
    for path in world.analysis().glob("quick/geometry/*"):
        if path.read_bytes() != (out / "quick" / "geometry" / path.name).read_bytes():
            raise Broken(f"{how}: other figures than those of an undisturbed analysis")
    return f"{how}: the same figures"


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file in one of many ways."""
    how = rng.choice(("flip", "flip", "flip", "cut", "other", "folder", "gone"))
    raw = bytearray(path.read_bytes())
    at = rng.randrange(len(raw))
    path.unlink()
    if how == "flip":
        raw[at] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del raw[at:]
    elif how == "other":
        raw = rng.choice((b"", b"[" * 100_000, b"{}", b"null", b"\xff\xfe", b"PK\x03\x04", b"\n"))
    if how == "folder":
        path.mkdir()
    elif how != "gone":
        path.write_bytes(raw)
    return how


def files(world: World, rng: random.Random, folder: Path) -> str:
    """One file is damaged, then a command reads it. If training takes it without a word, its result
    must be what it is without the damage."""
    half, data, out, text = (folder / name for name in ("half", "text", "out", "text.jsonl"))
    shutil.copytree(world.run(f"half-{rng.choice(('none', 'disk'))}"), half)
    shutil.copytree(world.folder / "text", data)
    shutil.copy(world.folder / "text.jsonl", text)
    pretrain = world.flags("pretrain", out, rng.choice(OFFLOAD), data)
    midtrain = [*world.flags("midtrain", out)[:-1], half / "ckpt.pt"]
    resume = (["train", "--resume", "--out_dir", half], half, "pretrain")
    readers = {  # commands; of those that train, the output folder and the undisturbed run
        "half": [resume, resume, (["train", *midtrain], out, "init"), (sampling(half),),
                 ([*sampling(half), "--offload", "disk"],), (editing(half),),
                 (["analyze", "runs", half],)],
        "text": [(["train", *pretrain], out, "pretrain"),
                 (["prepare", "--input", text, "--out_dir", out, "--tokenizer", data],)],
        "text.jsonl": [(["prepare", "--input", text, "--out_dir", out, "--vocab_size", 280],)],
    }  # fmt: skip
    name = rng.choice(["half"] * 6 + ["text"] * 4 + ["text.jsonl"] * 2)
    found = [path for path in (folder / name, *(folder / name).rglob("*")) if path.is_file()]
    path = rng.choice(sorted(path for path in found if path.stat().st_size))
    how = damage(path, rng)
    command, *result = rng.choice(readers[name])
    if Command(folder, *command).wait():
        return f"{how}: refused in one line"
    if result and state(result[0] / "ckpt.pt") != world.state(result[1]):
        raise Broken(f"{how} in {path.name}: another result than without the damage")
    return f"{how}: nothing lost"


ODD = {
    int: (0, -1, 1, 3, 7, 10**9, 10**12, 2**63, -(2**70), 10**400, "1e3", "nan", "", "x", "0x10"),
    float: (0, -1, 0.5, 1e-9, 1e9, "nan", "inf", "-inf", 1e-320, 1e38, 1e308, "1e999", "-0.0", "",
            "x", 1e-45),
    str: ("", "x" * 300, "a$\\frac$", "\udcff", ".", "gone", "-", "a=b,c=d", "0,1", "-1", "9" * 30,
          "\n", "%s%n", "a=nan,b=1", "text=1,text=1", "=1", "../trial/x"),
}  # fmt: skip


def commands(world: World, rng: random.Random, folder: Path) -> str:
    """A command with a few odd values."""
    name = rng.choice(["train"] * 4 + ["sample"] * 2 + ["edit", "prepare", "analyze", "bench"])
    run, out = world.run("pretrain"), folder / "out"
    given = {
        "train": world.flags(rng.choice(STAGES), out, rng.choice(OFFLOAD)),
        "sample": [*sampling(run)[1:], "--prompt", "Anna"],
        "edit": editing(run)[1:],
        "prepare": ["--input", world.folder / "text.jsonl", "--out_dir", out, "--vocab_size", 280],
        "analyze": [rng.choice(ODD[str]) or ".", run, "--out", rng.choice(ODD[str])],
        "bench": ["offload", "--rounds", 1, "--device", "cpu", "--table_gib", "inf"],
    }[name]
    if name == "train" and rng.random() < 0.3:
        shutil.copytree(world.run("half-disk"), out)
        given = ["--resume", "--out_dir", out]
    kinds = (Settings, ModelConfig) if name == "train" else vars(COMMANDS[name]).values()
    kinds = [k for k in kinds if is_dataclass(k) and (name == "train" or k.__module__ == name)]
    flags = [each for kind in kinds for each in fields(kind) if "about" in each.metadata]
    for each in rng.sample(flags, min(len(flags), rng.choice((1, 1, 2, 3)))):
        kind = next((kind for kind in (int, float) if kind.__name__ in str(each.type)), str)
        odd = f"--{each.name}={rng.choice(ODD[kind])}"
        given.append(f"--{each.name}" if "bool" in str(each.type) else odd)
    return ("it ran", "one line", "usage")[Command(folder, name, *given).wait()]


def pairs(world: World, rng: random.Random, folder: Path) -> str:
    """Two commands at once."""
    kind, out = rng.choice(("train", "train", "resume", "prepare", "sample")), folder / "out"
    offload = "disk" if kind == "sample" else rng.choice(OFFLOAD)
    new = world.flags("pretrain", out, offload)
    world.run("pretrain")
    if kind == "prepare":
        prepare = ["prepare", "--input", world.folder / "text.jsonl", "--out_dir", out]
        both = [Command(folder, *prepare, "--vocab_size", size) for size in (270, 280)]
        codes = [each.wait() for each in both]
        more = world.flags("pretrain", folder / "run", data=out)
        Command(folder, "train", *more).wait(ok=(0,) if 0 in codes else ENDED)
    elif kind == "sample":
        run, codes = Command(folder, "train", *new), []
        while run.process.is_alive():
            if (out / "ckpt.pt").exists():
                Command(folder, *sampling(out)).wait(ok=(0,))
        run.wait(ok=(0,))
        world.check(out, "pretrain", offload)
    else:
        run = Command(folder, "train", *new)
        time.sleep(rng.random() * world.seconds["pretrain"])
        more = ["--resume", "--out_dir", out] if kind == "resume" else new
        codes = [each.wait() for each in (Command(folder, "train", *more), run)]
        world.check(out, "pretrain")
    return f"{kind}: one refused" if 1 in codes else f"{kind}: both went through"


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
    start, rows, broken = time.monotonic(), [], 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "world").mkdir()
        world, here = World(Path(folder) / "world"), Path(folder) / "trial"
        trials = dict(commands=commands, files=files, pairs=pairs, edits=edits, kills=kills)
        trials |= dict(limits=partial(kills, limited=True), analyses=analyses)
        for name in [args.only] if args.only else NUMBERS:
            outcomes: Counter[str] = Counter()
            n = args.n or (QUICK if args.quick else NUMBERS)[name]
            for number in tqdm(range(args.first, args.first + n), desc=name, unit="trial"):
                here.mkdir()
                try:
                    chance = random.Random(f"{args.seed} {name} {number}")
                    outcomes[trials[name](world, chance, here)] += 1
                except Exception as error:
                    why = error if isinstance(error, Broken) else traceback.format_exc()
                    tqdm.write(f"--only {name} --seed {args.seed} --first {number} --n 1: {why}")
                    broken += 1
                shutil.rmtree(here)
            text = "; ".join(f"{count} {what}" for what, count in sorted(outcomes.items()))
            rows.append(f"| {name} | {n} | {outcomes.total()} | {text} |")
    print("\n| trials | tried | held | what it came to |", "|---|---|---|---|", *rows, sep="\n")
    print(f"\nseed {args.seed}, {time.monotonic() - start:.0f} s, {broken} broken promises")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
