"""Row lookups against nn.Embedding, and RMSprop on rows against the same on whole tables."""

import copy
import itertools
import pickle
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from naive import silu
from torch import nn
from torch.nn.utils import prune
from torch.testing import assert_close

from model import Decoder, ModelConfig
from tables import rmsprop, watch
from tables.rmsprop import RowRMSprop, round_stochastically
from tables.tables import ResidentTables, Tables, send
from tables.watch import Watch
from training.optimizer import Optimizer
from training.settings import Settings

V, W = 11, 6


def tables(n_table: int = 2) -> ResidentTables:
    torch.manual_seed(0)
    made = ResidentTables(n_table, V, W)
    for weight in made.weight:
        nn.init.normal_(weight)
    return made


def backward(rows, seed: int = 0) -> None:
    """A loss in which every number of every table matters, nonlinearly."""
    generator = torch.Generator().manual_seed(seed)
    loss = 0.0
    for of_table in rows:
        weight = torch.randn(of_table.shape, generator=generator)
        loss = loss + (of_table.sin() * weight).sum()
    loss.backward()


BATCH = torch.tensor([[3, 1, 3, 7], [7, 3, 0, 1]])  # 3 is there three times


def small(**more) -> Decoder:
    """A model with a table in one of two layers."""
    return Decoder(ModelConfig(V, n_layer=2, n_head=1, n_embd=8, **more))


# --- lookup and gradients ---


def test_the_host_waits_for_a_copy_of_memory_that_is_not_pinned(monkeypatch):
    """Who reads it later may find what is written there next (pytorch issue 189690)."""
    asked = []
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, **how: asked.append(how))
    send(torch.ones(2), torch.device("mps"))
    assert not asked[0].get("non_blocking")


@pytest.mark.parametrize("n_part", [1, 4])
def test_gradients_equal_the_touched_rows_of_a_dense_gradient(n_part):
    """Of micro-batches, of whose rows no more than one's are held at a time."""
    made = tables()
    embeddings = [nn.Embedding.from_pretrained(w, freeze=False) for w in tables().weight]
    for seed, part in enumerate(BATCH.view(-1, 1).chunk(n_part)):  # 3 is in several
        backward(made.lookup(part), seed)
        backward([embedding(part) for embedding in embeddings], seed)  # autograd accumulates
        assert len(made.reads) == 1
    for _ in range(2):  # to look at them changes nothing
        ids, grads = made.gradients()
        assert ids.tolist() == [0, 1, 3, 7]  # distinct and sorted
        for grad, embedding in zip(grads, embeddings, strict=True):
            dense = torch.zeros(V, W).index_copy(0, ids, grad)
            assert_close(dense, embedding.weight.grad)
    assert all(weight.grad is None for weight in made.weight)  # nothing V x W was allocated
    made.zero_grad()
    with pytest.raises(AssertionError, match="no rows"):
        made.gradients()


