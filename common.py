"""What every command shares: errors a user can act on, flags, devices, files."""

import contextlib
import os
import shlex
import signal
import sys
import threading
import traceback
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from dataclasses import MISSING, field, fields
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from typing import Any, get_args

# Before torch is loaded: for how long OpenMP's threads wait for each other by spinning. With its
# own limit, every small product waits beside one busy process until that is off its core.
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


def run(main: Callable[[], None]) -> None:
    """Run a command. A UserError, or running out of memory, is one line and exit code 1."""
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's output has no such method
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a letter shows "?"
    try:
        main()
        sys.stdout.flush()
    except UserError as error:
        sys.exit("error: " + " ".join(str(error).split()))
    except KeyboardInterrupt as interrupt:
        frame = traceback.extract_tb(interrupt.__traceback__)[-1]
        print(f"\ninterrupted in {frame.filename}, line {frame.lineno}", file=sys.stderr)
        sys.exit(130)  # as a shell reports Ctrl-C
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:  # nobody reads our standard output any more, as behind `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        raise  # another pipe is broken: a bug
    except (MemoryError, RuntimeError) as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # within torch.save
            sys.exit(130)
        if not is_out_of_memory(error):
            raise
        flags = "--device_batch_size, --batch_size or the model's sizes, or try --offload"
        sys.exit(f"error: out of memory: lower {flags}")


def command_line(*words: object) -> str:
    """A command to copy into a shell: python with these words."""
    return shlex.join(["python", *map(str, words)])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory, of whatever device, is used up. PyTorch has no type for a CPU's."""
    by_type = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return by_type or "DefaultCPUAllocator" in str(error)


# --- flags ---

# What the value of a flag must be, in words and as a test, which NaN never passes.
RANGES: dict[str, Callable[[Any], bool]] = {
    "at least 1": lambda value: 1 <= value < 2**31,
    "a positive number": lambda value: 0 < value < 1e9,
    "0 or more": lambda value: 0 <= value < 1e9,
    "0 or more and below 1": lambda value: 0 <= value < 1,
    "between 0 and 1": lambda value: 0 < value < 1,
    "above 0 and at most 1": lambda value: 0 < value <= 1,
    "0 or more, and fit 63 bits": lambda value: 0 <= value < 2**63,
}


def flag(default: Any, about: str, **more) -> Any:
    """A field of a dataclass that is also a flag of a command.

    Args:
        about: its line in `-h`, with the default behind it, or `shown` in place of the default.
        more: `must`, a key of RANGES; `choices` and `nargs`, as of argparse; `of`, a test whether
            a kind of --ffn has this flag.
    """
    return field(default=default, metadata={"about": about, **more})


def add_flags(parser: ArgumentParser, kind: type, ffn: str = "") -> None:
    """Add the flags of a dataclass to a parser, without those that this --ffn does not have. A
    field without a default is given without its name. What is not given stays out of the
    namespace."""
    for setting in fields(kind):
        more = setting.metadata
        if "about" not in more or ("of" in more and not more["of"](ffn)):
            continue
        name = f"--{setting.name}"
        shown = more.get("shown", setting.default)
        if setting.default is MISSING:
            name = setting.name
            shown = None
        options = {"help": more["about"], "default": SUPPRESS}
        if shown:
            options["help"] += f" ({shown})"
        value_type = (get_args(setting.type) or [setting.type])[0]  # int of `int | None`
        is_path = value_type is Path or setting.name in ("ckpt", "data_dir", "tokenizer")
        if value_type is not bool:
            options["type"] = partial(expanded, value_type) if is_path else value_type
            options["choices"] = more.get("choices")
            options["nargs"] = more.get("nargs")
        elif shown or setting.default is None:
            options["action"] = BooleanOptionalAction
        else:
            options["action"] = "store_true"
        parser.add_argument(name, **options)


def expanded(kind: type, text: str) -> Any:
    """A path, or several, with the home folder for each `~` that a shell has left there."""
    return kind(",".join(map(os.path.expanduser, text.split(","))))


