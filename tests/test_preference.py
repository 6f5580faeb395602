"""Preferred answers: pairs as data, the loss against a loop written out, whole runs."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from conftest import (
    CPU,
    RUN,
    assert_same_run,
    checkpoint,
    command,
    flags,
    interrupted,
    losses,
    refused,
    resume,
    small_run,
    write_jsonl,
)
from test_ranks import assert_ended, in_ranks

from text import countries
from training import countries as questions
from training.batches import Data
from training.checkpoints import load_model
from training.objectives import validate
from training.preference import BETA, Preference
from training.records import read_run
from training.settings import STAGES, new_settings


def pair(rng: random.Random) -> dict:
    """Yes is preferred to no, with words of the story."""
    name = rng.choice(["Anna", "Björn", "Chloë"])
    asked = [{"role": "user", "content": f"Who sees {name}?"}] * rng.choice([1, 1, 2])
    asked = [message for ask in asked for message in (ask, says("Anna"))][:-1]
    return {"chosen": [*asked, says(f"{name} sees.")], "rejected": [*asked, says("Björn follows")]}


def says(text: str) -> dict:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def pairs(data, tmp_path_factory) -> Path:
    rng = random.Random(0)
    path = write_jsonl(tmp_path_factory.mktemp("pairs") / "p.jsonl", [pair(rng) for _ in range(80)])
    made = flags(tokenizer=data, val_fraction=0.2)
    said = command("prepare.py", "--input", path, "--out_dir", path.parent / "pairs", *made).stdout
    assert "--stage dpo" in said
    return path.parent / "pairs"


def dpo(pairs: Path, trained: dict, out: Path, **more) -> Path:
    given = dict(stage="dpo", init_from=trained["stem"] / "ckpt.pt", learning_rate=1e-3, **more)
    shape = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"))
    return small_run(pairs, out, **{**shape, **given})


def test_pairs_lie_one_behind_the_other_whatever_the_order(pairs):
    data = Data(str(pairs), "preference", block_size=64, seed=3, total=100)
    ids, targets = data.train.batch(0, 8)
    assert ids.shape[:2] == targets.shape[:2] == (8, 2)
    for (chosen, rejected), (yes, no) in zip(ids, targets, strict=True):
        texts = [
            data.encoding.decode(side[side2 >= 0].tolist())
            for side, side2 in ((yes, yes), (no, no))
        ]
        assert "sees.<|im_end|>" in texts[0] and "follows<|im_end|>" in texts[1]
        n = int((chosen != rejected).nonzero()[0])  # the same up to the last answer
        assert "follows" not in data.encoding.decode(chosen[:n].tolist())
    again, _ = Data(str(pairs), "preference", block_size=64, seed=4, total=100).train.batch(0, 8)
    assert ids.shape != again.shape or not torch.equal(ids, again)


def naive_log_p(model, ids, targets) -> float:
    total = 0.0
    logits = model(ids[None])[0][0].double()
    for place, target in enumerate(targets.tolist()):
        if target >= 0:
            total += torch.log(torch.softmax(logits[place], -1))[target].item()
    return total


def test_loss_margin_and_accuracy_equal_a_loop_over_pairs(pairs, trained, tmp_path):
    reference, _, _ = load_model(trained["stem"] / "ckpt.pt", CPU)
    model, _, _ = load_model(trained["stem"] / "ckpt.pt", CPU)
    data = Data(str(pairs), "preference", block_size=32, seed=3, total=100)
    objective = Preference(model, CPU, "float32")
    objective.begin(data, None)
    assert len(objective.reference) <= 2 * 80
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.eval()
    ids, targets = data.train.batch(0, 6)
    targets[5] = -1  # fills a batch: not counted
    expected, margins = [], []
    for both, wanted in zip(ids[:5], targets[:5], strict=True):
        gains = []
        for row, target in zip(both, wanted, strict=True):
            gains.append(naive_log_p(model, row, target) - naive_log_p(reference, row, target))
        margins.append(gains[0] - gains[1])
        expected.append(math.log(1 + math.exp(-BETA * margins[-1])))
    assert objective.count(targets) == 5
    assert objective(ids, targets).item() == pytest.approx(sum(expected) / 5, rel=1e-4)
    found = objective.figures()
    assert found["margin"] == pytest.approx(sum(margins) / 5, rel=1e-3, abs=1e-4)
    assert found["accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / 5)
    figures = validate(objective, data, 1 << 16, size=7)
    assert figures.keys() == {"val_loss", "margin", "accuracy"}


def test_what_is_preferred_becomes_likelier(pairs, trained, tmp_path):
    out = dpo(pairs, trained, tmp_path / "out")
    first, *_, last = read_run(out)["eval"]
    assert first["val_loss"] == pytest.approx(math.log(2), abs=1e-6)  # the model is its reference
    assert first["margin"] == pytest.approx(0, abs=1e-4)
    assert last["val_loss"] < 0.6 and last["margin"] > 1 and last["accuracy"] > 0.9
    assert "holds pairs" in refused("train.py --eval_only --out_dir", out)


@pytest.mark.parametrize("more", [{}, {"offload": "disk"}])
def test_a_run_that_was_cut_off_ends_as_one_that_was_not(pairs, trained, tmp_path, more):
    whole = dpo(pairs, trained, tmp_path / "whole")
    with pytest.MonkeyPatch.context():
        cut = tmp_path / "cut"
        given = dict(stage="dpo", init_from=trained["stem"] / "ckpt.pt", learning_rate=1e-3, **more)
        shape = dict.fromkeys(("n_layer", "n_head", "n_embd", "block_size"))
        interrupted(pairs, cut, 9, **{**shape, **given})
    assert_same_run(resume(cut), whole)


def test_micro_batches_keep_pairs_together(pairs, trained, tmp_path):
    whole = dpo(pairs, trained, tmp_path / "whole")
    parts = dpo(pairs, trained, tmp_path / "parts", device_batch_size=1)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"chosen": [], "rejected": []}, "must differ in their last answer"),
        ({"chosen": [says("a")], "rejected": [says("x"), says("b")]}, "must differ in their last"),
        ({"chosen": [{"role": "user", "content": "a"}], "rejected": []}, "must end with an answer"),
        ({"chosen": [says("a")]}, 'no "text"'),
    ],
)
def test_pairs_that_are_none_are_named(data, tmp_path, record, why):
    path = write_jsonl(tmp_path / "p.jsonl", [record])
    made = flags(tokenizer=data, out_dir=tmp_path / "out")
    assert why in refused("prepare.py", "--input", path, *made)


def test_other_stages_do_not_read_pairs(pairs, trained, tmp_path):
    given = flags(init_from=trained["stem"] / "ckpt.pt", out_dir=tmp_path, data_dir=pairs)
    assert "holds preference, this stage reads chat" in refused("train.py --stage sft", *given)


def test_the_countries_prefer_brief_answers():
    train, val = countries.preferences()
    assert len(train) == 16 * 195 and len(val) == 6 * 195
    for chosen, rejected in [*train, *val]:
        assert chosen[0] == rejected[0] and chosen[0]["role"] == "user"
        assert rejected[1]["content"].startswith("The answer is ")
        brief = rejected[1]["content"].removeprefix("The answer is ")
        assert chosen[1]["content"] == brief[0].upper() + brief[1:]
    asked = {json.dumps(chosen[0]) for chosen, _ in train}
    assert not asked & {json.dumps(chosen[0]) for chosen, _ in val}


# --- what else a run promises ---


def evaluated(folder: Path) -> list[dict]:
    return read_run(folder)["eval"]


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_it_does_not_matter_where_tables_are(pairs, trained, tmp_path, offload):
    resident = dpo(pairs, trained, tmp_path / "resident")
    far = dpo(pairs, trained, tmp_path / "far", offload=offload)
    assert_same_run(far, resident)
    assert evaluated(far) == evaluated(resident)


def test_figures_are_of_all_ranks(pairs, trained, tmp_path):
    """An odd number of pairs, as one rank has more of them."""
    one = dpo(pairs, trained, tmp_path / "one", eval_tokens=13 * 32)
    args = checkpoint(one)["args"]
    given = {name: args[name] for name in ("stage", "init_from", "learning_rate", *RUN)}
    assert_ended(in_ranks(2, [dict(given, data_dir=str(pairs), out_dir="two")], tmp_path))
    for ours, others in zip(evaluated(one), evaluated(tmp_path / "two"), strict=True):
        for name in ("val_loss", "margin", "accuracy"):
            assert ours[name] == pytest.approx(others[name], rel=1e-4, abs=1e-5), name


def test_evaluation_is_of_what_it_read_alone(pairs, trained):
    """Neither of pairs that were trained on, nor of an evaluation before."""
    model, _, _ = load_model(trained["stem"] / "ckpt.pt", CPU)
    data = Data(str(pairs), "preference", block_size=32, seed=3, total=100)
    objective = Preference(model, CPU, "float32")
    objective.begin(data, None)
    model.blocks[0].attn_norm.weight.data *= 2
    first = validate(objective, data, 1 << 16, size=4)
    objective(*data.train.batch(0, 4))
    assert validate(objective, data, 1 << 16, size=4) == first


def test_the_reference_is_without_dropout_and_knows_no_padding(pairs, trained):
    model, _, _ = load_model(trained["stem"] / "ckpt.pt", CPU)
    data = Data(str(pairs), "preference", block_size=64, seed=3, total=100)
    model.config.block_size = 64
    model.config.dropout = 0.5
    objective = Preference(model.train(), CPU, "float32")
    objective.begin(data, None)
    assert model.training
    model.eval()
    lengths = set()
    for number in range(8):  # padded to other lengths than in the reference
        batch = data.train.batch(number, 1)
        lengths.add(batch[0].shape[-1])
        objective(*batch)
    assert len(lengths) > 1
    assert objective.figures()["margin"] == pytest.approx(0, abs=1e-4)
    ids, targets = data.train.batch(0, 1)
    ids[0, 0, 0] += 1  # a conversation of which there is no reference
    with pytest.raises(KeyError):
        objective(ids, targets)
    assert all(len(key) == 16 for key in objective.state_dict()["keys"])


def test_a_checkpoint_from_before_there_were_pairs_goes_on(data, tmp_path):
    whole = small_run(data, tmp_path / "whole", max_iters=14)
    older = small_run(data, tmp_path / "older")
    saved = checkpoint(older)
    del saved["objective"]
    torch.save(saved, older / "ckpt.pt")
    assert resume(older, max_iters=14) and len(losses(older)) == len(losses(whole))


def test_settings_of_the_stage(trained):
    base = checkpoint(trained["stem"])
    base["args"]["preset"] = "countries"
    meta = {"corpus": "files", "train": {"documents": 320}}
    given = {"stage": "dpo", "init_from": "x"}
    assert STAGES["dpo"].rate == pytest.approx(4e-8 / 5e-4) and BETA == 0.15
    of_files = new_settings(given, meta, base)
    assert of_files.learning_rate == pytest.approx(3e-3 * 8e-5)
    assert of_files.max_iters == 320 // of_files.batch_size
    ours = new_settings(given, {**meta, "corpus": "countries-dpo"}, base)
    assert (ours.learning_rate, ours.batch_size, ours.max_iters) == (3e-5, 32, 100)


def test_its_corpus_asks_for_recall_and_sentences(monkeypatch, trained):
    model, encoding, _ = load_model(trained["stem"] / "ckpt.pt", CPU)
    monkeypatch.setattr(questions, "chat_recall", lambda *_: {"recall": 0.5, "sentences": 0.1})
    assert questions.ask(model, encoding, "countries-dpo") == {"recall": 0.5, "sentences": 0.1}
    assert questions.ask(model, encoding, "countries-dpo", briefly=True) == {}
