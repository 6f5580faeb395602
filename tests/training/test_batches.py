"""batches.py: which tokens are in which batch; and the folders that they come from."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from conftest import by_turns, change_json, contents, user_error

from text import bpe, chat, tokenizer
from text.dataset import open_tokens, read_meta
from text.writer import write_dataset
from training.batches import Data, parse_mixture
from training.conversations import Conversations
from training.sources import Mixture, Windows

IDS = np.arange(100, 1103, dtype=np.uint16)  # every token tells its place


@pytest.fixture(scope="module")
def ours() -> tiktoken.Encoding:
    return bpe.train(["user assistant yes no maybe perhaps\n"] * 9, 290)


@pytest.fixture(scope="module", params=["ours", "moved"])
def encoding(request, ours) -> tiktoken.Encoding:
    """A tokenizer of ours, and one whose <|endoftext|> is not 0, as those of GPT-2 and GPT-4."""
    if request.param == "ours":
        return ours
    n = ours.n_vocab
    names = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
    return tiktoken.Encoding(
        "moved",
        pat_str=ours._pat_str,
        mergeable_ranks={token: i - 3 for token, i in ours._mergeable_ranks.items()},
        special_tokens={name: n - 3 + i for i, name in enumerate(names)},
    )


# --- text ---


def test_an_epoch_holds_every_window_once():
    source = Windows(IDS, 10, seed=3)
    ids, targets = source.batch(0, source.n_sequence)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    starts = sorted(ids[:, 0].tolist())
    assert np.diff(starts).tolist() == [10] * 99  # neither gaps nor overlaps
    others = source.batch(1, source.n_sequence), Windows(IDS, 10, seed=4).batch(0, len(ids))
    assert not any(torch.equal(ids, other) for other, _ in others)
    firsts, _ = source.sequences(
        range(0, 20 * source.n_sequence, source.n_sequence)
    )  # of 20 epochs
    assert len(set((firsts[:, 0] % 10).tolist())) == 3  # 1,003 tokens leave room for three offsets
    with pytest.raises(AssertionError, match="not one sequence of 10 tokens"):
        Windows(IDS[:10], 10, None)
    in_order, _ = Windows(IDS, 10, None).sequences(range(3))  # without a seed
    assert in_order.flatten().tolist() == list(range(100, 130))


def test_a_mixture_draws_by_weight_and_reads_each_source_in_its_own_order():
    def parts():
        return [Windows(IDS, 10, seed=1), Windows(IDS + 2000, 10, seed=1)]

    mixture = Mixture(parts(), [0.75, 0.25], total=4000, seed=5)
    rows = [mixture.sequence(index)[0].tolist() for index in range(4000)]
    first = [row for row in rows if row[0] < 2000]
    second = [row for row in rows if row[0] >= 2000]
    assert len(second) / len(rows) == pytest.approx(0.25, abs=0.02)
    for seen, alone in zip((first, second), parts(), strict=True):
        assert seen == [alone.sequence(index)[0].tolist() for index in range(len(seen))]


def test_validation_reads_windows_from_all_of_the_text():
    """... the same each time, and no more than asked for: the order of files does not matter."""
    halves = np.zeros(10_001, np.uint16), np.ones(10_001, np.uint16)
    for text in (np.concatenate(halves), np.concatenate(halves[::-1])):
        source = Windows(text, 10, None)
        ids, _ = source.sequences(source.spread(500))
        assert ids.shape == (50, 10) and 0.48 < ids.float().mean() < 0.52
    assert source.spread(10**9) == list(range(source.n_sequence))
    assert source.spread(1) == [0]


# --- conversations ---


def packed(encoding, *talks) -> np.ndarray:
    ids = []
    for messages in talks:
        ids += [encoding.eot_token, *chat.render(encoding, messages)]
    return np.array(ids, dtype=np.uint16)


TALKS = [
    by_turns("yes", "no"),
    by_turns("maybe", "perhaps", "no", "no no"),
    by_turns("yes yes", "maybe"),
]


def said(encoding, targets) -> list[str]:
    return [encoding.decode(row[row >= 0].tolist()) for row in targets]


def test_only_what_the_assistant_says_is_a_target(encoding):
    source = Conversations(packed(encoding, *TALKS), encoding, 64, None)
    assert source.n_sequence == 3 and source.spread(len(source.ids)) == [0, 1, 2]
    ids, targets = source.sequences(range(3))
    assert ids.shape == targets.shape
    assert ids.shape[1] % 32 == 0
    assert said(encoding, targets) == [
        " no<|im_end|>",
        " perhaps<|im_end|> no no<|im_end|>",
        " maybe<|im_end|>",
    ]
    for row, target, messages in zip(ids, targets, TALKS, strict=True):
        whole = packed(encoding, messages).tolist()
        n = len(whole) - 1
        assert row[:n].tolist() == whole[:-1]
        assert set(row[n:].tolist()) <= {whole[-2]}  # padding: no row of a table is read for it
        for place in range(len(target)):
            assert target[place] == -1 or (place < n and target[place] == whole[place + 1])


def test_a_long_conversation_keeps_an_answer(encoding):
    late = by_turns("yes " * 30, "no")
    early = by_turns("yes", "no", "yes " * 30, "maybe")
    source = Conversations(packed(encoding, late, early), encoding, 16, None)
    ids, targets = source.sequences(range(2))
    assert ids.shape == (2, 16) and source.n_cut == 2 and source.spread(2 * 16) == [0, 1]
    assert said(encoding, targets) == [" no<|im_end|>", " no<|im_end|>"]
    assert encoding.decode([targets[0, -1]]) == tokenizer.END  # the row ends with the late answer
    assert ids[1, 0] == encoding.eot_token  # the head of the other


# --- folders ---


TEXT = "yes no maybe perhaps\n" * 200


def write_folder(path: Path, encoding, kind="text", documents=(TEXT,)) -> Path:
    both = [(split, document) for split in ("train", "val") for document in documents]
    write_dataset(path, both, encoding, kind, corpus="files")
    return path


def test_a_folder_and_a_mixture_of_folders(tmp_path, encoding):
    a, b = (write_folder(tmp_path / name, encoding) for name in "ab")
    alone = Data(str(a), "text", 10, seed=1, total=50)
    assert alone.weights == [1.0]
    ids = [encoding.eot_token, *encoding.encode_ordinary(TEXT)]
    assert alone.val[str(a)].sequences([0])[0].tolist() == [ids[:10]]
    text = "Yes, no – Ωmega 漢字 maybe\n"
    lengths = alone.token_lengths
    assert lengths[encoding.encode_ordinary(text)].sum() == len(text.encode())
    assert (lengths == 0).sum() == 3  # the special tokens

    data = Data(f"{a}=3,{b}=1", "text", 10, seed=1, total=500)
    assert isinstance(data.train, Mixture)
    assert data.weights == [0.75, 0.25]
    assert list(data.val) == [str(a), str(b)]
    assert data.n_sequence * 0.75 == pytest.approx(alone.n_sequence)  # then a is read again


def test_what_a_mixture_looks_like(tmp_path):
    weights = {Path("a"): 0.65, Path("b"): 0.05, Path("c"): 0.3}
    assert parse_mixture("a=0.65, b=.05,c=3e-1 ") == pytest.approx(weights)
    assert parse_mixture("a , b") == {Path("a"): 0.5, Path("b"): 0.5}
    for wrong in ("a=", "a=0", "a=-1", "a=1,b", "=1", "a=nan", "a=1,b=1,a=2", "x" * 300 + "="):
        with user_error("--data_dir"):
            parse_mixture(wrong)
    Path("a=b").mkdir()
    for name in ("a=b", "a,b", "a=1,b"):  # folders, as one may name them
        (tmp_path / name).mkdir(exist_ok=True)
        assert parse_mixture(name) == {Path(name): 1.0}


def test_damage_is_one_line_that_names_the_file(tmp_path, ours):
    """Odd records in meta.json: test_trust.py; odd tokenizers: test_tokenizer.py."""
    folder = write_folder(tmp_path / "a", ours)
    for name, whole in contents(folder).items():
        path = folder / name
        line = rf"{path}.*: run python .*prepare\.py --out_dir {folder}, with"
        for damaged in (whole[:7], whole[:-2], whole[::-1], None):
            path.unlink()
            if damaged:
                path.write_bytes(damaged)
            with user_error(line):
                Data(str(folder), "text", 10, 1, 50)
        path.write_bytes(whole)


def test_ids_are_those_of_the_vocabulary(tmp_path, ours):
    """... in a folder of somebody else's making."""
    for size in (-1, ours.n_vocab - 1, ours.n_vocab + 1):
        folder = write_folder(tmp_path / str(size), ours)
        change_json(folder / "meta.json", vocab_size=size)
        with user_error("tokenizer.json is damaged"):
            Data(str(folder), "text", 10, 1, 50)
    folder = write_folder(tmp_path / "ids", ours)
    meta = read_meta(folder)
    for split in ("val", "train"):
        largest = int(open_tokens(folder, split, meta).max())
        with user_error(f"{split}.bin is damaged .*{largest}"):
            open_tokens(folder, split, {**meta, "vocab_size": largest})


