"""Observation of layers: the tensors and attributes that they change in a cell's first pass.

A module does not show which tensors its forward will write to. So a dispatch mode,
:class:`LayerRecorder`, watches the first cell of a partition in each mode, and :class:`Observed`
keeps the results. Later cells only save the generators that these layers use, and copy the values
that they change in place.
"""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import compress
from operator import is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.base.private import generator_key, unseen, versions
from torchgpipe.base.structure import Memories, Path, Slot, copy_of, is_plain, storage_id
from torchgpipe.engine.checkpoint.random import Drawing, Recorder, operation_of

#: Attributes of a module that are handled separately.
OWN = ('_buffers', '_parameters', 'training')

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = frozenset([list, set, deque, *_MAPPINGS])

#: Values by their names.
Attributes = dict[str, Any]

# Attributes of every module, such as hooks and children, which the user may change.
_EVERY = frozenset(vars(nn.Module()))


def attributes_of(module: nn.Module) -> Attributes:
    """Return the attributes of a module except its parameters, buffers and training flag."""
    return {name: value for name, value in module.__dict__.items() if name not in OWN}


def are_rebound(before: Attributes, now: Attributes) -> bool:
    """Return whether attributes refer to other objects than before."""
    if len(before) != len(now):
        return True
    return any(map(is_not, before.values(), now.values()))


def candidates_of(attributes: Attributes) -> list[str]:
    """Return the names of attributes that are containers, or ``None`` until a layer makes one."""
    # Without a Python call for each attribute: a module may have a thousand of them.
    names = compress(attributes, map(_may_contain, map(type, attributes.values())))
    return [name for name in names if name not in _EVERY]


@lru_cache(maxsize=1024)
def _may_contain(type_of_value: type) -> bool:
    return type_of_value in _CONTAINERS or issubclass(type_of_value, (tuple, type(None)))


def contents_of(
    name: str,
    value: Any,
    most: float = math.inf,
) -> list[Any] | None:
    """Return the keys (or indices) and items of a container, including nested ones.

    Returns:
        A list; ``None`` if the value is no container, has more contents, or is an attribute of
        every module.
    """
    if name in _EVERY or not _is_container(value):
        return None
    contents: list[Any] = []
    seen = {id(value)}
    queue = [value]
    while queue:
        container = queue.pop()
        if len(contents) + 2 * len(container) > most:
            return None
        for key, item in _items_of(container):
            contents += key, item
            if _is_container(item) and id(item) not in seen:
                seen.add(id(item))
                queue.append(item)
    return contents


def _is_container(value: Any) -> bool:
    return type(value) in _CONTAINERS or isinstance(value, tuple)


def _items_of(container: Any) -> Iterable[tuple[Any, Any]]:
    if type(container) in _MAPPINGS:
        return container.items()  # type: ignore[no-any-return]
    return enumerate(container)


def tensors_in(value: Any) -> list[tuple[Path, Tensor]]:
    """Return the tensors of a value, in containers and tuples of any nesting, with their paths."""
    tensors: list[tuple[Path, Tensor]] = []

    def collect(path: Path, x: Tensor) -> Tensor:
        tensors.append((path, x))
        return x

    copy_of_value(value, collect)
    return tensors


def copy_of_value(
    value: Any,
    replace: Callable[[Path, Tensor], Tensor],
    copies: dict[int, Any] | None = None,
    path: Path = (),
) -> Any:
    """Copy a value: its containers and the containers in it, but not their other items.

    Args:
        replace: Returns the substitute for the tensor at a path.
        copies: Copies of other values, by the ``id`` of each container. A container that several
            values share is copied once.
    """
    if copies is None:
        copies = {}
    if isinstance(value, Tensor):
        return replace(path, value)
    if id(value) in copies:
        return copies[id(value)]

    if isinstance(value, tuple):
        items = []
        for k, item in enumerate(value):
            items.append(copy_of_value(item, replace, copies, (*path, k)))
        if not any(map(is_not, items, value)):
            return value
        if hasattr(value, '_fields'):  # a named tuple
            return type(value)(*items)
        return type(value)(items)
    if type(value) not in _CONTAINERS:
        return value

    # Before its items, because a container may contain itself.
    copy = value.copy()
    copies[id(value)] = copy
    if type(value) is set:
        copy.clear()
    for key, item in _items_of(value):
        item = copy_of_value(item, replace, copies, (*path, key))
        if type(value) is set:
            copy.add(item)
        else:
            copy[key] = item
    return copy


