"""Speed and memory, always two things side by side in one run.

    python bench.py offload                              # where tables live: device, RAM, disk
    python bench.py offload --json bench.json            # the same figures for other programs
    python bench.py offload --table_gib 32 --dir /big    # larger than memory, in a sparse file
    python bench.py tokenizer --data_dir data/books --input books.jsonl

**offload.** All homes hold the same model and take turns, chunk by chunk, so what slows the
machine for a while slows all of them. Speeds are medians over the turns; percentages are medians
of the ratios to `resident` within a turn. Token ids are random with Zipf's frequencies, id k with
a probability of about 1 / k. Columns:

    decode 1, decode 8   one token at a time for 1 and 8 sequences, tok/s
    prefill, train       forward passes, and whole optimizer steps, tok/s
    KB/token             bytes that crossed the bus, per token of decode 1 and of train (GPU)
    device               peak memory on the GPU in training

**tokenizer.** Encoding, beside Hugging Face's tokenizers, which is no dependency of this project:
pip install tokenizers first. Both get the vocabulary of --data_dir, the merges that follow from it
and the same split into words, and encode all documents in turn. The ids must be equal.
"""

import itertools
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tiktoken
import torch
from torch import Tensor
from torch.utils.benchmark import Timer, timer
from tqdm import tqdm

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
from model import Decoder, KVCache, ModelConfig
from offload import OffloadedTables
from tables.file import TableFile
from tables.memory import RamHome, check_ram
from tables.tables import ResidentTables, StoredTables, Tables
from text import documents
from training.batches import read_meta, read_tokenizer
from training.checkpoints import device_flag
from training.optimizer import Optimizer
from training.settings import Settings

TASKS = ("decode 1", "decode 8", "prefill", "train")
MOVES = ("decode 1", "train")  # those of which bytes that cross the bus are counted


def size(small: int, large: int) -> dict:
    """A flag's default: for two CPU cores, and for a data-centre GPU (238 M parameters in the
    backbone, 16 tables), so that what one wants to know takes minutes."""
    return dict(default=(small, large), must="at least 1", shown=f"{small}, on a GPU {large}")


@dataclass
class Bench:
    """The flags of this command."""

    what: str
    input: list[Path] | None = None
    device: str = device_flag()
    n_layer: int = flag(about="layers, all but the first with a table", **size(6, 17))
    n_head: int = flag(about="attention heads", **size(6, 16))
    n_embd: int = flag(about="width of the residual stream", **size(192, 1024))
    vocab_size: int = flag(about="rows of a table", **size(6400, 32768))
    block_size: int = flag(about="context length in tokens", **size(256, 1024))
    batch_size: int = flag(about="sequences in a training step", **size(8, 16))
    rounds: int = flag(7, "turns that each home takes", must="at least 1")
    table_gib: float | None = flag(
        None, "GiB of rows in a sparse file, compared with small tables", must="a positive number"
    )
    dir: Path | None = flag(
        None, "folder on the disk to measure", shown="the system's temporary one"
    )
    json: Path | None = flag(None, "write the figures to this file, too")
    data_dir: Path | None = flag(None, "prepared folder, for its tokenizer")

    def __post_init__(self) -> None:
        self.on = pick_device(self.device)
        self.cuda = self.on.type == "cuda"
        if self.cuda:
            torch.cuda.set_device(self.on.index or 0)  # which `timer` waits for
        for name, value in vars(self).items():
            if isinstance(value, tuple):
                setattr(self, name, value[self.cuda])
        check_ranges(self)


