"""Time and memory of transformer blocks by the results that checkpointing keeps."""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness.charts import Curves
from benchmarks.harness.memory import LiveTensors
from benchmarks.harness.options import count_option, output_option
from benchmarks.harness.report import Part, Rows, Section
from benchmarks.harness.timing import one_thread, rounds_option, time_in_turn
from torchgpipe import GPipe
from torchgpipe.balance import Profile, profile
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

    def step(model: GPipe) -> None:
        model(x).square().mean().backward()

    steps = {kept: partial(step, pipeline(blocks, kept, samples)) for kept in SETTINGS}
    time_in_turn(steps, 1)
    times = time_in_turn(steps, rounds, prepare=blocks.zero_grad)

    blocks.zero_grad()
    costs = profile(blocks[:1], x[:1], device='cpu', timeout=0)
    results = []
    for kept in SETTINGS:
        results.append(
            {
                'name': kept.name,
                'seconds': median(times[kept]),
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
@count_option('--depth', 12, 'Blocks.')
@count_option('--samples', 4, 'Micro-batches.')
@rounds_option(9)
@output_option
def keep(depth: int, samples: int, rounds: int, output: str) -> None:
    """Time transformer blocks by the results that checkpointing keeps.

    The time of a step over the memory of a micro-batch in a block, for modes of checkpointing and
    policies, on one core.
    """
    folder = output_folder(output)
    with one_thread():
        results = measure(depth, samples, rounds)
    SECTION.publish(results, folder)


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


def panels(results: Sequence[dict[str, Any]]) -> list[Curves]:
    """Return a panel with the time of a step and the memory of a block: a point per setting."""
    points = {}
    for result in results:
        points[result['name']] = [result['bytes'] / 2**20], [result['seconds']]
    return [Curves('MiB of a micro-batch in a block', 'seconds of a step', points)]


def _parts(results: Sequence[dict[str, Any]]) -> list[Part]:
    return [rows(results), MEANING]


SECTION = Section('Results that checkpointing keeps', 'keep', _parts, panels)
COMMANDS = [keep]
SECTIONS = [SECTION]
