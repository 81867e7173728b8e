"""Split a sequence of costs into blocks: the largest block is minimal, the others are even.

A block may have to end early, where memory is limited. Which places the end of block ``j`` can
have, given a bound on every block's cost, follows from those of block ``j-1``: each start ``a``
reaches all ends up to a furthest one. The *bottleneck* is the smallest bound for which the last
block reaches the end of the sequence; it is found by bisection, in integers, so it is exact::

    costs     3  1  2  2  4        the first block has room for two layers, the second for three
    ends      ·  1  1  ·  ·  ·     of block 0, with bound 8
              ·  ·  ·  ·  1  1     of block 1: the bound can be kept

Of all cuts that keep it, the one with the least sum of squares is taken, which is the most even
one, since the mean is given; and of those the one whose blocks have the most even lengths::

    costs                1  1  1  0  0  4        three blocks
    bottleneck           4
    cuts that keep it    1 | 1 1 0 0 | 4    squares 1 + 4 + 16, lengths 1 4 1
                         1 1 | 1 0 0 | 4    squares 4 + 1 + 16, lengths 2 3 1   ◀── this one
                         1 1 1 | 0 0 | 4    squares 9 + 0 + 16                  …

The cost of a block as a function of its ends satisfies the quadrangle inequality, also where it is
infinite since the block is too large. So a shorter sequence has its last cut no later than a
longer one, and dynamic programming by divide and conquer takes O(partitions × layers × log
layers): Galil and Park, "Dynamic programming with convexity, concavity and sparsity" (1992). This
holds unless a block that starts later has to end earlier; then the cut is one of the even ones.
"""
from bisect import bisect_left, bisect_right
from collections.abc import Sequence, Sized
from fractions import Fraction
from itertools import accumulate
from math import inf, lcm
from operator import sub
from typing import Any, TypeVar

__all__ = ['bounded_cuts', 'check_partitions', 'even_cuts', 'integers', 'positive', 'reachable',
           'solve']

Number = int | float
T = TypeVar('T', int, float)

#: By block, the places that its end can have, in ascending order; before them the start of all.
Ends = list[list[int]]

#: By block and start, the furthest end that it can have, or the start if there is none; whatever
#: ends before it fits as well.
Furthest = Sequence[Sequence[int]]


def solve(sequence: Sequence[T], partitions: int = 1) -> list[list[T]]:
    """Cut a sequence into consecutive blocks whose largest sum is as small as possible.

    >>> solve([1, 2, 3, 4, 5, 6], partitions=2)
    [[1, 2, 3, 4], [5, 6]]

    By bisection, then dynamic programming as in Galil and Park, "Dynamic programming with
    convexity, concavity and sparsity" (1992).

    Args:
        sequence: Costs, in any unit, none of them negative.
        partitions: Number of blocks, each of which gets one item at least.

    Returns:
        The blocks. Ties are broken as evenly as possible, by the sum of squares of the blocks'
        sums, then by that of their lengths.

    Raises:
        ValueError: There are fewer than 1 partitions or fewer items than partitions, or a cost is
            negative or not finite.
        TypeError: ``partitions`` is not an integer.
    """
    check_partitions(sequence, partitions)
    items = iter(sequence)
    return [[next(items) for _ in range(length)]
            for length in even_cuts(sequence, range(len(sequence) + 1), partitions)]


def even_cuts(costs: Sequence[float], edges: Sequence[int], partitions: int) -> list[int]:
    """Cut costs at some edges only; return the number of layers of each partition."""
    number = len(edges) - 1
    return bounded_cuts(costs, edges, [[number] * number] * partitions) or []


