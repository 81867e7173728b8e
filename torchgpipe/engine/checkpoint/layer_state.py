"""The state of layers in a cell's first pass, kept for its recomputation.

A recomputation is exact only if it finds the state of the first pass. The rules are the same on
all devices::

    small buffers, and all that layers were seen to write to      copied when a cell starts
    other attributes that layers were seen to set                 copied when a cell starts
    all other parameters and buffers                              compared by version

Cells without copies share one state, as long as no parameter is written to.

[Note: Tensors compared by version]
An optimizer writes to parameters while the graph is still alive; to copy them would copy the whole
model. So a tensor that no layer was seen to write to must still have the version that it had when
the cell's first pass ended; otherwise backward raises, as autograd does without checkpoints.

Changes by a recomputation must not persist. While it runs, each module therefore has another
dictionary of attributes::

                               first pass of the cell     later     recomputation       afterwards
    module.__dict__            its own                              another             its own
    training                                                        as in first pass
    a buffer that changes      start ─────▶ end           …         a copy of start     as it was
    other attributes           the same at all times
"""
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchgpipe.base.context import context
from torchgpipe.base.private import HOOKS, unseen
from torchgpipe.base.structure import (Memories, Slot, copy_of, is_plain, size_of, storage_id,
                                       versions, view_of)
from torchgpipe.engine.checkpoint.attributes import (OWN, SIMPLE, attributes_of, contents_of,
                                                     copy_of_container)
from torchgpipe.engine.checkpoint.observed import Observed, Watch
from torchgpipe.engine.stream import no_context
from torchgpipe.engine.substitute import Swap, substituted

__all__ = ['CellState', 'Layers', 'run_on', 'with_grad']

T = TypeVar('T')

#: Gives what a recomputation uses, from what is there now and the memories copied for it.
Restore = Callable[[Any, Memories], Any]

Restores = dict[nn.Module, dict[str, Restore]]

#: Buffers of at most so many bytes are copied for every cell.
SMALL = 1 << 16


def _as_it_is(now: Any, memories: Memories) -> Any:
    """Restore what is there now."""
    return now


def _constant(value: Any, now: Any, memories: Memories) -> Any:
    """Restore a value that does not change."""
    return value


def _container(value: Any, now: Any, memories: Memories) -> Any:
    """Restore one of Python's containers."""
    return copy_of_container(value)


def _copied(value: Tensor, requires_grad: bool, now: Any, memories: Memories) -> Tensor:
    """Restore a tensor that the recomputation may write to."""
    copy = copy_of(value, memories)
    if isinstance(now, nn.Parameter):
        return nn.Parameter(copy, requires_grad)
    return copy.requires_grad_(requires_grad)


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
        #: With their modes.
        self.trainings = [(module, module.training) for module in modules]
        #: The parameters of each module in this forward pass, and whether they require grad.
        #: Afterwards `torch.func.functional_call` takes back what it gave, and others are frozen.
        self.own = {module: {name: (parameter, parameter.requires_grad)
                             for name, parameter in module._parameters.items()
                             if parameter is not None}
                    for module in modules}
        #: The state of cells of which nothing is copied, as long as any of them has it.
        self._same: Callable[[], CellState | None] = _gone
        #: The hooks of modules when a first cell has ended.
        self.hooks: dict[nn.Module, dict[str, Any]] = {}

    def find(self, watch: Watch | None) -> 'CellState':
        """Return the layers as a cell finds them now.

        Args:
            watch: What watches this cell, if it is the first one in its mode.
        """
        # A layer may have added some.
        buffered = [module for module in self.modules if module._buffers]
        same = self._same()
        if same is not None and watch is None and not buffered:
            return same
        state = CellState(self, watch is not None)
        mutated = self.observed.mutated if watch is None else self.modules
        if not (state.parameters or buffered or mutated):
            self._same = weakref.ref(state)
        else:
            state.keep(buffered, mutated)
            context.asked = False
        state.versions = versions(state.told)
        return state

    def end(self, state: 'CellState', watch: Watch | None) -> 'CellState':
        """Look what the first pass has changed, and return the state with that."""
        if not self.hooks:  # as of now, since a hook may remove itself
            # Not dicts, as the handle of a hook refers to what holds it weakly.
            self.hooks = {module: {name: module.__dict__[name].copy() for name in HOOKS}
                          for module in self.modules}
        after = versions(state.told)
        if watch is None and after == state.versions:
            return state
        if state is self._same():
            self._same, before = _gone, state.versions
            state = CellState(self)
            state.versions = before
        state.end_told(after, {} if watch is None else watch.copies)
        if watch is not None:
            observed = self.observed
            observed.watched = True
            observed.asks_phase |= context.asked
            observed.mutated |= set() if observed.asks_phase else watch.mutated()
            state.attributes = {module: restores for module, restores in state.attributes.items()
                                if module in observed.mutated}
            with unseen():
                observed.written.update(state.written())
        return state


