"""Submodules, parameters, buffers and optimizer state in layers, by the names of the model.

::

    model                                   the part with blocks.0.norm and table
    ├── embed                               ├── table            the same parameter
    ├── table            a parameter        └── blocks           another module, of the same name
    └── blocks                                  └── 0
        ├── 0: norm, attend                         └── norm     the same module
        └── 1: norm, attend

In the sequential module, the number of a layer is before these names::

    model         blocks.0.norm.weight                  embed.weight
    sequential    3.blocks.0.norm.weight                0.embed.weight, 7.embed.weight
                  ▲
                  the layer: what several layers use has a name in each of them

The number depends on how the model was cut into layers, so it does not count when a state dict is
loaded: names of the model are taken, and those with other numbers.

::

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
from itertools import chain, count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchgpipe.engine.split import Sequential, still_shared
from torchgpipe.sequential.leaf_modules import Whole, is_about_names

__all__ = ['Converted', 'NamedLayer', 'Part', 'all_names', 'converted', 'optimizer_state',
           'original_names', 'put', 'to_own_names', 'with_all_names', 'with_part']


class Part(nn.Module):
    """A part of a module, which has its methods and its attributes if that is wanted."""

    def __init__(self, module: nn.Module, attributes: bool = False) -> None:
        super().__init__()
        self.training = module.training
        self._whole = type(module)
        self._length = len(module._modules)
        self._attributes = {name: value for name, value in module.__dict__.items()
                            if name not in _OF_EACH} if attributes else None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            own = self.__dict__
            if name in (own.get('_attributes') or ()):
                return own['_attributes'][name]
            if own.get('_attributes') is not None and hasattr(own['_whole'], name):
                found = inspect.getattr_static(own['_whole'], name)
                return found.__get__(self, type(self)) if hasattr(found, '__get__') else found
            raise _missing(name, own.get('_whole', type(self))) from None

    def _get_name(self) -> str:
        return self._whole.__name__


class _PartOfList(Part):
    """A part of what has modules by indices: they are those of the whole."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(self._length))]
        name = str(index + self._length if isinstance(index, int) and index < 0 else index)
        return self._modules[name] if name in self._modules else _Absent(name, self._whole)

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])


class _Absent:
    """A module of a list that a part does not have: it can be passed over, and not be used."""

    def __init__(self, name: str, whole: type) -> None:
        self.__dict__.update(_name=name, _whole=whole)

    def __getattr__(self, name: str) -> Any:
        raise _missing(self._name, self._whole)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _missing(self._name, self._whole)


def _missing(name: str, whole: type) -> AttributeError:
    return AttributeError(
        'a stage has those submodules, parameters and buffers of the model that it used with '
        f"the sample, and '{name}' of a {whole.__name__} is none of them")


# What each module has.
_OF_EACH = frozenset(vars(nn.Module()))


