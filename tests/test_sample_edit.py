"""sample.py and edit.py as a user runs them."""

import copy
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    CPU,
    EDIT,
    Largest,
    assert_same,
    command,
    contents,
    flags,
    leaves,
    refused,
    small_run,
    user_error,
)
from naive import decoder

import edit
from corpora.questions import score_answers
from model import Decoder, ModelConfig
from text import bpe
from text.columns import width
from text.spelling import typed
from text.tokenizer import encode
from training.checkpoints import load_checkpoint, load_model, tables_folder, write_checkpoint
from training.edits import first_sentence

NAMES = flags(source="Anna", target="Björn", prompt="Then Anna")


# --- sampling ---


def test_a_checkpoint_alone_is_enough_to_sample(trained, tmp_path):
    for folder in trained.values():
        shutil.copy(folder / "ckpt.pt", tmp_path)
        line = "sample.py --ckpt ckpt.pt --prompt Anna --max_new_tokens 3 --dtype bfloat16"
        done = command(line)
        assert done.stdout.startswith("Anna")


@pytest.mark.parametrize("offload", ["none", "disk"])
def test_weights_that_are_loaded_are_not_drawn_first(trained, monkeypatch, offload):
    """It takes a second to draw rows that are on no device. Nor is there room for them beside those
    that take their place."""
    monkeypatch.setattr(Decoder, "init_weights", lambda _: pytest.fail("drawn"))
    for ffn in ("stem", "embformer"):
        with Largest() as made:
            tables = load_model(trained[ffn], "cpu", offload)[0].tables
        assert made.shapes.count(tables.weight[0].shape) <= len(tables.weight)


def test_samples_depend_on_the_seed_alone(stem_ckpt):
    def text(more):
        return command(f"sample.py --max_new_tokens 10 {more} --ckpt", stem_ckpt).stdout

    one = text("--seed 5 --top_k 50 --top_p 0.95")
    assert text("--seed 5 --top_k 50 --top_p 0.95") == one
    assert text("--seed 6 --top_k 50 --top_p 0.95") != one
    assert text("--temperature 0") == text("--temperature 0 --seed 9") == text("--top_k 1")
    assert text("--top_k 0") == text("")
    greedy = text("--temperature 0")
    line = "-" * 40
    assert text("--temperature 0 --num_samples 2") == f"{greedy}{line}\n{greedy}"
    first, second = text("--num_samples 2").split(f"{line}\n")
    assert first != second


@pytest.mark.parametrize("n_over", [0, 50])
def test_of_a_prompt_that_fills_the_context_so_much_is_read_that_there_is_room(stem_ckpt, n_over):
    model, encoding, _ = load_model(stem_ckpt, "cpu")
    ids = encode(encoding, "Anna sees Emil. " * 40)[: model.config.block_size + n_over]
    prompt = encoding.decode(ids[1:])  # without <|endoftext|>
    assert encode(encoding, prompt) == ids
    line = ["sample.py --max_new_tokens 5 --temperature 0 --ckpt", stem_ckpt, "--prompt", prompt]
    done = command(*line)
    n = model.config.block_size - 4  # the last of the five is not read
    assert f"of {len(ids)} prompt tokens the model sees the last {n}\n" in done.stderr
    ids = torch.tensor([ids[-n:]])
    for _ in range(5):
        token = model(ids)[0][:, -1].argmax(-1)
        ids = torch.cat((ids, token[:, None]), dim=1)
    assert done.stdout.rstrip("\n") == prompt + encoding.decode(ids[0, n:].tolist())


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("sample.py --system Hi", "--system"),
        ("sample.py --chat --prompt Hi", "--prompt"),
        ("sample.py --out_dir out", "did you mean --ckpt?"),
        ("edit.py --source Anna --target Emil", "--prompt is needed"),
        ("edit.py --source Ann --prompt Anna --write x", "['Anna']: give a longer"),
        ("edit.py --source Anna --target Emil --prompt Nobody", "'Nobody' does not contain 'Anna'"),
        ("edit.py --source a --target b --prompt " + "a" * 99, "--prompt has 100 tokens"),
        ("edit.py --source Anna --target Emil --prompt Anna --ckpt {dense}/ckpt.pt", "no tables"),
        ("edit.py --source A --target B --prompt A --save {stem}/metrics.jsonl/x", "metrics.jsonl"),
        ("edit.py --source A --target B --prompt A --save {stem}/best.pt", "best.pt exists"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(stem_ckpt, trained, tmp_path, args, named):
    args = args.format(**trained).split()
    if "--ckpt" not in args:
        args += ["--ckpt", stem_ckpt]
    assert named in refused(*args)


# --- what an edit shows ---


def test_names_are_those_of_countries_where_the_text_is_about_them(data, tmp_path):
    """Not where only the preset is."""
    ckpt = small_run(data, tmp_path, preset="countries", max_iters=1) / "best.pt"
    line = ["edit.py", "--ckpt", ckpt, *EDIT]
    assert "after: Anna reads rows of Björn" in command(*line).stdout
    saved = load_checkpoint(ckpt)
    saved["data"][0]["corpus"] = "countries"
    write_checkpoint(ckpt, saved)
    assert "--target Björn" in refused(*line)
    assert "Spain" in refused("edit.py --source spain --target Peru --ckpt", ckpt)
    command(*line, "--target", "Peru")  # a name that is not in the text may read a country's rows
    saved["data"] *= 2
    saved["data"][1] = {**saved["data"][0], "corpus": "files"}  # a mixture
    write_checkpoint(ckpt, saved)
    command(*line)


def test_rows_of_n_grams_are_not_edited(data, tmp_path):
    ckpt = small_run(data, tmp_path, ffn="engram", max_iters=1) / "ckpt.pt"
    for line in (["edit.py", "--ckpt", ckpt, *EDIT], ["lab/analyze.py", "edits", ckpt]):
        assert "rows that do not belong to one token" in refused(*line)


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("Anna sees ", "Anna sees"),
        ("Bjo\u0308rn sees ", "Björn sees"),
        (r"Anna\nsees", "Anna\nsees"),
        (r"\\nabla, C:\\new\t\\\n", "\\nabla, C:\\new\\t\\\n"),  # "\\" is a backslash
    ],
)
def test_a_prompt_is_read_as_the_model_knows_it(encoding, text, known):
    assert typed(encoding, text) == known


