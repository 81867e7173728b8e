"""Shared tensors: each has one memory, and other devices have a copy for one forward pass.

A parameter or a buffer may be in partitions in different memories. It lives in the memory of the
first partition, its home. The other partitions run with a copy in its place, in all of their cells
and recomputations (rule 10)::

    home        parameter ──Wait──▶ Tie ──▶ copy stream ┐
                                     └phony             Copy     once in a forward pass
    elsewhere               copy ◀──Wait── copy stream ◀┘
                              ├──▶ cell 0  ├──▶ cell 1  …

In backward, autograd sums the gradients of a copy on its device. It copies the sum home and adds
it to the gradient there. So the optimizer, hooks and the state dict see one parameter. The phony
goes to the output of micro-batch 0 at home, which comes last in backward. Therefore the home
device waits for the sum only then; earlier, all other micro-batches would wait as well.

[Note: Writes to shared tensors]
A copy has the value of the parameter or buffer at the start of the pass. A change of either would
be lost on the other, so it raises at the end of the pass. Modules that share a tensor in one
memory may not change it either, if several workers run them. Each module would see the other's
changes for some micro-batches only. But a module that is itself in several partitions may change
its tensors, because these partitions run in order: see [Note: Order of draws].
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.base.devices import memory_key
from torchgpipe.base.locks import Lock
from torchgpipe.base.private import versions
from torchgpipe.base.structure import Slot
from torchgpipe.engine.backward_order import Copy, Wait, fork
from torchgpipe.engine.checkpoint.swaps import entry, substituted
from torchgpipe.engine.partition import Engine, Partition, holder_of, tensor_of
from torchgpipe.engine.streams import AbstractStream, current_stream, wait_stream

PutLast = Callable[[int, Tensor], None]


class _Place(NamedTuple):
    """The slot of a tensor that an earlier partition also has."""

    slot: Slot
    partition: Partition
    #: The tensor, at home; and its copy, if the partition is in another memory.
    tensors: list[Tensor]
    versions: list[int]


class SharedTensors:
    """The tensors that partitions share in one forward pass."""

    def __init__(self, engine: Engine, m: int) -> None:
        self._engine = engine
        self._m = m
        self._places: list[_Place] = []
        #: By partition, the slots with copies, and the copies.
        self._copied: dict[int, list[tuple[Slot, Tensor]]] = {}
        for partition in engine.partitions:
            if engine.several_memories and partition.shared:
                self._copied[partition.j] = []
        #: The slots in which a layer has replaced a copy.
        self._replaced: list[Slot] = []
        #: Tensors and their copies, by the tensor's ``id`` and the copy's memory.
        self._copies: dict[tuple[int, Any], tuple[Tensor, Tensor]] = {}

    def held(self, j: int, lock: Lock) -> Lock:
        """Return a context that holds the layers of a partition, with copies in their places."""
        if j not in self._copied:
            return lock
        return _Held(lock, self._copied[j], self._replaced)

    def copies(self, j: int) -> dict[Slot, Tensor]:
        """Return the copies of a partition by slot."""
        return dict(self._copied.get(j, ()))

    def run(
        self,
        put_last: PutLast,
        function: Callable[[], None],
    ) -> None:
        """Call a function that runs cells.

        Backward reaches a phony last if ``put_last`` was called with its partition and the phony.

        Raises:
            RuntimeError: A shared tensor was changed: [Note: Writes to shared tensors].
        """
        try:
            self._begin(put_last)
            function()
        finally:
            self._end()
        self._check()

    def _begin(self, put_last: PutLast) -> None:
        """Copy the tensors that partitions use from another memory."""
        for partition in self._engine.partitions:
            tensors_of_slots = _tensors_of(partition)
            for (slot, is_tied), tensor in zip(partition.shared.items(), tensors_of_slots):
                if tensor is None:
                    continue
                tensors = [tensor]
                if memory_key(tensor.device) != partition.memory:
                    copy = self._copy_for(partition, tensor, put_last)
                    self._copied[partition.j].append((slot, copy))
                    tensors.append(copy)
                elif not is_tied or self._m == 1:
                    continue  # No cell could see a change in the middle of the pass.
                self._places.append(_Place(slot, partition, tensors, versions(tensors)))

    def _copy_for(
        self,
        partition: Partition,
        tensor: Tensor,
        put_last: PutLast,
    ) -> Tensor:
        # Rule 10: A tensor that partitions share has one memory. Other memories have a copy of it
        # during one forward pass.
        key = id(tensor), partition.memory
        if key not in self._copies:
            # Not an inference tensor even in inference mode, so that changes are detected.
            with torch.inference_mode(False):
                copy = self._copy(tensor, partition.device, put_last)
            self._copies[key] = tensor, copy
        return self._copies[key][1]

    def _copy(
        self,
        tensor: Tensor,
        device: torch.device,
        put_last: PutLast,
    ) -> Tensor:
        home = current_stream(tensor.device)
        target = current_stream(device)
        leaving = self._copy_stream(tensor.device)
        arriving = self._copy_stream(device)
        # The waits are nodes of the graph, so backward waits as well, in the opposite direction.
        source, phony = fork(_apply(Wait, home, leaving, tensor))
        if phony.requires_grad:
            self._return_late(tensor.device, phony, put_last)
        copy = _apply(Copy, leaving, arriving, source)
        return _apply(Wait, arriving, target, copy)

    def _return_late(
        self,
        home: torch.device,
        phony: Tensor,
        put_last: PutLast,
    ) -> None:
        """Make a device run backward through its cells before it waits for a gradient."""
        for partition in self._engine.partitions:
            if partition.departs and partition.memory == memory_key(home):
                put_last(partition.j, phony)
                return

    def _copy_stream(self, device: torch.device) -> AbstractStream:
        """Return a stream that copies no micro-batch in this pass."""
        return self._engine.workers.copy_streams(device, self._m + 1)[-1]

    def _end(self) -> None:
        """Make later writes to copied tensors wait for the copies."""
        for device in {tensor.device for tensor, _ in self._copies.values()}:
            wait_stream(current_stream(device), self._copy_stream(device))

    def _check(self) -> None:
        present: dict[Slot, Tensor | None] = {}
        for partition in self._engine.partitions:
            present.update(zip(partition.shared, _tensors_of(partition)))
        for place in self._places:
            # A layer may assign another tensor to the slot instead of changing this one.
            is_replaced = (
                place.slot in self._replaced or present[place.slot] is not place.tensors[0]
            )
            if is_replaced or versions(place.tensors) != place.versions:
                raise RuntimeError(_changed(place))


def _tensors_of(partition: Partition) -> list[Tensor | None]:
    """Return the tensors in a partition's shared slots, while no cell has put copies there."""
    with partition.lock:
        return list(map(tensor_of, partition.shared))


