"""prepare.py and the folders it writes: from text to tokens, and what can be wrong with a file."""

import os
import time
from collections import Counter, deque
from functools import partial
from multiprocessing import get_context
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    by_turns,
    command,
    contents,
    flags,
    peak,
    refused,
    says,
    user_error,
    write_jsonl,
)

import prepare
from corpora import countries
from text import bpe, chat, documents, files, splitting, tokenizer, writer
from text.dataset import open_tokens, read_meta, read_tokenizer
from text.writer import write_dataset
from training.batches import Data
from training.checkpoints import load_model


def from_files(out, path, encoding=None, kind="text", **more):
    """prepare_files() of one file, with flags as on the command line."""
    settings = prepare.Preparation(input=[path], out_dir=out, **more)
    return prepare.prepare_files(settings, [path], kind, encoding)


def stored(folder, split):
    """The documents in a token file, each with its <|endoftext|>. Their sizes are in meta.json."""
    meta = read_meta(folder)
    ids = open_tokens(folder, split, meta)
    encoding = read_tokenizer(folder, meta)
    found = np.split(ids, np.flatnonzero(ids == encoding.eot_token))[1:]
    n_byte = sum(len(encoding.decode_bytes(part[1:])) for part in found)
    sizes = {"documents": len(found), "tokens": sum(map(len, found)), "bytes": n_byte}
    assert sizes.items() <= meta[split].items()
    return [part.tolist() for part in found]


TEXTS = [{"text": f"<|im_start|>A page<|im_end|> {i} <|endoftext|> says hello."} for i in range(60)]
TALK = by_turns("What is it? <|im_end|>", "A number. 日本")
SYSTEM = says("system", "S")


def test_a_documents_split_depends_on_its_hash_alone():
    hashes = [splitting.hashed(f"document number {i}") for i in range(500)]
    chosen = [splitting.is_validation(number, 0.1) for number in hashes]
    assert 20 < sum(chosen) < 80
    assert splitting.hashed("document") == 3665553475736990530  # in every version


BOOK = "One.\r\n\r\n" + "Two. " * 400 + "\r\n\r\nThree. The start of it.\r\n"
GUTENBERG = (
    "\ufeffThe Project Gutenberg EBook of Numbers\r\n\r\nThis eBook is for ...\r\n\r\n"
    f"*** START OF THIS PROJECT GUTENBERG EBOOK NUMBERS ***\r\n{BOOK}\r\n"
    "End of Project Gutenberg’s Numbers\r\n\r\n*** END OF THE PROJECT GUTENBERG EBOOK NUMBERS ***"
    "\r\n\r\n" + "Small print. \r\n\r\n" * 300 + "Subscribe to hear about new eBooks.\r\n"
)
ETEXT = (  # of the nineties
    "***The Project Gutenberg Etext of Numbers***\n\nPlease read this.\n\n"
    "*END THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n"
)
MINE = [f"Paragraph {i} of mine.\n\n" for i in range(600)]
PROSE = "The Project Gutenberg eBook of it is old.\n\n" + "".join(MINE[:300])
PROSE += "End of the Project Gutenberg era, said Hart.\n\n" + "".join(MINE[300:])


