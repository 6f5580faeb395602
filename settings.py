"""What can be set when training: presets, the flags of train.py, and their checks."""

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path

from common import UserError, add_offload, check_seed
from config import ModelConfig
from data import parse_mixture, read_meta
from model import LAYERS
from tablefile import DTYPES

DEFAULT_DATA = "data/countries"

# Shapes with the settings they train well with. Any flag given on the command line wins.
# countries and prose are what two CPU cores train in minutes; the others are MiniMind's models
# (26M, 64M and 104M parameters when dense, head tied, 6,400 ids) and Embformer's published shape.
# A key that is a stage's name holds what that stage does differently.
MINIMIND = dict(
    n_head=8, block_size=512, rope_base=1e6, tie_head=True, batch_size=64, max_iters=10_000,
    learning_rate=5e-4, eval_interval=500,
)  # fmt: skip
PRESETS = {
    "countries": dict(
        n_layer=6, n_head=6, n_embd=192, block_size=128, batch_size=8, max_iters=1000,
        learning_rate=3e-3, eval_interval=250, stem_layers="all",
        sft=dict(learning_rate=1.5e-3, batch_size=64, max_iters=300, eval_interval=75),
        dpo=dict(learning_rate=3e-5, batch_size=16),
    ),
    "prose": dict(
        n_layer=6, n_head=6, n_embd=192, block_size=256, batch_size=16, max_iters=250,
        learning_rate=3e-3, eval_interval=50,
    ),
    "minimind-26m": dict(MINIMIND, n_layer=8, n_embd=512, n_kv_head=2, d_ff=1408),
    "minimind-64m": dict(MINIMIND, n_layer=8, n_embd=768, n_kv_head=4, d_ff=2432),
    "minimind-104m": dict(MINIMIND, n_layer=16, n_embd=768, n_kv_head=2, d_ff=2048),
    "embformer-104m": dict(MINIMIND, n_layer=16, n_embd=768, n_kv_head=2, ffn="embformer"),
}  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """A stage of training: what it reads, and what it does differently from pretraining."""

    rows: str  # how the data is read (data.open_source): text, chat, preference
    kinds: tuple[str, ...]  # of data (prepare.py) that can be read so
    lr: float = 1.0  # peak learning rate over pretraining's
    epochs: int | None = None  # passes over the data, where the number of steps depends on it
    settings: dict = field(default_factory=dict)


# Learning rates of sft and dpo are MiniMind's (1e-5 and 4e-8 after 5e-4); the stages that go on
# with plain text begin where a cosine to 0.1 has ended.
STAGES = {
    "pretrain": Stage("text", ("text", "chat")),
    "midtrain": Stage(
        "text", ("text", "chat"), 0.1, settings=dict(schedule="linear", warmup=0.0, min_lr=0.0)
    ),
    "context": Stage("text", ("text", "chat"), 0.1, settings=dict(doc_mask=True)),
    "sft": Stage("chat", ("chat",), 0.02, epochs=2),
    "dpo": Stage("preference", ("preference",), 8e-5, epochs=1),
}
DEFAULTS = dict(schedule="cosine", warmup=0.1, min_lr=0.1, doc_mask=False)
# What train.py may set in a model. A field without a flag keeps its default.
MODEL_FIELDS = [field.name for field in fields(ModelConfig) if field.name != "vocab_size"]
# Flags that a dense model has no use for.
OF_TABLES = ("table_std", "table_optimizer", "table_lr_scale", "table_dtype", "offload")


