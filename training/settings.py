"""What can be set when training: presets, stages, the settings of a run, and the way from flags."""

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import get_args

from common import UserError, add_flags, check_ranges, flag, make_parser
from config import ModelConfig
from tables.storage import DTYPES
from training.batches import parse_mixture, read_meta
from training.checkpoints import checkpoint_errors, device_flag, load_checkpoint, offload_flag

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
        n_layer=6, n_head=4, n_embd=128, block_size=128, batch_size=8, max_iters=1000,
        learning_rate=3e-3, eval_interval=250, stem_layers="all",
        sft=dict(learning_rate=1.5e-3, batch_size=64, max_iters=300, eval_interval=75),
        dpo=dict(learning_rate=3e-5, batch_size=16),
    ),
    "prose": dict(
        n_layer=6, n_head=4, n_embd=128, block_size=256, batch_size=8, max_iters=250,
        learning_rate=6e-3, eval_interval=50,
    ),
    "minimind-26m": dict(MINIMIND, n_layer=8, n_embd=512, n_kv_head=2, d_ff=1408),
    "minimind-64m": dict(MINIMIND, n_layer=8, n_embd=768, n_kv_head=4, d_ff=2432),
    "minimind-104m": dict(MINIMIND, n_layer=16, n_embd=768, n_kv_head=2, d_ff=2048),
    "embformer-104m": dict(MINIMIND, n_layer=16, n_embd=768, n_kv_head=2, ffn="embformer"),
}  # fmt: skip


@dataclass
class Stage:
    """A stage of training: what it reads, and what it does differently from pretraining."""

    rows: str  # how the data is read (batches.Data): text, chat, preference
    lr: float = 1.0  # peak learning rate over pretraining's
    epochs: int | None = None  # passes over the data, where the number of steps depends on it
    settings: dict = field(default_factory=dict)


# Learning rates of sft and dpo are MiniMind's (1e-5 and 4e-8 after 5e-4); the stages that go on
# with plain text begin where a cosine to 0.1 has ended.
STAGES = {
    "pretrain": Stage("text"),
    "midtrain": Stage("text", 0.1, settings=dict(schedule="linear", warmup=0.0, min_lr=0.0)),
    "context": Stage("text", 0.1, settings=dict(doc_mask=True)),
    "sft": Stage("chat", 0.02, epochs=2),
    "dpo": Stage("preference", 8e-5, epochs=1),
}
# What may change at --resume: a step sees the same batch either way, summed in other parts.
RESUMABLE_FLAGS = ("resume", "out_dir", "data_dir", "offload", "device", "dtype", "compile")
RESUMABLE_FLAGS += ("device_batch_size", "verify")
# What an evaluation may be told besides the checkpoint; all else is the run's that made it.
EVAL_FLAGS = (
    "eval_only",
    "data_dir",
    "eval_tokens",
    "offload",
    "device",
    "dtype",
    "device_batch_size",
)
ONE, POSITIVE, SHARE = "at least 1", "a positive number", "0 or more and below 1"
BY_PRESET = "the preset's"


