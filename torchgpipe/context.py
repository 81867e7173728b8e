"""The context of a thread: its cell, phase and skips, and the threads that wait for it.

::

    mini-batch     ├─ micro-batch 0 ─┼─ micro-batch 1 ─┼─ … ─┤ end of forward: at_end
    partition 0       layer(x0)         layer(x1)
    partition 1                         …

[Note: Collectives] Ranks have to come to their collectives in the same order. Workers that run
beside each other come to theirs in any order::

    rank 0    worker 0    collective of partition 0 ──────────────────────▶ waits for rank 1
              worker 1                      collective of partition 1

    rank 1    worker 0                      collective of partition 0
              worker 1    collective of partition 1 ──────────────────────▶ waits for rank 0

So a module that communicates says so, ``communicates = True``, and the engine keeps an order.
Where it keeps none, the context says so, and who is about to communicate looks there first.
"""
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

__all__ = ['MicroBatch', 'MiniBatch', 'check_order', 'context', 'is_checkpointing',
           'is_recomputing']

T = TypeVar('T')


class MiniBatch:
    """A mini-batch on its way through the outermost pipeline."""

    def __init__(self) -> None:
        #: Where replicas have other parts of it: returns what each of them has of a tensor.
        self.gather: Callable[[Tensor], Sequence[Tensor]] | None = None
        self._at_end: list[tuple[Callable[[], None], AbstractContextManager[Any]]] = []
        self._values: dict[Hashable, object] = {}

    def value(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what a layer keeps for as long as this mini-batch is on its way."""
        if key not in self._values:
            self._values[key] = make()
        return self._values[key]  # type: ignore[return-value]

    def at_end(self, function: Callable[[], None], lock: AbstractContextManager[Any]) -> None:
        """Call a function when all micro-batches have come through, and not if one fails.

        Args:
            function: The function.
            lock: To be held meanwhile.
        """
        self._at_end.append((function, lock))

    def end(self) -> None:
        """Call what is to be called."""
        for function, lock in self._at_end:
            with lock:
                function()


class MicroBatch(NamedTuple):
    """Micro-batch ``i`` of ``m`` in partition ``j``.

    ``cell`` is a number that no other cell has, for layers that are called twice in one. ``lock``
    is the lock of the partition's layers. ``losses`` sees what losses divide by, if that matters.
    """

    i: int
    m: int
    j: int
    cell: int
    mini_batch: MiniBatch
    lock: AbstractContextManager[Any]
    losses: Any = None


class _Context(threading.local):

    def __init__(self) -> None:
        # Each thread has its own, which is what compiled code looks at again when it is called.
        #: The cell that this thread works for; ``None`` outside of a pipeline.
        self.micro_batch: MicroBatch | None = None
        #: Whether it is in the first pass over a checkpointed cell, or in a recomputation.
        self.checkpointing = False
        self.recomputing = False
        #: Whether a layer has asked for that. Then it deals with its own attributes.
        self.asked = False
        #: Where layers stash skips, and pop them: a :class:`~torchgpipe.skip.tracker.SkipTracker`.
        self.skips: Any = None
        #: The ids of the :class:`~torchgpipe.engine.worker.Workers` that wait for this thread, so
        #: that it must not wait for them.
        self.workers: frozenset[int] = frozenset()
        #: Says why ranks would not meet where they would not: [Note: Collectives].
        self.no_order: Callable[[], str] | None = None


#: Where the calling thread is.
context = _Context()


def is_checkpointing() -> bool:
    """Return whether this thread is in the first pass over a checkpointed micro-batch.

    Another pass will follow in backward. Threads do not see each other's answers.

    >>> is_checkpointing()
    False
    """
    context.asked = True
    return context.checkpointing


def is_recomputing() -> bool:
    """Return whether this thread is in a recomputation during backward.

    A layer with a side effect asks this to have it once only. Its attributes are left as it sets
    them then; those of layers in partitions where no one asks are put back, as buffers always are.

    >>> is_recomputing()
    False
    """
    context.asked = True
    return context.recomputing


def check_order() -> None:
    """See that ranks come to a collective of the calling thread in the same order.

    Raises:
        RuntimeError: They need not. The message says what to do.
    """
    if context.no_order is not None:
        raise RuntimeError(context.no_order())
