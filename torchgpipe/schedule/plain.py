"""The plain call, forward and ``loss.backward()``, as a schedule.

Fill and drain. In forward, a partition that is faster than the next one waits for it, since what
it gives takes memory. On the CPU one thread goes through the backward of all partitions, whichever
workers they have; on accelerators recomputations do not wait for gradients::

    accelerators    0F0 0F1             0R0     0B1 0B0
                        1F0 1F1 1B1 1R0 1B0
    CPU             0F0 0F1         0B1     0B0
                        1F0 1F1 1B1     1B0             each backward waits for the one before
"""
from functools import lru_cache

from torchgpipe.schedule.action import Action
from torchgpipe.schedule.generators import make
from torchgpipe.schedule.schedule import Schedule

__all__ = ['PLAIN_CALL', 'forward_order', 'one_by_one', 'plain_call']

#: What forward and ``loss.backward()`` are called among schedules.
PLAIN_CALL = 'plain call'

#: Actions of which the second one waits for the first one, beside what a schedule says.
Pairs = list[tuple[Action, Action]]


@lru_cache(maxsize=64)
def plain_call(partitions: int, m: int, stops: tuple[int, ...] = (), one_thread: bool = False
               ) -> tuple[Schedule, Pairs]:
    """Return the plain call of as many devices as partitions, and what else its actions wait for.

    Args:
        partitions: Their number.
        m: The number of micro-batches.
        stops: How many micro-batches each partition recomputes, from the first one on.
        one_thread: Whether all devices are workers of the CPU.
    """
    schedule = make('gpipe', partitions, m)
    if one_thread:
        return schedule, [*forward_order(partitions, 0, m), *one_by_one(schedule)]
    return (schedule.recomputing(stops) if any(stops) else schedule), []


def forward_order(partitions: int, start: int, stop: int) -> Pairs:
    """Return pairs of forwards of which the second one waits for the first one.

    Since what a partition gives takes memory, none starts a micro-batch before the next one is
    done with the last but one. A device may be at work later than the thread that waits for it.

    >>> [f'{one} {other}' for one, other in forward_order(2, 0, 4)]
    ['1F0 0F2', '1F1 0F3']

    Args:
        partitions: Their number.
        start: The first micro-batch.
        stop: The one after the last.
    """
    return [(Action(j + 1, 'F', i - 2), Action(j, 'F', i))
            for j in range(partitions - 1) for i in range(start + 2, stop)]


def one_by_one(schedule: Schedule) -> Pairs:
    """Return pairs of backwards of which the second one waits for the first one: of all of them.

    Autograd takes the reverse of the order in which forward has made the cells.

    >>> [f'{one} {other}' for one, other in one_by_one(make('gpipe', 2, 2))]
    ['1B1 1B0', '1B0 0B1', '0B1 0B0']
    """
    backward = [action for row in schedule.rows for action in row if action.kind == 'B']
    backward.sort(key=lambda action: (action.micro_batch + action.stage, action.stage),
                  reverse=True)
    return [*zip(backward, backward[1:])]
