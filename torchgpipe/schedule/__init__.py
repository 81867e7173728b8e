"""Schedules as data: the order of each device's actions. It needs the standard library alone.

>>> print(make('1f1b', devices=2, micro_batches=3))
0F0 0F1     0B0 0F2 0B1     0B2
    1F0 1B0 1F1 1B1 1F2 1B2
"""
from torchgpipe.schedule.generators import NAMES, make
from torchgpipe.schedule.schedule import KINDS, Action, Schedule, ScheduleLike, Timed

__all__ = ['Action', 'KINDS', 'NAMES', 'Schedule', 'ScheduleLike', 'Timed', 'make']
