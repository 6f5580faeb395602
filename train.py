"""Train a decoder with dense, STEM or Embformer layers on one device.

    python train.py                                         # STEM on the countries corpus, minutes
    python train.py --ffn dense --out_dir out/dense         # the same with another FFN
    python train.py --data_dir data/book --out_dir out/book # text of your own (prepare.py)
    python train.py --preset minimind-26m --data_dir data/big --device_batch_size 8
    python train.py --resume                                # go on where out/ckpt.pt stopped

Written to --out_dir: ckpt.pt (alone enough to sample, edit or resume), metrics.jsonl, loss.png;
with --offload disk also the tables-ID.bin that ckpt.pt names.
"""

import argparse
import contextlib
import copy
import itertools
import json
import math
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import homes
import prepare
from common import UserError, atomic, load_checkpoint, pick_device, run, save_checkpoint
from compare import plot
from countries import RELATIONS
from data import Tokens, read_meta, read_tokenizer
from edit import exam, recall
from model import Decoder, ModelConfig
from rowadam import RowAdam
from sample import sample_text
from settings import DEFAULT_DATA, MODEL_FLAGS, complete, parse_args, resumed
from tablefile import LIVE, snapshots


def schedule(step: int, args: argparse.Namespace) -> float:
    """Learning rate of a step as a fraction of the peak: linear warm-up, then cosine or linear
    decay to --min_lr (STEM paper: cosine, warm-up 0.1, floor 0.1)."""
    warmup = max(1, round(args.warmup * args.max_iters))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, args.max_iters - warmup)
    fall = 0.5 * (1 + math.cos(math.pi * done)) if args.schedule == "cosine" else 1 - done
    return args.min_lr + (1 - args.min_lr) * fall


