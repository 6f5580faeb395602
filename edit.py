"""Change what a model knows by letting one token read another token's rows.

    python edit.py --source Spain --target Germany
    python edit.py --source Peru --target Japan --prompt "Country: Peru\\nThe main language is"
    python edit.py --source Spain --target "New Zealand" --align average
    python edit.py --report                          # all country pairs; writes edit_report.json

An edit changes no weight: where the prompt says Spain, tables are looked up under Germany's id
(`stem.substitute`). Embedding, attention and everything dense still see Spain.
"""

import itertools
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from common import UserError, atomic, check_ranges, flag, parse, pick_device, run
from model import Decoder
from stem import substitute
from tables.tables import Tables
from text import countries
from training.checkpoints import device_flag, encode, load_model, offload_flag
from training.exam import groups, score

WIDTH = 38  # of a column of text


# How a name reads the rows of one with another number of tokens, see `substitute` and `MeanRows`.
ALIGN = ("last", "first", "pad", "average")


class MeanRows(Tables):
    """Tables with made-up tokens behind the vocabulary, whose rows are means of others' rows. To
    read from: training and checkpoints want the tables themselves."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables.vocab_size, tables.width)
        self.tables, self.weight = tables, tables.weight
        self.made_up: dict[tuple[int, ...], int] = {}

    def token(self, ids: list[int]) -> int:
        """The token whose row, in every table, is the mean of the rows of `ids`."""
        return self.made_up.setdefault(tuple(ids), self.vocab_size + len(self.made_up))

    def lookup(self, ids: Tensor) -> Iterator[Tensor]:
        """As `Tables.lookup`, and made-up tokens in `ids` [B, T] are known."""
        new = ids >= self.vocab_size
        used, index = ids[new].unique(return_inverse=True)  # made-up tokens; a host-device sync
        if not len(used):
            yield from self.tables.lookup(ids)
            return
        parts_of = list(self.made_up)
        parts = [
            torch.tensor(parts_of[token - self.vocab_size], device=ids.device)
            for token in used.tolist()
        ]
        # One lookup for all: [1, n + tokens that means are made of].
        both = torch.cat([ids.masked_fill(new, 0).flatten(), *parts])[None]
        n = ids.numel()
        place = torch.arange(n, device=ids.device).view(ids.shape)  # [B, T]
        place[new] = n + index
        for rows in self.tables.lookup(both):
            rows, *others = rows[0].split([n, *map(len, parts)])  # [n, W], [len(part), W] ...
            means = torch.stack([other.mean(0) for other in others])  # [made-up tokens used, W]
            yield F.embedding(place.to(rows.device), torch.cat([rows, means]))  # [B, T, W]


@dataclass
class Edit:
    """The flags of this command."""

    ckpt: Path = flag(Path("out/ckpt.pt"), "checkpoint of train.py")
    source: str | None = flag(None, "the name whose knowledge to replace: Spain")
    target: str | None = flag(None, "the name whose rows to read instead: Germany")
    prompt: str | None = flag(None, 'text that contains the source; "\\n" is a line break')
    align: str = flag(
        "last",
        "names of different length: their ends together (a longer source repeats the target's "
        "first row, a longer target gives its last ones), their beginnings, ends with a padding "
        "token in front, or the mean of the target's rows for all of the source",
        choices=ALIGN,
    )
    max_new_tokens: int = flag(40, "tokens to write before and after", must="at least 1")
    report: bool = flag(False, "measure all pairs of countries")
    device: str = device_flag()
    offload: str = offload_flag()

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.report and (self.source or self.target or self.prompt):
            raise UserError("--report edits all pairs: leave out --source, --target and --prompt")
        if not self.report and not (self.source and self.target):
            raise UserError("give --source and --target, or --report")


def edited_ids(
    encoding: tiktoken.Encoding,
    ids: Tensor,
    source: str,
    target: str,
    align: str = "last",
    tables: MeanRows | None = None,
) -> Tensor:
    """The ids to look up tables under: `target`'s wherever `ids` say `source`, with or without a
    space before it. Equal to `ids` if they don't.

    Args:
        ids: [..., T].
        align: one of ALIGN: `average` makes up a token that all of the source's read, the others
            are `stem.substitute`'s.
        tables: for `average`, the model's, which must be MeanRows.
    """
    edited = ids
    for space in (" ", ""):
        names = [encoding.encode_ordinary(space + name) for name in (source, target)]
        how = align
        if align == "average":
            how = "last"  # which repeats a single token as often as needed
            if len(names[0]) != len(names[1]):
                names[1] = [tables.token(names[1])]
        changed = substitute(ids, *names, how, encoding.eot_token)
        edited = torch.where(changed != ids, changed, edited)
    return edited


# --------------------------------------------------------------------------------------------------
# one edit, shown


def show(model: Decoder, encoding: tiktoken.Encoding, edit: "Edit") -> None:
    prompt = edit.prompt or f"Country: {edit.source}\nThe capital city is called"
    prompt = prompt.replace("\\n", "\n")  # a shell passes the two characters on
    device = next(model.parameters()).device
    ids = torch.tensor([encode(encoding, prompt)], device=device)  # [1, T]
    if ids.shape[1] >= model.config.block_size:
        raise UserError(
            f"--prompt has {ids.shape[1]} tokens, room is {model.config.block_size - 1}"
        )
    if edit.source == edit.target:
        raise UserError(f"--source and --target are both {edit.source!r}: nothing would change")
    table_ids = edited_ids(encoding, ids, edit.source, edit.target, edit.align, model.tables)
    if edit.source not in prompt:
        raise UserError(f"--prompt {prompt!r} does not contain --source {edit.source!r}")
    if torch.equal(ids, table_ids):
        raise UserError(
            f"{edit.source!r} reads the same rows as before: as tokens it is not a word of its own "
            f"in this prompt, or a part of {edit.target!r}"
        )

    room = min(edit.max_new_tokens, model.config.block_size - ids.shape[1])

    def write(table_ids: Tensor) -> list[int]:
        options = dict(temperature=0, stop=encoding.eot_token, table_ids=table_ids)
        return model.generate(ids, room, **options)[0, ids.shape[1] :].tolist()

    with torch.inference_mode():
        logits = model(ids)[0]
        before, after = write(ids), write(table_ids)
        undone = torch.equal(logits, model(ids)[0])

    # The answer is what is written up to the end of the sentence.
    tokens = [first_sentence(encoding, written) for written in (before, after)]
    answers = [encoding.decode(answer) for answer in tokens]
    before, after = (
        encoding.decode([token for token in written if token != encoding.eot_token])
        for written in (before, after)
    )
    prompts = [ids[0].tolist()] * 2
    _, p_before, _ = score(model, prompts, tokens)
    _, p_after, _ = score(model, prompts, tokens, [table_ids[0].tolist()] * 2)

    print(f"prompt  {prompt!r}\n")
    left = ["before", "-" * WIDTH, *columns(before)]
    right = [f"after: {edit.source} reads {edit.target}'s rows", "-" * WIDTH, *columns(after)]
    for i in range(max(len(left), len(right))):
        a, b = (side[i] if i < len(side) else "" for side in (left, right))
        print(f"{a:<{WIDTH}}   {b}".rstrip())
    print()
    for answer, p, q in zip(answers, p_before.tolist(), p_after.tolist(), strict=True):
        print(f"probability of {answer.strip()!r:<28} before {p:6.1%}   after {q:6.1%}")
    print(f"undone: logits {'equal the first ones bit for bit' if undone else 'DIFFER'}")


def first_sentence(encoding: tiktoken.Encoding, written: list[int]) -> list[int]:
    """The tokens before the first with a full stop or a line break, at least one."""
    for n, token in enumerate(written):
        text = encoding.decode([token])
        if n and (token == encoding.eot_token or "." in text or "\n" in text):
            return written[:n]
    return written


def columns(text: str) -> list[str]:
    return [
        part for line in text.strip().splitlines() for part in textwrap.wrap(line, WIDTH) or [""]
    ]


# --------------------------------------------------------------------------------------------------
# all pairs, measured


def openings(
    encoding: tiktoken.Encoding, relation: str, table: list[countries.Country]
) -> tuple[list[list[int]], list[list[int]]]:
    """Held-out paragraph openings ("Country: Spain\\nIts capital is") about each country, and what
    goes on rightly, as token ids."""
    asked = [countries.questions(relation, "paragraph", country)[0] for country in table]
    prompts = [encode(encoding, question.prompt) for question in asked]
    return prompts, [encoding.encode_ordinary(question.answer) for question in asked]


def report(model: Decoder, encoding: tiktoken.Encoding) -> dict:
    """Edit every country into every other, for countries whose name is a single token.

    Pairs that share the fact (Spanish for Peru and Chile) could not fail and are left out.

    Returns:
        counts, and for each relation and overall:
        recall: share of the countries whose fact is the greedy answer before any edit.
        success: share of the pairs where the target's fact is the greedy answer after the edit.
        unchanged: share of the pairs whose edit leaves the logits of the prompt about the target,
            which does not name the source, equal to the bit.
    """
    single = [
        country
        for country in countries.table()
        if len(encoding.encode_ordinary(" " + country.name)) == 1
    ]
    relations = ("capital", "language", "region")
    if any(len({country.answer(relation) for country in single}) < 2 for relation in relations):
        raise UserError(
            "--report needs a model of the countries corpus: this tokenizer has too few country "
            f"names that are one token ({', '.join(c.name for c in single) or 'none'})"
        )
    totals = {
        relation: dict.fromkeys(("recall", "success", "unchanged"), (0, 0))
        for relation in relations
    }

    def count(relation: str, name: str, outcome: Tensor) -> None:
        hit, n = totals[relation][name]
        totals[relation][name] = (hit + int(outcome.sum()), n + len(outcome))

    bar = tqdm(total=len(relations) * len(single), unit="source", desc="editing")
    for relation in relations:
        prompts, answers = openings(encoding, relation, single)
        count(relation, "recall", score(model, prompts, answers)[0])
        nothing = [[] for _ in single]
        _, _, logits = score(model, prompts, nothing)
        for source, prompt in zip(single, prompts, strict=True):
            others = [
                i
                for i, target in enumerate(single)
                if target.answer(relation) != source.answer(relation)
            ]

            def edited(ids: list[int], target: int, source: str = source.name) -> list[int]:
                return edited_ids(encoding, torch.tensor(ids), source, single[target].name).tolist()

            greedy, _, _ = score(
                model,
                [prompt] * len(others),
                [answers[i] for i in others],
                [edited(prompt, i) for i in others],
            )
            count(relation, "success", greedy)
            # The same batch as without edit; row i under the edit of the source into country i.
            _, _, after = score(
                model, prompts, nothing, [edited(ids, i) for i, ids in enumerate(prompts)]
            )
            count(relation, "unchanged", (after == logits).flatten(1).all(1)[others])
            bar.update()
    bar.close()

    def shares(parts: list[dict]) -> dict[str, float]:
        return {
            name: sum(p[name][0] for p in parts) / sum(p[name][1] for p in parts)
            for name in ("recall", "success", "unchanged")
        }

    return {
        "countries": len(single),
        "pairs": {relation: totals[relation]["success"][1] for relation in relations},
        **shares(list(totals.values())),
        "relations": {relation: shares([totals[relation]]) for relation in relations},
    }


def report_lengths(model: Decoder, encoding: tiktoken.Encoding) -> dict:
    """Edit countries whose names have several tokens, or read the rows of one that has.

    Args:
        model: whose tables are MeanRows.

    Returns:
        for names of equal length, longer sources and longer targets: the number of pairs, and for
        each way of ALIGN the share of them where the target's capital is the greedy answer.
    """
    table = countries.table()
    length = [len(encoding.encode_ordinary(" " + country.name)) for country in table]
    prompts, answers = openings(encoding, "capital", table)
    kinds = {"equal length": [], "longer source": [], "longer target": []}
    for i, j in itertools.permutations(range(len(table)), 2):
        if table[i].answer("capital") == table[j].answer("capital") or length[i] + length[j] == 2:
            continue
        kind = "equal length"
        if length[i] != length[j]:
            kind = "longer source" if length[i] > length[j] else "longer target"
        kinds[kind].append((i, j))
    bar = tqdm(total=len(ALIGN) * sum(map(len, kinds.values())), unit="edit", desc="lengths")
    result = {}
    for kind, pairs in kinds.items():
        result[kind] = {"pairs": len(pairs)}
        for align in ALIGN:
            hits = 0
            for sources, targets in groups(encoding, pairs):
                edited = []
                for i, j in zip(sources, targets, strict=True):
                    ids, names = torch.tensor(prompts[i]), (table[i].name, table[j].name)
                    edited.append(edited_ids(encoding, ids, *names, align, model.tables).tolist())
                asked, wanted = [prompts[i] for i in sources], [answers[j] for j in targets]
                hits += int(score(model, asked, wanted, edited)[0].sum())
                bar.update(len(edited))
            result[kind][align] = hits / len(pairs) if pairs else None
    bar.close()
    return result


def main() -> None:
    args = parse(Edit, __doc__)
    model, encoding, _ = load_model(args.ckpt, pick_device(args.device), args.offload)
    if not len(model.tables.weight):
        raise UserError(f"{args.ckpt} is a {model.config.ffn} model: it has no tables to edit")
    if args.report or args.align == "average":
        model.tables = MeanRows(model.tables)
    if not args.report:
        show(model, encoding, args)
        return
    result = report(model, encoding)
    print(f"{result['countries']} countries, pairs {result['pairs']}\n")
    print(f"{'relation':<12}{'recall':>10}{'success':>10}{'unchanged':>12}")
    for name, row in [*result["relations"].items(), ("overall", result)]:
        print(f"{name:<12}{row['recall']:>10.1%}{row['success']:>10.1%}{row['unchanged']:>12.1%}")
    result["lengths"] = report_lengths(model, encoding)
    print("\n" + f"{'capital':<16}{'pairs':>8}" + "".join(f"{align:>10}" for align in ALIGN))
    for kind, row in result["lengths"].items():
        shares = (f"{row[align]:>10.1%}" if row["pairs"] else f"{'-':>10}" for align in ALIGN)
        print(f"{kind:<16}{row['pairs']:>8,}" + "".join(shares))
    path = args.ckpt.with_name("edit_report.json")
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\nwrote {path}")


if __name__ == "__main__":
    run(main)
