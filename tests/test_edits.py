"""lab/edits.py and training/writing.py, with answers made to be known."""

import itertools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CPU, assert_same, by_turns, user_error, write_jsonl

from corpora import countries
from corpora.questions import score_answers
from edit import Edit, edit_checkpoint, locate, new_rows, undo
from lab.edits import INVENTED, all_pairs, measure_checkpoint, report_edits, row_with_edits
from lab.experiment import Experiment
from model import Decoder, ModelConfig
from tables.extra import ExtraRows, mean_rows, rows_of, with_rows
from tables.tables import ResidentTables
from text import bpe, chat
from text.tokenizer import encode
from training import writing
from training.checkpoints import load_checkpoint, load_model, save_checkpoint
from training.edits import Located, as_written
from training.records import to_line
from training.writing import ask_the_same, opening_of, texts_about, train_rows, write_fact

COUNTRIES = countries.table()
SPAIN = dict(source="Spain", prompt="Country: Spain")


@pytest.fixture(scope="module")
def encoding():
    """The tokenizer of some paragraphs, in which names of countries are tokens."""
    names = ("Spain", "Peru", "Japan", "Fiji", "Cuba", "Oman")
    return bpe.train([f" {name}" for name in names] * 20, 300)


@pytest.fixture(autouse=True)
def brief(brief_facts, monkeypatch):
    """Facts are written in fewer and shorter steps, and at first nothing else is held."""
    brief = dict(KEEP=0, STEPS=10, RATE=0.2, N_OTHER=4)
    for name, value in brief.items():
        monkeypatch.setattr(writing, name, value)


def made(encoding) -> Decoder:
    torch.manual_seed(0)
    config = ModelConfig(encoding.n_vocab, 128, 4, 2, 16, table_std=3.0, init_std=0.5)
    return Decoder(config).eval()


@pytest.fixture
def ckpt(encoding, tmp_path):
    """The path of a checkpoint."""
    path = tmp_path / "ckpt.pt"
    save_checkpoint(path, made(encoding), encoding, data=[{"corpus": "files"}])
    return path


def edited(ckpt, save, **given) -> None:
    edit_checkpoint(Edit(ckpt, device="cpu", max_new_tokens=1, **given), save)


def test_pairs_are_sorted_by_their_names_and_differ_in_their_fact(encoding):
    pairs = all_pairs(encoding, "language")
    assert len(pairs) == 6
    assert len(pairs["no edit"]) == len(COUNTRIES)
    assert len(pairs["made up"]) == len(INVENTED) * len(COUNTRIES)
    for sort, sign in (("one token", 0), ("longer source", 1), ("longer target", -1)):
        for source, target in pairs[sort]:
            assert source.answer != target.answer and source.country != target.country
            assert np.sign(source.length - target.length) == sign
            assert (source.length + target.length == 2) == (sort == "one token")


def test_a_model_of_other_text_is_refused():
    other = bpe.train([" Call me Ishmael."] * 20, 300)
    with user_error("no country is one token"):
        report_edits(made(other), other, {}, 1)


def test_edits_are_not_measured_of_runs_that_recall_other_facts(trained, tmp_path):
    """Such as those of a generated corpus of one's own, which `ask` has questions to."""
    folder = shutil.copytree(trained["stem"], tmp_path / "run")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(to_line({"type": "recall", "step": 12, "recall": 0.25}))
    cells = row_with_edits(Experiment(tmp_path, device="cpu"), "stem", [folder])
    assert (cells["recalled"], cells["edits that succeed"]) == ("25.0%", "")


def test_it_is_said_that_a_model_of_other_text_is_asked_for_the_countries(
    encoding, ckpt, monkeypatch, capsys
):
    """Its vocabulary may have their names. What a model without data knows, nobody says."""
    report = {"parts": [{"names": "one token"}]}
    monkeypatch.setattr("lab.edits.report_edits", lambda *_: report)
    for corpora, is_said in ((["files"], True), (["files", "countries"], False), ([], False)):
        data = [{"corpus": corpus} for corpus in corpora]
        save_checkpoint(ckpt, made(encoding), encoding, data=data)
        measure_checkpoint(ckpt, CPU)
        assert ("of other text" in capsys.readouterr().out) == is_said


