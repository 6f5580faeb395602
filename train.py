"""Train a decoder with STEM, Embformer, dense or other layers on one device or several.

    python train.py                                         # STEM on the countries corpus, minutes
    python train.py --ffn dense --out_dir out/dense         # the same with another FFN
    python train.py --data_dir data/book --out_dir out/book # text of your own (prepare.py)
    python train.py --preset minimind-26m --data_dir data/big --device_batch_size 8
    torchrun --standalone --nproc_per_node=4 train.py ...   # several GPUs (docs/offloading.md)
    python train.py --resume                                # continue where out/ckpt.pt stopped
    python train.py --stage sft --init_from out/ckpt.pt --data_dir data/chats --out_dir out/sft
    python train.py --stage dpo --init_from out/sft/ckpt.pt --data_dir data/liked --out_dir out/dpo
    python train.py --eval_only --out_dir out/sft --data_dir data/chats,data/countries

Written to --out_dir: ckpt.pt (all that is needed to sample, edit or resume; with --offload disk,
together with ckpt.pt.tables), metrics.jsonl, loss.png, best.pt (lowest validation loss; cannot be
resumed; not with --offload disk).
"""

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

# Before torch, whose threads it tells how to wait.
from common import (
    UserError,
    check_compiler,
    check_values,
    command_line,
    mixed_seed,
    pick_device,
    remove,
    run_command,
    stop_signals,
    training_dtype,
)

# isort: split
import torch
from tqdm import tqdm

from corpora import recall
from corpora.countries import write_corpus
from model import BUILT_IN, Decoder, ModelConfig, decoder_class
from tables.storage import DTYPES
from text import tokenizer
from text.dataset import read_meta
from training import ranks
from training.batches import Data, check_tokenizer, parse_mixture
from training.checkpoints import (
    checkpoint_of,
    load_checkpoint,
    read_checkpoint,
    read_encoding,
    save_checkpoint,
)
from training.checks import check_logits, check_saved, check_trained
from training.digests import changed, digests, digests_of_imported
from training.evaluation import evaluate
from training.folders import has_run, live_tables, remove_run, run_folder
from training.objectives import NextToken, validate
from training.optimizer import Optimizer, schedule
from training.placement import check_own, make_tables
from training.records import Log, Meter
from training.report import describe, format_figures, model_sizes, report
from training.settings import (
    EVAL_FLAGS,
    RESUMABLE_FLAGS,
    STAGES,
    Settings,
    changed_settings,
    new_settings,
    parse_args,
)

# --- from flags to a run ---


def resolve_settings(**given) -> Settings:
    """The settings of a run from the flags that are given, by name. The default corpus is generated
    if a new run needs it. UserError: a file cannot be read, or flags do not fit together."""
    for cls in (Settings, ModelConfig):
        check_values(cls, given)
    out_dir = Path(given.get("out_dir", Settings.out_dir))
    if given.get("resume"):
        checkpoint = read_checkpoint(out_dir / "ckpt.pt")
        given["out_dir"] = out_dir
        settings = changed_settings(given, checkpoint["args"], (*RESUMABLE_FLAGS, "max_iters"))
        step = checkpoint["step"]
        if step > settings.max_iters:
            raise UserError(f"{settings.origin} is already at step {step}; raise --max_iters")
        if step == settings.max_iters:
            done = f"note: {settings.origin} has taken its {step} steps"
            print(f"{done}: flags change nothing in it; a larger --max_iters goes on")
        return settings
    if given.get("eval_only"):
        given["init_from"] = path = checkpoint_of(given.get("init_from", out_dir))
        args = {**read_checkpoint(path)["args"], "offload": "none", "device": "auto"}
        # As many tokens for every checkpoint, so that their losses can be compared.
        args.pop("eval_tokens", None)
        if "device_batch_size" in given:  # it need not divide the batch size of the run
            args["batch_size"] = given["device_batch_size"]
        return changed_settings(given, args, EVAL_FLAGS)
    checkpoint = None
    if given.get("init_from"):
        given["init_from"] = checkpoint_of(given["init_from"])
        checkpoint = read_checkpoint(given["init_from"])
    folders = list(parse_mixture(given.get("data_dir", Settings.data_dir)))
    default = Path(Settings.data_dir)
    if default in folders:
        if ranks.rank == 0 and not os.path.exists(default / "meta.json"):
            print(f"no data in {default} yet: generating the default corpus")
            write_corpus("countries", default)
        ranks.wait()
    return new_settings(given, [read_meta(folder) for folder in folders], checkpoint)


