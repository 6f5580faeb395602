"""Checkpoints: a ckpt.pt that is enough to sample, edit or resume.

Training changes tables on disk all the time, in the folder `live-tables`. So saving copies them to
a folder of their own, `tables-ID`, then replaces ckpt.pt by one that names this ID, and only then
deletes those that no checkpoint names. Whenever a crash comes, ckpt.pt finds its own tables.
"""

import contextlib
import pickle
import secrets
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import tiktoken
import torch

from common import UserError, atomic, flag, has_bfloat16, reading
from model import Decoder, ModelConfig, outline
from offload import make_tables
from tables.storage import DiskStorage
from tables.tables import StoredTables
from text import tokenizer
from training import huggingface, ranks

FORMAT = 2
LIVE = "live-tables"


def device_flag() -> str:
    return flag("auto", "auto (cuda, mps, cpu in that order) or one of them")


def offload_flag(**more) -> str:
    about = "where tables and their optimizer states are: on the device, in RAM, on disk"
    return flag("none", about, choices=("none", "cpu", "disk"), **more)


def decoding_dtype_flag() -> str:
    about = "of weights, keys and values; auto: bfloat16 on GPUs that multiply it"
    return flag("auto", about, choices=("auto", "float32", "bfloat16"))


def snapshots(folder: Path) -> list[Path]:
    return sorted(folder.glob("tables-*"))


def remove_leftovers(out_dir: Path) -> None:
    """Delete what a run that was killed left in its folder, for who has `locked` it."""
    for path in out_dir.glob(f"{LIVE}*"):
        shutil.rmtree(path, ignore_errors=True)
    for name in ("*.pt", "metrics.jsonl", "loss.png"):
        for path in out_dir.glob(f"{name}.tmp"):
            path.unlink(missing_ok=True)
    remove_unused_tables(out_dir)


def remove_unused_tables(folder: Path) -> None:
    """Delete snapshots that no *.pt file in the folder names: none, if one cannot be read."""
    with contextlib.suppress(UserError), checkpoint_errors(folder):
        unused = set(snapshots(folder))
        for path in folder.glob("*.pt") if unused else ():  # each save comes here
            if tables := read_checkpoint(path)["tables"]:
                unused.discard(folder / f"tables-{tables['id']}")
        for path in unused:
            shutil.rmtree(path, ignore_errors=True)


def save_checkpoint(path: str | Path, model: Decoder, encoding: tiktoken.Encoding, **state) -> None:
    """Write a checkpoint: config, weights, tokenizer, and `state`. All ranks call it."""
    tables = model.tables.storage if model.tables.on_disk else None
    checkpoint = dict(format=FORMAT, config=asdict(model.config), model=dict(model.state_dict()))
    checkpoint |= dict(tokenizer=tokenizer.dumps(encoding), tables=tables, **state)
    ranks.change_columns(checkpoint, "wte", *([] if tables else ["tables"]), whole=True)
    if ranks.rank == 0:
        return write_checkpoint(Path(path), checkpoint)
    for array in tables.arrays.values() if tables else ():
        list(tables.parts(array))  # what `storage.copy` writes on rank 0


def write_checkpoint(path: Path, checkpoint: dict) -> None:
    """Write what `load_checkpoint` gave, maybe with other rows. What tables on disk hold goes from
    it to a snapshot first."""
    try:
        if storage := checkpoint["tables"]:
            name = secrets.token_hex(4)
            checkpoint["tables"] = dict(id=name, **storage.copy(path.with_name(f"tables-{name}")))
            weights = checkpoint["model"].items()
            checkpoint["model"] = {k: w for k, w in weights if not k.startswith("tables.")}
            if rows := checkpoint.get("optimizer", {}).get("rows"):
                rows["tables"] = {"steps": rows["tables"]["steps"]}
        with atomic(path) as temporary, open(temporary, "wb") as file:
            torch.save(checkpoint, file)
    finally:
        remove_unused_tables(path.parent)


