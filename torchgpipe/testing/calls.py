"""Calls of the modules in a model: what went in, what came out, and what else happened."""
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """The calls of a model's modules from now on, in :attr:`list`, in the order of their ends.

    Args:
        model: The model. Each call of a module ends in the thread in which it began.
        device: Where, beside the CPU, it may draw random numbers.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._open: dict[int, list[Call]] = defaultdict(list)  # of each thread
        self.list: list[Call] = []
        self._names = {module: name for name, module in model.named_modules() if name}
        for module in self._names:
            module.register_forward_pre_hook(self._begin, with_kwargs=True)
            module.register_forward_hook(self._end, with_kwargs=True)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._open[threading.get_ident()].append(Call(
            self._names[module], module, _copies((args, kwargs)), states=self._states()))

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        outer = self._open[threading.get_ident()]
        call = outer.pop()
        call.outputs = _copies(output)
        call.changed = not _equal(call.inputs, _copies((args, kwargs)))
        drew = not _equal(call.states, self._states())
        call.drew = drew and not call.inner_drew
        if drew and outer:
            outer[-1].inner_drew = True
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
