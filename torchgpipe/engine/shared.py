"""Shared tensors: each has one memory, and other devices have a copy for one forward pass.

A parameter or a buffer that stands in partitions in different memories lives in that of the first
one, its home. The others run with a copy in its place, in all of their cells and recomputations::

    home        parameter ──Wait──▶ Tie ──▶ copy stream ┐
                                     └phony             Copy     once in a forward pass
    elsewhere               copy ◀──Wait── copy stream ◀┘
                              ├──▶ cell 0  ├──▶ cell 1  …

In backward, autograd adds up on the device what the cells there give as gradients of the copy, and
takes the sum home, where it adds it to that of the other places. So the parameter is one to
whoever looks at it between cells: the optimizer, hooks, the state dict. The phony goes to the
output of micro-batch 0 at home, so that the device there waits for that sum when it has come back
to its last micro-batch, and not before: all others would wait with it.

[Note: Writes to shared tensors]
A copy is what the parameter or buffer was when the pass began. A change of either would be lost
on the other, so it raises at the end of the pass. In one memory, modules that share a tensor may
not change it either, if several workers run them: each would see the other's changes for some
micro-batches. But a module that itself stands in several partitions may change what it has; these
run in order, see [Note: Order of draws].
"""
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.base.devices import memory_key
from torchgpipe.base.private import versions
from torchgpipe.base.structure import Slot
from torchgpipe.engine.checkpoint.state import entry, substituted
from torchgpipe.engine.partition import Engine, Partition, holder_of, tensor_of
from torchgpipe.engine.streams import AbstractStream, Copy, Wait, current_stream, fork, wait_stream

__all__ = ['SharedTensors']

PutLast = Callable[[int, Tensor], None]


class _Place(NamedTuple):
    """Where a partition has a tensor that an earlier one has, too."""

    slot: Slot
    partition: Partition
    #: The tensor, at home.
    tensor: Tensor
    #: What the partition has in its place, if it is in another memory.
    copy: Tensor | None
    versions: list[int]


