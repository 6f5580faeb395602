"""Edits between names of unequal length: which rows each token of the source reads."""

from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from conftest import CPU, ROOT, command, flags, refused, small_run
from naive import decoder

from lab.edits import CONTROLS, Asked, answered_after_edit
from tables.extra import mean_rows
from text import bpe
from text.tokenizer import encode
from training.checkpoints import load_model
from training.edits import align, edited_ids, spellings

HOW = ("copy", "pad", "subset", "average")


@pytest.mark.parametrize(
    ("how", "target", "n", "expected"),
    [  # copying: test_stem.py; letters stand for ids: x is rarer than a, and _ is padding
        ("pad", b"ab", 4, b"__ab"),
        ("pad", b"abc", 2, b"bc"),
        ("subset", b"ab", 4, b"abab"),
        ("subset", b"xayb", 2, b"xy"),  # in their order
        ("subset", b"xaxb", 2, b"xx"),  # a token twice
        ("subset", b"axaab", 3, b"xab"),  # the common one twice: the rare ones stay
        ("subset", b"ababa", 4, b"baba"),
        ("subset", b"xax", 1, b"x"),
        ("average", b"m", 3, b"mmm"),  # m: a token that has the mean row
    ],
)
def test_alignments_by_hand(how, target, n, expected):
    assert bytes(align([*target], n, how, pad=ord("_"))) == expected


# --- edit.py ---


def test_a_name_is_found_with_and_without_a_space():
    texts = ["Chad is here. In Chad we meet.", "New Zealand is there. In New Zealand."] * 20
    encoding = bpe.train(texts, 400)
    ids = encoding.encode_ordinary("Chad and Chad")
    spaced, bare = spellings(encoding, "New Zealand")
    assert spellings(encoding, " New Zealand") == [spaced, bare]
    found = edited_ids(encoding, ids, "Chad", spellings(encoding, "New Zealand"))
    assert found == [bare[-1], *ids[1:-1], spaced[-1]]
    found = edited_ids(encoding, ids, "Chad", [[900], [901]], "average")
    assert found == [901, *ids[1:-1], 900]


@pytest.mark.parametrize("how", HOW)
def test_a_space_that_is_its_own_token_keeps_its_rows(how):
    """Of names of any length."""
    encoding = bpe.train(["云岭县的市长在海湾。" for _ in range(20)], 260)
    ids = encoding.encode_ordinary("名称： 云岭县")
    for target in ("海湾", "云岭县在海湾", "海"):
        found = edited_ids(encoding, ids, "云岭县", spellings(encoding, target), how)
        n = len(encoding.encode_ordinary("云岭县"))
        assert found[:-n] == ids[:-n]
        expected = align(encoding.encode_ordinary(target), n, how, encoding.eot_token)
        assert found[-n:] == expected


@pytest.mark.parametrize(
    ("settings", "how"),
    [
        *(({}, how) for how in HOW),
        ({"table_dtype": "bfloat16"}, "average"),
        ({"offload": "disk"}, "copy"),
    ],
)
def test_rows_that_are_saved_are_those_of_the_target(data, tmp_path, settings, how, monkeypatch):
    """None is rounded where the model decodes in bfloat16, and everyday words, here the first token
    of a longer name, keep their own."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("training.edits.own_tokens", lambda _, __, name: name[1:] or name)
    out = small_run(data, tmp_path / "a run", max_iters=2, n_layer=3, **settings)
    model, encoding, _ = load_model(out / "ckpt.pt", CPU)
    prompt = "Anna sees Björn"
    for source, target in (("Anna", "Björn at the river"), ("Anna sees", "x"), ("Anna", "x")):
        given = flags(source=source, target=target, prompt=prompt, align=how)
        given += flags(dtype="bfloat16", max_new_tokens=1)
        saved = tmp_path / f"{source} to {target}" / "ckpt.pt"
        said = command("edit.py --ckpt", out / "ckpt.pt", *given, "--save", saved).stdout
        assert f"\nto undo it: python edit.py --undo --ckpt '{saved}'\n" in said
        name, other = encoding.encode_ordinary(source), encoding.encode_ordinary(target)
        is_part = len(other) > len(name) and how != "average"
        assert said.startswith(f"of {target!r}, only the rows of ") == is_part
        own_tokens = name[1:] or name
        assert ("stay as they are\n" in said) == (own_tokens != name)
        edited, _, _ = load_model(saved, CPU)
        # For each token of the source those of the target whose rows it reads the mean of.
        reading = [other] * len(name)
        if how != "average":
            reading = [[token] for token in align(other, len(name), how, encoding.eot_token)]
        for rows, own in zip(edited.tables.weight, model.tables.weight, strict=True):
            expected = own.clone()
            for token, read in zip(name, reading, strict=True):
                if token in own_tokens:  # rounded, where tables are bfloat16
                    expected[token] = own[read].float().mean(0)
            assert torch.equal(rows, expected)


def test_a_wrong_alignment_is_one_line(stem_ckpt, tmp_path):
    save = ("--save", tmp_path / "new.pt", "--ckpt", stem_ckpt, "--max_new_tokens", 1)
    for target in ("AB", "QB"):  # two other rows for one token, or its own and another
        why = refused(f"edit.py --source QQ --prompt QQ --target {target}", *save)
        assert "twice cannot have two rows" in why and "--align average" in why
    command("edit.py --source QQ --prompt QQ --target AB --align average", *save)  # both one row
    assert "needs a --target" in refused("edit.py --source Anna --write x --align pad")


# --- how they are measured ---


@pytest.mark.parametrize("how", [*HOW, *CONTROLS])
def test_pairs_are_asked_under_their_own_rows_and_tables_stay(encoding, how):
    """Answers are what the model says after that very edit, or something else. In a control, ids
    and the ids of rows change places."""
    model = decoder(vocab_size=encoding.n_vocab)
    tables = model.tables
    pairs = []
    for source, target in permutations(("Anna", "Björn at", "QQQ the river"), 2):
        ids = encode(encoding, f"Then {source}")
        targets = spellings(encoding, target)
        if how == "average":
            model.tables = mean_rows(tables, targets)
            targets = [[mean] for mean in model.tables.ids]
        read = torch.tensor([edited_ids(encoding, ids, source, targets, how)])
        given = torch.tensor([ids])
        if how in CONTROLS:
            given, read = read, given
        said = model(given, table_ids=read)[0][0, -1].argmax().item()
        model.tables = tables
        said = (said + len(pairs) % 2) % encoding.n_vocab  # every second one is wrong
        answers = [[(said + 2) % encoding.n_vocab], [said]]  # the source's, the target's
        if how == "own fact":
            answers.reverse()
        about = zip((source, target), answers, strict=True)
        pairs.append([Asked(SimpleNamespace(name=name), 1, ids, said) for name, said in about])
    assert answered_after_edit(model, encoding, pairs, how).tolist() == [True, False] * 3
    assert model.tables is tables
