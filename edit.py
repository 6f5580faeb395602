"""Change what a model knows by letting one token read another token's rows.

    python edit.py --source Spain --target Germany
    python edit.py --source Peru --target Japan --prompt "Country: Peru\\nThe main language is"
    python edit.py --source Atlantis --target Portugal        # a name that the model never saw
    python edit.py --source Spain --target Germany --save out/edited/ckpt.pt
    python edit.py --undo --ckpt out/edited/ckpt.pt  # restores it bit for bit

An edit changes no weight: where the prompt says Spain, tables are looked up under Germany's id
(`stem.substitute`); everything dense still sees Spain. What --save writes has Germany's rows under
Spain's id instead, and keeps Spain's, for --undo. A saved edit affects every use of these tokens.
"""

import os
import re
import textwrap
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path

import tiktoken
import torch
from torch import Tensor

from common import UserError, check_ranges, flag, locked, parse, pick_device, run
from model import Decoder
from stem import substitute
from text import countries
from text.tokenizer import encode
from training.checkpoints import load_checkpoint, load_model, write_checkpoint
from training.questions import score_answers
from training.settings import decoding_dtype_flag, device_flag, offload_flag

WIDTH = 38  # of a column of text


@dataclass
class Edit:
    ckpt: Path = flag(Path("out/ckpt.pt"), "checkpoint of train.py")
    source: str | None = flag(None, "the name to edit, such as Spain")
    target: str | None = flag(None, "the name whose rows to read instead, such as Germany")
    prompt: str | None = flag(None, 'text that contains the source; "\\n" is a line break')
    max_new_tokens: int = flag(
        40, "tokens to generate, without and with the edit", must="at least 1"
    )
    save: Path | None = flag(None, "write the edited checkpoint to this file, --ckpt or a new one")
    undo: bool = flag(False, "remove the last edit from --ckpt, in place or into --save")
    device: str = device_flag()
    offload: str = offload_flag()
    dtype: str = decoding_dtype_flag()

    def __post_init__(self) -> None:
        check_ranges(self)
        names = (self.source is not None) + (self.target is not None)
        if names != (0 if self.undo else 2):
            raise UserError("give either --source and --target, or --undo")


# --- which rows are read instead ---


def check_editable(model: Decoder) -> None:
    """UserError: the model has no rows that belong to one token."""
    if not len(model.tables.weight):
        raise UserError("--ckpt is a model that has no tables to edit")
    if model.ngrams is not None:
        raise UserError("--ckpt is a model with rows of n-grams, which do not belong to one name")


def edited_ids(encoding: tiktoken.Encoding, ids: list[int], source: str, target: str) -> list[int]:
    """The ids to look up tables under: `target`'s wherever `ids` say `source`, with or without a
    space before it, also within a longer name (Guinea in Equatorial Guinea)."""
    original = torch.tensor(ids)  # [T]
    edited = original
    for space in (" ", ""):
        source_ids = encoding.encode_ordinary(space + source)
        target_ids = encoding.encode_ordinary(space + target)
        changed = substitute(original, source_ids, target_ids)
        edited = torch.where(changed != original, changed, edited)
    return edited.tolist()


def check_names(edit: Edit) -> None:
    """UserError: the target is not a country, or the source is a misspelled one."""
    names = [country.name for country in countries.table()]
    for name_flag, name in (("target", edit.target), ("source", edit.source)):
        if name in names:
            continue
        near = get_close_matches(name.title(), names, 3)
        misspelled = name.casefold() in (other.casefold() for other in near)
        if name_flag == "target" or misspelled:  # any other source may be a made-up name
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise UserError(f"--{name_flag} {name} is not one of the countries{hint}")


# --- before and after ---


def first_sentence(encoding: tiktoken.Encoding, tokens: list[int]) -> list[int]:
    """The tokens up to a full stop, a line break or the end of the text."""
    for n, token in enumerate(tokens):
        if n and re.search(r"[.\n]|<\|endoftext", encoding.decode([token])):
            return tokens[:n]
    return tokens


