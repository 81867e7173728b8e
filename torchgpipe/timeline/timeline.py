"""Timelines: lanes of timed actions, as text, picture or trace; and their comparison."""
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchgpipe.schedule.schedule import Timed
from torchgpipe.timeline.lanes import Lanes
from torchgpipe.timeline.picture import LEGEND, draw, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ['Comparison', 'Timeline', 'compare']


class Timeline(Lanes):
    """Timed actions of a simulation or of a real step.

    >>> from torchgpipe.schedule import Action, Timed
    >>> timeline = Timeline([Timed(0, Action(0, 'F', 0), 0., 1.),
    ...                      Timed(1, Action(1, 'F', 0), 1., 2.),
    ...                      Timed(1, Action(1, 'B', 0), 2., 4.),
    ...                      Timed(0, Action(0, 'B', 0), 4., 6.)], ['cpu:0', 'cpu:1'])
    >>> print(timeline.text(width=36))
    cpu:0 F0────                  B0──────────  50 %
    cpu:1       F0────B0──────────              50 %
    6 s, bubble 50.0 %
    >>> timeline.seconds, timeline.utilisation, timeline.utilisations
    (6.0, 0.5, (0.5, 0.5))

    A lane may have several boxes for one action, if another action interrupted it.

    Args:
        actions: The actions; ``Timed.device`` is the lane.
        devices: The names of lanes.
        copies: Copies between devices, which do not count as work of a lane.

    Attributes:
        actions (tuple[Timed, ...]): By start.
        devices (tuple[str, ...]): As given.
        copies (tuple[Copied, ...]): By start.
    """

    def text(self, width: int = 100, seconds: float | None = None) -> str:
        """Draw the timeline for a terminal, with the part of the time for which each lane works.

        Args:
            width: The number of characters for the time.
            seconds: The time that ``width`` represents; by default, the whole timeline.
        """
        scale = width / (seconds or self.seconds or 1.)
        names = max(map(len, self.devices), default=0)
        zero = self.start
        boxes: list[list[tuple[str, float, float]]] = [[] for _ in self.devices]
        for lane, action, start, end in self.actions:
            boxes[lane].append((self.label(action), (start - zero) * scale, (end - zero) * scale))
        lines = [f'{name:{names}} {_row(each, width)} {100 * share:3.0f} %'
                 for name, each, share in zip(self.devices, boxes, self.utilisations)]
        return '\n'.join([*lines, self.summary()])

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return (f'<Timeline of {len(self.actions)} actions on {len(self.devices)} devices: '
                f'{self.summary()}>')

    def draw(self, title: str | None = None) -> 'Figure':
        """Draw the timeline as a figure of matplotlib.

        Raises:
            ImportError: There is no matplotlib, which the extra ``pictures`` brings.
        """
        return draw({'': self}, title)

    def save(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Draw the timeline into a file.

        Args:
            path: The file, ``….svg`` or ``….png``.
            title: The title above the timeline.

        Raises:
            ImportError: There is no matplotlib, which the extra ``pictures`` brings.
        """
        save(self.draw(title), path)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a file in the format of Chrome's tracing, which https://ui.perfetto.dev opens.

        Each lane is a thread. If there are copies to a lane, a second thread has these.

        Args:
            path: The file to write, ``….json``.
        """
        events = [_lane(2 * lane, name) for lane, name in enumerate(self.devices)]
        events += [_lane(2 * lane + 1, f'{self.devices[lane]}, copies')
                   for lane in sorted({copied.target for copied in self.copies})]
        for lane, (stage, kind, i), start, end in self.actions:
            events.append(_event(LEGEND[kind][0], i, 2 * lane, start, end, {'stage': stage}))
        for source, target, i, start, end in self.copies:
            events.append(_event('copy', i, 2 * target + 1, start, end,
                                 {'from': self.devices[source]}))
        Path(path).write_text(json.dumps({'traceEvents': events, 'displayTimeUnit': 'ms'}) + '\n')


def _row(boxes: Iterable[tuple[str, float, float]], width: int) -> str:
    """Draw the boxes of a lane, each with its label as far as that fits.

    >>> _row([('F0', 0, 3.1), ('F1', 3.1, 5.9), ('F10', 6.9, 9.2), ('B1', 9.2, 10)], 10)
    'F0─F1─ F─B'

    Args:
        boxes: Labels with start and end, in characters.
        width: The number of characters.
    """
    line = [' '] * width
    for label, start, end in boxes:
        low, high = round(start), min(width, round(end))
        # A label that is cut would name another micro-batch.
        short = label if len(label) <= high - low else label.lstrip('0123456789')[:1]
        line[low:high] = short.ljust(high - low, '─')[:max(0, high - low)]
    return ''.join(line)


def _lane(number: int, name: str) -> dict[str, Any]:
    return {'name': 'thread_name', 'ph': 'M', 'pid': 0, 'tid': number, 'args': {'name': name}}


def _event(name: str, i: int, lane: int, start: float, end: float, more: dict[str, Any]
           ) -> dict[str, Any]:
    """Make a complete event; times are in microseconds."""
    return {'name': f'{name} {i}', 'cat': name, 'ph': 'X', 'pid': 0, 'tid': lane,
            'ts': start * 1e6, 'dur': (end - start) * 1e6, 'args': {'micro-batch': i, **more}}


class HasActions(Protocol):
    """A timeline, or a :class:`~torchgpipe.plan.Simulation`."""

    @property
    def actions(self) -> tuple[Timed, ...]:
        """Actions that have a time."""


@dataclass(frozen=True)
class Comparison:
    """Two timelines, drawn one above the other: the result of :func:`compare`."""

    predicted: Timeline
    measured: Timeline

    @property
    def ratio(self) -> float:
        """The predicted time over the measured one; ``nan`` if the latter is zero."""
        measured = self.measured.seconds
        return self.predicted.seconds / measured if measured else nan

    def text(self, width: int = 100) -> str:
        """Draw both for a terminal, with ``width`` characters for the longer one."""
        span = max(self.predicted.seconds, self.measured.seconds)
        return '\n'.join(['predicted', self.predicted.text(width, span),
                          'measured', self.measured.text(width, span),
                          f'predicted over measured: {self.ratio:.2f}'])

    def __str__(self) -> str:
        return self.text()

    def draw(self, title: str | None = None) -> 'Figure':
        """Draw both as a figure of matplotlib."""
        return draw({'predicted': self.predicted, 'measured': self.measured}, title)

    def save(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Draw both into a file, ``….svg`` or ``….png``."""
        save(self.draw(title), path)


def compare(predicted: HasActions, measured: HasActions) -> Comparison:
    """Compare predicted actions with measured ones.

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