@pytest.mark.parametrize(
    ("text", "n_document", "kept"),
    [
        ("word\n" * 399 + "\nNext.", 1, "word\n" * 399 + "\nNext."),  # 1,996 bytes
        ("word\n" * 400 + "\nNext.", 2, "word\n" * 400 + "\nNext."),
        ("One.\none.\n<|endoftext|>\nTwo.\n<|endoftext|>\n\n", 2, "One.\none.\nTwo.\n"),
        ("\ufeff" + "A line.\r\n" * 4000, 4, "A line.\n" * 4000),  # of at least 10,000
        ("word " * 5000, 3, "word " * 5000),  # a line of 25,000
        ("　　词\n　\n" * 900, 3, "　　词\n　\n" * 900),  # blank lines of U+3000
        (2 * GUTENBERG, 4, 2 * (BOOK + "\r\n").replace("\r\n", "\n")),  # two books in one file
        (ETEXT + "One.\n", 1, "One.\n"),
        (PROSE + GUTENBERG + PROSE, 18, PROSE + BOOK.replace("\r\n", "\n") + "\n" + PROSE),
    ],
)
def test_txt_is_cut_into_documents(tmp_path, text, n_document, kept):
    (tmp_path / "a.txt").write_bytes(text.encode())
    report = documents.Report(0)
    found = list(documents.read([tmp_path / "a.txt"], report))
    assert "".join(found) == kept and len(found) == n_document
    n_notice = 4000 if GUTENBERG in text else len(ETEXT) * text.count(ETEXT)
    assert n_notice <= report.notes[files.NO_NOTICES] < 3 * n_notice + 1


def test_only_a_small_text_is_cut_to_validate_with_and_after_lines(monkeypatch):
    monkeypatch.setattr(splitting, "MANY", 10)
    texts = [f"Document {i}" for i in range(13)]
    splits, found = zip(*splitting.labelled(texts, 1e-9, Counter()), strict=True)
    assert list(found) == texts and splits.count("val") == 1
    numbers = [str(number) for number in range(60)]
    for n in (11, 21, 31, 41):  # added ones move none
        splits = [
            [s for s, _ in splitting.labelled(part, 0.5, Counter())]
            for part in (numbers, numbers[:n])
        ]
        assert splits[0][:n] == splits[1]
    text = "On that day somebody bought a lamp, and it was red.\n" * 300
    for held in (set(), {splitting.hashed(text)}):  # a copy of it may be held out with its file
        notes = Counter()
        splits, found = zip(*splitting.labelled([text], 1e-9, notes, held), strict=True)
        assert notes[splitting.CUT] == 1 and notes[splitting.HELD_COPIES] == len(held)
        assert "".join(found) == text and {*splits} == {"train", "val"}
        assert all(part.endswith("\n") for part in found)


def test_a_long_document_is_cut_in_no_quadratic_time():
    text = "On that day somebody bought a lamp, and it was red.\n" * 800_000
    start = time.process_time()
    pieces = splitting.cut(text, 10_000, 8000)
    assert time.process_time() - start < 2  # 0.03 s; copied again for each piece: 28
    assert "".join(pieces) == text and max(map(len, pieces)) <= 8000


@pytest.mark.parametrize("first", [True, False])
def test_copies_are_trained_on(monkeypatch, first):
    """All but one, also of what is for validation by its hash; the notes count them."""
    if not first:
        monkeypatch.setattr(splitting, "MANY", 50)
    texts = [f"Document number {i}" for i in range(800)]
    held = [text for text in texts if splitting.is_validation(splitting.hashed(text), 0.1)]
    many = texts[:50] + 300 * held[-1:] + texts[50:]
    notes = Counter()
    splits = list(splitting.labelled(many, 0.1, notes))
    assert [text for _, text in splits] == many
    assert splits.count(("val", held[-1])) == 1 and splits.count(("train", held[-1])) == 300
    assert notes == {splitting.COPIES: 300}
    assert {text for split, text in splits if split == "val"} >= {*held}


def test_all_of_a_text_can_be_evaluated_on(tmp_path, story, stem_ckpt):
    """By the command that is printed, in windows from its beginning on."""
    text = story.read_text()[:1500]
    (tmp_path / "page.txt").write_text(text)
    line = f"prepare.py --input page.txt --val_fraction 1 --out_dir page --tokenizer {stem_ckpt}"
    words = command(line).stdout.split("next: python ")[1].split()
    shown = command("train.py", *words[1:], "--dtype", "float32").stdout
    model, encoding, _ = load_model(stem_ckpt, "cpu")
    ids = torch.tensor(tokenizer.encode(encoding, text))
    size = model.config.block_size
    windows = ids.unfold(0, size + 1, size)
    with torch.no_grad():
        _, loss = model(windows[:, :-1], windows[:, 1:])
    assert f"val loss {loss:.3f}" in shown
    assert f"{size * len(windows)} of {len(ids) - 1} held-out tokens" in shown


