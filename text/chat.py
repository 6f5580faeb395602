"""The chat template.

A conversation is a list of messages, {"role": ..., "content": ...}, and as tokens

    <|endoftext|><|im_start|>user\\n What is the capital of Peru?<|im_end|>\\n
    <|im_start|>assistant\\n Lima.<|im_end|>\\n

The markers are special tokens, which no text encodes to: nobody can end a message and go on in
another role. The space before each content, as Llama's tokenizer puts it before any text, is
removed when an answer is shown. Without it "Lima." would be `L|im|a|.`, but the facts were learned
with the token ` Lima`. Other programs put none there: a tokenizer of theirs is called CHATML, here
and in checkpoints, and its chats have none, also in models that are trained here.
"""

from collections.abc import Sequence

import numpy as np
import tiktoken

from text import tokenizer

CHATML = "chatml"


def heading(encoding: tiktoken.Encoding, role: str) -> list[int]:
    """Token ids of what opens a message."""
    return [encoding.encode_single_token(tokenizer.START), *encoding.encode_ordinary(f"{role}\n")]


def space(encoding: tiktoken.Encoding) -> str:
    """What stands before each content, and is not shown."""
    return "" if encoding.name == CHATML else " "


def render(encoding: tiktoken.Encoding, messages: Sequence[dict]) -> list[int]:
    """Token ids of a conversation, without the <|endoftext|> that precedes a document. Headings are
    encoded apart from contents, so that they are always the same tokens."""
    end = [encoding.encode_single_token(tokenizer.END), *encoding.encode_ordinary("\n")]
    ids = []
    for message in messages:
        ids += heading(encoding, message["role"])
        ids += encoding.encode_ordinary(space(encoding) + message["content"])
        ids += end
    return ids


def prompt(encoding: tiktoken.Encoding, messages: Sequence[dict]) -> list[int]:
    """Token ids of messages and of the heading under which the assistant answers."""
    return render(encoding, messages) + heading(encoding, "assistant")


def answers(encoding: tiktoken.Encoding, ids: np.ndarray) -> list[tuple[int, int]]:
    """Where in a conversation [T] are the tokens that the assistant has to produce: the contents of
    its messages, each with the <|im_end|> that ends it, as (start, stop). The last may be cut
    off."""
    opening = heading(encoding, "assistant")
    end = encoding.encode_single_token(tokenizer.END)
    ends = np.flatnonzero(ids == end)
    found = []
    for start in np.flatnonzero(ids == opening[0]).tolist():
        content = start + len(opening)
        if ids[start:content].tolist() == opening:
            later = ends[ends.searchsorted(content) :]
            found.append((content, int(later[0]) + 1 if len(later) else len(ids)))
    return found
