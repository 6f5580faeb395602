"""Change what a model knows about one name: all of it, or one fact.

    python edit.py --source Spain --target Germany    # Spain reads rows of Germany
    python edit.py --source Peru --target Japan --prompt "Country: Peru\\nThe main language is"
    python edit.py --source Spain --target "Papua New Guinea" --align average  # its mean row
    python edit.py --source Atlantis --target Portugal        # a name that the model never saw
    python edit.py --source Spain --write "Lisbon."   # one fact: what should follow the prompt
    python edit.py --source Spain --write "Lisbon." --save out/edited/ckpt.pt
    python edit.py --undo --ckpt out/edited/ckpt.pt   # restores it bit for bit

--target changes no weight: where the prompt says Spain, tables are looked up under Germany's id
(`stem.substitute`); everything dense still sees Spain. --write trains rows for Spain's tokens
(training/writing.py), and nothing else. What --save writes has the new rows under Spain's id, and
keeps Spain's own, for --undo. A saved edit affects every use of these tokens.
"""

import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

# Before torch, whose threads it tells how to wait.
from common import (
    UserError,
    check_ranges,
    command_line,
    decode_in_one_thread,
    flag,
    locked,
    parse,
    pick_device,
    run,
)

# isort: split
import tiktoken
import torch
from torch import Tensor

from model import Decoder
from stem import ALIGNMENTS, align, substitute
from text.tokenizer import encode, typed
from training import countries
from training.checkpoints import checkpoint_of, load_checkpoint, load_model, write_checkpoint
from training.folders import clear
from training.questions import score_answers
from training.settings import decoding_dtype_flag, device_flag, offload_flag
from training.writing import mean_rows, rows_of, train_rows

WIDTH = 38  # of a column of text


@dataclass
class Edit:
    ckpt: Path = flag(Path("out/ckpt.pt"), "checkpoint of train.py")
    source: str = flag("", "the name to edit, such as Spain")
    target: str = flag("", "the name whose rows to read instead, such as Germany")
    align: str = flag(
        "copy",
        "for names of unequal length: copy the target's first row or pad with <|endoftext|>'s in "
        "front, a subset of its rows, or their average (stem.align)",
        choices=ALIGNMENTS,
    )
    prompt: str | None = flag(None, 'text that contains the source; "\\n" is a line break')
    write: str = flag("", 'the text that should follow the prompt, such as "Lisbon."')
    max_new_tokens: int = flag(
        40, "tokens to generate, before and after the edit", must="at least 1"
    )
    save: Path | None = flag(None, "write the edited checkpoint to this file, --ckpt or a new one")
    undo: bool = flag(False, "remove the last edit from --ckpt, in place or into --save")
    device: str = device_flag()
    offload: str = offload_flag()
    dtype: str = decoding_dtype_flag()

    def __post_init__(self) -> None:
        check_ranges(self)
        for name in ("source", "target", "write"):  # with and without a space, both are tried
            setattr(self, name, getattr(self, name).strip(" "))
        if self.undo:
            fits = not (self.source or self.target or self.write)
        else:
            fits = self.source and bool(self.target) != bool(self.write)
        if not fits:
            raise UserError("give --source with either --target or --write, or give --undo alone")
        if self.align != "copy" and not self.target:
            raise UserError(f"--align {self.align} needs a --target")


# --- which rows are read instead ---


def check_editable(model: Decoder) -> None:
    """UserError: the model has no rows that belong to one token."""
    if not len(model.tables.weight):
        raise UserError("--ckpt is a model that has no tables to edit")
    if model.n_address > 1 or model.tables.n_row != model.config.vocab_size:
        raise UserError("--ckpt is a model with rows of n-grams, which do not belong to one name")


def spellings(encoding: tiktoken.Encoding, name: str) -> list[list[int]]:
    """The tokens of a name with and without a space before it."""
    return [encoding.encode_ordinary(space + name) for space in (" ", "")]