@pytest.mark.parametrize("n_row", [50, 5000])  # the ids are marked, or sorted
@pytest.mark.parametrize("shape", [(2, 9), (3, 4, 2)])
def test_distinct_ids_are_those_of_unique(n_row, shape):
    ids = torch.randint(n_row, shape, generator=torch.Generator().manual_seed(0)) // 2
    found = ResidentTables(1, n_row, 4).distinct(ids)
    for mine, theirs in zip(found, torch.unique(ids, return_inverse=True), strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_count_only_what_was_differentiated():
    made = tables()
    list(made.eval().lookup(BATCH))
    list(made.train().lookup(BATCH))  # a forward pass without a backward one
    with pytest.raises(AssertionError, match="no rows"):
        made.gradients()
    # Of four micro-batches the second does not use table 0, as with stochastic depth, two do not
    # come to table 1.
    for used, read, ids in (
        ([0], 1, [[1]]),
        ([1], 2, [[1, 2]]),
        ([0, 1], 2, [[2, 3]]),
        ([0], 1, [[3]]),
    ):
        rows = list(itertools.islice(made.lookup(torch.tensor(ids)), read))
        sum(rows[table].sum() for table in used).backward()
    ids, grads = made.gradients()
    assert ids.tolist() == [1, 2, 3]
    assert [grad[:, 0].tolist() for grad in grads] == [[1, 1, 2], [1, 2, 1]]
    made.zero_grad()
    assert made.reads == []


def test_a_lookup_may_be_differentiated_several_times():
    """As of a text with two losses, one of which comes from an early layer, while other texts are
    looked up, and one comes after a step."""
    made = tables()
    embeddings = [nn.Embedding.from_pretrained(w, freeze=False) for w in tables().weight]
    kinds = (made.lookup, lambda ids: [embedding(ids) for embedding in embeddings])
    late = []
    for lookup in kinds:
        backward(lookup(BATCH[:, 1:]))
        first, second = lookup(BATCH)
        first.sin().sum().backward(retain_graph=True)
        first.cos().sum().backward(retain_graph=True)
        backward(lookup(BATCH[:1]))
        (first * second).sum().backward(retain_graph=True)
        late.append((first * first * second).sum())
    for losses in ([], late):
        for loss in losses:
            loss.backward()
        ids, grads = made.gradients()
        for grad, embedding in zip(grads, embeddings, strict=True):
            assert_close(torch.zeros(V, W).index_copy(0, ids, grad), embedding.weight.grad)
            embedding.zero_grad()
        made.zero_grad()


def test_gradients_of_equal_tokens_are_summed_in_float32():
    """Of 2,048 equal tokens, where tables and layers have 16 bits."""
    made = ResidentTables(2, V, W, torch.bfloat16)
    grad = torch.randn(1, 2048, W).bfloat16()
    for row in made.lookup(torch.full((1, 2048), 7)):
        row.bfloat16().backward(grad)
    _, grads = made.gradients()
    for summed in grads:
        assert_close(summed[0], grad.float().sum((0, 1)), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("clears", ["optimizer", "model"])
@pytest.mark.parametrize(
    ("name", "options"), [("SGD", {}), ("AdamW", dict(foreach=True)), ("AdamW", dict(fused=True))]
)
def test_a_training_loop_that_forgets_the_tables_fails_in_its_second_step(name, options, clears):
    """Micro-batches and a gradient that is thrown away pass. An optimizer of rows is of no use, if
    its gradients are thrown away."""
    model = small()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
    embedding, rows = RowRMSprop(model.wte), RowRMSprop(model.tables)

    def step(*trained, n_part=1):
        for _ in range(n_part):
            model(BATCH, BATCH)[1].backward()
        optimizer.step()
        for each in trained:
            each.step(lr=0.1)
        {"optimizer": optimizer, "model": model}[clears].zero_grad()

    step(embedding, rows, n_part=20)
    step(rows, embedding)
    model(BATCH, BATCH)[1].backward()
    model.zero_grad()
    assert all(weight.grad is None for weight in model.parameters())
    if clears == "optimizer":  # as if none of rows were made
        model.tables.watch = Watch()
    with pytest.raises(AssertionError, match="RowRMSprop"):
        for _ in range(2):
            step(embedding)


def test_a_step_that_a_scaler_skips_may_be_forgotten():
    """GradScaler calls a fused optimizer for it, too."""
    made, other = tables(), torch.nn.Linear(W, 1)
    RowRMSprop(made)
    optimizer = torch.optim.AdamW(other.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu")
    (loss,) = (other(rows).sum() for rows in list(made.lookup(BATCH))[:1])
    scaler.scale(loss * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 2**16
    made.zero_grad()


def test_rows_that_have_an_optimizer_may_wait_while_others_step():
    """A critic between micro-batches, also after a phase in which they were frozen."""
    made = tables()
    rows = RowRMSprop(made)
    made.requires_grad_(False).requires_grad_(True)
    critic = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    for _ in range(3):
        for _ in range(2):
            backward(made.lookup(BATCH))
            critic.step()
        ids, _ = made.gradients()
        assert ids.tolist() == [0, 1, 3, 7]
        rows.step(lr=0.1)


@pytest.mark.parametrize("targets", [BATCH, None])  # or a loss of one's own
@pytest.mark.parametrize("ffn", ["stem", "dense"])
@pytest.mark.parametrize(
    "how", ["train", "Optimizer", "gradients", "frozen", "adamw", "no_grad", "backbone", ""]
)
def test_a_training_loop_in_eval_mode_is_warned(ffn, how, targets):
    """But not where rows are trained, or are to stay."""
    model = small(ffn=ffn)
    model.train(how == "train")
    parts = [part for part in (model.tables, model.wte) if len(part.weight)]
    if how == "Optimizer":
        Optimizer(model, Settings(model=model.config))
    for part in parts:
        if how == "gradients":
            backward(part.train().lookup(BATCH))
            part.eval().gradients()
        if how == "frozen":
            part.requires_grad_(False)
        if how == "adamw":
            part.weight.requires_grad_()
    model.head.requires_grad_(how != "backbone")
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")  # once a line
        for _ in range(3):
            with torch.set_grad_enabled(how != "no_grad"):
                model(BATCH, targets)
            other.step()
    assert len(said) == (how == "")
    for warning in said:
        assert "eval() mode" in str(warning.message) and warning.filename == __file__


def test_a_loss_of_hidden_states_in_eval_mode_is_warned():
    model = small().eval()
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with pytest.warns(UserWarning, match=r"eval\(\) mode"):
        for _ in range(2):
            model.hidden(BATCH)
            other.step()


def test_processes_that_would_train_rows_of_their_own_are_refused(monkeypatch):
    """Also if they join after it was made, as with Trainers of lightning and transformers."""
    made = tables()
    rows = RowRMSprop(made)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for n_rank in (1, 2):
        monkeypatch.setattr(dist, "get_world_size", lambda n_rank=n_rank: n_rank)
        backward(made.lookup(BATCH))
        if n_rank == 1:
            rows.step(lr=0.1)
    with pytest.raises(AssertionError, match="2 processes would"):
        rows.step(lr=0.1)
    made.n_rank = 2
    rows.step(lr=0.1)


def test_rows_that_are_parameters_get_an_optimizer_of_rows():
    """`from_pretrained` of transformers makes them parameters."""
    made, other = tables(), tables()
    other.load_state_dict(made.state_dict())
    for weight in made.weight:
        weight.requires_grad_(True)
    for each in (made, other):
        rows = RowRMSprop(each)
        backward(each.lookup(BATCH))
        rows.step(lr=0.1)
    for mine, others in zip(made.weight, other.weight, strict=True):
        assert torch.equal(mine, others)


@pytest.mark.filterwarnings("ignore:gradients of rows")
def test_a_loop_without_an_optimizer_of_pytorch_fails_after_many_lookups(monkeypatch):
    monkeypatch.setattr(watch, "MOST_READS", 20)
    made = tables()
    for _ in range(2):
        for _ in range(20):  # micro-batches of one step
            backward(made.lookup(BATCH))
        made.zero_grad()
    for _ in range(30):
        list(made.lookup(BATCH))  # of a loss that is only looked at
    with pytest.raises(AssertionError, match="RowRMSprop"):
        for _ in range(22):
            backward(made.lookup(BATCH))


def test_who_changes_weights_by_hand_is_told_that_rows_stay(recwarn):
    def step(made, rows=None):
        backward(made.lookup(BATCH))
        if rows:
            rows.step(lr=0.1)
        made.zero_grad()

    made = tables()
    for _ in range(3):
        step(made)
    assert [str(warning.message)[:29] for warning in recwarn] == ["gradients of rows are dropped"]
    trained = tables()
    step(trained, RowRMSprop(trained))
    step(trained)  # a step that is left out
    assert len(recwarn) == 1


@pytest.mark.parametrize("n_waiting", [0, 1, 2])
def test_the_optimizer_of_a_model_trains_no_copy(n_waiting):
    """Nor one that is made while gradients wait."""
    model = small()
    RowRMSprop(model.tables)
    RowRMSprop(model.wte)
    for _ in range(n_waiting):
        model(BATCH, BATCH)[1].backward()
    student = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(student.parameters())
    with pytest.raises(AssertionError, match="RowRMSprop"):
        for _ in range(3):
            student(BATCH, BATCH)[1].backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:gradients of rows")
@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_no_gradients(make):
    """Neither of parameters nor of rows."""
    model = small()
    model(BATCH, BATCH)[1].backward()
    model(BATCH, BATCH)
    student = make(model)
    assert all(parameter.grad is None for parameter in student.parameters())
    student(BATCH[:, :1], BATCH[:, :1])[1].backward()
    assert student.tables.gradients()[0].tolist() == [3, 7]
    assert model.tables.gradients()[0].tolist() == [0, 1, 3, 7]


def test_rows_that_are_parameters_stay_so_until_they_are_frozen():
    made = tables()
    made.weight[0].requires_grad_(True)
    assert made.requires_grad_(True).weight[0].requires_grad
    assert not made.requires_grad_(False).weight[0].requires_grad


def test_rows_that_are_computed_are_not_trained_in_vain():
    made = tables()
    RowRMSprop(made)
    prune.l1_unstructured(made.weight, "1", 0.5)
    with pytest.raises(AssertionError, match="mask"):
        backward(made.lookup(BATCH))


@pytest.mark.parametrize("n_phase", [0, 1])  # that trained them before
def test_rows_that_are_released_too_late_for_their_optimizer_are_no_parameters(n_phase):
    model = small().train()
    for _ in range(n_phase):
        optimizer = Optimizer(model, Settings(model=model.config))
        model(BATCH, BATCH)[1].backward()
        optimizer.step(fraction=1.0)
    model.tables.requires_grad_(False)
    optimizer = Optimizer(model, Settings(model=model.config))
    model.tables.requires_grad_(True)
    assert not model.tables.weight[0].requires_grad
    with pytest.raises(AssertionError, match="RowRMSprop"):
        for _ in range(3):
            model(BATCH, BATCH)[1].backward()
            optimizer.step(fraction=1.0)


# --- RMSprop on rows ---


def batches(n_step: int):
    """Some ids, the later ones in fewer batches, and their gradients in two tables."""
    generator = torch.Generator().manual_seed(0)
    chance = torch.linspace(1, 0.05, V)
    for _ in range(n_step):
        ids = (torch.rand(V, generator=generator) < chance).nonzero()[:, 0]
        yield ids, [torch.randn(len(ids), W, generator=generator) for _ in range(2)]


def read(made: ResidentTables, ids: torch.Tensor, grads: list) -> None:
    """Give the rows of distinct ids these gradients."""
    sum((row * grad).sum() for row, grad in zip(made.lookup(ids), grads, strict=True)).backward()


@pytest.mark.parametrize("state", ["row", "number"])
@pytest.mark.parametrize("beta2", [0.5, 0.95])
def test_a_step_on_the_rows_that_were_read_is_the_step_on_whole_tables(state, beta2, monkeypatch):
    """There, gradients are zero where a row was not read."""
    monkeypatch.setattr(rmsprop, "PART", 3 * W)  # a CPU updates large batches in parts
    made = tables()
    rows = RowRMSprop(made, beta2, state=state)
    weights = [weight.detach().clone() for weight in made.weight]
    moments = [torch.zeros_like(v) for v in rows.state]
    for step, (ids, grads) in enumerate(batches(40)):
        rate = 0.1 * (1 + step % 3)  # a schedule
        read(made, ids, grads)
        rows.step(rate)
        correction = 1 / (1 - beta2 ** (step + 1))
        for weight, v, grad in zip(weights, moments, grads, strict=True):
            g = torch.zeros(V, W).index_copy(0, ids, grad)
            square = g**2 if state == "number" else (g**2).mean(1, keepdim=True)
            v.mul_(beta2).add_(square, alpha=1 - beta2)
            weight -= rate * g / ((v * correction).sqrt() + 1e-8)
    exact = dict(rtol=0.0, atol=0.0) if beta2 == 0.5 else {}  # its powers are
    assert_close([weight.data for weight in made.weight], weights, **exact)


@pytest.mark.parametrize("name", ["tables", "wte"])
def test_what_is_frozen_stays_and_the_rest_is_trained(name):
    model = small().train()
    getattr(model, name).requires_grad_(False)
    optimizer = Optimizer(model, Settings(model=model.config))
    before = copy.deepcopy(model.state_dict())
    for _ in range(3):
        model(BATCH, BATCH)[1].backward()
        optimizer.step(fraction=1.0)
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, before[key]) == key.startswith(name)


# --- bfloat16 ---


def test_an_optimizer_refuses_what_it_would_train_wrongly():
    """Rows that it cannot round, or that two layers share; or by the settings of another model."""
    shared = tables()
    shared.weight[1] = shared.weight[0]
    dense = small(ffn="dense", tie_head=True)
    for said, optimizer, *given in (
        ("torch.float16", RowRMSprop, small().half().tables),
        ("Embedding has no rows", RowRMSprop, dense.wte),
        ("has no rows", RowRMSprop, dense.tables),
        ("updated twice", RowRMSprop, shared),
        ("Settings", Optimizer, small(ffn="embformer"), Settings()),
    ):
        with pytest.raises(AssertionError, match=said):
            optimizer(*given)


def test_stochastic_rounding_hits_neighbors_with_the_right_mean():
    numbers = torch.tensor([1.0 + 1 / 512, -3.3, 1e-30])
    rounded = round_stochastically(numbers.expand(40_000, 3).contiguous(), torch.Generator())
    for number, column in zip(numbers, rounded.float().T, strict=True):
        below, above = column.unique()
        assert below < number < above
        assert abs(column.double().mean() - number) < (above - below) / 50
    exact = torch.tensor([[1.0, 0.0]])
    assert torch.equal(round_stochastically(exact, torch.Generator()), exact.bfloat16())


def test_rounding_differs_between_seeds_steps_and_tables():
    rounded = []
    for seed in (0, 1):
        made = ResidentTables(2, 1, 1000, dtype=torch.bfloat16)
        rows = RowRMSprop(made, seed=seed)
        for _ in range(2):
            for weight in made.weight:
                weight.fill_(1.0)
            read(made, torch.tensor([0]), [torch.ones(1, 1000)] * 2)
            rows.step(1e-3)  # a quarter of the spacing
            rounded += [weight.clone() for weight in made.weight]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(rounded, 2))


class Integers(Tables):
    def __init__(self, n_table, n_row, width):
        super().__init__(n_row, width)
        self.weight = list(torch.zeros(n_table, n_row, width, dtype=torch.int8))


def test_rows_are_not_truncated_to_integers():
    """Rows of 0.02 would become zero."""
    model = small()
    with pytest.raises(RuntimeError, match=r"int8 would truncate torch\.float32: make such tables"):
        Decoder(model.config, Integers).load_state_dict(model.state_dict())


# What of nanoGPT the lines in CONTRIBUTING.md change, and GPT.__init__, where two are added.
NANOGPT = """
class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_2 = nn.Identity()
        self.mlp = MLP(config)
    def forward(self, x):
        x = x + self.mlp(self.ln_2(x))
        return x
class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        blocks = [Block(config) for _ in range(config.n_layer)]
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(V, W), "h": nn.ModuleList(blocks)})
# GPT.__init__
    def forward(self, idx):
        x = self.transformer.wte(idx)
        for block in self.transformer.h:
            x = block(x)
        return x
"""


def test_the_lines_for_nanogpt_make_it_stem():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = re.search("```diff\n(.*?)```", page, re.DOTALL)[1]

    def code(marked):
        return re.sub("^.", "", marked, flags=re.MULTILINE)

    added = dict(re.findall(r"^ (# .*)\n((?:\+.*\n)+)", lines, re.MULTILINE))
    source = NANOGPT.replace("# GPT.__init__\n", code(added["# GPT.__init__"]))
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", lines, re.MULTILINE):
        assert code(old) in source
        source = source.replace(code(old), code(new))
    names = {"nn": nn, "V": V, "W": W}
    exec(code(added["# model.py"]) + source, names)
    config = SimpleNamespace(n_layer=2, vocab_size=V, n_embd=W)
    names["model"] = model = names["GPT"](config)
    ids = torch.tensor([[3, 1, 3]])
    x = model.transformer.wte(ids)
    for block, weight in zip(model.transformer.h, model.tables.weight, strict=True):
        hidden = silu(x @ block.mlp.gate.weight.T) * weight[ids]
        x = x + hidden @ block.mlp.down.weight.T
    assert_close(model(ids), x)

    exec(code(added["# train.py: before the model is compiled"]), names)
    before = copy.deepcopy(model.tables)
    model(ids).square().sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    exec(code(added["# train.py: after scaler.update()"]).strip(), {**names, "lr": 0.01})
    for weight, old in zip(model.tables.weight, before.weight, strict=True):
        assert (weight != old).any(1).nonzero().flatten().tolist() == [1, 3]


@pytest.mark.filterwarnings("ignore:gradients of rows")
def test_a_model_forgets_the_gradients_of_rows_with_all_others():
    model = small()
    for ids in (BATCH, BATCH[:, :1]):
        model.zero_grad()
        model(ids, ids)[1].backward()
    for part in (model.tables, model.wte):
        assert part.gradients()[0].tolist() == [3, 7]
