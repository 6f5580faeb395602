"""Checkpoints: a ckpt.pt that is alone enough to sample, edit or resume; where tables then live.

A table file that is being trained changes all the time, while a checkpoint is a moment of it. So
training works on `live-tables.bin`, and saving copies that to a file of its own, `tables-ID.bin`,
before ckpt.pt is replaced by one that names this ID, and only then deletes the copy of before.
Whenever a crash comes, the ckpt.pt that is there finds its own tables.
"""

import contextlib
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import tiktoken
import torch
from torch import Tensor

from common import UserError, atomic, flag, free_ram, gib, no_memory
from model import Decoder, ModelConfig, outline
from offload import OffloadedTables
from tables.file import DTYPES, TableFile, regions
from tables.memory import RamStorage, check_ram
from tables.tables import STREAMS, ResidentTables, StoredTables, Tables
from text import tokenizer

FORMAT = 1
LIVE, TABLES = "live-tables.bin", "tables-{}.bin"
# What PyTorch says of a pickle that names what it would have to call.
CODE = r"(?<=GLOBAL )\S+|(?:call reduce|instantiate|build) .{,60}"


def device_flag() -> str:
    return flag("auto", "auto (cuda, mps, cpu in that order) or one of them")


def offload_flag(**more) -> str:
    about = "where tables and their optimizer states are: on the device, in RAM, on disk"
    return flag("none", about, choices=("none", "cpu", "disk"), **more)


def snapshots(folder: Path) -> list[Path]:
    return sorted(folder.glob(TABLES.format("*")))


def remove_leftovers(out_dir: Path) -> None:
    """Remove what a run that was killed left in its folder; for who has `locked` it."""
    names = ("ckpt.pt", "best.pt", "metrics.jsonl", "loss.png", TABLES.format("*"), "run*")
    left = [out_dir / LIVE, *(path for name in names for path in out_dir.glob(name + ".tmp"))]
    with contextlib.suppress(UserError):  # who does not know what is named removes nothing
        named = TABLES.format(read_checkpoint(out_dir / "ckpt.pt").get("tables"))
        left += [path for path in snapshots(out_dir) if path.name != named]
    for path in left:
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def save_checkpoint(path: str | Path, model: Decoder, encoding: tiktoken.Encoding, **state) -> None:
    """Write a checkpoint: config, weights, tokenizer, and `state`. Tables on disk stay out of it: a
    copy of their file goes beside it first."""
    folder, name = Path(path).parent, None
    model.tables.flush()
    if model.tables.file:
        name = model.tables.file.copy(lambda name: folder / TABLES.format(name))
    checkpoint = dict(format=FORMAT, config=asdict(model.config), model=model.state_dict())
    checkpoint |= dict(tokenizer=tokenizer.dumps(encoding), tables=name, **state)
    write(Path(path), checkpoint)


def write(path: Path, checkpoint: dict) -> None:
    """Put a checkpoint in its place, and remove the tables of the one that was there."""
    own = path.with_name(TABLES.format(checkpoint["tables"]))
    try:
        with atomic(path) as temporary, open(temporary, "wb") as file:
            torch.save(checkpoint, file)
    except UserError:
        own.unlink(missing_ok=True)  # nobody will ask for it
        raise
    for other in snapshots(path.parent):
        if other != own:
            with contextlib.suppress(OSError):  # Windows keeps what somebody has open
                other.unlink()


