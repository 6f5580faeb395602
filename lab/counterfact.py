"""Facts written by the protocol of the field (CounterFact: Meng et al., arXiv 2202.05262; the
harness of MEMIT, 2210.07229): one, and many in sequence with all earlier ones asked again, by the
methods of lab/editors.py.

    python lab/analyze.py counterfact    # hours on two cores; goes on where it stopped

A record is a country, a relation, and another country whose value becomes its own. About it are
asked, with the right answer and a wrong one:

    edited        the prompt that was taught                                  new    old
    paraphrases   three wordings that were never trained                      new    old
    neighbors     countries that have the old value, or where none has, any   theirs new
    others        the name's other facts                                      its    the other's
    namesakes     countries whose names share tokens with this one            theirs new
    implied       the region, once the subregion is another's                 new    old
    reversed      the country whose capital is the new one                    it     the other
    two hops      the fact, of the country whose capital is this one's        new    old

A score is the share of questions whose right answer has fewer nats a token than the wrong one, and
the share that greedy decoding answers in full. What is right follows all edits so far. About some
countries nothing is written: their facts and texts show what else is lost.
"""

import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from common import atomic
from corpora import countries
from corpora.countries import NOUNS, RELATIONS, Country
from corpora.questions import score_answers
from lab.editors import Editor, Request, trace
from lab.experiment import KINDS, Experiment
from lab.pictures import interval, markdown, plt
from text.dataset import open_tokens, read_meta
from text.tokenizer import encode
from training.checkpoints import load_model

POINTS = (10, 100, 300, 1000)  # after so many edits in sequence all are asked
N_ALONE = 20  # edits of a model as it was
BATCH = 100  # edits at once, where a method can
APART = 28  # countries about which nothing is written
N_NEIGHBOR = 5
SEARCHED, N_SEARCHED = 5, 10  # seed, and edits in sequence, that find a method's setting
SCORES = ("edited", "paraphrases", "neighbors")  # ES, PS, NS, and S, their harmonic mean
MORE = ("others", "namesakes", "implied", "reversed", "two hops")
# A dense model of 1,000 steps knows three quarters of the capitals (docs/claims.md).
MODELS = {
    "STEM": KINDS["STEM, all"],
    "dense": {"ffn": "dense", "learning_rate": 0.0015, "max_iters": 2000},
}


class Method(NamedTuple):
    model: str
    function: Callable
    settings: list[dict]  # that are tried
    batches: bool = False


SWAPPED = [{"how": how} for how in ("copy", "pad", "subset")]
WRITTEN = [{"keep": keep} for keep in (60, 20, 200)]
TRAINED = [{"rate": 1e-4}, {"rate": 3e-5}, {"rate": 3e-4}, {"rate": 1e-4, "keep": 30}]
ONE_LAYER = {"one_layer": True, "rate": 1e-3}
BOUNDED = [{**ONE_LAYER, "bound": bound} for bound in (0.01, 0.02, 0.05)]
LORA = [{"rank": 8, "rate": rate} for rate in (1e-3, 3e-4, 3e-3)]
LORA += [{**LORA[0], "keep": 30}]
VALUE = {"limit": 1.0, "rate": 0.5}  # of ROME and MEMIT
ROME = [{"rank": rank, **VALUE} for rank in (0, 1, 2)]
ROME += [{**ROME[rank], "limit": limit} for rank, limit in ((0, 0.5), (1, 0.7), (2, 0.7))]
MEMIT = [{"n_layer": 3, "weight": 10, **VALUE}]
OTHER = ({"weight": 1}, {"limit": 0.5}, {"limit": 0.7}, {"n_layer": 2})
MEMIT += [{**MEMIT[0], **other} for other in OTHER]
METHODS = {  # in the order in which they are measured
    "no edits": Method("STEM", Editor.nothing, [{}]),
    "swapped rows": Method("STEM", Editor.swap_rows, SWAPPED),
    "ROME, STEM": Method("STEM", Editor.rome, ROME),
    "MEMIT, STEM": Method("STEM", Editor.memit, MEMIT, batches=True),
    "all weights": Method("STEM", Editor.fine_tune, TRAINED, batches=True),
    "FT-L": Method("STEM", Editor.fine_tune, BOUNDED, batches=True),
    "LoRA": Method("STEM", Editor.lora, LORA, batches=True),
    "written rows": Method("STEM", Editor.write_rows, WRITTEN),
    "ROME, dense": Method("dense", Editor.rome, ROME),
    "MEMIT, dense": Method("dense", Editor.memit, MEMIT, batches=True),
}


