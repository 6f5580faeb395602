"""Speed and memory, always two things side by side in one run.

    python lab/bench.py all --quick          # everything small, in seconds
    python lab/bench.py train                # kinds of layers, eager and compiled
    python lab/bench.py train --preset minimind-26m      # ... of that shape
    python lab/bench.py decode               # one token at a time
    python lab/bench.py cache                # decoding from keys and values, and from ids
    python lab/bench.py offload              # where tables live: device, RAM, disk
    python lab/bench.py offload --table_gib 32 --dir /big    # larger than memory, sparse
    python lab/bench.py gpu                  # speeds of docs/ that a GPU has shown, in 6 parts
    python lab/bench.py gpu --part 2         # one of them: minutes

Contenders take turns, so what slows the machine for a while slows all of them. Speeds are medians
over the turns; ratios are medians of the ratios to a baseline within a turn. Token ids are random
with Zipf's frequencies. Default sizes are for two CPU cores: give larger ones on a GPU.
"""

import math
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import (
    UserError,
    add_flags,
    check_settings,
    flag,
    make_parser,
    pick_device,
    run_command,
    training_dtype,
)

# isort: split
import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import timer
from tqdm import tqdm

from lab.experiment import pick
from lab.pictures import markdown
from model import Decoder, ModelConfig
from offload import OffloadedTables
from tables.storage import DiskStorage
from tables.tables import ResidentTables, StoredTables, Tables
from training.captured import capture_steps
from training.decoding import cast_backbone, norm_keys, use_column_major_weights
from training.optimizer import Optimizer
from training.placement import make_tables
from training.report import model_sizes
from training.settings import PRESETS, Settings, device_flag

KINDS = pick("dense", "STEM, third", "STEM, all", "Embformer")
QUICK = {
    "n_layer": 3,
    "n_head": 2,
    "n_embd": 32,
    "vocab_size": 500,
    "block_size": 64,
    "batch_size": 2,
    "rounds": 2,
}


@dataclass
class Bench:
    device: str = device_flag()
    preset: str | None = flag(None, "the shape of a preset of train.py", choices=PRESETS)
    n_layer: int = flag(6, "number of layers", must="at least 1")
    n_head: int = flag(6, "attention heads", must="at least 1")
    n_embd: int = flag(192, "width of the residual stream", must="at least 1")
    vocab_size: int = flag(6400, "rows of a table", must="at least 1")
    block_size: int = flag(256, "context length in tokens", must="at least 1")
    batch_size: int = flag(8, "sequences in a training step", must="at least 1")
    rounds: int = flag(7, "turns that each contender takes", must="at least 1")
    ffn: str = flag("stem", "of offload: stem or embformer", choices=("stem", "embformer"))
    quick: bool = flag(False, "small models, two turns, nothing compiled: does it run?")
    table_gib: float | None = flag(
        None, "of offload: GiB in a sparse file", must="a positive number"
    )
    dir: Path | None = flag(None, "folder on the disk to measure", shown="a temporary one")
    part: int | None = flag(None, "of gpu: one part", shown="all", choices=range(1, 7))

    def __post_init__(self) -> None:
        check_settings(self)
        if self.dir is not None and not self.dir.is_dir():
            raise UserError(f"--dir {self.dir} is not a folder")
        self.on = pick_device(self.device)
        self.cuda = self.on.type == "cuda"
        self.dtype = getattr(torch, training_dtype("auto", self.on))

    def model(self, **flags) -> ModelConfig:
        """The shape that was asked for, with other flags."""
        every = {**vars(self), **PRESETS.get(self.preset, {}), **flags}
        return ModelConfig(
            **{f.name: every[f.name] for f in fields(ModelConfig) if f.name in every}
        )


