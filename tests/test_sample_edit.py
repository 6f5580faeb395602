"""sample.py and edit.py as a user runs them."""

import contextlib
import shutil

import pytest
import torch
from conftest import SMALL, command
from torch.utils._pytree import keystr, tree_flatten_with_path

import edit
import sample
from common import UserError, locked
from model import Decoder, ModelConfig
from tables.storage import RamStorage
from tables.tables import ResidentTables, StoredTables
from text import tokenizer
from text.tokenizer import encode
from training.checkpoints import load_checkpoint, load_model
from training.questions import score_answers


@pytest.mark.parametrize("ffn", ["dense", "stem", "embformer"])
def test_a_checkpoint_alone_is_enough_to_sample(trained, tmp_path, ffn):
    shutil.copy(trained[ffn] / "ckpt.pt", tmp_path)
    done = command("sample.py", "--ckpt", "ckpt.pt", "--prompt", "Anna", cwd=tmp_path)
    assert done.stdout.startswith("Anna")


def test_samples_depend_on_the_seed_alone(trained, monkeypatch, capsys):
    def text(*flags):
        flags = ("--ckpt", trained["stem"] / "ckpt.pt", "--max_new_tokens", 40, *flags)
        monkeypatch.setattr("sys.argv", ["sample.py", *map(str, flags)])
        sample.main()
        return capsys.readouterr().out

    one = text("--seed", 5, "--top_k", 50, "--top_p", 0.95)
    assert text("--seed", 5, "--top_k", 50, "--top_p", 0.95) == one
    assert text("--seed", 6, "--top_k", 50, "--top_p", 0.95) != one
    greedy = text("--temperature", 0)
    assert text("--temperature", 0, "--seed", 9) == greedy
    assert text("--num_samples", 2).count("-" * 40) == 1


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        ("spain", "Germany", "--source spain: .*, but Spain"),
        ("Spain", "Germny", "--target Germny: .*, but Germany"),
        ("Spain", "Xqzw", "--target Xqzw: the countries have no such name$"),
        ("Spain", "Germany", None),
        ("Atlantis", "Germany", None),  # a made-up name may read a country's rows
    ],
)
def test_names_that_the_countries_do_not_have_are_refused(source, target, says):
    with pytest.raises(UserError, match=says) if says else contextlib.nullcontext():
        edit.check_names(edit.Edit(source=source, target=target))


