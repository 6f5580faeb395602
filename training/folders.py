"""The folder of a run, and any folder that a checkpoint is written to. It is locked, and what
killed commands left in it is deleted: a file goes only if a file of ours says that nobody needs it
(checkpoints.py). With --overwrite, so do the files of the earlier run."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

from common import UserError, locked, remove, unfinished, writing
from training import ranks
from training.checkpoints import (
    discard,
    read_checkpoint,
    remove_replaced,
    snapshot_of,
    tables_folder,
)
from training.records import read_metrics


def clear(path: str | Path) -> None:
    """Delete what killed commands left of writing the checkpoint at `path`, and the tables that it
    says it replaced. Other tables may be of a checkpoint that was moved: they stay. The caller must
    hold the lock."""
    path = Path(os.path.realpath(path))
    for temporary in unfinished(path):
        discard(temporary)
    with contextlib.suppress(UserError):  # nobody knows whose tables these are
        remove_replaced(path, read_checkpoint(path))


def has_run(out_dir: Path) -> bool:
    """Whether a folder has files that a new run would replace. A run that was killed before its
    first checkpoint does not count: it has at most two evaluations, of step 0 and of that step."""
    names = set(os.listdir(out_dir))
    if {"ckpt.pt", "best.pt", "loss.png"} & names:
        return True
    if "metrics.jsonl" not in names:
        return False
    try:
        types = [record["type"] for record in read_metrics(out_dir / "metrics.jsonl")]
    except UserError:  # somebody's own
        return True
    return types.count("eval") > 2 or types[:1] not in ([], ["run"])


def remove_run(out_dir: Path) -> None:
    """Delete the files of an earlier run. The caller must hold the lock."""
    for path in (out_dir / "ckpt.pt", out_dir / "best.pt"):
        if path.is_symlink():  # to another run's
            continue
        with contextlib.suppress(UserError):
            snapshot = snapshot_of(read_checkpoint(path))
            if snapshot:  # before the file that names it, in case this is cut off
                remove(tables_folder(path) / snapshot)
    for name in ("ckpt.pt", "best.pt", "metrics.jsonl", "loss.png"):
        with writing(out_dir / name):
            (out_dir / name).unlink(missing_ok=True)


def live_tables(out_dir: Path) -> Path:
    """The hidden folder where tables on disk are while a run trains them."""
    return Path(os.path.realpath(out_dir)) / ".live.tmp"


@contextlib.contextmanager
def run_folder(out_dir: Path, names: tuple[str, ...] = ("ckpt.pt", "best.pt")) -> Iterator[None]:
    """Lock the folder of a run as long as the context lasts. At its beginning, delete what killed
    commands left: live tables, and unfinished checkpoints of these names, unless the names are
    links; of one that leads to no checkpoint, which would be replaced, UserError. At its end,
    delete the live tables of this run. Rank 0 does all this, and the others wait until the folder
    is ready."""
    if ranks.rank:
        ranks.wait()
        yield
        return
    with locked(out_dir):
        for name in names:
            path = out_dir / name
            if not path.is_symlink():  # to a folder that is not locked
                clear(path)
            elif os.path.exists(path):  # else anything there would be replaced
                read_checkpoint(path)
            else:  # a file would be made there
                raise UserError(f"{path} is a link to nowhere: delete it")
        live = live_tables(out_dir)
        remove(live)
        ranks.wait()
        try:
            yield
        finally:
            # Windows deletes no tables that are mapped. Those of a model that is in a circle of
            # references are mapped until this.
            if live.exists():
                gc.collect()
            remove(live)
