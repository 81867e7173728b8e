"""Trackers: what holds a skip tensor between its stash and its pop.

Each thread has a tracker at any time. Its own is a plain dictionary, which is all that a model
without a pipeline needs. A pipeline has one for each micro-batch, through which the tensors that
go to another partition travel in portals (see :mod:`torchgpipe.skip.portal`)::

    cell (i, j)        leave ──▶ fence: copy ──▶ enter        cell (i, j')
    stash: save ─────────┘                         └────────▶ pop: load

In the autograd graph the phony of a skip is one more output of the cell that stashes it, and one
more input of the cell that pops it. So all that the graph does with outputs and inputs of a cell
(wait for streams, recompute, keep the order of micro-batches) holds for skips as well.

[Note: Changes in place]
Who pops a tensor should see what became of it since, as without a pipeline. Within the cell
that stashes it nothing is in the way: at the cell's end, a changed tensor enters its portal anew,
with the history it has by then. Later, a change in the memory of a tensor would be seen or
not, depending on whether it was copied, and its gradient would be wrong; so it raises. It
is noticed by the tensor's version in a portal, and where a batch lies in the same memory as a skip
(``return input`` after ``yield stash('name', input)``), by the version of the batch, also if that
is a copy.
"""
import threading
from contextlib import contextmanager
from typing import Dict, Iterable, Iterator, List, Optional, Sequence, Set

from torch import Tensor

from torchgpipe.microbatch import Batch
from torchgpipe.passes import is_checkpointing, is_recomputing
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.skip.namespace import Key, Namespace
from torchgpipe.skip.portal import Portal
from torchgpipe.stream import AbstractStream

__all__ = ['SkipTracker', 'SkipTrackerThroughPortals', 'SkipTrackerThroughPotals',
           'current', 'current_skip_tracker', 'use_skip_tracker']


class SkipTracker:
    """Skip tensors in a dictionary.

    The ``batch`` that each method takes is there for code written for torchgpipe 0.0.7, which led
    the graph of a skip through it.
    """

    def __init__(self) -> None:
        self.tensors: Dict[Key, Optional[Tensor]] = {}

    def save(self, batch: Batch, ns: Optional[Namespace], name: str, tensor: Optional[Tensor]
             ) -> None:
        """Keep a skip tensor."""
        self.tensors[ns, name] = tensor

    def load(self, batch: Batch, ns: Optional[Namespace], name: str) -> Optional[Tensor]:
        """Give a skip tensor and let go of it; :exc:`KeyError` if there is none."""
        return self.tensors.pop((ns, name))

    def copy(self, batch: Batch, prev_stream: AbstractStream, next_stream: AbstractStream,
             ns: Optional[Namespace], name: str) -> None:
        """Move a skip tensor to another device."""
        raise TypeError('copying is not supported without portals')


class SkipTrackerThroughPortals(SkipTracker):
    """The skip tensors of one micro-batch in a pipeline.

    A graph may own a tracker, since a recomputation needs it. So between cells, and after the
    last one, no phony may be left in it (:meth:`clear`), and portals hold tensors without a graph.

    Args:
        skip_layout: Tells which skips go to another partition.
    """

    def __init__(self, skip_layout: SkipLayout) -> None:
        super().__init__()
        self.skip_layout = skip_layout
        self.portals: Dict[Key, Portal] = {}
        self.phonies: Dict[Key, Tensor] = {}
        self.stashed: Dict[Key, Optional[Tensor]] = {}
        #: Skips in whose memory the batch itself lies too: [Note: Changes in place].
        self.shared: Set[Key] = set()

    def save(self, batch: Batch, ns: Optional[Namespace], name: str, tensor: Optional[Tensor]
             ) -> None:
        """Keep a skip tensor: [Note: Tensor life of a portal]."""
        if not self.skip_layout.requires_copy(ns, name):
            super().save(batch, ns, name, tensor)
            return
        life = 3 if is_checkpointing() else 2
        portal = self.portals.get((ns, name))
        if portal is None:
            portal = self.portals[ns, name] = Portal(tensor, life)
        else:
            # A pipeline within a layer that is recomputed is in its first pass all the same, and
            # then it has no portal yet.
            portal.put_tensor(tensor, 1 if is_recomputing() else life)
        self.phonies[ns, name] = portal.blue()
        self.stashed[ns, name] = tensor

    def load(self, batch: Batch, ns: Optional[Namespace], name: str) -> Optional[Tensor]:
        """Give a skip tensor; :exc:`KeyError` if there is none."""
        if not self.skip_layout.requires_copy(ns, name):
            return super().load(batch, ns, name)
        return self.portals[ns, name].orange(self.phonies[ns, name])

    def copy(self, batch: Batch, prev_stream: AbstractStream, next_stream: AbstractStream,
             ns: Optional[Namespace], name: str) -> None:
        """Move a skip tensor to another device."""
        self.phonies[ns, name] = self.portals[ns, name].copy(
            prev_stream, next_stream, self.phonies[ns, name])

    def seal(self, keys: Iterable[Key]) -> List[Tensor]:
        """Give the phonies of skips whose cell has ended: [Note: Changes in place]."""
        for key in keys:
            portal, tensor = self.portals[key], self.stashed[key]
            if portal.tensor is not None and portal.is_changed():
                portal.put_tensor(tensor, portal.tensor_life + 1)
                self.phonies[key] = portal.blue()
        return self.take_phonies(keys)

    def take_phonies(self, keys: Iterable[Key]) -> List[Tensor]:
        """Give the phonies of some skips, and let go of them."""
        return [self.phonies.pop(key) for key in keys]

    def put_phonies(self, keys: Iterable[Key], phonies: Sequence[Tensor]) -> None:
        """Keep the phonies of some skips."""
        self.phonies.update(zip(keys, phonies))

    def clear(self) -> None:
        """Let go of everything, since what is still here will never be popped."""
        self.tensors.clear()
        self.phonies.clear()
        self.stashed.clear()
        for portal in self.portals.values():
            portal.put_tensor(None, 0)


#: As torchgpipe 0.0.7 spelled it.
SkipTrackerThroughPotals = SkipTrackerThroughPortals


class _Current(threading.local):
    def __init__(self) -> None:
        self.tracker = SkipTracker()


#: ``current.tracker`` is this thread's tracker.
current = _Current()


@contextmanager
def use_skip_tracker(skip_tracker: SkipTracker) -> Iterator[None]:
    """Let layers stash into and pop from a tracker within the context, in this thread."""
    outside, current.tracker = current.tracker, skip_tracker
    try:
        yield
    finally:
        current.tracker = outside


def current_skip_tracker() -> SkipTracker:
    """Give this thread's tracker."""
    return current.tracker
