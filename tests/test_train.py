"""train.py and its settings, inside the process and as a user runs them."""

import copy
import math
import re
import shlex
import shutil
import signal
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import (
    CPU,
    SMALL,
    PowerCut,
    assert_same,
    assert_same_run,
    change_json,
    checkpoint,
    command,
    contents,
    cut_in_step,
    interrupted,
    losses,
    of_another_tokenizer,
    refused,
    resume,
    small_run,
)
from originals import gradients

import train
from common import UserError
from model import Decoder, ModelConfig
from tables.tables import ResidentTables
from training.checkpoints import load_model
from training.objectives import NextToken
from training.optimizer import Optimizer, schedule
from training.records import read_run
from training.settings import PRESETS, Settings

FILES = {"ckpt.pt", "best.pt", "metrics.jsonl", "loss.png"}


def test_a_run_leaves_what_it_promises(trained):
    for ffn, folder in trained.items():
        assert {str(path) for path in contents(folder)} == FILES
        records = read_run(folder)
        assert [record["step"] for record in records["step"]] == list(range(1, 13))
        assert [record["step"] for record in records["eval"]] == [0, 6, 12]
        assert records["eval"][-1]["val_loss"] < records["eval"][0]["val_loss"]
        assert checkpoint(folder)["config"]["ffn"] == ffn


# --- going on ---


@pytest.mark.parametrize(
    "more",
    [
        dict(dropout=0.2, table_state="number", table_dtype="bfloat16"),
        dict(table_optimizer="adamw"),
        dict(dtype="float16"),
    ],
)
def test_interrupted_and_resumed_equals_uninterrupted(data, tmp_path, more):
    small_run(data, tmp_path / "whole", **more)
    cut = interrupted(data, tmp_path / "cut", 9, **more)
    assert checkpoint(cut)["step"] == 6
    shutil.copytree(data, tmp_path / "moved")  # which data may be
    resume(cut, data_dir=str(tmp_path / "moved"))
    assert_same_run(cut, tmp_path / "whole")
    evals = [read_run(tmp_path / name)["eval"] for name in ("cut", "whole")]
    assert evals[0] == evals[1]


def test_best_is_the_model_of_the_lowest_validation_loss_also_over_a_crash(
    data, tmp_path, monkeypatch
):
    """Losses are made up, their minimum is at step 6 of 12; the power fails between ckpt.pt and
    best.pt there."""
    made_up = iter([1.0, 8.0, 6.0, 6.0, 7.0, 6.0, 6.5, 7.0])  # steps 0, 3, 6; 6, 9, 12; 12, 15
    save = train.save_checkpoint

    def fails(path, *args, **state):
        if path.name == "best.pt" and state["step"] == 6:
            raise PowerCut
        save(path, *args, **state)

    def validate(*args):
        return {"val_loss": next(made_up), "val_loss_per_byte": 1.0}

    monkeypatch.setattr(train, "validate", validate)
    with monkeypatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(train, "save_checkpoint", fails)
        small_run(data, tmp_path, eval_interval=3)
    model = checkpoint(tmp_path)["model"]
    assert torch.load(tmp_path / "best.pt", weights_only=True)["step"] == 3
    resume(tmp_path)
    resume(tmp_path, max_iters=15)
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert best["step"] == 6 and "optimizer" not in best
    assert_same(best["model"], model)
    assert checkpoint(tmp_path)["best"] == (6.0, 6)


def test_an_earlier_run_is_replaced_on_demand_alone(trained, on_disk, data, tmp_path):
    out = shutil.copytree(on_disk, tmp_path / "out")
    before = contents(out)
    line = f"train.py --out_dir {out} --data_dir {data} "
    for more, named in (
        ("", "--resume goes on with it, --overwrite replaces it"),
        (f"--init_from {trained['stem']}/ckpt.pt", "--overwrite"),
        (f"--init_from {out}/ckpt.pt --overwrite", "--out_dir"),
        ("--overwrite --block_size 100000", "--block_size 100000"),
        ("--overwrite --data_dir gone", "gone"),
    ):
        assert named in refused(line + more)
        assert contents(out) == before
    command(line + "--overwrite", *SMALL)
    assert_same_run(out, trained["stem"])
    assert {str(path) for path in contents(out)} == FILES
    resume(out, max_iters=13)  # which replaces nothing
    assert losses(out)[:12] == losses(trained["stem"])


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_saves_a_whole_step_and_the_run_goes_on(
    name, trained, data, tmp_path, monkeypatch, capsys
):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stopped:
        cut_in_step(patch, 3, do=lambda: signal.raise_signal(number))
        small_run(data, tmp_path)
    assert stopped.value.code == 128 + number
    assert signal.getsignal(number) == before
    assert checkpoint(tmp_path)["step"] == len(losses(tmp_path)) == 3
    # and the advice works, from a step at which there was no evaluation
    advice = re.search("python (train.py --resume .*)", capsys.readouterr().out)
    command(advice[1])
    assert_same_run(tmp_path, trained["stem"])


