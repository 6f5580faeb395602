"""Are these the originals' models? Ours beside the authors' code, with the same weights:

    pip install "transformers==4.53.*" sympy                    # not for --stem; sympy: --engram
    git clone https://github.com/HighCWu/embformer ../embformer
    git clone https://github.com/Infini-AI-Lab/STEM ../STEM
    git clone https://github.com/deepseek-ai/Engram ../Engram
    python tests/originals.py --llama --embformer ../embformer --stem ../STEM --engram ../Engram

Each of the four can be asked for alone. Compared are logits, cached decoding, the loss and the
gradient of every weight (of table rows, too), in float32 and in float64, and the logits of what
convert.py makes of a folder that the authors' code saves. Engram's code is no whole model: compared
are addresses of rows, the memory's output, and gradients. Prints a Markdown table,
and ends with exit code 1 if anything differs by more than rounding. docs/originals.md has the
table, and what differs on purpose: defaults and training, not models.
"""

import contextlib
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import UserError, make_parser, run_command
from model import Decoder, ModelConfig, decoder_class
from tables.tables import Tables
from training.huggingface import KINDS, read_model

B, T, PROMPT = 3, 24, 9  # of T tokens, decoding reads PROMPT at once, then one by one
# One shape, in three languages.
SHAPE = dict(vocab_size=97, n_layer=5, n_head=4, n_embd=64, d_ff=192, block_size=32)
HF_SHAPE = dict(
    vocab_size=97, num_hidden_layers=5, num_attention_heads=4, hidden_size=64, intermediate_size=192
)
LINGUA_SHAPE = dict(vocab_size=97, n_layers=5, n_heads=4, dim=64, multiple_of=64)  # d_ff 8/3 of dim

# The largest difference that counts as rounding, relative to the largest value of its tensor and in
# units of the precision; seen were about 20. In float64 it is 2e-13, where an epsilon of the norms
# that is 1 % larger shows as 4e-8.
TOLERANCE = 1000

# What our weights are called there, # being the number of a layer: of transformers' models and of
# STEM's. "wte" is there with a tied head.
NAMES = """
wte                     model.embed_tokens                      -
wte.0                   model.embed_tokens                      lm_transformer.tok_embeddings
norm                    model.norm                              lm_transformer.norm
head                    lm_head                                 lm_transformer.output
tables.#                -                                       stem_embeddings.#
tables.#.k              model.layers.#.self_attn.k_embed        -
tables.#.v              model.layers.#.self_attn.v_embed        -
tables.#.ffn            model.layers.#.ffn.gate_embed           -
blocks.#.attn_norm      model.layers.#.input_layernorm          lm_transformer.layers.#.attention_norm
blocks.#.attn.qkv.qkv.q model.layers.#.self_attn.q_proj         lm_transformer.layers.#.attention.wq
blocks.#.attn.qkv.qkv.k model.layers.#.self_attn.k_proj         lm_transformer.layers.#.attention.wk
blocks.#.attn.qkv.qkv.v model.layers.#.self_attn.v_proj         lm_transformer.layers.#.attention.wv
blocks.#.attn.qkv.qkv.qkv.q model.layers.#.self_attn.q_proj     -
blocks.#.attn.qkv.qkv.qkv.k model.layers.#.self_attn.k_proj     -
blocks.#.attn.qkv.qkv.qkv.v model.layers.#.self_attn.v_proj     -
blocks.#.attn.qkv.bias.q model.layers.#.self_attn.q_proj.bias       -
blocks.#.attn.qkv.bias.k model.layers.#.self_attn.k_proj.bias       -
blocks.#.attn.qkv.bias.v model.layers.#.self_attn.v_proj.bias       -
blocks.#.attn.qkv.q_norm model.layers.#.self_attn.q_norm        -
blocks.#.attn.qkv.k_norm model.layers.#.self_attn.k_norm        -
blocks.#.attn.out       model.layers.#.self_attn.o_proj         lm_transformer.layers.#.attention.wo
blocks.#.ffn_norm       model.layers.#.post_attention_layernorm lm_transformer.layers.#.ffn_norm
blocks.#.ffn.gate       model.layers.#.mlp.gate_proj            lm_transformer.layers.#.feed_forward.w1
blocks.#.ffn.up         model.layers.#.mlp.up_proj              lm_transformer.layers.#.feed_forward.w3
blocks.#.ffn.down       model.layers.#.mlp.down_proj            lm_transformer.layers.#.feed_forward.w2
"""  # noqa: E501
ROWS = [line.split() for line in NAMES.strip().splitlines()]
HUGGING_FACE = {ours: there for ours, there, _ in ROWS}
LINGUA = {ours: there for ours, _, there in ROWS}


