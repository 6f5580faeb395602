"""Edits between names of unequal length: which rows each token of the source reads."""

from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from conftest import CPU, assert_same, checkpoint, command, flags, leaves, refused, small_run
from naive import decoder, naive_logits

from edit import edited_ids, spellings
from lab.edits import Asked, answered_after_edit
from model import Decoder, ModelConfig
from stem import align, substitute
from text import bpe
from text.tokenizer import encode
from training.checkpoints import load_model
from training.writing import ExtraRows, mean_rows, rows_of

HOW = ("copy", "pad", "subset", "average")


@pytest.mark.parametrize(
    ("how", "target", "n", "expected"),
    [  # letters stand for ids: x is rarer than a, and _ is padding
        ("copy", "ab", 4, "aaab"),
        ("copy", "abc", 2, "bc"),
        ("pad", "ab", 4, "__ab"),
        ("pad", "abc", 2, "bc"),
        ("subset", "ab", 4, "aaab"),
        ("subset", "xab", 1, "x"),
        ("subset", "xayb", 2, "xy"),  # in their order
        ("subset", "xaxb", 2, "xx"),  # a token twice
        ("subset", "xax", 1, "x"),
        ("average", "m", 3, "mmm"),  # m: a token that has the mean row
        *((how, "xab", 3, "xab") for how in ("copy", "pad", "subset")),
    ],
)
def test_alignments_by_hand(how, target, n, expected):
    found = align([ord(letter) for letter in target], n, how, pad=ord("_"))
    assert "".join(map(chr, found)) == expected


def naive_reading(how, n, target, pad):
    """For each of n tokens the tokens of the target whose rows it reads: the mean of several."""
    more = len(target) - n
    if how == "average":
        return [target] * n
    if how == "subset" and more > 0:
        target = list(target)
        for _ in range(more):
            target.remove(min(target))
        return [[token] for token in target]
    if more >= 0:
        return [[token] for token in target[more:]]
    front = pad if how == "pad" else target[0]
    return [[front]] * -more + [[token] for token in target]


