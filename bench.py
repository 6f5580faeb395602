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

import copy
import mmap
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer, timer
from tqdm import tqdm

from analysis.pictures import check_picture, markdown, plt, save_figure
from attention import KVCache
from common import (
    UserError,
    add_flags,
    check_ranges,
    flag,
    has_bfloat16,
    make_parser,
    pick_device,
    run,
)
from config import ModelConfig
from model import Decoder
from offload import OffloadedTables, make_tables
from tables.storage import DiskStorage
from tables.tables import ResidentTables, StoredTables, Tables
from training import ranks
from training.optimizer import Optimizer
from training.settings import Settings, device_flag

KINDS = {
    "dense": {"ffn": "dense"},
    "STEM, third": {"ffn": "stem", "stem_layers": "third"},
    "STEM, all": {"ffn": "stem", "stem_layers": "all"},
    "Embformer": {"ffn": "embformer"},
}
QUICK = {
    "n_layer": 3,
    "n_head": 2,
    "n_embd": 32,
    "vocab_size": 500,
    "block_size": 64,
    "batch_size": 2,
    "rounds": 2,
}
FORMATS = {  # of columns
    "tok/s": ",.0f",
    "ms": ",.0f",
    "GFLOP/s": ",.0f",
    "GB/s": ".1f",
    "GiB": ".2f",
    "KiB of cache": ",.0f",
    "of the matrix rate": ".0%",
    "of the copy rate": ".0%",
    "over dense": ".2f",
    "over eager": ".2f",
    "over eager, cached": ".2f",
    "over full": ".2f",
    "over whole tables": ".2f",
    "over the smallest V": ".2f",
}


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
        if self.dir is not None and not self.dir.is_dir():
            raise UserError(f"--dir {self.dir} is not a folder")
        self.on = pick_device(self.device)
        self.cuda = self.on.type == "cuda"
        # What a GPU multiplies in: older ones have no bfloat16, and emulate it.
        self.dtype = torch.float32
        if self.cuda:
            self.dtype = torch.bfloat16 if has_bfloat16(self.on) else torch.float16

    def model(self, **flags) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocab_size,
            block_size=self.block_size,
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            **flags,
        )


def zipf(shape: tuple[int, ...], vocab_size: int, seed: int) -> Tensor:
    """Ids of frequency 1 / (id + 1): the logarithm of id + 1 is uniform."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(shape, generator=generator, dtype=torch.float64)
    return ((vocab_size + 1) ** u).long().clamp_(1, vocab_size) - 1


@dataclass
class Contender:
    """A model, and what it does in each turn."""

    bench: Bench
    config: ModelConfig
    task: Callable[["Contender"], int]  # does it, and returns the number of tokens
    over: dict[str, str] = field(default_factory=dict)  # baseline of a ratio, by its column
    table_optimizer: str = Settings.table_optimizer
    tables: Callable[..., Tables] = ResidentTables
    cold: bool = False  # whether each turn has to read table files from the disk
    optimizer: Optimizer | None = None  # what trains has one
    ids: Tensor | None = None  # what reads on has a context [1, T], a cache of all but its end,
    prefilled: KVCache | None = None
    cache: KVCache | None = None  # and a copy that each turn fills
    batches: int = 0  # drawn so far

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = ranks.make_model(self.config, self.tables).to(self.bench.on)

    def batch(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Fresh ids, and those that tables are looked up under: others only with --table_gib."""
        self.batches += 1
        ids = zipf(shape, self.config.vocab_size, self.batches)
        n_row = self.model.tables.vocab_size
        if n_row == self.config.vocab_size:
            return ids, ids
        return ids, zipf(shape, n_row, self.batches)

    def turn(self) -> float:
        """Tokens per second."""
        if self.cold:
            drop_pages(self.model.tables.storage)
        if self.task is read_on:
            prefill_cache(self)
        start = timer()
        tokens = self.task(self)
        if hasattr(self.model.tables, "ring"):
            self.model.tables.ring.synchronize()  # transfers under way belong to this turn
        return tokens / (timer() - start)


