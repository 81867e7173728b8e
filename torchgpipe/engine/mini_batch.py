"""Where in a mini-batch a layer is at work, and what it wants to do at the mini-batch's end.

::

    mini-batch     ├─ micro-batch 0 ─┼─ micro-batch 1 ─┼─ … ─┤ end of forward: at_end
    partition 0       layer(x0)         layer(x1)
    partition 1                         …
"""
import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

__all__ = ['MicroBatchContext', 'MiniBatch', 'current']

T = TypeVar('T')


class MiniBatch:
    """A mini-batch on its way through the outermost pipeline."""

    def __init__(self) -> None:
        self._at_end: list[tuple[Callable[[], None], AbstractContextManager[Any]]] = []
        self._values: dict[Hashable, object] = {}

    def value(self, key: Hashable, make: Callable[[], T]) -> T:
        """Give what a layer keeps for as long as this mini-batch is on its way."""
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


class MicroBatchContext(NamedTuple):
    """Micro-batch ``i`` of ``m`` in partition ``j``.

    ``cell`` is a number that no other cell has, for layers that are called twice in one. ``lock``
    is the lock of the partition's layers.
    """

    i: int
    m: int
    j: int
    cell: int
    mini_batch: MiniBatch
    lock: AbstractContextManager[Any]


class _Current(threading.local):
    micro_batch: MicroBatchContext | None = None


#: ``current.micro_batch`` is what this thread works for; ``None`` outside of a pipeline.
current = _Current()