def zipf(shape: tuple[int, ...], vocab_size: int, seed: int) -> Tensor:
    """Ids of about Zipf's frequencies, log(1 + 1 / (id + 1)): the log of id + 1 is uniform."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(shape, generator=generator, dtype=torch.float64)
    return ((vocab_size + 1) ** u).long().clamp_(1, vocab_size) - 1


@dataclass
class Contender:
    """A model that takes turns with others."""

    bench: Bench
    config: ModelConfig
    tables: Callable[..., Tables] = ResidentTables
    cache: str = "kv"  # see Decoder.make_cache
    optimizer: Optimizer | None = None  # what trains has one
    batches: int = 0  # drawn so far

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Decoder(self.config, self.tables).to(self.bench.on)

    def batch(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Fresh ids, and those that tables are looked up under: others only with --table_gib."""
        self.batches += 1
        ids = zipf(shape, self.config.vocab_size, self.batches)
        n_row = self.model.tables.n_row
        if n_row == self.config.vocab_size:
            return ids, ids
        return ids, zipf(shape, n_row, self.batches)

    def now(self) -> float:
        """Seconds, once what is under way has ended: kernels, and transfers of rows."""
        if isinstance(self.model.tables, OffloadedTables):
            self.model.tables.transfers.finish()
        if self.bench.cuda:
            torch.cuda.synchronize()
        return timer()


Rows = list[dict[str, str]]  # of a table
Speeds = dict[str, dict[str, np.ndarray]]  # by task and contender: tok/s of each turn [rounds]


def compare(tasks: dict[str, Callable], contenders: dict[str, Contender], rounds: int) -> Speeds:
    """What tasks return of contenders, which take turns in an order that changes, as a turn leaves
    caches and disk busy. The first turn warms up."""
    speeds = {}
    for title, task in tasks.items():
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        order = random.Random(0)
        for _ in tqdm(range(1 + rounds), title, unit="turn"):
            for name in order.sample(list(contenders), len(contenders)):
                rates[name].append(task(contenders[name]))
        speeds[title] = {name: np.array(rates[name][1:]) for name in contenders}
    return speeds


def table(title: str, speeds: Speeds) -> Rows:
    """A row for each contender: medians of tok/s and, in parentheses, of their ratios to those of
    the first contender in the same turn."""
    rows = {}
    for task, rates in speeds.items():
        baseline = next(iter(rates.values()))
        for name, speed in rates.items():
            cell = f"{np.median(speed):,.0f} ({np.median(speed / baseline):.2f})"
            rows.setdefault(name, {title: name})[task] = cell
    return list(rows.values())


# --- tasks ---


def train(contender: Contender, steps: int = 1) -> float:
    bench = contender.bench
    model = contender.model.train()
    if contender.optimizer is None:
        dtype = training_dtype("auto", bench.on)
        settings = Settings(learning_rate=1e-3, model=contender.config)
        contender.optimizer = Optimizer(model, settings, dtype)
    n = contender.config.block_size
    shape = (bench.batch_size, n + 1)
    batches = [contender.batch(*shape) for _ in range(steps)]
    start = contender.now()
    for number, (ids, table_ids) in enumerate(batches, 1):
        with torch.autocast(bench.on.type, bench.dtype, enabled=bench.dtype != torch.float32):
            _, loss = model(ids[:, :-1], ids[:, 1:], table_ids=table_ids[:, :-1])
        if number < steps:
            model.tables.prefetch(batches[number][1][:, :-1])
        contender.optimizer.scaler.scale(loss).backward()
        contender.optimizer.step(fraction=1.0)
    return steps * bench.batch_size * n / (contender.now() - start)


@torch.inference_mode()
def prefill(contender: Contender) -> float:
    bench = contender.bench
    model = contender.model.eval()
    ids, table_ids = contender.batch(bench.batch_size, contender.config.block_size)
    start = contender.now()
    model(ids, table_ids=table_ids, last_only=True)
    return ids.numel() / (contender.now() - start)


