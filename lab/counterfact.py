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
seeds that are counted. To change a list is to begin anew, with other seeds. (The lists of ROME,
MEMIT and the trained weights were widened later, with the same seeds: docs/writing.md.)
"""

import copy
import hashlib
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
from lab import editors
from lab.editors import Editor, Request, trace
from lab.experiment import KINDS, SEARCHED, Experiment, last_checkpoint, say_once
from lab.pictures import interval, markdown, plt
from text.dataset import open_tokens, read_meta
from text.tokenizer import encode
from training import writing
from training.checkpoints import load_model

COUNTED = (11, 12, 13)  # seeds
# What is measured: beginning at which records, how many edits at once, and after how many all are
# asked. The single edit of record 0 is the first of the sequence.
STAGES = (
    ((0,), 1, (1, 10, 100, 300, 1000)),
    (range(1, 20), 1, (1,)),  # single edits, each in the model as it was
    ((0,), 100, (100, 300, 1000)),
)
QUICK = (((0,), 1, (1, 2)), ((0,), 2, (2,)))
KEPT = 25  # edits, after which a sequence that was stopped can go on
APART = 28  # countries about which nothing is written
N_NEIGHBOR = 5
N_SEARCHED = 30  # edits in sequence that, with the seed SEARCHED, find a method's setting
SCORES = ("edited", "paraphrases", "neighbors")  # ES, PS, NS, and S, their harmonic mean
MORE = ("others", "namesakes", "implied", "reversed", "two hops")
NUMBERS = ("KL", "loss", "entropy", "seconds")  # not shares
# After 1,000 steps, a dense model may not know all facts yet (docs/results.md).
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
INPUTS = [
    {"keep": k, "rate": r} for k, r in ((60, 0.5), (60, 0.2), (60, 1.0), (20, 0.5), (200, 0.5))
]
TRAINED = [{"rate": rate, "keep": keep} for keep in (0, 30, 200) for rate in (1e-4, 3e-5, 3e-4)]
TRAINED += [{"rate": r, "keep": k} for r, k in ((3e-4, 1000), (1e-3, 1000), (3e-4, 5000))]
BOUNDED = [{"rank": rank, "rate": 1e-3, "bound": b} for rank in (0, 1) for b in (0.01, 0.02, 0.05)]
LORA = [{"rank": 8, "rate": r, "keep": keep} for keep in (0, 30, 200) for r in (1e-3, 3e-4, 3e-3)]
LORA += [{"rank": rank, "rate": 1e-3, "keep": 30} for rank in (1, 32)]
LORA += [{"rank": r, "rate": 3e-3, "keep": k} for r in (8, 32) for k in (1000, 5000)]
HELD_LORA = [{"rank": 8, "rate": rate, "keep": 60} for rate in (1e-3, 3e-4, 3e-3)]
HELD_LORA += [{"rank": 8, "rate": 1e-3, "keep": keep, "others": 48} for keep in (200, 1000)]
RANKS = ((0, 1.0), (1, 1.0), (2, 1.0), (0, 0.5), (1, 0.7), (2, 0.7))  # and limits
ROME = [{"rank": rank, "limit": limit, "rate": 0.5} for rank, limit in RANKS]
ROME += [{"rank": rank, "limit": 1.0, "rate": 0.1} for rank in (0, 1, 2)]
# About the authors' limit, four times the FFN's value.
ROME += [{"rank": r, "limit": limit, "rate": 0.5} for r, limit in ((0, 1.8), (1, 2.8), (2, 1.5))]
FIRST = {"n_layer": 3, "weight": 10, "limit": 1.0, "rate": 0.5}
OTHER = ({}, {"weight": 1}, {"limit": 0.5}, {"limit": 0.7}, {"n_layer": 2})
OTHER += ({"n_layer": 2, "again": True}, {"n_layer": 2, "rate": 0.1})
OTHER += ({"n_layer": 2, "limit": 0.75}, {"n_layer": 2, "limit": 0.75, "weight": 384})
OTHER += ({"n_layer": 2, "rate": 0.1, "again": True},)
MEMIT = [{**FIRST, **other} for other in OTHER]
HELD = [{**FIRST, "hold": hold} for hold in (80, 20, 200)]
HELD_DENSE = [*HELD, {**HELD[0], "limit": 0.5}]
HELD_ROME = [{"rank": r, "limit": limit, "rate": 0.5, "hold": 80} for r, limit in RANKS]
NULL = {"n_layer": 2, "null": 0.1, "ridge": 0.1, "limit": 1.0, "rate": 0.5}
ALPHAEDIT = [{**NULL, "null": null, "rate": r} for r in (0.5, 0.1) for null in (0.1, 0.03, 0.3)]
ALPHAEDIT += [{**NULL, "ridge": ridge, "rate": r} for r in (0.5, 0.1) for ridge in (0.01, 1.0)]
ALPHAEDIT += [{**NULL, "limit": 0.75}]
METHODS = {  # in the order in which they are measured
    "written rows": Method("STEM", Editor.write_rows, WRITTEN),
    "embeddings, STEM": Method("STEM", Editor.write_inputs, INPUTS),
    "embeddings, dense": Method("dense", Editor.write_inputs, INPUTS),
    "no edits, STEM": Method("STEM", Editor.nothing, [{}]),
    "no edits, dense": Method("dense", Editor.nothing, [{}]),
    "swapped rows": Method("STEM", Editor.swap_rows, SWAPPED),
    "ROME, STEM": Method("STEM", Editor.rome, ROME),
    "MEMIT, STEM": Method("STEM", Editor.memit, MEMIT, batches=True),
    "ROME, texts held": Method("STEM", Editor.rome, HELD_ROME),
    "MEMIT, texts held": Method("STEM", Editor.memit, HELD),
    "ROME, dense": Method("dense", Editor.rome, ROME),
    "MEMIT, dense": Method("dense", Editor.memit, MEMIT, batches=True),
    "MEMIT, dense, texts held": Method("dense", Editor.memit, HELD_DENSE),
    "AlphaEdit, STEM": Method("STEM", Editor.alphaedit, ALPHAEDIT, batches=True),
    "AlphaEdit, dense": Method("dense", Editor.alphaedit, ALPHAEDIT, batches=True),
    "FT-L": Method("STEM", Editor.fine_tune, BOUNDED, batches=True),
    "LoRA": Method("STEM", Editor.lora, LORA, batches=True),
    "LoRA, texts held": Method("STEM", Editor.lora_as_rows, HELD_LORA),
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
    """What is asked about a record. truth: the countries `after` all edits."""
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

    def __init__(self, run: Path, data_dir: Path) -> None:
        loaded = load_model(last_checkpoint(run), torch.device("cpu"))
        self.model, self.encoding, checkpoint = loaded
        self.records, self.apart = records(checkpoint["args"]["seed"])
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
# Figures of each model, by method, number of edits, and edits at once.
Groups = dict[tuple[str, int, int], list[list[dict]]]


@cache
def digest() -> str:
    """Of the code that edits and asks."""
    files = (__file__, editors.__file__, writing.__file__)
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()


class Trial(NamedTuple):
    """A method at a setting, in the model of a seed."""

    run: Path  # folder of the model
    data_dir: Path
    figures: Path  # folder
    name: str
    setting: dict
    points: Sequence[int]  # numbers of edits, after which all are asked
    size: int = 1  # edits at once
    first: int = 0  # the record that is edited first

    @property
    def path(self) -> Path:
        """The file of its figures, a line of JSON each."""
        how = f"by {self.size}" + (f" from {self.first}" if self.first else "")
        shown = ",".join([how, *(f"{key}={value}" for key, value in self.setting.items())])
        return self.figures / self.run.name / self.name / f"{shown}.jsonl"

    def rows(self) -> dict[int, dict]:
        """The figures so far, by the number of edits."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        rows = list(map(json.loads, lines))
        if {row.get("code") for row in rows} - {digest()}:
            say_once(
                "lab/counterfact.py, lab/editors.py or training/writing.py has changed since some "
                f"figures in {self.figures} were begun: delete those that may be others now"
            )
        return {row["edits"]: row for row in rows}

    def measure(self) -> None:
        """Write facts, and ask all of them at the points. The weights are kept beside the figures,
        to go on with, and nothing else that a method may have changed."""
        torch.set_num_threads(1)
        rows = self.rows()
        missing = {*self.points} - {*rows}
        if not missing:
            return
        assert not any(n % self.size for n in self.points), f"{self.points} by {self.size}"
        bench = copy.deepcopy(open_bench(self.run, self.data_dir))
        records = bench.records[self.first :][: max(self.points)]
        assert len(records) == max(self.points), f"{len(records)} records, not {self.points}"
        requests = list(map(bench.request, records))
        kept = self.path.with_suffix(".pt")
        n, code = 0, digest()
        if kept.exists():
            done, weights, *begun = torch.load(kept)
            if done < min(missing):  # else a point was added
                n, code = done, (begun or [None])[0]  # which earlier files do not have
                bench.model.load_state_dict(weights)
        while n < max(missing):
            bench.editor.written = requests[:n]
            started = time.process_time()
            some = requests[n : n + self.size]
            METHODS[self.name].function(bench.editor, some, **self.setting)
            seconds = time.process_time() - started
            n += self.size
            if n in self.points:
                figures = bench.ask(records[:n])
                rows[n] = {"edits": n, "seconds": seconds, "code": code, **figures}
                with atomic(self.path) as temporary:
                    temporary.write_text("".join(f"{json.dumps(row)}\n" for row in rows.values()))
            if n % KEPT == 0:
                with atomic(kept) as temporary:
                    torch.save((n, bench.model.state_dict(), code), temporary)


