"""prepare.py and the token files: from text to batches, and what can be wrong with a file."""

import base64
import contextlib
import hashlib
import json
import os
import re
import threading
import time
import tracemalloc
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import tiktoken
import tiktoken.load
import tiktoken.registry
from conftest import command

import prepare
from common import UserError, run
from model import Decoder, ModelConfig
from text import countries, documents, download, template, tokenizer
from training import batches as data_module
from training.checkpoints import save_checkpoint


def from_files(out, path, kind="text", encoding=None, **flags):
    """prepare_files() of one file, with flags as on the command line."""
    args = prepare.Settings(out_dir=out, **flags)
    return prepare.prepare_files(args, [path], kind, encoding)


def texts_in(path):
    return [document for _, document in documents.read([path], documents.Report(0))]


def test_files_hold_every_document_behind_an_endoftext(story, data):
    meta = json.loads((data / "meta.json").read_text())
    encoding = tokenizer.loads((data / "tokenizer.json").read_text(encoding="utf-8"))
    texts = [json.loads(line)["text"] for line in story.read_text(encoding="utf-8").splitlines()]
    found = []
    for split in ("train", "val"):
        ids = np.fromfile(data / f"{split}.bin", dtype=meta["dtype"])
        assert len(ids) == meta[split]["tokens"]
        parts = np.split(ids, np.flatnonzero(ids == encoding.eot_token))
        assert len(parts[0]) == 0  # the file begins with <|endoftext|>
        decoded = [encoding.decode(part[1:].tolist()) for part in parts[1:]]
        assert len(decoded) == meta[split]["documents"]
        assert sum(len(text.encode()) for text in decoded) == meta[split]["bytes"]
        found += decoded
    assert sorted(found) == sorted(texts)


def test_adding_a_file_moves_no_document(tmp_path):
    texts = [f"document number {i}" for i in range(500)]
    chosen = {text for text in texts if documents.is_validation(text, 0.1)}
    assert 20 < len(chosen) < 80
    more = [f"another {i}" for i in range(500)]
    assert {text for text in texts + more if documents.is_validation(text, 0.1)} >= chosen


def test_txt_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
    paragraphs = [("word " * 80).strip() + f" {i}." for i in range(40)]
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    texts = texts_in(path)
    assert len(texts) > 5
    assert "".join(texts) == path.read_text(encoding="utf-8")
    assert all(text.endswith("\n\n") for text in texts[:-1])


def test_txt_is_cut_at_endoftext_lines(tmp_path):
    path = tmp_path / "stories.txt"
    path.write_text("One.\nstill one.\n<|endoftext|>\nTwo.\n<|endoftext|>\n\n<|endoftext|>\nThree.")
    assert texts_in(path) == ["One.\nstill one.\n", "Two.\n", "Three."]


def test_what_stands_around_a_book_of_project_gutenberg_is_left_out(tmp_path):
    book = "One.\r\n\r\n" + "Two. " * 400 + "\r\n\r\nThree. The start of it.\r\n"
    text = "\ufeffThe Project Gutenberg EBook of Numbers\r\n\r\nThis eBook is for ...\r\n\r\n"
    text += "*** START OF THIS PROJECT GUTENBERG EBOOK NUMBERS ***\r\n" + book
    text += "\r\nEnd of Project Gutenberg’s Numbers\r\n\r\n*** END OF THE PROJECT GUTENBERG EBOOK"
    text += " NUMBERS ***\r\n\r\n" + "Small print. \r\n\r\n" * 300
    path = tmp_path / "book.txt"
    path.write_bytes(2 * text.encode())  # two books in one file
    found = texts_in(path)
    assert len(found) == 4 and "".join(found) == 2 * (book + "\r\n").replace("\r\n", "\n")


def test_a_public_data_set_by_name(tmp_path, monkeypatch):
    """Downloaded from a mirror on this machine, then prepared like a file of one's own."""
    scenes = "\n\n".join(f"{name}:\n" + "Speak, speak. " * 200 for name in "ABCDEFGH").encode()
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "input.txt").write_bytes(scenes)
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "mirror")
    entry = download.DATASETS["shakespeare"]
    entry = replace(entry, size=len(scenes), sha256=hashlib.sha256(scenes).hexdigest())
    monkeypatch.setitem(download.DATASETS, "shakespeare", entry)
    monkeypatch.chdir(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        flags = ["--dataset", "shakespeare", "--base_url", url, "--val_fraction", "0.3"]
        monkeypatch.setattr("sys.argv", ["prepare.py", *flags])
        prepare.main()
        server.shutdown()
    assert (tmp_path / "data/raw/input.txt").read_bytes() == scenes
    meta = data_module.read_meta(tmp_path / "data/shakespeare")
    assert meta["train"]["bytes"] + meta["val"]["bytes"] == len(scenes)


def test_the_novel_in_the_repository_needs_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "fetch", None)
    run_main(monkeypatch, "--dataset", "moby-dick", "--out_dir", tmp_path, "--vocab_size", 300)
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["train"]["documents"] + meta["val"]["documents"] == 347
    ids = np.fromfile(tmp_path / "train.bin", dtype="uint16").tolist()
    encoding = tokenizer.loads((tmp_path / "tokenizer.json").read_text())
    assert "Call me Ishmael. Some years ago" in encoding.decode(ids)
    for useless in ("--seed", "--base_url"):
        with pytest.raises(UserError, match=f"{useless} 1 changes nothing here"):
            run_main(monkeypatch, "--dataset", "moby-dick", useless, "1")


