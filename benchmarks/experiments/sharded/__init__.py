"""Models that processes share by torchgpipe.shard, beside the same models in one process.

==================  ===============================================  ==========
command             model                                            shared
==================  ===============================================  ==========
classes             a linear layer of up to a million classes        classes
classes-resnet18    the same behind a ResNet-18, with autocast       classes
mingpt              a GPT that learns to write                       all layers
mingpt-sizes        GPTs of 10 to 805 million parameters             all layers
arcface             ArcFace on handwritten digits                    classes
==================  ===============================================  ==========

The commands of GPTs do not train sizes that the memory of the machine does not have. Their memory
is from a dry run, as is a column beside the measured ones.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from benchmarks.experiments.digits import Data, load
from benchmarks.experiments.sharded.comparison import (
    MEMORY,
    PLAIN,
    difference_cell,
    meaning,
    memory_cells,
    peak,
    sharding_options,
    side_by_side,
    training,
    training_panels,
    training_rows,
)
from benchmarks.experiments.sharded.models import FEATURES
from benchmarks.experiments.sharded.workers import (
    Classes,
    Classifier,
    Images,
    Recogniser,
    Text,
    Tokens,
    train_on_text,
    train_on_tokens,
    train_resnet,
)
from benchmarks.harness.charts import Curves
from benchmarks.harness.memory import free_memory, require
from benchmarks.harness.options import choices_option, count_option
from benchmarks.harness.report import Part, Rows, Section
from torchgpipe.shard.nn.functional import parallel_cross_entropy
from torchgpipe.trainer.gpt import GPT, Sizes, layers, tensor_plan

#: Largest relative differences of losses, by rounding, which steps enlarge. In bfloat16, a change
#: of the plain model's weights by 1e-7 changes its third loss by 2e-3. Doubled gradients change it
#: by 1e-1.
FLOAT64, ONE_LAYER, FLOAT32, BFLOAT16 = 1e-9, 1e-5, 1e-3, 1e-2

Results = dict[str, Any]
Parts = list[Part]

classes_option = click.option(
    '--classes',
    'sizes',
    type=click.IntRange(2),
    multiple=True,
    default=(1_000, 10_000, 100_000, 1_000_000),
    help='How many there are; may be given several times.',
)


def measure_sizes(
    sizes: tuple[int, ...], measure: Callable[[int, str], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return a case with the rows of each number of classes."""
    cases = []
    for size in sorted({*sizes}):
        cases.append({'classes': size, 'rows': measure(size, f'{size:,} classes')})
    return cases


# --- a linear layer


@click.command()
@sharding_options(7)
@classes_option
@count_option('--features', 64, 'Of a sample.')
@count_option('--batch', 64, 'Samples of a step.')
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

    def rows(size: int, title: str) -> list[dict[str, Any]]:
        options = Classes(size, features, batch)
        return side_by_side(Classifier, options, numbers, steps, title, ONE_LAYER)

    def measure() -> Results:
        return {'features': features, 'batch': batch, 'cases': measure_sizes(sizes, rows)}

    training(CLASSES, output, measure)


def class_rows(cases: list[dict[str, Any]], with_loss: bool = False) -> Rows:
    """Return a row for each number of classes and each model."""
    loss = ['loss alone'] if with_loss else []
    header = ['classes', '', 'ms per step', 'time / plain', *MEMORY, *loss, 'largest difference']
    rows = []
    for case in cases:
        plain = case['rows'][0]
        for row in case['rows']:
            cells = [
                f'{case["classes"]:,}',
                row['name'],
                f'{row["seconds"] * 1e3:.1f}',
                f'{row["seconds"] / plain["seconds"]:.2f}',
                *memory_cells(row),
            ]
            if with_loss:
                cells.append(f'{_loss_alone(row):.2f}')
            rows.append([*cells, difference_cell(row)])
    return header, rows


def _loss_alone(row: dict[str, Any]) -> float:
    """Return the memory of the loss relative to logits and gradient, in the worst process."""
    return max(rank['loss'] / rank['logits'] / 2 for rank in row['ranks'] if rank['logits'])


