"""Which layers have a table, which rows an edit reads. The whole model:
test_attention.py; what it writes then: test_model.py."""

import pytest
import torch

from model import ModelConfig
from stem import substitute


@pytest.mark.parametrize(
    ("spec", "n_layer", "layers"), [("third", 8, "147"), ("all", 4, "123"), ("5, 0,5", 6, "05")]
)
def test_stem_layers_reads_names_and_numbers(spec, n_layer, layers):
    config = ModelConfig(stem_layers=spec, n_layer=n_layer)
    assert config.row_layers == [int(layer) for layer in layers]


# --- substitution of ids ---


@pytest.mark.parametrize(
    ("text", "source", "target", "expected"),
    [  # letters stand for ids
        (b"abcd", b"b", b"x", b"axcd"),
        (b"bcabc", b"bc", b"xy", b"xyaxy"),
        (b"abcb", b"bd", b"xy", b"abcb"),  # half a match is none
        (b"aba", b"ab", b"ba", b"baa"),  # what is put in is not matched again
    ],
)
def test_substitute_by_hand(text, source, target, expected):
    given = torch.tensor([[*text], [*text]])
    assert substitute(given, [*source], [*target]).tolist() == [[*expected]] * 2
    assert given[0].tolist() == [*text]  # the caller's stay


@pytest.mark.parametrize(("source", "target"), [(b"", b""), (b"b", b""), (b"bc", b"x")])
def test_names_of_other_lengths_are_not_substituted_in_part(source, target):
    with pytest.raises(ValueError, match="not of one length"):
        substitute(torch.tensor([[*b"abcd"]]), [*source], [*target])
