"""The boundary of a cell: skips enter and leave a cell beside its batch.

::

    enter   x, …  ──▶  x, …, phonies             what a cell gets
    keep          ──▶  x, …, phonies, tensors    what a checkpoint keeps, to recompute from
    call               x ──▶ layers ──▶ y        the layers pop from the tracker, and stash into it
    leave   y, …  ◀──  y, …, phonies             what a cell gives
"""
from collections.abc import Callable, Iterable

from torchgpipe.aliases import Value
from torchgpipe.engine.batch import Batch
from torchgpipe.skip.namespace import Key
from torchgpipe.skip.tracker import SkipTracker, SkipTrackerThroughPortals
from torchgpipe.structure import Kind

__all__ = ['SkipBoundary']


class SkipBoundary:
    """A cell's function from batch to batch, as one that takes and gives skips as well.

    Args:
        tracker: The micro-batch's tracker.
        incoming: The skips that the cell pops, each with the partition that stashed it.
        outgoing: The skips that it stashes, each with the partition that pops it.
        batch: The micro-batch.
    """

    __slots__ = ('_called', '_incoming', '_kept', '_kind', '_number', '_outgoing', '_result_kind',
                 '_tracker')

    def __init__(self, tracker: SkipTrackerThroughPortals, incoming: Iterable[tuple[int, Key]],
                 outgoing: Iterable[tuple[int, Key]], batch: Batch) -> None:
        self._tracker = tracker
        self._incoming = [key for _, key in incoming]
        self._outgoing = [key for _, key in outgoing]
        self._kind = batch.kind
        self._number = len(batch)
        self._kept: tuple[Key, ...] = ()
        self._called = False
        self._result_kind: Kind = tuple

    def enter(self, batch: Batch) -> Batch:
        """Put the phonies that come in beside a batch."""
        return Batch.of((*batch, *self._tracker.take_phonies(self._incoming)))

    def keep(self, batch: Batch) -> Batch:
        """Put the tensors behind these phonies there too."""
        portals = self._tracker.portals
        held = [(key, portals[key].tensor) for key in self._incoming]
        self._kept = tuple(key for key, tensor in held if tensor is not None)
        return Batch.of((*batch, *(tensor for _, tensor in held if tensor is not None)))

    def leave(self, output: Batch) -> Batch:
        """Take the phonies that go out from beside a batch."""
        tensors = tuple(output)
        number = len(tensors) - len(self._outgoing)
        self._tracker.put_phonies(self._outgoing, tensors[number:])
        return Batch.of(tensors[:number], self._result_kind)

    def __call__(self, function: Callable[[SkipTracker, Value], Value],
                 value: Value) -> Batch:
        """Compute; any call but the first is a recomputation, from what was kept.

        Args:
            function: What the cell computes, with the skips of a tracker.
            value: What :meth:`enter` or :meth:`keep` gave.
        """
        number = self._number
        tensors = tuple(value)
        recomputing, self._called = self._called, True
        tracker = self._tracker
        if recomputing:
            kept = dict(zip(self._kept, tensors[number + len(self._incoming):]))
            tracker = tracker.renew((key, kept.get(key)) for key in self._incoming)
        tracker.put_phonies(self._incoming, tensors[number:])
        try:
            output = Batch.result(function(tracker, self._kind(tensors[:number])))
            self._result_kind = output.kind
            return Batch.of((*output, *tracker.seal(self._outgoing)))
        finally:
            tracker.end_cell(self._incoming, self._outgoing)
