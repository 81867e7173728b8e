"""Measure the time of copies between devices."""
import time
from collections.abc import Sequence
from statistics import median

import torch

from torchgpipe.base.devices import Device, memory_of, synchronize
from torchgpipe.predict.costs import Link

__all__ = ['measure_links']

#: Bytes of the copies that are timed: what a small one takes is all latency.
SMALL, LARGE = 4, 2 ** 24

#: How often each is timed; medians count.
REPEATS = 5


def measure_links(devices: Sequence[Device]) -> tuple[tuple[Link, ...], ...]:
    """Measure what copies between each two devices take, one after the other.

    Workers of the CPU share its memory, so nothing is copied between them.

    >>> measure_links(['cpu:0', 'cpu:1'])[0][1]
    Link(latency=0.0, bandwidth=inf)

    Args:
        devices: The devices, all of which are there.

    Returns:
        By the place of the device that sends, and of the one that gets.
    """
    places = [memory_of(x) for x in devices]
    return tuple(tuple(_measure(one, other) for other in places) for one in places)


def _measure(source: torch.device, target: torch.device) -> Link:
    if source == target:
        return Link()
    small, large = (_seconds(torch.zeros(size, dtype=torch.uint8, device=source), target)
                    for size in (SMALL, LARGE))
    return Link(small, (LARGE - SMALL) / (large - small)) if large > small else Link(small)


def _seconds(tensor: torch.Tensor, target: torch.device) -> float:
    tensor.to(target)  # not counted: memory is allocated, and the way is opened
    times = []
    for _ in range(REPEATS):
        synchronize((tensor.device, target))
        start = time.perf_counter()
        tensor.to(target)
        synchronize((tensor.device, target))
        times.append(time.perf_counter() - start)
    return median(times)
