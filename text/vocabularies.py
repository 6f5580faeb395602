"""Vocabularies of other programs, with what this project needs."""

import tiktoken

from text import tokenizer


def complete(encoding: tiktoken.Encoding) -> tiktoken.Encoding:
    """Any encoding with the special tokens of `tokenizer.SPECIALS`, after its last id if it lacks
    them, and a name for each id without a token, so that whatever a model samples can be shown. No
    other id changes."""
    ranks = encoding._mergeable_ranks
    special_tokens = dict(encoding._special_tokens)
    n = encoding.n_vocab
    for name in tokenizer.SPECIALS:
        if name not in special_tokens:
            special_tokens[name] = n
            n += 1
    name_unused(ranks, special_tokens, n)
    return tokenizer.make_encoding(encoding.name, encoding._pat_str, ranks, special_tokens)


def name_unused(ranks: dict[bytes, int], special_tokens: dict[str, int], n: int) -> None:
    """Add a special token for each of the ids below n that has no token."""
    for i in sorted({*range(n)} - {*ranks.values(), *special_tokens.values()}):
        special_tokens[f"<|unused_{i}|>"] = i
