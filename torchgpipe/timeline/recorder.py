"""Record when a pipeline does what.

==========================  ======================================================================
forward, recomputation      from the first layer of a cell to its last
backward, on accelerators   from the gradient of a cell's output to the end of the node that gives
                            the gradient of its input, or else of its first parameter
backward, on the CPU        as long as the nodes that run are the cell's: one thread runs those of
                            all cells, which may take turns, so a cell may have several boxes
an action of a step         from its first layer or node to its end, the loss included
copy                        from one device to another, of a batch, of a skip or of a gradient
==========================  ======================================================================

On accelerators all this is told by events in the streams that do the work, on the CPU by the
clock. An event is there when all that was queued before is done; so a box begins where what it
waits for has come, not where it was queued.
"""
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from torchgpipe.aliases import Value
from torchgpipe.context import context
from torchgpipe.engine.batch import Batch
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.stream import (AbstractStream, CPUStream, current_stream, get_device,
                                      is_cuda, memory_key)
from torchgpipe.gpipe import GPipe
from torchgpipe.private import at_end_of_backward, backward_pass
from torchgpipe.schedule.action import Action
from torchgpipe.schedule.timed import Timed
from torchgpipe.timeline.graph import last_nodes, nodes_between, producers
from torchgpipe.timeline.lanes import Copied
from torchgpipe.timeline.stamp import Stamp, seconds, stamp, synchronize
from torchgpipe.timeline.timeline import Timeline

__all__ = ['record']


@contextmanager
def record(model: GPipe) -> Iterator[Timeline]:
    """Record what a pipeline does within the context; the timeline is there at its end.

    The plain call and its ``backward()``, and :meth:`~torchgpipe.GPipe.step`, are recorded alike.
    Clocks of several accelerators are set when the recording begins, each within some microseconds
    of the others.

    >>> from torch import nn
    >>> model = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1],
    ...               devices=['cpu:0', 'cpu:1'], chunks=2, checkpoint='never')
    >>> with record(model) as timeline:
    ...     loss = model.step(torch.ones(2, 3), torch.ones(2, 3), nn.functional.mse_loss)
    >>> sorted(str(timed.action) for timed in timeline.actions if timed.device == 0)
    ['0B0', '0B1', '0F0', '0F1']

    Args:
        model: The model.

    Yields:
        The timeline, which is empty until the context ends, and stays so if that is by an error.

    Raises:
        RuntimeError: The model is being recorded already.
    """
    engine = model._running_engine()
    recorder = _Recorder(engine)
    timeline = Timeline((), recorder.devices)
    try:
        with engine.observed(recorder):
            recorder.start()
            yield timeline
    finally:
        recorder.unhook()
    timeline.fill(*recorder.finish())


class _Mark(NamedTuple):
    """An action between two points in time."""

    action: Action
    start: Stamp
    end: Stamp


class _Backward:
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

    def marks(self) -> list[_Mark]:
        """Give what has begun and ended."""
        return [_Mark(self.action, *pair) for pair in zip(self.begins, self.ends)]


class _Turns:
    """Whose nodes the CPU's thread runs in backward.

    Args:
        add: Takes note of the end of a turn.
    """

    def __init__(self, add: Callable[[_Mark], None]) -> None:
        self._add = add
        self._turn: tuple[Action, Stamp] | None = None
        #: The backward pass, which may have failed since, and then has not come to its end.
        self._pass = -1

    def take(self, action: Action) -> None:
        """Let the thread work for an action from now on: one of its nodes is about to run."""
        if backward_pass() != self._pass:
            self._pass, self._turn = backward_pass(), None
            at_end_of_backward(self.end)
        if self._turn is None or self._turn[0] != action:
            self.end()
            self._turn = action, stamp(CPUStream)

    def interrupt(self) -> None:
        """Let the thread do something else, until the next node runs."""
        if backward_pass() == self._pass:
            self.end()

    def end(self) -> None:
        """Let the thread work for nobody."""
        if self._turn is not None:
            self._add(_Mark(*self._turn, stamp(CPUStream)))
            self._turn = None


class _Local(threading.local):
    """What the recorder knows of a thread."""

    def __init__(self, add: Callable[[_Mark], None]) -> None:
        self.turns = _Turns(add)
        #: Whether it is at a forward of a step, and when its layers have begun.
        self.acting = False
        self.start: Stamp | None = None