def size_panels(results: Results) -> list[Curves]:
    """Return peaks and times by the number of classes."""
    sizes = [case['classes'] for case in results['cases']]
    peaks: dict[str, Any] = {}
    times: dict[str, Any] = {}
    for case in results['cases']:
        for row in case['rows']:
            peaks.setdefault(row['name'], (sizes, []))[1].append(peak(row) / 2**20)
            times.setdefault(row['name'], (sizes, []))[1].append(row['seconds'] * 1e3)
    return [
        Curves('classes', 'peak, MiB per rank', peaks, 'xy'),
        Curves('classes', 'ms per step', times, 'xy'),
    ]


def classes_parts(results: Results) -> Parts:
    """Describe the training, and return the table."""
    return [
        f'The model is a linear layer with {results["features"]} inputs, followed by cross '
        f'entropy. It trains on {results["batch"]} samples in float32 by SGD. The sharded '
        f'layer is split by classes. {meaning(results)} "Loss alone" is the peak memory of '
        'the loss in forward and backward, relative to its logits and their gradient. '
        'These two are the minimum. "Largest difference" compares losses with the losses of '
        'the plain layer.',
        class_rows(results['cases'], with_loss=True),
    ]


# --- a ResNet-18


@click.command('classes-resnet18')
@sharding_options(3, (2, 4))
@classes_option
@count_option('--resolution', 64, 'Height and width of the images.', least=32)
@count_option('--batch', 16, 'Samples of a step.', least=2)
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

    def rows(size: int, title: str) -> list[dict[str, Any]]:
        # Weights and gradients of the plain model and of each split, and a cast of one.
        need = 4 * FEATURES * size * (2 * (1 + len(numbers)) + 1)
        require(need, f'the last layer of {size:,} classes, in {1 + len(numbers)} models,')
        options = Images(size, resolution, batch)
        return side_by_side(train_resnet, options, numbers, steps, title, BFLOAT16)

    def measure() -> Results:
        return {'resolution': resolution, 'batch': batch, 'cases': measure_sizes(sizes, rows)}

    try:
        training(RESNET, output, measure)
    except MemoryError as error:
        raise click.ClickException(f'{error}; use --classes and --processes') from None


def resnet_parts(results: Results) -> Parts:
    """Describe the training, and return the table."""
    return [
        'The model is a ResNet-18 with one linear layer for all classes. It trains by SGD on '
        f'{results["batch"]} images of {results["resolution"]}², the same in each step, with '
        'parameters in float32 and autocast to bfloat16. Each process has all convolutions '
        'and all images. '
        f'The last layer is split by classes. {meaning(results)} "Largest difference" '
        'compares losses with the losses of the plain model.',
        class_rows(results['cases']),
    ]


# --- a GPT

#: English, of 11 thousand characters.
TEXT = Path(__file__).parents[3] / 'LICENSE'


@click.command()
@sharding_options(200)
@count_option('--width', 64, 'Features of a character.')
@count_option('--heads', 4, 'Heads, which share the features, and which processes share.')
@count_option('--depth', 3, 'Blocks.')
@click.option(
    '--context',
    type=click.IntRange(1, 1000),
    default=64,
    help='Characters that are seen at once.',
)
def mingpt(
    numbers: tuple[int, ...],
    steps: int,
    output: str,
    width: int,
    heads: int,
    depth: int,
    context: int,
) -> None:
    """Train a small GPT on characters: in one process, and sharded over several.

    The text is the license of this repository. All is in float64, so that losses can be compared:
    a loss that differs from the plain model's is an error.
    """
    if width % heads:
        raise click.ClickException(f'--heads {heads} cannot share --width {width} equally')
    for n in numbers:
        if heads % n:
            raise click.ClickException(f'--processes {n} cannot share --heads {heads} equally')
    text = TEXT.read_text()
    sizes = Sizes(len({*text}), context, width, heads, depth, tied=False)

    def measure() -> Results:
        options = Text(text, sizes)
        rows = side_by_side(train_on_text, options, numbers, steps, 'mingpt', FLOAT64)
        return {**sizes._asdict(), 'characters': len(text), 'rows': rows}

    training(MINGPT, output, measure)


