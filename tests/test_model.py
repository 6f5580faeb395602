"""The decoder: settings, loss, decoding, sampling, sizes. Its forward pass: test_attention.py."""

import math
import re
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import user_error
from naive import LAYERS, decoder, naive_greedy, tokens
from torch import nn
from torch._dynamo.utils import counters
from torch.testing import assert_close

from model import BUILT_IN, Decoder, ModelConfig, SwiGLU, rotary, sample
from relatives.ngrams import primes
from training.report import model_sizes
from training.settings import parse_args

# --- ModelConfig ---


@pytest.mark.parametrize(
    ("line", "message"),
    [
        # As a file may have it: its blocks would be made before any weight is compared.
        ("--n_layer 1000000000", "--n_layer 1000000000 must be from 1 to"),
        ("--n_embd 50", "--n_embd 50 must be a multiple of 2 * n_head, 8"),
        ("--n_head 8 --n_kv_head 3", "--n_head 8 must be a multiple of --n_kv_head 3"),
        ("--ffn embformer --no-tie_head", "--no-tie_head"),
        ("--ffn lstm", "--ffn lstm is not one of dense, stem, embformer, nor of relatives/: bank"),
        ("--dropout 1.0", "--dropout 1.0 must be 0 or more and below 1"),
        ("--table_std inf", "--table_std inf must be 0 or more"),
        ("--init_std inf", "--init_std inf must be a positive number"),
        ("--stem_layers most", "--stem_layers most must be third, half, all or numbers"),
        ("--stem_layers 0,3", "layers from 0 to 2"),
        ("--stem_layers=-1,1", "layers from 0 to 2"),
        ("--attention windows", "--attention windows is not one of full, nor of relatives/: li"),
        ("--attention full,linear:3", "full,linear:3: leave out :3"),
        ("--attention window,full", "window,full: give a number of tokens"),
        ("--attention window:0", "window:0: give a number"),
        ("--n_kv_head 2 --attention full,previous:3", "previous:3: give a number of heads from 1"),
        ("--ffn moe --top_k 5 --n_expert 10", "--top_k 5 must divide --d_ff 48"),
        ("--ffn hash_moe --top_k 3 --n_expert 7", "--top_k 3 must divide --d_ff 48 and --n_exp"),
        ("--ffn pkm --top_k 6 --n_key 5", "--top_k 6 is more than --n_key 5"),
        ("--ffn ple --ple_width 72", "--ple_width 72 leaves nothing of --d_ff 48"),
        ("--ffn moe --balance -1", "--balance -1.0 must be 0 or more"),
        ("--ffn engram --ngram_orders 1,2", "--ngram_orders 1,2 must be numbers from 2 to 9"),
        ("--ffn engram --ngram_heads 3", "--n_embd 32 must be a multiple of 2 orders x 3"),
    ],
)
def test_settings_that_do_not_fit_are_named_with_their_values(line, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", *line.split()])
    with user_error(re.escape(message)):
        decoder(**parse_args(""))


def test_defaults_follow_the_other_fields():
    for ffn, tied, std in (("stem", False, 0.072), ("embformer", True, 0.02)):
        config = ModelConfig(ffn=ffn, n_embd=192, n_head=3)
        found = config.n_kv_head, config.d_ff, config.tie_head, config.init_std
        assert found == (3, 512, tied, std)


# --- the whole forward pass ---


def test_dropout_is_of_the_embedding_of_what_layers_add_and_of_attention(monkeypatch):
    """In training only. Here it puts ones in place of all numbers."""

    def ones(x, p, training, *_):
        return torch.ones_like(x) if training and p == 0.25 else x

    monkeypatch.setattr(F, "dropout", ones)
    model = decoder(ffn="dense", dropout=0.25)
    seen = []
    model.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    ids = tokens(2, 6)
    assert torch.equal(model(ids)[0], decoder(ffn="dense")(ids)[0])
    model.train()(ids)
    assert (seen[1] == 1 + 3 * 2).all()
    q = torch.zeros(2, 4, 512, 8)  # attention alone: equal weights, of which a share is left out
    sums = model.blocks[0].attn.attend(q, q, torch.ones_like(q), None)[:, -1]
    assert sums.std() > 0.003


def test_what_the_decoder_cannot_take_is_an_error():
    """Of other shapes than ids, things would be spread over the batch, or shifted."""
    model = decoder(ffn="dense", block_size=16)
    ids = tokens(4, 8)
    cache = model.make_cache(4)
    model(tokens(4, 14), cache=cache)
    wrongs = [
        (lambda: model(ids[0]), r"ids \[8\] are not \[B, T\]"),
        (lambda: model.generate(ids[0], 2), r"ids \[8\] are not \[B, T\]"),
        (lambda: model(ids.float()), "ids are torch.float32"),
        (lambda: model(ids, ids.float()), "targets are torch.float32"),
        (lambda: model(tokens(1, 17)), "17 tokens: there is room for 16"),
        (lambda: model(ids[:, :3], cache=cache), "17 tokens: there is room for 16"),
        (lambda: model(ids, documents=ids, cache=model.make_cache(4)), "no cache"),
        (lambda: model.generate(ids, 2, temperature=-1.0), "temperature=-1.0"),
        (lambda: model.generate(ids, 2, top_p=0.0), "top_p=0.0"),
        (lambda: model.generate(ids, 2, top_p=90), "top_p=90"),
        (lambda: model.generate(ids, 2, cache="KV"), "cache='KV'"),
    ]
    for name in ("targets", "table_ids", "documents"):
        for other in (ids[:, :1], ids[:1]):
            wrongs.append((partial(model, ids, **{name: other}), "not of the shape of ids"))
    wrongs.append((partial(model.generate, ids, 2, table_ids=tokens(4, 16)), "not of the shape"))
    for use, said in wrongs:
        with pytest.raises(AssertionError, match=said):
            use()


@pytest.mark.parametrize(
    "scaling", [[8.0, 1.0, 4.0], [8.0, 0.0, 4.0, 64.0], [8.0, 1.0, 4.0, math.inf]]
)
def test_rotations_are_slowed_down_by_four_positive_numbers(scaling):
    with user_error("four positive"):
        ModelConfig(9, rope_scaling=scaling)


# --- the loss ---


@pytest.mark.parametrize("kept", [True, False])  # logits, for the backward pass
@pytest.mark.parametrize("chunk", [1, 23 * 4, 23 * 100])  # tokens at a time: 1, 4, all
def test_loss_in_chunks_and_its_gradients_equal_cross_entropy_of_logits(monkeypatch, chunk, kept):
    monkeypatch.setattr("model.CHUNK", chunk)
    if not kept:
        monkeypatch.setattr("model.KEPT", 0)
    model = decoder(ffn="dense")
    ids, targets = tokens(2, 2, 15)
    targets[:, ::5] = torch.tensor([[-1], [-100]])  # any below 0 is none: ours, and PyTorch's
    logits, no_loss = model(ids)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        nothing, loss = model(ids, targets)
    assert any(t.shape[-1:] == (23,) for t in saved) == kept
    assert nothing is None and no_loss is None
    targets = targets.clamp(min=-1)
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    assert_close(loss, plain)
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    grads = torch.autograd.grad(3 * loss, learned)
    wanted = torch.autograd.grad(3 * plain, learned)
    assert_close(grads, wanted, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert model(ids, targets)[1] == loss
        assert model(ids, targets.fill_(-1))[1].isnan()


def test_logits_that_are_computed_again_have_the_same_dropout(monkeypatch):
    model = decoder(ffn="dense")
    model.head = nn.Sequential(nn.Dropout(0.5), model.head)
    grads = []
    for kept in (1 << 26, 0):
        monkeypatch.setattr("model.KEPT", kept)
        torch.manual_seed(3)
        loss = model(*tokens(2, 2, 15))[1]
        grads += torch.autograd.grad(loss, model.head[1].weight)
    assert_close(*grads)


def test_a_sum_of_gradients_that_float16_cannot_hold_is_no_infinity(monkeypatch):
    """4,096 tokens have the same target: their sum, over chunks, is beyond 65,504, their mean is
    19.4."""
    monkeypatch.setattr("model.CHUNK", 23 * 1024)
    model = decoder(ffn="dense")
    weight = torch.nn.init.zeros_(model.head.weight)
    x = torch.full((4096, 32), 20.0)
    targets = torch.zeros(4096, dtype=torch.int64)
    with torch.autocast("cpu", torch.float16):
        loss = model.loss(x, targets)
    grad = torch.autograd.grad(loss, weight)[0]
    expected = torch.autograd.grad(F.cross_entropy(x @ weight.T, targets), weight)[0]
    assert_close(grad, expected, rtol=1e-3, atol=1e-3)


# --- decoding ---


@pytest.mark.parametrize(("ffn", "kind"), [("engram", "kv"), ("embformer", "ids")])
def test_the_next_token_may_be_written_into_the_same_tensor(ffn, kind):
    model = decoder(ffn=ffn).eval()
    caches = [model.make_cache(1, kind=kind) for _ in range(2)]
    same = torch.zeros(1, 1, dtype=torch.int64)
    for token in (5, 9, 11, 3, 9):
        same[0, 0] = token
        mine, other = model(same, cache=caches[0]), model(same.clone(), cache=caches[1])
        assert torch.equal(mine[0], other[0])


@pytest.mark.parametrize(
    ("ffn", "prompt"), [*((ffn, 4) for ffn in (*BUILT_IN, "engram")), ("stem", 16), ("stem", 21)]
)
def test_greedy_generation_equals_an_argmax_loop_without_cache(ffn, prompt):
    """The prompt's rows are those of other tokens. Caches of all kinds: test_relatives.py."""
    model = decoder(ffn=ffn, block_size=16)
    ids, table_ids = tokens(2, 2, prompt)
    new = model.generate(ids, 24, temperature=0, table_ids=table_ids)
    assert torch.equal(new, naive_greedy(model, ids, 24, table_ids))


def test_stop_token_ends_the_batch_and_pads_rows_that_finished_earlier():
    model = decoder(ffn="dense")
    ids = tokens(3, 4)
    stop = 5
    options = dict(temperature=20.0, seed=3)  # nearly uniform: every row meets every token
    free = model.generate(ids, 120, **options)[:, 4:].tolist()
    lengths = [row.index(stop) + 1 for row in free]
    assert len(set(lengths)) == 3
    expected = []
    for row, n in zip(free, lengths, strict=True):
        expected.append(row[:n] + [stop] * (max(lengths) - n))
    assert model.generate(ids, 120, stop=stop, **options)[:, 4:].tolist() == expected


# --- sizes ---


@pytest.mark.parametrize("ffn", LAYERS)
def test_a_model_on_the_meta_device_has_the_same_sizes_and_no_numbers(ffn):
    model = decoder(ffn=ffn, n_kv_head=2)
    with torch.device("meta"):
        shapes = type(model)(model.config)
    sizes = model_sizes(model)
    assert sizes["total"] == sum(p.numel() for p in model.parameters())
    assert sizes["table"] == sum(p.numel() for p in model.tables.parameters())
    assert model_sizes(shapes) == sizes and all(p.is_meta for p in shapes.parameters())


def test_heads_of_ngrams_have_the_sizes_of_the_published_code():
    """Its largest table: five times the vocabulary of DeepSeek-V3."""
    found = primes(5 * 129280, 16)
    assert (found[0], found[7], found[8], found[15]) == (646403, 646523, 646537, 646619)
    assert primes(1, 3) == [1, 1, 1]  # the control: one row a head


def test_every_parameter_of_embformer_is_the_input_embedding_or_a_table():
    """The note's claim about linear layers: test_tour.py."""
    names = {name.split(".")[0] for name in decoder(ffn="embformer").state_dict()}
    assert names == {"wte", "tables"}


# --- initial weights ---


class OfParts(Decoder):
    """Its FFNs are within another module."""

    def row_ffn(self, config):
        parts = nn.Module()
        parts.row_width = config.d_ff
        parts.experts = nn.ModuleList([SwiGLU(config.n_embd, config.d_ff) for _ in range(2)])
        return parts


@pytest.mark.parametrize("kind", [Decoder, OfParts])
def test_initial_weights_have_the_documented_spread(kind):
    torch.manual_seed(0)
    model = kind(ModelConfig(vocab_size=200, n_layer=8, n_embd=96, init_std=0.03, table_std=0.5))
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            assert (weight == 1).all(), name
            continue
        expected = 0.03
        if name.startswith("tables."):
            expected = 0.5
        elif name.endswith(("attn.out.weight", ".down.weight")):
            expected = 0.03 / 4
        assert weight.std().item() == pytest.approx(expected, rel=0.05), name


# --- sampling ---


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4]),
        ({"temperature": 0}, [1]),
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.1}, [1]),
        ({"top_p": 0.65}, [1, 2]),
        ({"top_p": 0.95}, [1, 2, 3, 4]),
    ],
)
def test_sample_draws_from_what_is_kept(limits, kept):
    p = torch.tensor([0.05, 0.4, 0.3, 0.15, 0.1])
    logits = p.log() + 3.0  # any shift is the same distribution
    generator = torch.Generator().manual_seed(0)
    drawn = sample(logits.repeat(20_000, 1), generator=generator, **limits).flatten()
    expected = torch.zeros(5)
    expected[kept] = p[kept] ** (1 / (limits.get("temperature") or 1.0))
    found = drawn.bincount(minlength=5) / 20_000
    assert torch.equal(found > 0, expected > 0)
    assert_close(found, expected / expected.sum(), atol=0.02, rtol=0)
    nan = torch.tensor([[0.0, 1.0, math.nan]])
    overflow = torch.tensor([[0.0, 1.0, torch.inf]])  # at any temperature but 0
    for wrong, at in ((nan, limits), (overflow, {**limits, "temperature": 1.0})):
        with pytest.raises(RuntimeError, match="nan"):
            sample(wrong, **at)


