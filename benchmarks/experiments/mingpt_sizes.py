"""A minGPT of 10 to 808 million parameters: plain, and sharded over processes.

Sizes that the memory of the machine does not have are not trained. Their memory is from a dry run,
as is a column beside the measured ones::

    parameters    trained                dry run
    10 … 201 M    plain, 2, 4 processes  1, 2, 4 ranks
    805 M                                1, 2, 4 ranks
"""

from typing import Any

import click
import torch
from torch import nn

from benchmarks.harness.curves import Panel
from benchmarks.harness.memory import free_memory
from benchmarks.harness.page import Section
from benchmarks.harness.report import Rows
from benchmarks.harness.sharding import (
    PLAIN,
    difference_cell,
    meaning,
    memory_cells,
    peak,
    sharding_options,
    side_by_side,
    training,
)
from torchgpipe.shard.nn.functional import parallel_cross_entropy
from torchgpipe.trainer.gpt import GPT, Sizes, layers, tensor_plan

NAME = 'mingpt-sizes'

#: Depth, width and heads by the name of the size.
SIZES = {'10M': (6, 384, 8), '57M': (8, 768, 12), '201M': (16, 1024, 16), '805M': (16, 2048, 16)}

VOCABULARY, CONTEXT, BATCH = 256, 128, 4

#: Bytes of a parameter in float32, with its gradient and both moments of AdamW.
BYTES = 16

#: Largest relative difference of losses: rounding of float32, which steps make larger.
TOLERANCE = 1e-3


@click.command(NAME)
@sharding_options(3, (2, 4))
@click.option(
    '--size',
    'names',
    type=click.Choice([*SIZES]),
    multiple=True,
    default=[*SIZES],
    show_default=True,
    help='May be given several times.',
)
def mingpt_sizes(
    numbers: tuple[int, ...], steps: int, output: str, names: tuple[str, ...]
) -> None:
    """Train minGPTs of four sizes: in one process, and sharded over several.

    Sizes for which the memory does not suffice are not trained, but run as a dry run.
    """

    def measure() -> dict[str, Any]:
        from benchmarks.experiments.mingpt import TokenOptions, make_of_tokens

        cases = []
        for name in names:
            sizes = sizes_of(name)
            parameters = parameters_of(sizes)
            # The plain model, and the sharded ones, of which each is whole over its processes.
            need = BYTES * parameters * (1 + len(numbers)) * 5 // 4
            rows = []
            if need < free_memory():
                rows = side_by_side(
                    make_of_tokens, TokenOptions(sizes, BATCH), numbers, steps, name, TOLERANCE
                )
            dry = {PLAIN: dry_bytes(sizes, 1)}
            for n in numbers:
                dry[f'sharded over {n}'] = dry_bytes(sizes, n)
            cases.append(
                {
                    'size': name,
                    'parameters': parameters,
                    **sizes._asdict(),
                    'rows': rows,
                    'dry': dry,
                }
            )
        return {'batch': BATCH, 'cases': cases}

    training(NAME, output, measure, _parts, _panels)


def sizes_of(name: str) -> Sizes:
    """Return the sizes of a GPT, by the name of the size."""
    depth, width, heads = SIZES[name]
    return Sizes(VOCABULARY, CONTEXT, width, heads, depth, tied=False)


def parameters_of(sizes: Sizes) -> int:
    """Return the number of parameters."""
    with torch.device('meta'):
        return sum(x.numel() for x in GPT(sizes).parameters())


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
        _loss,
        mesh={'tensor': ranks},
        chunks=1,
        checkpoint='never',
        optimizer=torch.optim.AdamW,
        tensor_plan=tensor_plan() if ranks > 1 else None,
    )
    return max(rank.total for rank in report.ranks)


def _loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return parallel_cross_entropy(scores, target)


def _rows(cases: list[dict[str, Any]]) -> Rows:
    rows = []
    for case in cases:
        parameters = f'{case["parameters"]:,}'
        by_name = {row['name']: row for row in case['rows']}
        for name, dry in case['dry'].items():
            row = by_name.get(name)
            cells = (
                ['—'] * 4
                if row is None
                else [f'{row["seconds"] * 1e3:.0f}', *memory_cells(row), difference_cell(row)]
            )
            rows.append([parameters, name, *cells, f'{dry / 2**20:.2f}'])
    return [
        'parameters',
        '',
        'ms per step',
        'model, MiB',
        'peak, MiB',
        'largest difference',
        'dry run, MiB',
    ], rows


def _panels(results: dict[str, Any]) -> list[Panel]:
    """Return the peak of a process by parameters: measured, and by the dry run."""
    measured: dict[str, tuple[list[float], list[float]]] = {}
    for case in results['cases']:
        for row in case['rows']:
            sizes, peaks = measured.setdefault(row['name'], ([], []))
            sizes.append(case['parameters'])
            peaks.append(peak(row) / 2**20)
        for name, dry in case['dry'].items():
            sizes, peaks = measured.setdefault(f'{name}, dry run', ([], []))
            sizes.append(case['parameters'])
            peaks.append(dry / 2**20)
    return [Panel('parameters', 'peak, MiB per rank', measured, 'xy')]


def _parts(results: dict[str, Any]) -> list[str | Rows]:
    """Describe the training, and return the table."""
    first = results['cases'][0]
    return [
        f'The models are minGPTs with a vocabulary of {first["vocabulary"]} tokens. They '
        f'train on {results["batch"]} random sequences of {first["context"]} tokens in '
        f'float32 by AdamW. {meaning(results)} Rows without a time were not trained, because '
        'the machine does not have the memory. The last column is the memory of a rank by '
        'torchgpipe.distributed.dry_run, for the same split.',
        _rows(results['cases']),
    ]


COMMANDS = [mingpt_sizes]
SECTION = Section('GPTs of four sizes sharded over processes', NAME, _parts)
