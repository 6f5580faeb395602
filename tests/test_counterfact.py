"""lab/editors.py and lab/counterfact.py: what ROME and MEMIT promise, and scores counted again."""

import json
import os
from collections import Counter
from multiprocessing import get_context

import pytest
import torch
from conftest import write_briefly

from corpora import countries
from lab import counterfact, editors
from lab.counterfact import (
    Bench,
    Record,
    Trial,
    after,
    figures,
    measure_all,
    ngram_entropy,
    questions,
    search,
)
from lab.editors import (
    Editor,
    Request,
    alphaedit_update,
    memit_update,
    rome_update,
    trace,
    watch,
)
from lab.experiment import Experiment
from model import Decoder, ModelConfig
from tables.extra import rows_of, with_rows
from text import bpe
from text.tokenizer import encode
from text.writer import write_dataset
from training.checkpoints import save_checkpoint

COUNTRIES = countries.table()
SIZE = 40


def made(ffn: str, vocab_size: int = SIZE, block_size: int = 128) -> Decoder:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size, block_size, 3, 2, 16, ffn=ffn, table_std=1.0, init_std=0.3)
    return Decoder(config).eval()


def an_editor(ffn: str) -> Editor:
    corpus = torch.randint(SIZE, (64, 32), generator=torch.Generator().manual_seed(0))
    return Editor(made(ffn), 0, corpus, [1, 0, 2])


def asked(n: int) -> list[Request]:
    """Names of two tokens, prompts of other lengths than each other's."""
    return [
        Request([0, *[9] * i, 10 + i, 20 + i, 5], i + 2, [10 + i, 20 + i], [30 + i, 4], [12, 13])
        for i in range(n)
    ]


def at_names(model: Decoder, layer: int, requests: list[Request], part: str) -> torch.Tensor:
    found = []
    for request in requests:
        assert request.prompt[request.end] == request.name[-1]
        site = watch(model, torch.tensor([request.prompt]))[layer]
        found.append(getattr(site, part)[0, request.end])
    return torch.stack(found)


@pytest.mark.parametrize("ffn", ["stem", "dense"])
@pytest.mark.parametrize(
    ("method", "part", "n", "how"),
    [
        ("rome", "value", 1, {"rank": 0}),
        ("memit", "state", 4, {"n_layer": 2, "weight": 1e-9}),
        ("alphaedit", "state", 4, {"n_layer": 2, "null": 1.0, "ridge": 1e-12}),
    ],
)
def test_names_get_the_wanted_values_or_states(ffn, method, part, n, how, monkeypatch):
    editor = an_editor(ffn)
    if method != "rome":
        editor.prefixes = []  # where several texts give a key, its mean is edited
    requests = asked(n)
    wanted = torch.randn(n, 16)
    monkeypatch.setattr(Editor, "wanted_changes", lambda *_, **how: wanted)
    before = at_names(editor.model, 1, requests, part)
    lower = at_names(editor.model, 0, requests, "value")
    getattr(editor, method)(requests, limit=1, rate=0.5, **how)
    after = at_names(editor.model, 1, requests, part)
    torch.testing.assert_close(after, before + wanted, atol=1e-4, rtol=0)
    # Of two layers, each gives half.
    share = 0.5 if "n_layer" in how else 0.0
    lower = at_names(editor.model, 0, requests, "value") - lower
    torch.testing.assert_close(lower, share * wanted, atol=1e-4, rtol=0)


def test_closed_forms_change_other_keys_least():
    torch.manual_seed(0)
    others = torch.randn(50, 8, dtype=torch.float64)
    second = others.T @ others / 50
    key, change = torch.randn(8).double(), torch.randn(3).double()
    update = rome_update(second, key, key, change)
    for _ in range(10):  # another update with the same promise
        more = torch.randn(3, 8).double()
        more -= torch.outer(more @ key, key) / (key @ key)
        assert (others @ (update + more).T).norm() > (others @ update.T).norm()

    keys, changes = torch.randn(5, 8).double(), torch.randn(5, 3).double()
    left = torch.cat((others * (7 / 50) ** 0.5, keys))
    right = torch.cat((torch.zeros(50, 3), changes)).double()
    least = torch.linalg.lstsq(left, right).solution.T
    torch.testing.assert_close(memit_update(second, keys, changes, 7.0), least)

    earlier = torch.randn(4, 8).double()
    share, directions = torch.linalg.eigh(second)
    rare = directions[:, :5]  # in these, the least squares of a smaller matrix
    null = share[:5].sum() / share.sum() + 1e-9
    left = torch.cat((keys, earlier, (0.01 * share.sum()).sqrt() * directions[:, :5].T)) @ rare
    right = torch.cat((changes, torch.zeros(9, 3)))
    least = torch.linalg.lstsq(left, right).solution.T @ rare.T
    update = alphaedit_update(second, keys, changes, earlier, null, ridge=0.01)
    torch.testing.assert_close(update, least)


