"""Turn text and conversations into token files that train.py reads.

    python prepare.py                                           # the default corpus, countries
    python prepare.py --dataset moby-dick                       # a novel, for prose in minutes
    python prepare.py --input book.txt --out_dir data/book      # text of your own
    python prepare.py --input books/ --out_dir data/books       # all files in a folder
    python prepare.py --input faq.csv --columns pregunta,respuesta --tokenizer out --out_dir data/q
    python prepare.py --dataset tinystories                     # a public data set
    python prepare.py --dataset minimind-sft --tokenizer data/minimind-pretrain
    python prepare.py --input book.txt --out_dir data/book --tokenizer o200k_base

Read are .txt, .md, .jsonl, .json, .csv and .tsv files in UTF-8, also if they end in .gz or .bz2.

- Text is cut into documents at <|endoftext|> lines, at blank lines after 2,000 characters, and at
  line breaks after 10,000; a longer line is cut there. Project Gutenberg's header and license are
  left out; of Markdown, its marks and front matter.
- A record is a line of .jsonl, an element of a .json array, or a row of a table. It has a text, or
  a question and its answer, or a conversation, {"conversations": [{"role": "user", "content":
  "..."}, ...]}, or two that differ in the last answer, {"chosen": [...], "rejected": [...]}.
- Known keys, and columns: text; of a question instruction, prompt, question, query, input; of
  its answer output, completion, response, answer; conversations, messages, conversation;
  system, system_prompt; chosen and rejected. A message has role (or from), content (or value)
  and, if it is not to be learned, weight 0.

Written to the output folder:

    tokenizer.json          the byte-level BPE, trained on the training documents or given
    train.bin, val.bin      token ids, uint16 or uint32, every document preceded by <|endoftext|>
    meta.json               sizes, type and origin; written last: a folder with it is complete
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import tiktoken

from common import UserError, check_settings, command_line, flag, parse, run_command
from corpora.countries import CORPORA, write_corpus
from text import bpe, huggingface, tokenizer
from text.dataset import read_meta, read_tokenizer
from text.documents import MAX_BAD, Report, kind_of, read
from text.download import DATASETS, fetch
from text.files import find_files, text_size
from text.splitting import HELD_OUT, all_for_validation, hashed, held_out, labelled
from text.vocabularies import complete
from text.writer import check_free, write_dataset
from training.checkpoints import read_checkpoint, read_encoding
from training.settings import PRESETS, STAGES

# Bytes of input to train a tokenizer on: the documents whose hash is low enough. More text changes
# few merges, but takes memory and time without bound (in Chinese, some 35 bytes for each).
SAMPLE = 16 << 20
NOTES = 20  # how many are shown

# Of a tokenizer of Hugging Face. The first is all that is read.
OF_THE_HUB = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)

# How tiktoken gets the vocabulary NAME where there is no network.
FILL = (
    "where there is a network, run TIKTOKEN_CACHE_DIR=vocab python -c 'import tiktoken; "
    """tiktoken.get_encoding("NAME")', copy the folder vocab, set TIKTOKEN_CACHE_DIR to it here"""
)

ABOUT_DATASETS = "countries, -sft, -dpo: facts about the world's states, generated here"
for name, files in DATASETS.items():
    ABOUT_DATASETS += f"; {name}: {files[0].about}, {files[0].license}"


@dataclass
class Preparation:
    """The flags of this command."""

    input: Sequence[Path] = flag((), "files of your own, or folders of them", nargs="+")
    dataset: str | None = flag(
        None, ABOUT_DATASETS, choices=(*CORPORA, *DATASETS), shown="countries"
    )
    out_dir: Path | None = flag(None, "default: data/ and the data set's name; needed with --input")
    tokenizer: str = flag(
        "train",
        "train one (for text), or take that of a prepared folder, a ckpt.pt or a tokenizer.json "
        "of Hugging Face, or gpt2, r50k_base, p50k_base, cl100k_base or o200k_base, which tiktoken "
        f"downloads (without a network: {FILL})",
    )
    vocab_size: int | None = flag(
        None,
        "maximum vocabulary size, at least 259: single bytes",
        must="at least 259",
        shown="6400, for countries 4096",
    )
    columns: str | None = flag(
        None,
        "of records, the key of a text, or the keys of a question and its answer (a,b), "
        "if prepare.py does not know them",
    )
    val_fraction: float = flag(
        0.02,
        "share of documents in files held out; 1: all of them, to evaluate a model on",
        must="above 0 and at most 1",
    )
    hold_out_files: float | None = flag(
        None,
        "share of the files, such as books, to leave out of training as a whole and write to "
        "OUT_DIR/held_out, whose val.bin is a second validation",
        must="between 0 and 1",
    )
    overwrite: bool = flag(False, "replace the data set in --out_dir")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.input and self.dataset:
            raise UserError(f"--input or --dataset {self.dataset}: leave one of them out")
        if self.input and not self.out_dir:
            raise UserError("--input needs --out_dir: say where the token files go")
        self.dataset = self.dataset or "countries"
        self.out_dir = self.out_dir or Path("data") / self.dataset
        if self.val_fraction == 1 and self.tokenizer == "train":
            raise UserError("--val_fraction 1: give --tokenizer that of the model to evaluate")
        if self.vocab_size and self.tokenizer != "train":
            raise UserError(f"--vocab_size {self.vocab_size}: {self.tokenizer} has its own size")
        if len(self.column_names) > 2:
            raise UserError(f"--columns {self.columns}: name a text, or a question and its answer")

    @property
    def column_names(self) -> list[str]:
        return [name.strip() for name in (self.columns or "").split(",") if name.strip()]


