"""Made-up facts, and how many of them a model recalls."""

import numpy as np
import torch

from analysis import capacity
from analysis.capacity import RELATIONS, VALUES, VOCAB, Cell, learn, make_facts

CPU = torch.device("cpu")


def test_facts_differ_and_share_the_syllables_of_their_names():
    prompts, values = make_facts(400, seed=1)
    assert prompts.shape == (400, 3) and values.shape == (400,)
    assert len({tuple(row) for row in prompts.tolist()}) == 400
    assert values.min() >= 0 and values.max() < VALUES <= prompts.min() and prompts.max() < VOCAB
    entities = {tuple(row[:-1]) for row in prompts.tolist()}
    assert len(entities) == 400 / RELATIONS  # facts about each
    assert len({first for first, _ in entities}) < len(entities)
    assert torch.equal(values, make_facts(400, seed=1)[1])
    assert not torch.equal(values, make_facts(400, seed=2)[1])


def test_every_fact_is_seen_as_often_and_recall_is_greedy_decoding(monkeypatch):
    models, seen = [], torch.zeros(8, dtype=torch.int64)
    prompts, values = make_facts(8, seed=3)
    logits = capacity.logits

    def counting(model, batch):
        models.append(model)
        if torch.is_grad_enabled():
            seen.add_((batch[:, None] == prompts).all(-1).sum(0))
        return logits(model, batch)

    monkeypatch.setattr(capacity, "logits", counting)
    cell = Cell("STEM, all", n_fact=8, passes=12, seed=3)
    assert learn(cell, CPU) == 1
    assert seen.tolist() == [12] * 8
    with torch.no_grad():  # as anybody would ask
        answers = models[-1](prompts)[0][:, -1].numpy()  # [8, V]
    assert np.array_equal(answers[:, :VALUES].argmax(-1), values)
    # A model that has not learned is right by chance, and so is one that breaks.
    for rate in (1e-9, 1e9):
        monkeypatch.setitem(capacity.RATES, "dense", rate)
        assert learn(Cell("dense", n_fact=800, passes=1, seed=3), CPU) < 0.05