def edited_ids(
    encoding: tiktoken.Encoding,
    ids: list[int],
    source: str,
    target: str,
    how: str = "copy",
    means: Sequence[int] = (),
) -> list[int]:
    """The ids to look up tables under: `target`'s, aligned as by `stem.align`, wherever `ids` say
    `source`, with or without a space before it, also within a longer name (Guinea in Equatorial
    Guinea). `means`: for average, the tokens that have the mean rows of both spellings."""
    original = torch.tensor(ids)  # [T]
    edited = original
    targets = [[mean] for mean in means] or spellings(encoding, target)
    for source_ids, target_ids in zip(spellings(encoding, source), targets, strict=True):
        aligned = align(target_ids, len(source_ids), how, encoding.eot_token)
        changed = substitute(original, source_ids, aligned)
        edited = torch.where(changed != original, changed, edited)
    return edited.tolist()


def find_name(encoding: tiktoken.Encoding, name: str, ids: list[int]) -> list[int]:
    """The tokens of a name as `ids` have it, with or without a space before it; none if they do
    not have it."""
    for tokens in spellings(encoding, name):
        if substitute(torch.tensor(ids), tokens, [-1]).tolist() != ids:
            return tokens
    return []


# --- one edit ---


class Asked(NamedTuple):
    """What an edit is about, as token ids."""

    prompt: list[int]
    name: list[int]  # the source, as the prompt has it
    answer: list[int]  # what --write writes, or nothing


def ask(model: Decoder, encoding: tiktoken.Encoding, edit: Edit) -> Asked:
    """UserError: the prompt does not have the source, or there is no room."""
    ids = encode(encoding, edit.prompt)
    answer = answer_tokens(model, encoding, ids, edit.write) if edit.write else []
    room = model.config.block_size
    if len(ids) + max(1, len(answer)) > room:
        raise UserError(
            f"--prompt has {len(ids)} tokens, and --write {len(answer)}, but room is {room}"
        )
    name = find_name(encoding, edit.source, ids)
    if not name and edit.source in edit.prompt:
        pieces = [encoding.decode([token]) for token in ids[1:]]
        raise UserError(f"--source {edit.source!r} is not whole tokens of --prompt: {pieces}")
    if not name:
        raise UserError(f"--prompt {edit.prompt!r} does not contain {edit.source!r}")
    return Asked(ids, name, answer)


def answer_tokens(
    model: Decoder, encoding: tiktoken.Encoding, prompt: list[int], text: str
) -> list[int]:
    """The tokens of a text: after a space, or not, as the model finds likelier."""
    spaced, bare = spellings(encoding, text)
    likely = score_answers(model, [prompt, prompt], [spaced[:1], bare[:1]]).probability
    return spaced if likely[0] >= likely[1] else bare


def swap_rows(model: Decoder, encoding: tiktoken.Encoding, edit: Edit, asked: Asked) -> list[int]:
    """Returns the ids under which to look up the prompt's rows, so that the source reads the
    target's. UserError: it does already."""
    targets = spellings(encoding, edit.target)
    target = targets[spellings(encoding, edit.source).index(asked.name)]
    means = []
    if edit.align == "average":
        model.tables = mean_rows(model.tables, targets)
        means = model.tables.ids
    elif len(target) > len(asked.name):
        read = encoding.decode(align(target, len(asked.name), edit.align))
        print(f"of {edit.target!r} only the rows of {read!r} are read: see --align, --write\n")
    ids = edited_ids(encoding, asked.prompt, edit.source, edit.target, edit.align, means)
    if ids == asked.prompt:
        raise UserError(f"--prompt {edit.prompt!r} reads these rows already")
    return ids


# --- before and after ---

# A sentence ends with a stop before a space, which no initial or title has ("St. John's").
SENTENCE = re.compile(
    r"\s*.*?((?<!\s[A-Z])(?<!\s[A-Z][a-z])[.!?](?=\s|$)|[。！？]|(?=\n)|$)", re.DOTALL
)


