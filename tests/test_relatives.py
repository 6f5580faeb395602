"""What every kind of layer and of attention must hold, those that you add to relatives/ included:
`python -m pytest tests/test_relatives.py -k NAME`. And what is special about some; their formulas:
test_attention.py. FLOPs: test_costs.py."""

import collections
import copy
import random
from functools import partial

import pytest
import torch
from conftest import config_source, refused, user_error
from naive import LAYERS, SIZES, TINY, decoder, tokens
from torch.utils.checkpoint import checkpoint

from model import Decoder, ModelConfig, decoder_class, relatives
from relatives import linear
from training.decoding import cast_backbone
from training.objectives import NextToken
from training.optimizer import Optimizer
from training.report import model_sizes
from training.settings import Settings

ARGUMENTS = {"window": ":3", "previous": ":2"}  # of kinds of attention that need one


@pytest.fixture(params=[*LAYERS, *relatives("Attention")])
def model(request) -> Decoder:
    """A tiny decoder of a kind, with its default flags, that has seen a batch."""
    name = request.param
    kind = {"ffn": name}
    if name in relatives("Attention"):
        kind = {"ffn": "stem", "attention": name + ARGUMENTS.get(name, "")}
    made = decoder(**kind).train()
    ids = tokens(2, 30, seed=2)
    made(ids, ids)
    return made.double().eval()  # in float32, rounding would hide small faults


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)  # some sums are float32


def test_with_a_cache_logits_are_those_of_the_whole_text(model, monkeypatch):
    """Also under an edit, and in a cache that begins again."""
    monkeypatch.setattr(linear, "CHUNK", 4)
    ids, table_ids = tokens(2, 2, 29)
    cache = model.make_cache(2)
    for _ in range(2):
        cache.length = 0
        made = []
        steps = (each.split([3, 1, 1, 9, 1, 14], dim=1) for each in (ids, table_ids))
        for part, under in zip(*steps, strict=True):
            made.append(model(part, table_ids=under, cache=cache)[0])
        assert_close(torch.cat(made, dim=1), model(ids, table_ids=table_ids)[0])


def test_tokens_that_are_taken_back_leave_nothing_or_cannot_be(model):
    """As in speculative decoding. Kinds of attention may refuse, kinds of layers may not."""
    ids = tokens(2, 12)
    cache = model.make_cache(2)
    model(torch.cat((ids[:, :8], tokens(2, 2, seed=5)), dim=1), cache=cache)
    cache.length = 8
    try:
        logits, _ = model(ids[:, 8:], cache=cache)
    except AssertionError as error:
        assert "2 tokens were taken back" in str(error) and model.config.attention != "full"
    else:
        assert_close(logits, model(ids)[0][:, 8:])
    cache.length = 20
    with pytest.raises(AssertionError, match="length 20"):
        model(ids[:, :1], cache=cache)


def test_logits_depend_on_no_later_token_and_on_no_other_text(model):
    ids = tokens(3, 29)
    for n in (1, 10, 28):
        other = tokens(3, 29, seed=3)
        other[1, :n] = ids[1, :n]  # others stand before and after it
        assert_close(model(other)[0][1, :n], model(ids)[0][1, :n])


def test_a_document_has_the_logits_that_it_has_alone(model):
    """Numbers of documents need not begin at 0, nor rise by 1."""
    ids = tokens(2, 29)
    documents = torch.full((2, 29), -1)
    documents[:, 12:] = 5
    documents[:, 13:] = 7
    logits, _ = model(ids, documents=documents)
    for part in (slice(12), slice(12, 13), slice(13, 29)):
        assert_close(logits[:, part], model(ids[:, part])[0])


def test_hashes_give_every_expert_of_a_segment_equally_many_ids():
    ffn = decoder(ffn="hash_moe", vocab_size=100, n_expert=12, top_k=3).blocks[0].ffn
    assert torch.equal(ffn.hashes // 4, torch.arange(3).expand(100, 3))
    assert ffn.hashes.flatten().bincount().tolist() == [25] * 12
    assert len(set(map(tuple, ffn.hashes.tolist()))) > 30  # segments have hashes of their own


def test_experts_can_be_copied_between_steps():
    model, ids = decoder(ffn="moe").train(), tokens(2, 9)
    model(ids, ids)[1].backward()
    assert torch.equal(copy.deepcopy(model)(ids, ids)[1], model(ids, ids)[1])
    model(ids)[0].sum().backward()  # a loss of one's own leaves the graph of the routers' losses
    assert torch.equal(copy.deepcopy(model)(ids, ids)[1], model(ids, ids)[1])


@pytest.mark.parametrize("ffn", ["moe", "hash_moe"])
def test_experts_refuse_layers_that_they_would_not_call(ffn):
    """As LoRA's, which have the weight of what they wrap."""

    class Wrapper(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model, ids = decoder(ffn=ffn), tokens(2, 9)
    before = model(ids)[0]
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].ffn.up)  # which they read
    assert_close(model(ids)[0], before)
    model.blocks[0].ffn.gate = Wrapper(1, 1)
    with pytest.raises(AssertionError, match="they call no Wrapper"):
        model(ids)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of checkpoint
