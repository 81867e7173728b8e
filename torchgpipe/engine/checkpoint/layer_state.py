"""The state of layers in a cell's first pass, kept for its recomputation.

A recomputation is exact only if it finds what the first pass found. Buffers and frozen parameters
are kept as they were at the start: [Note: Copy on write].
Other attributes are kept where the layers were seen to set them. Cells of which nothing has to be
kept share one state, as long as nobody writes to a parameter.

[Note: Tensors compared by version]
An optimizer writes to trainable parameters while the graph is still alive; to copy these on write
would copy the whole model. So they are copied only where a layer was seen to write to them, as an
embedding with a largest norm does. All others must still have the version that they had when the
cell's first pass ended; otherwise backward raises, as autograd does without checkpoints. On other
devices than the CPU, the same goes for large buffers and for frozen parameters.
"""
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from torchgpipe.context import context
from torchgpipe.engine.checkpoint.attributes import (SIMPLE, attributes_of, contents_of,
                                                     copy_of_container)
from torchgpipe.engine.checkpoint.observed import Observed, Watch
from torchgpipe.engine.checkpoint.snapshot import (Memories, Snapshot, copy_of, copy_on_write,
                                                   is_plain, view_of)
from torchgpipe.engine.memory import size_of, storage_id, versions
from torchgpipe.private import HOOKS, unseen
from torchgpipe.structure import Slot

__all__ = ['CellState', 'Layers', 'Restore']

#: Where a tensor is, and the tensor.
SlotTensor = tuple[Slot, Tensor]

#: Gives what a recomputation uses, from what is there now and the memories copied for it.
Restore = Callable[[Any, Memories], Any]

Restores = dict[nn.Module, dict[str, Restore]]

#: Buffers of at most so many bytes are copied for every cell where copies can't be made on write.
SMALL = 1 << 16


def _now(now: Any, memories: Memories) -> Any:
    """Restore what is there now."""
    return now


def _nothing(now: Any, memories: Memories) -> None:
    """Restore an empty place."""


def _copy_of_now(now: Any, memories: Memories) -> Any:
    """Restore a buffer that a lazy layer had not made yet, so that the copy is written to."""
    return None if now is None else copy_of(now, memories)


class Layers:
    """The layers of a partition, as the checkpointed cells of one forward pass find them all.

    It is made in the first of these, when modules have what that computes with.

    Args:
        modules: The partition, and all modules within.
        observed: What they were seen to do so far in their modes.
        lock: Held by whoever gives them other attributes.
    """

    def __init__(self, modules: Sequence[nn.Module], observed: Observed,
                 lock: AbstractContextManager[Any]) -> None:
        self.modules = modules
        self.observed = observed
        self.lock = lock
        #: Those of TorchScript, whose attributes are not Python's, and all others; their modes.
        self.scripts, self.plain = (
            [(module, module.training) for module in modules
             if isinstance(module, ScriptModule) is scripted] for scripted in (True, False))
        #: The parameters of each module in this forward pass, and whether they require grad.
        #: Afterwards `torch.func.functional_call` takes back what it gave, and others are frozen.
        self.own = {module: {name: (parameter, parameter.requires_grad)
                             for name, parameter in module._parameters.items()
                             if parameter is not None and not is_lazy(parameter)}
                    for module in modules}
        self._split: tuple[int, list[SlotTensor], list[SlotTensor]] = -1, [], []
        #: The values that cells keep.
        self._kept: dict[Slot, Snapshot] = {}
        #: The state of cells of which nothing is kept, as long as any of them has it.
        self._same: weakref.ref[CellState] | None = None
        #: The hooks of modules when a first cell has ended.
        self.hooks: dict[nn.Module, dict[str, Any]] = {}

    def _parameters(self) -> tuple[list[SlotTensor], list[SlotTensor]]:
        """Return the parameters that are kept, and those that are told by their version."""
        written = self.observed.written
        if self._split[0] != len(written):
            kept: list[SlotTensor] = []
            told: list[SlotTensor] = []
            for module, own in self.own.items():
                for name, (x, _) in own.items():
                    slot = module, name
                    (told if x.requires_grad and slot not in written else kept).append((slot, x))
            self._split = len(written), kept, told
        return self._split[1:]

    def find(self, watch: Watch | None) -> 'CellState':
        """Return the layers as a cell finds them now.

        Args:
            watch: What watches this cell, if it is the first one in its mode.
        """
        kept, told = self._parameters()
        mutated = self.observed.mutated if watch is None else self.modules
        buffered = [module for module in self.modules if module._buffers]
        now = versions([x for _, x in told])
        if not (kept or buffered or mutated):
            same = None if self._same is None else self._same()
            if same is None or same.versions != now:
                same = CellState(self, told, now)
                self._same = weakref.ref(same)
            return same
        state = CellState(self, told, now)
        with unseen():
            for slot, tensor in kept:
                _put(state.parameters, slot, state.keep(slot, tensor))
            for module in buffered:
                state.buffers[module] = {
                    name: state.keep_buffer((module, name), buffer, watch is not None)
                    for name, buffer in module._buffers.items()}
            for module in mutated:
                state.attributes[module] = {
                    name: state.keep_attribute((module, name), value)
                    for name, value in attributes_of(module).items()}
        state.end_find()
        context.asked = False
        return state

    def end(self, state: 'CellState', watch: Watch | None) -> 'CellState':
        """Look what the first pass has changed, and return the state with that."""
        if not self.hooks:  # as of now, since a hook may remove itself
            # Not dicts, as the handle of a hook refers to what holds it weakly.
            self.hooks = {module: {name: module.__dict__[name].copy() for name in HOOKS}
                          for module, _ in self.plain}
        after = versions([x for _, x in state.told])
        if watch is None and after == state.versions:
            return state
        if self._same and state is self._same():
            self._same, state = None, CellState(self, state.told, state.versions)
        state.end_told(after, {} if watch is None else watch.copies)
        if watch is not None:
            observed = self.observed
            observed.watched = True
            observed.asks_phase |= context.asked
            observed.mutated |= set() if observed.asks_phase else watch.mutated()
            state.attributes = {module: restores for module, restores in state.attributes.items()
                                if module in observed.mutated}
            observed.written.update(self._written(state))
        return state

    def _written(self, state: 'CellState') -> Iterator[Slot]:
        """Yield the buffers that the first cell wrote to, or made."""
        for slot, kept in self._kept.items():
            if kept.was_written(getattr(*slot, None)):
                yield slot
        for module in self.modules:
            found = state.buffers.get(module, {})
            for name, _ in module._buffers.items():
                if found.get(name, _copy_of_now) is _copy_of_now:
                    yield module, name

    def keep(self, slot: Slot, tensor: Tensor, memories: Memories, at_once: bool
             ) -> Snapshot | None:
        """Keep the value of a tensor; cells that find the same value share a copy.

        Args:
            slot: Where it is.
            tensor: The tensor.
            memories: Copies that were made for this cell.
            at_once: Whether to copy it even if that can't be on write.
        """
        kept = self._kept.get(slot)
        if kept is None or not kept.is_still(tensor):
            at_once = at_once or size_of(tensor) <= SMALL or slot in self.observed.written
            value = (copy_of if at_once else copy_on_write)(tensor, memories)
            if value is None:
                return None
            kept = self._kept[slot] = Snapshot(tensor, value)
        return kept


