"""Split a sequence of costs into blocks: the largest block is minimal, the others are even.

Both steps are exact, in integers. First the *bottleneck*, the smallest possible largest sum, by
bisection: whether a bound can be kept is found by filling blocks greedily. Then, of all cuts that
keep it, the one with the least sum of squares, which is the most even one, since the mean is
given; and of those the one whose blocks have the most even lengths::

    costs                1  1  1  0  0  4        three blocks
    bottleneck           4
    cuts that keep it    1 | 1 1 0 0 | 4    squares 1 + 4 + 16, lengths 1 4 1
                         1 1 | 1 0 0 | 4    squares 4 + 1 + 16, lengths 2 3 1   ◀── this one
                         1 1 1 | 0 0 | 4    squares 9 + 0 + 16                  …

The cost of a block as a function of its ends satisfies the quadrangle inequality, also where it is
infinite since the block is too large. So a shorter sequence has its last cut no later than a
longer one, and dynamic programming by divide and conquer takes O(partitions × layers × log
layers): Galil and Park, "Dynamic programming with convexity, concavity and sparsity" (1992).
"""
from bisect import bisect_left, bisect_right
from collections.abc import Sequence, Sized
from fractions import Fraction
from itertools import accumulate
from math import inf, lcm
from operator import sub
from typing import Any, TypeVar

__all__ = ['check_partitions', 'even_cuts', 'group', 'integers', 'positive', 'solve', 'ungroup']

Number = int | float
T = TypeVar('T', int, float)


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
    prefix: list[int] = [0, *accumulate(integers(sequence))]
    bottleneck: int = _bottleneck(prefix, partitions)
    cuts = [0, *_most_even(prefix, partitions, bottleneck), len(sequence)]
    return [list(sequence[a:b]) for a, b in zip(cuts, cuts[1:])]


def even_cuts(costs: Sequence[float], edges: Sequence[int], partitions: int) -> list[int]:
    """Cut costs at some edges only; return the number of layers of each partition."""
    return ungroup([len(block) for block in solve(group(costs, edges), partitions)], edges)


def group(costs: Sequence[float], edges: Sequence[int]) -> list[float]:
    """Add up the costs between edges."""
    return [sum(costs[a:b]) for a, b in zip(edges, edges[1:])]


def ungroup(lengths: Sequence[int], edges: Sequence[int]) -> list[int]:
    """Return numbers of layers for numbers of groups between edges."""
    cuts = [edges[k] for k in accumulate([0, *lengths])]
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


def _bottleneck(prefix: list[int], partitions: int) -> int:
    """Find the smallest bound on a block's sum that can be kept."""
    low: int = max(map(sub, prefix[1:], prefix))
    high = prefix[-1]
    while low < high:
        middle = (low + high) // 2
        if len(_fill(prefix, partitions, middle)) <= partitions:
            high = middle
        else:
            low = middle + 1
    return low


def _fill(prefix: list[int], partitions: int, bound: int) -> list[int]:
    """Fill blocks greedily: return the ends of at most ``partitions + 1`` of them."""
    ends: list[int] = []
    start = 0
    while start < len(prefix) - 1 and len(ends) <= partitions:
        start = bisect_right(prefix, prefix[start] + bound, start + 1) - 1
        ends.append(start)
    return ends


def _windows(prefix: list[int], partitions: int, bound: int) -> list[tuple[int, int]]:
    """Return for each cut the first and the last place where it can be, given the bound."""
    last = len(prefix) - 1
    latest = _fill(prefix, partitions, bound)
    latest += [last] * (partitions - len(latest))
    earliest = [last]
    for _ in range(partitions - 1):
        end = earliest[-1]
        earliest.append(bisect_left(prefix, prefix[end] - bound, 0, end))
    earliest.reverse()
    # A block has one item at least, before a cut and after it.
    return [(max(first, j + 1), min(end, last - (partitions - 1 - j)))
            for j, (first, end) in enumerate(zip(earliest, latest))]


def _most_even(prefix: list[int], partitions: int, bound: int) -> list[int]:
    """Find the cuts that keep the bound and have the least sum of squares."""
    # Squares of lengths come second: they cannot outweigh one unit of the squares of sums.
    weight = len(prefix) ** 2
    squares = [weight * total * total + a * a for a, total in enumerate(prefix)]
    weighted = [2 * weight * total for total in prefix]
    # The first place where a block that ends at b may start.
    earliest = [bisect_left(prefix, total - bound) for total in prefix]
    windows = _windows(prefix, partitions, bound)
    costs = squares
    rows: list[list[int]] = []
    for window, previous in zip(windows, [(0, 0), *windows]):
        row, costs = _choose(prefix, squares, weighted, costs, earliest, window, previous)
        rows.append(row)
    cuts = [len(prefix) - 1]
    for row in reversed(rows):
        cuts.append(row[cuts[-1]])
    return cuts[-2:0:-1]


def _choose(prefix: list[int], squares: list[int], weighted: list[int], costs: list[int],
            earliest: list[int], window: tuple[int, int], previous: tuple[int, int]
            ) -> tuple[list[int], list[int]]:
    """Add a block: find for each end ``b`` in a window its best start ``a`` in the previous one.

    A block costs ``weight * (S[b] - S[a])² + (b - a)²``, which is ``squares[b] + squares[a]`` less
    ``weighted[b] * S[a] + 2 * b * a``.

    Returns:
        Two lists by ``b``: the best ``a``, and the least cost, with ``squares[b]`` added to it.
    """
    start, size = window[0], window[1] - window[0] + 1
    row, least = [0] * len(prefix), [0] * len(prefix)
    stride = 1 << (size - 1).bit_length()
    while stride:
        # Those halfway between others, whose best starts their own lie between.
        for b in range(start + stride - 1, start + size, 2 * stride):
            low = row[b - stride] if b - stride >= start else previous[0]
            high = row[b + stride] if b + stride < start + size else previous[1]
            low, high = max(low, earliest[b]), min(high, b - 1)
            factor, twice, choice = weighted[b], 2 * b, low
            best = costs[low] - factor * prefix[low] - twice * low
            for a in range(low + 1, high + 1):
                value = costs[a] - factor * prefix[a] - twice * a
                if value < best:
                    best, choice = value, a
            row[b], least[b] = choice, best + 2 * squares[b]
            earliest[b] = choice  # With one block more, the last cut comes no earlier.
        stride //= 2
    return row, least
