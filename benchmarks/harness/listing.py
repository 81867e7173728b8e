"""The command that lists all experiments, with settings and published figures."""

from collections.abc import Sequence
from textwrap import fill
from types import ModuleType

import click

from benchmarks.harness.experiment import OURS, Experiment, Setting
from benchmarks.harness.published import ACTIVATIONS, EXPERIMENTS, MODEL
from benchmarks.harness.tables import number, published

#: Memory was published in two parts; their sum is ours.
PARTS = (MODEL, ACTIVATIONS)


@click.command('list')
@click.pass_obj
def listing(modules: Sequence[ModuleType]) -> None:
    """List the experiments: settings, and the figures published of each.

    The first setting of each is the baseline of its ratios.
    """
    for experiment in EXPERIMENTS.values():
        click.echo(
            f'{experiment.name}: {experiment.title}, {experiment.resolution}² '
            f'({experiment.figure}, {experiment.unit})'
        )
        rows = [_row(experiment, setting) for setting in experiment.settings]
        widths = [max(map(len, column)) for column in zip(*rows)]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths)]
            click.echo(f'  {"  ".join(cells)}'.rstrip())
    unpublished: list[str] = []
    for module in modules:
        for command in module.COMMANDS:
            if command.name not in EXPERIMENTS:
                unpublished.append(command.name)
    click.echo(
        '\nFigures are those of torchgpipe 0.0.7 (ratio), then of other sources; memory is '
        'model + activations, in GB in the GPipe paper.\n'
        + fill(f'Without published figures: {", ".join(unpublished)}.', 110)
        + '\nMore: COMMAND --help.'
    )


def _row(experiment: Experiment, setting: Setting) -> list[str]:
    size = f'batch {setting.batch}'
    if setting.balance:
        size += f' in {setting.chunks}'
    ratio = experiment.published_ratio(setting, OURS)
    figure = _figure(setting, OURS)
    if ratio is not None and experiment.figure == 'throughput':
        figure += f' ({number(ratio)})'
    more = []
    for name, sources in setting.details.items():
        if name not in PARTS:
            more.append(f'{published(sources[OURS])} {name}')
    for source in setting.published:
        if source != OURS:
            more.append(f'{source} {_figure(setting, source)}')
    return [
        setting.name,
        str(setting.model.size or ''),
        size,
        ','.join(map(str, setting.balance)) or 'without GPipe',
        figure,
        '; '.join(more),
    ]


def _figure(setting: Setting, source: str) -> str:
    if PARTS[0] in setting.details:
        return ' + '.join(published(setting.details[part][source]) for part in PARTS)
    spread = f' ± {setting.spread[source]}' if source in setting.spread else ''
    return published(setting.published[source]) + spread
