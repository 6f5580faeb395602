"""Checkpoints: a ckpt.pt that is alone enough to sample, edit or resume; where tables then live.

A table file that is being trained changes all the time, while a checkpoint is a moment of it. So
training works on `live-tables.bin`, and saving copies that to a file of its own, `tables-ID.bin`,
before ckpt.pt is replaced by one that names this ID, and only then deletes the copy of before.
Whenever a crash comes, the ckpt.pt that is there finds its own tables.
"""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import tiktoken
import torch
from torch import Tensor

from common import UserError, atomic, flag, gib
from model import Decoder, ModelConfig
from offload import OffloadedTables
from tables.file import DTYPES, TableFile, regions
from tables.memory import RamHome, check_ram
from tables.tables import STREAMS, ResidentTables, StoredTables, Tables
from text import tokenizer

FORMAT = 1
LIVE, TABLES = "live-tables.bin", "tables-{}.bin"


def device_flag() -> str:
    return flag("auto", "auto (cuda, mps, cpu in that order) or one of them")


def offload_flag() -> str:
    about = "where tables and their optimizer states are: on the device, in RAM, on disk"
    return flag("none", about, choices=("none", "cpu", "disk"))


def snapshots(folder: Path) -> list[Path]:
    return sorted(folder.glob(TABLES.format("*")))


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
        file.map.flush()
    write(path, checkpoint)


def load_checkpoint(path: str | Path) -> dict:
    """Read what `save_checkpoint` wrote, onto the CPU: mapped into memory, so that what nobody
    touches is not read. Tables that have a file of their own are put where all others are.
    UserError: there is no such file, or it is damaged or something else."""
    try:
        checkpoint = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UserError(f"no checkpoint at {path}: train one with `python train.py`") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}, name a ckpt.pt") from None
    except Exception:  # damaged pickles raise nearly anything
        raise UserError(f"{path} is damaged or not a checkpoint: train it again") from None
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != FORMAT:
        raise UserError(f"{path} is not a checkpoint of this program (format {FORMAT})")
    rows = checkpoint.get("optimizer", {}).get("rows")
    if rows and "steps" in rows:  # an older one, which trained no embedding by rows
        checkpoint["optimizer"]["rows"] = {"tables": rows}
    rows = rows and rows.get("tables", rows)
    if checkpoint.get("tables"):
        file = TableFile(Path(path).parent / TABLES.format(checkpoint["tables"]))
        if file.id != checkpoint["tables"]:
            raise UserError(f"{file.path} is not the table file of {path}, but that of {file.id}")
        checkpoint["table_file"] = file
        checkpoint["model"] |= {f"tables.weight.{i}": rows for i, rows in enumerate(file.weight)}
        if rows:
            rows |= dict(zip(("m", "v", "count", "last"), file.moments(), strict=True))
    return checkpoint


@contextlib.contextmanager
def whole(path: str | Path):
    """Say of a checkpoint that something is missing in it, or does not fit."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} does not hold a whole model: {error}") from error


def load_model(
    path: str | Path, device: torch.device, offload: str = "none"
) -> tuple[Decoder, tiktoken.Encoding, dict]:
    """The model of a checkpoint in evaluation mode on `device`, its tables where `offload` says
    (`offload_flag`), its tokenizer, and the checkpoint. UserError: as `load_checkpoint`."""
    checkpoint = load_checkpoint(path)
    mapped = offload == "disk"  # what is used in place need not be made first
    with whole(path):
        tables = place(offload, device, checkpoint)
        with torch.device("meta") if mapped else contextlib.nullcontext():
            model = Decoder(ModelConfig(**checkpoint["config"]), tables=tables)
        model.load_state_dict(checkpoint["model"], assign=mapped)
        encoding = tokenizer.loads(checkpoint["tokenizer"])
    model = model.to(device).eval()
    return model.by_columns() if device.type == "cpu" else model, encoding, checkpoint


def place(
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
                home = RamHome(shape, dtype, training=training)
            elif training:
                check_disk(regions(shape, dtype)["end"][0], out_dir, resume)
                home = TableFile.create(out_dir / LIVE, shape, dtype)
            else:
                home = checkpoint["table_file"]
            home.fresh = checkpoint is None
            return (OffloadedTables if far else StoredTables)(home, device)

    return make


def check_disk(size: int, out_dir: Path, resume: bool) -> None:
    """Refuse a run without room for three table files: the live one, a snapshot (there already if
    the run resumes), and the next snapshot, which is written before the last one goes."""
    (out_dir / LIVE).unlink(missing_ok=True)  # of a run that crashed
    need = (2 if resume and snapshots(out_dir) else 3) * size
    here = next(p for p in (out_dir, *out_dir.absolute().parents) if p.is_dir())
    if need > (free := shutil.disk_usage(here).free):
        raise UserError(
            f"--offload disk needs {gib(need)} for tables and optimizer states, and {here} has "
            f"{gib(free)} free: choose another --out_dir or --table_dtype bfloat16"
        )


def encode(encoding: tiktoken.Encoding, text: str) -> list[int]:
    """Token ids of a document's text, after the <|endoftext|> that precedes every document."""
    return [encoding.eot_token, *encoding.encode_ordinary(text)]
