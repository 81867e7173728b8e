"""Crossings: skips enter and leave a cell beside its batch.

::

    enter   x, …  ──▶  x, …, phonies             what a cell gets
    keep          ──▶  x, …, phonies, tensors    what a checkpoint keeps, to recompute from
    call               x ──▶ layers ──▶ y        the layers pop from the tracker, and stash into it
    leave   y, …  ◀──  y, …, phonies             what a cell gives
"""
from typing import Iterable, Sequence, Tuple

from torch import Tensor

from torchgpipe.aliases import Function, TensorOrTensors, Tensors
from torchgpipe.microbatch import Batch
from torchgpipe.skip.namespace import Key
from torchgpipe.skip.tracker import SkipTrackerThroughPortals

__all__ = ['Crossing', 'share_memory']


class Crossing:
    """A cell's function from batch to batch, as one that takes and gives skips as well.

    Args:
        function: What the cell computes.
        tracker: The micro-batch's tracker.
        incoming: The skips that the cell pops and another partition stashed.
        outgoing: The skips that it stashes and another partition pops.
    """

    __slots__ = ('_atomic', '_called', '_function', '_incoming', '_kept', '_number', '_outgoing',
                 '_tracker', '_result_atomic', '_shared')

    def __init__(self, function: Function, tracker: SkipTrackerThroughPortals,
                 incoming: Sequence[Key], outgoing: Sequence[Key]) -> None:
        self._function = function
        self._tracker = tracker
        self._incoming = incoming
        self._outgoing = outgoing
        self._kept: Tuple[Key, ...] = ()
        self._called = False

    def enter(self, batch: Batch) -> Batch:
        """Put the phonies that come in beside a batch."""
        self._atomic, self._number = batch.atomic, len(batch)
        return Batch((*batch, *self._tracker.take_phonies(self._incoming)))

    def keep(self, batch: Batch) -> Batch:
        """Put the tensors behind these phonies there too."""
        portals = self._tracker.portals
        held = [(key, portals[key].tensor) for key in self._incoming]
        self._kept = tuple(key for key, tensor in held if tensor is not None)
        return Batch((*batch, *(tensor for _, tensor in held if tensor is not None)))

    def __call__(self, value: TensorOrTensors) -> Tensors:
        """Compute; a second call, in backward, pops what :meth:`keep` has kept."""
        tracker = self._tracker
        number = self._number
        tensors = tuple(value)
        tracker.put_phonies(self._incoming, tensors[number:])
        if self._called:
            self._put_back(tensors[number + len(self._incoming):])
        self._called = True
        try:
            output = Batch(self._function(tensors[0] if self._atomic else tensors[:number]))
            self._result_atomic = output.atomic
            stashed = [tracker.stashed[key] for key in self._outgoing]
            self._shared = [key for key, tensor in zip(self._outgoing, stashed)
                            if tensor is not None and share_memory([tensor], output)]
            return (*output, *tracker.seal(self._outgoing))
        finally:
            for key in (*self._incoming, *self._outgoing):
                tracker.phonies.pop(key, None)
                tracker.stashed.pop(key, None)
            for key in self._incoming:
                if key in tracker.portals:  # [Note: Tensor life of a portal], the last lines
                    tracker.portals[key].put_tensor(None, 0)

    def _put_back(self, tensors: Sequence[Tensor]) -> None:
        kept = dict(zip(self._kept, tensors))
        for key in self._incoming:
            self._tracker.portals[key].put_tensor(kept.get(key), 1)

    def leave(self, output: Batch) -> Batch:
        """Take the phonies that go out from beside a batch."""
        tensors = tuple(output)
        number = len(tensors) - len(self._outgoing)
        self._tracker.put_phonies(self._outgoing, tensors[number:])
        self._tracker.shared.update(self._shared)
        return Batch(tensors[0] if self._result_atomic else tensors[:number])


def share_memory(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Tell whether any of some tensors lies in the memory of any of the others."""
    memories = {x.untyped_storage()._cdata for x in others}
    return any(x.untyped_storage()._cdata in memories for x in some)