def put(part: nn.Module, root: nn.Module, names: Iterable[str], attributes: bool = False
        ) -> None:
    """Put what is called by some names in a model into a part of it.

    These are names of submodules, parameters, buffers, or of an attribute such as ``training``,
    for whose sake the module that has it is there, with its other attributes if that is wanted.
    """
    for name in names:
        path, _, last = name.rpartition('.')
        source, target = root, part
        for atom in filter(None, path.split('.')):
            source = source._modules[atom]  # type: ignore[assignment]
            if target._modules.get(atom) is source:
                break  # It is there as a whole.
            if atom not in target._modules:
                kind = _PartOfList if hasattr(source, '__getitem__') else Part
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

    Names within a module are those behind its first one.
    """
    found: dict[int, list[str]] = {}
    for prefix, module in root.named_modules():
        for kind in ('_parameters', '_buffers', '_modules'):
            for name, value in getattr(module, kind).items():
                if value is not None:
                    found.setdefault(id(value), []).append(f'{prefix}.{name}' if prefix else name)
    return found


def with_all_names(root: nn.Module, uses: Iterable[str], names: dict[int, list[str]]
                   ) -> Iterator[str]:
    """Yield the names in :func:`all_names` of what is called by some; other attributes as is."""
    for name in uses:
        found = attrgetter(name)(root)
        yield from names[id(found)] if isinstance(found, (nn.Module, Tensor)) else [name]


def _tensors(module: nn.Module) -> list[str]:
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return [*{**module.state_dict(), **buffers}]


def _left_out(root: nn.Module, parts: Iterable[nn.Module]) -> list[str]:
    """Return the names of what a model has in its state dict or its buffers, and no part of it; of
    modules if all of a module is left out.
    """
    there = {name for part in parts for name in _tensors(part)}
    names = [name for name in _tensors(root) if name not in there]
    inhabited = {name[:k] for name in there for k, letter in enumerate(name) if letter == '.'}
    found: dict[str, None] = {}
    for name in names:
        ends = [k for k, letter in enumerate(name) if letter == '.']
        found.setdefault(next((name[:k] for k in ends if name[:k] not in inhabited), name))
    return [*found]


#: What a module does to a state dict before it is loaded, and the name of the module.
_LoadHook = tuple[str, Callable[..., None]]


class NamedLayer(nn.Module):
    """A layer that has names of the model that it was made from, and its hooks for loading."""

    _load_hooks: Sequence[_LoadHook] = ()

    #: A copy of the model without values, where that has none: its modules know the initial ones.
    original: nn.Module | None = None


def _load_hooks(root: nn.Module, layers: Iterable[nn.Module]) -> list[_LoadHook]:
    """Return the hooks of modules that no layer has as they are, for a state dict of the model."""
    there = {module for layer in layers for module in layer.modules()}
    found = []
    for name, module in root.named_modules():
        for each in () if module in there else module._load_state_dict_pre_hooks.values():
            if is_about_names(each):
                # Bound to the module, it would take all of it along wherever a layer goes.
                function = getattr(each.hook, '__func__', None)
                found.append((name and f'{name}.',
                              each.hook if function is None else partial(function, None)))
    return found


def with_part(whole: nn.Module, part: nn.Module) -> nn.Module:
    """Return a module like one of the original, with the tensors and modules that a part has."""
    if not isinstance(part, (Part, NamedLayer)):
        return part  # It is in the layer as it is.
    new = type(whole).__new__(type(whole))
    new.__dict__.update(whole.__dict__)
    new._parameters = {**whole._parameters, **part._parameters}
    new._buffers = {**whole._buffers, **part._buffers}
    new._modules = {name: child if child is None or part._modules.get(name) is None
                    else with_part(child, part._modules[name])  # type: ignore[arg-type]
                    for name, child in whole._modules.items()}
    return new


class Converted(Sequential):
    """A sequential module that was made from another module.

    Its layers hold the submodules, parameters and buffers of that module. ``load_state_dict``
    takes the names of the original, too. In ``wholes`` is what was not looked into.
    """
    wholes: Sequence[Whole] = ()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True,
                        assign: bool = False) -> Any:
        """Load a state dict, with names of the original or of layers; what is shared stays so."""
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
    """Return the sequential module of layers; the last one has what no layer uses."""
    put(layers[-1], root, _left_out(root, layers), attributes)
    hooks = _load_hooks(root, layers)
    tensors = [*root.parameters(), *root.buffers()]
    if any(x.is_meta for x in tensors):
        original = deepcopy(root, {id(x): torch.empty_like(x, device='meta') for x in tensors})
        for layer in layers:
            if isinstance(layer, NamedLayer):
                layer.__dict__['original'] = original
    for layer in layers:
        if hooks and isinstance(layer, NamedLayer):
            layer._load_hooks = hooks
    found = Converted(*layers)
    found.training = root.training
    return found


def original_names(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict of the original, of that of a converted model or a ``GPipe`` of it.

    >>> original_names({'0.embed.weight': 1, '7.embed.weight': 1, '7.norm.bias': 2})
    {'embed.weight': 1, 'norm.bias': 2}

    Args:
        state_dict: It has names with the number of a layer before them. Where several layers have
            a parameter in common, the last one's is given.

    Raises:
        ValueError: A name does not begin with a number.
    """
    found = {}
    for key, value in state_dict.items():
        number, _, name = key.partition('.')
        if not number.isdigit() or not name:
            raise ValueError(f"names of a converted model begin with the number of a layer, as in "
                             f"'0.{key}', but this state dict has '{key}'")
        found[name] = value
    return found


def to_own_names(state_dict: dict[str, Any], prefix: str, layers: Mapping[str, nn.Module | None]
                 ) -> None:
    """Rename what is in a state dict to the names that layers have for it, in place.

    A tensor that has several names needs one of them only, as files of safetensors have it.

    Args:
        state_dict: Its names are those of the original, or of layers with other numbers.
        prefix: What stands before them.
        layers: The layers, by their numbers.
    """
    mine = {f'{number}.{name}': x for number, layer in layers.items()
            if isinstance(layer, NamedLayer)
            for name, x in layer.state_dict(keep_vars=True).items()}
    if not mine:
        return
    own: dict[str, list[str]] = {}
    for name in mine:
        own.setdefault(name.partition('.')[2], []).append(name)
    if mine.keys().isdisjoint(key[len(prefix):] for key in state_dict):
        for path, hook in next(layer._load_hooks for layer in layers.values()
                               if isinstance(layer, NamedLayer)):
            hook(state_dict, prefix + path, {}, True, [], [], [])
    given = {key[len(prefix):] for key in state_dict if key.startswith(prefix)}
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
    values = {id(x): state_dict[prefix + name] for name, x in mine.items()
              if isinstance(x, Tensor) and prefix + name in state_dict}
    state_dict.update({prefix + name: values[id(x)] for name, x in mine.items()
                       if prefix + name not in state_dict and id(x) in values})