def bounded_cuts(costs: Sequence[float], edges: Sequence[int], furthest: Furthest
                 ) -> list[int] | None:
    """Cut costs at some edges only, into blocks that fit.

    >>> bounded_cuts([1, 1, 1, 1], [0, 1, 3, 4], furthest=[[1, 2, 3], [3, 3, 3]])
    [1, 3]

    Args:
        costs: Of the layers, none of them negative.
        edges: Where blocks may start and end, in ascending order.
        furthest: By block.

    Returns:
        The number of layers of each block, or ``None`` if there is no such cut.
    """
    prefix = [0, *accumulate(integers([sum(costs[a:b]) for a, b in zip(edges, edges[1:])]))]
    low = max(-(-prefix[-1] // len(furthest)), *map(sub, prefix[1:], prefix))
    high = prefix[-1]
    ends = reachable(prefix, furthest, high)
    if not ends[-1]:
        return None
    while low < high:
        middle = (low + high) // 2
        found = reachable(prefix, furthest, middle)
        if found[-1]:
            ends, high = found, middle
        else:
            low = middle + 1
    cuts = [edges[k] for k in _most_even(prefix, furthest, high, ends)]
    return [b - a for a, b in zip(cuts, cuts[1:])]


def positive(number: int, what: str) -> int:
    """Return a number as an integer, or raise if it is none, or not above zero."""
    if isinstance(number, bool) or not hasattr(number, '__index__'):
        raise TypeError(f'{what} must be an integer, but is {number!r}')
    if number < 1:
        raise ValueError(f'{what} must be a positive integer, but is {number}')
    return number.__index__()


def check_partitions(sequence: Sized, partitions: int) -> None:
    """Raise if a number of partitions is none, or a sequence is too short for it."""
    if len(sequence) < positive(partitions, 'partitions'):
        raise ValueError(f'sequence is shorter than intended partitions: {len(sequence)} layers '
                         f'cannot be cut into {partitions} partitions of one layer at least; '
                         'ask for fewer partitions; or, where to_sequential has made the layers, '
                         "for more of these: grain='layer'")


def integers(sequence: Sequence[Number]) -> list[int]:
    """Scale costs to integers, exactly: a float is an integer over a power of two."""
    for index, cost in enumerate(sequence):
        if not 0 <= cost < inf:
            raise ValueError(f'costs must be finite and not negative, but item {index} is {cost}')
    # NumPy's and PyTorch's numbers as Python's.
    plain: list[Any] = [cost.item() if hasattr(cost, 'item') else cost for cost in sequence]
    exact = [Fraction(cost) for cost in plain]
    scale = lcm(*(cost.denominator for cost in exact))
    return [int(cost * scale) for cost in exact]


def reachable(prefix: Sequence[int], furthest: Furthest, bound: int) -> Ends:
    """Return the ends that each block can have if the rest keeps the bound as well.

    Args:
        prefix: Sums of the costs before each edge.
        furthest: By block.
        bound: Of the cost of a block.
    """
    last = len(prefix) - 1
    stops = [bisect_right(prefix, total + bound, a) - 1 for a, total in enumerate(prefix)]
    rows: Ends = [[0]]
    for left, limits in zip(range(len(furthest) - 1, -1, -1), furthest):
        ends: list[int] = []
        # The blocks that are left have room for so much.
        reached = bisect_left(prefix, prefix[-1] - left * bound) - 1 if left else last - 1
        for a in rows[-1]:
            if a < last:
                stop, limit = stops[a], limits[a]
                if limit < stop:
                    stop = limit
                if stop > reached:
                    ends += range(1 + (reached if reached > a else a), stop + 1)
                    reached = stop
        rows.append(ends)
    return rows


def _most_even(prefix: Sequence[int], furthest: Furthest, bound: int, rows: Ends) -> list[int]:
    """Choose from the ends the cuts that keep the bound and have the least sum of squares."""
    for starts, ends, limits in zip(rows[-2::-1], rows[:0:-1], furthest[::-1]):
        starts[:] = [a for a in starts if a < ends[-1] and (
            b := ends[bisect_right(ends, a)]) <= limits[a] and prefix[b] - prefix[a] <= bound]
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


def _choose(prefix: Sequence[int], bound: int, points: Sequence[tuple[int, int, int, int]],
            ends: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Add a block ``a`` to ``b``: find the best start for each end.

    It costs ``weight * (S[b] - S[a])² + (b - a)²``, which is ``square(b) + square(a)`` less
    ``2 * weight * S[b] * S[a] + 2 * b * a``.

    Args:
        prefix: Sums ``S`` of the costs before each edge.
        bound: Of the cost of a block.
        points: By start ``a``: itself, ``S[a]``, the least cost of all blocks before it with
            ``square(a)`` added, and the furthest end.
        ends: Where it may end; each of these is reached from one of the starts.

    Returns:
        The least costs by ``b``, with ``square(b)`` added, and the starts that give them.
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
        factor, twice = 2 * weight * prefix[b], 2 * b
        # The best start lies between those of ends on either side, or else it may be anywhere.
        for one, other in ((max(first, low), min(last, high)), (first, last)):
            if values := [(cost - factor * total - twice * a, a)
                          for a, total, cost, end in points[one:other] if end >= b]:
                break
        cost, choice[b] = min(values)
        costs[b] = cost + 2 * (weight * prefix[b] ** 2 + b * b)
        place = bisect_left(points, (choice[b],))
        spans += [span for span in ((left, middle, low, place + 1),
                                    (middle + 1, right, place, high)) if span[0] < span[1]]
    return costs, choice
