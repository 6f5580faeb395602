"""Files and folders that prepare.py reads: their kinds, Markdown, whole files held out."""

import bz2
import csv
import gzip
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import command, refused, user_error, write_jsonl

from text import documents, files, splitting
from text.dataset import open_tokens, read_meta, read_tokenizer

ROWS = [
    {"question": f'Which is the "{i}th"?', "answer": f"One, or; two\tand\n{i} é", "id": str(i)}
    for i in range(40)
]


def found(*paths, columns=()) -> tuple[list, Counter]:
    report = documents.Report(0)
    inside = files.find_files(paths, report.notes)
    return list(documents.read(inside, report, columns=columns)), +report.notes


def table(delimiter: str, rows: list[dict]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
WAYS = {
    "a.jsonl": LINES,
    "lines.json": "\n" + LINES,
    "array.json": json.dumps(ROWS, indent=1),
    "a.csv": table(",", ROWS).replace("question", "Question "),
    "spanish.CSV": "\ufeff" + table(";", ROWS),
    "a.tsv": table("\t", ROWS),
}


@pytest.mark.parametrize("packed", ["", ".gz", ".bz2"])
@pytest.mark.parametrize("name", WAYS)
def test_records_are_the_same_in_every_kind_of_file(tmp_path, name, packed):
    pack = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}[packed]
    path = tmp_path / (name + packed)
    path.write_bytes(pack(WAYS[name].encode()))
    talks, notes = found(path)
    assert [[message["content"] for message in talk] for talk in talks] == [
        [row["question"], row["answer"]] for row in ROWS
    ]
    assert notes == {"documents have 'id', which is ignored": 40}
    texts, notes = found(path, columns=["ANSWER"])
    assert texts == [row["answer"] for row in ROWS] and not notes
    with user_error(r":1: no column 'text': its keys are|:3: no column 'text'"):
        found(path, columns=["text"])
    if packed:
        path.write_bytes(path.read_bytes()[:-9])
        with user_error(re.escape(path.name)):
            found(path)


@pytest.mark.parametrize("encoding", ["gbk", "utf-16"])
@pytest.mark.parametrize("columns", [[], ["问题", "答案"]])
def test_a_table_in_another_encoding_is_said_to_be_in_one(tmp_path, encoding, columns):
    """Whose names of columns are not what they look like in its program."""
    path = tmp_path / "a.csv"
    path.write_bytes("问题,答案\n首都？,北京。\n".encode(encoding))
    with user_error(r"a\.csv:2: not UTF-8: convert it to UTF-8[;)]"):
        found(path, columns=columns)


@pytest.mark.parametrize(
    ("name", "text", "texts"),
    [
        ("a.json", '{\n "text": "a story"\n}\n', ["a story"]),  # a record over several lines
        ("a.json", '{"messages": null, "text":\n "a story"}\n', ["a story"]),
        ("a.csv", 'text\n"quoted, whole"\nempty,\n', ["quoted, whole", "empty"]),
        ("a.tsv", "text\t,,\nit begins, and ends\t\n", ["it begins, and ends"]),
        ("a.csv", "text,id\nfewer cells\nall,2\n", ["fewer cells", "all"]),
        ("a.csv", "id,text\n1\n2,all\n", ["all"]),
        # Else a quotation mark would hide all rows up to the next one.
        ("a.tsv", 'text\tid\nfine\t1\n"never" ends\t2\nfine\t3\n', r"\.tsv:3.* is written twice"),
        ("a.csv", "text\nit begins, and ends\n", r"\.csv:2: more cells than columns: quote"),
        ("a.csv", "question,answer,Answer\nq1,GOOD,\n", r"\.csv: 2 columns are called answer"),
        ("a.json", '{"text": \n{"text": "b"}\n', r"1 of 2 documents \(.*a\.json:1: not JSON"),
    ],
)
def test_what_belongs_together_is_one_text_and_what_is_ambiguous_is_refused(
    tmp_path, name, text, texts
):
    (tmp_path / name).write_text(text)
    if isinstance(texts, list):
        assert found(tmp_path / name)[0] == texts
    else:
        with user_error(texts):
            found(tmp_path / name)


