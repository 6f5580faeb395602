"""Kill commands, start two at once: do the promises of docs/data-and-stages.md hold?

    python tests/soak.py                # 300 of each kind
    python tests/soak.py --seed 17 --n 1        # one of each again

A trial fails if it ends in a traceback, a hang, or a signal that nobody sent, if it prints more or
less than one line, loses work, changes a neighbor, or exits with 0 and another result than an
undisturbed command, to the bit. Every command runs in a fork of this process, which imports PyTorch
once and has one thread.
"""

import itertools
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on a GPU results are not equal to the bit

import torch
import torch._dynamo  # which every optimizer would import anew
from conftest import EDIT, flags, leaves, losses, write_story

import common
import convert
import edit
import prepare
import sample
import train
from training.checkpoints import load_checkpoint

COMMANDS = dict(train=train, sample=sample, edit=edit, prepare=prepare, convert=convert)
RUN = flags(n_layer=2, n_embd=16, block_size=16, batch_size=4, max_iters=6, eval_interval=2)
ENDED = (0, 1, 2)  # exit codes


class Command:
    """A command in a fork of this process. There, `disturb` is called first."""

    def __init__(self, *args, disturb=int):
        self.argv = [str(part) for part in args]
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = get_context("fork").Process(target=self.run, args=[disturb])
        self.process.start()

    def run(self, disturb):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        sys.stderr = self.stderr
        sys.argv = self.argv
        disturb()
        common.run_command(COMMANDS[self.argv[0]].main)

    def wait(self, *ok):
        """Wait for its end. Returns its exit code, which must be `ok`, and 1 or 2 with one line."""
        self.process.join(120)  # seconds; commands take one or two
        self.process.kill()
        self.process.join()
        code = self.process.exitcode
        self.stderr.seek(0)
        error = self.stderr.read()
        kept = code in ok and error.count("error: ") == (code in (1, 2))
        assert kept and "Traceback" not in error, (self.argv, code, error)
        return code


def send_before(number, folder, last):
    """Have SIGKILL, 9, or SIGINT, 2, come before operation `last` on a file in a folder."""
    numbers = itertools.count(1)

    def hook(event, args):
        if (
            event.startswith(("open", "os."))
            and str(args[0]).startswith(str(folder))
            and next(numbers) == last
        ):
            os.kill(os.getpid(), number)

    sys.addaudithook(hook)


# --- a folder, and commands that write into it ---


class World:
    """Small data, and folders of finished runs, with neighbors."""

    def __init__(self, folder):
        self.folder = folder
        self.text = folder / "text"
        story = folder / "story.jsonl"
        write_story(story, 60)
        self.prepare = ["prepare", "--input", story, "--vocab_size", 280, "--out_dir"]
        Command(*self.prepare, self.text).wait(0)
        self.dense = folder / "dense/ckpt.pt"
        Command(*self.train(folder / "dense"), "--ffn", "dense").wait(0)

    def train(self, out):
        return ["train", *RUN, "--data_dir", self.text, "--overwrite", "--out_dir", out]

    @cache  # noqa: B019
    def base(self, offload):
        out = self.folder / offload
        Command(*self.train(out), "--offload", offload).wait(0)
        for name in ("ckpt", "ckpt.bak", "ckpt.old"):  # each has tables, too
            Command("edit", "--ckpt", out / "ckpt.pt", *EDIT, "--save", out / name).wait(0)
        (out / "link.pt").symlink_to("ckpt.bak")
        (out / "notes.tmp").write_text("mine")
        return out

    def copy(self, offload, folder):
        return shutil.copytree(self.base(offload), folder / "out", symlinks=True)

    def commands(self, out):
        edit = ["edit", "--ckpt", out / "ckpt.pt", *EDIT, "--save"]
        stem = ["--ffn", "stem", "--data_dir", self.text, "--tokens", 999]
        return {
            "train": self.train(out),
            "on disk": [*self.train(out), "--offload", "disk"],
            "resume": ["train", "--resume", "--out_dir", out, "--max_iters", 8],
            "save": [*edit, out / "edited.pt"],
            "in place": [*edit, out / "ckpt.pt"],
            "undo": ["edit", "--undo", "--ckpt", out / "link.pt"],
            "convert": ["convert", self.dense, *stem, "--out", out / "stem.pt"],
            "export": ["convert", self.dense, "--export", out / "llama"],
            "prepare": [*self.prepare, out],
        }

    @cache  # noqa: B019
    def done(self, name, offload):
        """What a folder holds when an undisturbed command has ended."""
        out = self.copy(offload, self.folder / f"{name}-{offload}")
        Command(*self.commands(out)[name]).wait(0)
        return held(out)


def state(path):
    """What a checkpoint holds, to the bit, wherever its tables are."""
    checkpoint = load_checkpoint(path, verify=True)
    found = leaves([checkpoint.get(part) for part in ("model", "optimizer", "step")])
    return {k: x.numpy().tobytes() if torch.is_tensor(x) else x for k, x in found.items()}


def held(out):
    """What the files of a folder hold. None of it is left over."""
    found = {}
    for path in out.rglob("*"):
        name = str(path.relative_to(out))
        if name == "metrics.jsonl":
            found[name] = losses(out)
        elif path.suffix in (".pt", ".bak", ".old") or name == "ckpt":
            found[name] = state(path)
        elif path.is_file() and ".tables/" not in name and name not in (".lock", "loss.png"):
            found[name] = path.read_bytes()
    names = [path.parent for path in out.glob("*.tables/*")]
    assert len(names) == len(set(names))
    return found


# --- the kinds of trials: each gets a world, chance, a folder, and where its tables are ---


def kills(world, rng, out, offload):
    """A command is killed, interrupted or has no room, and is given again."""
    name, command = rng.choice(list(world.commands(out).items()))
    send = partial(
        send_before, rng.choice((9, 9, 2)), out, rng.randint(1, 150 if "train" in command else 40)
    )
    size = int((out / "ckpt.pt").stat().st_size * rng.uniform(0.1, 1.05))
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))  # a full disk
    Command(*command, disturb=rng.choice((send, send, limit))).wait(*ENDED, -9, 130)
    Command(*command).wait(*ENDED)
    assert held(out) == world.done(name, offload)


def pairs(world, rng, out, offload):
    """Two commands at once in a folder."""
    first, second = rng.choices(list(world.commands(out).values()), k=2)
    running = Command(*first)
    time.sleep(rng.random() / 2)
    also = Command(*second)
    Command("sample", "--ckpt", out / "ckpt.bak", "--max_new_tokens", 8).wait(0)
    also.wait(*ENDED)
    running.wait(*ENDED)  # whoever came second may be refused
    now, before = held(out), held(world.base(offload))
    for name in ("ckpt", "ckpt.old", "notes.tmp"):
        assert now[name] == before[name], first


def main():
    parser = common.make_parser(__doc__)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    n_broken = 0
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for trial in (pairs, kills):
            for seed in range(args.seed, args.seed + args.n):
                rng = random.Random(f"{seed} {trial.__name__}")
                offload = rng.choice(("none", "cpu", "disk"))
                out = world.copy(offload, Path(folder) / "trial")
                try:
                    trial(world, rng, out, offload)
                except (AssertionError, common.UserError) as error:
                    print(f"--seed {seed} --n 1, {trial.__name__}: {error}", file=sys.stderr)
                    n_broken += 1
                shutil.rmtree(out.parent)
    sys.exit(n_broken and f"{n_broken} broken promises")


if __name__ == "__main__":
    main()
