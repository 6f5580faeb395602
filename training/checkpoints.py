"""Checkpoints: a ckpt.pt that is enough to sample, edit or resume.

It is a dict that torch.save has written. `args` are the settings of run and model, `tokenizer` is
a line of JSON, and `model` has the weights by name. Among these are

    wte.weight.0            the embedding, [V, n_embd]; wte.weight if it is the head, too
    blocks.L.attn.qkv.qkv.weight    queries, then keys, then values, head by head; query head h
                            reads key-value head h // (n_head / n_kv_head)
    tables.weight.I         the rows of the I-th layer that has a table, [V, W]

A checkpoint X has its tables in it or, if they are on disk, in the folder X.tables. Tables on disk
change while they train (`folders.live_tables`), so a checkpoint needs a copy of them, a snapshot
with an ID of its own. Saving takes these steps:

    1. Begin a file `.ckpt.pt.ID.tmp`.
    2. Copy the live tables to the snapshot `ckpt.pt.tables/ID`.
    3. Write the file. It names this ID, and the ID of the snapshot that it replaces.
    4. Rename the file to ckpt.pt.
    5. Delete the snapshot that was replaced.

No matter when a crash comes, ckpt.pt finds its own tables. What the crash leaves is named by a file
of ours, so that it can be deleted later (folders.clear): an unfinished file has the ID of a useless
snapshot in its name, and ckpt.pt has that of the replaced one in it.
"""

import contextlib
import os
import re
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import tiktoken
import torch
from torch import Tensor

from common import (
    Damage,
    UserError,
    all_finite,
    atomic,
    command_line,
    printable,
    reading,
    remove,
    require_fields,
)
from model import Decoder, ModelConfig, decoder_class
from tables.storage import ARRAYS, DiskStorage
from tables.tables import StoredTables
from text import tokenizer
from training import ranks
from training.digests import changed, digests, digests_of_imported
from training.placement import make_tables
from training.settings import Settings

FORMAT = 5  # to be raised when an older checkpoint would fail
# The fields of a checkpoint, each with its type; RESUMABLE are in those that --resume can continue.
OF_DATA = {"corpus": str}
OF_EDIT = {"ids": Tensor, "rows": list[Tensor], "facts": list[tuple[list[int], list[int]]] | None}
FIELDS = dict(
    model=dict[str, Tensor],
    tokenizer=str,
    args=dict[str, Any],
    relatives=dict[str, str],
    tables=dict[str, Any] | None,
    replaced=str | None,
    own_tables=type(None),  # earlier, the name of a kind that no file of ours had
    step=int,
    data=list[OF_DATA],
    edits=list[OF_EDIT],
)
RESUMABLE = dict(
    best=tuple[float, int],
    optimizer=dict[str, dict],
    objective=dict[bytes, float],
    weights=list[float],  # shares of the folders in a mixture (Data.weights)
)
OF_TABLES = dict(id=str, shape=tuple[int, int, int], dtype=torch.dtype, crc32=dict[str, int])
ID = re.compile("[0-9a-f]{8}")  # of a snapshot
FIX = (
    "train one with `python train.py`, import one with `python convert.py`, or name another "
    "ckpt.pt (for --out_dir: its folder)"
)


def tables_folder(path: str | Path) -> Path:
    """Where the checkpoint X has its tables, if they are on disk: X.tables."""
    return Path(f"{os.path.realpath(path)}.tables")


def discard(temporary: Path) -> None:
    """Delete a checkpoint that is unfinished, but before it the tables whose ID is in its name,
    `.ckpt.pt.ID.tmp`."""
    name, snapshot, _ = temporary.name[1:].rsplit(".", 2)
    remove(tables_folder(temporary.with_name(name)) / snapshot)
    remove(temporary)


def snapshot_of(checkpoint: dict) -> str | None:
    """The ID of a checkpoint's tables, if they are on disk."""
    return checkpoint["tables"] and checkpoint["tables"]["id"]


def remove_replaced(path: str | Path, checkpoint: dict) -> None:
    """Delete the tables that the checkpoint at `path` says it replaced."""
    if checkpoint["replaced"] not in (None, snapshot_of(checkpoint)):
        remove(tables_folder(path) / checkpoint["replaced"])


# --- writing ---


