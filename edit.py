"""Change what a model knows about one name: all of it, or one fact.

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
would change them. To correct one of them, give the prompt that it was written with, or --undo it
first. With another prompt for it, its old answer would be taught, too.

--facts writes one fact after the other, each into the rows that the earlier ones left. A line is
{"source": "Spain", "write": "Lisbon.", "prompt": "..."}, where the prompt may be left out. In the
end all are asked again. Facts that were not learned are named, and not saved; if there are others,
the exit code is 0 nevertheless. One --undo takes all of them back.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

# Before torch, whose threads it tells how to wait.
from common import (
    Damage,
    UserError,
    check_ranges,
    command_line,
    flag,
    locked,
    parse,
    parse_json,
    pick_device,
    reading,
    run,
    stop_signals,
)

# isort: split
import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

from corpora import recall
from corpora.countries import with_article
from corpora.questions import score_answers
from model import Decoder
from stem import ALIGNMENTS, align, substitute
from tables.tables import Tables
from text import chat
from text.columns import padded, shortened, width, wrapped
from text.tokenizer import END, encode, spelled, typed, until_end
from training.checkpoints import checkpoint_of, load_checkpoint, write_checkpoint
from training.decoding import chats, check_chat, decoding_dtype_flag, load_to_decode
from training.folders import clear
from training.settings import device_flag, offload_flag
from training.writing import (
    Fact,
    changed_rows,
    mean_rows,
    opening_of,
    other_ids,
    own_tokens,
    train_rows,
    with_rows,
)

WIDTH = 38  # of a column of text


@dataclass
class Edit:
    ckpt: Path = flag(Path("out"), "checkpoint of train.py, or a folder of a run")
    source: str = flag("", "the name to edit, such as Spain")
    target: str = flag("", "the name whose rows to read instead, such as Germany")
    align: str = flag(
        "copy",
        "for names of unequal length: repeat the target's rows or pad with <|endoftext|>'s in "
        "front, a subset of its rows, or their average (stem.align)",
        choices=ALIGNMENTS,
    )
    prompt: str | None = flag(None, 'text that contains the source; "\\n" is a line break')
    write: str = flag("", 'the text that should follow the prompt, such as "Lisbon."')
    facts: Path | None = flag(None, "write the facts of a file, each line a JSON record: see above")
    chat: bool = flag(
        False, "the prompt is a message to a model that chats, and --write its whole answer"
    )
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
        if self.undo or self.facts:
            named = self.source or self.target or self.write or self.prompt
            fits = not named and bool(self.undo) != bool(self.facts)
        else:
            fits = self.source and bool(self.target) != bool(self.write)
        if not fits:
            raise UserError(
                "give --source with either --target or --write, or give --facts or --undo alone"
            )
        if self.align != "copy" and not self.target:
            raise UserError(f"--align {self.align} needs a --target")


# --- open, edit, save, undo ---


def edit_checkpoint(edit: Edit, path: Path | None) -> None:
    """Edit a model, print what changes, and write it to a path, if there is one. UserError: it is
    not to be written, as nothing was learned."""
    # 1) the model; what is written gets new checksums
    model, encoding, checkpoint = open_model(edit, verify=path is not None)
    earlier = written_facts(checkpoint, model)

    # 2) its new rows, and the facts that were written into them
    if edit.facts:
        edits = read_facts(edit, model, encoding, checkpoint)
        new, written = write_facts(model, edits, earlier)
    else:
        fill_in(edit, encoding, checkpoint)
        located, after = new_rows(model, encoding, edit, earlier)
        if path and edit.target:  # show what is saved, which is read in all texts
            check_rows(edit, located.prompt, after.ids)
            new = changed_rows(after.tables, located.prompt, after.ids)
            after = State(with_rows(after.tables, new), located.prompt)
        learned = compare(model, encoding, edit, located, after)
        new = {}
        if path and learned:
            new = dict(zip(after.tables.ids, after.tables.extra, strict=True))
        written = [(located.prompt, located.answer)] if edit.write else []

    # 3) save it
    if path and not new:
        what = "none of the facts was" if edit.facts else f"{edit.write!r} was not"
        raise UserError(f"--save: nothing is saved, as {what} learned")
    if path:
        save(path, checkpoint, encoding, new, written)


def save(
    path: Path,
    checkpoint: dict,
    encoding: tiktoken.Encoding,
    new: dict[int, Tensor],
    facts: list[Fact],
) -> None:
    """Write a checkpoint in which tokens have new rows [n_table, W], and their own in its list of
    edits, for --undo, with the facts that were written. Print what changed."""
    tokens = list(new)
    ids = torch.tensor(tokens)
    own = replace_rows(checkpoint, ids, torch.stack(list(new.values())).cpu().unbind(1))
    checkpoint["edits"].append({"ids": ids, "rows": own, "facts": facts})
    write_checkpoint(path, checkpoint)
    print(f"changed the rows of {[spelled(encoding, token) for token in tokens]}")
    readers = recall.readers(encoding, tokens)
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


# --- a model to edit ---


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


def check_editable(model: Decoder) -> None:
    """UserError: the model has no rows that belong to one token."""
    if not len(model.tables.weight):
        raise UserError("--ckpt is a model that has no tables to edit")
    if not recall.has_own_rows(model):
        rows = "rows of n-grams or hashes"
        raise UserError(f"--ckpt is a model with {rows}, which do not belong to one name")


def has_own_text(checkpoint: dict) -> bool:
    """Whether the model was trained on text of somebody's own, or (a model from elsewhere) on text
    that we do not know. Then it may know other names than those of the countries. The preset does
    not tell: a run on one's own text inherits it from the model that it continues."""
    corpora = {meta["corpus"] for meta in checkpoint["data"]}
    return not corpora or "files" in corpora


