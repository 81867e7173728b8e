"""Record what each device does when: boxes for forward, recomputation, backward and copies.

::

    forward, recomputation    from the first layer of a cell to its last
    backward on accelerators  from the gradient of the cell's output to the end of the node that
                              gives the gradient of its input, or else of its first parameter
    backward on the CPU       as long as the nodes that run are the cell's; one thread runs those
                              of all cells, which may take turns, so a cell may have several boxes
    copy                      from one device to another, of a batch, of a skip or of a gradient

On accelerators all this is told by events in the streams that do the work, on the CPU by the
clock.
"""
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.harness.job import synchronize
from torchgpipe import GPipe, is_recomputing
from torchgpipe.engine.batch import Batch
from torchgpipe.engine.compute import Compute
from torchgpipe.engine.copy import copy_tensor
from torchgpipe.engine.pipeline import Pipeline
from torchgpipe.engine.stream import AbstractStream, CPUStream, current_stream, get_device, is_cuda
from torchgpipe.timeline.graph import last_nodes, nodes_between, producers
from torchgpipe.timeline.stamp import Stamp, seconds, stamp

__all__ = ['Box', 'Recorder', 'record', 'utilisation']

#: Micro-batch and partition: ``(i, j)``.
Cell = tuple[int, int]


class Box(NamedTuple):
    """What a partition did between two points in time, in seconds since the first one."""

    kind: str
    j: int
    i: int
    start: float
    end: float


def record(model: GPipe, step: Callable[[], Any]) -> list[Box]:
    """Run a training step of a pipeline, and give its boxes by their start.

    On the CPU ``step`` should end with backward, or what follows counts as the last cell's.
    """
    recorder = Recorder(model.devices)
    with recorder.recording():
        step()
    return recorder.boxes()


def utilisation(boxes: Sequence[Box], devices: Sequence[torch.device]) -> float:
    """Give the share of the time, from first start to last end, that devices spend on cells."""
    busy = sum(box.end - box.start for box in boxes if box.kind != 'copy')
    span = max(box.end for box in boxes) - min(box.start for box in boxes)
    return busy / span / len(set(devices))


class Recorder:
    """Stamps of a step in the making.

    Args:
        devices: One per partition.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._stamps: list[tuple[str, int, int, Stamp, Stamp]] = []
        self._begins: dict[Cell, Stamp] = {}
        self._ends: dict[Cell, Stamp] = {}
        self._turn: Cell | None = None
        self._since: Stamp | None = None
        self._ways: dict[Any, Cell] = {}
        self._zero: dict[torch.device, Any] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record within the context."""
        compute, streams = Compute.__call__, Pipeline._streams

        def call(cell: Compute, i: int, m: int, tracker: Any, value: Any) -> Any:
            return self._compute(compute, cell, i, m, tracker, value)

        def find(pipeline: Pipeline, i: int, prev_j: int, next_j: int) -> Any:
            way = streams(pipeline, i, prev_j, next_j)
            self._ways[way], self._ways[way[::-1]] = (i, next_j), (i, prev_j)
            return way

        synchronize(self._devices)
        clocks = [CPUStream, *(current_stream(device) for device in set(self._devices))]
        self._zero = dict(map(stamp, clocks))
        try:
            with patch.object(Compute, '__call__', call), \
                    patch.object(Pipeline, '_streams', find), \
                    patch('torchgpipe.engine.copy.copy_tensor', self.copy), \
                    patch('torchgpipe.skip.portal.copy_tensor', self.copy):
                yield
        finally:
            self._take_turn(None)
            synchronize(self._devices)

    def _compute(self, compute: Callable[..., Any], cell: Compute, i: int, m: int,
                 tracker: Any, value: Any) -> Any:
        stream = current_stream(cell.device)
        first = not is_recomputing()
        if not first and not is_cuda(stream):
            self._take_turn(None)
        start = stamp(stream)
        output = compute(cell, i, m, tracker, value)
        self._stamps.append(('forward' if first else 'recomputation', cell.j, i, start,
                             stamp(stream)))
        if first:
            self._follow((i, cell.j), stream, list(Batch(value)), list(Batch(output)))
        return output

    def _follow(self, cell: Cell, stream: AbstractStream, input: list[Tensor],
                output: list[Tensor]) -> None:
        """Hang stamps into the graph of a cell."""
        nodes = nodes_between(input, output)
        if not is_cuda(stream):
            for node in nodes:
                node.register_prehook(lambda _: self._take_turn(cell))
            return

        def begin(_: Any) -> None:
            self._begins.setdefault(cell, stamp(stream))

        def end(*_: Any) -> None:
            self._ends[cell] = stamp(stream)
        # What a cell hands on as it is, like a skip that is carried, has no node of this cell.
        for node in producers(output) & set(nodes):
            node.register_prehook(begin)
        for node in last_nodes(input, nodes):
            node.register_hook(end)

    def _take_turn(self, cell: Cell | None) -> None:
        """Let the CPU's thread work for a cell in backward, or for none, from now on."""
        if cell == self._turn:
            return
        now = stamp(CPUStream)
        if self._turn is not None and self._since is not None:
            i, j = self._turn
            self._stamps.append(('backward', j, i, self._since, now))
        self._turn, self._since = cell, now

    def copy(self, tensor: Tensor, source: AbstractStream, target: AbstractStream,
             compute: AbstractStream) -> Tensor:
        """Copy a tensor, and record that where it is not there already."""
        if get_device(source) == get_device(target):
            return copy_tensor(tensor, source, target, compute)
        stream = source if is_cuda(source) else target
        start = stamp(stream)
        copied = copy_tensor(tensor, source, target, compute)
        i, j = self._ways[source, target]
        self._stamps.append(('copy', j, i, start, stamp(stream)))
        return copied

    def boxes(self) -> list[Box]:
        """Give what was recorded, in seconds, by start."""
        cells = [('backward', j, i, begin, self._ends[i, j])
                 for (i, j), begin in self._begins.items() if (i, j) in self._ends]
        boxes = [Box(kind, j, i, self._seconds(start), self._seconds(end))
                 for kind, j, i, start, end in (*self._stamps, *cells)]
        first = min((box.start for box in boxes), default=0.)
        return sorted((box._replace(start=box.start - first, end=box.end - first)
                       for box in boxes), key=lambda box: box.start)

    def _seconds(self, point: Stamp) -> float:
        device, _ = point
        return seconds((device, self._zero[device]), point)
