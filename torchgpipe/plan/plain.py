"""The plain call, forward and ``loss.backward()``, as a schedule.

On accelerators a recomputation does not wait for the gradient, so it is an action of its own. On
the CPU, one thread goes through the backward of all partitions, whichever workers they have::

    accelerators    0F0 0F1             0R0     0B1 0B0
                        1F0 1F1 1B1 1R0 1B0
    CPU             0F0 0F1         0B1     0B0
                        1F0 1F1 1B1     1B0              each backward waits for the one before
"""
from torchgpipe.schedule import Action, Schedule, make

__all__ = ['plain_call']


def plain_call(devices: int, micro_batches: int, stops: list[int], on_cpu: bool
               ) -> tuple[Schedule, list[tuple[Action, Action]]]:
    """Give the schedule, and which actions wait for others as well.

    Args:
        devices: Their number.
        micro_batches: Their number.
        stops: Of how many micro-batches, from the first one on, each partition recomputes.
        on_cpu: Whether the devices are workers of the CPU.
    """
    rows = make('gpipe', devices, micro_batches).rows
    if not on_cpu:
        rows = tuple(tuple(each for action in row for each in (
            [action._replace(kind='R'), action]
            if action.kind == 'B' and action.micro_batch < stops[action.stage] else [action]))
            for row in rows)
        return Schedule(rows), []
    backward = [action for row in rows for action in row if action.kind == 'B']
    # Autograd takes the reverse of the order in which forward has made the cells.
    backward.sort(key=lambda action: (action.micro_batch + action.stage, action.stage),
                  reverse=True)
    return Schedule(rows), [*zip(backward, backward[1:])]
