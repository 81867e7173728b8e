"""A timeline: what each device does when, in a lane for each; and how much of the time it works.

>>> timeline = Timeline([Timed(0, Action(0, 'F', 0), 0., 1.), Timed(1, Action(1, 'F', 0), 1., 2.),
...                      Timed(1, Action(1, 'B', 0), 2., 4.), Timed(0, Action(0, 'B', 0), 4., 6.)],
...                     ['cpu:0', 'cpu:1'])
>>> print(timeline.text(width=36))
cpu:0 F0────                  B0──────────  50 %
cpu:1       F0────B0──────────              50 %
6 s, bubble 50.0 %
>>> timeline.seconds, timeline.utilisation, timeline.utilisations
(6.0, 0.5, (0.5, 0.5))
"""
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torchgpipe.schedule.action import Action
from torchgpipe.schedule.timed import Timed
from torchgpipe.timeline.text import duration, row

__all__ = ['Copied', 'Timeline']

#: What the boxes of a trace are called.
NAMES = {'F': 'forward', 'R': 'recomputation', 'B': 'backward', 'I': 'backward of inputs',
         'W': 'backward of weights'}


class Copied(NamedTuple):
    """A copy of a tensor of a micro-batch from the device of one lane to that of another."""

    source: int
    target: int
    micro_batch: int
    start: float
    end: float


class Timeline:
    """Actions that have a time, of a simulation or of a real step.

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

    def __init__(self, actions: Iterable[Timed], devices: Iterable[object] | None = None,
                 copies: Iterable[Copied] = ()) -> None:
        actions = tuple(actions)
        lanes = 1 + max((timed.device for timed in actions), default=-1)
        self.devices = (tuple(f'device {lane}' for lane in range(lanes)) if devices is None
                        else tuple(map(str, devices)))
        self.fill(actions, copies)
        if lanes > len(self.devices):
            raise ValueError(f'there is an action in lane {lanes - 1}, but only '
                             f'{len(self.devices)} devices are named: {list(self.devices)}')

    def fill(self, actions: Iterable[Timed], copies: Iterable[Copied] = ()) -> None:
        """Have these actions and copies from now on, as a recording does in the end."""
        self.actions = tuple(sorted(actions, key=lambda timed: (timed.start, timed.end)))
        self.copies = tuple(sorted(copies, key=lambda copied: copied.start))
        stages = {(timed.device, timed.action.stage) for timed in self.actions}
        self._names_stages = len(stages) > len({lane for lane, _ in stages})

    @property
    def start(self) -> float:
        """When the first action starts, in seconds."""
        return min((timed.start for timed in self.actions), default=0.)

    @property
    def seconds(self) -> float:
        """The time from the start of the first action to the end of the last one."""
        return max((timed.end for timed in self.actions), default=0.) - self.start

    @property
    def utilisations(self) -> tuple[float, ...]:
        """The part of the time for which each lane works, from 0 to 1."""
        spans: list[list[tuple[float, float]]] = [[] for _ in self.devices]
        for timed in self.actions:
            spans[timed.device].append((timed.start, timed.end))
        whole = self.seconds or 1.
        return tuple(_union(each) / whole for each in spans)

    @property
    def utilisation(self) -> float:
        """The part of the time of all lanes for which they work, from 0 to 1."""
        return sum(self.utilisations) / max(1, len(self.devices))

    @property
    def bubble(self) -> float:
        """The part of the time of all lanes for which they do not work, from 0 to 1."""
        return 1 - self.utilisation

    def label(self, action: Action) -> str:
        """Give the short form of an action: ``F3``; ``2F3`` where a lane has several stages."""
        return str(action) if self._names_stages else f'{action.kind}{action.micro_batch}'

    def summary(self) -> str:
        """Give the numbers in a line."""
        return f'{duration(self.seconds)}, bubble {100 * self.bubble:.1f} %'

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
            events.append(_event(NAMES[kind], i, 2 * lane, start, end, {'stage': stage}))
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


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Give the time that is in any of some spans, which are sorted by their starts."""
    total, until = 0., float('-inf')
    for start, end in spans:
        total += max(0., end - max(start, until))
        until = max(until, end)
    return total
