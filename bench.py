"""Speed and memory, always two things side by side in one run.

    python bench.py all --quick                          # everything small, in a minute or two
    python bench.py train                                # kinds of layers, eager and compiled
    python bench.py decode                               # one token at a time, and without cache
    python bench.py vocab --plot vocab.png               # what a larger vocabulary costs
    python bench.py offload                              # where tables live: device, RAM, disk
    python bench.py offload --table_gib 32 --dir /big    # larger than memory, in a sparse file
    python bench.py tokenizer --data_dir data/books --input books.jsonl

Contenders take turns, so what slows the machine for a while slows all of them. Speeds are medians
over the turns; ratios are medians of the ratios to the first contender within a turn. Token ids are
random with Zipf's frequencies.

**train.** Whole optimizer steps. GFLOP/s are three times those of a forward pass; `of the matrix
rate` is their share of what this machine reaches in one large matrix product.

**decode.** Greedy, 64 tokens and then 96 more. GB/s are the weights that a step reads; `of the copy
rate` is their share of what this machine reads when it adds up a large tensor.

**vocab.** Training steps with the same ids: on rows that a batch read, and by AdamW on whole
tables, as plain `nn.Embedding` would have it. The head, which costs V either way, is left out of
both, and shown beside them. Memory is that of weights, gradients and optimizer states.

**offload.** All homes hold the same model. `decode` 1 and 8 is one token at a time for so many
sequences, `prefill` forward passes, `train` whole optimizer steps. On a GPU, KB/token crossed the
bus per token of decode 1 and of train, and `device` is its peak memory in training.

**tokenizer.** Encoding, beside Hugging Face's tokenizers, which is no dependency of this project:
pip install tokenizers first. Both get the vocabulary of --data_dir, the merges that follow from it
and the same split into words, and encode all documents in turn. The ids must be equal.
"""

import itertools
import json
import mmap
import os
import sys
import tempfile
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import tiktoken
import torch
from matplotlib import pyplot as plt
from tables.file import TableFile
from tables.memory import RamStorage, check_ram
from torch import Tensor, nn
from torch.utils.benchmark import timer
from tqdm import tqdm

from attention import KVCache
from common import (
    UserError,
    add_flags,
    atomic,
    check_ranges,
    flag,
    gib,
    make_parser,
    pick_device,
    run,
)
from model import Decoder, ModelConfig
from offload import OffloadedTables
from tables.tables import ResidentTables, StoredTables, Tables
from text import documents
from training.batches import read_meta, read_tokenizer
from training.checkpoints import check_memory, device_flag
from training.optimizer import Optimizer
from training.records import check_picture, markdown, save_figure
from training.settings import Settings


def size(small: int, large: int) -> dict:
    """A flag's default: for two CPU cores, and for a data-centre GPU (238 M parameters in the
    backbone, 16 tables), so that what one wants to know takes minutes."""
    return dict(default=(small, large), must="at least 1", shown=f"{small}, on a GPU {large}")


@dataclass
class Bench:
    what: str
    input: list[Path] | None = None
    device: str = device_flag()
    n_layer: int = flag(about="layers, all but the first with a table", **size(6, 17))
    n_head: int = flag(about="attention heads", **size(6, 16))
    n_embd: int = flag(about="width of the residual stream", **size(192, 1024))
    vocab_size: int = flag(about="rows of a table", **size(6400, 32768))
    block_size: int = flag(about="context length in tokens", **size(256, 1024))
    batch_size: int = flag(about="sequences in a training step", **size(8, 16))
    rounds: int = flag(7, "turns that each contender takes", must="at least 1")
    quick: bool = flag(False, "small models, two turns, nothing compiled: does it run?")
    plot: Path | None = flag(None, "picture of vocab: .png, .svg or .pdf")
    table_gib: float | None = flag(None, "GiB of rows in a sparse file", must="a positive number")
    dir: Path | None = flag(None, "folder on the disk to measure", shown="a temporary one")
    json: Path | None = flag(None, "write the figures to this file, too")
    data_dir: Path | None = flag(None, "prepared folder, for its tokenizer")

    def __post_init__(self) -> None:
        self.on = pick_device(self.device)
        self.cuda = self.on.type == "cuda"
        if self.cuda:
            torch.cuda.set_device(self.on.index or 0)  # which `timer` waits for
        quick = dict(n_layer=3, n_head=2, n_embd=32, block_size=64, batch_size=2)
        for name, value in vars(self).items():
            if isinstance(value, tuple):
                setattr(self, name, quick.get(name, value[0]) if self.quick else value[self.cuda])
        self.rounds = min(self.rounds, 2) if self.quick else self.rounds
        check_ranges(self)

    def model(self, **more) -> ModelConfig:
        names = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
        try:
            config = ModelConfig(**{name: getattr(self, name) for name in names} | more)
            check_memory(config, 4, 4)
            return config
        except ValueError as error:
            raise UserError(f"--{error}") from None