class Record(NamedTuple):
    country: Country
    relation: str
    other: Country  # has the new value


class Question(NamedTuple):
    kind: str
    prompt: str
    right: str
    wrong: str


def records(seed: int) -> tuple[list[Record], list[Country]]:
    """All records, in random order, but for those about some countries, which are returned, too."""
    rng = random.Random(seed)
    table = countries.table()
    rng.shuffle(table)
    drawn = []
    for country in table[APART:]:
        for relation in RELATIONS:
            differ = [c for c in table if c.answer(relation) != country.answer(relation)]
            drawn.append(Record(country, relation, rng.choice(differ)))
    rng.shuffle(drawn)
    return drawn, table[:APART]


def said(country: Country, relation: str) -> str:
    return f" {countries.stopped(country.answer(relation))}"


def taught(country: Country, relation: str) -> str:
    """A prompt in the words of training: "Country: Spain\\nThe country's capital is"."""
    pattern = countries.seen(countries.PARAGRAPH, relation)[0]
    return countries.paragraph(country, [countries.opening(pattern, country, relation)])


def held_out(country: Country, relation: str, form: str = "paragraph") -> str:
    return countries.questions(relation, form, country)[0].prompt


def questions(
    record: Record, truth: dict[str, Country], namesakes: Iterable[str]
) -> list[Question]:
    """What is asked about a record. truth: the countries by name as they are after all edits."""
    country, relation, other = record
    new, old = said(other, relation), said(country, relation)
    asked = [Question("edited", taught(country, relation), new, old)]
    for form in countries.FORMS:
        asked.append(Question("paraphrases", held_out(country, relation, form), new, old))
    rest = [c for c in countries.table() if c.name != country.name]
    same = [c for c in rest if said(c, relation) == old] or rest
    rng = random.Random(f"{country.name} {relation}")
    near = [c.name for c in rng.sample(same, min(N_NEIGHBOR, len(same)))]
    for kind, names in (("neighbors", near), ("namesakes", namesakes)):
        for name in names:
            right = said(truth[name], relation)
            asked.append(Question(kind, taught(truth[name], relation), right, new))
    now = truth[country.name]
    for fact in RELATIONS:
        if fact != relation:
            answers = said(now, fact), said(other, fact)
            asked.append(Question("others", held_out(now, fact), *answers))
    if relation == "subregion" and now.region == country.region:
        regions = said(other, "region"), said(country, "region")
        asked.append(Question("implied", held_out(now, "region"), *regions))
    if relation == "capital":
        names = [f" {countries.with_article(c.name)}." for c in (country, other)]
        asked.append(Question("reversed", f"The country whose capital is{new[:-1]} is", *names))
    else:
        hops = f"The {NOUNS[relation]} of the country whose capital is {now.capital} is"
        asked.append(Question("two hops", hops, new, old))
    return [question for question in asked if question.right != question.wrong]


def edited(truth: dict[str, Country], some: list[Record]) -> dict[str, Country]:
    truth = dict(truth)
    for country, relation, other in some:
        changed = {relation: getattr(other, relation)}
        truth[country.name] = replace(truth[country.name], **changed)
    return truth


def ngram_entropy(ids: list[int]) -> float:
    """Of a text's bigrams and trigrams, weighted as MEMIT's harness does, in bits."""
    total = 0.0
    for n, weight in ((2, 2 / 3), (3, 4 / 3)):
        counts = Counter(zip(*(ids[i:] for i in range(n)), strict=False)).values()
        shares = [count / sum(counts) for count in counts]
        total -= weight / 2 * sum(share * math.log2(share) for share in shares)
    return total


