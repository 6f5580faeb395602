"""Let a trained model write.

python sample.py                                        # from out/ckpt.pt, no prompt
python sample.py --prompt "Country: Peru" --num_samples 3
python sample.py --ckpt out/book/ckpt.pt --prompt "It was" --temperature 0.8 --top_p 0.9
"""

import argparse
import sys
import time
from collections.abc import Iterator

import tiktoken
import torch

import homes
from common import UserError, check_seed, encode, load_model, pick_device, run
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ckpt", default="out/ckpt.pt", help="checkpoint of train.py (%(default)s)")
    add(
        "--prompt", default="", help='text to continue, "\\n" is a line break; none: a new document'
    )
    add("--max_new_tokens", type=int, default=200, help="per sample (%(default)s)")
    add("--temperature", type=float, default=0.8, help="0: always the most probable (%(default)s)")
    add("--top_k", type=int, help="draw from the k most probable tokens only")
    add("--top_p", type=float, help="draw from the most probable tokens that sum up to p")
    add("--num_samples", type=int, default=1, help="%(default)s")
    add("--seed", type=int, default=1337, help="of the first sample, then one more each (1337)")
    add("--device", default="auto", help="auto (cuda, mps, cpu in that order) or one of them")
    homes.add_flags(parser)
    args = parser.parse_args()
    homes.check_flags(args)
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

    device = pick_device(args.device)
    model, encoding, _ = load_model(args.ckpt, device, args)
    args.prompt = args.prompt.replace("\\n", "\n")  # a shell passes the two characters on
    n_prompt, block_size = len(encode(encoding, args.prompt)), model.config.block_size
    if n_prompt > block_size:
        print(
            f"note: of {n_prompt} prompt tokens the model sees the last {block_size}",
            file=sys.stderr,
        )
    tokens, start = 0, time.perf_counter()
    for number in range(args.num_samples):
        if number:
            print("\n" + "-" * 40)
        pieces = sample_text(
            model,
            encoding,
            args.prompt,
            args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed + number,
        )
        for piece in pieces:
            print(piece, end="", flush=True)
            tokens += 1
        print()
        tokens -= 2  # the prompt and the flush
    seconds = time.perf_counter() - start
    cache = getattr(model.tables, "cache", None)
    hits = f", {cache.hits / cache.tokens:.1%} of rows from the cache" if cache else ""
    print(
        f"\n{tokens} tokens, {tokens / seconds:,.0f} tok/s on {device.type}{hits}", file=sys.stderr
    )


if __name__ == "__main__":
    run(main)
