"""Blocks of layers as the stages of a step: what each takes in time, and in memory at its peak."""
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from numbers import Real
from typing import Any, NamedTuple

from torchgpipe.modes import checkpoint_stops
from torchgpipe.predict.layers import LayerProfile, SkipProfile
from torchgpipe.schedule.schedule import Schedule, in_flight

__all__ = ['Blocks', 'MemoryLimit', 'Peak', 'memory_limits', 'peaks']

MemoryLimit = None | int | Sequence[int | None]


class Peak(NamedTuple):
    """Of how many micro-batches a stage holds what, at its peak."""

    #: What came in: of all that are in flight.
    inputs: int
    #: Activations: of these, or where they are recomputed, of those that are going back.
    activations: int
    #: Skips that wait to be popped by another stage.
    skips: int
    #: Of the whole mini-batch, in the last stage: what came out, and in the plain call its
    #: gradient, which is there before backward.
    outputs: int


def peaks(schedule: Schedule, checkpoint: str, is_plain_call: bool = False) -> list[Peak]:
    """Return what each stage of a schedule holds at its peak."""
    numbers = in_flight(schedule)
    kept = numbers if checkpoint == 'never' else in_flight(schedule, 'BI')
    return [Peak(number, kept[j], min(number, max(1, len(numbers) - 1)), 1 + is_plain_call)
            for j, number in sorted(numbers.items())]


class Blocks:
    """What the layers ``a`` to ``b-1`` take as a stage of a step.

    At its peak, in backward, a stage holds

    1. parameters, gradients, optimizer state and buffers;
    2. the input and the skips from other stages, of the micro-batches that are in flight;
    3. activations: of one micro-batch, or without checkpoints of these;
    4. of one micro-batch, what the backward of a layer takes and gives;
    5. skips that wait to be popped, of as many micro-batches as there are stages after it;
    6. the last stage: the outputs, and in the plain call their gradients.

    That is an upper bound but for what a layer needs for itself while it runs. Of the input of the
    first stage, all micro-batches are there from the start.
    """

    def __init__(self, layers: Sequence[LayerProfile], skips: Sequence[SkipProfile],
                 input_bytes: int, m: int, param_scale: float) -> None:
        if not (math.isfinite(param_scale) and param_scale >= 0):
            raise ValueError('param_scale must be a number of parameter sizes, zero or more, but '
                             f'is {param_scale}')
        self.skips = skips
        self.m = m
        #: Seconds of each layer, for all micro-batches.
        self.forward = [x.forward_seconds + (m - 1) * x.forward_overhead for x in layers]
        self.backward = [x.backward_seconds + (m - 1) * x.backward_overhead for x in layers]
        #: Sums over the layers before each edge, in bytes of a mini-batch.
        self.resident = [0, *accumulate(
            int((x.parameter_bytes - x.frozen_bytes) * param_scale)
            + x.frozen_bytes + x.buffer_bytes for x in layers)]
        self.activations = [0, *accumulate(x.activation_bytes for x in layers)]
        #: What goes through each edge, and what each layer takes and gives.
        self.inputs = [input_bytes, *(x.output_bytes for x in layers)]
        self.passing = [a + b for a, b in zip(self.inputs, self.inputs[1:])]

    def seconds(self, checkpoint: str) -> list[float]:
        """Return the seconds of each layer, with recomputations."""
        stop, = checkpoint_stops(checkpoint, self.m, 1)
        return [forward * (1 + stop / self.m) + backward
                for forward, backward in zip(self.forward, self.backward)]

    def bytes(self, a: int, b: int, peak: Peak) -> int:
        """Return the most bytes at a time; more layers at the end never take less."""
        inputs = self.inputs[a]
        rest = ((self.activations[b] - self.activations[a]) * peak.activations
                + max(self.passing[a:b]))
        for skip in self.skips:
            inputs += skip.bytes if skip.source < a <= skip.target < b else 0
            rest += skip.bytes * peak.skips if a <= skip.source < b else 0
        outputs = peak.outputs * self.inputs[b] if b == len(self.passing) else 0
        return (self.resident[b] - self.resident[a] + outputs - -rest // self.m
                - -inputs * (peak.inputs if a else self.m) // self.m)

    def furthest(self, edges: Sequence[int], peak: Peak, limit: float | None, is_last: bool
                 ) -> list[int]:
        """Return the furthest edge at which a stage can end, by the one where it starts."""
        number = len(edges) - 1
        if limit is None:
            return [number] * number
        if is_last:
            return [number if self.bytes(edges[a], edges[-1], peak) <= limit else a
                    for a in range(number)]

        def end(k: int, a: int) -> int:
            # Not further than with parameters alone, whose sum is quick to tell.
            stop = bisect_right(edges, limit + self.resident[a], k + 1,
                                key=self.resident.__getitem__)
            return bisect_right(edges, limit, k + 1, stop,
                                key=lambda b: self.bytes(a, b, peak)) - 1

        return [end(k, a) for k, a in enumerate(edges[:-1])]


def memory_limits(limit: MemoryLimit, number: int, what: str) -> list[int | None]:
    """Return the limit of each device or partition.

    Raises:
        ValueError: There are others than so many, or one is no number of bytes.
    """
    limits: list[Any] = [*limit] if isinstance(limit, (list, tuple)) else [limit] * number
    if len(limits) != number:
        raise ValueError(f'memory_limit has {len(limits)} entries for {number} {what}; give one '
                         'number for all, or one for each')
    for each in limits:
        # NumPy's integers are real numbers, too.
        if each is not None and not (isinstance(each, Real) and float(each) >= 0):
            raise ValueError('memory_limit must be a number of bytes, zero or more, but is '
                             f'{each!r}')
    return limits
