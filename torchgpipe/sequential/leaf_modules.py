"""Modules that a recording keeps whole: PyTorch's own layers, and leaves of the user."""

import dis
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

#: A name in the model (``*`` matches anything), a class, or the module itself.
LeafLike = str | type[nn.Module] | nn.Module

# Classes of containers, whose use of their layers is unknown or completely known.
_CONTAINERS = (
    nn.Module,
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)


def leaf_names(root: nn.Module, leaves: LeafLike | Iterable[LeafLike]) -> set[str]:
    """Return the names of the user's leaves, which copies of the model have as well.

    Raises:
        TypeError: A leaf is neither a name, a class nor a module.
        ValueError: The model has no such module, or it is the model itself.
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
            raise TypeError(
                f'a leaf is the name of a submodule, a class or a module, not {leaf!r}'
            )
        if not names:
            raise ValueError(
                f'the model has no submodule {leaf!r} that could be a leaf; its own '
                f'are {[name for name, _ in root.named_children()]}, and those in '
                'them'
            )
        found.update(names)
    return found


class LeafModules:
    """The modules that are leaves, which are called as one module and not looked into."""

    def __init__(self, root: nn.Module, names: Iterable[str], classes: dict[type, str]) -> None:
        self._root = root
        self._modules = {root.get_submodule(name) for name in names}
        self._classes = classes

    def named(self, module: nn.Module) -> bool:
        """Return whether the user named a module, or the conversion needs it as a leaf."""
        return module in self._modules or type(module) in self._classes

    def __contains__(self, module: nn.Module) -> bool:
        if module is self._root:
            return False
        return self.named(module) or _is_layer(module) or _is_more_than_its_forward(module)

    def wholes(self, seconds: Mapping[str, float]) -> list['Whole']:
        """Return the leaves, except PyTorch's own layers, the largest first.

        ``seconds`` has the times of modules' calls by name, and of all other steps by ``''``.
        """
        names = {module: name for name, module in self._root.named_modules()}
        time = sum(seconds.values())
        found = [
            Whole(
                names[module],
                type(module).__name__,
                _share(module, self._root),
                why,
                module not in self._modules and holds_most(module, self._root),
                seconds.get(names[module], 0) / time if time else None,
            )
            for outer in modules_within(self._root, self)
            for module in outer.children()
            for why in [self._why(module)]
            if why
        ]
        return sorted({*found}, key=lambda each: (-each.share, each.name))

    def _why(self, module: nn.Module) -> str:
        if module in self._modules:
            return 'it is named as a leaf'
        if type(module) in self._classes:
            return self._classes[type(module)]
        if _is_more_than_its_forward(module):
            return (
                'it has backward hooks, more in its state dict, or hooks for that, or is scripted'
            )
        return ''


class Whole(NamedTuple):
    """A module that a conversion did not look into: its name, class, shares, and the reason."""

    name: str
    kind: str
    #: Its share of the model's parameters.
    share: float
    why: str
    #: Whether it has most of the model, and the user did not name it.
    warns: bool
    #: Its share of the time of one forward, measured once; ``None`` without a sample or values.
    time: float | None

    def __str__(self) -> str:
        time = '' if self.time is None else f' and {self.time:.0%} of the time'
        return (
            f"'{self.name}' ({self.kind}) stays whole, with {self.share:.0%} of the parameters"
            f'{time}: {self.why}'
        )


def _share(module: nn.Module, root: nn.Module) -> float:
    return _size(module) / max(_size(root), 1)


def _size(module: nn.Module) -> int:
    return sum(x.numel() for x in module.parameters() if not is_lazy(x))


def holds_most(module: nn.Module, root: nn.Module, share: float = 0.5) -> bool:
    """Return whether a module has submodules and more than a share of the model's parameters."""
    return _share(module, root) > share and any(x is not module for x in module.modules())


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module's class is a PyTorch layer, or derived from one."""
    for cls in type(module).__mro__:
        if cls in _CONTAINERS:
            return False
        if cls.__module__.startswith('torch.nn.'):
            return True
    return False


def _is_more_than_its_forward(module: nn.Module) -> bool:
    """Return whether a module has behaviour that a recording of its forward would miss."""
    return (
        isinstance(module, ScriptModule)
        or bool(module._backward_hooks)
        or bool(module._backward_pre_hooks)
        or bool(getattr(module, 'communicates', False))
        or bool(module._state_dict_hooks)
        or not all(map(is_about_names, module._load_state_dict_pre_hooks.values()))
        or type(module).get_extra_state is not nn.Module.get_extra_state
    )


def is_about_names(hook: Any) -> bool:
    """Return whether a hook for loading uses the state dict alone, and not its module.

    Such a hook also works for layers that have parts of the module. It is a function, or a method
    that does not use ``self``, without variables of an enclosing function.
    """
    function = getattr(hook.hook, '__func__', hook.hook)
    if hook.with_module or not isinstance(function, FunctionType) or function.__closure__:
        return False
    if function is hook.hook:
        return True
    own = function.__code__.co_varnames[:1]
    return not any(
        each.argval in own or (isinstance(each.argval, tuple) and own[0] in each.argval)
        for each in dis.get_instructions(function)
    )


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
