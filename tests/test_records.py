"""Records that are damaged or not finite, and tables of runs."""

import json
import math
import time
from pathlib import Path

import pytest
from conftest import interrupted, user_error

import common
import edit
from lab import pictures
from lab.runs import draw, grouped, row, runs
from lab.stability import measures
from text import dataset
from training import records
from training.checkpoints import checkpoint_of
from training.edits import Edit
from training.folders import has_run

ARGS = dict(
    ffn="stem", stem_layers="all", batch_size=4, block_size=32, learning_rate=6e-3, max_iters=2000
)
SIZES = {"total": 9_000_000, "active": 3_000_000, "flops_per_token": 2_500_000}
RUN = {"type": "run", "args": ARGS, "sizes": SIZES, "data": []}
STEP = {"type": "step", "step": 1, "train_loss": 7.5, "grad_norm": 1.0, "tok_per_s": 100.5}
EVAL = {"type": "eval", "step": 2, "val_loss": 6.5, "val_loss_per_byte": 1.5}
RECALL = {"type": "recall", "recall": 0.25}
RECORDS = [RUN, STEP, {**STEP, "step": 2, "tok_per_s": 300.5}, EVAL, RECALL]


def made(folder, lines=RECORDS):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def table(folders):
    return pictures.markdown([row(name, group) for name, group in grouped(folders).items()])


def test_what_a_run_says_of_itself_stays_in_its_cell():
    rows = [{"kind": "x | y\n\n# z", "loss": "1"}]
    assert pictures.markdown(rows).splitlines()[2:] == [r"| x \| y # z | 1 |"]