def test_columns_are_named_by_a_flag(tmp_path, data):
    rows = [{"pregunta": f"¿{i}?", "respuesta": f"Sí {i}."} for i in range(30)]
    (tmp_path / "a.csv").write_text(table(",", [*rows, dict.fromkeys(rows[0], "")]))
    line = ["prepare.py --input a.csv --out_dir out --tokenizer", data]
    assert "--columns" in refused(*line)
    assert "--columns a,b,c" in refused(*line, "--columns", "a,b,c")
    said = command(*line, "--columns", "pregunta, respuesta").stdout
    assert "note: 1 empty documents" in said and "--stage sft" in said
    meta = read_meta(tmp_path / "out")
    assert meta["kind"] == "chat" and meta["train"]["documents"] + meta["val"]["documents"] == 30


def test_a_folder_is_read_in_the_order_of_paths_and_what_is_not_read_is_counted(tmp_path):
    """Hidden files are none of it, folders behind links are, once."""
    for name in (
        "b.txt",
        "B.txt",
        "e\u0301.md",
        "f.txt",
        "a/z.txt",
        "a.txt",
        ".git/x.txt",
        ".b.txt",
    ):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    for other in ("a/picture.png", "a/x.tar.gz", "a/another.png", "LICENSE"):
        (tmp_path / "in" / other).write_bytes(b"\0")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "g.txt").write_text("c/g.txt\n")
    (tmp_path / "in/c").symlink_to(elsewhere)
    (elsewhere / "circle").symlink_to(tmp_path / "in")
    (elsewhere / "h.txt").symlink_to("nowhere")
    texts, notes = found(tmp_path / "in")
    names = [text.strip() for text in texts]
    assert names == ["B.txt", "a.txt", "a/z.txt", "b.txt", "c/g.txt", "f.txt", "e\u0301.md"]
    others = files.OTHERS.format(".png, LICENSE, .tar")
    assert notes == {others: 4, files.NOWHERE: 1, files.ELSEWHERE: 1}
    assert found(tmp_path / "in/f.txt", tmp_path / "in/a")[0] == ["f.txt\n", "a/z.txt\n"]


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    shut = PermissionError(13, "Permission denied", "in/shut")
    monkeypatch.setattr(os, "scandir", Mock(side_effect=shut))
    with user_error("in/shut: Permission denied"):
        found(tmp_path)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("# A *walk* #\n\n## in the\t__garden__\n", "A walk\n\nin the\tgarden\n"),
        ("`code_a * b`, snake_case, 5 * 3, a\\*b\\_c\n", "code_a * b, snake_case, 5 * 3, a*b_c\n"),
        ("It was ***very* far**, _he said_. `x\n", "It was very far, he said. `x\n"),
        ("2*3 = 6, **10**3** in 5**2*\n", "2*3 = 6, 10**3 in 5**2\n"),
        ('[A link](http://x.y/a_b "t"), [one][1]![a picture](p.png)!\n', "A link, one!\n"),
        ("[![badge](b.svg)](http://x)a note[^1], a[0][1] [sic]\n", "a note, a[0][1] [sic]\n"),
        ("请看[文档](a.md)和[另一个][1]，还有**重点**。\n", "请看文档和另一个，还有重点。\n"),
        ("[A](http://x.y/A_(b)) of ?a=1&copy=2\n[1]: http://x.y 'A'\n", "A of ?a=1&copy=2\n\n"),
        ("[Anna]: What *is* it?\n[1]: see p. 5\n", "[Anna]: What is it?\n[1]: see p. 5\n"),
        ("[Bob]: Yes.\n[1]: http://x.y  \n[2]: <a b.md>\n", "[Bob]: Yes.\n\n\n"),
        ("> He said:\n> > *No*\n", "He said:\nNo\n"),
        ("* item\n- **one** &amp; two\n\n* * *\n***\n", "* item\n- one & two\n\n\n\n"),
        ("Title\n=====\n\n<b>Bold</b> 1 < 2 <!-- gone -->\n", "Title\n\n\nBold 1 < 2 \n"),
        ("| a | b |\n|---|:-:|\n| 1 | 2 |\n", "| a | b |\n\n| 1 | 2 |\n"),
        ("```python\nx = a_b * c  # *so*\n```\n*so*\n", "x = a_b * c  # *so*\nso\n"),
        ("``` x ``` y\n*so*\n```\na_b*\n```\n", " x  y\nso\na_b*\n"),
        ("---\ntitle: A\ntags:\n  - b\n---\nText.\n", "Text.\n"),
        ("# Title: A\n\n## Author: B\n\n-------\n\n### I\n\nText.\n", "\nI\n\nText.\n"),
        ("---\n\nA text, not fields.\n\n---\n\nMore.\n", "\n\nA text, not fields.\n\n\n\nMore.\n"),
        ("# Title\n\nText.\n\n---\n\nMore.\n", "Title\n\nText.\n\n\n\nMore.\n"),
        ("Long. " * 4000, "Long. " * 4000),
        ("---\na: b\n" + "Text.\n" * 200 + "---\n", "\na: b\n" + "Text.\n" * 200 + "\n"),
    ],
)  # fmt: skip
def test_of_markdown_the_text_is_read(tmp_path, text, plain):
    path = tmp_path / "a.md"
    path.write_text(text)
    texts, notes = found(path)
    assert "".join(texts) == plain
    assert notes[files.NO_MARKS] == len(text) - len(plain)


