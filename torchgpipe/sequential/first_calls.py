"""What a first call leaves on the modules of a model, and whether later ones do the same.

[Note: What a first call may leave]
A model may set flags and register hooks in its first call, as those of Hugging Face do to give
hidden states. What is recorded is such a call. A flag that it sets is no value of the recording,
so it goes by nothing but what is guarded. Then the forward is recorded again, from there. If the
graph is the same, and nothing else is left, each later call does the same. What is left has to be
the same wherever the forward is recorded, in both modes and for one sample, so that calls may come
in any order. Tensors, objects and what containers hold are refused, as is all that changes again.
Layers have nothing of it. So leaf modules may not: a flag on one is refused, as is a leaf that
leads to other modules, and a hook on one is run by the recording, behind the leaf. As the model
itself, once it is called, has that hook on the leaf that layers have, it may compute nothing.
"""
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Optional

from torch import nn

from torchgpipe.engine.checkpoint.attributes import SIMPLE, attributes_of, contents_of
from torchgpipe.private import HOOKS, hooks_of
from torchgpipe.sequential.effects import ids_within
from torchgpipe.sequential.errors import ConversionError, refused

__all__ = ['CALL_IT_BEFORE', 'Leavings']

CALL_IT_BEFORE = ('. If only its first call does that, as for a cache, call the model once '
                  'before')

#: What modules have, by their names and that of the attribute, so that two can be compared.
State = dict[tuple[str, str], Any]


class Leavings:
    """What the recording of a call leaves on the modules of a model.

    Args:
        root: The model.
        looked_into: The modules of it whose forwards are recorded; all others are of leaves.
        first: Those of the first call, if this is another one.

    Attributes:
        found: Which flags and hooks are other ones at its end, and which they are.
    """

    def __init__(self, root: nn.Module, looked_into: Iterable[nn.Module],
                 first: Optional['Leavings'] = None) -> None:
        self.found: State = {}
        self._root = root
        self._paths = {module: path for path, module in root.named_modules()}
        self._looked_into = dict.fromkeys(looked_into)
        self._known: set[int] = first._known if first else {*_hook_ids(self._paths)}
        self._error: Callable[[], ConversionError] | None = None
        self._before, self._contents = self._state(), self._contents_now()

    def may_set(self, module: nn.Module, name: str, value: Any,
                error: Callable[[], ConversionError]) -> bool:
        """Return whether a call may set an attribute of a module, if that goes on being so.

        Otherwise there will be that error.
        """
        self._error = self._error or error
        tensors = (module._parameters, module._buffers, module._modules, ('training',))
        return (type(value) in SIMPLE and module in self._looked_into
                and not any(name in each for each in tensors))

    def end(self) -> None:
        """See what is left when the call is over.

        Raises:
            ConversionError: A container has changed.
        """
        for (path, name), now in self._contents_now().items():
            old = self._contents.get((path, name), [])
            if len(now) != len(old) or any(a is not b for a, b in zip(now, old)):
                raise refused(
                    self._root, f"it changes what is in the attribute '{name}' of a module, which "
                    'each micro-batch would do again', '  (a list, a dict or the like)',
                    path or None, more='' if old else CALL_IT_BEFORE)
        state = self._state()
        self.found = {key: state.get(key) for key in {**self._before, **state}
                      if state.get(key) != self._before.get(key)}

    def check(self, again: 'Leavings', other: State, are_same: bool) -> None:
        """See that a call leaves what any other one has left, and the next one does the same.

        Raises:
            ConversionError: It does not.
        """
        leaves = [module for module in self._paths if module not in self._looked_into]
        reached = {*map(id, self._looked_into)} & {*ids_within(leaves)}
        if again.found or self.found != other or not are_same or reached:
            names = ', '.join(f"'{name}' of '{path}'" for path, name in {**other, **self.found})
            raise self._error() if self._error else refused(
                self._root, 'a call changes what modules have, which each micro-batch would do '
                'again', f'  ({names})', None, more=CALL_IT_BEFORE)

    def hooks_on(self, leaf: nn.Module) -> dict[int, Any] | None:
        """Return the forward hooks that a leaf module got; ``None`` if there are others by them.
        """
        new = [key for key in _hook_ids(leaf.modules()) if key not in self._known]
        own = {key: hook for key, hook in leaf._forward_hooks.items() if key in new}
        last = [*leaf._forward_hooks][len(leaf._forward_hooks) - len(own):]
        return own if len(new) == len(own) and last == [*own] else None

    @contextmanager
    def without_hooks(self, leaf: nn.Module) -> Iterator[None]:
        """Let a leaf module run without the hooks that it got; it may register some itself."""
        own = self.hooks_on(leaf) or {}
        for key in own:
            del leaf._forward_hooks[key]
        try:
            yield
        finally:
            self._known.update(_hook_ids(leaf.modules()))
            leaf._forward_hooks.update(own)

    def _contents_now(self) -> State:
        return {(self._paths[module], name): contents for module in self._looked_into
                for name, value in attributes_of(module).items()
                for contents in [contents_of(name, value)] if contents is not None}

    def _state(self) -> State:
        flags = {(self._paths[module], name): _form(value) for module in self._looked_into
                 for name, value in attributes_of(module).items() if type(value) in SIMPLE}
        hooks = {(path, kind): [_form(each) for key, each in registered.items()
                                if key not in self._known]
                 for module, path in self._paths.items()
                 for kind, registered in zip(HOOKS, hooks_of(module))}
        return {**flags, **{key: forms for key, forms in hooks.items() if forms}}


def _hook_ids(modules: Iterable[nn.Module]) -> Iterator[int]:
    for module in modules:
        for registered in hooks_of(module):
            yield from registered


def _form(value: Any) -> Any:
    """Return what is the same for functions of the same code, with the same plain variables."""
    if isinstance(value, FunctionType):
        variables = [each.cell_contents for each in value.__closure__ or ()]
        variables += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return value.__code__, [*map(_form, variables)]
    return (type(value), value) if type(value) in SIMPLE else object()
