"""Overhead of the engine: cells so small that nothing else takes time."""

from collections.abc import Callable, Sequence
from itertools import product
from statistics import median
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from benchmarks.harness.options import output_option
from benchmarks.harness.report import Part, Rows, Section
from benchmarks.harness.timing import rounds_option, time_in_turn
from torchgpipe import GPipe
from torchgpipe.base.devices import Device, memory_of, parse_device
from torchgpipe.trainer.files import output_folder

WIDTH, ROWS = 8, 4
SIZES = [*product((2, 4, 8), (4, 8, 32))]
WORKERS: dict[str, Callable[[int], list[str]]] = {
    'one device': lambda n: ['cpu'] * n,
    'n devices': lambda n: [f'cpu:{j}' for j in range(n)],
}

MEANING = (
    'Each entry has the µs per cell of plain loop → GPipe, and the ratio of the '
    "difference\nto the loop. For 'always', the loop uses torch.utils.checkpoint. There "
    'the ratio is the\ntime that GPipe adds to the plain loop, divided by the time that\n'
    'torch.utils.checkpoint adds to it.'
)

Step = Callable[[], object]


def steps(
    n: int, m: int, devices: Sequence[torch.device], width: int, rows: int
) -> dict[str, tuple[Step, Step]]:
    """Give, for each kind of step, the plain loop's and the pipeline's."""
    memory = memory_of(devices[0])
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(n)]).to(memory)
    layers = list(model)
    never, always = (
        GPipe(model, [1] * n, devices=devices, chunks=m, checkpoint=mode)
        for mode in ('never', 'always')
    )
    x = torch.rand(rows * m, width, device=memory)

    def loop() -> Tensor:
        outputs = []
        for value in x.split(rows):
            for layer in layers:
                value = layer(value)
            outputs.append(value)
        return torch.cat(outputs)

    def checkpointed_loop() -> Tensor:
        outputs = []
        for value in x.split(rows):
            for layer in layers:
                value = checkpoint(layer, value, use_reentrant=False)
            outputs.append(value)
        return torch.cat(outputs)

    def no_grad(step: Callable[[], Tensor]) -> Step:
        def run() -> None:
            with torch.no_grad():
                step()

        return run

    def train(step: Callable[[], Tensor]) -> Step:
        return lambda: step().sum().backward()

    return {
        'forward without grad': (no_grad(loop), no_grad(lambda: never(x))),
        'forward': (loop, lambda: never(x)),
        "forward + backward, 'never'": (train(loop), train(lambda: never(x))),
        "step by 'gpipe', 'never'": (
            train(loop),
            lambda: never.step(
                x, None, lambda output, target: output.sum(), schedule='gpipe', normalizer=1
            ),
        ),
        "forward + backward, 'always'": (train(checkpointed_loop), train(lambda: always(x))),
    }


def measure(
    n: int, m: int, devices: Sequence[Device], rounds: int, width: int = WIDTH, rows: int = ROWS
) -> dict[str, tuple[float, float]]:
    """Return microseconds per cell of each step, (loop, pipeline): medians over rounds.

    Args:
        n: The number of partitions.
        m: The number of micro-batches.
        devices: The devices of the partitions.
        rounds: The number of rounds.
        width: The features of each linear layer.
        rows: The rows of a micro-batch.
    """
    places = [parse_device(device) for device in devices]
    repeat = max(2, 256 // (n * m))

    def repeated(step: Step) -> Step:
        def run() -> None:
            for _ in range(repeat):
                step()

        return run

    pairs = steps(n, m, places, width, rows)
    calls = {}
    for kind, (loop, pipeline) in pairs.items():
        calls[kind, 'loop'] = repeated(loop)
        calls[kind, 'pipeline'] = repeated(pipeline)
        loop()
        pipeline()

    times = {}
    for call, seconds in time_in_turn(calls, rounds, places).items():
        times[call] = median(seconds) / repeat / (n * m) * 1e6
    return {kind: (times[kind, 'loop'], times[kind, 'pipeline']) for kind in pairs}


def ratios(times: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Relate the engine's own time to the plain loop's.

    With checkpoints, relate the time that the engine adds to the plain loop to the time that
    ``torch.utils.checkpoint`` adds.
    """
    plain = times["forward + backward, 'never'"][0]
    ratios = {}
    for kind, (loop, ours) in times.items():
        if 'always' in kind:
            ratios[kind] = (ours - plain) / (loop - plain)
        else:
            ratios[kind] = (ours - loop) / loop
    return ratios


@click.command()
@rounds_option(11)
@output_option
def overhead(rounds: int, output: str) -> None:
    """Time the engine on trivial cells: Linear(8, 8) on 4 rows.

    It prints microseconds per cell, and of a plain Python loop over the same cells, for n
    partitions and m micro-batches. On one device cells run in the calling thread. On n devices,
    each clock passes every cell to another thread. In a step by a schedule, workers notify each
    other of finished actions.
    """
    folder = output_folder(output)
    results = []
    for where, (n, m) in tqdm([*product(WORKERS, SIZES)], desc='overhead', leave=False):
        times = measure(n, m, WORKERS[where](n), rounds)
        results.append(
            {'where': where, 'n': n, 'm': m, 'us_per_cell': times, 'ratio': ratios(times)}
        )
    SECTION.publish(results, folder)


def overhead_rows(results: list[Any]) -> Rows:
    """Return the header and the rows."""
    kinds = list(results[0]['ratio'])
    rows = []
    for result in results:
        row = [f'n={result["n"]} m={result["m"]}']
        for kind, (loop, ours) in result['us_per_cell'].items():
            row.append(f'{loop:.1f} → {ours:.1f}  {result["ratio"][kind]:.2f}')
        rows.append(row)
    medians = ['median']
    for kind in kinds:
        ratio = median(result['ratio'][kind] for result in results)
        medians.append(f'{ratio:.2f}')
    return ['', *kinds], [*rows, medians]


def _parts(results: list[Any]) -> list[Part]:
    """Return a table for each kind of devices."""
    parts: list[Part] = [MEANING]
    for where in WORKERS:
        on_devices = [result for result in results if result['where'] == where]
        parts += [f'On {where}:', overhead_rows(on_devices)]
    return parts


SECTION = Section('Overhead of the engine', 'overhead', _parts)
COMMANDS = [overhead]
SECTIONS = [SECTION]
