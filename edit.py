"""Change what a model knows about one name: all of it, or one fact.

    python edit.py --source Spain --target Germany    # Spain reads Germany's rows
    python edit.py --source Peru --target Japan --prompt "Country: Peru\\nThe main language is"
    python edit.py --source Atlantis --target Portugal        # a name that the model never saw
    python edit.py --source Spain --write "Lisbon."   # one fact: what should follow the prompt
    python edit.py --source Spain --write "Lisbon." --save out/edited/ckpt.pt
    python edit.py --undo --ckpt out/edited/ckpt.pt   # restores it bit for bit

--target changes no weight: where the prompt says Spain, tables are looked up under Germany's id
(`stem.substitute`); everything dense still sees Spain. --write trains rows for Spain's tokens
(`write_fact`), and nothing else. What --save writes has the new rows under Spain's id, and keeps
Spain's own, for --undo. A saved edit affects every use of these tokens.
"""

import os
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path

import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from common import UserError, check_ranges, flag, locked, parse, pick_device, run
from model import Decoder
from stem import substitute
from tables.tables import Tables
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
    write: str | None = flag(None, 'the text that should follow the prompt, such as "Lisbon."')
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
        if self.undo:
            fits = not (self.source or self.target or self.write)
        else:
            fits = self.source and bool(self.target) != bool(self.write)
        if not fits:
            raise UserError("give --source with either --target or --write, or give --undo alone")


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


def spelled(encoding: tiktoken.Encoding, name: str, ids: list[int]) -> list[int]:
    """The tokens of a name as `ids` have it, with or without a space before it; none if they do
    not have it."""
    for space in (" ", ""):
        tokens = encoding.encode_ordinary(space + name)
        if substitute(torch.tensor(ids), tokens, [-1]).tolist() != ids:
            return tokens
    return []


def check_names(edit: Edit) -> None:
    """UserError: the target is not a country, or the source is a misspelled one."""
    names = [country.name for country in countries.table()]
    for name_flag in ("target", "source"):
        name = getattr(edit, name_flag)
        if name is None or name in names:
            continue
        near = get_close_matches(name.title(), names, 3)
        misspelled = name.casefold() in (other.casefold() for other in near)
        if name_flag == "target" or misspelled:  # any other source may be a made-up name
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise UserError(f"--{name_flag} {name} is not one of the countries{hint}")


# --- one fact ---

STEPS, RATE = 40, 0.05  # of Adam; the rate falls to zero
KEEP = 60.0  # weight of what must not change, beside the nats of the answer
N_TEXT, TEXT_TOKENS = 64, 32  # texts that the model writes about the name
N_PART = 4  # parts of these texts, of which each step reads one
N_OTHER = 16  # other names, to find what asks for the same fact


class ExtraRows(Tables):
    """Tables with extra tokens behind the vocabulary. They begin with the rows of some tokens, and
    can be trained in their place: wherever the tables are, these do not change."""

    def __init__(self, tables: Tables, tokens: list[int]) -> None:
        super().__init__(tables.vocab_size, tables.width)
        self.tables = tables
        self.weight = tables.weight
        self.ids = [self.vocab_size + i for i in range(len(tokens))]  # those of the extra tokens
        rows = [rows[0] for rows in tables.lookup(torch.tensor([tokens]))]
        self.extra = nn.Parameter(torch.stack(rows, dim=1).float())  # [n, n_table, W]

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        is_extra = ids >= self.vocab_size  # [B, T]
        which = ids[is_extra] - self.vocab_size
        for table, rows in enumerate(self.tables.lookup(ids.masked_fill(is_extra, 0))):
            own = self.extra[which, table].to(rows.dtype)  # [n, W]
            yield rows.index_put(is_extra.nonzero(as_tuple=True), own)  # [B, T, W]


