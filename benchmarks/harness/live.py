"""Count the memory of live tensors on any device, in requested bytes.

A dispatch mode sees every tensor that an operator returns, and its memory's end. The CPU's
allocator keeps no statistics. CUDA's statistics round up and count cached memory. A pipeline's
workers are in the modes of its caller.
"""

import threading
import weakref
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchgpipe.base.private import DispatchMode, tree_leaves
from torchgpipe.base.structure import storage_id


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
                self._known[key] = made = Storage(storage, self._ended.append)
                made.key, made.size = key, storage.nbytes()
                self.begin(made)

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
