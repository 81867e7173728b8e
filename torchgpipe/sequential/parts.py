"""Submodules, parameters, buffers and optimizer state in layers, by the names of the model.

A :class:`Part` of a module has some of its submodules, parameters and buffers::

    model                                   the part with blocks.0.norm and table
    ├── embed                               ├── table            the same parameter
    ├── table            a parameter        └── blocks           another module, of the same name
    └── blocks                                  └── 0
        ├── 0: norm, attend                         └── norm     the same module
        └── 1: norm, attend

In the sequential module (:class:`Converted`), the number of a layer precedes these names::

    model         blocks.0.norm.weight                  embed.weight
    sequential    3.blocks.0.norm.weight                0.embed.weight, 7.embed.weight
                  ▲
                  the layer: a parameter of several layers has a name in each of them

The number depends on the cut of the model into layers, so :func:`to_own_names` ignores it when a
state dict is loaded. Names of the model and names with other numbers are accepted.

:func:`optimizer_state` translates the state of an optimizer::

    optimizer of the model     0  1  2  3         parameters by numbers, in an order of its own
                               │  │  │  │
    names of the model         a  b  c  d
                               │  │  │  │
    optimizer of the layers    1  3  0  2
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchgpipe.engine.cell import Sequential
from torchgpipe.engine.split import still_shared
from torchgpipe.sequential.leaf_modules import Whole, is_about_names


class Part(nn.Module):
    """A part of a module, which has its methods and attributes if ``attributes``."""

    def __init__(self, module: nn.Module, attributes: bool = False) -> None:
        super().__init__()
        self.training = module.training
        self._whole = type(module)
        self._length = len(module._modules)
        self._attributes = (
            {name: value for name, value in module.__dict__.items() if name not in _OF_EACH}
            if attributes
            else None
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            own = self.__dict__
            if name in (own.get('_attributes') or ()):
                return own['_attributes'][name]
            if own.get('_attributes') is not None and hasattr(own['_whole'], name):
                found = inspect.getattr_static(own['_whole'], name)
                if hasattr(found, '__get__'):
                    return found.__get__(self, type(self))
                return found
            raise _missing(name, own.get('_whole', type(self))) from None

    def _get_name(self) -> str:
        return self._whole.__name__


def class_of(module: nn.Module) -> type:
    """Return the class of a module, or of the module that it is a part of."""
    return module._whole if isinstance(module, Part) else type(module)


class _PartOfList(Part):
    """A part of a module with indices, which are the same as in the whole."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(self._length))]
        name = str(index + self._length if isinstance(index, int) and index < 0 else index)
        if name in self._modules:
            return self._modules[name]
        return _Absent(name, self._whole)

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])


class _Absent:
    """A module of a list that a part does not have: iteration may skip it, but use raises."""

    def __init__(self, name: str, whole: type) -> None:
        self.__dict__.update(_name=name, _whole=whole)

    def __getattr__(self, name: str) -> Any:
        raise _missing(self._name, self._whole)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _missing(self._name, self._whole)


def _missing(name: str, whole: type) -> AttributeError:
    return AttributeError(
        'a stage has those submodules, parameters and buffers of the model that it used with '
        f"the sample, and '{name}' of a {whole.__name__} is none of them"
    )


# The attributes that each module has.
_OF_EACH = frozenset(vars(nn.Module()))


def put(part: nn.Module, root: nn.Module, names: Iterable[str], attributes: bool = False) -> None:
    """Put the objects with some names in a model into a part of the model.

    These are names of submodules, parameters, buffers, or an attribute such as ``training``. For
    an attribute, the part gets its module, with other attributes if ``attributes``.
    """
    for name in names:
        path, _, last = name.rpartition('.')
        source = root
        target = part
        for atom in filter(None, path.split('.')):
            source = source._modules[atom]  # type: ignore[assignment]
            if target._modules.get(atom) is source:
                break  # The whole module is already there.
            if atom not in target._modules:
                # A module may look up attributes by itself, and raise other errors.
                kind = _PartOfList if hasattr(type(source), '__getitem__') else Part
                target._modules[atom] = kind(source, attributes)
            target = target._modules[atom]  # type: ignore[assignment]
        else:
            _put(target, source, last)


def _put(target: nn.Module, source: nn.Module, name: str) -> None:
    for kind in ('_parameters', '_buffers', '_modules'):
        found: dict[str, Any] = getattr(source, kind)
        if name in found:
            getattr(target, kind)[name] = found[name]
    if name in source._non_persistent_buffers_set:
        target._non_persistent_buffers_set.add(name)


