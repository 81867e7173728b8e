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
The layer that pops a tensor gets it with all changes in place since its stash, as without a
pipeline. Changes within the cell that stashes it are no problem: at the cell's end, a changed
tensor enters its portal anew, with the history it has by then. Later, a change in the memory of a
tensor would be seen or not, depending on whether it was copied, and its gradient would be wrong;
so it raises. It is noticed by the tensor's version in a portal. Where a batch lies in the memory
of a skip (``return input`` after ``yield stash('name', input)``), or two skips lie in one memory,
:mod:`torchgpipe.engine.aliasing` watches versions of the one for the sake of the other, also if it
is a copy. (Tensors of inference mode have no versions, so a change goes unnoticed there.
Micro-batches are views of one tensor and have one version: to change the input of the model in
place and then stash it raises needlessly.)
"""
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from torchgpipe.engine.batch import Batch
from torchgpipe.engine.passes import pass_state
from torchgpipe.engine.stream import AbstractStream, no_context
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.skip.namespace import Key, Namespace
from torchgpipe.skip.portal import Portal

__all__ = ['SkipTracker', 'SkipTrackerThroughPortals', 'SkipTrackerThroughPotals',
           'current', 'current_skip_tracker', 'use_skip_tracker']


class SkipTracker:
    """Skip tensors in a dictionary.

    >>> tracker = SkipTracker()
    >>> tracker.save(Batch(()), None, 'name', torch.ones(2))
    >>> tracker.load(Batch(()), None, 'name')
    tensor([1., 1.])

    The ``batch`` that each method takes is there for code written for torchgpipe 0.0.7, which led
    the graph of a skip through it.
    """

    def __init__(self) -> None:
        self.tensors: dict[Key, Tensor | None] = {}

    def save(self, batch: Batch, ns: Namespace | None, name: str, tensor: Tensor | None
             ) -> None:
        """Keep a skip tensor."""
        self.tensors[ns, name] = tensor

    def load(self, batch: Batch, ns: Namespace | None, name: str) -> Tensor | None:
        """Give a skip tensor and let go of it; :exc:`KeyError` if there is none."""
        return self.tensors.pop((ns, name))

    def copy(self, batch: Batch, prev_stream: AbstractStream, next_stream: AbstractStream,
             ns: Namespace | None, name: str) -> None:
        """Move a skip tensor to another device."""
        raise TypeError('copying is not supported without portals')


class SkipTrackerThroughPortals(SkipTracker):
    """The skip tensors of one micro-batch in a pipeline.

    A graph may own a tracker, through a recomputation. So between cells, and after the last one,
    no phony may be left in it (:meth:`clear`), and portals hold tensors without a graph.

    Args:
        skip_layout: Tells which skips go to another partition.
        recomputing: Whether it is for a recomputation. Each has its own, since those of one
            micro-batch may run at the same time; what is stashed there is for nobody.
    """

    def __init__(self, skip_layout: SkipLayout, recomputing: bool = False) -> None:
        super().__init__()
        self.skip_layout = skip_layout
        self._recomputing = recomputing
        self._mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.portals: dict[Key, Portal] = {}
        self.phonies: dict[Key, Tensor] = {}
        self.stashed: dict[Key, Tensor | None] = {}

    def save(self, batch: Batch, ns: Namespace | None, name: str, tensor: Tensor | None
             ) -> None:
        """Keep a skip tensor: [Note: Tensor life of a portal]."""
        if not self.skip_layout.requires_copy(ns, name):
            super().save(batch, ns, name, tensor)
            return
        # A pipeline within a layer that is recomputed is in its first pass all the same, and then
        # it has no portal yet.
        portal = self.portals.get((ns, name))
        recomputing = self._recomputing or (portal is not None and pass_state.recomputing)
        life = 1 if recomputing else 3 if pass_state.checkpointing else 2
        if portal is None:
            portal = self.portals[ns, name] = Portal(tensor, life)
        else:
            portal.put_tensor(tensor, life)
        with self._outer_mode():
            self.phonies[ns, name] = portal.blue()
        self.stashed[ns, name] = tensor

    def load(self, batch: Batch, ns: Namespace | None, name: str) -> Tensor | None:
        """Give a skip tensor; :exc:`KeyError` if there is none."""
        if not self.skip_layout.requires_copy(ns, name):
            return super().load(batch, ns, name)
        with self._outer_mode():
            return self.portals[ns, name].orange(self.phonies[ns, name])

    def _outer_mode(self) -> AbstractContextManager[Any]:
        """Be in the mode around the layer, where it yields within ``torch.no_grad()``."""
        now = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return no_context if now == self._mode else _mode(*self._mode)

    def copy(self, batch: Batch, prev_stream: AbstractStream, next_stream: AbstractStream,
             ns: Namespace | None, name: str) -> None:
        """Move a skip tensor to another device."""
        self.phonies[ns, name] = self.portals[ns, name].copy(
            prev_stream, next_stream, self.phonies[ns, name])

    def seal(self, keys: Iterable[Key]) -> list[Tensor]:
        """Give the phonies of skips whose cell has ended: [Note: Changes in place]."""
        for key in keys:
            if key not in self.stashed:
                raise RuntimeError(f"'{key[1]}' must be stashed but have not")
            portal, tensor = self.portals[key], self.stashed[key]
            if portal.tensor is not None and portal.is_changed():
                portal.put_tensor(tensor, portal.tensor_life + 1)
                self.phonies[key] = portal.blue()
        return self.take_phonies(keys)

    def take_phonies(self, keys: Iterable[Key]) -> list[Tensor]:
        """Give the phonies of some skips, and let go of them."""
        return [self.phonies.pop(key) for key in keys]

    def put_phonies(self, keys: Iterable[Key], phonies: Sequence[Tensor]) -> None:
        """Keep the phonies of some skips."""
        self.phonies.update(zip(keys, phonies))

    def renew(self, kept: Iterable[tuple[Key, Tensor | None]]) -> 'SkipTrackerThroughPortals':
        """Give a tracker for a recomputation, which pops what was kept."""
        tracker = SkipTrackerThroughPortals(self.skip_layout, recomputing=True)
        for key, tensor in kept:
            tracker.portals[key] = Portal(tensor, 1)
        return tracker

    def end_cell(self, incoming: Iterable[Key], outgoing: Iterable[Key]) -> None:
        """Let go of what a cell has popped, and of what it stashed by itself."""
        for key in incoming:
            self.phonies.pop(key, None)
            if key in self.portals:
                self.portals[key].put_tensor(None, 0)
        for key in outgoing:
            self.phonies.pop(key, None)
            self.stashed.pop(key, None)

    def clear(self) -> None:
        """Let go of everything, since what is still here will never be popped."""
        self.tensors.clear()
        self.phonies.clear()
        self.stashed.clear()
        for portal in self.portals.values():
            portal.put_tensor(None, 0)


@contextmanager
def _mode(grad: bool, inference: bool) -> Iterator[None]:
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        yield


#: As torchgpipe 0.0.7 spelled it.
SkipTrackerThroughPotals = SkipTrackerThroughPortals


class _Current(threading.local):
    tracker: SkipTracker | None = None


#: ``current.tracker`` is this thread's tracker, if anyone has asked for it.
current = _Current()


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
    outside, current.tracker = current.tracker, skip_tracker
    try:
        yield
    finally:
        current.tracker = outside


def current_skip_tracker() -> SkipTracker:
    """Give this thread's tracker: see :func:`use_skip_tracker`."""
    if current.tracker is None:
        current.tracker = SkipTracker()
    return current.tracker
