"""An edit of a model in memory: what is asked for, which rows are read then, and what the model
says before and after it. edit.py is the command.

A name's rows are replaced by those of another name (`swap_rows`) or by rows that are trained to say
one fact (writing.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import regex
import tiktoken
import torch

from common import UserError, check_settings, flag
from corpora import recall
from corpora.countries import ABOUT_COUNTRIES, with_article
from corpora.questions import of_chat, score_answers
from model import Decoder
from stem import substitute
from tables.extra import ExtraRows, mean_rows, rows_of, with_rows
from tables.tables import Tables
from text import chat
from text.columns import shortened
from text.spelling import spelled, typed
from text.tokenizer import END, encode, until_end
from training.decoding import decoding_dtype_flag
from training.settings import device_flag, offload_flag
from training.writing import Fact, find, opening_of, own_tokens, train_rows

ALIGNMENTS = ("copy", "pad", "subset", "average")


@dataclass
class Edit:
    ckpt: Path = flag(Path("out"), "checkpoint of train.py or convert.py, or a folder of a run")
    source: str = flag("", "the name to edit, such as Spain")
    target: str = flag("", "the name whose rows to read instead, such as Germany")
    align: str = flag(
        "copy",
        "for names of unequal length: repeat the target's rows or pad with <|endoftext|>'s in "
        "front, a subset of its rows, or their average (training/edits.py)",
        choices=ALIGNMENTS,
    )
    prompt: str | None = flag(None, 'text that contains the source; "\\n" is a line break')
    write: str = flag("", 'the text that should follow the prompt, to its end, such as "Lisbon."')
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
        check_settings(self)
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


# --- a model to edit ---


def check_editable(model: Decoder) -> None:
    """UserError: the model has no rows that belong to one token."""
    if not recall.has_own_rows(model):
        what = "no tables to edit"
        if len(model.tables.weight):
            what = "rows that do not belong to one token each (of n-grams, hashes)"
        raise UserError(f"--ckpt is a model that has {what}")
    kind = type(model.tables)
    if kind.__module__.partition(".")[0] in ("tables", "offload"):
        return
    # A lookup of somebody's own may find other rows, or change them: what is saved under an id
    # would not be what was shown.
    some = [*range(0, model.tables.n_row, 1 + model.tables.n_row // 100)]
    read = rows_of(model.tables, some).cpu()  # [n, n_table, W]
    stored = torch.stack([weight[some] for weight in model.tables.weight], dim=1).cpu()
    if not torch.equal(read.float(), stored.float()):
        own = f"{kind.__name__}.lookup"
        raise UserError(f"--ckpt is a model whose {own} returns no rows as they are stored")


def has_own_text(checkpoint: dict) -> bool:
    """Whether the model was trained on text of somebody's own, or (a model from elsewhere) on text
    that we do not know. Then it may know other names than those of the countries. The preset does
    not tell: a run on one's own text inherits it from the model that it continues."""
    corpora = {meta["corpus"] for meta in checkpoint["data"]}
    return not corpora or not corpora <= ABOUT_COUNTRIES


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
    model: Decoder, encoding: tiktoken.Encoding, edit: Edit, earlier: list[Fact] | None = None
) -> tuple[Located, State]:
    """Make an edit, after earlier ones that wrote facts: what it is about, and what is read then.
    The model stays as it is. `earlier` loses the facts that this one corrects."""
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
        said = [message("user", edit.prompt), message("assistant", edit.write)]
        ids, answer = of_chat(encoding, said)
        answers = [answer if edit.write else []]
    else:
        ids = encode(encoding, edit.prompt)
        answers = with_and_without_space(encoding, edit.write) if edit.write else [[]]
    room = model.config.block_size
    longest = max(map(len, answers))
    if len(ids) + max(1, longest) > room:
        raise UserError(
            f"--prompt has {len(ids)} tokens, and --write {longest}, but room is {room}"
        )
    # Of the answer with and without a space before it, take the one that the model finds likelier:
    # as a whole, as a piece of a word may be likelier than a word that is not expected.
    likely = score_answers(model, [ids] * len(answers), answers).probability
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
    of_name = chat.prompt(encoding, [message("user", edit.source)])
    beginnings = [ids, [encoding.eot_token, *of_name]]
    return Located(ids, name, answer, beginnings, encoding.encode_single_token(END), others)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


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


