"""Bar charts: measured ratios beside the published ones."""
from pathlib import Path
from typing import Any

from benchmarks.harness.simulated import NAME
from benchmarks.harness.tables import is_simulated

__all__ = ['COLORS', 'NEUTRAL', 'draw_ratios', 'neutral', 'save']

#: Blue, orange, green, purple: apart also for those who see no red, on light and on dark.
COLORS = ('#3b6fb6', '#d1803d', '#4f9d69', '#8a6bb0')

#: Text and lines that can be read on white and on black, as pictures have no background.
NEUTRAL = '#808080'


def draw_ratios(summary: dict[str, Any], stem: Path) -> list[Path]:
    """Draw a bar for each setting and source; write a PNG and an SVG."""
    from matplotlib.figure import Figure

    settings = summary['settings']
    sources = list(dict.fromkeys(source for result in settings for source, published in
                                 result['published'].items() if published['ratio']))
    series: dict[str, list[float | None]] = {
        'this run': [result['ratio'] for result in settings],
        **{source: [result['published'].get(source, {}).get('ratio') for result in settings]
           for source in sources}}
    figure = Figure(figsize=(7.5, 1.6 + len(settings) * (.2 + .24 * len(series))),
                    layout='constrained')
    axes = figure.subplots()
    height = .84 / len(series)
    for k, (name, ratios) in enumerate(series.items()):
        places = [j + (k - (len(series) - 1) / 2) * height for j in range(len(settings))]
        axes.barh(places, [ratio or 0 for ratio in ratios], height * .9, label=name,
                  color=COLORS[k % len(COLORS)])
        for place, ratio, result in zip(places, ratios, settings):
            text = f'{ratio:.2f}' if ratio else _why_not(result, name)
            axes.text(ratio or 0, place, f' {text}', va='center', fontsize=10, color=NEUTRAL)
    axes.set_yticks(range(len(settings)), [result['setting'] for result in settings], fontsize=11)
    axes.invert_yaxis()
    axes.margins(x=.1)
    axes.set_xlabel(f"{summary['figure']}, relative to {summary['baseline']}", fontsize=11)
    axes.set_title(summary['experiment'] + _caveat(summary), fontsize=12)
    # Below, where no bar can be in its way.
    legend = figure.legend(frameon=False, loc='outside lower center', ncols=len(series),
                           fontsize=11)
    for text in [axes.title, axes.xaxis.label, *legend.get_texts()]:
        text.set_color(NEUTRAL)
    return save(figure, axes, stem)


def _caveat(summary: dict[str, Any]) -> str:
    """Say beside the title what was simulated, and below it what a scaled run does not show."""
    found = f', on a {NAME}' if is_simulated(summary) else ''
    if summary['scale'] >= 1:
        return found
    return (f"{found}, at scale {summary['scale']:g}\n"
            'this run shows that all of it works, not how it does at full scale')


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
    """Draw what is around bars in a color that can be read on white and on black."""
    axes.tick_params(colors=NEUTRAL)
    for side, spine in axes.spines.items():
        spine.set_color(NEUTRAL)
        spine.set_visible(side in ('left', 'bottom'))
