"""The chat template: conversations as tokens, and which of those tokens are the assistant's.

    <|endoftext|><|im_start|>user\\nWhat is the capital of Peru?<|im_end|>\\n
    <|im_start|>assistant\\nLima.<|im_end|>\\n

A conversation is a list of messages, {"role": ..., "content": ...}. The markers are special tokens,
which no text encodes to: nobody can end a message and go on in another role.

A space is put before each content, as Llama's tokenizer does with any text, and removed when an
answer is shown. Otherwise a message would begin with other tokens than the same words in a text:
"Lima." is `L|im|a|.`, but the facts were learned with the token ` Lima`.
"""

from collections.abc import Sequence

import numpy as np
import tiktoken

START, END = "<|im_start|>", "<|im_end|>"


def special(encoding: tiktoken.Encoding, marker: str) -> int:
    """The id of a marker. ValueError: the tokenizer has none."""
    try:
        return encoding.encode_single_token(marker)
    except KeyError:
        raise ValueError(f"the tokenizer {encoding.name} has no {marker}") from None


def render(encoding: tiktoken.Encoding, messages: Sequence[dict]) -> list[int]:
    """Token ids of a conversation, without the <|endoftext|> that precedes a document. Headings are
    encoded apart from contents, so that they are always the same tokens."""
    start, end = special(encoding, START), special(encoding, END)
    encode, ids = encoding.encode_ordinary, []
    for message in messages:
        ids += [start, *encode(f"{message['role']}\n"), *encode(f" {message['content']}")]
        ids += [end, *encode("\n")]
    return ids


def prompt(encoding: tiktoken.Encoding, messages: Sequence[dict]) -> list[int]:
    """Token ids of messages and of the heading under which the assistant answers."""
    heading = [special(encoding, START), *encoding.encode_ordinary("assistant\n")]
    return [*render(encoding, messages), *heading]


def answers(encoding: tiktoken.Encoding, ids: np.ndarray) -> np.ndarray:
    """Which tokens of a conversation [T] the assistant has to produce: [T] bool. They are the
    contents of its messages, each with the <|im_end|> that ends it; the last may be cut off."""
    start, end = special(encoding, START), special(encoding, END)
    heading = np.array(prompt(encoding, []))
    answer = np.zeros(len(ids), dtype=bool)
    for at in np.flatnonzero(ids == start):
        content = at + len(heading)
        if np.array_equal(ids[at:content], heading):
            after = np.flatnonzero(ids[content:] == end)
            answer[content : content + after[0] + 1 if len(after) else None] = True
    return answer
