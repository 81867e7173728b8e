"""A classifier of up to a million classes: in one process, and with these shared by several."""

from typing import Any

import click

from benchmarks.harness.curves import Panel
from benchmarks.harness.page import Section
from benchmarks.harness.report import Rows
from benchmarks.harness.sharding import (
    MEMORY,
    difference_cell,
    meaning,
    memory_cells,
    peak,
    sharding_options,
    training,
)
from benchmarks.harness.side_by_side import side_by_side

#: Largest relative difference of losses: rounding of float32.
TOLERANCE = 1e-5


classes_option = click.option(
    '--classes',
    'sizes',
    type=click.IntRange(2),
    multiple=True,
    default=(1_000, 10_000, 100_000, 1_000_000),
    show_default=True,
    help='How many there are; may be given several times.',
)


@click.command()
@sharding_options(7)
@classes_option
@click.option(
    '--features', type=click.IntRange(1), default=64, show_default=True, help='Of a sample.'
)
@click.option(
    '--batch', type=click.IntRange(1), default=64, show_default=True, help='Samples of a step.'
)
def classes(
    numbers: tuple[int, ...],
    steps: int,
    output: str,
    sizes: tuple[int, ...],
    features: int,
    batch: int,
) -> None:
    """Train a linear layer of many classes: in one process, and sharded over several.

    Plain: nn.Linear and cross_entropy. Sharded: ParallelLinear, of which each process has some
    classes, and parallel_cross_entropy. A loss that differs from the plain layer's is an error.
    """

    def measure() -> dict[str, Any]:
        from benchmarks.experiments.classes.train import Options, make  # has torch.distributed

        return {
            'features': features,
            'batch': batch,
            'cases': [
                {
                    'classes': size,
                    'rows': side_by_side(
                        make,
                        Options(size, features, batch),
                        numbers,
                        steps,
                        f'{size:,} classes',
                        TOLERANCE,
                    ),
                }
                for size in sorted({*sizes})
            ],
        }

    training('classes', output, measure, _parts, size_panels)


def _rows(cases: list[dict[str, Any]]) -> Rows:
    return [
        'classes',
        '',
        'ms per step',
        'times plain',
        *MEMORY,
        'loss alone',
        'largest difference',
    ], [
        [
            f'{case["classes"]:,}',
            row['name'],
            f'{row["seconds"] * 1e3:.1f}',
            f'{row["seconds"] / case["rows"][0]["seconds"]:.2f}',
            *memory_cells(row),
            f'{_loss_alone(row):.2f}',
            difference_cell(row),
        ]
        for case in cases
        for row in case['rows']
    ]


def _loss_alone(row: dict[str, Any]) -> float:
    """Return the memory of the loss relative to logits and gradient, in the worst process."""
    return max(rank['loss'] / rank['logits'] / 2 for rank in row['ranks'] if rank['logits'])


def size_panels(results: dict[str, Any]) -> list[Panel]:
    """Return peaks and times by the number of classes."""
    cases = results['cases']
    sizes = [case['classes'] for case in cases]
    rows = list(zip(*[case['rows'] for case in cases]))
    return [
        Panel(
            'classes',
            'peak, MiB per rank',
            {each[0]['name']: (sizes, [peak(row) / 2**20 for row in each]) for each in rows},
            'xy',
        ),
        Panel(
            'classes',
            'ms per step',
            {each[0]['name']: (sizes, [row['seconds'] * 1e3 for row in each]) for each in rows},
            'xy',
        ),
    ]


def _parts(results: dict[str, Any]) -> list[str | Rows]:
    """Describe the training, and return the table."""
    return [
        f'The model is a linear layer with {results["features"]} inputs, followed by cross '
        f'entropy. It trains on {results["batch"]} samples in float32 by SGD. The sharded '
        f'layer is split by classes. {meaning(results)} "Loss alone" is the peak memory of '
        'the loss in forward and backward, relative to its logits and their gradient. '
        'These two are the minimum. "Largest difference" compares losses with the losses of '
        'the plain layer.',
        _rows(results['cases']),
    ]


COMMANDS = [classes]
SECTION = Section('Classifiers sharded over processes', 'classes', _parts)