def zipf(shape: tuple[int, ...], vocab_size: int, seed: int) -> Tensor:
    """Ids whose frequency falls as 1 / (id + 1): the logarithm of id + 1 is uniform."""
    u = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ((vocab_size + 1) ** u).long().clamp_(1, vocab_size) - 1


KINDS = {
    "dense": dict(ffn="dense"),
    "STEM, third": dict(stem_layers="third"),
    "STEM, all": dict(stem_layers="all"),
    "Embformer": dict(ffn="embformer"),
}
Rates = dict[str, list[float]]  # of each contender, turn by turn


def interleaved_timing(
    runs: dict[str, Callable[[], int]], rounds: int, unit: str = "step"
) -> Rates:
    """What each gets done in a second; a run says how much it did. They take turns, and who follows
    whom changes, as a run leaves caches and disk busy. The first turn warms up."""
    rates: Rates = {name: [] for name in runs}
    names = list(runs)
    turns = [*itertools.product(range(rounds + 1), range(len(names)))]
    for turn, place in tqdm(turns, desc="taking turns", unit=unit):
        name = names[(turn + place) % len(names)]
        start = timer()
        done = runs[name]()
        seconds = timer() - start
        if turn:
            rates[name].append(done / seconds)
    return rates


def ratio(rates: Rates, name: str, to: str) -> float:
    return median(a / b for a, b in zip(rates[name], rates[to], strict=True))


def table(what: str, result: dict[str, dict], formats: dict[str, str]) -> dict[str, dict]:
    """Print figures by contender and column as Markdown; `formats` of the columns, in order."""
    rows = [
        {what: name} | {column: f"{row[column]:{form}}" for column, form in formats.items()}
        for name, row in result.items()
    ]
    print("\n" + markdown(rows))
    return result


def matrix_rate(bench: Bench) -> float:
    """FLOP/s of one large matrix product."""
    x = torch.randn(2048, 2048, device=bench.on)
    x = x.bfloat16() if bench.cuda else x
    return interleaved_timing({"": lambda: 2 * len((x @ x)[0]) ** 3}, 7)[""][-1]


def copy_rate(bench: Bench) -> float:
    """Bytes/s of reading memory."""
    x = torch.ones(1 << 26, device=bench.on)
    return max(interleaved_timing({"": lambda: 4 * int(x.sum())}, 7)[""])


def step(
    bench: Bench,
    model: Decoder,
    optimizer: Optimizer,
    ids: Tensor,
    targets: Tensor,
    table_ids: Tensor | None = None,
    coming: Tensor | None = None,
) -> int:
    """A training step as the training loop does it, on ids and targets [B, T]; the number of
    tokens. Tables are looked up under `table_ids`, and next under those that are `coming`."""
    with torch.autocast(bench.on.type, torch.bfloat16, enabled=bench.cuda):
        _, loss = model(ids, targets, table_ids=table_ids)
    if coming is not None:
        model.tables.prefetch(coming)
    loss.backward()
    optimizer.step(1.0)
    loss.item()
    return ids.numel()


