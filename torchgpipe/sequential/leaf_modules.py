"""Which modules a recording does not look into: PyTorch's own layers, and those that are named."""
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn
from torch.jit import ScriptModule

__all__ = ['LeafLike', 'LeafModules', 'leaf_names', 'modules_within']

#: A name in the model, where ``*`` stands for anything, a class, or the module itself.
LeafLike = str | type[nn.Module] | nn.Module

# What has layers in it, and of what it does with them nothing is known, or all.
_CONTAINERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList,
               nn.ParameterDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)


def leaf_names(root: nn.Module, leaves: LeafLike | Iterable[LeafLike]) -> set[str]:
    """Return the names of the leaves that the user wants: copies of the model have these, too.

    Raises:
        TypeError: One of these is something else.
        ValueError: The model has no such module, or it is the model.
    """
    inner = {name: module for name, module in root.named_modules(remove_duplicate=False) if name}
    found: set[str] = set()
    for leaf in [leaves] if isinstance(leaves, (str, type, nn.Module)) else leaves:
        if isinstance(leaf, str):
            names = [name for name in inner if fnmatchcase(name, leaf)]
        elif isinstance(leaf, nn.Module):
            names = [name for name, module in inner.items() if module is leaf]
        elif isinstance(leaf, type) and issubclass(leaf, nn.Module):
            names = [name for name, module in inner.items() if isinstance(module, leaf)]
        else:
            raise TypeError('a leaf is the name of a submodule, a class or a module, not '
                            f'{leaf!r}')
        if not names:
            raise ValueError(f'the model has no submodule {leaf!r} that could be a leaf; its own '
                             f'are {[name for name, _ in root.named_children()]}, and those in '
                             'them')
        found.update(names)
    return found


class LeafModules:
    """Which modules are leaves: called as one module, and not looked into.

    Args:
        root: The model, which never is one.
        names: Those that the user names.
        classes: Classes of modules that were found to have to be leaves.
    """

    def __init__(self, root: nn.Module, names: Iterable[str], classes: set[type]) -> None:
        self._root = root
        self._modules = {root.get_submodule(name) for name in names}
        self._classes = classes

    def named(self, module: nn.Module) -> bool:
        """Return whether the user named a module, or it was found that it has to be one."""
        return module in self._modules or type(module) in self._classes

    def __contains__(self, module: nn.Module) -> bool:
        if module is self._root:
            return False
        return self.named(module) or _is_layer(module) or _is_more_than_its_forward(module)


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module is a layer of PyTorch's, or derived from one."""
    for cls in type(module).__mro__:
        if cls in _CONTAINERS:
            return False
        if cls.__module__.startswith('torch.nn.'):
            return True
    return False


def _is_more_than_its_forward(module: nn.Module) -> bool:
    """Return whether a module does what a recording of its forward would miss."""
    return (isinstance(module, ScriptModule) or bool(module._backward_hooks)
            or bool(module._backward_pre_hooks) or bool(getattr(module, 'communicates', False))
            or bool(module._state_dict_hooks)
            or type(module).get_extra_state is not nn.Module.get_extra_state)


def modules_within(root: nn.Module, leaves: LeafModules) -> Iterator[nn.Module]:
    """Yield the modules that a recording looks into, the root first, each once."""
    seen = {root}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        yield module
        for child in module.children():
            if child not in seen and child not in leaves:
                seen.add(child)
                waiting.append(child)
