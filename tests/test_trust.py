"""What docs/data-and-stages.md promises, shortened: tests/soak.py tries it at length."""

import contextlib
import copy
import io
import json
import math
import os
import random
import shutil
import signal
import zipfile
from functools import partial, partialmethod
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiktoken
import torch
from conftest import (
    CPU,
    PowerCut,
    assert_same,
    assert_same_run,
    change_json,
    checkpoint,
    command,
    contents,
    flip,
    interrupted,
    needs_forks,
    peak,
    refused,
    resume,
    small_run,
    user_error,
)
from torch import nn
from tqdm import tqdm

import common
import convert
from common import UserError, locked
from lab import runs
from model import Decoder
from tables.extra import rows_of, with_rows
from tables.tables import ResidentTables
from text.huggingface import GPT2, read_tokenizer
from training import checkpoints, folders, huggingface
from training.batches import Data
from training.checkpoints import (
    load_checkpoint,
    load_model,
    save_checkpoint,
    tables_folder,
    write_checkpoint,
)
from training.records import read_run

EDIT = "--source Anna --target Björn --prompt Anna --max_new_tokens 1"
BRIEF = "--n_layer 2 --n_embd 32 --max_iters 1 --eval_tokens 64"


def snapshots(out: Path) -> list[Path]:
    return list(tables_folder(out / "ckpt.pt").iterdir())


# --- two at once ---


def test_whoever_comes_second_is_refused_until_the_first_has_ended(on_disk, data, story, tmp_path):
    pytest.importorskip("fcntl")
    before = contents(on_disk)
    ckpt = on_disk / "ckpt.pt"
    with locked(on_disk), locked(tmp_path):
        for line, folder in (
            (f"train.py --resume --out_dir {on_disk}", on_disk),
            (f"train.py --data_dir {data} --out_dir {on_disk} --overwrite", on_disk),
            (f"edit.py --ckpt {ckpt} {EDIT} --save {on_disk}/new.pt", on_disk),
            (f"prepare.py --input {story} --out_dir {tmp_path}", tmp_path),
        ):
            assert f"{folder} is in use" in refused(line)
    assert contents(on_disk) == before and not contents(tmp_path)
    with locked(on_disk):
        pass


# --- what is one's own ---


def test_no_command_touches_what_is_ones_own(out, on_disk, trained, data):
    """A finished run with its tables on disk, and files of somebody's own beside it: checkpoints
    with tables, too, whatever they are called."""
    for name in ("ckpt.live.old", "ckpt.pt.tables-1"):
        shutil.copytree(snapshots(on_disk)[0], out / name)
    torch.save({"mine": 1}, out / "mine.pt")
    for name in ("mine.pt.tmp", "notes.tmp", "tables", "live", "ckpt.pt.tmp", "best.pt.tmp"):
        (out / name).write_text("mine")
    for name in ("ckpt.live/0", "llama.tmp", "new.pt.tmp", "ckpt.pt.tables/mine"):
        (out / name).mkdir(parents=True)
        (out / name / "rows").write_text("mine")
    others = ("ckpt", "ckpt.pth", "ckpt.pt.old", "results")
    (out / "results.tables/thesis").mkdir(parents=True)
    (out / "results.tables/thesis/1.txt").write_text("mine")
    for name in others:
        command(f"edit.py --ckpt ckpt.pt {EDIT} --save {name}", cwd=out)
    mine = {path: raw for path, raw in contents(out).items() if path not in contents(on_disk)}
    assert len(mine) >= 12 and Path("results.tables/thesis/1.txt") in mine
    link = out / "link.pt"
    link.symlink_to("ckpt.pt")
    new = f"train.py --data_dir {data} --out_dir . --overwrite {BRIEF}"
    for line, works in (
        (f"edit.py --ckpt link.pt {EDIT} --save link.pt", True),
        ("edit.py --ckpt ckpt.pt --undo", True),
        (f"edit.py --ckpt ckpt.pt {EDIT} --save new.pt", True),
        (f"convert.py {trained['dense']}/ckpt.pt --ffn stem --tokens 0 --out best", True),
        (f"convert.py {trained['dense']}/ckpt.pt --export llama", True),
        (f"edit.py --ckpt ckpt.pt {EDIT} --save mine.pt", False),
        ("train.py --resume --out_dir . --max_iters 13", True),
        (f"{new} --block_size 1000000", False),
        (f"{new} --offload disk", True),
        ("train.py --resume --out_dir . --max_iters 2", True),
        (new, True),
        ("prepare.py --input gone --out_dir .", False),
    ):
        command(line, cwd=out, fails=not works)
        now = contents(out)
        assert {path: now.get(path) for path in mine} == mine, line
        assert len(list(tables_folder(out / "ckpt.pt").glob("*"))) <= 2
    assert link.is_symlink()
    for name in others:
        load_checkpoint(out / name, verify=True)


