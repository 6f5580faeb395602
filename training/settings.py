"""What can be set when training: presets, stages, and the way from flags to settings."""

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from common import (
    Parser,
    UserError,
    add_flags,
    check_settings,
    check_values,
    did_you_mean,
    flag,
    make_parser,
)
from model import ModelConfig, decoder_class, relatives
from tables.storage import DTYPES
from training.batches import parse_mixture
from training.objectives import NextToken
from training.preference import Preference

# Model shapes, with settings that train them well: two for minutes on two CPU cores, MiniMind's
# models (26M, 64M, 104M parameters when dense, head tied, 6,400 ids), Embformer's published shape.
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
    "countries": {},  # the defaults of Settings and of ModelConfig
    "prose": dict(block_size=256, learning_rate=6e-3),
    "minimind-26m": dict(MINIMIND, n_layer=8, n_embd=512, n_kv_head=2, d_ff=1408),
    "minimind-64m": dict(MINIMIND, n_layer=8, n_embd=768, n_kv_head=4, d_ff=2432),
    "minimind-104m": dict(MINIMIND_DEEP, d_ff=2048),
    "embformer-104m": dict(MINIMIND_DEEP, ffn="embformer"),
}


@dataclass
class Stage:
    """How a stage differs from pretraining; MiniMind today fine-tunes at 1e-5 after 5e-4."""

    reads: str = "text"  # the kind of sequences, see batches.Data
    rate: float = 1.0  # peak learning rate, over the preset's
    epochs: int | None = None  # passes over the data, in place of the preset's max_iters
    objective: type[NextToken] = NextToken
    settings: dict = field(default_factory=dict)
    continues: bool = True  # needs a trained model, --init_from


STAGES = {
    "pretrain": Stage(continues=False),
    "midtrain": Stage(rate=0.1, settings=dict(schedule="linear", warmup=0.0, min_lr=0.0)),
    "context": Stage(rate=0.1, settings=dict(doc_mask=True)),
    "sft": Stage(reads="chat", rate=0.02, epochs=2),
    "dpo": Stage(reads="preference", rate=8e-5, epochs=1, objective=Preference),
}
TEXT_PASSES = 1.7  # over a text: the validation loss of a small model falls to their end
MIN_TEXT_STEPS = 150  # if there would be fewer, batches get smaller
MAX_TEXT_STEPS = 5000
MIN_EPOCH_STEPS = 60  # of stages with epochs
# Settings of fine-tuning by PRESET-STAGE, which is also what the corpus is called.
FINE_TUNING = {
    "countries-sft": dict(learning_rate=1.5e-3, batch_size=64, max_iters=300),
    "countries-dpo": dict(learning_rate=3e-5, batch_size=32, max_iters=100),
}
# Flags that --resume allows, as they change how a run computes, not what (data_dir: where the same
# data are now), and those that --eval_only does.
MACHINE_FLAGS = ("data_dir", "offload", "device", "dtype", "device_batch_size")
RESUMABLE_FLAGS = (*MACHINE_FLAGS, "resume", "out_dir", "compile", "deterministic")
EVAL_FLAGS = (*MACHINE_FLAGS, "eval_only", "init_from", "out_dir", "eval_tokens", "block_size")


def device_flag() -> Any:
    return flag("auto", "auto (cuda if available, else cpu), cuda, cuda:1, cpu, mps")


def offload_flag() -> Any:
    about = "where to keep tables: none: on the device, cpu: in RAM, disk: in files"
    return flag("none", about, choices=("none", "cpu", "disk"))


