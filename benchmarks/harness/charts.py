"""Pictures of results: panels of curves or of bars, on white and on black."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: Blue, orange, green, purple, red: apart also for those who see no red, on light and on dark.
COLORS = ('#3b6fb6', '#d1803d', '#4f9d69', '#8a6bb0', '#b8485a')

#: Text and lines that can be read on white and on black, as pictures have no background.
NEUTRAL = '#808080'

#: Equal curves lie on each other: the first one is broad, so that it is seen.
WIDTHS, SIZES, MARKS = (5.0, 1.6), (9.0, 4.5), ('o', 'o', 's', '^', 'D')

#: Letters of a legend in an inch, at least.
LETTERS = 11

#: The height of a group of bars.
GROUP = 0.84


class Curves(NamedTuple):
    """A panel of curves.

    Attributes:
        x: The label of its x axis.
        y: The label of its y axis.
        curves: The coordinates of each curve, by its name. All panels of a picture have the same
            names.
        logarithmic: The logarithmic axes, such as ``'xy'``.
    """

    x: str
    y: str
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    logarithmic: str = ''

    @property
    def size(self) -> tuple[float, float]:
        """The width and the height, in inches."""
        return 5, 3.8

    def draw(self, axes: Any) -> None:
        """Draw the curves."""
        for k, (name, (xs, ys)) in enumerate(self.curves.items()):
            axes.plot(
                xs,
                ys,
                label=name,
                color=COLORS[k % len(COLORS)],
                alpha=1 if k else 0.5,
                linewidth=WIDTHS[k > 0],
                marker=MARKS[k % len(MARKS)],
                markersize=SIZES[k > 0],
                markevery=_marked(k, len(xs)),
            )
        axes.set_xscale('log' if 'x' in self.logarithmic else 'linear')
        axes.set_yscale('log' if 'y' in self.logarithmic else 'linear')
        if 'y' not in self.logarithmic:
            axes.set_ylim(0, 1.1 * axes.dataLim.y1)
        axes.set_xlabel(self.x, color=NEUTRAL)
        axes.set_ylabel(self.y, color=NEUTRAL)
        axes.tick_params(which='minor', colors=NEUTRAL)


def _marked(k: int, length: int) -> tuple[int, int]:
    """Return the first marked point of a long curve, and the distance of the others."""
    every = max(1, length // 8)
    return k * every // len(MARKS) % every, every


#: A length, and the text at its end.
Bar = tuple[float, str]


def bar(ratio: float | None, missing: str = '—') -> Bar:
    """Return the bar of a ratio, or a text where there is none."""
    return (ratio, f'{ratio:.2f}') if ratio else (0.0, missing)


class Bars(NamedTuple):
    """A panel of horizontal bars: a group for each name, with a bar of each series.

    Attributes:
        title: The title.
        x: The label of the lengths.
        names: The names of the groups.
        series: The bars of each series, by its name.
        ideals: A length for each series, at which there is a dotted line.
    """

    title: str
    x: str
    names: Sequence[str]
    series: Mapping[str, Sequence[Bar]]
    ideals: Sequence[float] = ()

    @property
    def size(self) -> tuple[float, float]:
        """The width and the height, in inches."""
        width = 7.5 if any(self.names) else 4
        return width, 1.6 + len(self.names) * (0.2 + 0.24 * len(self.series))

    def draw(self, axes: Any) -> None:
        """Draw the bars."""
        height = GROUP / len(self.series)
        for k, (name, bars) in enumerate(self.series.items()):
            color = COLORS[k % len(COLORS)]
            first = (k - (len(self.series) - 1) / 2) * height
            places = [first + j for j in range(len(bars))]
            lengths = [length for length, _ in bars]
            axes.barh(places, lengths, height * 0.9, label=name, color=color)
            for place, (length, text) in zip(places, bars):
                axes.text(length, place, f' {text}', va='center', fontsize=10, color=NEUTRAL)
            for ideal in self.ideals[k : k + 1]:
                axes.axvline(ideal, color=color, linestyle=':')
        axes.set_yticks(range(len(self.names)), self.names, fontsize=11)
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.set_xlabel(self.x, fontsize=11, color=NEUTRAL)
        axes.set_title(self.title, fontsize=12, color=NEUTRAL)


def draw(panels: Sequence[Curves | Bars], stem: Path) -> list[Path]:
    """Draw panels from left to right, with one legend; write a PNG and an SVG."""
    from matplotlib.figure import Figure

    widths = [panel.size[0] for panel in panels]
    height = max(panel.size[1] for panel in panels)
    figure = Figure(figsize=(sum(widths), height), layout='constrained')
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(all_axes, panels):
        panel.draw(axes)
        _draw_lines(axes)

    # Below, where no curve can be in its way.
    handles, labels = all_axes[0].get_legend_handles_labels()
    columns = max(1, int(LETTERS * sum(widths)) // (6 + max(map(len, labels))))
    legend = figure.legend(
        handles, labels, frameon=False, loc='outside lower center', ncols=columns
    )
    for text in legend.get_texts():
        text.set_color(NEUTRAL)

    paths = [stem.with_name(f'{stem.name}.{kind}') for kind in ('png', 'svg')]
    figure.savefig(paths[0], dpi=150)
    figure.savefig(paths[1], transparent=True, metadata={'Date': None})
    return paths


def _draw_lines(axes: Any) -> None:
    """Draw the lines at the left and the bottom only, in a color that can always be read."""
    axes.tick_params(colors=NEUTRAL)
    for side, spine in axes.spines.items():
        spine.set_color(NEUTRAL)
        spine.set_visible(side in ('left', 'bottom'))
