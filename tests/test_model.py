"""Checks the decoder against a naive one: loops over heads and positions, and no cache."""

import cmath
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same
from torch import nn

from common import UserError, add_flags, make_parser
from model import CHUNK, LAYERS, Decoder, HeadLoss, ModelConfig, sample

TINY = dict(vocab_size=23, block_size=16, n_layer=3, n_head=4, n_embd=32, d_ff=48)


def decoder(**options) -> Decoder:
    """A tiny decoder with weights so large, norm scales included, that each of them matters."""
    torch.manual_seed(0)
    model = Decoder(ModelConfig(**{**TINY, **options}))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def naive_norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def naive_rotate(x, base, scaling):
    """x [T, head_dim]: channels i and i + head_dim/2 are one complex number, turned by an angle;
    slowed down as in Meta's Llama 3.1."""
    half = x.shape[1] // 2
    turned = torch.complex(*x.split(half, dim=1))
    for i in range(half):
        speed = base ** (-i / half)  # radians per token
        if scaling:
            factor, low, high, context = scaling
            smooth = (context * speed / (2 * math.pi) - low) / (high - low)
            smooth = min(max(smooth, 0.0), 1.0)
            speed = (1 - smooth) * speed / factor + smooth * speed
        for t in range(len(x)):
            turned[t, i] *= cmath.exp(1j * t * speed)
    return torch.cat((turned.real, turned.imag), dim=1)


@torch.no_grad()
def naive_dense(model, ids):
    """Logits [T, V] of a dense decoder for ids [T], in double precision."""
    config = model.config
    w = {name: value.double() for name, value in model.state_dict().items()}
    width, groups = config.head_dim, config.n_head // config.n_kv_head
    future = torch.ones(len(ids), len(ids)).triu(1).bool()
    x = w["wte.weight" if config.tie_head else "wte.weight.0"][ids]
    for n in range(config.n_layer):
        b = f"blocks.{n}."
        normed = naive_norm(x, w[b + "attn_norm.weight"], config.norm_eps)
        heads = (normed @ w[b + "attn.qkv.qkv.weight"].T).split(width, dim=1)  # q, then k, then v
        y = []
        for head in range(config.n_head):
            shared = config.n_head + head // groups  # the key head of this query head
            q = naive_rotate(heads[head], config.rope_base, config.rope_scaling)
            k = naive_rotate(heads[shared], config.rope_base, config.rope_scaling)
            scores = (q @ k.T / math.sqrt(width)).masked_fill(future, -math.inf)
            y.append(scores.softmax(1) @ heads[shared + config.n_kv_head])
        x = x + torch.cat(y, dim=1) @ w[b + "attn.out.weight"].T
        normed = naive_norm(x, w[b + "ffn_norm.weight"], config.norm_eps)
        gate = normed @ w[b + "ffn.gate.weight"].T
        hidden = gate / (1 + torch.exp(-gate)) * (normed @ w[b + "ffn.up.weight"].T)
        x = x + hidden @ w[b + "ffn.down.weight"].T
    head = w["wte.weight" if config.tie_head else "head.weight"]
    return naive_norm(x, w["norm.weight"], config.norm_eps) @ head.T


