"""A classifier of up to a million classes: in one process, and with these shared by several."""

from typing import Any, NamedTuple

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgpipe.shard as ts
from benchmarks.harness.curves import Panel
from benchmarks.harness.memory import peak_memory
from benchmarks.harness.page import Section
from benchmarks.harness.report import Rows
from benchmarks.harness.sharding import (
    MEMORY,
    Trainer,
    difference_cell,
    meaning,
    memory_cells,
    peak,
    sharding_options,
    side_by_side,
    training,
)
from benchmarks.models.sharded import FEATURES, resnet18
from torchgpipe.shard.nn.functional import parallel_cross_entropy


class Options(NamedTuple):
    """The options of each process."""

    classes: int
    features: int
    batch: int


class ImageOptions(NamedTuple):
    """The options of each process, for a ResNet-18."""

    classes: int
    resolution: int
    batch: int


class Classifier(Trainer):
    """A trainer that measures the memory of the loss alone.

    Args:
        layer: The layer that returns logits. sharded: Whether the logits are for this rank's
        classes only. options: Sizes.
    """

    def __init__(self, layer: nn.Module, sharded: bool, options: Options) -> None:
        super().__init__(layer, torch.optim.SGD(layer.parameters(), 0.1), self._next_loss)
        self._cross_entropy = parallel_cross_entropy if sharded else F.cross_entropy
        self._options = options
        self._generator = torch.Generator().manual_seed(0)

    def _draw(self) -> tuple[Tensor, Tensor]:
        """Draw features, as a backbone gives them, and classes."""
        classes, features, batch = self._options
        x = torch.randn(batch, features, generator=self._generator)
        return (x.requires_grad_(), torch.randint(classes, (batch,), generator=self._generator))

    def _next_loss(self) -> Tensor:
        x, target = self._draw()
        loss: Tensor = self._cross_entropy(self.model(x), target)
        return loss

    def figures(self) -> dict[str, Any]:
        """Add the peak of the loss in forward and backward with its logits, and their size."""
        x, target = self._draw()
        logits = self.model(x)
        size = logits.untyped_storage().nbytes()
        output = logits.detach().requires_grad_()
        ts.register_parallel_dim(output, ts.get_parallel_dim(logits))
        peak = peak_memory(
            lambda: self._cross_entropy(output, target).backward(), [torch.device('cpu')]
        )
        return {'logits': size, 'loss': size + peak, **super().figures()}


def make(options: Options, sharded: bool) -> Classifier:
    """Make a trainer; after the same seed, so that all have the same values."""
    torch.manual_seed(0)
    if not sharded:
        return Classifier(nn.Linear(options.features, options.classes), sharded, options)
    ts.distributed.init_process_group()
    layer = ts.nn.ParallelLinear(options.features, options.classes, dim=1)
    return Classifier(layer, sharded, options)


def make_resnet(options: ImageOptions, sharded: bool) -> Trainer:
    """Make a trainer of a ResNet-18; after the same seed, so that all have the same values."""
    torch.manual_seed(0)
    backbone = resnet18()
    head: nn.Module
    if sharded:
        ts.distributed.init_process_group()
        head = ts.nn.ParallelLinear(FEATURES, options.classes, dim=1)
    else:
        head = nn.Linear(FEATURES, options.classes)
    model = nn.Sequential(backbone, head)
    cross_entropy = parallel_cross_entropy if sharded else F.cross_entropy
    generator = torch.Generator().manual_seed(0)
    # Each step has the same images: so the loss falls fast, and a wrong gradient is seen in it.
    images = torch.randn(
        options.batch, 3, options.resolution, options.resolution, generator=generator
    )
    target = torch.randint(options.classes, (options.batch,), generator=generator)

    def loss() -> Tensor:
        with torch.autocast('cpu', torch.bfloat16):
            value: Tensor = cross_entropy(model(images), target)
        return value

    return Trainer(model, torch.optim.SGD(model.parameters(), 0.01), loss)


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
        from benchmarks.experiments.classes import Options, make  # has torch.distributed

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
