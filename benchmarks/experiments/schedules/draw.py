"""A bar for each way to train the cells: how many times as fast as in sequence."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.chart import COLORS, NEUTRAL, neutral, save


def draw_speed_ups(cases: Sequence[dict[str, Any]], stem: Path) -> list[Path]:
    """Draw a panel per stack and number of partitions, with a line at each ideal; PNG, SVG."""
    from matplotlib.figure import Figure

    panels: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        panels.setdefault(f'{case["stack"]}, n = {case["partitions"]}', []).append(case)
    names = list(
        dict.fromkeys(
            row['name'] for case in cases for row in case['rows'] if row['name'] != 'in sequence'
        )
    )
    groups = max(map(len, panels.values()))
    figure = Figure(
        figsize=(2.5 + 3 * len(panels), 1.8 + 0.17 * len(names) * (1 + groups)),
        layout='constrained',
    )
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, group) in zip(all_axes, panels.items()):
        _draw_panel(axes, group, names)
        axes.set_title(title, color=NEUTRAL, fontsize=12)
        axes.margins(x=0.2)
        neutral(axes)
    first = all_axes[0]
    first.set_yticks(range(len(names)), names, fontsize=11)
    first.invert_yaxis()
    legend = figure.legend(
        *first.get_legend_handles_labels(),
        frameon=False,
        loc='outside lower center',
        ncols=groups,
        fontsize=11,
        title_fontsize=11,
        title='times as fast as the same cells in sequence; dotted: the ideal',
    )
    for text in [legend.get_title(), *legend.get_texts()]:
        text.set_color(NEUTRAL)
    return save(figure, first, stem)


def _draw_panel(axes: Any, group: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    height = 0.84 / len(group)
    for k, case in enumerate(group):
        found = {row['name']: row['speed_up'] for row in case['rows']}
        places = [j + (k - (len(group) - 1) / 2) * height for j in range(len(names))]
        values = [found.get(name, 0) for name in names]
        color = COLORS[k % len(COLORS)]
        axes.barh(places, values, height * 0.9, color=color, label=f'm = {case["chunks"]}')
        axes.axvline(case['ideal'], color=color, linestyle=':')
        for place, value in zip(places, values):
            text = f' {value:.2f}' if value else ' —'
            axes.text(value, place, text, va='center', fontsize=9, color=NEUTRAL)
