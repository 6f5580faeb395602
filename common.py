"""What the commands share: errors a user can act on, devices, atomic files, checkpoints."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import tiktoken
import torch

import tokenizer
from homes import RamHome, TableError, check_ram
from model import Decoder, ModelConfig
from offload import OffloadedTables
from tablefile import DTYPES, LIVE, TableFile, check_disk, keep_only, table_path
from tables import STREAMS, ResidentTables, StoredTables, Tables

CHECKPOINT_FORMAT = 1


class UserError(Exception):
    """Something the user can put right: the message names the file or flag, the value, the fix."""


def run(main: Callable[[], None]) -> None:
    """Run a command: an error the user can act on becomes one line on stderr and exit code 1."""
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter shows "?"
    try:
        main()
        sys.stdout.flush()
    except (UserError, TableError) as error:
        sys.exit("error: " + " ".join(str(error).split()))
    except torch.OutOfMemoryError:
        sys.exit(
            "error: out of GPU memory: lower --device_batch_size, --offload cpu or --device cpu"
        )
    except BrokenPipeError:  # the reader of our output has gone: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell reports Ctrl-C


def add_offload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--offload",
        choices=("none", "cpu", "disk"),
        default="none",
        help="where tables and their optimizer states are: on the device, in RAM, on disk (none)",
    )


def check_seed(seed: int) -> None:
    """Refuse what the random generators do not take."""
    if not 0 <= seed < 2**63:
        raise UserError(f"--seed {seed} must be 0 or more, and fit 63 bits")


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA, then MPS, then the CPU.

    Raises:
        UserError: the device is unknown or not there.
    """
    has = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind in has if has[kind])
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: unknown, use auto, cuda, mps or cpu") from None
    beyond = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    if not has.get(device.type, False) or beyond:
        here = ", ".join(kind for kind in has if has[kind])
        raise UserError(f"--device {name}: not available here, use one of: {here}")
    return device


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` on success: readers never see half a file.

    Raises:
        UserError: the file cannot be written (no room, no permission).
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())  # a power cut after the renaming must not find it empty
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def save_checkpoint(path: str | Path, model: Decoder, encoding: tiktoken.Encoding, **state) -> None:
    """Write a checkpoint, alone enough to sample: config, weights, tokenizer, and `state`.

    Tables on disk stay out of it: a copy of their file, `tables-ID.bin`, goes beside it first."""
    path = Path(path)
    model.tables.flush()
    table_file = model.tables.file and model.tables.file.snapshot(path.parent)
    checkpoint = {
        "format": CHECKPOINT_FORMAT,
        "config": asdict(model.config),
        "model": model.state_dict(),
        "tokenizer": tokenizer.dumps(encoding),
        "tables": table_file,
        **state,
    }
    try:
        with atomic(path) as temporary:
            try:
                torch.save(checkpoint, temporary)
            except RuntimeError as error:  # how torch.save reports a full disk
                raise OSError(f"no room, or the disk failed ({error})") from error
    except UserError:
        if table_file:  # nobody will ask for it
            table_path(path.parent, table_file).unlink(missing_ok=True)
        raise
    keep_only(path.parent, table_file)


def load_checkpoint(path: str | Path) -> dict:
    """Read what `save_checkpoint` wrote, onto the CPU: mapped into memory, so that what nobody
    touches is not read. Tables that have a file of their own are put where all others are.

    Raises:
        UserError: there is no such file, or it is damaged or something else.
    """
    try:
        checkpoint = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UserError(f"no checkpoint at {path}: train one with `python train.py`") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: name the ckpt.pt in it") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except Exception:  # damaged pickles raise nearly anything
        raise UserError(f"{path} is damaged or not a checkpoint: train it again") from None
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != CHECKPOINT_FORMAT:
        raise UserError(f"{path} is not a checkpoint of this program (format {CHECKPOINT_FORMAT})")
    if checkpoint.get("tables"):
        file = TableFile(table_path(Path(path).parent, checkpoint["tables"]))
        if file.id != checkpoint["tables"]:
            raise UserError(f"{file.path} is not the table file of {path}, but that of {file.id}")
        checkpoint["table_file"] = file
        checkpoint["model"] |= {f"tables.weight.{i}": rows for i, rows in enumerate(file.weight)}
        if checkpoint.get("optimizer"):
            states = zip(("m", "v", "count", "last"), file.moments(), strict=True)
            checkpoint["optimizer"]["rows"] |= dict(states)
    return checkpoint


def load_model(
    path: str | Path, device: torch.device, offload: str = "none"
) -> tuple[Decoder, tiktoken.Encoding, dict]:
    """The model of a checkpoint in evaluation mode on `device`, its tokenizer, and the checkpoint.

    offload: where its tables shall live, see `place`.

    Raises:
        UserError: as `load_checkpoint`.
    """
    checkpoint = load_checkpoint(path)
    try:
        tables = place(offload, device, checkpoint=checkpoint)
        mapped = offload == "disk"  # what is used in place need not be made first
        with torch.device("meta") if mapped else contextlib.nullcontext():
            model = Decoder(ModelConfig(**checkpoint["config"]), tables=tables)
        model.load_state_dict(checkpoint["model"], assign=mapped)
        encoding = tokenizer.loads(checkpoint["tokenizer"])
    except torch.OutOfMemoryError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} does not hold a whole model: {error}") from error
    return model.to(device).eval(), encoding, checkpoint


def place(
    offload: str,
    device: torch.device,
    dtype: str = "float32",
    *,
    checkpoint: dict | None = None,
    out_dir: Path | None = None,
    resume: bool = False,
) -> Callable[[int, int, int], Tables]:
    """What makes the tables of a `Decoder` where they shall live.

    Args:
        offload: none (on the device), cpu or disk.
        device: where the model computes.
        dtype: of rows; those to be sampled from have the checkpoint's.
        checkpoint: will be loaded into the model, so no rows are drawn. On disk they are read from
            it in place.
        out_dir: of a training run, which needs room for moments, and on disk for a file.
        resume: it goes on with what is there.

    Returns:
        a function of (n_table, V, W), which raises TableError where there is no room.
    """
    training, kind = out_dir is not None, DTYPES[dtype]
    if not training and checkpoint and "tables.weight.0" in checkpoint["model"]:
        kind = checkpoint["model"]["tables.weight.0"].dtype

    def make(n_table: int, vocab_size: int, width: int) -> Tables:
        shape, far = (vocab_size, n_table, width), device.type in STREAMS
        if not n_table or offload == "none":
            return ResidentTables(n_table, vocab_size, width, kind)
        if offload == "disk" and training:
            check_disk(shape, kind, out_dir, resume)
            home = TableFile.create(out_dir / LIVE, shape, kind)
        elif offload == "disk" and "table_file" in checkpoint:
            home = checkpoint["table_file"]
        else:
            if offload == "cpu":
                check_ram(shape, kind, training)
            if not far:  # in RAM, or in a ckpt.pt that is mapped into it
                return ResidentTables(n_table, vocab_size, width, kind)
            home = RamHome(shape, kind, training=training)
        home.fresh = home.fresh and checkpoint is None
        return (OffloadedTables if far else StoredTables)(home, device)

    return make


def encode(encoding: tiktoken.Encoding, text: str) -> list[int]:
    """Token ids of a document's text, after the <|endoftext|> that precedes every document."""
    return [encoding.eot_token, *encoding.encode_ordinary(text)]