class Bench:
    """A model, its records, and what it was before all edits."""

    def __init__(self, folder: Path, seed: int, data_dir: Path) -> None:
        self.model, self.encoding, _ = load_model(folder / "ckpt.pt", torch.device("cpu"))
        self.fresh = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        self.records, self.apart = records(seed)
        self.table = {country.name: country for country in countries.table()}
        self.names = {name: self.encoding.encode_ordinary(f" {name}") for name in self.table}
        self.namesakes = {
            name: [other for other in self.names if other != name and own & {*self.names[other]}]
            for name, own in zip(self.names, map(set, self.names.values()), strict=True)
        }
        meta = read_meta(data_dir)
        size = self.model.config.block_size
        ids = open_tokens(data_dir, "train", meta)[: 100 * size].astype("int64")
        corpus = torch.from_numpy(ids).view(-1, size)
        self.editor = Editor(self.model, self.encoding.eot_token, corpus, self.layers())

        # Validation documents about the countries apart.
        text = self.encoding.decode(open_tokens(data_dir, "val", meta).tolist())
        begins = tuple(countries.paragraph(country, []) for country in self.apart)
        texts = [text for text in text.split("<|endoftext|>") if text.startswith(begins)]
        ids = [torch.tensor(encode(self.encoding, text)) for text in texts[:64]]
        self.ids = pad_sequence([text[:-1] for text in ids], batch_first=True)  # [N, T]
        targets = pad_sequence([text[1:] for text in ids], batch_first=True, padding_value=-1)
        self.predicted = targets >= 0
        self.targets = targets[self.predicted]  # [n]
        self.before = self.log_p()

    @torch.inference_mode()
    def log_p(self) -> Tensor:
        """Of what follows in the texts about the countries apart, [n, V]."""
        return self.model(self.ids)[0][self.predicted].log_softmax(-1)

    def layers(self) -> list[int]:
        """Layers by how much of a fact their FFNs restore, see `editors.trace`."""
        known = [c for c in self.table.values() if len(self.names[c.name]) == 1]
        requests = [self.request(Record(c, "language", c)) for c in known]
        asked = zip(*((r.prompt, r.end, r.answer[0]) for r in requests), strict=True)
        effects = trace(self.model, *map(torch.tensor, asked))
        return sorted(range(len(effects)), key=lambda layer: -effects[layer])

    def request(self, record: Record) -> Request:
        country, relation, other = record
        prompt = encode(self.encoding, taught(country, relation))
        name = self.names[country.name]
        end = len(encode(self.encoding, "Country:")) + len(name) - 1
        answer = self.encoding.encode_ordinary(said(other, relation))
        return Request(prompt, end, name, answer, self.names[other.name])

    def answered(self, asked: list[tuple[str, str]]) -> dict[tuple[str, str], tuple[float, bool]]:
        """The nats a token of each answer to its prompt, and whether greedy decoding gives it."""
        encoded = {}
        for prompt, answer in asked:
            ids = encode(self.encoding, prompt), self.encoding.encode_ordinary(answer)
            encoded[prompt, answer] = ids
        waiting = sorted(encoded, key=lambda pair: sum(map(len, encoded[pair])))
        answered = {}
        for start in range(0, len(waiting), 256):
            part = waiting[start : start + 256]
            prompts, answers = zip(*(encoded[pair] for pair in part), strict=True)
            greedy, probability = score_answers(self.model, prompts, answers)
            nats = -probability.log() / torch.tensor([len(answer) for answer in answers])
            found = zip(nats.tolist(), greedy.tolist(), strict=True)
            answered.update(zip(part, found, strict=True))
        return answered

    def ask(self, about: list[Record], truth: dict[str, Country]) -> dict:
        """Ask about records. Of each and each kind of question, the shares that are right by nats,
        right and wrong in greedy decoding; and what else the model knows and writes."""
        asked = [questions(record, truth, self.namesakes[record.country.name]) for record in about]
        known = [(held_out(c, fact), said(c, fact)) for c in self.apart for fact in RELATIONS]
        pairs = known.copy()
        for each in asked:
            for _, prompt, right, wrong in each:
                pairs += [(prompt, right), (prompt, wrong)]
        answered = self.answered(pairs)
        scores = []
        for each in asked:
            found = defaultdict(list)
            for kind, prompt, right, wrong in each:
                (nats, greedy), (worse, old) = answered[prompt, right], answered[prompt, wrong]
                found[kind].append((float(nats < worse), greedy, old))
            scores.append({kind: torch.tensor(of).mean(0).tolist() for kind, of in found.items()})
        log_p = self.log_p()
        loss = F.nll_loss(log_p, self.targets).item()
        entropy = 0.0
        if math.isfinite(loss):
            entropy = fmean(ngram_entropy(self.writes(record.country)) for record in about[-4:])
        return {
            "records": scores,
            "other countries": fmean(answered[pair][1] for pair in known),
            "KL": F.kl_div(log_p, self.before, reduction="batchmean", log_target=True).item(),
            "loss": loss,
            "entropy": entropy,
        }

    def writes(self, country: Country) -> list[int]:
        prompt = torch.tensor([encode(self.encoding, countries.paragraph(country, []))])
        return self.model.generate(prompt, 64, seed=0, top_k=5)[0, prompt.shape[1] :].tolist()


