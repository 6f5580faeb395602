"""Speed and memory, always two things side by side in one run.

    python bench.py offload                              # where tables live: device, RAM, disk
    python bench.py offload --json bench.json            # the same figures for other programs
    python bench.py offload --table_gib 32 --dir /big    # larger than memory, in a sparse file
    python bench.py tokenizer --data_dir data/books --input books.jsonl

**offload.** All homes hold the same model and take turns, chunk by chunk, so what slows the
machine for a while slows all of them. Speeds are medians over the turns; percentages are medians of the
ratios to `resident` within a turn. Token ids are random with Zipf's frequencies, id k with a
probability of about 1 / k. Columns:

    decode 1, decode 8   one token at a time for 1 and 8 sequences, tok/s
    prefill, train       forward passes, and whole optimizer steps, tok/s
    KB/token             bytes that crossed the bus, per token of decode 1 and of train (GPU)
    device               peak memory on the GPU in training

**tokenizer.** Encoding, beside Hugging Face's tokenizers, which is no dependency of this project:
pip install tokenizers first. Both get the vocabulary of --data_dir, the merges that follow from it
and the same split into words, and encode all documents in turn. The ids must be equal.
"""

import argparse
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

from common import UserError, atomic, gib, pick_device, run
from model import Decoder, KVCache, ModelConfig
from offload import OffloadedTables
from tables.file import TableFile
from tables.memory import RamHome, check_ram
from tables.tables import ResidentTables, StoredTables, Tables
from text import documents
from training.batches import read_meta, read_tokenizer
from training.checkpoints import check_disk
from training.optimizer import Optimizer

# What one wants to know about in minutes: two CPU cores, or a data-centre GPU (238 M parameters in
# the backbone, 16 tables).
SMALL = dict(n_layer=6, n_head=6, n_embd=192, vocab_size=6400, block_size=256, batch_size=8)
LARGE = dict(n_layer=17, n_head=16, n_embd=1024, vocab_size=32768, block_size=1024, batch_size=16)


def zipf(shape: tuple[int, ...], vocab_size: int, seed: int) -> Tensor:
    """Ids whose frequency falls as 1 / (id + 1): the logarithm of id + 1 is uniform."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(shape, generator=generator, dtype=torch.float64)
    return ((vocab_size + 1) ** u).long().clamp_(1, vocab_size) - 1


class Contender:
    """A model whose tables live somewhere, and what can be timed about it."""

    def __init__(self, config: ModelConfig, tables: Callable, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device, self.batch = device, 0
        self.model = Decoder(config, tables=tables).to(device)
        self.tables = self.model.tables
        self.optimizer = None
        self.cold = False  # drop the file from the page cache before each chunk

    def ids(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Fresh ids, and those under which tables are looked up (more of them with --table_gib)."""
        self.batch += 1
        ids = zipf(shape, self.model.config.vocab_size, self.batch)
        if self.tables.vocab_size == self.model.config.vocab_size:
            return ids, ids
        return ids, zipf(shape, self.tables.vocab_size, self.batch)

    def timed(self, task: Callable[["Contender"], int]) -> tuple[int, float]:
        """Tokens that a task went through, and seconds it took."""
        if self.cold:
            drop_pages(self.tables.home)
        self.wait()
        start = time.perf_counter()
        tokens = task(self)
        self.tables.flush()  # what waits belongs to this chunk
        self.wait()
        return tokens, time.perf_counter() - start

    def moved(self) -> int:
        """Bytes that crossed the bus so far."""
        return self.tables.ring.moved if isinstance(self.tables, OffloadedTables) else 0

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


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
    if it.optimizer is None:
        it.optimizer = Optimizer(it.model, learning_rate=1e-3)
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
    cuda = device.type == "cuda"
    source = torch.ones(2**26, pin_memory=cuda)
    target = torch.empty(2**26, device=device)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source, non_blocking=cuda)
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return source.nbytes / min(seconds) / 1e9


def device_bytes(it: Contender) -> int:
    """What a model occupies on the GPU for good."""
    tensors = list(it.model.parameters())
    if it.optimizer:
        tensors += [t for state in it.optimizer.adamw.state.values() for t in state.values()]
        tensors += [*it.optimizer.rows.m, *it.optimizer.rows.v]
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