def load_checkpoint(path: str | Path, verify: bool = False) -> dict:
    """Read what `save_checkpoint` wrote, mapped into memory, so that what nobody touches is not
    read, unless to `verify` the checksums. Tables on disk are put where others are, and their
    storage is `tables`. UserError: there is no such file, or it is damaged or something else."""
    if (Path(path) / "config.json").exists():
        with checkpoint_errors(path):
            return huggingface.read_model(Path(path))
    checkpoint = read_checkpoint(path)
    with checkpoint_errors(path):
        if verify and (bad := zipfile.ZipFile(path).testzip()):
            raise ValueError(f"checksum of {bad}")
        if saved := checkpoint["tables"]:
            folder = Path(path).resolve().with_name(f"tables-{saved['id']}")
            try:
                storage = DiskStorage(folder, saved["shape"], saved["dtype"])
            except UserError:
                if read_checkpoint(path)["tables"] == saved:
                    raise
                return load_checkpoint(path, verify)  # a training run saved in between
            if verify and storage.checksums() != saved["crc32"]:
                raise UserError(f"{folder} is damaged (its checksums differ): restore it")
            tables, checkpoint["tables"] = StoredTables(storage), storage
            checkpoint["model"] |= tables.state_dict(prefix="tables.")
            if rows := checkpoint.get("optimizer", {}).get("rows"):
                rows["tables"] |= {n: getattr(tables, n) for n in ("m", "v", "count", "last")}
    return checkpoint


def read_checkpoint(path: str | Path) -> dict:
    """The file of a checkpoint alone, as `load_checkpoint`."""
    with checkpoint_errors(path):
        loaded = torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(loaded, dict) or loaded.get("format") != FORMAT:
            raise UserError(f"{path} is not a checkpoint of this program (format {FORMAT})")
        return loaded


@contextlib.contextmanager
def checkpoint_errors(path: str | Path) -> Iterator[None]:
    """UserError: a checkpoint cannot be read, is damaged, or lacks something."""
    with reading(f"checkpoint at {path}", "name a ckpt.pt, or train one with `python train.py`"):
        try:
            yield
        except pickle.UnpicklingError:  # which would tell to open it all the same
            raise ValueError("it holds more than tensors, maybe code: do not trust it") from None


def load_model(
    path: Path, device, offload="none", dtype="float32", tables=None
) -> tuple[Decoder, tiktoken.Encoding, dict]:
    """The model of a checkpoint in evaluation mode on `device`, its tables where `offload` says
    (`offload_flag`) or made by `tables`, all else in `dtype` (`decoding_dtype_flag`), its
    tokenizer, and the checkpoint. UserError: as `load_checkpoint`."""
    checkpoint = load_checkpoint(path)
    with checkpoint_errors(path):
        weights = checkpoint["model"]
        for name in [n for n in weights if not n.startswith("tables.")]:
            if weights[name].is_floating_point():  # others' may be in bfloat16
                weights[name] = weights[name].float()
        of_rows = weights.get("tables.weight.0", torch.empty(0)).dtype
        tables = tables or make_tables(offload, device, of_rows, saved=checkpoint["tables"])
        with outline():
            model = Decoder(ModelConfig(**checkpoint["config"]), tables=tables)
        if offload != "disk" and device.type == "cpu":  # else they are copied, or used in place
            weights = {name: weight.clone() for name, weight in weights.items()}
        model.load_state_dict(weights, assign=True)
        encoding = tokenizer.loads(checkpoint["tokenizer"])
    model = model.to(device).eval()
    if dtype == "bfloat16" or (dtype == "auto" and has_bfloat16(device)):
        for name, module in model.named_children():
            if name != "tables":  # whose rows are few, and may be saved again
                module.to(torch.bfloat16)
    return model.use_column_major_weights() if device.type == "cpu" else model, encoding, checkpoint