def make_parser(description: str) -> ArgumentParser:
    """A parser that takes no abbreviations: `--max_iter 10` would silently mean --max_iters."""
    return ArgumentParser(
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parse(kind: type, description: str) -> Any:
    """The flags of the command line as an object of a dataclass."""
    parser = make_parser(description)
    add_flags(parser, kind)
    return kind(**vars(parser.parse_args()))


def check_ranges(settings: Any) -> None:
    """Raises UserError if a field of a dataclass is out of the range that its flag names."""
    for setting in fields(settings):
        must = setting.metadata.get("must")
        value = getattr(settings, setting.name)
        if must is not None and value is not None and not RANGES[must](value):
            raise UserError(f"--{setting.name} {value} must be {must}")


# --- signals ---


class StopSignals:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a request: the step ends and is saved.
    `number` is the signal's, 0 before. A second one raises KeyboardInterrupt. Python has signals
    only in the main thread: in others, as a notebook's or a server's, nothing happens."""

    def __init__(self, bar: tqdm) -> None:
        self.bar = bar
        self.number = 0
        self.previous = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            # nohup ignores SIGHUP, and so do we then.
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self.previous[number] = signal.signal(number, self.handle)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame: object) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number
        if number == signal.SIGINT:
            self.bar.write(
                "stopping after this step (press Ctrl-C again to stop at once, without saving)"
            )
        else:
            self.bar.disable = True  # the terminal may be gone


# --- devices ---


def pick_device(name: str) -> torch.device:
    """The device of this process: `auto` is CUDA where there is one, else the CPU. Processes of
    torchrun have one GPU each. UserError: the device is unknown or not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and "LOCAL_RANK" in os.environ:
        if name != "cuda":
            raise UserError(f"--device {name}: with torchrun, use --device cuda or leave it out")
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError):
        raise UserError(f"--device {name} is not available; try --device auto") from None
    device = torch.device(name)
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)  # else streams and workers would make a context on GPU 0
        # cuDNN's attention makes a new plan for every length of a cache: up to 0.4 s a token.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if device.type == "mps":
        print("note: untested on MPS", file=sys.stderr)
    return device


def mixed(*numbers: int) -> int:
    """A seed of 32 bits that depends on every bit of the numbers: on CPUs, PyTorch's generators
    look at no more."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def decode_in_one_thread(device: torch.device) -> None:
    """For commands that decode a token or two at a time: on a CPU, more threads are no faster, and
    slower beside other programs (docs/claims.md). OMP_NUM_THREADS says otherwise."""
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


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


# --- files ---


class Damage(Exception):
    """Raised within `reading`: why a file cannot be what it should be."""


@contextlib.contextmanager
def reading(path: str | Path, fix: str) -> Iterator[str | Path]:
    """Wrap the reading of one file. UserError, ending with `fix`: it is missing or unreadable, not
    JSON, or damaged as a `Damage` says. Whatever else is raised is a bug, and keeps its traceback:
    who looks into data checks for what may be missing."""
    try:
        yield path
    except FileNotFoundError:
        raise UserError(f"no {path}: {fix}") from None
    except OSError as error:
        if error.errno is None:  # raised by a program, not by the system
            raise
        raise UserError(f"cannot read {path}: {error.strerror}: {fix}") from None
    except (Damage, JSONDecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged ({error!s:.200}): {fix}") from None


def require_fields(record: Any, *names: str) -> None:
    """Raises Damage unless a record is a dict that has these names."""
    if not isinstance(record, dict):
        raise Damage(f"{record!r:.40} where a record should be")
    missing = [name for name in names if name not in record]
    if missing:
        raise Damage(f"it lacks {', '.join(missing)}")


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Wrap the writing of a file or folder. UserError: no room, or no permission."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    except RuntimeError as error:
        # After a failed write, PyTorch fails to close the file: a second error hides the first.
        first = error.__context__
        if not isinstance(first, OSError):
            raise
        raise UserError(f"cannot write {path}: {first.strerror or first}") from error


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` on success: readers never see half a file.
    UserError: it cannot be written."""
    temporary = Path(f"{path}.tmp")
    try:
        with writing(path):
            temporary.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())  # a power cut after the renaming must not find it empty
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Lock a folder that is written to. The system releases the lock when the process ends, in
    whatever way. UserError: another process has it."""
    folder = Path(folder)
    is_new = not os.path.exists(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a")  # noqa: SIM115
    with file:
        if fcntl:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fix = "wait or choose another folder"
                raise UserError(f"{folder} is in use by another process; {fix}") from None
            except OSError:  # a file system without locks
                pass
        try:
            yield
        except BaseException:
            # A command that was refused leaves no empty folder behind.
            if is_new and [path.name for path in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()
                folder.rmdir()
            raise
