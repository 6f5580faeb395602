"""What every command shares: errors a user can act on, flags, devices, files."""

import contextlib
import errno
import glob
import json
import math
import os
import re
import secrets
import shlex
import shutil
import signal
import stat
import sys
import threading
from argparse import (
    SUPPRESS,
    ArgumentParser,
    BooleanOptionalAction,
    Namespace,
    RawDescriptionHelpFormatter,
)
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import MISSING, field, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from subprocess import list2cmdline
from textwrap import shorten
from traceback import extract_tb
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

# For how long OpenMP's threads spin while they wait for each other, set before torch is loaded. By
# default, it is so long that beside a busy process each small product waits until that is off its
# core.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
    os.environ["GOMP_SPINCOUNT"] = "1000"

import numpy as np
import torch
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class UserError(Exception):
    """Something the user can fix: the message names the file or flag, the value, the fix.
    Anything else that goes wrong is a bug, ours or a reader's own, and keeps its traceback."""


# How a plain RuntimeError of PyTorch says that memory is at its end: on CPUs and Macs, and on a GPU
# that of libraries, or pinned memory, of which WSL2 has little.
OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "could not create a primitive",
    "Cannot allocate memory",
    "out of memory",  # CUDA error, HIP error, MPS backend
    "STATUS_ALLOC_FAILED",  # cuBLAS
    "Invalid buffer size",  # more than the GPU of a Mac has
)


# Characters that may do anything to a terminal: clear it, or take text for what somebody typed.
CONTROL = re.compile(r"[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")


def printable(text: str) -> str:
    """A text, which may be a model's or a file's, for a terminal: U+FFFD for what controls one."""
    return CONTROL.sub("\ufffd", text)


def run_command(main: Callable[[], None]) -> None:
    """Run a command. A UserError, or running out of memory, is one line and exit code 1."""
    # Bars of one process need no lock that processes share. Where those do not fork, as since
    # Python 3.14, it costs another process, which warns of it after a command that ends without
    # cleaning up. Not on import: a host's `process_map` sends its lock to such processes.
    tqdm.set_lock(threading.RLock())
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's output has no such method
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a letter shows "?"
        if sys.stdout.isatty():  # to files, control characters go as they are: they are text
            write = sys.stdout.write
            sys.stdout.write = lambda text: write(printable(text))
    try:
        main()
        print(end="", flush=True)  # which knows a standard output that is closed
    except UserError as error:
        lines = str(error).splitlines()
        sys.exit("error: " + printable(" ".join(map(str.strip, lines))))
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell reports Ctrl-C
    except OSError as error:
        gone = errno.EPIPE, errno.EINVAL  # the second on Windows
        if error.errno not in (*gone, errno.ENOSPC):
            raise
        try:
            print(flush=True)
        except OSError:  # of our standard output: nobody reads it, as behind `| head`, or no room
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1 if error.errno in gone else f"error: stdout: {error.strerror}")
        raise  # of another pipe or file: a bug
    except (MemoryError, RuntimeError) as error:
        by_type = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not by_type and not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        ours = [f for f in extract_tb(error.__traceback__) if "-packages" not in f.filename]
        place = f"{Path(ours[-1].filename).name}, line {ours[-1].lineno}"
        sys.exit(
            f"error: out of memory in {place} ({first_line(error)}): lower --device_batch_size "
            "(convert.py: --batch_size, sample.py: --num_samples) or the model's sizes, or try "
            "--offload"
        )


def progress(parts: Iterable, about: str, **more) -> tqdm:
    """The parts, with a bar on a terminal if they take long, which goes when they end."""
    return tqdm(parts, about, leave=False, delay=3, disable=None, **more)


def command_line(script: str, *words: object) -> str:
    """A command to copy into a shell: python with one of our scripts and these words."""
    path = str(Path(__file__).with_name(script))
    with contextlib.suppress(ValueError):  # the user is on another drive of Windows
        path = os.path.relpath(path)  # from where the user is
    return python_line(path, *words)