def test_tables_whose_checkpoint_was_moved_stay(out, trained, data):
    """... by whatever command writes ckpt.pt next, even one that is refused."""
    (tables,) = snapshots(out)
    before = contents(tables)
    (out / "ckpt.pt").rename(out / "old.pt")
    stem, dense = trained["stem"] / "ckpt.pt", trained["dense"] / "ckpt.pt"
    new = f"train.py --data_dir {data} --out_dir . {BRIEF}"
    for line, works in (
        (f"{new} --n_head 5", False),
        (f"convert.py {dense} --ffn stem --data_dir gone --out ckpt.pt", False),
        (f"convert.py {dense} --ffn stem --tokens 0 --out ckpt.pt", True),
        (f"edit.py --ckpt ckpt.pt --undo --save {out}/ckpt.pt", False),
        (f"{new} --overwrite", True),
        ("train.py --resume --out_dir . --max_iters 2 --offload disk", True),
        ("train.py --resume --out_dir . --max_iters 3", True),
    ):
        command(line, cwd=out, fails=not works)
        assert contents(tables) == before, line
    (out / "ckpt.pt").unlink()
    command(f"edit.py --ckpt {stem} {EDIT} --save ckpt.pt", cwd=out)
    assert contents(tables) == before
    (out / "old.pt").rename(out / "ckpt.pt")
    load_checkpoint(out / "ckpt.pt", verify=True)


@pytest.mark.parametrize(
    "line",
    [
        "edit.py --ckpt {out}/ckpt.pt " + EDIT + " --save {place}",
        "edit.py --ckpt {out}/ckpt.pt " + EDIT + " --save {place}/a/b/c.pt --device mars",
        "convert.py {out}/ckpt.pt --export {place}/a/b",
        "convert.py gone --out {place}/gone/ckpt.pt",
        "train.py --data_dir {data} --out_dir {place}/a/b --block_size 1000000",
        "train.py --resume --out_dir {place}",
        "prepare.py --input gone.txt --out_dir {place}/a",
    ],
)
def test_a_refused_command_leaves_nothing_behind(on_disk, data, tmp_path, line):
    place = tmp_path / "parent" / "place"
    place.mkdir(parents=True)
    refused(line.format(out=on_disk, data=data, place=place))
    assert sorted(tmp_path.rglob("*")) == [place.parent, place]


# --- kills ---


def test_the_removal_of_a_run_may_be_cut_off(out, data, tmp_path, monkeypatch):
    """Before each deletion; then the next run starts. All tables of its checkpoints go with it."""
    command(f"edit.py --ckpt ckpt.pt {EDIT} --save best.pt", cwd=out)
    run = out
    fresh = small_run(data, tmp_path / "fresh", max_iters=2)
    for cut in range(11):
        out = shutil.copytree(run, tmp_path / str(cut))
        left = [True] * cut

        def until_cut(*args, remove, left=left, **options):
            if not left:
                raise PowerCut
            left.pop()
            remove(*args, **options)

        with monkeypatch.context() as patch, contextlib.suppress(PowerCut):
            patch.setattr(Path, "unlink", partialmethod(until_cut, remove=Path.unlink))
            patch.setattr(shutil, "rmtree", partial(until_cut, remove=shutil.rmtree))
            folders.remove_run(out)
        small_run(data, out, max_iters=2, overwrite=True)
        assert_same_run(out, fresh)
        assert contents(out).keys() == contents(fresh).keys()
    assert left  # the last one was not cut off


def test_what_a_killed_writer_left_goes_when_it_writes_again(out, monkeypatch):
    saved = load_checkpoint(out / "ckpt.pt")

    def cut(path: Path) -> None:
        if path.exists():
            raise PowerCut

    with monkeypatch.context() as patch, contextlib.suppress(PowerCut):
        patch.setattr(checkpoints, "remove", cut)
        write_checkpoint(out / "ckpt.pt", saved)
    assert len(snapshots(out)) == 2
    write_checkpoint(out / "ckpt.pt", saved)
    assert len(snapshots(out)) == 1