def end_with_parent() -> None:
    """End this process when the one that started it ends, in whatever way: the next command goes on
    with its files."""

    def watch_parent() -> None:
        parent_process().join()
        os._exit(1)

    Thread(target=watch_parent, daemon=True).start()


def measure_all(trials: list[Trial], cores: int) -> None:
    """Measure trials, one on each core at a time; on 0 cores, in this process."""
    waiting = {trial.path: trial for trial in trials if {*trial.points} - {*trial.rows()}}
    if not cores:
        for trial in waiting.values():
            trial.measure()
        return
    with ProcessPoolExecutor(cores, get_context("spawn"), end_with_parent) as pool:
        try:
            running = [pool.submit(trial.measure) for trial in waiting.values()]
            done = as_completed(running)
            for future in tqdm(done, f"trials, {cores} at a time", len(running), unit="trial"):
                future.result()
        except BaseException:
            for child in active_children():
                child.terminate()
            raise


def figures(rows: list[dict]) -> dict[str, float | None]:
    """What a table shows of a seed, by title: means over all records that were asked about."""
    records = [record for row in rows for record in row["records"]]

    def score(kind: str, which: int) -> float | None:
        found = [record[kind][which] for record in records if kind in record]
        return fmean(found) if found else None

    found = {}
    for which, how in enumerate(("nats", "greedy")):
        for kind in SCORES:
            found[f"{kind}, {how}"] = score(kind, which)
        found[f"S, {how}"] = harmonic_mean([found[f"{kind}, {how}"] for kind in SCORES])
    for kind in MORE:
        found[kind] = score(kind, 1)
    for title in ("other countries", *NUMBERS):
        found[title] = fmean(row[title] for row in rows)
    return found