def python_line(*words: object) -> str:
    """A command to copy into a shell: python with these words, by quotes that a shell knows."""
    join = list2cmdline if sys.platform == "win32" else shlex.join
    return join(["python", *map(str, words)])


# --- flags ---

# What the value of a flag must be, in words and as a test, which NaN and infinity never pass.
RANGES: dict[str, Callable[[Any], bool]] = {
    "at least 1": lambda value: value >= 1,
    "at least 259": lambda value: value >= 259,
    "from 1 to 10,000": lambda value: 1 <= value <= 10_000,
    "a positive number": lambda value: 0 < value < math.inf,
    "0 or more": lambda value: 0 <= value < math.inf,
    "0 or more and below 1": lambda value: 0 <= value < 1,
    "between 0 and 1": lambda value: 0 < value < 1,
    "above 0 and at most 1": lambda value: 0 < value <= 1,
    "0 or more, and fit 32 bits": lambda value: 0 <= value < 2**32,
}


def flag(default: Any, about: str, **more) -> Any:
    """A field of a dataclass that is also a flag of a command.

    Args:
        about: its line in `-h`, followed by the default, or `shown` in place of the default.
        more: `must`, a key of RANGES; `choices`, as of argparse; `nargs="+"`, of paths; `of`, a
            test whether a kind of --ffn has this flag.
    """
    return field(default=default, metadata={"about": about, **more})


def add_flags(
    parser: ArgumentParser, cls: type, ffn: str = "", defaults: dict[str, Any] | None = None
) -> None:
    """Add the flags of a dataclass to a parser, without those that this --ffn does not have. A
    field without a default is given without its name. What is not given stays out of the
    namespace; `-h` shows the default of `defaults` or of the dataclass."""
    types = get_type_hints(cls)
    for setting in fields(cls):
        more = setting.metadata
        if "about" not in more or ("of" in more and not more["of"](ffn)):
            continue
        name = f"--{setting.name}"
        default = (defaults or {}).get(setting.name, more.get("shown", setting.default))
        if setting.default is MISSING:
            name = setting.name
            default = None
        # To argparse, % begins a name.
        options = {"help": more["about"].replace("%", "%%"), "default": SUPPRESS}
        if default or type(default) in (int, float):  # also 0, but not False
            options["help"] += f" ({default})"
        value_type = types[setting.name]
        value_type = (get_args(value_type) or [value_type])[0]  # of `int | None`
        is_path = value_type is Path or setting.name in ("ckpt", "data_dir", "tokenizer")
        if value_type is not bool:
            given = partial(expanded, value_type) if is_path else value_type
            options.update(type=given, choices=more.get("choices"))
            if "nargs" in more:  # --input a --input b is --input a b
                options.update(nargs=more["nargs"], action="extend")
        elif default or setting.default is None:
            options["action"] = BooleanOptionalAction
        else:
            options["action"] = "store_true"
        parser.add_argument(name, **options)


def expanded(path_type: type, text: str) -> Any:
    """A path, or several, with the home folder for each `~` that a shell has left there."""
    return path_type(",".join(map(os.path.expanduser, text.split(","))))


# What other programs and people call our flags, all without dashes.
ELSEWHERE = {
    "bs": "batch_size",
    "checkpoint": "ckpt",
    "dataset": "data_dir",
    "epochs": "max_iters",
    "eval_iters": "eval_tokens",
    "gradient_accumulation_steps": "device_batch_size",
    "lr": "learning_rate",
    "model": "ckpt",
    "n": "max_new_tokens",
    "out": "save",
    "out_dir": "ckpt",
    "start": "prompt",
    "wd": "weight_decay",
}


def did_you_mean(name: str, known: Collection[str]) -> str:
    """What to say after an unknown name: which of the known ones may be meant, or nothing."""
    ours = ELSEWHERE.get(name.lstrip("-"))
    close = [other for other in known if other.lstrip("-") == ours]
    close += get_close_matches(name, known, 1, 0.8)
    close += [other for other in known if other.startswith(name)]  # --max_new
    close += [other for other in known if name.startswith(f"{other}_")]  # --warmup_iters
    return f"; did you mean {close[0]}?" if close else ""