# --- ModelConfig ---


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--n_kv_head -1", "--n_kv_head -1"),
        ("--n_embd 50", "--n_embd 50 must be a multiple of 2 * n_head, 8"),
        ("--n_embd 60", "--n_embd 60 must be a multiple of 2 * n_head, 8"),  # odd heads
        ("--n_head 8 --n_kv_head 3", "--n_head 8 must be a multiple of --n_kv_head 3"),
        ("--ffn embformer --no-tie_head", "--no-tie_head"),
        ("--ffn lstm", "--ffn lstm is not one of dense, stem, embformer"),
        ("--dropout 1.0", "--dropout 1.0 must be 0 or more and below 1"),
        ("--table_std nan", "--table_std nan"),
        ("--stem_layers most", "--stem_layers most must be third, half, all or numbers"),
        ("--stem_layers 1,x", "1,x must be third"),
        ("--stem_layers 0,3", "layers from 0 to 2"),
        ("--stem_layers=-1", "layers from 0 to 2"),
        ("--stem_layers all --n_layer 1", "layers from 0 to 0"),
        ("--attention windows", "--attention windows must be a list of full and window"),
        ("--attention window,,full", "must be a list of full"),
        ("--previous_heads -1", "--previous_heads -1 must be 0 or more"),
        ("--ffn embformer --previous_heads 1000000", "is more than the model's 4 key heads"),
        ("--window 0", "--window 0 must be at least 1"),
        ("--ffn moe --top_k 5 --n_expert 10", "--top_k 5 must divide --d_ff 48"),
        ("--ffn hash_moe --top_k 3 --n_expert 7", "--top_k 3 must divide --d_ff 48 and --n_exp"),
        ("--ffn pkm --top_k 6 --n_key 5", "--top_k 6 is more than --n_key 5"),
        ("--ffn pkm --top_k 40", "too much for --d_ff 48"),
        ("--ffn ple --ple_width 72", "--ple_width 72 leaves nothing of --d_ff 48"),
        ("--ffn moe --balance -1", "--balance -1.0 must be 0 or more"),
        ("--ffn moe --n_expert 0", "--n_expert 0 must be at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_named_with_their_values(line, message):
    parser = make_parser("")
    add_flags(parser, ModelConfig)
    given = vars(parser.parse_args(line.split()))
    with pytest.raises(UserError) as error:
        Decoder(ModelConfig(**{**TINY, **given}))
    assert message in str(error.value)


@pytest.mark.parametrize("n_embd", [24, 26, 192, 768])
def test_defaults_follow_the_other_fields(n_embd):
    d_ff = next(d for d in range(64, 10_000, 64) if 3 * d >= 8 * n_embd)
    root = pytest.approx(n_embd**-0.5, rel=0.05)
    for ffn, tied, std in (("stem", False, root), ("embformer", True, 0.02)):
        config = ModelConfig(ffn=ffn, n_embd=n_embd, n_head=1)
        assert (config.n_kv_head, config.d_ff, config.tie_head) == (1, d_ff, tied)
        assert config.init_std == std


# --- the whole forward pass ---


@pytest.mark.parametrize(
    ("n_kv_head", "tie_head", "rope_base", "rope_scaling"),
    [
        (4, False, 10000.0, None),
        (2, True, 50.0, None),
        (1, False, 50.0, [8.0, 1.0, 4.0, 32]),
    ],
)
def test_dense_logits_equal_a_naive_pre_norm_decoder(n_kv_head, tie_head, rope_base, rope_scaling):
    rope = dict(rope_base=rope_base, rope_scaling=rope_scaling)
    model = decoder(ffn="dense", n_kv_head=n_kv_head, tie_head=tie_head, **rope)
    ids = tokens(2, 9)
    for sequence, logits in zip(ids, model(ids)[0], strict=True):
        expected = naive_dense(model, sequence).float()
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_dropout_leaves_out_a_share_and_scales_the_rest_in_training_only():
    ids, share = tokens(256, 16), 0.25
    model = decoder(ffn="dense", dropout=share)
    assert torch.equal(model(ids)[0], decoder(ffn="dense")(ids)[0])
    block = model.train().blocks[0]
    inputs, outputs = {}, {}
    for name, part in (("block", block), ("norm", block.ffn_norm), ("ffn", block.ffn)):

        def record(_, given, made, name=name):
            inputs[name], outputs[name] = given[0], made

        part.register_forward_hook(record)
    model(ids)
    residual = outputs["block"] - inputs["norm"]
    for whole, dropped in ((model.embed(ids), inputs["block"]), (outputs["ffn"], residual)):
        left = (dropped / whole)[whole.abs() > 0.1]
        gone = left.abs() < 0.1
        assert gone.float().mean().item() == pytest.approx(share, abs=0.03)
        assert left[~gone].median().item() == pytest.approx(1 / (1 - share), rel=1e-3)
    q = torch.zeros(2, 4, 512, 8)  # attention alone: equal weights, of which a share is left out
    sums = block.attn.attend(q, q, torch.ones_like(q), None)[:, -1]
    assert sums.mean().item() == pytest.approx(1, abs=0.05) and sums.std() > 0.01


def test_more_tokens_than_block_size_are_refused():
    model = decoder(ffn="dense")
    cache = model.make_cache(1)
    model(tokens(1, 10), cache=cache)
    with pytest.raises(AssertionError, match="17 tokens do not fit into block_size=16"):
        model(tokens(1, 7), cache=cache)
    with pytest.raises(AssertionError, match="17 tokens do not fit into block_size=16"):
        model(tokens(1, 17))


# --- the loss ---


def head_case(n=23, width=8, vocab=31):
    torch.manual_seed(0)
    x, weight = (torch.randn(size, width, requires_grad=True) for size in (n, vocab))
    targets = torch.randint(vocab, (n,))
    targets[::5] = -1
    return x, weight, targets


def plain_loss(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=-1)


def test_with_targets_the_model_gives_the_mean_cross_entropy_and_no_logits():
    model, ids, targets = decoder(ffn="dense"), tokens(2, 6), tokens(2, 6, seed=2)
    targets[0, :4] = targets[1, 2] = -1
    logits, loss = model(ids, targets)
    whole = model(ids)[0].flatten(0, 1)
    expected = F.cross_entropy(whole, targets.flatten(), ignore_index=-1)
    torch.testing.assert_close(loss, expected)
    assert logits is None and model(ids)[1] is None


@pytest.mark.parametrize("chunk", [1, 31 * 4, 31 * 100])  # tokens at a time: 1, 4, all
def test_loss_in_chunks_and_its_gradients_equal_cross_entropy(monkeypatch, chunk):
    monkeypatch.setitem(CHUNK, "cpu", chunk)
    x, weight, targets = head_case()
    ours, plain = HeadLoss.apply(x, weight, targets, True), plain_loss(x, weight, targets)
    torch.testing.assert_close(ours, plain)
    grads, wanted = (torch.autograd.grad(3 * loss, (x, weight)) for loss in (ours, plain))
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-6)
    assert HeadLoss.apply(x, weight, targets, False) == ours
    assert HeadLoss.apply(x, weight, targets.fill_(-1), True).isnan()