@dataclass
class Run:
    """State of one run: settings, data, model, objective, optimizer, step."""

    settings: Settings
    data: Data
    model: Decoder
    objective: NextToken
    optimizer: Optimizer
    n_part: int  # micro-batches in a step, of all ranks together
    step: int = 0
    resumed: int | None = None  # the step of the ckpt.pt that it goes on with, not written anew
    checked: bool = False  # by `check_logits`, since this process began
    best: tuple[float, int] = (math.inf, 0)  # lowest validation loss, and its step

    def save(self) -> None:
        """Write ckpt.pt: the model and all that --resume needs."""
        self.save_model(
            "ckpt.pt",
            best=self.best,
            optimizer=self.optimizer.state_dict(),
            objective=self.objective.state_dict(),
            weights=self.data.weights,
        )

    def save_model(self, name: str, **state) -> None:
        """Write the model as it is, and `state`, to a file of --out_dir."""
        save_checkpoint(
            self.settings.out_dir / name,
            self.model,
            self.data.encoding,
            step=self.step,
            args=self.settings.flat(),
            data=self.data.metas,
            **state,
        )


def train(settings: Settings) -> None:
    """A whole training run: what `python train.py` does once its flags have become settings."""
    note_edited_files(settings)
    with run_folder(settings.out_dir):
        # 1) data, and the checkpoint to continue or to start from
        checkpoint = None
        if settings.origin is not None:
            checkpoint = load_checkpoint(settings.origin, verify=ranks.rank == 0)
        # Sequences that the run reads, with a batch that is prefetched in the last step.
        total = (settings.max_iters + 1) * settings.batch_size
        reads, size = STAGES[settings.stage].reads, settings.model.block_size
        data = Data(settings.data_dir, reads, size, settings.seed, total)
        settings.model.vocab_size = data.metas[0]["vocab_size"]
        check_start(settings, data, checkpoint)

        # 2) train
        run = start(settings, data, checkpoint)
        del checkpoint  # else its file stays mapped, and takes room when it has been replaced
        describe(settings, data, run.objective)
        fit(run)
        del run  # Windows deletes no tables that are mapped


def note_edited_files(settings: Settings) -> None:
    """Say if a file of the model is another now than when Python read it, as in a notebook."""
    now = digests(settings.model.ffn, settings.model.attention)
    edited = changed(digests_of_imported(settings.model), now)
    if edited:
        print(f"note: {', '.join(edited)} changed after Python read it: restart Python")


def check_start(settings: Settings, data: Data, checkpoint: dict | None) -> None:
    """Raises UserError if the run would replace another one, or cannot start from, or continue, the
    checkpoint at its origin."""
    out_dir, origin = settings.out_dir, settings.origin
    if settings.resume and "optimizer" not in checkpoint:
        raise UserError(f"{origin} cannot be resumed, it has no optimizer state: use --init_from")
    if checkpoint is not None:
        theirs = tokenizer.fingerprint(read_encoding(origin, checkpoint))
        folder = next(iter(data.val))
        check_tokenizer(data.metas[0]["tokenizer"], folder, theirs, origin)
    if settings.resume:
        # The optimizer goes on with its own, whatever a Python script has put here.
        if checkpoint["args"].get("learning_rate") not in (None, settings.learning_rate):
            raise UserError("--learning_rate: not with --resume, use --init_from")
        if (checkpoint["data"], checkpoint["weights"]) != (data.metas, data.weights):
            raise UserError(
                f"--data_dir {settings.data_dir} is not, or no longer, what {origin} was trained "
                f"on (then {checkpoint['args']['data_dir']}): name the same data, by the same "
                "weights, or start a new run with --init_from and another --out_dir"
            )
    elif origin is not None and Path(origin).resolve().parent == out_dir.resolve():
        raise UserError(f"--init_from {origin} lies in --out_dir; choose another --out_dir")
    # Only rank 0 looks: it has locked the folder, and removes one that it made if this raises.
    elif not settings.overwrite and ranks.rank == 0 and has_run(out_dir):
        ways = "--resume goes on with it, --overwrite replaces it, or choose another --out_dir"
        raise UserError(f"{out_dir} has the run of an earlier command: {ways}")


