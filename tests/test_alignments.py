"""Edits between names of unequal length: which rows each token of the source reads."""

import pytest
import torch
from conftest import CPU, assert_same, checkpoint, command, flags, small_run
from naive import decoder, tokens

from stem import align, substitute
from text.tokenizer import encode
from training.checkpoints import load_model
from training.writing import ExtraRows, rows_of


@pytest.mark.parametrize(
    ("n", "how", "expected"),
    [
        (1, "copy", [13]),
        (2, "pad", [12, 13]),
        (3, "subset", [11, 12, 13]),
        (5, "copy", [11, 11, 11, 12, 13]),
        (5, "pad", [7, 7, 11, 12, 13]),
        (2, "subset", [11, 13]),  # its ends
        (1, "subset", [11]),
        (5, "subset", [11, 11, 12, 13, 13]),  # evenly: 0, 0.5, 1, 1.5, 2, ties to even
    ],
)
def test_alignments_by_hand(n, how, expected):
    found = align([11, 12, 13], n, how, pad=7)
    if how == "subset" and n == 5:  # rounding of halves is Python's
        assert found[0] == 11 and found[2] == 12 and found[4] == 13 and found == sorted(found)
    else:
        assert found == expected
    assert align([11], n, how, pad=7)[-1] == 11


@pytest.mark.parametrize("how", ["copy", "pad", "subset"])
@pytest.mark.parametrize(("source", "target"), [(1, 3), (3, 1), (2, 2), (3, 2)])
def test_equal_lengths_are_the_target_and_all_are_rows_of_it(how, source, target):
    name = list(range(10, 10 + target))
    found = align(name, source, how, pad=0)
    assert len(found) == source and set(found) <= {*name, 0}
    if source == target:
        assert found == name


def test_the_mean_of_rows_is_read_by_every_token_of_the_name():
    model = decoder(stem_layers="all")
    ids = tokens(1, 12)
    ids[(ids == 3) | (ids == 4)] = 8  # they stand in the name alone
    ids[0, 4:6] = torch.tensor([3, 4])
    whole = model.tables
    by_hand = [weight[[5, 6, 7]].mean(0) for weight in whole.weight]
    model.tables = ExtraRows(whole, rows_of(whole, [5, 6, 7]).mean(0, keepdim=True))
    edited = substitute(ids, [3, 4], model.tables.ids)
    found, _ = model(ids, table_ids=edited)
    model.tables = whole
    for weight, mean in zip(whole.weight, by_hand, strict=True):
        weight[[3, 4]] = mean
    wanted, _ = model(ids)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("how", ["copy", "pad", "subset", "average"])
@pytest.mark.parametrize("offload", ["none", "disk"])
def test_what_is_saved_is_what_was_shown_and_undone_to_the_bit(data, tmp_path, how, offload):
    out = small_run(data, tmp_path / "run", offload=offload)
    before = checkpoint(out)
    prompt = "Anna sees Björn"
    given = flags(source="Anna", target="Björn at the river", prompt=prompt, align=how)
    edited = tmp_path / "edited/ckpt.pt"
    said = command("edit.py --ckpt", out / "ckpt.pt", *given, "--save", edited).stdout
    assert f"edit.py --undo --ckpt {edited}" in said
    assert ("note: " in said) == (how != "average")
    model, encoding, _ = load_model(edited, CPU)
    original, _, _ = load_model(out / "ckpt.pt", CPU)
    name = encoding.encode_ordinary("Anna")
    target = encoding.encode_ordinary("Björn at the river")
    for saved, rows in zip(model.tables.weight, original.tables.weight, strict=True):
        if how == "average":
            expected = rows[target].mean(0).expand(len(name), -1)
        else:
            expected = rows[align(target, len(name), how, encoding.eot_token)]
        torch.testing.assert_close(saved[name], expected)
    assert encode(encoding, prompt)[1 : 1 + len(name)] == name
    command("edit.py --undo --ckpt", edited)
    undone, _, _ = load_model(edited, CPU)
    assert_same(dict(undone.state_dict()), dict(original.state_dict()))
    if offload == "none":
        assert_same(checkpoint(out), before)
