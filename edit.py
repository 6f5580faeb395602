"""Change what a model knows about one name: all of it, or one fact.

    python edit.py --source Spain --target Germany    # Spain reads Germany's rows
    python edit.py --source Peru --target Japan --prompt "Country: Peru\\nThe main language is"
    python edit.py --source Atlantis --target Portugal        # a name that the model never saw
    python edit.py --source Spain --write "Toledo."   # one fact: what should follow the prompt
    python edit.py --source Spain --write "Toledo." --save out/edited/ckpt.pt
    python edit.py --undo --ckpt out/edited/ckpt.pt  # restores it bit for bit

--target changes no weight: where the prompt says Spain, tables are looked up under Germany's id
(`stem.substitute`); everything dense still sees Spain. --write trains rows for Spain alone
(`write_fact`), and nothing else. What --save writes has the new rows under Spain's id, and keeps
Spain's own, for --undo. That affects every use of these tokens.
"""

import os
import re
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common import UserError, check_ranges, flag, locked, parse, pick_device, run
from model import Decoder
from stem import substitute
from tables.tables import Tables
from text import countries
from text.tokenizer import encode
from training.checkpoints import load_checkpoint, load_model, write_checkpoint
from training.questions import pad_together, score_answers
from training.settings import decoding_dtype_flag, device_flag, offload_flag

WIDTH = 38  # of a column of text


@dataclass
class Edit:
    ckpt: Path = flag(Path("out/ckpt.pt"), "checkpoint of train.py")
    source: str | None = flag(None, "the name to edit, such as Spain")
    target: str | None = flag(None, "the name whose rows to read instead, such as Germany")
    prompt: str | None = flag(None, 'text that contains the source; "\\n" is a line break')
    write: str | None = flag(None, 'the fact to write: what should follow, such as "Toledo."')
    max_new_tokens: int = flag(40, "tokens to write before and after", must="at least 1")
    save: Path | None = flag(None, "write the edited checkpoint to this file, --ckpt or a new one")
    undo: bool = flag(False, "remove the last edit from --ckpt, in place or into --save")
    device: str = device_flag()
    offload: str = offload_flag()
    dtype: str = decoding_dtype_flag()

    def __post_init__(self) -> None:
        check_ranges(self)
        changes = [self.target is not None, self.write is not None, self.undo]
        if sum(changes) != 1 or (self.source is None) != self.undo:
            raise UserError("give --source with either --target or --write, or --undo")


# --- which rows are read instead ---


class ExtraRows(Tables):
    """Read-only tables with extra tokens behind the vocabulary. They stand in for some tokens, have
    copies of their rows, and can be trained without them."""

    def __init__(self, tables: Tables, tokens: list[int]) -> None:
        super().__init__(tables.vocab_size, tables.width)
        self.tables = tables
        self.weight = tables.weight
        self.tokens = tokens
        rows = [of_table[0] for of_table in tables.lookup(torch.tensor([tokens]))]
        self.extra = torch.stack(rows, dim=1).float()  # [n, n_table, W]

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        is_extra = ids >= self.vocab_size
        known = ids.masked_fill(is_extra, 0)
        for table, rows in enumerate(self.tables.lookup(known)):  # [B, T, W]
            if is_extra.any():
                own = self.extra[ids[is_extra] - self.vocab_size, table]  # [n, W]
                rows = rows.index_put((is_extra.to(rows.device),), own.to(rows.dtype))
            yield rows


def edited_ids(
    encoding: tiktoken.Encoding, ids: list[int], source: str, target: str | ExtraRows
) -> list[int]:
    """The ids to look up tables under wherever `ids` say `source`, with or without a space before
    it: those of the name `target`, or those that stand in for the source's own."""
    original = torch.tensor(ids)  # [T]
    edited = original
    for space in (" ", ""):
        source_ids = encoding.encode_ordinary(space + source)
        if isinstance(target, str):
            other_ids = encoding.encode_ordinary(space + target)
        else:
            other_ids = [target.vocab_size + target.tokens.index(token) for token in source_ids]
        changed = substitute(original, source_ids, other_ids)
        edited = torch.where(changed != original, changed, edited)
    return edited.tolist()


def own_rows(tables: Tables, encoding: tiktoken.Encoding, source: str) -> ExtraRows:
    """Tables with extra tokens that stand in for those of a name."""
    tokens = encoding.encode_ordinary(f" {source}") + encoding.encode_ordinary(source)
    return ExtraRows(tables, sorted(set(tokens)))


def check_names(edit: Edit) -> None:
    """UserError: the target is not a country, or the source is a misspelled one."""
    names = [country.name for country in countries.table()]
    for name_flag, name in (("target", edit.target), ("source", edit.source)):
        if name is None or name in names:
            continue
        near = get_close_matches(name.title(), names, 3)
        misspelled = name.casefold() in (other.casefold() for other in near)
        if name_flag == "target" or misspelled:  # any other source may be a made-up name
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise UserError(f"--{name_flag} {name} is not one of the countries{hint}")


