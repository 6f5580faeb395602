"""Records that are damaged, and tables of runs."""

import json

import pytest

from analysis.runs import row
from common import UserError
from training import records

ARGS = {"ffn": "stem", "stem_layers": "all", "batch_size": 4, "block_size": 32, "stage": "pretrain"}
ARGS |= {"learning_rate": 6e-3, "max_iters": 2000}
SIZES = {"total": 9_000_000, "active": 3_000_000, "flops_per_token": 2_500_000}
RECORDS = [
    {"type": "run", "args": ARGS, "sizes": SIZES},
    {"type": "step", "step": 1, "train_loss": 7.5, "tok_per_s": 100.5},
    {"type": "step", "step": 2, "train_loss": 7.25, "tok_per_s": 300.5},
    {"type": "eval", "step": 2, "val_loss": 6.5, "val_loss_per_byte": 1.5},
    {"type": "recall", "recall": 0.25},
]


def made(folder, records=RECORDS):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def table(folders):
    return records.markdown([row(name, group) for name, group in records.grouped(folders)])


LINES = [b"[", b"\xff", b"null", b"[]", b'{"type": []}', b"{}", b'{"type": "eval"}']


@pytest.mark.parametrize("line", LINES)
def test_a_damaged_line_is_one_clear_line_but_a_last_one_that_was_cut_off_is_left_out(
    tmp_path, line
):
    path = made(tmp_path) / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + line)
    assert records.read_run(tmp_path)["eval"] == [RECORDS[3]]
    path.write_bytes(whole + line + b"\n" + whole)
    for read in (records.read_run, lambda folder: records.Log(folder / "metrics.jsonl", 2)):
        with pytest.raises(UserError, match=r"metrics\.jsonl, line 6, is damaged"):
            read(tmp_path)


def test_a_run_that_resumes_keeps_the_lines_up_to_its_step(tmp_path):
    for step, kept in ((1, RECORDS[:2]), (2, RECORDS[:3]), (3, RECORDS[:4])):
        path = made(tmp_path, RECORDS[:4]) / "metrics.jsonl"
        records.Log(path, step).write(type="run", args={}, sizes={})
        lines = [*kept, {"type": "run", "args": {}, "sizes": {}}]
        assert [json.loads(line) for line in path.read_text().splitlines()] == lines


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 0.0, 1e30])
def test_numbers_of_any_size_are_shown(tmp_path, loss):
    step, last = {**RECORDS[1], "train_loss": loss}, {**RECORDS[3], "val_loss": loss}
    folder = made(tmp_path / r"a$\frac$", [*RECORDS, step, last])
    row = table([folder]).splitlines()[-1]
    best = min(6.5, loss) if loss == loss else 6.5
    trained = r"a$\frac$ | stem, all | 0.006 | 2,000 | 2.50"
    assert row == f"| {trained} | {loss:.3f} | {best:.3f} | 1.500 | 25.0% | 9.00 M | 3.00 M | 100 |"
    records.plot([folder], tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()


def test_runs_that_differ_in_the_seed_alone_are_one_row_and_one_curve_with_a_band(tmp_path):
    folders = []
    for number, loss in enumerate((6.0, 7.0, 9.5)):
        args = {**ARGS, "seed": number, "out_dir": f"out/stem-{number}"}
        run, evaluation = {**RECORDS[0], "args": args}, {**RECORDS[3], "val_loss": loss}
        first = {**RECORDS[3], "step": 0, "val_loss": 8.0}
        folders.append(made(tmp_path / f"stem-{number}", [run, *RECORDS[1:3], first, evaluation]))
        if number:
            report = json.dumps({"recall": 1.0, "success": 0.4 + number / 5})
            (folders[-1] / "edit_report.json").write_text(report)
    other = {**RECORDS[0], "args": {**ARGS, "ffn": "dense"}}
    other = made(tmp_path / "other", [other, *RECORDS[1:]])
    head, _, row, last = table([folders[0], other, *folders[1:]]).splitlines()
    cells = dict(zip(head.split(" | "), row.split(" | "), strict=True))
    assert cells["| run"] == "| stem-0" and cells["runs"] == "3"
    assert cells["val loss, last"] == "7.500 ± 1.803"  # by hand: sqrt((1.5² + 0.5² + 2²) / 2)
    assert cells["best"] == "7.000 ± 1.000" and cells["per byte"] == "1.500 ± 0.000"
    assert cells["edits that succeed"] == "70.0% ± 14.1%" and cells["capitals recalled"] == ""
    assert last.startswith(
        "| other |  | dense | 0.006 | 2,000 | 2.50 | 6.500 | 6.500 | 1.500 | 25.0%"
    )

    bands = []

    def band(axes, x, low, high, **look):
        bands.append([list(low), list(high)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records.plt.Axes, "fill_between", band)
        records.plot([*folders, other], tmp_path / "x.png")
    assert bands == [[[8.0, 6.0], [8.0, 9.5]]]


def test_the_mean_of_runs_is_over_the_steps_that_all_of_them_have():
    runs = [
        {"eval": [{"step": step, "val_loss": first - step} for step in steps]}
        for first, steps in ((9.0, (0, 2, 4, 6)), (8.0, (0, 4)))  # the second stopped earlier
    ]
    steps, losses = records.losses_of(runs, "eval", "val_loss")
    assert steps.tolist() == [0, 4] and losses.tolist() == [[9.0, 5.0], [8.0, 4.0]]