def start(settings: Settings, data: Data, checkpoint: dict | None) -> Run:
    """A run at its first step or, if it resumes, at the step of its checkpoint."""
    # 1) how a step is divided: as many micro-batches for each rank, none above --device_batch_size
    # (8 sequences, 4 at a time: 2 micro-batches; 3 ranks would need 6, which do not divide 8)
    n_part = math.lcm(settings.batch_size // settings.device_batch_size, ranks.size)
    if settings.batch_size % n_part:
        sizes = f"--batch_size {settings.batch_size} must be a multiple of {n_part}"
        raise UserError(f"with {ranks.size} processes, {sizes}")
    if ranks.size > 1 and settings.table_optimizer == "adamw":
        raise UserError("--table_optimizer adamw: in one process only")

    # 2) the model
    device = pick_device(settings.device)
    dtype = training_dtype(settings.dtype, device)
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")  # TF32 where the GPU has it
    if settings.deterministic and device.type == "cuda":
        # Else attention's backward pass adds up in whatever order its threads come.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # nobody reads it
    tables = make_tables(
        settings.offload,
        device,
        DTYPES[settings.table_dtype],
        live=live_tables(settings.out_dir) / str(ranks.rank),
        saved=checkpoint["storage"] if settings.resume else None,
        fresh=checkpoint is None,
    )
    model = decoder_class(settings.model.ffn)(settings.model, tables)
    if checkpoint is None and torch.initial_seed() != settings.seed:
        reseeds = f"--ffn {settings.model.ffn} calls torch.manual_seed"
        print(f"note: {reseeds}: weights begin the same with every --seed")
    check_own(model, settings, device)
    ranks.keep_columns(model)
    model = model.to(device)

    # 3) what trains it
    boundary = data.encoding.eot_token if settings.doc_mask else None
    objective = STAGES[settings.stage].objective(model, dtype, boundary, settings)
    optimizer = Optimizer(model, settings, dtype)
    run = Run(settings, data, model, objective, optimizer, n_part)

    # 4) what was trained before
    if checkpoint is not None:
        ranks.change_columns(checkpoint, ["wte", "tables"], whole=False)
        model.load_state_dict(checkpoint["model"])
    if settings.resume:
        optimizer.load_state_dict(checkpoint["optimizer"])
        run.step = run.resumed = checkpoint["step"]
        run.best = checkpoint["best"]
        now = digests_of_imported(settings.model)
        # best.pt is of weights before edits, or its loss of another formula.
        is_stale = checkpoint["edits"] or changed(checkpoint["relatives"], now)
        if run.step < settings.max_iters:
            if checkpoint["edits"]:
                print(f"note: {settings.origin} was edited: from here on, edits cannot be undone")
            elif is_stale:
                print("note: the model's files changed: best.pt will be the best from here on")
            if is_stale:
                run.best = (math.inf, run.step)
        is_best = run.step and run.step == run.best[1] and not is_stale
        if is_best and not has_best(run):  # it ended between ckpt.pt and best.pt
            save_best(run)
    objective.begin(data, checkpoint["objective"] if settings.resume else None)
    if settings.compile:
        check_compiler(device)
        for block in model.blocks:  # not the model: lookups and offloading stay outside
            block.compile()
    return run


# --- a run ---


def fit(run: Run) -> None:
    """Train to the last step, and report what was learned."""
    settings, model, data = run.settings, run.model, run.data
    log = Log(
        settings.out_dir / "metrics.jsonl",
        run.step,
        args=settings.flat(),
        sizes=model_sizes(model),
        data=data.metas,
        relatives=digests_of_imported(settings.model),
    )
    meter = Meter(log, partial(check_finite, settings, "training"))
    # [B, T], on the CPU. Drawn from the step's number alone, else a resumed run would read others.
    ids, targets = data.train.batch(run.step, settings.batch_size)
    # Without a terminal there is no bar, and a line for each evaluation.
    look = dict(unit="step", disable=None, dynamic_ncols=True)  # as wide as the terminal is then
    bar = tqdm(total=settings.max_iters, initial=run.step, **look)
    with bar, stop_signals(bar) as received:
        while True:
            # 1) evaluate and save
            is_last = run.step >= settings.max_iters
            is_due = is_last or run.step % settings.eval_interval == 0
            if is_due and run.step != log.evaluated:  # a run that resumes may have done it
                bar.write(evaluate_and_save(run, meter))
            if is_last:
                break
            if ranks.wait(sum(received)):  # some rank was asked to stop
                stop(run, meter, bar, received)

            # 2) forward and backward, one micro-batch after the other
            meter.start(ids.numel())  # with padding
            n_target = run.objective.count(targets)
            train_loss = torch.zeros((), device=model.device)
            # Dropout draws other numbers for each step, rank and seed.
            torch.manual_seed(mixed_seed(settings.seed, run.step, ranks.rank))
            # Part k of n is sequences k, k + n, k + 2n, ... Each rank takes some of the parts.
            numbers = range(ranks.rank, run.n_part, ranks.size)
            for number in numbers:
                part_targets = targets[number :: run.n_part]
                loss = run.objective(ids[number :: run.n_part], part_targets)
                # A mean of means would weigh tokens unequally.
                loss = loss * (run.objective.count(part_targets) / n_target)
                train_loss += loss.detach()
                if number == numbers[-1]:
                    # While a GPU still computes: the next batch, whose rows are prefetched.
                    later = data.train.batch(run.step + 1, settings.batch_size)
                    run.objective.prefetch(later[0])
                run.optimizer.scaler.scale(loss).backward()

            # 3) update
            ids, targets = later
            fraction = schedule(run.step, settings)  # of the peak learning rate
            norm = run.optimizer.step(fraction=fraction)
            run.step += 1
            # Not after the first step: a weight that begins at zero passes no gradient on.
            if run.step == max(3, min(10, settings.max_iters)):
                check_trained(model, run.optimizer)
            ranks.add_up(train_loss)
            rate = fraction * settings.learning_rate
            meter.end(run.step, train_loss=train_loss, grad_norm=norm, lr=rate)
            bar.set_postfix_str(format_figures(meter.latest), refresh=False)
            bar.update()
    with torch.compiler.set_stance("force_eager"):  # each prompt has another shape
        report(settings, data, model.eval(), log, run.best)


def stop(run: Run, meter: Meter, bar: tqdm, received: list[int]) -> NoReturn:
    """Save, say how to go on, and end as a shell reports the signals."""
    meter.read()
    run.save()
    again = command_line("train.py", "--resume", "--out_dir", run.settings.out_dir)
    bar.write(f"continue with: {again}")
    raise SystemExit(128 + sum(received))


def evaluate_and_save(run: Run, meter: Meter) -> str:
    """Log validation losses and, on the countries, the share of facts that are known. Once
    something is trained, or nothing is to be, write ckpt.pt and, if the loss is the lowest so far,
    best.pt. Returns the figures as a line, with those of the last step."""
    settings, data = run.settings, run.data
    meter.read()
    losses = validate(run.objective, data, settings.eval_tokens, settings.device_batch_size)
    if run.step == 0:
        check_finite(settings, "validation", losses["val_loss"], run.step)
    losses.update(recall.ask(run.model, data.encoding, data.corpora, briefly=True))
    # An earlier run is replaced only now, when this one has shown that it can be evaluated.
    if run.step == 0 and ranks.rank == 0 and not settings.resume:
        remove_run(settings.out_dir)
    meter.log.write(type="eval", step=run.step, **losses)
    check_finite(settings, "validation", losses["val_loss"], run.step)
    if run.step != run.resumed and (run.step or settings.max_iters == 0):
        if losses["val_loss"] < run.best[0]:
            run.best = (losses["val_loss"], run.step)
        run.save()
        if not run.checked and ranks.size == 1:
            run.checked = True
            ids, _ = data.train.batch(0, 1)
            ids = ids.flatten(0, -2)[:1]  # [1, T], also of pairs
            with torch.compiler.set_stance("force_eager"):  # shapes are others than in training
                check_logits(run.model, ids)
                check_saved(settings.out_dir / "ckpt.pt", run.model, ids)
        if run.step == run.best[1]:
            save_best(run)
    return f"step {run.step}: {format_figures({**losses, **meter.latest})}"


def save_best(run: Run) -> None:
    """Write best.pt or, with tables on disk, delete an earlier one."""
    if run.model.tables.on_disk:  # it would take another copy of the tables
        remove(run.settings.out_dir / "best.pt")
    else:
        run.save_model("best.pt")


def has_best(run: Run) -> bool:
    """Whether best.pt is there, and of this step."""
    with suppress(UserError):
        return read_checkpoint(run.settings.out_dir / "best.pt")["step"] == run.step
    return False


def check_finite(settings: Settings, which: str, loss: float, step: int) -> None:
    """Stop before weights that are not numbers get into a checkpoint."""
    if not math.isfinite(loss):
        advice = f"lower --learning_rate {settings.learning_rate}"
        if step == 0:
            advice = "are the weights of --init_from finite, --init_std and --table_std small?"
        if settings.model.ffn not in BUILT_IN:
            advice += f" (Or does relatives/{settings.model.ffn}.py divide by zero?)"
        raise UserError(f"the {which} loss became {loss} at step {step}: {advice}")


@ranks.joined()
def main() -> None:
    settings = resolve_settings(**parse_args(__doc__))
    if settings.eval_only and ranks.size > 1:
        raise UserError("--eval_only runs in one process: start it without torchrun")
    if settings.eval_only:
        evaluate(settings)
    else:
        train(settings)


if __name__ == "__main__":
    run_command(main)
