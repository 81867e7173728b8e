"""State of layers: observed and kept in a cell's first pass, restored for its recomputation.

A recomputation is exact only if it finds the state of the first pass. :class:`CellState` keeps
this state, by the same rules on all devices::

    small buffers, and all that layers were seen to write to      copied when a cell starts
    other attributes that layers were seen to set                 copied when a cell starts
    all other parameters and buffers                              compared by version

Cells without copies share one state, as long as no parameter is written to. Attributes are kept if
they are simple values such as numbers, tensors, or Python's containers of any nesting. Other
objects in a container are kept as items, but not their state.

A module does not show which tensors its forward will write to. So a dispatch mode,
:class:`LayerRecorder`, watches the first cell of a partition in each mode, and :class:`Observed`
keeps the results. Later cells only save the generators that these layers use, and copy the tensors
that they write to.

[Note: Tensors compared by version]
An optimizer writes to parameters while the graph is still alive. Copies of them would copy the
whole model. So a tensor that no layer was seen to write to is compared by version. If the version
has changed since the cell's first pass, backward raises, as autograd does without checkpoints
(rule 9).

Changes by a recomputation must not persist. So in :func:`run_on`, each module has another
dictionary of attributes::

                               first pass of the cell     later     recomputation       afterwards
    module.__dict__            its own                              another             its own
    training                                                        as in first pass
    a buffer that changes      start ─────▶ end           …         a copy of start     as it was
    other attributes           the same at all times
"""
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchgpipe.base.context import context
from torchgpipe.base.private import HOOKS, FakeTensor, generator_key, unseen, versions
from torchgpipe.base.structure import (Memories, Slot, copy_of, is_plain, size_of, storage_id,
                                       view_of)
from torchgpipe.engine.checkpoint.random import Recorder, operation_of
from torchgpipe.engine.checkpoint.swaps import Swap, substituted
from torchgpipe.engine.streams import no_context

#: Attributes of a module that are handled separately.
OWN = ('_buffers', '_parameters', 'training')

#: Types of values that are restored unchanged.
SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (list, set, deque, *_MAPPINGS)

#: Values by their names.
Attributes = dict[str, Any]

# Attributes of every module, such as hooks and children, which the user may change.
_EVERY = frozenset(vars(nn.Module()))


def attributes_of(module: nn.Module) -> Attributes:
    """Return the attributes of a module except its parameters, buffers and training flag."""
    return {name: value for name, value in module.__dict__.items() if name not in OWN}


def contents_of(name: str, value: Any) -> list[Any] | None:
    """Return the items of a container; ``None`` for other values."""
    if name in _EVERY:
        return None
    if type(value) not in _CONTAINERS:
        return None
    found: list[Any] = []
    _copy(value, {}, found)
    return found


def copy_of_container(value: Any) -> Any:
    """Copy a container and the containers in it, but not their other items."""
    return _copy(value, {}, [])


def _copy(value: Any, copies: dict[int, Any], found: list[Any]) -> Any:
    """Copy each container once, and append all items to a list."""
    if id(value) in copies:
        return copies[id(value)]
    copy = copies[id(value)] = value.copy()
    items = value.items() if type(value) in _MAPPINGS else enumerate(value)
    for key, item in items:
        found += key, item
        if type(item) in _CONTAINERS:
            copy[key] = _copy(item, copies, found)
    return copy


def may_be_mutated(before: Attributes, contents: Attributes, after: Attributes) -> bool:
    """Return whether attributes have changed, or may change in a way that cannot be detected.

    Args:
        before: The previous attributes.
        contents: The previous items of containers among them.
        after: The present attributes.
    """
    if before.keys() != after.keys():
        return True
    return any(isinstance(value, Tensor) or after[name] is not value
               or not are_same(contents.get(name), contents_of(name, value))
               for name, value in before.items())


def state_of(module: nn.Module) -> list[Any]:
    """Return a module's tensors and attributes, with versions, to compare by :func:`are_same`."""
    values = attributes_of(module)
    found = [*module._parameters.values(), *module._buffers.values(), *values.values()]
    found += [x for name, value in values.items() for x in contents_of(name, value) or ()]
    return [*found, *versions([x for x in found if isinstance(x, Tensor)])]


