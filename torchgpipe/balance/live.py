"""Count the memory of live tensors, on any device, in bytes that they asked for.

A dispatch mode sees every tensor that an operator returns, and its memory's end. The CPU's
allocator keeps no statistics, and those of CUDA round up and count what is cached. A pipeline's
workers are in the modes of its caller.
"""
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchgpipe.engine.memory import storage_id
from torchgpipe.private import TorchDispatchMode, tree_leaves

__all__ = ['LiveTensors']


class LiveTensors:
    """Bytes in tensors that were made while :meth:`watched`, now and at the peak.

    Args:
        owner: Whose the tensors are that the calling thread makes. Each owner has a peak of its
            own in ``peaks``.
    """

    def __init__(self, owner: Callable[[], Hashable] = lambda: None) -> None:
        self.peak = 0
        self.peaks: dict[Hashable, int] = {}
        self._now = 0
        self._owner = owner
        self._owned: dict[Hashable, int] = {}
        self._known: dict[int, _Memory] = {}
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

    def knows(self, tensor: Tensor) -> bool:
        """Tell whether the memory of a tensor was made while it was watched."""
        with self._lock:
            self._forget_ended()
            return storage_id(tensor) in self._known

    def give(self, tensor: Tensor, owner: Hashable) -> None:
        """Let a tensor belong to another owner from now on."""
        with self._lock:
            self._forget_ended()
            memory = self._known.get(storage_id(tensor))
            if memory is not None:
                self._owned[memory.owner] -= memory.size
                self._own(memory, owner)

    def _own(self, memory: '_Memory', owner: Hashable) -> None:
        memory.owner = owner
        self._owned[owner] = self._owned.get(owner, 0) + memory.size
        self.peaks[owner] = max(self.peaks.get(owner, 0), self._owned[owner])

    def _add(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        with self._lock:
            self._forget_ended()
            if key in self._known:
                return
            memory = self._known[key] = _Memory(storage, self._ended.append)
            memory.key, memory.size = key, storage.nbytes()
            self._own(memory, self._owner())
            self._now += memory.size
            self.peak = max(self.peak, self._now)

    def _forget_ended(self) -> None:
        """Take note of memory that has ended."""
        while self._ended:
            memory = self._ended.popleft()
            del self._known[memory.key]
            self._owned[memory.owner] -= memory.size
            self._now -= memory.size

    @contextmanager
    def watched(self) -> Iterator['LiveTensors']:
        """Count within the context, in this thread and in a pipeline's workers."""
        with _Mode(self):
            yield self


class _Memory(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage, with what has to be known at its end."""

    __slots__ = ('key', 'owner', 'size')

    key: int
    size: int
    owner: Hashable


class _Mode(TorchDispatchMode):
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
    """Tell a tensor with a memory of its own from other values, and from sparse tensors."""
    return isinstance(x, Tensor) and x.layout is torch.strided
