"""The prediction of steps with all partitions on one device, from a machine of plans.

The device runs the actions of all rows, one after the other. Given the time of the layers in a
step without a split, the costs of actions and of a split backward give the other schedules.
"""

from typing import NamedTuple

from torchgpipe.plan import Costs, Machine, StageCosts, search_schedule, simulate
from torchgpipe.schedule import Schedule, make
from torchgpipe.schedule.schedule import by_step, steps

#: Two thirds of a step without recomputation are backward, half of it for gradients of weights.
FORWARD, BACKWARD, WEIGHTS = 1 / 3, 2 / 3, 1 / 3


class Order(NamedTuple):
    """The order of a step.

    Attributes:
        schedule: The name of the schedule, or ``'searched'``.
        devices: The number of devices of the schedule.
        recomputes: Whether all micro-batches are recomputed.
    """

    schedule: str
    devices: int
    recomputes: bool = False


def predicted_seconds(order: Order, micro_batches: int, layers: float, machine: Machine) -> float:
    """Return the seconds of a step, with all partitions on one device.

    >>> from torchgpipe.plan import MACHINES
    >>> f"{predicted_seconds(Order('1f1b', 4), 16, 0.2, MACHINES['H100']):.3f}"
    '0.200'

    Args:
        order: The order of the step.
        micro_batches: The number of micro-batches.
        layers: The seconds of all layers in a step, forward and backward.
        machine: The machine, which has the costs of actions and of a split.
    """
    if order.schedule == 'searched':
        costs = _costs(order.devices, micro_batches, layers, machine, 0)
        limit = 2 * costs.stages[0].activation_bytes
        schedule = search_schedule(costs, order.devices, micro_batches, limit).schedule
    else:
        schedule = make(order.schedule, order.devices, micro_batches)
        stages = 1 + max(action.stage for row in schedule.rows for action in row)
        recomputed = micro_batches if order.recomputes else 0
        costs = _costs(stages, micro_batches, layers, machine, recomputed)
    one_row = Schedule((tuple(by_step(steps(schedule.rows)[0])),))
    return simulate(one_row, costs).seconds


def _costs(
    stages: int, micro_batches: int, layers: float, machine: Machine, recomputed: int
) -> Costs:
    """Return the costs of equal stages."""
    cell = layers / (stages * micro_batches)
    seconds = {
        'F': cell * FORWARD,
        'B': cell * BACKWARD,
        'R': cell * FORWARD,
        'I': cell * (BACKWARD - WEIGHTS),
        'W': cell * (WEIGHTS + machine.split * BACKWARD),
    }
    for kind, least in machine.actions.items():
        seconds[kind] = max(seconds[kind], least)
    stage = StageCosts(
        seconds['F'],
        seconds['B'],
        seconds['W'],
        seconds['I'],
        seconds['R'],
        recomputed=recomputed,
        activation_bytes=1.0,
    )
    return Costs([stage] * stages)