def test_edits_of_rows_that_are_not_of_names_are_not_measured(encoding):
    model = made(encoding)
    model.addresses = lambda ids, n: ids.roll(1)[:, -n:]  # the token before
    assert report_edits(model, encoding, {}, 1) == {"success": None, "parts": []}


# --- one fact ---


def test_what_else_the_model_says_of_the_name_is_held_unless_it_asks_the_same(
    encoding, monkeypatch
):
    """Predictions after the name change less with the second term of the loss than without. Where
    they ask for the same fact (here in a triangle of them), the answer is taught, and nothing is
    held (here after the first token, which comes before the name)."""
    monkeypatch.setattr(writing, "N_TEXT", 32)
    prompt, answer = encode(encoding, "Country: Spain Fiji"), encoding.encode_ordinary(" Peru")
    name = encoding.encode_ordinary(" Spain")
    found = torch.ones(writing.N_TEXT, len(prompt) + 7).tril() > 0
    none, later = torch.zeros_like(found), torch.ones_like(found)
    later[:, 0] = False
    changes = []
    for keep, same in ((0, none), (100, none), (0, found), (0, later), (100, later)):
        monkeypatch.setattr(writing, "ask_the_same", lambda *_, same=same: same)
        model = made(encoding).requires_grad_(False)
        texts = texts_about(model, [prompt[:-1]])
        before = model(texts)[0].log_softmax(-1)
        model.tables = ExtraRows(model.tables, rows_of(model.tables, name), name)
        write_fact(model, [model.tables.extra], [(prompt, answer)], [name], texts, keep, 0.2)
        changes.append(model(texts)[0].log_softmax(-1) - before)
    assert changes[1].abs().mean() < changes[0].abs().mean() / 2
    assert (changes[2] - changes[0])[found][:, answer].mean() > 0.05
    torch.testing.assert_close(changes[3], changes[4])


def test_names_that_share_tokens_are_those_that_the_model_writes(monkeypatch):
    """Anna (1) is Silva (4) or Hansen (5), Peter (2) is Hansen or Novak (6), Ivo (3) is Petrov (7).
    Texts with Silva or Novak are longer, where texts have an end."""
    goes_on = {0: [1, 2, 3], 1: [4, 5], 2: [5, 6], 3: [7], 4: [6], 5: [8], 6: [7], 7: [8], 8: [8]}
    model = Decoder(ModelConfig(9, 16, 1, 1, 16, ffn="dense")).eval()
    with torch.no_grad():  # nothing but the last token matters
        for weight in model.parameters():
            weight.zero_()
        model.norm.weight.fill_(1)
        for token, then in goes_on.items():
            model.wte.weight[0][token, token] = 1
            model.head.weight[then, token] = 5.0
    known = [({1, 5}, [1, 5], [(1, 4), (2, 5)]), ({5}, [1, 5], [(2, 5)]), ({3, 7}, [3, 7], None)]
    for (own, name, others), stop in itertools.product(known, (-1, 8)):
        texts = writing.texts_about_namesakes(model, [0, *name, 8], name, sorted(own), stop)
        found = None if texts is None else sorted({*map(tuple, texts[:, 1:3].tolist())})
        assert found == others
    assert writing.texts_about_namesakes(model, [0, 1, 8], [1], [1]) is None
    monkeypatch.setattr(writing, "N_TEXT", 1)
    found = writing.texts_about_namesakes(model, [0, 1, 5, 8], [1, 5], [1, 5])
    assert found is None or len(found) == 1


def test_what_is_said_of_names_that_share_tokens_is_held(encoding, monkeypatch):
    """The more texts, the more; also by one text, which only some steps read."""
    prompt, answer = encode(encoding, "Country: Spain Fiji"), encoding.encode_ordinary(" Peru")
    text = torch.tensor([encode(encoding, "Country: Spain Cuba is Spain Oman")])
    changes = []
    for n in (0, 1, writing.N_PART, writing.N_TEXT):  # in the last two, each step reads the text
        namesakes = text.repeat(n, 1) if n else None
        monkeypatch.setattr(writing, "texts_about_namesakes", lambda *_, found=namesakes: found)
        model = made(encoding)
        before = model(text)[0].log_softmax(-1)
        rows = train_rows(model, prompt, prompt[-2:], answer, [prompt], keep=0.3)
        model.tables = with_rows(model.tables, rows)
        changes.append((model(text)[0].log_softmax(-1) - before).abs().mean().item())
    assert changes[2] < changes[1] < changes[0]
    assert changes[3] < 0.9 * changes[2]