TITLE, END = "Project Gutenberg's text\n", "End of the Project Gutenberg EBook\n"


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        # What looks like a header, but does not end as one, is text.
        ([TITLE, "A.\n", END, "Hear about new eBooks.\n"], [TITLE, "A.\n", "<|endoftext|>"]),
        (["A.\n", END, "Hear about new eBooks.\n"], ["A.\n", "<|endoftext|>"]),
        ([TITLE, "START OF THE PROJECT GUTENBERG EBOOK\n", "A.\n"], ["<|endoftext|>", "A.\n"]),
        ([TITLE, *["A.\n"] * 1100, "*** START OF THIS PROJECT GUTENBERG\n"], None),
    ],
)
def test_of_a_text_of_project_gutenberg_only_notices_go(lines, kept):
    found = files.without_notices(enumerate(lines, 1), Counter())
    assert [line for _, line in found] == (kept or lines)


def test_whole_files_are_held_out_and_both_losses_are_printed(tmp_path, data, stem_ckpt):
    """Which ones, their names decide, wherever the folder lies. Copies of them are trained on, and
    counted."""
    names = [*map(str, range(20)), os.fsdecode("文集".encode("gbk"))]  # the last is no UTF-8
    (tmp_path / "books").mkdir()
    for book, name in enumerate(names):
        texts = [{"text": f"Anna {book} sees {page} at the river."} for page in range(30)]
        write_jsonl(tmp_path / f"books/{name}.jsonl", texts)
    shutil.copytree(tmp_path / "books", tmp_path / "elsewhere/of mine")

    def books(folder, split) -> Counter[int]:
        meta = read_meta(folder)
        text = read_tokenizer(folder, meta).decode(open_tokens(folder, split, meta).tolist())
        assert text.count("Anna") == meta[split]["documents"]
        return Counter(map(int, re.findall(r"Anna (\d+)", text)))

    seen = []
    for name, out in (("books", "a"), ("elsewhere/of mine", "out e")):
        line = ["prepare.py --hold_out_files 0.2 --input", name, "--out_dir", out, "--tokenizer"]
        said = command(*line, data).stdout
        held = tmp_path / out / "held_out"
        aside = books(held, "val").keys()
        assert books(held, "train").keys() <= aside and 1 <= len(aside) < 10
        assert books(held.parent, "train").keys() == {*range(len(names))} - aside
        assert not aside & books(held.parent, "val").keys()
        assert read_meta(held)["val"]["documents"] == 30 * len(aside)
        assert read_meta(held)["sources"] == sorted(f"{names[book]}.jsonl" for book in aside)
        seen.append(aside)
    assert seen[0] == seen[1]
    assert "out e/held_out/val.bin" in said and "are trained on" not in said
    both = shlex.split(said.split("both losses: python ")[1])
    said = command("train.py", *both[1:], "--init_from", stem_ckpt).stdout
    assert "out e/held_out" in said
    words = ["train.py --out_dir mixed --data_dir", f"out e,{held}"]
    assert f"{held} is held out, for --eval_only" in refused(*words)

    name = read_meta(held)["sources"][0]
    shutil.copy(tmp_path / "books" / name, tmp_path / "books/again.jsonl")
    line = ["prepare.py --input books --out_dir c --tokenizer", data]
    said = command(*line, "--hold_out_files", "0.2").stdout
    n = books(tmp_path / "c", "train")[names.index(name.removesuffix(".jsonl"))]
    assert n and f"note: {n} copies of documents of held_out/val.bin are trained on" in said
    # Its files would be trained on now.
    assert "c/held_out is of files that would be trained on" in refused(*line, "--overwrite")

    one = ["prepare.py --hold_out_files 0.2 --input books/1.jsonl --out_dir x --tokenizer", data]
    assert "two files or more" in refused(*one)
    assert "--hold_out_files is for files" in refused("prepare.py --hold_out_files 0.2")


