"""lab/token_share.py, beside rows, shares and losses written out for a layer of a small model."""

import torch
import torch.nn.functional as F
from conftest import CPU, command, refused
from simulated_gpu import SimulatedGpu

from lab import token_share
from training.batches import Data
from training.checkpoints import load_model, save_checkpoint
from training.dense_to_stem import read_text


@torch.no_grad()
def test_rows_shares_and_losses_are_those_of_the_formulas(trained, data):
    path = trained["dense"] / "ckpt.pt"
    model, encoding, _ = load_model(path, CPU)
    (train, _), (val, targets) = read_text(path, model, encoding, str(data), 1600, 16)
    text = Data(str(data), "text", 16, seed=0, total=0).val[str(data)]
    third = text.sequence(2 * text.n_sequence // 3)  # windows are spread over the whole text
    assert len(val) == 3 and val[2].tolist() == third[0].tolist()
    val[1, 3] = 7
    assert not (train == 7).any()  # it has no row
    loss, shares, losses = token_share.measure(model, train, val, targets)
    torch.testing.assert_close(loss, model(val, targets)[1].item())
    layer = 1
    ffn = model.blocks[layer].ffn
    read = []
    ffn.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].flatten(0, 1)))
    model(train)
    model(val)
    places = []  # of train and of val: g, u and y of each token [n, ...]
    for x in read[:2]:
        g, u = F.silu(ffn.gate(x)), ffn.up(x)
        places.append((g, u, ffn.down(g * u)))
    (g, u, y), (g_val, u_val, y_val) = places
    ids, val_ids = train.flatten(), val.flatten()

    def total(value):
        """The sum over the places of each of val's tokens."""
        return torch.stack([value[ids == token].sum(0) for token in val_ids])

    def mean(weight, value):
        """The weighted mean over these places, NaN if there is none."""
        return total(weight * value) / total(weight)

    n = (ids == val_ids[:, None]).sum(1)
    fits = {
        "up": (g_val * u_val, g_val * mean(g**2, u), total(g**4) / total(g**2) ** 2, ffn.down),
        "gate": (g_val * u_val, mean(u**2, g) * u_val, total(u**4) / total(u**2) ** 2, ffn.down),
        "whole": (y_val, mean(torch.ones_like(y), y), 1 / n[:, None], torch.clone),
    }
    seen = n > 0
    for number, (p, fit, q, out) in enumerate(fits.values()):
        fit = torch.where(seen[:, None], fit, p)
        error = ((p - fit) ** 2 / (1 + q)).sum(1)
        variance = ((p[seen] - p[seen].mean(0)) ** 2).sum()
        expected = 1 - error[seen].sum() / variance
        torch.testing.assert_close(shares[layer, number], expected.float(), rtol=1e-3, atol=1e-3)
        replaced = out(fit).view(*val.shape, -1)
        handle = ffn.register_forward_hook(lambda *_, replaced=replaced: replaced)
        risen = model(val, targets)[1].item() - loss
        handle.remove()
        torch.testing.assert_close(losses[layer, number].mean().item(), risen, rtol=1e-3, atol=1e-5)


def test_the_share_does_not_depend_on_how_often_a_token_occurred():
    """Of rows that exist: half of the variance, from 2 places a token or from 50, also where gates
    multiply them, by which few of the places count."""
    torch.manual_seed(0)
    rows = torch.randn(300, 64)

    def drawn(ids, gated):
        b = torch.ones(len(ids), 64)
        if gated:
            b = F.silu(torch.randn_like(b))
        return b, b * (rows[ids] + torch.randn_like(b))

    for n, gated in ((2, False), (50, False), (2, True), (8, True), (50, True)):
        ids = torch.arange(300).repeat(n)
        fit, explained = token_share.JudgedFit(300, 64, CPU), token_share.Explained()
        b, p = drawn(ids, gated)
        fit.add(ids[None], b[None], p[None])
        others = torch.arange(300).repeat(8)
        b, p = drawn(others, gated)
        explained.add(p, b * fit.rows()[others], fit.weights()[others])
        assert abs(explained.share - 0.5) < 0.02


def test_it_prints_a_table_and_draws_a_picture(trained, data, tmp_path, monkeypatch):
    monkeypatch.setattr(token_share, "training_dtype", lambda *_: "float32")
    ckpts = [trained["dense"] / "ckpt.pt", tmp_path / "$_{$.pt"]
    model, encoding, _ = load_model(ckpts[0], CPU)
    save_checkpoint(ckpts[1], model.bfloat16(), encoding)  # a model in 16 bits
    line = "lab/analyze.py token_share --tokens 500 --block_size 16 --plot share.png"
    done = command(line, *ckpts, "--data_dir", data)
    assert done.stdout.count("| 1 | ") == 2 and "in windows of 16" in done.stdout
    assert (tmp_path / "share.png").read_bytes().startswith(b"\x89PNG")
    assert "of --ffn stem" in refused(line, trained["stem"] / "ckpt.pt", "--data_dir", data)
    for wrong in ("--plot share.txt", "--tokens -5"):
        assert wrong in refused(f"{line} {wrong}", *ckpts, "--data_dir", data)


def test_shares_are_found_on_a_device_without_double_precision():
    numbers = torch.randn(2, 4, 8), torch.randn(2, 4, 8), torch.rand(2, 4, 8)
    here, there = token_share.Explained(), token_share.Explained()
    here.add(*numbers)
    with SimulatedGpu() as gpu:
        there.add(*(each.to(gpu.device) for each in numbers))
    assert there.share == here.share
