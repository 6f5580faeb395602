"""Let a trained model write, or talk with it.

python sample.py                                        # from out/ckpt.pt, no prompt
python sample.py --prompt "Country: Peru" --num_samples 3
python sample.py --ckpt out/book/ckpt.pt --prompt "It was" --temperature 0.8 --top_p 0.9
python sample.py --ckpt out/sft/ckpt.pt --chat          # a conversation (train.py --stage sft)
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import tiktoken
import torch

from common import UserError, check_ranges, flag, parse, pick_device, run
from model import Decoder, KVCache
from text import template
from text.tokenizer import StreamDecoder
from training.checkpoints import device_flag, encode, load_model, offload_flag


@dataclass
class Sampling:
    """The flags of this command."""

    ckpt: str = flag("out/ckpt.pt", "checkpoint of train.py")
    prompt: str = flag("", 'text to continue, "\\n" is a line break; none: a new document')
    chat: bool = flag(False, "talk: a message a line, from the keyboard or a pipe")
    system: str | None = flag(None, "what to tell the model at the beginning of a --chat")
    max_new_tokens: int = flag(200, "per sample or answer", must="at least 1")
    temperature: float = flag(0.8, "0: always the most probable", must="0 or more")
    top_k: int | None = flag(None, "draw from the k most probable tokens only", must="at least 1")
    top_p: float | None = flag(
        None, "draw from the most probable tokens that sum up to p", must="above 0 and at most 1"
    )
    num_samples: int = flag(1, "how many", must="at least 1")
    seed: int = flag(
        1337, "of the first sample, then one more each", must="0 or more, and fit 63 bits"
    )
    device: str = device_flag()
    offload: str = offload_flag()

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.chat and (self.prompt or self.num_samples > 1):
            alone = "--chat takes messages from the terminal"
            raise UserError(f"{alone}: leave out --prompt, --num_samples")
        if self.system is not None and not self.chat:
            raise UserError("--system goes with --chat")


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def sample_text(
    model: Decoder, encoding: tiktoken.Encoding, prompt: str, max_new_tokens: int, **options
) -> Iterator[str]:
    """Yield the prompt, then the model's text token by token, until it ends the document.

    `options` are those of `Decoder.stream`."""
    device = next(model.parameters()).device
    ids = torch.tensor([encode(encoding, prompt)], device=device)  # [1, T]
    decoder = StreamDecoder(encoding)
    yield prompt
    for token in model.stream(ids, max_new_tokens, stop=encoding.eot_token, **options):
        if token.item() != encoding.eot_token:
            yield decoder.feed(token.item())
    yield decoder.flush()


def write(
    model: Decoder, encoding: tiktoken.Encoding, prompt: str, num_samples: int, seed: int, **options
) -> tuple[int, float]:
    """Continue a prompt several times; tokens and seconds as for `converse`."""
    n_prompt, block_size = len(encode(encoding, prompt)), model.config.block_size
    if n_prompt > block_size:
        note(f"of {n_prompt} prompt tokens the model sees the last {block_size}")
    tokens, start = 0, time.perf_counter()
    for number in range(num_samples):
        if number:
            print("\n" + "-" * 40)
        for piece in sample_text(model, encoding, prompt, seed=seed + number, **options):
            print(piece, end="", flush=True)
            tokens += 1
        print()
        tokens -= 2  # the prompt and the flush
    return tokens, time.perf_counter() - start


class Chat:
    """A conversation with a model that remembers it: each turn feeds the model only what is new,
    the rest is in its KV cache.

    When a turn does not fit into the model's context, the oldest turns are forgotten, the `system`
    message at the beginning is not. ValueError: it is too long, or the tokenizer has no markers."""

    def __init__(
        self, model: Decoder, encoding: tiktoken.Encoding, system: str | None = None
    ) -> None:
        self.model, self.encoding = model, encoding
        self.end = template.special(encoding, template.END)
        first = [] if system is None else [{"role": "system", "content": system}]
        self.head = [encoding.eot_token, *template.render(encoding, first)]
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
        `Decoder.stream`. ValueError: the message alone is too long for the model."""
        question = template.prompt(self.encoding, [{"role": "user", "content": text}])
        block_size = self.model.config.block_size
        room = block_size - len(self.head) - min(max_new_tokens, block_size // 4)
        if len(question) > room:
            raise ValueError(
                f"the message has {len(question)} tokens, and there is room for {room}: say it in "
                "fewer words"
            )
        while sum(map(len, self.turns)) + len(question) > room:
            self.turns.pop(0)
            self.cache.length = 0  # what follows has moved, it must be read anew
        ids = [[*self.head, *chain(*self.turns), *question]]
        ids = torch.tensor(ids, device=self.model.wte.weight.device)  # [1, T]
        new = min(max_new_tokens, block_size - ids.shape[1])
        decoder, said = StreamDecoder(self.encoding), []
        try:
            for token in self.model.stream(ids, new, stop=self.end, cache=self.cache, **options):
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


def converse(chat: Chat, max_new_tokens: int, seed: int, **options) -> tuple[int, float]:
    """Hold a conversation in the terminal; the tokens the model wrote, and the seconds it took."""
    asks = sys.stdin.isatty()
    if asks:
        print("/new forgets the conversation; Ctrl-C ends an answer, Ctrl-D the program")
    sys.stdin.reconfigure(errors="replace")
    tokens, seconds, turn = 0, 0.0, 0
    while True:
        try:
            text = input("> " if asks else "").strip()
        except EOFError:
            return tokens, seconds
        if text == "/new":
            chat.forget()
        if text in ("", "/new"):
            continue
        start = time.perf_counter()
        try:
            for piece in chat.reply(text, max_new_tokens, seed=seed + turn, **options):
                print(piece, end="", flush=True)
                tokens += 1
        except ValueError as error:
            print(f"({error})", end="", file=sys.stderr)
        except KeyboardInterrupt:
            if not asks:
                raise
        seconds += time.perf_counter() - start
        turn += 1
        print()


def main() -> None:
    args = parse(Sampling, __doc__)
    device = pick_device(args.device)
    model, encoding, checkpoint = load_model(args.ckpt, device, args.offload)
    options = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    options |= dict(max_new_tokens=args.max_new_tokens, seed=args.seed)
    if args.chat:
        if checkpoint.get("args", {}).get("stage") not in ("sft", "dpo"):
            note(f"{args.ckpt} has not learned to talk (train.py --stage sft)")
        try:
            chat = Chat(model, encoding, args.system)
        except ValueError as error:
            raise UserError(f"--chat with {args.ckpt}: {error}") from None
        tokens, seconds = converse(chat, **options)
    else:
        prompt = args.prompt.replace("\\n", "\n")  # a shell passes the two characters on
        tokens, seconds = write(model, encoding, prompt, args.num_samples, **options)
    if tokens:
        speed = f"{tokens / seconds:,.0f} tok/s on {device.type}"
        print(f"\n{tokens} tokens, {speed}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