@torch.no_grad()
def ask_the_same(model: Decoder, prompt: Tensor, name: list[int], texts: Tensor) -> Tensor:
    """Where texts [N, T] ask for the fact that the prompt [T] asks for: [N, T] bool. Were they
    about another name, that name's answer to the prompt would stand there: with Norway for Spain,
    "Its capital is" asks for Oslo.

    That answer must have nine tenths of the probability, on average over some names: it has three
    quarters in "It lies in Southern", which does not ask for the region."""

    def probabilities(ids: Tensor, **options) -> Tensor:
        return model(ids, **options)[0].float().softmax(-1)  # [N, T, V]

    # Other names: the tokens in place of the name's last one with which the answer is surest.
    vocab_size = model.config.vocab_size
    tokens = range(0, vocab_size, 1 + vocab_size // 2048)  # of a large vocabulary, some
    prompts = torch.stack([substitute(prompt, name, [*name[:-1], token]) for token in tokens])
    sure, answers = probabilities(prompts, last_only=True)[:, 0].max(-1)  # [n] each
    answered = torch.zeros(texts.shape, device=model.device)
    for other in sure.topk(N_OTHER).indices.tolist():
        about_other = substitute(texts, name, [*name[:-1], tokens[other]])
        answered += probabilities(about_other)[..., answers[other]] / N_OTHER
    return answered > 0.9


@torch.no_grad()
def texts_about(model: Decoder, prompt: list[int], name: list[int]) -> Tensor:
    """What the model writes behind the prompt's beginning, up to the name: [N, T] token ids."""
    marked = substitute(torch.tensor(prompt), name, [-1]).tolist()
    begun = prompt[: marked.index(-1) + len(name)]
    n_new = min(TEXT_TOKENS, model.config.block_size - len(begun))
    return model.generate(torch.tensor([begun] * N_TEXT), n_new, seed=0)


def write_fact(
    model: Decoder, prompt: list[int], name: list[int], answer: list[int], texts: Tensor
) -> None:
    """Let `answer` follow `prompt`, in a model whose tables are ExtraRows of the tokens `name`, by
    training what of it requires gradients.

    What the texts [N, T] say of the name otherwise is to stay: their predictions are held by the KL
    divergence from those before. Where they ask for the same fact, the answer is taught, too."""
    question = torch.tensor([prompt + answer])  # [1, T]
    question_rows = substitute(question, name, model.tables.ids)
    text_rows = substitute(texts, name, model.tables.ids)  # [N, T]
    same = ask_the_same(model, torch.tensor(prompt), name, texts).cpu()  # [N, T] bool
    with torch.no_grad():
        before = model(texts)[0].float().log_softmax(-1)  # [N, T, V]
    target = torch.tensor(answer, device=model.device)  # [n]

    optimizer = torch.optim.Adam(model.parameters())
    for step in tqdm(range(STEPS), "writing", leave=False, disable=None):
        logits, _ = model(question, table_ids=question_rows)  # [1, T, V]
        predicted = logits[0, len(prompt) - 1 : -1].float()  # [n, V]
        nats = F.cross_entropy(predicted, target, reduction="sum")
        part = slice(step % N_PART, None, N_PART)
        now = model(texts[part], table_ids=text_rows[part])[0].float().log_softmax(-1)
        asked = now[same[part]][:, answer[0]]  # [m] log p of the answer's first token
        nats = nats - asked.sum() / max(1, len(asked))
        stay = ~same[part]
        change = F.kl_div(now[stay], before[part][stay], reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        (nats + KEEP * change).backward()
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        optimizer.step()


def train_rows(model: Decoder, prompt: list[int], name: list[int], answer: list[int]) -> list[int]:
    """Give the model extra rows for a name, and write a fact into them. Returns the ids under which
    to look up the prompt's rows."""
    model.requires_grad_(False)
    model.tables = ExtraRows(model.tables, name)
    write_fact(model, prompt, name, answer, texts_about(model, prompt, name))
    model.requires_grad_(False)
    return substitute(torch.tensor(prompt), name, model.tables.ids).tolist()


# --- before and after ---


def first_sentence(encoding: tiktoken.Encoding, tokens: list[int]) -> list[int]:
    """The tokens up to a full stop, a line break or the end of the text."""
    for n, token in enumerate(tokens):
        if n and re.search(r"[.\n]|<\|endoftext", encoding.decode([token])):
            return tokens[:n]
    return tokens


def apply(
    model: Decoder, encoding: tiktoken.Encoding, edit: Edit, wanted: list[int]
) -> tuple[list[int], list[int]]:
    """Make an edit; `wanted` is what --write writes. Returns the ids of the prompt, and those under
    which its rows are looked up after the edit. UserError: there is no room, or nothing would
    change."""
    prompt = edit.prompt or f"Country: {edit.source}\nThe capital city is called"
    prompt = prompt.replace("\\n", "\n")  # a shell passes the two characters on
    ids = encode(encoding, prompt)
    room = model.config.block_size - 1
    if len(ids) + len(wanted) > room:
        raise UserError(
            f"--prompt has {len(ids)} tokens, and --write {len(wanted)}, but room is {room}"
        )
    name = spelled(encoding, edit.source, ids)
    table_ids = ids
    if name and wanted:
        table_ids = train_rows(model, ids, name, wanted)
    elif name:
        table_ids = edited_ids(encoding, ids, edit.source, edit.target)
    if ids == table_ids:
        raise UserError(
            f"--prompt {prompt!r} does not contain {edit.source!r}, or it has these rows already"
        )
    return ids, table_ids


def show(
    model: Decoder,
    encoding: tiktoken.Encoding,
    edit: Edit,
    wanted: list[int],
    ids: list[int],
    table_ids: list[int],
) -> None:
    """Print what the model writes before and after an edit, side by side, and how probable the
    answers are. The arguments are those of `apply`, and what it returned."""
    # 1) what is written before and after
    prompts = torch.tensor([ids, ids], device=model.device)  # [2, T]
    n_new = min(edit.max_new_tokens, model.config.block_size - len(ids) - len(wanted))
    written = model.generate(  # [2, T + n_new]
        prompts,
        n_new,
        temperature=0,
        stop=encoding.eot_token,
        table_ids=torch.tensor([ids, table_ids]),
    )
    before, after = written[:, len(ids) :].tolist()

    # 2) side by side
    title = f"after: {edit.source} reads {edit.target}'s rows"
    if edit.write:
        title = f"after writing {edit.write!r}"
    print(f"prompt  {encoding.decode(ids[1:])!r}\n")  # without the leading <|endoftext|>
    columns = (column(encoding, "before", before), column(encoding, title, after))
    for left, right in zip_longest(*columns, fillvalue=""):
        print(f"{left:<{WIDTH}}   {right}".rstrip())
    print()

    # 3) how probable the answers are, before and after
    answers = []
    for text in (before, wanted or before, after):
        answer = first_sentence(encoding, text)
        if answer not in answers:
            answers.append(answer)
    for answer in answers:
        p = score_answers(model, [ids, ids], [answer, answer], [ids, table_ids]).probability
        text = textwrap.shorten(encoding.decode(answer), 26)
        print(f"probability of {text!r:<28} before {p[0]:6.1%}   after {p[1]:6.1%}")
    if after[: len(wanted)] != wanted[:n_new]:
        print("not learned: rows choose among words that the model writes; is this a new one?")


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
    # Text of one's own may have other names, also with the preset of a model that it continues.
    corpora = {meta["corpus"] for meta in checkpoint.get("data", [])}
    if checkpoint.get("args", {}).get("preset") == "countries" and "files" not in corpora:
        check_names(edit)
    wanted = encoding.encode_ordinary(f" {edit.write}") if edit.write else []
    prompt, table_prompt = apply(model, encoding, edit, wanted)
    show(model, encoding, edit, wanted, prompt, table_prompt)
    if path is None:
        return
    # Only the spelling of the prompt is saved: without the space, "Spain" may be pieces that many
    # other words share.
    pairs = {(own, other) for own, other in zip(prompt, table_prompt, strict=True) if own != other}
    ids, others = torch.tensor(sorted(pairs)).unbind(1)  # [n] each
    if len(ids.unique()) < len(ids):
        raise UserError(f"--save: a token that {edit.source!r} has twice cannot have two rows")
    own_rows = [rows[0].cpu() for rows in model.tables.lookup(ids[None])]  # [n, W] of each table
    new_rows = [rows[0].cpu() for rows in model.tables.lookup(others[None])]
    checkpoint = load_checkpoint(edit.ckpt, verify=True)  # what is written gets new checksums
    checkpoint.setdefault("edits", []).append({"ids": ids, "rows": own_rows})
    replace_rows(checkpoint, ids, new_rows)
    write_checkpoint(path, checkpoint)
    changed = ids.tolist()
    pieces = [encoding.decode([token]) for token in changed]
    readers = []
    for country in countries.table():
        if set(changed) & set(encoding.encode_ordinary(f" {country.name}")):
            readers.append(country.name)
    print(f"changed the rows of {pieces}")
    if readers:
        print(f"these countries read them: {', '.join(readers)}")


def main() -> None:
    edit = parse(Edit, __doc__)
    path = edit.save or (edit.ckpt if edit.undo else None)
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
