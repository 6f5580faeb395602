"""Checks each baseline against a loop over its formula, gradients included, and its costs against
PyTorch's own counter."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from model import LAYERS, Decoder, ModelConfig
from text import tokenizer
from training.checkpoints import load_model, save_checkpoint
from training.objectives import NextToken
from training.optimizer import Optimizer
from training.settings import Settings

KINDS = ("moe", "hash_moe", "pkm", "deepembed", "ple")
TINY = dict(vocab_size=23, block_size=16, n_layer=2, n_head=2, n_embd=16, d_ff=24)
TINY |= dict(n_expert=6, top_k=3, n_key=5, ple_width=6)


def config(ffn: str, **options) -> ModelConfig:
    return ModelConfig(**{**TINY, **options}, ffn=ffn)


def silu(x):
    return x / (1 + torch.exp(-x))


# --- each layer, token by token ---


def naive_experts(w, x, chosen, weights):
    """Experts are 8 hidden units wide: slices of the matrices."""
    y = torch.zeros(16)
    for expert, weight in zip(chosen, weights, strict=True):
        mine = slice(8 * expert, 8 * expert + 8)
        hidden = silu(w["gate.weight"][mine] @ x) * (w["up.weight"][mine] @ x)
        y = y + weight * (w["down.weight"][:, mine] @ hidden)
    return y


def naive_moe(w, x, row, token):
    exps = torch.exp(w["router.weight"] @ x)
    best = sorted(range(6), key=lambda expert: -exps[expert].item())[:3]
    return naive_experts(w, x, best, [exps[e] / sum(exps[b] for b in best) for e in best])


def naive_hash_moe(w, x, row, token):
    return naive_experts(w, x, w["hashes"][token].tolist(), [1, 1, 1])


def naive_pkm(w, x, row, token):
    """Every one of the 25 products scored, without the trick."""
    q = (w["query.weight"] @ x).view(2, 2, -1)
    q = q / (q.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    keys, y = w["keys"].view(2, 2, 5, -1), torch.zeros(16)
    for head in range(2):
        scores = {
            5 * i + j: keys[head, 0, i] @ q[head, 0] + keys[head, 1, j] @ q[head, 1]
            for i in range(5)
            for j in range(5)
        }
        best = sorted(scores, key=lambda n: -scores[n].item())[:3]
        total = sum(torch.exp(scores[n]) for n in best)
        for n in best:
            y = y + torch.exp(scores[n]) / total * w["values.weight"][n]
    return y


def naive_deepembed(w, x, row, token):
    hidden = silu(w["gate.weight"] @ x) * (w["up.weight"] @ x)
    return w["down.weight"] @ (hidden + hidden * row)


def naive_ple(w, x, row, token):
    g = w["row_gate.weight"] @ x
    gelu = 0.5 * g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)))
    dense = w["down.weight"] @ (silu(w["gate.weight"] @ x) * (w["up.weight"] @ x))
    return dense + w["row_out.weight"] @ (gelu * row)


NAIVE = dict(moe=naive_moe, hash_moe=naive_hash_moe, pkm=naive_pkm)
NAIVE |= dict(deepembed=naive_deepembed, ple=naive_ple)


@pytest.mark.parametrize("kind", KINDS)
def test_layer_and_its_gradients_equal_a_loop_over_the_formula(kind):
    torch.manual_seed(0)
    ffn = LAYERS[kind][1](config(kind)).eval()
    for parameter in ffn.parameters():
        nn.init.normal_(parameter, std=0.5)
    x, ids = torch.randn(2, 7, 16), torch.randint(23, (2, 7))
    x[0] = x[0, 0]  # tokens that all choose the same experts: none is dropped
    x.requires_grad_()
    table, probe = torch.randn(23, ffn.row_width, requires_grad=True), torch.randn(2, 7, 16)
    rows = table[ids]  # [2, 7, row_width], nothing without a table
    given = [x, *([table] if ffn.row_width else []), *ffn.parameters()]
    w = {**dict(ffn.named_parameters()), **dict(ffn.named_buffers())}

    y = ffn(x, rows, ids=ids) if kind == "hash_moe" else ffn(x, rows)
    tokens = zip(x.flatten(0, 1), rows.flatten(0, 1), ids.flatten(), strict=True)
    expected = torch.stack([NAIVE[kind](w, *token) for token in tokens]).view_as(y)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    grads = torch.autograd.grad((y * probe).sum(), given, retain_graph=True)
    wanted = torch.autograd.grad((expected * probe).sum(), given)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-4)


def test_hashes_give_every_expert_of_a_segment_equally_many_ids():
    ffn = LAYERS["hash_moe"][1](config("hash_moe", vocab_size=100, n_expert=12))
    assert ffn.hashes.shape == (100, 3)
    assert torch.equal(ffn.hashes // 4, torch.arange(3).expand(100, 3))
    assert ffn.hashes.flatten().bincount().tolist() == [25] * 12
    assert len(set(map(tuple, ffn.hashes.tolist()))) > 30  # segments have hashes of their own


# --- the loss that balances the router ---


def test_balance_is_its_formula_and_reaches_the_loss_in_training_only():
    torch.manual_seed(0)
    model = Decoder(config("moe", balance=0.1, init_std=0.5)).train()
    ids, targets = torch.randint(23, (2, 2, 9))
    inputs = []
    for block in model.blocks:
        block.ffn.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    objective = NextToken(model, torch.device("cpu"), "float32")
    loss, balance = objective(ids, targets)
    expected = 0.0
    for block, x in zip(model.blocks, inputs, strict=True):
        p = torch.softmax(x.flatten(0, 1) @ block.ffn.router.weight.T, -1)  # [18, 6]
        chosen = p.topk(3).indices.flatten().bincount(minlength=6)
        for expert in range(6):
            expected += 0.1 * 6 * (chosen[expert] / (3 * 18)) * p[:, expert].mean()
    torch.testing.assert_close(balance, expected.detach())
    plain = model(ids, targets)[1]
    torch.testing.assert_close(loss, plain + expected)
    weight = model.blocks[1].ffn.router.weight
    (mine,) = torch.autograd.grad(loss, weight)
    (wanted,) = torch.autograd.grad(plain + expected, weight)
    torch.testing.assert_close(mine, wanted)
    loss, balance = NextToken(model.eval(), torch.device("cpu"), "float32")(ids, targets)
    assert balance is None and torch.equal(loss, model(ids, targets)[1])


# --- costs ---


@pytest.mark.parametrize("kind", LAYERS)
def test_flops_equal_those_that_pytorch_counts(kind):
    shape = dict(vocab_size=50, block_size=32, n_layer=3, n_head=4, n_embd=64)
    model = Decoder(ModelConfig(**shape, ffn=kind)).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(50, (2, 32)))
    counted = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    linear = sum(n for op, n in counted.items() if "attention" not in op) / 64
    if kind == "pkm":
        linear += 3 * 2 * 4 * 16 * 64  # the weighted sum of values, which it does not count
    attention = 3 * 4 * 64 * 32 // 2
    assert model.sizes()["flops_per_token"] == linear + attention


@pytest.mark.parametrize("n_embd", [96, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_by_default_a_token_costs_what_the_dense_model_costs(kind, n_embd):
    shape = dict(vocab_size=500, block_size=128, n_layer=2, n_head=8, n_embd=n_embd)
    dense, flops = (
        Decoder(ModelConfig(**shape, ffn=ffn)).sizes()["flops_per_token"] for ffn in ("dense", kind)
    )
    exact = kind in ("hash_moe", "deepembed")  # no router, nothing to round
    assert flops == pytest.approx(dense, rel=0 if exact else 0.02)


# --- checkpoints and settings (decoding with a cache: test_model.py, over all LAYERS) ---


def test_a_checkpoint_brings_back_the_hashes_that_were_drawn(tmp_path):
    encoding = tokenizer.train(["A word, and another word, and so on."] * 9, 300)
    model = Decoder(config("hash_moe", vocab_size=encoding.n_vocab, init_std=0.5)).eval()
    save_checkpoint(tmp_path / "ckpt.pt", model, encoding)
    loaded, _, _ = load_model(tmp_path / "ckpt.pt", torch.device("cpu"))
    ids = torch.randint(encoding.n_vocab, (2, 9))
    torch.testing.assert_close(loaded(ids)[0], model(ids)[0])


def test_values_of_product_keys_that_nobody_chose_do_not_decay():
    torch.manual_seed(0)
    model = Decoder(config("pkm")).train()
    values = [block.ffn.values.weight for block in model.blocks]
    before = [weight.detach().clone() for weight in values]
    optimizer = Optimizer(model, Settings(weight_decay=0.5))
    model(*torch.randint(23, (2, 1, 3)))[1].backward()
    chosen = [weight.grad.abs().sum(1) > 0 for weight in values]
    optimizer.step(1.0)
    for weight, old, was_chosen in zip(values, before, chosen, strict=True):
        assert 0 < was_chosen.sum() < len(weight)
        assert torch.equal((weight != old).any(1), was_chosen)
