"""What a run leaves in its folder beside the checkpoint: metrics.jsonl, and the runs before it."""

import contextlib
import itertools
import json
import os
from pathlib import Path

from common import UserError, atomic
from tablefile import snapshots


def put_aside(out_dir: Path) -> Path:
    """Move the files of an earlier run into the first free folder run1, run2, ... beside them."""
    number = next(n for n in itertools.count(1) if not (out_dir / f"run{n}").exists())
    folder = out_dir / f"run{number}"
    try:
        folder.mkdir()
        tables = [path.name for path in snapshots(out_dir)]
        for name in ("ckpt.pt", "metrics.jsonl", "loss.png", "edit_report.json", *tables):
            if (out_dir / name).exists():
                os.replace(out_dir / name, folder / name)
    except OSError as error:
        raise UserError(f"cannot move the run in {out_dir} to {folder}: {error.strerror}") from None
    return folder


class Log:
    """metrics.jsonl: a line for the run, one for each step, one for each evaluation."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """A resumed run keeps the lines up to `resume_step`, at which it evaluates anew."""
        self.path = path
        self.has_run = False
        kept = []
        if resume_step and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                with contextlib.suppress(ValueError, KeyError, TypeError):  # cut off by a crash
                    record = json.loads(line)
                    last = resume_step if record["type"] == "step" else resume_step - 1
                    if record.get("step", 0) <= last:
                        kept.append(line)
                        self.has_run |= record["type"] == "run"
        with atomic(path) as temporary:
            temporary.write_text("".join(kept), encoding="utf-8")

    def write(self, **record) -> None:
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None
