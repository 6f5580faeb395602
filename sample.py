"""Let a trained model write, or talk with it.

python sample.py                                        # from out/ckpt.pt, no prompt
python sample.py --prompt "Country: Peru" --num_samples 3
python sample.py --ckpt out/book/ckpt.pt --prompt "It was" --temperature 0.8 --top_p 0.9
python sample.py --ckpt out/sft/ckpt.pt --chat          # a conversation (train.py --stage sft)
"""

import argparse
import sys
import time
from collections.abc import Iterator

import tiktoken
import torch

from chat import Chat
from common import UserError, add_offload, check_seed, encode, load_model, pick_device, run
from model import Decoder
from tokenizer import StreamDecoder


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
    model: Decoder, encoding: tiktoken.Encoding, args: argparse.Namespace, options: dict
) -> tuple[int, float]:
    """Continue --prompt --num_samples times; tokens and seconds as for `converse`."""
    prompt = args.prompt.replace("\\n", "\n")  # a shell passes the two characters on
    n_prompt, block_size = len(encode(encoding, prompt)), model.config.block_size
    if n_prompt > block_size:
        print(
            f"note: of {n_prompt} prompt tokens the model sees the last {block_size}",
            file=sys.stderr,
        )
    tokens, start = 0, time.perf_counter()
    for number in range(args.num_samples):
        if number:
            print("\n" + "-" * 40)
        seed = args.seed + number
        for piece in sample_text(
            model, encoding, prompt, args.max_new_tokens, seed=seed, **options
        ):
            print(piece, end="", flush=True)
            tokens += 1
        print()
        tokens -= 2  # the prompt and the flush
    return tokens, time.perf_counter() - start


def converse(chat: Chat, max_new_tokens: int, seed: int, **options) -> tuple[int, float]:
    """Hold a conversation in the terminal.

    Returns:
        tokens the model wrote, and the seconds it took.
    """
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
        if not text:
            continue
        if text == "/new":
            chat.forget()
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ckpt", default="out/ckpt.pt", help="checkpoint of train.py (%(default)s)")
    add(
        "--prompt", default="", help='text to continue, "\\n" is a line break; none: a new document'
    )
    add("--chat", action="store_true", help="talk: a message a line, from the keyboard or a pipe")
    add("--system", help="what to tell the model at the beginning of a --chat")
    add("--max_new_tokens", type=int, default=200, help="per sample or answer (%(default)s)")
    add("--temperature", type=float, default=0.8, help="0: always the most probable (%(default)s)")
    add("--top_k", type=int, help="draw from the k most probable tokens only")
    add("--top_p", type=float, help="draw from the most probable tokens that sum up to p")
    add("--num_samples", type=int, default=1, help="%(default)s")
    add("--seed", type=int, default=1337, help="of the first sample, then one more each (1337)")
    add("--device", default="auto", help="auto (cuda, mps, cpu in that order) or one of them")
    add_offload(parser)
    args = parser.parse_args()
    if not args.temperature >= 0:
        raise UserError(f"--temperature {args.temperature} must be 0 or more")
    if args.top_k is not None and args.top_k < 1:
        raise UserError(f"--top_k {args.top_k} must be at least 1")
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise UserError(f"--top_p {args.top_p} must be above 0 and at most 1")
    check_seed(args.seed)
    for name in ("max_new_tokens", "num_samples"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)} must be at least 1")

    if args.chat and (args.prompt or args.num_samples > 1):
        raise UserError(
            "--chat takes messages from the terminal: leave out --prompt, --num_samples"
        )
    if args.system is not None and not args.chat:
        raise UserError("--system goes with --chat")

    device = pick_device(args.device)
    model, encoding, checkpoint = load_model(args.ckpt, device, args.offload)
    options = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    if args.chat:
        stage = checkpoint.get("args", {}).get("stage")
        if stage not in ("sft", "dpo"):
            print(
                f"note: {args.ckpt} has not learned to talk (train.py --stage sft)", file=sys.stderr
            )
        try:
            chat = Chat(model, encoding, args.system)
        except ValueError as error:
            raise UserError(f"--chat with {args.ckpt}: {error}") from None
        tokens, seconds = converse(chat, args.max_new_tokens, args.seed, **options)
    else:
        tokens, seconds = write(model, encoding, args, options)
    if tokens:
        speed = f"{tokens / seconds:,.0f} tok/s on {device.type}"
        print(f"\n{tokens} tokens, {speed}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
