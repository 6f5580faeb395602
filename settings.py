"""What can be set when training: presets, the flags of train.py, and their checks."""

import argparse
from dataclasses import fields
from pathlib import Path

import homes
from common import UserError, check_seed
from data import read_meta
from model import LAYERS, ModelConfig
from rowadam import adamw_travel

DEFAULT_DATA = Path("data/countries")

# Shapes with the settings they train well with. Any flag given on the command line wins.
# countries and prose are what two CPU cores train in minutes; the others are MiniMind's models
# (26M, 64M and 104M parameters when dense, head tied, 6,400 ids) and Embformer's published shape.
MINIMIND = dict(
    n_head=8, block_size=512, rope_base=1e6, tie_head=True, batch_size=64, max_iters=10_000,
    learning_rate=5e-4, eval_interval=500,
)  # fmt: skip
PRESETS = {
    "countries": dict(
        n_layer=6, n_head=6, n_embd=192, block_size=128, batch_size=8, max_iters=1000,
        learning_rate=3e-3, eval_interval=250, stem_layers="all",
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
MODEL_FLAGS = [field.name for field in fields(ModelConfig) if field.name != "vocab_size"]


def parse_args(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data_dir", type=Path, default=DEFAULT_DATA, help="made by prepare.py (%(default)s)")
    add("--out_dir", type=Path, default=Path("out"), help="where everything goes (%(default)s)")
    add(
        "--preset", choices=PRESETS, help="shape and settings; default: countries or prose, by data"
    )
    add("--resume", action="store_true", help="go on from ckpt.pt in --out_dir, its flags included")

    group = parser.add_argument_group("model (defaults from the preset)")
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
    add("--doc_mask", action="store_true", help="attention does not cross documents")
    add("--batch_size", type=int, help="sequences in a step, in all")
    add(
        "--device_batch_size",
        type=int,
        help="sequences on the device at a time: reduce if you run out of memory; gradients "
        "accumulate up to --batch_size, which it must divide (batch_size)",
    )
    add("--max_iters", type=int, help="optimizer steps")
    add("--learning_rate", type=float, help="peak, of the backbone")
    add("--schedule", choices=("cosine", "linear"), default="cosine", help="after warm-up (cosine)")
    add("--warmup", type=float, default=0.1, help="fraction of the steps (%(default)s)")
    add("--min_lr", type=float, default=0.1, help="fraction of the peak at the end (%(default)s)")
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
        help="learning rate of tables over the backbone's; default: 1 for adamw, for rowwise what "
        "lets a row move as far as adamw would (5.8, derived in rowadam.adamw_travel)",
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
    homes.add_flags(parser, training=True)
    args = parser.parse_args()
    # Which flags were given: a second parse leaves the marks of those that were not.
    absent = object()
    marked = parser.parse_args(namespace=argparse.Namespace(**dict.fromkeys(vars(args), absent)))
    args.given = [name for name, value in vars(marked).items() if value is not absent]
    return args


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Fill what the command line left open from the preset, and check the rest."""
    countries = read_meta(args.data_dir)["corpus"] == "countries"
    args.preset = args.preset or ("countries" if countries else "prose")
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.device_batch_size is None:
        args.device_batch_size = args.batch_size
    for name in ("batch_size", "device_batch_size", "max_iters", "eval_interval", "eval_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)} must be at least 1")
    check_seed(args.seed)
    homes.check_flags(args)
    if not args.learning_rate > 0:
        raise UserError(f"--learning_rate {args.learning_rate} must be positive")
    for name in ("weight_decay", "grad_clip"):
        if not getattr(args, name) >= 0:
            raise UserError(f"--{name} {getattr(args, name)} must be 0 or more")
    for name in ("warmup", "min_lr", "beta1", "beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise UserError(f"--{name} {getattr(args, name)} must be 0 or more and below 1")
    if args.beta1**2 >= args.beta2:  # else a row would travel without bound, see adamw_travel
        raise UserError(f"--beta1 {args.beta1} squared must be below --beta2 {args.beta2}")
    if args.table_lr_scale is None:
        rowwise = args.table_optimizer == "rowwise"
        args.table_lr_scale = adamw_travel((args.beta1, args.beta2)) if rowwise else 1.0
    if not args.table_lr_scale > 0:
        raise UserError(f"--table_lr_scale {args.table_lr_scale} must be positive")
    if args.batch_size % args.device_batch_size:
        raise UserError(
            f"--device_batch_size {args.device_batch_size} must divide "
            f"--batch_size {args.batch_size}"
        )
    return args


def resumed(args: argparse.Namespace, checkpoint: dict) -> argparse.Namespace:
    """The settings of the run in a checkpoint; of the command line's only where it may run."""
    may_change = ("resume", "out_dir", "data_dir", "device", "dtype", "compile")
    may_change += ("offload", "ring_slots", "gather", "cache_rows")
    other = [f"--{name}" for name in args.given if name not in may_change]
    if other:
        raise UserError(
            f"--resume goes on with the settings of {args.out_dir}/ckpt.pt: leave out "
            f"{', '.join(other)}, or start a new run with another --out_dir"
        )
    given = {name: getattr(args, name) for name in args.given}
    # Flags that are younger than the checkpoint have their defaults.
    merged = argparse.Namespace(
        **{**vars(args), **checkpoint["args"], **given, "out_dir": args.out_dir}
    )
    merged.data_dir = Path(merged.data_dir)  # whether it is the same text is checked later
    return merged
