"""Facts written by the protocol of the field (CounterFact: Meng et al., arXiv 2202.05262; the
harness of MEMIT, 2210.07229): one, and many in sequence with all earlier ones asked again, by the
methods of lab/editors.py.

    python lab/analyze.py counterfact --jobs 16    # processes; goes on where it stopped

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

The protocol is fixed in this file, before any model of the counted seeds is edited: the settings
that each method tries, the seed on which they are tried, what the best one is (`search`), and the
seeds that are counted. To change a list is to begin anew, with other seeds.
"""

import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import cache
from itertools import product
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from statistics import fmean, harmonic_mean
from threading import Thread
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common import atomic
from corpora import countries
from corpora.countries import NOUNS, RELATIONS, Country
from corpora.questions import mean, score_answers, with_answers
from corpora.recall import readers
from lab.editors import Editor, Request, trace
from lab.experiment import KINDS, Experiment
from lab.pictures import interval, markdown, plt
from text.dataset import open_tokens, read_meta
from text.tokenizer import encode
from training.checkpoints import load_model

COUNTED = (11, 12, 13)  # seeds
# What is measured, in this order: beginning at which records, how many edits at once, and after how
# many all are asked. At first single edits, each in the model as it was.
STAGES = (
    (range(20), 1, (1,)),
    ((0,), 1, (10, 100)),
    ((0,), 100, (100,)),
    ((0,), 1, (300,)),
    ((0,), 100, (300,)),
    ((0,), 1, (1000,)),
    ((0,), 100, (1000,)),
)
QUICK = (((0,), 1, (1,)), ((0,), 2, (2,)))
KEPT = 25  # edits, after which a sequence that was stopped can go on
APART = 28  # countries about which nothing is written
N_NEIGHBOR = 5
SEARCHED, N_SEARCHED = 5, 10  # seed, and edits in sequence, that find a method's setting
SCORES = ("edited", "paraphrases", "neighbors")  # ES, PS, NS, and S, their harmonic mean
MORE = ("others", "namesakes", "implied", "reversed", "two hops")
# A dense model of 1,000 steps knows three quarters of the capitals (docs/results.md).
MODELS = {
    "STEM": KINDS["STEM, all"],
    "dense": {"ffn": "dense", "learning_rate": 0.0015, "max_iters": 2000},
}


