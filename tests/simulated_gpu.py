"""A GPU that is as late, or as early, as CUDA allows: hazards show on it without having one.

On a real GPU a missing guard goes unnoticed nearly always, as nearly always a copy has long ended
when its buffer is filled anew. Here it is the tests that decide who is late. An operation on a
tensor of this device does nothing but join the queue of the current stream; how soon each stream
gets on by itself is its pace, from 1, at once, to 0, not before the host waits for it. What CUDA
promises holds, and nothing more:

- a stream runs its operations in order, and waits for an event where it was told to;
- waiting for an event that was never recorded is no wait;
- a copy from pinned memory reads it when the copy's turn has come, one from other memory at once;
  a copy to memory that is not pinned makes the host wait;
- memory that nobody holds any more is handed out anew, to be used by the stream that it was
  allocated in when that gets there, and not before the streams named by `record_stream` got there.
  So that is when it fills with garbage, and who writes there later harms the next owner.

It is more lenient where PyTorch sees to it: pinned memory is kept for good, and backward passes run
on the calling thread. Device memory is handed out anew only at equal size.

The arithmetic is the CPU's, so results equal the CPU's to the bit. For PyTorch the tensors are on
the device `meta`, the only one besides the CPU for which every build knows autograd.
"""

import random
import threading
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import offload
from tables import tables

DEVICE = torch.device("meta")
aten = torch.ops.aten
RESULTS = {}  # of operations, by what they are given


class Mark:
    """A place in a stream: what recording an event leaves there."""

    def __init__(self, stream: "Stream") -> None:
        self.stream, self.reached = stream, False


class Stream:
    device = DEVICE

    def __init__(self, device=None) -> None:
        self.gpu, self.queue = SimulatedGpu.current, deque()  # of functions, Marks and (Mark,)
        self.gpu.streams.append(self)

    def add(self, entry) -> None:
        with self.gpu.lock:
            self.queue.append(entry)
            self.gpu.drift()

    def advance(self) -> bool:
        """Run the next entry, if there is one that has not to wait."""
        if not self.queue:
            return False
        entry = self.queue[0]
        if isinstance(entry, tuple) and not entry[0].reached:
            return False
        self.queue.popleft()
        if isinstance(entry, Mark):
            entry.reached = True
        elif not isinstance(entry, tuple):
            entry()
        return True

    def wait_event(self, event: "Event") -> None:
        if event.mark:
            self.add((event.mark,))

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        event.synchronize()


class Event:
    mark: Mark | None = None

    def __init__(self, blocking: bool = False) -> None:
        """blocking: how the host would wait."""

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or SimulatedGpu.current.current_stream()
        self.mark = Mark(stream)
        stream.add(self.mark)

    def synchronize(self) -> None:
        SimulatedGpu.current.waits[threading.current_thread()] += 1
        if self.mark:
            SimulatedGpu.current.reach(self.mark)


class Memory:
    """What a tensor and its views share: where the numbers are, and who frees them."""

    def __init__(self, gpu: "SimulatedGpu", numbers: torch.Tensor) -> None:
        self.gpu, self.numbers, self.users = gpu, numbers, set()
        self.stream = gpu.current_stream()

    def __del__(self) -> None:
        """Queues without `add`: the garbage collector may come while an operation runs, and later
        ones must not overtake it."""
        numbers, marks = self.numbers, []
        if not self.users:
            self.stream.queue.append(lambda: spoil(numbers))
        for user in self.users:
            marks.append(Mark(user))
            user.queue.append(marks[-1])
        self.gpu.freed[self.stream, numbers.numel(), numbers.dtype].append((numbers, marks))


def spoil(numbers: torch.Tensor) -> torch.Tensor:
    """As good as any memory of which nobody has said what is in it."""
    if numbers.dtype in (torch.bool, torch.uint8):
        return numbers.fill_(255)  # bytes that are no number as float32 or bfloat16
    return numbers.fill_(float("nan") if numbers.is_floating_point() else -(1 << 14))


class DeviceTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, numbers: torch.Tensor, memory: Memory):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=DEVICE,
        )

    def __init__(self, numbers: torch.Tensor, memory: Memory) -> None:
        self.numbers, self.memory = numbers, memory

    def record_stream(self, stream: Stream) -> None:
        self.memory.users.add(stream)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return SimulatedGpu.current.call(func, args, kwargs or {})