def save_checkpoint(
    path: str | Path,
    model: Decoder,
    encoding: tiktoken.Encoding,
    args: dict | None = None,
    **state,
) -> None:
    """Write a checkpoint. All ranks call it.

    Args:
        model: readers make it anew by `decoder_class(model.config.ffn)`.
        args: the settings of the run that trained the model, if there was one. Those of the model
            are added, or replaced, from `model.config`.
        state: further fields of plain values and tensors, such as those that --resume needs (with
            `optimizer`, all of RESUMABLE).

    Raises:
        UserError: the tokenizer is not the model's, `args` has something that is no setting, or the
            model is of a class that readers would not find, has other weights than they expect, or
            reads rows of edits in memory.
        ValueError: as `write_checkpoint`.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile(model), which has other names
    check_encoding(path, encoding, model.config)
    check_readable(path, model)
    storage = model.tables.storage if model.tables.on_disk else None
    args = {**(args or {}), **asdict(model.config)}
    flat = Settings.from_flat(args).flat()
    checkpoint = {
        "format": FORMAT,
        # Only what was given: what is missing gets the default of the program that reads it.
        "args": {name: flat[name] for name in args},
        "model": dict(model.state_dict()),
        "tokenizer": tokenizer.dumps(encoding),
        "storage": storage,
        "relatives": digests_of_imported(model.config),
        **state,
    }
    ranks.change_columns(checkpoint, ["wte"] if storage else ["wte", "tables"], whole=True)
    if ranks.rank == 0:
        write_checkpoint(Path(path), checkpoint)
    elif storage is not None:
        for array in storage.arrays.values():
            list(storage.gather_columns(array))  # all ranks take part while rank 0 copies


def check_readable(path: str | Path, model: Decoder) -> None:
    """UserError: readers, who make the model anew, would make another one."""
    where = "of a file in relatives/"
    made, read = type(model), decoder_class(model.config.ffn)
    if made.__module__ != read.__module__:  # a file that was reloaded has another class, too
        kinds = f"a {made.__module__}.{made.__name__} would be read as {read.__module__}.Decoder"
        raise UserError(f"{path}: {kinds}: make it the class Decoder {where}")
    if not model.tables.can_be_saved:
        raise UserError(f"{path}: rows that are read in place of others are saved by edit.save")
    kind = type(model.tables)
    places = ["tables", "offload"]
    if made.make_tables is not Decoder.make_tables:
        places.append("relatives")
    if kind.__module__.partition(".")[0] not in places:
        raise UserError(f"{path}: no {kind.__name__} would be read: make it in a Decoder {where}")
    with torch.device("meta"):
        others = read(model.config).state_dict().keys() ^ model.state_dict().keys()
    if others:  # as of a head that was added, or of weights that are pruned
        names = ", ".join(sorted(others)[:4])
        raise UserError(
            f"{path}: readers have other weights ({names}): make them in a Decoder {where}"
        )


def write_checkpoint(path: Path, checkpoint: dict) -> None:
    """Write a checkpoint as `load_checkpoint` returned it, maybe with other rows. Tables on disk
    are first copied to a snapshot beside it. ValueError: `read_checkpoint` would refuse it, and it
    is not written."""
    path = Path(os.path.realpath(path))  # follow a link; resolve() fails on a circle of them
    checkpoint = dict(checkpoint)
    storage = checkpoint.pop("storage")
    checkpoint.pop("config", None)  # which `read_checkpoint` makes of args
    checkpoint["tables"] = None
    checkpoint["replaced"] = None  # the tables of the checkpoint that was there
    with contextlib.suppress(UserError):
        there = read_checkpoint(path)
        checkpoint["replaced"] = snapshot_of(there)
        remove_replaced(path, there)  # which a crash may have left
    with atomic(path, discard) as temporary:
        with open(temporary, "wb") as file:
            if storage is not None:
                name = temporary.suffixes[-2][1:]  # by which `discard` finds it
                checkpoint = move_tables(checkpoint, storage, tables_folder(path) / name)
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:
                # No room, or Ctrl-C. To close the file then fails, too, which hides the reason.
                raise error.__context__ or error from None
        try:
            read_checkpoint(temporary)
        except UserError as error:
            raise ValueError(f"no command could read {path}: {error}") from None
    remove_replaced(path, checkpoint)


def move_tables(checkpoint: dict, storage: DiskStorage, snapshot: Path) -> dict:
    """Copy tables on disk to a snapshot, a new folder. Returns a checkpoint that names it in place
    of having rows and their state; the one that is given stays as it is."""
    weights = checkpoint["model"]
    saved = storage.copy(snapshot, **rows_put_in(storage, weights))
    checkpoint = {
        **checkpoint,
        "tables": {"id": snapshot.name, **saved},
        "model": {k: w for k, w in weights.items() if not k.startswith("tables.")},
    }
    if "state" in storage.arrays and "optimizer" in checkpoint:
        rows = checkpoint["optimizer"]["rows"]
        rows = {**rows, "tables": {**rows["tables"], "state": None}}
        checkpoint["optimizer"] = {**checkpoint["optimizer"], "rows": rows}
    return checkpoint


def rows_put_in(storage: DiskStorage, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows, if somebody has put other tensors in place of those that the storage has, such as
    the average of two checkpoints. What is stored stays as it is."""
    stored = storage.arrays["rows"]  # [V, n_table, W]
    tables = [weights[f"tables.weight.{table}"] for table in range(stored.shape[1])]  # [V, W] each
    pairs = zip(tables, stored.unbind(1), strict=True)
    if all(table.data_ptr() == ours.data_ptr() for table, ours in pairs):
        return {}
    return {"rows": torch.stack(tables, 1).to(stored.dtype).view(stored.shape)}