def interleaved_timing(
    contenders: dict[str, Contender], rounds: int, task: Callable | None = None
) -> dict[str, dict[str, float]]:
    """The tok/s of each contender, at a task or its own, and its ratios to its baselines. They take
    turns in an order that changes, as a turn leaves caches and disk busy. The first warms up."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    order = random.Random(0)  # the same on all ranks
    for contender in contenders.values():
        contender.task = task or contender.task
    for _ in tqdm(range(1 + rounds), desc="taking turns", unit="turn"):
        for name in order.sample(list(contenders), len(contenders)):
            rates[name].append(contenders[name].turn())
    rows = {}
    for name, contender in contenders.items():
        rates_here = np.array(rates[name][1:])  # [rounds]
        rows[name] = {"tok/s": np.median(rates_here)}
        for column, baseline in contender.over.items():
            rows[name][column] = np.median(rates_here / np.array(rates[baseline][1:]))
    return rows


def show(title: str, rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Print rows by name as a table. A cell is a number or, of a task, tok/s and ratio."""
    table = []
    for name, row in rows.items():
        cells = {title: name}
        for column, value in row.items():
            if isinstance(value, dict):
                cells[column] = f"{value['tok/s']:,.0f} ({value['ratio']:.1%})"
            else:
                cells[column] = format(value, FORMATS[column])
        table.append(cells)
    print("\n" + markdown(table))
    return rows


def calls_per_second(statement: str, x: Tensor) -> float:
    call = Timer(statement, globals={"x": x}, num_threads=torch.get_num_threads())
    return 1 / call.blocked_autorange().median


# --- tasks ---


def train(contender: Contender, steps: int = 1) -> int:
    bench = contender.bench
    model = contender.model.train()
    if contender.optimizer is None:
        settings = Settings(learning_rate=1e-3, table_optimizer=contender.table_optimizer)
        contender.optimizer = Optimizer(model, settings)
    shape = (bench.batch_size, bench.block_size + 1)
    batches = [contender.batch(*shape) for _ in range(steps)]
    for number, batch in enumerate(batches, 1):
        ids, table_ids = (each[ranks.rank :: ranks.size] for each in batch)
        targets = ids[:, 1:] % len(model.head_weight)  # vocab: a small head has fewer classes
        with torch.autocast(bench.on.type, bench.dtype, enabled=bench.cuda):
            _, loss = model(ids[:, :-1], targets, table_ids=table_ids[:, :-1])
        if number < steps:
            model.tables.prefetch(batches[number][1][:, :-1])
        loss.backward()
        contender.optimizer.step(1.0)
        loss.item()  # waits for the device
    return steps * bench.batch_size * bench.block_size


@torch.inference_mode()
def prefill(contender: Contender) -> int:
    bench = contender.bench
    ids, table_ids = contender.batch(bench.batch_size, bench.block_size)
    contender.model.eval()(ids.to(bench.on), table_ids=table_ids, last_only=True)
    if bench.cuda:
        torch.cuda.synchronize()
    return ids.numel()