@pytest.mark.parametrize("ffn", ["stem", "embformer"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("source", "target"), [([3], [9, 7, 8]), ([3, 4, 5], [9, 7])])
def test_an_edit_is_naive_substitution(ffn, how, source, target):
    """Each place of the name reads a row that is written out behind the vocabulary."""
    pad = 2
    rows_per_edit = []
    model = decoder(ffn=ffn)
    ids = [1, *source, 6, 3, 10, *source]  # a lone 3 is the name, or its beginning, which is none
    weights = {name: weight.double() for name, weight in model.state_dict().items()}
    read = list(ids)
    for start in range(len(ids) - len(source) + 1):
        if ids[start : start + len(source)] == source:
            for i, tokens in enumerate(naive_reading(how, len(source), target, pad)):
                read[start + i] = model.config.vocab_size + len(rows_per_edit)
                rows_per_edit.append(tokens)
    for table in range(len(model.tables.weight)):
        weight = weights[f"tables.weight.{table}"]
        rows = [weight[tokens].mean(0) for tokens in rows_per_edit]
        weights[f"tables.weight.{table}"] = torch.cat((weight, torch.stack(rows)))
    documents = torch.zeros(len(ids), dtype=torch.long)
    expected = naive_logits(model.config, weights, torch.tensor(ids), torch.tensor(read), documents)

    if how == "average":
        model.tables = mean_rows(model.tables, [target])
        target = model.tables.ids
    given = torch.tensor([ids])
    table_ids = substitute(given, source, align(target, len(source), how, pad))
    found = model(given, table_ids=table_ids)[0][0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


# --- edit.py ---


def test_a_name_is_found_with_and_without_a_space_by_every_alignment():
    texts = ["Chad is here. In Chad we meet.", "New Zealand is there. In New Zealand."] * 20
    encoding = bpe.train(texts, 400)
    ids = encoding.encode_ordinary("Chad and Chad")
    first, last = ids[0], ids[-1]
    assert spellings(encoding, "Chad") == [[last], [first]]
    spaced, bare = spellings(encoding, "New Zealand")
    for how in ("copy", "pad", "subset"):
        kept = max if how == "subset" else lambda tokens: tokens[-1]
        expected = [kept(bare), *ids[1:-1], kept(spaced)]
        assert edited_ids(encoding, ids, "Chad", "New Zealand", how) == expected
    found = edited_ids(encoding, ids, "Chad", "New Zealand", "average", means=[900, 901])
    assert found == [901, *ids[1:-1], 900]
    assert edited_ids(encoding, ids, "Peru", "Mali", "average", means=[900, 901]) == ids


def test_padding_is_the_end_of_a_text_whatever_its_id(trained):
    encoding = load_model(trained["stem"] / "ckpt.pt", CPU)[1]
    other = SimpleNamespace(eot_token=277, encode_ordinary=encoding.encode_ordinary)
    ids = encoding.encode_ordinary("QQ")
    assert len(ids) == 2
    assert edited_ids(other, ids, "QQ", "A", "pad") == [277, *encoding.encode_ordinary("A")]


def leaves_of_model(path) -> dict:
    return leaves(dict(load_model(path, CPU)[0].state_dict()))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("more", [{}, {"table_dtype": "bfloat16"}, {"offload": "disk"}])
def test_what_is_saved_is_what_was_shown_and_undone_to_the_bit(data, tmp_path, how, more):
    out = small_run(data, tmp_path / "a run", max_iters=2, **more)
    model, encoding, _ = load_model(out / "ckpt.pt", CPU)
    before = leaves_of_model(out / "ckpt.pt")
    whole = checkpoint(out)
    prompt = "Anna sees Björn"
    for source, target in (("Anna", "Björn at the river"), ("Anna sees", "river"), ("Anna", "x")):
        given = flags(source=source, target=target, prompt=prompt, align=how)
        saved = tmp_path / f"{source} to {target}" / "ckpt.pt"
        said = command("edit.py --ckpt", out / "ckpt.pt", *given, "--save", saved).stdout
        assert f"\nto undo it: python edit.py --undo --ckpt '{saved}'\n" in said
        name, other = encoding.encode_ordinary(source), encoding.encode_ordinary(target)
        is_part = len(other) > len(name) and how != "average"
        assert said.startswith(f"of {target!r} only the rows of ") == is_part

        edited, _, _ = load_model(saved, CPU)
        reading = naive_reading(how, len(name), other, encoding.eot_token)
        tables = zip(edited.tables.weight, model.tables.weight, strict=True)
        for rows, own in tables:
            expected = own.clone()
            for token, read in zip(name, reading, strict=True):
                expected[token] = own[read].float().mean(0)  # rounded, where tables are bfloat16
            assert torch.equal(rows, expected)
        command("edit.py --undo --ckpt", saved)
        assert_same(leaves_of_model(saved), before)
    if "offload" not in more:
        assert_same(checkpoint(out), whole)


def test_only_an_average_gives_a_token_that_is_there_twice_one_row(trained, tmp_path):
    line = ["edit.py --source QQ --target AB --prompt QQ --ckpt", trained["stem"] / "ckpt.pt"]
    for how in ("copy", "pad", "subset"):
        why = refused(*line, "--align", how, "--save", tmp_path / "new.pt")
        assert "'QQ' has twice" in why and "--align average" in why
    command(*line, "--align", "average", "--save", tmp_path / "new.pt")
    assert (tmp_path / "new.pt").exists()


def test_alignments_are_of_targets(trained):
    line = ["edit.py --source Anna --write x --ckpt", trained["stem"] / "ckpt.pt"]
    assert "--align pad needs a --target" in refused(*line, "--align", "pad")
    assert "--align" in refused("edit.py --source Anna --target Emil --align first")


# --- extra rows, and how they are measured ---


def test_means_stand_behind_the_vocabulary_wherever_tables_are(trained, on_disk):
    for folder in (trained["stem"], on_disk):
        model, _, _ = load_model(folder / "ckpt.pt", CPU)
        tables = model.tables
        extra = mean_rows(tables, [[3], [4, 5, 5]])
        assert isinstance(extra, ExtraRows) and not extra.extra.requires_grad
        found = list(extra.lookup(torch.tensor([[7, *extra.ids]])))
        for rows, own in zip(found, rows_of(tables, [7, 3, 4, 5]).unbind(1), strict=True):
            assert torch.equal(rows[0, :2], own[:2])
            torch.testing.assert_close(rows[0, 2], (own[2] + 2 * own[3]) / 3)


@pytest.mark.parametrize("how", HOW)
def test_pairs_are_asked_under_their_own_rows_and_tables_stay(trained, how):
    """Answers are what the model says after that very edit, or something else."""
    encoding = load_model(trained["stem"] / "ckpt.pt", CPU)[1]
    config = ModelConfig(encoding.n_vocab, 32, 3, 2, 16, table_std=3.0, init_std=0.5)
    model = Decoder(config).eval()
    tables = model.tables
    names = ("Anna", "Björn at", "QQQ the river")
    pairs = []
    for source, target in permutations(names, 2):
        ids = encode(encoding, f"Then {source}")
        means = ()
        if how == "average":
            model.tables = mean_rows(tables, spellings(encoding, target))
            means = model.tables.ids
        read = torch.tensor([edited_ids(encoding, ids, source, target, how, means)])
        said = model(torch.tensor([ids]), table_ids=read)[0][0, -1].argmax().item()
        model.tables = tables
        said = (said + len(pairs) % 2) % encoding.n_vocab  # every second one is wrong
        asked = [Asked(SimpleNamespace(name=name), 1, ids, [said]) for name in (source, target)]
        pairs.append(tuple(asked))
    found = answered_after_edit(model, encoding, pairs, how)
    assert found.tolist() == [True, False] * 3
    assert model.tables is tables
