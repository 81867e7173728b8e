"""Trackers: a thread's storage of stashed skip tensors, by name and namespace.

Each thread has a tracker. Without a pipeline it is one dictionary for all layers. In a pipeline
each cell has its own tracker with the skips that it pops. Skips that are left at the end of the
cell go on to later cells (:mod:`torchgpipe.skip.transfer`).
"""
import uuid
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from torchgpipe.base.context import context

__all__ = ['Key', 'Namespace', 'SkipTracker', 'current_skip_tracker', 'use_skip_tracker']


@dataclass(frozen=True, order=True)
class Namespace(metaclass=ABCMeta):
    """A scope for skip names; each new one is unlike all others.

    It is hashable and ordered, and a copy or a pickle of it equals it, so the pairs of a copied
    model still match.

    >>> import copy
    >>> namespace = Namespace()
    >>> copy.deepcopy(namespace) == namespace, Namespace() == namespace
    (True, False)
    """

    id: uuid.UUID = field(default_factory=uuid.uuid4)


# The default namespace.
Namespace.register(type(None))

#: The unique key of a skip tensor in a model: its namespace and its name.
Key = tuple[Namespace | None, str]


class SkipTracker:
    """Skip tensors in a dictionary.

    >>> import torch
    >>> tracker = SkipTracker()
    >>> tracker.save(None, None, 'name', torch.ones(2))
    >>> tracker.load(None, None, 'name')
    tensor([1., 1.])

    The ``batch`` that each method takes is there for code written for torchgpipe 0.0.7, which led
    the graph of a skip through it.
    """

    def __init__(self) -> None:
        self.tensors: dict[Key, Tensor | None] = {}

    def save(self, batch: Any, ns: Namespace | None, name: str, tensor: Tensor | None) -> None:
        """Keep a skip tensor."""
        self.tensors[ns, name] = tensor

    def load(self, batch: Any, ns: Namespace | None, name: str) -> Tensor | None:
        """Return a skip tensor and let go of it; :exc:`KeyError` if there is none."""
        return self.tensors.pop((ns, name))

    def copy(self, batch: Any, prev_stream: Any, next_stream: Any, ns: Namespace | None, name: str
             ) -> None:
        """Move a skip tensor to another device."""
        raise TypeError('copying is not supported without portals')


@contextmanager
def use_skip_tracker(skip_tracker: SkipTracker) -> Iterator[None]:
    """Let layers stash into and pop from a tracker within the context, in this thread.

    >>> tracker = SkipTracker()
    >>> with use_skip_tracker(tracker):
    ...     current_skip_tracker() is tracker
    True

    Args:
        skip_tracker: The tracker.
    """
    outside, context.skips = context.skips, skip_tracker
    try:
        yield
    finally:
        context.skips = outside


def current_skip_tracker() -> SkipTracker:
    """Return this thread's tracker: see :func:`use_skip_tracker`."""
    if context.skips is None:
        context.skips = SkipTracker()
    return context.skips  # type: ignore[no-any-return]