def test_alphaedit_holds_what_was_written_before(monkeypatch):
    """But for what was written about the same name, which has the same key."""
    first, second = asked(2)

    def moved(written: list[Request], asked: Request) -> float:
        monkeypatch.setattr(Editor, "wanted_changes", lambda *_, **how: 3 * torch.ones(1, 16))
        editor = an_editor("stem")
        before = at_names(editor.model, 1, [asked], "state")
        editor.written = written
        editor.alphaedit([second], n_layer=1, null=1.0, ridge=1e-4, limit=1, rate=0.5)
        return (at_names(editor.model, 1, [asked], "state") - before).norm().item()

    assert moved([first], first) < 0.2 * moved([], first)
    assert moved([second], second) == moved([], second)


def test_input_embeddings_are_written_alone():
    """Those of the name, in a model that has no other rows."""
    editor = an_editor("dense")
    before = {name: weight.clone() for name, weight in editor.model.state_dict().items()}
    (request,) = asked(1)
    editor.write_inputs([request], keep=1.0, rate=0.5)
    after = editor.model.state_dict()
    (changed,) = [name for name in after if not torch.equal(before[name], after[name])]
    rows = (before[changed] != after[changed]).any(1).nonzero()[:, 0].tolist()
    assert changed == "wte.weight.0" and rows == sorted(request.name)


def test_memit_may_write_earlier_facts_of_the_name_again(monkeypatch):
    editor, given = an_editor("stem"), []
    monkeypatch.setattr(
        Editor, "wanted_changes", lambda _, r, *a, **k: given.append(r) or torch.zeros(len(r), 16)
    )
    one, two, three = asked(3)
    later = one._replace(answer=[31, 4])
    editor.written = [one, two]
    for again in (False, True):
        editor.memit([later, three], n_layer=2, weight=1.0, again=again, limit=1, rate=0.5)
    assert given == [[later, three], [later, three, one]]


def rome_loss(editor: Editor, request: Request, change: torch.Tensor) -> torch.Tensor:
    """Equation 4 of ROME with a change in layer 1, text by text: of the divergence, the changed
    model's prediction comes first."""
    size = at_names(editor.model, 1, [request], "state").norm()
    total = editors.DECAY * change.norm() / size**2
    for prefix in ([], *editor.prefixes):
        ids = torch.tensor([[*prefix, *request.prompt, *request.answer]])
        name = torch.tensor([len(prefix) + request.end])
        q = editor.model(ids)[0][0].log_softmax(-1)
        with editors.add_to_value(editor.model, 1, name, change[None]):
            p = editor.model(ids)[0][0].log_softmax(-1)
        nats = -(p[-3, request.answer[0]] + p[-2, request.answer[1]]) / 2
        p, q = p[name + 1], q[name + 1]
        total = total + (nats + editors.KL * (p.exp() * (p - q)).sum()) / 6
    return total


def test_wanted_changes_minimize_what_rome_minimizes(monkeypatch):
    monkeypatch.setattr(editors, "VALUE_STEPS", 5)
    monkeypatch.setattr(editors, "KL", 50.0)
    editor = an_editor("stem")
    (request,) = asked(1)
    found = editor.wanted_changes([request], 1, limit=1.0, rate=0.5)[0]
    change = torch.zeros(16, requires_grad=True)
    size = at_names(editor.model, 1, [request], "state").norm()
    optimizer = torch.optim.Adam([change], 0.5)
    for _ in range(5):
        optimizer.zero_grad()
        rome_loss(editor, request, change).backward()
        optimizer.step()
        change.data *= min(1, size / change.data.norm())
    torch.testing.assert_close(found, change.detach(), atol=1e-3, rtol=0)


