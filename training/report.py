"""What a run tells people: what is trained at its start, what was learned at its end."""

import torch

from common import command_line
from corpora import recall
from model import Decoder
from text import tokenizer
from training import ranks
from training.batches import Data
from training.objectives import NextToken
from training.records import Log, draw_loss, read_run
from training.settings import STAGES, Settings
from training.sources import Windows

# A rate at which a stage learns few conversations or pairs: so few that its steps read them more
# than twice as often as it says.
FEW_RATES = {"sft": 2e-3, "dpo": 1e-4}


def model_sizes(model: Decoder) -> dict[str, int]:
    """Numbers of parameters (a tied head counts once) and FLOPs of a forward pass:

    total, table       in all, in tables
    rows               of these, in the rows of tables that one token reads
    active             that one token touches: of each table, and of an embedding that is not
                       the head, one row, and not what is `idle` in modules
    flops_per_token    2 per multiplied weight, and attention to half of `Attention.span` (the
                       mean under a causal mask)
    """
    config = model.config
    table = model.tables.n_rank * sum(weight.numel() for weight in model.tables.weight)
    row = 0 if config.tie_head else config.n_embd  # of an embedding that is only looked up
    embedding = config.vocab_size * row
    others = {*model.tables.parameters(), *(model.wte.parameters() if row else ())}
    dense = [p for p in model.parameters() if p not in others]
    backbone = sum(p.numel() for p in dense) + embedding
    matrices = sum(p.numel() for p in dense if p.dim() >= 2)
    idle = sum(getattr(module, "idle", 0) for module in model.modules())
    n_address = model.addresses(torch.zeros(1, 1, dtype=torch.int64), 1).numel()  # of one token
    rows = len(model.tables.weight) * model.tables.width * model.tables.n_rank * n_address
    # q k, and its weight times v
    width = config.n_head * config.head_dim
    attention = sum(4 * width * block.attn.span for block in model.blocks)
    return {
        "total": backbone + table,
        "table": table,
        "rows": rows,
        "active": backbone - embedding + row - idle + rows,
        "flops_per_token": 2 * (matrices - idle) + attention // 2,
    }


def describe(settings: Settings, data: Data, objective: NextToken) -> None:
    """Say what is trained, and on how much of what."""
    model = objective.model
    config, sizes = model.config, model_sizes(model)
    millions = {name: f"{size / 1e6:.2f} M" for name, size in sizes.items()}
    print(
        f"{config.ffn} model, {config.n_layer} layers x {config.n_embd}, vocabulary "
        f"{config.vocab_size:,}: {millions['total']} parameters, {millions['table']} of them in "
        f"tables; {millions['active']} active parameters and "
        f"{sizes['flops_per_token'] / 1e6:.2f} MFLOP per token (forward)"
    )
    reads = STAGES[settings.stage].reads
    size = f"{settings.batch_size * config.block_size:,} tokens"
    if reads != "text":
        size = f"{settings.batch_size} {'pairs' if reads == 'preference' else 'conversations'}"
    over = settings.data_dir
    if len(data.metas) > 1:
        over += " (the folder that is read most)"
    print(
        f"{settings.max_iters} steps of {size} on {model.device.type} "
        f"in {objective.dtype}: {passes(settings, data):.1f} passes over {over}"
    )
    kinds = {meta["kind"] for meta in data.metas}
    if kinds != {"text"} and reads == "text":
        print(
            "note: all tokens are learned; --stage sft learns the answers, --stage dpo the chosen"
        )
    rate = FEW_RATES.get(settings.stage, 0)
    is_slow = 4 * settings.learning_rate < rate
    if is_slow and passes(settings, data) > 2 * STAGES[settings.stage].epochs:
        what = "few conversations" if settings.stage == "sft" else "few pairs"
        print(f"note: {what}: a larger --learning_rate learns more, such as {rate}")
    if data.train.n_cut:
        print(f"{data.train.n_cut:,} conversations are longer than --block_size and will be cut")
    n_same = sum(source.n_same for source in (data.train, *data.val.values()))
    if n_same:
        print(f"{n_same:,} pairs are left out: cut to --block_size, their answers are the same")


def passes(settings: Settings, data: Data) -> float:
    """How often the steps of a run read its windows of text, or its conversations; of a mixture,
    those of the folder that is read most often."""
    return settings.max_iters * settings.batch_size / data.n_sequence


