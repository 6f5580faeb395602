"""lab/geometry.py against loops over pairs, and a model that is run by hand."""

import torch
from naive import decoder, tokens

from lab.geometry import up_outputs
from model import rotary


@torch.no_grad()
def test_outputs_of_up_projections_by_token():
    model = decoder(ffn="dense", block_size=8)
    windows = tokens(40, 8) % 9
    windows[0, 0] = 15  # occurs once
    found = up_outputs(model, windows.flatten())
    angles = rotary(8, model.config, "cpu")
    x = model.embed(windows)
    for layer, block in enumerate(model.blocks):
        x = x + block.attn(block.attn_norm(x), None, angles)
        y = block.ffn_norm(x) @ block.ffn.up.weight.T
        x = x + block.ffn(block.ffn_norm(x), None)
        for number, token in enumerate(windows.unique()):
            mean = y[windows == token].mean(0)  # [d_ff]
            torch.testing.assert_close(found[layer][number], mean, rtol=1e-4, atol=1e-5)