@dataclass
class Original:
    """A model of theirs, and how it is called."""

    title: str
    config: ModelConfig  # of ours of the same shape
    model: nn.Module
    names: dict[str, str]
    logits: Callable[[Tensor], Tensor]  # ids [B, T] -> [B, T, V]
    decode: Callable[[Tensor], Tensor]  # the same with a cache, see `steps`
    loss: Callable[[Tensor], Tensor]  # ids [B, T + 1] -> [], all but the first predicted


def named(ours: dict[str, Tensor], config: ModelConfig, names: dict[str, str]) -> dict[str, Tensor]:
    """Our weights, or their gradients, as they are named, split and ordered there."""
    kv = config.n_kv_head * config.head_dim
    found = {}
    for name, tensor in ours.items():
        name = name.replace(".weight", "")
        parts = {name: tensor}
        # [(n_head + 2 n_kv_head) head_dim, n_embd], or [(n_head + 2 n_kv_head) head_dim]
        if name.endswith(("qkv", "qkv.bias")):
            q, k, v = tensor.split((config.n_head * config.head_dim, kv, kv))
            if names is LINGUA:
                q = interleaved(q, config.head_dim)
                k = interleaved(k, config.head_dim)
            parts = {f"{name}.q": q, f"{name}.k": k, f"{name}.v": v}
        elif config.embedding_only and name.startswith("tables"):  # [V, 2 kv + n_embd]
            k, v, ffn = tensor.split((kv, kv, config.n_embd), dim=1)
            parts = {f"{name}.k": k, f"{name}.v": v, f"{name}.ffn": ffn}
        for part_name, part in parts.items():
            layer = "".join(re.findall("[0-9]", part_name))
            there = names.get(part_name) or names[part_name.replace(layer, "#")]
            there = there.replace("#", layer)
            found[there if there.endswith(".bias") else f"{there}.weight"] = part
    return found


def interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """STEM's rotations turn neighboring channels of a head, ours those half a head apart."""
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)  # [heads, head_dim / 2, 2, n_embd], flat


# --- the comparison ---


@torch.no_grad()
def counterpart(original: Original) -> Decoder:
    """Our model with new weights, which the original gets, too: so large that each of them matters,
    norms and rows included."""
    torch.manual_seed(0)
    ours = Decoder(original.config)
    for weight in ours.parameters():
        nn.init.normal_(weight, std=0.3)
    weights = named(dict(ours.named_parameters()), original.config, original.names)
    theirs = dict(original.model.named_parameters())
    assert weights.keys() == theirs.keys(), weights.keys() ^ theirs.keys()
    for name, weight in weights.items():
        assert theirs[name].shape == weight.shape, name
        theirs[name].copy_(weight)
    return ours


def gradients(model: Decoder) -> dict[str, Tensor]:
    """Of all weights; those of rows [n, W] at their ids in zeros [V, W]."""
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    for owner, tables in model.named_children():
        if isinstance(tables, Tables) and len(tables.weight):
            ids, rows = tables.gradients()
            for table, (weight, grad) in enumerate(zip(tables.weight, rows, strict=True)):
                whole = torch.zeros_like(weight).index_copy(0, ids, grad)
                found[f"{owner}.weight.{table}"] = whole
    return found