def other_ids(prompt: list[int], table_ids: list[int]) -> dict[int, int]:
    """The tokens of a prompt that are looked up under other ids, with these."""
    return {own: read for own, read in zip(prompt, table_ids, strict=True) if own != read}


def as_saved(edit: Edit, located: Located, swap: State) -> State:
    """A swap as a checkpoint has it: in rows, which all texts read. UserError: the prompt has a
    token twice and reads two different rows for it, but a checkpoint has one row for a token.

    Only the tokens of the name as the prompt spells it get new rows. Those of the other spelling,
    with or without a space, do not: "Spain" without one may be pieces that many words share."""
    prompt = located.prompt
    if len(set(zip(prompt, swap.ids, strict=True))) > len(set(prompt)):
        fix = "give a --prompt that has the name's tokens in the name alone"
        if edit.align != "average":
            fix += ", or --align average if it does"
        raise UserError(f"a token that --prompt has twice cannot have two rows: {fix}")
    other = other_ids(prompt, swap.ids)
    rows = rows_of(swap.tables, list(other.values()))
    return State(ExtraRows(swap.tables, rows, list(other)), prompt)


# --- names in token ids ---


def find_name(encoding: tiktoken.Encoding, name: str, ids: list[int]) -> tuple[list[int], int]:
    """The tokens of a name as `ids` have it, with or without a space before it, and where it first
    ends; none if they do not have it."""
    for tokens in spellings(encoding, name):
        start = find(tokens, ids)
        if start >= 0:
            return tokens, start + len(tokens)
    return [], 0


def align(target: list[int], n: int, how: str = "copy", pad: int = 0) -> list[int]:
    """Stretch or cut the tokens of a target name to the n tokens of a source name, [n]. Each token
    of the source then reads the row of the target's token at its place (STEM paper, section on
    knowledge editing). With equal lengths, the target stays as it is. Else `how` decides:

        copy     If the source is longer, the target is repeated: of AB, five tokens read BABAB.
                 If the target is longer, only its last n tokens are read.
        pad      Like copy, but in place of repeating it, the token `pad` is put in front.
        subset   Like copy, but of a longer target the n rarest tokens are read. These have the
                 largest ids, because a tokenizer merges what is frequent first and numbers its
                 merges in order. Of equal ids, the last one is taken.
        average  Every token of the source reads the mean of the target's rows, with equal lengths,
                 too. The caller makes this mean the row of an extra token, which is all of
                 `target` (tables/extra.mean_rows), and which is copied here.

    The authors choose the subset that they find most representative.
    """
    if how == "subset":
        by_rarity = sorted(range(len(target)), key=target.__getitem__)  # positions
        target = [target[position] for position in sorted(by_rarity[-n:])]
    if how == "pad":
        return ([pad] * n + target)[-n:]
    return (target * n)[-n:]


def edited_ids(
    encoding: tiktoken.Encoding,
    ids: list[int],
    source: str,
    targets: Sequence[list[int]],
    how: str = "copy",
) -> list[int]:
    """The ids to look up tables under: those of a target, aligned as by `align`, wherever
    `ids` say `source`, also within a longer name (Guinea in Equatorial Guinea). `targets`: for a
    source with a space before it, and for one without."""
    original = torch.tensor(ids)  # [T]
    edited = original
    for source_ids, target_ids in zip(spellings(encoding, source), targets, strict=True):
        aligned = align(target_ids, len(source_ids), how, encoding.eot_token)
        changed = substitute(original, source_ids, aligned)
        edited = torch.where(changed != original, changed, edited)
    return edited.tolist()


def spellings(encoding: tiktoken.Encoding, name: str) -> list[list[int]]:
    """The tokens of a name with and without a space before it. A space that is a token of its own,
    as before a Chinese name, does not belong to the name: all other words read its rows, too."""
    spaced, bare = with_and_without_space(encoding, name.strip(" "))
    return [bare if encoding.decode_bytes(spaced[:1]) == b" " else spaced, bare]


