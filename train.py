"""Train a decoder with dense, STEM or Embformer layers on one device.

    python train.py                                         # STEM on the countries corpus, minutes
    python train.py --ffn dense --out_dir out/dense         # the same with another FFN
    python train.py --data_dir data/book --out_dir out/book # text of your own (prepare.py)
    python train.py --preset minimind-26m --data_dir data/big --device_batch_size 8
    python train.py --resume                                # go on where out/ckpt.pt stopped
    python train.py --stage sft --init_from out/ckpt.pt --data_dir data/chats --out_dir out/sft
    python train.py --eval_only --out_dir out/sft --data_dir data/chats,data/countries

Written to --out_dir: ckpt.pt (alone enough to sample, edit or resume), best.pt (the model with the
lowest validation loss, without what resuming needs), metrics.jsonl, loss.png; with --offload disk
the tables-ID.bin that ckpt.pt names, and no best.pt.
"""

import math
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import prepare
from common import UserError, locked, pick_device, run
from model import Decoder
from offload import make_tables
from sample import sample_text
from tables.storage import DTYPES
from text import tokenizer
from text.template import END, special
from training.batches import Data, check_tokenizer, read_meta
from training.checkpoints import (
    LIVE,
    checkpoint_errors,
    load_checkpoint,
    load_model,
    remove_leftovers,
    save_checkpoint,
)
from training.exam import chat_recall, fact_recall
from training.objectives import NextToken, Objective, Preference, validate, validation_rows
from training.optimizer import Optimizer, schedule
from training.records import Log, archive_previous_run, plot
from training.settings import DEFAULT_DATA, STAGES, Settings, parse_args, resolve_settings

Best = tuple[float, int]  # the lowest validation loss after the first step, and its step


def train(settings: Settings) -> None:
    """A whole training run: what `python train.py` does, once its flags have become settings."""
    if settings.eval_only:
        return evaluate(settings)
    out_dir, resume = settings.out_dir, settings.resume
    total = settings.max_iters * settings.batch_size
    rows, block_size = STAGES[settings.stage].rows, settings.model.block_size
    data = Data(settings.data_dir, rows, block_size, settings.seed, total)
    settings.model.vocab_size = data.metas[0]["vocab_size"]
    with locked(out_dir):
        remove_leftovers(out_dir)
        origin = out_dir / "ckpt.pt" if resume else settings.init_from
        checkpoint = load_checkpoint(origin, settings.verify) if origin else None
        if origin:
            check_origin(settings, data, origin, checkpoint)
        try:
            made = build(settings, data, origin, checkpoint)
            checkpoint = None  # unmaps its file: a deleted one would go on taking up room
            fit(settings, data, *made)
        finally:
            remove_leftovers(out_dir)


def check_origin(settings: Settings, data: Data, origin: Path, checkpoint: dict) -> None:
    """Raises UserError if what a run starts or goes on from does not belong to it."""
    out_dir, meta = settings.out_dir, data.metas[0]
    if settings.resume:
        if [checkpoint.get(k) for k in ("data", "weights")] != [data.metas, data.weights]:
            raise UserError(
                f"{settings.data_dir} does not hold the text of the run in {out_dir}: prepare it "
                "again"
            )
        return
    if origin.resolve().parent == out_dir.resolve():
        raise UserError(f"a new run would move --init_from {origin}: choose another --out_dir")
    with checkpoint_errors(origin):
        theirs = tokenizer.fingerprint(tokenizer.loads(checkpoint["tokenizer"]))
    check_tokenizer(meta["tokenizer"], settings.data_dir, theirs, origin)


