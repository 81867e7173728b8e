"""Attributes of a module other than parameters and buffers: detect changes, and restore them.

An attribute can be put back if it is a number, a string and the like, a tensor, or one of Python's
containers, of any nesting; of a container, which things it holds, but not what these are made of.
"""
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.base.structure import versions

__all__ = ['OWN', 'SIMPLE', 'Attributes', 'are_same', 'attributes_of', 'contents_of',
           'copy_of_container', 'may_be_mutated', 'state_of']

#: Attributes of a module that are looked at by themselves.
OWN = ('_buffers', '_parameters', 'training')

#: What is put back as it was.
SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (list, set, deque, *_MAPPINGS)

#: Values by their names.
Attributes = dict[str, Any]

# Hooks and children, which a module has anyway, are the user's to change.
_EVERY = frozenset(vars(nn.Module()))


def attributes_of(module: nn.Module) -> Attributes:
    """Return the attributes of a module but for its parameters and buffers."""
    return {name: value for name, value in module.__dict__.items() if name not in OWN}


def contents_of(name: str, value: Any) -> list[Any] | None:
    """Return what a container holds; ``None`` for all that is none."""
    if name in _EVERY:
        return None
    if type(value) not in _CONTAINERS:
        return None
    found: list[Any] = []
    _copy(value, {}, found)
    return found


def copy_of_container(value: Any) -> Any:
    """Copy a container, and those in it, but not what else they hold."""
    return _copy(value, {}, [])


def _copy(value: Any, copies: dict[int, Any], found: list[Any]) -> Any:
    """Copy a container, once each; list all that is found."""
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
    """Return whether attributes have changed, or may change in a way that can't be seen.

    Args:
        before: The attributes.
        contents: What containers among them held.
        after: The attributes now.
    """
    if before.keys() != after.keys():
        return True
    return any(isinstance(value, Tensor) or after[name] is not value
               or not are_same(contents.get(name), contents_of(name, value))
               for name, value in before.items())


def state_of(module: nn.Module) -> list[Any]:
    """Return what a module holds, with the versions of tensors: for :func:`are_same`, later."""
    values = attributes_of(module)
    found = [*module._parameters.values(), *module._buffers.values(), *values.values()]
    found += [x for name, value in values.items() for x in contents_of(name, value) or ()]
    return [*found, *versions([x for x in found if isinstance(x, Tensor)])]


def are_same(a: list[Any] | None, b: list[Any] | None) -> bool:
    """Return whether two lists hold the very same objects."""
    if a is None or b is None:
        return a is b
    # Indices are made anew each time.
    return len(a) == len(b) and all(x is y or (type(x) is int and x == y) for x, y in zip(a, b))
