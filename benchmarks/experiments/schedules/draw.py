"""A bar for each way to train the cells, measured, and predicted by the simulator.

A bar is the speed relative to the cells in sequence. Predictions come from a profile of layers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from benchmarks.harness.curves import COLORS, NEUTRAL, neutral, save
from torchgpipe.balance import profile
from torchgpipe.plan import Costs, measure_overhead, simulate
from torchgpipe.schedule import NAMES, make
from torchgpipe.schedule.generators import PLAIN_CALL, plain_call


class Prediction(NamedTuple):
    """The time of a step in seconds, and the part of it in which devices wait."""

    seconds: float
    bubble: float


def predict(cells: nn.Sequential, sample: Tensor, n: int, m: int) -> dict[str, Prediction]:
    """Profile the layers now, one after the other in this thread, and simulate the contenders.

    Args:
        cells: The cells of the contenders. sample: A micro-batch. n: The number of devices. m: The
        number of micro-batches.
    """
    cells.zero_grad()
    layers = nn.Sequential(*[layer for cell in cells.children() for layer in cell.children()])
    measured = profile(layers, sample, device='cpu', timeout=0)
    sequential = m * sum(x.forward_seconds + x.backward_seconds for x in measured.layers)
    predictions = {'in sequence': Prediction(sequential, 0.0)}
    overhead = measure_overhead([f'cpu:{j}' for j in range(n)])
    for name in (PLAIN_CALL, *NAMES):
        schedule, pairs = (
            plain_call(n, m, one_thread=True) if name == PLAIN_CALL else (make(name, n, m), [])
        )
        stages = sum(map(len, schedule.stages))
        costs = Costs.of(measured, [len(layers) // stages] * stages, 1, 'never', overhead=overhead)
        simulation = simulate(schedule, costs, pairs)
        predictions[name] = Prediction(simulation.seconds, simulation.bubble)
    return predictions


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
        speed_ups = {row['name']: row['speed_up'] for row in case['rows']}
        places = [j + (k - (len(group) - 1) / 2) * height for j in range(len(names))]
        values = [speed_ups.get(name, 0) for name in names]
        color = COLORS[k % len(COLORS)]
        axes.barh(places, values, height * 0.9, color=color, label=f'm = {case["chunks"]}')
        axes.axvline(case['ideal'], color=color, linestyle=':')
        for place, value in zip(places, values):
            text = f' {value:.2f}' if value else ' —'
            axes.text(value, place, text, va='center', fontsize=9, color=NEUTRAL)
