"""checks.py: mistakes in layers of one's own, or in changed ones, that training would pass over in
silence."""

import pytest
import torch
from conftest import assert_same_run, checkpoint, interrupted, resume, small_run

import train
from model import Decoder, ModelConfig
from stem import StemFFN
from tables.storage import RamStorage
from tables.tables import StoredTables
from training import checks, optimizer

HEAD = """
import torch
from torch import nn
import model
from stem import StemFFN

"""
# Each makes a decoder of its own, and is named in a line of the run's output.
DETACHED = """
class FFN(StemFFN):
    def forward(self, x, rows):
        return super().forward(x, rows.detach())

class Decoder(model.Decoder):
    def make_block(self, layer):
        block = super().make_block(layer)
        if layer == 2:
            block.ffn = FFN(self.config.n_embd, self.config.d_ff)
        return block
"""
UNUSED = """
class Decoder(model.Decoder):
    def __init__(self, config, *more):
        super().__init__(config, *more)
        self.blocks[0].scale = nn.Parameter(torch.ones(3))
"""


def reading(given: str, more: str = "pass") -> str:
    """STEM's FFN, which is given other things, and has more."""
    return f"""
class FFN(StemFFN):
    def __init__(self, config):
        super().__init__(config.n_embd, config.d_ff)
        {more}

    def forward(self, x, rows):
        return super().forward({given})

class Decoder(model.Decoder):
    row_ffn = FFN
"""


NO_PARAMETER = reading("x, self.scale * rows", "self.scale = torch.randn(config.d_ff)")
# A gate that begins at zero passes no gradient on in the first step; nothing is wrong.
ZERO_AT_FIRST = reading("x, self.gain * rows", "self.gain = nn.Parameter(torch.zeros(config.d_ff))")
LOOKS_AHEAD = reading("x + x.mean(1, keepdim=True), rows")
SEEDED = """
class Decoder(model.Decoder):
    def row_ffn(self, config):
        torch.manual_seed(0)
        return super().row_ffn(config)
"""
# In decoding, `ids` are the new token alone.
MIXES_BEFORE = """
class Decoder(model.Decoder):
    def embed(self, ids):
        x = super().embed(ids)
        return x + torch.cat((x[:, :1], x[:, :-1]), dim=1)
"""
MORE_TABLES = """
from tables.tables import ResidentTables

class Decoder(model.Decoder):
    def __init__(self, config, *more):
        super().__init__(config, *more)
        self.more = ResidentTables(1, 7, config.n_embd)

    def embed(self, ids):
        return super().embed(ids) + next(self.more.lookup(ids % 7))
"""


LOST = "does not keep the whole model"
ONE_TOKEN = dict(block_size=1)


@pytest.fixture
def notes(data, tmp_path, capsys):
    """The lines in which a brief run says that something may be wrong."""

    def notes(**more) -> list[str]:
        small_run(data, tmp_path / "out", max_iters=4, **more)
        return [line for line in capsys.readouterr().out.splitlines() if "note: " in line]

    return notes


@pytest.mark.parametrize(
    ("source", "more", "said"),
    [
        (DETACHED, {}, "note: no gradient so far, so not trained: tables.weight.1:"),
        (UNUSED, {}, "not trained: blocks.0.scale:"),
        (NO_PARAMETER, {}, LOST),
        (NO_PARAMETER, ONE_TOKEN, LOST),
        (NO_PARAMETER.replace("randn", "rand"), {}, LOST),  # a little
        (LOOKS_AHEAD, {}, "a layer looks ahead"),
        (reading("x + x.cumsum(0), rows"), {}, "with other texts of the batch"),
        (reading("x + x.flip(0).cumsum(0).flip(0), rows"), {}, "with other texts of the batch"),
        (SEEDED, {}, "--ffn mine calls torch.manual_seed: weights begin the same"),
        (MIXES_BEFORE, {}, "sample.py predicts something else"),
    ],
)
def test_what_learns_nothing_or_is_not_kept_is_said(source, more, said, notes, add_relative):
    add_relative("mine", HEAD + source)
    (note,) = notes(ffn="mine", n_layer=3, **more)
    assert said in note


@pytest.mark.parametrize(
    ("source", "more"),
    [
        (ZERO_AT_FIRST, {}),
        (MORE_TABLES, {}),
        (LOOKS_AHEAD, ONE_TOKEN),  # a context of one token looks nowhere
    ],
)
def test_nothing_is_said_of_what_is_right(source, more, notes, add_relative):
    add_relative("mine", HEAD + source)
    assert not notes(ffn="mine", n_layer=3, **more)


def test_a_run_that_resumes_with_other_code_is_checked_again(data, tmp_path, monkeypatch, capsys):
    folder = small_run(data, tmp_path)
    forward = StemFFN.forward
    monkeypatch.setattr(
        StemFFN, "forward", lambda self, x, rows: forward(self, x + x.mean(1, keepdim=True), rows)
    )
    resume(folder, max_iters=16)
    assert "a layer looks ahead" in capsys.readouterr().out


def test_a_model_of_one_token_is_compared_with_what_is_loaded(notes):
    assert not notes(attention="linear", **ONE_TOKEN)


def test_tables_that_are_stored_count_for_what_is_loaded_beside_itself(tmp_path, monkeypatch):
    def stored(n_table, n_row, width):
        return StoredTables(RamStorage((n_row, n_table, width), torch.float32))

    made = Decoder(ModelConfig(99, n_layer=2, n_head=1, n_embd=8), stored)
    monkeypatch.setattr(checks, "MOST_NUMBERS", sum(p.numel() for p in made.parameters()))
    monkeypatch.setattr(checks, "load_model", None)  # not called
    checks.check_saved(tmp_path / "ckpt.pt", made, torch.zeros(1, 9).long())


def test_what_an_optimizer_beside_adamw_trains_is_not_said_to_be_untrained(notes, monkeypatch):
    class WithSGD(optimizer.Optimizer):
        def __init__(self, *args):
            super().__init__(*args)
            sgd = torch.optim.SGD(self.adamw.param_groups.pop(0)["params"], lr=0.01)
            self.adamw.register_step_pre_hook(lambda *_: sgd.step())

    monkeypatch.setattr(train, "Optimizer", WithSGD)
    assert not notes()


def test_steps_that_float16_skips_are_no_layers_fault(notes, monkeypatch):
    infinite = torch.tensor(torch.inf)
    monkeypatch.setattr(optimizer, "get_total_norm", lambda gradients: infinite)
    (note,) = notes(dtype="float16")
    assert "no step was taken so far, as gradients overflow float16" in note


def test_more_tables_of_a_decoder_are_trained_and_resumed(data, tmp_path, add_relative):
    add_relative("mine", HEAD + MORE_TABLES)
    whole = small_run(data, tmp_path / "whole", ffn="mine")
    assert (checkpoint(whole)["model"]["more.weight.0"] != 0).all()  # as it begins
    assert_same_run(whole, resume(interrupted(data, tmp_path / "cut", 9, ffn="mine")))
