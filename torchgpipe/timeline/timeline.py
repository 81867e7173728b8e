"""A timeline: lanes of actions that have a time, as text, as a picture, as a trace."""
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchgpipe.timeline.lanes import Lanes
from torchgpipe.timeline.picture import KINDS, draw, save
from torchgpipe.timeline.text import row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ['Timeline']


class Timeline(Lanes):
    """Actions that have a time, of a simulation or of a real step.

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

    A lane may have several boxes for one action, if something else came in between.

    Args:
        actions: The actions; ``Timed.device`` is the lane.
        devices: The names of lanes.
        copies: Copies between devices, which count as no work of a lane.

    Attributes:
        actions (tuple[Timed, ...]): By start.
        devices (tuple[str, ...]): As given.
        copies (tuple[Copied, ...]): By start.
    """

    def text(self, width: int = 100, seconds: float | None = None) -> str:
        """Draw the timeline for a terminal, with the part of the time for which each lane works.

        Args:
            width: The number of characters for the time.
            seconds: What these stand for, if it is not the whole timeline.
        """
        scale = width / (seconds or self.seconds or 1.)
        names = max(map(len, self.devices), default=0)
        zero = self.start
        boxes: list[list[tuple[str, float, float]]] = [[] for _ in self.devices]
        for lane, action, start, end in self.actions:
            boxes[lane].append((self.label(action), (start - zero) * scale, (end - zero) * scale))
        lines = [f'{name:{names}} {row(each, width)} {100 * share:3.0f} %'
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
            title: What to write above it.

        Raises:
            ImportError: There is no matplotlib, which the extra ``pictures`` brings.
        """
        save(self.draw(title), path)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the format of Chrome's tracing, which https://ui.perfetto.dev opens.

        Each lane is a thread, and a second one has the copies to it, if there are any.

        Args:
            path: The file to write, ``….json``.
        """
        events = [_lane(2 * lane, name) for lane, name in enumerate(self.devices)]
        events += [_lane(2 * lane + 1, f'{self.devices[lane]}, copies')
                   for lane in sorted({copied.target for copied in self.copies})]
        for lane, (stage, kind, i), start, end in self.actions:
            events.append(_event(KINDS[kind][0], i, 2 * lane, start, end, {'stage': stage}))
        for source, target, i, start, end in self.copies:
            events.append(_event('copy', i, 2 * target + 1, start, end,
                                 {'from': self.devices[source]}))
        Path(path).write_text(json.dumps({'traceEvents': events, 'displayTimeUnit': 'ms'}) + '\n')


def _lane(number: int, name: str) -> dict[str, Any]:
    return {'name': 'thread_name', 'ph': 'M', 'pid': 0, 'tid': number, 'args': {'name': name}}


def _event(name: str, i: int, lane: int, start: float, end: float, more: dict[str, Any]
           ) -> dict[str, Any]:
    """Make a complete event; times are in microseconds."""
    return {'name': f'{name} {i}', 'cat': name, 'ph': 'X', 'pid': 0, 'tid': lane,
            'ts': start * 1e6, 'dur': (end - start) * 1e6, 'args': {'micro-batch': i, **more}}
