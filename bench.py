"""Speed and memory, always two things side by side in one run.

    python bench.py all --quick                          # everything small, in a minute or two
    python bench.py train                                # kinds of layers, eager and compiled
    torchrun --nproc_per_node=2 bench.py train           # ... by two processes together
    python bench.py decode                               # one token at a time, and without cache
    python bench.py attention --plot attention.png       # full, windows, counts: by length
    python bench.py vocab --plot vocab.png               # what a larger vocabulary costs
    python bench.py offload                              # where tables live: device, RAM, disk
    python bench.py offload --table_gib 32 --dir /big    # larger than memory, in a sparse file

Contenders take turns, so what slows the machine for a while slows all of them. Speeds are medians
over the turns; ratios are medians of the ratios to a baseline within a turn. Token ids are random
with Zipf's frequencies. Default sizes are for two CPU cores: give larger ones on a GPU.

The matrix rate is what this machine reaches in one large matrix product, the copy rate what it
reads when it adds up a large tensor. `vocab` updates rows that a batch read, or whole tables by
AdamW, as `nn.Embedding` would. The head, which costs V either way, is left out of both, and shown
beside them. Memory: weights, gradients and optimizer states.
"""

import mmap
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.utils.benchmark import Timer, timer
from tqdm import tqdm

from attention import KVCache
from common import UserError, add_flags, check_ranges, flag, make_parser, pick_device, run
from model import Decoder, ModelConfig
from offload import OffloadedTables, make_tables
from tables import sharded
from tables.storage import DiskStorage
from tables.tables import ResidentTables, StoredTables, Tables
from training import ranks
from training.checkpoints import device_flag
from training.optimizer import Optimizer
from training.records import check_picture, markdown, save_figure
from training.settings import Settings

KINDS = {
    "dense": dict(ffn="dense"),
    "STEM, third": dict(stem_layers="third"),
    "STEM, all": dict(stem_layers="all"),
    "Embformer": dict(ffn="embformer"),
}
QUICK = dict(n_layer=3, n_head=2, n_embd=32, vocab_size=500, block_size=64, batch_size=2, rounds=2)
# How to print a column, by its first word: others as whole numbers.
FORMATS = {"over": "{:.2f}", "of": "{:.0%}", "GB/s": "{:.1f}", "GiB": "{:.2f}"}
FORMATS |= dict.fromkeys(("decode", "prefill", "train"), "{0[tok/s]:,.0f} ({0[ratio]:.1%})")


@dataclass
class Bench:
    device: str = device_flag()
    n_layer: int = flag(6, "layers, all but the first with a table", must="at least 1")
    n_head: int = flag(6, "attention heads", must="at least 1")
    n_embd: int = flag(192, "width of the residual stream", must="at least 1")
    vocab_size: int = flag(6400, "rows of a table", must="at least 1")
    block_size: int = flag(256, "context length in tokens", must="at least 1")
    batch_size: int = flag(8, "sequences in a training step", must="at least 1")
    rounds: int = flag(7, "turns that each contender takes", must="at least 1")
    quick: bool = flag(False, "small models, two turns, nothing compiled: does it run?")
    plot: Path | None = flag(None, "picture of attention, or vocab: .png, .svg or .pdf")
    table_gib: float | None = flag(None, "GiB of rows in a sparse file", must="a positive number")
    dir: Path | None = flag(None, "folder on the disk to measure", shown="a temporary one")

    def __post_init__(self) -> None:
        check_ranges(self)
        self.on = pick_device(self.device)
        self.cuda = self.on.type == "cuda"

    def model(self, **more) -> ModelConfig:
        names = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")
        try:
            return ModelConfig(**{name: getattr(self, name) for name in names}, **more)
        except ValueError as error:
            raise UserError(f"--{error}") from None


def zipf(shape: tuple[int, ...], vocab_size: int, seed: int) -> Tensor:
    """Ids of frequency 1 / (id + 1): the logarithm of id + 1 is uniform."""
    u = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ((vocab_size + 1) ** u).long().clamp_(1, vocab_size) - 1


