"""Draw a measured timeline: a lane for each partition, a box for each cell; and a Chrome trace."""
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiments.timeline.record import Box
from benchmarks.harness.chart import COLORS, NEUTRAL, save

__all__ = ['draw_timeline', 'write_trace']

KINDS = dict(zip(('forward', 'backward', 'copy', 'recomputation'), COLORS))

#: Copies lie under the cells of their lane: (lower edge, height), from the lane's middle.
PLACES = {'copy': (-.48, .14)}
CELL = (-.32, .74)


def draw_timeline(boxes: Sequence[Box], devices: Sequence[torch.device], title: str, stem: Path
                  ) -> list[Path]:
    """Draw boxes; write a PNG and an SVG."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1.2 + .7 * len(devices)), layout='constrained')
    axes = figure.subplots()
    span = max(box.end for box in boxes)
    for box in boxes:
        low, height = PLACES.get(box.kind, CELL)
        axes.broken_barh([(box.start * 1e3, (box.end - box.start) * 1e3)], (box.j + low, height),
                         color=KINDS[box.kind], edgecolor='white', linewidth=.4)
        if box.kind != 'copy' and box.end - box.start > .012 * span:
            axes.text((box.start + box.end) * 500, box.j + low + height / 2, str(box.i),
                      ha='center', va='center', color='white', fontsize=8)
    axes.set_yticks(range(len(devices)),
                    [f'partition {j}\n{device}' for j, device in enumerate(devices)])
    axes.set_ylim(len(devices) - .4, -.6)
    axes.set_xlim(0, span * 1e3)
    axes.set_xlabel('ms', color=NEUTRAL)
    axes.set_title(title, color=NEUTRAL)
    used = [kind for kind in KINDS if any(box.kind == kind for box in boxes)]
    figure.legend(handles=[Patch(color=KINDS[kind], label=kind) for kind in used],
                  loc='outside upper right', ncols=len(used), frameon=False,
                  labelcolor=NEUTRAL)
    return save(figure, axes, stem)


def write_trace(boxes: Sequence[Box], devices: Sequence[torch.device], path: Path) -> Path:
    """Write boxes in Chrome's trace format, which Perfetto opens; times in microseconds."""
    events: list[dict[str, Any]] = [
        {'name': 'thread_name', 'ph': 'M', 'pid': 0, 'tid': 2 * j + copies,
         'args': {'name': f'partition {j} on {device}' + (', copies' if copies else '')}}
        for j, device in enumerate(devices) for copies in (0, 1)]
    for box in boxes:
        events.append({'name': f'{box.kind} {box.i}', 'cat': box.kind, 'ph': 'X', 'pid': 0,
                       'tid': 2 * box.j + (box.kind == 'copy'), 'ts': box.start * 1e6,
                       'dur': (box.end - box.start) * 1e6,
                       'args': {'partition': box.j, 'micro-batch': box.i}})
    path.write_text(json.dumps({'traceEvents': events, 'displayTimeUnit': 'ms'}) + '\n')
    return path
