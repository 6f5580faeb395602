"""A dense model that becomes STEM: rows against a formula written out, and runs from there."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import SMALL
from test_train import assert_same, checkpoint, crash_in_step, losses

import train as train_module
from common import UserError
from model import Decoder, ModelConfig
from training.batches import Data
from training.records import read_run
from training.settings import resolve_settings

RUN = dict(zip([name[2:] for name in SMALL[::2]], SMALL[1::2], strict=True))
RUN = {name: int(RUN[name]) for name in ("batch_size", "max_iters", "eval_interval")}
RUN |= dict(device="cpu", ffn="stem", eval_tokens=512, convert_tokens=2000)


@pytest.fixture
def converted(trained, data, tmp_path):
    """Run train.py from the dense model; the folder it wrote."""

    def go(out="out", **flags):
        flags = {**RUN, "stem_layers": "0,1", "init_from": trained["dense"] / "ckpt.pt", **flags}
        flags = {"data_dir": str(data), "out_dir": tmp_path / out, **flags}
        train_module.train(resolve_settings(**flags))
        return tmp_path / out

    return go


def dense_model(trained):
    saved = checkpoint(trained["dense"])
    model = Decoder(ModelConfig(**saved["config"])).eval()
    model.load_state_dict(saved["model"])
    return model, saved["model"]


@torch.no_grad()
def test_rows_are_the_weighted_means_of_what_they_replace(trained, data, converted):
    """Layer 0 token by token, from the dense model as it is; layer 1 behind a converted layer 0."""
    saved = checkpoint(converted(max_iters=0))
    (dense, weights), text = dense_model(trained), Data(str(data), "text", 32, 1337, 100)
    ids = torch.cat([text.train.batch(number, 4)[0] for number in range(2000 // 128)])  # [N, T]
    model = Decoder(ModelConfig(**saved["config"])).eval()
    model.load_state_dict(saved["model"])
    for layer, source in ((0, dense), (1, model)):
        seen = []
        source.blocks[layer].ffn.register_forward_pre_hook(
            lambda _, x, seen=seen: seen.append(x[0])
        )
        source(ids)
        x, tokens = seen[0].flatten(0, 1), ids.flatten()
        g = F.silu(x @ weights[f"blocks.{layer}.ffn.gate.weight"].T)
        u = x @ weights[f"blocks.{layer}.ffn.up.weight"].T
        rows = saved["model"][f"tables.weight.{layer}"]
        for token in tokens.unique().tolist():
            here = tokens == token
            best = (g[here] ** 2 * u[here]).sum(0) / (g[here] ** 2).sum(0)
            torch.testing.assert_close(rows[token], best, rtol=1e-3, atol=1e-4)
        absent = torch.ones(len(rows), dtype=torch.bool).index_fill_(0, tokens, False)
        assert absent.any()
        mean = (g**2 * u).sum(0) / (g**2).sum(0)
        torch.testing.assert_close(
            rows[absent], mean.expand(int(absent.sum()), -1), rtol=1e-3, atol=1e-4
        )
    for name, weight in weights.items():  # all else is the dense model's
        assert name.endswith("ffn.up.weight") or torch.equal(weight, saved["model"][name])


def test_a_converted_model_loses_little_and_random_rows_lose_more(trained, converted, capsys):
    before = read_run(trained["dense"])["eval"][-1]["val_loss"]
    after = {}
    for name, flags in dict(
        rows={}, mean=dict(convert_prior=1e9), random=dict(convert_tokens=0)
    ).items():
        after[name] = read_run(converted(name, max_iters=0, **flags))["eval"][0]["val_loss"]
    said = capsys.readouterr().out
    assert "layer 1: the token explains" in said
    assert abs(after["rows"] - before) < abs(after["mean"] - before) < abs(after["random"] - before)


def test_a_converted_run_resumes_to_the_bit_wherever_tables_are(converted, tmp_path, monkeypatch):
    whole = checkpoint(converted("whole"))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        crash_in_step(patch, 9)
        converted("cut")
    train_module.train(resolve_settings(resume=True, out_dir=tmp_path / "cut"))
    for part in ("model", "optimizer", "step", "config"):
        assert_same(whole[part], checkpoint(tmp_path / "cut")[part])
    for place in ("cpu", "disk"):
        assert losses(converted(place, offload=place)) == losses(tmp_path / "whole")


def test_mixtures_and_bfloat16_rows_are_converted_too(data, converted, tmp_path):
    flags = dict(stem_layers="1", max_iters=0, table_dtype="bfloat16", stage="midtrain")
    shutil.copytree(data, tmp_path / "again")
    saved = checkpoint(converted(data_dir=f"{data}=1,{tmp_path / 'again'}=2", **flags))
    assert saved["config"]["stem_layers"] == "1" and saved["step"] == 0
    assert saved["model"]["tables.weight.0"].dtype == torch.bfloat16
    assert saved["model"]["tables.weight.0"].isfinite().all()


@pytest.mark.parametrize(
    ("model", "flags", "says"),
    [
        ("embformer", dict(ffn="stem"), "--ffn is given by the model in --init_from"),
        ("stem", dict(ffn="stem"), "--ffn is given by the model"),
        ("dense", dict(ffn="embformer"), "--ffn is given by the model"),
        ("dense", dict(ffn="stem", n_embd=64), "--n_embd is given by the model"),
        ("dense", dict(ffn="stem", stem_layers="7"), "stem_layers='7' must be third"),
        ("dense", dict(ffn="stem", stage="sft"), "--ffn is given by the model"),
        ("dense", dict(convert_tokens=5), "--convert_tokens changes nothing with --ffn dense"),
    ],
)
def test_what_cannot_be_converted_is_one_clear_line(trained, data, model, flags, says):
    with pytest.raises(UserError, match=says):
        resolve_settings(data_dir=str(data), init_from=trained[model] / "ckpt.pt", **flags)
