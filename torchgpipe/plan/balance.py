"""Balances: split a sequence of costs into partitions, by a profile of the layers.

:class:`Profile` holds the measured layers, and :meth:`Profile.balance` makes a :class:`Balance`.

:func:`solve`, :func:`even_cuts` and :func:`bounded_cuts` cut a sequence of costs. Limited memory
may force a block to end early. Given a bound on every block's cost, the possible ends of block
``j`` follow from the possible ends of block ``j-1``. Each start ``a`` reaches all ends up to a
furthest one. The *bottleneck* is the smallest bound for which the last block reaches the end of
the sequence. It is exact, because the bisection that finds it uses integers::

    costs     3  1  2  2  4        the first block has room for two layers, the second for three
    ends      ·  1  1  ·  ·  ·     of block 0, with bound 8
              ·  ·  ·  ·  1  1     of block 1: the bound can be kept

Among all cuts that keep the bottleneck, the result has the least sum of squares. It is the most
even cut, because all cuts have the same mean. Ties are broken by the most even lengths::

    costs                1  1  1  0  0  4        three blocks
    bottleneck           4
    cuts that keep it    1 | 1 1 0 0 | 4    squares 1 + 4 + 16, lengths 1 4 1
                         1 1 | 1 0 0 | 4    squares 4 + 1 + 16, lengths 2 3 1   ◀── this one
                         1 1 1 | 0 0 | 4    squares 9 + 0 + 16                  …

The cost of a block as a function of its ends satisfies the quadrangle inequality. It also does
where the cost is infinite, because the block is too large. So a shorter sequence has its last cut
no later than a longer one. Dynamic programming by divide and conquer then takes O(partitions ×
layers × log layers): Galil and Park, "Dynamic programming with convexity, concavity and sparsity"
(1992). If a block that starts later has to end earlier, the cut is even, but there may be a more
even one.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence, Sized
from dataclasses import MISSING, asdict, dataclass, fields, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise
from math import inf, lcm
from operator import attrgetter, sub
from typing import Any, TypeVar

from torchgpipe.base.errors import format_bytes, table
from torchgpipe.plan.costs import (
    Blocks,
    Costs,
    LayerProfile,
    MemoryLimit,
    OperationProfile,
    Peak,
    SkipProfile,
    TieProfile,
    check_numbers,
    memory_limits,
    peaks,
)
from torchgpipe.plan.simulation import simulate
from torchgpipe.schedule.generators import plain_call

__all__ = [
    'Balance',
    'Profile',
    'bounded_cuts',
    'check_partitions',
    'edges_for',
    'even_cuts',
    'fastest',
    'integers',
    'neighbours',
    'positive',
    'reachable',
    'solve',
]

Number = int | float
TCost = TypeVar('TCost', int, float)

#: By block, its possible ends in ascending order, after a first entry with the start of the
#: sequence.
Ends = list[list[int]]

#: By block and start, the furthest possible end, or the start if there is none. Blocks that end
#: earlier fit as well.
Furthest = Sequence[Sequence[int]]


def solve(sequence: Sequence[TCost], partitions: int = 1) -> list[list[TCost]]:
    """Cut a sequence into consecutive blocks whose largest sum is as small as possible.

    >>> solve([1, 2, 3, 4, 5, 6], partitions=2)
    [[1, 2, 3, 4], [5, 6]]

    The method is bisection, then dynamic programming as in Galil and Park, "Dynamic programming
    with convexity, concavity and sparsity" (1992).

    Args:
        sequence: Costs, in any unit, none of them negative.
        partitions: Number of blocks, each of which gets one item at least.

    Returns:
        The blocks. Ties are broken by the least sum of squares of the blocks' sums, then of the
        blocks' lengths.

    Raises:
        ValueError: There are fewer than 1 partitions or fewer items than partitions, or a cost is
            negative or not finite.
        TypeError: ``partitions`` is not an integer.
    """
    check_partitions(sequence, partitions)
    blocks: list[list[TCost]] = []
    lengths = even_cuts(sequence, range(len(sequence) + 1), partitions)
    for end, length in zip(accumulate(lengths), lengths):
        blocks.append(list(sequence[end - length : end]))
    return blocks


def even_cuts(costs: Sequence[float], edges: Sequence[int], partitions: int) -> list[int]:
    """Cut costs at the given edges only, and return the number of layers of each partition."""
    number = len(edges) - 1
    return bounded_cuts(costs, edges, [[number] * number] * partitions) or []


def bounded_cuts(
    costs: Sequence[float], edges: Sequence[int], furthest: Furthest
) -> list[int] | None:
    """Cut costs at the given edges only, into blocks that fit.

    >>> bounded_cuts([1, 1, 1, 1], [0, 1, 3, 4], furthest=[[1, 2, 3], [3, 3, 3]])
    [1, 3]

    Args:
        furthest: By block and start, the furthest possible end.

    Returns:
        The number of layers of each block, or ``None`` if there is no such cut.
    """
    prefix = [0, *accumulate(integers([sum(costs[a:b]) for a, b in pairwise(edges)]))]
    low = max(-(-prefix[-1] // len(furthest)), *map(sub, prefix[1:], prefix))
    high = prefix[-1]
    ends = reachable(prefix, furthest, high)
    if not ends[-1]:
        return None
    while low < high:
        middle = (low + high) // 2
        found = reachable(prefix, furthest, middle)
        if found[-1]:
            ends = found
            high = middle
        else:
            low = middle + 1
    cuts = [edges[k] for k in _most_even(prefix, furthest, high, ends)]
    return [b - a for a, b in pairwise(cuts)]


def positive(number: int, what: str) -> int:
    """Return a number as an integer, or raise if it is not a positive integer."""
    if isinstance(number, bool) or not hasattr(number, '__index__'):
        raise TypeError(f'{what} must be an integer, but is {number!r}')
    if number < 1:
        raise ValueError(f'{what} must be a positive integer, but is {number}')
    return number.__index__()


def check_partitions(sequence: Sized, partitions: int) -> None:
    """Raise if the number of partitions is not a positive integer, or the sequence is shorter."""
    if len(sequence) < positive(partitions, 'partitions'):
        raise ValueError(
            f'sequence is shorter than intended partitions: {len(sequence)} layers '
            f'cannot be cut into {partitions} partitions of one layer at least; '
            'ask for fewer partitions; or, where to_sequential has made the layers, '
            "for more of these: grain='layer'"
        )


def integers(sequence: Sequence[Number]) -> list[int]:
    """Scale costs to integers, exactly: a float is an integer over a power of two."""
    for index, cost in enumerate(sequence):
        if not 0 <= cost < inf:
            raise ValueError(f'costs must be finite and not negative, but item {index} is {cost}')
    # Convert numbers of NumPy and PyTorch to Python's.
    plain: list[Any] = [cost.item() if hasattr(cost, 'item') else cost for cost in sequence]
    exact = [Fraction(cost) for cost in plain]
    scale = lcm(*(cost.denominator for cost in exact))
    return [int(cost * scale) for cost in exact]


def reachable(prefix: Sequence[int], furthest: Furthest, bound: int) -> Ends:
    """Return the possible ends of each block, with which the rest can keep the bound as well.

    Args:
        prefix: Sums of the costs before each edge.
        furthest: By block and start, the furthest possible end.
    """
    last = len(prefix) - 1
    stops = [bisect_right(prefix, total + bound, a) - 1 for a, total in enumerate(prefix)]
    rows: Ends = [[0]]
    for left, limits in zip(range(len(furthest) - 1, -1, -1), furthest):
        ends: list[int] = []
        # The end of this block has to be after this edge, or the rest would exceed the bound.
        reached = bisect_left(prefix, prefix[-1] - left * bound) - 1 if left else last - 1
        for a in rows[-1]:
            if a < last:
                stop = stops[a]
                limit = limits[a]
                if limit < stop:
                    stop = limit
                if stop > reached:
                    ends += range(1 + (reached if reached > a else a), stop + 1)
                    reached = stop
        rows.append(ends)
    return rows


def _most_even(prefix: Sequence[int], furthest: Furthest, bound: int, rows: Ends) -> list[int]:
    """Return the cuts that keep the bound and have the least sum of squares."""
    for starts, ends, limits in zip(rows[-2::-1], rows[:0:-1], furthest[::-1]):
        starts[:] = [
            a
            for a in starts
            if a < ends[-1]
            and (b := ends[bisect_right(ends, a)]) <= limits[a]
            and prefix[b] - prefix[a] <= bound
        ]
    costs = {0: 0}
    choices = []
    for starts, ends, limits in zip(rows, rows[1:], furthest):
        points = [(a, prefix[a], costs[a], limits[a]) for a in starts]
        costs, choice = _choose(prefix, bound, points, ends)
        choices.append(choice)
    cuts = [len(prefix) - 1]
    for choice in choices[::-1]:
        cuts.append(choice[cuts[-1]])
    return cuts[::-1]


def _choose(
    prefix: Sequence[int],
    bound: int,
    points: Sequence[tuple[int, int, int, int]],
    ends: Sequence[int],
) -> tuple[dict[int, int], dict[int, int]]:
    """Add a block ``a`` to ``b``: find the best start for each end.

    The block costs ``weight * (S[b] - S[a])² + (b - a)²``, which is ``square(b) + square(a)`` less
    ``2 * weight * S[b] * S[a] + 2 * b * a``.

    Args:
        prefix: Sums ``S`` of the costs before each edge.
        points: By start ``a``: itself, ``S[a]``, the least cost of all blocks before it with
            ``square(a)`` added, and the furthest end.
    """
    # Squares of lengths come second: they cannot outweigh one unit of the squares of sums.
    weight = len(prefix) ** 2
    costs: dict[int, int] = {}
    choice: dict[int, int] = {}
    spans = [(0, len(ends), 0, len(points))]
    while spans:
        left, right, low, high = spans.pop()
        middle = (left + right) // 2
        b = ends[middle]
        first = bisect_left(points, (bisect_left(prefix, prefix[b] - bound),))
        last = bisect_left(points, (b,))
        factor = 2 * weight * prefix[b]
        twice = 2 * b
        # The best start lies between the best starts of the ends on both sides. If no start there
        # is possible, it may be anywhere.
        for one, other in ((max(first, low), min(last, high)), (first, last)):
            if values := [
                (cost - factor * total - twice * a, a)
                for a, total, cost, end in points[one:other]
                if end >= b
            ]:
                break
        cost, choice[b] = min(values)
        costs[b] = cost + 2 * (weight * prefix[b] ** 2 + b * b)
        place = bisect_left(points, (choice[b],))
        spans += [
            span
            for span in ((left, middle, low, place + 1), (middle + 1, right, place, high))
            if span[0] < span[1]
        ]
    return costs, choice


def neighbours(balance: Sequence[int], edges: Sequence[int]) -> Iterator[list[int]]:
    """Yield the balances that differ in one cut, which is at the next edge or the one before.

    >>> [*neighbours([2, 1, 3], edges=[0, 1, 2, 3, 4, 5, 6])]
    [[1, 2, 3], [2, 2, 2]]
    """
    cuts = [0, *accumulate(balance)]
    for k in range(1, len(cuts) - 1):
        place = edges.index(cuts[k]) if cuts[k] in edges else -1
        for cut in (edges[place - 1], edges[place + 1]) if place > 0 else ():
            if cuts[k - 1] < cut < cuts[k + 1]:
                moved = [*cuts[:k], cut, *cuts[k + 1 :]]
                yield [b - a for a, b in pairwise(moved)]


def _without(layer: LayerProfile, tie: TieProfile) -> LayerProfile:
    """Return a layer without a parameter that another layer counts."""
    layer = replace(layer, parameter_bytes=layer.parameter_bytes - tie.bytes)
    if tie.is_frozen:
        return replace(layer, frozen_bytes=layer.frozen_bytes - tie.bytes)
    if layer.trainable_parameters is None:
        return layer
    return replace(layer, trainable_parameters=layer.trainable_parameters - tie.parameters)


T = TypeVar('T')


class Balance(list[int]):
    """The number of layers of each partition, for ``GPipe(balance=…)``, with predictions.

    :meth:`Profile.balance` makes it. It is a list of integers, with the layers that they are for.
    ``list(balance)`` drops the layers and predictions.

    >>> layers = LayerProfile('a', 1, 2, 8, 0, 0, 4, 4), LayerProfile('b', 1, 1, 8, 0, 0, 4, 4)
    >>> profile = Profile(layers, (), batch_size=16, input_bytes=4, device='cpu')
    >>> balance = profile.balance(2, chunks=4, checkpoint='never')
    >>> balance, balance.seconds, round(balance.speed_up, 2)
    ([1, 1], [3.0, 2.0], 1.43)
    """

    #: Seconds of each partition for one training step on one mini-batch, waiting not counted.
    seconds: list[float]
    #: Bytes of each partition at the peak of a training step. Memory that a layer needs only while
    #: it runs is not counted, nor the overhead of an allocator.
    bytes: list[int]
    #: The part of the devices' time in a step in which they wait, from 0 to 1.
    bubble: float
    #: The speed relative to the unwrapped model on one device, if one device could hold it.
    speed_up: float
    #: Names of the layers that the balance is for, and bytes of their parameters.
    layers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Profile:
    """Time and memory of the layers of a sequential module.

    :func:`torchgpipe.balance.profile` makes it.

    Times are medians in seconds, sizes are in bytes, all for one training step on the whole
    sample, without checkpoints. ``print(profile)`` shows a table.

    >>> layer = LayerProfile('0', forward_seconds=0.002, backward_seconds=0.004,
    ...                      parameter_bytes=288, frozen_bytes=0, buffer_bytes=0,
    ...                      activation_bytes=0, output_bytes=512)
    >>> profile = Profile((layer,), (), batch_size=16, input_bytes=512, device='cpu')
    >>> print(profile)  # doctest: +NORMALIZE_WHITESPACE
    layer  forward, ms  backward, ms  parameters  activations  output
    ─────  ───────────  ────────────  ──────────  ───────────  ──────
    0            2.000         4.000       288 B          0 B   512 B
    total        2.000         4.000       288 B          0 B
    <BLANKLINE>
    16 samples on cpu
    """

    #: The layers, in the order of the model.
    layers: tuple[LayerProfile, ...]
    #: All skips between layers.
    skips: tuple[SkipProfile, ...]
    #: The batch size of the sample.
    batch_size: int
    #: Size of the sample.
    input_bytes: int
    #: The device of the measurement.
    device: str
    #: Parameters that several layers share.
    ties: tuple[TieProfile, ...] = ()

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.batch_size < 1:
            raise ValueError(
                f'the batch_size of a Profile must be 1 or more, but is {self.batch_size}'
            )

    def __str__(self) -> str:
        def row(name: str, layers: Sequence[LayerProfile], output: str) -> list[str]:
            return [
                name,
                f'{sum(x.forward_seconds for x in layers) * 1e3:.3f}',
                f'{sum(x.backward_seconds for x in layers) * 1e3:.3f}',
                format_bytes(sum(x.parameter_bytes for x in layers)),
                format_bytes(sum(x.activation_bytes for x in layers)),
                output,
            ]

        rows = [row(x.name, [x], format_bytes(x.output_bytes)) for x in self.layers]
        header = ['layer', 'forward, ms', 'backward, ms', 'parameters', 'activations', 'output']
        return (
            table(header, [*rows, row('total', self.layers, '')])
            + f'\n\n{self.batch_size} samples on {self.device}'
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the profile in types that JSON supports: dictionaries, lists, strings, numbers.

        >>> profile = Profile((LayerProfile('0', 1.0, 2.0, 8, 0, 0, 4, 4),), (), 16, 4, 'cpu')
        >>> Profile.from_dict(profile.to_dict()) == profile
        True
        """
        return {
            'version': 1,
            **asdict(self),
            'layers': [asdict(x) for x in self.layers],
            'skips': [asdict(x) for x in self.skips],
            'ties': [{**asdict(x), 'layers': [*x.layers]} for x in self.ties],
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> 'Profile':
        """Return a profile from the result of :meth:`to_dict`.

        Args:
            data: The dictionary, possibly after a round trip through JSON.

        Returns:
            The profile.

        Raises:
            ValueError: The dictionary is not a profile.
        """
        if not isinstance(data, dict) or data.get('version') != 1 or data['version'] is True:
            raise ValueError(
                "this is not a profile: it has no 'version': 1, as Profile.to_dict() writes it"
            )
        rest = {key: value for key, value in data.items() if key != 'version'}
        rest.setdefault('ties', [])
        for key, cls in (('layers', LayerProfile), ('skips', SkipProfile), ('ties', TieProfile)):
            if not isinstance(rest.get(key), (list, tuple)):
                raise ValueError(
                    "this is not a profile: its 'layers', 'skips' and 'ties' are no lists"
                )
            rest[key] = tuple(_make(cls, item) for item in rest[key])
        rest['layers'] = tuple(map(_with_operations, rest['layers']))
        rest['ties'] = tuple(replace(x, layers=tuple(x.layers)) for x in rest['ties'])
        return _make(Profile, rest)

    @property
    def has_operations(self) -> bool:
        """Whether the operations of a layer are known."""
        return any(map(attrgetter('operations'), self.layers))

    def scaled(self, batch_size: int) -> 'Profile':
        """Return the profile for another batch size, if all costs but overheads scale with it.

        >>> layer = LayerProfile('0', 1.0, 2.0, 8, 0, 0, 4, 4, forward_overhead=0.5)
        >>> profile = Profile((layer,), (), batch_size=16, input_bytes=4, device='cpu')
        >>> profile.scaled(32).layers[0].forward_seconds
        1.5
        """
        ratio = batch_size / self.batch_size

        def seconds(all: float, overhead: float) -> float:
            overhead = min(overhead, all)  # Measurements of a small batch may be inconsistent.
            return overhead + (all - overhead) * ratio

        layers = tuple(
            replace(
                x,
                forward_seconds=seconds(x.forward_seconds, x.forward_overhead),
                backward_seconds=seconds(x.backward_seconds, x.backward_overhead),
                activation_bytes=round(x.activation_bytes * ratio),
                output_bytes=round(x.output_bytes * ratio),
                operations=tuple(map(partial(OperationProfile.scaled, ratio=ratio), x.operations)),
            )
            for x in self.layers
        )
        skips = tuple(replace(x, bytes=round(x.bytes * ratio)) for x in self.skips)
        return replace(
            self,
            layers=layers,
            skips=skips,
            batch_size=batch_size,
            input_bytes=round(self.input_bytes * ratio),
        )

    def counted_once(self, owners: Sequence[object], in_last: bool = False) -> 'Profile':
        """Return the profile in which an owner of several layers has a shared parameter once.

        >>> layer = LayerProfile('0', 1.0, 2.0, 8, 0, 0, 4, 4)
        >>> profile = Profile((layer, layer), (), 16, 4, 'cpu', (TieProfile((0, 1), 6, 3),))
        >>> [x.parameter_bytes for x in profile.counted_once(['cpu', 'cpu']).layers]
        [8, 2]

        Args:
            owners: By layer, the stage or the device that has it.
            in_last: Whether the last of its layers counts the parameter, whose gradient comes
                first, instead of the first one.
        """
        layers = [*self.layers]
        for tie in self.ties:
            counted = set()
            for index in reversed(tie.layers) if in_last else tie.layers:
                if owners[index] in counted:
                    layers[index] = _without(layers[index], tie)
                counted.add(owners[index])
        if self.ties:
            return replace(self, layers=tuple(layers))
        return self

    def balance(
        self,
        partitions: int,
        *,
        chunks: int,
        memory_limit: MemoryLimit = None,
        param_scale: float = 2.0,
        checkpoint: str = 'except_last',
    ) -> Balance:
        """Find the balance whose slowest partition is as fast as possible.

        The result is exact for the measured times. Ties are broken as evenly as possible within
        the memory limits.

        >>> layers = [LayerProfile(str(k), k, 2 * k, 8, 0, 0, 4, 4) for k in range(1, 7)]
        >>> profile = Profile(tuple(layers), (), 16, 4, 'cpu')
        >>> balance = profile.balance(2, chunks=4, checkpoint='never')
        >>> balance, balance.seconds, round(balance.bubble, 2)
        ([4, 2], [30.0, 33.0], 0.22)

        Args:
            partitions: Number of partitions.
            chunks: Number of micro-batches.
            memory_limit: Bytes of each device: one number for all of them, or one per partition,
                where ``None`` is no limit.
            param_scale: Bytes for a trainable parameter, its gradient and the optimizer's state,
                relative to the parameter: SGD 2–3, Adam 4–5, Adadelta 4, Adagrad 3, RMSprop 3–5.
            checkpoint: As for :class:`~torchgpipe.GPipe`.

        Returns:
            The balance, with predictions.

        Raises:
            ValueError: An argument is wrong, or no balance keeps the limits.
        """
        partitions = positive(partitions, 'partitions')
        chunks = positive(chunks, 'chunks')
        limits = memory_limits(memory_limit, partitions, 'partitions')
        blocks = self.blocks(chunks, param_scale)
        costs = blocks.seconds(checkpoint)
        check_partitions(costs, partitions)
        edges = edges_for(self, partitions, checkpoint)
        peak = _peak(blocks, partitions, checkpoint)
        cases = [(limit, j == partitions - 1) for j, limit in enumerate(limits)]
        found = {case: blocks.furthest(edges, peak, *case) for case in {*cases}}
        furthest = [found[case] for case in cases]
        lengths = bounded_cuts(costs, edges, furthest)
        if lengths is None:
            names = [layer.name for layer in self.layers]
            raise ValueError(_why_not(names, blocks, edges, peak, limits, furthest))
        return self._predicted(lengths, blocks, checkpoint)

    def _predicted(self, lengths: list[int], blocks: Blocks, checkpoint: str) -> Balance:
        """Return a balance with predictions, for devices that do not slow each other down."""
        parts = [(end - length, end) for end, length in zip(accumulate(lengths), lengths)]
        seconds = blocks.seconds(checkpoint)
        peak = _peak(blocks, len(parts), checkpoint)
        costs = Costs.of(self, lengths, blocks.m, checkpoint)
        schedule, pairs = plain_call(len(parts), blocks.m, costs.stops)
        simulation = simulate(schedule, costs, pairs)
        sequential = sum(x.forward_seconds + x.backward_seconds for x in self.layers)
        balance = Balance(lengths)
        balance.layers = tuple((x.name, x.parameter_bytes) for x in self.layers)
        balance.seconds = [sum(seconds[a:b]) for a, b in parts]
        balance.bytes = [blocks.bytes(a, b, peak) for a, b in parts]
        balance.bubble = simulation.bubble
        balance.speed_up = sequential / simulation.seconds if simulation.seconds else 1.0
        return balance

    def blocks(self, chunks: int, param_scale: float) -> Blocks:
        """Return time and memory of blocks of the layers as stages.

        There are at most ``chunks`` micro-batches.
        """
        return Blocks(
            self.layers, self.skips, self.input_bytes, min(chunks, self.batch_size), param_scale
        )

    def edges(self) -> list[int]:
        """Return the places where partitions may start and end.

        A layer that changes the result of another layer in place belongs to the same partition. A
        checkpointed partition must not change its own input. Without checkpoints, the change may
        come too late for a skip.
        """
        forbidden: set[int] = set()
        for index, layer in enumerate(self.layers):
            if layer.changes is not None:
                forbidden.update(range(layer.changes + 1, index + 1))
        return [edge for edge in range(len(self.layers) + 1) if edge not in forbidden]


def fastest(profile: Profile, blocks: Blocks, partitions: int, checkpoint: str) -> list[int]:
    """Return the balance whose slowest partition is as fast as possible, with unlimited memory."""
    costs = blocks.seconds(checkpoint)
    check_partitions(costs, partitions)
    return even_cuts(costs, edges_for(profile, partitions, checkpoint), partitions)


def edges_for(profile: Profile, partitions: int, checkpoint: str) -> list[int]:
    """Return the edges of a profile, or all edges if these are too few for the partitions.

    Raises:
        ValueError: The edges are too few, and partitions are checkpointed.
    """
    edges = profile.edges()
    number = len(profile.layers)
    if len(edges) > partitions:
        return edges
    if checkpoint == 'never':
        return list(range(number + 1))
    layer = next(x for x in profile.layers if x.changes is not None)
    raise ValueError(
        f'{number} layers make only {len(edges) - 1} groups for {partitions} partitions, since a '
        "layer that changes another one's result in place has to be in its partition: "
        f"'{layer.name}' is one; let it not work in place, or use checkpoint='never'"
    )


def _peak(blocks: Blocks, partitions: int, checkpoint: str) -> Peak:
    """Return the micro-batches that each partition holds at its peak in the plain call."""
    return peaks(plain_call(partitions, blocks.m)[0], checkpoint, is_plain_call=True)[0]


def _make(cls: type[T], data: Any) -> T:
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    # A profile may be older than a field with a default.
    needed = {
        field.name
        for field in fields(cls)  # type: ignore[arg-type]
        if field.default is MISSING
    }
    if not isinstance(data, dict) or not needed <= {*data} <= names:
        problem = (
            f'{data!r} is one'
            if not isinstance(data, dict)
            else f'missing {sorted(needed - set(data))}, unknown {sorted(set(data) - names)}'
        )
        raise ValueError(f'this is not a profile: fields of a {cls.__name__}: {problem}')
    try:
        return cls(**data)
    except ValueError as error:
        raise ValueError(f'this is not a profile: {error}') from None


def _with_operations(layer: LayerProfile) -> LayerProfile:
    """Return a layer whose operations are records, not dictionaries."""
    operations = []
    for operation in layer.operations:
        operations.append(_make(OperationProfile, operation))
    return replace(layer, operations=tuple(operations))


def _why_not(
    names: Sequence[str],
    blocks: Blocks,
    edges: Sequence[int],
    peak: Peak,
    limits: Sequence[int | None],
    furthest: Sequence[Sequence[int]],
) -> str:
    """Return a message about the layers that do not fit.

    Args:
        limits: Limits of partitions, in bytes.
    """
    largest = inf if None in limits else max(limit or 0 for limit in limits)
    room = inf if None in limits else sum(limit or 0 for limit in limits)
    for start, end in pairwise(edges):
        need = min(blocks.bytes(a, end, peak) for a in edges[: edges.index(end)])
        if need > largest:
            return (
                f'{_block(names, start, end)} alone needs {format_bytes(need)}, but the '
                f'largest memory limit is {format_bytes(largest)}; raise chunks, split the '
                'layer, or take a larger device'
            )
    activations = -(-blocks.activations[-1] * peak.activations // blocks.m)
    total = blocks.resident[-1] + activations + blocks.inputs[0] + 2 * blocks.inputs[-1]
    all_of_them = f'all {len(names)} layers together need {format_bytes(total)} or more'
    if total > room:
        return (
            f'{all_of_them}, but the memory limits add up to {format_bytes(room)}; take more '
            'or larger devices, or raise chunks'
        )
    stuck = _stuck(names, blocks, edges, peak, limits, furthest)
    return f'{stuck}; {all_of_them}. Raise chunks, or take larger devices'


def _stuck(
    names: Sequence[str],
    blocks: Blocks,
    edges: Sequence[int],
    peak: Peak,
    limits: Sequence[int | None],
    furthest: Sequence[Sequence[int]],
) -> str:
    """Return a message about the partition that no balance within the limits gets past."""
    number = len(edges) - 1
    rows = reachable([0] * len(edges), furthest, 0)  # with no bound on the time
    j = next(j for j, ends in enumerate(rows[1:]) if not ends)
    ends = [number if j == len(limits) - 1 else a + 1 for a in range(number)]
    needs = [(blocks.bytes(edges[a], edges[ends[a]], peak), a) for a in rows[j] if a < number]
    if not needs:
        return f'no layer is left for partition {j}'
    need, a = min(needs)
    return (
        f'no balance keeps the memory limit of partition {j}, {format_bytes(limits[j] or 0)}: '
        f'at least {_block(names, edges[a], edges[ends[a]])} would be there and need '
        f'{format_bytes(need)}'
    )


def _block(names: Sequence[str], a: int, b: int) -> str:
    if b == a + 1:
        return f"layer '{names[a]}'"
    return f"the block of layers '{names[a]}' to '{names[b - 1]}'"
