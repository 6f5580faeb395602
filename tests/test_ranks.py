"""Several processes train one model (gloo): they do what one process does, column by column."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, SMALL, command
from test_stages import folders  # noqa: F401
from test_train import assert_same, checkpoint, losses

import train as train_module
from common import UserError
from tables import sharded
from tables.tables import ResidentTables
from training import ranks
from training.checkpoints import load_checkpoint
from training.records import read_run
from training.settings import resolve_settings

SHAPE = dict(n_layer=3, n_head=2, n_embd=32, block_size=32)
RUN = dict(batch_size=4, max_iters=20, eval_interval=10, eval_tokens=500, device="cpu")


def torchrun(n: int, *args, **more) -> subprocess.Popen:
    """Start `torchrun args...` with n processes, whose output is read together."""
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", n)
    more |= dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*map(str, (*start, *args))], env=environment, **more)


def train_all(jobs: list[dict]) -> None:
    """One run after the other. `until` is the step in which the power fails, for all ranks."""
    real = train_module.train_step
    for flags in jobs:
        until = flags.pop("until", None)

        def step(run, *args, until=until):
            if run.step == until:
                raise InterruptedError
            return real(run, *args)

        train_module.train_step = step
        try:
            train_module.train(resolve_settings(**flags))
        except InterruptedError:
            assert until
    train_module.train_step = real


@ranks.joined()
def work(jobs: str) -> None:
    """What each process of `torchrun` does here: runs, and counts what it sent and has."""
    sent, model = Counter(), []
    real = {name: getattr(dist, name) for name in ("all_gather", "all_to_all_single", "all_reduce")}

    def count(name):
        def counted(to, *more):
            whole = to if name != "all_gather" else torch.stack(to)
            passes = 2 if name == "all_reduce" else 1  # a ring adds up, then tells
            sent[name] += passes * whole.nbytes * (ranks.size - 1) // ranks.size
            return real[name](to, *more)

        return counted

    def fit(run):
        model[:] = [run.model]
        sent.clear()
        try:
            real_fit(run)
        finally:
            tables = [*run.model.tables.weight, *run.model.wte.parameters()]
            rows = [t for a in run.optimizer.rows.values() for t in (*a.m, *a.v)]
            numel = [sum(t.numel() for t in each) for each in (tables, rows)]
            path = Path(f"{run.settings.out_dir}-{ranks.rank}.json")
            path.write_text(json.dumps(dict(sent=sent, numel=numel)))

    for name in real:
        setattr(dist, name, count(name))
    real_fit, train_module.fit = train_module.fit, fit
    train_all(json.loads(Path(jobs).read_text()))


def compare(n: int, jobs: dict[str, dict], folder: Path) -> None:
    """Let n processes do some jobs, in `ranks/`, and one process others of the same names."""
    todo = [{**job, "out_dir": str(folder / "ranks" / job["out_dir"])} for job in jobs["ranks"]]
    (folder / "jobs.json").write_text(json.dumps(todo))
    process = torchrun(n, __file__, folder / "jobs.json")
    train_all([{**job, "out_dir": str(folder / "one" / job["out_dir"])} for job in jobs["one"]])
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said


def assert_same_run(a: Path, b: Path) -> None:
    assert losses(a) == losses(b) and len(losses(a)) == 20
    assert [e["val_loss"] for e in read_run(a)["eval"]] == [
        e["val_loss"] for e in read_run(b)["eval"]
    ]
    a, b = load_checkpoint(a / "ckpt.pt", verify=True), load_checkpoint(b / "ckpt.pt", verify=True)
    for part in ("model", "optimizer", "step", "config", "best", "reference"):
        assert_same(a[part], b[part])


def test_two_ranks_equal_one_process_to_the_bit(data, folders, trained, tmp_path):  # noqa: F811
    """... that accumulates the same two micro-batches. Norms are sums in another order: no clipping.
    Of all kinds and places and objectives, and when another number of processes goes on."""
    base = dict(RUN, device_batch_size=2, grad_clip=0.0)
    text = dict(base, **SHAPE, data_dir=str(data))
    later = dict(base, init_from=str(trained["stem"] / "ckpt.pt"))
    whole = [
        dict(text, out_dir="dense", ffn="dense"),
        dict(text, out_dir="stem", dropout=0.0),
        dict(text, out_dir="embformer", ffn="embformer"),
        dict(text, out_dir="disk", offload="disk", stem_layers="all"),
        dict(later, out_dir="sft", stage="sft", data_dir=str(folders["chat"])),
        dict(later, out_dir="dpo", stage="dpo", data_dir=str(folders["preference"])),
    ]
    cut = [dict(whole[n], out_dir=f"cut-{whole[n]['out_dir']}", until=15) for n in (1, 3)]
    for folder in (tmp_path / "one", tmp_path / "ranks"):
        folder.mkdir()
    compare(2, dict(ranks=[*whole, *cut], one=[*whole, *cut]), tmp_path)
    for job in whole:
        assert_same_run(tmp_path / "one" / job["out_dir"], tmp_path / "ranks" / job["out_dir"])

    # The runs that were cut off at step 15, saved at step 10, change places, but one stays.
    (tmp_path / "one" / "cut-stem").rename(tmp_path / "stem")
    (tmp_path / "ranks" / "cut-stem").rename(tmp_path / "one" / "cut-stem")
    (tmp_path / "stem").rename(tmp_path / "ranks" / "cut-stem")
    resume = [dict(out_dir=job["out_dir"], resume=True) for job in cut]
    compare(2, dict(ranks=resume, one=resume[:1]), tmp_path)
    for place in ("one/cut-stem", "ranks/cut-stem"):
        assert_same_run(tmp_path / place, tmp_path / "one" / "stem")
    assert_same_run(tmp_path / "ranks" / "cut-disk", tmp_path / "one" / "disk")
    assert not list(tmp_path.glob("*/*/live-tables*"))


def test_four_ranks_share_tables_and_send_what_the_formula_says(data, tmp_path):
    job = dict(RUN, **SHAPE, data_dir=str(data), out_dir="run", stem_layers="all", eval_tokens=32)
    job |= dict(device_batch_size=1, eval_interval=20)
    (tmp_path / "one").mkdir(), (tmp_path / "ranks").mkdir()
    compare(4, dict(ranks=[job], one=[job]), tmp_path)
    one, four = (losses(tmp_path / name / "run") for name in ("one", "ranks"))
    assert four == pytest.approx(one, abs=1e-5)
    one, four = (checkpoint(tmp_path / name / "run") for name in ("one", "ranks"))
    assert_same(
        one["optimizer"]["rows"]["tables"]["count"], four["optimizer"]["rows"]["tables"]["count"]
    )
    for name, weight in one["model"].items():
        torch.testing.assert_close(four["model"][name], weight, rtol=0, atol=2e-3)
        assert (four["model"][name] - weight).abs().mean() < 1e-5

    # Memory: rows of two tables [V, d_ff] and of the embedding, m and v, are a quarter.
    rows = sum(w.numel() for k, w in one["model"].items() if k.startswith(("tables", "wte")))
    counted = [json.loads((tmp_path / "ranks" / f"run-{r}.json").read_text()) for r in range(4)]
    assert [each["numel"] for each in counted] == [[rows / 4, 2 * rows / 4]] * 4


@pytest.mark.parametrize("n", [2, 3])
def test_flags_that_do_not_come_out_even_are_one_line(n, data, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "size", n)
    given = dict(RUN, **SHAPE, data_dir=str(data), out_dir=tmp_path)
    with pytest.raises(UserError, match="--nproc_per_node"):
        more = dict(table_optimizer="adamw") if n == 2 else {}
        train_module.train(resolve_settings(**given, **more))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(UserError, match="3 processes do not divide rows of 32 numbers"):
        sharded.shard(ResidentTables(1, 5, 32 // 3), 32)


def wait_for(condition, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def test_a_rank_that_dies_and_ctrl_c_end_all(data, tmp_path):
    """... with one line each, a whole checkpoint, and the advice to resume works."""
    metrics, flags = tmp_path / "out" / "metrics.jsonl", ("--max_iters", 100000, "--data_dir", data)

    def steps(kind="step"):
        return metrics.read_text().count(f'"type": "{kind}"') if metrics.exists() else 0

    process = torchrun(2, ROOT / "train.py", *SMALL, *flags, cwd=tmp_path, start_new_session=True)
    wait_for(lambda: steps("eval") > 2 and steps() > 15, process)
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    os.kill(int(found.stdout.split()[-1]), signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode and re.findall("^error: .*", said, re.MULTILINE) == [
        "error: another process of this run died: go on with --resume"
    ]
    saved = checkpoint(tmp_path / "out")["step"]
    assert saved and saved % 6 == 0

    more = ("--resume", "--out_dir", "out")
    process = torchrun(2, ROOT / "train.py", *more, cwd=tmp_path, start_new_session=True)
    wait_for(lambda: steps() > saved + 8, process)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert "error: " not in said and "go on with: python train.py --resume --out_dir out" in said
    assert checkpoint(tmp_path / "out")["step"] == len(losses(tmp_path / "out")) > saved
    command("sample.py", "--ckpt", "out/ckpt.pt", "--max_new_tokens", 3, cwd=tmp_path)


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(sys.argv[1])