class CellState:
    """The layers of a partition as a cell finds them.

    Args:
        layers: The layers.
        told: Tensors compared by version.
        versions: These versions.
    """

    __slots__ = ('__weakref__', '_memories', 'attributes', 'buffers', 'layers', 'lost',
                 'parameters', 'told', 'versions')

    def __init__(self, layers: Layers, told: list[SlotTensor], versions: list[int]) -> None:
        self.layers = layers
        self.told = told
        self.versions = versions
        #: What was written to, and has to be known.
        self.lost: Slot | None = None
        #: How to restore parameters, buffers and other attributes, by module and name.
        self.parameters: Restores = {}
        self.buffers: Restores = {}
        self.attributes: Restores = {}
        self._memories: Memories = {}

    def keep(self, slot: Slot, tensor: Tensor, at_once: bool = False) -> Restore:
        """Keep a tensor."""
        kept = self.layers.keep(slot, tensor, self._memories, at_once)
        if kept is not None:
            return kept.restored
        self.told = [*self.told, (slot, tensor)]
        return _now

    def keep_buffer(self, slot: Slot, buffer: Tensor | None, is_first: bool) -> Restore:
        """Keep a buffer."""
        if buffer is None:
            return _nothing
        if is_lazy(buffer):
            return _copy_of_now
        # Nothing is known yet of those in the first cell; and one that carries a graph must not be
        # kept alive.
        return self.keep(slot, buffer, is_first or buffer.requires_grad)

    def keep_attribute(self, slot: Slot, value: Any) -> Restore:
        """Keep another attribute."""
        if isinstance(value, Tensor):
            return self.keep(slot, value, at_once=True)
        if contents_of(slot[1], value) is not None:
            kept = copy_of_container(value)
            return lambda now, memories: copy_of_container(kept)
        return (lambda now, memories: value) if isinstance(value, SIMPLE) else _now

    def end_find(self) -> None:
        """Take note that all is kept."""
        self._memories = {}
        self.versions = versions([x for _, x in self.told])

    def end_told(self, after: list[int], copies: Memories) -> None:
        """Restore from a copy what was written to after all, if one was made before."""
        told = []
        for (slot, tensor), version, now in zip(self.told, self.versions, after):
            copy = copies.get(storage_id(tensor)) if is_plain(tensor) else None
            if copy is None and version == now:
                told.append((slot, tensor))
                continue
            self.layers.observed.written.add(slot)
            if copy is None:
                self.lost = slot
            else:
                where = self.buffers if slot[1] in slot[0]._buffers else self.parameters
                _put(where, slot, Snapshot(tensor, view_of(copy, tensor)).restored)
        self.told, self.versions = told, versions([x for _, x in told])


def _put(restores: Restores, slot: Slot, restore: Restore) -> None:
    restores.setdefault(slot[0], {})[slot[1]] = restore
