"""originals.py without the originals: a model written out takes their place."""

import re
import sys

import originals
import pytest
import torch
import torch.nn.functional as F
from originals import Original, Throughout, compare, counterpart, difference, report, rounding
from torch import nn

from common import UserError, run
from model import Decoder, ModelConfig

SHAPE = dict(vocab_size=11, block_size=32, n_layer=2, n_head=2, n_embd=16, d_ff=24, n_kv_head=1)
STEM = dict(ffn="stem", stem_layers="1", tie_head=False, norm_eps=1e-5)


class Written(nn.Module):
    """STEM, written out with lingua's names, and rotations as products of complex numbers."""

    def __init__(self, config, shapes):
        super().__init__()
        self.config = config
        self.weights = {name: nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()}

    def named_parameters(self):
        return self.weights.items()

    def parameters(self):
        return self.weights.values()

    def norm(self, x, name):
        scale = (x.float().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        return x * scale * self.weights[f"lm_transformer.{name}.weight"]

    def heads(self, x, name, turn=None):
        """[B, T, n_embd] -> [B, n_head, T, head_dim]"""
        x = F.linear(x, self.weights[f"lm_transformer.{name}.weight"])
        x = x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        if turn is not None:
            x = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn
            x = torch.view_as_real(x).flatten(-2)
        return x.repeat_interleave(self.config.n_head // x.shape[1], 1)

    def forward(self, ids):
        size, n = self.config.head_dim, ids.shape[1]
        speed = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
        angle = torch.arange(n)[:, None] * speed  # [T, head_dim/2]
        turn = torch.polar(torch.ones_like(angle), angle)
        x = self.weights["lm_transformer.tok_embeddings.weight"][ids]
        for i in range(self.config.n_layer):
            here = f"layers.{i}"
            y, at = self.norm(x, f"{here}.attention_norm"), f"{here}.attention.w"
            q, k, v = self.heads(y, at + "q", turn), self.heads(y, at + "k", turn), at + "v"
            logits = q @ k.transpose(-1, -2) / size**0.5 + torch.full((n, n), -torch.inf).triu(1)
            y = (logits.softmax(-1) @ self.heads(y, v)).transpose(1, 2).flatten(-2)
            x = x + y @ self.weights[f"lm_transformer.{here}.attention.wo.weight"].T
            y = self.norm(x, f"{here}.ffn_norm")
            w1, w2, w3 = (
                self.weights.get(f"lm_transformer.{here}.feed_forward.w{j}.weight")
                for j in (1, 2, 3)
            )
            up = self.weights["stem_embeddings.0.weight"][ids] if w3 is None else y @ w3.T
            gate = y @ w1.T
            x = x + (gate / (1 + torch.exp(-gate)) * up) @ w2.T
        return self.norm(x, "norm") @ self.weights["lm_transformer.output.weight"].T


def written(**options) -> Original:
    """In the place of an original."""
    config = ModelConfig(**SHAPE, **{**STEM, **options})
    original = Original("Written", config, None, 1, None, None, None)
    ours = original.named(dict(Decoder(ModelConfig(**SHAPE, **STEM)).named_parameters()))
    model = Written(config, {name: weight.shape for name, weight in ours.items()})
    original.model = original.logits = original.decode = model
    original.loss = lambda ids: F.cross_entropy(
        model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
    )
    return original


def beyond(found, dtype=torch.float64):
    """What differs by more than rounding."""
    return {what for what, (_, relative) in found.items() if not rounding(relative, dtype)}


@pytest.fixture
def double(monkeypatch):
    """float64, and few steps of decoding."""
    monkeypatch.setattr(originals, "T", originals.PROMPT + 2)
    torch.set_default_dtype(torch.float64)
    with Throughout():
        yield
    torch.set_default_dtype(torch.float32)


ALL = {"logits", "cached decoding", "loss", "gradients"}


# --- the comparison ---


def test_equal_models_pass_in_either_precision(capsys):
    report([written])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(ALL)
    for line in lines[2:]:
        title, what, _, single, _, double = [cell.strip() for cell in line.strip("|").split("|")]
        assert (title, what in ALL) == ("Written", True)
        assert float(single) < 1e-5
        assert float(double) < 1e-13
    assert "e-" in lines[-1]  # two implementations, not one compared with itself


def test_every_weight_matters(double):
    original = written()
    ours = counterpart(original)
    assert beyond(compare(ours, original)) == set()
    for name, weight in original.model.named_parameters():
        before = weight.detach().clone()
        weight.data[0] += 1e-2
        assert beyond(compare(ours, original)) == ALL, name
        weight.data.copy_(before)
    assert beyond(compare(ours, original)) == set()


@pytest.mark.parametrize("options", [dict(norm_eps=1.01e-5), dict(rope_base=10001.0)])
def test_settings_that_differ_a_little_are_noticed(double, options):
    original = written(**options)
    assert beyond(compare(counterpart(original), original)) == ALL


def test_a_wrong_cache_or_gradient_is_noticed_alone(double, monkeypatch):
    original = written()
    ours = counterpart(original)
    original.decode = lambda ids: original.logits(ids).roll(1, dims=1)
    assert beyond(compare(ours, original)) == {"cached decoding"}
    original.decode = original.logits
    found = originals.Tables.gradients

    def wrong(tables):
        ids, grads = found(tables)
        grads[0][-1, -1] *= 1.0001
        return ids, grads

    monkeypatch.setattr(originals.Tables, "gradients", wrong)
    assert beyond(compare(ours, original)) == {"gradients"}


def test_what_shows_nothing_counts_as_a_difference():
    zero, one, nan = torch.zeros(2), torch.ones(2), torch.tensor([1.0, torch.nan])
    assert difference([(one, one), (one, 4 * one)]) == (3, 0.75)
    for pair in [(nan, one), (one, nan), (zero, zero)]:
        assert beyond({"it": difference([(one, one), pair, (one, one)])}, torch.float32) == {"it"}


def test_other_weights_are_named():
    with pytest.raises(UserError, match=r"and ours have other weights: .*layers\.0\.feed.*w3"):
        counterpart(written(stem_layers="0,1"))


# --- the command ---


def outcome(monkeypatch, *args):
    """What a command that fails ends with."""
    monkeypatch.setattr(sys, "argv", ["originals.py", *map(str, args)])
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    with pytest.raises(SystemExit) as error:
        run(originals.main)
    return error.value.code


def test_a_difference_is_one_line_and_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(originals, "embformer", lambda folder: written(norm_eps=1e-3))
    said = outcome(monkeypatch, "--embformer", "there")
    line = r"error: \d of 8 differ beyond rounding: logits of Written by \de-03 in torch.float32"
    assert re.fullmatch(line, said)
    assert "| Written | loss |" in capsys.readouterr().out