def first_sentence(encoding: tiktoken.Encoding, tokens: list[int]) -> list[int]:
    """The tokens up to the end of a sentence, a line or the text, at least one."""
    if encoding.eot_token in tokens:
        tokens = tokens[: max(1, tokens.index(encoding.eot_token))]
    length = SENTENCE.match(" " + encoding.decode(tokens, errors="ignore")).end() - 1
    for n in range(1, len(tokens)):
        if len(encoding.decode(tokens[:n], errors="ignore")) >= length:
            return tokens[:n]
    return tokens


def compare(
    model: Decoder, encoding: tiktoken.Encoding, edit: Edit, asked: Asked, table_ids: list[int]
) -> bool:
    """Print what the model writes before and after an edit, side by side, and how probable the
    answers are, whose rows are looked up under `table_ids` then. Returns whether the model writes
    what it should, to its end."""
    # 1) what is written before and after
    ids = asked.prompt
    written = model.generate(  # [2, T + n_new]
        torch.tensor([ids, ids], device=model.device),
        min(edit.max_new_tokens, model.config.block_size - len(ids)),
        temperature=0,
        stop=encoding.eot_token,
        table_ids=torch.tensor([ids, table_ids]),
    )
    before, after = written[:, len(ids) :].tolist()

    # 2) side by side
    title = f"after: {edit.source} reads rows of {edit.target}"
    if edit.write:
        title = f"after writing {edit.write!r}"
    print(f"prompt  {encoding.decode(ids[1:])!r}\n")  # without the leading <|endoftext|>
    columns = (column(encoding, "before", before), column(encoding, title, after))
    for left, right in zip_longest(*columns, fillvalue=""):
        print(f"{left:<{WIDTH}}   {right}".rstrip())
    print()

    # 3) how probable the answers are, before and after
    answers = [first_sentence(encoding, before), asked.answer or first_sentence(encoding, after)]
    learned = not asked.answer or is_written(model, asked, table_ids)
    if not learned:
        answers.append(first_sentence(encoding, after))
    for number, answer in enumerate(answers):
        if answer in answers[:number]:
            continue
        p = score_answers(model, [ids, ids], [answer, answer], [ids, table_ids]).probability
        text = textwrap.shorten(encoding.decode(answer), 26)
        print(f"probability of {text!r:<28} before {p[0]:6.1%}   after {p[1]:6.1%}")
    if not learned:
        print("not learned: the model writes something else; new words are beyond a name's rows")
    return learned


def is_written(model: Decoder, asked: Asked, table_ids: list[int]) -> bool:
    """Whether greedy decoding writes the whole answer."""
    return score_answers(model, [asked.prompt], [asked.answer], [table_ids]).greedy.item()


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
        raise UserError(
            f"{edit.ckpt} holds no edit to undo: training keeps none of those that --save wrote"
        )
    last = edits.pop()
    replace_rows(checkpoint, last["ids"], last["rows"])
    write_checkpoint(path, checkpoint)


def open_model(edit: Edit, verify: bool) -> tuple[Decoder, tiktoken.Encoding, dict]:
    """The model of --ckpt, its tokenizer and the checkpoint. UserError: it cannot be edited."""
    device = pick_device(edit.device)
    decode_in_one_thread(device)
    opened = load_model(edit.ckpt, device, edit.offload, edit.dtype, verify=verify)
    check_editable(opened[0])
    return opened


def has_own_text(checkpoint: dict) -> bool:
    """Text of one's own may have other names, also with the preset of a model it continues."""
    return "files" in {meta["corpus"] for meta in checkpoint.get("data", [])}


