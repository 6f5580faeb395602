"""prepare.py and the token files: from text to batches, and what can be wrong with a file."""

import base64
import contextlib
import hashlib
import json
import os
import threading
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
from common import UserError
from model import Decoder, ModelConfig
from text import countries, documents, download, tokenizer
from training.batches import read_meta, read_tokenizer
from training.checkpoints import save_checkpoint


def run_main(*args):
    """prepare.py with these flags; what it wrote about its folder, if --out_dir is the last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["prepare.py", *map(str, args)])
        prepare.main()


def error(*args) -> str:
    """What prepare.py says against these flags."""
    with pytest.raises(UserError) as caught:
        run_main(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def from_files(out, path, kind="text", encoding=None, **flags):
    """prepare_files() of one file, with flags as on the command line."""
    args = prepare.Settings(input=[path], out_dir=out, **flags)
    return prepare.prepare_files(args, [path], kind, encoding)


def texts_in(path):
    return list(documents.read([path], documents.Report(0)))


def jsonl(path, records):
    """A file of records; what is bytes already is written as it is."""
    as_bytes = (r if isinstance(r, bytes) else json.dumps(r).encode() for r in records)
    path.write_bytes(b"".join(line + b"\n" for line in as_bytes))
    return path


def stored(folder, split):
    """The documents in a token file, each with its <|endoftext|>."""
    meta = read_meta(folder)
    ids = np.fromfile(folder / f"{split}.bin", dtype=meta["dtype"])
    eot = read_tokenizer(folder, meta).eot_token
    return [part.tolist() for part in np.split(ids, np.flatnonzero(ids == eot))[1:]]


@pytest.fixture
def encoding(data):
    return read_tokenizer(data, read_meta(data))


# Text


def test_files_hold_every_document_behind_an_endoftext(story, data, encoding):
    meta = read_meta(data)
    texts = [json.loads(line)["text"] for line in story.read_text(encoding="utf-8").splitlines()]
    found = []
    for split in ("train", "val"):
        ids = stored(data, split)
        assert all(each[0] == encoding.eot_token for each in ids)
        decoded = [encoding.decode(each[1:]) for each in ids]
        assert meta[split]["tokens"] == sum(map(len, ids)) and meta[split]["documents"] == len(ids)
        assert meta[split]["bytes"] == sum(len(text.encode()) for text in decoded)
        found += decoded
    assert sorted(found) == sorted(texts) and meta["skipped"] == 0


def test_a_documents_split_depends_on_its_hash_alone():
    chosen = [documents.is_validation(f"document number {i}", 0.1) for i in range(500)]
    assert 20 < sum(chosen) < 80
    assert documents.hashed("document") == 3665553475736990530  # in every version


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


def test_txt_without_blank_lines_is_cut_at_line_breaks(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "TXT_LONGEST", 5000)
    path = tmp_path / "lines.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"One sentence a line.\r\n" * 1000)
    texts = texts_in(path)
    assert len(texts) == 5 and "".join(texts) == "One sentence a line.\n" * 1000


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
    """Downloaded from a server on this machine, then prepared like a file of one's own."""
    scenes = "\n\n".join(f"{name}:\n" + "Speak, speak. " * 200 for name in "ABCDEFGH").encode()
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "input.txt").write_bytes(scenes)
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "server")
    (file,) = download.DATASETS["shakespeare"]
    file = replace(file, size=len(scenes), sha256=hashlib.sha256(scenes).hexdigest())
    monkeypatch.chdir(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file = replace(file, url=f"http://127.0.0.1:{server.server_port}/input.txt")
        monkeypatch.setitem(download.DATASETS, "shakespeare", [file])
        run_main("--dataset", "shakespeare", "--val_fraction", "0.3")
        server.shutdown()
    assert (tmp_path / "data/raw/input.txt").read_bytes() == scenes
    meta = read_meta(tmp_path / "data/shakespeare")
    assert meta["train"]["bytes"] + meta["val"]["bytes"] == len(scenes)


def test_the_novel_in_the_repository_needs_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "download", None)
    run_main("--dataset", "moby-dick", "--out_dir", tmp_path, "--vocab_size", 300)
    meta = read_meta(tmp_path)
    assert meta["train"]["documents"] + meta["val"]["documents"] == 347
    decode = read_tokenizer(tmp_path, meta).decode
    texts = [decode(ids) for ids in stored(tmp_path, "train")]
    assert any("Call me Ishmael. Some years ago" in text for text in texts)