@dataclass
class Settings:
    """A training run, complete and checked: all that train.py needs to know."""

    data_dir: str = flag("data/countries", "from prepare.py, or a mixture by weight: a=0.65,b=0.35")
    out_dir: Path = flag(Path("out"), "output folder")
    preset: str = flag(
        "countries",
        "model shape (with --init_from, that model's) and training settings",
        choices=PRESETS,
        shown="--init_from's; else countries for that corpus, prose for other text and mixtures",
    )
    stage: str = flag(
        "pretrain",
        "pretrain; others need --init_from: midtrain (linear decay), context (longer "
        "--block_size), sft (conversations), dpo (preferred answers); countries-sft and -dpo have "
        "settings of their own",
        choices=STAGES,
    )
    init_from: Path | None = flag(None, "start from the weights of this ckpt.pt")
    resume: bool = flag(False, "continue from ckpt.pt in --out_dir, with the flags of that run")
    overwrite: bool = flag(False, "replace the run in --out_dir")
    eval_only: bool = flag(
        False,
        "only report validation loss of --init_from (or --out_dir), by default on its own data",
    )

    doc_mask: bool = flag(False, "no attention across documents; stage context has it", shown="off")
    batch_size: int = flag(
        8, "sequences per step; small texts: fewer, for 150 steps or more", must="at least 1"
    )
    device_batch_size: int | None = flag(
        None,
        "sequences per forward pass; must divide --batch_size; reduce if out of memory",
        shown="all",
        must="at least 1",
    )
    max_iters: int = flag(
        700,
        "optimizer steps; countries: 700; prose: 1.7 passes, at most 5,000; sft: 2 passes, dpo: 1, "
        "at least 60",
        must="0 or more",
        shown="",
    )
    learning_rate: float = flag(
        3e-3,
        "peak; prose: 0.006; midtrain, context: a tenth; sft: a fiftieth; dpo: 8e-5 of it",
        must="a positive number",
    )
    # The shape of the decay.
    schedule: str = field(default="cosine", metadata=dict(choices=("cosine", "linear")))
    warmup: float = flag(
        0.1, "warm-up, as a fraction of the steps; midtrain: 0", must="0 or more and below 1"
    )
    # The final learning rate, as a fraction of the peak.
    min_lr: float = field(default=0.1, metadata=dict(must="0 or more"))
    weight_decay: float = flag(0.1, "weight decay of linear layers", must="0 or more")
    # Decay of AdamW's first moment, and of second moments, of RMSprop, too.
    beta1: float = field(default=0.9, metadata=dict(must="0 or more and below 1"))
    beta2: float = field(default=0.95, metadata=dict(must="0 or more and below 1"))
    grad_clip: float = flag(1.0, "largest gradient norm; 0: off", must="0 or more")
    table_optimizer: str = flag(
        "rmsprop",
        "of tables and of an embedding that is not the head; rmsprop: only rows that were read; "
        "adamw: all rows, every step",
        choices=("rmsprop", "adamw"),
    )
    table_state: str | None = flag(
        None,
        "rmsprop's second moments: one per row or one per number",
        choices=("row", "number"),
        shown="row; embformer: number",
    )
    table_rate: float = flag(
        1.0,
        "learning rate of tables, as a multiple of --learning_rate; 0: rows stay as drawn",
        must="0 or more",
    )
    offload: str = offload_flag()
    table_dtype: str = flag(
        "float32", "dtype of table rows; bfloat16 halves their size", choices=DTYPES
    )
    eval_interval: int = flag(
        140,
        "steps between evaluations, each with a checkpoint; countries: 140; prose: 50, "
        "of long runs a 30th, of short ones a quarter; sft, dpo: a quarter",
        must="at least 1",
        shown="",
    )
    eval_tokens: int = flag(
        65536,
        "validation tokens per evaluation, of each folder, spread over its val.bin",
        must="at least 1",
    )
    device: str = device_flag()
    dtype: str = flag(
        "auto",
        "autocast dtype; auto: the fastest on this device",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    compile: bool = flag(False, "torch.compile each block: slow start, faster steps", shown="off")
    deterministic: bool = flag(
        False, "on a CUDA GPU: equal results to the bit, a little slower", shown="off"
    )
    seed: int = flag(1337, "for weights and data order", must="0 or more, and fit 32 bits")

    model: ModelConfig = field(default_factory=ModelConfig)  # vocab_size is the data's

    def __post_init__(self) -> None:
        if self.device_batch_size is None:
            self.device_batch_size = self.batch_size
        if self.table_state is None:
            # What consists of rows needs one second moment per number.
            self.table_state = "number" if self.model.embedding_only else "row"
        check_settings(self)
        check_settings(self.model)  # again, as a relative may have changed it
        self.data_dir = str(self.data_dir)
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, str) and (kind is Path or Path in get_args(kind)):
                setattr(self, name, Path(value))  # as of a flag: checkpoints hold text
        if self.batch_size % self.device_batch_size:
            raise UserError(
                f"--device_batch_size {self.device_batch_size} must divide "
                f"--batch_size {self.batch_size}"
            )
        is_plain = self.offload == "none" and self.table_dtype == "float32"
        if self.table_optimizer == "adamw" and not (is_plain and self.table_rate == 1):
            raise UserError(
                "--table_optimizer adamw needs no --offload, --table_dtype float32, --table_rate 1"
            )

    @property
    def origin(self) -> Path | None:
        """The checkpoint to continue or to start from."""
        return self.out_dir / "ckpt.pt" if self.resume else self.init_from

    def flat(self) -> dict:
        """All settings by name, as checkpoints and records keep them."""
        flat = {**asdict(self), **asdict(self.model)}
        del flat["model"]
        return {name: str(v) if isinstance(v, Path) else v for name, v in flat.items()}

    @classmethod
    def from_flat(cls, flat: dict) -> "Settings":
        """The inverse of `flat`; what is missing has its default. UserError: a value is wrong."""
        check_values(ModelConfig, flat)
        kind = flat.get("ffn", ModelConfig.ffn)
        config_class = config_class_of(kind)
        shape = {f.name: flat[f.name] for f in fields(config_class) if f.name in flat}
        of_run = {name: value for name, value in flat.items() if name not in shape}
        known = [f.name for f in (*fields(cls), *fields(config_class))]
        unknown = sorted(set(of_run) - set(known))
        if unknown:
            meant = did_you_mean(unknown[0], known)
            raise UserError(f"unknown settings with --ffn {kind}: {', '.join(unknown)}{meant}")
        return cls(**of_run, model=config_class(**shape))