def ready_tokenizer(name: str, kind: str) -> tiktoken.Encoding | None:
    """The tokenizer that --tokenizer names; None: it is to be trained."""
    if name == "train":
        if kind == "text":
            return None
        chats = "chat data (two --columns are a question and its answer)"
        raise UserError(f"--tokenizer: {chats} needs the base model's tokenizer: pass its ckpt.pt")
    path = Path(name)
    if os.path.exists(path / "ckpt.pt"):  # a run's folder
        path = path / "ckpt.pt"
    folder = path if os.path.isdir(path) else path.parent
    if name in tiktoken.list_encoding_names():
        encoding = standard(name)
    elif not os.path.exists(path):
        others = "nor one of tiktoken's encodings; of a model on the Hub, download tokenizer.json"
        raise UserError(f"--tokenizer {name}: no such file or folder, {others}")
    elif os.path.exists(folder / "meta.json") and (path == folder or path.suffix == ".json"):
        encoding = read_tokenizer(folder, read_meta(folder))  # of prepared data
    elif os.path.exists(path / "config.json"):
        fix = command_line(
            "convert.py", path, "--out", Path("out") / path.resolve().name / "ckpt.pt"
        )
        alone = "to use its tokenizer for another model, name its tokenizer.json"
        raise UserError(f"--tokenizer {path}: {alone}; or convert this model first: {fix}")
    elif path.name in OF_THE_HUB or any(os.path.exists(path / file) for file in OF_THE_HUB):
        encoding = huggingface.read_tokenizer(folder / OF_THE_HUB[0])
    elif path.suffix == ".json":
        encoding = huggingface.read_tokenizer(path)
    elif path == folder:
        encoding = read_tokenizer(path, read_meta(path))  # which says what is missing
    else:
        encoding = read_encoding(path, read_checkpoint(path))
    if kind != "text" and tokenizer.START not in encoding.special_tokens_set:
        raise UserError(f"--tokenizer {name} lacks {tokenizer.START}, which conversations need")
    return encoding


def standard(name: str) -> tiktoken.Encoding:
    """A vocabulary that tiktoken downloads, or finds in its cache. UserError: it cannot."""
    try:
        encoding = tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors
        reason = f"tiktoken cannot download it ({error!s:.90})"
        raise UserError(f"--tokenizer {name}: {reason}: {FILL.replace('NAME', name)}") from None
    return complete(encoding)


def prepare_files(
    settings: Preparation,
    paths: Sequence[Path],
    kind: str,
    encoding: tiktoken.Encoding | None = None,
) -> dict:
    """Write the token folder of documents in files and folders, which are read once or, to train a
    tokenizer first, twice; they are never all in memory. Returns meta.json."""
    # 1) which files, and the tokenizer
    report = Report(MAX_BAD if settings.input else 1, kind)  # published files cannot be corrected
    found = find_files(paths, report.notes)
    books = []
    if settings.hold_out_files:
        books, found = held_out(found, settings.hold_out_files)
    columns = settings.column_names
    if encoding is None:
        documents = read(found, Report(report.max_bad, kind), "counting words", columns)
        texts = sampled(
            labelled(documents, settings.val_fraction, Counter()), SAMPLE / max(1, text_size(found))
        )
        encoding = bpe.train(texts, settings.vocab_size or 6400)

    # 2) the folder, and that of the files that are held out
    write = partial(
        write_dataset, encoding=encoding, kind=kind, overwrite=settings.overwrite, corpus="files"
    )
    held: set[int] = set()  # hashes of documents that are held out
    if books:
        documents = all_for_validation(read(books, report, "held out", columns), held)
        sources = [path.name for path in books]
        write(settings.out_dir / HELD_OUT, documents, sources=sources, val_fraction=1)
    documents = read(found, report, "encoding", columns)
    if settings.val_fraction == 1:
        documents = all_for_validation(documents, held)
    else:
        documents = labelled(documents, settings.val_fraction, report.notes, held)
    sources = [path.resolve().name for path in paths]
    meta = write(settings.out_dir, documents, sources=sources, val_fraction=settings.val_fraction)

    # 3) what is not as it was in the files
    if report.bad:
        print(f"skipped {report}")
    notes = (+report.notes).most_common()
    notes.sort(key=lambda note: "ignored" in note[0])  # keys that mean nothing here come last
    for note, count in notes[:NOTES]:
        print(f"note: {count:,} {note}")
    if len(notes) > NOTES:
        print(f"note: {len(notes) - NOTES:,} other notes are not shown")
    return meta


