"""Schedules as data: the order of each device's actions. It needs the standard library alone.

>>> print(make('1f1b', devices=2, micro_batches=3))
0F0 0F1     0B0 0F2 0B1     0B2
    1F0 1B0 1F1 1B1 1F2 1B2

Terms of this folder:

action
    A stage, a kind and a micro-batch, such as ``0F3``. An action runs on one device.
grid
    A schedule in steps: each device has an action or nothing in each step.
in flight
    A micro-batch is in flight in a stage from its forward to its backward.
kind
    ``F`` (forward), ``R`` (recomputation), ``B`` (backward), or ``I`` and ``W`` (the backward of
    inputs and of weights).
message
    The result of an action, which one rank sends and another one receives.
row
    The actions of one device, in order.
stage
    One partition of the model, as the schedule counts them.
virtual stages
    Several stages of one device.
warm-up
    The forwards of a device before its first backward.
"""

from torchgpipe.schedule.generators import NAMES, make
from torchgpipe.schedule.schedule import KINDS, Action, Schedule, ScheduleLike, Timed

__all__ = [
    'Action',
    'KINDS',
    'NAMES',
    'Schedule',
    'ScheduleLike',
    'Timed',
    'make',
]