def are_same(a: list[Any] | None, b: list[Any] | None) -> bool:
    """Return whether two lists contain identical objects."""
    if a is None or b is None:
        return a is b
    # Indices are new objects each time.
    return len(a) == len(b) and all(x is y or (type(x) is int and x == y) for x, y in zip(a, b))


# Observations of the first cell.


class Observed:
    """Observations of layers in one mode, which is given by the training flags of all modules."""

    def __init__(self) -> None:
        #: Whether they draw from a generator that other threads may use; ``None`` if not known
        #: yet.
        self.draws: bool | None = None
        #: Whether a checkpointed cell was watched. Others show only whether they draw.
        self.watched = False
        #: The layers' own generators, by keys.
        self.generators: dict[int, torch.Generator] = {}
        #: Parameters and buffers that they write to.
        self.written: set[Slot] = set()
        #: Modules with other attributes that they set, or that are tensors.
        self.mutated: set[nn.Module] = set()
        #: Whether they ask for the pass, and so handle their attributes themselves.
        self.asks_phase = False
        self._false_alarms = 0

    def learn(self, recorder: Recorder) -> None:
        """Add the observations of a recorder."""
        self.draws = bool(self.draws or recorder.draws)
        self.generators.update(recorder.generators)

    def watch_draws(self) -> None:
        """Record a draw during these layers, which were seen not to draw.

        They are watched again, but less and less often, because another thread may have drawn.
        """
        if self.draws is False:
            self._false_alarms += 1
            if self._false_alarms & (self._false_alarms - 1) == 0:  # a power of two
                self.draws = None

    def watch_again(self) -> None:
        """Watch the next cell, as the first one."""
        self.draws = None
        self.watched = False


