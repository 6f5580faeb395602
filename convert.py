"""Convert Llamas and Qwens of Hugging Face to checkpoints and back, Embformers of its author to
checkpoints, and dense checkpoints to STEM.

    python convert.py SmolLM2-135M --out out/smol/ckpt.pt       # a Llama of Hugging Face
    python convert.py Embformer-MiniMind-0.1B --out out/wu/ckpt.pt      # its author's Embformer
    python sample.py --ckpt out/smol/ckpt.pt --prompt "Gravity is"
    python prepare.py --input book.txt --out_dir data/smol --tokenizer out/smol/ckpt.pt
    python train.py --init_from out/smol/ckpt.pt --data_dir data/smol --block_size 512 ...

    python convert.py out/dense/ckpt.pt --export llama          # for transformers

    python convert.py out/dense/ckpt.pt --ffn stem --stem_layers third --out out/converted/ckpt.pt
    python train.py --init_from out/converted/ckpt.pt --max_iters 100 --out_dir out/trained

1. A folder with config.json, model*.safetensors (or pytorch_model*.bin) and tokenizer.json becomes
   a checkpoint with the same logits and the same token ids. docs/data-and-stages.md says which
   models that works for. `--export` is the inverse for a dense model.

2. In a dense checkpoint, a table row per token replaces `W_u x` in the layers of --stem_layers:
   the rows that come nearest to it on a text (training/dense_to_stem.py). One forward pass for all
   layers; between them, the text is in a temporary file of 4 * n_embd bytes a token.
"""

import os
from dataclasses import MISSING, dataclass
from pathlib import Path

# Before torch, whose threads it tells how to wait.
from common import UserError, check_settings, command_line, flag, parse, pick_device, run_command

# isort: split
import tiktoken
import torch

from model import Decoder
from tables import storage
from training.checkpoints import load_model, save_checkpoint
from training.dense_to_stem import dense_to_stem
from training.folders import live_tables, run_folder
from training.huggingface import read_folder, write_folder
from training.placement import make_tables
from training.report import model_sizes
from training.settings import STAGES, device_flag, offload_flag

PRESETS = {"dense": "minimind-104m", "embformer": "embformer-104m"}  # the nearest in size


@dataclass
class Conversion:
    """The flags of this command."""

    source: Path = flag(MISSING, "a folder of Hugging Face, or a dense ckpt.pt")
    out: Path | None = flag(None, "the checkpoint to write, a new file", shown="or --export")
    export: Path | None = flag(
        None, "instead: write a dense ckpt.pt (no other has a class there) as a new folder"
    )
    ffn: str | None = flag(None, "convert a dense checkpoint to this kind of FFN", choices=["stem"])
    stem_layers: str = flag("third", "layers to get a table: third, half, all or 0,2,5")
    data_dir: str | None = flag(
        None, "text to fill rows from: a folder or a mixture", shown="what the model was trained on"
    )
    tokens: int = flag(10**6, "training tokens to read; 0: rows stay random", must="0 or more")
    block_size: int | None = flag(
        None, "length of the windows of text", shown="the model's context", must="at least 1"
    )
    batch_size: int = flag(
        8, "windows in a forward pass; fewer take less memory", must="at least 1"
    )
    offload: str = offload_flag()
    table_dtype: str = flag(
        "float32", "dtype of table rows; bfloat16 halves their size", choices=storage.DTYPES
    )
    device: str = device_flag()

    def __post_init__(self) -> None:
        check_settings(self)
        if (self.out is None) == (self.export is None) or (self.export and self.ffn):
            raise UserError("give --out FILE, or --export FOLDER without --ffn")
        for name, value in vars(self).items():
            of_all = name in ("source", "out", "export", "ffn")
            if self.ffn is None and not of_all and value != getattr(Conversion, name):
                raise UserError(f"--{name} {value} needs --ffn stem")


def converted(settings: Conversion, path: Path) -> tuple[Decoder, tiktoken.Encoding, dict]:
    """The model to write to a path, its tokenizer, and what is known of its training."""
    if settings.ffn is None:
        model, encoding = read_folder(settings.source)
        return model, encoding, {"args": {"preset": PRESETS[model.config.ffn]}}
    device = pick_device(settings.device)
    tables = make_tables(
        settings.offload,
        device,
        storage.DTYPES[settings.table_dtype],
        live=live_tables(path.parent),
        fresh=not settings.tokens,
    )
    return dense_to_stem(
        settings.source,
        settings.stem_layers,
        settings.data_dir,
        settings.tokens,
        block_size=settings.block_size,
        batch_size=settings.batch_size,
        device=device,
        tables=tables,
    )


def main() -> None:
    settings = parse(Conversion, __doc__)
    path = settings.export or settings.out
    # Before minutes of work, so that no run begins there meanwhile.
    with run_folder(path.parent, (path.name,)):
        if os.path.lexists(path):
            raise UserError(f"{path} exists: choose another name")
        if settings.export:
            model, encoding, _ = load_model(settings.source, torch.device("cpu"), verify=True)
            write_folder(path, model, encoding)
            print(f"wrote {path}: AutoModelForCausalLM.from_pretrained reads it")
            return
        model, encoding, training = converted(settings, path)
        save_checkpoint(path, model, encoding, **training)
        config, sizes = model.config, model_sizes(model)
        del model  # Windows deletes no tables that are mapped
    print(
        f"wrote {path}: {config.ffn} model, {config.n_layer} layers x {config.n_embd}, "
        f"vocabulary {config.vocab_size:,}, {sizes['total'] / 1e6:.2f} M parameters"
    )
    if settings.ffn is None:  # trained on a text that is not here
        print(f"next: {command_line('sample.py', '--ckpt', path)}")
        return
    data_dir = settings.data_dir or training["args"].get("data_dir", "DATA")
    more = ["--data_dir", data_dir, "--out_dir", "out/trained"]
    stage = training["args"].get("stage", "pretrain")
    if not settings.data_dir and STAGES[stage].reads != "text":  # else all of it would be learned
        more += ["--stage", stage]
    print(f"next: {command_line('train.py', '--init_from', path, *more)}")


if __name__ == "__main__":
    run_command(main)