def zipf(shape: tuple[int, ...], vocab_size: int, seed: int) -> Tensor:
    """Ids whose frequency falls as 1 / (id + 1): the logarithm of id + 1 is uniform."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(shape, generator=generator, dtype=torch.float64)
    return ((vocab_size + 1) ** u).long().clamp_(1, vocab_size) - 1


class Contender:
    """A model whose tables live somewhere, and what was found out about it."""

    def __init__(self, config: ModelConfig, tables: Callable, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device, self.batch = device, 0
        self.model = Decoder(config, tables=tables).to(device)
        self.tables = self.model.tables
        self.optimizer = Optimizer(self.model, Settings(learning_rate=1e-3))
        self.rates = {task: [] for task in TASKS}  # tokens per second, turn by turn
        self.figures: dict[str, float] = {}

    def ids(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Fresh ids, and those under which tables are looked up (more of them with --table_gib)."""
        self.batch += 1
        ids = zipf(shape, self.model.config.vocab_size, self.batch)
        more = self.tables.vocab_size != self.model.config.vocab_size
        return ids, zipf(shape, self.tables.vocab_size, self.batch) if more else ids

    def measure(self, name: str, task: Callable[["Contender"], int]) -> None:
        """Do a task, which says how many tokens it went through."""
        ring = self.tables.ring if isinstance(self.tables, OffloadedTables) else None
        moved, cuda = ring.moved if ring else 0, self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = timer()
        tokens = task(self)
        if ring:
            ring.drain()  # what is on its way belongs to this chunk
        self.rates[name].append(tokens / (timer() - start))
        if ring and name in MOVES:
            self.figures[f"bytes per token, {name}"] = (ring.moved - moved) / tokens
        if cuda and name == "train":
            peak = torch.cuda.max_memory_allocated() - before
            self.figures["device bytes"] = device_bytes(self) + peak


@torch.inference_mode()
def decode(it: Contender, batch: int, tokens: int) -> int:
    """Sampling as `Decoder.stream` does it: the ids come from the device."""
    it.model.eval()
    ids, table_ids = (t.to(it.device) for t in it.ids(batch, tokens))
    cache = KVCache(it.model.config, batch, it.device, torch.float32)
    for t in range(tokens):
        new = slice(t, t + 1)
        logits, _ = it.model(ids[:, new], table_ids=table_ids[:, new], cache=cache)
        logits[:, -1].argmax(-1)
    return batch * tokens


@torch.inference_mode()
def prefill(it: Contender, batch: int) -> int:
    it.model.eval()
    ids, table_ids = it.ids(batch, it.model.config.block_size)
    it.model(ids.to(it.device), table_ids=table_ids, last_only=True)
    return ids.numel()


def train(it: Contender, batch: int, steps: int) -> int:
    it.model.train()
    ids, table_ids = it.ids(batch, it.model.config.block_size)
    for step in range(steps):
        there = ids.to(it.device)
        with torch.autocast(it.device.type, torch.bfloat16, enabled=it.device.type == "cuda"):
            loss = it.model(there, there, table_ids=table_ids)[1]
        if step + 1 < steps:
            ids, table_ids = it.ids(batch, it.model.config.block_size)
            it.tables.prefetch(table_ids)
        loss.backward()
        it.optimizer.step(1.0)
        loss.item()  # as the training loop does
    return ids.numel() * steps