def steps(ids: Tensor) -> list[Tensor]:
    """[B, T] as decoding reads them: [B, PROMPT], then [B, 1] again and again."""
    return [part.contiguous() for part in (ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1))]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest, relative to the largest value. NaN if there is one, or all are zeros: that would
    show nothing."""
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def compare(ours: Decoder, original: Original) -> dict[str, float]:
    """What is compared, and the `difference` there."""
    torch.manual_seed(1)
    ids = torch.randint(ours.config.vocab_size, (B, T + 1))  # some of them several times
    read, targets = ids[:, :-1].contiguous(), ids[:, 1:]
    ours.eval()
    original.model.eval()
    with torch.no_grad():
        cache = ours.make_cache(B)
        decoded = torch.cat([ours(part, cache=cache)[0] for part in steps(read)], dim=1)
        logits = difference(ours(read)[0], original.logits(read))
        decoding = difference(decoded, original.decode(read))
    ours.train()
    original.model.train()
    _, our_loss = ours(read, targets)
    their_loss = original.loss(ids)
    our_loss.backward()
    their_loss.backward()
    found = {"logits": logits, "decoding": decoding, "loss": difference(our_loss, their_loss)}
    grads = named(gradients(ours), original.config, original.names)
    theirs = dict(original.model.named_parameters())
    for name, grad in grads.items():
        found[f"gradient of {name}"] = difference(grad, theirs[name].grad)
    if original.names is HUGGING_FACE and original.model.config.model_type in KINDS:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            original.model.save_pretrained(folder)
            opened, *_ = read_model(Path(folder))
            saved = difference(opened.eval()(read)[0], original.logits(read))
        found["logits of the saved folder"] = saved
    return found


class Throughout(TorchFunctionMode):
    """The default dtype also where code says float32. Both sides do so for norms, rotations and
    losses, whatever their weights are: with float64 weights, that would leave float32's rounding.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        dtype = torch.get_default_dtype()
        if function is torch.Tensor.float:
            return args[0].to(dtype)
        args = [dtype if value is torch.float32 else value for value in args]
        kwargs = {n: dtype if v is torch.float32 else v for n, v in (kwargs or {}).items()}
        return function(*args, **kwargs)


# --- the originals ---


def hugging_face(title: str, config: ModelConfig, shape: Callable, kind: type) -> Original:
    """A model with transformers' interface."""
    from transformers import DynamicCache

    heads = dict(num_key_value_heads=config.n_kv_head, head_dim=config.head_dim)
    model = kind(shape(**HF_SHAPE, **heads, tie_word_embeddings=config.tie_head))

    def decode(ids: Tensor) -> Tensor:
        cache = DynamicCache()
        return torch.cat([model(part, past_key_values=cache).logits for part in steps(ids)], dim=1)

    return Original(
        title,
        config,
        model,
        HUGGING_FACE,
        logits=lambda ids: model(ids).logits,
        decode=decode,
        loss=lambda ids: model(ids, labels=ids).loss,
    )


# Dense models of transformers: kind, what is special, our options, and theirs beside the shape.
DENSE = [
    ("Llama", ", tied head", dict(n_kv_head=4, tie_head=True), {}),
    ("Llama", ", separate head, grouped queries", dict(n_kv_head=2, tie_head=False), {}),
    ("Qwen2", "", dict(n_kv_head=2, tie_head=True, attention="qkvbias"), {}),
    ("Qwen3", "", dict(n_kv_head=2, tie_head=True, attention="qknorm", head_dim=24), {}),
    (
        "Mistral",
        ", a window of 5 tokens",
        dict(n_kv_head=2, tie_head=False, attention="window:5"),
        dict(sliding_window=5),
    ),
]


