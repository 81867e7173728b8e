"""State of layers: kept at the start of a cell's first pass, restored for its recomputation.

A recomputation is exact only if it finds the state of the first pass. :class:`CellState` keeps
this state by the use that layers make of it, by the same rules on all devices::

    attributes                                      as references
    containers that layers change in place          copied when a cell starts
    other small containers                          copied once, and again after a change
    tensors that layers were seen to write to       copied when a cell starts
    other small buffers and tensors in attributes   copied once, and again after a change,
                                                    up to a sum of sizes
    all other tensors                               compared by version

Attributes include tensors in Python's containers and tuples of any nesting. Other objects are
references, so their own state is not kept. Cells share one state as long as nothing has changed.

[Note: Tensors compared by version]
An optimizer writes to parameters while the graph is still alive. Copies of them would copy the
whole model. So a tensor that no layer was seen to write to is compared by version. If the version
has changed since the cell's first pass, backward raises, as autograd does without checkpoints
(rule 9).

Changes by a recomputation must not persist, except attributes that layers set if they ask for the
pass (``is_recomputing()``). So in :func:`run_on`, each module has another
dictionary of attributes::

                               first pass of the cell     later     recomputation       afterwards
    module.__dict__            its own                              another             its own
    training                                                        as in first pass
    an attribute               start ─────▶ end           …         start               as it was
    a tensor that changes      start ─────▶ end           …         a copy of start     as it was
    hooks of a parameter       start ─────▶ end           …         end                 as it was
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_not
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchgpipe.base.context import context
from torchgpipe.base.locks import Lock
from torchgpipe.base.private import HOOKS, FakeTensor, remove_hooks, unseen, versions
from torchgpipe.base.structure import (
    Memories,
    Path,
    Slot,
    copy_of,
    is_plain,
    path_name,
    size_of,
    storage_id,
    view_of,
)
from torchgpipe.engine.checkpoint.observation import (
    OWN,
    Attributes,
    Container,
    LayerRecorder,
    Observed,
    Place,
    are_rebound,
    are_same,
    attributes_of,
    candidates_of,
    contents_of,
    copy_of_value,
    tensors_in,
)
from torchgpipe.engine.checkpoint.samples import elements_of
from torchgpipe.engine.checkpoint.swaps import Swap, substituted, with_data
from torchgpipe.engine.streams import no_context

T = TypeVar('T')

#: Buffers and tensors in attributes of at most this number of bytes are copied.
SMALL = 1 << 16

#: The most bytes of such copies in a partition, whose frozen weights may be buffers. All further
#: ones are compared by version.
MOST_COPIED = 1 << 20

#: Modules of classes whose attributes do not change in forward.
_CONSTANT = 'torch.nn.modules.', 'torchgpipe.engine.'

#: Containers in attributes of at most this number of keys and items are copied.
FEW = 200


class Layers:
    """The common state of a partition's layers in all checkpointed cells of one forward pass.

    It is made in the first of these cells, when modules have the parameters of the pass.

    Args:
        lock: Held while the modules have other attributes.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        observed: Observed,
        lock: Lock,
    ) -> None:
        self.modules = modules
        self.observed = observed
        self.lock = lock
        #: The modules that may set attributes in forward.
        self._may_change: list[nn.Module] = []
        #: The attributes of each module, and the children, at the start of the first cell.
        self.attributes: dict[nn.Module, Attributes] = {}
        self.children: dict[nn.Module, dict[str, nn.Module | None]] = {}
        #: The parameters of this forward pass, and whether they require grad. Later,
        #: `torch.func.functional_call` removes its parameters, and others may be frozen.
        self.parameters: list[tuple[Place, nn.Parameter, bool]] = []
        for module in modules:
            self.attributes[module] = module.__dict__.copy()
            may_change = not type(module).__module__.startswith(_CONSTANT)
            if may_change:
                self._may_change.append(module)
            # Containers of PyTorch may be empty now, and get children in forward.
            is_container = isinstance(module, (nn.ModuleDict, nn.ModuleList))
            if module._modules or may_change or is_container:
                self.children[module] = module._modules.copy()
            for name, x in module._parameters.items():
                if x is not None:
                    self.parameters.append(((module, name, ()), x, x.requires_grad))
        #: The small tensors of the last state, their versions and copies.
        self.small = _Small([], [], [])
        #: The common state of cells without changes, as long as any of them has it.
        self._common: weakref.ref[CellState] | None = None
        #: Small containers that no layer was seen to change.
        self.containers: dict[Slot, Container] = {}
        #: For each module, the number of attributes, and the names of possible containers.
        self._candidates: dict[nn.Module, tuple[int, list[str]]] = {}
        #: The values of these names at the last look.
        self._looked_at: dict[Slot, Any] = {}
        #: The copies of this pass and of the previous one, by the ``id`` of each container.
        self._copied: dict[int, Container] = {}
        self._copied_before = observed.copied
        observed.copied = self._copied
        #: The hooks of modules at the end of the first cell.
        self.hooks: dict[nn.Module, Attributes] = {}

    @property
    def is_stale(self) -> bool:
        """Whether forward has replaced a child of a module since the first cell."""
        for module, before in self.children.items():
            if are_rebound(before, module._modules):
                return True
        return False

    def find(self, watch: LayerRecorder | None) -> 'CellState':
        """Return the present state of the layers, at the start of a cell."""
        if watch is not None:
            context.asked = False
            attributes = {module: module.__dict__.copy() for module in self.modules}
            self._copy_containers(attributes)
            return CellState(self, attributes, watch)
        attributes = {}
        if self._may_change and not self.observed.asks_phase:
            if not self._candidates:
                self._copy_containers(self.attributes)
            attributes = self._changed_attributes()
            self._copy_containers(attributes)
        if self._common is not None and not attributes:
            common = self._common()
            if common is not None and common.is_current():
                return common
        state = CellState(self, attributes)
        if not (attributes or state.changes or self.observed.changes_containers):
            self._common = weakref.ref(state)
        return state

    def _changed_attributes(self) -> dict[nn.Module, Attributes]:
        """Return the attributes of modules that may have changed in this forward pass."""
        observed = self.observed
        for module in self._may_change:
            before = self.attributes[module]
            if module not in observed.mutated and are_rebound(before, module.__dict__):
                observed.learn_attributes(module, before)
        attributes = {}
        for module in observed.mutated:
            if module in self.attributes:
                attributes[module] = module.__dict__.copy()
        return attributes

    def _copy_containers(self, attributes: dict[nn.Module, Attributes]) -> None:
        """Copy the small containers among attributes that are new since the last look."""
        for module in self._may_change:
            if module not in attributes:
                continue
            values = attributes[module]
            # A layer rarely adds or removes an attribute, so the names are kept.
            size, names = self._candidates.get(module, (0, []))
            if size != len(values):
                names = candidates_of(values)
                self._candidates[module] = len(values), names
            for name in names:
                value = values.get(name)
                if self._looked_at.get((module, name)) is not value:
                    self._looked_at[module, name] = value
                    self._copy_container(module, name, value)

    def _copy_container(
        self,
        module: nn.Module,
        name: str,
        value: Any,
    ) -> None:
        """Copy a value if it is a small container, unless there is a copy already."""
        self.containers.pop((module, name), None)
        contents = contents_of(name, value, FEW)
        if contents is None or name in self.observed.kept.get(module, ()):
            return
        if tensors_in(value):
            self.observed.kept[module].add(name)
            return
        container = self._copied.get(id(value)) or self._copied_before.get(id(value))
        if container is None or not are_same(container.contents, contents):
            container = Container(value, contents, copy_of_value(value, _unchanged))
        self._copied[id(value)] = container
        self.containers[module, name] = container

    def _find_changed_containers(self) -> None:
        """Keep the containers that a cell has changed: from now on each cell copies them."""
        for (module, name), container in [*self.containers.items()]:
            if not are_same(container.contents, contents_of(name, container.value)):
                self.observed.kept[module].add(name)
                self.observed.changes_containers = True
                self._common = None  # The state of this cell, which later cells must not share.
                del self.containers[module, name]

    def end(self, state: 'CellState', watch: LayerRecorder | None) -> None:
        """Complete the state at the end of its first pass."""
        if not self.hooks:  # at this time, because a hook may remove itself
            for module in self.modules:
                # Not as a dict, because the handle of a hook has a weak reference to its
                # dictionary.
                attributes = module.__dict__
                self.hooks[module] = {name: attributes[name].copy() for name in HOOKS}
        if watch is not None:
            state.learn(watch)
        elif versions(state.tensors) != state.versions:
            state.find_written({})
        if self.containers:
            self._find_changed_containers()