class Method(NamedTuple):
    model: str
    function: Callable
    settings: list[dict]  # that are tried
    batches: bool = False  # writes several facts at once


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
OTHER += ({"n_layer": 2, "again": True},)
MEMIT += [{**MEMIT[0], **other} for other in OTHER]
METHODS = {  # in the order in which they are measured
    "written rows": Method("STEM", Editor.write_rows, WRITTEN),
    "no edits, STEM": Method("STEM", Editor.nothing, [{}]),
    "no edits, dense": Method("dense", Editor.nothing, [{}]),
    "swapped rows": Method("STEM", Editor.swap_rows, SWAPPED),
    "ROME, STEM": Method("STEM", Editor.rome, ROME),
    "MEMIT, STEM": Method("STEM", Editor.memit, MEMIT, batches=True),
    "ROME, dense": Method("dense", Editor.rome, ROME),
    "MEMIT, dense": Method("dense", Editor.memit, MEMIT, batches=True),
    "FT-L": Method("STEM", Editor.fine_tune, BOUNDED, batches=True),
    "LoRA": Method("STEM", Editor.lora, LORA, batches=True),
    "all weights": Method("STEM", Editor.fine_tune, TRAINED, batches=True),
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
    """What is asked about a record. truth: as of `after`, of all edits."""
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


def after(edits: list[Record]) -> dict[str, Country]:
    """The countries by name, as they are after edits."""
    truth = {country.name: country for country in countries.table()}
    for country, relation, other in edits:
        changed = {relation: getattr(other, relation)}
        truth[country.name] = replace(truth[country.name], **changed)
    return truth


def ngram_entropy(ids: list[int]) -> float:
    """Of a text's bigrams and trigrams, weighted as MEMIT's harness does, in bits."""
    total = 0.0
    for n, weight in ((2, 1 / 3), (3, 2 / 3)):
        counts = Counter(zip(*(ids[i:] for i in range(n)), strict=False)).values()
        shares = [count / sum(counts) for count in counts]
        total -= weight * sum(share * math.log2(share) for share in shares)
    return total


class Bench:
    """A model, its records, and what it was before all edits."""

    def __init__(self, folder: Path, seed: int, data_dir: Path) -> None:
        self.model, self.encoding, _ = load_model(folder / "ckpt.pt", torch.device("cpu"))
        self.fresh = {name: weight.clone() for name, weight in self.model.state_dict().items()}
        self.records, self.apart = records(seed)
        meta = read_meta(data_dir)
        size = self.model.config.block_size
        ids = open_tokens(data_dir, "train", meta)[: 100 * size].astype("int64")
        corpus = torch.from_numpy(ids).view(-1, size)
        self.editor = Editor(self.model, self.encoding.eot_token, corpus, self.layers())

        # Validation documents about the countries apart.
        text = self.encoding.decode(open_tokens(data_dir, "val", meta).tolist())
        begins = tuple(countries.paragraph(country, []) for country in self.apart)
        texts = [text for text in text.split("<|endoftext|>") if text.startswith(begins)]
        ids = [encode(self.encoding, text) for text in texts[:64]]
        begun, rest = [text[:1] for text in ids], [text[1:] for text in ids]
        self.ids, targets = with_answers(begun, rest)  # [N, T] each
        self.predicted = targets >= 0
        self.targets = targets[self.predicted]  # [n]
        self.before = self.log_p()

    @torch.inference_mode()
    def log_p(self) -> Tensor:
        """Of what follows in the texts about the countries apart, [n, V]."""
        return self.model(self.ids)[0][self.predicted].log_softmax(-1)

    def layers(self) -> list[int]:
        """Layers by how much of a fact their FFNs restore, see `editors.trace`."""
        requests = [self.request(Record(c, "language", c)) for c in countries.table()]
        one_token = [request for request in requests if len(request.name) == 1]
        asked = zip(*((r.prompt, r.end, r.answer[0]) for r in one_token), strict=True)
        effects = trace(self.model, *map(torch.tensor, asked))
        return sorted(range(len(effects)), key=lambda layer: -effects[layer])

    def request(self, record: Record) -> Request:
        country, relation, other = record
        prompt = encode(self.encoding, taught(country, relation))
        name, donor = (self.encoding.encode_ordinary(f" {c.name}") for c in (country, other))
        end = len(encode(self.encoding, "Country:")) + len(name) - 1
        answer = self.encoding.encode_ordinary(said(other, relation))
        return Request(prompt, end, name, answer, donor)

    def namesakes(self, country: Country) -> list[str]:
        """The other countries whose names share tokens with this one's."""
        name = self.encoding.encode_ordinary(f" {country.name}")
        return [other for other in readers(self.encoding, name) if other != country.name]

    def score(self, prompts: Sequence[str], answers: Sequence[str]) -> tuple[Tensor, Tensor]:
        """The nats a token of answers, and whether greedy decoding gives them in full: [N] each."""
        prompts = [encode(self.encoding, prompt) for prompt in prompts]
        answers = [self.encoding.encode_ordinary(answer) for answer in answers]
        greedy, probability = score_answers(self.model, prompts, answers)
        return -probability.log() / torch.tensor([len(answer) for answer in answers]), greedy

    def shares(self, asked: list[Question]) -> dict[str, list[float]]:
        """Of each kind of question, the share whose right answer has fewer nats a token than the
        wrong one, and the share that greedy decoding answers in full."""
        kinds, prompts, right, wrong = zip(*asked, strict=True)
        nats, greedy = self.score(prompts, right)
        is_right = torch.stack((nats < self.score(prompts, wrong)[0], greedy), 1)  # [N, 2]
        shares = {}
        for kind in dict.fromkeys(kinds):
            of_kind = torch.tensor([other == kind for other in kinds])
            shares[kind] = is_right[of_kind].float().mean(0).tolist()
        return shares

    def ask(self, about: list[Record]) -> dict:
        """Ask about all that was edited: the shares of each record, and what else the model
        knows."""
        truth = after(about)
        scores = []
        for record in about:
            asked = questions(record, truth, self.namesakes(record.country))
            scores.append(self.shares(asked))
        known = [(held_out(c, fact), said(c, fact)) for c in self.apart for fact in RELATIONS]
        _, greedy = self.score(*zip(*known, strict=True))
        log_p = self.log_p()
        loss = F.nll_loss(log_p, self.targets).item()
        entropy = 0.0
        if math.isfinite(loss):
            entropy = fmean(ngram_entropy(self.writes(record.country)) for record in about[-4:])
        return {
            "records": scores,
            "other countries": mean(greedy),
            "KL": F.kl_div(log_p, self.before, reduction="batchmean", log_target=True).item(),
            "loss": loss,
            "entropy": entropy,
        }

    def writes(self, country: Country) -> list[int]:
        prompt = torch.tensor([encode(self.encoding, countries.paragraph(country, []))])
        return self.model.generate(prompt, 64, seed=0, top_k=5)[0, prompt.shape[1] :].tolist()


open_bench = cache(Bench)  # once in a process


class Trial(NamedTuple):
    """A method at a setting, in the model of a seed."""

    run: Path  # folder of the model
    data_dir: Path
    figures: Path  # folder
    seed: int
    name: str
    setting: dict
    size: int = 1  # edits at once
    first: int = 0  # the record that is edited first

    @property
    def path(self) -> Path:
        """The file of its figures, a line of JSON each."""
        # The single edit of record 0 is the first of a sequence, and in its file.
        how = f"record {self.first}" if self.first else f"by {self.size}"
        shown = ",".join([how, *(f"{key}={value}" for key, value in self.setting.items())])
        return self.figures / self.run.name / self.name / f"{shown}.jsonl"

    def rows(self) -> dict[int, dict]:
        """The figures so far, by the number of edits."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        rows = map(json.loads, lines)
        return {row["edits"]: row for row in rows}

    def measure(self, points: Sequence[int]) -> None:
        """Write facts, and ask all of them at some points. The weights are kept beside the figures,
        to go on with."""
        torch.set_num_threads(1)
        bench = open_bench(self.run, self.seed, self.data_dir)
        records = bench.records[self.first :][: max(points)]
        requests = list(map(bench.request, records))
        rows = self.rows()
        kept = self.path.with_suffix(".pt")
        n, weights = torch.load(kept) if kept.exists() else (0, bench.fresh)
        bench.model.load_state_dict(weights)
        while n < max(points):
            bench.editor.written = requests[:n]
            started = time.process_time()
            some = requests[n : n + self.size]
            METHODS[self.name].function(bench.editor, some, **self.setting)
            seconds = time.process_time() - started
            n += self.size
            if n in points and n not in rows:
                rows[n] = {"edits": n, "seconds": seconds, **bench.ask(records[:n])}
                with atomic(self.path) as temporary:
                    temporary.write_text("".join(f"{json.dumps(row)}\n" for row in rows.values()))
            if n % KEPT == 0:
                with atomic(kept) as temporary:
                    torch.save((n, bench.model.state_dict()), temporary)


def end_with_parent() -> None:
    """End this process when the one that started it ends, in whatever way: the next command goes on
    with its files."""

    def watch_parent() -> None:
        parent_process().join()
        os._exit(1)

    Thread(target=watch_parent, daemon=True).start()


def measure_all(trials: Iterable[Trial], points: Sequence[int], cores: int) -> None:
    """Measure trials at points, one on each core at a time; on 0 cores, in this process."""
    waiting = [trial for trial in trials if {*points} - {*trial.rows()}]
    if not cores:
        for trial in waiting:
            trial.measure(points)
        return
    with ProcessPoolExecutor(cores, get_context("spawn"), end_with_parent) as pool:
        try:
            running = [pool.submit(trial.measure, points) for trial in waiting]
            shown = f"trials, {cores} at a time", len(running)
            for future in tqdm(as_completed(running), *shown, unit="trial"):
                future.result()
        except BaseException:
            for child in active_children():
                child.terminate()
            raise


def score(rows: list[dict], kind: str, which: int) -> float | None:
    """The mean of a score over the records that have it, by nats (0) or in greedy decoding (1)."""
    found = [record[kind][which] for row in rows for record in row["records"] if kind in record]
    return fmean(found) if found else None


def harmonic(rows: list[dict], which: int, kinds: Sequence[str] = SCORES) -> float:
    return harmonic_mean([score(rows, kind, which) for kind in kinds])


def search(tried: dict[str, list[Trial]]) -> dict[str, dict]:
    """Of the settings of each method, the one with which the names' facts, theirs and their
    neighbors', are answered best in greedy decoding, after some edits in sequence."""

    def answered(trial: Trial) -> float:
        return harmonic([trial.rows()[N_SEARCHED]], 1, (*SCORES, "others"))

    return {name: max(trials, key=answered).setting for name, trials in tried.items()}


def cells(groups: list[list[dict]]) -> dict[str, str]:
    """What the rows of each seed have in common."""
    shown = {}
    for which, how in enumerate(("nats", "greedy")):
        for kind in SCORES:
            shown[f"{kind}, {how}"] = interval(".1%", [score(rows, kind, which) for rows in groups])
        shown[f"S, {how}"] = interval(".1%", [harmonic(rows, which) for rows in groups])
    for kind in MORE:
        shown[kind] = interval(".1%", [score(rows, kind, 1) for rows in groups])
    for title in ("other countries", "KL", "loss", "entropy", "seconds"):
        form = ".1%" if title == "other countries" else ".3f"
        shown[title] = interval(form, [fmean(row[title] for row in rows) for rows in groups])
    return shown


def of_shared_names(row: dict) -> dict:
    """What was asked about names that share tokens with others."""
    return {**row, "records": [record for record in row["records"] if "namesakes" in record]}


def picture(groups: dict[str, dict[str, list[list[dict]]]]) -> plt.Figure:
    """Scores over the number of edits, a line a method."""
    panels = {
        "S: new facts and neighbors": lambda rows: harmonic(rows, 1),
        "other facts of the names": lambda rows: score(rows, "others", 1),
        "other countries": lambda rows: fmean(row["other countries"] for row in rows),
    }
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True)
    colors = {}
    for axis, (title, figure_of) in zip(axes, panels.items(), strict=True):
        axis.set(title=title, ylim=(-2, 102), xlabel="edits in sequence", xscale="log")
        for name, found in groups.items():
            method, _, model = name.partition(", ")
            color = colors.setdefault(method, f"C{len(colors)}")
            numbers = [number for number in found if number.isdigit()]
            means = [100 * fmean(map(figure_of, found[number])) for number in numbers]
            line = "o--" if model == "dense" else "o-"
            axis.plot(list(map(int, numbers)), means, line, color=color, ms=3, label=name)
        axis.xaxis.set_major_formatter("{x:.0f}")
    axes[0].set_ylabel("whole answers, %")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def report(experiment: Experiment, groups: dict[str, dict[str, list[list[dict]]]]) -> None:
    """Tables and a picture of what is measured in the models of all seeds."""
    everything, shared = [], []
    for name, found in groups.items():
        for title, seeds in found.items():
            about = {"method": name, "edits": title}
            everything.append({**about, **cells(seeds)})
            sharing = [list(map(of_shared_names, rows)) for rows in seeds]
            if all(row["records"] for rows in sharing for row in rows):
                shared.append({**about, **cells(sharing)})
    print(markdown(everything))
    if shared:
        print(f"\nNames that share tokens:\n\n{markdown(shared)}")
    experiment.picture("counterfact", picture(groups))


