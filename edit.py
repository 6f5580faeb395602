"""Change what a model knows by letting one token read another token's rows.

    python edit.py --source Spain --target Germany
    python edit.py --source Peru --target Japan --prompt "Country: Peru\\nThe main language is"
    python edit.py --source Spain --target "New Zealand" --align average
    python edit.py --source Atlantis --target Portugal        # a name that the model never saw
    python edit.py --source Spain --target Germany --save out/edited/ckpt.pt
    python edit.py --undo --ckpt out/edited/ckpt.pt  # to the bit what it was before

An edit changes no weight: where the prompt says Spain, tables are looked up under Germany's id
(`stem.substitute`); everything dense still sees Spain. What --save writes has Germany's rows under
Spain's id instead, and keeps Spain's, for --undo.
"""

import contextlib
import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import tiktoken
import torch
from torch import Tensor

from common import UserError, check_ranges, flag, locked, parse, pick_device, run
from model import Decoder
from stem import substitute
from tables.tables import Tables
from text import countries
from text.tokenizer import encode
from training import checkpoints
from training.questions import score_answers

WIDTH = 38  # of a column of text
# How a name reads the rows of one with another number of tokens, see `substitute` and `MeanRows`.
ALIGN = ("last", "first", "pad", "average")


class MeanRows(Tables):
    """Tables with made-up tokens behind the vocabulary, whose rows are means of others' rows. To
    read from only. UserError: there are no tables."""

    def __init__(self, tables: Tables) -> None:
        if not len(tables.weight):
            raise UserError("--ckpt is a model that has no tables to edit")
        super().__init__(tables.vocab_size, tables.width)
        self.tables, self.weight = tables, tables.weight
        # For each made-up token the tokens behind it, and their mean [W] in each table.
        self.means: dict[tuple[int, ...], list[Tensor]] = {}

    def token(self, ids: list[int]) -> int:
        """The token whose row, in every table, is the mean of the rows of `ids`."""
        if tuple(ids) not in self.means:
            rows = self.tables.lookup(torch.tensor([ids]))
            self.means[tuple(ids)] = [of_table[0].mean(0) for of_table in rows]
        return self.vocab_size + list(self.means).index(tuple(ids))

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        new, means = ids >= self.vocab_size, list(self.means.values())
        needed = [means[token - self.vocab_size] for token in ids[new].tolist()]
        for table, rows in enumerate(self.tables.lookup(ids.masked_fill(new, 0))):
            if needed:
                where = new.to(rows.device)
                rows = rows.index_put((where,), torch.stack([mean[table] for mean in needed]))
            yield rows  # [B, T, W]


@dataclass
class Edit:
    ckpt: Path = flag(Path("out/ckpt.pt"), "checkpoint of train.py")
    source: str | None = flag(None, "the name whose knowledge to replace: Spain")
    target: str | None = flag(None, "the name whose rows to read instead: Germany")
    prompt: str | None = flag(None, 'text that contains the source; "\\n" is a line break')
    align: str = flag(
        "last",
        "names of different length: ends together (a longer source repeats the target's first row, "
        "a longer target gives its last), beginnings, ends after padding, or the target's mean row",
        choices=ALIGN,
    )
    max_new_tokens: int = flag(40, "tokens to write before and after", must="at least 1")
    save: Path | None = flag(None, "write the edited checkpoint to this file, --ckpt or a new one")
    undo: bool = flag(False, "take the last edit saved in --ckpt out of it, there or in --save")
    device: str = checkpoints.device_flag()
    offload: str = checkpoints.offload_flag()
    dtype: str = checkpoints.decoding_dtype_flag()

    def __post_init__(self) -> None:
        check_ranges(self)
        if bool(self.source and self.target) == self.undo:
            raise UserError("give either --source and --target, or --undo")


def check_names(edit: Edit) -> None:
    """UserError: the countries do not have the name to read, or spell the other one otherwise."""
    names = [country.name for country in countries.table()]
    for flag_name, name in (("target", edit.target), ("source", edit.source)):
        near = get_close_matches(name.title(), names, 3)
        misspelled = name.casefold() in map(str.casefold, near)  # else it may be a made-up one
        if name not in names and (flag_name == "target" or misspelled):
            near = f", but {', '.join(near)}" if near else ""
            raise UserError(f"--{flag_name} {name}: the countries have no such name{near}")


def edited_ids(
    encoding: tiktoken.Encoding,
    ids: list[int],
    source: str,
    target: str,
    align: str = "last",
    tables: MeanRows | None = None,
) -> list[int]:
    """The ids to look up tables under: `target`'s wherever `ids` say `source`, with or without a
    space before it. `tables` are the model's, for `align` "average"."""
    edited = ids = torch.tensor(ids)  # [T]
    for space in (" ", ""):
        names = [encoding.encode_ordinary(space + name) for name in (source, target)]
        if align == "average" and len(names[0]) != len(names[1]):
            names[1] = [tables.token(names[1])]
        how = "last" if align == "average" else align  # repeats one token as often as needed
        changed = substitute(ids, *names, how, encoding.eot_token)
        edited = torch.where(changed != ids, changed, edited)
    return edited.tolist()


