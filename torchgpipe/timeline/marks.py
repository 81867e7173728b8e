"""Marks: start and end of an action on a device, and their places in the autograd graph.

Points in time are readings of the clock on the CPU, and events in streams on accelerators.
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
    """Return the current point in time: on the CPU, or in a stream."""
    if not is_accelerator(stream):
        return CPU, time.perf_counter()
    event = torch.Event(get_device(stream), enable_timing=True)
    event.record(as_accelerator(stream))
    return get_device(stream), event


def seconds(start: Stamp, end: Stamp) -> float:
    """Return the time between two points on one device, which has passed both."""
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
    """The recording of a cell's backward, when its nodes run on an accelerator or in a step."""

    def __init__(self, i: int, j: int, stream: AbstractStream) -> None:
        self.action = Action(j, 'B', i)
        self.stream = stream
        #: The points where it began and ended, several if backward runs through the graph again.
        self.begins: list[Stamp] = []
        self.ends: list[Stamp] = []

    def begin(self, *_: Any) -> None:
        """Record that a node begins, if it is the first one since the last end."""
        if len(self.begins) == len(self.ends):
            self.begins.append(stamp(self.stream))

    def end(self, *_: Any) -> None:
        """Record that a node ends, which may be the last one."""
        self.ends[len(self.begins) - 1:] = [stamp(self.stream)]

    def marks(self) -> list[Mark]:
        """Return the backwards that have begun and ended."""
        return [Mark(self.action, *pair) for pair in zip(self.begins, self.ends)]


class CpuBackward:
    """The cell for which the CPU's backward thread runs nodes, one cell after the other.

    Args:
        add: Records a span when it ends.
    """

    def __init__(self, add: Callable[[Mark], None]) -> None:
        self._add = add
        self._span: tuple[Action, Stamp] | None = None
        #: The backward pass, which may have failed meanwhile, and then did not reach its end.
        self._pass = -1

    def run(self, action: Action) -> None:
        """Begin a span of an action, if it is another one: one of its nodes is about to run."""
        if backward_pass() != self._pass:
            self._pass, self._span = backward_pass(), None
            at_end_of_backward(self.end)
        if self._span is None or self._span[0] != action:
            self.end()
            self._span = action, stamp(CPUStream)

    def interrupt(self) -> None:
        """End the span, because the thread does something else until the next node runs."""
        if backward_pass() == self._pass:
            self.end()

    def end(self) -> None:
        """End the current span."""
        if self._span is not None:
            self._add(Mark(*self._span, stamp(CPUStream)))
            self._span = None


#: The node that accumulates a gradient in a parameter.
EXIT = 'torch::autograd::AccumulateGrad'


def producers(tensors: Iterable[Tensor]) -> set[Any]:
    """Return the nodes that produced tensors, and ``None`` for tensors without a node."""
    return {None, *(tensor.grad_fn for tensor in tensors)}


def nodes_between(before: set[Any], last: set[Any]) -> list[Any]:
    """Return the nodes that backward runs, from the last ones up to the nodes before a call."""
    found, stack, seen = [], [*last], {*before}
    while stack:
        node = stack.pop()
        if node not in seen and node.name() != EXIT:
            seen.add(node)
            found.append(node)
            stack += [other for other, _ in node.next_functions]
    return found


def last_nodes(before: set[Any], nodes: Iterable[Any]) -> list[Any]:
    """Return the nodes that return the gradient of the input, or else of parameters."""
    outside = before - {None}
    after = {node: {other for other, _ in node.next_functions if other is not None}
             for node in nodes}
    to_input = [node for node, others in after.items() if others & outside]
    return to_input or [node for node, others in after.items() if not others - outside or any(
        other.name() == EXIT for other in others)]
