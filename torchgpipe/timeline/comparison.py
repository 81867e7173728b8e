"""What was predicted of a step beside what was measured: two timelines on one axis of time."""
import os
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Protocol

from torchgpipe.schedule.timed import Timed
from torchgpipe.timeline import picture
from torchgpipe.timeline.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ['Comparison', 'compare']


class HasActions(Protocol):
    """A timeline, or a :class:`~torchgpipe.plan.Simulation`."""

    @property
    def actions(self) -> tuple[Timed, ...]:
        """Actions that have a time."""


@dataclass(frozen=True)
class Comparison:
    """Two timelines, which are drawn one above the other; :func:`compare` makes it."""

    predicted: Timeline
    measured: Timeline

    @property
    def ratio(self) -> float:
        """The predicted time over the measured one; ``nan`` if that took no time."""
        measured = self.measured.seconds
        return self.predicted.seconds / measured if measured else nan

    def text(self, width: int = 100) -> str:
        """Draw both for a terminal, with so many characters for the longer one."""
        span = max(self.predicted.seconds, self.measured.seconds)
        return '\n'.join(['predicted', self.predicted.text(width, span),
                          'measured', self.measured.text(width, span),
                          f'predicted over measured: {self.ratio:.2f}'])

    def __str__(self) -> str:
        return self.text()

    def draw(self, title: str | None = None) -> 'Figure':
        """Draw both as a figure of matplotlib."""
        return picture.draw({'predicted': self.predicted, 'measured': self.measured}, title)

    def save(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Draw both into a file, ``….svg`` or ``….png``."""
        picture.save(self.draw(title), path)


def compare(predicted: HasActions, measured: HasActions) -> Comparison:
    """Put what was predicted beside what was measured.

    >>> from torchgpipe.schedule import Action
    >>> print(compare(Timeline([Timed(0, Action(0, 'F', 0), 0., 1.)]),
    ...               Timeline([Timed(0, Action(0, 'F', 0), 0., 2.)], ['cpu:0'])).text(8))
    predicted
    device 0 F0──     100 %
    1 s, bubble 0.0 %
    measured
    cpu:0 F0────── 100 %
    2 s, bubble 0.0 %
    predicted over measured: 0.50

    Args:
        predicted: A simulation, or a timeline.
        measured: A timeline.

    Returns:
        A :class:`Comparison`, which prints, draws and saves both on one axis of time.

    Raises:
        ValueError: One has no actions.
    """
    for what, found in (('predicted', predicted), ('measured', measured)):
        if not found.actions:
            raise ValueError(f'nothing is {what}: that timeline has no actions. A recording has '
                             'its actions when its context has ended')
    return Comparison(_timeline(predicted), _timeline(measured))


def _timeline(found: HasActions) -> Timeline:
    return found if isinstance(found, Timeline) else Timeline(found.actions)