def sampled(documents: Iterator[tuple[str, str]], share: float) -> Iterator[str]:
    """Yield the first and this share of the other training documents."""
    train = (document for split, document in documents if split == "train")
    yield from islice(train, 1)
    for document in train:
        # The low bits of the hash, as the high ones decide the split.
        if hashed(document) % 2**32 < share * 2**32:
            yield document


def tell(folder: Path, meta: dict, split: str) -> None:
    """Print the sizes of a folder's file."""
    sizes = meta[split]
    print(
        f"{folder / split}.bin: {sizes['documents']:,} documents, "
        f"{sizes['tokens']:,} tokens, {sizes['bytes'] / sizes['tokens']:.2f} bytes per token"
    )


def propose(settings: Preparation, meta: dict) -> None:
    """Print how to train on the folder or, if all of it is held out, to evaluate a model."""
    folder = settings.out_dir
    given = str(settings.tokenizer)  # of a checkpoint, it is that of the model to go on with
    is_run = os.path.exists(Path(given) / "ckpt.pt")
    origin = given if is_run or given.endswith(".pt") else "CKPT"
    if settings.val_fraction == 1:
        words = ["--eval_only", "--init_from", origin, "--data_dir", folder]
        words += ["--eval_tokens", meta["val"]["tokens"]]
        print(f"next: {command_line('train.py', *words)}")
        return
    # The first stage that reads such documents.
    name = next(name for name, stage in STAGES.items() if stage.reads == meta["kind"])
    if name == "pretrain":
        out_dir = f"out/{folder.name}"
        words = ["--data_dir", folder]
        # The last token is a target alone.
        longest = min(meta[split]["tokens"] for split in ("train", "val")) - 1
        context = PRESETS["prose"]["block_size"]
        if origin != "CKPT":
            path = Path(given) / "ckpt.pt" if is_run else Path(given)
            context = read_checkpoint(path)["config"].block_size
            if path.resolve().parent == Path(out_dir).resolve():  # the model's own folder
                out_dir += "-trained"
            words += ["--init_from", origin]
        if longest < context:
            words += ["--block_size", longest]
        words += ["--out_dir", out_dir]
    else:
        out_dir = f"out/{name}"
        words = ["--data_dir", folder, "--stage", name, "--init_from", origin, "--out_dir", out_dir]
    print(f"next: {command_line('train.py', *words)}")
    if settings.hold_out_files:
        both = ["--data_dir", f"{folder},{folder / HELD_OUT}"]
        words = ["--eval_only", "--init_from", f"{out_dir}/ckpt.pt", *both]
        print(f"both losses: {command_line('train.py', *words)}")


def main() -> None:
    settings = parse(Preparation, __doc__)
    held = settings.out_dir / HELD_OUT
    if not settings.overwrite:  # before minutes of work
        check_free(settings.out_dir)
        if settings.hold_out_files:
            check_free(held)
    elif not settings.hold_out_files and os.path.exists(held / "meta.json"):
        raise UserError(f"{held} is of files that would be trained on: delete it, or hold some out")

    # 1) what kind of documents, and which tokenizer
    generated = not settings.input and settings.dataset in CORPORA
    if settings.input:
        kind = kind_of(find_files(settings.input, Counter()), settings.column_names)
    elif generated:
        kind, _ = CORPORA[settings.dataset]
        for name in ("val_fraction", "hold_out_files", "columns"):
            if getattr(settings, name) != getattr(Preparation, name):
                raise UserError(f"--{name} is for files: leave it out for generated text")
    else:
        kind = DATASETS[settings.dataset][0].kind
    encoding = ready_tokenizer(settings.tokenizer, kind)

    # 2) from documents to token files
    if generated:
        meta = write_corpus(
            settings.dataset,
            settings.out_dir,
            vocab_size=settings.vocab_size,
            encoding=encoding,
            overwrite=settings.overwrite,
        )
    else:
        paths = settings.input or fetch(settings.dataset, "data/raw")
        meta = prepare_files(settings, paths, kind, encoding)

    # 3) what there is now, and what to do with it
    if settings.val_fraction < 1:
        tell(settings.out_dir, meta, "train")
    tell(settings.out_dir, meta, "val")
    if settings.hold_out_files:
        tell(settings.out_dir / HELD_OUT, read_meta(settings.out_dir / HELD_OUT), "val")
    print(f"vocabulary of {meta['vocab_size']:,} tokens")
    if meta["val"]["tokens"] < 1000:
        print("note: that is little to validate with: small differences in its loss mean nothing")
    propose(settings, meta)


if __name__ == "__main__":
    run_command(main)
