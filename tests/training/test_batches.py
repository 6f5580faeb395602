"""batches.py: which tokens are in which batch."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch

from common import UserError
from tables.rowadam import RowAdam
from tables.tables import ResidentTables
from text import tokenizer
from training.batches import (
    Conversations,
    Data,
    Mixture,
    Pairs,
    Windows,
    parse_mixture,
    read_meta,
    read_tokenizer,
)

IDS = np.arange(100, 1103, dtype=np.uint16)  # every token tells its place


@pytest.fixture(scope="module", params=[0, 5])
def encoding(request) -> tiktoken.Encoding:
    """A tokenizer of ours, and one whose <|endoftext|> is not 0, as those of GPT-2 and GPT-4."""
    made = tokenizer.train(["user assistant yes no maybe perhaps\n"] * 9, 290)
    if not request.param:
        return made
    n = made.n_vocab
    ranks = {token: i - 3 for token, i in made._mergeable_ranks.items()}
    names = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
    special = {name: n - 3 + i for i, name in enumerate(names)}
    return tiktoken.Encoding(
        "moved", pat_str=made._pat_str, mergeable_ranks=ranks, special_tokens=special
    )


# --- text ---


def test_an_epoch_holds_every_window_once():
    source = Windows(IDS, 10, seed=3)
    ids, targets = source.batch(0, source.n_row)
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    starts = sorted(ids[:, 0].tolist())
    assert np.diff(starts).tolist() == [10] * 99  # neither gaps nor overlaps
    again = source.batch(1, source.n_row)[0]
    assert not torch.equal(ids, again)
    cuts = {int(source.rows([source.n_row * epoch])[0][0, 0]) % 10 for epoch in range(20)}
    assert len(cuts) == 3  # 1,003 tokens leave room for three offsets


def test_a_batch_depends_on_its_number_alone():
    once, other = Windows(IDS, 10, seed=3), Windows(IDS, 10, seed=3)
    ordered = [once.batch(n, 7)[0] for n in range(40)]  # across epochs
    for n in (39, 2, 17, 0):
        assert torch.equal(other.batch(n, 7)[0], ordered[n])
    assert not torch.equal(Windows(IDS, 10, seed=4).batch(0, 7)[0], ordered[0])


def test_without_a_seed_rows_come_in_the_order_of_the_file():
    ids, targets = Windows(IDS, 10, None).rows(range(3))
    assert ids.flatten().tolist() == list(range(100, 130))
    assert targets.flatten().tolist() == list(range(101, 131))


def test_a_mixture_draws_by_weight_and_reads_each_source_in_its_own_order():
    parts = [Windows(IDS, 10, seed=1), Windows(IDS + 2000, 10, seed=1)]
    mixture = Mixture(parts, [0.75, 0.25], total=4000, seed=5)
    rows = [mixture.row(index)[0] for index in range(4000)]
    origin = [int(row[0] >= 2000) for row in rows]
    assert np.mean(origin) == pytest.approx(0.25, abs=0.02)
    for n in (0, 1):
        seen = [row for row, k in zip(rows, origin, strict=True) if k == n]
        alone = Windows(IDS + 2000 * n, 10, seed=1)
        assert all((row == alone.row(i)[0]).all() for i, row in enumerate(seen))
    later = Mixture([Windows(IDS, 10, 1), Windows(IDS + 2000, 10, 1)], [0.75, 0.25], 4000, 5)
    assert torch.equal(later.batch(99, 8)[0], mixture.batch(99, 8)[0])


# --- conversations ---


def talk(*contents: str) -> list[dict]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def packed(encoding, *talks) -> np.ndarray:
    ids = [
        token
        for messages in talks
        for token in [encoding.eot_token, *tokenizer.render(encoding, messages)]
    ]
    return np.array(ids, dtype=np.uint16)


TALKS = [talk("yes", "no"), talk("maybe", "perhaps", "no", "no no"), talk("yes yes", "maybe")]


def test_only_what_the_assistant_says_is_a_target(encoding):
    source = Conversations(packed(encoding, *TALKS), encoding, 64, None)
    ids, targets = source.rows(range(3))
    assert source.n_row == 3 and ids.shape == targets.shape and ids.shape[1] % 32 == 0
    wanted = [encoding.decode(row[row >= 0].tolist()) for row in targets]
    assert wanted == [" no<|im_end|>", " perhaps<|im_end|> no no<|im_end|>", " maybe<|im_end|>"]
    for row, target, messages in zip(ids, targets, TALKS, strict=True):
        whole = [encoding.eot_token, *tokenizer.render(encoding, messages)]
        assert row[: len(whole) - 1].tolist() == whole[:-1]
        assert (target[len(whole) - 1 :] == -1).all()  # padding
        for n in (target >= 0).nonzero()[:, 0]:
            assert target[n] == whole[n + 1]


def test_a_long_conversation_keeps_an_answer(encoding):
    late = talk("yes " * 30, "no")
    first = talk("yes", "no", "yes " * 30, "maybe")
    source = Conversations(packed(encoding, late, first), encoding, 16, None)
    ids, targets = source.rows(range(2))
    assert ids.shape == (2, 16)
    said = [encoding.decode(row[row >= 0].tolist()) for row in targets]
    assert said == [" no<|im_end|>", " no<|im_end|>"]
    assert encoding.decode([targets[0, -1]]) == tokenizer.END  # the row ends with the late answer
    assert ids[1, 0] == encoding.eot_token  # the head of the other
    assert source.n_cut == 2


def test_the_head_is_kept_if_an_answer_begins_with_its_last_target(encoding):
    long = talk("yes", "no no no no no")
    ids = packed(encoding, long)
    first = int(tokenizer.answers(encoding, ids.astype(np.int64)).argmax())
    for block_size, head in ((first, True), (first - 1, False)):
        inputs, targets = Conversations(ids, encoding, block_size, None).conversation(0)
        assert (inputs[0] == encoding.eot_token) == head
        assert (targets >= 0).any()


@pytest.mark.parametrize("block_size", [40, 64])
def test_padding_fits_the_context_and_reads_no_row_that_was_not_there(encoding, block_size):
    long = [talk("yes", "no " * n) for n in (3, 30)]
    source = Conversations(packed(encoding, *long), encoding, block_size, None)
    ids, targets = source.rows(range(2))
    assert ids.shape[1] <= block_size
    short = len(tokenizer.render(encoding, long[0]))
    assert set(ids[0].tolist()) <= {encoding.eot_token, *tokenizer.render(encoding, long[0])}
    assert (targets[0, short:] == -1).all()
    tables = ResidentTables(1, encoding.n_vocab, 4)
    adam = RowAdam(tables)
    next(tables.lookup(ids)).sum().backward()
    adam.step(lr=0.1)
    assert adam.count.nonzero()[:, 0].tolist() == sorted(set(ids.flatten().tolist()))


def test_a_long_pair_keeps_the_answers_that_differ(encoding):
    early = ("yes", "no", "yes " * 30)
    ids = packed(encoding, talk(*early, "maybe"), talk(*early, "perhaps"))
    _, targets, _ = Pairs(ids, encoding, 16, None).rows([0])
    said = [encoding.decode(t[t >= 0].tolist()) for t in targets[0]]
    assert said == [" maybe<|im_end|>", " perhaps<|im_end|>"]


def test_pairs_stay_together_and_bring_their_reference(encoding):
    chosen = [talk("yes", "no " * n) for n in range(1, 6)]
    rejected = [talk("yes", "maybe " * n) for n in range(1, 6)]
    both = [t for pair in zip(chosen, rejected, strict=True) for t in pair]
    source = Pairs(packed(encoding, *both), encoding, 64, seed=2)
    source.reference[:] = [[n, -n] for n in range(1, 6)]
    ids, targets, reference = source.batch(0, 5)
    assert source.n_row == 5 and ids.shape[:2] == (5, 2)
    for row, known in zip(targets, reference.tolist(), strict=True):
        said = [encoding.decode(t[t >= 0].tolist()).removesuffix("<|im_end|>") for t in row]
        assert said == [" " + word * int(known[0]) for word in ("no ", "maybe ")]
        assert known[1] == -known[0]
    assert sorted(reference[:, 0].tolist()) == [1, 2, 3, 4, 5]


# --- folders ---


def folder(path, encoding, kind="text", ids=IDS % 250, **changes):
    path.mkdir()
    meta = {
        "format": 2, "kind": kind, "corpus": "files", "vocab_size": encoding.n_vocab,
        "dtype": "uint16", "tokenizer": tokenizer.fingerprint(encoding),
    }  # fmt: skip
    for split in ("train", "val"):
        ids.astype(np.uint16).tofile(path / f"{split}.bin")
        digest = hashlib.sha256((path / f"{split}.bin").read_bytes()).hexdigest()
        meta[split] = {"documents": 1, "tokens": len(ids), "bytes": 1, "sha256": digest}
    (path / "meta.json").write_text(json.dumps({**meta, **changes}))
    (path / "tokenizer.json").write_text(tokenizer.dumps(encoding))
    return path


def test_a_folder_opens_with_validation_in_order(tmp_path, encoding):
    data = Data(str(folder(tmp_path / "a", encoding)), "text", 10, seed=1, total=50)
    assert isinstance(data.train, Windows) and data.weights == [1.0] and data.pairs == []
    assert data.val[str(tmp_path / "a")].rows([0])[0].tolist() == [list(range(100, 110))]


def test_a_mixture_of_folders(tmp_path, encoding):
    for name in "ab":
        folder(tmp_path / name, encoding)
    mixture = f"{tmp_path}/a=3,{tmp_path}/b=1"
    data = Data(mixture, "text", 10, seed=1, total=500)
    assert Counter(data.train.which)[0] == pytest.approx(375, abs=40)
    assert data.weights == [0.75, 0.25] and len(data.val) == 2


def test_parse_mixture():
    assert parse_mixture("data/a") == {Path("data/a"): 1.0}
    weights = {Path("a"): 0.65, Path("b"): 0.05, Path("c"): 0.3}
    assert parse_mixture("a=0.65,b=.05,c=3e-1") == pytest.approx(weights)


@pytest.mark.parametrize("wrong", ["a=", "a=0", "a=-1", "a=1,b", "=1", "a=nan", "a=1,b=1,a=2"])
def test_a_mixture_that_is_none_is_one_clear_line(wrong):
    with pytest.raises(UserError, match="is not folder=weight"):
        parse_mixture(wrong)


def test_folders_of_two_tokenizers_do_not_mix(tmp_path, encoding):
    other = tokenizer.train(["quite different words"] * 9, 270)
    folder(tmp_path / "a", encoding), folder(tmp_path / "b", other)
    with pytest.raises(UserError, match=r"b was made with another tokenizer .* --tokenizer"):
        Data(f"{tmp_path}/a=1,{tmp_path}/b=1", "text", 10, 1, 50)


def test_a_text_shorter_than_the_context_is_refused(tmp_path, encoding):
    path = str(folder(tmp_path / "a", encoding))
    assert len(Data(path, "text", len(IDS) - 1, 1, 50).train.batch(0, 1)[0][0]) == len(IDS) - 1
    with pytest.raises(UserError, match=r"train\.bin has 1003 tokens: lower --block_size"):
        Data(path, "text", len(IDS), 1, 50)


def flipped(content: bytes) -> bytes:
    return content[:100] + bytes([content[100] ^ 4]) + content[101:]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("damage", [flipped, lambda content: content[:-2], lambda content: b""])
def test_damaged_token_files_are_refused(tmp_path, encoding, split, damage):
    path = folder(tmp_path / "a", encoding)
    (path / f"{split}.bin").write_bytes(damage((path / f"{split}.bin").read_bytes()))
    with pytest.raises(UserError, match=rf"{split}\.bin is damaged .*: run prepare\.py --out_dir"):
        Data(str(path), "text", 10, 1, 50)


def test_another_tokenizer_than_the_token_files_is_refused(tmp_path, encoding):
    path = folder(tmp_path / "a", encoding)
    other = tokenizer.train(["quite different words"] * 9, 270)
    for text in (tokenizer.dumps(other), tokenizer.dumps(encoding)[:-9]):
        (path / "tokenizer.json").write_text(text)
        with pytest.raises(UserError, match=r"tokenizer\.json is damaged \(not "):
            read_tokenizer(path, read_meta(path))
    path = folder(tmp_path / "b", encoding, vocab_size=encoding.n_vocab + 1)
    with pytest.raises(UserError, match="not the tokenizer"):  # the model would be built for it
        Data(str(path), "text", 1, 1, 50)


def test_a_damaged_meta_json_is_one_clear_line(tmp_path, encoding):
    path = folder(tmp_path / "a", encoding)
    meta = read_meta(path)
    assert meta["train"]["tokens"] == len(IDS)

    def error(text: str) -> str:
        (path / "meta.json").write_text(text)
        with pytest.raises(UserError, match=r"meta\.json is damaged .*: run prepare") as caught:
            read_meta(path)
        return str(caught.value)

    error(""), error("[]"), error('{"format": 2'), error(json.dumps({**meta, "format": 1}))
    error(json.dumps({**meta, "train": 5}))
    for key in ("kind", "corpus", "vocab_size", "dtype", "tokenizer"):
        assert key in error(json.dumps({k: v for k, v in meta.items() if k != key}))
    for key in ("documents", "tokens", "sha256"):
        part = {k: v for k, v in meta["val"].items() if k != key}
        assert key in error(json.dumps({**meta, "val": part}))
    (path / "meta.json").write_text(json.dumps({**meta, "dtype": "uint17"}))
    with pytest.raises(UserError, match=r"train\.bin is damaged .*uint17"):
        Data(str(path), "text", 10, 1, 50)
    (path / "meta.json").unlink()
    with pytest.raises(UserError, match=rf"no {path}/meta\.json: run prepare\.py --out_dir"):
        read_meta(path)


@pytest.mark.parametrize(("kind", "stage"), [("preference", "text"), ("text", "chat")])
def test_data_of_another_stage_are_refused(tmp_path, encoding, kind, stage):
    path = folder(tmp_path / "a", encoding, kind)
    with pytest.raises(UserError, match=f"a holds {kind} data, this stage reads {stage} data"):
        Data(str(path), stage, 10, 1, 50)


def test_token_lengths_are_bytes_of_text(tmp_path, encoding):
    data = Data(str(folder(tmp_path / "a", encoding)), "text", 10, seed=1, total=50)
    lengths = data.token_lengths
    text = "Yes, no – Ωmega 漢字 maybe\n"
    assert lengths[encoding.encode_ordinary(text)].sum() == len(text.encode())
    assert (lengths == 0).sum() == 3  # the special tokens