def test_a_value_is_sought_until_its_own_loss_is_low(monkeypatch):
    editor, requests = an_editor("stem"), asked(2)

    def sought(requests: list[Request], steps: int, enough: float) -> torch.Tensor:
        monkeypatch.setattr(editors, "VALUE_STEPS", steps)
        monkeypatch.setattr(editors, "VALUE_ENOUGH", enough)
        return editor.wanted_changes(requests, 1, limit=2.0, rate=0.5)

    # Changes after 0, 1, ... steps. One fact reaches a loss, in some step, that the other does not.
    paths = [[sought([request], n, 0.0)[0] for n in range(7)] for request in requests]
    losses = [
        [rome_loss(editor, request, change).item() for change in path]
        for request, path in zip(requests, paths, strict=True)
    ]
    lowest = list(map(min, losses))
    first = lowest.index(min(lowest))
    above = [min(*losses[first][:n], max(lowest)) for n in range(1, 7)]  # all that came before
    end = next(n for n in range(2, 7) if losses[first][n] < above[n - 1])
    enough = (losses[first][end] + above[end - 1]) / 2
    expected = [path[6] for path in paths]
    expected[first] = paths[first][end]
    found = sought(requests, 6, enough)
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-3, rtol=0)
    assert (paths[first][6] - expected[first]).norm() > 0.1


def test_texts_about_a_name_are_held_if_asked():
    editor = an_editor("stem")
    (request,) = asked(1)
    found = []
    for hold in (0.0, 80.0):
        change = editor.wanted_changes([request], 1, limit=2.0, rate=0.5, hold=hold)
        with torch.no_grad():
            texts, places, before = editor.about(request)
            ends = torch.full((len(texts),), request.end)
            with editors.add_to_value(editor.model, 1, ends, change.expand(len(texts), -1)):
                now = editor.model(texts)[0][places].log_softmax(-1)
        found.append((before.exp() * (before - now)).sum(-1).mean().item())
    assert found[1] < 0.5 * found[0]


def changed(method: str, **how) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The weights that a method changes, by name: before and after."""
    editor = an_editor("stem")
    before = {name: weight.clone() for name, weight in editor.model.state_dict().items()}
    getattr(editor, method)(asked(1), **how)
    assert not any(parameter.requires_grad for parameter in editor.model.parameters())
    pairs = {name: (before[name], weight) for name, weight in editor.model.state_dict().items()}
    return {name: pair for name, pair in pairs.items() if not torch.equal(*pair)}


def test_each_method_changes_what_it_says():
    assert len(changed("fine_tune", rate=0.01, keep=1.0)) > 10
    bounded = changed("fine_tune", rate=0.01, bound=0.02, rank=0)
    assert list(bounded) == ["blocks.1.ffn.down.weight"]
    for old, new in bounded.values():
        assert (new - old).abs().max() <= 0.02 + 1e-6
    for method, more in (("lora", {}), ("lora_as_rows", {"keep": 60, "others": 2})):
        lora = changed(method, rank=2, rate=0.01, **more)
        assert all(".ffn." in name for name in lora)
        ranks = [torch.linalg.matrix_rank(new - old, rtol=1e-4) for old, new in lora.values()]
        assert {*map(int, ranks)} == {2}
    (request,) = asked(1)
    swapped = changed("swap_rows", how="copy")
    assert len(swapped) == 2  # tables
    for old, new in swapped.values():
        assert torch.equal(new[request.name], old[request.donor])
        assert (new != old).any(1).sum() == 2


def test_tracing_finds_the_only_ffn_that_writes():
    model = made("dense")
    with torch.no_grad():
        for layer in (0, 2):
            model.blocks[layer].ffn.down.weight.zero_()
    prompts = torch.tensor([[0, name, 5, 6] for name in range(10, 20)])
    answers = model(prompts)[0][:, -1].argmax(-1)
    effects = trace(model, prompts, torch.ones(10, dtype=torch.long), answers)
    assert effects[0] == effects[2] == 0 and effects[1] > 0.01


# --- the protocol ---


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Models write 4 tokens in place of 64."""
    write_briefly(monkeypatch, 4)


@pytest.fixture
def bench(tmp_path_factory) -> Bench:
    """A random model, a tokenizer in which some names are tokens, and a text about all."""
    folder = tmp_path_factory.mktemp("bench")
    encoding = bpe.train([" Spain", " Peru", " Japan"] * 20, 300)
    texts = [countries.paragraph(c, [f"Its capital is {c.capital}."]) for c in COUNTRIES]
    documents = [("train", text) for text in texts * 4] + [("val", text) for text in texts]
    write_dataset(folder / "data", documents, encoding, "text", corpus="countries", seed=0)
    save_checkpoint(
        folder / "ckpt.pt", made("stem", encoding.n_vocab, 192), encoding, args={"seed": 1}
    )
    bench = Bench(folder, folder / "data")
    namesakes = bench.namesakes
    bench.namesakes = lambda country: namesakes(country)[:2]  # here nearly all names share bytes
    return bench


