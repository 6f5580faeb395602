"""Tiny models, and a decoder written out naively to compare them with."""

import math

import numpy as np
import torch
from torch import nn

from model import Decoder, decoder_class, relatives

LAYERS = ("dense", "stem", "embformer", *relatives("Decoder"))
TINY = dict(vocab_size=23, block_size=32, n_layer=3, n_head=4, n_embd=32, d_ff=48)


def decoder(kind: type[Decoder] | None = None, **options) -> Decoder:
    """A tiny decoder, of a class or of a kind of --ffn, with weights so large, norm scales
    included, that each of them matters."""
    torch.manual_seed(0)
    kind = kind or decoder_class(options.get("ffn", "stem"))
    model = kind(kind.config_class(**{**TINY, **options}))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


class TwoRows(Decoder):
    """A token reads its row and the next one in the table."""

    def make_tables(self, tables, widths):
        return tables(len(widths), self.config.vocab_size, widths[0] // 2)

    def addresses(self, ids, n, documents=None):
        return torch.stack((ids, (ids + 1) % self.config.vocab_size), dim=-1)[:, -n:]

    def layer_rows(self, addresses):
        return (rows.flatten(2) for rows in super().layer_rows(addresses))


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(TINY["vocab_size"], shape, generator=generator)


def silu(x):
    return x / (1 + torch.exp(-x))


def norm(x, scale=1.0, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * scale


def rotate(x, base, scaling):
    """x [T, heads, head_dim]: channels i and i + head_dim/2 are one complex number, turned by an
    angle; slowed down as in Meta's Llama 3.1."""
    half = x.shape[-1] // 2
    speeds = []
    for i in range(half):
        speed = base ** (-i / half)  # radians per token
        if scaling:
            factor, low, high, context = scaling
            smooth = (context * speed / (2 * math.pi) - low) / (high - low)
            smooth = min(max(smooth, 0.0), 1.0)
            speed = (1 - smooth) * speed / factor + smooth * speed
        speeds.append(speed)
    angles = torch.arange(len(x))[:, None] * torch.tensor(speeds, dtype=torch.float64)  # [T, half]
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def mix(x, n_head):
    """x [..., n_embd]: output [i, j] takes input [(i + j) mod n_head, j]."""
    width = x.shape[-1] // n_head
    channels = []
    for i in range(n_head):
        for j in range(width):
            channels.append(x[..., (i + j) % n_head * width + j])
    return torch.stack(channels, dim=-1)


def naive_addresses(config, ids, documents):
    """Of n-grams, as in the code of Engram's paper: ids [T] -> a list of addresses for each."""
    longest = max(map(int, config.ngram_orders.split(",")))
    rng = np.random.default_rng(10007 * config.row_layers[0])
    half = max(1, np.iinfo(np.int64).max // config.vocab_size // 2)
    m = rng.integers(0, half, size=longest, dtype=np.int64) * 2 + 1
    found = []
    for t in range(len(ids)):
        row = []
        offset = 0
        prime = config.ngram_rows - 1
        for n in range(2, longest + 1):
            mixed = 0
            for k in range(n):
                if t - k >= 0 and documents[t - k] == documents[t]:
                    mixed ^= int(ids[t - k]) * int(m[k])
            for _ in range(config.ngram_heads):
                prime += 1
                while any(prime % d == 0 for d in range(2, prime)):
                    prime += 1
                row.append(mixed % prime + offset)
                offset += prime
        found.append(row)
    return found


def memory(x, rows, w, name):
    """Engram's, of weights that are called so."""
    query = norm(x, w[name + "query_norm.weight"])
    key = norm(rows @ w[name + "key.weight"].T, w[name + "key_norm.weight"])
    s = (query * key).sum(-1, keepdim=True) / x.shape[1] ** 0.5
    gate = 1 / (1 + torch.exp(-s.sign() * s.abs().sqrt()))
    return gate * (rows @ w[name + "value.weight"].T)


# --- FFNs of relatives/: weights, x [n_embd] of a token, its row, its id -> [n_embd] ---


def swiglu(w, x, hidden=slice(None)):
    """The dense FFN, or some of its hidden units."""
    gate = w["gate.weight"][hidden]
    up = w["up.weight"][hidden]
    down = w["down.weight"][:, hidden]
    return down @ (silu(gate @ x) * (up @ x))


def expert(w, x, number):
    """Experts are 16 hidden units wide."""
    return swiglu(w, x, slice(16 * number, 16 * number + 16))


def best_three(scores):
    """Of scores by number: the highest, by softmax."""
    best = sorted(scores, key=scores.get)[-3:]
    exps = {number: torch.exp(scores[number]) for number in best}
    total = sum(exps.values())
    return {number: exps[number] / total for number in best}


def moe(w, x, row, token):
    chosen = best_three(dict(enumerate(w["router.weight"] @ x)))
    return sum(share * expert(w, x, number) for number, share in chosen.items())


def hash_moe(w, x, row, token):
    return sum(expert(w, x, number) for number in w["hashes"][token].tolist())


def pkm(w, x, row, token):
    """Every one of the 25 products scored, without the trick."""
    queries = (w["query.weight"] @ x).view(4, 2, -1)  # heads, halves
    keys = w["keys"].view(4, 2, 5, -1)
    y = torch.zeros_like(x)
    for head in range(4):
        first, second = norm(queries[head])
        scores = (keys[head, 0] @ first)[:, None] + keys[head, 1] @ second  # [5, 5]
        for number, share in best_three(dict(enumerate(scores.flatten()))).items():
            y = y + share * w["values.weight"][number]
    return y


def deepembed(w, x, row, token):
    hidden = silu(w["gate.weight"] @ x) * (w["up.weight"] @ x)
    return w["down.weight"] @ (hidden + hidden * row)


def ple(w, x, row, token):
    g = w["row_gate.weight"] @ x
    tanh = torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))
    gelu = 0.5 * g * (1 + tanh)
    return swiglu(w, x) + w["row_out.weight"] @ (gelu * row)


def stem_additive(w, x, row, token):
    return w["down.weight"] @ (silu(w["gate.weight"] @ x) * (w["up.weight"] @ x + row))


def stem_gate(w, x, row, token):
    return w["down.weight"] @ (silu(row) * (w["up.weight"] @ x))


FFNS = {ffn.__name__: ffn for ffn in (moe, hash_moe, pkm, deepembed, ple, stem_additive, stem_gate)}
SIZES = {
    "moe": dict(n_expert=6, top_k=3),
    "hash_moe": dict(n_expert=6, top_k=3),
    "pkm": dict(n_key=5, top_k=3),
    "deepembed": dict(),
    "ple": dict(ple_width=6),
    "stem_additive": dict(),
    "stem_gate": dict(),
}


# --- the decoder ---


def naive_logits(config, w, ids, table_ids, documents):
    """Logits [T, V] for ids [T]; each layer weighs all pairs of tokens. w: weights by name, in
    double precision."""
    width = config.head_dim
    kv = config.n_kv_head * width
    i = torch.arange(len(ids))[:, None]
    j = torch.arange(len(ids))
    before = torch.where(documents == documents.roll(1), j - 1, j).clamp(min=0)
    causal = (j <= i) & (documents[:, None] == documents)
    key_head = torch.arange(config.n_head) // (config.n_head // config.n_kv_head)
    patterns = config.attention.split(",")
    if config.ffn in ("engram", "bigram", "stem_ngrams"):
        table_ids = torch.tensor(naive_addresses(config, table_ids, documents))  # [T, R]
    table = 0
    x = w["wte.weight" if config.tie_head else "wte.weight.0"][ids]
    for layer in range(config.n_layer):
        block = f"blocks.{layer}."
        attention, _, argument = patterns[layer % len(patterns)].partition(":")
        kind = config.ffn
        everywhere = ("embformer", "bigram", "moe", "hash_moe", "pkm", "deepembed", "ple")
        if layer not in config.row_layers and kind not in everywhere:
            kind = "dense"
        rows = [None] * len(ids)
        if kind not in ("dense", "moe", "hash_moe", "pkm"):
            rows = w[f"tables.weight.{table}"][table_ids].flatten(1)
            table += kind != "bigram" and getattr(config, "engram_table", "own") == "own"
        if kind == "bigram":
            x = x + w[block + "weight"] * rows
        if kind == "engram" and config.engram_place == "before":
            x = x + memory(x, rows, w, block + "memory.")
        normed = norm(x, w.get(block + "attn_norm.weight", 1.0), config.norm_eps)
        if kind == "embformer":
            k, v, rows = rows.split((kv, kv, config.n_embd), dim=1)
            q = normed
        elif kind in ("bank", "memory"):
            qk = normed @ w[block + "attn.qkv.qk.weight"].T
            q, k = qk.split((config.n_head * width, kv), dim=1)
            v = (
                rows
                if kind == "bank"
                else k + norm(rows.unflatten(1, (-1, width)), eps=config.norm_eps).flatten(1)
            )
        else:
            wrapped = attention in ("qknorm", "qkvbias")
            name = "attn.qkv.qkv.qkv.weight" if wrapped else "attn.qkv.qkv.weight"
            qkv = normed @ w[block + name].T
            if attention == "qkvbias":
                qkv = qkv + w[block + "attn.qkv.bias"]
            q, k, v = qkv.split((config.n_head * width, kv, kv), dim=1)
        if kind == "value":
            weight = w.get(block + "attn.qkv.weight")
            if config.value_gate:
                gate = normed @ w[block + "attn.qkv.gate.weight"].T  # [T, n_kv_head]
                weight = (2 / (1 + torch.exp(-gate))).repeat_interleave(width, dim=1)
            v = v + weight * rows
        q = q.unflatten(1, (-1, width))  # [T, heads, head_dim]
        k = k.unflatten(1, (-1, width))
        v = v.unflatten(1, (-1, width))
        if kind == "embformer":
            q = norm(q, eps=config.norm_eps)
            k = norm(k, eps=config.norm_eps)
        if attention == "qknorm":
            q = norm(q, w[block + "attn.qkv.q_norm.weight"], config.norm_eps)
            k = norm(k, w[block + "attn.qkv.k_norm.weight"], config.norm_eps)
        if attention == "previous":
            n = int(argument)
            k = torch.cat((k[before][:, :n], k[:, n:]), dim=1)
        if attention == "linear":  # exp(x) or x + 1, positive
            q = torch.where(q > 0, q + 1, q.exp())
            k = torch.where(k > 0, k + 1, k.exp())
            total = torch.einsum("ihd,jhd->hij", q, k[:, key_head])
        q = rotate(q, config.rope_base, config.rope_scaling)
        k = rotate(k, config.rope_base, config.rope_scaling)
        scores = torch.einsum("ihd,jhd->hij", q, k[:, key_head]) / width**0.5
        seen = causal
        if attention == "window":
            seen = causal & (i - j < int(argument))
        weight = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        if attention == "linear":
            total = (total * seen).sum(-1, keepdim=True)
            weight = scores * width**0.5 * seen / total
        y = torch.einsum("hij,jhd->ihd", weight, v[:, key_head]).flatten(1)
        if kind != "embformer":
            y = y @ w[block + "attn.out.weight"].T
        x = x + y
        normed = norm(x, w.get(block + "ffn_norm.weight", 1.0), config.norm_eps)
        if kind == "embformer":
            gate = silu(normed) if config.embformer_act == "silu" else normed
            y = mix(gate * rows, config.n_head)
        elif kind in FFNS:
            name = block + "ffn."
            own = {key.removeprefix(name): w[key] for key in w if key.startswith(name)}
            each = zip(normed, rows, table_ids, strict=True)
            y = torch.stack([FFNS[kind](own, *token) for token in each])
        else:
            gate = silu(normed @ w[block + "ffn.gate.weight"].T)
            up = rows if kind in ("stem", "stem_ngrams") else normed @ w[block + "ffn.up.weight"].T
            if kind == "engram" and config.engram_place == "ffn":
                up = up + memory(normed, rows, w, block + "ffn.memory.")
            y = (gate * up) @ w[block + "ffn.down.weight"].T
        x = x + y
    head = w["wte.weight" if config.tie_head else "head.weight"]
    return norm(x, w.get("norm.weight", 1.0), config.norm_eps) @ head.T


@torch.no_grad()
def naive_greedy(model, ids, n, table_ids):
    """Without a cache; a context that has outgrown block_size is cut to its last half."""
    size = model.config.block_size
    context = ids[:, -size:]
    read = table_ids[:, -size:]
    for _ in range(n):
        if context.shape[1] > size:
            context = context[:, -(size // 2) :]
            read = read[:, -(size // 2) :]
        logits, _ = model(context, table_ids=read)
        token = logits[:, -1].argmax(-1, keepdim=True)
        context = torch.cat((context, token), dim=1)
        read = torch.cat((read, token), dim=1)
        ids = torch.cat((ids, token), dim=1)
    return ids
