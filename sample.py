"""Generate text with a trained model, or chat with it.

python sample.py                                        # from the run in out, no prompt
python sample.py --prompt "Country: Peru" --num_samples 3
python sample.py --ckpt out/book/ckpt.pt --prompt "It was" --temperature 0.8 --top_p 0.9
python sample.py --ckpt out/sft/ckpt.pt --chat          # a conversation (train.py --stage sft)
"""

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

# Before torch, whose threads it tells how to wait.
from common import UserError, check_settings, flag, parse, pick_device, run_command

# isort: split
import tiktoken
import torch
from tqdm import tqdm

from model import Decoder
from text import chat, spelling, tokenizer
from text.spelling import familiar, typed
from text.tokenizer import encode
from training.captured import capture_steps
from training.decoding import check_chat, decoding_dtype_flag, load_to_decode, norm_keys
from training.settings import device_flag, offload_flag


@dataclass
class Sampling:
    ckpt: str = flag("out", "checkpoint of train.py or convert.py, or a folder of a run")
    prompt: str = flag(
        "", r'text to continue; "\n" is a line break, "\\" a backslash; none: a new document'
    )
    chat: bool = flag(False, "chat: one message per line, from the keyboard or a pipe")
    system: str | None = flag(None, "system message for --chat")
    max_new_tokens: int = flag(200, "per sample or answer", must="at least 1")
    temperature: float = flag(0.8, "0: always the most probable token", must="0 or more")
    top_k: int = flag(0, "sample from the k most probable tokens; 0: all", must="0 or more")
    top_p: float | None = flag(
        None,
        "of these, from the most probable ones that together reach p",
        must="above 0 and at most 1",
    )
    num_samples: int = flag(1, "samples, drawn side by side", must="at least 1")
    cache: str = flag(
        "kv", "what decoding keeps; ids, of an Embformer: only the text", choices=("kv", "ids")
    )
    seed: int = flag(1337, "of what is drawn", must="0 or more, and fit 32 bits")
    device: str = device_flag()
    offload: str = offload_flag()
    dtype: str = decoding_dtype_flag()

    def __post_init__(self) -> None:
        check_settings(self)
        if self.chat and (self.prompt or self.num_samples > 1):
            raise UserError("--chat reads standard input: leave out --prompt, --num_samples")
        if self.system is not None and not self.chat:
            raise UserError("--system needs --chat")