def build(
    settings: Settings, data: Data, origin: Path | None, checkpoint: dict | None
) -> tuple[Optimizer, Objective, int, Best]:
    """Optimizer, objective with its model, step, and best evaluation so far: new ones, or those of
    the `checkpoint` at `origin` to resume, of which a new run takes the model alone."""
    out_dir, resume = settings.out_dir, settings.resume
    device = pick_device(settings.device)
    dtype = precision(settings.dtype, device)
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")  # TF32 where the GPU has it
    tables = make_tables(
        settings.offload,
        device,
        DTYPES[settings.table_dtype],
        live=out_dir / LIVE,
        saved=checkpoint and checkpoint["tables"],
        fresh=checkpoint is None,
    )
    try:
        model = Decoder(settings.model, tables=tables).to(device)
    except ValueError as error:
        raise UserError(f"--{error}") from None
    optimizer = Optimizer(model, settings)
    if settings.stage == "dpo":
        objective = Preference(model, device, dtype, settings.beta)
    else:
        document = data.encoding.eot_token if settings.doc_mask else None
        objective = NextToken(model, device, dtype, document)
    step, best = 0, (math.inf, 0)
    if checkpoint:
        with checkpoint_errors(origin):
            model.load_state_dict(checkpoint["model"])
            if resume:
                if optimizer.rows.keys() - (checkpoint["optimizer"]["rows"] or {}).keys():
                    raise UserError(
                        f"{origin} is of an older program, which trained the embedding otherwise: "
                        f"start a new run from its model with --init_from {origin}"
                    )
                optimizer.load_state_dict(checkpoint["optimizer"])
                for pairs, known in zip(data.pairs, checkpoint["reference"], strict=True):
                    pairs.reference[:] = known.numpy()
                step, best = checkpoint["step"], checkpoint.get("best", best)
                if not 0 <= step <= settings.max_iters:
                    raise ValueError(f"it is of step {step} of {settings.max_iters}")
    return optimizer, objective, step, best


