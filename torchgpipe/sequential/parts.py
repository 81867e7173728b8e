"""Parts of a model: a few of its submodules, parameters and buffers, under their own names.

::

    model                                   the part with blocks.0.norm and table
    ├── embed                               ├── table            the same parameter
    ├── table            a parameter        └── blocks           another module, of the same name
    └── blocks                                  └── 0
        ├── 0: norm, attend                         └── norm     the same module
        └── 1: norm, attend
"""
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

__all__ = ['Part', 'all_names', 'left_out', 'put']


class Part(nn.Module):
    """A part of a module, which has its methods and its attributes.

    Args:
        module: The module.
        attributes: Whether it has its attributes.
    """

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


def part_of(module: nn.Module, attributes: bool = False) -> Part:
    """Give an empty part of a module."""
    return (_PartOfList if hasattr(module, '__getitem__') else Part)(module, attributes)


def put(part: nn.Module, root: nn.Module, names: Iterable[str], attributes: bool = False
        ) -> None:
    """Put what is called by some names in a model into a part of it.

    Args:
        part: The part.
        root: The model.
        names: Names of submodules, parameters, buffers, or of an attribute such as ``training``,
            for whose sake the module that has it is there.
        attributes: Whether modules of which only a part is there have their attributes.
    """
    for name in names:
        path, _, last = name.rpartition('.')
        source, target = root, part
        for atom in filter(None, path.split('.')):
            source = source._modules[atom]  # type: ignore[assignment]
            if target._modules.get(atom) is source:
                break  # It is there as a whole.
            if atom not in target._modules:
                target._modules[atom] = part_of(source, attributes)
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
    """Give all names of each submodule, parameter and buffer, by the place of the object.

    Names within a module are those behind its first one.
    """
    found: dict[int, list[str]] = {}
    for prefix, module in root.named_modules():
        for kind in ('_parameters', '_buffers', '_modules'):
            for name, value in getattr(module, kind).items():
                if value is not None:
                    found.setdefault(id(value), []).append(f'{prefix}.{name}' if prefix else name)
    return found


def _tensors(module: nn.Module) -> list[str]:
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return [*{**module.state_dict(), **buffers}]


def left_out(root: nn.Module, parts: Iterable[nn.Module]) -> list[str]:
    """Give the names of what a model has in its state dict or its buffers, and no part of it; of
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
