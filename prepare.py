"""Turn text and conversations into token files that train.py reads.

    python prepare.py                                           # the default corpus, countries
    python prepare.py --dataset moby-dick                       # a novel, for prose in minutes
    python prepare.py --input book.txt --out_dir data/book      # text of your own
    python prepare.py --input a.jsonl b.jsonl --out_dir data/mine --vocab_size 6400
    python prepare.py --dataset tinystories                     # a public data set
    python prepare.py --dataset minimind-sft --tokenizer data/minimind-pretrain

`.jsonl` files hold one document a line: {"text": "..."}; a conversation, {"conversations":
[{"role": "user", "content": "..."}, ...]} (or "messages"); or a preference, {"chosen": [...],
"rejected": [...]}, two conversations that differ in the last answer. `.txt` files are cut into
documents at <|endoftext|> lines, and at blank lines after 2,000 bytes; Project Gutenberg's header
and licence are left out. Written to the output folder:

    tokenizer.json          the byte-level BPE, trained on the training documents or given
    train.bin, val.bin      token ids, uint16 or uint32, every document preceded by <|endoftext|>;
                            of a preference first the chosen, then the rejected conversation
    meta.json               sizes, type and origin; written last: a folder with it is complete
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import tiktoken

from common import UserError, add_flags, atomic, check_ranges, flag, locked, make_parser, run
from text import countries, tokenizer
from text.documents import Document, Report, hashed, is_validation, kind_of, read
from text.download import DATASETS, fetch, sha256
from text.download import MOBY_DICK as MOBY_DICK  # for analysis/
from training.checkpoints import load_checkpoint

BLOCK = 256  # documents that are encoded at a time, on several cores
# Bytes of input to train a tokenizer on: the documents whose hash is low enough. More text changes
# few merges, but takes memory and time without bound (in Chinese, some 35 bytes for each).
SAMPLE = 16 << 20

# Corpora made here, as functions of the seed that give documents to train and to validate.
CORPORA = {
    "countries": countries.documents,
    "countries-sft": countries.conversations,
    "countries-dpo": countries.preferences,
}
KINDS = {"countries": "text", "countries-sft": "chat", "countries-dpo": "preference"}
KINDS |= {name: files[0].kind for name, files in DATASETS.items()}


@dataclass
class Settings:
    """The flags of this command."""

    input: list[Path] | None = None  # which, having several values, `main` adds itself
    dataset: str = flag(
        "countries",
        "countries, countries-sft, countries-dpo: facts about the world's states, made here; "
        + "; ".join(f"{name}: {f.about}, {f.licence}" for name, (f, *_) in DATASETS.items()),
        choices=tuple(KINDS),
    )
    out_dir: Path | None = flag(None, "default: data/ and the data set's name; needed with --input")
    tokenizer: str = flag(
        "train",
        "train one (for text), a folder of prepared data or a model (ckpt.pt, Hugging Face folder) "
        "to take its, or tiktoken's gpt2 or cl100k_base, from the network or TIKTOKEN_CACHE_DIR",
    )
    vocab_size: int | None = flag(
        None, "most tokens to train, from 259", must="at least 1", shown="6400, for countries 4096"
    )
    val_fraction: float = flag(0.02, "share of documents in files held out", must="between 0 and 1")
    max_bad: float = flag(0.01, "share of --input that may be bad: skipped", must="from 0 to 1")
    seed: int = flag(0, "of a corpus that is made here", shown="0")

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.input and not self.out_dir:
            raise UserError("--input needs --out_dir: say where the token files go")
        self.out_dir = self.out_dir or Path("data") / self.dataset
        if self.vocab_size and self.tokenizer != "train":
            raise UserError(f"--vocab_size {self.vocab_size}: {self.tokenizer} has its own size")


def write_dataset(
    out_dir: Path,
    documents: Iterable[tuple[str, Document]],
    encoding: tiktoken.Encoding,
    kind: str = "text",
    report: Report | None = None,
    **origin,
) -> dict:
    """Write train.bin, val.bin, tokenizer.json and meta.json, which replace what was there when all
    of them are complete. Documents come with their split, "train" or "val"; `report` counts what is
    skipped while they are read. Returns meta.json, to which `origin` belongs."""
    dtype = "uint16" if encoding.n_vocab <= 2**16 else "uint32"
    meta = {"format": 2, "kind": kind, "vocab_size": encoding.n_vocab, "dtype": dtype, **origin}
    meta["tokenizer"] = tokenizer.fingerprint(encoding)
    counts = {"train": Counter(), "val": Counter()}

    with (
        locked(out_dir),
        atomic(out_dir / "meta.json") as meta_file,  # left in reverse order: replaced last
        atomic(out_dir / "tokenizer.json") as tokenizer_file,
        atomic(out_dir / "train.bin") as train_file,
        atomic(out_dir / "val.bin") as val_file,
    ):
        with open(train_file, "wb") as train, open(val_file, "wb") as val:
            files, documents = {"train": train, "val": val}, iter(documents)
            while block := list(islice(documents, BLOCK)):
                if kind == "preference":
                    block = [(split, part) for split, pair in block for part in pair]
                parts = [part for _, part in block]
                if kind == "text":
                    encoded = encoding.encode_ordinary_batch(parts)
                else:
                    encoded = [tokenizer.render(encoding, part) for part in parts]
                for (split, _), ids in zip(block, encoded, strict=True):
                    files[split].write(np.array([encoding.eot_token, *ids], dtype))
                    size = len(encoding.decode_bytes(ids))
                    counts[split].update(documents=1, tokens=1 + len(ids), bytes=size)
        if report:
            meta["skipped"] = report.bad
        for split, file in (("train", train_file), ("val", val_file)):
            if not counts[split]:
                raise UserError(f"no document for {split}.bin: add text or change --val_fraction")
            meta[split] = {**counts[split], "sha256": sha256(file)}
        tokenizer_file.write_bytes(tokenizer.dumps(encoding).encode())
        meta_file.write_bytes(json.dumps(meta, indent=1).encode() + b"\n")
        (out_dir / "meta.json").unlink(missing_ok=True)  # a mixture of old and new has none
    return meta


def ready_tokenizer(name: str, kind: str) -> tiktoken.Encoding | None:
    """The tokenizer that --tokenizer names; None is to be trained."""
    if name == "train":
        if kind != "text":
            raise UserError(f"--tokenizer is needed, as {kind} data continue a model: its ckpt.pt")
        return None
    path = Path(name)
    try:
        if name in tokenizer.PRETRAINED:
            encoding = tokenizer.pretrained(name)
        elif path.is_dir() and not (path / "config.json").exists():
            encoding = tokenizer.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
        else:
            encoding = tokenizer.loads(load_checkpoint(path).get("tokenizer"))
        if kind != "text" and tokenizer.START not in encoding.special_tokens_set:
            raise ValueError(f"it has no {tokenizer.START}, which conversations need")
        return encoding
    except (OSError, ValueError) as error:
        raise UserError(f"--tokenizer {name}: {error}: see prepare.py -h") from None


def prepare_corpus(args: Settings, encoding: tiktoken.Encoding | None = None) -> dict:
    """A corpus that is made here. A pair must occur 48 times to become a token, so the vocabulary
    is what fits: in countries, common names are one token, rare ones several."""
    train, val = CORPORA[args.dataset](args.seed)
    encoding = encoding or tokenizer.train(train, args.vocab_size or 4096, min_count=48)
    documents = [("train", document) for document in train] + [("val", d) for d in val]
    origin = dict(corpus=args.dataset, seed=args.seed)
    return write_dataset(args.out_dir, documents, encoding, KINDS[args.dataset], **origin)


def prepare_files(
    args: Settings, paths: list[Path], kind: str, encoding: tiktoken.Encoding | None = None
) -> dict:
    """Documents of files, read once or, to train a tokenizer first, twice; never all in memory."""
    max_bad = args.max_bad if args.input else 1  # a published file cannot be corrected

    def labelled(report: Report, desc: str) -> Iterator[tuple[str, Document]]:
        for document in read(paths, report, desc):
            yield "val" if is_validation(document, args.val_fraction) else "train", document

    if encoding is None:
        # The low bits of the hash, as the high ones decide the split.
        limit = 2**32 * SAMPLE / sum(path.stat().st_size for path in paths)
        documents = labelled(Report(max_bad, kind), "counting words")
        sample = (d for split, d in documents if split == "train" and hashed(d) % 2**32 < limit)
        encoding = tokenizer.train(sample, args.vocab_size or 6400)
    report = Report(max_bad, kind)
    documents = labelled(report, "encoding")
    origin = dict(corpus="files", sources=[p.name for p in paths], val_fraction=args.val_fraction)
    meta = write_dataset(args.out_dir, documents, encoding, kind, report, **origin)
    if report.bad:
        print(f"skipped {report}")
    return meta


def main() -> None:
    parser = make_parser(__doc__)
    several = dict(nargs="+", type=Path, metavar="FILE", default=argparse.SUPPRESS)
    parser.add_argument("--input", help=".txt or .jsonl files of your own", **several)
    add_flags(parser, Settings)
    given = vars(parser.parse_args())
    args = Settings(**given)
    if args.input and "dataset" in given:
        raise UserError(f"--input or --dataset {args.dataset}: leave one of them out")

    kind = kind_of(args.input) if args.input else KINDS[args.dataset]
    encoding = ready_tokenizer(args.tokenizer, kind)
    if args.dataset in CORPORA and not args.input:
        meta = prepare_corpus(args, encoding)
    else:
        meta = prepare_files(args, args.input or fetch(args.dataset, "data/raw"), kind, encoding)
    for split in ("train", "val"):
        documents, tokens, size, _ = meta[split].values()
        print(
            f"{args.out_dir / split}.bin: {documents:,} documents, {tokens:,} tokens, "
            f"{size / tokens:.2f} bytes per token"
        )
    print(f"vocabulary of {meta['vocab_size']:,} tokens")
    stage = {"chat": "sft", "preference": "dpo"}.get(kind)
    more = f" --stage {stage} --init_from CKPT --out_dir out/{stage}" if stage else ""
    print(f"next: python train.py --data_dir {args.out_dir}{more}")


if __name__ == "__main__":
    run(main)