def format_figures(figures: dict[str, float]) -> str:
    """Figures for people: val loss 1.2923, tok per s 6,800."""
    shown = []
    for name, value in figures.items():
        number = f"{value:,.0f}" if value >= 1000 else f"{value:.5g}"
        if name == "recall":
            number = f"{value:.0%}"
        figure, slash, folder = name.partition("/")
        shown.append(f"{figure.replace('_', ' ')}{slash}{folder} {number}")
    return ", ".join(shown)


def report(
    settings: Settings, data: Data, model: Decoder, log: Log, best: tuple[float, int]
) -> None:
    """Say what a finished run has learned, log it, draw its losses, and say what to try next."""
    shares = report_recall(model, data)
    if shares:
        log.write(type="recall", step=settings.max_iters, **shares)
    files = ["metrics.jsonl", "loss.png"]
    if ranks.rank == 0:
        draw_loss(settings.out_dir)
    if (settings.out_dir / "best.pt").exists():
        files.insert(0, f"best.pt (val loss {best[0]:.4f}, step {best[1]})")
    # Not "wrote": a run that had finished, and was resumed, writes no checkpoint.
    print(f"the run is in {settings.out_dir / 'ckpt.pt'}, {', '.join(files)}\n")
    commands = show(model, data, settings.seed)
    if ranks.rank == 0:
        suggest(settings, data, best, commands)


def suggest(settings: Settings, data: Data, best: tuple[float, int], commands: list[str]) -> None:
    """Print what to try next: commands with the checkpoint, and a longer run, unless this one got
    worse."""
    ckpt = settings.out_dir / "ckpt.pt"
    evaluations = read_run(settings.out_dir)["eval"]
    lowest, step = min([best, *((record["val_loss"], record["step"]) for record in evaluations)])
    last = evaluations[-1]["val_loss"]
    is_worse = last > max(1.01 * lowest, lowest + 0.01)  # by more than it wavers
    if is_worse:
        advice = (
            "what the model learns by heart helps no other text. More text or fewer steps "
            f"(--max_iters {step}) end lower."
        )
        if step == 0:
            advice = f"no later step is below it. Lower --learning_rate {settings.learning_rate:g}."
        print(
            f"\nnote: the validation loss rose from {lowest:.4f} at step {step} to {last:.4f}: "
            f"{advice}"
        )
        if (settings.out_dir / "best.pt").exists():
            ckpt = settings.out_dir / "best.pt"
            print(f"{ckpt} has the weights of step {best[1]}")
    print("\nnext:")
    for command in commands:
        print(f"  {command_line(*command.split(), '--ckpt', ckpt)}")
    if not is_worse and settings.max_iters:
        longer = ("--resume", "--out_dir", settings.out_dir, "--max_iters", 2 * settings.max_iters)
        so_far = f"{passes(settings, data):.1f} passes so far"
        about = f"# longer (the learning rate rises again); {so_far}"
        print(f"  {command_line('train.py', *longer)}  {about}")


def report_recall(model: Decoder, data: Data) -> dict[str, float]:
    """Ask for what the corpus teaches. Prints and returns the shares that are right."""
    shares = recall.ask(model, data.encoding, data.corpora)
    if shares:
        text = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in shares.items())
        print(f"facts of the corpus: {text}")
    return shares


def show(model: Decoder, data: Data, seed: int) -> list[str]:
    """Print what the model adds to a prompt of the corpus, or to a question from the validation
    conversations. Returns commands to try."""
    encoding = data.encoding
    source = next(iter(data.val.values()))
    if isinstance(source, Windows):
        text, commands = recall.demo(model, data.corpora)
        prompt = tokenizer.encode(encoding, text)
        temperature = 0.8
    else:
        prompt, commands = source.question(), ["sample.py --chat"]
        temperature = 0.0
    # Without a `stop`, as ranks that do not end together would wait for each other forever.
    ids = torch.tensor([prompt], device=model.device)  # [1, T]
    new = model.generate(ids, 60, temperature=temperature, seed=seed)[0, len(prompt) :].tolist()
    said = tokenizer.until_end(encoding, new)
    print(encoding.decode(prompt[1:] + said))  # without the leading <|endoftext|>
    return commands