def all_names(root: nn.Module) -> dict[int, list[str]]:
    """Return all names of each submodule, parameter and buffer, by the id of the object.

    Names within a module begin with its first name only.
    """
    found: dict[int, list[str]] = {}
    for prefix, module in root.named_modules():
        for kind in ('_parameters', '_buffers', '_modules'):
            for name, value in getattr(module, kind).items():
                if value is not None:
                    found.setdefault(id(value), []).append(f'{prefix}.{name}' if prefix else name)
    return found


def with_all_names(
    root: nn.Module, uses: Iterable[str], names: dict[int, list[str]]
) -> Iterator[str]:
    """Yield all names of the objects with some names, and names of other attributes unchanged."""
    for name in uses:
        found = attrgetter(name)(root)
        yield from names[id(found)] if isinstance(found, (nn.Module, Tensor)) else [name]


def _tensors(module: nn.Module) -> list[str]:
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return [*{**module.state_dict(), **buffers}]


def _left_out(root: nn.Module, parts: Iterable[nn.Module]) -> list[str]:
    """Return the names of tensors in a model's state dict or buffers that none of its parts has.

    If a whole module is left out, its name is returned instead.
    """
    there = {name for part in parts for name in _tensors(part)}
    names = [name for name in _tensors(root) if name not in there]
    inhabited = {name[:k] for name in there for k, letter in enumerate(name) if letter == '.'}
    found: dict[str, None] = {}
    for name in names:
        ends = [k for k, letter in enumerate(name) if letter == '.']
        found.setdefault(next((name[:k] for k in ends if name[:k] not in inhabited), name))
    return [*found]


#: The name of a module, and its function that changes a state dict before it is loaded.
_LoadHook = tuple[str, Callable[..., None]]


class NamedLayer(nn.Module):
    """A layer with names of the model that it was made from, and the model's hooks for loading."""

    _load_hooks: Sequence[_LoadHook] = ()

    #: A copy of a model on the meta device, whose modules can make the initial values.
    original: nn.Module | None = None


def _load_hooks(root: nn.Module, layers: Iterable[nn.Module]) -> list[_LoadHook]:
    """Return the hooks for the model's state dict, of modules that no layer has as a whole."""
    there = {module for layer in layers for module in layer.modules()}
    found = []
    for name, module in root.named_modules():
        for each in () if module in there else module._load_state_dict_pre_hooks.values():
            if is_about_names(each):
                # A bound method would hold the whole module wherever a layer is copied to.
                function = getattr(each.hook, '__func__', None)
                found.append(
                    (
                        name and f'{name}.',
                        each.hook if function is None else partial(function, None),
                    )
                )
    return found


def with_part(whole: nn.Module, part: nn.Module) -> nn.Module:
    """Return a module like one of the original, with the tensors and modules of a part."""
    if not isinstance(part, (Part, NamedLayer)):
        return part  # The layer has the module as a whole.
    new = type(whole).__new__(type(whole))
    new.__dict__.update(whole.__dict__)
    new._parameters = {**whole._parameters, **part._parameters}
    new._buffers = {**whole._buffers, **part._buffers}
    new._modules = {
        name: child
        if child is None or part._modules.get(name) is None
        else with_part(child, part._modules[name])  # type: ignore[arg-type]
        for name, child in whole._modules.items()
    }
    return new


class Converted(Sequential):
    """A sequential module that was made from another module.

    Its layers hold the submodules, parameters and buffers of the original. ``load_state_dict``
    also accepts the names of the original. ``wholes`` has the modules that were not looked into.
    """

    wholes: Sequence[Whole] = ()

    #: A copy of the original on the meta device, if it is a model of Transformers or of PEFT.
    _original: nn.Module | None = None

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict with names of the original or of layers. Tied tensors stay tied."""
        with still_shared(self):
            return super().load_state_dict(state_dict, strict, assign)

    def _apply(self, fn: Any, recurse: bool = True) -> 'Converted':
        with still_shared(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        to_own_names(state_dict, prefix, self._modules)
        super()._load_from_state_dict(state_dict, prefix, *args)


def converted(layers: list[nn.Module], root: nn.Module, attributes: bool = False) -> Converted:
    """Return the sequential module of layers; the last one gets tensors that no layer uses."""
    put(layers[-1], root, _left_out(root, layers), attributes)
    hooks = _load_hooks(root, layers)
    module = Converted(*layers)
    module.training = root.training
    tensors = [*root.parameters(), *root.buffers()]
    is_on_meta = any(x.is_meta for x in tensors)
    if is_on_meta or hasattr(root, 'save_pretrained'):
        original = deepcopy(root, {id(x): torch.empty_like(x, device='meta') for x in tensors})
        # Not by `setattr`, which would register it as a child.
        if hasattr(root, 'save_pretrained'):
            module.__dict__['_original'] = original
        for layer in layers:
            if is_on_meta and isinstance(layer, NamedLayer):
                layer.__dict__['original'] = original
    for layer in layers:
        if hooks and isinstance(layer, NamedLayer):
            layer._load_hooks = hooks
    return module


def original_names(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the original's state dict from a converted model's, or from its ``GPipe``'s.

    >>> original_names({'0.embed.weight': 1, '7.embed.weight': 1, '7.norm.bias': 2})
    {'embed.weight': 1, 'norm.bias': 2}

    Args:
        state_dict: A state dict whose names begin with the number of a layer. If several layers
            share a parameter, the last one is returned.

    Raises:
        ValueError: A name does not begin with a number.
    """
    found = {}
    for key, value in state_dict.items():
        number, _, name = key.partition('.')
        if not number.isdigit() or not name:
            raise ValueError(
                f'names of a converted model begin with the number of a layer, as in '
                f"'0.{key}', but this state dict has '{key}'"
            )
        found[name] = value
    return found