def precision(dtype: str, device: torch.device) -> str:
    """What --dtype auto means on a device."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return dtype if dtype != "auto" else "bfloat16" if has_bf16 else "float32"


def evaluate(settings: Settings) -> None:
    """Print what a checkpoint loses on the validation text, or the answers, of prepared folders,
    and ask what their corpora have questions for. Writes nothing."""
    path, device = settings.init_from, pick_device(settings.device)
    model, encoding, _ = load_model(path, device, settings.offload)
    document = encoding.eot_token if settings.doc_mask else None
    objective = NextToken(model, device, precision(settings.dtype, device), document)
    lines = [f"| {path} on | loss per token | per byte | tokens | recall |", "|---" * 5 + "|"]
    for folder in [part.partition("=")[0] for part in settings.data_dir.split(",")]:  # no weights
        meta = read_meta(Path(folder))
        check_tokenizer(meta["tokenizer"], folder, tokenizer.fingerprint(encoding), path)
        kind = "text" if meta["kind"] == "text" else "chat"
        data = Data(folder, kind, model.config.block_size, settings.seed, total=1)
        val = validate(objective, data, settings.eval_tokens, settings.device_batch_size)
        (source,) = data.val.values()
        seen = objective.count(*source.rows(range(validation_rows(source, settings.eval_tokens))))
        shares = ask(model, data, talks=kind == "chat")
        recalled = f"{shares['recall']:.1%}" if shares else ""
        losses = f"{val['val_loss']:.4f} | {val['val_loss_per_byte']:.4f}"
        lines.append(f"| {folder} | {losses} | {seen:,} | {recalled} |")
    print("\n".join(lines))


def check_finite(loss: float, kind: str, step: int, settings: Settings) -> None:
    """Stop before weights that are not numbers get into a checkpoint."""
    if not math.isfinite(loss):
        model = settings.model
        raise UserError(
            f"the {kind} loss became {loss} at step {step}: lower --learning_rate "
            f"{settings.learning_rate}, --init_std {model.init_std} or --table_std "
            f"{model.table_std} (a ckpt.pt in {settings.out_dir} is of before)"
        )


def fit(
    settings: Settings,
    data: Data,
    optimizer: Optimizer,
    objective: Objective,
    step: int,
    best: Best,
) -> None:
    """Train from `step` to the last one, then `finish`."""
    model, out_dir, saved = objective.model, settings.out_dir, settings.out_dir / "ckpt.pt"
    rows, block_size = STAGES[settings.stage].rows, settings.model.block_size
    max_iters, batch_size = settings.max_iters, settings.batch_size
    if settings.compile:
        for block in model.blocks:  # blocks, not the model: lookups and offloading stay outside
            block.compile()
    for pairs in [] if settings.resume else data.pairs:
        seen = validation_rows(pairs, settings.eval_tokens)
        if pairs is data.train:
            seen = min(pairs.n_row, max_iters * batch_size)
        objective.compute_reference_logprobs(pairs, seen, settings.device_batch_size)

    config, sizes = model.config, model.sizes()
    units = {"text": "windows of", "chat": "conversations of up to", "preference": "pairs of up to"}
    print(
        f"{config.ffn} model, {config.n_layer} layers x {config.n_embd}, "
        f"vocabulary {config.vocab_size:,}: {sizes['total'] / 1e6:.2f} M parameters, "
        f"{sizes['table'] / 1e6:.2f} M of them in tables; a token touches "
        f"{sizes['active'] / 1e6:.2f} M and costs {sizes['flops_per_token'] / 1e6:.1f} MFLOP "
        "forward, attention included"
    )
    a_step = batch_size * block_size * (2 if rows == "preference" else 1)
    total, there = max_iters * a_step, sum(meta["train"]["tokens"] for meta in data.metas)
    print(
        f"{max_iters} steps of {batch_size} {units[rows]} {block_size} tokens on "
        f"{objective.device.type} in {objective.dtype}: {a_step:,} a step, {total:,} in all, "
        f"{total / there:.1f} times the {there:,} of {settings.data_dir}"
    )
    print(
        f"learning rate {settings.learning_rate:g} after {settings.warmup:.0%} of the steps, then "
        f"{settings.schedule} to {settings.min_lr:g} of it; everything goes to {out_dir}"
    )
    if n_cut := getattr(data.train, "n_cut", 0):
        print(f"{n_cut:,} conversations are longer than --block_size and will be cut")

    if saved.exists() and not settings.resume:
        print(f"kept the run that was in {out_dir} as {archive_previous_run(out_dir)}")
    log = Log(out_dir / "metrics.jsonl", step)
    log.write(type="run", args=settings.flat(), sizes=sizes, data=data.metas)

    def save() -> None:
        reference = [torch.from_numpy(pairs.reference) for pairs in data.pairs]
        state = dict(optimizer=optimizer.state_dict(), step=step, reference=reference)
        state |= dict(data=data.metas, weights=data.weights, args=settings.flat(), best=best)
        save_checkpoint(saved, model, data.encoding, **state)

    best_file, keep_best = out_dir / "best.pt", settings.keep_best and not model.tables.on_disk
    if settings.keep_best and not keep_best:
        print("best.pt is not kept: that would be one more copy of the tables on disk")
    accumulate = batch_size // settings.device_batch_size
    batch = data.train.batch(step, batch_size)
    # Without a terminal there is no bar, and a line for each evaluation.
    bar = tqdm(total=max_iters, initial=step, unit="step", dynamic_ncols=True, disable=None)
    val, last = {}, {}  # figures of the last evaluation and step
    # Who stops a run (Ctrl-C, a scheduler, a terminal that closes) lets the step end and be saved.
    stopped: list[int] = []

    def stop(number: int, _) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(number)
        if number == signal.SIGINT:
            bar.write("stopping after this step (Ctrl-C again: at once, nothing saved)")
        else:
            bar.disable = True  # there may be no terminal any more

    signals = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
    before = {number: signal.signal(number, stop) for number in filter(None, signals)}
    try:
        while True:
            if not val or step % settings.eval_interval == 0 or step == max_iters:
                val = validate(objective, data, settings.eval_tokens, settings.device_batch_size)
                check_finite(val["val_loss"], "validation", step, settings)
                log.write(type="eval", step=step, **val)
                if step:
                    save()
                    # Second, and unknown to ckpt.pt: after a crash here, resuming evaluates anew.
                    if val["val_loss"] < best[0]:
                        best = (val["val_loss"], step)
                        if keep_best:
                            told = dict(step=step, args=settings.flat())
                            save_checkpoint(best_file, model, data.encoding, **told)
                        else:
                            best_file.unlink(missing_ok=True)  # of when it was kept
                # Last: whoever reads what we say may have gone.
                bar.write(f"step {step}: " + format_metrics({**val, **last}))
            if step == max_iters:
                break
            if stopped:
                save()
                if stopped == [signal.SIGINT]:
                    bar.write(f"go on with: python train.py --resume --out_dir {out_dir}")
                raise SystemExit(128 + stopped[0])  # as a shell reports it
            start = time.perf_counter()
            n, n_token, figures = objective.count(*batch), batch[0].numel(), Counter()
            if config.dropout:  # a step draws the same however the run came to it
                torch.manual_seed(int(np.random.default_rng((settings.seed, step)).integers(2**63)))
            parts = list(zip(*(t.chunk(accumulate) for t in batch), strict=True))
            for part in parts:
                share = objective.count(*part) / n  # a mean of means would weigh tokens unequally
                micro, more = objective(*part)
                if part is parts[-1] and step + 1 < max_iters:
                    # A GPU is still computing: time to make the next batch, and to have its rows
                    # brought while the backward pass runs.
                    batch = data.train.batch(step + 1, batch_size)
                    model.tables.prefetch(batch[0])
                (micro * share).backward()
                for name, value in {"loss": micro.detach(), **more}.items():
                    figures[name] += value * share
            lr = schedule(step, settings)
            norm = optimizer.step(lr)
            # a host-device sync: the host waits for the step here
            figures = {f"train_{name}": value.item() for name, value in figures.items()}
            check_finite(figures["train_loss"], "training", step, settings)
            # the padding of short rows included, for which the machine works, too
            tok_per_s = n_token / (time.perf_counter() - start)
            step += 1
            more = dict(grad_norm=norm.item(), lr=lr * settings.learning_rate, tok_per_s=tok_per_s)
            log.write(type="step", step=step, **figures, **more)
            bar.update()
            last = {**figures, "tok/s": tok_per_s}
            bar.set_postfix_str(format_metrics(last))
    finally:
        bar.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    finish(model, data, settings, log, best if keep_best else None)


def format_metrics(figures: dict[str, float]) -> str:
    """Figures for people: 1.2923, 6,800."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value:{',.0f' if value >= 1000 else '.4f'}}"
        for name, value in figures.items()
    )


