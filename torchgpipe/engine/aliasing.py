"""Aliasing: changes in place of tensors with a common memory.

:class:`Aliasing` follows tensors with a common memory (rule 8). Without a pipeline, a change in
place reaches all tensors in the same memory. In a pipeline it may not reach all, or too many, and
then the plain call and the step raise::

    a tensor of the batch and           without a pipeline       here
    a skip                              both change              the skip may be a copy by now
    another tensor, before a boundary   both change              each has a history of its own
    itself in other micro-batches       changes once             changes for each micro-batch
    one that the layer keeps            changes in turn          may change before it was used

A change of a skip raises as well if another skip lies in its memory.

Tensors that all micro-batches share are detected in the output by their place in memory. Therefore
:class:`Aliasing` follows them through copies, and into and out of skips.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.base.private import versions
from torchgpipe.base.structure import is_among, share_memory
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.engine.partition import Partition
from torchgpipe.skip.transfer import Key, changed_in_place


class _Before(NamedTuple):
    """The input of a cell, before it runs.

    Args:
        aliased: The skips in whose memory other tensors lie.
        watched: Tensors that the cell may not change, their versions, and the error if it does.
    """

    batch: list[Tensor]
    common: list[Tensor]
    aliased: dict[Key, Tensor]
    watched: list[tuple[Sequence[Tensor], list[int], str]]


class Aliasing:
    """Tensors with a common memory in the micro-batches of one forward pass."""

    def __init__(
        self, batches: Sequence[Chunk], common: Sequence[int], transformed: bool = False
    ) -> None:
        self._several = len(batches) > 1
        #: Whether to check outputs. Tensors of a ``torch.func`` transform do not have a memory.
        self._follows = self._several and not transformed
        #: The tensors that all micro-batches share. A change of a view changes them.
        self._shared = [batches[0].tensors[k] for k in common]
        #: By micro-batch, its tensors that are shared, or copies of shared ones.
        self._common = (
            {i: [batch.tensors[k] for k in common] for i, batch in enumerate(batches)}
            if common
            else {}
        )
        #: By micro-batch, the skips that are such tensors.
        self._common_skips: defaultdict[int, set[Key]] = defaultdict(set)
        #: By micro-batch, the tensors that shared a memory before a boundary.
        self._once_shared: dict[int, list[Tensor]] = {}
        #: By micro-batch, the skips in whose memory the batch lies, or lay before a copy.
        self._with_batch: defaultdict[int, set[Key]] = defaultdict(set)
        #: By micro-batch and skip, the other skips in whose memory it lies.
        self._with_skips: defaultdict[int, dict[Key, set[Key]]] = defaultdict(dict)
        #: By partition and place in memory, the storage and version of an output.
        self._handed_on: defaultdict[int, dict[Any, tuple[Any, int]]] = defaultdict(dict)
        #: The micro-batches with tensors to follow, even in cells without skips.
        self.watched = {*self._common}

    def common(self, i: int) -> list[Tensor]:
        """Return the tensors of a micro-batch that all micro-batches share, or copies of them."""
        return self._common.get(i, [])

    def cross(
        self, i: int, tensors: list[Tensor], copy: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """Copy tensors over a boundary between partitions, and follow those that share memory."""
        common = self.common(i)
        where = [k for k, x in enumerate(tensors) if is_among(x, common)] if common else []
        shares = i in self._once_shared or (
            len(tensors) > 1
            and any(share_memory([x], tensors[k + 1 :]) for k, x in enumerate(tensors))
        )
        copied = copy(tensors)
        if self._shared:
            self._common[i] = [copied[k] for k in where]
        if shares:
            self._once_shared[i] = [*copied]  # The cell takes skips out of that list.
            self.watched.add(i)
        return copied

    def leave(self, i: int, tensors: Sequence[Tensor]) -> list[bool]:
        """Return for each tensor that a cell passes on whether another one shares its memory.

        A memory that was shared before a boundary counts as well.
        """
        if len(tensors) == 1 and i not in self.watched:
            return [False]
        before = self._once_shared.get(i, [])
        return [
            bool(self._with_batch[i])
            or share_memory([x], [*before, *tensors[:k], *tensors[k + 1 :]])
            for k, x in enumerate(tensors)
        ]

    def is_common(self, i: int, x: Tensor) -> bool:
        """Return whether all micro-batches share a tensor, or it is a copy of such a tensor."""
        return bool(self._shared) and is_among(x, self.common(i))

    def arrive(self, i: int, aliased: list[Tensor], common: list[Tensor], skips: set[Key]) -> None:
        """Record tensors that come from another process.

        Args:
            aliased: The tensors for which :meth:`leave` returned ``True`` in that process.
        """
        if aliased:
            self._once_shared[i] = [*self._once_shared.get(i, []), *aliased]
        if common:
            self._common[i] = common
            self._shared = self._shared or common
        self._common_skips[i] |= skips
        if aliased or common:
            self.watched.add(i)

    def before(self, i: int, j: int, cell: Cell, tensors: list[Tensor]) -> '_Before':
        """Record the input of a cell in partition ``j``."""
        number = len(tensors) - len(cell.popped)
        batch = tensors[:number]
        common_skips = self._common_skips[i]
        with_others = self._with_batch[i] | self._with_skips[i].keys()
        common = self.common(i)
        aliased = {}
        # Other skips are not kept, because they live no longer than the layers need them.
        for key, x in zip(cell.popped, tensors[number:]):
            if key in common_skips:
                common = [*common, x]
            if key in with_others:
                aliased[key] = x
        return _Before(
            batch,
            common,
            aliased,
            [
                (watched, versions(watched), error)
                for watched, error in self._watched(i, j, batch, common, aliased)
                if watched
            ],
        )

    def after(
        self, i: int, partition: Partition, cell: Cell, before: '_Before', output: Sequence[Tensor]
    ) -> None:
        """Check whether a cell changed watched tensors, and record its output.

        Raises:
            RuntimeError: The cell changed a tensor that is also used elsewhere.
        """
        batch, common, aliased, watched = before
        for tensors, version, error in watched:
            if versions(tensors) != version:
                raise RuntimeError(error)
        number = len(output) - len(cell.stashed)
        given = output[:number]
        stashed = dict(zip(cell.stashed, output[number:]))
        if self._shared:
            self._common[i] = [y for y in given if is_among(y, common)]
            self._common_skips[i] |= {key for key, x in stashed.items() if is_among(x, common)}
        if not share_memory(self._once_shared.get(i, []), given):
            self._once_shared.pop(i, None)
        self._follow_skips(
            i, batch, given, {key for _, key in partition.incoming}, aliased, stashed
        )
        self.hand_on(partition.j, output)

    def hand_on(self, j: int, tensors: Iterable[Tensor]) -> None:
        """Raise if a partition modified a tensor after passing it on in another micro-batch.

        Raises:
            RuntimeError: It did, such as by returning a buffer that it changes in place.
        """
        handed_on = self._handed_on[j]
        for x in tensors if self._follows else ():
            # Other tensors do not have their own memory, or no versions.
            if (
                type(x) not in (Tensor, nn.Parameter)
                or x.layout is not torch.strided
                or x.is_inference()
            ):
                continue
            storage = x.untyped_storage()
            now = x._version
            place = id(storage), x.storage_offset()
            # Another memory may have the same `id` after this one is freed.
            found, version = handed_on.get(place, (_gone, now))
            if version != now and found() is storage:
                raise RuntimeError(
                    f'partition {j} hands on a tensor that was changed in place since it did so '
                    'for another micro-batch, such as a buffer: the next partition may see the '
                    'change of a later one. Let the layer return a copy: tensor.clone().'
                )
            handed_on[place] = weakref.ref(storage), now

    def _watched(
        self,
        i: int,
        j: int,
        batch: Sequence[Tensor],
        common: list[Tensor],
        aliased: dict[Key, Tensor],
    ) -> Iterator[tuple[Sequence[Tensor], str]]:
        """Yield tensors that partition ``j`` may not change, and the error message if it does."""
        if self._shared and self._several:
            yield (
                [*self._shared, *common],
                (
                    f'partition {j} changed a tensor in place that all micro-batches share (a '
                    'scalar, or in NoChunk). Without a pipeline it would change once. Use an '
                    'operation that is not in place.'
                ),
            )
        yield (
            self._once_shared.get(i, []),
            (
                f'a tensor of the input of partition {j} was changed in place, and another one '
                'lay in its memory before both came from the partition before. Without a '
                'pipeline, both would change. Use an operation that is not in place, or let the '
                'partition before return a copy: tensor.clone().'
            ),
        )
        if self._with_batch[i]:
            names = ', '.join(sorted(f"'{name}'" for _, name in self._with_batch[i]))
            yield (
                batch,
                changed_in_place(
                    f'the input of partition {j}, which is also the skip tensor {names},'
                ),
            )
        for key, tensor in aliased.items():
            yield (
                [tensor],
                changed_in_place(
                    f"the skip tensor '{key[1]}', whose memory is also that of the batch or of "
                    'another skip,'
                ),
            )

    def _follow_skips(
        self,
        i: int,
        batch: Sequence[Tensor],
        output: Sequence[Tensor],
        popped: set[Key],
        aliased: dict[Key, Tensor],
        stashed: dict[Key, Tensor],
    ) -> None:
        """Record the skips that share memory with the output of a cell or with other skips."""
        with_batch = self._with_batch[i]
        with_skips = self._with_skips[i]
        with_batch -= popped if share_memory(batch, output) else {*with_batch}
        for key, x in aliased.items():
            if share_memory([x], output):
                with_batch |= with_skips.get(key, set())
                self.watched.add(i)
        for key, x in stashed.items():
            if share_memory([x], output):
                with_batch.add(key)
                self.watched.add(i)
            others = {
                other for other, y in stashed.items() if other != key and share_memory([x], [y])
            }
            if others:
                with_skips[key] = others


def _gone() -> None:
    """Return ``None``, as a dead weak reference does."""