def build(args: argparse.Namespace, device: torch.device, folder: Path) -> dict[str, Contender]:
    shape = {name: getattr(args, name) for name in SMALL if name != "batch_size"}
    try:
        config = ModelConfig(**shape, stem_layers="all")
    except ValueError as error:
        raise UserError(f"--{error}") from None

    def stored(where: str, n_table: int, vocab_size: int, width: int) -> Tables:
        shape = (vocab_size, n_table, width)
        if args.table_gib:
            shape = (int(args.table_gib * 2**30) // (n_table * width * 4), n_table, width)
        if where == "cpu":
            check_ram(shape, torch.float32, training=True)
            if device.type != "cuda":
                return ResidentTables(n_table, vocab_size, width)
            home = RamHome(shape, torch.float32)
        elif args.table_gib:
            home = TableFile.create(folder / "sparse.bin", shape, torch.float32, sparse=True)
        else:
            check_disk(shape, torch.float32, folder, copies=1)  # no snapshots
            number = len(list(folder.iterdir()))
            home = TableFile.create(folder / f"{number}.bin", shape, torch.float32)
        home.fresh = not args.table_gib  # drawing rows would fill a sparse file
        return (OffloadedTables if device.type == "cuda" else StoredTables)(home, device)

    kinds = {"resident": ResidentTables}
    if not args.table_gib or device.type == "cuda":
        kinds["cpu"] = partial(stored, "cpu")
    if args.table_gib:
        kinds[f"disk, {args.table_gib:g} GiB of rows"] = partial(stored, "disk")
    else:
        kinds["disk, warm"] = kinds["disk, cold"] = partial(stored, "disk")
    contenders = {}
    for name, tables in tqdm(kinds.items(), desc="building", unit="model"):
        contenders[name] = Contender(config, tables, device)
        contenders[name].cold = name == "disk, cold"
    return contenders


def measure(args: argparse.Namespace, device: torch.device, folder: Path) -> dict:
    contenders = build(args, device, folder)
    # The last update of a chunk has nothing to hide behind: more steps where steps are short.
    steps = 5 if device.type == "cuda" else 2
    tasks = {
        "decode 1": partial(decode, batch=1, tokens=min(128, args.block_size)),
        "decode 8": partial(decode, batch=8, tokens=min(64, args.block_size)),
        "prefill": partial(prefill, batch=args.batch_size),
        "train": partial(train, batch=args.batch_size, steps=steps),
    }
    speed = {name: {task: [] for task in tasks} for name in contenders}
    figures = {name: {} for name in contenders}
    chunks = (args.rounds + 1) * len(tasks) * len(contenders)
    bar = tqdm(total=chunks, unit="chunk", desc="measuring")
    for turn in range(args.rounds + 1):
        # Turn 0 warms up. Homes take turns task by task, to be compared within a second or two.
        for task, timed in tasks.items():
            # Who follows whom changes from turn to turn: a chunk leaves caches and disk busy.
            names, first = list(contenders), turn % len(contenders)
            for name in names[first:] + names[:first]:
                it = contenders[name]
                moved = it.moved()
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)
                    before = torch.cuda.memory_allocated(device)
                tokens, seconds = it.timed(timed)
                bar.update()
                if not turn:
                    continue
                speed[name][task].append(tokens / seconds)
                if it.moved() > moved and task in ("decode 1", "train"):
                    figures[name][f"bytes per token, {task}"] = (it.moved() - moved) / tokens
                if device.type == "cuda" and task == "train":
                    peak = torch.cuda.max_memory_allocated(device) - before
                    figures[name]["device bytes"] = device_bytes(it) + peak
    bar.close()

    result = {}
    for name in contenders:
        row = dict(figures[name])
        for task in tasks:
            rates, plain = speed[name][task], speed["resident"][task]
            ratios = [a / b for a, b in zip(rates, plain, strict=True)]
            row[f"{task} tok/s"] = statistics.median(rates)
            row[f"{task} ratio"] = statistics.median(ratios)
        result[name] = row
    model = next(iter(contenders.values())).model
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "backbone": model.sizes()["backbone"],
        "tables": {
            name: sum(w.numel() for w in it.tables.weight) for name, it in contenders.items()
        },
        "n_table": len(model.tables.weight),
        "copy GB/s": copy_speed(device),
        "threads": torch.get_num_threads(),
        "max RSS bytes": max_rss(),
        "homes": result,
    }