@pytest.mark.parametrize("name", ["minimind-sft", "minimind-dpo"])
def test_conversations_need_a_tokenizer_before_they_are_fetched(tmp_path, data, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (file, *_) = download.DATASETS[name]
    monkeypatch.setitem(download.DATASETS, name, [replace(file, url="http://127.0.0.1:9/x.jsonl")])
    assert "--tokenizer is needed" in error("--dataset", name)
    assert not list(tmp_path.iterdir())
    assert "run it again to go on" in error("--dataset", name, "--tokenizer", data)


def test_literal_special_tokens_in_text_stay_text(tmp_path, encoding):
    texts = ["<|endoftext|>", "<|im_start|> is written out"]
    labelled = list(zip(("train", "val"), texts, strict=True))
    prepare.write_dataset(tmp_path, labelled, encoding, corpus="mine")
    for split, text in labelled:
        ((eot, *ids),) = stored(tmp_path, split)
        assert eot == 0 and encoding.decode(ids) == text and min(ids) > 2


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
    mine = ("--input", story, "--out_dir", "x")
    (tmp_path / "file").write_text("in the way")
    for flags, says in (
        (("--input", "gone.txt", "--out_dir", "x"), "gone.txt: No such file"),
        (("--input", tmp_path, "--out_dir", "x"), "only .txt and .jsonl"),
        (("--input", story), "--out_dir"),
        ((*mine, "--dataset", "tinystories"), "--input or --dataset tinystories"),
        ((*mine, "--vocab_size", 100), "--vocab_size 100"),
        ((*mine, "--max_bad", 2), "--max_bad 2"),
        ((*mine[:2], "--out_dir", "file/x"), "cannot write"),
        ((*mine[:2], "--out_dir", "x" * 300), "too long"),
    ):
        assert says in error(*flags)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_default_corpus_by_command(tmp_path):
    done = command("prepare.py", cwd=tmp_path)
    assert "train.py --data_dir data/countries" in done.stdout
    folder = tmp_path / "data/countries"
    meta = read_meta(folder)
    encoding = read_tokenizer(folder, meta)
    train, _ = countries.documents(0)
    ids = stored(folder, "train")
    assert meta["corpus"] == "countries" and len(ids) == len(train)
    assert encoding.decode(ids[0][1:]) == train[0]
    names = [country.name for country in countries.table()]
    single = [name for name in names if len(encoding.encode_ordinary(f" {name}")) == 1]
    assert len(single) > 140 and {"Spain", "Germany", "Peru"} <= set(single)


# What can be wrong with files


def says(role, content, **more):
    return {"role": role, "content": content, **more}


def chats(n=40):
    return [
        [says("user", f"What is {i}? <|im_end|>"), says("assistant", f"A number: {i}. 日本")]
        for i in range(n)
    ]


TEXTS = [{"text": f"Document number {i} says hello."} for i in range(60)]
TALK = chats(1)[0]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"not json", "not JSON in UTF-8"),
        (b"[" * 100_000, "not JSON in UTF-8"),
        (b'{"text": "caf\xe9"}', "not JSON in UTF-8"),
        (b'{"text": "\\ud800"}', "not JSON in UTF-8"),
        (b"[1]", 'no "text"'),
        ({"txt": "x"}, 'no "text"'),
        ({"text": " \n"}, 'no "text"'),
        ({"messages": TALK}, "chat, while the first document is text"),
        ({"messages": TALK[:1]}, "no assistant message"),
        ({"messages": []}, "no assistant message"),
        ({"messages": ["Hi"]}, 'messages need "role" and "content"'),
        ({"messages": "Hi"}, 'messages need "role" and "content"'),
        ({"messages": [says("user", None)]}, 'messages need "role" and "content"'),
        ({"messages": [says(["user"], "")]}, 'messages need "role" and "content"'),
        ({"messages": [*TALK, says("assistant", "", tool_calls=[1])]}, ".*must not call tools"),
        ({"chosen": TALK}, 'no "text"'),
        ({"chosen": TALK[:1], "rejected": []}, "chosen and rejected must differ"),
        ({"chosen": TALK[1:], "rejected": []}, "chosen and rejected must differ"),
        ({"chosen": TALK, "rejected": chats(2)[1]}, "chosen and rejected must differ"),
        ({"chosen": TALK, "rejected": TALK}, "chosen and rejected must differ"),
        ({"chosen": TALK[:1], "rejected": [says("user", "?")]}, "chosen and rejected must differ"),
    ],
)
def test_bad_lines_are_named_counted_and_skipped(tmp_path, line, reason, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", [*TEXTS[:7], b"", line, b"  ", *TEXTS[7:]])
    options = dict(kind="text", vocab_size=300, val_fraction=0.3)
    meta = from_files(tmp_path / "out", path, max_bad=0.02, **options)
    assert meta["skipped"] == 1  # blank lines are not
    clean = from_files(tmp_path / "clean", jsonl(tmp_path / "b.jsonl", TEXTS), **options)
    assert clean["train"] == meta["train"] and clean["val"] == meta["val"]
    monkeypatch.setattr(tokenizer, "_merges", lambda *_: pytest.fail("trained in vain"))
    with pytest.raises(UserError, match=rf"1 of 61 documents \(.*a\.jsonl:9: {reason}.*--max_bad"):
        from_files(tmp_path / "no", path, max_bad=0.01, **options)
    assert not (tmp_path / "no").exists()


def test_three_are_named_and_all_are_counted(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [*TEXTS, *[b"oops"] * 5, {"text": ""}])
    flags = ("--input", path, "--out_dir", tmp_path / "out", "--val_fraction", 0.3)
    output = command("prepare.py", *flags, "--max_bad", 0.1, cwd=tmp_path).stdout
    named = "; ".join(f"{path}:{line}: not JSON in UTF-8" for line in (61, 62, 63))
    assert f"skipped 6 of 66 documents ({named})" in output
    assert "6 of 66" in command("prepare.py", *flags, cwd=tmp_path, fails=True).stderr


def test_bad_lines_of_a_published_data_set_stop_nothing(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [*TEXTS, b"oops"])
    args = prepare.Settings(dataset="tinystories", out_dir=tmp_path / "out", val_fraction=0.3)
    assert prepare.prepare_files(args, [path], "text")["skipped"] == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"x", "only .txt and .jsonl"),
        ("a.txt", b"caf\xe9 " * 100, "a.txt:1: not UTF-8"),
        ("a.jsonl", b"\x89PNG\r\n\x1a\n\0\0" * 99, "a.jsonl:3: "),
        ("a.jsonl", b'{"txt": "x"}\n' * 3, "3 of 3 documents"),
        ("a.txt", b"", "0 of 0 documents"),
        ("a.jsonl", b'{"text": "just one"}\n', "no document for val.bin"),
        ("a.jsonl", b'{"text": "number 120"}\n', "no document for train.bin"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    assert says in error("--input", path, "--out_dir", tmp_path / "out", "--vocab_size", 300)
    assert not (tmp_path / "out").exists()


# Conversations and preferences


def pairs(n=40):
    prompts = [[says("system", "Be brief."), says("user", f"Say {i}.")] for i in range(n)]
    return [
        ([*prompt, says("assistant", f"{i}.")], [*prompt, says("assistant", f"Well, {i}, I think")])
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("key", ["conversations", "messages", "chosen"])
def test_conversations_become_what_the_template_says(tmp_path, data, encoding, key):
    """Of preferences first the chosen one, then the rejected."""
    documents = pairs() if key == "chosen" else [[messages] for messages in chats()]
    lines = [dict(zip((key, "rejected"), sides, strict=False)) for sides in documents]
    path, out = jsonl(tmp_path / "a.jsonl", lines), tmp_path / "out"
    run_main("--input", path, "--out_dir", out, "--val_fraction", 0.3, "--tokenizer", data)
    meta, found = read_meta(out), []
    assert meta["kind"] == ("preference" if key == "chosen" else "chat")
    for split in ("train", "val"):
        parts, n = stored(out, split), len(documents[0])
        found += [parts[i : i + n] for i in range(0, len(parts), n)]
    wanted = [[[0, *tokenizer.render(encoding, side)] for side in sides] for sides in documents]
    assert sorted(found) == sorted(wanted)
    size = sum(len(encoding.decode_bytes(side[1:])) for sides in wanted for side in sides)
    assert meta["train"]["bytes"] + meta["val"]["bytes"] == size


# Tokenizers


def test_a_tokenizer_is_taken_from_data_or_checkpoint(tmp_path, data, encoding, story):
    config = ModelConfig(encoding.n_vocab, n_layer=1, n_head=1, n_embd=8, block_size=8, ffn="dense")
    save_checkpoint(tmp_path / "ckpt.pt", Decoder(config), encoding)
    out = tmp_path / "out"
    for source in (data, tmp_path / "ckpt.pt"):
        for flags in (("--input", story), ("--dataset", "countries")):
            run_main(*flags, "--out_dir", out, "--tokenizer", source)
            assert read_meta(out)["tokenizer"] == read_meta(data)["tokenizer"]


def test_tokenizer_flags_that_cannot_be(tmp_path, data, story):
    out = ("--out_dir", tmp_path / "out")
    talk = jsonl(tmp_path / "a.jsonl", [{"messages": messages} for messages in chats()])
    assert "--tokenizer is needed" in error("--input", talk, *out)
    mine = ("--input", story, *out, "--tokenizer")
    assert "--vocab_size 300" in error(*mine, data, "--vocab_size", 300)
    assert "gone" in error(*mine, tmp_path / "gone")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "not a tokenizer" in error(*mine, tmp_path)
    (tmp_path / "ckpt.pt").write_text("{}")
    assert "is damaged" in error(*mine, tmp_path / "ckpt.pt")
    ranks = {bytes([b]): b for b in range(256)}
    special = {"<|endoftext|>": 256}
    bare = tiktoken.Encoding(
        "bare", pat_str=tokenizer.PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    (tmp_path / "tokenizer.json").write_text(tokenizer.dumps(bare))
    assert "no <|im_start|>" in error("--input", talk, *out, "--tokenizer", tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def vocabularies(tmp_path, monkeypatch):
    """A server with a vocabulary of the size of cl100k_base, which is looked for there."""
    single = [bytes([b]) for b in range(256)]
    longer = [b"ab", *(a + b for a in single for b in single if a + b != b"ab")]
    longer += [b"ab" + a + b for a in single for b in single]
    lines = [f"{base64.b64encode(t).decode()} {n}" for n, t in enumerate(single + longer)]
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "cl100k_base.tiktoken").write_text("\n".join(lines[:100_256]))
    digest = download.sha256(folder / "cl100k_base.tiktoken")
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    real = tiktoken.load.read_file_cached
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

        def redirected(url, expected_hash=None):
            return real(f"http://127.0.0.1:{server.server_port}/{url.rsplit('/', 1)[1]}", digest)

        monkeypatch.setattr(tiktoken.load, "read_file_cached", redirected)
        yield server, folder
        server.shutdown()


def test_tiktokens_own_vocabulary(tmp_path, story, vocabularies):
    server, _ = vocabularies
    out = tmp_path / "out"
    run_main("--input", story, "--out_dir", out, "--tokenizer", "cl100k_base")
    meta = read_meta(out)
    assert (meta["vocab_size"], meta["dtype"]) == (100_279, "uint32")
    encoding = read_tokenizer(out, meta)  # fingerprint and all
    markers = {"<|endoftext|>": 100_257, "<|im_start|>": 100_277, "<|im_end|>": 100_278}
    assert {marker: encoding.encode_single_token(marker) for marker in markers} == markers
    text = "Ab <|im_start|> éé 1234 <|endoftext|>"
    own = tiktoken.get_encoding("cl100k_base")
    assert encoding.encode_ordinary(text) == own.encode_ordinary(text)
    assert len(encoding.encode_ordinary("ab")) == 1
    for token in range(100_279):  # whatever a model samples
        encoding.decode_single_token_bytes(token)
    first = stored(out, "train")[0]
    assert first[0] == 100_257 and encoding.decode(first[1:]) in story.read_text(encoding="utf-8")
    server.shutdown()
    tiktoken.registry.ENCODINGS.clear()
    assert tokenizer.pretrained("cl100k_base").n_vocab == 100_279  # from the cache


def test_vocabularies_that_cannot_be_fetched(tmp_path, story, vocabularies):
    server, folder = vocabularies
    flags = ("--input", story, "--out_dir", tmp_path / "out", "--tokenizer")
    (folder / "cl100k_base.tiktoken").write_text("YQ== 0\n")
    assert "Hash mismatch" in error(*flags, "cl100k_base")
    assert "404" in error(*flags, "gpt2")
    server.shutdown()
    server.server_close()
    assert "--tokenizer gpt2: " in error(*flags, "gpt2")


# Size


def test_the_tokenizer_is_trained_on_a_bounded_sample(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"{i} " + "word " * 20} for i in range(500)])
    seen, train = [], tokenizer.train
    monkeypatch.setattr(
        tokenizer, "train", lambda t, *rest: train(seen.append([*t]) or seen[-1], 300)
    )
    monkeypatch.setattr(prepare, "SAMPLE", path.stat().st_size // 5)
    for out in ("one", "two"):
        from_files(tmp_path / out, path, val_fraction=0.1)
    assert 60 < len(seen[0]) < 140 and seen[0] == seen[1]
    assert not any(documents.is_validation(text, 0.1) for text in seen[0])
    monkeypatch.setattr(prepare, "SAMPLE", 1 << 20)
    assert len(seen[1]) < from_files(tmp_path / "three", path)["train"]["documents"] == len(seen[2])


def test_blocks_change_no_byte(tmp_path, encoding, monkeypatch):
    made = [("val" if i % 7 == 0 else "train", f"{i} " + "ab " * (i % 300)) for i in range(3000)]
    metas = []
    for block in (10_000, 100, 1):
        monkeypatch.setattr(prepare, "BLOCK", block)
        metas.append(prepare.write_dataset(tmp_path / str(block), made, encoding))
    assert metas[0] == metas[1] == metas[2]


def test_memory_does_not_grow_with_the_file(tmp_path, encoding, monkeypatch):
    monkeypatch.setattr(prepare, "BLOCK", 10)
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
    assert read_meta(tmp_path) == meta and len(contents(tmp_path)) == 5
