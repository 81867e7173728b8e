"""Two equal partitions on cpu:0 and cpu:1: which share of the ideal speed-up do they reach?"""

import threading
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median
from typing import Any

import click
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks.harness.charts import Curves
from benchmarks.harness.options import output_option
from benchmarks.harness.report import Part, Rows, Section
from benchmarks.harness.timing import one_thread, rounds_option, time_in_turn
from benchmarks.models.stacks import Stack, perceptron
from torchgpipe import GPipe
from torchgpipe.trainer.files import output_folder

ROWS = 256

#: How long forward of a cell takes in milliseconds, and how wide its layers are.
CELLS = {0.3: 128, 1.0: 256, 5.0: 256, 20.0: 512}
CHUNKS = (2, 4, 8, 16)

FORWARD, STEP = 'forward, plain call', "training, step by '1f1b'"
THREADS = 'training, two threads that share nothing'
KINDS = (FORWARD, STEP, THREADS)

MEANING = """Each entry is the share of the ideal speed-up, with the speed-up in brackets. The
baseline runs the same cells one after the other in one thread. The ideal is 2 · m / (m + 1), the
maximum for m micro-batches in two partitions. Cells are stacks of linear layers, named by the
forward time of one cell. The last table shows the limit of the machine and the interpreter. There,
two threads each train one of the cells by itself, and neither waits for the other. The baseline is
the same work in one thread, and the ideal is 2."""

Call = Callable[[], object]


def contenders(cells: nn.Sequential, stack: Stack, m: int) -> dict[str, tuple[Call, Call]]:
    """Return by kind a call that works in one thread, and one that works in two."""
    x, y = stack.data(m)
    samples = [*zip(x.chunk(m), y.chunk(m))]
    model = GPipe(cells, [1, 1], devices=['cpu:0', 'cpu:1'], chunks=m, checkpoint='never')

    @torch.no_grad()
    def forward() -> None:
        for part, _ in samples:
            cells(part)

    @torch.no_grad()
    def pipelined_forward() -> None:
        model(x)

    def train() -> None:
        for part, target in samples:
            (F.mse_loss(cells(part), target) / m).backward()

    def train_cell(j: int) -> None:
        torch.set_num_threads(1)  # It holds for a thread.
        for part, target in samples:
            output = cells[j](part.clone().requires_grad_(j > 0))
            (F.mse_loss(output, target) / m).backward()

    def train_cells_in_turn() -> None:
        train_cell(0)
        train_cell(1)

    def train_cells_in_threads() -> None:
        threads = [threading.Thread(target=train_cell, args=[j]) for j in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return {
        FORWARD: (forward, pipelined_forward),
        STEP: (train, lambda: model.step(x, y, F.mse_loss, schedule='1f1b')),
        THREADS: (train_cells_in_turn, train_cells_in_threads),
    }


def measure(stack: Stack, milliseconds: float, m: int, rounds: int) -> list[dict[str, Any]]:
    """Time a forward pass and a training step, serial and pipelined: medians over rounds."""
    depth = max(1, round(milliseconds / 1e3 / stack.layer_seconds()))
    calls: dict[tuple[str, int], Call] = {}
    for kind, (serial, pipelined) in contenders(stack.build(2, depth), stack, m).items():
        calls[kind, 1] = serial
        calls[kind, 2] = pipelined
    time_in_turn(calls, 2)
    times = time_in_turn(calls, rounds)

    cases = []
    for kind in KINDS:
        serial_times, pipeline_times = times[kind, 1], times[kind, 2]
        speed_up = median(one / two for one, two in zip(serial_times, pipeline_times))
        ideal = 2.0 if kind == THREADS else 2 * m / (m + 1)
        cases.append(
            {
                'what': kind,
                'milliseconds': milliseconds,
                'chunks': m,
                'layers': depth,
                'serial_ms': median(serial_times) * 1e3,
                'pipeline_ms': median(pipeline_times) * 1e3,
                'speed_up': speed_up,
                'share': speed_up / ideal,
            }
        )
    return cases


@click.command()
@rounds_option(9)
@output_option
def concurrency(rounds: int, output: str) -> None:
    """Time two equal partitions on cpu:0 and cpu:1 against one after the other.

    A forward pass by the plain call and a training step by 1F1B, without checkpoints, for several
    sizes of cells and numbers of micro-batches, one intra-op thread each.
    """
    folder = output_folder(output)
    results: list[dict[str, Any]] = []
    with one_thread():
        for (size, width), m in tqdm([*product(CELLS.items(), CHUNKS)], leave=False):
            results += measure(perceptron(width, ROWS), size, m, rounds)
    SECTION.publish(results, folder)


def share_rows(results: Sequence[dict[str, Any]], kind: str) -> Rows:
    """Return the header and the rows of the measurements of a forward pass or a step."""
    header = [kind]
    rows: dict[float, list[str]] = {}
    for case in results:
        if case['what'] != kind:
            continue
        size = case['milliseconds']
        cells = rows.setdefault(size, [f'cells of {size:g} ms'])
        cells.append(f'{case["share"]:.2f} ({case["speed_up"]:.2f} ×)')
        column = f'm = {case["chunks"]}'
        if column not in header:
            header.append(column)
    return header, [*rows.values()]


def share_panels(results: Sequence[dict[str, Any]]) -> list[Curves]:
    """Return a panel for each kind: the share by the number of micro-batches."""
    panels = []
    for kind in KINDS:
        curves: dict[str, tuple[list[float], list[float]]] = {}
        for case in results:
            if case['what'] == kind:
                name = f'cells of {case["milliseconds"]:g} ms'
                numbers, shares = curves.setdefault(name, ([], []))
                numbers.append(case['chunks'])
                shares.append(case['share'])
        panels.append(Curves(f'micro-batches: {kind}', 'share of the ideal speed-up', curves))
    return panels


def _parts(results: Sequence[dict[str, Any]]) -> list[Part]:
    return [*(share_rows(results, kind) for kind in KINDS), MEANING]


SECTION = Section('Two partitions at the same time', 'concurrency', _parts, share_panels)
COMMANDS = [concurrency]
SECTIONS = [SECTION]
