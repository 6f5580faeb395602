"""Layers of relatives/ against loops over their formulas, gradients included. FLOPs: test_costs.py.
Those whose rows reach attention or the residual stream, and kinds of attention: test_attention.py.
"""

import pytest
import torch
from conftest import CPU
from naive import decoder, norm, silu, tokens
from torch import nn

from model import Decoder
from training.objectives import NextToken
from training.optimizer import Optimizer
from training.placement import cast_backbone
from training.report import model_sizes
from training.settings import Settings

SHAPE = dict(block_size=16, n_layer=2, n_head=2, n_embd=16, d_ff=24)  # and 23 tokens
SIZES = {
    "moe": dict(n_expert=6, top_k=3),
    "hash_moe": dict(n_expert=6, top_k=3),
    "pkm": dict(n_key=5, top_k=3),
    "deepembed": dict(),
    "ple": dict(ple_width=6),
    "stem_additive": dict(),
    "stem_gate": dict(),
}


def tiny(ffn: str, **options) -> Decoder:
    return decoder(ffn=ffn, **{**SHAPE, **SIZES[ffn], **options})


# --- each layer, token by token: its weights w, x [16], the token's row and id -> [16] ---


def swiglu(w, x, hidden=slice(None)):
    """The dense FFN, or some of its hidden units."""
    gate = w["gate.weight"][hidden]
    up = w["up.weight"][hidden]
    down = w["down.weight"][:, hidden]
    return down @ (silu(gate @ x) * (up @ x))


def expert(w, x, number):
    """Experts are 8 hidden units wide."""
    return swiglu(w, x, slice(8 * number, 8 * number + 8))


def naive_moe(w, x, row, token):
    exps = torch.exp(w["router.weight"] @ x)
    best = sorted(range(6), key=lambda number: -exps[number].item())[:3]
    total = sum(exps[number] for number in best)
    return sum(exps[number] / total * expert(w, x, number) for number in best)


def naive_hash_moe(w, x, row, token):
    return sum(expert(w, x, number) for number in w["hashes"][token].tolist())


def naive_pkm(w, x, row, token):
    """Every one of the 25 products scored, without the trick."""
    queries = (w["query.weight"] @ x).view(2, 2, -1)  # heads, halves
    keys = w["keys"].view(2, 2, 5, -1)
    y = torch.zeros(16)
    for head in range(2):
        first, second = norm(queries[head])
        exps = {}
        for i in range(5):
            for j in range(5):
                score = keys[head, 0, i] @ first
                score = score + keys[head, 1, j] @ second
                exps[5 * i + j] = torch.exp(score)
        best = sorted(exps, key=lambda number: -exps[number].item())[:3]
        total = sum(exps[number] for number in best)
        for number in best:
            y = y + exps[number] / total * w["values.weight"][number]
    return y


def naive_deepembed(w, x, row, token):
    hidden = silu(w["gate.weight"] @ x) * (w["up.weight"] @ x)
    return w["down.weight"] @ (hidden + hidden * row)


def naive_ple(w, x, row, token):
    g = w["row_gate.weight"] @ x
    tanh = torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))
    gelu = 0.5 * g * (1 + tanh)
    return swiglu(w, x) + w["row_out.weight"] @ (gelu * row)


def naive_stem_additive(w, x, row, token):
    return w["down.weight"] @ (silu(w["gate.weight"] @ x) * (w["up.weight"] @ x + row))


def naive_stem_gate(w, x, row, token):
    return w["down.weight"] @ (silu(row) * (w["up.weight"] @ x))


