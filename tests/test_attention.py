"""Whole decoders, of all kinds of attention, against one that weighs all T x T pairs of tokens."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import Largest, config_source, refused, small_run
from naive import SIZES, decoder, naive_logits, tokens
from torch.testing import assert_close

from model import rotary
from relatives import linear
from training.decoding import norm_keys

PATTERNS = ("full", "previous:1,window:5,window:3", "linear,full")
SLOW = [8.0, 1.0, 4.0, 32]
KINDS = {
    "embformer": dict(),
    "embformer, the note's": dict(embformer_act="identity", n_kv_head=2, norm_eps=1e-3),
    "dense": dict(tie_head=False, n_kv_head=2, norm_eps=1e-3),
    "dense, wide heads": dict(n_kv_head=2, head_dim=12),
    "dense, slow": dict(tie_head=True, n_kv_head=1, rope_base=50.0, rope_scaling=SLOW),
    "stem": dict(stem_layers="0,2"),
    "value": dict(n_kv_head=2),
    "value, gate": dict(n_kv_head=2, value_gate=True),
    "engram": dict(ngram_rows=50, stem_layers="0,2"),
    "engram, in the FFN": dict(
        ngram_rows=50, stem_layers="0,2", engram_table="one", engram_place="ffn"
    ),
    "bigram": dict(ngram_rows=50, table_std=0.5),
    "bank": dict(n_kv_head=2),
    "memory": dict(),
    "stem_ngrams": dict(ngram_rows=50),
}


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    """Also in texts as short as these."""
    monkeypatch.setattr(linear, "CHUNK", 4)


def documents_of(ids: torch.Tensor) -> torch.Tensor:
    """Some numbers of documents that change now and then."""
    return (ids < 3).cumsum(1)


@pytest.mark.parametrize(
    ("kind", "attention", "n", "masked"),
    [
        *itertools.product(KINDS, PATTERNS[:2], [19], [True]),
        *itertools.product(["embformer", "dense"], PATTERNS, [4, 19], [False]),
        *itertools.product(["embformer", "dense"], PATTERNS[2:], [19], [True]),
        *itertools.product(["engram", "bigram"], PATTERNS[:1], [19], [False]),
        ("embformer", "previous:2", 19, True),
        *itertools.product(["dense, wide heads", "stem"], ["qknorm,qkvbias"], [19], [True]),
        *itertools.product(SIZES, ["full"], [19], [True]),  # of which attention knows nothing
    ],
)
def test_logits_and_gradients_equal_those_of_a_naive_decoder(kind, attention, n, masked):
    options = {**KINDS, **SIZES}[kind]
    model = decoder(ffn=kind.split(",")[0], attention=attention, **options).double()
    model.requires_grad_()  # rows, too: ordinary parameters, not rounded to float32
    weights = {}
    for name, weight in model.state_dict().items():
        weights[name] = weight.detach().clone()
        weights[name].requires_grad_(weight.is_floating_point())
    ids = tokens(2, n)
    table_ids = ids.clone()
    table_ids[:, 1::3] = 7  # an edit
    documents = torch.zeros(2, n)
    if masked:
        documents = documents_of(tokens(2, n, seed=3))
    expected = []
    for sequence in zip(ids, table_ids, documents, strict=True):
        expected.append(naive_logits(model.config, weights, *sequence))
    expected = torch.stack(expected)
    logits, _ = model(ids, table_ids=table_ids, documents=documents if masked else None)
    has_float32 = "linear" in attention or kind == "pkm"  # sums of features, scores
    close = dict(rtol=1e-5, atol=1e-5) if has_float32 else dict(rtol=1e-10, atol=1e-10)
    assert_close(logits, expected, **close)
    logits.sin().sum().backward()
    expected.sin().sum().backward()
    for name, weight in model.named_parameters():
        assert_close(weight.grad, weights[name].grad, **close)


@pytest.mark.parametrize(
    ("attention", "dtype"),  # of tables
    [*((attention, torch.float32) for attention in PATTERNS), ("full", torch.bfloat16)],
)
def test_embformer_writes_the_same_from_ids_alone(attention, dtype):
    """To the bit, also under an edit, beyond the context of 32, and from keys normed before; but a
    state of linear attention is summed up in other chunks. Other caches: test_relatives.py."""
    model = decoder(ffn="embformer", attention=attention, n_kv_head=2)
    model.tables.to(dtype)
    ids, table_ids = tokens(2, 3, 29)
    kept, nothing = (model.make_cache(3, kind=kind) for kind in ("kv", "ids"))

    def logits(cache):
        cache.length = 0
        parts = zip(*(each.split([9, 1, 5, 14], 1) for each in (ids, table_ids)), strict=True)
        made = [model(part, table_ids=under, cache=cache)[0] for part, under in parts]
        return torch.cat(made, dim=1)

    options = dict(seed=1, table_ids=table_ids)
    written = model.generate(ids, 25, **options)
    expected = logits(kept)
    found = [logits(nothing)]
    norm_keys(model)
    found.append(logits(nothing))
    close = 1e-5 if attention == "linear,full" else 0
    assert_close(found, [expected] * 2, rtol=close, atol=close)
    for kind in ("kv", "ids"):
        assert torch.equal(model.generate(ids, 25, cache=kind, **options), written)
    assert nothing.layers == [None] * 3
    if "window" in attention:
        assert [layer.k.shape[2] for layer in kept.layers] == [32, 4, 2]


def test_a_variant_of_embformer_whose_values_depend_on_x_keeps_them(data, tmp_path, add_relative):
    """It would write other text from ids alone."""
    add_relative("mine", config_source("embedding_only = True"))
    with pytest.raises(AssertionError, match="in Embformer alone"):
        decoder(ffn="mine").make_cache(2, kind="ids")
    out = small_run(data, tmp_path / "out", ffn="mine", max_iters=1)
    assert "is not an Embformer" in refused("sample.py --cache ids --ckpt", out)


@pytest.mark.parametrize(("attention", "growth"), [("window:4", 2), ("full", 4)])
def test_no_tensor_of_a_step_grows_with_the_square_of_the_length(attention, growth):
    """Of full attention inside documents some do, so that the test can see them."""
    shape = dict(block_size=256, n_layer=1, n_embd=8)  # heads of one pair of channels
    model = decoder(ffn="embformer", attention=attention, **shape)
    most = []
    for n in (128, 256):
        ids = tokens(1, n)
        with Largest() as largest:
            _, loss = model(ids, ids, documents=documents_of(ids))
            loss.backward()
        most.append(largest.numbers)
    assert most[1] / most[0] == pytest.approx(growth, rel=0.1)


def test_a_window_longer_than_the_text_costs_what_the_text_does():
    """As Mistral's 4,096 in a small context; what it gives is that of full attention."""
    ids = tokens(2, 31)
    losses, most = [], []
    for attention in ("full", "window:999"):
        with Largest() as largest:
            _, loss = decoder(attention=attention)(ids, ids, documents=documents_of(ids))
        losses.append(loss)
        most.append(largest.numbers)
    assert_close(losses[1], losses[0])
    assert most[1] == most[0]