class _Small(NamedTuple):
    """Small tensors, their versions when they were copied, and the copies."""

    tensors: list[Tensor]
    versions: list[int]
    copies: list[Tensor]


class CellState:
    """The state of a partition's layers at the start of a cell."""

    def __init__(
        self,
        layers: Layers,
        attributes: dict[nn.Module, Attributes],
        watch: LayerRecorder | None = None,
    ) -> None:
        self.layers = layers
        self.attributes = attributes
        #: Tensors compared by version, their places and versions.
        self.tensors: list[Tensor] = []
        self.places: list[Place] = []
        #: The place of a tensor that was written to and not copied before.
        self.lost: Place | None = None
        #: Tensors that layers were seen to write to, or other small tensors; then their copies.
        self.changes: dict[Place, Tensor] = {}
        self._small: dict[Place, Tensor] = {}
        self._small_bytes = 0
        self.copies: dict[Place, Tensor] = {}
        #: Attributes with tensors, or containers that change. The containers are copies.
        self.values: dict[nn.Module, Attributes] = {}

        for place, x, _ in layers.parameters:
            if watch is not None or place in layers.observed.written:
                # A kernel may write to a frozen one, such as statistics, without a new version.
                self._keep(place, x, may_copy=not x.requires_grad)
            else:
                self.places.append(place)
                self.tensors.append(x)
        self.buffers: dict[nn.Module, dict[str, Tensor | None]] = {}
        for module in layers.modules:
            if not module._buffers:
                continue
            self.buffers[module] = module._buffers.copy()
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._keep((module, name, ()), buffer)
        kept = layers.observed.kept if watch is None else watch.kept
        if kept or layers.containers:
            self._keep_values(kept)

        self._copy()
        self.versions = versions(self.tensors)
        self._samples: list[Tensor | None] = []
        if watch is not None:
            self._samples = [_sample(x) for x in self.tensors]

    def _keep_values(self, kept: Mapping[nn.Module, Iterable[str]]) -> None:
        """Keep copies of attributes that are containers or contain tensors."""
        layers = self.layers
        # A container in several attributes is copied once.
        copies: dict[int, Any] = {}
        for module, names in kept.items():
            if module not in layers.attributes:  # It was a child in an earlier cell.
                continue
            attributes = self.attributes_of(module)
            values = self.values[module] = {}
            for name in names:
                if name in attributes:
                    keep = partial(self._keep_item, module, name)
                    values[name] = copy_of_value(attributes[name], keep, copies)
        for (module, name), container in layers.containers.items():
            self.values.setdefault(module, {}).setdefault(name, container.copy)

    def attributes_of(self, module: nn.Module) -> Attributes:
        """Return the attributes of a module, as references."""
        return self.attributes.get(module) or self.layers.attributes[module]

    def _keep(
        self,
        place: Place,
        x: Tensor,
        may_copy: bool = True,
    ) -> None:
        if place in self.layers.observed.written:
            self.changes[place] = x
        elif may_copy and self._is_small(x):
            self._small[place] = x
            self._small_bytes += size_of(x)
        else:
            self.places.append(place)
            self.tensors.append(x)

    def _is_small(self, x: Tensor) -> bool:
        """Return whether a tensor is copied in addition to the ones before it."""
        if x.is_nested or size_of(x) > SMALL:
            return False
        return self._small_bytes + size_of(x) <= MOST_COPIED

    def _keep_item(
        self,
        module: nn.Module,
        name: str,
        path: Path,
        x: Tensor,
    ) -> Tensor:
        """Keep a tensor of an attribute. Return it without its graph, which would stay alive."""
        if x.grad_fn is not None:
            x = x.detach().requires_grad_()
        # A parameter is often also that of another module, and an optimizer writes to it.
        may_copy = not isinstance(x, nn.Parameter)
        self._keep((module, name, path), x, may_copy)
        return x

    def _copy(self) -> None:
        """Copy tensors, unless they are small and the last state has the same copies."""
        memories: Memories = {}
        with unseen():
            for place, x in self.changes.items():
                self.copies[place] = _copy_of(x, memories)

            tensors = [*self._small.values()]
            present = versions(tensors)
            small = self.layers.small
            if present != small.versions or any(map(is_not, tensors, small.tensors)):
                copies = [_copy_of(x, memories) for x in tensors]
                small = self.layers.small = _Small(tensors, present, copies)
            self.copies.update(zip(self._small, small.copies))

    def is_current(self) -> bool:
        """Return whether all tensors are as they were when the cell started."""
        if versions(self.tensors) != self.versions:
            return False
        small = self.layers.small
        if versions(small.tensors) != small.versions:
            return False
        for module in self.layers.modules:
            before = self.buffers.get(module, {})
            if (before or module._buffers) and are_rebound(before, module._buffers):
                return False
        return True

    def learn(self, watch: LayerRecorder) -> None:
        """Add the observations of the first pass, and drop values that it did not change."""
        observed = self.layers.observed
        observed.watched = True
        observed.asks_phase |= context.asked
        self.find_written(watch.copies)
        with unseen():
            self._find_small_written(watch.copies)
        observed.written.update(self._new_tensors())

        if observed.asks_phase:
            observed.mutated.clear()
            observed.kept.clear()
            self.layers.containers.clear()
        else:
            watch.report(observed)
        for module in self.layers.modules:
            if module not in observed.mutated:
                self.attributes.pop(module, None)
        for module, values in self.values.items():
            kept = observed.kept.get(module, ())
            for name in [*values]:
                if name not in kept and (module, name) not in self.layers.containers:
                    del values[name]

    def _find_small_written(self, copies: Memories) -> None:
        """Record the small tensors that the first pass has written to."""
        present = versions([*self._small.values()])
        before = self.layers.small.versions
        for k, (place, x) in enumerate(self._small.items()):
            is_written = present[k] != before[k]
            if not is_written and is_plain(x):
                # Through an alias, or by a kernel that leaves the version as it was.
                is_written = storage_id(x) in copies or not _same_elements(self.copies[place], x)
            if is_written:
                self.layers.observed.written.add(place)

    def _new_tensors(self) -> Iterator[Place]:
        """Yield the buffers and small tensors in attributes that the first pass has made."""
        for module in self.layers.modules:
            before = self.buffers.get(module, {})
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer is not before.get(name):
                    yield module, name, ()
            values = self.attributes_of(module)
            for name, value in attributes_of(module).items():
                if value is values.get(name):
                    continue
                for path, x in tensors_in(value):
                    if not x.is_nested and size_of(x) <= SMALL:
                        yield module, name, path

    def find_written(self, copies: Memories) -> None:
        """Use a copy for each tensor that was written to, if a copy was made before the write."""
        before = [*zip(self.places, self.tensors, self.versions)]
        present = versions(self.tensors)
        samples = self._samples
        self.places = []
        self.tensors = []
        self._samples = []
        for k, (place, x, version) in enumerate(before):
            copy = None
            if is_plain(x):
                copy = copies.get(storage_id(x))
            is_same = version == present[k]
            if samples:
                is_same = is_same and _same_elements(samples[k], _sample(x))
            if copy is None and is_same:
                self.places.append(place)
                self.tensors.append(x)
                continue
            self.layers.observed.written.add(place)
            if copy is None:
                self.lost = place
            else:
                self.copies[place] = view_of(copy, x).requires_grad_(x.requires_grad)
        self.versions = versions(self.tensors)

    def restored(self) -> list[tuple[nn.Module, Attributes]]:
        """Return the modules and their attributes for a recomputation."""
        memories: Memories = {}
        copies: dict[int, Any] = {}
        restored = {}
        for module in self.layers.modules:
            restored[module] = self._restored_attributes(module, memories, copies)
        for (module, name, _), x, requires_grad in self.layers.parameters:
            parameters = restored[module]['_parameters']
            parameters[name] = x
            if x.requires_grad is not requires_grad:
                parameters[name] = with_grad(x, requires_grad)
        for (module, name, path), copy in self.copies.items():
            for tensors in (restored[module]['_parameters'], restored[module]['_buffers']):
                if not path and name in tensors:
                    tensors[name] = _restored_tensor(tensors[name], copy, memories)
        return [*restored.items()]

    def _restored_attributes(
        self,
        module: nn.Module,
        memories: Memories,
        copies: dict[int, Any],
    ) -> Attributes:
        layers = self.layers
        # In two steps, because a copy of a large dictionary is fast.
        attributes = self.attributes_of(module).copy()
        attributes.update(layers.hooks[module])
        if layers.observed.asks_phase:
            # Such layers handle their attributes themselves.
            training = attributes.get('training', module.training)
            attributes = {**module.__dict__, **layers.hooks[module], 'training': training}
        for name, value in self.values.get(module, {}).items():
            restore = partial(self._restored_item, memories, module, name)
            attributes[name] = copy_of_value(value, restore, copies)
        if module in layers.children:
            attributes['_modules'] = layers.children[module].copy()
        attributes['_parameters'] = {**module._parameters}
        attributes['_buffers'] = {**self.buffers.get(module, {})}
        return attributes

    def _restored_item(
        self,
        memories: Memories,
        module: nn.Module,
        name: str,
        path: Path,
        x: Tensor,
    ) -> Tensor:
        copy = self.copies.get((module, name, path))
        if copy is None:
            return x
        return _restored_tensor(x, copy, memories)