def parse_args(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--data_dir",
        default=DEFAULT_DATA,
        help="made by prepare.py, or a mixture of such by weight: a=0.65,b=0.35 (%(default)s)",
    )
    add("--out_dir", type=Path, default=Path("out"), help="where everything goes (%(default)s)")
    add(
        "--preset", choices=PRESETS, help="shape and settings; default: countries or prose, by data"
    )
    add(
        "--stage",
        choices=STAGES,
        default="pretrain",
        help="what to do: pretrain; all others go on from --init_from: midtrain (linear decay), "
        "context (longer --block_size), sft (conversations), dpo (preferences) (%(default)s)",
    )
    add("--init_from", type=Path, metavar="CKPT", help="start from the model in this checkpoint")
    add("--resume", action="store_true", help="go on from ckpt.pt in --out_dir, its flags included")

    group = parser.add_argument_group("model (defaults: the preset's, or --init_from's)")
    add = group.add_argument
    add("--ffn", choices=LAYERS, help="what the layers are made of (stem)")
    add("--stem_layers", help="third, half, all (but layer 0) or 0,2,5 (all; third for prose)")
    add("--embformer_act", choices=("silu", "identity"), help="activation of its FFN (silu)")
    add("--n_layer", type=int, help="number of layers")
    add("--n_head", type=int, help="number of attention heads")
    add("--n_kv_head", type=int, help="key-value heads; fewer than n_head groups queries (n_head)")
    add("--n_embd", type=int, help="width of the residual stream")
    add("--d_ff", type=int, help="width of the FFN (8/3 n_embd, rounded up to 64s)")
    add("--block_size", type=int, help="context length in tokens")
    add("--tie_head", action=argparse.BooleanOptionalAction, help="head = input embedding")
    add("--rope_base", type=float, help="base of the rotary positions (10000)")
    add("--norm_eps", type=float, help="epsilon of the norms (1e-6)")
    add("--init_std", type=float, help="standard deviation of new dense weights (0.02)")
    add("--table_std", type=float, help="standard deviation of new table rows (0.02)")

    group = parser.add_argument_group("training (defaults from the preset)")
    add = group.add_argument
    add(
        "--doc_mask",
        action=argparse.BooleanOptionalAction,
        help="attention does not cross documents (on in stage context)",
    )
    add("--batch_size", type=int, help="sequences in a step, in all; for dpo pairs of them")
    add(
        "--device_batch_size",
        type=int,
        help="sequences on the device at a time: reduce if you run out of memory; gradients "
        "accumulate up to --batch_size, which it must divide; free to change at --resume "
        "(batch_size)",
    )
    add("--max_iters", type=int, help="optimizer steps (sft: two passes over the data, dpo: one)")
    add("--learning_rate", type=float, help="peak, of the backbone")
    add("--schedule", choices=("cosine", "linear"), help="after warm-up (cosine; midtrain: linear)")
    add("--warmup", type=float, help="fraction of the steps (0.1; midtrain: 0)")
    add("--min_lr", type=float, help="fraction of the peak at the end (0.1; midtrain: 0)")
    add(
        "--beta",
        type=float,
        default=0.15,
        help="of dpo: the higher, the less the model may leave the reference (%(default)s)",
    )
    add("--weight_decay", type=float, default=0.1, help="of linear layers (%(default)s)")
    add("--beta1", type=float, default=0.9, help="of both optimizers (%(default)s)")
    add("--beta2", type=float, default=0.95, help="of both optimizers (%(default)s)")
    add("--grad_clip", type=float, default=1.0, help="largest gradient norm; 0: off (%(default)s)")
    add(
        "--table_optimizer",
        choices=("rowwise", "adamw"),
        default="rowwise",
        help="rowwise touches the batch's rows only, adamw whole tables, as a baseline (rowwise)",
    )
    add(
        "--table_lr_scale",
        type=float,
        default=1.0,
        help="learning rate of tables over the backbone's (%(default)s: rowwise derives for each "
        "row by itself how far adamw would move it, see rowadam.expected_travel)",
    )
    add("--eval_interval", type=int, help="steps between evaluations and checkpoints")
    add("--eval_tokens", type=int, default=65536, help="validation tokens to look at (%(default)s)")

    group = parser.add_argument_group("machine")
    add = group.add_argument
    add("--device", default="auto", help="auto (cuda, mps, cpu in that order) or one of them")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of activations, by autocast; weights stay float32 (auto: bfloat16 on CUDA)",
    )
    add("--compile", action="store_true", help="torch.compile each block: slow start, faster steps")
    add("--seed", type=int, default=1337, help="of weights and data order (%(default)s)")
    add_offload(parser)
    parser.add_argument(
        "--table_dtype",
        choices=DTYPES,
        default="float32",
        help="of rows; bfloat16 halves them, and rounds stochastically (float32)",
    )
    args = parser.parse_args()
    # Which flags were given: a second parse leaves the marks of those that were not.
    absent = object()
    marked = parser.parse_args(namespace=argparse.Namespace(**dict.fromkeys(vars(args), absent)))
    args.given = [name for name, value in vars(marked).items() if value is not absent]
    return args


