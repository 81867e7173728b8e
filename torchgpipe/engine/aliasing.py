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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.base.private import versions
from torchgpipe.base.structure import is_among, share_memory
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.engine.partition import Partition
from torchgpipe.skip.transfer import Key, changed_in_place


@dataclass(slots=True, eq=False)
class _Aliases:
    """The tensors of one micro-batch whose memory others use, on its way through partitions."""

    #: The tensors of the batch that all micro-batches share, or copies of these.
    common: list[Tensor] = field(default_factory=list)
    #: The skips that are such tensors.
    common_skips: set[Key] = field(default_factory=set)
    #: The tensors that shared a memory before a boundary between partitions.
    once_shared: list[Tensor] = field(default_factory=list)
    #: The skips in whose memory the batch lies, or lay before a copy.
    with_batch: set[Key] = field(default_factory=set)
    #: By skip, the other skips in whose memory it lies.
    with_skips: dict[Key, set[Key]] = field(default_factory=dict)


class _Watched(NamedTuple):
    """Tensors that a cell may not change, their versions, and the error if it does."""

    tensors: Sequence[Tensor]
    versions: list[int]
    error: str


class _Before(NamedTuple):
    """The input of a cell, before it runs."""

    batch: list[Tensor]
    #: The tensors, also in skips, that all micro-batches share.
    common: list[Tensor]
    #: The skips in whose memory other tensors lie.
    aliased: dict[Key, Tensor]
    watched: list[_Watched]

    def watch(
        self,
        tensors: Sequence[Tensor],
        error: str,
    ) -> None:
        """Let :meth:`Aliasing.after` raise an error if the cell changes any of these tensors."""
        if tensors:
            self.watched.append(_Watched(tensors, versions(tensors), error))