@dataclass
class Settings:
    """A training run, complete and checked: all that train.py needs to know."""

    data_dir: str = flag(DEFAULT_DATA, "from prepare.py, or a mixture by weight: a=0.65,b=0.35")
    out_dir: Path = flag(Path("out"), "where everything goes")
    preset: str = flag("countries", "shape and settings", choices=PRESETS, shown="by data")
    stage: str = flag(
        "pretrain",
        "what to do: pretrain; all others go on from --init_from: midtrain (linear decay), context "
        "(longer --block_size), sft (conversations), dpo (preferences)",
        choices=STAGES,
    )
    init_from: Path | None = flag(None, "start from the model in this checkpoint")
    resume: bool = flag(False, "go on from ckpt.pt in --out_dir, its flags included")
    eval_only: bool = flag(
        False, "print what --init_from, or the ckpt.pt in --out_dir, loses on --data_dir a,b"
    )
    verify: bool = flag(True, "check the checksums of what it starts or goes on from", shown="yes")

    doc_mask: bool = flag(False, "attention does not cross documents", shown="in stage context")
    batch_size: int = flag(8, "sequences in a step, for dpo pairs", must=ONE, shown=BY_PRESET)
    device_batch_size: int | None = flag(
        None, "on the device at a time: fewer take less memory; a divisor", must=ONE, shown="all"
    )
    max_iters: int = flag(
        1000, "optimizer steps", must=ONE, shown="the preset's; sft: two epochs, dpo: one"
    )
    learning_rate: float = flag(3e-3, "peak, of the backbone", must=POSITIVE, shown=BY_PRESET)
    schedule: str = flag(
        "cosine", "after warm-up", choices=("cosine", "linear"), shown="cosine; midtrain: linear"
    )
    warmup: float = flag(0.1, "fraction of the steps", must=SHARE, shown="0.1; midtrain: 0")
    min_lr: float = flag(0.1, "share of the peak at the end", must=SHARE, shown="0.1; midtrain: 0")
    beta: float = flag(0.15, "of dpo: how much holds the model to the reference", must=POSITIVE)
    weight_decay: float = flag(0.1, "of linear layers", must="0 or more")
    beta1: float = flag(0.9, "of both optimizers", must=SHARE)
    beta2: float = flag(0.95, "of both optimizers", must=SHARE)
    grad_clip: float = flag(1.0, "largest gradient norm; 0: off", must="0 or more")
    table_optimizer: str = flag(
        "rowwise", "rowwise moves the batch's rows, adamw all of them", choices=("rowwise", "adamw")
    )
    table_lr_scale: float = flag(
        1.0, "learning rate of tables over the backbone's, see tables/rowadam.py", must=POSITIVE
    )
    offload: str = offload_flag()
    table_dtype: str = flag(
        "float32", "of rows; bfloat16 halves them, and rounds stochastically", choices=DTYPES
    )
    eval_interval: int = flag(250, "steps between checkpoints", must=ONE, shown=BY_PRESET)
    keep_best: bool = flag(
        True, "best.pt: the model with the lowest validation loss, if its tables are not on disk"
    )
    eval_tokens: int = flag(65536, "validation tokens to look at", must=ONE)
    device: str = device_flag()
    dtype: str = flag(
        "auto", "of activations, by autocast; weights stay float32",
        choices=("auto", "float32", "bfloat16"), shown="bfloat16 on CUDA",
    )  # fmt: skip
    compile: bool = flag(False, "torch.compile each block: slow start, faster steps")
    seed: int = flag(1337, "of weights and data order", must="0 or more, and fit 63 bits")

    model: ModelConfig = field(default_factory=ModelConfig)  # vocab_size is the data's

    def __post_init__(self) -> None:
        self.out_dir = Path(self.out_dir)
        self.init_from = self.init_from and Path(self.init_from)
        if self.device_batch_size is None:
            self.device_batch_size = self.batch_size
        check_ranges(self)
        if self.beta1**2 >= self.beta2:  # else a row would travel without bound: expected_travel
            raise UserError(f"--beta1 {self.beta1} squared must be below --beta2 {self.beta2}")
        if self.batch_size % self.device_batch_size:
            part, whole = self.device_batch_size, self.batch_size
            raise UserError(f"--device_batch_size {part} must divide --batch_size {whole}")
        far = self.offload != "none" or self.table_dtype != "float32"
        if far and self.table_optimizer == "adamw":
            raise UserError("--table_optimizer adamw needs --offload none, --table_dtype float32")

    def flat(self) -> dict:
        """All settings by name, as checkpoints and records keep them."""
        flat = asdict(self)
        flat |= flat.pop("model")
        return {k: str(v) if isinstance(v, Path) else v for k, v in flat.items()}

    @classmethod
    def of(cls, flat: dict) -> "Settings":
        """The inverse of `flat`. What it lacks has its default, what nobody knows is forgotten:
        older checkpoints have other settings."""

        def part(kind: type, **more) -> object:
            for each in fields(kind):
                types = get_args(each.type) or (each.type,)
                types += tuple({float: int, Path: str}.get(kind, kind) for kind in types)
                if each.name in flat and not isinstance(flat[each.name], types):
                    raise UserError(f"--{each.name} cannot be {flat[each.name]!r:.60}")
            return kind(**{f.name: flat[f.name] for f in fields(kind) if f.name in flat}, **more)

        try:
            return part(cls, model=part(ModelConfig))
        except ValueError as error:
            raise UserError(f"--{error}") from None


def parse_args(description: str) -> dict:
    """The flags that the command line gives."""
    parser = make_parser(description)
    add_flags(parser, Settings)
    add_flags(parser.add_argument_group("model (--init_from's, or by preset)"), ModelConfig)
    return vars(parser.parse_args())