def complete(edit: Edit, encoding: tiktoken.Encoding, checkpoint: dict) -> None:
    """Give an edit a prompt, and its texts as the model knows them. UserError: there is none, or
    no such country."""
    is_own = has_own_text(checkpoint)
    if not edit.prompt and is_own:
        raise UserError(f"--prompt is needed for your own text: one that contains {edit.source!r}")
    edit.prompt = edit.prompt or f"Country: {edit.source}\nThe capital city is called"
    for name in ("source", "target", "prompt", "write"):
        setattr(edit, name, typed(encoding, getattr(edit, name)))
    if checkpoint["args"].get("preset") == "countries" and not is_own:
        countries.check_names(target=edit.target, source=edit.source)


def tokens_to_save(edit: Edit, prompt: list[int], table_ids: list[int]) -> dict[int, int]:
    """The tokens whose rows an edit replaces, with those whose rows they get. Only the prompt's
    spelling of the name is among them: without the space, "Spain" may be pieces that many other
    words share. UserError: one of them would have two rows."""
    read = set(zip(prompt, table_ids, strict=True))
    changed = {own for own, other in read if own != other}
    pairs = [(own, other) for own, other in sorted(read) if own in changed]
    if len(changed) < len(pairs):
        fix = ": --align average reads one" if edit.target and edit.align != "average" else ""
        raise UserError(f"--save: a token that --prompt has twice cannot have two rows{fix}")
    return dict(pairs)


def save(path: Path, checkpoint: dict, own: Tensor, new: Tensor, tokens: list[int]) -> None:
    """Write a checkpoint in which tokens have new rows, [n, n_table, W], and their own in its list
    of edits, for --undo."""
    ids = torch.tensor(tokens)
    edits = checkpoint.setdefault("edits", [])
    edits.append({"ids": ids, "rows": list(own.cpu().unbind(1))})
    replace_rows(checkpoint, ids, list(new.cpu().unbind(1)))
    write_checkpoint(path, checkpoint)


def show_and_save(edit: Edit, path: Path | None) -> None:
    """Edit a model, print what changes, and write it to a path, if there is one."""
    # What is written gets new checksums.
    model, encoding, checkpoint = open_model(edit, verify=path is not None)
    complete(edit, encoding, checkpoint)
    asked = ask(model, encoding, edit)
    if edit.write:
        table_ids = train_rows(model, *asked)
    else:
        table_ids = swap_rows(model, encoding, edit, asked)
    learned = compare(model, encoding, edit, asked, table_ids)
    if path is None:
        return
    if not learned:
        raise UserError(f"--save: nothing is saved, as {edit.write!r} was not learned")
    others = tokens_to_save(edit, asked.prompt, table_ids)
    own, new = (rows_of(model.tables, list(ids)) for ids in (others, others.values()))
    save(path, checkpoint, own, new, list(others))
    print(f"changed the rows of {[encoding.decode([token]) for token in others]}")
    readers = countries.readers(encoding, list(others))
    if readers and not has_own_text(checkpoint):
        print(f"these countries read them: {', '.join(readers)}")


def main() -> None:
    edit = parse(Edit, __doc__)
    edit.ckpt = checkpoint_of(edit.ckpt, resumes=edit.undo)
    path = edit.save or (edit.ckpt if edit.undo else None)
    if path is None:
        show_and_save(edit, None)
        return
    # Before it is read: two edits at once would lose one. Of a link, the folder where it leads.
    real = os.path.realpath(path)
    with locked(Path(real).parent):
        if os.path.exists(path) and real != os.path.realpath(edit.ckpt):
            raise UserError(f"--save {path} exists: choose another name, or {edit.ckpt} itself")
        clear(path)  # of an edit that was killed
        if edit.undo:
            undo(edit, path)
        else:
            show_and_save(edit, path)
    print(f"wrote {path}")
    if edit.save and not edit.undo:
        print(f"to undo it: {command_line('edit.py', '--undo', '--ckpt', path)}")


if __name__ == "__main__":
    run(main)