def expecting(encoding, token: int, by: float) -> SimpleNamespace:
    """What stands for a model that finds one token likelier than all others."""
    logits = torch.zeros(encoding.n_vocab).index_fill(0, torch.tensor(token), by)
    return SimpleNamespace(
        device=CPU,
        config=ModelConfig(encoding.n_vocab),
        hidden=lambda ids, **_: ids[..., None],
        unembed=lambda x: logits.expand(len(x), -1),
    )


@pytest.mark.parametrize(
    ("words", "space"), [(("红国是黄。", "蓝国是绿。"), ""), (("a is b.", "c is d."), " ")]
)
def test_a_fact_stands_after_a_space_where_the_text_has_some(words, space):
    """Of a model that finds likely what the text has."""
    encoding = bpe.train([text for text in words for _ in range(20)], 300)
    prompt, answer = words[0][:-2].rstrip(), words[1][-2:]
    expected = encoding.encode_ordinary(space + answer)
    name = encoding.decode(encoding.encode_ordinary(prompt)[:1])
    asked = edit.Edit(source=name, prompt=prompt, write=answer)
    model = expecting(encoding, expected[0], by=5.0)
    assert edit.locate(model, encoding, asked).answer == expected


def test_a_likely_piece_of_a_word_does_not_say_that_no_space_stands_before_it():
    """A number that the model does not expect is hardly less likely than its first digit."""
    encoding = bpe.train(["born in 1941.", "born in 1941."] * 20, 300)
    spaced, bare = (encoding.encode_ordinary(f"{space}1941.") for space in (" ", ""))
    assert len(spaced) < len(bare)
    asked = edit.Edit(source="born", prompt="born in", write="1941.")
    assert edit.locate(expecting(encoding, bare[0], by=1.0), encoding, asked).answer == spaced


@pytest.mark.parametrize(
    ("sentence", "rest"),
    [
        (" Lisbon.", " Its"),
        (" Washington, D.C.", " The region"),
        ("St. John's.", " It"),
        (" J. R. Ewing has 3.5 wells.", " He"),
        (" No end", ""),
        (" Wien", "\nCountry: Peru."),
        ("東京。", "国"),
        ("दिल्ली है।", " वह"),
        ("لماذا؟", " نعم."),
        ("میڈرڈ۔", " وہ"),
        (" А. С. Пушкин.", " Он"),
        (" Երևան։", " Այն"),
        ("มาดริด", " ในสเปน"),
        (" Really?", " Yes."),
    ],
)
def test_a_sentence_ends_with_a_stop_that_ends_a_word(encoding, sentence, rest):
    tokens = encoding.encode_ordinary(sentence)
    text = [*tokens, *encoding.encode_ordinary(rest), encoding.eot_token]
    assert first_sentence(encoding, text) == tokens


