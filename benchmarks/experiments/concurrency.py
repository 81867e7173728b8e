"""Two equal partitions on cpu:0 and cpu:1: which share of the ideal speed-up do they reach?"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks.harness.curves import NEUTRAL, neutral, save
from benchmarks.harness.page import Section
from benchmarks.harness.report import Rows, machine, output_option, write_json
from benchmarks.models.stacks import Stack, perceptron
from torchgpipe import GPipe
from torchgpipe.base.errors import table
from torchgpipe.trainer.files import output_folder

ROWS = 256

#: How long forward of a cell takes in milliseconds, and how wide its layers are.
CELLS = {0.3: 128, 1.0: 256, 5.0: 256, 20.0: 512}
CHUNKS = (2, 4, 8, 16)

FORWARD, STEP = 'forward, plain call', "training, step by '1f1b'"
THREADS = 'training, two threads that share nothing'

MEANING = """Each entry is the share of the ideal speed-up, with the speed-up in brackets. The
baseline runs the same cells one after the other in one thread. The ideal is 2 · m / (m + 1), the
maximum for m micro-batches in two partitions. Cells are stacks of linear layers, named by the
forward time of one cell. The last table shows the limit of the machine and the interpreter. There,
two threads each train one of the cells by itself, and neither waits for the other. The baseline is
the same work in one thread, and the ideal is 2."""


def measure(stack: Stack, milliseconds: float, m: int, rounds: int) -> list[dict[str, Any]]:
    """Time a forward pass and a training step, serial and pipelined: medians over rounds."""
    layer, (x, _) = stack.build(1, 10), stack.data(1)
    with torch.no_grad():
        seconds = median(_seconds(lambda: layer(x)) for _ in range(20)) / 10
    depth = max(1, round(milliseconds / 1e3 / seconds))
    cells, (x, y) = stack.build(2, depth), stack.data(m)
    model = GPipe(cells, [1, 1], devices=['cpu:0', 'cpu:1'], chunks=m, checkpoint='never')

    def forward(module: Callable[[Tensor], Tensor], parts: int) -> None:
        with torch.no_grad():
            for part in x.chunk(parts):
                module(part)

    def train() -> None:
        for part, target in zip(x.chunk(m), y.chunk(m)):
            (F.mse_loss(cells(part), target) / m).backward()

    def half(j: int) -> None:
        torch.set_num_threads(1)  # It holds for a thread
        for part, target in zip(x.chunk(m), y.chunk(m)):
            (F.mse_loss(cells[j](part.clone().requires_grad_(j > 0)), target) / m).backward()

    def in_turn() -> None:
        half(0)
        half(1)

    def apart() -> None:
        threads = [threading.Thread(target=half, args=[j]) for j in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    pairs = {
        FORWARD: (lambda: forward(cells, m), lambda: forward(model, 1)),
        STEP: (train, lambda: model.step(x, y, F.mse_loss, schedule='1f1b')),
        THREADS: (in_turn, apart),
    }
    for _ in range(2):
        for serial, pipelined in pairs.values():
            serial()
            pipelined()
    times: dict[str, list[tuple[float, float]]] = {what: [] for what in pairs}
    for _ in range(rounds):
        for what, (serial, pipelined) in pairs.items():
            times[what].append((_seconds(serial), _seconds(pipelined)))

    cases = []
    for what, pairs_of_times in times.items():
        speed_up = median(one / two for one, two in pairs_of_times)
        ideal = 2.0
        if what != THREADS:
            ideal = 2 * m / (m + 1)
        cases.append(
            {
                'what': what,
                'milliseconds': milliseconds,
                'chunks': m,
                'layers': depth,
                'serial_ms': median(one for one, _ in pairs_of_times) * 1e3,
                'pipeline_ms': median(two for _, two in pairs_of_times) * 1e3,
                'speed_up': speed_up,
                'share': speed_up / ideal,
            }
        )
    return cases


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@click.command()
@click.option(
    '--rounds',
    type=click.IntRange(1),
    default=9,
    help='Interleaved rounds, of which the medians count.',
)
@output_option
def concurrency(rounds: int, output: str) -> None:
    """Time two equal partitions on cpu:0 and cpu:1 against one after the other.

    A forward pass by the plain call and a training step by 1F1B, without checkpoints, for several
    sizes of cells and numbers of micro-batches, one intra-op thread each.
    """
    folder = output_folder(output)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sizes = [(milliseconds, m) for milliseconds in CELLS for m in CHUNKS]
    results: list[dict[str, Any]] = []
    try:
        for milliseconds, m in tqdm(sizes, desc='concurrency', leave=False):
            results += measure(perceptron(CELLS[milliseconds], ROWS), milliseconds, m, rounds)
    finally:
        torch.set_num_threads(threads)
    click.echo(f'{machine()["cores"]} cores, torch {machine()["torch"]}\n')
    for what in (FORWARD, STEP, THREADS):
        click.echo(table(*share_rows(results, what)) + '\n')
    files = [write_json(folder, 'concurrency', results), *draw(results, folder / 'concurrency')]
    click.echo('\n'.join([MEANING, '', *map(str, files)]))


def share_rows(results: Sequence[dict[str, Any]], what: str) -> Rows:
    """Return the header and the rows of the measurements of a forward pass or a step."""
    header = [what]
    rows: dict[float, list[str]] = {}
    for case in results:
        if case['what'] != what:
            continue
        size = case['milliseconds']
        cells = rows.setdefault(size, [f'cells of {size:g} ms'])
        cells.append(f'{case["share"]:.2f} ({case["speed_up"]:.2f} ×)')
        column = f'm = {case["chunks"]}'
        if column not in header:
            header.append(column)
    return header, [*rows.values()]


def draw(results: Sequence[dict[str, Any]], stem: Path) -> list[Path]:
    """Draw the shares as a map: a row per size of cells, a column per number of chunks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.2), layout='constrained')
    panels = figure.subplots(1, 3)
    figure.suptitle('two partitions on two cores: share of the ideal speed-up', color=NEUTRAL)
    for axes, what in zip(panels, (FORWARD, STEP, THREADS)):
        (_, *chunks), rows = share_rows(results, what)
        shares = [[float(cell.split()[0]) for cell in cells] for _, *cells in rows]
        axes.imshow(shares, vmin=0.3, vmax=1, cmap='Blues', aspect='auto')
        for j, row in enumerate(shares):
            for k, share in enumerate(row):
                axes.text(
                    k,
                    j,
                    f'{share:.2f}',
                    ha='center',
                    va='center',
                    fontsize=11,
                    color='white' if share > 0.7 else 'black',
                )
        axes.set_xticks(range(len(chunks)), chunks, fontsize=11)
        axes.set_yticks(range(len(rows)), [name for name, *_ in rows], fontsize=11)
        axes.set_title(what, color=NEUTRAL, fontsize=12)
        neutral(axes)
    return save(figure, panels[0], stem)


COMMANDS = [concurrency]
SECTIONS = [
    Section(
        'Two partitions at the same time',
        'concurrency',
        lambda results: [
            *(share_rows(results, what) for what in (FORWARD, STEP, THREADS)),
            MEANING,
        ],
    )
]