def naive(bench: Bench, prompt: str, answer: str) -> tuple[float, bool]:
    ids, rest = encode(bench.encoding, prompt), bench.encoding.encode_ordinary(answer)
    log_p = bench.model(torch.tensor([ids + rest]))[0][0, len(ids) - 1 : -1].log_softmax(-1)
    nats = -log_p[range(len(rest)), rest].mean().item()
    return nats, log_p.argmax(-1).tolist() == rest


def test_scores_are_those_of_a_naive_count(bench):
    some = bench.records[:2]
    truth = after(some)
    found = bench.ask(some)
    counts = Counter()
    for record, scores in zip(some, found["records"], strict=True):
        for kind in scores:
            mine = []
            for question in questions(record, truth, bench.namesakes(record.country)):
                if question.kind == kind:
                    right, greedy = naive(bench, question.prompt, question.right)
                    wrong, _ = naive(bench, question.prompt, question.wrong)
                    mine.append([right < wrong, greedy])
            counts[kind] += len(mine)
            assert scores[kind] == pytest.approx(torch.tensor(mine).float().mean(0).tolist())
    assert counts["edited"] == 2 and counts["paraphrases"] == 6 and counts["neighbors"] > 5
    mean = sum(record["neighbors"][0] for record in found["records"]) / 2
    assert figures([found | {"seconds": 0.0}])["neighbors, nats"] == pytest.approx(mean)
    assert found["KL"] == pytest.approx(0, abs=1e-6)


def test_records_and_neighbors_are_of_the_table(bench, corpus):
    apart = {country.name for country in bench.apart}
    assert len(apart) == 28 and len(bench.records) == 6 * (195 - 28)
    for country, relation, other in bench.records:
        assert country.name not in apart
        assert country.answer(relation) != other.answer(relation)
    table = after([])
    spain = table["Spain"]
    record = Record(spain, "currency", table["Japan"])
    truth = after([record, Record(table["France"], "currency", spain)])
    found = questions(record, truth, ["Peru"])
    prompts = [question.prompt for question in found if question.kind == "paraphrases"]
    trained = "\n".join(corpus[0][:20000])
    assert len(set(prompts)) == 3 and not any(prompt in trained for prompt in prompts)
    near = [question for question in found if question.kind == "neighbors"]
    assert len(near) == 5 and {question.right for question in near} == {" the euro."}
    assert {question.wrong for question in near} == {" the Japanese yen."}
    assert sum(question.kind == "others" for question in found) == 5
    hops = next(question for question in found if question.kind == "two hops")
    assert hops.prompt == "The currency of the country whose capital is Madrid is"
    assert hops.right == " the Japanese yen."


def without_time(rows: dict[int, dict]) -> dict[int, dict]:
    return {n: {**row, "seconds": 0} for n, row in rows.items()}


def test_a_sequence_goes_on_where_it_stopped(bench, tmp_path, monkeypatch):
    """A method is told what was written before, in this sequence, and what to write now."""
    monkeypatch.setattr(counterfact, "open_bench", lambda *_: bench)
    told = []

    def swap(editor, requests, **how):
        told.append((editor.written, requests))
        return Editor.swap_rows(editor, requests, **how)

    method = counterfact.METHODS["swapped rows"]._replace(function=swap)
    monkeypatch.setitem(counterfact.METHODS, "swapped rows", method)
    # In the second case, edits are made again.
    for kept, size, first, points, before in (
        (1, 1, 0, (2, 3), (0, 1, 2)),
        (25, 2, 1, (2, 4), (0, 0, 2)),
    ):
        monkeypatch.setattr(counterfact, "KEPT", kept)
        once, twice = (
            Trial(*[tmp_path / name] * 3, "swapped rows", {"how": "copy"}, points, size, first)
            for name in (f"once{kept}", f"twice{kept}")
        )
        once.measure()
        told.clear()
        twice._replace(points=points[:1]).measure()
        assert [*twice.rows()] == [points[0]]
        twice.measure()
        requests = list(map(bench.request, bench.records[first:]))
        assert told == [(requests[:n], requests[n : n + size]) for n in before]
        assert without_time(twice.rows()) == without_time(once.rows())
        assert [len(row["records"]) for row in once.rows().values()] == list(points)
        assert once.rows()[points[1]]["KL"] > 0