def mingpt_parts(results: Results) -> Parts:
    """Describe the training, and return the table."""
    return [
        f'The model is a GPT of {results["depth"]} blocks with {results["heads"]} heads, '
        f'{results["width"]} features and a context of {results["context"]} characters. It '
        f'trains on the license of this repository ({results["characters"]:,} characters, '
        f'{results["vocabulary"]} different ones), in float64 by AdamW. Gradients are clipped '
        'to a norm of 1. Embedding and head are split by vocabulary, attention by heads, and '
        'the feed-forward network of each block by its inner '
        f'features. {meaning(results)}',
        training_rows(results['rows']),
    ]


# --- GPTs of four sizes

#: Depth, width and heads by the name of the size.
SIZES = {'10M': (6, 384, 8), '57M': (8, 768, 12), '201M': (16, 1024, 16), '805M': (16, 2048, 16)}

VOCABULARY, CONTEXT, BATCH = 256, 128, 4

#: Bytes of a parameter in float32, with its gradient and both moments of AdamW.
BYTES = 16


@click.command('mingpt-sizes')
@sharding_options(3, (2, 4))
@choices_option('--size', 'names', SIZES)
def mingpt_sizes(
    numbers: tuple[int, ...], steps: int, output: str, names: tuple[str, ...]
) -> None:
    """Train minGPTs of four sizes: in one process, and sharded over several.

    Sizes for which the memory does not suffice are not trained, but run as a dry run.
    """

    def measure() -> Results:
        cases = [measure_size(name, numbers, steps) for name in names]
        return {'batch': BATCH, 'cases': cases}

    training(MINGPT_SIZES, output, measure)


def measure_size(name: str, numbers: tuple[int, ...], steps: int) -> dict[str, Any]:
    """Return the case of a size: measured rows, and the memory of a dry run."""
    sizes = sizes_of(name)
    parameters = parameters_of(sizes)
    # The plain model, and the sharded ones, of which each is whole over its processes.
    need = BYTES * parameters * (1 + len(numbers)) * 5 // 4
    rows = []
    if need < free_memory():
        options = Tokens(sizes, BATCH)
        rows = side_by_side(train_on_tokens, options, numbers, steps, name, FLOAT32)
    dry = {PLAIN: dry_bytes(sizes, 1)}
    for n in numbers:
        dry[f'sharded over {n}'] = dry_bytes(sizes, n)
    return {'size': name, 'parameters': parameters, **sizes._asdict(), 'rows': rows, 'dry': dry}


def sizes_of(name: str) -> Sizes:
    """Return the sizes of a GPT, by the name of the size."""
    depth, width, heads = SIZES[name]
    return Sizes(VOCABULARY, CONTEXT, width, heads, depth, tied=False)


def parameters_of(sizes: Sizes) -> int:
    """Return the number of parameters."""
    with torch.device('meta'):
        return sum(parameter.numel() for parameter in GPT(sizes).parameters())


def dry_bytes(sizes: Sizes, ranks: int) -> int:
    """Return the memory of the rank with the most of it, by a dry run."""
    from torchgpipe.distributed import dry_run  # has torch.distributed

    with torch.device('meta'):
        model: nn.Sequential = layers(GPT(sizes))
        tokens = torch.zeros(BATCH, sizes.context, dtype=torch.long)
    report = dry_run(
        model,
        [len(model)],
        tokens,
        tokens,
        parallel_cross_entropy,
        mesh={'tensor': ranks},
        chunks=1,
        checkpoint='never',
        optimizer=torch.optim.AdamW,
        tensor_plan=tensor_plan() if ranks > 1 else None,
    )
    return max(rank.total for rank in report.ranks)