@torch.inference_mode()
def show(model: Decoder, encoding: tiktoken.Encoding, edit: Edit) -> dict[int, int]:
    """Print what the model writes before and after an edit, side by side. Returns the tokens of the
    prompt that read another's rows, and whose."""
    prompt = edit.prompt or f"Country: {edit.source}\nThe capital city is called"
    prompt = prompt.replace("\\n", "\n")  # a shell passes the two characters on
    ids = encode(encoding, prompt)
    if (room := model.config.block_size - len(ids)) < 1:
        raise UserError(f"--prompt has {len(ids)} tokens, room is {model.config.block_size - 1}")
    table_ids = edited_ids(encoding, ids, edit.source, edit.target, edit.align, model.tables)
    if ids == table_ids:
        raise UserError(f"--prompt {prompt!r} reads no other rows: has it a word {edit.source!r}?")

    given = torch.tensor([ids, ids], device=model.device)  # [2, T]
    both = torch.tensor([ids, table_ids])  # what to look rows up under, before and after
    options = dict(temperature=0, stop=encoding.eot_token, table_ids=both)
    logits = model(given)[0]
    written = model.generate(given, min(edit.max_new_tokens, room), **options)[:, len(ids) :]
    undone = torch.equal(logits, model(given)[0])

    titles = ("before", f"after: {edit.source} reads {edit.target}'s rows")
    columns, answers = [], []
    for title, tokens in zip(titles, written.tolist(), strict=True):
        text = encoding.decode([token for token in tokens if token != encoding.eot_token])
        lines = [textwrap.wrap(line, WIDTH) or [""] for line in text.strip().splitlines()]
        columns.append([title, "-" * WIDTH, *itertools.chain(*lines)])
        pieces = enumerate(encoding.decode([token]) for token in tokens)
        ends = (n for n, piece in pieces if n and re.search(r"[.\n]|<\|endoftext", piece))
        if (answer := tokens[: next(ends, None)]) not in answers:  # the first sentence
            answers.append(answer)
    n = len(answers)
    p = score_answers(model, [ids] * 2 * n, answers * 2, [ids] * n + [table_ids] * n)[1]

    print(f"prompt  {prompt!r}\n")
    for left, right in itertools.zip_longest(*columns, fillvalue=""):
        print(f"{left:<{WIDTH}}   {right}".rstrip())
    print()
    for answer, before, after in zip(answers, *p.view(2, n).tolist(), strict=True):
        text = textwrap.shorten(encoding.decode(answer), 26, placeholder="...")
        print(f"probability of {text!r:<28} before {before:6.1%}   after {after:6.1%}")
    print(f"undone: logits {'equal the first ones bit for bit' if undone else 'DIFFER'}")
    return {own: other for own, other in zip(ids, table_ids, strict=True) if own != other}


def main() -> None:
    edit = parse(Edit, __doc__)
    path = edit.save or (edit.ckpt if edit.undo else None)  # to be written
    if path and path.exists() and not path.samefile(edit.ckpt):
        raise UserError(f"--save {path} exists: choose another name, or {edit.ckpt} itself")
    # Locked before it is read: of two edits at once one would be lost.
    with locked(path.parent) if path else contextlib.nullcontext():
        if path:  # what is written gets new checksums, so the old ones are checked
            checkpoint = checkpoints.load_checkpoint(edit.ckpt, verify=True)
        if edit.undo:
            if not checkpoint.get("edits"):
                raise UserError(f"{edit.ckpt} holds no edit to undo: --save writes one")
            *checkpoint["edits"], last = checkpoint["edits"]
            ids, rows = last["ids"], last["rows"]
        else:
            where = pick_device(edit.device), edit.offload, edit.dtype
            model, encoding, checkpoint = checkpoints.load_model(edit.ckpt, *where)
            model.tables = MeanRows(model.tables)
            if checkpoint.get("args", {}).get("preset") == "countries":
                check_names(edit)
            instead = show(model, encoding, edit)
            # As the prompt spells the name, and no other way: "Spain" without a space before it may
            # be pieces of which many other words are made.
            ids, others = torch.tensor([[[*instead]], [[*instead.values()]]])  # [1, n] each
            own, rows = ([r[0].cpu() for r in model.tables.lookup(of)] for of in (ids, others))
            checkpoint["edits"] = [*checkpoint.get("edits", []), dict(ids=ids[0], rows=own)]
        if path:
            for table, new in enumerate(rows):  # mapped from files: what changes is this process's
                checkpoint["model"][f"tables.weight.{table}"][ids] = new
            checkpoints.write_checkpoint(path, checkpoint)
            print(f"wrote {path}")


if __name__ == "__main__":
    run(main)
