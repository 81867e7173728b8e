"""Code shared by the commands that shard a model over processes."""

import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import click

from benchmarks.harness.curves import Panel, draw_curves
from benchmarks.harness.report import Rows, describe, machine, write_json
from torchgpipe.base.errors import table
from torchgpipe.trainer.files import output_folder

#: Titles of the columns of `memory_cells`.
MEMORY = ['model, MiB', 'peak, MiB']


def sharding_options(
    steps: int, processes: tuple[int, ...] = (1, 2, 4)
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command with the options of all of them."""
    options = [
        click.option(
            '--processes',
            'numbers',
            type=click.IntRange(1),
            multiple=True,
            default=processes,
            show_default=True,
            callback=_drop_repeated,
            help='How many share the model; may be given several times.',
        ),
        click.option(
            '--steps',
            type=click.IntRange(1),
            default=steps,
            show_default=True,
            help='Steps that all take, in turn.',
        ),
        click.option(
            '--output',
            default='results',
            show_default=True,
            metavar='DIR',
            help='Where the JSON file and the picture go.',
        ),
    ]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _drop_repeated(context: Any, parameter: Any, value: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(value))


def memory_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row for the rank with the most memory."""
    model = max(
        sum(rank[kind] for kind in ('parameters', 'gradients', 'optimizer'))
        for rank in row['ranks']
    )
    return [f'{size / 2**20:.2f}' for size in (model, peak(row))]


def difference_cell(row: dict[str, Any]) -> str:
    """Return the difference of losses from the plain model's."""
    return f'{row["difference"]:.0e}' if row['difference'] else '0'


def peak(row: dict[str, Any]) -> int:
    """Return the peak in bytes of the rank that has most."""
    most: int = max(rank['peak'] for rank in row['ranks'])
    return most


def training_rows(rows: Sequence[dict[str, Any]]) -> Rows:
    """Return the header and the rows."""
    return ['', 'first loss', 'last loss', 'largest difference', 'ms per step', *MEMORY], [
        [
            row['name'],
            f'{row["losses"][0]:.4f}',
            f'{row["losses"][-1]:.4f}',
            difference_cell(row),
            f'{row["seconds"] * 1e3:.1f}',
            *memory_cells(row),
        ]
        for row in rows
    ]


def training_panels(results: dict[str, Any]) -> list[Panel]:
    """Return the losses, and the most that a process keeps."""
    losses, peaks = {}, {}
    for row in results['rows']:
        losses[row['name']] = range(len(row['losses'])), row['losses']
        peaks[row['name']] = [len(row['ranks'])], [peak(row) / 2**20]
    return [Panel('step', 'loss', losses), Panel('processes', 'peak, MiB per rank', peaks)]


def meaning(results: dict[str, Any]) -> str:
    """Return an explanation of the figures."""
    load = results['load']
    busy = (
        ''
        if load is None
        else (f' Before the run, the load average of the machine over one minute was {load:.1f}.')
    )
    return (
        'The plain model uses layers of torch.nn in one process. The sharded models use layers of '
        'torchgpipe.shard. The command starts the given number of processes, which exchange '
        'tensors by gloo. Each process has one thread. Processes beyond the number of cores wait '
        'for a core. Times are medians of steps (forward, backward, optimizer), and all models '
        f'take their steps in turn.{busy} Model memory consists of parameters, gradients and '
        'optimizer state. Peak memory is the maximum over a step of the model memory and all '
        'other live tensors. Both columns show the process with the largest value.'
    )


def training(
    name: str,
    output: str,
    measure: Callable[[], dict[str, Any]],
    parts: Callable[[dict[str, Any]], Sequence[str | Rows]],
    panels: Callable[[dict[str, Any]], Sequence[Panel]] = training_panels,
) -> None:
    """Measure, and write tables, the JSON file and the pictures.

    Args:
        name: The name of the command. output: The folder for results. measure: Returns the
        results. parts: Makes text and tables of them. panels: Makes pictures of them.
    """
    folder = output_folder(output)
    load = os.getloadavg()[0] if hasattr(os, 'getloadavg') else None
    results = {'load': load, **measure()}
    click.echo(f'{describe(machine())}\n')
    for part in parts(results):
        text = textwrap.fill(part, 99) if isinstance(part, str) else table(*part)
        click.echo(f'{text}\n')
    files = [write_json(folder, name, results), *draw_curves(panels(results), folder / name)]
    click.echo('\n'.join(map(str, files)))
