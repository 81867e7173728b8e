"""Buckets: the gradients of a unit, reduced over replicas within its last backward.

The last backward of a unit completes the gradients of one parameter after the other. A bucket is
reduced when all of its gradients have arrived, while backward goes on::

    last backward      layer 3 ── layer 2 ── layer 1 ── layer 0 │ REDUCE_GRAD
    bucket 0                 └─ all-reduce ─────┐               │
    bucket 1                               └─ all-reduce ────┐  │
    gradients that do not arrive                                └─ all-reduce

Buckets start in one order on all replicas, since a process group runs its collectives in the order
in which each rank starts them. A bucket whose gradients arrive early waits for the ones before it.
The order in which gradients arrived in the first backward decides which ones share a bucket, as in
PyTorch's DDP (Li et al., "PyTorch Distributed", 2020).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar('T')


class Arrivals(Generic[T]):
    """The gradients that arrive in a backward, and the buckets that wait for them.

    Args:
        waiting: The buckets, in the order in which they start; empty if it is not known yet.
        start: Starts the reduction of a bucket.

    Attributes:
        order: What has arrived, in this order.
    """

    def __init__(
        self,
        waiting: Iterable[Sequence[T]],
        start: Callable[[Sequence[T]], None],
    ) -> None:
        self._waiting = deque(waiting)
        self._start = start
        #: How many items of the first bucket are known to have arrived.
        self._first = 0
        self.order: dict[T, None] = {}

    def arrive(self, item: T) -> None:
        """Start the buckets that are complete with this gradient."""
        self.order[item] = None
        while self._waiting:
            bucket = self._waiting[0]
            while self._first < len(bucket) and bucket[self._first] in self.order:
                self._first += 1
            if self._first < len(bucket):
                return
            self._first = 0
            self._start(self._waiting.popleft())
