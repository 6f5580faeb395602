"""Kill runs, damage files, give odd flags, start two at once: docs/promises.md, put to the test.

    python tests/soak.py                # 300 kills, 500 files, 500 command lines, 20 pairs
    python tests/soak.py --quick        # a few of each
    python tests/soak.py --only files --n 50 --seed 7
    python tests/soak.py --only kills --first 17 --n 1          # one of them again

A trial fails if it ends in a traceback, a hang, or a signal that nobody sent, if it says more or
less than one line, loses work, or exits with 0 and another result than an undisturbed run, to the
bit. Every command runs in a fork of this process, which imports PyTorch once and has one thread.
"""

import argparse
import hashlib
import json
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
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch._dynamo  # which every optimizer would import anew
from tqdm import tqdm

import analyze
import bench
import common
import edit
import prepare
import sample
import train
from config import ModelConfig
from text import countries
from training.checkpoints import load_checkpoint, snapshots
from training.records import archive_previous_run
from training.settings import Settings

NUMBERS = dict(kills=300, files=500, commands=500, pairs=20)
QUICK = dict(kills=2, files=8, commands=12, pairs=1)
COMMANDS = {m.__name__: m for m in (train, sample, edit, prepare, analyze, bench)}
HOMES, STAGES = ("none", "cpu", "disk"), ("pretrain", "midtrain", "sft", "dpo")
PATIENCE = 120  # seconds after which a command counts as hung: they take one or two
ROOM = 4 << 30  # bytes of memory that a command may have beside what is mapped already
SHAPE = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, stem_layers="all")
RUN = dict(device="cpu", batch_size=4, max_iters=6, eval_interval=2, eval_tokens=64)


class Broken(Exception):
    """A promise that was not kept."""


# --- commands in forks ---
# ruff: noqa: SIM115


@dataclass
class Done:
    code: int  # as of a shell: negative for a signal, None for a hang
    out: str
    error: str

    def held(self, *, may_fail: bool = True) -> "Done":
        """Broken: it is not success, or else one line."""
        errors = [line for line in self.error.splitlines() if line.startswith("error: ")]
        usage = self.code == 2 and "usage: " in self.error
        one_line = self.code == 1 and len(errors) == 1 and "Traceback" not in self.error
        if self.code != 0 and not (may_fail and (one_line or usage)):
            raise Broken(f"exit code {self.code}: {self.error[-2000:]}")
        return self


class Command:
    """A command in a fork of this process, in a folder: what it says goes to files."""

    def __init__(self, folder: Path, name: str, *args, before: Callable[[], object] = lambda: 0):
        self.says = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        sys.stdout.flush()
        self.pid, self.code = os.fork(), None
        if self.pid == 0:
            code = 70
            try:
                for number, file in zip((1, 2), self.says, strict=True):
                    os.dup2(file.fileno(), number)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                sys.stdin, sys.stdout = open(0), open(1, "w")
                sys.stderr = open(2, "w", errors="backslashreplace")
                os.chdir(folder)
                tqdm.set_lock(threading.RLock())  # whoever is killed must not hold the parent's
                mapped = int(Path("/proc/self/statm").read_text().split()[0])
                limit = mapped * resource.getpagesize() + ROOM
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
                sys.argv = [f"{name}.py", *map(str, args)]
                before()
                common.run(COMMANDS[name].main)
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
                if isinstance(ended.code, str):
                    print(ended.code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            finally:
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                os._exit(code)

    def wait(self, seconds: float = PATIENCE) -> Done:
        """What it came to. Who is not done by then is killed, and has no exit code."""
        until, hung = time.monotonic() + seconds, False
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > until:
                hung = True
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.002)
        code = None if hung else os.waitstatus_to_exitcode(ended[1])
        for file in self.says:
            file.seek(0)
        said = [file.read() for file in self.says]
        for file in self.says:
            file.close()
        return Done(code, *said)


def called(folder: Path, *args, **more) -> Done:
    return Command(folder, *args, **more).wait()


# --- what undisturbed runs come to ---


def digest(value: object, into=None) -> str:
    """A hash of nested tensors and numbers, to the bit."""
    into = into or hashlib.sha256()
    if isinstance(value, torch.Tensor):
        into.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            into.update(str(key).encode())
            digest(value[key], into)
    elif isinstance(value, list | tuple):
        for part in value:
            digest(part, into)
    else:
        into.update(repr(value).encode())
    return into.hexdigest()