def fill_in(edit: Edit, encoding: tiktoken.Encoding, checkpoint: dict) -> None:
    """Give an edit a prompt, and its texts as the model knows them. UserError: there is none, or
    no such country."""
    is_own = has_own_text(checkpoint)
    if not edit.prompt and is_own:
        raise UserError(f"--prompt is needed for your own text: one that contains {edit.source!r}")
    if not edit.prompt and edit.chat:
        edit.prompt = f"What is the capital of {with_article(edit.source)}?"
    edit.prompt = edit.prompt or f"Country: {edit.source}\nThe capital city is called"
    for name in ("source", "target", "prompt", "write"):
        setattr(edit, name, typed(encoding, getattr(edit, name)))
    if checkpoint["args"].get("preset") == "countries" and not is_own:
        recall.check_names(target=edit.target, source=edit.source)


def written_facts(checkpoint: dict, model: Decoder) -> list[Fact]:
    """The facts that edits have written into a checkpoint and that the model still says: other rows
    may have come in their place."""
    facts = [fact for edit in checkpoint["edits"] for fact in edit.get("facts") or []]
    if not facts:
        return []
    said = score_answers(model, *zip(*facts, strict=True)).greedy
    return [fact for fact, is_said in zip(facts, said.tolist(), strict=True) if is_said]


# --- one edit ---


class Located(NamedTuple):
    """What an edit is about, as token ids."""

    prompt: list[int]
    name: list[int]  # the source, as the prompt has it
    answer: list[int]  # what --write writes, or nothing
    beginnings: list[list[int]]  # of texts to hold, as in `texts_about`
    stop: int = -1  # of a chat: the token that ends an answer
    spellings: Sequence[list[int]] = ()  # the source with or without a space, as `name` is not


class State(NamedTuple):
    """Which rows a model reads, before or after an edit. A swap that is not saved is in the ids of
    the prompt alone. One that is saved, and a fact that is written, is in tables with new rows: the
    text after the prompt reads them, too."""

    tables: Tables
    ids: list[int]  # under which the prompt's rows are looked up, [T]


def new_rows(
    model: Decoder, encoding: tiktoken.Encoding, edit: Edit, earlier: Sequence[Fact] = ()
) -> tuple[Located, State]:
    """Make an edit, after earlier ones that wrote facts: what it is about, and what is read then.
    The model stays as it is."""
    located = locate(model, encoding, edit)
    if edit.write:
        changed = train_rows(model, *located, earlier=earlier)
        after = State(with_rows(model.tables, changed), located.prompt)
    else:
        after = swap_rows(model, encoding, edit, located)
        changed = other_ids(located.prompt, after.ids)
    kept = [spelled(encoding, token) for token in located.name if token not in changed]
    if kept:  # everyday words, and what both names share
        print(f"of {edit.source!r}, the rows of {kept} stay as they are\n")
    # Where a token joins the name to its neighbors, as in Chinese, a prompt has it also without the
    # tokens that are swapped.
    line_break = encoding.encode_ordinary("\n")
    rest = edited_ids(encoding, located.prompt[1:], edit.source, [line_break, line_break])
    if edit.source in encoding.decode(rest):
        print(f"where --prompt has {edit.source!r} in other tokens, these stay as they are\n")
    return located, after


