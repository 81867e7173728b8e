"""Tensors of a micro-batch that share memory, or should share it, and in-place changes of them.

A change in place reaches whatever lies in the same memory. In a pipeline it may not, or may reach
too far, and then it raises, in the plain call and in a step alike::

    a tensor of the batch and           without a pipeline       here
    a skip                              both change              the skip may be a copy by now
    another tensor, before a boundary   both change              each has a history of its own
    itself in other micro-batches       changes once             changes for each micro-batch
    one that the layer keeps            changes in turn          may change before it was used

So do changes of a skip in whose memory another skip lies.

What all micro-batches share is also told from the rest where it comes out, by its place in memory.
So it is followed through copies, and into skips and out of them.
"""
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.base.structure import is_among, share_memory, versions
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.microbatches import Batch
from torchgpipe.engine.partition import Partition
from torchgpipe.skip.namespace import Key

__all__ = ['Aliasing', 'changed_in_place']


class _Before(NamedTuple):
    """What there was before a cell.

    Args:
        batch: Its batch.
        common: Those of its tensors that all micro-batches share.
        aliased: Those of its skips in whose memory others lie.
        watched: Tensors that it may not change, their versions, and what is wrong if it does.
    """

    batch: list[Tensor]
    common: list[Tensor]
    aliased: dict[Key, Tensor]
    watched: list[tuple[Sequence[Tensor], list[int], str]]