def state(ckpt: Path) -> str:
    """All that training goes on from, wherever tables are."""
    checkpoint = load_checkpoint(ckpt)
    return digest([checkpoint[part] for part in ("model", "optimizer", "step", "config")])


def losses(folder: Path) -> list[tuple]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(r["step"], r["train_loss"]) for r in records if r["type"] == "step"]


def as_flags(settings: dict) -> list:
    return [part for name, value in settings.items() for part in (f"--{name}", value)]


class World:
    """Small data, and the runs that all trials are compared with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.operations, self.seconds = folder, {}, {}
        rng = random.Random(0)
        names, verbs = ("Anna", "Björn", "Chloë"), ("sees", "follows", "meets")

        def said() -> str:
            return f"{rng.choice(names)} {rng.choice(verbs)} {rng.choice(names)} at the river."

        def talk(answer: str) -> list[dict]:
            return [dict(role="user", content="Who?"), dict(role="assistant", content=answer)]

        kinds = {
            "text": lambda: dict(text=" ".join(said() for _ in range(6))),
            "chat": lambda: dict(messages=talk(said())),
            "pairs": lambda: dict(chosen=talk(said()), rejected=talk("No.")),
        }
        for kind, make in kinds.items():
            lines = [json.dumps(make()) for _ in range(60)]
            (folder / f"{kind}.jsonl").write_text("\n".join(lines) + "\n")
            given = ["--tokenizer", folder / "text"] if kind != "text" else ["--vocab_size", 280]
            args = ["--input", folder / f"{kind}.jsonl", "--out_dir", folder / kind, *given]
            called(folder, "prepare", *args, "--val_fraction", 0.2).held(may_fail=False)

    @cache  # noqa: B019
    def run(self, name: str) -> Path:
        """The folder of an undisturbed run, made when it is first asked for: of a stage; half-HOME,
        which stopped half-way; old-HOME, to be replaced; init, which goes on from a half one."""
        out, (kind, _, home) = self.folder / name, name.partition("-")
        count, start = tempfile.TemporaryFile(), time.monotonic()
        if kind == "init":
            command = [*self.flags("midtrain", out)[:-1], self.run("half-none") / "ckpt.pt"]
        else:
            command = self.flags(kind if kind in STAGES else "pretrain", out, home or "none")
            command += ["--seed", 1] * (kind == "old")

        def before() -> None:
            save = train.save_checkpoint

            def saved(*parts, step: int, **more) -> None:
                save(*parts, step=step, **more)
                if (kind, step) == ("half", 4):
                    os.kill(os.getpid(), signal.SIGKILL)

            train.save_checkpoint = saved
            at_operations(out, lambda: os.write(count.fileno(), b"."))

        done = called(self.folder, "train", *command, before=before)
        if kind != "half":
            done.held(may_fail=False)
        self.seconds[name] = time.monotonic() - start
        self.operations[name] = os.fstat(count.fileno()).st_size
        return out

    @cache  # noqa: B019
    def state(self, name: str) -> str:
        return state(self.run(name) / "ckpt.pt")

    def flags(self, stage: str, out: Path, home: str = "none") -> list:
        data = dict(sft="chat", dpo="pairs").get(stage, "text")
        flags = [
            "--data_dir",
            self.folder / data,
            "--out_dir",
            out,
            "--offload",
            home,
            *as_flags(RUN),
        ]
        if stage == "pretrain":
            return [*flags, *as_flags(SHAPE)]
        return [*flags, "--stage", stage, "--init_from", self.run("pretrain") / "ckpt.pt"]

    def sampling(self, run: Path) -> list:
        return ["--ckpt", run / "ckpt.pt", "--device", "cpu", "--max_new_tokens", 8]

    def check(self, out: Path, stage: str, home: str | None = None) -> None:
        """Broken: a finished run is not equal to the undisturbed one, or left something."""
        if state(out / "ckpt.pt") != self.state(stage):
            raise Broken("another result than that of an undisturbed run")
        if losses(out) != losses(self.run(stage)):
            raise Broken("other losses than those of an undisturbed run")
        left = [path.name for path in (*out.glob("*.tmp"), *out.glob("live*"))]
        left += [path.name for path in snapshots(out)[home == "disk" :]] if home else []
        if left:
            raise Broken(f"left behind: {', '.join(left)}")


EVENTS = ("open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate")


def at_operations(folder: Path, do: Callable[[], object]) -> None:
    """From now on, before each operation on a file in a folder."""

    def heard(event: str, args: tuple) -> None:
        if event in EVENTS and str(args[0]).startswith(str(folder)):
            do()

    sys.addaudithook(heard)


# --- the four kinds of trials: each gets a world, chance and a folder, and says what it came to ---


def kills(world: World, rng: random.Random, folder: Path) -> str:
    """A run is killed, maybe while it replaces another one or once more when it has been resumed,
    and then brought to its end."""
    stage, home, out = rng.choice(STAGES), rng.choice(HOMES), folder / "out"
    old = rng.choice([None, *HOMES])
    if old:
        shutil.copytree(world.run(f"old-{old}"), out)
    command, cuts = world.flags(stage, out, home), rng.choice((1, 1, 2))
    world.run(stage)
    for _ in range(cuts):
        if rng.random() < 0.5:
            left = [rng.randint(1, int(1.3 * world.operations[stage]))]

            def die(left=left) -> None:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            started = Command(folder, "train", *command, before=lambda d=die: at_operations(out, d))
            done = started.wait()
        else:
            done = Command(folder, "train", *command).wait(rng.random() * world.seconds[stage])
        if done.code not in (None, 0, -signal.SIGKILL):
            done.held()
        if (out / "run1").exists() and not (out / "run1" / "ckpt.pt").exists():
            archive_previous_run(out)  # goes on where the kill came, as the next start does
        where = [path for path in (out, *out.glob("run[0-9]")) if (path / "ckpt.pt").exists()]
        if old and world.state(f"old-{old}") not in [state(path / "ckpt.pt") for path in where]:
            raise Broken("the run that was to be replaced is whole nowhere")
        if out in where and state(out / "ckpt.pt") != (old and world.state(f"old-{old}")):
            command = ["--resume", "--out_dir", out]
    called(folder, "train", *command).held(may_fail=False)
    world.check(out, stage, home)
    for path in out.glob("run[0-9]/ckpt.pt"):
        if state(path) != world.state(f"old-{old}"):
            raise Broken(f"{path} is another run than the one that was replaced")
    return "equal to the bit" + (", the replaced run whole" if old else "")


def harm(path: Path, rng: random.Random) -> str:
    """Damage a file in one of many ways."""
    how = rng.choice(("flip", "flip", "flip", "cut", "empty", "random", "other", "kind"))
    raw = bytearray(path.read_bytes())
    if how == "flip":
        for _ in range(rng.choice((1, 1, 3))):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del raw[rng.randrange(len(raw)) :]
    elif how == "empty":
        raw.clear()
    elif how == "random":
        at, size = rng.randrange(len(raw)), rng.randint(1, 4096)
        raw[at : at + size] = rng.randbytes(size)
    elif how == "other":
        raw[:] = rng.choice((b"[" * 100_000, b"{}", b"null", b"\xff\xfe", b"PK\x03\x04", b"\n" * 9))
    path.unlink()
    if how == "kind":
        how = rng.choice(("folder", "pipe", "device", "gone", "loop"))
        make = dict(folder=os.mkdir, pipe=os.mkfifo, device=lambda p: os.symlink("/dev/zero", p))
        make |= dict(gone=lambda p: None, loop=lambda p: os.symlink(p, p))
        make[how](path)
    else:
        path.write_bytes(raw)
    return how


def files(world: World, rng: random.Random, folder: Path) -> str:
    """One file is damaged, then a command reads it."""
    home = rng.choice(("none", "disk"))
    half, data, out = folder / "half", folder / "text", folder / "out"
    shutil.copytree(world.run(f"half-{home}"), half)
    shutil.copytree(world.folder / "text", data)
    shutil.copy(world.folder / "text.jsonl", folder / "text.jsonl")
    shutil.copy(countries.TABLE, folder / "countries.csv")
    of_run = ["half/ckpt.pt"] * 3 + ["half/metrics.jsonl"] + ["half/tables"] * 3 * (home == "disk")
    of_data = [f"text/{name}" for name in ("train.bin", "val.bin", "meta.json", "tokenizer.json")]
    name = rng.choice([*of_run, *of_data, "text.jsonl", *["countries.csv"] * (rng.random() < 0.2)])
    (path,) = snapshots(half) if name == "half/tables" else [folder / name]
    how = harm(path, rng)
    from_data = world.flags("pretrain", out, rng.choice(HOMES))
    from_data[1] = data
    resume = ("train", "--resume", "--out_dir", half)
    init = ("train", *world.flags("midtrain", out)[:-1], half / "ckpt.pt")
    commands = {
        "half": [resume, resume, init, ("sample", *world.sampling(half)),
                 ("sample", *world.sampling(half), "--offload", "disk"), ("analyze", "runs", half),
                 ("edit", "--ckpt", half / "ckpt.pt", "--source", "Anna", "--target", "Björn",
                  "--prompt", "Anna sees", "--device", "cpu")],
        "text": [("train", *from_data), ("prepare", "--input", folder / "text.jsonl", "--out_dir",
                  out, "--tokenizer", data)],
        "text.jsonl": [("prepare", "--input", path, "--out_dir", out, "--vocab_size", 280)],
        "countries.csv": [("prepare", "--out_dir", out, "--tokenizer", data)],
    }  # fmt: skip
    command = rng.choice(commands[name.split("/")[0]])

    def before() -> None:
        countries.TABLE = folder / "countries.csv"

    done = called(folder, *command, before=before).held()
    # What a command took without a word must have come to what it comes to without the damage.
    if done.code == 0 and command[0] == "train" and command is not commands["text"][0]:
        out, stage = (half, "pretrain") if command is resume else (out, "init")
        if state(out / "ckpt.pt") != world.state(stage):
            raise Broken(f"{how} in {path.name}: another result than without the damage")
    if done.code == 0 and command == commands["text"][0]:
        world.check(out, "pretrain")
    return f"{how}: {'nothing lost' if done.code == 0 else 'refused in one line'}"


ODD = {
    int: (0, -1, 1, 3, 7, 10**9, 10**12, 2**63, -(2**70), 10**400, "1e3", "nan", "", "x", "0x10"),
    float: (0, -1, 0.5, 1e-9, 1e9, "nan", "inf", "-inf", 1e-320, 1e38, 1e308, "1e999", "-0.0", "",
            "x", 1e-45),
    str: ("", "x" * 300, "a$\\frac$", "\udcff", "/dev/zero", "pipe", ".", "gone", "-", "a=b,c=d",
          "0,1", "-1", "9" * 30, "\n", "%s%n", "a=nan,b=1", "text=1,text=1", "=1", "../trial/x"),
}  # fmt: skip


def commands(world: World, rng: random.Random, folder: Path) -> str:
    """A command with a few odd values."""
    name = rng.choice(("train", "train", "train", "train", "sample", "sample", "edit", "prepare",
                       "analyze", "bench"))  # fmt: skip
    os.mkfifo(folder / "pipe")
    run, out = world.run("pretrain"), folder / "out"
    if name == "train" and rng.random() < 0.3:
        shutil.copytree(world.run("half-disk"), out)
    given = {
        "train": [*world.flags(rng.choice(STAGES), out, rng.choice(HOMES))],
        "sample": [*world.sampling(run), "--prompt", "Anna"],
        "edit": ["--ckpt", run / "ckpt.pt", "--source", "Anna", "--target", "Chloë", "--prompt",
                 "Anna sees", "--device", "cpu"],
        "prepare": ["--input", world.folder / "text.jsonl", "--out_dir", out, "--vocab_size", 280],
        "analyze": ["runs", run], "bench": ["offload", "--rounds", 1, "--device", "cpu"],
    }[name]  # fmt: skip
    if out.exists():
        given = ["--resume", "--out_dir", out]
    kinds = dict(train=Settings, sample=sample.Sampling, edit=edit.Edit, prepare=prepare.Settings)
    kinds["bench"] = bench.Bench
    flags = [f for f in fields(kinds[name]) if "about" in f.metadata] if name in kinds else []
    flags += [f for f in fields(ModelConfig) if f.metadata] if name == "train" else []
    if not flags:
        given = [rng.choice(ODD[str]) or "." for _ in range(2)] + ["--out", rng.choice(ODD[str])]
    for each in rng.sample(flags, min(len(flags), rng.choice((1, 1, 2, 3)))):
        types = [kind for kind in (int, float) if str(kind.__name__) in str(each.type)] or [str]
        if "bool" in str(each.type):
            given += [f"--{each.name}"]
        else:
            given += [f"--{each.name}={rng.choice(ODD[types[0]])}"]
    if name == "bench":  # what is not odd would take minutes
        given += [f"--table_gib={rng.choice(('inf', 'nan', 0, -1, 1e30, 'x'))}"]
    given = [str(arg) for arg in given]
    done = called(folder, name, *given)
    try:
        done.held()
    except Broken as error:
        raise Broken(f"{name}.py {given}"[:900] + f": {error}") from None
    return {0: "it ran", 1: "one line", 2: "usage"}[done.code]


def pairs(world: World, rng: random.Random, folder: Path) -> str:
    """Two commands at once."""
    kind, out = rng.choice(("new", "new", "resume", "prepare", "sample")), folder / "out"
    home = "disk" if kind == "sample" else rng.choice(HOMES)
    world.run("pretrain")
    run = Command(folder, "train", *world.flags("pretrain", out, home))
    if kind == "prepare":
        run.wait()
        args = ("prepare", "--input", world.folder / "text.jsonl", "--out_dir", out)
        both = [Command(folder, *args, "--vocab_size", size) for size in (270, 280)]
        codes = [one.wait().held().code for one in both]
        args = world.flags("pretrain", folder / "run")
        called(folder, "train", "--data_dir", out, *args[2:]).held(may_fail=codes == [1, 1])
    elif kind == "sample":
        tries = 0
        while os.waitid(os.P_PID, run.pid, os.WNOWAIT | os.WEXITED | os.WNOHANG) is None:
            if (out / "ckpt.pt").exists():
                called(folder, "sample", *world.sampling(out)).held(may_fail=False)
                tries += 1
        run.wait().held(may_fail=False)
        world.check(out, "pretrain", home)
        return "opened while it was saved"
    else:
        time.sleep(rng.random() * world.seconds["pretrain"])
        more = ["--resume", "--out_dir", out] if kind == "resume" else None
        other = Command(folder, "train", *(more or world.flags("pretrain", out, home)))
        codes = [one.wait().held().code for one in (run, other)]
        if 0 not in codes:
            raise Broken("neither of two runs went through")
        world.check(out, "pretrain")
    return "one refused" if 1 in codes else "one after the other"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few of each")
    parser.add_argument("--only", choices=NUMBERS, help="one kind of trials")
    parser.add_argument("--n", type=int, help="how many of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of all chance (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # no thread: a fork would take over what it holds
    kinds = dict(kills=kills, files=files, commands=commands, pairs=pairs)
    start, rows, broken = time.monotonic(), [], []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "world").mkdir()
        world = World(Path(folder) / "world")
        for name in [args.only] if args.only else kinds:
            n = args.n or (QUICK if args.quick else NUMBERS)[name]
            outcomes: Counter[str] = Counter()
            for number in tqdm(range(args.first, args.first + n), desc=name, unit="trial"):
                here = Path(folder) / "trial"
                here.mkdir()
                try:
                    chance = random.Random(f"{args.seed} {name} {number}")
                    outcomes[kinds[name](world, chance, here)] += 1
                except Exception as error:
                    why = error if isinstance(error, Broken) else traceback.format_exc()
                    again = f"--only {name} --seed {args.seed} --first {number} --n 1"
                    broken.append(f"{again}: {why}")
                    tqdm.write(broken[-1])
                shutil.rmtree(here)
            rows.append((name, n, outcomes))
    print(f"\n| {'trials':<9} | tried | held | what it came to |\n|---|---|---|---|")
    for name, n, outcomes in rows:
        said = "; ".join(f"{count} {what}" for what, count in sorted(outcomes.items()))
        print(f"| {name:<9} | {n:>5} | {outcomes.total():>4} | {said} |")
    print(f"\nseed {args.seed}, {time.monotonic() - start:.0f} s, {len(broken)} broken promises")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