def resolve_settings(**given) -> Settings:
    """The settings of a run from flags that were given: what is asked for comes first, then the
    model of --init_from, the stage's part of the preset, the stage, the preset. A run that resumes
    has its own, and of those given what is FREE, an evaluation what is ASKED."""
    if given.get("resume"):
        path = Path(given.get("out_dir", Settings.out_dir)) / "ckpt.pt"
        with checkpoint_errors(path):
            saved = {**load_checkpoint(path)["args"], "verify": True}
        if other := [f"--{name}" for name in given if name not in RESUMABLE_FLAGS]:
            raise UserError(
                f"--resume goes on with the settings of {path}: leave out {', '.join(other)}, or "
                f"start a new run with another --out_dir, from this model with --init_from {path}"
            )
        with checkpoint_errors(path):
            return Settings.of({**saved, **given, "out_dir": path.parent})
    if given.get("eval_only"):
        whose = "init_from" if "init_from" in given else "out_dir"
        if other := [f"--{name}" for name in given if name not in (*EVAL_FLAGS, whose)]:
            raise UserError(
                f"--eval_only takes all else from its checkpoint: leave out {', '.join(other)}"
            )
        path = given.get("init_from", Path(given.get("out_dir", Settings.out_dir)) / "ckpt.pt")
        here = dict(offload="none", device="auto", resume=False, init_from=path)
        with checkpoint_errors(path):
            return Settings.of({**load_checkpoint(path)["args"], **here, **given})
    name, base = given.get("stage", "pretrain"), None
    stage = STAGES[name]
    meta = read_meta(next(iter(parse_mixture(given.get("data_dir", DEFAULT_DATA)))))
    if given.get("init_from"):
        base = load_checkpoint(given["init_from"])
    elif name != "pretrain":
        raise UserError(f"--stage {name} goes on with a trained model: name it with --init_from")
    by_data = "countries" if meta["corpus"] == "countries" else "prose"
    with checkpoint_errors(given.get("init_from")):
        preset_name = given.get("preset") or (base["args"]["preset"] if base else by_data)
        values = {**PRESETS[preset_name], **stage.settings, "preset": preset_name}
    values["learning_rate"] *= stage.lr
    if stage.epochs:
        del values["max_iters"], values["eval_interval"]
    if meta["corpus"].startswith(preset_name):  # those of countries are for countries-sft alone
        values |= values.get(name, {})
    with checkpoint_errors(given.get("init_from")):
        values |= inherited(given, base["config"]) if base else {}
    values |= given
    refuse_without_effect(values, given)
    if "max_iters" not in values:
        rows = meta["train"]["documents"] // (2 if stage.rows == "preference" else 1)
        values["max_iters"] = max(1, stage.epochs * rows // max(1, values["batch_size"]))
    values.setdefault("eval_interval", max(1, values["max_iters"] // 4))
    return Settings.of(values)


def refuse_without_effect(values: dict, given: dict) -> None:
    """Raises UserError if a flag was given that changes nothing."""
    stage, ffn = values.get("stage", "pretrain"), values.get("ffn", ModelConfig.ffn)
    useless = {
        "beta": stage != "dpo",
        "doc_mask": STAGES[stage].rows != "text",
        "stem_layers": ffn != "stem",
        "d_ff": ffn == "embformer",
    }
    users = dict(embformer_act="embformer", balance="moe", n_key="pkm", ple_width="ple")
    users |= dict(n_expert="moe hash_moe", top_k="moe hash_moe pkm")
    ours = ffn in ["dense", "stem", "embformer", "moe", "hash_moe", "pkm", "deepembed", "ple"]
    useless |= {name: ours and ffn not in kinds.split() for name, kinds in users.items()}
    of_tables = ("table_std", "table_optimizer", "table_lr_scale", "table_dtype", "offload")
    useless |= dict.fromkeys(of_tables, ffn in ("dense", "moe", "hash_moe", "pkm"))
    for name in given:
        if useless.get(name):
            where = f"in --stage {stage}" if name in ("beta", "doc_mask") else f"with --ffn {ffn}"
            raise UserError(f"--{name} changes nothing {where}: leave it out")


def inherited(given: dict, config: dict) -> dict:
    """The shape of the model in --init_from. Only what no weight depends on may change, as the
    context length, positions being rotary."""
    shape, model = asdict(ModelConfig(**config)), given["init_from"]
    for name in given:
        if name in shape and name not in ("block_size", "rope_base", "dropout"):
            raise UserError(f"--{name} is given by the model in --init_from {model}: leave it out")
    if given.get("stage") == "context":
        before = config["block_size"]
        growth = given.get("block_size", 0) / before
        if growth <= 1:
            raise UserError(f"--stage context needs a --block_size above the {before} of {model}")
        # The slowest rotation covers the longer context by the angle it covered the shorter one by
        # ("NTK-aware" scaling), the fastest stays what it is.
        head_dim = config["n_embd"] // config["n_head"]
        shape["rope_base"] *= growth ** (head_dim / max(1, head_dim - 2))
    return shape