class Parser(ArgumentParser):
    """A parser whose errors are one line, and exit code 2."""

    chosen = ""  # what decides which flags there are, for the error about others

    def parse_args(self, *arguments) -> Namespace:
        given, unknown = self.parse_known_args(*arguments)
        if unknown:
            name = unknown[0].partition("=")[0]
            if name.startswith("-"):
                meant = did_you_mean(name, self._option_string_actions)
            elif "=" in unknown[0] and f"--{name}" in self._option_string_actions:
                meant = f"; did you mean --{name}?"
            else:
                meant = "; a value follows the name of its flag"
            self.error(f"unrecognized{self.chosen}: {' '.join(unknown)}{meant}")
        return given

    def error(self, message: str) -> NoReturn:
        # Of --compile=False, argparse says that it ignores False.
        message = message.replace("ignored explicit argument", "takes no value, not")
        self.exit(2, f"error: {' '.join(message.split())} (-h lists all flags)\n")


def make_parser(description: str) -> Parser:
    """A parser that takes no abbreviations: `--max_iter 10` would silently mean --max_iters."""
    parser = Parser(
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.color = False  # Python 3.14 would write them as control characters, see `run_command`
    return parser


def parse(cls: type, description: str) -> Any:
    """The flags of the command line as an object of a dataclass."""
    parser = make_parser(description)
    add_flags(parser, cls)
    return cls(**vars(parser.parse_args()))


# Types of which values will do where another type is wanted.
ALSO = {float: (int, float), Path: (str, Path), str: (str, Path)}


def fits(value: Any, wanted: Any) -> bool:
    """Whether a value, and all in it, is of a type such as str, int | None, dict[str, int], or a
    record that has fields of some types, {"step": int}."""
    if isinstance(wanted, dict):
        return fits(value, dict) and all(fits(value.get(name), wanted[name]) for name in wanted)
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin is not None and not isinstance(value, origin):
        return False
    if origin is dict:
        return all(fits(key, parts[0]) and fits(each, parts[1]) for key, each in value.items())
    if origin is tuple and ... not in parts:
        return len(value) == len(parts) and all(map(fits, value, parts))
    if parts:  # of a list
        return all(fits(each, parts[0]) for each in value)
    if isinstance(value, bool):  # which Python takes for a number
        return wanted in (bool, Any, object)
    return wanted is Any or isinstance(value, ALSO.get(wanted, wanted))


def brief(value: Any) -> str:
    """A value in an error. What holds others is told by its type: in a checkpoint, a list may hold
    one list twice, that another, and so on, so that to spell it out has no end."""
    if isinstance(value, (dict, list, tuple, set)):
        return f"a {type(value).__name__}"
    return f"{value!r:.40}"


def check_settings(settings: Any) -> None:
    """Raises UserError if a field of a dataclass has a value of another type, as one from a file
    may be, or a value that its flag does not allow."""
    check_values(type(settings), vars(settings))


def check_values(cls: type, values: dict[str, Any]) -> None:
    """As `check_settings`, for values by name that are meant for fields of a dataclass. Other names
    are ignored."""
    types = get_type_hints(cls)
    for setting in fields(cls):
        if setting.name not in values:
            continue
        must, choices = map(setting.metadata.get, ("must", "choices"))
        name, value = f"--{setting.name}", values[setting.name]
        if isinstance(value, np.generic):  # which checkpoints do not hold
            raise UserError(f"{name} {value!r:.40}: give a plain value, {value.item()!r:.40}")
        if not fits(value, types[setting.name]):
            wanted = types[setting.name]
            # Python 3.14 calls each `int | None` a Union.
            expected = wanted.__name__ if isinstance(wanted, type) else wanted
            raise UserError(f"{name} {brief(value)} is not of type {expected}")
        if value is None:
            continue
        if must is not None and not RANGES[must](value):
            raise UserError(f"{name} {value} must be {must}")
        if choices is not None and value not in choices:
            raise UserError(f"{name} {value!s:.40} is not one of {', '.join(choices)}")


# --- signals ---


@contextlib.contextmanager
def stop_signals(bar: tqdm) -> Iterator[list[int]]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into a request: the step ends and is saved. Yields a
    list, which gets the signal's number. A second one ends the process, as without this. Python has
    signals only in the main thread: in others, as a notebook's server has, nothing happens."""
    received: list[int] = []
    previous = {}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def request(number: int, frame: object) -> None:
        received.append(number)
        restore()
        if number == signal.SIGINT:
            bar.write("stopping after this step (press Ctrl-C again to stop at once)")
        else:
            bar.disable = True  # the terminal may be gone

    if threading.current_thread() is threading.main_thread():
        for number in signal.valid_signals() & {1, 2, 15}:  # HUP, which Windows lacks, INT, TERM
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup ignores SIGHUP
                previous[number] = signal.signal(number, request)
    try:
        yield received
    finally:
        restore()


# --- devices ---


def pick_device(name: str) -> torch.device:
    """The device of this process: `auto` is CUDA where there is one, else the CPU. Processes of
    torchrun have one GPU each. UserError: the device is unknown, not there, or does not work."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and "LOCAL_RANK" in os.environ:
        if name != "cuda":
            raise UserError(f"--device {name}: with torchrun, use --device cuda or leave it out")
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        tried = torch.zeros(1, device=name)
        tried.item()
    except (RuntimeError, AssertionError, ImportError) as error:
        # There is none, it has no memory left, or is too old or too new for this PyTorch.
        reason = first_line(error)
        raise UserError(
            f"--device {name} does not work here ({reason}): try --device cpu"
        ) from None
    device = tried.device  # with its number: of --device cuda, too
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else streams and workers would make a context on GPU 0
        # cuDNN's attention makes a new plan for every length of a cache: up to 0.4 s a token.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def check_compiler(device: torch.device) -> None:
    """UserError: torch.compile does not work here, as it finds no compiler for this device."""
    try:
        torch.compile(torch.neg)(torch.ones(2, device=device))
    except torch._dynamo.exc.TorchDynamoException as error:  # loaded by now: it takes seconds
        reason = first_line(error)
        raise UserError(f"--compile does not work here ({reason}): try --no-compile") from None


def first_line(error: Exception) -> str:
    """The beginning of what PyTorch says, of which the rest is advice for its developers."""
    line, _, _ = str(error).strip().partition("\n")
    return shorten(line, 90, placeholder=" ...")


def mixed_seed(*numbers: int) -> int:
    """One seed of several numbers, every bit of which counts: of 32 bits, as PyTorch's generators
    on CPUs look at no more."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def all_finite(numbers: torch.Tensor) -> bool:
    """Whether no number is infinite or NaN: else the least or the largest is. (`isfinite` of all
    would take 20 times as long, and memory.)"""
    if not numbers.is_floating_point() or not numbers.numel():
        return True
    if numbers.itemsize == 1:  # float8 has no order
        numbers = numbers.float()
    return bool(torch.stack(numbers.aminmax()).isfinite().all())


CPU_INFO = Path("/proc/cpuinfo")


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 itself. GPUs do from compute capability 8.0 on, CPUs
    with AVX512-BF16 or AMX; others only emulate it, a CPU at a tenth of the speed."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu" and CPU_INFO.exists():
        flags = CPU_INFO.read_text().split()
        return "avx512_bf16" in flags or "amx_bf16" in flags
    return False


def training_dtype(dtype: str, device: torch.device) -> str:
    """What --dtype auto means on a device: what it multiplies fastest."""
    if dtype != "auto":
        return dtype
    if has_bfloat16(device):
        return "bfloat16"
    return "float16" if device.type == "cuda" else "float32"


# --- files ---


class Damage(Exception):
    """Raised within `reading`: why a file cannot be what it should be."""


class reading:
    """Wrap the reading of one file. UserError, ending with `fix`: it is missing or unreadable, or
    damaged as a `Damage` says. Whatever else is raised is a bug and keeps its traceback. So a
    reader must look for what may be missing, and raise Damage itself."""

    # A class: a generator under `contextmanager` that turns an error into another one is kept in a
    # circle of references by some releases of Python, 3.13.5 among them, with the frames that the
    # error passed, and so with a checkpoint that stays mapped.

    def __init__(self, path: str | Path, fix: str) -> None:
        self.path = path
        self.fix = fix

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        path, fix = self.path, self.fix
        if isinstance(error, FileNotFoundError):
            raise UserError(f"no {path}: {fix}") from None
        if isinstance(error, OSError) and error.errno is not None:  # the system raised it
            raise UserError(f"cannot read {path}: {error.strerror}: {fix}") from None
        if isinstance(error, Damage):
            refuse_lfs_pointer(path)
            raise UserError(f"{path} is damaged ({error!s:.200}): {fix}") from None


def refuse_lfs_pointer(path: str | Path) -> None:
    """UserError: a file is what a clone without Git LFS has in place of a large one."""
    begins = b"version https://git-lfs"
    if os.path.isfile(path):
        with open(path, "rb") as file:
            if file.read(len(begins)) == begins:
                fix = "fetch the file: git lfs install && git lfs pull"
                raise UserError(f"{path} is only a pointer of Git LFS: {fix}") from None


def parse_json(text: str | bytes, /, **types) -> dict[str, Any]:
    """A record that is written as JSON. Raises Damage if it is not one, or as `require_fields`."""
    try:
        record = json.loads(text, parse_constant=int)  # int refuses NaN, which is no JSON
    except (ValueError, RecursionError) as error:
        raise Damage(error) from None
    require_fields(record, **types)
    return record


def require_fields(record: Any, /, **types) -> None:
    """Raises Damage unless a record is a dict with values of these types."""
    if not isinstance(record, dict):
        raise Damage(f"{brief(record)} where a record should be")
    for name, wanted in types.items():
        if not fits(record.get(name), wanted):
            raise Damage(f"{name} is {brief(record.get(name))}")


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Wrap the writing of a file or folder. UserError: no room, or no permission."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def temporary_path(path: Path, token: str) -> Path:
    """Where a path is written until it is whole, beside it. Nobody's own file has such a name."""
    return path.with_name(f".{path.name}.{token}.tmp")


def unfinished(path: Path) -> list[Path]:
    """What commands that were killed left of writing a path."""
    pattern = temporary_path(path.with_name(glob.escape(path.name)), "[0-9a-f]" * 8)
    return list(path.parent.glob(pattern.name))


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


@contextlib.contextmanager
def atomic(path: str | Path, discard: Callable[[Path], None] = remove) -> Iterator[Path]:
    """Yield a temporary path for a file or a folder, renamed to `path` on success: readers never
    see half of it. What this, or an earlier command that was killed, leaves unfinished is handed to
    `discard`. UserError: it cannot be written."""
    path = Path(path)
    for left in unfinished(path):
        discard(left)
    temporary = temporary_path(path, secrets.token_hex(4))
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            if temporary.is_file():
                with open(temporary, "rb+") as file:
                    os.fsync(file.fileno())  # a power cut after the renaming must not find it empty
            os.replace(temporary, path)
    finally:
        if os.path.lexists(temporary):
            discard(temporary)


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Lock a folder that is written to. The system releases the lock when the process ends, in
    whatever way. Folders made for it go with it if nothing is written to them. UserError: another
    process has it."""
    folder = Path(folder)
    lock = folder / ".lock"
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    is_new = not os.path.lexists(lock)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(lock).st_mode):
                raise UserError(f"{lock} is no file of ours: delete it")
        file = open(lock, "a")  # noqa: SIM115
    with file:
        if fcntl:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samefile(lock, file.fileno()):  # its owner has just removed it
                    raise BlockingIOError
            except (BlockingIOError, FileNotFoundError):
                raise UserError(
                    f"{folder} is in use by another process; wait or choose another folder"
                ) from None
            except OSError:  # a file system without locks
                pass
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # Windows keeps files that are open
                if is_new:
                    lock.unlink()
                for path in made:
                    path.rmdir()
