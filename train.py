"""Train a decoder with dense, STEM or Embformer layers on one device.

    python train.py                                         # STEM on the countries corpus, minutes
    python train.py --ffn dense --out_dir out/dense         # the same with another FFN
    python train.py --data_dir data/book --out_dir out/book # text of your own (prepare.py)
    python train.py --preset minimind-26m --data_dir data/big --device_batch_size 8
    python train.py --resume                                # go on where out/ckpt.pt stopped
    python train.py --stage sft --init_from out/ckpt.pt --data_dir data/chats --out_dir out/sft

Written to --out_dir: ckpt.pt (alone enough to sample, edit or resume), metrics.jsonl, loss.png;
with --offload disk also the tables-ID.bin that ckpt.pt names.
"""

import argparse
import contextlib
import copy
import math
import signal
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

import homes
import prepare
import tokenizer
from chat import END, special
from common import UserError, load_checkpoint, pick_device, run, save_checkpoint
from compare import plot
from data import Data, check_tokenizer
from exam import chat_exam, longest_question, recall
from model import Decoder, ModelConfig
from objectives import NextToken, Preference, validate, validation_rows
from records import Log, put_aside
from rowadam import RowAdam
from sample import sample_text
from settings import DEFAULT_DATA, MODEL_FIELDS, STAGES, complete, parse_args, resumed
from tablefile import LIVE


def schedule(step: int, args: argparse.Namespace) -> float:
    """Learning rate of a step as a fraction of the peak: linear warm-up, then cosine or linear
    decay to --min_lr (STEM paper: cosine, warm-up 0.1, floor 0.1)."""
    warmup = max(1, round(args.warmup * args.max_iters)) if args.warmup else 0
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


def check_finite(loss: float, kind: str, step: int, args: argparse.Namespace) -> None:
    """Stop before weights that are not numbers get into a checkpoint."""
    if not math.isfinite(loss):
        saved = args.out_dir / "ckpt.pt"
        last = f"; the last good checkpoint is {saved}" if saved.exists() else ""
        raise UserError(
            f"the {kind} loss became {loss} at step {step}: lower --learning_rate "
            f"{args.learning_rate}{last}"
        )