class _Recorder:
    """The observer.

    Args:
        engine: The partitions.
    """

    def __init__(self, engine: Engine) -> None:
        self._workers = engine.workers
        self._places = [partition.device for partition in engine.partitions]
        keys = [partition.worker for partition in engine.partitions]
        lanes = [*dict.fromkeys(keys)]
        self._lanes = [lanes.index(key) for key in keys]
        #: The names of lanes.
        self.devices = [f'{kind}:{index}' for kind, index in lanes]
        self._marks: list[_Mark] = []
        self._copies: list[tuple[Copied, Stamp, Stamp]] = []
        self._backwards: list[_Backward] = []
        #: By micro-batch and partition, those of a step.
        self._of_step: dict[tuple[int, int], _Backward] = {}
        self._handles: list[Any] = []
        self._m = 0
        self._local = _Local(self._marks.append)
        self._zero: dict[torch.device, Any] = {}

    def start(self) -> None:
        """Let time begin, on all devices at once."""
        synchronize(self._places)
        self._zero = dict(map(stamp, [CPUStream, *map(current_stream, {*self._places})]))

    def cell(self, i: int, m: int, j: int, value: Value) -> Callable[[Value], None]:
        """Record a cell, and hang what records its backward into the graph."""
        stream = current_stream(self._places[j])
        self._m = max(m, self._m)
        if context.recomputing:
            self._local.turns.interrupt()
            return partial(self._add, Action(j, 'R', i), stamp(stream), stream)
        start = stamp(stream)

        def end(output: Value) -> None:
            if self._local.acting:
                self._local.start = start
            else:
                self._add(Action(j, 'F', i), start, stream)
            self._follow(_Backward(i, j, stream), [*Batch(value)], [*Batch(output)])
        return end

    def _add(self, action: Action, start: Stamp, stream: AbstractStream, *_: Any) -> None:
        self._marks.append(_Mark(action, start, stamp(stream)))

    def _follow(self, backward: _Backward, input: list[torch.Tensor], output: list[torch.Tensor]
                ) -> None:
        """Hang stamps into the graph of a cell."""
        nodes = nodes_between(input, output)
        # What a cell hands on as it is, like a skip that is carried, has no node of this cell.
        first = producers(output) & {*nodes}
        if self._local.acting:
            self._of_step[backward.action.micro_batch, backward.action.stage] = backward
            self._hook(first, backward.begin)
        elif is_cuda(backward.stream):
            self._backwards.append(backward)
            self._hook(first, backward.begin)
            self._handles += [node.register_hook(backward.end)
                              for node in last_nodes(input, nodes)]
        else:
            self._hook(nodes, lambda _: self._local.turns.take(backward.action))

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
        elif kind == 'R':  # Its layers have told.
            run(action)
        else:
            backward = self._of_step[i, j]
            start = stamp(backward.stream)
            run(action)
            # It begins with a node, after waits and recomputations, if it has one.
            self._add(action, backward.begins.pop() if backward.begins else start,
                      backward.stream)

    def copy(self, source: AbstractStream, target: AbstractStream) -> Callable[[], None]:
        """Record a copy between two devices, if it is one of this pipeline."""
        i = self._workers.index_of(source if is_cuda(source) else target)
        if i is None:
            return _nothing
        copied = Copied(self._lane(source), self._lane(target), i, 0., 0.)
        stream = source if is_cuda(source) else target
        start = stamp(stream)
        return lambda: self._copies.append((copied, start, stamp(stream)))

    def _lane(self, stream: AbstractStream) -> int:
        """Give the first lane of a stream's memory."""
        key = memory_key(get_device(stream))
        return next(lane for lane, place in zip(self._lanes, self._places)
                    if memory_key(place) == key)

    def unhook(self) -> None:
        """Leave nothing in graphs that live longer."""
        for handle in self._handles:
            handle.remove()

    def finish(self) -> tuple[list[Timed], list[Copied]]:
        """Wait for the devices, and give what was recorded, in seconds since the first start."""
        synchronize(self._places)
        marks = self._marks + [mark for each in self._backwards for mark in each.marks()]
        actions = [Timed(self._lanes[action.stage], action, *self._times(*points))
                   for action, *points in marks]
        # Other copies are of what partitions share.
        copies = [copied._replace(start=start, end=end) for copied, *points in self._copies
                  if copied.micro_batch < self._m for start, end in [self._times(*points)]]
        zero = min((timed.start for timed in actions), default=0.)
        return ([timed._replace(start=timed.start - zero, end=timed.end - zero)
                 for timed in actions],
                [copied._replace(start=copied.start - zero, end=copied.end - zero)
                 for copied in copies])

    def _times(self, *points: Stamp) -> list[float]:
        return [seconds((device, self._zero[device]), (device, point))
                for device, point in points]


def _nothing() -> None:
    """Stand for the end of a copy that is not recorded."""
