"""Evaluation without training: --eval_only."""

from common import UserError, pick_device, training_dtype
from text import tokenizer
from text.dataset import read_meta
from training.batches import Data, check_tokenizer, parse_mixture
from training.checkpoints import load_model
from training.objectives import NextToken, validate
from training.report import format_figures, report_recall
from training.settings import STAGES, Settings
from training.sources import Windows


def evaluate(settings: Settings) -> None:
    """Print a checkpoint's losses on prepared folders, and ask what their corpora teach."""
    path = settings.init_from
    device = pick_device(settings.device)
    model, encoding, _ = load_model(path, device, settings.offload, verify=True)
    block_size, longest = settings.model.block_size, model.config.block_size
    if block_size > longest:
        raise UserError(f"--block_size {block_size}: {path} reads {longest} tokens at most")
    boundary = encoding.eot_token if settings.doc_mask else None
    dtype = training_dtype(settings.dtype, device)
    objective = NextToken(model, dtype, boundary)
    ours = tokenizer.fingerprint(encoding)
    if STAGES[settings.stage].objective is not NextToken:
        print(f"note: losses are those of the next token, not of --stage {settings.stage}")
    for folder in parse_mixture(settings.data_dir):  # their weights do not matter here
        meta = read_meta(folder)
        check_tokenizer(meta["tokenizer"], folder, ours, path)
        if meta["kind"] == "preference":
            raise UserError(
                f"--data_dir {folder} holds pairs: --eval_only reads text and conversations"
            )
        data = Data(str(folder), meta["kind"], block_size, settings.seed, total=0)
        losses = validate(objective, data, settings.eval_tokens, settings.device_batch_size)
        (source,) = data.val.values()
        n, of = len(source.spread(settings.eval_tokens)), source.n_sequence
        if isinstance(source, Windows):  # whole ones: the end of the text may be left out
            n_token = len(source.ids) - 1
            read = f"{n * block_size:,} of {n_token:,} held-out tokens, in windows of {block_size}"
        else:
            read = f"{n:,} of {of:,} held-out conversations, cut to {block_size} tokens"
        read += f", in {dtype}"
        if boundary is not None:
            read += ", attention within documents"
        print(f"{path} on {folder}: {format_figures(losses)} ({read})")
        report_recall(model, data)
