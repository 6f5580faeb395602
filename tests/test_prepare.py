"""prepare.py and data.py: from text to batches, and everything that can be wrong with a file."""

import hashlib
import json
import re
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import tiktoken
import torch
from conftest import command

import countries
import data as data_module
import documents
import download
import prepare
import tokenizer
from common import UserError


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


def test_literal_special_tokens_in_text_stay_text(tmp_path):
    path = tmp_path / "odd.jsonl"
    lines = [json.dumps({"text": f"{i} <|endoftext|> is written out"}) for i in range(100)]
    path.write_text("\n".join(lines))
    meta = prepare.prepare_files(tmp_path / "out", [path], "text", None, 300, 0.1)
    ids = np.fromfile(tmp_path / "out" / "train.bin", dtype="uint16")
    assert (ids == 0).sum() == meta["train"]["documents"]


def test_large_vocabularies_get_uint32(tmp_path):
    ranks = {bytes([b]): 70_000 + b for b in range(256)}
    large = tiktoken.Encoding(
        "large", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 0}
    )
    meta = prepare.write_dataset(tmp_path, [("train", "a"), ("val", "b")], large)
    assert meta["dtype"] == "uint32" and meta["train"]["tokens"] == 2
    assert np.fromfile(tmp_path / "train.bin", dtype="uint32").tolist() == [0, 70_000 + ord("a")]


def test_command_reports_bad_flags(tmp_path, story):
    def error(*args):
        return command("prepare.py", *args, cwd=tmp_path, fails=True).stderr

    assert "no such" in error("--input", "gone.txt", "--out_dir", "x").lower()
    assert "--out_dir" in error("--input", story)
    assert "--vocab_size 100" in error("--input", story, "--out_dir", "x", "--vocab_size", 100)
    assert "--val_fraction" in error("--input", story, "--out_dir", "x", "--val_fraction", 2)
    assert "--vocab_size 100" in error("--vocab_size", 100)
    assert "--seed" in error("--input", story, "--out_dir", "x", "--seed", 1)
    (tmp_path / "file").write_text("in the way")
    assert "cannot write" in error("--input", story, "--out_dir", "file/x")


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


def test_batches_are_a_function_of_the_step_and_cover_an_epoch(data):
    meta = data_module.read_meta(data)
    tokens = data_module.Tokens(data, "train", meta, block_size=16, seed=1)
    n = tokens.n_window // 4
    inputs = torch.cat([tokens.batch(step, 4)[0] for step in range(n)])
    again = data_module.Tokens(data, "train", meta, block_size=16, seed=1)
    late = again.batch(n - 1, 4)  # without having read the earlier ones
    assert torch.equal(inputs[-4:], late[0])
    text = np.fromfile(data / "train.bin", dtype=meta["dtype"]).astype(np.int64)
    windows = {tuple(row) for row in inputs.tolist()}
    places = [
        start for start in range(len(text) - 16) if tuple(text[start : start + 16]) in windows
    ]
    assert len(places) >= 4 * n  # no window twice
    other = data_module.Tokens(data, "train", meta, block_size=16, seed=2).batch(0, 4)
    assert not torch.equal(inputs[:4], other[0])


def test_targets_are_the_next_tokens(data):
    meta = data_module.read_meta(data)
    ids, targets = data_module.Tokens(data, "val", meta, 16, 0).batch(3, 5)
    assert ids.shape == targets.shape == (5, 16)
    assert torch.equal(ids[:, 1:], targets[:, :-1])


def test_damaged_data_folders_are_refused(data, tmp_path):
    with pytest.raises(UserError, match=re.escape(f"no data in {tmp_path}")):
        data_module.read_meta(tmp_path)
    (tmp_path / "meta.json").write_text('{"format": 1')
    with pytest.raises(UserError, match="damaged"):
        data_module.read_meta(tmp_path)
    meta = data_module.read_meta(data)
    (tmp_path / "train.bin").write_bytes((data / "train.bin").read_bytes()[:-2])
    with pytest.raises(UserError, match=r"run prepare\.py again"):
        data_module.Tokens(tmp_path, "train", meta, 16, 0)
    with pytest.raises(UserError, match="cannot read"):
        data_module.Tokens(tmp_path, "val", meta, 16, 0)
    with pytest.raises(UserError, match="--block_size 100000"):
        data_module.Tokens(data, "train", meta, 100_000, 0)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        data_module.read_tokenizer(tmp_path, meta)
    (tmp_path / "tokenizer.json").write_text((data / "tokenizer.json").read_text())
    data_module.read_tokenizer(tmp_path, meta)
    with pytest.raises(UserError, match="not the tokenizer"):
        data_module.read_tokenizer(tmp_path, {**meta, "tokenizer": "another"})
    (tmp_path / "meta.json").write_text('{"format": 2, "kind": "text"}')
    with pytest.raises(UserError, match=r"damaged.*corpus"):
        data_module.read_meta(tmp_path)
