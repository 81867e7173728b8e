"""Up to a million classes behind a ResNet-18, with autocast: plain, and shared by processes."""

from typing import Any

import click

from benchmarks.experiments.classes import classes_option, size_panels
from benchmarks.harness.memory import require
from benchmarks.harness.page import Section
from benchmarks.harness.report import Rows
from benchmarks.harness.sharding import (
    MEMORY,
    difference_cell,
    meaning,
    memory_cells,
    sharding_options,
    side_by_side,
    training,
)
from benchmarks.models.sharded import FEATURES

NAME = 'classes-resnet18'

#: Largest relative difference of losses. Steps enlarge rounding of bfloat16: a change of the plain
#: model's weights by 1e-7 changes its third loss by 2e-3. Doubled gradients change it by 1e-1.
TOLERANCE = 1e-2


@click.command(NAME)
@sharding_options(3, (2, 4))
@classes_option
@click.option(
    '--resolution',
    type=click.IntRange(32),
    default=64,
    show_default=True,
    help='Height and width of the images.',
)
@click.option(
    '--batch', type=click.IntRange(2), default=16, show_default=True, help='Samples of a step.'
)
def classes_resnet18(
    numbers: tuple[int, ...],
    steps: int,
    output: str,
    sizes: tuple[int, ...],
    resolution: int,
    batch: int,
) -> None:
    """Train a ResNet-18 with many classes: in one process, and with the classes shared.

    Each process has the convolutions, and all have the same images. The last layer is
    nn.Linear, or ParallelLinear with some of the classes in each process. Layers run with autocast
    to bfloat16. A loss that differs from the plain model's by more than rounding is an error.
    """

    def measure() -> dict[str, Any]:
        from benchmarks.experiments.classes import (
            ImageOptions,  # has torch.distributed
            make_resnet,
        )

        cases = []
        for size in sorted({*sizes}):
            # Weights and gradients of the plain model and of each split, and a cast of one.
            need = 4 * FEATURES * size * (2 * (1 + len(numbers)) + 1)
            require(need, f'the last layer of {size:,} classes, in {1 + len(numbers)} models,')
            rows = side_by_side(
                make_resnet,
                ImageOptions(size, resolution, batch),
                numbers,
                steps,
                f'{size:,} classes',
                TOLERANCE,
            )
            cases.append({'classes': size, 'rows': rows})
        return {'resolution': resolution, 'batch': batch, 'cases': cases}

    try:
        training(NAME, output, measure, _parts, size_panels)
    except MemoryError as error:
        raise click.ClickException(f'{error}; use --classes and --processes') from None


def _rows(cases: list[dict[str, Any]]) -> Rows:
    rows = []
    for case in cases:
        plain = case['rows'][0]
        for row in case['rows']:
            rows.append(
                [
                    f'{case["classes"]:,}',
                    row['name'],
                    f'{row["seconds"] * 1e3:.1f}',
                    f'{row["seconds"] / plain["seconds"]:.2f}',
                    *memory_cells(row),
                    difference_cell(row),
                ]
            )
    return ['classes', '', 'ms per step', 'times plain', *MEMORY, 'largest difference'], rows


def _parts(results: dict[str, Any]) -> list[str | Rows]:
    """Describe the training, and return the table."""
    return [
        'The model is a ResNet-18 with one linear layer for all classes. It trains by SGD on '
        f'{results["batch"]} images of {results["resolution"]}², the same in each step, with '
        'parameters in float32 and autocast to bfloat16. Each process has all convolutions '
        'and all images. '
        f'The last layer is split by classes. {meaning(results)} "Largest difference" '
        'compares losses with the losses of the plain model.',
        _rows(results['cases']),
    ]


COMMANDS = [classes_resnet18]
SECTION = Section('A ResNet-18 with its classes sharded over processes', NAME, _parts)