def to_own_names(
    state_dict: dict[str, Any], prefix: str, layers: Mapping[str, nn.Module | None]
) -> None:
    """Rename the entries of a state dict to the names of layers, in place.

    A tensor that has several names needs only one of them, as in files of safetensors.
    """
    mine = {
        f'{number}.{name}': x
        for number, layer in layers.items()
        if isinstance(layer, NamedLayer)
        for name, x in layer.state_dict(keep_vars=True).items()
    }
    if not mine:
        return
    own: dict[str, list[str]] = {}
    for name in mine:
        own.setdefault(name.partition('.')[2], []).append(name)
    if mine.keys().isdisjoint(key[len(prefix) :] for key in state_dict):
        for path, hook in next(
            layer._load_hooks for layer in layers.values() if isinstance(layer, NamedLayer)
        ):
            hook(state_dict, prefix + path, {}, True, [], [], [])
    given = {key[len(prefix) :] for key in state_dict if key.startswith(prefix)}
    of_original = given.issuperset(own)
    renamed: dict[str, Any] = {}
    for name in given:
        number, _, rest = name.partition('.')
        if of_original and name in own:
            targets = own[name]
        elif name in mine:
            continue
        else:
            targets = own.get(name) or (own.get(rest, []) if number.isdigit() else [])
        if targets:
            value = state_dict.pop(prefix + name)
            renamed.update((prefix + target, value) for target in targets)
    state_dict.update(renamed)
    values = {
        id(x): state_dict[prefix + name]
        for name, x in mine.items()
        if isinstance(x, Tensor) and prefix + name in state_dict
    }
    state_dict.update(
        {
            prefix + name: values[id(x)]
            for name, x in mine.items()
            if prefix + name not in state_dict and id(x) in values
        }
    )


#: Keys of a group of parameters that are not options.
_PARAMETERS = ('params', 'param_names')


def optimizer_state(
    state_dict: Mapping[str, Any],
    module: nn.Module,
    target: Optimizer,
    source: Optimizer | None = None,
) -> dict[str, Any]:
    """Return the state dict of an optimizer for another one with another order of parameters.

    One optimizer has the parameters of a model, the other one of the converted model.

    >>> import torch
    >>> from torchgpipe.sequential import to_sequential
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.head, self.body = nn.Linear(4, 4), nn.Linear(4, 4)
    ...
    ...     def forward(self, x):
    ...         return self.head(self.body(x))
    >>> net = Net()
    >>> layers = to_sequential(net, torch.rand(2, 4))
    >>> source = torch.optim.SGD(net.named_parameters(), lr=0.1, momentum=0.9)
    >>> target = torch.optim.SGD(layers.parameters(), lr=0.5, momentum=0.9)
    >>> target.load_state_dict(optimizer_state(source.state_dict(), layers, target))
    >>> target.param_groups[0]['lr']
    0.1

    Args:
        state_dict: The state dict, with the names of parameters. PyTorch keeps these if an
            optimizer is made from ``named_parameters()``. Otherwise, pass ``source``.
        module: The layers of the converted model, or the ``GPipe`` of them.
        target: The optimizer that will load the result.
        source: The optimizer of the state dict, or one that was made in the same way. Only its
            parameters count, which may be on the meta device.

    Raises:
        ValueError: Parameters have no names, are not in the model, or differ between both
            optimizers or their groups. Or the optimizer has state of no single parameter.
    """
    known = _Names(module)
    saved = state_dict['param_groups']
    given = known.keys(_with_parameters(saved, source), 'the state dict')
    wanted = known.keys(target.param_groups, 'the target')
    _check_same([*chain(*given)], [*chain(*wanted)], known)
    groups = []
    first = 0
    for keys in wanted:
        numbers = [*range(first, first + len(keys))]
        groups.append({**_options(keys, given, saved, known), 'params': numbers})
        first += len(keys)
    saved_numbers = dict(zip(chain(*given), chain(*(group['params'] for group in saved))))
    parameters = chain(*(group['params'] for group in target.param_groups))
    state = {}
    for k, (key, parameter) in enumerate(zip(chain(*wanted), parameters)):
        found = state_dict['state'].get(saved_numbers[key])
        if found is not None:
            _check_state(found, parameter, known.names[key])
            state[k] = found
    return {'state': state, 'param_groups': groups}


