"""Measure copies between devices, and the overhead of an action.

:func:`measure_links` times small and large copies between devices.

:func:`measure_overhead` measures the time that an action takes in addition to its layers. Workers
on the CPU share the interpreter, so an action of one worker delays the others. The measurement
runs steps with few and with many micro-batches. Each layer of their model has one number, so that
nothing else takes time. The time of one more micro-batch on each device is

    =================  =================================
    1f1b               F + B
    zb-h1              F + I + W
    1f1b, 'always'     F + B with R
    the layers alone   their part, which is not counted
    =================  =================================

The host queues the work of an accelerator ahead of time, so an accelerator has no overhead.
"""
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor, nn

from torchgpipe.base.devices import (Device, forked_rng, is_cpu, memory_of, parse_device,
                                     synchronize)
from torchgpipe.base.settings import checkpoint_stops
from torchgpipe.engine.microbatches import cut
from torchgpipe.engine.partition import Engine
from torchgpipe.plan.costs import Link
from torchgpipe.training.losses import Losses
from torchgpipe.training.step import run_step

__all__ = ['measure_links', 'measure_overhead']

#: Bytes of the copies that are timed. The time of a small copy is all latency.
SMALL, LARGE = 4, 2 ** 24

#: The number of times that each copy is timed; the median counts.
COPIES = 5


def measure_links(devices: Sequence[Device]) -> tuple[tuple[Link, ...], ...]:
    """Measure latency and bandwidth of copies between any two devices, one pair at a time.

    Workers of the CPU share its memory, so nothing is copied between them.

    >>> measure_links(['cpu:0', 'cpu:1'])[0][1]
    Link(latency=0.0, bandwidth=inf)

    Args:
        devices: The devices, all on this machine.

    Returns:
        The links, by the index of the source and of the destination device.
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
    tensor.to(target)  # not counted: allocates memory and connects the devices
    times = []
    for _ in range(COPIES):
        synchronize((tensor.device, target))
        start = time.perf_counter()
        tensor.to(target)
        synchronize((tensor.device, target))
        times.append(time.perf_counter() - start)
    return median(times)


#: Micro-batches in the steps that are timed.
FEW, MANY = 2, 10

#: The number of times that each step is timed. The fastest counts, because other work on the
#: machine can only make it longer.
REPEATS = 7


def measure_overhead(devices: Sequence[Device]) -> Mapping[str, float]:
    """Measure the time of an action in addition to its layers, in seconds by kind.

    >>> sorted(measure_overhead(['cpu:0', 'cpu:1']))
    ['B', 'F', 'I', 'R', 'W']

    Args:
        devices: The devices, all on this machine. If one of them is an accelerator, nothing is
            measured, and the result is empty.
    """
    if not all(map(is_cpu, devices)):
        return {}
    with forked_rng([]):  # Layers draw their initial values.
        layers = nn.Sequential(*(nn.Linear(1, 1) for _ in devices))
        alone = _each(lambda x: [
            layers(part).sum().backward() for part in x.split(1)]) / len(devices)
        both, split, recomputed = (
            max(0.0, _each(step) - alone) for step in (
                _step(devices, '1f1b', 'never'), _step(devices, 'zb-h1', 'never'),
                _step(devices, '1f1b', 'always')))
    one = both / 2
    half = max(0.0, split - one) / 2
    return {'F': one, 'B': one, 'I': half, 'W': half, 'R': max(0.0, recomputed - both)}


def _step(devices: Sequence[Device], schedule: str, checkpoint: str
          ) -> Callable[[Tensor], object]:
    """Return a function that runs a step: one layer on each device, as many chunks as samples."""
    places = [parse_device(device) for device in devices]
    engine = Engine([nn.Sequential(nn.Linear(1, 1)) for _ in places], places)

    def run(x: Tensor) -> object:
        batches, sizes, common = cut(x, len(x), 0)
        losses = Losses(lambda y, _: y.sum(), None, sizes, 0, None, None)
        stops = tuple(checkpoint_stops(checkpoint, len(x), len(places)))
        return run_step(engine, batches, losses, schedule, stops, common=common, offload=False)

    return run


def _each(run: Callable[[Tensor], object]) -> float:
    """Return the seconds that one more sample takes."""
    times: dict[int, list[float]] = {FEW: [], MANY: []}
    for _ in range(REPEATS):
        for m, seconds in times.items():
            x = torch.ones(m, 1)
            start = time.perf_counter()
            run(x)
            seconds.append(time.perf_counter() - start)
    few, many = map(min, times.values())
    return (many - few) / (MANY - FEW)
