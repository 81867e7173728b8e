"""Time and memory of transformer blocks by the results that checkpointing keeps."""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks.harness.curves import NEUTRAL, save
from benchmarks.harness.memory import LiveTensors
from benchmarks.harness.page import Section
from benchmarks.harness.report import Rows, machine, output_option, write_json
from torchgpipe import GPipe
from torchgpipe.balance import Profile, profile
from torchgpipe.base.errors import table
from torchgpipe.engine.policy import PRODUCTS
from torchgpipe.trainer.files import output_folder

WIDTH, HEADS, TOKENS = 512, 8, 256

MEANING = """Each step trains the blocks on one core, in one partition, with a micro-batch of one
sample after the other. Times are medians of interleaved rounds. Memory is for one block and one
micro-batch: the bytes that are alive between forward and backward, beside parameters. The last
column is the prediction by a profile of the block."""


class Kept(NamedTuple):
    """A mode of checkpointing, and the results that it keeps."""

    name: str
    checkpoint: str
    keep: Any = None


ATTENTION = tuple(sorted(name for name in PRODUCTS if 'dot_product' in name))

SETTINGS = (
    Kept("'always'", 'always'),
    Kept("'always', keep=[attention]", 'always', ATTENTION),
    Kept("'always', keep='every second product'", 'always', 'every second product'),
    Kept("'always', keep='products'", 'always', 'products'),
    Kept("'never'", 'never'),
)


class Block(nn.Module):
    """A block of a transformer with fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of tokens."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def pipeline(blocks: nn.Sequential, kept: Kept, samples: int) -> GPipe:
    """Return a pipeline of one partition."""
    return GPipe(
        blocks,
        [len(blocks)],
        devices=['cpu'],
        chunks=samples,
        checkpoint=kept.checkpoint,
        keep=kept.keep,
    )


def measure(depth: int, samples: int, rounds: int) -> list[dict[str, Any]]:
    """Return time and memory of each setting."""
    blocks = nn.Sequential(*[Block() for _ in range(depth)])
    x = torch.randn(samples, TOKENS, WIDTH)
    models = {kept: pipeline(blocks, kept, samples) for kept in SETTINGS}

    def step(model: GPipe) -> float:
        blocks.zero_grad()
        start = time.perf_counter()
        model(x).square().mean().backward()
        return time.perf_counter() - start

    for model in models.values():
        step(model)
    seconds: dict[Kept, list[float]] = {kept: [] for kept in SETTINGS}
    for _ in tqdm(range(rounds), desc='rounds', leave=False):
        for kept, model in models.items():
            seconds[kept].append(step(model))

    blocks.zero_grad()
    costs = profile(blocks[:1], x[:1], device='cpu', timeout=0)
    results = []
    for kept in SETTINGS:
        results.append(
            {
                'name': kept.name,
                'seconds': median(seconds[kept]),
                'bytes': live_bytes(blocks[:1], x[:1], kept),
                'predicted': predicted_bytes(costs, kept),
            }
        )
    return results


def live_bytes(blocks: nn.Sequential, x: Tensor, kept: Kept) -> int:
    """Return the bytes that a micro-batch holds between forward and backward.

    A layer behind the block frees the block's output.
    """
    layers = nn.Sequential(*blocks, nn.Flatten(0), First())
    model = pipeline(layers, kept, 1)
    for _ in range(2):
        with LiveTensors().watched() as live:
            # The input of the block counts, as in a partition behind another one.
            output = model(x.clone().requires_grad_())
        size = live.now
        output.sum().backward()
        del output
    return size


class First(nn.Module):
    """Return the first element."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a new tensor of one element."""
        return x[:1].clone()


def predicted_bytes(costs: Profile, kept: Kept) -> int | None:
    """Return the prediction of :func:`live_bytes` by a profile of a block.

    A profile does not tell the products of a block apart.
    """
    (layer,) = costs.layers
    if kept.checkpoint == 'never':
        return layer.activation_bytes + costs.input_bytes
    if kept.keep == 'every second product':
        return None
    names = PRODUCTS if kept.keep == 'products' else kept.keep or ()
    size = costs.input_bytes
    for operation in layer.operations:
        if operation.name in names:
            size += operation.bytes
    return size


@click.command()
@click.option('--depth', type=click.IntRange(1), default=12, help='Blocks.')
@click.option('--samples', type=click.IntRange(1), default=4, help='Micro-batches.')
@click.option(
    '--rounds',
    type=click.IntRange(1),
    default=9,
    help='Interleaved rounds, of which the medians count.',
)
@output_option
def keep(depth: int, samples: int, rounds: int, output: str) -> None:
    """Time transformer blocks by the results that checkpointing keeps.

    The time of a step over the memory of a micro-batch in a block, for modes of checkpointing and
    policies, on one core.
    """
    folder = output_folder(output)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = measure(depth, samples, rounds)
    finally:
        torch.set_num_threads(threads)
    click.echo(f'{depth} blocks of width {WIDTH}, {samples} × {TOKENS} tokens, 1 core, torch '
               f'{machine()["torch"]}\n')  # fmt: skip
    click.echo(table(*rows(results)) + '\n')
    files = [write_json(folder, 'keep', results), *draw(results, folder / 'keep')]
    click.echo('\n'.join([MEANING, '', *map(str, files)]))


def rows(results: Sequence[dict[str, Any]]) -> Rows:
    """Return the header and a row for each setting."""
    times = {result['name']: result['seconds'] for result in results}
    header = ['checkpoint', 'step, s', "of 'always'", 'MiB', 'predicted, MiB']
    lines = []
    for result in results:
        lines.append(
            [
                result['name'],
                f'{result["seconds"]:.3f}',
                f'{result["seconds"] / times[SETTINGS[0].name]:.2f}',
                f'{result["bytes"] / 2**20:.2f}',
                '' if result['predicted'] is None else f'{result["predicted"] / 2**20:.2f}',
            ]
        )
    return header, lines


def draw(results: Sequence[dict[str, Any]], stem: Path) -> list[Path]:
    """Draw the time of a step over the memory of a block."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout='constrained')
    axes = figure.subplots()
    sizes = [result['bytes'] / 2**20 for result in results]
    times = [result['seconds'] for result in results]
    axes.plot(sizes, times, 'o-')
    # Labels are above and below the line in turn, so that they do not overlap.
    for k, (size, seconds, result) in enumerate(zip(sizes, times, results)):
        offset = (6, -30 if k % 2 else 8)
        axes.annotate(
            result['name'], (size, seconds), offset, textcoords='offset points', color=NEUTRAL
        )
    axes.set_xlabel('MiB of a micro-batch in a block', color=NEUTRAL)
    axes.set_ylabel('seconds of a step', color=NEUTRAL)
    axes.set_xlim(0, 1.15 * max(sizes))
    axes.set_ylim(0, 1.15 * max(times))
    return save(figure, axes, stem)


COMMANDS = [keep]
SECTIONS = [
    Section('Results that checkpointing keeps', 'keep', lambda results: [rows(results), MEANING])
]
