"""Tensors of a micro-batch whose memory has something else in it, or should have: see to changes.

A change in place reaches whatever lies in the same memory. In a pipeline it may not, or may reach
too far, and then it raises::

    a tensor of the batch and           without a pipeline       here
    a skip                              both change              the skip may be a copy by now
    another tensor, before a copy       both change              the copies are two
    itself in other micro-batches       changes once             changes for each micro-batch

What all micro-batches share is also told from the rest where it comes out, by its place in memory.
So it is followed through copies, and into skips and out of them.
"""
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from torchgpipe.engine.batch import Batch
from torchgpipe.engine.memory import is_among, share_memory, versions
from torchgpipe.skip.namespace import Key
from torchgpipe.skip.portal import Portal, changed_in_place

__all__ = ['Aliasing']


class Aliasing:
    """What to see to in the micro-batches of one forward pass.

    Args:
        batches: The micro-batches.
        common: The indices of tensors that all micro-batches share.
    """

    def __init__(self, batches: Sequence[Batch], common: Sequence[int]) -> None:
        self._several = len(batches) > 1
        #: The tensors that all share, which is what a view of them changes.
        self._shared = [batches[0][k] for k in common]
        #: Of each micro-batch, those among its tensors that are these, or copies of them.
        self._common = {i: [batch[k] for k in common]
                        for i, batch in enumerate(batches)} if common else {}
        #: And the skips that are such tensors.
        self._common_skips: dict[int, set[Key]] = {i: set() for i in self._common}
        #: And those that shared a memory before a copy parted them.
        self._parted: dict[int, list[Tensor]] = {}
        #: The micro-batches in which there is anything to see to, beside skips.
        self.watched = {*self._common}

    def common(self, i: int) -> list[Tensor]:
        """Give the tensors of a micro-batch that all share, or copies of them."""
        return self._common.get(i, [])

    def copy(self, i: int, batch: Batch, copy: Callable[[Batch], None]) -> None:
        """Let a batch be copied to another memory, in place."""
        common = self.common(i)
        where = [k for k, x in enumerate(batch) if is_among(x, common)]
        parted = i in self._parted or (len(batch) > 1 and any(
            share_memory([x], tuple(batch)[k + 1:]) for k, x in enumerate(batch)))
        copy(batch)
        if common:
            self._common[i] = [batch[k] for k in where]
        if parted:
            self._parted[i] = list(batch)
            self.watched.add(i)

    def run(self, i: int, j: int, batch: Batch, aliased: set[Key], popped: set[Key],
            portals: Mapping[Key, Portal], run: Callable[[Batch], Batch]) -> Batch:
        """Run a cell, and see to what it changes.

        Args:
            i: The micro-batch.
            j: The partition.
            batch: The input.
            aliased: The skips in whose memory the batch lies; as it does afterwards, in place.
            popped: Those that the cell pops.
            portals: The skips of the micro-batch.
            run: Runs the cell.
        """
        common, parted, watched = self.common(i), self._parted.get(i, []), set(aliased)
        common_skips = self._common_skips.get(i, set())
        common = [*common, *_tensors(portals, common_skips & popped).values()]
        before, before_parted = versions(tuple(batch)), versions(parted)
        before_common = versions([*self._shared, *common])
        output = run(batch)
        if self._several and versions([*self._shared, *common]) != before_common:
            raise RuntimeError(
                f'partition {j} changed a tensor in place that all micro-batches share (a scalar, '
                'or in NoChunk). Without a pipeline it would change once. Use an operation that '
                'is not in place.')
        if versions(parted) != before_parted:
            raise RuntimeError(
                f'a tensor of the input of partition {j} was changed in place, and another one '
                'lay in its memory before both were copied from another device. Without a '
                'pipeline, both would change. Use an operation that is not in place, or let the '
                'partition before return a copy: tensor.clone().')
        if watched and versions(tuple(batch)) != before:
            names = ', '.join(sorted(f"'{name}'" for _, name in watched))
            raise RuntimeError(changed_in_place(
                f'the input of partition {j}, which is also the skip tensor {names},'))
        aliased.difference_update(popped if share_memory(batch, output) else watched)
        if not share_memory(parted, output):
            self._parted.pop(i, None)
        if common:
            self._common[i] = [y for y in output if is_among(y, common)]
            common_skips |= {key for key, x in _tensors(portals, portals).items()
                             if is_among(x, common)}
        return output


def _tensors(portals: Mapping[Key, Portal], keys: Iterable[Key]) -> dict[Key, Tensor]:
    return {key: x for key in keys if (x := portals[key].tensor) is not None}