class Aliasing:
    """Tensors with a common memory in the micro-batches of one forward pass."""

    def __init__(
        self,
        batches: Sequence[Chunk],
        common: Sequence[int],
        transformed: bool = False,
    ) -> None:
        #: By micro-batch.
        self._aliases: defaultdict[int, _Aliases] = defaultdict(_Aliases)
        if common:
            for i, batch in enumerate(batches):
                self._aliases[i].common = [batch.tensors[k] for k in common]
        #: The tensors that all micro-batches share. A change of a view changes them.
        self._shared = [batches[0].tensors[k] for k in common]
        self._several = len(batches) > 1
        #: Whether to check outputs. Tensors of a ``torch.func`` transform do not have a memory.
        self._follows = self._several and not transformed
        #: By partition and place in memory, the storage and version of an output.
        self._handed_on: defaultdict[int, dict[Any, tuple[Any, int]]] = defaultdict(dict)
        #: The micro-batches with tensors to follow, even in cells without skips.
        self.watched = {*range(len(batches))} if common else set()

    def common(self, i: int) -> list[Tensor]:
        """Return the tensors of a micro-batch that all micro-batches share, or copies of them."""
        return self._aliases[i].common

    def cross(
        self,
        i: int,
        tensors: list[Tensor],
        copy: Callable[[list[Tensor]], list[Tensor]],
    ) -> list[Tensor]:
        """Copy tensors over a boundary between partitions, and follow those that share memory."""
        aliases = self._aliases[i]
        common = [k for k, x in enumerate(tensors) if is_among(x, aliases.common)]
        shares = bool(aliases.once_shared)
        for k, x in enumerate(tensors):
            shares = shares or share_memory([x], tensors[k + 1 :])
        copied = copy(tensors)

        if self._shared:
            aliases.common = [copied[k] for k in common]
        if shares:
            # In another list, because the cell removes skips from its input.
            aliases.once_shared = [*copied]
            self.watched.add(i)
        return copied

    def leave(
        self,
        i: int,
        tensors: Sequence[Tensor],
    ) -> list[bool]:
        """Return for each tensor that a cell passes on whether another one shares its memory.

        A memory that was shared before a boundary counts as well.
        """
        if len(tensors) == 1 and i not in self.watched:
            return [False]
        aliases = self._aliases[i]
        aliased = []
        for k, x in enumerate(tensors):
            rest = [*tensors]
            del rest[k]
            rest += aliases.once_shared
            aliased.append(bool(aliases.with_batch) or share_memory([x], rest))
        return aliased

    def is_common(self, i: int, x: Tensor) -> bool:
        """Return whether all micro-batches share a tensor, or it is a copy of such a tensor."""
        return is_among(x, self.common(i))

    def arrive(
        self,
        i: int,
        aliased: list[Tensor],
        common: list[Tensor],
        skips: set[Key],
    ) -> None:
        """Record tensors that come from another process.

        Args:
            aliased: The tensors for which :meth:`leave` returned ``True`` in that process.
        """
        aliases = self._aliases[i]
        aliases.once_shared = aliases.once_shared + aliased
        aliases.common_skips |= skips
        if common:
            aliases.common = common
            self._shared = self._shared or common
        if aliased or common:
            self.watched.add(i)

    def before(
        self,
        i: int,
        j: int,
        cell: Cell,
        tensors: list[Tensor],
    ) -> _Before:
        """Record the input of a cell in partition ``j``."""
        aliases = self._aliases[i]
        number = len(tensors) - len(cell.popped)
        batch = tensors[:number]
        before = _Before(
            batch=batch,
            common=[*aliases.common],
            aliased={},
            watched=[],
        )
        # Other skips are not kept, because they live no longer than the layers need them.
        for key, x in zip(cell.popped, tensors[number:]):
            if key in aliases.common_skips:
                before.common.append(x)
            if key in aliases.with_batch or key in aliases.with_skips:
                before.aliased[key] = x
        self._watch(j, aliases, before)
        return before

    def _watch(
        self,
        j: int,
        aliases: _Aliases,
        before: _Before,
    ) -> None:
        """Watch the tensors that partition ``j`` may not change."""
        if self._shared and self._several:
            before.watch(
                [*self._shared, *before.common],
                f'partition {j} changed a tensor in place that all micro-batches share (a '
                'scalar, or in NoChunk). Without a pipeline it would change once. Use an '
                'operation that is not in place.',
            )
        before.watch(
            aliases.once_shared,
            f'a tensor of the input of partition {j} was changed in place, and another one '
            'lay in its memory before both came from the partition before. Without a '
            'pipeline, both would change. Use an operation that is not in place, or let the '
            'partition before return a copy: tensor.clone().',
        )
        if aliases.with_batch:
            names = ', '.join(sorted(f"'{name}'" for _, name in aliases.with_batch))
            what = f'the input of partition {j}, which is also the skip tensor {names},'
            before.watch(before.batch, changed_in_place(what))
        for (_, name), tensor in before.aliased.items():
            what = (
                f"the skip tensor '{name}', whose memory is also that of the batch or of "
                'another skip,'
            )
            before.watch([tensor], changed_in_place(what))

    def after(
        self,
        i: int,
        partition: Partition,
        cell: Cell,
        before: _Before,
        output: Sequence[Tensor],
    ) -> None:
        """Check whether a cell changed watched tensors, and record its output.

        Raises:
            RuntimeError: The cell changed a tensor that is also used elsewhere.
        """
        # Rule 8: A change in place has the effect that it has in the unwrapped model, or it
        # raises.
        for watched in before.watched:
            if versions(watched.tensors) != watched.versions:
                raise RuntimeError(watched.error)

        aliases = self._aliases[i]
        number = len(output) - len(cell.stashed)
        batch = output[:number]
        stashed = dict(zip(cell.stashed, output[number:]))
        if self._shared:
            aliases.common = [y for y in batch if is_among(y, before.common)]
            for key, x in stashed.items():
                if is_among(x, before.common):
                    aliases.common_skips.add(key)
        if not share_memory(aliases.once_shared, batch):
            aliases.once_shared = []

        if share_memory(before.batch, batch):
            # The batch still lies in the memory of earlier skips, except those popped here.
            aliases.with_batch.difference_update(key for _, key in partition.incoming)
        else:
            aliases.with_batch.clear()
        self._follow_skips(i, batch, before.aliased, stashed)
        self.hand_on(partition.j, output)

    def _follow_skips(
        self,
        i: int,
        batch: Sequence[Tensor],
        aliased: dict[Key, Tensor],
        stashed: dict[Key, Tensor],
    ) -> None:
        """Record the skips that share memory with the output of a cell or with other skips."""
        aliases = self._aliases[i]
        for key, x in aliased.items():
            if share_memory([x], batch):
                # This skip ends here. Others in its memory are still waiting.
                aliases.with_batch |= aliases.with_skips.get(key, set())
                self.watched.add(i)
        for key, x in stashed.items():
            if share_memory([x], batch):
                aliases.with_batch.add(key)
                self.watched.add(i)
            for other_key, y in stashed.items():
                if other_key != key and share_memory([x], [y]):
                    aliases.with_skips.setdefault(key, set()).add(other_key)

    def hand_on(
        self,
        j: int,
        tensors: Iterable[Tensor],
    ) -> None:
        """Raise if a partition modified a tensor after passing it on in another micro-batch.

        Raises:
            RuntimeError: It did, such as by returning a buffer that it changes in place.
        """
        if not self._follows:
            return
        handed_on = self._handed_on[j]
        for x in tensors:
            # Subclasses and other layouts do not have their own memory, inference tensors no
            # versions.
            is_plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided
            if not is_plain or x.is_inference():
                continue
            storage = x.untyped_storage()
            place = id(storage), x.storage_offset()
            memory, version = handed_on.get(place, (None, 0))
            # Another memory may have the same `id` after this one is freed.
            if memory is not None and memory() is storage and version != x._version:
                raise RuntimeError(
                    f'partition {j} hands on a tensor that was changed in place since it did so '
                    'for another micro-batch, such as a buffer: the next partition may see the '
                    'change of a later one. Let the layer return a copy: tensor.clone().'
                )
            handed_on[place] = weakref.ref(storage), x._version