def search(tried: list[Trial]) -> dict:
    """The setting with which the names' facts, theirs and their neighbors', are answered best in
    greedy decoding, after some edits in sequence."""

    def answered(trial: Trial) -> float:
        found = figures([trial.rows()[N_SEARCHED]])
        return harmonic_mean([*(found[f"{kind}, greedy"] for kind in SCORES), found["others"]])

    return max(tried, key=answered).setting


def grouped(trials: list[Trial]) -> Groups:
    """The rows of each model by method, number of edits, and edits at once."""
    groups = {}
    for trial in trials:
        rows = trial.rows()
        for n in trial.points:
            models = groups.setdefault((trial.name, n, trial.size), {})
            models.setdefault(trial.run, []).append(rows[n])
    return {group: list(models.values()) for group, models in groups.items()}


def of_shared_names(row: dict) -> dict:
    """What was asked about names that share tokens with others."""
    return {**row, "records": [record for record in row["records"] if "namesakes" in record]}


def table(groups: Groups) -> str:
    rows = []
    for (name, n, size), models in groups.items():
        row = {"method": name, "edits": f"{n} by {size}" if size > 1 else str(n)}
        found = [figures(rows) for rows in models]
        for title in found[0]:
            form = ".3f" if title in NUMBERS else ".1%"
            row[title] = interval(form, [of_model[title] for of_model in found])
        rows.append(row)
    return markdown(rows)