@torch.inference_mode()
def decode(contender: Contender, batch: int, context: int, new: int) -> float:
    """Read new tokens one by one after a context. They are given: a model that knows nothing would
    repeat itself."""
    model = contender.model.eval()
    block_size = contender.config.block_size
    new = min(new, block_size)
    context = min(context, block_size - new)
    ids, table_ids = contender.batch(batch, context + new)
    cache = model.make_cache(batch, kind=contender.cache)
    if context:
        model(ids[:, :context], table_ids=table_ids[:, :context], cache=cache, last_only=True)
    start = contender.now()
    for place in range(context, context + new):
        token = slice(place, place + 1)
        logits = model.step(ids[:, token], table_ids[:, token], cache)
        logits.argmax(-1).tolist()  # waits for the device, as sampling does
    return batch * new / (contender.now() - start)


# --- what is compared ---


def bench_train(bench: Bench) -> Rows:
    contenders = {}
    for kind, flags in KINDS.items():
        config = bench.model(**flags)
        contenders[kind] = Contender(bench, config)
        if not bench.quick:
            compiled = contenders[f"{kind}, compiled"] = Contender(bench, config)
            for block in compiled.model.blocks:
                block.compile()
    speeds = compare({"tok/s": train}, contenders, bench.rounds)
    fastest = matrix_rate(bench)
    rows = table(f"train ({bench.dtype}; matrices {fastest / 1e9:,.0f} GFLOP/s)", speeds)
    for row, (name, speed) in zip(rows, speeds["tok/s"].items(), strict=True):
        flops = 3 * model_sizes(contenders[name].model)["flops_per_token"]  # with a backward pass
        row["share of the matrix rate"] = f"{np.median(speed) * flops / fastest:.2f}"
    return rows


def matrix_rate(bench: Bench) -> float:
    """FLOP/s of a product of two large square matrices, as training has it: the median of 9."""
    # 2,048 would be over on a GPU in less time than it takes to start.
    size = 64 if bench.quick else 8192 if bench.cuda else 2048
    a = torch.randn(size, size, device=bench.on, dtype=bench.dtype)
    seconds = []
    for _ in range(9):
        start = timer()
        torch.mm(a, a)
        if bench.cuda:
            torch.cuda.synchronize()
        seconds.append(timer() - start)
    return 2 * size**3 / float(np.median(seconds))


def bench_decode(bench: Bench) -> Rows:
    contenders = {}
    for kind, flags in KINDS.items():
        contender = contenders[kind] = Contender(bench, bench.model(**flags))
        # As sample.py has them: on a CPU weights by columns, on a GPU in fewer bits.
        if bench.cuda:
            cast_backbone(contender.model, bench.dtype)
            graph = contenders[f"{kind}, captured"] = Contender(bench, contender.config)
            cast_backbone(graph.model, bench.dtype)
            capture_steps(graph.model)
        else:
            use_column_major_weights(contender.model)
    # A captured step is timed with its capture, as a user meets it: in a text, not in a sentence.
    new = 192 if bench.cuda else 96
    tasks = {f"batch {n}": partial(decode, batch=n, context=64, new=new) for n in (1, 8)}
    return table("decode", compare(tasks, contenders, bench.rounds))


