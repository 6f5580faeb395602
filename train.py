"""Train a decoder with dense, STEM or Embformer layers on one device or several.

    python train.py                                         # STEM on the countries corpus, minutes
    python train.py --ffn dense --out_dir out/dense         # the same with another FFN
    python train.py --data_dir data/book --out_dir out/book # text of your own (prepare.py)
    python train.py --preset minimind-26m --data_dir data/big --device_batch_size 8
    torchrun --standalone --nproc_per_node=4 train.py ...   # several GPUs (docs/several-gpus.md)
    python train.py --resume                                # go on where out/ckpt.pt stopped
    python train.py --stage sft --init_from out/ckpt.pt --data_dir data/chats --out_dir out/sft
    python train.py --init_from out/dense/ckpt.pt --ffn stem --out_dir out/converted  # to tables
    python train.py --eval_only --out_dir out/sft --data_dir data/chats,data/countries

Written to --out_dir: ckpt.pt (self-contained: to sample, edit or resume), metrics.jsonl, loss.png,
best.pt (the lowest validation loss; not to be resumed, none with --offload disk).
"""

import contextlib
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from tqdm import tqdm

import prepare
from common import UserError, has_bfloat16, locked, pick_device, run
from model import Decoder, outline
from offload import make_tables
from tables.storage import DTYPES
from tables.tables import ResidentTables
from text import tokenizer
from training import ranks
from training.batches import Data, check_tokenizer, read_meta
from training.checkpoints import (
    LIVE,
    checkpoint_errors,
    load_checkpoint,
    load_model,
    remove_leftovers,
    save_checkpoint,
)
from training.convert import convert
from training.objectives import NextToken, Preference, validate, validation_rows
from training.optimizer import Optimizer, schedule
from training.questions import ask, show
from training.records import Log, archive_previous_run, plot
from training.settings import STAGES, Settings, parse_args, resolve_settings