def test_files_of_one_name_are_held_out_by_their_folders(tmp_path):
    paths = [tmp_path / f"{book}/text/main.txt" for book in range(100)] + [tmp_path / "main.md"]
    aside, rest = splitting.held_out(paths, 0.2)
    assert 10 < len(aside) < 30 and sorted([*aside, *rest]) == sorted(paths)
    for top in (Path(), tmp_path / "moved"):
        there = {path: top / path.relative_to(tmp_path) for path in paths}
        assert splitting.held_out([*there.values()], 0.2)[0] == [there[path] for path in aside]


@pytest.mark.parametrize(
    "line", ["x" + "`" * 4 * files.LONGEST, " " * 3000 + "---" + " " * 3000 + "x"]
)
def test_no_line_takes_quadratic_time(line):
    start = time.process_time()
    files.plain_line(line)
    assert time.process_time() - start < 0.5  # 0.01 s; a search from each of them: 6, and 80


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.ndjson", "a.csv", "a.jsonl.gz", "a.parquet"])
def test_a_pointer_of_git_lfs_is_no_text(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\n")
    for path in (tmp_path, tmp_path / name):
        with user_error(f"{name} is only a pointer of Git LFS: .*git lfs pull"):
            found(path)


def test_the_card_of_a_data_set_is_none_of_its_records(tmp_path):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data/train.ndjson", [{"text": "A record."}])
    (tmp_path / "README.md").write_text("About the records.\n")
    assert found(tmp_path) == (["A record."], {files.CARDS: 1})
    assert found(tmp_path / "README.md") == (["About the records.\n"], {})


@pytest.mark.parametrize("name", ["data", 'of \'6 "x" 😀 $(touch ran)'])
def test_of_a_clone_from_the_hub_not_only_its_readme_is_read(tmp_path, monkeypatch, name):
    """Whatever the name of a folder is, a shell reads the command as it is meant."""
    folder = tmp_path / name
    folder.mkdir()
    (tmp_path / "README.md").write_text("About the texts.\n")
    file = folder / "train.parquet"
    file.write_bytes(b"PAR1")
    for path, out in ((tmp_path, f"{name}.jsonl"), (file, "train.jsonl")):
        with user_error(" is Parquet: run pip install ") as error:
            found(path)
        line = re.search(r"run (.*), then take (.*?)( \(of|$)", str(error.value))
        assert bool(line[3]) == (path != file)
        assert line[2] == out
        shell = f'pip() {{ :; }}; python() {{ printf %s "$2"; }}; {line[1]}'
        code = subprocess.run(["sh", "-c", shell], capture_output=True, check=True, text=True)
        pandas = Mock()
        monkeypatch.setitem(sys.modules, "pandas", pandas)
        pandas.concat.side_effect = list
        exec(code.stdout.replace(").to_json(", "); pandas.to_json("))
        pandas.read_parquet.assert_called_once_with(str(file))
        assert pandas.to_json.call_args.args == (out,)
    assert not (tmp_path / "ran").exists()