@pytest.mark.parametrize("ffn", ["stem", "embformer"])
def test_compiled_blocks_take_changing_lengths_without_breaks_or_a_graph_for_each(ffn):
    model = decoder(ffn=ffn, n_layer=2, block_size=48)
    batches = [tokens(2, n) for n in (16, 32, 48)]
    plain = [model(ids)[0] for ids in batches]
    torch.compiler.reset()
    counters.clear()
    for block in model.blocks:
        block.compile(backend="eager")
    for ids, expected in zip(batches, plain, strict=True):
        assert_close(model(ids)[0], expected)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 4  # with and without rows; one length, any length


def test_a_model_is_exported_for_texts_of_any_length():
    model = decoder(ffn="stem", n_layer=1, stem_layers="0")
    batch = torch.export.Dim("batch", min=2, max=9)
    sizes = {0: batch, 1: torch.export.Dim("length", min=2, max=32)}
    exported = torch.export.export(model, (tokens(2, 9),), dynamic_shapes=(sizes,)).module()
    for ids in (tokens(3, 32), tokens(5, 4)):
        assert_close(exported(ids)[0], model(ids)[0])


def test_what_stands_in_place_of_the_head_is_called():
    """As adapters do, some of which have no weight of its name."""
    model = decoder(ffn="dense", tie_head=False)
    ids = tokens(2, 6)
    before, loss = model(ids)[0], model(ids, ids)[1]
    model.head = torch.nn.Sequential(model.head)
    model.head.register_forward_hook(lambda head, args, logits: -2 * logits)
    assert_close(model(ids)[0], -2 * before)
    assert model(ids, ids)[1] != loss
    assert_close(model.generate(ids, 1, temperature=0)[:, -1], before[:, -1].argmin(-1))


