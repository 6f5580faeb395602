"""Several processes train one model (gloo): they do what one process does, column by column."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, SMALL, command
from test_stages import folders  # noqa: F401
from test_train import assert_same, checkpoint, losses

import bench
import train as train_module
from common import UserError
from tables import sharded
from tables.tables import ResidentTables
from training import ranks
from training.checkpoints import load_checkpoint
from training.records import read_run
from training.settings import resolve_settings

SHAPE = dict(n_layer=2, n_head=2, n_embd=32, block_size=32)
RUN = dict(batch_size=4, max_iters=20, eval_interval=10, eval_tokens=500, device="cpu")


def train_all(jobs: list[dict], folder: Path) -> None:
    """One run after the other. At step `until` the power fails, for all ranks; at step `signal` the
    last rank alone gets a SIGTERM."""
    real = train_module.train_step
    for job in jobs:
        flags = {**job, "out_dir": folder / job["out_dir"]}
        until, stop = flags.pop("until", None), flags.pop("signal", None)

        def step(run, *args, until=until, stop=stop):
            if run.step == until:
                raise InterruptedError
            if run.step == stop and ranks.rank == ranks.size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return counted_step(real, run, *args)

        train_module.train_step = step
        try:
            train_module.train(resolve_settings(**flags))
        except (InterruptedError, SystemExit):
            assert until or stop
    train_module.train_step = real


def counted_step(step, run, batch, *more):
    """A training step, and of ranks what they have of the tables and send, by the formulas."""
    if ranks.size == 1:
        return step(run, batch, *more)
    sent, real, P = Counter(), {}, ranks.size
    for name in ("all_gather", "all_to_all_single", "all_reduce"):

        def counted(to, *given, name=name):
            passes = 2 if name == "all_reduce" else 1  # a ring adds up, then tells
            n_byte = sum(t.nbytes for t in to) if name == "all_gather" else to.nbytes
            sent[name] += passes * n_byte * (P - 1) / P
            return real[name](to, *given)

        real[name] = getattr(dist, name)
        setattr(dist, name, counted)
    sharded.sent.clear()
    result = step(run, batch, *more)
    assert sorted(sent.values()) == sorted(sharded.sent.values())  # which bench.py shows
    for name, function in real.items():
        setattr(dist, name, function)

    model, vocab_size = run.model, run.settings.model.vocab_size
    rows = [block.row_width for block in model.blocks if block.row_width]
    wte = [] if model.head is None else [model.config.n_embd]
    for tables, widths in ((model.tables, rows), (model.wte, wte)):
        arrays = (*tables.weight, *tables.m, *tables.v) if widths else ()
        assert [a.shape for a in arrays] == [(vocab_size, width // P) for width in widths * 3]
    if run.n_part == P:  # one micro-batch each
        n, n_lookup = max(len(batch[0][r::P].unique()) for r in range(P)), bool(rows) + bool(wte)
        assert sent["all_gather"] == (P - 1) * n_lookup * (8 + 8 * n)
        assert sent["all_to_all_single"] == 2 * (P - 1) / P * n * sum(rows + wte) * 4
        figures = len(result[0]) - 3 + 1  # all but norm, rate and speed; the square of the norm
        dense = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert sent["all_reduce"] == 2 * (P - 1) / P * (dense + figures) * 4
    return result


@ranks.joined()
def work(jobs: list[dict], folder: str) -> None:
    train_all(jobs, Path(folder))
    if ranks.size == 2:
        bench.bench_train(bench.Bench(device="cpu", quick=True, **{**bench.QUICK, "batch_size": 4}))


def fork(n: int, jobs: str, folder: str) -> None:
    """Be torchrun, but import everything once: `work` in n processes."""
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)])  # imports much
    train_module.plot = lambda *_: None
    if n == 2:  # many runs: those of four write an example, too
        train_module.show = lambda *_: None
    os.environ.update(WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    processes = []
    for number in range(n):
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(number)
        process = get_context("fork").Process(target=work, args=(json.loads(jobs), folder))
        process.start(), processes.append(process)
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in processes))


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def in_ranks(n: int, jobs: list[dict], folder: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    args = [sys.executable, __file__, str(n), json.dumps(jobs), str(folder)]
    return subprocess.Popen(args, **how)


def assert_ended(process: subprocess.Popen) -> str:
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return said


def assert_same_run(a: Path, b: Path) -> None:
    assert losses(a) == losses(b) and len(losses(a)) == 20
    evals = [{e["step"]: e["val_loss"] for e in read_run(folder)["eval"]} for folder in (a, b)]
    for step, loss in evals[1].items():  # where a run resumed it evaluated once more
        assert evals[0][step] == pytest.approx(loss, rel=1e-6)  # each rank has a share of it
    a, b = (load_checkpoint(folder / "ckpt.pt", verify=True) for folder in (a, b))
    for part in ("model", "optimizer", "step", "config", "reference"):
        assert_same(a[part], b[part])
    assert a["best"] == pytest.approx(b["best"], rel=1e-6)


def test_two_ranks_equal_one_process_to_the_bit(data, folders, trained, tmp_path):  # noqa: F811
    """... that accumulates the same two micro-batches: kinds, places, objectives, and resuming with
    another number of processes. Only norms are sums in another order, so nothing is clipped."""
    base = dict(RUN, device_batch_size=2, grad_clip=0.0)
    text = dict(base, **SHAPE, data_dir=str(data))
    later = dict(base, init_from=str(trained["stem"] / "ckpt.pt"))
    whole = [
        dict(text, out_dir="dense", ffn="dense"),
        dict(text, out_dir="stem"),
        dict(text, out_dir="embformer", ffn="embformer"),
        dict(text, out_dir="disk", offload="disk", stem_layers="all"),
        dict(later, out_dir="sft", stage="sft", data_dir=str(folders["chat"])),
        dict(later, out_dir="dpo", stage="dpo", data_dir=str(folders["preference"])),
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    train_all([dict(whole[1], out_dir="one-two", until=15)], two)  # saved at step 10
    cut = [
        dict(whole[1], out_dir="two-two", until=15),
        dict(whole[3], out_dir="two-one", signal=4),
        *(dict(out_dir=name, resume=True) for name in ("one-two", "two-two")),
    ]
    process = in_ranks(2, [*whole, *cut], two)
    train_all(whole, one)
    said = assert_ended(process)
    lines = [line.strip("| ").split(" | ") for line in said.splitlines()]
    sent = {line[0]: line[-2:] for line in lines if line[0] in bench.KINDS}
    assert sent.keys() == bench.KINDS.keys()
    assert all(counted == by and len(counted) >= len("100,000") for counted, by in sent.values())
    for job in whole:
        assert_same_run(one / job["out_dir"], two / job["out_dir"])
    assert checkpoint(two / "two-one")["step"] == 5
    train_all([dict(out_dir="two-one", resume=True)], two)
    for name, like in (("one-two", "stem"), ("two-two", "stem"), ("two-one", "disk")):
        assert_same_run(two / name, one / like)
    assert not list(tmp_path.glob("*/*/live-tables*"))


def test_four_ranks_equal_one_process_nearly(data, tmp_path):
    job = dict(RUN, **SHAPE, data_dir=str(data), out_dir="run", stem_layers="all")
    # Of the five rows to evaluate, the last one is read while three ranks have none.
    job |= dict(device_batch_size=1, eval_interval=20, eval_tokens=5 * 32)
    process = in_ranks(4, [job], tmp_path / "four")
    train_all([job], tmp_path / "one")
    assert_ended(process)
    runs = [read_run(tmp_path / name / "run") for name in ("one", "four")]
    for kind, loss in (("step", "train_loss"), ("eval", "val_loss")):
        one, four = ([record[loss] for record in run[kind]] for run in runs)
        assert len(one) > 1 and four == pytest.approx(one, abs=1e-5)
    one, four = (checkpoint(tmp_path / name / "run") for name in ("one", "four"))
    counts = [each["optimizer"]["rows"]["tables"]["count"] for each in (one, four)]
    assert_same(*counts)
    for name, weight in one["model"].items():
        assert (four["model"][name] - weight).abs().mean() < 1e-5


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


def test_a_rank_that_dies_ends_all_with_one_line(data, tmp_path):
    metrics, flags = tmp_path / "out" / "metrics.jsonl", ("--max_iters", 100000, "--data_dir", data)
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen(
        [*map(str, (*start, ROOT / "train.py", *SMALL, *flags))], cwd=tmp_path, **output
    )
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count('"eval"') > 2):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    os.kill(int(found.stdout.split()[-1]), signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode and re.findall("^error: .*", said, re.MULTILINE) == [
        "error: another process of this run died: go on with --resume"
    ]
    saved = checkpoint(tmp_path / "out")["step"]
    assert saved and saved % 6 == 0
    command("sample.py", "--ckpt", "out/ckpt.pt", "--max_new_tokens", 3, cwd=tmp_path)


if __name__ == "__main__":
    fork(int(sys.argv[1]), *sys.argv[2:])
