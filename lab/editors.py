"""Ways to write facts into a model: rows of tokens, and what the field sets beside them.

    swap_rows     the name's tokens get the rows of another name's     edit.py --target --save
    write_rows    their rows are trained                               edit.py --write --save
    write_inputs  so are those of the input embedding: the control that a dense model has, too
    fine_tune     all weights are trained, or (FT-L: Zhu et al., arXiv 2012.00363) the `down` of
                  one FFN within a bound
    lora          an update of low rank is trained (Hu et al., arXiv 2106.09685)
    lora_as_rows  so it is, by all that `write_rows` does
    rome          one key of one FFN gets another value, in closed form (Meng et al., 2202.05262)
    memit         many keys of several FFNs do (Meng et al., 2210.07229)
    alphaedit     so they do, by updates that leave frequent keys alone (Fang et al., 2410.02355)

An FFN's `down` is a memory to ROME, MEMIT and AlphaEdit: its input is a key, its output the value.
In STEM, too, where a row of the token is part of the key.

ROME and MEMIT give the updates of their authors' code (github.com/kmeng01/memit), up to rounding,
but for the settings (lab/counterfact.py) and: the second moments' small ridge; as many texts before
the prompt for ROME as for MEMIT, of equal weight (in MEMIT's code, the prompt alone has half); what
`wanted_changes` says. FT-L there trains layer 0, and predicts all of an answer from the prompt
alone; here it is one of the layers that know most, and each token follows those before it.
AlphaEdit solves what its authors' code does (github.com/jianghoucheng/AlphaEdit). There, the null
space begins at an absolute second moment, and earlier keys are means over several texts, also of
the same subject (hardly ever edited twice there).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import pad_sequence
from torch.utils.hooks import RemovableHandle

from corpora.questions import with_answers
from model import Decoder
from tables.extra import rows_of
from training import writing
from training.edits import align

STEPS, VALUE_STEPS = 40, 25  # of Adam, for weights and for a value
ENOUGH = 0.01  # nats a token, at which training ends
PREFIXES = (5, 10)  # texts before the prompt, over which keys and values are averaged; tokens
KL, DECAY = 0.0625, 0.5  # ROME's weights of what else the name gives, and of the value's change
VALUE_ENOUGH = 0.05  # of these together, at which the search for a value ends, as its authors' does
TEXTS = (48, 64)  # of the model, that fine-tuning may hold; tokens
N_ABOUT = 32  # texts about a name, that MEMIT may hold


class Request(NamedTuple):
    """A fact to write, as token ids."""

    prompt: list[int]
    end: int  # where the name ends in the prompt
    name: list[int]
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


def alphaedit_update(
    second: Tensor, keys: Tensor, changes: Tensor, earlier: Tensor, null: float, ridge: float
) -> Tensor:
    """The update that changes the values of keys [n, d] by changes [n, m], and of `earlier` ones
    [k, d] hardly, with the least squared error among small updates that do not see the directions
    of most other keys: [m, d] (AlphaEdit, equation 14).

    null: the share of the `second` moment [d, d] in the directions that are left.
    ridge: weight of the update's size, beside a mean key's."""
    share, directions = torch.linalg.eigh(second)  # the smallest ones first
    left = directions[:, share.cumsum(0) <= null * share.sum()]
    project = left @ left.T
    size = ridge * second.trace() * torch.eye(len(second), dtype=second.dtype)
    seen = project @ (keys.T @ keys + earlier.T @ earlier) + size
    return torch.linalg.solve(seen, project @ keys.T @ changes).T


class Site(NamedTuple):
    """What a layer computes, for all tokens of all texts or for some of them."""

    key: Tensor  # the input of `down`, [..., d_ff]
    value: Tensor  # its output, [..., n_embd]
    state: Tensor  # the residual stream after the layer, [..., n_embd]

    def at(self, positions: Tensor) -> "Site":
        """Of one token [N] in each text."""
        return Site(*(tensor[range(len(positions)), positions] for tensor in self))


@torch.no_grad()
def watch(model: Decoder, ids: Tensor) -> list[Site]:
    """What the layers compute of texts [N, T]."""
    downs, states, hooks = [], [], []
    for block in model.blocks:
        hooks += [
            block.ffn.down.register_forward_hook(lambda _, given, out: downs.append((*given, out))),
            block.register_forward_hook(lambda _, given, out: states.append(out)),
        ]
    model.hidden(ids)
    for hook in hooks:
        hook.remove()
    return [Site(*down, state) for down, state in zip(downs, states, strict=True)]


def add_to_value(model: Decoder, layer: int, positions: Tensor, change: Tensor) -> RemovableHandle:
    """Within this handle, `down` gives `change` [N, n_embd] more at positions [N]."""

    def add(_, given, out: Tensor) -> Tensor:
        out = out.clone()
        out[range(len(positions)), positions] += change
        return out

    return model.blocks[layer].ffn.down.register_forward_hook(add)


@torch.no_grad()
def trace(model: Decoder, prompts: Tensor, positions: Tensor, answers: Tensor) -> list[float]:
    """How much the FFN of each layer knows of a name. Prompts [N, T] are read with the name of the
    previous one in place of their own. Then one FFN's value at the name is put back. By how much
    does that raise the mean probability of the answer's first token [N]? Names are one token, at
    positions [N].

    Causal tracing (ROME, section 2.1) with a name in place of noise, which STEM's rows would not
    read (as Zhang and Nanda, arXiv 2309.16042, recommend)."""
    at_name = (range(len(prompts)), positions)
    other = prompts.clone()
    other[at_name] = prompts[at_name].roll(1)

    def probability() -> float:
        p = model(other, last_only=True)[0][:, 0].softmax(-1)  # [N, V]
        return p[range(len(answers)), answers].mean().item()

    effects = []
    without = probability()
    own, others = watch(model, prompts), watch(model, other)
    for layer in range(len(own)):
        change = own[layer].at(positions).value - others[layer].at(positions).value
        with add_to_value(model, layer, positions, change):
            effects.append(probability() - without)
    return effects


class Editor:
    """What the methods take of a model as it was before all edits, and the methods, which change
    its weights in place. Of a sequence that stops and goes on, nothing else is kept: no hook, no
    codebook."""

    def __init__(self, model: Decoder, eot: int, corpus: Tensor, layers: list[int]) -> None:
        """corpus: windows of text [N, T], from which the second moments of keys are; layers: the
        numbers of all, those first whose FFNs know most of names (see `trace`)."""
        self.model = model.requires_grad_(False)
        self.layers = layers
        self.written: list[Request] = []  # before those that a method is given
        start = torch.tensor([[eot]])
        prefixes, n_token = PREFIXES
        self.prefixes = model.generate(start.repeat(prefixes, 1), n_token, seed=0).tolist()
        texts, n_token = TEXTS
        self.texts = model.generate(start.repeat(texts, 1), n_token, seed=1)  # [N, T]
        self.second = []  # moments of keys, by layer: [d_ff, d_ff]
        for site in watch(model, corpus):
            keys = site.key.flatten(0, 1)
            second = (keys.T @ keys / len(keys)).double()
            second += 1e-4 * second.diag().mean() * torch.eye(len(second))  # to be inverted
            self.second.append(second)

    def nothing(self, requests: list[Request]) -> None:
        """The control."""

    # --- rows ---

    def put(self, rows: dict[int, Tensor], place: str = "tables") -> None:
        """Let tokens have rows [n_table, W] in the tables at a place of the model."""
        for token, row in rows.items():
            for weight, new in zip(getattr(self.model, place).weight, row, strict=True):
                weight[token] = new

    def swap_rows(self, requests: list[Request], how: str) -> None:
        for request in requests:
            tokens = align(request.donor, len(request.name), how)
            rows = rows_of(self.model.tables, tokens)
            self.put(dict(zip(request.name, rows, strict=True)))

    def write_rows(self, requests: list[Request], place: str = "tables", **how: float) -> None:
        for request in requests:
            prompt, end, name, answer, _ = request
            begun = [prompt[: end + 1]]
            earlier = [(before.prompt, before.answer) for before in self.written]
            fact = prompt, name, answer, begun
            rows = writing.train_rows(self.model, *fact, earlier=earlier, place=place, **how)
            self.put(rows, place)

    def write_inputs(self, requests: list[Request], **how: float) -> None:
        self.write_rows(requests, place="wte", **how)

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
        facts = [(request.prompt, request.answer) for request in requests]
        ids, targets = with_answers(*zip(*facts, strict=True))
        with torch.no_grad():
            before = self.model(self.texts)[0].log_softmax(-1) if keep else None  # [N, T, V]
        start = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.requires_grad_()
        optimizer = torch.optim.Adam(weights, rate)
        for step in range(STEPS):
            _, loss = self.model(ids, targets)
            if loss < ENOUGH:
                break
            if keep:
                part = slice(step % 4, None, 4)
                now = self.model(self.texts[part])[0].log_softmax(-1).flatten(0, 1)
                held = before[part].flatten(0, 1)
                loss = loss + keep * F.kl_div(now, held, reduction="batchmean", log_target=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for weight, old in zip(weights, start, strict=True):
                weight.data.clamp_(old - bound, old + bound)
        self.model.requires_grad_(False)

    def fine_tune(self, requests: list[Request], rank: int | None = None, **how) -> None:
        """All weights, or those of one layer, that of a rank in `layers`."""
        model = self.model if rank is None else self.model.blocks[self.layers[rank]].ffn.down
        self.train(requests, list(model.parameters()), **how)

    @contextmanager
    def low_rank(self, rank: int) -> Iterator[list[nn.Parameter]]:
        """Updates of gates and down-projections, to be trained within."""
        torch.manual_seed(0)
        weights = []
        updated = [part for block in self.model.blocks for part in (block.ffn.gate, block.ffn.down)]
        for linear in updated:
            update = LowRank(linear.weight, rank)
            parametrize.register_parametrization(linear, "weight", update)
            weights += update.parameters()
        yield weights
        for linear in updated:
            parametrize.remove_parametrizations(linear, "weight")

    def lora(self, requests: list[Request], rank: int, **how) -> None:
        with self.low_rank(rank) as weights:
            self.train(requests, weights, **how)

    def lora_as_rows(
        self, requests: list[Request], rank: int, others: int = 0, **how: float
    ) -> None:
        """The control of rows: the same texts about the name are held, and the same is taught. Rows
        spare other names by themselves; here, some `others` of the model's texts may be held."""
        for request in requests:
            about = [request, *(old for old in self.written if old.name == request.name)]
            facts = [(fact.prompt, fact.answer) for fact in about]
            texts = writing.texts_about(self.model, [request.prompt[: request.end + 1]])
            texts = pad_sequence([*texts, *self.texts[:others, : texts.shape[1]]], True)
            with self.low_rank(rank) as weights:
                writing.write_fact(self.model, weights, facts, [request.name], texts, **how)

    # --- keys and values ---

    def in_texts(self, requests: list[Request]) -> tuple[Tensor, Tensor, Tensor]:
        """Each prompt as it is and after other texts, with its answer: ids and targets [N, T], and
        where names end [N]."""
        prompts, positions, answers = [], [], []
        for request in requests:
            for prefix in ([], *self.prefixes):
                prompts.append([*prefix, *request.prompt])
                positions.append(len(prefix) + request.end)
                answers.append(request.answer)
        return *with_answers(prompts, answers), torch.tensor(positions)

    def about(self, request: Request) -> tuple[Tensor, Tensor, Tensor]:
        """What written rows hold (training/writing.py), of fewer texts and after the name alone:
        texts that the model writes about it [N, T], where they do not ask for the fact [N, T] bool,
        and log p of what follows there."""
        begun = request.prompt[: request.end + 1]
        texts = writing.texts_about(self.model, [begun])[:N_ABOUT]
        prompt = torch.tensor(request.prompt)
        held = ~writing.ask_the_same(self.model, prompt, [request.name], texts)
        held[:, : len(begun)] = False
        return texts, held, self.model(texts)[0][held].log_softmax(-1)

    def divergence(
        self, about: tuple[Tensor, Tensor, Tensor], layer: int, end: int, change: Tensor
    ) -> Tensor:
        """KL from what `about` holds, if `change` [n_embd] is added to a layer's value at the end
        of the name: the mean over places."""
        texts, held, before = about
        ends = torch.full((len(texts),), end)
        with add_to_value(self.model, layer, ends, change.expand(len(texts), -1)):
            now = self.model(texts)[0][held].log_softmax(-1)
        return F.kl_div(now, before, reduction="batchmean", log_target=True)

    def wanted_changes(
        self, requests: list[Request], layer: int, limit: float, rate: float, hold: float = 0.0
    ) -> Tensor:
        """What, added to an FFN's value at the end of the name, lets the answer follow the prompt
        in several texts, [n, n_embd] (ROME, equation 4): no longer than `limit` times the residual
        stream there (in ROME's code: times the value). hold: weight of the divergence in other
        texts about the name, too.

        The authors hold the prediction at the name's last token. Here, a line break always follows:
        the prediction one token later is held. Of 25 steps, their code leaves out the last one's
        update."""
        with torch.no_grad():
            abouts = [self.about(request) for request in requests if hold]
        ids, targets, positions = self.in_texts(requests)  # [N, T] twice, [N]
        n_text = len(ids) // len(requests)
        after_name = (range(len(ids)), positions + 1)
        with torch.no_grad():
            held = self.model(ids)[0][after_name].log_softmax(-1)  # [N, V]
        state = watch(self.model, ids)[layer].at(positions).state[::n_text]  # of the prompts alone
        size = state.norm(dim=1, keepdim=True)  # [n, 1]
        share = (targets >= 0) / (targets >= 0).sum(1, keepdim=True)  # of an answer, [N, T]
        change = torch.zeros_like(state, requires_grad=True)  # [n, n_embd]
        optimizer = torch.optim.Adam([change], rate)
        going = torch.ones(len(change), dtype=torch.bool)  # facts that are not yet given
        for _ in range(VALUE_STEPS):
            added = change.repeat_interleave(n_text, 0)  # [N, n_embd]
            with add_to_value(self.model, layer, positions, added):
                logits, _ = self.model(ids)  # [N, T, V]
            nats = F.cross_entropy(logits.mT, targets, ignore_index=-1, reduction="none")  # [N, T]
            now = logits[after_name].log_softmax(-1)
            kl = F.kl_div(held, now, reduction="none", log_target=True)  # of now from held, [N, V]
            of_text = (nats * share).sum(1) + KL * kl.sum(1)  # [N]
            decay = change.norm(dim=1) / size[:, 0] ** 2  # [n]
            loss = of_text.unflatten(0, (-1, n_text)).mean(1) + DECAY * decay  # of a fact, [n]
            if hold:
                facts = zip(abouts, requests, change, strict=True)
                changed = [self.divergence(a, layer, r.end, one) for a, r, one in facts]
                loss = loss + hold * torch.stack(changed)
            going &= loss.detach() >= VALUE_ENOUGH
            if not going.any():
                break
            optimizer.zero_grad()
            loss.sum().backward()
            found = change.detach().clone()
            optimizer.step()
            length = change.data.norm(dim=1, keepdim=True)
            change.data *= (limit * size / length).clamp(max=1)
            change.data[~going] = found[~going]
        return change.detach()

    def rome(self, requests: list[Request], rank: int, **how: float) -> None:
        """Into one layer, that of a rank in `layers`."""
        layer = self.layers[rank]
        for request in requests:
            change = self.wanted_changes([request], layer, **how)[0]
            ids, _, positions = self.in_texts([request])
            keys = watch(self.model, ids)[layer].at(positions).key.double()  # [n_text, d_ff]
            update = rome_update(self.second[layer], keys.mean(0), keys[0], change.double())
            self.model.blocks[layer].ffn.down.weight += update.float()

    def memit(
        self, requests: list[Request], n_layer: int, weight: float, again: bool = False, **how
    ) -> None:
        """`again`: with what was written about the same names."""
        names = [request.name for request in requests]
        requests = requests + [old for old in self.written if again and old.name in names]

        def update(layer: int, keys: Tensor, changes: Tensor) -> Tensor:
            return memit_update(self.second[layer], keys, changes, weight)

        self.change_values(requests, n_layer, update, **how)

    def alphaedit(
        self, requests: list[Request], n_layer: int, null: float, ridge: float, **how
    ) -> None:
        """Earlier keys are those of the prompts alone, as the model has them now. Those of the same
        names are not held: where a fact has nothing but the name before it, all facts about a name
        have one key, which could then never get another value."""
        names = [request.name for request in requests]
        written = [old for old in self.written if old.name not in names]

        def update(layer: int, keys: Tensor, changes: Tensor) -> Tensor:
            earlier = keys[:0]
            if written:
                prompts = [torch.tensor(old.prompt) for old in written]
                sites = watch(self.model, pad_sequence(prompts, batch_first=True))
                ends = torch.tensor([old.end for old in written])
                earlier = sites[layer].at(ends).key.double()  # [k, d_ff]
            second = self.second[layer]
            return alphaedit_update(second, keys, changes, earlier, null, ridge)

        self.change_values(requests, n_layer, update, **how)

    def change_values(
        self, requests: list[Request], n_layer: int, update_of: Callable[..., Tensor], **how: float
    ) -> None:
        """Of the first n_layer of `layers`, from the lowest one on, by updates of `down` that are
        made of a layer's number, keys [n, d_ff] and the changes of their values [n, n_embd]."""
        layers = sorted(self.layers[:n_layer])
        ids, _, positions = self.in_texts(requests)
        n_text = len(ids) // len(requests)
        change = self.wanted_changes(requests, layers[-1], **how)
        wanted = watch(self.model, ids)[layers[-1]].at(positions).state[::n_text] + change
        for number, layer in enumerate(layers):
            sites = watch(self.model, ids)
            left = wanted - sites[layers[-1]].at(positions).state[::n_text]
            change = left.double() / (len(layers) - number)
            keys = sites[layer].at(positions).key.double()
            keys = keys.unflatten(0, (-1, n_text)).mean(1)  # [n, d_ff]
            update = update_of(layer, keys, change)
            self.model.blocks[layer].ffn.down.weight += update.float()