def bench_cache(bench: Bench) -> Rows:
    contenders = {}
    for kind in ("kv", "ids"):
        contenders[kind] = Contender(bench, bench.model(ffn="embformer"), cache=kind)
        norm_keys(contenders[kind].model)
        if not bench.cuda:
            use_column_major_weights(contenders[kind].model)
    tasks = {}
    size = bench.model().block_size
    for part in (16, 4, 1):
        context = min(size // part, max(0, size - 16))  # leaves room for the new ones
        tasks[f"after {context}"] = partial(decode, batch=1, context=context, new=16)
    return table("cache", compare(tasks, contenders, bench.rounds))


def bench_offload(bench: Bench) -> Rows:
    tasks = {
        "decode 1": partial(decode, batch=1, context=1, new=128),
        "decode 8": partial(decode, batch=8, context=1, new=64),
        "prefill": prefill,
        # A turn's first rows and last update have nothing to hide behind: more steps where they
        # are short.
        "train": partial(train, steps=20 if bench.cuda else 2),
    }
    config = bench.model(ffn=bench.ffn, stem_layers="all")
    with tempfile.TemporaryDirectory(dir=bench.dir, prefix="bench-") as folder:
        places = {"resident": ResidentTables}
        if bench.table_gib:
            name = f"disk, {bench.table_gib:g} GiB of rows"
            places[name] = partial(sparse_tables, bench, Path(folder) / "sparse")
        else:
            for name, offload in (("RAM", "cpu"), ("disk", "disk")):
                live = Path(folder) / name
                places[name] = make_tables(offload, bench.on, torch.float32, live=live, fresh=True)
        contenders = {}
        for name, tables in places.items():
            contenders[name] = Contender(bench, config, tables=tables)
        return table("tables", compare(tasks, contenders, bench.rounds))


def sparse_tables(bench: Bench, folder: Path, n_table: int, _: int, width: int) -> Tables:
    """Tables of --table_gib, whatever the vocabulary, in files that take no room."""
    n_row = int(bench.table_gib * 2**30) // (n_table * width * 4)
    if not n_row:
        raise UserError(f"--table_gib {bench.table_gib:g}: less than a row of each table")
    shape = (n_row, n_table, width)
    folder.mkdir()
    with open(folder / "rows", "wb") as file:
        file.truncate(4 * math.prod(shape))
    storage = DiskStorage(folder, shape, torch.float32, writable=True)
    return OffloadedTables(storage, bench.on) if bench.cuda else StoredTables(storage, bench.on)


COMPARISONS = {
    "train": bench_train,
    "decode": bench_decode,
    "cache": bench_cache,
    "offload": bench_offload,
}


def report(name: str, bench: Bench) -> None:
    print("\n" + markdown(COMPARISONS[name](bench)))


WIDE = dict(n_layer=8, n_head=16, n_embd=2048, block_size=512, batch_size=32)
MINIMIND = dict(preset="minimind-26m")
GPU_PARTS = [
    ("offload", dict(rounds=5)),
    ("offload", dict(MINIMIND, batch_size=16, vocab_size=100_000, rounds=3)),
    ("offload", dict(WIDE, rounds=2)),
    ("train", dict(MINIMIND, batch_size=64, rounds=5)),
    ("train", dict(WIDE, rounds=3)),
    ("decode", dict(rounds=3)),
]


def bench_gpu(given: dict) -> None:
    """The parts of docs/offloading.md and docs/results.md; `given` are flags that override theirs.
    UserError: there is no GPU."""
    if not Bench(**given).cuda and not given.get("quick"):
        raise UserError("gpu: there is no CUDA device (with --quick, small models try it anyway)")
    for number, (name, flags) in enumerate(GPU_PARTS, 1):
        if given.get("part", number) == number:
            print(f"\npart {number}: {name} {flags}")
            if given.get("quick"):
                flags = {}
            report(name, Bench(**{**flags, **given}))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=(*COMPARISONS, "all", "gpu"), help="what to compare")
    add_flags(parser, Bench)
    flags = vars(parser.parse_args())
    what = flags.pop("what")
    torch.set_float32_matmul_precision("high")  # TF32 where there is, as in training
    if "preset" in flags:
        for name in ("n_layer", "n_head", "n_embd", "block_size", "quick"):
            if name in flags:
                raise UserError(f"--{name}: not with --preset, whose shape is given")
    if "quick" in flags:
        flags = {**QUICK, **flags}
    if what == "gpu":
        return bench_gpu(flags)
    if "part" in flags:
        raise UserError("--part: only of gpu")
    bench = Bench(**flags)
    for name in COMPARISONS if what == "all" else [what]:
        report(name, bench)


if __name__ == "__main__":
    run_command(main)
