"""Timelines: lanes of timed actions, as text, picture or trace; and their comparison."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torchgpipe.base.errors import duration
from torchgpipe.base.html import NEUTRAL, Box, rows_as_html
from torchgpipe.schedule.schedule import LEGEND as ACTIONS
from torchgpipe.schedule.schedule import Action, Timed, action_boxes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Copied(NamedTuple):
    """A copy of a micro-batch's tensor from the device of one lane to another lane's device."""

    source: int
    target: int
    micro_batch: int
    start: float
    end: float


class Lanes:
    """The numbers of a :class:`~torchgpipe.timeline.Timeline`; see there for arguments."""

    def __init__(
        self,
        actions: Iterable[Timed],
        devices: Iterable[object] | None = None,
        copies: Iterable[Copied] = (),
    ) -> None:
        actions = tuple(actions)
        lanes = 1 + max((timed.device for timed in actions), default=-1)
        self.devices = (
            tuple(f'device {lane}' for lane in range(lanes))
            if devices is None
            else tuple(map(str, devices))
        )
        self.fill(actions, copies)
        if lanes > len(self.devices):
            raise ValueError(
                f'there is an action in lane {lanes - 1}, but only '
                f'{len(self.devices)} devices are named: {list(self.devices)}'
            )

    def fill(self, actions: Iterable[Timed], copies: Iterable[Copied] = ()) -> None:
        """Replace the actions and copies, as a recording does at its end."""
        self.actions = tuple(sorted(actions, key=lambda timed: (timed.start, timed.end)))
        self.copies = tuple(sorted(copies, key=lambda copied: copied.start))
        stages = {(timed.device, timed.action.stage) for timed in self.actions}
        self._names_stages = len(stages) > len({lane for lane, _ in stages})

    @property
    def start(self) -> float:
        """The start of the first action, in seconds."""
        return min((timed.start for timed in self.actions), default=0.0)

    @property
    def seconds(self) -> float:
        """The time from the start of the first action to the end of the last one."""
        return max((timed.end for timed in self.actions), default=0.0) - self.start

    @property
    def utilisations(self) -> tuple[float, ...]:
        """The part of the time for which each lane works, from 0 to 1."""
        spans: list[list[tuple[float, float]]] = [[] for _ in self.devices]
        for timed in self.actions:
            spans[timed.device].append((timed.start, timed.end))
        whole = self.seconds or 1.0
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
        """Return the short form of an action: ``F3``; ``2F3`` if a lane has several stages."""
        if self._names_stages:
            return str(action)
        return f'{action.kind}{action.micro_batch}'

    def summary(self) -> str:
        """Return the numbers in a line."""
        return f'{duration(self.seconds)}, bubble {100 * self.bubble:.1f} %'


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total time in any of the spans, which are sorted by their starts."""
    total = 0.0
    until = float('-inf')
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


#: The names and colours of the kinds of boxes: actions and copies.
LEGEND = {**ACTIONS, 'C': ('copy', '#4f9d69')}

#: Lower edge and height of boxes, from the middle of a lane; copies lie below actions.
ACTION = (-0.32, 0.74)
COPY = (-0.48, 0.14)


