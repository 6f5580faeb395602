"""train.py and its settings, inside the process and as a user runs them."""

import copy
import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from conftest import (
    CPU,
    EDIT,
    INHERITED,
    ROOT,
    SHAPE,
    SMALL,
    PowerCut,
    assert_same,
    assert_same_run,
    change_json,
    checkpoint,
    command,
    contents,
    cut_in_step,
    edit_core,
    interrupted,
    losses,
    refused,
    resume,
    small_run,
    user_error,
)
from naive import decoder, tokens
from originals import gradients
from torch.testing import assert_close

import train
from common import UserError, flag
from model import Decoder, ModelConfig
from text import bpe
from text.dataset import read_meta
from text.writer import write_dataset
from training.batches import Data
from training.checkpoints import checkpoint_of, load_checkpoint, load_model
from training.objectives import NextToken
from training.optimizer import Optimizer, schedule
from training.records import Meter, read_run
from training.report import format_figures, model_sizes
from training.settings import PRESETS, STAGES, Settings

FILES = {"ckpt.pt", "best.pt", "metrics.jsonl", "loss.png"}


# --- going on ---


def test_interrupted_and_resumed_equals_uninterrupted(data, tmp_path, monkeypatch):
    """Other settings: test_place.py."""
    monkeypatch.setattr(Meter, "READ_EVERY", 1)  # steps are logged that are made again
    more = dict(table_optimizer="adamw", dtype="float16")
    small_run(data, tmp_path / "whole", **more)
    cut = interrupted(data, tmp_path / "cut", 9, **more)
    assert checkpoint(cut)["step"] == 6
    shutil.copytree(data, tmp_path / "moved")  # which data may be
    resume(cut, data_dir=str(tmp_path / "moved"))
    assert_same_run(cut, tmp_path / "whole")


