"""Parts of a model: a few of its submodules, parameters and buffers, under their own names.

::

    model                                   the part with blocks.0.norm and table
    ├── embed                               ├── table            the same parameter
    ├── table            a parameter        └── blocks           another module, of the same name
    └── blocks                                  └── 0
        ├── 0: norm, attend                         └── norm     the same module
        └── 1: norm, attend
"""
from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ['Part', 'all_names', 'left_out', 'put']


class Part(nn.Module):
    """A part of a module.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.training = module.training
        self._name = type(module).__name__

    def _get_name(self) -> str:
        return self._name


def put(part: nn.Module, root: nn.Module, names: Iterable[str]) -> None:
    """Put what is called by some names in a model into a part of it.

    Args:
        part: The part.
        root: The model.
        names: Names of submodules, parameters, buffers, or of an attribute such as ``training``,
            for whose sake the module that has it is there.
    """
    for name in names:
        path, _, last = name.rpartition('.')
        source, target = root, part
        for atom in filter(None, path.split('.')):
            source = source._modules[atom]  # type: ignore[assignment]
            if target._modules.get(atom) is source:
                break  # It is there as a whole.
            if atom not in target._modules:
                target._modules[atom] = Part(source)
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


def left_out(root: nn.Module, parts: Iterable[nn.Module]) -> list[str]:
    """Give the names of what a model has in its state dict, and no part of it; of modules if all
    of a module is left out.
    """
    there = {name for part in parts for name in part.state_dict()}
    names = [name for name in root.state_dict() if name not in there]
    inhabited = {name[:k] for name in there for k, letter in enumerate(name) if letter == '.'}
    found: dict[str, None] = {}
    for name in names:
        ends = [k for k, letter in enumerate(name) if letter == '.']
        found.setdefault(next((name[:k] for k in ends if name[:k] not in inhabited), name))
    return [*found]