def test_a_sum_of_gradients_that_float16_cannot_hold_is_no_infinity(monkeypatch):
    """4,096 tokens have the same target: their sum, over chunks, is beyond 65,504, their mean is
    19.4."""
    monkeypatch.setitem(CHUNK, "cpu", 31 * 1024)
    x = torch.full((4096, 8), 20.0, requires_grad=True)
    weight, targets = torch.zeros(31, 8, requires_grad=True), torch.zeros(4096, dtype=torch.int64)
    with torch.autocast("cpu", torch.float16):
        loss = HeadLoss.apply(x, weight, targets, True)
    grad = torch.autograd.grad(loss, weight)[0]
    expected = torch.autograd.grad(plain_loss(x, weight, targets), weight)[0]
    torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-3)


# --- decoding ---


@torch.no_grad()
def naive_greedy(model, ids, n, table_ids=None):
    """Without a cache; a context that has outgrown block_size is cut to its last half."""
    size = model.config.block_size
    context = ids[:, -size:]
    read = context if table_ids is None else table_ids
    for _ in range(n):
        if context.shape[1] > size:
            context, read = context[:, -(size // 2) :], read[:, -(size // 2) :]
        token = model(context, table_ids=read)[0][:, -1].argmax(-1, keepdim=True)
        context, read = torch.cat((context, token), 1), torch.cat((read, token), 1)
        ids = torch.cat((ids, token), 1)
    return ids


@pytest.mark.parametrize(
    ("ffn", "prompt"), [*((ffn, 4) for ffn in LAYERS), ("dense", 16), ("dense", 21)]
)
def test_greedy_generation_equals_an_argmax_loop_without_cache(ffn, prompt):
    model, ids = decoder(ffn=ffn), tokens(2, prompt)
    new = model.generate(ids, 40, temperature=0)
    assert new.shape == (2, prompt + 40)
    assert torch.equal(new, naive_greedy(model, ids, 40))


def test_stop_token_ends_the_batch_and_pads_rows_that_finished_earlier():
    model, ids, stop = decoder(ffn="dense"), tokens(3, 4), 5
    options = dict(temperature=20.0, seed=3)  # nearly uniform: every row meets every token
    free = model.generate(ids, 120, **options)[:, 4:].tolist()
    lengths = [row.index(stop) + 1 for row in free]
    assert len(set(lengths)) == 3
    expected = [row[:n] + [stop] * (max(lengths) - n) for row, n in zip(free, lengths, strict=True)]
    assert model.generate(ids, 120, stop=stop, **options)[:, 4:].tolist() == expected


@pytest.fixture
def graphs(monkeypatch) -> list:
    """What PyTorch compiles, without the time it takes to make code of it."""
    made, compile_for_good = [], torch.compile

    def backend(graph, _):
        made.append(graph)
        return graph.forward

    torch.compiler.set_stance("default")  # a finished training run forces eager
    torch._dynamo.reset()
    monkeypatch.setattr(
        torch, "compile", lambda f, mode, **how: compile_for_good(f, backend=backend, **how)
    )
    return made


@pytest.mark.parametrize("ffn", ["dense", "stem", "embformer"])
def test_steps_are_compiled_once_for_all_caches_of_a_size(ffn, graphs):
    """A step attends to the whole buffer, so that all have one shape."""
    model, ids = decoder(ffn=ffn, n_kv_head=2, block_size=64), tokens(2, 5)
    plain = model.generate(ids, 70, temperature=0)
    model.compile_steps()
    assert torch.equal(model.generate(ids, 70, temperature=0), plain)
    for seed in range(10):
        model.generate(ids[:, : 3 + seed % 3], 12, seed=seed, top_k=1 + seed)
    assert len(graphs) == 1


def test_a_chat_that_grows_is_compiled_for_few_sizes(graphs):
    model = decoder(ffn="dense", block_size=4096, n_layer=1)
    model.compile_steps()
    for length in range(5, 4096, 100):
        answer = model.stream(tokens(1, length), 20)
        for _ in range(3):
            next(answer)
    assert len(graphs) == 6  # 128, 256, 512, 1,024, 2,048, 4,096


PROBABILITIES = [[0.05, 0.4, 0.3, 0.15, 0.1], [0.6, 0.02, 0.08, 0.1, 0.2]]


def naive_support(probabilities, top_k, top_p):
    """Tokens from the most probable down, until there are k or they have reached p."""
    kept, total = [], 0.0
    for token in sorted(range(len(probabilities)), key=lambda t: -probabilities[t]):
        if len(kept) == top_k or (top_p and total >= top_p):
            break
        kept.append(token)
        total += probabilities[token]
    return kept


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(None, None), (1, None), (2, None), (9, None), (None, 0.1), (None, 0.65), (None, 0.95)],
)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_sample_draws_from_the_renormalized_support(top_k, top_p, temperature):
    generator, n = torch.Generator().manual_seed(0), 20_000
    logits = torch.tensor(PROBABILITIES).log() + 3.0  # any shift is the same distribution
    drawn = sample(logits.repeat(n, 1), temperature, top_k, top_p, generator).view(n, 2)
    for row, probabilities in enumerate(PROBABILITIES):
        powers = [p ** (1 / temperature) for p in probabilities]
        tempered = [p / sum(powers) for p in powers]
        support = naive_support(tempered, top_k, top_p)
        counts = Counter(drawn[:, row].tolist())
        assert set(counts) == set(support)
        for token in support:
            expected = tempered[token] / sum(tempered[t] for t in support)
            assert counts[token] / n == pytest.approx(expected, abs=0.02)