class SharedTensors:
    """What partitions share in one forward pass.

    Args:
        engine: The partitions.
        m: Number of micro-batches.
    """

    def __init__(self, engine: Engine, m: int) -> None:
        self._engine = engine
        self._m = m
        self._places: list[_Place] = []
        #: Of each partition, where it has copies.
        self._copied: dict[int, list[tuple[Slot, Tensor]]] = {
            partition.j: [] for partition in engine.partitions
            if engine.several_memories and partition.shared}
        #: Where a layer has put something else in place of a copy.
        self._replaced: list[Slot] = []
        #: Tensors and their copies, by both and the memory of these.
        self._copies: dict[tuple[int, Any], tuple[Tensor, Tensor]] = {}

    def held(self, j: int, lock: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        """Return a context in which a thread has the layers of a partition, and they the copies.

        Args:
            j: The partition.
            lock: The lock of its layers.
        """
        copied = self._copied.get(j)
        return lock if copied is None else _Held(lock, copied, self._replaced)

    def copies(self, j: int) -> dict[Slot, Tensor]:
        """Return the copies that a partition has, by their places."""
        return dict(self._copied.get(j, ()))

    def run(self, put_last: PutLast, function: Callable[[], None]) -> None:
        """Call a function that runs cells.

        Args:
            put_last: Takes a partition and a phony, where backward is to come at its end.
            function: The function.

        Raises:
            RuntimeError: Something was changed: [Note: Writes to shared tensors].
        """
        try:
            self._begin(put_last)
            function()
        finally:
            self._end()
        self._check()

    def _begin(self, put_last: PutLast) -> None:
        """Copy what partitions use and have in another memory."""
        for partition in self._engine.partitions:
            for (slot, is_tied), tensor in zip(partition.shared.items(), _tensors_of(partition)):
                if tensor is None:
                    continue
                if memory_key(tensor.device) != partition.memory:
                    copy = self._copy_for(partition, tensor, put_last)
                    self._copied[partition.j].append((slot, copy))
                    self._places.append(
                        _Place(slot, partition, tensor, copy, versions([tensor, copy])))
                elif is_tied and self._m > 1:
                    self._places.append(
                        _Place(slot, partition, tensor, None, versions([tensor])))

    def _copy_for(self, partition: Partition, tensor: Tensor, put_last: PutLast) -> Tensor:
        key = id(tensor), partition.memory
        if key not in self._copies:
            # Not even in inference mode is it a tensor of that mode, so that changes are noticed.
            with torch.inference_mode(False):
                self._copies[key] = tensor, self._copy(tensor, partition.device, put_last)
        return self._copies[key][1]

    def _copy(self, tensor: Tensor, device: torch.device, put_last: PutLast) -> Tensor:
        home, there = current_stream(tensor.device), current_stream(device)
        leaving, arriving = self._copy_stream(tensor.device), self._copy_stream(device)
        copy, phony = fork(_apply(Wait, home, leaving, tensor))
        if phony.requires_grad:
            self._return_late(tensor.device, phony, put_last)
        return _apply(Wait, arriving, there, _apply(Copy, leaving, arriving, copy))

    def _return_late(self, home: torch.device, phony: Tensor, put_last: PutLast) -> None:
        """Let a device go back through its cells before it waits for a gradient."""
        for partition in self._engine.partitions:
            if partition.departs and partition.memory == memory_key(home):
                put_last(partition.j, phony)
                return

    def _copy_stream(self, device: torch.device) -> AbstractStream:
        """Return a stream that copies no micro-batch in this pass."""
        return self._engine.workers.copy_streams(device, self._m + 1)[-1]

    def _end(self) -> None:
        """Let whoever writes to what was copied come after that."""
        for device in {tensor.device for tensor, _ in self._copies.values()}:
            wait_stream(current_stream(device), self._copy_stream(device))

    def _check(self) -> None:
        now = {slot: tensor for partition in self._engine.partitions
               for slot, tensor in zip(partition.shared, _tensors_of(partition))}
        for place in self._places:
            tensors = [place.tensor] if place.copy is None else [place.tensor, place.copy]
            if (versions(tensors) != place.versions or place.slot in self._replaced
                    or now[place.slot] is not place.tensor):
                raise RuntimeError(_changed(place))


def _tensors_of(partition: Partition) -> list[Tensor | None]:
    """Return what a partition has in places that are shared, when no cell has put copies there."""
    with partition.lock:
        return list(map(tensor_of, partition.shared))


def _apply(function: Any, prev_stream: AbstractStream, next_stream: AbstractStream, tensor: Tensor
           ) -> Tensor:
    """Apply an autograd function of streams to one tensor."""
    result: tuple[Tensor] = function.apply(prev_stream, next_stream, tensor)
    return result[0]


class _Held:
    """The context of :meth:`SharedTensors.held`."""

    __slots__ = ('_copied', '_entered', '_lock', '_replaced')

    def __init__(self, lock: AbstractContextManager[Any], copied: list[tuple[Slot, Tensor]],
                 replaced: list[Slot]) -> None:
        self._lock = lock
        self._copied = copied
        self._replaced = replaced
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            stack.enter_context(substituted([
                entry(holder_of(slot), slot[1], copy) for slot, copy in self._copied]))
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._replaced += [slot for slot, copy in self._copied if tensor_of(slot) is not copy]
        self._entered.pop().__exit__(*error)


def _changed(place: _Place) -> str:
    module, name = place.slot
    partition = place.partition
    prefix = next(prefix for prefix, each in partition.layers.named_modules() if each is module)
    kind = 'parameter' if name in module._parameters else 'buffer'
    what = (f"{kind} '{prefix}.{name}' in partition {partition.j} on {partition.device} is shared "
            'with another partition')
    changed = 'it was changed during the forward pass, by a layer or in another thread'
    if place.copy is None:
        return (f'{what}, and {changed}: for some micro-batches before the other partition used '
                'it and for some after. Put the layers that share it into one partition, or all '
                'partitions on one device.')
    return (f'{what} on another device, and {changed}. It is copied when the pass begins, so the '
            'change would be lost on the other device. Put both on one device, or give each place '
            'a tensor of its own; for batch normalization, use deferred_batch_norm=True.')