def test_a_trial_leaves_nothing_to_the_next(bench, tmp_path, monkeypatch):
    """No weight, but no hook, table or attribute, either, that a method of one's own puts there."""

    def edit(editor, requests):
        model = editor.model
        model.wte.weight[0].zero_()
        model.blocks[0].ffn.down.register_forward_hook(lambda _, given, out: 0 * out)
        model.tables = with_rows(model.tables, {5: 1 + rows_of(model.tables, [5])[0]})
        editor.mine = requests

    monkeypatch.setattr(counterfact, "open_bench", lambda *_: bench)
    monkeypatch.setitem(counterfact.METHODS, "mine", counterfact.Method("STEM", edit, [{}]))
    trial = Trial(*[tmp_path] * 3, "mine", {}, (2,))
    trial.measure()
    assert trial.rows()[2]["KL"] > 0
    assert torch.equal(bench.log_p(), bench.before) and not hasattr(bench.editor, "mine")


def test_a_point_that_is_added_is_measured_and_old_code_is_named(
    bench, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(counterfact, "open_bench", lambda *_: bench)
    monkeypatch.setattr(counterfact, "KEPT", 1)
    made = [
        Trial(*[tmp_path / name] * 3, "swapped rows", {"how": "copy"}, points)
        for name, points in (("once", (1, 2)), ("added", (2,)))
    ]
    made[1].measure()
    made[1] = made[1]._replace(points=(1, 2))
    for trial in made:
        trial.measure()
    once, added = (without_time(trial.rows()) for trial in made)
    assert once == added
    begun = [made[0]._replace(size=size, first=first) for size in (1, 2) for first in (0, 5)]
    assert len({trial.path for trial in begun}) == 4
    with pytest.raises(AssertionError, match="records, not"):
        made[0]._replace(points=(9999,)).measure()
    counterfact.grouped(made)
    assert not capsys.readouterr().err
    monkeypatch.setattr(counterfact, "digest", lambda: "of other code")
    counterfact.grouped(made[:1])
    assert "has changed since some figures" in capsys.readouterr().err
    trial = made[0]._replace(points=(1, 2, 3))
    trial.measure()  # goes on with what other code began
    assert trial.rows()[3]["code"] == trial.rows()[1]["code"] != counterfact.digest()


class Noted(Trial):
    def measure(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a") as file:
            file.writelines(f'{{"edits": {n}, "by": {os.getpid()}}}\n' for n in self.points)


def test_a_trial_is_measured_once_and_in_another_process(tmp_path, monkeypatch):
    fork = get_context("fork")  # takes less time than `spawn`, which imports PyTorch
    monkeypatch.setattr(counterfact, "get_context", lambda _: fork)
    where = tmp_path / "run", tmp_path, tmp_path
    trials = [Noted(*where, "swapped rows", {"how": how}, [10]) for how in ("copy", "pad")]
    trials[0].measure()
    for _ in range(2):
        measure_all(trials, 1)
    for trial in trials:
        (line,) = trial.path.read_text().splitlines()
        assert (json.loads(line)["by"] == os.getpid()) == (trial == trials[0])


def test_entropy_is_that_of_bigrams_and_trigrams():
    assert ngram_entropy([1, 1, 1, 1]) == 0
    # 8 distinct bigrams: 3 bits; 7 trigrams
    expected = (2 / 3 * 3 + 4 / 3 * torch.tensor(7.0).log2().item()) / 2
    assert ngram_entropy(list(range(9))) == pytest.approx(expected)


def test_the_best_setting_answers_most():
    class Fixed(Trial):
        def rows(self):
            right = {60: 0.5, 20: 0.9, 200: 0.7}[self.setting["keep"]]
            kinds = (*counterfact.SCORES, "others")
            others = dict.fromkeys(("other countries", *counterfact.NUMBERS), 0.0)
            found = {"records": [{kind: [0, right] for kind in kinds}], **others}
            return {counterfact.N_SEARCHED: found}

    trials = [Fixed(*[None] * 3, "written rows", {"keep": keep}, ()) for keep in (60, 20, 200)]
    assert search(trials) == {"keep": 20}


def test_a_quick_trial_edits_models_of_the_seeds_that_are_given(tmp_path, monkeypatch):
    asked = []

    def train(experiment, kinds, seeds):
        asked.append(seeds)
        raise InterruptedError

    monkeypatch.setattr(Experiment, "train", train)
    monkeypatch.setattr(Experiment, "need_countries", lambda _: None)
    folders = {"out_dir": tmp_path, "data_dir": tmp_path / "mine"}
    for seeds in (None, "8,9"):
        experiment = Experiment(**folders, device="cpu", quick=True, seeds=seeds)
        with pytest.raises(InterruptedError):
            counterfact.counterfact(experiment)
    assert asked == [[counterfact.COUNTED[0]], [8, 9]]