def dry_run_rows(cases: list[dict[str, Any]]) -> Rows:
    """Return a row for each size and each model, with the memory of a dry run."""
    rows = []
    for case in cases:
        measured = {row['name']: row for row in case['rows']}
        for name, dry in case['dry'].items():
            cells = ['—'] * 4
            if name in measured:
                row = measured[name]
                cells = [f'{row["seconds"] * 1e3:.0f}', *memory_cells(row), difference_cell(row)]
            rows.append([f'{case["parameters"]:,}', name, *cells, f'{dry / 2**20:.2f}'])
    return ['parameters', '', 'ms per step', *MEMORY, 'largest difference', 'dry run, MiB'], rows


def parameter_panels(results: Results) -> list[Curves]:
    """Return the peak of a process by parameters: measured, and by the dry run."""
    curves: dict[str, tuple[list[float], list[float]]] = {}

    def add(name: str, parameters: int, bytes: int) -> None:
        sizes, peaks = curves.setdefault(name, ([], []))
        sizes.append(parameters)
        peaks.append(bytes / 2**20)

    for case in results['cases']:
        for row in case['rows']:
            add(row['name'], case['parameters'], peak(row))
        for name, dry in case['dry'].items():
            add(f'{name}, dry run', case['parameters'], dry)
    return [Curves('parameters', 'peak, MiB per rank', curves, 'xy')]


def mingpt_sizes_parts(results: Results) -> Parts:
    """Describe the training, and return the table."""
    first = results['cases'][0]
    return [
        f'The models are minGPTs with a vocabulary of {first["vocabulary"]} tokens. They '
        f'train on {results["batch"]} random sequences of {first["context"]} tokens in '
        f'float32 by AdamW. {meaning(results)} Rows without a time were not trained, because '
        'the machine does not have the memory. The last column is the memory of a rank by '
        'torchgpipe.distributed.dry_run, for the same split.',
        dry_run_rows(results['cases']),
    ]


# --- ArcFace


@click.command()
@sharding_options(300)
def arcface(numbers: tuple[int, ...], steps: int, output: str) -> None:
    """Train ArcFace on scikit-learn's handwritten digits: in one process, and sharded.

    The last layer has a direction for each digit, of which each process has some. All is in
    float64, so that losses can be compared: a loss that differs from the plain model's is an
    error.
    """

    def measure() -> Results:
        data = Data(*[(images.double(), labels) for images, labels in load()])
        return {'rows': side_by_side(Recogniser, data, numbers, steps, 'arcface', FLOAT64)}

    training(ARCFACE, output, measure)


def arcface_parts(results: Results) -> Parts:
    """Describe the training, and return the table."""
    header, rows = training_rows(results['rows'])
    for cells, row in zip(rows, results['rows']):
        cells.append(f'{row["ranks"][0]["accuracy"]:.2%}')
    return [
        'The model is two linear layers followed by ArcFace, trained on the digits of '
        'scikit-learn. ArcFace multiplies normalised features by normalised directions of 10 '
        'classes, with scale 64 and margin 0.5. Training uses float64 and AdamW. The '
        f'directions are split. The other layers are replicated. {meaning(results)}',
        ([*header, 'accuracy on the test set'], rows),
    ]


CLASSES = Section('Classifiers sharded over processes', 'classes', classes_parts, size_panels)
RESNET = Section(
    'A ResNet-18 with its classes sharded over processes',
    'classes-resnet18',
    resnet_parts,
    size_panels,
)
MINGPT = Section('A GPT sharded over processes', 'mingpt', mingpt_parts, training_panels)
MINGPT_SIZES = Section(
    'GPTs of four sizes sharded over processes',
    'mingpt-sizes',
    mingpt_sizes_parts,
    parameter_panels,
)
ARCFACE = Section(
    'ArcFace with its classes sharded over processes', 'arcface', arcface_parts, training_panels
)

COMMANDS = [classes, classes_resnet18, mingpt, mingpt_sizes, arcface]
SECTIONS = [CLASSES, RESNET, MINGPT, MINGPT_SIZES, ARCFACE]
