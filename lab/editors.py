"""Ways to write facts into a model: rows of tokens, and what the field sets beside them.

    swap_rows     the name's tokens get the rows of another name's     edit.py --target --save
    write_rows    their rows are trained                               edit.py --write --save
    fine_tune     weights are trained: all, or those of one layer within a bound
    lora          an update of low rank is trained (Hu et al., arXiv 2106.09685)
    rome          one key of one FFN gets another value, in closed form (Meng et al., 2202.05262)
    memit         many keys of several FFNs do (Meng et al., 2210.07229)

An FFN's `down` is a memory to ROME and MEMIT: its input is a key, its output the value. In STEM,
too, where a row of the token is part of the key.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from model import Decoder
from stem import align, substitute
from training import writing
from training.questions import pad_together

STEPS = 40  # of Adam, for weights; 25 for a value, as in ROME
ENOUGH = 0.01  # nats a token, at which training ends
N_PREFIX, PREFIX_TOKENS = 5, 10  # texts before the prompt, over which keys and values are averaged
KL, DECAY = 0.0625, 0.5  # ROME's weights of what else the name gives, and of the value's change
N_TEXT, TEXT_TOKENS = 48, 64  # texts of the model that fine-tuning may hold


class Request(NamedTuple):
    """A fact to write, as token ids."""

    prompt: list[int]
    name: list[int]  # what the fact is about, once in the prompt
    answer: list[int]
    donor: list[int]  # the name of which the answer is true


class LowRank(nn.Module):
    """A weight [m, n] plus B A, of which A and B are trained."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, weight.shape[1]) / rank**0.5)
        self.b = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


# --- closed forms ---


def rome_update(second: Tensor, mean_key: Tensor, key: Tensor, change: Tensor) -> Tensor:
    """The update of a weight that changes the value of `key` [d] by `change` [m], and those of
    other keys least: [m, d] (ROME, equation 2). second: the second moment of keys [d, d]; mean_key
    [d]: of the name in several texts, gives the direction."""
    direction = torch.linalg.solve(second, mean_key)
    return torch.outer(change, direction / (direction @ key))


def memit_update(second: Tensor, keys: Tensor, changes: Tensor, weight: float) -> Tensor:
    """The update that changes the values of keys [n, d] by changes [n, m] with the least squared
    error, where `weight` other keys with a `second` moment [d, d] are to keep theirs: [m, d]
    (MEMIT, equation 14)."""
    return torch.linalg.solve(weight * second + keys.T @ keys, keys.T @ changes).T


# --- what a model computes at a name ---


def ends(ids: Tensor, name: list[int]) -> Tensor:
    """Where the first occurrence of a name ends in texts [N, T]: [N]."""
    found = substitute(ids, name, [-1]) == -1  # [N, T]
    return found.int().argmax(1) + len(name) - 1


class Site(NamedTuple):
    """What one layer computes at some positions."""

    key: Tensor  # the input of `down`, [N, d_ff]
    value: Tensor  # its output, [N, n_embd]
    state: Tensor  # the residual stream after the layer, [N, n_embd]


@torch.no_grad()
def at(model: Decoder, layer: int, ids: Tensor, positions: Tensor) -> Site:
    """What a layer computes for texts [N, T] at a position of each [N]."""
    seen = {}
    block = model.blocks[layer]
    hooks = [
        block.ffn.down.register_forward_hook(
            lambda _, inputs, output: seen.update(key=inputs[0], value=output)
        ),
        block.register_forward_hook(lambda _, inputs, output: seen.update(state=output)),
    ]
    model.hidden(ids)
    for hook in hooks:
        hook.remove()
    return Site(**{name: tensor[range(len(ids)), positions] for name, tensor in seen.items()})


def add_to_value(down: nn.Module, positions: Tensor, change: Tensor) -> RemovableHandle:
    """Until the handle is removed, `down` gives `change` [N, n_embd] more at positions [N]."""

    def add(_, inputs, output: Tensor) -> Tensor:
        output = output.clone()
        output[range(len(positions)), positions] += change
        return output

    return down.register_forward_hook(add)


@torch.no_grad()
def trace(model: Decoder, prompts: Tensor, positions: Tensor, answers: Tensor) -> list[float]:
    """How much of the first token of its answer [N] the FFN of each layer restores at a name, where
    prompts [N, T] are read with the name of the next one: its mean probability with the FFN's
    value from the prompt as it is, less that without. Names are one token, at positions [N].

    Causal tracing (ROME, section 2.1) with a name in place of noise, which STEM's rows would not
    read (as Zhang and Nanda, arXiv 2309.16042, recommend)."""
    at_name = (range(len(prompts)), positions)
    other = prompts.clone()
    other[at_name] = prompts[at_name].roll(1)

    def probability() -> float:
        logits, _ = model(other, last_only=True)  # [N, 1, V]
        return logits[:, 0].softmax(-1)[range(len(answers)), answers].mean().item()

    without = probability()
    effects = []
    for layer, block in enumerate(model.blocks):
        change = at(model, layer, prompts, positions).value
        change = change - at(model, layer, other, positions).value
        hook = add_to_value(block.ffn.down, positions, change)
        effects.append(probability() - without)
        hook.remove()
    return effects


