"""Layers of one's own: what a reader may write in one, trained and opened again."""

import pytest
import torch
from conftest import small_run

from model import LAYERS, LinearQKV
from stem import StemFFN
from training.checkpoints import load_model


class OwnFFN(StemFFN):
    """With tensors that no checkpoint holds."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("flip", -torch.ones(config.d_ff), persistent=False)
        self.scale = torch.tensor(0.5)

    def forward(self, x, rows):
        return super().forward(x, rows * self.flip) * self.scale


@pytest.mark.parametrize("offload", ["none", "disk"])
def test_tensors_that_are_not_saved_are_made_anew(data, tmp_path, monkeypatch, offload):
    monkeypatch.setitem(LAYERS, "own", (LinearQKV, OwnFFN))
    ckpt = small_run(data, tmp_path / "own", ffn="own", offload=offload) / "ckpt.pt"
    model, _, _ = load_model(ckpt, torch.device("cpu"), offload)
    ids = torch.randint(299, (2, 9))
    with torch.no_grad():
        logits, _ = model(ids)
        # The same by a plain layer: signs are in the rows, the scale is in `down`.
        for block in model.blocks:
            block.ffn.__class__ = StemFFN
            block.ffn.down.weight *= 0.5
        for rows in model.tables.weight:
            rows *= -1
        expected, _ = model(ids)
    torch.testing.assert_close(logits, expected)