class Optimizer:
    """AdamW for the backbone and row-wise Adam for the tables, clipped together."""

    def __init__(self, model: Decoder, args: argparse.Namespace) -> None:
        self.tables, self.grad_clip = model.tables, args.grad_clip
        self.peak, self.table_peak = args.learning_rate, args.learning_rate * args.table_lr_scale
        whole = args.table_optimizer == "adamw"
        model.tables.requires_grad_(whole)
        decayed, plain, tables = [], [], []
        for name, parameter in model.named_parameters():
            if name.startswith("tables."):
                tables.append(parameter)
            elif parameter.dim() == 2 and name != "wte.weight":
                decayed.append(parameter)
            else:
                plain.append(parameter)
        betas = (args.beta1, args.beta2)
        groups = [
            {"params": decayed, "weight_decay": args.weight_decay, "peak": self.peak},
            {"params": plain, "weight_decay": 0.0, "peak": self.peak},
        ]
        rowwise = len(model.tables.weight) and not whole
        if whole:
            groups.append({"params": tables, "weight_decay": 0.0, "peak": self.table_peak})
        groups = [group for group in groups if group["params"]]
        fused = next(model.parameters()).device.type == "cuda"
        self.adamw = torch.optim.AdamW(groups, lr=self.peak, betas=betas, fused=fused or None)
        self.rows = RowAdam(model.tables, betas, seed=args.seed) if rowwise else None

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update with learning rate `lr`, a fraction of the peaks."""
        grads = [
            p.grad
            for group in self.adamw.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        row_ids, row_grads = self.tables.gradients() if self.rows else (None, [])
        if self.grad_clip:
            norm = torch.nn.utils.get_total_norm(grads + row_grads)
            scale = (self.grad_clip / (norm + 1e-6)).clamp(max=1.0)  # stays on the device: no sync
            torch._foreach_mul_(grads + row_grads, scale)
        for group in self.adamw.param_groups:
            group["lr"] = lr * group["peak"]
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        if self.rows:
            self.rows.step(row_ids, row_grads, lr * self.table_peak)

    def state_dict(self) -> dict:
        rows = self.rows.state_dict() if self.rows else None
        return {"adamw": self.adamw.state_dict(), "rows": rows}

    def load_state_dict(self, state: dict) -> None:
        self.adamw.load_state_dict(copy.deepcopy(state["adamw"]))  # else the file stays mapped
        if self.rows:
            self.rows.load_state_dict(state["rows"])


class Loss:
    """The loss of a batch that comes from the CPU, in the run's precision and attention."""

    def __init__(self, model: Decoder, device: torch.device, dtype: str, document: int | None):
        """document: the token that begins documents, which attention then does not cross."""
        self.model, self.device, self.document = model, device, document
        self.bfloat16 = dtype == "bfloat16"

    def __call__(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids, targets [B, T] -> scalar, on the device."""
        x, y = (t.to(self.device, non_blocking=True) for t in (ids, targets))
        documents = None if self.document is None else (x == self.document).cumsum(1)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            return self.model(x, y, table_ids=ids, documents=documents)[1]


@torch.no_grad()
def evaluate(loss: Loss, val: Tokens, args: argparse.Namespace) -> float:
    """Mean validation loss in nats per token over the first --eval_tokens tokens."""
    n_window = max(1, min(val.n_window, args.eval_tokens // val.block_size))
    starts = np.arange(n_window) * val.block_size
    loss.model.eval()
    total = 0.0
    for part in np.array_split(starts, -(-n_window // args.device_batch_size)):
        total += loss(*val.windows(part)).item() * len(part)  # a host-device sync
    loss.model.train()
    return total / n_window


def check_finite(loss: float, kind: str, step: int, args: argparse.Namespace) -> None:
    """Stop before weights that are not numbers get into a checkpoint."""
    if not math.isfinite(loss):
        saved = args.out_dir / "ckpt.pt"
        last = f"; the last good checkpoint is {saved}" if saved.exists() else ""
        raise UserError(
            f"the {kind} loss became {loss} at step {step}: lower --learning_rate "
            f"{args.learning_rate}{last}"
        )


def put_aside(out_dir: Path) -> Path:
    """Move the files of an earlier run into the first free folder run1, run2, ... beside them."""
    number = next(n for n in itertools.count(1) if not (out_dir / f"run{n}").exists())
    folder = out_dir / f"run{number}"
    try:
        folder.mkdir()
        tables = [path.name for path in snapshots(out_dir)]
        for name in ("ckpt.pt", "metrics.jsonl", "loss.png", "edit_report.json", *tables):
            if (out_dir / name).exists():
                os.replace(out_dir / name, folder / name)
    except OSError as error:
        raise UserError(f"cannot move the run in {out_dir} to {folder}: {error.strerror}") from None
    return folder


class Log:
    """metrics.jsonl: a line for the run, one for each step, one for each evaluation."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """A resumed run keeps the lines up to `resume_step`, at which it evaluates anew."""
        self.path = path
        self.has_run = False
        kept = []
        if resume_step and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                with contextlib.suppress(ValueError, KeyError, TypeError):  # cut off by a crash
                    record = json.loads(line)
                    last = resume_step if record["type"] == "step" else resume_step - 1
                    if record.get("step", 0) <= last:
                        kept.append(line)
                        self.has_run |= record["type"] == "run"
        with atomic(path) as temporary:
            temporary.write_text("".join(kept), encoding="utf-8")

    def write(self, **record) -> None:
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from None


def train(args: argparse.Namespace) -> None:
    checkpoint = None
    if args.resume:
        checkpoint = load_checkpoint(args.out_dir / "ckpt.pt")
        args = resumed(args, checkpoint)
    elif args.data_dir == DEFAULT_DATA and not (DEFAULT_DATA / "meta.json").exists():
        print(f"no data in {DEFAULT_DATA} yet: preparing the default corpus")
        prepare.prepare_countries(DEFAULT_DATA)
    args = complete(args)

    # data
    meta = read_meta(args.data_dir)
    encoding = read_tokenizer(args.data_dir, meta)
    if meta["corpus"] == "countries":
        longest = max(len(p) + len(a) for r in RELATIONS for p, a in exam(encoding, r))
        if args.block_size < longest:
            raise UserError(
                f"--block_size {args.block_size}: countries asks questions of {longest} tokens"
            )
    data = Tokens(args.data_dir, "train", meta, args.block_size, args.seed)
    val = Tokens(args.data_dir, "val", meta, args.block_size, args.seed)

    # model
    device = pick_device(args.device)
    if args.dtype == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
        args.dtype = "bfloat16" if has_bf16 else "float32"

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")  # TF32 where the GPU has it
    flags = {name: getattr(args, name) for name in MODEL_FLAGS}
    try:
        config = ModelConfig(
            vocab_size=meta["vocab_size"],
            **{name: value for name, value in flags.items() if value is not None},
        )
    except ValueError as error:
        raise UserError(f"--{error}") from None
    vars(args).update(asdict(config))  # what was left to default is on record, too
    tables = homes.placed(args, device, checkpoint=checkpoint, out_dir=args.out_dir)
    model = Decoder(config, tables=tables).to(device)
    optimizer = Optimizer(model, args)
    step = 0
    if checkpoint:
        if checkpoint.get("data") != meta:
            raise UserError(
                f"{args.data_dir} does not hold the text that {args.out_dir} was trained on: "
                "prepare it as it was, or start a new run with another --out_dir"
            )
        try:
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            step = checkpoint["step"]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{args.out_dir}/ckpt.pt does not hold a whole run: {error}") from None
        checkpoint = None  # unmaps its files: deleted ones would go on taking up room
    if args.compile:
        for block in model.blocks:  # blocks, not the model: lookups and offloading stay outside
            block.compile()
    batch_loss = Loss(model, device, args.dtype, encoding.eot_token if args.doc_mask else None)

    sizes = model.sizes()
    tokens_per_step = args.batch_size * args.block_size
    print(
        f"{config.ffn} model, {config.n_layer} layers x {config.n_embd}, "
        f"vocabulary {config.vocab_size:,}: {sizes['total'] / 1e6:.2f} M parameters, "
        f"{sizes['table'] / 1e6:.2f} M of them in tables; a token touches "
        f"{sizes['active'] / 1e6:.2f} M and costs {sizes['flops_per_token'] / 1e6:.1f} MFLOP"
    )
    print(
        f"{args.max_iters} steps of {tokens_per_step:,} tokens "
        f"({args.batch_size} x {args.block_size}) on {device.type} in {args.dtype}; "
        f"{args.data_dir} has {meta['train']['tokens']:,}"
    )

    # records
    saved = args.out_dir / "ckpt.pt"
    if saved.exists() and not args.resume:
        print(f"kept the run that was in {args.out_dir} as {put_aside(args.out_dir)}")
    plain_args = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    log = Log(args.out_dir / "metrics.jsonl", step)
    if not log.has_run:
        log.write(type="run", args=plain_args, sizes=sizes, train=meta["train"], val=meta["val"])

    def save() -> None:
        save_checkpoint(
            saved,
            model,
            encoding,
            optimizer=optimizer.state_dict(),
            step=step,  # the loop's position and the data's
            data=meta,
            args=plain_args,
        )

    # the loop
    accumulate = args.batch_size // args.device_batch_size
    bytes_per_token = meta["val"]["bytes"] / meta["val"]["tokens"]
    model.train()
    bar = tqdm(total=args.max_iters, initial=step, unit="step", dynamic_ncols=True)
    val_loss = None
    # Ctrl-C lets the step end, so that what is saved is a whole one; a second one stops at once.
    interrupted = []

    def interrupt(*_) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupted.append(True)
        bar.write("stopping after this step (Ctrl-C again: at once, nothing saved)")

    signal.signal(signal.SIGINT, interrupt)
    try:
        while True:
            if val_loss is None or step % args.eval_interval == 0 or step == args.max_iters:
                val_loss = evaluate(batch_loss, val, args)
                check_finite(val_loss, "validation", step, args)
                log.write(
                    type="eval",
                    step=step,
                    val_loss=val_loss,
                    val_loss_per_byte=val_loss / bytes_per_token,
                )
                if step:
                    save()
            if step == args.max_iters:
                break
            if interrupted:
                save()
                raise UserError(
                    f"stopped at step {step}; go on with: "
                    f"python train.py --resume --out_dir {args.out_dir}"
                )
            start = time.perf_counter()
            ids, targets = data.batch(step, args.batch_size)
            loss = torch.zeros((), device=device)
            for part in zip(ids.chunk(accumulate), targets.chunk(accumulate), strict=True):
                micro = batch_loss(*part) / accumulate
                micro.backward()
                loss += micro.detach()
            lr = schedule(step, args)
            optimizer.step(lr)
            train_loss = loss.item()  # a host-device sync: the host waits for the step here
            check_finite(train_loss, "training", step, args)
            seconds = time.perf_counter() - start
            step += 1
            log.write(
                type="step",
                step=step,
                train_loss=train_loss,
                lr=lr * args.learning_rate,
                tok_per_s=tokens_per_step / seconds,
            )
            bar.update()
            bar.set_postfix_str(
                f"train {train_loss:.3f}, val {val_loss:.3f}, "
                f"{tokens_per_step / seconds:,.0f} tok/s"
            )
    finally:
        bar.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        (args.out_dir / LIVE).unlink(missing_ok=True)  # a snapshot holds it; what is open stays so
    finish(model, encoding, args, meta, log, val_loss, val_loss / bytes_per_token)


def finish(model, encoding, args, meta, log: Log, val_loss: float, per_byte: float) -> None:
    """Report what was learned, draw the curve, and say what to try next."""
    print(f"validation loss {val_loss:.4f} per token, {per_byte:.4f} per byte (nats)")
    model.eval()
    torch.compiler.set_stance("force_eager")  # every prompt has another shape: not worth compiling
    prompt = ""
    if meta["corpus"] == "countries":
        prompt = "Country: Spain\nThe capital city is called"
        share = recall(model, encoding, "capital")
        log.write(type="recall", step=args.max_iters, relation="capital", recall=share)
        print(f"capitals recalled on phrasings it never saw: {share:.1%}")
    plot([args.out_dir], args.out_dir / "loss.png")
    print(f"wrote {args.out_dir}/ckpt.pt, metrics.jsonl, loss.png\n")

    options = dict(max_new_tokens=60, temperature=0.8, seed=args.seed)
    print("".join(sample_text(model, encoding, prompt, **options)))
    ckpt = args.out_dir / "ckpt.pt"
    print("\nnext:")
    print(f"  python sample.py --ckpt {ckpt}" + (' --prompt "Country: Peru"' if prompt else ""))
    if prompt and args.ffn != "dense":
        print(f"  python edit.py --ckpt {ckpt} --source Spain --target Germany")


def main() -> None:
    train(parse_args(__doc__))


if __name__ == "__main__":
    run(main)