def ask(model: Decoder, data: Data, talks: bool) -> dict[str, float]:
    """Ask for capitals, in a chat if the model `talks`, say what is right, and return the shares by
    name, `recall` first: none where the corpus is another, or questions do not fit the model."""
    corpus, shares = data.metas[0]["corpus"], {}
    model.eval()
    try:
        if corpus == "countries":
            shares = dict(recall=fact_recall(model, data.encoding, "capital"))
            print(f"capitals recalled on phrasings it never saw: {shares['recall']:.1%}")
        elif talks and corpus.startswith("countries"):
            shares = chat_recall(model, data.encoding, "capital")
            print("capitals named in a chat, asked in new words: " + format_metrics(shares))
    except UserError as error:  # --block_size is less than a question needs
        print(f"capitals were not asked for: {error}")
    return shares


def finish(model: Decoder, data: Data, settings: Settings, log: Log, best: Best | None) -> None:
    """Report what was learned, draw the curve, and say what to try next."""
    encoding, corpus, out_dir = data.encoding, data.metas[0]["corpus"], settings.out_dir
    talks = STAGES[settings.stage].rows != "text"
    torch.compiler.set_stance("force_eager")  # every prompt has another shape: not worth compiling
    if shares := ask(model, data, talks):
        log.write(type="recall", step=settings.max_iters, relation="capital", **shares)
    plot([out_dir], out_dir / "loss.png")
    ckpt = out_dir / "ckpt.pt"
    kept = "best.pt (val loss {:.4f}, step {}), ".format(*best) if best else ""
    print(f"wrote {out_dir}/ckpt.pt, {kept}metrics.jsonl, loss.png\n")
    if talks:
        ids, targets = next(iter(data.val.values())).conversation(0)
        question = torch.from_numpy(ids[None, : (targets >= 0).argmax() + 1])  # [1, T]
        options = dict(temperature=0, stop=special(encoding, END))
        talk = model.generate(question.to(model.device), 60, **options)
        print(encoding.decode(talk[0, 1:].tolist()))
        print(f"\nnext:\n  python sample.py --ckpt {ckpt} --chat")
        return
    prompt = "Country: Spain\nThe capital city is called" if corpus == "countries" else ""
    options = dict(max_new_tokens=60, temperature=0.8, seed=settings.seed)
    print("".join(sample_text(model, encoding, prompt, **options)))
    print("\nnext:")
    print(f"  python sample.py --ckpt {ckpt}" + (' --prompt "Country: Peru"' if prompt else ""))
    if prompt and len(model.tables.weight):
        print(f"  python edit.py --ckpt {ckpt} --source Spain --target Germany")


def main() -> None:
    given = parse_args(__doc__)
    folder = given.get("data_dir", DEFAULT_DATA)
    there = given.get("eval_only") or (Path(folder) / "meta.json").exists()
    if folder == DEFAULT_DATA and not there:
        print(f"no data in {folder} yet: preparing the default corpus")
        prepare.prepare_corpus(prepare.Settings(out_dir=Path(folder)))
    train(resolve_settings(**given))


if __name__ == "__main__":
    run(main)
