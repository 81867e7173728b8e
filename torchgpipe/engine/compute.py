"""Run a partition's layers, and name the culprit when one fails.

An error keeps its type and its traceback, which leads into the layer. What it lacks is which of
the many cells it came from, so it gains a note (PEP 678)::

    RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 9x9)
    in partition 1 on cuda:1, micro-batch 0 of 4, layer '3'
"""
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from types import FunctionType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.aliases import Value
from torchgpipe.context import context
from torchgpipe.engine.batch import Batch, check
from torchgpipe.engine.observer import Observer
from torchgpipe.engine.remedies import add_remedy
from torchgpipe.errors import add_note
from torchgpipe.skip.tracker import SkipTracker, use_skip_tracker
from torchgpipe.structure import Arguments, call

__all__ = ['Compute', 'Sequential']


class Sequential(nn.Sequential):
    """A partition: a sequential module whose first layer may take several arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call each layer with what the layer before gave, the first one with the arguments."""
        first = True
        value: Any = None
        for module in self:
            value = module(*args, **kwargs) if first else module(value)
            first = False
        return value

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the layers together, with the arguments of :func:`torch.compile`."""
        # PyTorch gives up a loop for one layer that it can not compile.
        runs = [partial(torch.compile(_own_code(_run), *args, **kwargs), self, tuple(names))
                for _, names in groupby(self._modules, self._is_compilable)]
        self.forward = partial(_run_all, runs)  # type: ignore[method-assign]

    def _is_compilable(self, name: str) -> bool:
        return not hasattr(self._modules[name].forward, '_torchdynamo_disable')

    def __getstate__(self) -> dict[str, Any]:
        # A copy is not compiled, as PyTorch has it with each module.
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {name: value for name, value in state.items() if name != 'forward'}


def _run(partition: Sequential, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """Do what the forward does, for some of the layers."""
    name, *others = names
    value = partition._modules[name](*args, **kwargs)
    for name in others:
        value = partition._modules[name](value)
    return value


def _own_code(function: Any) -> Callable[..., Any]:
    """Copy a function: PyTorch counts how often it has compiled a code, and soon gives up."""
    return FunctionType(function.__code__.replace(), function.__globals__)


def _run_all(runs: Sequence[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
    run, *others = runs
    value = run(*args, **kwargs)
    for run in others:
        value = run(value)
    return value


class Compute:
    """The layers of a partition as a function, for a first pass and for its recomputation.

    The autograd graph holds it, through checkpoints, so it must not hold any tensor of the graph.

    Args:
        j: Index of the partition.
        partition: Its layers.
        device: Its device.
    """

    __slots__ = ('device', 'j', 'observer', 'partition')

    def __init__(self, j: int, partition: nn.Sequential, device: torch.device) -> None:
        self.j = j
        self.partition = partition
        self.device = device
        #: Who is told of each run, if anyone.
        self.observer: Observer | None = None

    def __call__(self, i: int, m: int, tracker: SkipTracker | None, value: Value
                 ) -> Value:
        """Compute micro-batch ``i`` of ``m``.

        Args:
            i: Its index.
            m: How many there are.
            tracker: Where its skips are, if any come from or go to another partition.
            value: Its value.
        """
        end = None if self.observer is None else self.observer.cell(
            i, m, self.j, value, [] if tracker is None else [*tracker.tensors.values()])
        outside, context.skips = context.skips, tracker
        grad = torch.is_grad_enabled()
        try:
            # By hand, not by `call`: each Python call counts here.
            output = (self.partition(*value.args, **value.kwargs) if type(value) is Arguments
                      else self.partition(value))
            if torch.is_grad_enabled() is not grad:
                raise _left_grad_mode(grad)
        except Exception as error:
            layer = _failing_layer(self.partition, error.__traceback__)
            add_note(error, self._where(i, m, layer))
            add_remedy(error, self.j, m)
            raise
        finally:
            context.skips = outside
        try:
            if not isinstance(output, Tensor):
                check(output)
        except TypeError as error:
            add_note(error, self._where(i, m, next(reversed(self.partition._modules))))
            raise
        if end is not None:
            end(output)
        return output

    def blame(self, value: Value) -> str:
        """Say which layer changed the input of a checkpointed cell in place.

        Where the input requires grad, autograd says so. Where it does not, a recomputation would
        get what the first pass has changed.
        """
        layer = _changing_layer(self.partition, value)
        name = 'a layer' if layer is None else f"layer '{layer}'"
        return (f'{name} of partition {self.j} on {self.device} changed the input of the '
                'partition in place, and the partition is checkpointed: its recomputation started '
                'from the changed input, so gradients would be wrong. Use an operation that is '
                'not in place there (inplace=False), let the partition begin with another layer, '
                "or use checkpoint='never'.")

    def _where(self, i: int, m: int, layer: str | None) -> str:
        where = f'in partition {self.j} on {self.device}, micro-batch {i} of {m}'
        return where if layer is None else f"{where}, layer '{layer}'"


def _left_grad_mode(grad: bool) -> RuntimeError:
    torch.set_grad_enabled(grad)
    return RuntimeError(f'the layers of a partition left grad mode {"off" if grad else "on"}, as '
                        'torch.set_grad_enabled does. What runs after them, and in which thread, '
                        'is not what comes after them in the model. Use it as a context: with '
                        'torch.set_grad_enabled(…): …')


def _failing_layer(partition: nn.Module, traceback: TracebackType | None) -> str | None:
    """Find the layer that was running, in the frames of the error: free while all goes well."""
    forwards: Any = nn.Sequential.forward.__code__, Sequential.forward.__code__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code in forwards and frame.f_locals.get('self') is partition:
            return _name(partition, frame.f_locals.get('module'))
        traceback = traceback.tb_next
    return None


def _name(partition: nn.Module, layer: Any) -> str | None:
    # One layer may stand in several places, and the frame does not say in which it was running.
    names = [name for name, child in partition._modules.items() if child is layer]
    return "' or '".join(names) if names else None


def _changing_layer(partition: nn.Sequential, value: Value) -> str | None:
    """Find the layer that changes the partition's input in place, by running them on a copy."""
    batch = Batch(value)
    tensors = tuple(x.detach().clone() for x in batch)
    output = batch.kind(tensors)
    with torch.no_grad(), use_skip_tracker(SkipTracker()):
        for name, layer in partition._modules.items():
            try:
                output = call(layer, output)
            except RuntimeError:  # It does not run by itself.
                return None
            if any(x._version for x in tensors):
                return name
    return None