def test_everyday_words_of_a_name_keep_their_rows(encoding, monkeypatch):
    """Those in more than a quarter of what the model writes; a token that a name has twice has one
    row. Of a name of such words alone, all change."""
    spain, peru, fiji = encoding.encode_ordinary(" Spain Peru Fiji")
    written = torch.zeros(64, 8, dtype=torch.int64)
    written[:17, 3], written[:16, 4] = peru, fiji
    changed = []
    for name in ([fiji, peru, spain, fiji], [peru, peru], [peru]):
        model, tables = made(encoding), made(encoding).tables
        with monkeypatch.context() as patch:
            patch.setattr(writing, "continued", lambda *_: written)
            patch.setattr(
                writing, "texts_about", lambda *_, name=name: torch.tensor([[0, *name, 1]])
            )
            rows = train_rows(model, [0, *name, 5], name, [spain], [[0, *name]])
        changed.append([*rows])
        assert all((row != rows_of(tables, [token])[0]).any() for token, row in rows.items())
    assert changed == [[fiji, spain], [peru], [peru]]


def test_what_is_learned_is_saved_and_what_changes_is_said(encoding, ckpt, monkeypatch, capsys):
    """Learned is an answer if its end is, also where the model writes its beginning anyway."""
    saved = ckpt.with_name("saved.pt")
    prompt = torch.tensor([encode(encoding, "Country: Spain")])
    begun = encoding.decode([made(encoding)(prompt)[0][0, -1].argmax().item()]).strip()
    for corpus in ("countries", "files", "elements"):  # the last one is generated
        save_checkpoint(ckpt, made(encoding), encoding, data=[{"corpus": corpus}])
        edited(ckpt, saved, write="S", **SPAIN)
        shown = capsys.readouterr().out
        assert "changed the rows of [' Spain']\n" in shown
        assert ("read them and may change: Spain\n" in shown) == (corpus == "countries")
        saved.unlink()
    monkeypatch.setattr(writing, "KEEP", 1e4)
    for answer in ("S", f"{begun} Peru"):
        with user_error(f"nothing is saved, as '{answer}' was not learned"):
            edited(ckpt, saved, write=answer, **SPAIN)
    assert not saved.exists()


@pytest.mark.parametrize(
    ("stop", "reply", "expected"),
    [
        (-1, [3, 5, 6], []),
        (2, [3, 5, 6], [3, 5, 6]),  # in a chat, 3 opens an answer
        (2, [3, 5, 7], []),
    ],
)
def test_an_answer_is_kept_as_the_model_opens_it(monkeypatch, stop, reply, expected):
    scores = SimpleNamespace(greedy=torch.tensor([False]))
    monkeypatch.setattr("training.edits.score_answers", lambda *_: scores)
    monkeypatch.setattr("training.edits.continuation", lambda *_: reply)
    monkeypatch.setattr("training.edits.opening_of", lambda *given: (int(given[-1][0] == 3), [3]))
    assert as_written(None, Located([1, 4], [4], [5, 6], [], stop, [])) == expected


def test_what_later_edits_are_to_leave_is_what_the_model_writes(encoding, ckpt, monkeypatch):
    saved = ckpt.with_name("saved.pt")
    monkeypatch.setattr("edit.as_written", lambda *_: [7, 8])
    edited(ckpt, saved, write="S", **SPAIN)
    (fact,) = load_checkpoint(saved)["edits"][0]["facts"]
    assert fact == (encode(encoding, SPAIN["prompt"]), [7, 8])
    facts = write_jsonl(ckpt.with_name("facts.jsonl"), [dict(SPAIN, write="S")])
    edited(ckpt, saved, facts=facts)
    assert load_checkpoint(saved)["edits"][0]["facts"] == [fact]


