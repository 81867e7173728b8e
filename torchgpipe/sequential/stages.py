"""Stages: a sequential module by hand, of functions that use a model's submodules.

Each function is called once with the sample to see what of the model it uses; that is what its
layer holds, under the names of the model: [Note: Names of a converted model].
"""
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from torchgpipe.sequential.effects import copied, copied_value, without_grad
from torchgpipe.sequential.layer import called_with
from torchgpipe.sequential.parts import (Converted, NamedLayer, Part, all_names, converted, put,
                                         with_all_names)
from torchgpipe.sequential.patches import watched

__all__ = ['StageLike', 'make_stages']

#: A function of a model and a value, or a submodule, which is a function of a value.
StageLike = Callable[..., Any] | nn.Module


class Stage(Part, NamedLayer):
    """Call a function with a part of a model, which is this layer itself."""

    def __init__(self, root: nn.Module, function: Callable[..., Any], names: Iterable[str]
                 ) -> None:
        super().__init__(root, attributes=True)
        self._function = function
        put(self, root, names, attributes=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the function does."""
        return self._function(self, *args, **kwargs)

    def _get_name(self) -> str:
        return f'Stage({getattr(self._function, "__name__", type(self._function).__name__)})'


class _Call:
    """Call a submodule by its name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return model.get_submodule(self.__name__)(*args, **kwargs)


def make_stages(module: nn.Module, stages: Iterable[StageLike], sample: Any) -> Converted:
    """Return the sequential module, without comparing it: see :func:`from_stages`."""
    names = all_names(module)
    args, kwargs = copied_value(called_with(sample))
    root = copied(module)  # It runs, and may be changed.
    layers: list[nn.Module] = []
    for stage in stages:
        function = _function(module, stage)
        value, uses = _used(root, function, args, kwargs)
        layers.append(stage if isinstance(stage, nn.Module) and not isinstance(function, _Call)
                      else Stage(module, function, with_all_names(module, uses, names)))
        args, kwargs = (value,), {}
    return converted(layers, module, attributes=True)


def _function(module: nn.Module, stage: StageLike) -> Callable[..., Any]:
    if not isinstance(stage, nn.Module):
        if not callable(stage):
            raise TypeError('a stage is a function of the model and a value, or a submodule, not '
                            f'{stage!r}')
        return stage
    name = next((name for name, each in module.named_modules() if each is stage and name), '')
    if name:
        return _Call(name)
    if any(True for _ in (*stage.parameters(), *stage.buffers())):
        raise ValueError('a stage is a submodule of the model, or a function of it, but this '
                         f'{type(stage).__name__}, which has parameters, is not in it')
    return lambda _, *args: stage(*args)


def _used(root: nn.Module, function: Callable[..., Any], args: tuple[Any, ...],
          kwargs: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return what a function gives for a model, and the names of what it uses."""
    uses = _Uses(root)
    with watched(uses):
        uses.watches = True
        try:
            return without_grad(lambda _: function(root, *args, **kwargs)), [*uses.names]
        finally:
            uses.watches = False


class _Uses:
    """Note which submodules are called, and which parameters and buffers are read."""

    def __init__(self, root: nn.Module) -> None:
        self.watches = False
        self.names: dict[str, None] = {}
        self._paths = {module: f'{name}.' if name else '' for name, module in root.named_modules()}

    def called(self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...],
               kwargs: dict[str, Any]) -> Any:
        """Note a submodule that is called; what it uses goes with it."""
        if self._paths.get(module):
            self.names.setdefault(self._paths[module][:-1])
        self.watches = False
        try:
            return run(module, *args, **kwargs)
        finally:
            self.watches = True

    def read(self, module: nn.Module, name: str, found: Any) -> Any:
        """Note a parameter or a buffer; or a submodule, for the sake of its attributes."""
        if isinstance(found, nn.Module) and found in self._paths:
            self.names.setdefault(f'{self._paths[found]}training')
        elif isinstance(found, Tensor) and module in self._paths:
            self.names.setdefault(self._paths[module] + name)
        return found
