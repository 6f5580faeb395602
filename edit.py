"""Change what a model knows about a name: all of it, or single facts.

    python edit.py --source Spain --target Germany    # Spain reads rows of Germany
    python edit.py --source Peru --target Japan --prompt "Country: Peru\\nThe main language is"
    python edit.py --source Spain --target "Papua New Guinea" --align average  # its mean row
    python edit.py --source Atlantis --target Portugal        # a name that the model never saw
    python edit.py --source Spain --write "Lisbon."   # one fact: what should follow the prompt
    python edit.py --source Spain --write "Lisbon." --save out/edited/ckpt.pt
    python edit.py --facts facts.jsonl --save out/edited/ckpt.pt   # many of them
    python edit.py --ckpt out/sft/ckpt.pt --chat --source Spain --write "The answer is Lisbon."
    python edit.py --undo --ckpt out/edited/ckpt.pt   # restores it bit for bit

--target changes no weight: where the prompt says Spain, tables are looked up under Germany's id
(`stem.substitute`); everything dense still sees Spain. --write trains rows for Spain's tokens
(training/writing.py), and nothing else. What --save writes has the new rows under Spain's id, and
keeps Spain's own, for --undo. A saved edit affects every use of these tokens, also in what follows
the prompt, and is shown like that. So rows of everyday words of a name (" of", " the") stay. Facts
that were written into the same rows before, and saved, are taught again with the next one, which
would change them; those that are lost nevertheless are named. To correct one of them, write it
again with the prompt that it had. With another one, a note says if it is corrected; without the
note, both answers were taught.

--facts writes one fact after the other, each into the rows that the earlier ones left. A line is
{"source": "Spain", "write": "Lisbon.", "prompt": "..."}, where the prompt may be left out. In the
end all are asked again. Facts that were not learned are named, and not saved; if there are others,
the exit code is 0 nevertheless. One --undo takes all of them back.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

# Before torch, whose threads it tells how to wait.
from common import (
    Damage,
    UserError,
    command_line,
    locked,
    parse,
    parse_json,
    pick_device,
    progress,
    reading,
    run_command,
    stop_signals,
)

# isort: split
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

from corpora import recall
from corpora.questions import score_answers
from model import Decoder
from tables.extra import ExtraRows, with_rows
from text.columns import padded, shortened, width, wrapped
from text.spelling import spelled
from text.tokenizer import until_end
from training.checkpoints import checkpoint_of, load_checkpoint, write_checkpoint
from training.decoding import chats, check_chat, load_to_decode
from training.edits import (
    ONLY_LAST_LAYER,
    Edit,
    Located,
    State,
    as_saved,
    as_written,
    check_editable,
    continuations,
    fill_in,
    has_own_text,
    locate,
    new_rows,
    probabilities,
    why_not_written,
    written_facts,
)
from training.folders import clear
from training.writing import Fact, train_rows

WIDTH = 38  # of a column of text


# --- open and edit ---


def edit_checkpoint(edit: Edit, path: Path | None) -> None:
    """Edit a model, print what changes, and write it to a path, if there is one. UserError: it is
    not to be written, as nothing was learned."""
    # 1) the model; what is written gets new checksums
    model, encoding, checkpoint = open_model(edit, verify=path is not None)
    earlier = written_facts(checkpoint, model)

    # 2) its new rows, and the facts that were written into them
    if edit.facts:
        edits = read_facts(edit, model, encoding, checkpoint)
        written = write_facts(model, edits, earlier)
        learned = bool(written)
    else:
        fill_in(edit, encoding, checkpoint)
        located, after = new_rows(model, encoding, edit, [*earlier])
        if path and edit.target:
            after = as_saved(edit, located, after)  # which is shown, then
        compare(model, encoding, edit, located, after)
        said = as_written(model, located) if edit.write else []
        written = [(located.prompt, said)] if edit.write else []
        learned = bool(edit.target or said)
        if not learned:
            reason = why_not_written(model, encoding, located)
            print(f"not learned: the model writes something else; {reason}")

    if path and not learned:
        what = "none of the facts was" if edit.facts else f"{edit.write!r} was not"
        raise UserError(f"--save: nothing is saved, as {what} learned")

    # 3) which earlier facts the model no longer says
    rewritten = [prompt for prompt, _ in written]
    still_said = written_facts(checkpoint, model)
    for fact in earlier:
        if fact not in still_said and fact[0] not in rewritten:
            text = encoding.decode(fact[0][1:] + fact[1])
            print(f"lost: {text!r}, which was written before")

    # 4) save what it reads now
    if path:
        save(path, checkpoint, encoding, model.tables, written)


def open_model(edit: Edit, verify: bool) -> tuple[Decoder, tiktoken.Encoding, dict]:
    """The model of --ckpt, its tokenizer and the checkpoint. UserError: it cannot be edited."""
    device = pick_device(edit.device)
    model, encoding, checkpoint = load_to_decode(
        edit.ckpt, device, edit.offload, edit.dtype, verify=verify
    )
    check_editable(model)
    if edit.chat:
        check_chat(edit.ckpt, encoding, checkpoint)
    elif chats(checkpoint):
        print(f"{edit.ckpt} chats: give --chat to edit what it answers", file=sys.stderr)
    return model, encoding, checkpoint


# --- before and after ---


def compare(
    model: Decoder, encoding: tiktoken.Encoding, edit: Edit, located: Located, after: State
) -> None:
    """Print what the model writes before and after an edit, side by side, and how probable the
    answers are. The model keeps the tables that are read after the edit."""
    # 1) side by side
    states = State(model.tables, located.prompt), after
    texts = continuations(model, encoding, edit, located, states)
    title = f"after: {edit.source} reads rows of {edit.target}"
    if edit.write:
        title = f"after writing {edit.write!r}"
    print(f"prompt  {encoding.decode(located.prompt[1:])!r}\n")  # without the leading <|endoftext|>
    columns = column(encoding, "before", texts[0]), column(encoding, title, texts[1])
    for left, right in zip_longest(*columns, fillvalue=""):
        print(f"{padded(left, WIDTH)}   {right}".rstrip())
    print()

    # 2) how probable the answers are, before and after
    for answer, *p in probabilities(model, encoding, located, states, texts):
        form = "6.1%" if max(p) > 0.0005 else "6.0e"  # of a long answer, both are tiny
        answer = padded(repr(answer), 28)
        print(f"probability of {answer} before {p[0]:{form}}   after {p[1]:{form}}")
    if texts[0] == texts[1] and not located.answer:
        ahead = recall.reaches_ahead(model)
        reason = "do this name's rows hold the fact?" if ahead else ONLY_LAST_LAYER
        print(f"note: the swap moves nothing here, not one word: {reason}")


def column(encoding: tiktoken.Encoding, title: str, tokens: list[int]) -> list[str]:
    """Lines of a title and a text."""
    text = encoding.decode(until_end(encoding, tokens))
    lines = [title, "-" * WIDTH]
    for line in text.strip().splitlines():
        lines += wrapped(line, WIDTH) or [""]
    return lines


# --- many facts ---

LINE = 'a line should be {"source": "Spain", "write": "Lisbon.", "prompt": "..."}'


def read_facts(
    edit: Edit, model: Decoder, encoding: tiktoken.Encoding, checkpoint: dict
) -> dict[str, tuple[Edit, Located]]:
    """The edits in the file of --facts and what they are about, by FILE:LINE. UserError: a line is
    none, or cannot be done, or there is no line."""
    with reading(edit.facts, f"--facts names a file: {LINE}"):
        lines = edit.facts.read_bytes().splitlines()
    edits = {}
    bar = progress(lines, "reading facts")
    for number, line in enumerate(bar, 1):
        if not line.strip():
            continue
        where = f"{edit.facts}:{number}"
        with reading(where, LINE):
            record = parse_json(line, source=str, write=str, prompt=str | None)
            unknown = record.keys() - {"source", "write", "prompt"}
            if unknown:
                raise Damage(f"it has {', '.join(sorted(unknown))}")
            if not (record["source"].strip() and record["write"].strip()):
                raise Damage("source or write is empty")
        # Flags have escapes (text.spelling.typed), a file says what it means.
        texts = {name: text and text.replace("\\", "\\\\") for name, text in record.items()}
        try:
            of_line = replace(edit, facts=None, **texts)
            fill_in(of_line, encoding, checkpoint)
            edits[where] = of_line, locate(model, encoding, of_line)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    if not edits:
        raise UserError(f"{edit.facts} has no facts: {LINE}")
    return edits


def write_facts(
    model: Decoder, edits: dict[str, tuple[Edit, Located]], earlier: list[Fact]
) -> list[Fact]:
    """Write one fact after the other, each into the rows that those before it left, and print what
    became of them. Returns the facts that were learned, whose rows the model keeps. A fact that was
    not learned changes no row.

    edits: from `read_facts`. earlier: facts that the checkpoint's edits wrote."""
    # 1) write
    own = model.tables
    all_located = [located for _, located in edits.values()]
    prompts = [located.prompt for located in all_located]
    answers = [located.answer for located in all_located]
    before = score_answers(model, prompts, answers).probability
    rows: dict[int, Tensor] = {}
    learned, written = [], []
    kept = earlier  # facts that later ones leave as they are
    bar = tqdm(all_located, "facts", unit="fact", disable=None)
    with bar, stop_signals(bar) as stops:
        for located in bar:
            if stops:
                bar.write(f"only the first {len(learned)} of {len(edits)} facts were tried")
                break
            before_it = model.tables
            others = [*kept]  # but for those that this one corrects
            changed = {**rows, **train_rows(model, *located, earlier=others)}
            model.tables = with_rows(own, changed)
            said = as_written(model, located)
            learned.append(bool(said))
            if said:
                rows = changed
                written.append((located.prompt, said))
                kept = [*others, written[-1]]
            else:
                model.tables = before_it

    # 2) ask all of them again
    after = score_answers(model, prompts, answers).probability
    bar = progress(all_located, "asking again")
    known = [bool(as_written(model, located)) for located in bar]
    parts = zip(edits.items(), learned, known, before, after, strict=False)  # learned: if tried
    room = max(map(width, edits))
    for (where, (edit, _)), was_learned, is_known, p_before, p_after in parts:
        state = ""
        if not is_known:
            state = "lost to a later fact" if was_learned else "not learned"
        text = padded(shortened(f"{edit.source}: {edit.write}", WIDTH), WIDTH)
        p = f"before {p_before:6.1%}   after {p_after:6.1%}"
        print(f"{padded(where, room)}  {text}  {p}   {state}".rstrip())
    print(f"{sum(known)} of {len(known)} facts are known")
    return written