# --- one fact ---

STEPS = 50  # at most
ENOUGH = 0.15  # loss at which to stop: the answer has 86 % of the probability or more
KEEP = 40.0  # weight of what must not change
N_TEXT, TEXT_TOKENS = 16, 24  # texts that the model writes about the name
ALIKE = 0.83  # overlap of what can follow two texts that ask for the same


class Lesson(NamedTuple):
    """Texts with the answer to learn, and texts whose predictions must stay as they were."""

    ids: Tensor  # [N, T]
    targets: Tensor  # [N, T]: the next token, where it is one of the answer; else -1
    kept: Tensor  # [N, T] bool: where the next token is to be predicted as before


@torch.no_grad()
def make_lesson(
    model: Decoder, encoding: tiktoken.Encoding, source: str, prompt: str, answer: str
) -> Lesson:
    """The prompt with its answer, and what the model writes behind the prompt's beginning, up to
    the name. Where such a text comes to the same question, the answer is to follow, too."""
    stop = encoding.eot_token
    prompt_ids = encode(encoding, prompt)
    answer_ids = encoding.encode_ordinary(f" {answer}")
    logits, _ = model(torch.tensor([prompt_ids], device=model.device), last_only=True)  # [1, 1, V]
    old = logits.argmax()  # the first token of the old answer

    def without_old(logits: Tensor) -> Tensor:
        return logits.index_fill(-1, old, -torch.inf).softmax(-1)

    about = encode(encoding, prompt[: prompt.index(source) + len(source)])
    n = len(about)
    room = model.config.block_size - n - len(answer_ids)
    begun = torch.tensor([about] * N_TEXT, device=model.device)
    texts = model.generate(begun, min(TEXT_TOKENS, room), stop=stop, seed=0)  # [N_TEXT, n + T]
    # The same question: the old answer comes next, and if not, then what else might follow the
    # prompt. For "Its demonym is Spanish" these are demonyms, not languages. (Overlap of both
    # distributions: the Bhattacharyya coefficient.)
    predicted, _ = model(texts)  # [N_TEXT, n + T, V]
    overlap = (without_old(predicted) * without_old(logits)).sqrt().sum(-1)  # [N_TEXT, n + T]
    same = (predicted.argmax(-1) == old) & (overlap > ALIKE)
    taught = [prompt_ids]  # texts that the answer follows
    kept = []  # of each text, whether the next token is to be predicted as before
    for text, is_same in zip(texts.tolist(), same.tolist(), strict=True):
        places = [False] * (n - 1)
        for i in range(n - 1, len(text)):
            # Behind a capital letter it is another name: "Asia" in "Western Asia".
            asks = is_same[i] and not encoding.decode([text[i]]).strip()[:1].isupper()
            if asks and text[: i + 1] not in taught:
                taught.append(text[: i + 1])
            places.append(not asks and text[i] != stop)  # nothing follows the end
        kept.append(places)

    ids = pad_together(taught + texts.tolist(), [answer_ids] * len(taught) + [[]] * N_TEXT)
    targets = torch.full_like(ids, -1)
    for row, text in zip(targets, taught, strict=False):
        row[len(text) - 1 :][: len(answer_ids)] = torch.tensor(answer_ids)
    is_kept = torch.zeros_like(ids, dtype=torch.bool)
    is_kept[len(taught) :, : texts.shape[1]] = torch.tensor(kept)
    return Lesson(ids, targets, is_kept)


def learn(
    model: Decoder,
    lesson: Lesson,
    table_ids: Tensor,
    optimizer: torch.optim.Optimizer,
    most: int,
) -> None:
    """Take up to `most` steps. The loss is the mean -log p of the answers, and the divergence of
    other predictions from what they were before the first step."""
    ids, targets, kept = (part.to(model.device) for part in lesson)
    is_answer = targets >= 0
    n_answer = is_answer.any(1).sum()

    def log_p(x: Tensor) -> Tensor:  # [n, n_embd] -> [n, V]
        return F.log_softmax(F.linear(x, model.head_weight).float(), dim=-1)

    def loss() -> Tensor:
        optimizer.zero_grad()
        x = model.hidden(ids, table_ids=table_ids)  # [N, T, n_embd]
        nats = F.nll_loss(log_p(x[is_answer]), targets[is_answer], reduction="sum") / n_answer
        change = F.kl_div(log_p(x[kept]), before, reduction="batchmean", log_target=True)
        total = nats + KEEP * change
        total.backward()
        return total

    with torch.no_grad():
        before = log_p(model.hidden(ids, table_ids=table_ids)[kept])  # [n, V]
    for _ in tqdm(range(most), "writing", leave=False, disable=None):
        if optimizer.step(loss) < ENOUGH:  # before the step
            return