def config_class_of(ffn: str) -> type[ModelConfig]:
    """Of a kind of --ffn. UserError: there is none, or a setting of its own is one of a run's."""
    config_class = decoder_class(ffn).config_class
    of_run = {f.name for f in fields(Settings)}
    for setting in fields(config_class):
        if setting.name in of_run:
            raise UserError(
                f"relatives/{ffn}.py: the setting {setting.name} is one of every run: "
                "give it another name"
            )
    return config_class


def parse_args(description: str) -> dict:
    """The flags that the command line gives, by name. --ffn decides which there are, --preset
    which defaults `-h` shows."""
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--ffn")
    first.add_argument("--preset")
    chosen, _ = first.parse_known_args()
    preset = PRESETS.get(chosen.preset, {})
    ffn = chosen.ffn or preset.get("ffn", ModelConfig.ffn)
    parser = make_parser(description)
    add_flags(parser, Settings, ffn, preset)
    others = ", ".join(relatives("Decoder"))
    kinds_of_attention = ", ".join(relatives("Attention"))
    group = parser.add_argument_group(
        f"model, --ffn {ffn} (defaults: --init_from's or the preset's; further kinds, with flags "
        f"of their own, in relatives/: {others}; --attention: {kinds_of_attention})"
    )
    add_flags(group, config_class_of(ffn), ffn, preset)
    parser.chosen = f" with --ffn {ffn}"
    return vars(parser.parse_args())