def build(
    args: argparse.Namespace,
    data: Data,
    device: torch.device,
    checkpoint: dict | None,
    base: dict | None,
) -> tuple[Decoder, Optimizer, NextToken | Preference, int]:
    """Model, optimizer, objective and step: new ones, those of the `checkpoint` to resume, or a
    new run from the model in `base`."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")  # TF32 where the GPU has it
    fields = {name: getattr(args, name, None) for name in MODEL_FIELDS}
    try:
        config = ModelConfig(
            vocab_size=data.metas[0]["vocab_size"],
            **{name: value for name, value in fields.items() if value is not None},
        )
    except ValueError as error:
        raise UserError(f"--{error}") from None
    vars(args).update(asdict(config))  # what was left to default is on record, too
    tables = homes.placed(args, device, checkpoint=checkpoint or base, out_dir=args.out_dir)
    model = Decoder(config, tables=tables).to(device)
    if base:
        try:
            model.load_state_dict(base["model"])
        except (KeyError, RuntimeError) as error:
            raise UserError(f"{args.init_from} does not hold a whole model: {error}") from None
    optimizer = Optimizer(model, args)
    if args.stage == "dpo":
        objective = Preference(model, device, args.dtype, args.beta)
    else:
        document = data.encoding.eot_token if args.doc_mask else None
        objective = NextToken(model, device, args.dtype, document)
    step = 0
    if checkpoint:
        try:
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            step = checkpoint["step"]
            for pairs, known in zip(data.pairs, checkpoint["reference"], strict=True):
                pairs.reference[:] = known.numpy()
        except torch.OutOfMemoryError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{args.out_dir}/ckpt.pt does not hold a whole run: {error}") from None
    return model, optimizer, objective, step


def train(args: argparse.Namespace) -> None:
    checkpoint = base = None
    if args.resume:
        checkpoint = load_checkpoint(args.out_dir / "ckpt.pt")
        args = resumed(args, checkpoint)
    elif args.data_dir == DEFAULT_DATA and not (Path(DEFAULT_DATA) / "meta.json").exists():
        print(f"no data in {DEFAULT_DATA} yet: preparing the default corpus")
        prepare.prepare_countries(Path(DEFAULT_DATA))
    if args.init_from and not args.resume:
        base = load_checkpoint(args.init_from)
    args = complete(args, base)

    if base and args.init_from.resolve().parent == args.out_dir.resolve():
        raise UserError(
            f"--init_from {args.init_from} lies in --out_dir, from where a new run moves it away: "
            "choose another --out_dir"
        )

    # data
    rows, total = STAGES[args.stage].rows, args.max_iters * args.batch_size
    data = Data.open(args.data_dir, rows, args.block_size, args.seed, total)
    encoding, metas = data.encoding, data.metas
    if base:
        theirs = tokenizer.fingerprint(tokenizer.loads(base["tokenizer"]))
        check_tokenizer(metas[0]["tokenizer"], args.data_dir, theirs, args.init_from)
    if checkpoint and [checkpoint.get(k) for k in ("data", "weights")] != [metas, data.weights]:
        raise UserError(
            f"{args.data_dir} does not hold the text that {args.out_dir} was trained on: "
            "prepare it as it was, or start a new run with another --out_dir"
        )
    longest = longest_question(metas[0]["corpus"], encoding)
    if args.block_size < longest:
        raise UserError(
            f"--block_size {args.block_size}: {metas[0]['corpus']} asks questions of {longest} "
            "tokens, it has to be as many at least"
        )

    device = pick_device(args.device)
    if args.dtype == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
        args.dtype = "bfloat16" if has_bf16 else "float32"
    try:
        made = build(args, data, device, checkpoint, base)
        checkpoint = base = None  # unmaps their files: deleted ones would go on taking up room
        fit(args, data, device, *made)
    finally:
        with contextlib.suppress(OSError):  # Windows keeps what is still open
            (args.out_dir / LIVE).unlink(missing_ok=True)  # a snapshot holds it


def fit(
    args: argparse.Namespace,
    data: Data,
    device: torch.device,
    model: Decoder,
    optimizer: Optimizer,
    objective: NextToken | Preference,
    step: int,
) -> None:
    """Train from `step` to the last one, then `finish`."""
    encoding, metas, rows = data.encoding, data.metas, STAGES[args.stage].rows
    if args.compile:
        for block in model.blocks:  # blocks, not the model: lookups and offloading stay outside
            block.compile()
    if args.stage == "dpo" and not args.resume:
        for pairs in data.pairs:
            seen = min(pairs.n_row, args.max_iters * args.batch_size)
            if pairs is not data.train:
                seen = validation_rows(pairs, args.eval_tokens)
            objective.refer(pairs, seen, args.device_batch_size)

    config, sizes = model.config, model.sizes()
    units = {"text": "windows of", "chat": "conversations of up to", "preference": "pairs of up to"}
    print(
        f"{config.ffn} model, {config.n_layer} layers x {config.n_embd}, "
        f"vocabulary {config.vocab_size:,}: {sizes['total'] / 1e6:.2f} M parameters, "
        f"{sizes['table'] / 1e6:.2f} M of them in tables; a token touches "
        f"{sizes['active'] / 1e6:.2f} M and costs {sizes['flops_per_token'] / 1e6:.1f} MFLOP"
    )
    print(
        f"{args.max_iters} steps of {args.batch_size} {units[rows]} {args.block_size} tokens "
        f"on {device.type} in {args.dtype}; {args.data_dir} has "
        f"{sum(meta['train']['tokens'] for meta in metas):,} tokens"
    )
    if n_cut := getattr(data.train, "n_cut", 0):
        print(f"{n_cut:,} conversations are longer than --block_size and will be cut")

    # records
    saved = args.out_dir / "ckpt.pt"
    if saved.exists() and not args.resume:
        print(f"kept the run that was in {args.out_dir} as {put_aside(args.out_dir)}")
    plain_args = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    log = Log(args.out_dir / "metrics.jsonl", step)
    if not log.has_run:
        log.write(type="run", args=plain_args, sizes=sizes, data=metas)

    def save() -> None:
        save_checkpoint(
            saved,
            model,
            encoding,
            optimizer=optimizer.state_dict(),
            step=step,  # the loop's position and the data's
            data=metas,
            weights=data.weights,
            reference=[torch.from_numpy(pairs.reference) for pairs in data.pairs],
            args=plain_args,
        )

    # the loop
    accumulate = args.batch_size // args.device_batch_size
    model.train()
    bar = tqdm(total=args.max_iters, initial=step, unit="step", dynamic_ncols=True)
    val = {}
    # Ctrl-C lets the step end, so that what is saved is a whole one; a second one stops at once.
    interrupted = []

    def interrupt(*_) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupted.append(True)
        bar.write("stopping after this step (Ctrl-C again: at once, nothing saved)")

    signal.signal(signal.SIGINT, interrupt)
    try:
        while True:
            if not val or step % args.eval_interval == 0 or step == args.max_iters:
                val = validate(objective, data, args.eval_tokens, args.device_batch_size)
                check_finite(val["val_loss"], "validation", step, args)
                log.write(type="eval", step=step, **val)
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
            batch = data.train.batch(step, args.batch_size)
            n, figures = objective.count(*batch), Counter()
            for part in zip(*(t.chunk(accumulate) for t in batch), strict=True):
                share = objective.count(*part) / n  # a mean of means would weigh tokens unequally
                micro, more = objective(*part)
                (micro * share).backward()
                for name, value in {"loss": micro.detach(), **more}.items():
                    figures[name] += value * share
            lr = schedule(step, args)
            optimizer.step(lr)
            # a host-device sync: the host waits for the step here
            figures = {f"train_{name}": value.item() for name, value in figures.items()}
            check_finite(figures["train_loss"], "training", step, args)
            # the padding of short rows included, for which the machine works, too
            tok_per_s = batch[0].numel() / (time.perf_counter() - start)
            step += 1
            log.write(
                type="step",
                step=step,
                **figures,
                lr=lr * args.learning_rate,
                tok_per_s=tok_per_s,
            )
            bar.update()
            shown = {**figures, **{k: v for k, v in val.items() if "/" not in k}}
            shown = {k.removesuffix("_loss").replace("_", " "): v for k, v in shown.items()}
            shown.pop("val loss per byte", None)
            bar.set_postfix_str(
                ", ".join(f"{name} {value:.3f}" for name, value in shown.items())
                + f", {tok_per_s:,.0f} tok/s"
            )
    finally:
        bar.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
    finish(model, data, args, log, val)


def finish(
    model: Decoder, data: Data, args: argparse.Namespace, log: Log, val: dict[str, float]
) -> None:
    """Report what was learned, draw the curve, and say what to try next."""
    print(", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in val.items()))
    encoding, corpus = data.encoding, data.metas[0]["corpus"]
    model.eval()
    torch.compiler.set_stance("force_eager")  # every prompt has another shape: not worth compiling
    if corpus == "countries":
        share = recall(model, encoding, "capital")
        log.write(type="recall", step=args.max_iters, relation="capital", recall=share)
        print(f"capitals recalled on phrasings it never saw: {share:.1%}")
    talks = STAGES[args.stage].rows != "text"
    if talks and corpus.startswith("countries"):
        shares = chat_exam(model, encoding, "capital")
        log.write(type="recall", step=args.max_iters, relation="capital", **shares)
        for how, name in (("greedy", "recall"), ("sampled at temperature 0.8", "sampled")):
            print(
                f"capitals named in a chat, {how}, asked in new words: {shares[name]:.1%}, brief "
                f"answers {shares[name + '_brief']:.1%}, sentences {shares[name + '_sentence']:.1%}"
            )
    plot([args.out_dir], args.out_dir / "loss.png")
    print(f"wrote {args.out_dir}/ckpt.pt, metrics.jsonl, loss.png\n")

    ckpt = args.out_dir / "ckpt.pt"
    if talks:
        ids, targets = next(iter(data.val.values())).conversation(0)
        question = torch.from_numpy(ids[None, : (targets >= 0).argmax() + 1])  # [1, T]
        options = dict(temperature=0, stop=special(encoding, END))
        talk = model.generate(question.to(model.wte.weight.device), 60, **options)
        print(encoding.decode(talk[0, 1:].tolist()))
        print(f"\nnext:\n  python sample.py --ckpt {ckpt} --chat")
        return
    prompt = "Country: Spain\nThe capital city is called" if corpus == "countries" else ""
    options = dict(max_new_tokens=60, temperature=0.8, seed=args.seed)
    print("".join(sample_text(model, encoding, prompt, **options)))
    print("\nnext:")
    print(f"  python sample.py --ckpt {ckpt}" + (' --prompt "Country: Peru"' if prompt else ""))
    if prompt and args.ffn != "dense":
        print(f"  python edit.py --ckpt {ckpt} --source Spain --target Germany")


def main() -> None:
    train(parse_args(__doc__))


if __name__ == "__main__":
    run(main)