def _unchanged(path: Path, x: Tensor) -> Tensor:
    return x


def _copy_of(x: Tensor, memories: Memories) -> Tensor:
    return copy_of(x, memories).requires_grad_(x.requires_grad)


def _sample(x: Tensor) -> Tensor | None:
    """Return some elements, which show a write without a new version; ``None`` if trained."""
    if x.requires_grad or x.is_nested:
        return None
    elements = elements_of(x, every=True)
    return None if elements is None else elements.clone()


def _same_elements(before: Tensor | None, now: Tensor | None) -> bool:
    if before is None or now is None or isinstance(now, FakeTensor):
        return True  # It has no values.
    return (
        before.shape == now.shape
        and before.dtype == now.dtype
        and torch.equal(before.detach(), now.detach())
    )


def _restored_tensor(
    x: Tensor,
    copy: Tensor,
    memories: Memories,
) -> Tensor:
    """Return a tensor with the kept values, which a recomputation may write to."""
    return with_data(x, copy_of(copy, memories), copy.requires_grad)


def with_grad(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Return a tensor with the given ``requires_grad``, over the same memory."""
    if tensor.requires_grad is requires_grad:
        return tensor
    return with_data(tensor, tensor.detach(), requires_grad)


# A recomputation with a kept state.


#: Sets an attribute of a module without the checks of `nn.Module`.
assign = object.__setattr__


def run_on(
    state: CellState,
    function: Callable[[], T],
) -> T:
    """Run a recomputation with the state at the start of the first pass."""
    layers = state.layers
    with layers.lock:
        # Rule 9: A tensor that is kept for later use is copied, or compared by its version. If the
        # version has changed, the later use raises.
        if state.lost is not None or versions(state.tensors) != state.versions:
            _raise_changed(state)
        with unseen() if state.copies else no_context:
            restored = state.restored()
        swaps = []
        present: list[tuple[Attributes, Attributes]] = []
        for module, attributes in restored:
            put = partial(assign, module, '__dict__', attributes)
            swaps.append(Swap(put, partial(assign, module, '__dict__', module.__dict__)))
            present.append((module.__dict__, attributes))

        next_hook = RemovableHandle.next_id
        with substituted(swaps):
            try:
                return function()
            finally:
                if RemovableHandle.next_id != next_hook:
                    # The first pass has registered these hooks already.
                    for _, x, _ in layers.parameters:
                        remove_hooks(x, next_hook)
                if layers.observed.asks_phase:
                    # Layers that ask for the pass keep the attributes that they set.
                    for before, attributes in present:
                        for name, value in attributes.items():
                            if name not in OWN:
                                before[name] = value


def _raise_changed(state: CellState) -> None:
    if state.lost is not None:
        raise RuntimeError(
            f'{_name(state.layers, state.lost)} was written to by its layer in a checkpointed '
            'micro-batch, as was never seen before in this mode, so its value from before is '
            'not there for the recomputation. Call the model again: from now on it is kept.'
        )
    present = versions(state.tensors)
    for place, expected, version in zip(state.places, state.versions, present):
        if version != expected:
            raise RuntimeError(
                f'{_name(state.layers, place)} has been modified by an inplace operation between '
                f'forward and backward (it is at version {version}; expected version {expected}), '
                'so a checkpointed micro-batch cannot be recomputed. Call backward before the '
                "optimizer's step, or use checkpoint='never'."
            )


def _name(layers: Layers, place: Place) -> str:
    """Return the name of a tensor for errors."""
    module, name, path = place
    names = {child: name for name, child in layers.modules[0].named_modules()}
    kind = 'attribute'
    if not path and name in module._parameters:
        kind = 'parameter'
    elif not path and name in module._buffers:
        kind = 'buffer'
    return f"{kind} '{names[module]}.{name}{path_name(path)}'"