def rewrite(
    origin: Path, path: Path, checkpoint: dict, ids: Tensor, rows: list[Tensor], edits: list[dict]
) -> None:
    """Write the checkpoint that was loaded from `origin` to `path`, with other `rows` [n, W] for
    tokens `ids` [n] in each table, and the record of `edits` made so far. All else goes from file
    to file. UserError: another checkpoint, or the tables of one, would be lost."""
    checkpoint = {**checkpoint, "model": dict(checkpoint["model"]), "edits": edits}
    if not (path.exists() and path.samefile(origin)):
        if path.exists():
            raise UserError(f"--save {path} exists: choose another name, or {origin} itself")
        if snapshots(path.parent):
            raise UserError(
                f"--save {path}: tables of another checkpoint are in {path.parent}, which one that "
                "is written there replaces: choose another folder"
            )
    weights = [checkpoint["model"].pop(f"tables.weight.{i}") for i in range(len(rows))]
    if file := checkpoint.pop("table_file", None):
        name = file.copy(lambda name: path.with_name(TABLES.format(name)))
        file = TableFile(path.with_name(TABLES.format(name)), writable=True)
        weights, checkpoint["tables"] = file.weight, name
        if optimizer := checkpoint.get("optimizer"):
            by_rows = optimizer["rows"]
            steps = {"steps": by_rows["tables"]["steps"]}  # the file has all else
            checkpoint["optimizer"] = {**optimizer, "rows": {**by_rows, "tables": steps}}
    else:  # mapped from ckpt.pt, which is not written to: pages that change become our own
        checkpoint["model"] |= {f"tables.weight.{i}": w for i, w in enumerate(weights)}
    for weight, new in zip(weights, rows, strict=True):
        weight[ids] = new
    if file:
        file.seal()
    write(path, checkpoint)


def load_checkpoint(path: str | Path, verify: bool = False) -> dict:
    """Read what `save_checkpoint` wrote, onto the CPU: mapped into memory, so that what nobody
    touches is not read, unless it is to `verify` the checksums. Tables that have a file of their
    own are put where all others are. UserError: there is no such file, or it is damaged or
    something else."""
    checkpoint = read_checkpoint(path)
    if verify:
        with damaged(path), zipfile.ZipFile(path) as records:
            if bad := records.testzip():
                raise ValueError(f"checksum of {bad}")
    with checkpoint_errors(path):
        rows = checkpoint.get("optimizer", {}).get("rows")
        if rows and "steps" in rows:  # an older one, which trained no embedding by rows
            checkpoint["optimizer"]["rows"] = {"tables": rows}
        rows = rows and rows.get("tables", rows)
        if name := checkpoint.get("tables"):
            try:
                file = TableFile(Path(path).parent / TABLES.format(name))
            except UserError:
                if read_checkpoint(path).get("tables") == name:
                    raise
                return load_checkpoint(path, verify)  # a training run saved in between
            if file.id != name:
                raise UserError(f"{file.path} is not the table file of {path}, but of {file.id}")
            if verify:
                file.verify()
            checkpoint["table_file"] = file
            checkpoint["model"] |= {f"tables.weight.{i}": w for i, w in enumerate(file.weight)}
            if rows:
                rows |= dict(zip(("m", "v", "count", "last"), file.moments(), strict=True))
    return checkpoint


def read_checkpoint(path: str | Path) -> dict:
    """The file of a checkpoint alone, as `load_checkpoint`."""
    with damaged(path):
        loaded = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(loaded, dict) or loaded.get("format") != FORMAT:
        raise UserError(f"{path} is not a checkpoint of this program (format {FORMAT})")
    return loaded


@contextlib.contextmanager
def damaged(path: str | Path) -> Iterator[None]:
    """Say of a checkpoint that it cannot be read, and why."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"no checkpoint at {path}: train one with `python train.py`") from None
    except Exception as error:  # damaged pickles raise nearly anything
        if no_memory(error):
            raise
        if isinstance(error, OSError) and error.strerror:
            raise UserError(f"cannot read {path}: {error.strerror}, name a ckpt.pt") from None
        if isinstance(error, pickle.UnpicklingError) and (code := re.search(CODE, str(error))):
            raise UserError(
                f"{path} was not opened: it would run code ({code[0]}), which no checkpoint of "
                "this program does: do not trust it, unless you know that it is damaged"
            ) from None
        raise UserError(f"{path} is damaged or not a checkpoint: train it again") from None


@contextlib.contextmanager
def checkpoint_errors(path: str | Path) -> Iterator[None]:
    """Say of a checkpoint that something is missing in it, or does not fit."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as e:
        if no_memory(e):
            raise
        raise UserError(f"{path} does not hold a whole model: {e}") from e