def test_a_data_set_of_conversations_needs_a_tokenizer_before_it_is_fetched(tmp_path, data):
    nowhere = ("--base_url", "http://127.0.0.1:9", "--out_dir", tmp_path / "out")
    for name in ("minimind-sft", "minimind-dpo"):
        flags = ("--dataset", name, *nowhere)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(download, "TRIES", 1)
            monkeypatch.chdir(tmp_path)
            with pytest.raises(UserError, match="--tokenizer is needed"):
                run_main(monkeypatch, *flags)
            with pytest.raises(UserError, match="cannot fetch"):
                run_main(monkeypatch, *flags, "--tokenizer", data)


def test_literal_special_tokens_in_text_stay_text(tmp_path):
    path = tmp_path / "odd.jsonl"
    lines = [json.dumps({"text": f"{i} <|endoftext|> is written out"}) for i in range(100)]
    path.write_text("\n".join(lines))
    meta = from_files(tmp_path / "out", path, vocab_size=300, val_fraction=0.1)
    encoding = data_module.read_tokenizer(tmp_path / "out", meta)
    found = [*stored(tmp_path / "out", "train"), *stored(tmp_path / "out", "val")]
    texts = [json.loads(line)["text"] for line in lines]
    assert sorted(found) == sorted([0, *encoding.encode_ordinary(text)] for text in texts)


def test_large_vocabularies_get_uint32(tmp_path):
    ranks = {bytes([b]): 70_000 + b for b in range(256)}
    large = tiktoken.Encoding(
        "large", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 0}
    )
    meta = prepare.write_dataset(tmp_path, [("train", "a"), ("val", "b")], large)
    assert meta["dtype"] == "uint32" and meta["train"]["tokens"] == 2
    assert np.fromfile(tmp_path / "train.bin", dtype="uint32").tolist() == [0, 70_000 + ord("a")]


