"""The stages after pretraining, on conversations and preferences about the made-up story."""

import copy
import json
import math
import random
import re
import shutil

import pytest
import torch
from conftest import SMALL, command
from test_train import arguments, assert_same, checkpoint, crash_in_step, losses

import train as train_module
from common import UserError
from model import Decoder, ModelConfig
from training.batches import Data
from training.objectives import NextToken, Preference, validate
from training.records import read_run
from training.settings import resolve_settings

RUN = [*SMALL[SMALL.index("--block_size") :]]  # the shape comes from --init_from


@pytest.fixture(scope="module")
def folders(data, trained, tmp_path_factory):
    """Prepared folders: text, chat, preference."""
    folder, rng = tmp_path_factory.mktemp("stages"), random.Random(0)
    names = ("Anna", "Björn", "Chloë")
    lines = {"chat": [], "preference": []}
    for number in range(60):
        who = f"{rng.choice(names)} {number}"
        ask = {"role": "user", "content": f"Who sees {who}?"}
        yes, no = ({"role": "assistant", "content": c} for c in (f"{who}.", f"No {who} " * 2))
        more = [ask, yes] if rng.random() < 0.3 else []
        lines["chat"].append({"conversations": [*more, ask, yes]})
        lines["preference"].append({"chosen": [ask, yes], "rejected": [ask, no]})
    for kind, documents in lines.items():
        path = folder / f"{kind}.jsonl"
        path.write_text("".join(json.dumps(d, ensure_ascii=False) + "\n" for d in documents))
        flags = ("--val_fraction", 0.2, "--tokenizer", trained["stem"] / "ckpt.pt")
        command("prepare.py", "--input", path, "--out_dir", folder / kind, *flags, cwd=folder)
    return {"text": data, "chat": folder / "chat", "preference": folder / "preference"}


@pytest.fixture
def stage(folders, trained, tmp_path, monkeypatch):
    """Run a stage from the STEM model, in this process; the folder it wrote."""

    def run_stage(name, out="out", data=None, init=None, more=()):
        kinds = {"sft": "chat", "dpo": "preference"}
        folder = data or folders[kinds.get(name, "text")]
        init = init or trained["stem"] / "ckpt.pt"
        flags = (*RUN, "--stage", name, "--init_from", init, *more)
        monkeypatch.setattr("test_train.SMALL", flags)
        train_module.train(arguments(monkeypatch, folder, tmp_path / out))
        return tmp_path / out

    return run_stage


def test_the_whole_chain(stage, folders, trained, tmp_path, capsys):
    longer = ("--block_size", 64, "--max_iters", 60)
    sft = stage("sft", "sft", more=(*longer, "--learning_rate", "3e-3"))
    evals = [record["val_loss"] for record in read_run(sft)["eval"]]
    assert evals[-1] < 0.5 * evals[0]
    train_module.train(resolve_settings(eval_only=True, out_dir=sft))
    assert f" on {folders['chat']}: val loss {evals[-1]:.5g}," in capsys.readouterr().out
    dpo = stage("dpo", "dpo", None, sft / "ckpt.pt", (*longer, "--learning_rate", "1e-3"))
    first, *_, last = read_run(dpo)["eval"]
    assert first["val_margin"] == pytest.approx(0, abs=1e-4)  # it is the reference itself
    assert first["val_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert last["val_margin"] > 0.2 and last["val_accuracy"] == 1.0
    table = command("analyze.py", "runs", sft, dpo, "--plot", "both.png", cwd=tmp_path).stdout
    assert f"| {last['val_loss']:.3f} |  |" in table
    # ... and the model of the last stage talks.
    talk = command("sample.py", "--ckpt", dpo / "ckpt.pt", "--chat", "--temperature", 0,
                   "--device", "cpu", "--max_new_tokens", 12, cwd=tmp_path,
                   stdin="Who sees Anna?\n\nWho sees Björn?\n")  # fmt: skip
    assert re.fullmatch(r".+\n.+\n", talk.stdout, re.DOTALL)
    assert "has not learned to talk" not in talk.stderr
    first, last = checkpoint(trained["stem"]), checkpoint(dpo)
    assert last["config"] == {**first["config"], "block_size": 64}
    assert last["tokenizer"] == first["tokenizer"]


def test_pretraining_may_go_on_from_a_model(stage, trained):
    out = stage("pretrain", more=("--max_iters", 2))  # as a refused --resume advises
    before, after = (read_run(folder)["eval"] for folder in (trained["stem"], out))
    assert after[0]["val_loss"] == before[-1]["val_loss"]
    assert after[-1]["val_loss"] < before[-1]["val_loss"]


@pytest.mark.parametrize("name", ["midtrain", "context", "sft", "dpo"])
def test_every_stage_resumes_to_the_bit(stage, folders, tmp_path, monkeypatch, name):
    more, data = (), None
    if name == "midtrain":
        data = f"{folders['text']}=0.7,{folders['chat']}=0.3"
    if name == "context":
        more = ("--block_size", 48, "--batch_size", 2)
    stage(name, "whole", data, more=more)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        crash_in_step(patch, 9)
        stage(name, "cut", data, more=more)
    assert checkpoint(tmp_path / "cut")["step"] == 6
    train_module.train(resolve_settings(resume=True, out_dir=tmp_path / "cut"))
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    train_module.train(resolve_settings(resume=True, out_dir=tmp_path / "cut"))  # at the last step
    whole, cut = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "cut")
    for part in ("model", "optimizer", "step", "config", "reference"):
        assert_same(whole[part], cut[part])


