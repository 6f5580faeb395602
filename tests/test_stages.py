"""The stages after pretraining, on text and conversations of the made-up story."""

import re
from dataclasses import asdict, fields, replace

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    CPU,
    assert_same_run,
    checkpoint,
    command,
    interrupted,
    losses,
    refused,
    resume,
    small_run,
    user_error,
)
from naive import decoder

from model import Decoder, ModelConfig
from training.batches import Data
from training.checkpoints import load_model, read_checkpoint
from training.objectives import NextToken, validate
from training.records import read_run
from training.report import describe, show
from training.settings import STAGES, Settings, new_settings


def test_conversations_too_short_as_text_name_their_stage(chat):
    with user_error(r"\.bin has only .* --stage sft reads"):
        Data(str(chat), "text", 10**6, 1, total=1)


def test_an_answer_that_is_shown_ends_where_the_message_does(stem_ckpt, chat, monkeypatch, capsys):
    model, encoding, _ = load_model(stem_ckpt, CPU)
    said = encoding.encode("Anna.<|im_end|> no", allowed_special="all")
    monkeypatch.setattr(
        model, "generate", lambda ids, *_, **__: torch.cat([ids, torch.tensor([said])], dim=1)
    )
    show(model, Data(str(chat), "chat", 64, 1, total=1), seed=0)
    assert capsys.readouterr().out.endswith("Anna.\n")


def test_the_whole_chain(stage, trained, chat, tmp_path, capsys):
    settings = stage("sft", block_size=64, max_iters=60, learning_rate=3e-3, eval_tokens=1024)
    out = small_run(**settings, out=tmp_path / "out")
    (start,) = read_run(out)["run"]
    passes = 60 * start["args"]["batch_size"] / start["data"][0]["train"]["documents"]
    assert f"{passes:.1f} passes" in capsys.readouterr().out
    first, *_, last = (record["val_loss"] for record in read_run(out)["eval"])
    assert last < 0.5 * first
    said = command("train.py --eval_only --out_dir", out).stdout
    assert f" on {chat}: val loss {last:.5g}," in said
    # ... and the model of the last stage talks.
    line = "sample.py --chat --temperature 0 --max_new_tokens 12 --ckpt"
    talk = command(line, out / "ckpt.pt", stdin="Who sees Anna?\n\nWho sees Björn?\n")
    assert re.fullmatch(r".+\n.+\n", talk.stdout, re.DOTALL)
    assert talk.stderr == "(forgotten turns: 1)\n"  # the context has no room for two
    before, after = checkpoint(trained["stem"]), checkpoint(out)
    shape = {field.name: before["args"][field.name] for field in fields(ModelConfig)}
    assert {**after["args"], **shape, "block_size": 64} == after["args"]
    assert after["tokenizer"] == before["tokenizer"]


@pytest.mark.parametrize(("stage", "rate"), [("sft", 2e-3), ("dpo", 1e-4)])
def test_few_conversations_or_pairs_are_said_to_want_a_larger_rate(
    chat, pairs, capsys, stage, rate
):
    reads, folder, what = "chat", chat, "few conversations"
    if stage == "dpo":
        reads, folder, what = "preference", pairs, "few pairs"
    data = Data(str(folder), reads, 64, 1, total=1)
    for n_pass, given in ((2, rate / 20), (5, rate / 20), (5, rate / 3)):
        sizes = dict(batch_size=int(data.n_sequence), max_iters=n_pass)
        settings = Settings(stage=stage, learning_rate=given, **sizes)
        describe(settings, data, NextToken(Decoder(settings.model), "float32"))
        said = capsys.readouterr().out
        assert (what in said) == (n_pass == 5 and given < rate / 4)
        assert f"steps of {settings.batch_size} {what.removeprefix('few ')} on" in said


@pytest.mark.parametrize(
    ("name", "place"), [("midtrain", "none"), ("context", "none"), ("sft", "none"), ("dpo", "disk")]
)
def test_every_stage_resumes_to_the_bit_wherever_tables_are(stage, staged, tmp_path, name, place):
    cut = interrupted(**stage(name, offload=place), out=tmp_path, number=9)
    assert checkpoint(cut)["step"] == 6
    resume(cut)
    resume(cut)  # at the last step
    whole = staged(name)
    assert_same_run(cut, whole)
    assert read_run(cut)["eval"][-1] == read_run(whole)["eval"][-1]


def test_midtrain_decays_linearly_and_reports_the_parts_of_a_mixture(staged, data, chat):
    out = staged("midtrain")
    records = read_run(out)
    rates = [record["lr"] for record in records["step"]]
    peak = 0.1 * 6e-3  # of the preset's
    assert rates == pytest.approx([peak * (1 - n / 12) for n in range(12)])
    last = records["eval"][-1]
    parts = [last[f"val_loss/{folder}"] for folder in (data, chat)]
    assert last["val_loss"] == pytest.approx(0.75 * parts[0] + 0.25 * parts[1])
    assert parts[1] > parts[0]  # the model has never seen a conversation
    other = f"{data}=0.25,{chat}=0.75"
    assert other in refused(f"train.py --resume --out_dir {out} --data_dir {other}")


