"""Two equal partitions on cpu:0 and cpu:1: do they run at the same time?"""
import time
from statistics import median
from typing import Callable, List

import click
import torch
from torch import nn

from benchmarks.report import machine, output_folder, table, write_json
from torchgpipe import GPipe

CHUNKS = 8


def measure(milliseconds: float, rounds: int) -> List[float]:
    """Give the serial and the pipelined time of a forward pass, in seconds: medians."""
    width = 64
    x = torch.rand(CHUNKS * 64, width)

    def partition(depth: int) -> nn.Sequential:
        return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh())
                               for _ in range(depth)])

    def seconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    probe = partition(50)
    depth = int(50 * milliseconds / 1e3 / min(seconds(lambda: probe(x[:64])) for _ in range(20)))
    halves = [nn.Sequential(*partition(depth + 1)), nn.Sequential(*partition(depth + 1))]
    model = GPipe(nn.Sequential(*halves), [1, 1], devices=['cpu:0', 'cpu:1'], chunks=CHUNKS)

    def serial() -> None:
        for chunk in x.chunk(CHUNKS):
            halves[1](halves[0](chunk))

    calls = [serial, lambda: model(x)]
    for call in calls:
        call()
    times = [[seconds(call) for call in calls] for _ in range(rounds)]
    return [median(column) for column in zip(*times)]


@click.command()
@click.option('--rounds', type=click.IntRange(1), default=15, show_default=True,
              help='Interleaved rounds, of which the medians count.')
@click.option('--output', default='results', show_default=True, metavar='DIR',
              help='Where the JSON file goes.')
def concurrency(rounds: int, output: str) -> None:
    """Time two equal partitions on cpu:0 and cpu:1 against one after the other.

    Forward only, 8 micro-batches, one intra-op thread each. Two partitions can be at most
    16/9 = 1.78 times as fast: the pipeline fills for one clock and drains for one.
    """
    folder = output_folder(output)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results = []
    with torch.no_grad():
        for milliseconds in (1, 5, 20):
            serial, piped = measure(milliseconds, rounds)
            results.append({'cell_ms': serial / CHUNKS / 2 * 1e3, 'serial_ms': serial * 1e3,
                            'gpipe_ms': piped * 1e3, 'speed_up': serial / piped})
    torch.set_num_threads(threads)
    click.echo(f"{machine()['cores']} cores, torch {machine()['torch']}\n")
    click.echo(table(['ms per cell', 'serial, ms', 'GPipe, ms', 'speed-up'], [
        [f'{value:.2f}' for value in row.values()] for row in results]))
    click.echo(f"\n{write_json(folder, 'concurrency', results)}")