def locate(model: Decoder, encoding: tiktoken.Encoding, edit: Edit) -> Located:
    """Find what an edit is about in the tokens of its prompt. UserError: the prompt does not have
    the source, or there is no room for the answer."""
    # 1) the tokens of the prompt and of the answer
    if edit.chat:
        ids, answer = messages(encoding, edit.prompt, edit.write)
        answers = [answer]
    else:
        ids = encode(encoding, edit.prompt)
        answers = with_and_without_space(encoding, edit.write) if edit.write else [[]]
    room = model.config.block_size
    longest = max(map(len, answers))
    if len(ids) + max(1, longest) > room:
        raise UserError(
            f"--prompt has {len(ids)} tokens, and --write {longest}, but room is {room}"
        )
    # Of the answer with and without a space before it, take the one that the model finds likelier.
    first = [answer[:1] for answer in answers]
    likely = score_answers(model, [ids] * len(answers), first).probability
    answer = answers[likely.argmax()]

    # 2) where the name is
    name, end = find_name(encoding, edit.source, ids)
    if not name and edit.source in edit.prompt:
        pieces = [spelled(encoding, token) for token in ids[1:]]
        raise UserError(
            f"--source {edit.source!r} is not whole tokens of --prompt: {pieces}: give a longer "
            "--source, or another --prompt"
        )
    if not name:
        raise UserError(f"--prompt {edit.prompt!r} does not contain {edit.source!r}")

    # 3) how texts about it begin
    others = [other for other in spellings(encoding, edit.source) if other != name]
    if not edit.chat:
        return Located(ids, name, answer, [ids[:end]], spellings=others)
    beginnings = [ids, messages(encoding, edit.source)[0]]
    return Located(ids, name, answer, beginnings, encoding.encode_single_token(END), others)


def messages(
    encoding: tiktoken.Encoding, user: str, assistant: str = ""
) -> tuple[list[int], list[int]]:
    """Token ids of a user's message up to where the assistant answers, and of its answer with the
    mark that ends it, or none."""
    said = [{"role": "user", "content": user}]
    prompt = chat.prompt(encoding, said)
    said.append({"role": "assistant", "content": assistant})
    answer = chat.render(encoding, said)[len(prompt) :] if assistant else []
    return [encoding.eot_token, *prompt], answer[:-1]  # without the line break


def find_name(encoding: tiktoken.Encoding, name: str, ids: list[int]) -> tuple[list[int], int]:
    """The tokens of a name as `ids` have it, with or without a space before it, and where it first
    ends; none if they do not have it."""
    for tokens in spellings(encoding, name):
        marked = substitute(torch.tensor(ids), tokens, [-1]).tolist()
        if marked != ids:
            return tokens, marked.index(-1) + len(tokens)
    return [], 0


def spellings(encoding: tiktoken.Encoding, name: str) -> list[list[int]]:
    """The tokens of a name with and without a space before it. A space that is a token of its own,
    as before a Chinese name, does not belong to the name: all other words read its rows, too."""
    spaced, bare = with_and_without_space(encoding, name)
    return [bare if encoding.decode_bytes(spaced[:1]) == b" " else spaced, bare]


def with_and_without_space(encoding: tiktoken.Encoding, text: str) -> list[list[int]]:
    return [encoding.encode_ordinary(space + text) for space in (" ", "")]


def swap_rows(model: Decoder, encoding: tiktoken.Encoding, edit: Edit, located: Located) -> State:
    """Returns what to read of the prompt, so that its source reads the target's rows. UserError: it
    does already."""
    tables = model.tables
    targets = spellings(encoding, edit.target)
    target = targets[spellings(encoding, edit.source).index(located.name)]
    if edit.align == "average":
        tables = mean_rows(tables, targets)
        targets = [[mean] for mean in tables.ids]
    elif len(target) > len(located.name):
        read = spelled(encoding, *align(target, len(located.name), edit.align))
        print(f"of {edit.target!r}, only the rows of {read!r} fit: --align average reads all\n")
    ids = edited_ids(encoding, located.prompt, edit.source, targets, edit.align)
    own = own_tokens(model, located.prompt[0], located.name)
    ids = [read if token in own else token for token, read in zip(located.prompt, ids, strict=True)]
    if ids == located.prompt:
        raise UserError(f"--prompt {edit.prompt!r} reads these rows already")
    return State(tables, ids)


