"""Cut a sequence of costs into blocks, where not every block fits on every device.

Which places the end of block ``j`` can have, given a bound on every block's cost, is found from
those of block ``j-1``: each start ``a`` reaches all ends up to a furthest one. The smallest bound
for which the last block reaches the end of the sequence is found by bisection, in integers, so it
is exact::

    costs     3  1  2  2  4        the first device has room for two layers, the second for three
    ends      ·  1  1  ·  ·  ·     of block 0, with bound 8
              ·  ·  ·  ·  1  1     of block 1: the bound can be kept
"""
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from torchgpipe.balance.blockpartition import Number, integers

__all__ = ['reachable', 'solve_bounded']

#: By block, the places that its end can have, in ascending order.
Ends = list[list[int]]


def solve_bounded(sequence: Sequence[Number], furthest: Sequence[Sequence[int]]
                  ) -> list[int] | None:
    """Cut a sequence into blocks that fit, the largest cost of a block as small as possible.

    Args:
        sequence: Costs, none of them negative.
        furthest: ``furthest[j][a]`` is the furthest end that a block which starts at ``a`` can
            have on device ``j``; whatever ends before it fits as well. It is ``a`` if none does.

    Returns:
        The lengths of the blocks, one per device, or ``None`` if there is no such cut. Of cuts
        with the same largest cost it is one with rather even blocks.
    """
    prefix = [0, *accumulate(integers(sequence))]
    low, high = -(-prefix[-1] // len(furthest)), prefix[-1]
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
    return _walk_back(prefix, furthest, high, ends)


def reachable(prefix: list[int], furthest: Sequence[Sequence[int]], bound: int) -> Ends:
    """Give the ends that each block can have, the last of them at the end of the sequence only."""
    last = len(prefix) - 1
    stops = [bisect_right(prefix, total + bound, a) - 1 for a, total in enumerate(prefix)]
    rows: Ends = [[0]]
    for limits in furthest:
        ends: list[int] = []
        reached = 0
        for a in rows[-1]:
            if a < last:
                stop, limit = stops[a], limits[a]
                if limit < stop:
                    stop = limit
                if stop > reached:
                    ends += range(1 + (reached if reached > a else a), stop + 1)
                    reached = stop
        rows.append(ends)
    rows[-1] = [end for end in rows[-1] if end == last]
    return rows


def _walk_back(prefix: list[int], furthest: Sequence[Sequence[int]], bound: int, rows: Ends
               ) -> list[int]:
    """Choose blocks from the last to the first, each as near as can be to its even share."""
    end = len(prefix) - 1
    lengths: list[int] = []
    for j in range(len(furthest) - 1, -1, -1):
        starts = [a for a in rows[j] if a < end <= furthest[j][a]
                  and prefix[end] - prefix[a] <= bound]
        # From the share, times j + 1 to stay with integers.
        start = min(starts, key=lambda a: abs((j + 1) * (prefix[end] - prefix[a]) - prefix[end]))
        lengths.append(end - start)
        end = start
    return lengths[::-1]
