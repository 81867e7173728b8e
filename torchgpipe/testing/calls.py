"""Calls of the modules in a model: what went in, what came out, and what else happened."""
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.structure import leaves_of

__all__ = ['Call', 'Calls']


@dataclass
class Call:
    """A call of a module.

    Attributes:
        name: The module's name in the model.
        module: The module.
        inputs: Copies of the tensors among its arguments.
        outputs: Copies of the tensors that it gave.
        drew: Whether it drew random numbers, and not by way of a module within it.
        changed: Whether it changed an input in place.
    """

    name: str
    module: nn.Module
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor] = ()
    drew: bool = False
    changed: bool = False
    states: Sequence[Tensor] = field(default=(), repr=False)
    inner_drew: bool = False


class Calls:
    """Watch a model's modules, as a context; afterwards :attr:`list` has the calls by their ends.

    Args:
        model: The model. It runs in one thread.
        device: Where, beside the CPU, it may draw random numbers.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._open: list[Call] = []
        self._hooks: list[Any] = []
        self.list: list[Call] = []

    def __enter__(self) -> 'Calls':
        self._names = {module: name for name, module in self._model.named_modules() if name}
        for module in self._names:
            self._hooks += [module.register_forward_pre_hook(self._begin, with_kwargs=True),
                            module.register_forward_hook(self._end, with_kwargs=True)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._open.append(Call(self._names[module], module, _copies((args, kwargs)),
                               states=self._states()))

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._open.pop()
        call.outputs = _copies(output)
        call.changed = not _equal(call.inputs, _copies((args, kwargs)))
        drew = not _equal(call.states, self._states())
        call.drew = drew and not call.inner_drew
        if drew and self._open:
            self._open[-1].inner_drew = True
        self.list.append(call)

    def _states(self) -> list[Tensor]:
        """Give the states of the random generators."""
        device = self._device
        there = [] if device.type == 'cpu' else [
            torch.get_device_module(device).get_rng_state(device)]
        return [torch.get_rng_state(), *there]


def _copies(value: Any) -> list[Tensor]:
    return [leaf.value.detach().clone() for leaf in leaves_of(value)
            if isinstance(leaf.value, Tensor)]


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(some, others))
