"""Locks: a layer, a step or a random generator is used by one thread.

A layer runs in one thread at a time, because a cell or a recomputation holds the locks of its
layers from start to end. So any number of threads may run and train the same model, or models that
share layers. Their cells are serialized. But a layer that only computes may run in several
partitions of one memory at a time.

A step replaces parameters of its layers while it runs. So steps of any models exclude each other
if they have layers in common. A step also excludes forward passes of the same model. The user must
keep plain calls of other models with the same layers apart.

A child process has only the thread that forked. A lock that another thread held would never be
released there, so the child reinitializes all locks of :func:`new_lock`.
"""

import threading
import weakref
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

#: All locks, which a child process reinitializes.
_locks: 'weakref.WeakSet[Any]' = weakref.WeakSet()

#: The locks of steps, by the modules that a step uses.
_of_steps: 'weakref.WeakKeyDictionary[nn.Module, Any]' = weakref.WeakKeyDictionary()

#: The locks of cells and recomputations, by layers. All models that share a layer share its lock.
_of_layers: 'weakref.WeakKeyDictionary[nn.Module, Any]' = weakref.WeakKeyDictionary()


#: A lock, or several of them, as a context.
Lock = AbstractContextManager[Any]


def new_lock() -> Any:
    """Create a reentrant lock."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _open_all() -> None:
    for lock in _locks:
        lock._at_fork_reinit()


#: Held while modules get their locks, so that two threads do not create two for one module.
_lock = new_lock()

#: Held by cells and recomputations that draw from the random generator of the CPU, which all
#: threads share.
# Rule 15: A thread that holds the generator lock takes no further lock, except while it reads a
# generator's state. A run that a layer of another pipeline starts releases it first.
generator_lock = new_lock()


def layer_lock(layers: Collection[nn.Module]) -> Lock:
    """Return a context in which no other thread runs any of these layers."""
    locks = []
    with _lock:
        for layer in layers:
            if layer not in _of_layers:
                _of_layers[layer] = new_lock()
            locks.append(_of_layers[layer])
    return together(*locks)


def step_lock(modules: Iterable[nn.Module]) -> Lock:
    """Return a context in which no other step uses any of these modules."""
    # Rule 16: A step holds the step locks of its modules with parameters, and of the loss's
    # modules, because it replaces their parameters.
    with _lock:
        locks = [_of_steps.setdefault(module, new_lock()) for module in modules]
    return together(*locks)


def together(*contexts: Any) -> Lock:
    """Return a context in which a thread holds the locks of several contexts."""
    locks: set[Any] = set()
    for context in contexts:
        locks.update(getattr(context, 'locks', [context]))
    # A single lock is its own context, which is faster to enter.
    if len(locks) == 1:
        return locks.pop()  # type: ignore[no-any-return]
    return _Several(locks)


class _Several:
    """Several locks, acquired in one order, so that no threads wait for each other."""

    # Rule 14: A cell and a recomputation hold the locks of their layers from start to end. A
    # thread takes several locks in one global order.
    def __init__(self, locks: Collection[Any]) -> None:
        self.locks = sorted(locks, key=id)

    def __enter__(self) -> None:
        taken = []
        try:
            for lock in self.locks:
                lock.acquire()
                taken.append(lock)
        except BaseException:
            # A KeyboardInterrupt comes while it waits for a lock. Without `__exit__`, the other
            # locks would never be released.
            for lock in taken:
                lock.release()
            raise

    def __exit__(self, *args: Any) -> None:
        for lock in self.locks:
            lock.release()


def is_held(context: Lock) -> bool:
    """Return whether the calling thread holds any lock of :func:`layer_lock`."""
    locks = getattr(context, 'locks', [context])
    return any(lock._is_owned() for lock in locks)


class released_generator:
    """A context in which the calling thread does not hold the generator lock.

    A layer may call another pipeline, whose workers need the lock (rule 15).
    """

    # One of `contextlib` sets the traceback of an error, and so fails where it cannot be set.
    def __enter__(self) -> None:
        self._held: Any = None
        if generator_lock._is_owned():
            # The lock is reentrant. All its acquisitions are undone, and restored at the end.
            self._held = generator_lock._release_save()

    def __exit__(self, *error: object) -> None:
        if self._held is not None:
            generator_lock._acquire_restore(self._held)
