"""A GPU that finds every hazard without having one: who may overtake whom is worked out.

On a real GPU a missing guard goes unnoticed nearly always, as nearly always a copy has long ended
when its buffer is filled anew. Here all operations run at once, in the order in which the host asks
for them, and clocks tell what CUDA would have had to wait for. Agents are streams and threads of
the host. What one does comes before what another does only if

- the one asked the other to do it after its own;
- the other waited for an event that was recorded after it (for one that never was is no wait), or
  for the result of a job.

It is a hazard if two agents use the same number, one of them writes it, and neither comes before
the other. So is memory that is freed while it is used: its next owner comes after what was asked
of the stream that it was allocated in, and of those that `record_stream` named. Where there is no
hazard, every order of events gives the same results.

A copy between the device and memory that is not pinned uses that as the host does. Two things that
PyTorch sees to are not checked: pinned memory is kept for good, and backward passes run on the
calling thread. For PyTorch the tensors are on the device `meta`, the only one besides the CPU for
which every build knows autograd.
"""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import offload
from tables import tables

DEVICE = torch.device("meta")
CPU = torch.device("cpu")
MOST_AGENTS = 8
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
READING = (aten._local_scalar_dense.default, aten.equal.default)  # the host waits for the result
# Operations on some rows of their first argument: which argument says which.
ROWS = {
    aten.embedding.default: 1,
    aten.index_copy_.default: 2,
    aten.index_put_.default: 1,
    aten.index_select.default: 2,
}


def changed(change: Callable, x):
    """x with `change` made to its tensors, also in lists. PyTorch's tree_map would take half of the
    time."""
    if isinstance(x, (list, tuple)):
        return type(x)(changed(change, part) for part in x)
    return change(x) if isinstance(x, torch.Tensor) else x


def on_host(x: torch.Tensor) -> torch.Tensor:
    return x.numbers if isinstance(x, DeviceTensor) else x


class Agent:
    """Acts are numbered. seen: of each agent, how many come before what this one does next."""

    device = DEVICE

    def __init__(self, device=None) -> None:
        agents = SimulatedGpu.current.agents
        self.number = len(agents)
        agents.append(self)
        self.seen = np.zeros(MOST_AGENTS, dtype=np.int32)
        self.waits = 0  # for the device

    def come_after(self, seen: np.ndarray) -> None:
        self.seen = np.maximum(self.seen, seen)

    def wait_event(self, event: "Event") -> None:
        self.come_after(event.seen)

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def record_event(self) -> "Event":
        event = Event()
        event.record(self)
        return event


class Event:
    seen = 0

    def __init__(self, blocking: bool = False) -> None:
        """blocking: how the host would wait."""

    def record(self, stream: Agent | None = None) -> None:
        stream = stream or torch.cuda.current_stream()
        stream.come_after(SimulatedGpu.current.host.seen)
        self.seen = stream.seen.copy()

    def synchronize(self) -> None:
        host = SimulatedGpu.current.host
        host.waits += 1
        host.come_after(self.seen)


class Memory:
    """What a tensor and its views share. acts: of each agent and byte, the last act that used it,
    and the last that wrote it."""

    def __init__(self, gpu: "SimulatedGpu", numbers: torch.Tensor) -> None:
        shape = (2, MOST_AGENTS, numbers.untyped_storage().nbytes())
        self.acts = np.zeros(shape, dtype=np.int32)
        self.gpu = gpu
        self.stream = gpu.stream
        self.users = set()

    def __del__(self) -> None:
        if SimulatedGpu.current is self.gpu:
            before = np.maximum(self.stream.seen, self.gpu.host.seen)
            for user in self.users:
                before[user.number] = user.seen[user.number]
            self.gpu.freed_in_use |= (self.acts[0].max(1, initial=0) > before).any()


class DeviceTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, numbers: torch.Tensor, memory: Memory):
        kind = dict(strides=numbers.stride(), dtype=numbers.dtype, device=DEVICE)
        tensor = cls._make_wrapper_subclass(cls, numbers.size(), **kind)
        tensor.numbers = numbers
        tensor.memory = memory
        return tensor

    def record_stream(self, stream: Agent) -> None:
        self.memory.users.add(stream)

    @classmethod
    def __torch_dispatch__(cls, *operation):
        return SimulatedGpu.current.__torch_dispatch__(*operation)


class Worker:
    """In place of a thread: does its jobs as late as it may, when somebody asks for a result, which
    finds what changed meanwhile; or at once. Only who asks comes after a job."""

    def __init__(self, n: int, initializer, initargs: tuple) -> None:
        self.agent = Agent()
        self.begin = partial(initializer, *initargs)
        self.waiting = []  # jobs, what comes before them, and their futures

    def submit(self, job) -> Future:
        future = Future()
        plain_result = future.result

        def result():
            while not future.done():
                self.do(*self.waiting.pop(0))
            SimulatedGpu.current.host.come_after(future.behind)
            return plain_result()

        future.result = result
        self.waiting.append((job, SimulatedGpu.current.host.seen.copy(), future))
        if not SimulatedGpu.current.late:
            self.do(*self.waiting.pop())
        return future

    def do(self, job, before: np.ndarray, future: Future) -> None:
        gpu = SimulatedGpu.current
        asking = gpu.host, gpu.stream
        self.agent.come_after(before)
        gpu.host = self.agent
        self.begin()
        try:
            with torch.inference_mode(False):
                future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
        gpu.host, gpu.stream = asking
        future.behind = self.agent.seen.copy()


