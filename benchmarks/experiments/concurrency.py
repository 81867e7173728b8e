"""Two equal partitions on cpu:0 and cpu:1: do they run at the same time?"""
import time
from collections.abc import Callable
from statistics import median

import click
import torch
from torch import nn

from benchmarks.harness.page import Section
from benchmarks.harness.report import Rows, machine, output_folder, table, write_json
from torchgpipe import GPipe

CHUNKS = 8
ROWS = 256


def measure(width: int, milliseconds: float, rounds: int) -> dict[str, float]:
    """Time a forward pass, serial and pipelined: medians over interleaved rounds."""
    x = torch.rand(CHUNKS * ROWS, width)

    def partition(depth: int) -> nn.Sequential:
        return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

    def seconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    probe = partition(10)
    layer = median(seconds(lambda: probe(x[:ROWS])) for _ in range(20)) / 10
    depth = max(1, round(milliseconds / 1e3 / layer))
    halves = [partition(depth), partition(depth)]
    model = GPipe(nn.Sequential(*halves), [1, 1], devices=['cpu:0', 'cpu:1'], chunks=CHUNKS)

    def serial() -> None:
        for chunk in x.chunk(CHUNKS):
            halves[1](halves[0](chunk))

    calls = [serial, lambda: model(x)]
    for call in calls:
        call()
    one, two = zip(*([seconds(call) for call in calls] for _ in range(rounds)))
    return {'layer_ms': layer * 1e3, 'cell_ms': median(one) / CHUNKS / 2 * 1e3,
            'serial_ms': median(one) * 1e3, 'gpipe_ms': median(two) * 1e3,
            'speed_up': median(one) / median(two)}


@click.command()
@click.option('--rounds', type=click.IntRange(1), default=15, show_default=True,
              help='Interleaved rounds, of which the medians count.')
@click.option('--output', default='results', show_default=True, metavar='DIR',
              help='Where the JSON file goes.')
def concurrency(rounds: int, output: str) -> None:
    """Time two equal partitions on cpu:0 and cpu:1 against one after the other.

    Forward only, 8 micro-batches, one intra-op thread each. Two partitions can be at most
    16/9 = 1.78 times as fast: the pipeline fills for one clock and drains for one. The last row
    has layers that take no longer than the Python code around them, of which one thread at a time
    can run.
    """
    folder = output_folder(output)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        results = [measure(width, milliseconds, rounds)
                   for width, milliseconds in ((256, 5), (256, 20), (512, 20), (32, 5))]
    torch.set_num_threads(threads)
    click.echo(f"{machine()['cores']} cores, torch {machine()['torch']}\n")
    click.echo(table(*concurrency_rows(results)))
    click.echo(f"\n{write_json(folder, 'concurrency', results)}")


def concurrency_rows(results: list[dict[str, float]]) -> Rows:
    """Return the header and the rows."""
    return ['ms per layer', 'ms per cell', 'serial, ms', 'GPipe, ms', 'speed-up'], [
        [f'{value:.3f}' if name == 'layer_ms' else f'{value:.2f}' for name, value in row.items()]
        for row in results]


COMMANDS = [concurrency]
SECTION = Section('Two partitions at the same time', 'concurrency',
                  lambda results: [concurrency_rows(results)])