def dense(kind: str, special: str, options: dict, theirs: dict) -> Original:
    import transformers as hf

    title = f"{kind} (transformers {hf.__version__}){special}"
    config = ModelConfig(**SHAPE, **options, ffn="dense")
    shape = partial(getattr(hf, f"{kind}Config"), **theirs)
    return hugging_face(title, config, shape, getattr(hf, f"{kind}ForCausalLM"))


def embformer(folder: Path) -> Original:
    sys.path.insert(0, str(folder / "src"))
    with contextlib.redirect_stdout(io.StringIO()):  # about documentation that its classes lack
        from models.embformer import EmbformerConfig, EmbformerForCausalLM
    config = ModelConfig(**SHAPE, ffn="embformer", n_kv_head=2)
    title = f"Embformer ({commit(folder)})"
    return hugging_face(title, config, EmbformerConfig, EmbformerForCausalLM)


def stem(folder: Path, layers: str) -> Original:
    sys.path.insert(0, str(folder))
    # Kernels for GPUs, and what its commands read configurations, weights and text with.
    absent = "xformers xformers.ops omegaconf lingua.args lingua.checkpoint lingua.tokenizer"
    for name in absent.split():
        sys.modules.setdefault(name, MagicMock())
    from apps.main.generate import KVCache as Cache
    from apps.main.stem import StemLMTransformer, StemLMTransformerArgs
    from lingua import stem_dist_utils
    from lingua.transformer import Attention

    stem_dist_utils.get_stem_model_parallel_world_size = lambda: 1  # else it asks a process group
    config = ModelConfig(
        **SHAPE,
        ffn="stem",
        stem_layers=layers,
        n_kv_head=2,
        tie_head=False,
        norm_eps=1e-5,  # its own
    )
    if layers == "all":
        chosen = "all layers but the first"
        numbers = None  # its default, which our "all" should be
    else:
        chosen = "a third of the layers"
        numbers = config.row_layers
    args = StemLMTransformerArgs(**LINGUA_SHAPE, n_kv_heads=2, stem_layers=numbers)
    model = StemLMTransformer(args)
    attentions = [module for module in model.modules() if isinstance(module, Attention)]

    def decode(ids: Tensor) -> Tensor:
        for each in attentions:
            size = (*ids.shape, each.n_kv_heads, each.head_dim)
            each.kv_cache = Cache(*size, torch.get_default_dtype(), ids.device)
        logits = []
        places = torch.arange(ids.shape[1])
        for part, at in zip(steps(ids), steps(places[None]), strict=True):
            mask = at[0, :, None] >= places  # [n, T], as its generate_next_token makes it
            logits.append(model(part, tok_idx=at[0], mask=mask))
        for each in attentions:
            del each.kv_cache  # which it would go on to use
        return torch.cat(logits, dim=1)

    return Original(
        f"STEM ({commit(folder)}), {chosen}",
        config,
        model,
        LINGUA,
        logits=model,
        decode=decode,
        loss=lambda ids: model(ids[:, :-1].contiguous(), ids[:, 1:]),
    )


