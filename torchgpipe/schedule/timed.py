"""An action that has a time: what a simulation predicts, and what a recorder measures."""
from typing import NamedTuple

from torchgpipe.schedule.action import Action

__all__ = ['Timed']


class Timed(NamedTuple):
    """An action, and when it ran.

    >>> timed = Timed(0, Action(0, 'F', 1), 0.25, 0.75)
    >>> str(timed.action), timed.end - timed.start
    ('0F1', 0.5)
    """

    #: Whose it is: a row of the schedule, a lane of a timeline.
    device: int
    action: Action
    #: In seconds, from the start of the step.
    start: float
    #: In seconds, from the start of the step.
    end: float