# --- reading ---


def checkpoint_of(path: str | Path) -> Path:
    """The checkpoint to use for a path. A file stands for itself. A run's folder stands for its
    ckpt.pt, or for its best.pt if the validation loss has risen since that was written; a note says
    so. (--resume does not ask: it continues ckpt.pt.) UserError: as `read_checkpoint`."""
    path = Path(path)
    if not os.path.isdir(path):
        return path
    last, best = path / "ckpt.pt", path / "best.pt"
    if os.path.exists(path / "config.json") and not os.path.exists(last):
        command = command_line("convert.py", path, "--out", "out/converted/ckpt.pt")
        raise UserError(f"{path} is a model of Hugging Face: convert it with {command}")
    if not os.path.exists(best):
        return last
    if not os.path.exists(last):
        return best
    checkpoint = read_checkpoint(last)
    if "optimizer" not in checkpoint or checkpoint["edits"]:  # no training wrote it as it is
        return last
    step, (loss, best_step) = checkpoint["step"], checkpoint["best"]
    settings = Settings.from_flat(checkpoint["args"])
    evaluated = step
    if step < settings.max_iters:
        print(f"{path} is a run at step {step} of {settings.max_iters}", file=sys.stderr)
        evaluated -= step % settings.eval_interval  # it was stopped
    if best_step >= evaluated:
        return last
    print(
        f"reading {best}, of step {best_step}, validation loss {loss:.3f}: at step {evaluated} it "
        f"was higher; name {last} to read that",
        file=sys.stderr,
    )
    return best


def read_checkpoint(path: str | Path, whole: bool = False) -> dict:
    """Read ckpt.pt alone, without tables on disk. It is mapped into memory (but on Windows): what
    nobody touches is not read, except to verify checksums of the `whole` file; those of settings
    and names are always verified. `config` is the model's, of the settings `args`. UserError: it is
    missing, damaged or something else."""
    with reading(path, FIX):
        try:
            with zipfile.ZipFile(path) as archive:
                for part in archive.infolist():
                    if part.compress_type:  # which may unpack to more than memory holds
                        raise Damage("it is compressed")
                    if part.filename.endswith("data.pkl"):  # all but the numbers of tensors
                        archive.read(part)
                damaged = archive.testzip() if whole else None
            # Windows replaces no file that is mapped. PyTorch maps none whose name is not UTF-8:
            # in its name, Python has characters that are not printable.
            is_mapped = sys.platform != "win32" and str(path).isprintable()
            with open(path, "rb") as file:
                checkpoint = torch.load(
                    path if is_mapped else file,
                    map_location="cpu",
                    weights_only=True,
                    mmap=is_mapped,
                )
        except UnpicklingError:  # its text suggests to load it anyway
            raise Damage("it holds more than tensors, possibly code: do not trust it") from None
        except (OSError, MemoryError):
            raise
        except Exception as error:  # of all kinds: PyTorch's readers trust a file
            raise Damage(f"or no checkpoint: {error}") from None
        if damaged:
            raise Damage(f"checksum of {damaged}")
        require_fields(checkpoint, format=int | None)
        found = checkpoint.get("format")
        if found != FORMAT:
            ours = "no checkpoint of training.checkpoints.save_checkpoint"
            if isinstance(found, int):
                ours = "of another commit, with which it can be used"
            raise Damage(f"or {ours}: its format is {found!r:.40}, not {FORMAT}")
        checkpoint = {"edits": [], **checkpoint}
        if "optimizer" not in checkpoint:  # it need not be a run's
            checkpoint = {"step": 0, "data": [], **checkpoint}
        check_fields(checkpoint)
    try:
        checkpoint["config"] = Settings.from_flat(checkpoint["args"]).model
    except UserError as error:  # it speaks of flags
        raise UserError(f"{path}: {error}") from None
    return checkpoint


