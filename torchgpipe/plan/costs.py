"""Time and memory of layers, of blocks of layers, and of the stages of a schedule."""
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from math import inf
from numbers import Real
from typing import Any, NamedTuple, Protocol

from torchgpipe.base.settings import Checkpoint, checkpoint_stops
from torchgpipe.schedule.schedule import KINDS, Schedule, in_flight

__all__ = ['Blocks', 'Costs', 'LayerProfile', 'Link', 'Links', 'MemoryLimit', 'Peak',
           'SkipProfile', 'StageCosts', 'check_numbers', 'memory_limits', 'peaks']

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


@dataclass(frozen=True)
class Link:
    """What a copy from one device to another takes; it goes beside what the devices compute.

    >>> Link(latency=0.001, bandwidth=1e9).seconds(2_000_000)
    0.003
    """

    #: Seconds of each copy.
    latency: float = 0.0
    #: Bytes per second.
    bandwidth: float = inf

    def __post_init__(self) -> None:
        check_numbers(self, unlimited='bandwidth')

    def seconds(self, bytes: float) -> float:
        """Return the seconds for so many bytes."""
        return self.latency + bytes / self.bandwidth


#: The same between any two devices; or by the device that sends, and the one that gets.
Links = Link | Sequence[Sequence[Link]]


@dataclass(frozen=True)
class StageCosts:
    """Seconds and bytes of one stage for one micro-batch.

    >>> costs = StageCosts(forward=1.0, backward=2.0, weight_backward=0.5)
    >>> costs.seconds('I'), costs.seconds('W'), costs.seconds('R')
    (1.5, 0.5, 1.0)
    """

    #: Seconds of ``F``.
    forward: float
    #: Seconds of ``B``, without a recomputation.
    backward: float
    #: Seconds of ``W``: half of backward if not given.
    weight_backward: float | None = None
    #: Seconds of ``I``, without a recomputation: what ``W`` leaves of backward if not given.
    input_backward: float | None = None
    #: Seconds of ``R``, or of the same within ``B`` or ``I``: those of ``F`` if not given.
    recomputation: float | None = None
    #: Of how many micro-batches, from the first one on, forward gives up the activations.
    recomputed: int = 0
    #: What forward makes for backward.
    activation_bytes: float = 0.0
    #: What ``B`` or ``I`` needs while it runs.
    backward_bytes: float = 0.0
    #: What goes to the next stage, or out of the last one.
    output_bytes: float = 0.0
    #: What is there from start to end, as parameters and all that goes with them; for all
    #: micro-batches.
    resident_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self)

    def seconds(self, kind: str) -> float:
        """Return the seconds of a kind of action; of a backward, without a recomputation."""
        if kind == 'F':
            return self.forward
        if kind == 'R':
            return self.forward if self.recomputation is None else self.recomputation
        if kind == 'B':
            return self.backward
        weight = self.backward / 2 if self.weight_backward is None else self.weight_backward
        if kind == 'W':
            return weight
        rest = max(0.0, self.backward - weight)
        return rest if self.input_backward is None else self.input_backward


class Measured(Protocol):
    """A :class:`~torchgpipe.balance.Profile`."""

    @property
    def layers(self) -> Sequence[LayerProfile]:
        """What each layer costs."""

    def blocks(self, chunks: int, param_scale: float) -> Blocks:
        """Return what blocks of the layers take."""