@lru_cache(maxsize=2)
def open_bench(folder: Path, seed: int, data_dir: Path) -> Bench:
    return Bench(folder, seed, data_dir)


class Trial(NamedTuple):
    """A method at a setting, in the model of a seed."""

    experiment: Experiment
    name: str
    setting: dict
    seed: int

    def path(self, how: str) -> Path:
        """The file of its figures, a line of JSON each."""
        flags = {"seed": self.seed, **MODELS[METHODS[self.name].model]}
        run = self.experiment.folder(flags).name
        shown = ",".join([how, *(f"{key}={value}" for key, value in self.setting.items())])
        path = self.experiment.out_dir / "figures/counterfact" / run / self.name / f"{shown}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def open(self) -> Bench:
        model = METHODS[self.name].model
        (folder,) = self.experiment.train({model: MODELS[model]}, [self.seed])[model]
        return open_bench(folder, self.seed, self.experiment.data_dir)

    def measure(self, points: Sequence[int], size: int = 1, alone: bool = False) -> list[dict]:
        """Write facts in sequence, so many at once, and ask all of them at some points; or each
        into the model as it was. The weights are kept beside the figures, to go on with."""
        path = self.path("alone" if alone else f"by {size}")
        rows = []
        if path.exists():
            rows = [json.loads(line) for line in path.read_text().splitlines()]
        waiting = set(points) - {row["edits"] for row in rows}
        if not waiting:
            return [row for row in rows if row["edits"] in points]
        bench = self.open()
        kept = path.with_suffix(".pt")
        n, weights = torch.load(kept) if kept.exists() else (0, bench.fresh)
        bench.model.load_state_dict(weights)
        truth = edited(bench.table, bench.records[:n])
        bar = tqdm(desc=f"{self.name}, {path.stem}", initial=n, total=max(waiting))
        while n < max(waiting):
            if alone:
                bench.model.load_state_dict(bench.fresh)
                truth = bench.table
            some = bench.records[n : n + size]
            started = time.process_time()
            METHODS[self.name].function(
                bench.editor, list(map(bench.request, some)), **self.setting
            )
            seconds = time.process_time() - started
            truth = edited(truth, some)
            n += size
            bar.update(size)
            if n in waiting:
                asked = bench.ask(some if alone else bench.records[:n], truth)
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"edits": n, "seconds": seconds, **asked}) + "\n")
            if n in waiting or n % 10 == 0:
                with atomic(kept) as temporary:
                    torch.save((n, bench.model.state_dict()), temporary)
        bar.close()
        return self.measure(points, size, alone)


def score(rows: list[dict], kind: str, which: int) -> float | None:
    """The mean of a score over the records that have it: right by nats (0), right (1) and wrong (2)
    in greedy decoding."""
    found = [record[kind][which] for row in rows for record in row["records"] if kind in record]
    return fmean(found) if found else None


def harmonic(rows: list[dict], which: int, kinds: Sequence[str] = SCORES) -> float:
    return harmonic_mean([score(rows, kind, which) for kind in kinds])


