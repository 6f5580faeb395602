"""Change what a model knows by letting one token read another token's rows.

    python edit.py --source Spain --target Germany
    python edit.py --source Peru --target Japan --prompt "Country: Peru\\nThe main language is"
    python edit.py --source Spain --target "New Zealand" --align average
    python edit.py --inject Atlantis=Portugal        # a name that the model never saw
    python edit.py --source Spain --target Germany --save out/edited/ckpt.pt
    python edit.py --undo --ckpt out/edited/ckpt.pt  # to the bit what it was before
    python edit.py --report                          # all country pairs; writes edit_report.json

An edit changes no weight: where the prompt says Spain, tables are looked up under Germany's id
(`stem.substitute`). Embedding, attention and everything dense still see Spain. What --save writes
has Germany's rows under Spain's id instead, and keeps Spain's, for --undo.
"""

import itertools
import json
import random
import re
import textwrap
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import tiktoken
import torch
from torch import Tensor
from tqdm import tqdm

from common import UserError, atomic, check_ranges, flag, locked, parse, pick_device, run
from model import Decoder
from stem import substitute
from tables.tables import Tables
from text import countries
from text.tokenizer import encode
from training.checkpoints import (
    device_flag,
    load_checkpoint,
    load_model,
    offload_flag,
    write_checkpoint,
)
from training.exam import groups, score_answers
from training.records import check_picture, plt, save_figure

WIDTH = 38  # of a column of text
# How a name reads the rows of one with another number of tokens, see `substitute` and `MeanRows`.
ALIGN = ("last", "first", "pad", "average")
# Names that no country has, of one to seven tokens of the countries corpus.
INVENTED = ("Atlantis", "Narnia", "Wakanda", "Genovia", "Ruritania", "Gondor", "Mordor", "Oz")
INVENTED += ("Utopia", "Lilliput", "Krakozhia", "Sokovia", "Panem", "Oceania", "Eurasia")


class MeanRows(Tables):
    """Tables with made-up tokens behind the vocabulary, whose rows are means of others' rows. To
    read from: training and checkpoints want the tables themselves."""

    def __init__(self, tables: Tables) -> None:
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
    inject: str | None = flag(None, "a made-up name, to be like a known one: Atlantis=Portugal")
    prompt: str | None = flag(None, 'text that contains the source; "\\n" is a line break')
    align: str = flag(
        "last",
        "names of different length: their ends together (a longer source repeats the target's "
        "first row, a longer target gives its last ones), their beginnings, ends with a padding "
        "token in front, or the mean of the target's rows for all of the source",
        choices=ALIGN,
    )
    max_new_tokens: int = flag(40, "tokens to write before and after", must="at least 1")
    save: Path | None = flag(None, "write the edited checkpoint to this file, --ckpt or a new one")
    undo: bool = flag(False, "take the last edit saved in --ckpt out of it, there or in --save")
    plot: Path | None = flag(None, "draw what the next token may be before and after: a .png, .svg")
    report: bool = flag(False, "measure all pairs of countries")
    device: str = device_flag()
    offload: str = offload_flag()

    def __post_init__(self) -> None:
        check_ranges(self)
        names = ["source", "target"]
        shown = [*names, "inject", "prompt", "plot"]
        apart = {"inject": names, "undo": shown, "report": [*shown, "save", "undo"]}
        for given in filter(partial(getattr, self), apart):
            if others := [f"--{name}" for name in apart[given] if getattr(self, name)]:
                raise UserError(f"with --{given} leave out {', '.join(others)}")
        if self.inject:
            self.source, _, self.target = map(str.strip, self.inject.partition("="))
        check_picture(self.plot)
        if not (self.report or self.undo or (self.source and self.target)):
            raise UserError("give --source and --target, --inject NAME=KNOWN, --undo, or --report")


