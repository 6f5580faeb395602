"""Decoding on a GPU, where a token's layers are replayed as one graph.

A token's kernels take a GPU less time than the host takes to launch them one by one. A graph (of
CUDA) is launched as a whole. Its kernels read and write the same memory each time, so what differs
from token to token lies in tensors: the token's embedding, its rows, and its position.
"""

import gc
import sys
from collections.abc import Callable
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from model import Cache, Decoder, additive

PATIENCE = 32  # ordinary steps, which come first: to capture one takes about as long as all of them


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps memory for each stream that it has seen."""
    return torch.cuda.Stream(device)


def capture(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Capture what `run` does on the GPU. Returns a function that replays it: it fills the tensor
    that `run` has returned with new values, and returns it."""
    stream = side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # first as usual, so that libraries allocate what they need
        for _ in range(3):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # to collect an object may wait for the GPU, which would break the capture
    try:
        with torch.cuda.graph(graph, stream=stream):
            result = run()
    finally:
        if collects:
            gc.enable()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


class CapturedStep:
    """A step of decoding with a cache of keys and values. Rows are looked up outside of the graph:
    they may be anywhere."""

    def __init__(self, model: Decoder, cache: Cache) -> None:
        # Keep neither the cache, with which this is dropped, nor the model, which has this.
        self.caches, self.cos_sin = cache.layers, cache.cos_sin
        like = model.like
        batch, _, room, _ = cache.layers[0].k.shape
        # A mask gives what is not yet filled the weight 0, but 0 times NaN would be NaN.
        for layer in cache.layers:
            layer.k[:, :, cache.length :] = 0
            layer.v[:, :, cache.length :] = 0
        self.x = like.new_empty(batch, 1, model.config.n_embd)
        self.rows = like.new_empty(len(model.tables.weight), batch, 1, model.tables.width)
        self.position = torch.zeros(1, dtype=torch.int64, device=like.device)
        self.places = torch.arange(room, device=like.device)
        self.n_step = 0  # how many were taken so far
        self.replay: Callable[[], Tensor] | None = None

    def run(self, model: Decoder) -> Tensor:
        """What is captured: the logits [B, V]."""
        mask = additive((self.places <= self.position)[None], self.x)  # [1, room]
        x = model.through_layers(
            self.x,
            iter(self.rows),
            self.cos_sin.index_select(1, self.position),  # [2, 1, head_dim]
            {"full": mask},
            self.caches,
            self.position,
        )
        return model.unembed(x[:, -1])

    def __call__(self, model: Decoder, ids: Tensor, table_ids: Tensor, cache: Cache) -> Tensor:
        self.n_step += 1
        if self.n_step <= PATIENCE:
            return model.ordinary_step(ids, table_ids, cache)
        assert cache.length < cache.room, f"there is room for {cache.room} tokens"
        rows = list(model.rows_of_text(table_ids.long(), None, cache))  # [B, 1, W] each
        if rows:
            self.rows.copy_(torch.stack(rows))
        self.x.copy_(model.embed(ids.long()))
        self.position.fill_(cache.length)
        if self.replay is None:
            self.replay = capture(lambda: self.run(model), self.x.device)
            return self.checked(model, ids, table_ids, cache)
        cache.length += 1
        return self.replay()

    def checked(self, model: Decoder, ids: Tensor, table_ids: Tensor, cache: Cache) -> Tensor:
        """The first replayed step beside an ordinary one, whose logits are returned. They differ
        where `hidden` or `forward` of model.py was changed: then no more steps are captured."""
        replayed = self.replay().float()
        cache.ids = cache.ids[:, : cache.length]  # which has the token already
        logits = model.ordinary_step(ids, table_ids, cache)
        rounding = 0.03 if logits.dtype == torch.float32 else 0.2  # of many layers in 16 bits
        if not (replayed - logits).norm() <= rounding * logits.norm():  # also of NaN
            note = "training/captured.py does not repeat what model.py does: decoding without it"
            print(f"note: {note}", file=sys.stderr)
            model.captured = None
        return logits


class CapturedSteps:
    """What `Decoder.step` calls: a single token takes the captured step of its cache, a prompt an
    ordinary one. A captured step is dropped with its cache. Its logits are valid until the next
    step with this cache, which writes to the same memory."""

    def __init__(self) -> None:
        self.steps: WeakKeyDictionary[Cache, CapturedStep] = WeakKeyDictionary()

    def __call__(self, model: Decoder, ids: Tensor, table_ids: Tensor, cache: Cache) -> Tensor:
        if ids.shape[1] > 1 or cache.layers[0] is None or model.training:
            return model.ordinary_step(ids, table_ids, cache)
        if cache not in self.steps:
            self.steps[cache] = CapturedStep(model, cache)
        return self.steps[cache](model, ids, table_ids, cache)


def capture_steps(model: Decoder) -> None:
    """Let a model on a GPU decode by graphs, if it is one of model.py's with full attention: a
    relative's layers may do what cannot be captured. Hooks of the model are not called."""
    is_plain = type(model) is Decoder and {*model.config.attention_kinds} == {"full"}
    if is_plain and model.device.type == "cuda":
        model.captured = CapturedSteps()