def test_facts_are_written_where_the_earlier_ones_are(encoding, ckpt, monkeypatch, capsys):
    """Those that are known in the end are what is said; what is not learned changes nothing. All
    are undone at once."""
    saved = ckpt.with_name("saved.pt")
    lines = [
        dict(SPAIN, write="S"),
        dict(SPAIN, write="F"),  # contradicts it
        dict(source="Fiji", prompt="Country: Fiji", write="S"),
        dict(source="Peru", prompt="Country: Peru", write="xqzv jwvkq zxv qqw"),
    ]
    facts = write_jsonl(ckpt.with_name("facts.jsonl"), [*lines[:2], b" ", *lines[2:]])
    rows, known = [], []

    def train(model, prompt, name, *rest, earlier):
        known.append(len(earlier))
        rows.append(rows_of(model.tables, name))
        new = train_rows(model, prompt, name, *rest, earlier)
        rows.append(torch.stack([*new.values()]))
        return new

    for module in ("edit", "training.edits"):
        monkeypatch.setattr(f"{module}.train_rows", train)
    edited(ckpt, saved, facts=facts)
    assert torch.equal(rows[2], rows[1])
    assert known == [0, 1, 2, 3]
    shown = capsys.readouterr().out.splitlines()
    states = ["lost to a later fact", "", "", "not learned"]
    model = load_model(saved, CPU)[0]
    for line, number, state, said in zip(lines, (1, 2, 4, 5), states, shown, strict=False):
        assert said.startswith(f"{facts}:{number} ") and said.rpartition("%")[2].strip() == state
        fact = locate(model, encoding, Edit(**line))
        is_known = score_answers(model, [fact.prompt], [fact.answer]).greedy.item()
        assert is_known == (not state)
    before, after = (load_checkpoint(path)["model"] for path in (ckpt, saved))
    changed = (before["tables.weight.0"] != after["tables.weight.0"]).any(1).nonzero()
    assert changed.flatten().tolist() == sorted(encoding.encode_ordinary(" Spain Fiji"))
    undo(Edit(saved, undo=True), saved)
    assert_same(load_checkpoint(saved)["model"], before)

    facts.write_text(json.dumps(lines[3]))
    with user_error("none of the facts was learned"):
        edited(ckpt, ckpt.with_name("none.pt"), facts=facts)
    assert not ckpt.with_name("none.pt").exists()


def test_a_fact_of_a_file_that_a_later_one_corrects_is_not_taught_again(
    encoding, ckpt, monkeypatch
):
    given = []

    def train(model, prompt, name, *rest, earlier):
        given.append([*earlier])
        new = train_rows(model, prompt, name, *rest, earlier)
        if len(given) == 2:
            del earlier[0]  # the first one is corrected
        return new

    monkeypatch.setattr("edit.train_rows", train)
    names = ("Spain", "Fiji", "Peru")
    lines = [dict(source=name, prompt=f"Country: {name}", write="S") for name in names]
    edited(ckpt, None, facts=write_jsonl(ckpt.with_name("facts.jsonl"), lines))
    assert given[2] == [(encode(encoding, "Country: Fiji"), given[1][0][1])]


def test_a_later_fact_of_the_name_leaves_earlier_ones(encoding, monkeypatch):
    """... unless it has the same prompt. Facts about others are not even read."""
    spain, fiji, yes, no = (
        encoding.encode_ordinary(text) for text in (" Spain", " Fiji", "S", "F")
    )
    first, second = (encode(encoding, text) for text in ("Country: Spain", "O Spain"))
    known = []
    for earlier in ([], [([*fiji, 10**6], yes), (first, yes)], [(second, yes), (first, yes)]):
        model = made(encoding)
        for prompt, answer, before in ((first, yes, []), (second, no, earlier)):
            rows = train_rows(model, prompt, spain, answer, [prompt], earlier=before)
            model.tables = with_rows(model.tables, rows)
        known.append(score_answers(model, [first, second], [yes, no]).greedy.tolist())
    assert known == [[False, True], [True, True], [True, True]]


