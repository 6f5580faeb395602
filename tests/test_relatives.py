"""What is special about some layers of relatives/. Their formulas: test_attention.py. FLOPs:
test_costs.py."""

import collections
import random

import pytest
import torch
from conftest import CPU
from naive import SIZES, decoder, tokens

from training.objectives import NextToken
from training.optimizer import Optimizer
from training.placement import cast_backbone
from training.report import model_sizes
from training.settings import Settings


def test_hashes_give_every_expert_of_a_segment_equally_many_ids():
    ffn = decoder(ffn="hash_moe", vocab_size=100, n_expert=12, top_k=3).blocks[0].ffn
    assert torch.equal(ffn.hashes // 4, torch.arange(3).expand(100, 3))
    assert ffn.hashes.flatten().bincount().tolist() == [25] * 12
    assert len(set(map(tuple, ffn.hashes.tolist()))) > 30  # segments have hashes of their own


# --- counts ---


def test_counts_give_the_mean_of_the_heads_rows_of_what_followed():
    """Of 3 tokens, a pair can be followed by 3. Of more than it keeps, the frequent ones stay."""
    model = decoder(ffn="count", ngram_rows=999, n_next=3, vocab_size=3).train()
    followed = collections.defaultdict(collections.Counter)
    rng = random.Random(0)
    for _ in range(40):
        ids = torch.tensor([rng.choices(range(3), [1, 2, 4], k=9) for _ in range(2)])
        for text in ids.tolist():
            for before, token, after in zip([0, *text], text, text[1:], strict=False):
                followed[before, token][after] += 1
        model(ids, ids)
    ids = torch.tensor([[1, 2, 2, 0]])
    model.eval()
    (rows,) = next(model.layer_rows(model.addresses(ids, 4)))  # [4, 32]
    for pair, row in zip([(0, 1), (1, 2), (2, 2), (2, 0)], rows, strict=True):
        mean = sum(n * model.head_weight[after] for after, n in followed[pair].items())
        torch.testing.assert_close(row, mean / followed[pair].total())
    model = decoder(ffn="count", n_next=2).train()
    for after in [5, 6, 5, 7, 5, 8, 5, 9]:
        ids = torch.tensor([[3, 4, after]])
        model(ids, ids)
    kept = model.next[model.addresses(ids, 2)[0, 0, 0]]
    assert kept.tolist() == [5, 9]


# --- the loss that balances the router ---


def test_balance_is_its_formula_and_reaches_the_loss_in_training_only():
    model = decoder(ffn="moe", balance=0.1, **SIZES["moe"])
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
    model = decoder(ffn="pkm", n_key=9, top_k=3).train()
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