def new_settings(given: dict, metas: list[dict], base: dict | None) -> Settings:
    """The settings of a new run: the flags that are given come first, then the model of --init_from
    and what the stage, the corpus and the preset say.

    Args:
        given: flags by name.
        metas: of the folders of --data_dir (text/dataset.py).
        base: the checkpoint named by --init_from.
    """
    name = given.get("stage", "pretrain")
    stage = STAGES[name]
    if base is None and stage.continues:
        raise UserError(f"--stage {name} starts from a trained model: give one with --init_from")

    # 1) what is known beforehand: later replaces earlier
    corpora = {meta["corpus"] for meta in metas}
    preset = "countries" if corpora == {"countries"} else "prose"
    if base is not None:
        preset = base["args"].get("preset", preset)
    preset = given.get("preset", preset)
    rate = PRESETS[preset].get("learning_rate", Settings.learning_rate)
    values = {
        "batch_size": Settings.batch_size,
        **PRESETS[preset],
        **(inherited_shape(given, asdict(base["config"])) if base else {}),
        "learning_rate": rate * stage.rate,
    }
    chosen = dict(stage.settings)
    if corpora == {f"{preset}-{name}"}:
        chosen.update(FINE_TUNING.get(f"{preset}-{name}", {}))
    given = {**chosen, **given}
    values = {**values, **given, "preset": preset, "stage": name}
    part = values.get("device_batch_size")
    if "device_batch_size" not in given and part:  # the preset's need not divide a --batch_size
        fitting = (n for n in range(1, part + 1) if values["batch_size"] % n == 0)
        values["device_batch_size"] = max(fitting)
    settings = Settings.from_flat(values)
    attention = settings.model.attention
    if base is None and len(attention.split(",")) > settings.model.n_layer:
        raise UserError(f"--attention {attention} names more kinds than there are layers")

    # 2) what the size of the data decides, unless it is given
    if stage.epochs is None and preset != "prose":
        return settings
    batch_size = settings.batch_size
    if stage.epochs is not None:
        n_sequence = stage.epochs * metas[0]["train"]["documents"]  # of one folder
        steps = max(MIN_EPOCH_STEPS, n_sequence // batch_size)
    else:
        weights = parse_mixture(settings.data_dir).values()  # passes over what is read most
        n_token = min(m["train"]["tokens"] / w for m, w in zip(metas, weights, strict=True))
        n_sequence = TEXT_PASSES * n_token / settings.model.block_size
        if not {"batch_size", "max_iters"} & set(given):
            while batch_size > 1 and n_sequence / batch_size < MIN_TEXT_STEPS:
                batch_size //= 2
        steps = min(max(1, round(n_sequence / batch_size)), MAX_TEXT_STEPS)
    steps = given.get("max_iters", steps)
    interval = max(1, steps // 4)
    if stage.epochs is None:  # of long runs a 30th
        interval = max(min(50, interval), steps // 30)
    return replace(
        settings,
        batch_size=batch_size,
        device_batch_size=min(settings.device_batch_size, batch_size),
        max_iters=steps,
        eval_interval=given.get("eval_interval", interval),
    )


def inherited_shape(given: dict, config: dict) -> dict:
    """The shape of the model in --init_from. Only what no weight depends on may change, such as the
    context length, as positions are rotary."""
    shape = dict(config)
    for name in given:
        if name in shape and name not in ("block_size", "dropout"):
            raise UserError(f"--{name} is set by the model in --init_from: leave it out")
    if given.get("stage") == "context":
        before = shape["block_size"]
        growth = given.get("block_size", 0) / before
        if growth <= 1:
            raise UserError(f"--stage context needs a --block_size above the model's {before}")
        # The slowest rotation covers the longer context by the angle it covered the shorter one by
        # ("NTK-aware" scaling); the fastest stays the same.
        head_dim = shape["head_dim"]
        shape["rope_base"] *= growth ** (head_dim / max(1, head_dim - 2))
    return shape


def changed_settings(given: dict, args: dict, allowed: tuple[str, ...]) -> Settings:
    """The settings `args` of a checkpoint, and the flags that may change."""
    other = [f"--{name}" for name in given if name not in allowed]
    if other:
        command = "--resume" if given.get("resume") else "--eval_only"
        raise UserError(f"{', '.join(other)}: not with {command}, leave it out")
    # These tell what a command does, not how a run was trained: the checkpoint's do not count.
    here = dict.fromkeys(("resume", "overwrite", "eval_only"), False)
    return Settings.from_flat({**args, **here, **given})