# --- numbers ---


def test_seeds_reproduce_and_accumulation_equals_the_whole_batch(trained, data, tmp_path):
    expected = losses(trained["stem"])
    assert losses(small_run(data, tmp_path / "same")) == expected
    assert losses(small_run(data, tmp_path / "other", seed=1, max_iters=2)) != expected[:2]
    parts = losses(small_run(data, tmp_path / "parts", device_batch_size=1))
    assert parts == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_train_float32_weights(dtype, trained, data, tmp_path):
    out = small_run(data, tmp_path, dtype=dtype)
    assert losses(out) == pytest.approx(losses(trained["stem"]), rel=5e-3)
    assert losses(out) != losses(trained["stem"])
    assert {weight.dtype for weight in checkpoint(out)["model"].values()} == {torch.float32}


def test_a_step_whose_gradients_overflow_in_float16_changes_nothing():
    torch.manual_seed(0)
    model = Decoder(ModelConfig(40, 24, 3, 2, 32, ffn="stem", stem_layers="all"))
    optimizer = Optimizer(model, Settings(max_iters=9), "float16")
    objective = NextToken(model, CPU, "float16")

    def step(overflow=False) -> dict:
        loss = objective(*torch.randint(40, (2, 2, 24)))
        optimizer.scaler.scale(loss).backward()
        if overflow:
            model.blocks[0].ffn.down.weight.grad[0, 0] = torch.inf
        optimizer.step(1.0)
        state = {**optimizer.state_dict(), "scaler": None, "model": dict(model.state_dict())}
        return copy.deepcopy(state)

    first, after, further = step(), step(overflow=True), step()
    assert_same(first, after)  # weights, rows, states of the optimizer
    for name in ("tables.weight.1", "blocks.0.ffn.gate.weight"):
        assert further["model"][name].isfinite().all()
        assert not torch.equal(further["model"][name], after["model"][name])


def test_learning_rate_warms_up_and_decays():
    rate = [schedule(step, Settings(max_iters=100)) for step in range(100)]
    assert rate[0] == pytest.approx(0.1) and rate[9] == pytest.approx(1.0)
    assert rate[55] == pytest.approx(0.1 + 0.9 * 0.5)  # half-way down
    assert rate[99] == pytest.approx(0.1, abs=1e-3)
    linear = Settings(max_iters=100, schedule="linear")
    line = [schedule(step, linear) for step in range(10, 100)]
    assert line[45] == pytest.approx(0.1 + 0.9 * 0.5)
    assert [a - b for a, b in pairwise(line)] == pytest.approx([0.01] * 89)


# MiniMind's published sizes, and Embformer's "0.1B".
MILLIONS = {"minimind-26m": 26, "minimind-64m": 64, "minimind-104m": 104, "embformer-104m": 123}


@pytest.mark.parametrize("preset", MILLIONS)
def test_presets_have_their_size(preset):
    settings = Settings.from_flat({"ffn": "dense", **PRESETS[preset]})
    with torch.device("meta"):
        model = Decoder(settings.model)
    assert model.sizes()["total"] / 1e6 == pytest.approx(MILLIONS[preset], rel=0.01)


def test_weights_that_are_not_numbers_never_reach_a_checkpoint(data, tmp_path, monkeypatch):
    step = train.Optimizer.step
    calls = []

    def poisoned(self, lr):
        calls.append(lr)
        if len(calls) == 12:  # the last step before the last evaluation: its own loss is fine
            self.adamw.param_groups[0]["params"][0].grad[0, 0] = math.inf
        return step(self, lr)

    monkeypatch.setattr(train.Optimizer, "step", poisoned)
    with pytest.raises(UserError, match="nan at step 12"):
        small_run(data, tmp_path)
    saved = checkpoint(tmp_path)
    assert saved["step"] == 6
    assert all(weight.isfinite().all() for weight in saved["model"].values())