@pytest.mark.parametrize("reentrant", [False, True])
def test_losses_of_routers_keep_their_gradients_or_say_that_they_cannot(reentrant):
    model, ids = decoder(ffn="moe", balance=1.0).train(), tokens(2, 9)
    model(ids, ids)[1].backward()
    expected = [block.ffn.router.weight.grad for block in model.blocks]
    model = decoder(ffn="moe", balance=1.0).train()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    if reentrant:
        with pytest.raises(AssertionError, match="use_reentrant=False"):
            model(ids, ids)
        model.eval()(ids, ids)
    else:
        model(ids, ids)[1].backward()
        assert_close([block.ffn.router.weight.grad for block in model.blocks], expected)
        with torch.no_grad():
            model(ids, ids)


@pytest.mark.parametrize("ffn", ["stem", "embformer", "moe", "engram"])
def test_gradients_in_double_precision_are_those_of_differences(ffn):
    model, ids = decoder(ffn=ffn).double().train(), tokens(1, 9)
    weight, at = model.blocks[1].attn_norm.weight, 3
    if model.config.embedding_only:
        weight, at = model.wte.weight, (5, 3)
    model(ids, ids)[1].backward()
    found = [(weight, at, weight.grad[at])]
    if len(model.tables.weight):
        read, grads = model.tables.gradients()
        found.append((model.tables.weight[0], (read[0], 3), grads[0][0, 3]))
    for numbers, at, grad in found:
        losses = []
        for step in (1e-6, -2e-6):
            numbers.data[at] += step
            losses.append(model(ids, ids)[1].item())
        torch.testing.assert_close(
            (losses[0] - losses[1]) / 2e-6, grad.item(), rtol=1e-5, atol=1e-9
        )


@pytest.mark.parametrize("ffn", ["dense", "engram", "stem_ngrams"])
def test_ids_of_32_bits_are_the_same_ids(ffn):
    model, ids = decoder(ffn=ffn), tokens(2, 9)
    assert torch.equal(model(ids.int())[0], model(ids)[0])
    assert torch.equal(model(ids.int(), ids.int())[1], model.train()(ids, ids)[1])


def test_rows_of_ngrams_are_found_with_any_numpy():
    """No checkpoint has the multipliers, and NumPy may draw other numbers some day."""
    model = decoder(ffn="engram", vocab_size=6400)
    assert model.multipliers == [1186504322096035, 74936406537285, 556768101479525]


@pytest.mark.parametrize("attention", ["full", "qknorm"])
def test_gates_of_values_begin_at_one(attention):
    """Also in a layer that another kind of attention has wrapped."""
    config_class = decoder_class("value").config_class
    config = config_class(**TINY, ffn="value", value_gate=True, attention=attention)
    weights = decoder_class("value")(config).state_dict()
    gates = [weight for name, weight in weights.items() if name.endswith("qkv.gate.weight")]
    assert gates and not torch.stack(gates).any()


# --- counts ---


def test_counts_give_the_mean_of_the_heads_rows_of_what_followed():
    model = decoder(ffn="count", ngram_rows=999, n_next=3, vocab_size=4).train()
    followed = collections.defaultdict(collections.Counter)
    rng = random.Random(0)
    for _ in range(100):  # texts without 0, which stands before them
        a, b, c = rng.choices((1, 2, 3), (1, 2, 4), k=3)
        followed[0, a][b] += 1
        followed[a, b][c] += 1
        ids = torch.tensor([[a, b, c]])
        model(ids, ids)
    ids = torch.tensor([[3, 2, 2, 3]])
    (rows,) = next(model.layer_rows(model.addresses(ids, 4)))  # [4, 32]
    for pair, row in zip([(0, 3), (3, 2), (2, 2), (2, 3)], rows, strict=True):
        mean = sum(n * model.head_weight[after] for after, n in followed[pair].items())
        torch.testing.assert_close(row, mean / followed[pair].total())