def write_fact(
    model: Decoder, encoding: tiktoken.Encoding, source: str, prompt: str, answer: str
) -> None:
    """Let the answer follow the prompt by training nothing but the extra rows of a model whose
    tables are those of `own_rows`."""
    lesson = make_lesson(model, encoding, source, prompt, answer)
    texts = lesson.ids.tolist()
    table_ids = [edited_ids(encoding, text, source, model.tables) for text in texts]
    model.requires_grad_(False)
    rows = model.tables.extra.requires_grad_()
    # Few unknowns and no noise: L-BFGS needs fewer steps than Adam. It takes five at a time.
    optimizer = torch.optim.LBFGS([rows], max_iter=5, line_search_fn="strong_wolfe")
    learn(model, lesson, torch.tensor(table_ids), optimizer, STEPS // 5)
    rows.requires_grad_(False)


# --- before and after ---


def first_sentence(encoding: tiktoken.Encoding, tokens: list[int]) -> list[int]:
    """The tokens up to a full stop, a line break or the end of the text."""
    for n, token in enumerate(tokens):
        if n and re.search(r"[.\n]|<\|endoftext", encoding.decode([token])):
            return tokens[:n]
    return tokens


def show(model: Decoder, encoding: tiktoken.Encoding, edit: Edit) -> dict[int, int]:
    """Print what the model writes before and after an edit, side by side. Returns, for each
    token of the prompt that reads another's rows, that other token."""
    # 1) the ids that are embedded, those under which rows are looked up, and the rows
    prompt = edit.prompt or f"Country: {edit.source}\nThe capital city is called"
    prompt = prompt.replace("\\n", "\n")  # a shell passes the two characters on
    ids = encode(encoding, prompt)
    room = model.config.block_size - len(ids)
    if room < 1:
        raise UserError(f"--prompt has {len(ids)} tokens, room is {model.config.block_size - 1}")
    target = edit.target
    title = f"after: {edit.source} reads {edit.target}'s rows"
    if edit.write is not None:
        model.tables = target = own_rows(model.tables, encoding, edit.source)
        title = f"after writing {edit.write!r}"
    table_ids = edited_ids(encoding, ids, edit.source, target)
    if ids == table_ids:
        raise UserError(f"--prompt {prompt!r} does not contain {edit.source!r}")
    wanted = []
    if edit.write is not None:
        wanted.append(encoding.encode_ordinary(f" {edit.write}"))
        score_answers(model, [ids], wanted)  # a UserError if it does not fit behind the prompt
        start = time.perf_counter()
        write_fact(model, encoding, edit.source, prompt, edit.write)
        print(f"wrote it in {time.perf_counter() - start:.1f} s")

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
    right = column(encoding, title, after)
    for left_line, right_line in zip_longest(left, right, fillvalue=""):
        print(f"{left_line:<{WIDTH}}   {right_line}".rstrip())
    print()

    # 4) how probable the answers are, before and after
    answers = []
    for text in (before, *wanted, after):
        if first_sentence(encoding, text) not in answers:
            answers.append(first_sentence(encoding, text))
    for answer in answers:
        p = score_answers(model, [ids, ids], [answer, answer], [ids, table_ids]).probability
        text = textwrap.shorten(encoding.decode(answer), 26, placeholder="...")
        print(f"probability of {text!r:<28} before {p[0]:6.1%}   after {p[1]:6.1%}")
    return {own: other for own, other in zip(ids, table_ids, strict=True) if own != other}


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
    if not len(model.tables.weight):
        raise UserError(f"--ckpt {edit.ckpt} is a model that has no tables to edit")
    if checkpoint.get("args", {}).get("preset") == "countries":
        check_names(edit)
    instead = show(model, encoding, edit)
    if path is None:
        return
    # Only the spelling of the prompt is saved: without the space, "Spain" may be pieces that many
    # other words share.
    ids = torch.tensor(list(instead))
    others = torch.tensor(list(instead.values()))
    own_rows = [rows[0].cpu() for rows in model.tables.lookup(ids[None])]  # [n, W] of each table
    new_rows = [rows[0].cpu() for rows in model.tables.lookup(others[None])]
    checkpoint = load_checkpoint(edit.ckpt, verify=True)  # what is written gets new checksums
    checkpoint.setdefault("edits", []).append({"ids": ids, "rows": own_rows})
    replace_rows(checkpoint, ids, new_rows)
    write_checkpoint(path, checkpoint)
    pieces = [encoding.decode([token]) for token in instead]
    shared = []  # names of other countries that have one of them
    for country in countries.table():
        tokens = encoding.encode_ordinary(f" {country.name}")
        if country.name != edit.source and not instead.keys().isdisjoint(tokens):
            shared.append(country.name)
    about = f", which {', '.join(shared)} read, too" if shared else ""
    print(f"changed the rows of {pieces}{about}")


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
