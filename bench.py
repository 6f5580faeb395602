"""Speed and memory, always two things side by side in one run.

    python bench.py offload                              # where tables live: device, RAM, disk
    python bench.py offload --json bench.json            # the same figures for other programs
    python bench.py offload --table_gib 32 --dir /big    # larger than memory, in a sparse file
    python bench.py tokenizer --data_dir data/books --input books.jsonl

**offload.** All homes hold the same model and take turns, chunk by chunk, so what slows the
machine for a while slows all of them. Speeds in tok/s are medians over the turns; percentages are
medians of the ratios to `resident` within a turn. Token ids are random with Zipf's frequencies.
`decode` 1 and 8 is one token at a time for so many sequences, `prefill` forward passes, `train`
whole optimizer steps. On a GPU, KB/token crossed the bus per token of decode 1 and of train, and
`device` is its peak memory in training.

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
from torch import Tensor
from torch.utils.benchmark import timer
from tqdm import tqdm

from common import UserError, add_flags, atomic, check_ranges, flag, make_parser, pick_device, run
from model import Decoder, KVCache, ModelConfig
from offload import OffloadedTables
from tables.file import TableFile
from tables.memory import RamHome, check_ram
from tables.tables import ResidentTables, StoredTables, Tables
from text import documents
from training.batches import read_meta, read_tokenizer
from training.checkpoints import check_memory, device_flag
from training.optimizer import Optimizer
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
    rounds: int = flag(7, "turns that each home takes", must="at least 1")
    table_gib: float | None = flag(None, "GiB of rows in a sparse file", must="a positive number")
    dir: Path | None = flag(None, "folder on the disk to measure", shown="a temporary one")
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
    u = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ((vocab_size + 1) ** u).long().clamp_(1, vocab_size) - 1


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

    def ids(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Fresh ids, and those under which tables are looked up (more of them with --table_gib)."""
        self.batch += 1
        sizes = (self.model.config.vocab_size, self.tables.vocab_size)
        return tuple(zipf(shape, size, self.batch) for size in sizes)

    def measure(self, name: str) -> float:
        """Tokens per second of a task."""
        ring = getattr(self.tables, "ring", None)
        moved, before = ring.moved if ring else 0, torch.cuda.memory_allocated()
        if self.bench.cuda:
            torch.cuda.reset_peak_memory_stats()
        start = timer()
        tokens = TASKS[name](self)
        if ring:
            ring.drain()  # what is on its way belongs to this chunk
        seconds = timer() - start
        if ring:
            self.figures[f"bytes per token, {name}"] = (ring.moved - moved) / tokens
        if self.bench.cuda and name == "train":
            self.figures["device bytes"] = self.held + torch.cuda.max_memory_allocated() - before
        self.held += torch.cuda.memory_allocated() - before
        return tokens / seconds


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
    for step, (ids, table_ids) in enumerate(batches):
        there = ids.to(it.bench.on)
        with torch.autocast(it.bench.on.type, torch.bfloat16, enabled=it.bench.cuda):
            loss = it.model(there, there, table_ids=table_ids)[1]
        if step + 1 < steps:
            it.tables.prefetch(batches[step + 1][1])
        loss.backward()
        it.optimizer.step(1.0)
        loss.item()  # as the training loop does
    return steps * ids.numel()


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
    sparse = bench.table_gib is not None
    shape = (bench.vocab_size, bench.block_size, bench.n_layer, bench.n_head, bench.n_embd)
    try:
        config = ModelConfig(*shape, stem_layers="all")
        check_memory(config, 4, 4)
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
    return {name: Contender(bench, config, tables) for name, tables in bar}


def bench_offload(bench: Bench) -> dict:
    """Measure all homes: figures, printed and returned."""
    torch.set_float32_matmul_precision("high")  # TF32 where there is, as in training
    rates: dict[tuple[str, str], list[float]] = {}  # tokens per second, by home and task
    with tempfile.TemporaryDirectory(dir=bench.dir, prefix="bench-") as folder:
        contenders = build(bench, Path(folder))
        names = list(contenders)
        # Homes take turns task by task, to be compared within a second or two. Who follows whom
        # changes from turn to turn: a chunk leaves caches and disk busy. The first turn warms up.
        turns = [*itertools.product(range(bench.rounds + 1), TASKS, range(len(names)))]
        for turn, task, place in tqdm(turns, desc="measuring", unit="chunk"):
            name = names[(turn + place) % len(names)]
            if name == "disk, cold":
                drop_pages(contenders[name].tables.home)
            rate = contenders[name].measure(task)
            if turn:
                rates.setdefault((name, task), []).append(rate)

    for (name, task), speeds in rates.items():
        ratios = [a / b for a, b in zip(speeds, rates["resident", task], strict=True)]
        figures = {f"{task} tok/s": median(speeds), f"{task} ratio": median(ratios)}
        contenders[name].figures |= figures
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
    columns = ["tables", *TASKS, "KB/token", "device"]
    print(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|")
    for name, row in result["homes"].items():
        cells = [f"{row[f'{task} tok/s']:,.0f} ({row[f'{task} ratio']:.1%})" for task in TASKS]
        moved = [row.get(f"bytes per token, {task}") for task in ("decode 1", "train")]
        moved = ", ".join(f"{each / 1e3:.1f}" for each in moved if each is not None) or "-"
        held = f"{row['device bytes'] / 2**30:.2f} GiB" if "device bytes" in row else "-"
        print(f"| {' | '.join([name, *cells, moved, held])} |")
    held = f"{result['max RSS bytes'] / 2**30:.2f} GiB" if result["max RSS bytes"] else "-"
    print(
        f"\n{result['backbone'] / 1e6:.1f} M parameters in the backbone, "
        f"{max(result['tables'].values()) / 1e6:,.1f} M in {result['n_table']} tables; "
        f"{result['device']}, {result['threads']} threads; the process held at most {held}"
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
