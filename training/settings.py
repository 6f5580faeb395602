"""What can be set when training: presets, stages, and the way from flags to settings."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from common import UserError, add_flags, check_ranges, flag, make_parser
from config import KINDS, POSITIVE, SHARE, SIZE, TABLES, ModelConfig
from tables.storage import DTYPES

# Model shapes, with settings that train them well: two for minutes on two CPU cores, MiniMind's
# models (26M, 64M, 104M parameters when dense, head tied, 6,400 ids), Embformer's published shape.
SMALL = dict(n_layer=6, n_head=4, n_embd=128, batch_size=8)
MINIMIND = dict(
    n_head=8,
    block_size=512,
    rope_base=1e6,
    tie_head=True,
    batch_size=64,
    max_iters=10_000,
    learning_rate=5e-4,
    eval_interval=500,
)
# Activations of 16 layers take 379 MiB a sequence.
MINIMIND_DEEP = dict(MINIMIND, n_layer=16, n_embd=768, n_kv_head=2, device_batch_size=16)
PRESETS = {
    "countries": dict(
        SMALL,
        block_size=128,
        stem_layers="all",
        max_iters=700,  # reads 68 % of the text once
        learning_rate=3e-3,
        eval_interval=140,
    ),
    "prose": dict(SMALL, block_size=256, max_iters=250, learning_rate=6e-3, eval_interval=50),
    "minimind-26m": dict(MINIMIND, n_layer=8, n_embd=512, n_kv_head=2, d_ff=1408),
    "minimind-64m": dict(MINIMIND, n_layer=8, n_embd=768, n_kv_head=4, d_ff=2432),
    "minimind-104m": dict(MINIMIND_DEEP, d_ff=2048),
    "embformer-104m": dict(MINIMIND_DEEP, ffn="embformer"),
}


@dataclass
class Stage:
    """How a stage differs from pretraining; MiniMind fine-tunes at 1e-5 after 5e-4."""

    reads: str = "text"  # the kind of sequences, see batches.Data
    rate: float = 1.0  # peak learning rate, over that of pretraining
    epochs: int | None = None  # passes over the data, in place of max_iters
    settings: dict = field(default_factory=dict)


STAGES = {
    "pretrain": Stage(),
    "midtrain": Stage(rate=0.1, settings=dict(schedule="linear", warmup=0.0, min_lr=0.0)),
    "context": Stage(rate=0.1, settings=dict(doc_mask=True)),
    "sft": Stage(reads="chat", rate=0.02, epochs=2),
}
# Settings for fine-tuning preset P in stage S, if the corpus is called P-S.
FINE_TUNING = {
    "countries-sft": dict(learning_rate=1.5e-3, batch_size=64, max_iters=300, eval_interval=75)
}
# Flags allowed with --resume, as they change how a run computes, not what, or with --eval_only.
MACHINE_FLAGS = ("data_dir", "offload", "device", "dtype", "device_batch_size")
RESUMABLE_FLAGS = (*MACHINE_FLAGS, "resume", "out_dir", "compile", "verify")
EVAL_FLAGS = (*MACHINE_FLAGS, "eval_only", "init_from", "out_dir", "eval_tokens")
TEXT = "pretrain midtrain context"  # stages that read text


def device_flag() -> str:
    return flag("auto", "auto (cuda if available, else cpu), cuda, cuda:1, cpu, mps")


def offload_flag(**more) -> str:
    about = "where to keep tables: none: on the device, cpu: in RAM, disk: in files"
    return flag("none", about, choices=("none", "cpu", "disk"), **more)


def decoding_dtype_flag() -> str:
    about = "dtype of weights and cache; auto: bfloat16 on GPUs that support it"
    return flag("auto", about, choices=("auto", "float32", "bfloat16"))


@dataclass
class Settings:
    """A training run, complete and checked: all that train.py needs to know."""

    data_dir: str = flag("data/countries", "from prepare.py, or a mixture by weight: a=0.65,b=0.35")
    out_dir: Path = flag(Path("out"), "output folder")
    preset: str = flag(
        "countries",
        "model shape and training settings",
        choices=PRESETS,
        shown="--init_from's; else countries for that corpus, prose for other text",
    )
    stage: str = flag(
        "pretrain",
        "pretrain; others need --init_from: midtrain (linear decay), context (longer "
        "--block_size), sft (conversations)",
        choices=STAGES,
    )
    init_from: Path | None = flag(None, "start from the weights of this ckpt.pt")
    resume: bool = flag(False, "continue from ckpt.pt in --out_dir, with the flags of that run")
    eval_only: bool = flag(False, "only report validation loss of --init_from (or --out_dir)")
    verify: bool = flag(True, "verify the checkpoint's checksums", shown="yes")

    doc_mask: bool = flag(
        False, "no attention across documents", shown="on in stage context", only=TEXT
    )
    batch_size: int = flag(8, "sequences per step", shown="the preset's", **SIZE)
    device_batch_size: int | None = flag(
        None,
        "sequences per forward pass; must divide --batch_size; reduce if out of memory",
        shown="the preset's, or all",
        **SIZE,
    )
    max_iters: int = flag(
        1000, "optimizer steps", shown="the preset's; sft: 2 epochs", must="0 or more"
    )
    learning_rate: float = flag(
        3e-3,
        "peak learning rate",
        shown="the preset's; midtrain, context: a tenth; sft: a fiftieth",
        **POSITIVE,
    )
    schedule: str = flag(
        "cosine", "shape of the decay; midtrain: linear", choices=("cosine", "linear")
    )
    warmup: float = flag(
        0.1, "length of the warm-up, as a fraction of the steps", shown="0.1; midtrain: 0", **SHARE
    )
    min_lr: float = flag(
        0.1, "final learning rate, as a fraction of the peak", shown="0.1; midtrain: 0", **SHARE
    )
    weight_decay: float = flag(0.1, "weight decay of linear layers", must="0 or more")
    beta1: float = flag(0.9, "decay of AdamW's first moment", **SHARE)
    beta2: float = flag(0.95, "decay of second moments", **SHARE)
    grad_clip: float = flag(1.0, "largest gradient norm; 0: off", must="0 or more")
    table_optimizer: str = flag(
        "rmsprop",
        "rmsprop: only rows that were read; adamw: all rows, every step",
        choices=("rmsprop", "adamw"),
        only=TABLES,
    )
    table_state: str | None = flag(
        None,
        "rmsprop's second moments: one per row or one per number",
        choices=("row", "number"),
        shown="row; embformer: number",
        only=TABLES,
    )
    table_rate: float = flag(
        1.0,
        "learning rate of tables, as a multiple of --learning_rate; 0: rows stay as drawn",
        must="0 or more",
        only=TABLES,
    )
    offload: str = offload_flag(only=TABLES)
    table_dtype: str = flag(
        "float32", "dtype of table rows; bfloat16 halves their size", choices=DTYPES, only=TABLES
    )
    eval_interval: int = flag(
        250,
        "steps between evaluations, each with a checkpoint",
        shown="the preset's",
        must="at least 1",
    )
    eval_tokens: int = flag(65536, "validation tokens per evaluation", must="at least 1")
    device: str = device_flag()
    dtype: str = flag(
        "auto",
        "autocast dtype; auto: the fastest on this device",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    compile: bool = flag(False, "torch.compile each block: slow start, faster steps")
    seed: int = flag(1337, "for weights and data order", must="0 or more, and fit 63 bits")

    model: ModelConfig = field(default_factory=ModelConfig)  # vocab_size is the data's

    def __post_init__(self) -> None:
        self.out_dir = Path(self.out_dir)
        if self.init_from is not None:
            self.init_from = Path(self.init_from)
        if self.device_batch_size is None:
            self.device_batch_size = self.batch_size
        if self.table_state is None:
            # Embformer consists of rows: they need one second moment per number.
            self.table_state = "number" if self.model.ffn == "embformer" else "row"
        check_ranges(self)
        if self.batch_size % self.device_batch_size:
            part = f"--device_batch_size {self.device_batch_size}"
            raise UserError(f"{part} must divide --batch_size {self.batch_size}")
        if self.compile and self.model.ffn in ("moe", "hash_moe"):
            raise UserError(f"--compile does not work with --ffn {self.model.ffn}: leave it out")
        is_plain = self.offload == "none" and self.table_dtype == "float32"
        if self.table_optimizer == "adamw" and not (is_plain and self.table_rate == 1):
            needs = "--offload none, --table_dtype float32, --table_rate 1"
            raise UserError(f"--table_optimizer adamw needs {needs}")

    def flat(self) -> dict:
        """All settings by name, as checkpoints and records keep them."""
        flat = asdict(self)
        flat.update(flat.pop("model"))
        for name in ("out_dir", "init_from"):
            if flat[name] is not None:
                flat[name] = str(flat[name])
        return flat

    @classmethod
    def from_flat(cls, flat: dict) -> "Settings":
        """The inverse of `flat`; what is missing has its default. UserError: a value is wrong."""
        shape = {f.name: flat[f.name] for f in fields(ModelConfig) if f.name in flat}
        of_run = {name: value for name, value in flat.items() if name not in shape}
        return cls(**of_run, model=ModelConfig(**shape))


def parse_args(description: str) -> dict:
    """The flags that the command line gives."""
    parser = make_parser(description)
    add_flags(parser, Settings)
    add_flags(
        parser.add_argument_group("model (defaults: --init_from's or the preset's)"), ModelConfig
    )
    return vars(parser.parse_args())


def new_settings(given: dict, meta: dict, base: dict | None) -> Settings:
    """The settings of a new run: the flags that are given come first, then the model of --init_from
    and what the stage, the corpus and the preset say.

    Args:
        given: flags by name.
        meta: of the first folder of --data_dir (text/dataset.py).
        base: the checkpoint named by --init_from.
    """
    name = given.get("stage", "pretrain")
    stage = STAGES[name]
    if base is None and name != "pretrain":
        raise UserError(f"--stage {name} starts from a trained model: give one with --init_from")

    # 1) the preset
    preset = "countries" if meta["corpus"] == "countries" else "prose"
    if base is not None:
        preset = base["args"]["preset"]
    preset = given.get("preset", preset)
    values = {"ffn": ModelConfig.ffn, **PRESETS[preset], "preset": preset, "stage": name}

    # 2) the stage
    values["learning_rate"] *= stage.rate
    if stage.epochs is not None:
        del values["max_iters"], values["eval_interval"]
    values.update(stage.settings)
    if meta["corpus"] == f"{preset}-{name}":
        values.update(FINE_TUNING[meta["corpus"]])

    # 3) the model of --init_from, and what was given
    if base is not None:
        values.update(inherited_shape(given, base["config"]))
    values.update(given)
    check_effect(given, values)
    # The preset's --device_batch_size may not divide another --batch_size.
    is_preset = "device_batch_size" in values and "device_batch_size" not in given
    if is_preset and values["batch_size"] % values["device_batch_size"]:
        del values["device_batch_size"]
    if "max_iters" not in values:
        steps_per_epoch = meta["train"]["documents"] // max(1, values["batch_size"])
        values["max_iters"] = max(1, stage.epochs * steps_per_epoch)
    values.setdefault("eval_interval", max(1, values["max_iters"] // 4))
    return Settings.from_flat(values)


def check_effect(given: dict, values: dict) -> None:
    """UserError: a flag is given that has no effect with this --ffn or --stage."""
    for setting in (*fields(Settings), *fields(ModelConfig)):
        only = setting.metadata.get("only", "").split()
        if not only or setting.name not in given:
            continue
        chooser = "stage" if only[0] in STAGES else "ffn"
        chosen = values[chooser]
        # A layer of your own may use any flag but --stem_layers: it is in all layers.
        is_own = chooser == "ffn" and chosen not in KINDS.split()
        if is_own and setting.name != "stem_layers":
            continue
        if chosen not in only:
            raise UserError(f"--{setting.name} has no effect with --{chooser} {chosen}")


def inherited_shape(given: dict, config: dict) -> dict:
    """The shape of the model in --init_from. Only what no weight depends on may change, such as the
    context length, as positions are rotary."""
    shape = asdict(ModelConfig(**config))
    for name in given:
        if name in shape and name not in ("block_size", "rope_base", "dropout"):
            raise UserError(f"--{name} is set by the model in --init_from: leave it out")
    if given.get("stage") == "context":
        before = shape["block_size"]
        growth = given.get("block_size", 0) / before
        if growth <= 1:
            raise UserError(f"--stage context needs a --block_size above the model's {before}")
        # The slowest rotation covers the longer context by the angle it covered the shorter one by
        # ("NTK-aware" scaling); the fastest stays the same.
        head_dim = shape["n_embd"] // shape["n_head"]
        shape["rope_base"] *= growth ** (head_dim / max(1, head_dim - 2))
    return shape


def resumed_settings(given: dict, args: dict) -> Settings:
    """The settings `args` of the checkpoint to resume, and the flags that may change."""
    check_allowed(given, (*RESUMABLE_FLAGS, "max_iters"))
    return Settings.from_flat({**args, "verify": True, **given})


def eval_settings(given: dict, args: dict) -> Settings:
    """The settings `args` of the checkpoint to evaluate, and the flags that may change."""
    check_allowed(given, EVAL_FLAGS)
    settings = {**args, "offload": "none", "device": "auto", **given}
    if "device_batch_size" in given:  # it need not divide the run's
        settings["batch_size"] = given["device_batch_size"]
    return Settings.from_flat(settings)


def check_allowed(given: dict, allowed: tuple[str, ...]) -> None:
    other = [f"--{name}" for name in given if name not in allowed]
    if other:
        raise UserError(f"{', '.join(other)}: not with --resume or --eval_only, leave it out")