def test_what_a_killed_run_left_goes_with_the_next_start(on_disk, data, tmp_path):
    out = interrupted(data, tmp_path / "killed", 9, offload="disk", eval_interval=4)
    live = folders.live_tables(out)
    replaced = checkpoint(out)["replaced"]  # of step 4
    tables = tables_folder(out / "ckpt.pt")
    for folder in (live / "0", tables / "0123abcd", tables / replaced):
        shutil.copytree(snapshots(on_disk)[0], folder)
    for name in ("ckpt.pt.0123abcd", "best.pt.01234567", "metrics.jsonl.01234567"):
        (out / f".{name}.tmp").write_text("half")
    resume(out)
    assert_same_run(out, on_disk)
    assert len(snapshots(out)) == 1
    assert not list(out.glob(".*"))


def test_a_model_is_opened_while_its_training_saves(out, monkeypatch):
    """Between the reading of ckpt.pt and that of its tables, both are replaced."""
    saved = load_checkpoint(out / "ckpt.pt")
    storage = checkpoints.DiskStorage
    opened = []

    def replaced(folder, *args, **options):
        opened.append(folder)
        if len(opened) == 1:
            write_checkpoint(out / "ckpt.pt", saved)
        return storage(folder, *args, **options)

    monkeypatch.setattr(checkpoints, "DiskStorage", replaced)
    assert_same(load_checkpoint(out / "ckpt.pt")["model"], saved["model"])
    assert len(set(opened)) == 2
    shutil.rmtree(snapshots(out)[0])
    with user_error(str(out)):  # tries no further
        load_checkpoint(out / "ckpt.pt")


def test_tables_on_disk_that_others_replace_are_saved(data, tmp_path):
    """As where somebody averages the checkpoints of two runs. Their moments, which lie beside the
    rows, stay. What is written stays with who has it, too."""
    given = dict(n_layer=3, max_iters=1, offload="disk", table_state="number")
    out = small_run(data, tmp_path, **given)
    saved = load_checkpoint(out / "ckpt.pt")
    before = {name: weight.clone() for name, weight in saved["model"].items()}
    halves = {name: weight / 2 for name, weight in before.items()}
    write_checkpoint(out / "ckpt.pt", {**saved, "model": halves})
    assert_same(saved["model"], before)
    found = load_checkpoint(out / "ckpt.pt", verify=True)
    assert_same(found["model"], halves)
    assert_same(found["optimizer"], saved["optimizer"])
    with pytest.raises(AssertionError, match="offload='disc' is not"):
        load_model(out / "ckpt.pt", torch.device("cpu"), offload="disc")
    model, encoding, _ = load_model(out / "ckpt.pt", torch.device("cpu"), offload="disk")
    model.tables.weight[0] = 3 * halves["tables.weight.0"]
    save_checkpoint(out / "mine.pt", model, encoding, args=found["args"])
    tripled = {**halves, "tables.weight.0": model.tables.weight[0]}
    assert_same(load_checkpoint(out / "mine.pt")["model"], tripled)


# --- full disks, and no memory ---