def report(result: dict) -> str:
    """The figures as a Markdown table."""
    tasks = ("decode 1", "decode 8", "prefill", "train")
    columns = [*tasks, "KB/token", "device"]
    lines = ["| tables | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]

    def shown(row: dict, key: str, form: str, scale: float = 1.0) -> str:
        return form.format(row[key] * scale) if key in row else "-"

    for name, row in result["homes"].items():
        cells = [f"{row[f'{task} tok/s']:,.0f} ({row[f'{task} ratio']:.1%})" for task in tasks]
        moved = [
            shown(row, f"bytes per token, {task}", "{:.1f}", 1e-3) for task in ("decode 1", "train")
        ]
        cells += [
            ", ".join(moved) if moved != ["-", "-"] else "-",
            shown(row, "device bytes", "{:.2f} GiB", 2**-30),
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    largest = max(result["tables"].values())
    lines += [
        "",
        f"{result['backbone'] / 1e6:.1f} M parameters in the backbone, {largest / 1e6:,.1f} M in "
        f"{result['n_table']} tables; {result['device']}, {result['threads']} threads; a plain "
        f"copy runs at {result['copy GB/s']:.1f} GB/s; the process held at most "
        + (gib(result["max RSS bytes"]) if result["max RSS bytes"] else "-"),
    ]
    return "\n".join(lines)


def merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair that each token was merged from, in order: its bytes, merged by the lower ranks."""
    result = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [a + b for a, b in pairwise(parts)]
            best = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], 2**32))
            parts[best : best + 2] = [pairs[best]]
        if len(parts) == 2:
            result.append(tuple(parts))
    return result


def hugging_face(encoding: tiktoken.Encoding):
    """The same tokenizer as an object of that library."""
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    except ImportError:
        raise UserError("the tokenizers package is not here: pip install tokenizers") from None
    # That library spells bytes as printable characters (GPT-2's table).
    kept = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    spell = {byte: chr(byte) for byte in kept}
    spell |= {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in spell)}

    def spelled(token: bytes) -> str:
        return "".join(spell[byte] for byte in token)

    ranks = encoding._mergeable_ranks
    made = Tokenizer(
        models.BPE(
            vocab={spelled(token): i for token, i in ranks.items()},
            merges=[(spelled(a), spelled(b)) for a, b in merges(ranks)],
        )
    )
    pattern = encoding._pat_str.replace("++", "+")  # possessive: faster in one engine, same split
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    return made


def bench_tokenizer(args: argparse.Namespace) -> dict:
    """Bytes a second of both tokenizers, by threads: printed and returned."""
    if not (args.data_dir and args.input):
        raise UserError("bench.py tokenizer needs --data_dir and --input")
    encoding = read_tokenizer(args.data_dir, read_meta(args.data_dir))
    texts = [text for _, text in documents.read(args.input, documents.Report(1.0), "text")]
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
        for _ in range(args.rounds):
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


def bench_offload(args: argparse.Namespace, device: torch.device) -> dict:
    """What `measure` found: printed and returned."""
    try:
        folder = tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-")
    except OSError as error:
        raise UserError(f"--dir {args.dir}: {error.strerror}") from None
    torch.set_float32_matmul_precision("high")  # TF32 where there is, as in training
    with folder as path:
        result = measure(args, device, Path(path))
    print(report(result))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=("offload", "tokenizer"), help="what to compare")
    add("--device", default="auto", help="auto (cuda, mps, cpu in that order) or one of them")
    for name, text in dict(
        n_layer="layers, all but the first with a table", n_head="attention heads",
        n_embd="width of the residual stream", vocab_size="rows of a table",
        block_size="context length in tokens", batch_size="sequences in a training step",
    ).items():  # fmt: skip
        add(f"--{name}", type=int, help=f"{text} ({SMALL[name]}, on a GPU {LARGE[name]})")
    add("--rounds", type=int, default=7, help="turns that each home takes (%(default)s)")
    add("--table_gib", type=float, help="GiB of rows in a sparse file, compared with small tables")
    add("--dir", type=Path, help="folder on the disk to measure (the system's temporary one)")
    add("--json", type=Path, help="write the figures to this file, too")
    add("--data_dir", type=Path, help="prepared folder, for its tokenizer")
    add("--input", nargs="+", type=Path, help="text to encode, .txt or .jsonl")
    args = parser.parse_args()
    device = pick_device(args.device)
    for name, value in (LARGE if device.type == "cuda" else SMALL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in (*SMALL, "rounds"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)} must be at least 1")
    if args.table_gib is not None and not args.table_gib > 0:
        raise UserError(f"--table_gib {args.table_gib} must be positive")
    result = bench_tokenizer(args) if args.what == "tokenizer" else bench_offload(args, device)
    if args.json:
        with atomic(args.json) as temporary:
            temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"\nwrote {args.json}")


if __name__ == "__main__":
    run(main)
