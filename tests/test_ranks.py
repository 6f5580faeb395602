"""Several processes train one model (gloo): they do what one process does, column by column."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import (
    OWN_TABLES,
    RUN,
    SHAPE,
    PowerCut,
    checkpoint,
    cut_in_step,
    needs_forks,
    shorten,
    user_error,
)
from naive import decoder
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import train
from tables.tables import ResidentTables
from training import ranks
from training.batches import Data
from training.checkpoints import load_checkpoint
from training.placement import check_own
from training.records import read_run
from training.settings import Settings

TOLERANCE = 1e-5  # a mean over a row is a sum over ranks, in another order
# Of the 5 rows to evaluate, the last one is read while one of two ranks has none.
RUN = dict(RUN, max_iters=6, eval_interval=3, eval_tokens=5 * 32)

# Experts that few tokens choose: of one rank none, and of the other none or some.
EXPERTS = """
from torch import nn

import model


class FFN(model.SwiGLU):
    def __init__(self, config):
        super().__init__(config.n_embd, config.d_ff)
        self.experts = nn.ModuleList(model.SwiGLU(config.n_embd, 8) for _ in range(4))

    def forward(self, x, rows):
        y = super().forward(x, None)
        for channel, expert in enumerate(self.experts):
            chosen = x[..., channel] > 2.5
            if chosen.any():
                y[chosen] = y[chosen] + expert(x[chosen], None)
        return y


class Decoder(model.Decoder):
    def make_block(self, layer):
        return model.Block(self.config, layer, model.LinearQKV(self.config), FFN(self.config))
"""


# Rows are trained alone, and not those of the embedding.
FROZEN = """
import model


class Decoder(model.Decoder):
    def __init__(self, config, *tables):
        super().__init__(config, *tables)
        self.requires_grad_(False)
        self.wte.requires_grad_(False)
"""


# Of rows of two numbers, each rank has one.
NARROW = """
import model


class FFN(model.SwiGLU):
    row_width = 2

    def forward(self, x, rows):
        return super().forward(x, None) * (1 + rows.sum(-1, keepdim=True))


class Decoder(model.Decoder):
    def row_ffn(self, config):
        return FFN(config.n_embd, config.d_ff)