def counterfact(experiment: Experiment) -> None:
    stages, numbers, cores = STAGES, COUNTED, experiment.jobs
    if experiment.quick:  # trials take less time than Python takes to start
        stages, numbers, cores = QUICK, COUNTED[:1], 0
    if experiment.seeds:
        numbers = experiment.numbers
    seeds = [*numbers] if experiment.quick else [*numbers, SEARCHED]
    folders = experiment.train(MODELS, seeds)

    def trial(name: str, setting: dict, seed: int, size: int = 1, first: int = 0) -> Trial:
        run = folders[METHODS[name].model][seeds.index(seed)]
        figures = experiment.out_dir / "figures/counterfact"
        return Trial(run, experiment.data_dir, figures, seed, name, setting, size, first)

    best = {name: method.settings[0] for name, method in METHODS.items()}
    if not experiment.quick:
        tried = {
            name: [trial(name, setting, SEARCHED) for setting in method.settings]
            for name, method in METHODS.items()
        }
        every = [trial for of_method in tried.values() for trial in of_method]
        measure_all(every, (N_SEARCHED,), cores)
        best = search(tried)
        chosen = [{"method": name, "setting": str(best[name])} for name in METHODS]
        print(f"{markdown(chosen)}\n", flush=True)

    groups = {name: {} for name in METHODS}  # by the number of edits: the rows of each seed
    for firsts, size, points in stages:
        names = [name for name in METHODS if size == 1 or METHODS[name].batches]
        trials = {
            (name, seed, first): trial(name, best[name], seed, size, first)
            for name, seed, first in product(names, numbers, firsts)
        }
        measure_all(trials.values(), points, cores)
        for name, n in product(names, points):
            title = f"{n} by {size}" if size > 1 else str(n)
            groups[name][title] = [
                [trials[name, seed, first].rows()[n] for first in firsts] for seed in numbers
            ]
    report(experiment, groups)
