"""Shared helpers: errors a user can act on, flags, devices, files."""

import contextlib
import os
import re
import shutil
import sys
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from dataclasses import MISSING, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# What the value of a flag must be, in words and as a test, which NaN never passes.
RANGES: dict[str, Callable[[Any], bool]] = {
    "at least 1": lambda value: value >= 1,
    "a positive number": lambda value: 0 < value < float("inf"),
    "0 or more": lambda value: 0 <= value < float("inf"),
    "0 or more and below 1": lambda value: 0 <= value < 1,
    "between 0 and 1": lambda value: 0 < value < 1,
    "from 0 to 1": lambda value: 0 <= value <= 1,
    "above 0 and at most 1": lambda value: 0 < value <= 1,
    "0 or more, and fit 63 bits": lambda value: 0 <= value < 2**63,
}
# The most that it may be, unless its flag says otherwise: absurd, but products still fit float32.
MOST = {"at least 1": 2**28, "a positive number": 1e9, "0 or more": 1e9}


class UserError(Exception):
    """Something the user can put right: the message names the file or flag, the value, the fix."""


def run(main: Callable[[], None]) -> None:
    """Run a command: an error the user can act on becomes one line on stderr and exit code 1."""
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter shows "?"
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell reports Ctrl-C
    except UserError as error:
        sys.exit("error: " + " ".join(str(error).split()))
    except Exception as error:
        if no_memory(error):
            flags = "--device_batch_size, --batch_size or the model's sizes, or take --offload"
            sys.exit(f"error: out of memory: lower {flags}")
        if not isinstance(error, OSError):
            raise
        # The output is full, or its reader has gone: `| head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        where = error.filename or "standard output"
        sys.exit(1 if isinstance(error, BrokenPipeError) else f"error: {where}: {error.strerror}")


def no_memory(error: Exception) -> bool:
    """Whether memory, of whatever device, is used up, or a size beyond what can be counted."""
    words = "MemoryError|out of memory|t alloc|allocate mem|size calc"  # Python's and PyTorch's
    return bool(re.search(words, repr(error)))


def flag(default: Any, about: str, **more) -> Any:
    """A field of a dataclass that is a flag of a command, too. `-h` says what it is `about`, and
    `shown` for its default. It `must` be what a key of RANGES says and have at most `most`, or be
    one of its `choices`; `only` the named stages or kinds of --ffn heed it."""
    return field(default=default, metadata=dict(about=about, **more))


def add_flags(parser, kind: type) -> None:
    """Add the flags of a dataclass to a parser. What is not given is not in its namespace."""
    for each in [each for each in fields(kind) if "about" in each.metadata]:
        shown = each.metadata.get("shown")
        if not shown and each.default not in (None, False, "", MISSING):
            shown = each.default
        options = dict(help=each.metadata["about"] + (f" ({shown})" if shown else ""))
        types = [t for t in (get_args(each.type) or [each.type]) if t is not NoneType]
        if types == [bool]:
            on = each.default is False and not shown
            options["action"] = "store_true" if on else BooleanOptionalAction
        else:
            options.update(type=types[0], choices=each.metadata.get("choices"))
        parser.add_argument(f"--{each.name}", default=SUPPRESS, **options)


def make_parser(description: str) -> ArgumentParser:
    return ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)


def parse(kind: type, description: str) -> Any:
    parser = make_parser(description)
    add_flags(parser, kind)
    return kind(**vars(parser.parse_args()))


def check_ranges(settings: Any, error: type = UserError, form: str = "--{} {}") -> None:
    """Raises an error, which begins in this form, if a field of a dataclass is out of its range."""
    for each in fields(settings):
        must, value = each.metadata.get("must"), getattr(settings, each.name)
        most = each.metadata.get("most", MOST.get(must, float("inf")))
        if must and value is not None and not (RANGES[must](value) and value <= most):
            must = f"at most {most:,.0f}" if value > most else must
            raise error(f"{form.format(each.name, value)} must be {must}")


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA, then MPS, then the CPU. UserError: the device is unknown or not there."""
    if name == "auto":
        cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
        name = "cuda" if cuda else "mps" if mps else "cpu"
    try:
        torch.zeros(1, device=name).item()  # what a device is good for
        return torch.device(name)
    except (RuntimeError, AssertionError, ImportError):
        raise UserError(f"--device {name} is not available here: auto finds what is") from None


def has_bfloat16(device: torch.device) -> bool:
    """Whether a GPU multiplies bfloat16 itself (compute capability 8.0); older ones emulate it."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """UserError: a file or folder cannot be written (no room, no permission)."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # A file that PyTorch could not write it cannot end, either, which is another error.
        first = (isinstance(error, RuntimeError) and error.__context__) or error
        if isinstance(first, OSError):
            raise UserError(f"cannot write {path}: {first.strerror or first}") from error
        raise first from None


@contextlib.contextmanager
def reading(path: str | Path, fix: str) -> Iterator[Path]:
    """Yield a file to be read. UserError, which says what helps: it is missing or damaged."""
    try:
        yield path
    except FileNotFoundError as error:
        other = "" if str(error.filename) in str(path) else f" (no {error.filename})"
        raise UserError(f"no {path}{other}: {fix}") from None
    except Exception as error:  # damaged files raise nearly anything
        if isinstance(error, UserError) or no_memory(error):
            raise
        if isinstance(error, OSError) and error.strerror:
            raise UserError(f"cannot read {path}: {error.strerror}: {fix}") from None
        raise UserError(f"{path} is damaged ({error!s:.200}): {fix}") from None


@contextlib.contextmanager
def locked(folder: str | Path, wait: bool = False) -> Iterator[None]:
    """Keep others out of a folder that is written to. The system unlocks it when its owner ends, in
    whatever way. UserError: somebody else has it; wait: until it is free."""
    with writing(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = open(Path(folder) / ".lock", "a")  # noqa: SIM115
    with file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UserError(f"another run is writing to {folder}: wait, or take another") from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        except BaseException:
            if not wait and [path.name for path in Path(folder).glob("*")] == [".lock"]:
                shutil.rmtree(folder, ignore_errors=True)  # nothing was written, nobody waits
            raise


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
