"""Record the actions of a pipeline over time, by marks on devices and in the autograd graph.

Points in time are readings of the clock on the CPU, and events in streams on accelerators.

==========================  ======================================================================
forward, recomputation      from the first layer of a cell to its last
backward, on accelerators   from the gradient of a cell's output to the end of the node that gives
                            the gradient of its input, or else of its first parameter
backward, on the CPU        as long as the nodes that run are the cell's: one thread runs the nodes
                            of all cells, which may alternate, so a cell may have several boxes
an action of a step         from its first layer or node to its end, the loss included
copy                        from one device to another, of a batch, of a skip or of a gradient
==========================  ======================================================================

On accelerators, events in the working streams measure these times; on the CPU, the clock does. An
event occurs when all work that was queued before it is done. So a box begins when its inputs have
arrived, not when it was queued.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchgpipe.base.context import context
from torchgpipe.base.devices import CPU, is_cpu, memory_key, synchronize
from torchgpipe.base.private import at_end_of_backward, backward_pass
from torchgpipe.base.structure import Value, flatten
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.streams import (
    AbstractStream,
    CPUStream,
    as_accelerator,
    current_stream,
    get_device,
    is_accelerator,
)
from torchgpipe.gpipe import GPipe
from torchgpipe.schedule.schedule import Action, Timed
from torchgpipe.timeline.timeline import Copied, Timeline

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
    length: float = point - start[1] if is_cpu(device) else start[1].elapsed_time(point) / 1e3
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
        self.ends[len(self.begins) - 1 :] = [stamp(self.stream)]

    def marks(self) -> list[Mark]:
        """Return the backwards that have begun and ended."""
        return [Mark(self.action, *pair) for pair in zip(self.begins, self.ends)]


class CpuBackward:
    """The cell for which the CPU's backward thread runs nodes, one cell after the other."""

    def __init__(self, add: Callable[[Mark], None]) -> None:
        self._add = add
        self._span: tuple[Action, Stamp] | None = None
        #: The backward pass, which may have failed meanwhile, and then did not reach its end.
        self._pass = -1

    def run(self, action: Action) -> None:
        """Begin a span of an action, if it is another one: one of its nodes is about to run."""
        if backward_pass() != self._pass:
            self._pass = backward_pass()
            self._span = None
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
    found = []
    stack = [*last]
    seen = {*before}
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
    to_input = []
    to_parameters = []
    for node in nodes:
        following = {other for other, _ in node.next_functions if other is not None}
        if following & outside:
            to_input.append(node)
        if not following - outside or any(other.name() == EXIT for other in following):
            to_parameters.append(node)
    return to_input or to_parameters


@contextmanager
def record(model: 'GPipe | Ranks', *, merge: bool = True) -> Iterator[Timeline]:
    """Record the actions of a pipeline within the context; the timeline is filled at its end.

    The plain call and its ``backward()``, and :meth:`~torchgpipe.GPipe.step`, are recorded alike.
    Clocks of several accelerators are set when the recording begins, each within some microseconds
    of the others. Over processes, all ranks record, and each gets the lanes of all.

    >>> from torch import nn
    >>> model = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1],
    ...               devices=['cpu:0', 'cpu:1'], chunks=2, checkpoint='never')
    >>> with record(model) as timeline:
    ...     loss = model.step(torch.ones(2, 3), torch.ones(2, 3), nn.functional.mse_loss)
    >>> sorted(str(timed.action) for timed in timeline.actions if timed.device == 0)
    ['0B0', '0B1', '0F0', '0F1']

    Args:
        model: The model, or a :class:`~torchgpipe.distributed.DistributedGPipe`.
        merge: Over processes, whether ranks exchange their actions. Without it each rank gets its
            own lane only, by its own clock, and ranks do not wait for each other.

    Yields:
        The timeline, which is empty until the context ends, and stays empty after an error.

    Raises:
        RuntimeError: The model is being recorded already.
    """
    engine = model._running_engine()
    recorder = _ActionObserver(engine)
    ranks = None if isinstance(model, GPipe) or not merge else model
    timeline = Timeline((), recorder.lane_names if ranks is None else ranks.lane_names())
    try:
        with engine.observed(recorder):
            recorder.start()
            yield timeline
    finally:
        recorder.unhook()
    actions, copies = recorder.finish()
    if ranks is not None:
        actions = ranks.merged(actions, recorder.began)
        copies = []
    zero = min((timed.start for timed in actions), default=0.0)
    timeline.fill(
        [timed._replace(start=timed.start - zero, end=timed.end - zero) for timed in actions],
        [copied._replace(start=copied.start - zero, end=copied.end - zero) for copied in copies],
    )


class Ranks(Protocol):
    """A model on several processes."""

    def _running_engine(self) -> Engine:
        """Return the engine of this rank's stages."""

    def lane_names(self) -> list[str]:
        """Return the name of each rank."""

    def merged(self, actions: list[Timed], began: float) -> list[Timed]:
        """Return the actions of all ranks, by one clock.

        Args:
            actions: The actions of this rank, in seconds since the recording began.
            began: The time when the recording began, by ``time.perf_counter``.
        """


class _Local(threading.local):
    """The recorder's state of a thread."""

    def __init__(self, add: Callable[[Mark], None]) -> None:
        self.backward = CpuBackward(add)
        #: Whether it runs a forward of a step, and the time when the layers began.
        self.acting = False
        self.start: Stamp | None = None