def test_context_grows_the_context_and_slows_the_rotations(staged, trained):
    old, new = checkpoint(trained["stem"])["args"], checkpoint(staged("context"))["args"]
    assert new["block_size"] == 48 and new["doc_mask"] is True
    # The slowest pair of channels turns at the end of the context as far as it did before.
    pairs = old["n_embd"] // old["n_head"] // 2
    turns = [c["block_size"] * c["rope_base"] ** (-(pairs - 1) / pairs) for c in (old, new)]
    assert turns[1] == pytest.approx(turns[0])


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_micro_batches_weigh_tokens_equally_and_keep_pairs_together(stage, staged, tmp_path, name):
    parts = losses(small_run(**stage(name, device_batch_size=1), out=tmp_path))
    assert parts == pytest.approx(losses(staged(name)), rel=1e-3)


@pytest.mark.parametrize("size", [1, 3, 64])
def test_validation_means_over_tokens_and_its_batches_are_full(chat, size):
    """Another size would be compiled anew, with sizes that are symbols."""
    data = Data(str(chat), "chat", 64, 1, 100)
    (rows,) = data.val.values()
    model = decoder(vocab_size=data.encoding.n_vocab, block_size=64)
    chosen = [n * rows.n_sequence // 7 for n in range(7)]  # spread evenly
    ids, targets = rows.sequences(chosen)  # of unequal lengths
    expected = F.cross_entropy(model(ids)[0].flatten(0, 1), targets.flatten(), ignore_index=-1)
    said = targets[targets >= 0].tolist()
    n_byte = len(data.encoding.decode(said).replace("<|im_end|>", "").encode())
    sizes = []
    model.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    n_token = 1 + 7 * len(rows.ids) // rows.n_sequence  # in seven of them
    found = validate(NextToken(model, "float32"), data, n_token, size)
    per_byte = expected * len(said) / n_byte
    wanted = {"val_loss": expected.item(), "val_loss_per_byte": per_byte.item()}
    assert found == pytest.approx(wanted, rel=1e-5)
    assert sizes == [size] * -(-7 // size)


def test_steps_and_rates_follow_from_the_stage_and_the_size_of_the_data(trained, monkeypatch):
    def made(kind: str, *sizes: int, **given) -> Settings:
        metas = [{"corpus": "files", "train": {kind: n}} for n in sizes]
        base = read_checkpoint(trained["stem"] / "ckpt.pt") if "stage" in given else None
        return new_settings(given, metas, base)

    def steps(*args, **given) -> int:
        return made(*args, **given).max_iters

    passes = [steps("tokens", n) * 8 * 256 / n for n in (10**6, 3 * 10**6)]
    assert passes == pytest.approx([1.7, 1.7], rel=0.01)
    assert steps("tokens", 10**6, batch_size=4) == 2 * steps("tokens", 10**6)
    assert steps("tokens", 10**6, max_iters=3) == 3
    assert (steps("tokens", 10), steps("tokens", 10**9)) == (1, 5000)
    for n in (20_000, 60_000, 200_000):  # small texts: as many passes, in smaller batches
        small = made("tokens", n)
        read = small.max_iters * small.batch_size * 256
        assert read / n == pytest.approx(1.7, rel=0.01)
        assert small.max_iters >= 130 and small.device_batch_size == small.batch_size
        assert steps("tokens", n, batch_size=8) == round(1.7 * n / 2048)
    sft = dict(stage="sft", init_from="x", batch_size=8)
    assert steps("documents", 4000, **sft) == 1000  # twice
    assert steps("documents", 10, **sft) == 60
    dpo = made("documents", 4000, **{**sft, "stage": "dpo"})
    assert dpo.max_iters == 500  # once
    assert dpo.learning_rate == pytest.approx(6e-3 * 4e-8 / 5e-4)  # as MiniMind's to its own
    chosen = dict(learning_rate=0.5, max_iters=7, batch_size=2, eval_interval=3, warmup=0.5)
    monkeypatch.setitem(STAGES, "mine", replace(STAGES["sft"], settings=chosen))
    mine = asdict(made("documents", 4000, stage="mine", init_from="x"))
    assert {name: mine[name] for name in chosen} == chosen
    for batch_size, part in ((32, 16), (40, 10), (17, 1)):  # not above the preset's 16
        large = made("tokens", 10**6, preset="minimind-104m", batch_size=batch_size)
        assert large.device_batch_size == part
    midtrain = dict(stage="midtrain", init_from="x")  # in windows of the model's length
    assert steps("tokens", 10**5, **midtrain) * 8 * 32 / 10**5 == pytest.approx(1.7, rel=0.01)
    # Of a mixture, passes over the folder that is read most.
    for mixture, n in (("a=1,b=2", 3 * 10**6), ("a=1,b=1", 2 * 10**6), ("a=1,b=9", 2.2e6)):
        mixed = steps("tokens", 10**6, 2 * 10**6, data_dir=mixture)
        assert mixed == pytest.approx(1.7 * n / (8 * 256), rel=0.02)