class LayerRecorder(Recorder):
    """A recorder that also detects changes of a cell's layers.

    It copies parameters and buffers before the first write to them.

    Args:
        modules: The layers, and all modules within.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.copies: Memories = {}
        self._found = {module: attributes_of(module) for module in modules}
        self._contents = {
            module: {name: contents for name, value in found.items()
                     if (contents := contents_of(name, value)) is not None}
            for module, found in self._found.items()}
        self._watched = {storage_id(x) for module in self._found
                         for x in (*module._parameters.values(), *module._buffers.values())
                         if x is not None and is_plain(x)}
        values = [value for found in self._found.values() for value in found.values()]
        values += [value for found in self._contents.values() for contents in found.values()
                   for value in contents]
        self.generators = {generator_key(value): value for value in values
                           if isinstance(value, torch.Generator)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in operation_of(func).written_by(args, kwargs or {}):
            if is_plain(x) and storage_id(x) in self._watched:
                with unseen():
                    copy_of(x, self.copies)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def mutated(self) -> set[nn.Module]:
        """Return the modules whose attributes have changed, or are tensors."""
        return {module for module, found in self._found.items()
                if may_be_mutated(found, self._contents[module], attributes_of(module))}


T = TypeVar('T')

# The state at the start of a cell.

#: Returns the value for a recomputation, from the present value and the memories copied so far.
Restore = Callable[[Any, Memories], Any]

Restores = dict[nn.Module, dict[str, Restore]]

#: Buffers of at most this number of bytes are copied for every cell.
SMALL = 1 << 16


def _as_it_is(now: Any, memories: Memories) -> Any:
    """Return the present value."""
    return now


def _constant(value: Any, now: Any, memories: Memories) -> Any:
    """Return a value that does not change."""
    return value


def _container(value: Any, now: Any, memories: Memories) -> Any:
    """Return a copy of a Python container."""
    return copy_of_container(value)


def _copied(value: Tensor, requires_grad: bool, now: Any, memories: Memories) -> Tensor:
    """Return a copy of a tensor, which the recomputation may write to."""
    copy = copy_of(value, memories)
    if isinstance(now, nn.Parameter):
        return _parameter_like(now, copy, requires_grad)
    return copy.requires_grad_(requires_grad)


def _parameter_like(parameter: nn.Parameter, data: Tensor, requires_grad: bool) -> nn.Parameter:
    """Return a parameter with other data; a leaf of a step whose gradient may be deferred too."""
    kind = type(parameter)
    if not is_plain(parameter) or not issubclass(kind, nn.Parameter):
        kind = nn.Parameter
    copy = kind(data, requires_grad)
    copy.__dict__.update(parameter.__dict__)
    return copy


class Layers:
    """The common state of a partition's layers in all checkpointed cells of one forward pass.

    It is made in the first of these cells, when modules have the parameters of the pass.

    Args:
        modules: The partition, and all modules within.
        observed: The observations of the layers so far in their modes.
        lock: Held while the modules have other attributes.
    """

    def __init__(self, modules: Sequence[nn.Module], observed: Observed,
                 lock: AbstractContextManager[Any]) -> None:
        self.modules = modules
        self.observed = observed
        self.lock = lock
        #: The modules and their training flags.
        self.trainings = [(module, module.training) for module in modules]
        #: The parameters of each module in this forward pass, and whether they require grad.
        #: Later, `torch.func.functional_call` removes its parameters, and others may be frozen.
        self.own = {module: {name: (parameter, parameter.requires_grad)
                             for name, parameter in module._parameters.items()
                             if parameter is not None}
                    for module in modules}
        #: The common state of cells without copies, as long as any of them has it.
        self._same: Callable[[], CellState | None] = _gone
        #: The hooks of modules at the end of the first cell.
        self.hooks: dict[nn.Module, dict[str, Any]] = {}

    def find(self, watch: LayerRecorder | None) -> 'CellState':
        """Return the present state of the layers, at the start of a cell.

        Args:
            watch: The watch of this cell, if it is the first one in its mode.
        """
        # A layer may have added buffers.
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

    def end(self, state: 'CellState', watch: LayerRecorder | None) -> 'CellState':
        """Return the state, updated by the changes of the first pass."""
        if not self.hooks:  # at this time, because a hook may remove itself
            # Not as a dict, because the handle of a hook has a weak reference to its dictionary.
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
    """Return ``None``, as a dead weak reference does."""


class CellState:
    """The state of a partition's layers at the start of a cell.

    Args:
        layers: The layers.
        is_first: Whether the layers were not observed yet.
    """

    __slots__ = ('__weakref__', '_is_first', '_memories', 'attributes', 'buffers', 'layers',
                 'lost', 'parameters', 'places', 'told', 'versions')

    def __init__(self, layers: Layers, is_first: bool = False) -> None:
        self.layers = layers
        self._is_first = is_first
        #: Tensors compared by version, their slots, and their versions.
        self.told: list[Tensor] = []
        self.places: list[Slot] = []
        self.versions: list[int] = []
        #: The slot of a tensor that was written to and not copied before.
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
                # A kernel may write to a frozen one, such as statistics, without a new version.
                if slot in written or (is_first and not x.requires_grad and size_of(x) <= SMALL):
                    self.parameters.setdefault(module, {})[name] = self._copy(x)
                else:
                    self._tell(slot, x)

    def keep(self, buffered: Iterable[nn.Module], mutated: Iterable[nn.Module]) -> None:
        """Keep the buffers of some modules, and the attributes of others."""
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
        # A buffer with a graph must not be kept alive.
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
        """Use a copy for each tensor that was written to, if a copy was made before the write."""
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
    """Return whether a tensor has another value now than its kept copy."""
    if not isinstance(restore, partial):
        return True
    before = restore.args[0]
    if before is None or now is None or not is_plain(now) or not is_plain(before):
        return now is not before
    if isinstance(now, FakeTensor):
        return False  # It has no values.
    return before.shape != now.shape or before.dtype != now.dtype or not torch.equal(before, now)


def with_grad(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Return a tensor with the given ``requires_grad``, over the same memory."""
    if tensor.requires_grad is requires_grad:
        return tensor
    if isinstance(tensor, nn.Parameter):
        return _parameter_like(tensor, tensor.detach(), requires_grad)
    return tensor.detach().requires_grad_(requires_grad)


# A recomputation with a kept state.


#: Sets an attribute of a module without the checks of `nn.Module`.
assign = object.__setattr__


def run_on(state: CellState, function: Callable[[], T]) -> T:
    """Run a recomputation with the state at the start of the first pass."""
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
    """Return the name of a parameter or a buffer for errors."""
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