def _gone() -> None:
    """Answer as a dead weak reference does."""


class CellState:
    """The layers of a partition as a cell finds them.

    Args:
        layers: The layers.
        is_first: Whether nothing is known of them yet.
    """

    __slots__ = ('__weakref__', '_is_first', '_memories', 'attributes', 'buffers', 'layers',
                 'lost', 'parameters', 'places', 'told', 'versions')

    def __init__(self, layers: Layers, is_first: bool = False) -> None:
        self.layers = layers
        self._is_first = is_first
        #: Tensors compared by version, where they are, and these versions.
        self.told: list[Tensor] = []
        self.places: list[Slot] = []
        self.versions: list[int] = []
        #: What was written to, and has to be known.
        self.lost: Slot | None = None
        #: How to restore parameters, buffers and other attributes, by module and name.
        self.parameters: Restores = {}
        self.buffers: Restores = {}
        self.attributes: Restores = {}
        self._memories: Memories = {}
        written = layers.observed.written
        for module, own in layers.own.items():
            for name, (x, _) in own.items():
                slot = module, name
                # A kernel may write to a frozen one, as to statistics, and not say so.
                if slot in written or (is_first and not x.requires_grad and size_of(x) <= SMALL):
                    self.parameters.setdefault(module, {})[name] = self._copy(x)
                else:
                    self._tell(slot, x)

    def keep(self, buffered: Iterable[nn.Module], mutated: Iterable[nn.Module]) -> None:
        """Keep the buffers of some modules, and other attributes of some."""
        for module in buffered:
            self.buffers[module] = {name: self._keep_buffer((module, name), buffer)
                                    for name, buffer in module._buffers.items()}
        for module in mutated:
            self.attributes[module] = {name: self._keep_attribute(name, value)
                                       for name, value in attributes_of(module).items()}
        self._memories = {}

    def _tell(self, slot: Slot, x: Tensor) -> None:
        self.places.append(slot)
        self.told.append(x)

    def _copy(self, x: Tensor) -> Restore:
        with unseen():
            return partial(_copied, copy_of(x, self._memories), x.requires_grad)

    def _keep_buffer(self, slot: Slot, buffer: Tensor | None) -> Restore:
        if buffer is None:
            return partial(_constant, None)
        # One that carries a graph must not be kept alive.
        if self._is_first or buffer.requires_grad or size_of(buffer) <= SMALL \
                or slot in self.layers.observed.written:
            return self._copy(buffer)
        self._tell(slot, buffer)
        return partial(_constant, buffer)

    def _keep_attribute(self, name: str, value: Any) -> Restore:
        if isinstance(value, Tensor):
            return self._copy(value)
        if contents_of(name, value) is not None:
            return partial(_container, copy_of_container(value))
        return partial(_constant, value) if isinstance(value, SIMPLE) else _as_it_is

    def end_told(self, after: list[int], copies: Memories) -> None:
        """Restore from a copy what was written to after all, if one was made before."""
        told = [*zip(self.places, self.told, self.versions, after)]
        self.places, self.told = [], []
        for slot, tensor, version, now in told:
            copy = copies.get(storage_id(tensor)) if is_plain(tensor) else None
            if copy is None and version == now:
                self._tell(slot, tensor)
                continue
            self.layers.observed.written.add(slot)
            if copy is None:
                self.lost = slot
            else:
                where = self.buffers if slot[1] in slot[0]._buffers else self.parameters
                where.setdefault(slot[0], {})[slot[1]] = partial(
                    _copied, view_of(copy, tensor), tensor.requires_grad)
        self.versions = versions(self.told)

    def written(self) -> list[Slot]:
        """Return the tensors that the first cell wrote to, and buffers that it replaced or made.
        """
        found = [(module, name) for module in self.layers.modules
                 for name, buffer in module._buffers.items()
                 if _is_other(self.buffers.get(module, {}).get(name, _as_it_is), buffer)]
        return found + [(module, name) for module, restores in self.parameters.items()
                        for name, restore in restores.items()
                        if _is_other(restore, module._parameters.get(name))]