# --- save and undo ---


def save(
    path: Path,
    checkpoint: dict,
    encoding: tiktoken.Encoding,
    new: ExtraRows,
    facts: list[Fact],
) -> None:
    """Write a checkpoint in which the tokens of extra rows have these, and their own in its list of
    edits, for --undo, with the facts that were written. Print what changed."""
    ids = torch.tensor(new.ids)
    own = replace_rows(checkpoint, ids, new.extra.cpu().unbind(1))
    checkpoint["edits"].append({"ids": ids, "rows": own, "facts": facts})
    write_checkpoint(path, checkpoint)
    print(f"changed the rows of {[spelled(encoding, token) for token in new.ids]}")
    readers = recall.readers(encoding, new.ids)
    if readers and not has_own_text(checkpoint):
        print(f"these countries read them and may change: {', '.join(readers)}")


def undo(edit: Edit, path: Path) -> None:
    """Write --ckpt without its last edit."""
    checkpoint = load_checkpoint(edit.ckpt, verify=True)
    edits = checkpoint["edits"]
    if not edits:
        raise UserError(f"{edit.ckpt} holds no edit to undo: training drops those it starts from")
    last = edits.pop()
    replace_rows(checkpoint, last["ids"], last["rows"])
    write_checkpoint(path, checkpoint)