def drop_pages(file: TableFile) -> None:
    """Make the next read of a table file go to the disk, where the system lets us (Linux)."""
    if not hasattr(os, "posix_fadvise"):
        return
    file.map.flush()  # only clean pages can go,
    file.map.madvise(mmap.MADV_DONTNEED)  # and only such that nobody has mapped
    with open(file.path, "rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy_speed(device: torch.device) -> float:
    """GB/s of a plain copy of 256 MB: from pinned memory to the GPU, or within RAM."""
    source = torch.ones(2**26, pin_memory=device.type == "cuda")
    target = torch.empty(2**26, device=device)
    copy = Timer("target.copy_(source)", globals=locals(), num_threads=torch.get_num_threads())
    return source.nbytes / min(copy.timeit(1).mean for _ in range(5)) / 1e9


def device_bytes(it: Contender) -> int:
    """What a model occupies on the GPU for good."""
    tensors = [*it.model.parameters(), *it.optimizer.rows.m, *it.optimizer.rows.v]
    tensors += [t for state in it.optimizer.adamw.state.values() for t in state.values()]
    if isinstance(it.tables, OffloadedTables):
        slots = [*it.tables.ring.slots, *filter(None, [it.tables.step_slot])]
        tensors += [slot.buffer for slot in slots] + [t for near in it.tables.near for t in near]
    return sum(t.nbytes for t in tensors if t.is_cuda)


def max_rss() -> int | None:
    """The most memory that the process had resident, in bytes, where the system tells."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def build(bench: Bench, folder: Path) -> dict[str, Contender]:
    sparse = bench.table_gib is not None
    shape = (bench.vocab_size, bench.block_size, bench.n_layer, bench.n_head, bench.n_embd)
    try:
        config = ModelConfig(*shape, stem_layers="all")
    except ValueError as error:
        raise UserError(f"--{error}") from None

    def stored(name: str, n_table: int, vocab_size: int, width: int) -> Tables:
        if sparse:
            vocab_size = int(bench.table_gib * 2**30) // (n_table * width * 4)
        shape = (vocab_size, n_table, width)
        if name == "cpu":
            check_ram(shape, torch.float32, training=True)
            if not bench.cuda:
                return ResidentTables(n_table, vocab_size, width)
            home = RamHome(shape, torch.float32)
        else:
            home = TableFile.create(folder / name, shape, torch.float32, sparse=sparse)
        home.fresh = not sparse  # drawing rows would fill a sparse file
        return (OffloadedTables if bench.cuda else StoredTables)(home, bench.on)

    names = ["cpu", "disk, warm", "disk, cold"]
    if sparse:
        names = [*["cpu"] * bench.cuda, f"disk, {bench.table_gib:g} GiB of rows"]
    makers = {"resident": ResidentTables} | {name: partial(stored, name) for name in names}
    bar = tqdm(makers.items(), desc="building", unit="model")
    return {name: Contender(config, tables, bench.on) for name, tables in bar}


def measure(bench: Bench, folder: Path) -> dict:
    contenders = build(bench, folder)
    functions = (
        partial(decode, batch=1, tokens=min(128, bench.block_size)),
        partial(decode, batch=8, tokens=min(64, bench.block_size)),
        partial(prefill, batch=bench.batch_size),
        # The last update of a chunk has nothing to hide behind: more steps where steps are short.
        partial(train, batch=bench.batch_size, steps=5 if bench.cuda else 2),
    )
    turns = range(bench.rounds + 1)  # the first warms up
    bar = tqdm(total=len(turns) * len(TASKS) * len(contenders), unit="chunk", desc="measuring")
    # Homes take turns task by task, to be compared within a second or two.
    for turn, task in itertools.product(turns, zip(TASKS, functions, strict=True)):
        # Who follows whom changes from turn to turn: a chunk leaves caches and disk busy.
        names, first = list(contenders), turn % len(contenders)
        for name in names[first:] + names[:first]:
            if name == "disk, cold":
                drop_pages(contenders[name].tables.home)
            contenders[name].measure(*task)
            bar.update()
    bar.close()

    resident = contenders["resident"]
    for it, task in itertools.product(contenders.values(), TASKS):
        rates, plain = it.rates[task][1:], resident.rates[task][1:]
        ratios = [a / b for a, b in zip(rates, plain, strict=True)]
        it.figures[f"{task} tok/s"] = statistics.median(rates)
        it.figures[f"{task} ratio"] = statistics.median(ratios)
    return {
        "device": torch.cuda.get_device_name() if bench.cuda else bench.on.type,
        "backbone": resident.model.sizes()["backbone"],
        "tables": {
            name: sum(w.numel() for w in it.tables.weight) for name, it in contenders.items()
        },
        "n_table": len(resident.tables.weight),
        "copy GB/s": copy_speed(bench.on),
        "threads": torch.get_num_threads(),
        "max RSS bytes": max_rss(),
        "homes": {name: it.figures for name, it in contenders.items()},
    }


def report(result: dict) -> str:
    """The figures as a Markdown table."""
    columns = ["tables", *TASKS, "KB/token", "device"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, row in result["homes"].items():
        cells = [f"{row[f'{task} tok/s']:,.0f} ({row[f'{task} ratio']:.1%})" for task in TASKS]
        moved = [row.get(f"bytes per token, {task}") for task in MOVES]
        moved = [f"{each / 1e3:.1f}" if each else "-" for each in moved] if any(moved) else ["-"]
        held = f"{row['device bytes'] / 2**30:.2f} GiB" if "device bytes" in row else "-"
        lines.append(f"| {' | '.join([name, *cells, ', '.join(moved), held])} |")
    largest = max(result["tables"].values())
    lines += [
        "",
        f"{result['backbone'] / 1e6:.1f} M parameters in the backbone, {largest / 1e6:,.1f} M in "
        f"{result['n_table']} tables; {result['device']}, {result['threads']} threads; a plain "
        f"copy runs at {result['copy GB/s']:.1f} GB/s; the process held at most "
        + (gib(result["max RSS bytes"]) if result["max RSS bytes"] else "-"),
    ]
    return "\n".join(lines)


def hugging_face(encoding: tiktoken.Encoding):
    """The same tokenizer as an object of that library."""
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    except ImportError:
        raise UserError("the tokenizers package is not here: pip install tokenizers") from None
    # That library spells bytes as printable characters (GPT-2's table).
    odd = [byte for byte in range(256) if byte == ord(" ") or not chr(byte).isprintable()]
    spell = {byte: 256 + n for n, byte in enumerate(odd)}
    vocab = {
        token.decode("latin-1").translate(spell): rank
        for token, rank in encoding._mergeable_ranks.items()
    }
    # tiktoken merges any two neighbours that make a token, those of the lowest rank first.
    merges = [
        (token[:i], token[i:])
        for token in sorted(vocab, key=vocab.__getitem__)
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
    """Bytes a second of both tokenizers, by threads: printed and returned."""
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
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(bench.rounds):
            ids = []
            for function, spent in zip(functions, seconds, strict=True):
                start = time.perf_counter()
                ids.append(function())
                spent.append(time.perf_counter() - start)
            if ids[0] != ids[1]:
                raise UserError("the two disagree: the merges or the split differ")
        ours, theirs = map(statistics.median, seconds)
        ratio = statistics.median(b / a for a, b in zip(*seconds, strict=True))
        print(
            f"{name}: {sum(map(len, ids[0])):,} equal ids; tiktoken {size / ours / 1e6:.1f} MB/s, "
            f"tokenizers {size / theirs / 1e6:.1f} MB/s; ratio {ratio:.2f}"
        )
        result[name] = dict(tiktoken=size / ours, tokenizers=size / theirs, ratio=ratio)
    return result


def bench_offload(bench: Bench) -> dict:
    """What `measure` found: printed and returned."""
    try:
        folder = tempfile.TemporaryDirectory(dir=bench.dir, prefix="bench-")
    except OSError as error:
        raise UserError(f"--dir {bench.dir}: {error.strerror}") from None
    torch.set_float32_matmul_precision("high")  # TF32 where there is, as in training
    with folder as path:
        result = measure(bench, Path(path))
    print(report(result))
    return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=("offload", "tokenizer"), help="what to compare")
    add_flags(parser, Bench)
    parser.add_argument("--input", nargs="+", type=Path, help="text to encode, .txt or .jsonl")
    bench = Bench(**vars(parser.parse_args()))
    result = {"offload": bench_offload, "tokenizer": bench_tokenizer}[bench.what](bench)
    if bench.json:
        with atomic(bench.json) as temporary:
            temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"\nwrote {bench.json}")


if __name__ == "__main__":
    run(main)