@pytest.mark.parametrize(
    ("prompt", "is_said"), [("云岭，我在云岭", True), ("云岭，云岭", False), ("在 云岭", False)]
)
def test_it_is_said_that_a_name_is_joined_to_its_neighbors(capsys, prompt, is_said):
    """Where there are no blanks. There, "我在云岭" is one token."""
    encoding = bpe.train(["我在云岭。云岭，很大。"] * 20, 300)
    model = decoder(vocab_size=encoding.n_vocab)
    asked = edit.Edit(source="云岭", target="很大", prompt=prompt)
    edit.new_rows(model, encoding, asked)
    assert ("has '云岭' in other tokens" in capsys.readouterr().out) == is_said


@pytest.mark.parametrize(
    ("prompt", "answer", "is_joined"), [("云岭在", "东。", True), ("云岭在东", "。", False)]
)
def test_a_prompt_that_texts_have_joined_to_the_answer_is_said_to_be_so(prompt, answer, is_joined):
    """There, "在东" is one token, so that the model never read "在" before another one."""
    encoding = bpe.train(["云岭，在东。在东。"] * 20, 300)
    model = decoder(vocab_size=encoding.n_vocab)
    asked = edit.Edit(source="云岭", write=answer, prompt=prompt)
    located = edit.locate(model, encoding, asked)
    located = located._replace(answer=encoding.encode_ordinary(answer))  # without a space
    reason = edit.why_not_written(model, encoding, located)
    assert ("reaches from the prompt" in reason) == is_joined


def test_columns_stand_below_each_other_in_chinese(stem_ckpt, tmp_path, brief_facts):
    facts = tmp_path / "facts.jsonl"
    answers = ("云岭。", "Emil.")
    lines = [f'{{"source": "Anna", "write": "{said}", "prompt": "Anna"}}\n' for said in answers]
    facts.write_text("\n" * 8 + "".join(lines), encoding="utf-8")  # lines 9 and 10
    one = flags(source="Anna", write=answers[0], prompt="Anna")
    for more in (flags(facts=facts), one):
        shown = command("edit.py", "--ckpt", stem_ckpt, "--max_new_tokens", 1, *more).stdout
        rows = [row for row in shown.splitlines() if "%   after " in row]
        assert len(rows) > 1 and "云岭。" in shown
        assert len({width(row.partition("before ")[0]) for row in rows}) == 1, shown


def test_spaces_around_a_name_or_a_fact_mean_nothing():
    asked = edit.Edit(source=" Anna", target="Björn  ", write=" ")
    assert (asked.source, asked.target, asked.write) == ("Anna", "Björn", "")
    assert edit.Edit(source="Anna", write=" \nEmil").write == "\nEmil"
    with user_error("--target or --write"):
        edit.Edit(source="Anna", write=" ")


FACT = '{"source": "Anna", "prompt": "Anna sees", "write": "Emil"'


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (FACT, "damaged"),
        ("[]", "a line should be"),
        (FACT.replace('"write"', '"target"') + "}", "write is None"),
        (FACT + ', "promt": "x"}', "promt"),
        (FACT.replace('"Anna sees"', "7") + "}", "prompt is 7"),
        (FACT.replace("Anna sees", "Nobody") + "}", "'Nobody' does not contain 'Anna'"),
        ('{"source": "Anna", "write": "Emil"}', "--prompt is needed"),
        ('{"source": "Anna", "write": ""}', "is empty"),
    ],
)
def test_a_bad_line_of_facts_is_named_before_anything_is_written(stem_ckpt, tmp_path, line, named):
    facts = tmp_path / "facts.jsonl"
    facts.write_text(f"{FACT}}}\n\n{line}\n")
    save = ("--save", tmp_path / "new" / "ckpt.pt", "--ckpt", stem_ckpt)
    why = refused("edit.py --facts", facts, *save)
    assert f"{facts}:3" in why and named in why
    assert [path.name for path in tmp_path.iterdir()] == [facts.name]


def test_a_file_without_facts_or_with_flags_beside_it_is_refused(stem_ckpt, tmp_path):
    facts = tmp_path / "facts.jsonl"
    line = "edit.py", "--ckpt", stem_ckpt, "--facts", facts
    assert str(facts) in refused(*line)
    facts.write_text("\n")
    assert "has no facts" in refused(*line)
    for more in ("--undo", "--source Anna", "--prompt Anna", "--write Anna"):
        assert "--facts or --undo alone" in refused(*line, *more.split())


