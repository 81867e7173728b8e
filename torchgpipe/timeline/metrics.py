"""Metrics of a training step: speed, memory and bubble, of one process or of all ranks."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, nan
from typing import Protocol

import torch

from torchgpipe.base.devices import has_streams, synchronize
from torchgpipe.base.errors import duration, format_bytes
from torchgpipe.gpipe import GPipe
from torchgpipe.timeline.recorder import Ranks, record


@dataclass
class StepMetrics:
    """Metrics of a step on all devices, filled at the end of :func:`measure`."""

    #: The time of the step, on the slowest rank.
    seconds: float = nan
    #: Tokens, or samples, of the whole mini-batch per second.
    tokens_per_second: float = nan
    #: ``tokens_per_second`` divided by the number of devices.
    tokens_per_second_per_device: float = nan
    #: Floating-point operations per second of a device, in units of 1e12; ``None`` if their number
    #: was not given.
    tflops_per_device: float | None = None
    #: The model FLOPs utilization (MFU), which is the rate as a fraction of a device's peak;
    #: ``None`` unless ``flops`` and ``peak_flops`` were given.
    mfu: float | None = None
    #: The most bytes of tensors on a device since the process started, or since
    #: ``torch.accelerator.reset_peak_memory_stats``; on the CPU, of the whole process (zero on
    #: Windows). Over ranks, the largest.
    peak_bytes: int = 0
    #: The part of the time of all devices for which they do not work, from 0 to 1, between the
    #: start of the first action and the end of the last one.
    bubble: float = nan

    def __str__(self) -> str:
        parts = [duration(self.seconds), f'{self.tokens_per_second:,.0f} tokens/s']
        if self.tflops_per_device is not None:
            parts.append(f'{self.tflops_per_device:.3g} TFLOP/s per device')
        if self.mfu is not None:
            parts.append(f'{self.mfu:.1%} MFU')
        return ', '.join([*parts, format_bytes(self.peak_bytes), f'bubble {self.bubble:.1%}'])


class ReducingModel(Ranks, Protocol):
    """A model over several processes that reduces numbers over all ranks."""

    @property
    def devices(self) -> list[torch.device]:
        """The devices of this rank."""

    def reduced(
        self, largest: Sequence[float], total: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """Return the largest of some numbers, and the sums of others, over all ranks."""


@contextmanager
def measure(
    model: GPipe | ReducingModel,
    *,
    tokens: float,
    flops: float | None = None,
    peak_flops: float | None = None,
) -> Iterator[StepMetrics]:
    """Measure the training step within the context, as ``train-gpt`` does.

    It waits for the devices at its start and at its end. Over processes, all ranks measure the
    step, and each gets the metrics of all. All of them must leave the context without an error, or
    none, because they exchange their figures at its end.

    >>> from torch import nn
    >>> model = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1],
    ...               devices=['cpu:0', 'cpu:1'], chunks=2)
    >>> with measure(model, tokens=2, flops=2 * 6 * 24) as metrics:
    ...     loss = model.step(torch.ones(2, 3), torch.ones(2, 3), nn.functional.mse_loss)
    >>> metrics.tokens_per_second == 2 / metrics.seconds, 0 < metrics.bubble < 1
    (True, True)

    Args:
        model: The model, or a :class:`~torchgpipe.distributed.DistributedGPipe`.
        tokens: The tokens of the whole mini-batch, of all replicas, or its samples. It is the same
            on all ranks, as are the other arguments.
        flops: The floating-point operations of the step without recomputation, of all replicas. A
            transformer takes about ``6 * parameters`` per token, in forward and backward.
        peak_flops: The peak of a device in FLOP/s, for the dtype in use, such as
            ``torchgpipe.plan.MACHINES['H100'].flops['bfloat16']``.

    Yields:
        The metrics, which are filled when the context ends without an error.

    Raises:
        RuntimeError: The model is being recorded or measured already.
        ValueError: A number is not finite, or not above zero.
    """
    for name, number in (('tokens', tokens), ('flops', flops), ('peak_flops', peak_flops)):
        if number is not None and not (isfinite(number) and number > 0):
            raise ValueError(f'{name} must be a finite number above zero, but is {number}')
    metrics = StepMetrics()
    devices = model.devices
    with record(model, merge=False) as timeline:  # It waits for the devices first.
        start = time.perf_counter()
        yield metrics
        # The step may have queued more than actions, such as the optimizer's work.
        synchronize(devices)
        seconds = time.perf_counter() - start

    # A rank's timeline has its own work only, so the busy seconds of all ranks add up. Ranks wait
    # for the slowest, so the longest time counts.
    maxima: list[float] = [seconds, timeline.seconds, _peak_bytes(devices)]
    busy = [sum(timeline.utilisations) * timeline.seconds]
    if isinstance(model, GPipe):
        number_of_devices = len({*devices})
        lanes = len(timeline.devices)
    else:
        number_of_devices = lanes = len(model.lane_names())
        maxima, busy = model.reduced(maxima, busy)
    seconds, span, peak = maxima
    rate = float(tokens) / seconds

    metrics.seconds = seconds
    metrics.tokens_per_second = rate
    metrics.tokens_per_second_per_device = rate / number_of_devices
    metrics.peak_bytes = int(peak)
    metrics.bubble = 1 - busy[0] / (lanes * span) if span else nan
    if flops is not None:
        flops_per_second = float(flops) / seconds / number_of_devices
        metrics.tflops_per_device = flops_per_second / 1e12
        if peak_flops is not None:
            metrics.mfu = flops_per_second / peak_flops


def gathered_mean(model: GPipe | ReducingModel, value: float, count: float) -> float:
    """Return the mean of a metric over all ranks, each weighted by its count.

    All ranks call it, such as after an epoch. Ranks without a value, which do not have the last
    stage, pass a count of zero. Ranks along the tensor axis have the same values.

    >>> from torch import nn
    >>> model = GPipe(nn.Sequential(nn.Linear(3, 3)), [1], devices=['cpu'], chunks=2)
    >>> gathered_mean(model, 0.75, count=8)
    0.75

    Args:
        model: The model, or a :class:`~torchgpipe.distributed.DistributedGPipe`.
        value: A mean of this rank, such as an accuracy.
        count: The number of samples of which it is the mean.

    Returns:
        The mean on all ranks; ``nan`` if all counts are zero.
    """
    # The value of a rank without samples may be nan, which would spread.
    total = [float(value) * float(count) if count else 0.0, float(count)]
    if not isinstance(model, GPipe):
        _, total = model.reduced([], total)
    return total[0] / total[1] if total[1] else nan


def _peak_bytes(devices: Sequence[torch.device]) -> int:
    """Return the most bytes of tensors on one of the devices, or of this process on the CPU."""
    accelerators = [device for device in devices if has_streams(device)]
    if accelerators:
        return max(torch.accelerator.max_memory_allocated(device) for device in accelerators)
    try:
        import resource
    except ImportError:  # on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == 'darwin' else peak * 1024
