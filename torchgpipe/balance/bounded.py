"""Split a sequence of costs into blocks with a memory limit per device, or report the excess.

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
from math import inf

from torchgpipe.balance.blockpartition import Number, integers
from torchgpipe.predict.blocks import Blocks, Peak
from torchgpipe.text import format_bytes

__all__ = ['solve_bounded', 'why_not']

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
    ends = _reachable(prefix, furthest, high)
    if not ends[-1]:
        return None
    while low < high:
        middle = (low + high) // 2
        found = _reachable(prefix, furthest, middle)
        if found[-1]:
            ends, high = found, middle
        else:
            low = middle + 1
    return _walk_back(prefix, furthest, high, ends)


def _reachable(prefix: list[int], furthest: Sequence[Sequence[int]], bound: int) -> Ends:
    """Return the ends that each block can have, the last one at the end of the sequence only."""
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


def why_not(names: Sequence[str], blocks: Blocks, edges: Sequence[int], peak: Peak,
            limits: Sequence[int | None], furthest: Sequence[Sequence[int]]) -> str:
    """Return which layers do not fit, or that all of them together do not.

    Args:
        names: Of the layers.
        blocks: What they take.
        edges: Where partitions may start and end.
        peak: What a partition holds.
        limits: By partition, in bytes.
        furthest: As for :func:`solve_bounded`.
    """
    largest = inf if None in limits else max(limit or 0 for limit in limits)
    room = inf if None in limits else sum(limit or 0 for limit in limits)
    for start, end in zip(edges, edges[1:]):
        need = min(blocks.bytes(a, end, peak) for a in edges[:edges.index(end)])
        if need > largest:
            return (f'{_block(names, start, end)} alone needs {format_bytes(need)}, but the '
                    f'largest memory limit is {format_bytes(largest)}; raise chunks, split the '
                    'layer, or take a larger device')
    activations = -(-blocks.activations[-1] * peak.activations // blocks.m)
    total = blocks.resident[-1] + activations + blocks.inputs[0] + 2 * blocks.inputs[-1]
    all_of_them = f'all {len(names)} layers together need {format_bytes(total)} or more'
    if total > room:
        return (f'{all_of_them}, but the memory limits add up to {format_bytes(room)}; take more '
                'or larger devices, or raise chunks')
    stuck = _stuck(names, blocks, edges, peak, limits, furthest)
    return f'{stuck}; {all_of_them}. Raise chunks, or take larger devices'


def _stuck(names: Sequence[str], blocks: Blocks, edges: Sequence[int], peak: Peak,
           limits: Sequence[int | None], furthest: Sequence[Sequence[int]]) -> str:
    """Return at which partition each balance that keeps the limits so far comes to an end."""
    number = len(edges) - 1
    rows = _reachable([0] * len(edges), furthest, 0)  # with no bound on the time
    j = next(j for j, ends in enumerate(rows[1:]) if not ends)
    ends = [number if j == len(limits) - 1 else a + 1 for a in range(number)]
    needs = [(blocks.bytes(edges[a], edges[ends[a]], peak), a) for a in rows[j] if a < number]
    if not needs:
        return f'no layer is left for partition {j}'
    need, a = min(needs)
    return (f'no balance keeps the memory limit of partition {j}, {format_bytes(limits[j] or 0)}: '
            f'at least {_block(names, edges[a], edges[ends[a]])} would be there and need '
            f'{format_bytes(need)}')


def _block(names: Sequence[str], a: int, b: int) -> str:
    return f"layer '{names[a]}'" if b == a + 1 else \
        f"the block of layers '{names[a]}' to '{names[b - 1]}'"