class Aliasing:
    """What to see to in the micro-batches of one forward pass.

    Args:
        batches: The micro-batches.
        common: The indices of tensors that all micro-batches share.
        transformed: Whether a transform of ``torch.func`` is at work.
    """

    def __init__(self, batches: Sequence[Batch], common: Sequence[int],
                 transformed: bool = False) -> None:
        self._several = len(batches) > 1
        #: Tensors of a transform of torch.func have no memory.
        self._follows = self._several and not transformed
        #: The tensors that all share, which is what a view of them changes.
        self._shared = [batches[0].tensors[k] for k in common]
        #: Of each micro-batch, those among its tensors that are these, or copies of them.
        self._common = {i: [batch.tensors[k] for k in common]
                        for i, batch in enumerate(batches)} if common else {}
        #: And the skips that are such tensors.
        self._common_skips: defaultdict[int, set[Key]] = defaultdict(set)
        #: And those that shared a memory before a boundary.
        self._once_shared: dict[int, list[Tensor]] = {}
        #: And the skips in whose memory the batch lies; or lay, before one of both was copied.
        self._with_batch: defaultdict[int, set[Key]] = defaultdict(set)
        #: And of each skip the others in whose memory it lies.
        self._with_skips: defaultdict[int, dict[Key, set[Key]]] = defaultdict(dict)
        #: By partition and place in memory, what was handed on, and its version then.
        self._handed_on: defaultdict[int, dict[Any, tuple[Any, int]]] = (
            defaultdict(dict))
        #: The micro-batches in which there is anything to see to, also in cells without skips.
        self.watched = {*self._common}

    def common(self, i: int) -> list[Tensor]:
        """Return the tensors of a micro-batch that all share, or copies of them."""
        return self._common.get(i, [])

    def cross(self, i: int, tensors: list[Tensor], copy: Callable[[list[Tensor]], list[Tensor]]
              ) -> list[Tensor]:
        """Let tensors cross a boundary: return what comes of them behind it."""
        common = self.common(i)
        where = [k for k, x in enumerate(tensors) if is_among(x, common)] if common else []
        shares = i in self._once_shared or (len(tensors) > 1 and any(
            share_memory([x], tensors[k + 1:]) for k, x in enumerate(tensors)))
        copied = copy(tensors)
        if self._shared:
            self._common[i] = [copied[k] for k in where]
        if shares:
            self._once_shared[i] = [*copied]  # The cell takes skips out of that list.
            self.watched.add(i)
        return copied

    def leave(self, i: int, tensors: Sequence[Tensor]) -> list[bool]:
        """Return of what a cell hands on whether others lie in the memory of each, or lay."""
        if len(tensors) == 1 and i not in self.watched:
            return [False]
        before = self._once_shared.get(i, [])
        return [bool(self._with_batch[i]) or share_memory(
            [x], [*before, *tensors[:k], *tensors[k + 1:]]) for k, x in enumerate(tensors)]

    def is_common(self, i: int, x: Tensor) -> bool:
        """Return whether a tensor of a micro-batch is one that all share, or a copy of it."""
        return bool(self._shared) and is_among(x, self.common(i))

    def arrive(self, i: int, aliased: list[Tensor], common: list[Tensor], skips: set[Key]) -> None:
        """Take note of what comes from another process.

        Args:
            i: The micro-batch.
            aliased: The tensors of whose memory :meth:`leave` said so there.
            common: Those that all micro-batches share.
            skips: The skips that are such tensors.
        """
        if aliased:
            self._once_shared[i] = [*self._once_shared.get(i, []), *aliased]
        if common:
            self._common[i], self._shared = common, self._shared or common
        self._common_skips[i] |= skips
        if aliased or common:
            self.watched.add(i)

    def before(self, i: int, j: int, cell: Cell, tensors: list[Tensor]) -> '_Before':
        """Look at what a cell gets, in partition ``j``."""
        number = len(tensors) - len(cell.popped)
        batch, common_skips = tensors[:number], self._common_skips[i]
        with_others = self._with_batch[i] | self._with_skips[i].keys()
        common, aliased = self.common(i), {}
        # No other skips: they live no longer than the layers need them.
        for key, x in zip(cell.popped, tensors[number:]):
            if key in common_skips:
                common = [*common, x]
            if key in with_others:
                aliased[key] = x
        return _Before(batch, common, aliased, [
            (watched, versions(watched), error) for watched, error
            in self._watched(i, j, batch, common, aliased) if watched])

    def after(self, i: int, partition: Partition, cell: Cell, before: '_Before',
              output: Sequence[Tensor]) -> None:
        """See to what a cell has changed, and look at what it gave.

        Raises:
            RuntimeError: It has changed something that lies elsewhere, too.
        """
        batch, common, aliased, watched = before
        for tensors, version, error in watched:
            if versions(tensors) != version:
                raise RuntimeError(error)
        number = len(output) - len(cell.stashed)
        given, stashed = output[:number], dict(zip(cell.stashed, output[number:]))
        if self._shared:
            self._common[i] = [y for y in given if is_among(y, common)]
            self._common_skips[i] |= {key for key, x in stashed.items() if is_among(x, common)}
        if not share_memory(self._once_shared.get(i, []), given):
            self._once_shared.pop(i, None)
        self._follow_skips(i, batch, given, {key for _, key in partition.incoming}, aliased,
                           stashed)
        self.hand_on(partition.j, output)

    def hand_on(self, j: int, tensors: Iterable[Tensor]) -> None:
        """See that a partition has not changed since what it handed on in another micro-batch.

        Raises:
            RuntimeError: It has, as where it gives a buffer that it changes in place.
        """
        handed_on = self._handed_on[j]
        for x in tensors if self._follows else ():
            # Others have no memory of their own, or no versions.
            if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided \
                    or x.is_inference():
                continue
            storage, now = x.untyped_storage(), x._version
            place = id(storage), x.storage_offset()
            # Another memory may have the same number once this one is gone.
            found, version = handed_on.get(place, (_gone, now))
            if version != now and found() is storage:
                raise RuntimeError(
                    f'partition {j} hands on a tensor that was changed in place since it did so '
                    'for another micro-batch, such as a buffer: the next partition may see the '
                    'change of a later one. Let the layer return a copy: tensor.clone().')
            handed_on[place] = weakref.ref(storage), now

    def _watched(self, i: int, j: int, batch: Sequence[Tensor], common: list[Tensor],
                 aliased: dict[Key, Tensor]) -> Iterator[tuple[Sequence[Tensor], str]]:
        """Yield tensors that partition ``j`` may not change, and what is wrong if it does."""
        if self._shared and self._several:
            yield [*self._shared, *common], (
                f'partition {j} changed a tensor in place that all micro-batches share (a scalar, '
                'or in NoChunk). Without a pipeline it would change once. Use an operation that '
                'is not in place.')
        yield self._once_shared.get(i, []), (
            f'a tensor of the input of partition {j} was changed in place, and another one lay in '
            'its memory before both came from the partition before. Without a pipeline, both '
            'would change. Use an operation that is not in place, or let the partition before '
            'return a copy: tensor.clone().')
        if self._with_batch[i]:
            names = ', '.join(sorted(f"'{name}'" for _, name in self._with_batch[i]))
            yield batch, changed_in_place(
                f'the input of partition {j}, which is also the skip tensor {names},')
        for key, tensor in aliased.items():
            yield [tensor], changed_in_place(
                f"the skip tensor '{key[1]}', whose memory is also that of the batch or of "
                'another skip,')

    def _follow_skips(self, i: int, batch: Sequence[Tensor], output: Sequence[Tensor],
                      popped: set[Key], aliased: dict[Key, Tensor], stashed: dict[Key, Tensor]
                      ) -> None:
        """Note in which skips' memory the output of a cell lies, and skips in that of others."""
        with_batch, with_skips = self._with_batch[i], self._with_skips[i]
        with_batch -= popped if share_memory(batch, output) else {*with_batch}
        for key, x in aliased.items():
            if share_memory([x], output):
                with_batch |= with_skips.get(key, set())
                self.watched.add(i)
        for key, x in stashed.items():
            if share_memory([x], output):
                with_batch.add(key)
                self.watched.add(i)
            others = {other for other, y in stashed.items()
                      if other != key and share_memory([x], [y])}
            if others:
                with_skips[key] = others


def changed_in_place(what: str) -> str:
    """Say what is wrong with a change in place that a skip should have seen, and did not."""
    return (f'{what} was changed in place between its stash and its pop, in another partition '
            'than the one that stashed it. Without a pipeline, the layer that pops would see that '
            'change; here it cannot. Use an operation that is not in place, or stash a copy: '
            "stash('name', tensor.clone()).")


def _gone() -> None:
    """Answer as a dead weak reference does."""