class Factory(TorchDispatchMode):
    """Catches what makes device tensors out of none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("device") == DEVICE:
            return SimulatedGpu.current.call(func, args, kwargs)
        if kwargs.pop("pin_memory", False):
            return SimulatedGpu.current.pin(func(*args, **kwargs))
        return func(*args, **kwargs)


class SimulatedGpu:
    """To be used as a context: within it, torch.cuda's streams and events are these.

    Args:
        seed: of what happens when.
        pace: of the streams that are not in `paces`.

    Attributes:
        waits: how often each thread had to wait for the device.
    """

    current: "SimulatedGpu"
    device = DEVICE

    def __init__(self, seed: int = 0, pace: float = 1.0) -> None:
        self.random, self.pace, self.paces = random.Random(seed), pace, {}
        self.waits = Counter()
        self.lock, self.local, self.streams = threading.RLock(), threading.local(), []
        self.pinned_memory, self.freed = {}, defaultdict(list)
        self.pools: list[ThreadPoolExecutor] = []

    def __enter__(self) -> "SimulatedGpu":
        SimulatedGpu.current = self
        self.default = Stream()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(torch.cuda, "Stream", Stream)
        self.patch.setattr(torch.cuda, "Event", Event)
        self.patch.setattr(torch.cuda, "current_stream", self.current_stream)
        self.patch.setattr(torch.cuda, "set_stream", self.set_stream)
        self.patch.setattr(offload, "ThreadPoolExecutor", self.make_pool)
        self.patch.setattr(torch.Tensor, "pin_memory", lambda tensor: self.pinned_copy(tensor))
        tables.STREAMS.add(DEVICE.type)
        self.factory = Factory()
        self.factory.__enter__()
        return self

    def __exit__(self, *error) -> None:
        for pool in self.pools:  # what they do later would reach the next simulated GPU
            pool.shutdown()
        self.factory.__exit__(*error)
        tables.STREAMS.discard(DEVICE.type)
        self.patch.undo()

    def make_pool(self, *args, **options) -> ThreadPoolExecutor:
        self.pools.append(ThreadPoolExecutor(*args, **options))
        return self.pools[-1]

    # --- time ---

    def drift(self) -> None:
        """Let streams get on by themselves, each at its pace."""
        moving = True
        while moving:
            moving = False
            for stream in self.random.sample(self.streams, len(self.streams)):
                if self.random.random() < self.paces.get(stream, self.pace):
                    moving |= stream.advance()

    def reach(self, mark: Mark) -> None:
        """Have a stream get to a place, and no other further than that takes."""
        with self.lock:
            while not mark.reached:
                if not mark.stream.advance():
                    self.reach(mark.stream.queue[0][0])

    def busy(self, stream: Stream) -> None:
        """From now on this stream is late."""
        self.paces[stream] = 0.0

    def current_stream(self, device=None) -> Stream:
        return getattr(self.local, "stream", self.default)

    def set_stream(self, stream: Stream) -> None:
        """What a worker thread begins with."""
        self.local.stream = stream
        Factory().__enter__()  # which each thread needs for itself

    def synchronize(self, device=None) -> None:
        for stream in self.streams:
            stream.synchronize()

    # --- memory ---

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned_memory[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous(), "the copy of a strided tensor would not be pinned"
        return self.pin(tensor.clone())

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned_memory

    def allocate(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a tensor, if possible such that has been freed."""
        with self.lock:
            freed = self.freed[self.current_stream(), shape.numel(), dtype]
            for i, (_, marks) in enumerate(freed):
                if all(mark.reached for mark in marks):
                    return freed.pop(i)[0].view(shape)
        return spoil(torch.empty(shape, dtype=dtype))

    def new(self, numbers: torch.Tensor) -> DeviceTensor:
        return DeviceTensor(numbers, Memory(self, numbers))

    # --- operations ---

    def call(self, func, args: tuple, kwargs: dict):
        """What an operation on device tensors does at once, and what it leaves to the stream."""
        given = [x for x in [*args, *kwargs.values()] if isinstance(x, torch.Tensor)]
        here = [x for x in given if isinstance(x, DeviceTensor)]
        if func is aten.copy_.default and len(here) == 1:
            return self.copy(*args)
        if func is aten._to_copy.default and not here:  # to the device
            target = self.new(self.allocate(given[0].shape, given[0].dtype))
            return self.copy(target, given[0], kwargs.get("non_blocking", False))
        if func in (aten._local_scalar_dense.default, aten.equal.default) or (
            func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
        ):
            self.current_stream().synchronize()
            return func(*numbers_of(args), **kwargs)
        if any(x.dim() and not isinstance(x, DeviceTensor) for x in given):
            raise RuntimeError(f"{func}: tensors on the host and on the device")
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        raw_args, raw_kwargs = numbers_of(args), numbers_of(kwargs)
        if func.is_view:
            views = func(*raw_args, **raw_kwargs)
            return each(torch.Tensor, lambda x: DeviceTensor(x, here[0].memory), views)
        if func._schema.is_mutable:
            self.current_stream().add(lambda: func(*raw_args, **raw_kwargs))
            return kwargs.get("out", args[0])
        made = self.allocate(*self.result_of(func, raw_args, raw_kwargs))
        if func is aten.empty.memory_format:
            # Kernels that were queued earlier may still use what the memory was before.
            self.current_stream().add(lambda: spoil(made))
        else:
            self.current_stream().add(lambda: made.copy_(func(*raw_args, **raw_kwargs)))
        return self.new(made)

    def result_of(self, func, args: tuple, kwargs: dict) -> tuple[torch.Size, torch.dtype]:
        """The shape and dtype of what an operation returns, worked out once."""
        key = str((func, each(torch.Tensor, lambda x: (x.shape, x.dtype), (args, kwargs))))
        if key not in RESULTS:
            args, kwargs = each(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))
            made = func(*args, **kwargs)
            RESULTS[key] = made.shape, made.dtype
        return RESULTS[key]

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False):
        """Between host and device."""
        to_device = isinstance(target, DeviceTensor)
        host = source if to_device else target
        into, out_of = numbers_of(target), numbers_of(source)
        if to_device and not self.is_pinned(host):
            out_of = out_of.clone()
        self.current_stream().add(lambda: into.copy_(out_of))
        if not non_blocking or not (to_device or self.is_pinned(host)):
            self.current_stream().synchronize()
        return target


def numbers_of(x):
    return each(DeviceTensor, lambda tensor: tensor.numbers, x)


def each(kind: type, change, x):
    """What a structure of tuples, lists and dicts is with all of a kind changed: as torch's
    tree_map, which takes several times as long."""
    if isinstance(x, kind):
        return change(x)
    if isinstance(x, dict):
        return {key: each(kind, change, value) for key, value in x.items()}
    return type(x)([each(kind, change, y) for y in x]) if type(x) in (tuple, list) else x