def complete(args: argparse.Namespace, base: dict | None = None) -> argparse.Namespace:
    """Fill what the command line left open, and check the rest.

    What is asked for comes first, then the model of --init_from (`base`, a checkpoint), the stage's
    part of the preset, the stage, the preset.
    """
    stage, parts = STAGES[args.stage], parse_mixture(args.data_dir)
    metas = [read_meta(folder) for folder, _ in parts]
    for (folder, _), meta in zip(parts, metas, strict=True):
        if meta["kind"] not in stage.kinds:
            raise UserError(
                f"--stage {args.stage} reads {' or '.join(stage.kinds)} data, --data_dir {folder} "
                f"holds {meta['kind']} data: choose another stage or folder"
            )
    if stage.rows != "text" and len(parts) > 1:
        raise UserError(f"--data_dir {args.data_dir}: --stage {args.stage} reads one folder")
    if args.stage != "pretrain" and not args.resume and base is None:
        raise UserError(
            f"--stage {args.stage} goes on with a trained model: name its checkpoint with "
            "--init_from"
        )
    if args.preset is None:
        made = base["args"]["preset"] if base else None
        countries = metas[0]["corpus"] == "countries"
        args.preset = made or ("countries" if countries else "prose")
    preset = PRESETS[args.preset]
    defaults = {**DEFAULTS, **preset, "learning_rate": preset["learning_rate"] * stage.lr}
    if stage.epochs:
        defaults.update(max_iters=None, eval_interval=None)
    defaults.update(stage.settings)
    if metas[0]["corpus"].startswith(args.preset):  # those of countries are for countries-sft alone
        defaults.update(preset.get(args.stage, {}))
    if base:
        defaults.update(inherited(args, base["config"]))
    for name, value in defaults.items():
        if name not in STAGES and getattr(args, name, None) is None:
            setattr(args, name, value)
    ffn = args.ffn or ModelConfig.ffn
    at_stage, with_ffn = f"in --stage {args.stage}", f"with --ffn {ffn}"
    for name, useful, where in (
        ("beta", args.stage == "dpo", at_stage),
        ("doc_mask", stage.rows == "text", at_stage),
        ("stem_layers", ffn == "stem", with_ffn),
        ("embformer_act", ffn not in ("dense", "stem"), with_ffn),  # an FFN of one's own may use it
        ("d_ff", ffn != "embformer", with_ffn),
        *((name, ffn != "dense", with_ffn) for name in OF_TABLES),
    ):
        if name in args.given and not useful and not args.resume:
            raise UserError(f"--{name} changes nothing {where}: leave it out")
    if args.max_iters is None:
        rows = metas[0]["train"]["documents"] // (2 if stage.rows == "preference" else 1)
        args.max_iters = max(1, stage.epochs * rows // max(1, args.batch_size))
    if args.eval_interval is None:
        args.eval_interval = max(1, args.max_iters // 4)
    if args.device_batch_size is None:
        args.device_batch_size = args.batch_size
    for name in ("batch_size", "device_batch_size", "max_iters", "eval_interval", "eval_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)} must be at least 1")
    check_seed(args.seed)
    if args.table_optimizer == "adamw":
        for name, plain in (("offload", "none"), ("table_dtype", "float32")):
            if getattr(args, name) != plain:
                raise UserError(
                    f"--{name} {getattr(args, name)} needs --table_optimizer rowwise: adamw moves "
                    "all rows of a table in every step"
                )
    if not args.learning_rate > 0:
        raise UserError(f"--learning_rate {args.learning_rate} must be positive")
    if not args.beta > 0:
        raise UserError(f"--beta {args.beta} must be positive")
    for name in ("weight_decay", "grad_clip"):
        if not getattr(args, name) >= 0:
            raise UserError(f"--{name} {getattr(args, name)} must be 0 or more")
    for name in ("warmup", "min_lr", "beta1", "beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)} must be 0 or more and below 1")
    if args.beta1**2 >= args.beta2:  # else a row would travel without bound, see expected_travel
        raise UserError(f"--beta1 {args.beta1} squared must be below --beta2 {args.beta2}")
    if not args.table_lr_scale > 0:
        raise UserError(f"--table_lr_scale {args.table_lr_scale} must be positive")
    if args.batch_size % args.device_batch_size:
        raise UserError(
            f"--device_batch_size {args.device_batch_size} must divide "
            f"--batch_size {args.batch_size}"
        )
    return args


def inherited(args: argparse.Namespace, config: dict) -> dict:
    """The shape of the model in --init_from. Only the context length may change: positions are
    rotary, so no weight depends on it."""
    # Fields that are younger than the checkpoint have their defaults.
    shape = {name: config.get(name, getattr(ModelConfig, name)) for name in MODEL_FIELDS}
    free = ("block_size", "rope_base")
    fixed = [name for name in MODEL_FIELDS if name in args.given and name not in free]
    if fixed:
        raise UserError(
            f"--{fixed[0]} is given by the model in --init_from {args.init_from} "
            f"({shape[fixed[0]]}): leave it out"
        )
    if args.stage == "context":
        growth = (args.block_size or 0) / config["block_size"]
        if growth <= 1:
            raise UserError(
                f"--stage context needs a --block_size above the {config['block_size']} of "
                f"{args.init_from}"
            )
        # The slowest rotation covers the longer context by the angle it covered the shorter one by
        # ("NTK-aware" scaling), the fastest stays what it is.
        head_dim = config["n_embd"] // config["n_head"]
        shape["rope_base"] *= growth ** (head_dim / max(1, head_dim - 2))
    return shape


def resumed(args: argparse.Namespace, checkpoint: dict) -> argparse.Namespace:
    """The settings of the run in a checkpoint; of the command line's only where it may run."""
    may_change = ("resume", "out_dir", "data_dir", "device", "dtype", "compile")
    may_change += ("device_batch_size",)  # a step still sees the same batch, summed in other parts
    may_change += ("offload",)
    other = [f"--{name}" for name in args.given if name not in may_change]
    if other:
        raise UserError(
            f"--resume goes on with the settings of {args.out_dir}/ckpt.pt: leave out "
            f"{', '.join(other)}, or start a new run with another --out_dir, from this model with "
            f"--init_from {args.out_dir}/ckpt.pt"
        )
    given = {name: getattr(args, name) for name in args.given}
    # Flags that are younger than the checkpoint have their defaults; those that went are forgotten.
    saved = {name: value for name, value in checkpoint["args"].items() if name in vars(args)}
    settings = {**vars(args), **saved, **given, "out_dir": args.out_dir}
    return argparse.Namespace(**settings)