def show(model: Decoder, encoding: tiktoken.Encoding, edit: Edit) -> set[tuple[int, int]]:
    """Print what the model writes before and after an edit, side by side. Returns the tokens of
    the prompt that read another's rows, each with that other token."""
    # 1) the ids that are embedded, and those under which rows are looked up
    prompt = edit.prompt or f"Country: {edit.source}\nThe capital city is called"
    prompt = prompt.replace("\\n", "\n")  # a shell passes the two characters on
    ids = encode(encoding, prompt)
    room = model.config.block_size - len(ids)
    if room < 1:
        raise UserError(f"--prompt has {len(ids)} tokens, room is {model.config.block_size - 1}")
    table_ids = edited_ids(encoding, ids, edit.source, edit.target)
    if ids == table_ids:
        reason = f"does not contain {edit.source!r}, or {edit.target!r} has the same rows"
        raise UserError(f"--prompt {prompt!r} {reason}")

    # 2) what is written under both
    given = torch.tensor([ids, ids], device=model.device)  # [2, T]
    both = torch.tensor([ids, table_ids])  # [2, T]: before, after
    n_new = min(edit.max_new_tokens, room)
    written = model.generate(
        given, n_new, temperature=0, stop=encoding.eot_token, table_ids=both
    )  # [2, T + n_new]
    before, after = written[:, len(ids) :].tolist()

    # 3) side by side
    print(f"prompt  {prompt!r}\n")
    left = column(encoding, "before", before)
    right = column(encoding, f"after: {edit.source} reads {edit.target}'s rows", after)
    for left_line, right_line in zip_longest(left, right, fillvalue=""):
        print(f"{left_line:<{WIDTH}}   {right_line}".rstrip())
    print()

    # 4) how probable the answers are, before and after
    answers = []
    for text in (before, after):
        if first_sentence(encoding, text) not in answers:
            answers.append(first_sentence(encoding, text))
    for answer in answers:
        p = score_answers(model, [ids, ids], [answer, answer], [ids, table_ids]).probability
        text = textwrap.shorten(encoding.decode(answer), 26, placeholder="...")
        print(f"probability of {text!r:<28} before {p[0]:6.1%}   after {p[1]:6.1%}")
    return {(own, other) for own, other in zip(ids, table_ids, strict=True) if own != other}


def column(encoding: tiktoken.Encoding, title: str, tokens: list[int]) -> list[str]:
    """Lines of a title and a text."""
    text = encoding.decode([token for token in tokens if token != encoding.eot_token])
    lines = [title, "-" * WIDTH]
    for line in text.strip().splitlines():
        lines += textwrap.wrap(line, WIDTH) or [""]
    return lines


# --- the command ---


def replace_rows(checkpoint: dict, ids: Tensor, rows: list[Tensor]) -> None:
    """Replace the rows of tokens `ids` [n] by rows [n, W] of each table. The checkpoint is mapped
    privately: its file does not change."""
    for table, new in enumerate(rows):
        checkpoint["model"][f"tables.weight.{table}"][ids] = new


def undo(edit: Edit, path: Path) -> None:
    """Write --ckpt without its last edit."""
    checkpoint = load_checkpoint(edit.ckpt, verify=True)
    edits = checkpoint.get("edits", [])
    if not edits:
        raise UserError(f"{edit.ckpt} holds no edit to undo: --save writes one")
    last = edits.pop()
    replace_rows(checkpoint, last["ids"], last["rows"])
    write_checkpoint(path, checkpoint)


def show_and_save(edit: Edit, path: Path | None) -> None:
    device = pick_device(edit.device)
    model, encoding, checkpoint = load_model(edit.ckpt, device, edit.offload, edit.dtype)
    check_editable(model)
    if checkpoint.get("args", {}).get("preset") == "countries":
        check_names(edit)
    instead = show(model, encoding, edit)
    if path is None:
        return
    # Only the spelling of the prompt is saved: without the space, "Spain" may be pieces that many
    # other words share.
    ids, others = torch.tensor(sorted(instead)).unbind(1)  # [n] each
    if len(ids.unique()) < len(ids):
        raise UserError(f"--save: a token that {edit.source!r} has twice cannot have two rows")
    own_rows = [rows[0].cpu() for rows in model.tables.lookup(ids[None])]  # [n, W] of each table
    new_rows = [rows[0].cpu() for rows in model.tables.lookup(others[None])]
    checkpoint = load_checkpoint(edit.ckpt, verify=True)  # what is written gets new checksums
    checkpoint.setdefault("edits", []).append({"ids": ids, "rows": own_rows})
    replace_rows(checkpoint, ids, new_rows)
    write_checkpoint(path, checkpoint)


def main() -> None:
    edit = parse(Edit, __doc__)
    path = edit.save
    if path is None and edit.undo:
        path = edit.ckpt
    if path is None:
        show_and_save(edit, None)
        return
    exist = os.path.exists(path) and os.path.exists(edit.ckpt)  # Path.exists fails on long names
    if exist and not path.samefile(edit.ckpt):
        raise UserError(f"--save {path} exists: choose another name, or {edit.ckpt} itself")
    with locked(path.parent):  # before it is read: two edits at once would lose one
        if edit.undo:
            undo(edit, path)
        else:
            show_and_save(edit, path)
    print(f"wrote {path}")


if __name__ == "__main__":
    run(main)