def edited_ids(
    encoding: tiktoken.Encoding,
    ids: list[int],
    source: str,
    targets: Sequence[list[int]],
    how: str = "copy",
) -> list[int]:
    """The ids to look up tables under: those of a target, aligned as by `stem.align`, wherever
    `ids` say `source`, also within a longer name (Guinea in Equatorial Guinea). `targets`: for a
    source with a space before it, and for one without."""
    original = torch.tensor(ids)  # [T]
    edited = original
    for source_ids, target_ids in zip(spellings(encoding, source), targets, strict=True):
        aligned = align(target_ids, len(source_ids), how, encoding.eot_token)
        changed = substitute(original, source_ids, aligned)
        edited = torch.where(changed != original, changed, edited)
    return edited.tolist()


def check_rows(edit: Edit, prompt: list[int], table_ids: list[int]) -> None:
    """UserError: the prompt has a token twice and reads two different rows for it, but a checkpoint
    has one row for a token.

    Only the tokens of the name as the prompt spells it get new rows. Those of the other spelling,
    with or without a space, do not: "Spain" without one may be pieces that many words share."""
    read = set(zip(prompt, table_ids, strict=True))
    if len(read) > len(set(prompt)):
        fix = "give a --prompt that has the name's tokens in the name alone"
        if edit.align != "average":
            fix += ", or --align average if it does"
        raise UserError(f"a token that --prompt has twice cannot have two rows: {fix}")


# --- before and after ---

LAST = "rows in the last layer alone change no more than the token after the name"


def compare(
    model: Decoder, encoding: tiktoken.Encoding, edit: Edit, located: Located, after: State
) -> bool:
    """Print what the model writes before and after an edit, side by side, and how probable the
    answers are. Returns whether the model writes what it should, to its end. It keeps the tables
    that are read after the edit."""
    # 1) side by side
    states = State(model.tables, located.prompt), after
    texts = continuations(model, encoding, edit, located, states)
    title = f"after: {edit.source} reads rows of {edit.target}"
    if edit.write:
        title = f"after writing {edit.write!r}"
    print(f"prompt  {encoding.decode(located.prompt[1:])!r}\n")  # without the leading <|endoftext|>
    parts = zip(("before", title), texts, strict=True)
    columns = [column(encoding, *part) for part in parts]
    for left, right in zip_longest(*columns, fillvalue=""):
        print(f"{padded(left, WIDTH)}   {right}".rstrip())
    print()

    # 2) how probable the answers are, before and after
    for answer, *p in probabilities(model, encoding, located, states, texts):
        form = "6.1%" if max(p) > 0.0005 else "6.0e"  # of a long answer, both are tiny
        answer = padded(repr(answer), 28)
        print(f"probability of {answer} before {p[0]:{form}}   after {p[1]:{form}}")
    if texts[0] == texts[1] and not located.answer:
        reason = "do this name's rows hold the fact?" if recall.reaches_ahead(model) else LAST
        print(f"note: the swap moves nothing here, not one word: {reason}")
    learned = not located.answer or is_written(model, located)
    if not learned:
        reason = "new words are beyond a name's rows" if recall.reaches_ahead(model) else LAST
        print(f"not learned: the model writes something else; {reason}")
    return learned


def continuations(
    model: Decoder,
    encoding: tiktoken.Encoding,
    edit: Edit,
    located: Located,
    states: Sequence[State],
) -> list[list[int]]:
    """What the model writes after the prompt, with each of some states. It keeps the tables of
    the last one."""
    ids = located.prompt
    texts = []
    for state in states:
        model.tables = state.tables
        written = model.generate(  # [1, T + n_new]
            torch.tensor([ids], device=model.device),
            min(edit.max_new_tokens, model.config.block_size - len(ids)),
            temperature=0,
            stop=encoding.encode_single_token(END) if edit.chat else encoding.eot_token,
            table_ids=torch.tensor([state.ids]),
        )
        texts.append(written[0, len(ids) :].tolist())
    return texts


