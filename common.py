"""The ground that everything stands on: errors a user can act on, flags, devices, files."""

import argparse
import contextlib
import errno
import os
import re
import sys
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
    except UserError as error:
        sys.exit("error: " + " ".join(str(error).split()))
    except Exception as error:
        if no_memory(error):
            sys.exit(f"error: {no_memory(error)}")
        if not isinstance(error, OSError):
            raise
        # The output is full, or its reader has gone: `| head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        where = error.filename or "standard output"
        sys.exit(1 if isinstance(error, BrokenPipeError) else f"error: {where}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell reports Ctrl-C


def no_memory(error: BaseException) -> str:
    """What to say of an error that means that memory is used up, "" of any other."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "MPS backend out of memory" in text:
        return "out of GPU memory: lower --device_batch_size, --offload cpu or --device cpu"
    # PyTorch: "can't allocate memory", "unable to mmap ...", and sizes beyond what can be counted.
    refused = isinstance(error, RuntimeError) and re.search(r"t alloc|allocate mem|size calc", text)
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM or refused:
        return (
            "out of memory: lower --device_batch_size, --batch_size or the sizes of the model, or "
            "take --offload disk"
        )
    return ""


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
            options["action"] = "store_true" if on else argparse.BooleanOptionalAction
        else:
            options.update(type=types[0], choices=each.metadata.get("choices"))
        parser.add_argument(f"--{each.name}", default=argparse.SUPPRESS, **options)


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser that shows a command's docstring as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parse(kind: type, description: str) -> Any:
    """The command line of a command whose flags are those of a dataclass, as one of it."""
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


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """UserError: a file or folder cannot be written (no room, no permission)."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def locked(folder: str | Path, wait: bool = False) -> Iterator[None]:
    """Keep others out of a folder that is written to. The system unlocks it when its owner ends, in
    whatever way, so no lock is ever left behind. UserError: somebody else has it; wait: until it is
    free."""
    path = Path(folder) / ".lock"
    with writing(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a")  # noqa: SIM115
    with file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UserError(
                f"another run is writing to {folder}: wait for it, or choose another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` on success: readers never see half a file.
    UserError: it cannot be written."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)  # of who was killed
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())  # a power cut after the renaming must not find it empty
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def gib(size: int) -> str:
    """A size for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
