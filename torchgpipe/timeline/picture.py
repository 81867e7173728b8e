"""Timelines as pictures, by matplotlib: a lane for each device, a box for each action."""
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchgpipe.base.text import duration
from torchgpipe.timeline.lanes import Lanes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ['LEGEND', 'draw', 'save']

#: The names and colours of the kinds of boxes. Colours differ also for red-blind readers, on light
#: and dark backgrounds.
LEGEND = {'F': ('forward', '#3b78c4'), 'R': ('recomputation', '#7a6bb5'),
          'B': ('backward', '#c2612c'), 'I': ('backward of inputs', '#c2612c'),
          'W': ('backward of weights', '#b3922e'), 'C': ('copy', '#4f9d69')}

#: The colour of text and lines: readable on white and on black, because SVG has no background.
NEUTRAL = '#808080'

#: Lower edge and height of boxes, from the middle of a lane; copies lie below actions.
ACTION, COPY = (-.32, .74), (-.48, .14)


def draw(timelines: Mapping[str, Lanes], title: str | None = None) -> 'Figure':
    """Draw timelines one above the other, on one axis of time.

    Args:
        timelines: The timelines, by their titles.
        title: The title of the figure.

    Raises:
        ImportError: There is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError('pictures of timelines are drawn by matplotlib, which is not there: '
                          "install it, or torchgpipe with its extra 'pictures'. A timeline "
                          'prints itself as text, and to_chrome_trace writes a file for Perfetto, '
                          'without it') from error
    heights = [.9 + .55 * len(timeline.devices) for timeline in timelines.values()]
    figure = Figure(figsize=(12, .7 + sum(heights)), layout='constrained')
    rows = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
    span = max((timeline.seconds for timeline in timelines.values()), default=0.) or 1.
    for (name, timeline), axes in zip(timelines.items(), rows[:, 0]):
        _fill(axes, timeline, span)
        axes.set_title(': '.join(filter(None, [name, timeline.summary()])), color=NEUTRAL,
                       fontsize=10, loc='left')
    _label_time(rows[-1, 0], span)
    if title is not None:
        figure.suptitle(title, color=NEUTRAL)
    used = {timed.action.kind for each in timelines.values() for timed in each.actions}
    used |= {'C' for each in timelines.values() if each.copies}
    handles = [Patch(color=colour, label=name)
               for kind, (name, colour) in LEGEND.items() if kind in used]
    figure.legend(handles=handles, loc='outside upper right', ncols=max(1, len(handles)),
                  frameon=False, labelcolor=NEUTRAL)
    return figure


def _fill(axes: Any, timeline: Lanes, span: float) -> None:
    """Draw the boxes of a timeline."""
    zero = timeline.start
    boxes: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for lane, action, start, end in timeline.actions:
        boxes.setdefault((lane, action.kind), []).append((start - zero, end - start))
        label = timeline.label(action)
        if end - start > .0085 * len(label) * span:
            axes.text((start + end) / 2 - zero, lane + ACTION[0] + ACTION[1] / 2, label,
                      ha='center', va='center', color='white', fontsize=8)
    for copied in timeline.copies:
        boxes.setdefault((copied.target, 'C'), []).append(
            (copied.start - zero, copied.end - copied.start))
    for (lane, kind), spans in boxes.items():
        low, height = COPY if kind == 'C' else ACTION
        axes.broken_barh(spans, (lane + low, height), facecolor=LEGEND[kind][1],
                         edgecolor='white', linewidth=.4)
    names = [f'{name}\n{100 * share:.0f} %'
             for name, share in zip(timeline.devices, timeline.utilisations)]
    axes.set_yticks(range(len(names)), names, color=NEUTRAL, fontsize=9)
    axes.set_ylim(len(names) - .4, -.6)
    axes.set_xlim(0, span)
    axes.tick_params(colors=NEUTRAL)
    for side, spine in axes.spines.items():
        spine.set_color(NEUTRAL)
        spine.set_visible(side in ('left', 'bottom'))


def _label_time(axes: Any, span: float) -> None:
    """Label times in the unit of the whole span."""
    unit = duration(span).split()[1]
    factor = {'s': 1., 'ms': 1e3, 'µs': 1e6}[unit]
    axes.xaxis.set_major_formatter(lambda seconds, _: f'{seconds * factor:g}')
    axes.set_xlabel(unit, color=NEUTRAL)


def save(figure: 'Figure', path: str | os.PathLike[str]) -> None:
    """Write a picture; SVG without background, with its text as text."""
    import matplotlib

    is_svg = os.fspath(path).endswith('.svg')
    with matplotlib.rc_context({'svg.fonttype': 'none', 'svg.hashsalt': 'timeline'}):
        figure.savefig(path, dpi=150, transparent=is_svg,
                       metadata={'Date': None} if is_svg else None)