@pytest.mark.parametrize("ffn", ["stem", "embformer"])
def test_hooks_of_the_embedding_change_it_and_gradients_are_the_slopes(ffn):
    """As causal tracing does, and integrated gradients do. Slopes are only seen in float64."""
    model = decoder(ffn=ffn, n_layer=2).double()
    ids = tokens(2, 6)
    added = torch.zeros(2, 6, model.config.n_embd, dtype=torch.float64)
    seen = []

    def add(wte, args, x):
        seen.append(x)
        return x + added

    def outputs(change):
        nonlocal added
        added = change
        return model(ids)[0], model(ids, ids)[1]

    model.wte.register_forward_hook(add)
    assert torch.autograd.gradcheck(outputs, added.requires_grad_(), fast_mode=True)
    weight = model.state_dict()["wte.weight.0" if ffn == "stem" else "wte.weight"]
    assert_close(seen[0], weight[ids])


def test_a_model_has_the_dtype_that_modules_get_by_default_and_its_loss_float32():
    config = decoder().config
    expected = rotary(300, config, torch.empty(0))
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = decoder(ffn="stem", tie_head=False)
        assert_close(rotary(300, config, model.like), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    ids = tokens(2, 6)
    logits = model(ids)[0]
    assert logits.dtype == torch.bfloat16
    expected = F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
    assert_close(model(ids, ids)[1], expected)