def draw(timelines: Mapping[str, Lanes], title: str | None = None) -> 'Figure':
    """Draw timelines one above the other, on one axis of time.

    Raises:
        ImportError: There is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            'pictures of timelines are drawn by matplotlib, which is not there: '
            "install it, or torchgpipe with its extra 'pictures'. A timeline "
            'prints itself as text, and to_chrome_trace writes a file for Perfetto, '
            'without it'
        ) from error
    heights = [0.9 + 0.55 * len(timeline.devices) for timeline in timelines.values()]
    figure = Figure(figsize=(12, 0.7 + sum(heights)), layout='constrained')
    rows = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
    span = max((timeline.seconds for timeline in timelines.values()), default=0.0) or 1.0
    for (name, timeline), axes in zip(timelines.items(), rows[:, 0]):
        _fill(axes, timeline, span)
        axes.set_title(
            ': '.join(filter(None, [name, timeline.summary()])),
            color=NEUTRAL,
            fontsize=10,
            loc='left',
        )
    _label_time(rows[-1, 0], span)
    if title is not None:
        figure.suptitle(title, color=NEUTRAL)
    used = {timed.action.kind for each in timelines.values() for timed in each.actions}
    used |= {'C' for each in timelines.values() if each.copies}
    handles = [
        Patch(color=colour, label=name) for kind, (name, colour) in LEGEND.items() if kind in used
    ]
    figure.legend(
        handles=handles,
        loc='outside upper right',
        ncols=max(1, len(handles)),
        frameon=False,
        labelcolor=NEUTRAL,
    )
    return figure


def _fill(axes: Any, timeline: Lanes, span: float) -> None:
    """Draw the boxes of a timeline."""
    zero = timeline.start
    boxes: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for lane, action, start, end in timeline.actions:
        boxes.setdefault((lane, action.kind), []).append((start - zero, end - start))
        label = timeline.label(action)
        if end - start > 0.0085 * len(label) * span:
            axes.text(
                (start + end) / 2 - zero,
                lane + ACTION[0] + ACTION[1] / 2,
                label,
                ha='center',
                va='center',
                color='white',
                fontsize=8,
            )
    for copied in timeline.copies:
        boxes.setdefault((copied.target, 'C'), []).append(
            (copied.start - zero, copied.end - copied.start)
        )
    for (lane, kind), spans in boxes.items():
        low, height = COPY if kind == 'C' else ACTION
        axes.broken_barh(
            spans,
            (lane + low, height),
            facecolor=LEGEND[kind][1],
            edgecolor='white',
            linewidth=0.4,
        )
    names = [
        f'{name}\n{100 * share:.0f} %'
        for name, share in zip(timeline.devices, timeline.utilisations)
    ]
    axes.set_yticks(range(len(names)), names, color=NEUTRAL, fontsize=9)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, span)
    axes.tick_params(colors=NEUTRAL)
    for side, spine in axes.spines.items():
        spine.set_color(NEUTRAL)
        spine.set_visible(side in ('left', 'bottom'))


def _label_time(axes: Any, span: float) -> None:
    """Label times in the unit of the whole span."""
    unit = duration(span).split()[1]
    factor = {'s': 1.0, 'ms': 1e3, 'µs': 1e6}[unit]
    axes.xaxis.set_major_formatter(lambda seconds, _: f'{seconds * factor:g}')
    axes.set_xlabel(unit, color=NEUTRAL)


def save(figure: 'Figure', path: str | os.PathLike[str]) -> None:
    """Write a picture; SVG without background, with its text as text."""
    import matplotlib

    is_svg = os.fspath(path).endswith('.svg')
    with matplotlib.rc_context({'svg.fonttype': 'none', 'svg.hashsalt': 'timeline'}):
        figure.savefig(
            path, dpi=150, transparent=is_svg, metadata={'Date': None} if is_svg else None
        )


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
        scale = width / (seconds or self.seconds or 1.0)
        names = max(map(len, self.devices), default=0)
        zero = self.start
        boxes: list[list[tuple[str, float, float]]] = [[] for _ in self.devices]
        for lane, action, start, end in self.actions:
            boxes[lane].append((self.label(action), (start - zero) * scale, (end - zero) * scale))
        lines = [
            f'{name:{names}} {_row(each, width)} {100 * share:3.0f} %'
            for name, each, share in zip(self.devices, boxes, self.utilisations)
        ]
        return '\n'.join([*lines, self.summary()])

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        names, boxes = self._rows()
        return rows_as_html(names, boxes, self.summary())

    def _rows(self, first: int = 0) -> tuple[list[str], list[Box]]:
        """Return the names and the boxes of lanes in a picture, from time zero on."""
        boxes = [*action_boxes(self.actions, self.label, duration)]
        name, colour = LEGEND['C']
        for source, target, i, start, end in self.copies:
            title = f'{name} of micro-batch {i} from {self.devices[source]}'
            title += f', {duration(end - start)}'
            boxes.append(Box(target, start, end, '', title, colour, share_of_height=0.2))

        zero = self.start
        shifted = []
        for box in boxes:
            shifted.append(
                box._replace(row=box.row + first, start=box.start - zero, end=box.end - zero)
            )
        names = [
            f'{device} {100 * share:.0f} %'
            for device, share in zip(self.devices, self.utilisations)
        ]
        return names, shifted

    def __repr__(self) -> str:
        return (
            f'<Timeline of {len(self.actions)} actions on {len(self.devices)} devices: '
            f'{self.summary()}>'
        )

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
        targets = {copied.target for copied in self.copies}
        events += [
            _lane(2 * lane + 1, f'{self.devices[lane]}, copies') for lane in sorted(targets)
        ]
        for lane, (stage, kind, i), start, end in self.actions:
            events.append(_event(LEGEND[kind][0], i, 2 * lane, start, end, {'stage': stage}))
        for source, target, i, start, end in self.copies:
            events.append(
                _event('copy', i, 2 * target + 1, start, end, {'from': self.devices[source]})
            )
        Path(path).write_text(json.dumps({'traceEvents': events, 'displayTimeUnit': 'ms'}) + '\n')


def _row(boxes: Iterable[tuple[str, float, float]], width: int) -> str:
    """Draw the boxes of a lane: labels, each with its start and end in characters.

    >>> _row([('F0', 0, 3.1), ('F1', 3.1, 5.9), ('F10', 6.9, 9.2), ('B1', 9.2, 10)], 10)
    'F0─F1─ F─B'
    """
    line = [' '] * width
    for label, start, end in boxes:
        low = round(start)
        high = min(width, round(end))
        # A label that is cut would name another micro-batch.
        short = label if len(label) <= high - low else label.lstrip('0123456789')[:1]
        line[low:high] = short.ljust(high - low, '─')[: max(0, high - low)]
    return ''.join(line)


def _lane(number: int, name: str) -> dict[str, Any]:
    return {'name': 'thread_name', 'ph': 'M', 'pid': 0, 'tid': number, 'args': {'name': name}}


def _event(
    name: str, i: int, lane: int, start: float, end: float, more: dict[str, Any]
) -> dict[str, Any]:
    """Make a complete event; times are in microseconds."""
    return {
        'name': f'{name} {i}',
        'cat': name,
        'ph': 'X',
        'pid': 0,
        'tid': lane,
        'ts': start * 1e6,
        'dur': (end - start) * 1e6,
        'args': {'micro-batch': i, **more},
    }


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
        return '\n'.join(
            [
                'predicted',
                self.predicted.text(width, span),
                'measured',
                self.measured.text(width, span),
                f'predicted over measured: {self.ratio:.2f}',
            ]
        )

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        names, boxes = self.predicted._rows()
        names = [f'predicted {name}' for name in names]
        measured_names, measured_boxes = self.measured._rows(len(names))
        names += [f'measured {name}' for name in measured_names]
        caption = (
            f'predicted {self.predicted.summary()}; measured {self.measured.summary()}; '
            f'predicted over measured: {self.ratio:.2f}'
        )
        return rows_as_html(names, boxes + measured_boxes, caption)

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
            raise ValueError(
                f'nothing is {what}: that timeline has no actions. A recording has '
                'its actions when its context has ended'
            )
    return Comparison(_timeline(predicted), _timeline(measured))


def _timeline(found: HasActions) -> Timeline:
    if isinstance(found, Timeline):
        return found
    return Timeline(found.actions)