def test_resume_refuses_a_mixture_of_other_weights(stage, folders, tmp_path):
    names = (folders["text"], folders["chat"])
    stage("midtrain", data="{}=0.7,{}=0.3".format(*names))
    data = "{}=0.3,{}=0.7".format(*names)
    with pytest.raises(UserError, match="does not hold the text"):
        train_module.train(resolve_settings(resume=True, out_dir=tmp_path / "out", data_dir=data))


def test_a_run_does_not_replace_the_model_it_starts_from(stage, folders):
    first = stage("sft", "again")
    with pytest.raises(UserError, match="choose another --out_dir"):
        stage("sft", "again", init=first / "ckpt.pt")
    assert checkpoint(first)["args"]["stage"] == "sft"


def test_a_stage_may_move_the_tables(stage, trained):
    resident = stage("sft", "resident")
    on_disk = stage("sft", "disk", more=("--offload", "disk"))
    assert losses(on_disk) == losses(resident)
    in_ram = stage("sft", "ram", init=on_disk / "ckpt.pt", more=("--offload", "cpu"))
    again = stage("sft", "again", init=resident / "ckpt.pt")
    assert losses(in_ram) == losses(again)


def test_midtrain_decays_linearly_and_reports_the_parts_of_a_mixture(stage, folders):
    text, chat = folders["text"], folders["chat"]
    records = read_run(stage("midtrain", data=f"{text}=0.75,{chat}=0.25"))
    rates = [record["lr"] for record in records["step"]]
    peak = 0.1 * 6e-3  # of the preset's
    assert rates == pytest.approx([peak * (1 - n / 12) for n in range(12)])
    last = records["eval"][-1]
    parts = [last[f"val_loss/{folder}"] for folder in (text, chat)]
    assert last["val_loss"] == pytest.approx(0.75 * parts[0] + 0.25 * parts[1])
    assert parts[1] > parts[0]  # the model has never seen a conversation


def test_context_grows_the_context_and_slows_the_rotations(stage, trained):
    out = stage("context", more=("--block_size", 96, "--batch_size", 2))
    old, new = checkpoint(trained["stem"])["config"], checkpoint(out)["config"]
    assert new["block_size"] == 96 and checkpoint(out)["args"]["doc_mask"] is True
    # The slowest pair of channels turns at the end of the context as far as it did before.
    pairs = old["n_embd"] // old["n_head"] // 2
    turns = [c["block_size"] * c["rope_base"] ** (-(pairs - 1) / pairs) for c in (old, new)]
    assert turns[1] == pytest.approx(turns[0])


def test_a_step_of_conversations_weighs_tokens_equally(stage):
    whole = stage("sft", "whole")
    parts = stage("sft", "parts", more=("--device_batch_size", 1))
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-3)


def model_and_pairs(folders):
    torch.manual_seed(0)
    data = Data(str(folders["preference"]), "preference", 64, 1, 100)
    model = Decoder(ModelConfig(data.encoding.n_vocab, 64, 2, 2, 32, init_std=0.2, table_std=1.0))
    return model, data


def naive_margin(model, reference, pair, beta):
    """Rafailov et al., equation 7, token by token."""
    gain = []
    for ids, targets in zip(*pair, strict=True):
        total = 0.0
        for m, sign in ((model, 1), (reference, -1)):
            log_p = m(ids[None])[0][0].log_softmax(-1)
            total += sign * sum(log_p[t, y] for t, y in enumerate(targets) if y >= 0)
        gain.append(total)
    return beta * (gain[0] - gain[1])