def load_model(
    path: str | Path, device: torch.device, offload: str = "none"
) -> tuple[Decoder, tiktoken.Encoding, dict]:
    """The model of a checkpoint in evaluation mode on `device`, its tables where `offload` says
    (`offload_flag`), its tokenizer, and the checkpoint. UserError: as `load_checkpoint`."""
    checkpoint = load_checkpoint(path)
    mapped = offload == "disk"  # what is used in place need not be made first
    with checkpoint_errors(path):
        if not mapped:
            check_memory(ModelConfig(**checkpoint["config"]), 4, 2)
        tables = make_tables(offload, device, checkpoint)
        with outline() if mapped else contextlib.nullcontext():
            model = Decoder(ModelConfig(**checkpoint["config"]), tables=tables)
        model.load_state_dict(checkpoint["model"], assign=mapped)
        encoding = tokenizer.loads(checkpoint["tokenizer"])
    model = model.to(device).eval()
    return model.use_column_major_weights() if device.type == "cpu" else model, encoding, checkpoint


def make_tables(
    offload: str,
    device: torch.device,
    checkpoint: dict | None = None,
    out_dir: Path | None = None,
    table_dtype: str = "float32",
    resume: bool = False,
) -> Callable[[int, int, int], Tables]:
    """What makes the tables of a `Decoder` on `device` where they shall live: a function of
    (n_table, V, W), which raises UserError where there is no room. The tables of a `checkpoint` are
    read where they are, or by a training run, which also needs room for moments, copied; it is a
    run if there is an `out_dir`."""
    training, dtype = out_dir is not None, DTYPES[table_dtype]
    if not training and "tables.weight.0" in checkpoint["model"]:
        dtype = checkpoint["model"]["tables.weight.0"].dtype

    def make(n_table: int, vocab_size: int, width: int) -> Tables:
        shape, far = (vocab_size, n_table, width), device.type in STREAMS
        file = offload == "disk" and (training or "table_file" in checkpoint)
        if n_table and offload == "cpu":
            check_ram(shape, dtype, training)
        if not n_table or offload == "none" or not (file or far):
            return ResidentTables(n_table, vocab_size, width, dtype)  # maybe a mapped ckpt.pt's
        with torch.device("cpu"):  # whatever device the rest of the model is made on
            if not file:
                storage = RamStorage(shape, dtype, training=training)
            elif training:
                check_disk(regions(shape, dtype)["end"][0], out_dir, resume)
                storage = TableFile.create(out_dir / LIVE, shape, dtype)
            else:
                storage = checkpoint["table_file"]
            storage.fresh = checkpoint is None
            return (OffloadedTables if far else StoredTables)(storage, device)

    return make


def check_memory(config: ModelConfig, dense: int, table: int, more: int = 0) -> None:
    """Refuse a model that free memory cannot hold, before the system kills who builds it: so many
    bytes for a number of the backbone and for one of tables, and `more`. ValueError: as Decoder."""
    with outline():
        sizes = Decoder(config).sizes()
    need, free = dense * sizes["backbone"] + table * sizes["table"] + more, free_ram()
    if free is not None and need > free:
        raise UserError(
            f"the model needs {gib(need)} of RAM and {gib(free)} are available: lower its sizes, "
            "--batch_size or --device_batch_size, or take --offload disk"
        )


def check_disk(size: int, out_dir: Path, resume: bool) -> None:
    """Refuse a run without room for three table files: the live one, a snapshot (there already if
    the run resumes), and the next snapshot, which is written before the last one goes."""
    need = (2 if resume and snapshots(out_dir) else 3) * size
    here = next(p for p in (out_dir, *out_dir.absolute().parents) if p.is_dir())
    if need > (free := shutil.disk_usage(here).free):
        raise UserError(
            f"--offload disk needs {gib(need)} for tables and optimizer states, and {here} has "
            f"{gib(free)} free: choose another --out_dir or --table_dtype bfloat16"
        )
