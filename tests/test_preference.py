"""Preferred answers: pairs as data, the loss against a loop written out, whole runs."""

import math

import pytest
import torch
from conftest import CPU, by_turns, command, flags, refused, user_error
from simulated_gpu import SimulatedGpu

from corpora import countries
from text.writer import write_dataset
from training.batches import Data
from training.checkpoints import load_model
from training.objectives import validate
from training.preference import BETA, Preference


def test_margins_are_counted_on_a_device_without_double_precision():
    with SimulatedGpu() as gpu:
        margins = [torch.tensor([1.0, -2.0]).to(gpu.device), torch.ones(2, device=gpu.device)]
        objective = Preference(None, "float32", margins=margins)
        assert objective.figures() == {"margin": 0.25, "accuracy": 0.75}


def test_of_pairs_only_the_last_answers_are_learned_to_their_ends(pairs):
    """However much is cut of the conversation before them, which is the same."""
    data = Data(str(pairs), "preference", block_size=64, seed=3, total=100)
    assert data.train.n_cut
    ids, targets = data.train.batch(0, 32)
    for both, wanted in zip(ids, targets, strict=True):
        yes, no = (data.encoding.decode(side[side >= 0].tolist()) for side in wanted)
        assert yes.endswith(" sees.<|im_end|>") and no == " Björn follows<|im_end|>"
        firsts = [int((side >= 0).nonzero()[0]) for side in wanted]
        before = [side[: first + 1] for side, first in zip(both, firsts, strict=True)]
        n = min(firsts)
        assert torch.equal(before[0][-n:], before[1][-n:])


def test_pairs_that_are_the_same_where_they_are_cut_are_left_out_and_counted(
    stem_ckpt, pairs, tmp_path
):
    """Their loss would be ln 2 and their margin 0, whatever is learned."""
    encoding = Data(str(pairs), "preference", 32, 0, 1).encoding
    end = " sees Björn at the river" * 20

    def long(name: str, more: str) -> tuple[list[dict], list[dict]]:
        return tuple(by_turns("Who?", text) for text in (name, more))

    early = long("Anna" + end, "Björn" + end)  # differ where nothing is kept
    late = long("Anna" + end, "Anna" + end + ".")
    both = [early, late, early, long("Anna.", "Björn."), long("Anna" + end, "Björn.")]
    split = [("train", pair) for pair in both] + [("val", late), ("val", early)]
    write_dataset(tmp_path / "a", split, encoding, "preference", corpus="files")
    source = Data(str(tmp_path / "a"), "preference", 32, 0, 1).train
    assert (source.n_sequence, source.n_same) == (3, 2)
    _, targets = source.pairs(range(3))
    assert not any(torch.equal(*pair) for pair in targets)
    assert "Anna.<|im_end|>" in encoding.decode(targets[1, 0][targets[1, 0] >= 0].tolist())
    line = "train.py --stage dpo --max_iters 1 --init_from"
    said = command(line, stem_ckpt, *flags(data_dir="a", out_dir="b"))
    assert "3 pairs are left out: cut to --block_size, their answers are the same" in said.stdout

    write_dataset(
        tmp_path / "c", [split[0], ("val", early)], encoding, "preference", corpus="files"
    )
    with user_error(r"--block_size 32.*raise it"):
        Data(str(tmp_path / "c"), "preference", 32, 0, 1)


# --- the loss ---


@pytest.fixture
def opened(stem_ckpt, pairs):
    """A model, its objective and its data."""

    def opened(block_size: int, dropout: float = 0.0):
        model, _, _ = load_model(stem_ckpt, CPU)
        model.config.block_size = block_size
        model.config.dropout = dropout
        data = Data(str(pairs), "preference", block_size, seed=3, total=100)
        objective = Preference(model.train(), "float32")
        objective.begin(data, None)
        return model, objective, data

    return opened


def naive_log_p(model, ids, targets) -> float:
    p = model(ids[None])[0][0].double().softmax(-1)
    return sum(math.log(p[at, t].item()) for at, t in enumerate(targets.tolist()) if t >= 0)


def test_loss_margin_and_accuracy_equal_a_loop_over_pairs(stem_ckpt, opened):
    reference, _, _ = load_model(stem_ckpt, CPU)
    model, objective, data = opened(32)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    evaluated = validate(objective, data, 1 << 16, size=7)
    assert evaluated.keys() == {"val_loss", "margin", "accuracy"}
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
    # Figures are of what was evaluated alone, and not twice.
    assert validate(objective, data, 1 << 16, size=7) == evaluated
    objective.model.eval()
    objective(ids, targets)
    found = objective.figures()
    assert found["margin"] == pytest.approx(sum(margins) / 5, rel=1e-3, abs=1e-4)
    assert found["accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / 5)


def test_the_reference_is_without_dropout_and_knows_no_padding(opened):
    model, objective, data = opened(64, dropout=0.5)
    model.eval()
    lengths = set()
    for number in range(8):  # padded to other lengths than in the reference
        batch = data.train.batch(number, 1)
        lengths.add(batch[0].shape[-1])
        objective(*batch)
    assert len(lengths) > 1
    assert objective.figures()["margin"] == pytest.approx(0, abs=1e-4)


# --- runs ---


def test_the_countries_prefer_brief_answers():
    train, val = countries.preferences()
    assert len(train) == 16 * 195 and len(val) == 6 * 195
    for (question, chosen), (same, rejected) in [*train, *val]:
        assert question == same and question["role"] == "user"
        assert rejected["content"].casefold() == f"the answer is {chosen['content']}".casefold()
    asked = [{chosen[0]["content"] for chosen, _ in pairs} for pairs in (train, val)]
    assert not asked[0] & asked[1]
    names = [country.name for country in countries.table()]
    for pairs in (train, val):  # shuffled: evaluation reads some of the first
        early = " ".join(chosen[0]["content"] for chosen, _ in pairs[:512])
        assert sum(name in early for name in names) > 0.8 * len(names)


# --- refusals ---


def test_pairs_are_not_evaluated_alone(staged):
    assert "holds pairs" in refused("train.py --eval_only --out_dir", staged("dpo"))