def edited_ids(
    encoding: tiktoken.Encoding,
    ids: list[int],
    source: str,
    target: str,
    align: str = "last",
    tables: MeanRows | None = None,
) -> list[int]:
    """The ids to look up tables under: `target`'s wherever `ids` say `source`, with or without a
    space before it. `align` is one of ALIGN; for `average`, `tables` are the model's."""
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
    """One edit: what the model writes before and after it, side by side. Returns the tokens of the
    prompt that read another's rows, and whose."""
    prompt = edit.prompt or f"Country: {edit.source}\nThe capital city is called"
    prompt = prompt.replace("\\n", "\n")  # a shell passes the two characters on
    ids = encode(encoding, prompt)
    room = model.config.block_size - len(ids)
    if room < 1:
        raise UserError(f"--prompt has {len(ids)} tokens, room is {model.config.block_size - 1}")
    table_ids = edited_ids(encoding, ids, edit.source, edit.target, edit.align, model.tables)
    if ids == table_ids:
        raise UserError(
            f"--prompt {prompt!r} does not contain --source {edit.source!r} as a word of its own, "
            f"or as a part of {edit.target!r} it reads the same rows as before"
        )

    given = torch.tensor([ids, ids], device=model.device)  # [2, T]
    logits = model(given)[0]
    options = dict(temperature=0, stop=encoding.eot_token)
    options["table_ids"] = torch.tensor([ids, table_ids])
    written = model.generate(given, min(edit.max_new_tokens, room), **options)[:, len(ids) :]
    undone = torch.equal(logits, model(given)[0])

    sides, answers = [], []
    titles = ("before", f"after: {edit.source} reads {edit.target}'s rows")
    for title, tokens in zip(titles, written.tolist(), strict=True):
        said = [token for token in tokens if token != encoding.eot_token]
        # The answer is what is written up to the end of the sentence, at least one token.
        ends = [n for n, token in enumerate(said) if re.search(r"[.\n]", encoding.decode([token]))]
        end = next(filter(None, ends), None)
        answers.append(said[:end] or tokens[:1])
        lines = encoding.decode(said).strip().splitlines()
        column = [part for line in lines for part in textwrap.wrap(line, WIDTH) or [""]]
        sides.append([title, "-" * WIDTH, *column])
    rows = [ids, ids, table_ids, table_ids]
    before, after = score_answers(model, [ids] * 4, answers * 2, rows)[1].view(2, 2).tolist()

    print(f"prompt  {prompt!r}\n")
    for left, right in itertools.zip_longest(*sides, fillvalue=""):
        print(f"{left:<{WIDTH}}   {right}".rstrip())
    print()
    for answer, p, q in zip(answers, before, after, strict=True):
        said = encoding.decode(answer).strip()
        print(f"probability of {said!r:<28} before {p:6.1%}   after {q:6.1%}")
    print(f"undone: logits {'equal the first ones bit for bit' if undone else 'DIFFER'}")
    if edit.plot:
        after = model(given, table_ids=options["table_ids"])[0]
        plot(edit.plot, encoding, prompt, titles, after[:, -1].detach().float().softmax(-1).cpu())
    return {token: other for token, other in zip(ids, table_ids, strict=True) if token != other}


