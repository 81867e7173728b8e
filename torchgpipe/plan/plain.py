"""The plain call, forward and ``loss.backward()``, as a schedule.

On the CPU one thread goes through the backward of all partitions, whichever workers they have. On
accelerators it is that of a step, where recomputations do not wait for gradients::

    accelerators    0F0 0F1             0R0     0B1 0B0
                        1F0 1F1 1B1 1R0 1B0
    CPU             0F0 0F1         0B1     0B0
                        1F0 1F1 1B1     1B0             each backward waits for the one before
"""
from torchgpipe.schedule import Action, Schedule

__all__ = ['one_by_one']


def one_by_one(schedule: Schedule) -> list[tuple[Action, Action]]:
    """Give pairs of backwards of which the second one waits for the first one: of all of them.

    Autograd takes the reverse of the order in which forward has made the cells.

    >>> from torchgpipe.schedule import make
    >>> [f'{one} {other}' for one, other in one_by_one(make('gpipe', 2, 2))]
    ['1B1 1B0', '1B0 0B1', '0B1 0B0']
    """
    backward = [action for row in schedule.rows for action in row if action.kind == 'B']
    backward.sort(key=lambda action: (action.micro_batch + action.stage, action.stage),
                  reverse=True)
    return [*zip(backward, backward[1:])]
