"""Locks: one per layer, and always unlocked in a forked child.

What may run beside what: a layer works in one thread at a time. A cell holds the locks of its
layers from its start to its end, and so does a recomputation. So any number of threads may run and
train the same model, or models that share layers; their cells are serialized. But a layer that
only computes may run in several partitions of one memory at a time.

A step puts other parameters into its layers for as long as it runs. So steps exclude each other,
of whichever models, if they have layers in common; and a step excludes forward passes of the same
model. A plain call of another model with the same layers is for the user to keep apart.

A child process has the thread that forked and none of the others, so a lock that another one held
would never be released there.
"""
import os
import threading
import weakref
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

__all__ = ['generator_lock', 'layer_lock', 'new_lock', 'step_lock', 'together']

_locks: 'weakref.WeakSet[Any]' = weakref.WeakSet()

_of_steps: 'weakref.WeakKeyDictionary[nn.Module, Any]' = weakref.WeakKeyDictionary()

_of_layers: 'weakref.WeakKeyDictionary[nn.Module, Any]' = weakref.WeakKeyDictionary()


def new_lock() -> Any:
    """Make a reentrant lock."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _open_all() -> None:
    for lock in _locks:
        lock._at_fork_reinit()


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_open_all)

_lock = new_lock()

#: Held by cells and recomputations that draw from the random generator of the CPU, which all
#: threads share. Who holds it takes no other lock.
generator_lock = new_lock()


def layer_lock(layers: Collection[nn.Module]) -> AbstractContextManager[Any]:
    """Return a context in which no other thread runs any of these layers."""
    with _lock:
        for layer in layers:
            if layer not in _of_layers:
                _of_layers[layer] = new_lock()
        return together(*map(_of_layers.__getitem__, layers))


def step_lock(modules: Iterable[nn.Module]) -> AbstractContextManager[Any]:
    """Return a context in which no other step has any of these modules."""
    with _lock:
        return together(*{_of_steps.setdefault(module, new_lock()) for module in modules})


def together(*contexts: Any) -> AbstractContextManager[Any]:
    """Return a context in which a thread holds all that it would hold in each of several."""
    locks = {lock for each in contexts for lock in getattr(each, 'locks', [each])}
    return locks.pop() if len(locks) == 1 else _Several(locks)


class _Several:
    """Several locks, always taken in one order, so that no two threads wait for each other."""

    def __init__(self, locks: Collection[Any]) -> None:
        self.locks = sorted(locks, key=id)

    def __enter__(self) -> None:
        taken = []
        try:
            for lock in self.locks:
                lock.acquire()
                taken.append(lock)
        except BaseException:  # KeyboardInterrupt, while it waits
            for lock in taken:
                lock.release()
            raise

    def __exit__(self, *args: Any) -> None:
        for lock in self.locks:
            lock.release()
