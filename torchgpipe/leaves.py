"""Leaves of nested values, and their positions."""
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from torchgpipe.private import tree_flatten, tree_flatten_with_path

__all__ = ['Leaf', 'NoChunk', 'Path', 'attributes', 'is_leaf', 'is_object', 'leaves_of',
           'path_name']

#: Where a leaf is: keys, indices and names of attributes, from the outside to the inside.
Path = tuple[Any, ...]


class NoChunk:
    """Mark a part of an input that all micro-batches share: ``model(x, NoChunk(table))``.

    What is inside, of any nesting, reaches the first layer as it is, without the mark. Its
    gradient is the sum over micro-batches.

    Args:
        value: A tensor of any shape, or a value with tensors in it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f'NoChunk({self.value!r})'


def is_leaf(value: Any) -> bool:
    """Return whether a value is a leaf that pytree would take apart."""
    return isinstance(value, torch.Size)  # which would come back as a tuple


def is_object(value: Any) -> bool:
    """Return whether a value is a dataclass, whose attributes are looked into."""
    return is_dataclass(value) and not isinstance(value, type)


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a dataclass, also those that are no fields."""
    names = dict.fromkeys([field.name for field in fields(value)])
    return {name: getattr(value, name) for name in (names | getattr(value, '__dict__', {}))
            if hasattr(value, name)}


class Leaf:
    """A leaf of a value.

    Attributes:
        path: Where it is.
        value: What is there.
        shared: Whether it is within :class:`NoChunk`.
    """

    __slots__ = ('path', 'shared', 'value')

    def __init__(self, path: Path, value: Any, shared: bool) -> None:
        self.path = path
        self.value = value
        self.shared = shared


def leaves_of(value: Any, path: Path = (), shared: bool = False) -> list[Leaf]:
    """Return all leaves of a value, with their paths, in the order of
    :func:`torchgpipe.structure.flatten`.

    >>> [(path_name(leaf.path), leaf.value) for leaf in leaves_of({'n': (3, NoChunk([4]))})]
    [("['n'][0]", 3), ("['n'][1][0]", 4)]
    """
    found = []
    for keys, leaf in _with_paths(value):
        here = path + keys
        if isinstance(leaf, NoChunk):
            found += leaves_of(leaf.value, here, True)
        elif is_object(leaf):
            named = ((_Attribute(name), x) for name, x in attributes(leaf).items())
            found += [each for name, x in named
                      for each in leaves_of(x, (*here, name), shared)]
        else:
            found.append(Leaf(here, leaf, shared))
    return found


class _Attribute(str):
    """The name of an attribute, in a path."""

    __slots__ = ()


def _with_paths(value: Any) -> list[tuple[Path, Any]]:
    try:
        found, _ = tree_flatten_with_path(value, is_leaf=is_leaf)
    except ValueError:  # A class is registered without names for what is in it.
        leaves, _ = tree_flatten(value, is_leaf=is_leaf)
        return [((k,), leaf) for k, leaf in enumerate(leaves)]
    return [(tuple(_key(entry) for entry in path), leaf) for path, leaf in found]


def _key(entry: Any) -> Any:
    """Return a dict's key, a sequence's index or an attribute's name from a path of pytree's."""
    for name in ('key', 'idx'):
        if hasattr(entry, name):
            return getattr(entry, name)
    return _Attribute(entry.name)


def path_name(path: Path) -> str:
    """Write a path as Python would: ``['labels'][0].x``."""
    return ''.join(f'.{key}' if isinstance(key, _Attribute) else f'[{key!r}]' for key in path)