def bench_train(bench: Bench) -> dict:
    runs, flops = {}, {}
    for name, how in itertools.product(KINDS, ("",) if bench.quick else ("", ", compiled")):
        model = Decoder(bench.model(**KINDS[name])).to(bench.on).train()
        for block in model.blocks if how else ():
            block.compile()
        optimizer = Optimizer(model, Settings(learning_rate=1e-3))
        ids = zipf((bench.batch_size, bench.block_size + 1), bench.vocab_size, 0)
        runs[name + how] = partial(step, bench, model, optimizer, ids[:, :-1], ids[:, 1:])
        flops[name + how] = 3 * model.sizes()["flops_per_token"]
    rates, most = interleaved_timing(runs, bench.rounds), matrix_rate(bench)
    result = {}
    for name, each in rates.items():
        eager = name.removesuffix(", compiled")
        result[name] = {
            "tok/s": median(each),
            "over dense": ratio(rates, name, name.replace(eager, "dense")),
            "over eager": ratio(rates, name, eager),
            "GFLOP/s": median(each) * flops[name] / 1e9,
            "of the matrix rate": median(each) * flops[name] / most,
        }
    ratios = {"over dense": ".2f", "over eager": ".2f"}
    return table(
        "train", result, {"tok/s": ",.0f", **ratios, "GFLOP/s": ",.0f", "of the matrix rate": ".0%"}
    )