def engram(folder: Path) -> tuple[str, dict[str, float]]:
    """Its memory alone, on one stream, without biases and convolution. Of ids as they are: its
    tokenizer would be downloaded, and gives several tokens one id."""
    sys.path.insert(0, str(folder))
    import engram_demo_v1 as demo

    vocab_size, width, n_row = SHAPE["vocab_size"], SHAPE["n_embd"], 101
    ids_as_they_are = MagicMock(side_effect=lambda ids: ids, lookup_table=range(vocab_size))
    ids_as_they_are.__len__.return_value = vocab_size
    demo.CompressedTokenizer = lambda tokenizer_name_or_path: ids_as_they_are
    shape = demo.engram_cfg
    shape.layer_ids, shape.pad_id, shape.engram_vocab_size = [1], 0, [n_row, n_row]
    shape.n_head_per_ngram, shape.n_embed_per_ngram = 4, width // 2
    demo.backbone_config.hidden_size, demo.backbone_config.hc_mult = width, 1
    torch.manual_seed(0)
    theirs = demo.Engram(1)
    for weight in theirs.parameters():
        nn.init.normal_(weight, std=0.3)
    pairs = {  # our names
        "query_norm": theirs.norm2[0],
        "key_norm": theirs.norm1[0],
        "key": theirs.key_projs[0],
        "value": theirs.value_proj,
    }
    for zeros in (pairs["key"].bias, pairs["value"].bias, theirs.short_conv.conv.weight):
        nn.init.zeros_(zeros)

    config_class = decoder_class("engram").config_class
    eps = torch.finfo(torch.get_default_dtype()).eps  # its own
    options = dict(ffn="engram", stem_layers="1", ngram_rows=n_row, norm_eps=eps)
    decoder = decoder_class("engram")(config_class(**SHAPE, **options))
    ours = decoder.blocks[1].memory
    ours.load_state_dict({f"{name}.weight": there.weight for name, there in pairs.items()})
    table = theirs.multi_head_embedding
    decoder.tables.weight[0].data.copy_(table.embedding.weight.data)

    ids = torch.randint(vocab_size, (B, T))
    x = torch.randn(B, T, width)
    addresses = decoder.addresses(ids, T)  # [B, T, n_address]
    hashes = torch.from_numpy(theirs.hash_mapping.hash(ids)[1]) + table.offsets
    y = ours(x, next(decoder.layer_rows(addresses)))
    its_y = theirs(x[:, :, None], ids)[:, :, 0]  # [B, T, streams, n_embd] there
    y.square().sum().backward()
    its_y.square().sum().backward()
    found = {"addresses": difference(addresses, hashes), "output": difference(y, its_y)}
    for name, there in pairs.items():
        mine = ours.get_submodule(name).weight.grad
        found[f"gradient of {name}"] = difference(mine, there.weight.grad)
    return f"Engram ({commit(folder)}), memory and addresses", found


def commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.check_output(command, text=True).strip()


# --- the command ---


def whole(build: Callable[[], Original]) -> tuple[str, dict[str, float]]:
    original = build()
    return original.title, compare(counterpart(original), original)


def report(comparisons: list[Callable[[], tuple[str, dict[str, float]]]]) -> None:
    """Print the table. UserError: not everything is equal but for rounding."""
    beyond = []
    print("| original | largest relative difference: float32 | float64 |\n|---|---|---|")
    for comparison in comparisons:
        largest = []
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            with Throughout():
                title, found = comparison()
            largest.append(f"{max(found.values()):.0e}")
            for what, relative in found.items():
                if not relative <= TOLERANCE * torch.finfo(dtype).eps:  # NaN is more
                    beyond.append(f"{what} of {title} by {relative:.0e} in {dtype}")
        print("|", " | ".join([title, *largest]), "|")
    if beyond:
        raise UserError(f"{len(beyond)} differ beyond rounding: {beyond[0]}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--llama", action="store_true", help="compare dense models")
    parser.add_argument("--embformer", type=Path, metavar="DIR", help="clone of the author's code")
    parser.add_argument("--stem", type=Path, metavar="DIR", help="clone of the authors' code")
    parser.add_argument("--engram", type=Path, metavar="DIR", help="clone of the authors' code")
    args = parser.parse_args()
    sys.dont_write_bytecode = True  # into their folders
    builders = []
    if args.llama:
        builders += [partial(dense, *each) for each in DENSE]
    if args.embformer:
        builders.append(partial(embformer, args.embformer))
    if args.stem:
        builders += [partial(stem, args.stem, layers) for layers in ("all", "third")]
    comparisons = [partial(whole, build) for build in builders]
    if args.engram:
        comparisons.append(partial(engram, args.engram))
    if not comparisons:
        parser.error("name at least one of --llama, --embformer DIR, --stem DIR, --engram DIR")
    report(comparisons)


if __name__ == "__main__":
    run_command(main)
