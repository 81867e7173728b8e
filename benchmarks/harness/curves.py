"""Pictures of results: curves in panels, bars beside published ratios, and predicted bars.

Predictions of published speeds come from costs of layers here, on the same number of equal
devices. The model is profiled on one device, with a small batch. That gives the time of each layer
once per micro-batch, and its time per sample. The simulator returns the time of a step on devices
like this one. Copies between them are assumed to be free. One profile varies with the load of the
machine, so the ratios are medians over several.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import torch

from benchmarks.harness.experiment import OURS, Experiment, Setting
from benchmarks.harness.options import NAME, Options
from benchmarks.harness.published import PAPER
from benchmarks.harness.report import describe, machine, write_json
from benchmarks.harness.tables import is_simulated, prediction_notes, prediction_rows
from torchgpipe.balance import Profile, profile
from torchgpipe.base.devices import memory_of
from torchgpipe.base.errors import table
from torchgpipe.base.settings import checkpoint_stops
from torchgpipe.plan import Costs, simulate
from torchgpipe.schedule import NAMES, make
from torchgpipe.schedule.generators import PLAIN_CALL
from torchgpipe.trainer.files import output_folder

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


#: The schedule predicted beside the plain call, and the sources of figures: as many as colors.
SHOWN, SOURCES = '1f1b', (OURS, PAPER)

#: Blue, orange, green, purple: apart also for those who see no red, on light and on dark.
COLORS = ('#3b6fb6', '#d1803d', '#4f9d69', '#8a6bb0')

#: Text and lines that can be read on white and on black, as pictures have no background.
NEUTRAL = '#808080'


def draw_ratios(summary: dict[str, Any], stem: Path) -> list[Path]:
    """Draw a bar for each setting and source; write a PNG and an SVG."""
    settings = summary['settings']
    sources = list(
        dict.fromkeys(
            source
            for result in settings
            for source, published in result['published'].items()
            if published['ratio']
        )
    )
    series = {
        'this run': [_bar(result['ratio'], _why_not(result, 'this run')) for result in settings]
    }
    for source in sources:
        series[source] = [
            _bar(result['published'].get(source, {}).get('ratio'), _why_not(result, source))
            for result in settings
        ]
    return _draw(
        series,
        [result['setting'] for result in settings],
        f'{summary["figure"]}, relative to {summary["baseline"]}',
        summary['experiment'] + _caveat(summary),
        stem,
    )


def draw_predictions(summary: dict[str, Any], stem: Path) -> list[Path]:
    """Draw predictions beside published figures; write a PNG and an SVG."""
    settings = summary['settings']
    series = {
        f'predicted: {name}': [_bar(result['ratios'].get(name)) for result in settings]
        for name in (PLAIN_CALL, SHOWN)
    }
    for source in dict.fromkeys(source for result in settings for source in result['published']):
        if source in SOURCES:
            series[source] = [_bar(result['published'].get(source)) for result in settings]
    return _draw(
        series,
        [result['setting'] for result in settings],
        f'throughput, relative to {summary["baseline"]}',
        f'{summary["experiment"]}, predicted and published',
        stem,
    )


#: A length, and the text at its end.
Bar = tuple[float, str]


def _bar(ratio: float | None, missing: str = '—') -> Bar:
    return (ratio, f'{ratio:.2f}') if ratio else (0.0, missing)


def _draw(
    series: dict[str, list[Bar]], names: Sequence[str], label: str, title: str, stem: Path
) -> list[Path]:
    """Draw a group of bars for each name, one of each series."""
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(7.5, 1.6 + len(names) * (0.2 + 0.24 * len(series))), layout='constrained'
    )
    axes = figure.subplots()
    height = 0.84 / len(series)
    for k, (name, bars) in enumerate(series.items()):
        places = [j + (k - (len(series) - 1) / 2) * height for j in range(len(names))]
        axes.barh(
            places,
            [ratio for ratio, _ in bars],
            height * 0.9,
            label=name,
            color=COLORS[k % len(COLORS)],
        )
        for place, (ratio, text) in zip(places, bars):
            axes.text(ratio, place, f' {text}', va='center', fontsize=10, color=NEUTRAL)
    axes.set_yticks(range(len(names)), names, fontsize=11)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(label, fontsize=11)
    axes.set_title(title, fontsize=12)
    # Below, where no bar can be in its way.
    legend = figure.legend(
        frameon=False, loc='outside lower center', ncols=min(3, len(series)), fontsize=11
    )
    for text in [axes.title, axes.xaxis.label, *legend.get_texts()]:
        text.set_color(NEUTRAL)
    return save(figure, axes, stem)


def _caveat(summary: dict[str, Any]) -> str:
    """Return text beside the title for simulated devices, and below it for a scaled run."""
    text = f', on a {NAME}' if is_simulated(summary) else ''
    if summary['scale'] >= 1:
        return text
    return (
        f'{text}, at scale {summary["scale"]:g}\n'
        'this run shows that all of it works, not how it does at full scale'
    )


def _why_not(result: dict[str, Any], source: str) -> str:
    """Say why there is no ratio."""
    if source == 'this run':
        return '—' if result['figure'] else str(result['status'])
    figure = result['published'].get(source, {'figure': 0})['figure']
    return 'out of memory' if figure is None else '—'


def save(figure: Any, axes: Any, stem: Path) -> list[Path]:
    """Write a PNG on white and an SVG without background."""
    neutral(axes)
    paths = [stem.with_name(f'{stem.name}.{kind}') for kind in ('png', 'svg')]
    figure.savefig(paths[0], dpi=150)
    figure.savefig(paths[1], transparent=True, metadata={'Date': None})
    return paths


def neutral(axes: Any) -> None:
    """Draw axes and labels in a color that can be read on white and on black."""
    axes.tick_params(colors=NEUTRAL)
    for side, spine in axes.spines.items():
        spine.set_color(NEUTRAL)
        spine.set_visible(side in ('left', 'bottom'))


#: Samples of a profile.
BATCH = 8

#: How many profiles are taken.
PROFILES = 5


def predict(experiment: Experiment, options: Options) -> None:
    """Profile the model, simulate the settings, and write and print the results."""
    folder = output_folder(options.output)
    resolution = experiment.scaled_resolution(options.scale)
    device = memory_of(options.place(experiment.baseline)[0])
    torch.manual_seed(options.seed)
    model = experiment.baseline.model.build()
    sample = torch.rand(BATCH, 3, resolution, resolution)
    profiles = [profile(model, sample, device=device) for _ in range(PROFILES)]
    summary = {
        'experiment': experiment.name,
        'baseline': experiment.baseline.name,
        'resolution': resolution,
        'batch': BATCH,
        'profiles': PROFILES,
        'device': str(device),
        'scale': options.scale,
        'seed': options.seed,
        'settings': [_result(experiment, setting, profiles) for setting in options.settings],
    }
    click.echo(
        '\n\n'.join(
            [
                f'{experiment.title}: {describe(machine(), device.type != "cpu")}',
                table(*prediction_rows(summary)),
                *prediction_notes(summary),
            ]
        )
    )
    name = f'{experiment.name}-predicted'
    files = [write_json(folder, name, summary), *draw_predictions(summary, folder / name)]
    click.echo('\n' + '\n'.join(map(str, files)))


def _result(experiment: Experiment, setting: Setting, profiles: list[Profile]) -> dict[str, Any]:
    ratios: dict[str, list[float]] = {}
    for measured in profiles:
        base = _speeds(measured, experiment.baseline)[PLAIN_CALL]
        for name, speed in _speeds(measured, setting).items():
            ratios.setdefault(name, []).append(speed / base)

    return {
        'setting': setting.name,
        'partitions': len(setting),
        'chunks': setting.chunks,
        'ratios': {name: median(values) for name, values in ratios.items()},
        'lowest': {name: min(values) for name, values in ratios.items()},
        'published': {
            source: experiment.published_ratio(setting, source) for source in setting.published
        },
    }


def _speeds(measured: Profile, setting: Setting) -> dict[str, float]:
    """Return samples per second, by schedule."""
    return {
        name: setting.batch / seconds for name, seconds in step_seconds(measured, setting).items()
    }


def step_seconds(measured: Profile, setting: Setting) -> dict[str, float]:
    """Predict the seconds of a step of a setting, by the plain call and by each schedule.

    On accelerators, each of which has a thread of autograd's, the plain call is fill and drain.

    Args:
        measured: The costs of the layers, with any batch. setting: The setting. Schedules with two
        partitions on a device need another balance.
    """
    whole = measured.scaled(setting.batch)
    if not setting.balance:
        return {PLAIN_CALL: sum(x.forward_seconds + x.backward_seconds for x in whole.layers)}
    n, m, mode = len(setting), setting.chunks, setting.checkpoint
    result = {}
    for name in (PLAIN_CALL, *NAMES):
        schedule = make('gpipe' if name == PLAIN_CALL else name, n, m)
        stages = sum(map(len, schedule.stages))
        balance = (
            setting.balance if stages == n else whole.balance(stages, chunks=m, checkpoint=mode)
        )
        result[name] = simulate(
            schedule.recomputing(checkpoint_stops(mode, m, stages)),
            Costs.of(whole, balance, m, mode),
        ).seconds
    return result