#: Keys of a group of parameters that are not options.
_PARAMETERS = ('params', 'param_names')


def optimizer_state(state_dict: Mapping[str, Any], module: nn.Module, target: Optimizer,
                    source: Optimizer | None = None) -> dict[str, Any]:
    """Return the state dict of an optimizer as one for another one, whose order is its own.

    One of them is of a model, the other one of what it was converted to.

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
        state_dict: The state dict, with the names of parameters (PyTorch keeps them if an
            optimizer is made of ``named_parameters()``); otherwise say ``source``.
        module: The layers of the converted model, or the ``GPipe`` of them.
        target: The optimizer that it is for.
        source: The optimizer that it is of, or one that was made in the same way. Only its
            parameters count, which may be on the meta device.

    Raises:
        ValueError: Parameters have no names, or they are not those of the model, not the same in
            both, or in other groups; or the optimizer keeps what is of no parameter.
    """
    known = _Names(module)
    saved = state_dict['param_groups']
    given = known.keys(_with_parameters(saved, source), 'the state dict')
    wanted = known.keys(target.param_groups, 'the target')
    _check_same([*chain(*given)], [*chain(*wanted)], known)
    numbers = count()
    groups = [{**_options(own, given, saved, known), 'params': [next(numbers) for _ in own]}
              for own in wanted]
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
    """What the parameters of a converted model are called: in the model, and in layers.

    A key is the id of a parameter.
    """

    def __init__(self, module: nn.Module) -> None:
        #: One name of each.
        self.names: dict[int, str] = {}
        self._keys: dict[str, int] = {}
        for layer in module.children():
            if isinstance(layer, NamedLayer):
                for name, x in layer.named_parameters(remove_duplicate=False):
                    self.names.setdefault(id(x), name)
                    self._keys[name] = id(x)
        if not self.names:
            raise ValueError('names of parameters are those of a converted model: pass the layers '
                             'that to_sequential gave, or the GPipe of these, but not '
                             f'{type(module).__name__}, which has none')

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
                'without, pass source=…, an optimizer that is made as the one that it is of')
        names = [*chain(*(group['param_names'] for group in groups))]
        # Those of the model, or of layers by any numbers.
        found = [each for each in ([*map(self._keys.get, names)], [
            self._keys.get(name.partition('.')[2]) for name in names]) if None not in each]
        if not found or found[0] != found[-1]:
            foreign = [name for name in names
                       if not {name, name.partition('.')[2]} & {*self._keys}]
            raise ValueError(f'{what} has parameters that are not those of the model, or not '
                             f'under its names alone: {(foreign or names)[:5]} of {len(names)}')
        keys = iter(found[0])
        return [[next(keys) for _ in group['params']] for group in groups]  # type: ignore[misc]


def _with_parameters(saved: Iterable[Mapping[str, Any]], source: Optimizer | None
                     ) -> list[Mapping[str, Any]]:
    """Return the groups of a state dict, with parameters if it has no names of these."""
    if source is None or all('param_names' in group for group in saved):
        return [*saved]
    sizes, own = ([len(group['params']) for group in groups]
                  for groups in (saved, source.param_groups))
    if sizes != own:
        raise ValueError(f'the state dict has groups of {sizes} parameters, and the source of '
                         f'{own}: make the source as the optimizer that the state dict is of')
    return [*source.param_groups]


def _options(own: list[int], given: list[list[int]], saved: list[Mapping[str, Any]],
             known: _Names) -> dict[str, Any]:
    """Return the options of the group in a state dict that has the same parameters."""
    for keys, group in zip(given, saved):
        if {*keys} == {*own}:
            return {name: x for name, x in group.items() if name not in _PARAMETERS}
    raise ValueError('the state dict has no group of the same parameters as that of the target '
                     f'with {[known.names[key] for key in own[:5]]}, which are {len(own)}: make '
                     'both optimizers with the same groups')


def _check_same(given: list[int], wanted: list[int], known: _Names) -> None:
    apart = sorted(known.names[key] for key in {*given} ^ {*wanted})
    if apart:
        raise ValueError(f'only one has {apart[:5]}, of {len(given)} parameters in the state dict '
                         f'and {len(wanted)} in the target: make both optimizers of the same ones')


def _check_state(state: Mapping[str, Any], parameter: Tensor, name: str) -> None:
    for key, value in state.items():
        if isinstance(value, (dict, list)):
            raise ValueError(f'the optimizer keeps a {type(value).__name__} as {key!r}, which may '
                             'be of all parameters in their order, as that of LBFGS is; make the '
                             'optimizer of the parameters of the model, in the same order')
        if isinstance(value, Tensor) and value.dim() == parameter.dim() and any(
                a not in (1, b) for a, b in zip(value.shape, parameter.shape)):
            raise ValueError(f'{key!r} of {name!r} has shape {tuple(value.shape)}, but the '
                             f'parameter {tuple(parameter.shape)}: the source is not made as the '
                             'optimizer that the state dict is of')