class SimulatedGpu(TorchDispatchMode):
    """To be used as a context: within it, torch.cuda's streams and events are these."""

    current: "SimulatedGpu | None" = None
    device = DEVICE

    def __init__(self, pins: bool = True, late: bool = True) -> None:
        """pins: whether arrays of the host can be pinned in place. late: of `Worker`."""
        super().__init__()
        self.pins = pins
        self.late = late

    def __enter__(self) -> "SimulatedGpu":
        SimulatedGpu.current = self
        self.agents = []
        self.host = self.main = Agent()  # the thread that acts
        self.stream = Agent()
        self.freed_in_use = False
        self.allocated = 0  # bytes of the device, freed or not
        self.pinned = set()  # addresses
        self.shared = {}  # memory of the host that not only the main thread uses, by address
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(torch.cuda, "Stream", Agent)
        self.patch.setattr(torch.cuda, "Event", Event)
        self.patch.setattr(torch.cuda, "current_stream", lambda device=None: self.stream)
        self.patch.setattr(torch.cuda, "set_stream", partial(setattr, self, "stream"))
        self.patch.setattr(torch.cuda, "stream", self.in_stream)
        self.patch.setattr(offload, "ThreadPoolExecutor", Worker)
        self.patch.setattr(offload, "seen_by_gpu", self.seen_by_gpu)
        self.patch.setattr(torch.Tensor, "pin_memory", lambda tensor: self.pin(tensor.clone()))
        tables.STREAM_DEVICES.add(DEVICE.type)
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        tables.STREAM_DEVICES.discard(DEVICE.type)
        self.patch.undo()
        SimulatedGpu.current = None
        assert not self.freed_in_use, "memory was freed while it was used"

    def synchronize(self) -> None:
        event = Event()
        event.record()
        event.synchronize()

    @contextmanager
    def in_stream(self, stream: Agent):
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def seen_by_gpu(self, array: torch.Tensor, *_, **__) -> DeviceTensor:
        """Memory of the host that the device uses where it is."""
        if not self.pins:
            raise OSError("CUDA error 801")
        address = array.untyped_storage().data_ptr()
        memory, _ = self.shared.setdefault(address, (Memory(self, array), array))
        return DeviceTensor(array, memory)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Do what an operation does, and note who used what."""
        kwargs = dict(kwargs or {})
        target = kwargs.get("device")
        if target == DEVICE:
            kwargs["device"] = CPU
        pin_memory = kwargs.pop("pin_memory", False)
        given = []
        changed(given.append, [*args, *kwargs.values()])
        here = [x for x in given if isinstance(x, DeviceTensor)]
        raw_args = changed(on_host, args)
        made = func(*raw_args, **{name: changed(on_host, x) for name, x in kwargs.items()})
        if func is aten.empty.memory_format and made.is_floating_point():
            made.fill_(torch.nan)  # nobody may read what nobody wrote
        if func.is_view and here:
            share = partial(DeviceTensor, memory=here[0].memory)
            return changed(share, made)
        if pin_memory or func.is_view:
            return self.pin(made) if pin_memory else made

        on_device = here or target == DEVICE
        agent = self.stream if on_device else self.host
        agent.come_after(self.host.seen)
        written = kwargs.get("out", args[0]) if func._schema.is_mutable else None
        to_host = on_device and (target == CPU or func in READING)
        waits = to_host
        for x in given:
            user = agent
            if on_device and not isinstance(x, DeviceTensor):
                assert func in COPIES, f"{func}: tensors on the host and on the device"
                pinned = x.untyped_storage().data_ptr() in self.pinned
                is_async = kwargs.get("non_blocking", args[-1] is True)
                waits |= not is_async or (x is written and not pinned)
                self.host.waits += not pinned  # as CUDA may wait
                user = agent if pinned else self.host
            rows = None
            # What is strided is written as a whole by PyTorch's deterministic algorithms.
            if func in ROWS and x is args[0] and (x is not written or x.is_contiguous()):
                rows = raw_args[ROWS[func]]
                if isinstance(rows, list):
                    (rows,) = rows
            self.use(user, x, x is written, rows)
        if waits:
            self.synchronize()
        if written is not None:
            return written
        return made if to_host or not on_device else changed(self.new, made)

    def new(self, numbers: torch.Tensor) -> DeviceTensor:
        assert numbers.dtype != torch.float64, "the GPUs of Macs have no double precision"
        tensor = DeviceTensor(numbers, Memory(self, numbers))
        self.allocated += numbers.nbytes
        self.use(self.stream, tensor, writes=True)
        return tensor

    def use(self, agent: Agent, x: torch.Tensor, writes: bool, rows=None) -> None:
        """An agent reads or writes a tensor, or some rows of it."""
        if isinstance(x, DeviceTensor):
            memory = x.memory
            x = x.numbers
        else:
            address = x.untyped_storage().data_ptr()
            if address not in self.shared and agent is self.main:
                return
            memory, _ = self.shared.setdefault(address, (Memory(self, x), x))  # x: it stays
        n = x.untyped_storage().nbytes() // x.itemsize
        places = torch.arange(n).as_strided(x.size(), x.stride(), x.storage_offset())
        if rows is not None:
            places = places[rows]
        places = places.flatten().numpy() * x.itemsize
        agent.seen[agent.number] += 1
        others = memory.acts[0 if writes else 1][:, places]
        assert (others <= agent.seen[:, None]).all(), "a hazard"
        memory.acts[: 1 + writes, agent.number, places] = agent.seen[agent.number]
