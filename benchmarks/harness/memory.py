"""The memory that a partition keeps, the peak of a step, and running out of memory as a result.

CUDA's allocator raises an error. The CPU's does not, before the machine kills the process. So
there, on Linux, the process gets the free memory as its limit.

Live tensors are counted in requested bytes, on any device. A dispatch mode sees every tensor that
an operator returns, and its memory's end. The CPU's allocator keeps no statistics. CUDA's
statistics round up and count cached memory. A pipeline's workers are in the modes of its caller.

Turns tell which partition a thread works for at the moment::

    forward      enter ──▶ layers ──▶ leave      whose turn it was before, goes on
    backward     recomputation: enter ──▶ leave
                 a node of a partition's graph: its turn, until a node of another one

Each worker numbers its own nodes. One thread runs the nodes of all partitions on the CPU, by these
numbers; so partitions may alternate in backward at any node.
"""

import ctypes
import gc
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchgpipe import is_checkpointing, is_recomputing
from torchgpipe.base.context import context
from torchgpipe.base.private import DispatchMode, backward_pass, tree_leaves
from torchgpipe.base.structure import storage_id
from torchgpipe.timeline.recorder import nodes_between, producers

#: Phrases in errors of allocators, and of libraries without memory for their workspace.
_PHRASES = (
    "can't allocate memory",
    'not enough memory',
    'out of memory',
    'bad_alloc',
    'ALLOC_FAILED',
    'unable to find an engine to execute',
    'could not create a primitive',
    'could not create a memory object',
    "can't start new thread",
)

_UNKNOWN = 2**62


def free_memory() -> int:
    """Return the bytes of the host that are free or can be freed; a huge number if unknown."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)  # memory that this process has freed, but keeps
    free = (_number('/proc/meminfo', r'MemAvailable: +(\d+) kB') or _UNKNOWN // 1024) * 1024
    most = _number('/sys/fs/cgroup/memory.max', r'^(\d+)$')
    used = _number('/sys/fs/cgroup/memory.current', r'^(\d+)$')
    if most is None or used is None:
        return free
    # The cache of files can be freed.
    cache = _number('/sys/fs/cgroup/memory.stat', r'(?m)^inactive_file (\d+)$') or 0
    return min(free, most - used + cache)


def _number(path: str, pattern: str) -> int | None:
    try:
        match = re.search(pattern, Path(path).read_text())
    except OSError:
        return None
    return int(match[1]) if match else None


def require(number: int, what: str) -> None:
    """Raise :exc:`MemoryError` if the host has fewer than this many bytes left."""
    free = free_memory()
    if number > free:
        raise MemoryError(
            f'{what} needs {number / 2**30:.1f} GiB of the host, and '
            f'{free / 2**30:.1f} GiB are free'
        )


@contextmanager
def memory_limit() -> Iterator[None]:
    """Let allocations on the CPU fail within the context once all memory is taken."""
    used = _number('/proc/self/status', r'VmData:\s+(\d+) kB')
    if used is None:
        yield
        return
    import resource  # Linux has it.

    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used * 1024 + free_memory()
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if there is none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def is_exhaustion(error: BaseException) -> bool:
    """Distinguish an error of an allocator from others."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)