@torch.inference_mode()
def recompute(model: Decoder, ids: Tensor, max_new_tokens: int) -> Tensor:
    """`Decoder.generate` without a cache."""
    for _ in range(max_new_tokens):
        logits, _ = model(ids, last_only=True)
        ids = torch.cat((ids, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return ids


def bench_decode(bench: Bench) -> dict:
    prompt, new = min(64, bench.block_size // 3), min(96, bench.block_size // 3)
    greedy = partial(Decoder.generate, temperature=0)
    ways = {"": greedy, ", compiled": greedy, ", no cache": recompute}
    if bench.quick:
        del ways[", compiled"]
    result, most = {}, copy_rate(bench)
    for batch in (1, 8):
        if batch > 1:
            ways.pop(", no cache")  # one sequence shows what a cache is worth, and takes long
        ids = zipf((batch, prompt), bench.vocab_size, 0).to(bench.on)
        runs, read = {}, {}
        for (kind, how), (way, write) in itertools.product(KINDS.items(), ways.items()):
            model = Decoder(bench.model(**how)).to(bench.on).eval()
            if not bench.cuda:
                model.use_column_major_weights()
            if "compiled" in way:
                model.compile_steps()
            runs[kind + way] = lambda w=write, m=model, i=ids: (
                new * len(w(m, i, max_new_tokens=new))
            )
            read[kind + way] = 4 * model.sizes()["active"] / batch  # bytes per token
        rates = interleaved_timing(runs, bench.rounds)
        for kind, way in itertools.product(KINDS, ways):
            name = kind + way
            speed = median(rates[name])
            result[f"{name}, batch {batch}"] = {
                "tok/s": speed,
                "over dense": ratio(rates, name, "dense" + way),
                "over eager, cached": ratio(rates, name, kind),
                "GB/s": speed * read[name] / 1e9,
                "of the copy rate": speed * read[name] / most,
            }
    ratios = {"over dense": ".2f", "over eager, cached": ".2f"}
    return table(
        "decode", result, {"tok/s": ",.0f", **ratios, "GB/s": ".1f", "of the copy rate": ".0%"}
    )


def bench_vocab(bench: Bench) -> dict:
    base = 500 if bench.quick else bench.vocab_size
    ids = zipf((bench.batch_size, bench.block_size + 1), base, 0)  # everywhere: only V changes
    ways = {"rows": "rowwise", "rows, and the head": "rowwise", "whole tables": "adamw"}

    def contender(vocab_size: int, way: str) -> tuple[Callable[[], int], int]:
        """A training step, and the bytes it needs."""
        model = Decoder(bench.model(stem_layers="all", vocab_size=vocab_size)).to(bench.on).train()
        targets = ids[:, 1:]
        if "head" not in way:  # but for a small one
            model.head = nn.Linear(bench.n_embd, 64, bias=False, device=bench.on)
            targets = targets % 64
        optimizer = Optimizer(model, Settings(learning_rate=1e-3, table_optimizer=ways[way]))
        run = partial(step, bench, model, optimizer, ids[:, :-1], targets)
        run()
        gradients = [p for group in optimizer.adamw.param_groups for p in group["params"]]
        states = [t for state in optimizer.adamw.state.values() for t in state.values()]
        states += [t for adam, _ in optimizer.rows.values() for t in (*adam.m, *adam.v)]
        return run, sum(t.nbytes for t in (*model.parameters(), *gradients, *states))

    first, _ = contender(base, "rows")
    result = {}
    for vocab_size in (base, base * 5, base * 20):
        made = {way: contender(vocab_size, way) for way in ways}
        runs = {"first": first} | {way: run for way, (run, _) in made.items()}
        rates = interleaved_timing(runs, bench.rounds)
        for way in ways:
            result[f"{way}, V = {vocab_size:,}"] = {
                "V": vocab_size,
                "ms": 1e3 * bench.batch_size * bench.block_size / median(rates[way]),
                "over whole tables": ratio(rates, way, "whole tables"),
                f"over rows, V = {base:,}": ratio(rates, way, "first"),
                "GiB": made[way][1] / 2**30,
            }
    ratios = {"over whole tables": ".2f", f"over rows, V = {base:,}": ".2f"}
    table("vocab", result, {"ms": ",.0f", **ratios, "GiB": ".2f"})
    if bench.plot:
        plot_vocab(bench.plot, list(ways), list(result.values()))
    return result


def plot_vocab(path: Path, ways: list[str], rows: list[dict]) -> None:
    """Step time and memory over V, a line for each way."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, key, title in ((left, "ms", "training step (ms)"), (right, "GiB", "memory (GiB)")):
        for number, way in enumerate(ways):
            points = [(row["V"], row[key]) for row in rows[number :: len(ways)]]
            axes.plot(*zip(*points, strict=True), ".-", label=way)
        axes.set(xlabel="vocabulary V", ylabel=title, xscale="log", yscale="log")
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_minor_formatter("{x:,g}")
        axes.grid(alpha=0.3, which="both")
    left.legend()
    save_figure(figure, path)


class Contender:
    """A model whose tables live somewhere, and what was found out about it."""

    def __init__(self, bench: Bench, config: ModelConfig, tables: Callable) -> None:
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated()  # 0 without a GPU
        self.bench, self.batch = bench, 0
        self.model = Decoder(config, tables=tables).to(bench.on)
        self.tables = self.model.tables
        self.optimizer = Optimizer(self.model, Settings(learning_rate=1e-3))
        self.held = torch.cuda.memory_allocated() - before  # bytes on the GPU between tasks
        self.figures: dict[str, float] = {}
        self.cold = False  # whether each task begins with a table file that nobody has read

    def ids(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Fresh ids, and those under which tables are looked up (more of them with --table_gib)."""
        self.batch += 1
        sizes = (self.model.config.vocab_size, self.tables.vocab_size)
        return tuple(zipf(shape, size, self.batch) for size in sizes)

    def measure(self, name: str) -> int:
        """Do a task, and see what it takes; the number of its tokens."""
        if self.cold:
            drop_pages(self.tables.storage)
        ring = getattr(self.tables, "ring", None)
        moved, before = ring.moved if ring else 0, torch.cuda.memory_allocated()
        if self.bench.cuda:
            torch.cuda.reset_peak_memory_stats()
        tokens = TASKS[name](self)
        if ring:
            ring.drain()  # what is on its way belongs to this chunk
            self.figures[f"bytes per token, {name}"] = (ring.moved - moved) / tokens
        if self.bench.cuda and name == "train":
            self.figures["device bytes"] = self.held + torch.cuda.max_memory_allocated() - before
        self.held += torch.cuda.memory_allocated() - before
        return tokens


@torch.inference_mode()
def decode(it: Contender, batch: int, tokens: int) -> int:
    """Sampling as `Decoder.stream` does it: the ids come from the device."""
    it.model.eval()
    tokens = min(tokens, it.bench.block_size)
    ids, table_ids = (t.to(it.bench.on) for t in it.ids(batch, tokens))
    cache = KVCache(it.model.config, batch, it.bench.on, torch.float32)
    for t in range(tokens):
        new = slice(t, t + 1)
        logits, _ = it.model(ids[:, new], table_ids=table_ids[:, new], cache=cache)
        logits[:, -1].argmax(-1)
    return batch * tokens


@torch.inference_mode()
def prefill(it: Contender) -> int:
    it.model.eval()
    ids, table_ids = it.ids(it.bench.batch_size, it.bench.block_size)
    it.model(ids.to(it.bench.on), table_ids=table_ids, last_only=True)
    return ids.numel()


def train(it: Contender) -> int:
    it.model.train()
    # The last update of a chunk has nothing to hide behind: more steps where steps are short.
    steps = 5 if it.bench.cuda else 2
    batches = [it.ids(it.bench.batch_size, it.bench.block_size) for _ in range(steps)]
    coming = [*(table_ids for _, table_ids in batches[1:]), None]
    return sum(
        step(it.bench, it.model, it.optimizer, ids, ids, table_ids, after)
        for (ids, table_ids), after in zip(batches, coming, strict=True)
    )


TASKS = {  # which say how many tokens they went through
    "decode 1": partial(decode, batch=1, tokens=128),
    "decode 8": partial(decode, batch=8, tokens=64),
    "prefill": prefill,
    "train": train,
}


def drop_pages(file: TableFile) -> None:
    """Make the next read of a table file go to the disk, where the system lets us (Linux)."""
    if not hasattr(os, "posix_fadvise"):
        return
    file.map.flush()  # only clean pages can go,
    file.map.madvise(mmap.MADV_DONTNEED)  # and only such that nobody has mapped
    with open(file.path, "rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def max_rss() -> int | None:
    """The most memory that the process had resident, in bytes, where the system tells."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def build(bench: Bench, folder: Path) -> dict[str, Contender]:
    sparse, config = bench.table_gib is not None, bench.model(stem_layers="all")

    def stored(name: str, n_table: int, vocab_size: int, width: int) -> Tables:
        if sparse:
            vocab_size = int(bench.table_gib * 2**30) // (n_table * width * 4)
        shape = (vocab_size, n_table, width)
        if name == "cpu":
            check_ram(shape, torch.float32, training=True)
            if not bench.cuda:
                return ResidentTables(n_table, vocab_size, width)
            storage = RamStorage(shape, torch.float32)
        else:
            storage = TableFile.create(folder / name, shape, torch.float32, sparse=sparse)
        storage.fresh = not sparse  # drawing rows would fill a sparse file
        return (OffloadedTables if bench.cuda else StoredTables)(storage, bench.on)

    names = ["cpu", "disk, warm", "disk, cold"]
    if sparse:
        names = [*["cpu"] * bench.cuda, f"disk, {bench.table_gib:g} GiB of rows"]
    makers = {"resident": ResidentTables} | {name: partial(stored, name) for name in names}
    bar = tqdm(makers.items(), desc="building", unit="model")
    made = {name: Contender(bench, config, tables) for name, tables in bar}
    if "disk, cold" in made:
        made["disk, cold"].cold = True
    return made


def bench_offload(bench: Bench) -> dict:
    """Measure all homes: figures, printed and returned."""
    with tempfile.TemporaryDirectory(dir=bench.dir, prefix="bench-") as folder:
        contenders = build(bench, Path(folder))
        for task in TASKS:
            runs = {name: partial(it.measure, task) for name, it in contenders.items()}
            rates = interleaved_timing(runs, bench.rounds, "chunk")
            for name, it in contenders.items():
                it.figures[f"{task} tok/s"] = median(rates[name])
                it.figures[f"{task} ratio"] = ratio(rates, name, "resident")

    resident = contenders["resident"]
    result = {
        "device": torch.cuda.get_device_name() if bench.cuda else bench.on.type,
        "backbone": resident.model.sizes()["backbone"],
        "tables": {name: it.model.sizes()["table"] for name, it in contenders.items()},
        "n_table": len(resident.tables.weight),
        "threads": torch.get_num_threads(),
        "max RSS bytes": max_rss(),
        "homes": {name: it.figures for name, it in contenders.items()},
    }
    report(result)
    return result


def report(result: dict) -> None:
    """Print the figures as a Markdown table."""
    cells = {}
    for name, row in result["homes"].items():
        shown = {
            task: f"{row[f'{task} tok/s']:,.0f} ({row[f'{task} ratio']:.1%})" for task in TASKS
        }
        moved = [row.get(f"bytes per token, {task}") for task in ("decode 1", "train")]
        shown["KB/token"] = ", ".join(f"{n / 1e3:.1f}" for n in moved if n is not None) or "-"
        shown["device"] = gib(row["device bytes"]) if "device bytes" in row else "-"
        cells[name] = shown
    table("tables", cells, dict.fromkeys([*TASKS, "KB/token", "device"], ""))
    print(
        f"\n{result['backbone'] / 1e6:.1f} M parameters in the backbone, "
        f"{max(result['tables'].values()) / 1e6:,.1f} M in {result['n_table']} tables; "
        f"{result['device']}, {result['threads']} threads; the process held at most "
        + (gib(result["max RSS bytes"]) if result["max RSS bytes"] else "-")
    )


def hugging_face(encoding: tiktoken.Encoding):
    """The same tokenizer as an object of that library."""
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    except ImportError:
        raise UserError("the tokenizers package is not here: pip install tokenizers") from None
    # That library spells bytes as printable characters (GPT-2's table).
    odd = [byte for byte in range(256) if byte == ord(" ") or not chr(byte).isprintable()]
    spell = {byte: 256 + n for n, byte in enumerate(odd)}
    ranks = encoding._mergeable_ranks.items()
    vocab = {token.decode("latin-1").translate(spell): rank for token, rank in ranks}
    # tiktoken merges any two neighbours that make a token, those of the lowest rank first.
    merges = [
        (token[:i], token[i:])
        for token in sorted(vocab, key=vocab.get)
        for i in range(1, len(token))
        if token[:i] in vocab and token[i:] in vocab
    ]
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    pattern = encoding._pat_str.replace("++", "+")  # possessive: faster in one engine, same split
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    return made


def bench_tokenizer(bench: Bench) -> dict:
    """Bytes per second of both tokenizers, by threads: printed and returned."""
    if not (bench.data_dir and bench.input):
        raise UserError("bench.py tokenizer needs --data_dir and --input")
    encoding = read_tokenizer(bench.data_dir, read_meta(bench.data_dir))
    texts = [text for _, text in documents.read(bench.input, documents.Report(1.0), "text")]
    other = hugging_face(encoding)
    kinds = {
        "1 thread": (
            lambda: [encoding.encode_ordinary(text) for text in texts],
            lambda: [other.encode(text).ids for text in texts],
        ),
        "2 threads": (
            lambda: encoding.encode_ordinary_batch(texts, num_threads=2),
            lambda: [done.ids for done in other.encode_batch_fast(texts)],  # on all cores
        ),
    }
    size, result = sum(len(text.encode()) for text in texts), {}
    for name, functions in kinds.items():
        ids, others = (function() for function in functions)
        if ids != others:
            raise UserError("the two disagree: the merges or the split differ")
        seconds = [[timeit.timeit(f, number=1) for f in functions] for _ in range(bench.rounds)]
        ours, theirs = (size / median(each) for each in zip(*seconds, strict=True))
        ratio = median(b / a for a, b in seconds)
        print(
            f"{name}: {sum(map(len, ids)):,} equal ids; tiktoken {ours / 1e6:.1f} MB/s, "
            f"tokenizers {theirs / 1e6:.1f} MB/s; ratio {ratio:.2f}"
        )
        result[name] = dict(tiktoken=ours, tokenizers=theirs, ratio=ratio)
    return result


def main() -> None:
    parser = make_parser(__doc__)
    what = {name.removeprefix("bench_"): f for name, f in globals().items() if "bench_" in name}
    parser.add_argument("what", choices=(*what, "all"), help="what to compare; all but tokenizer")
    add_flags(parser, Bench)
    parser.add_argument("--input", nargs="+", type=Path, help="text to encode, .txt or .jsonl")
    bench = Bench(**vars(parser.parse_args()))
    check_picture(bench.plot)
    torch.set_float32_matmul_precision("high")  # TF32 where there is, as in training
    if bench.what == "all":
        result = {name: f(bench) for name, f in what.items() if name != "tokenizer"}
    else:
        result = what[bench.what](bench)
    if bench.json:
        with atomic(bench.json) as temporary:
            temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"\nwrote {bench.json}")


if __name__ == "__main__":
    run(main)
