"""Marks: start and end of an action on a device, and their places in the autograd graph.

Points in time are those of the clock on the CPU, and of events in streams on accelerators.
"""
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.base.devices import CPU, is_cpu
from torchgpipe.base.private import at_end_of_backward, backward_pass
from torchgpipe.engine.streams import (AbstractStream, CPUStream, as_accelerator, get_device,
                                       is_accelerator)
from torchgpipe.schedule.schedule import Action

__all__ = ['CellBackward', 'CpuBackward', 'Mark', 'Stamp', 'last_nodes', 'nodes_between',
           'producers', 'seconds', 'stamp']

#: A device, and seconds or an event in a stream of that device.
Stamp = tuple[torch.device, Any]


def stamp(stream: AbstractStream) -> Stamp:
    """Mark now: on the CPU, or when a stream gets there."""
    if not is_accelerator(stream):
        return CPU, time.perf_counter()
    event = torch.Event(get_device(stream), enable_timing=True)
    event.record(as_accelerator(stream))
    return get_device(stream), event


def seconds(start: Stamp, end: Stamp) -> float:
    """Return the time between two points on one device, which is through with both."""
    device, point = end
    length: float = (point - start[1] if is_cpu(device)
                     else start[1].elapsed_time(point) / 1e3)
    return length


class Mark(NamedTuple):
    """An action between two points in time."""

    action: Action
    start: Stamp
    end: Stamp


class CellBackward:
    """The backward of a cell in the making: when its nodes run on an accelerator, or in a step."""

    def __init__(self, i: int, j: int, stream: AbstractStream) -> None:
        self.action = Action(j, 'B', i)
        self.stream = stream
        #: Where it began and ended, several times if the graph is gone through again.
        self.begins: list[Stamp] = []
        self.ends: list[Stamp] = []

    def begin(self, *_: Any) -> None:
        """Take note that a node begins, if none has since the end."""
        if len(self.begins) == len(self.ends):
            self.begins.append(stamp(self.stream))

    def end(self, *_: Any) -> None:
        """Take note that a node ends that may be the last one."""
        self.ends[len(self.begins) - 1:] = [stamp(self.stream)]

    def marks(self) -> list[Mark]:
        """Return what has begun and ended."""
        return [Mark(self.action, *pair) for pair in zip(self.begins, self.ends)]


class CpuBackward:
    """For which cell the CPU's thread runs nodes in backward, one after the other.

    Args:
        add: Takes note of the end of a span.
    """

    def __init__(self, add: Callable[[Mark], None]) -> None:
        self._add = add
        self._span: tuple[Action, Stamp] | None = None
        #: The backward pass, which may have failed since, and then has not come to its end.
        self._pass = -1

    def run(self, action: Action) -> None:
        """Let the thread work for an action from now on: one of its nodes is about to run."""
        if backward_pass() != self._pass:
            self._pass, self._span = backward_pass(), None
            at_end_of_backward(self.end)
        if self._span is None or self._span[0] != action:
            self.end()
            self._span = action, stamp(CPUStream)

    def interrupt(self) -> None:
        """Let the thread do something else, until the next node runs."""
        if backward_pass() == self._pass:
            self.end()

    def end(self) -> None:
        """End what the thread works for."""
        if self._span is not None:
            self._add(Mark(*self._span, stamp(CPUStream)))
            self._span = None


#: The node that takes a gradient out of a call, into a parameter.
EXIT = 'torch::autograd::AccumulateGrad'


def producers(tensors: Iterable[Tensor]) -> set[Any]:
    """Return the nodes that tensors come from, and ``None`` for those that come from nowhere."""
    return {None, *(tensor.grad_fn for tensor in tensors)}


def nodes_between(before: set[Any], last: set[Any]) -> list[Any]:
    """Return the nodes that backward runs from the last ones on to those before a call."""
    found, stack, seen = [], [*last], {*before}
    while stack:
        node = stack.pop()
        if node not in seen and node.name() != EXIT:
            seen.add(node)
            found.append(node)
            stack += [other for other, _ in node.next_functions]
    return found


def last_nodes(before: set[Any], nodes: Iterable[Any]) -> list[Any]:
    """Return the nodes that give the gradient of the input, or of parameters if it has none."""
    outside = before - {None}
    after = {node: {other for other, _ in node.next_functions if other is not None}
             for node in nodes}
    to_input = [node for node, others in after.items() if others & outside]
    return to_input or [node for node, others in after.items() if not others - outside or any(
        other.name() == EXIT for other in others)]