def test_the_next_command_trains_on_a_page(tmp_path):
    (tmp_path / "page.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    said = command("prepare.py --vocab_size 300 --input page.txt --out_dir d").stdout
    words = said.split("next: python ")[1].splitlines()[0].split()
    tiny = flags(n_layer=2, n_head=2, n_embd=16, max_iters=1, eval_tokens=64, device="cpu")
    command("train.py", *words[1:], *tiny)
    assert (tmp_path / "out/d/ckpt.pt").exists()
    # ... and goes on with a model, whose context is longer, beside its folder.
    (tmp_path / "short.txt").write_text("It was the age of wisdom. " * 18)
    said = command("prepare.py --input short.txt --out_dir more/d --tokenizer out/d").stdout
    words = said.split("next: python ")[1].splitlines()[0].split()
    command("train.py", *words[1:], *flags(max_iters=1, eval_tokens=64, device="cpu"))
    assert (tmp_path / "out/d-trained/ckpt.pt").exists()


@pytest.mark.parametrize(
    "texts",
    [
        ["ab"],
        [f"name{i}\n" for i in range(2000)],
        [" ".join(f"word{i}" for i in range(2000))],
        ["The quick brown fox."] * 2000,
    ],
)
def test_any_text_leaves_some_to_validate_with(tmp_path, texts):
    """Small ones, and some that hardly end."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    said = command("prepare.py --vocab_size 300 --out_dir out --input", path).stdout
    meta = read_meta(tmp_path / "out")
    assert ("little to validate with" in said) == (meta["val"]["tokens"] < 1000)
    n_all = meta["train"]["bytes"] + meta["val"]["bytes"]
    least = min(8000, n_all // 20) // 2
    assert least <= meta["val"]["bytes"] <= max(1, 0.3 * n_all)


def test_a_public_data_set_by_name(tmp_path, monkeypatch):
    """Prepared like a file of one's own; but bad lines stop nothing. Special tokens that a text
    spells stay text."""
    path = write_jsonl(tmp_path / "all.jsonl", [*TEXTS, b"oops", b"oops"])
    monkeypatch.setattr("text.download.fetch", lambda name, folder: [path])
    line = "prepare.py --dataset tinystories --val_fraction 0.3 --vocab_size 300"
    said = command(line).stdout
    assert "skipped 2 of 62 documents" in said
    for special in ("<|im_start|>", "<|endoftext|>"):
        assert f"note: 60 times {special} stays text" in said
    found = [
        ids for split in ("train", "val") for ids in stored(tmp_path / "data/tinystories", split)
    ]
    assert len(found) == 60 and all(min(ids[1:]) > 2 for ids in found)


def test_the_default_corpora_by_command(tmp_path, monkeypatch):
    """Of fewer countries: the corpus of all takes seconds."""
    some = [c for c in countries.table() if c.name in ("Spain", "Germany", "Peru", "Chad")]
    monkeypatch.setattr(countries, "table", lambda: some)
    folder = tmp_path / "data/countries"
    assert "train.py --data_dir data/countries" in command("prepare.py").stdout
    command("prepare.py --dataset countries-sft --tokenizer", folder)
    encoding = read_tokenizer(folder, read_meta(folder))
    texts, chats = countries.documents(0), countries.conversations(0)
    assert read_meta(tmp_path / "data/countries-sft")["kind"] == "chat"
    for number, split in enumerate(("train", "val")):
        ids = stored(folder, split)
        assert ids == [tokenizer.encode(encoding, text) for text in texts[number]]
        ids = stored(tmp_path / "data/countries-sft", split)
        assert ids == [[0, *chat.render(encoding, talk)] for talk in chats[number]]


# --- what can be wrong with flags and files ---


def test_bad_flags_and_files_are_one_clear_line(tmp_path, story, data):
    files = {"A.TXT": b"caf\xe9 " * 100, "empty.txt": b"", "none.txt": b"", "one.txt": b"a"}
    files["blank.jsonl"], files["dna.fa"] = b'{"text": ""}', b">a\nACGT"
    files["a.txt.zst"] = b"(\xb5/\xfd"
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "bpe").mkdir()
    (tmp_path / "bpe/vocab.json").write_text("{}")
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "ckpt.pt").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text("{}")
    mine = f"--input {story} --out_dir x"
    ours = f"python {os.path.relpath(ROOT, tmp_path)}"  # hints can be pasted where the user is
    for line, reason in (
        ("--input gone.txt --out_dir x", "gone.txt: No such file"),
        ("--input A.TXT --out_dir x", "A.TXT:1: not UTF-8: convert it"),
        ("--input empty.txt --out_dir x", "0 of 0 documents (empty)"),
        ("--input one.txt --out_dir x", "no document for val.bin"),
        ("--input one.txt none.txt --hold_out_files 0.5 --out_dir y", "no document for train.bin"),
        ("--input blank.jsonl --out_dir x", "0 of 0 documents (empty documents are left out)"),
        ("--input empty --out_dir x", "empty: the folder has none of .txt, .md"),
        ("--input ckpt.pt --out_dir x", "ckpt.pt: it is none of .txt, .md"),
        ("--input dna.fa --out_dir x", "add .txt to its name"),
        ("--input a.txt.zst --out_dir x", "unpack other archives"),
        (f"--input {story}", "--out_dir"),
        (f"{mine} --dataset tinystories", "--input or --dataset tinystories"),
        (f"{mine} --vocab_size 0", "--vocab_size 0 must be at least 259"),
        (f"{mine} --out_dir file/x", "cannot write"),
        ("--dataset minimind-sft", "needs the base model's tokenizer"),
        (f"{mine} --tokenizer {data} --vocab_size 300", "--vocab_size 300"),
        (f"{mine} --tokenizer ckpt.pt", "is damaged"),
        (f"{mine} --tokenizer llama", f"{ours}/convert.py llama"),
        (f"{mine} --tokenizer .", "ckpt.pt is damaged"),
        (f"{mine} --tokenizer empty", "no empty/meta.json"),
        (f"{mine} --tokenizer Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B: no such file or folder, nor one"),
        (f"{mine} --tokenizer {data}/train.bin", "train.bin is damaged"),
        (f"{mine} --tokenizer bpe", "no bpe/tokenizer.json: it is all that is read"),
        (f"{mine} --tokenizer bpe/vocab.json", "no bpe/tokenizer.json: it is all that is read"),
        ("--val_fraction 0.5", "--val_fraction is for files"),
        (f"{mine} --val_fraction 1", "give --tokenizer that of the model to evaluate"),
    ):
        assert reason in refused(f"prepare.py {line}")
    assert not (tmp_path / "x").exists()
    lost = refused("train.py --out_dir x --data_dir", "my data")
    assert f"run {ours}/prepare.py --out_dir 'my data', with --input" in lost


BLANKS = b" " * 10**6


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"not json", "not JSON in UTF-8"),
        (b"[" * 100_000, "not JSON in UTF-8"),
        (b'{"text": "\\ud800"}', "not JSON in UTF-8"),
        (b"[]", r"\[\] where a record"),
        (b'{"text": "a\\u0000b"}', "it has NUL"),
        (b'{"prefix": "a", "suffix": "b"}', 'no "text", .*: its keys are prefix, suffix'),
        (b'{"prompt": "a", "input": "%s.", "output": "b"}' % BLANKS, "100,000 blanks or more"),
        (b'{"chosen": "a", "rejected": "b"}', "chosen and rejected must end with an answer"),
        ({"chosen": TALK, "rejected": TALK}, "chosen and rejected must differ in their last"),
        ({"messages": TALK}, "chat, but .*a.jsonl:1 is text"),
        (b'{"messages": "Hi"}', 'no answers to learn among "user".*: its keys are messages'),
        (b'{"question": "a", "answer": ""}', "no answer, or an empty one"),
        (b'{"prompt": "a", "chosen": "b", "rejected": null}', '"rejected" is empty'),
        (b'{"prompt": "a", "chosen": "", "rejected": "b"}', '"chosen" is empty'),
        (
            b'{"prompt": "a", "chosen": "[{\'role\': \'user\'}]", "rejected": "c"}',
            "messages as one text",
        ),
        (b'{"problem": "a", "answer": "b"}', r"no question \(--columns.*: its keys are problem"),
        (b'{"system": "a", "answer": "b"}', "no question"),
        ({"messages": TALK, "chosen": "a", "rejected": "b"}, "messages must end with the question"),
        ({"messages": by_turns("a", " ")}, "an answer is empty"),
        ({"system": "A", "messages": [SYSTEM, *TALK]}, "a system message beside"),
        (
            {"system": "A", "prompt": [SYSTEM, TALK[0]], "chosen": "a", "rejected": "b"},
            "a system message beside",
        ),
        (b'{"messages": [{"role": ["user"], "content": ""}]}', '.*need "role" and "content"'),
        (b'{"question": "12+34=", "answer": 46}', ".*texts need quotes: 46: its keys are question"),
        ({"messages": by_turns([{"type": "image"}])}, "content that is not text: .*image"),
        ({"messages": [*TALK, says("assistant", "x", weight=0.5)]}, ".*must be 0 or 1, not 0.5"),
        ({"messages": [*TALK, says("assistant\nx", "f")]}, ".*roles must have one line"),
    ],
)
def test_bad_lines_are_named_counted_and_skipped(tmp_path, line, reason):
    path = write_jsonl(
        tmp_path / "a.jsonl", [*TEXTS[:7], {"text": None, "id": 1}, line, b"  ", *TEXTS[7:]]
    )
    report = documents.Report(max_bad=0.02)
    assert list(documents.read([path], report)) == [record["text"] for record in TEXTS]
    assert (report.bad, report.documents) == (1, 61)  # blank lines are neither
    with user_error(rf"1 of 61 documents \(.*a\.jsonl:9: {reason}.*than 1%"):
        from_files(tmp_path / "no", path, vocab_size=300)
    assert not (tmp_path / "no").exists()


def test_a_record_that_is_nested_too_deep_is_a_bad_line(tmp_path, monkeypatch):
    """As where Python's reader of JSON follows deeper than Python's own functions may."""
    plain_text = documents.plain_text

    def shallow(value, *more):
        if value == ["deep"]:
            raise RecursionError("maximum recursion depth exceeded")
        return plain_text(value, *more)

    monkeypatch.setattr(documents, "plain_text", shallow)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": ["deep"]}, *TEXTS])
    report = documents.Report(max_bad=0.02)
    assert len(list(documents.read([path], report))) == len(TEXTS) and report.bad == 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_line_without_end_is_read_in_pieces(tmp_path, monkeypatch, name):
    """As a small packed file may have, which would fill memory."""
    monkeypatch.setattr(files, "RECORD", 1000)
    (tmp_path / name).write_text("text\n" + "x" * (1 << 20))
    with open(tmp_path / name, "rb") as raw, files.opened(tmp_path / name, raw) as file:
        assert peak(lambda: deque(files.records(tmp_path / name, file), 0)) < 1 << 19


# --- conversations and tokenizers ---


def test_conversations_that_call_tools_are_left_out(tmp_path, data):
    """However many, as in the data that MiniMind is fine-tuned with."""
    calls = [
        {"messages": [*TALK, says("assistant", "", tool_calls='[{"name": "f"}]'), *TALK]},
        {"messages": [*TALK, says("assistant", None, function_call={"name": "f"})]},
        {"messages": [*TALK, says("function_call", "f"), *TALK]},
        {"chosen": [*TALK, says("assistant", "", tool_calls=[1])], "rejected": TALK},
        {"messages": [*TALK, {"role": "assistant", "tool_calls": [{"id": 1}]}, *TALK]},
    ]
    write_jsonl(tmp_path / "none.jsonl", calls)
    write_jsonl(tmp_path / "some.jsonl", [*calls, *({"messages": TALK} for _ in range(9))])
    line = f"prepare.py --tokenizer {data} --out_dir out --input"
    said = command(f"{line} some.jsonl").stdout
    assert "note: 5 conversations that call tools are left out" in said
    meta = read_meta(tmp_path / "out")
    assert meta["train"]["documents"] + meta["val"]["documents"] == 9
    said = refused(f"{line} none.jsonl --overwrite")
    assert "0 of 0 documents (conversations that call tools are left out)" in said


TOLD = by_turns("Hi?", "Ho.")
ASKED, ANSWERED = TOLD
OTHER, EMPTY = says("assistant", "No."), says("assistant", "")


@pytest.mark.parametrize(
    ("line", "document", "ignored"),
    [
        (
            b'{"conversations": [{"from": "human", "value": "Hi?"}, {"from": "GPT", "value": '
            b'"Ho."}]}',
            TOLD,
            "",
        ),
        (
            b'{"messages": [{"role": "USER ", "content": [{"type": "text", "text": "Hi?"}]}, '
            b'{"role": " Assistant\\n", "content": "Ho.", "weight": 1, "train": false}]}',
            TOLD,
            "train",
        ),
        (
            {"messages": TOLD, "system": "S", "tools": [1], "id": 3, "x": None, "y": "", "z": []},
            [SYSTEM, *TOLD],
            "tools id",
        ),
        (
            {"messages": [ASKED, {**ANSWERED, "weight": 0}, ASKED, ANSWERED]},
            [ASKED, {**ANSWERED, "weight": 0}, ASKED, ANSWERED],
            "",
        ),
        (
            b'{"instruction": "Add.", "input": "1, 2", "output": "3"}',
            by_turns("Add.\n1, 2", "3"),
            "",
        ),
        (b'{"instruction": "Hi?", "text": "Ho.", "id": 1}', "Ho.", "instruction"),
        # A list has a line break between parts, unless a blank is there.
        ({"text": ["One", ["two ", "three"], "", {"text": "4"}]}, "One\ntwo three\n4", ""),
        # Rows of tables for several forms: what is empty decides nothing.
        ({"chosen": [], "rejected": None, "text": " ", "messages": TOLD, "input": ""}, TOLD, ""),
        (
            {"messages": [{"from": m["role"], "value": m["content"], "content": ""} for m in TOLD]},
            TOLD,
            "",
        ),
        (
            b'{"system_prompt": "S", "instruction": "Hi?", "output": "Ho.", "text": "Hi? Ho."}',
            [SYSTEM, *TOLD],
            "text",
        ),
        (b'{"prompt": "Hi?", "response": "Ho.", "score": 0}', TOLD, "score"),
        ({"prompt": "Hi?", "output": '[{"content": 1}]'}, by_turns("Hi?", '[{"content": 1}]'), ""),
        ({"prompt": [ASKED], "completion": [ANSWERED]}, TOLD, ""),
        ({"prompt": TOLD}, TOLD, ""),
        ({"conversation": TOLD, "model": "x"}, TOLD, "model"),  # WildChat's
        (
            b'{"system": "S", "instruction": "Hi?", "input": "x", "chosen": "Ho.", "rejected": '
            b'"No."}',
            ([SYSTEM, *by_turns("Hi?\nx", "Ho.")], [SYSTEM, *by_turns("Hi?\nx", "No.")]),
            "",
        ),
        ({"messages": [ASKED], "chosen": ANSWERED, "rejected": OTHER}, (TOLD, [ASKED, OTHER]), ""),
        (
            {
                "prompt": [ASKED],
                "chosen": [ANSWERED, ASKED, ANSWERED],
                "rejected": [ANSWERED, ASKED, OTHER],
            },
            ([*TOLD, *TOLD], [*TOLD, ASKED, OTHER]),
            "",
        ),
        (
            {"prompt": "Hi?", "chosen": TOLD, "rejected": [ASKED, EMPTY]},
            (TOLD, [ASKED, EMPTY]),
            "prompt",
        ),
    ],
)
def test_other_programs_forms_are_read_and_what_is_ignored_is_named(
    tmp_path, line, document, ignored
):
    path = write_jsonl(tmp_path / "a.jsonl", [line, line])
    report = documents.Report(0)
    assert list(documents.read([path], report)) == [document] * 2
    assert +report.notes == {
        f"documents have {key!r}, which is ignored": 2 for key in ignored.split()
    }


def test_roles_that_are_not_known_are_named(tmp_path, encoding, capsys):
    records = [{"messages": [*TOLD, says(f"Anna {n}", "No.")]} for n in range(60)]
    from_files(tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", records), encoding, "chat")
    said = capsys.readouterr().out
    assert said.count("note: 1 messages have the role 'anna ") == 20
    assert said.count("which is not learned") == 20 and "note: 40 other notes" in said


def test_a_flag_of_files_that_is_repeated_adds_to_them(tmp_path, story):
    write_jsonl(tmp_path / "more.jsonl", TEXTS)
    line = f"prepare.py --vocab_size 300 --input {story} --out_dir out --input more.jsonl"
    command(f"{line} more.jsonl")
    assert read_meta(tmp_path / "out")["sources"] == [story.name, "more.jsonl", "more.jsonl"]


def test_an_answer_of_weight_0_is_read_and_not_learned(tmp_path, encoding):
    talk = by_turns("Hi?", "Ho.", "Hi?", "Yes.", "Hi?", "No.")
    marked = [*talk[:3], {**talk[3], "weight": 0}, *talk[4:]]
    documents = [("train", marked), ("val", talk)]
    write_dataset(tmp_path, documents, encoding, "chat", corpus="x")
    ids, targets = Data(str(tmp_path), "chat", 128, 0, 1).train.sequence(0)
    whole = [encoding.eot_token, *chat.render(encoding, talk)]
    assert ids.tolist() == whole[:-1]
    learned = encoding.decode(targets[targets >= 0].tolist())
    assert learned == " Ho.<|im_end|> No.<|im_end|>"
    # Other stages learn all that is said.
    assert Data(str(tmp_path), "text", 8, 0, 1).train.ids.tolist() == whole


def test_conversations_need_markers(tmp_path):
    ranks = {bytes([b]): b for b in range(256)}
    bare = tokenizer.make_encoding("bare", bpe.PATTERN, ranks, {"<|endoftext|>": 256})
    write_dataset(tmp_path, [("train", "a"), ("val", "b")], bare, corpus="mine")
    with user_error(r"lacks <\|im_start\|>"):
        prepare.ready_tokenizer(str(tmp_path), "chat")


# --- sizes, and writing in one piece ---


def test_the_tokenizer_is_trained_on_a_bounded_sample(tmp_path, monkeypatch):
    path = tmp_path / "words.txt"
    path.write_text("\n<|endoftext|>\n".join(5 * letter for letter in "abcdefghij"))
    monkeypatch.setattr(prepare, "SAMPLE", 1)  # byte: a single document, of one letter
    from_files(tmp_path, path)
    learned = read_tokenizer(tmp_path, read_meta(tmp_path)).token_byte_values()
    assert len({token[0] for token in learned if len(token) > 1}) == 1


def test_memory_grows_neither_with_files_nor_with_long_documents(tmp_path, encoding, monkeypatch):
    monkeypatch.setattr(writer, "BLOCK", 10)
    monkeypatch.setattr(splitting, "MANY", 10)
    peaks = []
    for n in (50, 500):
        records = [{"text": f"{i} " + "ab " * 300} for i in range(n)]
        path = write_jsonl(tmp_path / f"{n}.jsonl", records)
        peaks.append(peak(partial(from_files, tmp_path / str(n), path, encoding)))
    assert peaks[1] < 1.5 * peaks[0]

    monkeypatch.setattr(writer, "BLOCK", 100)
    monkeypatch.setattr(writer, "LONG", 5000)
    for kind, long in (("text", "ab " * 5000), ("chat", by_turns(*["ab " * 100] * 50))):
        peaks = []
        for n in (5, 50):
            many = (("train" if i else "val", long) for i in range(n))
            out = tmp_path / f"long {kind} {n}"
            peaks.append(peak(partial(write_dataset, out, many, encoding, kind)))
        assert peaks[1] < 1.5 * peaks[0]

    # Nor does what is compared to validate with.
    monkeypatch.setattr(splitting, "MOST", 5000)
    monkeypatch.setattr(splitting, "MANY", 100)
    peaks = []
    for n in (5, 50):
        texts = (f"{i} " * 2000 for i in range(n))
        work = splitting.labelled(texts, 1e-9, Counter())
        peaks.append(peak(partial(deque, work, 0)))  # all of it, and keeps nothing
    assert peaks[1] < 1.5 * peaks[0]


def test_a_run_that_fails_leaves_the_folder_as_it_was(tmp_path, encoding, monkeypatch):
    write_dataset(tmp_path, [("train", "a"), ("val", "b")], encoding)
    before = contents(tmp_path)
    with user_error(r"no document for val\.bin"):
        write_dataset(tmp_path, [("train", "c")], encoding, overwrite=True)
    assert contents(tmp_path) == before
    # It fails when tokenizer.json is written, which is the last before files are replaced.
    monkeypatch.setattr(tokenizer, "dumps", Mock(side_effect=OSError(28, "No space left")))
    with user_error(r"cannot write .*No space left"):
        write_dataset(tmp_path, [("train", "c"), ("val", "b")], encoding, overwrite=True)
    assert contents(tmp_path) == before


def test_another_data_set_is_replaced_only_if_asked_and_half_of_ours_always(
    tmp_path, encoding, story, monkeypatch
):
    """Killed before each renaming, it looks incomplete, and what makes a new one works."""
    documents = [("train", "a"), ("val", "b")]
    real = os.replace
    for cut in range(5):
        out = tmp_path / str(cut)
        write_dataset(out, [("train", "old"), ("val", "b")], encoding)
        left = [True] * cut

        def until_cut(*paths, left=left):
            if not left:
                os._exit(9)
            left.pop()
            real(*paths)

        monkeypatch.setattr(os, "replace", until_cut)
        write = partial(write_dataset, out, documents, encoding, overwrite=True)
        process = get_context("fork").Process(target=write)
        process.start()
        process.join()
        monkeypatch.setattr(os, "replace", real)
        assert process.exitcode == (9 if cut < 4 else 0)
        assert (out / "meta.json").exists() == (cut == 4)
        if cut < 4:
            write_dataset(out, documents, encoding)
        assert len(contents(out)) == 4
    line = f"prepare.py --input {story} --vocab_size 300 --out_dir"
    before = contents(out)
    assert f"{out} has a meta.json already" in refused(line, out)
    with user_error("already"):
        write_dataset(out, documents, encoding)
    assert contents(out) == before
    command(line, out, "--overwrite")
    assert contents(out).keys() == before.keys() and contents(out) != before
    (out / "meta.json").unlink()  # as of nanoGPT, which has a train.bin, too
    assert f"{out} has a tokenizer.json already" in refused(line, out)