def test_counts_of_training_keep_the_tokens_that_follow_most_often():
    model = decoder(ffn="count", n_next=2)
    for mode, texts in ((model.eval, [9, 9, 9]), (model.train, [5, 6, 5, 7, 5, 8, 5, 9])):
        mode()
        for after in texts:
            ids = torch.tensor([[3, 4, after]] * 3)
            model(ids, ids)
    pair = model.addresses(ids, 2)[0, 0]
    assert sorted(model.next[pair][0].tolist()) == [5, 9]


# --- the loss that balances the router ---


def test_balance_is_its_formula_and_reaches_the_loss_in_training_only():
    model = decoder(ffn="moe", balance=0.1, **SIZES["moe"])
    ids, targets = torch.randint(23, (2, 2, 9))
    inputs = []
    for block in model.blocks:
        block.ffn.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    objective = NextToken(model, "float32")
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
        with torch.device("meta"):
            model = decoder(ffn=ffn, n_head=8, n_embd=n_embd, d_ff=None)
        flops[ffn] = model_sizes(model)["flops_per_token"]
    exact = kind in ("hash_moe", "deepembed", "ple", "stem_additive")  # no router, nothing to round
    assert flops[kind] == pytest.approx(flops["dense"], rel=0 if exact else 0.02)


def test_values_of_product_keys_that_nobody_chose_do_not_decay():
    model = decoder(ffn="pkm", n_key=9, top_k=3).train()
    values = [block.ffn.values.weight for block in model.blocks]
    before = [weight.detach().clone() for weight in values]
    optimizer = Optimizer(model, Settings(model=model.config, weight_decay=0.5))
    model(*torch.randint(23, (2, 1, 3)))[1].backward()
    chosen = [weight.grad.abs().sum(1) > 0 for weight in values]
    optimizer.step(fraction=1.0)
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


@pytest.mark.parametrize("name", ["stem", "full"])
def test_no_file_has_the_name_of_what_is_built_in(name, add_relative):
    config = ModelConfig(9, 8, 2, 2, 8)
    Decoder(config)
    add_relative(name, "")
    with user_error(f"relatives/{name}.py: {name} is built in"):
        Decoder(config)


def test_a_config_whose_fields_python_does_not_make_is_refused(add_relative):
    """Its flags would not be known, and `config.gated` would be a Field, which counts as true."""
    source = config_source('gated: bool = flag(False, "whether there is a gate")')
    add_relative("right", source)
    assert decoder_class("right").config_class().gated is False
    add_relative("wrong", source.replace("@dataclass\n", ""))
    with user_error(r"relatives/wrong.py: class Config needs @dataclass"):
        decoder_class("wrong")


def test_what_is_forgotten_in_a_class_is_named(add_relative):
    class Forgetful(ModelConfig):
        def __post_init__(self):
            self.d_ff = 8

    with pytest.raises(AssertionError, match="__post_init__ does not call super"):
        Decoder(Forgetful(9, d_ff=8))
    model = decoder(n_layer=2)
    model.blocks[1].ffn.down = torch.nn.Linear(model.config.d_ff, 1)  # would be broadcast
    with pytest.raises(AssertionError, match=r"StemFFN gives \[2, 5, 1\], not \[2, 5, 32\]"):
        model(tokens(2, 5))


def test_a_config_that_a_relative_makes_wrong_is_refused_before_training(
    data, tmp_path, add_relative
):
    begins = "def __post_init__(self): super().__post_init__(); self.rank = self.n_embd / 4"
    add_relative("wrong", config_source('rank: int | None = flag(None, "rank")', begins))
    said = refused("train.py --ffn wrong --data_dir", data, "--out_dir", tmp_path / "out")
    assert "--rank 32.0 is not of type int" in said and not (tmp_path / "out").exists()


def test_a_misspelled_name_trains_no_stem(add_relative):
    source = "import model, stem\n\nclass Decoder(model.Decoder):\n    row_fnn = stem.StemFFN\n"
    add_relative("wrong", source)
    with user_error("relatives/wrong.py: row_fnn of its Decoder replace nothing"):
        decoder_class("wrong")
    more = "\n    def __init__(self, *args):\n        super().__init__(*args)\n"
    add_relative("begun", source + more)  # there, anything may be replaced
    decoder_class("begun")
    add_relative("none", source.replace("class Decoder(", "class Decodr("))
    with user_error(r"relatives/none.py has no line that begins with class Decoder\("):
        decoder_class("none")


def test_a_config_of_another_kind_is_refused():
    moe = decoder_class("moe")
    for made in (
        lambda: Decoder(ModelConfig(ffn="moe")),
        lambda: moe(moe.config_class()),
        lambda: moe(ModelConfig(ffn="moe")),  # which has no n_expert
    ):
        with user_error(r"config_class\(ffn='moe'\)"):
            made()
