"""The chat template: conversations as tokens, which of those tokens are the assistant's, and a
conversation with a model.

    <|endoftext|><|im_start|>user\\nWhat is the capital of Peru?<|im_end|>\\n
    <|im_start|>assistant\\nLima.<|im_end|>\\n

A conversation is a list of messages, {"role": ..., "content": ...}. The markers are special tokens,
which no text encodes to: nobody can end his message and go on in another role.

As tokens each content has a space in front, which is taken away again when an answer is shown (so
does Llama's tokenizer with any text). Else a message would begin with other tokens than the same
words within a text: "Lima." is `L|im|a|.`, whereas the token that the facts were learned with is
` Lima`.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import tiktoken
import torch

from model import Decoder, KVCache
from tokenizer import StreamDecoder

START, END = "<|im_start|>", "<|im_end|>"


def special(encoding: tiktoken.Encoding, marker: str) -> int:
    """The id of a marker.

    Raises:
        ValueError: this tokenizer has no such token, so it cannot write conversations.
    """
    try:
        return encoding.encode_single_token(marker)
    except KeyError:
        raise ValueError(f"the tokenizer {encoding.name} has no {marker}") from None


def check(messages: object) -> None:
    """Refuse what is not a conversation.

    Raises:
        ValueError: saying what is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("a conversation is a list of messages, at least one")
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError(f"a message is an object, not {type(message).__name__}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f'a message needs "{key}", a text')
        if not message["role"].isidentifier():
            raise ValueError(f"role {message['role'][:40]!r} is not a word")


def render(encoding: tiktoken.Encoding, messages: Sequence[dict]) -> list[int]:
    """Token ids of a conversation, without the <|endoftext|> that precedes a document.

    Heading and content are encoded apart, so that a heading is always the same tokens, in training
    as in a chat.
    """
    start, end = special(encoding, START), special(encoding, END)
    encode, ids = encoding.encode_ordinary, []
    for message in messages:
        ids += [start, *encode(f"{message['role']}\n"), *encode(f" {message['content']}")]
        ids += [end, *encode("\n")]
    return ids


def prompt(encoding: tiktoken.Encoding, messages: Sequence[dict]) -> list[int]:
    """Token ids of messages, and of the heading under which the assistant answers them."""
    return [*render(encoding, messages), *answer_heading(encoding)]


def answer_heading(encoding: tiktoken.Encoding) -> list[int]:
    """Token ids of what stands before each of the assistant's contents."""
    return [special(encoding, START), *encoding.encode_ordinary("assistant\n")]


def answers(encoding: tiktoken.Encoding, ids: np.ndarray) -> np.ndarray:
    """Which tokens of a conversation the assistant has to produce: his contents, each with the
    <|im_end|> that ends it. Learned from the ids alone: markers cannot occur inside a content.

    Args:
        ids: [T] token ids, whole messages except maybe the last.

    Returns:
        [T] bool.
    """
    start, end = special(encoding, START), special(encoding, END)
    heading = np.array(answer_heading(encoding))
    answer = np.zeros(len(ids), dtype=bool)
    for at in np.flatnonzero(ids == start):
        content = at + len(heading)
        if np.array_equal(ids[at:content], heading):
            after = np.flatnonzero(ids[content:] == end)
            answer[content : content + after[0] + 1 if len(after) else None] = True
    return answer


class Chat:
    """A conversation with a model that remembers it: each turn feeds the model only what is new,
    the rest is in its KV cache.

    When a turn does not fit into the model's context, the oldest turns are forgotten, the system
    message is not.

    Args:
        model: a Decoder in evaluation mode.
        system: content of a system message at the beginning.

    Raises:
        ValueError: the tokenizer has no markers, or the system message is too long.
    """

    def __init__(
        self, model: Decoder, encoding: tiktoken.Encoding, system: str | None = None
    ) -> None:
        self.model, self.encoding = model, encoding
        self.end = special(encoding, END)
        first = [] if system is None else [{"role": "system", "content": system}]
        self.head = [encoding.eot_token, *render(encoding, first)]
        if 2 * len(self.head) > model.config.block_size:
            raise ValueError(
                f"the system message has {len(self.head)} tokens and may have half of the model's "
                f"context of {model.config.block_size}"
            )
        self.turns: list[list[int]] = []  # token ids, as many turns as fit
        weight = model.wte.weight
        self.cache = KVCache(model.config, 1, weight.device, weight.dtype)

    def forget(self) -> None:
        """Begin a new conversation."""
        self.turns, self.cache.length = [], 0

    def reply(self, text: str, max_new_tokens: int, **options) -> Iterator[str]:
        """Yield the answer to the user's next message piece by piece; `options` are those of
        `Decoder.stream`.

        Raises:
            ValueError: the message alone is too long for the model.
        """
        device = self.model.wte.weight.device
        question = prompt(self.encoding, [{"role": "user", "content": text}])
        block_size = self.model.config.block_size
        needed = len(self.head) + len(question) + min(max_new_tokens, block_size // 4)
        if needed > block_size:
            raise ValueError(
                f"the message has {len(question)} tokens, and there is room for "
                f"{block_size - needed + len(question)}: say it in fewer words"
            )
        while sum(map(len, self.turns)) + needed > block_size:
            self.turns.pop(0)
            self.cache.length = 0  # what follows has moved, it must be read anew
        ids = [*self.head, *(token for turn in self.turns for token in turn), *question]
        room = min(max_new_tokens, block_size - len(ids))
        decoder, said = StreamDecoder(self.encoding), []
        stream = self.model.stream(
            torch.tensor([ids], device=device), room, stop=self.end, cache=self.cache, **options
        )
        try:
            for token in stream:
                if token.item() == self.encoding.eot_token:
                    break  # a document's end is a message's, too
                said.append(token.item())
                if said[-1] != self.end:
                    text = decoder.feed(said[-1])
                    yield text.removeprefix(" ") if len(said) == 1 else text
            yield decoder.flush()
        finally:  # an answer that is interrupted or cut off is a turn, too
            if not said or said[-1] != self.end:
                said.append(self.end)
            self.turns.append([*question, *said, *self.encoding.encode_ordinary("\n")])