def replace_rows(checkpoint: dict, ids: Tensor, rows: Iterable[Tensor]) -> list[Tensor]:
    """Replace the rows of tokens `ids` [n] by rows [n, W] of each table; returns those that were
    there. The checkpoint is mapped privately, if at all: its file does not change."""
    old = []
    for table, new in enumerate(rows):
        weight = checkpoint["model"][f"tables.weight.{table}"]
        old.append(weight[ids])
        weight[ids] = new.to(weight.dtype)
    return old


# --- the command ---


def main() -> None:
    edit = parse(Edit, __doc__)
    edit.ckpt = checkpoint_of(edit.ckpt)
    path = edit.save or (edit.ckpt if edit.undo else None)
    if path is None:
        edit_checkpoint(edit, None)
        return
    # Before it is read: two edits at once would lose one. Of a link, the folder where it leads.
    real = os.path.realpath(path)
    with locked(Path(real).parent):
        if os.path.lexists(path) and real != os.path.realpath(edit.ckpt):
            raise UserError(f"--save {path} exists: choose another name, or {edit.ckpt} itself")
        clear(path)  # of an edit that was killed
        if edit.undo:
            undo(edit, path)
        else:
            edit_checkpoint(edit, path)
    print(f"wrote {path}")
    if edit.save and not edit.undo:
        print(f"to undo it: {command_line('edit.py', '--undo', '--ckpt', path)}")


if __name__ == "__main__":
    run_command(main)