def stopped(step: int, number: int, work: Callable, *args, **more) -> None:
    """A run gets a signal in a step, and ends."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        cut_in_step(patch, step, do=lambda: signal.raise_signal(number))
        work(*args, **more)
    assert ended.value.code == 128 + number


@pytest.fixture
def validated(monkeypatch):
    """Let one evaluation after the other find the losses that are given."""

    def validated(*losses):
        left = iter(losses)
        monkeypatch.setattr(train, "validate", lambda *_: {"val_loss": next(left)})

    return validated


def test_best_is_the_model_of_the_lowest_validation_loss_also_over_a_crash(
    data, tmp_path, monkeypatch, validated
):
    """The power fails between ckpt.pt and best.pt of the lowest, in step 6."""
    save = train.save_checkpoint

    def fails(path, *args, **state):
        if path.name == "best.pt" and state["step"] == 6:
            raise PowerCut
        save(path, *args, **state)

    validated(1.0, 8.0, 6.0, 7.0, 6.5)  # steps 0, 3, 6; 9, 12
    with monkeypatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(train, "save_checkpoint", fails)
        small_run(data, tmp_path, eval_interval=3)
    model = checkpoint(tmp_path)["model"]
    assert checkpoint(tmp_path, "best.pt")["step"] == 3
    resume(tmp_path)
    best = checkpoint(tmp_path, "best.pt")
    assert best["step"] == 6 and "optimizer" not in best
    assert_same(best["model"], model)


def test_a_resumed_run_makes_the_evaluations_of_an_uninterrupted_one(
    data, tmp_path, validated, capsys
):
    validated(9.0, 6.0, 7.0, 5.0, 4.0)  # steps 0; 6, 12; 13; 16
    stopped(4, signal.SIGINT, small_run, data, tmp_path)
    resume(tmp_path)
    assert checkpoint(tmp_path, "best.pt")["step"] == 6
    resume(tmp_path)  # has nothing to do
    assert "has taken its 12 steps" in capsys.readouterr().out
    of_another = replace(train.resolve_settings(resume=True, out_dir=tmp_path), learning_rate=0.5)
    with user_error("--learning_rate: not with --resume"):  # which the optimizer would not read
        train.train(of_another)
    resume(tmp_path, max_iters=13)
    stopped(16, signal.SIGINT, resume, tmp_path, max_iters=20)
    assert checkpoint_of(tmp_path) == tmp_path / "ckpt.pt"  # of step 16, which was not evaluated
    resume(tmp_path, max_iters=16)  # where it was stopped
    evals = [(record["step"], record["val_loss"]) for record in read_run(tmp_path)["eval"]]
    assert evals == [(0, 9.0), (6, 6.0), (12, 7.0), (13, 5.0), (16, 4.0)]


@pytest.fixture
def stem(trained, tmp_path) -> Path:
    """A copy of the run of STEM."""
    return shutil.copytree(trained["stem"], tmp_path / "stem")


def test_edits_do_not_get_into_the_best_model_of_a_run(stem, capsys, validated):
    assert checkpoint(stem, "best.pt")["step"] == checkpoint(stem)["step"]
    before = (stem / "best.pt").read_bytes()
    ckpt = stem / "ckpt.pt"
    command("edit.py --source Anna --target Björn --prompt Anna --ckpt", ckpt, "--save", ckpt)
    resume(stem)  # has nothing to do
    said = capsys.readouterr().out
    assert "edits cannot be undone" not in said and "val loss inf" not in said
    assert (stem / "best.pt").read_bytes() == before
    elsewhere = shutil.copytree(stem, stem.with_name("elsewhere"))  # where edit.py may save it
    (elsewhere / "metrics.jsonl").unlink()
    resume(elsewhere)
    assert (elsewhere / "ckpt.pt").read_bytes() == ckpt.read_bytes()  # which can be undone
    validated(99.0)  # of another model, which is trained on
    resume(stem, max_iters=checkpoint(stem)["step"] + 1)
    assert "edits cannot be undone" in capsys.readouterr().out
    assert checkpoint(stem, "best.pt")["step"] == checkpoint(stem)["step"]


def test_a_loss_of_another_formula_is_not_the_best_of_a_run(
    stem, tmp_path, monkeypatch, validated, capsys
):
    edit_core(monkeypatch, tmp_path, "stem.py")
    validated(99.0)
    resume(stem, max_iters=checkpoint(stem)["step"] + 1)
    assert "best from here on" in capsys.readouterr().out
    assert checkpoint(stem, "best.pt")["step"] == checkpoint(stem)["step"]


def test_a_run_that_was_stopped_before_its_first_step_resumes_from_there(
    data, tmp_path, monkeypatch
):
    def validate(*_):
        signal.raise_signal(signal.SIGINT)
        return {"val_loss": 9.0}

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(train, "validate", validate)
        small_run(data, tmp_path)
    for _ in range(2):  # the power fails before the next checkpoint
        with monkeypatch.context() as patch, pytest.raises(PowerCut):
            cut_in_step(patch, 2)
            resume(tmp_path)
    assert not (tmp_path / "best.pt").exists()  # nothing was found to be better


def test_a_run_that_goes_on_keeps_its_best_and_names_it(data, tmp_path, validated, capsys):
    """Of a text that is known by heart, the loss wavers near zero: that is no rise."""
    validated(9.0, 5.0, 0.0005, 0.0024, 3.0, 3.5)  # steps 0, 5, 10, 12; 15, 17
    small_run(data, tmp_path, eval_interval=5)
    assert "longer" in capsys.readouterr().out
    resume(tmp_path, max_iters=17)
    assert checkpoint(tmp_path, "best.pt")["step"] == 10
    said = capsys.readouterr().out
    assert "rose from 0.0005 at step 10 to 3.5000" in said
    assert f"sample.py --ckpt {tmp_path}/best.pt" in said and "longer" not in said


def test_a_run_that_gets_better_with_tables_on_disk_has_no_best_pt(stem):
    best = (stem / "best.pt").read_bytes()
    resume(stem, offload="disk")  # has nothing to do
    assert (stem / "best.pt").read_bytes() == best
    resume(stem, max_iters=18, offload="disk")
    assert not (stem / "best.pt").exists()


def test_a_run_that_only_gets_worse_is_told_so(trained, data, tmp_path, validated, capsys):
    validated(1.0, 2.0, 3.0)  # steps 0, 6, 12
    small_run(data, tmp_path, init_from=trained["stem"] / "ckpt.pt", **INHERITED)
    said = capsys.readouterr().out
    assert "rose from 1.0000 at step 0 to 3.0000: no later step is below it" in said
    assert f"{tmp_path}/best.pt has the weights of step 6" in said


def test_an_earlier_run_is_replaced_on_demand_alone(out, trained, data):
    before = contents(out)
    line = f"train.py --out_dir {out} --data_dir {data} "
    for more, named in (
        ("", "--resume goes on with it, --overwrite replaces it"),
        (f"--init_from {trained['stem']}/ckpt.pt", "--overwrite"),
        ("--overwrite --data_dir gone", "gone"),
    ):
        assert named in refused(line + more)
        assert contents(out) == before
    command(line + "--overwrite", *SMALL)
    assert_same_run(out, trained["stem"])
    assert {str(path) for path in contents(out)} == FILES


def no_compiler(device) -> None:
    raise UserError("--compile does not work here")


def test_a_run_is_replaced_once_another_one_has_been_evaluated(stem, data, validated, monkeypatch):
    before = contents(stem)
    validated(math.nan, 9.0, 9.0)
    monkeypatch.setattr(train, "check_compiler", no_compiler)
    for more, said in ((dict(compile=True), "does not work here"), ({}, "init_std")):
        with user_error(said):
            small_run(data, stem, overwrite=True, **more)
        assert contents(stem) == before
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):  # in somebody's layer
        patch.setattr(train.recall, "ask", lambda *_, **__: 1 / 0)
        small_run(data, stem, overwrite=True)
    assert contents(stem) == before
    interrupted(data, stem, 1, overwrite=True)
    assert [str(path) for path in contents(stem)] == ["metrics.jsonl"]


def test_a_run_whose_first_checkpoint_had_no_room_is_started_again(
    trained, data, tmp_path, monkeypatch
):
    def full(*_, **__):
        raise PowerCut

    with monkeypatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(train, "save_checkpoint", full)
        small_run(data, tmp_path)
    small_run(data, tmp_path)  # without --overwrite
    assert_same_run(tmp_path, trained["stem"])
    for name in ("ckpt.pt", "best.pt", "loss.png"):
        (tmp_path / name).unlink()
    with user_error("--overwrite"):  # of a longer run, they do not vanish
        small_run(data, tmp_path)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_saves_a_whole_step_and_the_run_goes_on(name, trained, data, tmp_path, capsys):
    number = getattr(signal, name)
    if signal.getsignal(number) is signal.SIG_IGN:  # as SIGHUP under nohup
        signal.signal(number, signal.SIG_DFL)
    before = signal.getsignal(number)
    stopped(3, number, small_run, data, tmp_path)
    assert checkpoint(tmp_path)["step"] == len(losses(tmp_path)) == 3
    # and the advice works, from a step at which there was no evaluation
    advice = re.search("python .*(train.py --resume .*)", capsys.readouterr().out)
    command(advice[1])
    assert_same_run(tmp_path, trained["stem"])
    assert signal.getsignal(number) == before


# --- numbers ---


@pytest.mark.parametrize(
    ("dtype", "device"),
    # Of other devices, such as the GPU of a Mac, PyTorch's autocast warns or knows nothing.
    [("float32", "meta"), ("bfloat16", "cpu"), ("float16", "cpu")],
)
def test_layers_compute_in_the_precision_of_dtype_and_32_bits_need_no_autocast(dtype, device):
    with torch.device(device):
        model = decoder()
    seen = []
    gate = model.blocks[0].ffn.gate
    gate.register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    NextToken(model, dtype)(*tokens(2, 2, 24))
    assert seen == [getattr(torch, dtype)]


def test_a_step_whose_gradients_overflow_in_float16_changes_nothing():
    model = decoder().train()
    optimizer = Optimizer(model, Settings(model=model.config), "float16")
    objective = NextToken(model, "float16")
    states = []
    scale = optimizer.scaler.factor
    for factor in (1.0, torch.inf, 1.0):
        loss = factor * objective(*tokens(2, 2, 24))
        optimizer.scaler.scale(loss).backward()
        optimizer.step(fraction=1.0)
        state = {**optimizer.state_dict(), "scaler": None, "model": dict(model.state_dict())}
        states.append(copy.deepcopy(state))
    assert_same(*states[:2])  # weights, rows, states of the optimizer
    assert optimizer.scaler.factor == scale / 2
    for name in ("tables.weight.1", "blocks.0.ffn.gate.weight"):
        further = states[2]["model"][name]
        assert further.isfinite().all() and not torch.equal(further, states[1]["model"][name])


def test_learning_rate_warms_up_and_decays():
    """To zero in a line: test_stages.py."""
    rate = [schedule(step, Settings(max_iters=100)) for step in range(100)]
    assert [rate[0], rate[9]] == pytest.approx([0.1, 1.0])
    assert rate[55] == pytest.approx(0.1 + 0.9 * 0.5)  # half-way down
    assert rate[99] == pytest.approx(0.1, abs=1e-3)


def test_a_path_is_a_path_again_when_a_run_resumes():
    @dataclass
    class Mine(Settings):
        teacher: Path | None = flag(None, "a checkpoint")

    flat = Mine(teacher=Path("a/b.pt")).flat()
    assert isinstance(flat["teacher"], str)
    assert Mine.from_flat(flat).teacher == Path("a/b.pt")


# MiniMind's published sizes, and Embformer's "0.1B".
MILLIONS = {"minimind-26m": 26, "minimind-64m": 64, "minimind-104m": 104, "embformer-104m": 123}


@pytest.mark.parametrize("preset", MILLIONS)
def test_presets_have_their_size(preset):
    settings = Settings.from_flat({"ffn": "dense", **PRESETS[preset]})
    with torch.device("meta"):
        model = Decoder(settings.model)
    assert model_sizes(model)["total"] / 1e6 == pytest.approx(MILLIONS[preset], rel=0.01)


def test_weights_that_are_not_numbers_never_reach_a_checkpoint(data, tmp_path, monkeypatch):
    rates = {11: math.inf}  # in the step before the last evaluation, whose own loss is fine
    monkeypatch.setattr(train, "schedule", lambda step, _: rates.get(step, 1.0))
    with user_error("nan at step 12"):
        small_run(data, tmp_path)
    assert checkpoint(tmp_path)["step"] == 6


@pytest.mark.parametrize("more", [dict(table_rate=0.3), dict(table_optimizer="adamw")])
@pytest.mark.parametrize("ffn", ["stem", "dense"])
def test_steps_equal_those_of_pytorchs_optimizers(ffn, more):
    """AdamW for the backbone and RMSprop for rows, those of tables at a rate of their own, or AdamW
    for all, clipped together; linear layers alone decay."""
    model = decoder(ffn=ffn).train()
    options = dict(table_state="number", weight_decay=0.2, grad_clip=0.5, **more)
    settings = Settings(model=model.config, learning_rate=0.1, **options)
    by_row = settings.table_optimizer == "rmsprop"
    theirs = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    whole, rows = [], []
    for name, weight in theirs.items():
        is_rows = name.startswith(("tables.", "wte."))
        group = {"params": weight, "rate": 1.0, "weight_decay": 0.0}
        if name.startswith("tables."):
            group["rate"] = settings.table_rate
        if weight.dim() == 2 and not is_rows:
            group["weight_decay"] = 0.2
        (rows if is_rows and by_row else whole).append(group)
    optimizers = {torch.optim.AdamW(whole, betas=(0.9, 0.95)): 0.0}
    if by_row:  # PyTorch's RMSprop does not correct for the beginning
        optimizers[torch.optim.RMSprop(rows, alpha=0.95)] = 0.95
    optimizer = Optimizer(model, settings)
    for step, (lr, size) in enumerate(((1.0, 1.0), (0.5, 1.0), (0.1, 0.01)), 1):
        ids = tokens(2, 8, seed=step)
        (size * model(ids, ids)[1]).backward()  # the last one is too small to be clipped
        grads = {name: weight.grad for name, weight in model.named_parameters()}
        if by_row:
            grads = gradients(model)
        for name, grad in grads.items():
            theirs[name].grad = grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        for each, uncorrected in optimizers.items():
            correction = (1 - uncorrected**step) ** 0.5
            for group in each.param_groups:
                group.update(lr=0.1 * lr * group["rate"] * correction, eps=1e-8 * correction)
            each.step()
        assert_close(optimizer.step(fraction=lr), norm)
        mine = dict(model.named_parameters())
        assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


# --- flags and Python ---


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--device_batch_size 3", "--device_batch_size 3"),
        ("--seed 4294967296", "--seed 4294967296 must be 0 or more, and fit 32 bits"),
        ("--out_dir " + "x" * 300, "xxx"),
        ("--offload disk --table_optimizer adamw", "--table_optimizer adamw"),
        ("--table_rate 0 --table_optimizer adamw", "--table_rate 1"),
        ("--preset embformer-104m --stem_layers all", "with --ffn embformer: --stem_layers"),
        ("--ffn embformer --d_ff 64", "with --ffn embformer: --d_ff 64"),
        ("--ffn dense --table_std 1", "with --ffn dense: --table_std 1"),
        ("--n_layer 2 --attention full,full,window:8", "more kinds than there are layers"),
        (  # an abbreviation
            "--max_iter 3",
            "unrecognized with --ffn stem: --max_iter 3; did you mean --max_iters?",
        ),
        ("--data_dir {data}/train.bin", "name its folder, {data}"),
        ("--lr=1", "--lr=1; did you mean --learning_rate?"),
        ("--bs 1", "did you mean --batch_size?"),
        ("--wd 1", "did you mean --weight_decay?"),
        ("--determin", "--determin; did you mean --deterministic?"),
        ("--eval_iters 20", "did you mean --eval_tokens?"),
        ("--warmup_iters=5", "did you mean --warmup?"),
        ("max_iters=3", "did you mean --max_iters?"),
        ("--ffn stem s", "s; a value follows the name of its flag"),
        ("--compile=False", "--compile/--no-compile: takes no value, not 'False'"),
        ("{data}", "{data}; a value follows the name of its flag"),
        ("--resume --n_layer 4 --out_dir {stem}", "--n_layer"),
        ("--resume --max_iters 3 --out_dir {stem}", "already at step 12"),
        ("--eval_only --seed 3 --out_dir {stem}", "--seed"),
        ("--eval_only --out_dir {dense} --data_dir {other}", "{other} was made with a different"),
        ("--init_from {dense}/ckpt.pt --ffn stem", "--ffn"),
        ("--stage sft", "--init_from"),
        ("--stage sft --init_from {stem}/ckpt.pt", "holds text, this --stage reads chat"),
        ("--stage sft --init_from {stem}/ckpt.pt --data_dir {data},{other}", "are not mixed"),
        ("--stage midtrain --init_from {stem}/ckpt.pt --n_embd 64", "--n_embd"),
        (
            "--stage midtrain --init_from {stem}/ckpt.pt --data_dir {other}",
            "{other} was made with a different",
        ),
        ("--stage context --init_from {stem}/ckpt.pt --block_size 32", "--block_size"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(trained, data, tmp_path, given, named):
    other = tmp_path / "other"
    documents = [(split, "Anna sees Anna. " * 9) for split in ("train", "val")]
    write_dataset(other, documents, bpe.train(["Anna"] * 9, 260), corpus="files")
    folders = {**trained, "other": other, "data": data}
    before = contents(trained["stem"])
    # A later --data_dir replaces an earlier one.
    line = f"train.py --data_dir {data} " + given.format(**folders)
    if "--resume" in given or "--eval_only" in given:
        line = "train.py " + given.format(**folders)
    assert named.format(**folders) in refused(line)
    assert [*tmp_path.iterdir()] == [other]  # nor a folder for nothing
    assert contents(trained["stem"]) == before


def test_settings_without_arguments_are_those_of_the_command(data, tmp_path):
    folder = shutil.copytree(data, tmp_path / "countries")
    change_json(folder / "meta.json", corpus="countries")
    assert train.resolve_settings(data_dir=str(folder)) == Settings(str(folder))


def test_eval_only_prints_the_figures_of_the_run_and_writes_nothing(trained, data, tmp_path):
    other = shutil.copytree(data, tmp_path / "other")
    (other / "train.bin").unlink()  # which is not read
    out = trained["embformer"]
    before = contents(out)
    given = f"--out_dir {out} --data_dir {data},{other}/ --eval_tokens 256"
    line = f"train.py --eval_only {given} --device_batch_size 3 --offload disk"
    last = read_run(out)["eval"][-1]
    n = read_meta(data)["val"]["tokens"] - 1  # that can be predicted
    of_all = f"(256 of {n:,} held-out tokens, in windows of {SHAPE['block_size']}, in float32)"
    for said, folder in zip(command(line).stdout.splitlines(), (data, other), strict=True):
        assert f"ckpt.pt on {folder}" in said and f"val loss {last['val_loss']:.5g}" in said
        assert f"val loss per byte {last['val_loss_per_byte']:.5g} {of_all}" in said
    assert contents(out) == before


class Mine(NextToken):
    """It may leave tokens out."""

    def begin(self, data, saved):
        assert self.settings.stage == "mine" and self.settings.max_iters == 1


def test_a_stage_of_ones_own_says_what_its_losses_are(trained, data, tmp_path, monkeypatch):
    """Not of bytes, and not the one that --eval_only measures."""
    stage = replace(STAGES["midtrain"], objective=Mine)
    monkeypatch.setitem(STAGES, "mine", stage)
    out = tmp_path / "out"
    small_run(data, out, stage="mine", init_from=trained["stem"], max_iters=1, **INHERITED)
    assert "val_loss_per_byte" not in read_run(out)["eval"][-1]
    said = command(f"train.py --eval_only --out_dir {out} --data_dir {data}").stdout
    assert "not of --stage mine" in said and "val loss per byte" in said
    begun = dict(stage="mine", max_iters=1)
    with user_error("--stage mine starts from a trained model"):
        small_run(data, tmp_path / "new", **begun)
    monkeypatch.setitem(STAGES, "mine", replace(stage, continues=False))
    small_run(data, tmp_path / "new", **begun)


def test_state_of_ones_own_that_no_command_could_read_is_not_written(data, tmp_path, monkeypatch):
    monkeypatch.setattr(NextToken, "state_dict", lambda objective: {"mean": 1.0})
    with pytest.raises(ValueError, match=f"no command could read {tmp_path}/ckpt.pt: .*objective"):
        small_run(data, tmp_path)
    assert not (tmp_path / "ckpt.pt").exists()


def test_figures_are_shown_in_words_but_for_folders():
    figures = {"val_loss/data/my_text": 1.5, "tok_per_s": 6800.4}
    assert format_figures(figures) == "val loss/data/my_text 1.5, tok per s 6,800"


def test_eval_only_reads_as_much_whatever_the_run_read_and_shorter_windows(data, tmp_path):
    more = dict(ffn="dense", max_iters=1, eval_tokens=64, doc_mask=True)
    out = small_run(data, tmp_path / "out", **more)
    unmasked = small_run(data, tmp_path / "unmasked", **{**more, "doc_mask": False})
    assert losses(out) != losses(unmasked)
    model, encoding, _ = load_model(out / "ckpt.pt", CPU)
    text = Data(str(data), "text", 8, seed=0, total=0).val[str(data)]
    ids, targets = text.sequences(range(text.n_sequence))
    _, loss = model(ids, targets, documents=(ids == encoding.eot_token).cumsum(1))
    line = f"train.py --eval_only --out_dir {out} --block_size"
    said = command(line, 8).stdout
    assert f"val loss {loss.item():.5g}," in said and "within documents)" in said
    assert "reads 32 tokens at most" in refused(line, 33)


def test_the_code_of_the_pages_runs(data, tmp_path, add_relative):
    """Each passage alone. What is a file of relatives/ is trained, moved to disk, read and edited,
    also if its tables are of another shape."""
    pages = ("README.md", "CONTRIBUTING.md")
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    text = text.replace("range(100)", "range(2)").replace("max_iters=100", "max_iters=2")
    shutil.copytree(data, tmp_path / "data/countries")
    for block in re.findall("```python\n(.*?)```", text, re.DOTALL):
        exec(block, {"__name__": "a_script"})
        file = re.match(r"# relatives/(\w+)\.py", block)
        if file:
            add_relative(file[1], block)
    assert load_checkpoint("out/tiny/mine.pt")["data"]  # by which edit.py knows the countries
    assert "in relatives/: scaled, shared;" in " ".join(command("train.py -h").stdout.split())
    for name in ("scaled", "shared"):
        out = small_run(data, tmp_path / name, ffn=name, learning_rate=0.01)
        assert losses(out)[-1] < 0.8 * losses(out)[0]
        first, encoding, _ = load_model(out / "ckpt.pt", CPU)
        resume(out, max_iters=13, offload="disk")
        command("sample.py --offload disk --max_new_tokens 2 --ckpt", out)
        model, _, _ = load_model(out / "ckpt.pt", CPU)
        assert not torch.equal(model.tables.weight[0], first.tables.weight[0])
    assert len(model.tables.weight[0]) == -(-encoding.n_vocab // 8)
    command("edit.py --ckpt scaled/ckpt.pt --save edited.pt", *EDIT)


def test_a_run_in_a_thread_is_that_in_the_main_thread(data, trained, tmp_path):
    """As in a notebook's server."""
    run = threading.Thread(target=small_run, args=(data, tmp_path), kwargs={"ffn": "stem"})
    run.start()
    run.join()
    assert_same_run(trained["stem"], tmp_path)