def best_setting(experiment: Experiment, name: str) -> dict:
    """The setting under which a name's facts and its neighbors' are answered best after some edits
    of a model that is not counted."""
    settings = METHODS[name].settings
    if experiment.quick or len(settings) == 1:
        return settings[0]
    found = []
    for setting in settings:
        rows = Trial(experiment, name, setting, SEARCHED).measure([N_SEARCHED])
        found.append(harmonic(rows, 1, (*SCORES, "others")))
    return settings[found.index(max(found))]


def measure(
    experiment: Experiment, name: str, seed: int, points: Sequence[int], n_alone: int
) -> dict[str, list[dict]]:
    """The rows of a method in a seed's model, by the number of edits."""
    trial = Trial(experiment, name, best_setting(experiment, name), seed)
    found = {"1": trial.measure(range(1, n_alone + 1), alone=True)}
    for row in trial.measure(points):
        found[str(row["edits"])] = [row]
    if METHODS[name].batches:
        batch = 1 if experiment.quick else BATCH
        for row in trial.measure([n for n in points if n % batch == 0], batch):
            found[f"{row['edits']} by {batch}"] = [row]
    return found


def cells(groups: list[list[dict]]) -> dict[str, str]:
    """What the rows of each seed have in common."""
    figures = {}
    for which, how in enumerate(("nats", "greedy")):
        for kind in SCORES:
            figures[f"{kind}, {how}"] = [score(rows, kind, which) for rows in groups]
        figures[f"S, {how}"] = [harmonic(rows, which) for rows in groups]
    for kind in MORE:
        figures[kind] = [score(rows, kind, 1) for rows in groups]
    for title in ("other countries", "KL", "loss", "entropy", "seconds"):
        figures[title] = [fmean(row[title] for row in rows) for rows in groups]
    shown = {}
    for title, found in figures.items():
        form = ".3f" if title in ("KL", "loss", "entropy", "seconds") else ".1%"
        shown[title] = interval(form, found)
    return shown


def sharing(row: dict) -> dict:
    """What was asked about names that share tokens with others."""
    return {**row, "records": [record for record in row["records"] if "namesakes" in record]}


def picture(groups: dict[str, list[dict]]) -> plt.Figure:
    """Scores over the number of edits, a line a method."""
    panels = {
        "S: of two answers, the right one is likelier": lambda rows: harmonic(rows, 0),
        "S: the whole answer, greedy": lambda rows: harmonic(rows, 1),
        "other facts of the names, greedy": lambda rows: score(rows, "others", 1),
    }
    figure, axes = plt.subplots(1, 3, figsize=(12, 4))
    for axis, (title, figure_of) in zip(axes, panels.items(), strict=True):
        axis.set(title=title, ylim=(-0.02, 1.02), xlabel="edits in sequence")
        for name, seeds in groups.items():
            numbers = [number for number in seeds[0] if number.isdigit()]
            means = [fmean(figure_of(found[number]) for found in seeds) for number in numbers]
            axis.semilogx(list(map(int, numbers)), means, "o-", ms=3, label=name)
    axes[0].legend(fontsize=7)
    return figure


def counterfact(experiment: Experiment) -> None:
    points, n_alone = ((1,), 1) if experiment.quick else (POINTS, N_ALONE)
    for number in experiment.numbers:  # what decides most comes first
        for n_point, n in ((1, 0), (2, 0), (2, n_alone), (len(points), n_alone)):
            for name in METHODS:
                measure(experiment, name, number, points[:n_point], n)
    groups = {
        name: [measure(experiment, name, number, points, n_alone) for number in experiment.numbers]
        for name in METHODS
    }
    everything, shared = [], []
    for name, seeds in groups.items():
        for title in seeds[0]:
            rows = [found[title] for found in seeds]
            everything.append({"method": name, "edits": title, **cells(rows)})
            rows = [list(map(sharing, one)) for one in rows]
            if all(row["records"] for one in rows for row in one):
                shared.append({"method": name, "edits": title, **cells(rows)})
    print(markdown(everything))
    if shared:
        print(f"\nNames that share tokens:\n\n{markdown(shared)}")
    experiment.picture("counterfact", picture(groups))