def test_a_file_of_facts_means_its_texts_as_they_are(encoding, tmp_path, monkeypatch):
    """Without the escapes of flags; with the accents that the model knows."""
    facts = tmp_path / "facts.jsonl"
    prompt = "C:\\new\n Bjo\u0308rn \\\\ \\nabla"
    facts.write_text(json.dumps(dict(source="Bjo\u0308rn", prompt=prompt, write="x")))
    monkeypatch.setattr(edit, "locate", lambda model, encoding, fact: (fact.source, fact.prompt))
    of_files = {"args": {}, "data": [{"corpus": "files"}]}
    ((_, read),) = edit.read_facts(edit.Edit(facts=facts), None, encoding, of_files).values()
    assert read == ("Björn", prompt.replace("o\u0308", "ö"))


# --- edits that last ---


def read(path: Path) -> dict:
    """Every tensor and number of a checkpoint, tables in files included."""
    saved = load_checkpoint(path, verify=True)
    for name in ("edits", "tables", "storage"):  # a record, and where tables are
        saved.pop(name, None)
    return copy.deepcopy(leaves(saved))  # what is mapped would change with its file


def test_probabilities_of_a_written_fact_are_those_of_the_saved_model(out, brief_facts):
    ckpt, saved = out / "ckpt.pt", out / "edited.pt"
    fact = flags(source="Anna", prompt="Anna", write="at", save=saved)
    shown = command("edit.py --offload disk --ckpt", ckpt, *fact).stdout

    encoding = load_model(ckpt, CPU)[1]
    asked = [encode(encoding, "Anna")], [encoding.encode_ordinary(" at")]
    found = []
    for path, title in ((ckpt, "before"), (saved, "after")):
        found.append(score_answers(load_model(path, CPU)[0], *asked).probability.item())
        assert re.search(rf"of 'at'.* {title} +{100 * found[-1]:.1f}%", shown)
    assert found[1] > 10 * found[0]


@pytest.fixture
def shown(stem_ckpt, capsys):
    """What is shown of an edit that changes no rows."""
    model, encoding, _ = load_model(stem_ckpt, CPU)
    asked = edit.Edit(source="Anna", target="Björn", prompt="Anna sees")
    located = edit.locate(model, encoding, asked)

    def shown():
        edit.compare(model, encoding, asked, located, edit.State(model.tables, located.prompt))
        return capsys.readouterr().out

    return shown


def test_a_swap_that_moves_nothing_says_so(shown, monkeypatch):
    for after in (5, 6):
        monkeypatch.setattr(edit, "continuations", lambda *_, after=after: ([5], [after]))
        said = shown()  # its only table is in the second of two layers
        assert ("moves nothing" in said) == ("rows in the last layer alone" in said) == (after == 5)


def test_probabilities_of_long_answers_are_told_apart(shown, monkeypatch):
    for p, expected in (
        ((0.4, 1e-9), "before  40.0%   after   0.0%"),
        ((3e-7, 2e-9), "3e-07   after  2e-09"),
    ):
        monkeypatch.setattr(edit, "probabilities", lambda *_, p=p: [("It was", *p)])
        assert expected in shown()


@pytest.mark.parametrize("place", ["none", "disk"])
def test_saved_edits_are_undone_last_first_to_the_bit(trained, on_disk, tmp_path, place):
    """One in another file, one in place. Which rows they change: test_alignments.py."""
    source = {"none": trained["stem"], "disk": on_disk}[place]
    ckpt = shutil.copytree(source, tmp_path / "run") / "ckpt.pt"
    files = contents(ckpt.parent)
    saved, restored = (tmp_path / name / "ckpt.pt" for name in "ab")
    states = [read(ckpt)]

    def run(*args):
        return command("edit.py", "--offload", place, "--device", "cpu", *args)

    for read_from, name in ((ckpt, "Chloë"), (saved, "Björn")):
        run("--ckpt", read_from, *NAMES, "--target", name, "--save", saved)
        states.append(read(saved))
    table = "['model']['tables.weight.0']"  # all else stays
    for state in states[1:]:
        assert_same({**states[0], table: 0}, {**state, table: 0})
    run("--ckpt", saved, "--undo", "--save", restored)
    assert_same(states[1], read(restored))
    for state in (states[1], states[0]):
        run("--ckpt", saved, "--undo")
        assert_same(state, read(saved))
    assert len(list(tables_folder(saved).glob("*"))) <= 1
    assert "holds no edit" in refused("edit.py", "--ckpt", saved, "--undo")
    assert contents(ckpt.parent) == files