@pytest.mark.parametrize("kind", SIZES)
def test_layer_and_its_gradients_equal_a_loop_over_the_formula(kind):
    naive = globals()[f"naive_{kind}"]
    model = tiny(kind)
    ffn = model.blocks[1].ffn
    for parameter in ffn.parameters():
        nn.init.normal_(parameter, std=0.5)
    weights = {**dict(ffn.named_parameters()), **dict(ffn.named_buffers())}
    ids = torch.randint(23, (2, 7))
    x = torch.randn(2, 7, 16)
    x[0] = x[0, 0]  # tokens that all choose the same experts: none is dropped
    x.requires_grad_()
    table = torch.randn(23, ffn.row_width, requires_grad=True)
    rows = table[ids]  # [2, 7, row_width], nothing without a table
    learned = [x, *ffn.parameters()]
    if ffn.row_width:
        learned.append(table)

    y = ffn(x, list(model.layer_rows(ids))[1] if kind == "hash_moe" else rows)
    tokens = zip(x.flatten(0, 1), rows.flatten(0, 1), ids.flatten(), strict=True)
    expected = [naive(weights, *token) for token in tokens]
    expected = torch.stack(expected).view_as(y)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    probe = torch.randn(2, 7, 16)
    grads = torch.autograd.grad((y * probe).sum(), learned, retain_graph=True)
    wanted = torch.autograd.grad((expected * probe).sum(), learned)
    torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-4)


def test_hashes_give_every_expert_of_a_segment_equally_many_ids():
    ffn = tiny("hash_moe", vocab_size=100, n_expert=12).blocks[0].ffn
    assert torch.equal(ffn.hashes // 4, torch.arange(3).expand(100, 3))
    assert ffn.hashes.flatten().bincount().tolist() == [25] * 12
    assert len(set(map(tuple, ffn.hashes.tolist()))) > 30  # segments have hashes of their own


# --- the loss that balances the router ---


def test_balance_is_its_formula_and_reaches_the_loss_in_training_only():
    model = tiny("moe", balance=0.1)
    ids, targets = torch.randint(23, (2, 2, 9))
    inputs = []
    for block in model.blocks:
        block.ffn.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    objective = NextToken(model, CPU, "float32")
    plain = objective(ids, targets)
    inputs.clear()
    model.train()
    loss = objective(ids, targets)
    balance = 0.0
    for block, x in zip(model.blocks, inputs, strict=True):
        p = torch.softmax(x.flatten(0, 1) @ block.ffn.router.weight.T, -1)  # [18, 6]
        chosen = p.topk(3).indices.flatten().tolist()
        for number in range(6):
            share = chosen.count(number) / len(chosen)
            balance += 0.1 * 6 * share * p[:, number].mean()
    torch.testing.assert_close(loss, plain + balance)
    weight = model.blocks[1].ffn.router.weight
    grads = [torch.autograd.grad(of, weight, retain_graph=True) for of in (loss, plain + balance)]
    torch.testing.assert_close(*grads)


# --- costs ---


@pytest.mark.parametrize("n_embd", [96, 384])
@pytest.mark.parametrize("kind", [kind for kind in SIZES if kind != "stem_gate"])
def test_by_default_a_token_costs_what_the_dense_model_costs(kind, n_embd):
    flops = {}
    for ffn in ("dense", kind):
        model = decoder(ffn=ffn, n_head=8, n_embd=n_embd, d_ff=None)
        flops[ffn] = model_sizes(model)["flops_per_token"]
    exact = kind in ("hash_moe", "deepembed", "ple", "stem_additive")  # no router, nothing to round
    assert flops[kind] == pytest.approx(flops["dense"], rel=0 if exact else 0.02)


def test_values_of_product_keys_that_nobody_chose_do_not_decay():
    model = tiny("pkm").train()
    values = [block.ffn.values.weight for block in model.blocks]
    before = [weight.detach().clone() for weight in values]
    optimizer = Optimizer(model, Settings(weight_decay=0.5))
    model(*torch.randint(23, (2, 1, 3)))[1].backward()
    chosen = [weight.grad.abs().sum(1) > 0 for weight in values]
    optimizer.step(1.0)
    for weight, old, was_chosen in zip(values, before, chosen, strict=True):
        assert 0 < was_chosen.sum() < len(weight)
        assert torch.equal((weight != old).any(1), was_chosen)


def test_numbers_of_experts_are_not_rounded_in_16_bits():
    """bfloat16 has no 257."""
    model = decoder(ffn="hash_moe", n_expert=512, top_k=2, d_ff=64)
    ids = tokens(2, 9)
    wanted, _ = model(ids)
    cast_backbone(model, torch.bfloat16)  # as for decoding
    logits, _ = model(ids)
    torch.testing.assert_close(logits.float(), wanted, atol=0.05, rtol=0.05)
