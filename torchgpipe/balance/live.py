"""Count the memory of live tensors, on any device, in bytes that they asked for.

A dispatch mode sees every tensor that an operator returns, and its memory's end. The CPU's
allocator keeps no statistics, and those of CUDA round up and count what is cached. Modes are
thread-local, so workers enter one around each partition; backward runs in the caller's.
"""
import threading
import weakref
from contextlib import contextmanager
from typing import Any, Callable, Dict, Hashable, Iterator, List

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ['LiveTensors']


class LiveTensors:
    """Bytes in tensors that were made while :meth:`watched`, now and at the peak.

    Args:
        owner: Whose the tensors are that the calling thread makes. Each owner has a peak of its
            own in ``peaks``.
    """

    def __init__(self, owner: Callable[[], Hashable] = lambda: None) -> None:
        self.now = 0
        self.peak = 0
        self.peaks: Dict[Hashable, int] = {}
        self._owner = owner
        self._owned: Dict[Hashable, int] = {}
        self._owner_of: Dict[int, Hashable] = {}
        self._lock = threading.RLock()
        self._known: Dict[int, Any] = {}

    def knows(self, tensor: Tensor) -> bool:
        """Tell whether the memory of a tensor was made while it was watched."""
        return tensor.untyped_storage()._cdata in self._known

    def give(self, tensor: Tensor, owner: Hashable) -> None:
        """Let a tensor belong to another owner from now on."""
        storage = tensor.untyped_storage()
        with self._lock:
            if storage._cdata in self._known:
                self._owned[self._owner_of[storage._cdata]] -= storage.nbytes()
                self._own(storage._cdata, storage.nbytes(), owner)

    def _own(self, key: int, size: int, owner: Hashable) -> None:
        self._owner_of[key] = owner
        self._owned[owner] = self._owned.get(owner, 0) + size
        self.peaks[owner] = max(self.peaks.get(owner, 0), self._owned[owner])

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            if storage._cdata in self._known:
                return
            size = storage.nbytes()
            self._known[storage._cdata] = weakref.finalize(
                storage, self._remove, storage._cdata, size)
            self._known[storage._cdata].atexit = False
            self._own(storage._cdata, size, self._owner())
            self.now += size
            self.peak = max(self.peak, self.now)

    def _remove(self, key: int, size: int) -> None:
        with self._lock:
            del self._known[key]
            self._owned[self._owner_of.pop(key)] -= size
            self.now -= size

    @contextmanager
    def watched(self, *partitions: nn.Module) -> Iterator['LiveTensors']:
        """Count within the context, in this thread and in whichever runs the partitions."""
        caller = threading.get_ident()
        modes: Dict[int, List[_Mode]] = {}

        def enter(module: nn.Module, args: Any) -> None:
            if threading.get_ident() != caller:
                modes.setdefault(threading.get_ident(), []).append(_Mode(self))
                modes[threading.get_ident()][-1].__enter__()  # type: ignore[no-untyped-call]

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() != caller:
                mode = modes[threading.get_ident()].pop()
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

        handles = [handle for partition in partitions for handle in (
            partition.register_forward_pre_hook(enter),
            partition.register_forward_hook(leave, always_call=True))]
        try:
            with _Mode(self):
                yield self
        finally:
            for handle in handles:
                handle.remove()


class _Mode(TorchDispatchMode):
    def __init__(self, live: LiveTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if _strided(x)}
        for x in tree_leaves(output):
            if _strided(x) and x.untyped_storage()._cdata not in inputs:
                self._live._add(x)
        return output


def _strided(x: Any) -> bool:
    """Tell a tensor with a memory of its own from other values, and from sparse tensors."""
    return isinstance(x, Tensor) and x.layout is torch.strided