def with_and_without_space(encoding: tiktoken.Encoding, text: str) -> list[list[int]]:
    return [encoding.encode_ordinary(space + text) for space in (" ", "")]


# --- before and after ---


def continuations(
    model: Decoder,
    encoding: tiktoken.Encoding,
    edit: Edit,
    located: Located,
    states: Sequence[State],
) -> list[list[int]]:
    """What the model writes after the prompt, with each of some states. It keeps the tables of
    the last one."""
    stop = encoding.encode_single_token(END) if edit.chat else encoding.eot_token
    texts = []
    for state in states:
        model.tables = state.tables
        texts.append(continuation(model, located.prompt, state.ids, edit.max_new_tokens, stop))
    return texts


def continuation(
    model: Decoder, prompt: list[int], table_ids: list[int], n: int, stop: int
) -> list[int]:
    """What greedy decoding writes after a prompt, at most n tokens."""
    written = model.generate(  # [1, T + n]
        torch.tensor([prompt], device=model.device),
        min(n, model.config.block_size - len(prompt)),
        temperature=0,
        stop=stop,
        table_ids=torch.tensor([table_ids]),
    )
    return written[0, len(prompt) :].tolist()


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
    for answer in dict.fromkeys(map(tuple, answers)):  # each once
        p = []
        for state in states:
            model.tables = state.tables
            scores = score_answers(model, [located.prompt], [answer], [state.ids])
            p.append(scores.probability.item())
        text = shortened(encoding.decode(until_end(encoding, answer) or answer), 26)
        yield text, *p


# A sentence ends with a stop before a space, which no initial or title has ("St. John's"), or, in
# Thai and Lao, with a space alone.
SENTENCE = regex.compile(
    r"\s*.*?((?<!\s\p{Lu})(?<!\s\p{Lu}\p{Ll})[.!?؟۔](?=\s|$)|[。！？।։።။។]"
    r"|(?<=[\p{Thai}\p{Lao}])(?= )|(?=\n)|$)",
    regex.DOTALL,
)


def first_sentence(encoding: tiktoken.Encoding, tokens: list[int]) -> list[int]:
    """The tokens up to the end of a sentence, a line or the text, at least one."""
    text = until_end(encoding, tokens) or tokens[:1]
    length = SENTENCE.match(" " + encoding.decode(text, errors="ignore")).end() - 1
    for n in range(1, len(text)):
        if len(encoding.decode(text[:n], errors="ignore")) >= length:
            return text[:n]
    return text


def as_written(model: Decoder, located: Located) -> list[int]:
    """The whole answer as greedy decoding writes it: in a chat, it may open it in another way ("The
    answer is Lima." for "Lima."). Nothing, if it writes something else."""
    prompt, name, answer, _, stop, others = located
    names = [name, *others]
    if score_answers(model, [prompt], [answer]).greedy.item():
        return answer
    if stop < 0:
        return []
    reply = continuation(model, prompt, prompt, len(answer) + 16, stop)
    said, expected = (text[opening_of(model, prompt, names, text)[0] :] for text in (reply, answer))
    return reply if said == expected else []


# Why an edit may do nothing.
ONLY_LAST_LAYER = "rows in the last layer alone change no more than the token after the name"


def why_not_written(model: Decoder, encoding: tiktoken.Encoding, located: Located) -> str:
    """What may keep a model from writing the answer."""
    prompt = located.prompt[1:]  # without the leading <|endoftext|>
    if located.stop < 0:
        text = encoding.encode_ordinary(encoding.decode(prompt + located.answer))
        if text[: len(prompt)] != prompt:  # as in Chinese
            return "in texts, a token reaches from the prompt into the answer: end it elsewhere"
    if not recall.reaches_ahead(model):
        return ONLY_LAST_LAYER
    return (
        "words that it never wrote as an answer are beyond a name's rows; others may be learned "
        "with another --prompt or --write, and in place of an earlier fact with its own --prompt"
    )
