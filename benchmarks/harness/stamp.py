"""Points in time: by the clock on the CPU, and on accelerators by events in their streams."""
import time
from typing import Any

import torch

from torchgpipe.engine.stream import AbstractStream, as_cuda, get_device, is_cuda

__all__ = ['Stamp', 'seconds', 'stamp']

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
    return start[1].elapsed_time(point) / 1e3 if device.type != 'cpu' else point - start[1]