def with_room(ids: list[int], block_size: int, n_new: int) -> list[int]:
    """A prompt or, if it fills the context, so much of its end that what is written has room: else
    half of it would be forgotten at once."""
    if len(ids) < block_size:
        return ids
    # The last token that is written is not read.
    return ids[-max(1, block_size + 1 - n_new, block_size // 2) :]


def write(
    model: Decoder,
    encoding: tiktoken.Encoding,
    ids: list[int],
    written: list[int],
    **options,
) -> Iterator[str]:
    """Yield what the model writes after `ids` as it comes, up to the end of a text or a message.
    All tokens but that end go to the list `written`. `options` as for `Decoder.stream`."""
    ends = tokenizer.ends(encoding)

    def tokens() -> Iterator[int]:
        prompt = torch.tensor([ids], device=model.device)  # [1, T]
        for token in model.stream(prompt, **options):
            number = token.item()
            if number in ends:
                return
            written.append(number)
            yield number

    return spelling.stream(encoding, tokens())


def side_by_side(
    model: Decoder,
    encoding: tiktoken.Encoding,
    ids: list[int],
    n: int,
    max_new_tokens: int,
    **options,
) -> list[list[int]]:
    """What the model writes after `ids`, n times in one batch, each as `write` has it."""
    prompts = torch.tensor([ids] * n, device=model.device)  # [n, T]
    tokens = model.stream(prompts, max_new_tokens, stop=encoding.eot_token, **options)
    steps = list(tqdm(tokens, "sampling", max_new_tokens, unit="token", disable=None))  # [n] each
    samples = torch.stack(steps, dim=1).tolist()  # [n, new]
    return [tokenizer.until_end(encoding, new) for new in samples]


class Chat:
    """A conversation. When a turn does not fit into the model's context, the oldest turns are
    forgotten, the `system` message at the beginning is not. Notes on standard error say so."""

    def __init__(
        self, model: Decoder, encoding: tiktoken.Encoding, system: str | None = None
    ) -> None:
        self.model = model
        self.encoding = encoding
        self.end = encoding.encode_single_token(tokenizer.END)
        messages = [] if system is None else [{"role": "system", "content": system}]
        self.head = [encoding.eot_token, *chat.render(encoding, messages)]
        self.turns: list[list[int]] = []  # token ids, as many turns as fit

    def reply(self, text: str, max_new_tokens: int, **options) -> Iterator[str]:
        """Yield the answer to the user's next message token by token; `options` as for
        `Decoder.stream`. UserError: there is no room for the message and an answer."""
        # 1) make room for the message and a quarter of a context, or less, of an answer
        asked = {"role": "user", "content": familiar(self.encoding, text)}
        question = chat.prompt(self.encoding, [asked])
        block_size = self.model.config.block_size
        room = block_size - len(self.head) - min(max_new_tokens, block_size // 4)
        if len(question) > room:
            size = f"the message has {len(question)} tokens, there is room for {max(room, 0)}"
            raise UserError(f"{size}: shorten it, or --system")
        forgotten = 0
        while sum(len(turn) for turn in self.turns) + len(question) > room:
            self.turns.pop(0)
            forgotten += 1
        if forgotten:
            print(f"(forgotten turns: {forgotten})", file=sys.stderr)
        ids = list(self.head)
        for turn in self.turns:
            ids += turn
        ids += question

        # 2) answer
        options["max_new_tokens"] = min(max_new_tokens, block_size - len(ids))
        answer: list[int] = []
        pieces = write(self.model, self.encoding, ids, answer, **options)
        try:
            yield next(pieces, "").removeprefix(chat.space(self.encoding))
            yield from pieces
            if len(answer) == options["max_new_tokens"] < max_new_tokens:
                print("\n(the context is full: the answer is cut)", file=sys.stderr)
        except (KeyboardInterrupt, GeneratorExit):  # what was answered so far stays
            if answer:
                self.keep(question, answer)
            raise
        self.keep(question, answer)

    def keep(self, question: list[int], answer: list[int]) -> None:
        newline = self.encoding.encode_ordinary("\n")
        self.turns.append([*question, *answer, self.end, *newline])


def print_pieces(pieces: Iterator[str]) -> None:
    """Print a text as it comes."""
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def converse(talk: Chat, seed: int, **options) -> None:
    """Hold a conversation: each line of standard input is a message, until the input ends; what is
    pasted into a terminal is one, too. /new forgets what was said, Ctrl-C ends an answer."""
    if sys.stdin is None:
        raise UserError("--chat reads standard input, which is closed")
    sys.stdin.reconfigure(errors="replace")
    if sys.stdin.isatty():
        with suppress(ImportError):  # Windows, whose terminals edit lines themselves
            import readline  # noqa: F401  # arrow keys; without it they are part of the message
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if text == "/new":
            talk.turns = []
            print("(a new conversation)", file=sys.stderr)
        elif text:
            try:
                print_pieces(talk.reply(text, seed=seed, **options))
            except KeyboardInterrupt:
                print()
            except UserError as error:
                print(f"({error})", file=sys.stderr)
        seed += 1


def main() -> None:
    args = parse(Sampling, __doc__)
    device = pick_device(args.device)
    model, encoding, checkpoint = load_to_decode(args.ckpt, device, args.offload, args.dtype)
    if args.cache == "ids":
        if model.config.ffn != "embformer":
            raise UserError(f"--cache ids: {args.ckpt} is not an Embformer, whose keys are rows")
        norm_keys(model)
    capture_steps(model)
    options = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "cache": args.cache,
    }
    if args.chat:
        check_chat(args.ckpt, encoding, checkpoint)
        system = None if args.system is None else typed(encoding, args.system)
        converse(Chat(model, encoding, system), args.seed, **options)
        return

    prompt = typed(encoding, args.prompt)
    ids = encode(encoding, prompt)
    n_given = len(ids)
    ids = with_room(ids, model.config.block_size, args.max_new_tokens)
    if len(ids) < n_given:
        print(f"of {n_given} prompt tokens the model sees the last {len(ids)}", file=sys.stderr)
    options["seed"] = args.seed
    start = time.perf_counter()
    if args.num_samples == 1:
        written: list[int] = []
        print(prompt, end="")
        print_pieces(write(model, encoding, ids, written, **options))
        n_token = len(written)
    else:
        samples = side_by_side(model, encoding, ids, args.num_samples, **options)
        texts = [prompt + encoding.decode(new, errors="replace") for new in samples]
        print(f"\n{'-' * 40}\n".join(texts))
        n_token = sum(map(len, samples))
    speed = n_token / (time.perf_counter() - start)
    print(f"\n{n_token} tokens, {speed:,.0f} tok/s on {model.device.type}", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