"""


def train_all(jobs: list[dict], folder: Path) -> None:
    """One run after the other. In step `cut` the power fails, for all ranks; in step `step` the
    last rank alone gets the signal `signal`."""
    for job in jobs:
        given = {**job, "out_dir": folder / job["out_dir"]}
        cut = given.pop("cut", None)
        number = given.pop("signal", None)
        step = given.pop("step", None)
        with pytest.MonkeyPatch.context() as patch, suppress(PowerCut, SystemExit):
            shorten(patch)
            if cut:
                cut_in_step(patch, cut)
            if number and ranks.rank == ranks.size - 1:
                cut_in_step(patch, step, do=partial(os.kill, os.getpid(), number))
            train.train(train.resolve_settings(**given))


@ranks.joined()
def work(jobs: list[dict], folder: Path) -> None:
    train_all(jobs, folder)
    raise AssertionError("in the last job, a rank dies")  # whose end the launcher would wait for


# As torchrun does, but in forks of this process, which has imported all.
PROCESSES = LaunchConfig(
    min_nodes=1,
    max_nodes=1,
    nproc_per_node=2,
    rdzv_backend="c10d",
    rdzv_endpoint="localhost:0",
    start_method="fork",
    max_restarts=0,
)


def assert_close(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def assert_same_training(a: Path, b: Path) -> None:
    runs = [read_run(folder) for folder in (a, b)]
    figures = [[[step["train_loss"], step["grad_norm"]] for step in run["step"]] for run in runs]
    assert len(figures[0]) == 6
    torch.testing.assert_close(*map(torch.tensor, figures), rtol=1e-4, atol=TOLERANCE)
    evals = [{record["step"]: record for record in run["eval"]} for run in runs]
    for step, other in evals[1].items():  # where a run resumed it evaluated once more
        for name in {"val_loss", "margin", "accuracy"} & other.keys():
            assert evals[0][step][name] == pytest.approx(other[name], rel=1e-4, abs=1e-5)
    one, other = (load_checkpoint(folder / "ckpt.pt", verify=True) for folder in (a, b))
    names = [each["optimizer"]["adamw"].pop("names") for each in (one, other)]
    assert names[0] == names[1]
    for part in ("model", "optimizer", "step"):
        assert_close(one[part], other[part])


@needs_forks
def test_two_ranks_equal_one_process(stem_ckpt, data, chat, pairs, tmp_path, add_relative):
    """... that accumulates the same two micro-batches: kinds, places, a stage, and resuming with
    another number of processes. Only norms are sums in another order, so nothing is clipped.
    At the end a rank dies, and with it the other, whose checkpoint stays."""
    add_relative("experts", EXPERTS)
    add_relative("frozen", FROZEN)
    add_relative("narrow", NARROW)
    base = dict(RUN, device_batch_size=2, grad_clip=0.0)
    text = dict(base, **SHAPE, data_dir=str(data))
    sft = dict(base, init_from=str(stem_ckpt), data_dir=str(chat), stage="sft")
    narrow = dict(text, table_state="number")
    whole = [
        dict(text, out_dir="stem"),
        dict(text, out_dir="embformer", ffn="embformer"),
        dict(text, out_dir="disk", offload="disk", stem_layers="all"),
        dict(text, out_dir="experts", ffn="experts"),
        dict(text, out_dir="frozen", ffn="frozen"),
        dict(narrow, out_dir="narrow", ffn="narrow"),
        dict(sft, out_dir="sft"),
        dict(sft, out_dir="dpo", stage="dpo", data_dir=str(pairs), learning_rate=1e-3),
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    train_all([dict(whole[0], out_dir="one-two", cut=5)], two)  # saved at step 3
    cut = [
        dict(whole[0], out_dir="two-two", cut=5),
        dict(whole[2], out_dir="two-one", step=4, signal=signal.SIGTERM),
        dict(out_dir="one-two", resume=True),
        dict(out_dir="two-two", resume=True),
        dict(whole[1], overwrite=True),
        dict(text, out_dir="dies", step=5, signal=signal.SIGKILL),
    ]
    train_all(whole, one)
    # In a thread, it leaves signals alone.
    with ThreadPoolExecutor() as pool, pytest.raises(ChildFailedError):
        pool.submit(elastic_launch(PROCESSES, work), [*whole, *cut], two).result(timeout=240)
    assert checkpoint(two / "dies")["step"] == 3
    for job in whole:
        assert_same_training(one / job["out_dir"], two / job["out_dir"])
    assert checkpoint(two / "two-one")["step"] == 4
    train_all([dict(out_dir="two-one", resume=True)], two)
    for name, like in (("one-two", "stem"), ("two-two", "stem"), ("two-one", "disk")):
        assert_same_training(two / name, one / like)
    assert not list(tmp_path.rglob("*live*"))


@pytest.mark.parametrize(
    ("n", "more", "said"),
    [
        (3, {}, "--batch_size 4 must be a multiple"),
        (2, dict(table_optimizer="adamw"), "process"),
        (2, dict(ffn="mine"), "one process"),
    ],
)
def test_what_several_processes_cannot_share_is_one_line(
    n, more, said, data, tmp_path, monkeypatch, add_relative
):
    add_relative("mine", OWN_TABLES)
    monkeypatch.setattr(ranks, "size", n)
    given = dict(RUN, **SHAPE, data_dir=str(data), out_dir=tmp_path, **more)
    with user_error(said):
        train.start(train.resolve_settings(**given), Data(str(data), "text", 32, 1, 99), None)


def test_further_tables_of_a_relative_are_refused_whose_columns_would_be_lost(monkeypatch):
    model = decoder(ffn="stem")
    model.more = ResidentTables(1, 23, 4)
    check_own(model, Settings(model=model.config), torch.device("cpu"))
    monkeypatch.setattr(ranks, "size", 2)
    for tables in (model.tables, model.more):
        tables.n_rank = 2
    with user_error("`more`, train in one process only"):
        check_own(model, Settings(model=model.config), torch.device("cpu"))


def test_a_rank_does_not_ask_for_the_folder_that_rank_0_may_have_deleted(
    data, tmp_path, monkeypatch
):
    """As it does when it fails, whose error is then the one to be read."""
    settings = train.resolve_settings(**SHAPE, data_dir=str(data), out_dir=tmp_path / "gone")
    monkeypatch.setattr(ranks, "rank", 1)
    train.check_start(settings, None, None)


def test_a_state_of_columns_is_divided_whatever_optimizer_has_it(monkeypatch):
    """That of a row has one number, which all ranks have."""
    monkeypatch.setattr(ranks, "size", 2)
    monkeypatch.setattr(ranks.sharded, "my_columns", lambda tensor: tensor[:, 1:])
    states = {"tables": {"state": [torch.ones(9, 4)]}, "wte": {"state": [torch.ones(9, 1)]}}
    whole = states["tables"]["state"]
    checkpoint = {"model": {}, "optimizer": {"rows": states}, "args": {}}
    ranks.change_columns(checkpoint, ["wte", "tables"], whole=False)
    assert states["tables"]["state"][0].shape == (9, 3) and whole[0].shape == (9, 4)
    assert states["wte"]["state"][0].shape == (9, 1)