def test_folders_that_do_not_fit_are_refused(tmp_path, ours):
    other = bpe.train(["quite different words"] * 9, 270)
    a, b = write_folder(tmp_path / "a", ours), write_folder(tmp_path / "b", other)
    chat = write_folder(tmp_path / "chat", ours, "chat", TALKS)
    mixed_up = write_folder(tmp_path / "mixed_up", ours)
    shutil.copy(b / "tokenizer.json", mixed_up)
    old = write_folder(tmp_path / "old", ours)
    change_json(old / "meta.json", format=1)
    n = len(ours.encode_ordinary(TEXT)) + 1
    for data_dir, kind, block_size, named in (
        (f"{a}=1,{b}=1", "text", 10, f"{b} was made with a different tokenizer"),
        (f"{a}=1,{b}=1", "text", 10, f"--out_dir {b} --overwrite"),
        (f"{a}=1,{chat}=1", "chat", 10, "--data_dir"),
        (a, "text", n, f"--block_size {n} to {n - 1} or less"),
        (mixed_up, "text", 10, "not the tokenizer of the token files"),
        (old, "text", 10, "format 1"),
    ):
        with user_error(re.escape(named)):
            Data(str(data_dir), kind, block_size, 1, 50)
    assert Data(str(a), "text", n - 1, 1, 50).train.batch(0, 1)[0].shape == (1, n - 1)
    c = write_folder(tmp_path / "c", ours)
    with user_error(f"to {n - 1} or less, or leave this folder out"):
        Data(f"{a},{c}", "text", n, 1, 50)

    # Of a text that is all for validation, nothing else need fill a window.
    held = tmp_path / "held"
    both = [("train", "No"), ("val", TEXT)]
    write_dataset(held, both, ours, "text", corpus="files", val_fraction=1)
    with user_error(f"to {n - 1} or less"):
        Data(str(held), "text", n, 1, total=0)
    assert Data(str(held), "text", n - 1, 1, total=0).val[str(held)].n_sequence == 1
    with user_error("is held out, for --eval_only"):
        Data(str(held), "text", 10, 1, total=50)
