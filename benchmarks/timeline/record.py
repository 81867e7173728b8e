"""Record what each device does when: one box for each forward, recomputation, backward and copy.

::

    forward, recomputation    from the first layer of a cell to its last
    backward                  from the gradient of the cell's output to the end of the node that
                              gives the gradient of its input, or else of its first parameter
    copy                      from one device to another, of a batch, of a skip or of a gradient

On CUDA all this is told by events in the streams that do the work, on the CPU by the clock.
"""
import time
from contextlib import contextmanager
from typing import (Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence,
                    Set, Tuple)
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.job import synchronize
from torchgpipe import GPipe, is_recomputing
from torchgpipe.compute import Compute
from torchgpipe.copy import copy_tensor
from torchgpipe.microbatch import Batch
from torchgpipe.stream import (AbstractStream, CPUStream, as_cuda, current_stream, get_device,
                               is_cuda)

__all__ = ['Box', 'Recorder', 'record', 'utilisation']

#: A point in time: a device, and seconds or an event in a stream of that device.
Stamp = Tuple[torch.device, Any]

#: Nodes that take a gradient out of a cell: into a parameter, or into a portal.
EXITS = ('torch::autograd::AccumulateGrad', 'PortalOrangeBackward')


class Box(NamedTuple):
    """What a partition did between two points in time, in seconds since the first one."""

    kind: str
    j: int
    i: Optional[int]
    start: float
    end: float


def record(model: GPipe, step: Callable[[], Any]) -> List[Box]:
    """Run a training step of a pipeline, and give its boxes by their start."""
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
        self._stamps: List[Tuple[str, int, Optional[int], Stamp, Stamp]] = []
        self._begins: Dict[Tuple[int, int], Stamp] = {}
        self._ends: Dict[Tuple[int, int], Stamp] = {}
        self._zero: Dict[torch.device, Any] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record within the context."""
        compute = Compute.__call__

        def call(cell: Compute, i: int, again: bool, tracker: Any, value: Any) -> Any:
            return self._compute(compute, cell, i, again, tracker, value)

        synchronize(self._devices)
        streams = [CPUStream, *(current_stream(device) for device in set(self._devices))]
        self._zero = dict(map(_stamp, streams))
        try:
            with patch.object(Compute, '__call__', call), \
                    patch('torchgpipe.copy.copy_tensor', self.copy), \
                    patch('torchgpipe.skip.portal.copy_tensor', self.copy):
                yield
        finally:
            synchronize(self._devices)

    def _compute(self, compute: Callable[..., Any], cell: Compute, i: int, again: bool,
                 tracker: Any, value: Any) -> Any:
        stream = current_stream(cell.device)
        first = not (again and is_recomputing())
        start = _stamp(stream)
        output = compute(cell, i, again, tracker, value)
        self._stamps.append(('forward' if first else 'recomputation', cell.j, i, start,
                             _stamp(stream)))
        if first:
            self._follow((cell.j, i), stream, Batch(value), Batch(output))
        return output

    def _follow(self, cell: Tuple[int, int], stream: AbstractStream, input: Iterable[Tensor],
                output: Iterable[Tensor]) -> None:
        """Hang stamps into the graph of a cell."""
        def begin(*_: Any) -> None:
            self._begins.setdefault(cell, _stamp(stream))

        def end(*_: Any) -> None:
            self._ends[cell] = _stamp(stream)
        # What a cell hands on as it is, like a skip that is carried, has no gradient of this cell.
        outside = {None, *(tensor.grad_fn for tensor in input)}
        mine = [tensor for tensor in output if tensor.grad_fn not in outside]
        for tensor in mine:
            tensor.register_hook(begin)
        for node in _last_nodes(outside, mine):
            node.register_hook(end)

    def copy(self, tensor: Tensor, source: AbstractStream, target: AbstractStream,
             compute: AbstractStream) -> Tensor:
        """Copy a tensor, and record that where it is not there already."""
        if get_device(source) == get_device(target):
            return copy_tensor(tensor, source, target, compute)
        stream = source if is_cuda(source) else target
        start = _stamp(stream)
        copied = copy_tensor(tensor, source, target, compute)
        lane = self._lane(get_device(target))
        self._stamps.append(('copy', lane, None, start, _stamp(stream)))
        return copied

    def _lane(self, device: torch.device) -> int:
        return next(j for j, other in enumerate(self._devices)
                    if other == device or other.type == device.type == 'cpu')

    def boxes(self) -> List[Box]:
        """Give what was recorded, in seconds, by start."""
        cells = [('backward', j, i, begin, self._ends[j, i])
                 for (j, i), begin in self._begins.items() if (j, i) in self._ends]
        boxes = [Box(kind, j, i, self._seconds(start), self._seconds(end))
                 for kind, j, i, start, end in (*self._stamps, *cells)]
        first = min((box.start for box in boxes), default=0.)
        return sorted((box._replace(start=box.start - first, end=box.end - first)
                       for box in boxes), key=lambda box: box.start)

    def _seconds(self, stamp: Stamp) -> float:
        device, point = stamp
        zero = self._zero[device]
        return zero.elapsed_time(point) / 1e3 if device.type == 'cuda' else point - zero


def _last_nodes(outside: Set[Any], output: Iterable[Tensor]) -> List[Any]:
    """Find the nodes that give the gradient of a cell's input, or of parameters if it has none."""
    stack: List[Any] = [tensor.grad_fn for tensor in output]
    seen, to_input, to_others = set(outside), [], []
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        after = [other for other, _ in node.next_functions if other is not None]
        inside = [other for other in after if other not in outside and other.name() not in EXITS]
        if any(other in outside for other in after):
            to_input.append(node)
        elif len(inside) < len(after) or not after:
            to_others.append(node)
        stack += inside
    return to_input or to_others


def _stamp(stream: AbstractStream) -> Stamp:
    """Mark now: on the CPU, or when a CUDA stream gets there."""
    if not is_cuda(stream):
        return torch.device('cpu'), time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(as_cuda(stream))
    return get_device(stream), event