@torch.inference_mode()
def decode(contender: Contender, batch: int, prompt: int, new: int, cached: bool = True) -> int:
    """Read a prompt, then given tokens: a model that knows nothing would repeat itself."""
    block_size = contender.bench.block_size
    model = contender.model.eval()
    prompt = min(prompt, max(1, block_size // 3))
    new = min(new, block_size - prompt + 1)  # the last one is not read
    ids, table_ids = contender.batch(batch, prompt + new)
    ids = ids.to(contender.bench.on)
    table_ids = table_ids.to(contender.bench.on)
    cache = model.make_cache(batch) if cached else None
    for end in range(prompt, prompt + new):
        part = slice(cache.length if cache else 0, end)
        logits, _ = model(ids[:, part], table_ids=table_ids[:, part], cache=cache, last_only=True)
        logits[:, -1].argmax(-1).tolist()  # waits for the device, as sampling does
    return batch * new


READ_ON = 16  # tokens


@torch.inference_mode()
def prefill_cache(contender: Contender) -> None:
    """Fill a cache with all of the context but the tokens that `read_on` reads."""
    model = contender.model.eval()
    if contender.prefilled is None:
        contender.ids, _ = contender.batch(1, contender.bench.block_size)
        contender.ids = contender.ids.to(contender.bench.on)
        contender.prefilled = model.make_cache(1)
        model(contender.ids[:, :-READ_ON], cache=contender.prefilled, last_only=True)
    contender.cache = copy.deepcopy(contender.prefilled)


@torch.inference_mode()
def read_on(contender: Contender) -> int:
    """Read the last tokens of the context one by one."""
    for token in contender.ids[:, -READ_ON:].split(1, dim=1):
        logits, _ = contender.model(token, cache=contender.cache)
        logits.argmax(-1).tolist()  # waits for the device
    return READ_ON


# --- memory ---


def tensors(value: Any) -> list[Tensor]:
    """All tensors in a dictionary, a list or an object, whatever their names."""
    if isinstance(value, Tensor):
        return [value]
    if hasattr(value, "__dict__"):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    return [tensor for part in value for tensor in tensors(part)]


def cache_bytes(cache: KVCache) -> int:
    """Bytes kept for a sequence: not the angles of positions, nor their numbers."""
    kept = sum(tensor.nbytes for tensor in tensors(cache) if tensor.dim() > 1)
    return kept - cache.angles.nbytes


def training_bytes(contender: Contender) -> int:
    """Bytes of weights, of gradients that autograd keeps, and of optimizer states."""
    weights = list(contender.model.parameters())
    gradients = [weight for weight in weights if weight.requires_grad]
    states = tensors(contender.optimizer.state_dict())
    return sum(tensor.nbytes for tensor in weights + gradients + states)


# --- what is compared ---


def bench_train(bench: Bench) -> dict:
    contenders = {}
    for kind, flags in KINDS.items():
        for way in ("",) if bench.quick else ("", ", compiled"):
            over = {"over dense": "dense" + way, "over eager": kind}
            contender = Contender(bench, bench.model(**flags), train, over)
            if way == ", compiled":
                for block in contender.model.blocks:
                    block.compile()
            contenders[kind + way] = contender
    rows = interleaved_timing(contenders, bench.rounds)

    n = 256 if bench.quick else 8192 if bench.cuda else 2048
    matrix = torch.randn(n, n, device=bench.on, dtype=bench.dtype)
    matrix_rate = 2 * n**3 * calls_per_second("x @ x", matrix)
    for name, row in rows.items():
        flops = row["tok/s"] * 3 * contenders[name].model.sizes()["flops_per_token"]
        row["GFLOP/s"] = flops / 1e9
        row["of the matrix rate"] = flops / matrix_rate / ranks.size
    return show("train", rows)


def prepare_to_decode(model: Decoder) -> None:
    """Weights as sample.py has them: in bfloat16 where a GPU multiplies it; on a CPU by columns."""
    if model.device.type == "cpu":
        model.use_column_major_weights()
    elif has_bfloat16(model.device):
        for name, module in model.named_children():
            if name != "tables":
                module.to(torch.bfloat16)


def bench_decode(bench: Bench) -> dict:
    # Without a cache one sequence shows what it is worth.
    ways = [("", 1), ("", 8), (", no cache", 1)]
    if not bench.quick:
        ways += [(", compiled", 1), (", compiled", 8)]
    contenders = {}
    for kind, flags in KINDS.items():
        for way, batch in ways:
            end = f", batch {batch}"
            cached = way != ", no cache"
            task = partial(decode, batch=batch, prompt=64, new=96, cached=cached)
            over = {"over dense": f"dense{way}{end}", "over eager, cached": kind + end}
            contender = Contender(bench, bench.model(**flags), task, over)
            prepare_to_decode(contender.model)
            if way == ", compiled":
                contender.model.compile_steps()
            contenders[kind + way + end] = contender
    rows = interleaved_timing(contenders, bench.rounds)

    ones = torch.ones(1 << 26, device=bench.on)
    copy_rate = ones.nbytes * calls_per_second("x.sum()", ones)
    for name, row in rows.items():
        contender = contenders[name]
        weight = contender.model.head_weight.element_size() * contender.model.sizes()["active"]
        read = row["tok/s"] * weight / contender.task.keywords["batch"]
        row["GB/s"] = read / 1e9
        row["of the copy rate"] = read / copy_rate
    return show("decode", rows)


def bench_vocab(bench: Bench) -> dict:
    config = bench.model(stem_layers="all")
    sizes = [bench.vocab_size, 5 * bench.vocab_size, 20 * bench.vocab_size]
    smallest = f"rows, V = {sizes[0]:,}"
    rows = {}
    for vocab_size in sizes:
        end = f", V = {vocab_size:,}"
        larger = replace(config, vocab_size=vocab_size)
        over = {"over whole tables": "whole tables" + end, "over the smallest V": smallest}
        contenders = {
            smallest: Contender(bench, config, train),
            "rows" + end: Contender(bench, larger, train, over),
            "rows, and the head" + end: Contender(bench, larger, train, over),
            "whole tables" + end: Contender(bench, larger, train, over, table_optimizer="adamw"),
        }
        for name, contender in contenders.items():
            if "the head" not in name:
                contender.model.head = nn.Linear(bench.n_embd, 64, bias=False, device=bench.on)
        for name, row in interleaved_timing(contenders, bench.rounds).items():
            if contenders[name].over:
                tokens = bench.batch_size * bench.block_size
                row = {"ms": 1e3 * tokens / row.pop("tok/s"), **row}
                rows[name] = {**row, "GiB": training_bytes(contenders[name]) / 2**30}
    if bench.plot:
        draw_vocab(bench.plot, rows, sizes)
    return show("vocab", rows)


def draw_vocab(path: Path, rows: dict, sizes: list[int]) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(8, 4))
    for axes, column in zip(panels, ("ms", "GiB"), strict=True):
        for way in ("rows", "rows, and the head", "whole tables"):
            values = [rows[f"{way}, V = {size:,}"][column] for size in sizes]
            axes.loglog(sizes, values, ".-", label=way)
        label_sizes(axes, sizes)
    panels[0].set(xlabel="V", ylabel="training step (ms)")
    panels[1].set(xlabel="V", ylabel="memory (GiB)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    save_figure(figure, path)


def label_sizes(axes: plt.Axes, sizes: list[int]) -> None:
    """Ticks of logarithmic axes: these sizes, and plain numbers."""
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.tick_params(which="minor", labelbottom=False, labelleft=False)


def bench_attention(bench: Bench) -> dict:
    kinds = {"dense": KINDS["dense"], "STEM, all": KINDS["STEM, all"]}
    for name in ("full", "window", "count", "window,window,count"):
        kinds[name] = {"ffn": "embformer", "attention": name}
    shortest = bench.block_size
    lengths = [shortest, 2 * shortest] if bench.quick else [shortest, 4 * shortest, 16 * shortest]
    rows = {}
    for length in lengths:
        batch_size = max(1, bench.batch_size * shortest // length)
        sized = replace(bench, block_size=length, batch_size=batch_size)
        contenders = {}
        for name, flags in kinds.items():
            over = {"ratio": f"full, T = {length:,}"}
            contender = Contender(sized, sized.model(**flags), train, over)
            contenders[f"{name}, T = {length:,}"] = contender
        trained = interleaved_timing(contenders, bench.rounds, train)
        prefilled = interleaved_timing(contenders, bench.rounds, prefill)
        decoded = interleaved_timing(contenders, bench.rounds, read_on)
        for name, contender in contenders.items():
            rows[name] = {
                "train": trained[name],
                "prefill": prefilled[name],
                "decode": decoded[name],
                "KiB of cache": cache_bytes(contender.cache) / 1024,
            }
    if bench.plot:
        draw_attention(bench.plot, rows, list(kinds), lengths)
    return show("attention", rows)


def draw_attention(path: Path, rows: dict, kinds: list[str], lengths: list[int]) -> None:
    figure, panels = plt.subplots(1, 4, figsize=(16, 4))
    for kind in kinds:
        kind_rows = [rows[f"{kind}, T = {length:,}"] for length in lengths]
        for axes, task in zip(panels, ("train", "prefill", "decode"), strict=False):
            axes.loglog(lengths, [row[task]["tok/s"] for row in kind_rows], ".-", label=kind)
            axes.set_ylabel(f"{task} (tok/s)")
        panels[3].loglog(lengths, [row["KiB of cache"] for row in kind_rows], ".-")
    panels[3].set_ylabel("cache (KiB)")
    for axes in panels:
        axes.set_xlabel("T")
        label_sizes(axes, lengths)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    save_figure(figure, path)


def bench_offload(bench: Bench) -> dict:
    tasks = {
        "decode 1": partial(decode, batch=1, prompt=1, new=128),
        "decode 8": partial(decode, batch=8, prompt=1, new=64),
        "prefill": prefill,
        # The last update of a turn has nothing to hide behind: more steps where steps are short.
        "train": partial(train, steps=5 if bench.cuda else 2),
    }
    config = bench.model(stem_layers="all")
    over = {"ratio": "resident"}
    with tempfile.TemporaryDirectory(dir=bench.dir, prefix="bench-") as folder:

        def place(offload: str, name: str, cold: bool = False) -> Contender:
            tables = make_tables(
                offload, bench.on, torch.float32, live=Path(folder) / name, fresh=True
            )
            return Contender(bench, config, prefill, over, tables=tables, cold=cold)

        contenders = {"resident": place("none", "resident")}
        if bench.table_gib:
            tables = partial(sparse_tables, bench, Path(folder) / "sparse")
            name = f"disk, {bench.table_gib:g} GiB of rows"
            contenders[name] = Contender(bench, config, prefill, over, tables=tables)
        else:
            contenders["RAM"] = place("cpu", "ram")
            contenders["disk, warm"] = place("disk", "warm")
            contenders["disk, cold"] = place("disk", "cold", cold=True)
        rows = {name: {} for name in contenders}
        for column, task in tasks.items():
            for name, row in interleaved_timing(contenders, bench.rounds, task).items():
                rows[name][column] = row
    return show("tables", rows)


def sparse_tables(bench: Bench, folder: Path, n_table: int, _: int, width: int) -> Tables:
    """Tables of --table_gib, whatever the vocabulary, in files that take no room."""
    n_row = int(bench.table_gib * 2**30) // (n_table * width * 4)
    shape = (n_row, n_table, width)
    storage = DiskStorage.create(folder, shape, torch.float32, sparse=True)
    return OffloadedTables(storage, bench.on) if bench.cuda else StoredTables(storage, bench.on)


def drop_pages(storage: DiskStorage) -> None:
    """Make the next read of tables go to the disk, where the system lets us (Linux)."""
    if not hasattr(os, "posix_fadvise"):
        return
    for name, pages in storage.maps.items():
        pages.flush()  # only clean pages can go,
        pages.madvise(mmap.MADV_DONTNEED)  # and only pages that are not mapped
        with open(storage.folder / name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


COMPARISONS = {
    "train": bench_train,
    "decode": bench_decode,
    "attention": bench_attention,
    "vocab": bench_vocab,
    "offload": bench_offload,
}


@ranks.joined()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=(*COMPARISONS, "all"), help="what to compare")
    add_flags(parser, Bench)
    flags = vars(parser.parse_args())
    what = flags.pop("what")
    check_picture(flags.get("plot"))
    torch.set_float32_matmul_precision("high")  # TF32 where there is, as in training
    sizes = QUICK if "quick" in flags else {}
    bench = Bench(**{**sizes, **flags})
    if ranks.size > 1 and (what != "train" or bench.batch_size % ranks.size):
        raise UserError(f"--nproc_per_node: train, and a --batch_size that {ranks.size} divides")
    for name in COMPARISONS if what == "all" else [what]:
        COMPARISONS[name](bench)


if __name__ == "__main__":
    run(main)
