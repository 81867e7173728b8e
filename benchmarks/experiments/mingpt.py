"""A GPT that learns to write, character by character: in one process, and shared by several."""

from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgpipe.shard as ts
from benchmarks.harness.page import Section
from benchmarks.harness.report import Rows
from benchmarks.harness.sharding import (
    Trainer,
    meaning,
    sharding_options,
    side_by_side,
    training,
    training_rows,
)
from benchmarks.models.sharded import sharded_gpt
from torchgpipe.shard.nn.functional import parallel_cross_entropy
from torchgpipe.trainer.gpt import GPT, Sizes

BATCH, MAX_NORM = 16, 1.0


class Options(NamedTuple):
    """The options of each process."""

    text: str
    sizes: Sizes


class TokenOptions(NamedTuple):
    """The options of each process, for random tokens."""

    sizes: Sizes
    batch: int


class Batches:
    """Pieces of a text, as numbers of its characters.

    Args:
        text: The text.
        length: The characters of a piece.
    """

    def __init__(self, text: str, length: int) -> None:
        numbers = {character: number for number, character in enumerate(sorted({*text}))}
        self._pieces = torch.tensor([numbers[each] for each in text]).unfold(0, length, 1)
        self._generator = torch.Generator().manual_seed(0)

    def draw(self) -> Tensor:
        """Draw some pieces, (BATCH, length): the same ones in each process."""
        return self._pieces[torch.randint(len(self._pieces), (BATCH,), generator=self._generator)]


def make(options: Options, sharded: bool) -> Trainer:
    """Make a trainer of the GPT; after the same seed, so that all have the same values."""
    batches = Batches(options.text, options.sizes.context + 1)
    if sharded:
        ts.distributed.init_process_group()
    torch.manual_seed(0)
    model = (sharded_gpt if sharded else GPT)(options.sizes).double()

    def loss() -> Tensor:
        characters = batches.draw()
        scores, targets = model(characters[:, :-1]), characters[:, 1:]
        if sharded:
            return parallel_cross_entropy(scores, targets)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    clip = ts.clip_grad_norm_ if sharded else nn.utils.clip_grad_norm_
    return Trainer(
        model,
        torch.optim.AdamW(model.parameters(), 1e-3),
        loss,
        lambda parameters: clip(parameters, MAX_NORM),
    )


def make_of_tokens(options: TokenOptions, sharded: bool) -> Trainer:
    """Make a trainer of a GPT on random tokens; after the same seed, as above."""
    if sharded:
        ts.distributed.init_process_group()
    torch.manual_seed(0)
    sizes = options.sizes
    model = sharded_gpt(sizes) if sharded else GPT(sizes)
    generator = torch.Generator().manual_seed(0)

    def loss() -> Tensor:
        tokens = torch.randint(
            sizes.vocabulary, (options.batch, sizes.context + 1), generator=generator
        )
        scores, targets = model(tokens[:, :-1]), tokens[:, 1:]
        if sharded:
            return parallel_cross_entropy(scores, targets)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    return Trainer(model, torch.optim.AdamW(model.parameters(), 1e-4), loss)


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
        from benchmarks.experiments.mingpt import Options, make  # has torch.distributed

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