def plot(
    path: Path, encoding: tiktoken.Encoding, prompt: str, titles: tuple[str, str], p: Tensor
) -> None:
    """Draw as bars the probabilities [2, V] of the most probable next tokens, before and after."""
    best = p.amax(0).topk(10).indices
    rows = range(len(best))
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for side, title in enumerate(titles):
        places = [row + 0.4 * side for row in rows]
        axes.barh(places, p[side, best].tolist(), height=0.4, label=title)
    names = [repr(encoding.decode([token])) for token in best.tolist()]
    axes.set_yticks([row + 0.2 for row in rows], names, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("probability of the next token")
    axes.set_title(repr(prompt), parse_math=False, fontsize="medium", wrap=True)
    for text in axes.legend().get_texts():
        text.set_parse_math(False)  # a $ in a name is no formula
    save_figure(figure, path)
    print(f"wrote {path}")


def save(
    tables: MeanRows,
    encoding: tiktoken.Encoding,
    checkpoint: dict,
    edit: Edit,
    instead: dict[int, int],
) -> None:
    """Write the checkpoint with the rows that tokens read `instead` of theirs as their own, and a
    record of the rows they had. As the prompt spells the name, and no other way: "Spain" without a
    space before it may be pieces of which many other words are made."""
    ids = torch.tensor([list(instead), list(instead.values())])  # [2, n]
    old, new = zip(*(rows.cpu().unbind() for rows in tables.lookup(ids)), strict=True)
    record = dict(source=edit.source, target=edit.target, ids=ids[0].clone())
    record["rows"] = [rows.clone() for rows in old]  # [n, W] of each table
    checkpoint["edits"] = [*checkpoint.get("edits", []), record]
    write_rows(edit, checkpoint, ids[0], list(new))
    tokens = ", ".join(repr(encoding.decode([token])) for token in instead)
    print(f"wrote {edit.save}: other rows for {tokens}, in every text that has these tokens")


def undo(edit: Edit) -> None:
    """Write the checkpoint with the rows that its last edit replaced."""
    checkpoint = load_checkpoint(edit.ckpt)
    if not checkpoint.get("edits"):
        raise UserError(f"{edit.ckpt} holds no edit to undo: it takes one written with --save")
    *checkpoint["edits"], last = checkpoint["edits"]
    write_rows(edit, checkpoint, last["ids"], last["rows"])
    names = f"{last['source']} has its own rows again, not {last['target']}'s"
    print(f"wrote {edit.save or edit.ckpt}: {names}")


def write_rows(edit: Edit, checkpoint: dict, ids: Tensor, rows: list[Tensor]) -> None:
    """Write the checkpoint with other `rows` [n, W] of tokens `ids` [n] in each table. UserError:
    another checkpoint would be lost."""
    path = edit.save or edit.ckpt
    if path.exists() and not path.samefile(edit.ckpt):
        raise UserError(f"--save {path} exists: choose another name, or {edit.ckpt} itself")
    for table, new in enumerate(rows):  # mapped from files: what changes is this process's own
        checkpoint["model"][f"tables.weight.{table}"][ids] = new
    with locked(path.parent):
        write_checkpoint(path, checkpoint)


# A country's name, its length in tokens, and as token ids a question about it with its answer.
Asked = namedtuple("Asked", ("name", "length", "prompt", "answer"))


def openings(
    encoding: tiktoken.Encoding, relation: str, table: list[countries.Country] | None = None
) -> list[Asked]:
    """About each country a held-out opening of a paragraph: "Country: Spain\\nIts capital is"."""
    asked, plain = [], encoding.encode_ordinary
    for country in table or countries.table():
        question = countries.questions(relation, "paragraph", country)[0]
        ids = (encode(encoding, question.prompt), plain(question.answer))
        asked.append(Asked(country.name, len(plain(f" {country.name}")), *ids))
    return asked


def successes(
    model: Decoder,
    encoding: tiktoken.Encoding,
    pairs: list[tuple[Asked, Asked]],
    align: str = "last",
) -> list[bool]:
    """For each pair of source and target: does the model, asked about the source, greedily answer
    with the target's fact after the edit?"""
    hits, parts = [], list(groups(encoding, pairs))
    for sources, targets in tqdm(parts, desc=f"success, {align}", leave=False, disable=None):
        edited = [
            edited_ids(encoding, source.prompt, source.name, target.name, align, model.tables)
            for source, target in zip(sources, targets, strict=True)
        ]
        prompts, wanted = [one.prompt for one in sources], [one.answer for one in targets]
        hits += score_answers(model, prompts, wanted, edited)[0].tolist()
    return hits


def subsample(pairs: list[tuple], most: int | None) -> list[tuple]:
    """At most so many of them, random ones, but always the same."""
    return random.Random(0).sample(pairs, most) if most and most < len(pairs) else pairs


def report(model: Decoder, encoding: tiktoken.Encoding, most: int | None = None) -> dict:
    """All figures of edits; `model.tables` are MeanRows. most: look at so many pairs of each sort;
    None: at all of them.

    Returns:
        those of `report_pairs`; as `lengths` those of `report_lengths`, as `injected` those of
        `report_injected`.
    """
    return {
        **report_pairs(model, encoding, most),
        "lengths": report_lengths(model, encoding, most),
        "injected": report_injected(model, encoding, most),
    }


def report_pairs(model: Decoder, encoding: tiktoken.Encoding, most: int | None = None) -> dict:
    """Edit every country into every other, for countries whose name is a single token.

    Pairs that share the fact (Spanish for Peru and Chile) could not fail and are left out.

    Returns:
        counts, and for each relation and overall:
        recall: share of the countries whose fact is the greedy answer before any edit.
        success: share of the pairs where the target's fact is the greedy answer after the edit.
        unchanged: share of the pairs whose edit changes no id under which the prompt about the
            target, which does not name the source, reads rows: its logits are equal to the bit.
    """
    found = {}
    for relation in ("capital", "language", "region"):
        single = [one for one in openings(encoding, relation) if one.length == 1]
        pairs = [(a, b) for a, b in itertools.permutations(single, 2) if a.answer != b.answer]
        pairs = subsample(pairs, most)
        if not pairs:
            raise UserError(
                "--report needs a model of the countries corpus: this tokenizer has too few "
                f"country names that are one token ({', '.join(c.name for c in single) or 'none'})"
            )
        found[relation] = dict(
            recall=successes(model, encoding, [(one, one) for one in single]),
            success=successes(model, encoding, pairs),
            unchanged=[
                edited_ids(encoding, other.prompt, source.name, other.name) == other.prompt
                for source, other in pairs
            ],
        )

    def shares(*parts: dict[str, list[bool]]) -> dict[str, float]:
        return {name: fmean(hit for part in parts for hit in part[name]) for name in parts[0]}

    return {
        "countries": len(single),
        "pairs": {relation: len(part["success"]) for relation, part in found.items()},
        **shares(*found.values()),
        "relations": {relation: shares(part) for relation, part in found.items()},
    }


def report_lengths(model: Decoder, encoding: tiktoken.Encoding, most: int | None = None) -> dict:
    """Edit countries whose names have several tokens, or read the rows of one that has: for names
    of equal length, longer sources and longer targets the number of pairs, and for each way of
    ALIGN the share of them where the target's capital is the greedy answer."""
    kinds = {"equal length": [], "longer source": [], "longer target": []}
    for source, target in itertools.permutations(openings(encoding, "capital"), 2):
        a, b = source.length, target.length
        kind = "equal length" if a == b else "longer source" if a > b else "longer target"
        if source.answer != target.answer and a + b > 2:
            kinds[kind].append((source, target))
    kinds = {kind: subsample(pairs, most) for kind, pairs in kinds.items()}
    result = {kind: {"pairs": len(pairs)} for kind, pairs in kinds.items()}
    for (kind, pairs), align in itertools.product(kinds.items(), ALIGN):
        hits = successes(model, encoding, pairs, align)
        result[kind][align] = fmean(hits) if hits else None
    return result


def report_injected(
    model: Decoder, encoding: tiktoken.Encoding, most: int | None = None
) -> dict[str, float]:
    """Give names that no country has the rows of every country: for each relation the share of
    pairs where the country's fact is the greedy answer about the name."""
    made_up = [replace(countries.table()[0], name=name) for name in INVENTED]
    shares = {}
    for relation in ("capital", "language", "region"):
        names, known = openings(encoding, relation, made_up), openings(encoding, relation)
        pairs = subsample(list(itertools.product(names, known)), most)
        shares[relation] = fmean(successes(model, encoding, pairs))
    return shares


def main() -> None:
    args = parse(Edit, __doc__)
    if args.undo:
        undo(args)
        return
    model, encoding, checkpoint = load_model(args.ckpt, pick_device(args.device), args.offload)
    if not len(model.tables.weight):
        raise UserError(f"{args.ckpt} is a {model.config.ffn} model: it has no tables to edit")
    model.tables = MeanRows(model.tables)
    if not args.report:
        instead = show(model, encoding, args)
        if args.save:
            save(model.tables, encoding, checkpoint, args, instead)
        return
    result = report(model, encoding)
    print(f"{result['countries']} countries, pairs {result['pairs']}\n")
    print(f"{'relation':<12}{'recall':>10}{'success':>10}{'unchanged':>12}")
    for name, row in [*result["relations"].items(), ("overall", result)]:
        print(f"{name:<12}{row['recall']:>10.1%}{row['success']:>10.1%}{row['unchanged']:>12.1%}")
    print("\n" + f"{'capital':<16}{'pairs':>8}" + "".join(f"{align:>10}" for align in ALIGN))
    for kind, row in result["lengths"].items():
        shares = (f"{row[align]:>10.1%}" if row["pairs"] else f"{'-':>10}" for align in ALIGN)
        print(f"{kind:<16}{row['pairs']:>8,}" + "".join(shares))
    shares = ", ".join(f"{name} {share:.1%}" for name, share in result["injected"].items())
    print(f"\n{len(INVENTED)} made-up names that read a country's rows: {shares}")
    path = args.ckpt.with_name("edit_report.json")
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\nwrote {path}")


if __name__ == "__main__":
    run(main)
