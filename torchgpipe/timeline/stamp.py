"""Points in time: by the clock on the CPU, and on accelerators by events in their streams."""
import time
from collections.abc import Iterable
from typing import Any

import torch

from torchgpipe.engine.stream import AbstractStream, as_cuda, get_device, is_cuda

__all__ = ['Stamp', 'seconds', 'stamp', 'synchronize']

#: A device, and seconds or an event in a stream of that device.
Stamp = tuple[torch.device, Any]


def stamp(stream: AbstractStream) -> Stamp:
    """Mark now: on the CPU, or when a stream gets there."""
    if not is_cuda(stream):
        return torch.device('cpu'), time.perf_counter()
    event = torch.Event(get_device(stream), enable_timing=True)
    event.record(as_cuda(stream))
    return get_device(stream), event


def seconds(start: Stamp, end: Stamp) -> float:
    """Give the time between two points on one device, which is through with both."""
    device, point = end
    length: float = (start[1].elapsed_time(point) / 1e3 if device.type != 'cpu'
                     else point - start[1])
    return length


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until all devices have done what is queued."""
    for device in {*devices}:
        if device.type != 'cpu':
            torch.accelerator.synchronize(device)