def probabilities(
    model: Decoder,
    encoding: tiktoken.Encoding,
    located: Located,
    states: Sequence[State],
    texts: Sequence[list[int]],
) -> Iterator[tuple[str, float, float]]:
    """How probable the answers are in what is written before and after an edit, `texts`, and what
    was to be written: each answer with its probability before and after, which are `states`. The
    model keeps the tables of the last one."""
    first, last = (first_sentence(encoding, text) for text in texts)
    answers = [first, located.answer or last]
    if located.answer != texts[1][: len(located.answer)]:
        answers.append(last)
    for number, answer in enumerate(answers):
        if answer in answers[:number]:
            continue
        p = []
        for state in states:
            model.tables = state.tables
            scores = score_answers(model, [located.prompt], [answer], [state.ids])
            p.append(scores.probability.item())
        text = shortened(encoding.decode(until_end(encoding, answer) or answer), 26)
        yield text, *p


# A sentence ends with a stop before a space, which no initial or title has ("St. John's").
SENTENCE = re.compile(
    r"\s*.*?((?<!\s[A-Z])(?<!\s[A-Z][a-z])[.!?؟](?=\s|$)|[。！？।]|(?=\n)|$)", re.DOTALL
)


def first_sentence(encoding: tiktoken.Encoding, tokens: list[int]) -> list[int]:
    """The tokens up to the end of a sentence, a line or the text, at least one."""
    text = until_end(encoding, tokens) or tokens[:1]
    length = SENTENCE.match(" " + encoding.decode(text, errors="ignore")).end() - 1
    for n in range(1, len(text)):
        if len(encoding.decode(text[:n], errors="ignore")) >= length:
            return text[:n]
    return text


def is_written(model: Decoder, located: Located) -> bool:
    """Whether greedy decoding writes the whole answer; in a chat also if it opens it in another way
    ("The answer is Lima." for "Lima.")."""
    prompt, name, answer, _, stop, others = located
    names = [name, *others]
    if score_answers(model, [prompt], [answer]).greedy.item():
        return True
    if stop < 0:
        return False
    reply = model.generate(  # [1, T + n_new]
        torch.tensor([prompt], device=model.device),
        min(len(answer) + 16, model.config.block_size - len(prompt)),
        temperature=0,
        stop=stop,
    )[0, len(prompt) :].tolist()
    said, expected = (text[opening_of(model, prompt, names, text)[0] :] for text in (reply, answer))
    return said == expected


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
    with reading(edit.facts, LINE):
        lines = edit.facts.read_bytes().splitlines()
    edits = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{edit.facts}:{number}"
        with reading(where, LINE):
            record = parse_json(line, source=str, write=str, prompt=str | None)
            unknown = record.keys() - {"source", "write", "prompt"}
            if unknown:
                raise Damage(f"it has {', '.join(sorted(unknown))}")
        # Flags have escapes (text.tokenizer.typed), a file says what it means.
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
) -> tuple[dict[int, Tensor], list[Fact]]:
    """Write one fact after the other, each into the rows that those before it left, and print what
    became of them. Returns the new rows of tokens, [n_table, W] each, and the facts that were
    learned. A fact that was not learned changes no row.

    edits: from `read_facts`. earlier: facts that the checkpoint's edits wrote."""

    tables = model.tables

    def use(rows: dict[int, Tensor]) -> None:
        model.tables = with_rows(tables, rows) if rows else tables

    # 1) write
    all_located = [located for _, located in edits.values()]
    prompts = [located.prompt for located in all_located]
    answers = [located.answer for located in all_located]
    before = score_answers(model, prompts, answers).probability
    rows: dict[int, Tensor] = {}
    learned, written = [], []
    bar = tqdm(all_located, "facts", unit="fact", disable=None)
    with bar, stop_signals(bar) as stops:
        for located in bar:
            if stops:
                bar.write(f"only the first {len(learned)} of {len(edits)} facts were tried")
                break
            changed = {**rows, **train_rows(model, *located, earlier=earlier + written)}
            use(changed)
            learned.append(is_written(model, located))
            if learned[-1]:
                rows = changed
                written.append((located.prompt, located.answer))
            use(rows)

    # 2) ask all of them again
    after = score_answers(model, prompts, answers).probability
    known = [is_written(model, located) for located in all_located]
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
    return rows, written


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
        if os.path.exists(path) and real != os.path.realpath(edit.ckpt):
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
    run(main)
