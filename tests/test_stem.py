"""Checks the STEM layer against its formula, and editing against a model with edited tables."""

import copy

import pytest
import torch
from torch import nn

from baselines import SwiGLU
from common import UserError
from config import stem_layers
from model import Decoder, ModelConfig
from stem import StemFFN, substitute

TINY = dict(vocab_size=23, block_size=16, n_layer=4, n_head=4, n_embd=32, d_ff=48)
PARIS, ROME = 7, 9


def decoder(**options) -> Decoder:
    """A tiny decoder with weights so large, norm scales included, that each of them matters."""
    torch.manual_seed(0)
    model = Decoder(ModelConfig(**TINY, ffn="stem", **options))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


# --- the layer ---


def test_stem_ffn_equals_its_formula_per_token():
    torch.manual_seed(0)
    ffn, table = StemFFN(ModelConfig(**TINY)), torch.randn(23, 48)
    ids, x = torch.randint(23, (2, 5)), torch.randn(2, 5, 32)
    y = ffn(x, table[ids])
    for b in range(2):
        for t in range(5):
            g = ffn.gate.weight @ x[b, t]
            expected = ffn.down.weight @ (g * torch.sigmoid(g) * table[ids[b, t]])
            torch.testing.assert_close(y[b, t], expected)


@pytest.mark.parametrize(
    ("spec", "n_layer", "layers"),
    [
        ("third", 8, [1, 4, 7]),
        ("half", 6, [1, 3, 5]),
        ("all", 4, [1, 2, 3]),
        ("0", 1, [0]),
        ("0,2,5", 6, [0, 2, 5]),
        ("5, 0,5", 6, [0, 5]),
    ],
)
def test_stem_layers_reads_names_and_numbers(spec, n_layer, layers):
    assert stem_layers(spec, n_layer) == layers


@pytest.mark.parametrize(
    ("spec", "n_layer", "message"),
    [
        ("most", 6, "--stem_layers most must be third, half, all or numbers"),
        ("", 6, "must be third"),
        ("1,x", 6, "1,x must be third"),
        ("0,6", 6, "layers from 0 to 5"),
        ("-1", 6, "layers from 0 to 5"),
        ("all", 1, "layers from 0 to 0"),
    ],
)
def test_stem_layers_rejects_what_names_no_layer(spec, n_layer, message):
    with pytest.raises(UserError) as error:
        stem_layers(spec, n_layer)
    assert message in str(error.value)


@pytest.mark.parametrize("spec", ["third", "half", "all", "0,3"])
def test_only_the_chosen_layers_have_a_table(spec):
    model, chosen = decoder(stem_layers=spec), stem_layers(spec, 4)
    for layer, block in enumerate(model.blocks):
        assert type(block.ffn) is (StemFFN if layer in chosen else SwiGLU)
    assert [tuple(weight.shape) for weight in model.tables.weight] == [(23, 48)] * len(chosen)


# --- substitution of ids ---


@pytest.mark.parametrize(
    ("ids", "source", "target", "expected"),
    [
        ([1, 2, 3, 4], [2], [9], [1, 9, 3, 4]),
        ([2, 1, 2, 2], [2], [9], [9, 1, 9, 9]),  # every occurrence, both borders
        ([1, 2, 3, 4], [2, 3], [8, 9], [1, 8, 9, 4]),
        ([2, 3, 1, 2, 3], [2, 3], [8, 9], [8, 9, 1, 8, 9]),
        ([1, 2, 3, 4, 5], [2, 3, 4], [8, 9], [1, 8, 8, 9, 5]),  # longer source: first row repeats
        ([1, 2, 3, 4], [2, 3], [7, 8, 9], [1, 8, 9, 4]),  # longer target: its last rows
        ([1, 2, 3, 4], [2], [7, 8, 9], [1, 9, 3, 4]),
        ([1, 2, 3, 2], [2, 4], [8, 9], [1, 2, 3, 2]),  # half a match is none
        ([1, 2], [1, 2, 3], [7, 8, 9], [1, 2]),  # a source longer than the text
        ([7, 2, 9], [2], [7], [7, 7, 9]),  # what is put in is not matched again
        ([1, 2, 1], [1, 2], [2, 1], [2, 1, 1]),
    ],
)
def test_substitute_by_hand(ids, source, target, expected):
    given = torch.tensor(ids)
    assert substitute(given, source, target).tolist() == expected
    assert substitute(given[None], source, target).tolist() == [expected]
    assert given.tolist() == ids  # the caller's stay


@pytest.mark.parametrize(
    ("align", "target", "expected"),
    [
        ("first", [8, 9], [1, 8, 9, 9, 5]),  # longer source: last row repeats
        ("first", [6, 7, 8, 9], [1, 6, 7, 8, 5]),  # longer target: its first rows
        ("pad", [8, 9], [1, 0, 8, 9, 5]),
        ("pad", [6, 7, 8, 9], [1, 7, 8, 9, 5]),
        *((align, [7, 8, 9], [1, 7, 8, 9, 5]) for align in ("last", "first", "pad")),
    ],
)
def test_names_of_different_length_by_hand(align, target, expected):
    ids = torch.tensor([1, 2, 3, 4, 5])
    assert substitute(ids, [2, 3, 4], target, align, pad=0).tolist() == expected


def test_substitute_treats_rows_of_a_batch_separately():
    ids = torch.tensor([[1, 2, 3], [2, 3, 1], [3, 1, 2]])  # the last row's 2 is no match
    expected = [[1, 8, 9], [8, 9, 1], [3, 1, 2]]
    assert substitute(ids, [2, 3], [8, 9]).tolist() == expected


# --- editing: a decoder that reads other tokens' rows ---


def test_prompts_without_the_source_are_bit_identical():
    model, ids = decoder(), torch.tensor([[1, 2, 3, ROME, 4, 5]])
    assert torch.equal(model(ids, table_ids=substitute(ids, [PARIS], [ROME]))[0], model(ids)[0])


def test_substitution_equals_copying_the_rows_in_the_tables():
    model, ids = decoder(stem_layers="half"), torch.tensor([[1, PARIS, 3, PARIS, 4, ROME]])
    overwritten = copy.deepcopy(model)
    for weight in overwritten.tables.weight:
        weight[PARIS] = weight[ROME]
    edited = model(ids, table_ids=substitute(ids, [PARIS], [ROME]))[0]
    assert torch.equal(edited, overwritten(ids)[0])
    assert not torch.equal(edited, model(ids)[0])


@torch.no_grad()
def test_generation_reads_the_prompt_under_table_ids_and_new_tokens_under_their_own():
    model = decoder(stem_layers="all")
    ids = torch.tensor([[1, 2, PARIS], [PARIS, 5, 1]])
    table_ids = substitute(ids, [PARIS], [ROME])
    new = model.generate(ids, 25, temperature=0, table_ids=table_ids)
    context, tables = ids, table_ids
    for step in range(25):
        if context.shape[1] > 16:  # a full context goes on with its last half
            context, tables = context[:, -8:], tables[:, -8:]
        token = model(context, table_ids=tables)[0][:, -1].argmax(-1, keepdim=True)
        assert torch.equal(token[:, 0], new[:, 3 + step])
        context, tables = torch.cat((context, token), 1), torch.cat((tables, token), 1)
    assert not torch.equal(new, model.generate(ids, 25, temperature=0))


def test_substituting_nothing_is_an_error():
    for source, target in (([], [1]), ([1], [])):
        with pytest.raises(ValueError, match="nothing to substitute"):
            substitute(torch.tensor([1, 2]), source, target)
