"""train.py and its settings, inside the process and as a user runs them."""

import copy
import json
import math
import re
import shutil
import signal
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import (
    CPU,
    PowerCut,
    assert_same,
    assert_same_run,
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
from text.dataset import read_tokenizer
from training.checkpoints import load_model
from training.objectives import NextToken
from training.optimizer import Optimizer, schedule
from training.records import read_run
from training.settings import PRESETS, Settings


def test_a_run_leaves_what_it_promises(trained):
    for ffn, folder in trained.items():
        records = read_run(folder)
        assert [record["step"] for record in records["step"]] == list(range(1, 13))
        assert [record["step"] for record in records["eval"]] == [0, 6, 12]
        assert records["eval"][-1]["val_loss"] < records["eval"][0]["val_loss"]
        assert checkpoint(folder)["config"]["ffn"] == ffn


def test_validation_loss_per_byte_is_the_total_over_the_bytes(data, tmp_path):
    last = read_run(small_run(data, tmp_path, max_iters=1, eval_tokens=10**6))["eval"][-1]
    meta = json.loads((data / "meta.json").read_text())
    encoding = read_tokenizer(data, meta)
    ids = np.fromfile(data / "val.bin", meta["dtype"])
    predicted = ids[1 : 1 + (len(ids) - 1) // 32 * 32].tolist()  # whole windows of block_size 32
    text = b"".join(encoding.decode_tokens_bytes([i for i in predicted if i != 0]))
    ratio = last["val_loss_per_byte"] / last["val_loss"]
    assert ratio == pytest.approx(len(predicted) / len(text))


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


def test_a_new_run_keeps_the_earlier_ones(data, tmp_path):
    out = tmp_path / "out"
    earlier = []
    for offload in ("disk", "none", "none"):
        small_run(data, out, max_iters=2, offload=offload)
        assert (out / "best.pt").exists() == (offload == "none")
        earlier.append({path: raw for path, raw in contents(out).items() if "run" not in str(path)})
    assert contents(out / "run1") == earlier[0]
    assert contents(out / "run2") == earlier[1]


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


def test_a_finished_run_goes_on_by_the_schedule_of_more_steps(trained, data, tmp_path):
    out = small_run(data, tmp_path, max_iters=6)
    resume(out, max_iters=12)
    longer, whole = (read_run(folder)["step"] for folder in (out, trained["stem"]))
    assert [step["lr"] for step in longer[6:]] == [step["lr"] for step in whole[6:]]
    assert longer[5]["lr"] < longer[6]["lr"]  # a cosine that had ended rises again


# --- numbers ---


def test_seeds_reproduce_and_accumulation_equals_the_whole_batch(trained, data, tmp_path):
    expected = losses(trained["stem"])
    assert losses(small_run(data, tmp_path)) == expected
    assert losses(small_run(data, tmp_path, seed=1, max_iters=2)) != expected[:2]
    parts = losses(small_run(data, tmp_path, device_batch_size=1))
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
        loss, _ = objective(*torch.randint(40, (2, 2, 24)))
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


@pytest.mark.parametrize("table_rate", [0.3, 0.0])  # 0: rows stay as they were drawn
def test_steps_equal_those_of_pytorchs_optimizers(table_rate):
    """AdamW for the backbone and RMSprop for rows, those of tables at a rate of their own, clipped
    together; linear layers alone decay."""
    torch.manual_seed(0)
    model = Decoder(ModelConfig(20, 8, 2, 2, 16))
    theirs = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    rows = [p for name, p in theirs.items() if name.startswith("tables.")]
    norms = [p for p in theirs.values() if p.dim() == 1]
    linear = [p for name, p in theirs.items() if "blocks" in name and p.dim() == 2]
    linear.append(theirs["head.weight"])
    groups = [{"params": linear}, {"params": norms, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.2)
    embedding = {"params": [theirs["wte.weight.0"]]}
    rmsprop = torch.optim.RMSprop([embedding, {"params": rows}], alpha=0.95)
    more = dict(table_state="number", table_rate=table_rate)
    settings = Settings(learning_rate=0.1, weight_decay=0.2, grad_clip=0.5, **more)
    optimizer = Optimizer(model, settings)
    for step, lr in enumerate((1.0, 0.5, 0.1), 1):
        ids = torch.randint(20, (2, 8))
        model(ids, ids)[1].backward()
        for name, grad in gradients(model).items():
            theirs[name].grad = grad.clone()
        for p in model.parameters():
            p.grad = None
        model(ids, ids)[1].backward()  # once more: gradients of rows were taken
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = 0.1 * lr
        # PyTorch's RMSprop does not correct for the beginning.
        correction = (1 - 0.95**step) ** 0.5
        for group, rate in zip(rmsprop.param_groups, (1.0, table_rate), strict=True):
            group.update(lr=0.1 * lr * rate * correction, eps=1e-8 * correction)
        adamw.step()
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
    expected = plain(second, second)[0]
    torch.testing.assert_close(masked(both, targets)[0], expected)
    assert not torch.isclose(plain(both, targets)[0], expected, atol=1e-4)


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
        ("--ffn moe --compile", "--compile"),
        ("--offload disk --table_optimizer adamw", "--table_optimizer adamw"),
        ("--table_rate 0 --table_optimizer adamw", "--table_rate 1"),
        ("--ffn dense --stem_layers all", "--stem_layers has no effect with --ffn dense"),
        ("--ffn dense --offload disk", "--offload has no effect with --ffn dense"),
        ("--embformer_act silu", "--embformer_act has no effect with --ffn stem"),
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
    assert len(model.tables.weight[0]) == len(first) == -(-model.config.vocab_size // 8)
    assert saved["step"] == 6 and not torch.equal(model.tables.weight[0], first)
    with pytest.raises(RuntimeError, match="size mismatch"):  # who opens it must bring the class
        load_model(tmp_path / "ckpt.pt", CPU)