def unless_exhausted(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a measurement; or the reason, if it runs out of memory."""
    try:
        return measure()
    except (MemoryError, RuntimeError) as error:
        if not is_exhaustion(error):
            raise
        return {'status': 'out of memory', 'reason': first_line(error)}


class LiveTensors:
    """Bytes in tensors that were made while :meth:`watched`, now and at the peak."""

    def __init__(self) -> None:
        self.peak = 0
        self._now = 0
        self._known: dict[int, Storage] = {}
        # A memory may end at any moment, also while the lock is held, or when a signal has come.
        # So its end is only noted, by a function that can't be interrupted.
        self._ended: deque[Any] = deque()
        self._lock = threading.RLock()

    @property
    def now(self) -> int:
        """Bytes at the moment."""
        with self._lock:
            self._forget_ended()
            return self._now

    def find(self, tensor: Tensor) -> 'Storage | None':
        """Return the storage of a tensor, if that was made while it was watched."""
        with self._lock:
            self._forget_ended()
            return self._known.get(storage_id(tensor))

    def _add(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        with self._lock:
            self._forget_ended()
            if key not in self._known:
                self._known[key] = entry = Storage(storage, self._ended.append)
                entry.key, entry.size = key, storage.nbytes()
                self.begin(entry)

    def _forget_ended(self) -> None:
        while self._ended:
            ended = self._ended.popleft()
            del self._known[ended.key]
            self.end(ended)

    def begin(self, storage: 'Storage') -> None:
        """Count a storage that was made."""
        self._now += storage.size
        self.peak = max(self.peak, self._now)

    def end(self, storage: 'Storage') -> None:
        """Count it no more."""
        self._now -= storage.size

    @contextmanager
    def watched(self) -> Iterator['LiveTensors']:
        """Count within the context, in this thread and in a pipeline's workers."""
        with _Mode(self):
            yield self


class Storage(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage, with the data needed at its end."""

    __slots__ = ('key', 'owner', 'size')

    key: int
    size: int
    #: For who counts by owners.
    owner: Hashable


class _Mode(DispatchMode):
    def __init__(self, live: LiveTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs = {storage_id(x) for x in tree_leaves((args, kwargs)) if _strided(x)}
        for x in tree_leaves(output):
            if _strided(x) and storage_id(x) not in inputs:
                self._live._add(x)
        return output


def _strided(x: Any) -> bool:
    """Return whether it is a tensor with a memory of its own: no other value, nor sparse."""
    return isinstance(x, Tensor) and x.layout is torch.strided


GIB = 2**30


def size_of_partition(partition: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes that stay: parameters (with buffers), gradients, optimizer state."""
    parameters = list(partition.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = []
    for p in parameters:
        state += _tensors([*optimizer.state[p].values()])
    return {
        'parameters': _bytes([*parameters, *partition.buffers()]),
        'gradients': _bytes(gradients),
        'optimizer': _bytes(state),
    }


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def peak_memory(step: Any, devices: list[torch.device]) -> int:
    """Return the peak of one step in bytes, beyond tensors alive before it, over all devices."""
    accelerators = {
        device: torch.get_device_module(device) for device in devices if device.type != 'cpu'
    }
    if not accelerators:
        with LiveTensors().watched() as live:
            step()
        return live.peak
    before = {}
    for device, module in accelerators.items():
        torch.accelerator.synchronize(device)
        gc.collect()  # Garbage that is freed within the step would hide a part of the peak.
        module.reset_peak_memory_stats(device)
        before[device] = module.memory_allocated(device)
    step()
    return sum(
        module.max_memory_allocated(device) - before[device]
        for device, module in accelerators.items()
    )


def peak_of_activations(step: Callable[[], object]) -> int:
    """Return the peak bytes of tensors that a step makes in forward, summed over its threads.

    Gradients are excluded. Each partition on the CPU has a thread of its own, and its peak does
    not depend on the progress of the others. The CPU's allocator keeps no statistics.
    """

    def thread_and_pass() -> tuple[int, bool]:
        return threading.get_ident(), _in_forward()

    live = OwnedTensors(thread_and_pass)
    with live.watched():
        step()
    return sum(peak for (_, forward), peak in live.peaks.items() if forward)


def _in_forward() -> bool:
    """Return whether the calling thread runs forward, for the first time or again.

    The second half of a split backward is outside autograd, and as in autograd, gradients are
    disabled there.
    """
    if is_checkpointing() or is_recomputing():
        return True
    return backward_pass() == -1 and torch.is_grad_enabled()


class OwnedTensors(LiveTensors):
    """Live tensors, each of which belongs to an owner, who has a peak of its own in ``peaks``.

    Args:
        owner: Whose the tensors are that the calling thread makes.
    """

    def __init__(self, owner: Callable[[], Hashable]) -> None:
        super().__init__()
        self.peaks: dict[Hashable, int] = {}
        self._owner = owner
        self._owned: dict[Hashable, int] = {}

    def begin(self, storage: Storage) -> None:
        super().begin(storage)
        self._own(storage, self._owner())

    def end(self, storage: Storage) -> None:
        super().end(storage)
        self._owned[storage.owner] -= storage.size

    def give(self, tensor: Tensor, owner: Hashable) -> None:
        """Let a tensor belong to another owner from now on."""
        with self._lock:
            storage = self.find(tensor)
            if storage is not None:
                self._owned[storage.owner] -= storage.size
                self._own(storage, owner)

    def _own(self, storage: Storage, owner: Hashable) -> None:
        storage.owner = owner
        self._owned[owner] = self._owned.get(owner, 0) + storage.size
        self.peaks[owner] = max(self.peaks.get(owner, 0), self._owned[owner])


class Turns:
    """Follow the work of partitions through forward, recomputation and backward.

    Args:
        partitions: In their order.
    """

    def __init__(self, partitions: Sequence[nn.Module]) -> None:
        self._local = threading.local()
        self._handles: list[Any] = []
        for j, partition in enumerate(partitions):
            self._handles += [
                partition.register_forward_pre_hook(lambda _, args, j=j: self._enter(j, args)),
                partition.register_forward_hook(
                    lambda _, args, output, j=j: self._leave(j, output)
                ),
            ]

    @property
    def owner(self) -> int | None:
        """The partition whose turn it is in this thread, or None."""
        return getattr(self._local, 'owner', None)

    def give(self, j: int | None) -> None:
        """Make it the turn of a partition in this thread, or of none."""
        self._local.owner = j

    def receive(self, j: int, grads: Sequence[Tensor]) -> None:
        """Take note that gradients have come to a node of a partition."""

    def close(self) -> None:
        """Stop following."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, j: int, args: Any) -> None:
        skips = [] if context.skips is None else [*context.skips.tensors.values()]
        self._local.__dict__.setdefault('stack', []).append(
            (self.owner, producers(_tensors((args, skips))))
        )
        self.give(j)

    def _leave(self, j: int, output: Any) -> None:
        owner, before = self._local.stack.pop()
        self.give(owner)
        if not is_recomputing():
            for node in nodes_between(before, producers(_tensors(output))):
                node.register_prehook(lambda grads: self._turn(j, grads))

    def _turn(self, j: int, grads: Sequence[Tensor]) -> None:
        if self.owner != j:
            self.give(j)
            self.receive(j, [grad for grad in grads if grad is not None])


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
