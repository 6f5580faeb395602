"""Which layers have a table, which rows an edit reads. The whole model: test_attention.py."""

import pytest
import torch
from naive import decoder, naive_greedy

from model import ModelConfig
from stem import substitute

PARIS = 7
ROME = 9


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
        ("abcde", "bcd", "xy", "axxye"),  # longer source: first row repeats
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


# --- editing: a decoder that reads other tokens' rows ---


def test_generation_reads_the_prompt_under_table_ids_and_new_tokens_under_their_own():
    model = decoder(stem_layers="all")
    ids = torch.tensor([[1, 2, PARIS], [PARIS, 5, 1]])
    table_ids = substitute(ids, [PARIS], [ROME])
    new = model.generate(ids, 25, temperature=0, table_ids=table_ids)
    assert torch.equal(new, naive_greedy(model, ids, 25, table_ids))
    assert not torch.equal(new, model.generate(ids, 25, temperature=0))