@pytest.mark.parametrize(
    ("ffn", "more"),
    [
        ("stem", dict(table_rate=0.3)),
        ("stem", dict(table_rate=0.0)),  # rows stay as they were drawn
        ("stem", dict(table_optimizer="adamw")),
        ("dense", dict(table_optimizer="adamw")),  # of the embedding alone
    ],
)
def test_steps_equal_those_of_pytorchs_optimizers(ffn, more):
    """AdamW for the backbone and RMSprop for rows, those of tables at a rate of their own, or AdamW
    for all, clipped together; linear layers alone decay."""
    torch.manual_seed(0)
    model = Decoder(ModelConfig(20, 8, 2, 2, 16, ffn=ffn))
    theirs = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    rows = {name: p for name, p in theirs.items() if name.startswith(("tables.", "wte."))}
    linear = [p for name, p in theirs.items() if p.dim() == 2 and name not in rows]
    other = [p for p in theirs.values() if p.dim() == 1]
    options = dict(table_state="number", weight_decay=0.2, grad_clip=0.5, **more)
    settings = Settings(learning_rate=0.1, **options)
    by_rows = settings.table_optimizer == "rmsprop"
    if not by_rows:
        other += rows.values()
    groups = [{"params": linear}, {"params": other, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.2)
    rmsprop = torch.optim.RMSprop([{"params": [p]} for p in rows.values()], alpha=0.95)
    rates = [1.0 if name.startswith("wte") else settings.table_rate for name in rows]
    optimizer = Optimizer(model, settings)
    for step, lr in enumerate((1.0, 0.5, 0.1), 1):
        ids = torch.randint(20, (2, 8))
        model(ids, ids)[1].backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        if by_rows:
            grads = gradients(model)
        for name, grad in grads.items():
            theirs[name].grad = grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = 0.1 * lr
        # PyTorch's RMSprop does not correct for the beginning.
        correction = (1 - 0.95**step) ** 0.5
        for group, rate in zip(rmsprop.param_groups, rates, strict=True):
            group.update(lr=0.1 * lr * rate * correction, eps=1e-8 * correction)
        adamw.step()
        if by_rows:
            rmsprop.step()
        torch.testing.assert_close(optimizer.step(lr), norm)
        mine = dict(model.named_parameters())
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_loss_with_document_mask_is_that_of_the_documents_alone():
    torch.manual_seed(0)
    model = Decoder(ModelConfig(20, 16, 2, 2, 16)).eval()
    first, second = torch.tensor([[0, 5, 6, 7]]), torch.tensor([[0, 8, 9, 5, 6, 3]])
    masked = NextToken(model, CPU, "float32", boundary=0)
    plain = NextToken(model, CPU, "float32")
    both = torch.cat([first, second], dim=1)
    quiet = torch.full_like(first, -1)  # no targets in the first document
    targets = torch.cat([quiet, second], dim=1)
    expected = plain(second, second)
    torch.testing.assert_close(masked(both, targets), expected)
    assert not torch.isclose(plain(both, targets), expected, atol=1e-4)


# --- flags and Python ---


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--data_dir gone", "prepare.py --out_dir gone"),
        ("--block_size 100000", "--block_size 100000"),
        ("--block_size 0", "--block_size 0"),
        ("--device_batch_size 3", "--device_batch_size 3"),
        ("--learning_rate nan", "--learning_rate nan"),
        ("--learning_rate 1e38", "--learning_rate 1e+38"),
        ("--batch_size 1000000000000", "--batch_size 1000000000000"),
        (f"--max_iters {10**400}", "--max_iters 1000"),
        ("--data_dir " + "x" * 300, "xxx"),
        ("--out_dir " + "x" * 300, "xxx"),
        ("--out_dir /dev/null/x", "/dev/null/x"),
        ("--offload disk --table_optimizer adamw", "--table_optimizer adamw"),
        ("--table_rate 0 --table_optimizer adamw", "--table_rate 1"),
        ("--ffn sparse", "--ffn sparse"),
        (
            "--attention full,local:3",
            "--attention full,local:3 is not full: in relatives/ there is no 'local'",
        ),
        ("--ffn dense --stem_layers all", "unrecognized arguments: --stem_layers"),
        ("--embformer_act silu", "unrecognized arguments: --embformer_act"),
        ("--preset embformer-104m --stem_layers all", "unrecognized arguments: --stem_layers"),
        ("--max_iter 3", "unrecognized arguments: --max_iter"),  # an abbreviation
        ("--device warp", "--device warp"),
        ("--resume --out_dir new", "new/ckpt.pt"),
        ("--resume --n_layer 4 --out_dir {stem}", "--n_layer"),
        ("--resume --max_iters 3 --out_dir {stem}", "already at step 12"),
        ("--resume --device_batch_size 3 --out_dir {stem}", "--device_batch_size 3"),
        ("--resume --out_dir {stem} --data_dir {other}", "{other}"),
        ("--eval_only --out_dir new", "new/ckpt.pt"),
        ("--eval_only --seed 3 --out_dir {stem}", "--seed"),
        ("--eval_only --out_dir {dense} --data_dir {other}", "{other}"),
        ("--init_from gone.pt", "gone.pt"),
        ("--init_from {stem}/ckpt.pt --out_dir {stem}", "--out_dir"),
        ("--init_from {dense}/ckpt.pt --ffn stem", "--ffn"),
        ("--stage sft", "--init_from"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(trained, data, tmp_path, given, named):
    folders = {**trained, "other": of_another_tokenizer(data, tmp_path / "other")}
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    before = contents(trained["stem"])
    # A later --data_dir replaces an earlier one.
    line = f"train.py --data_dir {data} " + given.format(**folders)
    if "--resume" in given or "--eval_only" in given:
        line = "train.py " + given.format(**folders)
    assert named.format(**folders) in refused(line, cwd=cwd)
    assert not list(cwd.iterdir())  # nor a folder for nothing
    assert contents(trained["stem"]) == before


def test_settings_without_arguments_are_those_of_the_command(data, tmp_path):
    folder = shutil.copytree(data, tmp_path / "countries")
    change_json(folder / "meta.json", corpus="countries")
    assert train.resolve_settings(data_dir=str(folder)) == Settings(str(folder))


def test_training_from_python_needs_no_command_line(data, tmp_path):
    model = ModelConfig(block_size=16, n_layer=2, n_head=2, n_embd=16, stem_layers="all")
    settings = Settings(str(data), tmp_path, max_iters=3, eval_interval=3, model=model)
    train.train(settings)
    assert read_run(tmp_path)["step"][-1]["step"] == 3
    flat = settings.flat()
    del flat["table_std"]  # a checkpoint that is older than a setting has its default
    assert Settings.from_flat(flat) == settings


def test_eval_only_prints_the_figures_of_the_run_and_writes_nothing(trained, data, tmp_path):
    other = shutil.copytree(data, tmp_path / "other")
    for ffn, more in (("dense", " --device_batch_size 3"), ("embformer", " --offload disk")):
        out = trained[ffn]
        before = contents(out)
        line = f"train.py --eval_only --out_dir {out} --data_dir {data},{other}/{more}"
        last = read_run(out)["eval"][-1]
        lines = command(line).stdout.splitlines()
        for line, folder in zip(lines, (data, f"{other}/"), strict=True):
            assert f"ckpt.pt on {folder}" in line and f"val loss {last['val_loss']:.5g}" in line
            assert f"val loss per byte {last['val_loss_per_byte']:.5g}" in line
        assert contents(out) == before


class SharedRows(ResidentTables):
    """Eight tokens share a row."""

    def __init__(self, n_table: int, vocab_size: int, width: int) -> None:
        super().__init__(n_table, -(-vocab_size // 8), width)

    def lookup(self, ids: torch.Tensor):
        return super().lookup(ids // 8)


def test_tables_of_ones_own_are_trained_and_read_again(data, tmp_path):
    small_run(data, tmp_path, SharedRows, max_iters=4)
    first = checkpoint(tmp_path)["model"]["tables.weight.0"]
    resume(tmp_path, SharedRows, max_iters=6)
    model, _, saved = load_model(tmp_path / "ckpt.pt", CPU, tables=SharedRows)
    # Who opens it must bring the class.
    for line in (f"train.py --resume --out_dir {tmp_path}", f"sample.py --ckpt {tmp_path}/ckpt.pt"):
        assert "tables of another kind" in refused(line)
    assert len(model.tables.weight[0]) == len(first) == -(-model.config.vocab_size // 8)
    assert saved["step"] == 6 and not torch.equal(model.tables.weight[0], first)


def test_a_run_in_a_thread_is_that_in_the_main_thread(data, trained, tmp_path):
    """As in a notebook's server."""
    run = threading.Thread(target=small_run, args=(data, tmp_path), kwargs={"ffn": "stem"})
    run.start()
    run.join()
    assert_same_run(trained["stem"], tmp_path)


def test_any_folder_can_be_named_and_printed_commands_find_it(data, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    mine = tmp_path / "my data, it's new"
    shutil.copytree(data, mine)
    line = ["train.py", *SMALL, "--max_iters", "1", "--data_dir", "~/my data, it's new"]
    said = command(*line, "--out_dir", "~/my run").stdout
    printed = [shlex.split(text, comments=True) for text in said.split("next:")[1].splitlines()]
    for words in filter(None, printed):
        assert words[0] == "python" and str(tmp_path / "my run") in " ".join(words)
        command(*words[1:])
    said = command("train.py --eval_only --out_dir", "~/my run", "--data_dir", mine).stdout
    assert f"on {mine}" in said
    mixed = ["--data_dir", f"~/my data, it's new=1,{data}=1"]
    assert "not folder=weight" in refused(*line[:-2], *mixed, "--out_dir", "x")
    command("sample.py --max_new_tokens 2 --ckpt", "~/my run/ckpt.pt")
    assert not Path("~").exists()
