"""The command that lists all experiments, with settings and published figures."""
from typing import List

import click

from benchmarks.experiment import OURS, Experiment, Setting
from benchmarks.published import EXPERIMENTS
from benchmarks.tables import number

__all__ = ['listing']


@click.command('list')
def listing() -> None:
    """List the experiments: settings, and the figures published of each.

    The first setting of each is the baseline of its ratios.
    """
    for experiment in EXPERIMENTS.values():
        click.echo(f'{experiment.name}: {experiment.title}, {experiment.resolution}² '
                   f'({experiment.figure}, {experiment.unit})')
        rows = [_row(experiment, setting) for setting in experiment.settings]
        widths = [max(map(len, column)) for column in zip(*rows)]
        for row in rows:
            click.echo('  ' + '  '.join(cell.ljust(width) for cell, width in zip(row, widths)
                                        ).rstrip())
    click.echo('\nFigures are those of torchgpipe 0.0.7 (ratio), then of other sources. '
               'More: COMMAND --help.')


def _row(experiment: Experiment, setting: Setting) -> List[str]:
    ratio = experiment.published_ratio(setting, OURS)
    figure = number(setting.published[OURS], 'out of memory')
    if ratio is not None and experiment.figure != 'error':
        figure += f' ({number(ratio)})'
    if OURS in setting.spread:
        figure += f' ± {setting.spread[OURS]}'
    size = f'batch {setting.batch}'
    if setting.balance:
        size += f' in {setting.chunks}'
    others = [f'{source} {number(figure)}' for source, figure in setting.published.items()
              if source != OURS]
    balance = ','.join(map(str, setting.balance)) or 'without GPipe'
    details = [f'{number(sources[OURS], "?")} {name}' for name, sources in setting.details.items()
               if sources.get(OURS) is not None]
    return [setting.name, str(setting.model.size or ''), size, balance, figure,
            '; '.join([*details, *others])]
