"""What a run tells people: what is trained at its start, what was learned at its end."""

import math

import torch

from common import command_line
from model import Decoder
from text import tokenizer
from training import countries, ranks
from training.batches import Data
from training.objectives import NextToken
from training.records import draw_loss
from training.settings import STAGES, Settings
from training.sources import Windows


def model_sizes(model: Decoder) -> dict[str, int]:
    """Numbers of parameters (a tied head counts once) and FLOPs of a forward pass:

    total, table, backbone   in all, in tables, elsewhere
    rows                     of these, in the rows of tables that one token reads
    active                   that one token touches: of each table, and of an embedding that
                             is not the head, one row, and not what is `idle` in FFNs
    flops_per_token          2 per multiplied weight, and attention to half of `Attention.span`
                             (the mean under a causal mask)
    flops_per_key            of these, attention to one token, in all layers
    """
    config = model.config
    table = model.tables.n_rank * sum(weight.numel() for weight in model.tables.weight)
    row = 0 if config.tie_head else config.n_embd  # of an embedding that is only looked up
    embedding = config.vocab_size * row
    others = {*model.tables.parameters(), *(model.wte.parameters() if row else ())}
    dense = [p for p in model.parameters() if p not in others]
    backbone = sum(p.numel() for p in dense) + embedding
    matrices = sum(p.numel() for p in dense if p.dim() == 2)
    idle = sum(getattr(block.ffn, "idle", 0) for block in model.blocks)
    rows = len(model.tables.weight) * model.tables.width * model.tables.n_rank * model.n_address
    per_key = 4 * config.n_embd  # q k, and its weight times v
    attention = sum(per_key * block.attn.span for block in model.blocks)
    return {
        "total": backbone + table,
        "table": table,
        "backbone": backbone,
        "rows": rows,
        "active": backbone - embedding + row - idle + rows,
        "flops_per_token": 2 * (matrices - idle) + attention // 2,
        "flops_per_key": per_key * config.n_layer,
    }


def describe(settings: Settings, data: Data, objective: NextToken) -> None:
    """Say what is trained, and on how much of what."""
    config, sizes = objective.model.config, model_sizes(objective.model)
    millions = {name: f"{size / 1e6:.2f} M" for name, size in sizes.items()}
    print(
        f"{config.ffn} model, {config.n_layer} layers x {config.n_embd}, vocabulary "
        f"{config.vocab_size:,}: {millions['total']} parameters, {millions['table']} of them in "
        f"tables; {millions['active']} active parameters and "
        f"{sizes['flops_per_token'] / 1e6:.2f} MFLOP per token (forward)"
    )
    tokens_per_step = settings.batch_size * config.block_size
    print(
        f"{settings.max_iters} steps of {tokens_per_step:,} tokens on {objective.device.type} "
        f"in {objective.dtype}: {passes(settings, data):.1f} passes over {settings.data_dir}"
    )
    kinds = {meta["kind"] for meta in data.metas}
    if kinds != {"text"} and STAGES[settings.stage].reads == "text":
        print(
            "note: all tokens are learned; --stage sft learns the answers, --stage dpo the chosen"
        )
    n_cut = getattr(data.train, "n_cut", 0)
    if n_cut:
        print(f"{n_cut:,} conversations are longer than --block_size and will be cut")


def passes(settings: Settings, data: Data) -> float:
    """How often the steps of a run read its windows of text, or its conversations."""
    return settings.max_iters * settings.batch_size / data.n_sequence


def format_figures(figures: dict[str, float]) -> str:
    """Figures for people: val loss 1.2923, tok per s 6,800."""
    shown = []
    for name, value in figures.items():
        number = f"{value:,.0f}" if value >= 1000 else f"{value:.5g}"
        if name == "recall":
            number = f"{value:.0%}"
        shown.append(f"{name.replace('_', ' ')} {number}")
    return ", ".join(shown)


def report(
    settings: Settings, data: Data, model: Decoder, best: tuple[float, int], hints: bool
) -> dict[str, float]:
    """What a finished run has learned, which is returned, and written; and, as `hints`, what to try
    next."""
    out_dir = settings.out_dir
    shares = ask(model, data)
    if ranks.rank == 0:
        draw_loss(out_dir / "metrics.jsonl", out_dir / "loss.png")
    loss, step = best
    best_file = f"best.pt (val loss {loss:.4f}, step {step}), " if math.isfinite(loss) else ""
    print(f"wrote {out_dir / 'ckpt.pt'}, {best_file}metrics.jsonl, loss.png\n")
    commands = show(model, data, settings.seed)
    if not hints:
        return shares
    print("\nnext:")
    for command in commands:
        print(f"  {command_line(*command.split(), '--ckpt', out_dir / 'ckpt.pt')}")
    longer = ("--resume", "--out_dir", out_dir, "--max_iters", 2 * settings.max_iters)
    so_far = f"# longer (the learning rate rises again); {passes(settings, data):.1f} passes so far"
    print(f"  {command_line('train.py', *longer)}  {so_far}")
    return shares


def ask(model: Decoder, data: Data) -> dict[str, float]:
    """Ask for what the corpus teaches. Prints and returns the shares that are right."""
    shares = countries.ask(model, data.encoding, data.corpora)
    if shares:
        text = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in shares.items())
        print(f"recall of capitals, held-out phrasings: {text}")
    return shares


def show(model: Decoder, data: Data, seed: int) -> list[str]:
    """Print what the model adds to a prompt of the corpus, or to a question from the validation
    conversations. Returns commands to try."""
    encoding = data.encoding
    source = next(iter(data.val.values()))
    if isinstance(source, Windows):
        text, commands = countries.demo(model, data.corpora)
        prompt = tokenizer.encode(encoding, text)
        temperature = 0.8
        stop = encoding.eot_token
    else:
        prompt, commands = source.question(), ["sample.py --chat"]
        temperature = 0.0
        stop = encoding.encode_single_token(tokenizer.END)
    # Without `stop`, as ranks that do not end together would wait for each other forever.
    ids = torch.tensor([prompt], device=model.device)  # [1, T]
    new = model.generate(ids, 60, temperature=temperature, seed=seed)[0, len(prompt) :].tolist()
    if stop in new:
        new = new[: new.index(stop)]
    print(encoding.decode(prompt[1:] + new))  # without the leading <|endoftext|>
    return commands