def test_tokens_per_second_are_those_of_all_steps_since_the_last_reading(tmp_path, monkeypatch):
    times = iter((5.0, 7.0, 10.0, 11.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    log = records.Log(tmp_path / "metrics.jsonl", 0, args=ARGS, sizes=SIZES, data=[])
    meter = records.Meter(log, check=lambda loss, step: None)
    for tokens_of_steps in ((30, 70), (40,)):
        for n_token in tokens_of_steps:
            meter.start(n_token)
            meter.end(1, train_loss=1.0, grad_norm=1.0)
        meter.read()
    _, *steps = records.read_metrics(tmp_path / "metrics.jsonl")
    assert [step["tok_per_s"] for step in steps] == [50.0, 50.0, 40.0]


LINES = [b"[" * 100_000, b"\xff", b"null", b'{"type": "x", "step": "two"}', b'{"type": "recall"}']


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_damage_is_one_clear_line_but_a_last_line_that_was_cut_off_is_left_out(tmp_path, line):
    path = made(tmp_path) / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + line)
    assert records.read_run(tmp_path)["eval"] == [EVAL]
    path.write_bytes(whole + line + b"\n" + whole)
    for read in (records.read_run, lambda folder: records.Log(folder / "metrics.jsonl", 2)):
        with user_error(r"metrics\.jsonl, line 6, is damaged .*: delete the line"):
            read(tmp_path)


def test_a_readers_own_records_stay_up_to_the_step_at_which_a_run_resumes(tmp_path):
    named = {"type": "named", "why": None, "rows": [1, 2]}
    own = [{"type": "norms", "step": step, "of layers": [0.5, 1.0]} for step in (1, 2, 3)]
    path = made(tmp_path, [RUN, named, *own, *RECORDS[1:]]) / "metrics.jsonl"
    run = records.read_run(tmp_path)
    assert (run["norms"], run["named"], run["eval"]) == (own, [named], [EVAL])
    records.draw_loss(tmp_path)
    assert "6.500" in table([tmp_path])
    records.Log(path, 2, **RUN).write(**EVAL)
    kept = records.read_run(tmp_path)
    assert (kept["norms"], kept["named"]) == (own[:2], [named])


def test_a_file_of_another_program_in_a_folder_is_no_run_that_may_be_replaced(tmp_path):
    assert not has_run(made(tmp_path, []))
    assert not has_run(made(tmp_path, [RUN, {"type": "norms"}, EVAL]))
    assert has_run(made(tmp_path, [{"type": "norms"}]))


def test_a_rank_that_writes_nothing_keeps_no_lines(tmp_path, monkeypatch):
    """But it evaluates with the others."""
    path = made(tmp_path) / "metrics.jsonl"
    monkeypatch.setattr(records.ranks, "rank", 1)
    log = records.Log(path, 2)
    assert log.evaluated == 2 and not log.pending


def test_what_is_not_finite_is_null_in_a_file_and_nan_in_a_table_and_no_gap_in_a_picture(tmp_path):
    folder = tmp_path / r"a$\frac$"
    path = made(folder) / "metrics.jsonl"
    log = records.Log(path, 2, **RUN)
    for loss in (1e30, math.inf, math.nan):
        log.write(**{**EVAL, "val_loss": loss})
    text = path.read_text()
    written = [json.loads(line)["val_loss"] for line in text.splitlines()[-3:]]
    assert written == [1e30, None, None]
    assert "NaN" not in text and "Infinity" not in text
    assert " | nan | " in table([folder])
    records.draw_loss(folder)
    draw(grouped([folder]), tmp_path / "x.png")
    records.Log(path, 3, **RUN).write(**EVAL)  # rewrites them
    assert path.read_text() == text + records.to_line(RUN) + records.to_line(EVAL)


def test_a_resumed_run_that_was_lost_leaves_no_record(tmp_path):
    path = made(tmp_path) / "metrics.jsonl"
    steps = {record["step"] for record in records.read_metrics(path) if "step" in record}
    for dtype in ("bfloat16", "float32"):  # each goes on from the same checkpoint
        args = {**ARGS, "dtype": dtype}
        log = records.Log(path, max(steps), **{**RUN, "args": args})
        log.write(**{**EVAL, "step": max(steps) + 1})
    runs = records.read_run(tmp_path)["run"]
    assert [run["args"].get("dtype") for run in runs] == [ARGS.get("dtype"), "float32"]


def test_runs_that_differ_in_the_seed_alone_are_one_row_and_one_curve(tmp_path):
    """But one that repeats a seed is no further sample."""
    folders = []
    for number, loss in enumerate((6.0, 7.0, 9.5)):
        run = {**RUN, "args": {**ARGS, "seed": number, "out_dir": f"out/stem-{number}"}}
        lines = [run, *RECORDS[1:3], {**EVAL, "val_loss": loss}]
        folders.append(made(tmp_path / f"stem-{number}", lines))
    run = {**RUN, "args": {**ARGS, "ffn": "dense"}}
    folders.insert(1, made(tmp_path / "other", [run, *RECORDS[1:]]))
    folders.append(made(tmp_path / "again", lines))
    _, _, stem, dense, again = table(folders).splitlines()
    assert stem.startswith("| stem-0 | 3 | ")
    assert " | 7.500 ± 4.479 | " in stem  # 4.303 sqrt((1.5² + 0.5² + 2²) / 2 / 3)
    assert again.startswith("| again |  | stem")
    assert dense.startswith("| other |  | dense | 0.006 | 2 | 2.50 | 6.500 | 1.500 | 25.0%")
    draw(grouped(folders), tmp_path / "x.png")


def test_runs_of_other_text_or_made_longer_are_other_rows(tmp_path):
    """Unlike one that was only interrupted."""

    def run(seed: int, **changed) -> dict:
        return {**RUN, "args": {**ARGS, "seed": seed, "resume": False, **changed}}

    for second, n_row in (
        ([run(2)], 1),
        ([run(2), run(2, resume=True)], 1),
        ([run(2, max_iters=1000), run(2, resume=True)], 2),
        ([{**run(2), "data": ["other text"]}], 2),
    ):
        folders = [made(tmp_path / "one", [run(1), *RECORDS[1:]])]
        folders.append(made(tmp_path / "two", [*second, *RECORDS[1:]]))
        assert len(grouped(folders)) == n_row


def test_losses_over_other_windows_are_said_to_differ(tmp_path, capsys):
    others = ({"block_size": 64}, {"eval_tokens": 512}, {"doc_mask": True}, {"stage": "dpo"})
    for other in ({}, {"doc_mask": False}, {"stage": "midtrain"}, {"stage": "a reader's"}, *others):
        n_note = int(other in others)
        lines = [{**RUN, "args": {**ARGS, "ffn": "dense", **other}}, *RECORDS[1:]]
        runs([made(tmp_path / "stem"), made(tmp_path / "dense", lines)], tmp_path / "x.png")
        assert capsys.readouterr().out.count("their losses may not be compared") == n_note


def test_the_run_in_the_working_folder_has_the_name_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(made(tmp_path / "stem"))
    assert table([Path(".")]).endswith("\n" + table([tmp_path / "stem"]).splitlines()[-1])


def test_a_run_that_diverged_has_no_loss_and_its_kind_no_interval(tmp_path):
    """Its last evaluation, of an earlier step, is no figure of a run that ended."""
    lines = [{**RUN, "args": {**ARGS, "seed": 2}}, STEP, {**EVAL, "step": 0, "val_loss": 8.0}]
    lost = made(tmp_path / "lost", [*lines, {**STEP, "step": 3, "train_loss": None}])
    *_, both = table([made(tmp_path / "stem"), lost]).splitlines()
    assert " | 2 and 3 | 2.50 | nan ± nan | nan ± nan | " in both and "25" not in both
    draw(grouped([tmp_path / "stem", lost]), tmp_path / "x.png")
    both = list(map(records.read_run, (lost, tmp_path / "stem")))
    assert measures(both)["last training loss"] == "nan ± nan"
    lost_norm = made(tmp_path / "norm", [*RECORDS[:2], {**STEP, "grad_norm": None}, EVAL])
    assert measures([records.read_run(lost_norm)])["largest gradient norm after warm-up"] == "nan"


def test_a_folder_whose_run_has_not_ended_says_so(data, tmp_path, capsys):
    """Others say nothing: test_trust.py."""
    checkpoint_of(interrupted(data, tmp_path, 9))
    assert f"{tmp_path} is a run at step 6 of 12\n" in capsys.readouterr().err


def test_what_takes_long_to_read_has_a_bar(tmp_path, monkeypatch, data):
    """A million steps, a text of gigabytes, thousands of facts."""
    shown = []
    facts = tmp_path / "facts.jsonl"
    facts.write_text("{}")
    monkeypatch.setattr(common, "tqdm", lambda parts, *_, delay, **__: shown.append(delay) or parts)
    records.read_run(made(tmp_path))
    dataset.open_tokens(data, "val", dataset.read_meta(data))
    with user_error("facts.jsonl:1 is damaged"):
        edit.read_facts(Edit(facts=facts), None, None, {})
    assert shown == [3] * 3