class _Names:
    """The names of the parameters of a converted model, in the model and in layers.

    A key is the id of a parameter.
    """

    def __init__(self, module: nn.Module) -> None:
        #: One name of each parameter, by key.
        self.names: dict[int, str] = {}
        self._keys: dict[str, int] = {}
        for layer in module.children():
            if isinstance(layer, NamedLayer):
                for name, x in layer.named_parameters(remove_duplicate=False):
                    self.names.setdefault(id(x), name)
                    self._keys[name] = id(x)
        if not self.names:
            raise ValueError(
                'names of parameters are those of a converted model: pass the layers '
                'that to_sequential gave, or the GPipe of these, but not '
                f'{type(module).__name__}, which has none'
            )

    def keys(self, groups: Iterable[Mapping[str, Any]], what: str) -> list[list[int]]:
        """Return the keys of the parameters in some groups."""
        groups = [*groups]
        xs = [*chain(*(group['params'] for group in groups))]
        if all(isinstance(x, Tensor) and id(x) in self.names for x in xs):
            return [[*map(id, group['params'])] for group in groups]
        if not all(len(group.get('param_names', ())) == len(group['params']) for group in groups):
            raise ValueError(
                f'{what} has parameters that are not those of the converted model, or numbers of '
                'them, and no names: make the optimizers of named_parameters(). For a state dict '
                'without, pass source=…, an optimizer that is made as the one that it is of'
            )
        names = [*chain(*(group['param_names'] for group in groups))]
        # Names of the model, or of layers with any numbers.
        candidates = []
        for aliases in (names, [name.partition('.')[2] for name in names]):
            if all(name in self._keys for name in aliases):
                candidates.append([self._keys[name] for name in aliases])
        if not candidates or candidates[0] != candidates[-1]:
            foreign = [
                name for name in names if not {name, name.partition('.')[2]} & {*self._keys}
            ]
            raise ValueError(
                f'{what} has parameters that are not those of the model, or not '
                f'under its names alone: {(foreign or names)[:5]} of {len(names)}'
            )
        keys = iter(candidates[0])
        return [[*islice(keys, len(group['params']))] for group in groups]


def _with_parameters(
    saved: Iterable[Mapping[str, Any]], source: Optimizer | None
) -> list[Mapping[str, Any]]:
    """Return the groups of a state dict, or the source's groups if it has no names."""
    if source is None or all('param_names' in group for group in saved):
        return [*saved]
    sizes = [len(group['params']) for group in saved]
    sizes_of_source = [len(group['params']) for group in source.param_groups]
    if sizes != sizes_of_source:
        raise ValueError(
            f'the state dict has groups of {sizes} parameters, and the source of '
            f'{sizes_of_source}: make the source as the optimizer that the state dict is of'
        )
    return [*source.param_groups]


def _options(
    own: list[int], given: list[list[int]], saved: list[Mapping[str, Any]], known: _Names
) -> dict[str, Any]:
    """Return the options of the group in a state dict that has the same parameters."""
    for keys, group in zip(given, saved):
        if {*keys} == {*own}:
            return {name: x for name, x in group.items() if name not in _PARAMETERS}
    raise ValueError(
        'the state dict has no group of the same parameters as that of the target '
        f'with {[known.names[key] for key in own[:5]]}, which are {len(own)}: make '
        'both optimizers with the same groups'
    )


def _check_same(given: list[int], wanted: list[int], known: _Names) -> None:
    apart = sorted(known.names[key] for key in {*given} ^ {*wanted})
    if apart:
        raise ValueError(
            f'only one has {apart[:5]}, of {len(given)} parameters in the state dict '
            f'and {len(wanted)} in the target: make both optimizers of the same ones'
        )


def _check_state(state: Mapping[str, Any], parameter: Tensor, name: str) -> None:
    for key, value in state.items():
        if isinstance(value, (dict, list)):
            raise ValueError(
                f'the optimizer keeps a {type(value).__name__} as {key!r}, which may '
                'be of all parameters in their order, as that of LBFGS is; make the '
                'optimizer of the parameters of the model, in the same order'
            )
        if (
            isinstance(value, Tensor)
            and value.dim() == parameter.dim()
            and any(a not in (1, b) for a, b in zip(value.shape, parameter.shape))
        ):
            raise ValueError(
                f'{key!r} of {name!r} has shape {tuple(value.shape)}, but the '
                f'parameter {tuple(parameter.shape)}: the source is not made as the '
                'optimizer that the state dict is of'
            )
