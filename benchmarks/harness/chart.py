"""Bar charts: measured ratios beside the published ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.experiment import OURS
from benchmarks.harness.published import PAPER
from benchmarks.harness.simulated import NAME
from benchmarks.harness.tables import is_simulated
from torchgpipe.schedule.generators import PLAIN_CALL

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
    found = f', on a {NAME}' if is_simulated(summary) else ''
    if summary['scale'] >= 1:
        return found
    return (
        f'{found}, at scale {summary["scale"]:g}\n'
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