def test_a_file_that_cannot_be_written_is_named_and_nothing_changes(out):
    """A limit of file sizes stands for a full disk; PyTorch has several errors for it."""
    limits = pytest.importorskip("resource")
    before = contents(out)
    size = (out / "ckpt.pt").stat().st_size
    for limit in (0, 5000, *range(size // 2, size, size // 8)):
        limits.setrlimit(limits.RLIMIT_FSIZE, (limit, limits.RLIM_INFINITY))
        try:
            with user_error(f"cannot write {out}"):
                write_checkpoint(out / "ckpt.pt", load_checkpoint(out / "ckpt.pt"))
        finally:
            limits.setrlimit(limits.RLIMIT_FSIZE, (limits.RLIM_INFINITY,) * 2)
    assert contents(out) == before


@pytest.mark.parametrize("at", [1, 5])
def test_ctrl_c_within_a_save_is_no_error_and_changes_nothing(out, monkeypatch, at):
    before = contents(out)
    written = []

    class Slow(io.FileIO):
        def write(self, part):
            written.append(part)
            if len(written) == at:
                signal.raise_signal(signal.SIGINT)
            return super().write(part)

    saved = load_checkpoint(out / "ckpt.pt")
    monkeypatch.setattr(checkpoints, "open", Slow, raising=False)
    with pytest.raises(SystemExit) as ended:
        common.run_command(lambda: write_checkpoint(out / "ckpt.pt", saved))
    assert ended.value.code == 130 and len(written) >= at and contents(out) == before


def test_a_second_signal_ends_a_run_where_it_is():
    with (
        tqdm(disable=True) as bar,
        pytest.raises(KeyboardInterrupt) as caught,
        common.stop_signals(bar) as received,
    ):
        signal.raise_signal(signal.SIGINT)
        assert received == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
    assert caught.traceback[-1].path == Path(__file__)  # by Python's own handler


# --- damage ---


def test_damage_is_noticed_by_who_goes_on(out, data, tmp_path):
    ckpt = out / "ckpt.pt"
    (tables,) = snapshots(out)
    readers = [
        f"train.py --resume --out_dir {out}",
        f"train.py --eval_only --out_dir {out}",
        f"edit.py --ckpt {ckpt} {EDIT} --save {ckpt}",
        f"edit.py --ckpt {ckpt} --undo",
        f"train.py --stage midtrain --init_from {ckpt} --data_dir {data} --out_dir {tmp_path}/new",
    ]
    setting = ckpt.read_bytes().index(b"learning_rate")
    for path, at, named, lines in (
        (tables / "rows", -1, tables, readers),
        (ckpt, setting, ckpt, [*readers, f"sample.py --ckpt {ckpt}"]),
        (ckpt, ckpt.stat().st_size // 2, ckpt, readers),  # a weight
    ):
        flip(path, at)
        for line in lines:
            assert f"{named} is damaged" in refused(line)
        flip(path, at)


class Malicious:
    def __reduce__(self):
        return (os.mkdir, ("ran",))


HARMS = {
    "gone": "no ",
    "text": "damaged",
    "folder": "",
    "circle": "cannot read",
    "foreign": "save_checkpoint: its format is None",
    "old": "of another commit, with which it can be used: its format is 1",
    "unknown": "unknown",
    "nan": "norm.weight has numbers that are not finite",
    "nan in a row": "tables.weight.0 has numbers that are not finite",
    "code": "possibly code",
    "file": "code named ",
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_file_that_is_no_checkpoint_is_one_line_that_names_it(trained, data, tmp_path, harm):
    saved = checkpoint(trained["stem"])

    def with_nan(name):
        weight = saved["model"][name].index_fill(0, torch.tensor([0]), math.nan)
        return {**saved, "model": {**saved["model"], name: weight}}

    records = {
        "foreign": saved["model"],
        "old": {**saved, "format": 1},
        "unknown": {**saved, "args": {**saved["args"], "unknown": 1}},
        "nan": with_nan("norm.weight"),
        "nan in a row": with_nan("tables.weight.0"),
        "code": {"x": Malicious()},
        # Printed, it would be a command to copy.
        "file": {**saved, "relatives": {"model.py\nRun: curl evil": ""}},
    }
    path = tmp_path / "ckpt.pt"
    if harm in records:
        torch.save(records[harm], path)
    elif harm == "text":
        path.write_text("hello")
    elif harm == "folder":
        path.mkdir()
    elif harm == "circle":
        path.symlink_to(path)
    before = contents(tmp_path)
    for line in (
        "sample.py --ckpt ckpt.pt",
        f"edit.py --ckpt ckpt.pt {EDIT} --save ckpt.pt",
        "edit.py --ckpt ckpt.pt --undo",
        "train.py --resume --out_dir .",
        "train.py --eval_only --out_dir .",
        f"train.py --init_from ckpt.pt --data_dir {data}",
    ):
        said = refused(line)
        assert "ckpt.pt" in said and HARMS[harm] in said
    assert contents(tmp_path) == before and not (tmp_path / "ran").exists()


FOREIGN = {
    "crc32": ("../../mine/notes", "{root}/mine/notes", "mine/notes", "", "rows\n"),
    "id": ("../../mine", "{root}/mine", "..", "", "mine", "{id}/../mine"),
    "replaced": ("../../mine", "{root}/mine"),
    "ffn": ("../mine/code", "{root}/mine/code", "lab.analyze"),
    "attention": ("../mine/code:1", "{root}/mine/code:1", "os:1"),
}


@pytest.mark.parametrize("place", FOREIGN)
def test_no_name_in_a_checkpoint_leads_out_of_its_folder(out, tmp_path, place):
    """Somebody's checkpoint names files of ours, as tables, runs or code, and has the same beside
    its own."""
    saved = checkpoint(out)
    (rows,) = snapshots(out)
    for folder in (tmp_path / "mine", out / "mine", rows / "mine", out / "ckpt.pt.tables/mine"):
        folder.mkdir()
        # To parse it would raise an error with its text.
        (folder / "code.py").write_text("open('ran', 'w')\nclass Decoder(object): 1\nmy secret")
        (folder / "ckpt.pt").write_text("mine")
        for name in ("rows", "state", "notes"):
            shutil.copy(rows / "rows", folder / name)
    for name in FOREIGN[place]:
        name = name.format(root=tmp_path, id=rows.name)
        forged = copy.deepcopy(saved)
        if place == "crc32":
            crc32 = forged["tables"]["crc32"]
            crc32[name] = crc32["rows"]
        elif place == "replaced":
            forged["replaced"] = name
        else:
            forged["tables" if place == "id" else "args"][place] = name
        torch.save(forged, out / "ckpt.pt")
        before = contents(tmp_path)
        for line in (
            f"edit.py --ckpt out/ckpt.pt {EDIT} --save out/ckpt.pt",
            "train.py --resume --out_dir out --max_iters 13",
        ):
            refused(line)
            assert contents(tmp_path) == before, (name, line)


def test_best_pt_is_not_resumed(trained, tmp_path):
    shutil.copy(trained["stem"] / "best.pt", tmp_path / "ckpt.pt")
    assert "cannot be resumed" in refused("train.py --resume --out_dir", tmp_path)


def test_a_folder_is_its_better_checkpoint_for_readers_and_the_last_for_who_goes_on(
    rising, data, trained, capsys
):
    evals = {record["step"]: record["val_loss"] for record in read_run(rising)["eval"]}
    best = min(evals, key=evals.get)
    assert best < 12
    for place in ("rising", rising):
        assert load_model(place, CPU)[2]["step"] == best
        assert f"best.pt, of step {best}" in capsys.readouterr().err
    lines = {
        f"edit.py --ckpt rising {EDIT}": True,
        "sample.py --ckpt rising --max_new_tokens 2": True,
        "train.py --eval_only --out_dir rising": True,
        f"train.py --init_from rising --data_dir {data} --out_dir new --max_iters 1": True,
        "train.py --resume --out_dir rising": False,
        f"edit.py --ckpt rising/ckpt.pt {EDIT} --save rising/ckpt.pt": False,
        "sample.py --ckpt rising --max_new_tokens 1": False,  # else the edit would be missed
        "edit.py --ckpt rising --undo": False,
        "sample.py --ckpt rising --max_new_tokens 3": True,
    }
    for line, reads_best in lines.items():
        said = command(line).stderr
        assert ("reading rising/best.pt" in said) == reads_best, line
    assert "lies in --out_dir" in refused(
        f"train.py --data_dir {data} --init_from {rising} --out_dir {rising} --overwrite"
    )
    (rising / "ckpt.pt").unlink()
    assert load_model(rising, CPU)[2]["step"] == best
    assert load_model(trained["stem"], CPU)[2]["step"] == 12 and not capsys.readouterr().err


class Mine(Decoder):
    pass


class MyTables(ResidentTables):
    __module__ = "relatives.mine"  # in a model that is not its


def read_edits(model: Decoder) -> None:
    model.tables = with_rows(model.tables, {5: rows_of(model.tables, [6])[0]})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (read_edits, "edit.save"),
        (lambda model: setattr(model.tables, "__class__", MyTables), "no MyTables would be read"),
        (lambda model: setattr(model, "__class__", Mine), "test_trust.Mine .* as model.Decoder"),
        (lambda model: model.add_module("more", nn.Linear(2, 1)), r"\(more.bias, more.weight\)"),
        (lambda model: delattr(model, "norm"), r"other weights \(norm.weight\)"),
        (lambda model: setattr(model.config, "vocab_size", 9), "tokenizer is of 299 tokens, its"),
    ],
)
def test_a_model_that_no_checkpoint_could_give_back_is_not_saved(stem_ckpt, tmp_path, change, said):
    model, encoding, _ = load_model(stem_ckpt, CPU)
    change(model)
    with user_error(said):
        save_checkpoint(tmp_path / "ckpt.pt", model, encoding)
    assert not [*tmp_path.iterdir()]


ODD = (None, True, -1, 0.5, "x", [], [1], {}, {"a": 1}, float("nan"))


def change(rng: random.Random, record):
    """A copy of a nested record in which one field, at any depth, is missing or odd."""
    record = part = copy.deepcopy(record)
    while True:
        key = rng.choice([*part] if isinstance(part, dict) else range(len(part)))
        if not part[key] or not isinstance(part[key], (dict, list)) or rng.random() < 0.2:
            break
        part = part[key]
    if rng.random() < 0.3:
        del part[key]
    else:
        part[key] = rng.choice(ODD)
    return record


@pytest.fixture(scope="module")
def llama(trained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "llama"
    command("convert.py", trained["dense"] / "ckpt.pt", "--export", folder)
    scaled = {"rope_type": "llama3", **dict.fromkeys(huggingface.LLAMA3_ROPE, 8.0)}
    change_json(folder / "config.json", rope_scaling={**scaled, "high_freq_factor": 9.0})
    # A pattern that is known is not tried on all characters each time.
    change_json(folder / "tokenizer.json", pre_tokenizer=GPT2)
    return folder


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "meta.json", "metrics.jsonl"])
def test_what_was_cut_or_edited_by_hand_is_one_line_or_works(llama, data, trained, tmp_path, name):
    sources = {
        "tokenizer.json": (llama, lambda folder: read_tokenizer(folder / name, 300, 0)),
        "meta.json": (data, lambda folder: Data(str(folder), "text", 8, 1, 9)),
        "metrics.jsonl": (trained["stem"], lambda folder: runs.row("", [read_run(folder)])),
    }
    source, read = sources.get(name, (llama, convert.read_folder))
    folder = shutil.copytree(source, tmp_path / "folder")
    path = folder / name
    whole = path.read_text()
    lines = whole.splitlines()[:3] if name == "metrics.jsonl" else [whole]
    texts = [whole[:at] for at in range(0, len(whole), 1 + len(whole) // 20)]
    for number in range(90):
        rng = random.Random(number)
        line = rng.choice(lines)
        texts.append(whole.replace(line, json.dumps(change(rng, json.loads(line))), 1))
    n_refused = 0
    for text in texts:
        path.write_text(text)
        try:
            read(folder)
        except UserError:
            n_refused += 1
    assert n_refused > 20


def test_a_field_of_another_type_is_one_line_that_names_the_file(on_disk, tmp_path):
    """... of what only --resume reads, too, and each setting; also lists in which one is twice in
    another, and so on, so that to spell them takes forever."""
    endless = []
    for _ in range(100):
        endless = [endless, endless]
    saved = {**checkpoint(on_disk), "model": {}, "optimizer": {}}  # so written sooner
    assert saved.keys() >= {*checkpoints.FIELDS, *checkpoints.RESUMABLE} - {"edits", "own_tables"}
    path = tmp_path / "ckpt.pt"
    tables = {**saved["tables"], "crc32": {"x": 1}, "more": endless}
    records = [endless, {**saved, "tables": tables}]
    records.append({**saved, "own_tables": "Mine"})  # which were not made by a relative
    for odd in (1j, endless):
        names = {"format", *checkpoints.FIELDS, *checkpoints.RESUMABLE}
        records += [{**saved, name: odd} for name in names]
        for part in ("args", "tables"):
            records += [{**saved, part: {**saved[part], name: odd}} for name in saved[part]]
    # What is not there at all has no default in the checkpoint of a run.
    for lost in ("step", "data", *checkpoints.RESUMABLE.keys() - {"optimizer"}):
        records.append({name: saved[name] for name in saved if name != lost})
    for record in records:
        torch.save(record, path)
        with user_error(f"^{path}"):
            load_checkpoint(path)


def test_what_a_checkpoint_would_unpack_to_is_not_read(tmp_path):
    path = tmp_path / "ckpt.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ckpt/data.pkl", bytes(64 << 20))
    assert path.stat().st_size < 100_000

    def refuse():
        with user_error(f"^{path}"):
            load_checkpoint(path)

    assert peak(refuse) < 1 << 20


def test_without_a_run_settings_and_tokenizer_are_the_models(stem_ckpt, encoding, tmp_path):
    """A compiled model is saved as what was compiled."""
    model, _, _ = load_model(stem_ckpt, CPU)
    path = tmp_path / "ckpt.pt"
    ranks = encoding._mergeable_ranks
    without = tiktoken.Encoding("x", pat_str=".", mergeable_ranks=ranks, special_tokens={})
    with user_error("has no <|endoftext|>: text.vocabularies.complete"):
        save_checkpoint(path, model, without)
    with user_error("note"):  # no setting
        save_checkpoint(path, model, encoding, {"note": "x"})
    assert not path.exists()
    save_checkpoint(path, torch.compile(model, backend="eager"), encoding)
    saved = checkpoint(tmp_path)
    assert saved["model"].keys() == model.state_dict().keys()
    # Else --init_from would take its preset from defaults.
    assert saved["args"].keys() == vars(model.config).keys() - {"attention_kinds"}


def test_a_run_that_is_a_link_to_another_is_replaced_without_it(on_disk, data, tmp_path):
    other = shutil.copytree(on_disk, tmp_path / "other")
    (other / ".ckpt.pt.0123abcd.tmp").touch()  # which it may be writing: its folder is not locked
    before = contents(other)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/ckpt.pt").symlink_to(other / "ckpt.pt")
    small_run(data, tmp_path / "out", overwrite=True, max_iters=1)
    assert contents(other) == before
    load_model(other / "ckpt.pt", CPU)


def test_what_is_no_checkpoint_is_not_replaced_by_way_of_a_link(data, tmp_path):
    """... in the folder of a run that somebody else has made."""
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    out = interrupted(data, tmp_path / "out", 9)
    (out / "best.pt").unlink()
    (out / "best.pt").symlink_to(mine)
    assert "best.pt is damaged" in refused(f"train.py --resume --out_dir {out}")
    assert mine.read_text() == "mine"
    # Nor is a file made where a link leads to none.
    mine.unlink()
    assert "is a link to nowhere" in refused(f"train.py --resume --out_dir {out}")
    ckpt = out / "ckpt.pt"
    assert "best.pt exists" in refused(f"edit.py --ckpt {ckpt} {EDIT} --save {out}/best.pt")
    assert not mine.exists()


def test_a_lock_is_a_file_of_ours(tmp_path):
    lock = tmp_path / "run/.lock"
    lock.parent.mkdir()
    lock.symlink_to(tmp_path / "mine")
    with user_error(r"\.lock is no file of ours"), locked(lock.parent):
        pass
    assert not (tmp_path / "mine").exists()
    lock.unlink()
    lock.mkdir()  # as little as a pipe, to open which would wait for a writer
    with user_error(r"\.lock is no file of ours"), locked(lock.parent):
        pass


def test_the_tour_says_in_one_line_what_is_wrong(tmp_path):
    (tmp_path / "data/countries").mkdir(parents=True)
    (tmp_path / "data/countries/meta.json").write_text("{}")
    assert "meta.json is damaged" in refused("lab/tour.py --quick")


@needs_forks
def test_a_short_soak_breaks_no_promise():
    # A run goes on while others come, and an edit is killed.
    command("tests/soak.py --n 1 --seed 185")


# --- seeds ---


def test_neighboring_seeds_draw_other_weights_and_dropout_of_their_own_in_every_step(
    data, tmp_path, monkeypatch
):
    seed_of = Mock(wraps=torch.manual_seed)
    monkeypatch.setattr(torch, "manual_seed", seed_of)
    found = []
    for seed in (1, 2):
        out = small_run(data, tmp_path / str(seed), seed=seed, dropout=0.1, max_iters=4)
        found.append(read_run(out)["eval"][0]["val_loss"])  # before any step
    assert len(set(found)) == 2
    # PyTorch's generators on a CPU look at 32 bits of a seed: one for weights, one for each step.
    drawn = [call.args[0] % 2**32 for call in seed_of.call_args_list]
    assert len(set(drawn)) == len(drawn) == 2 * 5


@pytest.mark.parametrize("name", ["best.pt", "metrics.jsonl", "loss.png"])
def test_files_of_ones_own_by_names_of_a_run_are_not_replaced(data, tmp_path, name):
    (tmp_path / name).write_text("mine\n")
    line = f"train.py --data_dir {data} --out_dir {tmp_path}"
    assert "--overwrite replaces it" in refused(line)
    assert (tmp_path / name).read_text() == "mine\n"