class _ActionObserver:
    """The observer that the engine notifies about its actions."""

    def __init__(self, engine: Engine) -> None:
        self._workers = engine.workers
        self._devices = [partition.device for partition in engine.partitions]
        keys = [partition.worker for partition in engine.partitions]
        lanes = [*dict.fromkeys(keys)]
        self._lanes = [lanes.index(key) for key in keys]
        #: The names of lanes.
        self.lane_names = [f'{kind}:{index}' for kind, index in lanes]
        self._marks: list[Mark] = []
        self._copies: list[tuple[Copied, Stamp, Stamp]] = []
        self._backwards: list[CellBackward] = []
        #: By micro-batch and partition, the backwards of a step.
        self._of_step: dict[tuple[int, int], CellBackward] = {}
        self._handles: list[Any] = []
        self._m = 0
        self._local = _Local(self._marks.append)
        self._zero: dict[torch.device, Any] = {}

    def start(self) -> None:
        """Start the clock on all devices at the same time."""
        synchronize(self._devices)
        self._zero = dict(map(stamp, [CPUStream, *map(current_stream, {*self._devices})]))
        self.began = time.perf_counter()

    def cell(
        self, i: int, m: int, j: int, value: Value, skips: Sequence[torch.Tensor | None]
    ) -> Callable[[Value], None]:
        """Record a cell, and add hooks to the graph that record its backward."""
        before = producers([*flatten(value)[0], *(x for x in skips if x is not None)])
        stream = current_stream(self._devices[j])
        self._m = max(m, self._m)
        if context.recomputing:
            self._local.backward.interrupt()
            return partial(self._add, Action(j, 'R', i), stamp(stream), stream)
        start = stamp(stream)

        def end(output: Value) -> None:
            if self._local.acting:
                self._local.start = start
            else:
                self._add(Action(j, 'F', i), start, stream)
            self._follow(CellBackward(i, j, stream), before, producers(flatten(output)[0]))

        return end

    def _add(self, action: Action, start: Stamp, stream: AbstractStream, *_: Any) -> None:
        self._marks.append(Mark(action, start, stamp(stream)))

    def _follow(self, backward: CellBackward, before: set[Any], last: set[Any]) -> None:
        """Add hooks that record points in time to the graph of a cell, up to the last nodes."""
        nodes = nodes_between(before, last)
        # A tensor that a cell passes on as it is, such as a skip, has no node of this cell.
        first = last & {*nodes}
        if self._local.acting:
            self._of_step[backward.action.micro_batch, backward.action.stage] = backward
            self._hook(first, backward.begin)
        elif is_accelerator(backward.stream):
            self._backwards.append(backward)
            self._hook(first, backward.begin)
            self._handles += [
                node.register_hook(backward.end) for node in last_nodes(before, nodes)
            ]
        else:
            self._hook(nodes, lambda _: self._local.backward.run(backward.action))

    def _hook(self, nodes: Iterable[Any], hook: Callable[[Any], None]) -> None:
        self._handles += [node.register_prehook(hook) for node in nodes]

    def act(self, run: Callable[[Action], None], action: Action) -> None:
        """Record an action of a step."""
        j, kind, i = action
        local = self._local
        if kind == 'F':
            local.acting = True
            try:
                run(action)
            finally:
                local.acting = False
            assert local.start is not None
            self._add(action, local.start, self._of_step[i, j].stream)
        elif kind == 'R':  # Its layers are recorded.
            run(action)
        else:
            backward = self._of_step[i, j]
            start = stamp(backward.stream)
            run(action)
            # The action begins with a node, after waits and recomputations, if it has one.
            self._add(action, backward.begins.pop() if backward.begins else start, backward.stream)

    def copy(self, source: AbstractStream, target: AbstractStream) -> Callable[[], None]:
        """Record a copy between two devices, if it is one of this pipeline."""
        i = self._workers.index_of(source if is_accelerator(source) else target)
        if i is None:
            return lambda: None
        copied = Copied(self._lane(source), self._lane(target), i, 0.0, 0.0)
        stream = source if is_accelerator(source) else target
        start = stamp(stream)
        return lambda: self._copies.append((copied, start, stamp(stream)))

    def _lane(self, stream: AbstractStream) -> int:
        """Return the first lane of a stream's memory."""
        key = memory_key(get_device(stream))
        return next(
            lane for lane, place in zip(self._lanes, self._devices) if memory_key(place) == key
        )

    def unhook(self) -> None:
        """Remove the hooks from graphs that live longer."""
        for handle in self._handles:
            handle.remove()

    def finish(self) -> tuple[list[Timed], list[Copied]]:
        """Wait for the devices, and return actions and copies, in seconds since :meth:`start`."""
        synchronize(self._devices)
        marks = self._marks + [mark for each in self._backwards for mark in each.marks()]
        actions = [
            Timed(self._lanes[action.stage], action, *self._times(*points))
            for action, *points in marks
        ]
        # Other copies are of tensors that partitions share.
        copies = [
            copied._replace(start=start, end=end)
            for copied, *points in self._copies
            if copied.micro_batch < self._m
            for start, end in [self._times(*points)]
        ]
        return actions, copies

    def _times(self, *points: Stamp) -> list[float]:
        return [seconds((device, self._zero[device]), (device, point)) for device, point in points]
