"""sample.py and edit.py as a user runs them, and what edit.py measures."""

import copy
import itertools
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import SMALL, command
from matplotlib.axes import Axes
from torch.utils._pytree import keystr, tree_flatten_with_path

import edit
import sample
from common import UserError, locked
from model import Decoder, ModelConfig
from tables.storage import RamStorage
from tables.tables import ResidentTables, StoredTables
from text import countries, tokenizer
from text.tokenizer import encode
from training import exam
from training.checkpoints import load_checkpoint, load_model


def test_a_checkpoint_alone_is_enough_to_sample(trained, tmp_path):
    for ffn, folder in trained.items():
        ckpt = tmp_path / f"{ffn}.pt"
        ckpt.write_bytes((folder / "ckpt.pt").read_bytes())
        done = command(
            *("sample.py", "--ckpt", ckpt, "--prompt", "Anna", "--max_new_tokens", 60),
            cwd=tmp_path,
        )
        assert done.stdout.startswith("Anna")
        assert "tok/s" in done.stderr


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
    ("flags", "says"),
    [
        ("--temperature -1", "--temperature -1"),
        ("--top_k 0", "--top_k 0"),
        ("--top_p 1.5", "--top_p 1.5"),
        ("--max_new_tokens 0", "--max_new_tokens 0"),
        ("--ckpt gone.pt", "no checkpoint at gone.pt"),
        ("--ckpt text.pt", "damaged or not a checkpoint"),
        ("--ckpt half.pt", "damaged or not a checkpoint"),
        ("--ckpt foreign.pt", "not a checkpoint of this program"),
        ("--ckpt hollow.pt", "damaged or not a checkpoint"),
        ("--ckpt .", "Is a directory, name a ckpt.pt"),
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


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    class Malicious:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"format": 1, "x": Malicious()}, tmp_path / "bad.pt")
    command("sample.py", "--ckpt", "bad.pt", cwd=tmp_path, fails=True)
    assert not (tmp_path / "ran").exists()


def test_edit_shows_both_sides(trained, tmp_path):
    flags = ("--source", "Anna", "--target", "Chloë", "--prompt", "Anna sees Björn. Anna meets")
    done = command("edit.py", "--ckpt", trained["stem"] / "ckpt.pt", *flags, cwd=tmp_path)
    assert "after: Anna reads Chloë's rows" in done.stdout
    assert done.stdout.count("probability of") == 2
    assert "undone: logits equal the first ones bit for bit" in done.stdout


@pytest.mark.parametrize(
    ("kind", "flags", "says"),
    [
        ("stem", "", "give --source and --target"),
        ("stem", "--source Anna", "give --source and --target"),
        ("stem", "--source Emil --target Anna --prompt Nobody", "does not contain --source"),
        ("dense", "--source Anna --target Chloë", "no tables to edit"),
        ("stem", "--report", "needs a model of the countries corpus"),
        ("stem", "--report --source Anna", "leave out --source"),
    ],
)
def test_edit_refuses_in_one_line(trained, tmp_path, kind, flags, says):
    ckpt = trained[kind] / "ckpt.pt"
    error = command("edit.py", "--ckpt", ckpt, *flags.split(), cwd=tmp_path, fails=True)
    assert says in error.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (dict(report=True, save="x.pt", plot="x.png"), "with --report leave out --plot, --save"),
        (dict(undo=True, inject="A=B"), "with --undo leave out --inject"),
        (dict(inject="A=B", target="Anna"), "with --inject leave out --target"),
        (dict(inject="Atlantis"), "give .* --inject NAME=KNOWN"),
        (dict(inject="A=B", plot=Path("x.txt")), "--plot x.txt: name a .png, .svg or .pdf file"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, says):
    with pytest.raises(UserError, match=says):
        edit.Edit(**flags)


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


def test_edits_in_place_are_undone_last_first(edits, capsys):
    ckpt, run = edits
    states = [contents(ckpt)]
    for pair in ("Anna=Chloë", "Anna=Björn"):
        run("--ckpt", ckpt, "--inject", pair, "--prompt", "Then Anna", "--save", ckpt)
        states.append(contents(ckpt))
    assert len(differing(*states[:2])) == len(differing(*states[1:])) == 1
    assert "other rows for ' Anna'" in capsys.readouterr().out
    n_file = len(list(ckpt.parent.glob("tables-*")))
    for state in (states[1], states[0]):
        run("--ckpt", ckpt, "--undo")
        assert differing(state, contents(ckpt)) == []
    assert len(list(ckpt.parent.glob("tables-*"))) == n_file <= 1
    with pytest.raises(UserError, match="holds no edit to undo"):
        run("--ckpt", ckpt, "--undo")