def _apply(
    function: Any,
    prev_stream: AbstractStream,
    next_stream: AbstractStream,
    tensor: Tensor,
) -> Tensor:
    """Apply an autograd function of streams to one tensor."""
    result: tuple[Tensor] = function.apply(prev_stream, next_stream, tensor)
    return result[0]


@dataclass(eq=False)
class _Held:
    """The context of :meth:`SharedTensors.held`."""

    _lock: Lock
    _copied: list[tuple[Slot, Tensor]]
    _replaced: list[Slot]
    # A list, because a cell may run within another one of the same thread.
    _entered: list[ExitStack] = field(default_factory=list)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            swaps = []
            for slot, copy in self._copied:
                swaps.append(entry(holder_of(slot), slot[1], copy))
            stack.enter_context(substituted(swaps))
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        for slot, copy in self._copied:
            if tensor_of(slot) is not copy:
                self._replaced.append(slot)
        self._entered.pop().__exit__(*error)


def _changed(place: _Place) -> str:
    module, name = place.slot
    partition = place.partition
    names = {child: name for name, child in partition.layers.named_modules()}
    kind = 'parameter' if name in module._parameters else 'buffer'
    what = (
        f"{kind} '{names[module]}.{name}' in partition {partition.j} on {partition.device} is "
        'shared with another partition'
    )
    changed = 'it was changed during the forward pass, by a layer or in another thread'
    if len(place.tensors) == 1:
        return (
            f'{what}, and {changed}: for some micro-batches before the other partition used '
            'it and for some after. Put the layers that share it into one partition, or all '
            'partitions on one device.'
        )
    return (
        f'{what} on another device, and {changed}. It is copied when the pass begins, so the '
        'change would be lost on the other device. Put both on one device, or give each place '
        'a tensor of its own; for batch normalization, use deferred_batch_norm=True.'
    )
