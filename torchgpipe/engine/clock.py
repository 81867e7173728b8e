"""The clock: which cells run at the same time.

Clock ``k`` runs the cells ``(i, j)`` with ``i + j = k``, each on its partition's device. With
``m = 4`` micro-batches and ``n = 3`` partitions::

    clock          0     1     2     3     4     5
    partition 0   0,0   1,0   2,0   3,0
    partition 1         0,1   1,1   2,1   3,1
    partition 2               0,2   1,2   2,2   3,2

[Note: Order of draws]
Cells that draw from the CPU's random generator run in the order in which the unwrapped model would
run them, given one micro-batch after the other. So a seed gives the numbers of that, whatever the
balance and the devices. Cells that draw have to take turns in any case, so this order takes no
longer than any other. It is also the order of cells that a hook or a mode of the user's sees, of
those that share a module which may change, and of those of one worker. If all of them draw::

    clock          0     1     2     3     4     5     …
    partition 0   0,0               1,0
    partition 1         0,1               1,1
    partition 2               0,2               1,2
"""
from collections.abc import Callable, Iterator

__all__ = ['CellIndex', 'clock_cycles', 'clocks']

#: Micro-batch and partition: ``(i, j)``.
CellIndex = tuple[int, int]


def clock_cycles(m: int, n: int) -> Iterator[list[CellIndex]]:
    """Yield, clock by clock, the cells ``(i, j)`` that run at the same time.

    >>> list(clock_cycles(m=3, n=2))
    [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]

    Args:
        m: Number of micro-batches.
        n: Number of partitions.

    Yields:
        ``m + n - 1`` lists, partitions ascending within each (Huang et al., "GPipe", 2019).
    """
    return clocks(m, n, lambda j: False)


def clocks(m: int, n: int, is_ordered: Callable[[int], bool]) -> Iterator[list[CellIndex]]:
    """Yield the same, where some cells wait for each other: [Note: Order of draws].

    >>> list(clocks(m=2, n=2, is_ordered=lambda j: True))
    [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)]]

    Args:
        m: Number of micro-batches.
        n: Number of partitions.
        is_ordered: Tells whether the cells of a partition are among these. It is asked in each
            clock, as those before may have told.
    """
    done = [0] * n  # so many micro-batches have left each partition
    while done[-1] < m:
        schedule, ahead, ordered = [], m, m
        for j in reversed(range(n)):
            i, waits = done[j], is_ordered(j)
            has_come = i < (done[j - 1] if j else m)
            if has_come and i <= ahead and not (waits and i > ordered):
                schedule.append((i, j))
            ahead = i + 1  # no partition runs ahead of the next one by more than that
            if waits:
                ordered = min(ordered, i)
        schedule.reverse()
        yield schedule
        for _, j in schedule:
            done[j] += 1