def test_saving_an_edit_replaces_no_other_checkpoint(edits, on_disk, tmp_path):
    ckpt, run = edits
    other = shutil.copytree(on_disk, tmp_path / "other") / "ckpt.pt"
    before, more = contents(other), ("--inject", "Emil=Anna", "--prompt", "Emil")
    with pytest.raises(UserError, match="exists: choose another"):
        run("--ckpt", ckpt, *more, "--save", other)
    run("--ckpt", ckpt, *more, "--save", other.with_name("new.pt"))  # beside it is fine
    assert differing(before, contents(other)) == []
    with locked(other.parent), pytest.raises(UserError, match="another run is writing"):
        run("--ckpt", ckpt, *more, "--save", other.with_name("third.pt"))


def test_bars_show_the_probabilities_of_the_next_token(trained, tmp_path, monkeypatch):
    drawn, draw = [], Axes.barh

    def barh(self, y, width, **options):
        drawn.append(width)
        return draw(self, y, width, **options)

    monkeypatch.setattr(Axes, "barh", barh)
    model, encoding, _ = load_model(trained["stem"] / "ckpt.pt", torch.device("cpu"))
    ids = torch.tensor([encode(encoding, "Then Anna"), encode(encoding, "Then Chloë")])
    flags = ["--ckpt", trained["stem"] / "ckpt.pt", "--inject", "Anna=Chloë", "--prompt"]
    flags += ["Then Anna", "--plot", tmp_path / "bars.png", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["edit.py", *map(str, flags)])
    edit.main()
    p = model(ids[[0, 0]], table_ids=ids)[0][:, -1].softmax(-1)
    best = p.amax(0).sort(descending=True).indices[:10]
    assert drawn == [pytest.approx(side[best].tolist()) for side in p]
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_score_agrees_with_generating(trained):
    """Teacher forcing in one pass finds what greedy decoding, token by token, would write."""
    model, encoding, _ = load_model(trained["stem"] / "ckpt.pt", torch.device("cpu"))
    prompts, answers, written = [], [], []
    for i, text in enumerate(["Anna", "Björn sees", "Chloë meets Anna at", "the river"]):
        prompt = encode(encoding, text)
        new = model.generate(torch.tensor([prompt]), 4, temperature=0)[0, len(prompt) :].tolist()
        written.append(i % 2 == 0)
        prompts.append(prompt)
        answers.append(new if i % 2 == 0 else [*new[:-1], (new[-1] + 1) % encoding.n_vocab])
    greedy, probability, _ = edit.score_answers(model, prompts, answers)
    assert greedy.tolist() == written
    for prompt, answer, p in zip(prompts, answers, probability, strict=True):
        expected = 1.0
        for n, token in enumerate(answer):
            logits, _ = model(torch.tensor([prompt + answer[:n]]))
            expected *= logits[0, -1].softmax(-1)[token].item()
        assert p.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("n_vocab", "most"), [(300, 256), (2**22 // 7, 7), (2**23, 1)])
def test_groups_hold_every_question_once_and_in_order(n_vocab, most):
    class Encoding:
        pass

    Encoding.n_vocab = n_vocab
    asked = [([i], [-i], str(i)) for i in range(600)]
    groups = list(exam.groups(Encoding(), asked))
    assert [len(prompts) for prompts, _, _ in groups[:-1]] == [most] * (len(groups) - 1)
    assert all(isinstance(column, list) for group in groups for column in group)
    assert [question for group in groups for question in zip(*group, strict=True)] == asked


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

    def stored(n_table, vocab_size, width):
        return StoredTables(RamStorage((vocab_size, n_table, width), torch.float32))

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        tables = stored if storage == "stored" else ResidentTables
        models.append(Decoder(config, tables=tables).eval())
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
    new = model.generate(ids[:1], 5, temperature=0, table_ids=made_up[:1])
    assert new.max() < 18  # whose rows are others in the two models
    standing_in = made_up[:1] - 2 * (made_up[:1] >= 20)
    assert torch.equal(new, overwritten.generate(ids[:1], 5, temperature=0, table_ids=standing_in))


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


@pytest.fixture(scope="module")
def untrained():
    """A STEM model on six countries' names that has learned nothing."""
    six = [
        c for c in countries.table() if c.name in ["Spain", "Peru", "Japan", "Chad", "Fiji", "Oman"]
    ]
    texts = [countries.sentence(p, c, "capital") for c in six for p in countries.PROSE]
    encoding = tokenizer.train(texts * 9, 600)
    torch.manual_seed(0)
    config = ModelConfig(encoding.n_vocab, 64, 2, 2, 32, stem_layers="all", table_std=1.0)
    return six, Decoder(config).eval(), encoding


def test_report_needs_countries_that_differ_in_every_relation(untrained, monkeypatch):
    six, model, encoding = untrained
    asia = [country for country in six if country.name in ("Japan", "Oman")]
    monkeypatch.setattr(countries, "table", lambda: asia)
    with pytest.raises(UserError, match=r"too few country names .*\((Oman, Japan|Japan, Oman)\)"):
        edit.report_pairs(model, encoding)


def test_report_of_a_model_that_knows_nothing(untrained, monkeypatch):
    six, model, encoding = untrained
    monkeypatch.setattr(countries, "table", lambda: six)
    result = edit.report_pairs(model, encoding)
    assert result["countries"] == 6
    assert result["pairs"]["capital"] == 30
    assert result["pairs"]["region"] == 30 - 2  # Japan and Oman share Asia and are left out
    assert result["recall"] == result["success"] == 0.0
    assert result["unchanged"] == 1.0


def test_report_of_lengths_tells_longer_sources_from_longer_targets(untrained, monkeypatch):
    """With a judge to whom an edit succeeds if every token of the target's name is read."""
    six, model, encoding = untrained
    table = [c for c in countries.table() if c.name in ("Saudi Arabia", "New Zealand")] + six
    names = [encoding.encode_ordinary(" " + country.name) for country in table]
    target_of = {
        tuple(encoding.encode_ordinary(question.answer)): set(name)
        for name, country in zip(names, table, strict=True)
        for question in countries.questions("capital", "paragraph", country)
    }

    def judge(model, prompts, answers, edited):
        read = [set(ids) for ids in edited]
        return torch.tensor(
            [target_of[tuple(a)] <= ids for a, ids in zip(answers, read, strict=True)]
        ), *(None, None)

    monkeypatch.setattr(countries, "table", lambda: table)
    monkeypatch.setattr(edit, "score_answers", judge)
    model = copy.deepcopy(model)
    model.tables = edit.MeanRows(model.tables)
    result = edit.report_lengths(model, encoding)
    pairs = list(itertools.permutations(map(len, names), 2))
    numbers = [sum(a == b > 1 for a, b in pairs), *[sum(a > b for a, b in pairs)] * 2]
    assert numbers[1] >= 12
    assert [row.pop("pairs") for row in result.values()] == numbers
    assert result["longer source"] == dict(last=1.0, first=1.0, pad=1.0, average=0.0)
    assert result["longer target"] == dict.fromkeys(edit.ALIGN, 0.0)
    assert result["equal length"] == dict.fromkeys(edit.ALIGN, 1.0 if numbers[0] else None)


@pytest.mark.parametrize("edits_work", [True, False])
def test_report_of_made_up_names(untrained, monkeypatch, edits_work):
    """With a judge to whom an injection succeeds if the made-up name reads the country's row."""
    six, model, encoding = untrained
    rows = {
        tuple(encoding.encode_ordinary(question.answer)): set()
        for relation in ("capital", "language", "region")
        for country in six
        for question in countries.questions(relation, "paragraph", country)
    }
    for answer, country in itertools.product(rows, six):
        said = [country.answer(r) for r in ("capital", "language", "region")]
        if encoding.decode(list(answer)).strip(" .") in said:
            rows[answer] |= set(encoding.encode_ordinary(" " + country.name))

    def judge(model, prompts, answers, edited):
        assert all(len(a) == len(b) for a, b in zip(prompts, edited, strict=True))
        read = [set(ids) for ids in edited]
        return torch.tensor(
            [bool(rows[tuple(a)] & ids) for a, ids in zip(answers, read, strict=True)]
        ), *(None, None)

    monkeypatch.setattr(countries, "table", lambda: six)
    monkeypatch.setattr(edit, "score_answers", judge)
    if not edits_work:
        monkeypatch.setattr(edit, "edited_ids", lambda encoding, ids, *names: ids)
    expected = dict.fromkeys(("capital", "language", "region"), 1.0 if edits_work else 0.0)
    model = copy.deepcopy(model)
    assert edit.report_injected(model, encoding) == expected


def test_report_notices_an_edit_that_touches_other_prompts(untrained, monkeypatch):
    six, model, encoding = untrained
    monkeypatch.setattr(countries, "table", lambda: six)
    monkeypatch.setattr(edit, "edited_ids", lambda encoding, ids, *names: ids[::-1])
    assert edit.report_pairs(model, encoding)["unchanged"] == 0.0


def test_report_counts_what_a_perfect_editor_would_do(untrained, monkeypatch):
    """With a model that reads the answer off the table ids, everything succeeds."""
    six, _, encoding = untrained
    monkeypatch.setattr(countries, "table", lambda: six)
    names = {encoding.encode_ordinary(" " + c.name)[0]: c for c in six}
    asked = {}
    for relation in ("capital", "language", "region"):
        for c in six:
            question = countries.questions(relation, "paragraph", c)[0]
            prompt = encode(encoding, question.prompt)
            key = (relation, tuple(t for t in prompt if t not in names))
            asked[key[1]] = relation

    class Oracle:
        config, tables = ModelConfig(), None

        def parameters(self):
            return iter([torch.zeros(1)])

        def __call__(self, ids, table_ids):
            logits = torch.zeros(*ids.shape, encoding.n_vocab)
            for row, (given, looked_up) in enumerate(
                zip(ids.tolist(), table_ids.tolist(), strict=True)
            ):
                frame = next(
                    f for f in asked if [t for t in given if t not in names][: len(f)] == list(f)
                )
                country = names[next(t for t in looked_up if t in names)]
                answer = countries.stopped(country.answer(asked[frame]))
                tokens = encoding.encode_ordinary(" " + answer)
                start = len(frame)  # the frame lacks the name's one token
                for n, token in enumerate(tokens[: ids.shape[1] - start]):
                    logits[row, start + n, token] = 1.0
            return logits, None

    result = edit.report_pairs(Oracle(), encoding)
    assert result["recall"] == result["success"] == 1.0


def test_recall_asks_every_form_of_every_country(untrained, monkeypatch):
    six, model, encoding = untrained
    monkeypatch.setattr(countries, "table", lambda: six)
    seen = []

    def all_right(model, prompts, answers, table_prompts=None):
        seen.extend(encoding.decode(prompt) for prompt in prompts)
        return torch.ones(len(prompts), dtype=torch.bool), None, None

    monkeypatch.setattr(exam, "score_answers", all_right)
    assert exam.fact_recall(model, encoding, "capital") == 1.0
    assert len(set(seen)) == 6 * 3 * 2
    assert any(text.endswith("Country: Peru\nIts capital is") for text in seen)


def test_a_chat_is_asked_in_words_it_never_saw(untrained, monkeypatch):
    six, _, encoding = untrained
    monkeypatch.setattr(countries, "table", lambda: six)
    asked = exam.chat_questions(encoding, "capital")
    assert len(asked) == 6 * 2
    prompt, brief, sentence = map(encoding.decode, asked[-1])
    assert prompt.startswith("<|endoftext|><|im_start|>user\n ")
    assert prompt.endswith(" Spain?<|im_end|>\n<|im_start|>assistant\n")
    assert (brief, sentence) == (" Madrid.<|im_end|>", " The answer is Madrid.<|im_end|>")


def test_styles_are_told_apart_as_counting_samples_does(untrained, monkeypatch):
    encoding = untrained[2]
    torch.manual_seed(29)
    model = Decoder(ModelConfig(5, 8, 1, 2, 8, ffn="dense", init_std=0.4)).eval()
    # Answers of two tokens, of five in all; 0 begins the sentences.
    asked = [([1 + n % 4, 1 + n // 4], [1 + n % 3, 4], [0, 2 + n % 2]) for n in range(16)]
    monkeypatch.setattr(exam, "chat_questions", lambda *_: asked)
    found = exam.chat_recall(model, encoding, "capital")
    expected, samples, right = dict.fromkeys(found, 0.0), Counter(), Counter()
    for prompt, brief, sentence in asked:
        prompts = torch.tensor([prompt]).expand(8192, -1)
        said = model.generate(prompts, 2, temperature=0.8, seed=0)[:, 2:].tolist()
        styles = {"_sentence": [], "_brief": []}
        for pair in said:
            styles["_sentence" if pair[0] == 0 else "_brief"].append(pair)
        for style, pairs in {"": said, **styles}.items():
            first = Counter(pair[0] for pair in pairs).most_common(1)[0][0]
            second = Counter(pair[1] for pair in pairs if pair[0] == first).most_common(1)[0][0]
            expected["recall" + style] += ([first, second] in (brief, sentence)) / len(asked)
            samples[style] += len(pairs)
            right[style] += sum(pair in (brief, sentence) for pair in pairs)
    expected |= {"sampled" + style: right[style] / samples[style] for style in samples}
    expected["sentences"] = samples["_sentence"] / samples[""]
    assert found == pytest.approx(expected, abs=0.005)
    assert all(0 < value < 1 for value in found.values())


def test_json_report_lies_beside_the_checkpoint(untrained, tmp_path, monkeypatch, capsys):
    from training.checkpoints import save_checkpoint

    six, model, encoding = untrained
    monkeypatch.setattr(countries, "table", lambda: six)
    save_checkpoint(tmp_path / "ckpt.pt", model, encoding)
    monkeypatch.setattr("sys.argv", ["edit.py", "--report", "--ckpt", str(tmp_path / "ckpt.pt")])
    edit.main()
    report = json.loads((tmp_path / "edit_report.json").read_text())
    assert set(report["relations"]) == {"capital", "language", "region"}
    assert {"recall", "success", "unchanged"} <= set(report)
    assert "overall" in capsys.readouterr().out
