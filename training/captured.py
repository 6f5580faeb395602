"""Decoding on a GPU, where a token's layers are replayed as one graph.

A token's kernels take a GPU less time than the host takes to launch them one by one. A graph (of
CUDA) is launched as a whole. Its kernels read and write the same memory each time, so what differs
from token to token lies in tensors: the token's embedding, its rows, and its position.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from model import Cache, Decoder, additive

PATIENCE = 8  # tokens of a text before its steps are captured, which takes as long as a few


def captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A function that replays what `run` does on the GPU, and returns the same tensor anew."""
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):  # libraries allocate what they need
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


class CapturedStep:
    """A step of decoding with a cache of keys and values. Rows are looked up outside of the graph:
    they may be anywhere."""

    def __init__(self, model: Decoder, cache: Cache) -> None:
        self.model = model
        self.caches, self.angles = cache.layers, cache.angles  # not the cache: see `CapturedSteps`
        like = model.head_weight
        batch, _, room, _ = cache.layers[0].k.shape
        for layer in cache.layers:  # what a mask hides must be numbers, too
            layer.k[:, :, cache.length :] = 0
            layer.v[:, :, cache.length :] = 0
        self.x = like.new_empty(batch, 1, model.config.n_embd)
        self.rows = like.new_empty(len(model.tables.weight), batch, 1, model.tables.width)
        self.position = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.places = torch.arange(room, device=like.device)
        self.n_token = 0  # of the text, so far
        self.replay: Callable[[], Tensor] | None = None

    def run(self) -> Tensor:
        """What is captured: the logits [B, V]."""
        mask = additive((self.places <= self.position)[None], self.x)  # [1, room]
        x = self.model.through_layers(
            self.x,
            iter(self.rows),
            self.angles.index_select(1, self.position),  # [2, 1, head_dim]
            {"full": mask},
            self.caches,
            self.position,
        )
        return F.linear(x[:, -1], self.model.head_weight)

    def __call__(self, ids: Tensor, table_ids: Tensor, cache: Cache) -> Tensor:
        self.n_token += 1
        if self.n_token <= PATIENCE:
            return Decoder.step(self.model, ids, table_ids, cache)
        assert cache.length < cache.room, f"there is room for {cache.room} tokens"
        rows = list(self.model.look_up(table_ids.long(), None, cache))  # [B, 1, W] each
        if rows:
            self.rows.copy_(torch.stack(rows))
        self.x.copy_(self.model.embed(ids.long()))
        self.position.fill_(cache.length)
        if self.replay is None:
            self.replay = captured(self.run)
        cache.length += 1
        return self.replay()


class CapturedSteps:
    """In place of `Decoder.step`: single tokens have captured steps, one for each cache, with which
    it goes. Logits are valid until the next step with this cache."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.steps: WeakKeyDictionary[Cache, CapturedStep] = WeakKeyDictionary()

    def __call__(self, ids: Tensor, table_ids: Tensor, cache: Cache) -> Tensor:
        if ids.shape[1] > 1 or cache.layers[0] is None:
            return Decoder.step(self.model, ids, table_ids, cache)
        if cache not in self.steps:
            self.steps[cache] = CapturedStep(self.model, cache)
        return self.steps[cache](ids, table_ids, cache)


def capture_steps(model: Decoder) -> None:
    """Let a model on a GPU decode by graphs, if it is one of model.py's with full attention: a
    relative's layers may do what cannot be captured. Hooks of the model are not called."""
    is_plain = type(model) is Decoder and {*model.config.attention_kinds} == {"full"}
    if is_plain and model.device.type == "cuda":
        model.step = CapturedSteps(model)