class Run:
    """What a run trains, with what, and how far it is."""

    def __init__(self, settings: Settings, data: Data, tables: Callable | None = None) -> None:
        """UserError: a checkpoint is damaged or of another run, or settings do not fit together."""
        out_dir, resume = settings.out_dir, settings.resume
        origin = out_dir / "ckpt.pt" if resume else settings.init_from
        checkpoint = load_checkpoint(origin, settings.verify and not ranks.rank) if origin else None
        if checkpoint:
            check_origin(settings, data, origin, checkpoint)
        converts = bool(checkpoint) and checkpoint["config"]["ffn"] != settings.model.ffn
        self.settings, self.data = settings, data
        self.step, self.best = 0, (math.inf, 0)  # lowest validation loss, its step
        n = self.n_part = math.lcm(settings.batch_size // settings.device_batch_size, ranks.size)
        if settings.batch_size % n or (ranks.size > 1 and settings.table_optimizer == "adamw"):
            needs = f"--batch_size that is a multiple of {n}, --table_optimizer rowwise"
            raise UserError(f"--nproc_per_node: {ranks.size} processes need a {needs}")

        # 1) the model
        device = pick_device(settings.device)
        dtype = precision(settings.dtype, device)
        torch.manual_seed(settings.seed)
        torch.set_float32_matmul_precision("high")  # TF32 where the GPU has it
        ranks.wait()  # until rank 0 has cleared the folder
        how = dict(live=out_dir / f"{LIVE}{ranks.rank or ''}")
        how |= dict(saved=checkpoint and checkpoint["tables"], fresh=not checkpoint or converts)
        make = tables or make_tables(settings.offload, device, DTYPES[settings.table_dtype], **how)
        try:
            with outline():
                whole = Decoder(settings.model, tables or ResidentTables)  # of all ranks together
            self.sizes = whole.sizes()
            self.model = model = ranks.make_model(settings.model, make).to(device)
        except ValueError as error:
            raise UserError(f"--{error}") from None

        # 2) what it is trained with
        if settings.stage == "dpo":
            self.objective = Preference(model, device, dtype, settings.beta)
        else:
            document = data.encoding.eot_token if settings.doc_mask else None
            self.objective = NextToken(model, device, dtype, document)
        self.optimizer = Optimizer(model, settings, dtype)

        # 3) what was trained before
        if checkpoint:
            with checkpoint_errors(origin):
                ranks.change_columns(checkpoint, "wte", "tables", whole=False)
                own = model.state_dict() if converts else {}  # rows stay as they are
                model.load_state_dict(own | checkpoint["model"], strict=not converts)
                if resume:
                    self.optimizer.load_state_dict(checkpoint["optimizer"])
                    for pairs, known in zip(data.pairs, checkpoint["reference"], strict=True):
                        pairs.reference[:] = known.numpy()
                    self.step, self.best = int(checkpoint["step"]), checkpoint["best"]
                    if not 0 <= self.step <= settings.max_iters:
                        steps = f"--max_iters {settings.max_iters}"
                        raise UserError(f"{origin} is of step {self.step}, beyond {steps}")
        if converts and settings.convert_tokens:
            convert(self.objective, checkpoint["model"], data, settings)
        if settings.compile:
            for block in model.blocks:  # not the model: lookups and offloading stay outside
                block.compile()
        for pairs in [] if resume else data.pairs:
            seen = validation_rows(pairs, settings.eval_tokens)
            if pairs is data.train:
                seen = min(pairs.n_row, settings.max_iters * settings.batch_size)
            self.objective.compute_reference_logprobs(pairs, seen, settings.device_batch_size)

    def save(self) -> None:
        """Write ckpt.pt: the model and all that --resume needs."""
        data, args = self.data, self.settings.flat()
        state = dict(step=self.step, best=self.best, optimizer=self.optimizer.state_dict())
        state |= dict(args=args, data=data.metas, weights=data.weights)
        state["reference"] = [torch.from_numpy(pairs.reference) for pairs in data.pairs]
        save_checkpoint(self.settings.out_dir / "ckpt.pt", self.model, data.encoding, **state)


def train(settings: Settings, tables: Callable | None = None) -> None:
    """A whole training run: what `python train.py` does, once its flags have become settings.
    `tables` makes tables of your own kind, of (n_table, V, W), in place of --offload's."""
    if settings.eval_only:
        return evaluate(settings)
    out_dir, block_size = settings.out_dir, settings.model.block_size
    rows, to_convert = STAGES[settings.stage]["rows"], settings.convert_tokens // block_size
    total = max(settings.max_iters * settings.batch_size, to_convert)
    data = Data(settings.data_dir, rows, block_size, settings.seed, total)
    settings.model.vocab_size = data.metas[0]["vocab_size"]
    if ranks.rank:
        return fit(Run(settings, data, tables))
    with locked(out_dir):
        remove_leftovers(out_dir)
        try:
            fit(Run(settings, data, tables))
        finally:
            remove_leftovers(out_dir)


def check_origin(settings: Settings, data: Data, origin: Path, checkpoint: dict) -> None:
    """Raises UserError if what a run starts or goes on from does not belong to it."""
    folder, known = settings.data_dir, [checkpoint.get(name) for name in ("data", "weights")]
    if settings.resume and "optimizer" not in checkpoint:
        raise UserError(f"{origin} cannot be resumed: start a new run with --init_from {origin}")
    if settings.resume and known != [data.metas, data.weights]:
        raise UserError(f"{folder} does not hold the text of {origin}: prepare it again")
    if not settings.resume and origin.resolve().parent == settings.out_dir.resolve():
        raise UserError(f"a new run would move --init_from {origin}: choose another --out_dir")
    with checkpoint_errors(origin):
        theirs = tokenizer.fingerprint(tokenizer.loads(checkpoint["tokenizer"]))
    check_tokenizer(data.metas[0]["tokenizer"], folder, theirs, origin)


def precision(dtype: str, device: torch.device) -> str:
    """What --dtype auto means on a device."""
    fast = {"cuda": "bfloat16" if has_bfloat16(device) else "float16"}
    return fast.get(device.type, "float32") if dtype == "auto" else dtype


def fit(run: Run) -> None:
    """Train from `run.step` to the last step, and report what was learned."""
    settings, out_dir, data = run.settings, run.settings.out_dir, run.data
    describe(run)
    if (out_dir / "ckpt.pt").exists() and not settings.resume and not ranks.rank:
        print(f"kept the run that was in {out_dir} as {archive_previous_run(out_dir)}")
    silent = SimpleNamespace(write=lambda **_: None)
    log = silent if ranks.rank else Log(out_dir / "metrics.jsonl", run.step)
    log.write(type="run", args=settings.flat(), sizes=run.sizes, data=data.metas)

    numbers = range(run.step, settings.max_iters)
    batches = (data.train.batch(number, settings.batch_size) for number in numbers)
    batch, val, figures = next(batches, None), {}, {}
    # Without a terminal there is no bar, and a line for each evaluation.
    bar = tqdm(total=settings.max_iters, initial=run.step, unit="step", disable=None)
    with bar, end_on_signals(bar) as signals:
        while True:
            # 1) evaluate and save, at the beginning, the end, and every eval_interval steps
            if not val or not batch or run.step % settings.eval_interval == 0:
                val = evaluate_and_save(run, log)
                bar.write(f"step {run.step}: " + format_metrics({**val, **figures}))

            # 2) is that all?
            if not batch:
                break
            if ranks.wait(len(signals)):
                run.save()
                if signals and signals[0] != getattr(signal, "SIGHUP", None):
                    bar.write(f"go on with: python train.py --resume --out_dir {out_dir}")
                raise SystemExit(128 + sum(signals[:1]))  # as a shell reports it

            # 3) train, and get the next batch on the way
            figures, batch = train_step(run, batch, batches)
            check_finite(figures["train_loss"], "training", run)
            run.step += 1
            log.write(type="step", step=run.step, **figures)
            bar.update()
            bar.set_postfix_str(format_metrics(figures))

    # 4) report what was learned
    best = "best.pt (val loss {:.4f}, step {}), ".format(*run.best) if run.best[1] else ""
    with torch.compiler.set_stance("force_eager"):  # each prompt has another shape
        if shares := ask(run.model, data):
            log.write(type="recall", step=run.step, **shares)
        if not ranks.rank:
            plot([out_dir], out_dir / "loss.png")
        print(f"wrote {out_dir / 'ckpt.pt'}, {best}metrics.jsonl, loss.png\n")
        show(run.model, data, out_dir / "ckpt.pt", settings.seed)
        more = f"--resume --out_dir {out_dir} --max_iters {2 * settings.max_iters}"
        print(f"  python train.py {more}  # that was {passes(run):.1f} passes over the text")


def train_step(run: Run, batch: tuple, batches: Iterator[tuple]) -> tuple[dict, tuple | None]:
    """One update. Returns the loss and further figures of the step, and the next of the batches."""
    settings, objective, losses = run.settings, run.objective, Counter()
    start, n_token, lr = time.perf_counter(), batch[0].numel(), schedule(run.step, settings)
    torch.manual_seed(settings.seed + run.step + (ranks.rank << 40))  # resumed: the same dropout
    n, mine = objective.count(*batch), range(ranks.rank, run.n_part, ranks.size)
    parts = [tuple(tensor[number :: run.n_part] for tensor in batch) for number in mine]
    for part in parts:
        # 1) forward
        share = objective.count(*part) / n  # a mean of means would weigh tokens unequally
        loss, more = objective(*part)
        # 2) a GPU is still computing: time to make the next batch, and to prefetch its rows
        if part is parts[-1] and (batch := next(batches, None)):
            run.model.tables.prefetch(batch[0])
        # 3) backward
        run.optimizer.scaler.scale(loss * share).backward()
        for name, value in {"loss": loss.detach(), **more}.items():
            losses[f"train_{name}"] += value * share
    ranks.add_up(*losses.values())
    # 4) update
    norm = run.optimizer.step(lr)
    # a host-device sync: the host waits for the step here
    figures = {name: value.item() for name, value in {**losses, "grad_norm": norm}.items()}
    tok_per_s = n_token / (time.perf_counter() - start)  # the padding of short rows included
    return {**figures, "lr": lr * settings.learning_rate, "tok_per_s": tok_per_s}, batch


@contextlib.contextmanager
def end_on_signals(bar: tqdm) -> Iterator[list[int]]:
    """Whoever stops a run (Ctrl-C, a scheduler, a terminal that closes) lets the step end and be
    saved: the signal's number is added to the list. A second one raises KeyboardInterrupt."""
    received: list[int] = []

    def handle(number: int, _) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        if number == signal.SIGINT:
            bar.write("stopping after this step (Ctrl-C again: at once, nothing saved)")
        else:
            bar.disable = True  # there may be no terminal any more

    numbers = [n for n in signal.Signals if n.name in ("SIGINT", "SIGTERM", "SIGHUP")]
    with contextlib.ExitStack() as restore:
        for number in numbers:
            restore.callback(signal.signal, number, signal.signal(number, handle))
        yield received


def evaluate_and_save(run: Run, log: Log) -> dict[str, float]:
    """Validation losses; after the first step with a checkpoint, and best.pt if it is the best."""
    settings, data = run.settings, run.data
    val = validate(run.objective, data, settings.eval_tokens, settings.device_batch_size)
    check_finite(val["val_loss"], "validation", run)
    log.write(type="eval", step=run.step, **val)
    if run.step or not settings.max_iters:
        run.save()
        # Second, and unknown to ckpt.pt: after a crash here, resuming evaluates anew.
        if val["val_loss"] < run.best[0] and not run.model.tables.on_disk:  # one more copy of them
            run.best, best = (val["val_loss"], run.step), settings.out_dir / "best.pt"
            save_checkpoint(best, run.model, data.encoding, step=run.step, args=settings.flat())
    return val


def check_finite(loss: float, kind: str, run: Run) -> None:
    """Stop before weights that are not numbers get into a checkpoint."""
    if not math.isfinite(loss):
        advice = f"lower --learning_rate {run.settings.learning_rate}"
        raise UserError(f"the {kind} loss became {loss} at step {run.step}: {advice}")


def describe(run: Run) -> None:
    """Say what is trained, and on how much of what."""
    settings, config = run.settings, run.model.config
    size = {name: f"{size / 1e6:.2f} M" for name, size in run.sizes.items()}
    print(
        f"{config.ffn} model, {config.n_layer} layers x {config.n_embd}, vocabulary "
        f"{config.vocab_size:,}: {size['total']} parameters, {size['table']} of them in tables; a "
        f"token touches {size['active']} and costs {size['flops_per_token']}FLOP forward"
    )
    on = f"{run.objective.device.type} in {run.objective.dtype}"
    print(
        f"{settings.max_iters} steps of {tokens_per_step(settings):,} tokens on {on}: "
        f"{passes(run):.1f} passes over {settings.data_dir}"
    )
    if n_cut := getattr(run.data.train, "n_cut", 0):
        print(f"{n_cut:,} conversations are longer than --block_size and will be cut")


def tokens_per_step(settings: Settings) -> int:
    return settings.batch_size * settings.model.block_size * (2 if settings.stage == "dpo" else 1)


def passes(run: Run) -> float:
    """How often the steps of a run read its text, all rows counted as full."""
    tokens = run.settings.max_iters * tokens_per_step(run.settings)
    return tokens / sum(meta["train"]["tokens"] for meta in run.data.metas)


def format_metrics(figures: dict[str, float]) -> str:
    """Figures for people: 1.2923, 6,800."""
    shown = {k: f"{v:,.0f}" if v >= 1000 else f"{v:.5g}" for k, v in figures.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown.items())


def evaluate(settings: Settings) -> None:
    """Print a checkpoint's losses on prepared folders, and ask what their corpora teach."""
    path, device = settings.init_from, pick_device(settings.device)
    model, encoding, _ = load_model(path, device, settings.offload)
    document = encoding.eot_token if settings.doc_mask else None
    objective = NextToken(model, device, precision(settings.dtype, device), document)
    folders = [part.partition("=")[0] for part in settings.data_dir.split(",")]  # without weights
    metas = {folder: read_meta(Path(folder)) for folder in folders}
    for folder, meta in metas.items():
        check_tokenizer(meta["tokenizer"], folder, tokenizer.fingerprint(encoding), path)
    for folder, meta in metas.items():
        kind = "text" if meta["kind"] == "text" else "chat"
        data = Data(folder, kind, model.config.block_size, settings.seed, total=1)
        losses = validate(objective, data, settings.eval_tokens, settings.device_batch_size)
        print(f"{path} on {folder}: {format_metrics(losses)}")
        ask(model, data)


@ranks.joined()
def main() -> None:
    given = parse_args(__doc__)
    folder = given.get("data_dir", Settings.data_dir)
    there = {"eval_only", "resume"} & given.keys() or (Path(folder) / "meta.json").exists()
    if folder == Settings.data_dir and not there and not ranks.rank:
        print(f"no data in {folder} yet: preparing the default corpus")
        prepare.prepare_corpus(prepare.Settings(out_dir=Path(folder)))
    ranks.wait()
    train(resolve_settings(**given))


if __name__ == "__main__":
    run(main)
