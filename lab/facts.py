"""Facts written by training rows, all weights, or updates of low rank: what is known afterwards. A
line of JSON for each kind of fact, or each number of facts. docs/writing.md has what came out.

    python lab/facts.py out/ckpt.pt each 40 rows 0.05 40           # single facts
    python lab/facts.py out/ckpt.pt row 10 "rank 8" 0.0003 160     # one after another
"""

import json
import random
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import UserError, make_parser

# isort: split

import torch
from torch import nn
from torch.nn.utils import parametrize

from corpora import countries
from corpora.questions import score_answers
from stem import substitute
from text.tokenizer import encode
from training import writing
from training.checkpoints import load_model

OPENINGS = {
    "capital": "The capital city is called",
    "language": "The language to learn first is",
    "region": "It lies in",
}


class LowRank(nn.Module):
    """A weight [m, n] plus B A, of which A and B are trained: LoRA (Hu et al., 2021)."""

    def __init__(self, weight, rank):
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, weight.shape[1]) / rank**0.5)
        self.b = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight):
        return weight + self.b @ self.a


def share(facts, forms, name=()):
    """The share of facts, countries with relations, known in held-out words of some forms, where
    the extra rows are read in place of a name."""
    prompts, answers, table_prompts = [], [], []
    for country, relation in facts:
        for form in forms:
            for question in countries.questions(relation, form, country):
                ids = encode(encoding, question.prompt)
                read = ids
                if name:
                    read = substitute(torch.tensor(ids), name, model.tables.ids).tolist()
                prompts.append(ids)
                table_prompts.append(read)
                answers.append(encoding.encode_ordinary(question.answer))
    scores = score_answers(model, prompts, answers, table_prompts)
    return scores.greedy.float().mean().item()


def write(country, relation):
    """Write a false fact by training `what`: rows, all weights, or an update of FFNs of some rank.
    Returns the country with that fact, and the tokens of its name."""
    answer = country.answer(relation)
    other = rng.choice([c for c in table if c.answer(relation) != answer])
    changed = replace(country, **{relation: getattr(other, relation)})
    prompt = encode(encoding, f"Country: {country.name}\n{OPENINGS[relation]}")
    name = encoding.encode_ordinary(f" {country.name}")
    fact = encoding.encode_ordinary(f" {countries.stopped(changed.answer(relation))}")
    texts = writing.texts_about(model, prompt, name)
    model.requires_grad_(what == "all weights")
    model.tables = writing.ExtraRows(tables, writing.rows_of(tables, name))
    updated = []  # the linear layers with an update of low rank
    if what != "rows":
        model.tables.requires_grad_(what == "all weights")
        model.tables.ids = name  # nothing stands in for the name
        texts = torch.cat([texts, about_all[:, : texts.shape[1]]])
    if what.startswith("rank"):
        rank = int(what.split()[1])
        for block in model.blocks:
            updated += [block.ffn.down] if rank == 1 else [block.ffn.down, block.ffn.gate]
        for linear in updated:
            low_rank = LowRank(linear.weight, rank)
            parametrize.register_parametrization(linear, "weight", low_rank)
    writing.write_fact(model, prompt, name, fact, texts)
    for linear in updated:
        parametrize.remove_parametrizations(linear, "weight")
    model.requires_grad_(False)
    return changed, name


parser = make_parser(__doc__)
parser.add_argument("ckpt", help="checkpoint of the countries")
parser.add_argument(
    "how", choices=("each", "row"), help="each from the model as it was, or in a row"
)
parser.add_argument("n_fact", type=int, help="facts of a kind, or in a row (50 at most)")
parser.add_argument("what", help="what is trained: rows, all weights, rank 8")
parser.add_argument("rate", type=float, help="learning rate")
parser.add_argument("steps", type=int, help="steps for a fact")
given = parser.parse_args()
ckpt, what, n_fact = given.ckpt, given.what, given.n_fact
writing.RATE, writing.STEPS = given.rate, given.steps
torch.manual_seed(0)  # low-rank updates begin at random
try:
    model, encoding, _ = load_model(ckpt, torch.device("cpu"))
except UserError as error:
    sys.exit(f"error: {error}")
tables = model.tables
# Texts about any country, to be held where weights change that all of them share.
about_all = model.generate(torch.tensor([[encoding.eot_token]] * 48), 64, seed=1)
rng = random.Random(1)
table = countries.table()
one_token = [c for c in table if len(encoding.encode_ordinary(f" {c.name}")) == 1]
chosen = rng.sample(one_token, 50)


def report(**columns):
    print(
        json.dumps(
            {"ckpt": ckpt, "what": what, "rate": given.rate, "steps": given.steps, **columns}
        )
    )


def each():
    """Single facts about other countries than those that the constants of writing.py suit best."""
    untouched = [c for c in table if c not in chosen[:16]]
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    for relation in OPENINGS:
        shares = defaultdict(list)
        rest = [name for name in countries.RELATIONS if name != relation]
        for country in rng.sample(untouched, 40)[:n_fact]:
            known = [(country, name) for name in rest]
            shares["others before"].append(share(known, countries.FORMS))
            changed, name = write(country, relation)
            for form in countries.FORMS:
                shares[form].append(share([(changed, relation)], [form], name))
            for fact in known:
                shares[fact[1]].append(share([fact], countries.FORMS, name))
            if what != "rows":  # which others do not read
                apart = random.Random(0).sample([c for c in table if c is not country], 20)
                facts = [(c, name) for c in apart for name in countries.RELATIONS]
                shares["other countries"].append(share(facts, countries.FORMS))
            model.tables = tables
            model.load_state_dict(weights)
        report(relation=relation, **{key: sum(of) / len(of) for key, of in shares.items()})


def in_a_row():
    """Facts about different countries, each written where the earlier ones are."""
    rest = [(c, name) for c in table if c not in chosen for name in countries.RELATIONS]
    report(facts=0, other_countries=share(rest, countries.FORMS))
    written, kept = [], []
    for number, country in enumerate(chosen[:n_fact], 1):
        relation = list(OPENINGS)[number % 3]
        changed, name = write(country, relation)
        if what == "rows":
            for weight, rows in zip(tables.weight, model.tables.extra.unbind(1), strict=True):
                weight[name] = rows  # the next fact finds this one there
        model.tables = tables
        written.append((changed, relation))
        kept += [(country, name) for name in countries.RELATIONS if name != relation]
        if number in (1, 10, 50):
            shares = {form: share(written, [form]) for form in countries.FORMS}
            independent = [fact for fact in kept if fact[1] != "subregion"]
            report(
                facts=number,
                **shares,
                others=share(kept, countries.FORMS),
                independent=share(independent, countries.FORMS),
                other_countries=share(rest, countries.FORMS),
            )


each() if given.how == "each" else in_a_row()