class Editor:
    """What the methods take of a model as it was before all edits, and the methods, which change
    its weights in place."""

    def __init__(self, model: Decoder, eot: int, corpus: Tensor, layers: list[int]) -> None:
        """corpus: windows of text [N, T], from which the second moments of keys are; layers: the
        numbers of all, those first whose FFNs know most of names (see `trace`)."""
        self.model = model.requires_grad_(False)
        self.layers = layers
        start = torch.tensor([[eot]])
        self.prefixes = model.generate(start.repeat(N_PREFIX, 1), PREFIX_TOKENS, seed=0).tolist()
        self.texts = model.generate(start.repeat(N_TEXT, 1), TEXT_TOKENS, seed=1)  # [N, T]
        self.second = self.second_moments(corpus)  # of each layer

    @torch.no_grad()
    def second_moments(self, corpus: Tensor) -> list[Tensor]:
        """The mean of k k^T over the keys of a corpus in each layer, [d_ff, d_ff]."""
        moments = [0 for _ in self.model.blocks]

        def add(layer: int, keys: Tensor) -> None:  # [B, T, d_ff]
            keys = keys.flatten(0, 1)
            moments[layer] += keys.T @ keys / corpus.numel()

        hooks = [
            block.ffn.down.register_forward_hook(lambda _, inputs, out, n=n: add(n, *inputs))
            for n, block in enumerate(self.model.blocks)
        ]
        for part in corpus.split(16):
            self.model.hidden(part)
        for hook in hooks:
            hook.remove()
        # Twice as exact, and with a little on the diagonal, to be inverted.
        moments = [moment.double() for moment in moments]
        return [m + 1e-4 * m.diag().mean() * torch.eye(len(m)) for m in moments]

    def nothing(self, requests: list[Request]) -> None:
        """The control."""

    # --- rows ---

    @torch.no_grad()
    def put(self, name: list[int], rows: Tensor) -> None:
        """Let the tokens of a name have rows [n, n_table, W]."""
        for weight, new in zip(self.model.tables.weight, rows.unbind(1), strict=True):
            weight[name] = new

    def swap_rows(self, requests: list[Request], how: str) -> None:
        for request in requests:
            tokens = align(request.donor, len(request.name), how)
            self.put(request.name, writing.rows_of(self.model.tables, tokens))

    def write_rows(self, requests: list[Request], keep: float) -> None:
        tables = self.model.tables
        writing.KEEP = keep
        for request in requests:
            writing.train_rows(self.model, request.prompt, request.name, request.answer)
            rows = self.model.tables.extra.detach()
            self.model.tables = tables
            self.put(request.name, rows)

    # --- weights ---

    def train(
        self,
        requests: list[Request],
        weights: list[nn.Parameter],
        rate: float,
        keep: float = 0,
        bound: float = torch.inf,
    ) -> None:
        """Train weights until answers follow prompts.

        Args:
            keep: weight of the KL divergence from what the model predicted of its own texts.
            bound: the most that a number may change.
        """
        model = self.model
        prompts = [request.prompt for request in requests]
        ids, targets = teach(prompts, [request.answer for request in requests])
        start = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.requires_grad_()
        with torch.no_grad():
            before = model(self.texts)[0].log_softmax(-1) if keep else None  # [N, T, V]
        optimizer = torch.optim.Adam(weights, rate)
        for step in range(STEPS):
            _, loss = model(ids, targets)
            if loss < ENOUGH:
                break
            if keep:
                part = slice(step % 4, None, 4)
                now = model(self.texts[part])[0].log_softmax(-1).flatten(0, 1)
                held = before[part].flatten(0, 1)
                loss = loss + keep * F.kl_div(now, held, reduction="batchmean", log_target=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for weight, old in zip(weights, start, strict=True):
                    weight.copy_(weight.clamp(old - bound, old + bound))
        model.requires_grad_(False)

    def fine_tune(self, requests: list[Request], **how: float) -> None:
        """Train all weights."""
        self.train(requests, list(self.model.parameters()), **how)

    def fine_tune_layer(self, requests: list[Request], **how: float) -> None:
        """Train the down-projection of one layer within a bound: FT-L (Zhu et al., 2020,
        arXiv 2012.00363)."""
        self.train(requests, [self.model.blocks[self.layers[0]].ffn.down.weight], **how)

    def lora(self, requests: list[Request], rank: int, **how: float) -> None:
        """Updates of gates and down-projections."""
        torch.manual_seed(0)
        updated = [block.ffn.gate for block in self.model.blocks]
        updated += [block.ffn.down for block in self.model.blocks]
        weights = []
        for linear in updated:
            low_rank = LowRank(linear.weight, rank)
            parametrize.register_parametrization(linear, "weight", low_rank)
            weights += [low_rank.a, low_rank.b]
        self.train(requests, weights, **how)
        for linear in updated:
            parametrize.remove_parametrizations(linear, "weight")
        self.model.requires_grad_(False)

    # --- keys and values ---

    def in_texts(self, request: Request) -> list[list[int]]:
        """The prompt as it is, and after other texts."""
        return [request.prompt] + [[*prefix, *request.prompt] for prefix in self.prefixes]

    def wanted_changes(
        self, requests: list[Request], layer: int, limit: float, rate: float
    ) -> Tensor:
        """What, added to an FFN's value at the end of the name, lets the answer follow the prompt
        in several texts, [n, n_embd] (ROME, equation 4): no longer than `limit` times the residual
        stream there."""
        model = self.model
        prompts = [prompt for request in requests for prompt in self.in_texts(request)]
        n_text = len(prompts) // len(requests)
        answers = [request.answer for request in requests for _ in range(n_text)]
        ids, targets = teach(prompts, answers)
        positions = name_ends(requests, prompts, n_text)
        with torch.no_grad():
            held = model(ids)[0][range(len(ids)), positions + 1].log_softmax(-1)  # [N, V]
        size = at(model, layer, ids, positions).state[::n_text].norm(dim=1, keepdim=True)  # [n, 1]
        weight = (targets >= 0) / (targets >= 0).sum(1, keepdim=True)  # [N, T], mean over an answer
        change = torch.zeros(len(requests), model.config.n_embd, requires_grad=True)
        optimizer = torch.optim.Adam([change], rate)
        for _ in range(25):
            added = change.repeat_interleave(n_text, 0)
            hook = add_to_value(model.blocks[layer].ffn.down, positions, added)
            logits, _ = model(ids)  # [N, T, V]
            hook.remove()
            nats = F.cross_entropy(logits.mT, targets, ignore_index=-1, reduction="none")  # [N, T]
            now = logits[range(len(ids)), positions + 1].log_softmax(-1)
            kl = F.kl_div(now, held, reduction="sum", log_target=True)
            decay = (change.norm(dim=1, keepdim=True) / size**2).sum()
            loss = ((nats * weight).sum() + KL * kl) / n_text + DECAY * decay
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                longest = limit * size
                change *= (longest / change.norm(dim=1, keepdim=True)).clamp(max=1)
        return change.detach()

    def mean_keys(self, requests: list[Request], layer: int) -> Tensor:
        """The key at the end of each name, on average over texts: [n, d_ff]."""
        prompts = [prompt for request in requests for prompt in self.in_texts(request)]
        n_text = len(prompts) // len(requests)
        positions = name_ends(requests, prompts, n_text)
        ids = pad_together(prompts, [[]] * len(prompts))
        keys = at(self.model, layer, ids, positions).key  # [n * n_text, d_ff]
        return keys.unflatten(0, (-1, n_text)).mean(1)

    def rome(self, requests: list[Request], rank: int, limit: float, rate: float) -> None:
        """Into one layer, that of a rank in `layers`."""
        layer = self.layers[rank]
        weight = self.model.blocks[layer].ffn.down.weight
        for request in requests:
            change = self.wanted_changes([request], layer, limit, rate)[0]
            prompt = torch.tensor([request.prompt])
            key = at(self.model, layer, prompt, ends(prompt, request.name)).key[0]
            mean_key = self.mean_keys([request], layer)[0]
            update = rome_update(
                self.second[layer], mean_key.double(), key.double(), change.double()
            )
            weight += update.to(weight.dtype)

    def memit(
        self, requests: list[Request], n_layer: int, weight: float, limit: float, rate: float
    ) -> None:
        """Into the first n_layer of `layers`, from the lowest one on."""
        layers = sorted(self.layers[:n_layer])
        last = layers[-1]
        prompts = [request.prompt for request in requests]
        ids = pad_together(prompts, [[]] * len(prompts))
        positions = name_ends(requests, prompts, 1)
        wanted = at(self.model, last, ids, positions).state
        wanted = wanted + self.wanted_changes(requests, last, limit, rate)
        for number, layer in enumerate(layers):
            left = wanted - at(self.model, last, ids, positions).state
            change = left / (len(layers) - number)
            keys = self.mean_keys(requests, layer)
            update = memit_update(self.second[layer], keys.double(), change.double(), weight)
            down = self.model.blocks[layer].ffn.down.weight
            down += update.to(down.dtype)


def teach(prompts: list[list[int]], answers: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Texts, and what is to follow each position: [N, T] each, -1 where nothing is taught."""
    ids = pad_together(prompts, answers)
    targets = pad_together([[-1] * len(prompt) for prompt in prompts], answers, filler=-1)
    return ids, F.pad(targets[:, 1:], (0, 1), value=-1)


def name_ends(requests: list[Request], prompts: list[list[int]], n_text: int) -> Tensor:
    """Where the name ends in each of n_text prompts of every request, the last time: [N]."""
    found = []
    for i, prompt in enumerate(prompts):
        request = requests[i // n_text]
        first = ends(torch.tensor([request.prompt]), request.name)
        found.append(len(prompt) - len(request.prompt) + first)
    return torch.cat(found)
