"""What can be set when training: presets, stages, the settings of a run, and the way from flags."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from common import UserError, add_flags, check_ranges, flag, make_parser
from config import KINDS, POSITIVE, SHARE, SIZE, TABLES, ModelConfig
from tables.storage import DTYPES
from training.batches import parse_mixture, read_meta
from training.checkpoints import checkpoint_errors, device_flag, load_checkpoint, offload_flag

# Shapes with settings they train well with: for minutes on two CPU cores, MiniMind's models (26M,
# 64M, 104M parameters when dense, head tied, 6,400 ids), and Embformer's published shape.
MINIMIND = dict(
    n_head=8, block_size=512, rope_base=1e6, tie_head=True, batch_size=64, max_iters=10_000,
    learning_rate=5e-4, eval_interval=500,
)  # fmt: skip
SMALL = dict(n_layer=6, n_head=4, n_embd=128, batch_size=8)
PRESETS = {
    "countries": dict(
        SMALL, block_size=128, max_iters=1000, learning_rate=3e-3, eval_interval=250,
        stem_layers="all",
    ),
    "prose": dict(SMALL, block_size=256, max_iters=250, learning_rate=6e-3, eval_interval=50),
    "minimind-26m": dict(MINIMIND, n_layer=8, n_embd=512, n_kv_head=2, d_ff=1408),
    "minimind-64m": dict(MINIMIND, n_layer=8, n_embd=768, n_kv_head=4, d_ff=2432),
    "minimind-104m": dict(MINIMIND, n_layer=16, n_embd=768, n_kv_head=2, d_ff=2048),
    "embformer-104m": dict(MINIMIND, n_layer=16, n_embd=768, n_kv_head=2, ffn="embformer"),
}  # fmt: skip
# What stages read (batches.Data), their peak learning rate over pretraining's (MiniMind's 1e-5 and
# 4e-8 after 5e-4; text goes on where a cosine to 0.1 has ended), passes over the data, settings.
STAGES = {
    "pretrain": dict(rows="text"),
    "midtrain": dict(rows="text", lr=0.1, schedule="linear", warmup=0.0, min_lr=0.0),
    "context": dict(rows="text", lr=0.1, doc_mask=True),
    "sft": dict(rows="chat", lr=0.02, epochs=2),
    "dpo": dict(rows="preference", lr=8e-5, epochs=1),
}
# What a preset does differently in a stage, on the corpus of this name.
FINE_TUNING = {
    "countries-sft": dict(learning_rate=1.5e-3, batch_size=64, max_iters=300, eval_interval=75),
    "countries-dpo": dict(learning_rate=3e-5, batch_size=16),
}
# What may be given beside a checkpoint that is evaluated, or resumed to the same result.
BOTH = ("data_dir", "offload", "device", "dtype", "device_batch_size")
EVAL_FLAGS = (*BOTH, "eval_only", "init_from", "out_dir", "eval_tokens")
RESUMABLE_FLAGS = (*BOTH, "resume", "out_dir", "compile", "verify")
PRECISIONS = ("auto", "float32", "bfloat16", "float16")
COUNT, ZERO, TEXT = dict(must="at least 1"), dict(must="0 or more"), "pretrain midtrain context"


@dataclass
class Settings:
    """A training run, complete and checked: all that train.py needs to know."""

    data_dir: str = flag("data/countries", "from prepare.py, or a mixture by weight: a=0.65,b=0.35")
    out_dir: Path = flag(Path("out"), "where everything goes")
    preset: str = flag("countries", "shape and settings", choices=PRESETS, shown="by data")
    stage: str = flag(
        "pretrain",
        "what to do: pretrain; all others go on from --init_from: midtrain (linear decay), context "
        "(longer --block_size), sft (conversations), dpo (preferences)",
        choices=STAGES,
    )
    init_from: Path | None = flag(None, "start from this checkpoint or Hugging Face folder")
    convert_tokens: int = flag(10**6, "text to fill rows from; 0: random", only="stem", **ZERO)
    convert_prior: float = flag(0.0, "weight of their mean in all", only="stem", **ZERO)
    resume: bool = flag(False, "go on from ckpt.pt in --out_dir, its flags included")
    eval_only: bool = flag(False, "print what --init_from, or --out_dir, loses on --data_dir a,b")
    verify: bool = flag(True, "check the checksums of what it starts or goes on from", shown="yes")

    doc_mask: bool = flag(False, "no attention across documents", shown="in context", only=TEXT)
    batch_size: int = flag(8, "sequences in a step, for dpo pairs", shown="the preset's", **SIZE)
    device_batch_size: int | None = flag(
        None, "on the device at a time: fewer take less memory; a divisor", shown="all", **SIZE
    )
    max_iters: int = flag(1000, "optimizer steps", shown="preset's; sft 2 epochs, dpo 1", **ZERO)
    learning_rate: float = flag(3e-3, "peak, of the backbone", shown="the preset's", **POSITIVE)
    schedule: str = flag("cosine", "decay; midtrain: linear", choices=("cosine", "linear"))
    warmup: float = flag(0.1, "fraction of the steps", shown="0.1; midtrain: 0", **SHARE)
    min_lr: float = flag(0.1, "share of the peak at the end", shown="0.1; midtrain: 0", **SHARE)
    beta: float = flag(0.15, "how much holds the model to the reference", only="dpo", **POSITIVE)
    weight_decay: float = flag(0.1, "of linear layers", must="0 or more")
    beta1: float = flag(0.9, "of both optimizers", **SHARE)
    beta2: float = flag(0.95, "of both optimizers", **SHARE)
    grad_clip: float = flag(1.0, "largest gradient norm; 0: off", must="0 or more")
    table_optimizer: str = flag(
        "rowwise", "adamw moves all rows, read or not", choices=("rowwise", "adamw"), only=TABLES
    )
    offload: str = offload_flag(only=TABLES)
    table_dtype: str = flag("float32", "of rows; bfloat16: half", choices=DTYPES, only=TABLES)
    eval_interval: int = flag(250, "steps between checkpoints", shown="the preset's", **COUNT)
    eval_tokens: int = flag(65536, "validation tokens to look at", **COUNT)
    device: str = device_flag()
    dtype: str = flag("auto", "of products; auto: 16 bits on CUDA", choices=PRECISIONS)
    compile: bool = flag(False, "torch.compile each block: slow start, faster steps")
    seed: int = flag(1337, "of weights and data order", must="0 or more, and fit 63 bits")

    model: ModelConfig = field(default_factory=ModelConfig)  # vocab_size is the data's

    def __post_init__(self) -> None:
        self.out_dir = Path(self.out_dir)
        self.init_from = self.init_from and Path(self.init_from)
        check_ranges(self)
        self.device_batch_size = self.device_batch_size or self.batch_size
        if self.beta1**2 >= self.beta2:  # else rows would move without bound: expected_update_scale
            raise UserError(f"--beta1 {self.beta1} squared must be below --beta2 {self.beta2}")
        if self.batch_size % self.device_batch_size:
            part, whole = self.device_batch_size, self.batch_size
            raise UserError(f"--device_batch_size {part} must divide --batch_size {whole}")
        if self.compile and self.model.ffn.endswith("moe"):
            raise UserError(f"--compile cannot follow tokens to the experts of {self.model.ffn}")
        where = (self.offload, self.table_dtype)
        if self.table_optimizer == "adamw" and where != ("none", "float32"):
            raise UserError("--table_optimizer adamw needs --offload none, --table_dtype float32")

    def flat(self) -> dict:
        """All settings by name, as checkpoints and records keep them."""
        flat = asdict(self)
        flat |= flat.pop("model")
        return {k: str(v) if isinstance(v, Path) else v for k, v in flat.items()}

    @classmethod
    def of(cls, flat: dict) -> "Settings":
        """The inverse of `flat`; what is missing has its default. UserError: a value is wrong."""
        shape = {each.name: flat[each.name] for each in fields(ModelConfig) if each.name in flat}
        try:
            model = ModelConfig(**shape)
        except ValueError as error:
            raise UserError(f"--{error}") from None
        return cls(**{k: v for k, v in flat.items() if k not in shape}, model=model)


def parse_args(description: str) -> dict:
    """The flags that the command line gives."""
    parser = make_parser(description)
    add_flags(parser, Settings)
    add_flags(parser.add_argument_group("model (--init_from's, or by preset)"), ModelConfig)
    return vars(parser.parse_args())


def resolve_settings(**given) -> Settings:
    """The settings of a run from the flags that are given: these come first, then the model of
    --init_from, the stage's part of the preset, the stage, the preset."""
    if given.get("resume") or given.get("eval_only"):
        return saved_settings(given)
    name, origin = given.get("stage", "pretrain"), given.get("init_from")
    meta = read_meta(next(iter(parse_mixture(given.get("data_dir", Settings.data_dir)))))
    preset, shape = "countries" if meta["corpus"] == "countries" else "prose", {}
    if origin:
        with checkpoint_errors(origin):
            base = load_checkpoint(origin)
            preset, shape = base["args"]["preset"], inherited(given, base["config"])
    elif name != "pretrain":
        raise UserError(f"--stage {name} goes on with a trained model: name it with --init_from")
    preset = given.get("preset", preset)
    values = {**PRESETS[preset], **STAGES[name]}
    rows, epochs = values.pop("rows"), values.pop("epochs", None)
    values["learning_rate"] *= values.pop("lr", 1.0)
    if epochs:
        del values["max_iters"], values["eval_interval"]
    if meta["corpus"] == f"{preset}-{name}":
        values |= FINE_TUNING[meta["corpus"]]
    values |= {"preset": preset, "stage": name, "ffn": ModelConfig.ffn, **shape, **given}
    for each in (*fields(Settings), *fields(ModelConfig)):
        only = each.metadata.get("only", "").split()
        if only and each.name in given:
            chosen = "stage" if only[0] in STAGES else "ffn"
            if values[chosen] in {*STAGES, *KINDS.split()} - {*only}:  # your own kind heeds all
                raise UserError(f"--{each.name} changes nothing with --{chosen} {values[chosen]}")
    if "max_iters" not in values:
        n_row = meta["train"]["documents"] // (2 if rows == "preference" else 1)
        values["max_iters"] = max(1, epochs * n_row // max(1, values["batch_size"]))
    values.setdefault("eval_interval", max(1, values["max_iters"] // 4))
    return Settings.of(values)


def saved_settings(given: dict) -> Settings:
    """The settings of the checkpoint to resume or to evaluate, and the flags that may change."""
    path = Path(given.get("out_dir", Settings.out_dir)) / "ckpt.pt"
    allowed, new = (*RESUMABLE_FLAGS, "max_iters"), dict(out_dir=path.parent, verify=True)
    if given.get("eval_only"):
        path = given.get("init_from", path)
        allowed, new = EVAL_FLAGS, dict(init_from=path, offload="none", device="auto")
    if other := [f"--{name}" for name in given if name not in allowed]:
        raise UserError(f"leave out {', '.join(other)}, or start a new run with --init_from {path}")
    with checkpoint_errors(path):
        return Settings.of({**load_checkpoint(path, "eval_only" in given)["args"], **new, **given})


def inherited(given: dict, config: dict) -> dict:
    """The shape of the model in --init_from. Only what no weight depends on may change, as the
    context length, positions being rotary. And from a dense model one can go on to STEM."""
    shape, model = asdict(ModelConfig(**config)), given["init_from"]
    free, text = ["block_size", "rope_base", "dropout"], (None, *TEXT.split())
    if given.get("stage") in text and (shape["ffn"], given.get("ffn")) == ("dense", "stem"):
        free += ["ffn", "stem_layers"]  # see training/convert.py
    for name in given:
        if name in shape and name not in free:
            raise UserError(f"--{name} is given by the model in --init_from {model}: leave it out")
    if given.get("stage") == "context":
        growth = given.get("block_size", 0) / (before := shape["block_size"])
        if growth <= 1:
            raise UserError(f"--stage context needs a --block_size above the {before} of {model}")
        # The slowest rotation covers the longer context by the angle it covered the shorter one by
        # ("NTK-aware" scaling), the fastest stays what it is.
        head_dim = shape["n_embd"] // shape["n_head"]
        shape["rope_base"] *= growth ** (head_dim / max(1, head_dim - 2))
    return shape