def check_fields(checkpoint: dict) -> None:
    """Raises Damage unless the fields of a checkpoint have the types of those that we write, and
    names in it that become paths are ours."""
    require_fields(checkpoint, **FIELDS)
    if "optimizer" in checkpoint:
        require_fields(checkpoint, **RESUMABLE)
    saved = checkpoint["tables"]
    names = [checkpoint["replaced"]] if checkpoint["replaced"] else []
    if saved is not None:
        require_fields(saved, **OF_TABLES)
        names.append(saved["id"])
        if not {"rows"} <= saved["crc32"].keys() <= {*ARRAYS}:
            raise Damage(f"checksums of {list(saved['crc32'])!r:.80}")
    for name in names:
        if not ID.fullmatch(name):
            raise Damage(f"tables named {name!r:.40}")
    for name in checkpoint["relatives"]:
        if "\n" in name or printable(name) != name:  # a note has it
            raise Damage(f"code named {name!r:.40}")


def load_checkpoint(path: str | Path, verify: bool = False) -> dict:
    """Read a whole checkpoint, whose checksums are verified. Tables on disk are mapped, too, and
    appear in `model` like any others; `storage` says where they are, or is None. To `verify` them
    reads all of them."""
    checkpoint = read_checkpoint(path, whole=True)
    del checkpoint["replaced"]  # which is about the file, not what it holds
    now = digests(checkpoint["config"].ffn, checkpoint["config"].attention)
    for file in changed(checkpoint["relatives"], now):
        print(printable(f"note: {file} has changed since {path} was written"), file=sys.stderr)
    with reading(path, FIX):
        for name, weight in checkpoint["model"].items():
            if not all_finite(weight):
                raise Damage(f"{name} has numbers that are not finite")
    checkpoint["storage"] = None
    saved = checkpoint["tables"]
    if saved is None:
        return checkpoint
    folder = tables_folder(path) / saved["id"]
    try:
        storage = DiskStorage(folder, saved["shape"], saved["dtype"], names=list(saved["crc32"]))
    except UserError:
        if read_checkpoint(path)["tables"] == saved:
            raise
        return load_checkpoint(path, verify)  # a training run saved in between
    if verify and storage.checksums() != saved["crc32"]:
        raise UserError(f"{folder} is damaged (its checksums differ): restore it")
    checkpoint["storage"] = storage
    tables = StoredTables(storage)
    checkpoint["model"].update(tables.state_dict(prefix="tables."))
    if "state" in storage.arrays and "optimizer" in checkpoint:
        checkpoint["optimizer"]["rows"].get("tables", {})["state"] = tables.state
    return checkpoint


def read_encoding(path: str | Path, checkpoint: dict) -> tiktoken.Encoding:
    """The tokenizer of a checkpoint. UserError: it is damaged, or not the model's."""
    with reading(path, FIX):
        encoding = tokenizer.loads(checkpoint["tokenizer"])
    check_encoding(path, encoding, checkpoint["config"])
    return encoding


def check_encoding(path: str | Path, encoding: tiktoken.Encoding, config: ModelConfig) -> None:
    """UserError: a tokenizer has not as many tokens as a model, or none that begins texts."""
    if "<|endoftext|>" not in encoding.special_tokens_set:
        fix = "text.vocabularies.complete(encoding) has one"
        raise UserError(f"{path}: its tokenizer has no <|endoftext|>: {fix}")
    if encoding.n_vocab != config.vocab_size:
        sizes = f"its tokenizer is of {encoding.n_vocab} tokens, its model of {config.vocab_size}"
        raise UserError(f"{path}: {sizes}: take the tokenizer that the model was trained with")


def load_model(
    path: str | Path,
    device: torch.device | str,
    offload: str = "none",
    verify: bool = False,
) -> tuple[Decoder, tiktoken.Encoding, dict]:
    """The model of a checkpoint in evaluation mode, its tokenizer, and the checkpoint.

    Args:
        path: of the checkpoint, or a run's folder (`checkpoint_of`).
        device: where the backbone goes; tables go where `offload` says.
        verify: tables on disk, too, which reads all of them.

    Raises:
        UserError: as `load_checkpoint`.
    """
    device = torch.device(device)
    path = checkpoint_of(path)
    checkpoint = load_checkpoint(path, verify)
    encoding = read_encoding(path, checkpoint)
    config, weights = checkpoint["config"], checkpoint["model"]
    rows = weights.get("tables.weight.0", torch.empty(0))
    tables = make_tables(offload, device, rows.dtype, saved=checkpoint["storage"])
    model = decoder_class(config.ffn)(config, tables)
    # The weights are mapped into memory from the file. A GPU copies them anyway, and tables on disk
    # are meant to be used there. On a CPU, the model would keep the file open: it gets copies.
    if offload != "disk" and device.type == "cpu":
        weights = {name: weight.clone() for name, weight in weights.items()}
    model.load_state_dict(weights, assign=True)
    return model.to(device).eval(), encoding, checkpoint