def test_bad_flags_are_one_clear_line(tmp_path, story, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def error(*args) -> str:
        monkeypatch.setattr("sys.argv", ["prepare.py", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            run(prepare.main)
        assert str(stopped.value).startswith("error: ") and "\n" not in str(stopped.value)
        return str(stopped.value)

    assert "no such" in error("--input", "gone.txt", "--out_dir", "x").lower()
    assert "--out_dir" in error("--input", story)
    both = ("--input", story, "--dataset", "tinystories", "--out_dir", "x")
    assert "--dataset tinystories changes nothing" in error(*both)
    assert "--vocab_size 100" in error("--input", story, "--out_dir", "x", "--vocab_size", 100)
    assert "--val_fraction" in error("--input", story, "--out_dir", "x", "--val_fraction", 2)
    assert "--vocab_size 100" in error("--vocab_size", 100)
    assert "--seed" in error("--input", story, "--out_dir", "x", "--seed", 1)
    (tmp_path / "file").write_text("in the way")
    assert "cannot write" in error("--input", story, "--out_dir", "file/x")


def test_a_missing_file_is_one_clear_line_for_a_user(tmp_path):
    error = command("prepare.py", "--input", "gone.txt", "--out_dir", "x", cwd=tmp_path, fails=True)
    assert "gone.txt: No such file" in error.stderr


def test_default_corpus_by_command(tmp_path):
    done = command("prepare.py", cwd=tmp_path)
    assert "train.py --data_dir data/countries" in done.stdout
    folder = tmp_path / "data/countries"
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["corpus"] == "countries"
    encoding = tokenizer.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    train, _ = countries.documents(0)
    ids = np.fromfile(folder / "train.bin", dtype=meta["dtype"])
    first = encoding.decode(ids[1 : np.flatnonzero(ids == 0)[1]].tolist())
    assert first == train[0]
    assert meta["train"]["documents"] == len(train)
    single = [
        country.name
        for country in countries.table()
        if len(encoding.encode_ordinary(" " + country.name)) == 1
    ]
    assert len(single) > 140 and {"Spain", "Germany", "Peru"} <= set(single)


def test_damaged_data_folders_are_refused(data, tmp_path):
    with pytest.raises(UserError, match=re.escape(f"no data in {tmp_path}")):
        data_module.read_meta(tmp_path)
    (tmp_path / "meta.json").write_text('{"format": 1')
    with pytest.raises(UserError, match="damaged"):
        data_module.read_meta(tmp_path)
    meta = data_module.read_meta(data)
    (tmp_path / "train.bin").write_bytes((data / "train.bin").read_bytes()[:-2])
    with pytest.raises(UserError, match=r"run prepare\.py again"):
        data_module.open_tokens(tmp_path, "train", meta)
    with pytest.raises(UserError, match="cannot read"):
        data_module.open_tokens(tmp_path, "val", meta)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        data_module.read_tokenizer(tmp_path, meta)
    (tmp_path / "tokenizer.json").write_text((data / "tokenizer.json").read_text())
    data_module.read_tokenizer(tmp_path, meta)
    with pytest.raises(UserError, match="not the tokenizer"):
        data_module.read_tokenizer(tmp_path, {**meta, "tokenizer": "another"})
    (tmp_path / "meta.json").write_text('{"format": 2, "kind": "text"}')
    with pytest.raises(UserError, match=r"damaged.*corpus"):
        data_module.read_meta(tmp_path)


# What can be wrong with files


def jsonl(path, records):
    """A file of records; what is bytes already is written as it is."""
    as_bytes = (r if isinstance(r, bytes) else json.dumps(r).encode() for r in records)
    path.write_bytes(b"".join(line + b"\n" for line in as_bytes))
    return path


TEXTS = [{"text": f"Document number {i} says hello."} for i in range(60)]
BAD_LINES = [
    (b"not json", "not JSON"),
    (b'{"text": "cut o', "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'{"text": "caf\xe9"}', "not UTF-8"),
    (b"[1]", "not a JSON object"),
    (b'{"txt": "x"}', 'no "text"'),
    (b'{"text": 5}', 'no "text"'),
    (b'{"text": ""}', "empty text"),
    (b'{"text": " \\n"}', "empty text"),
    (b'{"text": "\\ud800"}', "not UTF-8"),
    (b'{"text": "' + b"x" * 5000 + b'"}', "huge"),
    (b'{"messages": [{"role": "assistant", "content": "x"}]}', "of kind chat in a file of kind"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_bad_lines_are_named_counted_and_left_out(tmp_path, monkeypatch, line, reason):
    monkeypatch.setattr(documents, "HUGE", 4096 if reason == "huge" else 1 << 20)
    path = jsonl(tmp_path / "a.jsonl", [*TEXTS[:7], b"", line, b"  ", *TEXTS[7:]])
    options = dict(kind="text", vocab_size=300, val_fraction=0.3)
    meta = from_files(tmp_path / "out", path, max_bad=0.02, **options)
    skipped = meta["skipped"]
    assert skipped["documents"] == 61 and sum(skipped["bad"].values()) == 1  # blank lines are none
    assert next(iter(skipped["bad"])).startswith(reason)
    assert meta["train"]["documents"] + meta["val"]["documents"] == 60
    clean = jsonl(tmp_path / "b.jsonl", TEXTS)
    whole = from_files(tmp_path / "clean", clean, **options)
    assert whole["train"] == meta["train"] and whole["val"] == meta["val"]
    with pytest.raises(UserError, match=rf"1 of 61 .*a\.jsonl:9: {reason}.*--max_bad"):
        from_files(tmp_path / "no", path, max_bad=0.01, **options)
    assert not (tmp_path / "no" / "meta.json").exists()


def test_nothing_is_left_out_silently(tmp_path):
    bad = [b"oops"] * 5 + [{"text": ""}]
    path = jsonl(tmp_path / "a.jsonl", TEXTS + bad)
    flags = ("--input", path, "--out_dir", tmp_path / "out", "--vocab_size", 300)
    flags += ("--val_fraction", 0.3)
    said = command("prepare.py", *flags, "--max_bad", 0.1, cwd=tmp_path).stdout
    assert said.count("a.jsonl:") == 4  # the first three of a kind
    assert "a.jsonl:61: not JSON" in said and "a.jsonl:66: empty text" in said
    assert "skipped 6 of 66 documents: 5 not JSON, 1 empty text" in said
    assert "6 of 66" in command("prepare.py", *flags, cwd=tmp_path, fails=True).stderr


def test_bad_files_are_refused_before_training_a_tokenizer_and_without_one(
    tmp_path, encoding, monkeypatch
):
    path = jsonl(tmp_path / "a.jsonl", [*TEXTS, b"oops"])
    with pytest.raises(UserError, match="1 of 61"):
        from_files(tmp_path / "out", path, "text", encoding)
    monkeypatch.setattr(tokenizer, "_merges", lambda *_: pytest.fail("trained in vain"))
    with pytest.raises(UserError, match="1 of 61"):
        from_files(tmp_path / "out", path, "text")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"x", "only .txt and .jsonl"),
        ("a.txt", b"caf\xe9 " * 100, "not UTF-8"),
        ("a.jsonl", b'{"txt": "x"}\n' * 3, r"a\.jsonl:1"),
        ("a.txt", b"", "nothing is in it"),
        ("a.jsonl", b"\n \n", "nothing is in it"),
        ("a.jsonl", b'{"text": "just one"}\n', r"no document for val\.bin"),
        ("a.jsonl", b'{"text": "number 120"}\n', r"no document for train\.bin"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"}\n[]\n', r"a\.jsonl:3"),
    ],
)
def test_bad_files_are_named(tmp_path, monkeypatch, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        run_main(monkeypatch, "--input", path, "--out_dir", tmp_path / "out", "--vocab_size", 300)
    assert not (tmp_path / "out" / "meta.json").exists()


def test_blame_is_where_the_mistake_is(tmp_path, story, data, monkeypatch):
    """No flag that nobody set and that would not help; of several files, the one that is empty."""
    flags = ("--out_dir", tmp_path / "out", "--tokenizer", data)

    def error(*paths):
        with pytest.raises(UserError) as caught:
            run_main(monkeypatch, "--input", *paths, *flags)
        return str(caught.value)

    said = error(jsonl(tmp_path / "bad.jsonl", [{"txt": "x"}] * 3))
    assert "bad.jsonl: no document can be used" in said and "--max_bad" not in said
    (tmp_path / "empty.txt").write_text("")
    said = error(story, tmp_path / "empty.txt")
    assert "empty.txt: no document can be used: nothing is in it" in said
    tools = {"messages": [says("tool", "x"), says("assistant", "y")]}
    assert "chat" in error(story, jsonl(tmp_path / "tools.jsonl", [b"oops", tools]))


def test_names_that_no_system_takes_are_one_clear_line(tmp_path, monkeypatch, story):
    long = "x" * 300
    flags = ("--input", story, "--vocab_size", 300, "--val_fraction", 0.3)
    for wrong in (
        (*flags, "--out_dir", tmp_path / long),
        ("--input", f"{long}.txt", "--out_dir", tmp_path / "out"),
        (*flags[:2], "--out_dir", tmp_path / "out", "--tokenizer", long),
        (*flags[:2], "--out_dir", tmp_path / "out", "--tokenizer", f"{long}.json"),
    ):
        with pytest.raises(UserError, match=r"xxx.* too long"):
            run_main(monkeypatch, *wrong)
    odd = tmp_path / os.fsdecode(b"a$\\frac$\xff")
    run_main(monkeypatch, *flags, "--out_dir", odd)
    assert data_module.read_meta(odd)["kind"] == "text"


def run_main(monkeypatch, *args):
    monkeypatch.setattr("sys.argv", ["prepare.py", *map(str, args)])
    prepare.main()


def test_huge_txt_documents_and_marks_at_the_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "HUGE", 10_000)
    path = tmp_path / "a.txt"
    line = b"x" * 8000 + b"\r\n"
    end = b"<|endoftext|>\n"
    content = [b"\xef\xbb\xbfOne.\r\n", end, line, line, end, b"Two.\n", end, b"y" * 30_000]
    path.write_bytes(b"".join(content))
    report = documents.Report(1)
    assert [text for _, text in documents.read([path], report)] == ["One.\n", "Two.\n"]
    assert report.bad == {"huge": 2} and report.documents == 4
    assert [re.search(r":(\d+):", name)[1] for name in report.named] == ["3", "8"]


# Conversations and preferences


def says(role, content, **more):
    return {"role": role, "content": content, **more}


def chats(n=40):
    return [
        [says("user", f"What is {i}? <|im_end|>"), says("assistant", f"A number: {i}. 日本")]
        for i in range(n)
    ]


def pairs(n=40):
    prompts = [[says("system", "Be brief."), says("user", f"Say {i}.")] for i in range(n)]
    return [
        ([*prompt, says("assistant", f"{i}.")], [*prompt, says("assistant", f"Well, {i}, I think")])
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture
def encoding(data):
    return data_module.read_tokenizer(data, data_module.read_meta(data))


def stored(folder, split):
    """The documents in a token file, each with its <|endoftext|>."""
    meta = data_module.read_meta(folder)
    ids = np.fromfile(folder / f"{split}.bin", dtype=meta["dtype"])
    eot = data_module.read_tokenizer(folder, meta).eot_token
    return [part.tolist() for part in np.split(ids, np.flatnonzero(ids == eot))[1:]]


@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_conversations_become_what_the_template_says(tmp_path, data, encoding, monkeypatch, key):
    path = jsonl(tmp_path / "a.jsonl", [{key: messages} for messages in chats()])
    flags = ("--input", path, "--out_dir", tmp_path / "out", "--val_fraction", 0.3)
    run_main(monkeypatch, *flags, "--tokenizer", data)
    meta = data_module.read_meta(tmp_path / "out")
    assert meta["kind"] == "chat"
    found = stored(tmp_path / "out", "train"), stored(tmp_path / "out", "val")
    wanted = [[0, *template.render(encoding, messages)] for messages in chats()]
    assert sorted(found[0] + found[1]) == sorted(wanted)
    assert all(documents in wanted and len(documents) for documents in found[0])
    size = sum(len(f"{m['role']}\n{m['content']}".encode()) for c in chats() for m in c)
    assert meta["train"]["bytes"] + meta["val"]["bytes"] == size


def test_pairs_stay_together_chosen_first(tmp_path, data, encoding, monkeypatch):
    lines = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in pairs()]
    path = jsonl(tmp_path / "a.jsonl", lines)
    flags = ("--input", path, "--out_dir", tmp_path / "out", "--val_fraction", 0.3)
    run_main(monkeypatch, *flags, "--tokenizer", data / "tokenizer.json")
    assert data_module.read_meta(tmp_path / "out")["kind"] == "preference"
    wanted = [[[0, *template.render(encoding, side)] for side in pair] for pair in pairs()]
    found = []
    for split in ("train", "val"):
        parts = stored(tmp_path / "out", split)
        found += [list(pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"messages": [says("user", "Hello?")]}, "a conversation without an assistant message"),
        ({"messages": []}, '"messages" is no conversation'),
        ({"conversations": [says("user", None)]}, '"conversations" is no conversation'),
        ({"chosen": chats()[0]}, '"rejected" is no conversation'),
        ({"chosen": chats()[0], "rejected": chats()[1]}, "chosen and rejected do not answer"),
        (
            {"chosen": chats()[0][:1], "rejected": [says("user", "What?")]},
            "a preference that does not end",
        ),
        ({"messages": [says("assistant", "\ud800")]}, "not UTF-8"),
        ({"messages": None}, '"messages" is no conversation'),
        ({"messages": {}}, '"messages" is no conversation'),
        ({"messages": "Hi"}, '"messages" is no conversation'),
        ({"messages": ["Hi"]}, '"messages" is no conversation'),
        ({"messages": [{"role": "user"}]}, '"messages" is no conversation'),
        ({"messages": [says("a b", "")]}, '"messages" is no conversation'),
        ({"messages": [says(["user"], "")]}, '"messages" is no conversation'),
        ({"messages": [says("user", 3)]}, '"messages" is no conversation'),
    ],
)
def test_bad_conversations(tmp_path, line, reason):
    path = jsonl(tmp_path / "a.jsonl", [line])
    report = documents.Report(1)
    assert not list(documents.read([path], report))
    assert [name.startswith(reason) for name in report.bad] == [True]


def test_conversations_with_tools_are_counted_apart(tmp_path, data, encoding, monkeypatch, capsys):
    plain = [{"conversations": messages} for messages in chats()]
    tools = [
        {"conversations": [says("user", "x"), says("assistant", "", tool_calls=[1])]},
        {"conversations": [says("system", "x", tools="[...]"), says("assistant", "y")]},
        {"conversations": [says("tool", "x"), says("assistant", "y")]},
        {"conversations": chats()[0], "tools": [{}]},
    ]
    empty = [{"conversations": [says("user", "q", tools=None), says("assistant", "a", mood="x")]}]
    path = jsonl(tmp_path / "a.jsonl", tools + plain + empty)
    flags = ("--input", path, "--out_dir", tmp_path / "out", "--val_fraction", 0.3)
    run_main(monkeypatch, *flags, "--tokenizer", data, "--max_bad", 0)
    meta = data_module.read_meta(tmp_path / "out")
    assert meta["train"]["documents"] + meta["val"]["documents"] == 41
    assert meta["skipped"]["tools"] == 4 and not meta["skipped"]["bad"]
    said = capsys.readouterr().out
    assert "left out 4 conversations: the template writes no tools" in said
    assert '1 conversations have "mood", which the template does not write' in said


def test_kinds_are_not_mixed(tmp_path, data):
    one = jsonl(tmp_path / "one.jsonl", TEXTS)
    two = jsonl(tmp_path / "two.jsonl", [b"oops", {"messages": chats()[0]}])
    flags = ("--out_dir", tmp_path / "out", "--tokenizer", data)
    error = command("prepare.py", "--input", one, two, *flags, cwd=tmp_path, fails=True).stderr
    assert "different kinds" in error and "one.jsonl is text" in error
    assert "two.jsonl is chat" in error


@pytest.mark.parametrize("kind", ["text", "chat", "preference"])
def test_documents_of_every_kind_from_python(tmp_path, encoding, kind):
    """As corpora that are made here are written, train and validation being theirs to choose."""
    made = {"text": ["a", "b c"], "chat": chats(2), "preference": pairs(2)}[kind]
    labelled = [("val", made[0]), ("train", made[1])]
    meta = prepare.write_dataset(tmp_path, labelled, encoding, kind, corpus="mine", seed=3)
    assert (meta["kind"], meta["corpus"], meta["seed"]) == (kind, "mine", 3)
    assert data_module.read_meta(tmp_path) == meta
    for split, document in labelled:
        sides = document if kind == "preference" else [document]
        render = encoding.encode_ordinary if kind == "text" else partial(template.render, encoding)
        assert stored(tmp_path, split) == [[0, *render(side)] for side in sides]


# Tokenizers


def test_a_tokenizer_is_taken_from_data_or_checkpoint(tmp_path, data, encoding, story, monkeypatch):
    config = ModelConfig(encoding.n_vocab, n_layer=1, n_head=1, n_embd=8, block_size=8, ffn="dense")
    save_checkpoint(tmp_path / "ckpt.pt", Decoder(config), encoding)
    for number, source in enumerate((data, data / "tokenizer.json", tmp_path / "ckpt.pt")):
        out = tmp_path / str(number)
        run_main(monkeypatch, "--input", story, "--out_dir", out, "--tokenizer", source)
        assert data_module.read_meta(out)["tokenizer"] == data_module.read_meta(data)["tokenizer"]
    out = tmp_path / "countries"
    run_main(monkeypatch, "--dataset", "countries", "--out_dir", out, "--tokenizer", data)
    assert data_module.read_meta(out)["tokenizer"] == data_module.read_meta(data)["tokenizer"]


def test_tokenizer_flags_that_cannot_be(tmp_path, data, story, monkeypatch):
    def error(*args):
        with pytest.raises(UserError) as caught:
            run_main(monkeypatch, "--out_dir", tmp_path / "out", *args)
        assert not (tmp_path / "out" / "meta.json").exists()
        return str(caught.value)

    talk = jsonl(tmp_path / "a.jsonl", [{"messages": messages} for messages in chats()])
    for choice in ((), ("--tokenizer", "train")):
        said = error("--input", talk, *choice)
        assert "--tokenizer is needed" in said and "--tokenizer out/ckpt.pt" in said
    both = ("--tokenizer", data, "--vocab_size", 300)
    assert "--vocab_size 300" in error("--input", story, *both)
    assert "gone" in error("--input", story, "--tokenizer", tmp_path / "gone")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "not a tokenizer" in error("--input", story, "--tokenizer", tmp_path)
    (tmp_path / "ckpt.pt").write_text("{}")
    assert "not a checkpoint" in error("--input", story, "--tokenizer", tmp_path / "ckpt.pt")
    ranks = {bytes([b]): b for b in range(256)}
    special = {"<|endoftext|>": 256}
    bare = tiktoken.Encoding(
        "bare", pat_str=tokenizer.PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    (tmp_path / "tokenizer.json").write_text(tokenizer.dumps(bare))
    assert "no <|im_start|>" in error("--input", talk, "--tokenizer", tmp_path)
    assert "--max_bad 2" in error("--input", story, "--max_bad", 2)
    assert "--max_bad" in error("--max_bad", 0.1)


@pytest.fixture
def vocabularies(tmp_path, monkeypatch):
    """A server with vocabularies of the sizes of tiktoken's own, which are looked for there."""
    single = [bytes([b]) for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    single += [bytes([b]) for b in range(256) if bytes([b]) not in single]  # GPT-2's order
    letters = {
        byte: chr(256 + i - 188) if i >= 188 else byte.decode("latin-1")
        for i, byte in enumerate(single)
    }
    twos = [a + b for a in single for b in single]
    twos.sort(key=lambda token: token not in (b"ab", b" a"))
    threes = [b"ab" + b for b in single] + [two + b"x" for two in twos]
    gpt2 = single + twos[:50_000]
    cl100k = list(dict.fromkeys(single + twos + threes))[:100_256]
    files = {
        "vocab.bpe": "#version\n"
        + "".join(f"{letters[t[:1]]} {letters[t[1:]]}\n" for t in twos[:50_000]),
        "encoder.json": json.dumps(
            {"".join(letters[bytes([b])] for b in t): n for n, t in enumerate(gpt2)}
            | {"<|endoftext|>": 50_256}
        ),
        "cl100k_base.tiktoken": "".join(
            f"{base64.b64encode(t).decode()} {n}\n" for n, t in enumerate(cl100k)
        ),
    }
    folder = tmp_path / "server"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    real = tiktoken.load.read_file_cached
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"

        def redirected(url, expected_hash=None):
            name = url.rsplit("/", 1)[1]
            return real(f"{address}/{name}", hashes[name])

        monkeypatch.setattr(tiktoken.load, "read_file_cached", redirected)
        yield server, folder
        server.shutdown()


def test_gpt2_and_cl100k(tmp_path, story, vocabularies, monkeypatch):
    server, _ = vocabularies
    expected = {
        "gpt2": (50_256, {"<|im_start|>": 50_257, "<|im_end|>": 50_258}, 50_259, "uint16"),
        "cl100k_base": (
            100_257,
            {"<|im_start|>": 100_277, "<|im_end|>": 100_278},
            100_279,
            "uint32",
        ),
    }
    for name, (eot, markers, size, dtype) in expected.items():
        run_main(monkeypatch, "--input", story, "--out_dir", tmp_path / name, "--tokenizer", name)
        meta = data_module.read_meta(tmp_path / name)
        assert (meta["vocab_size"], meta["dtype"]) == (size, dtype)
        encoding = data_module.read_tokenizer(tmp_path / name, meta)  # fingerprint and all
        assert encoding.eot_token == eot and encoding.n_vocab == size
        assert {marker: encoding.encode_single_token(marker) for marker in markers} == markers
        assert len(encoding.encode_ordinary("ab")) == 1
        own = tiktoken.get_encoding(name)
        text = "Ab <|im_start|> éé 1234 <|endoftext|>"
        assert encoding.encode_ordinary(text) == own.encode_ordinary(text)
        for token in range(size):  # whatever a model samples
            encoding.decode_single_token_bytes(token)
        (first, *_) = stored(tmp_path / name, "train")
        assert first[0] == eot and encoding.decode(first[1:]) in story.read_text(encoding="utf-8")
    server.shutdown()
    tiktoken.registry.ENCODINGS.clear()
    assert tokenizer.pretrained("gpt2").n_vocab == 50_259  # from the cache


def test_vocabularies_that_cannot_be_fetched(tmp_path, story, vocabularies, monkeypatch):
    server, folder = vocabularies
    flags = ("--input", story, "--out_dir", tmp_path / "out")
    (folder / "cl100k_base.tiktoken").write_text("YQ== 0\n")
    with pytest.raises(UserError, match=r"--tokenizer cl100k_base: .*Hash mismatch"):
        run_main(monkeypatch, *flags, "--tokenizer", "cl100k_base")
    (folder / "vocab.bpe").unlink()
    with pytest.raises(UserError, match=r"--tokenizer gpt2: .*404"):
        run_main(monkeypatch, *flags, "--tokenizer", "gpt2")
    server.shutdown()
    server.server_close()
    with pytest.raises(UserError, match=r"--tokenizer gpt2: .*name train.*TIKTOKEN_CACHE_DIR"):
        run_main(monkeypatch, *flags, "--tokenizer", "gpt2")
    assert not (tmp_path / "out").exists()


# Size


def test_the_tokenizer_is_trained_on_a_bounded_sample(tmp_path, monkeypatch, capsys):
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"{i} " + "word " * 20} for i in range(500)])
    seen = []
    real = tokenizer.train
    monkeypatch.setattr(
        tokenizer, "train", lambda texts, *rest: real(seen.append(list(texts)) or seen[-1], *rest)
    )
    monkeypatch.setattr(prepare, "SAMPLE", path.stat().st_size // 5)
    for out in ("one", "two"):
        from_files(tmp_path / out, path, vocab_size=300, val_fraction=0.1)
    assert 60 < len(seen[0]) < 140 and seen[0] == seen[1]
    assert not any(documents.is_validation(text, 0.1) for text in seen[0])
    assert "20.0%" in capsys.readouterr().out
    monkeypatch.setattr(prepare, "SAMPLE", 1 << 20)
    meta = from_files(tmp_path / "three", path, vocab_size=300, val_fraction=0.1)
    assert len(seen[2]) == meta["train"]["documents"]


def test_threads_and_batches_change_no_byte(tmp_path, encoding, monkeypatch):
    made = [("val" if i % 7 == 0 else "train", f"{i} " + "ab " * (i % 300)) for i in range(3000)]
    metas = []
    for cores, batch in ((1, 1 << 30), (1, 100), (5, 100), (5, 1000)):
        monkeypatch.setattr(prepare.os, "cpu_count", lambda cores=cores: cores)
        monkeypatch.setattr(prepare, "BATCH", batch)
        metas.append(prepare.write_dataset(tmp_path / f"{cores}-{batch}", made, encoding))
    assert all(meta == metas[0] for meta in metas)


def test_results_come_in_order_and_little_is_read_ahead(monkeypatch):
    monkeypatch.setattr(prepare.os, "cpu_count", lambda: 4)
    taken = []

    def numbers():
        for i in range(50):
            taken.append(i)
            yield i

    def slow_when_even(number):
        time.sleep(0.002 * (number % 2 == 0))
        return number

    for wanted, result in enumerate(prepare.in_order(slow_when_even, numbers())):
        assert result == wanted
        assert len(taken) <= wanted + 1 + 8
    assert wanted == 49


@pytest.mark.parametrize("kind", ["text", "preference"])
def test_same_files_and_flags_give_the_same_bytes(tmp_path, encoding, kind):
    lines = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in pairs()]
    path = jsonl(tmp_path / "a.jsonl", TEXTS if kind == "text" else lines)
    made = {}
    for out in (tmp_path / "one", tmp_path / "two"):
        trained = None if kind == "text" else encoding
        from_files(out, path, kind, trained, vocab_size=300, val_fraction=0.3)
        made[out.name] = {file.name: file.read_bytes() for file in out.iterdir()}
    assert made["one"] == made["two"] and len(made["one"]) == 5  # the lock is one of them


def test_memory_does_not_grow_with_the_file(tmp_path, encoding, monkeypatch):
    monkeypatch.setattr(prepare, "BATCH", 10_000)
    peaks = []
    for n in (300, 3000):
        path = jsonl(tmp_path / f"{n}.jsonl", [{"text": f"{i} " + "ab " * 300} for i in range(n)])
        tracemalloc.start()
        from_files(tmp_path / str(n), path, "text", encoding)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert path.stat().st_size > 2_500_000
    assert peaks[1] < 1.5 * peaks[0]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_that_fails_leaves_the_folder_as_it_was(tmp_path, encoding):
    def interrupted():
        yield from [("train", "c"), ("val", "d")]
        raise KeyboardInterrupt

    out, bad = tmp_path / "out", jsonl(tmp_path / "a.jsonl", [*TEXTS, b"oops"])
    good = [("train", "a"), ("val", "b")]
    prepare.write_dataset(out, good, encoding)
    before = contents(out)
    with pytest.raises(KeyboardInterrupt):
        prepare.write_dataset(out, interrupted(), encoding)
    assert contents(out) == before
    with pytest.raises(UserError, match="1 of 61"):
        from_files(out, bad, "text", encoding, val_fraction=0.3)
    assert contents(out) == before
    largest = max(before, key=lambda name: len(before[name]))
    assert largest == "tokenizer.json"  # which comes late: nothing may be replaced by then
    for limit, text in ((2000, "a " * 3000), (len(before[largest]) - 1, "c")):
        with disk_of(limit), pytest.raises(UserError, match="cannot write"):
            prepare.write_dataset(out, [("train", text), ("val", "b")], encoding)
        assert contents(out) == before


@contextlib.contextmanager
def disk_of(size):
    """As on a disk that is full, no file can have more than `size` bytes."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_between_old_files_and_new_ones_nothing_looks_complete(tmp_path, encoding, monkeypatch):
    seen = []
    real = os.replace

    def replace(temporary, path):
        seen.append((path.name, (tmp_path / "meta.json").exists()))
        real(temporary, path)

    prepare.write_dataset(tmp_path, [("train", "a"), ("val", "b")], encoding)
    monkeypatch.setattr(os, "replace", replace)
    meta = prepare.write_dataset(tmp_path, [("train", "c"), ("val", "d")], encoding, corpus="x")
    assert len(seen) == 4 and seen[-1] == ("meta.json", False)
    assert not any(complete for _, complete in seen)
    assert data_module.read_meta(tmp_path) == meta and len(contents(tmp_path)) == 5