def _is_other(restore: Restore, now: Tensor | None) -> bool:
    """Return whether a tensor has another value now than a copy that was kept of it."""
    if not isinstance(restore, partial):
        return True
    before = restore.args[0]
    if before is None or now is None or not is_plain(now) or not is_plain(before):
        return now is not before
    return before.shape != now.shape or before.dtype != now.dtype or not torch.equal(before, now)


def with_grad(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Return a tensor that requires grad or not, over the same memory."""
    if tensor.requires_grad is requires_grad:
        return tensor
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), requires_grad)
    return tensor.detach().requires_grad_(requires_grad)


# --- a recomputation
# ----------------------------------------------------------------------------------


#: Sets an attribute of a module without the checks of `nn.Module`.
assign = object.__setattr__


def run_on(state: CellState, function: Callable[[], T]) -> T:
    """Run a recomputation with the state that the first pass found."""
    layers = state.layers
    with layers.lock:
        if state.lost is not None or versions(state.told) != state.versions:
            _raise_changed(state)
        memories: Memories = {}
        with unseen() if state.parameters or state.buffers or state.attributes else no_context:
            found = [(module, module.__dict__, _attributes_for(state, module, training, memories))
                     for module, training in layers.trainings]
            swaps = [Swap(partial(assign, module, '__dict__', attributes),
                          partial(assign, module, '__dict__', own))
                     for module, own, attributes in found]
        with substituted(swaps):
            try:
                return function()
            finally:
                if layers.observed.asks_phase:
                    # Layers that ask for the pass keep the attributes that they set.
                    for _, own, attributes in found:
                        own.update((name, value) for name, value in attributes.items()
                                   if name not in OWN)


def _raise_changed(state: CellState) -> None:
    if state.lost is not None:
        raise RuntimeError(
            f'{_name(state.layers, state.lost)} was written to by its layer in a checkpointed '
            'micro-batch, as was never seen before in this mode, so its value from before is '
            'not there for the recomputation. Call the model again: from now on it is kept.')
    slot, expected, version = next(
        (slot, before, after) for slot, before, after
        in zip(state.places, state.versions, versions(state.told)) if before != after)
    raise RuntimeError(
        f'{_name(state.layers, slot)} has been modified by an inplace operation between forward '
        f'and backward (it is at version {version}; expected version {expected}), so a '
        'checkpointed micro-batch cannot be recomputed. Call backward before the '
        "optimizer's step, or use checkpoint='never'.")


def _name(layers: Layers, slot: Slot) -> str:
    """Name a parameter or a buffer."""
    prefix = next(name for name, module in layers.modules[0].named_modules() if module is slot[0])
    kind = 'parameter' if slot[1] in slot[0]._parameters else 'buffer'
    return f"{kind} '{prefix}.{slot[1]}'"


def _attributes_for(state: CellState, module: nn.Module, training: bool, memories: Memories
                    ) -> dict[str, Any]:
    """Return the attributes of a module for a recomputation."""
    now = module.__dict__
    mutated = state.attributes.get(module)
    attributes = {**now} if mutated is None else _restored(mutated, now, memories)
    attributes['training'] = training
    attributes.update(state.layers.hooks[module])
    attributes['_parameters'] = parameters = {**now['_parameters']}
    for name, (parameter, requires_grad) in state.layers.own[module].items():
        parameters[name] = parameter if parameter.requires_grad is requires_grad \
            else with_grad(parameter, requires_grad)
    if module in state.parameters:
        parameters.update(_restored(state.parameters[module], parameters, memories))
    buffers = state.buffers.get(module)
    attributes['_buffers'] = {} if buffers is None else _restored(
        buffers, now['_buffers'], memories)
    return attributes


def _restored(restores: dict[str, Restore], now: dict[str, Any], memories: Memories
              ) -> dict[str, Any]:
    return {name: restore(now.get(name), memories) for name, restore in restores.items()}