def test_the_kernels_of_macs_get_what_they_read_rightly(monkeypatch):
    """In PyTorch 2.8 to 2.11, they take strided heads of several texts for contiguous ones: issues
    163597, 170837 and 181133."""

    class OnMac(torch.Tensor):
        device = torch.device("mps")

    def is_all_contiguous(*qkv, **options):
        assert all(heads.is_contiguous() for heads in qkv)
        return qkv[0]

    monkeypatch.setattr(F, "scaled_dot_product_attention", is_all_contiguous)
    q, k, v = torch.ones(2, 3, 12, 8).as_subclass(OnMac).transpose(1, 2).split(4, dim=1)
    decoder().blocks[0].attn.attend(q, k, v, None)


@pytest.mark.parametrize("attention", PATTERNS[:-1])
def test_no_pass_waits_for_the_device(attention):
    """Ids and documents are on the CPU, all else on the meta device, whose numbers nobody can ask
    for, and on which linear attention, as it turns autocast off, does not run."""
    with torch.device("meta"):
        model = decoder(ffn="embformer", attention=attention).train()
    ids = tokens(2, 24)
    logits, _ = model(ids, documents=documents_of(ids))
    assert logits.is_meta and logits.shape == (2, 24, 23)
    logits.sum().backward()


def test_features_that_round_to_zero_give_zeros():
    """In float32, elu(x) + 1 is 0 below -17.3. The authors' code adds to the denominator."""
    model = decoder(ffn="dense", attention="linear")
    attention = model.blocks[0].attn
    attention.qkv.qkv.weight.data.fill_(-1.0)
    x = torch.ones(1, 5, 32, requires_grad=True)
    y = attention(x, None, rotary(5, model.config, x), torch.zeros(1, 5))
    assert torch.equal(y, torch.zeros(1, 5, 32))
    y.sum().backward()
    assert x.grad.isfinite().all()
