"""A GPT that learns to write, character by character: in one process, and shared by several."""

from pathlib import Path
from typing import Any

import click

from benchmarks.harness.page import Section
from benchmarks.harness.report import Rows
from benchmarks.harness.sharding import meaning, sharding_options, training, training_rows
from benchmarks.harness.side_by_side import side_by_side
from torchgpipe.trainer.gpt import Sizes

#: English, of 11 thousand characters.
TEXT = Path(__file__).parents[3] / 'LICENSE'

#: Largest relative difference of losses: rounding of float64, which steps make larger.
TOLERANCE = 1e-9


@click.command()
@sharding_options(200)
@click.option(
    '--width',
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help='Features of a character.',
)
@click.option(
    '--heads',
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help='Heads, which share the features, and which processes share.',
)
@click.option('--depth', type=click.IntRange(1), default=3, show_default=True, help='Blocks.')
@click.option(
    '--context',
    type=click.IntRange(1, 1000),
    default=64,
    show_default=True,
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

    def measure() -> dict[str, Any]:
        from benchmarks.experiments.mingpt.train import Options, make  # has torch.distributed

        rows = side_by_side(make, Options(text, sizes), numbers, steps, 'mingpt', TOLERANCE)
        return {**sizes._asdict(), 'characters': len(text), 'rows': rows}

    training('mingpt', output, measure, _parts)


def _parts(results: dict[str, Any]) -> list[str | Rows]:
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


COMMANDS = [mingpt]
SECTION = Section('A GPT sharded over processes', 'mingpt', _parts)
