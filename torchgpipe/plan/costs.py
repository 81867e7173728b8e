"""Time and memory of layers, of blocks of layers, and of the stages of a schedule.

:class:`LayerProfile` and :class:`SkipProfile` hold measurements of layers, for the whole sample.
:class:`Blocks` adds them up for any block of layers. :class:`Costs` holds the costs of a step for
given stages, for one micro-batch, with the links between devices.

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

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from math import inf
from numbers import Real
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from torchgpipe.base.devices import (
    Device,
    forked_rng,
    is_cpu,
    memory_of,
    parse_device,
    synchronize,
)
from torchgpipe.base.settings import Checkpoint, LossOptions, checkpoint_stops
from torchgpipe.engine.microbatches import cut
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.policy import PRODUCTS, SMALL_PRODUCTS
from torchgpipe.losses import Losses
from torchgpipe.schedule.schedule import KINDS, Schedule, in_flight
from torchgpipe.step import run_step

MemoryLimit = None | float | Sequence[float | None]


def check_numbers(record: Any, unlimited: str = '') -> None:
    """Check that the numbers in a dataclass are finite, and not below zero.

    Args:
        unlimited: The field that may be infinite, but not zero.

    Raises:
        ValueError: A number is out of range.
    """
    for field in fields(record):
        value = getattr(record, field.name)
        if field.type not in (int, float, int | None, float | None) or (
            value is None and field.type in (int | None, float | None)
        ):
            continue
        fits = isinstance(value, Real)
        if fits and field.name == unlimited:
            fits = value > 0
        elif fits:
            fits = 0 <= value < inf
        if not fits:
            what = (
                'number above zero'
                if field.name == unlimited
                else ('finite number, not below zero')
            )
            raise ValueError(
                f'{field.name!r} of a {type(record).__name__} must be a {what}, but is {value!r}'
            )


def check_kinds(name: str, seconds: Mapping[str, float]) -> None:
    """Check seconds of actions by kind.

    Raises:
        ValueError: There is another kind, or a value that is no number of seconds.
    """
    unknown = [kind for kind in seconds if kind not in KINDS]
    if unknown:
        raise ValueError(
            f'{name} has seconds of actions {", ".join(KINDS)}, but names '
            f'{", ".join(map(repr, unknown))}'
        )
    for kind, value in seconds.items():
        number: Any = value
        if not (isinstance(number, Real) and 0 <= float(number) < inf):
            raise ValueError(
                f'{name} must have a finite number of seconds, not below zero, for '
                f'{kind!r}, but has {value!r}'
            )


@dataclass(frozen=True)
class OperationProfile:
    """An operation in the forward of a layer, whose results checkpointing can keep.

    >>> OperationProfile('aten.addmm.default', seconds=0.25, bytes=512, saved_bytes=512).bytes
    512
    """

    #: The name of the operation, such as ``'aten.addmm.default'``.
    name: str
    #: Time of all its calls in the forward.
    seconds: float
    #: Size of their results.
    bytes: int
    #: Size of the results that autograd saves as well.
    saved_bytes: int
    #: Whether a result is the output of the layer. At the end of the model it is not kept.
    is_output: bool = False

    def __post_init__(self) -> None:
        check_numbers(self)

    def scaled(self, ratio: float) -> 'OperationProfile':
        """Return the operation on other numbers of samples."""
        return OperationProfile(
            self.name,
            self.seconds * ratio,
            round(self.bytes * ratio),
            round(self.saved_bytes * ratio),
            self.is_output,
        )


@dataclass(frozen=True)
class LayerProfile:
    """Time and memory of one layer by itself, in a training step on the sample.

    Times are medians in seconds, sizes are in bytes.

    >>> LayerProfile('0', 0.5, 1.0, 288, 0, 0, 0, 512).backward_seconds
    1.0
    """

    #: The name in the sequential module.
    name: str
    #: Time of the forward.
    forward_seconds: float
    #: Time of the backward.
    backward_seconds: float
    #: Size of all parameters.
    parameter_bytes: int
    #: Size of the parameters that require no gradient.
    frozen_bytes: int
    #: Size of all buffers.
    buffer_bytes: int
    #: Memory that the forward made and autograd keeps for the backward of this or later layers.
    activation_bytes: int
    #: Size of the tensors that leave a partition which ends here, skips not counted.
    output_bytes: int
    #: Index of the first layer whose result this layer changes in place, if any.
    changes: int | None = None
    #: The part of ``forward_seconds`` that does not shrink with the batch, and so is spent once
    #: per micro-batch.
    forward_overhead: float = 0.0
    #: The same part of ``backward_seconds``.
    backward_overhead: float = 0.0
    #: The parts of ``backward_seconds`` that a split backward takes, for the gradients of inputs
    #: and for the gradients of weights. Their sum may exceed 1, because splitting has a cost.
    #: ``None`` if not measured.
    input_share: float | None = None
    weight_share: float | None = None
    #: Memory that the backward needs only while it runs, if known, in addition to the gradients of
    #: input and output.
    backward_bytes: int = 0
    #: The number of parameters that require a gradient. If ``None``, a plan for a mesh divides
    #: their bytes by the bytes of a parameter that it is given.
    trainable_parameters: int | None = None
    #: The number of values in the largest of them; all of them if ``None``.
    largest_parameter: int | None = None
    #: Copies of parameters in another dtype, which autograd saves once for all micro-batches.
    cast_bytes: int = 0
    #: FLOPs in forward and in backward, if known.
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    #: Bytes of the collectives along the tensor axis in forward and in backward, if known. A
    #: collective has the bytes of its input or its output, whichever is larger.
    forward_exchange: float = 0.0
    backward_exchange: float = 0.0
    #: The operations of its forward, if known.
    operations: tuple[OperationProfile, ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True)
class TieProfile:
    """A parameter that several layers share: the layers, by index, and its size.

    >>> TieProfile(layers=(0, 3), bytes=512, parameters=128)
    TieProfile(layers=(0, 3), bytes=512, parameters=128, is_frozen=False)
    """

    #: The layers that have it, in order.
    layers: tuple[int, ...]
    #: Size of the parameter, which each of these layers counts.
    bytes: int
    #: The number of values in it.
    parameters: int
    #: Whether it requires no gradient.
    is_frozen: bool = False

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
    #: Size of the tensor.
    bytes: int

    def __post_init__(self) -> None:
        check_numbers(self)


class Peak(NamedTuple):
    """Numbers of micro-batches whose tensors a stage holds at its peak, by kind of tensor."""

    #: Inputs: all micro-batches in flight.
    inputs: int
    #: Activations: the micro-batches in flight, or with recomputation only the ones in backward.
    activations: int
    #: Skips that wait to be popped by another stage.
    skips: int
    #: Outputs in the last stage: the micro-batches in flight, and in the plain call as many
    #: gradients, which exist before backward.
    outputs: int


def peaks(schedule: Schedule, checkpoint: str, is_plain_call: bool = False) -> list[Peak]:
    """Return, for each stage of a schedule, the micro-batches that it holds at its peak."""
    numbers = in_flight(schedule)
    alive = numbers if checkpoint == 'never' else in_flight(schedule, 'BI')
    return [
        Peak(number, alive[j], min(number, max(1, len(numbers) - 1)), number * (1 + is_plain_call))
        for j, number in sorted(numbers.items())
    ]


class Blocks:
    """Time and memory of the layers ``a`` to ``b-1`` as a stage of a step.

    At its peak, in backward, a stage holds

    1. parameters, gradients, optimizer state and buffers;
    2. the input and the skips from other stages, for the micro-batches in flight;
    3. activations, for one micro-batch, or without checkpoints for the micro-batches in flight;
    4. gradients of the inputs and outputs of one layer, for one micro-batch;
    5. skips that wait to be popped, for as many micro-batches as there are stages after it;
    6. in the last stage, the outputs of the micro-batches in flight, and in the plain call their
       gradients.

    This is an upper bound, except for memory that a layer needs only while it runs. The first
    stage holds the input of all micro-batches from the start.
    """

    def __init__(
        self,
        layers: Sequence[LayerProfile],
        skips: Sequence[SkipProfile],
        input_bytes: int,
        m: int,
        param_scale: float,
    ) -> None:
        if not (math.isfinite(param_scale) and param_scale >= 0):
            raise ValueError(
                'param_scale must be a number of parameter sizes, zero or more, but '
                f'is {param_scale}'
            )
        self.skips = skips
        self.m = m
        #: Seconds of each layer, for all micro-batches.
        self.forward = [x.forward_seconds + (m - 1) * x.forward_overhead for x in layers]
        self.backward = [x.backward_seconds + (m - 1) * x.backward_overhead for x in layers]
        #: Sums over the layers before each edge, in bytes of a mini-batch.
        self.resident = [
            0,
            *accumulate(
                int((x.parameter_bytes - x.frozen_bytes) * param_scale)
                + x.frozen_bytes
                + x.buffer_bytes
                for x in layers
            ),
        ]
        self.activations = [0, *accumulate(x.activation_bytes for x in layers)]
        #: Size of the tensors that cross each edge, and of each layer's input and output together.
        self.inputs = [input_bytes, *(x.output_bytes for x in layers)]
        self.passing = [
            a + b + x.backward_bytes for a, b, x in zip(self.inputs, self.inputs[1:], layers)
        ]

    def seconds(self, checkpoint: str) -> list[float]:
        """Return the seconds of each layer, with recomputations."""
        (stop,) = checkpoint_stops(checkpoint, self.m, 1)
        return [
            forward * (1 + stop / self.m) + backward
            for forward, backward in zip(self.forward, self.backward)
        ]

    def bytes(self, a: int, b: int, peak: Peak) -> int:
        """Return the bytes of a stage at its peak; more layers at the end never take less."""
        inputs = self.inputs[a]
        rest = (self.activations[b] - self.activations[a]) * peak.activations + max(
            self.passing[a:b]
        )
        for skip in self.skips:
            inputs += skip.bytes if skip.source < a <= skip.target < b else 0
            rest += skip.bytes * peak.skips if a <= skip.source < b else 0
        rest += peak.outputs * self.inputs[b] if b == len(self.passing) else 0
        return (
            self.resident[b]
            - self.resident[a]
            - -rest // self.m
            - -inputs * (peak.inputs if a else self.m) // self.m
        )

    def furthest(
        self, edges: Sequence[int], peak: Peak, limit: float | None, is_last: bool
    ) -> list[int]:
        """Return, for each edge where a stage starts, the furthest edge where it can end."""
        number = len(edges) - 1
        if limit is None:
            return [number] * number
        if is_last:
            return [
                number if self.bytes(edges[a], edges[-1], peak) <= limit else a
                for a in range(number)
            ]

        def end(k: int, a: int) -> int:
            # The parameters alone give a bound that is quick to find.
            stop = bisect_right(
                edges, limit + self.resident[a], k + 1, key=self.resident.__getitem__
            )
            return (
                bisect_right(edges, limit, k + 1, stop, key=lambda b: self.bytes(a, b, peak)) - 1
            )

        return [end(k, a) for k, a in enumerate(edges[:-1])]


def memory_limits(limit: MemoryLimit, number: int, what: str) -> list[int | None]:
    """Return the limit of each device or partition.

    Raises:
        ValueError: The number of limits is wrong, or a limit is not a number of bytes.
    """
    limits: list[Any] = [*limit] if isinstance(limit, (list, tuple)) else [limit] * number
    if len(limits) != number:
        raise ValueError(
            f'memory_limit has {len(limits)} entries for {number} {what}; give one '
            'number for all, or one for each'
        )
    for each in limits:
        # NumPy's integers are real numbers as well.
        if each is not None and not (isinstance(each, Real) and float(each) >= 0):
            raise ValueError(
                f'memory_limit must be a number of bytes, zero or more, but is {each!r}'
            )
    return limits


@dataclass(frozen=True)
class Link:
    """The time of a copy from one device to another, which runs concurrently with computation.

    >>> Link(latency=0.001, bandwidth=1e9).seconds(2_000_000)
    0.003
    """

    #: Seconds of each copy.
    latency: float = 0.0
    #: Bytes per second.
    bandwidth: float = inf

    def __post_init__(self) -> None:
        check_numbers(self, unlimited='bandwidth')

    def to_dict(self) -> dict[str, float | None]:
        """Return the link in types that JSON supports: a bandwidth of ``None`` is unlimited."""
        unlimited = self.bandwidth == inf
        return {'latency': self.latency, 'bandwidth': None if unlimited else self.bandwidth}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> 'Link':
        """Return a link from the result of :meth:`to_dict`."""
        return Link(
            **{**data, 'bandwidth': inf if data['bandwidth'] is None else data['bandwidth']}
        )

    def seconds(self, bytes: float) -> float:
        """Return the seconds of a copy."""
        return self.latency + bytes / self.bandwidth


#: One link for any two devices, or links by source and destination device.
Links = Link | Sequence[Sequence[Link]]


class Halves(NamedTuple):
    """The memory that a backward of a stage needs while it runs, in halves of its time.

    ::

        layers      3      2      1   │   0
        in use      activations       │   gradients of parameters, but for layer 0
                    first             │   second

    Args:
        first: Bytes in addition to all activations.
        second: Bytes in the backward of the first layer, its activations included.
        share: The part of the gradients of parameters that belongs to the first layer.
    """

    first: float
    second: float
    share: float


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
    #: Seconds of ``I``, without a recomputation: backward less ``W`` if not given.
    input_backward: float | None = None
    #: Seconds of a recomputation, in ``R`` or within ``B`` or ``I``: as ``F`` if not given.
    recomputation: float | None = None
    #: The number of micro-batches, from the first one on, whose activations forward discards.
    recomputed: int = 0
    #: Size of the tensors that forward saves for backward.
    activation_bytes: float = 0.0
    #: Memory that ``B`` or ``I`` needs while it runs.
    backward_bytes: float = 0.0
    #: Size of the output, for the next stage or of the model.
    output_bytes: float = 0.0
    #: Memory in use throughout the step, such as parameters and optimizer state; for all
    #: micro-batches.
    resident_bytes: float = 0.0
    #: Seconds in which replicas gather parameters. A device has the whole parameters of a limited
    #: number of stages, and gathers a stage again if it was freed.
    gather: float = 0.0
    #: Size of the whole parameters, if they are gathered.
    gathered_bytes: float = 0.0
    #: Seconds in which replicas reduce gradients, after the last action of the stage, or from
    #: within it: see ``buckets``.
    reduction: float = 0.0
    #: The number of buckets of gradients. If the last action is a backward, it completes one after
    #: the other, so only the reduction of the last bucket has to follow it.
    buckets: int = 1
    #: Seconds of the optimizer.
    update: float = 0.0
    #: Gradients of parameters, in use from the end of the first backward until the optimizer.
    gradient_bytes: float = 0.0
    #: Copies of parameters in another dtype, from the first forward to the last backward.
    cast_bytes: float = 0.0
    #: Copies of gradients of parameters while replicas reduce them.
    bucket_bytes: float = 0.0
    #: Copies of gradients of tied parameters at the end of the step, if other devices share them.
    tied_bytes: float = 0.0
    #: Whether ``W`` computes something. Otherwise, ``I`` frees the activations.
    is_split: bool = True
    #: The memory of ``B`` in halves, if known. Then ``backward_bytes`` are for ``I``.
    halves: Halves | None = None
    #: Size of the results that a recomputed micro-batch keeps from its forward on.
    kept_bytes: float = 0.0
    #: The part of them that is among the activations.
    kept_activation_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self)

    def seconds(self, kind: str) -> float:
        """Return the seconds of a kind of action; of a backward, without a recomputation."""
        if kind == 'F':
            return self.forward
        if kind == 'R':
            if self.recomputation is None:
                return self.forward
            return self.recomputation
        if kind == 'B':
            return self.backward
        weight = self.backward / 2 if self.weight_backward is None else self.weight_backward
        if kind == 'W':
            return weight
        rest = max(0.0, self.backward - weight)
        if self.input_backward is None:
            return rest
        return self.input_backward


def operations_to_keep(layer: LayerProfile, is_last: bool) -> list[OperationProfile]:
    """Return the operations of a layer whose results can be kept, by whether it is the last."""
    operations = []
    for operation in layer.operations:
        if not (is_last and operation.is_output):
            operations.append(operation)
    return operations


def _kept(layer: LayerProfile, names: Collection[str], is_last: bool) -> OperationProfile:
    """Return the sum of the operations of a layer with these names."""
    operations = []
    for operation in operations_to_keep(layer, is_last):
        if operation.name in names:
            operations.append(operation)
    return _added(operations)


def _added(operations: Sequence[OperationProfile]) -> OperationProfile:
    """Return the sum of operations."""
    seconds = 0.0
    size = saved_size = 0
    for operation in operations:
        seconds += operation.seconds
        size += operation.bytes
        saved_size += operation.saved_bytes
    return OperationProfile('', seconds, size, saved_size)


class Measured(Protocol):
    """A :class:`~torchgpipe.balance.Profile`."""

    @property
    def layers(self) -> Sequence[LayerProfile]:
        """The profile of each layer."""

    def blocks(self, chunks: int, param_scale: float) -> Blocks:
        """Return time and memory of blocks of the layers."""


@dataclass(frozen=True)
class Costs:
    """Costs of a step: its stages, the skips between them, and the links between devices.

    >>> costs = Costs([StageCosts(forward=1.0, backward=2.0)] * 4, links=Link(latency=0.1))
    >>> len(costs.stages)
    4
    """

    #: The costs of each stage.
    stages: Sequence[StageCosts]
    #: Skips by source and target stage, in bytes of one micro-batch.
    skips: Sequence[SkipProfile] = ()
    #: The links between devices, which are the rows of a schedule.
    links: Links = Link()
    #: Whether replicas exchange while a device computes. By default, the exchanges of a stage run
    #: beside the actions of other stages, as in a step of many processes. ``True`` also means
    #: during its own actions, layer by layer: a gather runs during the first forward, and a
    #: reduction starts with the last backward. ``False`` means before the first and after the last
    #: action of the device.
    overlap: bool | None = None
    #: The number of the last messages to each neighbour that a device holds.
    messages: int = 0

    def __post_init__(self) -> None:
        last = len(self.stages) - 1
        wrong = [x for x in self.skips if not x.source < x.target <= last]
        if wrong:
            raise ValueError(
                f'a skip goes to a later one of the {last + 1} stages, but there is {wrong[0]}'
            )

    @staticmethod
    def of(
        profile: Measured,
        balance: Sequence[int],
        chunks: int,
        checkpoint: Checkpoint = 'except_last',
        *,
        param_scale: float = 2.0,
        links: Links = Link(),
        overhead: Mapping[str, float] | None = None,
        least: Mapping[str, float] | None = None,
        split: float = 0.0,
        keep: Mapping[str, Collection[str]] | str | None = None,
    ) -> 'Costs':
        """Compute the costs of stages from the profile of the layers.

        If a profile does not have the shares of a split backward, they follow a rule. In a layer
        with trainable parameters, gradients of weights take half of backward, as they do in matrix
        products and convolutions. In the first such layer they take all of it, because its input
        needs no gradient. In layers without trainable parameters they take nothing.

        >>> from torchgpipe.balance import Profile
        >>> layers = [LayerProfile(str(k), 2.0, 4.0, 8, 0, 0, 4, 4) for k in range(4)]
        >>> profile = Profile(tuple(layers), (), batch_size=16, input_bytes=4, device='cpu')
        >>> costs = Costs.of(profile, [2, 2], chunks=4)
        >>> [(x.forward, x.backward, x.weight_backward, x.recomputed) for x in costs.stages]
        [(1.0, 2.0, 1.5, 3), (1.0, 2.0, 1.0, 3)]

        Args:
            profile: The profile of the layers, by :func:`torchgpipe.balance.profile`.
            balance: The number of layers of each stage.
            chunks: The number of micro-batches, which count as equally large.
            checkpoint: As for :class:`~torchgpipe.GPipe`.
            param_scale: Bytes for a trainable parameter, its gradient and the optimizer's state,
                relative to the parameter.
            links: The links between devices.
            overhead: Seconds that an action takes in addition to its layers, by kind.
            least: The least seconds of an action, by kind, because the host needs them to start
                its operations: see :class:`~torchgpipe.plan.Machine`.
            split: The part of a backward by which its halves take longer, where the profile does
                not have their shares.
            keep: By name of a layer, the operations whose results checkpointing keeps; or
                ``'products'``.

        Raises:
            ValueError: The balance is for other layers, or an argument is wrong.
        """
        if sum(balance) != len(profile.layers) or min(balance, default=0) < 1:
            raise ValueError(
                f'the balance {list(balance)} is none of the {len(profile.layers)} '
                'layers that the profile has'
            )
        blocks = profile.blocks(chunks, param_scale)
        m = blocks.m
        input_backward = []
        weight_backward = []
        for backward, shares in zip(blocks.backward, _shares(profile.layers, split)):
            input_backward.append(shares[0] * backward)
            weight_backward.append(shares[1] * backward)
        cuts = [0, *accumulate(balance)]
        check_kinds('overhead', overhead or {})
        check_kinds('least', least or {})
        if not 0 <= split < inf:
            raise ValueError(
                'split must be a finite number, not below zero: the part of a '
                f'backward that its halves take in addition; it is {split!r}'
            )

        def seconds(kind: str, layers: Sequence[float]) -> float:
            """Return the seconds of an action, given the seconds of its layers."""
            computed = sum(layers) / m + (overhead or {}).get(kind, 0.0)
            return max(computed, (least or {}).get(kind, 0.0))

        stages = []
        kept = []
        for layer in profile.layers:
            names: Collection[str] = PRODUCTS | SMALL_PRODUCTS
            if not isinstance(keep, str):
                names = (keep or {}).get(layer.name, ())
            kept.append(_kept(layer, names, layer is profile.layers[-1]))
        stops = checkpoint_stops(checkpoint, m, len(balance))
        for start, end, stop in zip(cuts, cuts[1:], stops):
            layers = slice(start, end)
            resident_bytes = blocks.resident[end] - blocks.resident[start]
            if start == 0:
                resident_bytes += blocks.inputs[0]
            kept_in_stage = _added(kept[layers])
            repeated = []
            for forward, operations in zip(blocks.forward[layers], kept[layers]):
                repeated.append(max(0.0, forward - operations.seconds))
            stage = StageCosts(
                forward=seconds('F', blocks.forward[layers]),
                backward=seconds('B', blocks.backward[layers]),
                weight_backward=seconds('W', weight_backward[layers]),
                input_backward=seconds('I', input_backward[layers]),
                recomputation=seconds('R', repeated),
                recomputed=stop,
                activation_bytes=(blocks.activations[end] - blocks.activations[start]) / m,
                kept_bytes=kept_in_stage.bytes / m,
                kept_activation_bytes=kept_in_stage.saved_bytes / m,
                backward_bytes=max(blocks.passing[layers]) / m,
                output_bytes=blocks.inputs[end] / m,
                resident_bytes=resident_bytes,
                is_split=any(weight_backward[layers]),
            )
            stages.append(stage)
        return Costs(tuple(stages), _between(blocks.skips, balance, m), links)

    @property
    def stops(self) -> tuple[int, ...]:
        """By stage, the number of first micro-batches whose activations forward discards."""
        return tuple(stage.recomputed for stage in self.stages)

    def check_links(self, devices: int) -> None:
        """Check that there is a link between any two of the devices.

        Raises:
            ValueError: A link is missing, or there are links for more devices.
        """
        links = self.links
        if isinstance(links, Link):
            return
        shape = [len(row) if isinstance(row, Sequence) else row for row in links]
        if shape != [devices] * devices or any(
            not isinstance(link, Link) for row in links for link in row
        ):
            raise ValueError(
                'links must be one Link, or for each device a row of one for each '
                f'device; for {devices} devices, there are rows of {shape}'
            )

    def link(self, source: int, target: int) -> Link:
        """Return the link from one device to another."""
        if isinstance(self.links, Link):
            return self.links
        return self.links[source][target]


def _shares(layers: Sequence[LayerProfile], split: float) -> Iterator[tuple[float, float]]:
    """Yield for each layer the shares of its backward that ``I`` and ``W`` take."""
    is_first = True
    for x in layers:
        is_trained = x.parameter_bytes > x.frozen_bytes
        by_rule = 0.0
        if is_trained:
            by_rule = 1.0 if is_first else 0.5
        is_first = is_first and not is_trained
        if x.input_share is None or x.weight_share is None:
            yield 1 - by_rule, by_rule + split * is_trained
        else:
            yield x.input_share, x.weight_share


def _between(
    skips: Sequence[SkipProfile], balance: Sequence[int], m: int
) -> tuple[SkipProfile, ...]:
    """Return the skips from stage to stage."""
    stage_of = [j for j, number in enumerate(balance) for _ in range(number)]
    each = [SkipProfile(stage_of[x.source], stage_of[x.target], x.bytes) for x in skips]
    return tuple(
        SkipProfile(x.source, x.target, -(-x.bytes // m)) for x in each if x.source != x.target
    )


# Measurements: copies between devices, and the overhead of an action.

#: Bytes of a timed copy whose time is all latency.
SMALL = 4
#: Bytes of a timed copy whose time is bandwidth.
LARGE = 2**24

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
    links = []
    for source in places:
        links.append(tuple(_measure(source, target) for target in places))
    return tuple(links)


def _measure(source: torch.device, target: torch.device) -> Link:
    if source == target:
        return Link()
    small, large = (
        _seconds(torch.zeros(size, dtype=torch.uint8, device=source), target)
        for size in (SMALL, LARGE)
    )
    if large > small:
        return Link(small, (LARGE - SMALL) / (large - small))
    return Link(small)


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
FEW = 2
MANY = 10

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
        alone = _each(lambda x: [layers(part).sum().backward() for part in x.split(1)]) / len(
            devices
        )
        both, split, recomputed = (
            max(0.0, _each(step) - alone)
            for step in (
                _step(devices, '1f1b', 'never'),
                _step(devices, 'zb-h1', 'never'),
                _step(devices, '1f1b', 'always'),
            )
        )
    one = both / 2
    half = max(0.0, split - one) / 2
    return {'F': one, 'B': one, 'I': half, 'W': half, 'R': max(0.0, recomputed - both)}


def _step(devices: Sequence[Device], schedule: str, checkpoint: str) -> Callable[[Tensor], object]:
    """Return a function that runs a step: one layer on each device, as many chunks as samples."""
    places = [parse_device(device) for device in devices]
    engine = Engine([nn.Sequential(nn.Linear(1, 1)) for _ in places], places)

    def run(x: Tensor) -> object:
        batches, sizes, common = cut(x, len(x), 0)
        losses = Losses(LossOptions(lambda y, _: y.sum()), sizes)
        again = [*map(range, checkpoint_stops(checkpoint, len(x), len(places)))]
        return run_step(
            engine, batches, losses, schedule, False, again, common=common, offload=False
        )

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