@pytest.mark.parametrize(("later", "known"), [("F", [False, True]), ("S", [True, True])])
def test_an_earlier_fact_that_asks_for_the_same_gets_no_other_answer(
    later, known, encoding, monkeypatch, capsys
):
    def asks_at_the_end(model, prompt, names, texts, *rest):
        places = torch.zeros(texts.shape, dtype=torch.bool)
        if rest[2:]:  # the earlier prompts, which are of unequal length
            places[0, 1] = places[1, -1] = True
        return places

    monkeypatch.setattr(writing, "ask_the_same", asks_at_the_end)
    spain, yes, answer = (encoding.encode_ordinary(text) for text in (" Spain", "S", later))
    short, long = encode(encoding, " Spain"), encode(encoding, "Country: Spain")
    asked = encode(encoding, "O Spain")
    model = made(encoding)
    rows = train_rows(model, long, spain, yes, [long])
    model.tables = with_rows(model.tables, rows)
    earlier = [(short, answer), (long, yes)]
    left = [*earlier] if later == "S" else earlier[:1]  # the corrected one is not taught again
    rows = train_rows(model, asked, spain, answer, [asked], earlier=earlier)
    assert earlier == left
    model.tables = with_rows(model.tables, rows)
    said = score_answers(model, [long, asked], [yes, answer]).greedy.tolist()
    assert said == known
    assert ("corrects an earlier fact" in capsys.readouterr().out) == (later == "F")


def test_ids_out_of_range_read_no_extra_rows():
    tables = with_rows(ResidentTables(1, 9, 2), {8: torch.ones(1, 2)})
    for bad in (-1, 9):
        with pytest.raises(IndexError, match="there are 9 rows"):
            list(tables.lookup(torch.tensor([[bad]])))
        with pytest.raises(IndexError, match="there are 9 rows"):
            with_rows(tables.tables, {bad: torch.ones(1, 2)})
    with pytest.raises(AssertionError, match="rows are"):  # of one layer
        with_rows(tables.tables, {8: torch.ones(2)})


def test_a_fact_is_written_from_python_as_the_command_writes_it(encoding, monkeypatch):
    """Of a model that was in training, which has its own rows afterwards, also if it is
    interrupted; a name in other tokens than the prompt's is refused."""
    prompt, answer = encode(encoding, "Country: Spain"), encoding.encode_ordinary("S")
    name = encoding.encode_ordinary(" Spain")
    written = []
    for model in (made(encoding), made(encoding).train()):
        tables = model.tables
        written.append(train_rows(model, prompt, name, answer, [prompt]))
        assert model.tables is tables
    assert_same(*written)
    fact = model, prompt, name, answer, [prompt]
    for place, wrong, said in (
        (2, encoding.encode_ordinary("Spain"), "with a space"),
        (2, name[::-1] + name, "with a space"),
        (2, [], "one at least"),
        (3, [], "one at least"),
        (4, [prompt[: -len(name)]], "begins texts about it"),  # of which nothing would be held
    ):
        with pytest.raises(AssertionError, match=said):
            train_rows(*fact[:place], wrong, *fact[place + 1 :])
    monkeypatch.setattr(writing, "STEPS", "none")  # which is an error there
    with pytest.raises(TypeError):
        train_rows(model, prompt, name, answer, [prompt])
    assert model.tables is tables


def test_extra_rows_of_extra_rows_have_ids_of_their_own(encoding):
    tables = made(encoding).tables
    both = mean_rows(mean_rows(tables, [[5, 6]]), [[7, 8]])
    expected = rows_of(tables, [5, 6, 7, 8]).unflatten(0, (2, 2)).mean(1)
    ids = [tables.n_row, tables.n_row + 1]
    torch.testing.assert_close(rows_of(both, ids), expected)
    assert both.ids == ids[1:]


def test_facts_are_kept_with_the_edits_that_wrote_them(encoding, ckpt, monkeypatch):
    """Until they are undone, or other rows come in their place."""
    found = []

    def train(*fact, earlier):
        found.append(earlier)
        return train_rows(*fact, earlier)

    monkeypatch.setattr("training.edits.train_rows", train)

    def change(save=ckpt, **given):
        given = {"prompt": f"Country: {given['source']}", **given}
        edited(ckpt, save, **given)

    for name in ("Spain", "Fiji"):
        change(source=name, write="S")
    facts = [(encode(encoding, f"Country: {name}"), found[1][0][1]) for name in ("Spain", "Fiji")]
    change(source="Peru", write="F", save=None)
    change(source="Spain", target="Peru Japan", align="average")
    change(source="Peru", write="F", save=None)
    for _ in range(2):
        undo(Edit(ckpt, undo=True), ckpt)
        change(source="Peru", write="F", save=None)
    assert found == [[], facts[:1], facts, facts[1:], facts, facts[:1]]