def picture(groups: Groups) -> plt.Figure:
    """Scores over the number of edits in sequence: a row of panels a model, a line a method."""
    panels = {
        "S, greedy": "S: new facts and neighbors",
        "others": "other facts of the names",
        "other countries": "other countries",
    }
    figure, axes = plt.subplots(
        len(MODELS), 3, figsize=(10, 3 * len(MODELS)), sharex=True, sharey=True, squeeze=False
    )
    colors = {}
    for row, model in zip(axes, MODELS, strict=True):
        for name in METHODS:
            if METHODS[name].model != model:
                continue
            method = name.partition(", ")[0]
            color = colors.setdefault(method, f"C{len(colors)}")
            line = "o:" if name.endswith("held") else "o-"
            label = name.replace(f", {model}", "")
            # Single edits are no sequences.
            points = [n for other, n, size in groups if other == name and size == 1 < n]
            found = [list(map(figures, groups[name, n, 1])) for n in points]  # of each seed
            for axis, score in zip(row, panels, strict=True):
                means = [100 * fmean(of_seed[score] for of_seed in seeds) for seeds in found]
                axis.plot(points, means, line, color=color, ms=3, label=label)
        row[0].set(ylabel=f"{model}: whole answers, %", ylim=(-2, 102), xscale="log")
        row[2].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8)
    for axis, title in zip(axes[0], panels.values(), strict=True):
        axis.set_title(title)
    for axis in axes[-1]:
        axis.set_xlabel("edits in sequence")
        axis.xaxis.set_major_formatter("{x:.0f}")
    return figure


def report(experiment: Experiment, groups: Groups) -> None:
    """Tables and a picture of what was measured."""
    print(table(groups))
    shared = {}
    for group, models in groups.items():
        sharing = [[of_shared_names(row) for row in rows] for rows in models]
        if all(row["records"] for rows in sharing for row in rows):
            shared[group] = sharing
    if shared:
        print(f"\nNames that share tokens:\n\n{table(shared)}")
    experiment.picture("counterfact", picture(groups))


def counterfact(experiment: Experiment) -> None:
    experiment.need_countries()
    stages, numbers, cores = STAGES, COUNTED, experiment.jobs
    if experiment.quick:  # trials take less time than Python takes to start
        stages, numbers, cores = QUICK, COUNTED[:1], 0
    if experiment.seeds:
        numbers = experiment.numbers
    seeds = [*numbers] if experiment.quick else [*numbers, SEARCHED]
    folders = experiment.train(MODELS, seeds)

    def trial(name: str, setting: dict, seed: int, *how) -> Trial:
        run = folders[METHODS[name].model][seeds.index(seed)]
        kept = experiment.out_dir / "figures/counterfact"
        return Trial(run, experiment.data_dir, kept, name, setting, *how)

    best = {name: method.settings[0] for name, method in METHODS.items()}
    if not experiment.quick:
        tried = {
            name: [trial(name, setting, SEARCHED, (N_SEARCHED,)) for setting in method.settings]
            for name, method in METHODS.items()
        }
        measure_all([trial for of_method in tried.values() for trial in of_method], cores)
        best = {name: search(of_method) for name, of_method in tried.items()}
        chosen = [{"method": name, "setting": str(best[name])} for name in METHODS]
        print(f"{markdown(chosen)}\n", flush=True)

    trials = []
    for name, method in METHODS.items():
        for firsts, size, points in stages:
            if size == 1 or method.batches:
                for seed, first in product(numbers, firsts):
                    trials.append(trial(name, best[name], seed, points, size, first))
    measure_all(trials, cores)
    report(experiment, grouped(trials))