def state_of(module: nn.Module) -> list[Any]:
    """Return a module's tensors and attributes, with versions, to compare by :func:`are_same`."""
    values = attributes_of(module)
    state = [
        *module._parameters.values(),
        *module._buffers.values(),
        *values.values(),
    ]
    for name, value in values.items():
        state += contents_of(name, value) or ()
    tensors = [x for x in state if isinstance(x, Tensor)]
    return state + versions(tensors)


def are_same(
    a: list[Any],
    b: list[Any] | None,
) -> bool:
    """Return whether two lists contain identical objects, or equal integers."""
    if b is None or len(a) != len(b):
        return False
    for x, y in zip(a, b):
        # Indices and versions are new objects each time.
        if x is not y and (type(x) is not int or x != y):
            return False
    return True


#: A tensor of a layer: its module, and a name with a path if it is in an attribute.
Place = tuple[nn.Module, str, Path]


class Container(NamedTuple):
    """A small container without tensors, as it was when it was copied."""

    value: Any
    contents: list[Any]
    copy: Any


class Observed:
    """Observations of layers in one mode, which is given by the training flags of all modules."""

    def __init__(self) -> None:
        self.draws = Drawing.UNKNOWN
        #: Whether a checkpointed cell was watched. Cells without a checkpoint show only draws.
        self.watched = False
        #: The layers' own generators, by keys.
        self.generators: dict[int, torch.Generator] = {}
        #: Tensors that they write to.
        self.written: set[Place] = set()
        #: Modules whose attributes they set.
        self.mutated: set[nn.Module] = set()
        #: Attributes that contain tensors, or containers that they change in place.
        self.kept: defaultdict[nn.Module, set[str]] = defaultdict(set)
        #: Whether they change any of these containers.
        self.changes_containers = False
        #: Copies of small containers in the last pass, by the ``id`` of each container.
        self.copied: dict[int, Container] = {}
        #: Whether they ask for the pass, and so handle their attributes themselves.
        self.asks_phase = False
        self._false_alarms = 0

    def learn(self, recorder: Recorder) -> None:
        """Add the observations of a recorder."""
        self.draws = Drawing.of(self.draws is Drawing.YES or recorder.draws)
        self.generators.update(recorder.generators)

    def learn_attributes(self, module: nn.Module, before: Attributes) -> None:
        """Compare the attributes of a module with the previous ones.

        All attributes that contain tensors are kept from now on.
        """
        if are_rebound(before, module.__dict__):
            self.mutated.add(module)
        for attributes in (before, module.__dict__):
            for name, value in attributes.items():
                if name not in _EVERY and tensors_in(value):
                    self.kept[module].add(name)

    def watch_draws(self) -> None:
        """Record a draw during these layers, which were seen not to draw.

        They are watched again, but less and less often, because another thread may have drawn.
        """
        if self.draws is Drawing.NO:
            self._false_alarms += 1
            if self._false_alarms & (self._false_alarms - 1) == 0:  # a power of two
                self.draws = Drawing.UNKNOWN

    def watch_again(self) -> None:
        """Watch the next cell, as the first one."""
        self.draws = Drawing.UNKNOWN
        self.watched = False


class LayerRecorder(Recorder):
    """A recorder that also detects changes of a cell's layers.

    It copies tensors of the layers before the first write to them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.copies: Memories = {}
        #: The attributes of each module that are containers or contain tensors.
        self.kept: dict[nn.Module, set[str]] = {}
        self._before: dict[nn.Module, Attributes] = {}
        self._contents: dict[Slot, list[Any]] = {}
        self._watched: set[int] = set()
        for module in modules:
            self._observe(module)

    def _observe(self, module: nn.Module) -> None:
        self._before[module] = module.__dict__.copy()
        self.kept[module] = set()
        tensors = [*module._parameters.values(), *module._buffers.values()]

        for name, value in attributes_of(module).items():
            contents = contents_of(name, value)
            if contents is not None:
                self._contents[module, name] = contents
            if name not in _EVERY:
                tensors_of_value = [x for _, x in tensors_in(value)]
                if tensors_of_value or contents is not None:
                    self.kept[module].add(name)
                tensors += tensors_of_value
            for item in (value, *(contents or ())):
                if isinstance(item, torch.Generator):
                    self.generators[generator_key(item)] = item

        for x in tensors:
            if x is not None and is_plain(x):
                self._watched.add(storage_id(x))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        for x in operation_of(func).written_by(args, kwargs or {}):
            if is_plain(x) and storage_id(x) in self._watched:
                with unseen():
                    copy_of(x, self.copies)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def report(self, observed: Observed) -> None:
        """Add the observed changes of attributes."""
        for module, before in self._before.items():
            observed.learn_attributes(module, before)
        for (module, name), contents in self._contents.items():
            if not are_same(contents, contents_of(name, self._before[module][name])):
                observed.kept[module].add(name)
                observed.changes_containers = True