@dataclass
class Contender:
    """A model, and what it does in each turn."""

    bench: Bench
    config: ModelConfig
    task: Callable[["Contender"], int]  # does it, and returns the number of tokens
    over: dict[str, str] = field(default_factory=dict)  # baseline of a ratio, by its column
    adapt: Callable[[Decoder], object] = lambda model: None  # changes the new model
    table_optimizer: str = "rowwise"
    tables: Callable[..., Tables] = ResidentTables
    cold: bool = False  # whether each turn has to read table files from the disk
    optimizer: Optimizer | None = None  # what trains has one
    batches: int = 0  # drawn so far
    cache: KVCache | None = None  # what reads on has one,
    kept: int = 0  # and these bytes in it when its context is full

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = ranks.make_model(self.config, self.tables).to(self.bench.on)
        self.adapt(self.model)

    def batch(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Fresh ids, and those that tables are looked up under: others only with --table_gib."""
        self.batches += 1
        ids, n_rows = zipf(shape, self.bench.vocab_size, self.batches), self.model.tables.vocab_size
        return ids, ids if n_rows == self.config.vocab_size else zipf(shape, n_rows, self.batches)

    def turn(self) -> float:  # tokens per second
        if self.cold:
            drop_pages(self.model.tables.storage)
        start = timer()
        tokens = self.task(self)
        if hasattr(self.model.tables, "ring"):
            self.model.tables.ring.synchronize()  # transfers under way belong to this turn
        return tokens / (timer() - start)


def interleaved_timing(contenders: dict[str, Contender], rounds: int, task=None) -> dict[str, dict]:
    """The tok/s of each contender, at a task or its own, and its ratios to its baselines. They take
    turns in an order that changes, as a turn leaves caches and disk busy. The first warms up."""
    for it in contenders.values() if task else ():
        it.task = task
    rates, order = {name: [] for name in contenders}, random.Random(0)  # the same on all ranks
    for _ in tqdm(range(1 + rounds), desc="taking turns", unit="turn"):
        for name in order.sample(list(contenders), len(contenders)):
            rates[name].append(contenders[name].turn())
    rates = {name: np.array(each[1:]) for name, each in rates.items()}  # [rounds] each
    rows = {}
    for name, it in contenders.items():
        rows[name] = {"tok/s": np.median(rates[name])}
        rows[name] |= {column: np.median(rates[name] / rates[to]) for column, to in it.over.items()}
    return rows


def show(what: str, rows: dict[str, dict]) -> dict[str, dict]:
    def cells(row: dict) -> dict[str, str]:
        return {c: FORMATS.get(c.split()[0], "{:,.0f}").format(v) for c, v in row.items()}

    print("\n" + markdown([{what: name, **cells(row)} for name, row in rows.items()]))
    return rows


def calls_per_second(statement: str, x: Tensor) -> float:
    call = Timer(statement, globals=dict(x=x), num_threads=torch.get_num_threads())
    return 1 / call.blocked_autorange().median


def train(it: Contender, steps: int = 1) -> int:
    model, device = it.model.train(), it.bench.on
    if it.optimizer is None:
        settings = Settings(learning_rate=1e-3, table_optimizer=it.table_optimizer)
        it.optimizer = Optimizer(model, settings)
    batches = [it.batch(it.bench.batch_size, it.bench.block_size + 1) for _ in range(steps)]
    for number, batch in enumerate(batches, 1):
        ids, table_ids = (each[ranks.rank :: ranks.size] for each in batch)
        targets = ids[:, 1:] % len(model.head_weight)  # vocab: a small head has fewer classes
        with torch.autocast(device.type, torch.bfloat16, enabled=it.bench.cuda):
            _, loss = model(ids[:, :-1], targets, table_ids=table_ids[:, :-1])
        if number < steps:
            model.tables.prefetch(batches[number][1][:, :-1])
        loss.backward()
        it.optimizer.step(1.0)
        loss.item()
    return steps * it.bench.batch_size * it.bench.block_size


def bytes_sent(it: Contender) -> dict[str, float]:
    """To other ranks in one more step, counted and by the formula, as columns of a row."""
    sharded.sent.clear()
    train(it)
    it.batches -= 1  # to draw the same ids again
    ids = it.batch(it.bench.batch_size, it.bench.block_size + 1)[1][:, :-1]
    n = max(len(ids[rank :: ranks.size].unique()) for rank in range(ranks.size))
    return {"bytes sent": sharded.sent.total(), "by formula": ranks.bytes_per_step(it.model, n)}


@torch.inference_mode()
def decode(it: Contender, batch: int, prompt: int, new: int, cached: bool = True) -> int:
    """Read a prompt, then given tokens: a model that knows nothing would repeat itself."""
    model, block_size = it.model.eval(), it.bench.block_size
    prompt = min(prompt, max(1, block_size // 3))
    new = min(new, block_size - prompt + 1)  # the last one is not read
    ids, table_ids = (t.to(it.bench.on) for t in it.batch(batch, prompt + new))
    cache = KVCache(it.config, batch, it.bench.on, torch.float32) if cached else None
    for end in range(prompt, prompt + new):
        part = slice(cache.length if cache else 0, end)
        logits, _ = model(ids[:, part], table_ids=table_ids[:, part], cache=cache, last_only=True)
        logits[:, -1].argmax(-1)
    return batch * new


@torch.inference_mode()
def prefill(it: Contender) -> int:
    ids, table_ids = it.batch(it.bench.batch_size, it.bench.block_size)
    it.model.eval()(ids.to(it.bench.on), table_ids=table_ids, last_only=True)
    return ids.numel()


@torch.inference_mode()
def read_on(it: Contender) -> int:
    """Read the last 16 tokens of the context one by one; before the first turn, all of it."""
    ids, model = it.batch(1, it.bench.block_size)[0].to(it.bench.on), it.model.eval()
    if it.cache is None:
        it.cache = KVCache(it.config, 1, it.bench.on, torch.float32)
        model(ids, cache=it.cache, last_only=True)
        it.kept = sum(x.nbytes for x in (*it.cache.k, *it.cache.v, it.cache.seen, it.cache.counts))
    last = ids[:, -16:].split(1, dim=1)
    it.cache.length = ids.shape[1] - len(last)
    for token in last:
        model(token, cache=it.cache)
    return len(last)


def bench_train(bench: Bench) -> dict:
    ways = {"": Decoder.train}
    if not bench.quick:
        ways[", compiled"] = lambda model: [block.compile() for block in model.blocks]
    contenders = {}
    for kind, way in product(KINDS, ways):
        over, config = {"over dense": "dense" + way, "over eager": kind}, bench.model(**KINDS[kind])
        contenders[kind + way] = Contender(bench, config, train, over, ways[way])
    rows = interleaved_timing(contenders, bench.rounds)
    n = 256 if bench.quick else 8192 if bench.cuda else 2048
    dtype = torch.bfloat16 if bench.cuda else torch.float32
    most = 2 * n**3 * calls_per_second("x @ x", torch.randn(n, n, device=bench.on, dtype=dtype))
    for name, row in rows.items():
        flops = row["tok/s"] * 3 * contenders[name].model.sizes()["flops_per_token"]
        row |= {"GFLOP/s": flops / 1e9, "of the matrix rate": flops / most / ranks.size}
        row |= bytes_sent(contenders[name]) if ranks.size > 1 else {}
    return show("train", rows)


def bench_decode(bench: Bench) -> dict:
    eager = Decoder.eval if bench.cuda else Decoder.use_column_major_weights
    ways = {"": eager, ", no cache": eager}
    if not bench.quick:
        ways[", compiled"] = lambda model: eager(model).compile_steps()
    contenders = {}
    for batch, kind, way in product((1, 8), KINDS, ways):
        end, cached = f", batch {batch}", "no cache" not in way
        if cached or batch == 1:  # without a cache one sequence shows what it is worth
            task = partial(decode, batch=batch, prompt=64, new=96, cached=cached)
            over = {"over dense": "dense" + way + end, "over eager, cached": kind + end}
            config = bench.model(**KINDS[kind])
            contenders[kind + way + end] = Contender(bench, config, task, over, ways[way])
    rows, x = interleaved_timing(contenders, bench.rounds), torch.ones(1 << 26, device=bench.on)
    most = x.nbytes * calls_per_second("x.sum()", x)
    for name, row in rows.items():
        it = contenders[name]
        read = row["tok/s"] * 4 * it.model.sizes()["active"] / it.task.keywords["batch"]
        row |= {"GB/s": read / 1e9, "of the copy rate": read / most}
    return show("decode", rows)


def bench_vocab(bench: Bench) -> dict:
    def small_head(model: Decoder) -> None:
        model.head = nn.Linear(bench.n_embd, 64, bias=False, device=bench.on)

    ways = {"rows": dict(adapt=small_head), "rows, and the head": {}}
    ways["whole tables"] = dict(adapt=small_head, table_optimizer="adamw")
    base, rows = bench.model(stem_layers="all"), {}
    sizes, first = [bench.vocab_size * n for n in (1, 5, 20)], f"rows, V = {bench.vocab_size:,}"
    for vocab_size in sizes:
        end, config = f", V = {vocab_size:,}", replace(base, vocab_size=vocab_size)
        over = {"over whole tables": "whole tables" + end, f"over {first}": first}
        contenders = {first: Contender(bench, base, train, **ways["rows"])}
        for way, more in ways.items():
            contenders[way + end] = Contender(bench, config, train, over, **more)
        measured = interleaved_timing(contenders, bench.rounds)
        for name in [way + end for way in ways]:
            it, row = contenders[name], measured[name]
            ms = 1e3 * bench.batch_size * bench.block_size / row.pop("tok/s")
            by_adamw = sum(p.numel() for g in it.optimizer.adamw.param_groups for p in g["params"])
            numbers = 3 * it.model.sizes()["total"] + by_adamw  # weights, m, v; gradients
            rows[name] = {"ms": ms, **row, "GiB": 4 * numbers / 2**30}
    if bench.plot:
        panels = {"ms": "training step (ms)", "GiB": "memory (GiB)"}
        plot(bench.plot, rows, panels, "{}, V = {:,}", list(ways), sizes)
    return show("vocab", rows)


def plot(path: Path, rows: dict, panels: dict, form: str, lines: list, sizes: list[int]) -> None:
    """Draw columns, by title, of the rows of these lines and sizes, whose names have this form."""
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 4), layout="constrained")
    for ax, (column, title) in zip(axes, panels.items(), strict=True):
        for line in lines:
            values = [rows[form.format(line, size)][column] for size in sizes]
            values = [cell["tok/s"] if isinstance(cell, dict) else cell for cell in values]
            ax.loglog(sizes, values, ".-", label=line)
        ax.set(xlabel=form[4:5], ylabel=title, xticks=sizes, xticklabels=[f"{n:,}" for n in sizes])
        ax.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.tick_params(which="minor", labelbottom=False, labelleft=False)
        ax.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    save_figure(figure, path)


def bench_attention(bench: Bench) -> dict:
    names = ("full", "window", "count", "window,window,count")
    kinds = {name: dict(ffn="embformer", attention=name) for name in names}
    kinds |= {name: KINDS[name] for name in ("dense", "STEM, all")}
    tasks = {"train": train, "prefill": prefill, "decode": read_on}
    rows, lengths = {}, [bench.block_size * n for n in ((1, 2) if bench.quick else (1, 4, 16))]
    for n in lengths:
        one = replace(bench, block_size=n, batch_size=max(1, bench.batch_size * lengths[0] // n))
        over, configs = {"ratio": f"full, T = {n:,}"}, {k: one.model(**v) for k, v in kinds.items()}
        every = {f"{k}, T = {n:,}": Contender(one, v, train, over) for k, v in configs.items()}
        timed = {task: interleaved_timing(every, bench.rounds, do) for task, do in tasks.items()}
        for name, it in every.items():
            rows[name] = {task: timed[task][name] for task in tasks}
            rows[name]["KiB of cache"] = it.kept / 1024
    if bench.plot:
        panels = {task: f"{task} (tok/s)" for task in tasks} | {"KiB of cache": "cache (KiB)"}
        plot(bench.plot, rows, panels, "{}, T = {:,}", list(kinds), lengths)
    return show("attention", rows)


def bench_offload(bench: Bench) -> dict:
    tasks = {
        "decode 1": partial(decode, batch=1, prompt=1, new=128),
        "decode 8": partial(decode, batch=8, prompt=1, new=64),
        "prefill": prefill,
        # The last update of a turn has nothing to hide behind: more steps where steps are short.
        "train": partial(train, steps=5 if bench.cuda else 2),
    }
    places = {"resident": "none", "cpu": "cpu", "disk, warm": "disk", "disk, cold": "disk"}
    if bench.table_gib:
        places = {"resident": "none", f"disk, {bench.table_gib:g} GiB of rows": "disk"}
    config, contenders, rows = bench.model(stem_layers="all"), {}, {place: {} for place in places}
    with tempfile.TemporaryDirectory(dir=bench.dir, prefix="bench-") as folder:
        for place, offload in places.items():
            live, over = Path(folder) / place, {"ratio": "resident"}
            tables = make_tables(offload, bench.on, torch.float32, live=live, fresh=True)
            if bench.table_gib and offload == "disk":
                tables = partial(sparse_tables, bench, live)
            more = dict(tables=tables, cold=place == "disk, cold")
            contenders[place] = Contender(bench, config, prefill, over, **more)
        for task, do in tasks.items():
            for place, row in interleaved_timing(contenders, bench.rounds, do).items():
                rows[place][task] = row
    return show("tables", rows)


def sparse_tables(bench: Bench, folder: Path, n_table: int, _: int, width: int) -> Tables:
    """Tables of --table_gib, whatever the vocabulary, in files that take no room."""
    n_row = int(bench.table_gib * 2**30) // (n_table * width * 4)
    storage = DiskStorage.create(folder, (n_row, n_table, width), torch.float32, sparse=True)
    return (OffloadedTables if bench.cuda else StoredTables)(storage, bench.on)


def drop_pages(storage: DiskStorage) -> None:
    """Make the next read of tables go to the disk, where the system lets us (Linux)."""
    for name, pages in storage.maps.items() if hasattr(os, "posix_fadvise") else ():
        pages.flush()  # only clean pages can go,
        pages.madvise(mmap.MADV_DONTNEED)  # and only pages that are not mapped
        with open(storage.folder / name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


TABLES = dict(train=bench_train, decode=bench_decode, attention=bench_attention)
TABLES |= dict(vocab=bench_vocab, offload=bench_offload)


@ranks.joined()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=(*TABLES, "all"), help="what to compare")
    add_flags(parser, Bench)
    flags = vars(parser.parse_args())
    what = flags.pop("what")
    check_picture(flags.get("plot"))
    torch.set_float32_matmul_precision("high")  # TF32 where there is, as in training
    bench = Bench(**(QUICK if "quick" in flags else {}) | flags)
    if ranks.size > 1 and (what != "train" or bench.batch_size % ranks.size):
        raise UserError(f"--nproc_per_node: train, and a --batch_size that {ranks.size} divides")
    for name in TABLES if what == "all" else [what]:
        TABLES[name](bench)


if __name__ == "__main__":
    run(main)
