"""Made-up facts, and how many of them a model recalls."""

import torch
from conftest import CPU

from lab import capacity
from lab.capacity import RELATIONS, VALUES, VOCAB, learn, make_facts


def test_facts_differ_and_share_the_syllables_of_their_names():
    prompts, values = make_facts(400, seed=1)
    assert prompts.shape == (400, 3)
    assert values.shape == (400,)
    assert values.min() >= 0
    assert values.max() < VALUES <= prompts.min()
    assert prompts.max() < VOCAB
    assert len(prompts.unique(dim=0)) == 400
    entities = prompts[:, :2].unique(dim=0)
    assert len(entities) == 400 / RELATIONS  # facts about each
    assert len(entities[:, 0].unique()) < len(entities)
    assert torch.equal(values, make_facts(400, seed=1)[1])
    assert not torch.equal(values, make_facts(400, seed=2)[1])


def test_every_fact_is_seen_as_often_and_recall_is_greedy_decoding(monkeypatch):
    models = []
    seen = torch.zeros(8, dtype=torch.int64)
    prompts, values = make_facts(8, seed=3)
    logits = capacity.logits

    def counting(model, batch):
        models.append(model)
        if torch.is_grad_enabled():
            seen.add_((batch[:, None] == prompts).all(-1).sum(0))
        return logits(model, batch)

    monkeypatch.setattr(capacity, "logits", counting)
    assert learn(("STEM, all", 8, 12, 3), CPU) == 1
    assert seen.tolist() == [12] * 8
    with torch.no_grad():  # as anybody would ask
        answers = models[-1](prompts)[0][:, -1, :VALUES].argmax(-1)
    assert torch.equal(answers, values)
    # A model that has not learned is right by chance, and so is one that breaks.
    for rate in (1e-9, 1e8):
        monkeypatch.setitem(capacity.RATES, "dense", rate)
        assert learn(("dense", 800, 1, 3), CPU) < 0.05