def test_preference_loss_is_the_papers(folders):
    reference, data = model_and_pairs(folders)
    reference.eval()
    model = copy.deepcopy(reference)
    objective = Preference(model, torch.device("cpu"), "float32", beta=0.3)
    objective.compute_reference_logprobs(data.train, data.train.n_row, 7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.eval()
    ids, targets, known = data.train.batch(0, 5)
    loss, figures = objective(ids, targets, known)
    pairs = zip(ids, targets, strict=True)
    margins = torch.stack([naive_margin(model, reference, pair, 0.3) for pair in pairs])
    torch.testing.assert_close(figures["margin"], margins.mean(), rtol=1e-4, atol=1e-5)
    assert figures["accuracy"] == (margins > 0).float().mean()
    expected = -(1 / (1 + (-margins).exp())).log().mean()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    (a,) = torch.autograd.grad(loss, model.head.weight)
    (b,) = torch.autograd.grad(expected, model.head.weight)
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_every_pair_of_a_run_has_its_reference(folders):
    model, data = model_and_pairs(folders)
    objective = Preference(model, torch.device("cpu"), "float32", beta=0.3)
    objective.compute_reference_logprobs(data.train, 20, 7)
    for number in range(5):  # batches of 4: the first 20
        assert not data.train.batch(number, 4)[2].isnan().any()
    assert data.train.reference[:, 0].size > 20 and torch.tensor(data.train.reference).isnan().any()


@pytest.mark.parametrize(("tokens", "pairs"), [(64, 2), (1, 1), (10**6, None)])
def test_only_pairs_that_are_looked_at_get_a_reference(stage, folders, tokens, pairs):
    out = stage("dpo", more=("--max_iters", 1, "--eval_tokens", tokens))  # of rows of 32
    known = checkpoint(out)["reference"][1].isfinite().all(1)
    n_row = len(known)
    assert n_row > 2
    pairs = pairs or n_row
    assert known.tolist() == [True] * pairs + [False] * (n_row - pairs)
    assert math.isfinite(read_run(out)["eval"][-1]["val_loss"])


def test_validation_means_over_tokens_whatever_the_batch(folders):
    data = Data(str(folders["chat"]), "chat", 64, 1, 100)
    torch.manual_seed(0)
    model = Decoder(ModelConfig(data.encoding.n_vocab, 64, 2, 2, 32, init_std=0.2))
    objective = NextToken(model, torch.device("cpu"), "float32")
    n = data.val[str(folders["chat"])].n_row
    results = [validate(objective, data, n * 64, size) for size in (1, 3, n)]
    for result in results[1:]:
        assert result["val_loss"] == pytest.approx(results[0]["val_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "kind", "more", "says"),
    [
        ("sft", "text", (), "this stage reads chat data"),
        ("dpo", "chat", (), "this stage reads preference data"),
        ("pretrain", "preference", (), "holds preference data"),
        ("midtrain", "text", ("--n_embd", 64), "--n_embd is given by the model in --init_from"),
        ("midtrain", "text", ("--init_from", "gone.pt"), "no checkpoint at gone.pt"),
        ("context", "text", (), "needs a --block_size above the 32"),
        ("dpo", "preference", ("--beta", 0), "--beta 0.0 must be a positive number"),
        ("sft", "chat", ("--beta", 1), "--beta changes nothing with --stage sft"),
        ("dpo", "preference", ("--doc_mask",), "--doc_mask changes nothing with --stage dpo"),
    ],
)
def test_what_does_not_fit_together_is_refused(stage, folders, name, kind, more, says):
    with pytest.raises(UserError) as error:
        stage(name, data=folders[kind], more=more)
    assert says in str(error.value)


def test_stages_need_a_model_and_fine_tuning_one_folder(stage, folders, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--stage sft goes on with a trained model"):
        arguments(monkeypatch, folders["chat"], tmp_path, "--stage", "sft")
    shutil.copytree(folders["chat"], tmp_path / "more")
    with pytest.raises(UserError, match="name one folder, chat data is not mixed"):
        stage("sft", data=f"{folders['chat']}=1,{tmp_path / 'more'}=1")


def test_a_model_of_another_tokenizer_is_refused(stage, folders, story, tmp_path):
    new = ("--input", story, "--out_dir", tmp_path / "other", "--vocab_size", 280)
    command("prepare.py", *new, cwd=tmp_path)
    with pytest.raises(UserError, match=r"another tokenizer .* prepare\.py --tokenizer"):
        stage("midtrain", data=tmp_path / "other")
