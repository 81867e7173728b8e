"""Time and memory of layers: of single layers, and of blocks of layers as stages of a step."""
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from math import inf
from numbers import Real
from typing import Any, NamedTuple

from torchgpipe.base.settings import checkpoint_stops
from torchgpipe.schedule.schedule import Schedule, in_flight

__all__ = ['Blocks', 'LayerProfile', 'MemoryLimit', 'Peak', 'SkipProfile', 'check_numbers',
           'memory_limits', 'peaks']
MemoryLimit = None | int | Sequence[int | None]


def check_numbers(record: Any, unlimited: str = '') -> None:
    """Check that the numbers in a dataclass are finite, and not below zero.

    Args:
        record: What has been made.
        unlimited: The field that may be infinite, and not zero.

    Raises:
        ValueError: One is something else.
    """
    for field in fields(record):
        value = getattr(record, field.name)
        if field.type not in (int, float, int | None, float | None) or (
                value is None and field.type in (int | None, float | None)):
            continue
        fits = isinstance(value, Real) and (
            0 < value if field.name == unlimited else 0 <= value < inf)  # type: ignore[operator]
        if not fits:
            what = 'number above zero' if field.name == unlimited else (
                'finite number, not below zero')
            raise ValueError(f'{field.name!r} of a {type(record).__name__} must be a {what}, but '
                             f'is {value!r}')


@dataclass(frozen=True)
class LayerProfile:
    """What one layer costs in a training step on the sample, by itself.

    Times are medians in seconds, sizes are in bytes.

    >>> LayerProfile('0', 0.5, 1.0, 288, 0, 0, 0, 512).backward_seconds
    1.0
    """

    #: In the sequential module.
    name: str
    #: Of the forward.
    forward_seconds: float
    #: Of the backward.
    backward_seconds: float
    #: Of all parameters.
    parameter_bytes: int
    #: Of those among them that require no gradient.
    frozen_bytes: int
    #: Of all buffers.
    buffer_bytes: int
    #: Memory that the forward made and autograd keeps for the backward of this or later layers.
    activation_bytes: int
    #: What crosses the boundary if a partition ends here, skips not counted.
    output_bytes: int
    #: The layer, by index, whose result this one changes in place, if any; the first such.
    changes: int | None = None
    #: The part of ``forward_seconds`` that does not shrink with the batch, and so is spent once
    #: per micro-batch.
    forward_overhead: float = 0.0
    #: The same part of ``backward_seconds``.
    backward_overhead: float = 0.0
    #: The parts of ``backward_seconds`` that a split backward takes: gradients
    #: of what the layer was given, and of its weights. Splitting costs what makes them more than
    #: one together. ``None`` if that was not measured.
    input_share: float | None = None
    weight_share: float | None = None

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True)
class SkipProfile:
    """A skip tensor: from which layer to which, by index, and its size.

    >>> SkipProfile(source=0, target=3, bytes=512)
    SkipProfile(source=0, target=3, bytes=512)
    """

    #: The layer that stashes it.
    source: int
    #: The layer that pops it.
    target: int
    #: Of the tensor.
    bytes: int

    def __post_init__(self) -> None:
        check_numbers(self)


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
    alive = numbers if checkpoint == 'never' else in_flight(schedule, 'BI')
    return [Peak(number, alive[j], min(number, max(1, len(numbers) - 1)), 1 + is_plain_call)
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
