"""Curves of several ways to do the same, in panels side by side."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from benchmarks.harness.chart import COLORS, NEUTRAL, neutral, save

#: Curves that are the same lie on each other: the first one is broad, so that it is seen.
WIDTHS, SIZES, MARKS = (5.0, 1.6), (9.0, 4.5), ('o', 'o', 's', '^')


class Panel(NamedTuple):
    """A panel.

    Attributes:
        x: The label of its x axis. y: The label of its y axis. curves: The coordinates of each
        curve, by its name. All panels of a figure have the same
            names.
        logarithmic: The logarithmic axes, such as ``'xy'``.
    """

    x: str
    y: str
    curves: dict[str, tuple[Sequence[float], Sequence[float]]]
    logarithmic: str = ''


def draw_if_possible(draw: Callable[[], Iterable[Path]]) -> list[Path]:
    """Draw pictures and return their paths; say so if that is not possible.

    A picture comes after results, which do not depend on it.
    """
    try:
        return [*draw()]
    except (ImportError, OSError) as error:
        click.echo(f'there is no picture: {error}', err=True)
        return []


def draw_curves(panels: Sequence[Panel], stem: Path) -> list[Path]:
    """Draw them; write a PNG and an SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(panels), 3.8), layout='constrained')
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(all_axes, panels):
        for k, (name, (xs, ys)) in enumerate(panel.curves.items()):
            axes.plot(
                xs,
                ys,
                label=name,
                color=COLORS[k % len(COLORS)],
                alpha=1 if k else 0.5,
                linewidth=WIDTHS[k > 0],
                marker=MARKS[k % len(MARKS)],
                markersize=SIZES[k > 0],
                markevery=_places(k, len(xs)),
            )
        axes.set_xscale('log' if 'x' in panel.logarithmic else 'linear')
        axes.set_yscale('log' if 'y' in panel.logarithmic else 'linear')
        axes.set_xlabel(panel.x, color=NEUTRAL)
        axes.set_ylabel(panel.y, color=NEUTRAL)
        axes.tick_params(which='minor', colors=NEUTRAL)
        neutral(axes)
    legend = figure.legend(
        *all_axes[0].get_legend_handles_labels(),
        frameon=False,
        loc='outside lower center',
        ncols=len(panels[0].curves),
    )
    for text in legend.get_texts():
        text.set_color(NEUTRAL)
    return save(figure, all_axes[0], stem)


def _places(k: int, length: int) -> tuple[int, int]:
    """Mark some points of a long curve, others than in the curves beside it."""
    every = max(1, length // 8)
    return k * every // len(MARKS) % every, every