def test_sampling_at_its_limits():
    assert sample(torch.tensor(PROBABILITIES).log(), temperature=0).tolist() == [1, 0]
    with pytest.raises(AssertionError, match="prompt is empty"):
        decoder(ffn="dense").generate(tokens(1, 0), 1)


# --- sizes ---


@pytest.mark.parametrize("ffn", LAYERS)
def test_a_model_on_the_meta_device_has_the_same_sizes_and_no_numbers(ffn):
    model = decoder(ffn=ffn, n_kv_head=2)
    with torch.device("meta"):
        shapes = Decoder(model.config)
    sizes = model.sizes()
    assert sizes["total"] == sum(p.numel() for p in model.parameters())
    assert sizes["table"] == sum(p.numel() for p in model.tables.parameters())
    assert shapes.sizes() == sizes and all(p.is_meta for p in shapes.parameters())


def test_active_parameters_by_hand():
    """vocab_size 23, n_embd 32, 4 heads of which 2 have keys, d_ff 48, 3 layers. FLOPs: see
    test_baselines.py."""

    def active(**options) -> int:
        return Decoder(ModelConfig(**TINY, n_kv_head=2, **options)).sizes()["active"]

    attention, ffn, norms = 32 * (32 + 16 + 16) + 32 * 32, 3 * 32 * 48, (2 * 3 + 1) * 32
    dense = 3 * (attention + ffn) + norms + 23 * 32 + 32  # the head, a row of the embedding
    assert active(ffn="dense") == dense
    assert active(stem_layers="1") == dense - 32 * 48 + 48
    assert active(ffn="embformer") == 23 * 32 + 3 * (16 + 16 + 32)


# --- initial weights ---


def test_initial_weights_have_the_documented_spread():
    torch.manual_seed(0)
    model = Decoder(ModelConfig(vocab_size=200, n_layer=8, n_embd=96, init_std=0.03, table_std=0.5))
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            assert (weight == 1).all(), name
            continue
        writes = name.endswith(("attn.out.weight", "ffn.down.weight"))
        expected = 0.5 if name.startswith("tables.") else 0.03 / 4 if writes else 0.03
        assert weight.std().item() == pytest.approx(expected, rel=0.05), name


def test_weights_by_columns_are_the_same_weights():
    model, ids = decoder(ffn="stem"), tokens(2, 9)
    before = model(ids)[0]
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.use_column_major_weights()
    torch.testing.assert_close(model(ids)[0], before)
    assert_same(dict(model.state_dict()), weights)
    assert model.blocks[0].ffn.gate.weight.stride() == (1, 48)
