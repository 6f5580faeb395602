"""Which layers have a table, which rows an edit reads. The whole model:
test_attention.py; what it writes then: test_model.py."""

import pytest
import torch

from model import ModelConfig
from stem import substitute


@pytest.mark.parametrize(
    ("spec", "n_layer", "layers"),
    [
        ("third", 8, "147"),
        ("all", 4, "123"),
        ("5, 0,5", 6, "05"),
    ],
)
def test_stem_layers_reads_names_and_numbers(spec, n_layer, layers):
    config = ModelConfig(stem_layers=spec, n_layer=n_layer)
    assert config.row_layers == [int(layer) for layer in layers]


# --- substitution of ids ---


@pytest.mark.parametrize(
    ("text", "source", "target", "expected"),
    [  # letters stand for ids
        ("abcd", "b", "x", "axcd"),
        ("bcabc", "bc", "xy", "xyaxy"),
        ("abcde", "bcd", "xy", "ayxye"),  # longer source: the target's rows repeat
        ("abcd", "bc", "xyz", "ayzd"),  # longer target: its last rows
        ("abcb", "bd", "xy", "abcb"),  # half a match is none
        ("aba", "ab", "ba", "baa"),  # what is put in is not matched again
    ],
)
def test_substitute_by_hand(text, source, target, expected):
    def ids(letters: str) -> list[int]:
        return [ord(letter) for letter in letters]

    given = torch.tensor([ids(text), ids(text)])
    assert substitute(given, ids(source), ids(target)).tolist() == [ids(expected)] * 2
    assert given[0].tolist() == ids(text)  # the caller's stay