@dataclass(frozen=True)
class Costs:
    """What a step costs: its stages, and what goes between them.

    >>> costs = Costs([StageCosts(forward=1.0, backward=2.0)] * 4, links=Link(latency=0.1))
    >>> len(costs.stages)
    4
    """

    #: By stage.
    stages: Sequence[StageCosts]
    #: From which stage to which one, and bytes of one micro-batch.
    skips: Sequence[SkipProfile] = ()
    #: Between devices, which are the rows of a schedule.
    links: Links = Link()

    def __post_init__(self) -> None:
        last = len(self.stages) - 1
        wrong = [x for x in self.skips if not x.source < x.target <= last]
        if wrong:
            raise ValueError(f'a skip goes to a later one of the {last + 1} stages, but there is '
                             f'{wrong[0]}')

    @staticmethod
    def of(profile: Measured, balance: Sequence[int], chunks: int,
           checkpoint: Checkpoint = 'except_last', *, param_scale: float = 2.0,
           links: Links = Link(), overhead: Mapping[str, float] | None = None) -> 'Costs':
        """Take them from what layers cost.

        Where a profile does not know how backward is split, it follows by a rule: gradients of
        weights take half of it in a layer with parameters to train, as they do in matrix products
        and convolutions; in the first such layer all of it, as what comes before it needs no
        gradient; in layers without such parameters nothing.

        >>> from torchgpipe.balance import Profile
        >>> layers = [LayerProfile(str(k), 2.0, 4.0, 8, 0, 0, 4, 4) for k in range(4)]
        >>> profile = Profile(tuple(layers), (), batch_size=16, input_bytes=4, device='cpu')
        >>> costs = Costs.of(profile, [2, 2], chunks=4)
        >>> [(x.forward, x.backward, x.weight_backward, x.recomputed) for x in costs.stages]
        [(1.0, 2.0, 1.5, 3), (1.0, 2.0, 1.0, 3)]

        Args:
            profile: Of the layers, by :func:`torchgpipe.plan.profile`.
            balance: The number of layers of each stage.
            chunks: The number of micro-batches, which count as equally large.
            checkpoint: As for :class:`~torchgpipe.GPipe`.
            param_scale: Bytes for a trainable parameter, its gradient and the optimizer's state,
                relative to the parameter.
            links: See above.
            overhead: Seconds that an action takes beside its layers, by its kind.

        Raises:
            ValueError: The balance is for other layers, or an argument is wrong.
        """
        if sum(balance) != len(profile.layers) or min(balance, default=0) < 1:
            raise ValueError(f'the balance {list(balance)} is none of the {len(profile.layers)} '
                             'layers that the profile has')
        blocks = profile.blocks(chunks, param_scale)
        m = blocks.m
        parts = [(one * x, other * x) for x, (one, other) in
                 zip(blocks.backward, _shares(profile.layers))]
        cuts = [0, *accumulate(balance)]
        more = dict.fromkeys(KINDS, 0.0) | dict(overhead or {})
        if len(more) > len(KINDS):
            raise ValueError(f'overhead is that of actions {", ".join(KINDS)}, but names '
                             f'{", ".join(map(repr, overhead or {}))}')
        stages = tuple(StageCosts(
            forward=sum(blocks.forward[a:b]) / m + more['F'],
            backward=sum(blocks.backward[a:b]) / m + more['B'],
            weight_backward=sum(second for _, second in parts[a:b]) / m + more['W'],
            input_backward=sum(first for first, _ in parts[a:b]) / m + more['I'],
            recomputation=sum(blocks.forward[a:b]) / m + more['R'],
            recomputed=stop,
            activation_bytes=(blocks.activations[b] - blocks.activations[a]) / m,
            backward_bytes=max(blocks.passing[a:b]) / m,
            output_bytes=blocks.inputs[b] / m,
            resident_bytes=blocks.resident[b] - blocks.resident[a] + (a == 0) * blocks.inputs[0],
        ) for a, b, stop in zip(cuts, cuts[1:], checkpoint_stops(checkpoint, m, len(balance))))
        return Costs(stages, _between(blocks.skips, balance, m), links)

    @property
    def stops(self) -> tuple[int, ...]:
        """Of how many micro-batches each stage gives up its activations, from the first one on."""
        return tuple(stage.recomputed for stage in self.stages)

    def check_links(self, devices: int) -> None:
        """Check that there is a link between each two of so many devices.

        Raises:
            ValueError: There is none, or there are others.
        """
        links = self.links
        if isinstance(links, Link):
            return
        shape = [len(row) if isinstance(row, Sequence) else row for row in links]
        if shape != [devices] * devices or any(
                not isinstance(link, Link) for row in links for link in row):
            raise ValueError('links must be one Link, or for each device a row of one for each '
                             f'device; for {devices} devices, there are rows of {shape}')

    def link(self, source: int, target: int) -> Link:
        """Return that between two devices."""
        return self.links if isinstance(self.links, Link) else self.links[source][target]


def _shares(layers: Sequence[LayerProfile]) -> Iterator[tuple[float, float]]:
    """Yield for each layer which shares of its backward ``I`` and ``W`` take."""
    is_first = True
    for x in layers:
        is_trained = x.parameter_bytes > x.frozen_bytes
        by_rule = (1.0 if is_first else 0.5) if is_trained else 0.0
        is_first = is_first and not is_trained
        if x.input_share is None or x.weight_share is None:
            yield 1 - by_rule, by_rule
        else:
            yield x.input_share, x.weight_share


def _between(skips: Sequence[SkipProfile], balance: Sequence[int], m: int
             ) -> tuple[SkipProfile, ...]:
    """Return the skips from stage to stage."""
    stage_of = [j for j, number in enumerate(balance) for _ in range(number)]
    each = [SkipProfile(stage_of[x.source], stage_of[x.target], x.bytes) for x in skips]
    return tuple(SkipProfile(x.source, x.target, -(-x.bytes // m)) for x in each
                 if x.source != x.target)
