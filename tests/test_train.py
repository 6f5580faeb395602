"""train.py and its settings, inside the process and as a user runs them."""

import copy
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, SMALL, command

import train as train_module
from common import UserError, run
from model import Decoder, ModelConfig
from tables.tables import ResidentTables
from training import questions
from training.batches import Windows, read_tokenizer
from training.checkpoints import load_model
from training.objectives import NextToken
from training.optimizer import Optimizer, schedule
from training.records import read_run
from training.settings import PRESETS, Settings, parse_args, resolve_settings


def arguments(monkeypatch, data, out, *more):
    argv = ["train.py", "--data_dir", data, "--out_dir", out, *SMALL, *more]
    monkeypatch.setattr(sys, "argv", [str(part) for part in argv])
    return resolve_settings(**parse_args(""))


def losses(folder):
    return [record["train_loss"] for record in read_run(folder)["step"]]


def checkpoint(folder):
    return torch.load(folder / "ckpt.pt", weights_only=True)


def assert_same(a, b):
    """Nested checkpoints are equal to the bit."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def crash_in_step(monkeypatch, number):
    """A power cut in training step `number`."""
    calls, forward = [], Decoder.hidden

    def crash(self, *args, **kwargs):
        calls.append(self.training)
        if sum(calls) == number:
            raise RuntimeError("power cut")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Decoder, "hidden", crash)


def test_a_run_leaves_what_it_promises(trained):
    for ffn, folder in trained.items():
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
        records = read_run(folder)
        assert [record["step"] for record in records["step"]] == list(range(1, 13))
        assert [record["step"] for record in records["eval"]] == [0, 6, 12]
        assert records["eval"][-1]["val_loss"] < records["eval"][0]["val_loss"]
        assert checkpoint(folder)["config"]["ffn"] == ffn
        assert not list(folder.glob("*.tmp"))


def test_validation_loss_per_byte_is_the_total_over_the_bytes(trained, data):
    meta = json.loads((data / "meta.json").read_text())
    last = read_run(trained["stem"])["eval"][-1]
    encoding = read_tokenizer(data, meta)
    ids = np.fromfile(data / "val.bin", meta["dtype"])
    predicted = ids[1 : 1 + (len(ids) - 1) // 32 * 32].tolist()  # whole windows of block_size 32
    text = b"".join(encoding.decode_tokens_bytes([i for i in predicted if i != 0]))
    ratio = last["val_loss_per_byte"] / last["val_loss"]
    assert ratio == pytest.approx(len(predicted) / len(text))


@pytest.mark.parametrize("more", [("--dropout", 0.2), ("--table_optimizer", "adamw")])
def test_interrupted_and_resumed_equals_uninterrupted(data, tmp_path, monkeypatch, more):
    train_module.train(arguments(monkeypatch, data, tmp_path / "whole", *more))

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        crash_in_step(patch, 9)
        train_module.train(arguments(monkeypatch, data, tmp_path / "cut", *more))
    assert checkpoint(tmp_path / "cut")["step"] == 6
    shutil.copytree(data, tmp_path / "moved")  # which data may be
    command("train.py", "--resume", "--out_dir", "cut", "--data_dir", "moved", cwd=tmp_path)

    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    evals = [read_run(tmp_path / name)["eval"] for name in ("cut", "whole")]
    assert evals[0] == evals[1]
    whole, cut = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "cut")
    for part in ("model", "optimizer", "step", "config", "tokenizer", "best"):
        assert_same(whole[part], cut[part])


def test_best_is_the_model_of_the_lowest_validation_loss_also_over_a_crash(
    data, tmp_path, monkeypatch, capsys
):
    """Losses are made up, their minimum is at step 6 of 12; the power fails between ckpt.pt and
    best.pt there, and again, with best.pt written, before step 9."""
    made_up = {0: 1.0, 3: 8.0, 6: 6.0, 9: 7.0, 12: 6.0}
    real, save = train_module.validate, train_module.save_checkpoint

    def validate(*args):
        lines = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
        step = max(json.loads(line).get("step", 0) for line in lines)
        return {**real(*args), "val_loss": made_up[step]}

    def fails(path, *args, **state):
        if path.name == "best.pt" and state["step"] == 6:
            raise RuntimeError("power cut")
        save(path, *args, **state)

    monkeypatch.setattr(train_module, "validate", validate)
    settings = arguments(monkeypatch, data, tmp_path / "out", "--eval_interval", "3")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(train_module, "save_checkpoint", fails)
        train_module.train(settings)
    best = torch.load(tmp_path / "out/best.pt", weights_only=True)
    assert best["step"] == 3 and checkpoint(tmp_path / "out")["step"] == 6
    model = checkpoint(tmp_path / "out")["model"]
    train_module.train(resolve_settings(resume=True, out_dir=tmp_path / "out"))
    assert "best.pt (val loss 6.0000, step 6)" in capsys.readouterr().out
    best = torch.load(tmp_path / "out/best.pt", weights_only=True)
    assert best["step"] == 6 and "optimizer" not in best
    assert_same(best["model"], model)
    assert checkpoint(tmp_path / "out")["best"] == (6.0, 6)


def test_a_new_run_keeps_the_earlier_one_with_best_if_tables_are_not_on_disk(
    data, tmp_path, monkeypatch, capsys
):
    on_disk = ("--max_iters", "2", "--offload", "disk")
    train_module.train(arguments(monkeypatch, data, tmp_path, *on_disk))
    assert not (tmp_path / "best.pt").exists()
    train_module.train(arguments(monkeypatch, data, tmp_path, "--max_iters", "2"))
    assert (tmp_path / "best.pt").exists()
    train_module.train(arguments(monkeypatch, data, tmp_path, "--max_iters", "2"))
    assert {"best.pt", "ckpt.pt", "metrics.jsonl", "loss.png"} == {
        path.name for path in (tmp_path / "run2").iterdir()
    }
    assert len(losses(tmp_path)) == len(losses(tmp_path / "run2")) == 2
    assert f"kept the run that was in {tmp_path} as {tmp_path}/run2" in capsys.readouterr().out


def test_resuming_in_smaller_parts_sees_the_same_batches(data, tmp_path, monkeypatch):
    train_module.train(arguments(monkeypatch, data, tmp_path / "whole"))
    seen, row_of = [], Windows.row

    def row(self, index):
        if self.seed is not None:  # of training
            seen.append(index)
        return row_of(self, index)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        crash_in_step(patch, 7)
        train_module.train(arguments(monkeypatch, data, tmp_path / "cut"))
    given = dict(resume=True, out_dir=tmp_path / "cut")
    with pytest.raises(UserError, match="--device_batch_size 3 must divide --batch_size 4"):
        resolve_settings(**given, device_batch_size=3)
    monkeypatch.setattr(Windows, "row", row)
    train_module.train(resolve_settings(**given, device_batch_size=1))
    assert seen == list(range(6 * 4, 12 * 4))
    assert checkpoint(tmp_path / "cut")["args"]["device_batch_size"] == 1
    parts, whole = losses(tmp_path / "cut"), losses(tmp_path / "whole")
    assert parts[:6] == whole[:6]
    assert parts[6:] == pytest.approx(whole[6:], rel=2e-3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_whole_step_and_the_run_goes_on(number, data, tmp_path):
    args = [*SMALL, "--max_iters", "100000", "--data_dir", str(data), "--out_dir", "out"]
    output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    args = [sys.executable, str(ROOT / "train.py"), *args]
    process = subprocess.Popen(args, cwd=tmp_path, **output)
    metrics = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count('"step", "step"') > 3:
            break
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in said and "error" not in said
    assert "go on with: python train.py --resume --out_dir out" in said
    stopped = checkpoint(tmp_path / "out")
    assert stopped["step"] == len(losses(tmp_path / "out"))

    # and the advice works, from a step at which there was no evaluation
    more = ("train.py", "--resume", "--out_dir", "out", "--max_iters")
    command(*more, stopped["step"] + 3, cwd=tmp_path)
    assert len(losses(tmp_path / "out")) == stopped["step"] + 3
    assert "is of step" in command(*more, 1, cwd=tmp_path, fails=True).stderr


def test_a_finished_run_goes_on_by_the_schedule_of_more_steps(trained, data, tmp_path, monkeypatch):
    out = tmp_path / "out"
    train_module.train(arguments(monkeypatch, data, out, "--max_iters", 6))
    train_module.train(resolve_settings(resume=True, out_dir=out, max_iters=12))
    longer, whole = (read_run(folder)["step"] for folder in (out, trained["stem"]))
    assert [step["lr"] for step in longer[6:]] == [step["lr"] for step in whole[6:]]
    assert longer[5]["lr"] < longer[6]["lr"]  # a cosine that had ended rises again

    # Given from the beginning and again, it changes nothing.
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        crash_in_step(patch, 7)
        train_module.train(arguments(monkeypatch, data, out))
    train_module.train(resolve_settings(resume=True, out_dir=out, max_iters=12))
    assert losses(out) == losses(trained["stem"])


def test_seeds_reproduce_and_accumulation_equals_the_whole_batch(
    trained, data, tmp_path, monkeypatch
):
    def run_with(*more):
        train_module.train(arguments(monkeypatch, data, tmp_path / "out", *more))
        return losses(tmp_path / "out")

    assert run_with() == losses(trained["stem"])
    assert run_with("--seed", "1") != losses(trained["stem"])
    parts = run_with("--device_batch_size", "1")
    assert parts == pytest.approx(losses(trained["stem"]), rel=2e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_train_float32_weights(dtype, trained, data, tmp_path, monkeypatch):
    out, types = tmp_path / "out", set()
    attention = F.scaled_dot_product_attention
    noted = lambda q, *more, **how: (types.add(q.dtype), attention(q, *more, **how))[1]  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    train_module.train(arguments(monkeypatch, data, out, "--dtype", dtype))
    assert losses(out) == pytest.approx(losses(trained["stem"]), rel=5e-3)
    assert losses(out) != losses(trained["stem"])
    assert {weight.dtype for weight in checkpoint(out)["model"].values()} == {torch.float32}
    assert types == {torch.float32}  # a CPU's attention, which is slow in 16 bits


def test_a_step_whose_gradients_overflow_in_float16_changes_nothing():
    torch.manual_seed(0)
    model = Decoder(ModelConfig(40, 24, 3, 2, 32, ffn="stem", stem_layers="all"))
    optimizer = Optimizer(model, Settings(max_iters=9), "float16")

    def step(overflow=False):
        loss, _ = NextToken(model, torch.device("cpu"), "float16")(*torch.randint(40, (2, 2, 24)))
        optimizer.scaler.scale(loss).backward()
        if overflow:
            model.tables.reads[0][1][1].grad[0, 0] = torch.inf  # of a row in the second table
        optimizer.step(1.0)
        state = copy.deepcopy(optimizer.state_dict() | {"model": dict(model.state_dict())})
        return state.pop("scaler")["scale"], state

    (first, before), (second, after), (third, further) = step(), step(overflow=True), step()
    assert (first, second, third) == (2.0**16, 2.0**15, 2.0**15)
    assert_same(before, after)  # weights, rows, moments, counts
    for name in ("tables.weight.1", "blocks.0.ffn.gate.weight"):
        assert further["model"][name].isfinite().all()
        assert not torch.equal(further["model"][name], after["model"][name])


def test_a_resumed_run_in_float16_goes_on_with_its_scale(data, tmp_path, monkeypatch):
    def run(*more):
        train_module.train(arguments(monkeypatch, data, tmp_path / "out", *more))
        return checkpoint(tmp_path / "out")

    whole = run("--dtype", "float16")
    assert whole["optimizer"]["scaler"]["_growth_tracker"] == 12  # steps without overflow
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        crash_in_step(patch, 7)
        run("--dtype", "float16")
    train_module.train(resolve_settings(resume=True, out_dir=tmp_path / "out"))
    assert_same(*(each["optimizer"] for each in (whole, checkpoint(tmp_path / "out"))))


def test_auto_is_what_the_gpu_multiplies_itself(monkeypatch):
    for native, dtype in ((True, "bfloat16"), (False, "float16")):
        supported = partial(
            lambda native, including_emulation=True: including_emulation or native, native
        )
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
        assert train_module.precision("auto", torch.device("cuda")) == dtype
    assert train_module.precision("auto", torch.device("cpu")) == "float32"
    assert train_module.precision("bfloat16", torch.device("cpu")) == "bfloat16"


def test_experts_are_not_compiled():
    for ffn in ("moe", "hash_moe"):
        with pytest.raises(UserError, match=f"--compile cannot .* of {ffn}"):
            Settings(compile=True, model=ModelConfig(ffn=ffn))


def test_learning_rate_warms_up_and_decays():
    rate = [schedule(step, Settings(max_iters=100)) for step in range(100)]
    assert rate[0] == pytest.approx(0.1) and rate[9] == pytest.approx(1.0)
    assert rate[55] == pytest.approx(0.1 + 0.9 * 0.5)  # half-way down
    assert rate[99] == pytest.approx(0.1, abs=1e-3)
    linear = Settings(max_iters=100, schedule="linear")
    line = [schedule(step, linear) for step in range(10, 100)]
    assert line[45] == pytest.approx(0.1 + 0.9 * 0.5)
    steps = [a - b for a, b in pairwise(line)]
    assert steps == pytest.approx([0.01] * 89)


@pytest.mark.parametrize(
    ("preset", "ffn", "millions"),
    [  # MiniMind's published sizes, and Embformer's "0.1B"
        ("minimind-26m", "dense", 26),
        ("minimind-64m", "dense", 64),
        ("minimind-104m", "dense", 104),
        ("embformer-104m", "embformer", 123),
    ],
)
def test_presets_have_their_size(preset, ffn, millions):
    names = ModelConfig.__dataclass_fields__
    shape = {name: value for name, value in PRESETS[preset].items() if name in names}
    with torch.device("meta"):
        model = Decoder(ModelConfig(**{**shape, "ffn": ffn}))
    assert model.sizes()["total"] / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--data_dir gone", "prepare.py --out_dir gone"),
        ("--n_embd 33", "n_embd=33"),
        ("--stem_layers 7", "stem_layers='7'"),
        ("--block_size 100000", "--block_size 100000"),
        ("--device_batch_size 3", "--device_batch_size 3"),
        ("--device_batch_size 0", "--device_batch_size 0"),
        ("--learning_rate -1", "--learning_rate -1.0 must be a positive number"),
        ("--beta1 0.99", "--beta1 0.99"),
        ("--ffn embformer --no-tie_head", "tie_head"),
        ("--ffn dense --stem_layers all", "--stem_layers changes nothing with --ffn dense"),
        ("--ffn dense --offload disk", "--offload changes nothing with --ffn dense"),
        ("--embformer_act silu", "--embformer_act changes nothing with --ffn stem"),
        ("--ffn embformer --d_ff 64", "--d_ff changes nothing with --ffn embformer"),
        ("--resume", "no checkpoint at"),
        ("--device warp", "--device warp"),
        ("--out_dir /dev/null/x", "cannot write /dev/null/x"),
    ],
)
def test_bad_flags_are_one_clear_line(data, tmp_path, monkeypatch, capsys, flags, says):
    with pytest.raises(SystemExit) as stopped:
        if flags == "--resume":
            monkeypatch.setattr(sys, "argv", ["train.py", flags, "--out_dir", str(tmp_path)])
            run(train_module.main)
        settings = partial(arguments, monkeypatch, data, tmp_path / "out", *flags.split())
        run(lambda: train_module.train(settings()))
    assert str(stopped.value).startswith("error: ") and says in str(stopped.value)
    assert "\n" not in str(stopped.value)
    assert not (tmp_path / "out" / "ckpt.pt").exists()


def test_training_from_python_needs_no_command_line(data, tmp_path):
    model = ModelConfig(block_size=16, n_layer=2, n_head=2, n_embd=16, stem_layers="all")
    settings = Settings(str(data), tmp_path / "run", max_iters=3, eval_interval=3, model=model)
    train_module.train(settings)
    assert read_run(tmp_path / "run")["step"][-1]["step"] == 3
    flat = settings.flat()
    assert Settings.of(flat) == settings
    own = resolve_settings(data_dir=str(data), ffn="scaled", d_ff=8, offload="disk")
    assert own.offload == "disk"  # who adds a kind of FFN knows which flags it heeds
    del flat["table_std"]  # a checkpoint that is older than a setting has its default
    assert Settings.of(flat) == settings


def test_eval_only_prints_the_figures_of_the_run_and_writes_nothing(
    trained, data, tmp_path, monkeypatch, capsys
):
    other = shutil.copytree(data, tmp_path / "other")  # the same text as another corpus
    meta = json.loads((other / "meta.json").read_text())
    (other / "meta.json").write_text(json.dumps({**meta, "corpus": "countries"}))
    monkeypatch.setattr(questions, "fact_recall", lambda model, *_: 0.5 - model.training)
    for ffn, flags in (("dense", {}), ("stem", {}), ("embformer", {"offload": "disk"})):
        before = {path: path.read_bytes() for path in trained[ffn].iterdir()}
        asked = dict(eval_only=True, out_dir=trained[ffn], data_dir=f"{data},{other}/")
        train_module.train(resolve_settings(**asked, **flags))
        last = read_run(trained[ffn])["eval"][-1]
        figures = (
            f"val loss {last['val_loss']:.5g}, val loss per byte {last['val_loss_per_byte']:.5g}"
        )
        lines = [f"{trained[ffn]}/ckpt.pt on {folder}: {figures}" for folder in (data, f"{other}/")]
        lines += ["capitals, asked in words it never saw: recall 50.0%"]
        assert capsys.readouterr().out.splitlines() == lines
        assert {path: path.read_bytes() for path in trained[ffn].iterdir()} == before
    (other / "meta.json").write_text(json.dumps({**meta, "tokenizer": "another"}))
    with pytest.raises(UserError, match=r"other was made with another tokenizer"):
        resolved = resolve_settings(eval_only=True, out_dir=trained["dense"], data_dir=str(other))
        train_module.train(resolved)
    with pytest.raises(UserError, match="leave out --seed"):
        resolve_settings(eval_only=True, init_from="x.pt", seed=3)


def test_resume_refuses_other_settings_and_other_data(trained, data, tmp_path, story):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "ckpt.pt").write_bytes((trained["stem"] / "ckpt.pt").read_bytes())
    resume = ("train.py", "--resume", "--out_dir", folder)
    error = command(*resume, "--n_layer", 4, cwd=tmp_path, fails=True)
    assert "leave out --n_layer" in error.stderr
    assert f"start a new run with --init_from {folder}/ckpt.pt" in error.stderr
    saved = torch.load(folder / "ckpt.pt", weights_only=True)
    torch.save({**saved, "step": "x"}, folder / "ckpt.pt")
    with pytest.raises(UserError, match=r"ckpt\.pt is damaged .*'x'"):
        train_module.train(resolve_settings(resume=True, out_dir=folder))
    saved["args"]["data_dir"] = str(tmp_path / "new")
    torch.save(saved, folder / "ckpt.pt")
    new = ("--input", story, "--out_dir", "new", "--vocab_size", 280, "--val_fraction", 0.1)
    command("prepare.py", *new, cwd=tmp_path)
    error = command(*resume, cwd=tmp_path, fails=True)
    assert "does not hold the text" in error.stderr


def test_weights_that_are_not_numbers_never_reach_a_checkpoint(data, tmp_path, monkeypatch):
    step, calls = train_module.Optimizer.step, []

    def poisoned(self, lr):
        calls.append(lr)
        if len(calls) == 12:  # the last step before the last evaluation: its own loss is fine
            self.adamw.param_groups[0]["params"][0].grad[0, 0] = math.inf
        return step(self, lr)

    monkeypatch.setattr(train_module.Optimizer, "step", poisoned)
    with pytest.raises(UserError, match="validation loss became nan at step 12"):
        train_module.train(arguments(monkeypatch, data, tmp_path))
    saved = checkpoint(tmp_path)
    assert saved["step"] == 6
    assert all(weight.isfinite().all() for weight in saved["model"].values())


def one_step(lr, **other):
    """A decoder before and after one optimizer step, and its gradients."""
    torch.manual_seed(0)
    model = Decoder(ModelConfig(20, 8, 2, 2, 16))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain = dict(learning_rate=0.1, weight_decay=0.0, grad_clip=0.0)
    optimizer = Optimizer(model, Settings(**{**plain, **other}))
    ids = torch.tensor([[1, 2, 3, 2]])
    model(ids, ids)[1].backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    reads = [*model.tables.reads, *model.wte.reads]  # one of each
    rows = [leaf.grad.clone() for _, leaves in reads for leaf in leaves]
    optimizer.step(lr)
    moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    return before, moved, grads, rows, optimizer


def test_first_step_moves_backbone_and_rows_by_the_rate():
    _, moved, grads, rows, _ = one_step(0.5)
    for name in ("head.weight", "blocks.0.ffn.up.weight", "norm.weight"):
        where = grads[name].abs() > 1e-6  # Adam's first step is lr * sign(gradient)
        expected = -0.5 * 0.1 * grads[name].sign()
        torch.testing.assert_close(moved[name][where], expected[where], rtol=2e-2, atol=0.0)
    for name, grad in zip(("tables.weight.0", "wte.weight.0"), rows, strict=True):
        table, where = moved[name], grad.abs() > 1e-6
        expected = -0.5 * 0.1 * grad.sign()
        torch.testing.assert_close(table[1:4][where], expected[where], rtol=2e-2, atol=0.0)
        assert table[4:].abs().max() == 0


def test_gradients_of_backbone_and_rows_are_clipped_together():
    _, _, grads, rows, optimizer = one_step(0.5, grad_clip=1e-3)
    norm = torch.cat([g.flatten() for g in [*grads.values(), *rows]]).norm()
    assert norm > 1e-3
    for adam, grad in zip(optimizer.rows.values(), rows, strict=True):
        m = adam.m[0][1:4]  # first moment after one step: 0.1 * clipped gradient
        torch.testing.assert_close(m, 0.1 * grad * 1e-3 / norm, rtol=1e-3, atol=1e-12)
    for group in optimizer.adamw.param_groups:
        for p in group["params"]:
            m = optimizer.adamw.state[p]["exp_avg"]
            assert m.norm() <= 0.1 * 1e-3 * (1 + 1e-5)


def test_weight_decay_shrinks_linear_layers_only():
    before, plain, *_ = one_step(0.5)
    _, decayed, *_ = one_step(0.5, weight_decay=0.2)
    for name, start in before.items():
        linear = start.dim() == 2 and not name.startswith("wte.") and not name.startswith("tables.")
        shrunk = decayed[name] - plain[name]
        expected = -0.5 * 0.1 * 0.2 * start if linear else torch.zeros_like(start)
        torch.testing.assert_close(shrunk, expected, rtol=1e-3, atol=1e-7)


def test_loss_with_document_mask_is_that_of_the_documents_alone():
    torch.manual_seed(0)
    model = Decoder(ModelConfig(20, 16, 2, 2, 16)).eval()
    first, second = torch.tensor([[0, 5, 6, 7]]), torch.tensor([[0, 8, 9, 5, 6, 3]])
    masked = NextToken(model, torch.device("cpu"), "float32", document=0)
    plain = NextToken(model, torch.device("cpu"), "float32", document=None)
    both = torch.cat([first, second], dim=1)
    quiet = torch.full_like(first, -1)  # no targets in the first document
    targets = torch.cat([quiet, second], dim=1)
    expected = plain(second, second)[0]
    torch.testing.assert_close(masked(both, targets)[0], expected)
    assert not torch.isclose(plain(both, targets)[0], expected, atol=1e-4)


class SharedRows(ResidentTables):
    def __init__(self, n_table: int, vocab_size: int, width: int) -> None:
        super().__init__(n_table, -(-vocab_size // 8), width)

    def lookup(self, ids: torch.Tensor):
        return super().lookup(ids // 8)


def test_tables_of_ones_own_are_trained_and_read_again(data, tmp_path):
    flags = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=4, device="cpu")
    flags |= dict(data_dir=str(data), out_dir=tmp_path, max_iters=4, eval_interval=2)
    train_module.train(resolve_settings(**flags), tables=SharedRows)
    train_module.train(resolve_settings(out_dir=tmp_path, resume=True, max_iters=6), SharedRows)
    model, _, saved = load_model(tmp_path / "ckpt.pt", torch.device("cpu"), tables=SharedRows)
    count = saved["optimizer"]["rows"]["tables"]["count"]  # in how many steps each was read
    assert len(count) == len(model.tables.weight[0]) == -(-model.config.vocab_size // 8)
    assert saved["step"] == 6 == count.max()
    with pytest.raises(UserError, match="size mismatch"):
        load_model(tmp_path / "ckpt.pt", torch.device("cpu"))