def test_any_folder_can_be_named_and_printed_commands_find_it(data, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "3")  # of a job whose processes torchrun did not start
    monkeypatch.setenv("RANK", "1")
    mine = tmp_path / "my data, it's new"
    shutil.copytree(data, mine)
    line = ["train.py", *SMALL, "--max_iters", "1", "--data_dir", "~/my data, it's new"]
    said = command(*line, "--out_dir", "~/my run").stdout
    printed = [shlex.split(text, comments=True) for text in said.split("next:")[1].splitlines()]
    for words in filter(None, printed):
        assert words[0] == "python" and str(tmp_path / "my run") in " ".join(words)
        command(*words[1:])
    untrained = [*line, "--max_iters", "0", "--out_dir", tmp_path / "untrained"]
    assert "--resume" not in command(*untrained).stdout
    command("sample.py --max_new_tokens 2 --ckpt", "~/my run/ckpt.pt")
    assert not Path("~").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_the_name_of_a_folder_may_be_no_utf_8(data, tmp_path):
    out = small_run(data, tmp_path / os.fsdecode(b"\xff"), max_iters=3, eval_interval=3)
    resume(out, max_iters=12, offload="disk")
    assert load_model(out, CPU, offload="disk")[2]["step"] == 12


def test_all_that_consists_of_rows_has_a_second_moment_per_number():
    """A variant of Embformer, too."""

    class Variant(ModelConfig):
        embedding_only = True

    assert Settings(model=Variant()).table_state == "number"
    assert Settings().table_state == "row"