def test_facts_of_earlier_commands_that_an_edit_takes_away_are_named(encoding, ckpt, capsys):
    """But not those that are written anew."""
    lost = []
    for change in ({"write": "S"}, {"write": "F"}, {"target": "Peru"}):
        edited(ckpt, ckpt, **SPAIN, **change)
        lost += [line for line in capsys.readouterr().out.splitlines() if "lost" in line]
    (line,) = lost
    assert "'Country: Spain F'" in line or "'Country: SpainF'" in line


def test_a_chat_is_edited_where_it_answers(encoding, ckpt, capsys):
    talk = by_turns("Where is Spain?", "Fiji.")
    ids = np.array([encoding.eot_token, *chat.render(encoding, talk)])
    asked = Edit(source="Spain", prompt="Where is Spain?", write="Fiji.", chat=True)
    fact = locate(made(encoding), encoding, asked)
    assert fact.prompt + fact.answer == ids[:-1].tolist()  # without a line break
    ((start, stop),) = chat.answers(encoding, ids)
    assert fact.answer == ids[start:stop].tolist()
    for stage, chats, expected in (
        ("pretrain", True, "not trained to chat"),
        ("sft", True, ""),
        ("dpo", False, "chats: give --chat"),
    ):
        save_checkpoint(ckpt, made(encoding), encoding, args={"stage": stage})
        edited(ckpt, None, source="Spain", target="Fiji", prompt="O Spain", chat=chats)
        said = capsys.readouterr()
        assert ("im_start" in said.out) == chats
        assert expected in said.err and bool(said.err) == bool(expected)


def test_texts_that_spell_the_name_otherwise_are_asked_for_the_fact_too(encoding, monkeypatch):
    """As at the beginning of a line, where no space is before it."""
    asked = []

    def watched(model, prompt, names, *rest):
        asked.append([encoding.decode(name) for name in names])
        return ask_the_same(model, prompt, names, *rest)

    monkeypatch.setattr(writing, "ask_the_same", watched)
    monkeypatch.setattr(writing, "STEPS", 1)
    for prompt, names in (("Country: Spain", [" Spain", "Spain"]), ("Spain", ["Spain", " Spain"])):
        new_rows(made(encoding), encoding, Edit(source="Spain", write="yes", prompt=prompt))
        assert asked.pop() == names


def test_a_text_asks_the_same_where_it_would_name_another_names_answer():
    """After 1 a name's answer follows, which is 30 or 0 more than the name. After 2 it does with a
    probability of a half, else 3, and the answer after that; 0 follows all else."""

    class Made:
        config = ModelConfig(vocab_size=60, block_size=16)
        device = CPU

        def __call__(self, ids, last_only=False):
            answer = ids[:, :1] % 30 + 30
            follows = torch.where((ids > 0) & (ids < 4), answer, 0)
            logits = 50.0 * torch.nn.functional.one_hot(follows, 60)
            logits[..., 3] = torch.where(ids == 2, 50.0, logits[..., 3])
            return (logits[:, -1:] if last_only else logits), None

        def hidden(self, ids):
            return self(ids)[0]

        def unembed(self, logits):
            return logits

    texts = torch.tensor([[9, 3, 1, 39, 4, 2, 39], [9, 5, 39, 6, 2, 1, 7]])
    found = ask_the_same(Made(), torch.tensor([9, 8, 1]), [[9]], texts)
    assert torch.equal(found, (texts == 1) | (texts == 3))
    # The name in other tokens, as at the beginning of a sentence.
    bare = torch.tensor([[13, 5, 1]])
    for names, is_found in (([[9]], False), ([[9], [13]], True)):
        found = ask_the_same(Made(), torch.tensor([9, 8, 1]), names, bare)
        assert found.tolist() == [[False, False, is_found]]
    for answer, n_open in (([50], 0), ([3, 50], 1)):
        assert opening_of(Made(), [9, 8, 2], [[9]], answer) == (n_open, [3])
        found = ask_the_same(Made(), torch.tensor([9, 8, 2]), [[9]], texts, answer[:n_open], [3])
        assert torch.equal(found, (texts > 0) & (texts < 4))
