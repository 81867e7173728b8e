"""Buffers that the constructor of their module computes, from the arguments that it has kept.

::

    class Rotary(nn.Module):
        def __init__(self, width, base=10000.):
            self.width, self.base = width, base                     by their own names
            self.register_buffer('table', …, persistent=False)

    Rotary(width=module.width, base=module.base).table              the numbers of module.table

It is taken for that if what is made so is like the module: on the meta device, attributes are
equal, and buffers have the same names, sizes and types.
"""
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ['computes_buffers', 'constructor_of', 'own_attributes']

_OF_EACH = frozenset(vars(nn.Module()))
#: Arguments that say where and in which type to compute: the buffers have that anyway.
_PLACES = ('device', 'dtype')


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module but for those that each module has."""
    return {name: value for name, value in vars(module).items() if name not in _OF_EACH}


def constructor_of(module: nn.Module) -> Callable[[], nn.Module] | None:
    """Return what makes a module with buffers on the meta device again, if that is known.

    There are no parameters in it: to make these again may take long, and much memory.
    """
    if not any(x is not None and x.is_meta for x in module._buffers.values()) or (
            next(module.parameters(), None) is not None):
        return None
    kept = own_attributes(module)
    names = [*inspect.signature(type(module)).parameters]
    if not all(name in kept or name in _PLACES for name in names):
        return None
    make = partial(type(module), **{name: kept[name] for name in names if name in kept})
    try:
        with torch.device('meta'):
            like = _form_of(make()) == _form_of(module)
    except Exception:  # It has kept something else by the name of an argument.
        return None
    return make if like else None


def computes_buffers(module: nn.Module) -> Callable[[], None] | None:
    """Return what fills the buffers of a module as its constructor does, if that is known.

    A part of a module says by which, as ``_remade_by``.
    """
    make = vars(module).get('_remade_by') or constructor_of(module)
    return None if make is None else lambda: _fill(module, make())


def _form_of(module: nn.Module) -> tuple[dict[str, Any], Any]:
    return own_attributes(module), [(name, x.shape, x.dtype) for name, x in module.named_buffers()]


def _fill(module: nn.Module, other: nn.Module) -> None:
    for name, x in module._buffers.items():
        if x is not None:
            x.copy_(other.get_buffer(name))