def test_decoding_in_bfloat16_keeps_the_rows(trained, tmp_path):
    ckpt = ("--ckpt", trained["stem"] / "ckpt.pt", "--dtype", "bfloat16")
    command("sample.py", *ckpt, "--max_new_tokens", 3, cwd=tmp_path)
    edit = ("--source", "Anna", "--target", "Björn", "--prompt", "Anna", "--save", "edited.pt")
    command("edit.py", *ckpt, *edit, cwd=tmp_path)
    before, after = (load_checkpoint(p)["model"] for p in (ckpt[1], tmp_path / "edited.pt"))
    rows = [torch.cat([w for n, w in m.items() if "tables" in n]) for m in (before, after)]
    changed = rows[0].ne(rows[1]).any(-1)
    assert changed.any() and torch.isin(rows[1][changed], rows[0]).all()  # none is rounded


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--temperature -1", "--temperature -1"),
        ("--top_p 1.5", "--top_p 1.5"),
        ("--ckpt gone.pt", "no checkpoint at gone.pt"),
        ("--ckpt text.pt", "is damaged"),
        ("--ckpt half.pt", "is damaged"),
        ("--ckpt foreign.pt", "not a checkpoint of this program"),
        ("--ckpt hollow.pt", "is damaged"),
        ("--ckpt .", "Is a directory: name a ckpt.pt, or train one with"),
    ],
)
def test_sample_refuses_in_one_line(trained, tmp_path, flags, says):
    good = (trained["stem"] / "ckpt.pt").read_bytes()
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "half.pt").write_bytes(good[: len(good) // 2])
    torch.save({"weights": 1}, tmp_path / "foreign.pt")
    saved = torch.load(trained["stem"] / "ckpt.pt", weights_only=True)
    saved["model"].pop("wte.weight.0")
    torch.save(saved, tmp_path / "hollow.pt")
    flags = flags.split()
    if "--ckpt" not in flags:
        flags += ["--ckpt", trained["stem"] / "ckpt.pt"]
    assert says in command("sample.py", *flags, cwd=tmp_path, fails=True).stderr


def test_edit_shows_both_sides(trained, tmp_path):
    flags = ("--source", "Anna", "--target", "Chloë", "--prompt", "Anna sees Björn. Anna meets")
    done = command("edit.py", "--ckpt", trained["stem"] / "ckpt.pt", *flags, cwd=tmp_path)
    assert "after: Anna reads Chloë's rows" in done.stdout
    assert "undone: logits equal the first ones bit for bit" in done.stdout


@pytest.mark.parametrize("equal", [True, False])
def test_edit_compares_the_probabilities_of_both_answers(trained, monkeypatch, capsys, equal):
    model, encoding, _ = load_model(trained["stem"] / "ckpt.pt", torch.device("cpu"))
    model.tables = edit.MeanRows(model.tables)
    plain, end = encoding.encode_ordinary, encoding.eot_token
    brief, long = plain(" Chloë. Björn"), plain(" follows Anna" * 9)
    written = torch.tensor([line + [end] * (len(long) - len(line)) for line in (brief, long)])
    written = written[[0, 0]] if equal else written
    monkeypatch.setattr(model, "generate", lambda ids, *_, **__: torch.cat((ids, written), 1))
    options = dict(source="Anna", target="Björn", prompt="Then Anna", max_new_tokens=len(long))
    assert list(edit.show(model, encoding, edit.Edit(**options)).values()) == plain(" Björn")

    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if line.startswith("probability of")]
    answers = [plain(" Chloë")] if equal else [plain(" Chloë"), long]  # until the sentence ends
    assert len(shown) == len(answers)
    assert len({(line.index("before"), line.index("after")) for line in shown}) == 1
    ids, edited = encode(encoding, "Then Anna"), encode(encoding, "Then Björn")
    for line, answer in zip(shown, answers, strict=True):
        for rows, title in ((ids, "before"), (edited, "after")):
            p = score_answers(model, [ids], [answer], [rows])[1].item()
            assert f"{title} {p:6.1%}" in line
    assert equal or "'follows Anna follows...' " in shown[1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({}, "give either --source and --target"),
        (dict(source="Anna"), "give either --source and --target"),
        (dict(undo=True, source="A", target="B"), "either --source and --target, or --undo"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, says):
    with pytest.raises(UserError, match=says):
        edit.Edit(**flags)


@pytest.mark.parametrize(
    ("kind", "prompt", "says"),
    [("stem", "Nobody", "has it a word 'Anna'?"), ("stem", "a" * 99, "--prompt has 100 tokens"),
     ("dense", "Anna", "no tables to edit")],
)  # fmt: skip
def test_edit_refuses_in_one_line(trained, tmp_path, kind, prompt, says):
    flags = ("--ckpt", trained[kind] / "ckpt.pt", "--source", "Anna", "--target", "Emil")
    flags += ("--prompt", prompt)
    assert says in command("edit.py", *flags, cwd=tmp_path, fails=True).stderr


# --- edits that last ---


@pytest.fixture(scope="module")
def on_disk(data):
    """The folder of a run whose tables are in a file."""
    out = data.parent / "on_disk"
    command("train.py", "--data_dir", data, "--out_dir", out, "--offload", "disk", *SMALL, cwd=data)
    return out


@pytest.fixture(params=["none", "disk"])
def edits(request, trained, on_disk, tmp_path, monkeypatch):
    """A copy of a run, and edit.py with flags in this process."""
    shutil.copytree({"none": trained["stem"], "disk": on_disk}[request.param], tmp_path / "run")

    def run(*flags):
        flags = ("--offload", request.param, "--device", "cpu", *flags)
        monkeypatch.setattr("sys.argv", ["edit.py", *map(str, flags)])
        edit.main()

    return tmp_path / "run" / "ckpt.pt", run


def contents(path):
    """Every tensor and number of a checkpoint, tables in a file included."""
    checkpoint = load_checkpoint(path)
    for name in ("edits", "tables"):  # a record, and the object that stores tables
        checkpoint.pop(name, None)
    return {
        keystr(key): leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
        for key, leaf in tree_flatten_with_path(checkpoint)[0]
    }


def differing(a, b):
    """The names of what differs in two checkpoints, to the bit."""
    assert a.keys() == b.keys()
    same = {
        key: torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key]
        for key in a
    }
    return [key for key in same if not same[key]]


@pytest.mark.parametrize("align", edit.ALIGN)
def test_a_saved_edit_is_the_edit_that_was_shown_and_its_undoing_restores_every_bit(edits, align):
    ckpt, run = edits
    before, files = contents(ckpt), set(ckpt.parent.iterdir())
    saved, restored = ckpt.parent.parent / "a" / "ckpt.pt", ckpt.parent.parent / "b" / "ckpt.pt"
    prompt = "Björn sees Anna at the river"
    names = ("--source", "Anna at", "--target", "river", "--align", align)
    run("--ckpt", ckpt, *names, "--prompt", prompt, "--save", saved)

    model, encoding, _ = load_model(ckpt, torch.device("cpu"))
    edited, _, _ = load_model(saved, torch.device("cpu"))
    load_checkpoint(saved, verify=True)  # its checksums are those of the edited rows
    ids = encode(encoding, prompt)
    tables = model.tables = edit.MeanRows(model.tables)
    table_ids = edit.edited_ids(encoding, ids, "Anna at", "river", align, tables)
    expected = model(torch.tensor([ids]), table_ids=torch.tensor([table_ids]))[0]
    assert torch.equal(edited(torch.tensor([ids]))[0], expected)
    changed = differing(before, contents(saved))
    assert changed == ["['model']['tables.weight.0']"]  # and no other weight, moment, setting
    rows = [weights[changed[0]] for weights in (before, contents(saved))]
    moved = (rows[0] != rows[1]).any(-1).nonzero()[:, 0].tolist()
    assert moved == sorted({a for a, b in zip(ids, table_ids, strict=True) if a != b})

    run("--ckpt", saved, "--undo", "--save", restored)
    assert differing(before, contents(restored)) == []
    assert differing(before, contents(ckpt)) == [] and set(ckpt.parent.iterdir()) == files


def test_edits_in_place_are_undone_last_first(edits):
    ckpt, run = edits
    states = [contents(ckpt)]
    for name in ("Chloë", "Björn"):
        names = ("--source", "Anna", "--target", name, "--prompt", "Then Anna")
        run("--ckpt", ckpt, *names, "--save", ckpt)
        states.append(contents(ckpt))
    assert len(differing(*states[:2])) == len(differing(*states[1:])) == 1
    n_file = len(list(ckpt.parent.glob("tables-*")))
    for state in (states[1], states[0]):
        run("--ckpt", ckpt, "--undo")
        assert differing(state, contents(ckpt)) == []
    assert len(list(ckpt.parent.glob("tables-*"))) == n_file <= 1
    with pytest.raises(UserError, match="holds no edit to undo"):
        run("--ckpt", ckpt, "--undo")


def test_saving_an_edit_replaces_no_other_checkpoint(edits, on_disk, tmp_path, monkeypatch):
    ckpt, run = edits
    other = shutil.copytree(on_disk, tmp_path / "other") / "ckpt.pt"
    before, more = contents(other), ("--source", "Emil", "--target", "Anna", "--prompt", "Emil")
    with pytest.raises(UserError, match="exists: choose another"):
        run("--ckpt", ckpt, *more, "--save", other)
    run("--ckpt", ckpt, *more, "--save", other.with_name("new.pt"))  # beside it is fine
    assert differing(before, contents(other)) == []
    with locked(other.parent), pytest.raises(UserError, match="another run is writing"):
        run("--ckpt", ckpt, *more, "--save", other.with_name("third.pt"))

    def at_once(*args, show=edit.show):  # what one read before, another would lose
        with pytest.raises(UserError, match="another run is writing"), locked(ckpt.parent):
            pass
        return show(*args)

    monkeypatch.setattr(edit, "show", at_once)
    run("--ckpt", ckpt, *more, "--save", ckpt)


def test_edited_ids_find_the_name_with_and_without_a_space():
    texts = ["Spain is here. In Spain, and in Spanish.", "Germany is there. In Germany."] * 20
    encoding = tokenizer.train(texts, 400)
    ids = encoding.encode_ordinary("Spain is here. In Spain, and in Spanish.")
    table_ids = edit.edited_ids(encoding, ids, "Spain", "Germany")
    expected = encoding.encode_ordinary("Germany is here. In Germany, and in Spanish.")
    assert table_ids == expected


@pytest.mark.parametrize("storage", ["resident", "stored"])
def test_made_up_tokens_read_the_mean_of_rows(storage):
    """As a model whose tables hold those means in the rows of tokens that nobody uses."""
    config = ModelConfig(20, 16, 4, 2, 32, stem_layers="all", table_std=1.0)
    make = {
        "resident": ResidentTables,
        "stored": lambda n_table, *size: StoredTables(
            RamStorage((size[0], n_table, size[1]), torch.float32)
        ),
    }[storage]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Decoder(config, tables=make).eval())
    model, overwritten = models
    for weight in overwritten.tables.weight:
        weight[18], weight[19] = (weight[3] + weight[4]) / 2, (weight[5] * 2 + weight[1]) / 3
    model.tables = edit.MeanRows(model.tables)
    pair, triple = model.tables.token([3, 4]), model.tables.token([5, 1, 5])
    assert (pair, triple, model.tables.token([3, 4])) == (20, 21, 20)
    ids = torch.tensor([[1, 2, 3, 4], [5, 2, 3, 1]])
    expected = overwritten(ids, table_ids=torch.tensor([[18, 2, 19, 19], [5, 2, 3, 18]]))[0]
    made_up = torch.tensor([[pair, 2, triple, triple], [5, 2, 3, pair]])
    edited = model(ids, table_ids=made_up)[0]
    torch.testing.assert_close(edited, expected)
    assert torch.equal(edited[1, :3], model(ids)[0][1, :3])  # own rows: equal to the bit


def test_edited_ids_make_up_a_token_for_names_of_different_length():
    texts = ["Chad is here. In Chad we meet.", "New Zealand is there. In New Zealand."] * 20
    encoding = tokenizer.train(texts, 400)
    tables = edit.MeanRows(ResidentTables(1, encoding.n_vocab, 4))
    ids = encoding.encode_ordinary("Chad and Chad")
    first, *_, last = edit.edited_ids(encoding, ids, "Chad", "New Zealand", "average", tables)
    parts = dict(enumerate(map(list, tables.means), encoding.n_vocab))
    assert parts[first] == encoding.encode_ordinary("New Zealand")
    assert parts[last] == encoding.encode_ordinary(" New Zealand")
    assert edit.edited_ids(encoding, ids, "Peru", "Mali", "average", tables) == ids
